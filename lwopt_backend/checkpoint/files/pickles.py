"""Reads pickles as plain data, tensors, arrays of numbers, and stubs of other programs' objects. Runs no code."""

from __future__ import annotations

import io
import math
import pickle
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._weights_only_unpickler import Unpickler, _remove_safe_globals, get_globals_in_pkl

from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor, shape_of
from lwopt_backend.runtime.nested import with_values

PLAIN_DTYPE = re.compile(r"[biufcSU][0-9]{1,9}")  # no objects or fields: bytes of a file never become pointers


class Stub:
    """Stands for an object of a class that is not imported: its constructor's arguments and its attributes."""

    def __new__(cls, *args: Any, **_: Any) -> Stub:
        made = super().__new__(cls)
        made.__dict__["stub_args"] = args
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Set its attributes, or ``stub_state`` if ``state`` is not a dictionary."""
        if type(state) is not dict:
            state = {"stub_state": state}
        if not all(type(key) is str for key in state):
            raise ValueError(f"expected strings as names of a {type(self).__name__}'s attributes, found others")
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.stub_args or ''}"

    stub_args: tuple[Any, ...]


# numpy's objects. Arrays are built from their bytes, because numpy's own functions trust their input.


class _Dtype:
    def __init__(self, kind: Any = None, *_: Any) -> None:
        if type(kind) is not str or not PLAIN_DTYPE.fullmatch(kind):
            raise ValueError(f"expected a numpy dtype of plain numbers or text, found {str(kind)[:50]!r}")
        self.made = numpy.dtype(kind)

    def __setstate__(self, state: Any) -> None:
        _, order, *fields = state
        if order not in ("<", ">", "|", "=") or any(fields[:3]):
            raise ValueError(f"expected the state of numpy's dtype {self.made}, found another's")
        self.made = self.made.newbyteorder(order)


class _Array:
    made: numpy.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, sizes, dtype, is_fortran, data = state
        self.made = _elements(dtype, data, shape_of(sizes), "F" if is_fortran else "C")


def _elements(dtype: Any, data: Any, shape: tuple[int, ...], order: Any = "C") -> numpy.ndarray[Any, Any]:
    """An array from bytes. Raises ValueError for a wrong number of bytes."""
    if type(dtype) is not _Dtype or type(data) is not bytes:
        raise ValueError(f"expected numpy's dtype and bytes, found {type(dtype).__name__}, {type(data).__name__}")
    if len(data) != math.prod(shape) * dtype.made.itemsize:
        raise ValueError(f"expected the bytes of {math.prod(shape)} elements of dtype {dtype.made}, found {len(data)}")
    if not data:
        return numpy.empty(shape, dtype.made, order)
    return numpy.frombuffer(data, dtype.made).reshape(shape, order=order).copy(order="K")


def _scalar(dtype: Any, data: Any) -> Any:
    return _elements(dtype, data, (1,))[0]


def _attribute(of: Any, name: Any) -> Any:
    """A class's attribute, by which enums may be pickled."""
    if isinstance(of, type) and issubclass(of, Stub) and type(name) is str:
        return of(name)
    raise ValueError("expected an attribute of a class of another program, found one of something else")


# Names in pickles. Nothing is imported by a name: torch's reader knows some of these, others have replacements below,
# classes of other programs become stubs, and everything else is refused.

