"""Writes the two DCP folders from which Accelerate and Hugging Face's Trainer resume on FSDP2; ``state_dicts`` reads
them."""

from __future__ import annotations

from pathlib import Path

from lwopt_backend.checkpoint.contents import Checkpoint
from lwopt_backend.checkpoint.dcp.saving import save, values_of
from lwopt_backend.checkpoint.dcp.state_dicts import OF_MODEL, OF_OPTIMIZER


def write(checkpoint: Checkpoint, folder: Path, workers: int = 1) -> None:
    """Write to ``folder``, which is empty: the optimizer's state in a folder of its own, everything else with the
    model. ``workers`` tensors are in memory."""
    values = values_of(checkpoint, workers)
    for name, of_optimizer in {f"{OF_MODEL}0": False, f"{OF_OPTIMIZER}0": True}.items():
        part = {path: value for path, value in values.items() if (path[0] == "optimizer") == of_optimizer}
        save(folder / name, part, workers=workers, step=checkpoint.iteration)
