"""What docs/owned.md shows is true: its script runs, its options are the code's, its headings exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.config import HostConfig, OwnedConfig
from lwopt_backend.rule_options import MuonOptions
from tests.launcher import ROOT, run_page

PAGE = (ROOT / "docs" / "owned.md").read_text()


def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    printed = run_page(PAGE, tmp_path)
    (loss,) = re.findall(r"loss (\d\.\d+) after 40 steps", printed)
    assert float(loss) < 2.0
    assert "Routing: 4 of 11 trained parameters are matrices" in printed
    assert "Storage: owned by 2 data-parallel ranks" in printed and "Layout: 4 " in printed


def test_every_option_is_in_the_table_with_its_default() -> None:
    table = PAGE[PAGE.index("## Options") : PAGE.index("## What is refused")]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE)
    defaults = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    own = {name: field for name, field in OwnedConfig.model_fields.items() if name not in HostConfig.model_fields}
    arguments = set(inspect.signature(LayerWiseOptimizer.__init__).parameters)
    assert set(defaults) >= set(own) and set(defaults) - set(own) <= arguments
    for name, field in own.items():
        spelled = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        assert defaults[name].strip('`"') == spelled, name
    shared = set(re.findall(r"`(\w+)`", table.partition("| option")[0]))
    assert shared >= {"matrix", "lr", "elementwise", "elementwise_lr", "params"}
    assert shared <= arguments | set(HostConfig.model_fields) | set(MuonOptions.model_fields)


def test_every_method_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(\w+)\([^`]*\)`", PAGE)) | set(re.findall(r"`(\w+)\(", PAGE))
    others = {"lcm"}
    assert {name for name in named - others if not hasattr(LayerWiseOptimizer, name)} <= {"state_dict"}
