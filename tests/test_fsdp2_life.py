"""A plain torch.optim.Optimizer outside: groups, schedulers, norms, closures, missing gradients, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.fsdp2 import (
    ADAMW,
    MATRIX_NAMES,
    MUON,
    SHARDINGS,
    Twin,
    backward,
    fsdp,
    layer_wise,
    mesh_of,
    named,
    shard,
)
from tests.models import UnevenLM, batch
from tests.ranks import RankPool


def groups_with_their_own_rates() -> tuple[list[tuple[str, float, float]], float]:
    sharded = shard("rows", "fp32")
    first = [p for name, p in named(sharded.model) if name.startswith("layers.0")]
    rest = [p for name, p in named(sharded.model) if not name.startswith("layers.0")]
    optimizer = LayerWiseOptimizer(
        sharded.model,
        lr=0.02,
        elementwise={"name": "adamw", "lr": 3e-3},
        params=[{"params": first, "lr": 0.01, "adamw": {"lr": 1e-3}}, {"params": rest, "weight_decay": 0.0}],
        report=False,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    twin = Twin(sharded.model)
    muon, adamw = twin.optimizers
    params = twin.params
    twin.optimizers = [
        torch.optim.Muon([params["layers.0.weight"]], lr=0.01, weight_decay=0.1),
        torch.optim.Muon([params[n] for n in MATRIX_NAMES if n != "layers.0.weight"], lr=0.02, weight_decay=0.0),
        torch.optim.AdamW([params["layers.0.bias"]], lr=1e-3),
        torch.optim.AdamW([p for p in adamw.param_groups[0]["params"] if p is not params["layers.0.bias"]], lr=3e-3),
    ]
    twin.optimizers[3].param_groups[0]["weight_decay"] = 0.0
    theirs = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)) for o in twin.optimizers]
    for step in range(3):
        backward(sharded, step)
        twin.step_with_gradients_of(sharded.model)
        optimizer.step()
        optimizer.zero_grad()
        for each in (schedule, *theirs):
            each.step()
    shown = [(g["rule"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    return shown, twin.difference(sharded.model)


def test_groups_keep_their_rates_and_schedules(ranks: RankPool) -> None:
    for shown, difference in ranks.run(groups_with_their_own_rates):
        assert difference == 0.0
        expected = [("muon", 0.01, 0.1), ("adamw", 1e-3, 0.01), ("muon", 0.02, 0.0), ("adamw", 3e-3, 0.0)]
        assert shown == [(rule, pytest.approx(lr / 4), decay) for rule, lr, decay in expected]


def one_cycle() -> tuple[list[Any], list[set[str]]]:
    """Rates and momenta before and after a checkpoint is loaded, and the keys of the groups."""
    optimizers = [layer_wise(shard("rows", "fp32").model) for _ in range(2)]
    seen = []
    for optimizer in optimizers:
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
        seen.append([(g["lr"], g.get("momentum"), g.get("betas")) for g in optimizer.param_groups])
    first, second = optimizers
    second.load_state_dict(first.state_dict())
    for group in second.param_groups:
        group["lr"] = 0.2
    for group in second.param_groups:
        group["momentum"] = 0.7
    seen.append([(g["lr"], g.get("momentum"), g.get("betas")) for g in second.param_groups])
    return seen, [set(group) for group in second.param_groups]


def test_one_rate_and_one_momentum_for_all_groups(ranks: RankPool) -> None:
    ratio = ADAMW["lr"] / MUON["lr"]
    before = [(pytest.approx(0.02), 0.95, None), (pytest.approx(0.02 * ratio), None, (0.95, 0.95))]
    after = [(0.2, 0.7, None), (pytest.approx(0.2 * ratio), None, (0.7, 0.95))]
    for seen, (muon, adamw) in ranks.run(one_cycle):
        assert seen == [before, before, after]
        assert "betas" not in muon and "momentum" not in adamw


def defaults() -> tuple[dict[str, Any], dict[str, Any]]:
    optimizer = LayerWiseOptimizer(shard("rows", "fp32").model, report=False)
    return tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)


def test_defaults_are_torchs(ranks: RankPool) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    muon, adamw = (o([weight]).defaults for o in (torch.optim.Muon, torch.optim.AdamW))
    for ours_muon, ours_adamw in ranks.run(defaults):
        assert ours_muon.pop("rule") == "muon" and ours_adamw.pop("rule") == "adamw"
        assert ours_adamw.pop("weight_decay_form") == "decoupled"
        assert {key: ours_muon[key] for key in muon if key in ours_muon} == {
            k: v for k, v in muon.items() if k in ours_muon
        }
        assert set(muon) <= set(ours_muon) | {"foreach", "maximize", "differentiable"}
        assert ours_adamw == {key: adamw[key] for key in ours_adamw}


def step_with_closure() -> bool:
    sharded = shard("rows", "fp32")
    optimizer, twin = layer_wise(sharded.model), Twin(sharded.model)
    losses = []

    def closure() -> float:
        losses.append(backward(sharded, 0))
        twin.step_with_gradients_of(sharded.model)
        return losses[-1]

    return optimizer.step(closure) == losses[0] and twin.difference(sharded.model) == 0.0


def test_a_closure_is_called_once_with_gradients_enabled(ranks: RankPool) -> None:
    assert ranks.run(step_with_closure) == [True, True]


def made_between_forward_and_backward() -> float:
    """After a forward pass the root holds unsharded parameters; the optimizer must not take those."""
    sharded = shard("rows", "fp32")
    with torch.no_grad():
        sharded.model(*batch(0, 4))
    loss = sharded.model(*batch(0, 4))
    optimizer, twin = layer_wise(sharded.model), None
    loss.backward()
    twin = Twin(sharded.model)
    twin.step_with_gradients_of(sharded.model)
    optimizer.step()
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    return twin.difference(sharded.model)


def test_an_optimizer_made_after_a_forward_pass_holds_sharded_parameters(ranks: RankPool) -> None:
    assert ranks.run(made_between_forward_and_backward) == [0.0, 0.0]


MISSING = ("layers.0.weight", "layers.2.bias", "layers.5.weight")


def gradients_missing_on(sharding: str, missing_ranks: list[int], attach: bool) -> float:
    """A gradient that only some ranks have counts, and is zero on the others."""
    sharded = shard(sharding, "fp32")
    optimizer, twin = layer_wise(sharded.model), Twin(sharded.model)
    if attach:
        optimizer.attach(sharded.model)
    for step in range(4):
        backward(sharded, step)
        if step in (1, 2):
            for name in MISSING:
                param = dict(named(sharded.model))[name]
                if dist.get_rank() in missing_ranks:
                    param.grad.to_local().zero_()
        twin.step_with_gradients_of(sharded.model)
        if step in (1, 2) and dist.get_rank() in missing_ranks:
            for name in MISSING:
                dict(named(sharded.model))[name].grad = None
        optimizer.step()
        optimizer.zero_grad()
    return twin.difference(sharded.model)


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("missing_ranks", [[1], [0, 2, 3]], ids=str)
def test_gradients_that_some_ranks_lack(ranks: RankPool, missing_ranks: list[int], attach: bool) -> None:
    assert ranks.run(gradients_missing_on, "rows", missing_ranks, attach) == [0.0] * 4


ONE_MESH = ("rows", "hybrid", "columns", "several roots")


def norms(sharding: str, norm_type: float) -> list[tuple[float, float, float]]:
    """Ours, torch's own where it can, and that of one process with all gradients."""
    sharded = shard(sharding, "fp32")
    optimizer = layer_wise(sharded.model)
    found = []
    for step in range(2):
        backward(sharded, step)
        grads = [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone() for p in sharded.model.parameters()
        ]
        single = float(
            torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]), norm_type)
        )
        stock = float("nan")
        if sharding in ONE_MESH and norm_type != float("inf"):  # torch's fails on empty parts
            stock = float(
                torch.nn.utils.get_total_norm([p.grad for p in sharded.model.parameters()], norm_type).full_tensor()
            )
        ours = float(optimizer.clip_grad_norm_(0.1, norm_type))
        after = [
            p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone() for p in sharded.model.parameters()
        ]
        for before, now in zip(grads, after):
            torch.testing.assert_close(now, before * min(1.0, 0.1 / (ours + 1e-6)))
        found.append((ours, stock, single))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("sharding", [name for name in SHARDINGS if name != "expert parallel"])
