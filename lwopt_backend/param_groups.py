"""Param groups: every group of the user's is split into a matrix half and an element-wise half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lwopt_backend.config import AdamWOptions, FSDP2Config, LayerWiseConfig, LayerWiseMuonConfig, MuonOptions, parse
from lwopt_backend.spelling import nearest

SHARED = ("lr", "weight_decay")  # a group's own value of these is meant for both halves
GROUP_KEYS = frozenset({"params", "adamw", *MuonOptions.model_fields})
OURS = frozenset({"rule", "from_group", "members"})  # written by us into the halves


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """``params`` as torch.optim takes it (parameters, named parameters, or group dictionaries) as a list of groups.

    Names are not kept, the model's own are used. Raises TypeError for anything else, ValueError for no parameter at all
    or one that occurs twice.
    """
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or of param groups; found a single tensor")
    items = list(params)
    if not items:
        raise ValueError("params is empty; pass model.parameters() or a list of param groups")
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    for number, group in enumerate(items):
        if not isinstance(group, Mapping):
            raise TypeError(f"param group {number}: expected a dictionary like the other groups, found {_kind(group)}")
        if "params" not in group:
            raise ValueError(f"param group {number}: expected a key 'params', found {', '.join(map(repr, group))}")
    groups = [{**group, "params": _listed(group["params"])} for group in items]
    for group in groups:
        group.pop("param_names", None)  # torch's, of all parameters; a group is about to be split
    _check_members(groups)
    return groups


def _listed(params: Any) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    return [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in params]


def _check_members(groups: Sequence[Mapping[str, Any]]) -> None:
    seen: set[int] = set()
    for number, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            place = f"param group {number}, position {position}"
            if not isinstance(param, Tensor):
                raise TypeError(f"{place}: expected a parameter, found {_kind(param)}")
            if id(param) in seen:
                raise ValueError(f"{place}: this parameter of shape {tuple(param.shape)} was given before")
            seen.add(id(param))


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def split(
    groups: Sequence[Mapping[str, Any]], is_matrix: Mapping[int, bool], config: LayerWiseConfig
) -> list[dict[str, Any]]:
    """Each group's matrix half, then its element-wise half, both in the group's order; empty halves are left out.

    ``is_matrix`` tells by ``id(parameter)``; parameters missing from it (frozen ones) are dropped. A group's own
    ``lr`` and ``weight_decay`` hold for both halves, its other options are read as in the configuration, ``"adamw"``
    section included; keys that are no option of ours stay in both. How many groups come out depends on the model and
    the user's groups only, never on the ranks.
    """
    halves = []
    for number, group in enumerate(groups):
        muon, adamw, extra = _options(group, config, f"param group {number}")
        params = [p for p in group["params"] if id(p) in is_matrix]
        matrices = [p for p in params if is_matrix[id(p)]]
        others = [p for p in params if not is_matrix[id(p)]]
        halves.append({"params": matrices, **extra, **muon.model_dump(), "rule": "muon", "from_group": number})
        halves.append({"params": others, **extra, **adamw.model_dump(), "rule": "adamw", "from_group": number})
    return [half for half in halves if half["params"]]


def _options(
    group: Mapping[str, Any], config: LayerWiseConfig, where: str
) -> tuple[MuonOptions, AdamWOptions, dict[str, Any]]:
    """A group's options for its matrix half and its element-wise half, and its keys that are neither."""
    for key in group:
        if key not in GROUP_KEYS:
            _check_foreign(str(key), where)
    given = group.get("adamw", {})
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: adamw: expected a section of AdamW's options; found {given!r}")
    own = {key: value for key, value in group.items() if key in MuonOptions.model_fields}
    shared = {key: own[key] for key in SHARED if key in own}
    defaults = {key: getattr(config, key) for key in MuonOptions.model_fields}
    section = {**config.adamw.model_dump(), **shared, **given}
    extra = {key: value for key, value in group.items() if key not in GROUP_KEYS}
    return parse(MuonOptions, {**defaults, **own}, where), parse(AdamWOptions, section, f"{where}, 'adamw'"), extra


def _check_foreign(key: str, where: str) -> None:
    """A key that is nobody's option is the user's business; one that looks like an option would do nothing."""
    close = nearest(key, GROUP_KEYS, cutoff=0.8)
    if key in AdamWOptions.model_fields:
        raise ValueError(f"{where}: {key!r} is AdamW's; write it into the group's section 'adamw'")
    if any(key in config.model_fields for config in (LayerWiseMuonConfig, FSDP2Config)):
        raise ValueError(f"{where}: {key!r} is an option of the whole optimizer, not of a param group")
    if key in OURS:
        raise ValueError(f"{where}: {key!r} is a key that this optimizer writes itself; rename yours")
    if close:
        raise ValueError(f"{where}: unknown key {key!r}; did you mean {close!r}?")
