"""The command ``lwopt``: its commands, and how their errors are shown."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import typer

from lwopt_backend.checkpoint.formats import DEBUG
from lwopt_backend.cli.checkpoints import convert, diff, inspect
from lwopt_backend.cli.env import env
from lwopt_backend.cli.plan import plan
from lwopt_backend.cli.rules import rules

app = typer.Typer(
    name="lwopt",
    help="Plan layer-wise optimizers; convert, inspect and compare checkpoints; list rules and versions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (plan, convert, inspect, diff):
    app.command(no_args_is_help=True)(command)
app.command()(rules)
app.command()(env)


def main(commands: Callable[[], None] = app) -> None:
    """Run a command. An error that the user can fix is one line and exit code 2; LWOPT_DEBUG=1 shows its traceback."""
    try:
        commands()
    except (ValueError, OSError, ImportError, MemoryError) as error:
        sys.stdout.flush()
        if os.environ.get(DEBUG) == "1":
            traceback.print_exc()
        said = "not enough memory" if isinstance(error, MemoryError) else error
        typer.secho(f"error: {said}", fg="red", err=True)
        raise SystemExit(2) from None
