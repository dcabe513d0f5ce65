"""FSDP2: the same ``lwopt_backend.LayerWiseOptimizer``, which also takes models that ``fully_shard`` has sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lwopt_backend.optimizer import LayerWiseOptimizer

__all__ = ["LayerWiseOptimizer", "at_one_rate"]


def at_one_rate(
    lr: float,
    weight_decay: float,
    matrix: str | Mapping[str, Any] = "muon",
    elementwise: str | Mapping[str, Any] = "adamw",
    elementwise_lr: float | None = None,
    adjust_lr_fn: str = "match_rms_adamw",
    **more: Any,
) -> dict[str, Any]:
    """``LayerWiseOptimizer``'s arguments in a trainer with one rate and one weight decay, chosen for AdamW: both rules
    have them, unless their sections have others, and Muon's updates have the size of AdamW's."""
    of_both = {"lr": lr, "weight_decay": weight_decay}
    rules = {"matrix": ("muon", of_both, matrix), "elementwise": ("adamw", {**of_both}, elementwise)}
    if elementwise_lr is not None:
        rules["elementwise"][1]["lr"] = elementwise_lr
    for kind, (name, rates, given) in rules.items():
        section = {"name": given} if isinstance(given, str) else {"name": name, **given}
        more[kind] = {**rates, **({"adjust_lr_fn": adjust_lr_fn} if section["name"] == "muon" else {}), **section}
    return more
