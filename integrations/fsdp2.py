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
    """Arguments of ``LayerWiseOptimizer`` for a trainer with one learning rate and one weight decay, chosen for AdamW.

    Args:
        lr: learning rate of both rules, unless a section has another.
        weight_decay: weight decay of both rules, unless a section has another.
        matrix: matrix rule, as in ``LayerWiseOptimizer``.
        elementwise: element-wise rule, as in ``LayerWiseOptimizer``.
        elementwise_lr: learning rate of the element-wise rule. Default: ``lr``.
        adjust_lr_fn: Muon's factor by shape. The default makes updates as large as AdamW's.
        **more: further arguments of ``LayerWiseOptimizer``.

    Returns:
        The arguments by name.

    Examples:
        >>> optimizer = LayerWiseOptimizer(model, **at_one_rate(3e-4, weight_decay=0.1))
    """
    of_both = {"lr": lr, "weight_decay": weight_decay}
    rules = {"matrix": ("muon", of_both, matrix), "elementwise": ("adamw", {**of_both}, elementwise)}
    if elementwise_lr is not None:
        rules["elementwise"][1]["lr"] = elementwise_lr
    for kind, (name, rates, given) in rules.items():
        section = {"name": given} if isinstance(given, str) else {"name": name, **given}
        more[kind] = {**rates, **({"adjust_lr_fn": adjust_lr_fn} if section["name"] == "muon" else {}), **section}
    return more
