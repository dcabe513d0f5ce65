"""Which matrices are in each parameter: one, the slices of a stack, or the blocks of a fused weight, and why.

Settings by glob take precedence, then what is known of the model's modules (``fused_weights``). Otherwise, a
parameter of two dimensions is one matrix, one of more is a stack of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from torch import Tensor, nn

from lwopt_backend.config.atoms import AtomSettings, Division
from lwopt_backend.plan.atoms import Block, Grid, divided, equal, grouped, matrices_of, repeated, undivided
from lwopt_backend.routing.fused import Fusion, fused_weights
from lwopt_backend.routing.heads import AttentionHeads, heads_in, named_as_heads, none_found, unknown
from lwopt_backend.routing.models import all_lora
from lwopt_backend.routing.routing import Route, blocks_of, check_globs, full_shape, named, named_parameters, warn
from lwopt_backend.routing.shown import Shown, Truth

SHOWN = 4  # names of parts that are printed


@dataclass(frozen=True, slots=True)
class Divided:
    """The matrices of one parameter, together exactly its elements. ``reason`` is empty for a plain matrix.

    ``is_plain`` if nothing is known or set: its route already says whether it is a matrix or a stack. ``parts`` are as
    in ``TrainedParam``. ``looks_fused`` if it may be several matrices, and nothing tells them. ``truth`` is what told
    them, if a class or a run of the model's code did.
    """

    blocks: tuple[Block, ...]
    reason: str = ""
    is_plain: bool = False
    parts: tuple[int, ...] = ()
    looks_fused: bool = False
    truth: Truth | None = None


def divide(
    model: nn.Module,
    routes: Sequence[Route],
    settings: AtomSettings | None = None,
    *,
    elsewhere: Sequence[Route] = (),
    per_head: Collection[str] = (),
    shown: Shown | None = None,
) -> dict[str, Divided]:
    """The matrices of every parameter in ``routes`` that goes to the matrix rule, by its name; and the ``parts``, no
    matrices, of others whose rows tensor parallelism cuts.

    ``routes`` are those of all parameters of ``model``; if it is a part of a model, ``elsewhere`` are those of the
    other parts. ``per_head`` names parameters whose heads of queries, keys and values are matrices. Does not change the
    model; the result is the same on all ranks. Raises ValueError for a glob that matches no such parameter, for
    sizes that do not add up, and for unknown heads.
    """
    settings = settings or AtomSettings()
    _check_globs(settings, [*routes, *elsewhere])
    matrices = [route for route in routes if _is_divided(route)]
    params = dict(named_parameters(model))
    by_id = {id(params[route.name]): route for route in routes}

    def stored(param: Tensor, *, of_shard: bool = False) -> tuple[tuple[int, ...], bool] | None:
        """The shape of the parameter, or of a tensor-parallel rank's shard of it; and whether it is transposed."""
        route = by_id.get(id(param))
        if route is None or (len(route.shape) > 2 and route.kind == "elementwise"):
            return None
        shape = route.shape if route.grid is None else route.planes
        shape = route.cut.local(route.shape) if of_shard and route.cut is not None else shape
        return shape, route.transposed

    asked = {id(params[r.name]) for r in matrices if settings.of(r.names) is None}
    asked |= {id(weight) for lora in all_lora(model) if (weight := lora.changed) is not None and asked}
    fused = fused_weights(model, stored, shown or Shown(model, full_shape), asked)
    shared = {id(params[r.name]) for r in matrices if r.cut is not None and r.cut.shared} & asked
    if shared:
        of_shard = partial(stored, of_shard=True)
        in_shards = fused_weights(model, of_shard, Shown(model, lambda param: _shape(of_shard(param), param)), shared)
        fused = {**fused, **{weight: of for weight, of in in_shards.items() if weight in shared}}
    ranks = max((route.cut.ranks for route in matrices if route.cut is not None), default=1)
    heads = heads_in(model, fused, ranks) if per_head else {}
    by_head = {route.name: heads.get(id(params[route.name])) for route in matrices if route.name in per_head}
    _check_heads(by_head, settings, matrices, elsewhere)
    found = {}
    for route in matrices:
        of_route = _divided(route, settings, fused.get(id(params[route.name])), by_head.get(route.name))
        if route.kind == "matrix":
            _check_cut(route, of_route.blocks)
        else:
            of_route = Divided((), is_plain=True, parts=of_route.parts)
        found[route.name] = of_route
    _warn_of([name for name, of_route in found.items() if of_route.looks_fused])
    return found


