"""QK-clip after a step, on every engine, equals multiplying the rows of heads by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lwopt_backend import Heads, QKClip
from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import backward, copy_gradients, named
from tests.fused import ATOMS, FusedLM, FusedReference
from tests.owned import difference, exact_sums, shares, step_alone, train
from tests.ranks import RankPool
from tests.test_atoms_on_engines import ELEMENTWISE, owned_optimizer, shard_fused
from tests.zero import MUON, config, engine_for, full_weights, largest_difference
from tests.zero import train as train_engine

STEPS = 3
LAYERS = {
    "fused": Heads("qkv.weight", "qkv.weight", heads=4, query_bias="qkv.bias", key_bias="qkv.bias"),
    "grouped": Heads("grouped.weight", "grouped.weight", heads=2),
    "apart": Heads("mix.weight", "out.weight", heads=6, key_heads=2, query_bias=None, key_bias="out.bias"),
    "transposed": Heads("gate_up.weight", "down.weight", heads=2),
}
BOUND = 100.0


def logits(step: int) -> dict[str, Tensor]:
    return {
        "fused": torch.tensor([50.0, 150.0, 400.0, 90.0]) + step,
        "grouped": torch.tensor([250.0, 30.0]),
        "apart": torch.tensor([20.0, 300.0, 110.0, 30.0, 101.0, 99.0]),
        "transposed": torch.tensor([130.0, 120.0]),
    }


@torch.no_grad()
def by_hand(model: Any, step: int) -> None:
    given = {name: (BOUND / values.clamp(min=BOUND)) for name, values in logits(step).items()}
    half = given["fused"] ** 0.5
    for head in range(4):
        for tensor in (model.qkv.weight, model.qkv.bias):
            tensor[head * 6 : head * 6 + 6] *= half[head]
            tensor[24 + head * 2 : 24 + head * 2 + 2] *= half[head]
    for group, factor in enumerate(given["grouped"] ** 0.5):
        model.grouped.weight[group * 16 : group * 16 + 12] *= factor  # 8 rows of q and 4 of k
    for head, factor in enumerate(given["apart"]):  # keys are shared, so queries take all
        model.mix.weight[head * 4 : head * 4 + 4] *= factor
    for head, factor in enumerate(given["transposed"] ** 0.5):
        model.gate_up.weight[:, head * 23 : head * 23 + 23] *= factor
        model.down.weight[head * 12 : head * 12 + 12] *= factor


def differ_on_zero(stage: int, **options: Any) -> float:
    settings, reference = config(stage, rows=8, atoms=ATOMS, **options), FusedReference()
    with engine_for(settings, FusedLM()) as engine:
        ours = engine.optimizer if options.get("storage") == "owned" else engine.basic_optimizer
        clip = QKClip(ours, LAYERS, BOUND)
        for step in range(STEPS):
            clip(logits(step))
            train_engine(engine, range(step, step + 1), same_rows=True)
            reference.train(range(step, step + 1))
            by_hand(reference.model, step)
        return largest_difference(full_weights(engine), reference.model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(differ_on_zero, stage)) == {0.0}


@pytest.mark.parametrize("stage", [0, 2])
def test_owned_storage_in_deepspeed(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(differ_on_zero, stage, storage="owned")) == {0.0}


def differ_owned(**options: Any) -> float:
    world_size = dist.get_world_size()
    model, single = exact_sums(FusedLM()), FusedReference(exact_sums(FusedLM()))
    optimizer = owned_optimizer(model, **options)
    clip = QKClip(optimizer, LAYERS, BOUND)
    for step in range(STEPS):
        clip(logits(step))
        train(model, optimizer, range(step, step + 1))
        step_alone(single, step, world_size)
        by_hand(single.model, step)
    return difference(model, single.model)


@pytest.mark.parametrize("options", [{}, {"layout": "compact"}, {"step_in_backward": True}], ids=str)
@pytest.mark.parametrize("ranks", [1, 3], indirect=True)
def test_owned(ranks: RankPool, options: dict[str, Any]) -> None:
    assert set(ranks.run(differ_owned, **options)) == {0.0}


def differ_on_fsdp2(placement: str) -> float:
    sharded = shard_fused(placement)
    optimizer = fsdp2.LayerWiseOptimizer(sharded.model, **MUON, elementwise=ELEMENTWISE, atoms=ATOMS, report=False)
    clip, single = QKClip(optimizer, LAYERS, BOUND), FusedReference()
    theirs = dict(single.model.named_parameters())
    for step in range(STEPS):
        clip(logits(step))
        backward(sharded, step)
        copy_gradients(sharded.model, single.model)
        for one in (single.muon, single.adamw, optimizer):
            one.step()
            one.zero_grad()
        by_hand(single.model, step)
    found = {name: param.full_tensor() for name, param in named(sharded.model)}
    return max(float((found[name] - theirs[name].detach()).abs().max()) for name in theirs)


@pytest.mark.parametrize("placement", ["rows", "inputs"])
def test_fsdp2(ranks: RankPool, placement: str) -> None:
    assert set(ranks.run(differ_on_fsdp2, placement)) == {0.0}


def masters_are_clipped() -> tuple[bool, bool]:
    """With fp32 masters the master is clipped, and the parameter is its rounding."""
    model = FusedLM().bfloat16()
    optimizer = owned_optimizer(model, grad_dtype="float32")
    clip = QKClip(optimizer, {"fused": LAYERS["fused"]}, BOUND)
    model(*shares(0, 1)[0]).backward()
    optimizer.step()
    optimizer.synchronize()
    before = model.qkv.weight.detach().clone()
    optimizer.zero_grad()
    clip({"fused": torch.full((4,), 400.0)})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(*shares(0, 1)[0]).backward()
    optimizer.step()
    optimizer.synchronize()
    after = model.qkv.weight.detach()
    return torch.equal(after[:32], before[:32] / 2), torch.equal(after[32:], before[32:])


def test_masters(ranks: RankPool) -> None:
    assert ranks.run(masters_are_clipped) == [(True, True)] * 2


def test_wrong_layers_and_logits_are_errors() -> None:
    optimizer = owned_optimizer(FusedLM())
    with pytest.raises(ValueError, match="no trained parameter is named 'qvk.weight'; did you mean 'qkv.weight'?"):
        QKClip(optimizer, {"0": Heads("qvk.weight", "down.weight", heads=2)})
    with pytest.raises(ValueError, match="'qkv.weight' has 24 outputs for 'q', which do not divide into 5 heads"):
        QKClip(optimizer, {"0": Heads("qkv.weight", "qkv.weight", heads=5)})
    with pytest.raises(ValueError, match="layer '0': key_heads: expected a divisor of the 6 heads .* found 4"):
        QKClip(optimizer, {"0": Heads("mix.weight", "out.weight", heads=6, key_heads=4)})
    clip = QKClip(optimizer, LAYERS)
    with pytest.raises(ValueError, match="unknown layer 'fusd'; did you mean 'fused'?"):
        clip({"fusd": torch.ones(4)})
    with pytest.raises(ValueError, match="max_logits: expected a mapping of layers to tensors .* found a Tensor"):
        clip(torch.ones(4))


@pytest.mark.parametrize(
    ("logits", "found"),
    [
        (torch.ones(3), "shape (3,)"),
        (torch.ones(4, 1), "shape (4, 1)"),
        (torch.tensor(1.0), "shape ()"),
        ([1.0, 2.0, 3.0, 4.0], "a list"),
    ],
    ids=str,
)
def test_logits_are_a_tensor_with_one_per_head(logits: Any, found: str) -> None:
    clip = QKClip(owned_optimizer(FusedLM()), LAYERS)
    expected = f"layer 'fused': expected max_logits as a tensor of shape (4,), one per head; found {found}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        clip({"fused": logits})


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"atoms": {}}, "a single matrix"),
        ({"atoms": {"qkv.weight": "whole"}}, "a single matrix"),
        ({"atoms": {"qkv.weight": {"split_sizes": [24, 8, 8]}}}, "'part0', 'part1', 'part2'"),
        ({"atoms": {}, "exclude": ["qkv.weight"]}, "none, because no matrix rule updates it"),
    ],
    ids=str,
)
def test_query_and_key_in_one_weight_must_be_told_apart(options: dict[str, Any], found: str) -> None:
    optimizer = owned_optimizer(FusedLM(), **options)
    expected = (
        f"layer 'fused': 'qkv.weight' is query and key; expected matrices 'q' and 'k' in it, found {found}; divide it "
        'with the option "atoms": {"qkv.weight": {"qkv": ['
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        QKClip(optimizer, {"fused": LAYERS["fused"]})


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (
            Heads("mix.weight", "down.weight", heads=2, query_bias="out.bias", key_bias="out.bias"),
            "layer '0': 'out.bias' is query_bias and key_bias, but query and key are two weights, 'mix.weight' and",
        ),
        (
            Heads("mix.weight", "down.weight", heads=2, query_bias="qkv.bias"),
            "layer '0': expected a bias of 24 outputs, as 'mix.weight' has; found 'qkv.bias' with 40",
        ),
    ],
    ids=["one bias for two weights", "another weight's bias"],
)
def test_biases_must_be_those_of_the_weights(heads: Heads, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QKClip(owned_optimizer(FusedLM()), {"0": heads})


def test_other_optimizers_are_refused_with_what_to_pass() -> None:
    expected = (
        "QKClip: expected an optimizer of this package: a LayerWiseOptimizer, or on DeepSpeed, after "
        "deepspeed.initialize, engine.basic_optimizer (with owned storage engine.optimizer); found torch.optim.sgd.SGD"
    )
    with pytest.raises(TypeError, match=re.escape(expected)):
        QKClip(torch.optim.SGD(FusedLM().parameters()), LAYERS)


def construction_on_zero() -> list[str]:
    """What QKClip says of the optimizer that ZeRO wraps ours in, and of a fused weight that is left whole."""
    found = []
    with engine_for(config(2, rows=8, atoms={"qkv.weight": "whole"}), FusedLM()) as engine:
        for optimizer in (engine.optimizer, engine.basic_optimizer):
            try:
                QKClip(optimizer, {"fused": LAYERS["fused"]})
            except (TypeError, ValueError) as error:
                found.append(str(error))
    return found


def test_on_deepspeed_every_rank_is_told(ranks: RankPool) -> None:
    for wrapper, fused in ranks.run(construction_on_zero):
        assert "engine.basic_optimizer" in wrapper and wrapper.endswith("DeepSpeedZeroOptimizer")
        assert fused.startswith("layer 'fused': 'qkv.weight' is query and key; expected matrices 'q' and 'k' in it")
