"""Hugging Face's names for Mixtral as its files have them: an expert's gate is w1, its up w3, its down w2.

Read from transformers 5.23, ``conversion_mapping.py``. In memory its model has stacked experts: ``hf_moe_stacked``.
"""

from __future__ import annotations

from lwopt_backend.checkpoint.names import hf_llama as llama
from lwopt_backend.checkpoint.names import megatron_core as core
from lwopt_backend.checkpoint.names.rules import NameMap, rule

MLP = f"{llama.LAYER}.block_sparse_moe"

MAP = NameMap(
    "megatron-core",
    "hf-mixtral",
    (
        *llama.EMBEDDINGS,
        *llama.ATTENTION,
        rule(f"{core.ROUTER}.weight", f"{MLP}.gate.weight"),
        rule(
            f"{core.EXPERT}.linear_fc1.weight",
            [f"{MLP}.experts.{{expert}}.w1.weight", f"{MLP}.experts.{{expert}}.w3.weight"],
            "split_gate_up",
        ),
        rule(f"{core.EXPERT}.linear_fc2.weight", f"{MLP}.experts.{{expert}}.w2.weight"),
    ),
    core.ALIASES,
    refused=llama.REFUSED,
)
