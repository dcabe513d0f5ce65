"""Build the site of the pages in docs/ into site/, in an environment of its own. A broken link is an error.

Arguments are a command of mkdocs in place of ``build``, e.g. ``serve``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires

from beside import ROOT, environment

EXTRA = '; extra == "docs"'


def main() -> None:
    python = environment(
        "docs", [line.removesuffix(EXTRA) for line in requires("lwopt-backend") or [] if EXTRA in line]
    )
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # a banner; the versions are pinned
    command = [python, "-m", "mkdocs", *(sys.argv[1:] or ["build"]), "--strict"]
    raise SystemExit(subprocess.run(command, cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
