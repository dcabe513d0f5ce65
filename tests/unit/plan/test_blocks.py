"""Blocks of a parameter: exactly its elements, in every storage and in the memory of every rank, in order."""

import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor

from lwopt_backend.plan import FlatPartition, Fragment, MeshLayout, ParameterPartition, Replicas, Sharding
from lwopt_backend.plan.atoms import Block, Grid, Parts, Stripes, divided, grouped, undivided
from lwopt_backend.plan.layouts import in_blocks
from lwopt_backend.runtime.pieces import Pieces, Regions, Slices, box_regions, flat_regions

QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")
SEEDS = range(20)


def indices(stripes: Stripes) -> list[int]:
    return [index for start, stop in stripes.runs() for index in range(start, stop)]


def matrix_of(block: Block, param: Tensor) -> Tensor:
    slices = param.reshape(block.grid.slices, block.grid.rows, block.grid.columns)
    return slices[block.slice][indices(block.rows)][:, indices(block.columns)]


def numbered(shape: Sequence[int]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def some_parts(size: int, draw: Random) -> Parts:
    """A division of ``size`` outputs, of any form."""
    groups = draw.choice([n for n in range(1, size + 1) if size % n == 0])
    in_group = size // groups
    cuts = sorted(draw.sample(range(1, in_group), min(in_group - 1, draw.randint(0, 3))))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, in_group])]
    return grouped([f"part{number}" for number in range(len(sizes))], sizes, groups)


def some_param(draw: Random) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """A parameter's shape and a division of it: a matrix, a stack of one or two dimensions, a flattened convolution,
    gate and up side by side, as (outputs, 2, inputs) in each slice of a stack, or kernels by head."""
    lead = draw.choice([0, 0, 0, 1, 1, 2])
    shape = tuple(draw.randint(1, 3) for _ in range(lead)) + (draw.randint(1, 12), draw.randint(1, 12))
    if draw.random() < 0.1:
        grid = Grid.of((*shape[:-1], 2 * shape[-1]), lead)
        return (*shape[:-1], 2, shape[-1]), divided(grid, grouped(GATE_UP, [shape[-1]] * 2), transposed=True)
    if lead == 0 and draw.random() < 0.2:
        shape += (draw.randint(1, 3),)
        return shape, divided(Grid.of(shape, 0), some_parts(shape[0], draw))
    transposed = draw.random() < 0.5
    if draw.random() < 0.1:  # a kernel by head, or a stack of these
        shape = (*shape[:-1], draw.randint(1, 3), shape[-1])
        grid = Grid(*map(math.prod, (shape[:lead], shape[lead:-1], shape[-1:])))
        return shape, divided(grid, undivided(grid.columns if transposed else grid.rows), transposed=transposed)
    parts = some_parts(shape[-1 if transposed else -2], draw)
    return shape, divided(Grid.of(shape, lead), parts, transposed=transposed)


def test_stripes_are_runs_with_gaps_between_them() -> None:
    stripes = Stripes(2, 3, 3, 7)
    assert [stripes.before(i) for i in range(40)] == [sum(j < i for j in indices(stripes)) for i in range(40)]
    for wrong in [(-1, 2), (0, 0), (0, 2, 0), (0, 2, 2, 2), (0, 3, 2, 1)]:
        with pytest.raises(ValueError, match="expected runs of one index or more with a gap between them"):
            Stripes(*wrong)
    assert grouped(("all",), (2,), 3) == [("all", Stripes(0, 6))], "what has no gaps is one run"


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_have_every_element_once_in_order(seed: int) -> None:
    """Blocks have every element of a parameter once and in its order."""
    draw = Random(seed)
    for shape, blocks in (some_param(draw) for _ in range(4)):
        param = numbered(shape)
        seen = torch.cat([matrix_of(block, param).flatten() for block in blocks])
        assert torch.equal(seen.sort().values, param.flatten())
        layout = in_blocks(Replicas(3, (param.numel(),)), [blocks])
        for index, block in enumerate(blocks):
            matrix = matrix_of(block, param)
            places = matrix.flatten().tolist()
            assert places == sorted(places) == [block.flat(place) for place in range(block.numel)]
            for i in range(param.numel() + 1):
                assert block.before(i) == sum(place < i for place in places)
            (view,) = cut(flat_regions([layout.views(index, 1)], param.numel()), param.flatten())[0].values
            assert torch.equal(view.reshape(block.shape), matrix)
            assert [part.numel for part in layout.fragments(index)] == [block.numel] * 3
            assert layout.sources(index, 2) == (layout.fragment(index, 2),)
            assert layout.is_source(index, 2, 2) and not layout.is_source(index, 1, 2)


