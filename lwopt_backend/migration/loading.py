"""Whole tensors by parameter name into our optimizers: every rank takes what it owns or stores.

Called on all ranks, with the same ``named`` on each. DeepSpeed's engines have a function of their own, in
``lwopt_backend.integrations.deepspeed_migration``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.migration.momentum import BUFFER, Form, Named, check_form, factor
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.state import check_between_steps, state_pieces
from lwopt_backend.owned.state_names import names_of
from lwopt_backend.registry import MATRIX_RULES, arguments, new_state
from lwopt_backend.runtime.agreement import agree, agree_in_all
from lwopt_backend.runtime.owner_state import keeps_state
from lwopt_backend.spelling import suggestion

WHAT = "load_named_state"
Group = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A trained parameter and its param group, whose rule says what state it has."""

    name: str
    shape: tuple[int, ...]
    group: Group


def load_named_state(optimizer: torch.optim.Optimizer, named: Named, *, strict: bool = True) -> list[str]:
    """Take state in whole tensors by parameter name, as ``from_checkpoint`` returns it, in place of what there is.

    For ``LayerWiseOptimizer`` in plain PyTorch, where experts that only some ranks share are named as in its own
    checkpoints, and for that on FSDP2. Hyperparameters stay as they are. With ``strict`` every trained parameter has to
    be there, and nothing else; without it those that are not there keep the state they have, and their names are
    returned. Called on all ranks, with the same tensors, between steps. Raises ValueError, on all of them and before
    anything is changed, for names, keys or shapes that do not fit and for rules that keep state at the owner; TypeError
    for any other optimizer.
    """
    if isinstance(getattr(optimizer, "core", None), OwnedCore):
        return _into_pieces(optimizer, named, strict)
    if hasattr(type(optimizer), "gradients"):
        return _into_shards(optimizer, named, strict)
    raise _not_ours(optimizer, WHAT)


