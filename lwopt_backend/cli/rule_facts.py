"""Rules and hosts as plain data: every option with its default, meaning and source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from lwopt_backend.config.atoms import Division
from lwopt_backend.config.hosts import HOSTS
from lwopt_backend.config.options import LEFT_TO_THE_CLASS, REQUIRED, Option, options_in
from lwopt_backend.groups.choices import DEFAULTS, SECTIONS
from lwopt_backend.groups.optimizer_classes import as_class
from lwopt_backend.groups.registry import (
    ELEMENTWISE_RULES,
    MATRIX_RULES,
    ElementwiseEntry,
    MatrixEntry,
    known_of,
    options_of,
    rule_named,
    wire_of,
)
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule

OURS = "this package"
PUBLISHED: Mapping[str, tuple[str, dict[str, Any]]] = {  # by the names of publications: a rule and its options
    "Muon": ("muon", {}),
    "MuonEq": ("muon", {"precondition": "muoneq_r"}),
    "Turbo-Muon": ("muon", {"precondition": "aol", "ns_steps": 4}),
    "Muon^2": ("muon", {"precondition": "muon2", "ns_steps": 3}),
    "Muon+": ("muon", {"renormalize": "col_row"}),
    "u/w floor": ("muon", {"uw_floor": 0.35}),
    "MuonBP": ("muon", {"block_period": 5}),
    "8-bit Muon": ("muon", {"momentum_dtype": "int8"}),
    "MuonH": ("muon", {"hyperball": True, "weight_decay": 0.0}),
    "per-head Muon": ("muon", {"per_head": True}),
    "NorMuon": ("normuon", {}),
    "NorMuonH": ("normuon", {"hyperball": True, "weight_decay": 0.0}),
    "AdamH": ("adamh", {"weight_decay": 0.0}),
    "AdaMuon": ("adamuon", {}),
    "SOAP": ("soap", {}),
    "Shampoo": ("shampoo", {}),
    "AdamW": ("adamw", {}),
    "Lion": ("lion", {}),
    "SGD": ("sgd", {"momentum": 0.9}),
}
COLUMNS = ("name", "default", "meaning", "source")


def rule_facts(name: str | None) -> dict[str, list[Any]]:
    """The rule called ``name``, or all rules, hosts and divisions in atoms. Raises ValueError for a wrong name."""
    everything: list[MatrixEntry | ElementwiseEntry] = [*MATRIX_RULES.values(), *ELEMENTWISE_RULES.values()]
    given = dict(as_class({"name": name}))
    one = name and {**described(rule_named(given.pop("name")), given), "name": name}
    found = [one] if one else [described(entry, {}) for entry in everything]
    sections = [
        {"name": section, "default": json.dumps(DEFAULTS.get(section, [])), "meaning": meaning, "source": OURS}
        for section, meaning in SECTIONS.items()
    ]
    fields = {} if name else {host: options_in(config) for host, config in HOSTS.items()}
    hosts = [{"name": host, "options": [*sections, *declared(of_host)]} for host, of_host in fields.items()]
    atoms = [] if name else declared(options_in(Division))
    named = [] if name else [published(*item) for item in PUBLISHED.items()]
    return {"rules": found, "published": named, "hosts": hosts, "atoms": atoms}


def published(name: str, as_rule: tuple[str, dict[str, Any]]) -> dict[str, str]:
    """A publication's rule here, its state and traffic, and its difference from one process on every engine."""
    rule, given = as_rule
    entry = rule_named(rule)
    found = {"name": name, "rule": rule, "options": ", ".join(f"{key} {json.dumps(given[key])}" for key in given)}
    try:
        options = options_of(rule, given)
    except ValueError as error:  # its package is not installed
        return {**found, "state": str(error), "sent": "", "equal": ""}
    made = entry.build(**options) if isinstance(entry, MatrixEntry) else None
    equal = "bit for bit"
    if made is not None and made.by_norms:
        equal += "; within 1e-6 where a matrix is cut"
    if made is not None and made.block_period > 1:
        equal = "on FSDP2 and ZeRO 1 to 3; bit for bit if told the ranks' blocks"
    if made is not None and made.quantized:
        equal = "none if one process rounds alike, also where storage cuts rows"
    return {**found, "state": _state(entry, options), "sent": _sent(made), "equal": equal}


def _sent(rule: MatrixRule | None) -> str:
    """The traffic of a matrix's elements that its owner does not store."""
    if rule is None:
        return "nothing"
    wire = wire_of(rule)
    there = f"{wire['tensors']} x {wire['element_bytes']}" if wire["tensors"] > 1 else str(wire["element_bytes"])
    sums = "; 24 bytes a matrix" if rule.by_norms else ""
    seldom = f", every {rule.block_period}th step" if rule.block_period > 1 else ""
    return f"{there} bytes an element there, {wire['element_bytes']} back{sums}{seldom}"


def described(entry: MatrixEntry | ElementwiseEntry, given: Mapping[str, Any]) -> dict[str, Any]:
    """A rule, of a class that is ``given``, as plain data, with a note if its class is not installed."""
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
        known = {key: option for key, option in known_of(entry.name, given).items() if key not in given}
        if not any(option.default is REQUIRED for option in known.values()):
            found["state"] = _state(entry, options_of(entry.name, given))
    except ValueError as error:
        found["note"] = str(error)
        return found
    found["options"] = declared(known, given.get("class", entry.source))
    return found


def declared(known: Mapping[str, Option], source: str = OURS) -> list[dict[str, str]]:
    """Every option as plain data. For the meaning of a class's arguments, see help() of the class."""
    words = {REQUIRED: "required", LEFT_TO_THE_CLASS: "left to the class"}
    options = []
    for name, option in known.items():
        default = json.dumps(option.default, default=str) if option.has_default else words[option.default]
        default = "required" if (name, option.default) == ("lr", None) else default
        meaning = option.meaning or f"{name!r} of the class"
        options.append(dict(zip(COLUMNS, (name, default, meaning, option.source or source), strict=True)))
    return options


def _state(entry: MatrixEntry | ElementwiseEntry, options: Mapping[str, Any]) -> str:
    """Names of state tensors, and where they are."""
    if isinstance(entry, ElementwiseEntry):
        keys = [key for key, tensor in entry.new_state(torch.zeros(2), options).items() if tensor.ndim]
        return ", ".join(keys) + " where the elements are" if keys else "none"
    rule = entry.build(**options)
    keys = [f"{key} in 8 bits" if key in rule.quantized else key for key in rule.state_keys]
    where = [f"{', '.join(keys)} where the elements are"] if keys else []
    if isinstance(rule, OwnerStateRule):
        own = rule.new_owner_state((2, 3), torch.device("cpu"))
        sides = {2: "rows", 3: "columns"}
        shapes = {key: " x ".join(sides.get(size, str(size)) for size in tensor.shape) for key, tensor in own.items()}
        where.append(", ".join(f"{key} ({shape})" for key, shape in shapes.items()) + " at the owner")
    elif isinstance(rule, WeightRule):
        where.append("the class's, at the owner")
    return "; ".join(where) or "none"
