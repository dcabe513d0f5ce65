"""Tests whose body is called on every rank of a world."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.ranks import RankPool

Test = Callable[..., None]


def on_ranks(*sizes: int) -> Callable[[Test], Test]:
    """Call a test on all ranks, in worlds of these sizes, or of those that the axis ``ranks`` of its ``cells`` has.
    What fails on one rank fails the test, with what pytest says of the assertion. Arguments (of ``parametrize``,
    ``cells`` and fixtures) have to be picklable."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(ranks: RankPool, **arguments: Any) -> None:
            ranks.run(_call, test.__module__, test.__name__, arguments)

        first = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([first, *inspect.signature(test).parameters.values()])  # type: ignore[attr-defined]
        in_worlds = pytest.mark.parametrize("ranks", sizes, indirect=True, ids=lambda size: f"{size} ranks")
        return in_worlds(run) if sizes else run

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
