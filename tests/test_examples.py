"""examples/train_gpt.py with both engines: it trains, resumes exactly, and refuses what cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import ROOT, launch, metrics, run_on_ranks, succeeds, torchrun
from tests.ranks import RankPool

sys.path.append(str(ROOT / "examples"))

import train_gpt  # noqa: E402

SCRIPT = ROOT / "examples" / "train_gpt.py"
ZERO, FSDP2 = ROOT / "configs" / "zero2_muon.json", ROOT / "configs" / "fsdp2_muon.json"
SMALL = ["--layers", "1", "--width", "32", "--context", "32", "--steps", "6"]
TEXT = b"to be or not to be, that is the question. " * 200
SAID = {
    "deepspeed": [
        "Routing: 6 of 13 trained parameters are matrices",
        "Plan: 6 matrices by muon",
        "Newton-Schulz GFLOP",
    ],
    "fsdp2": ["Routing: 6 of 12 trained parameters", "Plan: 6 matrices and 6 element-wise", "bytes to"],
}


def arguments(engine: str, out: Path, *more: str, config: Path | None = None) -> list[str]:
    first = ["--deepspeed", "--deepspeed_config", ZERO] if engine == "deepspeed" else ["--engine", engine, "--config"]
    chosen = [config or FSDP2] if engine == "fsdp2" else []
    return [*map(str, [*first, *chosen]), "--out", str(out), *SMALL, *more]


def train(ranks: RankPool, engine: str, out: Path, *more: str, **options: Any) -> str:
    given = arguments(engine, out, *more, **options)
    codes, output = run_on_ranks(ranks, SCRIPT, *given, joined=engine == "deepspeed")
    assert codes == [0] * ranks.world_size, output
    return output


@pytest.fixture(scope="module", params=["deepspeed", "fsdp2"])
def whole_run(
    request: pytest.FixtureRequest, rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """The engine, the run's folder, and what it printed; FSDP2's with an output head that has two names."""
    out, engine = tmp_path_factory.mktemp("runs"), request.param
    return engine, out / "whole", train(rank_pools[2], engine, out, "--name", "whole", *TIED[engine])


TIED: dict[str, list[str]] = {"deepspeed": [], "fsdp2": ["--tied-head"]}


def test_a_run_leaves_metrics_a_picture_and_a_checkpoint(whole_run: tuple[str, Path, str]) -> None:
    engine, folder, output = whole_run
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 6]
    losses = [row["loss"] for row in rows[1:-1]]
    before, after = rows[0]["validation_loss"], rows[-1]["validation_loss"]
    assert after < before and losses[-1] < losses[0] and all(row["tokens_per_s"] > 0 for row in rows[1:-1])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "checkpoint" / "latest").read_text() == "step6"
    assert f"validation loss {before:.4f} before, {after:.4f} after" in output
    assert [output.count(once) for once in SAID[engine]] == [1, 1, 1]
    assert "tokens_per_s=" in output and ("embedding, tied to lm_head" in output) == (engine == "fsdp2")


def test_losses_after_a_resume_equal_those_of_an_uninterrupted_run(
    ranks: RankPool, whole_run: tuple[str, Path, str]
) -> None:
    engine, folder, _ = whole_run
    broken = ["--name", "broken", *TIED[engine]]
    train(ranks, engine, folder.parent, *broken, "--stop-after", "3")
    run = folder.parent / "broken"
    assert [row["step"] for row in metrics(run)] == [0, 1, 2, 3, 3]
    if engine == "fsdp2":  # what a run leaves that was ended in the middle of a save
        left = run / "checkpoint" / ".step6.tmp" / "__1_0.distcp"
        left.parent.mkdir()
        left.write_bytes(b"half")
    train(ranks, engine, folder.parent, *broken, "--resume")
    assert without_speeds(run) == without_speeds(folder)
    assert not (run / "checkpoint" / ".step6.tmp").exists()


def without_speeds(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in metrics(folder)]


@pytest.mark.full
def test_under_the_launcher_it_is_the_same_run(whole_run: tuple[str, Path, str], tmp_path: Path) -> None:
    engine, folder, _ = whole_run
    start = launch if engine == "deepspeed" else torchrun
    output = start(SCRIPT, *arguments(engine, tmp_path, "--name", "again", *TIED[engine]))
    assert without_speeds(tmp_path / "again") == without_speeds(folder)
    assert [output.count(once) for once in SAID[engine]] == [1, 1, 1] and "built successfully" not in output


@pytest.mark.parametrize(("engine", "world_size"), [("deepspeed", 2), ("fsdp2", 3)])
def test_text_of_the_users_is_trained_on(
    rank_pools: dict[int, RankPool], tmp_path: Path, engine: str, world_size: int
) -> None:
    """Three ranks share eight batches to validate on: FSDP2 gathers the weights from all ranks for each of them."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    more = ["--data", str(text), "--tied-head", "--name", "mine"]
    output = train(rank_pools[world_size], engine, tmp_path, *more)
    assert "7,560 bytes to train on and 840 to validate on" in output and "embedding, tied to lm_head" in output
    rows = metrics(tmp_path / "mine")
    assert rows[-1]["validation_loss"] < rows[0]["validation_loss"]


