"""The installed DeepSpeed has every name that the integration uses, and what is not supported is refused by name."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import deepspeed
import pytest
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.integrations import deepspeed_check, deepspeed_zero
from lwopt_backend.integrations.deepspeed_names import NAMES, OLDEST, SUPPORTED, Name
from tests.ranks import RankPool
from tests.zero import build, config

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "integrations").glob("deepspeed_*.py"))
USERS = [path for path in FILES if path.name not in ("deepspeed_names.py", "deepspeed_check.py")]
DOCUMENTED = {"module"}  # model_engine.module, in DeepSpeed's tutorials
ENGINE = "deepspeed.runtime.engine"


def test_the_installed_deepspeed_has_every_name() -> None:
    assert deepspeed_check.missing() == []


def versions() -> tuple[str, str]:
    return deepspeed.__version__, str(Path(deepspeed.__file__).parent)


def test_ranks_run_the_deepspeed_that_was_asked_for(ranks: RankPool) -> None:
    """scripts/oldest.py says which one it wants tested; without it, it is the one that pip installed."""
    asked = os.environ.get("DEEPSPEED_UNDER_TEST") or importlib.metadata.version("deepspeed")
    assert deepspeed.__version__ == asked
    assert ranks.run(versions) == [versions()] * 2


def test_a_name_that_is_missing_is_a_sentence() -> None:
    shapes = "DeepSpeedEngine._get_zero_param_shapes"
    for path, parameters, problem in (
        ("gone", None, "has no gone"),
        ("Gone.anything", None, "has no Gone, and so no Gone.anything"),
        ("DeepSpeedEngine.gone", None, "has no DeepSpeedEngine.gone"),
        ("param._z3_optimizer", None, "gives no '_z3_optimizer' to parameters"),
        (shapes, ("self", "stage"), f"{shapes} takes (self), expected (self, stage)"),
    ):
        assert deepspeed_check.missing([Name(ENGINE, path, "a why", parameters)]) == [f"{ENGINE}: {problem} (a why)"]
    (found,) = deepspeed_check.missing([Name("deepspeed.gone", "anything", "a why")])
    assert found.startswith("deepspeed.gone: cannot be imported: No module named")


@pytest.fixture
def register() -> Iterator[Callable[[], None]]:
    """``deepspeed_zero.register``, which checks anew."""
    deepspeed_check.check.cache_clear()
    yield deepspeed_zero.register
    deepspeed_check.check.cache_clear()


def test_all_names_that_are_missing_are_listed_at_once(
    register: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(DeepSpeedEngine, "zero_sub_group_size")
    monkeypatch.setattr(DeepSpeedEngine, "load_checkpoint", lambda self, load_dir: None)
    with pytest.raises(ImportError) as raised:
        register()
    first, *problems, advice = str(raised.value).splitlines()
    assert deepspeed.__version__ in first and f"deepspeed{SUPPORTED}" in advice
    assert [problem.split(" (")[0].strip() for problem in problems] == [
        f"{ENGINE}: DeepSpeedEngine.load_checkpoint takes",
        f"{ENGINE}: has no DeepSpeedEngine.zero_sub_group_size",
    ]


OLDER, NEWER = "an older one lacks what it needs", "a newer one may have moved what it replaces"


def test_other_versions_are_refused(register: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (OLDEST, f"{OLDEST}+local", "0.19.99", "0.19.9.dev0"):
        monkeypatch.setattr(deepspeed, "__version__", version)
        register()
        deepspeed_check.check.cache_clear()
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


def uses(text: str) -> tuple[set[str], set[str]]:
    """What a file uses of DeepSpeed, as far as its text tells: what it imports; and attributes of what is called engine
    or wrapper, what is private or begins with ``ds_`` of anything but ``self``, and names in constants."""
    tree, names = ast.parse(text), set()
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed"
        for alias in node.names
    }
    for node in ast.walk(tree):
        holder, name = None, ""
        if isinstance(node, ast.Attribute):
            holder, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            holder, name = ast.unparse(node.args[0]), str(getattr(node.args[1], "value", ""))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).isupper():
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            names |= {text for text in texts if text.isidentifier() and "_" in text}
        private = name.startswith(("_", "ds_")) and not name.startswith(("__", "_lwopt"))
        # What is read from something of DeepSpeed's is DeepSpeed's, too.
        of_theirs = re.search(r"(^|\.)(engine|wrapper|zero|mapping)(\._\w+)*$", holder or "") is not None
        if name and (of_theirs or (private and holder not in ("self", "cls"))):
            names.add(name)
    return imported, names


def test_the_list_has_every_name_that_a_file_uses() -> None:
    places = {f"{name.module}.{path}" for name in NAMES for path in (name.path, name.path.split(".")[0])}
    known = {name.path.rpartition(".")[2] for name in NAMES} | DOCUMENTED
    found = {path.name: uses(path.read_text()) for path in USERS}
    assert {file: imported - places for file, (imported, _) in found.items() if imported - places} == {}
    assert {file: names - known for file, (_, names) in found.items() if names - known} == {}
    assert len(set().union(*(names for _, names in found.values()))) > len(known) / 2, "most of them are found"


def test_the_list_has_no_name_twice_and_none_that_nothing_uses() -> None:
    text = "\n".join(path.read_text() for path in [*USERS, ROOT / "lwopt_backend" / "routing.py"])
    assert {name.path for name in NAMES if not re.search(rf"\b{name.path.rpartition('.')[2]}\b", text)} == set()
    assert len(NAMES) == len({(name.module, name.path) for name in NAMES})


def test_stage_3_on_a_cpu_is_refused_where_gathering_is_not_waited_for(ranks: RankPool) -> None:
    if deepspeed.__version__ != "0.19.7":
        ranks.run(build, config(3))
        return
    for error in ranks.errors(build, config(3)):
        assert "zero_optimization.stage is 3 on a CPU, where DeepSpeed 0.19.7 uses parameters before all" in error
