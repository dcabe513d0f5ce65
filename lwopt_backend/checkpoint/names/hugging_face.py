"""Hugging Face's names: Llama and its kin, GPT-2, Mixtral, Qwen MoE, stacked experts."""

from __future__ import annotations

from lwopt_backend.checkpoint.names import core
from lwopt_backend.checkpoint.names.rules import NameMap, Rule, renamed, rule

# Hugging Face's names for Llama, Mistral, Qwen2 (with biases of q, k and v) and Qwen3 (with norms of q and k).
# Read from transformers 5.23, ``models/{llama,mistral,qwen2,qwen3}/modeling_*.py``. Both sides rotate halves of a head,
# so rows of q and k keep their places.

LAYER = "model.layers.{layer}"

REFUSED = {
    "rotary_interleaved": (True, "it rotates neighbouring elements of q and k, Hugging Face's models halves of a head"),
    "layernorm_zero_centered_gamma": (True, "its norms multiply by 1 + weight, Hugging Face's by the weight"),
    "apply_layernorm_1p": (True, "its norms multiply by 1 + weight, Hugging Face's by the weight"),
}

EMBEDDINGS: tuple[Rule, ...] = (
    rule(core.EMBEDDING, "model.embed_tokens.weight", "vocabulary"),
    rule(core.HEAD, "lm_head.weight", "vocabulary", optional=True),
    rule(f"{core.FINAL_NORM}.weight", "model.norm.weight"),
)


def gated(source: str, target: str) -> Rule:
    """A rule that splits gate and up; their names replace "{}" in ``target``."""
    return rule(source, [target.replace("{}", part) for part in ("gate", "up")], "split_gate_up", optional=True)


# Also those of models with experts
ATTENTION: tuple[Rule, ...] = (
    rule(f"{core.QKV}.{core.EITHER}", [f"{LAYER}.self_attn.{x}_proj.{core.EITHER}" for x in "qkv"], "split_qkv"),
    rule(f"{core.NORM1}.weight", f"{LAYER}.input_layernorm.weight"),
    rule(f"{core.NORM2}.weight", f"{LAYER}.post_attention_layernorm.weight"),
    *renamed(
        {
            f"{core.PROJ}.{core.EITHER}": f"{LAYER}.self_attn.o_proj.{core.EITHER}",
            f"{core.Q_NORM}.weight": f"{LAYER}.self_attn.q_norm.weight",
            f"{core.K_NORM}.weight": f"{LAYER}.self_attn.k_norm.weight",
        }
    ),
    rule([], f"{LAYER}.self_attn.rotary_emb.inv_freq", optional=True),  # a constant, in files of old versions
)

DENSE: tuple[Rule, ...] = (
    gated(f"{core.FC1}.{core.EITHER}", f"{LAYER}.mlp.{{}}_proj.{core.EITHER}"),
    rule(f"{core.FC2}.{core.EITHER}", f"{LAYER}.mlp.down_proj.{core.EITHER}", optional=True),
)


def family(target: str, *rules: Rule) -> NameMap:
    return NameMap("megatron-core", target, rules, core.ALIASES, refused=REFUSED)


LLAMA = family("hf-llama", *EMBEDDINGS, *ATTENTION, *DENSE)


# Hugging Face's names for GPT-2: weights stored transposed (Conv1D), all q, then all k, then all v.
# Read from transformers 5.23, ``models/gpt2/modeling_gpt2.py``. Without an output layer it is the embedding's.

GPT2_LAYER = "transformer.h.{layer}"

