"""What all options are made of: a pydantic model whose errors name the key, what was expected and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lwopt_backend.foreign_names import option_suggestion

# Strict: a number in quotes, or true for 1, is a slip that should be seen.
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Aspect = Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Steps = Annotated[int, Field(ge=1, lt=100, strict=True)]


# What pydantic calls otherwise than a configuration does, by its names of errors.
EXPECTED = {"tuple_type": "input should be a list", "dict_type": "input should be a mapping"}
NO_WORDS = ("float_type", "int_type", "tuple_type")
ONLY_HUGGING_FACE = (
    "which only Hugging Face's Trainer and Accelerate replace, where it stands beside the sections; write a value"
)


def _listed(given: Any) -> Any:
    return (given,) if isinstance(given, str) else given


Globs = Annotated[tuple[str, ...], BeforeValidator(_listed)]  # or a single one


class Options(BaseModel):
    """Immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def option(default: Any, meaning: str, source: str) -> Any:
    """A field of an options model, with what ``lwopt rules`` says of it."""
    return Field(default, description=meaning, json_schema_extra={"source": source})


M = TypeVar("M", bound=Options)


def parse(model: type[M], options: Mapping[str, Any], where: str) -> M:
    """Build ``model`` from ``options``. Raises ValueError that names every wrong key, what was expected and found."""
    try:
        return model(**options)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors()]
    raise ValueError("\n  ".join([f"{where}: {len(problems)} wrong option(s)", *problems]))


def _problem(model: type[Options], detail: Mapping[str, Any]) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_hint(model, location)}"
    expected = EXPECTED.get(detail["type"], f"{detail['msg'][0].lower()}{detail['msg'][1:]}")
    found = f"{key}: {expected}; found {detail['input']!r}"
    return f"{found}, {ONLY_HUGGING_FACE}" if detail["input"] == "auto" and detail["type"] in NO_WORDS else found


def _hint(model: type[Options], location: list[str]) -> str:
    """The nearest known key at this level, one in a section of it, or ours for a key of another optimizer."""
    *sections, name = location
    for section in sections:
        model = _section(model, section)
    inner = {section: field.annotation for section, field in model.model_fields.items()}
    in_sections = [
        f"{section}.{key}"
        for section, options in inner.items()
        if isinstance(options, type) and issubclass(options, Options)
        for key in options.model_fields
    ]
    return option_suggestion(name, [*model.model_fields, *in_sections])


def _section(model: type[Options], name: str) -> type[Options]:
    annotation = model.model_fields[name].annotation
    assert isinstance(annotation, type) and issubclass(annotation, Options)
    return annotation
