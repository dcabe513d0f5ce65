"""The example under the real launcher: it trains, resumes exactly, and refuses what cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import ROOT, TIMEOUT_SECONDS, launch, metrics, try_to_launch

SCRIPT = ROOT / "examples" / "train_gpt.py"
SMALL = ["--layers", "1", "--width", "32", "--context", "32", "--steps", "6"]


def arguments(out: Path, *more: str, config: str = "zero2_muon") -> list[str]:
    return ["--deepspeed", "--deepspeed_config", f"configs/{config}.json", "--out", str(out), *SMALL, *more]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("runs")
    return out / "whole", launch(SCRIPT, *arguments(out, "--name", "whole"))


def test_a_run_leaves_metrics_a_picture_and_a_checkpoint(whole_run: tuple[Path, str]) -> None:
    folder, output = whole_run
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 6]
    losses = [row["loss"] for row in rows[1:-1]]
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"] and losses[-1] < losses[0]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoint" / "latest").read_text() == "step6"
    assert f"validation loss {rows[0]['validation_loss']:.4f} before, {rows[-1]['validation_loss']:.4f} after" in output


def test_routing_and_plan_are_printed_once_by_one_rank(whole_run: tuple[Path, str]) -> None:
    _, output = whole_run
    for once in ("Routing: 6 of 13 trained parameters are matrices", "Plan: 6 matrices by muon", "Newton-Schulz GFLOP"):
        assert output.count(once) == 1
    assert "tokens_per_s=" in output


def test_losses_after_a_resume_equal_those_of_an_uninterrupted_run(whole_run: tuple[Path, str]) -> None:
    folder, _ = whole_run
    out = folder.parent
    launch(SCRIPT, *arguments(out, "--name", "broken", "--stop-after", "3"))
    assert [row["step"] for row in metrics(out / "broken")] == [0, 1, 2, 3, 3]
    launch(SCRIPT, *arguments(out, "--name", "broken", "--resume"))
    keep = ("step", "loss", "lr", "grad_norm", "validation_loss")
    whole, resumed = (
        [{key: row[key] for key in keep if key in row} for row in metrics(path)] for path in (folder, out / "broken")
    )
    assert resumed == whole


def test_one_process_by_accident_is_refused(tmp_path: Path) -> None:
    finished = try_to_launch(SCRIPT, *arguments(tmp_path), processes=1)
    assert finished.returncode != 0
    assert "one process was started, so nothing would be sharded" in finished.stdout
    assert "deepspeed --num_accelerators 2" in finished.stdout


def test_text_of_the_users_is_trained_on_with_a_tied_head(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question. " * 200)
    output = launch(SCRIPT, *arguments(tmp_path, "--data", str(text), "--tied-head", "--name", "mine"))
    assert "7,560 bytes to train on and 840 to validate on" in output
    assert "embedding, tied to lm_head" in output
    assert (tmp_path / "mine" / "loss.png").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere.txt"], "--data nowhere.txt: no such file or folder"),
        (["--resume"], "--resume: no checkpoint in"),
        (["--steps", "0"], "--steps: expected at least 1, found 0"),
        (["--deepspeed_config", "nowhere.json"], "--deepspeed_config nowhere.json: no such file"),
    ],
)
def test_wrong_arguments_end_with_a_message(tmp_path: Path, more: list[str], message: str) -> None:
    finished = try_to_launch(SCRIPT, *arguments(tmp_path, *more))
    assert finished.returncode != 0 and message in finished.stdout
    assert "Traceback" not in finished.stdout
    assert not (tmp_path / "zero2_muon" / "metrics.jsonl").exists()


def test_compare_draws_the_best_of_both_sweeps(tmp_path: Path) -> None:
    options = ["--adamw-rates", "1e-3", "--muon-rates", "0.02", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "examples" / "compare.py"), *options, *SMALL]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert finished.returncode == 0, finished.stderr
    losses = json.loads((tmp_path / "sweep.json").read_text())
    assert set(losses) == {"adamw-0.001", "muon-0.02"}
    assert f"AdamW, lr 0.001: validation loss {losses['adamw-0.001']:.4f}" in finished.stdout
    assert f"LayerWiseMuon, lr 0.02: validation loss {losses['muon-0.02']:.4f}" in finished.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    first = [metrics(tmp_path / name)[1]["loss"] for name in losses]
    assert first[0] == first[1], "the same first batch and the same initial weights"


PLAIN_SCRIPT = """
import argparse, sys, torch, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--word")
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 18), torch.nn.ReLU(), torch.nn.Linear(18, 5))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(2):
    loss = engine(torch.ones(4, 12)).square().mean()
    engine.backward(loss)
    engine.step()
print(f"trained by {type(engine.basic_optimizer).__name__}, local rank {args.local_rank}, word {args.word}")
"""


def test_an_unmodified_script_trains_under_the_module_runner(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN_SCRIPT)
    config = ROOT / "configs" / "zero2_muon.json"
    options = ["--deepspeed", "--deepspeed_config", str(config), "--word", "hello"]
    output = launch("train.py", *options, module="lwopt_backend.run", cwd=tmp_path)
    assert "built successfully" not in output, "no compiler is needed"
    for rank in range(2):
        assert f"trained by LayerWiseMuon, local rank {rank}, word hello" in output


def test_nothing_is_compiled(whole_run: tuple[Path, str]) -> None:
    _, output = whole_run
    assert "built successfully" not in output
