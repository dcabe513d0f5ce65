"""Reads pickles as plain data, tensors in their files, arrays of numbers, and stubs; runs and imports nothing."""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import PurePosixPath
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor, shape_of
from lwopt_backend.runtime.nested import with_values

PLAIN_DTYPE = re.compile(r"[biufcSU][0-9]{1,9}")  # no objects or fields: bytes of a file never become pointers


class Stub:
    """Stands for an object of a class that is not imported: its constructor's arguments, attributes and entries."""

    def __new__(cls, *args: Any, **_: Any) -> Stub:
        made = super().__new__(cls)
        made.__dict__.update(stub_args=args, stub_items=[])
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Set its attributes, or ``stub_state`` if ``state`` is not a dictionary."""
        if type(state) is not dict:
            state = {"stub_state": state}
        if not all(type(key) is str for key in state):
            raise ValueError(f"expected strings as names of a {type(self).__name__}'s attributes, found others")
        self.__dict__.update(state)

    def append(self, entry: Any) -> None:
        self.stub_items.append(entry)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.stub_items.append((key, value))

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.stub_args or ''}"

    stub_args: tuple[Any, ...]
    stub_items: list[Any]


# numpy's objects. Arrays are built from their bytes, because numpy's own functions trust their input. Arrays of other
# dtypes (objects, fields, dates) are left out: ``made`` is a text that says so.


class _Dtype:
    def __init__(self, kind: Any = None, *_: Any) -> None:
        is_plain = type(kind) is str and PLAIN_DTYPE.fullmatch(kind)
        self.made: Any = numpy.dtype(kind) if is_plain else f"numpy.dtype({str(kind)[:50]!r})"

    def __setstate__(self, state: Any) -> None:
        if isinstance(self.made, str):
            return
        _, order, *fields = state
        if order not in ("<", ">", "|", "=") or any(fields[:3]):
            raise ValueError(f"expected the state of numpy's dtype {self.made}, found another's")
        self.made = self.made.newbyteorder(order)


class _Array:
    made: Any = None

    def __setstate__(self, state: Any) -> None:
        _, sizes, dtype, is_fortran, data = state
        if isinstance(dtype, _Dtype) and isinstance(dtype.made, str):
            self.made = f"numpy.ndarray({shape_of(sizes)}, {dtype.made})"
        else:
            self.made = _elements(dtype, data, shape_of(sizes), "F" if is_fortran else "C")


def _scalar(dtype: Any, data: Any) -> Any:
    if isinstance(dtype, _Dtype) and isinstance(dtype.made, str):
        return dtype
    return _elements(dtype, data, (1,))[0]


def _elements(dtype: Any, data: Any, shape: tuple[int, ...], order: Any = "C") -> numpy.ndarray[Any, Any]:
    """An array from bytes. Raises ValueError for a wrong number of bytes."""
    if type(dtype) is not _Dtype or type(data) is not bytes:
        raise ValueError(f"expected numpy's dtype and bytes, found {type(dtype).__name__}, {type(data).__name__}")
    if len(data) != math.prod(shape) * dtype.made.itemsize:
        raise ValueError(f"expected the bytes of {math.prod(shape)} elements of dtype {dtype.made}, found {len(data)}")
    if not data:
        return numpy.empty(shape, dtype.made, order)
    return numpy.frombuffer(data, dtype.made).reshape(shape, order=order).copy(order="K")


# Names in pickles. A name in the lists below stands for the function there, any other for a stub that is never called.


class Known:
    """What a name stands for. Unlike a function or a class, a pickle cannot change it: BUILD sets attributes."""

    __slots__ = ("_make", "name")

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name, self._make = name, make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise ValueError("expected the state of an object, found one of a function")


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """How bytes are pickled up to protocol 2."""
    if encoding != "latin1":
        raise ValueError(f"expected latin1, found {str(encoding)[:20]!r}")
    return str.encode(text, "latin1")


def _default_dict(factory: Any = None, *rest: Any) -> Any:
    made = FACTORIES.get(factory.__name__) if isinstance(factory, type) else None
    return dict(*rest) if made is None else defaultdict(made, *rest)


FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
KNOWN: dict[str, Callable[..., Any]] = {
    **{f"collections.{kind.__name__}": kind for kind in (OrderedDict, Counter, deque)},
    **{f"builtins.{kind.__name__}": kind for kind in (set, frozenset, tuple, complex)},
    "collections.defaultdict": _default_dict,
    "builtins.bytes": lambda: b"",  # how empty bytes are pickled up to protocol 2
    "_codecs.encode": _encoded,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": str,
    "numpy.dtype": _Dtype,
    **{f"numpy.{core}.multiarray._reconstruct": lambda *_: _Array() for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
TENSORS = {f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3")}
AROUND = {f"torch._utils._rebuild_{name}" for name in ("parameter", "parameter_with_state")}  # their first argument
OF_TYPE = "torch._tensor._rebuild_from_type_v2"  # of a function and its arguments, with attributes
Record = Any
Tensors = Callable[[Record, int, tuple[int, ...], tuple[int, ...], torch.dtype], Any]


class Unpickler(pickle.Unpickler):
    """Reads one pickle from ``file``. ``record`` is called with a tensor's key and number of bytes, and ``tensor`` with
    the result, the first element, shape, stride and dtype. Neither is needed for a pickle without tensors."""

    def __init__(
        self, file: Any, record: Callable[[str, int], Record] | None = None, tensor: Tensors | None = None
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._record, self._tensor = record, tensor
        self._known: dict[str, Any] = {name: Known(name, make) for name, make in KNOWN.items()}
        self._known |= {name: Known(name, self._tensor_of) for name in TENSORS}
        self._known |= {name: Known(name, lambda data, *_: data) for name in AROUND}
        self._known[OF_TYPE] = Known(OF_TYPE, lambda make, _, arguments, __: make(*arguments))

    def find_class(self, module: str, name: str, /) -> Any:
        module = "builtins" if module == "__builtin__" else module  # its name up to protocol 2
        full = f"{module}.{name}"
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if full not in self._known:
            self._known[full] = type(name.rpartition(".")[2], (Stub,), {"__module__": module})
        return self._known[full]

    def persistent_load(self, saved: Any) -> Any:
        if saved[0] == "module":  # with its source code, in the form before torch 1.6
            return saved[1]
        _, kind, key, _, numel, *view = saved
        name = kind.__name__ if isinstance(kind, type) else ""
        dtype = torch.uint8 if name == "UntypedStorage" else (STORAGES | QUANTIZED).get(name)
        known = type(key) is str and type(numel) is int and view in ([], [None])
        if dtype is None or not known or self._record is None:
            raise ValueError(f"expected a tensor's storage, found {str(saved)[:100]}")
        return _Storage(self._record(key, numel * dtype.itemsize), dtype)

    def _tensor_of(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
        if type(storage) is not _Storage or type(offset) is not int or offset < 0 or self._tensor is None:
            raise ValueError("expected a tensor in a storage of the file, found another")
        dtype = rest[2] if len(rest) > 2 and isinstance(rest[2], torch.dtype) else storage.dtype
        if dtype in QUANTIZED.values():
            raise ValueError(f"expected a tensor of plain numbers, found {dtype}")
        return self._tensor(storage.record, offset, shape_of(shape), shape_of(stride), dtype)


class _Storage:
    __slots__ = ("dtype", "record")
    made = "a tensor's storage"

    def __init__(self, record: Record, dtype: torch.dtype) -> None:
        self.record, self.dtype = record, dtype


STORAGES = {
    **{"DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16},
    **{"BFloat16Storage": torch.bfloat16, "ComplexDoubleStorage": torch.complex128, "BoolStorage": torch.bool},
    **{"ComplexFloatStorage": torch.complex64, "LongStorage": torch.int64, "IntStorage": torch.int32},
    **{"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8},
}
QUANTIZED = {"QInt8Storage": torch.qint8, "QUInt8Storage": torch.quint8, "QInt32Storage": torch.qint32}  # left out


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Raises CheckpointError for the errors of a damaged pickle, which may be any."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # MemoryError too, of a number in the file
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{where} cannot be unpickled ({reason}); copy it again") from error


def load(data: bytes, where: str) -> Any:
    """The object in a pickle without tensors, such as DCP's metadata. Raises CheckpointError for damage."""
    with naming(where):
        return Unpickler(io.BytesIO(data)).load()


