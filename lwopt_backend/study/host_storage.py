"""Storage of a host in a study: DeepSpeed's ZeRO and FSDP2 keep parameters, we exchange what has to be whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from lwopt_backend.plan.buffers.layout import BufferPlan, aligned_shard
from lwopt_backend.plan.buffers.step import BucketTime, Elements, bucket_work, schedule
from lwopt_backend.plan.build import plan_matrices
from lwopt_backend.plan.machine import StepTime, gather_seconds
from lwopt_backend.plan.matrix_plan import MatrixPlan
from lwopt_backend.plan.mesh import MeshLayout, Sharding
from lwopt_backend.plan.spread import plan_spread
from lwopt_backend.plan.spread_storage import ParameterPartition
from lwopt_backend.plan.storage import FlatPartition
from lwopt_backend.plan.types import Atom
from lwopt_backend.study.part import Collective, Part, RankMemory, Setting, owned_atoms, workspace

PARAMETER_BYTES = 2  # bf16 on the wire, whatever dtype the shards have
EXCHANGE_BYTES = 2  # bf16, the dtype in which Newton-Schulz begins and ends
IN_FLIGHT = 2  # exchange buckets at a time
EXCHANGE_BUCKET = 2**24  # elements of an exchange bucket, the default of ``bucket_numel``


def fsdp2_elements() -> Elements:
    """FSDP2's fp32 shards of parameters are the masters; bf16 travels."""
    return Elements(parameter=4, gradient=4, master=0, state=4)


def zero_part(name: str, atoms: Sequence[Atom], ranks: int, setting: Setting) -> Part:
    """ZeRO-1/2: what ``LayerWiseMuon`` plans. DeepSpeed's own collectives are counted, ours follow in the step."""
    layout = FlatPartition.build([atom.numel for atom in atoms], ranks)
    plan = plan_matrices(
        atoms,
        layout,
        policy="auto",
        machine=setting.machine,
        bucket_numel=setting.bucket_numel or EXCHANGE_BUCKET,
        element_bytes=EXCHANGE_BYTES,
    )
    sent = max(plan.wire_bytes())
    moved = [
        Collective("all-to-all to the owners, and back", 2 * len(plan.buckets), sent),
        *_zero_traffic(setting, layout.partition_numel * ranks, ranks),
    ]
    part, e = layout.partition_numel, setting.elements
    gradients = layout.partition_numel * ranks * e.gradient if setting.engine == "zero1" else part * e.gradient
    owned = owned_atoms(atoms, plan.ownership.owners, ranks)
    memory = [
        RankMemory(
            sum(layout.numels) * e.parameter,
            gradients + part * 4,  # the step's own fp32 copy of the partition's gradients
            part * e.master,
            part * e.state,
            (part * ranks - sum(layout.numels)) * e.parameter,
            workspace(mine) + 2 * IN_FLIGHT * EXCHANGE_BYTES * _largest_bucket(plan, atoms),
        )
        for mine in owned
    ]
    wire = sum(c.nbytes for c in moved) / setting.machine.link(ranks)
    latency = 2 * len(plan.buckets) * setting.machine.latency_seconds
    compute = setting.cost.seconds(max(plan.ownership.loads), setting.machine.flops_per_second)
    bucket_of = {atom: bucket for bucket, members in enumerate(plan.buckets) for atom in members}
    return Part(
        name,
        ranks,
        ranks,
        "host",
        f"policy {plan.ownership.policy}",
        tuple(atoms),
        plan.ownership.owners,
        tuple(bucket_of.get(index, -1) for index in range(len(atoms))),
        tuple(sum(atoms[i].numel for i in members) for members in plan.buckets),
        part * ranks,
        plan.ownership.loads,
        tuple(memory),
        tuple(moved),
        StepTime(compute, wire, latency),
        (),
    )


def _largest_bucket(plan: MatrixPlan, atoms: Sequence[Atom]) -> int:
    return max((sum(atoms[i].numel for i in members) for members in plan.buckets), default=0)


def _zero_traffic(setting: Setting, numel: int, ranks: int) -> list[Collective]:
    """DeepSpeed's own: stages 1 and 2 all-reduce gradients and gather parameters."""
    share = (ranks - 1) / ranks
    return [
        Collective(f"{setting.engine}'s all-reduce of gradients", 1, int(2 * setting.gradient_bytes * numel * share)),
        Collective(f"{setting.engine}'s all-gather of parameters", 1, int(PARAMETER_BYTES * numel * share)),
    ]


