"""The README and the pages in docs/, by name, and the blocks and tables that they have."""

import re
from pathlib import Path
from typing import NamedTuple

from tests.support.launcher import ROOT

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text() for path in DOCS.rglob("*.md")}
PAGES["README"] = (ROOT / "README.md").read_text()


class Block(NamedTuple):
    language: str
    name: str
    text: str


def blocks(page: str, language: str = r"\w+", name: str = "") -> list[Block]:
    """All of a page, or those of a language or a name. A block ``diff LANGUAGE`` is its new side, in that language."""
    text = re.sub(r"^```diff (\w+)\n(.*?)^```$", new_side, PAGES[page], flags=re.MULTILINE | re.DOTALL)
    found = re.findall(rf"^```({language})(?: (\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for block in map(Block._make, found) if name in ("", block.name)]


def new_side(diff: re.Match[str]) -> str:
    lines = [line for line in diff[2].splitlines(keepends=True) if not line.startswith("-")]
    return f"```{diff[1]}\n{''.join(line[2:] for line in lines)}```"


def section(page: str, heading: str) -> str:
    (found,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGES[page], re.MULTILINE | re.DOTALL)
    return found


def table(page: str, heading: str, first: str = "") -> list[list[str]]:
    """The cells of a section's first table, or of that whose head begins so: the head, and the rows."""
    tables = re.findall(r"(?:^\|.*\n?)+", section(page, heading), re.MULTILINE)
    head, _, *rows = next(one for one in tables if one.startswith(f"| {first} |" if first else "|")).splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" |")] for row in (head, *rows)]


def unpack_page(page: str, name: str, folder: Path, python: str | Path) -> str:
    """Write a page's script into ``folder``; returns the command that the page gives for it, for that ``python``."""
    (script,) = blocks(page, "python", name)
    (command,) = [block for block in blocks(page, "bash", "run") if name in block.text]
    (folder / script.name).write_text(script.text)
    return command.text.replace("torchrun", f"{python} -m torch.distributed.run")
