"""Every engine trains a cell of options, and one process trains the truth: the sums are exact, so bits can be compared.

Gradients are rounded to multiples of 2^-14 as they leave a layer's backward. Sums of a few are then exact in fp32, in
whatever order and by whatever collective; so are means over 2 or 4 ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import fsdp2 as fsdp2_engine
from tests import fsdp2
from tests.models import MATRICES, UnevenLM
from tests.owned import BUCKET_MB, shares
from tests.rules import CAUTIOUS, ELEMENTWISE, SECTIONS, elementwise_optimizer, matrix_optimizer
from tests.zero import OWN_ROWS, engine_for, full_weights, newton_schulz_in_float32, own_rows

ZERO = ("zero 0", "zero 1", "zero 2", "zero 3")
OWNED = ("owned 0", "owned 1", "owned 2")  # owned storage under DeepSpeed
ENGINES = ("plain", *ZERO, *OWNED, "fsdp2")
RULES = {**ELEMENTWISE, **CAUTIOUS}


@dataclass(frozen=True)
class Cell:
    """What is trained how; ``options`` are further ones of our optimizer, ``zero`` of DeepSpeed's zero_optimization."""

    engine: str
    matrix: str = "muon"
    elementwise: str = "adamw"
    accumulation: int = 1
    clip: float = 0.0
    steps: int = 3
    sharding: str = "rows"
    options: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Of one rank: its largest difference of a weight and of a norm (relative) from the truth, and its weights."""

    difference: float
    norm: float
    digest: str


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return (grad * 2**14).round() / 2**14


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(
            x, _Rounded.apply(self.weight), self.bias if self.bias is None else _Rounded.apply(self.bias)
        )


class _Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, _Rounded.apply(self.weight))


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.normalized_shape, _Rounded.apply(self.weight), _Rounded.apply(self.bias))


EXACT = {nn.Linear: _Linear, nn.Embedding: _Embedding, nn.LayerNorm: _LayerNorm}


class ExactLM(UnevenLM):
    """The model with layers whose weights' gradients are rounded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for module in self.modules():
            module.__class__ = EXACT.get(type(module), type(module))


def verdicts(*cells: Cell) -> list[Verdict]:
    """Train each cell on these ranks and compare; the truth is rank 0's to know, the others' weights are to be its."""
    found = []
    for cell in cells:
        weights, norms = train(cell)
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
        difference = norm = 0.0
        if dist.get_rank() == 0:
            truth, true_norms = reference(
                cell.matrix,
                cell.elementwise,
                dist.get_world_size(),
                cell.accumulation,
                cell.clip,
                cell.steps,
                cell.sharding,
            )
            assert set(weights) == set(truth)
            assert cell.clip == 0.0 or min(true_norms) > cell.clip, "the clip must bite to be tested"
            difference = max(float((weights[name] - truth[name]).abs().max()) for name in truth)
            norm = max((abs(ours / true - 1) for ours, true in zip(norms, true_norms)), default=0.0)
        found.append(Verdict(difference, norm, digest))
    return found


def train(cell: Cell) -> tuple[dict[str, Tensor], list[float]]:
    """Train a model on these ranks, each on its rows; its whole weights by name, and the norms that it clipped by."""
    if cell.engine == "plain":
        return _train_plain(cell)
    if cell.engine == "fsdp2":
        return _train_fsdp2(cell)
    return _train_deepspeed(cell)


def _train_plain(cell: Cell) -> tuple[dict[str, Tensor], list[float]]:
    model = ExactLM()
    options = {"bucket_mb": BUCKET_MB, **_options(cell)}
    optimizer = LayerWiseOptimizer(model, _matrix(cell), elementwise=RULES[cell.elementwise], **options)
    norms = _loop(model, optimizer, cell, dist.get_rank(), dist.get_world_size())
    optimizer.synchronize()
    return {name: param.detach().clone() for name, param in model.named_parameters()}, norms


