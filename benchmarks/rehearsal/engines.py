"""Engines on parameters without memory, each with its own optimizer or stepper, for a rehearsal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lwopt_backend.config.hosts import HostConfig, ZeROConfig
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.engines.fsdp2.plan import local
from lwopt_backend.engines.modules.step import ModuleOptimizers
from lwopt_backend.engines.zero.plan import GroupPlan, GroupStepper, UnitStepper
from lwopt_backend.engines.zero.replicated import ElementwiseReplicas, MatrixReplicas
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Grouping
from lwopt_backend.optimizer import MeshOptimizer, PlainOptimizer
from lwopt_backend.optimizer.layer_wise import PlainArguments
from lwopt_backend.plan import MatrixPlan, Replicas, Sharding
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.setting import MeshConfig, Setting
from lwopt_backend.planner.shares import zero_plans
from lwopt_backend.runtime.agreement import plan_digest
from lwopt_backend.runtime.buffers import BucketBuffers
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.step import MatrixStepper

from .absent_gpu import DEVICE

KEPT = ("parameters", "gradients", "masters", "state")

FLAGS = "read at runtime/presence.py: anywhere"  # where a step may wait for the GPU: the flags of all ranks


@dataclass(frozen=True)
class Routed:
    """In place of ``Given``, for a model that was read from names and shapes: what an optimizer would have decided."""

    rules: Rules
    config: HostConfig
    grouping: Grouping

    def decide(self, config: type[HostConfig], model: nn.Module) -> tuple[Rules, HostConfig, Grouping]:
        return self.rules, self.config, self.grouping


class Passes:
    """What a model and its host do around gradients and updates, parameters at a time. These do nothing."""

    def backward(self, params: Sequence[Tensor], following: Sequence[Tensor] = ()) -> None:
        """Compute the gradients of ``params``; those of ``following`` are next."""

    def reduced(self, params: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Reduce the gradients of ``params``, which are there at its end."""
        return nullcontext()

    def end(self) -> None:
        """End the backward pass."""

    def forward(self, params: Sequence[Tensor]) -> None:
        """Use ``params``."""


def blocks(named: Iterable[tuple[str, Tensor]]) -> list[list[Tensor]]:
    """Parameters in a row with the same first number in their names, such as those of a layer."""
    return [
        [param for _, param in some]
        for _, some in groupby(named, lambda pair: getattr(re.search(r"\d+", pair[0]), "group", lambda: "")())
    ]


class Engine:
    """An engine's own step. ``digest`` is that of its plan.

    ``waits`` says where a backward pass and a step may wait for the GPU, and how often. ``compared`` is what the engine
    stores of all that a plan counts. ``offloads`` is whether the host keeps on the CPU what it shards.
    """

    digest: str
    names: Mapping[int, str]  # of the parameters that are trained, by id
    waits: Mapping[str, int]
    compared: Sequence[str] = KEPT
    offloads = False

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.offloads else DEVICE

    def backward(self) -> None:
        """Bring a gradient of every parameter, as a backward pass does."""
        raise NotImplementedError

    def step(self) -> None:
        """Take the step, and wait for its end."""
        raise NotImplementedError

    def train(self, passes: Passes) -> None:
        """A backward pass, the step, and the next forward pass where it waits for the step, of a model with
        ``passes``."""
        raise ValueError("the passes of a model are played for engines plain and fsdp2 only; play the step alone")

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """What is kept now, by kind."""
        raise NotImplementedError

    def transient(self) -> Sequence[int]:
        """The bytes that a backward pass needed in addition to the gradients that it kept, if the plan counts them."""
        return ()


def _made(shared: Grouping, make: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Grouping]:
    """A module with all parameters that are trained, as ``make`` makes each, and its param groups."""
    model = nn.Module()
    trained = {id(param): param for group in shared.groups for param in group["params"]}
    made = {key: nn.Parameter(make(trained[key])) for key in shared.names if key in trained}
    model._parameters.update({shared.names[key]: param for key, param in made.items()})  # whose names have dots
    groups = [{**group, "params": [made[id(param)] for param in group["params"]]} for group in shared.groups]
    return model, replace(shared, groups=groups, names={id(param): shared.names[key] for key, param in made.items()})


