"""The command ``lwopt``: its commands, and how their errors are shown."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from lwopt_backend.checkpoint.errors import DEBUG
from lwopt_backend.cli.checkpoints import convert, diff, inspect
from lwopt_backend.cli.env import env
from lwopt_backend.cli.plan import plan
from lwopt_backend.cli.rules import rules
from lwopt_backend.config.options import DISTRIBUTION

app = typer.Typer(
    name="lwopt",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        raise typer.Exit()


@app.callback()
def with_version(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Plan layer-wise optimizers; convert, inspect and compare checkpoints; list rules and versions."""


for command in (plan, convert, inspect, diff):
    app.command(no_args_is_help=True)(command)
app.command()(rules)
app.command()(env)


# What typer raises for wrong words on the command line; it names only some of the classes derived from it.
WrongWords: type[Exception] = typer.BadParameter.__mro__[2]


def main(commands: Callable[..., Any] = app) -> None:
    """Run a command. An error that the user can fix is one line and exit code 2; LWOPT_DEBUG=1 shows its traceback."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes unfinished folders
    try:
        code = commands(standalone_mode=False)  # otherwise typer draws a box around an error
    except WrongWords as error:
        said = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        _fail(said.replace("Value error, ", ""))
    except typer.Abort:
        raise SystemExit(130) from None
    except (ValueError, OSError, ImportError, MemoryError) as error:
        sys.stdout.flush()
        if os.environ.get(DEBUG) == "1":
            traceback.print_exc()
        _fail("not enough memory" if isinstance(error, MemoryError) else str(error))
    finally:
        signal.signal(signal.SIGTERM, before)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(said: str) -> NoReturn:
    """End with one line. Nothing is said where typer shows the help in place of an error."""
    first, *rest = said.split("\n")
    if said:
        line = ": ".join([first.removesuffix(":"), "; ".join(map(str.strip, rest))]) if rest else first
        typer.secho(f"error: {line}", fg="red", err=True)
    raise SystemExit(2) from None
