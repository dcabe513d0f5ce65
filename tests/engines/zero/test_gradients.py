"""Gradients between two steps, where DeepSpeed itself loses or keeps some: all of a step are used, and no others."""

import contextlib
import math
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.logging import logger
from torch import Tensor, nn

from tests.support import zero
from tests.support.cells import cells
from tests.support.checkpoint_contents import same
from tests.support.engines import OWNED, ZERO, Cell, ExactLM, exact, running
from tests.support.models import MATRICES, NORM_ROUNDING
from tests.support.on_ranks import on_ranks
from tests.support.plain import shares
from tests.support.zero import Reference, engine_for, full_weights, settings_for

CPU = {"device": "cpu"}


def accumulate(engine: Any, *micro_batches: int) -> None:
    for rows in micro_batches:
        engine.backward(engine(rows))
        engine.step()


# What can be read between backward and step
@cells(
    lambda **cell: cell != {"engine": "zero 0", "precision": "fp16"}, engine=[*ZERO, *OWNED], precision=["fp32", "fp16"]
)
@on_ranks(2)
def test_norms_and_zeros_by_names_on_zero(engine: str, precision: str) -> None:
    """Norms and zeros of some gradients are those of one process."""
    truth = ExactLM()
    for rows in shares(0, 2):
        truth(*rows).backward()
    grads = {name: param.grad / 2 for name, param in truth.named_parameters()}
    with running(Cell(engine, precision=precision), ExactLM()) as run:
        optimizer, in_fp32 = run.made.basic_optimizer, precision == "fp32"
        with pytest.raises(RuntimeError, match="expected a backward pass") if engine in ZERO else nullcontext():
            optimizer.count_zeros()
        run.made.backward(run.made(*shares(0, 2)[dist.get_rank()]))
        for names, order in (("*", 2.0), ("layers.*", 1.0), (["embedding.*", "gate.bias"], math.inf)):
            globs = [names] if isinstance(names, str) else names
            flat = torch.cat([g.flatten() for n, g in grads.items() if any(fnmatchcase(n, glob) for glob in globs)])
            norm = float(torch.linalg.vector_norm(flat.double(), order))
            if in_fp32:
                found = optimizer.grad_norm(names, order)
                assert found.dtype == torch.float32 and float(found) == pytest.approx(norm, rel=1e-6)
                assert optimizer.count_zeros(names) == int((flat == 0).sum())
        with pytest.raises(ValueError, match="'layer.*' matches no trained parameter; did you mean"):
            optimizer.grad_norm("layer.*")
        while not math.isfinite(unscaled := float(optimizer.grad_norm())):  # until the scale of losses is small enough
            run.made.step()
            run.made.backward(run.made(*shares(0, 2)[dist.get_rank()]))
        run.made.step()
        assert in_fp32 or unscaled == pytest.approx(float(run.made.get_global_grad_norm()), rel=1e-3)


