"""What is really held: live tensors as the garbage collector sees them, and the CPU allocator's own events."""

import gc
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@contextmanager
def watched() -> Iterator[None]:
    """Within it ``live_bytes`` sees only what was made since; that makes it quick, in processes that imported much.
    What there is stays out of the collector's sight, as it is in ranks from the start: to look through it takes longer
    than most tests."""
    gc.collect()
    gc.freeze()
    yield


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def live_bytes(*, collect: bool = True) -> int:
    """Bytes of the storages of all tensors that parameters, state and gradients may be, each counted once. DTensors and
    what FSDP2 has freed have no storage of their kind, and hold nothing."""
    if collect:
        gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type != "meta" and thing.dtype in FLOATS:
            with suppress(RuntimeError):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def come_to_be(expected: int, before: int = 0) -> int:
    """``live_bytes`` since ``before``; threads of a transport may keep what they have sent for a moment longer, which
    on a busy machine is seconds."""
    end = time.monotonic() + 60
    while (found := live_bytes() - before) != expected and time.monotonic() < end:
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Allocations:
    """Bytes that a call had at most on top of what there was, and that it left."""

    peak: int
    left: int


def allocations(function: Callable[[], Any], *, at_least: int = 0) -> Allocations:
    """What a call allocates and frees on this thread, with the garbage collector off. What is smaller than ``at_least``
    does not count: tensors that PyTorch makes of numbers, and flags, which a transport's thread may free."""
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            function()
    finally:
        gc.enable()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events = [event for event in events if abs(event.nbytes()) >= at_least]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return Allocations(peak, held)


def reachable(*roots: object) -> list[Tensor]:
    """Every tensor that one comes to from these objects: by attributes, containers, closures, and as ``grad``."""
    left_out = (types.ModuleType, type, types.FrameType, types.BuiltinFunctionType)
    found: list[Tensor] = []
    known, waiting = set[int](), [*roots]
    while waiting:
        thing = waiting.pop()
        if id(thing) in known or isinstance(thing, left_out):
            continue
        known.add(id(thing))
        if isinstance(thing, Tensor):
            found.append(thing)
            waiting.append(thing.grad if thing.is_leaf else None)
        if isinstance(thing, types.FunctionType):
            waiting += [thing.__closure__, thing.__defaults__, thing.__dict__]  # not what its module has
        else:
            waiting += gc.get_referents(thing)
    return found
