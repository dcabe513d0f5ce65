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
from tests.zero import config, engine_for

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
    """scripts/oldest_deepspeed.py says which one it wants tested; without it, it is the one that pip installed."""
    asked = os.environ.get("DEEPSPEED_UNDER_TEST") or importlib.metadata.version("deepspeed")
    assert deepspeed.__version__ == asked
    assert ranks.run(versions) == [versions()] * 2


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (Name("deepspeed.gone", "anything", "a why"), "deepspeed.gone: cannot be imported: No module named"),
        (Name(ENGINE, "gone", "a why"), f"{ENGINE}: has no gone (a why)"),
        (Name(ENGINE, "Gone.anything", "a why"), f"{ENGINE}: has no Gone, and so no Gone.anything (a why)"),
        (Name(ENGINE, "DeepSpeedEngine.gone", "a why"), f"{ENGINE}: has no DeepSpeedEngine.gone (a why)"),
        (Name(ENGINE, "param._z3_optimizer", "a why"), f"{ENGINE}: gives no '_z3_optimizer' to parameters (a why)"),
        (
            Name(ENGINE, "DeepSpeedEngine._get_zero_param_shapes", "a why", ("self", "stage")),
            f"{ENGINE}: DeepSpeedEngine._get_zero_param_shapes takes (self), expected (self, stage) (a why)",
        ),
    ],
    ids=lambda value: value.path if isinstance(value, Name) else "",
)
def test_a_name_that_is_missing_is_a_sentence(name: Name, sentence: str) -> None:
    (found,) = deepspeed_check.missing([name])
    assert found.startswith(sentence)


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


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.18.9", "an older one lacks what it needs"),
        ("0.19.6", "an older one lacks what it needs"),
        ("0.20.0rc1", "a newer one may have moved what it replaces"),
        ("0.20.0+cuda", "a newer one may have moved what it replaces"),
        ("1.0", "a newer one may have moved what it replaces"),
    ],
)
def test_other_versions_are_refused(
    register: Callable[[], None], monkeypatch: pytest.MonkeyPatch, version: str, reason: str
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.raises(ImportError) as raised:
        register()
    message = str(raised.value)
    assert f"DeepSpeed {version} is installed, but lwopt_backend supports {SUPPORTED}: {reason}" in message
    assert f"pip install 'deepspeed{SUPPORTED}'" in message
    assert ("a newer lwopt_backend" in message) == ("newer one" in reason)


@pytest.mark.parametrize("version", [OLDEST, f"{OLDEST}+local", "0.19.99", "0.19.9.dev0"])
def test_supported_versions_are_taken(
    register: Callable[[], None], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    register()


def test_pip_installs_what_is_supported() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["deepspeed"] == [f"deepspeed{SUPPORTED}"]


class Uses(ast.NodeVisitor):
    """What a file uses of DeepSpeed, as far as its text tells: what it imports; attributes of what is called engine,
    or was read from one; private attributes and ``ds_...`` of anything but ``self``; and names in constants."""

    def __init__(self, path: Path) -> None:
        self.imported: set[str] = set()
        self.names: set[str] = set()
        self._hosts = {"engine", "wrapper"}  # variables that hold something of DeepSpeed's
        self.visit(ast.parse(path.read_text()))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "deepspeed":
            self.imported |= {f"{node.module}.{alias.name}" for alias in node.names}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = set(self._hosts)
        self.generic_visit(node)
        self._hosts = before

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        pairs = [(target, node.value) for target in node.targets]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts))
        for variable, value in pairs:
            if isinstance(variable, ast.Name) and isinstance(value, ast.Attribute) and value.attr in self.names:
                self._hosts.add(variable.id)
            if isinstance(variable, ast.Name) and variable.id.isupper():
                texts = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                self.names |= {text for text in texts if text.isidentifier() and "_" in text}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self._attribute(node.value, node.attr)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr"):
            holder, name = node.args[:2]
            if isinstance(name, ast.Constant):
                self._attribute(holder, name.value)

    def _attribute(self, holder: ast.expr, name: str) -> None:
        ours = isinstance(holder, ast.Name) and holder.id in ("self", "cls")
        private = name.startswith("_") and not name.startswith(("__", "_lwopt"))
        if self._is_host(holder) or (not ours and (private or name.startswith("ds_"))):
            self.names.add(name)

    def _is_host(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "engine" or (node.attr.startswith("_") and self._is_host(node.value))
        return isinstance(node, ast.Name) and node.id in self._hosts


def test_what_a_file_uses_is_found(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(
        "from deepspeed.a import b\n"
        "HOOKED = '_hook'\n"
        "def f(self, engine, param, binding):\n"
        "    zero, plain = param._zero, param.shape\n"
        "    zero.places, plain.numel, self._own, binding.engine.device.type, engine._config.table\n"
        "    getattr(param, 'ds_size', None), getattr(engine, 'read'), getattr(param, 'tag', None)\n"
        "def g(zero):\n"
        "    zero.free\n"
    )
    uses = Uses(tmp_path / "uses.py")
    assert uses.imported == {"deepspeed.a.b"}
    assert uses.names == {"_hook", "_zero", "places", "device", "_config", "table", "ds_size", "read"}


@pytest.mark.parametrize("path", USERS, ids=lambda path: path.stem)
def test_the_list_has_every_name_that_a_file_uses(path: Path) -> None:
    uses = Uses(path)
    places = {f"{name.module}.{name.path}" for name in NAMES} | {
        f"{name.module}.{name.path.split('.')[0]}" for name in NAMES if "." in name.path
    }
    assert uses.imported <= places
    assert uses.names - DOCUMENTED <= {name.path.rpartition(".")[2] for name in NAMES}


def test_the_list_has_no_name_that_nothing_uses() -> None:
    text = "\n".join(path.read_text() for path in [*USERS, ROOT / "lwopt_backend" / "routing.py"])
    assert {name.path for name in NAMES if not re.search(rf"\b{name.path.rpartition('.')[2]}\b", text)} == set()


def test_no_name_is_listed_twice() -> None:
    paths = [(name.module, name.path) for name in NAMES]
    assert len(paths) == len(set(paths))


def build_at_stage_3() -> None:
    with engine_for(config(3)):
        pass


def test_stage_3_on_a_cpu_is_refused_where_gathering_is_not_waited_for(ranks: RankPool) -> None:
    if deepspeed.__version__ != "0.19.7":
        ranks.run(build_at_stage_3)
        return
    for error in ranks.errors(build_at_stage_3):
        assert "zero_optimization.stage is 3 on a CPU, where DeepSpeed 0.19.7 uses parameters before all" in error
