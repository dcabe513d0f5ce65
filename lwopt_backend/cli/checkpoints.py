"""``lwopt convert``, ``inspect`` and ``diff``."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.errors import CheckpointError
from lwopt_backend.checkpoint.formats import AUTO, TARGETS, Numbers
from lwopt_backend.config.options import glob_suggestion, suggestion

if TYPE_CHECKING:
    from torch import Tensor

    from lwopt_backend.checkpoint.contents import Checkpoint, LazyTensor
    from lwopt_backend.checkpoint.differences import Compared

MODEL = "The model's numbers, if the checkpoint does not record them"
PATIENCE = 60.0  # seconds between lines of progress in a log
FAMILIES = ", ".join(formats.FAMILIES)
FORMATS = ", ".join(formats.FORMATS)
Folder = Annotated[Path, typer.Argument(help="Folder of a checkpoint.")]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
of_model = functools.partial(typer.Option, min=1, rich_help_panel=MODEL)
Heads = Annotated[int | None, of_model(help="Number of query heads.")]
QueryGroups = Annotated[int | None, of_model(help="Number of key-value heads. Equal to --heads without grouping.")]
KVChannels = Annotated[int | None, of_model(help="Outputs of one attention head.")]
VocabSize = Annotated[int | None, of_model(help="Rows of the embedding and the output layer to keep. Default: all.")]


def numbers_of(**given: int | None) -> Numbers:
    """The numbers that were given."""
    return Numbers(**{name: value for name, value in given.items() if value is not None})


@contextmanager
def importing() -> Iterator[None]:
    """Import modules within this context, without garbage collection. Until torch is there, Python's collector would
    scan the new objects again and again, and once more at the end: a third of the startup time."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def opened(path: Path, format: str, module: str | None = None) -> tuple[str, Checkpoint]:
    """The format's name and the checkpoint, or one module of it."""
    with importing():
        from lwopt_backend.checkpoint import contents as contents

    found = formats.find(path, format)
    checkpoint = formats.read(path, found)
    if module is None:
        return found, checkpoint
    from lwopt_backend.checkpoint.convert import of_module

    return found, of_module(checkpoint, module)


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint, in which ``path`` may be a file."""
    return path.parent if path.is_file() else path


@contextmanager
def progress(what: str, total: int, silent: bool) -> Iterator[Callable[[LazyTensor, int, Tensor], None]]:
    """A bar of ``total`` bytes on standard error; if that is no terminal, as in a job's log, a line each minute.
    Yields a function that takes what was read, as ``contents.watched`` calls it."""
    console = Console(stderr=True)
    done, begun, said = 0, time.monotonic(), time.monotonic()

    def advance(tensor: LazyTensor, start: int, found: Tensor) -> None:
        nonlocal done, said
        count = found.nbytes
        done += count
        bar.advance(task, count)
        if bar.disable and not silent and (now := time.monotonic()) - said > PATIENCE:
            left = (now - begun) * (total - done) / done
            console.print(f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {left:.0f} s left")
            said = now

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    disable = silent or not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(what, total=total)
        yield advance


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's facts as plain data; sizes in bytes."""
    states: dict[str, dict[str, Any]] = {}
    for param in checkpoint.params.values():
        for key, tensor in param.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            nothing = {"state": key, "dtype": dtype, "tensors": 0, "elements": 0, "size": 0}
            entry = states.setdefault(f"{key}, {dtype}", nothing)
            entry["tensors"] += 1
            entry["elements"] += tensor.numel
            entry["size"] += tensor.nbytes
    found = list(states.values())
    if buffers := checkpoint.buffers.values():
        sums = {"elements": sum(t.numel for t in buffers), "size": sum(t.nbytes for t in buffers)}
        found.append({"state": "buffers", "dtype": "", "tensors": len(buffers), **sums})
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
    """Print ``found`` as JSON; other values become strings."""
    typer.echo(json.dumps(_plain(found), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    is_plain = isinstance(value, (bool, int, str, type(None))) or isinstance(value, float) and math.isfinite(value)
    return value if is_plain else str(value)


def columns(rows: Sequence[tuple[str, str]]) -> Table:
    """Labels with their values to the right; a long value wraps within its column."""
    grid = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return grid


def print_sentences(console: Console, heading: str, found: Sequence[str]) -> None:
    """A heading and a list under it, or nothing."""
    if found:
        console.print(f"\n{heading}:")
        console.print(columns([("  -", sentence) for sentence in found]))


# ``lwopt convert``: from one system's checkpoint to another's.

DTYPES = ("float32", "bfloat16", "float16")
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WORKERS = 2  # one thread computes checksums while another waits for the disk; each has a tensor in memory
Text = str | None
PLACE = "FILE.py:FUNCTION"
KEEPS_TAG = ("deepspeed", "universal")  # by which Accelerate and Lightning ask DeepSpeed for a checkpoint
BOTH = "expected --names or --map, found both; leave one out"
HELP = {
    "names": f"Naming scheme of the output. One of {FAMILIES}. Default: keep names.",
    "map": "Your own map of names: a Python file, which is run, and a function in it.",
    "source names": "Naming scheme of the source, if the checkpoint does not record it.",
    "dtype": f"Dtype of weights in safetensors: {', '.join(DTYPES)}. Default: keep dtypes.",
    "workers": "Number of tensors processed in parallel. Memory holds that many.",
    "module": "Only this module: parameters whose names begin with it, under the rest of their names.",
    "module of a": "Only this module of A, as in lwopt convert.",
    "tied": "Treat the first name as another name of the second parameter, not as a frozen copy. Repeatable.",
    "compared names": f"Naming scheme for the comparison. One of {FAMILIES}. Default: keep names, or those of the side "
    "that does not have Megatron's if the other has.",
    "names a": "Naming scheme of A, if A does not record it, as in a saved model.",
    "compared map": "Your own map of A's names to those of B, as in lwopt convert: a file that is run.",
    "tensors": "List the tensors whose names match, '*' for all: name, state, shape, dtype, size.",
    "weights": "Compare weights only, e.g. with an export that has no optimizer state.",
}


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the checkpoint to convert.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[str, typer.Option(help=f"Format to write: {', '.join(TARGETS)}.")],
    format: Annotated[str, typer.Option("--from", help=f"Format of the checkpoint. One of {FORMATS}.")] = AUTO,
    module: Annotated[Text, typer.Option("--module", help=HELP["module"])] = None,
    vocabulary: Annotated[Text, typer.Option("--names", help=HELP["names"])] = None,
    source_names: Annotated[Text, typer.Option("--source-names", help=HELP["source names"])] = None,
    map_of_names: Annotated[Text, typer.Option("--map", metavar=PLACE, help=HELP["map"])] = None,
    dtype: Annotated[Text, typer.Option(help=HELP["dtype"])] = None,
    workers: Annotated[int, typer.Option(min=1, help=HELP["workers"])] = WORKERS,
    tied: Annotated[list[str] | None, typer.Option("--tied", metavar="NAME=NAME", help=HELP["tied"])] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything except writing.")] = False,
    as_json: AsJSON = False,
    heads: Heads = None,
    query_groups: QueryGroups = None,
    kv_channels: KVChannels = None,
    vocab_size: VocabSize = None,
) -> None:
    """Convert a checkpoint with its weights, optimizer state, counters and schedule.

    Tensors are checked as they are copied; the destination appears at the end, whole, or not at all.
    """
    with importing():
        from lwopt_backend.checkpoint import companions, contents, gates, names, ties
        from lwopt_backend.checkpoint import convert as conversion
        from lwopt_backend.checkpoint.files import folders

    options = _options(to, dtype)
    numbers = numbers_of(heads=heads, query_groups=query_groups, kv_channels=kv_channels, vocab_size=vocab_size)
    for given in (vocabulary, source_names):
        if given is not None:
            names.find(given)
    if vocabulary is not None and map_of_names is not None:
        raise CheckpointError(BOTH)
    target = vocabulary if map_of_names is None else names.load_map(map_of_names)
    source = folder_of(source)
    reader, found = opened(source, format, module)
    found = ties.declared(found, tied or ())
    along = [] if module else companions.beside(source, reader, to)
    found = companions.with_schedule(found, along)
    taken = companions.contents(found, along, to, dtype and SHORT.get(dtype, dtype))
    tag = formats.step_path(source, reader).name if reader in KEEPS_TAG else None
    into = conversion.destination_of(found, to, destination, tag, taken)
    folders.refuse_existing(into.folder)  # before hours are spent on reading
    companions.refuse_others(into.root, taken)
    stored = conversion.needed(found, to, options.get("dtype"), vocab_size)
    checks, started, notes = gates.Checks(stored), time.monotonic(), gates.on_state(found)
    with progress("converting", contents.nbytes(stored), as_json) as advance:
        seen = contents.watched(stored, checks.see, advance)
        made = conversion.prepared(seen, to, target, source_names, numbers)
        result = _as_written(made, to)
        if dry_run:
            gates.read_all(seen, workers)
            notes += checks.finish()
        else:
            conversion.write(made, to, into, lambda: notes.extend(checks.finish()), workers=workers, **options)
    notes += companions.missing(taken, to, into.folder)
    counts = conversion.counted(found, to)
    summary = {
        "source": {"path": str(source), "reader": reader, **described(found)},
        "result": {"path": str(into.folder), "written": not dry_run, **described(result)},
        "tensors": counts,
        "files": [*taken],
        "notes": [*made.notes, *notes, *conversion.left_out(counts)],
        "seconds": time.monotonic() - started,
    }
    print_json(summary) if as_json else _show_conversion(summary)


def _options(to: str, dtype: str | None) -> dict[str, Any]:
    """The writer's options. Raises CheckpointError for unknown values and for options of another target."""
    if to not in TARGETS:
        raise CheckpointError(f"--to: unknown target {to!r}; {suggestion(to, TARGETS)}")
    if dtype is not None and to != "safetensors":
        raise CheckpointError(f"--dtype: expected --to safetensors, found --to {to}; leave it out")
    name = dtype and SHORT.get(dtype, dtype)
    if name is not None and name not in DTYPES:
        raise CheckpointError(f"unknown --dtype {dtype!r}; {suggestion(name, DTYPES)}")
    if to != "safetensors":
        return {}
    import torch

    return {"dtype": name and getattr(torch, name)}


def _as_written(made: Checkpoint, to: str) -> Checkpoint:
    """The checkpoint as the target stores it: FSDP2's weights are the masters."""
    from lwopt_backend.checkpoint.contents import MASTER

    params = dict(made.params)
    if to in formats.ON_FSDP2:
        for name, param in params.items():
            kept = {key: tensor for key, tensor in param.states.items() if key != MASTER}
            params[name] = dataclasses.replace(param, weight=param.best, states=kept)
    return dataclasses.replace(made, params=params, format=formats.FORMATS[to].written, version="")


def _show_conversion(summary: Mapping[str, Any]) -> None:
    from lwopt_backend.engines.output import binary_units, standard_output

    console = standard_output()
    before, after = summary["source"], summary["result"]
    rows = []
    for word, side in (("from", before), ("to", after)):
        step = "" if side["step"] is None else f", step {side['step']}"
        count = f"{side['parameters']:,} parameters of {side['elements']:,} elements"
        rows += [(word, side["path"]), ("", f"{side['format']} {side['version']}".strip() + step)]
        rows += [("", f"{count}, names of {side['names']}")]
    console.print(columns(rows))
    figures = [Column(heading, justify="right", no_wrap=True) for heading in ("from", "size", "to", "size")]
    table = Table("state", "dtype", *figures)
    sides = [{(entry["state"], entry["dtype"]): entry for entry in side["states"]} for side in (before, after)]
    for key in {**sides[0], **sides[1]}:
        entries = [side.get(key) for side in sides]
        cells = [(f"{entry['tensors']:,}", binary_units(entry["size"])) if entry else ("–", "–") for entry in entries]
        table.add_row(*key, *cells[0], *cells[1])
    table.add_section()
    table.add_row("all", "", "", binary_units(before["size"]), "", binary_units(after["size"]))
    console.print(table)
    if counts := summary["tensors"]["in_folder"]:
        left = len(summary["tensors"]["left_out"])
        console.print(f"\nOf {counts:,} tensors in the folder, {counts - left:,} are converted, {left:,} left out.")
    if summary["files"]:
        console.print(f"\nTaken along: {', '.join(summary['files'])}.")
    print_sentences(console, "Notes", summary["notes"])
    took = f" in {summary['seconds']:.0f} s, {binary_units(after['size'] / max(summary['seconds'], 1e-9))} a second"
    said = f"Written to {after['path']}{took}." if after["written"] else "Nothing was written (--dry-run)."
    console.print(f"\n{said}")


# ``lwopt inspect``: a checkpoint's facts and problems.

OPTIONS = ("module", "lr", "weight_decay", "momentum", "momentum_beta", "betas", "eps", "rule")
UNCHECKED = "Tensors were not read (--no-check), so only missing ones were noticed."


def inspect(
    path: Folder,
    format: Annotated[str, typer.Option("--from", help=f"Format of the checkpoint. One of {FORMATS}.")] = AUTO,
    check: Annotated[bool, typer.Option(help="Read every tensor and look for problems.")] = True,
    tensors: Annotated[Text, typer.Option("--tensors", metavar="GLOB", help=HELP["tensors"])] = None,
    as_json: AsJSON = False,
) -> None:
    """Show a checkpoint: format, version, world size, step, parameters, states, size, problems.

    The exit code is 1 if there are problems, and 2 if it cannot be read.
    """
    path = folder_of(path)
    reader, checkpoint = opened(path, format)
    rows = None if tensors is None else _matching(checkpoint, tensors)
    problems, advice, notes = _checked(checkpoint, as_json) if check else ([], "", [UNCHECKED])
    files = [file for file in formats.step_path(path, reader).rglob("*") if file.is_file()]
    found = {
        **{"path": str(path), "reader": reader, **described(checkpoint)},
        **{"files": len(files), "size_of_files": sum(file.stat().st_size for file in files)},
        **{"notes": [*checkpoint.notes, *notes], "problems": problems, "advice": advice},
        **({} if rows is None else {"tensors": rows}),
    }
    print_json(found) if as_json else _show_contents(found, check)
    if problems:
        typer.secho(f"error: {path} has problems ({len(problems)})", fg="red", err=True)
        raise typer.Exit(1)


def _matching(checkpoint: Checkpoint, glob: str) -> list[dict[str, Any]]:
    """The tensors whose names match, with state, shape, dtype and size in bytes. The name is the parameter's or the
    buffer's, or with the state's after a dot. Raises CheckpointError if there are none."""
    named = [(name, key, t) for name, param in checkpoint.params.items() for key, t in param.tensors.items()]
    named += [(name, "buffer", buffer) for name, buffer in checkpoint.buffers.items()]
    found = [each for each in named if any(fnmatchcase(text, glob) for text in (each[0], ".".join(each[:2])))]
    if not found:
        names = [*dict.fromkeys(name for name, *_ in named)]
        raise CheckpointError(f"--tensors: no tensor has a name like {glob!r}; {glob_suggestion(glob, names)}")
    return [
        {"name": name, "state": key, "shape": list(t.shape), "dtype": str(t.dtype)[6:], "size": t.nbytes}
        for name, key, t in found
    ]


def _checked(checkpoint: Checkpoint, silent: bool) -> tuple[list[str], str, list[str]]:
    """Read every tensor. Returns the problems, advice if there is any, and notes."""
    from lwopt_backend.checkpoint import contents, gates

    with progress("checking", contents.nbytes(checkpoint), silent) as advance:
        try:
            return [], "", gates.check(checkpoint, advance)
        except gates.Refused as error:
            return list(error.problems), error.advice, []
        except CheckpointError as error:  # a tensor that cannot be read
            return [str(error)], "", []


def _show_contents(found: Mapping[str, Any], checked: bool) -> None:
    from lwopt_backend.checkpoint.contents import SHOWN
    from lwopt_backend.engines.output import binary_units, standard_output

    console = standard_output()
    world = ", ".join(f"{name} {size}" for name, size in found["world"].items())
    tensors, files = binary_units(found["size"]), binary_units(found["size_of_files"])
    rows = [
        ("path", found["path"]),
        ("format", f"{found['format']} ({found['reader']})"),
        ("version", _said(found["version"])),
        ("names", found["names"]),
        ("world size", _said(found["world_size"]) + f" ({world})" * bool(world)),
        ("step", _said(found["step"])),
        ("samples", _said(found["samples"])),
        ("parameters", f"{found['parameters']:,}, of {found['elements']:,} elements"),
        ("size", f"{tensors} of tensors; {found['files']} file(s), {files}"),
    ]
    if found["owner_states"]:
        rows.append(("owners' state", f"of {found['owner_states']} parameters"))
    if found["tied"]:
        rows.append(("tied", ", ".join(f"{name} is {of}" for name, of in found["tied"].items())))
    for number, group in enumerate(found["groups"]):
        options = {key: group[key] for key in OPTIONS if group.get(key) is not None}
        rows.append((f"group {number}", ", ".join(f"{key} {value}" for key, value in options.items()) or "no options"))
    console.print(columns(rows))
    figures = [Column(heading, justify="right", no_wrap=True) for heading in ("tensors", "elements", "size")]
    table = Table("state", "dtype", *figures)
    for entry in found["states"]:
        counts = (f"{entry['tensors']:,}", f"{entry['elements']:,}", binary_units(entry["size"]))
        table.add_row(entry["state"], entry["dtype"], *counts)
    console.print(table)
    if "tensors" in found:
        listing = Table(Column("tensor", overflow="fold"), "state", "shape", "dtype", Column("size", justify="right"))
        for each in found["tensors"]:
            shape = " x ".join(map(str, each["shape"])) or "a number"
            listing.add_row(each["name"], each["state"], shape, each["dtype"], binary_units(each["size"]))
        console.print(listing)
    problems = found["problems"][:SHOWN]
    more = len(found["problems"]) - len(problems)
    problems += [f"and {more} more; --json has all of them"] * bool(more)
    print_sentences(console, "Notes", found["notes"])
    print_sentences(console, "Problems", problems)
    if found["advice"]:
        console.print(f"\n{found['advice']}.")
    if checked and not found["problems"]:
        console.print("\nNo problems found.")


def _said(value: object) -> str:
    return "not said" if value in (None, "") else str(value)


# ``lwopt diff``: two checkpoints, tensor by tensor.

SHOWN = 30
UNNAMED = "model"  # the names of checkpoints that do not record them


def diff(
    a: Folder,
    b: Annotated[Path, typer.Argument(help="Folder of the other checkpoint.")],
    format_a: Annotated[str, typer.Option("--from-a", help="Format of A, as --from.")] = AUTO,
    format_b: Annotated[str, typer.Option("--from-b", help="Format of B, as --from.")] = AUTO,
    module: Annotated[Text, typer.Option("--module", help=HELP["module of a"])] = None,
    vocabulary: Annotated[Text, typer.Option("--names", help=HELP["compared names"])] = None,
    names_a: Annotated[Text, typer.Option("--names-a", help=HELP["names a"])] = None,
    names_b: Annotated[Text, typer.Option("--names-b", help="Naming scheme of B, if B does not record it.")] = None,
    map_of_names: Annotated[Text, typer.Option("--map", metavar=PLACE, help=HELP["compared map"])] = None,
    weights: Annotated[bool, typer.Option("--weights", help=HELP["weights"])] = False,
    as_json: AsJSON = False,
    heads: Heads = None,
    query_groups: QueryGroups = None,
    kv_channels: KVChannels = None,
    vocab_size: VocabSize = None,
) -> None:
    """Compare two checkpoints of any formats: weights, states, counters, buffers, param groups, the scheduler's state
    and entries of the user's program.

    The exit code is 1 if they differ, and 2 if one cannot be read.
    """
    from lwopt_backend.checkpoint import contents, names
    from lwopt_backend.checkpoint.differences import differences, of_runs

    ours, theirs = opened(folder_of(a), format_a, module)[1], opened(folder_of(b), format_b)[1]
    numbers = numbers_of(heads=heads, query_groups=query_groups, kv_channels=kv_channels, vocab_size=vocab_size)
    if vocabulary is not None and map_of_names is not None:
        raise CheckpointError(BOTH)
    said = {names_a or ours.names, names_b or theirs.names}
    if map_of_names is not None:
        ours, names_a = names.translate(ours, names.load_map(map_of_names), numbers, source=names_a), None
    elif vocabulary is None and (numbers != Numbers() or names.CORE in said <= {*names.FAMILIES}):
        vocabulary = next(iter(said & {*names.FAMILIES} - {names.CORE}), names.CORE)
    notes: list[str] = []
    ours = _under(ours, "a", vocabulary, names_a, numbers, notes)
    theirs = _under(theirs, "b", vocabulary, names_b, numbers, notes)
    if not set(ours.params) & set(theirs.params):
        notes.append(
            f"No parameter has the same name in both: A has names such as {next(iter(ours.params), 'none')}, B such as "
            f"{next(iter(theirs.params), 'none')}. Give --names-a and --names-b."
        )
    for side, checkpoint in (("A", ours), ("B", theirs)):
        if not weights and not any(param.states for param in checkpoint.params.values()):
            notes.append(f"{side} has no optimizer state; --weights compares weights only.")
    with progress("comparing", contents.nbytes(ours) + contents.nbytes(theirs), as_json) as advance:
        watched = [contents.watched(each, advance) for each in (ours, theirs)]
        compared = list(differences(watched[0], watched[1], weights))
    equal = sum(not entry.what for entry in compared)
    different = [entry for entry in compared if entry.what] + ([] if weights else [*of_runs(ours, theirs)])
    found = {
        **{"a": str(a), "b": str(b), "parameters": len({**ours.params, **theirs.params})},
        **{"equal": equal, "different": [dataclasses.asdict(entry) for entry in different]},
        "notes": notes,
    }
    print_json(found) if as_json else _show_differences(found, different)
    if different:
        raise typer.Exit(1)


def _under(
    checkpoint: Checkpoint, side: str, vocabulary: str | None, source: str | None, numbers: Numbers, notes: list[str]
) -> Checkpoint:
    """Rename to ``vocabulary``. Names of unknown origin are assumed to be of that vocabulary, with a note."""
    from lwopt_backend.checkpoint import names

    if source is None and vocabulary is not None and checkpoint.names == UNNAMED:
        source = vocabulary
        notes.append(
            f"{side.upper()} does not record the vocabulary of its names; {vocabulary} is assumed. If it is another, "
            f"give --names-{side}."
        )
    if vocabulary is None and source is None:
        return checkpoint
    return names.translate(checkpoint, vocabulary or source or "", numbers, source=source)


def _show_differences(found: Mapping[str, Any], different: Sequence[Compared]) -> None:
    from lwopt_backend.engines.output import standard_output

    console = standard_output()
    console.print(columns([("A", found["a"]), ("B", found["b"])]))
    if different:
        names = (Column("parameter", overflow="fold", ratio=3), Column("tensor", overflow="fold", ratio=1))
        table = Table(*names, Column("difference", ratio=2), Column("largest", justify="right", no_wrap=True))
        for entry in different[:SHOWN]:
            table.add_row(entry.name, entry.key, entry.what, f"{entry.largest:.3g}" if entry.elements else "")
        console.print(table)
        if len(different) > SHOWN:
            console.print(f"and {len(different) - SHOWN} more; --json has all of them")
    print_sentences(console, "Notes", found["notes"])
    count = f"{found['equal']:,} tensors and counters of {found['parameters']:,} parameters"
    console.print(f"\n{count} are equal, {len(different):,} differ.")
