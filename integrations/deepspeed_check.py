"""Whether the installed DeepSpeed is one we work with: its version, and the names in ``deepspeed_names``."""

from __future__ import annotations

import dis
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lwopt_backend.installing import install_command
from lwopt_backend.integrations.deepspeed_names import BEFORE, NAMES, SUPPORTED, Name


@functools.cache
def check() -> None:
    """Raises ImportError if the installed DeepSpeed is not supported, or lacks names that we use; lists all of them."""
    import deepspeed

    found = deepspeed.__version__
    if not SpecifierSet(SUPPORTED).contains(Version(found), prereleases=True):
        newer = Version(found).release >= Version(BEFORE).release
        raise ImportError(
            f"DeepSpeed {found} is installed, but lwopt_backend supports {SUPPORTED}: "
            + ("a newer one may have moved what it replaces" if newer else "an older one lacks what it needs")
            + f"; run: {install_command('deepspeed', SUPPORTED)}"
            + (", or a newer lwopt_backend if there is one" if newer else "")
        )
    problems = missing()
    if problems:
        raise ImportError(
            "\n  ".join([f"DeepSpeed {found} is installed, but not all that lwopt_backend uses is in it:", *problems])
            + f"\nReinstall a supported version: {install_command('deepspeed', SUPPORTED)} --force-reinstall --no-deps"
        )


def missing(names: Iterable[Name] = NAMES) -> list[str]:
    """One sentence for every name that the installed DeepSpeed has moved, dropped, or given other parameters."""
    return [f"{name.module}: {problem} ({name.why})" for name in names if (problem := _problem(name))]


def _problem(name: Name) -> str | None:
    try:
        module = importlib.import_module(name.module)
    except ImportError as error:
        return f"cannot be imported: {error}; needed for {name.path}"
    owner, _, attribute = name.path.rpartition(".")
    if owner == "param":
        return None if attribute in _given(module.__name__) else f"gives no {attribute!r} to parameters"
    holder = getattr(module, owner, None) if owner else module
    if holder is None:
        return f"has no {owner}, and so no {name.path}"
    if inspect.isclass(holder) and not hasattr(holder, attribute):
        return None if _instances_have(holder, attribute) else f"has no {name.path}"
    return _problem_of_value(holder, attribute, name)


def _problem_of_value(holder: type | ModuleType, attribute: str, name: Name) -> str | None:
    if not hasattr(holder, attribute):
        return f"has no {name.path}"
    if name.parameters is None:
        return None
    found = tuple(inspect.signature(getattr(holder, attribute)).parameters)
    if found == name.parameters:
        return None
    return f"{name.path} takes ({', '.join(found)}), expected ({', '.join(name.parameters)})"


def _instances_have(cls: type, attribute: str) -> bool:
    """Whether instances of ``cls`` have a field of that name, or are given one by a method."""
    return any(
        attribute in vars(base).get("__annotations__", {}) or attribute in _given(base.__module__, base.__name__)
        for base in cls.__mro__
        if base.__module__.startswith("deepspeed")
    )


@functools.cache
def _given(module: str, cls: str | None = None) -> frozenset[str]:
    """The attributes that the code of a module, or of one class in it, sets on any object."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    loader: Any = spec.loader  # has the code, of modules that are written in Python
    codes: list[CodeType] = [loader.get_code(module)]
    if cls is not None:
        codes = [code for code in _nested(codes[0]) if code.co_name == cls]
    inner = [nested for code in codes for nested in _nested(code)]
    return frozenset(
        step.argval for code in inner for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"
    )


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
