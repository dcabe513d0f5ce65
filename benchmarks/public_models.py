"""Matrix shapes of public models, without the models: what planners are compared on.

Embeddings, output heads, norms, biases and multi-token-prediction heads are left out; router gates are matrices.
Flavours: ``hf`` keeps q, k, v and gate, up apart; ``mcore_fused`` fuses them as Megatron-Core does, experts one after
the other; ``mcore_grouped`` has all experts' first matrices of a layer, then all second ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import ModelShapes
from lwopt_backend.planner.study import Deployment, Study, plan_study
from lwopt_backend.routing.routing import Route, named_as_stack

Matrix = tuple[str, tuple[int, int]]
Model = Callable[[str], Iterator[Matrix]]  # of a flavour


def gpt2(layers: int, width: int) -> Model:
    """GPT-2 has fused q, k, v in every flavour."""

    def matrices(flavour: str) -> Iterator[Matrix]:
        for i in range(layers):
            yield f"h.{i}.attn.c_attn", (3 * width, width)
            yield f"h.{i}.attn.c_proj", (width, width)
            yield f"h.{i}.mlp.c_fc", (4 * width, width)
            yield f"h.{i}.mlp.c_proj", (width, 4 * width)

    return matrices


def attention(name: str, width: int, heads: int, kv_heads: int, head: int, fused: bool) -> Iterator[Matrix]:
    q, kv = heads * head, kv_heads * head
    if fused:
        yield f"{name}.linear_qkv", (q + 2 * kv, width)
    else:
        yield from ((f"{name}.q", (q, width)), (f"{name}.k", (kv, width)), (f"{name}.v", (kv, width)))
    yield f"{name}.o", (width, q)


def gated(name: str, width: int, inner: int, fused: bool) -> list[Matrix]:
    if fused:
        return [(f"{name}.fc1", (2 * inner, width)), (f"{name}.fc2", (width, inner))]
    return [(f"{name}.gate", (inner, width)), (f"{name}.up", (inner, width)), (f"{name}.down", (width, inner))]


def experts(name: str, count: int, width: int, inner: int, flavour: str) -> list[Matrix]:
    each = [gated(f"{name}.experts.{e}", width, inner, flavour != "hf") for e in range(count)]
    if flavour == "mcore_grouped":
        return [first for first, _ in each] + [second for _, second in each]
    return [matrix for expert in each for matrix in expert]


def llama(
    layers: int, width: int, heads: int, kv_heads: int, head: int, inner: int, count: int = 0
) -> Callable[[str], Iterator[Matrix]]:
    """Llama-like; with ``count`` experts, Mixtral-like."""

    def matrices(flavour: str) -> Iterator[Matrix]:
        for i in range(layers):
            yield from attention(f"layers.{i}.attn", width, heads, kv_heads, head, flavour != "hf")
            if count:
                yield f"layers.{i}.moe.router", (count, width)
                yield from experts(f"layers.{i}.moe", count, width, inner, flavour)
            else:
                yield from gated(f"layers.{i}.mlp", width, inner, flavour != "hf")

    return matrices


def latent(
    layers: int, dense_layers: int, heads: int, dense_inner: int, count: int
) -> Callable[[str], Iterator[Matrix]]:
    """DeepSeek-V3-like: width 7168, multi-head latent attention, experts of 2048, one of them shared."""
    width, inner = 7168, 2048

    def matrices(flavour: str) -> Iterator[Matrix]:
        for i in range(layers):
            name = f"layers.{i}.attn"
            yield from ((f"{name}.q_a", (1536, width)), (f"{name}.q_b", (heads * 192, 1536)))
            yield from ((f"{name}.kv_a", (576, width)), (f"{name}.kv_b", (heads * 256, 512)))
            yield f"{name}.o", (width, heads * 128)
            if i < dense_layers:
                yield from gated(f"layers.{i}.mlp", width, dense_inner, flavour != "hf")
                continue
            yield f"layers.{i}.moe.router", (count, width)
            yield from experts(f"layers.{i}.moe", count, width, inner, flavour)
            yield from gated(f"layers.{i}.moe.shared", width, inner, flavour != "hf")

    return matrices


MODELS: dict[str, Model] = {
    "gpt2-124m": gpt2(12, 768),
    "llama-7b": llama(32, 4096, 32, 32, 128, 11008),
    "llama3.1-8b": llama(32, 4096, 32, 8, 128, 14336),
    "llama3.1-70b": llama(80, 8192, 64, 8, 128, 28672),
    "qwen3-32b": llama(64, 5120, 64, 8, 128, 25600),
    "qwen3-30b-a3b": llama(48, 2048, 32, 4, 128, 768, 128),
    "deepseek-v3": latent(61, 3, 128, 18432, 256),
    "kimi-k2-like": latent(61, 1, 64, 18432, 384),
}


def load(model: str, flavour: str = "hf") -> list[Matrix]:
    """``[(name, (rows, columns)), ...]`` in model order."""
    return list(MODELS[model](flavour))


STACKED = re.compile(r"\.experts\.\d+\.")


def stacked(matrices: list[Matrix]) -> list[tuple[str, tuple[int, ...]]]:
    """The same parameters where all experts of a layer are one, as transformers has them."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, shape in matrices:
        found.setdefault(STACKED.sub(".experts.", name), []).append(shape)
    return [(name, (len(some), *some[0]) if ".experts." in name else some[0]) for name, some in found.items()]


def study(
    model: str,
    engine: str,
    ranks: int,
    *,
    stack: bool = False,
    stack_dim: int = 0,
    options: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Study:
    """The plan that ``engine`` makes for a public model, by default; with ``stack``, of stacked experts, which FSDP2
    shards along ``stack_dim``. ``dtype`` is that of parameters."""
    shapes = stacked(load(model)) if stack else load(model)
    routes = [Route(name, shape, "matrix", "listed", stack=named_as_stack(name, shape)) for name, shape in shapes]
    setting = Setting.of(engine, options=options, dtype=dtype, stack_dim=stack_dim)
    return plan_study(ModelShapes(model, *setting.training.of(routes)), Deployment(ranks), setting)


def atoms(model: str, flavour: str = "hf") -> list[Atom]:
    """The same as atoms that cost their Newton-Schulz flops."""
    return [Atom(name, shape, newton_schulz_flops(shape)) for name, shape in load(model, flavour)]
