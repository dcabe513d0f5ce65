"""Owned storage under DeepSpeed: what happens in training, and universal checkpoints that go anywhere. Equality for
every stage and layout is in tests/test_equality.py; loops, models, precisions, checkpoints and refusals are with those
of ZeRO's storage."""

import contextlib
import functools
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lwopt_backend.checkpoint import convert as conversion
from lwopt_backend.checkpoint import formats
from tests.cells import cells
from tests.checkpoint_engines import FROZEN, Buffered, changed, convert_as_deepspeed_does, scheduled, snapshot
from tests.engines import ExactLM
from tests.on_ranks import on_ranks
from tests.owned import assert_same
from tests.ranks import RankPool
from tests.zero import OWN_ROWS, Reference, build, engine_for, own_rows, own_settings, settings_for, train


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_pass_that_fails_is_an_error_on_every_rank_and_training_can_go_on(stage: int) -> None:
    """The second step's, on rank 1, after some gradients have come. What else is wrong with a pass, or with the model,
    is told in the same way: tests/test_owned_failures.py."""

    def fail(grad: Tensor) -> None:
        raise FloatingPointError("stumbled")

    model, single = ExactLM(), Reference(ExactLM())
    single.train_on_all(3)
    with engine_for(own_settings("owned", stage), model) as engine:
        train(engine, 1, rows=OWN_ROWS)
        handle = model.embedding.weight.register_hook(fail if dist.get_rank() == 1 else torch.clone)
        with pytest.raises(FloatingPointError) if dist.get_rank() == 1 else contextlib.nullcontext():
            engine.backward(engine(*own_rows(7, 1)[0]))
        handle.remove()
        with pytest.raises(RuntimeError, match="^LayerWiseMuon: a backward pass ended in an exception.*rank 1"):
            engine.step()
        engine.optimizer.zero_grad()
        train(engine, range(1, 3), rows=OWN_ROWS)
        assert_same(model, single.model)


# Universal checkpoints
def trained(
    folder: str, stage: int, precision: str, options: dict[str, Any], load: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is saved or loaded, of a model with a frozen parameter, and what there is two steps later. All ranks train
    on all rows. Added up in fp32, micro-batches are alike at all numbers of ranks."""
    settings = scheduled(settings_for("owned", stage, precision, accumulation=2, **options))
    settings["checkpoint"] = {"load_universal": load}
    model = Buffered(seed=int(load))
    model.get_parameter(FROZEN).requires_grad_(False).add_(float(load))
    with engine_for(settings, model) as engine:
        if load:
            engine.load_checkpoint(folder, tag="step3")
        else:
            train(engine, 3, same_rows=True)
            engine.save_checkpoint(folder, tag="step3")
        before = snapshot(engine)
        train(engine, range(3, 5), same_rows=True)
        return before, snapshot(engine)


SOURCES = [("fp32", 1), ("bf16+fp32", 2), ("fp16+fp32", 1)]
LAYOUTS: dict[str, dict[str, Any]] = {"padded": {"layout": "padded"}, "pieces": {"layout": "compact", "group_size": 1}}
TARGETS = [(1, 0, {"layout": "padded"}), (2, 2, {"layout": "compact"}), (2, 0, {"group_size": 1})]
TARGETS += [(4, 1, {"group_size": 2}), (4, 2, {"layout": "padded"})]


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Universal folders by converter, and what saved them, made when they are first asked for."""

    @functools.cache
    def find(precision: str, stage: int, layout: str) -> tuple[dict[str, str], tuple[dict[str, Any], dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("native")
        truth = rank_pools[2].run(trained, str(folder), stage, precision, LAYOUTS[layout], False)[0]
        place = conversion.Place(folder / "ours" / "step3", {"latest_universal": "step3"})
        conversion.write(formats.read(folder / "step3"), "universal", place)
        return {"ours": str(folder / "ours"), "DeepSpeed's": convert_as_deepspeed_does(folder, "step3")}, truth

    return find


@cells(source=SOURCES, layout=LAYOUTS, target=TARGETS, converter=["ours", "DeepSpeed's"])
def test_universal_checkpoints_go_anywhere(
    rank_pools: dict[int, RankPool],
    saved: Any,
    source: tuple[str, int],
    layout: str,
    target: tuple[int, int, dict[str, Any]],
    converter: str,
) -> None:
    """To other numbers of ranks, stages, layouts and instances."""
    folders, truth = saved(*source, layout)
    world_size, stage, options = target
    found = rank_pools[world_size].run(trained, folders[converter], stage, source[0], options, True)[0]
    for ours, theirs in zip(found, truth):  # samples are counted for all ranks
        assert changed(ours, theirs) <= {"samples", "this rank's states"}


@on_ranks(2)
def test_the_first_rank_says_who_owns_what_and_which_settings_have_no_effect() -> None:
    settings = settings_for("owned", 2, report=True)
    settings["zero_optimization"]["reduce_bucket_size"] = 1000
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        build(settings)
    without = "Without effect on owned storage: zero_optimization.reduce_bucket_size."
    for line in ("Storage: owned by 2 data-parallel ranks", without, "4 of 11 trained parameters are matrices"):
        assert (line in printed.getvalue()) == (dist.get_rank() == 0)
