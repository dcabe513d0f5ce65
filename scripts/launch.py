"""Start a script under the real `deepspeed` launcher, or under `torchrun`, with what this machine needs.

    python scripts/launch.py [--torchrun] SCRIPT.py [its arguments]

With GPUs, one process per GPU. Without, two processes on gloo and one thread each. The command is printed, so that it
can be copied and run without this file.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CPU_PROCESSES = 2


def launch(script: Sequence[str | Path], *, torchrun: bool = False, quiet: bool = False) -> None:
    """Run ``script`` and its arguments; ``quiet`` keeps its output to the CalledProcessError of a failure."""
    added, command = launch_command(script, torchrun)
    if not quiet:
        print(" ".join([*(f"{key}={value}" for key, value in added.items()), shlex.join(command)]), flush=True)
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if quiet else {}
    subprocess.run(command, env={**os.environ, **added}, check=True, **kept)


def launch_command(script: Sequence[str | Path], torchrun: bool) -> tuple[dict[str, str], list[str]]:
    """The environment variables to add and the command to run."""
    import torch

    gpus = torch.cuda.device_count()
    processes = gpus or CPU_PROCESSES
    # By their modules: in an environment on top of another one there may be no such programs.
    if torchrun:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        added = {} if gpus else {"OMP_NUM_THREADS": "1"}
    else:
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(processes)]
        added = {} if gpus else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    single = ["--single-process"] if processes == 1 else []
    return added, [*launcher, "--master_port", str(free_port()), *map(str, script), *single]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    script = sys.argv[1:]
    torchrun = script[:1] == ["--torchrun"]
    try:
        launch(script[torchrun:], torchrun=torchrun)
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None


if __name__ == "__main__":
    main()
