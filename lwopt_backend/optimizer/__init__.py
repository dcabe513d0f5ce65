"""``LayerWiseOptimizer``: its interface, and how it trains a plain model and a ``fully_shard`` model."""

from lwopt_backend.optimizer.fsdp2 import MeshOptimizer
from lwopt_backend.optimizer.layer_wise import LayerWiseOptimizer
from lwopt_backend.optimizer.plain import PlainOptimizer

__all__ = ["LayerWiseOptimizer", "MeshOptimizer", "PlainOptimizer"]
