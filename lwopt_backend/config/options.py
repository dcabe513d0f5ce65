"""Options as pydantic models: parsed, unknown keys with the nearest known one."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

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
            requirement = {re.split(r"[^\w.-]", text)[0]: text for text in found}[package]
        except PackageNotFoundError:  # imported by path: the bare name
            pass
    return f"pip install {shlex.quote(requirement)}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, case aside, or None if nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def suggestion(name: str, known: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """A clause for an error message: the nearest known name, or all of them."""
    known = list(known)
    close = nearest(name, known)
    return f"did you mean {spelled(close)}?" if close else f"known: {', '.join(map(repr, known))}"


def glob_suggestion(glob: str, names: Iterable[str]) -> str:
    """A clause for an error message on a glob that matches none of ``names``."""
    names = list(names)
    close = nearest(glob, names)
    return f"did you mean {close!r}?" if close else f"names look like {(names or ['nothing'])[0]!r}"


def option_suggestion(name: str, known: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """A clause for an error message about an unknown option: what to do instead, or the nearest known name.

    Known names are options of a section, or of a whole optimizer, where ``"adamw.betas"`` is one in a section.
    """
    known = list(known)
    if name.lower() in ADVICE:
        return ADVICE[name.lower()]
    inside = [candidate for candidate in known if candidate.endswith(f".{name.lower()}")]
    return suggestion(name, inside or known, spelled)


# What all options are made of. Strict: a number in quotes, or true for 1, is an error.
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Globs = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]

# By pydantic's names of errors, the words of a configuration.
EXPECTED = {"tuple_type": "input should be a list", "dict_type": "input should be a mapping"}
NO_WORDS = ("float_type", "int_type", "tuple_type")
ONLY_HUGGING_FACE = (
    "only Hugging Face's Trainer and Accelerate replace it, and only outside the sections; write a value"
)


class Options(BaseModel):
    """Base of all options: immutable, and an unknown key is an error.

    Examples:
        >>> class SignOptions(Options):
        ...     lr: float = 1e-3
        >>> register_rule("sign", Sign, options=SignOptions)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


M = TypeVar("M", bound=Options)


def option(default: Any, meaning: str, source: str = "this package") -> Any:
    """A field of an options model, with its description for ``lwopt rules``."""
    return Field(default, description=meaning, json_schema_extra={"source": source})


def parse(model: type[M], options: Mapping[str, Any], where: str) -> M:
    """Build ``model`` from ``options``. Raises ValueError with every wrong key, what was expected and found."""
    try:
        return model(**options)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors()]
    if len(problems) == 1:
        raise ValueError(f"{where}: {problems[0]}")
    raise ValueError("\n  ".join([f"{where}: {len(problems)} wrong options", *problems]))


def _problem(model: type[Options], detail: Mapping[str, Any]) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "extra_forbidden":
        *sections, name = location
        for section in sections:
            model = _sections(model)[section]
        inside = [f"{section}.{key}" for section, options in _sections(model).items() for key in options.model_fields]
        return f"unknown key {key!r}; {option_suggestion(name, [*model.model_fields, *inside])}"
    expected = EXPECTED.get(detail["type"], f"{detail['msg'][0].lower()}{detail['msg'][1:]}")
    found = f"{key}: {expected}; found {detail['input']!r}"
    return f"{found}: {ONLY_HUGGING_FACE}" if detail["input"] == "auto" and detail["type"] in NO_WORDS else found


def _sections(model: type[Options]) -> dict[str, type[Options]]:
    """The options of a model that are sections, with their options."""
    kinds = {key: field.annotation for key, field in model.model_fields.items()}
    return {key: kind for key, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Options)}
