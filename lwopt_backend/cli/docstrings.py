"""What a class's docstrings say of its constructor's arguments, in the two styles that optimizers are documented in::

:param lr: float. learning rate.        Args:
                                            lr (float, optional): learning rate (default: 1e-3)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

FIELD = re.compile(r":param\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:(.*)")
HEADER = re.compile(r"(?:Args|Arguments|Parameters|Keyword Args|Keyword Arguments):")
ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:(.*)")  # a type in parentheses, or none
MARKUP = re.compile(r"(?::[\w:-]+:)?`+([^`<]*[^`<\s])\s*(?:<[^`]*>)?`+_*")
DEFAULT = re.compile(r"\s*\(default: (?:[^()]|\([^()]*\))*\)\.?$")  # the signature has it


def argument_meanings(cls: type) -> dict[str, str]:
    """By argument, what ``cls`` says of it or else the nearest of its bases, in the docstring or in ``__init__``'s.

    Arguments of which none says anything are left out.
    """
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for text in (vars(base).get("__doc__"), getattr(vars(base).get("__init__"), "__doc__", None)):
            found = {**meanings_in(text or ""), **found}
    return found


def meanings_in(docstring: str) -> dict[str, str]:
    """By argument, the paragraph that a docstring has on it, in one line, without markup and without the default."""
    lines = inspect.cleandoc(docstring).splitlines()
    found: dict[str, str] = {}
    for number, name, text in _entries(lines):
        said = MARKUP.sub(r"\1", " ".join([text, *_continued(lines, number)]))
        found.setdefault(name, DEFAULT.sub("", " ".join(said.split())))
    return {name: meaning for name, meaning in found.items() if meaning}


def _entries(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """The number of every line that begins with an argument, its name, and the rest of the line."""
    header: int | None = None  # indentation of the header of the section that we are in
    entry: int | None = None  # indentation of the arguments in it
    for number, line in enumerate(lines):
        text, indent = line.strip(), _indent(line)
        if header is not None and text and (indent <= header or (entry is not None and indent < entry)):
            header = None
        if HEADER.fullmatch(text):
            header, entry = indent if number else -1, None  # a first line has lost its indentation
        elif header is not None and text:
            entry = indent if entry is None else entry
            if indent == entry and (match := ENTRY.fullmatch(text)):
                yield number, match[1], match[2]
        elif match := FIELD.fullmatch(text):
            yield number, match[1], match[2]


def _continued(lines: list[str], number: int) -> Iterator[str]:
    """The lines after line ``number`` that are indented more than it, up to an empty one."""
    for line in lines[number + 1 :]:
        if not line.strip() or _indent(line) <= _indent(lines[number]):
            return
        yield line.strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
