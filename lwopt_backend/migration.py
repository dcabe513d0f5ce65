"""Migrating a run to this package: load another optimizer's state, and convert momentum between its two forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config.options import glob_suggestion, suggestion
from lwopt_backend.engines.buffers.state import BufferStore
from lwopt_backend.groups import Group
from lwopt_backend.groups.others import BUFFER, SOURCES, Form, Source, check_form, factor, may_be
from lwopt_backend.groups.registry import MATRIX_RULES, arguments, new_state, rule_of
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.state import StateStore, check_fits, keeps_state, put
from lwopt_backend.runtime.undisturbed import undisturbed

Named = Mapping[str, Mapping[str, Tensor]]  # by parameter name, its state in whole tensors


def convert_momentum(buffer: Tensor, momentum: float, *, source: Form, target: Form) -> Tensor:
    """Convert a momentum buffer between "ema" and "sum", which differ by the factor 1 - momentum.

    Args:
        buffer: the momentum, which is not changed.
        momentum: decay rate, in [0, 1).
        source: form of ``buffer``.
        target: form to return.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: for an unknown form, for a ``momentum`` outside [0, 1), and for a sum beyond float16's range.

    Examples:
        >>> total = convert_momentum(average, 0.95, source="ema", target="sum")
    """
    converted = buffer.detach() * factor(momentum, source, target)
    if converted.dtype == torch.float16 and not converted.isfinite().all() and buffer.isfinite().all():
        raise ValueError("the sum is beyond the range of float16; convert the buffer to float32 before")
    return converted


def convert_named_momentum(
    named: Named, momentum: float | Mapping[str, float], *, source: Form, target: Form
) -> dict[str, dict[str, Tensor]]:
    """``convert_momentum`` for every momentum buffer in a state by parameter name; other state is returned as it is.

    Args:
        named: state by parameter name.
        momentum: decay rate, one for all, or one for each parameter with a buffer.
        source: form of the buffers.
        target: form to return.

    Returns:
        New state by parameter name.

    Raises:
        ValueError: as ``convert_momentum``, and for a parameter that ``momentum`` lacks.

    Examples:
        >>> named = convert_named_momentum(named, 0.95, source="sum", target="ema")
    """
    converted = {name: dict(state) for name, state in named.items()}
    for name, state in converted.items():
        if BUFFER not in state:
            continue
        if isinstance(momentum, Mapping) and name not in momentum:
            raise ValueError(f"momentum: expected a number for {name!r}, found numbers for {list(momentum)}")
        mu = momentum[name] if isinstance(momentum, Mapping) else momentum
        state[BUFFER] = convert_momentum(state[BUFFER], mu, source=source, target=target)
    return converted


# Loading whole tensors by parameter name into this package's optimizers: every rank takes what it owns or stores.

WHAT = "load_named_state"
Parts = tuple[Sequence[Group], Mapping[Any, Any]]  # of a state dict: its param groups, and its state


def load_named_state(optimizer: Any, named: Named, *, strict: bool = True) -> list[str]:
    """Replace an optimizer's state by whole tensors. Call it on all ranks, with the same tensors, between steps; under
    DeepSpeed best right after ``deepspeed.initialize`` or ``load_checkpoint``.

    Hyperparameters do not change. Under DeepSpeed, this creates the state that a first step would create. In a
    pipeline, every stage takes its own parameters.

    Args:
        optimizer: a ``LayerWiseOptimizer``, or a DeepSpeed engine with an optimizer of this package.
        named: state by parameter name, as ``from_checkpoint`` returns it. On a plain model, experts that only some
            ranks share are named as in its checkpoints; under DeepSpeed, experts are numbered through all ranks.
        strict: require every trained parameter and no other. If False, missing parameters keep their state.

    Returns:
        Names of parameters that kept their state.

    Raises:
        ValueError: on all ranks, before anything is changed, for names, keys or shapes that do not fit, and for rules
            with owner state; under DeepSpeed also for element-wise parameters with different counts of steps, because
            it steps a param group as one tensor.
        TypeError: for another optimizer or engine.

    Examples:
        >>> load_named_state(optimizer, from_checkpoint(torch.load("muon.pt"), names=["0.weight", "2.weight"]))
    """
    return _load(_store_of(optimizer, WHAT), named, strict)


def load_pieces(optimizer: Any, state_dict: Mapping[str, Any]) -> list[str]:
    """Load what the ``state_dict`` of one rank of a plain model has, as ``torch.save`` on rank 0 alone wrote it.

    A rank has the state of what it owns. Parameters whose state is whole in it take it, on any number of ranks; all
    others start fresh. Call it on all ranks, with the same state dict. Hyperparameters do not change.

    Args:
        optimizer: a ``LayerWiseOptimizer`` of the same model, plain.
        state_dict: the ``state_dict()`` of a plain model's optimizer on one rank.

    Returns:
        Names of the parameters that start fresh.

    Raises:
        ValueError: on all ranks, before anything is changed, for a state dict of another model, and for rules with
            owner state.
        TypeError: for another optimizer.

    Examples:
        >>> load_pieces(optimizer, torch.load("ckpt.pt")["optimizer"])
    """
    if not (hasattr(optimizer, "named_params") and isinstance(_store_of(optimizer, "load_pieces"), BufferStore)):
        raise TypeError(
            f"load_pieces: expected the LayerWiseOptimizer of a plain model, found {type(optimizer).__name__}"
        )
    names = {id(param): name for name, param in optimizer.named_params()}
    held = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    if len(held) != len(saved):
        raise ValueError(f"load_pieces: expected the state of {len(held)} parameters, found that of {len(saved)}")
    by_name = {name: state_dict["state"].get(index, {}) for name, index in zip(held, saved)}
    whole = {name: {key: each.whole() for key, each in of.items()} for name, of in by_name.items() if _is_whole(of)}
    fresh = load_named_state(optimizer, whole, strict=False)
    if fresh:
        optimizer.reset_state(fresh)
    return fresh


def _is_whole(state: Mapping[str, Any]) -> bool:
    return bool(state) and all(each.is_whole for each in state.values())


def change_momentum_form(optimizer: Any, target: Form) -> None:
    """Convert momentum to another form: the buffers, and ``momentum_form`` of all param groups that have this option.

    Call it on all ranks, between steps. It uses each group's current momentum.

    Args:
        optimizer: a ``LayerWiseOptimizer``, or a DeepSpeed engine with an optimizer of this package.
        target: form of momentum from now on, "ema" or "sum".

    Raises:
        ValueError: for an unknown form.
        TypeError: for another optimizer or engine.

    Examples:
        >>> change_momentum_form(optimizer, "sum")
    """
    check_form("target", target)
    store = _store_of(optimizer, "change_momentum_form")
    for piece in store.pieces():
        group = store.groups[store.params[piece.member].group]
        if BUFFER in piece.tensors and group.get("momentum_form", target) != target:
            with piece.changing(BUFFER) as buffer:
                buffer.mul_(factor(group["momentum"], group["momentum_form"], target))
    for group in store.groups:
        if "momentum_form" in group:
            group["momentum_form"] = target


def _store_of(given: Any, what: str) -> StateStore:
    optimizer = getattr(given, "basic_optimizer", given)  # of a DeepSpeed engine
    if not hasattr(optimizer, "state_store"):
        found = type(given).__name__ + ("" if optimizer is given else f" with {type(optimizer).__name__}")
        raise TypeError(
            f"{what}: expected a LayerWiseOptimizer, or a DeepSpeed engine whose optimizer is LayerWise or "
            f"LayerWiseMuon, found {found}; of ModuleOptimizers, give each module's optimizer"
        )
    store: StateStore = optimizer.state_store()
    return store


@undisturbed()
def _load(store: StateStore, named: Named, strict: bool) -> list[str]:
    def check() -> tuple[dict[str, dict[str, Tensor]], list[list[str]]]:
        store.pieces()  # raises if they cannot be replaced now
        if store.ambiguous:
            raise ValueError(f"{WHAT}: {store.ambiguous}")
        whole = {name: _whole(name, state) for name, state in _by_name(named).items()}
        _check_meaning(store, named)
        given = [f"{name}: {sorted(state)}" for name, state in sorted(whole.items())]
        return _select(store, whole, strict), [given for _ in store.ranks]

    taken = agree_in_all(store.ranks, WHAT, check)
    put(store, state=taken)
    return [param.name for param in store.params if param.name not in taken]


def _check_meaning(store: StateStore, named: Named) -> None:
    """Raises ValueError for what ``from_checkpoint`` read for another rule, or for another form of momentum."""
    for param in store.params:
        state, group = named.get(param.name), store.groups[param.group]
        if not isinstance(state, State):
            continue
        is_sgds, form = rule_of(group) == "sgd", group.get("momentum_form", "ema")
        if is_sgds or state.form not in (None, form):
            expected = "a sum of gradients, of torch.optim.SGD" if is_sgds else f"the form {form!r} of its param group"
            raise ValueError(
                f"{WHAT}: parameter {param.name!r}, which {rule_of(group)!r} trains: expected {expected}, found "
                f"{state.form or state.rule!r}; read it with from_checkpoint(..., momentum_form={form!r})"
            )


def _by_name(named: Any) -> Named:
    """``named``. Raises ValueError for anything but state by parameter name."""
    if not isinstance(named, Mapping) or named.keys() == {"state", "param_groups"}:
        found = "a state dict" if isinstance(named, Mapping) else f"a {type(named).__name__}"
        raise ValueError(f"{WHAT}: expected state by parameter name, as from_checkpoint returns it; found {found}")
    return named


def _whole(name: object, state: Any) -> dict[str, Tensor]:
    """A parameter's state as tensors. Raises ValueError for anything else, for parts of tensors, and for a counter that
    counts nothing."""
    whose = f"{WHAT}: parameter {name!r}"
    if not isinstance(name, str) or not isinstance(state, Mapping):
        raise ValueError(f"{whose}: expected tensors by key under the parameter's name, found {type(state).__name__}")
    for key, value in state.items():
        if isinstance(value, Tensor) and (value.is_complex() or value.is_meta or _is_part(value)):
            kind = "a DTensor, or another part" if _is_part(value) else f"{value.dtype} on {value.device}"
            raise ValueError(f"{whose}: {key!r}: expected a whole tensor of real numbers, found {kind}")
        if not isinstance(value, (Tensor, int, float)):
            raise ValueError(f"{whose}: {key!r}: expected a tensor, found {type(value).__name__}")
        if key == "step" and not torch.as_tensor(value).ndim and (not float(value).is_integer() or value < 0):
            raise ValueError(f"{whose}: 'step': expected a number of steps, found {float(value)}")
    return {key: torch.as_tensor(value) for key, value in state.items()}


def _is_part(value: Tensor) -> bool:
    """Whether it is a DTensor, or a rank's pieces of a tensor (``engines.buffers.partial.PartialTensor``)."""
    return hasattr(value, "full_tensor") or hasattr(value, "boxes")


