"""Types reach users: the script that mypy checks uses every public name, and runs. test_package.py has the marker."""

import ast
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from lwopt_backend.config.registry import ELEMENTWISE_RULES, MATRIX_RULES
from tests import typed_user

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = [  # where users' scripts import from
    *(ROOT / "lwopt_backend" / name for name in ("__init__.py", "migration.py", "rules/__init__.py")),
    ROOT / "integrations" / "fsdp2.py",
]
MARKDOWN = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
IN_MARKDOWN = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_typed_user_uses_every_public_name() -> None:
    """What the public modules list, and what the documentation and the examples import."""
    text = (ROOT / "tests" / "typed_user.py").read_text()
    used = imported(text) | set(re.findall(r"\b\w+\.(\w+)", text))
    listed = {
        name
        for path in PUBLIC
        for names in re.findall(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
        for name in ast.literal_eval(names)
    }
    for path in (ROOT / "integrations" / "deepspeed_zero.py", ROOT / "integrations" / "deepspeed" / "migration.py"):
        listed |= set(re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", path.read_text(), re.MULTILINE))
    codes = [code for path in MARKDOWN for code in IN_MARKDOWN.findall(path.read_text())]
    codes += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    shown = set().union(*map(imported, codes))
    assert len(listed) > 20 and "parse" in shown
    assert sorted((listed | shown) - used) == []


def imported(code: str) -> set[str]:
    """The names that code imports of the package, without what needs torchtitan (tests/peers)."""
    froms = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    modules = [(node.module or "").split(".") for node in froms]
    ours = [node for node, path in zip(froms, modules) if path[0] == "lwopt_backend" and path[-1] != "torchtitan"]
    return {alias.name for node in ours for alias in node.names}


def test_the_typed_user_trains(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    before = [param.detach().clone() for param in model.parameters()]
    with mock.patch.dict(MATRIX_RULES), mock.patch.dict(ELEMENTWISE_RULES):
        typed_user.register_own_rules()
        optimizer = typed_user.train_plain(model, list(torch.randn(3, 5, 4)), tmp_path)
    assert all(not torch.equal(param.detach(), old) for param, old in zip(model.parameters(), before))
    with pytest.raises(ValueError, match="there is no state of parameter"):
        typed_user.resume(optimizer, {"state": {}, "param_groups": []}, [])
