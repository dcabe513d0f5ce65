"""Families of names: Megatron-core's, from which all tables start, and Hugging Face's."""

from __future__ import annotations

from lwopt_backend.checkpoint.names.rules import NameMap, Rule, aliases, renamed, rule

# Megatron-core's names in its local spec.
# Layers and experts have their global numbers. With Transformer Engine norms belong to the linear after them, and
# experts of one grouped product have their number at the end; both are accepted as aliases (Megatron-LM core_v0.16.1,
# models/gpt/gpt_layer_specs.py and transformer/moe/experts.py).

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
POSITIONS = "embedding.position_embeddings.weight"
LAYER = "decoder.layers.{layer}"
NORM1, NORM2 = f"{LAYER}.input_layernorm", f"{LAYER}.pre_mlp_layernorm"
FINAL_NORM = "decoder.final_layernorm"
QKV, PROJ = f"{LAYER}.self_attention.linear_qkv", f"{LAYER}.self_attention.linear_proj"
Q_NORM, K_NORM = f"{LAYER}.self_attention.q_layernorm", f"{LAYER}.self_attention.k_layernorm"
FC1, FC2 = f"{LAYER}.mlp.linear_fc1", f"{LAYER}.mlp.linear_fc2"
ROUTER = f"{LAYER}.mlp.router"
EXPERT = f"{LAYER}.mlp.experts.local_experts.{{expert}}"
SHARED = f"{LAYER}.mlp.shared_experts"
EITHER, FC = "{weight|bias}", "{linear_fc1|linear_fc2}"

ALIASES = aliases(
    {
        f"{LAYER}.self_attention.linear_qkv.layer_norm_{EITHER}": f"{NORM1}.{EITHER}",
        f"{LAYER}.mlp.linear_fc1.layer_norm_{EITHER}": f"{NORM2}.{EITHER}",
        f"{LAYER}.mlp.experts.{FC}.{EITHER}{{expert}}": f"{EXPERT}.{FC}.{EITHER}",
    }
)

# Names do not change: only aliases and the vocabulary's padding do.
CORE_MAP = NameMap(
    "megatron-core",
    "megatron-core",
    (
        rule(EMBEDDING, EMBEDDING, "vocabulary", optional=True),
        rule(HEAD, HEAD, "vocabulary", optional=True),
        rule("{*}", "{*}", optional=True),
    ),
    ALIASES,
    ALIASES,
)


# Hugging Face's names for Llama, Mistral, Qwen2 (with biases of q, k and v) and Qwen3 (with norms of q and k).
# Read from transformers 5.23, ``models/{llama,mistral,qwen2,qwen3}/modeling_*.py``. Both sides rotate halves of a head,
# so rows of q and k keep their places.

HF_LAYER = "model.layers.{layer}"

REFUSED = {
    "rotary_interleaved": (True, "it rotates neighbouring elements of q and k, Hugging Face's models halves of a head"),
    "layernorm_zero_centered_gamma": (True, "its norms multiply by 1 + weight, Hugging Face's by the weight"),
    "apply_layernorm_1p": (True, "its norms multiply by 1 + weight, Hugging Face's by the weight"),
}

EMBEDDINGS: tuple[Rule, ...] = (
    rule(EMBEDDING, "model.embed_tokens.weight", "vocabulary"),
    rule(HEAD, "lm_head.weight", "vocabulary", optional=True),
    rule(f"{FINAL_NORM}.weight", "model.norm.weight"),
)


def gated(source: str, target: str) -> Rule:
    """A rule that splits gate and up; their names replace "{}" in ``target``."""
    return rule(source, [target.replace("{}", part) for part in ("gate", "up")], "split_gate_up", optional=True)


# Also those of models with experts
ATTENTION: tuple[Rule, ...] = (
    rule(f"{QKV}.{EITHER}", [f"{HF_LAYER}.self_attn.{x}_proj.{EITHER}" for x in "qkv"], "split_qkv"),
    rule(f"{NORM1}.weight", f"{HF_LAYER}.input_layernorm.weight"),
    rule(f"{NORM2}.weight", f"{HF_LAYER}.post_attention_layernorm.weight"),
    *renamed(
        {
            f"{PROJ}.{EITHER}": f"{HF_LAYER}.self_attn.o_proj.{EITHER}",
            f"{Q_NORM}.weight": f"{HF_LAYER}.self_attn.q_norm.weight",
            f"{K_NORM}.weight": f"{HF_LAYER}.self_attn.k_norm.weight",
        }
    ),
    rule([], f"{HF_LAYER}.self_attn.rotary_emb.inv_freq", optional=True),  # a constant, in files of old versions
)

DENSE: tuple[Rule, ...] = (
    gated(f"{FC1}.{EITHER}", f"{HF_LAYER}.mlp.{{}}_proj.{EITHER}"),
    rule(f"{FC2}.{EITHER}", f"{HF_LAYER}.mlp.down_proj.{EITHER}", optional=True),
)


# In the file of a model without a head, such as LlamaModel
WITHOUT_HEAD = aliases(
    {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "layers.{layer}.{*}": f"{HF_LAYER}.{{*}}",
        "norm.weight": "model.norm.weight",
    }
)


def family(target: str, *rules: Rule) -> NameMap:
    return NameMap("megatron-core", target, rules, ALIASES, WITHOUT_HEAD, REFUSED)


LLAMA = family("hf-llama", *EMBEDDINGS, *ATTENTION, *DENSE)


