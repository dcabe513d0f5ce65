"""Build a release, check it as a user would install it, and stop before uploading.

    python scripts/release.py

It refuses a checkout with changes that are not committed, and a version without a section in CHANGELOG.md. It builds
the source distribution and, from it, the wheel, has twine check both, and installs the wheel in an empty environment,
where `lwopt` has to run. The last line is the command that uploads: nothing here does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from beside import ROOT, environment

DIST = ROOT / "dist"


def main() -> None:
    if output("git", "status", "--porcelain"):
        raise SystemExit("expected a checkout without changes, found some; commit them, or release from a fresh clone")
    python = environment("release", ["build", "twine"])
    shutil.rmtree(DIST, ignore_errors=True)
    run(python, "-m", "build", "--outdir", DIST)
    built = sorted(DIST.iterdir())
    (wheel,) = (path for path in built if path.suffix == ".whl")
    version = wheel.name.split("-")[1]
    if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(f"expected a section '## [{version}]' in CHANGELOG.md, found none; add what changed")
    run(python, "-m", "twine", "check", "--strict", *built)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        installed = Path(folder) / "bin"
        run(installed / "python", "-m", "pip", "install", "--quiet", wheel)
        run(installed / "lwopt", "env", cwd=folder)
        run(installed / "lwopt", "rules", "muon", cwd=folder)
    print(f"{version} is checked. To upload it: {python} -m twine upload {' '.join(map(str, built))}")


def output(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def run(*words: object, cwd: str | Path = ROOT) -> None:
    print("$", *words, file=sys.stderr, flush=True)
    if subprocess.run([str(word) for word in words], cwd=cwd, stdout=sys.stderr).returncode != 0:
        raise SystemExit(f"failed: {' '.join(map(str, words))}")


if __name__ == "__main__":
    main()
