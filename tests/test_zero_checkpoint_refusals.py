"""A checkpoint that cannot be loaded is refused on every rank, with the reason, before anything of it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import config, engine_for, full_weights, train

SHARDED = pytest.mark.parametrize("stage", [1, 2, 3])


def save(folder: str, settings: dict[str, Any], tags: tuple[str, ...] = ("first",)) -> dict[str, torch.Tensor]:
    """The weights after one step; every further tag is saved one step later."""
    with engine_for(settings) as engine:
        for step, tag in enumerate(tags):
            train(engine, range(step, step + 1))
            engine.save_checkpoint(folder, tag=tag)
        return full_weights(engine)


def load(folder: str, settings: dict[str, Any], **choice: Any) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Where it was loaded from, and the weights."""
    with engine_for(settings, UnevenLM(seed=1)) as engine:
        path, _ = engine.load_checkpoint(folder, **choice)
        return path, full_weights(engine)


def refused(folder: str, settings: dict[str, Any], **choice: Any) -> None:
    """Loading raises, and has changed nothing in the model."""
    with engine_for(settings, UnevenLM(seed=1)) as engine:
        before = model_weights(engine)
        try:
            engine.load_checkpoint(folder, **choice)
        except ValueError:
            assert all(torch.equal(weight, before[name]) for name, weight in model_weights(engine).items())
            raise


def model_weights(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def pool_of(rank_pools: dict[int, RankPool], world_size: int) -> RankPool:
    return rank_pools.setdefault(world_size, RankPool(world_size))


@SHARDED
@pytest.mark.parametrize("here", [1, 4])
def test_another_world_size_is_refused(rank_pools: dict[int, RankPool], tmp_path: Path, stage: int, here: int) -> None:
    pool_of(rank_pools, 2).run(save, str(tmp_path), config(stage))
    for error in pool_of(rank_pools, here).errors(refused, str(tmp_path), config(stage)):
        start = (
            f"ValueError: the checkpoint '{tmp_path}/first' was saved on 2 data-parallel ranks and is loaded on {here};"
        )
        assert error.startswith(start)
        assert "load it on 2. Another number of ranks needs DeepSpeed's universal format" in error
        assert error.endswith("with load_optimizer_states=False") == (stage < 3 or here < 2)


@SHARDED
@pytest.mark.parametrize(
    ("here", "choice"),
    [(1, {"load_optimizer_states": False}), (4, {"load_optimizer_states": False}), (1, {"load_module_only": True})],
)
def test_weights_alone_are_loaded_at_another_world_size(
    rank_pools: dict[int, RankPool], tmp_path: Path, stage: int, here: int, choice: dict[str, bool]
) -> None:
    saved, *_ = pool_of(rank_pools, 2).run(save, str(tmp_path), config(stage))
    pool = pool_of(rank_pools, here)
    if stage == 3 and here > 2:  # DeepSpeed would wait for ever for the ranks that find no file of theirs
        for error in pool.errors(refused, str(tmp_path), config(stage), **choice):
            assert "was saved on 2 data-parallel ranks and is loaded on 4" in error
        return
    for _, weights in pool.run(load, str(tmp_path), config(stage), **choice):
        assert all(torch.equal(weight, saved[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("saved", "loaded", "named"), [(0, 2, "0"), (0, 3, "0, 1 or 2"), (2, 0, "1 or 2"), (2, 3, "0, 1 or 2"), (3, 1, "3")]
)
def test_another_stage_is_refused(ranks: RankPool, tmp_path: Path, saved: int, loaded: int, named: str) -> None:
    ranks.run(save, str(tmp_path), config(saved))
    for error in ranks.errors(refused, str(tmp_path), config(loaded)):
        assert f"was saved at ZeRO stage {named} and is loaded at stage {loaded}" in error


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1)])
def test_stages_1_and_2_load_each_others_checkpoints(ranks: RankPool, tmp_path: Path, saved: int, loaded: int) -> None:
    expected = ranks.run(save, str(tmp_path), config(saved))
    for (_, weights), of_saved in zip(ranks.run(load, str(tmp_path), config(loaded)), expected):
        assert all(torch.equal(weight, of_saved[name]) for name, weight in weights.items())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("saved", "loaded", "difference"),
    [
        ("layers.0.weight", "layers.2.weight", "'layers.0.weight' here, 'layers.2.weight' there"),
        ("layers.0.weight", "gate.bias", "'layers.0.weight' here, 'layers.2.weight' there"),
        ("gate.bias", "gate.weight", "no further parameter here, 'gate.weight' there"),
    ],
)
def test_another_routing_is_refused(
    ranks: RankPool, tmp_path: Path, stage: int, saved: str, loaded: str, difference: str
) -> None:
    """Also where other numbers of parameters make DeepSpeed speak of parameter alignment."""
    ranks.run(save, str(tmp_path), config(stage, exclude=[saved]))
    for error in ranks.errors(refused, str(tmp_path), config(stage, exclude=[loaded])):
        assert error.startswith(f"ValueError: group 0 holds other parameters than in the checkpoint: {difference};")


