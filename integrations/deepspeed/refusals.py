"""Settings of DeepSpeed that are not supported: each is named, with the reason, before anything is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from packaging.version import Version

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.config.options import install_command
from lwopt_backend.integrations.deepspeed.engine import tensor_ranks, uses_auto_ep, uses_bf16_optimizer
from lwopt_backend.routing.routing import full_shape


def reasons_to_refuse(engine: DeepSpeedEngine, param_groups: list[dict[str, Any]], config: ZeROConfig) -> list[str]:
    """Every reason why this engine cannot train with layer-wise matrices, one sentence each; empty if it can."""
    parallel = [*_parallelism(engine), *_tensor_parallelism(engine)]
    return [
        *_stage(engine),
        *_experts(engine, param_groups),
        *parallel,
        *_storage(engine),
        *_skipping(engine, config),
        *_skipping_of_deepspeed(engine, config),
    ]


def _stage(engine: DeepSpeedEngine) -> list[str]:
    dtype, stage = engine.get_data_types()[0], engine.zero_optimization_stage()
    if engine.device.type == "cpu" and Version(deepspeed.__version__) < Version("0.19.8"):
        this = f"on a CPU, where DeepSpeed {deepspeed.__version__}"
        mend = f"run: {install_command('deepspeed', '==0.19.8')}"
        if stage == 3:
            return [f"zero_optimization.stage is 3 {this} uses parameters before all of them are gathered; {mend}"]
        if stage in (1, 2) and not engine.zero_contiguous_gradients():
            return [
                f"zero_optimization.contiguous_gradients is false {this} does not reduce gradients; set it to true, "
                f"or {mend}"
            ]
    if stage == 0 and uses_bf16_optimizer(engine):
        return [
            "zero_optimization.stage is 0 in a pipeline trained in bfloat16: DeepSpeed then saves one rank's part of "
            "the state and cannot load it again; use stage 1, which shards equally"
        ]
    if stage > 0 or dtype == torch.float32:
        return []
    return [
        f"zero_optimization.stage is 0 with a model trained in {_spell(dtype)}: DeepSpeed then keeps full master "
        "weights on every rank and takes a step on zero gradients at start; use stage 1, or torch_autocast with fp32 "
        "parameters"
    ]


def _experts(engine: DeepSpeedEngine, param_groups: list[dict[str, Any]]) -> list[str]:
    """Experts need a stage that shards them, and separate param groups, each for the ranks that it names."""
    reasons = []
    if uses_auto_ep(engine):
        reasons.append(
            "expert_parallel.enabled is true (AutoEP), which is not tested with layer-wise matrices; build the model "
            "with deepspeed.moe.layer.MoE"
        )
    known = sorted({param.group_name for param in engine.module.parameters() if is_moe_param(param)})
    split = "split groups with deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer"
    for number, group in enumerate(param_groups):
        experts = [is_moe_param(param) for param in group["params"]]
        if not group.get("moe"):
            if any(experts):
                reasons.append(f"param group {number} has experts' parameters, but not 'moe': True; {split}")
        elif group.get("name") not in known:
            names = ", ".join(map(repr, known)) or "none, as it has no deepspeed.moe layers"
            named = f"param group {number} has 'moe': True and name {group.get('name')!r}"
            reasons.append(f"{named}; the model has {names}")
        elif not all(experts):
            reasons.append(f"param group {number} has 'moe': True, but not only experts' parameters; {split}")
        elif wrong := sorted({param.group_name for param in group["params"]} - {group["name"]}):
            reasons.append(f"param group {number} is named {group['name']!r}, but has experts of {wrong[0]!r}; {split}")
    return reasons


def _parallelism(engine: DeepSpeedEngine) -> list[str]:
    reasons = []
    if engine.pipeline_parallelism:
        shards = engine.mpu.get_slice_parallel_world_size()
        if engine.has_moe_layers:
            reasons.append("the model is a PipelineModule with deepspeed.moe layers; use one of the two")
        if shards > 1:
            reasons.append(
                f"the pipeline's topology has model parallelism of {shards}: each rank holds a shard, and the matrix "
                "rule needs the matrix; use PipeDataParallelTopology"
            )
    reasons += _sequences(engine)
    if engine.sequence_parallel_size > 1 and uses_bf16_optimizer(engine):
        reasons.append(
            f"sequence parallelism of {engine.sequence_parallel_size} with bf16 and fp32 accumulation at stage 1: "
            "DeepSpeed then counts gradients on the first rank of a sequence and fails on the others; use stage 2"
        )
    return reasons


def _tensor_parallelism(engine: DeepSpeedEngine) -> list[str]:
    """Tensor parallelism in unsupported combinations."""
    if engine.pipeline_parallelism or engine.mp_world_size == 1:  # a pipeline's stages count as model parallel
        return []
    count, stage = tensor_ranks(engine), engine.zero_optimization_stage()
    whose = f"tensor parallelism of {count}"
    ranks = count * engine.seq_dp_world_size
    if count != engine.mp_world_size or ranks != engine.world_size:
        return [
            f"mpu.get_model_parallel_world_size() is {engine.mp_world_size}, of which {count} are tensor-parallel, "
            f"with {engine.seq_dp_world_size} data-parallel ranks, on {engine.world_size}; with tensor parallelism use "
            "an mpu without pipeline stages and sequence parallelism"
        ]
    reasons = [f"{whose} at zero_optimization.stage {stage}; use stage 0, 1 or 2"] if stage == 3 else []
    if engine.sequence_parallel_size > 1:
        reasons.append(f"{whose} with sequence parallelism of {engine.sequence_parallel_size}; use one of the two")
    if engine.has_moe_layers:
        reasons.append(f"{whose} with deepspeed.moe layers; use one of the two")
    return reasons


def _sequences(engine: DeepSpeedEngine) -> list[str]:
    """Parallelism that cuts sequences so that their gradients do not add up."""
    reasons = []
    if engine.sequence_parallel_size > 1 and engine.mesh_device is not None:
        reasons.append(
            f"sequence parallelism of {engine.sequence_parallel_size} comes from mesh_param: DeepSpeed then does not "
            "reduce gradients over the sequence-parallel ranks; pass an mpu, e.g. "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp"
        )
    return reasons


def _storage(engine: DeepSpeedEngine) -> list[str]:
    reasons = _offload(engine, ("none", "cpu"), "'cpu' or 'none'")
    offload = engine.zero_offload_optimizer()
    if offload is not None and offload.ratio < 1:
        reasons.append(
            f"zero_optimization.offload_optimizer.ratio is {offload.ratio}, which only DeepSpeed's own CPU Adam "
            "supports; use 1.0"
        )
    empty = [name for name, param in engine.module.named_parameters() if 0 in full_shape(param)]
    if engine.zero_optimization_stage() == 3 and empty:
        reasons.append(
            f"{len(empty)} parameters, the first is {empty[0]!r}, have no elements, which ZeRO-3 cannot gather; use "
            "stage 1 or 2, or remove them"
        )
    reasons += _switches(engine)
    tagged = [name for name, param in engine.module.named_parameters() if getattr(param, "use_muon", False)]
    if tagged:  # DeepSpeed would also orthogonalize these, because this class's name contains "muon"
        reasons.append(
            f"{len(tagged)} parameters, the first is {tagged[0]!r}, carry use_muon=True, a mark of DeepSpeed's own "
            "Muon; delete the attribute"
        )
    return reasons


def _offload(engine: DeepSpeedEngine, allowed: Collection[str], advice: str) -> list[str]:
    reasons = []
    offloads = {"offload_optimizer": engine.zero_offload_optimizer(), "offload_param": engine.zero_offload_param()}
    for key, offload in offloads.items():
        device = "none" if offload is None else getattr(offload.device, "value", offload.device)
        if device not in allowed:
            reasons.append(f"zero_optimization.{key}.device is {device!r}; set it to {advice}")
    return reasons


def _switches(engine: DeepSpeedEngine, more: Mapping[str, Any] | None = None) -> list[str]:
    """The switches that are on and must be off, including ``more``."""
    switches = {
        "zero_optimization.round_robin_gradients": engine.zero_round_robin_gradients(),
        "zero_optimization.elastic_checkpoint": engine.zero_elastic_checkpoint(),
        "zero_optimization.zenflow": engine.zenflow_config() is not None,
        "zero_optimization.offload_optimizer.super_offload": engine.super_offload(),
        "compile.deepcompile": engine.is_deepcompile_enabled(),
        "bf16.bf16_master_weights_and_grads": engine.bf16_master_weights_and_gradients(),
        "fp16.fp16_master_weights_and_grads": engine.fp16_master_weights_and_gradients(),
        **(more or {}),
    }
    reasons = [f"{key} is on; switch it off" for key, on in switches.items() if on]
    if engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16:
        # torch's GradScaler skips the step on the ranks whose own fragment overflowed; the others would wait for them.
        reasons.append("torch_autocast.dtype is float16, and single ranks would skip a step; use bfloat16")
    return reasons


def skips_nonfinite(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed skips a step with non-finite gradients; of owned storage, whether its settings say so."""
    stage, dtype = engine.zero_optimization_stage(), engine.get_data_types()[0]
    if stage in (0, 3) or uses_bf16_optimizer(engine) or dtype == torch.float16:
        return True
    if dtype == torch.bfloat16:
        return bool(engine._config.bfloat16_config.check_grad_overflow)
    return bool(engine.zero_compute_grad_norm()) and Version(deepspeed.__version__) >= Version("0.19.8")


