"""The systems that ``fsdp2_step.py`` compares, on one rank: equal weights, equal gradients, equal hyperparameters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fsdp2_traffic import Traffic, nbytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lwopt_backend import LayerWiseOptimizer

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
COMPARED_AFTER = 3  # steps; each has gradients of its own
OURS = "ours"


@dataclass(frozen=True)
class Stack:
    """``layers`` of width ``width``; ``rounds`` are measured by default."""

    layers: int
    width: int
    rounds: int


STACKS = {"12x384": Stack(12, 384, 4), "6x768": Stack(6, 768, 3)}
HIDDEN = {"tiny": Stack(2, 20, 2)}  # for tests


@dataclass
class System:
    """An optimizer with its parameters, and what was measured on this rank."""

    name: str
    optimizer: torch.optim.Optimizer
    params: list[Tensor]
    countable: bool = True  # compiled steps do not let themselves be watched
    traffic: Traffic | None = None
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    newton_schulz: list[float] = field(default_factory=list)  # seconds of CPU time
    stepping: list[float] = field(default_factory=list)  # the same, of the thread that steps
    difference: float = float("nan")


class Block(nn.Module):
    """A layer's matrices. Nothing is computed forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


def build(stack: Stack, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(stack.width) for _ in range(stack.layers))).to(device)


def new_gradients(stack: Stack, device: torch.device) -> list[Tensor]:
    return [torch.empty_like(p, device=device) for p in build(stack, torch.device("meta")).parameters()]


def fill(gradients: Sequence[Tensor], step: int) -> None:
    """Whole gradients of a step, the same in every process."""
    for index, gradient in enumerate(gradients):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient.copy_(torch.randn(gradient.shape, generator=generator))


def reference(stack: Stack, device: torch.device) -> list[Tensor]:
    """The weights after ``COMPARED_AFTER`` steps of torch.optim.Muon in this process."""
    gradients = new_gradients(stack, device)
    system = replicated(stack, gradients, device)
    for step in range(COMPARED_AFTER):
        fill(gradients, step)
        system.optimizer.step()
    return [param.detach() for param in system.params]


def replicated(stack: Stack, gradients: Sequence[Tensor], device: torch.device) -> System:
    params = list(build(stack, device).parameters())
    for param, gradient in zip(params, gradients):
        param.grad = gradient
    return System("torch.optim.Muon, replicated (DDP)", torch.optim.Muon(params, **MUON), params)


def sharded_model(stack: Stack, gradients: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """A ``fully_shard`` model whose gradients are this rank's rows of the whole ones, without a copy."""
    model = build(stack, device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for param, gradient in zip(model.parameters(), gradients):
        mine = rows(gradient, mesh)
        param.grad = DTensor.from_local(
            mine, mesh, [Shard(0)], run_check=False, shape=gradient.shape, stride=gradient.stride()
        )
        assert mine.shape == param.to_local().shape
    return model


def rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's part by FSDP2's ``Shard(0)``."""
    chunks = whole.chunk(mesh.size())
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole[:0]


def all_systems(stack: Stack, gradients: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> list[System]:
    def sharded(name: str, make: Callable[[nn.Module], torch.optim.Optimizer], countable: bool = True) -> System:
        model = sharded_model(stack, gradients, mesh, device)
        return System(name, make(model), list(model.parameters()), countable)

    found = [
        sharded(OURS, lambda model: LayerWiseOptimizer(model, **MUON, report=False)),
        sharded(
            f"{OURS}, gram_aspect=1.5", lambda model: LayerWiseOptimizer(model, **MUON, report=False, gram_aspect=1.5)
        ),
        sharded("torch.optim.Muon on FSDP2", lambda model: torch.optim.Muon(model.parameters(), **MUON)),
        replicated(stack, gradients, device),
    ]
    if isinstance(dion := import_dion(), str):
        return found
    # Its names for the same: the sum form of momentum has another scale, which Newton-Schulz takes out.
    options = {"lr": MUON["lr"], "weight_decay": MUON["weight_decay"], "mu": MUON["momentum"], "nesterov": True}
    options |= {"adjust_lr": "rms_norm", "use_polar_express": False}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return dion.Muon(model.parameters(), distributed_mesh=mesh, **options)

    return [*found, sharded("dion.Muon, same Newton-Schulz", make, countable=False)]


def import_dion() -> Any:
    """The module, or in words why it is left out."""
    try:
        return importlib.import_module("dion")
    except Exception as error:  # it compiles at import: whatever goes wrong there is no reason to measure nothing
        return f"dion is left out: {type(error).__name__}: {error}"


# The functions that are Newton-Schulz, where their callers look them up.
NEWTON_SCHULZ = {
    "lwopt_backend.rules.muon": ("newton_schulz", "gram_newton_schulz"),
    "torch.optim._muon": ("_zeropower_via_newtonschulz",),
    "deepspeed.runtime.zero.muon.original_muon": ("zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz"),
}


@contextmanager
def around_newton_schulz(do: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Within it ``do`` makes all calls of Newton-Schulz, of whatever is imported."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: do(lambda: function(*args, **kwargs))

    modules = [(sys.modules[module], names) for module, names in NEWTON_SCHULZ.items() if module in sys.modules]
    found = [(module, name, getattr(module, name)) for module, names in modules for name in names]
    for module, name, function in found:
        setattr(module, name, wrapped(function))
    try:
        yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)


def difference(system: System, expected: Sequence[Tensor], mesh: DeviceMesh) -> float:
    largest = 0.0
    for param, whole in zip(system.params, expected, strict=True):
        mine = param.to_local() if isinstance(param, DTensor) else param
        other = rows(whole, mesh) if isinstance(param, DTensor) else whole
        if mine.numel():
            largest = max(largest, (mine.detach() - other.to(mine.device)).abs().max().item())
    return largest


def state_bytes(system: System) -> int:
    """What this rank keeps."""
    values = [value for state in system.optimizer.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(nbytes(t.to_local() if isinstance(t, DTensor) else t) for t in tensors)
