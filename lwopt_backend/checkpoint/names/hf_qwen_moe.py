"""Hugging Face's names for Qwen2-MoE and Qwen3-MoE as their files have them; layers without experts may be among them.

Read from transformers 5.23, ``conversion_mapping.py`` and ``models/qwen2_moe/modeling_qwen2_moe.py``. In memory its
models have stacked experts: ``hf_moe_stacked``.
"""

from __future__ import annotations

from lwopt_backend.checkpoint.names import hf_llama as llama
from lwopt_backend.checkpoint.names import megatron_core as core
from lwopt_backend.checkpoint.names.rules import NameMap, Rule, renamed, rule

MLP = f"{llama.LAYER}.mlp"

# All but the experts themselves
AROUND: tuple[Rule, ...] = (
    *llama.EMBEDDINGS,
    *llama.ATTENTION,
    *llama.DENSE,
    rule(
        f"{core.SHARED}.linear_fc1.weight",
        [f"{MLP}.shared_expert.gate_proj.weight", f"{MLP}.shared_expert.up_proj.weight"],
        "split_gate_up",
        optional=True,
    ),
    *renamed(
        {
            f"{core.ROUTER}.weight": f"{MLP}.gate.weight",
            f"{core.SHARED}.linear_fc2.weight": f"{MLP}.shared_expert.down_proj.weight",
            f"{core.SHARED}.gate_weight": f"{MLP}.shared_expert_gate.weight",
        }
    ),
)

MAP = NameMap(
    "megatron-core",
    "hf-qwen-moe",
    (
        *AROUND,
        rule(
            f"{core.EXPERT}.linear_fc1.weight",
            [f"{MLP}.experts.{{expert}}.gate_proj.weight", f"{MLP}.experts.{{expert}}.up_proj.weight"],
            "split_gate_up",
            optional=True,
        ),
        rule(f"{core.EXPERT}.linear_fc2.weight", f"{MLP}.experts.{{expert}}.down_proj.weight", optional=True),
    ),
    core.ALIASES,
    refused=llama.REFUSED,
)