def _skipping(engine: DeepSpeedEngine, config: ZeROConfig) -> list[str]:
    if engine.get_data_types()[0] == torch.float16 and config.on_nonfinite in ("raise", "step"):
        return [
            f"on_nonfinite is {config.on_nonfinite!r} in fp16, in which steps that overflow have to be skipped to find "
            "the loss scale; use 'auto'"
        ]
    return []


def _skipping_of_deepspeed(engine: DeepSpeedEngine, config: ZeROConfig) -> list[str]:
    """At stages 1 to 3 DeepSpeed decides which steps it calls the optimizer for."""
    stage, wanted = engine.zero_optimization_stage(), config.on_nonfinite
    if stage == 0:
        return []
    reasons, where = [], f"at zero_optimization.stage {stage} of DeepSpeed {deepspeed.__version__}"
    if config.skip_above is not None:
        reasons.append(
            f"skip_above is {config.skip_above} {where}, which skips steps with non-finite gradients only; use stage 0 "
            'or "storage": "owned"'
        )
    if wanted in ("skip", "raise") and not skips_nonfinite(engine):
        reasons.append(
            f"on_nonfinite is {wanted!r} {where}, which takes such steps here; set bf16.check_grad_overflow to true, "
            "in fp32 compute_grad_norm (from 0.19.8 on), or use stage 3"
        )
    if wanted == "step" and skips_nonfinite(engine):
        reasons.append(
            f"on_nonfinite is 'step' {where}, which skips such steps here; use 'auto', or in bf16 at stages 1 and 2 "
            "set bf16.check_grad_overflow to false"
        )
    return reasons


