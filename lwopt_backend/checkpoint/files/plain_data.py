"""Objects of other programs, such as Megatron's ``args``, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from lwopt_backend.checkpoint.files.pickles import Stub
from lwopt_backend.checkpoint.lazy import LazyTensor


def plain(value: Any) -> Any:
    """The same with numbers, strings, lists, tuples and dictionaries only.

    Namespaces become dictionaries, tensors lists, paths strings, enums ``"AttnBackend(5)"``, dtypes
    ``"torch.bfloat16"``.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, (int, str)) else str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, set, frozenset)):
        return [plain(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(plain(entry) for entry in value)
    if isinstance(value, LazyTensor):
        return value.read().tolist()
    if isinstance(value, Stub):
        return _plain_stub(value)
    return value.item() if hasattr(value, "item") else str(value)


def _plain_stub(stub: Stub) -> Any:
    attributes = {key: value for key, value in vars(stub).items() if key != "stub_args"}
    arguments = getattr(stub, "stub_args", ())
    name = type(stub).__name__
    if name.endswith("Path"):
        return str(PurePosixPath(*arguments))
    if attributes or not arguments:
        return plain(attributes)
    return f"{name}({', '.join(str(plain(argument)) for argument in arguments)})"


def counter(value: Any) -> Any:
    """A number that may be a tensor's one element, or what ``plain`` made of it."""
    value = plain(value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value
