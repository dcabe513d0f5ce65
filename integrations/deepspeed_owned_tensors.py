"""``deepspeed.utils.safe_get_full_fp32_param`` and its kin on owned storage.

They ask the parameter itself, by methods that DeepSpeed's optimizers put on it. Ours take the same arguments, and are
called on all ranks, as those are. What is not there is an error on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.grouping import Grouping
from lwopt_backend.integrations.deepspeed_tensors import Kept, check_key, kept_states
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.runtime.bucket_buffers import BucketBuffers

METHODS = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")
MARK = "_hp_mapping"  # DeepSpeed looks for the methods above where a parameter has this


class OwnedTensors:
    """Whole weights, gradients and states of ``core``, by parameter."""

    def __init__(self, core: OwnedCore, grouping: Grouping) -> None:
        self._core = core
        self._numbers = {id(member.param): number for number, member in enumerate(core.members)}
        self._kept: dict[int, Kept] = kept_states(grouping)

    def attach(self) -> None:
        """Put the methods on the parameters."""

        def get_full_hp_param(param: Tensor, optim_state_key: str | None = None) -> Tensor:
            return self._whole(param, self._value(param, optim_state_key))

        def set_full_hp_param(param: Tensor, value: Tensor, optim_state_key: str | None = None) -> None:
            self._put(param, self._value(param, optim_state_key), value)
            if optim_state_key is None:
                param.data.copy_(value)

        def get_full_hp_grad(param: Tensor) -> Tensor:
            return self._whole(param, self._grad(param))

        def set_full_hp_grad(param: Tensor, value: Tensor) -> None:
            self._put(param, self._grad(param), value)
            self._core.manager.assigned(self._numbers[id(param)])

        for member in self._core.members:
            setattr(member.param, MARK, None)
            for method in (get_full_hp_param, set_full_hp_param, get_full_hp_grad, set_full_hp_grad):
                setattr(member.param, method.__name__, MethodType(method, member.param))

    def detach(self) -> None:
        """Take them off again."""
        for member in self._core.members:
            for name in (MARK, *METHODS):
                delattr(member.param, name)

    def _value(self, param: Tensor, key: str | None) -> Tensor | None:
        """This rank's piece of the weights, or of a state."""
        number = self._numbers[id(param)]
        check_key(self._kept[id(param)], key)
        if key is not None:
            return self._core.stepper.state.get(number, {}).get(key)
        bucket = self._bucket(number)
        return self._of_piece(bucket, number, bucket.owned_values())

    def _grad(self, param: Tensor) -> Tensor | None:
        if not self._core.manager.all_left:
            name = self._core.members[self._numbers[id(param)]].name
            raise RuntimeError(
                f"parameter {name!r} has no gradient at its owner; ask after the backward pass that completes a step, "
                "and before the step"
            )
        number = self._numbers[id(param)]
        list(self._core.manager.settled())
        bucket = self._bucket(number)
        return self._of_piece(bucket, number, bucket.owned_grads())

    def _bucket(self, number: int) -> BucketBuffers:
        return self._core.manager.buckets[self._core.manager.bucket_of[number]]

    def _of_piece(self, bucket: BucketBuffers, number: int, tensors: Sequence[Tensor]) -> Tensor | None:
        """Of tensors by piece, that of a parameter; None if this rank owns nothing of it."""
        return next((tensor for piece, tensor in zip(bucket.pieces, tensors) if piece.param == number), None)

    def _whole(self, param: Tensor, mine: Tensor | None) -> Tensor:
        sharers = self._core.holdings[0].sharers
        dtype = torch.float32 if param.dtype.itemsize < 4 else param.dtype
        whole = torch.zeros(param.numel(), dtype=dtype, device=param.device)
        if mine is not None and (sharers.replicas is None or sharers.replicas.rank == 0):
            self._part(param, whole).copy_(mine)
        sharers.everyone.start_all_reduce(whole).wait()
        return whole.view(param.shape)

    def _put(self, param: Tensor, mine: Tensor | None, value: Tensor) -> None:
        if mine is not None:
            mine.copy_(self._part(param, value.reshape(-1)))

    def _part(self, param: Tensor, whole: Tensor) -> Tensor:
        number = self._numbers[id(param)]
        (piece,) = (piece for piece in self._bucket(number).pieces if piece.param == number)
        return whole[piece.start : piece.stop]


def no_offload(*args: Any, **kwargs: Any) -> None:
    """In place of what moves states to the CPU's memory between steps."""
    raise RuntimeError('owned storage cannot move its states; use "storage": "zero" for offloading')
