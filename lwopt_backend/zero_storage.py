"""How ZeRO stores the parameters of a param group, and which of them it steps at a time.

===========================  =====================================  ==========================================
stage                        stored on every rank                   stepped at a time
===========================  =====================================  ==========================================
0                            all parameters, whole                  a param group
1, 2 (and BF16_Optimizer)    an equal part of each param group      a param group
3                            an equal part of each parameter        a sub-group: parameters of one param group
===========================  =====================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lwopt_backend.group_plan import HostLayout
from lwopt_backend.plan import FlatPartition, ParameterPartition, Replicas
from lwopt_backend.plan.storage import SUB_GROUP_SIZE


def unit_layouts(
    numels: Sequence[int],
    ranks: int,
    stage: int,
    *,
    is_matrix: bool,
    sub_group_size: int = SUB_GROUP_SIZE,
    param_alignment: int = 1,
) -> Iterator[tuple[slice, HostLayout]]:
    """Which parameters of a group, of so many elements each, are stepped at a time, and how they lie.

    ``param_alignment`` is that of ``FlatPartition.build``. ``is_matrix`` says whether a matrix rule steps them.
    """
    if stage == 3:
        for part in _sub_groups(numels, ranks, sub_group_size):
            yield part, ParameterPartition.build(numels[part], ranks)
    elif stage == 0 and is_matrix:
        yield slice(None), Replicas(ranks, tuple(numels))
    elif stage == 0:
        yield slice(None), FlatPartition.build(numels, ranks, alignment=1)
    else:
        yield slice(None), FlatPartition.build(numels, ranks, param_alignment=param_alignment)


def _sub_groups(numels: Sequence[int], ranks: int, size: int) -> Iterator[slice]:
    """ZeRO-3 closes a sub-group with the parameter whose part brings a rank's elements to ``size``."""
    start, filled = 0, 0
    for place, numel in enumerate(numels):
        filled += -(-numel // ranks)
        if filled >= size:
            yield slice(start, place + 1)
            start, filled = place + 1, 0
    if start < len(numels):
        yield slice(start, len(numels))