def test_the_norm_is_that_of_one_process_and_torchs_where_it_has_one(
    ranks: RankPool, sharding: str, norm_type: float
) -> None:
    answers = ranks.run(norms, sharding, norm_type)
    assert len({ours for answer in answers for ours, _, _ in answer[:1]}) == 1, "the same on all ranks"
    for ours, stock, single in (pair for answer in answers for pair in answer):
        assert ours == pytest.approx(single, rel=1e-6)
        if stock == stock:
            assert ours == stock


def expert_norms() -> tuple[float, float]:
    """Dense gradients count once, those of both experts each."""
    sharded = shard("expert parallel", "fp32")
    optimizer = layer_wise(sharded.model)
    backward(sharded, 0)
    squares = {name: float(p.grad.full_tensor().square().sum()) for name, p in named(sharded.model)}
    experts = sum(value for name, value in squares.items() if name.startswith("layers.2"))
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, experts)
    dense = sum(value for name, value in squares.items() if not name.startswith("layers.2"))
    return float(optimizer.clip_grad_norm_(1.0)), (dense + everyone[0] + everyone[1]) ** 0.5


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
def test_the_norm_counts_every_expert(ranks: RankPool) -> None:
    answers = ranks.run(expert_norms)
    assert len({ours for ours, _ in answers}) == 1
    for ours, expected in answers:
        assert ours == pytest.approx(expected, rel=1e-5)