def _shape(stored: tuple[tuple[int, ...], bool] | None, param: Tensor) -> Sequence[int]:
    return full_shape(param) if stored is None else stored[0]


def _warn_of(names: Sequence[str]) -> None:
    """Warn of the matrices that look fused and stay whole, if there are any."""
    if not names:
        return
    count = "1 weight looks" if len(names) == 1 else f"{len(names)} weights look"
    warn(
        f"{count} fused, and the matrix rule trains each as one matrix: {named(names)}. Set "
        f"the option atoms, e.g. {{{named(names[:1])}: {{'split_sizes': [...]}}}} with the outputs of each matrix, or "
        f"{{{named(names[:1])}: 'whole'}} if each is one"
    )


def _is_divided(route: Route) -> bool:
    of_shards = route.cut is not None and route.cut.dim == 0 and len(route.shape) == 2
    return route.kind == "matrix" or of_shards


def _check_heads(
    by_head: Mapping[str, object], settings: AtomSettings, routes: Sequence[Route], elsewhere: Sequence[Route]
) -> None:
    """Raises ValueError if no parameter in ``by_head`` has heads, from its module, a setting or another part."""
    wanted = [route for route in routes if route.name in by_head]
    set_so = any(setting is not None and setting[1] != "whole" for setting in (settings.of(r.names) for r in wanted))
    if wanted and not (any(by_head.values()) or set_so or any(named_as_heads(route.name) for route in elsewhere)):
        raise none_found(by_head)


def divide_by_name(
    routes: Sequence[Route], settings: AtomSettings, per_head: Collection[str] = ()
) -> dict[str, Divided]:
    """``divide`` by settings and shapes alone: without modules, fused weights and heads are unknown."""
    _check_globs(settings, routes)
    wanted = [route for route in routes if route.name in per_head]
    for route in wanted:
        if named_as_heads(route.name) and settings.of(route.names) is None:
            raise unknown(route.name, f"its shape {route.shape} alone does not show them")
    _check_heads(dict.fromkeys(route.name for route in wanted), settings, wanted, ())
    return {route.name: _divided(route, settings, None) for route in routes if route.kind == "matrix"}


