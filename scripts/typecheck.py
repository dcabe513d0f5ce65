"""Check types with mypy in strict mode: the package, laid out as it is installed, and tests/typed_user.py, its user.

In the checkout the folder integrations/ lies beside the package of which it is a part when installed, where mypy does
not find it. So mypy is run on links in a folder below .make, and its messages name the files that the links stand for.
Arguments are mypy's. Needs mypy and types-PyYAML in this interpreter, beside what the package and its extras install.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINKS = ROOT / ".make" / "typecheck"
PACKAGE = "lwopt_backend"


def main() -> None:
    if importlib.util.find_spec("mypy") is None:
        raise SystemExit(f"mypy is missing: {sys.executable} -m pip install mypy types-PyYAML")
    link(
        LINKS / PACKAGE,
        {path.name: path for path in (ROOT / PACKAGE).iterdir()} | {"integrations": ROOT / "integrations"},
    )
    link(LINKS, {"tests": ROOT / "tests"})
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:]]
    checked = ["-p", PACKAGE, "-m", "tests.typed_user"]
    found = subprocess.run([*mypy, *checked], cwd=LINKS, stdout=subprocess.PIPE, text=True)
    print(re.sub(rf"^{PACKAGE}/integrations/", "integrations/", found.stdout, flags=re.MULTILINE), end="")
    raise SystemExit(found.returncode)


def link(folder: Path, targets: dict[str, Path]) -> None:
    """Let ``folder`` have a link to each of ``targets``, and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_symlink() and targets.get(old.name) != old.resolve():
            old.unlink()
    for name, target in targets.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(os.path.relpath(target, folder))


if __name__ == "__main__":
    main()
