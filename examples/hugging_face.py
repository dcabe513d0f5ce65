"""What the Hugging Face examples share: a small Llama, its data, the options, and FSDP2 on CPUs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from corpus import Corpus
from run_folder import read_metrics, write_whole

SEED = 1
ROWS = 4  # of a micro-batch, on each rank
MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", metavar="FILE_OR_FOLDER", help="text to train on; default: Python's own sources")
    options.add_argument("--out", type=Path, default=Path("runs/hugging_face"), help="where the run is written")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
    options.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    options.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    options.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="continue from this folder")
    options.add_argument("--ns-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--cpu", action="store_true", help="run on CPUs, over gloo")
    return options


def small_llama(layers: int, width: int) -> LlamaForCausalLM:
    """A byte-level Llama with random weights, the same on all ranks. Its output head is not tied to its embedding."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=width * 5 // 2,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


class Windows(Dataset[dict[str, Tensor]]):
    """``count`` stretches of text, drawn at random; a stretch depends on its number only."""

    def __init__(self, corpus: Corpus, count: int, context: int) -> None:
        self.corpus = corpus
        self.count = count
        self.context = context

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        (tokens,), _ = self.corpus.train_batch(0, range(number, number + 1), self.context, SEED)
        return {"input_ids": tokens, "labels": tokens}


def log(out: Path, row: dict[str, Any]) -> None:
    """Add a step to ``out``'s metrics.jsonl; what a run before wrote of this and later steps goes."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [earlier for earlier in read_metrics(out / "metrics.jsonl") if earlier["step"] < row["step"]]
    write_whole(out / "metrics.jsonl", "".join(json.dumps(each) + "\n" for each in [*rows, row]).encode())


def shard_on_cpus_too() -> None:
    """Let Accelerate use FSDP2 on CPUs.

    Accelerate 1.15 takes FSDP's settings on accelerators only; on CPUs it trains with DDP instead, without a word. All
    else in it works there, so this is for trying things out on a machine without GPUs. Real training needs none of it.
    """
    if torch.accelerator.is_available():
        raise SystemExit("--cpu: FSDP2 shards on this machine's accelerator; hide it, e.g. by CUDA_VISIBLE_DEVICES=''")
    original = AcceleratorState.__init__

    def initialize(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin = fsdp_plugin
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = initialize
