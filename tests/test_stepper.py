"""The stepper on gloo, without DeepSpeed: what it computes, what it sends and when, and what it leaves in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from lwopt_backend.plan import MatrixPlan
from lwopt_backend.rule_options import MuonOptions
from lwopt_backend.rules import MatrixRule, Muon
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.ranks import Pending
from lwopt_backend.runtime.stepper import MatrixStepper
from lwopt_backend.runtime.storage import FlatStorage, Slices
from tests.ranks import RankPool
from tests.test_plan import SHAPES, plan_of

STEPS = 3


@dataclass
class Recorder:
    """Real collectives that write down what was sent, and in which order buckets left and were waited for."""

    real: TorchCollectives
    sent_bytes: int = 0
    calls: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def rank(self) -> int:
        return self.real.rank

    @property
    def world_size(self) -> int:
        return self.real.world_size

    def gather_objects(self, value: Any) -> list[Any]:
        return self.real.gather_objects(value)

    def all_to_all(self, received: Tensor, sent: Tensor, into: Sequence[int], out: Sequence[int]) -> Pending:
        self.calls += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.dtypes.add(sent.dtype)
        self.sent_bytes += sum(n for peer, n in enumerate(out) if peer != self.rank) * sent.itemsize
        return Waited(self, self.real.all_to_all(received, sent, into, out))


@dataclass
class Waited:
    recorder: Recorder
    pending: Pending

    def wait(self) -> object:
        self.recorder.in_flight -= 1
        return self.pending.wait()


class Alone:
    """The collectives of a single rank: there are none."""

    rank, world_size = 0, 1


def rule_in(dtype: torch.dtype) -> Muon:
    options = MuonOptions(lr=0.02, weight_decay=0.1, ns_dtype=str(dtype).removeprefix("torch."))
    return Muon(**options.model_dump())


def whole(plan: MatrixPlan, seed: int) -> Tensor:
    """The group's flat buffer over all ranks, padding included (and zero, as DeepSpeed pads)."""
    numel = plan.layout.partition_numel * plan.layout.world_size
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    flat[sum(plan.layout.numels) :] = 0
    return flat


def mine(plan: MatrixPlan, flat: Tensor, rank: int) -> Tensor:
    size = plan.layout.partition_numel
    return flat[rank * size : (rank + 1) * size].clone()


def step_on_ranks(policy: str, dtype: torch.dtype, bucket_numel: int, batch_numel: int) -> tuple[Tensor, Recorder]:
    recorder = Recorder(TorchCollectives())
    plan = plan_of(SHAPES, recorder.world_size, policy, bucket_numel)
    stepper = MatrixStepper(plan, recorder, torch.device("cpu"), batch_numel=batch_numel)
    value = mine(plan, whole(plan, 0), recorder.rank)
    state = {"momentum_buffer": torch.zeros_like(value)}
    for step in range(STEPS):
        grad = mine(plan, whole(plan, 1 + step), recorder.rank)
        stepper.step(
            [rule_in(dtype)] * len(plan.atoms), FlatStorage(plan.layout, recorder.rank, Slices(value, grad, state))
        )
    recorder.real = None  # a process group does not travel back
    return value, recorder


def reference(plan: MatrixPlan) -> Tensor:
    """torch.optim.Muon on the whole matrices."""
    flat = whole(plan, 0)
    params = [
        torch.nn.Parameter(flat[offset : offset + atom.numel].view(atom.shape).clone())
        for offset, atom in zip(plan.layout.offsets, plan.atoms)
    ]
    optimizer = torch.optim.Muon(params, lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        grads = whole(plan, 1 + step)
        for offset, param in zip(plan.layout.offsets, params):
            param.grad = grads[offset : offset + param.numel()].view(param.shape)
        optimizer.step()
    for offset, param in zip(plan.layout.offsets, params):
        flat[offset : offset + param.numel()] = param.detach().view(-1)
    return flat


@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True, ids=["2ranks", "3ranks", "4ranks"])
@pytest.mark.parametrize("policy", ["stay", "balance"])
@pytest.mark.parametrize("bucket_numel", [1, 3000, 10**6])
def test_ranks_together_hold_the_bits_of_torch_muon(ranks: RankPool, policy: str, bucket_numel: int) -> None:
    answers = ranks.run(step_on_ranks, policy, torch.bfloat16, bucket_numel, 0)
    plan = plan_of(SHAPES, ranks.world_size, policy, bucket_numel)
    assert torch.equal(torch.cat([value for value, _ in answers]), reference(plan))


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", ["stay", "balance"])
def test_bytes_sent_are_those_of_the_plan_and_two_buckets_fly_at_most(
    ranks: RankPool, policy: str, dtype: torch.dtype
) -> None:
    plan = plan_of(SHAPES, 4, policy, 3000)
    assert len(plan.buckets) >= 2
    for (_, recorder), planned in zip(ranks.run(step_on_ranks, policy, dtype, 3000, 0), plan.wire_bytes()):
        assert recorder.sent_bytes == STEPS * planned * dtype.itemsize // plan.element_bytes
        assert recorder.calls == STEPS * 2 * len(plan.buckets)
        assert recorder.dtypes == {dtype}
        assert recorder.in_flight == 0
        assert 2 <= recorder.most_in_flight <= 3  # two buckets: one or both on their way back as well


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_batched_steps_equal_single_ones_within_rounding(ranks: RankPool) -> None:
    single = ranks.run(step_on_ranks, "balance", torch.float32, 10**6, 0)
    batched = ranks.run(step_on_ranks, "balance", torch.float32, 10**6, 10**6)
    for (a, _), (b, _) in zip(single, batched):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@dataclass
class Spy(MatrixRule):
    """A rule that records where the tensors it is given lie."""

    seen: list[int]
    batches: list[int] = field(default_factory=list)
    lr: float = 0.0

    def transform(self, matrices: Tensor) -> Tensor:
        self.seen.append(matrices.untyped_storage().data_ptr())
        self.batches.append(matrices.size(0) if matrices.ndim == 3 else 1)
        return matrices


def test_a_batch_holds_no_more_than_its_size() -> None:
    plan = plan_of([(4, 4)] * 5 + [(2, 8)] * 2, 1, "stay")
    for size, expected in [(0, [1] * 7), (35, [2, 2, 1, 2]), (1000, [5, 2])]:
        stepper = MatrixStepper(plan, Alone(), torch.device("cpu"), batch_numel=size)
        seen: list[int] = []
        flat = torch.randn(plan.layout.partition_numel)
        storage = FlatStorage(plan.layout, 0, Slices(flat, flat.clone(), {}))
        stepper.step([Spy([], batches=seen)] * len(plan.atoms), storage)
        assert seen == expected


def count_views() -> tuple[int, int, int]:
    collectives = TorchCollectives()
    plan = plan_of(SHAPES, collectives.world_size, "stay", 3000)
    grad = mine(plan, whole(plan, 1), collectives.rank)
    spy = Spy([])
    storage = FlatStorage(plan.layout, collectives.rank, Slices(torch.zeros_like(grad), grad, {}))
    MatrixStepper(plan, collectives, torch.device("cpu")).step([spy] * len(plan.atoms), storage)
    views = sum(pointer == grad.untyped_storage().data_ptr() for pointer in spy.seen)
    return views, len(plan.local_atoms(collectives.rank)), len(spy.seen)


def test_matrices_whole_at_their_owner_are_stepped_on_views(ranks: RankPool) -> None:
    for views, local, seen in ranks.run(count_views):
        assert views == local > 0
        assert seen - views <= 1
