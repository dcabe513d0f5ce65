"""What a step leaves behind: after ``zero_grad`` nothing keeps a gradient, nor any tensor but weights and state."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from tests.support.allocations import reachable
from tests.support.cells import cells
from tests.support.fsdp2 import mesh_of, shard_later
from tests.support.models import UnevenLM, batch
from tests.support.on_ranks import on_ranks
from tests.support.zero import config, engine_for, settings_for, train

SMALL = 64  # bytes of flags, counts and norms


def nbytes(tensors: list[Tensor]) -> int:
    """Of their storages, each counted once. What shows a gradient or a DTensor has none of its own."""
    own = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in own}
    return sum(size for size in storages.values() if size > SMALL)


def gradients(*roots: object) -> int:
    """Bytes of what tensors that one comes to from there have as ``grad``."""
    return nbytes([tensor.grad for tensor in reachable(*roots) if tensor.is_leaf and tensor.grad is not None])


def with_locals(tensors: list[Tensor]) -> list[Tensor]:
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


@pytest.mark.parametrize("engine", ["plain", "plain, lazy", "plain, kept", "fsdp2", "modules"])
@on_ranks(2)
def test_zero_grad_leaves_weights_and_state_alone(engine: str) -> None:
    """FSDP2's local tensors kept the gradients of embeddings and heads through the next forward and backward pass."""
    model, options = (
        UnevenLM(),
        {"plain, lazy": {"overlap_param_gather": True}, "plain, kept": {"keep_full_grads": True}},
    )
    if engine.startswith("fsdp2"):
        fully_shard(model, mesh=mesh_of())
    one = LayerWiseOptimizer(model, lr=0.02, report=False, **options.get(engine, {}))
    optimizer: Any = ModuleOptimizers({"all": one}) if engine == "modules" else one
    for step in range(2):
        model(*batch(step, 4)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    one.synchronize()
    kept = with_locals([*model.parameters(), *model.buffers()])
    kept += with_locals([tensor for state in one.state.values() for tensor in state.values()])
    more = nbytes(with_locals(reachable(model, optimizer))) - nbytes(kept)
    if engine == "plain, kept":  # which keeps the buffers that param.grad shows, with their padding
        report = one.memory_report()[dist.get_rank()]
        assert report.gradients <= more <= report.gradients + report.padding
    else:
        assert more == 0
    assert gradients(model, optimizer) == 0


@cells(
    lambda engine, offload: not offload or engine in ("zero 1", "zero 2", "zero 3"),
    engine=["zero 0", "zero 1", "zero 2", "zero 3", "owned 0", "owned 2"],
    offload=[False, True],
)
@on_ranks(2)
def test_an_engine_keeps_no_more_gradients_than_with_adamw(engine: str, offload: bool) -> None:
    """DeepSpeed's offload keeps its own buffers as ``grad`` of flat weights: those have to stay, and nothing else."""
    storage, _, stage = engine.partition(" ")
    kept = []
    for ours in (True, False):
        settings = settings_for(storage, int(stage)) if ours else config(int(stage))
        if not ours:
            settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
        if offload:
            settings["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
        with engine_for(settings) as made:
            train(made, 2)
            made.zero_grad()
            made.optimizer.zero_grad()
            kept.append(gradients(made))
    assert kept[0] <= kept[1], kept


def hooks(model: nn.Module) -> int:
    """How many the modules and parameters have."""
    things = [*model.modules(), *model.parameters()]
    found = [getattr(thing, kind, None) or () for thing in things for kind in dir(thing) if kind.endswith("_hooks")]
    found = [each for each in found if not callable(each)]
    return sum(map(len, found)) + sum("__getstate__" in vars(module) for module in model.modules())


@pytest.mark.parametrize("engine", ["plain", "plain, lazy", "fsdp2"])
@on_ranks(2)
def test_deleted_optimizer_leaves_no_hook(engine: str) -> None:
    """A model kept 13 hooks of each optimizer that it had once had."""
    model, kept = UnevenLM(), list[Any]()
    model.register_buffer("seen", torch.zeros(1))  # which a hook receives
    if engine.startswith("fsdp2"):
        fully_shard(model, mesh=mesh_of())
    model(*batch(0, 4)).backward()
    before = hooks(model)
    for _ in range(2):
        lazy = {"overlap_param_gather": True} if engine == "plain, lazy" else {}
        optimizer = LayerWiseOptimizer(model, lr=0.02, report=False, **lazy)
        kept.append(model(*batch(0, 4)))
        kept[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        assert hooks(model) > before or engine == "fsdp2"
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
        assert hooks(model) == before


@on_ranks(2)
def test_no_whole_parameter_is_kept_of_a_model_sharded_later() -> None:
    """The optimizer kept the whole model beside the shards, in the param groups that it was routed to."""
    model = UnevenLM()
    optimizer = LayerWiseOptimizer(model, lr=0.02, report=False, sharded_later=True)
    whole = [weakref.ref(param) for param in model.parameters()]
    shard_later(model, optimizer)
    model(*batch(0, 4)).backward()
    optimizer.step()
    gc.collect()
    assert not any(param() is not None for param in whole)
