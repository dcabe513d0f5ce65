"""Megatron's arguments under which a family of Hugging Face's models computes what the checkpoint's model computes.

Read from Megatron-LM main of August 2026 (``TransformerConfig``, ``megatron/training/arguments.py``) and transformers
5.23. An argument that a checkpoint does not record, or that is None, has Megatron's default. Arguments that are in no
table change no forward pass, or are the model's sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Allowed = Mapping[str, tuple[tuple[Any, ...], str]]  # by argument: the values, and what other values change


def _same(what: str, *arguments: str, values: tuple[Any, ...] = (False,)) -> dict[str, tuple[tuple[Any, ...], str]]:
    return {argument: (values, what) for argument in arguments}


_ALL: Allowed = {
    **_same("norms multiply by 1 + weight", "layernorm_zero_centered_gamma", "apply_layernorm_1p"),
    **_same("residuals are added after the norm", "apply_residual_connection_post_layernorm"),
    **_same("attention is another", "multi_latent_attention", "qk_l2_norm"),
    **_same("attention is another", "experimental_attention_variant", "linear_attention_freq", values=()),
    **_same("the softmax has another sum", "softmax_type", values=("vanilla",)),
    **_same("attention sees a window", "window_size", "window_attn_skip_freq", values=()),
    **_same("there are several streams of residuals", "enable_mhc_connections", "enable_hyper_connections"),
    **_same("activations are multiplied by factors", "use_mup"),
    **_same("layers differ", "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", values=()),
    **_same("the activation is another", "squared_relu"),
    **_same("the gated activation is shifted or cut", "glu_linear_offset", values=(0.0,)),
    **_same("the gated activation is shifted or cut", "activation_func_clamp_value", values=()),
}
_LLAMA: Allowed = {
    **_ALL,
    **_same("positions are told otherwise", "position_embedding_type", values=("rope",)),
    **_same("a part of a head is rotated", "rotary_percent", values=(1.0,)),
    **_same("neighboring elements are rotated, here halves of a head", "rotary_interleaved"),
    **_same("some layers rotate nothing", "no_rope_freq", values=()),
    **_same("positions are interpolated", "rotary_seq_len_interpolation_factor", values=(1.0,)),
    **_same("positions have several parts", "mrope_section", values=()),
    **_same("the norm is another", "normalization", values=("RMSNorm",)),
}
_EXPERTS: Allowed = {
    **_LLAMA,
    **_same("the router's scores are another function", "moe_router_score_function", values=("softmax",)),
    **_same("a bias chooses experts", "moe_router_enable_expert_bias"),
    **_same("experts are chosen in groups", "moe_router_num_groups", "moe_router_group_topk", values=()),
    **_same("experts are chosen by device", "moe_router_topk_limited_devices", values=()),
    **_same("the router's weights are scaled", "moe_router_topk_scaling_factor", values=(1.0,)),
    **_same(
        *("the router balances in the forward pass", "moe_router_load_balancing_type"),
        values=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    ),
    **_same("experts drop tokens", "moe_expert_capacity_factor", "moe_expert_rank_capacity_factor", values=()),
    **_same("the router's weights multiply inputs", "moe_apply_probs_on_input"),
    **_same("experts work in a smaller space", "moe_latent_size", values=()),
    **_same("experts are chosen by force", "moe_router_force_load_balancing"),
    **_same("experts are chosen by force", "moe_router_force_biased", values=()),
    **_same(
        *("gate and up alternate", "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"), values=()
    ),
}
FAMILIES: Mapping[str, Allowed] = {
    "hf-llama": _LLAMA,
    "hf-mixtral": {
        **_EXPERTS,
        **_same("weights of experts do not sum to 1", "moe_router_pre_softmax"),
        **_same("some layers have no experts", "moe_layer_freq", values=(1,)),
    },
    "hf-qwen-moe": _EXPERTS,
    "hf-moe-stacked": _EXPERTS,
    "hf-gpt2": {
        **_ALL,
        **_same("fc1 is gate and up", "swiglu", "quick_geglu"),
        **_same("positions are told otherwise", "position_embedding_type", values=("learned_absolute",)),
        **_same("the norm is another", "normalization", values=("LayerNorm",)),
        **_same("queries and keys have norms", "qk_layernorm"),
    },
}
UNREAD = (".local_tokens_per_expert", ".inv_freq")  # buffers that a forward pass does not need


def problems(family: str, arguments: Mapping[str, Any], buffers: Collection[str] = ()) -> list[str]:
    """Why a model of ``family`` would compute something else than one with these ``arguments``, whose ``buffers`` have
    no name there: a sentence each."""
    found = []
    for argument, (values, what) in FAMILIES[family].items():
        value = arguments.get(argument)
        if isinstance(value, (list, tuple)) and len({*map(str, value)}) == 1 and values:  # of each layer
            value = value[0]
        if value is not None and not any(value == allowed for allowed in values):
            expected = " or ".join(dict.fromkeys(map(repr, values))) or "none"
            found.append(f"expected {argument} {expected}, found {value!r}: {what}")
    if arguments.get("moe_shared_expert_intermediate_size") and arguments.get("moe_shared_expert_gate") is False:
        found.append("expected moe_shared_expert_gate True, found False: the family's shared expert has a gate")
    read = [name for name in buffers if not name.endswith(UNREAD)]
    return found + [f"{name!r} has no name in {family}, and the forward pass reads it" for name in read]


def settings(family: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the family's config.json must say besides the sizes, as far as ``arguments`` tell."""
    is_gpt2, has_experts = family == "hf-gpt2", bool(arguments.get("num_experts"))
    epsilon = arguments.get("layernorm_epsilon", arguments.get("norm_epsilon"))
    found = {"layer_norm_epsilon" if is_gpt2 else "rms_norm_eps": epsilon}
    if is_gpt2:
        tanh = arguments.get("openai_gelu") or arguments.get("bias_gelu_fusion")
        known = "swiglu" in arguments
        return {**found, "activation_function": ("gelu_new" if tanh else "gelu") if known else None}
    found["rope_theta"] = arguments.get("rotary_base")
    if arguments.get("use_rope_scaling"):
        found["rope_scaling"] = {"rope_type": "llama3", "factor": arguments.get("rope_scaling_factor", 8.0)}
    if arguments.get("quick_geglu"):
        found["hidden_act"] = "quick_gelu"
    if has_experts:
        found["num_experts_per_tok"] = arguments.get("moe_router_topk")
    if has_experts and family != "hf-mixtral":
        found["norm_topk_prob"] = not arguments.get("moe_router_pre_softmax")
    return found
