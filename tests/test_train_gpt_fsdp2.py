"""The example on FSDP2 under torchrun: what it does with DeepSpeed, and the same training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import ROOT, launch, metrics, run_on_cpu, torchrun, try_to_torchrun

SCRIPT = ROOT / "examples" / "train_gpt.py"
CONFIG = ROOT / "configs" / "fsdp2_muon.json"
SMALL = ["--layers", "1", "--width", "32", "--context", "32", "--steps", "6"]
TIED = "--tied-head"


def arguments(out: Path, *more: str, config: Path = CONFIG) -> list[str]:
    return ["--engine", "fsdp2", "--config", str(config), "--out", str(out), *SMALL, *more]


def changed_config(path: Path, source: str, section: list[str], training: dict[str, Any], **options: Any) -> Path:
    """A copy of a shipped configuration with other top-level keys, and other options in its optimizer's section."""
    config = {**json.loads((ROOT / "configs" / source).read_text()), **training}
    inner = config
    for key in section:
        inner = inner[key]
    inner.update(options)
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run where DeepSpeed cannot be imported, with an output head that has two names in the checkpoint."""
    out = tmp_path_factory.mktemp("runs")
    (out / "deepspeed.py").write_text("raise ImportError('no DeepSpeed is needed')")
    return out / "whole", torchrun(SCRIPT, *arguments(out, TIED, "--name", "whole"), path=out)


def test_a_run_leaves_metrics_a_picture_and_a_checkpoint(whole_run: tuple[Path, str]) -> None:
    folder, output = whole_run
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]
    assert all(row["tokens_per_s"] > 0 for row in rows[1:-1])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoint" / "latest").read_text() == "step6"
    assert f"validation loss {rows[0]['validation_loss']:.4f} before, {rows[-1]['validation_loss']:.4f} after" in output
    for once in ("Routing: 6 of 12 trained parameters are matrices", "Plan: 6 matrices and 6 element-wise", "bytes to"):
        assert output.count(once) == 1
    assert "tokens_per_s=" in output and "embedding, tied to lm_head" in output


def test_losses_after_a_resume_equal_those_of_an_uninterrupted_run(whole_run: tuple[Path, str]) -> None:
    folder, _ = whole_run
    out = folder.parent
    torchrun(SCRIPT, *arguments(out, TIED, "--name", "broken", "--stop-after", "3"))
    assert [row["step"] for row in metrics(out / "broken")] == [0, 1, 2, 3, 3]
    checkpoint = out / "broken" / "checkpoint"
    left = checkpoint / ".step6.tmp" / "__1_0.distcp"  # of a run that was ended in the middle of a save
    left.parent.mkdir()
    left.write_bytes(b"half")
    torchrun(SCRIPT, *arguments(out, TIED, "--name", "broken", "--resume"))
    assert {path.name for path in checkpoint.iterdir()} == {"step3", "step6", "latest"}
    assert without_speeds(out / "broken") == without_speeds(folder)


def without_speeds(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in metrics(folder)]


def test_ranks_that_share_the_validation_unevenly_wait_for_each_other(tmp_path: Path) -> None:
    """Eight batches on three ranks; FSDP2 gathers the weights from all ranks for each of them."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question. " * 200)
    output = torchrun(SCRIPT, *arguments(tmp_path, "--data", str(text)), processes=3)
    assert "7,560 bytes to train on and 840 to validate on" in output
    rows = metrics(tmp_path / "fsdp2_muon")
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]


@pytest.mark.parametrize(
    ("training", "options", "loss_tolerance"),
    [
        # Both engines average the ranks' gradients, which on two ranks is one exact sum and a halving, and step every
        # matrix by the same rule: nothing is left that could differ.
        ({"gradient_clipping": 0.0}, {}, 0.0),
        # They sum the squares of the gradient norm in different orders, and with accumulation the gradients too: FSDP2
        # over micro-batches and then ranks, ZeRO over ranks and then micro-batches. The last bits differ, and so does
        # what is clipped by such a norm. Newton-Schulz in bf16 would make a bf16 rounding (4e-3) of some of these, so
        # it is in fp32 here. Found: 1.2e-7 in losses, 6.5e-7 in norms; the tolerance leaves room for other CPUs.
        ({"gradient_accumulation_steps": 2}, {"ns_dtype": "float32"}, 2e-6),
    ],
    ids=["one micro-batch, no clipping", "accumulation and clipping, fp32 Newton-Schulz"],
)
def test_both_engines_train_alike(
    tmp_path: Path, training: dict[str, Any], options: dict[str, Any], loss_tolerance: float
) -> None:
    shape = ["--layers", "2", "--width", "64", "--context", "64", "--steps", "20", "--out", str(tmp_path)]
    zero = changed_config(tmp_path / "zero.json", "zero2_muon.json", ["optimizer", "params"], training, **options)
    fsdp2 = changed_config(tmp_path / "fsdp2.json", "fsdp2_muon.json", ["optimizer"], training, **options)
    launch(SCRIPT, "--deepspeed", "--deepspeed_config", zero, *shape)
    torchrun(SCRIPT, "--engine", "fsdp2", "--config", fsdp2, *shape)
    expected, found = metrics(tmp_path / "zero"), metrics(tmp_path / "fsdp2")
    assert [row.keys() for row in found] == [row.keys() for row in expected] and len(found) == 22
    for ours, theirs in zip(found, expected):
        assert ours.get("lr") == theirs.get("lr")
        for key in {"loss", "validation_loss"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=loss_tolerance, abs=0), ours["step"]
        if "grad_norm" in ours:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-6, abs=0), ours["step"]
    assert found[-2]["grad_norm"] > 1, "clipping has something to do"


