"""Check types with mypy in strict mode: the package, laid out as it is installed, and users' scripts on its pages.

In the checkout, the folder integrations/ is next to the package that contains it when installed, where mypy does not
find it. So mypy runs on links in a folder below .make, and its messages name the linked files. Arguments are mypy's.
Needs mypy and types-PyYAML in this interpreter, in addition to the package and its extras.
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
SCRIPTS = ("start/quickstart", "optimizers")  # of pages; other hosts have no types


def main() -> None:
    if importlib.util.find_spec("mypy") is None:
        raise SystemExit(f"mypy is missing: {sys.executable} -m pip install mypy types-PyYAML")
    link(
        LINKS / PACKAGE,
        {path.name: path for path in (ROOT / PACKAGE).iterdir()} | {"integrations": ROOT / "integrations"},
    )
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:]]
    for checked in (["-p", PACKAGE], ["--no-warn-return-any", *page_scripts()]):
        found = subprocess.run([*mypy, *checked], cwd=LINKS, stdout=subprocess.PIPE, text=True)
        print(re.sub(rf"^{PACKAGE}/integrations/", "integrations/", found.stdout, flags=re.MULTILINE), end="")
        if found.returncode:
            raise SystemExit(found.returncode)


def page_scripts() -> list[str]:
    """Write the pages' scripts next to the links; returns their names. For them, torch's functions return Any."""
    scripts = {}
    for page in SCRIPTS:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for name, script in re.findall(r"^```python (\S+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            scripts[f"{page.replace('/', '_')}_{name}"] = script
    for name, script in scripts.items():
        (LINKS / name).write_text(script)
    return list(scripts)


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
