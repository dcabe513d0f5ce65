"""Ranks: processes that are forked from one that has imported torch and DeepSpeed, for the tests of a file. A rank
starts in a tenth of a second; running a function on ranks that are up costs milliseconds, and they keep what torch and
DeepSpeed remember of their world. A function that must run on several ranks is a module-level function of a test
module, given to ``RankPool.run``; it is called on every rank with the same arguments, and its results come back in rank
order. A rank that raises makes the call raise; a rank that does not answer in time ends the pool's processes, and the
next call starts fresh ones."""

import atexit
import contextlib
import functools
import importlib
import os
import reprlib
import shutil
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing as mp
from _pytest.config import parse_warning_filter
from torch.distributed import TCPStore

from tests.support import strict_transport

# What ranks import, in the process that all are forked from: once, in memory that they share. Some of it DeepSpeed or
# DTensor would import at the first use.
IMPORTED = ["torch._dynamo", "torch.distributed.checkpoint", "transformers.trainer", "pytorch_optimizer", "deepspeed"]
IMPORTED += ["deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload.superoffload_stage3"]
IMPORTED += ["deepspeed.runtime.zero.muon.muon_optimizer", "lwopt_backend.integrations.deepspeed_zero"]
IMPORTED += [
    f"tests.support.{name}" for name in ("checkpoint_engines", "command_line", "engines", "fused", "on_ranks", "plain")
]
IMPORTED += ["tests.support.prepared"]  # last
TIMEOUT_SECONDS = 600.0  # of a call, and of a start: nothing takes a tenth of it but on a machine that is overloaded
MOMENT_SECONDS = 60.0
LOST = "lost"
SHOWN = reprlib.Repr()
SHOWN.maxother = SHOWN.maxstring = 400
SHOWN.maxdict = SHOWN.maxlist = SHOWN.maxtuple = 40


class RankFailed(AssertionError):
    """A function failed on some rank; the message holds that rank's traceback, ``errors`` one short text per rank."""

    def __init__(self, message: str, errors: list[str | None]) -> None:
        super().__init__(message)
        self.errors = errors


class RankPool:
    """A world of ``world_size`` ranks, processes of its own, started when first needed and kept until ``close``."""

    def __init__(
        self, world_size: int, transport: str = "gloo", device: str | None = None, warning_filters: Sequence[str] = ()
    ) -> None:
        """``transport``: gloo, shared or strict, see shared_transport.py and strict_transport.py. On a ``device``, cuda
        or in its place cpu, all ranks share the first one, and one rank is on NCCL, or gloo. ``warning_filters``: as in
        pytest's ``filterwarnings``, for the code that the ranks run."""
        if device and world_size == 1:
            transport = "nccl" if device == "cuda" else "gloo"
        self.world_size = world_size
        self._settings = (transport, device, tuple(warning_filters))
        self._store: TCPStore | None = None
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Every rank's ``function(*args, **kwargs)``, in rank order."""
        __tracebackhide__ = True
        answers = self._start() or self._ask((function, args, kwargs), timeout)
        errors = [None if ok else value[0] for ok, value in answers]
        if not any(errors):
            return [value for _, value in answers]
        if not all(errors) or any(str(error).startswith((LOST, "StrictError")) for error in errors):
            self.close()  # some ranks went on, or are gone, or wait: the rest cannot be in step with them
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
        """End the processes; the next call starts others."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self._pipes, self._store = [], [], None

    def _start(self) -> list[tuple[bool, Any]]:
        """What the ranks answer, if they are started and one fails."""
        if self.processes:
            return []
        _, device, _ = self._settings
        context = mp.get_context("spawn") if device else forkserver()  # a fork cannot use CUDA
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            settings = (theirs, rank, self.world_size, self._store.port, _folder(), *self._settings)
            process = context.Process(target=_serve, args=settings, daemon=True)
            with mock.patch.dict(os.environ, DS_ACCELERATOR=device or "cpu", OMP_NUM_THREADS="1"):
                process.start()  # and at first the process that is forked, which DeepSpeed asks for its accelerator
            self.processes.append(process)
            self._pipes.append(ours)
        entered = self._collect(TIMEOUT_SECONDS)
        if all(ok for ok, _ in entered):
            return []
        self.close()
        return entered

    def _ask(self, message: Any, timeout: float) -> list[tuple[bool, Any]]:
        """What each rank answers, in rank order: (True, its value) or (False, its error)."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # of a rank that died; reading its answer says so
                pipe.send(message)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[tuple[bool, Any]]:
        answers: list[tuple[bool, Any]] = []
        deadline = time.monotonic() + timeout
        for rank, pipe in enumerate(self._pipes):
            # Once one rank has failed the others may wait for it in a collective; they get a moment, not the deadline.
            patience = max(0.0, deadline - time.monotonic()) if all(ok for ok, _ in answers) else MOMENT_SECONDS
            try:
                answers.append(pipe.recv() if pipe.poll(patience) else _lost(f"rank {rank} did not answer"))
            except (EOFError, ConnectionResetError):
                answers.append(_lost(f"rank {rank} died"))
        return answers


def forkserver() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def gathered(mine: Any) -> list[Any]:
    """What every rank has, on all ranks."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return of_ranks


def _lost(what: str) -> tuple[bool, Any]:
    return False, (f"{LOST}: {what}", f"{LOST}: {what}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@functools.cache
def _folder() -> str:
    """For what ranks compile."""
    folder = tempfile.mkdtemp(prefix="lwopt-ranks-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _serve(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    transport: str,
    device: str | None,
    warning_filters: tuple[str, ...],
) -> None:
    """Enter the world, and call in it what the test run sends."""
    try:
        _enter(rank, world_size, port, folder, transport, device)
        for text in warning_filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        pipe.send((True, None))
    except BaseException as error:
        pipe.send((False, (f"{type(error).__name__}: {error}", told(error))))
        return
    functional = importlib.import_module("torch.nn.functional")
    linear = functional.linear
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            try:
                value = function(*args, **kwargs)
            finally:
                strict_transport.settle()
            pipe.send((True, value))
        except BaseException as error:
            pipe.send((False, (f"{type(error).__name__}: {error}", told(error))))
        functional.linear = linear  # ZeRO-3 leaves its own there, which rounds bf16 otherwise


def _enter(rank: int, world_size: int, port: int, folder: str, transport: str, device: str | None) -> None:
    import torch

    local = {"LOCAL_RANK": 0 if device else rank, "LOCAL_SIZE": world_size}
    of_world = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**of_world, **local}.items()})
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    # torch's flight recorder keeps the last 2,000 collectives, some 1.3 kB each, which looks like a leak until then.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    # With a cache of all processes, inductor may load a library that another process has not written to its end.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor", str(os.getpid())))
    torch.set_num_threads(1)
    if device:
        strict_transport.DEVICE = torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    for name in IMPORTED:  # a process to fork from says nothing where this fails
        importlib.import_module(name)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(transport, store=store, rank=rank, world_size=world_size)
    importlib.import_module("deepspeed").init_distributed(dist_backend=transport, verbose=False)


def told(error: BaseException) -> str:
    """The traceback; and for an assertion, what its function has as local variables, which is what differs."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    found = frame.f_locals if isinstance(error, AssertionError) else {}
    return "".join([traceback.format_exc(), *(f"    {name} = {SHOWN.repr(value)}\n" for name, value in found.items())])
