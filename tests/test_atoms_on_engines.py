"""Matrices in a parameter are updated as if they were parameters of their own, on every engine, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import Sharded, backward, copy_gradients, mesh_of, named
from tests.fused import ATOMS, MATRICES, Experts, FusedLM, FusedReference
from tests.owned import BUCKET_MB, difference, exact_sums, step_alone, train
from tests.ranks import RankPool
from tests.test_owned_state import equal
from tests.zero import ADAMW, MUON, config, engine_for, full_weights, largest_difference
from tests.zero import train as train_engine

STEPS = 5
ELEMENTWISE = {"name": "adamw", **ADAMW}
both_sizes = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])


def differ_on_zero(stage: int, **options: Any) -> tuple[float, int, list[str]]:
    settings, reference = config(stage, rows=8, atoms=ATOMS, **options), FusedReference()
    with engine_for(settings, FusedLM()) as engine:
        train_engine(engine, STEPS, same_rows=True)
        reference.train(STEPS)
        optimizer = engine.basic_optimizer if options.get("storage") != "owned" else engine.optimizer
        if options.get("storage") == "owned":
            return largest_difference(full_weights(engine), reference.model), 0, []
        plans = [plan.matrices for plan in optimizer._binding.plans if plan.matrices]
        names = [atom.name for plan in plans for atom in plan.atoms]
        return largest_difference(full_weights(engine), reference.model), max(len(p.buckets) for p in plans), names


@both_sizes
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero(ranks: RankPool, stage: int) -> None:
    options = {"policy": "balance"} if stage in (1, 2) else {}
    for found, buckets, names in ranks.run(differ_on_zero, stage, bucket_numel=500, **options):
        assert found == 0.0 and buckets > 1
        assert {"qkv.weight.q", "grouped.weight.v", "gate_up.weight.up", "experts.up[2]", "conv.weight"} <= set(names)
        assert len(names) == 3 + 3 + 1 + 2 + 1 + 1 + 1 + 3


@pytest.mark.parametrize("stage", [0, 2])
def test_owned_storage_in_deepspeed(ranks: RankPool, stage: int) -> None:
    assert {found for found, *_ in ranks.run(differ_on_zero, stage, storage="owned")} == {0.0}


def owned_optimizer(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    settings = {"atoms": ATOMS, "bucket_mb": BUCKET_MB, "report": False, **options}
    return LayerWiseOptimizer(model, **MUON, elementwise=ELEMENTWISE, **settings)


def differ_owned(layout: str) -> float:
    world_size = dist.get_world_size()
    model, single = exact_sums(FusedLM()), FusedReference(exact_sums(FusedLM()))
    train(model, owned_optimizer(model, layout=layout), STEPS)
    for step in range(STEPS):
        step_alone(single, step, world_size)
    return difference(model, single.model)


@pytest.mark.parametrize("layout", ["padded", "compact", "auto"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True)
def test_owned(ranks: RankPool, layout: str) -> None:
    assert set(ranks.run(differ_owned, layout)) == {0.0}


def rows(param: torch.Tensor) -> Shard | None:
    return None


def inputs(param: torch.Tensor) -> Shard | None:
    """Shard(1), and of the experts within every slice."""
    dim = 1 if param.ndim > 1 and param.shape[1] % dist.get_world_size() == 0 else 0
    return Shard(dim)


def shard_fused(placement: str) -> Sharded:
    model, world_size = FusedLM(), dist.get_world_size()
    if placement == "hybrid":
        fully_shard(model, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    else:
        fully_shard(model, mesh=mesh_of(world_size), shard_placement_fn={"rows": rows, "inputs": inputs}[placement])
    return Sharded(model, world_size, dist.get_rank())


def differ_on_fsdp2(placement: str, attach: bool) -> tuple[float, list[str]]:
    sharded = shard_fused(placement)
    optimizer = fsdp2.LayerWiseOptimizer(
        sharded.model, **MUON, elementwise=ELEMENTWISE, atoms=ATOMS, report=False, bucket_matrices=2
    )
    if attach:
        optimizer.attach(sharded.model)
    single = FusedReference()
    theirs = dict(single.model.named_parameters())
    for step in range(STEPS):
        backward(sharded, step)
        copy_gradients(sharded.model, single.model)
        for one in (single.muon, single.adamw, optimizer):
            one.step()
            one.zero_grad()
    found = {name: param.full_tensor() for name, param in named(sharded.model)}
    worst = max(float((found[name] - theirs[name].detach()).abs().max()) for name in theirs)
    return worst, [atom.name for stepper in optimizer._steppers for atom in stepper.plan.atoms]


@both_sizes
@pytest.mark.parametrize("placement", ["rows", "inputs"])
@pytest.mark.parametrize("attach", [False, True], ids=["", "attach"])
def test_fsdp2(ranks: RankPool, placement: str, attach: bool) -> None:
    for found, names in ranks.run(differ_on_fsdp2, placement, attach):
        assert found == 0.0 and len(names) == 15


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_fsdp2_hybrid(ranks: RankPool) -> None:
    assert {found for found, _ in ranks.run(differ_on_fsdp2, "hybrid", False)} == {0.0}


# What is known of the matrices is told and balanced


def balance_of(atoms: dict[str, Any]) -> float:
    model = nn.Sequential(nn.Linear(24, 72), nn.ReLU(), nn.Linear(72, 72))
    with engine_for(config(2, rows=8, atoms=atoms, policy="balance"), model) as engine:
        plans = [plan.matrices for plan in engine.basic_optimizer._binding.plans if plan.matrices]
        return plans[0].ownership.imbalance


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_balance_improves(ranks: RankPool) -> None:
    """Two matrices leave one of three ranks idle; three parts of each do not."""
    assert min(ranks.run(balance_of, {"*.weight": "whole"})) > 2
    assert ranks.run(balance_of, {"*.weight": {"heads": 3}}) == [1.0] * 3


def printed() -> dict[str, str]:
    optimizer = owned_optimizer(FusedLM())
    return {route.name: route.reason for route in optimizer._grouping.routes if route.name in MATRICES}


def test_the_routing_tells_what_is_in_a_parameter(ranks: RankPool) -> None:
    for reasons in ranks.run(printed):
        assert reasons["qkv.weight"] == "2-D weight: q, k, v, set by atoms 'qkv.weight'"
        assert reasons["experts.up"] == "3 stacked experts"
        assert "conv.weight" in reasons["conv.weight"]


def stage_0_state(folder: str, save: bool) -> dict[str, torch.Tensor]:
    with engine_for(config(0, rows=8, atoms=ATOMS), FusedLM(0 if save else 5)) as engine:
        if save:
            train_engine(engine, 2, same_rows=True)
            engine.save_checkpoint(folder, tag="there")
        else:
            engine.load_checkpoint(folder, tag="there")
        train_engine(engine, range(2, 4), same_rows=True)
        return full_weights(engine)


def test_stage_0_saves_matrices_of_any_shape_whole(rank_pools: dict[int, RankPool], tmp_path: Path) -> None:
    pools = [rank_pools.setdefault(size, RankPool(size)) for size in (2, 4)]
    expected = pools[0].run(stage_0_state, str(tmp_path), True)[0]
    assert all(equal(found, expected) for found in pools[1].run(stage_0_state, str(tmp_path), False))


def refuse(case: str) -> None:
    if case == "sizes":
        owned_optimizer(FusedLM(), atoms={"qkv.weight": {"qkv": [24, 8, 9]}})
    elif case == "glob":
        owned_optimizer(FusedLM(), atoms={"qvk.weight": {"heads": 4}})
    elif case == "word":
        owned_optimizer(FusedLM(), atoms={"qkv.weight": "wohle"})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("sizes", "has 40 outputs, but 24+8+9 are 41"),
        ("glob", "atoms: 'qvk.weight' matches no parameter name; did you mean 'qkv.weight'?"),
        ("word", "unknown word 'wohle'; did you mean 'whole'?"),
    ],
)
def test_wrong_settings_are_errors_on_every_rank(ranks: RankPool, case: str, message: str) -> None:
    assert all(message in error for error in ranks.errors(refuse, case))


class Stack(nn.Module):
    """Six experts in one parameter, which is most of the work."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 24)
        self.experts = Experts(6, 24)
        self.lm_head = nn.Linear(24, 37, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.experts(self.embedding(tokens))
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def stack_owned_by_many(layout: str, rule: str, folder: str) -> tuple[float, int]:
    """Trained as by one process, and resumed from files by another optimizer."""
    world_size = dist.get_world_size()
    section = {"name": rule, **MUON}

    def made(model: nn.Module, group: Any = None) -> LayerWiseOptimizer:
        return LayerWiseOptimizer(
            model, section, elementwise=ELEMENTWISE, layout=layout, group_size=world_size, report=False
        )

    model = exact_sums(Stack())
    optimizer = made(model)
    train(model, optimizer, 3)
    optimizer.save_state_dict(folder)
    again = exact_sums(Stack())
    again.load_state_dict(model.state_dict())
    resumed = made(again)
    resumed.load_state_dict_from(folder)
    for net, its in ((model, optimizer), (again, resumed)):
        train(net, its, range(3, 5))
    pieces = [p for b in optimizer.core.manager.buckets for p in b.pieces]
    mine = sum(p.numel // 24**2 for p in pieces if optimizer.core.members[p.param].name == "experts.up")
    return difference(again, model), mine


@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("layout", ["compact", "auto"])
@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True)
def test_a_stack_is_owned_by_several_ranks(ranks: RankPool, layout: str, rule: str, tmp_path: Path) -> None:
    found = ranks.run(stack_owned_by_many, layout, rule, str(tmp_path))
    assert {difference for difference, _ in found} == {0.0}
    assert max(mine for _, mine in found) == -(-6 // ranks.world_size), "experts are shared out"


def weights_of_stack(layout: str) -> dict[str, torch.Tensor]:
    model = exact_sums(Stack())
    optimizer = LayerWiseOptimizer(
        model, **MUON, elementwise=ELEMENTWISE, layout=layout, group_size=dist.get_world_size(), report=False
    )
    train(model, optimizer, 4)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_cut_or_whole_a_stack_trains_alike(ranks: RankPool) -> None:
    assert equal(ranks.run(weights_of_stack, "padded")[0], ranks.run(weights_of_stack, "compact")[0])
