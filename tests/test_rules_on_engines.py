"""Every rule on every engine trains what it trains on one process, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import backward, copy_gradients, named, new_model, shard
from tests.models import UnevenLM
from tests.owned import BUCKET_MB, difference, exact_sums, step_alone, train
from tests.ranks import RankPool
from tests.rules import CAUTIOUS, ELEMENTWISE, SECTIONS, RuleReference
from tests.zero import ROWS, engine_for, full_weights, largest_difference
from tests.zero import train as train_engine

STEPS = 5
both_sizes = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])
every_rule = pytest.mark.parametrize("rule", SECTIONS)
every_elementwise_rule = pytest.mark.parametrize("rule", [name for name in ELEMENTWISE if name != "adamw"])
EVERY = {**ELEMENTWISE, **CAUTIOUS}
# torch's fused loop over vectors rounds otherwise than what it does with the last few elements, and which those are
# depends on how parameters are cut.
ALLOWED = {"adamw, fused": 1e-7}


def ds_config(stage: int, matrix: str, elementwise: str, **options: Any) -> dict[str, Any]:
    params = {"matrix": SECTIONS[matrix], "elementwise": EVERY[elementwise], "report": False, **options}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
        "optimizer": {"type": "LayerWise", "params": params},
        "steps_per_print": 1_000_000,
    }


def differ_on_zero(stage: int, matrix: str, elementwise: str = "adamw", **options: Any) -> float:
    """All ranks train on the same rows, so that the mean gradient has the bits of one process's."""
    return differ_with(ds_config(stage, matrix, elementwise, **options), matrix, elementwise)


def differ_in_sub_groups(elementwise: str) -> float:
    settings = ds_config(3, "muon", elementwise)
    settings["zero_optimization"]["sub_group_size"] = 1000
    return differ_with(settings, "muon", elementwise)


def differ_with(settings: dict[str, Any], matrix: str, elementwise: str) -> float:
    reference = RuleReference(matrix, elementwise)
    with engine_for(settings) as engine:
        train_engine(engine, STEPS, same_rows=True)
        reference.train(STEPS)
        return largest_difference(full_weights(engine), reference.model)


@both_sizes
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@every_rule
def test_zero(ranks: RankPool, stage: int, rule: str) -> None:
    assert set(ranks.run(differ_on_zero, stage, rule, bucket_numel=2000)) == {0.0}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("rule", ["adamuon", "soap"])
def test_zero_when_matrices_travel(ranks: RankPool, stage: int, rule: str) -> None:
    assert set(ranks.run(differ_on_zero, stage, rule, policy="balance", bucket_numel=2000)) == {0.0}


@both_sizes
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@every_elementwise_rule
def test_zero_elementwise(ranks: RankPool, stage: int, rule: str) -> None:
    assert max(ranks.run(differ_on_zero, stage, "muon", rule)) <= ALLOWED.get(rule, 0.0)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("rule", ["normuon", "soap"])
def test_owned_storage_in_deepspeed(ranks: RankPool, stage: int, rule: str) -> None:
    assert set(ranks.run(differ_on_zero, stage, rule, storage="owned")) == {0.0}


def owned_optimizer(model: torch.nn.Module, matrix: str, elementwise: str = "adamw", **options: Any) -> Any:
    settings = {"bucket_mb": BUCKET_MB, "report": False, **options}
    return LayerWiseOptimizer(model, SECTIONS[matrix], elementwise=EVERY[elementwise], **settings)


def differ_owned(matrix: str, elementwise: str = "adamw", **options: Any) -> float:
    """Gradients are rounded so that their sums are exact."""
    world_size = dist.get_world_size()
    model = exact_sums(UnevenLM())
    train(model, owned_optimizer(model, matrix, elementwise, **options), STEPS, accumulation=2)
    single = RuleReference(matrix, elementwise, exact_sums(UnevenLM()))
    for step in range(STEPS):
        step_alone(single, step, world_size, accumulation=2)
    return difference(model, single.model)


@both_sizes
@pytest.mark.parametrize("layout", ["padded", "compact"])
@every_rule
def test_owned(ranks: RankPool, layout: str, rule: str) -> None:
    assert set(ranks.run(differ_owned, rule, layout=layout)) == {0.0}


