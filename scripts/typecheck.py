"""Check types with mypy in strict mode: the package, laid out as it is installed, and users' scripts on its pages.

In the checkout, the folder integrations/ is next to the package that contains it when installed, where mypy does not
find it. So mypy runs on a copy in a folder below .make, and its messages name the checkout's files. Arguments are
mypy's. Needs mypy and types-PyYAML in this interpreter, in addition to the package and its extras.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / ".make" / "typecheck"
PACKAGE = "lwopt_backend"
SCRIPTS = ("start/quickstart", "optimizers")  # of pages; other hosts have no types


def main() -> None:
    shutil.rmtree(COPY / PACKAGE, ignore_errors=True)
    for source, name in ((PACKAGE, PACKAGE), ("integrations", f"{PACKAGE}/integrations")):
        shutil.copytree(ROOT / source, COPY / name, ignore=shutil.ignore_patterns("__pycache__"))
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:]]
    for checked in (["-p", PACKAGE], ["--no-warn-return-any", *page_scripts()]):
        found = subprocess.run([*mypy, *checked], cwd=COPY, stdout=subprocess.PIPE, text=True)
        print(re.sub(rf"^{PACKAGE}/integrations/", "integrations/", found.stdout, flags=re.MULTILINE), end="")
        if found.returncode:
            raise SystemExit(found.returncode)


def page_scripts() -> list[str]:
    """Write the pages' scripts next to the copy; returns their names. For them, torch's functions return Any."""
    names = []
    for page in SCRIPTS:
        text = (ROOT / "docs" / f"{page}.md").read_text()
        for name, script in re.findall(r"^```python (\S+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            names.append(f"{page.replace('/', '_')}_{name}")
            (COPY / names[-1]).write_text(script)
    return names


if __name__ == "__main__":
    main()
