"""What is printed when owned storage is made: the routing, the layout and why, and what each rank owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from lwopt_backend import report
from lwopt_backend.owned.core import Holdings, OwnedCore
from lwopt_backend.owned.members import Member
from lwopt_backend.owned.memory import RankMemory
from lwopt_backend.plan.buffers.owned import OwnedPlan
from lwopt_backend.routing import Route


def show(
    routes: Sequence[Route],
    core: OwnedCore,
    groups: Sequence[Mapping[str, Any]],
    memory: Callable[[Holdings, int], RankMemory],
) -> None:
    """Print the routing table and, for each set of ranks, its layout and a row per rank of an instance.

    ``groups`` are the param groups. ``memory`` tells what a rank of an instance holds; it is asked for those that are
    shown.
    """
    console = report.standard_output()
    report.show_routing(console, routes, groups)
    for number, held in enumerate(core.holdings):
        plan = held.plan
        whose = f"{held.sharers.everyone.world_size} {'ranks that share experts' if number else 'data-parallel ranks'}"
        kinds = [bucket.kind for bucket in plan.buckets]
        counts = f"{kinds.count('matrix')} matrix and {kinds.count('elementwise')} element-wise bucket(s)"
        console.print(f"Storage: owned by {whose}; {counts}, {plan.padding} elements of padding.")
        for sentence in plan.choices:
            console.print(sentence)
        console.print(plan_table(plan, partial(memory, held), [core.members[number] for number in held.numbers]))
    report.show_digest(console, core.plan_digest)


def plan_table(plan: OwnedPlan, memory: Callable[[int], RankMemory], members: Sequence[Member]) -> Table:
    """One row per rank: what it owns, how much work that is, what it holds between steps and sends in one."""
    table = Table()
    for heading in ("rank", "storage", "matrices", "GFLOP", "of all", "parameters", "masters", "state", "sent a step"):
        table.add_column(heading, justify="right")
    for rank in report.shown_ranks(plan.loads):
        held = memory(rank)
        pieces = [piece for bucket in plan.buckets for piece in bucket.pieces(rank)]
        owned = sum(p.start <= block.flat(0) < p.stop for p in pieces for block in members[p.param].blocks)
        table.add_row(
            str(rank),
            "owned",
            str(owned),
            f"{plan.loads[rank] / 1e9:.3g}",
            f"{plan.loads[rank] / max(1, sum(plan.loads)):.1%}",
            report.nbytes(held.parameters + held.padding),
            report.nbytes(held.masters),
            report.nbytes(held.state),
            report.nbytes(held.sent),
        )
    return table
