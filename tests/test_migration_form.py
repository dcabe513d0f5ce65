"""Changing the form of momentum in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lwopt_backend.migration import change_momentum_form
from tests.fsdp2 import backward, layer_wise, named, shard
from tests.migration import AFTER, BEFORE, whole
from tests.models import UnevenLM
from tests.owned import difference, exact_sums, optimizer_for, train
from tests.ranks import RankPool
from tests.zero import ROWS, config, engine_for, full_weights
from tests.zero import train as train_engine


def change_form_owned() -> tuple[float, list[Any]]:
    """Newton-Schulz in fp32, where both forms differ by its rounding only."""
    models = [exact_sums(UnevenLM()) for _ in range(2)]
    optimizers = [optimizer_for(model, ns_dtype="float32") for model in models]
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, BEFORE)
    change_momentum_form(optimizers[1], "sum")
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, AFTER)
    return difference(*models), [group.get("momentum_form") for group in optimizers[1].param_groups]


def change_form_on_fsdp2() -> tuple[float, list[Any]]:
    weights = []
    for change in (False, True):
        sharded = shard("rows", "fp32")
        optimizer = layer_wise(sharded.model, ns_dtype="float32")
        for step in range(6):
            if change and step == 3:
                change_momentum_form(optimizer, "sum")
            backward(sharded, step)
            optimizer.step()
            optimizer.zero_grad()
        weights.append({name: whole(param.detach()) for name, param in named(sharded.model)})
    largest = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return largest, [group.get("momentum_form") for group in optimizer.param_groups]


def change_form_under_deepspeed(stage: int, storage: str) -> tuple[float, list[Any]]:
    from lwopt_backend.integrations import deepspeed_migration

    weights = []
    for change in (False, True):
        with engine_for(config(stage, rows=ROWS, ns_dtype="float32", storage=storage)) as engine:
            train_engine(engine, BEFORE, same_rows=True)
            if change:
                deepspeed_migration.change_momentum_form(engine, "sum")
            train_engine(engine, AFTER, same_rows=True)
            weights.append(full_weights(engine))
            forms = [group.get("momentum_form") for group in engine.basic_optimizer.param_groups]
    return max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]), forms


FORM_CHANGES = {
    "owned": (change_form_owned, ()),
    "fsdp2": (change_form_on_fsdp2, ()),
    **{f"stage {stage}": (change_form_under_deepspeed, (stage, "zero")) for stage in range(4)},
    "stage 2, owned": (change_form_under_deepspeed, (2, "owned")),
}


@pytest.mark.parametrize("engine", FORM_CHANGES)
def test_the_form_can_change_in_the_middle_of_a_run(ranks: RankPool, engine: str) -> None:
    function, arguments = FORM_CHANGES[engine]
    for largest, forms in ranks.run(function, *arguments):
        assert largest < 2e-5 and forms == ["sum", None]


def load_into_the_other_form(folder: str) -> tuple[float, list[str], list[str]]:
    """A checkpoint brings its form with it; then it is changed."""
    model = exact_sums(UnevenLM())
    optimizer = optimizer_for(model, ns_dtype="float32")
    train(model, optimizer, BEFORE)
    optimizer.save_state_dict(folder)
    other = exact_sums(UnevenLM(seed=1))
    made_for_sums = optimizer_for(other, ns_dtype="float32", momentum_form="sum")
    other.load_state_dict(model.state_dict())
    made_for_sums.load_state_dict_from(folder)
    loaded = [group["momentum_form"] for group in made_for_sums.param_groups if "momentum_form" in group]
    change_momentum_form(made_for_sums, "sum")
    changed = [group["momentum_form"] for group in made_for_sums.param_groups if "momentum_form" in group]
    train(model, optimizer, AFTER)
    train(other, made_for_sums, AFTER)
    return difference(model, other), loaded, changed


def test_a_checkpoint_of_the_other_form(ranks: RankPool, tmp_path: Path) -> None:
    for largest, loaded, changed in ranks.run(load_into_the_other_form, str(tmp_path / "checkpoint")):
        assert largest < 2e-5 and loaded == ["ema"] and changed == ["sum"]