def _select(store: StateStore, named: Named, strict: bool) -> dict[str, dict[str, Tensor]]:
    """The state in ``named`` of the parameters in ``store``.

    Raises ValueError, if ``strict``, for a parameter that only one side has. Always raises it for keys or shapes other
    than its rule's, for a rule with owner state, for different counters in one unit, and if no name is known.
    """
    names = {param.name for param in store.params} & named.keys()
    if named and not names and not any(name in store.elsewhere for name in named):
        hint = glob_suggestion(next(iter(named)), [param.name for param in store.params])
        raise ValueError(f"{WHAT}: none of the {len(named)} names is trained, such as {next(iter(named))!r}; {hint}")
    taken = {name: dict(named[name]) for name in names}
    there = {name: _facts(state) for name, state in taken.items()}
    if strict:
        there |= {name: {} for name in named if name not in names and name not in store.elsewhere}
    here: dict[str, dict[str, Any]] = {}
    for unit in store.units:  # whose parameters are stepped as one tensor
        group, given = store.groups[unit[0].group], [param for param in unit if param.name in names]
        rule, like = rule_of(group), new_state(torch.empty(1, device="meta"), group)
        if given and rule in MATRIX_RULES and keeps_state(MATRIX_RULES[rule].build(**arguments(group))):
            whose = f"{WHAT}: parameter {given[0].name!r}, which {rule!r} trains"
            raise ValueError(f"{whose}: expected a rule without owner state, which has no counterpart; leave it out")
        has_counters = any(not tensor.ndim for tensor in like.values())
        for param in unit if strict or given and has_counters else given:
            counters = there[given[0].name]["counters"] if given and has_counters else None
            shapes = {key: param.shape if tensor.ndim else () for key, tensor in like.items()}
            of_param = _facts({key: torch.empty(shape, device="meta") for key, shape in shapes.items()})
            here[param.name] = {**of_param, "counters": counters}
    check_fits(WHAT, here, there, advice="strict=False ignores parameters that only one side has")
    return taken


