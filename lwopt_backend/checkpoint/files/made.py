"""Objects that pickles ask for, made by us; and calls that run in several threads."""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch

T = TypeVar("T")


def in_order(calls: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """Yield the calls' results in order; at most ``workers`` are computed, waiting or in use. Uses threads: reading,
    writing, checksums and torch's operations release the interpreter's lock."""
    if workers <= 1:
        yield from (call() for call in calls)
        return
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                if len(waiting) == workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(call))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def all_done(calls: Iterable[Callable[[], object]], workers: int) -> None:
    """Run the calls, ``workers`` at a time; a long one does not delay the others. Raises the first error; calls that
    have not started by then are not made."""
    if workers <= 1:
        for call in calls:
            call()
        return
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            for future in futures:
                future.cancel()


# What a pickle can make: containers, numbers, numpy's arrays of plain numbers; nothing larger than the file.

Maker = Callable[..., Any]
MOST_PER_KEY = 16  # elements of a tuple as a key, because every use hashes it
PLAIN_DTYPE = re.compile(r"[biufcSU][0-9]{1,9}")  # no objects, no fields: bytes of the file never become pointers
NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")  # before and from numpy 2 on
LATIN1 = ("latin1", "latin-1")  # how bytes are pickled up to protocol 2
_SEQUENCES = (list, tuple, set, frozenset, deque)


class Named:
    """A class or function by its name in a pickle. ``make`` stands in for calling it, if that is allowed."""

    __slots__ = ("make", "name")

    def __init__(self, module: str, name: str, make: Maker | None) -> None:
        self.name, self.make = f"{module}.{name}", make

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class StorageKind:
    """The dtype of a record, as a reference to it says; uint8 if it does not."""

    dtype: torch.dtype


class Stub:
    """Stands for an object of a class that is not imported: its constructor's arguments and its attributes."""

    def __init__(self, *args: Any) -> None:
        self.stub_args = args

    def set_state(self, state: Any) -> None:
        """Set its attributes, or ``stub_state`` if ``state`` is not a dictionary."""
        if type(state) is not dict:
            self.__dict__["stub_state"] = state
        elif all(type(key) is str for key in state):
            self.__dict__.update(state)
        else:
            raise ValueError(f"a {type(self).__name__} has attributes whose names are not strings")

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.stub_args or ''}"


def check_key(key: Any, depth: int = 3) -> None:
    """Raises ValueError for a key that takes long to hash, may collide at will, or runs code to hash."""
    kind = type(key)
    if kind is str or kind in (bytes, bool, float, type(None), torch.dtype, Named) or isinstance(key, Stub):
        return
    if kind is int and -(2**63) <= key < 2**64:
        return
    if kind in (tuple, frozenset, torch.Size) and len(key) <= MOST_PER_KEY and depth:
        for part in key:
            check_key(part, depth - 1)
        return
    raise ValueError(f"a key of a dictionary or set is a {kind.__name__}, or a long one")


def keys_of(values: Any) -> Any:
    """Returns ``values``. Raises ValueError unless all of them may be keys."""
    for value in values:
        check_key(value)
    return values


