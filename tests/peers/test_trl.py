"""TRL's SFTTrainer training LoRA adapters of PEFT: our optimizer has the losses of torch.optim on the same adapters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lwopt_backend import LayerWiseOptimizer
from tests.launcher import ROOT
from tests.zero import MUON, newton_schulz_in_float32

sys.path.append(str(ROOT / "examples"))

TEXTS = [f"Question {n}: what is {n} plus {n}? Answer: {2 * n}." for n in range(40)]


def losses(folder: Path, kind: str) -> tuple[list[float], list[str]]:
    """Of ten steps; and the names that the optimizer trains as matrices."""
    from datasets import Dataset
    from hugging_face import small_llama
    from peft import LoraConfig
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:254]
    bytes_alone = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="</s>", pad_token="<pad>")
    matrices: list[str] = []

    class OurTrainer(SFTTrainer):  # type: ignore[misc]
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                model = self.model if model is None else model
                trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
                if kind == "ours":
                    self.optimizer = LayerWiseOptimizer(
                        model, {"name": "muon", "ns_dtype": "float32", **MUON}, report=False
                    )
                    groups = [g for g in self.optimizer.param_groups if g["rule"] == "muon"]
                    matrices.extend(trained[id(p)] for group in groups for p in group["params"])
                else:
                    self.optimizer = torch.optim.Muon([p for p in model.parameters() if p.requires_grad], **MUON)
            return self.optimizer

    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=MUON["lr"],
        weight_decay=MUON["weight_decay"],
        max_length=64,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=1,
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    trainer = OurTrainer(
        small_llama(2, 32),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    with newton_schulz_in_float32():
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], matrices


def test_adapters_are_matrices_and_train_as_with_torch_optim(tmp_path: Path) -> None:
    ours, matrices = losses(tmp_path / "ours", "ours")
    theirs, _ = losses(tmp_path / "theirs", "theirs")
    assert len(ours) == 10 and ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-5)
    layers = [f"{n}.{part}" for n in range(2) for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]
    wanted = {f"base_model.model.model.layers.{name}.lora_{side}.default.weight" for name in layers for side in "AB"}
    assert set(matrices) == wanted