def cut(regions: Regions, tensor: Tensor) -> list[Pieces]:
    return regions.cut(Slices(tensor, tensor, {}))


def flat_of(storage: FlatPartition | ParameterPartition, params: Sequence[Tensor], rank: int) -> Tensor:
    """The flat tensor of ``rank``, -1 in padding; its elements are two apart, from an offset of a larger tensor."""
    larger = torch.full((2 * storage.partition_numel + 3,), -1, dtype=params[0].dtype)
    for index, param in enumerate(params):
        if (part := storage.fragment(index, rank)) is not None:
            larger[3::2][part.offset : part.offset + part.numel] = param.flatten()[part.start : part.stop]
    return larger[3::2]


@pytest.mark.parametrize("seed", SEEDS)
def test_views_of_blocks_in_flat_partitions(seed: int) -> None:
    """Flat partitions have ranges of blocks, and views give their elements."""
    draw = Random(seed)
    for _ in range(4):
        shapes, divisions = zip(*(some_param(draw) for _ in range(draw.randint(1, 4))))
        params, ranks = [numbered(shape) for shape in shapes], draw.randint(1, 5)
        numels = [param.numel() for param in params]
        pads = {"alignment": draw.choice([1, 2, 7]), "param_alignment": draw.choice([1, 1, 4])}
        for storage in (FlatPartition.build(numels, ranks, **pads), ParameterPartition.build(numels, ranks)):
            layout = in_blocks(storage, divisions)
            locals_ = [flat_of(storage, params, rank) for rank in range(ranks)]
            views_of = [[layout.views(i, rank) for i in range(len(layout.blocks))] for rank in range(ranks)]
            cuts = [flat_regions(views, storage.partition_numel) for views in views_of]
            found = [(cut(regions, flat), cut(regions, flat.clone())) for regions, flat in zip(cuts, locals_)]
            for index, (param, block) in enumerate(zip(layout.params, layout.blocks)):
                expected, end = matrix_of(block, params[param]).flatten(), 0
                fragments = layout.fragments(index)
                assert [part.rank for part in fragments] == sorted({part.rank for part in fragments})
                assert layout.sources(index, 0) == fragments and layout.is_source(index, 0, 0)
                is_run = block.flat(block.numel - 1) - block.flat(0) == block.numel - 1
                for part in fragments:
                    assert part.start == end and part == layout.fragment(index, part.rank)
                    assert locals_[part.rank][part.offset] == expected[part.start]
                    views = layout.views(index, part.rank)
                    assert len(views) <= 7 and (len(views) == 1 or not is_run)
                    for of_rank in found[part.rank]:
                        elements = torch.cat([view.flatten() for view in of_rank[index].values])
                        assert torch.equal(elements, expected[part.start : part.stop])
                    end = part.stop
                assert end == block.numel
                for rank in set(range(ranks)) - {part.rank for part in fragments}:
                    assert layout.fragment(index, rank) is None and not layout.views(index, rank)


def cuts_runs(sharding: Sharding) -> bool:
    try:
        sharding.check("p")
    except ValueError:
        return True
    return False


def backwards(local: Tensor) -> Tensor:
    """The same tensor with its dimensions in memory in the opposite order, from some offset of a larger storage."""
    turned = local.permute(*reversed(range(local.ndim))).contiguous()
    larger = torch.cat([torch.full((5,), -1), turned.flatten()])
    return larger[5:].view(turned.shape).permute(*reversed(range(local.ndim)))


