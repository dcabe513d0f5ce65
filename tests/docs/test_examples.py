"""examples/train_gpt.py: its data; with both engines it trains, resumes exactly, and refuses what cannot work."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import venv
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from matplotlib import pyplot

from lwopt_backend.rules.newton_schulz import multiplies_bf16
from tests.support.command_line import lwopt
from tests.support.launcher import FORGET, ROOT, launch, metrics, python, run_on_ranks, succeeds, torchrun
from tests.support.models import rounding
from tests.support.pages import PAGES
from tests.support.ranks import RankPool

sys.path.append(str(ROOT / "examples"))

import compare  # noqa: E402
import train_gpt  # noqa: E402
from run_folder import RunFolder, read_metrics  # noqa: E402

SCRIPT = ROOT / "examples" / "train_gpt.py"
ZERO, FSDP2 = ROOT / "configs" / "zero2_muon.json", ROOT / "configs" / "fsdp2_muon.json"
STARTS: dict[str, list[str]] = {
    "deepspeed": ["--deepspeed", "--deepspeed_config", str(ZERO)],
    "fsdp2": ["--engine", "fsdp2", "--config", str(FSDP2)],
}
TEXT = ["--data", str(ROOT / "LICENSE")]  # read in no time
SMALL = ["--layers", "1", "--width", "32", "--context", "32", "--steps", "6"]
TIED = ["--tied-head"]
SAID = {
    "deepspeed": ["Routing: 6 of 12 trained parameters are", "Plan: 6 matrices by muon", "Newton-Schulz GFLOP"],
    "fsdp2": ["Routing: 6 of 12 trained parameters", "Plan: 6 matrices and 6 element-wise", "bytes to"],
}


def run_example(ranks: RankPool, engine: str, out: Path, *more: str) -> tuple[list[Any], str]:
    """How it ended on each rank, and what it printed. The last of repeated options counts."""
    given = [*STARTS[engine], *TEXT, "--out", str(out), *SMALL, *more]
    return run_on_ranks(ranks, SCRIPT, *given, joined=engine == "deepspeed")


def train(ranks: RankPool, engine: str, out: Path, *more: str) -> str:
    codes, output = run_example(ranks, engine, out, *more)
    assert codes == [0] * ranks.world_size, output
    return output


@pytest.fixture(scope="module", params=["deepspeed", "fsdp2"])
def whole_run(
    request: pytest.FixtureRequest, rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """The engine, the run's folder, and what it printed."""
    out, engine = tmp_path_factory.mktemp("runs"), request.param
    return engine, out / "whole", train(rank_pools[2], engine, out, "--name", "whole", *TIED, "--metrics")


MEASURED = {"tokens_per_s", "update_rms", "orthogonality", "exchange_bytes", "seconds"}


def without_speeds(folder: Path) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row.keys() - MEASURED} for row in metrics(folder)]


def test_a_run_leaves_metrics_a_picture_and_a_checkpoint(whole_run: tuple[str, Path, str]) -> None:
    engine, folder, output = whole_run
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6, 6]
    losses = [row["loss"] for row in rows[1:-1]]
    before, after = rows[0]["validation_loss"], rows[-1]["validation_loss"]
    assert after < before and losses[-1] < losses[0] and all(row["tokens_per_s"] > 0 for row in rows[1:-1])
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert all(row.keys() >= MEASURED and row["update_rms"].keys() == {"muon", "adamw"} for row in rows[1:-1])
    assert (folder / "checkpoint" / "latest").read_text() == "step6"
    assert f"validation loss {before:.4f} before, {after:.4f} after" in output
    assert [output.count(once) for once in SAID[engine]] == [1, 1, 1]
    (advised,) = re.findall(r"lwopt inspect (.+)", output)
    assert lwopt("inspect", advised).code == 0
    assert "tokens_per_s=" in output and "embedding, tied to lm_head" in output
    nbytes = (ROOT / "LICENSE").stat().st_size
    assert f"{nbytes * 9 // 10:,} bytes to train on and {-(-nbytes // 10):,} to validate on" in output


def test_losses_after_a_resume_are_those_of_the_whole_run(ranks: RankPool, whole_run: tuple[str, Path, str]) -> None:
    engine, folder, _ = whole_run
    broken = ["--name", "broken", *TIED]
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


