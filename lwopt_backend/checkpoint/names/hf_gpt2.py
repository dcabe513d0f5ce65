"""Hugging Face's names for GPT-2: weights stored transposed (Conv1D), all q, then all k, then all v.

Read from transformers 5.23, ``models/gpt2/modeling_gpt2.py``. Without an output layer it is the embedding's.
"""

from __future__ import annotations

from lwopt_backend.checkpoint.names import megatron_core as core
from lwopt_backend.checkpoint.names.rules import NameMap, rule

LAYER = "transformer.h.{layer}"

MAP = NameMap(
    "megatron-core",
    "hf-gpt2",
    (
        rule(core.EMBEDDING, "transformer.wte.weight", "vocabulary"),
        rule(core.POSITIONS, "transformer.wpe.weight"),
        rule(core.HEAD, "lm_head.weight", "vocabulary", optional=True),
        rule(f"{core.NORM1}.{core.EITHER}", f"{LAYER}.ln_1.{core.EITHER}"),
        rule(f"{core.QKV}.{core.EITHER}", f"{LAYER}.attn.c_attn.{core.EITHER}", "qkv_blocks", "transpose"),
        rule(f"{core.PROJ}.{core.EITHER}", f"{LAYER}.attn.c_proj.{core.EITHER}", "transpose"),
        rule(f"{core.NORM2}.{core.EITHER}", f"{LAYER}.ln_2.{core.EITHER}"),
        rule(f"{core.FC1}.{core.EITHER}", f"{LAYER}.mlp.c_fc.{core.EITHER}", "transpose"),
        rule(f"{core.FC2}.{core.EITHER}", f"{LAYER}.mlp.c_proj.{core.EITHER}", "transpose"),
        rule(f"{core.FINAL_NORM}.{core.EITHER}", f"transformer.ln_f.{core.EITHER}"),
        rule([], f"{LAYER}.attn.{{bias|masked_bias}}", optional=True),  # masks, in files of old versions
    ),
    core.ALIASES,
    refused={
        "layernorm_zero_centered_gamma": (True, "its norms multiply by 1 + weight, GPT-2's by the weight"),
        "apply_layernorm_1p": (True, "its norms multiply by 1 + weight, GPT-2's by the weight"),
        "swiglu": (True, "its fc1 is gate and up, GPT-2's is one matrix"),
    },
)
