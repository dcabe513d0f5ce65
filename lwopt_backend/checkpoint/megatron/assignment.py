"""Which rank of Megatron's LayerWiseDistributedOptimizer has which parameters, replayed.

The parameters of all param groups, one group after another and each in module order, are sorted by size (equal sizes
keep their order) and dealt to the ranks back and forth: 0, 1, ..., n-1, n-1, ..., 1, 0, 0, 1, ... Experts that are
sharded over expert-parallel ranks are dealt in the same way, separately, to the ranks that hold the same experts.
Source: ``shard_params`` in megatron/core/optimizer/layer_wise_optimizer.py of 0.16, the ping-pong path in later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def dealt(
    groups: Sequence[Sequence[str]],
    numels: Mapping[str, int],
    *,
    ranks: int,
    expert_groups: frozenset[int] = frozenset(),
    expert_ranks: int = 1,
) -> list[list[list[str]]]:
    """``[group][rank]``: the names that the rank has of the group, in its optimizer's order.

    For a group in ``expert_groups`` the rank is that among ``expert_ranks`` ranks. One rank keeps the groups' order.
    """
    if ranks == 1:
        return [[list(names)] for names in groups]
    found: list[list[list[str]]] = [
        [[] for _ in range(expert_ranks if group in expert_groups else ranks)] for group in range(len(groups))
    ]
    entries = [(name, group) for group, names in enumerate(groups) for name in names]
    turn = {False: 0, True: 0}
    for name, group in sorted(entries, key=lambda entry: numels[entry[0]]):
        expert = group in expert_groups
        size = expert_ranks if expert else ranks
        place = turn[expert] % (2 * size)
        found[group][place if place < size else 2 * size - 1 - place].append(name)
        turn[expert] += 1
    return found
