"""Param groups of AdamW alone, with the keys of torch.optim.AdamW's, so that state dicts go from one to the other.

torch.distributed.checkpoint reads a flattened state dict by the keys that the groups have. So where AdamW trains
everything they are just torch's. What we know of a group beside them is in the ``marks`` of its ``ParamGroup``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lwopt_backend.param_groups import OURS
from lwopt_backend.rule_options import AdamWOptions

RULE = "adamw"


@functools.cache
def torchs() -> Mapping[str, Any]:
    """torch.optim.AdamW's options of a group, with their defaults."""
    return {k: v for k, v in torch.optim.AdamW([torch.zeros(1)]).param_groups[0].items() if k != "params"}


@functools.cache
def fixed() -> Mapping[str, Any]:
    """Those of them that are no options of ours; they are there for others to read."""
    return {key: value for key, value in torchs().items() if key not in AdamWOptions.model_fields}


def is_alone(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether AdamW trains everything. ``groups`` are as they come from the routing, with ``rule``."""
    return all(group["rule"] == RULE for group in groups)


def marks_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By group, what is not to stand among its keys; empty where other rules train, too."""
    if not is_alone(groups):
        return [{} for _ in groups]
    # Options that torch's does not have are there where they say something.
    ours = {k: field.default for k, field in AdamWOptions.model_fields.items() if k not in torchs()}
    return [{**ours, **{key: group[key] for key in OURS if key in group}} for group in groups]


def shown(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the groups, with all of torch's keys where AdamW trains everything."""
    return [{**(fixed() if is_alone(groups) else {}), **group} for group in groups]


def check(group: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for an option of torch.optim.AdamW that ours would not follow."""
    for key, value in fixed().items():
        if group.get(key, value) != value:
            raise ValueError(
                f"{where}: {key!r} is {group[key]!r}, but AdamW here has {value!r} only; set it to that, if what was "
                "trained so far allows it"
            )
