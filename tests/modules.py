"""What tests of several modules share: a vision encoder and a language model on ranks of their own, and both on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import whole
from tests.models import MATRICES, UnevenLM, batch
from tests.owned import exact_sums
from tests.ranks import kept_in_a_world
from tests.zero import ADAMW, MUON

ROWS = 24  # of the global batch; divides into micro-batches for 1 to 4 ranks
PIXELS = 10
NAMES = ("vision", "language")
MATRICES_OF = {"vision": ("layers.0.weight", "layers.2.weight"), "language": MATRICES}


class Vision(nn.Module):
    """(rows, PIXELS) images become (rows, 24) features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(PIXELS, 31), nn.GELU(), nn.Linear(31, 24))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Language(UnevenLM):
    """A language model that sees a feature in front of each row's tokens; the mean cross-entropy of its rows."""

    def forward(self, tokens: Tensor, targets: Tensor, seen: Tensor) -> Tensor:
        x = self.embedding(tokens) + seen.unsqueeze(1)
        x = x + self.layers(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


MAKE: dict[str, Callable[[], nn.Module]] = {"vision": Vision, "language": Language}


def images_of(step: int) -> Tensor:
    return torch.randn(ROWS, PIXELS, generator=torch.Generator().manual_seed(step))


@dataclass(frozen=True)
class Split:
    """Which ranks have which module; each computes an equal part of the rows, in its module's order of ranks."""

    vision: tuple[int, ...]
    language: tuple[int, ...]

    def ranks(self, module: str) -> tuple[int, ...]:
        return getattr(self, module)

    def rows(self, module: str, rank: int, rows: int) -> slice:
        ranks = self.ranks(module)
        size = rows // len(ranks)
        return slice(ranks.index(rank) * size, (ranks.index(rank) + 1) * size)

    def moves(self, rows: int) -> list[tuple[int, int, int, int]]:
        """(vision's rank, language's rank, start, stop): rows that both compute."""
        found = []
        for v in self.vision:
            for to in self.language:
                one, other = self.rows("vision", v, rows), self.rows("language", to, rows)
                start, stop = max(one.start, other.start), min(one.stop, other.stop)
                if start < stop:
                    found.append((v, to, start, stop))
        return found


TWO_AND_TWO = Split((0, 1), (2, 3))
ONE_AND_TWO = Split((0,), (1, 2))  # the fourth rank has nothing
ONE_AND_THREE = Split((0,), (1, 2, 3))
OVERLAPPING = Split((0, 1, 2), (1, 2, 3))
EVERYWHERE = Split((0, 1, 2, 3), (0, 1, 2, 3))
ON_ONE = Split((0,), (0,))


@kept_in_a_world
def group_of(ranks: tuple[int, ...], module: str) -> Any:
    """A process group of its own for each module; called on all ranks."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


@kept_in_a_world
def mesh_of_group(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def send_rows(moves: Sequence[tuple[int, int, int, int]], mine: Tensor, first: int, into: Tensor, place: int) -> None:
    """Bring rows from (rank, ...) to (..., rank, ...). ``first`` and ``place`` are the first rows of both tensors."""
    me = dist.get_rank()
    works = []
    for source, to, start, stop in moves:
        if source == me == to:
            into[start - place : stop - place] = mine[start - first : stop - first]
        elif source == me:
            works.append(dist.isend(mine[start - first : stop - first].contiguous(), to))
        elif to == me:
            works.append(dist.irecv(into[start - place : stop - place], source))
    for work in works:
        work.wait()


def backward(
    split: Split, modules: dict[str, nn.Module], step: int, part: int = 0, parts: int = 1, scale: float = 1.0
) -> None:
    """Forward and backward of one micro-batch through the modules that this rank has."""
    me, rows = dist.get_rank(), ROWS // parts
    micro = slice(part * rows, (part + 1) * rows)
    moves, back = split.moves(rows), [(to, v, a, b) for v, to, a, b in split.moves(rows)]
    out, seen = torch.zeros(0, 24), torch.zeros(0, 24)
    first = place = 0
    if "vision" in modules:
        own = split.rows("vision", me, rows)
        out, first = modules["vision"](images_of(step)[micro][own]), own.start
    if "language" in modules:
        own = split.rows("language", me, rows)
        seen, place = torch.zeros(own.stop - own.start, 24), own.start
    send_rows(moves, out.detach(), first, seen, place)
    grad = torch.zeros_like(out)
    if "language" in modules:
        tokens, targets = (t[micro][own] for t in batch(step, ROWS))
        seen.requires_grad_()
        (scale * modules["language"](tokens, targets, seen)).backward()
    send_rows(back, seen if seen.grad is None else seen.grad, place, grad, first)
    if "vision" in modules:
        out.backward(grad * (len(split.vision) / len(split.language)))


# Kinds of optimizers


def owned(module: nn.Module, group: Any, **options: Any) -> LayerWiseOptimizer:
    settings = {"bucket_mb": 0.004, "report": False, "process_group": group, **options}
    return LayerWiseOptimizer(module, **MUON, elementwise={"name": "adamw", **ADAMW}, **settings)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def owns(module: nn.Module, group: Any, **options: Any) -> tuple[nn.Module, Any]:
    return module, owned(module, group, **options)


def shards(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    for layer in module.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh_of_group(group))
    fully_shard(module, mesh=mesh_of_group(group))
    elementwise = {"name": "adamw", **ADAMW}
    return module, fsdp2.LayerWiseOptimizer(module, **MUON, elementwise=elementwise, report=False)


def shards_early(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    """The exchange begins in backward, so it is under way when the step is skipped."""
    module, optimizer = shards(module, group)
    optimizer.attach(module)
    return module, optimizer


def copies(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    optimizer = sgd(list(module.parameters()))
    return DistributedDataParallel(module, process_group=group), optimizer


def alone(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    return module, sgd(list(module.parameters()))


Kind = Callable[..., tuple[nn.Module, Any]]


def make(split: Split, kinds: Sequence[Kind] = (owns, owns), exact: bool = True, **options: Any) -> Any:
    """This rank's modules, with gradients whose sums are exact or as they are, and their optimizers."""
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Any] = dict.fromkeys(NAMES)
    for name, how in zip(NAMES, kinds):
        group = group_of(split.ranks(name), name)
        if dist.get_rank() in split.ranks(name):
            module = exact_sums(MAKE[name]()) if exact else MAKE[name]()
            modules[name], optimizers[name] = how(module, group, **options)
    return modules, ModuleOptimizers(optimizers)


