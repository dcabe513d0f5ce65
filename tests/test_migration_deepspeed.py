"""Going on with ours, under DeepSpeed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lwopt_backend.integrations.deepspeed_state import save_whole
from lwopt_backend.migration import from_checkpoint
from tests import test_zero_moe as moe
from tests import test_zero_pipeline as pipelines
from tests.migration import (
    AFTER,
    BEFORE,
    WRONG,
    both_sizes,
    eager,
    entry,
    forget,
    named_state,
    names_of,
    numbers_for,
    spoil,
)
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import ROWS, Reference, config, engine_for, full_weights, largest_difference
from tests.zero import train as train_engine


def moved_to_engine(engine: Any, single: Reference, **how: Any) -> list[str]:
    from lwopt_backend.integrations import deepspeed_migration

    state = named_state(single.muon, single.adamw, names_of(single.model))
    left = deepspeed_migration.load_named_state(engine, state, **how)
    forget(state)
    return left


def trained_before(steps: int = 3) -> tuple[Reference, UnevenLM]:
    """One process's run, and the model it has come to."""
    single, model = Reference(), UnevenLM()
    single.train(steps)
    model.load_state_dict(single.model.state_dict())
    return single, model


def differ_on_deepspeed(stage: int, **options: Any) -> float:
    """All ranks train on the same rows, so that the mean gradient has the bits of one process's."""
    single, model = trained_before()
    with engine_for(config(stage, rows=ROWS, **options), model) as engine:
        assert moved_to_engine(engine, single) == []
        train_engine(engine, AFTER, same_rows=True)
        single.train(AFTER)
        return largest_difference(full_weights(engine), single.model)


@both_sizes
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_goes_on_bit_by_bit(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(differ_on_deepspeed, stage)) == {0.0}


@pytest.mark.parametrize("stage", [0, 2])
def test_owned_storage_in_deepspeed_goes_on_bit_by_bit(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(differ_on_deepspeed, stage, storage="owned")) == {0.0}


def part_on_deepspeed(stage: int, storage: str) -> float:
    """The run that goes on is this engine's own, but for the momentum of one matrix."""
    single, model = trained_before()
    with engine_for(config(stage, rows=ROWS, storage=storage), copy.deepcopy(model)) as engine:
        moved_to_engine(engine, single)
        train_engine(engine, range(3, 4), same_rows=True)
        single.train(range(3, 4))
        from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

        single.muon.state[single.model.layers[2].weight]["momentum_buffer"].mul_(-2)  # not what the engine has
        state = named_state(single.muon, single.adamw, names_of(single.model))
        left = load(engine, {"layers.2.weight": state["layers.2.weight"]}, strict=False)
        assert sorted(left) == sorted(set(state) - {"layers.2.weight"})
        train_engine(engine, range(4, 6), same_rows=True)
        single.train(range(4, 6))
        return largest_difference(full_weights(engine), single.model)


@pytest.mark.parametrize(
    ("stage", "storage"), [(0, "zero"), (1, "zero"), (2, "zero"), (3, "zero"), (2, "owned")], ids=str
)
def test_a_part_is_loaded_under_deepspeed_between_steps(ranks: RankPool, stage: int, storage: str) -> None:
    assert ranks.run(part_on_deepspeed, stage, storage) == [0.0, 0.0]


def load_wrong_under_deepspeed(stage: int, what: str) -> None:
    single, model = trained_before(1)
    with engine_for(config(stage, rows=ROWS), model) as engine:
        state = named_state(single.muon, single.adamw, names_of(single.model))
        if what == "counters":
            state["lm_head.weight"]["step"] = torch.tensor(9.0)
        spoil(state, what)
        from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

        load(engine, state)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("what", ["unknown", "missing", "keys", "shape", "counters"])
def test_what_does_not_fit_under_deepspeed(ranks: RankPool, stage: int, what: str) -> None:
    counters = "as one tensor with one 'step'; expected the same of all"
    for error in ranks.errors(load_wrong_under_deepspeed, stage, what):
        assert error.startswith("ValueError: load_named_state: ") and {**WRONG, "counters": counters}[what] in error


