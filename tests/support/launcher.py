"""Running programs as a user would, under real launchers; in a fork of a process that has imported torch, which takes
a tenth of the time; and on rank processes that are up."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.support.ranks import RankPool, forkserver, free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 600


def launch(*script: object) -> str:
    return _launched([sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators"], 2, script)


def torchrun(*script: object, processes: int = 2) -> str:
    return _launched([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"], processes, script)


def _launched(launcher: list[object], processes: int, script: tuple[object, ...]) -> str:
    command = [*launcher, processes, "--master_port", free_port(), *script]
    return succeeds([str(part) for part in command], ROOT)


# For a program that tells what it imports: it imports again what it has forgotten.
FORGET = """
import sys
def forget(*packages):
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
"""
ON_CPUS = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def succeeds(command: str | list[str], cwd: Path, **variables: str) -> str:
    """What a command, or a shell's command line, prints, with this environment's programs first. Raises AssertionError,
    with what it printed, if it fails or does not end in time."""
    environment = {**os.environ, **ON_CPUS, **variables}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    how: dict[str, Any] = {"shell": isinstance(command, str), "cwd": cwd, "env": environment, "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": TIMEOUT_SECONDS}
    try:
        finished = subprocess.run(command, **how)
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout
        raise AssertionError(f"{command} had not ended after {TIMEOUT_SECONDS} s:\n{printed}") from None
    assert finished.returncode == 0, f"{command} ended with {finished.returncode}:\n{finished.stdout}"
    return finished.stdout


def python(*arguments: object, cwd: Path = ROOT, fails: int = 0, **variables: str) -> str:
    """What ``python`` prints for these arguments, which begin with a script, ``-m`` or ``-c``, in a fork of the process
    that ranks are forked from. Raises AssertionError, with what it printed, unless it ends in time, with the exit code
    ``fails``. Many modules are imported there already, see ``FORGET``."""
    given = [str(argument) for argument in arguments]
    with tempfile.NamedTemporaryFile("r", errors="replace") as printed:
        environment = {**os.environ, **ON_CPUS, **variables}
        program = forkserver().Process(target=_as_main, args=(given, str(cwd), environment, printed.name))
        with mock.patch.dict(os.environ, ON_CPUS):  # also of the process that is forked, if this is the first one
            program.start()
        program.join(TIMEOUT_SECONDS)
        ended = program.exitcode
        program.kill()
        assert ended == fails, f"python {' '.join(given)} ended with {ended}:\n{printed.read()}"
        return printed.read()


def _as_main(arguments: list[str], cwd: str, environment: dict[str, str], printed: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    with open(printed, "w", buffering=1) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if arguments[0] in ("-c", "-m"):
        sys.argv, sys.path[:0] = arguments[1:], [cwd]
    if arguments[0] == "-c":
        exec(arguments[1], {"__name__": "__main__"})
    elif arguments[0] == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = arguments, [os.path.dirname(arguments[0])]
        runpy.run_path(arguments[0], run_name="__main__")


def run_on_ranks(
    ranks: RankPool, script: str | Path, *arguments: object, joined: bool, **variables: str
) -> tuple[list[Any], str]:
    """Run a script as ``__main__`` on ranks that are up: how it ended on each (0 or a message), and what it printed. A
    script that is not ``joined`` makes the process group itself, as under torchrun; DeepSpeed takes the one there
    is."""
    given = [str(script), *map(str, arguments)]
    try:
        ended = ranks.run(run_script, given, {"MASTER_PORT": str(free_port()), **variables}, joined)
    finally:
        ranks.close()
    return [code for code, _ in ended], "".join(printed for _, printed in ended)


def run_script(arguments: list[str], variables: dict[str, str], joined: bool) -> tuple[Any, str]:
    """On a rank: what a script leaves of the interpreter (arguments, path, environment) is as it was before."""
    if not joined:
        dist.destroy_process_group()
    printed, ended = io.StringIO(), 0
    with surroundings_kept():
        os.environ.update(variables)
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as error:
            ended = error.code
        except Exception as error:
            raise AssertionError(f"{' '.join(arguments)} printed:\n{printed.getvalue()}") from error
    return ended, printed.getvalue()


@contextlib.contextmanager
def surroundings_kept() -> Iterator[None]:
    argv, path, environment = sys.argv, list(sys.path), dict(os.environ)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
