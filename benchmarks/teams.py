"""Several ranks on one matrix: is a team faster at its Newton-Schulz than one owner? A model, and a measurement.

    python benchmarks/teams.py                        both, about two minutes on two cores
    python benchmarks/teams.py --machine b200-8x-ib   the model on another cluster

Gram Newton-Schulz reads the longer side only to form R = X X^T and to multiply by the product of its polynomials. So a
team of ranks that have columns of X forms R by an all-reduce and multiplies its own columns; the products of s x s
matrices, s being the shorter side, are computed by every member (``all``), or by rows with an all-gather each
(``rows``). Matrices that cost more than a rank's even share are given to teams.

Modelled is the busiest rank's Newton-Schulz, on Gram from aspect 1.5 on, at best: no rank waits for another. A training
step is 6 flops per active parameter and token at the machine's speed, 16 million tokens. Measured are two ranks, from
shards of rows to the update's shards of rows, gloo, one thread each.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from public_models import MODELS, dense, load
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lwopt_backend.plan import Machine
from lwopt_backend.plan.cost import CLUSTERS, all_reduce_seconds, gather_seconds, gram_flops
from lwopt_backend.rules import gram_newton_schulz
from lwopt_backend.rules.newton_schulz import _product_of_steps, product, segments

TOKENS = 16_000_000
STEPS, SEGMENTS, PRODUCTS = 5, 2, 14  # PRODUCTS: of s x s matrices, in both segments
ACTIVE = {"mixtral-8x7b": 2 / 8, "deepseek-v3": 8 / 256, "kimi-k2-like": 8 / 384}  # of experts
CASES = {"llama3.1-70b": (512, 2048, 8192), "deepseek-v3": (1024, 8192), "llama3.1-405b": (1024, 4096, 16384)}
MEASURED = ((512, 2048), (1024, 1024), (1024, 4096))
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
Shape = tuple[int, int]


def member_seconds(shape: Shape, team: int, machine: Machine, rows: bool) -> float:
    """Of one member of a team."""
    short, long = sorted(shape)
    squares = PRODUCTS * 2 * short**3 / (team if rows else 1)
    seconds = (squares + SEGMENTS * 4 * short * short * long / team) / machine.flops_per_second
    seconds += SEGMENTS * sum(all_reduce_seconds(machine, 4 * short * short, team))
    if rows:
        seconds += PRODUCTS * sum(gather_seconds(machine, 2 * short * short, team))
    return seconds


def busiest(shapes: Sequence[Shape], ranks: int, machine: Machine, team: int = 1, rows: bool = False) -> float:
    """Seconds of the busiest rank, the costliest matrices dealt first; those above an even share go to teams."""
    alone = {shape: gram_flops(shape) / machine.flops_per_second for shape in set(shapes)}
    shared = {
        shape: member_seconds(shape, team, machine, rows) if team > 1 else seconds for shape, seconds in alone.items()
    }
    even = sum(alone[shape] for shape in shapes) / ranks
    jobs: list[float] = []
    for shape in shapes:
        helps = alone[shape] > even and shared[shape] < alone[shape]
        jobs += [shared[shape]] * team if helps else [alone[shape]]
    loads = [0.0] * ranks
    for seconds in sorted(jobs, reverse=True):
        heapq.heapreplace(loads, loads[0] + seconds)
    return max(loads)


def training_seconds(name: str, matrices: Sequence[tuple[str, Shape]], ranks: int, machine: Machine) -> float:
    active = sum(a * b * (ACTIVE.get(name, 1.0) if ".experts." in matrix else 1.0) for matrix, (a, b) in matrices)
    return 6 * active * TOKENS / ranks / machine.flops_per_second


def modelled(machine: Machine) -> Table:
    table = Table(title=f"Modelled on {machine.name}: seconds of the busiest rank", title_justify="left")
    for heading in ("model", "ranks", "matrices", "an owner", "teams of 8, all", "teams of 8, rows", "training step"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    table.add_column("won of it", justify="right")
    for name, sizes in CASES.items():
        matrices = load(name)
        shapes = [shape for _, shape in matrices]
        for ranks in sizes:
            owner, every, rows = (busiest(shapes, ranks, machine, *how) for how in ((), (8, False), (8, True)))
            step = training_seconds(name, matrices, ranks, machine)
            figures = (f"{seconds:.3f}" for seconds in (owner, every, rows))
            won = f"{(owner - min(every, rows)) / (step + owner):.1%}"
            table.add_row(name, f"{ranks:,}", f"{len(shapes):,}", *figures, f"{step:.1f}", won)
    return table


# Measured


def by_owner(rows: Tensor, shape: Shape) -> Tensor:
    """Rank 0 gets the whole matrix and returns the update's rows."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = [torch.empty_like(rows) for _ in range(ranks)] if rank == 0 else None
    dist.gather(rows, parts)
    updates = None
    if parts is not None:
        options = {"steps": STEPS, "coefficients": COEFFICIENTS, "eps": 1e-7, "dtype": torch.bfloat16}
        updates = [part.contiguous() for part in gram_newton_schulz(torch.cat(parts), **options).chunk(ranks)]
    mine = torch.empty_like(rows)
    dist.scatter(mine, updates)
    return mine


