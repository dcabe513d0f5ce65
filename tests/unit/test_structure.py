"""The architecture holds: who imports whom. What is packaged: test_package.py."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, INTEGRATIONS = ROOT / "lwopt_backend", ROOT / "integrations"
STANDARD = tuple(sys.stdlib_module_names)
SHOWING = ("cli", "planner")  # what only shows plans
FSDP2 = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh")
MAY_IMPORT = {"plan": (), "rules": ("torch",), "runtime": ("torch", "lwopt_backend.plan", "lwopt_backend.rules")}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Every module a file imports, also inside functions, as dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def files(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_plan_rules_and_runtime_import_little_but_themselves(folder: str) -> None:
    for path in files(PACKAGE / folder):
        for module in imports(path):
            assert within(module, f"lwopt_backend.{folder}", *MAY_IMPORT[folder], *STANDARD), (path, module)


LAYERS = [  # each imports only what stands before it
    *("plan", "rules", "runtime", "config", "routing", "qk_clip", "groups", "checkpoint", "engines.gradients"),
    *("engines.output", "engines.base", "engines.zero", "engines.report", "engines.buffers", "engines.first_pass"),
    *("engines.fsdp2", "engines.owned", "migration", "optimizer"),
    *("engines.modules", "explanation", "run", "planner", "cli", ""),
]


def layer_of(module: str) -> int:
    """The number in LAYERS of a module, of which a longer name is found first."""
    inner = module.removeprefix("lwopt_backend").removeprefix(".")
    return (
        next(number for number, layer in reversed([*enumerate(LAYERS)]) if layer and within(inner, layer))
        if inner
        else len(LAYERS)
    )


def test_folders_import_only_those_below_them() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files(PACKAGE)
    }
    for module, path in modules.items():
        if module in ("lwopt_backend", "lwopt_backend.engines"):
            continue
        for imported in imports(path) & modules.keys() - {"lwopt_backend", "lwopt_backend.engines"}:
            assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}"


def test_training_code_does_not_import_what_only_shows_plans() -> None:
    showing = {path for name in SHOWING for path in files(PACKAGE / name)}
    for path in {*files(PACKAGE, INTEGRATIONS)} - showing:
        assert not any(within(module, *(f"lwopt_backend.{name}" for name in SHOWING)) for module in imports(path)), path


def test_torch_distributed_has_one_door() -> None:
    """Its collectives; FSDP2 and its DTensors are a host, read where hosts are; checkpoints' files need no ranks."""
    hosts = {PACKAGE / "engines" / "fsdp2": FSDP2, PACKAGE / "checkpoint" / "dcp": ("torch.distributed.checkpoint",)}
    for path in set(files(PACKAGE, INTEGRATIONS)) - {PACKAGE / "runtime" / "collectives.py"}:
        used = {module for module in imports(path) if within(module, "torch.distributed")}
        assert all(within(module, *hosts.get(path.parent, ())) for module in used), (path, used)


def test_no_context_manager_spans_a_yield_of_a_task() -> None:
    """It would stay on for whoever goes on with the task, such as a gradient's hook."""
    tree = ast.parse((PACKAGE / "runtime" / "step.py").read_text())
    tasks = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and yields(node)]
    assert {task.name for task in tasks} == {"_exchanged", "reduced", "returned"}
    assert not any(yields(node) for task in tasks for node in ast.walk(task) if isinstance(node, ast.With))


def yields(node: ast.AST) -> bool:
    return any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(node))


def test_no_class_does_anything_when_it_is_deleted() -> None:
    """Collectives are waited for by what closes a task, and by finalizers, which do nothing while Python exits."""
    for path in files(PACKAGE, INTEGRATIONS):
        assert "def __del__" not in path.read_text(), path


def test_imports_of_integrations_and_hosts() -> None:
    """Nobody imports the integrations but themselves, and the package imports no host."""
    for path in files(PACKAGE):
        assert not any(within(module, "lwopt_backend.integrations") for module in imports(path)), path
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files(PACKAGE)]
    names = ", ".join(module.removesuffix(".__init__") for module in modules)
    code = f"import sys, {names}; assert 'deepspeed' not in sys.modules"
    tried = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert tried.returncode == 0, tried.stderr


def test_integrations_refuse_their_bare_name() -> None:
    """Integrations are not imported from the checkout by their bare name."""
    tried = subprocess.run([sys.executable, "-c", "import integrations"], cwd=ROOT, capture_output=True, text=True)
    assert tried.returncode != 0 and "import this package as 'lwopt_backend.integrations'" in tried.stderr


def test_names_of_tests_have_at_most_60_characters() -> None:
    """A person greps for them; the docstring is the sentence."""
    for path in files(ROOT / "tests"):
        assert not re.findall(r"def test_\w{56,}", path.read_text()), path
