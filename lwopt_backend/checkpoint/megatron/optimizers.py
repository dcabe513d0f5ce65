"""Named states out of the state_dict of Megatron's optimizers, which keep them by number (Float16, FP32, LayerWise)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER, CheckpointError
from lwopt_backend.checkpoint.files.plain_data import counter
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron.states import STATES


@dataclass(frozen=True)
class Kept:
    """What one rank's optimizer keeps of its part of a parameter."""

    states: Mapping[str, LazyTensor]
    step: float | None = None
    group: int | None = None


@dataclass(frozen=True)
class Inner:
    """One torch optimizer in the state_dict of one rank's: ``masters`` by group, None where there are none."""

    where: str
    state: Mapping[Any, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    masters: Sequence[Sequence[LazyTensor]] | None
    others: Mapping[str, Any] = field(default_factory=dict)


def inner_optimizers(saved: Any, where: str) -> list[Inner]:
    """The torch optimizers in an optimizer's state_dict: a list of several, or one.

    Raises CheckpointError for a key that is not known.
    """
    entries = saved if isinstance(saved, list) else [saved]
    return [_inner(entry, f"optimizer {number} in {where}") for number, entry in enumerate(entries)]


def _inner(saved: Any, where: str) -> Inner:
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where}: expected an optimizer's state_dict, found {type(saved).__name__}")
    wrapped: dict[str, Any] = saved if "optimizer" in saved else {"optimizer": saved}  # FP32Optimizer has no wrapping
    inner = wrapped["optimizer"]
    others = {key: value for key, value in wrapped.items() if key not in ("optimizer", "fp32_from_fp16_params")}
    unknown = sorted({*map(str, others)} - {"grad_scaler"} | {*map(str, inner)} - {"state", "param_groups"})
    if unknown or "param_groups" not in inner:
        raise CheckpointError(
            f"{where}: expected param_groups, state and fp32_from_fp16_params, found also {unknown}, not known"
        )
    return Inner(where, inner.get("state", {}), inner["param_groups"], wrapped.get("fp32_from_fp16_params"), others)


def named(
    inners: Sequence[Inner], names: Sequence[Sequence[str]], weights: Mapping[str, LazyTensor]
) -> dict[str, Kept]:
    """What the optimizers keep, by parameter. ``names``: of each group, through all optimizers, in its order.

    Every master weight is read and compared with the weight, bit for bit, so a wrong name is an error, never a mixed-up
    state. Raises CheckpointError for that, for other counts or shapes, and for states that are not known.
    """
    found: dict[str, Kept] = {}
    number = 0
    for inner in inners:
        for local, group in enumerate(inner.groups):
            for name, identifier, master in _in_group(inner, local, names[number], weights):
                state = inner.state.get(identifier, {})
                states = {key: value for key, value in state.items() if key != "step"}
                _check_states(states, name, weights[name], inner.where)
                if master is not None:
                    check_rounds(master, weights[name], name)
                    states = {MASTER: master, **states}
                step = counter(state.get("step", group.get("step")))
                found[name] = Kept(states, None if step is None else float(step), number)
            number += 1
    return found


def _in_group(
    inner: Inner, local: int, names: Sequence[str], weights: Mapping[str, LazyTensor]
) -> list[tuple[str, Any, LazyTensor | None]]:
    """Name, identifier and master weight (16-bit parameters have one) of each parameter of a group."""
    identifiers = inner.groups[local].get("params", [])
    half = [name for name in names if weights[name].dtype in (torch.bfloat16, torch.float16)]
    masters = inner.masters[local] if inner.masters is not None and local < len(inner.masters) else []
    if len(identifiers) != len(names) or len(masters) != len(half):
        raise CheckpointError(
            f"param group {local} of {inner.where}: expected {len(names)} parameters, {len(half)} with master weights, "
            f"by the rules of Megatron's assignment ({', '.join(names[:3])}, ...), found {len(identifiers)} and "
            f"{len(masters)}; names cannot be told: save this checkpoint in the torch_dist format"
        )
    master_of = dict(zip(half, masters))
    return [(name, identifier, master_of.get(name)) for name, identifier in zip(names, identifiers)]


def _check_states(states: Mapping[str, Any], name: str, weight: LazyTensor, where: str) -> None:
    for key, value in states.items():
        if key not in STATES:
            raise CheckpointError(
                f"{where}: state {key!r} of {name} is not known, so it is not known how to convert it; "
                f"known are {', '.join(STATES)}"
            )
        if not isinstance(value, LazyTensor) or value.shape != weight.shape:
            shape = value.shape if isinstance(value, LazyTensor) else type(value).__name__
            raise CheckpointError(f"{where}: expected {key} of {name} in shape {weight.shape}, found {shape}")


def check_rounds(master: LazyTensor, weight: LazyTensor, name: str) -> None:
    """Raises CheckpointError unless ``master``, rounded to the weight's dtype, has the weight's bits."""
    if master.shape == weight.shape and _same_bits(master.read().to(weight.dtype), weight.read()):
        return
    raise CheckpointError(
        f"{name}: expected a master weight of shape {weight.shape} that rounds to {weight.where}, found {master.where} "
        f"of shape {master.shape} that does not; the files are of different steps, or the assignment of parameters to "
        "ranks is not that of this Megatron: save the checkpoint in the torch_dist format"
    )


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
