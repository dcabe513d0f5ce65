"""The commands, and how their errors are shown."""

from __future__ import annotations

import sys

import typer

from lwopt_backend.cli.calibrate_command import calibrate
from lwopt_backend.cli.convert_command import convert
from lwopt_backend.cli.diff_command import diff
from lwopt_backend.cli.inspect_command import inspect
from lwopt_backend.cli.plan_command import plan
from lwopt_backend.cli.rules_command import rules
from lwopt_backend.cli.simulate_command import simulate

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
