"""The error of everything that reads, converts or writes checkpoints."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or must not be converted. The message names file, tensor, and what to do."""
