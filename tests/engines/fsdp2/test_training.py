"""FSDP2 compared with torch.optim on one process: its steps, groups and norms, models that change, refusals."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import lwopt_backend
from lwopt_backend.engines.fsdp2.plan import reduction
from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from lwopt_backend.optimizer import MeshOptimizer, PlainOptimizer
from lwopt_backend.rules.newton_schulz import IMMEDIATE
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support.cells import cells, with_full
from tests.support.fsdp2 import (
    ADAMW,
    MODES,
    MUON,
    SHARDINGS,
    BesideTwin,
    by_rank,
    fsdp,
    gradients_of,
    layer_wise,
    mesh_of,
    named,
    shard,
    weights_of,
    whole,
)
from tests.support.models import NORM_ROUNDING, UnevenLM, batch, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import optimizers_of
from tests.support.ranks import gathered

NO_GRADIENT = ("layers.0.weight", "layers.2.bias", "gate.weight")
# Every sharding in fp32, every mode in two shardings; with --full the whole support table of the page.
CELLS = list(itertools.product(SHARDINGS, MODES))
OFTEN = [
    (sharding, mode)
    for (column, sharding), (row, mode) in itertools.product(enumerate(SHARDINGS), enumerate(MODES))
    if mode == "fp32" or (row - column) % 7 < 2
]


@on_ranks(4)
@pytest.mark.parametrize(("sharding", "mode"), with_full(OFTEN, CELLS))
def test_every_sharding_and_mode_has_the_bits_of_one_process(sharding: str, mode: str) -> None:
    """Given the gradients that FSDP2 has reduced, which are those of one process within rounding."""
    run = BesideTwin(sharding, mode)
    for step in range(3):
        run.backward(step)
        if step == 2:
            run.check_gradients(step)
        if mode == "no gradient" and step == 1:
            for name in NO_GRADIENT:
                run.param(name).grad = None
        if "clipping" in mode:
            run.optimizer.clip_grad_norm_(0.05)
        run.update()
    # torch's CPU kernels round a bf16 sum otherwise at the end of a tensor, and a shard ends elsewhere: now and then a
    # weight (of at most 1) is off by one or two roundings.
    run.check(2**-8 if mode == "bf16 parameters" else 0.0)
    if mode != "bf16 parameters":
        run.check_momentum()


# Steps


@on_ranks(2)
def test_optimizer_made_after_a_forward_pass() -> None:
    """An optimizer made after a forward pass holds sharded parameters. After a forward pass the root holds unsharded
    parameters; the optimizer must not take those."""
    run = BesideTwin()
    with torch.no_grad():
        run.model(*batch(0, 4))
    loss = run.model(*batch(0, 4))
    run.optimizer = layer_wise(run.model)
    loss.backward()
    run.update()
    assert all(isinstance(p, DTensor) for group in run.optimizer.param_groups for p in group["params"])
    run.check()


def get_and_set(run: BesideTwin, folder: Path) -> None:
    """torch lists the model's parameters before it asks the optimizer, so to set takes a line."""
    saved = get_optimizer_state_dict(run.model, run.optimizer)
    with torch.no_grad():
        run.model(*batch(0, 4))
    run.model.reshard()
    set_optimizer_state_dict(run.model, run.optimizer, saved)


def save_and_load(run: BesideTwin, folder: Path) -> None:
    dcp.save({"model": run.model, "optimizer": run.optimizer}, checkpoint_id=folder)
    with torch.no_grad():
        run.model(*batch(0, 4))
    dcp.load({"model": run.model, "optimizer": run.optimizer}, checkpoint_id=folder)


CALLS: dict[str, Callable[[BesideTwin, Path], object]] = {
    "clip": lambda run, folder: run.optimizer.clip_grad_norm_(1e-3),
    "get and set": get_and_set,
    "save and load": save_and_load,
    "step": lambda run, folder: None,
}


@on_ranks(2)
@cells(call=[*CALLS])
def test_calls_after_a_validation_pass_find_sharded_parameters(tmp_path: Path, call: str) -> None:
    """Fixed: `get_optimizer_state_dict` failed after a validation pass. It leaves the root's parameters unsharded, as
    other objects, whose gradients and state are none."""
    run = BesideTwin()
    run.train(1)
    run.backward(1)
    with torch.no_grad():
        run.model(*batch(0, 4))
    CALLS[call](run, tmp_path / "saved")
    run.optimizer.step()
    run.model.reshard()
    run.twin.step_with_gradients_of(run.model)
    run.optimizer.zero_grad()
    run.train(1)
    run.check()


