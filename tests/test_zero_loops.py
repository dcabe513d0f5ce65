"""Training loops and models as people write them: each equals a single process bit for bit, or is an error."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import (
    ADAMW,
    MUON,
    ROWS,
    Reference,
    batch_shares,
    config,
    engine_for,
    full_weights,
    largest_difference,
    newton_schulz_in_float32,
    train,
)

STEPS = 3
all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def snapshot(engine: Any) -> list[Tensor]:
    states = [tensor for state in engine.basic_optimizer.state.values() for tensor in state.values()]
    return [tensor.clone() for tensor in (*full_weights(engine).values(), *states)]


def evaluate(engine: Any, first: Any, second: Any) -> None:
    """After every micro-batch, the last of which took a step: nothing may change."""
    for rows in (first, second):
        engine.backward(engine(*rows))
        engine.step()
        before = snapshot(engine)
        engine.eval()
        with torch.no_grad():
            engine(*first)
        engine.train()
        assert all(torch.equal(old, new) for old, new in zip(before, snapshot(engine), strict=True))


def call_backward_of_the_loss(engine: Any, first: Any, second: Any) -> None:
    for rows in (first, second):
        engine(*rows).backward()  # DeepSpeed divides by the accumulation steps
        engine.step()


def accumulate_unmanaged(engine: Any, first: Any, second: Any) -> None:
    for rows in (first, second):
        engine.backward(engine(*rows) / 2)
    engine.step()


def accumulate_without_sync(engine: Any, first: Any, second: Any) -> None:
    with engine.no_sync():
        engine.backward(engine(*first) / 2)
    engine.backward(engine(*second) / 2)
    engine.step()


MANAGED = {"gradient_accumulation_steps": 2}
LOOPS = {
    "eval": (evaluate, MANAGED),
    "loss.backward": (call_backward_of_the_loss, MANAGED),
    "unmanaged": (accumulate_unmanaged, {"managed_gradient_accumulation": False}),
    "no_sync": (accumulate_without_sync, {}),
}


def differ_in_loop(stage: int, name: str) -> float:
    loop, changes = LOOPS[name]
    reference = Reference()
    with engine_for(config(stage, rows=ROWS // 2) | changes) as engine:
        for step in range(STEPS):
            loop(engine, *batch_shares(step, 2))
        reference.train(STEPS, parts=2)
        return largest_difference(full_weights(engine), reference.model)


REFUSED = {
    (0, "loss.backward"): "Direct calls to tensor.backward() are not supported in this configuration",
    (2, "no_sync"): "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2",
    (3, "no_sync"): "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 3",
}


@all_stages
@pytest.mark.parametrize("loop", LOOPS)
def test_training_loops_equal_a_single_process(ranks: RankPool, stage: int, loop: str) -> None:
    if (stage, loop) in REFUSED:  # by DeepSpeed
        assert all(REFUSED[stage, loop] in error for error in ranks.errors(differ_in_loop, stage, loop))
    else:
        assert ranks.run(differ_in_loop, stage, loop) == [0.0, 0.0]


class Variant(UnevenLM):
    """The same model with a tied head, frozen layers, parameters of no elements, or recomputed activations."""

    def __init__(self, kind: str) -> None:
        super().__init__(tied=kind == "tied")
        self.kind = kind
        if kind == "frozen":
            for module in (self.embedding, self.layers[2]):
                module.requires_grad_(False)
        if kind == "zero-size":
            self.down, self.up = nn.Parameter(torch.zeros(24, 0)), nn.Parameter(torch.zeros(0, 24))
            self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.kind == "zero-size":
            x = x + x @ self.down @ self.up + self.nothing.sum()
        x = x + self.inner(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    def inner(self, x: Tensor) -> Tensor:
        if self.kind == "recomputed by DeepSpeed":
            if not deepspeed.checkpointing.is_configured():
                deepspeed.checkpointing.configure(None)
            return deepspeed.checkpointing.checkpoint(self.layers, x)
        if self.kind.startswith("recomputed"):
            return checkpoint(self.layers, x, use_reentrant=self.kind == "recomputed, reentrant")
        return self.layers(x)


KINDS = ("tied", "frozen", "zero-size", "recomputed", "recomputed, reentrant", "recomputed by DeepSpeed")


def differ_with_variant(stage: int, kind: str) -> tuple[float, list[str]]:
    reference = Reference(Variant(kind))
    frozen = {name: p.clone() for name, p in reference.model.named_parameters() if not p.requires_grad}
    with engine_for(config(stage, rows=ROWS), Variant(kind)) as engine:
        train(engine, STEPS, same_rows=True)
        reference.train(STEPS)
        ours = {}
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
                ours[name] = param.detach().clone()
        routes = engine.basic_optimizer._binding.grouping.routes
    difference = 0.0
    for name, param in reference.model.named_parameters():
        assert ours[name].shape == param.shape
        assert name not in frozen or torch.equal(ours[name], frozen[name])
        difference = max([difference, *(ours[name] - param.detach()).abs().flatten().tolist()])
    return difference, [route.name for route in routes if route.kind == "matrix"]


@all_stages
@pytest.mark.parametrize("kind", KINDS)
def test_models_equal_a_single_process(ranks: RankPool, stage: int, kind: str) -> None:
    if (stage, kind) == (3, "zero-size"):  # ZeRO-3 takes what it never gathers for what it has not gathered yet
        for error in ranks.errors(differ_with_variant, stage, kind):
            assert "have no elements, which ZeRO-3 cannot gather" in error
        return
    matrices = [name for name in MATRICES if kind != "frozen" or name != "layers.2.weight"]
    for difference, routed in ranks.run(differ_with_variant, stage, kind):
        assert difference == 0.0
        assert routed == matrices


def differ_under_zero_init() -> tuple[set[torch.Size], float, float, list[str]]:
    """Parameters are empty when the engine sees them; what is gathered to be read is what was trained."""
    settings, reference = config(3, rows=ROWS), Reference()
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = UnevenLM()
    shapes = {param.shape for param in model.parameters()}
    with engine_for(settings, model) as engine:
        train(engine, STEPS, same_rows=True)
        reference.train(STEPS)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            read = {name: param.detach().clone() for name, param in model.named_parameters()}
        routes = engine.basic_optimizer._binding.grouping.routes
        differences = [largest_difference(weights, reference.model) for weights in (full_weights(engine), read)]
        return shapes, *differences, [route.name for route in routes if route.kind == "matrix"]


def test_parameters_made_under_zero_init(ranks: RankPool) -> None:
    for found in ranks.run(differ_under_zero_init):
        assert found == ({torch.Size([0])}, 0.0, 0.0, list(MATRICES))


class Forked(UnevenLM):
    """Two ways of one shape, of which a rank takes one. ``touching`` the other gives it a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor, way: int, touching: bool) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.ways[way](x)
        x = x + self.layers(x) * self.gated(x)
        loss = nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())
        return loss + 0.0 * sum(p.sum() for p in self.ways[1 - way].parameters()) if touching else loss


