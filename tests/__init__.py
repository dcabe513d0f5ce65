"""``pytest --seed`` is added to all seeds that tests give torch. Ranks and other processes read it from here."""

import os
from typing import Any

import torch

SEED_ADDED = "LWOPT_TESTS_SEED"


class ShiftedGenerator(torch.Generator):
    def manual_seed(self, seed: int) -> Any:
        return super().manual_seed(seed + int(os.environ[SEED_ADDED]))


def shift_seeds() -> None:
    """Called once in a process."""
    of_torch, added = torch.manual_seed, int(os.environ[SEED_ADDED])
    torch.manual_seed = lambda seed: of_torch(seed + added)
    torch.Generator = ShiftedGenerator  # type: ignore[misc]


if SEED_ADDED in os.environ:
    shift_seeds()
