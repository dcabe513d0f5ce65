"""``lwopt inspect``: what a checkpoint is, and whether it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lwopt_backend.checkpoint.choices import AUTO
from lwopt_backend.checkpoint.errors import CheckpointError
from lwopt_backend.cli.checkpoint_options import (
    FORMATS,
    AsJSON,
    columns,
    described,
    opened,
    print_json,
    progress,
    sentences,
)

if TYPE_CHECKING:
    from lwopt_backend.checkpoint.contents import Checkpoint

OPTIONS = ("lr", "weight_decay", "momentum", "momentum_beta", "betas", "eps", "rule")
UNCHECKED = "Tensors were not read (--no-check), so that only missing ones were noticed."


def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder.")],
    format: Annotated[str, typer.Option("--from", help=f"Its format: {FORMATS}.")] = AUTO,
    check: Annotated[bool, typer.Option(help="Read every tensor and look for problems.")] = True,
    as_json: AsJSON = False,
) -> None:
    """Show what a checkpoint is: format, version, world size, step, parameters, states, size, problems.

    The exit code is 1 if there are problems, and 2 if it cannot be read.
    """
    reader, checkpoint = opened(path, format)
    problems, advice, notes = _checked(checkpoint, as_json) if check else ([], "", [UNCHECKED])
    files = [file for file in path.rglob("*") if file.is_file()]
    found = {
        **{"path": str(path), "reader": reader.name, **described(checkpoint)},
        **{"files": len(files), "size_of_files": sum(file.stat().st_size for file in files)},
        **{"notes": [*checkpoint.notes, *notes], "problems": problems, "advice": advice},
    }
    print_json(found) if as_json else _show(found, check)
    if problems:
        typer.secho(f"error: {path} has problems ({len(problems)})", fg="red", err=True)
        raise typer.Exit(1)


def _checked(checkpoint: Checkpoint, silent: bool) -> tuple[list[str], str, list[str]]:
    """Problems, what to do about them if that is known, and notes; every tensor is read."""
    from lwopt_backend.checkpoint import convert, gates

    with progress(silent) as bar:
        task = bar.add_task("checking", total=convert.nbytes(checkpoint))
        try:
            return [], "", gates.check(convert.watched(checkpoint, lambda count: bar.advance(task, count)))
        except gates.Refused as error:
            return list(error.problems), error.advice, []
        except CheckpointError as error:  # a tensor that cannot be read
            return [str(error)], "", []


def _show(found: Mapping[str, Any], checked: bool) -> None:
    from lwopt_backend.checkpoint.gates import SHOWN
    from lwopt_backend.cli.tables import terminal
    from lwopt_backend.report import nbytes

    console = terminal()
    world = ", ".join(f"{name} {size}" for name, size in found["world"].items())
    rows = [
        ("path", found["path"]),
        ("format", f"{found['format']} ({found['reader']})"),
        ("version", _said(found["version"])),
        ("names", found["names"]),
        ("world size", _said(found["world_size"]) + f" ({world})" * bool(world)),
        ("step", _said(found["step"])),
        ("samples", _said(found["samples"])),
        ("parameters", f"{found['parameters']:,}, of {found['elements']:,} elements"),
        ("size", f"{nbytes(found['size'])} of tensors; {found['files']} file(s), {nbytes(found['size_of_files'])}"),
    ]
    if found["owner_states"]:
        rows.append(("owners' state", f"of {found['owner_states']} parameters"))
    if found["tied"]:
        rows.append(("tied", ", ".join(f"{name} is {of}" for name, of in found["tied"].items())))
    for number, group in enumerate(found["groups"]):
        options = {key: group[key] for key in OPTIONS if group.get(key) is not None}
        rows.append((f"group {number}", ", ".join(f"{key} {value}" for key, value in options.items()) or "no options"))
    console.print(columns(rows))
    table = Table("state", "dtype")
    for heading in ("tensors", "elements", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in found["states"]:
        counts = (f"{entry['tensors']:,}", f"{entry['elements']:,}", nbytes(entry["size"]))
        table.add_row(entry["state"], entry["dtype"], *counts)
    console.print(table)
    problems = found["problems"][:SHOWN]
    more = len(found["problems"]) - len(problems)
    problems += [f"and {more} more; --json has all of them"] * bool(more)
    for part in (*sentences("Notes", found["notes"]), *sentences("Problems", problems)):
        console.print(part)
    if found["advice"]:
        console.print(f"\n{found['advice']}.")
    if checked and not found["problems"]:
        console.print("\nNo problems found.")


def _said(value: object) -> str:
    return "not said" if value in (None, "") else str(value)
