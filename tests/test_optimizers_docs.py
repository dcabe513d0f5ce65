"""What docs/optimizers.md shows is true: its script runs, its entries are understood."""

from __future__ import annotations

import json
import re
import sys

from lwopt_backend.atom_settings import AtomSettings
from lwopt_backend.chosen import settings_of
from lwopt_backend.config import ZeROConfig
from lwopt_backend.fused_families import TABLE
from lwopt_backend.registry import ELEMENTWISE_RULES, MATRIX_RULES
from tests.launcher import ROOT, run_on_cpu

PAGE = (ROOT / "docs" / "optimizers.md").read_text()
BLOCKS = dict(re.findall(r"^```json (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def test_a_users_own_rule_runs_as_printed(tmp_path) -> None:
    ((name, script),) = re.findall(r"^```python (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / name).write_text(script)
    finished = run_on_cpu(f"{sys.executable} {name}", tmp_path)
    assert finished.returncode == 0, finished.stdout
    assert float(re.findall(r"loss (\d\.\d+)", finished.stdout)[0]) < 0.1
    rule = script[script.index("@dataclass") : script.index("\n\nmodel")]
    assert len([line for line in rule.splitlines() if line.strip()]) <= 20


def test_the_entries_are_understood() -> None:
    entry = json.loads(BLOCKS["entry"])
    rules, _ = settings_of(ZeROConfig, entry["params"], entry["type"])
    assert rules.overrides[0].matrix == {"lr": 0.01}
    rules, _ = settings_of(ZeROConfig, json.loads(BLOCKS["params"]), "LayerWise")
    assert rules.matrix.options.precondition_frequency == 10
    AtomSettings.parse(json.loads(BLOCKS["atoms"]))


def test_the_page_knows_how_many_classes_are_known() -> None:
    assert f"{len(TABLE)} classes of transformers" in PAGE


def test_every_rule_is_in_the_table() -> None:
    table = PAGE[PAGE.index("## Which rules there are") : PAGE.index("## Other options")]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == ({*MATRIX_RULES, *ELEMENTWISE_RULES} - {"torch_optimizer_elementwise"})
