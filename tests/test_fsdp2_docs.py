"""What docs/fsdp2.md shows is true: its script runs, its table is the tests' table, its options are the code's."""

from __future__ import annotations

import re
from pathlib import Path

from lwopt_backend.config import FSDP2Config
from tests.fsdp2 import MODES, SHARDINGS
from tests.launcher import ROOT, run_page

PAGE = (ROOT / "docs" / "fsdp2.md").read_text()


def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    printed = run_page(PAGE, tmp_path)
    (loss,) = re.findall(r"loss (\d\.\d+) after 40 steps", printed)
    assert float(loss) < 2.0
    assert "Routing: 4 of 11 trained parameters are matrices" in printed


def test_the_support_table_is_the_tests_table() -> None:
    section = PAGE[PAGE.index("## What works") : PAGE.index("## How a step goes")]
    header, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert [cell.strip("| ") for cell in header if cell.strip("| ")] == list(SHARDINGS)
    assert [row[0] for row in rows] == list(MODES)
    for mode, *cells in rows:
        expected = {"~"} if mode == "bf16 parameters" else {"0.0", "untied"}
        assert len(cells) == len(SHARDINGS) and set(cells) <= expected
        assert [sharding for sharding, cell in zip(SHARDINGS, cells) if cell == "untied"] == (
            ["several roots"] if mode == "tied" else []
        )


def test_every_option_is_in_the_table() -> None:
    table = PAGE[PAGE.index("## Options") : PAGE.index("## Measured")]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    arguments = {"matrix", "lr", "elementwise", "elementwise_lr", "overrides", "params", "sharded_later"}
    assert named == arguments | set(FSDP2Config.model_fields)
