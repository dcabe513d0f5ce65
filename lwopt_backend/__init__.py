"""Layer-wise sharding for matrix optimizers: each whole matrix is updated once, by one data-parallel rank."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lwopt_backend.owned.optimizer import LayerWiseOptimizer

__version__ = "0.1.0"
__all__ = ["LayerWiseOptimizer"]


def __getattr__(name: str) -> Any:
    """``LayerWiseOptimizer`` brings torch with it, which planning does without; so it is imported when asked for."""
    if name == "LayerWiseOptimizer":
        from lwopt_backend.owned.optimizer import LayerWiseOptimizer

        return LayerWiseOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
