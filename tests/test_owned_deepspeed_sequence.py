"""Owned storage where ranks share a sequence: their gradients are summed, and all of them share the parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import Tensor

from tests.models import UnevenLM, batch
from tests.owned import ROWS, difference, exact_sums
from tests.owned_deepspeed import config
from tests.ranks import RankPool
from tests.zero import Reference, engine_for

SHARING, STEPS, TIME = 2, 4, 8


@pytest.fixture(scope="module", params=[2, 4], ids=["1 sequence", "2 sequences"])
def sequence_ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks of this file's own, of which two share a sequence: DeepSpeed keeps these groups in globals."""
    pool = RankPool(request.param)
    yield pool
    pool.remove()


def shares(step: int, sequences: int) -> list[tuple[Tensor, Tensor]]:
    """By rank, its sequences' rows and its half of their time."""
    halves = [[part.chunk(SHARING, 1) for part in t.chunk(sequences)] for t in batch(step, ROWS, TIME)]
    tokens, targets = ([half for part in parts for half in part] for parts in halves)
    return list(zip(tokens, targets))


def differ(stage: int, prescale: bool) -> float:
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(SHARING)
    sequences = dist.get_world_size() // SHARING
    settings = config(stage) | {"train_micro_batch_size_per_gpu": ROWS // sequences, "prescale_gradients": prescale}
    single = Reference(exact_sums(UnevenLM()))
    with engine_for(settings, exact_sums(UnevenLM()), mpu=parallel_state_sp) as engine:
        for step in range(STEPS):
            parts = shares(step, sequences)
            engine.backward(engine(*parts[dist.get_rank()]) / SHARING)
            engine.step()
            for part in parts:
                (single.model(*part) / SHARING).backward()
            for param in single.model.parameters():
                param.grad.div_(sequences)
            for optimizer in (single.muon, single.adamw):
                optimizer.step()
                optimizer.zero_grad()
        return difference(engine.module, single.model)


@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_training_equals_one_process_on_whole_sequences(sequence_ranks: RankPool, stage: int, prescale: bool) -> None:
    assert set(sequence_ranks.run(differ, stage, prescale)) == {0.0}