def _divided(
    route: Route, settings: AtomSettings, fused: Fusion | None, heads: AttentionHeads | None = None
) -> Divided:
    setting = settings.of(route.names)
    shape = route.shape if setting is not None and setting[1] in ("stack", "flatten") else route.joined
    if setting is not None:
        if setting[1] == "flatten" and route.grid is not None:
            blocks = _of_grid(route, route.grid, None).blocks
        else:
            blocks = blocks_of(route, shape, *setting)
        in_turn = isinstance(setting[1], Division) and setting[1].groups == 1
        return Divided(blocks, f"{_described(blocks)}, set by {setting[0]}", parts=_parts(route, blocks, in_turn))
    if route.grid is not None:
        return _of_grid(route, route.grid, fused)
    if fused is None and heads is None and not route.side_by_side:
        return _plain(shape)
    grid = Grid.of(shape, len(shape) - 2)
    parts: tuple[int, ...] = ()
    if fused is not None and (fused.outputs or fused.inputs):
        in_turn = all(run.count == 1 for _, run in fused.outputs)
        if route.cut is not None and route.cut.shared and route.cut.dim == 0:  # the parts are those of a shard
            size = shape[0] // route.cut.ranks
            fused = replace(fused, outputs=repeated(fused.outputs, size, route.cut.ranks))
        outputs = grid.columns if route.transposed else grid.rows
        blocks = divided(grid, fused.outputs or undivided(outputs), fused.inputs, transposed=route.transposed)
        parts = _parts(route, blocks, in_turn)
        if heads is None:
            return Divided(blocks, f"{_described(blocks)}, {fused.why}", parts=parts, truth=fused.truth)
    if heads is not None:
        outputs, of_fused = shape[-1] if route.transposed else shape[-2], () if fused is None else fused.outputs
        of_heads, reason = heads.divide(of_fused, outputs, route.name)
        return Divided(divided(grid, of_heads, transposed=route.transposed), reason, parts=parts)
    if route.side_by_side:
        blocks = divided(grid, grouped(("gate", "up"), [shape[-1] // 2] * 2), transposed=True)
        return Divided(blocks, f"{_described(blocks)}, side by side")
    assert fused is not None
    return Divided(matrices_of(shape), fused.why, looks_fused=fused.unknown, truth=fused.truth)


def _of_grid(route: Route, grid: Grid, fused: Fusion | None) -> Divided:
    """A kernel of several dimensions as one matrix, or as those that its outputs are; a convolution's by group."""
    outputs, inputs = (grid.columns, grid.rows) if route.transposed else (grid.rows, grid.columns)
    if route.groups > 1:
        groups = equal(route.groups, grid.rows // route.groups, "group")
        of = (undivided(outputs), groups) if route.transposed else (groups, undivided(inputs))
        return Divided(divided(grid, *of, transposed=route.transposed), is_plain=True)
    if fused is not None and fused.outputs:
        blocks = divided(grid, fused.outputs, transposed=route.transposed)
        return Divided(blocks, f"{_described(blocks)}, {fused.why}", truth=fused.truth)
    blocks = divided(grid, undivided(outputs), transposed=route.transposed)
    if fused is None:
        return Divided(blocks, is_plain=True)
    return Divided(blocks, fused.why, looks_fused=fused.unknown, truth=fused.truth)


@cache
def _plain(shape: tuple[int, ...]) -> Divided:
    blocks = matrices_of(shape)
    return Divided(blocks, _described(blocks) if len(shape) > 2 else "", is_plain=True)


def _parts(route: Route, blocks: Sequence[Block], in_turn: bool) -> tuple[int, ...]:
    """The rows that every tensor-parallel rank has of each matrix, if these come ``in_turn`` and not in groups."""
    if route.cut is None or len(blocks) < 2 or not in_turn or {b.rows.count for b in blocks} != {route.cut.ranks}:
        return ()
    return tuple(block.rows.length for block in blocks)


def _check_cut(route: Route, blocks: Sequence[Block]) -> None:
    """Raises ValueError for matrices that tensor parallelism cuts in a way that has no plan."""
    if route.cut is not None and (len(route.shape) > 2 or (route.cut.dim == 1 and len(blocks) > 1)):
        raise ValueError(
            f"parameter {route.name!r} of shape {route.shape} ({route.reason}) has {route.cut}; expected one matrix "
            f"or the rows of several, found {_described(blocks)}: leave it to the element-wise rule with 'exclude'"
        )


def _described(blocks: Sequence[Block]) -> str:
    """E.g. ``"q, k, v"``, ``"head0, head1, ... head11"``, ``"8 slices of gate, up"``."""
    slices = blocks[0].grid.slices
    names = [block.name.removeprefix("[0]").removeprefix(".") for block in blocks if block.slice == 0]
    shown = names if len(names) <= SHOWN else [*names[: SHOWN - 2], f"... {names[-1]}"]
    parts = ", ".join(shown)
    if slices == 1:
        return parts or "one matrix"
    return f"{slices} slices of {parts}" if parts else f"{slices} slices"


def _check_globs(settings: AtomSettings, routes: Sequence[Route]) -> None:
    def why_not(route: Route) -> str:
        such = f"{route.name!r} ({route.kind}: {route.reason})"
        return f"no matrix rule updates, such as {such}; leave it out, or include the parameter"

    matrices = [route for route in routes if _is_divided(route)]
    check_globs("atoms", [glob for glob, _ in settings.by_glob], matrices, routes, why_not)
