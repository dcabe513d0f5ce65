"""Train AdamW and LayerWiseMuon for the same steps on the same batches, each at the best of a small sweep of rates.

AdamW's rate is swept first; the AdamW inside LayerWiseMuon (embedding, head, norms) then uses AdamW's best, and Muon's
rate is swept. Every run is the real example under the real launcher, in ``runs/compare/``; loss.png there shows the two
best runs, sweep.json holds every run's validation loss.

``--rules [NAME ...]`` compares the published rules instead, all or some: see compare_rules.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from run_folder import read_metrics, write_picture, write_whole
from tqdm import tqdm

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


def steps_to(rows: list[dict[str, Any]], loss: float, window: int = 20) -> int | None:
    """The first step at which the mean training loss of the last ``window`` steps is at most ``loss``, or None."""
    train = [row["loss"] for row in rows if "loss" in row]
    for end in range(window, len(train) + 1):
        if sum(train[end - window : end]) / window <= loss:
            return end
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adamw-rates", type=float, nargs="+", default=ADAMW_RATES)
    parser.add_argument("--muon-rates", type=float, nargs="+", default=MUON_RATES)
    parser.add_argument(
        "--rules", metavar="NAME", nargs="*", help="compare published rules, by the names of `lwopt rules`"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "compare")
    args, passed_on = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rules is not None:
        from compare_rules import compare_rules

        compare_rules(args.out, args.rules, passed_on)
        return
    adamw, muon = (json.loads((ROOT / "configs" / f"zero2_{name}.json").read_text()) for name in ("adamw", "muon"))

    with tqdm(total=len(args.adamw_rates) + len(args.muon_rates), unit="run") as bar:
        sweep = Sweep(args.out, passed_on, bar)
        for rate in args.adamw_rates:
            sweep.run(f"adamw-{rate:g}", with_rates(adamw, rate))
        best_adamw = sweep.best("adamw")
        adamw_rate = float(best_adamw.removeprefix("adamw-"))
        for rate in args.muon_rates:
            sweep.run(f"muon-{rate:g}", with_rates(muon, rate, adamw_rate))
    best_muon = sweep.best("muon")

    rows = {name: read_metrics(args.out / name / "metrics.jsonl") for name in (best_adamw, best_muon)}
    labels = {
        best_adamw: f"AdamW, lr {adamw_rate:g}",
        best_muon: f"LayerWiseMuon, lr {best_muon.removeprefix('muon-')}",
    }
    write_picture(args.out / "loss.png", [(labels[name], rows[name]) for name in rows])
    write_whole(args.out / "sweep.json", json.dumps(sweep.losses, indent=2).encode())
    for name, label in labels.items():
        speeds = sorted(row["tokens_per_s"] for row in rows[name] if "loss" in row)
        print(f"{label}: validation loss {sweep.losses[name]:.4f}, median {speeds[len(speeds) // 2]:,} tokens/s")
    final = [row["loss"] for row in rows[best_adamw] if "loss" in row][-20:]
    reached = steps_to(rows[best_muon], sum(final) / len(final))
    total = rows[best_adamw][-1]["step"]
    verdict = f"after {reached} of {total} steps" if reached else f"not within {total} steps"
    print(f"LayerWiseMuon reaches AdamW's final training loss (mean of 20 steps) {verdict}; pictures are in {args.out}")


if __name__ == "__main__":
    main()