def _train_fsdp2(cell: Cell) -> tuple[dict[str, Tensor], list[float]]:
    sharded = fsdp2.SHARDINGS[cell.sharding](_model(cell.sharding))
    options = {"bucket_matrices": 2, **_options(cell)}
    attach = options.pop("attach", False)
    optimizer = fsdp2_engine.LayerWiseOptimizer(
        sharded.model, _matrix(cell), elementwise=RULES[cell.elementwise], **options
    )
    with fsdp2.attached(optimizer, sharded.model) if attach else contextlib.nullcontext():
        norms = _loop(sharded.model, optimizer, cell, sharded.part, sharded.parts)
    return fsdp2.weights_of(sharded.model), norms


def _loop(model: nn.Module, optimizer: Any, cell: Cell, part: int, parts: int) -> list[float]:
    norms = []
    for step in range(cell.steps):
        for number, rows in enumerate(shares(step, parts * cell.accumulation)[part::parts]):
            last = number == cell.accumulation - 1
            fsdp2.set_sync(model, last)
            with contextlib.nullcontext() if last or cell.engine == "fsdp2" else optimizer.no_sync():
                (model(*rows) / cell.accumulation).backward()
        if cell.clip:
            norms.append(float(optimizer.clip_grad_norm_(cell.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def _train_deepspeed(cell: Cell) -> tuple[dict[str, Tensor], list[float]]:
    storage, stage = cell.engine.split()
    sizes = {"bucket_mb": BUCKET_MB} if storage == "owned" else {"bucket_numel": 2000}
    options = {"storage": storage, **sizes, **_options(cell)}
    settings = {
        "train_micro_batch_size_per_gpu": OWN_ROWS // cell.accumulation // dist.get_world_size(),
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": cell.clip,
        "zero_optimization": {"stage": int(stage), "reduce_bucket_size": 10_000, **cell.zero},
        "optimizer": {
            "type": "LayerWise",
            "params": {"matrix": _matrix(cell), "elementwise": RULES[cell.elementwise], **options},
        },
        "steps_per_print": 1_000_000,
    }
    norms = []
    with engine_for(settings, ExactLM()) as engine:
        for step in range(cell.steps):
            for rows in own_rows(step, cell.accumulation):
                engine.backward(engine(*rows))
                engine.step()
            if cell.clip:
                norms.append(float(engine.get_global_grad_norm()))
        return full_weights(engine), norms


def _options(cell: Cell) -> dict[str, Any]:
    return {"report": False, "atoms": {"*": "whole"}, **cell.options}  # the truth takes fused weights whole


def _matrix(cell: Cell) -> dict[str, Any]:
    return {**SECTIONS[cell.matrix], **_precise(cell.matrix, cell.clip)}


def _precise(matrix: str, clip: float) -> dict[str, Any]:
    """Norms are rounded otherwise than torch's; a bf16 iteration would turn that into 1e-2 of an update."""
    return {"ns_dtype": "float32"} if clip and matrix == "muon" else {}


def _model(sharding: str) -> ExactLM:
    return ExactLM(hidden=fsdp2.EVEN) if sharding in fsdp2.EVEN_ONLY else ExactLM()


@functools.cache
def reference(
    matrix: str, elementwise: str, world_size: int, accumulation: int, clip: float, steps: int, sharding: str
) -> tuple[dict[str, Tensor], list[float]]:
    """One process on all ranks' micro-batches, with torch's optimizers or a rule on whole matrices."""
    model = _model(sharding)
    named = dict(model.named_parameters())
    matrices = [named.pop(name) for name in MATRICES]
    section = {**SECTIONS[matrix], **_precise(matrix, clip)}
    torchs = {key: value for key, value in section.items() if key in ("lr", "weight_decay")}
    optimizers = [
        torch.optim.Muon(matrices, **torchs) if matrix == "muon" else matrix_optimizer(matrices, section),
        elementwise_optimizer(list(named.values()), RULES[elementwise]),
    ]
    norms = []
    with newton_schulz_in_float32() if clip else contextlib.nullcontext():
        for step in range(steps):
            for share in shares(step, world_size * accumulation):
                (model(*share) / accumulation).backward()
            for param in model.parameters():
                param.grad.div_(world_size)
            if clip:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}, norms
