"""Megatron's names: Megatron-core's local spec, from which all tables start, and Megatron-DeepSpeed's."""

from __future__ import annotations

from lwopt_backend.checkpoint.names.rules import NameMap, aliases, renamed, rule

# Megatron-core's names for a model of its local spec; the vocabulary that all other tables start from.
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

# Names stay as they are, whatever the model: only aliases and the vocabulary's padding change.
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


# Megatron-DeepSpeed's names for its pipeline model, GPTModelPipe: the number of a stage, then the module's.
# Layer 0 is stage 2, the final norm comes two after the last layer's number, the output layer three (deepspeedai's
# Megatron-DeepSpeed, megatron/model/gpt_model.py). A tied embedding is a tied stage. How q, k and v lie in
# query_key_value depends on its commit, and must be said: ``Numbers.qkv_layout``.

STAGE = "{layer+2}"

DEEPSPEED_MAP = NameMap(
    "megatron-core",
    "megatron-deepspeed",
    (
        rule(EMBEDDING, "tied_modules.embed.word_embeddings.weight", "vocabulary", optional=True, only="tied"),
        rule(EMBEDDING, "1.word_embeddings.weight", "vocabulary", optional=True, only="untied"),
        rule(POSITIONS, "tied_modules.embed.position_embeddings.weight", optional=True, only="tied"),
        rule(POSITIONS, "1.position_embeddings.weight", optional=True, only="untied"),
        rule(HEAD, "{layers+3}.lm_head.weight", "vocabulary", optional=True, only="untied"),
        rule(f"{QKV}.{EITHER}", f"{STAGE}.self_attention.query_key_value.{EITHER}", "qkv_to_layout"),
        *renamed(
            {
                f"{NORM1}.{EITHER}": f"{STAGE}.input_layernorm.{EITHER}",
                f"{PROJ}.{EITHER}": f"{STAGE}.self_attention.dense.{EITHER}",
                f"{NORM2}.{EITHER}": f"{STAGE}.post_attention_layernorm.{EITHER}",
                f"{FC1}.{EITHER}": f"{STAGE}.mlp.dense_h_to_4h.{EITHER}",
                f"{FC2}.{EITHER}": f"{STAGE}.mlp.dense_4h_to_h.{EITHER}",
                f"{FINAL_NORM}.{EITHER}": f"{{layers+2}}.{EITHER}",
            }
        ),
    ),
    ALIASES,
)
