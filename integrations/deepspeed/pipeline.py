"""The exchange between pipeline stages before each makes its own plan.

A stage has a part of the model, which only its data-parallel ranks share. Decisions about the whole model need all
stages: which linear is the output head (as wide as an embedding on another stage), whether a glob matches anything,
whether there is any matrix. Weights tied between stages are updated on each of them, from one summed gradient, and stay
element-wise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import route_given
from lwopt_backend.groups.param_groups import overrides_of
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from lwopt_backend.routing.examples import examples_of
from lwopt_backend.routing.output_heads import EMBEDDINGS, Head, output_heads, rows_for_heads, widths
from lwopt_backend.routing.routing import Route, full_shape, named_parameters
from lwopt_backend.routing.shown import Shown
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives


@dataclass(frozen=True)
class PipelineStage:
    """A pipeline stage: its parameters' ``routes`` and those of the other stages. ``ranks`` has one rank of each stage.

    ``groups`` has every stage's param groups, each as the number of the user's group and its kind.
    """

    ranks: Collectives
    routes: list[Route]
    elsewhere: list[Route]
    groups: list[tuple[tuple[int, str], ...]]

    @property
    def all_routes(self) -> list[Route]:
        """The routes of all stages, each parameter once."""
        return list({route.name: route for route in [*self.routes, *self.elsewhere]}.values())

    @property
    def note(self) -> str:
        """The report's sentence before the plan."""
        return (
            f"Pipeline: {self.ranks.world_size} stages, each with its own plan; this is the plan of stage "
            f"{self.ranks.rank}, over its data-parallel ranks."
        )


def meet(
    engine: DeepSpeedEngine, given: Sequence[Mapping[str, Any]], rules: Rules, config: ZeROConfig
) -> PipelineStage | None:
    """Route this stage's parameters with the other stages' reports; None if the model is not a pipeline.

    Called on all ranks. Raises nothing, so that no rank leaves the others waiting.
    """
    if not engine.pipeline_parallelism:
        return None
    ranks = TorchCollectives(deepspeed_engine.pipeline_group(engine))
    tied = deepspeed_engine.tied_modules(engine)
    mine = widths(engine.module)
    inside = [inner for module in tied.values() for inner in module.modules()]
    mine = replace(mine, tied=mine.tied or any(isinstance(module, EMBEDDINGS) for module in inside))
    rows = rows_for_heads(ranks.gather_objects(mine))[ranks.rank]
    reasons = {
        id(p): Head(f"tied between pipeline layers as {key!r}", "library")
        for key, m in tied.items()
        for p in m.parameters()
    }
    shown = Shown(engine.module, full_shape, examples_of(engine.module))
    heads = {**output_heads(engine.module, rows, shown).found, **reasons}
    routes = route_given(engine.module, given, rules, config, heads, shown=shown)
    of_stages = ranks.gather_objects((routes, _groups(engine.module, given, routes, rules)))
    elsewhere = [route for i, (some, _) in enumerate(of_stages) if i != ranks.rank for route in some]
    return PipelineStage(ranks, routes, elsewhere, [groups for _, groups in of_stages])


def _groups(
    model: nn.Module, given: Sequence[Mapping[str, Any]], routes: Sequence[Route], rules: Rules
) -> tuple[tuple[int, str, tuple[int, ...]], ...]:
    """The param groups that the ``given`` ones will be split into."""
    names = {id(param): name for name, param in named_parameters(model)}
    by_name = {route.name: route for route in routes if math.prod(route.shape) > 0}
    named = ((number, names.get(id(p))) for number, group in enumerate(given) for p in group["params"])
    of_params = {
        (number, by_name[name].kind, overrides_of(by_name[name].overrides, by_name[name].kind, rules))
        for number, name in named
        if name in by_name and by_name[name].kind != "frozen"
    }
    return tuple(sorted(of_params))


def check(engine: DeepSpeedEngine, stage: PipelineStage) -> None:
    """Raises ValueError if ``include`` sends a tied weight to the matrix rule, and if stages have different numbers of
    param groups with which DeepSpeed would hang."""
    prefixes = tuple(f"tied_modules.{key}." for key in deepspeed_engine.tied_modules(engine))
    for route in stage.routes:
        if route.kind == "matrix" and route.name.startswith(prefixes):
            raise ValueError(f"include: {route.name!r} is tied between pipeline layers; such weights stay element-wise")
    counts = [len(groups) for groups in stage.groups]
    if engine.zero_optimization_stage() != 1 or deepspeed_engine.uses_bf16_optimizer(engine) or len(set(counts)) == 1:
        return
    fewest = min(range(len(counts)), key=counts.__getitem__)
    raise ValueError(
        f"pipeline stage {fewest} has {counts[fewest]} param group(s) and another stage {max(counts)}, because one of "
        "the given groups has only matrices there, or none. ZeRO-1 sums the gradients' norm over the stages group by "
        "group, so the stages would wait for each other; choose a partition_method that gives every stage both, or "
        "train in fp32 at stage 0, or in bf16 with data_types.grad_accum_dtype fp32"
    )