class Made:
    """Constructors that together copy at most as many elements as a file of ``nbytes`` can have."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._left = 4 * nbytes + 2**16  # bytes may be text first and an array's then

    def makers(self) -> dict[tuple[str, str], Maker]:
        """The constructors, by module and name."""
        found: dict[tuple[str, str], Maker] = {
            ("collections", "OrderedDict"): lambda *args: self._dict(OrderedDict(), *args),
            ("collections", "Counter"): lambda *args: self._dict({}, *args),
            ("collections", "defaultdict"): lambda _=None, *args: self._dict({}, *args),
            ("collections", "deque"): lambda values=(), most=None: deque(self._taken(values), most),
            ("builtins", "dict"): lambda *args: self._dict({}, *args),
            ("builtins", "list"): lambda values=(): list(self._taken(values)),
            ("builtins", "tuple"): lambda values=(): tuple(self._taken(values)),
            ("builtins", "set"): lambda values=(): set(keys_of(self._taken(values))),
            ("builtins", "frozenset"): lambda values=(): frozenset(keys_of(self._taken(values))),
            ("builtins", "bytearray"): lambda v=b"", *how: bytearray(self._encode(v, *how) if how else self._bytes(v)),
            ("builtins", "bytes"): lambda: b"",  # how those that are empty are pickled up to protocol 2
            ("builtins", "complex"): _complex,
            ("_codecs", "encode"): self._encode,
            ("torch", "Size"): lambda sizes=(): torch.Size(shape_of(self._taken(sizes))),
            ("torch", "device"): _device,
            ("torch.serialization", "_get_layout"): _layout,
            ("numpy", "dtype"): self._dtype,
        }
        for module in NUMPY:
            # The first form of numpy's pickled arrays; their state follows.
            found |= {(module, "_reconstruct"): lambda *_: numpy.empty((0,), "b"), (module, "scalar"): self._scalar}
        return found

    def set_state(self, of: Any, state: Any) -> None:
        """Set the state of numpy's objects. Raises ValueError unless it is as numpy writes it for plain numbers."""
        if isinstance(of, numpy.dtype):
            if type(state) is not tuple or state != of.__reduce__()[2]:
                raise ValueError(f"numpy's dtype {of} has the state of another")
        elif type(of) is numpy.ndarray:
            _, sizes, dtype, is_fortran, data = state
            shape = shape_of(sizes)
            elements: Any = (1, shape, dtype, bool(is_fortran), self._elements(dtype, data, math.prod(shape)))
            of.__setstate__(elements)
        else:
            raise ValueError(f"it sets the state of a {type(of).__name__}")

    def _taken(self, values: Any) -> Any:
        """Returns ``values``. Raises ValueError unless they are a container with no more elements than are left."""
        if type(values) not in (*_SEQUENCES, torch.Size, dict, OrderedDict):
            raise ValueError(f"it makes a container of a {type(values).__name__}")
        self._take(len(values))
        return values

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("it makes more than a file of this size can hold")

    def _dict(self, empty: dict[Any, Any], values: Any = ()) -> dict[Any, Any]:
        pairs = self._taken(values)
        for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
            check_key(key)
            empty[key] = value
        return empty

    def _encode(self, text: str, encoding: str) -> bytes:
        if type(text) is not str or encoding not in LATIN1:
            raise ValueError(f"it encodes a {type(text).__name__} in another way than bytes are written")
        self._take(len(text))
        return text.encode(LATIN1[0])

    def _bytes(self, values: Any) -> bytes:
        if type(values) is not bytes:
            raise ValueError(f"expected bytes, found a {type(values).__name__}")
        self._take(len(values))
        return values

    def _dtype(self, kind: str, *_: Any) -> Any:
        found = numpy.dtype(kind) if type(kind) is str and PLAIN_DTYPE.fullmatch(kind) else None
        if found is None or found.itemsize > self._nbytes:
            raise ValueError("numpy's dtype is not one of plain numbers or text")
        return found

    def _scalar(self, dtype: Any, data: Any) -> Any:
        return numpy.ndarray((), dtype, self._elements(dtype, data, 1))[()]

    def _elements(self, dtype: Any, data: Any, count: int) -> bytes:
        """Bytes for exactly ``count`` elements of a dtype that ``_dtype`` made. Raises ValueError."""
        found = self._bytes(data)
        if not isinstance(dtype, numpy.dtype):
            raise ValueError(f"expected numpy's dtype, found a {type(dtype).__name__}")
        if len(found) != count * dtype.itemsize:
            raise ValueError(f"an array of {count} elements of dtype {dtype} has {len(found)} bytes")
        return found


def shape_of(sizes: Any) -> tuple[int, ...]:
    """Sizes in a file as a shape. Raises ValueError if they are not, or have too many elements."""
    if type(sizes) not in (tuple, list, torch.Size) or len(sizes) > 32:  # numpy's own limit, up to version 1
        raise ValueError("a shape is no tuple, or too long")
    if not all(type(size) is int and size >= 0 for size in sizes) or math.prod(max(n, 1) for n in sizes) >= 2**48:
        raise ValueError("a shape has sizes that cannot be")
    return tuple(sizes)


def _complex(real: Any, imaginary: Any) -> complex:
    if not all(type(part) in (int, float) for part in (real, imaginary)):
        raise ValueError("a complex number is made of something else than numbers")
    return complex(real, imaginary)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or not (index is None or type(index) is int):
        raise ValueError("a device is made of something else than a name and a number")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: Any) -> Any:
    found = getattr(torch, name.removeprefix("torch."), None) if type(name) is str else None
    if not isinstance(found, torch.layout):
        raise ValueError("it asks for a layout that torch does not have")
    return found
