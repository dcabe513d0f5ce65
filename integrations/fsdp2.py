"""FSDP2: ``LayerWiseOptimizer`` for models that ``fully_shard`` has sharded."""

from __future__ import annotations

from lwopt_backend.storage.mesh_optimizer import LayerWiseOptimizer

__all__ = ["LayerWiseOptimizer"]
