"""FSDP2: ``lwopt_backend.LayerWiseOptimizer``, which is for models that ``fully_shard`` has sharded, too."""

from __future__ import annotations

from lwopt_backend.optimizer import LayerWiseOptimizer

__all__ = ["LayerWiseOptimizer"]
