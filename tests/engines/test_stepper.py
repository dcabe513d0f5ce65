"""The stepper on gloo, without DeepSpeed: what it computes, what it sends and when, and what it leaves in place."""

import gc
import tracemalloc
import weakref
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rehearsal.absent_gpu import Recorder, absent_gpu, pretended
from lwopt_backend.engines.modules.step import scalars_on
from lwopt_backend.plan import FlatPartition, MatrixPlan, ParameterPartition, Replicas, plan_matrices, plan_spread
from lwopt_backend.plan.cost import MACHINES
from lwopt_backend.plan.owners import Limits
from lwopt_backend.rules import MatrixRule, WeightRule
from lwopt_backend.rules.muon import Muon
from lwopt_backend.runtime import collectives, tensors
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.exchange import ways_back, ways_to_owners
from lwopt_backend.runtime.pieces import Regions, Slices, flat_regions
from lwopt_backend.runtime.places import Batches
from lwopt_backend.runtime.step import MatrixStepper, StepInput
from tests.support.cells import cells
from tests.support.counted import Counted
from tests.support.on_ranks import on_ranks
from tests.support.plans import SHAPES, atoms_of, plan_of
from tests.support.references import random, rule_of


class Alone:
    rank, world_size = 0, 1


def mine(plan: MatrixPlan, flat: Tensor, rank: int) -> Tensor:
    """A rank's part of the group's flat buffer, which ends in zeros, as DeepSpeed pads."""
    size = plan.layout.partition_numel
    return nn.functional.pad(flat, (0, size * plan.layout.world_size - flat.numel())).view(-1, size)[rank].clone()


def regions_of(plan: MatrixPlan, rank: int) -> Regions:
    views = [plan.layout.views(atom, rank) for atom in range(len(plan.atoms))]
    return flat_regions(views, plan.layout.partition_numel)


def stepped(
    plan: MatrixPlan, rule: MatrixRule, steps: int = 1, batch_numel: int = 0, stored: torch.dtype = torch.float32
) -> Slices:
    """Weights ``stored`` in this dtype, gradients and state in fp32."""
    collectives = TorchCollectives() if plan.layout.world_size > 1 else Alone()
    kinds = [0] * len(plan.atoms)
    stepper = MatrixStepper(plan, kinds, collectives, torch.device("cpu"), batch_numel=batch_numel)
    regions = regions_of(plan, collectives.rank)
    flat = [random((sum(plan.layout.numels),), seed) for seed in range(steps + 1)]
    value, *grads = (mine(plan, one, collectives.rank) for one in flat)
    state = {key: torch.zeros_like(value) for key in rule.state_keys}
    value = value.to(stored)
    for grad in grads:
        slices = Slices(value, grad, state)
        stepper.step(StepInput({0: rule}, regions.cut(slices)))
    return slices


@cells(
    ranks=[2, 3, 4], policy=["stay", "balance"], bucket_numel=[1, 3000, 10**6], dtype=[torch.bfloat16, torch.float32]
)
@on_ranks()
def test_ranks_hold_the_bits_of_one_and_send_what_is_planned(
    policy: str, bucket_numel: int, dtype: torch.dtype
) -> None:
    """With two buckets in flight at most."""
    plan, alone = (plan_of(SHAPES, size, policy, bucket_numel) for size in (dist.get_world_size(), 1))
    rule, rank = rule_of("muon", ns_dtype=str(dtype).removeprefix("torch.")), dist.get_rank()
    expected = stepped(alone, rule, steps=3).value[: sum(plan.layout.numels)]
    with Counted() as counted:
        assert torch.equal(stepped(plan, rule, steps=3).value, mine(plan, expected, rank))
    assert counted.dtypes == {dtype} and counted.in_flight == 0
    sent = plan.wire_bytes()[rank] * dtype.itemsize // plan.element_bytes
    assert counted.sent_bytes == 3 * sent
    assert counted.calls.total() == 3 * 2 * len(plan.buckets)
    # Two buckets: one or both on their way back as well.
    assert counted.most_in_flight <= 3 and (counted.most_in_flight >= 2 or len(plan.buckets) < 2)


@on_ranks(2)
def test_metrics_do_not_count_as_sent_what_its_owner_has() -> None:
    atoms = atoms_of(SHAPES)
    stored = Replicas(dist.get_world_size(), tuple(atom.numel for atom in atoms))
    plan = plan_spread(atoms, stored, Limits(machine=MACHINES["cpu"]))
    recorder = collectives.Recorder()
    collectives.RECORDERS.add(recorder)
    out, back = (ways(plan, TorchCollectives(), torch.device("cpu")) for ways in (ways_to_owners, ways_back))
    for way in out:
        way.send(way.packing(torch.float32)).wait()
    assert sum(sum(way.send_splits) for way in out) > 0 and recorder.sent == 0
    for way in back:
        way.send(way.packing(torch.float32)).wait()
    assert recorder.sent == 4 * plan.owned_numels()[dist.get_rank()]


