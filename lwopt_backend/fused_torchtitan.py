"""How torchtitan's modules lay out their fused weights, read from its release 0.3.0.

They are known by the attributes that a module has, since torchtitan is made to be copied and changed: its own variants
of a module replace ``forward`` and keep the parameters. ``fused_weights`` compares the sizes with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lwopt_backend.fused_families import Fused, Outputs, gate_up_in_turn, latent


def _by_group(module: Any, outputs: int) -> Outputs:
    """torchtitan's: the queries of a group, their key, their value, and so on."""
    queries, size = module.heads_per_kv, module.head_dim
    groups = outputs // (module.r_dim * size) if module.r_dim == queries + 2 else 0
    return ("q", "k", "v"), (queries * size, size, size), groups


# Attributes that a module must have, and its weights
BY_ATTRIBUTES: Sequence[tuple[tuple[str, ...], tuple[Fused, ...]]] = [
    (("wqkv", "heads_per_kv", "r_dim", "head_dim"), (Fused("wqkv", None, _by_group, taken=None),)),
    (
        ("wkv_a", "wkv_b", "wo", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        latent(("wq", "wq_b"), "wkv_a", "wkv_b", "wo"),
    ),
    (("mlp1_weight_EGD", "mlp2_weight_EDF"), (Fused("mlp1_weight_EGD", "mlp2_weight_EDF", gate_up_in_turn),)),
]


def side_by_side(name: str, shape: Sequence[int]) -> bool:
    """Gate and up in one parameter of (..., outputs, 2, inputs): ``w13`` of torchtitan's opt-in ``fused_swiglu``."""
    return name.rpartition(".")[2] == "w13" and len(shape) > 2 and shape[-2] == 2 and 0 not in shape


def joined(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which gate and up that lie side by side are the halves of every row; of all others their own."""
    return (*shape[:-2], 2 * shape[-1]) if side_by_side(name, shape) else tuple(shape)