def by_team(rows: Tensor, shape: Shape) -> Tensor:
    """Every rank gets columns, forms its part of the Gram matrix, and multiplies its columns."""
    ranks = dist.get_world_size()
    received = torch.empty(shape[0], shape[1] // ranks, dtype=rows.dtype)
    dist.all_to_all_single(received, torch.cat(rows.chunk(ranks, dim=1)).contiguous())
    x, first = received, True
    for triples in segments(COEFFICIENTS, STEPS):
        gram = (x @ x.mT).float()
        dist.all_reduce(gram)
        if first:  # the trace is the square of the norm
            norm, first = gram.diagonal().sum().sqrt(), False
            gram, x = gram / norm**2, x / norm.to(x.dtype)
        x = _product_of_steps(gram.to(x.dtype), triples, product) @ x
    back = torch.empty_like(x)
    dist.all_to_all_single(back, x)
    return torch.cat(back.chunk(ranks), dim=1)


def run_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    lines = []
    for shape in MEASURED:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        rows = matrix.chunk(ranks)[rank].contiguous()
        times: dict[str, list[float]] = {"owner": [], "team": []}
        results = {}
        for turn in range(6):
            for name, function in (("owner", by_owner), ("team", by_team)):
                dist.barrier()
                begun = time.perf_counter()
                results[name] = function(rows, shape)
                dist.barrier()
                times[name] += [time.perf_counter() - begun] if turn else []
        owner, team = (1e3 * statistics.median(times[name]) for name in ("owner", "team"))
        differ = (results["owner"].float() - results["team"].float()).abs().max() * shape[1] ** 0.5
        lines.append(
            (f"{shape[0]} x {shape[1]}", f"{owner:.0f}", f"{team:.0f}", f"{team / owner:.2f}", f"{differ:.3f}")
        )
    if rank == 0:
        table = Table(title=f"Measured on {ranks} ranks, CPU", title_justify="left")
        for heading in ("matrix", "owner, ms", "team, ms", "team to owner", "largest difference x sqrt(columns)"):
            table.add_column(heading, justify="right")
        for line in lines:
            table.add_row(*line)
        Console(width=120, highlight=False).print(table)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=CLUSTERS, default="h100-8x-ib")
    options = parser.parse_args()
    MODELS["llama3.1-405b"] = dense(126, 16384, 128, 8, 128, 53248)
    Console(width=130, highlight=False).print(modelled(CLUSTERS[options.machine]))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (2, folder), nprocs=2)


if __name__ == "__main__":
    main()
