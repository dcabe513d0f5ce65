"""``lwopt rules``: the rules and engines for configurations."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Annotated

import typer
from rich.table import Column, Table

WIDE = 100  # characters that a column of sources needs


def rules(
    name: Annotated[str | None, typer.Argument(help="Show only this rule.")] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Import a module that registers rules. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the rules and engines that a configuration may name, with the default, meaning and source of each option."""
    from lwopt_backend.cli.rule_facts import rule_facts
    from lwopt_backend.engines.output import standard_output

    sys.path.insert(0, "")
    for module in imports or ():
        try:
            importlib.import_module(module)
        except (ImportError, TypeError, ValueError) as error:  # TypeError: of ".a"
            raise ImportError(f"--import {module!r}: cannot be imported: {error}") from error
    with redirect_stdout(sys.stderr):  # some packages print when they are imported
        found = rule_facts(name)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    console = standard_output()
    table = Table(*_texts("rule", "for", "state", "cost", "source"), title="Rules")
    for rule in found["rules"]:
        table.add_row(*(rule[key] for key in ("name", "for", "state", "cost", "source")))
    console.print(table)
    if found["published"]:
        console.print(_named(found["published"]))
    for rule in found["rules"]:
        titled = _table(f"{rule['name']}, for {rule['for']}", rule["options"], console.width)
        console.print(f"{rule['name']}: {rule['note']}" if rule["note"] else titled)
    for host in found["hosts"]:
        console.print(_table(f"on {host['name']}, for the whole optimizer", host["options"], console.width))
    if found["atoms"]:
        console.print(_table("a division in atoms", found["atoms"], console.width))


def _named(rows: Sequence[Mapping[str, str]]) -> Table:
    columns = _texts("published as", "rule", "options", "state", "sent", "equals one process")
    table = Table(*columns, title="By their names")
    for row in rows:
        table.add_row(*row.values())
    return table


def _table(title: str, options: Sequence[Mapping[str, str]], width: int) -> Table:
    """Where there is no room for a column of sources, they are beside the meanings, so that no value to write is
    broken."""
    if width < WIDE:
        options = [{**option, "meaning": f"{option['meaning']} ({option['source']})"} for option in options]
    columns = ("default", "meaning", "source")[: 2 if width < WIDE else 3]
    table = Table(*_texts("option", *columns), title=title)
    for option in options:
        table.add_row(option["name"], *(option[key] for key in columns))
    return table


def _texts(*headings: str) -> list[Column]:
    """Columns of a table, none of which is cut: what is too long for its line goes on in the next."""
    return [Column(heading, overflow="fold", no_wrap=heading in ("option", "default")) for heading in headings]
