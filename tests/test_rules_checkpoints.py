"""What rules keep at owners - SOAP's factors, NorMuon's second moments - goes on where it was, on every engine."""

from __future__ import annotations

import copy
import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import backward, shard, weights_of
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.rules import ELEMENTWISE, SECTIONS
from tests.test_fsdp2_checkpoint import assert_equal
from tests.test_fsdp2_checkpoint import load as load_fsdp2
from tests.test_fsdp2_checkpoint import save as save_fsdp2
from tests.test_owned_state import equal, weights
from tests.test_owned_state import model_of as owned_model
from tests.test_owned_state import train as train_owned
from tests.test_rules_on_engines import ds_config, owned_optimizer
from tests.zero import engine_for, full_weights, train

RULES = ["soap", "adamuon", "shampoo", "a class"]
BEFORE, AFTER = 3, 3


# Owned storage: any number of ranks


def part_of_a_run(folder: str, rule: str, steps: range, save: bool = True, **options: Any) -> dict[str, Tensor]:
    """Resume where steps before these ended, train them, and save."""
    model = owned_model("float32", seed=0 if steps.start == 0 else 99)
    optimizer = owned_optimizer(model, rule, **options)
    if steps.start:
        model.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
        optimizer.load_state_dict_from(f"{folder}/optimizer")
    train_owned(model, optimizer, steps)
    if save:
        optimizer.save_state_dict(f"{folder}/optimizer")
        if dist.get_rank() == 0:
            torch.save(weights(model), f"{folder}/model.pt")
    return weights(model)


def pool(rank_pools: dict[int, RankPool], ranks: int) -> RankPool:
    return rank_pools.setdefault(ranks, RankPool(ranks))


@pytest.mark.parametrize("rule", RULES)
def test_owned_storage_resumes_on_other_ranks_and_layouts(
    rank_pools: dict[int, RankPool], tmp_path: Path, rule: str
) -> None:
    legs = [(2, "padded"), (3, "compact"), (1, "padded"), (4, "compact")]
    for number, (ranks, layout) in enumerate(legs):
        steps = range(2 * number, 2 * number + 2)
        found = pool(rank_pools, ranks).run(part_of_a_run, str(tmp_path), rule, steps, layout=layout)[0]
    whole = pool(rank_pools, 1).run(part_of_a_run, "", rule, range(8), save=False)[0]
    assert equal(found, whole)


def continue_from_state_dict(rule: str) -> bool:
    """This rank's own state_dict, loaded into another optimizer, goes on as the first one."""
    model = owned_model("float32", seed=0)
    optimizer = owned_optimizer(model, rule)
    train_owned(model, optimizer, range(BEFORE))
    saved, state = weights(model), optimizer.state_dict()
    state = torch.load(_stored(state), weights_only=True)
    other = owned_model("float32", seed=5)
    again = owned_optimizer(other, rule)
    other.load_state_dict(saved)
    again.load_state_dict(state)
    for trained, by in ((model, optimizer), (other, again)):
        train_owned(trained, by, range(BEFORE, BEFORE + AFTER))
    return equal(weights(model), weights(other))


