"""Names of parameters with numbers in them: ``decoder.layers.{layer}.mlp.linear_fc2.{weight|bias}``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

_FIELD = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"([a-z_]+)(?:\+([0-9]+))?")
_WORDS = re.compile(r"[A-Za-z0-9_.]*(\|[A-Za-z0-9_.]*)+")

Values = Mapping[str, "int | str"]


@dataclass(frozen=True)
class Pattern:
    """A name with fields in braces. Raises ValueError for a field that is none of these three.

    - ``{layer}``, ``{layer+2}``: a number; in the name it is as much larger as is written.
    - ``{weight|bias}``: one of these words. The text in the braces is the field's name.
    - ``{*}``: any text.
    """

    text: str

    def __post_init__(self) -> None:
        for field in _FIELD.findall(self.text):
            if field != "*" and not _NUMBER.fullmatch(field) and not _WORDS.fullmatch(field):
                raise ValueError(
                    f"{self.text!r}: {{{field}}} is no field; expected {{layer}}, {{layer+2}}, {{weight|bias}} or {{*}}"
                )
        if re.search(r"[{}]", _FIELD.sub("", self.text)):
            raise ValueError(f"{self.text!r}: a brace is not closed, or not opened")

    @functools.cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in order, each once."""
        return tuple(dict.fromkeys(_base(field)[0] for field in _FIELD.findall(self.text)))

    @functools.cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = _FIELD.split(self.text)
        return re.compile("".join(_expression(part) if at % 2 else re.escape(part) for at, part in enumerate(parts)))

    def match(self, name: str) -> dict[str, int | str] | None:
        """The fields' values in ``name``, or None if it is not of this form."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values: dict[str, int | str] = {}
        for field, text in zip(_FIELD.findall(self.text), found.groups()):
            base, offset = _base(field)
            value = text if offset is None else int(text) - offset
            if (isinstance(value, int) and value < 0) or values.setdefault(base, value) != value:
                return None
        return values

    def format(self, values: Values) -> str:
        """The name with these values; it may have more of them."""

        def filled(found: re.Match[str]) -> str:
            base, offset = _base(found[1])
            value = values[base]
            return str(value) if offset is None else str(int(value) + offset)

        return _FIELD.sub(filled, self.text)

    def glob(self, values: Values) -> str:
        """The same for any numbers: ``decoder.layers.*.mlp.linear_fc2.weight``."""
        return _FIELD.sub(lambda found: "*" if _base(found[1])[1] is not None else str(values[found[1]]), self.text)


def _base(field: str) -> tuple[str, int | None]:
    """The field's name, and by how much a number is larger in the name; None if it is no number."""
    number = _NUMBER.fullmatch(field)
    return (number[1], int(number[2] or 0)) if number else (field, None)


def _expression(field: str) -> str:
    if field == "*":
        return "(.+)"
    if "|" in field:
        return f"({'|'.join(map(re.escape, field.split('|')))})"
    return "(0|[1-9][0-9]*)"
