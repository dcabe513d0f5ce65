"""Running scripts under the real `deepspeed` launcher, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 300


def launch(*script: str | Path, processes: int = 2, module: str | None = None, cwd: Path = ROOT) -> str:
    """Run a script on ``processes`` ranks; its output. Raises AssertionError with the output if it fails."""
    finished = try_to_launch(*script, processes=processes, module=module, cwd=cwd)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


def try_to_launch(
    *script: str | Path, processes: int = 2, module: str | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    from tests.ranks import free_port

    command = [Path(sys.executable).parent / "deepspeed", "--num_accelerators", processes, "--master_port", free_port()]
    command += (["--module", module] if module else []) + list(script)
    return run_on_cpu([str(part) for part in command], cwd)


def run_on_cpu(command: str | list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command, or a shell's command line, with this environment's programs first; output and errors together."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
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


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
