"""Rules and hosts as plain data: every option with its default, meaning and source."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic.fields import FieldInfo

from lwopt_backend.config.choices import DEFAULTS, SECTIONS
from lwopt_backend.config.hosts import HOSTS
from lwopt_backend.config.optimizer_classes import class_named
from lwopt_backend.config.registry import (
    ELEMENTWISE,
    ELEMENTWISE_RULES,
    MATRIX_RULES,
    ElementwiseEntry,
    MatrixEntry,
    options_of,
    rule_named,
)
from lwopt_backend.routing.routing import Division
from lwopt_backend.rules import OwnerStateRule, WeightRule
from lwopt_backend.rules.protocol import TorchOptimizer

# What a class's docstrings say of its constructor's arguments, in the two styles that optimizers are documented in::
#
#     :param lr: float. learning rate.        Args:
#                                                 lr (float, optional): learning rate (default: 1e-3)
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
    """By argument, the paragraph on it in a docstring, on one line, without markup and default."""
    lines = inspect.cleandoc(docstring).splitlines()
    found: dict[str, str] = {}
    for number, name, text in _entries(lines):
        said = [text]
        for line in lines[number + 1 :]:  # those that are indented more, up to an empty one
            if not line.strip() or _indent(line) <= _indent(lines[number]):
                break
            said.append(line.strip())
        plain = MARKUP.sub(r"\1", " ".join(said))
        found.setdefault(name, DEFAULT.sub("", " ".join(plain.split())))
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


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


CLASS, OURS = "class", "this package"
CLASS_MEANING = "the optimizer's class, or its path, such as 'torch.optim.RMSprop'"
COLUMNS = ("name", "default", "meaning", "source")


def rule_facts(name: str | None, class_path: str | None) -> dict[str, list[Any]]:
    """The rule called ``name``, or all rules, all hosts and the divisions in atoms.

    With ``class_path``, torch_optimizer's options are the arguments of that class. Raises ValueError for a wrong name
    or path.
    """
    if class_path:
        class_named(class_path)  # raises for a wrong one
        if name and name not in (*ELEMENTWISE, *ELEMENTWISE.values()):
            raise ValueError(f"--class is for 'torch_optimizer'; the options of {name!r} are known without")
    everything: list[MatrixEntry | ElementwiseEntry] = [*MATRIX_RULES.values(), *ELEMENTWISE_RULES.values()]
    found = [described(entry, class_path) for entry in ([rule_named(name)] if name else everything)]
    sections = [
        {"name": section, "default": json.dumps(DEFAULTS.get(section, [])), "meaning": meaning, "source": OURS}
        for section, meaning in SECTIONS.items()
    ]
    fields = {} if name else {host: config.model_fields for host, config in HOSTS.items()}
    hosts = [{"name": host, "options": [*sections, *_options(of_host, {}, OURS)]} for host, of_host in fields.items()]
    atoms = [] if name else _options(Division.model_fields, {}, OURS)
    return {"rules": found, "hosts": hosts, "atoms": atoms}


def described(entry: MatrixEntry | ElementwiseEntry, class_path: str | None) -> dict[str, Any]:
    """A rule as plain data, with a note if its class is not installed or not usable."""
    found: dict[str, Any] = {
        "name": next((name for name, other in ELEMENTWISE.items() if other == entry.name), entry.name),
        "for": "matrices" if isinstance(entry, MatrixEntry) else "everything else",
        "state": "the class's",
        "cost": entry.work if isinstance(entry, MatrixEntry) else "element-wise",
        "source": entry.source,
        "options": [],
        "note": "",
    }
    given = {CLASS: class_path} if class_path else {}
    try:
        fields = entry.model(given, "").model_fields
        given = {key: value for key, value in given.items() if key in fields}
        cls = class_named(given[CLASS]) if given else None
        if not any(field.is_required() for key, field in fields.items() if key not in given):
            options = options_of(entry.name, given, "").model_dump()
            found["state"], cls = _state(entry, options), _class(entry, options)
    except ValueError as error:
        found["note"] = str(error)
        return found
    said = argument_meanings(cls) if cls else {}
    found["options"] = _options(fields, {**said, CLASS: CLASS_MEANING}, given.get(CLASS, entry.source))
    return found


def _options(fields: Mapping[str, FieldInfo], said: Mapping[str, str], source: str) -> list[dict[str, str]]:
    """Every option as plain data. Its meaning is the field's own, or else what is ``said`` of it."""
    options = []
    for name, field in fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = "required" if field.is_required() else json.dumps(field.default, default=str)
        meaning = field.description or said.get(name, f"{name!r} of the class")
        options.append(dict(zip(COLUMNS, (name, default, meaning, str(extra.get("source", source))), strict=True)))
    return options


def _class(entry: MatrixEntry | ElementwiseEntry, options: Mapping[str, Any]) -> type:
    """The class whose arguments the options are."""
    if isinstance(entry, ElementwiseEntry):
        return entry.optimizer(options)
    rule = entry.build(**options)
    return rule.optimizer_class if isinstance(rule, TorchOptimizer) else type(rule)


def _state(entry: MatrixEntry | ElementwiseEntry, options: Mapping[str, Any]) -> str:
    """Names of state tensors, and where they are."""
    if isinstance(entry, ElementwiseEntry):
        keys = [key for key, tensor in entry.new_state(torch.zeros(2), options).items() if tensor.ndim]
        return ", ".join(keys) + " where the elements are" if keys else "none"
    rule = entry.build(**options)
    where = [f"{', '.join(rule.state_keys)} where the elements are"] if rule.state_keys else []
    if isinstance(rule, OwnerStateRule):
        own = rule.new_owner_state((2, 3), torch.device("cpu"))
        sides = {2: "rows", 3: "columns"}
        shapes = {key: " x ".join(sides.get(size, str(size)) for size in tensor.shape) for key, tensor in own.items()}
        where.append(", ".join(f"{key} ({shape})" for key, shape in shapes.items()) + " at the owner")
    elif isinstance(rule, WeightRule):
        where.append("the class's, at the owner")
    return "; ".join(where) or "none"
