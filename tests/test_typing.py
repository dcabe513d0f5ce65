"""Types reach users: the package is marked as typed, and the script that mypy checks uses every public name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from lwopt_backend import _PLACES
from lwopt_backend.registry import ELEMENTWISE_RULES, MATRIX_RULES
from tests import typed_user

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {  # where users' scripts import from
    "lwopt_backend": "lwopt_backend/__init__.py",
    "lwopt_backend.migration": "lwopt_backend/migration/__init__.py",
    "lwopt_backend.rules": "lwopt_backend/rules/__init__.py",
    "lwopt_backend.integrations.fsdp2": "integrations/fsdp2/__init__.py",
    "lwopt_backend.integrations.deepspeed_zero": "integrations/deepspeed_zero.py",
    "lwopt_backend.integrations.deepspeed_migration": "integrations/deepspeed_migration.py",
}
DOCUMENTED = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
PLACED = {f"lwopt_backend.{name}" for name in _PLACES}
PYTHON_IN_MARKDOWN = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_typed_user_uses_every_public_name() -> None:
    """What the public modules list, and what the documentation and the examples import."""
    used = names_used(ast.parse((ROOT / "tests" / "typed_user.py").read_text()))
    listed = {defined(module, name) for module, path in PUBLIC.items() for name in public_names(ROOT / path)}
    shown = {name for path in DOCUMENTED for code in python_in(path) for name in names_used(ast.parse(code))}
    assert len(listed) > 25 and "lwopt_backend.options.parse" in shown
    assert sorted((listed | shown) - used) == []


def public_names(path: Path) -> list[str]:
    """``__all__`` of a module, or the functions and classes in it; without importing it, which needs its host."""
    body = ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"]


def defined(module: str, name: str) -> str:
    """A name by the module that the package itself takes it from."""
    return f"lwopt_backend.{_PLACES[name]}.{name}" if f"{module}.{name}" in PLACED else f"{module}.{name}"


def python_in(path: Path) -> Iterator[str]:
    text = path.read_text()
    yield from [text] if path.suffix == ".py" else PYTHON_IN_MARKDOWN.findall(text)


def names_used(tree: ast.Module) -> set[str]:
    """What code imports of the package, and the attributes that it reads of public modules."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lwopt_backend":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                imported[alias.asname or alias.name] = whole if whole in PUBLIC else defined(node.module, alias.name)
    read = {
        f"{module}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (module := imported.get(node.value.id)) in PUBLIC
    }
    return {*imported.values(), *read} - {*PUBLIC}


@pytest.fixture
def own_rules() -> Iterator[None]:
    typed_user.register_own_rules()
    yield
    for rules in (MATRIX_RULES, ELEMENTWISE_RULES):
        for name in [name for name in rules if name.startswith("typed_")]:
            del rules[name]


def test_the_typed_user_trains(own_rules: None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = typed_user.train_plain(model, list(torch.randn(3, 5, 4)), tmp_path)
    assert all(not torch.equal(param.detach(), old) for param, old in zip(model.parameters(), before))
    with pytest.raises(ValueError, match="there is no state of parameter"):
        typed_user.resume(optimizer, {"state": {}, "param_groups": []}, [])


def test_the_marker_of_types_is_installed() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in packaged["lwopt_backend"] and (ROOT / "lwopt_backend" / "py.typed").exists()
