"""Sequence parallelism: ranks that share a sequence are ranks like others to the optimizer, with summed gradients.

DeepSpeed replicates parameters over the ranks of a sequence and shards as over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from tests.models import batch
from tests.ranks import RankPool
from tests.zero import ROWS, Reference, config, engine_for, full_weights, largest_difference, newton_schulz_in_float32

SEQUENCE_PARALLEL, STEPS, TIME = 2, 5, 8
BF16 = {"bf16": {"enabled": True}}
MORE = {"fp32": {}, "bf16": BF16, "bf16 + fp32": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}}


@pytest.fixture(scope="module", params=[2, 4], ids=["1 sequence", "2 sequences"])
def sequence_ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks of this file's own, of which two share a sequence: DeepSpeed keeps these groups in globals."""
    pool = RankPool(request.param)
    yield pool
    pool.remove()


def sharing_engine(settings: dict[str, Any]) -> Any:
    """An engine on ranks of which two share a sequence."""
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(SEQUENCE_PARALLEL)
    return engine_for(settings, mpu=parallel_state_sp)


def settings_for(stage: int, precision: str = "fp32", *, accumulation: int = 1, **kwargs: Any) -> dict[str, Any]:
    sequences = torch.distributed.get_world_size() // SEQUENCE_PARALLEL
    settings = config(stage, rows=ROWS // sequences // accumulation, accumulation=accumulation, **kwargs)
    return settings | MORE[precision]


def shares(step: int, accumulation: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's micro-batches: the rows of its sequences, and its half of their time."""
    rank, sequences = torch.distributed.get_rank(), torch.distributed.get_world_size() // SEQUENCE_PARALLEL
    tokens, targets = (
        [part.chunk(SEQUENCE_PARALLEL, 1)[rank % SEQUENCE_PARALLEL] for part in t.chunk(accumulation * sequences)]
        for t in batch(step, ROWS, TIME)
    )
    chosen = slice(rank // SEQUENCE_PARALLEL, None, sequences)
    return list(zip(tokens[chosen], targets[chosen]))


def backward(engine: Any, step: int) -> None:
    """The loss is the mean over a sequence, of which this rank has an equal part."""
    for number, share in enumerate(shares(step, engine.gradient_accumulation_steps())):
        if number:
            engine.step()
        engine.backward(engine(*share) / SEQUENCE_PARALLEL)


def differ_given_the_reduced_gradients(stage: int, precision: str) -> tuple[float, int, int]:
    policy = "balance" if stage in (1, 2) else "auto"
    settings = settings_for(stage, precision, policy=policy, bucket_numel=2000)
    with sharing_engine(settings) as engine:
        reference = Reference()
        reference.model.load_state_dict(full_weights(engine))
        for step in range(STEPS):
            backward(engine, step)
            for (_, param), (_, copy) in zip(engine.module.named_parameters(), reference.model.named_parameters()):
                copy.grad = (param.grad if stage == 0 else safe_get_full_grad(param)).float().clone()
            for optimizer in (reference.muon, reference.adamw):
                optimizer.step()
            engine.step()
        plan = engine.basic_optimizer._binding.plans[0]
        difference = largest_difference(full_weights(engine), reference.model)
        return difference, plan.layout.world_size, len(plan.matrices.buckets)


@pytest.mark.parametrize(
    ("stage", "precision"), [*((s, "fp32") for s in range(4)), *((s, "bf16") for s in (1, 2, 3)), (2, "bf16 + fp32")]
)
def test_parameters_have_the_bits_of_torch_muon_given_the_same_gradients(
    sequence_ranks: RankPool, stage: int, precision: str
) -> None:
    for difference, sharers, buckets in sequence_ranks.run(differ_given_the_reduced_gradients, stage, precision):
        assert difference == 0.0
        assert sharers == sequence_ranks.world_size and buckets >= 1


def differ_from_whole_batch(stage: int, accumulation: int, clip: float) -> tuple[float, list[tuple[float, float]]]:
    reference = Reference()
    norms = []
    settings = settings_for(stage, accumulation=accumulation, clip=clip, ns_dtype="float32")
    # With its default at stage 3 DeepSpeed averages the gradients over the ranks of a sequence, with AdamW, too; all
    # other stages, and this setting, sum them.
    settings["zero_optimization"]["reduce_scatter"] = stage != 3
    with sharing_engine(settings) as engine, newton_schulz_in_float32():
        for step in range(STEPS):
            backward(engine, step)
            engine.step()
            reference.model(*batch(step, ROWS, TIME)).backward()
            truth = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), clip or float("inf"))
            norms.append((float(engine.get_global_grad_norm()), float(truth)))
            for optimizer in (reference.muon, reference.adamw):
                optimizer.step()
                optimizer.zero_grad()
        return largest_difference(full_weights(engine), reference.model), norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (2, 0.5)])
def test_parameters_and_norms_equal_a_single_process_on_the_whole_batch(
    sequence_ranks: RankPool, stage: int, accumulation: int, clip: float
) -> None:
    for difference, norms in sequence_ranks.run(differ_from_whole_batch, stage, accumulation, clip):
        assert difference <= 1e-6
        assert all(ours == pytest.approx(truth, rel=1e-5) for ours, truth in norms)
        assert clip == 0.0 or all(truth > clip for _, truth in norms), "the clip must bite to be tested"


def resumed_in_the_middle(stage: int, folder: str) -> float:
    def run(engine: Any, steps: range) -> None:
        for step in steps:
            backward(engine, step)
            engine.step()

    settings = settings_for(stage)
    with sharing_engine(settings) as engine:
        run(engine, range(3))
        engine.save_checkpoint(folder, tag="middle")
        run(engine, range(3, STEPS))
        without_a_break = full_weights(engine)
    with sharing_engine(settings) as engine:
        run(engine, range(7, 8))  # what it had before must not matter
        engine.load_checkpoint(folder, tag="middle")
        run(engine, range(3, STEPS))
        resumed = full_weights(engine)
    return max(float((without_a_break[name] - weight).abs().max()) for name, weight in resumed.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_resumes_with_the_same_bits(sequence_ranks: RankPool, stage: int, tmp_path: Path) -> None:
    assert set(sequence_ranks.run(resumed_in_the_middle, stage, str(tmp_path))) == {0.0}


def build(stage: int, precision: str) -> None:
    with sharing_engine(settings_for(stage, precision)):
        pass


def test_fp32_accumulation_at_stage_1_is_refused(sequence_ranks: RankPool) -> None:
    for error in sequence_ranks.errors(build, 1, "bf16 + fp32"):
        assert "sequence parallelism of 2 with bf16 and fp32 accumulation at stage 1, where DeepSpeed counts" in error


def build_on_a_mesh() -> None:
    with engine_for(config(2), mesh_param=(1, 2)):
        pass


def test_sequence_parallelism_by_mesh_is_refused(ranks_to_spoil: RankPool) -> None:
    for error in ranks_to_spoil.errors(build_on_a_mesh):
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
