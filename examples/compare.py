"""Train AdamW and LayerWiseMuon for the same steps on the same batches, each at the best of a small sweep of rates.

AdamW's rate is swept first; the AdamW inside LayerWiseMuon (embedding, head, norms) then uses AdamW's best, and Muon's
rate is swept. Every run is the real example under the real launcher, in ``runs/compare/``. losses.json there has every
run's validation loss and the training losses of the two best runs, and loss.png is drawn from it. ``--draw losses.json
PICTURE`` draws an earlier comparison again.

``--rules [NAME ...]`` compares the published rules instead, all or some: see compare_rules.py. ``--ns-methods METHOD
...`` compares implementations of Newton-Schulz on three seeds. ``--cnn`` compares the words for convolutions on a small
network: see compare_cnn.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from run_folder import read_metrics, running_mean, write_whole
from tqdm import tqdm
from train_gpt import IN_FP32

from lwopt_backend.rules.newton_schulz import multiplies_bf16

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from launch import launch  # noqa: E402

ADAMW_RATES = [1e-3, 2e-3, 4e-3, 8e-3]
MUON_RATES = [0.01, 0.02, 0.04, 0.08]


class Sweep:
    """Runs of the example that differ in their configuration only."""

    def __init__(self, folder: Path, arguments: list[str], bar: tqdm, fsdp2: bool = False) -> None:
        self.folder = folder
        self.arguments = arguments
        self.bar = bar
        self.fsdp2 = fsdp2
        self.losses: dict[str, float] = {}

    def run(self, name: str, config: dict[str, Any], *arguments: str) -> float:
        """Train with ``config``; the validation loss at the end. A run that fails ends the comparison."""
        path = self.folder / f"{name}.json"
        write_whole(path, json.dumps(config, indent=2).encode())
        self.bar.set_description(name)
        engine = ["--engine", "fsdp2", "--config", path] if self.fsdp2 else ["--deepspeed", "--deepspeed_config", path]
        script = [ROOT / "examples" / "train_gpt.py", *engine, "--out", self.folder, "--name", name]
        try:
            launch([*script, *self.arguments, *arguments], torchrun=self.fsdp2, quiet=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{name} failed:\n{error.stdout[-4000:]}") from None
        rows = read_metrics(self.folder / name / "metrics.jsonl")
        self.losses[name] = rows[-1]["validation_loss"]
        if not self.fsdp2:
            self.bar.update()
        self.bar.write(f"{name}: validation loss {self.losses[name]:.4f}")
        return self.losses[name]

    def best(self, prefix: str) -> str:
        return min((name for name in self.losses if name.startswith(prefix)), key=self.losses.__getitem__)


def with_rates(config: dict[str, Any], lr: float, adamw_lr: float | None = None) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    changed["optimizer"]["params"]["lr"] = lr
    if adamw_lr is not None:
        changed["optimizer"]["params"]["adamw"]["lr"] = adamw_lr
    return changed


def training_losses(metrics: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(metrics) if "loss" in row]


def steps_to(losses: list[float], loss: float, window: int = 20) -> int | None:
    """The first step at which the mean training loss of the last ``window`` steps is at most ``loss``, or None."""
    for end in range(window, len(losses) + 1):
        if sum(losses[end - window : end]) / window <= loss:
            return end
    return None


def verdict(results: dict[str, Any]) -> tuple[float, int | None]:
    """AdamW's final training loss, the mean of 20 steps, and the step at which LayerWiseMuon has it, or None."""
    adamw, muon = (run["training_losses"] for run in results["best"].values())
    final = sum(adamw[-20:]) / len(adamw[-20:])
    return final, steps_to(muon, final)


