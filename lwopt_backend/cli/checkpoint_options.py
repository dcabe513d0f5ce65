"""Options that the commands on checkpoints share, and what they print alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from lwopt_backend.checkpoint import choices
from lwopt_backend.checkpoint.errors import CheckpointError
from lwopt_backend.checkpoint.numbers import Numbers
from lwopt_backend.options import parse

if TYPE_CHECKING:
    from lwopt_backend.checkpoint.contents import Checkpoint
    from lwopt_backend.checkpoint.formats import Reader

MODEL = "The model's numbers, where the checkpoint does not say"
FAMILIES = ", ".join(choices.FAMILIES)
FORMATS = ", ".join(choices.FORMATS)


def _number(field: str) -> Any:
    meaning = Numbers.model_fields[field].description or ""
    return typer.Option(help=f"{meaning[0].upper()}{meaning[1:]}.", rich_help_panel=MODEL)


Layers = Annotated[int | None, _number("layers")]
Heads = Annotated[int | None, _number("heads")]
QueryGroups = Annotated[int | None, _number("query_groups")]
KVChannels = Annotated[int | None, _number("kv_channels")]
Experts = Annotated[int | None, _number("experts")]
VocabSize = Annotated[int | None, _number("vocab_size")]
VocabMultiple = Annotated[int | None, _number("vocab_multiple")]
QKVLayout = Annotated[str | None, _number("qkv_layout")]
QKVRanks = Annotated[int | None, _number("qkv_ranks")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def numbers_of(given: Mapping[str, Any]) -> Numbers:
    """Those that were given, by field. Raises ValueError for one that is none."""
    found = {key: value for key, value in given.items() if value is not None}
    if "qkv_ranks" in found and found.get("qkv_layout") != "blocks":
        raise CheckpointError("--qkv-ranks is of --qkv-layout blocks only; give that, or leave it out")
    return parse(Numbers, {key: found[key] for key in given if key in found}, "lwopt")


def opened(path: Path, format: str) -> tuple[Reader, Checkpoint]:
    """A checkpoint and what reads it, after folders that a killed program had moved aside are back."""
    from lwopt_backend.checkpoint import formats
    from lwopt_backend.checkpoint.files import folders

    folders.recover(path)
    if path.is_dir():
        folders.recover_within(path)
    reader = formats.find(path, format)
    return reader, reader.read(path)


@contextmanager
def progress(silent: bool) -> Iterator[Progress]:
    """A bar of bytes on standard error, while that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    disable = silent or not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=disable) as bar:
        yield bar


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's facts as plain data; sizes in bytes."""
    states: dict[str, dict[str, Any]] = {}
    for param in checkpoint.params.values():
        tensors = {**({"weight": param.weight} if param.weight is not None else {}), **param.states}
        for key, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            entry = states.setdefault(
                f"{key}, {dtype}", {"state": key, "dtype": dtype, "tensors": 0, "elements": 0, "size": 0}
            )
            entry["tensors"] += 1
            entry["elements"] += tensor.numel
            entry["size"] += tensor.nbytes
    found = list(states.values())
    if checkpoint.buffers:
        buffers = checkpoint.buffers.values()
        found.append(
            {
                **{"state": "buffers", "dtype": "", "tensors": len(buffers)},
                **{"elements": sum(t.numel for t in buffers), "size": sum(t.nbytes for t in buffers)},
            }
        )
    world = dict(checkpoint.world)
    return {
        "format": checkpoint.format,
        "version": checkpoint.version,
        "names": checkpoint.names,
        "step": checkpoint.iteration,
        "samples": checkpoint.samples,
        "world_size": math.prod(world.get(key, 1) for key in ("dp", "tp", "pp", "cp")) if world else None,
        "world": world,
        "parameters": len(checkpoint.params),
        "elements": sum(param.best.numel for param in checkpoint.params.values()),
        "states": found,
        "size": sum(entry["size"] for entry in found),
        "owner_states": sum(bool(param.owner_states) for param in checkpoint.params.values()),
        "groups": [dict(group) for group in checkpoint.groups],
        "tied": dict(checkpoint.tied),
    }


def print_json(found: Mapping[str, Any]) -> None:
    """To standard output; what JSON has no form for becomes a string."""
    typer.echo(json.dumps(_plain(found), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    if (
        isinstance(value, float)
        and not math.isfinite(value)
        or not isinstance(value, (bool, int, float, str, None.__class__))
    ):
        return str(value)
    return value


def columns(rows: Sequence[tuple[str, str]]) -> Table:
    """What and its value beside it; what is long is broken within its column."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def sentences(heading: str, found: Sequence[str]) -> Iterator[RenderableType]:
    """A heading and a list under it, or nothing."""
    if found:
        yield f"\n{heading}:"
        yield columns([("  -", sentence) for sentence in found])