def differ_when_ranks_go_other_ways(stage: int, touching: bool, optimizer: str) -> float:
    rank, model = torch.distributed.get_rank(), Forked()
    named = dict(model.named_parameters())
    optimizers: list[torch.optim.Optimizer] = []
    settings = config(stage, rows=ROWS // 2, ns_dtype="float32")
    if optimizer == "AdamW":
        settings["optimizer"] = {"type": optimizer, "params": {**ADAMW, "torch_adam": True}}
    else:
        matrices = [named.pop(name) for name in (*MATRICES, "ways.0.weight", "ways.1.weight")]
        optimizers.append(torch.optim.Muon(matrices, **MUON))
    optimizers.append(torch.optim.AdamW(list(named.values()), **ADAMW))
    with newton_schulz_in_float32(), engine_for(settings, Forked()) as engine:
        for step in range(STEPS):
            shares = batch_shares(step, 2)
            engine.backward(engine(*shares[rank], rank, touching))
            engine.step()
            for way, rows in enumerate(shares):
                (model(*rows, way, touching) / 2).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return largest_difference(full_weights(engine), model)


@pytest.mark.parametrize(("stage", "touching"), [(0, False), (1, True)])
def test_a_rank_counts_with_a_zero_gradient_for_what_it_does_not_use(
    ranks: RankPool, stage: int, touching: bool
) -> None:
    assert max(ranks.run(differ_when_ranks_go_other_ways, stage, touching, "LayerWiseMuon")) <= 1e-6


@pytest.mark.parametrize(("stage", "touching"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("optimizer", ["LayerWiseMuon", "AdamW"])
def test_zero_mixes_up_gradients_of_ranks_that_go_other_ways(
    ranks: RankPool, stage: int, touching: bool, optimizer: str
) -> None:
    """DeepSpeed adds up buckets in the order in which each rank filled its own, with any optimizer, and says nothing.

    Should this fail, DeepSpeed has learnt better, and the documentation must.
    """
    assert min(ranks.run(differ_when_ranks_go_other_ways, stage, touching, optimizer)) > 1e-3


def weights_of_engines_in_a_row(stage: int) -> list[float]:
    found = []
    for _ in range(2):
        reference = Reference()
        with engine_for(config(stage, rows=ROWS)) as engine:
            train(engine, 2, same_rows=True)
            reference.train(2)
            found.append(largest_difference(full_weights(engine), reference.model))
    return found


@all_stages
def test_an_engine_after_a_destroyed_one(ranks: RankPool, stage: int) -> None:
    assert ranks.run(weights_of_engines_in_a_row, stage) == [[0.0, 0.0], [0.0, 0.0]]
