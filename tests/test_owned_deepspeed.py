"""DeepSpeed with owned storage trains what torch.optim.Muon and AdamW train on one process, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests import owned
from tests.launcher import launch
from tests.models import UnevenLM
from tests.owned import difference, exact_sums, shares
from tests.owned_deepspeed import config, plain, reference, train
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, Reference, engine_for

LAYOUTS = ["padded", "compact", "auto"]
STAGES = [0, 1, 2]
each_stage = pytest.mark.parametrize("stage", STAGES)


def differences(stage: int, steps: int, accumulation: int, **options: Any) -> tuple[float, float]:
    """Of the weights, to one process and to the optimizer for plain PyTorch."""
    with engine_for(config(stage, accumulation=accumulation, **options), exact_sums(UnevenLM())) as engine:
        train(engine, steps)
        single, _ = reference(steps, accumulation=accumulation)
        theirs = plain(steps, accumulation=accumulation, **options)
        return difference(engine.module, single), difference(engine.module, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_stage
@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_ten_steps_with_accumulation_equal_one_process(ranks: RankPool, stage: int, layout: str) -> None:
    assert set(ranks.run(differences, stage, 10, 2, layout=layout)) == {(0.0, 0.0)}


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_three_ranks_equal_one_process(ranks: RankPool) -> None:
    assert set(ranks.run(differences, 2, 10, 2, layout="auto")) == {(0.0, 0.0)}


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("layout", ["padded", "compact"])
@each_stage
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_instances_equal_one_process(ranks: RankPool, stage: int, layout: str, group_size: int) -> None:
    assert set(ranks.run(differences, stage, 5, 2, layout=layout, group_size=group_size)) == {(0.0, 0.0)}


def with_settings(stage: int, settings: dict[str, Any]) -> float:
    with engine_for({**config(stage, accumulation=2), **settings}, exact_sums(UnevenLM())) as engine:
        train(engine, 3)
        return difference(engine.module, reference(3, accumulation=2)[0])


SETTINGS = {
    "prescale": {"prescale_gradients": True},
    "predivide": {"gradient_predivide_factor": 2.0},
}


@pytest.mark.parametrize("key", ["prescale", "predivide"])
@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_divided_before_their_sum_are_the_same(ranks: RankPool, stage: int, key: str) -> None:
    """Halves are exact in fp32."""
    assert set(ranks.run(with_settings, stage, SETTINGS[key])) == {0.0}


@each_stage
def test_reduction_after_backward_is_the_same(ranks: RankPool, stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage, "overlap_comm": False}}
    assert set(ranks.run(with_settings, stage, zero)) == {0.0}


def clipped(stage: int, layout: str) -> tuple[float, list[float]]:
    """The largest difference of weights, and that of every step's norm by its size."""
    with engine_for(config(stage, accumulation=2, clip=0.3, layout=layout), exact_sums(UnevenLM())) as engine:
        norms = []
        for step in range(5):
            train(engine, range(step, step + 1))
            norms.append(engine.get_global_grad_norm())
        single, expected = reference(5, accumulation=2, clip=0.3)
        return difference(engine.module, single), [abs(a / b - 1) for a, b in zip(norms, expected)]


@each_stage
@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_clips_by_the_norm_of_all_gradients_and_tells_it(ranks: RankPool, stage: int) -> None:
    """The norm is summed in fp64 here and in fp32 by torch; Muon's bf16 iteration then differs in single elements."""
    for weights, norms in ranks.run(clipped, stage, "compact"):
        assert weights <= 2e-3 and norms[0] <= 1e-6 and max(norms) <= 1e-4


# Loops


def by_loss_backward(stage: int) -> float:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    with engine_for(config(stage, accumulation=2), exact_sums(UnevenLM())) as engine:
        for step in range(3):
            parts = shares(step, 2 * world_size)
            for number in range(2):
                engine(*parts[number * world_size + rank]).backward()  # divided by the micro-batches there
                engine.step()
        return difference(engine.module, reference(3, accumulation=2)[0])


