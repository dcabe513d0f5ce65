"""Owned storage under DeepSpeed: unusual models, what happens in training, and universal checkpoints that go anywhere.

Equality for every stage and layout is in tests/test_equality.py; loops, precisions, checkpoints and refusals are with
those of ZeRO's storage.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor, nn

from lwopt_backend.checkpoint import convert as conversion
from lwopt_backend.checkpoint import formats
from lwopt_backend.integrations.deepspeed_owned import OwnedLayerWiseMuon
from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.cells import cells
from tests.engines import ExactLM
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import OWN_ROWS, Reference, batch_shares, build, engine_for, own_rows, settings_for, train

each_stage = pytest.mark.parametrize("stage", [0, 1, 2])


def settings_of(stage: int, accumulation: int = 1) -> dict[str, Any]:
    return settings_for("owned", stage, rows=OWN_ROWS // dist.get_world_size(), accumulation=accumulation)


class Peculiar(ExactLM):
    """With tied weights, and parameters that are frozen, unused, empty, and used by every other rank only."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.layers[4].weight.requires_grad_(False)
        self.unused = nn.Linear(7, 9)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.sometimes = type(self.lm_head)(24, 24, bias=False)  # with rounded gradients

    def forward(self, tokens: Tensor, targets: Tensor, rank: int = 0) -> Tensor:
        loss = super().forward(tokens, targets)
        return loss if rank % 2 else loss + self.sometimes(self.embedding(tokens)).square().mean()


def train_peculiar(stage: int) -> float:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    single = Reference(Peculiar(), matrices=(*MATRICES, "unused.weight", "sometimes.weight"))
    with engine_for(settings_of(stage, 2), Peculiar()) as engine:
        for step in range(4):
            for part in own_rows(step, 2):
                engine.backward(engine(*part, rank=rank))
                engine.step()
            for number, part in enumerate(batch_shares(step, 2 * world_size, OWN_ROWS)):
                (single.model(*part, rank=number % world_size) / 2).backward()
            for param in single.model.parameters():
                if param.grad is not None:
                    param.grad.div_(world_size)
            single.step()
        assert not any(engine.optimizer.state.get(p, {}).get("step", 0) for p in engine.module.unused.parameters())
        theirs = dict(single.model.named_parameters())
        rest = [(name, param) for name, param in engine.module.named_parameters() if param.numel()]
        return max(float((param.detach() - theirs[name].detach()).abs().max()) for name, param in rest)


@each_stage
def test_parameters_that_are_tied_frozen_unused_empty_or_used_by_some_ranks(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(train_peculiar, stage)) == {0.0}


# In training


class Stumbling(ExactLM):
    """Its backward pass fails where ``stumbles`` is set, after some gradients have come."""

    stumbles = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.stumbles and x.requires_grad:
            x.register_hook(self.fail)
        x = x + self.layers(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())

    @staticmethod
    def fail(grad: Tensor) -> None:
        raise FloatingPointError("stumbled")


def train_on_own(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(*own_rows(step, 1)[0]))
        engine.step()


def stumble_and_go_on(stage: int) -> tuple[str, float]:
    """The second step's backward pass fails on rank 1; what the step says there, and how training goes on."""
    model, single = Stumbling(), Reference(ExactLM())
    single.train_on_all(3)
    with engine_for(settings_of(stage), model) as engine:
        train_on_own(engine, range(1))
        model.stumbles = dist.get_rank() == 1
        loss = engine(*own_rows(7, 1)[0])
        try:
            engine.backward(loss)
        except FloatingPointError:
            assert dist.get_rank() == 1
        try:
            engine.step()
        except RuntimeError as error:
            said = str(error)
        model.stumbles = False
        engine.optimizer.zero_grad()
        train_on_own(engine, range(1, 3))
        theirs = dict(single.model.named_parameters())
        return said, max(float((p - theirs[name]).detach().abs().max()) for name, p in model.named_parameters())


@each_stage
def test_a_backward_pass_that_fails_is_an_error_on_every_rank_and_training_can_go_on(
    ranks: RankPool, stage: int
) -> None:
    for said, different in ranks.run(stumble_and_go_on, stage):
        assert said.startswith("LayerWiseMuon: a backward pass ended in an exception") and "rank 1" in said
        assert different == 0.0


def change_the_model(stage: int, how: str) -> None:
    with engine_for(settings_of(stage)) as engine:
        train_on_own(engine, range(1))
        gate = engine.module.gate
        if how == "replaced" and dist.get_rank() == 0:
            gate.weight = nn.Parameter(gate.weight.detach().clone())
        elif how == "moved" and dist.get_rank() == 0:
            gate.weight.data = gate.weight.data.clone()
        train_on_own(engine, range(1))


@pytest.mark.parametrize(("stage", "how"), [(0, "replaced"), (0, "moved"), (2, "replaced"), (2, "moved")])
def test_a_model_that_was_changed_is_an_error_on_every_rank(ranks: RankPool, stage: int, how: str) -> None:
    for error in ranks.errors(change_the_model, stage, how):
        assert "LayerWiseMuon: parameter 'gate.weight'" in error and "make the optimizer after" in error


# Universal checkpoints


