"""Sequence parallelism: ranks that share a sequence are ranks like others to the optimizer, with summed gradients.

DeepSpeed replicates parameters over the ranks of a sequence and shards as over data-parallel ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from tests.cells import cells
from tests.engines import ExactLM
from tests.models import batch
from tests.ranks import RankPool
from tests.zero import (
    ROWS,
    Reference,
    build,
    config,
    engine_for,
    full_weights,
    largest_difference,
    newton_schulz_in_float32,
    settings_for,
)

SHARING, STEPS, TIME = 2, 5, 8  # ranks of a sequence; two ranks have one sequence, four have two


@pytest.fixture
def sequence_ranks(ranks: RankPool) -> Iterator[RankPool]:
    """Ranks, and a new world after them: DeepSpeed keeps their groups in globals of the process."""
    yield ranks
    ranks.renew()


@contextlib.contextmanager
def sharing_engine(settings: dict[str, Any], model: nn.Module | None = None) -> Iterator[Any]:
    """An engine on ranks of which two share a sequence."""
    parallel_state_sp._release_sequence_parallel_groups()
    parallel_state_sp.initialize_sequence_parallel(SHARING)
    try:
        with engine_for(settings, model, mpu=parallel_state_sp) as engine:
            yield engine
    finally:
        parallel_state_sp._release_sequence_parallel_groups()


def settings_of(
    storage: str, stage: int, precision: str = "fp32", *, accumulation: int = 1, **kwargs: Any
) -> dict[str, Any]:
    rows = ROWS // (torch.distributed.get_world_size() // SHARING)
    return settings_for(storage, stage, precision, rows=rows, accumulation=accumulation, **kwargs)


def shares(step: int, accumulation: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """A rank's micro-batches: the rows of its sequences, and its half of their time."""
    sequences = torch.distributed.get_world_size() // SHARING
    tokens, targets = (
        [part.chunk(SHARING, 1)[rank % SHARING] for part in t.chunk(accumulation * sequences)]
        for t in batch(step, ROWS, TIME)
    )
    chosen = slice(rank // SHARING, None, sequences)
    return list(zip(tokens[chosen], targets[chosen]))


def backward(engine: Any, step: int) -> None:
    """The loss is the mean over a sequence, of which this rank has an equal part."""
    for number, share in enumerate(shares(step, engine.gradient_accumulation_steps(), torch.distributed.get_rank())):
        if number:
            engine.step()
        engine.backward(engine(*share) / SHARING)


def differ_given_the_reduced_gradients(stage: int, precision: str, folder: str) -> tuple[list[float], int, int]:
    """From one process, and from the same of a run that was saved after three steps and went on."""
    settings = settings_of("zero", stage, precision)
    with sharing_engine(settings) as engine:
        single = Reference()
        single.model.load_state_dict(full_weights(engine))
        for step in range(STEPS):
            if step == 3:
                engine.save_checkpoint(folder, tag="middle")
            backward(engine, step)
            for (_, param), (_, own) in zip(engine.module.named_parameters(), single.model.named_parameters()):
                own.grad = (param.grad if stage == 0 else safe_get_full_grad(param)).float().clone()
            single.step()
            engine.step()
        plan = engine.basic_optimizer._binding.plans[0]
        differences = [largest_difference(full_weights(engine), single.model)]
    with sharing_engine(settings) as engine:
        backward(engine, 7)  # what it had before must not matter
        engine.step()
        engine.load_checkpoint(folder, tag="middle")
        for step in range(3, STEPS):
            backward(engine, step)
            engine.step()
        differences.append(largest_difference(full_weights(engine), single.model))
    return differences, plan.layout.world_size, len(plan.matrices.buckets)


@cells(
    lambda stage, precision, ranks=2: {"bf16": stage > 0, "bf16+fp32": stage == 2}.get(precision, True),
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32"],
    ranks=[2, 4],
)
def test_parameters_have_the_bits_of_torch_muon_given_the_same_gradients_and_resume(
    sequence_ranks: RankPool, tmp_path: Path, stage: int, precision: str
) -> None:
    found = sequence_ranks.run(differ_given_the_reduced_gradients, stage, precision, str(tmp_path))
    for differences, sharers, buckets in found:
        assert differences == [0.0, 0.0]
        assert sharers == sequence_ranks.world_size and buckets >= 1


def differ_from_whole_batch(stage: int, accumulation: int, clip: float) -> tuple[float, list[tuple[float, float]]]:
    single = Reference()
    norms = []
    settings = settings_of("zero", stage, accumulation=accumulation, clip=clip, ns_dtype="float32")
    # With its default at stage 3 DeepSpeed averages the gradients over the ranks of a sequence, with AdamW, too; all
    # other stages, and this setting, sum them.
    settings["zero_optimization"]["reduce_scatter"] = stage != 3
    with sharing_engine(settings) as engine, newton_schulz_in_float32():
        for step in range(STEPS):
            backward(engine, step)
            engine.step()
            single.model(*batch(step, ROWS, TIME)).backward()
            norms.append((float(engine.get_global_grad_norm()), single.step(clip)))
        return largest_difference(full_weights(engine), single.model), norms


@cells(ranks=[2, 4], stage=[0, 1, 2, 3], how=[(1, 0.0), (2, 0.5)])
def test_parameters_and_norms_equal_a_single_process_on_the_whole_batch(
    sequence_ranks: RankPool, stage: int, how: tuple[int, float]
) -> None:
    accumulation, clip = how
    for difference, norms in sequence_ranks.run(differ_from_whole_batch, stage, accumulation, clip):
        assert difference <= 1e-6
        assert all(ours == pytest.approx(truth, rel=1e-5) for ours, truth in norms)
        assert clip == 0.0 or all(truth > clip for _, truth in norms), "the clip must bite to be tested"


def differ_with_owned_storage(stage: int, prescale: bool) -> float:
    world_size = torch.distributed.get_world_size()
    settings = settings_of("owned", stage) | {"prescale_gradients": prescale}
    single = Reference(ExactLM())
    with sharing_engine(settings, ExactLM()) as engine:
        for step in range(STEPS):
            backward(engine, step)
            engine.step()
            for rank in range(world_size):
                (single.model(*shares(step, 1, rank)[0]) / SHARING).backward()
            for param in single.model.parameters():
                param.grad.div_(world_size // SHARING)
            single.step()
        return largest_difference(full_weights(engine), single.model)


@cells(ranks=[2, 4], stage=[0, 1, 2], prescale=[False, True])
def test_owned_storage_equals_one_process_on_whole_sequences(
    sequence_ranks: RankPool, stage: int, prescale: bool
) -> None:
    assert set(sequence_ranks.run(differ_with_owned_storage, stage, prescale)) == {0.0}


def build_at_stage_1() -> None:
    with sharing_engine(settings_of("zero", 1, "bf16+fp32")):
        pass


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_fp32_accumulation_at_stage_1_is_refused(sequence_ranks: RankPool) -> None:
    for error in sequence_ranks.errors(build_at_stage_1):
        assert "sequence parallelism of 2 with bf16 and fp32 accumulation at stage 1, where DeepSpeed counts" in error


def test_sequence_parallelism_by_mesh_is_refused(ranks_to_spoil: RankPool) -> None:
    for error in ranks_to_spoil.errors(build, config(2), mesh_param=(1, 2)):
        assert "sequence parallelism of 2 comes from mesh_param, with which DeepSpeed does not reduce" in error


def gradients_on_a_mesh() -> float:
    """How far apart the gradients are that DeepSpeed reduced on the two ranks of a sequence, with its own AdamW."""
    settings = config(2) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    with engine_for(settings, mesh_param=(1, 2)) as engine:
        tokens, targets = (part.chunk(2, 1)[torch.distributed.get_rank()] for part in batch(0, ROWS, TIME))
        engine.backward(engine(tokens, targets))
        found: list[Any] = [None, None]
        torch.distributed.all_gather_object(found, safe_get_full_grad(engine.module.gate.weight))
        return float((found[0] - found[1]).abs().max())


def test_deepspeed_does_not_reduce_over_a_mesh_of_sequences(ranks_to_spoil: RankPool) -> None:
    assert min(ranks_to_spoil.run(gradients_on_a_mesh)) > 1e-4, "DeepSpeed reduces them now: lift the refusal"