# Objects of other programs, such as Megatron's ``args``, as plain data.


SIMPLE = (str, bytes, int, float, complex, type(None), torch.dtype)


def _as_key(made: Any) -> Any:
    try:
        hash(made)
    except TypeError:
        return str(made)
    return made


def plain(value: Any, notes: list[str] | None = None) -> Any:
    """``value`` without objects of other programs' classes: namespaces become dictionaries, paths strings, others text
    such as ``"AttnBackend(5)"``, or dictionaries of their arguments; adds a note for each. Containers stay what they
    are, and numbers, texts, tensors, arrays and dtypes do not change. Raises CheckpointError for what contains itself.
    """
    within: set[int] = set()

    def note(text: str) -> None:
        if notes is not None and text not in notes:
            notes.append(text)

    def of(value: Any) -> Any:
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, Known):
            return value.name
        if isinstance(value, (_Array, _Dtype, _Storage)):
            if isinstance(value.made, str):
                note(f"{value.made} was kept as this text, without its content")
            return value.made
        if not isinstance(value, (dict, list, tuple, set, frozenset, deque, Stub)) or isinstance(value, torch.Size):
            return value
        if id(value) in within:
            raise CheckpointError(f"expected no reference cycle, found a {type(value).__name__} that contains itself")
        within.add(id(value))
        made = of_container(value)
        within.remove(id(value))
        return made

    def of_container(value: Any) -> Any:
        if isinstance(value, dict):
            made = copy(value)
            made.clear()
            made.update({_as_key(of(key)): of(entry) for key, entry in value.items()})
            return made
        if isinstance(value, (set, frozenset)):
            return type(value)(_as_key(of(entry)) for entry in value)
        if isinstance(value, (list, tuple, deque)):
            entries = map(of, value)
            return deque(entries, value.maxlen) if isinstance(value, deque) else type(value)(entries)
        note(f"an object of class {type(value).__name__} was kept as plain data")
        attributes = {key: of(entry) for key, entry in vars(value).items() if key not in ("stub_args", "stub_items")}
        name, arguments = type(value).__name__, [of(argument) for argument in value.stub_args]
        if name.endswith("Path"):
            return str(PurePosixPath(*map(str, arguments)))
        if value.stub_items:
            attributes["items"] = [of(entry) for entry in value.stub_items]
        if not attributes and not all(isinstance(argument, SIMPLE) for argument in arguments):
            attributes[name] = arguments
        return attributes if attributes or not arguments else f"{name}({', '.join(map(str, arguments))})"

    try:
        return of(value)
    except RecursionError as error:
        raise CheckpointError("expected data that is nested less deep") from error


def scalar(value: Any) -> Any:
    """A Python number for a tensor or array of one element, or a numpy number; other values do not change."""
    if isinstance(value, LazyTensor) and value.numel == 1:
        value = value.read()
    if isinstance(value, (Tensor, numpy.ndarray, numpy.generic)) and math.prod(value.shape) == 1:
        return value.item()
    return value


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's options as plain data, without its parameters; tensors and numpy's numbers as numbers."""
    return {key: scalar(plain(value)) for key, value in group.items() if key != "params"}


def in_memory(value: Any) -> Any:
    """``value`` with its lazy tensors read."""
    if isinstance(value, LazyTensor):
        return value.read()
    if isinstance(value, Mapping):
        return with_values(value, lambda _, entry: in_memory(entry))
    if isinstance(value, deque):
        return deque(map(in_memory, value), value.maxlen)
    return type(value)(map(in_memory, value)) if type(value) in (list, tuple) else value
