"""The commands, and how their errors are shown."""

from __future__ import annotations

import sys

import typer

from lwopt_backend.cli.checkpoints import convert, diff, inspect
from lwopt_backend.cli.plan import plan
from lwopt_backend.cli.rules import rules
from lwopt_backend.cli.simulate import calibrate, simulate

app = typer.Typer(
    name="lwopt",
    help="Plan layer-wise sharding before booking a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (plan, simulate, calibrate, convert, inspect, diff):
    app.command(no_args_is_help=True)(command)
app.command()(rules)


def main() -> None:
    """Run a command; what a user can mend is one line and exit code 2, not a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError, MemoryError) as error:
        sys.stdout.flush()
        said = "not enough memory" if isinstance(error, MemoryError) else error
        typer.secho(f"error: {said}", fg="red", err=True)
        raise SystemExit(2) from None