def test_a_cpu_without_products_in_bf16_iterates_in_fp32(tmp_path: Path) -> None:
    """Fixed: Half of the example's time on such a CPU was Newton-Schulz in bf16, which takes 25 times as long."""
    program = "from lwopt_backend.rules.newton_schulz import multiplies_bf16; print(multiplies_bf16())"
    printed = succeeds([sys.executable, "-c", program], ROOT, ONEDNN_MAX_CPU_ISA="AVX2")
    assert printed.endswith("False\n")
    flags = Path("/proc/cpuinfo").read_text()
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and "avx2" in flags:
        assert multiplies_bf16() == ("avx512_bf16" in flags)
    for has, name in itertools.product((True, False), ("zero2_muon", "fsdp2_muon", "zero2_soap", "zero2_adamw")):
        engine = "fsdp2" if name == "fsdp2_muon" else "deepspeed"
        option, file = train_gpt.STARTS[engine].option, ROOT / "configs" / f"{name}.json"
        args = argparse.Namespace(engine=engine, **{option: str(file)})
        with mock.patch.object(train_gpt, "multiplies_bf16", mock.Mock(return_value=has)):
            changes = train_gpt.iterate_in_fp32(args, tmp_path)
        assert changes == (not has and "muon" in name)
        taken, before = (json.loads(Path(path).read_text()) for path in (getattr(args, option), file))
        options = before["optimizer"] if engine == "fsdp2" else before["optimizer"].get("params")
        options.update({"ns_dtype": "float32"} if changes else {})
        assert taken == before


@pytest.mark.full
def test_under_the_launcher_it_is_the_same_run(whole_run: tuple[str, Path, str], tmp_path: Path) -> None:
    engine, folder, _ = whole_run
    start = launch if engine == "deepspeed" else torchrun
    given = [*STARTS[engine], *TEXT, "--out", tmp_path, *SMALL, "--name", "again", *TIED]
    output = start(SCRIPT, *given)
    assert without_speeds(tmp_path / "again") == without_speeds(folder)
    assert [output.count(once) for once in SAID[engine]] == [1, 1, 1] and "built successfully" not in output


def test_the_launcher_is_found_below_an_environment(tmp_path: Path) -> None:
    """Fixed: `make train` did not find the launcher where DeepSpeed is installed below the environment. One that is on
    top of another with DeepSpeed has no program of that name."""
    venv.create(tmp_path / "above", symlinks=True)
    packages = next(tmp_path.glob("above/lib/python*/site-packages"))
    (packages / "below.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('this is rank ' + os.environ['RANK'])\n")  # ranks mix what several writes print
    printed = succeeds([str(tmp_path / "above" / "bin" / "python"), str(ROOT / "scripts/launch.py"), str(script)], ROOT)
    assert all(f"this is rank {rank}" in printed for rank in range(2))


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_three_ranks_share_eight_batches_to_validate_on(ranks: RankPool, tmp_path: Path) -> None:
    """FSDP2 gathers the weights from all ranks for each of them."""
    train(ranks, "fsdp2", tmp_path, "--name", "mine")
    before, *_, after = metrics(tmp_path / "mine")
    assert after["validation_loss"] < before["validation_loss"]


def changed_config(path: Path, source: Path, training: dict[str, Any], **options: Any) -> str:
    """A copy of a shipped configuration with other top-level keys, and other options of its optimizer."""
    config = {**json.loads(source.read_text()), **training}
    config["optimizer"].get("params", config["optimizer"]).update(options)
    path.write_text(json.dumps(config))
    return str(path)


