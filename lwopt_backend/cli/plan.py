"""``lwopt plan``: the modelled cost of a step on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from lwopt_backend.cli import inputs
from lwopt_backend.plan.layouts import SUB_GROUP_SIZE
from lwopt_backend.planner import EXPERTS

if TYPE_CHECKING:
    from lwopt_backend.planner.shapes import ModelShapes
    from lwopt_backend.planner.study import Study


def plan(
    world_size: inputs.WorldSize,
    hf: inputs.HuggingFace = None,
    shapes: inputs.Shapes = None,
    include: inputs.Include = None,
    exclude: inputs.Exclude = None,
    experts: inputs.Experts = EXPERTS,
    dtype: inputs.ParameterDtype = None,
    tp: inputs.TensorParallel = 1,
    pp: inputs.PipelineParallel = 1,
    ep: inputs.ExpertParallel = 1,
    cluster: inputs.Cluster = "h100-8x-ib",
    engine: inputs.PlannedEngine = "plain",
    layout: inputs.PlannedLayout = None,
    bucket_mb: inputs.BucketMb = None,
    bucket_numel: inputs.BucketNumel = None,
    group_size: inputs.GroupSize = None,
    policy: inputs.PlannedPolicy = None,
    sub_group_size: inputs.SubGroupSize = SUB_GROUP_SIZE,
    stack_dim: inputs.StackDim = 0,
    grad_dtype: inputs.GradientDtype = "parameter",
    option: inputs.Option = None,
    as_json: inputs.AsJSON = False,
    assignments: inputs.Assignments = False,
    html: inputs.HTML = None,
    png: inputs.PNG = None,
) -> None:
    """Print the plan that an engine trains by: owners, work and memory of each rank, bytes and modelled time of a step.

    An option that you leave out has the engine's default.
    """
    given = dict(locals())  # the options by their names, before there is any other local
    from lwopt_backend.planner.document import document

    model, study = studied(given)
    if assignments and not as_json:
        raise ValueError("--assignments: expected --json, which prints them, found none; add --json")
    content = document(study, source=model.source, notes=model.notes, assignments=assignments)
    _draw(content, html, png, lambda console: _print(console, model, study))
    if as_json:
        typer.echo(json.dumps(content))
    else:
        _print(None, model, study)


def studied(given: Mapping[str, Any]) -> tuple[ModelShapes, Study]:
    """The model and its study, from the options of ``plan`` by their names."""
    import torch

    from lwopt_backend.planner.setting import Setting, cluster_named, engine_options
    from lwopt_backend.planner.study import Deployment, plan_study

    names = ("include", "exclude", "layout", "bucket_mb", "policy", "bucket_numel", "group_size")
    machine = cluster_named(given["cluster"])
    options = engine_options(given["engine"], {name: given[name] for name in names}, given["option"] or ())

    def setting_of(dtype: str | None) -> Setting:
        return Setting.of(
            given["engine"],
            machine,
            options,
            dtype=getattr(torch, dtype) if dtype else None,
            grad_dtype=given["grad_dtype"],
            sub_group_size=given["sub_group_size"],
            stack_dim=given["stack_dim"],
        )

    setting = setting_of(given["dtype"])
    model = inputs.read_model(given["hf"], given["shapes"], setting.training)
    if given["dtype"] is None:  # the model has it, but reading the model needs a setting's rules
        setting = setting_of(model.dtype)
        name = str(setting.dtype).removeprefix("torch.")
        note = f"Parameters are planned in {name}, as {model.source.partition(' ')[0]} says."
        if model.dtype is None:
            note = f"Parameters are assumed to be {name}, since no dtype is given; --dtype plans another."
        model = replace(model, notes=(*model.notes, note))
    deployment = Deployment(*(given[name] for name in ("world_size", "tp", "pp", "ep")))
    if given["stack_dim"] and given["engine"] != "fsdp2":
        raise ValueError(f"--stack-dim: expected --engine fsdp2, found {given['engine']!r}; leave it out")
    with Console(stderr=True).status("planning"):
        study = plan_study(model, deployment, setting, experts=given["experts"])
        if given["stack_dim"] and not any(route.stack for route in study.routes):
            raise ValueError("--stack-dim: expected stacked matrices, found none in the model; leave it out")
        if any(note.about == "stacks" for part in study.worst.parts for note in part.notes):
            other = plan_study(model, deployment, replace(setting, stack_dim=1), experts=given["experts"])
            took, would = (1e3 * each.worst.timeline.seconds for each in (study, other))
            note = (
                f"Stacks cut within matrices, by --stack-dim 1: a modelled step of {would:.4g} ms, not {took:.4g} ms."
            )
            model = replace(model, notes=(*model.notes, note))
        return replace(model, notes=(*model.notes, *_of_auto(model, study, given["experts"]))), study


def _of_auto(model: ModelShapes, study: Study, experts: str) -> list[str]:
    """A sentence on the plan with ``ns_method`` "auto", if the rule has the option and the modelled step is faster."""
    from lwopt_backend.engines.report import BY_ROUNDING, SAVED
    from lwopt_backend.groups.registry import flops_of_auto
    from lwopt_backend.planner.study import plan_study

    rules = study.setting.rules
    if flops_of_auto((1, 1), rules.matrix) is None:
        return []
    rules = replace(rules, matrix={**rules.matrix, "ns_method": "auto"})
    other = plan_study(model, study.deployment, replace(study.setting, rules=rules), experts=experts)
    took, would = (each.worst.timeline.seconds for each in (study, other))
    if would > SAVED * took:
        return []
    flops = sum(other.worst.loads()) / sum(study.worst.loads())
    return [
        f"'ns_method': 'auto': a modelled step of {1e3 * would:.4g} ms, not {1e3 * took:.4g} ms, with {flops:.2f} of "
        f"the flops of Newton-Schulz; {BY_ROUNDING}."
    ]


def _draw(content: dict[str, Any], html: Path | None, png: Path | None, show: Callable[[Console], None]) -> None:
    """Write the report, with the output of ``show``, and the picture, unless the path is None."""
    if html is None and png is None:
        return
    from lwopt_backend.cli import tables
    from lwopt_backend.planner import picture

    if html:
        page = tables.recording()
        show(page)
        picture.write_html(content, page, html)
    if png:
        picture.write_png(content, png)


def _print(console: Console | None, model: ModelShapes, study: Study) -> None:
    from lwopt_backend.cli import tables
    from lwopt_backend.engines.output import standard_output
    from lwopt_backend.engines.report import print_whole, routing_headline, routing_table, show_digest

    console = console or standard_output()
    console.print(f"Model: {model.source}")
    for sentence in (*model.notes, *routing_headline(study.routes)):
        console.print(sentence)
    console.print(routing_table(study.routes))
    for sentence in tables.headline(study):
        console.print(sentence)
    if len(study.stages) > 1:
        print_whole(console, tables.stage_table(study))
    print_whole(console, tables.rank_table(study.worst))
    print_whole(console, tables.collective_table(study.worst))
    show_digest(console, study.digest)
