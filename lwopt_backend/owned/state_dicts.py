"""``state_dict`` and ``load_state_dict``: of which form they are, and the hooks around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lwopt_backend import torch_adamw
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.state import PLAN, own_state, take_own_state
from lwopt_backend.owned.whole_state import take_whole_state, whole_state


def state_dict_of(optimizer: torch.optim.Optimizer, core: OwnedCore) -> dict[str, Any]:
    """This rank's own part; where AdamW trains everything, torch.optim.AdamW's. Called on all ranks."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    read = whole_state if torch_adamw.is_alone(optimizer.param_groups) else own_state
    state_dict = read(core, optimizer.param_groups)
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = post_hook(optimizer, state_dict) or state_dict
    return state_dict


def load_state_dict_into(
    optimizer: torch.optim.Optimizer,
    core: OwnedCore,
    state_dict: Mapping[str, Any],
    link: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Take what ``state_dict_of`` returned; ``link`` takes the param groups. Called on all ranks.

    Raises ValueError, on all of them and before anything is changed, for anything else.
    """
    state_dict = dict(state_dict)  # torch's hooks may change the one they are given
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    alone = torch_adamw.is_alone(optimizer.param_groups)
    take = take_whole_state if alone and PLAN not in state_dict else take_own_state
    link(take(core, optimizer.param_groups, state_dict))
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