# Passes that are one too many, and ones that are given up
class Slopes(nn.Module):
    """A loss that is linear in a matrix and a vector. The gradient on a rank's rows, its ``slopes``, is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(6, 5)), nn.Parameter(torch.zeros(5))

    def forward(self, rows: int) -> Tensor:
        matrix, vector = (slope.to(self.vector) for slope in slopes(rows, dist.get_rank()))
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def slopes(rows: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * rows + rank)
    return [torch.randint(-8, 9, shape, generator=generator) / 8 for shape in ((6, 5), (5,))]


def step_on_sum(single: Reference, parts: dict[int, float]) -> None:
    """A step of one process on these rows, each times its factor, of all ranks."""
    ranks = range(dist.get_world_size())
    for number, param in enumerate(single.model.parameters()):
        of_rows = [sum(slopes(rows, rank)[number] for rank in ranks) * factor for rows, factor in parts.items()]
        param.grad = torch.stack(of_rows).sum(0) / len(ranks)
    single.step()


def two_passes(engine: Any, how: str) -> dict[int, float]:
    """Backward passes of the same step; the rows and factors of its losses."""
    if how == "of one forward pass":
        loss = engine(1)
        engine.backward(loss, retain_graph=True)
        engine.backward(0.5 * loss)
        return {1: 1.5}
    if how == "after both forward passes":
        for loss in [engine(1), engine(2)]:
            engine.backward(loss)
    elif how == "loss.backward":
        for loss in [engine(1), engine(2)]:
            loss.backward()
    else:
        with engine.coalesce_grad_reduction() if how == "coalesced" else contextlib.nullcontext():
            for rows in (1, 2):
                engine.backward(engine(rows))
    return {1: 1.0, 2: 1.0}


def there_are_two_passes(storage: str, stage: int, precision: str, how: str) -> bool:
    """DeepSpeed coalesces in its classes of stages 1 to 3 alone, and refuses loss.backward() at stage 0."""
    if how == "coalesced":
        return storage == "zero" and stage > 0 and (stage, precision) != (1, "bf16+fp32")
    if stage == 0:
        return precision == "fp32" and (storage, how) != ("zero", "loss.backward")
    return zero.there_is(storage, stage)


@on_ranks(2)
@cells(
    there_are_two_passes,
    storage=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16+fp32"],
    how=["in turn", "after both forward passes", "loss.backward", "of one forward pass", "coalesced"],
)
def test_two_backward_passes_before_a_step_add_up_or_are_refused(
    storage: str, stage: int, precision: str, how: str
) -> None:
    """Fixed: Of two backward passes before a step, the first one's gradients were lost at stages 1 and 2. DeepSpeed
    itself uses the last one alone at stages 1 and 2, unless it adds up in fp32."""
    refused = (storage, precision) == ("zero", "fp32") and stage in (1, 2) and how != "coalesced"
    single = Reference(Slopes(), matrices=("matrix",))
    with engine_for(settings_for(storage, stage, precision), Slopes()) as engine:
        for _ in range(2):
            losses = two_passes(engine, how)
            if refused:
                with pytest.raises(RuntimeError, match="^LayerWiseMuon: expected one backward pass .* found 2, of"):
                    engine.step()
                engine.zero_grad()
                with engine.coalesce_grad_reduction():
                    for rows, factor in losses.items():
                        engine.backward(factor * engine(rows))
            engine.step()
            step_on_sum(single, losses)
            single.check(engine)


def is_dropped(storage: str, stage: int, precision: str, offload: bool, **_: Any) -> bool:
    return zero.there_is(storage, stage) and (
        storage == "zero" and stage > 0 or (precision, offload) == ("fp32", False)
    )


@on_ranks(2)
@cells(
    is_dropped,
    storage=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16+fp32"],
    offload=[False, True],
    passes=[1, 2],
    who=["engine", "optimizer", "load_checkpoint"],
)
def test_gradients_given_up_inside_an_accumulation_are_gone(
    tmp_path: Path, storage: str, stage: int, precision: str, offload: bool, passes: int, who: str
) -> None:
    """Fixed: `zero_grad()` within an accumulation dropped nothing. With storage "zero", a step without any others is
    refused. A load also begins the accumulation anew."""
    settings = settings_for(storage, stage, precision, accumulation=2)
    settings["zero_optimization"] |= {"offload_optimizer": CPU} if offload else {}
    single = Reference(Slopes(), matrices=("matrix",))
    with engine_for(settings, Slopes()) as engine, mock.patch.object(logger, "warning") as said:
        accumulate(engine, 1, 2)
        step_on_sum(single, {1: 0.5, 2: 0.5})
        engine.save_checkpoint(tmp_path)
        accumulate(engine, 3)
        if passes == 2:
            engine.backward(engine(4))
        if who == "load_checkpoint":
            engine.load_checkpoint(tmp_path)
        else:
            (engine if who == "engine" else engine.optimizer).zero_grad()
            if storage == "zero":
                with pytest.raises(RuntimeError, match="^LayerWiseMuon: expected a backward pass of the step's last"):
                    engine.step()
        kept = [5, 6] if who == "load_checkpoint" else [6]
        for following in (kept, [7, 8]):
            accumulate(engine, *following)
            step_on_sum(single, dict.fromkeys(following, 0.5))
            single.check(engine)
        lines = [call.args[0] for call in said.call_args_list if call.args[0].startswith("zero_grad() drops")]
        assert len(lines) == (who != "load_checkpoint" and dist.get_rank() == 0)
        assert all(f"the gradients of {passes} backward pass(es) since the last step" in line for line in lines)


@on_ranks(2)
@pytest.mark.parametrize(("stage", "sent"), [(1, None), (1, "fp32"), (2, None), (3, None)])
def test_sums_in_fp32_are_not_rounded_or_it_is_said(stage: int, sent: str | None) -> None:
    """DeepSpeed's BF16_Optimizer sends the finished sum in bf16."""
    settings = settings_for("zero", stage, "bf16+fp32", accumulation=2)
    settings |= {} if sent is None else {"communication_data_type": sent}
    single = Reference(Slopes(), matrices=("matrix",))
    with mock.patch.object(logger, "warning") as said, engine_for(settings, Slopes()) as engine:
        for rows, factor in ((1, 1.0), (2, 2**-10)):
            engine.backward(engine(rows) * factor)
            engine.step()
        step_on_sum(single, {1: 2**-1, 2: 2**-11})
        rounded = (stage, sent) == (1, None)
        assert (single.difference(engine) > 0) == rounded
        lines = [
            call.args[0] for call in said.call_args_list if "rounds the sum to bfloat16 at stage 1" in call.args[0]
        ]
        assert len(lines) == (rounded and dist.get_rank() == 0)


