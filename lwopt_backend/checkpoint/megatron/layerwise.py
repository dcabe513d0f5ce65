"""Named states out of ``layer_wise_optimizer_*.pt``, which tell no names: the assignment to ranks is replayed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.megatron.assignment import dealt
from lwopt_backend.checkpoint.megatron.groups import expert_groups, names_by_group
from lwopt_backend.checkpoint.megatron.optimizers import Inner, Kept, inner_optimizers, named
from lwopt_backend.checkpoint.megatron.ranks import Rank, Ranks

_FILE = re.compile(r"layer_wise_optimizer_(\d+)\.pt")


def is_layer_wise(ranks: Ranks) -> bool:
    """Whether the checkpoint has files of a LayerWiseDistributedOptimizer, or its ``args`` say that it must have."""
    arguments = ranks.arguments
    says = str(arguments.get("optimizer", "")).startswith("dist_") or arguments.get(
        "use_layer_wise_distributed_optimizer"
    )
    return bool(says) or any(_files(rank) for rank in ranks.ranks)


def from_layer_wise(ranks: Ranks) -> list[tuple[Rank, list[Inner], dict[str, Kept]]]:
    """What every file keeps, by parameter, with the rank in whose folder it is and the optimizers in it.

    Data parallel rank r is in the folder of expert parallel rank r % ep, and has place r // ep among those with the
    same experts. Raises CheckpointError for files that are missing or too many, for context parallelism, and for names
    that cannot be told (``megatron.optimizers.named``).
    """
    data, experts = ranks.world["dp"], ranks.world["ep"]
    if ranks.world["cp"] > 1:
        raise CheckpointError(
            f"context parallel size {ranks.world['cp']}: with it, ranks overwrite one another's "
            "layer_wise_optimizer_*.pt, so optimizer state is lost; save in the torch_dist format"
        )
    if data % experts:
        raise CheckpointError(
            f"expected a data parallel size that {experts} expert parallel ranks divide, found {data}"
        )
    found = []
    for rank in ranks.ranks:
        files = _files(rank)
        expected = {number for number in range(data) if number % experts == rank.coordinates[2]}
        if set(files) != expected:
            raise CheckpointError(
                f"{rank.file.parent}: expected layer_wise_optimizer_*.pt of data parallel ranks {sorted(expected)}, "
                f"found those of {sorted(files)}; copy the files of all ranks of one checkpoint"
            )
        for number, path in sorted(files.items()):
            inners = inner_optimizers(torch_files.load(path), str(path))
            found.append((rank, inners, _kept(rank, inners, ranks, number)))
    return found


def _kept(rank: Rank, inners: list[Inner], ranks: Ranks, number: int) -> dict[str, Kept]:
    data, experts = ranks.world["dp"], ranks.world["ep"]
    groups = [group for inner in inners for group in inner.groups]
    sharded = expert_groups(groups)
    weights = rank.weights
    shares = dealt(
        names_by_group(weights, groups, ranks.arguments, inners[0].where),
        {name: weight.numel for name, weight in weights.items()},
        ranks=data,
        expert_groups=sharded,
        expert_ranks=data // experts,
    )
    names = [share[number // experts if group in sharded else number] for group, share in enumerate(shares)]
    return named(inners, names, weights)


def _files(rank: Rank) -> Mapping[int, Path]:
    matches = {path: _FILE.fullmatch(path.name) for path in rank.file.parent.iterdir()}
    return {int(match[1]): path for path, match in matches.items() if match}