EXPERT = ("layers.2.weight", "layers.2.bias")
OTHER_RULE = [{"params": "right.*", "matrix": {"name": "normuon", "lr": 0.02}}]


class Reads(TorchFunctionMode):
    """Counts what makes a host wait for its GPU. AdamW's counters of steps are on the CPU."""

    WAITS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__)

    def __init__(self, optimizer: LayerWiseOptimizer) -> None:
        super().__init__()
        self.count = 0
        self.counters = {state["step"].data_ptr() for state in optimizer.state.values() if "step" in state}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.WAITS and args[0].data_ptr() not in self.counters
        return func(*args, **(kwargs or {}))


@on_ranks(4)
@pytest.mark.on_gloo  # the strict transport reads what it carries
@cells(sharding=["rows", "expert parallel", "ignored_params"])
def test_host_reads_once_where_a_rank_lacks_a_gradient(sharding: str) -> None:
    """The host reads only where a rank lacks a gradient, and then once. A clip, and a step as on an accelerator; in the
    first step, options are compared. In the third, rank 1 lacks a gradient of an expert or of a plain tensor, or all
    ranks that of a matrix."""
    lacks, found = int(dist.get_rank() == 1 or sharding == "rows"), []
    IMMEDIATE.clear()
    try:
        run = BesideTwin(sharding)
        for step in range(3):
            run.backward(step)
            if step == 2 and lacks:
                run.param(EXPERT[0]).grad = None
            with Reads(run.optimizer) as clip:
                run.optimizer.clip_grad_norm_(math.inf)
            with Reads(run.optimizer) as reads:
                run.optimizer.step()
            run.optimizer.zero_grad()
            found.append((clip.count, reads.count))
    finally:
        IMMEDIATE.add("cpu")
    assert found == [(0, 1), (0, 0), (lacks, lacks)]


@on_ranks(4)
@cells(missing_ranks=[[1], [2, 3]])
def test_expert_gradients_some_ranks_lack_count_as_zero(missing_ranks: list[int]) -> None:
    """In the step and in the norm; ranks 0 and 2 share an expert, and 1 and 3."""
    run = BesideTwin("expert parallel", bucket_matrices=1)
    for step, lacking in enumerate([(), EXPERT, EXPERT[:1], ()]):
        run.backward(step)
        chosen = [run.param(name) for name in lacking if dist.get_rank() in missing_ranks]
        for param in chosen:
            param.grad.to_local().zero_()
        run.twin.step_with_gradients_of(run.model)
        first, second, *_ = gathered(gradients_of(run.model))
        counted = [*first.values(), *(second[name] for name in EXPERT)]
        for param in chosen:
            param.grad = None
        norm = float(torch.cat([grad.flatten() for grad in counted]).double().norm())
        assert float(run.optimizer.clip_grad_norm_(math.inf)) == pytest.approx(norm, rel=NORM_ROUNDING)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.check()


class Either(nn.Module):
    """Two layers of one size, of which a forward pass takes one, or the mean of both; and a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = (self.left(x) + self.right(x)) / 2 if use == "both" else getattr(self, use)(x)
        return self.last(x).square().mean()


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def either(options: dict[str, Any], zeros: bool = False) -> tuple[Any, Any, Callable[[int, str], None]]:
    """A model that is one fully_shard unit, its optimizer, and this rank's pass of a step."""
    model = Either()
    fully_shard(model, mesh=mesh_of())
    if zeros:
        model.set_reduce_scatter_unused_params(True)
    optimizer = layer_wise(model, **options)

    def back(step: int, use: str) -> None:
        model(inputs(step, dist.get_rank()), use).backward()

    return model, optimizer, back


@on_ranks(2, 4)
@pytest.mark.parametrize("options", [{}, {"matrix": "soap"}, {"overrides": OTHER_RULE}])
def test_ranks_that_use_different_layers_of_a_unit_raise(options: dict[str, Any]) -> None:
    """torch has then added up gradients of different layers. In the first step, which compares options, and in others;
    training goes on as if nothing had been tried. A rank that has all gradients waits for no flags, so it raises in
    steps that compare options."""
    (tried, ours, back), (model, optimizer, same) = either(options), either(options)
    last = dist.get_world_size() - 1
    told = rf"parameter '(left|right).weight'.* on rank (0|{last}) and none on rank (0|{last})\."
    for step in range(3):
        if step == 0:
            back(7, "both")
            if dist.get_rank() == last:
                tried.right.weight.grad = None
        else:
            back(7, "right" if dist.get_rank() == last else "left")
        with pytest.raises(RuntimeError, match=told) as raised:
            ours.step()
        assert len(set(gathered(str(raised.value)))) == 1
        ours.zero_grad()
        for run, one in ((back, ours), (same, optimizer)):
            run(step, "both")
            one.step()
            one.zero_grad()
    assert largest_difference(weights_of(tried), weights_of(model)) == 0.0
    for ours_state, state in zip(ours.state.values(), optimizer.state.values()):
        kept = [key for key, value in state.items() if not value.is_meta]  # what owners keep is shown by the weights
        assert all(torch.equal(whole(ours_state[key]), whole(state[key])) for key in kept)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch before 2.13")
