"""Ranks report decisions and errors before they continue: an error on one rank is raised on all."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar, cast

from lwopt_backend.runtime.collectives import Collectives

# Ranks exchange nothing until all of them have reported the same decision.
#
# Otherwise a rank that fails, or decides differently, would leave the others waiting in a collective. So every rank
# reports either its decision or its error, and all of them raise the same error.

T = TypeVar("T")
IS = " = "  # in the line of an option, between its name and its value


class StepRefused(RuntimeError):
    """A step that is not taken: a rank raises this before it changes anything."""


class RanksDisagree(StepRefused):
    """Ranks planned different things, or have different options; the message names the first difference."""


def agree(collectives: Collectives, what: str, decide: Callable[[], tuple[T, Sequence[str]]]) -> T:
    """Run ``decide`` on every rank, check that all ranks decided the same, and return its first result.

    ``decide`` returns a value and the lines that describe it. Called on all ranks of the group. If it raises on any
    rank, all ranks raise: that rank its own error, the others a RuntimeError that quotes it. If the lines differ, all
    ranks raise ``RanksDisagree`` with the first difference.
    """

    def for_one() -> tuple[T, list[Sequence[str]]]:
        value, lines = decide()
        return value, [lines]

    return agree_in_all([collectives], what, for_one)


def agree_in_all(
    groups: Sequence[Collectives], what: str, decide: Callable[[], tuple[T, Sequence[Sequence[str]]]]
) -> T:
    """``agree`` over several groups that this rank is in; ``decide`` returns the lines of each.

    All ranks go through the groups in one shared order. A rank raises only after it has reported to all of its groups,
    so an error reaches every group, and no rank waits for one that has stopped.
    """
    error: Exception | None = None
    lines: Sequence[Sequence[str]] = [[] for _ in groups]
    try:
        value, lines = decide()
    except Exception as caught:  # reported to the other ranks first, then raised again below
        error = caught
    for collectives, of_group in zip(groups, lines, strict=True):
        error = _exchange_reports(collectives, what, of_group, error) or error
    if error is not None:
        raise error
    return value


def check_on_all(collectives: Collectives, what: str, check: Callable[[], None]) -> None:
    """``agree`` without a decision: if ``check`` raises on any rank, all ranks raise."""

    def decide() -> tuple[None, list[str]]:
        check()
        return None, []

    agree(collectives, what, decide)


def from_first(collectives: Collectives, what: str, make: Callable[[], T]) -> T:
    """What ``make`` returns on the first rank, which alone calls it, on all ranks. The value must pickle.

    Called on all ranks of the group. If it raises, all ranks raise, as in ``agree``.
    """
    error: Exception | None = None
    made: bytes | None = None
    if collectives.rank == 0:
        try:
            value = make()
            if collectives.world_size == 1:
                return value
            made = pickle.dumps(value)
        except Exception as caught:  # sent to the other ranks first, then raised again below
            error = caught
    sent, text = collectives.broadcast_object((made, None if error is None else repr(error)))
    if error is not None:
        raise error
    if text is not None:
        raise RuntimeError(f"{what}: rank 0 failed with {text}; rank {collectives.rank} stops with it")
    return value if collectives.rank == 0 else cast(T, pickle.loads(sent))


def _exchange_reports(
    collectives: Collectives, what: str, lines: Sequence[str], error: Exception | None
) -> Exception | None:
    """Exchange reports within one group. Returns the error to raise, or None; a rank with its own error raises that.

    Called on all ranks of the group.
    """
    reports = collectives.gather_objects((digest(lines), repr(error) if error is not None else None))
    failed = [(rank, text) for rank, (_, text) in enumerate(reports) if text is not None]
    if error is None and failed:
        rank, text = failed[0]
        return RuntimeError(f"{what}: rank {rank} failed with {text}; rank {collectives.rank} stops with it")
    if not failed and len({found for found, _ in reports}) > 1:
        return disagreement(collectives, what, lines)
    return None


def disagreement(collectives: Collectives, what: str, lines: Sequence[str]) -> RanksDisagree:
    """The error that names the first difference between the ranks' ``lines``. Called on all ranks of the group."""
    unlike = [of_rank or [] for of_rank in unlike_lines(collectives, lines)]
    return RanksDisagree(f"{what}: {first_difference(unlike)}")


def unlike_lines(collectives: Collectives, lines: Sequence[str] | None) -> list[list[str] | None]:
    """Per rank, those of its ``lines`` among which the first difference is; None for a rank without. Called on all
    ranks of the group.

    Only these travel: with 50,000 parameters on 1,000 ranks, all lines are gigabytes on every rank.
    """
    counts = collectives.gather_objects(None if lines is None else len(lines))
    most = max(count or 0 for count in counts)
    size = math.isqrt(most) + 1
    starts = range(0, most, size)
    digests = None if lines is None else [digest(lines[start : start + size])[:16] for start in starts]
    of_ranks = (found for found in collectives.gather_objects(digests) if found is not None)
    start = next((start for start, found in zip(starts, zip(*of_ranks)) if len(set(found)) > 1), 0)
    return collectives.gather_objects(None if lines is None else list(lines[start : start + size]))


def digest(lines: Sequence[str]) -> str:
    """SHA-256 of the lines; equal on all ranks and machines for equal lines, whatever the hash seed."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def plan_digest(lines: Iterable[str]) -> str:
    """The first 16 hex digits of the ``digest`` of a plan's lines, as ``lwopt plan`` and a training run print it."""
    return digest(list(lines))[:16]


def first_difference(all_lines: Sequence[Sequence[str]], ranks: Sequence[int] = ()) -> str:
    """Describe the first line in which a rank differs from the first; of a ``setting``, its name and both values.

    ``ranks`` are the numbers of the ranks that the lines are from, by default 0, 1, and so on.
    """
    ranks = ranks or range(len(all_lines))
    for first, *others in zip_longest(*all_lines):
        for rank, line in zip(ranks[1:], others):
            if line != first:
                return _difference(first, line, ranks[0], rank)
    return "all lines are equal"


def setting(name: str, value: Any) -> str:
    """The line that describes an option's value."""
    return f"{name}{IS}{value!r}"


def _difference(first: str | None, other: str | None, first_rank: int, rank: int) -> str:
    name, found, value = (first or "").partition(IS)
    others_name, _, others_value = (other or "").partition(IS)
    if found and name == others_name:
        values = f"{value} on rank {first_rank}, {others_value} on rank {rank}"
        return f"ranks differ in {name}: {values}; give all ranks the same value"
    has, others = ("nothing further" if line is None else repr(line) for line in (first, other))
    return f"ranks differ: rank {first_rank} has {has}, rank {rank} has {others}"
