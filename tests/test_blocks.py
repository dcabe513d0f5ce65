"""Blocks of a parameter: exactly its elements, in every storage, and in the memory of every rank, in order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lwopt_backend.plan import FlatPartition, Fragment, MeshLayout, ParameterPartition, Replicas, Sharding
from lwopt_backend.plan.block_cover import check_cover
from lwopt_backend.plan.block_storage import BlockPartition, BlockReplicas, in_blocks
from lwopt_backend.plan.blocks import Block, Grid, Parts, Stripes, divided, equal, grouped, undivided
from lwopt_backend.runtime.views import flat_views, local_views


def indices(stripes: Stripes) -> list[int]:
    return [index for start, stop in stripes.runs() for index in range(start, stop)]


def matrix_of(block: Block, param: Tensor) -> Tensor:
    """The block's elements of a parameter, the plain way."""
    slices = param.reshape(block.grid.slices, block.grid.rows, block.grid.columns)
    return slices[block.slice][indices(block.rows)][:, indices(block.columns)]


def some_parts(size: int, rng: random.Random) -> Parts:
    """A division of ``size`` outputs, of any of the forms that there are."""
    groups = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    in_group = size // groups
    cuts = sorted(rng.sample(range(1, in_group), min(in_group - 1, rng.randint(0, 3))))
    sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, in_group])]
    return grouped([f"part{number}" for number in range(len(sizes))], sizes, groups)


def some_param(rng: random.Random) -> tuple[tuple[int, ...], tuple[Block, ...]]:
    """A parameter's shape and a division of it: a matrix, a stack of one or two dimensions, a flattened convolution."""
    lead = rng.choice([0, 0, 0, 1, 1, 2])
    shape = tuple(rng.randint(1, 3) for _ in range(lead)) + (rng.randint(1, 12), rng.randint(1, 12))
    if lead == 0 and rng.random() < 0.2:
        shape += (rng.randint(1, 3),)
        return shape, divided(Grid.of(shape, 0), some_parts(shape[0], rng))
    transposed = rng.random() < 0.5
    parts = some_parts(shape[-1 if transposed else -2], rng)
    return shape, divided(Grid.of(shape, lead), parts, transposed=transposed)


def cases(count: int) -> list[random.Random]:
    return [random.Random(seed) for seed in range(count)]


def test_stripes_count_as_a_list_of_their_indices_does() -> None:
    for stripes in [Stripes(0, 5), Stripes(3, 1, 4, 2), Stripes(2, 3, 3, 7), Stripes(5, 2, 1, 0)]:
        listed = indices(stripes)
        assert (stripes.size, stripes.stop) == (len(listed), listed[-1] + 1)
        assert [stripes.at(place) for place in range(stripes.size)] == listed
        assert [stripes.before(i) for i in range(40)] == [sum(j < i for j in listed) for i in range(40)]


@pytest.mark.parametrize("wrong", [(-1, 2), (0, 0), (0, 2, 0), (0, 2, 2, 2), (0, 3, 2, 1)])
def test_stripes_without_an_index_or_without_a_gap_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected runs of one index or more with a gap between them"):
        Stripes(*wrong)


def test_named_schemes_pick_the_rows_that_they_are_named_for() -> None:
    def picked(parts: Parts) -> dict[str, list[int]]:
        return {name: indices(stripes) for name, stripes in parts}

    qkv = ("q", "k", "v")
    assert picked(grouped(qkv, (4, 2, 2))) == {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}
    interleaved = {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}
    assert picked(grouped(qkv, (2, 1, 1), 2)) == interleaved
    assert picked(grouped(("gate", "up"), (1, 1), 3)) == {"gate": [0, 2, 4], "up": [1, 3, 5]}
    assert picked(equal(2, 3, "head")) == {"head0": [0, 1, 2], "head1": [3, 4, 5]}
    assert picked(undivided(3)) == {"": [0, 1, 2]}
    assert grouped(("all",), (2,), 3) == [("all", Stripes(0, 6))], "what has no gaps is one run"


def test_blocks_of_slices_are_named_by_slice_and_part() -> None:
    stack = divided(Grid(2, 4, 3), grouped(("gate", "up"), (2, 2)))
    assert [block.of("w") for block in stack] == ["w[0].gate", "w[0].up", "w[1].gate", "w[1].up"]
    assert [block.of("w") for block in divided(Grid(1, 4, 3), equal(2, 2, "head"))] == ["w.head0", "w.head1"]
    assert [block.of("w") for block in divided(Grid(2, 4, 3), undivided(4))] == ["w[0]", "w[1]"]
    (whole,) = divided(Grid(1, 4, 3), undivided(4))
    assert whole.of("w") == "w" and whole.is_everything