@on_ranks(2)
def test_unused_layers_that_torch_fills_with_zeros_train() -> None:
    (model, optimizer, back), alone = either({}, zeros=True), Either()
    theirs = optimizers_of(alone)
    for step in range(3):
        back(step, ("left", "right")[dist.get_rank()])
        for rank, use in enumerate(("left", "right")):
            (alone(inputs(step, rank), use) / 2).backward()
        for each in (optimizer, *theirs):
            each.step()
            each.zero_grad()
    assert largest_difference(weights_of(model), alone) == 0.0


@on_ranks(2)
def test_bf16_step_with_fp32_state_is_rounded_once() -> None:
    """With fp32 state a step of bf16 parameters is computed wide and rounded once."""
    run = BesideTwin("rows", "bf16 parameters", state_dtype="float32")
    run.backward(0)
    assert run.optimizer.clip_grad_norm_(math.inf).dtype == torch.float32
    head, name = run.model.lm_head.weight, "layers.2.weight"
    grad, before = head.grad.to_local().float(), head.to_local().detach().float()
    moved = before * (1 - 3e-3 * 0.1) - 3e-3 * grad / (grad.abs() + 1e-8)
    matrix = nn.Parameter(whole(run.param(name)).float())
    matrix.grad = whole(run.param(name).grad).float()
    torch.optim.Muon([matrix], **MUON).step()
    run.optimizer.step()
    assert torch.equal(head.to_local().detach(), moved.bfloat16())
    assert torch.equal(whole(run.param(name)), matrix.detach().bfloat16())


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@on_ranks(2)
@cells(grad_dtype=[torch.float32, None])
def test_state_has_the_dtype_of_wider_gradients(grad_dtype: torch.dtype | None) -> None:
    """Fixed: State of 16-bit weights was narrower than their gradients. State has the dtype of gradients that are wider
    than their weights. As in torch.optim.Muon. fully_shard keeps ``grad_dtype`` from torch 2.15; None is any dtype."""
    sharded = shard("rows", "bf16 parameters")
    for param in sharded.model.parameters():
        param.grad_dtype = grad_dtype
    optimizer = layer_wise(sharded.model)
    name = "layers.2.weight"
    param = dict(named(sharded.model))[name]
    matrix = nn.Parameter(whole(param))
    matrix.grad_dtype = grad_dtype
    for each in (sharded.model.lm_head.weight, param):
        each.grad = torch.rand_like(each, dtype=torch.float32)
    matrix.grad = whole(param.grad)
    muon = torch.optim.Muon([matrix], **MUON)
    muon.step()
    optimizer.step()
    assert torch.equal(whole(optimizer.state[param]["momentum_buffer"]), muon.state[matrix]["momentum_buffer"])
    assert optimizer.state[sharded.model.lm_head.weight]["exp_avg"].dtype == torch.float32


@on_ranks(2)
def test_partial_gradients_belong_to_their_own_weights() -> None:
    """Gradients that are not yet summed over a mesh belong to their own weights. Each rank packs the matrices that it
    owns first; weights are of one shape, so a sum may go to the wrong one."""
    torch.manual_seed(0)
    mesh, rank = mesh_of(names=("tp",)), dist.get_rank()
    model, matrices = nn.Module(), ("first", "second", "third", "fourth")  # no forward tells what they are
    for name in (*matrices, "bias"):
        weight = torch.randn(16) if name == "bias" else torch.randn(16, 16)
        model.register_parameter(name, nn.Parameter(DTensor.from_local(weight, mesh, [Replicate()])))
    twins = {name: nn.Parameter(whole(param).clone()) for name, param in model.named_parameters()}
    optimizer = LayerWiseOptimizer(model, **MUON, elementwise_lr=0.1, include=[*matrices], report=False)
    muon = torch.optim.Muon([twin for twin in twins.values() if twin.ndim == 2], **MUON)
    for _ in range(2):
        inputs = torch.randn(len(twins), 2, 3, 16)
        for mine, (name, param) in zip(inputs[:, rank], model.named_parameters()):
            (DTensor.from_local(mine, mesh, [Shard(0)]) @ param.view(16, -1)).square().sum().backward()
            assert param.grad.placements == (Partial(),)
            twins[name].grad = whole(param.grad)
        largest = max(float(twin.grad.abs().max()) for twin in twins.values())
        assert float(optimizer.clip_grad_norm_(math.inf, math.inf)) == largest
        for each in (optimizer, muon):
            each.step()
            each.zero_grad()
    assert all(torch.equal(model.get_parameter(name).to_local(), twins[name]) for name in matrices)