def state_seen_by_deepspeed(stage: int, precision: str) -> int:
    """How many tensors are not what was given, asked with DeepSpeed's own function."""
    from deepspeed.utils import safe_get_full_optimizer_state

    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    more = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
    more["bf16 + fp32"] = {**more["bf16"], "data_types": {"grad_accum_dtype": "fp32"}}
    with engine_for(config(stage, rows=ROWS) | more[precision]) as engine:
        named_params = dict(engine.module.named_parameters())
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named_params.items()}
        state = numbers_for(shapes, MATRICES.__contains__)
        load(engine, state)
        return sum(
            not torch.equal(safe_get_full_optimizer_state(named_params[name], key), value)
            for name, of_name in state.items()
            for key, value in of_name.items()
            if key != "step"
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 + fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_sees_what_was_loaded(ranks: RankPool, stage: int, precision: str) -> None:
    assert ranks.run(state_seen_by_deepspeed, stage, precision) == [0, 0]


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Four ranks of this file's own: DeepSpeed keeps groups of experts and pipelines in globals of the process."""
    pool = RankPool(4)
    yield pool
    pool.remove()


def load_experts_under_deepspeed() -> None:
    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    with engine_for(moe.settings_for(2), moe.Mixture()) as engine:
        load(engine, {}, strict=False)


def test_experts_under_one_name_are_refused_under_deepspeed(own_ranks: RankPool) -> None:
    for error in own_ranks.errors(load_experts_under_deepspeed):
        assert "ranks have different experts under the same names" in error


def load_into_a_pipeline(precision: str) -> tuple[int, int]:
    """Every stage is given the whole model's state; how many states it has, and how many of them are wrong."""
    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    with engine_for(pipelines.settings_for(precision), pipelines.pipeline(pipelines.untied())) as engine:
        mine = {name: tuple(param.shape) for name, param in engine.module.named_parameters()}
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, mine)
        shapes = {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}
        state = numbers_for(shapes, lambda name: name.endswith(pipelines.MATRICES))
        assert load(engine, state) == []
        optimizer = engine.basic_optimizer
        whole_states = optimizer._binding.ranks[0].gather_objects(save_whole_of(optimizer))[0]
        wrong = sum(
            not torch.equal(whole_states[name][key].view(-1), value.view(-1).cpu())
            for name in mine
            for key, value in state[name].items()
        )
        return len(whole_states), wrong


def save_whole_of(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """At stage 0, by name, on the first rank of a stage."""
    saved = save_whole(optimizer._binding, optimizer.state)
    names = [spec.name for plan in optimizer._binding.plans for spec in plan.specs]
    return {names[place]: state for place, state in saved.items()}


def test_every_stage_of_a_pipeline_takes_its_own(own_ranks: RankPool) -> None:
    for count, wrong in own_ranks.run(load_into_a_pipeline, "fp32, stage 0"):
        assert count > 0 and wrong == 0


def norms_of_deepspeeds_muon(stage: int) -> tuple[float, float]:
    """The norm that its engine reports and clips by, and that of the gradients."""
    settings = config(stage, rows=ROWS)
    settings["optimizer"] = {"type": "Muon", "params": {"torch_adam": True}}
    settings["zero_optimization"]["reduce_scatter"] = False  # it refuses stage 3 with it
    with eager(), engine_for(settings) as engine:
        train_engine(engine, 1, same_rows=True)
        return float(engine.get_global_grad_norm()), Reference().train(1)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_muon_clips_updates(ranks: RankPool, stage: int) -> None:
    """Which the page says has no counterpart: the norm is near the root of the sum of all matrices' shorter sides."""
    for reported, true in ranks.run(norms_of_deepspeeds_muon, stage):
        assert reported > 5 * true


def differ_from_deepspeeds_muon(stage: int, storage: str) -> float:
    """DeepSpeed's Muon at stage 0, its state into our engine by the settings of the page, both go on."""
    theirs = config(0, rows=ROWS)
    theirs["optimizer"] = {"type": "Muon", "params": {"torch_adam": True}}
    settings = config(stage, rows=ROWS)
    settings["optimizer"] = copy.deepcopy(entry("deepspeed"))
    settings["optimizer"]["params"].update(report=False, storage=storage)
    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    with eager(), engine_for(theirs) as engine:
        train_engine(engine, BEFORE, same_rows=True)
        names = {id(param): name for name, param in engine.module.named_parameters()}
        order = [names[id(param)] for group in engine.optimizer.param_groups for param in group["params"]]
        state = from_checkpoint(engine.optimizer.state_dict(), order, source="deepspeed")
        model = UnevenLM()
        model.load_state_dict(engine.module.state_dict())
        train_engine(engine, AFTER, same_rows=True)
        expected = copy.deepcopy(engine.module)
    with engine_for(settings, model) as engine:
        load(engine, state)
        train_engine(engine, AFTER, same_rows=True)
        return largest_difference(full_weights(engine), expected)


@pytest.mark.parametrize(("stage", "storage"), [(0, "zero"), (2, "zero"), (3, "zero"), (2, "owned")], ids=str)
def test_deepspeeds_own_muon_goes_on_with_ours(ranks: RankPool, stage: int, storage: str) -> None:
    """In fp32 to its rounding, which steps of 0.02 and Adam on gradients of nearly zero enlarge."""
    assert max(ranks.run(differ_from_deepspeeds_muon, stage, storage)) < 1e-4


def give_another_engine() -> None:
    from lwopt_backend.integrations import deepspeed_migration

    settings = {**config(0), "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    with engine_for(settings) as engine:
        deepspeed_migration.load_named_state(engine, {})


def test_another_engine_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(give_another_engine):
        assert (
            "expected a DeepSpeed engine whose optimizer is LayerWise or LayerWiseMuon, found DeepSpeedEngine" in error
        )