@pytest.mark.parametrize("rng", cases(60), ids=lambda rng: "")
def test_blocks_cover_a_parameter_and_keep_its_order(rng: random.Random) -> None:
    shape, blocks = some_param(rng)
    check_cover("p", blocks)
    param = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.cat([matrix_of(block, param).flatten() for block in blocks])
    assert torch.equal(seen.sort().values, param.flatten())
    for block in blocks:
        places = matrix_of(block, param).flatten().tolist()
        assert places == sorted(places)
        assert [block.flat(place) for place in range(block.numel)] == places
        assert [block.before(i) for i in range(param.numel() + 1)] == [
            sum(place < i for place in places) for i in range(param.numel() + 1)
        ]


def test_what_is_left_over_or_doubled_is_named() -> None:
    grid = Grid(2, 6, 4)
    whole = Stripes(0, 4)

    def blocks(*rows: Stripes, columns: Stripes = whole) -> list[Block]:
        return [Block(f"b{n}", grid, number, r, columns) for number in range(2) for n, r in enumerate(rows)]

    with pytest.raises(ValueError, match=r"parameter 'w' of 2 x 6 x 4, slice 0: rows 2:3, .* are in 'b0' and in 'b1'"):
        check_cover("w", blocks(Stripes(0, 3), Stripes(2, 4)))
    with pytest.raises(ValueError, match=r"8 of 24 elements belong to no block, the first rows 1:2, columns 0:4"):
        check_cover("w", blocks(Stripes(0, 1, 2, 2), Stripes(4, 2)))
    with pytest.raises(ValueError, match=r"6 of 24 elements belong to no block, the first rows 0:6, columns 3:4"):
        check_cover("w", blocks(Stripes(0, 6), columns=Stripes(0, 3)))
    with pytest.raises(ValueError, match=r"slice 1: belongs to no block"):
        check_cover("w", blocks(Stripes(0, 6))[:1])
    with pytest.raises(ValueError, match=r"block 'b0' reaches beyond it: slice 0 rows 1:7"):
        check_cover("w", blocks(Stripes(1, 6)))
    with pytest.raises(ValueError, match=r"block 'b0' reaches beyond it: slice 2"):
        check_cover("w", [Block("b0", grid, 2, Stripes(0, 6), whole)])
    with pytest.raises(ValueError, match=r"parameter 'w' of 2 x 6 x 4: block '\[0\]' is of 3 x 4 x 4"):
        check_cover("w", [*blocks(Stripes(0, 6)), *divided(Grid(3, 4, 4), undivided(4))])
    with pytest.raises(ValueError, match=r"parameter 'w': expected at least one block"):
        check_cover("w", [])
    quarters = [
        Block(f"{r}{c}", Grid(1, 6, 4), 0, Stripes(*r), Stripes(*c)) for r in [(0, 2), (2, 4)] for c in [(0, 1), (1, 3)]
    ]
    check_cover("w", quarters)
    with pytest.raises(ValueError, match="6 of 24 elements belong to no block, the first rows 2:6, columns 1:4|12 of"):
        check_cover("w", quarters[:3])


def flat_storages(shapes: Sequence[Sequence[int]], rng: random.Random) -> list[FlatPartition | ParameterPartition]:
    numels, ranks = [torch.Size(shape).numel() for shape in shapes], rng.randint(1, 5)
    flat = FlatPartition.build(numels, ranks, alignment=rng.choice([1, 2, 7]), param_alignment=rng.choice([1, 1, 4]))
    return [flat, ParameterPartition.build(numels, ranks)]


def stored(storage: FlatPartition | ParameterPartition, params: Sequence[Tensor], rank: int) -> Tensor:
    """The flat tensor of ``rank``: each element's number in its parameter, -1 in padding."""
    local = torch.full((storage.partition_numel,), -1)
    for index, param in enumerate(params):
        part = storage.fragment(index, rank)
        if part is not None:
            local[part.offset : part.offset + part.numel] = param.flatten()[part.start : part.stop]
    return local


