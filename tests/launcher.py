"""Running scripts under the real `deepspeed` launcher and under `torchrun`, as a user would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 300


def launch(*script: str | Path, **how: Any) -> str:
    """Run a script under ``deepspeed`` as ``try_to_launch`` does; its output. Raises AssertionError if it fails."""
    finished = try_to_launch(*script, **how)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def try_to_launch(
    *script: str | Path, processes: int = 2, module: str | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a script under ``deepspeed`` on ``processes`` ranks."""
    from tests.ranks import free_port

    command = [Path(sys.executable).parent / "deepspeed", "--num_accelerators", processes, "--master_port", free_port()]
    command += (["--module", module] if module else []) + list(script)
    return run_on_cpu([str(part) for part in command], cwd)


def torchrun(*script: str | Path, **how: Any) -> str:
    """Run a script under ``torchrun`` as ``try_to_torchrun`` does; its output. Raises AssertionError if it fails."""
    finished = try_to_torchrun(*script, **how)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def try_to_torchrun(
    *script: str | Path, processes: int = 2, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script under ``torchrun`` on ``processes`` ranks, with modules in ``path`` before all others."""
    from tests.ranks import free_port

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", processes]
    command += ["--master_port", free_port(), *script]
    return run_on_cpu([str(part) for part in command], ROOT, **({"PYTHONPATH": str(path)} if path else {}))


def run_on_cpu(command: str | list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command, or a shell's command line, with this environment's programs first; output and errors together."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


def run_page(page: str, folder: Path) -> str:
    """Run the one script of a page by the command that it gives; its output. Raises AssertionError if it fails."""
    finished = run_on_cpu(unpack_page(page, folder, sys.executable), folder)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def unpack_page(page: str, folder: Path, python: str | Path) -> str:
    """Write the one script of a page into ``folder``; returns the command that the page gives, for that ``python``."""
    ((name, script),) = re.findall(r"^```python (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^```bash run\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / name).write_text(script)
    return command.replace("torchrun", f"{python} -m torch.distributed.run")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
