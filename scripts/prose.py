"""Read the README, CONTRIBUTING and docs/ with proselint, without code and targets of links. `make check` runs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parent.parent
CHECKS = {**DEFAULT["checks"], "typography": False, "dates_times": False}  # straight quotes; "from 1,024 GPUs"


def prose(page: str) -> str:
    """``page`` without code and targets of links, line by line."""
    text = re.sub(r"^```.*?^```$", lambda block: "`X`" + "\n" * block[0].count("\n"), page, flags=re.M | re.S)
    text = re.sub(r"`+[^`]+`+", lambda code: "`X`" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"^(#.*)$", r"\1.", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)", lambda link: "]" + "\n" * link[0].count("\n"), text)


def main() -> None:
    CheckRegistry().register_many(__register__)
    found = []
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for result in LintFile(str(path), prose(path.read_text())).lint({**DEFAULT, "checks": CHECKS}):
            if "'X X'" not in result.check_result.message:  # X times its transpose
                found.append(f"{path.relative_to(ROOT)}:{result.pos[0] - 1}: {result.check_result.message}")
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
