"""``lwopt diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lwopt_backend.checkpoint.choices import AUTO
from lwopt_backend.checkpoint.numbers import Numbers
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
    VocabSize,
    columns,
    numbers_of,
    opened,
    print_json,
    progress,
    sentences,
)

if TYPE_CHECKING:
    from lwopt_backend.checkpoint.contents import Checkpoint
    from lwopt_backend.checkpoint.differences import Compared

SHOWN = 30
MODEL = "model"  # names of checkpoints that do not say what they are


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint's folder.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    format_a: Annotated[str, typer.Option("--from-a", help=f"A's format: {FORMATS}.")] = AUTO,
    format_b: Annotated[str, typer.Option("--from-b", help="The same of B.")] = AUTO,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            "--names",
            help=f"Compare under these names: {FAMILIES}, or a .json file. Default: as they are, or megatron-core's "
            "where the two have different ones.",
        ),
    ] = None,
    names_a: Annotated[
        str | None, typer.Option("--names-a", help="A's names, where it does not say itself, as of a saved model.")
    ] = None,
    names_b: Annotated[str | None, typer.Option("--names-b", help="The same of B.")] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Compare weights only, as with an export without optimizer state.")
    ] = False,
    layers: Layers = None,
    heads: Heads = None,
    query_groups: QueryGroups = None,
    kv_channels: KVChannels = None,
    experts: Experts = None,
    vocab_size: VocabSize = None,
    qkv_layout: QKVLayout = None,
    qkv_ranks: QKVRanks = None,
    as_json: AsJSON = False,
) -> None:
    """Compare two checkpoints, whatever their formats: weights, states, counters, buffers.

    The exit code is 1 if they differ, and 2 if one cannot be read.
    """
    from lwopt_backend.checkpoint import names

    numbers = numbers_of(
        {
            **{"layers": layers, "heads": heads, "query_groups": query_groups, "kv_channels": kv_channels},
            **{"experts": experts, "vocab_size": vocab_size, "qkv_layout": qkv_layout, "qkv_ranks": qkv_ranks},
        }
    )
    ours, theirs = opened(a, format_a)[1], opened(b, format_b)[1]
    if vocabulary is None and numbers != Numbers():
        vocabulary = names.CORE
    said = {names_a or ours.names, names_b or theirs.names}
    if vocabulary is None and len(said) > 1 and said <= {names.CORE, *names.FAMILIES}:
        vocabulary = names.CORE
    notes = _notes(ours, theirs)
    names_a = _taken_for("a", ours, names_a, vocabulary, notes)
    names_b = _taken_for("b", theirs, names_b, vocabulary, notes)
    ours, theirs = _under(ours, vocabulary, names_a, numbers), _under(theirs, vocabulary, names_b, numbers)
    if not set(ours.params) & set(theirs.params):
        notes.append(
            f"No parameter has the same name in both: A's are such as {next(iter(ours.params), 'none')}, B's such as "
            f"{next(iter(theirs.params), 'none')}. Say what they are with --names-a and --names-b."
        )
    for side, checkpoint in (("A", ours), ("B", theirs)):
        if not weights and not any(param.states for param in checkpoint.params.values()):
            notes.append(f"{side} has no optimizer state; --weights compares weights only.")
    compared = _compared(ours, theirs, weights, as_json)
    different = [entry for entry in compared if entry.what]
    found = {
        **{"a": str(a), "b": str(b), "parameters": len({**ours.params, **theirs.params})},
        **{"equal": len(compared) - len(different), "different": [dataclasses.asdict(entry) for entry in different]},
        "notes": notes,
    }
    print_json(found) if as_json else _show(found, different)
    if different:
        raise typer.Exit(1)


def _taken_for(
    side: str, checkpoint: Checkpoint, source: str | None, vocabulary: str | None, notes: list[str]
) -> str | None:
    """What its names are: those of ``vocabulary``, with a note, where nobody says it."""
    if source is not None or vocabulary is None or checkpoint.names != MODEL:
        return source
    notes.append(
        f"{side.upper()} does not say what its names are; they are taken for {vocabulary}'s. If they are others, say "
        f"so with --names-{side}."
    )
    return vocabulary


def _compared(a: Checkpoint, b: Checkpoint, weights: bool, silent: bool) -> list[Compared]:
    from lwopt_backend.checkpoint import convert
    from lwopt_backend.checkpoint.differences import differences

    with progress(silent) as bar:
        task = bar.add_task("comparing", total=convert.nbytes(a) + convert.nbytes(b))
        watched = [convert.watched(each, lambda count: bar.advance(task, count)) for each in (a, b)]
        return list(differences(watched[0], watched[1], weights))


def _under(checkpoint: Checkpoint, vocabulary: str | None, source: str | None, numbers: Numbers) -> Checkpoint:
    from lwopt_backend.checkpoint import names

    if vocabulary is None and source is None:
        return checkpoint
    return names.translate(checkpoint, vocabulary or source or "", numbers, source=source)


def _notes(a: Checkpoint, b: Checkpoint) -> list[str]:
    """What differs beside tensors, as far as both say it."""
    pairs = [("Step", a.iteration, b.iteration), ("Samples", a.samples, b.samples)]
    if len(a.groups) == len(b.groups):
        for number, (ours, theirs) in enumerate(zip(a.groups, b.groups)):
            both = [key for key in ("lr", "weight_decay", "momentum", "eps") if key in ours and key in theirs]
            pairs += [(f"{key} of group {number}", ours[key], theirs[key]) for key in both]
    return [
        f"{what}: {ours} in A, {theirs} in B."
        for what, ours, theirs in pairs
        if ours is not None and theirs is not None and ours != theirs
    ]


def _show(found: Mapping[str, Any], different: Sequence[Compared]) -> None:
    from lwopt_backend.cli.tables import terminal

    console = terminal()
    console.print(columns([("A", found["a"]), ("B", found["b"])]))
    if different:
        table = Table()
        table.add_column("parameter", overflow="fold", ratio=3)
        table.add_column("tensor", overflow="fold", ratio=1)
        table.add_column("difference", ratio=2)
        table.add_column("largest", justify="right", no_wrap=True)
        for entry in different[:SHOWN]:
            table.add_row(entry.name, entry.key, entry.what, f"{entry.largest:.3g}" if entry.elements else "")
        console.print(table)
        if len(different) > SHOWN:
            console.print(f"and {len(different) - SHOWN} more; --json has all of them")
    for part in sentences("Notes", found["notes"]):
        console.print(part)
    count = f"{found['equal']:,} tensors and counters of {found['parameters']:,} parameters"
    console.print(f"\n{count} are equal, {len(different):,} differ.")
