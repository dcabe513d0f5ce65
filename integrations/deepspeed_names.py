"""Which DeepSpeed we work with: the versions, and every name of it that we read, call or replace. Pure data.

DeepSpeed documents its configuration and a dozen methods of its engine; the rest moves when it likes. So ``register()``
has ``deepspeed_check`` compare the installed DeepSpeed with this list before a training run finds out half way.
A path is looked up in its module. ``Class.name`` is an attribute of the class, or one that some method of it gives to
its instances; ``param.name`` is one that some function of the module gives to the model's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

OLDEST, BEFORE = "0.19.7", "0.20"  # older ones lack zero_parameter_alignment; make test-full runs with it, too
SUPPORTED = f">={OLDEST},<{BEFORE}"  # pyproject.toml has the same


@dataclass(frozen=True)
class Name:
    """One name of DeepSpeed. ``parameters`` are those of a function that we replace, or call by keyword."""

    module: str
    path: str
    why: str
    parameters: tuple[str, ...] | None = None


def _names(module: str, owner: str, *rows: tuple[str, str] | tuple[str, str, tuple[str, ...]]) -> tuple[Name, ...]:
    return tuple(Name(module, f"{owner}.{row[0]}" if owner else row[0], *row[1:]) for row in rows)


RUNTIME = "deepspeed.runtime"
LOADING = (
    *("self", "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states"),
    *("load_module_only", "custom_load_fn"),
)
LINKED = (
    ("_link_all_hp_params", "wrapped: it puts new methods on the parameters, which are guarded again", ("self",)),
    ("_lazy_init_hp_params_optimizer_state", "called before a state is read: it links the states", ("self",)),
    ("_hp_optimizer_states_linked", "cleared, or after a load the states are never linked again"),
)
PUBLISHED = (("update_lp_params", "called after a load: the parameters take over the master weights", ("self",)),)

NAMES = (
    *_names(
        f"{RUNTIME}.engine",
        "DeepSpeedEngine",
        ("_do_optimizer_sanity_check", "replaced: the last call before the wrapping", ("self", "basic_optimizer")),
        ("_configure_lr_scheduler", "replaced on an engine: the first call after the wrapping", ("self",)),
        ("clip_fp32_gradients", "replaced at stage 0, where it drops the norm", ("self",)),
        ("load_checkpoint", "replaced: refuses what cannot be loaded, on all ranks; loads universal ones", LOADING),
        ("lr_scheduler", "its state is loaded"),
        ("global_steps", "set from a universal checkpoint"),
        ("global_samples", "set from a universal checkpoint"),
        ("skipped_steps", "set from a universal checkpoint"),
        ("train_batch_size", "samples of a step, where a checkpoint does not count them"),
        ("client_lr_scheduler", "read and set: a torch scheduler named in the configuration"),
        ("optimizer", "what our optimizer was wrapped in"),
        ("basic_optimizer", "our optimizer itself"),
        ("device", "the kind of machine that is planned for"),
        ("global_rank", "who prints"),
        ("mpu", "model parallel groups"),
        ("pipeline_parallelism", "whether the model is a PipelineModule"),
        ("has_moe_layers", "whether the model has experts"),
        ("seq_data_parallel_group", "the ranks that share the parameters"),
        ("seq_dp_world_size", "how many share them; compared with a checkpoint's"),
        ("expert_data_parallel_group", "by name, the ranks that share experts"),
        ("mp_world_size", "model parallelism, refused above 1"),
        ("mesh_device", "sequence parallelism by a mesh, refused"),
        ("sequence_parallel_size", "with which the two above are asked for"),
        ("autotp_size", "refused above 1"),
        ("checkpoint_mp_rank", "the name of a checkpoint's file"),
        ("_get_zero_param_shapes", "the parameters of each group, by name; compared with a checkpoint's", ("self",)),
        ("_config", "the configuration"),
        ("get_data_types", "the dtypes of parameters and of accumulated gradients"),
        ("gradient_clipping", "the norm it clips at"),
        ("scheduler_name", "the scheduler that the configuration names"),
        ("scheduler_params", "and its arguments"),
        ("zero_optimization_stage", "the ZeRO stage"),
        ("zero_parameter_alignment", "the layout of flat partitions, stages 1 and 2"),
        ("zero_sub_group_size", "where sub-groups end, stage 3"),
        ("zero_cpu_offload", "with which stage 1 has no BF16_Optimizer"),
        ("zero_offload_optimizer", "refused for NVMe"),
        ("zero_offload_param", "refused for NVMe"),
        ("zero_round_robin_gradients", "refused"),
        ("zero_elastic_checkpoint", "refused"),
        ("zenflow_config", "refused"),
        ("super_offload", "refused"),
        ("is_deepcompile_enabled", "refused"),
        ("bf16_master_weights_and_gradients", "refused"),
        ("fp16_master_weights_and_gradients", "refused"),
        ("torch_autocast_enabled", "refused in fp16"),
        ("torch_autocast_dtype", "refused in fp16"),
        ("load_universal_checkpoint", "whether load_checkpoint loads universal ones"),
        ("_get_zero_ckpt_name", "this rank's file of a checkpoint", ("self", "checkpoints_path", "tag")),
        # Owned storage
        ("inside_no_sync_ctxt", "whether a backward pass reduces"),
        ("enable_backward_allreduce", "whether any does"),
        ("is_gradient_accumulation_boundary", "whether it completes a step", ("self",)),
        ("gradient_average", "means or sums"),
        ("postscale_gradients", "whether gradients are divided after they are summed"),
        ("gradient_predivide_factor", "by how much before"),
        ("bfloat16_enabled", "whether gradients may be not finite"),
        ("zero_compute_grad_norm", "whether the norm is told"),
        ("loss_scale", "of fp16"),
        ("dynamic_loss_scale", "of fp16"),
        ("dynamic_loss_scale_args", "of fp16"),
        ("zero_quantized_weights", "refused by owned storage"),
        ("zero_quantized_nontrainable_weights", "refused by owned storage"),
        ("zero_quantized_gradients", "refused by owned storage"),
        ("zero_hpz_partition_size", "refused by owned storage"),
    ),
    *_names(
        f"{RUNTIME}.config",
        "DeepSpeedConfig",
        ("_param_dict", "whether gradient_clipping was set or is DeepSpeed's default"),
        ("expert_parallel_config", "AutoEP, refused"),
        ("bfloat16_config", "the section bf16"),
        ("zero_config", "the section zero_optimization"),
        ("communication_data_type", "refused by owned storage where gradients have another"),
    ),
    Name(f"{RUNTIME}.precision_config", "DeepSpeedBF16Config.check_grad_overflow", "whether a step may be skipped"),
    *_names(
        f"{RUNTIME}.zero.config",
        "DeepSpeedZeroConfig",
        ("pipeline_loading_checkpoint", "refused by owned storage"),
        ("overlap_comm", "kept by owned storage"),
        ("compute_grad_norm", "kept by owned storage"),
        ("load_from_fp32_weights", "kept by owned storage"),
    ),
    Name("deepspeed.module_inject.auto_ep_config", "AutoEPConfig.enabled", "AutoEP, refused"),
    Name(f"{RUNTIME}.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig.device", "refused for NVMe"),
    Name(f"{RUNTIME}.zero.offload_config", "DeepSpeedZeroOffloadParamConfig.device", "refused for NVMe"),
    Name(f"{RUNTIME}.zero.utils", "ZERO_SUPPORTED_OPTIMIZERS", "appended to: ZeRO takes no other optimizer"),
    Name(RUNTIME, "lr_schedules", "which schedulers are DeepSpeed's own"),
    # Stages 1 and 2, and BF16_Optimizer
    *_names(f"{RUNTIME}.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", *LINKED, *PUBLISHED),
    *_names(f"{RUNTIME}.bf16_optimizer", "BF16_Optimizer", *LINKED, *PUBLISHED),
    *_names(
        "deepspeed.utils.mixed_precision_linkage",
        "param",
        ("_hp_mapping", "where a rank stores a parameter; compared with the plan"),
        ("get_full_hp_param", "wrapped: safe_get_full_fp32_param and its kin; a wrong key is an error on all ranks"),
        ("set_full_hp_param", "wrapped, as get_full_hp_param"),
        ("get_full_hp_grad", "safe_get_full_grad; owned storage has its own"),
        ("set_full_hp_grad", "safe_set_full_grad; owned storage has its own"),
    ),
    *_names(
        "deepspeed.utils.tensor_fragment",
        "",
        ("fragment_address", "the places of pieces in checkpoints", ("numel", "start")),
        ("tensor_fragment.lp_fragment_address", "which part of a parameter a rank stores"),
        ("tensor_fragment.hp_fragment_address", "where in its flat partition"),
        ("fragment_address.start", "first element"),
        ("fragment_address.numel", "number of elements"),
        ("get_full_hp_param", "the method above, with the key by name", ("self", "optim_state_key")),
        ("set_full_hp_param", "the method above, with the key by name", ("self", "value", "optim_state_key")),
    ),
    # Stage 3
    *_names(
        f"{RUNTIME}.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        ("fp32_partitioned_groups_flat", "this rank's flat tensors, one per sub-group"),
        (
            "_reassign_or_swap_out_partitioned_parameters",
            "called after a load: a sub-group's parameters take over the master weights",
        ),
        ("checkpoint_event_prologue", "called before that: parameters that are kept whole are cut again", ("self",)),
        ("checkpoint_event_epilogue", "called after it: they are gathered", ("self",)),
        ("grad_position", "[sub-group, offset, elements] of a parameter's part; compared with the plan"),
        ("get_param_id", "the key of grad_position", ("self", "param")),
        ("get_full_hp_param", "wrapped, as at stages 1 and 2", ("self", "param", "optim_state_key")),
        ("set_full_hp_param", "wrapped, as at stages 1 and 2", ("self", "value", "param", "optim_state_key")),
        ("get_local_fp32_param", "wrapped, as get_full_hp_param", ("self", "param", "optim_state_key")),
        ("set_local_hp_param", "wrapped, as set_full_hp_param", ("self", "value", "param", "optim_state_key")),
    ),
    Name(f"{RUNTIME}.zero.stage3", "param._z3_optimizer", "the optimizer that stores a parameter"),
    Name(f"{RUNTIME}.zero.partition_parameters", "param.ds_shape", "a parameter's whole shape"),
    Name(f"{RUNTIME}.zero.partition_parameters", "param.ds_numel", "and its elements"),
    Name(f"{RUNTIME}.zero.partition_parameters", "GatheredParameters", "frozen parameters are loaded whole"),
    # Owned storage: our optimizer is the engine's, and what DeepSpeed's are
    Name(f"{RUNTIME}.base_optimizer", "ZeROOptimizer", "its base: the engine scales losses for no other"),
    Name(
        f"{RUNTIME}.fp16.loss_scaler",
        "CreateLossScaler",
        "the loss scale",
        ("dtype", "static_loss_scale", "dynamic_scaling", "dynamic_loss_args"),
    ),
    Name("deepspeed.git_version_info", "version", "written into checkpoints"),
    # Experts and pipelines
    Name("deepspeed.moe.utils", "is_moe_param", "experts' parameters", ("param",)),
    Name("deepspeed.moe.experts", "param.group_name", "the name of the experts' groups"),
    Name(f"{RUNTIME}.pipe.module", "PipelineModule.tied_modules", "modules that several stages have"),
    Name(f"{RUNTIME}.pipe.module", "param.ds_pipe_replicated", "weights that another stage counts in the norm"),
    Name(f"{RUNTIME}.pipe.topology", "PipelineParallelGrid.get_pipe_parallel_group", "one rank of each stage"),
    # Its configuration
    Name(RUNTIME, "config", "the module of it"),
    Name(f"{RUNTIME}.config", "get_optimizer_name", "replaced: types of ours in any case of letters", ("param_dict",)),
    Name(f"{RUNTIME}.config", "DEEPSPEED_OPTIMIZERS", "the types it knows itself"),
    # On a CPU
    Name("deepspeed.accelerator", "get_accelerator", "the kind of device"),
    Name("deepspeed.ops", "__compatible_ops__", "changed: nothing is compiled on a CPU"),
    Name("deepspeed.utils.logging", "logger", "warnings"),
)
