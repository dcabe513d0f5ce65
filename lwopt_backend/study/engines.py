"""The engines a study knows, and how each plans a buffer."""

from __future__ import annotations

from collections.abc import Sequence

from lwopt_backend.plan.buffers.groups import plan_buffer
from lwopt_backend.plan.types import Atom
from lwopt_backend.study.host_storage import fsdp2_elements, sharded_part, zero_part
from lwopt_backend.study.owned import owned_part
from lwopt_backend.study.part import Part, RankMemory, Setting


def plan_part(name: str, atoms: Sequence[Atom], ranks: int, setting: Setting) -> Part:
    """Plan ``atoms`` over ``ranks`` data-parallel ranks for ``setting.engine``. Raises ValueError without atoms."""
    if not atoms:
        raise ValueError(f"{name}: there is no matrix to plan")
    if setting.engine == "owned":
        grouped = plan_buffer(
            atoms,
            ranks,
            layout=setting.layout,
            bucket_numel=setting.bucket_numel,
            machine=setting.machine,
            cost=setting.cost,
            group_size=setting.group_size,
            elements=setting.elements,
        )
        return owned_part(name, grouped, setting)
    if setting.engine in ("zero1", "zero2"):
        return zero_part(name, atoms, ranks, setting)
    return sharded_part(name, atoms, ranks, setting)


def elementwise_memory(numel: int, ranks: int, setting: Setting) -> RankMemory:
    """AdamW's parameters: two moments, evenly sharded, as their host holds them."""
    shard = -(-numel // ranks)
    e = fsdp2_elements() if setting.engine == "fsdp2" else setting.elements
    whole = setting.engine in ("owned", "zero1", "zero2")
    gradients = numel if setting.engine in ("owned", "zero1") else shard
    return RankMemory(
        (numel if whole else shard) * e.parameter, gradients * e.gradient, shard * e.master, 2 * shard * e.state
    )
