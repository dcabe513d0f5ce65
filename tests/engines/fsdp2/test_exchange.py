"""What FSDP2 sends and when, in a step and in backward, in which dtype, and who does the work."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pytest import MonkeyPatch

from lwopt_backend.rules import muon
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support.cells import cells
from tests.support.counted import Counted
from tests.support.fsdp2 import BesideTwin, layer_wise, shard
from tests.support.on_ranks import on_ranks
from tests.support.ranks import gathered


def counted_steps(sharding: str, **options: Any) -> tuple[BesideTwin, Counted, list[tuple[int, ...]]]:
    """Two steps, what was sent in them, and the shapes of the matrices that were computed here."""
    run, computed, original = BesideTwin(sharding, **options), [], muon.newton_schulz

    def newton_schulz(matrices: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        computed.append(tuple(matrices.shape))
        return original(matrices, **kwargs)

    with Counted() as counted, MonkeyPatch.context() as patch:
        patch.setattr(muon, "newton_schulz", newton_schulz)
        run.train(2)
    run.check()
    return run, counted, computed


@on_ranks(4)
@cells(
    lambda sharding, bucket: "share_copies" not in bucket or sharding == "hybrid",
    sharding=["rows", "hybrid", "columns", "tensor parallel"],
    bucket=[{}, {"bucket_matrices": 1}, {"bucket_numel": 1}, {"share_copies": False}],
)
def test_bytes_and_calls_are_those_of_the_plan(sharding: str, bucket: dict[str, int]) -> None:
    """Every matrix is computed once. Also with copies: the work is split over the replicas, not repeated in each, and
    no exchange is of all ranks. With ``share_copies=False`` each of the replicas does all of it, and sends the others
    nothing."""
    run, counted, computed = counted_steps(sharding, **bucket)
    steppers = run.optimizer._steppers
    plans = [stepper.plan for stepper in steppers]
    planned = sum(each.plan.of_mesh(each.plan.wire_bytes())[each.collectives.rank] for each in steppers)
    buckets = sum(len(plan.buckets) for plan in plans)
    trips = sum(plan.trips(number) for plan in plans for number in range(len(plan.buckets)))
    assert counted.sent_bytes == 2 * planned and counted.calls.total() == 2 * trips, "two steps"
    assert counted.dtypes == {torch.bfloat16} and counted.in_flight == 0
    row, column = dist.get_rank() // 2 * 2, dist.get_rank() % 2
    if "share_copies" in bucket:
        assert counted.groups == {(row, row + 1)} and trips == 2 * buckets
    elif sharding == "hybrid":
        assert counted.groups == {(row, row + 1), (column, column + 2)} and counted.calls["gathered"] == 2 * buckets
        assert counted.most_in_flight <= 4, "what is passed on as well"
    else:
        assert trips == 2 * buckets and counted.most_in_flight <= 3
    if buckets > 3 and sharding == "rows":
        assert counted.most_in_flight >= 2
    if sharding != "tensor parallel":
        everywhere = gathered(computed)
        times = 2 if "share_copies" in bucket else 1
        assert sum(map(len, everywhere)) == times * 2 * 4, "two steps of four matrices"
        assert bucket or sum(map(bool, everywhere)) >= 3, "on nearly as many ranks"


@on_ranks(3)
def test_fp32_exchange_is_twice_the_bytes_and_equal_bits() -> None:
    """fp32 on the wire gives the same bits for twice the bytes."""
    (_, narrow, _), (_, wide, _) = counted_steps("rows"), counted_steps("rows", exchange_dtype="float32")
    assert wide.sent_bytes == 2 * narrow.sent_bytes
    assert wide.dtypes == {torch.float32}


@on_ranks(4)
def test_state_is_sharded_as_the_parameters() -> None:
    states = layer_wise(shard("rows", "fp32").model).state
    momenta = [(p.to_local(), s["momentum_buffer"].to_local()) for p, s in states.items() if "momentum_buffer" in s]
    assert all(param.shape == momentum.shape for param, momentum in momenta)
    assert sum(gathered(sum(len(momentum.flatten()) for _, momentum in momenta))) == 63 * 24 + 41 * 63 + 24 * 41 + 2 * 5


@on_ranks(2)
def test_optimizers_share_one_communicator() -> None:
    """The exchange has a communicator of its own, which optimizers share."""
    model = shard("rows", "fp32").model
    first, second = (layer_wise(model)._steppers[0].collectives.group for _ in range(2))
    assert first is not dist.group.WORLD and first is second


@on_ranks(2)
def test_flags_of_a_step_are_waited_for_where_nobody_reads_them() -> None:
    """On a GPU, other tensors would get their memory while NCCL reduces into it."""
    run, works, start = BesideTwin(), list[Any](), TorchCollectives.all_reduce_max

    def started(self: TorchCollectives, values: torch.Tensor) -> Any:
        works.append(mock.Mock(wraps=start(self, values)))
        return works[-1]

    run.train(1)  # its step compares options, and reads
    with mock.patch.object(TorchCollectives, "all_reduce_max", started):
        run.backward(1)
        run.optimizer.step()
    assert works and all(work.wait.called for work in works)
