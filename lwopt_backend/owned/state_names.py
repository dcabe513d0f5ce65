"""What a checkpoint calls the parameters and param groups of all ranks, whoever owns and shares them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.state import Groups, options_of
from lwopt_backend.owned.state_index import SavedParam
from lwopt_backend.runtime.agreement import check_in_all


@dataclass(frozen=True)
class Names:
    """``keys`` of this rank's members by number; ``params`` are those of all ranks, without pieces."""

    keys: Mapping[int, str]
    params: Mapping[str, SavedParam]


def names_of(core: OwnedCore, groups: Groups) -> Names:
    """A parameter's key is its name. Where several sets of ranks have other experts under one name, it says whose.

    Sets are numbered by their lowest rank. Called on all ranks.
    """
    everyone = core.holdings[0].sharers.everyone
    places, mine = {}, []
    for share, held in enumerate(core.holdings):
        number = 0
        if share:
            lowest = min(held.sharers.everyone.gather_objects(everyone.rank))
            number = sorted(set(everyone.gather_objects(lowest))).index(lowest)
        for member in held.numbers:
            found = core.members[member]
            places[member] = (share, number, found.name)
            group = group_key(groups[found.group])
            if held.sharers.everyone.rank == 0:
                param = SavedParam(tuple(found.param.shape), found.dtype, found.rule, group)
                mine.append((places[member], param))
    entries = [entry for of_rank in everyone.gather_objects(mine) for entry in of_rank]
    count: dict[str, int] = {}
    for (_, _, name), _ in entries:
        count[name] = count.get(name, 0) + 1

    def key(place: tuple[int, int, str]) -> str:
        _, number, name = place
        return name if count[name] == 1 else f"{name} of expert set {number}"

    return Names({m: key(place) for m, place in places.items()}, {key(place): param for place, param in entries})


def group_key(group: Mapping[str, Any]) -> str:
    """The same on all ranks for the same half of the user's group, and different for others."""
    return f"{group['from_group']}.{group['rule']}"


def common_options(core: OwnedCore, groups: Groups) -> dict[str, dict[str, Any]]:
    """The hyperparameters of all ranks' param groups, by key. Called on all ranks.

    Raises ValueError, on all of them, if ranks have different ones or some that ``torch.load`` would not read.
    """
    everyone = core.holdings[0].sharers.everyone
    mine = {group_key(group): options_of(group) for group in groups}
    check_in_all([everyone], "save_state_dict", lambda: _check_readable(mine))
    common: dict[str, dict[str, Any]] = {}
    for rank, of_rank in enumerate(everyone.gather_objects(mine)):
        for key, options in of_rank.items():
            expected = common.setdefault(key, options)
            wrong = [
                o
                for o in {**expected, **options}
                if repr(expected.get(o, "nothing")) != repr(options.get(o, "nothing"))
            ]
            if wrong:
                raise ValueError(
                    f"param group {key}: ranks differ in {wrong[0]!r}, rank {rank} has "
                    f"{options.get(wrong[0], 'nothing')!r}, one before it {expected.get(wrong[0], 'nothing')!r}; set "
                    "it alike on all ranks"
                )
    return common


def _check_readable(options: Mapping[str, Mapping[str, Any]]) -> None:
    for group, entries in options.items():
        for key, value in entries.items():
            try:
                stored = io.BytesIO()
                torch.save(value, stored)
                stored.seek(0)
                torch.load(stored, weights_only=True)
            except Exception as error:
                raise ValueError(
                    f"param group {group}: the value {value!r} of {key!r} cannot be read back with "
                    f"torch.load(weights_only=True); keep it elsewhere. {error}"
                ) from error
