"""Settings of DeepSpeed that are not supported: refused by name, with the reason, before anything is built."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.integrations.deepspeed_engine import uses_bf16_optimizer


def reasons_to_refuse(engine: DeepSpeedEngine, param_groups: list[dict[str, Any]]) -> list[str]:
    """Every reason why this engine cannot train with layer-wise matrices, one sentence each; empty if it can."""
    return [*_stage(engine), *_parallelism(engine, param_groups), *_storage(engine), *_tags(engine)]


def _stage(engine: DeepSpeedEngine) -> list[str]:
    dtype = engine.get_data_types()[0]
    if engine.zero_optimization_stage() > 0 or dtype == torch.float32 or uses_bf16_optimizer(engine):
        return []
    return [
        f"zero_optimization.stage is 0 and the model is trained in {str(dtype).removeprefix('torch.')}, for which "
        "DeepSpeed keeps full master weights on every rank and takes a step on zero gradients at start; use stage 1, "
        "or torch_autocast with fp32 parameters"
    ]


def _parallelism(engine: DeepSpeedEngine, param_groups: list[dict[str, Any]]) -> list[str]:
    reasons = []
    if engine.pipeline_parallelism:
        reasons.append("the model is a PipelineModule; expected a module that is whole on every rank")
    if engine.has_moe_layers or any(group.get("moe") for group in param_groups):
        reasons.append("the model has deepspeed.moe layers, whose experts live in process groups of their own")
    shards = "each rank holds a shard, and the matrix rule needs the matrix; use 1"
    if engine.autotp_size() > 1:
        reasons.append(f"tensor_parallel.autotp_size is {engine.autotp_size()}: {shards}")
    size = getattr(engine.mpu, "get_model_parallel_world_size", lambda: 1)()
    if size > 1 and not engine.pipeline_parallelism:  # a pipeline's stages count as model parallel
        reasons.append(f"mpu.get_model_parallel_world_size() is {size}: {shards}")
    if engine.sequence_parallel_size > 1:
        reasons.append(f"the sequence-parallel size is {engine.sequence_parallel_size}; use 1")
    return reasons


def _storage(engine: DeepSpeedEngine) -> list[str]:
    reasons = []
    offloads = {"offload_optimizer": engine.zero_offload_optimizer(), "offload_param": engine.zero_offload_param()}
    for key, offload in offloads.items():
        device = "none" if offload is None else getattr(offload.device, "value", offload.device)
        if device not in ("none", "cpu"):
            reasons.append(f"zero_optimization.{key}.device is {device!r}; set it to 'cpu' or 'none'")
    switches = {
        "zero_optimization.round_robin_gradients": engine.zero_round_robin_gradients(),
        "zero_optimization.elastic_checkpoint": engine.zero_elastic_checkpoint(),
        "zero_optimization.zenflow": engine.zenflow_config() is not None,
        "compile.deepcompile": engine.is_deepcompile_enabled(),
        "bf16.bf16_master_weights_and_grads": engine.bf16_master_weights_and_gradients(),
        "fp16.fp16_master_weights_and_grads": engine.fp16_master_weights_and_gradients(),
    }
    reasons += [f"{key} is on; switch it off" for key, on in switches.items() if on]
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16:
        # torch's GradScaler skips the step on the ranks whose own fragment overflowed; the others would wait for them.
        reasons.append("torch_autocast.dtype is float16, with which ranks may skip a step one by one; use bfloat16")
    return reasons


def _tags(engine: DeepSpeedEngine) -> list[str]:
    tagged = [name for name, param in engine.module.named_parameters() if getattr(param, "use_muon", False)]
    if not tagged:
        return []
    # DeepSpeed would orthogonalize these itself, because our class name contains "muon", and we once more.
    return [
        f"{len(tagged)} parameters, the first is {tagged[0]!r}, carry use_muon=True, which is for DeepSpeed's own "
        "Muon; delete the attribute"
    ]
