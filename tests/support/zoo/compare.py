"""What the product says of each weight of a model, beside what the judge saw."""

import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lwopt_backend import explain
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.groups.grouping import Given
from tests.support.judge import Judge, Seen, plain_operations
from tests.support.told import OPTIONS, heard, is_unclear, kind_of

Ends = frozenset[tuple[int, int]]  # of each output of a matrix, its first and its last element


class Verdict(NamedTuple):
    """``is_``: what the judge saw; ``told``: what the product says, in a word; ``why``: in its own words.

    ``fault``: "false cut", "missed", "head taken for a matrix", ... or "" where both agree or the judge saw too little;
    ``said``: the product says that it is unsure. ``parts``: the names of its matrices.
    """

    weight: str
    shape: tuple[int, ...]
    is_: str
    told: str
    why: str
    fault: str
    said: bool
    parts: str = ""


class Ran(NamedTuple):
    judge: Judge
    stopped: str  # why the pass stopped, if it did


def ran(model: nn.Module, args: Any, kwargs: Any) -> Ran:
    """The judge, after one pass of ``model``, which may be on the meta device."""
    judge = Judge(model)
    return Ran(judge, passes(judge, model, args, kwargs))


def passes(judge: Judge, model: nn.Module, args: Any, kwargs: Any) -> str:
    """Let a model, or a part of it, pass before the judge; why it stopped, if it did."""
    device = next(model.parameters()).device
    with torch.no_grad(), plain_operations(), torch.device(device), warnings.catch_warnings(action="ignore"):
        judge.begins(args, kwargs)
        try:
            with judge:
                result = model(*args, **kwargs)
        except Exception as error:  # of anybody's forward
            return f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
        with torch.device("cpu"):
            judge.ends(result)
    return ""


def verdicts(model: nn.Module, judge: Judge, example: Any, full: bool = True) -> Iterator[Verdict]:
    """One for each kind of weight; weights that differ in the number of a layer alone are one kind.

    ``full``: the pass was of a whole model, so that what it returned says which weights are heads.
    """
    with heard() as warned:
        told = {each.name: each for each in explain(model, matrix="muon", show=False, example=example, **OPTIONS)}
    cuts = _cuts(model, example) if any(len(each.matrices) > 1 for each in told.values()) else {}
    done: set[tuple[str, str, str]] = set()
    for name, seen in judge.seen.items():
        each = told[name]
        kind, said = kind_of(name), is_unclear(each, warned)
        cut = len(each.matrices) > 1
        what = "cut" if cut else "matrix" if each.kind == "matrix" else each.kind
        is_, wanted = _seen_as(seen, judge.is_head(name) and full)
        fault = _fault(is_, wanted, each, cuts.get(name), seen)
        if fault == "false cut" and cuts[name] in _of_latent(wanted or set(), model, name):
            fault = ""  # as DeepSeek's report has it, and docs/matrices.md says
        why = re.sub(r"\d+", "#", each.why)
        if (kind, is_, fault) not in done:
            done.add((kind, is_, fault))
            how, parts = "named" if said and what == "matrix" else what, ", ".join(each.matrices)
            yield Verdict(kind, each.shape, is_, how, why, fault, said, parts)


def _seen_as(seen: Seen, is_head: bool) -> tuple[str, set[Ends] | None]:
    """What a weight is, and which outputs its matrices have, if it has any."""
    if "convolved" in seen.uses:
        return "convolution", None
    if "looked up" in seen.uses and len(seen.shape) == 2:
        return "embedding", None
    if not seen.blocks:
        return ("table" if seen.uses - {"computed"} else "computed with" if seen.uses else "unseen"), None
    if is_head:
        return "head", None
    found = seen.matrices()
    if found is None:
        return "unseen", None
    if any(1 in (len(one), seen.shape.numel() // max(len(found) * len(one), 1)) for one in found):
        return "vector", None
    edges = {frozenset(zip(one[:, 0].tolist(), one[:, -1].tolist())) for one in found}
    if len(seen.shape) > 2 or len(seen.blocks) > 1 and len(found) >= len(seen.blocks):
        return f"{len(found)} slices or parts" if len(found) > 1 else "one matrix", edges
    rows = next(iter(seen.blocks.values()))
    inputs_first = len(rows) > 1 and int(rows[1, 0] - rows[0, 0]) == 1 and rows.shape[1] > 1
    return (f"{len(found)} matrices" if len(found) > 1 else "one matrix") + ", inputs first" * inputs_first, edges


def _of_latent(wanted: set[Ends], model: nn.Module, name: str) -> Iterator[set[Ends]]:
    """With one of the matrices, queries of latent attention, divided as DeepSeek-V2's report divides them: what is
    rotated of each head, and what is not."""
    attention = model.get_submodule(".".join(name.split(".")[:-2]))
    sizes: list[Any] = [getattr(attention, size, None) for size in ("qk_nope_head_dim", "qk_rope_head_dim")]
    for first, head in ((sizes[0], sum(sizes)), (sizes[1], sum(sizes))) if all(sizes) else ():
        for one in wanted:
            before = frozenset(row for place, row in enumerate(sorted(one)) if place % head < first)
            yield wanted - {one} | {before, one - before}


def _cuts(model: nn.Module, example: Any) -> dict[str, set[Ends]]:
    """The outputs of each matrix of the product, which ``explain`` does not show."""
    with warnings.catch_warnings(action="ignore"):
        grouping = Given({**OPTIONS, "matrix": "muon"}, None, example).decide(HostConfig, model)[2]
    return {
        route.name: {_ends(block, route.transposed) for block in grouping.divided[route.name].blocks}
        for route in grouping.routes
        if route.name in grouping.divided and route.kind == "matrix"
    }


def _ends(block: Any, transposed: bool) -> Ends:
    rows, columns = block.shape
    if transposed:
        return frozenset((block.flat(i), block.flat((rows - 1) * columns + i)) for i in range(columns))
    return frozenset((block.flat(i * columns), block.flat((i + 1) * columns - 1)) for i in range(rows))


def _fault(is_: str, wanted: set[Ends] | None, told: Any, cut: set[Ends] | None, seen: Seen) -> str:
    count, is_matrix = len(told.matrices), told.kind == "matrix"
    if is_ in ("unseen", "computed with") or told.kind == "frozen":
        return ""
    if wanted is None:
        if not is_matrix or is_ == "convolution":
            return ""
        return "false cut" if count > 1 else f"{is_} taken for a matrix"
    if not is_matrix:
        return "left to the element-wise rule"
    if cut is None:
        if count != len(wanted):
            return "false cut" if count > 1 else "missed"
        outputs = sorted(map(len, wanted))
        return "" if outputs == sorted(rows for rows, _ in told.matrices.values()) else "wrong way round"
    # Slices that no product multiplied, such as experts that no token chose, are not wanted
    if cut == wanted or wanted < cut and (len(seen.shape) > 2 or len(seen.blocks) > 1):
        return ""
    if count > 1:
        return "false cut"
    return "missed" if len(wanted) > 1 else "wrong way round"
