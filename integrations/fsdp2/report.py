"""What is printed when an optimizer is made for an FSDP2 model: the routing, and the plan of every mesh."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lwopt_backend import report
from lwopt_backend.integrations.fsdp2.meshes import Mesh
from lwopt_backend.integrations.fsdp2.stepper import MeshStepper
from lwopt_backend.mesh_plan import mesh_state_nbytes
from lwopt_backend.registry import MATRIX_RULES
from lwopt_backend.routing import Route


def show(routes: Sequence[Route], steppers: Sequence[MeshStepper], plan_digest: str) -> None:
    """Print the routing table, one plan table per mesh, and the plan's name to standard output."""
    console = report.standard_output()
    report.show_routing(console, routes, steppers[0].groups)
    for stepper in steppers:
        console.print(_sentence(stepper))
        if stepper.mesh is not None:
            console.print(_table(stepper, stepper.mesh))
    report.show_digest(console, plan_digest)


def _sentence(stepper: MeshStepper) -> str:
    plan, elements = stepper.plan, len(stepper.members) - len(stepper.matrices)
    counts = f"{len(plan.atoms)} matrices and {elements} element-wise parameters"
    if stepper.mesh is None:
        return f"Plan: {counts} are plain tensors; every rank steps its own copy."
    travelling = sum(map(len, plan.buckets))
    padded = sum(split is not None for split in plan.splits)
    return (
        f"Plan: {counts} on a {stepper.mesh}; {travelling} matrices travel, in {len(plan.buckets)} bucket(s), "
        f"{padded} in equal parts; busiest rank over mean {plan.ownership.imbalance:.3f}."
    )


def _table(stepper: MeshStepper, mesh: Mesh) -> Table:
    """One row per rank: what it owns, how much work that is, the state it keeps, and what it sends."""
    plan = stepper.plan
    loads, sent, owned = plan.ownership.loads, plan.wire_bytes(), plan.owned_counts()
    work = " / ".join(sorted({MATRIX_RULES[m.rule].work for m in stepper.members if m.rule in MATRIX_RULES}))
    table = Table()
    for heading in ("rank", "atoms", f"{work or 'matrix'} GFLOP", "of all", "state", "sent a step"):
        table.add_column(heading, justify="right")
    ranks = sorted(mesh.ranks)
    for place in report.shown_ranks(loads):
        table.add_row(
            str(ranks[place]),
            str(owned[place]),
            f"{loads[place] / 1e9:.3g}",
            f"{loads[place] / max(1, sum(loads)):.1%}",
            report.nbytes(mesh_state_nbytes(stepper.members, stepper.groups, stepper.config, mesh.coordinates[place])),
            report.nbytes(sent[place]),
        )
    return table