def fsdp2_plan(atoms: Sequence[Atom], ranks: int, bucket_numel: int | None) -> BufferPlan:
    """What ``LayerWiseOptimizer`` plans for ``atoms``, in the model's order, with rows over ``ranks`` ranks."""
    backward = list(reversed(atoms))
    shardings = tuple(Sharding(atom.shape, (ranks,), (0,), (False,)) for atom in backward)
    layout = MeshLayout(tuple((rank,) for rank in range(ranks)), shardings)
    plan = _as_buffer(plan_spread(backward, layout, bucket_numel=bucket_numel), ranks)
    return replace(plan, atoms=tuple(atoms), owners=tuple(reversed(plan.owners)), buckets=tuple(reversed(plan.buckets)))


def zero3_plan(atoms: Sequence[Atom], ranks: int, bucket_numel: int) -> BufferPlan:
    """What ``LayerWiseMuon`` plans for a sub-group of ZeRO-3 with ``atoms``, in the model's order."""
    layout = ParameterPartition.build([atom.numel for atom in atoms], ranks)
    return _as_buffer(plan_spread(atoms, layout, bucket_numel=bucket_numel), ranks)


def _as_buffer(plan: MatrixPlan, ranks: int) -> BufferPlan:
    """The plan as a study reads it; a matrix that does not travel is counted with the bucket before it."""
    bucket_of = {atom: bucket for bucket, members in enumerate(plan.buckets) for atom in members}
    buckets = tuple(accumulate((bucket_of.get(atom, 0) for atom in range(len(plan.atoms))), max))
    fullest = [[0] * ranks for _ in range(max(buckets) + 1)]
    for atom, owner, bucket in zip(plan.atoms, plan.ownership.owners, buckets):
        fullest[bucket][owner] += atom.numel
    shards = tuple(aligned_shard(max(numels), ranks) for numels in fullest)
    return BufferPlan("compact", "balanced over buckets", plan.atoms, ranks, plan.ownership.owners, buckets, shards)


def sharded_part(name: str, atoms: Sequence[Atom], ranks: int, setting: Setting) -> Part:
    """ZeRO-3 and FSDP2: every matrix is spread over all ranks, so all of them travel to owners and back."""
    if setting.engine == "fsdp2":
        plan = fsdp2_plan(atoms, ranks, setting.bucket_numel)
    else:
        plan = zero3_plan(atoms, ranks, setting.bucket_numel or EXCHANGE_BUCKET)
    e = fsdp2_elements() if setting.engine == "fsdp2" else setting.elements
    shard, share = -(-plan.numel // ranks), (ranks - 1) / ranks
    # A rank sends its piece of every matrix that is not its own, and as an owner all other ranks' pieces of the update.
    exchanged = int((shard + max(plan.owned_numels())) * share * EXCHANGE_BYTES)
    collectives = (
        Collective("all-to-all to the owners, and back", 2 * len(plan.shard_numels), exchanged),
        Collective(
            f"{setting.engine}'s reduce-scatter of gradients", 1, int(plan.numel * setting.gradient_bytes * share)
        ),
        Collective(f"{setting.engine}'s all-gathers of parameters", 2, int(2 * plan.numel * PARAMETER_BYTES * share)),
    )
    owned = owned_atoms(plan.atoms, plan.owners, ranks)
    largest = max(plan.bucket_numels)
    memory = tuple(
        RankMemory(
            shard * e.parameter,
            shard * e.gradient,
            shard * e.master,
            shard * e.state,
            0,
            workspace(mine) + 2 * IN_FLIGHT * EXCHANGE_BYTES * -(-largest // ranks),
        )
        for mine in owned
    )
    wire = sum(c.nbytes for c in collectives) / setting.machine.link(ranks)
    latency = 2 * len(plan.shard_numels) * setting.machine.latency_seconds
    compute = setting.cost.seconds(max(plan.loads()), setting.machine.flops_per_second)
    return Part(
        name,
        ranks,
        ranks,
        "compact",
        plan.strategy,
        plan.atoms,
        plan.owners,
        plan.buckets,
        tuple(plan.bucket_numels),
        plan.numel,
        tuple(plan.loads()),
        memory,
        collectives,
        StepTime(compute, wire, latency),
        tuple(_exchange_timeline(plan, ranks, setting)),
    )


def _exchange_timeline(plan: BufferPlan, ranks: int, setting: Setting) -> list[BucketTime]:
    """Of our exchange alone: the host's own collectives are over before the step, or come after it."""
    machine = setting.machine
    bytes_each = [numel * EXCHANGE_BYTES // ranks for numel in plan.bucket_numels]
    wire = [sum(gather_seconds(machine, nbytes, ranks)) for nbytes in bytes_each]
    work = bucket_work(plan, machine, setting.cost)
    return schedule([(nbytes, nbytes) for nbytes in bytes_each], wire, work, wire)
