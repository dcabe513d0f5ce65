"""Forms of ds_config.json that public repositories have, with this optimizer as their entry: the Trainer fills in their
"auto", and trains to the bit as without their options; or the setting is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from lwopt_backend.integrations import deepspeed_zero
from tests.docs.test_hugging_face import accelerate_as_it_was
from tests.docs.test_sixteen_bits import ADAMW, DATA, DECAY, RATE, ROWS, same, small_llama, weights_of
from tests.support.ranks import RankPool

STEPS = 3
LEAF = "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock"
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
AUTO = dict.fromkeys(BATCHES, "auto")
PARAMS = {"lr": "auto", "weight_decay": "auto", "adamw": ADAMW, "report": False}
ENTRY = {"type": "LayerWiseMuon", "params": PARAMS}
ON_CPU = {"device": "cpu", "pin_memory": True}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
EITHER = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "auto_cast": True, "initial_scale_power": 32}}


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


def warm_up(**params: Any) -> dict[str, Any]:
    params = {**dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"), **params}
    return {"scheduler": {"type": "WarmupDecayLR", "params": params}}


TRAIN: dict[str, dict[str, Any]] = {
    "all on the CPU, one sub-group for each parameter": {
        **AUTO,
        **BF16,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **zero(
            3,
            offload_optimizer=ON_CPU,
            offload_param=ON_CPU,
            overlap_comm=True,
            sub_group_size=0,
            max_live_parameters=0,
            max_reuse_distance=0,
            stage3_prefetch_bucket_size="auto",
            gather_16bit_weights_on_model_save=True,
        ),
    },
    "stage 3 on the CPU, sizes as floats, either precision": {
        **AUTO,
        **EITHER,
        **zero(
            3,
            offload_optimizer=ON_CPU,
            offload_param=ON_CPU,
            sub_group_size=1e7,
            reduce_bucket_size=1e7,
            stage3_prefetch_bucket_size=1e7,
            stage3_max_live_parameters=1e8,
        ),
        "wall_clock_breakdown": True,
    },
    "stage 1, a schedule that is all auto": {
        **AUTO,
        **EITHER,
        **zero(1, overlap_comm=True, reduce_scatter=True, allgather_partitions=True, contiguous_gradients=True),
        **warm_up(warmup_min_lr="auto"),
    },
    "stage 2 on the CPU, activations checkpointed": {
        **AUTO,
        **BF16,
        "fp16": {"enabled": False},
        "gradient_clipping": 1.0,
        **zero(2, offload_optimizer=ON_CPU, overlap_comm=True, allgather_bucket_size=200_000_000),
        **warm_up(warmup_min_lr=0),
        "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
    },
    "experts as leaves, numbers only": {
        **BF16,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10,
        **zero(3, stage3_param_persistence_threshold=1e5, leaf_module={"classes": [LEAF]}),
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": STEPS, "warmup_num_steps": 1, "cos_min_ratio": 0.001},
        },
    },
}
REFUSED = {
    "zero_optimization.offload_param.device is 'nvme'": {
        **AUTO,
        **BF16,
        **zero(3, offload_param={"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5}),
        "aio": {"block_size": 8388608, "queue_depth": 32},
    },
    "compile.deepcompile is on; switch it off": {
        **AUTO,
        **BF16,
        **zero(0),
        "compile": {"deepcompile": True, "passes": ["autosp"]},
    },
}


def model_of(has_experts: bool) -> Any:
    if not has_experts:
        return small_llama(1, 32)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=256, num_hidden_layers=1, num_local_experts=2, **sizes))


def trained(
    form: dict[str, Any], out: Path, has_experts: bool = False
) -> tuple[list[float], list[list[float]], dict[str, Tensor]]:
    """On every rank: losses, the rates of matrices and of the rest after each step, and fp32 weights."""
    deepspeed_zero.register()
    path = out / f"ds_config_{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps({**form, "optimizer": ENTRY}))
    rates: list[list[float]] = []

    class Rated(Trainer):
        def _get_learning_rate(self) -> float:
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            return float(super()._get_learning_rate())

    with accelerate_as_it_was():
        args = TrainingArguments(
            str(out),
            deepspeed=str(path),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            learning_rate=RATE,
            weight_decay=DECAY,
            # Where it is "auto": sub-groups sum the norm in another order, and a weight may round the other way then.
            max_grad_norm=0.0 if form.get("gradient_clipping") == "auto" else 1.0,
            warmup_steps=1,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=True,
        )
        trainer = Rated(model_of(has_experts), args, train_dataset=DATA)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return losses, rates, weights_of(trainer.model_wrapped)


@pytest.mark.parametrize("name", TRAIN)
def test_a_form_trains_as_without_its_options(rank_pools: dict[int, RankPool], tmp_path: Path, name: str) -> None:
    form = TRAIN[name]
    kept = {key: value for key, value in form.items() if key in (*BATCHES, "scheduler")}
    bare = {**AUTO, "gradient_clipping": 1.0, **kept, **BF16, **zero(form["zero_optimization"]["stage"])}
    (losses, rates, weights), (bare_losses, bare_rates, bare_weights) = (
        rank_pools[2].run(trained, settings, tmp_path, "experts" in name)[0] for settings in (form, bare)
    )
    assert losses == bare_losses and len(set(losses)) == STEPS
    assert rates == bare_rates and max(rates)[0] == RATE
    assert all(rest == pytest.approx(matrices * ADAMW["lr"] / RATE) for matrices, rest in rates)
    same(weights, bare_weights)


@pytest.mark.parametrize("message", REFUSED)
def test_a_form_is_refused_by_name(rank_pools: dict[int, RankPool], tmp_path: Path, message: str) -> None:
    for told in rank_pools[2].errors(trained, REFUSED[message], tmp_path):
        assert message in told and "LayerWiseMuon does not support this configuration; change:" in told