@pytest.mark.parametrize("seed", SEEDS)
def test_views_of_blocks_on_meshes(seed: int) -> None:
    """Meshes have rectangles of blocks, and views give their elements. A refusal happens only for stored-transposed
    blocks in runs longer than one, over a mesh that cuts columns."""
    draw = Random(seed)
    for shape, blocks in (some_param(draw) for _ in range(15)):
        (lead, rows), side_by_side = blocks[0].grid.in_rows(shape), blocks[0].name.endswith("gate")
        mesh = tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 3)))
        # A mesh cuts only the first of flattened dimensions.
        firsts = [*range(lead + 1), *([] if side_by_side else [lead + rows])]
        dims = tuple(draw.choice([None, *firsts]) for _ in mesh)
        late = tuple(dim is not None and draw.random() < 0.3 for dim in dims)
        param, coordinates = numbered(shape), tuple(itertools.product(*map(range, mesh)))
        for block in blocks:
            sharding = Sharding(shape, mesh, dims, late, block)
            expected, refused = matrix_of(block, param).flatten(), cuts_runs(sharding)
            flattened = len(shape) - lead > 2 and not side_by_side
            in_runs = block.columns.count > 1 and block.columns.length > 1
            assert not refused or flattened or (in_runs and len(shape) - 1 in dims)
            layout, seen = MeshLayout(coordinates, (sharding,)), []
            for rank, coordinate in enumerate(coordinates):
                local = param[tuple(slice(begin, begin + size) for begin, size in sharding.box(coordinate))]
                fragment = sharding.fragment(rank, coordinate)
                mine = torch.isin(expected, local.flatten())
                if fragment is None:
                    assert not mine.any()
                    continue
                size = (fragment.runs, fragment.stop - fragment.start)
                held = expected[
                    torch.arange(block.numel).as_strided(size, (fragment.pitch, 1), fragment.start)
                ].flatten()
                assert torch.equal(held, expected[mine]), "the rectangle is what the rank holds of the block, in order"
                if all(a == 0 for a, dim in zip(coordinate, dims) if dim is None):
                    seen.append(held)
                # Rows of several dimensions have to be evenly apart
                ways = (local.contiguous(), *(() if rows > 1 else (local, backwards(local))))
                for stored_as in () if refused else ways:
                    regions = box_regions([block], shape, sharding.box(coordinate))
                    (pieces,) = regions.cut(Slices(local.contiguous(), stored_as, {"state": local.contiguous()}))
                    views = [pieces.values, pieces.grads, [state["state"] for state in pieces.states]]
                    assert all(torch.equal(torch.cat([view.flatten() for view in of]), held) for of in views)
                    assert len(pieces.values) <= 3 and len({str([view.shape for view in of]) for of in views}) == 1
            assert torch.equal(torch.cat(seen).sort().values, expected), "together the ranks hold it once"
            owner = draw.randrange(len(coordinates))
            assert sum(part.numel for part in layout.sources(0, owner)) == block.numel


def test_parts_that_leave_an_element_out_or_double_it_are_named() -> None:
    halves = grouped(("a", "b"), (1, 3))
    blocks = divided(Grid(2, 4, 4), grouped(GATE_UP, (1, 1), 2), halves)
    assert [block.name for block in blocks[:4]] == ["[0].a.gate", "[0].a.up", "[0].b.gate", "[0].b.up"]
    for outputs, found in [
        ([Stripes(0, 3), Stripes(2, 2)], "the next from 3 on, found 'b' from 2 on"),
        ([Stripes(0, 1, 2, 2), Stripes(3, 1)], "the next from 1 on, found 'a' from 2 on"),
        ([Stripes(0, 3)], "the next from 3 on, found 'the end' from 4 on"),
        ([Stripes(0, 2), Stripes(2, 3)], "the next from 5 on, found 'the end' from 4 on"),
        ([Stripes(1, 3)], "the next from 0 on, found 'a' from 1 on"),
        ([], "the next from 0 on"),
    ]:
        for transposed in (False, True):
            with pytest.raises(ValueError, match=f"expected parts of 4 in all, {found}"):
                divided(Grid(2, 4, 4), list(zip("ab", outputs)), transposed=transposed)
    with pytest.raises(ValueError, match="expected parts of 3 in all"):
        divided(Grid(1, 4, 3), undivided(4), halves)
    with pytest.raises(ValueError, match=r"parameter 1 has 10 elements, but block 'q' is of 1 x 4 x 3"):
        in_blocks(FlatPartition.build([12, 10], 2), [divided(Grid(1, 4, 3), grouped("qk", (2, 2)))] * 2)


