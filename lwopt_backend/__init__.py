"""Layer-wise sharding for matrix optimizers: each whole matrix is updated once, by one data-parallel rank."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lwopt_backend.engines.modules.step import ModuleOptimizers
    from lwopt_backend.explanation import Explained, Explanation, explain
    from lwopt_backend.groups.registry import register_elementwise, register_rule
    from lwopt_backend.optimizer import LayerWiseOptimizer
    from lwopt_backend.qk_clip import Heads, QKClip
    from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule

__version__ = "0.1.0"
_PLACES = {
    "Explained": "explanation",
    "Explanation": "explanation",
    "Heads": "qk_clip",
    "LayerWiseOptimizer": "optimizer",
    "MatrixRule": "rules",
    "ModuleOptimizers": "engines.modules.step",
    "OwnerStateRule": "rules",
    "QKClip": "qk_clip",
    "WeightRule": "rules",
    "explain": "explanation",
    "register_elementwise": "groups.registry",
    "register_rule": "groups.registry",
}
__all__ = [
    "Explained",
    "Explanation",
    "Heads",
    "LayerWiseOptimizer",
    "MatrixRule",
    "ModuleOptimizers",
    "OwnerStateRule",
    "QKClip",
    "WeightRule",
    "explain",
    "register_elementwise",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use: they import torch, which planning does not need."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
