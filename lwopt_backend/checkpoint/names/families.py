"""Maps from Megatron-core's names, in its local spec, to those of Hugging Face's models; layers and experts have their
numbers in the whole model. Read from transformers 5.23, ``models/*/modeling_*.py`` and ``conversion_mapping.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lwopt_backend.checkpoint.contents import LazyTensor
from lwopt_backend.checkpoint.megatron.conventions import EMBEDDING, HEAD, LAYER
from lwopt_backend.checkpoint.names import operations as do
from lwopt_backend.checkpoint.names.operations import Family, Model, Moved

FINAL_NORM = "decoder.final_layernorm"
POSITIONS = "embedding.position_embeddings.weight"
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")

# Llama, Mistral, Qwen2 (with biases of q, k and v), Qwen3 (with norms of q and k). Both sides rotate halves of a head,
# so rows of q and k keep their places.

_OUTSIDE = {
    EMBEDDING: "model.embed_tokens.weight",
    HEAD: "lm_head.weight",
    f"{FINAL_NORM}.weight": "model.norm.weight",
}
_RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_OF_EXPERTS = {  # Qwen's, beside the experts themselves
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}


def in_layer(name: str) -> tuple[str, str]:
    """The number of the layer, and the rest of the name; both are empty outside of layers."""
    match = LAYER.match(name)
    return (match[1], name[match.end() :]) if match else ("", "")


def hf_llama(name: str, tensor: LazyTensor, model: Model) -> Moved | None:
    number, rest = in_layer(name)
    layer, (module, _, kind) = f"model.layers.{number}", rest.rpartition(".")
    if module == "self_attention.linear_qkv":
        return dict(zip([f"{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"], do.split_qkv(tensor, model)))
    if module == "mlp.linear_fc1":
        return gate_up(f"{layer}.mlp.{{}}_proj.{kind}", tensor, model)
    return renamed(_OUTSIDE, name, tensor) or renamed(_RENAMED, rest, tensor, f"{layer}.")


def gate_up(target: str, tensor: LazyTensor, model: Model, names: tuple[str, str] = ("gate", "up")) -> Moved:
    """Gate and up; their ``names`` replace {} in ``target``."""
    return dict(zip(map(target.format, names), do.split_gate_up(tensor, model)))


def renamed(names: Mapping[str, str], name: str, tensor: LazyTensor, before: str = "") -> Moved | None:
    return {before + names[name]: tensor} if name in names else None


# Mixtral as its files have it: an expert's gate is w1, its up w3, its down w2. In memory: ``hf_moe_stacked``.


def hf_mixtral(name: str, tensor: LazyTensor, model: Model) -> Moved | None:
    number, rest = in_layer(name)
    layer = f"model.layers.{number}.block_sparse_moe"
    if rest == "mlp.router.weight":
        return {f"{layer}.gate.weight": tensor}
    if expert := EXPERT.fullmatch(rest):
        target = f"{layer}.experts.{expert[1]}.{{}}.weight"
        if expert[2] == "linear_fc1":
            return gate_up(target, tensor, model, ("w1", "w3"))
        return {target.format("w2"): tensor}
    return None if rest.startswith("mlp.") else hf_llama(name, tensor, model)


# Qwen2-MoE and Qwen3-MoE as their files have them; layers without experts may be among them.


def hf_qwen_moe(name: str, tensor: LazyTensor, model: Model) -> Moved | None:
    number, rest = in_layer(name)
    expert = EXPERT.fullmatch(rest)
    if expert is None:
        return _beside_experts(name, tensor, model)
    target = f"model.layers.{number}.mlp.experts.{expert[1]}.{{}}_proj.weight"
    return gate_up(target, tensor, model) if expert[2] == "linear_fc1" else {target.format("down"): tensor}


def _beside_experts(name: str, tensor: LazyTensor, model: Model) -> Moved | None:
    number, rest = in_layer(name)
    layer = f"model.layers.{number}."
    if rest == "mlp.shared_experts.linear_fc1.weight":
        return gate_up(f"{layer}mlp.shared_expert.{{}}_proj.weight", tensor, model)
    return renamed(_OF_EXPERTS, rest, tensor, layer) or hf_llama(name, tensor, model)


# Mixtral, Qwen2-MoE and Qwen3-MoE in memory, since transformers 5: experts stacked, gate and up fused.


def hf_moe_stacked(name: str, tensor: LazyTensor, model: Model) -> Moved | None:
    number, rest = in_layer(name)
    expert = EXPERT.fullmatch(rest)
    if expert is None:
        return _beside_experts(name, tensor, model)
    target = "gate_up_proj" if expert[2] == "linear_fc1" else "down_proj"
    return {f"model.layers.{number}.mlp.experts.{target}[{expert[1]}]": tensor}


# GPT-2: weights stored transposed (Conv1D), all q, then all k, then all v. Without an output layer it is the
# embedding's.

_OF_GPT2 = {EMBEDDING: "transformer.wte.weight", POSITIONS: "transformer.wpe.weight", HEAD: "lm_head.weight"}
_MODULES = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def hf_gpt2(name: str, tensor: LazyTensor, model: Model) -> Moved | None:
    number, rest = in_layer(name)
    module, _, kind = (rest or name).rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in _MODULES:
        tensor = do.qkv_blocks(tensor, model) if module == "self_attention.linear_qkv" else tensor
        return {f"transformer.h.{number}.{_MODULES[module]}.{kind}": do.transpose(tensor)}
    return {f"transformer.ln_f.{kind}": tensor} if module == FINAL_NORM else renamed(_OF_GPT2, name, tensor)


FAMILIES: Mapping[str, Family] = {
    "hf-llama": hf_llama,
    "hf-mixtral": hf_mixtral,
    "hf-qwen-moe": hf_qwen_moe,
    "hf-moe-stacked": hf_moe_stacked,
    "hf-gpt2": hf_gpt2,
}
# Parameters without which a model of the family would compute with what it began with
_ENDS = (EMBEDDING, f"{FINAL_NORM}.weight")
NEEDED = {family: (*_ENDS, POSITIONS) if family == "hf-gpt2" else _ENDS for family in FAMILIES}
