"""The index of a folder of optimizer state: which save, which files, and in which of them lies which piece.

It is written last, so a folder without one is not a checkpoint; it names the files of one save and no others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INDEX = "optimizer.json"
FORMAT, VERSION = "lwopt_backend owned optimizer state", 1


@dataclass(frozen=True)
class SavedParam:
    """One parameter. ``group`` is the key of its param group; ``pieces`` are (start, stop, file)."""

    shape: tuple[int, ...]
    dtype: str
    rule: str
    group: str
    pieces: tuple[tuple[int, int, str], ...] = ()

    def overlapping(self, start: int, stop: int) -> list[tuple[int, int, str]]:
        return [piece for piece in self.pieces if piece[0] < stop and start < piece[1]]


@dataclass(frozen=True)
class Index:
    """``save`` is its id; ``files`` by name are their bytes, ``options`` the one with the param groups."""

    save: str
    files: Mapping[str, int]
    options: str
    params: Mapping[str, SavedParam]

    def __post_init__(self) -> None:
        for name in self.files:
            if Path(name).name != name:
                raise ValueError(f"the file name {name!r} leads out of the folder")
        if self.options not in self.files:
            raise ValueError(f"the param groups' file {self.options!r} is not one of its files")
        for key, param in self.params.items():
            end = 0
            for start, stop, name in sorted(param.pieces):
                if start != end or name not in self.files:
                    raise ValueError(f"parameter {key!r}: element {end} is next, the piece [{start}, {stop}) of {name}")
                end = stop
            if end != math.prod(param.shape):
                raise ValueError(f"parameter {key!r} of shape {param.shape}: its pieces end at {end}")

    def text(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})


def read_index(folder: Path) -> Index:
    """Raises FileNotFoundError where there is none, ValueError for one that is not complete or not ours."""
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no optimizer state, or its saving was not finished: there is no {INDEX}, which is "
            "written last. A checkpoint that something else wrote is brought here with lwopt convert --to owned"
        )
    try:
        return _parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or not an index of optimizer state: {error}") from error


def _parse(content: Mapping[str, Any]) -> Index:
    if content["format"] != FORMAT:
        raise ValueError(f"expected the format {FORMAT!r}, found {content['format']!r}")
    if content["version"] != VERSION:
        raise ValueError(f"it is of version {content['version']}, this program reads version {VERSION}")
    params = {
        key: SavedParam(
            tuple(entry["shape"]),
            entry["dtype"],
            entry["rule"],
            entry["group"],
            tuple((int(start), int(stop), str(name)) for start, stop, name in entry["pieces"]),
        )
        for key, entry in content["params"].items()
    }
    return Index(content["save"], dict(content["files"]), content["options"], params)
