"""Plans are exact, cover every element once, and are the same everywhere."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from lwopt_backend.plan import MACHINES, Atom, FlatPartition, Fragment, Machine, MatrixPlan, plan_matrices
from lwopt_backend.plan.build import fill_buckets
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.plan.owners import balance, stay

SHAPES = [(63, 24), (41, 63), (24, 41), (1, 5), (5, 1), (96, 96), (7, 300), (300, 7), (2, 2), (64, 64)]


def atoms_of(shapes: list[tuple[int, int]]) -> list[Atom]:
    return [Atom(f"layer{i}.weight", shape, newton_schulz_flops(shape, 5)) for i, shape in enumerate(shapes)]


def plan_of(shapes: list[tuple[int, int]], world_size: int, policy: str, bucket_numel: int = 3000) -> MatrixPlan:
    atoms = atoms_of(shapes)
    layout = FlatPartition.build([atom.numel for atom in atoms], world_size)
    return plan_matrices(
        atoms, layout, policy=policy, machine=MACHINES["cpu"], bucket_numel=bucket_numel, element_bytes=2
    )


def test_newton_schulz_flops_are_those_of_its_matrix_products() -> None:
    # 2 x 3 by 5 steps: X X^T is 2*2*3*2 = 24 flops, A A is 2*2*2*2 = 16, B X is 24; 64 a step
    assert newton_schulz_flops((2, 3), 5) == newton_schulz_flops((3, 2), 5) == 5 * 64


def test_flat_partition_cuts_parameters_where_deepspeed_does() -> None:
    layout = FlatPartition.build([4, 5, 1], 3)
    assert layout.partition_numel == 4  # 10 elements, padded to a multiple of 2 * 3
    assert layout.fragments(0) == (Fragment(0, 0, 4, 0),)
    assert layout.fragments(1) == (Fragment(1, 0, 4, 0), Fragment(2, 4, 5, 0))
    assert layout.fragments(2) == (Fragment(2, 0, 1, 1),)
    assert [layout.stored_numel(rank) for rank in range(3)] == [4, 4, 2]


def test_parameter_alignment_pads_between_parameters() -> None:
    layout = FlatPartition.build([3, 3], 1, param_alignment=4)
    assert layout.offsets == (0, 4)
    assert layout.partition_numel == 8
    assert FlatPartition.build([3, 5], 1, param_alignment=8).partition_numel == 14, "nothing is padded after the last"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64, 1024])
def test_fragments_tile_every_parameter_and_never_overlap_on_a_rank(world_size: int) -> None:
    layout = FlatPartition.build([rows * columns for rows, columns in SHAPES], world_size)
    used: dict[int, int] = {}
    for index, numel in enumerate(layout.numels):
        end = 0
        for part in layout.fragments(index):
            assert part.start == end and part.numel > 0
            assert part.offset == used.get(part.rank, 0), "a rank's fragments follow one another"
            used[part.rank] = part.offset + part.numel
            end = part.stop
        assert end == numel
    assert sum(used.values()) == sum(layout.numels)


def test_an_impossible_partition_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="parameter 1 has 0 elements"):
        FlatPartition.build([4, 0], 2)
    with pytest.raises(ValueError, match="parameter 1 starts at 3 but element 4 is next"):
        FlatPartition(2, (4, 4), (0, 3), 8)
    with pytest.raises(ValueError, match="parameters end at 8, beyond 2 partitions of 3"):
        FlatPartition(2, (4, 4), (0, 4), 3)


def test_stay_gives_an_atom_to_the_rank_that_stores_most_of_it() -> None:
    atoms = atoms_of([(2, 2), (2, 3), (1, 2)])
    layout = FlatPartition.build([4, 6, 2], 2)  # rank 0: 4 + 2 of 6; rank 1: 4 of 6 + 2
    assert stay(atoms, layout).owners == (0, 1, 1)
    assert stay(atoms_of([(1, 4)]), FlatPartition.build([4], 2)).owners == (0,), "halves: the lower rank"


def test_balance_is_longest_processing_time_first() -> None:
    # costs 7, 6, 5, 4, 3 on two ranks: 7 | 6, then 5 to 6, 4 to 7, 3 to 11 (tied at 11: the rank that stores it)
    atoms = [Atom(str(i), (1, 1), cost) for i, cost in enumerate([7, 6, 5, 4, 3])]
    layout = FlatPartition.build([1] * 5, 2)  # ranks store atoms 0-3 and 4 (partition of 4)
    assert layout.partition_numel == 4
    ownership = balance(atoms, layout)
    assert ownership.owners == (0, 1, 1, 0, 1)
    assert ownership.loads == (11, 14)
    assert ownership.imbalance == 14 / 12.5


def test_equal_costs_are_dealt_in_the_order_of_the_atoms() -> None:
    atoms = [Atom(str(i), (1, 1), 5) for i in range(3)]
    layout = FlatPartition.build([1, 1, 1], 2)  # both partitions hold 2 elements
    assert balance(atoms, layout).owners == (0, 1, 1), "0 stays, 1 goes to the empty rank, 2 stays where it lies"


def test_the_modelled_step_is_the_busiest_rank_on_its_machine() -> None:
    atoms = [Atom("a", (2, 4), 10), Atom("b", (3, 4), 30)]
    plan = plan_matrices(
        atoms,
        FlatPartition.build([8, 12], 4),  # partitions of 6: a lies on ranks 0 and 1, b on 1, 2 and 3
        policy="stay",
        machine=Machine("slow", flops_per_second=10, bytes_per_second=2, latency_seconds=100),
        bucket_numel=8,
        element_bytes=2,
    )
    assert plan.ownership.owners == (0, 2) and len(plan.buckets) == 2
    ((_, time),) = plan.modelled
    # Rank 2 does 30 flops, and sends back what 1 and 3 lent it: 4 + 2 elements. Each bucket goes forth and back.
    assert (time.compute, time.wire, time.latency) == (3.0, max(plan.wire_bytes()) / 2, 400.0)
    assert plan.wire_bytes() == [4, 12, 12, 4] and time.total == 409.0


def test_ranks_that_differ_in_the_size_of_an_element_on_the_wire_differ_in_their_plan() -> None:
    plan = plan_of(SHAPES, 2, "stay")
    assert plan.lines() != replace(plan, element_bytes=4).lines()


def test_auto_takes_the_shorter_modelled_step_and_says_both() -> None:
    # One huge matrix and many small ones: staying leaves rank 0 with all the work.
    shapes = [(512, 512)] * 8 + [(1, 4096)] * 512
    plan = plan_of(shapes, 2, "auto", bucket_numel=2**24)
    assert plan.ownership.policy == "balance"
    (best, best_time), (other, other_time) = plan.modelled
    assert (best, other) == ("balance", "stay") and best_time.total < other_time.total
    assert plan_of([(64, 64)] * 8, 2, "auto").ownership.policy == "stay", "already balanced, nothing to move"


@pytest.mark.parametrize("policy", ["stay", "balance"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_transfers_bring_every_travelling_element_to_its_owner_and_back(policy: str, world_size: int) -> None:
    plan = plan_of(SHAPES, world_size, policy)
    arrived: dict[int, list[tuple[int, int]]] = {}
    for bucket in range(len(plan.buckets)):
        transfers = [plan.transfer(bucket, rank) for rank in range(world_size)]
        for a in range(world_size):
            for b in range(world_size):
                sent = [(s.atom, s.start, s.stop) for s in transfers[a].sends if s.peer == b]
                received = [(s.atom, s.start, s.stop) for s in transfers[b].receives if s.peer == a]
                assert sent == received, "both ends see the same elements in the same order"
                assert transfers[a].send_splits[b] == transfers[b].receive_splits[a]
        for transfer in transfers:
            back = plan.way_back(bucket, transfer.rank)
            assert (back.sends, back.receives) == (transfer.receives, transfer.sends), "every piece has one holder"
            for segment in transfer.receives:
                assert plan.ownership.owners[segment.atom] == transfer.rank
                arrived.setdefault(segment.atom, []).append((segment.start, segment.stop))
    for atom, pieces in arrived.items():
        pieces.sort()
        assert pieces[0][0] == 0 and pieces[-1][1] == plan.atoms[atom].numel
        assert all(left[1] == right[0] for left, right in zip(pieces, pieces[1:]))
    local = {atom for rank in range(world_size) for atom in plan.local_atoms(rank)}
    assert local.isdisjoint(arrived) and local | set(arrived) == set(range(len(SHAPES)))


@pytest.mark.parametrize("policy", ["stay", "balance"])
def test_bytes_on_the_wire_are_the_transfers_both_ways(policy: str) -> None:
    plan = plan_of(SHAPES, 4, policy)
    for rank, counted in enumerate(plan.wire_bytes()):
        ways = [way(bucket, rank) for bucket in range(len(plan.buckets)) for way in (plan.transfer, plan.way_back)]
        assert counted == 2 * sum(way.wire_numel for way in ways)
    assert plan.moved_numel() == [
        sum(plan.transfer(bucket, rank).wire_numel for bucket in range(len(plan.buckets))) for rank in range(4)
    ]


def test_stay_moves_no_more_than_one_matrix_per_partition_boundary() -> None:
    plan = plan_of([(64, 64)] * 50 + [(64, 256)] * 50, 16, "stay")
    assert sum(map(len, plan.buckets)) <= 15
    assert sum(plan.moved_numel()) <= 15 * (64 * 256) // 2


def test_buckets_hold_at_most_their_size_or_one_matrix() -> None:
    atoms = atoms_of([(10, 10), (10, 10), (30, 30), (1, 1), (10, 20)])
    assert fill_buckets(range(5), atoms, 201) == ((0, 1), (2,), (3, 4))
    assert fill_buckets([], atoms, 201) == ()


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown policy 'spread'; expected one of auto, stay, balance"):
        plan_of(SHAPES, 2, "spread")


def digest_in_fresh_process(hash_seed: str) -> str:
    code = (
        "from tests.test_plan import SHAPES, plan_of; from lwopt_backend.runtime.agreement import digest;"
        "print(digest(plan_of(SHAPES * 20, 16, 'balance').lines()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_the_plan_is_the_same_in_every_process_whatever_the_hash_seed() -> None:
    assert digest_in_fresh_process("1") == digest_in_fresh_process("2") != ""


def test_planning_takes_one_pass_not_ranks_times_fragments() -> None:
    """8,000 matrices on 1,024 ranks: counted, not timed. Planning asks for fragments a few times per matrix."""
    generator = random.Random(0)
    shapes = [generator.choice([(64, 64), (64, 256), (256, 64)]) for _ in range(8000)]
    atoms = atoms_of(shapes)
    calls = 0

    class Counting(FlatPartition):
        __slots__ = ()

        def fragments(self, index: int) -> tuple[Fragment, ...]:
            nonlocal calls
            calls += 1
            return FlatPartition.fragments(self, index)

    layout = Counting.build([atom.numel for atom in atoms], 1024)
    plan_matrices(atoms, layout, policy="auto", machine=MACHINES["cuda"], bucket_numel=2**24, element_bytes=2)
    assert calls <= 10 * len(atoms)