# Gradients that are missing
class Sometimes(ExactLM):
    """With a layer that is ``used`` in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(24, 24)
        exact(self)

    def forward(self, tokens: Tensor, targets: Tensor, used: bool = True) -> Tensor:
        self.used = used
        return super().forward(tokens, targets)

    def gated(self, x: Tensor) -> Tensor:
        gates = super().gated(x)
        return gates * torch.sigmoid(self.extra(x)) if self.used else gates


class SlopesOfSome(Slopes):
    """On rank 1, the loss of rows 2 depends on no weight."""

    def forward(self, rows: int) -> Tensor:
        if (rows, dist.get_rank()) == (2, 1):
            return torch.ones(1, requires_grad=True).sum()
        return super().forward(rows)


@on_ranks(2)
def test_a_pass_without_any_gradient_on_one_rank_counts_as_zeros() -> None:
    """The other rank's is reduced at the end of the pass, in which all take part."""
    single = Reference(SlopesOfSome(), matrices=("matrix",))
    with engine_for(settings_for("owned", 2, accumulation=2), SlopesOfSome()) as engine:
        for rows in (1, 2):
            engine.backward(engine(rows))
            engine.step()
        for number, param in enumerate(single.model.parameters()):
            param.grad = sum(slopes(*of)[number] for of in [(1, 0), (1, 1), (2, 0)]) / 4
        single.step()
        single.check(engine)


USED_IN = [(True, True), (False, False), (False, True), (False, False), (True, False), (True, True), (False, False)]


def train_sometimes(engine: Any, step: int) -> None:
    for rows, used in zip(zero.own_rows(step, 2), USED_IN[step], strict=True):
        engine.backward(engine(*rows, used))
        engine.step()


@on_ranks(2)
@cells(lambda stage, offload, **_: stage > 0 or not offload, stage=range(4), offload=[{}, CPU], clip=[0.0, 0.5])
def test_a_gradient_that_is_missing_counts_as_zero(stage: int, offload: dict[str, Any], clip: float) -> None:
    """And not as an earlier step's; one of a single micro-batch of a step counts, whichever it is."""
    single = Reference(Sometimes(), clip=clip, matrices=(*MATRICES, "extra.weight"))
    options = {"accumulation": 2, "clip": clip, "ns_dtype": "float32"}
    settings = settings_for("zero", stage, rows=zero.OWN_ROWS // 2, **options)
    settings["zero_optimization"] |= {"offload_optimizer": offload} if offload else {}
    with zero.newton_schulz_in_float32(), engine_for(settings, Sometimes()) as engine:
        for step, (first, second) in enumerate(USED_IN):
            train_sometimes(engine, step)
            for param in single.model.parameters():
                param.grad = torch.zeros_like(param)
            shares = zip(zero.batch_shares(step, 4, zero.OWN_ROWS), (first, first, second, second), strict=True)
            single.step([(*rows, used) for rows, used in shares], 2, clips=zero.clips_of(engine))
            assert float(engine.get_global_grad_norm()) == pytest.approx(single.norm, rel=NORM_ROUNDING)
            single.check(engine)


@on_ranks(2)
@cells(
    bucket=[200, 10_000],
    contiguous=[False, True],
    offload=[{}, CPU],
    precision=["fp32", "bf16+fp32"],
    both=[False, True],
)
def test_last_micro_batch_leaves_a_layer_out_with_overlap(
    bucket: int, contiguous: bool, offload: dict[str, Any], precision: str, both: bool
) -> None:
    """At stage 1, where DeepSpeed reduces in the last micro-batch; of ``both`` layers, or one, that it does not use."""

    def found(overlap: bool) -> dict[str, Tensor]:
        settings = settings_for("zero", 1, precision, rows=zero.OWN_ROWS // 2, accumulation=2)
        more = {"overlap_comm": overlap, "contiguous_gradients": contiguous, "reduce_bucket_size": bucket}
        settings["zero_optimization"] |= more | ({"offload_optimizer": offload} if offload else {})
        model = Sometimes()
        if not both:
            model.extra.bias.requires_grad_(False)
        with engine_for(settings, model) as engine:
            for step in range(len(USED_IN)):
                train_sometimes(engine, step)
            return full_weights(engine)

    assert same(found(False), found(True))


@on_ranks(2)
@cells(stage=[2, 3], precision=["bf16", "bf16+fp32", "fp16"])
def test_offloaded_gradients_are_missing_where_others_are(stage: int, precision: str) -> None:
    found = []
    for offload in ({}, {"offload_optimizer": CPU}):
        settings = settings_for("zero", stage, precision, rows=zero.OWN_ROWS // 2, accumulation=2)
        settings["zero_optimization"] |= offload
        with engine_for(settings, Sometimes()) as engine:
            for step in range(len(USED_IN)):
                train_sometimes(engine, step)
            found.append(full_weights(engine))
    assert same(*found)
