"""Which DeepSpeed is supported, and what an unsupported one or one that lacks names is told."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.integrations import deepspeed_zero
from lwopt_backend.integrations.deepspeed import versions
from lwopt_backend.integrations.deepspeed.versions import OLDEST, SUPPORTED
from tests.ranks import RankPool
from tests.zero import build, config

ROOT = Path(__file__).resolve().parent.parent


def installed() -> tuple[str, str]:
    return deepspeed.__version__, str(Path(deepspeed.__file__).parent)


def test_ranks_run_the_deepspeed_that_was_asked_for(ranks: RankPool) -> None:
    """scripts/oldest.py says which one it wants tested; without it, it is the one that pip installed."""
    asked = os.environ.get("DEEPSPEED_UNDER_TEST") or importlib.metadata.version("deepspeed")
    assert deepspeed.__version__ == asked
    assert ranks.run(installed) == [installed()] * 2


@pytest.fixture
def register() -> Iterator[Callable[[], None]]:
    """``deepspeed_zero.register``, which checks anew."""
    versions.check.cache_clear()
    yield deepspeed_zero.register
    versions.check.cache_clear()


def test_names_that_are_missing_are_listed_at_once(
    register: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    register()  # this one has them all
    versions.check.cache_clear()
    monkeypatch.delattr(DeepSpeedEngine, "zero_sub_group_size")
    monkeypatch.setitem(versions.NAMES, "deepspeed.gone", "anything")
    with pytest.raises(ImportError) as raised:
        register()
    message = str(raised.value)
    assert deepspeed.__version__ in message and f"deepspeed{SUPPORTED}" in message
    assert ": deepspeed.runtime.engine.DeepSpeedEngine.zero_sub_group_size, deepspeed.gone. " in message


OLDER, NEWER = "an older one lacks what it needs", "a newer one may have moved what it replaces"


def test_other_versions_are_refused(register: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (OLDEST, f"{OLDEST}+local", "0.19.99", "0.19.9.dev0"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        register()
        versions.check.cache_clear()
    reasons = {"0.18.9": OLDER, "0.19.6": OLDER, "0.20.0rc1": NEWER, "0.20.0+cuda": NEWER, "1.0": NEWER}
    for version, reason in reasons.items():
        monkeypatch.setattr(deepspeed, "__version__", version)
        with pytest.raises(ImportError) as raised:
            register()
        message = str(raised.value)
        assert f"DeepSpeed {version} is installed, but lwopt_backend supports {SUPPORTED}: {reason}" in message
        assert f"pip install 'deepspeed{SUPPORTED}'" in message
        assert ("a newer lwopt_backend" in message) == (reason == NEWER)


def test_pip_installs_what_is_supported() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["deepspeed"] == [f"deepspeed{SUPPORTED}"]


def test_stage_3_on_a_cpu_is_refused_where_gathering_is_not_waited_for(ranks: RankPool) -> None:
    if deepspeed.__version__ != "0.19.7":
        ranks.run(build, config(3))
        return
    for error in ranks.errors(build, config(3)):
        assert "zero_optimization.stage is 3 on a CPU, where DeepSpeed 0.19.7 uses parameters before all" in error
