"""The architecture holds: who imports whom, and what is packaged."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lwopt_backend"


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions, as dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", files(PACKAGE / "plan"), ids=lambda path: path.name)
def test_plan_imports_the_standard_library_and_itself(path: Path) -> None:
    for module in imports(path):
        assert within(module, "lwopt_backend.plan", *sys.stdlib_module_names), module


@pytest.mark.parametrize("path", files(PACKAGE / "rules"), ids=lambda path: path.name)
def test_rules_import_torch_and_never_its_collectives(path: Path) -> None:
    for module in imports(path):
        assert within(module, "lwopt_backend.rules", "torch", *sys.stdlib_module_names), module
        assert not within(module, "torch.distributed"), module


@pytest.mark.parametrize("path", files(PACKAGE / "runtime"), ids=lambda path: path.name)
def test_runtime_imports_plan_and_rules_only(path: Path) -> None:
    ours = ("lwopt_backend.runtime", "lwopt_backend.plan", "lwopt_backend.rules")
    for module in imports(path):
        assert within(module, *ours, "torch", *sys.stdlib_module_names), module


def test_training_code_does_not_import_what_only_shows_plans() -> None:
    shown = [f"lwopt_backend.{name}" for name in ("cli", "pictures", "study", "model_shapes", "calibrate")]
    showing = {path for name in ("cli", "pictures", "study", "model_shapes") for path in files(PACKAGE / name)}
    for path in {*files(PACKAGE, ROOT / "integrations")} - showing - {PACKAGE / "calibrate.py"}:
        assert not any(within(module, *shown) for module in imports(path)), path


FSDP2 = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh")
FILES = ("torch.distributed.checkpoint",)


def test_torch_distributed_has_one_door() -> None:
    """Its collectives; FSDP2 and its DTensors are a host, read where hosts are; checkpoints' files need no ranks."""
    for path in set(files(PACKAGE, ROOT / "integrations")) - {PACKAGE / "runtime" / "collectives.py"}:
        used = {module for module in imports(path) if within(module, "torch.distributed")}
        allowed = {ROOT / "integrations" / "fsdp2": FSDP2, PACKAGE / "checkpoint" / "dcp": FILES}.get(path.parent, ())
        assert all(within(module, *allowed) for module in used), (path, used)


def test_nobody_imports_the_integrations_but_themselves() -> None:
    for path in files(PACKAGE):
        assert not any(within(module, "lwopt_backend.integrations") for module in imports(path)), path


def test_importing_the_package_imports_no_host() -> None:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files(PACKAGE)]
    names = ", ".join(module.removesuffix(".__init__") for module in modules)
    code = f"import sys, {names}; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_packages_list_is_complete() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {"lwopt_backend": PACKAGE}
    for init in [*PACKAGE.rglob("__init__.py"), *(ROOT / "integrations").rglob("__init__.py")]:
        parts = init.parent.relative_to(ROOT).parts
        folders[".".join(parts if parts[0] == "lwopt_backend" else ("lwopt_backend", *parts))] = init.parent
    assert sorted(listed) == sorted(folders)
    assert all(any(folder.glob("*.py")) for folder in folders.values())


def test_integrations_refuse_to_be_imported_from_the_checkout_by_their_bare_name() -> None:
    tried = subprocess.run([sys.executable, "-c", "import integrations"], cwd=ROOT, capture_output=True, text=True)
    assert tried.returncode != 0 and "import this package as 'lwopt_backend.integrations'" in tried.stderr


def test_files_are_short() -> None:
    long = {
        str(path): n
        for path in files(PACKAGE, ROOT / "integrations")
        if (n := len(path.read_text().splitlines())) > 250
    }
    assert not long
