"""State for parameters that somebody else shards after the optimizer was made, as Accelerate's ``prepare`` does.

What happens to the optimizer there, in this order:

1. It is made for the plain model, and routes its parameters.
2. ``prepare`` loads its own state dict into it, to place state on the device. It has no state yet.
3. ``prepare`` puts placeholders into the param groups, shards the model, and puts the sharded parameters there.
4. A checkpoint may be saved or loaded before the first step. ``torch.distributed.checkpoint`` looks at ``state`` and,
   where it is empty, takes a step without gradients to have some: AdamW's counter would begin at 1.

So state is made when it is first looked at after 3. That needs no other rank. Planning does, and waits for the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


class StateOnceSharded:
    """The attribute ``state`` of an optimizer: made for the parameters of the param groups when they become DTensors.

    The optimizer's ``_make_state`` makes what is missing; its ``_stated`` lists the parameters that this was done for.
    """

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        if optimizer is None:
            return self
        held = [param for group in optimizer.param_groups for param in group["params"]]
        if any(isinstance(param, DTensor) for param in held) and not same(held, optimizer._stated):
            optimizer._make_state()
        return optimizer.__dict__["state"]

    def __set__(self, optimizer: Any, state: Any) -> None:
        optimizer.__dict__["state"] = state  # where Optimizer.__setstate__ writes it, too


def check_sharded(params: Iterable[Tensor]) -> None:
    """Raise RuntimeError if nobody has sharded the parameters by the first step."""
    if not any(isinstance(param, DTensor) for param in params):
        raise RuntimeError(
            "LayerWiseOptimizer was made with sharded_later=True, and at the first step no parameter in its param "
            "groups is a DTensor; check that prepare() was given the model and this optimizer together, and that "
            "Accelerate runs with FSDP, fsdp_version 2 (on CPUs it falls back to DDP without a word)"
        )


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same objects; tensors cannot be compared by ``==``."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))