def test_blocks_that_lie_alike_are_of_one_kind() -> None:
    """A block of everything is of none."""
    qkv = divided(Grid(1, 12, 5), grouped(QKV, (2, 1, 1), 3))
    layout = in_blocks(ParameterPartition.build([60, 60, 60], 4), [qkv, qkv, divided(Grid(1, 12, 5), undivided(12))])
    kinds, places = ([of(index) for index in range(7)] for of in (layout.kind, layout.place))
    assert kinds[:3] == kinds[3:6] and len(set(kinds)) == 4
    assert len(set(places)) == 7 and places[6] == layout.storage.place(2)
    stack = divided(Grid(4, 6, 3), grouped(GATE_UP, (3, 3)))
    mesh = MeshLayout(((0,), (1,)), tuple(Sharding((4, 6, 3), (2,), (0,), (False,), block) for block in stack))
    assert mesh.kind(0) != mesh.kind(1) and "slice 3 rows 3:6" in mesh.place(7)
    (whole,) = divided(Grid(1, 6, 4), undivided(6))
    plain, blocked = Sharding((6, 4), (2,), (0,), (False,)), Sharding((6, 4), (2,), (0,), (False,), whole)
    assert blocked.fragment(1, (1,)) == plain.fragment(1, (1,)) == Fragment(1, 12, 24, 0)
    assert str(plain) == "6x4 over 2 of dim 0" and str(blocked).startswith("6x4 over 2 of dim 0, slice 0 rows 0:6")


def test_sharding_with_a_view_for_every_row_is_refused() -> None:
    """The refusal says what to do."""
    q18, q24 = (divided(Grid(1, 8, 6 * n), grouped(QKV, (4, 1, 1), n), transposed=True)[0] for n in (3, 4))
    (kernel,) = divided(Grid.of((4, 3, 2, 2), 0), undivided(4))
    left = Block("left", Grid(1, 4, 12), 0, Stripes(0, 4), Stripes(0, 6))
    striped = Block("striped", Grid(1, 4, 12), 0, Stripes(0, 4), Stripes(0, 2, 2, 6))
    for dim, parts, block, shape in [(0, 2, q18, (8, 18)), (1, 3, q18, (8, 18)), (1, 6, q18, (8, 18))]:
        Sharding(shape, (parts,), (dim,), (False,), block).check("a.qkv")
    Sharding((4, 3, 2, 2), (2,), (1,), (False,), kernel).check("a")
    for dim, parts, block, shape, message in [
        (1, 2, q18, (8, 18), "'a', block 'q': sharded as 8x18 over 2 of dim 1, .* cuts runs of columns"),
        (1, 5, q24, (8, 24), r"the part \(\(0, 8\), \(15, 5\)\) cuts runs of columns apart"),
        (2, 2, kernel, (4, 3, 2, 2), "parameter 'a', block '': .* cuts a dimension flattened into columns"),
        (0, 2, left, (4, 3, 2, 2), r"the part \(\(0, 2\), \(0, 3\), .* cuts runs of columns apart"),
        (0, 2, striped, (4, 3, 2, 2), "columns .* of flattened dimensions cannot be a separate block"),
    ]:
        with pytest.raises(ValueError, match=message):
            Sharding(shape, (parts,), (dim,), (False,), block).check("a")