class Signs(Muon):
    """Muon with an iteration that gives a matrix in a batch the bits that it has alone."""

    def transform(self, matrices: Tensor) -> Tensor:
        return matrices.to(self.iterates_in).sign()


@cells(ranks=[1, 2, 3], policy=["stay", "balance"], bucket_numel=[1, 3000, 10**6])
@on_ranks()
def test_batches_take_the_bits_of_one_by_one(policy: str, bucket_numel: int) -> None:
    plan = plan_of(SHAPES, dist.get_world_size(), policy, bucket_numel)
    given = ({}, {"precondition": "muon2"}, {"hyperball": True, "weight_decay": 0.0}, {"uw_floor": 0.35})
    for options, stored in (*((options, torch.float32) for options in given), ({}, torch.bfloat16)):
        rule = Signs(lr=0.1, **options)
        one_by_one = stepped(plan, rule, steps=3, stored=stored)
        for batch_numel in (1000, 10**6):
            batched = stepped(plan, rule, steps=3, batch_numel=batch_numel, stored=stored)
            assert torch.equal(batched.value, one_by_one.value)
            assert all(torch.equal(batched.state[key], one_by_one.state[key]) for key in rule.state_keys)


@cells(ranks=[2, 3, 4], policy=["stay", "balance"], bucket_numel=[1, 3000, 10**6])
@on_ranks()
def test_norms_of_pieces_take_one_collective_a_bucket(policy: str, bucket_numel: int) -> None:
    """Norms of pieces add up over the ranks in one collective a bucket."""
    plan, alone = (plan_of(SHAPES, size, policy, bucket_numel) for size in (dist.get_world_size(), 1))
    for options in ({"hyperball": True, "weight_decay": 0.0}, {"uw_floor": 0.35}):
        rule = rule_of("muon", **options)
        expected = stepped(alone, rule, steps=3).value[: sum(plan.layout.numels)]
        seen = mock.patch.object(TorchCollectives, "all_reduce", autospec=True, side_effect=TorchCollectives.all_reduce)
        with seen as all_reduce:
            found = stepped(plan, rule, steps=3).value
        torch.testing.assert_close(found, mine(plan, expected, dist.get_rank()), rtol=0, atol=1e-6)
        assert all_reduce.call_count == 3 * len(plan.buckets)


@dataclass
class Spy(MatrixRule):
    """A rule that records where the tensors it is given lie, and how many matrices they are."""

    seen: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    lr: float = 0.0

    def transform(self, matrices: Tensor) -> Tensor:
        self.seen.append(matrices.untyped_storage().data_ptr())
        self.batches.append(matrices.size(0) if matrices.ndim == 3 else 1)
        return matrices


def test_a_batch_holds_no_more_than_its_size() -> None:
    plan = plan_of([(4, 4)] * 5 + [(2, 8)] * 2, 1, "stay")
    for size, expected in [(0, [1] * 7), (35, [2, 2, 1, 2]), (1000, [5, 2])]:
        spy = Spy()
        stepped(plan, spy, batch_numel=size)
        assert spy.batches == expected
    batches = Batches(plan.atoms, [0] * 7, 35).of_pieces(((atom, 10) for atom in range(7)), frozenset({1}))
    assert [batch.places for batch in batches] == [[0, 2, 3], [4, 5, 6]], "of pieces, what a rank has of them"


