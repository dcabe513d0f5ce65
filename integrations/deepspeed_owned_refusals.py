"""Settings of DeepSpeed that owned storage cannot keep: refused by name; and those that mean nothing to it."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.integrations.deepspeed_engine import uses_auto_ep, zero_settings
from lwopt_backend.integrations.deepspeed_refusals import forms_of_sharding, sequence_parallel_by_mesh, switched_on

# Keys of zero_optimization that owned storage keeps; all others it either refuses or has no use for.
KEPT = ("stage", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights")
DEFAULT_STORAGE = '"storage": "zero"'


def reasons_to_refuse(engine: DeepSpeedEngine) -> list[str]:
    """Every reason why this engine cannot train with owned storage, one sentence each; empty if it can."""
    return [*_stage(engine), *_parallelism(engine), *_offload(engine), *_precision(engine), *_switches(engine)]


def without_effect(engine: DeepSpeedEngine) -> list[str]:
    """The keys of zero_optimization that are set, and about what DeepSpeed's own buffers would do."""
    return [f"zero_optimization.{key}" for key in zero_settings(engine) if key not in KEPT]


def _stage(engine: DeepSpeedEngine) -> list[str]:
    stage = engine.zero_optimization_stage()
    if stage <= 2:
        return []
    return [
        f"zero_optimization.stage is {stage}, where DeepSpeed shards the parameters itself; use stage 0, 1 or 2, or "
        f"{DEFAULT_STORAGE}"
    ]


def _parallelism(engine: DeepSpeedEngine) -> list[str]:
    reasons = []
    if engine.pipeline_parallelism:
        reasons.append(f"the model is a PipelineModule; use {DEFAULT_STORAGE}")
    if engine.has_moe_layers or uses_auto_ep(engine):
        reasons.append(f"the model has DeepSpeed's expert layers; use {DEFAULT_STORAGE} with deepspeed.moe.layer.MoE")
    return [*reasons, *sequence_parallel_by_mesh(engine), *forms_of_sharding(engine)]


def _offload(engine: DeepSpeedEngine) -> list[str]:
    offloads = {"offload_optimizer": engine.zero_offload_optimizer(), "offload_param": engine.zero_offload_param()}
    reasons = []
    for key, offload in offloads.items():
        device = "none" if offload is None else getattr(offload.device, "value", offload.device)
        if device != "none":
            reasons.append(f"zero_optimization.{key}.device is {device!r}; set it to 'none', or use {DEFAULT_STORAGE}")
    return reasons


def _precision(engine: DeepSpeedEngine) -> list[str]:
    reasons = []
    dtype, accumulated = engine.get_data_types()
    if accumulated not in (dtype, torch.float32):
        reasons.append(
            f"data_types.grad_accum_dtype is {_spell(accumulated)} and the model is trained in {_spell(dtype)}; use "
            f"{_spell(dtype)} or float32"
        )
    wire = engine._config.communication_data_type
    if wire is not None and wire != accumulated:
        reasons.append(
            f"communication_data_type is {_spell(wire)}, but gradients travel as they are accumulated, in "
            f"{_spell(accumulated)}; set data_types.grad_accum_dtype, or leave the key out"
        )
    return reasons


def _switches(engine: DeepSpeedEngine) -> list[str]:
    zero = engine._config.zero_config
    switches: dict[str, Any] = {
        "zero_optimization.parameter_alignment": engine.zero_parameter_alignment(),
        "zero_optimization.zero_quantized_weights": engine.zero_quantized_weights(),
        "zero_optimization.zero_quantized_nontrainable_weights": engine.zero_quantized_nontrainable_weights(),
        "zero_optimization.zero_quantized_gradients": engine.zero_quantized_gradients(),
        "zero_optimization.zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "zero_optimization.pipeline_loading_checkpoint": zero.pipeline_loading_checkpoint,
    }
    return [*switched_on(engine), *(f"{key} is on; switch it off" for key, on in switches.items() if on)]


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