@each_stage
def test_loss_backward_is_engine_backward(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(by_loss_backward, stage)) == {0.0}


def in_one_step(stage: int, unmanaged: bool) -> float:
    """Three micro-batches in a step of a loop that says itself when to step, or all but the last under no_sync."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    settings = config(stage)
    settings["managed_gradient_accumulation"] = not unmanaged
    with engine_for(settings, exact_sums(UnevenLM())) as engine:
        for step in range(3):
            parts = shares(step, 3 * world_size)
            for number in range(3):
                with contextlib.nullcontext() if unmanaged or number == 2 else engine.no_sync():
                    engine.backward(engine(*parts[number * world_size + rank]))
            engine.step()
        return difference(engine.module, owned.reference(world_size, 3, accumulation=3))


@each_stage
def test_a_loop_that_says_when_to_step(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(in_one_step, stage, True)) == {0.0}


@pytest.mark.parametrize("stage", [0, 1])  # DeepSpeed has no no_sync() at stage 2
def test_no_sync(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(in_one_step, stage, False)) == {0.0}


def compiled() -> tuple[bool, float]:
    with engine_for(config(2, accumulation=2), exact_sums(UnevenLM())) as engine:
        engine.compile(backend="eager")
        train(engine, 3)
        return engine.is_compiled, difference(engine.module, reference(3, accumulation=2)[0])


def test_a_compiled_engine(ranks: RankPool) -> None:
    assert set(ranks.run(compiled)) == {(True, 0.0)}


class Checkpointed(UnevenLM):
    """Its layers run a backward pass of their own within the backward pass."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + checkpoint(self.layers, x, use_reentrant=True) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


def train_checkpointed(stage: int) -> float:
    with engine_for(config(stage, accumulation=2), exact_sums(Checkpointed())) as engine:
        train(engine, 3)
        return difference(engine.module, reference(3, accumulation=2)[0])


@each_stage
def test_reentrant_checkpoints(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(train_checkpointed, stage)) == {0.0}