def test_both_engines_train_alike_with_accumulation_and_clipping(ranks: RankPool, tmp_path: Path) -> None:
    """They sum the squares of the gradient norm in different orders, and gradients too: FSDP2 over micro-batches, then
    ranks, ZeRO over ranks, then micro-batches. Newton-Schulz in bf16 would make a bf16 rounding (4e-3) of some last
    bits. A loss is a mean over the tokens of a step, a norm the root of a sum over all elements."""
    shape = ["--layers", "2", "--width", "64", "--context", "64", "--steps", "6"]
    training, options = {"gradient_accumulation_steps": 2}, {"ns_dtype": "float32"}
    zero = changed_config(tmp_path / "zero.json", ZERO, training, **options)
    fsdp2 = changed_config(tmp_path / "fsdp2.json", FSDP2, training, **options)
    train(ranks, "deepspeed", tmp_path, *shape, "--deepspeed_config", zero)
    train(ranks, "fsdp2", tmp_path, *shape, "--config", fsdp2)
    expected, found = metrics(tmp_path / "zero"), metrics(tmp_path / "fsdp2")
    assert [row.keys() for row in found] == [row.keys() for row in expected] and len(found) == 8
    tokens, numel = 8 * 2 * 2 * 64, 2 * 12 * 64**2 + 2 * 256 * 64
    for ours, theirs in zip(found, expected):
        assert ours.get("lr") == theirs.get("lr")
        for key, terms in {"loss": tokens, "validation_loss": tokens, "grad_norm": numel}.items():
            if key in ours:
                assert ours[key] == pytest.approx(theirs[key], rel=rounding(terms), abs=0), (key, ours["step"])
    assert found[-2]["grad_norm"] > 1, "clipping has something to do"


def test_the_shipped_configurations_say_the_same() -> None:
    zero, fsdp2 = (json.loads(path.read_text()) for path in (ZERO, FSDP2))
    of_zero, of_fsdp2 = zero.pop("optimizer"), fsdp2.pop("optimizer")
    assert fsdp2.pop("gradient_clipping") == zero["gradient_clipping"]
    assert fsdp2.items() <= zero.items()
    assert of_fsdp2.pop("matrix") == "muon" and of_fsdp2 == of_zero["params"]


IMPORTS = f"""
{FORGET}
before = {{*sys.modules}}
forget("lwopt_backend")
import deepspeed_engine
assert "lwopt_backend.integrations.deepspeed_zero" in sys.modules and "lwopt_backend.optimizer" not in sys.modules
forget("deepspeed", "transformers", "accelerate", "lwopt_backend", *{{*sys.modules}} - before)
import train_gpt, fsdp2_engine
assert "lwopt_backend.optimizer" in sys.modules and "deepspeed" not in sys.modules
"""


def test_an_engine_does_not_import_the_other_ones_module() -> None:
    python("-c", IMPORTS, cwd=ROOT / "examples")


