"""The systems that ``layouts.py`` compares, on one model: GPT-2's shapes, scaled in width, depth and vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.routing.routing import route

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OWNED = ("owned, padded", "owned, compact", "owned, auto")
SYSTEMS = (*OWNED, "DDP, Muon", "ZeRO-1, AdamW", "ZeRO-2, AdamW")
VOCABULARY_OF_WIDTH = 50257 / 768  # GPT-2's
CONTEXT = 1024


@dataclass(frozen=True)
class Shapes:
    """What is trained, on how many ranks."""

    ranks: int
    layers: int
    width: int
    tokens: int
    bucket_mb: float

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}, {self.numel() / 1e6:.1f} M parameters"

    @property
    def vocabulary(self) -> int:
        return int(VOCABULARY_OF_WIDTH * self.width)

    def model(self) -> GPT2:
        torch.manual_seed(0)
        return GPT2(self)

    def numel(self) -> int:
        with torch.device("meta"):
            return sum(param.numel() for param in GPT2(self).parameters())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's tokens and targets."""
        generator = torch.Generator().manual_seed(step * self.ranks + dist.get_rank())
        tokens = torch.randint(self.vocabulary, (1, self.tokens + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """GPT-2's: one matrix for query, key and value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.ln_1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Learned positions, a head tied to the embedding."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(shapes.vocabulary, shapes.width), nn.Embedding(CONTEXT, shapes.width)
        self.blocks = nn.Sequential(*(Block(shapes.width) for _ in range(shapes.layers)))
        self.ln_f = nn.LayerNorm(shapes.width)
        self.lm_head = nn.Linear(shapes.width, shapes.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) * 0.02 + self.wpe.weight[: tokens.shape[1]] * 0.01
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1) * 0.02, targets.flatten())


@dataclass
class System:
    """``step`` trains on a batch and returns its loss. ``promised`` are the bytes that our plan says a rank sends."""

    step: Callable[[Tensor, Tensor], float]
    padding: int = 0
    promised: int = 0


def build(name: str, shapes: Shapes) -> System:
    """The system of that name, ready to train. Called on all ranks."""
    model = shapes.model()
    if name in OWNED:
        return _owned(model, name.removeprefix("owned, "), shapes)
    if name == "DDP, Muon":
        return _ddp(model)
    return _zero(model, int(name.removeprefix("ZeRO-")[0]), shapes)


def _owned(model: nn.Module, layout: str, shapes: Shapes) -> System:
    optimizer = LayerWiseOptimizer(
        model,
        **MUON,
        elementwise={"name": "adamw", **ADAMW},
        layout=layout,
        bucket_mb=shapes.bucket_mb,
        group_size=shapes.ranks,
        report=False,
    )

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    plan = optimizer.core.holdings[0].plan
    return System(step, plan.padding, optimizer.memory_report()[dist.get_rank()].sent)


def _ddp(model: nn.Module) -> System:
    matrices = {r.name for r in route(model) if r.kind == "matrix"}
    named = dict(model.named_parameters())
    optimizers = (
        torch.optim.Muon([param for name, param in named.items() if name in matrices], **MUON),
        torch.optim.AdamW([param for name, param in named.items() if name not in matrices], **ADAMW),
    )
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = wrapped(tokens, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return System(step)


def _zero(model: nn.Module, stage: int, shapes: Shapes) -> System:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": int(shapes.bucket_mb * 2**18)},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return System(step)
