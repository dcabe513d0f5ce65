"""Packing and cutting, against exact answers of small instances."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from lwopt_backend.plan.buffers.cuts import Cuts, Packer, least_padding, whole_layers
from lwopt_backend.plan.buffers.patterns import Pattern, fit, height_bound, longest_first, pack
from lwopt_backend.plan.buffers.stream import MOST_KINDS, Stream
from tests.planner_shapes import atoms_of, model

Instance = tuple[list[int], list[int], int]  # sizes that fall, how many of each, bins


def optimum(items: list[int], bins: int) -> int:
    """The lowest possible highest bin, by trying every assignment."""
    items = sorted(items, reverse=True)
    best = sum(items)

    def place(index: int, heights: list[int]) -> None:
        nonlocal best
        if index == len(items):
            best = max(heights)
            return
        for height in set(heights):  # bins of one height are alike
            if height + items[index] < best:
                where = heights.index(height)
                place(index + 1, [h + items[index] * (i == where) for i, h in enumerate(heights)])

    place(0, [0] * bins)
    return best


def small_instances(count: int, seed: int) -> list[Instance]:
    """Up to 10 items of up to 5 sizes, of any, of coprime and of even sizes, in 1 to 5 bins."""
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        pool = generator.choice([range(1, 60), [7, 11, 13, 17, 19, 23, 29, 31], range(64, 6400, 64), range(1, 4)])
        sizes = sorted({generator.choice(pool) for _ in range(generator.randint(1, 5))}, reverse=True)
        counts = [generator.randint(0, 10 // len(sizes)) for _ in sizes]
        counts[generator.randrange(len(sizes))] += not any(counts)
        found.append((sizes, counts, generator.randint(1, 5)))
    return found


def items_of(sizes: list[int], counts: list[int]) -> list[int]:
    return [size for size, count in zip(sizes, counts) for _ in range(count)]


def assert_packs(patterns: list[Pattern], instance: Instance, room: int) -> int:
    """Every item once, no more bins than there are, none higher than ``room``; returns the highest."""
    sizes, counts, bins = instance
    packed: Counter[int] = Counter()
    highest = used = 0
    for pattern in patterns:
        assert pattern.times > 0 and all(count > 0 for _, count in pattern.counts)
        assert len(dict(pattern.counts)) == len(pattern.counts), "a kind is listed once"
        highest = max(highest, sum(sizes[kind] * count for kind, count in pattern.counts))
        used += pattern.times
        for kind, count in pattern.counts:
            packed[kind] += count * pattern.times
    assert [packed[kind] for kind in range(len(sizes))] == counts
    assert used <= bins and highest <= room
    return highest


def test_the_exact_answers_are_exact() -> None:
    assert optimum([7, 6, 5, 4, 3], 2) == 13  # 7 + 6 | 5 + 4 + 3 = 12
    assert optimum([5, 5, 4, 4, 3, 3, 3], 3) == 9  # 5 + 4 | 5 + 4 | 3 + 3 + 3, where longest-first reaches 11


def test_no_packing_is_lower_than_the_bound() -> None:
    for sizes, counts, bins in small_instances(400, seed=1):
        bound = height_bound(sizes, counts, bins)
        mean = -(-sum(items_of(sizes, counts)) // bins)
        assert max(mean, *items_of(sizes, counts)) <= bound <= optimum(items_of(sizes, counts), bins)


def test_the_bound_counts_how_many_large_items_must_share_a_bin() -> None:
    assert height_bound([10, 1], [5, 1], 4) == 20, "five of ten on four bins: two share one"
    assert height_bound([10, 9, 1], [3, 2, 1], 4) == 18, "five of at least nine: two of at least nine share one"
    assert height_bound([10, 1], [0, 4], 2) == 2, "what there is none of does not count"


@pytest.mark.parametrize("seed", range(4))
def test_packing_loses_nothing_and_is_near_the_optimum(seed: int) -> None:
    instances = small_instances(150, seed=100 + seed)
    exact = 0
    for instance in instances:
        sizes, counts, bins = instance
        height, patterns = pack(sizes, counts, bins)
        assert assert_packs(patterns, instance, height) == height
        best = optimum(items_of(sizes, counts), bins)
        assert best <= height <= 1.1 * best
        exact += height == best
    assert exact >= 0.98 * len(instances), "all of them when this was written"


@pytest.mark.parametrize("seed", range(2))
def test_longest_first_keeps_grahams_promise(seed: int) -> None:
    for instance in small_instances(300, seed=200 + seed):
        sizes, counts, bins = instance
        height, patterns = longest_first(sizes, counts, bins)
        assert assert_packs(patterns, instance, height) == height
        best = optimum(items_of(sizes, counts), bins)
        assert best <= height <= (4 / 3 - 1 / (3 * bins)) * best


def test_what_fits_is_found_and_what_does_not_is_refused() -> None:
    missed = 0
    for instance in small_instances(400, seed=3):
        sizes, counts, bins = instance
        best = optimum(items_of(sizes, counts), bins)
        assert fit(sizes, counts, bins, best - 1) is None
        for room in (best, best + 1, best + best // 4, 2 * best):
            patterns = fit(sizes, counts, bins, room)
            if patterns is not None:
                assert_packs(patterns, instance, room)
        assert fit(sizes, counts, bins, 2 * best) is not None, "filling bins in any order is enough"
        missed += fit(sizes, counts, bins, best) is None
    assert missed <= 8, "none when this was written"


def test_buffers_of_many_matrices_are_packed_close_to_the_bound() -> None:
    """4 to 12 sizes, hundreds of items: within 2 % on average, half the excess of longest-first, never 11 %."""
    generator = random.Random(7)
    excess, of_longest_first = [], []
    for _ in range(60):
        sizes = sorted({64 * generator.randint(1, 200) for _ in range(generator.randint(4, 12))}, reverse=True)
        counts, bins = [generator.randint(1, 30) for _ in sizes], generator.randint(4, 40)
        bound = height_bound(sizes, counts, bins)
        height, patterns = pack(sizes, counts, bins)
        assert_packs(patterns, (sizes, counts, bins), height)
        excess.append(height / bound - 1)
        of_longest_first.append(longest_first(sizes, counts, bins)[0] / bound - 1)
    assert sum(excess) / 60 < 0.0195 and max(excess) < 0.11
    assert sum(excess) < 0.55 * sum(of_longest_first)


def test_equal_sizes_of_different_kinds_are_packed_as_if_one() -> None:
    assert pack([4, 4, 2, 2], [1, 1, 1, 1], 2)[0] == 6
    assert pack([64] * 3, [5, 5, 2], 4)[0] == 3 * 64


def test_forty_thousand_matrices_are_packed_to_the_bound_in_few_patterns() -> None:
    sizes, counts = [3 * 4096, 2 * 4096, 4096], [10_000, 10_000, 20_000]
    height, patterns = pack(sizes, counts, 1000)
    assert height == height_bound(sizes, counts, 1000) == 70 * 4096
    assert len(patterns) < 50
    assert_packs(patterns, (sizes, counts, 1000), height)


@pytest.mark.parametrize(("kinds", "bins"), [(60, 1), (80, 2), (160, 8)])
def test_a_bin_may_hold_more_kinds_than_one_search_looks_at(kinds: int, bins: int) -> None:
    sizes = [64 * (kinds - i) for i in range(kinds)]
    height, patterns = pack(sizes, [1] * kinds, bins)
    assert_packs(patterns, (sizes, [1] * kinds, bins), height)
    assert height <= 1.05 * height_bound(sizes, [1] * kinds, bins)


@pytest.mark.parametrize("smallest", [1, 8, 63])
def test_a_class_of_kinds_stands_for_its_largest_member(smallest: int) -> None:
    atoms = atoms_of([(64 * i, 64) for i in range(smallest, smallest + 300)])
    stream = Stream(atoms)
    assert len(stream.kinds) <= MOST_KINDS + 1
    assert [kind.numel for kind in stream.kinds] == sorted((kind.numel for kind in stream.kinds), reverse=True)
    for atom, kind in zip(reversed(atoms), (stream.kinds[k] for k in stream.kind_of)):
        assert atom.numel <= kind.numel <= 1.2 * atom.numel and atom.cost <= kind.cost
    assert stream.counts(0, 300) == tuple(Counter(stream.kind_of)[k] for k in range(len(stream.kinds)))


def small_packer(seed: int) -> Packer:
    """A stream of 2 to 12 matrices of three shapes, over 2 to 4 shards."""
    generator = random.Random(seed)
    shapes = [(generator.choice([8, 16, 24]), 64 * generator.randint(1, 2)) for _ in range(generator.randint(2, 12))]
    return Packer(Stream(atoms_of(shapes)), generator.randint(2, 4))


def bucket_numels(packer: Packer, cuts: Cuts) -> list[int]:
    return [packer.height(start, stop) * packer.shards for start, stop in zip(cuts, cuts[1:])]


def assert_covers(cuts: Cuts, count: int) -> None:
    assert cuts[0] == 0 and cuts[-1] == count
    assert all(start < stop for start, stop in zip(cuts, cuts[1:])), "no bucket is empty"


@pytest.mark.parametrize("seed", range(40))
def test_least_padding_is_least_among_all_cuts_of_twelve_matrices(seed: int) -> None:
    packer = small_packer(seed)
    count, total = len(packer.stream), packer.stream.numel(0, len(packer.stream))
    for buckets in range(1, min(count, 5) + 1):
        reach = max(2, int(2.5 * count / buckets))  # what its documentation lets a bucket span
        for largest in (4 * total, 2 * total // buckets, int(1.3 * total / buckets)):
            wide, near = [], []
            for number in (buckets, buckets + 1, buckets + 2):
                for inner in combinations(range(1, count), number - 1):
                    cuts = (0, *inner, count)
                    sizes = bucket_numels(packer, cuts)
                    if max(sizes) <= largest:
                        wide.append(sum(sizes))
                        if all(stop - start <= reach for start, stop in zip(cuts, cuts[1:])):
                            near.append(sum(sizes))
            found = least_padding(packer, buckets, largest)
            totals = [sum(bucket_numels(packer, cuts)) for cuts in found]
            for cuts in found:
                sizes = bucket_numels(packer, cuts)
                assert_covers(cuts, count)
                assert buckets <= len(sizes) <= buckets + 2 and max(sizes) <= largest
            assert all(total >= min(wide) for total in totals)
            assert not near or min(totals) <= min(near)


@pytest.mark.parametrize(("shards", "buckets"), [(4, 2), (4, 7), (4, 48), (2, 49), (2, 60), (2, 90)])
def test_least_padding_has_enough_buckets_and_none_above_the_limit(shards: int, buckets: int) -> None:
    packer = Packer(Stream(model("qwen3-32b", "mcore_fused")), shards)
    largest = roomy(packer, buckets)
    found = least_padding(packer, buckets, largest)
    assert found
    for cuts in found:
        assert_covers(cuts, 256)
        sizes = bucket_numels(packer, cuts)
        assert buckets <= len(sizes) <= 1.05 * buckets + 2 and max(sizes) <= largest
        assert sum(sizes) <= sum(bucket_numels(packer, by_count(256, buckets)))


def by_count(count: int, buckets: int) -> Cuts:
    """Buckets of equally many matrices."""
    return tuple(round(i * count / buckets) for i in range(buckets + 1))


def roomy(packer: Packer, buckets: int) -> int:
    """A limit that leaves buckets room for one matrix a shard and for 1.4 times the mean bucket."""
    numels = packer.stream.numels
    return max(int(1.4 * sum(numels) / buckets), (packer.shards + 1) * max(numels))


def test_a_search_among_all_buckets_finds_no_worse_than_one_among_lean_ones() -> None:
    packer = Packer(Stream(model("qwen3-32b")), 2)
    cuts = (0, 2, 8, 92, 178, 268, 358, 448)  # seven buckets without any padding
    assert sum(bucket_numels(packer, cuts)) == packer.stream.numel(0, 448)
    among_all, among_lean = least_padding(packer, 7, roomy(packer, 7))
    assert sum(bucket_numels(packer, among_all)) <= sum(bucket_numels(packer, among_lean))


def test_many_buckets_are_found_also_where_some_must_be_wasteful() -> None:
    packer = Packer(Stream(model("llama3.1-8b")), 2)
    limit = max(bucket_numels(packer, by_count(224, 90)))
    (cuts,) = least_padding(packer, 90, limit)
    sizes = bucket_numels(packer, cuts)
    assert len(sizes) >= 90 and max(sizes) <= limit


def test_where_the_limit_leaves_no_cuts_there_are_none() -> None:
    stream = Stream(atoms_of([(64, 64)] * 12))
    packer = Packer(stream, 4)
    assert set(least_padding(packer, 3, 4 * 64 * 64)) == {(0, 4, 8, 12)}, "one matrix per shard and bucket"
    assert least_padding(packer, 3, 4 * 64 * 64 - 1) == []
    assert least_padding(packer, 13, 10**9) == least_padding(packer, 60, 10**9) == [], "more buckets than matrices"


@pytest.mark.parametrize("buckets", [1, 2, 5, 31, 64, 200])
def test_whole_layers_cuts_only_between_layers_and_nearly_evenly(buckets: int) -> None:
    atoms = model("llama3.1-8b")
    stream = Stream(atoms)
    cuts = whole_layers(stream, buckets)
    assert_covers(cuts, len(stream))
    names = [atom.name for atom in reversed(atoms)]
    for cut in cuts[1:-1]:
        assert names[cut].split(".")[1] != names[cut - 1].split(".")[1]
    assert len(cuts) - 1 == min(buckets, 32)
    layer = stream.numel(0, 7)
    sizes = [stream.numel(start, stop) for start, stop in zip(cuts, cuts[1:])]
    assert max(sizes) - min(sizes) <= layer, "32 equal layers"


def test_there_are_no_more_buckets_of_whole_layers_than_layers() -> None:
    assert whole_layers(Stream([*model("gpt2-124m")][:4]), 3) == (0, 4), "one layer"
    assert whole_layers(Stream(atoms_of([(64, 64)] * 7)), 9) == (0, 1, 4, 7), "matrices 6 | 3-5 | 0-2, from the end"
