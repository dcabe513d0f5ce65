"""The formats that can be read, how a folder's format is recognised, and whether files are as they were written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lwopt_backend.checkpoint import safetensors as safetensors_folder
from lwopt_backend.checkpoint.choices import AUTO, FORMATS
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.dcp import reader as dcp
from lwopt_backend.checkpoint.dcp.reader import FILE, METADATA, DcpFolder
from lwopt_backend.checkpoint.deepspeed import universal as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed import zero as deepspeed_zero
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.files.folders import check_inside
from lwopt_backend.checkpoint.files.manifest import Manifest
from lwopt_backend.checkpoint.files.torch_files import Archive, Stored
from lwopt_backend.checkpoint.megatron import dist as megatron_dist
from lwopt_backend.checkpoint.megatron import fsdp as megatron_fsdp
from lwopt_backend.checkpoint.megatron import names as megatron_folders
from lwopt_backend.checkpoint.megatron import torch as megatron_torch
from lwopt_backend.config.options import suggestion

POINTERS = (deepspeed_zero.POINTER, deepspeed_universal.POINTER, megatron_folders.POINTER)  # files that name a folder


_MODULES = (megatron_torch, megatron_dist, megatron_fsdp, deepspeed_universal, deepspeed_zero, dcp, safetensors_folder)
READERS: dict[str, ModuleType] = dict(zip(FORMATS, _MODULES, strict=True))


def find(path: Path, format: str = AUTO) -> str:
    """The name in READERS of a folder's format: ``format``, or the first whose reader recognises the folder.

    Raises CheckpointError if there is none.
    """
    if format != AUTO and format not in READERS:
        raise CheckpointError(f"unknown format {format!r}; {suggestion(format, (AUTO, *READERS))}")
    _check_folder(path)
    kind = format if format != AUTO else next((name for name in READERS if READERS[name].recognises(path)), None)
    if kind is None:
        hint = ""
        if any(path.glob("*.distcp")):
            hint = ": it has .distcp files, but no .metadata that says what is in them; copy all files"
        if name := next((name for name in POINTERS if (path / name).is_file()), None):
            hint = f": its file {name} names {(path / name).read_bytes()[:100]!r}, where there is none; copy all of it"
        known = "; ".join(f"{name} ({meaning})" for name, meaning in FORMATS.items())
        raise CheckpointError(f"{path} is no checkpoint that is known{hint}; known are {known}")
    return kind


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        found = "no folder" if path.exists() else "not there"
        raise CheckpointError(f"{path} is {found}; expected a checkpoint's folder")


def read(path: Path, format: str = AUTO) -> Checkpoint:
    checkpoint: Checkpoint = READERS[find(path, format)].read(path)
    return checkpoint


# ``lwopt inspect --verify``: whether the files of a folder are as they were written, whatever is in them.

Seen = Callable[[int], None]


@dataclass(frozen=True)
class Plan:
    """The files to verify: those that a manifest lists, or all ``files`` of a folder without one."""

    folder: Path
    listed: Manifest | None
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def plan(path: Path) -> list[Plan]:
    """A plan for each manifest in a folder, and one for the files that no manifest is beside or above. Raises
    CheckpointError for what is no folder, or has no files, or a damaged manifest."""
    _check_folder(path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name not in (manifest.NAME, *POINTERS))
    folders = sorted({file.parent for file in path.rglob(manifest.NAME)})
    plans = [Plan(f, manifest.read(f), tuple(file for file in files if file.is_relative_to(f))) for f in folders]
    rest = tuple(file for file in files if not any(file.is_relative_to(folder) for folder in folders))
    for file in files:
        check_inside(file, path)
    if not files:
        raise CheckpointError(f"{path} has no files; expected a checkpoint's folder")
    return plans + [Plan(path, None, rest)] * bool(rest)


def verify(plan: Plan, seen: Seen) -> dict[str, Any]:
    """Verify, and return the findings as plain data. ``seen`` is called with the number of bytes read."""
    found: dict[str, Any] = {"folder": str(plan.folder), "save_id": None, "step": None, "world": None}
    if plan.listed is None:
        problems, notes = _without(plan, seen)
        return {**found, "files": len(plan.files), "bytes": plan.nbytes, "notes": notes, "problems": problems}
    listed = plan.listed
    names = {file.relative_to(plan.folder).as_posix() for file in plan.files}
    problems, added = manifest.verify(listed, seen), sorted(names - set(listed.files))
    notes = [f"{len(added)} file(s) are not in {manifest.NAME}, so not checked: {', '.join(added)}"] * bool(added)
    found |= {"save_id": listed.save_id, "step": listed.step, "world": listed.world, "files": len(listed.files)}
    nbytes = sum(entry.nbytes for entry in listed.files.values())
    return {**found, "bytes": nbytes, "notes": notes, "problems": problems}


def _without(plan: Plan, seen: Seen) -> tuple[list[str], list[str]]:
    """Problems and notes of a folder without a manifest, from the checksums in what torch.save writes."""
    problems, unknown = [], []
    places: dict[Path, tuple[Stored, ...]] = {}  # what the metadata of DCP's folders say
    for file in plan.files:
        try:
            if file.name.endswith(FILE) and (file.parent / METADATA).is_file():
                if file.parent not in places:
                    places[file.parent] = DcpFolder(file.parent, metadata_only=True).stored
                parts = [place for place in places[file.parent] if place.path == file]
            else:
                with file.open("rb") as opened:
                    is_zip = opened.read(4) == b"PK\x03\x04"
                parts = [Stored(file, 0, file.stat().st_size)] * (is_zip or file.suffix == ".pt")
            for part in parts:
                Archive(part, str(file)).check()
            unknown += [str(file)] * (not parts)
        except CheckpointError as error:
            problems.append(str(error))
        seen(file.stat().st_size)
    notes = [
        f"There is no {manifest.NAME}: whether these files are of one save, and none is missing, cannot be told here. "
        "What torch.save wrote has checksums of its own"
    ]
    notes += [f"{len(unknown)} file(s) have no checksums: {', '.join(unknown)}"] * bool(unknown)
    return problems, notes
