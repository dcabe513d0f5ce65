"""A pool of ranks: processes that import torch and DeepSpeed once and then run many tests' functions.

Starting ranks costs seconds, running a function on ranks that are up costs milliseconds. A function that must run on
several ranks is a module-level function of a test module, given to ``RankPool.run``; it is called on every rank with
the same arguments, and its results come back in rank order. A rank that raises makes the call raise; a rank that does
not answer in time ends the pool's processes, and the next call starts fresh ones.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

TIMEOUT_SECONDS = 120.0
LOST = "lost"


class RankFailed(AssertionError):
    """A function failed on some rank; the message holds that rank's traceback, ``errors`` one short text per rank."""

    def __init__(self, message: str, errors: list[str | None]) -> None:
        super().__init__(message)
        self.errors = errors


class RankPool:
    """``world_size`` ranks on gloo, started at the first call and kept until ``close``."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.mkdtemp(prefix="lwopt-ranks-")

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Every rank's ``function(*args, **kwargs)``, in rank order."""
        self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = self._collect(time.monotonic() + timeout)
        errors = [None if ok else value[0] for ok, value in answers]
        if not any(errors):
            return [value for _, value in answers]
        if not all(errors) or any(str(error).startswith(LOST) for error in errors):
            self.close()  # some ranks went on, or are gone: the rest cannot be in step with them
        rank = next(rank for rank, error in enumerate(errors) if error)
        raise RankFailed(f"rank {rank} of {self.world_size}:\n{answers[rank][1][1]}", errors)

    def errors(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
        """Run a function that must fail on every rank; every rank's error, as ``Type: message``."""
        try:
            results = self.run(function, *args, **kwargs)
        except RankFailed as failure:
            assert all(failure.errors), f"some ranks did not fail: {failure.errors}"
            return [str(error) for error in failure.errors]
        raise AssertionError(f"no rank failed; results {results}")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        if self._processes:
            return
        context = mp.get_context("spawn")
        port = free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, port, self._folder), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float) -> list[tuple[bool, Any]]:
        answers: list[tuple[bool, Any]] = []
        for rank, pipe in enumerate(self._pipes):
            # Once one rank has failed the others may wait for it in a collective; they get a moment, not the deadline.
            patience = max(0.0, deadline - time.monotonic()) if all(ok for ok, _ in answers) else 10.0
            try:
                answers.append(pipe.recv() if pipe.poll(patience) else _lost(f"rank {rank} did not answer"))
            except EOFError:
                answers.append(_lost(f"rank {rank} died"))
        return answers


def _lost(what: str) -> tuple[bool, Any]:
    return False, (f"{LOST}: {what}", f"{LOST}: {what}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _serve(pipe: Connection, rank: int, world_size: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        TORCH_EXTENSIONS_DIR=folder,
    )
    import torch

    torch.set_num_threads(1)
    import deepspeed

    from lwopt_backend.integrations import deepspeed_zero

    deepspeed_zero.register()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deepspeed.utils.logger.setLevel("WARNING")
    linear = torch.nn.functional.linear
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException as error:
            pipe.send((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))
        torch.nn.functional.linear = linear  # ZeRO-3 leaves its own there, which rounds bf16 otherwise