# An instance of these packages' classes becomes a stub with its attributes.
LOOKED_AT = ("megatron", "transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext", "apex", "deepspeed")
DCP = "torch.distributed.checkpoint."
STUBS = {
    *("argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "builtins.range", "builtins.slice"),
    *("builtins.int", "builtins.float", "builtins.str"),
    *(f"{m}.{n}" for m in ("pathlib", "pathlib._local") for n in ("Path", "PosixPath", "PurePosixPath")),
    *(f"{m}.{n}" for m in ("pathlib", "pathlib._local") for n in ("WindowsPath", "PureWindowsPath")),
}
OURS: dict[str, Any] = {
    "collections.defaultdict": lambda _=None, *args: dict(*args),
    "collections.deque": lambda values=(), _=None: list(values),
    "builtins.dict": lambda *args: dict(*args),
    "builtins.list": lambda values=(): list(values),
    "builtins.tuple": lambda values=(): tuple(values),
    "builtins.frozenset": lambda values=(): frozenset(values),
    "builtins.bytes": lambda: b"",  # how empty bytes are pickled up to protocol 2
    "builtins.getattr": _attribute,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    **{f"numpy.{core}.multiarray._reconstruct": lambda *_: _Array() for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
OF_TORCH = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.set", "builtins.complex"),
    *("torch.Size", "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.UntypedStorage"),
    *("torch.serialization._get_layout", "torch.storage.UntypedStorage", "torch._tensor._rebuild_from_type_v2"),
    *(f"torch._utils._rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter", "parameter_with_state")),
    *(f"torch.{name}" for name in torch.storage._dtype_to_storage_type_map().values()),
}


def _is_dtype(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return module == "torch" and isinstance(getattr(torch, last, None), torch.dtype)


def _made_by_us(name: str, where: str) -> Any:
    """The replacement for a name, if torch has none. Raises CheckpointError."""
    if name in OURS:
        return OURS[name]
    if name in STUBS or name.split(".")[0] in LOOKED_AT or name.startswith(DCP):
        return type(name.rpartition(".")[2], (Stub,), {"__module__": name.rpartition(".")[0]})
    raise CheckpointError(
        f"{where}: expected names that checkpoints use, found {name[:200]}, which is not imported; the file may be "
        "made to run code: do not load it with anything else either"
    )


_lock = threading.Lock()  # torch has one list of names for all threads


@contextmanager
def _standing_for(made: list[tuple[Any, str]]) -> Iterator[None]:
    """Within it, torch's reader takes these objects for these names. Megatron and DeepSpeed also allow classes of these
    names (``add_safe_globals``), and torch would take one or the other by chance."""
    names = {name for _, name in made}
    allowed = torch.serialization.get_safe_globals()
    others = [one for one in allowed if (one[1] if isinstance(one, tuple) else _name_of(one)) in names]
    _remove_safe_globals(others)
    try:
        with torch.serialization.safe_globals(list(made)):
            yield
    finally:
        torch.serialization.add_safe_globals(others)


def _name_of(allowed: Any) -> str:
    return f"{allowed.__module__}.{allowed.__qualname__}"


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Raises CheckpointError for the errors of a damaged pickle, which may be any."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{where} cannot be unpickled ({reason}); copy it again") from error


def load(data: bytes, where: str, storage: Callable[[str, int], torch.UntypedStorage]) -> Any:
    """The object that torch.save pickled; ``storage`` makes a tensor's storage from its key and its number of bytes.

    Uses torch.load's reader with ``weights_only``, but not torch.load itself, which up to 2.10 reads all tensors with
    ``map_location="meta"``, and takes 16 times as long with FakeTensorMode. Raises CheckpointError for a name that is
    not allowed, and for content that the reader does not support, such as a pickle protocol above 2.
    """

    def persistent_load(saved: Any) -> Any:
        _, kind, key, _, numel = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        found = storage(key, numel * dtype.itemsize)
        return torch.storage.TypedStorage(wrap_storage=found, dtype=dtype, _internal=True)

    if data[:1] == pickle.PROTO and data[1:2] != b"\x02":
        raise CheckpointError(
            f"{where}: expected pickle protocol 2, which torch.load(weights_only=True) reads, found {data[1:2].hex()}; "
            "save it again without pickle_protocol"
        )
    with _naming(where):
        names = get_globals_in_pkl(io.BytesIO(data))
        foreign = sorted(name for name in names if name not in OF_TORCH and not _is_dtype(name))
        made: list[Any] = [(_made_by_us(name, where), name) for name in foreign]
        reader = Unpickler(io.BytesIO(data), encoding="utf-8")
        reader.persistent_load = persistent_load  # type: ignore[method-assign]  # as torch.load does
        with _lock, _standing_for(made):
            return reader.load()


class _OfDcp(pickle._Unpickler):
    """The unpickler in Python: the one in C allocates as much memory as a number in the file asks for."""

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where, self._named = where, dict[str, Any]()

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        if _is_dtype(full):
            return getattr(torch, name)
        known: dict[str, Any] = {"torch.Size": torch.Size, "collections.OrderedDict": OrderedDict}
        known["torch.serialization._get_layout"] = lambda name: str(name)
        if full in known:
            return known[full]
        return self._named.setdefault(full, _made_by_us(full, self._where))


def load_metadata(data: bytes, where: str) -> Any:
    """The object that torch.distributed.checkpoint pickled, with stubs of its classes. Raises CheckpointError."""
    with _naming(where):
        return _OfDcp(data, where).load()


def replaced(found: Any, tensor: Callable[[Tensor, str], Any]) -> Any:
    """The structure with ``tensor(value, key)`` in place of each tensor, and with numpy's arrays; shared parts are
    converted once. Raises ValueError for a reference cycle."""
    done: dict[int, tuple[Any, Any]] = {}  # by id, with the original, to keep it alive
    within: set[int] = set()

    def of(value: Any, key: str) -> Any:
        if not isinstance(value, (Tensor, dict, list, tuple, Stub, _Array, _Dtype)):
            return value
        if id(value) in within:
            raise ValueError(f"expected no reference cycle, found a {type(value).__name__} that contains itself")
        if id(value) not in done:
            within.add(id(value))
            done[id(value)] = value, made(value, key)
            within.remove(id(value))
        return done[id(value)][1]

    def made(value: Any, key: str) -> Any:
        start = f"{key}." if key else ""
        if isinstance(value, Tensor):
            return tensor(value, key)
        if isinstance(value, (_Array, _Dtype)):
            return value.made
        if isinstance(value, dict):
            return with_values(value, lambda k, v: of(v, f"{start}{k}"))
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            entries = [of(v, f"{start}{i}") for i, v in enumerate(value)]
            return entries if isinstance(value, list) else tuple(entries)
        if isinstance(value, Stub):
            vars(value).update({k: of(v, f"{start}{k}") for k, v in vars(value).items()})
        return value

    return of(found, "")


# Objects of other programs, such as Megatron's ``args``, as plain data.


def plain(value: Any, notes: list[str] | None = None) -> Any:
    """``value`` without objects of other programs' classes: namespaces become dictionaries, paths strings, enums
    ``"AttnBackend(5)"``; adds a note for each. Numbers, texts, tensors, arrays and dtypes do not change."""
    if isinstance(value, Mapping):
        return with_values(value, lambda _, entry: plain(entry, notes))
    if type(value) in (list, tuple):
        return type(value)(plain(entry, notes) for entry in value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if not isinstance(value, Stub):
        return value
    if notes is not None:
        notes.append(f"an object of class {type(value).__name__} was kept as plain data")
    attributes = {key: entry for key, entry in vars(value).items() if key != "stub_args"}
    name, arguments = type(value).__name__, value.stub_args
    if name.endswith("Path"):
        return str(PurePosixPath(*arguments))
    if attributes or not arguments:
        return plain(attributes, notes)
    return f"{name}({', '.join(str(plain(argument)) for argument in arguments)})"


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
    return type(value)(map(in_memory, value)) if type(value) in (list, tuple) else value
