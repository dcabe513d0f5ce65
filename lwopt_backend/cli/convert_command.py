"""``lwopt convert``: a checkpoint of one system as one of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lwopt_backend.checkpoint.choices import AUTO, WRITERS
from lwopt_backend.checkpoint.errors import CheckpointError
from lwopt_backend.cli.checkpoint_options import (
    FAMILIES,
    FORMATS,
    AsJSON,
    Experts,
    Heads,
    KVChannels,
    Layers,
    QKVLayout,
    QKVRanks,
    QueryGroups,
    VocabMultiple,
    VocabSize,
    columns,
    described,
    numbers_of,
    opened,
    print_json,
    progress,
    sentences,
)
from lwopt_backend.spelling import suggestion

if TYPE_CHECKING:
    from lwopt_backend.checkpoint.contents import Checkpoint

DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
VERSIONS = ("0.16", "0.19")
WORKERS = 2  # one thread computes checksums while another waits for the disk; each has a tensor in memory
WRITTEN = {
    "universal": "deepspeed universal",
    "megatron": "megatron torch_dist",
    "dcp": "torch dcp",
    "owned": "lwopt_backend owned optimizer state",
    "safetensors": "safetensors",
}


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint's folder.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Where the new one goes.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(WRITERS)}.")],
    format: Annotated[str, typer.Option("--from", help=f"Its format: {FORMATS}.")] = AUTO,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            "--names", help=f"Of the new one's parameters: {FAMILIES}, or a .json file. Default: as they are."
        ),
    ] = None,
    source_names: Annotated[
        str | None, typer.Option("--source-names", help="The same of the source, where it does not say itself.")
    ] = None,
    megatron_version: Annotated[
        str | None, typer.Option(help=f"Megatron that loads it: {' or '.join(VERSIONS)} (and later). Default: 0.16.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Of weights in safetensors: {', '.join(DTYPES)}. Default: as they are.")
    ] = None,
    layers: Layers = None,
    heads: Heads = None,
    query_groups: QueryGroups = None,
    kv_channels: KVChannels = None,
    experts: Experts = None,
    vocab_size: VocabSize = None,
    vocab_multiple: VocabMultiple = None,
    qkv_layout: QKVLayout = None,
    qkv_ranks: QKVRanks = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Tensors that are read and checked, or written, at a time; so many are in memory."),
    ] = WORKERS,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read, check and rename; write nothing.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Convert a checkpoint: weights, optimizer state, counters, schedule. Nothing is written unless all is in order."""
    from lwopt_backend.checkpoint import convert as conversion
    from lwopt_backend.checkpoint import names

    options = _options(to, megatron_version, dtype)
    numbers = numbers_of(
        {
            **{"layers": layers, "heads": heads, "query_groups": query_groups, "kv_channels": kv_channels},
            **{"experts": experts, "vocab_size": vocab_size, "vocab_multiple": vocab_multiple},
            **{"qkv_layout": qkv_layout, "qkv_ranks": qkv_ranks},
        }
    )
    for given in (vocabulary, source_names):
        if given is not None:
            names.find(given)
    reader, found = opened(source, format)
    place = conversion.place_of(found, to, destination)
    conversion.check_free(place, force, source)
    with progress(as_json) as bar:
        checking = bar.add_task("checking", total=conversion.nbytes(found))
        checked = conversion.watched(found, lambda count: bar.advance(checking, count))
        made = conversion.prepared(checked, to, vocabulary, source_names, numbers, workers)
        result = _as_written(made, to, options)
        if not dry_run:
            bar.update(checking, visible=False)  # what is written is read through it once more
            writing = bar.add_task("writing", total=conversion.nbytes(result))
            made = conversion.watched(made, lambda count: bar.advance(writing, count))
            conversion.write(made, to, place, force=force, workers=workers, **options)
    summary = {
        "source": {"path": str(source), "reader": reader.name, **described(found)},
        "result": {"path": str(place.folder), "written": not dry_run, **described(result)},
        "notes": list(made.notes),
    }
    print_json(summary) if as_json else _show(summary)


