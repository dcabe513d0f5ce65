"""Compares two checkpoints of any formats: tensor by tensor, and what else a run goes on with."""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from torch import Tensor

from lwopt_backend.checkpoint.contents import MASTER, WEIGHT, Checkpoint, LazyTensor, Param, differing, held
from lwopt_backend.checkpoint.translation import as_ours
from lwopt_backend.groups.rates import regrouped

STEP, OWNER, BUFFER = "step", "owner", "buffer"


@dataclass(frozen=True)
class Compared:
    """A tensor ``key`` of parameter ``name``, or its counter; or an entry of what ``name`` says, such as a param group.
    ``what`` is the difference, empty if equal. If shapes are equal, ``elements`` differ, by at most ``largest``."""

    name: str
    key: str
    what: str = ""
    elements: int = 0
    largest: float = 0.0


def differences(a: Checkpoint, b: Checkpoint, weights_only: bool = False) -> Iterator[Compared]:
    """Yield every tensor, counter and buffer of both. Parts of two tensors are in memory at a time.

    Tensors are compared bit for bit, after the narrower is widened; NaN equals NaN. Formats store weights in
    one or two forms, so both are compared: ``weight`` in the narrower dtype, made from the master weight if a
    checkpoint has no other; ``fp32`` in the wider one, if it has master weights. So a bf16 weight with an fp32 master
    equals the fp32 weight of an FSDP2 checkpoint.
    """
    for name in {**a.params, **b.params}:  # or the parameter that is tied to it
        ours, theirs = (each.params.get(name) or each.params.get(each.tied.get(name, "")) for each in (a, b))
        if ours is None or theirs is None:
            yield Compared(name, "", _only(theirs is None))
        elif name not in a.params or name not in b.params:
            yield _compared(name, WEIGHT, ours.best, theirs.best)
        else:
            yield from _of_param(name, ours, theirs, weights_only)
    for name in {**a.buffers, **b.buffers}:
        yield _compared(name, BUFFER, a.buffers.get(name), b.buffers.get(name))
    for each in (a, b):
        each.finish()