@pytest.mark.parametrize("rng", cases(80), ids=lambda rng: "")
def test_ranges_of_parameters_are_ranges_of_blocks_and_views_give_their_elements(rng: random.Random) -> None:
    shapes, divisions = zip(*(some_param(rng) for _ in range(rng.randint(1, 4))))
    params = [torch.arange(torch.Size(shape).numel()).view(shape) for shape in shapes]
    for storage in flat_storages(shapes, rng):
        layout = in_blocks(storage, divisions)
        assert isinstance(layout, BlockPartition)
        locals_ = [stored(storage, params, rank) for rank in range(storage.world_size)]
        for index, (param, block) in enumerate(zip(layout.params, layout.blocks)):
            expected = matrix_of(block, params[param]).flatten()
            fragments = layout.fragments(index)
            assert [part.rank for part in fragments] == sorted({part.rank for part in fragments})
            assert sum(part.numel for part in fragments) == block.numel
            assert layout.sources(index, 0) == fragments and layout.is_source(index, 0, 0)
            end = 0
            for part in fragments:
                assert part.start == end and part == layout.fragment(index, part.rank)
                end = part.stop
                assert locals_[part.rank][part.offset] == expected[part.start]
                views = layout.views(index, part.rank)
                assert len(views) <= 7 and (len(views) == 1 or not contiguous(block))
                found = torch.cat([view.flatten() for view in flat_views(locals_[part.rank], views)])
                assert torch.equal(found, expected[part.start : part.stop])
            others = set(range(storage.world_size)) - {part.rank for part in fragments}
            assert all(layout.fragment(index, rank) is None and not layout.views(index, rank) for rank in others)
        assert layout.stored_numel(0) == storage.stored_numel(0)


def contiguous(block: Block) -> bool:
    return block.flat(block.numel - 1) - block.flat(0) == block.numel - 1


@pytest.mark.parametrize("rng", cases(10), ids=lambda rng: "")
def test_a_block_that_is_whole_on_a_rank_is_one_view(rng: random.Random) -> None:
    shape, blocks = some_param(rng)
    param = torch.arange(torch.Size(shape).numel())
    layout = in_blocks(Replicas(3, (param.numel(),)), [blocks])
    assert isinstance(layout, BlockReplicas)
    for index, block in enumerate(blocks):
        (view,) = flat_views(param, layout.views(index, 1))
        assert torch.equal(view.reshape(block.shape), matrix_of(block, param.view(shape)))
        assert [part.numel for part in layout.fragments(index)] == [block.numel] * 3
        assert layout.sources(index, 2) == (layout.fragment(index, 2),)
        assert layout.is_source(index, 2, 2) and not layout.is_source(index, 1, 2)


def test_slices_lie_as_the_equal_parts_of_a_stack_do() -> None:
    """Slices of a stack lie in a flat partition as parameters do that come one after the other."""
    stack, matrix = divided(Grid(3, 4, 5), undivided(4)), divided(Grid(1, 6, 2), undivided(6))
    for ranks in (1, 2, 3, 5):
        ours = in_blocks(FlatPartition.build([60, 12], ranks), [stack, matrix])
        theirs = FlatPartition.build([20, 20, 20, 12], ranks)
        assert [ours.fragments(i) for i in range(4)] == [theirs.fragments(i) for i in range(4)]


def test_views_share_memory_and_respect_a_stride_and_an_offset() -> None:
    base = torch.zeros(2, 30)
    flat = base.T.flatten().as_strided((24,), (2,), 3)
    layout = in_blocks(
        FlatPartition.build([24], 1), [divided(Grid(1, 4, 6), grouped(("g", "u"), (1, 1), 3), transposed=True)]
    )
    for value, index in enumerate(range(2), start=1):
        for view in flat_views(flat, layout.views(index, 0)):
            view.fill_(value)
    assert flat.view(4, 6).tolist() == [[1.0, 2.0] * 3] * 4


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 1 has 10 elements, but block 'q' is of 1 x 4 x 3"):
        in_blocks(FlatPartition.build([12, 10], 2), [divided(Grid(1, 4, 3), grouped("qk", (2, 2)))] * 2)