@on_ranks(2)
def test_norms_of_fp16_gradients_are_in_fp32() -> None:
    """Ranks exchange squares, which in fp16 are inf from 256 on, and 0 below 0.0002."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=torch.float16) for _ in range(2)))
    fully_shard(model, mesh=mesh_of())
    optimizer = layer_wise(model)
    for size in (75.0, 2.0**-14):
        for param in model.parameters():
            param.grad = torch.full_like(param, size)
        assert float(optimizer.clip_grad_norm_(math.inf)) == pytest.approx(size * math.sqrt(32))


@on_ranks(2)
def test_a_parameter_without_dimensions_is_trained() -> None:
    """FSDP2 cannot shard one."""
    model, twin = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.0))
    model.scale = nn.Parameter(torch.tensor(1.0))
    fully_shard(model, mesh=mesh_of(), ignored_params={model.scale})
    optimizer, adamw = layer_wise(model), torch.optim.AdamW([twin], **ADAMW)
    for param in (*model.parameters(), twin):
        param.grad = torch.ones_like(param)
    optimizer.step()
    adamw.step()
    assert torch.equal(model.scale, twin)


@on_ranks(4)
@pytest.mark.usefixtures("ranks_to_spoil")  # it changes their threads
def test_copies_count_once_in_the_norm() -> None:
    """Copies on ranks that sum in another order count once in the norm. As GPUs of two types do: their copies are
    equal, sums of floats over them are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    # A large element swallows the ones that a thread adds to it, before the last element takes it out again.
    nn.init.ones_(model[1].weight).data.view(-1)[[0, -1]] = torch.tensor([2.0**60, -(2.0**60)])
    fully_shard(model[0], mesh=mesh_of())
    fully_shard(model[1], mesh=mesh_of(2, 2, names=("outer", "inner"))["inner"])
    torch.set_num_threads(1 + dist.get_rank() // 2 * 2)
    sums = gathered(float(whole(model[1].weight).double().sum()))
    assert len(set(sums)) > 1, "copies sum to one value: the test sees nothing"
    optimizer = LayerWiseOptimizer(model, **MUON, include="*", copies="1.weight", report=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert float(optimizer.clip_grad_norm_(math.inf)) == pytest.approx(math.sqrt(2 * 512 * 512))


@on_ranks(4)
@pytest.mark.usefixtures("ranks_to_spoil")  # the groups are to be made in the test
@pytest.mark.parametrize("before", ["each rank alone", "some ranks together"])
def test_ranks_that_know_different_numbers_of_groups_meet(before: str) -> None:
    """torch names a group by how many groups its maker knows, or has made. Ours do not change these numbers. From torch
    2.14 on a group that a rank makes alone counts in the names of those that all make, as it is made to here: a user
    saw construction wait until the timeout. torch's own groups would wait as well, so the test makes its first."""
    mesh, pair = mesh_of(2, 2, names=("outer", "inner"))["inner"], dist.new_group([0, 1])
    world = dist.distributed_c10d._world
    if before == "each rank alone":
        for number in range(world.group_count + 1, world.group_count + 2 + dist.get_rank() % 2):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
            world.group_count = number
    else:
        dist.new_group([0, 2])
    model = UnevenLM()
    fsdp(model, mesh)
    run = BesideTwin(sharded=by_rank(model))
    run.train(1)
    run.check()
    TorchCollectives.over([0, 1, 2, 3], [dist.group.WORLD]).barrier()
    TorchCollectives.over([0, 1, 2] if dist.get_rank() < 3 else [3], [dist.group.WORLD]).barrier()
    half = [0, 1] if dist.get_rank() < 2 else [2, 3]
    if half == [0, 1]:  # as where a module on two of the ranks has a separate exchange group
        TorchCollectives.over(half, [pair])
    TorchCollectives.over(half, [dist.group.WORLD]).all_reduce(torch.zeros(1))
    if before == "some ranks together":
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1, 2, 3]))


