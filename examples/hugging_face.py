"""What the Hugging Face examples share: small models, their data, the options, and FSDP2 and DeepSpeed on CPUs."""

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
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

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
    options.add_argument("--layers", type=int, default=2)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--context", type=int, default=64)
    options.add_argument("--cpu", action="store_true", help="run on CPUs, over gloo")
    return options


def fsdp2_parser(description: str) -> argparse.ArgumentParser:
    options = parser(description)
    options.add_argument("--ns-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    return options


def deepspeed_parser(description: str) -> argparse.ArgumentParser:
    options = parser(description)
    options.add_argument("--model", default="llama", help="llama or gpt2, made at random, or a folder with weights")
    options.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations in backward")
    options.add_argument("--local_rank", type=int, help="given by the deepspeed launcher; not used")
    return options


def llama_settings(layers: int, width: int) -> LlamaConfig:
    return LlamaConfig(
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


def small_llama(layers: int, width: int) -> LlamaForCausalLM:
    """A byte-level Llama with random weights, the same on all ranks. Its output head is not tied to its embedding."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(llama_settings(layers, width))


def small_model(name: str, layers: int, width: int) -> PreTrainedModel:
    """A byte-level model with random weights, the same on all ranks, or the one in a folder that ``name`` names.

    Under ZeRO-3 every rank keeps its part only; random weights are others than without it.
    """
    if name == "llama":
        settings: PreTrainedConfig = llama_settings(layers, width)
    elif name == "gpt2":
        settings = GPT2Config(
            vocab_size=256,
            n_positions=1024,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    else:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(settings)
    # transformers reads it off the class's name; from GPT2LMHeadModel's it does not, and the Trainer then divides the
    # loss by one token too many per row.
    model.loss_type = "ForCausalLM"
    return model


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


def deepspeed_on_cpus_too() -> None:
    """Let Accelerate count DeepSpeed's processes on CPUs. Called before TrainingArguments or Accelerator is made.

    Accelerate 1.15 knows no backend for CPUs under DeepSpeed and then takes each process for the only one: all would
    read the same rows. Naming the backend is all it needs. Real training needs none of it.
    """
    if torch.accelerator.is_available():
        raise SystemExit("--cpu: DeepSpeed uses this machine's accelerator; hide it, e.g. by CUDA_VISIBLE_DEVICES=''")
    original = PartialState._prepare_backend

    def prepare(self: PartialState, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        return original(self, cpu, sagemaker_dp, backend or "gloo")

    PartialState._prepare_backend = prepare