GPT2 = NameMap(
    "megatron-core",
    "hf-gpt2",
    (
        rule(core.EMBEDDING, "transformer.wte.weight", "vocabulary"),
        rule(core.POSITIONS, "transformer.wpe.weight"),
        rule(core.HEAD, "lm_head.weight", "vocabulary", optional=True),
        rule(f"{core.NORM1}.{core.EITHER}", f"{GPT2_LAYER}.ln_1.{core.EITHER}"),
        rule(f"{core.QKV}.{core.EITHER}", f"{GPT2_LAYER}.attn.c_attn.{core.EITHER}", "qkv_blocks", "transpose"),
        rule(f"{core.PROJ}.{core.EITHER}", f"{GPT2_LAYER}.attn.c_proj.{core.EITHER}", "transpose"),
        rule(f"{core.NORM2}.{core.EITHER}", f"{GPT2_LAYER}.ln_2.{core.EITHER}"),
        rule(f"{core.FC1}.{core.EITHER}", f"{GPT2_LAYER}.mlp.c_fc.{core.EITHER}", "transpose"),
        rule(f"{core.FC2}.{core.EITHER}", f"{GPT2_LAYER}.mlp.c_proj.{core.EITHER}", "transpose"),
        rule(f"{core.FINAL_NORM}.{core.EITHER}", f"transformer.ln_f.{core.EITHER}"),
        rule([], f"{GPT2_LAYER}.attn.{{bias|masked_bias}}", optional=True),  # masks, in files of old versions
    ),
    core.ALIASES,
    refused={
        "layernorm_zero_centered_gamma": (True, "its norms multiply by 1 + weight, GPT-2's by the weight"),
        "apply_layernorm_1p": (True, "its norms multiply by 1 + weight, GPT-2's by the weight"),
        "swiglu": (True, "its fc1 is gate and up, GPT-2's is one matrix"),
    },
)


# Hugging Face's names for Mixtral as its files have them: an expert's gate is w1, its up w3, its down w2.
# Read from transformers 5.23, ``conversion_mapping.py``. In memory its model has stacked experts: ``MOE_STACKED``.

MIXTRAL_MLP = f"{LAYER}.block_sparse_moe"

MIXTRAL = family(
    "hf-mixtral",
    *EMBEDDINGS,
    *ATTENTION,
    rule(f"{core.ROUTER}.weight", f"{MIXTRAL_MLP}.gate.weight"),
    rule(
        f"{core.EXPERT}.linear_fc1.weight",
        [f"{MIXTRAL_MLP}.experts.{{expert}}.w1.weight", f"{MIXTRAL_MLP}.experts.{{expert}}.w3.weight"],
        "split_gate_up",
    ),
    rule(f"{core.EXPERT}.linear_fc2.weight", f"{MIXTRAL_MLP}.experts.{{expert}}.w2.weight"),
)


# Hugging Face's names for Qwen2-MoE and Qwen3-MoE as their files have them; layers without experts may be among them.
# Read from transformers 5.23, ``conversion_mapping.py`` and ``models/qwen2_moe/modeling_qwen2_moe.py``. In memory its
# models have stacked experts: ``MOE_STACKED``.

MLP = f"{LAYER}.mlp"

# All but the experts themselves
AROUND: tuple[Rule, ...] = (
    *EMBEDDINGS,
    *ATTENTION,
    *DENSE,
    gated(f"{core.SHARED}.linear_fc1.weight", f"{MLP}.shared_expert.{{}}_proj.weight"),
    *renamed(
        {
            f"{core.ROUTER}.weight": f"{MLP}.gate.weight",
            f"{core.SHARED}.linear_fc2.weight": f"{MLP}.shared_expert.down_proj.weight",
            f"{core.SHARED}.gate_weight": f"{MLP}.shared_expert_gate.weight",
        }
    ),
)

QWEN_MOE = family(
    "hf-qwen-moe",
    *AROUND,
    gated(f"{core.EXPERT}.linear_fc1.weight", f"{MLP}.experts.{{expert}}.{{}}_proj.weight"),
    rule(f"{core.EXPERT}.linear_fc2.weight", f"{MLP}.experts.{{expert}}.down_proj.weight", optional=True),
)


# Names of Mixtral, Qwen2-MoE and Qwen3-MoE in memory, since transformers 5: experts stacked, gate and up fused.
# Read from transformers 5.23, ``models/mixtral/modeling_mixtral.py`` and ``models/qwen2_moe/modeling_qwen2_moe.py``.

MOE_STACKED = family(
    "hf-moe-stacked",
    *AROUND,
    rule(f"{core.EXPERT}.linear_fc1.weight", f"{MLP}.experts.gate_up_proj", optional=True),
    rule(f"{core.EXPERT}.linear_fc2.weight", f"{MLP}.experts.down_proj", optional=True),
)