def test_copies_for_norms_hold_no_more_elements_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pieces of 4 elements fill a copy of 8; a piece of 9 is alone."""
    monkeypatch.setattr(tensors, "COPIED_NUMEL", 8)
    assert tensors._alike([torch.empty(numel) for numel in (4, 9, 4, 4, 9)]) == [[0, 2], [3], [1], [4]]


def test_stepper_is_freed_with_the_last_reference() -> None:
    """A stepper and its state are freed with the last reference."""
    plan, rule = plan_of(SHAPES, 1, "stay"), rule_of("muon")
    stepper = MatrixStepper(plan, [0] * len(plan.atoms), Alone(), torch.device("cpu"))
    value, grad, momentum = (random((plan.layout.partition_numel,), seed) for seed in range(3))
    pieces = regions_of(plan, 0).cut(Slices(value, grad, {"momentum_buffer": momentum}))
    stepper.step(StepInput({0: rule}, pieces))
    left = weakref.ref(stepper)
    gc.disable()  # which would free it later
    del stepper
    gc.enable()
    assert left() is None


def test_batches_of_ever_other_matrices_take_no_more_memory() -> None:
    """As of experts, of which other ones have a gradient in every step."""
    atoms, draw = atoms_of([(4, 4)] * 60), Random(0)
    batches = Batches(atoms, [0] * 60, 100)
    held = []
    tracemalloc.start()
    for _ in range(3):
        for _ in range(300):
            batches.of(tuple(sorted(draw.sample(range(60), 30))), {0: Spy()})
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[2] < held[0] + 50_000


@on_ranks(2)
def test_matrices_whole_at_their_owner_are_stepped_on_views() -> None:
    plan, spy = plan_of(SHAPES, 2, "stay", 3000), Spy()
    slices = stepped(plan, spy)
    views = spy.seen.count(slices.grad.untyped_storage().data_ptr())
    assert views == len(plan.local_atoms(dist.get_rank())) > 0
    assert len(spy.seen) - views <= 1


@dataclass
class Signed(WeightRule):
    """Its weights and gradients travel apart, so a bucket has two arrivals."""

    lr: float = 0.1

    def step(self, value: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        value.sub_(grad.sign(), alpha=self.lr)


class Interrupted(Exception):
    """Ends a step."""


@on_ranks(2)
def test_a_step_that_ends_early_waits_for_all_in_flight() -> None:
    """Or a transport would write into buffers that are free."""
    plan, waited = plan_of(SHAPES, 2, "balance", 1), list[int]()

    @dataclass
    class Fails:
        pending: Any

        def wait(self) -> None:
            waited.append(id(self))
            self.pending.wait()
            raise RuntimeError("Connection closed by peer")

    class Failing(TorchCollectives):
        def all_to_all(self, *args: Any) -> Any:
            started.append(Fails(super().all_to_all(*args)))
            return started[-1]

    started = list[Fails]()
    stepper = MatrixStepper(plan, [0] * len(plan.atoms), Failing(), torch.device("cpu"))
    value, grad = (random((plan.layout.partition_numel,), seed) for seed in range(2))
    given = StepInput({0: Signed()}, regions_of(plan, dist.get_rank()).cut(Slices(value, grad, {})))
    with pytest.raises(Interrupted), stepper.window(given) as window:
        window.advance()
        window.advance()
        raise Interrupted
    assert len(started) == 4 and set(waited) == set(map(id, started))


class Crossings(Recorder):
    """Counts the tensors that are copied to the GPU, and from it, and what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed = Counter[str]()

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, pairs = func._schema.name.partition("::")[2], list[tuple[torch.device, torch.device]]()
        if name == "_to_copy":
            pairs = [(torch.device(kwargs.get("device") or args[0].device), args[0].device)]
        elif name == "copy_":
            pairs = [(args[0].device, args[1].device)]
        elif name == "_foreach_copy_":
            pairs = [(into.device, tensor.device) for into, tensor in zip(*args[:2])]
        self.crossed.update(into.type for into, tensor in pairs if into.type != tensor.type)
        return super()._wait(func, args, kwargs)


@cells(layout=[FlatPartition, ParameterPartition], batch_numel=[0, 10**6])
def test_cpu_state_is_copied_once_a_bucket(layout: Any, batch_numel: int) -> None:
    """What is stored on the CPU goes to the GPU and back in one copy a bucket. And a matrix that is stored whole, or a
    batch of them, in one copy each way. The host waits for what returns."""
    atoms, crossings = atoms_of([(40, 40)] * 25), Crossings()
    stored = layout.build([atom.numel for atom in atoms], 4)
    plan = plan_matrices(
        atoms, stored, Limits(numel=12_000), policy="balance", machine=MACHINES["cpu"], element_bytes=2
    )
    rules: dict[int, MatrixRule] = {0: rule_of("muon")}
    with pretended(1, 4, lambda mine, count: [mine] * count), absent_gpu(crossings):
        kinds, device = [0] * len(atoms), torch.device("cuda", 0)
        stepper = MatrixStepper(plan, kinds, TorchCollectives(), device, batch_numel=batch_numel)
        value, grad, momentum = (torch.zeros(stored.partition_numel) for _ in range(3))
        slices = Slices(value, grad, {"momentum_buffer": momentum})
        stepper.step(StepInput(rules, regions_of(plan, 1).cut(slices)))
        local = len(stepper.matrices.batches.of(tuple(plan.local_atoms(1)), rules))
    out = sum(any(way.send_splits) for way in stepper._to_owners)
    back = sum(any(way.receive_splits) for way in stepper._back)
    assert local > 0 if layout is FlatPartition else out > 1 and back > 1
    assert crossings.crossed == {"cuda": out + local, "cpu": back + local}
    assert crossings.waits.total() == back + local


def test_norms_of_a_gpu_go_to_a_group_with_gloo_in_one_copy() -> None:
    """As they do of all modules, whose groups are clipped apart."""
    crossings = Crossings()
    with pretended(1, 4, lambda mine, count: [mine] * count), absent_gpu(crossings):
        norms = [torch.zeros((), device=torch.device("cuda", 0)) for _ in range(3)]
        none = torch.zeros(())  # the norm of a module without gradients
        rows = scalars_on(torch.device("cpu"), [[none, norms[0], norms[1]], [0.5, norms[2], 1.0]])
        assert [row.shape for row in rows] == [(3,), (3,)] and {row.dtype for row in rows} == {torch.float64}
    assert crossings.crossed == {"cpu": 1, "cuda": 1}, "the norms once; and a number that was on the CPU"
    one, two = (torch.tensor(value, dtype=torch.float32) for value in (1.5, 2.5))
    (row,) = scalars_on(torch.device("cpu"), [[one, 3.0, two]])
    assert row.tolist() == [1.5, 3.0, 2.5]