def _options(to: str, megatron_version: str | None, dtype: str | None) -> dict[str, Any]:
    """The writer's. Raises CheckpointError for a value that is none, and for one that is of another target."""
    if to not in WRITERS:
        raise CheckpointError(f"unknown target {to!r} for --to; {suggestion(to, WRITERS)}")
    if megatron_version is not None and to != "megatron":
        raise CheckpointError(f"--megatron-version is of --to megatron, not of --to {to}; leave it out")
    if dtype is not None and to != "safetensors":
        raise CheckpointError(
            f"--dtype is of --to safetensors, not of --to {to}, which keeps all as it was trained; leave it out"
        )
    if megatron_version is not None and megatron_version not in VERSIONS:
        known = " or ".join(VERSIONS)
        raise CheckpointError(f"--megatron-version {megatron_version!r} is not written; give {known} (and later)")
    if dtype is not None and SHORT.get(dtype, dtype) not in DTYPES:
        raise CheckpointError(f"unknown --dtype {dtype!r}; {suggestion(dtype, DTYPES)}")
    if to == "megatron":
        return {"version": megatron_version or VERSIONS[0]}
    if to == "safetensors":
        import torch

        return {"dtype": None if dtype is None else getattr(torch, SHORT.get(dtype, dtype))}
    return {}


def _as_written(made: Checkpoint, to: str, options: Mapping[str, Any]) -> Checkpoint:
    """What the target has of it: exports have weights only, FSDP2's weights are the masters."""
    from lwopt_backend.checkpoint.contents import MASTER, Param

    params = dict(made.params)
    if to == "safetensors":
        dtype = options["dtype"]
        params = {
            name: Param((param.weight or param.best) if dtype is None else param.best.to(dtype))
            for name, param in params.items()
        }
    elif to == "dcp":
        params = {
            name: dataclasses.replace(
                param, weight=param.best, states={key: t for key, t in param.states.items() if key != MASTER}
            )
            for name, param in params.items()
        }
    version = options.get("version", "")
    return dataclasses.replace(made, params=params, format=WRITTEN[to], version=version)


def _show(summary: Mapping[str, Any]) -> None:
    from lwopt_backend.cli.tables import terminal
    from lwopt_backend.report import nbytes

    console = terminal()
    before, after = summary["source"], summary["result"]
    rows = []
    for word, side in (("from", before), ("to", after)):
        step = "" if side["step"] is None else f", step {side['step']}"
        count = f"{side['parameters']:,} parameters of {side['elements']:,} elements"
        rows += [(word, side["path"]), ("", f"{side['format']} {side['version']}".strip() + step)]
        rows += [("", f"{count}, names of {side['names']}")]
    console.print(columns(rows))
    table = Table("state", "dtype", title=None)
    for heading in ("from", "size", "to", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for key, counts in _by_state(before, after):
        cells = [cell for entry in counts for cell in _cells(entry)]
        table.add_row(*key, *cells)
    table.add_section()
    table.add_row("all", "", "", nbytes(before["size"]), "", nbytes(after["size"]))
    console.print(table)
    for part in sentences("Notes", summary["notes"]):
        console.print(part)
    console.print(f"\nWritten to {after['path']}." if after["written"] else "\nNothing was written (--dry-run).")


def _by_state(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], list[Any]]]:
    sides = [{(entry["state"], entry["dtype"]): entry for entry in side["states"]} for side in (before, after)]
    for key in {**sides[0], **sides[1]}:
        yield key, [side.get(key) for side in sides]


def _cells(entry: Mapping[str, Any] | None) -> tuple[str, str]:
    from lwopt_backend.cli.tables import NONE
    from lwopt_backend.report import nbytes

    return (NONE, NONE) if entry is None else (f"{entry['tensors']:,}", nbytes(entry["size"]))