def test_the_shipped_configurations_of_both_engines_say_the_same() -> None:
    zero, fsdp2 = (json.loads((ROOT / "configs" / f"{name}_muon.json").read_text()) for name in ("zero2", "fsdp2"))
    of_zero, of_fsdp2 = zero.pop("optimizer"), fsdp2.pop("optimizer")
    assert fsdp2.pop("gradient_clipping") == zero["gradient_clipping"]
    assert fsdp2.items() <= zero.items()
    assert of_fsdp2.pop("matrix") == "muon" and of_fsdp2 == of_zero["params"]


def test_an_engine_does_not_import_the_other_ones_module() -> None:
    code = "import sys; sys.path.insert(0, 'examples'); import train_gpt, {}; assert '{}' not in sys.modules"
    for engine, other in (
        ("fsdp2_engine", "deepspeed"),
        ("deepspeed_engine", "lwopt_backend.integrations.fsdp2"),
    ):
        finished = run_on_cpu([sys.executable, "-c", code.format(engine, other)], ROOT)
        assert finished.returncode == 0, finished.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--engine", "fsdp2", "--deepspeed_config", "configs/zero2_muon.json"],
            "--deepspeed_config is for --engine deepspeed; --engine fsdp2 takes --config",
        ),
        (["--config", str(CONFIG)], "--config is for --engine fsdp2; --engine deepspeed takes --deepspeed_config"),
        (["--engine", "fsdp2"], "--config None: no such file; try configs/fsdp2_muon.json"),
        (["--engine", "fsdp2", "--config", str(CONFIG)], "one process was started, so nothing would be sharded"),
        (["--engine", "fsdp2", "--config", str(CONFIG), "--single-process"], "is started by `torchrun"),
        (["--engine", "fsdp2", "--config", "README.md", "--single-process"], "--config README.md is not JSON"),
        (
            ["--engine", "fsdp2", "--config", "configs/zero2_adamw.json", "--single-process"],
            "unknown key 'zero_optimization'; known: 'train_micro_batch_size_per_gpu'",
        ),
        (["--engine", "fsdp3"], "invalid choice: 'fsdp3'"),
    ],
)
def test_wrong_arguments_end_with_a_message(options: list[str], message: str) -> None:
    finished = run_on_cpu([sys.executable, str(SCRIPT), *options], ROOT)
    assert finished.returncode != 0 and message in finished.stdout
    assert "Traceback" not in finished.stdout


def test_wrong_options_and_wrong_checkpoints_end_with_a_message(whole_run: tuple[Path, str], tmp_path: Path) -> None:
    """These are found on the ranks; what torchrun prints of ranks that failed is its own."""
    wrong = changed_config(tmp_path / "wrong.json", "fsdp2_muon.json", ["optimizer"], {}, momentun=0.9)
    out = whole_run[0].parent
    for options, message in (
        (arguments(tmp_path, config=wrong), "unknown key 'momentun'; did you mean 'momentum'?"),
        (arguments(tmp_path, "--resume"), f"--resume: no checkpoint in {tmp_path}"),
        (
            [*arguments(out, "--name", "whole", "--resume"), "--width", "64"],
            "--resume: the checkpoint is of a run with",
        ),
    ):
        finished = try_to_torchrun(SCRIPT, *options)
        assert finished.returncode != 0 and message in finished.stdout
        assert f'{SCRIPT}", line' not in finished.stdout
    assert not (tmp_path / "fsdp2_muon" / "metrics.jsonl").exists()


def test_make_trains_with_it() -> None:
    recipe = subprocess.run(["make", "--dry-run", "train-fsdp2"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "--torchrun examples/train_gpt.py --engine fsdp2 --config configs/fsdp2_muon.json" in recipe.stdout
