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

from lwopt_backend.config.hosts import HostConfig, ZeROConfig
from lwopt_backend.engines.fsdp2.plan import in_rows, local, over_all_ranks
from lwopt_backend.engines.fsdp2.step import Attachment
from lwopt_backend.engines.owned.buckets import BucketBuffers
from lwopt_backend.engines.owned.step import OwnedCore
from lwopt_backend.engines.zero.plan import GroupStepper
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Grouping
from lwopt_backend.optimizer import MeshOptimizer, OwnedOptimizer
from lwopt_backend.optimizer.layer_wise import Sharing
from lwopt_backend.plan import MatrixPlan, Replicas
from lwopt_backend.planner.part import Planned
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shares import zero_plans
from lwopt_backend.runtime.agreement import plan_digest
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.stepper import MatrixStepper

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
        """Reduce the gradients of ``params``; within it, their hooks run."""
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
    stores of all that a plan counts.
    """

    digest: str
    names: Mapping[int, str]  # of the parameters that are trained, by id
    waits: Mapping[str, int]
    compared: Sequence[str] = KEPT

    def backward(self) -> None:
        """Bring a gradient of every parameter, as a backward pass does."""
        raise NotImplementedError

    def step(self) -> None:
        """Take the step, and wait for its end."""
        raise NotImplementedError

    def train(self, passes: Passes) -> None:
        """A backward pass, the step, and the next forward pass where it waits for the step, of a model with
        ``passes``."""
        raise ValueError("the passes of a model are played for engines owned and fsdp2 only; play the step alone")

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
    return setting.config.model_copy(update={"report": False})


class OwnedEngine(Engine):
    """``LayerWiseOptimizer`` of a plain model: gradients leave in the backward pass, parameters return after the
    step."""

    def __init__(self, planned: Planned, setting: Setting) -> None:
        self._model, grouping = _made(planned.shared.grouping, partial(torch.empty_like, device=DEVICE))
        given: Any = Routed(setting.rules, _quiet(setting), grouping)
        self._optimizer = cast(OwnedOptimizer, OwnedOptimizer.__new__(OwnedOptimizer))
        self._optimizer._train(self._model, given, Sharing(), sharded_later=False)
        self.names = {id(param): name for name, param in self._model.named_parameters()}
        self._core, self.digest = self._optimizer.core, self._optimizer.plan_digest
        flags = 2 if self._optimizer.config.keep_full_grads else 1  # also for those who see others' gradients
        self.waits = {FLAGS: flags}

    @property
    def buckets(self) -> Sequence[BucketBuffers]:
        return self._core.manager.buckets

    @property
    def core(self) -> OwnedCore:
        return self._core

    def _pass(self, passes: Passes) -> None:
        params = [*reversed(self._core.manager.params)]
        with torch.enable_grad():
            passed = _Pass.apply(torch.zeros((), device="cpu", requires_grad=True), params, passes)
        passed.backward()

    def train(self, passes: Passes) -> None:
        manager = self._core.manager
        self._pass(passes)
        self._optimizer.step()
        number_of = {id(param): manager.bucket_of[index] for index, param in enumerate(manager.params)}
        for params in blocks(zip(manager.names, manager.params)):
            manager.receive_values(sorted({number_of[id(param)] for param in params}))
            passes.forward(params)

    def backward(self) -> None:
        self._pass(Passes())
        self._core.manager.finish()  # sends what is left
        for _ in self._core.manager.settled():
            pass  # the last gradients arrive

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.synchronize()

    def transient(self) -> Sequence[int]:
        manager = self._core.manager
        if not self._optimizer.config.overlap_grad_reduce:
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
            "state": [tensor for state in self._core.stepper.state.values() for tensor in state.values()],
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


class MeshEngine(Engine):
    """``LayerWiseOptimizer`` of a model that ``fully_shard`` has sharded. FSDP2's own gathers and reductions are the
    host's."""

    def __init__(self, planned: Planned, setting: Setting) -> None:
        self._mesh = over_all_ranks(DEVICE.type, planned.ranks, TorchCollectives().rank)
        make = lambda like: in_rows(like.shape, like.dtype, self._mesh)  # noqa: E731
        self._model, grouping = _made(planned.shared.grouping, make)
        given: Any = Routed(setting.rules, _quiet(setting), grouping)
        self._optimizer = cast(MeshOptimizer, MeshOptimizer.__new__(MeshOptimizer))
        self._optimizer._train(self._model, given, Sharing(), sharded_later=False)
        self.names = {id(param): name for name, param in self._model.named_parameters()}
        self.digest = self._optimizer.plan_digest
        self._optimizer._options.flags(self._optimizer.param_groups)  # of the first step, which reads to compare them
        self.waits = {}

    @property
    def matrix_steppers(self) -> list[tuple[MatrixStepper, MatrixPlan]]:
        """The steppers of matrices in their order, each with its plan."""
        return [(each.stepper, each.plan) for each in self._optimizer._steppers]

    def attach(self) -> None:
        """Exchange buckets in backward passes from now on."""
        steppers = self._optimizer._steppers
        self._optimizer._attachment = Attachment(steppers, self._optimizer._matrix_rules, lambda: self._optimizer.state)

    def train(self, passes: Passes) -> None:
        order = blocks(self._model.named_parameters())[::-1]
        for params, following in zip(order, [*order[1:], []]):
            passes.backward(params, following)
            with passes.reduced(params):
                for param in reversed(params):
                    self._bring(param)
                    for hook in (param._post_accumulate_grad_hooks or {}).values():
                        hook(param)
        passes.end()
        self._optimizer.step()

    def _bring(self, param: Tensor) -> None:
        param.grad = in_rows(param.shape, param.dtype, self._mesh)

    def backward(self) -> None:
        for param in self._model.parameters():
            self._bring(param)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.synchronize()

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        params = [*self._model.parameters()]
        return {
            "parameters": [local(param) for param in params],
            "gradients": [local(param.grad) for param in params if param.grad is not None],
            "state": [local(t) for state in self._optimizer.state.values() for t in state.values() if not t.is_meta],
        }