def _stored(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("rule", RULES)
def test_owned_state_dicts_go_on(ranks: RankPool, rule: str) -> None:
    assert all(ranks.run(continue_from_state_dict, rule))


def memory_counts_it(rule: str) -> tuple[int, int]:
    """State by the report before and after the first step; and the bytes that SOAP's state has."""
    model = owned_model("float32", seed=0)
    optimizer = owned_optimizer(model, rule)
    before = optimizer.memory_report()[dist.get_rank()].state
    train_owned(model, optimizer, range(1))
    return before, optimizer.memory_report()[dist.get_rank()].state - before


def test_the_memory_report_counts_it(ranks: RankPool) -> None:
    """SOAP keeps two moments of the matrix, and a statistic and a basis of every side."""
    grown = sum(more for _, more in ranks.run(memory_counts_it, "soap"))
    shapes = [(63, 24), (41, 63), (24, 41), (1, 5)]
    least = sum(4 * (2 * m * n + 2 * (m * m * (m > 1) + n * n)) for m, n in shapes)
    assert least <= grown <= least * 1.01


# DeepSpeed


def resume_engine(
    folder: str, stage: int, rule: str, options: dict[str, Any], loaded: dict[str, Any] | None = None
) -> float:
    """Train, save and train on; then load into a fresh engine and train on likewise."""
    with engine_for(ds_config(stage, rule, "adamw", **options)) as engine:
        train(engine, BEFORE, same_rows=True)
        engine.save_checkpoint(folder, tag="there")
        train(engine, range(BEFORE, BEFORE + AFTER), same_rows=True)
        expected = full_weights(engine)
    with engine_for(ds_config(stage, rule, "adamw", **(options if loaded is None else loaded)), UnevenLM(7)) as engine:
        engine.load_checkpoint(folder, tag="there")
        train(engine, range(BEFORE, BEFORE + AFTER), same_rows=True)
        found = full_weights(engine)
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_zero_resumes(ranks: RankPool, tmp_path: Path, stage: int, rule: str) -> None:
    assert set(ranks.run(resume_engine, str(tmp_path), stage, rule, {"bucket_numel": 2000})) == {0.0}


def test_zero_resumes_with_other_owners(ranks: RankPool, tmp_path: Path) -> None:
    """What the rank before kept is brought to the new owner."""
    policies = {"policy": "stay"}, {"policy": "balance"}
    assert set(ranks.run(resume_engine, str(tmp_path), 2, "soap", *policies)) == {0.0}


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("rule", ["soap", "adamuon"])
def test_owned_storage_in_deepspeed_resumes(ranks: RankPool, tmp_path: Path, stage: int, rule: str) -> None:
    assert set(ranks.run(resume_engine, str(tmp_path), stage, rule, {"storage": "owned"})) == {0.0}


def save_then_load_stage_0(folder: str, rule: str, save: bool) -> dict[str, Tensor]:
    with engine_for(ds_config(0, rule, "adamw"), UnevenLM(0 if save else 7)) as engine:
        if save:
            train(engine, BEFORE, same_rows=True)
            engine.save_checkpoint(folder, tag="there")
        else:
            engine.load_checkpoint(folder, tag="there")
        train(engine, range(BEFORE, BEFORE + AFTER), same_rows=True)
        return full_weights(engine)


@pytest.mark.parametrize("rule", ["soap", "adamuon"])
def test_stage_0_resumes_on_other_ranks(rank_pools: dict[int, RankPool], tmp_path: Path, rule: str) -> None:
    expected = pool(rank_pools, 2).run(save_then_load_stage_0, str(tmp_path), rule, True)[0]
    for found in pool(rank_pools, 4).run(save_then_load_stage_0, str(tmp_path), rule, False):
        assert equal(found, expected)


# FSDP2: torch.distributed.checkpoint, any number of ranks and any sharding


def fsdp2_optimizer(model: nn.Module, rule: str) -> Any:
    return fsdp2.LayerWiseOptimizer(
        model, SECTIONS[rule], elementwise=ELEMENTWISE["adamw"], report=False, bucket_matrices=2
    )


WAYS = [(2, "rows", 3, "rows"), (4, "hybrid", 2, "rows"), (2, "columns", 4, "tensor parallel"), (3, "rows", 1, "rows")]


@pytest.mark.parametrize("kind", ["nested", "flat", "full", "flat full"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("before", "sharding", "after", "other"), WAYS, ids=str)
def test_fsdp2_resumes_on_other_ranks_and_shardings(
    rank_pools: dict[int, RankPool],
    tmp_path: Path,
    before: int,
    sharding: str,
    after: int,
    other: str,
    rule: str,
    kind: str,
) -> None:
    make = functools.partial(fsdp2_optimizer, rule=rule)
    expected = pool(rank_pools, before).run(save_fsdp2, str(tmp_path), sharding, kind, make)[0]
    for found in pool(rank_pools, after).run(load_fsdp2, str(tmp_path), other, kind, make):
        assert_equal(found, expected)


def saved_before_a_step(folder: str, rule: str) -> float:
    """A checkpoint of an optimizer that has not stepped is that of a fresh one, whatever was tried to know its form."""
    sharded, fresh = shard("rows", "fp32"), shard("rows", "fp32")
    optimizer, other = (fsdp2_optimizer(one.model, rule) for one in (sharded, fresh))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, by in ((sharded, optimizer), (fresh, other)):
        for step in range(2):
            backward(one, step)
            by.step()
            by.zero_grad()
    reference = shard("rows", "fp32")
    untouched = fsdp2_optimizer(reference.model, rule)
    for step in range(2):
        backward(reference, step)
        untouched.step()
        untouched.zero_grad()
    return max(
        float((a[name] - b[name]).abs().max())
        for a, b in [
            (weights_of(sharded.model), weights_of(reference.model)),
            (weights_of(fresh.model), weights_of(reference.model)),
        ]
        for name in a
    )


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_before_the_first_step_is_a_fresh_one(ranks: RankPool, tmp_path: Path, rule: str) -> None:
    assert set(ranks.run(saved_before_a_step, str(tmp_path), rule)) == {0.0}
