"""A pool of ranks: processes that are forked once, from one that has imported torch and DeepSpeed, for many tests.
Starting ranks costs seconds, running a function on ranks that are up costs milliseconds. A function that must run on
several ranks is a module-level function of a test module, given to ``RankPool.run``; it is called on every rank with
the same arguments, and its results come back in rank order. A rank that raises makes the call raise; a rank that does
not answer in time ends the pool's processes, and the next call starts fresh ones."""

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

import psutil
import torch.distributed as dist
import torch.multiprocessing as mp
from _pytest.config import parse_warning_filter
from torch._C import _distributed_c10d as torch_c10d
from torch.distributed import TCPStore

from tests.support import strict_transport

# What ranks import, in the process that all are forked from: once, in memory that they share. Some of it DeepSpeed or
# DTensor would import at the first use.
IMPORTED = ["torch._dynamo", "torch.distributed.checkpoint", "transformers.trainer", "pytorch_optimizer", "deepspeed"]
IMPORTED += ["deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.superoffload.superoffload_stage3"]
IMPORTED += ["deepspeed.runtime.zero.muon.muon_optimizer", "lwopt_backend.integrations.deepspeed_zero"]
IMPORTED += [
    f"tests.support.{name}" for name in ("checkpoint_engines", "command_line", "engines", "fused", "on_ranks", "owned")
]
IMPORTED += ["tests.support.prepared"]  # last
TIMEOUT_SECONDS = 600.0  # of a call, and of a start: nothing takes a tenth of it but on a machine that is overloaded
MOMENT_SECONDS = 60.0
LOST = "lost"
MOST_THREADS = 32
SHOWN = reprlib.Repr()
SHOWN.maxother = SHOWN.maxstring = 400
SHOWN.maxdict = SHOWN.maxlist = SHOWN.maxtuple = 40


class RankFailed(AssertionError):
    """A function failed on some rank; the message holds that rank's traceback, ``errors`` one short text per rank."""

    def __init__(self, message: str, errors: list[str | None]) -> None:
        super().__init__(message)
        self.errors = errors


