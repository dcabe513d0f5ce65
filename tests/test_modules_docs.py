"""What docs/modules.md shows is true: its script runs, its headings and methods exist."""

from __future__ import annotations

import re
from pathlib import Path

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from tests.launcher import ROOT, run_page

PAGE = (ROOT / "docs" / "modules.md").read_text()


def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    printed = run_page(PAGE, tmp_path)
    (loss,) = re.findall(r"loss (\d\.\d+) after 40 steps, gradient norm \d\.\d+ over both modules", printed)
    assert float(loss) < 1.0


def test_every_method_that_the_page_names_exists() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(\w+)\([^`]*\)`", prose)) - {"LambdaLR"}
    assert named >= {"step", "clip_grad_norm_", "save_state_dict", "load_state_dict_from"}
    assert not {name for name in named if not hasattr(ModuleOptimizers, name)}
    assert not {
        name for name in re.findall(r"LayerWiseOptimizer\.(\w+)", prose) if not hasattr(LayerWiseOptimizer, name)
    }


def test_every_heading_is_in_the_list() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert re.findall(r"^- \[(.*?)\]", PAGE, re.MULTILINE) == headings
