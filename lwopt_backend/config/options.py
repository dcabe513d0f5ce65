"""Options: the fields of a dataclass, or the arguments of a class. Their checks; the nearest name for an unknown one.

JSON and Python give options as mappings. ``checked`` makes of them the values of all options.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from lwopt_backend.config.foreign import ADVICE

DISTRIBUTION = "lwopt-backend"


def install_command(package: str, version: str = "") -> str:
    """The command that installs ``package``, by default in the versions that this project's extras require.

    It names the package itself and not the extra: ``pip install "lwopt-backend[hf]"`` would look for this project on an
    index, which is wrong for a checkout.
    """
    requirement = f"{package}{version}"
    if not version:
        try:
            found = [text.partition(";")[0].strip() for text in requires(DISTRIBUTION) or ()]
            requirement = {re.split(r"[^\w.-]", text)[0]: text for text in found}.get(package, package)
        except PackageNotFoundError:  # imported by path: the bare name
            pass
    return f"pip install {shlex.quote(requirement)}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, case aside, or None if nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """A clause for an error message: the nearest known name, or all of them."""
    known = list(known)
    close = nearest(name, known)
    return f"did you mean {close!r}?" if close else f"known: {', '.join(map(repr, known))}"


def spelling(name: str, known: Iterable[str], most: int | None = None) -> str:
    """As ``suggestion``, of names of algorithms, where only the same letters are another spelling: 'newton_muon' is not
    'normuon', and 'adam' not 'adamw'. Lists at most ``most`` names."""
    known = list(known)
    close = nearest(name, [each for each in known if _letters(each) == _letters(name)])
    more = f" and {len(known) - most} more" if most is not None and len(known) > most else ""
    return f"did you mean {close!r}?" if close else f"known: {', '.join(map(repr, known[:most]))}{more}"


def _letters(name: str) -> set[str]:
    return {*name.lower()} - {*"-_ "}


def glob_suggestion(glob: str, names: Iterable[str]) -> str:
    """A clause for an error message on a glob that matches none of ``names``."""
    names = list(names)
    close = nearest(glob, names)
    return f"did you mean {close!r}?" if close else f"names look like {(names or ['nothing'])[0]!r}"


def option_suggestion(name: str, known: Iterable[str]) -> str:
    """A clause for an error message about an unknown option: what to do instead, or the nearest known name.

    Known names are options of a section, or of a whole optimizer, where ``"adamw.betas"`` is one in a section.
    """
    known = list(known)
    if name.lower() in ADVICE:
        return ADVICE[name.lower()]
    inside = [candidate for candidate in known if candidate.endswith(f".{name.lower()}")]
    return suggestion(name, inside or known)


# What options are made of. Strict: a number in quotes, or true for 1, is an error.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Globs = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]

# By pydantic's names of errors, the words of a configuration.
EXPECTED = {"tuple_type": "input should be a list", "dict_type": "input should be a mapping"}
ONLY_HUGGING_FACE = (
    "only Hugging Face's Trainer and Accelerate replace it, and only outside the sections; write a value"
)
REQUIRED: Any = ...  # the default of an option that must be given
LEFT_TO_THE_CLASS = inspect.Parameter.empty  # the default of an argument that a class is made without
C = TypeVar("C")


@dataclass(frozen=True)
class Option:
    """``kind`` is the type of its values. ``check`` returns the value for a given one, or raises ValueError."""

    name: str
    default: Any = REQUIRED
    kind: Any = Any
    meaning: str = ""
    source: str = ""
    check: Callable[[Any], Any] = lambda given: given

    @property
    def has_default(self) -> bool:
        return self.default is not REQUIRED and self.default is not LEFT_TO_THE_CLASS


Known = Mapping[str, Option]  # options by name


def options_in(declared: type) -> Known:
    """The fields of a dataclass as options, by type and by what ``rules.protocol.option`` says of them."""
    return _options_in(declared)


@functools.cache
def _options_in(declared: type) -> Known:
    hints = get_type_hints(declared, include_extras=True)
    return {field.name: _option(field, hints[field.name]) for field in dataclasses.fields(declared)}


def _option(field: dataclasses.Field[Any], kind: Any) -> Option:
    said = field.metadata
    default = REQUIRED if field.default is dataclasses.MISSING else field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    meaning, source, check = (said.get(key) for key in ("meaning", "source", "check"))
    inner = {*get_args(kind), kind}
    if "bounds" in said and inner & {bool, int, float}:
        finite: dict[str, Any] = {"allow_inf_nan": False} if float in inner else {}
        check = check or TypeAdapter(Annotated[kind, Field(strict=True, **said["bounds"], **finite)]).validate_python
    check = check or TypeAdapter(kind).validate_python
    if field.name == "lr":
        check = functools.partial(_rate, check)
    return Option(field.name, default, kind, meaning or "", source or "", check)


def _rate(check: Callable[[Any], float], given: Any) -> Any:
    """A number, or the given tensor of one element itself, so that it can be changed in place."""
    is_one = hasattr(given, "numel") and given.numel() == 1
    found = check(given.item() if is_one else given)
    return given if is_one else found


@contextmanager
def within(where: str) -> Iterator[None]:
    """Let the message of a ValueError begin with ``where`` the options are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error.__cause__


def checked(known: Known, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all options; of those that are left to the class, only given ones.

    Raises ValueError with every wrong key, what was expected and found.
    """
    values, problems = {}, []
    for key, option in known.items():
        if key not in given:
            values[key] = copy(option.default)  # which may be a list
            problems += [f"expected {key!r}, found none; add it"] * (option.default is REQUIRED)
            continue
        try:
            values[key] = option.check(given[key])
        except ValidationError as error:
            problems += [_problem(key, detail) for detail in error.errors()]
        except ValueError as error:  # of a check, which begins with the option's own name
            problems.append(key.removesuffix(option.name) + str(error))
    problems += [f"unknown key {key!r}; {option_suggestion(str(key), known)}" for key in given if key not in known]
    problems = [f"{told}: {ONLY_HUGGING_FACE}" if told.endswith("found 'auto'") else told for told in problems]
    if problems:
        raise ValueError("\n  ".join([*[f"{len(problems)} wrong options"] * (len(problems) > 1), *problems]))
    return {key: value for key, value in values.items() if value is not LEFT_TO_THE_CLASS}


def _problem(key: str, detail: Mapping[str, Any]) -> str:
    expected = EXPECTED.get(detail["type"], f"{detail['msg'][0].lower()}{detail['msg'][1:]}")
    return f"{'.'.join(map(str, (key, *detail['loc'])))}: {expected}; found {detail['input']!r}"


def parse(declared: type[C], given: Mapping[str, Any], where: str) -> C:
    """A dataclass with the options ``given``. Raises ValueError, also for options that do not fit each other."""
    with within(where):
        return declared(**checked(options_in(declared), given))
