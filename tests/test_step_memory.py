"""A step's temporary memory, by the allocator's events: on every engine at most two buckets and one batch, however
many matrices there are."""

import contextlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer
from tests.allocations import allocations
from tests.ranks import RankFailed, RankPool
from tests.zero import config, engine_for

WIDTH = 64
MATRIX = WIDTH * WIDTH  # elements
IN_A_BUCKET = 2  # matrices
BUCKET = 2 * IN_A_BUCKET * MATRIX * 2  # bytes: there and back in 16 bits, what a rank sends of it and what it receives
# One matrix: its direction and its update in fp32; of 16 bits the start of Newton-Schulz, X and its next, the Gram
# matrix and its polynomial. On a CPU a batch is one matrix.
BATCH = (2 * 4 + 5 * 2) * MATRIX
SMALL = 2048  # norms and flags
OWNED = ("owned 0", "owned 1", "owned 2", "plain")  # whose gradients are at their owners before


@contextlib.contextmanager
def made(engine: str, layers: int) -> Iterator[tuple[nn.Module, Any, Any]]:
    """A model of square matrices or its engine, what clears its gradients, and our optimizer, whose step is watched."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    options: dict[str, Any] = {"include": ["*"], "lr": 0.02, "report": False}
    bucket_mb = IN_A_BUCKET * MATRIX * 4 / 2**20
    if engine == "plain":
        optimizer = LayerWiseOptimizer(model, **options, bucket_mb=bucket_mb)
        yield model, optimizer, optimizer
    elif engine == "fsdp2":
        fully_shard(model)
        optimizer = LayerWiseOptimizer(model, **options, bucket_matrices=IN_A_BUCKET)
        yield model, optimizer, optimizer
    else:
        storage, stage = engine.split()
        sizes = {"bucket_mb": bucket_mb} if storage == "owned" else {"bucket_numel": IN_A_BUCKET * MATRIX}
        policy = {"policy": "balance"} if storage == "zero" and stage in "12" else {}
        with engine_for(config(int(stage), storage=storage, include=["*"], **sizes, **policy), model) as built:
            outer = built.optimizer
            yield built, outer, getattr(outer, "optimizer", outer)


def held_by_a_step(engine: str, layers: int) -> int:
    """The most bytes that the third step allocates on top of what there was before it."""
    with made(engine, layers) as (model, optimizer, ours):
        found: list[int] = []
        step = ours.step

        def watched(*args: Any, **kwargs: Any) -> None:
            found.append(allocations(lambda: step(*args, **kwargs), at_least=256).peak)

        ours.step = watched
        for number in range(3):  # state comes to be in the first
            rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(rows).square().mean()
            if isinstance(model, DeepSpeedEngine):
                model.backward(loss)
                model.step()
            else:
                loss.backward()
                ours.step()
                optimizer.zero_grad()
        return found[-1]


def check(engine: str) -> None:
    few, many = (held_by_a_step(engine, layers) for layers in (16, 32))
    assert few == many, "nothing grows with the model"
    assert few + SMALL >= BATCH and few <= BATCH + SMALL + (0 if engine in OWNED else 2 * BUCKET), few / MATRIX


@pytest.mark.parametrize("engine", [*OWNED, "zero 0", "zero 1", "zero 2", "zero 3", "fsdp2"])
def test_a_step_holds_two_buckets_and_a_batch(engine: str, ranks: RankPool) -> None:
    """Tried again where the transport's thread was the last to hold a buffer, as in test_owned_memory.py."""
    for _ in range(2):
        with suppress(RankFailed):
            ranks.run(check, engine)
            return
    ranks.run(check, engine)