def draw(results: dict[str, Any], path: Path) -> None:
    """Both best runs: the training loss of every step, its running mean, and the validation loss as text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 11}):
        figure, axes = pyplot.subplots(figsize=(4.2, 2.7), layout="constrained")  # text of 11 px on a phone
        for (name, run), color in zip(results["best"].items(), ("C0", "C3"), strict=True):
            losses = run["training_losses"]
            steps = range(1, len(losses) + 1)
            axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
            axes.plot(
                steps, running_mean(losses), color=color, linewidth=2.5, label=f"{name}: {run['validation_loss']:.2f}"
            )
        low = min(losses) - 0.1
        final, reached = verdict(results)
        if reached:
            axes.plot([steps[-1], reached, reached], [final, final, low], "--", color="black", linewidth=1)
            axes.annotate(f"step {reached} ", (reached, low), ha="right", va="bottom")
        axes.set(xlabel="step", ylabel="training loss", ylim=(low, losses[len(losses) // 20] + 0.2))
        axes.legend(title="validation loss at the end", frameon=False)
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=240)
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adamw-rates", type=float, nargs="+", default=ADAMW_RATES)
    parser.add_argument("--muon-rates", type=float, nargs="+", default=MUON_RATES)
    parser.add_argument(
        "--rules", metavar="NAME", nargs="*", help="compare published rules, by the names of `lwopt rules`"
    )
    parser.add_argument("--ns-methods", metavar="METHOD", nargs="+", help="compare implementations of Newton-Schulz")
    parser.add_argument("--cnn", action="store_true", help="compare the words for convolutions on digits")
    parser.add_argument("--draw", metavar=("LOSSES", "PICTURE"), type=Path, nargs=2, help="draw an earlier comparison")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "compare")
    args, passed_on = parser.parse_known_args()
    if args.draw:
        draw(json.loads(args.draw[0].read_text()), args.draw[1])
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.cnn:
        from compare_cnn import compare_cnn

        compare_cnn(args.out)
        return
    if args.ns_methods:
        from compare_rules import compare_methods

        compare_methods(args.out, args.ns_methods, passed_on)
        return
    if args.rules is not None:
        from compare_rules import compare_rules

        compare_rules(args.out, args.rules, passed_on)
        return
    if not torch.accelerator.is_available() and not multiplies_bf16():
        print(IN_FP32, flush=True)
    adamw, muon = (json.loads((ROOT / "configs" / f"zero2_{name}.json").read_text()) for name in ("adamw", "muon"))

    with tqdm(total=len(args.adamw_rates) + len(args.muon_rates), unit="run", disable=None) as bar:
        sweep = Sweep(args.out, passed_on, bar)
        for rate in args.adamw_rates:
            sweep.run(f"adamw-{rate:g}", with_rates(adamw, rate))
        best_adamw = sweep.best("adamw")
        adamw_rate = float(best_adamw.removeprefix("adamw-"))
        for rate in args.muon_rates:
            sweep.run(f"muon-{rate:g}", with_rates(muon, rate, adamw_rate))
    best_muon = sweep.best("muon")

    best = {}
    for label, name in (("AdamW", best_adamw), ("LayerWiseMuon", best_muon)):
        metrics = args.out / name / "metrics.jsonl"
        lr = float(name.partition("-")[2])
        best[label] = {
            "lr": lr,
            "validation_loss": sweep.losses[name],
            "training_losses": [round(loss, 4) for loss in training_losses(metrics)],
        }
        speeds = sorted(row["tokens_per_s"] for row in read_metrics(metrics) if "loss" in row)
        speed = f"median {speeds[len(speeds) // 2]:,} tokens/s"
        print(f"{label}, lr {lr:g}: validation loss {sweep.losses[name]:.4f}, {speed}")
    results = {"validation_losses": sweep.losses, "best": best}
    write_whole(args.out / "losses.json", json.dumps(results, indent=1).encode())
    draw(results, args.out / "loss.png")
    final, reached = verdict(results)
    steps = f"after {reached} steps" if reached else "not"
    print(f"LayerWiseMuon reaches AdamW's final training loss, {final:.4f}, {steps}; pictures are in {args.out}")
    print(f"look at the runs: {args.out / 'loss.png'}\ntrain longer:     make train ARGS='--steps 1000'")


if __name__ == "__main__":
    main()
