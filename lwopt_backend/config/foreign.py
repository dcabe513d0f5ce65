"""Keys of other optimizers in a configuration: an error that prints the whole configuration to write instead.

No key of another optimizer is accepted as an alias: the same number under the same name trains differently there. The
values that are printed are what the other optimizer would use; docs/migration.md has the tables.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

# By key of DeepSpeed, Keller Jordan's Muon, dion, Moonlight, Megatron and Hugging Face: the half and the option that
# the key means here. A rate or a decay without a half holds for both.
MEANT = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    **dict.fromkeys(("muon_lr", "matrix_lr"), "matrix.lr"),
    **dict.fromkeys(("muon_wd", "muon_weight_decay"), "matrix.weight_decay"),
    **dict.fromkeys(("mu", "muon_momentum", "momentum_beta", "muon_beta"), "matrix.momentum"),
    **dict.fromkeys(("use_nesterov", "muon_nesterov"), "matrix.nesterov"),
    **dict.fromkeys(("num_ns_steps", "muon_num_ns_steps", "backend_steps"), "matrix.ns_steps"),
    "per_head_muon": "matrix.per_head",
    **dict.fromkeys(("adam_lr", "adamw_lr", "scalar_lr"), "elementwise.lr"),
    **dict.fromkeys(("adam_wd", "adamw_wd", "adam_weight_decay"), "elementwise.weight_decay"),
    **dict.fromkeys(("betas", "adam_betas", "adamw_betas"), "elementwise.betas"),
    **dict.fromkeys(("eps", "epsilon", "adam_eps", "adamw_eps", "adam_epsilon"), "elementwise.eps"),
    "amsgrad": "elementwise.amsgrad",
}
# The only value supported here, and what to do about another one. None: the value has no effect on training.
GRANTED: dict[str, tuple[Any, str]] = {
    "torch_adam": (None, ""),
    "save_muon_momentum_buffer_in_memory": (None, ""),
    "adam_w_mode": (
        True,
        "register torch.optim.Adam (register_elementwise), and name it in the type LayerWise",
    ),
    "bias_correction": (True, "AdamW's averages are always corrected here"),
    "fp32_optimizer_states": (True, "state has the dtype of the masters here"),
}
# Keys that belong elsewhere.
CLIP = "write gradient_clipping at the top level of ds_config.json; without DeepSpeed, call clip_grad_norm_"
ROUTED = "the model's structure decides what is a matrix; 'include' and 'exclude' overrule it, by name"
ATOMS = "say it by name in 'atoms' (docs/matrices.md)"
ALWAYS = "leave it out: LayerWiseOptimizer always shards state, matrix by matrix"
LAYOUT = "write 'layout': 'compact', 'padded' or 'auto'"
PRECISION = "write 'ns_dtype': 'bfloat16' for 'medium', 'float32' for 'high'"
TENSOR_PARALLEL = "leave it out: matrices are updated whole; 'block_period' updates blocks"
ADAPTIVE = "write 'adamuon' or 'normuon', or 'emerging_optimizers.adaptive_muon', NVIDIA's class"
ADVICE = {
    **dict.fromkeys(("max_grad_norm", "clip_grad", "gradient_clipping"), CLIP),
    "grad_norm_skip_threshold": "write 'skip_above'",
    "check_for_nan_in_loss_and_grad": "write 'on_nonfinite': 'raise'",
    **dict.fromkeys(("use_muon", "algorithm", "muon_params", "adamw_params"), ROUTED),
    **dict.fromkeys(("num_heads", "split_sizes", "flatten"), ATOMS),
    # Megatron's (docs/megatron_names.md)
    **dict.fromkeys(("use_distributed_optimizer", "use_layer_wise_distributed_optimizer"), ALWAYS),
    **dict.fromkeys(("use_layer_wise_param_layout", "no_use_layer_wise_param_layout"), LAYOUT),
    **dict.fromkeys(("bucket_size", "ddp_bucket_size"), "write 'bucket_mb', in MiB"),
    **dict.fromkeys(("is_qkv_fn", "qkv_split_shapes", "split_qkv", "muon_split_qkv", "muon_no_split_qkv"), ATOMS),
    **dict.fromkeys(("scale_mode", "muon_scale_mode"), "write 'adjust_lr_fn', with the same name of a mode"),
    **dict.fromkeys(("coefficient_type", "muon_coefficient_type"), "write 'ns_coefficients' (docs/migration.md)"),
    **dict.fromkeys(("fp32_matmul_prec", "muon_fp32_matmul_prec"), PRECISION),
    **dict.fromkeys(("tp_mode", "muon_tp_mode"), TENSOR_PARALLEL),
    "ddp_pad_buckets_for_high_nccl_busbw": "write 'pad_buckets_for_high_nccl_busbw'",
    "muon_extra_scale_factor": "write 'extra_scale_factor'",
    "muon_scalar_optimizer": "write 'elementwise', 'adamw' for Megatron's 'adam'",
    "num_distributed_optimizer_instances": "write 'group_size', the number of ranks of one instance",
    "expert_data_parallel_world_size": "write 'expert_group_size'",
    "config_overrides": "write 'overrides'",
    "pg_collection": "write 'process_group' and 'expert_process_group'",
    "model_chunks": "pass the list of modules in place of the model",
    "fp8_param_gather": "leave it out: parameters that are stored in fp8 are refused; computing in fp8 works",
    "log_num_zeros_in_grad": "call count_zeros(names)",
    "init_state_fn_list": "leave it out: state is made with the optimizer",
}
# Rules by their names in Megatron.
RULES = {
    "dist_muon": "write 'muon', which is layer-wise here",
    "dist_adaptive_muon": ADAPTIVE,
    "adaptive_muon": ADAPTIVE,
    "namo": "write 'emerging_optimizers.adaptive_muon', the class of NVIDIA that computes it",
    "adam": "Megatron's is 'adamw' here, an element-wise rule; torch.optim.Adam is a class (docs/optimizers.md)",
}
# What DeepSpeed 0.19's Muon, its AdamW and torch.optim.AdamW use by default.
Section = dict[str, Any]
OF_MUON: Mapping[str, Section] = {
    "matrix": {"lr": 0.02, "weight_decay": 0.0},
    "elementwise": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0},
}
OF_ADAMW: Mapping[str, Section] = {
    "matrix": {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"},
    "elementwise": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8},
}
TORCH_DECAY = 0.01
SHARED = ("lr", "weight_decay")


def foreign_keys(given: Mapping[str, Any], known: Container[str]) -> list[str]:
    """The keys that other optimizers have, except those ``known`` here."""
    return [key for key in given if key not in known and (key.lower() in MEANT or key.lower() in GRANTED)]


def translated(
    theirs: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], *, in_entry: bool
) -> dict[str, dict[str, Any]]:
    """Both sections, with the options that the other optimizer's keys ``theirs`` mean. This package's keys keep their
    values; the defaults are the other optimizer's, in ds_config.json or in torch.

    Raises ValueError for a value without a counterpart.
    """
    for key, (only, instead) in GRANTED.items():
        if only is not None and theirs.get(key, only) != only:
            raise ValueError(f"{key}: expected {only!r}, found {theirs[key]!r}; {instead}")
    moved: dict[str, Section] = {"": {}, "matrix": {}, "elementwise": {}}
    for key, value in theirs.items():
        if key.lower() in MEANT:
            kind, _, option = MEANT[key.lower()].rpartition(".")
            moved[kind][option] = value
    matrix, elementwise = sections["matrix"], sections["elementwise"]
    defaults: Mapping[str, Section] = {"matrix": {}, "elementwise": {}}
    shared = {"matrix": moved[""], "elementwise": {}}
    if (matrix["name"], elementwise) == ("muon", {"name": "adamw"}):  # other rules and options are only here
        both = {**{key: matrix[key] for key in SHARED if key in matrix}, **moved[""]}
        shared = {"matrix": both, "elementwise": both}
        of_muon = matrix.keys() - {"name", "adjust_lr_fn", *SHARED} or moved["matrix"] or "lr" in moved["elementwise"]
        decay = 0.0 if in_entry and not theirs.get("torch_adam") else TORCH_DECAY
        defaults = (
            OF_MUON if of_muon else {kind: {**of_kind, "weight_decay": decay} for kind, of_kind in OF_ADAMW.items()}
        )
    more = {kind: {**defaults[kind], **sections[kind], **shared[kind], **moved[kind]} for kind in sections}
    return {kind: {"name": section.pop("name"), **section} for kind, section in more.items()}


def advice(theirs: Mapping[str, Any], written: Mapping[str, Any], *, in_entry: bool) -> str:
    """What to write in place of the other optimizer's keys ``theirs``."""
    keys, are = ", ".join(map(repr, theirs)), "are keys" if len(theirs) > 1 else "is a key"
    whole = json.dumps({"type": "LayerWise", "params": written} if in_entry else written, default=str)
    return (
        f"{keys} {are} of another optimizer, in which the same numbers may mean something else. Check each value "
        f"(docs/migration.md) and write instead:\n{whole}"
    )
