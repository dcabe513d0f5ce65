"""Options of ``lwopt plan`` as the engine's own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lwopt_backend.planner.setting import ENGINES, read_yaml

OF_OWNED_STORAGE = ("storage", "layout", "bucket_mb", "group_size")  # fields of ZeROConfig that are for engine owned


def fields_of(engine: str) -> list[str]:
    """The options that an engine has."""
    hidden = OF_OWNED_STORAGE if engine.startswith("zero") else ()
    return [name for name in ENGINES[engine].model_fields if name not in hidden]


def engine_options(engine: str, named: Mapping[str, Any], more: Sequence[str]) -> dict[str, Any]:
    """The options of ``engine`` that were given: the ``named`` ones, where not None, and those of ``--option``.

    Raises ValueError for one that this engine does not have, that is given twice, or that cannot be read.
    """
    given = {key: value for key, value in named.items() if value not in (None, [])}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    for key in options:
        if key not in fields_of(engine):
            engines = [name for name in ENGINES if key in fields_of(name)]
            raise ValueError(
                f"--{key.replace('_', '-')} is for engine {' and '.join(map(repr, engines))}; "
                f"{engine!r} has no such option"
            )
    for text in more:
        key, value = _parsed(text)
        if key in options:
            raise ValueError(f"--option {text!r}: {key!r} is given twice")
        options[key] = value
    return options


def group_size_of(text: str | None) -> int | None:
    """``--group-size``: a number of ranks; None and ``auto`` leave it to the engine. Raises ValueError."""
    if text is None or text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--group-size: expected a number of ranks or 'auto', found {text!r}")
    return int(text)


def _parsed(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"--option {text!r}: expected KEY=VALUE, such as keep_full_grads=true or matrix=soap")
    try:
        return key.strip(), read_yaml(value)
    except ValueError as error:
        raise ValueError(f"--option {text!r}: expected a value as YAML or JSON, found {value!r}: {error}") from error
