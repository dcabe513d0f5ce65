"""Native checkpoints of ZeRO 3: every parameter cut into equal flat parts, one for each rank, by sub-groups.

A rank's flat tensor of a sub-group holds its parts of the sub-group's parameters one after the other, each as long as
the first rank's; what the last ranks have too much is padding (stage3.py, ``_create_fp16_sub_groups``). Read in 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError
from lwopt_backend.checkpoint.deepspeed.model import ModelStates, checkpoint_of, groups_of, scaler_of
from lwopt_backend.checkpoint.deepspeed.owners import matrices_in, take_owner_states
from lwopt_backend.checkpoint.deepspeed.pieces import Gathered, cut, params_of, replicas_of
from lwopt_backend.checkpoint.lazy import LazyTensor


def read_stage3(states: ModelStates, of_ranks: list[tuple[Path, Mapping[str, Any]]]) -> Checkpoint:
    """``of_ranks`` are the files of the optimizer's state with what they hold. Raises CheckpointError."""
    assert states.shapes is not None
    file, first = of_ranks[0]
    if first.get("ds_zero_partition_groups"):
        raise CheckpointError(f"{file} has experts on some ranks only (AutoEP), which is not read; see ds_to_universal")
    groups = first["optimizer_state_dict"]["param_groups"]
    group_of = {index: number for number, group in enumerate(groups) for index in group["params"]}
    gathered = {
        name: Gathered(shape, group_of.get(index, 0))
        for index, sub_group in enumerate(states.shapes)
        for name, shape in sub_group.items()
    }
    for rank, (file, saved) in enumerate(of_ranks):
        _add_rank(gathered, rank, len(of_ranks), file, saved, states)
    take_owner_states(gathered, [(file, saved["optimizer_state_dict"]) for file, saved in of_ranks])
    return checkpoint_of(
        states,
        "deepspeed zero 3",
        params_of(gathered, states),
        groups_of(groups),
        {"loss_scaler": scaler_of(first), "matrices": matrices_in(first["optimizer_state_dict"])},
        replicas=replicas_of(gathered),
    )


def _add_rank(
    gathered: Mapping[str, Gathered],
    rank: int,
    ranks: int,
    file: Path,
    saved: Mapping[str, Any],
    states: ModelStates,
) -> None:
    assert states.shapes is not None
    flats = saved["fp32_flat_groups"]
    if len(flats) != len(states.shapes):
        raise CheckpointError(
            f"{file}: expected {len(states.shapes)} sub-groups, as {states.path} lists, found {len(flats)}; the files "
            "are of different savings"
        )
    for index, (flat, sub_group) in enumerate(zip(flats, states.shapes)):
        state = saved["optimizer_state_dict"]["state"].get(index, {})
        offset = 0
        for name, shape in sub_group.items():
            found, numel = gathered[name], math.prod(shape)
            part = -(-numel // ranks)
            begin = min(rank * part, numel)
            held = min(part, numel - begin)
            found.add(MASTER, begin, cut(flat, offset, held, f"{name!r}", file))
            for key, value in state.items():
                if isinstance(value, LazyTensor) and value.shape:
                    found.add(key, begin, cut(value, offset, held, f"{key} of {name!r}", file))
                elif value is not None:
                    found.add_number(name, key, value, file)
            offset += part
