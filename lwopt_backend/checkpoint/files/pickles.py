"""Reads pickles without running anything: tensors, plain data, and stubs of other programs' objects."""

from __future__ import annotations

import io
import math
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor
from lwopt_backend.checkpoint.files.folders import check_tree
from lwopt_backend.checkpoint.files.made import Made, Maker, Named, StorageKind, Stub, check_key, keys_of

# Objects of other programs, such as Megatron's ``args``, as plain data.


def plain(value: Any, notes: list[str] | None = None) -> Any:
    """``value`` without objects of other programs' classes: namespaces become dictionaries, paths strings, enums
    ``"AttnBackend(5)"``; adds a note for each. Numbers, texts, tensors, arrays and dtypes stay what they are."""
    if isinstance(value, Mapping):
        return {key: plain(entry, notes) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(entry, notes) for entry in value)
    if isinstance(value, Named):
        return value.name
    if not isinstance(value, Stub):
        return value
    if notes is not None:
        notes.append(f"an object of class {type(value).__name__} was kept as plain data")
    attributes = {key: entry for key, entry in vars(value).items() if key != "stub_args"}
    name, arguments = type(value).__name__, getattr(value, "stub_args", ())
    if name.endswith("Path"):
        return str(PurePosixPath(*arguments))
    if attributes or not arguments:
        return plain(attributes, notes)
    return f"{name}({', '.join(str(plain(argument)) for argument in arguments)})"


