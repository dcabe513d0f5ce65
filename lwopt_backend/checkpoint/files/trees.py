"""Structures from files that whoever reads them may walk, print and compare without another thought."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from lwopt_backend.checkpoint.files.made import Stub

DEEPEST = 100  # levels; checkpoints have about 15, and Python's own limit is met at a few hundred
SHARED = 1  # times a file's bytes: how many elements there may be if all that is shared were written out
CHARACTERS = 64  # of a text that count as one element
_SEQUENCES = (list, tuple, set, frozenset, deque)
_CONTAINERS = (dict, Stub, *_SEQUENCES)
_TEXTS = (str, bytes, bytearray)
_SINGLE = frozenset({int, float, bool, type(None), torch.dtype, torch.Size})  # most of what there is


def check_tree(found: Any, nbytes: int) -> None:
    """Raises ValueError for what holds itself, is nested too deep, or is far larger than its file of ``nbytes``.

    A pickle may use a part again and again: 60 lists, each of which is in the next one twice, have 2**60 elements.
    """
    most = SHARED * nbytes + 2**17
    done: dict[int, tuple[int, int]] = {}  # elements and levels, of containers by id; ``found`` keeps them alive
    path: dict[int, tuple[int, list[Any]]] = {}  # of those that hold the one looked at: what else is in them
    waiting = [found]
    while waiting:
        value = waiting[-1]
        if id(value) in done:
            waiting.pop()
            continue
        if id(value) not in path:
            count, inner = path[id(value)] = _contents(value)
            if any(id(part) in path for part in inner):
                raise ValueError(f"a {type(value).__name__} in it holds itself")
            if inner:
                waiting += inner
                continue
        count, inner = path.pop(id(value))
        inside = [done[id(part)] for part in inner]
        count += sum(elements for elements, _ in inside)
        depth = max((levels for _, levels in inside), default=0)
        if depth >= DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        if count > most:
            raise ValueError(
                f"a {type(value).__name__} in it would have {count} elements, as it uses parts again and again"
            )
        done[id(value)] = count, depth + 1
        waiting.pop()


def _contents(value: Any) -> tuple[int, list[Any]]:
    """How many elements a value has by itself, and the containers in it."""
    count, inner = 1, []
    for part in _parts(value):
        if type(part) in _SINGLE:
            count += 1
        elif isinstance(part, _TEXTS):
            count += 1 + len(part) // CHARACTERS
        elif isinstance(part, _CONTAINERS) and part:
            inner.append(part)
        else:
            count += 1
    return count, inner


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return itertools.chain(value.keys(), value.values())
    if isinstance(value, Stub):
        return vars(value).values()
    return value if isinstance(value, _SEQUENCES) else ()
