"""What Emerging-Optimizers lacks on Python 3.11 and on a machine without Triton."""

from __future__ import annotations

import contextlib
import sys
import typing
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

OVERRIDE = getattr(typing, "override", lambda function: function)


class Anything(ModuleType):
    """Triton, of whose kernels none is run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *given: Any, **more: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not more else Anything("value")

    def __or__(self, other: Any) -> Any:
        return self


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Emerging-Optimizers can be imported, and compiles nothing. It also needs a word of Python 3.12."""
    import torch._dynamo
    import torch.utils._triton  # notes now that Triton is missing

    torch.utils._triton.has_triton_package()
    triton = Anything("triton")
    triton.__spec__, triton.__version__, triton.constexpr = ModuleSpec("triton", None), "3.0.0", int
    triton.language = triton
    compiled = mock.patch.object(torch, "compile", lambda *given, **_: given[0] if given else lambda function: function)
    modules = {"triton": triton, "triton.language": triton}
    with compiled, mock.patch.dict(sys.modules, modules), mock.patch.object(typing, "override", OVERRIDE, create=True):
        yield