def _facts(state: Mapping[str, Tensor]) -> dict[str, Any]:
    shapes = {f"{key!r} as": f"a tensor of shape {tuple(value.shape)}" for key, value in state.items()}
    counters = {key: value.item() for key, value in state.items() if not value.ndim and not value.is_meta}
    return {"state": sorted(state), **shapes, "counters": counters}


# The contents of other optimizers' ``state_dict``, by parameter name and under this package's keys.

SHOWN = 5  # keys in a sentence
ANEW = "to begin it anew, take it out of names and of the state dict's param groups, and load with strict=False"


class State(dict[str, Tensor]):
    """A parameter's state, of the ``rule`` here that has it, and the ``form`` of its momentum, if it has one."""

    def __init__(self, tensors: Mapping[str, Tensor], rule: str, form: Form | None = None) -> None:
        super().__init__(tensors)
        self.rule, self.form = rule, form


def from_checkpoint(
    state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    names: Sequence[str] | None = None,
    *,
    source: str = "torch.optim.Muon",
    momentum: float | None = None,
    momentum_form: Form = "ema",
) -> dict[str, State]:
    """Read another optimizer's ``state_dict`` for ``load_named_state``. May run on any rank; does not communicate.

    Args:
        state_dict: a single process's or a full one: whole tensors under ``state``, by number or by name. If a
            matrix's momentum is on one rank, a list of all ranks' state dicts.
        names: the parameters' names in the order of the param groups; not needed if the state is by name, or if the
            param groups have torch's ``param_names``.
        source: the optimizer that wrote ``state_dict``, one of ``SOURCES``. AdamW's moments are found in all of them.
        momentum: decay rate, if the param groups have none. Needed only if the form changes.
        momentum_form: the form that the ``LayerWiseOptimizer`` is set to.

    Returns:
        New fp32 tensors by parameter name: ``momentum_buffer`` for parameters of Muon; ``exp_avg``, ``exp_avg_sq`` and
        ``step`` for parameters of AdamW.

    Raises:
        ValueError: for an unknown source or form, for a wrong number of names or a name that occurs twice, for state
            that is missing, sharded, of differing shapes or of another optimizer, and if the momentum is not known.

    Examples:
        >>> saved = torch.load("muon.pt")
        >>> named = from_checkpoint(saved, names=["0.weight", "2.weight"])
    """
    if source not in SOURCES:
        raise ValueError(f"unknown source {source!r}; {suggestion(str(source), SOURCES)}")
    check_form("momentum_form", momentum_form)
    groups, states = _merged([_parts(of_rank, source) for of_rank in _listed(state_dict)], source)
    in_groups = [(index, group) for group in groups for index in group["params"]]
    all_names = _names(groups, [index for index, _ in in_groups], names, source)
    if states and not any(index in states for index, _ in in_groups):
        raise ValueError(
            f"the state dict of {source!r}: expected state of the parameters in its param groups, "
            f"{_first([index for index, _ in in_groups])}; found that of {_first(states)}"
        )
    return {
        name: _Entry(name, source, states.get(index) or {}, group).converted(momentum, momentum_form)
        for name, (index, group) in zip(all_names, in_groups, strict=True)
    }


