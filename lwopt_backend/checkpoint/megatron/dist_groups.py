"""Param groups and step counts in Megatron's torch_dist checkpoints.

They have every group's options, but not which parameters are in it (see ``megatron.groups``). Chained optimizers are
numbered, and those that are chained in a chained one once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.dcp.files import DcpFolder
from lwopt_backend.checkpoint.files.plain_data import counter, plain

Options = Mapping[str, Any]
Chain = tuple[int, ...]  # of an optimizer its number in the chain, in the chain in that, ...; () if it is alone
_OF_BUFFERS = re.compile(r"((?:chained_\d+\.)*)optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_.+")


def chain_of(prefix: str) -> Chain:
    """``"chained_1."``: (1,)."""
    return tuple(map(int, re.findall(r"\d+", prefix)))


def optimizers(folder: DcpFolder, common: Mapping[str, Any]) -> dict[Chain, tuple[Options, ...]]:
    """Each optimizer's groups. Adam's have "step", if it was saved."""
    saved = dict(_unchained(common.get("optimizer") or {}, folder))
    of_buffers = {chain_of(match[1]): key for key in folder.objects if (match := _OF_BUFFERS.fullmatch(key))}
    found: dict[Chain, tuple[Options, ...]] = {}
    for chain in sorted(saved.keys() | of_buffers.keys()):
        state = saved.get(chain, {})
        inner = state.get("optimizer", state)
        groups = inner.get("param_groups", [])
        if chain in of_buffers:
            groups = _held(folder, of_buffers[chain])
        steps = _steps(state, inner)
        if len(steps) == 1:
            groups = [{"step": steps[0], **group} if "betas" in group else group for group in groups]
        found[chain] = tuple(
            {key: counter(value) if key == "step" else value for key, value in group.items() if key != "params"}
            for group in groups
        )
    return found


def _unchained(saved: Any, folder: DcpFolder, chain: Chain = ()) -> Iterator[tuple[Chain, dict[str, Any]]]:
    """The optimizers' states in a chain of them."""
    if isinstance(saved, (list, tuple)):
        saved = dict(enumerate(saved))
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{folder.path}: expected the optimizer's state as a dictionary, found {saved!r}")
    if saved and all(str(number).isdecimal() for number in saved):  # as text where DCP flattened it
        for number, state in saved.items():
            yield from _unchained(state or {}, folder, (*chain, int(number)))
    elif saved:
        yield chain, plain(saved)


def _held(folder: DcpFolder, key: str) -> list[Options]:
    """The groups of an optimizer whose state is in flat buckets."""
    held = plain(folder.object(key))
    held = held[0] if isinstance(held, list) and len(held) == 1 else held
    if not isinstance(held, Mapping) or "param_groups" not in held:
        raise CheckpointError(f"{key} in {folder.path}: expected param_groups, found {held!r:.200}")
    groups: list[Options] = held["param_groups"]
    return groups


def _steps(state: Mapping[str, Any], inner: Mapping[str, Any]) -> list[float]:
    """The step counts that are saved beside the groups, each once."""
    of_params = list((state.get("param_state") or {}).values())
    of_params += [entry for entry in (inner.get("state") or {}).values() if isinstance(entry, Mapping)]
    found = [entry["step"] for entry in of_params if "step" in entry]
    common = (inner.get("state") or {}).get("common_step")
    return sorted({counter(step) for step in [*found, *([] if common is None else [common])]})