# Models that change


@on_ranks(2)
def test_parameter_frozen_for_a_step_keeps_its_state() -> None:
    """A parameter that is frozen for a step is left alone, and keeps its state."""
    run = BesideTwin()
    for step in range(3):
        run.model.layers[2].weight.requires_grad_(step != 1)
        run.backward(step)
        assert (run.model.layers[2].weight.grad is None) == (step == 1)
        run.update()
        if step == 1:  # also in a checkpoint
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saved: Any = get_optimizer_state_dict(run.model, run.optimizer)
                run.optimizer.load_state_dict(run.optimizer.state_dict())
            assert len(saved["state"]) >= 10
    run.check()


def replace_all(model: nn.Module) -> None:
    model.load_state_dict({key: tensor.clone() for key, tensor in model.state_dict().items()}, assign=True)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "all": (replace_all, "'layers.2.bias', 'layers.4.weight' and 4 more are no longer in the model (replaced)"),
    "a module": (lambda model: setattr(model, "gate", nn.Linear(5, 2)), "'gate.weight', 'gate.bias' are no longer in"),
}


@on_ranks(2)
@cells(change=[*CHANGES])
def test_parameter_no_longer_trained_is_an_error(change: str) -> None:
    """A parameter that would no longer be trained is an error on its rank. On one rank alone:
    test_ranks_that_differ.py."""
    run, (make, words) = BesideTwin("rows", "frozen"), CHANGES[change]
    for step in range(2):
        run.backward(step)
        run.twin.step_with_gradients_of(run.model)
        with torch.no_grad():
            run.model(*batch(0, 4))  # leaves the root's parameters unsharded
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.check()
    make(run.model)
    run.backward(2)
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    before = [param.to_local().clone() for param in params]
    with pytest.raises(RuntimeError) as caught:
        run.optimizer.step()
    assert all(torch.equal(param.to_local(), old) for param, old in zip(params, before))
    told, end = str(caught.value), f"; make the optimizer after the last such change (rank {dist.get_rank()})"
    assert told.startswith("LayerWiseOptimizer: parameter") and words in told and told.endswith(end)


@on_ranks(2)
def test_replaced_optimizer_steps_no_more() -> None:
    """Fixed: Two optimizers trained one parameter. An optimizer whose parameters a later one trains steps no more."""
    run = BesideTwin()
    run.train(1)
    earlier, run.optimizer = run.optimizer, layer_wise(run.model, params=[run.param("layers.2.weight")], **MUON)
    run.backward(1)
    told = "parameter 'layers.2.weight' belongs to a LayerWiseOptimizer that was made later; step only that one"
    with pytest.raises(RuntimeError, match=re.escape(told)):
        earlier.step()
    assert run.twin.difference(run.model) == 0.0
    del earlier
    run.optimizer.step()


# State that lacks something


@on_ranks(2)
@cells(lacks=["state of one", "an option", "all state"])
def test_what_saved_state_lacks_is_left_as_it_is(lacks: str) -> None:
    run = BesideTwin()
    run.train(1)
    saved = run.optimizer.state_dict()
    if lacks == "state of one":
        del saved["state"][1]
    elif lacks == "an option":
        saved["param_groups"] = [{k: v for k, v in g.items() if k != "ns_steps"} for g in saved["param_groups"]]
    else:
        saved["state"] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.optimizer.load_state_dict(saved)
    told = [str(warning.message) for warning in caught if "checkpoint" in str(warning.message)]
    one = ["the checkpoint has no state of ['layers.2.weight']; the state of these parameters does not change"]
    assert told == (one if lacks == "state of one" else [])
    matrix, other = (run.optimizer.state[run.param(name)] for name in ("layers.0.weight", "lm_head.weight"))
    fresh = bool((matrix["momentum_buffer"].to_local() == 0).all()) and float(other["step"]) == 0
    assert fresh == (lacks == "all state")
    run.backward(1)
    run.update()
    if lacks != "all state":
        run.check()


# Norms


def test_the_arguments_of_clipping_are_torchs() -> None:
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in list(inspect.signature(function).parameters.values())[1:]]

    for optimizer in (LayerWiseOptimizer, lwopt_backend.ModuleOptimizers):
        assert arguments(optimizer.clip_grad_norm_) == arguments(nn.utils.clip_grad_norm_), optimizer


