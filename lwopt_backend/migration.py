"""Moving a run to this package: another optimizer's state into ours, and momentum between its two forms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lwopt_backend.config.options import suggestion
from lwopt_backend.config.registry import MATRIX_RULES, arguments, new_state
from lwopt_backend.runtime.agreement import agree, agree_in_all
from lwopt_backend.runtime.state import keeps_state
from lwopt_backend.storage.owned import OwnedCore
from lwopt_backend.storage.owned_state import check_between_steps, names_of, state_pieces

__all__ = [
    "SOURCES",
    "change_momentum_form",
    "convert_momentum",
    "convert_named_momentum",
    "from_checkpoint",
    "load_named_state",
]


# Muon's momentum in its two forms: a moving average of gradients, or their sum.
#
# From zero, B <- mu B + (1 - mu) G gives 1 - mu times what M <- mu M + G gives, as long as mu stays what it is. After
# mu was changed in the middle of a run no factor is exact; the one of the mu in use is right for the gradients since
# then.

Form = Literal["ema", "sum"]
Named = Mapping[str, Mapping[str, Tensor]]  # by a parameter's name, its state in whole tensors
BUFFER = "momentum_buffer"


def convert_momentum(buffer: Tensor, momentum: float, *, source: Form, target: Form) -> Tensor:
    """A momentum buffer of form ``source`` as a new one of form ``target``, of the same shape and dtype.

    Raises ValueError for a form that does not exist, and for a ``momentum`` outside [0, 1).
    """
    return buffer.detach() * factor(momentum, source, target)


def convert_named_momentum(
    named: Named, momentum: float | Mapping[str, float], *, source: Form, target: Form
) -> dict[str, dict[str, Tensor]]:
    """``convert_momentum`` for every momentum buffer in a state by parameter name; all else is taken over.

    ``momentum`` is one number, or one for each parameter that has a buffer. Raises ValueError as above and for a
    parameter that ``momentum`` lacks.
    """
    converted = {name: dict(state) for name, state in named.items()}
    for name, state in converted.items():
        if BUFFER not in state:
            continue
        if isinstance(momentum, Mapping) and name not in momentum:
            raise ValueError(f"momentum: expected a number for {name!r}, found those of {list(momentum)}")
        mu = momentum[name] if isinstance(momentum, Mapping) else momentum
        state[BUFFER] = convert_momentum(state[BUFFER], mu, source=source, target=target)
    return converted


def factor(momentum: float, source: str, target: str) -> float:
    """What a buffer of form ``source`` has to be multiplied by. Raises ValueError as ``convert_momentum``."""
    check_form("source", source)
    check_form("target", target)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum: expected a number in [0, 1), found {momentum!r}")
    if source == target:
        return 1.0
    return 1 - momentum if target == "ema" else 1 / (1 - momentum)


def check_form(what: str, form: str) -> None:
    """Raises ValueError with the nearest known form."""
    if form not in get_args(Form):
        raise ValueError(f"{what}: unknown form of momentum {form!r}; {suggestion(str(form), get_args(Form))}")


# Whole tensors by parameter name into our optimizers: every rank takes what it owns or stores.
#
# Called on all ranks, with the same ``named`` on each. DeepSpeed's engines have a function of their own, in
# ``lwopt_backend.integrations.deepspeed.migration``.

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
        f"lwopt_backend.integrations.deepspeed.migration.{what}, of ModuleOptimizers give the optimizer of each module"
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


# What other optimizers' ``state_dict`` holds, by parameter name and under our keys.

MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"}


@dataclass(frozen=True)
class Source:
    """How an optimizer keeps its state. ``form`` None: its param groups say it, under ``momentum_form``.

    ``momentum`` are the keys under which param groups have the momentum, ``buffer`` is the key of the buffer,
    ``moments`` are Adam's keys by ours, ``step`` the key of Adam's counter, which may be in the param group instead.
    """

    form: Form | None
    momentum: tuple[str, ...] = ("momentum",)
    buffer: str = BUFFER
    moments: Mapping[str, str] = field(default_factory=lambda: MOMENTS)
    step: str = "step"


OLD_ADAM = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
SOURCES: dict[str, Source] = {
    "torch.optim.Muon": Source("ema"),
    "torch.optim.AdamW": Source("ema"),
    "keller_jordan": Source("ema"),  # from June 2025 on
    "keller_jordan_2024": Source("sum", moments=OLD_ADAM),  # before February 2025, when the sum became an average
    "moonlight": Source("sum", moments=OLD_ADAM),
    "dion": Source(
        "sum", ("mu",), "momentum", moments={"exp_avg": "momentum", "exp_avg_sq": "variance"}, step="step_dev"
    ),
    "deepspeed": Source("ema"),
    "megatron": Source("ema", ("momentum", "momentum_beta")),  # Emerging-Optimizers 0.1 says momentum_beta
    "pytorch_optimizer": Source("ema"),
    "lwopt_backend": Source(None),
}


def from_checkpoint(
    state_dict: Mapping[str, Any],
    names: Sequence[str] | None = None,
    *,
    source: str = "torch.optim.Muon",
    momentum: float | None = None,
    momentum_form: Form = "ema",
) -> dict[str, dict[str, Tensor]]:
    """The state in another optimizer's ``state_dict``, by parameter name, for ``load_named_state``.

    - ``state_dict``: of a single process, or a full one: whole tensors under ``state``, by number or by name.
    - ``names``: the parameters' in the order of the param groups; not needed where the state is by name, or where the
      param groups have torch's ``param_names``.
    - ``source``: whose it is, one of ``SOURCES``; AdamW's moments are found in all of them.
    - ``momentum``: if another than that in the param groups. It is needed only where the form changes.
    - ``momentum_form``: what our optimizer is set to.

    Returns new fp32 tensors: ``momentum_buffer`` of what Muon trains; ``exp_avg``, ``exp_avg_sq`` and ``step`` of what
    AdamW does. Called on any ranks; it communicates nothing. Raises ValueError for an unknown source or form, for names
    that are not as many as the parameters or occur twice, for state that is missing, sharded, of differing shapes or
    of another optimizer, and where the momentum is not known.
    """
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; {suggestion(str(source), SOURCES)}")
    check_form("momentum_form", momentum_form)
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(
            f"the state dict of {source!r}: expected keys 'state' and 'param_groups', found {list(state_dict)}; it has "
            "to be the optimizer's own state_dict() with whole tensors, not one of a wrapper that has cut them (ZeRO)"
        )
    groups = state_dict["param_groups"]
    in_groups = [(index, group) for group in groups for index in group["params"]]
    all_names = _names(groups, [index for index, _ in in_groups], names, source)
    return {
        name: _Entry(name, source, state_dict["state"].get(index), group).converted(momentum, momentum_form)
        for name, (index, group) in zip(all_names, in_groups, strict=True)
    }


def _names(
    groups: Sequence[Mapping[str, Any]], indices: list[Any], names: Iterable[str] | None, source: str
) -> list[str]:
    if names is None and all(isinstance(index, str) for index in indices):
        return indices
    if names is None and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    if names is None:
        raise ValueError(
            f"the state dict of {source!r} knows its parameters by number; pass their names in the order of its param "
            "groups"
        )
    names = list(names)
    if len(names) != len(indices):
        sizes = [len(group["params"]) for group in groups]
        raise ValueError(
            f"names: expected {len(indices)}, as many as the parameters in the param groups of {source!r} "
            f"({', '.join(map(str, sizes))}); found {len(names)}"
        )
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"names: {name!r} occurs twice")
        seen.add(name)
    return names


@dataclass(frozen=True)
class _Entry:
    """The state of one parameter as the other optimizer has it, with the param group it is in."""

    name: str
    source: str
    state: Mapping[str, Any] | None
    group: Mapping[str, Any]

    def converted(self, momentum: float | None, form: Form) -> dict[str, Tensor]:
        theirs = SOURCES[self.source]
        if self.group.get("algorithm") == "lion":
            raise self._error("is trained by Lion, whose state is not converted")
        if not self.state:
            raise self._error(
                "has no state; it has had no gradient yet. Take it out of names and of the state dict's param groups, "
                "and load with strict=False"
            )
        if theirs.moments["exp_avg_sq"] in self.state:
            return self._moments(theirs)
        buffer = self._tensor(theirs.buffer)
        return {BUFFER: self._in_form(buffer, theirs, momentum, form)}

    def _moments(self, theirs: Source) -> dict[str, Tensor]:
        assert self.state is not None
        moments = {
            ours: self._tensor(key)
            for ours, key in theirs.moments.items()
            if key in self.state or ours != "max_exp_avg_sq"
        }
        shapes = {key: tuple(tensor.shape) for key, tensor in moments.items()}
        if len(set(shapes.values())) > 1:
            raise self._error(f"has moments of different shapes, {shapes}")
        step = self.state.get(theirs.step, self.group.get("step"))
        if step is None:
            raise self._error(f"has no {theirs.step!r}, nor has its param group a 'step'")
        return {**moments, "step": torch.tensor(float(step))}

    def _in_form(self, buffer: Tensor, theirs: Source, momentum: float | None, form: Form) -> Tensor:
        source = theirs.form or self.group.get("momentum_form")
        if source is None:
            raise self._error("is in a param group without 'momentum_form'; it is not the state of a Muon of ours")
        if momentum is None:
            momentum = next((float(self.group[key]) for key in theirs.momentum if key in self.group), None)
        if source == form:
            momentum = 0.0  # not needed, and a factor of one
        elif momentum is None:
            keys = " or ".join(map(repr, theirs.momentum))
            raise self._error(f"is in a param group without {keys}; pass momentum, to convert {source!r} to {form!r}")
        return convert_momentum(buffer, momentum, source=source, target=form)

    def _tensor(self, key: str) -> Tensor:
        assert self.state is not None
        if key not in self.state:
            close = [other for other, kind in SOURCES.items() if kind.buffer in self.state]
            hint = f"; the source may be one of {close}" if close else ""
            raise self._error(f"has no {key!r}, only {list(self.state)}{hint}")
        value = self.state[key]
        if not isinstance(value, Tensor):
            raise self._error(f"{key!r}: expected a tensor, found {value!r}")
        if hasattr(value, "full_tensor"):
            raise self._error(
                f"{key!r} is a DTensor, of which every rank has a part; save it whole, with "
                "get_optimizer_state_dict(options=StateDictOptions(full_state_dict=True))"
            )
        return value.detach().to(torch.float32, copy=True)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"the state dict of {self.source!r}: parameter {self.name!r} {what}")
