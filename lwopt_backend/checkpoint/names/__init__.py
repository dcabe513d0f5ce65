"""Name maps: one table per family, users' own as JSON, applied to a checkpoint in either direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.formats import Numbers
from lwopt_backend.checkpoint.names import families
from lwopt_backend.checkpoint.names.applying import apply, without_aliases
from lwopt_backend.checkpoint.names.rules import NameMap, read_map
from lwopt_backend.config.options import suggestion

__all__ = ["CORE", "FAMILIES", "NameMap", "Numbers", "apply", "find", "translate"]

CORE = families.CORE_MAP.source
FAMILIES: Mapping[str, NameMap] = {each.target: each for each in families.MAPS}


def find(name: str) -> NameMap:
    """A family's map by name, or the user's by the path of a .json file. Raises CheckpointError for any other."""
    if name in FAMILIES:
        return FAMILIES[name]
    if name.endswith(".json"):
        return read_map(Path(name), FAMILIES)
    raise CheckpointError(f"unknown names {name!r}; {suggestion(name, FAMILIES)}, or give the path of a .json file")


def translate(
    checkpoint: Checkpoint, target: str, numbers: Numbers | None = None, *, source: str | None = None
) -> Checkpoint:
    """The checkpoint under the names of ``target``, a family or a .json file.

    ``source`` is the vocabulary of its names, if the checkpoint itself does not have it ("model"). Between two
    families, names go through Megatron-core's. Raises CheckpointError; see ``apply``.
    """
    into = find(target)
    if source is not None:
        checkpoint = dataclasses.replace(checkpoint, names=find(source).target)
    back = find(source) if source is not None else FAMILIES.get(checkpoint.names)
    cuts = numbers is not None and numbers.vocab_size is not None
    if checkpoint.names == into.target != into.source and not cuts:
        return without_aliases(into.target_aliases, checkpoint)
    if back is not None and checkpoint.names not in (CORE, into.source):
        checkpoint = apply(back.inverse(), checkpoint, numbers)
        if into.source == into.target:
            return checkpoint
    return apply(into, checkpoint, numbers)
