"""Which ranks share which parameters: all of a process group, in instances of fewer that each own everything."""

from __future__ import annotations

from lwopt_backend.plan.buffers.owned import OwnedPlan
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.ranks import Alone, PartCollectives
from lwopt_backend.runtime.sharers import Sharers


def share(everyone: PartCollectives, plan: OwnedPlan, divisor: float) -> Sharers:
    """Instances of neighbouring ranks, and the ranks at the same place of each. Called on all of ``everyone``."""
    if plan.instances == 1:
        return Sharers(everyone, everyone, None, divisor)
    if plan.group_size == 1:
        return Sharers(everyone, Alone(), everyone, divisor)
    assert isinstance(everyone, TorchCollectives)
    size, mine = plan.group_size, everyone.ranks()
    first = everyone.rank - everyone.rank % size
    along = [everyone.process_group]
    instance = TorchCollectives.over(mine[first : first + size], along)
    replicas = TorchCollectives.over(mine[everyone.rank % size :: size], along)
    return Sharers(everyone, instance, replicas, divisor)