def every_gradient(run: BesideTwin) -> dict[str, torch.Tensor]:
    """Whole, each once, and zeros where there is none; of expert parallelism those of both experts."""
    grads = gradients_of(run.model)
    grads = {name: grads.get(name, torch.zeros(param.shape)) for name, param in named(run.model)}
    if run.sharding != "expert parallel":
        return grads
    experts = gathered({name: grad for name, grad in grads.items() if name.startswith("layers.2.")})
    of_other = experts[1 - dist.get_rank() % 2]
    return {**grads, **{f"other {name}": grad for name, grad in of_other.items()}}


@on_ranks(4)
@cells(sharding=SHARDINGS)
def test_norms_zeros_and_scaling_are_those_of_one_process(sharding: str) -> None:
    """And torch's norm where it has one."""
    run = BesideTwin(sharding)
    for step, order in enumerate((2.0, 1.0, math.inf)):
        run.backward(step)
        before = every_gradient(run)
        expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before.values()]).double(), order)
        stock = None
        if sharding in ("rows", "hybrid", "columns", "several roots") and order != math.inf:
            local = [param.grad for param in run.model.parameters()]
            stock = float(torch.nn.utils.get_total_norm(local, order).full_tensor())
        norm = run.optimizer.clip_grad_norm_(0.1, order)
        assert type(norm) is torch.Tensor and norm.dtype == torch.float32 and norm.shape == ()
        ours = float(norm)
        assert gathered(ours) == [ours] * 4, "the same on all ranks"
        assert ours == pytest.approx(float(expected), rel=NORM_ROUNDING)
        assert stock in (None, ours)
        for name, grad in gradients_of(run.model).items():
            torch.testing.assert_close(grad, before[name] * min(1.0, 0.1 / (ours + 1e-6)))
        run.update()
    run.check()
    run.backward(3)
    run.param("gate.bias").grad = None  # counts as zeros
    local = run.param("layers.2.weight").grad
    (local.to_local() if isinstance(local, DTensor) else local)[:1] = 0
    before = every_gradient(run)
    run.optimizer.gradients.scale(0.25)
    assert all(torch.equal(grad, before[name] * 0.25) for name, grad in gradients_of(run.model).items())


