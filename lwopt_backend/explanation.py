"""What would happen to a model, without an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.engines.report import reporting, show_routing
from lwopt_backend.groups.grouping import Given


@dataclass(frozen=True, slots=True)
class Explained:
    """What a run would do with one parameter.

    - ``name`` and ``shape``: the parameter's, as the model has it.
    - ``kind``: ``"matrix"``, ``"elementwise"`` or ``"frozen"``.
    - ``rule``: what would train it, e.g. ``"muon"``; empty if it is frozen.
    - ``why``: the reason, as in the table at the start of a run.
    - ``matrices``: (rows, columns) of each matrix in it, by name; ``""`` if it is one matrix.
    - ``looks_fused``: whether it may be several matrices, and nothing tells them.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    rule: str
    why: str
    matrices: dict[str, tuple[int, int]]
    looks_fused: bool


def explain(model: nn.Module, *, show: bool = True, **options: Any) -> list[Explained]:
    """Say which rule would train each parameter of a model, and which matrices are in it.

    Allocates nothing and changes nothing, so the model may be on the meta device. It needs no process group.

    Args:
        model: the model, before an engine shards it.
        show: print the routing table, as it is at the start of a run.
        options: as those of ``LayerWiseOptimizer`` that every engine has: ``matrix``, ``elementwise``, ``overrides``,
            ``include``, ``exclude``, ``atoms``, and options of the rules.

    Returns:
        One entry per parameter, in the model's order.

    Raises:
        ValueError: as an optimizer with these options would.

    Examples:
        >>> with torch.device("meta"):
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> [each.name for each in explain(model) if each.looks_fused]
        []
    """
    _, _, found = Given(options, None).decide(HostConfig, model)
    if show:
        with reporting() as console:
            show_routing(console, found.routes, found.groups)
    explained = []
    for route in found.routes:
        divided = found.divided.get(route.name) if route.kind == "matrix" else None
        matrices = {} if divided is None else {block.name: block.shape for block in divided.blocks}
        looks_fused = divided is not None and divided.looks_fused
        of_route = (route.name, route.shape, route.kind, route.rule, route.reason)
        explained.append(Explained(*of_route, matrices, looks_fused))
    return explained