def infinite_norm() -> None:
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    backward(sharded, 0)
    with torch.no_grad():
        sharded.model.lm_head.weight.grad.to_local().fill_(float("inf"))
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite_is_an_error_on_every_rank_if_asked_for(ranks: RankPool) -> None:
    for error in ranks.errors(infinite_norm):
        assert error.startswith("RuntimeError: the total norm of order 2.0 of the gradients is")


def norms_with_a_nan_on(rank: int) -> tuple[float, float]:
    """Of order infinity and 2, where one rank's part of a gradient has a NaN."""
    sharded = shard("rows", "fp32")
    optimizer = layer_wise(sharded.model)
    backward(sharded, 0)
    if dist.get_rank() == rank:
        with torch.no_grad():
            sharded.model.lm_head.weight.grad.to_local().fill_(float("nan"))
    return tuple(float(optimizer.clip_grad_norm_(1e9, norm_type=order)) for order in (float("inf"), 2.0))


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_no_norm_hides_a_nan(ranks: RankPool) -> None:
    for rank in range(3):
        assert all(math.isnan(norm) for norms in ranks.run(norms_with_a_nan_on, rank) for norm in norms)


def report(capture: bool = True) -> str:
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        layer_wise(shard("ignored_params", "fp32").model, report=True)
    return output.getvalue()


def test_routing_and_plan_are_printed_once(ranks: RankPool) -> None:
    first, second = ranks.run(report)
    assert second == ""
    assert "Routing: 4 of 11 trained parameters are matrices" in first
    assert "3 matrices and 6 element-wise parameters on a mesh of ranks 0-1" in first
    assert "1 matrices and 1 element-wise parameters are plain tensors; every rank steps its own copy" in first


# -- what is refused