def changed_config(path: Path, source: Path, section: list[str], training: dict[str, Any], **options: Any) -> Path:
    """A copy of a shipped configuration with other top-level keys, and other options in its optimizer's section."""
    config = {**json.loads(source.read_text()), **training}
    inner = config
    for key in section:
        inner = inner[key]
    inner.update(options)
    path.write_text(json.dumps(config))
    return path


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
    ranks: RankPool, tmp_path: Path, training: dict[str, Any], options: dict[str, Any], loss_tolerance: float
) -> None:
    shape = ["--layers", "2", "--width", "64", "--context", "64", "--steps", "12", "--out", str(tmp_path)]
    zero = changed_config(tmp_path / "zero.json", ZERO, ["optimizer", "params"], training, **options)
    fsdp2 = changed_config(tmp_path / "fsdp2.json", FSDP2, ["optimizer"], training, **options)
    for given, joined in (
        (["--deepspeed", "--deepspeed_config", zero], True),
        (["--engine", "fsdp2", "--config", fsdp2], False),
    ):
        codes, output = run_on_ranks(ranks, SCRIPT, *given, *shape, joined=joined)
        assert codes == [0, 0], output
    expected, found = metrics(tmp_path / "zero"), metrics(tmp_path / "fsdp2")
    assert [row.keys() for row in found] == [row.keys() for row in expected] and len(found) == 14
    for ours, theirs in zip(found, expected):
        assert ours.get("lr") == theirs.get("lr")
        for key in {"loss", "validation_loss"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=loss_tolerance, abs=0), ours["step"]
        if "grad_norm" in ours:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-6, abs=0), ours["step"]
    assert found[-2]["grad_norm"] > 1, "clipping has something to do"


def test_the_shipped_configurations_of_both_engines_say_the_same() -> None:
    zero, fsdp2 = (json.loads(path.read_text()) for path in (ZERO, FSDP2))
    of_zero, of_fsdp2 = zero.pop("optimizer"), fsdp2.pop("optimizer")
    assert fsdp2.pop("gradient_clipping") == zero["gradient_clipping"]
    assert fsdp2.items() <= zero.items()
    assert of_fsdp2.pop("matrix") == "muon" and of_fsdp2 == of_zero["params"]


@pytest.mark.parametrize(
    ("engine", "other"), [("fsdp2_engine", "deepspeed"), ("deepspeed_engine", "lwopt_backend.integrations.fsdp2")]
)
def test_an_engine_does_not_import_the_other_ones_module(engine: str, other: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, 'examples'); import train_gpt, {engine}; assert '{other}' not in sys.modules"
    )
    succeeds([sys.executable, "-c", code], ROOT)


