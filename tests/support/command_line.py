"""The command ``lwopt`` as its users run it, in this process: starting one takes seconds."""

import contextlib
import functools
import io
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from lwopt_backend.cli import app, main
from tests.support.megatron_dist import Setup, truth, write
from tests.support.megatron_torch import Setup as TorchSetup
from tests.support.megatron_torch import Writer

SAMPLES = Path(__file__).parents[1] / "data" / "megatron"
GENUINE = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())  # Megatron's own, with their truth
FURTHER = "LWOPT_MEGATRON_CHECKPOINTS"  # names a folder of more; some of which must be refused:
REFUSED = ("BAD", "t14")  # Megatron wrote it wrong; as only 0.14 and 0.15 wrote it
NOT_SET = f"{FURTHER} names no folder of further genuine checkpoints"


def genuine(refused: str = "") -> list[Any]:
    """Arguments for a test: the folders here, and in `make test-full` further ones; or of a kind in REFUSED."""
    folder = os.environ.get(FURTHER)
    more = sorted(path for path in Path(folder).iterdir() if path.is_dir()) if folder else []
    more = [path for path in more if next(filter(path.name.startswith, REFUSED), "") == refused]
    here = [] if refused else [pytest.param(SAMPLES / name, id=name) for name in GENUINE]
    marks = [pytest.mark.full, pytest.mark.skipif(not more, reason=NOT_SET)]
    return here + [pytest.param(path, id=path.name, marks=marks) for path in more or [Path("none")]]


@contextlib.contextmanager
def too_large(*_: object) -> Iterator[None]:
    """Writing any file fails with this in place of a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@dataclass(frozen=True)
class Run:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


@functools.cache
def commands() -> Any:
    """What ``app()`` makes anew in every call, which takes as long as a short command."""
    return typer.main.get_command(app)


def lwopt(*arguments: object) -> Run:
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with mock.patch.object(sys, "argv", ["lwopt", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main(commands())
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Run(code, out.getvalue(), err.getvalue())


def succeeds(*arguments: object) -> str:
    """What it prints to standard output; it must succeed and say nothing else."""
    run = lwopt(*arguments)
    assert (run.code, run.err) == (0, ""), run
    return run.out


def refused(*arguments: object) -> str:
    """What it says; it must fail, in plain words, and print nothing to standard output."""
    run = lwopt(*arguments)
    assert run.code == 2 and not run.out and "Traceback" not in run.err, run
    return run.err


def torch_dist(folder: Path, muon: bool = True, **options: object) -> Path:
    setup = Setup(muon=muon, **options)  # type: ignore[arg-type]
    write(folder / "iter_0000007", setup, truth(muon, setup.experts, setup.tied, sum(setup.stages)))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def torch_format(folder: Path, **options: object) -> Path:
    """The same in its older format, of two ranks that each have a part of Muon's state."""
    given = {"optimizer": "layer_wise", "dp": 2, **options}
    Writer(TorchSetup(**given)).write(folder)  # type: ignore[arg-type]
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
