"""What docs/migration.md shows is true."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend import migration as public
from lwopt_backend.rule_options import AdamWOptions, MuonOptions
from lwopt_backend.rules.coefficients import table_of
from tests.launcher import run_page
from tests.migration import PAGE, PEERS, entry, rules_for
from tests.models import UnevenLM


def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    printed = run_page(PAGE, tmp_path)
    assert "largest difference after 10 more steps: 0.0" in printed


def test_snippets_parse_and_import_what_there_is() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        imports = [node for node in ast.parse(snippet).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert imports
        exec(compile(ast.Module(imports, type_ignores=[]), "snippet", "exec"), {})
    found = {name for name in re.findall(r"`(\w+)`", PAGE) if hasattr(public, name)}
    assert found >= {"from_checkpoint", "load_named_state", "convert_momentum", "convert_named_momentum"}


@pytest.mark.parametrize("peer", PEERS)
def test_the_settings_are_arguments_in_python_too(peer: str) -> None:
    optimizer = LayerWiseOptimizer(UnevenLM(), **entry(peer)["params"], report=False)
    rules = rules_for(peer)
    for group, choice in zip(optimizer.param_groups, (rules.matrix, rules.elementwise), strict=True):
        assert group["rule"] == choice.rule
        for key, value in choice.options.model_dump().items():
            assert group[key] == value


def test_every_peer_has_a_table_and_every_key_in_it_is_ours() -> None:
    assert re.findall(r"^```json (\w+)$", PAGE, re.MULTILINE) == PEERS
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", PAGE, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(matrix|elementwise)\.(\w+)`", row)}
    muon, adamw = (choice.options for choice in (rules_for("torch").matrix, rules_for("torch").elementwise))
    assert len(keys) > 15
    for kind, key in keys:
        assert key in type(muon if kind == "matrix" else adamw).model_fields, (kind, key)


def rows_on_the_page(heading: str) -> list[list[str]]:
    """The four columns of a section's table, below its head."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)][2:]


def values_in(cell: str) -> list[Any]:
    """What a cell lists, numbers as numbers; what is no value as its text."""
    words = {"on": True, "off": False, "none": None}
    return [words[v] if v in words else parsed(v) for v in re.findall(r"\([^)]*\)|[^,\s`][^,`]*", cell)]


def parsed(value: str) -> Any:
    try:
        found = json.loads(re.sub(r"^\((.*)\)$", r"[\1]", value))
    except json.JSONDecodeError:
        return value
    return tuple(found) if isinstance(found, list) else found


def paired(names: list[str], cell: str) -> list[tuple[str, Any]]:
    """A default for each name, or the same for all; nothing where the cell lists something else."""
    values = values_in(cell)
    if cell in ("", "the same") or len(values) not in (1, len(names)):
        return []
    return list(zip(names, values * len(names) if len(values) == 1 else values))


@pytest.mark.parametrize("heading", re.findall(r"^## (.*)$", PAGE, re.MULTILINE)[1:8])
def test_our_defaults_on_the_page_are_ours(heading: str) -> None:
    models = {"matrix": MuonOptions(), "elementwise": AdamWOptions(), "adamw": AdamWOptions()}
    checked = set()
    for _, ours, _, cell in rows_on_the_page(heading):
        tokens = [token.rpartition(".")[::2] for token in re.findall(r"`([\w.]+)`", ours)]
        options = [(section or "matrix", key) for section, key in tokens]
        known = [(section, key) for section, key in options if hasattr(models.get(section), key)]
        for (section, key), value in paired(known, cell):
            default = getattr(models[section], key)
            if key == "ns_coefficients":
                value, default = (table_of(which).triples for which in (value, default))
            assert value == (default or "original" if key == "adjust_lr_fn" else default), key
            checked.add(key)
    assert checked >= {"lr", "weight_decay", "momentum"} - ({"momentum"} if heading == "pytorch_optimizer" else set())


@pytest.mark.parametrize(
    ("heading", "peer"), [("torch.optim.Muon", torch.optim.Muon), ("pytorch_optimizer", pytorch_optimizer.Muon)]
)
def test_their_defaults_on_the_page_are_theirs(heading: str, peer: Any) -> None:
    arguments = inspect.signature(peer).parameters
    checked = 0
    for theirs, _, cell, _ in rows_on_the_page(heading):
        for name, value in paired([name for name in re.findall(r"`(\w+)`", theirs) if name in arguments], cell):
            if name != "adjust_lr_fn":
                assert arguments[name].default == value, name
                checked += 1
    assert checked >= 7


def test_every_heading_is_in_the_list() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert re.findall(r"^- \[(.*?)\]\(#", PAGE, re.MULTILINE) == headings
