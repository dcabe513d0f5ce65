"""Unpickling without running anything from the file: a named list of classes, stubs for hosts', errors for others."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

import torch
from torch.serialization import StorageType

from lwopt_backend.checkpoint.contents import CheckpointError

# Classes of these are only looked at: an instance becomes a stub that has its attributes.
LOOKED_AT = ("megatron", "transformer_engine", "transformer_engine_torch", "nvidia_resiliency_ext", "apex", "deepspeed")
DCP = "torch.distributed.checkpoint"  # importing it takes as long as importing torch
LOOKED_AT_TOO = {("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals")}
PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")  # the latter in Python 3.13
    for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
ALLOWED = {
    "collections": {"OrderedDict", "defaultdict", "Counter", "deque"},
    "builtins": {"set", "frozenset", "bytearray", "complex", "slice", "range", "dict", "list", "tuple", "int", "float"},
    "_codecs": {"encode"},
    "torch": {"Size", "device", "Tensor", "UntypedStorage"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state"},
    "torch._tensor": {"_rebuild_from_type_v2"},
    "torch.nn.parameter": {"Parameter"},
    "torch.serialization": {"_get_layout"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
}
_CHANGEABLE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of classes written in Python
_STORAGES = frozenset(torch.storage._dtype_to_storage_type_map().values())


class Stub:
    """What stands for an object of a class that is not imported: its constructor's arguments and its attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stub_args = args
        self.__dict__.update(kwargs)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"stub_state": state})

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.stub_args or ''}"


def load(file: BinaryIO, where: str, persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """What is pickled in ``file``; ``persistent_load`` gives what is only referred to.

    Raises CheckpointError, which names ``where``, for anything that is not allowed.
    """
    try:
        return _Unpickler(file, where, persistent_load).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of itself
        raise CheckpointError(f"{where} cannot be unpickled ({type(error).__name__}: {error}); is it whole?") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, where: str, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._where, self._persistent_load = where, persistent_load
        self._stubs: dict[tuple[str, str], type[Stub]] = {}

    def persistent_load(self, reference: Any) -> Any:
        if self._persistent_load is None:
            raise CheckpointError(f"{self._where} refers to {reference!r}, which is not in the file")
        return self._persistent_load(reference)

    def find_class(self, module: str, name: str) -> Any:
        looked_at = module.split(".")[0] in LOOKED_AT or f"{module}.".startswith(f"{DCP}.")
        if looked_at or (module, name) in LOOKED_AT_TOO | PATHS:
            return self._stubs.setdefault((module, name), type(name.rpartition(".")[2], (Stub,), {}))
        if (module, name) == ("builtins", "getattr"):  # how enums are pickled by name
            return partial(_attribute)
        if module == "torch" and name in _STORAGES:
            return StorageType(name)
        if name in ALLOWED.get(module, ()) or module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return _for_one_file(super().find_class(module, name))
        raise CheckpointError(
            f"{self._where} asks for {module}.{name}, which checkpoints have no use for and which is not imported; "
            "the file may be made to run code: do not load it with anything else either"
        )


def _for_one_file(found: Any) -> Any:
    """The same, but what a file does to it, as pickles can set attributes of anything, is nobody else's."""
    if isinstance(found, types.FunctionType):
        return partial(found)
    if isinstance(found, type) and found.__flags__ & _CHANGEABLE:
        return types.new_class(found.__name__, (found,))
    return found


def _attribute(of: Any, name: str) -> Any:
    if isinstance(of, type) and issubclass(of, Stub):
        return of(name)
    raise CheckpointError(f"asks for attribute {name!r} of {of!r}, which checkpoints have no use for")
