"""Several ranks on one matrix (``teams``): how much shorter is a step than with one owner? Planned, and measured.

    python benchmarks/teams.py                        both, about two minutes on two cores
    python benchmarks/teams.py --machine b200-8x-ib   planned on another cluster

Planned is the busiest rank's Newton-Schulz on FSDP2, with what it waits for its team, as `lwopt plan` models it: each
matrix with one owner, by torch's iteration and by Gram Newton-Schulz, and with ``teams="auto"``. A training step is 6
flops per active parameter and token at the machine's speed, 16 million tokens. Measured is the optimizer's step on a
model of one matrix, FSDP2 on two ranks, gloo, one thread each, both by Gram Newton-Schulz.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from public_models import MODELS, dense, load
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.plan import Machine
from lwopt_backend.plan.cost import CLUSTERS
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import read_shapes_json
from lwopt_backend.planner.study import Deployment, plan_study

TOKENS = 16_000_000
ACTIVE = {"deepseek-v3": 8 / 256}  # of experts
MODELS["qwen3-32b"] = dense(64, 5120, 64, 8, 128, 25600)
MODELS["llama3.1-405b"] = dense(126, 16384, 128, 8, 128, 53248)
CASES = {
    "qwen3-32b": (256, 1024, 4096),
    "llama3.1-70b": (512, 2048, 8192),
    "llama3.1-405b": (1024, 4096, 16384),
    "deepseek-v3": (1024,),
}
MEASURED = ((512, 2048), (1024, 1024), (1024, 4096), (4096, 1024))


def plan(shapes: Path, ranks: int, machine: Machine, **options: Any) -> Planned:
    setting = Setting.of("fsdp2", machine, None, options)
    study = plan_study(read_shapes_json(shapes, setting.training), Deployment(ranks), setting)
    return study.stages[0].planned[0]


def training_seconds(name: str, matrices: Sequence[tuple[str, tuple[int, int]]], ranks: int, machine: Machine) -> float:
    active = sum(a * b * (ACTIVE.get(name, 1.0) if ".experts." in matrix else 1.0) for matrix, (a, b) in matrices)
    return 6 * active * TOKENS / ranks / machine.flops_per_second


def planned(machine: Machine, folder: str) -> Table:
    table = Table(title=f"Planned for {machine.name}: seconds of the busiest rank", title_justify="left")
    updates = ("one owner", "the same, Gram", "teams", "team size")
    for heading in ("model", "ranks", "matrices", *updates, "training step", "gain"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, sizes in CASES.items():
        matrices = load(name)
        shapes = Path(folder) / f"{name}.json"
        shapes.write_text(json.dumps(matrices))
        for ranks in sizes:
            options: list[dict[str, Any]] = [{}, {"matrix": {"name": "muon", "gram_aspect": 1.5}}, {"teams": "auto"}]
            plans = [plan(shapes, ranks, machine, **each) for each in options]
            owner, gram, teams = (max(each.loads) / machine.flops_per_second for each in plans)
            assert plans[2].part is not None
            size = max(1 if atom.team is None else atom.team.size for atom in plans[2].part.atoms)
            step = training_seconds(name, matrices, ranks, machine)
            gain = f"{(min(owner, gram) - min(owner, gram, teams)) / (step + min(owner, gram)):.1%}"
            figures = [f"{seconds:.3f}" for seconds in (owner, gram, teams)]
            table.add_row(name, f"{ranks:,}", f"{len(matrices):,}", *figures, str(size), f"{step:.1f}", gain)
    return table


def run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    table = Table(title=f"Measured on {ranks} ranks, CPU: a step, ms", title_justify="left")
    for heading in ("matrix", "one owner", f"a team of {ranks}", "team to owner", "largest difference of updates"):
        table.add_column(heading, justify="right")
    for shape in MEASURED:
        runs = {teams: trained(shape, ranks, teams) for teams in (None, ranks)}
        times: dict[int | None, list[float]] = {teams: [] for teams in runs}
        for turn in range(6):
            for teams, (_, optimizer) in runs.items():
                dist.barrier()
                begun = time.perf_counter()
                optimizer.step()
                dist.barrier()
                times[teams] += [time.perf_counter() - begun] if turn else []
        owner, team = (1e3 * statistics.median(each) for each in times.values())
        weights = [model.weight.full_tensor() for model, _ in runs.values()]
        differ = (weights[0] - weights[1]).abs().max() / 6  # steps of rate one
        numbers = (f"{owner:.0f}", f"{team:.0f}", f"{team / owner:.2f}", f"{differ:.4f}")
        table.add_row(f"{shape[0]} x {shape[1]}", *numbers)
    if rank == 0:
        Console(width=120, highlight=False).print(table)
    dist.destroy_process_group()


def trained(shape: tuple[int, int], ranks: int, teams: int | None) -> tuple[Any, LayerWiseOptimizer]:
    """A model of one matrix with a gradient, and its optimizer."""
    torch.manual_seed(0)
    model: Any = nn.Linear(shape[1], shape[0], bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    matrix = {"name": "muon", "lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "none", "ns_method": "gram"}
    optimizer = LayerWiseOptimizer(model, matrix, include=["*"], teams=teams, report=False)
    model(torch.randn(64, shape[1])).square().mean().backward()
    return model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=CLUSTERS, default="h100-8x-ib")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Console(width=130, highlight=False).print(planned(CLUSTERS[options.machine], folder))
        mp.spawn(run_rank, (2, folder), nprocs=2)


if __name__ == "__main__":
    main()
