"""All modules' state in one folder, that any split of ranks over the modules can load.

::

    modules.json               the pointer, written last: which save, and how each module's state was written
    save-<id>/<module>/        owned storage: what its own save_state_dict writes
    save-<id>/<module>/whole.pt  others: whole tensors in one file

A save has a folder of its own, and those of earlier saves are removed once the pointer names it; so what the pointer
names, if it is there, is whole.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lwopt_backend.modules.checks import NAME
from lwopt_backend.modules.parts import OwnedPart, Part
from lwopt_backend.modules.together import together
from lwopt_backend.modules.whole_state import load_whole, save_whole
from lwopt_backend.owned.state_files import write_whole
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.ranks import Collectives
from lwopt_backend.spelling import suggestion

POINTER = "modules.json"
FORMAT, VERSION = "lwopt_backend module optimizers", 1


def save(
    everyone: Collectives, names: Sequence[str], parts: Mapping[str, Part], first: Mapping[str, int], folder: Path
) -> None:
    """Write the state of all modules; ``first`` are their first ranks. Called on all ranks.

    Raises, on all of them, what went wrong on any. The save that the folder held can then still be loaded.
    """
    save_id = everyone.gather_objects(secrets.token_hex(8))[0]
    here = folder / f"save-{save_id}"
    kinds = {
        name: kind
        for found in everyone.gather_objects({n: p.kind for n, p in parts.items()})
        for name, kind in found.items()
    }

    def write(name: str, part: Part) -> None:
        (here / name).mkdir(parents=True, exist_ok=True)
        if isinstance(part, OwnedPart):
            part.optimizer.save_state_dict(here / name)
        else:
            save_whole(part, here / name, writes=everyone.rank == first[name])

    def point() -> tuple[None, list[str]]:
        if everyone.rank == 0:
            for name in names:
                if not (here / name).is_dir():
                    raise FileNotFoundError(f"{here / name} is not there; the folder has to be the same for all ranks")
            content = {"format": FORMAT, "version": VERSION, "save": save_id, "modules": kinds}
            write_whole(folder / POINTER, lambda file: file.write(json.dumps(content).encode()))
            _remove_others(folder, here)
        return None, []

    try:
        together(everyone, "save_state_dict", parts, write)
    except RuntimeError:
        if everyone.rank == 0:
            shutil.rmtree(here, ignore_errors=True)
        raise
    agree(everyone, "save_state_dict", point)


def load(everyone: Collectives, names: Sequence[str], parts: Mapping[str, Part], folder: Path) -> None:
    """Take the state of this rank's modules. Called on all ranks.

    Raises, on all of them and before anything is changed, for a folder without a whole save and for other modules; then
    what is wrong with a module's state, before anything of that module is changed.
    """

    def check() -> tuple[str, list[str]]:
        save_id, kinds = _read(folder)
        for name in [*names, *kinds]:
            if name not in kinds or name not in names:
                where, other = (folder, kinds) if name in names else ("this optimizer", names)
                raise ValueError(f"{NAME}: {where} has no module {name!r}; {suggestion(name, other)}")
        for name, part in parts.items():
            if part.kind != kinds[name]:
                written = {"pieces": "owned storage", "whole": "FSDP2's or a plain optimizer"}[kinds[name]]
                raise ValueError(f"{NAME}: module {name!r} was saved by {written}, which this optimizer cannot read")
            if not (folder / f"save-{save_id}" / name).is_dir():
                raise FileNotFoundError(f"{folder / f'save-{save_id}' / name} is missing")
        return save_id, [save_id]

    here = folder / f"save-{agree(everyone, 'load_state_dict_from', check)}"

    def take(name: str, part: Part) -> None:
        if isinstance(part, OwnedPart):
            part.optimizer.load_state_dict_from(here / name)
        else:
            load_whole(part, here / name)

    together(everyone, "load_state_dict_from", parts, take)


def _read(folder: Path) -> tuple[str, dict[str, str]]:
    """The id of the save that the pointer names, and the kinds of its modules' state."""
    path = folder / POINTER
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no modules' state, or its saving was not finished: there is no {POINTER}, which is "
            "written last"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is {content['format']!r} of version {content['version']}, expected {FORMAT!r} of 1")
        if not re.fullmatch("[0-9a-f]{16}", content["save"]):
            raise ValueError(f"the save's id is {content['save']!r}")
        return content["save"], dict(content["modules"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or not of modules' state: {error!r}") from error


def _remove_others(folder: Path, here: Path) -> None:
    for path in folder.glob("save-*"):
        if path != here and re.fullmatch("save-[0-9a-f]{16}", path.name):
            shutil.rmtree(path, ignore_errors=True)