class RankProcesses:
    """Processes that serve as ranks, started when first needed and kept until ``close``; on gloo. They are the ranks of
    one world at a time: a call that asks for a different number of ranks changes the default group, which takes
    milliseconds, where a process takes seconds to start."""

    def __init__(self, warning_filters: Sequence[str] = (), transport: str = "gloo", device: str | None = None) -> None:
        """``warning_filters``: as in pytest's ``filterwarnings``, for the code that the ranks run. ``transport``: gloo,
        or strict, see strict_transport.py. On a ``device``, cuda or in its place cpu, all ranks share the first one,
        and a world of one rank is on NCCL, or gloo."""
        self._warning_filters, self._transport, self._device = tuple(warning_filters), transport, device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.mkdtemp(prefix="lwopt-ranks-")
        self._store: TCPStore | None = None
        self._world_size = 0
        self._numbers: dict[int, int] = {}  # of the world of each size
        self._worlds = 0

    def call(self, world_size: int, message: Any, timeout: float) -> list[tuple[bool, Any]]:
        """What each rank of a world of that size answers, in rank order: (True, its value) or (False, its error)."""
        self._start(world_size)
        if world_size != self._world_size:
            if world_size not in self._numbers:
                self._worlds += 1
                self._numbers[world_size] = self._worlds
            self._world_size, number = world_size, self._numbers[world_size]
            self._ask(self._pipes, [("world", rank, world_size, number) for rank in range(len(self._pipes))])
            entered = self._collect(self._pipes, time.monotonic() + TIMEOUT_SECONDS)
            if failed := [answer for answer in entered if not answer[0]]:
                self.close()
                return failed[:1] * world_size
        pipes = self._pipes[:world_size]
        self._ask(pipes, [message] * world_size)
        return self._collect(pipes, time.monotonic() + timeout)

    def rest(self) -> None:
        """Between two tests: end processes that are in many groups, each of which keeps threads of gloo that poll."""
        if self._device:  # which makes many threads itself
            return
        alive = all(process.is_alive() for process in self._processes)
        if not alive or any(psutil.Process(process.pid).num_threads() > MOST_THREADS for process in self._processes):
            self.close()

    def renew(self) -> None:
        """Make worlds new ones from the next call, with DeepSpeed's global groups as they were at the start."""
        self._world_size, self._numbers = 0, {}

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes, self._store = [], [], None
        self.renew()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, count: int) -> None:
        context = mp.get_context("spawn") if self._device else forkserver()  # a fork cannot use CUDA
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(len(self._processes), count):
            ours, theirs = context.Pipe()
            settings = (self._folder, self._warning_filters, self._transport, self._device)
            process = context.Process(target=_serve, args=(theirs, self._store.port, *settings), daemon=True)
            with mock.patch.dict(os.environ, DS_ACCELERATOR=self._device or "cpu", OMP_NUM_THREADS="1"):
                process.start()  # and at first the process that is forked, which DeepSpeed asks for its accelerator
            self._processes.append(process)
            self._pipes.append(ours)
            self._world_size = 0  # it is in none yet

    @staticmethod
    def _ask(pipes: list[Connection], messages: list[Any]) -> None:
        for pipe, message in zip(pipes, messages):
            with contextlib.suppress(BrokenPipeError):  # of a rank that died; reading its answer says so
                pipe.send(message)

    @staticmethod
    def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
        answers: list[tuple[bool, Any]] = []
        for rank, pipe in enumerate(pipes):
            # Once one rank has failed the others may wait for it in a collective; they get a moment, not the deadline.
            patience = max(0.0, deadline - time.monotonic()) if all(ok for ok, _ in answers) else MOMENT_SECONDS
            try:
                answers.append(pipe.recv() if pipe.poll(patience) else _lost(f"rank {rank} did not answer"))
            except (EOFError, ConnectionResetError):
                answers.append(_lost(f"rank {rank} died"))
        return answers


class RankPool:
    """A world of ``world_size`` ranks, on processes that it shares with other worlds or on its own."""

    def __init__(self, world_size: int, processes: RankProcesses | None = None) -> None:
        self.world_size = world_size
        self.processes = processes or RankProcesses()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Every rank's ``function(*args, **kwargs)``, in rank order."""
        __tracebackhide__ = True
        answers = self.processes.call(self.world_size, (function, args, kwargs), timeout)
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

    def renew(self) -> None:
        self.processes.renew()

    def close(self) -> None:
        self.processes.close()

    def remove(self) -> None:
        self.processes.remove()


def forkserver() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def kept_in_a_world(function: Callable[..., Any]) -> Callable[..., Any]:
    """functools.cache for process groups and meshes, which belong to the world that they were made in."""
    cached = functools.cache(lambda world, *args, **kwargs: function(*args, **kwargs))

    @functools.wraps(function)
    def in_this_world(*args: Any, **kwargs: Any) -> Any:
        return cached(_Worlds.current, *args, **kwargs)

    return in_this_world


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


