"""Ties: weights under several names in a model. Decides which weights of a checkpoint are one, and which are copies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param
from lwopt_backend.routing.output_heads import HEAD_NAMES, HEAD_NAMES_OUTSIDE_BLOCKS

# torch's model state dict has a tied weight under all its names, an optimizer's only under the first, and neither has
# the ties. Equal values do not prove a tie: a frozen teacher equals its student at the start. So among copies that are
# not trained, only a model's output head counts as its embedding.

RECORD = "lwopt_tied"  # the key in this package's DCP folders for further names, each with the first
EMBEDDING = re.compile(r"embed|wte")


def recorded(found: Any, params: Mapping[str, Param]) -> dict[str, str]:
    """The ties that a save of this package recorded. Raises CheckpointError unless these are names of ``params``."""
    if not isinstance(found, Mapping) or not all(type(n) is str for pair in found.items() for n in pair):
        raise CheckpointError(f"{RECORD}: expected names of tied parameters, found {found!r:.100}; copy it again")
    if missing := {*found, *found.values()} - params.keys():
        raise CheckpointError(f"{RECORD}: expected saved names, found {min(missing)!r}; copy all files again")
    return dict(found)


def heads(params: Mapping[str, Param]) -> tuple[dict[str, str], list[str]]:
    """Output heads that no optimizer trains and that equal a trained weight, each with that one's name; and notes."""
    forms = {_form(param) for param in params.values() if param.states}
    untrained = {
        name: param
        for name, param in params.items()
        if not param.states and param.group is None and len(param.shape) > 1 and _form(param) in forms
    }  # without vectors, many of which are all ones
    forms = set(map(_form, untrained.values()))
    trained: dict[Any, list[str]] = {}  # by form and first values
    for name, param in params.items():
        if param.states and _form(param) in forms:
            trained.setdefault((_form(param), _begin(param)), []).append(name)
    copies: dict[str, list[str]] = {}  # untrained weights by the trained one with the same first values
    for name, param in untrained.items():
        for of in trained.get((_form(param), _begin(param)), ()):
            copies.setdefault(of, []).append(name)
    found: dict[str, str] = {}
    for of, names in copies.items():
        for name in names:
            is_head = name not in found and _is_head(name, of)
            nearer = is_head and any(_common(n, name) > _common(of, name) and not _is_head(n, of) for n in names)
            if is_head and not nearer and all(map(torch.equal, _blocks(params[of]), _blocks(params[name]))):
                found[name] = of
    notes = [f"{name}, an output head, equals {of}: taken for the same weight" for name, of in found.items()]
    rest = {name: of for of, names in copies.items() for name in names if name not in found}
    if rest:
        name, of = next(iter(rest.items()))
        notes.append(
            f"{len(rest)} weight(s) without state begin like trained ones, e.g. {name} like {of}: kept as frozen "
            f"copies; if that is one weight under two names, give --tied {name}={of}"
        )
    return found, notes


def declared(checkpoint: Checkpoint, pairs: Iterable[str]) -> Checkpoint:
    """The checkpoint with the ties that a user declares, as ``"another name=name"``. Raises CheckpointError for unknown
    names, and for weights that are trained separately or differ."""
    params, tied = dict(checkpoint.params), dict(checkpoint.tied)
    for pair in pairs:
        name, _, of = pair.partition("=")
        if tied.get(name) == of and of in params:
            continue
        if unknown := [each for each in (name, of) if each not in params]:
            raise CheckpointError(f"--tied {pair}: expected NAME=NAME of parameters, found {unknown[0]!r}")
        if name == of or params[name].states or params[name].group is not None:
            raise CheckpointError(f"--tied {pair}: expected the trained {name} last; exchange the two")
        alias, weight = params.pop(name).best, params[of].weight or params[of].best
        same = (alias.shape, alias.dtype) == (weight.shape, weight.dtype)
        if not same or not all(map(torch.equal, alias.blocks(), weight.blocks())):
            raise CheckpointError(f"--tied {pair}: expected equal weights of {name} and {of}; leave it out")
        tied[name] = of
    return replace(checkpoint, params=params, tied=tied)


def _form(param: Param) -> tuple[tuple[int, ...], torch.dtype | None]:
    return param.shape, None if param.weight is None else param.weight.dtype


def _begin(param: Param) -> bytes:
    """A hash of a weight's first values."""
    first = next(_blocks(param), torch.empty(0)).contiguous().view(torch.uint8)
    return hashlib.blake2b(first.numpy().data).digest()


def _blocks(param: Param) -> Iterator[Tensor]:
    return iter(()) if param.weight is None else param.weight.blocks()


def _is_head(name: str, of: str) -> bool:
    """Whether a weight that equals the weight ``of`` is an output head by its own name, or by that of an embedding that
    it equals without being one (``routing.output_heads``)."""
    if _named_as_head(of):
        return False
    in_a_block = any(part.isdecimal() for part in name.split("."))
    as_wide = bool(EMBEDDING.search(of)) and not EMBEDDING.search(name) and not in_a_block
    return _named_as_head(name) or as_wide


def _named_as_head(name: str) -> bool:
    parts = name.split(".")[:-1]
    outside = parts[: next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))]
    return not HEAD_NAMES.isdisjoint(parts) or not HEAD_NAMES_OUTSIDE_BLOCKS.isdisjoint(outside)


def _common(one: str, other: str) -> int:
    """The number of leading words that two names share."""
    pairs = zip(one.split("."), other.split("."))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), 0)
