"""``lwopt rules``: what a configuration may name; ``lwopt migrate``: an optimizer entry of DeepSpeed's in our words."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table


def rules(
    name: Annotated[str | None, typer.Argument(help="Show this rule only, and no hosts.")] = None,
    class_path: Annotated[
        str | None, typer.Option("--class", metavar="PATH", help="The optimizer whose arguments torch_optimizer has.")
    ] = None,
    imports: Annotated[
        list[str] | None, typer.Option("--import", metavar="MODULE", help="A module that registers rules; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the rules and hosts that a configuration may name, and their options with default, meaning and source."""
    from lwopt_backend.cli.rule_facts import rule_facts
    from lwopt_backend.report import standard_output

    sys.path.insert(0, "")
    for module in imports or ():
        try:
            importlib.import_module(module)
        except (ImportError, TypeError, ValueError) as error:  # TypeError: of ".a"
            raise ImportError(f"--import {module!r}: cannot be imported: {error}") from error
    with redirect_stdout(sys.stderr):  # a class may come from a package that prints when it is imported
        found = rule_facts(name, class_path)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    console = standard_output()
    table = Table("rule", "for", "state", "cost", "source", title="Rules")
    for rule in found["rules"]:
        table.add_row(*(rule[key] for key in ("name", "for", "state", "cost", "source")))
    console.print(table)
    for rule in found["rules"]:
        titled = _table(f"{rule['name']}, for {rule['for']}", rule["options"])
        console.print(f"{rule['name']}: {rule['note']}" if rule["note"] else titled)
    for host in found["hosts"]:
        console.print(_table(f"on {host['name']}, for the whole optimizer", host["options"]))
    if found["atoms"]:
        console.print(_table("a division in atoms", found["atoms"]))


def _table(title: str, options: Sequence[Mapping[str, str]]) -> Table:
    columns = ("default", "meaning", "source")
    table = Table("option", *columns, title=title)
    for option in options:
        table.add_row(option["name"], *(option[key] for key in columns))
    return table


def migrate(
    config: Annotated[Path, typer.Argument(help="A ds_config.json with an entry of DeepSpeed's Muon, Adam or AdamW.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the whole configuration there.")] = None,
) -> None:
    """Print the optimizer entry that trains the same with this package, and what changes."""
    from lwopt_backend.checkpoint.files.folders import write_whole
    from lwopt_backend.config.choices import muon_settings
    from lwopt_backend.config.options import ADAMW_BETAS, suggestion, translated
    from lwopt_backend.planner.shapes import read_json

    content = read_json(config, "a configuration of DeepSpeed")
    entry = content.get("optimizer") if isinstance(content, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(entry.get("type"), str):
        raise ValueError(f"{config}: expected an object 'optimizer' with a 'type', found {entry!r}")
    kind, params = entry["type"].lower(), entry.get("params") or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"{config}: optimizer.params: expected an object, found {params!r}")
    marks: dict[str, dict[str, object]] = {
        "muon": {"per_head_muon": False},
        **dict.fromkeys(("adam", "adamw"), {"betas": list(ADAMW_BETAS)}),
    }
    if kind in ("layerwise", "layerwisemuon"):
        raise ValueError(f"{config}: the type is {entry['type']!r}; there is nothing to do")
    if kind not in marks:
        known = suggestion(entry["type"], ["Muon", "Adam", "AdamW"])
        raise ValueError(f"{config}: the type {entry['type']!r} has no counterpart; {known}")
    if "auto" in params.values():
        made: dict[str, object] = {**marks[kind], **params}
        note = "values of 'auto' are filled in by the Trainer or Accelerate, and the entry is then read as it was meant"
    else:
        made, told = translated({**marks[kind], **params}, str(config))
        muon_settings(made, str(config))  # refuses what cannot be trained
        note = (told or "").rpartition("; ")[2] if kind == "muon" else "matrices are trained by Muon, the rest by AdamW"
    new = {"type": "LayerWiseMuon", "params": made}
    typer.echo(json.dumps({"optimizer": new}, indent=2))
    for line in (note, "the table that is printed at the start says which parameters are matrices, and why"):
        typer.echo(f"Note: {line}.", err=True)
    if output is not None:
        write_whole(output, (json.dumps({**content, "optimizer": new}, indent=2) + "\n").encode())