def _serve(
    pipe: Connection, port: int, folder: str, warning_filters: tuple[str, ...], transport: str, device: str | None
) -> None:
    """Enter the worlds that the test run names, and call in them what it sends."""
    os.environ.update(TORCH_EXTENSIONS_DIR=folder, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # torch's flight recorder keeps the last 2,000 collectives, some 1.3 kB each, which looks like a leak until then.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    # With a cache of all processes, inductor may load a library that another process has not written to its end.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor", str(os.getpid())))
    import torch

    if device:
        strict_transport.DEVICE = torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    for name in IMPORTED:  # a process to fork from says nothing where this fails
        importlib.import_module(name)
    for text in warning_filters:
        warnings.filterwarnings(*parse_warning_filter(text, escape=False))
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    linear, worlds = torch.nn.functional.linear, _Worlds(store, transport, device)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        try:
            if message[0] == "world":
                pipe.send((True, worlds.enter(*message[1:])))
            else:
                function, args, kwargs = message
                try:
                    value = function(*args, **kwargs)
                finally:
                    strict_transport.settle()
                pipe.send((True, value))
        except BaseException as error:
            pipe.send((False, (f"{type(error).__name__}: {error}", told(error))))
        torch.nn.functional.linear = linear  # ZeRO-3 leaves its own there, which rounds bf16 otherwise


def told(error: BaseException) -> str:
    """The traceback; and for an assertion, what its function has as local variables, which is what differs."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    found = frame.f_locals if isinstance(error, AssertionError) else {}
    return "".join([traceback.format_exc(), *(f"    {name} = {SHOWN.repr(value)}\n" for name, value in found.items())])


class _Worlds:
    """The default groups that this process is or was a rank of, one at a time the current one. A world is left, not
    destroyed: what still refers to its groups would keep threads of gloo that wait for peers that are gone, without
    pause."""

    current = 0

    def __init__(self, store: TCPStore, transport: str, device: str | None) -> None:
        from deepspeed.comm import comm
        from deepspeed.runtime.pipe import p2p
        from deepspeed.utils import groups
        from torch.distributed import distributed_c10d as c10d

        self._store, self._transport, self._device = store, transport, device
        # What is global in torch and in DeepSpeed and tells of process groups: a module, and names in it.
        known = {module: [name for name in vars(module) if not name.startswith("__")] for module in (comm, p2p, groups)}
        by_group = ["_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag"]
        self._globals = {**known, c10d: [*by_group, "_group_count", "_default_pg_init_method"]}
        self._kept = {0: self._seen()}

    def enter(self, rank: int, world_size: int, number: int) -> None:
        """Leave the current world, and be a rank of world ``number``, if it has that many."""
        import deepspeed
        import torch.distributed as dist
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from torch.distributed.tensor import debug

        number = number if rank < world_size else 0
        self._kept[self.current] = self._seen()
        self._go(number if number in self._kept else 0)
        _Worlds.current = number
        # ZeRO-3 compares these counters between ranks, which have not been in the same worlds.
        Init.param_id = 0
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        if hasattr(debug, "_clear_sharding_prop_cache"):  # from torch 2.10 on
            debug._clear_sharding_prop_cache()  # it refers to meshes of other worlds
        local = {
            "RANK": rank,
            "LOCAL_RANK": 0 if self._device else rank,
            "WORLD_SIZE": world_size,
            "LOCAL_SIZE": world_size,
        }
        os.environ.update({name: str(value) for name, value in local.items()})
        if number and number not in self._kept:
            store = dist.PrefixStore(f"world {number}", self._store)
            transport = self._transport
            if self._device and world_size == 1:
                transport = "nccl" if self._device == "cuda" else "gloo"
            dist.init_process_group(transport, store=store, rank=rank, world_size=world_size)
            deepspeed.init_distributed(dist_backend=transport, verbose=False)

    def _seen(self) -> tuple[dict[tuple[Any, str], Any], Any]:
        from torch.distributed import distributed_c10d as c10d

        values = {(module, name): vars(module)[name] for module, names in self._globals.items() for name in names}
        copies = {at: dict(value) if isinstance(value, dict) else value for at, value in values.items()}
        return copies, c10d._world.default_pg

    def _go(self, number: int) -> None:
        """Put the globals of a world in place, and the names by which its groups are found."""
        from torch.distributed import distributed_c10d as c10d

        for name in c10d._pg_names.values():
            torch_c10d._unregister_process_group(name)
        values, default_group = self._kept[number]
        for (module, name), value in values.items():
            vars(module)[name] = dict(value) if isinstance(value, dict) else value
        c10d._update_default_pg(default_group)
        for group, name in c10d._pg_names.items():
            torch_c10d._register_process_group(name, group)
