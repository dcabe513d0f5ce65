"""torchtitan's own trainer on CPU ranks, with our optimizer as ``--override.imports`` gives it.

torchrun torchtitan_llama3.py FOLDER RUN muon|normuon|torch STEPS: it has FOLDER/tokenizer and FOLDER/texts,
checkpoints into FOLDER/RUN every 3 steps, and goes on from the last of those, at last writing all state into
FOLDER/RUN/held.pt. With "resized" the checkpoint is of a different number of ranks.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))
torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined] # a CPU is none to torch
nothing: dict[str, Any] = {"get_device_name": "CPU", "get_device_properties": SimpleNamespace(total_memory=2**30)}
nothing |= {"reset_peak_memory_stats": None, "empty_cache": None, "memory_stats": {}, "current_device": 0}
for function, answer in nothing.items():  # which torchtitan asks of its device to report memory
    setattr(torch.cpu, function, functools.partial(lambda answer, *_: answer, answer))

from torchtitan.components.checkpointer.utils import canonical_fqn  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402
from torchtitan.models.common import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry, model_registry  # noqa: E402

from tests.support.zero import newton_schulz_in_float32  # noqa: E402

OVERRIDE = "lwopt_backend.integrations.torchtitan.layer_wise"
MUON, ADAMW = {"lr": 0.02, "weight_decay": 0.1}, {"lr": 8e-4, "betas": [0.9, 0.95]}


class TorchsOptimizers(OptimizersContainer):
    """torch.optim on the whole weights, for one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        named = {canonical_fqn(name): param for name, param in model_parts[0].named_parameters()}
        matrices = [(n, p) for n, p in named.items() if p.ndim == 2 and n.startswith("layers.")]
        others = [(n, p) for n, p in named.items() if not (p.ndim == 2 and n.startswith("layers."))]
        self.optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)]
        self._post_init(list(named.values()))


def read_texts(config: Any, texts: Path) -> None:
    """Two rows of 32 tokens in a batch."""
    training, loader = config.training, config.dataloader
    if hasattr(training, "seq_len"):  # 0.3.0
        training.seq_len, training.local_batch_size, loader.dataset_path = 32, 2, str(texts)
        return
    from torchtitan.components.data import IndexedJsonlSource

    training.max_context_length, training.num_tokens_per_microbatch_per_dp_rank = 32, 64
    source = IndexedJsonlSource.Config(patterns=(str(texts / "texts.json"),))
    loader.dataset = replace(loader.dataset, dataset=replace(loader.dataset.dataset, source=source))


def main(folder: Path, run: str, kind: str, steps: int, resized: bool) -> None:
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are compiled
    config.hf_assets_path, config.dump_folder = str(folder / "tokenizer"), str(folder / run)
    if kind == "torch":
        config.optimizer = TorchsOptimizers.Config()
    else:
        rules = {"matrix": {"name": kind, "ns_dtype": "float32", **MUON}, "elementwise": {"name": "adamw", **ADAMW}}
        config.override.imports.append((OVERRIDE, {**rules, "atoms": {"*": "whole"}}))
    config.lr_scheduler.total_steps = 6
    config.training.steps, config.training.mixed_precision_param = steps, "float32"
    read_texts(config, folder / "texts")
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.checkpoint.exclude_from_loading = ["dataloader"] if resized else []  # it is of a different number of ranks
    config.validator.enable, config.debug.seed = False, 1
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it sums
    with newton_schulz_in_float32():
        trainer.train()
    held = trainer.optimizers.state_dict()
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in held.items()}
    torch.save(whole, folder / run / "held.pt")
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:] == ["resized"])
