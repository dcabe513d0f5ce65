"""What the README shows is true: its snippets run as printed, its commands exist, its names are the code's."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import typer

from lwopt_backend.cli.app import app
from lwopt_backend.muon_config import LayerWiseMuonConfig
from lwopt_backend.plan.cost import COSTS
from lwopt_backend.plan.machine import CLUSTERS
from lwopt_backend.rule_options import AdamWOptions
from tests.launcher import ROOT, run_on_cpu

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FILES = {name: text for _, name, text in BLOCKS if name and "." in name}
RUNS = [text for language, name, text in BLOCKS if language == "bash" and name == "run"]


def shell(command: str, folder: Path) -> str:
    """Run a snippet in a folder with the README's files, with this environment's programs first."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    finished = run_on_cpu(command, folder)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.parametrize("command", RUNS, ids=["train.py", "unmodified script"])
def test_the_training_snippets_run_as_printed(command: str, tmp_path: Path) -> None:
    if "--module" in command:  # an unmodified script has no line of ours
        plain = FILES["train.py"].replace("from lwopt_backend.integrations import deepspeed_zero\n", "")
        FILES["plain.py"] = plain.replace("deepspeed_zero.register()\n", "")
        command = command.replace("train.py", "plain.py")
    output = shell(command, tmp_path)
    assert re.search(r"loss \d\.\d+ after 20 steps", output)
    assert "2 of 5 trained parameters" not in output and "1 of 5 trained parameters are matrices" in output


def test_the_client_optimizer_snippet_runs_as_printed(tmp_path: Path) -> None:
    output = shell("deepspeed --num_accelerators 2 client.py", tmp_path)
    assert "2 of 4 trained parameters are matrices" in output


PLANNER = (ROOT / "docs" / "planner.md").read_text()
PLANNER_RUNS = re.findall(r"^```bash run\n(.*?)^```$", PLANNER, re.MULTILINE | re.DOTALL)


def test_the_planner_pages_commands_run_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outputs = [run_on_cpu(command, tmp_path) for command in PLANNER_RUNS]
    assert [done.returncode for done in outputs] == [0, 0], outputs
    assert "8 of 8 trained parameters are matrices" in outputs[0].stdout and "Megatron compact" in outputs[1].stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"report.html", "plan.png", "systems.png"}


def test_the_planner_page_names_what_there_is() -> None:
    options = set(re.findall(r"`(--[a-z-]+)", PLANNER))
    commands = [command for command in typer.main.get_command(app).commands.values()]  # type: ignore[attr-defined]
    known = {name for command in commands for parameter in command.params for name in parameter.opts}
    benchmark = {"--markdown", "--png", "--models"}
    assert options - known - benchmark == set()
    for name in [*CLUSTERS, *COSTS]:
        assert f"`{name}`" in PLANNER, name


def test_make_commands_exist() -> None:
    commands = re.findall(r"^make (\w+)$|`make (\w+)[` ]", README, re.MULTILINE)
    targets = {first or second for first, second in commands}
    assert targets >= {"train", "test", "compare"}
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_ci_runs_the_readmes_commands() -> None:
    steps = re.findall(r"^(?:exec )?make (\w+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps == ["check", "test"] and "`make check`" in README and "\nmake test\n" in README


def test_every_option_is_in_the_options_table_and_every_row_is_an_option() -> None:
    table = README[README.index("### Options") : README.index("## What is printed")]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(LayerWiseMuonConfig.model_fields)
    (adamw,) = re.findall(r"^\| `adamw` .*$", table, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", adamw)) - {"adamw"} == set(AdamWOptions.model_fields)


def test_the_ds_config_entry_is_json_and_names_our_optimizer() -> None:
    assert json.loads(FILES["ds_config.json"])["optimizer"]["type"] == "LayerWiseMuon"


PAGES = (
    "planner",
    "fsdp2",
    "fsdp2_hugging_face",
    "owned",
    "optimizers",
    "rules",
    "modules",
    "migration",
    "checkpoints",
    "from_megatron",
)


def test_links_and_pictures_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PAGES)):
        text = page.read_text()
        headings = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("#"):
                assert target[1:] in headings, target
            else:
                assert (page.parent / target.partition("#")[0]).exists(), target
