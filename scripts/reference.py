"""Write what is made from declarations in docs/: a page; tables in api.md, options.md, optimizers.md, tested.md.

`python scripts/reference.py` writes them; tests/docs/test_pages.py fails if they are not what this would write.
"""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from lwopt_backend.cli import app
from lwopt_backend.cli.rule_facts import declared, rule_facts
from lwopt_backend.config.hosts import HOSTS, HostConfig
from lwopt_backend.config.options import options_in
from lwopt_backend.config.versions import VERSIONS

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE, END = "<!-- Made by `python scripts/reference.py`. -->", "<!-- To here. -->"
MEGATRON = f"""# Megatron's names here

{MADE}

**What is this name of Megatron-Core called here?** Each row has a name of Megatron-Core 0.19.2, what it is in this
package and, in the checkout's page, the test that checks it: a file in `tests/`, and the test's name in words.
The rows are in `docs/data/megatron_names.csv`. [From Megatron-LM](from_megatron.md) moves checkpoints and runs, and
[the table of flags](migration.md#megatrons-dist_muon) has the values of options."""
SYSTEMS = {
    "optimizer": "Layer-wise distributed optimizer",
    "compact": "Compact layout",
    "registry": "Emerging optimizers",
    "modules": "MimoOptimizer",
    "docs": "Documentation",
}
OPTION = ("option", "default", "meaning", "source")
SENT = "2 bytes an element there, 2 back"
LONGEST = 100  # characters of a cell; what a meaning has beyond its first sentence then is below the table
CLASSES = {"soap", "shampoo", "lion", "sgd", "torch_optimizer"}  # whose options others declare


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    parts = {"optimizers.md": [published()], "tested.md": [versions()], "options.md": [*host_options(), rule_options()]}
    parts |= {"api.md": [command_line()]}
    whole = {"megatron_names.md": megatron()}
    return whole | {name: with_parts(name, made) for name, made in parts.items()}


def with_parts(name: str, made: Iterable[str]) -> str:
    """A page with the parts that are made, each between two comments."""
    before, *rest = (DOCS / name).read_text().split(MADE)
    parts = (f"{MADE}\n\n{part}\n\n{END}{after.partition(END)[2]}" for part, after in zip(made, rest, strict=True))
    return before + "".join(parts)


def megatron() -> str:
    rows = megatron_names()
    cells = {of: [[*row[1:3], in_words(row[3])] for row in rows if row[0] == of] for of in SYSTEMS}
    tables = (f"## {SYSTEMS[of]}\n\n{table(('Megatron-Core', 'here', 'test'), cells[of])}" for of in SYSTEMS)
    return "\n\n".join([MEGATRON, *tables]) + "\n"


def megatron_names() -> list[list[str]]:
    """Of each name: whose it is, the name, what it is here, and ``file::function`` of a test."""
    with (DOCS / "data" / "megatron_names.csv").open(newline="") as file:
        return [*csv.reader(file)][1:]


def in_words(test: str) -> str:
    file, _, function = test.partition("::")
    return f"`{file}`: {function.removeprefix('test_').replace('_', ' ')}"


def host_options() -> list[str]:
    """Tables of the options that every host has, and of those that each has in addition."""
    shared = options_in(HostConfig)
    of_hosts = [{k: v for k, v in options_in(config).items() if k not in shared} for config in HOSTS.values()]
    cells = ([option_cells(option)[:-1] for option in declared(some)] for some in (shared, *of_hosts))
    return ["\n\n".join(options_table(rows)) for rows in cells]


def published() -> str:
    """Of each publication, what is not so of most rules: the text above the table says what is."""
    rows = []
    for of in rule_facts(None)["published"]:
        state = of["state"].replace(" where the elements are", "")
        sent = (
            of["sent"]
            .removeprefix(SENT)
            .replace("; ", "also ", of["sent"].startswith(SENT))
            .replace(", every", "every")
        )
        equal = of["equal"].removeprefix("bit for bit").removeprefix("; ")
        options = f"`{of['options']}`" * bool(of["options"])
        rows.append((of["name"], f"`{of['rule']}`", options, state, sent, equal))
    return table(("published as", "rule", "options", "state", "sent", "difference from one process"), rows)