OF_ZERO, OF_FSDP2, ALONE = STARTS["deepspeed"][1:], STARTS["fsdp2"], "--single-process"
UNSHARDED = "one process was started, so nothing would be sharded"
WRONG = [
    (OF_ZERO, UNSHARDED),
    ([*OF_ZERO, ALONE, "--data", "nowhere.txt"], "--data nowhere.txt: no such file or folder"),
    ([*OF_ZERO, ALONE, "--steps", "0"], "--steps: expected at least 1, found 0"),
    (["--deepspeed_config", "nowhere.json"], "--deepspeed_config nowhere.json: no such file"),
    (["--engine", "fsdp2", *OF_ZERO], "--deepspeed_config is for --engine deepspeed; --engine fsdp2 takes --config"),
    (["--engine", "fsdp2"], "--config None: no such file; try configs/fsdp2_muon.json"),
    (OF_FSDP2, UNSHARDED),
    ([*OF_FSDP2, ALONE], "is started by `torchrun"),
    ([*OF_FSDP2, ALONE, "--config", str(ROOT / "README.md")], "README.md is not JSON"),
    ([*OF_FSDP2, ALONE, "--config", str(ZERO)], "'zero_optimization'; known: 'train_micro_batch_size_per_gpu'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_arguments_are_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    assert message in f"{ended.value.code}{capsys.readouterr().err}"


def test_wrong_checkpoints_are_a_message(ranks: RankPool, whole_run: tuple[str, Path, str], tmp_path: Path) -> None:
    engine, folder, _ = whole_run
    other_width = ["--name", "whole", *TIED, "--resume", "--width", "64"]
    wrong = ["--config", changed_config(tmp_path / "wrong.json", FSDP2, {}, momentun=0.9)]
    for out, given, message in (
        (tmp_path, ["--resume"], f"--resume: no checkpoint in {tmp_path}"),
        (folder.parent, other_width, "--resume: the checkpoint is of a run with"),
        *([(tmp_path, wrong, "unknown key 'momentun'; did you mean 'momentum'?")] if engine == "fsdp2" else []),
    ):
        codes, _ = run_example(ranks, engine, out, *given)
        assert all(message in str(code) for code in codes), codes
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.full
def test_compare_draws_the_best_of_both_sweeps(tmp_path: Path) -> None:
    options = ["--adamw-rates", "1e-3", "--muon-rates", "0.02", "--out", str(tmp_path)]
    output = succeeds([sys.executable, str(ROOT / "examples" / "compare.py"), *options, *SMALL], ROOT)
    results = json.loads((tmp_path / "losses.json").read_text())
    losses = results["validation_losses"]
    assert set(losses) == {"adamw-0.001", "muon-0.02"}
    assert f"AdamW, lr 0.001: validation loss {losses['adamw-0.001']:.4f}" in output
    assert f"LayerWiseMuon, lr 0.02: validation loss {losses['muon-0.02']:.4f}" in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    first = [run["training_losses"][0] for run in results["best"].values()]
    assert first[0] == first[1], "the same first batch and the same initial weights"


def test_pages_and_picture_show_the_kept_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ROOT / "benchmarks" / "results" / "compare.json"
    results = json.loads(kept.read_text())
    _, reached = compare.verdict(results)
    for (name, run), first in zip(results["best"].items(), ("adamw-", "muon-"), strict=True):
        losses = {
            key.removeprefix(first): value
            for key, value in results["validation_losses"].items()
            if key.startswith(first)
        }
        assert run["validation_loss"] == losses[f"{run['lr']:g}"] == min(losses.values())
        cells = [f"{lr}: {loss:.3f}" for lr, loss in losses.items()]
        row = ", ".join(f"**{cell}**" if cell.startswith(f"{run['lr']:g}:") else cell for cell in cells)
        assert f"| {name} | {row} |" in PAGES["benchmarks"] and f"{run['validation_loss']:.3f}" in PAGES["README"]
    assert f"final training loss at step {reached}." in PAGES["benchmarks"]
    assert f"final loss at step {reached}." in PAGES["README"]
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--draw", str(kept), str(tmp_path / "loss.png")])
    compare.main()
    drawn = [list(line.get_ydata()) for line in pyplot.gcf().axes[0].lines]
    assert [run["training_losses"] for run in results["best"].values()] == [drawn[0], drawn[2]]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_compare_rules_searches_a_rate_and_trains_three_seeds(tmp_path: Path) -> None:
    options = ["--rules", "Muon", "--out", str(tmp_path)]
    output = succeeds([sys.executable, str(ROOT / "examples" / "compare.py"), *options, *SMALL], ROOT)
    found = json.loads((tmp_path / "rules.json").read_text())
    muon = found["rules"]["Muon"]
    first_seed = {
        float(name.split("-")[1]): loss for name, loss in found["runs"].items() if "Muon" in name and "seed1" in name
    }
    assert len(first_seed) >= 3 and muon["lr"] == min(first_seed, key=first_seed.__getitem__)
    assert muon["losses"] == [found["runs"][f"Muon-{muon['lr']:g}-seed{seed}"] for seed in (1, 2, 3)]
    runs = [f"{name}-{row['lr']:g}-seed{seed}" for name, row in found["rules"].items() for seed in (1, 2)]
    losses = [metrics(tmp_path / run)[1]["loss"] for run in runs]
    assert losses[0] == losses[2] != losses[1], "a seed gives the initial weights and the batches, for every rule"
    assert "steps to AdamW's" in output and (tmp_path / "rules.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_compare_trains_ways_of_newton_schulz_on_three_seeds(tmp_path: Path) -> None:
    options = ["--ns-methods", "standard", "gram", "--out", str(tmp_path)]
    output = succeeds([sys.executable, str(ROOT / "examples" / "compare.py"), *options, *SMALL], ROOT)
    found = json.loads((tmp_path / "ns_methods.json").read_text())
    assert [*found] == ["standard", "gram"] and "seed 3" in output
    for exact, other in zip(*found.values(), strict=True):
        assert 0 < abs(exact - other) < 0.05, "they differ by rounding"


def test_metrics_of_a_killed_run_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, is_writer=True)
    folder.log({"step": 0, "validation_loss": 5.0})
    for step in (1, 2, 3):
        folder.log({"step": step, "loss": 4.0})
    folder.log({"step": 3, "validation_loss": 3.9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    folder.keep_until(2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
