"""FSDP2 beside torch.optim on one process: its steps, groups and norms, models that change, and what is refused."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers.pytorch_utils import Conv1D

from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.cells import cells
from tests.fsdp2 import (
    ADAMW,
    MATRIX_NAMES,
    MODES,
    MUON,
    SHARDINGS,
    BesideTwin,
    Sharded,
    fsdp,
    layer_wise,
    mesh_of,
    named,
    shard,
    weights_of,
    whole,
)
from tests.models import UnevenLM, batch
from tests.on_ranks import on_ranks
from tests.ranks import RankPool

CLIP = 0.05
NO_GRADIENT = ("layers.0.weight", "layers.2.bias", "gate.weight")


# Every sharding in fp32 and with attach, every mode in two shardings; with --full the whole support table of the page.
TABLE = [
    pytest.param(
        sharding, mode, marks=[] if mode in ("fp32", "attach") or (row - column) % 7 < 2 else [pytest.mark.full]
    )
    for row, mode in enumerate(MODES)
    for column, sharding in enumerate(SHARDINGS)
]


def train(run: BesideTwin, steps: int = 5) -> None:
    for step in range(steps):
        run.backward(step)
        if run.mode == "no gradient" and step in (1, 2):
            for name in NO_GRADIENT:
                run.param(name).grad = None
        if "clipping" in run.mode:
            run.optimizer.clip_grad_norm_(CLIP)
        run.update()


@on_ranks(4)
@pytest.mark.parametrize(("sharding", "mode"), TABLE)
def test_every_sharding_and_mode_has_the_bits_of_one_process(sharding: str, mode: str) -> None:
    run = BesideTwin(sharding, mode)
    train(run)
    # torch's CPU kernels round a bf16 sum otherwise at the end of a tensor, and a shard ends elsewhere: now and then a
    # weight (of at most 1) is off by one or two roundings.
    run.check(2**-8 if mode == "bf16 parameters" else 0.0)


@on_ranks(1, 2, 3)
@cells(mode=["fp32", "attach"])
def test_other_numbers_of_ranks(mode: str) -> None:
    run = BesideTwin("rows", mode)
    train(run)
    run.check()


def gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


# Groups and rates


@on_ranks(2)
def test_groups_keep_their_rates_and_schedules() -> None:
    run = BesideTwin()
    first = [p for name, p in named(run.model) if name.startswith("layers.0")]
    rest = [p for name, p in named(run.model) if not name.startswith("layers.0")]
    groups = [{"params": first, "lr": 0.01, "adamw": {"lr": 1e-3}}, {"params": rest, "weight_decay": 0.0}]
    elementwise = {"name": "adamw", "lr": 3e-3}
    run.optimizer = LayerWiseOptimizer(run.model, lr=0.02, elementwise=elementwise, params=groups, report=False)
    params, others = run.twin.params, [n for n in run.twin.params if n not in MATRIX_NAMES and n != "layers.0.bias"]
    run.twin.optimizers = [
        torch.optim.Muon([params["layers.0.weight"]], lr=0.01, weight_decay=0.1),
        torch.optim.Muon([params[n] for n in MATRIX_NAMES if n != "layers.0.weight"], lr=0.02, weight_decay=0.0),
        torch.optim.AdamW([params["layers.0.bias"]], lr=1e-3),
        torch.optim.AdamW([params[n] for n in others], lr=3e-3, weight_decay=0.0),
    ]
    schedules = [LambdaLR(each, lambda step: 1 / (step + 1)) for each in (run.optimizer, *run.twin.optimizers)]
    for step in range(3):
        run.backward(step)
        run.update()
        for schedule in schedules:
            schedule.step()
    run.check()
    shown = [(g["rule"], g["lr"], g["weight_decay"]) for g in run.optimizer.param_groups]
    expected = [("muon", 0.01, 0.1), ("adamw", 1e-3, 0.01), ("muon", 0.02, 0.0), ("adamw", 3e-3, 0.0)]
    assert shown == [(rule, pytest.approx(lr / 4), decay) for rule, lr, decay in expected]


@on_ranks(2)
def test_one_rate_and_one_momentum_for_all_groups_also_after_a_checkpoint_is_loaded() -> None:
    def shown(optimizer: LayerWiseOptimizer) -> list[Any]:
        return [(g["lr"], g.get("momentum"), g.get("betas")) for g in optimizer.param_groups]

    optimizers, ratio = [layer_wise(shard("rows", "fp32").model) for _ in range(2)], ADAMW["lr"] / MUON["lr"]
    before = [(pytest.approx(0.02), 0.95, None), (pytest.approx(0.02 * ratio), None, (0.95, 0.95))]
    for optimizer in optimizers:
        OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
        assert shown(optimizer) == before
    first, second = optimizers
    second.load_state_dict(first.state_dict())
    for key, value in (("lr", 0.2), ("momentum", 0.7)):
        for group in second.param_groups:
            group[key] = value
    assert shown(second) == [(0.2, 0.7, None), (pytest.approx(0.2 * ratio), None, (0.7, 0.95))]
    muon, adamw = map(list, second.param_groups)
    assert "betas" not in muon and "momentum" not in adamw


# Steps


@on_ranks(2)
def test_a_closure_is_called_once_with_gradients_enabled() -> None:
    run, losses = BesideTwin(), []

    def closure() -> float:
        losses.append(batch_loss(run))
        run.twin.step_with_gradients_of(run.model)
        return losses[-1]

    assert run.optimizer.step(closure) == losses[0] and len(losses) == 1
    run.check()


def batch_loss(run: BesideTwin) -> float:
    loss = run.model(*batch(0, 4))
    loss.backward()
    return loss.item()


@on_ranks(2)
def test_an_optimizer_made_after_a_forward_pass_holds_sharded_parameters() -> None:
    """After a forward pass the root holds unsharded parameters; the optimizer must not take those."""
    run = BesideTwin()
    with torch.no_grad():
        run.model(*batch(0, 4))
    loss = run.model(*batch(0, 4))
    run.optimizer = layer_wise(run.model)
    loss.backward()
    run.update()
    assert all(isinstance(p, DTensor) for group in run.optimizer.param_groups for p in group["params"])
    run.check()


@on_ranks(4)
@cells(missing_ranks=[[1], [0, 2, 3]], attach=[False, True])
def test_gradients_that_some_ranks_lack_count_as_zero_there(missing_ranks: list[int], attach: bool) -> None:
    run = BesideTwin(attach=attach)
    for step in range(4):
        run.backward(step)
        lacking = step in (1, 2) and dist.get_rank() in missing_ranks
        chosen = [run.param(name) for name in ("layers.0.weight", "layers.2.bias", "layers.5.weight") if lacking]
        for param in chosen:
            param.grad.to_local().zero_()
        run.twin.step_with_gradients_of(run.model)
        for param in chosen:
            param.grad = None
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.check()


@on_ranks(2)
def test_with_fp32_state_a_step_of_bf16_parameters_is_computed_wide_and_rounded_once() -> None:
    run = BesideTwin("rows", "bf16 parameters", state_dtype="float32")
    run.backward(0)
    head, name = run.model.lm_head.weight, "layers.2.weight"
    grad, before = head.grad.to_local().float(), head.to_local().detach().float()
    moved = before * (1 - 3e-3 * 0.1) - 3e-3 * grad / (grad.abs() + 1e-8)
    matrix = nn.Parameter(whole(run.param(name)).float())
    matrix.grad = whole(run.param(name).grad).float()
    torch.optim.Muon([matrix], **MUON).step()
    run.optimizer.step()
    assert torch.equal(head.to_local().detach(), moved.bfloat16())
    assert torch.equal(whole(run.param(name)), matrix.detach().bfloat16())


@pytest.mark.parametrize("attach", [False, True])
@on_ranks(2, 4)
def test_matrices_of_one_column_and_of_one_row(attach: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 9, bias=False), nn.Linear(9, 1, bias=False))
    model = fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    twins = [nn.Parameter(whole(param)) for param in model.parameters()]
    optimizer = LayerWiseOptimizer(model, lr=0.02, include=["0.weight", "1.weight"], report=False)
    twin = torch.optim.Muon(twins, lr=0.02)
    if attach:
        optimizer.attach(model)
    for step in range(3):
        model(torch.full((4, 1), step + 1.0)).square().sum().backward()
        for param, own in zip(model.parameters(), twins):
            own.grad = param.grad.full_tensor()
        optimizer.step()
        twin.step()
        optimizer.zero_grad()
    assert all(torch.equal(whole(param), own) for param, own in zip(model.parameters(), twins))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.square, self.down = Conv1D(31, 12), Conv1D(31, 31), nn.Linear(31, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.square(torch.tanh(self.up(x))))).pow(2).mean()


@on_ranks(2)
def test_weights_stored_as_inputs_by_outputs_are_trained_as_their_transposes() -> None:
    model, reference = Transposed(), Transposed()
    fully_shard(model, mesh=mesh_of(2))
    optimizer = LayerWiseOptimizer(model, **MUON, report=False)
    params = dict(reference.named_parameters())
    back = {name: nn.Parameter(params[name].detach().T.contiguous()) for name in ("up.weight", "square.weight")}
    muon = torch.optim.Muon([*back.values(), params["down.weight"]], **MUON)
    adamw = torch.optim.AdamW([params["up.bias"], params["square.bias"]], lr=1e-3)
    for step in range(4):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        model(x).backward()
        reference(x).backward()
        for name, own in back.items():
            own.grad = params[name].grad.T.contiguous()
        for some in (optimizer, muon, adamw):
            some.step()
        with torch.no_grad():
            for name, own in back.items():
                params[name].copy_(own.T)
        optimizer.zero_grad()
        reference.zero_grad()
    assert all(torch.equal(weight, params[name]) for name, weight in weights_of(model).items())


@on_ranks(2)
@cells(dtype=[torch.float32, torch.bfloat16])
def test_a_parameter_without_dimensions_is_trained(dtype: torch.dtype) -> None:
    """FSDP2 cannot shard one."""
    model = nn.Linear(8, 8)
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.to(dtype)
    fully_shard(model, mesh=mesh_of(2), ignored_params={model.scale})
    optimizer = LayerWiseOptimizer(model, elementwise_lr=0.1, report=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert model.scale < 1.0


def knowing_different_numbers_of_groups() -> None:
    for _ in range(1 + dist.get_rank() % 2):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = UnevenLM()
    fsdp(model, mesh_of(2, 2, names=("outer", "inner"))["inner"])
    run = BesideTwin()
    run.sharded, run.model = Sharded(model, 4, dist.get_rank()), model
    run.optimizer, run.twin = layer_wise(model), type(run.twin)(model)
    run.train(1)
    run.check()


def test_ranks_that_know_different_numbers_of_groups_meet(rank_pools: dict[int, RankPool]) -> None:
    """torch names a group by how many groups its maker knows."""
    pool = rank_pools[4]
    pool.renew()  # the groups are to be made in the test
    pool.run(knowing_different_numbers_of_groups)
    pool.renew()


# Models that change


@on_ranks(2)
def test_a_parameter_is_taken_out_of_its_group_while_attached() -> None:
    """The others go on, under their own names."""
    run = BesideTwin(attach=True)
    for step in range(3):
        run.backward(step)
        if step == 1:
            taken = run.optimizer.param_groups[0]["params"].pop(0)
            assert taken is run.param("layers.0.weight")
        if step >= 1:
            taken.grad = None
        run.update()
    run.check()
    names = [member.name for stepper in run.optimizer._steppers for member in stepper.members]
    assert "layers.0.weight" not in names and names.count("layers.2.weight") == 1 and len(names) == 10


@on_ranks(2)
def test_a_parameter_that_is_frozen_for_a_step_is_left_alone() -> None:
    run = BesideTwin()
    for step in range(3):
        run.model.layers[2].weight.requires_grad_(step != 1)
        run.backward(step)
        assert (run.model.layers[2].weight.grad is None) == (step == 1)
        for name, param in named(run.model):
            run.twin.params[name].grad = None if param.grad is None else param.grad.full_tensor()
        for each in (*run.twin.optimizers, run.optimizer):
            each.step()
            each.zero_grad()
    run.check()


def replaces(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def replaces_a_module(model: nn.Module) -> None:
    model.gate = nn.Linear(5, 2)


def unfreezes(model: nn.Module) -> None:
    model.layers[0].bias.requires_grad_(True)


CHANGES: dict[Callable[[nn.Module], None], str] = {
    replaces: "parameters 'embedding.weight', 'layers.0.weight', 'layers.2.weight', 'layers.2.bias', 'layers.4.weight' "
    "and 4 more are no longer in the model (replaced)",
    replaces_a_module: "parameters 'gate.weight', 'gate.bias' are no longer in the model (replaced)",
    unfreezes: "parameter 'layers.0.bias' is trained now, but not when the optimizer was made",
}
# On one rank alone other gradients than before would not get through FSDP2's own reduction.
WHERE = [(change, True, attach) for change in CHANGES for attach in (False, True)] + [(replaces, False, False)]


@on_ranks(2)
@pytest.mark.parametrize(("change", "everywhere", "attach"), WHERE)
def test_a_parameter_that_would_no_longer_be_trained_is_an_error_on_every_rank(
    change: Callable[[nn.Module], None], everywhere: bool, attach: bool
) -> None:
    run = BesideTwin("rows", "frozen", attach=attach)
    for step in range(2):
        run.backward(step)
        run.twin.step_with_gradients_of(run.model)
        with torch.no_grad():
            run.model(*batch(0, 4))  # leaves the root's parameters unsharded
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.check()
    if everywhere or dist.get_rank() == 1:
        change(run.model)
    run.backward(2)
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    before = [param.to_local().clone() for param in params]
    with pytest.raises(RuntimeError) as caught:
        run.optimizer.step()
    assert all(torch.equal(param.to_local(), old) for param, old in zip(params, before))
    assert str(caught.value).startswith(f"LayerWiseOptimizer: {CHANGES[change]}")
    assert str(caught.value).endswith(
        f"; make the optimizer after the last such change (rank {0 if everywhere else 1})"
    )


# Norms


@on_ranks(4)
@cells(sharding=[name for name in SHARDINGS if name != "expert parallel"])
def test_the_norm_is_that_of_one_process_and_torchs_where_it_has_one(sharding: str) -> None:
    for order in (2.0, 1.0, float("inf")):
        run = BesideTwin(sharding)
        for step in range(2):
            run.backward(step)
            grads = [whole(param.grad) for param in run.model.parameters()]
            single = torch.stack([torch.linalg.vector_norm(grad, order) for grad in grads])
            stock = None
            if sharding in ("rows", "hybrid", "columns", "several roots") and order != float("inf"):
                local = [param.grad for param in run.model.parameters()]
                stock = float(torch.nn.utils.get_total_norm(local, order).full_tensor())
            ours = float(run.optimizer.clip_grad_norm_(0.1, order))
            assert gathered(ours) == [ours] * 4, "the same on all ranks"
            assert ours == pytest.approx(float(torch.linalg.vector_norm(single, order)), rel=1e-6)
            assert stock in (None, ours)
            for before, param in zip(grads, run.model.parameters()):
                torch.testing.assert_close(whole(param.grad), before * min(1.0, 0.1 / (ours + 1e-6)))
            run.optimizer.step()
            run.optimizer.zero_grad()


@on_ranks(4)
def test_the_norm_counts_every_expert() -> None:
    """Dense gradients count once, those of both experts each."""
    run = BesideTwin("expert parallel")
    run.backward(0)
    squares = {name: float(whole(p.grad).square().sum()) for name, p in named(run.model)}
    experts = sum(value for name, value in squares.items() if name.startswith("layers.2"))
    everyone = gathered(experts)
    ours = float(run.optimizer.clip_grad_norm_(1.0))
    assert gathered(ours) == [ours] * 4
    assert ours == pytest.approx((sum(squares.values()) - experts + everyone[0] + everyone[1]) ** 0.5, rel=1e-5)


@on_ranks(2)
@cells(some=[True, False])
def test_the_norm_counts_gradients_that_a_rank_lacks_as_zero(some: bool) -> None:
    run = BesideTwin()
    run.backward(0)
    params = [p for n, p in named(run.model) if not some or n in ("layers.0.weight", "lm_head.weight")]
    if dist.get_rank() == 1:
        for param in params:
            param.grad.to_local().zero_()
    expected = sum(float(whole(param.grad).square().sum()) for param in run.model.parameters()) ** 0.5
    if dist.get_rank() == 1:
        for param in params:
            param.grad = None
    assert float(run.optimizer.clip_grad_norm_(1.0)) == pytest.approx(expected, rel=1e-6)


@on_ranks(3)
def test_no_norm_hides_a_nan_on_any_rank() -> None:
    run = BesideTwin()
    for rank in range(3):
        run.optimizer.zero_grad()
        run.backward(0)
        if dist.get_rank() == rank:
            run.model.lm_head.weight.grad.to_local().fill_(float("nan"))
        for order in (float("inf"), 2.0):
            assert math.isnan(run.optimizer.clip_grad_norm_(1e9, norm_type=order))


# The report, and what is refused


def report() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        layer_wise(shard("ignored_params", "fp32").model, report=True)
    return output.getvalue()


def test_routing_and_plan_are_printed_once(rank_pools: dict[int, RankPool]) -> None:
    first, second = rank_pools[2].run(report)
    assert second == ""
    assert "Routing: 4 of 11 trained parameters are matrices" in first
    assert "3 matrices and 6 element-wise parameters on a mesh of ranks 0-1" in first
    assert "1 matrices and 1 element-wise parameters are plain tensors; every rank steps its own copy" in first


def with_first_weight(weight: Callable[[DeviceMesh], DTensor]) -> None:
    model = UnevenLM()
    model.layers[0].weight = nn.Parameter(weight(mesh_of(dist.get_world_size())))
    LayerWiseOptimizer(model, lr=0.02)


def of_other_shape(mesh: DeviceMesh) -> DTensor:
    local = torch.zeros(40 if dist.get_rank() == 0 else 23, 24)
    return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((63, 24)), stride=(24, 1), run_check=False)


def on_the_meta_device() -> None:
    with torch.device("meta"):
        model = UnevenLM()
    fsdp(model, mesh_of(dist.get_world_size()))
    LayerWiseOptimizer(model, lr=0.02)


def on_a_descending_mesh() -> None:
    model = UnevenLM(hidden=(64, 40))
    fsdp(model, DeviceMesh("cpu", [1, 0]))
    layer_wise(model)


def sparse_gradient() -> None:
    run = BesideTwin("ignored_params")
    run.param("layers.2.weight").grad = torch.zeros(41, 63).to_sparse()
    run.optimizer.step()


def infinite_norm() -> None:
    run = BesideTwin()
    run.backward(0)
    run.model.lm_head.weight.grad.to_local().fill_(float("inf"))
    run.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def of_rows(**options: Any) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(shard("rows", "fp32").model, report=False, **options)


def on_one_rank() -> dict[str, Any]:
    return {"lr": "x"} if dist.get_rank() == 1 else {}


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "DDP": (
        lambda: LayerWiseOptimizer(DistributedDataParallel(UnevenLM())),
        "the model is wrapped in DistributedDataParallel, which shards nothing; pass model.module to lwopt_backend.",
    ),
    "FSDP1": (
        lambda: LayerWiseOptimizer(FullyShardedDataParallel(UnevenLM(), device_id=torch.device("cpu"))),
        "wrapped in FullyShardedDataParallel (FSDP1), which flattens matrices; call fully_shard(model) instead",
    ),
    "not sharded": (
        lambda: LayerWiseOptimizer(UnevenLM(), lr=0.02),
        "no parameter of the model is a DTensor; call fully_shard(model) before",
    ),
    "meta": (on_the_meta_device, "is on the meta device; call model.to_empty(device=...)"),
    "partial": (
        lambda: with_first_weight(lambda mesh: DTensor.from_local(torch.zeros(63, 24), mesh, [Partial()])),
        "parameter 'layers.0.weight' of shape (63, 24), placements (Partial(sum),) on a mesh of ranks 0-1, "
        "dimensions ('dp',): expected Shard or Replicate placements only",
    ),
    "other shape": (
        lambda: with_first_weight(of_other_shape),
        "these placements put a part of shape (32, 24) on this rank, found (40, 24)",
    ),
    "descending mesh": (on_a_descending_mesh, "the mesh's ranks do not ascend along dimension 0"),
    "option": (lambda: of_rows(momentun=0.9), "unknown key 'momentun'; did you mean 'momentum'?"),
    "value": (lambda: of_rows(lr=-1.0), "lr: input should be greater than or equal to 0; found -1.0"),
    "layout": (lambda: of_rows(layout="dense"), "layout: input should be 'auto', 'padded' or 'compact'; found 'dense'"),
    "glob": (lambda: of_rows(include=("layers.9.*",)), "include: 'layers.9.*' matches no parameter name"),
    "no matrix": (lambda: of_rows(exclude=("*",)), "none of the 11 trained parameters is a matrix"),
    "ranks differ": (
        lambda: of_rows(lr=0.02 + dist.get_rank()),
        "ranks differ in matrix.lr: 0.02 on rank 0, 1.02 on rank 1; give all ranks the same",
    ),
    "one rank": (lambda: of_rows(**on_one_rank()), "rank 1 failed with"),
    "group": (
        lambda: of_rows().add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]}),
        "takes no param group after it was made",
    ),
    "attach": (
        lambda: of_rows().attach(shard("rows", "fp32").model),
        "ValueError: attach: parameter 'layers.0.weight' of this optimizer is not the model's",
    ),
    "pickle": (lambda: pickle.dumps(of_rows()), "cannot be copied or pickled; use state_dict()"),
    "sparse": (
        sparse_gradient,
        "TypeError: parameter 'layers.2.weight' of shape (41, 63): expected a dense gradient",
    ),
    "infinite": (infinite_norm, "RuntimeError: the total norm of order 2.0 of the gradients is"),
}


def refuse(case: str) -> None:
    REFUSALS[case][0]()


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_what_is_wrong_on_every_rank(rank_pools: dict[int, RankPool], case: str) -> None:
    first, second = rank_pools[2].errors(refuse, case)
    assert REFUSALS[case][1] in first
    if case == "one rank":
        assert "rank 0 stops with it" in first and "lr: input should be a valid number; found 'x'" in second
    if case in ("attach", "pickle", "sparse", "infinite"):
        assert REFUSALS[case][1] in second
