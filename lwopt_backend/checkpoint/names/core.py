"""Megatron-core's names in its local spec: the vocabulary from which all tables start."""

from __future__ import annotations

from lwopt_backend.checkpoint.names.rules import NameMap, aliases, rule

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
