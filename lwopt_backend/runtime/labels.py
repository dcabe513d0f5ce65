"""What the parts of a step are called in profiles (``torch.profiler.record_function``), on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXCHANGE_OUT = "lwopt: exchange out"
EXCHANGE_BACK = "lwopt: exchange back"
NORM = "lwopt: norm"


def of_rule(name: str) -> str:
    """A matrix rule at work on whole matrices."""
    return f"lwopt: rule {name}"


def of_elementwise(group: Mapping[str, Any]) -> str:
    """The step of an element-wise param group."""
    return f"lwopt: elementwise {rule_name(group)}"


def rule_name(group: Mapping[str, Any]) -> str:
    """The name of a param group's rule; of one that runs any optimizer, that optimizer's class."""
    return str(group.get("class", group["rule"]))
