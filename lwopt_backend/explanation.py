"""What would happen to a model, without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.engines.report import reporting, show_routing
from lwopt_backend.groups.grouping import Given
from lwopt_backend.routing.models import as_module
from lwopt_backend.routing.routing import shares


@dataclass(frozen=True, slots=True)
class Explained:
    """What a run would do with one parameter.

    - ``name`` and ``shape``: the parameter's, as the model has it.
    - ``kind``: ``"matrix"``, ``"elementwise"`` or ``"frozen"``.
    - ``rule``: what would train it, e.g. ``"muon"``; empty if it is frozen.
    - ``why``: the reason, as in the table at the start of a run.
    - ``matrices``: (rows, columns) of each matrix in it, by name; ``""`` if it is one matrix.
    - ``looks_fused``: whether it may be several matrices, and nothing tells them.
    - ``truth``: what told this: ``"option"``, ``"name"``, ``"class"`` of its module, ``"library"`` of the model, or the
      model's code, run on a ``"guess"`` at its arguments or on your ``"example"``.
    - ``transposed``: whether a matrix is stored as (inputs, outputs).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    rule: str
    why: str
    matrices: dict[str, tuple[int, int]]
    looks_fused: bool
    truth: str
    transposed: bool


class Explanation(list[Explained]):
    """One entry per parameter, and the ``shares`` of the rules: the part of all trained elements by rule and by what
    they are, e.g. ``{("muon", ""): 0.08, ("adamw", "convolutions"): 0.9, ("adamw", "norms and vectors"): 0.02}``."""

    def __init__(self, entries: Iterable[Explained], shares: Mapping[tuple[str, str], float]) -> None:
        super().__init__(entries)
        self.shares = dict(shares)


def explain(
    model: nn.Module | Sequence[nn.Module], *, example: Any = None, show: bool = True, **options: Any
) -> Explanation:
    """Say which rule would train each parameter of a model, and which matrices are in it.

    Allocates nothing and changes nothing, so the model may be on the meta device. It needs no process group.

    Args:
        model: the model, before an engine shards it, or a list of modules.
        example: ``(args, kwargs)``, arguments of the model's ``forward``; of a list of modules, a list with one each.
            Their shapes and dtypes count, their values do not. The model's code is followed on tensors of these
            shapes without memory, and what it does with each weight decides; without an example, module by module on
            guesses.
        show: print the routing table, as it is at the start of a run.
        options: as those of ``LayerWiseOptimizer`` that every engine has: ``matrix``, ``elementwise``, ``overrides``,
            ``include``, ``exclude``, ``atoms``, ``convolutions``, and options of the rules.

    Returns:
        One entry per parameter, in the model's order; its ``shares`` are those of the rules.

    Raises:
        TypeError, ValueError: as an optimizer with these options would.

    Examples:
        >>> with torch.device("meta"):
        ...     model = AutoModelForCausalLM.from_config(config)
        >>> [each.name for each in explain(model) if each.looks_fused]
        []
    """
    _, _, found = Given(options, None, example).decide(HostConfig, as_module(model, "explain"))
    if show:
        with reporting() as console:
            show_routing(console, found.routes, found.groups)
    explained = []
    for route in found.routes:
        divided = found.divided.get(route.name) if route.kind == "matrix" else None
        matrices = {} if divided is None else {block.name: block.shape for block in divided.blocks}
        looks_fused = divided is not None and divided.looks_fused
        of_route = (route.name, route.shape, route.kind, route.rule, route.reason)
        is_transposed = route.kind == "matrix" and route.transposed
        explained.append(Explained(*of_route, matrices, looks_fused, route.truth, is_transposed))
    return Explanation(explained, shares(found.routes))
