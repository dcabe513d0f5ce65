"""Figures with what they depend on: the command, the machine, versions and the commit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def write(path: Path, figures: Sequence[Any]) -> None:
    """Write ``figures``, which JSON can hold, one a line, below what they depend on."""
    module = sys.modules["__main__"].__spec__
    command = shlex.join(["python", *(["-m", module.name] if module else sys.argv[:1]), *sys.argv[1:]])
    told = {"command": command, "machine": machine(), "versions": versions(), "commit": commit()}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(map(json.dumps, figures))
    path.write_text(f'{json.dumps(told, indent=1)[:-2]},\n "figures": [\n  {lines}\n ]\n}}\n')


def with_table(page: str, program: str, table: str) -> str:
    """The page with ``table`` between the two marks of the benchmark ``program``."""
    begin, end = f"<!-- written by benchmarks/{program}.py --page -->\n", "<!-- end -->\n"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"


def machine() -> dict[str, Any]:
    """The devices, and how busy the CPU is as the figures are written."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    load = round(os.getloadavg()[0], 1)
    return {"cpu": (names or [platform.machine()])[0], "cores": os.cpu_count(), "gpus": gpus, "load": load}


def versions() -> dict[str, str]:
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    found = {name: installed[name] for name in ("torch", "deepspeed") if name in installed}
    return {"python": platform.python_version(), **found}


def commit() -> str | None:
    """The commit that is checked out, with "+" if code differs from it; None without git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        code = ["lwopt_backend", "integrations", "benchmarks/*.py"]
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *code], cwd=ROOT).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + "+" * bool(changed)
