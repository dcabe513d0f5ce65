"""Whole parameters out of what Megatron's tensor, pipeline and expert parallel ranks hold of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lwopt_backend.checkpoint.contents import CheckpointError, Param
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron.folders import Coordinates
from lwopt_backend.checkpoint.megatron.names import EMBEDDING, OUTPUT, is_tied, layer_of, tied
from lwopt_backend.checkpoint.megatron.optimizers import Kept
from lwopt_backend.checkpoint.megatron.parallel import Cut, cut_of, is_gated, merge
from lwopt_backend.checkpoint.megatron.ranks import Ranks

Pair = tuple[str, LazyTensor, LazyTensor]
_PLACES = ("embedding.", "decoder.layers.", "decoder.", "")


def merged(
    ranks: Ranks, kept: Mapping[Coordinates, Mapping[str, Kept]]
) -> tuple[dict[str, Param], tuple[Pair, ...], dict[str, str]]:
    """Whole parameters in the model's order; pairs of copies that must be equal; the tied embedding's other name.

    ``kept``: what the optimizers keep, by rank. Raises CheckpointError for parameters or states that a rank lacks.
    """
    held: dict[str, dict[Coordinates, LazyTensor]] = {}
    for rank in ranks.ranks:
        for name, weight in rank.weights.items():
            held.setdefault(name, {})[rank.coordinates] = weight
    pairs: list[Pair] = []
    params = {name: _param(name, held[name], kept, ranks, pairs) for name in sorted(held, key=_place)}
    if is_tied(ranks.arguments) and EMBEDDING in params and OUTPUT in params:  # the last pipeline stage has a copy
        pairs += _tied_pairs(params[EMBEDDING], params.pop(OUTPUT))
    return params, tuple(pairs), tied(params, ranks.arguments)


def _param(
    name: str,
    weights: Mapping[Coordinates, LazyTensor],
    kept: Mapping[Coordinates, Mapping[str, Kept]],
    ranks: Ranks,
    pairs: list[Pair],
) -> Param:
    size = ranks.world["tp"]
    cut = cut_of(name, gated=is_gated(ranks.arguments)) if size > 1 else Cut("whole")
    if len({place[1] for place in weights}) > 1:
        raise CheckpointError(
            f"{name}: expected on one pipeline rank, found on {sorted({place[1] for place in weights})}; the ranks' "
            "files are not of one checkpoint"
        )
    mine = {place: kept[place][name] for place in weights if name in kept[place]}
    keys = {key: None for found in mine.values() for key in found.states}
    states = {key: {place: found.states[key] for place, found in mine.items() if key in found.states} for key in keys}
    steps, groups = {found.step for found in mine.values()}, {found.group for found in mine.values()}
    if len(steps) > 1 or len(groups) > 1:
        raise CheckpointError(
            f"{name}: expected one step and param group, found steps {sorted(map(str, steps))} and groups "
            f"{sorted(map(str, groups))} on ranks {sorted(mine)}; the ranks' files are not of one checkpoint"
        )
    return Param(
        weight=_whole(f"weight of {name}", weights, size, cut, pairs),
        states={key: _whole(f"{key} of {name}", parts, size, cut, pairs) for key, parts in states.items()},
        step=next(iter(steps), None),
        group=next(iter(groups), None),
    )


def _whole(what: str, parts: Mapping[Coordinates, LazyTensor], size: int, cut: Cut, pairs: list[Pair]) -> LazyTensor:
    """One tensor out of the ranks' parts; equal copies of a part are added to ``pairs``."""
    by_rank: list[list[tuple[Coordinates, LazyTensor]]] = [
        [(place, part) for place, part in sorted(parts.items()) if place[0] == rank] for rank in range(size)
    ]
    missing = [rank for rank, copies in enumerate(by_rank) if not copies]
    if missing:
        raise CheckpointError(
            f"{what}: expected a part on each of {size} tensor parallel ranks, none on {missing}; the ranks' files are "
            "not of one checkpoint, or not whole: copy them again"
        )
    same = [[entry for copies in by_rank for entry in copies]] if cut.kind == "whole" else by_rank
    for copies in same:
        first = copies[0]
        pairs += [(f"{what} on ranks {first[0]} and {place}", first[1], part) for place, part in copies[1:]]
    return merge([copies[0][1] for copies in by_rank], cut)


def _tied_pairs(embedding: Param, output: Param) -> Iterable[Pair]:
    what = f"{EMBEDDING} and {OUTPUT}, which are tied"
    if embedding.weight is not None and output.weight is not None:
        yield f"weight of {what}", embedding.weight, output.weight
    for key in embedding.states.keys() & output.states.keys():
        yield f"{key} of {what}", embedding.states[key], output.states[key]


def _place(name: str) -> tuple[int, int]:
    return next(i for i, start in enumerate(_PLACES) if name.startswith(start)), layer_of(name) or 0