def _listed(state_dict: Any) -> list[Any]:
    return state_dict if isinstance(state_dict, list) and state_dict else [state_dict]


def _merged(parts: Sequence[Parts], source: str) -> Parts:
    """The param groups that all ranks have, with the state of each parameter from the first rank that has it."""
    (groups, *others), states = zip(*parts)
    for rank, theirs in enumerate(others, start=1):
        if [group["params"] for group in theirs] != [group["params"] for group in groups]:
            raise ValueError(
                f"the state dicts of {source!r}: expected the param groups of one optimizer's ranks, found others in "
                f"number {rank} than in number 0"
            )
    merged: dict[Any, Any] = {}
    for of_rank in states:
        merged.update({index: state for index, state in of_rank.items() if state and not merged.get(index)})
    return groups, merged


def _parts(state_dict: Any, source: str) -> Parts:
    """The param groups and the state in a state dict. Raises ValueError for anything else."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            "state_dict: expected a dictionary, as optimizer.state_dict() or torch.load returns it; found a "
            f"{type(state_dict).__name__}"
        )
    if "state" not in state_dict or "param_groups" not in state_dict:
        flat = any(str(key).startswith("state.") for key in state_dict)
        whole = "that of get_optimizer_state_dict without flatten_optimizer_state_dict" if flat else "whole tensors"
        raise ValueError(
            f"the state dict of {source!r}: expected keys 'state' and 'param_groups', found {_first(state_dict)}; pass "
            f"the optimizer's own state_dict() with {whole}, not that of a wrapper that shards them (ZeRO)"
        )
    groups: Sequence[Group] = state_dict["param_groups"]
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f"the state dict of {source!r}: param group {number}: expected a key 'params', found none")
    return groups, state_dict["state"]


def _first(keys: Iterable[Any]) -> str:
    """The first of some keys."""
    found = [*keys]
    return f"{found[:SHOWN]}{f' and {len(found) - SHOWN} more' if len(found) > SHOWN else ''}"


def _names(
    groups: Sequence[Mapping[str, Any]], indices: list[Any], names: Iterable[str] | None, source: str
) -> list[str]:
    saved: list[str] | None = None
    if all(isinstance(index, str) for index in indices):
        saved = indices
    elif all("param_names" in group for group in groups):
        saved = [name for group in groups for name in group["param_names"]]
    names = saved if names is None else names
    if names is None:
        raise ValueError(
            f"expected names, because the state dict of {source!r} has parameters by number; pass their names in the "
            "order of its param groups"
        )
    names = [names] if isinstance(names, str) else list(names)
    if len(names) != len(indices):
        sizes = [len(group["params"]) for group in groups]
        raise ValueError(
            f"names: expected {len(indices)}, as many as the parameters in the param groups of {source!r} "
            f"({', '.join(map(str, sizes))}); found {len(names)}"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"names: expected each name once, found {twice[0]!r} twice")
    if saved is not None and names != saved and {*names} == {*saved}:
        place = next(place for place, (given, name) in enumerate(zip(names, saved)) if given != name)
        raise ValueError(
            f"names: expected the order of the state dict, whose parameter {place} is {saved[place]!r}; found "
            f"{names[place]!r}; leave names out"
        )
    return names


@dataclass(frozen=True)
class _Entry:
    """The state of one parameter as the other optimizer stores it, with its param group."""

    name: str
    source: str
    state: Mapping[Any, Any]
    group: Mapping[str, Any]

    def converted(self, momentum: float | None, form: Form) -> State:
        theirs = SOURCES[self.source]
        trained_by = self.group.get("algorithm") or rule_of(self.group)
        if trained_by not in ("muon", "adamw"):
            raise self._error(f"is trained by {trained_by!r}, whose state is not converted; {ANEW}")
        if not self.state.keys() - set(theirs.flags):
            raise self._error(
                "has no state. If every rank saved its own, as the distributed Muons of Keller Jordan and of "
                "pytorch_optimizer do, its momentum is in another rank's: pass a list of all ranks' state dicts. If it "
                f"has had no gradient yet: {ANEW}"
            )
        if problem := theirs.problem(self.source, self.state, self.group):
            raise self._error(f"{problem}; {may_be(self.state, self.group)}; {ANEW}")
        if theirs.is_adams(self.state):
            return State(self._moments(theirs), "adamw")
        buffer = self._tensor(theirs.buffer)
        if buffer.ndim < 2:
            raise self._error(f"{theirs.buffer!r}: expected a matrix's, found shape {tuple(buffer.shape)}")
        source = theirs.form or self.group["momentum_form"]
        if momentum is None:
            momentum = next((float(self.group[key]) for key in theirs.momentum if key in self.group), None)
        if source == form:
            momentum = 0.0  # not needed, and a factor of one
        elif momentum is None:
            keys = " or ".join(map(repr, theirs.momentum))
            raise self._error(f"is in a param group without {keys}; pass momentum, to convert {source!r} to {form!r}")
        return State({BUFFER: convert_momentum(buffer, momentum, source=source, target=form)}, "muon", form)

    def _moments(self, theirs: Source) -> dict[str, Tensor]:
        keys = {ours: key for ours, key in theirs.moments.items() if key in self.state}
        moments = {ours: self._tensor(key) for ours, key in keys.items()}
        shapes = {key: tuple(tensor.shape) for key, tensor in moments.items()}
        if len(set(shapes.values())) > 1:
            raise self._error(f"has moments of different shapes, {shapes}")
        step = self.state.get(theirs.step, self.group.get("step") if theirs.counts_in_group else None)
        if step is None:
            beside = " or 'step' in its param group" if theirs.counts_in_group else ""
            raise self._error(f"has no counter: expected {theirs.step!r} in its state{beside}")
        return {**moments, "step": torch.tensor(float(step))}

    def _tensor(self, key: str) -> Tensor:
        value = self.state[key]
        if not isinstance(value, Tensor):
            raise self._error(f"{key!r}: expected a tensor, found {value!r}")
        if hasattr(value, "full_tensor"):
            raise self._error(
                f"{key!r}: expected a whole tensor, found a DTensor; save the state with "
                "get_optimizer_state_dict(options=StateDictOptions(full_state_dict=True))"
            )
        if hasattr(value, "boxes"):
            raise self._error(
                f"{key!r}: expected a whole tensor, found a rank's pieces of one; load them with "
                "optimizer.load_state_dict, or all ranks' with optimizer.load_state_dict_from(folder)"
            )
        return value.detach().to(torch.float32, copy=True)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"the state dict of {self.source!r}: parameter {self.name!r} {what}")
