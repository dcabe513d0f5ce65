"""What one training step of an engine does: what it sends, which matrices it orthogonalizes, what it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.runtime.zero.muon.original_muon as deepspeed_muon
import torch
from torch import Tensor, nn

import lwopt_backend.rules.muon as our_muon

# Which bytes of an optimizer a tensor belongs to, by the attribute or the state key under which it is found.
KINDS = {
    "momentum_buffer": "momentum",
    "exp_avg": "adam",
    "exp_avg_sq": "adam",
    "step": "adam",
    "_muon_pending_momentum": "staging",
    "_muon_allgather_buffers": "staging",
    "single_partition_of_fp32_groups": "masters",
    "fp32_partitioned_groups_flat": "masters",
}
OTHER = "other"


@dataclass
class Work:
    """Matrices that went through Newton-Schulz in this process, and the time of those that backward orthogonalized.

    DeepSpeed's Muon does at stages 1 and 2: what it spends there is part of its optimizer, not of the model's backward.
    """

    matrices: int = 0
    in_step: bool = False
    cpu: float = 0.0
    wall: float = 0.0


def watch_work() -> Work:
    """Count and time from now on, by wrapping both projects' functions where their callers look them up."""
    work = Work()

    def counted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(matrices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            work.matrices += matrices.shape[:-2].numel()
            return function(matrices, *args, **kwargs)

        return wrapped

    def timed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> Tensor:
            if work.in_step:
                return function(*args, **kwargs)
            cpu, wall = time.process_time(), time.perf_counter()
            update = function(*args, **kwargs)
            work.cpu += time.process_time() - cpu
            work.wall += time.perf_counter() - wall
            return update

        return wrapped

    for name in ("zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz"):
        setattr(deepspeed_muon, name, counted(getattr(deepspeed_muon, name)))
    for name in ("newton_schulz", "gram_newton_schulz"):
        setattr(our_muon, name, counted(getattr(our_muon, name)))
    deepspeed_muon.muon_update = timed(deepspeed_muon.muon_update)
    return work


def kept_bytes(engine: Any) -> dict[str, int]:
    """Bytes of every tensor this rank's optimizer holds between steps, by kind, without the model's own weights.

    ZeRO's wrapper and the optimizer in it are searched, attribute by attribute. A tensor that several hold, or views
    of one memory, count once.
    """
    params = [param for param in engine.module.parameters()]
    weights = [param.detach() for param in params] + [
        param.ds_tensor for param in params if hasattr(param, "ds_tensor")
    ]
    counted = {weight.untyped_storage().data_ptr() for weight in weights}
    found = dict.fromkeys([*KINDS.values(), OTHER], 0)
    tensors = list(_tensors({"zero": engine.optimizer, "inner": engine.basic_optimizer}, OTHER, set()))
    for kind, tensor in sorted(tensors, key=lambda item: item[0] == OTHER):  # by its name wherever it has one
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            found[kind] += storage.nbytes()
    return found


def _tensors(held: Any, kind: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that can be reached from ``held``, with its kind."""
    if isinstance(held, Tensor):
        yield kind, held
        return
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, Mapping):
        named = held.items()
    elif isinstance(held, (list, tuple, set)):
        named = ((None, value) for value in held)
    elif type(held).__module__.split(".")[0] in ("deepspeed", "lwopt_backend") or isinstance(
        held, torch.optim.Optimizer
    ):
        if isinstance(held, (nn.Module, deepspeed.DeepSpeedEngine)):
            return
        named = vars(held).items() if hasattr(held, "__dict__") else ()
    else:
        return
    for name, value in list(named):
        yield from _tensors(value, KINDS.get(name, kind) if isinstance(name, str) else kind, seen)
