"""Which DeepSpeed is supported, and what an unsupported one or one that lacks names is told."""

import copy
import importlib.metadata
import os
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.integrations import deepspeed_zero
from lwopt_backend.integrations.deepspeed import versions
from lwopt_backend.integrations.deepspeed.versions import OLDEST, SUPPORTED
from tests.launcher import ROOT
from tests.ranks import RankPool
from tests.zero import build, config


def installed() -> tuple[str, str]:
    return deepspeed.__version__, str(Path(deepspeed.__file__).parent)


def test_ranks_run_the_deepspeed_that_was_asked_for(ranks: RankPool) -> None:
    """scripts/oldest.py says which one it wants tested; without it, it is the one that pip installed."""
    asked = os.environ.get("DEEPSPEED_UNDER_TEST") or importlib.metadata.version("deepspeed")
    assert deepspeed.__version__ == asked
    assert ranks.run(installed) == [installed()] * 2


def test_names_that_are_missing_are_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check()  # this one has them all
    versions.check.cache_clear()
    monkeypatch.delattr(DeepSpeedEngine, "zero_sub_group_size")
    monkeypatch.setitem(versions.NAMES, "deepspeed.gone", "anything")
    missing = "deepspeed.runtime.engine.DeepSpeedEngine.zero_sub_group_size, deepspeed.gone. "
    with pytest.raises(ImportError, match=f"DeepSpeed {deepspeed.__version__} .*: {missing}.*deepspeed{SUPPORTED}"):
        deepspeed_zero.register()


OLDER, NEWER = "an older one lacks what it needs", "a newer one may have moved what it replaces"
REASONS = {"0.18.9": OLDER, "0.19.6": OLDER, "0.20.0rc1": NEWER, "0.20.0+cuda": NEWER, "1.0": NEWER}


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (OLDEST, f"{OLDEST}+local", "0.19.99", "0.19.9.dev0"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        versions.check.__wrapped__()
    for version, reason in REASONS.items():
        monkeypatch.setattr(deepspeed, "__version__", version)
        with pytest.raises(ImportError) as raised:
            versions.check.__wrapped__()
        message = str(raised.value)
        assert f"DeepSpeed {version} is installed, but lwopt_backend supports {SUPPORTED}: {reason}" in message
        assert f"pip install 'deepspeed{SUPPORTED}'" in message
        assert ("a newer lwopt_backend" in message) == (reason == NEWER)


def test_pip_installs_what_is_supported() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["deepspeed"] == [f"deepspeed{SUPPORTED}"]


WRONG_ON_CPUS = {  # what 0.19.7 does there, by the settings that make it
    "zero_optimization.stage is 3 on a CPU, where DeepSpeed 0.19.7 uses parameters before all": config(3),
    "zero_optimization.contiguous_gradients is false on a CPU, where DeepSpeed 0.19.7 does not reduce": config(1),
}


@pytest.mark.parametrize("message", WRONG_ON_CPUS)
def test_what_the_oldest_gets_wrong_on_cpus_is_refused_with_it_only(ranks: RankPool, message: str) -> None:
    settings = copy.deepcopy(WRONG_ON_CPUS[message])
    settings["zero_optimization"]["contiguous_gradients"] = False
    if deepspeed.__version__ != "0.19.7":
        ranks.run(build, settings)
    for error in ranks.errors(build_as_with_the_oldest, settings):
        assert message in error


def build_as_with_the_oldest(settings: dict[str, Any]) -> None:
    """On a rank: what is refused goes by DeepSpeed's version."""
    with mock.patch.object(deepspeed, "__version__", "0.19.7"):
        build(settings)