OF_ZERO, OF_FSDP2 = ["--deepspeed_config", str(ZERO)], ["--engine", "fsdp2", "--config", str(FSDP2)]
ALONE = "--single-process"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OF_ZERO, "one process was started, so nothing would be sharded"),
        (OF_ZERO, "deepspeed --num_accelerators 2"),
        ([*OF_ZERO, ALONE, "--data", "nowhere.txt"], "--data nowhere.txt: no such file or folder"),
        ([*OF_ZERO, ALONE, "--steps", "0"], "--steps: expected at least 1, found 0"),
        (["--deepspeed_config", "nowhere.json"], "--deepspeed_config nowhere.json: no such file"),
        (
            ["--engine", "fsdp2", *OF_ZERO],
            "--deepspeed_config is for --engine deepspeed; --engine fsdp2 takes --config",
        ),
        (["--config", "x.json"], "--config is for --engine fsdp2; --engine deepspeed takes --deepspeed_config"),
        (["--engine", "fsdp2"], "--config None: no such file; try configs/fsdp2_muon.json"),
        (OF_FSDP2, "one process was started, so nothing would be sharded"),
        ([*OF_FSDP2, ALONE], "is started by `torchrun"),
        (["--engine", "fsdp2", "--config", str(ROOT / "README.md"), ALONE], "README.md is not JSON"),
        (
            ["--engine", "fsdp2", "--config", str(ROOT / "configs" / "zero2_adamw.json"), ALONE],
            "unknown key 'zero_optimization'; known: 'train_micro_batch_size_per_gpu'",
        ),
        (["--engine", "fsdp3"], "invalid choice: 'fsdp3'"),
    ],
)
def test_wrong_arguments_end_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    assert message in f"{ended.value.code}{capsys.readouterr().err}"


def test_wrong_options_and_wrong_checkpoints_end_with_a_message(
    ranks: RankPool, whole_run: tuple[str, Path, str], tmp_path: Path
) -> None:
    """These are found on the ranks."""
    engine, folder, _ = whole_run
    named = ["--name", "whole", *TIED[engine], "--resume"]
    cases = [
        (arguments(engine, tmp_path, "--resume"), f"--resume: no checkpoint in {tmp_path}"),
        (arguments(engine, folder.parent, *named, "--width", "64"), "--resume: the checkpoint is of a run with"),
    ]
    if engine == "fsdp2":
        wrong = changed_config(tmp_path / "wrong.json", FSDP2, ["optimizer"], {}, momentun=0.9)
        said = "unknown key 'momentun'; did you mean 'momentum'?"
        cases.append((arguments(engine, tmp_path, config=wrong), said))
    for given, message in cases:
        codes, _ = run_on_ranks(ranks, SCRIPT, *given, joined=engine == "deepspeed")
        assert all(message in str(code) for code in codes), codes
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.full
def test_compare_draws_the_best_of_both_sweeps(tmp_path: Path) -> None:
    options = ["--adamw-rates", "1e-3", "--muon-rates", "0.02", "--out", str(tmp_path)]
    output = succeeds([sys.executable, str(ROOT / "examples" / "compare.py"), *options, *SMALL], ROOT)
    losses = json.loads((tmp_path / "sweep.json").read_text())
    assert set(losses) == {"adamw-0.001", "muon-0.02"}
    assert f"AdamW, lr 0.001: validation loss {losses['adamw-0.001']:.4f}" in output
    assert f"LayerWiseMuon, lr 0.02: validation loss {losses['muon-0.02']:.4f}" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    first = [metrics(tmp_path / name)[1]["loss"] for name in losses]
    assert first[0] == first[1], "the same first batch and the same initial weights"


def test_make_trains_with_both_engines() -> None:
    recipes = [
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for target in ("train", "train-fsdp2")
    ]
    assert "examples/train_gpt.py --deepspeed --deepspeed_config configs/zero2_muon.json" in recipes[0]
    assert "--torchrun examples/train_gpt.py --engine fsdp2 --config configs/fsdp2_muon.json" in recipes[1]
