"""Native checkpoints of ZeRO 1 and 2, BF16_Optimizer among them: a flat tensor per param group, cut over the ranks.

What lies where is in ``param_slice_mappings``: by group and parameter, where in the rank's part its elements begin, and
how many there are. A parameter's pieces follow each other in the order of the ranks. State lies as the weights do, but
for DeepSpeed's own Muon: a rank keeps momentum, in whole tensors and in the same order, of all parameters of which it
stores a part (stage_1_and_2.py, ``_get_flat_partition_unpadded``), unless optimizer state is offloaded. Read in 0.19.8.
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

BUFFER = "momentum_buffer"


def read_partitions(states: ModelStates, of_ranks: list[tuple[Path, Mapping[str, Any]]]) -> Checkpoint:
    """``of_ranks`` are the files of the optimizer's state with what they hold. Raises CheckpointError."""
    assert states.shapes is not None
    gathered = {
        name: Gathered(shape, number) for number, group in enumerate(states.shapes) for name, shape in group.items()
    }
    for file, saved in of_ranks:
        _add_rank(gathered, file, saved, states)
    _, first = of_ranks[0]
    take_owner_states(gathered, [(file, saved["base_optimizer_state"]) for file, saved in of_ranks])
    return checkpoint_of(
        states,
        f"deepspeed zero {'1 or 2' if 'zero_stage' in first else '1 (BF16_Optimizer)'}",
        params_of(gathered, states),
        groups_of(first["base_optimizer_state"]["param_groups"]),
        {
            "clip_grad": first.get("clip_grad"),
            "loss_scaler": scaler_of(first),
            "matrices": matrices_in(first["base_optimizer_state"]),
        },
        replicas=replicas_of(gathered),
    )


def _add_rank(gathered: Mapping[str, Gathered], file: Path, saved: Mapping[str, Any], states: ModelStates) -> None:
    base = saved["base_optimizer_state"]
    if not isinstance(base, Mapping):
        raise CheckpointError(
            f"{file}: 'base_optimizer_state' is a list, as with zero_optimization.elastic_checkpoint, which is not "
            "read; load it with DeepSpeed and save it with elastic_checkpoint off"
        )
    for number, places in enumerate(saved["param_slice_mappings"]):
        flat = saved["single_partition_of_fp32_groups"][number]
        state = base["state"].get(number, {})
        group = base["param_groups"][number]
        ordered = sorted(places.items(), key=lambda place: place[1].start)
        unknown = [name for name, _ in ordered if name not in gathered]
        if unknown:
            raise CheckpointError(f"{file} holds parameter {unknown[0]!r}, which {states.path} does not list")
        whole_momentum = _has_whole_momentum(saved, state, group, [gathered[name] for name, _ in ordered], states)
        offset = 0
        for name, place in ordered:
            found = gathered[name]
            numel = math.prod(found.shape)
            begin = _stored_so_far(found)
            found.add(MASTER, begin, cut(flat, place.start, place.numel, f"{name!r}", file))
            for key, value in state.items():
                if key == BUFFER and whole_momentum:
                    copy = cut(value, offset, numel, f"{key} of {name!r}", file)
                    found.copies.setdefault(key, []).append(copy.view(found.shape))
                elif isinstance(value, LazyTensor) and value.shape:
                    found.add(key, begin, cut(value, place.start, place.numel, f"{key} of {name!r}", file))
                elif value is not None:
                    found.add_number(name, key, value, file)
            offset += numel


def _stored_so_far(found: Gathered) -> int:
    """Where a rank's piece begins: ranks' pieces follow each other."""
    return sum(tensor.numel for _, tensor in found.pieces.get(MASTER, ()))


def _has_whole_momentum(
    saved: Mapping[str, Any],
    state: Mapping[str, Any],
    group: Mapping[str, Any],
    params: list[Gathered],
    states: ModelStates,
) -> bool:
    """Whether it is Muon of DeepSpeed with whole momentum. BF16_Optimizer, which tells no stage, cuts it."""
    buffer = state.get(BUFFER)
    if not group.get("use_muon") or "zero_stage" not in saved or not isinstance(buffer, LazyTensor):
        return False
    offload = (states.saved.get("ds_config") or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
    if offload.get("device", "none") != "none":
        return False
    return buffer.numel == sum(math.prod(found.shape) for found in params)