@both_sizes
@every_elementwise_rule
def test_owned_elementwise(ranks: RankPool, rule: str) -> None:
    assert max(ranks.run(differ_owned, "muon", rule)) <= ALLOWED.get(rule, 0.0)


@pytest.mark.parametrize("rule", ["counts in its group", "lion"])
def test_zero_3_in_several_sub_groups(ranks: RankPool, rule: str) -> None:
    """DeepSpeed steps each by itself."""
    assert set(ranks.run(differ_in_sub_groups, rule)) == {0.0}


@pytest.mark.parametrize("ranks", [1], indirect=True)
@every_rule
def test_plain_on_one_rank(ranks: RankPool, rule: str) -> None:
    assert ranks.run(differ_owned, rule) == [0.0]


def differ_on_fsdp2(sharding: str, matrix: str, elementwise: str, attach: bool) -> float:
    """One process is given the whole gradients that FSDP2 has reduced."""
    sharded = shard(sharding, "fp32")
    optimizer = fsdp2.LayerWiseOptimizer(
        sharded.model, SECTIONS[matrix], elementwise=EVERY[elementwise], report=False, bucket_matrices=2
    )
    if attach:
        optimizer.attach(sharded.model)
    single = RuleReference(matrix, elementwise, new_model(sharding, "fp32"))
    theirs = dict(single.model.named_parameters())
    for step in range(STEPS):
        backward(sharded, step)
        copy_gradients(sharded.model, single.model)
        for one in (single.muon, single.adamw, optimizer):
            one.step()
            one.zero_grad()
    found = {
        name: param.full_tensor() if isinstance(param, DTensor) else param.detach()
        for name, param in named(sharded.model)
    }
    return max(float((found[name] - theirs[name].detach()).abs().max()) for name in theirs)


@both_sizes
@every_rule
def test_fsdp2(ranks: RankPool, rule: str) -> None:
    assert set(ranks.run(differ_on_fsdp2, "rows", rule, "adamw", False)) == {0.0}


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("sharding", ["hybrid", "columns", "tensor parallel"])
@pytest.mark.parametrize("rule", ["sum, coupled", "normuon", "soap"])
def test_fsdp2_shardings(ranks: RankPool, sharding: str, rule: str) -> None:
    assert set(ranks.run(differ_on_fsdp2, sharding, rule, "adamw", False)) == {0.0}


@pytest.mark.parametrize("rule", ["sum, coupled", "adamuon", "soap"])
def test_fsdp2_attached(ranks: RankPool, rule: str) -> None:
    assert set(ranks.run(differ_on_fsdp2, "rows", rule, "adamw", True)) == {0.0}


@both_sizes
@every_elementwise_rule
def test_fsdp2_elementwise(ranks: RankPool, rule: str) -> None:
    assert max(ranks.run(differ_on_fsdp2, "rows", "muon", rule, False)) <= ALLOWED.get(rule, 0.0)


# Cautious decay of the element-wise rules, one cell per storage


@pytest.mark.parametrize("rule", CAUTIOUS)
@pytest.mark.parametrize(("stage", "storage"), [(0, "zero"), (2, "zero"), (1, "owned")])
def test_cautious_decay_on_zero(ranks: RankPool, stage: int, storage: str, rule: str) -> None:
    assert ranks.run(differ_on_zero, stage, "muon", rule, storage=storage) == [0.0, 0.0]


@pytest.mark.parametrize("rule", CAUTIOUS)
def test_cautious_decay_in_several_sub_groups(ranks: RankPool, rule: str) -> None:
    assert ranks.run(differ_in_sub_groups, rule) == [0.0, 0.0]


@pytest.mark.parametrize("rule", CAUTIOUS)
def test_cautious_decay_in_plain_pytorch(ranks: RankPool, rule: str) -> None:
    assert ranks.run(differ_owned, "muon", rule) == [0.0, 0.0]


@pytest.mark.parametrize("rule", CAUTIOUS)
def test_cautious_decay_on_fsdp2(ranks: RankPool, rule: str) -> None:
    assert ranks.run(differ_on_fsdp2, "rows", "muon", rule, False) == [0.0, 0.0]