def versions() -> str:
    rows = [[name, f"`{of.supported}`", ", ".join(of.tested), f"`{of.command}`"] for name, of in VERSIONS.items()]
    return table(("package", "supported", "tested", "the command"), rows)


def command_line() -> str:
    commands: Any = typer.main.get_command(app)
    return "\n\n".join(described(*item) for item in commands.commands.items())


def described(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    shown = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in arguments]
    parts = [f"### lwopt {name}", f"```text\n{' '.join(['lwopt', name, *shown, '[OPTIONS]'])}\n```"]
    parts += [" ".join(paragraph.split()) for paragraph in command.help.split("\n\n")]
    if arguments:
        parts.append(table(("argument", "meaning"), [(f"`{p.name.upper()}`", p.help) for p in arguments]))
    hints = get_type_hints(command.callback)
    panels: dict[str | None, list[tuple[str, str, str]]] = {}
    for param in command.params:
        if param.param_type_name == "option" and param.name != "help":
            panels.setdefault(param.rich_help_panel, []).append(option_row(param, hints[param.name]))
    for panel, rows in panels.items():
        parts += [f"**{panel}**"] * bool(panel) + options_table(rows)
    return "\n\n".join(parts)


def option_row(option: Any, hint: Any) -> tuple[str, str, str]:
    meaning = option.help.replace("\\[", "[")
    kinds = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
    choices = [choice for kind in kinds for choice in get_args(kind)]
    if any(choice not in meaning for choice in choices):
        meaning += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    default = option.opts[0] if option.default is True else option.default
    written = "required" if option.required else "" if default in (None, False) else f"`{default}`"
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts)), written, meaning


def rule_options() -> str:
    facts = rule_facts(None)
    columns = ("name", "for", "state", "cost", "source")
    rows = [[f"`{rule['name']}`", *(rule[column] for column in columns[1:])] for rule in facts["rules"]]
    parts = [table(("rule", *columns[1:]), rows)]
    declared = [rule for rule in facts["rules"] if rule["name"] not in CLASSES]
    for number, rule in enumerate(declared):
        parts.append(f"### {rule['name']}")
        like = max(declared[:number], key=lambda other: len(shared(rule, other)), default=rule)
        options = shared(like, rule)
        if like is not rule and 2 * len(options) > len(like["options"]):
            names = {option["name"] for option in rule["options"]}
            missing = [f"`{option['name']}`" for option in like["options"] if option["name"] not in names]
            without = f" without {', '.join(missing)}," if missing else ""
            parts.append(f"As `{like['name']}`,{without} except:")
            options = [option for option in rule["options"] if option not in options]
        else:
            options = rule["options"]
        parts += options_table(map(option_cells, options))
    names = "`, `".join(sorted(CLASSES))
    parts.append(f"### Rules that are classes\n\nThe options of `{names}` are the arguments of their class.")
    parts[-1] += " `lwopt rules soap`\nprints SOAP's, and `lwopt rules emerging_optimizers.soap` those of "
    parts[-1] += "[NVIDIA's](optimizers.md#nvidias-optimizers)."
    parts += ["### A division in atoms", *options_table(map(option_cells, facts["atoms"]))]
    return "\n\n".join(parts)


def shared(rule: Mapping[str, Any], other: Mapping[str, Any]) -> list[Any]:
    """The options that two rules declare alike."""
    return [option for option in rule["options"] if option in other["options"]]


def option_cells(option: Mapping[str, str]) -> tuple[str, ...]:
    return f"`{option['name']}`", f"`{option['default']}`", option["meaning"], option["source"]


def options_table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table of options, and below it what is too long for a cell."""
    cells, below = [], []
    for name, default, meaning, *source in rows:
        first, _, rest = meaning.partition(". ") if len(meaning.replace("`", "")) > LONGEST else (meaning, "", "")
        if rest:
            rest = f"- {name}: {rest.rstrip('.')}."
            below.append(textwrap.fill(rest, 120, subsequent_indent="  ", break_on_hyphens=False))
        cells.append((name, default, first, *source))
    made = [table(OPTION[: len(cells[0])], cells)]
    return [*made, "\n".join(below)] if below else made


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
