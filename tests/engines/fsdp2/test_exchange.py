"""What FSDP2 sends and when, in a step and in backward, in which dtype, and who does the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch

from lwopt_backend.rules import muon
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support.cells import cells
from tests.support.counted import Counted
from tests.support.fsdp2 import ROWS, BesideTwin, layer_wise, set_sync, shard
from tests.support.models import batch
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
    sharding=["rows", "hybrid", "columns", "tensor parallel"], bucket=[{}, {"bucket_matrices": 1}, {"bucket_numel": 1}]
)
def test_bytes_and_calls_are_those_of_the_plan(sharding: str, bucket: dict[str, int]) -> None:
    """Every matrix is computed once. Also with copies: the work is split over the replicas, not repeated in each, and
    no exchange is of all ranks."""
    run, counted, computed = counted_steps(sharding, **bucket)
    steppers = run.optimizer._steppers
    plans = [stepper.plan for stepper in steppers]
    planned = sum(stepper.plan.wire_bytes()[stepper.collectives.rank] for stepper in steppers)
    buckets = sum(len(plan.buckets) for plan in plans)
    trips = sum(plan.trips(number) for plan in plans for number in range(len(plan.buckets)))
    assert counted.sent_bytes == 2 * planned and counted.calls.total() == 2 * trips, "two steps"
    assert counted.dtypes == {torch.bfloat16} and counted.in_flight == 0
    if sharding == "hybrid":
        row, column = dist.get_rank() // 2 * 2, dist.get_rank() % 2
        assert counted.groups == {(row, row + 1), (column, column + 2)} and counted.calls["gathered"] == 2 * buckets
        assert counted.most_in_flight <= 4, "what is passed on as well"
    else:
        assert trips == 2 * buckets and counted.most_in_flight <= 3
    if buckets > 3 and sharding == "rows":
        assert counted.most_in_flight >= 2
    if sharding != "tensor parallel":
        everywhere = gathered(computed)
        assert sum(map(len, everywhere)) == 2 * 4, "two steps of four matrices"
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


# Exchange that begins in backward


def touch_one_element(run: BesideTwin) -> None:
    """One matrix, on one rank."""
    if dist.get_rank() == 1:
        run.model.layers[2].weight.grad.to_local()[0, 0] += 1.0


def unscale(run: BesideTwin) -> None:
    for param in run.model.parameters():
        param.grad.mul_(0.5)


def change_the_momentum(run: BesideTwin) -> None:
    for optimizer in (run.optimizer, run.twin.optimizers[0]):
        optimizer.param_groups[0]["momentum"] = 0.9


TOUCH: dict[str, Callable[[BesideTwin], object]] = {
    "left alone": lambda run: None,
    "clipped by torch": lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05),
    "clipped by lwopt": lambda run: run.optimizer.clip_grad_norm_(0.05),
    "clipped at a large norm": lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e6),
    "unscaled": unscale,
    "touched in one element": touch_one_element,
    "momentum changed": change_the_momentum,
}


def calls_of(touch: str, steps: int = 3, micro: int = 1, sync: bool = True) -> tuple[list[int], list[int]]:
    """Per step, the all-to-alls that started in backward, and those in the step."""
    run = BesideTwin(attach=True, bucket_matrices=1)
    in_backward, in_step = [], []
    part, parts = run.sharded.part, run.sharded.parts
    for step in range(steps):
        with Counted() as counted:
            for number in range(micro):
                set_sync(run.model, sync or number == micro - 1)
                run.model(*(rows[part::parts] for rows in batch(step * micro + number, ROWS))).backward()
            TOUCH[touch](run)
        in_backward.append(counted.calls.total())
        with Counted() as counted:
            run.update()
        in_step.append(counted.calls.total())
    run.check()
    return in_backward, in_step


ALL = 4  # matrices that travel, each cut by rows


@on_ranks(3, 4)
@cells(touch=["left alone", "clipped at a large norm"])
def test_attached_buckets_leave_in_backward(touch: str) -> None:
    """All buckets leave in backward, and only return in the step."""
    assert calls_of(touch) == ([ALL] * 3, [ALL] * 3)


@on_ranks(2)
@pytest.mark.parametrize(
    ("touch", "again"),
    [("clipped by torch", ALL), ("clipped by lwopt", ALL), ("unscaled", ALL), ("touched in one element", 1)],
)
def test_touched_gradients_are_exchanged_again(touch: str, again: int) -> None:
    """Touched gradients are exchanged again, and then left alone for a while."""
    in_backward, in_step = calls_of(touch, 8)
    assert in_backward == [ALL, 0, ALL, 0, 0, ALL, 0, 0], "pauses of 1, 2 and 4 steps"
    assert in_step[:2] == [ALL + again, 2 * ALL]


@on_ranks(2)
def test_late_hyperparameters_and_micro_batches_count() -> None:
    """Hyperparameters that change before the step, and the last micro-batch, count."""
    in_backward, in_step = calls_of("momentum changed", 2)
    assert (in_backward[0], in_step[0]) == (ALL, 2 * ALL)
    for sync in (True, False):  # with a reduction per micro-batch buckets leave each time; without, once
        assert calls_of("left alone", 3, 2, sync) == ([ALL * (2 if sync else 1)] * 3, [ALL] * 3)


@on_ranks(2)
@cells(how=["skipped", "no gradient at the step", "removed"])
def test_exchange_of_a_step_not_taken_leaves_no_trace(how: str) -> None:
    """What has left for a step that is not taken leaves no trace."""
    run = BesideTwin()
    attachment = run.optimizer.attach(run.model)
    for step in range(4):
        run.backward(step)
        if step == 1 and how == "removed":
            attachment.remove()
        elif step == 1:
            run.optimizer.zero_grad()
            if how == "no gradient at the step":
                run.optimizer.step()
            continue
        run.update()
    run.check()


@on_ranks(2)
def test_nan_is_no_difference() -> None:
    """Gradients that are not numbers travel as they are: equal bits, nothing is exchanged again."""
    run = BesideTwin(attach=True, bucket_matrices=1)
    with torch.no_grad():
        run.model.lm_head.weight.to_local().fill_(float("nan"))
    with Counted() as counted:
        run.backward(0)
        run.optimizer.step()
    assert counted.calls.total() == 2 * ALL
