"""Environments of one's own beside the one that `make` prepared, in folders under .make.

Such an environment sees every package of the prepared one, this project among them, after its own: what is installed
into it comes first, and nothing of the prepared environment changes.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MADE = ROOT / ".make" / "beside"


def environment(name: str, requirements: Sequence[str], *options: str, keep_torch: bool = True) -> Path:
    """The interpreter of the environment ``name``, which has ``requirements``; made anew where one of these changed.

    ``options`` are pip's. With ``keep_torch``, pip may not take another torch than the prepared one.
    """
    folder = MADE / name
    python, stamp = folder / "bin" / "python", folder / "complete"
    constraint = [f"torch=={version('torch')}"] if keep_torch else []
    told = f"{sys.executable} {sys.version} {constraint} {requirements} {options}"
    fingerprint = hashlib.sha256(told.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == fingerprint:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    sites = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # A line that begins with "import" is run; addsitedir reads what the folders' own .pth files say, too.
    lines = ["import site", *(f"site.addsitedir({path!r})" for path in sites)]
    Path(sysconfig.get_path("purelib", "venv", paths), "prepared.pth").write_text("; ".join(lines) + "\n")
    (folder / "constraints.txt").write_text("".join(f"{line}\n" for line in constraint))
    print(f"installing {' '.join(requirements)} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(folder / "constraints.txt"), *options, *requirements]
    if subprocess.run(pip, stdout=sys.stderr).returncode != 0:
        raise SystemExit("pip failed, see above; running make again tries again")
    stamp.write_text(fingerprint)
    return python
