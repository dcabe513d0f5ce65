"""The earlier name of the tensors in state dicts, which users have pickled."""

from lwopt_backend.engines.buffers.partial import PartialTensor as Pieces

__all__ = ["Pieces"]
