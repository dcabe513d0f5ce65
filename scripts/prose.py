"""Find phrases that are not English in the README, docs/, and docstrings, comments and texts of code.

`make check` runs it. Pages are also read by proselint, and have a limit of words, and of characters in a cell.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parent.parent
CODE = ("lwopt_backend", "integrations", "examples", "scripts", "benchmarks", "tests")
START = r"(?:^(?:- |\d\. )?|(?<=[.!?:|]\s))"  # of a sentence, a cell or an item
INSTEAD = {
    r"\bbeside\b(?!\.py)": "compared with, next to, in addition to",
    r"[,;(] else\b|^Else\b": "otherwise",
    r"\bso many\b": "that many",
    r"\bdifferences? to\b": "difference from",
    r"\b(?:go|goes|going|went) by\b": "follows, uses, depends on",
    r"\bof (?:its|their|our) own(?=[.,;:)]|\Z| (?:and|or|is|are|has|on|in|for|with)\b)": "its own X, a separate X",
    rf"{START}Of (?!course)": "the subject first: 'Each X has', not 'Of each X'",
    rf"{START}(?:Whoever|What else)\b": "a noun as the subject",
    rf"{START}[A-Z][a-z]+(?:ed|den|own) (?:is|are)\b": "the subject first",
    r", too\b": "also, before the verb",
    r"\bnot finite\b": "non-finite",
    r"(?<!\A)(?<!\")\b(?:ours|theirs)\b(?!-)": "the noun",
    r"\b(?:an)?other numbers? of\b": "a different number of",
    r"\bthat there (?:is|are)\b": "nothing, or 'existing'",
    r"\b(?:has|have|with) most\b": "the most",
    r"\ball the same\b": "anyway",
    r"\bcannot be told\b": "cannot be determined",
}
MOST_WORDS, WIDEST_CELL = 2000, 100
CHECKS = {**DEFAULT["checks"], "typography": False, "dates_times": False}  # straight quotes; "from 1,024 GPUs"


def prose(page: str) -> str:
    """``page`` without code and targets of links, line by line."""
    text = re.sub(r"^```.*?^```$", lambda block: "`X`" + "\n" * block[0].count("\n"), page, flags=re.M | re.S)
    text = re.sub(r"`+[^`]+`+", lambda code: "`X`" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"^(#.*)$", r"\1.", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)", lambda link: "]" + "\n" * link[0].count("\n"), text)


def phrases(text: str) -> Iterator[tuple[int, str]]:
    """Lines of ``text``, from 1, with what to write instead."""
    for pattern, instead in INSTEAD.items():
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, re.MULTILINE):
            begin = match.start() + len(match[0]) - len(match[0].lstrip())
            yield text.count("\n", 0, begin) + 1, f"{' '.join(match[0].split())!r}: write {instead}"


def too_long(page: str) -> Iterator[tuple[int, str]]:
    """A page of too many words, and cells of too many characters, without targets of links."""
    if (count := len(page.split())) > MOST_WORDS:
        yield 1, f"{count} words: shorten the page or split it, to at most {MOST_WORDS}"
    text = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page, flags=re.M | re.S)
    for line, row in enumerate(text.splitlines(), 1):
        for cell in re.split(r"(?<!\\)\|", row) if row.startswith("|") else ():
            shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("**", "").strip()
            if len(shown) > WIDEST_CELL:
                yield line, f"{shown[:30]!r}: {len(shown)} characters in a cell, at most {WIDEST_CELL}"


def in_page(path: Path) -> Iterator[tuple[int, str]]:
    text = prose(path.read_text())
    yield from too_long(path.read_text())
    yield from phrases(text)
    for result in LintFile(str(path), text).lint({**DEFAULT, "checks": CHECKS}):
        if "'X X'" not in result.check_result.message:  # X times its transpose
            yield result.pos[0] - 1, result.check_result.message


def words(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, strings of several words, and comments, each with its line; lines of one comment are joined."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "`X`" for part in node.values)
    comments: dict[int, str] = {}  # by the last line
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                line, text = token.start[0], token.string.lstrip("# ")
                comments[line] = f"{comments.pop(line - 1)}\n{text}" if line - 1 in comments else text
    yield from ((line - text.count("\n"), text) for line, text in comments.items())


def in_code(path: Path) -> Iterator[tuple[int, str]]:
    for line, text in words(path):
        yield from ((line + number - 1, instead) for number, instead in phrases(prose(text)))


def main() -> None:
    CheckRegistry().register_many(__register__)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {path: in_page(path) for path in pages}
    found |= {path: in_code(path) for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))}
    found.pop(Path(__file__).resolve())  # it quotes the phrases
    lines = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in found for line, text in sorted({*found[path]})]
    sys.exit("\n".join(lines) if lines else 0)


if __name__ == "__main__":
    main()
