"""Prepare a Python environment for `make`, and print the interpreter to use. Standard library only.

An interpreter with torch keeps it: packages are added under a constraint on the installed torch, into its own
environment if it is one (venv, conda), otherwise into .venv on top of it. Without torch, .venv is made and torch
installed.
Runs again in a second when nothing has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
TORCH = "torch==2.13.0"
PACKAGE = ".[deepspeed,examples,test,check]"
# setuptools and wheel build DeepSpeed without build isolation, in which pip would fetch a second torch.
BUILD_TOOLS = ["pip>=23", "setuptools>=77", "wheel"]


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 - this file also runs on the interpreter it refuses
        raise SystemExit(
            f"Python 3.10 or newer is needed; {sys.executable} is {sys.version.split()[0]}. Set PYTHON=..."
        )
    own_torch = torch_version(sys.executable)
    if own_torch and in_environment():
        python, torch = Path(sys.executable), f"torch=={own_torch}"
    else:
        python, torch = make_venv(with_site_packages=bool(own_torch)), f"torch=={own_torch}" if own_torch else TORCH
    stamp = ROOT / ".make" / "installed"
    fingerprint = hashlib.sha256(f"{python} {torch} {(ROOT / 'pyproject.toml').read_text()}".encode()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == fingerprint):
        install(python, torch, has_torch=bool(own_torch))
        write_whole(stamp, fingerprint)
    write_whole(ROOT / ".make" / "python", str(python))
    print(python)


def in_environment() -> bool:
    return sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ and sys.prefix == os.environ["CONDA_PREFIX"]


def torch_version(python: str | Path) -> str | None:
    """The version of the torch that ``python`` would import, or None."""
    code = "import importlib.metadata as m; import torch; print(m.version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")
    return found.stdout.strip() if found.returncode == 0 else None


def make_venv(with_site_packages: bool) -> Path:
    """.venv on top of this interpreter; made again if it was made on top of another one, or is broken."""
    python, mark = VENV / "bin" / "python", VENV / "made-by-make"
    base = f"{sys.executable} {sys.version} {with_site_packages}"
    if VENV.exists() and not mark.exists():
        raise SystemExit(f"{VENV} was not made by this Makefile; activate it, or move it away, or set PYTHON=...")
    if python.exists() and mark.read_text() == base:
        return python
    say(f"making {VENV}")
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    write_whole(mark, "unfinished")  # marks an interrupted attempt of this script
    extra = ["--system-site-packages"] if with_site_packages else []
    made = subprocess.run([sys.executable, "-m", "venv", *extra, VENV], stdout=sys.stderr)
    if made.returncode != 0:
        raise SystemExit(f"{sys.executable} -m venv failed; on Debian and Ubuntu install the package python3-venv")
    (ROOT / ".make" / "installed").unlink(missing_ok=True)
    write_whole(mark, base)
    return python


def install(python: Path, torch: str, has_torch: bool) -> None:
    constraints = ROOT / ".make" / "constraints.txt"
    write_whole(constraints, f"{torch}\n")
    pip(python, *BUILD_TOOLS)
    if not has_torch:
        index = os.environ.get("TORCH_INDEX_URL")  # for machines whose default index has CUDA builds only
        pip(python, torch, *(["--index-url", index] if index else []))
    pip(python, "--no-build-isolation", "-c", constraints, "-e", PACKAGE)


def pip(python: Path, *arguments: object) -> None:
    say("installing " + " ".join(str(a) for a in arguments if not str(a).startswith("-")))
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    made = subprocess.run([str(part) for part in command], cwd=ROOT, **both)
    if made.returncode != 0:  # pip's warnings about what it looked at are of no use to anyone otherwise
        say(made.stdout)
        raise SystemExit("pip failed, see above; nothing is marked as installed, so running make again tries again")


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