def test_blocks_that_lie_alike_are_of_one_kind() -> None:
    qkv = divided(Grid(1, 12, 5), grouped(("q", "k", "v"), (2, 1, 1), 3))
    layout = in_blocks(ParameterPartition.build([60, 60, 60], 4), [qkv, qkv, divided(Grid(1, 12, 5), undivided(12))])
    kinds = [layout.kind(index) for index in range(7)]
    assert kinds[:3] == kinds[3:6] and len(set(kinds)) == 4
    places = [layout.place(index) for index in range(7)]
    assert len(set(places)) == 7 and places[6] == layout.storage.place(2)


def test_many_blocks_are_found_in_time_linear_in_blocks_and_fragments() -> None:
    """256 experts of gate and up over 1,024 ranks: the work, counted in calls, grows with what there is to find."""
    experts, ranks = 256, 1024
    blocks = divided(Grid(experts, 64, 32), grouped(("gate", "up"), (32, 32)))
    calls = 0

    class Counted(ParameterPartition):
        def fragment(self, index: int, rank: int) -> Fragment | None:
            nonlocal calls
            calls += 1
            return super().fragment(index, rank)

    storage = Counted.build([experts * 64 * 32], ranks)
    layout = in_blocks(storage, [blocks])
    found = sum(len(layout.fragments(index)) for index in range(len(blocks)))
    assert found == calls == ranks, "every rank holds one half of one expert's gate or up"


# DTensors


def some_mesh(ndim: int, rng: random.Random) -> tuple[tuple[int, ...], tuple[int | None, ...], tuple[bool, ...]]:
    mesh = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))
    dims = tuple(rng.choice([None, *range(ndim)]) for _ in mesh)
    late = tuple(dim is not None and rng.random() < 0.3 for dim in dims)
    return mesh, dims, late


def cuts_runs(sharding: Sharding) -> bool:
    try:
        sharding.check("p")
    except ValueError:
        return True
    return False


def rectangle_of(fragment: Fragment, numel: int) -> Tensor:
    length = fragment.stop - fragment.start
    return torch.arange(numel).as_strided((fragment.runs, length), (fragment.pitch, 1), fragment.start).flatten()


@pytest.mark.parametrize("rng", cases(300), ids=lambda rng: "")
def test_boxes_of_parameters_are_rectangles_of_blocks_and_views_give_their_elements(rng: random.Random) -> None:
    shape, blocks = some_param(rng)
    ndim = len(shape) if Grid.of(shape, len(shape) - 2) == blocks[0].grid else 2  # of flattened columns only the first
    mesh, dims, late = some_mesh(ndim, rng)
    param = torch.arange(torch.Size(shape).numel()).view(shape)
    for block in blocks:
        sharding = Sharding(shape, mesh, dims, late, block)
        expected, refused = matrix_of(block, param).flatten(), cuts_runs(sharding)
        coordinates = tuple(itertools.product(*map(range, mesh)))
        layout, seen = MeshLayout(coordinates, (sharding,)), []
        for rank, coordinate in enumerate(coordinates):
            box = sharding.box(coordinate)
            local = param[tuple(slice(begin, begin + size) for begin, size in box)]
            fragment = sharding.fragment(rank, coordinate)
            if fragment is None:
                assert not set(local.flatten().tolist()) & set(expected.tolist())
                continue
            held = expected[rectangle_of(fragment, block.numel)]
            mine = torch.isin(expected, local.flatten())
            assert torch.equal(held, expected[mine]), "the rectangle is what the rank holds of the block, in order"
            if all(a == 0 for a, dim in zip(coordinate, dims) if dim is None):
                seen.append(held)
            if refused:
                continue
            for stored_as in (local, local.contiguous(), backwards(local)):
                views = local_views(stored_as, block, shape, box)
                assert torch.equal(torch.cat([view.flatten() for view in views]), held)
                assert [v.shape for v in views] == [v.shape for v in local_views(local, block, shape, box)]
                assert len(views) <= 3
        assert torch.equal(torch.cat(seen).sort().values, expected), "together the ranks hold it once"
        owner = rng.randrange(len(coordinates))
        assert sum(part.numel for part in layout.sources(0, owner)) == block.numel


def backwards(local: Tensor) -> Tensor:
    """The same tensor with its dimensions in memory in the opposite order, from some offset of a larger storage."""
    turned = local.permute(*reversed(range(local.ndim))).contiguous()
    larger = torch.cat([torch.full((5,), -1), turned.flatten()])
    return larger[5:].view(turned.shape).permute(*reversed(range(local.ndim)))


