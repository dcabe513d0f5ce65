"""Thousands of steps, and many engines, saves and loads: memory, threads, files, groups and hooks stay as they are."""

import ctypes
import gc
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tests.faults.campaign import count
from tests.faults.test_kills import WAYS, engine_of
from tests.support.allocations import live_bytes
from tests.support.ranks import RankPool

pytestmark = pytest.mark.timeout(3600)  # thousands of steps in one test
LIBC = ctypes.CDLL("libc.so.6")
MOST_GROWTH = 12 << 20  # bytes of a process, of what malloc does not see: its allocators round and cache
# Half of what has to be found in each round: bytes in use of malloc, and Python's blocks, of at most 512 bytes each.
MOST_A_STEP, MOST_A_ROUND = (512, 1), (32 << 10, 64)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@dataclass(frozen=True)
class Use:
    """What a process has: of tensors, of everything and of malloc in bytes, and how many of the rest."""

    tensors: int
    memory: int
    heap: int
    blocks: int
    threads: int
    files: int
    groups: int
    hooks: int


def heap() -> int:
    """Bytes that malloc has given out in all arenas. Python's small objects are not among them."""
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    LIBC.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(LIBC.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    LIBC.malloc_info(0, stream)
    LIBC.fclose(stream)
    told = (text.value or b"").decode().rpartition("</heap>")[2]
    LIBC.free(text)
    sizes = {kind: int(number) for kind, number in re.findall(r'type="(\w+)" (?:count="\d+" )?size="(\d+)"', told)}
    return sizes["current"] + sizes["mmap"] - sizes["fast"] - sizes["rest"]


def use(*models: nn.Module) -> Use:
    gc.collect()
    LIBC.malloc_trim(0)
    me = psutil.Process()
    modules = [module for model in models for module in model.modules()]
    params = [param for model in models for param in model.parameters()]
    hooks = sum(len(getattr(module, name)) for module in modules for name in HOOKS)
    hooks += sum(len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) for param in params)
    hooks += sum(len(param._backward_hooks or ()) for param in params)
    counts = me.num_threads(), me.num_fds(), len(c10d._world.pg_map), hooks
    return Use(live_bytes(), me.memory_info().rss, heap(), sys.getallocatedblocks(), *counts)


def steps(way: str, folder: str, number: int) -> list[Use]:
    with engine_of(way) as engine:
        engine.train(range(number // 5))
        first = use(engine.model)
        for step in range(number // 5, number):
            engine.train(range(step % 50, step % 50 + 1))  # the same batches again, as making them takes time
        return [first, use(engine.model)]


def engines(way: str, folder: str, number: int) -> list[Use]:
    found = []
    for at in range(number):
        with engine_of(way) as engine:
            engine.train(range(1))
        del engine
        if at == number // 5:
            found.append(use())
    return [*found, use()]


def saves(way: str, folder: str, number: int) -> list[Use]:
    found = []
    with engine_of(way) as engine:
        engine.train(range(1))
        for at in range(number):
            target = f"{folder}/{at}"
            engine.save(target)
            engine.load(target)
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(target)
            torch.distributed.barrier()
            if at == number // 5:
                found.append(use(engine.model))
        return [*found, use(engine.model)]


RUNS = {steps: 2000, engines: 50, saves: 50}
# DeepSpeed keeps every engine of stage 3, stock ones too: hooks and methods that it puts into the module refer to it.
ROWS = [(way, run) for run in RUNS for way in WAYS if (way, run) != ("zero 3", engines)]


@pytest.mark.parametrize(("way", "run"), ROWS, ids=lambda arg: getattr(arg, "__name__", arg))
def test_what_a_process_has_does_not_grow(tmp_path: Path, way: str, run: Callable[..., list[Use]]) -> None:
    pool = RankPool(2)
    try:
        of_ranks = pool.run(run, way, str(tmp_path), count(RUNS[run]), timeout=3000.0)
    finally:
        pool.close()
    print(f"{way}, {run.__name__}: {of_ranks[0]}")
    rounds = count(RUNS[run]) - count(RUNS[run]) // 5
    most_bytes, most_blocks = MOST_A_STEP if run is steps else MOST_A_ROUND
    for first, last in of_ranks:
        for what in ("tensors", "threads", "files", "groups", "hooks"):
            assert getattr(last, what) <= getattr(first, what), (what, first, last)
        assert last.heap - first.heap < most_bytes * rounds, (first, last)
        assert last.blocks - first.blocks < most_blocks * rounds, (first, last)
        assert last.memory - first.memory < MOST_GROWTH, (first, last)
