"""Start a script under the real `deepspeed` launcher with what this machine needs.

    python scripts/launch.py SCRIPT.py [its arguments]

With GPUs, one process per GPU. Without, two processes on gloo and one thread each. The command is printed, so that it
can be copied and run without this file.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

CPU_PROCESSES = 2


def launch_command(script: list[str]) -> tuple[dict[str, str], list[str]]:
    """The environment variables to add and the command to run."""
    import torch

    gpus = torch.cuda.device_count()
    added = {} if gpus else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launcher = Path(sys.executable).parent / "deepspeed"
    processes = gpus or CPU_PROCESSES
    single = ["--single-process"] if processes == 1 else []
    return added, [
        str(launcher), "--num_accelerators", str(processes), "--master_port", str(free_port()), *script, *single,
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    added, command = launch_command(sys.argv[1:])
    print(" ".join([*(f"{key}={value}" for key, value in added.items()), shlex.join(command)]), flush=True)
    raise SystemExit(subprocess.run(command, env={**os.environ, **added}).returncode)


if __name__ == "__main__":
    main()
