"""Hugging Face's names for Llama, Mistral, Qwen2 (with biases of q, k and v) and Qwen3 (with norms of q and k).

Read from transformers 5.23, ``models/{llama,mistral,qwen2,qwen3}/modeling_*.py``. Both sides rotate halves of a head,
so that rows of q and k stay where they are.
"""

from __future__ import annotations

from lwopt_backend.checkpoint.names import megatron_core as core
from lwopt_backend.checkpoint.names.rules import NameMap, Rule, renamed, rule

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

# Also those of models with experts
ATTENTION: tuple[Rule, ...] = (
    rule(
        f"{core.QKV}.{core.EITHER}",
        [f"{LAYER}.self_attn.{part}_proj.{core.EITHER}" for part in "qkv"],
        "split_qkv",
    ),
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
    rule(
        f"{core.FC1}.{core.EITHER}",
        [f"{LAYER}.mlp.gate_proj.{core.EITHER}", f"{LAYER}.mlp.up_proj.{core.EITHER}"],
        "split_gate_up",
        optional=True,
    ),
    rule(f"{core.FC2}.{core.EITHER}", f"{LAYER}.mlp.down_proj.{core.EITHER}", optional=True),
)

MAP = NameMap("megatron-core", "hf-llama", (*EMBEDDINGS, *ATTENTION, *DENSE), core.ALIASES, refused=REFUSED)