# The reference


class OneProcess:
    """Both modules on one process, with torch.optim.Muon and AdamW, computing the rows of each rank in turn."""

    def __init__(self, *, exact: bool = True, vision: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None):
        """``vision`` makes another optimizer of all of that module's parameters."""
        self.modules = {name: exact_sums(MAKE[name]()) if exact else MAKE[name]() for name in NAMES}
        matrices, others = [], []
        for name, module in self.modules.items():
            for of_param, param in module.named_parameters():
                if name == "language" or vision is None:
                    (matrices if of_param in MATRICES_OF[name] else others).append(param)
        self.optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)]
        if vision is not None:
            self.optimizers.append(vision(list(self.modules["vision"].parameters())))

    def gradients(self, split: Split, step: int, accumulation: int = 1) -> None:
        """Mean gradients of a global batch."""
        rows = ROWS // accumulation
        for part in range(accumulation):
            micro = slice(part * rows, (part + 1) * rows)
            images, (tokens, targets) = images_of(step)[micro], batch(step, ROWS)
            outs = [self.modules["vision"](images[split.rows("vision", rank, rows)]) for rank in split.vision]
            seen, grads = torch.cat(outs).detach(), []
            for rank in split.language:
                own = split.rows("language", rank, rows)
                here = seen[own].clone().requires_grad_()
                self.modules["language"](tokens[micro][own], targets[micro][own], here).backward()
                grads.append(here.grad)
            grad = torch.cat(grads) * (len(split.vision) / len(split.language))
            for rank, out in zip(split.vision, outs):
                out.backward(grad[split.rows("vision", rank, rows)])
        for name in NAMES:
            for summed in self.grads(name):
                summed.div_(len(split.ranks(name)))

    def grads(self, name: str) -> list[Tensor]:
        return [param.grad for param in self.modules[name].parameters() if param.grad is not None]

    def norms(self, norm_type: float = 2.0) -> list[float]:
        """Of each module's gradients, and of all."""
        flat = [torch.cat([grad.flatten() for grad in self.grads(name)]).double() for name in NAMES]
        return [torch.linalg.vector_norm(grad, norm_type).item() for grad in (*flat, torch.cat(flat))]

    def zeros(self) -> dict[str, int]:
        return {name: sum(int((grad == 0).sum()) for grad in self.grads(name)) for name in NAMES}

    def scale(self, factor: float, name: str) -> None:
        for grad in self.grads(name):
            grad.mul_(factor)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Beside:
    """Modules that are trained on a split of the ranks, and one process that trains what they must become."""

    def __init__(self, split: Split, kinds: Sequence[Kind] = (owns, owns), **options: Any) -> None:
        exact = tuple(kinds) == (owns, owns)  # of two ranks each, sums are exact without it
        self.split, self.kinds, self.exact, self.options = split, kinds, exact, options
        self.modules, self.optimizers = make(split, kinds, exact, **options)
        self.single = OneProcess(exact=exact, vision=sgd if kinds[0] in (copies, alone) else None)

    def step(self, number: int, *, accumulation: int = 1, clip: float | Mapping[str, float] | None = None) -> None:
        """One step of both; norms and zeros are those of one process, which clips with our norm."""
        for part in range(accumulation):
            with self.optimizers.no_sync() if part < accumulation - 1 else contextlib.nullcontext():
                backward(self.split, self.modules, number, part, accumulation)
        self.single.gradients(self.split, number, accumulation)
        if clip is not None:
            self.clip(clip)
        assert self.optimizers.step() is True
        self.optimizers.zero_grad()
        self.single.step()

    def clip(self, clip: float | Mapping[str, float]) -> None:
        limits = clip if isinstance(clip, Mapping) else dict.fromkeys(NAMES, clip)
        assert self.optimizers.zero_counts() == self.single.zeros()
        norm = self.optimizers.clip_grad_norm_(clip).item()
        assert abs(norm / self.single.norms()[-1] - 1) <= 1e-6 and norm > max(limits.values())  # or nothing is clipped
        for name in NAMES:
            self.single.scale(factor_of(norm, limits[name]), name)

    def difference(self) -> float:
        """The largest difference of a parameter of the modules that this rank has."""
        worst = 0.0
        for name, module in self.modules.items():
            theirs = dict(self.single.modules[name].named_parameters())
            for of_param, param in module.named_parameters():
                expected = theirs[of_param.removeprefix("module.")]  # as DDP has it
                worst = max(worst, float((whole(param) - expected).detach().abs().max()))
        return worst


def factor_of(norm: float, max_norm: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies by."""
    return torch.clamp(max_norm / (torch.tensor(norm, dtype=torch.float32) + 1e-6), max=1.0).item()