def _quiet(setting: Setting) -> HostConfig:
    return replace(setting.config, report=False)


class PlainEngine(Engine):
    """``LayerWiseOptimizer`` of a plain model: gradients leave in the backward pass, parameters return after the
    step."""

    def __init__(self, planned: Planned, setting: Setting) -> None:
        self.model, grouping = _made(planned.shared.grouping, partial(torch.empty_like, device=DEVICE))
        given: Any = Routed(setting.rules, _quiet(setting), grouping)
        self.optimizer = cast(PlainOptimizer, PlainOptimizer.__new__(PlainOptimizer))
        self.optimizer._train(self.model, given, PlainArguments(), sharded_later=False)
        self.names = {id(param): name for name, param in self.model.named_parameters()}
        self._core, self.digest = self.optimizer.core, self.optimizer.plan_digest
        flags = 2 if self.optimizer.config.keep_full_grads else 1  # also for those who see others' gradients
        self.waits = {FLAGS: flags}

    @property
    def buckets(self) -> Sequence[BucketBuffers]:
        return self._core.manager.buckets

    @property
    def core(self) -> BufferCore:
        return self._core

    def play(self, passes: Passes) -> None:
        """A backward pass."""
        params = [*reversed(self._core.manager.params)]
        with torch.enable_grad():
            passed = _Pass.apply(torch.zeros((), device="cpu", requires_grad=True), params, passes)
        passed.backward()
        passes.end()

    def train(self, passes: Passes) -> None:
        manager = self._core.manager
        self.play(passes)
        self.optimizer.step()
        number_of = {id(param): manager.bucket_of[index] for index, param in enumerate(manager.params)}
        for params in blocks(zip(manager.names, manager.params)):
            manager.receive_values(sorted({number_of[id(param)] for param in params}))
            passes.forward(params)

    def backward(self) -> None:
        self.play(Passes())
        self._core.manager.finish()  # sends what is left
        for _ in self._core.manager.settled():
            pass  # the last gradients arrive

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.synchronize()

    def transient(self) -> Sequence[int]:
        manager = self._core.manager
        if not self.optimizer.config.overlap_grad_reduce:
            return ()  # all gradients are there before the first is sent
        return [max(0, manager.ledger.most_held - sum(bucket.grad_nbytes for bucket in manager.buckets))]

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        buckets = self._core.manager.buckets
        gradients: list[Tensor] = []
        for bucket in buckets:
            if bucket.full is not None:
                gradients += [bucket.view(bucket.full, slot.param) for slot in bucket.bucket.slots]
            elif bucket.mine is not None:
                gradients += [bucket.mine.narrow(0, 0, 0), *bucket.owned_grads()]  # its buffer may be padding alone
        return {
            "parameters": self._core.manager.params,
            "gradients": gradients,
            "masters": [bucket.masters for bucket in buckets if bucket.masters is not None],
            "state": [
                *(tensor for state in self._core.stepper.state.values() for tensor in state.values()),
                *self._core.stepper.matrices.quantized.tensors(),
            ],
        }


