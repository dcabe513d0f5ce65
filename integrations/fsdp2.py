"""FSDP2: the same ``lwopt_backend.LayerWiseOptimizer``, which also takes models that ``fully_shard`` has sharded."""

from __future__ import annotations

from lwopt_backend.optimizer import LayerWiseOptimizer

__all__ = ["LayerWiseOptimizer"]
