"""DeepSpeed's universal checkpoints: a folder per parameter with a file per state, for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.integrations.deepspeed_owned_state import part
from lwopt_backend.owned.members import Member
from lwopt_backend.plan.buffers.arrangement import Piece


class Universal:
    """The folder of a universal checkpoint's tag."""

    of_first_instance = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def common(self) -> dict[str, Any]:
        """What is not cut into pieces: param groups, the loss scaler, what the checkpoint says of itself."""
        return torch.load(self.folder / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)

    def module(self, model_parallel_rank: int) -> dict[str, Any]:
        """The state of the whole module, frozen parameters and buffers included."""
        file = self.folder / f"mp_rank_{model_parallel_rank:02d}_model_states.pt"
        return torch.load(file, map_location="cpu", weights_only=False)["module"]

    def file(self, name: str, key: str) -> Path:
        """Where a parameter's state is; a momentum may be there as what ``ds_to_universal`` takes along."""
        found = self.folder / "zero" / name / f"{key}.pt"
        return found if found.is_file() or key != "momentum_buffer" else found.with_name("exp_avg.pt")

    def weights(self, member: Member, number: int, piece: Piece) -> Tensor:
        return self._read(member, "fp32", piece)

    def state(self, member: Member, number: int, piece: Piece, key: str) -> Tensor:
        return self._read(member, key, piece)

    def owner(self) -> dict[str, dict[int, dict[str, Any]]]:
        return {}

    def _read(self, member: Member, key: str, piece: Piece) -> Tensor:
        # DeepSpeed's converter writes dictionaries, but for "step".
        saved = torch.load(self.file(member.name, key), map_location="cpu", weights_only=False, mmap=True)
        return part(torch.as_tensor(saved["param"] if isinstance(saved, dict) else saved), piece)