class _Pass(torch.autograd.Function):
    """A backward pass of a model with these parameters: each gets a gradient, in this order. torch's own needs a
    GPU."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, params: Sequence[Tensor], passes: Passes) -> Tensor:
        ctx.params, ctx.passes = params, passes
        return begin.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        for param in ctx.params:
            for before in (param._backward_hooks or {}).values():
                before(param)
            ctx.passes.backward([param])
            param.grad = torch.empty_like(param) if param.grad is None else param.grad
            for hook in param._post_accumulate_grad_hooks.values():
                hook(param)
        return grads[0], None, None


def sharded(
    shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh, device: torch.device = DEVICE, dim: int = 0
) -> DTensor:
    """A tensor as ``fully_shard`` shards it over ``mesh`` along ``dim``, with an uninitialized shard on this rank."""
    whole, coordinate = torch.Size(shape), mesh.get_coordinate()
    assert coordinate is not None
    mine = Sharding(whole, (mesh.shape[-1],), (dim,), (False,)).local_shape((coordinate[-1],))
    placements = [*([Replicate()] * (mesh.ndim - 1)), Shard(dim)]
    stride = torch.empty(whole, device="meta").stride()
    shard = torch.empty(mine, dtype=dtype, device=device)
    made = DTensor.from_local(shard.to("meta"), mesh, placements, run_check=False, shape=whole, stride=stride)
    return DTensor(shard, made._spec, requires_grad=False)  # ``from_local`` would take it from the CPU to the GPU


class MeshEngine(Engine):
    """``LayerWiseOptimizer`` of a model that ``fully_shard`` has sharded. FSDP2's own gathers and reductions are the
    host's."""

    def __init__(self, planned: Planned, setting: Setting) -> None:
        assert isinstance(setting.config, MeshConfig)
        ranks = torch.arange(planned.ranks).view(-1, setting.config.group_size or planned.ranks)
        # torch identifies equal meshes; those of a process that plays several ranks have different names.
        names = [f"{what}_of_rank_{TorchCollectives().rank}" for what in ("copies", "shards")]
        hybrid = len(ranks) > 1
        self._mesh = DeviceMesh(
            DEVICE.type, ranks if hybrid else ranks[0], mesh_dim_names=tuple(names if hybrid else names[1:])
        )
        self._stack_dim = setting.stack_dim
        self.model, grouping = _made(planned.shared.grouping, self._sharded)
        given: Any = Routed(setting.rules, _quiet(setting), grouping)
        self.optimizer = cast(MeshOptimizer, MeshOptimizer.__new__(MeshOptimizer))
        self.optimizer._train(self.model, given, PlainArguments(), sharded_later=False)
        self.names = {id(param): name for name, param in self.model.named_parameters()}
        self.digest = self.optimizer.plan_digest
        self.optimizer._options.flags(self.optimizer.param_groups)  # of the first step, which reads to compare them
        self.waits = {}

    @property
    def matrix_steppers(self) -> list[tuple[MatrixStepper, MatrixPlan]]:
        """The steppers of matrices in their order, each with its plan."""
        return [(each.matrix_stepper, each.plan) for each in self.optimizer._steppers]

    def train(self, passes: Passes) -> None:
        self.play(passes)
        self.optimizer.step()

    def play(self, passes: Passes) -> None:
        """A backward pass."""
        order = blocks(self.model.named_parameters())[::-1]
        for params, following in zip(order, [*order[1:], []]):
            passes.backward(params, following)
            with passes.reduced(params):
                for param in reversed(params):
                    self._bring(param)
        passes.end()

    def _bring(self, param: Tensor) -> None:
        """A new gradient, or a sum with an earlier one."""
        if param.grad is None:
            param.grad = self._sharded(param)
        local(param.grad).add_(1)

    def _sharded(self, like: Tensor) -> DTensor:
        return sharded(like.shape, like.dtype, self._mesh, self._device, self._stack_dim if like.ndim == 3 else 0)

    def backward(self) -> None:
        for param in self.model.parameters():
            self._bring(param)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.synchronize()

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        params = [*self.model.parameters()]
        return {
            "parameters": [local(param) for param in params],
            "gradients": [local(param.grad) for param in params if param.grad is not None],
            "state": [
                *(local(t) for state in self.optimizer.state.values() for t in state.values() if not t.is_meta),
                *in_8_bits(self.matrix_steppers),
            ],
        }


def in_8_bits(steppers: Sequence[tuple[MatrixStepper, MatrixPlan]]) -> list[Tensor]:
    """The state that these keep in 8 bits."""
    return [tensor for stepper, _ in steppers for tensor in stepper.matrices.quantized.tensors()]


