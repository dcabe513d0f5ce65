"""Ties: weights under several names in a model, as a save recorded or a user declares them.

torch's model state dict has a tied weight under all its names, an optimizer's only under the first, and neither has the
ties. Equal values do not prove a tie: a frozen teacher equals its student at the start. A model that loads knows its
own ties (``of_model``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, Param, differing

RECORD = "lwopt_tied"  # the key in this package's DCP folders for further names, each with the first


def recorded(found: Any, params: Mapping[str, Param]) -> dict[str, str]:
    """The ties that a save of this package recorded. Raises CheckpointError unless these are names of ``params``."""
    if not isinstance(found, Mapping) or not all(type(n) is str for pair in found.items() for n in pair):
        raise CheckpointError(f"{RECORD}: expected names of tied parameters, found {found!r:.100}; copy it again")
    if missing := {*found, *found.values()} - params.keys():
        raise CheckpointError(f"{RECORD}: expected saved names, found {min(missing)!r}; copy all files again")
    return dict(found)


def names_in(model: nn.Module) -> dict[str, str]:
    """The further names of a model's parameters, each with the first."""
    first: dict[int, str] = {}
    named = [(name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False)]
    return {name: of for name, of in named if name != of}


def of_model(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """The checkpoint with the ties of the model that loads it: ``names`` as of ``names_in``. The name that has state is
    kept. Reads weights that are there twice; raises CheckpointError unless they are equal."""
    params, tied = dict(checkpoint.params), dict(checkpoint.tied)
    for pair in names.items():
        name, of = (tied.get(each, each) for each in pair)  # those that are kept, of three names and more
        if name != of and name in params and of in params:
            kept, other = (name, of) if params[name].states and not params[of].states else (of, name)
            check_equal(kept, params[kept].best, other, params[other].best)
            tied = {each: kept if first == other else first for each, first in tied.items()} | {other: kept}
            del params[other]
        elif name in params and of not in params:
            tied[of] = name
    return replace(checkpoint, params=params, tied=tied)


def check_equal(name: str, one: LazyTensor, other_name: str, other: LazyTensor) -> None:
    """Raises CheckpointError unless two weights, which are one in the model that loads them, are equal."""
    if one.shape != other.shape or differing(one, other)[0]:
        raise CheckpointError(
            f"expected equal weights of {name!r} and {other_name!r}, which are one parameter in this model, found "
            f"different ones ({one.where}, {other.where}); load it into the model it was saved with"
        )


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
