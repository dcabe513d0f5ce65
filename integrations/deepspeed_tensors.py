"""``deepspeed.utils.safe_get_full_optimizer_state`` and its kin: a key that is not there is an error on all ranks.

At stages 1 and 2 only the ranks that store a piece of the parameter look the key up; they raise, and the others wait
for them in an all-reduce. DeepSpeed also forgets the states' places when a checkpoint is loaded. Which keys a parameter
has is known to all ranks from its rule, so they all decide here, before DeepSpeed is asked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from lwopt_backend.grouping import Grouping
from lwopt_backend.registry import new_state

OF_PARAMETERS = ("get_full_hp_param", "set_full_hp_param")  # stages 1 and 2 put these methods on every parameter
OF_OPTIMIZER = (*OF_PARAMETERS, "get_local_fp32_param", "set_local_hp_param")  # stage 3 asks its optimizer
RELINKS = ("_link_all_hp_params", "_lazy_init_hp_params_optimizer_state")  # what the optimizers of stages 1 and 2 have

Check = Callable[[Tensor, "str | None"], None]


@dataclass(frozen=True)
class Kept:
    """The optimizer state of one parameter: the keys of the tensors that are as large as it is."""

    param: Tensor
    name: str
    rule: str
    keys: tuple[str, ...]


def guard_state_keys(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, grouping: Grouping) -> None:
    """Make every way to an optimizer state of ``engine`` check the key first; ``optimizer`` is ours, not yet wrapped.

    Called once for an engine, on all ranks, while DeepSpeed builds it. From then on a key that a parameter's rule does
    not keep is a ValueError on every rank that asks, a state that no step has made yet a RuntimeError. At stage 0
    DeepSpeed returns None for every key, and still does.
    """
    kept = kept_states(grouping)
    configure = engine._configure_lr_scheduler  # the first method called after the optimizer was wrapped

    @functools.wraps(configure)
    def configure_lr_scheduler() -> None:
        _guard(engine.optimizer, optimizer, kept)
        configure()

    engine._configure_lr_scheduler = configure_lr_scheduler


def kept_states(grouping: Grouping) -> dict[int, Kept]:
    """By a parameter's id, what the optimizer keeps for it."""
    kept = {}
    for group in grouping.groups:
        state = new_state(torch.empty(1, device="meta"), group)
        keys = tuple(key for key, tensor in state.items() if tensor.ndim > 0)
        for param in group["params"]:
            kept[id(param)] = Kept(param, grouping.names[id(param)], group["rule"], keys)
    return kept


def check_key(found: Kept, key: str | None) -> None:
    """Raises ValueError if a parameter has no state ``key``; None asks for the weights."""
    if key is not None and key not in found.keys:
        raise ValueError(
            f"parameter {found.name!r} has no optimizer state {key!r}; its rule, {found.rule!r}, keeps "
            f"{', '.join(map(repr, found.keys))}"
        )


def _guard(wrapper: Any, optimizer: torch.optim.Optimizer, kept: dict[int, Kept]) -> None:
    def check(param: Tensor, key: str | None) -> None:
        if key is None or id(param) not in kept:  # the weights are asked for, or a frozen parameter
            return
        found = kept[id(param)]
        check_key(found, key)
        if not any(optimizer.state.values()):
            raise RuntimeError(f"parameter {found.name!r} has no {key!r} yet; the first step makes it")

    if all(hasattr(wrapper, name) for name in RELINKS):
        _guard_parameters(wrapper, [state.param for state in kept.values()], check)
    elif all(hasattr(wrapper, name) for name in OF_OPTIMIZER):
        for name in OF_OPTIMIZER:
            setattr(wrapper, name, _checked(getattr(wrapper, name), check))


def _guard_parameters(wrapper: Any, params: list[Tensor], check: Check) -> None:
    """Stages 1 and 2, and BF16_Optimizer, which put new methods on the parameters whenever they link them anew."""
    link = wrapper._link_all_hp_params

    def check_and_link_state(param: Tensor, key: str | None) -> None:
        check(param, key)
        if key is not None:
            wrapper._lazy_init_hp_params_optimizer_state()

    def put_guards() -> None:
        for param in params:
            for name in OF_PARAMETERS:
                setattr(param, name, _checked(getattr(param, name), check_and_link_state, param))

    def link_all() -> None:
        link()
        wrapper._hp_optimizer_states_linked = False  # or, after a load, DeepSpeed never links the states again
        put_guards()

    wrapper._link_all_hp_params = link_all
    put_guards()


def _checked(method: Callable[..., Any], check: Check, param: Tensor | None = None) -> Callable[..., Any]:
    """``method``, called after ``check`` of its parameter, which is ``param`` or an argument, and of its key."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        check(given["param"] if param is None else param, given.get("optim_state_key"))
        return method(*args, **kwargs)

    return checked
