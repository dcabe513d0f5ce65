"""FSDP2: ``LayerWiseOptimizer`` for models that ``fully_shard`` has sharded."""

from lwopt_backend.integrations.fsdp2.optimizer import LayerWiseOptimizer

__all__ = ["LayerWiseOptimizer"]
