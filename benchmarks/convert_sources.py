"""Synthetic checkpoints of a given size: AdamW at ZeRO 1 or 2, by DeepSpeed itself, and Megatron's torch_dist."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from lwopt_backend.checkpoint.choices import SCHEDULER
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, LazyTensor, Param
from lwopt_backend.checkpoint.megatron import writer as write_megatron

BYTES = 14  # of a parameter's element: the weight in bf16; master weight and two moments in fp32
MOMENTS = ("exp_avg", "exp_avg_sq")


def shapes(width: int, elements: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a GPT model of Megatron-core's, with at least so many elements; the embedding is the largest."""
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (16 * width, width)}
    for layer in itertools.count():
        block = f"decoder.layers.{layer}"
        found |= {
            f"{block}.input_layernorm.weight": (width,),
            f"{block}.self_attention.linear_qkv.weight": (3 * width, width),
            f"{block}.self_attention.linear_proj.weight": (width, width),
            f"{block}.pre_mlp_layernorm.weight": (width,),
            f"{block}.mlp.linear_fc1.weight": (4 * width, width),
            f"{block}.mlp.linear_fc2.weight": (width, 4 * width),
        }
        if sum(torch.Size(shape).numel() for shape in found.values()) >= elements:
            break
    return {**found, "decoder.final_layernorm.weight": (width,)}


def largest(found: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the largest tensor, in fp32."""
    return max(4 * torch.Size(shape).numel() for shape in found.values())


def save_deepspeed(folder: Path, found: Mapping[str, tuple[int, ...]], stage: int, ranks: int = 2) -> None:
    """What a stock engine saves after a step of AdamW in bf16, at stage 1 or 2."""
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(_save_rank, (ranks, dict(found), stage, str(folder), f"file://{meeting}/meeting"), nprocs=ranks)


class _Sum(nn.Module):
    """Its loss is the sum of all elements, so that every parameter gets gradients and nothing large is computed."""

    def __init__(self, found: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in found.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))

    def forward(self) -> Tensor:
        return torch.stack([param.sum() for param in self.parameters()]).sum()


def _save_rank(
    rank: int, ranks: int, found: Mapping[str, tuple[int, ...]], stage: int, folder: str, meeting: str
) -> None:
    import deepspeed

    from lwopt_backend.integrations.deepspeed import engine

    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine.compile_nothing()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks))
    deepspeed.init_distributed("gloo", False, verbose=False, init_method=meeting, rank=rank, world_size=ranks)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=_Sum(found), config=settings)
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(folder)
    torch.distributed.barrier()
    os._exit(0)  # taking down gloo's groups waits for ranks that went


def save_megatron(folder: Path, found: Mapping[str, tuple[int, ...]]) -> None:
    """AdamW's state in Megatron's torch_dist format; tensors are made when they are written."""
    seeds = itertools.count()
    params = {name: _random(name, shape, seeds) for name, shape in found.items()}
    arguments = {"num_attention_heads": 4, "bf16": True, "untie_embeddings_and_output_weights": False}
    folder.mkdir(parents=True)
    counts: dict[str, Any] = {"iteration": 1, "samples": 1}
    counts["scheduler"] = dict.fromkeys((*SCHEDULER, "num_steps"), 1)  # read by Megatron alone
    write_megatron.write(Checkpoint("made", "1", "megatron-core", params, arguments=arguments, **counts), folder)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("1")


def _random(name: str, shape: tuple[int, ...], seeds: Iterator[int]) -> Param:
    seed = next(seeds)

    def lazy(key: str, number: int, dtype: torch.dtype = torch.float32) -> LazyTensor:
        def read() -> Tensor:
            made = torch.randn(shape, generator=torch.Generator().manual_seed(4 * seed + number))
            return made.square().to(dtype) if key == "exp_avg_sq" else made.to(dtype)

        return LazyTensor(shape, dtype, read, f"{key} of {name}")

    states = {MASTER: lazy(MASTER, 0), **{key: lazy(key, number + 1) for number, key in enumerate(MOMENTS)}}
    return Param(lazy("weight", 0, torch.bfloat16), states, step=1.0)
