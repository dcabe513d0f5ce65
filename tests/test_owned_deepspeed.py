"""Owned storage under DeepSpeed: a backward pass that fails, and what is said. Equality for every stage and layout is
in tests/test_equality.py; loops, models, precisions, checkpoints and refusals are with those of ZeRO's storage."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines import ExactLM
from tests.on_ranks import on_ranks
from tests.owned import assert_same
from tests.zero import OWN_ROWS, Reference, build, engine_for, own_rows, own_settings, settings_for, train


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_pass_that_fails_is_an_error_on_every_rank_and_training_can_go_on(stage: int) -> None:
    """The second step's, on rank 1, after some gradients have come. Other faults of a pass, or of the model, are
    told in the same way: tests/test_owned_failures.py."""

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


@on_ranks(2)
def test_the_first_rank_says_who_owns_what_and_which_settings_have_no_effect() -> None:
    settings = settings_for("owned", 2, report=True)
    settings["zero_optimization"]["reduce_bucket_size"] = 1000
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        build(settings)
    without = "Without effect on owned storage: zero_optimization.reduce_bucket_size."
    for line in ("Storage: owned by 2 data-parallel ranks", without, "4 of 11 trained parameters are matrices"):
        assert (line in printed.getvalue()) == (dist.get_rank() == 0)