def number(value: Any) -> Any:
    """A Python number of a tensor or an array that has one element, and of numpy's numbers; other values stay."""
    if isinstance(value, LazyTensor) and value.numel == 1:
        value = value.read()
    if isinstance(value, (Tensor, numpy.ndarray, numpy.generic)) and math.prod(value.shape) == 1:
        return value.item()
    return value


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group's options as plain data, without its parameters; those that are tensors or numpy's as numbers."""
    return {key: number(plain(value)) for key, value in group.items() if key != "params"}


def in_memory(value: Any) -> Any:
    """``value`` with tensors that were read in place of lazy ones."""
    if isinstance(value, LazyTensor):
        return value.read()
    if isinstance(value, Mapping):
        return {key: in_memory(entry) for key, entry in value.items()}
    return type(value)(map(in_memory, value)) if type(value) in (list, tuple) else value


# Unpickling without running anything from the file, and without making more than the file can contain.
# A class or function that is named in a pickle is never imported. It becomes a ``Named`` that stands for it: one of our
# own constructors (``made.Made``), a stub for classes of other programs, or an error. Only lists, dictionaries and sets
# are filled, and only stubs and numpy's arrays take state. The result is a tree of limited depth and size: as large as
# the file, if everything shared were written out.

Reference = Callable[[Any], Any]
Makers = Mapping[tuple[str, str], Maker]
# Classes of these are only looked at: an instance becomes a stub that has its attributes.
LOOKED_AT = ("megatron", "transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext", "apex", "deepspeed")
DCP = "torch.distributed.checkpoint"  # importing it takes as long as importing torch
LOOKED_AT_TOO = {
    *(("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals")),
    *(("builtins", "range"), ("builtins", "slice")),  # a few bytes that stand for any number of elements
}
PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")  # the latter in Python 3.13
    for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
# What is only ever an argument: of a constructor, of a tensor's type, of a default.
MENTIONED = {
    *(("builtins", "int"), ("builtins", "float"), ("builtins", "str"), ("numpy", "ndarray")),
    *(("torch", "Tensor"), ("torch.nn.parameter", "Parameter")),
}
_STORAGES = {name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
_UNTYPED = {("torch", "UntypedStorage"), ("torch.storage", "UntypedStorage")}


def load(data: bytes, where: str, persistent_load: Reference | None = None, makers: Makers | None = None) -> Any:
    """Unpickle ``data``; ``persistent_load`` resolves references, ``makers`` are further constructors. Raises
    CheckpointError, naming ``where``, for anything that is not allowed."""
    try:
        found = _Unpickler(data, where, persistent_load, makers or {}).load()
        check_tree(found, len(data))
        return found
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise anything
        reason = f"{type(error).__name__}: {error}"[:300]
        raise CheckpointError(f"{where} cannot be unpickled ({reason}); is it whole?") from error


class _Unpickler(pickle._Unpickler):  # the one in Python, because the one in C does not let us restrict fills and calls
    proto: int
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, data: bytes, where: str, persistent_load: Reference | None, makers: Makers) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._where, self._persistent_load, self._nbytes = where, persistent_load, len(data)
        self._made = Made(len(data))
        self._makers = {**self._made.makers(), **makers, ("builtins", "getattr"): _attribute}
        self._named: dict[tuple[str, str], Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise CheckpointError(f"{self._where} refers to something that is not in the file")
        return self._persistent_load(pid)

    def find_class(self, module: str, name: str, /) -> Any:
        asked = (module, name)
        if asked in self._named:
            return self._named[asked]
        if self.proto < 3:  # as Python 2 names them
            module, name = NAME_MAPPING.get(asked, (IMPORT_MAPPING.get(module, module), name))
        key = (module, name)
        dtype = getattr(torch, name, None) if module == "torch" else None
        looked_at = module.split(".")[0] in LOOKED_AT or f"{module}.".startswith(f"{DCP}.")
        found: Any
        if looked_at or key in LOOKED_AT_TOO | PATHS:
            found = Named(module, name, type(name.rpartition(".")[2], (Stub,), {}))
        elif key in self._makers or key in MENTIONED:
            found = Named(module, name, self._makers.get(key))
        elif key in _UNTYPED or module == "torch" and name in _STORAGES:
            found = StorageKind(_STORAGES.get(name, torch.uint8))
        elif isinstance(dtype, torch.dtype):
            found = dtype
        else:
            raise CheckpointError(
                f"{self._where} asks for {module[:100]}.{name[:100]}, which checkpoints have no use for and which is "
                "not imported; the file may be made to run code: do not load it with anything else either"
            )
        self._named[asked] = found
        return found

    # Opcodes: those of pickle._Unpickler that call, fill or allocate what the file chooses

    def _call(self, named: Any, args: Any) -> Any:
        if type(named) is not Named or named.make is None or type(args) is not tuple:
            raise ValueError(f"it calls {named if type(named) is Named else type(named).__name__}")
        return named.make(*args)

    def load_reduce(self) -> None:
        args, named = self.stack.pop(), self.stack.pop()
        self.append(self._call(named, args))

    def load_newobj_ex(self) -> None:
        kwargs, args, named = self.stack.pop(), self.stack.pop(), self.stack.pop()
        made = self._call(named, args)
        if kwargs:
            self._set_state(made, kwargs)
        self.append(made)

    def load_build(self) -> None:
        state = self.stack.pop()
        self._set_state(self.stack[-1], state)

    def _set_state(self, of: Any, state: Any) -> None:
        if isinstance(of, Stub):
            of.set_state(state)
        elif type(of) is not OrderedDict:  # a module's state dict has a version there, which is not kept
            self._made.set_state(of, state)

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (list, deque):
            raise ValueError(f"it appends to a {type(target).__name__}")
        target.extend(values)

    def _update(self, items: Any) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict):
            raise ValueError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    def load_additems(self) -> None:
        items, target = keys_of(self.pop_mark()), self.stack[-1]
        if type(target) is not set:
            raise ValueError(f"it adds to a {type(target).__name__}")
        target.update(items)

    def load_frozenset(self) -> None:
        items = frozenset(keys_of(self.pop_mark()))
        self.append(items)

    def load_bytearray8(self) -> None:
        length = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(min(length, self._nbytes))))


def _attribute(of: Any, name: Any) -> Any:
    """Enums are pickled by name, as attributes of their class."""
    if type(of) is Named and isinstance(of.make, type) and issubclass(of.make, Stub) and type(name) is str:
        return of.make(name)
    raise ValueError("it asks for an attribute of something that is no class of another program")


def _dispatch() -> Any:
    """The opcodes that checkpoints use. Left out are those that call or refer to anything outside the file, and those
    of protocols 0 and 1, in which no checkpoint is written."""
    known = cast(dict[int, Any], dict(pickle._Unpickler.dispatch))
    others = "EXT1 EXT2 EXT4 NEXT_BUFFER READONLY_BUFFER LONG4 PERSID OBJ INST DICT LONG INT"
    for name in others.split():
        del known[getattr(pickle, name)[0]]
    for name in ("REDUCE", "NEWOBJ_EX", "BUILD", "ADDITEMS", "FROZENSET", "BYTEARRAY8"):
        known[getattr(pickle, name)[0]] = getattr(_Unpickler, f"load_{name.lower()}")
    known[pickle.APPEND[0]] = lambda self: self._extend([self.stack.pop()])
    known[pickle.APPENDS[0]] = lambda self: self._extend(self.pop_mark())
    known[pickle.SETITEM[0]] = lambda self: self._update([self.stack.pop(-2), self.stack.pop()])
    known[pickle.SETITEMS[0]] = lambda self: self._update(self.pop_mark())
    known[pickle.NEWOBJ[0]] = _Unpickler.load_reduce
    return known


_Unpickler.dispatch = _dispatch()
