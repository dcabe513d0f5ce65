"""`compare.py --rules`: train the GPT with every published rule, and count the steps to AdamW's loss.

Each rule trains the matrices; AdamW trains everything else, at the rate at which AdamW alone was best. A rule's rate is
searched by factors of two, from the rate in RATES upwards or downwards for as long as the validation loss falls, on one
seed. At its best rate, a rule then trains with two more seeds. All runs with one seed start from the same weights and
see the same batches. ``rules.json`` holds every run's validation loss, ``rules.png`` is the picture.
"""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

from compare import Sweep, steps_to, training_losses
from rich.console import Console
from rich.table import Table
from run_folder import ON_ANY_PAGE, write_whole
from tqdm import tqdm

from lwopt_backend.cli.rule_facts import PUBLISHED

ADAMW = {"betas": [0.9, 0.95], "weight_decay": 0.1}
ALONE = {  # element-wise rules, as classes for whole matrices, which compute the same
    "AdamW": {"name": "torch_optimizer", "class": "torch.optim.AdamW", **ADAMW},
    "Lion": {"name": "torch_optimizer", "class": "pytorch_optimizer.Lion", "betas": [0.9, 0.99], "weight_decay": 0.1},
    "SGD": {"name": "torch_optimizer", "class": "torch.optim.SGD", "momentum": 0.9},
}
RATES = {"AdamW": 4e-3, "Lion": 1e-3, "SGD": 0.1, "SOAP": 4e-3, "Shampoo": 4e-3, "MuonH": 0.02, "NorMuonH": 0.02}
RATE = 0.02  # of every other rule
SEEDS = (1, 2, 3)
SMALL = ["--steps", "150", "--layers", "2", "--width", "96", "--context", "128", "--save-every", "1000000"]
MOST_DOUBLINGS = 4


def config_of(name: str, lr: float, adamw_lr: float) -> dict[str, Any]:
    """The example's configuration: the published rule for matrices at ``lr``, AdamW at ``adamw_lr`` elsewhere."""
    rule, options = PUBLISHED[name]
    matrix = copy.deepcopy(ALONE[name]) if name in ALONE else {"weight_decay": 0.1, "name": rule, **options}
    if "muon" in rule:
        matrix["ns_dtype"] = "float32"  # CPUs multiply bf16 slowly
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"matrix": {**matrix, "lr": lr}, "elementwise": {"name": "adamw", "lr": adamw_lr, **ADAMW}},
    }


class Rules:
    """The runs of every rule, by the names of publications."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.best: dict[str, float] = {}  # the rate of each rule

    def loss(self, name: str, lr: float, seed: int = SEEDS[0]) -> float:
        """The validation loss of one run, which is not run twice. A run that diverges has an infinite loss."""
        run = self.run_name(name, lr, seed)
        if run not in self.sweep.losses:
            adamw_lr = lr if name == "AdamW" else self.best["AdamW"]
            found = self.sweep.run(run, config_of(name, lr, adamw_lr), "--seed", str(seed))
            self.sweep.losses[run] = found if found == found else float("inf")
        return self.sweep.losses[run]

    def run_name(self, name: str, lr: float, seed: int) -> str:
        return f"{name.replace('/', '-').replace(' ', '-')}-{lr:g}-seed{seed}"

    def search(self, name: str) -> None:
        """Find the best rate on the first seed, then train with the other seeds."""
        best = RATES.get(name, RATE)
        for factor in (2.0, 0.5):
            moved = False
            for _ in range(MOST_DOUBLINGS):
                if self.loss(name, best * factor) >= self.loss(name, best):
                    break
                best, moved = best * factor, True
            if moved:
                break
        self.best[name] = best
        for seed in SEEDS[1:]:
            self.loss(name, best, seed)

    def row(self, name: str) -> dict[str, Any]:
        """Best rate, validation losses by seed, and by seed the steps to AdamW's final training loss, or None."""
        runs = [self.run_name(name, self.best[name], seed) for seed in SEEDS]
        steps = []
        for seed, run in zip(SEEDS, runs, strict=True):
            adamw = self.sweep.folder / self.run_name("AdamW", self.best["AdamW"], seed) / "metrics.jsonl"
            final = statistics.mean(training_losses(adamw)[-20:])
            steps.append(steps_to(training_losses(self.sweep.folder / run / "metrics.jsonl"), final))
        return {"lr": self.best[name], "losses": [self.sweep.losses[run] for run in runs], "steps": steps}


