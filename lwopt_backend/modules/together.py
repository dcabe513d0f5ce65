"""What goes wrong in one module on one rank is an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lwopt_backend.modules.parts import Part
from lwopt_backend.runtime.failures import failing
from lwopt_backend.runtime.ranks import Collectives

T = TypeVar("T")


def together(
    everyone: Collectives, what: str, parts: Mapping[str, Part], do: Callable[[str, Part], T]
) -> list[dict[str, T]]:
    """``do`` each of this rank's modules, in their order; per rank, its results by module. Called on all ranks.

    A module that fails keeps no other from its turn, whose ranks would wait. Then all ranks raise RuntimeError, which
    says in which modules and on which ranks there was what error.
    """
    done: dict[str, Any] = {}
    failed: dict[str, Exception] = {}
    for name, part in parts.items():
        try:
            done[name] = do(name, part)
        except Exception as error:  # reported to the other ranks first, then raised below
            failed[name] = error
    first = next(iter(failed.values()), None)
    try:
        with failing(lambda: f"{what}: hearing from all ranks"):
            reports = everyone.gather_objects((done, {name: repr(error) for name, error in failed.items()}))
    except RuntimeError as lost:
        if first is None:
            raise
        raise first from lost
    problems: dict[tuple[str, str], list[int]] = {}
    for rank, (_, errors) in enumerate(reports):
        for name, text in errors.items():
            problems.setdefault((name, text), []).append(rank)
    if problems:
        said = [f"module {name!r} failed on {_ranks(ranks)} with {text}" for (name, text), ranks in problems.items()]
        raise RuntimeError(f"{what}: {'; '.join(said)}") from first
    return [done for done, _ in reports]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
