"""Names of Mixtral, Qwen2-MoE and Qwen3-MoE in memory, since transformers 5: experts stacked, gate and up fused.

Read from transformers 5.23, ``models/mixtral/modeling_mixtral.py`` and ``models/qwen2_moe/modeling_qwen2_moe.py``.
"""

from __future__ import annotations

from lwopt_backend.checkpoint.names import hf_llama as llama
from lwopt_backend.checkpoint.names import hf_qwen_moe as qwen
from lwopt_backend.checkpoint.names import megatron_core as core
from lwopt_backend.checkpoint.names.rules import NameMap, rule

MAP = NameMap(
    "megatron-core",
    "hf-moe-stacked",
    (
        *qwen.AROUND,
        rule(f"{core.EXPERT}.linear_fc1.weight", f"{qwen.MLP}.experts.gate_up_proj", optional=True),
        rule(f"{core.EXPERT}.linear_fc2.weight", f"{qwen.MLP}.experts.down_proj", optional=True),
    ),
    core.ALIASES,
    refused=llama.REFUSED,
)
