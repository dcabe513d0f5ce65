"""What the step sends and when, in which layout and dtype, and who does the work."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lwopt_backend.rules import muon
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.fsdp2 import Twin, backward, layer_wise, shard, weights_of
from tests.ranks import RankPool

OPTIONS = [
    {"layout": "compact"},
    {"layout": "padded"},
    {"layout": "auto"},
    {"layout": "compact", "bucket_matrices": 1},
    {"layout": "padded", "bucket_matrices": 1},
    {"layout": "auto", "bucket_numel": 1},
]


class Counted:
    """Counts what leaves through the door to torch.distributed while it is open."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.dtypes: set[torch.dtype] = set()

    def __enter__(self) -> Counted:
        self.original = TorchCollectives.all_to_all
        counted = self

        def all_to_all(self: TorchCollectives, received: Any, sent: Any, into: Any, out: Any) -> Any:
            splits = out or [sent.numel() // self.world_size] * self.world_size
            counted.calls["even" if not out else "uneven"] += 1
            counted.sent_bytes += sum(n for peer, n in enumerate(splits) if peer != self.rank) * sent.itemsize
            counted.dtypes.add(sent.dtype)
            counted.in_flight += 1
            counted.most_in_flight = max(counted.most_in_flight, counted.in_flight)
            pending = counted.original(self, received, sent, into, out)
            waiting = pending.wait

            class Waited:
                def wait(self) -> Any:
                    counted.in_flight -= 1
                    return waiting()

            return Waited()

        TorchCollectives.all_to_all = all_to_all
        return self

    def __exit__(self, *error: object) -> None:
        TorchCollectives.all_to_all = self.original

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "original"}


def count_steps(sharding: str, options: dict[str, Any]) -> tuple[float, Counted, list[int], list[Any]]:
    """Difference to the twin after two steps, what was sent in them, the plan's figures, and matrices computed here."""
    sharded = shard(sharding, "fp32")
    optimizer, twin = layer_wise(sharded.model, **options), Twin(sharded.model)
    plans = [stepper.plan for stepper in optimizer._steppers]
    ranks = [stepper.collectives.rank for stepper in optimizer._steppers]
    planned = sum(plan.wire_bytes()[rank] for plan, rank in zip(plans, ranks))
    computed = []
    original = muon.newton_schulz

    def newton_schulz(matrices: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        computed.append(tuple(matrices.shape))
        return original(matrices, **kwargs)

    with Counted() as counted:
        for step in range(2):
            backward(sharded, step)
            twin.step_with_gradients_of(sharded.model)
            muon.newton_schulz = newton_schulz
            try:
                optimizer.step()
            finally:
                muon.newton_schulz = original
            optimizer.zero_grad()
    buckets = sum(len(plan.buckets) for plan in plans)
    trips = sum(plan.trips(bucket) for plan in plans for bucket in range(len(plan.buckets)))
    return twin.difference(sharded.model), counted, [planned, buckets, trips], computed


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sharding", ["rows", "hybrid", "tensor parallel"])
def test_bytes_and_calls_are_those_of_the_plan(ranks: RankPool, sharding: str, options: dict[str, Any]) -> None:
    for difference, counted, (planned, buckets, trips), _ in ranks.run(count_steps, sharding, options):
        assert difference == 0.0
        assert counted.sent_bytes == 2 * planned, "two steps"
        assert sum(counted.calls.values()) == 2 * trips, "two steps"
        assert trips == 2 * buckets or sharding == "hybrid", "only copies may be at their owner already"
        assert counted.dtypes == {torch.bfloat16}
        assert counted.in_flight == 0
        assert counted.most_in_flight <= 3
        if options["layout"] != "auto":
            assert set(counted.calls) == {"even" if options["layout"] == "padded" else "uneven"}
        if buckets > 3 and sharding == "rows":
            assert counted.most_in_flight >= 2


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
@pytest.mark.parametrize("sharding", ["rows", "hybrid", "columns"])
def test_every_matrix_is_computed_once_in_all(ranks: RankPool, sharding: str) -> None:
    """Also with copies: the work is split over the replicas, not repeated in each."""
    answers = ranks.run(count_steps, sharding, {})
    everywhere = [shape for answer in answers for shape in answer[3]]
    assert len(everywhere) == 2 * 4, "two steps of four matrices"
    assert sum(bool(answer[3]) for answer in answers) >= 3, "on nearly as many ranks"


@pytest.mark.parametrize("ranks", [3], indirect=True, ids=["3ranks"])
def test_fp32_on_the_wire_gives_the_same_bits_for_twice_the_bytes(ranks: RankPool) -> None:
    narrow = ranks.run(count_steps, "rows", {})
    wide = ranks.run(count_steps, "rows", {"exchange_dtype": "float32"})
    for (_, at_bf16, *_), (difference, at_fp32, *_) in zip(narrow, wide):
        assert difference == 0.0
        assert at_fp32.sent_bytes == 2 * at_bf16.sent_bytes
        assert at_fp32.dtypes == {torch.float32}


def batched_difference() -> float:
    """Stepped one by one, and with equal shapes together as on an accelerator; fp32, because batched sums differ."""
    results = []
    for batch_numel in (0, 10**6):
        sharded = shard("columns", "fp32")
        optimizer = layer_wise(sharded.model, ns_dtype="float32")
        for stepper in optimizer._steppers:
            stepper.stepper._batch_numel = batch_numel
        for step in range(3):
            backward(sharded, step)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights_of(sharded.model))
    return max(float((results[0][name] - results[1][name]).abs().max()) for name in results[0])


@pytest.mark.parametrize("ranks", [2], indirect=True, ids=["2ranks"])
def test_equal_shapes_go_through_the_rule_together(ranks: RankPool) -> None:
    assert max(ranks.run(batched_difference)) < 1e-6


def state_elements() -> tuple[int, int]:
    """Elements of Muon's state that this rank keeps, and those of its shards of the matrices."""
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    kept = shards = 0
    for param, state in optimizer.state.items():
        if "momentum_buffer" in state:
            kept += state["momentum_buffer"].to_local().numel()
            shards += param.to_local().numel()
    return kept, shards


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
def test_state_is_sharded_as_the_parameters(ranks: RankPool) -> None:
    answers = ranks.run(state_elements)
    assert all(kept == shards for kept, shards in answers)
    assert sum(kept for kept, _ in answers) == 63 * 24 + 41 * 63 + 24 * 41 + 2 * 5


def communicators() -> tuple[bool, bool]:
    """Whether the exchange has a process group of its own, and whether a second optimizer shares it."""
    sharded = shard("rows", "fp32")
    first, second = (layer_wise(sharded.model)._steppers[0].collectives.group for _ in range(2))
    return first is not dist.group.WORLD, first is second


def test_the_exchange_has_a_communicator_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(communicators) == [(True, True)] * 2
