"""What DeepSpeed saves of an optimizer with owned storage, and loads into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.git_version_info import version

from lwopt_backend.integrations import deepspeed_owned_loading as loading
from lwopt_backend.integrations.deepspeed_checkpoints import MARK
from lwopt_backend.integrations.deepspeed_owned_binding import OwnedBinding
from lwopt_backend.integrations.deepspeed_owned_state import Groups, Parts, Whole, load, mark, save_parts, save_whole
from lwopt_backend.integrations.deepspeed_owned_universal import Universal
from lwopt_backend.integrations.deepspeed_state import check_groups
from lwopt_backend.owned.core import OwnedCore


class OwnedCheckpoint:
    """Saves and loads ``core``, the storage of the engine of ``binding``. All methods are called on all ranks."""

    def __init__(self, binding: OwnedBinding, core: OwnedCore) -> None:
        self._engine = binding.engine
        self._rank = binding.ranks.rank
        self._core = core
        self._universal: Path | None = None  # stage 0, where DeepSpeed does not pass the folder on

    def save(self, groups: Groups, common: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank saves; at stage 0, where the first rank saves everything, nothing on the others."""
        stage = self._engine.zero_optimization_stage()
        saved = (save_parts if stage else save_whole)(self._core, groups)
        return {**saved, **common, MARK: mark(self._core), "zero_stage": stage, "ds_version": version} if saved else {}

    def check(self, groups: Groups, load_dir: str, tag: str | None, with_state: bool) -> list[str]:
        """Raises ValueError if a checkpoint cannot be loaded; what all ranks must see alike."""
        self._universal = None
        if not self._engine.load_universal_checkpoint():
            return loading.check(self._engine, self._core, load_dir, tag, with_state)
        self._universal = loading.universal_folder(load_dir, tag)
        return loading.check_universal(self._core, groups, self._universal, with_state)

    def load(
        self,
        groups: Groups,
        state_dict: Mapping[str, Any] | None,
        of_ranks: Sequence[Mapping[str, Any]] | None,
        *,
        weights: bool,
        state: bool,
    ) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
        """Load the checkpoint that was checked, or what ``save`` returned; what is common to all ranks, and the param
        groups with the hyperparameters that were saved.

        Raises ValueError if ``groups`` are others than those that were saved.
        """
        if self._universal is not None:
            source: Any = Universal(self._universal)
            common = source.common()
            saved_groups = common["param_groups"]
        elif of_ranks is not None or self._engine.zero_optimization_stage():
            common = of_ranks[self._rank] if of_ranks is not None else state_dict
            source, saved_groups = Parts(common), common["base_optimizer_state"]["param_groups"]
        else:
            common = state_dict
            source, saved_groups = Whole(common), common["param_groups"]
        check_groups(saved_groups, groups)
        if self._universal is not None:  # the rest of the module: DeepSpeed loads none of it
            self._engine.module.load_state_dict(source.module(self._engine.checkpoint_mp_rank), strict=False)
        load(self._core, source, weights=weights or self._universal is not None, state=state)
        kept = ("params", "members")
        return common, [
            {**saved, **{key: ours[key] for key in kept}} for saved, ours in zip(saved_groups, groups, strict=True)
        ]
