"""Ties: weights under several names in a model, as a save recorded or a user declares them.

torch's model state dict has a tied weight under all its names, an optimizer's only under the first, and neither has the
ties. Equal values do not prove a tie: a frozen teacher equals its student at the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, differing

RECORD = "lwopt_tied"  # the key in this package's DCP folders for further names, each with the first


def recorded(found: Any, params: Mapping[str, Param]) -> dict[str, str]:
    """The ties that a save of this package recorded. Raises CheckpointError unless these are names of ``params``."""
    if not isinstance(found, Mapping) or not all(type(n) is str for pair in found.items() for n in pair):
        raise CheckpointError(f"{RECORD}: expected names of tied parameters, found {found!r:.100}; copy it again")
    if missing := {*found, *found.values()} - params.keys():
        raise CheckpointError(f"{RECORD}: expected saved names, found {min(missing)!r}; copy all files again")
    return dict(found)


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
        if (alias.shape, alias.dtype) != (weight.shape, weight.dtype) or differing(alias, weight)[0]:
            raise CheckpointError(f"--tied {pair}: expected equal weights of {name} and {of}; leave it out")
        tied[name] = of
    return replace(checkpoint, params=params, tied=tied)