def save_with_adamw(folder: str, stage: int, same_groups: bool) -> None:
    settings = config(stage)
    settings["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}
    model = UnevenLM()
    named = dict(model.named_parameters())
    groups: list[Any] = list(named.values())
    if same_groups:
        groups = [{"params": [named.pop(name) for name in MATRICES]}, {"params": list(named.values())}]
    with engine_for(settings, model, model_parameters=groups) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_optimizer_is_refused(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    ranks.run(save_with_adamw, str(tmp_path), stage, same_groups=True)
    for error in ranks.errors(refused, str(tmp_path), config(stage)):
        assert error.startswith(
            f"ValueError: the checkpoint '{tmp_path}/global_step1' was written by another optimizer (its ds_config "
            "says 'AdamW'), whose state this one cannot go on with; load its weights alone, with "
        )
        assert "load_optimizer_states=False" in error


@pytest.mark.parametrize(("stage", "storage"), [(1, "zero"), (3, "zero"), (0, "owned"), (2, "owned")])
def test_another_optimizer_with_other_param_groups_is_refused(
    ranks: RankPool, tmp_path: Path, stage: int, storage: str
) -> None:
    ranks.run(save_with_adamw, str(tmp_path), stage, same_groups=False)
    for error in ranks.errors(refused, str(tmp_path), config(stage, storage=storage)):
        assert "was written by another optimizer (its ds_config says 'AdamW')" in error


@SHARDED
def test_the_weights_of_another_optimizer_can_be_loaded(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    ranks.run(save_with_adamw, str(tmp_path), stage, same_groups=False)
    for path, _ in ranks.run(load, str(tmp_path), config(stage), load_optimizer_states=False):
        assert str(path).startswith(f"{tmp_path}/global_step1/")


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_that_is_not_there(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    for path, _ in ranks.run(load, str(tmp_path), config(stage)):
        assert path is None
    for error in ranks.errors(refused, str(tmp_path), config(stage), tag="elsewhere"):
        assert error.startswith(f"ValueError: the checkpoint '{tmp_path}/elsewhere' has no file ")


@SHARDED
def test_the_weights_of_an_earlier_tag(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """At stage 3 DeepSpeed takes weights alone from the latest tag, whatever tag is asked for."""
    (first, *_), _ = (ranks.run(save, str(tmp_path / f"{n}"), config(stage), ("a", "b")[:n]) for n in (1, 2))
    choice = {"tag": "a", "load_module_only": True}
    if stage == 3:
        for error in ranks.errors(refused, str(tmp_path / "2"), config(3), **choice):
            assert error.startswith("ValueError: only the weights of tag 'a' are asked for, but at stage 3 ")
        return
    for _, weights in ranks.run(load, str(tmp_path / "2"), config(stage), **choice):
        assert all(torch.equal(weight, first[name]) for name, weight in weights.items())