class FlatEngine(Engine):
    """ZeRO's steppers on flat partitions, in DeepSpeed's order. DeepSpeed's own engine is not there: it
    starts a process group and streams on a real GPU, and it may not be installed."""

    compared = ("masters", "state")

    def __init__(self, planned: Planned, setting: Setting) -> None:
        config, collectives = _quiet(setting), TorchCollectives()
        assert isinstance(config, ZeROConfig)
        plans = zero_plans(planned.shared, planned.ranks, setting)
        self.digest = plan_digest(line for _, plan in plans for line in plan.plan_lines())
        self._units: list[tuple[dict[str, Any], list[Tensor], UnitStepper[Any], dict[str, Any]]] = []
        for group, plan in plans:
            state: dict[str, Any] = {}
            stored, make = self._stored(plan)
            stepper = make(plan, stored if self.replicated else stored[0], collectives, config, DEVICE)
            stepper.fill_state(group, state)
            self._units.append((group, stored, stepper, state))
        self.waits = {}

    replicated = False

    def _stored(self, plan: GroupPlan) -> tuple[list[Tensor], type[UnitStepper[Any]]]:
        """What this rank stores of a plan's parameters, and their stepper."""
        assert not isinstance(plan.layout, Replicas)
        return [torch.zeros(plan.layout.partition_numel, device=self._device)], GroupStepper

    @property
    def matrix_steppers(self) -> list[tuple[MatrixStepper, MatrixPlan]]:
        """As on ``MeshEngine``."""
        found = [(stepper.matrix_stepper, stepper._plan.matrices) for _, _, stepper, _ in self._units]
        return [(stepper, plan) for stepper, plan in found if stepper and plan]

    def backward(self) -> None:
        for tensor in self.tensors()["masters"]:
            tensor.grad = torch.empty_like(tensor)

    def step(self) -> None:
        for group, _, stepper, state in self._units:
            stepper.step(group, state)

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        masters = [tensor for _, stored, _, _ in self._units for tensor in stored]
        return {
            "masters": masters,
            "gradients": [tensor.grad for tensor in masters if tensor.grad is not None],
            "state": [
                *(tensor for *_, state in self._units for tensor in state.values()),
                *in_8_bits(self.matrix_steppers),
            ],
        }


class ReplicatedEngine(FlatEngine):
    """ZeRO 0, where every rank stores whole parameters. `lwopt plan` has no plan of it: the digest is this engine's."""

    replicated = True

    def __init__(self, planned: Planned, setting: Setting) -> None:
        super().__init__(planned, replace(setting, engine="zero0"))

    def _stored(self, plan: GroupPlan) -> tuple[list[Tensor], type[UnitStepper[Any]]]:
        whole = [torch.zeros(param.shape, device=self._device) for param in plan.params]
        return whole, ElementwiseReplicas if plan.matrices is None else MatrixReplicas


class ModulesEngine(Engine):
    """``ModuleOptimizers`` of several engines' optimizers. All ranks have all modules; `lwopt plan` plans them one by
    one."""

    def __init__(self, engines: Mapping[str, PlainEngine | MeshEngine]) -> None:
        self._engines = [*engines.values()]
        self.optimizer = ModuleOptimizers({name: engine.optimizer for name, engine in engines.items()})

    @staticmethod
    def others(mine: Any, ranks: int) -> list[Any]:
        """What every rank says when objects are gathered: the same as this one, from its own place in a module."""
        if not isinstance(mine, dict):
            return [mine] * ranks
        return [{name: replace(held, place=(rank, ranks)) for name, held in mine.items()} for rank in range(ranks)]

    def backward(self) -> None:
        for engine in self._engines:
            engine.backward()

    def step(self) -> None:
        self.optimizer.step()
        for engine in self._engines:
            engine.optimizer.synchronize()

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        of_all = [engine.tensors() for engine in self._engines]
        return {kind: [tensor for each in of_all for tensor in each.get(kind, ())] for kind in KEPT}


ENGINES: Mapping[str, type[PlainEngine | MeshEngine | FlatEngine]] = {
    "plain": PlainEngine,
    "fsdp2": MeshEngine,
    "zero1": FlatEngine,
    "zero2": FlatEngine,
    "zero3": FlatEngine,
}