def change_momentum_form(optimizer: torch.optim.Optimizer, target: Form) -> None:
    """Go on with momentum in another form: buffers and the option ``momentum_form`` of all param groups that have it.

    By the momentum that a group has now. For the optimizers of ``load_named_state``; called on all ranks, between
    steps. Raises ValueError for an unknown form, TypeError for any other optimizer.
    """
    check_form("target", target)
    core = getattr(optimizer, "core", None)
    if isinstance(core, OwnedCore):
        check_between_steps(core)
        held = [
            (optimizer.param_groups[core.members[piece.member].group], piece.tensors) for piece in state_pieces(core)
        ]
    elif hasattr(type(optimizer), "gradients"):
        held = [(group, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]
    else:
        raise _not_ours(optimizer, "change_momentum_form")
    rescale(held, optimizer.param_groups, target)


def rescale(held: Iterable[tuple[Group, Mapping[str, Any]]], groups: Iterable[dict[str, Any]], target: Form) -> None:
    """The buffers of all ``held`` states, each with its param group, in the form ``target``; then say so in groups."""
    for group, state in held:
        if "momentum_form" in group and group["momentum_form"] != target:
            state[BUFFER].mul_(factor(group["momentum"], group["momentum_form"], target))
    for group in groups:
        if "momentum_form" in group:
            group["momentum_form"] = target


def _not_ours(optimizer: Any, what: str) -> TypeError:
    return TypeError(
        f"{what}: expected a LayerWiseOptimizer, found {type(optimizer).__name__}; of DeepSpeed give the engine to "
        f"lwopt_backend.integrations.deepspeed_migration.{what}, of ModuleOptimizers give the optimizer of each module"
    )


def select(
    targets: Sequence[Target], named: Named, *, strict: bool, elsewhere: Collection[str] = ()
) -> dict[str, dict[str, Tensor]]:
    """Of ``named``, the state of ``targets``. ``elsewhere`` are parameters of other ranks, which may be there, too.

    Raises ValueError for a parameter that only one side has, if ``strict``; for other keys or shapes than its rule has,
    and for a rule that keeps state at the owner, always.
    """
    known = {target.name: target for target in targets}
    if strict:
        for name in named:
            if name not in known and name not in elsewhere:
                raise ValueError(
                    f"{WHAT}: no parameter {name!r} is trained here; {suggestion(name, known)} With strict=False what "
                    "is not trained is left out"
                )
        for name in known:
            if name not in named:
                raise ValueError(
                    f"{WHAT}: there is no state of parameter {name!r}; with strict=False it keeps what it has"
                )
    return {name: _checked(target, named[name]) for name, target in known.items() if name in named}


def _checked(target: Target, state: Mapping[str, Any]) -> dict[str, Tensor]:
    rule = target.group["rule"]
    whose = f"{WHAT}: parameter {target.name!r}, which {rule!r} trains"
    if rule in MATRIX_RULES and keeps_state(MATRIX_RULES[rule].build(**arguments(target.group))):
        raise ValueError(f"{whose}: this rule keeps state at the matrix's owner, which no other optimizer's state has")
    expected = new_state(torch.empty(1, device="meta"), target.group)
    if sorted(state) != sorted(expected):
        raise ValueError(
            f"{whose}: expected {sorted(expected)}, found {sorted(state)}; if another rule trained it, let the same "
            "rule train it here, with include or exclude"
        )
    checked = {}
    for key, like in expected.items():
        shape = target.shape if like.ndim else ()
        value = torch.as_tensor(state[key])
        if tuple(value.shape) != shape:
            raise ValueError(f"{whose}, {key!r}: expected shape {shape}, found {tuple(value.shape)}")
        checked[key] = value
    return checked


def lines(named: Named) -> list[str]:
    """What all ranks must have been given alike."""
    return [f"{name}: {sorted(state)}" for name, state in sorted(named.items())]


def left(targets: Sequence[Target], taken: Named) -> list[str]:
    """The names of those that keep the state they have."""
    return [target.name for target in targets if target.name not in taken]


def _into_pieces(optimizer: Any, named: Named, strict: bool) -> list[str]:
    """Owned storage: pieces of flattened parameters, in place."""
    core, groups = optimizer.core, optimizer.param_groups
    names = names_of(core, groups)
    targets = [
        Target(key, tuple(core.members[number].param.shape), groups[core.members[number].group])
        for number, key in names.keys.items()
    ]

    def check() -> tuple[dict[str, dict[str, Tensor]], list[str]]:
        check_between_steps(core)
        return select(targets, named, strict=strict, elsewhere=names.params), lines(named)

    taken = agree(core.holdings[0].sharers.everyone, WHAT, check)
    for piece in state_pieces(core):
        for key, value in taken.get(names.keys[piece.member], {}).items():
            tensor = piece.tensors[key]
            tensor.copy_(value.reshape(-1)[piece.start : piece.stop] if tensor.ndim else value)
    return left(targets, taken)


def _into_shards(optimizer: Any, named: Named, strict: bool) -> list[str]:
    """FSDP2: its ``load_state_dict`` cuts whole tensors."""
    names = {id(param): name for name, param in optimizer.gradients.params()}
    collectives = optimizer.gradients.collectives
    held = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    targets = [Target(names[id(param)], tuple(param.shape), group) for param, group in held]
    state_dict = optimizer.state_dict()

    def check() -> tuple[dict[str, dict[str, Tensor]], list[list[str]]]:
        if optimizer.gradients.holds_different:
            raise ValueError(f"{WHAT}: ranks have different parameters (experts) under the same names")
        return select(targets, named, strict=strict), [lines(named) for _ in collectives]

    taken = agree_in_all(collectives, WHAT, check)
    indices = (index for group in state_dict["param_groups"] for index in group["params"])
    state_dict["state"].update(
        {index: taken[target.name] for index, target in zip(indices, targets) if target.name in taken}
    )
    optimizer.load_state_dict(state_dict)
    for param, state in optimizer.state.items():  # parts of the whole tensors would keep all of them in memory
        optimizer.state[param] = {key: value.clone() for key, value in state.items()}
    return left(targets, taken)
