"""What DeepSpeed saves of an optimizer with owned storage, and loads into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from deepspeed.git_version_info import version

from lwopt_backend.integrations import deepspeed_owned_loading as loading
from lwopt_backend.integrations.deepspeed_checkpoints import MARK, guard_loading
from lwopt_backend.integrations.deepspeed_owned_binding import OwnedBinding
from lwopt_backend.integrations.deepspeed_owned_state import (
    Groups,
    Parts,
    Source,
    Whole,
    load,
    mark,
    save_parts,
    save_whole,
)
from lwopt_backend.integrations.deepspeed_owned_universal import OwnedStorage
from lwopt_backend.integrations.deepspeed_state import check_groups
from lwopt_backend.integrations.deepspeed_universal_loading import load_instead
from lwopt_backend.owned.core import OwnedCore


class OwnedCheckpoint:
    """Saves and loads ``core``, the storage of the engine of ``binding``. All methods are called on all ranks."""

    def __init__(self, binding: OwnedBinding, core: OwnedCore) -> None:
        self._engine = binding.engine
        self._ranks = binding.ranks
        self._core = core

    def prepare_loading(self, optimizer: Any) -> None:
        """Make ``engine.load_checkpoint`` load universal checkpoints if it shall, else check DeepSpeed's own first.

        ``optimizer`` is the engine's. Called once for an engine.
        """
        engine, core = self._engine, self._core
        if engine.load_universal_checkpoint():
            load_instead(engine, lambda: OwnedStorage(optimizer, core, self._ranks))
        else:
            guard_loading(optimizer.name, engine, [self._ranks], partial(loading.check, engine, core))

    def save(self, groups: Groups, common: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank saves; at stage 0, where the first rank saves everything, nothing on the others."""
        stage = self._engine.zero_optimization_stage()
        saved = (save_parts if stage else save_whole)(self._core, groups)
        return {**saved, **common, MARK: mark(self._core), "zero_stage": stage, "ds_version": version} if saved else {}

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
        common = of_ranks[self._ranks.rank] if of_ranks is not None else state_dict
        assert common is not None
        source: Source
        if of_ranks is not None or self._engine.zero_optimization_stage():
            source = Parts(common)
            saved_groups = common["base_optimizer_state"]["param_groups"]
        else:
            source, saved_groups = Whole(common), common["param_groups"]
        check_groups(saved_groups, groups)
        load(self._core, source, weights=weights, state=state)
        kept = ("params", "members")
        return common, [
            {**saved, **{key: ours[key] for key in kept}} for saved, ours in zip(saved_groups, groups, strict=True)
        ]
