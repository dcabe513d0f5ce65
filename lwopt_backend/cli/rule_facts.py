"""Rules and hosts as plain data: every option with its default, meaning and source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from pydantic.fields import FieldInfo

from lwopt_backend.config.atoms import Division
from lwopt_backend.config.hosts import HOSTS
from lwopt_backend.groups.choices import DEFAULTS, SECTIONS
from lwopt_backend.groups.registry import (
    ELEMENTWISE_RULES,
    MATRIX_RULES,
    ElementwiseEntry,
    MatrixEntry,
    options_of,
    rule_named,
)
from lwopt_backend.rules import OwnerStateRule, WeightRule

OURS = "this package"
COLUMNS = ("name", "default", "meaning", "source")


def rule_facts(name: str | None) -> dict[str, list[Any]]:
    """The rule called ``name``, or all rules, hosts and divisions in atoms. Raises ValueError for a wrong name."""
    everything: list[MatrixEntry | ElementwiseEntry] = [*MATRIX_RULES.values(), *ELEMENTWISE_RULES.values()]
    found = [described(entry) for entry in ([rule_named(name)] if name else everything)]
    sections = [
        {"name": section, "default": json.dumps(DEFAULTS.get(section, [])), "meaning": meaning, "source": OURS}
        for section, meaning in SECTIONS.items()
    ]
    fields = {} if name else {host: config.model_fields for host, config in HOSTS.items()}
    hosts = [{"name": host, "options": [*sections, *_options(of_host, OURS)]} for host, of_host in fields.items()]
    atoms = [] if name else _options(Division.model_fields, OURS)
    return {"rules": found, "hosts": hosts, "atoms": atoms}


def described(entry: MatrixEntry | ElementwiseEntry) -> dict[str, Any]:
    """A rule as plain data, with a note if its class is not installed."""
    found: dict[str, Any] = {
        "name": entry.name,
        "for": "matrices" if isinstance(entry, MatrixEntry) else "everything else",
        "state": "the class's",
        "cost": entry.work if isinstance(entry, MatrixEntry) else "element-wise",
        "source": entry.source,
        "options": [],
        "note": "",
    }
    try:
        fields = entry.model({}, "").model_fields
        if not any(field.is_required() for field in fields.values()):
            found["state"] = _state(entry, options_of(entry.name, {}, "").model_dump())
    except ValueError as error:
        found["note"] = str(error)
        return found
    found["options"] = _options(fields, entry.source)
    return found


def _options(fields: Mapping[str, FieldInfo], source: str) -> list[dict[str, str]]:
    """Every option as plain data. What those of a class mean, help() of the class tells."""
    options = []
    for name, field in fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        default = "required" if field.is_required() else json.dumps(field.default, default=str)
        meaning = field.description or f"{name!r} of the class"
        options.append(dict(zip(COLUMNS, (name, default, meaning, str(extra.get("source", source))), strict=True)))
    return options


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