class Peculiar(UnevenLM):
    """With tied weights, and parameters that are frozen, unused, empty, and used by every other rank only."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.layers[4].weight.requires_grad_(False)
        self.unused = nn.Linear(7, 9)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.sometimes = nn.Linear(24, 24, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor, rank: int = 0) -> Tensor:
        loss = super().forward(tokens, targets)
        return loss if rank % 2 else loss + self.sometimes(self.embedding(tokens)).square().mean()


def train_peculiar(stage: int) -> float:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    single = Reference(exact_sums(Peculiar()))
    muon, adamw = single.muon.param_groups[0]["params"], single.adamw.param_groups[0]["params"]
    moved = [single.model.unused.weight, single.model.sometimes.weight]
    muon += moved
    adamw[:] = [p for p in adamw if not any(p is other for other in moved)]
    with engine_for(config(stage, accumulation=2), exact_sums(Peculiar())) as engine:
        for step in range(4):
            parts = shares(step, 2 * world_size)
            for number in range(2):
                engine.backward(engine(*parts[number * world_size + rank], rank=rank))
                engine.step()
            for number, part in enumerate(parts):
                (single.model(*part, rank=number % world_size) / 2).backward()
            for param in single.model.parameters():
                if param.grad is not None:
                    param.grad.div_(world_size)
            for optimizer in (single.muon, single.adamw):
                optimizer.step()
                optimizer.zero_grad()
        assert not any(engine.optimizer.state.get(p, {}).get("step", 0) for p in engine.module.unused.parameters())
        rest = {n: p for n, p in engine.module.named_parameters() if p.numel()}
        theirs = dict(single.model.named_parameters())
        return max(float((p.detach() - theirs[name].detach()).abs().max()) for name, p in rest.items())


@each_stage
def test_parameters_that_are_tied_frozen_unused_empty_or_used_by_some_ranks(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(train_peculiar, stage)) == {0.0}


# Schedules and groups

SCHEDULES = {
    "DeepSpeed's": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
    "torch's": {"type": "CosineAnnealingLR", "params": {"T_max": 5}},
}


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


def split_by_decay(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0, "lr": 0.004}]


@contextlib.contextmanager
def scheduled(stage: int, storage: str, how: str) -> Iterator[Any]:
    settings = config(stage)
    if storage == "zero":
        settings["optimizer"]["params"] = {**MUON, "adamw": ADAMW, "report": False}
    model, given = exact_sums(UnevenLM()), {}
    groups: list[Any] = list(model.parameters())
    if how != "instance":  # which would have to route before it has a model
        groups = split_by_decay(model)
    if how in SCHEDULES:
        settings["scheduler"] = SCHEDULES[how]
    elif how == "callable":
        given["lr_scheduler"] = cosine
    else:
        given["optimizer"] = LayerWiseMuon(groups, **settings.pop("optimizer")["params"])
        given["lr_scheduler"] = cosine(given["optimizer"])
    with engine_for(settings, model, model_parameters=groups, **given) as engine:
        yield engine


def rates_and_weights(stage: int, storage: str, how: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    with scheduled(stage, storage, how) as engine:
        rates = []
        for step in range(6):
            train(engine, range(step, step + 1))
            rates.append(list(engine.get_lr()))
        return rates, {name: param.detach().clone() for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize("how", [*SCHEDULES, "callable", "instance"])
@pytest.mark.parametrize("stage", [0, 2])
def test_schedules_and_param_groups_are_those_of_zero_storage(ranks: RankPool, stage: int, how: str) -> None:
    (ours, weights), (theirs, others) = (
        ranks.run(rates_and_weights, stage, storage, how)[0] for storage in ("owned", "zero")
    )
    assert ours == theirs and len({tuple(rates) for rates in ours}) > 3
    assert all(torch.equal(weights[name], others[name]) for name in weights)


# An engine's life


def twice_on_one_model(stage: int) -> tuple[float, bool]:
    """The first engine ends; the second goes on with the model, and the same optimizer, from fresh state."""
    model = exact_sums(UnevenLM())
    optimizer = LayerWiseMuon(model.parameters(), **config(stage)["optimizer"]["params"])
    settings = config(stage)
    del settings["optimizer"]
    for steps in (range(2), range(2, 4)):
        with engine_for(settings, model, optimizer=optimizer) as engine:
            train(engine, steps)
    clean = not any(hasattr(param, "_hp_mapping") or param._post_accumulate_grad_hooks for param in model.parameters())
    single = exact_sums(UnevenLM())
    for steps in (range(2), range(2, 4)):
        fresh = Reference(single)
        for step in steps:
            for part in shares(step, dist.get_world_size()):
                single(*part).backward()
            for param in single.parameters():
                param.grad.div_(dist.get_world_size())
            for each in (fresh.muon, fresh.adamw):
                each.step()
                each.zero_grad()
    return difference(model, single), clean


@each_stage
def test_a_model_and_its_optimizer_serve_two_engines_in_turn(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(twice_on_one_model, stage)) == {(0.0, True)}


SCRIPT = """
import deepspeed, torch
from torch import nn
from lwopt_backend.integrations import deepspeed_zero

deepspeed_zero.register()
settings = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 0.02, "storage": "owned", "bucket_mb": 0.01}},
    "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 20}},
}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 40), nn.GELU(), nn.Linear(40, 8))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
x, y = torch.randn(32, 16).bfloat16(), torch.randn(32, 8).bfloat16()
losses = []
for step in range(24):
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print(f"rank {engine.global_rank}: learns {losses[-1] < losses[0] - 0.05}, {type(engine.optimizer).__name__}")
engine.destroy()
"""


def test_the_launcher_runs_it_and_it_says_what_it_does(tmp_path: Path) -> None:
    script = tmp_path / "train_owned.py"
    script.write_text(SCRIPT)
    output = launch(script)
    for rank in range(2):
        assert f"rank {rank}: learns True, OwnedLayerWiseMuon" in output
    assert "Storage: owned by 2 data-parallel ranks" in output
    assert "Without effect on owned storage: zero_optimization.reduce_bucket_size." in output
    assert "3 of 6 trained parameters are matrices" in output
