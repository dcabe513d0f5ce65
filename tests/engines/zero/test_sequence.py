"""Sequence parallelism: ranks that share a sequence are ranks like others to the optimizer, with summed gradients.
DeepSpeed replicates parameters over the ranks of a sequence and shards as over data-parallel ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import Tensor, nn

from tests.support.cells import cells
from tests.support.engines import ExactLM
from tests.support.models import batch
from tests.support.on_ranks import on_ranks
from tests.support.zero import ROWS, Beside, Reference, build, config, engine_for, settings_for

SHARING, TIME = 2, 8  # ranks of a sequence; two ranks have one sequence, four have two


@contextlib.contextmanager
def sharing_engine(settings: dict[str, Any], model: nn.Module | None = None) -> Iterator[Any]:
    parallel_state_sp._release_sequence_parallel_groups()
    parallel_state_sp.initialize_sequence_parallel(SHARING)
    try:
        with engine_for(settings, model, mpu=parallel_state_sp) as engine:
            yield engine
    finally:
        parallel_state_sp._release_sequence_parallel_groups()


def settings_of(storage: str, stage: int, precision: str = "fp32", **options: Any) -> dict[str, Any]:
    return settings_for(storage, stage, precision, rows=ROWS // (dist.get_world_size() // SHARING), **options)


def shares(step: int, accumulation: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    sequences = dist.get_world_size() // SHARING
    tokens, targets = (
        [part.chunk(SHARING, 1)[rank % SHARING] for part in t.chunk(accumulation * sequences)]
        for t in batch(step, ROWS, TIME)
    )
    chosen = slice(rank // SHARING, None, sequences)
    return list(zip(tokens[chosen], targets[chosen]))


def train_step(engine: Any, step: int) -> None:
    """The loss is the mean over a sequence, of which this rank has an equal part."""
    for share in shares(step, engine.gradient_accumulation_steps(), dist.get_rank()):
        engine.backward(engine(*share) / SHARING)
        engine.step()


@on_ranks()
@cells(
    lambda stage, precision="fp32", how=(1, 0.0), ranks=2: (
        {"fp32": True, "bf16": stage > 0, "bf16+fp32": stage == 2}[precision] and (precision == "fp32" or not how[1])
    ),
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32"],
    how=[(1, 0.0), (2, 0.5)],
    ranks=[2, 4],
)
def test_bits_given_the_same_gradients(tmp_path: Path, stage: int, precision: str, how: tuple[int, float]) -> None:
    """With its default at stage 3 DeepSpeed averages the gradients over the ranks of a sequence, also with AdamW; all
    other stages, and that setting off, sum them."""
    accumulation, clip = how
    settings = settings_of("zero", stage, precision, accumulation=accumulation, clip=clip)
    averaged = stage == 3 and precision == "bf16"
    settings["zero_optimization"]["reduce_scatter"] = stage < 3 or averaged
    given = {"train_step": train_step, "factor": 1 / SHARING if averaged else 1.0}
    both = Beside(Reference(), settings, whole_batch=lambda step: batch(step, ROWS, TIME), **given)
    engine = both.train_and_resume(lambda: sharing_engine(settings), tmp_path)
    plan = engine.basic_optimizer._binding.plans[0]
    assert plan.layout.world_size == dist.get_world_size() and plan.matrices.buckets


@on_ranks()
@cells(ranks=[2, 4], stage=[0, 1, 2], prescale=[False, True])
def test_owned_storage_equals_one_process_on_whole_sequences(stage: int, prescale: bool) -> None:
    world_size, single = dist.get_world_size(), Reference(ExactLM())
    with sharing_engine(settings_of("owned", stage) | {"prescale_gradients": prescale}, ExactLM()) as engine:
        for step in range(3):
            train_step(engine, step)
            for rank in range(world_size):
                (single.model(*shares(step, 1, rank)[0]) / SHARING).backward()
            for param in single.model.parameters():
                param.grad.div_(world_size // SHARING)
            single.step()
        single.check(engine)


@on_ranks(2, 4)
def test_fp32_accumulation_at_stage_1_is_refused() -> None:
    message = "sequence parallelism of 2 with bf16 and fp32 accumulation at stage 1: DeepSpeed then counts"
    with pytest.raises(ValueError, match=message), sharing_engine(settings_of("zero", 1, "bf16+fp32")):
        pass


@on_ranks(2)
@pytest.mark.usefixtures("ranks_to_spoil")
def test_sequence_parallelism_by_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="of 2 comes from mesh_param: DeepSpeed then does not reduce"):
        build(config(2), mesh_param=(1, 2))