class WithMore(UnevenLM):
    """A frozen parameter, and a buffer that training changes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.layers[4].weight.requires_grad_(False)
        self.layers[4].weight.data.fill_(1.0 + seed)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens, targets)


def snapshot(engine: Any) -> dict[str, Any]:
    """All that training goes on from, whole, whatever the layout; samples are counted for all ranks."""
    get_weight, get_state = deepspeed.utils.safe_get_full_fp32_param, deepspeed.utils.safe_get_full_optimizer_state
    found = {f"weight {name}": value.detach().clone() for name, value in engine.module.state_dict().items()}
    for member in engine.optimizer.core.members:
        found[f"master {member.name}"] = get_weight(member.param)
        for key in ["momentum_buffer"] if member.is_matrix else ["exp_avg", "exp_avg_sq"]:
            found[f"{key} {member.name}"] = get_state(member.param, key)
    counters = [engine.global_steps, engine.skipped_steps, engine.optimizer.loss_scale, *engine.get_lr()]
    return {**found, "counters": torch.tensor(counters), "schedule": engine.lr_scheduler.state_dict()}


def trained(
    folder: str, stage: int, precision: str, options: dict[str, Any], universal: bool | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is saved (``universal`` is None) or loaded, and what there is two steps later, all ranks on all rows."""
    settings = settings_for("owned", stage, precision, accumulation=2, **options)
    settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 8}}
    settings["checkpoint"] = {"load_universal": bool(universal)}
    with engine_for(settings, WithMore(seed=universal is not None)) as engine:
        if universal is None:
            train(engine, 3, same_rows=True)
            engine.save_checkpoint(folder, tag="step3")
        else:
            engine.load_checkpoint(folder, tag="step3")
        before = snapshot(engine)
        train(engine, range(3, 5), same_rows=True)
        return before, snapshot(engine)


def convert_as_we_do(folder: Path, tag: str) -> str:
    """The folder of the result."""
    into = folder / "ours"
    place = conversion.Place(into / tag, {"latest_universal": tag})
    conversion.write(formats.read(folder / tag), "universal", place)
    return str(into)


def convert_as_deepspeed_does(folder: Path, tag: str) -> str:
    """With DeepSpeed's own converter; the folder of the result."""
    into = folder / "theirs"
    folders = {"input_folder": str(folder / tag), "output_folder": str(into / tag)}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(argparse.Namespace(**folders, **workers, inject_missing_state=True))
    return str(into)


CONVERTERS = {"ours": convert_as_we_do, "DeepSpeed's": convert_as_deepspeed_does}
LAYOUTS: dict[str, dict[str, Any]] = {"padded": {"layout": "padded"}, "pieces": {"layout": "compact", "group_size": 1}}
TARGETS = [
    (1, 0, {"layout": "padded"}),
    (2, 2, {"layout": "compact"}),
    (2, 0, {"group_size": 1}),
    (4, 1, {"group_size": 2}),
    (4, 2, {"layout": "padded"}),
]


@pytest.fixture(scope="module")
def converted(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A universal folder, and what saved it, made when it is first asked for."""

    @functools.cache
    def save(precision: str, stage: int, layout: str) -> tuple[Path, tuple[dict[str, Any], dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("native")
        return folder, rank_pools[2].run(trained, str(folder), stage, precision, LAYOUTS[layout], None)[0]

    @functools.cache
    def convert(precision: str, stage: int, layout: str, converter: str) -> tuple[str, Any]:
        folder, truth = save(precision, stage, layout)
        return CONVERTERS[converter](folder, "step3"), truth

    return convert


@cells(saved=[("fp32", 1), ("bf16+fp32", 2), ("fp16+fp32", 1)], layout=LAYOUTS, target=TARGETS, converter=CONVERTERS)
def test_universal_checkpoints_go_anywhere(
    rank_pools: dict[int, RankPool],
    converted: Any,
    saved: tuple[str, int],
    layout: str,
    target: tuple[int, int, dict[str, Any]],
    converter: str,
) -> None:
    """To other numbers of ranks, stages, layouts and instances. Added up in fp32, micro-batches are alike at all."""
    folder, truth = converted(*saved, layout, converter)
    world_size, stage, options = target
    found = rank_pools[world_size].run(trained, folder, stage, saved[0], options, True)[0]
    for ours, theirs in zip(found, truth):
        assert ours.keys() == theirs.keys() and ours.pop("schedule") == theirs["schedule"]
        assert {key for key in ours if not torch.equal(ours[key], theirs[key])} == set()


# What it says and what it is


def printed_by_a_build() -> str:
    settings = settings_for("owned", 2, report=True)
    settings["zero_optimization"]["reduce_bucket_size"] = 1000
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        build(settings)
    return printed.getvalue()


def test_the_first_rank_says_who_owns_what_and_which_settings_have_no_effect(ranks: RankPool) -> None:
    first, second = ranks.run(printed_by_a_build)
    assert "Storage: owned by 2 data-parallel ranks" in first
    assert "Without effect on owned storage: zero_optimization.reduce_bucket_size." in first
    assert "4 of 11 trained parameters are matrices" in first
    assert "Storage" not in second


def test_the_storage_says_which_optimizer_is_built() -> None:
    params = list(nn.Linear(3, 3).parameters())
    assert isinstance(LayerWiseMuon(params, storage="owned"), OwnedLayerWiseMuon)
    assert not isinstance(LayerWiseMuon(params, storage="zero"), OwnedLayerWiseMuon)
