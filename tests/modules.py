"""What tests of several modules share: a vision encoder and a language model on ranks of their own, and both on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import distribute_like, layers_of, whole
from tests.models import MATRICES, UnevenLM, batch
from tests.owned import exact_sums
from tests.ranks import kept_in_a_world
from tests.zero import ADAMW, MUON

ROWS = 24  # of the global batch; divides into micro-batches for 1 to 4 ranks
PIXELS, FEATURES = 10, 24
NAMES = ("vision", "language")


class Vision(nn.Module):
    """(rows, PIXELS) images become (rows, FEATURES) features."""

    MATRICES = ("layers.0.weight", "layers.2.weight")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(PIXELS, 31), nn.GELU(), nn.Linear(31, FEATURES))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Language(UnevenLM):
    """A language model that sees a feature in front of each row's tokens; the mean cross-entropy of its rows."""

    MATRICES = MATRICES

    def forward(self, tokens: Tensor, targets: Tensor, seen: Tensor) -> Tensor:
        x = self.embedding(tokens) + seen.unsqueeze(1)
        x = x + self.layers(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def model_of(name: str, exact: bool) -> nn.Module:
    model = {"vision": Vision, "language": Language}[name]()
    return exact_sums(model) if exact else model


class Split:
    """Which ranks have which module, as "01|23" says; each computes an equal part of the rows."""

    def __init__(self, text: str) -> None:
        self.ranks = {name: tuple(map(int, digits)) for name, digits in zip(NAMES, text.split("|"))}
        self.ratio = len(self.ranks["vision"]) / len(self.ranks["language"])  # of means over ranks

    def rows(self, name: str, of: int) -> dict[int, slice]:
        """By rank, its rows of so many."""
        size = of // len(self.ranks[name])
        return {rank: slice(place * size, (place + 1) * size) for place, rank in enumerate(self.ranks[name])}


def micro_batch(step: int, part: int, parts: int) -> list[Tensor]:
    """Images, tokens and targets."""
    images = torch.randn(ROWS, PIXELS, generator=torch.Generator().manual_seed(step))
    return [tensor.chunk(parts)[part] for tensor in (images, *batch(step, ROWS))]


def backward(
    split: str, modules: dict[str, nn.Module], step: int, part: int = 0, parts: int = 1, scale: float = 1.0
) -> None:
    """Forward and backward of one micro-batch through the modules that this rank has; called on all ranks."""
    images, tokens, targets = micro_batch(step, part, parts)
    cut, rows = Split(split), len(images)
    own, heard = (cut.rows(name, rows).get(dist.get_rank(), slice(0)) for name in NAMES)

    def from_all(mine: Tensor, place: slice) -> Tensor:
        found = torch.zeros(rows, FEATURES)
        found[place] = mine
        dist.all_reduce(found)
        return found

    out = modules["vision"](images[own]) if "vision" in modules else torch.zeros(0, FEATURES)
    seen = from_all(out.detach(), own)[heard].requires_grad_()
    if "language" in modules:
        (scale * modules["language"](tokens[heard], targets[heard], seen)).backward()
    grad = from_all(seen.detach() if seen.grad is None else seen.grad, heard)[own]
    if "vision" in modules:
        out.backward(grad * cut.ratio)


# Kinds of optimizers


@kept_in_a_world
def group_of(ranks: tuple[int, ...], module: str) -> Any:
    """A process group of its own for each module; called on all ranks."""
    group = dist.new_group(list(ranks))
    return group if dist.get_rank() in ranks else None


@kept_in_a_world
def mesh_of_group(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def owned(module: nn.Module, group: Any, **options: Any) -> LayerWiseOptimizer:
    settings = {"bucket_mb": 0.004, "report": False, "process_group": group, **options}
    return LayerWiseOptimizer(module, **MUON, elementwise={"name": "adamw", **ADAMW}, **settings)


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def owns(module: nn.Module, group: Any, **options: Any) -> tuple[nn.Module, Any]:
    return module, owned(module, group, **options)


def shards(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    for part in (*layers_of(module), module):
        fully_shard(part, mesh=mesh_of_group(group))
    elementwise = {"name": "adamw", **ADAMW}
    return module, fsdp2.LayerWiseOptimizer(module, **MUON, elementwise=elementwise, report=False)


def shards_early(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    """The exchange begins in backward, so it is under way when a step is skipped."""
    module, optimizer = shards(module, group)
    optimizer.attach(module)
    return module, optimizer


def copies(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    optimizer = sgd(list(module.parameters()))
    return DistributedDataParallel(module, process_group=group), optimizer


def alone(module: nn.Module, group: Any) -> tuple[nn.Module, Any]:
    return module, sgd(list(module.parameters()))


KINDS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {
    "owned": owns,
    "FSDP2": shards,
    "FSDP2, attached": shards_early,
    "DDP": copies,
    "plain": alone,
}
OWNED = "owned and owned"


def make(split: str, kinds: str = OWNED, exact: bool = True, **options: Any) -> tuple[dict[str, nn.Module], Any]:
    """This rank's modules, with gradients whose sums are exact or as they are, and their optimizers."""
    modules: dict[str, nn.Module] = {}
    optimizers: dict[str, Any] = dict.fromkeys(NAMES)
    for (name, ranks), kind in zip(Split(split).ranks.items(), kinds.split(" and ")):
        group = group_of(ranks, name)
        if dist.get_rank() in ranks:
            modules[name], optimizers[name] = KINDS[kind](model_of(name, exact), group, **options)
    return modules, ModuleOptimizers(optimizers)


# The reference


class OneProcess:
    """Both modules on one process, with torch.optim.Muon and AdamW, computing the rows of each rank in turn."""

    def __init__(self, exact: bool, vision_by_sgd: bool) -> None:
        self.modules = {name: model_of(name, exact) for name in NAMES}
        params = [(m, n, param) for m, module in self.modules.items() for n, param in module.named_parameters()]
        by_sgd = [param for module, _, param in params if module == "vision" and vision_by_sgd]
        matrices = [param for module, name, param in params if name in self.modules[module].MATRICES]
        kept = {id(param) for param in by_sgd}
        others = {id(param) for param in matrices} | kept
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon([param for param in matrices if id(param) not in kept], **MUON),
            torch.optim.AdamW([param for *_, param in params if id(param) not in others], **ADAMW),
            *([sgd(by_sgd)] if by_sgd else []),
        ]

    def gradients(self, split: str, step: int, accumulation: int = 1) -> None:
        """Mean gradients of a global batch."""
        cut = Split(split)
        for part in range(accumulation):
            images, tokens, targets = micro_batch(step, part, accumulation)
            own, heard = (cut.rows(name, len(images)).values() for name in NAMES)
            outs = [self.modules["vision"](images[rows]) for rows in own]
            seen, grads = torch.cat(outs).detach(), []
            for rows in heard:
                here = seen[rows].clone().requires_grad_()
                self.modules["language"](tokens[rows], targets[rows], here).backward()
                grads.append(here.grad)
            for rows, out in zip(own, outs):
                out.backward((torch.cat(grads) * cut.ratio)[rows])
        for name in NAMES:
            for summed in self.grads(name):
                summed.div_(len(cut.ranks[name]))

    def grads(self, name: str) -> list[Tensor]:
        return [param.grad for param in self.modules[name].parameters() if param.grad is not None]

    def norms(self, norm_type: float = 2.0) -> list[float]:
        """Of each module's gradients, and of all."""
        flat = [torch.cat([grad.flatten() for grad in self.grads(name)]).double() for name in NAMES]
        return [torch.linalg.vector_norm(grad, norm_type).item() for grad in (*flat, torch.cat(flat))]

    def zeros(self) -> dict[str, int]:
        return {name: sum(int((grad == 0).sum()) for grad in self.grads(name)) for name in NAMES}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Beside:
    """Modules that are trained on a split of the ranks, and one process that trains what they must become."""

    def __init__(self, split: str, kinds: str = OWNED, single: OneProcess | None = None, **options: Any) -> None:
        exact = kinds == OWNED  # of two ranks each, sums are exact without it
        self.split, self.kinds = split, kinds
        self.modules, self.optimizers = make(split, kinds, exact, **options)
        self.single = single or OneProcess(exact, kinds.startswith(("DDP", "plain")))

    def train(self, steps: range, *, accumulation: int = 1, clip: float | Mapping[str, float] | None = None) -> None:
        """Steps of both; norms and zeros are those of one process, which clips with our norm."""
        for step in steps:
            for part in range(accumulation):
                with self.optimizers.no_sync() if part < accumulation - 1 else contextlib.nullcontext():
                    backward(self.split, self.modules, step, part, accumulation)
            self.single.gradients(self.split, step, accumulation)
            if clip is not None:
                self.clip(clip if isinstance(clip, Mapping) else dict.fromkeys(NAMES, clip), clip)
            assert self.optimizers.step() is True and self.optimizers.overflowed == ()
            self.optimizers.zero_grad()
            self.single.step()

    def clip(self, limits: Mapping[str, float], given: float | Mapping[str, float]) -> None:
        assert self.optimizers.zero_counts() == self.single.zeros()
        norm = self.optimizers.clip_grad_norm_(given)
        assert abs(norm.item() / self.single.norms()[-1] - 1) <= 1e-6
        assert norm > max(limits.values()), "nothing is clipped"
        for name in NAMES:
            for grad in self.single.grads(name):
                grad.mul_(torch.clamp(limits[name] / (norm + 1e-6), max=1.0))  # as torch.nn.utils.clip_grad_norm_

    def pairs(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """The parameters of the modules that this rank has, and the one process's."""
        return [
            (name, param, self.single.modules[module].get_parameter(name.removeprefix("module.")).detach())  # DDP's
            for module, of_rank in self.modules.items()
            for name, param in of_rank.named_parameters()
        ]

    def check(self) -> None:
        for name, param, expected in self.pairs():
            assert torch.equal(whole(param), expected), name

    def take_weights(self) -> None:
        """Those of the one process."""
        with torch.no_grad():
            for _, param, value in self.pairs():
                if hasattr(param, "to_local"):
                    param.to_local().copy_(distribute_like(value, param))
                else:
                    param.copy_(value)

    def resumed(self, split: str, folder: Path) -> Beside:
        """New modules on another split, from the one process's weights and what was saved."""
        after = Beside(split, self.kinds, self.single)
        after.take_weights()
        after.optimizers.load_state_dict_from(folder)
        return after