def _of_param(name: str, a: Param, b: Param, weights_only: bool) -> Iterator[Compared]:
    if a.weight is not None or b.weight is not None:
        ours, theirs = a.weight or a.best, b.weight or b.best
        if ours.dtype.is_floating_point and theirs.dtype.is_floating_point:
            narrow = min(ours.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
            if narrow.itemsize < max(ours.dtype.itemsize, theirs.dtype.itemsize):
                ours, theirs = ours.to(narrow), theirs.to(narrow)
        yield _compared(name, WEIGHT, ours, theirs)
    if weights_only:
        return
    if MASTER in a.states or MASTER in b.states or a.best.dtype != b.best.dtype:
        found = _compared(name, MASTER, a.best, b.best)
        lacking = [side for side, param in (("A", a), ("B", b)) if MASTER not in param.states]
        why = f"; {lacking[0]} has no master weight" if found.what and len(lacking) == 1 else ""
        yield Compared(name, MASTER, found.what + why, found.elements, found.largest)
    for key in {**a.states, **b.states}:
        if key != MASTER:
            yield _compared(name, key, a.states.get(key), b.states.get(key))
    if (a.step, b.step) != (None, None):
        steps = [("no number" if step is None else f"{step:g}") for step in (a.step, b.step)]
        yield Compared(name, STEP, "" if a.step == b.step else f"{steps[0]} in A, {steps[1]} in B")
    of_a, of_b = _leaves(a.owner_states), _leaves(b.owner_states)  # tensors, and numbers or words
    for key in {**of_a, **of_b}:
        one, other = of_a.get(key), of_b.get(key)
        if key not in of_a or key not in of_b:
            yield Compared(name, key, _only(key in of_a))
        elif isinstance(one, Tensor) and isinstance(other, Tensor):
            yield _compared(name, key, held(one, key), held(other, key))
        else:
            same = type(one) is type(other) and one == other
            yield Compared(name, key, "" if same else f"{one!r} in A, {other!r} in B")


def _leaves(found: Any, key: str = OWNER) -> dict[str, Any]:
    """The leaves of dictionaries, lists and tuples, by path."""
    pairs = found.items() if isinstance(found, Mapping) else enumerate(found) if isinstance(found, list | tuple) else ()
    if not isinstance(found, Mapping | list | tuple):
        return {key: found}
    return {place: leaf for at, value in pairs for place, leaf in _leaves(value, f"{key}.{at}").items()}


def of_runs(a: Checkpoint, b: Checkpoint) -> Iterator[Compared]:
    """Yield every difference in the counters that both have, in param groups, in the scheduler's state and in entries
    of the user's program.

    Param groups are known by their parameters. Those of other optimizers are compared by this package's options.
    """
    for counter, of_a, of_b in (("step", a.iteration, b.iteration), ("samples", a.samples, b.samples)):
        if None not in (of_a, of_b) and of_a != of_b:
            yield Compared("counters", counter, f"{of_a} in A, {of_b} in B")
    ours, theirs = as_ours(a), as_ours(b)
    pairs: dict[tuple[int | None, int | None], tuple[int | None, int | None]] = {}  # with their numbers in the files
    for name in a.params:
        if (its_name := b.name_of(name)) in b.params:
            key = ours.params[name].group, theirs.params[its_name].group
            pairs.setdefault(key, (a.params[name].group, b.params[its_name].group))
    partner: dict[int, int] = {}
    for (one, other), (in_a, in_b) in pairs.items():
        if one is not None and other is not None:
            partner.setdefault(one, other)
            said = f"param group {in_a}" if in_a == in_b else f"param group {in_a}, in B {in_b}"
            yield from _unlike(said, dict(*ours.groups[one : one + 1]), dict(*theirs.groups[other : other + 1]))
        elif one is not other:
            yield Compared(f"param group {in_b if in_a is None else in_a}", "", _only(other is None))
    order, count = [partner.get(number, number) for number in range(len(ours.groups))], len(theirs.groups)
    moved = sorted(order) == [*range(count)]
    for name, one_state, other_state in (
        ("scheduler", ours.scheduler, theirs.scheduler),
        ("program", dict(ours.client), dict(theirs.client)),
    ):
        yield from _unlike(name, one_state, regrouped(other_state, order, count) if moved else other_state)
    for each in (a, b):
        each.finish()


def _unlike(name: str, a: Any, b: Any, key: str = "") -> Iterator[Compared]:
    """Yield the differences of two values, at any depth."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for at in {**a, **b}:
            place = f"{key}.{at}".lstrip(".") if isinstance(at, str) else f"{key}[{at!r}]"
            if at in a and at in b:
                yield from _unlike(name, a[at], b[at], place)
            else:
                yield Compared(name, place, f"{_only(at in a)}: {reprlib.repr(a.get(at, b.get(at)))}")
    elif isinstance(a, (list, tuple, deque)) and isinstance(b, (list, tuple, deque)) and len(a) == len(b):
        for at, pair in enumerate(zip(a, b)):
            yield from _unlike(name, *pair, f"{key}[{at}]")
    elif isinstance(a, (Tensor, LazyTensor)) and isinstance(b, (Tensor, LazyTensor)):
        lazy = [each if isinstance(each, LazyTensor) else held(each, key) for each in (a, b)]
        found = _compared(name, key, *lazy)
        yield from [found] if found.what else []
    elif not (numpy.array_equal(a, b) or {str(a), str(b)} == {"nan"}):
        yield Compared(name, key, f"{reprlib.repr(a)} in A, {reprlib.repr(b)} in B")


def _only(in_a: bool) -> str:
    return f"only in {'A' if in_a else 'B'}"


def _compared(name: str, key: str, a: LazyTensor | None, b: LazyTensor | None) -> Compared:
    if a is None or b is None:
        return Compared(name, key, _only(b is None))
    if a.shape != b.shape:
        return Compared(name, key, f"shape {list(a.shape)} in A, {list(b.shape)} in B")
    count, _, largest = differing(a, b)
    what = f"{count:,} of {a.numel:,} elements differ" if count else ""
    return Compared(name, key, what, count, largest)
