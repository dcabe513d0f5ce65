"""Matrices in a parameter are updated as if they were parameters of their own, on every engine, bit for bit; and
QK-clip after a step equals multiplying the rows of heads by hand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from lwopt_backend import Heads, LayerWiseOptimizer, QKClip
from lwopt_backend.integrations import fsdp2
from lwopt_backend.qk_clip import RowScaling
from tests.cells import cells
from tests.fsdp2 import Sharded, backward, copy_gradients, mesh_of, weights_of
from tests.fused import ATOMS, Experts, FusedLM, FusedReference
from tests.on_ranks import on_ranks
from tests.owned import difference, exact_sums, optimizer_for, shares, step_alone, train
from tests.zero import ADAMW, MUON, config, engine_for, full_weights, largest_difference
from tests.zero import train as train_engine

STEPS = 3
COUNT = 3 + 3 + 1 + 2 + 1 + 1 + 3 + 1 + 4 + 2  # of matrices in the model
ELEMENTWISE = {"name": "adamw", **ADAMW}
BOUND = 100.0
LAYERS = {
    "fused": Heads("qkv.weight", "qkv.weight", heads=4, query_bias="qkv.bias", key_bias="qkv.bias"),
    "grouped": Heads("grouped.weight", "grouped.weight", heads=2),
    "apart": Heads("mix.weight", "out.weight", heads=6, key_heads=2, query_bias=None, key_bias="out.bias"),
    "transposed": Heads("gate_up.weight", "down.weight", heads=2),
}


def logits(step: int) -> dict[str, Tensor]:
    """Of the layers that are clipped in a step; the first is not."""
    found = {
        "fused": torch.tensor([50.0, 150.0, 400.0, 90.0]) + step,
        "grouped": torch.tensor([250.0, 30.0]),
        "apart": torch.tensor([20.0, 300.0, 110.0, 30.0, 101.0, 99.0]),
        "transposed": torch.tensor([130.0, 120.0]),
    }
    return found if step else {}


@torch.no_grad()
def by_hand(model: Any, step: int) -> None:
    if not step:
        return
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


def check_deepspeed(stage: int, **options: Any) -> None:
    settings, reference = config(stage, rows=8, atoms=ATOMS, **options), FusedReference()
    with engine_for(settings, FusedLM()) as engine:
        owned = options.get("storage") == "owned"
        optimizer = engine.optimizer if owned else engine.basic_optimizer
        clip = QKClip(optimizer, LAYERS, BOUND)
        for step in range(STEPS):
            clip(logits(step))
            train_engine(engine, range(step, step + 1), same_rows=True)
            reference.train(range(step, step + 1))
            by_hand(reference.model, step)
        assert largest_difference(full_weights(engine), reference.model) == 0.0
        if not owned:
            (plan,) = (plan.matrices for plan in optimizer._binding.plans if plan.matrices)
            names = {atom.name for atom in plan.atoms}
            assert len(plan.buckets) > 1 and len(plan.atoms) == COUNT
            assert {"qkv.weight.q", "gate_up.weight.up", "experts.up[2]", "conv.weight", "moe.w13[1].gate"} <= names


@cells(ranks=[2, 4], stage=[0, 1, 2, 3])
@on_ranks()
def test_zero(stage: int) -> None:
    check_deepspeed(stage, bucket_numel=500, **({"policy": "balance"} if stage in (1, 2) else {}))


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_owned_storage_in_deepspeed(stage: int) -> None:
    check_deepspeed(stage, storage="owned")


@cells(ranks=[1, 2, 3, 4], layout=["padded", "compact", "auto"], step_in_backward=[False, True])
@on_ranks()
def test_owned(layout: str, step_in_backward: bool) -> None:
    model, single = exact_sums(FusedLM()), FusedReference(exact_sums(FusedLM()))
    optimizer = optimizer_for(model, atoms=ATOMS, layout=layout, step_in_backward=step_in_backward)
    clip = QKClip(optimizer, LAYERS, BOUND)
    for step in range(STEPS):
        clip(logits(step))
        train(model, optimizer, range(step, step + 1))
        step_alone(single, step, dist.get_world_size())
        by_hand(single.model, step)
    assert difference(model, single.model) == 0.0


def inputs(param: Tensor) -> Shard | None:
    """Shard(1), and of the experts within every slice."""
    return Shard(1 if param.ndim > 1 and param.shape[1] % dist.get_world_size() == 0 else 0)


@cells(
    lambda ranks, placement, attach=None: placement != "hybrid" or ranks == 4,
    ranks=[2, 4],
    placement=["rows", "inputs", "hybrid"],
    attach=[False, True],
)
@on_ranks()
def test_fsdp2(placement: str, attach: bool) -> None:
    model, world_size = FusedLM(), dist.get_world_size()
    if placement == "hybrid":
        fully_shard(model, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    else:
        fully_shard(model, mesh=mesh_of(world_size), shard_placement_fn=inputs if placement == "inputs" else None)
    sharded, single = Sharded(model, world_size, dist.get_rank()), FusedReference()
    options = {"elementwise": ELEMENTWISE, "atoms": ATOMS, "report": False, "bucket_matrices": 2}
    optimizer = fsdp2.LayerWiseOptimizer(model, **MUON, **options)
    if attach:
        optimizer.attach(model)
    clip = QKClip(optimizer, LAYERS, BOUND)
    for step in range(STEPS):
        clip(logits(step))
        backward(sharded, step)
        copy_gradients(model, single.model)
        for one in (single.muon, single.adamw, optimizer):
            one.step()
            one.zero_grad()
        by_hand(single.model, step)
    assert largest_difference(weights_of(model), single.model) == 0.0
    assert sum(len(stepper.plan.atoms) for stepper in optimizer._steppers) == COUNT


class Stack(nn.Module):
    """Six experts in one parameter, which is most of the work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 24)
        self.experts = Experts(6, 24)
        self.lm_head = nn.Linear(24, 37, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.experts(self.embedding(tokens))
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


@cells(ranks=[2, 3, 4], layout=["compact", "auto"], rule=["muon", "normuon"])
@on_ranks()
def test_a_stack_is_owned_by_several_ranks(layout: str, rule: str, tmp_path: Path) -> None:
    """Trained as where no matrix is cut, and resumed from files by another optimizer."""
    world_size = dist.get_world_size()

    def made(layout: str) -> tuple[nn.Module, LayerWiseOptimizer]:
        model, options = exact_sums(Stack()), {"elementwise": ELEMENTWISE, "report": False, "group_size": world_size}
        return model, LayerWiseOptimizer(model, {"name": rule, **MUON}, layout=layout, **options)

    (model, optimizer), (again, resumed), (whole, plain) = made(layout), made(layout), made("padded")
    train(model, optimizer, 3)
    optimizer.save_state_dict(tmp_path)
    resumed.load_state_dict_from(tmp_path)
    train(whole, plain, 3)
    for net, its in ((model, optimizer), (again, resumed), (whole, plain)):
        train(net, its, range(3, 5))
    assert difference(again, model) == difference(whole, model) == 0.0
    pieces = [p for b in optimizer.core.manager.buckets for p in b.pieces]
    mine = sum(p.numel // 24**2 for p in pieces if optimizer.core.members[p.param].name == "experts.up")
    assert mine <= -(-6 // world_size), "experts are shared out"


# QK-clip
def test_any_range_of_a_parameter_takes_the_factors_of_its_outputs() -> None:
    """However it is cut, within a row or not; stored transposed, of one dimension or of three."""
    shapes = {"plain": (6, 4), "transposed": (4, 6), "bias": (6,), "conv": (6, 2, 2)}
    factors = torch.arange(2.0, 8.0)
    scaling = RowScaling(shapes, frozenset({"transposed"}), lambda name: ())
    scaling.set(dict.fromkeys(shapes, factors))
    for name, shape in shapes.items():
        outputs = factors if name in ("transposed", "bias") else factors.view(-1, *[1] * (len(shape) - 1))
        expected = (torch.ones(shape) * outputs).flatten()
        for start in range(len(expected)):
            for stop in range(start + 1, len(expected) + 1):
                elements = torch.ones(stop - start)
                assert scaling.scale_range(name, elements, start)
                assert torch.equal(elements, expected[start:stop])


@on_ranks(2)
def test_fp32_masters_are_clipped_and_the_parameter_is_their_rounding() -> None:
    model = FusedLM().bfloat16()
    optimizer = optimizer_for(model, atoms=ATOMS, grad_dtype="float32")
    clip, seen = QKClip(optimizer, {"fused": LAYERS["fused"]}, BOUND), []
    for _ in range(2):
        model(*shares(0, 1)[0]).backward()
        optimizer.step()
        optimizer.synchronize()
        seen.append(model.qkv.weight.detach().clone())
        optimizer.zero_grad()
        clip({"fused": torch.full((4,), 400.0)})
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    before, after = seen
    assert torch.equal(after[:32], before[:32] / 2) and torch.equal(after[32:], before[32:])


FUSED = LAYERS["fused"]
APART = "layer 'fused': 'qkv.weight' is query and key; expected matrices 'q' and 'k' in it, found "
DIVIDE = '; divide it with the option "atoms": {"qkv.weight": {"qkv": ['
TWO_WEIGHTS = "'out.bias' is query_bias and key_bias, but query and key are two weights, 'mix.weight' and"
OTHER_BIAS = "expected a bias of 24 outputs, as 'mix.weight' has; found 'qkv.bias' with 40"
WRONG_LAYERS: list[tuple[dict[str, Any], Heads, str]] = [
    ({}, Heads("qvk.weight", "down.weight", 2), "no trained parameter is named 'qvk.weight'; did you mean 'qkv.we"),
    ({}, Heads("qkv.weight", "qkv.weight", 5), "'qkv.weight' has 24 outputs for 'q', which do not divide into 5 he"),
    ({}, Heads("mix.weight", "out.weight", 6, key_heads=4), "layer 'fused': key_heads: expected a divisor of the 6"),
    ({}, Heads("mix.weight", "down.weight", 2, query_bias="out.bias", key_bias="out.bias"), TWO_WEIGHTS),
    ({}, Heads("mix.weight", "down.weight", 2, query_bias="qkv.bias"), f"layer 'fused': {OTHER_BIAS}"),
    ({"atoms": {}}, FUSED, f"{APART}a single matrix{DIVIDE}"),
    ({"atoms": {"qkv.weight": "whole"}}, FUSED, f"{APART}a single matrix{DIVIDE}"),
    ({"atoms": {"qkv.weight": {"split_sizes": [24, 8, 8]}}}, FUSED, f"{APART}'part0', 'part1', 'part2'{DIVIDE}"),
    ({"atoms": {}, "exclude": ["qkv.weight"]}, FUSED, f"{APART}none, because no matrix rule updates it{DIVIDE}"),
]
ONE_PER_HEAD = "layer 'fused': expected max_logits as a tensor of shape (4,), one per head; found "


@pytest.mark.parametrize(("options", "heads", "message"), WRONG_LAYERS)
def test_wrong_layers_are_errors(options: dict[str, Any], heads: Heads, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        QKClip(optimizer_for(FusedLM(), **{"atoms": ATOMS, **options}), {"fused": heads})


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ({"fusd": torch.ones(4)}, "unknown layer 'fusd'; did you mean 'fused'?"),
        (torch.ones(4), "max_logits: expected a mapping of layers to tensors of shape (heads,); found a Tensor"),
        ({"fused": torch.ones(3)}, f"{ONE_PER_HEAD}shape (3,)"),
        ({"fused": torch.ones(4, 1)}, f"{ONE_PER_HEAD}shape (4, 1)"),
        ({"fused": torch.tensor(1.0)}, f"{ONE_PER_HEAD}shape ()"),
        ({"fused": [1.0, 2.0, 3.0, 4.0]}, f"{ONE_PER_HEAD}a list"),
    ],
)
def test_wrong_logits_are_errors(logits: Any, message: str) -> None:
    clip = QKClip(optimizer_for(FusedLM(), atoms=ATOMS), LAYERS)
    with pytest.raises(ValueError, match=re.escape(message)):
        clip(logits)


@on_ranks(2)
def test_other_optimizers_are_refused_with_what_to_pass() -> None:
    """Also what ZeRO wraps ours in; and ours where a fused weight was left whole."""
    with engine_for(config(2, rows=8, atoms={"qkv.weight": "whole"}), FusedLM()) as engine:
        for other, name in (
            (torch.optim.SGD(FusedLM().parameters()), "torch.optim.sgd.SGD"),
            (engine.optimizer, "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"),
        ):
            with pytest.raises(TypeError, match=f"QKClip: expected .* engine.basic_optimizer .*; found {name}"):
                QKClip(other, {"fused": FUSED})
        with pytest.raises(ValueError, match=re.escape(APART)):
            QKClip(engine.basic_optimizer, {"fused": FUSED})
