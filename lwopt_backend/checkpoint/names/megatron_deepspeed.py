"""Megatron-DeepSpeed's names for its pipeline model, GPTModelPipe: the number of a stage, then the module's.

Layer 0 is stage 2, the final norm comes two after the last layer's number, the output layer three (deepspeedai's
Megatron-DeepSpeed, megatron/model/gpt_model.py). A tied embedding is a tied stage. How q, k and v lie in
query_key_value depends on its commit, and must be said: ``Numbers.qkv_layout``.
"""

from __future__ import annotations

from lwopt_backend.checkpoint.names import megatron_core as core
from lwopt_backend.checkpoint.names.rules import NameMap, renamed, rule

STAGE = "{layer+2}"

MAP = NameMap(
    "megatron-core",
    "megatron-deepspeed",
    (
        rule(core.EMBEDDING, "tied_modules.embed.word_embeddings.weight", "vocabulary", optional=True, only="tied"),
        rule(core.EMBEDDING, "1.word_embeddings.weight", "vocabulary", optional=True, only="untied"),
        rule(core.POSITIONS, "tied_modules.embed.position_embeddings.weight", optional=True, only="tied"),
        rule(core.POSITIONS, "1.position_embeddings.weight", optional=True, only="untied"),
        rule(core.HEAD, "{layers+3}.lm_head.weight", "vocabulary", optional=True, only="untied"),
        rule(f"{core.QKV}.{core.EITHER}", f"{STAGE}.self_attention.query_key_value.{core.EITHER}", "qkv_to_layout"),
        *renamed(
            {
                f"{core.NORM1}.{core.EITHER}": f"{STAGE}.input_layernorm.{core.EITHER}",
                f"{core.PROJ}.{core.EITHER}": f"{STAGE}.self_attention.dense.{core.EITHER}",
                f"{core.NORM2}.{core.EITHER}": f"{STAGE}.post_attention_layernorm.{core.EITHER}",
                f"{core.FC1}.{core.EITHER}": f"{STAGE}.mlp.dense_h_to_4h.{core.EITHER}",
                f"{core.FC2}.{core.EITHER}": f"{STAGE}.mlp.dense_4h_to_h.{core.EITHER}",
                f"{core.FINAL_NORM}.{core.EITHER}": f"{{layers+2}}.{core.EITHER}",
            }
        ),
    ),
    core.ALIASES,
)