class FlatEngine(Engine):
    """ZeRO's steppers on flat partitions, in DeepSpeed's order. DeepSpeed's own engine is not there: it starts a
    process group and streams on a real GPU, and it may not be installed."""

    compared = ("masters", "state")

    def __init__(self, planned: Planned, setting: Setting) -> None:
        config, collectives = _quiet(setting), TorchCollectives()
        assert isinstance(config, ZeROConfig)
        plans = zero_plans(planned.shared, planned.ranks, setting)
        self.digest = plan_digest(line for _, plan in plans for line in plan.plan_lines())
        self._units: list[tuple[dict[str, Any], Tensor, GroupStepper, dict[str, Any]]] = []
        for group, plan in plans:
            assert not isinstance(plan.layout, Replicas)
            state: dict[str, Any] = {}
            flat = torch.zeros(plan.layout.partition_numel, device=DEVICE)
            stepper = GroupStepper(plan, flat, collectives, config, DEVICE)
            stepper.fill_state(group, state)
            self._units.append((group, flat, stepper, state))
        self.waits = {}

    @property
    def matrix_steppers(self) -> list[tuple[MatrixStepper, MatrixPlan]]:
        """As on ``MeshEngine``."""
        found = [(stepper.matrices, stepper._plan.matrices) for _, _, stepper, _ in self._units]
        return [(stepper, plan) for stepper, plan in found if stepper and plan]

    def backward(self) -> None:
        for _, flat, _, _ in self._units:
            flat.grad = torch.empty_like(flat)

    def step(self) -> None:
        for group, _, stepper, state in self._units:
            stepper.step(group, state)

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        return {
            "masters": [flat for _, flat, _, _ in self._units],
            "gradients": [flat.grad for _, flat, _, _ in self._units if flat.grad is not None],
            "state": [tensor for *_, state in self._units for tensor in state.values()],
        }


ENGINES: Mapping[str, type[OwnedEngine | MeshEngine | FlatEngine]] = {
    "owned": OwnedEngine,
    "fsdp2": MeshEngine,
    "zero1": FlatEngine,
    "zero2": FlatEngine,
    "zero3": FlatEngine,
}