def refuse(case: str) -> None:
    model = UnevenLM()
    if case == "not sharded":
        LayerWiseOptimizer(model, lr=0.02)
    if case == "meta":
        with torch.device("meta"):
            model = UnevenLM()
        fsdp(model, mesh_of(dist.get_world_size()))
        LayerWiseOptimizer(model, lr=0.02)
    if case == "partial":
        mesh = mesh_of(dist.get_world_size())
        model.layers[0].weight = torch.nn.Parameter(DTensor.from_local(torch.zeros(63, 24), mesh, [Partial()]))
        LayerWiseOptimizer(model, lr=0.02)
    if case == "other shape":
        mesh = mesh_of(dist.get_world_size())
        rows = 40 if dist.get_rank() == 0 else 23
        local = torch.zeros(rows, 24)
        model.layers[0].weight = torch.nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((63, 24)), stride=(24, 1), run_check=False)
        )
        LayerWiseOptimizer(model, lr=0.02)
    if case == "DDP":
        LayerWiseOptimizer(DistributedDataParallel(model))
    if case == "FSDP1":
        LayerWiseOptimizer(FullyShardedDataParallel(model, device_id=torch.device("cpu")))
    fsdp(model, mesh_of(dist.get_world_size()))
    kwargs: dict[str, dict[str, Any]] = {
        "rule": {"matrix": "muno"},
        "elementwise": {"elementwise": "adam"},
        "no name": {"matrix": {"lr": 0.1}},
        "option": {"momentun": 0.9},
        "twice": {"lr": 0.02, "matrix": {"name": "muon", "lr": 0.1}},
        "value": {"lr": -1.0},
        "layout": {"layout": "dense"},
        "glob": {"include": ("layers.9.*",)},
        "no matrix": {"exclude": ("*",)},
        "one rank": {"lr": "x"} if dist.get_rank() == 1 else {},
        "ranks differ": {"lr": 0.02 + dist.get_rank()},
    }
    optimizer = LayerWiseOptimizer(model, report=False, **kwargs.get(case, {}))
    if case == "group":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, 2))]})
    raise AssertionError("nothing was refused")


REFUSALS = {
    "DDP": "the model is wrapped in DistributedDataParallel, which shards nothing; pass model.module to lwopt_backend.",
    "FSDP1": "wrapped in FullyShardedDataParallel (FSDP1), which flattens matrices; call fully_shard(model) instead",
    "not sharded": "no parameter of the model is a DTensor; call fully_shard(model) before",
    "meta": "is on the meta device; call model.to_empty(device=...)",
    "partial": "parameter 'layers.0.weight' of shape (63, 24), placements (Partial(sum),) on a mesh of ranks 0-1, "
    "dimensions ('dp',): expected Shard or Replicate placements only",
    "other shape": "these placements put a part of shape (32, 24) on this rank, found (40, 24)",
    "rule": "matrix: unknown rule 'muno'; did you mean 'muon'?",
    "elementwise": "elementwise: unknown rule 'adam'; did you mean 'adamw'?",
    "no name": "matrix: expected a key 'name', one of muon",
    "option": "unknown key 'momentun'; did you mean 'momentum'?",
    "twice": "'lr' is given twice",
    "value": "lr: input should be greater than or equal to 0; found -1.0",
    "layout": "layout: input should be 'auto', 'padded' or 'compact'; found 'dense'",
    "glob": "include: 'layers.9.*' matches no parameter name",
    "no matrix": "none of the 11 trained parameters is a matrix",
    "ranks differ": "ranks differ in matrix.lr: 0.02 on rank 0, 1.02 on rank 1; give all ranks the same",
    "group": "takes no param group after it was made",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_what_is_wrong_on_every_rank(ranks: RankPool, case: str) -> None:
    errors = ranks.errors(refuse, case)
    assert REFUSALS[case] in errors[0], errors
    assert len(errors) == 2


def sparse_gradient() -> None:
    sharded = shard("ignored_params", "fp32")
    optimizer = layer_wise(sharded.model)
    param = dict(named(sharded.model))["layers.2.weight"]
    param.grad = torch.zeros_like(param).to_sparse()
    optimizer.step()


def test_a_sparse_gradient_is_refused_by_name(ranks: RankPool) -> None:
    for error in ranks.errors(sparse_gradient):
        assert error.startswith("TypeError: parameter 'layers.2.weight' of shape (41, 63): expected a dense gradient")


def test_an_error_on_one_rank_stops_the_others(ranks: RankPool) -> None:
    first, second = ranks.errors(refuse, "one rank")
    assert "rank 1 failed with" in first and "rank 0 stops with it" in first
    assert "lr: input should be a valid number; found 'x'" in second