def reasons_to_refuse_owned(engine: DeepSpeedEngine, config: ZeROConfig) -> list[str]:
    """Every reason why this engine cannot train with owned storage, one sentence each; empty if it can."""
    stage, instead = engine.zero_optimization_stage(), 'use "storage": "zero"'
    reasons = []
    if stage > 2:
        reasons.append(
            f"zero_optimization.stage is {stage}, and DeepSpeed then shards the parameters; use stage 0, 1 or 2, "
            'or "storage": "zero"'
        )
    if engine.pipeline_parallelism:
        reasons.append(f"the model is a PipelineModule; {instead}")
    if engine.has_moe_layers or uses_auto_ep(engine):
        reasons.append(f"the model has DeepSpeed's expert layers; {instead} with deepspeed.moe.layer.MoE")
    if engine.mp_world_size > 1 and not engine.pipeline_parallelism:
        reasons.append(f"tensor parallelism of {tensor_ranks(engine)}; {instead}")
    reasons += [*_sequences(engine), *_offload(engine, ("none",), f"'none', or {instead}")]
    dtype, accumulated = engine.get_data_types()
    if accumulated not in (dtype, torch.float32):
        reasons.append(
            f"data_types.grad_accum_dtype is {_spell(accumulated)} and the model is trained in {_spell(dtype)}; use "
            f"{_spell(dtype)} or float32"
        )
    wire = engine._config.communication_data_type
    if wire is not None and wire != accumulated:
        reasons.append(
            f"communication_data_type is {_spell(wire)}, but gradients are sent as accumulated, in "
            f"{_spell(accumulated)}; set data_types.grad_accum_dtype, or leave the key out"
        )
    more = {
        "zero_optimization.parameter_alignment": engine.zero_parameter_alignment(),
        "zero_optimization.zero_quantized_weights": engine.zero_quantized_weights(),
        "zero_optimization.zero_quantized_nontrainable_weights": engine.zero_quantized_nontrainable_weights(),
        "zero_optimization.zero_quantized_gradients": engine.zero_quantized_gradients(),
        "zero_optimization.zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "zero_optimization.pipeline_loading_checkpoint": engine._config.zero_config.pipeline_loading_checkpoint,
    }
    return [*reasons, *_switches(engine, more), *_skipping(engine, config)]


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