@pytest.mark.parametrize("rng", cases(200), ids=lambda rng: "")
def test_only_columns_in_runs_that_are_cut_apart_are_refused(rng: random.Random) -> None:
    """A refusal happens only for stored-transposed blocks in runs longer than one, over a mesh that cuts columns."""
    shape, blocks = some_param(rng)
    mesh, dims, late = some_mesh(len(shape), rng)
    for block in blocks:
        if cuts_runs(Sharding(shape, mesh, dims, late, block)):
            flattened = Grid.of(shape, len(shape) - 2) != block.grid
            assert flattened or (block.columns.count > 1 and block.columns.length > 1 and len(shape) - 1 in dims)


def test_a_part_without_few_views_is_refused_with_what_to_do() -> None:
    (q, *_) = divided(Grid(1, 8, 18), grouped(("q", "k", "v"), (4, 1, 1), 3), transposed=True)
    with pytest.raises(
        ValueError, match=r"'a.qkv', block 'q': sharded as 8x18 over 2 of dim 1, .* cuts runs of columns"
    ):
        Sharding((8, 18), (2,), (1,), (False,), q).check("a.qkv")
    for dim, parts in [(0, 2), (1, 3), (1, 6)]:
        Sharding((8, 18), (parts,), (dim,), (False,), q).check("a.qkv")
    (q, *_) = divided(Grid(1, 8, 24), grouped(("q", "k", "v"), (4, 1, 1), 4), transposed=True)
    with pytest.raises(ValueError, match=r"the part \(\(0, 8\), \(15, 5\)\) cuts runs of columns apart"):
        Sharding((8, 24), (5,), (1,), (False,), q).check("a.qkv")
    (kernel,) = divided(Grid.of((4, 3, 2, 2), 0), undivided(4))
    Sharding((4, 3, 2, 2), (2,), (1,), (False,), kernel).check("conv")
    with pytest.raises(ValueError, match=r"parameter 'conv', block '': .* cuts dimensions that are flattened"):
        Sharding((4, 3, 2, 2), (2,), (2,), (False,), kernel).check("conv")


def test_runs_that_are_cut_apart_in_a_single_row_are_as_many_views() -> None:
    (q, *_) = divided(Grid(1, 1, 18), grouped(("q", "k", "v"), (4, 1, 1), 3), transposed=True)
    sharding, row = Sharding((1, 18), (2,), (1,), (False,), q), torch.arange(18).view(1, 18)
    sharding.check("a.qkv")
    views = [local_views(row[:, 9 * n : 9 * n + 9], q, (1, 18), sharding.box((n,))) for n in range(2)]
    assert [[view.flatten().tolist() for view in each] for each in views] == [
        [[0, 1, 2, 3], [6, 7, 8]],
        [[9], [12, 13, 14, 15]],
    ]


def test_some_of_flattened_columns_are_no_block() -> None:
    block = Block("left", Grid(1, 4, 12), 0, Stripes(0, 4), Stripes(0, 6))
    with pytest.raises(ValueError, match=r"columns 0:6 of flattened dimensions cannot be a block of their own"):
        Sharding((4, 3, 2, 2), (2,), (0,), (False,), block).check("conv")


def test_a_sharding_without_a_block_is_as_it_was() -> None:
    plain, again = (Sharding((6, 4), (2,), (0,), (False,)) for _ in range(2))
    assert plain == again and hash(plain) == hash(again) and str(plain) == "6x4 over 2 of dim 0"
    assert plain.fragment(1, (1,)) == Fragment(1, 12, 24, 0)
    (whole,) = divided(Grid(1, 6, 4), undivided(6))
    blocked = Sharding((6, 4), (2,), (0,), (False,), whole)
    assert blocked != plain and blocked.fragment(1, (1,)) == plain.fragment(1, (1,))
    assert str(blocked).startswith("6x4 over 2 of dim 0, slice 0 rows 0:6")


def test_experts_that_a_rank_stores_whole_stay_there() -> None:
    stack = divided(Grid(4, 6, 3), grouped(("gate", "up"), (3, 3)))
    layout = MeshLayout(((0,), (1,)), tuple(Sharding((4, 6, 3), (2,), (0,), (False,), block) for block in stack))
    assert [[part.rank for part in layout.fragments(index)] for index in range(8)] == [[0]] * 4 + [[1]] * 4
    assert layout.kind(0) != layout.kind(1) and "slice 3 rows 3:6" in layout.place(7)