@on_ranks(4)
@cells(order=[2.0, 1.0, math.inf])
def test_mesh_that_leaves_ranks_out_has_experts(order: float) -> None:
    """Fixed: Experts that start equal counted once in the norm. A mesh that leaves ranks out has experts, unless they
    are said to be copies. Whatever their values: here all start equal. Both kinds may be on one mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    mesh = mesh_of(2, 2, names=("outer", "inner"))
    for part in (model[1], model[2]):
        fully_shard(part, mesh=mesh["inner"])
    fully_shard(model[0], mesh=mesh_of())
    grads = (2.0, 3.0, 4.0 + mesh.get_local_rank("outer"))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        optimizer = LayerWiseOptimizer(model, **MUON, include="*", copies=["1.*"])
    for value, param in zip(grads, model.parameters()):
        param.grad = torch.full_like(param, value)
    each = torch.tensor([2.0, 3.0, 4.0, 5.0]).repeat(64)
    assert float(optimizer.clip_grad_norm_(math.inf, order)) == pytest.approx(float(each.norm(order)), rel=1e-6)
    told = " ".join(output.getvalue().split())
    assert dist.get_rank() or "Other ranks have copies of 1 of these; a norm counts them once." in told
    assert dist.get_rank() or "different parameters (experts) under 1 of these names; a norm counts all 2." in told
    with torch.no_grad():
        model[1].weight.add_(mesh.get_local_rank("outer"))
    with pytest.raises(ValueError, match=r"copies: parameter '1.weight': expected equal values on the meshes of ranks"):
        LayerWiseOptimizer(model, **MUON, include="*", copies=["1.*"], report=False)


@on_ranks(4)
def test_no_norm_over_meshes_without_all_ranks() -> None:
    """Fixed: A norm over meshes of which none has all ranks was that of some parameters. There is no norm over meshes
    of which none has all ranks."""
    model, mesh = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh_of(2, 2, names=("outer", "inner"))
    for part, dim in zip(model, ("outer", "inner")):
        fully_shard(part, mesh=mesh[dim])
    with pytest.raises(ValueError, match="expected one mesh with the ranks of all others, found a mesh of ranks"):
        LayerWiseOptimizer(model, **MUON, report=False).clip_grad_norm_(1.0)


@on_ranks(3)
def test_no_norm_hides_a_nan_on_any_rank() -> None:
    run = BesideTwin()
    for rank, order in itertools.product(range(3), (math.inf, 2.0)):
        run.backward(0)
        if dist.get_rank() == rank:
            run.model.lm_head.weight.grad.to_local().fill_(math.nan)
        assert math.isnan(run.optimizer.clip_grad_norm_(1e9, norm_type=order))
        run.optimizer.zero_grad()


# The report, and what is refused


@on_ranks(2)
def test_routing_and_plan_are_printed_once() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        layer_wise(shard("ignored_params", "fp32").model, report=True)
    for line in (
        "Routing: 4 of 11 trained parameters are matrices",
        "3 matrices and 6 element-wise parameters on a mesh of ranks 0-1",
        "1 matrices and 1 element-wise parameters are plain tensors; every rank steps its own copy",
    ):
        assert (line in output.getvalue()) == (dist.get_rank() == 0)
    assert dist.get_rank() == 0 or output.getvalue() == ""


@on_ranks(2)
@pytest.mark.parametrize(
    ("reduce_dtype", "grad_dtype"),
    [(None, None), (torch.float32, None), (torch.bfloat16, None), (None, torch.bfloat16)],
)
def test_the_dtype_in_which_gradients_are_reduced_is_printed(
    reduce_dtype: torch.dtype | None, grad_dtype: torch.dtype | None
) -> None:
    """The mean of 1 and 1/512 is 0.5 in bfloat16. Without reduce_dtype, versions of torch differ. The outer module has
    only a frozen weight of its own, so it reduces nothing in float16."""
    rank = dist.get_rank()
    frozen = nn.Linear(8, 8, bias=False, dtype=torch.float16).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    if grad_dtype is not None:
        model[1].weight.grad_dtype = grad_dtype
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    fully_shard(model[2])
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        LayerWiseOptimizer(model, **MUON, include="*")
    model[1](torch.full((1, 8), 1 / 512 if rank else 1.0)).sum().backward()
    rounded = bool((model[1].weight.grad.to_local() == 0.5).all())
    told = f"fully_shard reduces gradients in {'bfloat16 and ' if rounded else ''}float32"
    by_version = reduce_dtype is None and (grad_dtype is None or torch.__version__ < "2.15")
    assert rank or f"{told}{';' if by_version else '.'}" in output.getvalue()


@on_ranks(2)
def test_dtypes_of_a_reduction_are_printed_in_alphabetical_order() -> None:
    """Those of a set follow addresses, which differ between runs and ranks."""
    dtypes = (torch.float64, torch.bfloat16, torch.float32, torch.float16)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in dtypes))
    for layer, dtype in zip(model, dtypes):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    fully_shard(model)
    assert reduction(model) == "fully_shard reduces gradients in bfloat16 and float16 and float32 and float64."


def with_first_weight(weight: DTensor) -> None:
    model = UnevenLM()
    model.layers[0].weight = nn.Parameter(weight)
    LayerWiseOptimizer(model, lr=0.02)


def unreduced() -> None:
    with_first_weight(DTensor.from_local(torch.zeros(63, 24), mesh_of(), [Partial()]))


def of_other_shape() -> None:
    local = torch.zeros(40 if dist.get_rank() == 0 else 23, 24)
    known = {"shape": torch.Size((63, 24)), "stride": (24, 1), "run_check": False}
    with_first_weight(DTensor.from_local(local, mesh_of(), [Shard(0)], **known))


def on_the_meta_device() -> None:
    with torch.device("meta"):
        model = UnevenLM()
    fsdp(model, mesh_of())
    LayerWiseOptimizer(model, lr=0.02)


def on_a_descending_mesh() -> None:
    model = UnevenLM(hidden=(64, 40))
    fsdp(model, DeviceMesh("cpu", [1, 0]))
    layer_wise(model)


def listed_while_unsharded() -> None:
    model = shard("rows", "fp32").model
    model(*batch(0, 2))
    LayerWiseOptimizer(model, params=list(model.parameters()), report=False)


def sparse_gradient() -> None:
    run = BesideTwin("ignored_params")
    run.param("layers.2.weight").grad = torch.zeros(41, 63).to_sparse()
    run.optimizer.step()


def infinite_norm() -> None:
    run = BesideTwin()
    run.backward(0)
    run.model.lm_head.weight.grad.to_local().fill_(math.inf)
    run.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def by_fsdp1() -> nn.Module:
    return FullyShardedDataParallel(UnevenLM(), device_id=torch.device("cpu"))


def of_rows(**options: Any) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(shard("rows", "fp32").model, **{"lr": 0.02, "report": False, **options})


# Of plain models that are wrapped: tests/engines/plain/test_failures.py.
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: LayerWiseOptimizer(DistributedDataParallel(UnevenLM()), sharded_later=True), "found no shards; call"),
    (lambda: LayerWiseOptimizer(by_fsdp1(), sharded_later=True), "(FSDP1), which flattens matrices; call fully_shard"),
    (lambda: LayerWiseOptimizer(UnevenLM(), state_dtype="float32"), "'state_dtype' is for fully_shard models, but"),
    (lambda: MeshOptimizer([UnevenLM()]), "expected DTensors in the model, found none; call fully_shard(model) first"),
    (lambda: PlainOptimizer(shard("rows", "fp32").model), "'embedding.weight' is a DTensor; for fully_shard models"),
    (lambda: of_rows(bucket_mb=1.0), "'bucket_mb' is for DeepSpeed and for plain models, but"),
    (lambda: of_rows(process_group=dist.group.WORLD), "'process_group' is for plain models, but this optimizer is for"),
    (lambda: of_rows().no_sync(), "no_sync is for plain models, but this optimizer is for fully_shard models"),
    (listed_while_unsharded, "not in the model that is trained; pass that model's parameters, "),
    (on_the_meta_device, "is on the meta device; call model.to_empty(device=...)"),
    (unreduced, "dimensions ('dp',): expected Shard or Replicate placements only"),
    (of_other_shape, "expected a part of shape (32, 24) on this rank by its placements, found (40, 24)"),
    (on_a_descending_mesh, "the mesh's ranks do not ascend along dimension 0"),
    (lambda: of_rows(ns_method="quack-kernels"), "'quack-kernels': expected Ampere and later"),
    (lambda: of_rows(share_copies=True), "share_copies: expected a mesh that copies all of its matrices (HSDP), found"),
    (lambda: of_rows(copies="layers.9.*"), "copies: 'layers.9.*' matches no parameter name"),
    (lambda: of_rows(**{"lr": "x"} if dist.get_rank() == 1 else {}), "lr: input should be a valid number; found 'x'"),
    (
        lambda: of_rows().add_param_group({"params": [torch.zeros(2, 2)]}),
        "expected all param groups in the constructor",
    ),
    (
        lambda: of_rows().attach(UnevenLM()),
        "attach is gone: step() does the exchange that it began in the backward pass",
    ),
    (lambda: of_rows().clip_grad_norm_(1.0, 0), "norm_type: expected a number above 0, or inf; found 0"),
    (lambda: pickle.dumps(of_rows()), "cannot be copied or pickled; use state_dict()"),
    (sparse_gradient, "parameter 'layers.2.weight' of shape (41, 63): expected a dense gradient"),
    (infinite_norm, "the total norm of order 2.0 of the gradients is"),
]


@on_ranks(2)
def test_refusals_name_what_is_wrong_on_every_rank() -> None:
    for refused, words in REFUSALS:
        with pytest.raises((AttributeError, TypeError, ValueError, RuntimeError)) as caught:
            refused()
        told = str(caught.value).replace("\\", "")
        if "found 'x'" in words and dist.get_rank() == 0:
            assert "rank 1 failed with" in told and "rank 0 stops with it" in told
        if refused is of_other_shape and dist.get_rank() == 1:  # each rank says what it has itself
            words = words.replace("(32, 24)", "(31, 24)").replace("(40, 24)", "(23, 24)")
        assert words in told, (words, told)


@on_ranks(2)
def test_one_name_is_the_optimizer_of_either_model() -> None:
    assert lwopt_backend.LayerWiseOptimizer is LayerWiseOptimizer
    run = BesideTwin()
    run.model(*batch(0, 2))  # after it the root keeps its parameters as plain tensors
    models = (run.model, UnevenLM(), UnevenLM())
    sharded, plain, later = (LayerWiseOptimizer(m, **MUON, sharded_later=m is models[2], report=False) for m in models)
    assert [type(each) for each in (sharded, plain, later)] == [MeshOptimizer, PlainOptimizer, MeshOptimizer]
    assert all(isinstance(each, LayerWiseOptimizer) for each in (sharded, plain, later))
    with pytest.raises(ValueError, match="the model is not sharded yet"):
        later.load_state_dict(sharded.state_dict())
