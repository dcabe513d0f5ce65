"""Find phrases in the README and docs/ that are not English, and what proselint finds. `make check` runs it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parent.parent
START = r"(?:^(?:- |\d\. )?|(?<=[.!?:|]\s))"  # of a sentence, a cell or an item
INSTEAD = {
    r"\bbeside\b": "compared with, next to, in addition to",
    r"[,;(] else\b|^Else\b": "otherwise",
    r"\bso many\b": "that many",
    r"\bdifferences? to\b": "difference from",
    r"\b(?:go|goes|going|went) by\b": "follows, uses, depends on",
    r"\bof (?:its|their|our) own(?=[.,;:)]| (?:and|or|is|are|has|on|in|for|with)\b)": "its own X, a separate X",
    rf"{START}Of (?!course)": "the subject first: 'Each X has', not 'Of each X'",
    rf"{START}(?:Whoever|What else)\b": "a noun as the subject",
    rf"{START}[A-Z][a-z]+(?:ed|den|own) (?:is|are)\b": "the subject first",
    r", too\b": "also, before the verb",
    r"\bnot finite\b": "non-finite",
    r"\b(?:ours|theirs)\b(?!-)": "the noun",
    r"\b(?:an)?other numbers? of\b": "a different number of",
    r"\bthat there (?:is|are)\b": "nothing, or 'existing'",
    r"\b(?:has|have|with) most\b": "the most",
    r"\ball the same\b": "anyway",
    r"\bcannot be told\b": "cannot be determined",
}
CHECKS = {**DEFAULT["checks"], "typography": False, "dates_times": False}  # straight quotes; "from 1,024 GPUs"


def prose(page: str) -> str:
    """``page`` without code and targets of links, line by line."""
    text = re.sub(r"^```.*?^```$", lambda block: "`X`" + "\n" * block[0].count("\n"), page, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", lambda code: "`X`" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"^(#.*)$", r"\1.", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)", lambda link: "]" + "\n" * link[0].count("\n"), text)


def found(path: Path) -> Iterator[tuple[int, str]]:
    text = prose(path.read_text())
    for pattern, instead in INSTEAD.items():
        for match in re.finditer(pattern.replace(" ", r"\s"), text, re.MULTILINE):
            begin = match.start() + len(match[0]) - len(match[0].lstrip())
            yield text.count("\n", 0, begin) + 1, f"{' '.join(match[0].split())!r}: write {instead}"
    for result in LintFile(str(path), text).lint({**DEFAULT, "checks": CHECKS}):
        if "'X X'" not in result.check_result.message:  # X times its transpose
            yield result.pos[0] - 1, result.check_result.message


def main() -> None:
    CheckRegistry().register_many(__register__)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [f"{path.relative_to(ROOT)}:{number}: {text}" for path in pages for number, text in sorted(found(path))]
    sys.exit("\n".join(lines) if lines else 0)


if __name__ == "__main__":
    main()
