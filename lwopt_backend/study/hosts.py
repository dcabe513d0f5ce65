"""Storage of a host in a study: DeepSpeed's ZeRO and FSDP2 keep parameters, we exchange what has to be whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from lwopt_backend.plan.buffers.step import BucketTime, bucket_work, schedule
from lwopt_backend.plan.machine import StepTime, gather_seconds
from lwopt_backend.plan.matrix_plan import MatrixPlan
from lwopt_backend.plan.types import Atom
from lwopt_backend.study.grouping import Share
from lwopt_backend.study.part import Collective, Part, Placed, RankMemory, workspace
from lwopt_backend.study.setting import Setting

IN_FLIGHT = 2  # exchange buckets at a time


def host_part(
    name: str,
    plans: Sequence[MatrixPlan],
    shared: Share,
    setting: Setting,
    memory: Sequence[RankMemory],
    *,
    buffer_numel: int,
    host: Sequence[Collective],
    spread: bool,
) -> Part:
    """The figures of ``plans``, one after the other on the same ranks. ``memory`` is what the host holds of them.

    ``host`` are the host's own collectives. ``spread`` says that every matrix lies on all ranks.
    """
    ranks = plans[0].layout.world_size
    placed = _placed(plans, shared, setting, spread)
    trips = sum(plan.trips(bucket) for plan in plans for bucket in range(len(plan.buckets)))
    sent = max(map(sum, zip(*(plan.wire_bytes() for plan in plans))))
    moved = (Collective("all-to-all to the owners, and back", trips, sent), *host)
    in_flight = IN_FLIGHT * 2 * max(map(_largest_bucket, plans)) // (ranks if spread else 1)
    held = [replace(memory[rank], workspace=workspace(mine) + in_flight) for rank, mine in enumerate(placed.owned())]
    time = StepTime(
        setting.seconds(max(placed.loads())),
        sum(each.nbytes for each in moved) / setting.machine.link(ranks),
        trips * setting.machine.latency_seconds,
    )
    return Part(
        name,
        ranks,
        "compact" if spread else "host",
        f"policy {plans[0].ownership.policy!r}",
        placed,
        buffer_numel,
        tuple(held),
        moved,
        time,
        tuple(_timeline(placed, plans[0].element_bytes, setting)) if spread else (),
    )


def _largest_bucket(plan: MatrixPlan) -> int:
    """Bytes."""
    sizes = (sum(plan.atoms[i].numel for i in members) for members in plan.buckets)
    return plan.element_bytes * max(sizes, default=0)


def _placed(plans: Sequence[MatrixPlan], shared: Share, setting: Setting, spread: bool) -> Placed:
    """Matrices of all plans, in the model's order. Where all travel, one that stays is counted with the one before."""
    rows: list[tuple[Atom, int, int]] = []
    numels: list[int] = []
    for plan in plans:
        bucket_of = {atom: len(numels) + number for number, members in enumerate(plan.buckets) for atom in members}
        stays = len(numels) if spread and plan.buckets else -1
        buckets = [bucket_of.get(atom, stays) for atom in range(len(plan.atoms))]
        buckets = list(accumulate(buckets, max)) if spread else buckets
        rows += list(zip(plan.atoms, plan.ownership.owners, buckets))
        numels += [sum(plan.atoms[i].numel for i in members) for members in plan.buckets]
    order = {name: place for place, name in enumerate(_names(shared))}
    rows.sort(key=lambda row: order[row[0].name])
    return Placed(
        tuple(shared.shown(atom, setting) for atom, _, _ in rows),
        plans[0].layout.world_size,
        tuple(owner for _, owner, _ in rows),
        tuple(bucket for _, _, bucket in rows),
        tuple(numels),
    )


def _names(shared: Share) -> list[str]:
    """Of the matrices, in the model's order."""
    grouping = shared.grouping
    return [block.of(route.name) for route in grouping.routes for block in grouping.matrices_in(route.name)]


def _timeline(placed: Placed, element_bytes: int, setting: Setting) -> list[BucketTime]:
    """Of our exchange alone: the host's own collectives are over before the step, or come after it."""
    bytes_each = [numel * element_bytes // placed.shards for numel in placed.bucket_numels]
    wire = [sum(gather_seconds(setting.machine, nbytes, placed.shards)) for nbytes in bytes_each]
    work = bucket_work(placed, setting.machine, setting.work)
    return schedule([(nbytes, nbytes) for nbytes in bytes_each], wire, work, wire)