# Hugging Face's names for GPT-2: weights stored transposed (Conv1D), all q, then all k, then all v.
# Read from transformers 5.23, ``models/gpt2/modeling_gpt2.py``. Without an output layer it is the embedding's.

GPT2_LAYER = "transformer.h.{layer}"

GPT2 = NameMap(
    "megatron-core",
    "hf-gpt2",
    (
        rule(EMBEDDING, "transformer.wte.weight", "vocabulary"),
        rule(POSITIONS, "transformer.wpe.weight"),
        rule(HEAD, "lm_head.weight", "vocabulary", optional=True),
        rule(f"{NORM1}.{EITHER}", f"{GPT2_LAYER}.ln_1.{EITHER}"),
        rule(f"{QKV}.{EITHER}", f"{GPT2_LAYER}.attn.c_attn.{EITHER}", "qkv_blocks", "transpose"),
        rule(f"{PROJ}.{EITHER}", f"{GPT2_LAYER}.attn.c_proj.{EITHER}", "transpose"),
        rule(f"{NORM2}.{EITHER}", f"{GPT2_LAYER}.ln_2.{EITHER}"),
        rule(f"{FC1}.{EITHER}", f"{GPT2_LAYER}.mlp.c_fc.{EITHER}", "transpose"),
        rule(f"{FC2}.{EITHER}", f"{GPT2_LAYER}.mlp.c_proj.{EITHER}", "transpose"),
        rule(f"{FINAL_NORM}.{EITHER}", f"transformer.ln_f.{EITHER}"),
        rule([], f"{GPT2_LAYER}.attn.{{bias|masked_bias}}", optional=True),  # masks, in files of old versions
    ),
    ALIASES,
    aliases(  # in the file of a GPT2Model, as the hub has it
        {
            "{wte|wpe}.weight": "transformer.{wte|wpe}.weight",
            "h.{layer}.{*}": f"{GPT2_LAYER}.{{*}}",
            f"ln_f.{EITHER}": f"transformer.ln_f.{EITHER}",
        }
    ),
    refused={
        "layernorm_zero_centered_gamma": (True, "its norms multiply by 1 + weight, GPT-2's by the weight"),
        "apply_layernorm_1p": (True, "its norms multiply by 1 + weight, GPT-2's by the weight"),
        "swiglu": (True, "its fc1 is gate and up, GPT-2's is one matrix"),
    },
)


# Hugging Face's names for Mixtral as its files have them: an expert's gate is w1, its up w3, its down w2.
# Read from transformers 5.23, ``conversion_mapping.py``. In memory its model has stacked experts: ``MOE_STACKED``.

MIXTRAL_MLP = f"{HF_LAYER}.block_sparse_moe"

MIXTRAL = family(
    "hf-mixtral",
    *EMBEDDINGS,
    *ATTENTION,
    rule(f"{ROUTER}.weight", f"{MIXTRAL_MLP}.gate.weight"),
    rule(
        f"{EXPERT}.linear_fc1.weight",
        [f"{MIXTRAL_MLP}.experts.{{expert}}.w1.weight", f"{MIXTRAL_MLP}.experts.{{expert}}.w3.weight"],
        "split_gate_up",
    ),
    rule(f"{EXPERT}.linear_fc2.weight", f"{MIXTRAL_MLP}.experts.{{expert}}.w2.weight"),
)


# Hugging Face's names for Qwen2-MoE and Qwen3-MoE as their files have them; layers without experts may be among them.
# Read from transformers 5.23, ``conversion_mapping.py`` and ``models/qwen2_moe/modeling_qwen2_moe.py``. In memory its
# models have stacked experts: ``MOE_STACKED``.

MLP = f"{HF_LAYER}.mlp"

# All but the experts themselves
AROUND: tuple[Rule, ...] = (
    *EMBEDDINGS,
    *ATTENTION,
    *DENSE,
    gated(f"{SHARED}.linear_fc1.weight", f"{MLP}.shared_expert.{{}}_proj.weight"),
    *renamed(
        {
            f"{ROUTER}.weight": f"{MLP}.gate.weight",
            f"{SHARED}.linear_fc2.weight": f"{MLP}.shared_expert.down_proj.weight",
            f"{SHARED}.gate_weight": f"{MLP}.shared_expert_gate.weight",
        }
    ),
)

QWEN_MOE = family(
    "hf-qwen-moe",
    *AROUND,
    gated(f"{EXPERT}.linear_fc1.weight", f"{MLP}.experts.{{expert}}.{{}}_proj.weight"),
    rule(f"{EXPERT}.linear_fc2.weight", f"{MLP}.experts.{{expert}}.down_proj.weight", optional=True),
)


# Names of Mixtral, Qwen2-MoE and Qwen3-MoE in memory, since transformers 5: experts stacked, gate and up fused.
# Read from transformers 5.23, ``models/mixtral/modeling_mixtral.py`` and ``models/qwen2_moe/modeling_qwen2_moe.py``.

MOE_STACKED = family(
    "hf-moe-stacked",
    *AROUND,
    rule(f"{EXPERT}.linear_fc1.weight", f"{MLP}.experts.gate_up_proj", optional=True),
    rule(f"{EXPERT}.linear_fc2.weight", f"{MLP}.experts.down_proj", optional=True),
)

MAPS = (CORE_MAP, LLAMA, MIXTRAL, QWEN_MOE, MOE_STACKED, GPT2)
