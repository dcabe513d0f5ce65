"""Run the fault campaign, tests/faults, in an environment of its own. Arguments are pytest's.

FAULTS_SEED sets the seed of every attack, FAULTS_COUNT how many attacks each test makes in place of its own number.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from beside import ROOT, environment


def main() -> None:
    extra = [text.partition(";")[0].strip() for text in requires("lwopt-backend") or () if 'extra == "faults"' in text]
    python = environment("faults", extra)
    chosen = sys.argv[1:] or sorted(map(str, (ROOT / "tests" / "faults").glob("test_*.py")))
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--durations=15", *chosen]
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    raise SystemExit(subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}).returncode)


if __name__ == "__main__":
    main()