def compare_rules(folder: Path, names: list[str], passed_on: list[str]) -> None:
    """Run everything, print the table and write rules.json and rules.png into ``folder``."""
    unknown = sorted(set(names) - set(PUBLISHED))
    if unknown:
        raise SystemExit(f"--rules {unknown[0]}: expected names of {', '.join(PUBLISHED)}")
    names = ["AdamW", *(name for name in names or PUBLISHED if name != "AdamW")]
    rows = {}
    with tqdm(total=len(names), unit="rule", disable=None) as bar:
        rules = Rules(Sweep(folder, [*SMALL, *passed_on], bar, fsdp2=True))
        for name in names:
            rules.search(name)
            rows[name] = rules.row(name)
            bar.update()
    write_whole(folder / "rules.json", json.dumps({"rules": rows, "runs": rules.sweep.losses}, indent=2).encode())
    write_dots(folder / "rules.png", rows)
    table = Table("rule", "best rate", "validation loss: mean", "of three seeds", "steps to AdamW's loss, by seed")
    for name, row in sorted(rows.items(), key=lambda item: statistics.mean(item[1]["losses"])):
        low, high = min(row["losses"]), max(row["losses"])
        steps = ", ".join("not reached" if found is None else str(found) for found in row["steps"])
        table.add_row(
            name, f"{row['lr']:g}", f"{statistics.mean(row['losses']):.3f}", f"{low:.3f} to {high:.3f}", steps
        )
    Console().print(table)
    print(f"AdamW's loss is the mean training loss of its last 20 steps, with the same seed; pictures are in {folder}")


MUON_RATE, ADAMW_RATE = 0.02, 8e-3  # the best of ``--rules``


def compare_methods(folder: Path, methods: list[str], passed_on: list[str]) -> None:
    """Train Muon with each ``ns_method``, iterating in bfloat16, on all seeds; print the validation losses and write
    them into ``ns_methods.json``."""
    config = config_of("Muon", MUON_RATE, ADAMW_RATE)
    losses: dict[str, list[float]] = {}
    with tqdm(total=len(methods) * len(SEEDS), unit="run", disable=None) as bar:
        sweep = Sweep(folder, [*SMALL, *passed_on], bar, fsdp2=True)
        for method in methods:
            config["optimizer"]["matrix"] |= {"ns_method": method, "ns_dtype": "bfloat16"}
            losses[method] = [sweep.run(f"{method}-seed{seed}", config, "--seed", str(seed)) for seed in SEEDS]
            bar.update(len(SEEDS))
    write_whole(folder / "ns_methods.json", json.dumps(losses, indent=2).encode())
    table = Table("ns_method", *(f"seed {seed}" for seed in SEEDS), "mean")
    for method, found in losses.items():
        table.add_row(method, *(f"{loss:.4f}" for loss in found), f"{statistics.mean(found):.4f}")
    Console().print(table)


def write_dots(path: Path, rows: dict[str, dict[str, Any]]) -> None:
    """A dot a seed: the validation loss of every rule, best first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ordered = sorted(rows, key=lambda name: -statistics.mean(rows[name]["losses"]))
    with pyplot.rc_context(ON_ANY_PAGE):
        figure, axes = pyplot.subplots(figsize=(4.2, 0.24 * len(ordered) + 1.0), layout="constrained")  # as on a phone
        for height, name in enumerate(ordered):
            axes.plot(rows[name]["losses"], [height] * len(SEEDS), "o", ms=4, color="C1" if name == "AdamW" else "C0")
        axes.set_yticks(range(len(ordered)), [f"{name}, lr {rows[name]['lr']:g}" for name in ordered])
        axes.set(xlabel="validation loss, nats per byte")
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=240)
        pyplot.close(figure)
