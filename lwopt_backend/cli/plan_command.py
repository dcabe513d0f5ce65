"""``lwopt plan``: what a step would cost, before a cluster is booked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lwopt_backend.cli import inputs
from lwopt_backend.study.deployment import EXPERTS

if TYPE_CHECKING:
    from lwopt_backend.model_shapes import ModelShapes
    from lwopt_backend.study.atoms import Split
    from lwopt_backend.study.study import Study
    from lwopt_backend.study.what_if import Alternative


def plan(
    world_size: Annotated[int, typer.Option(min=1, help="All ranks.", rich_help_panel=inputs.CLUSTER)],
    hf: inputs.HuggingFace = None,
    checkpoint: inputs.Checkpoint = None,
    shapes: inputs.Shapes = None,
    include: inputs.Include = None,
    exclude: inputs.Exclude = None,
    split: inputs.Splits = None,
    experts: Annotated[
        str, typer.Option(metavar="GLOB", help="Parameters that --ep spreads.", rich_help_panel=inputs.MODEL)
    ] = EXPERTS,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallelism.", rich_help_panel=inputs.CLUSTER)] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=inputs.CLUSTER)] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallelism.", rich_help_panel=inputs.CLUSTER)] = 1,
    cluster: inputs.Cluster = "h100-8x-ib",
    engine: Annotated[
        inputs.Engine, typer.Option(help="Who stores parameters.", rich_help_panel=inputs.PLAN)
    ] = inputs.Engine.owned,
    layout: Annotated[
        inputs.Layout | None,
        typer.Option(help="Of owned storage: with padding, without, or the faster one.", rich_help_panel=inputs.PLAN),
    ] = None,
    bucket_numel: inputs.BucketNumel = None,
    group_size: Annotated[
        str, typer.Option(metavar="N|auto", help="Ranks that share ownership.", rich_help_panel=inputs.PLAN)
    ] = "auto",
    cost: inputs.Cost = "newton_schulz",
    grad_dtype: Annotated[
        inputs.GradDtype, typer.Option(help="Gradients, kept and sent.", rich_help_panel=inputs.PLAN)
    ] = inputs.GradDtype.fp32,
    what_if: Annotated[
        bool | None,
        typer.Option(help="Rows for other choices. Default: yes, unless --json.", rich_help_panel=inputs.OUTPUT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, nothing else.", rich_help_panel=inputs.OUTPUT)
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report.", rich_help_panel=inputs.OUTPUT)
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture.", rich_help_panel=inputs.OUTPUT)
    ] = None,
) -> None:
    """Plan a model on a cluster: who owns what, work and memory per rank, bytes and modelled seconds of a step."""
    from lwopt_backend.study.atoms import parse_split
    from lwopt_backend.study.cluster import cluster_named
    from lwopt_backend.study.deployment import Deployment
    from lwopt_backend.study.document import document
    from lwopt_backend.study.part import Setting
    from lwopt_backend.study.study import plan_study

    model = inputs.read_model(hf, checkpoint, shapes, include, exclude)
    setting = Setting(
        engine.value,
        _layout(engine, layout),
        inputs.bucket_elements(bucket_numel, engine.value),
        cluster_named(cluster),
        inputs.cost_named(cost),
        _group_size(group_size, engine),
        4 if grad_dtype is inputs.GradDtype.fp32 else 2,
    )
    deployment = Deployment(world_size, tp, pp, ep)
    splits = dict(parse_split(text) for text in split or ())
    messages = Console(stderr=True)
    with messages.status("planning"):
        study = plan_study(model.routes, deployment, setting, splits=splits, experts=experts)
    wanted = what_if if what_if is not None else not as_json
    rows = _what_if(study, messages) if wanted else []
    content = document(study, source=model.source, rows=rows)
    if html or png:
        _draw(content, html, png)
    if as_json:
        typer.echo(json.dumps(content))
    else:
        _print(model, study, rows, splits, content["digest"])


def _layout(engine: inputs.Engine, layout: inputs.Layout | None) -> str:
    if layout is not None and engine is not inputs.Engine.owned:
        raise ValueError(f"--layout is for engine 'owned'; {engine.value!r} has the layout of its host")
    return layout.value if layout is not None else "auto"


def _group_size(text: str, engine: inputs.Engine) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"--group-size: expected a number of ranks or 'auto', found {text!r}")
    if engine is not inputs.Engine.owned:
        raise ValueError(f"--group-size is for engine 'owned'; {engine.value!r} shards over all data-parallel ranks")
    return int(text)


def _what_if(study: Study, messages: Console) -> list[Alternative]:
    """Rows for the largest buffer of the stage that is shown."""
    from lwopt_backend.study.what_if import alternatives

    part = study.worst.parts[0]
    with messages.status("what if") as status:
        return list(alternatives(part, study.setting, lambda what: status.update(f"what if: {what}")))


def _draw(content: dict[str, object], html: Path | None, png: Path | None) -> None:
    from lwopt_backend.pictures import save_html, save_plan_png  # matplotlib is an extra, and slow to import

    if html:
        save_html(content, html)
    if png:
        save_plan_png(content, png)


def _print(model: ModelShapes, study: Study, rows: list[Alternative], splits: Mapping[str, Split], digest: str) -> None:
    from lwopt_backend.cli import tables
    from lwopt_backend.report import routing_headline, routing_table

    console = tables.terminal()
    console.print(f"Model: {model.source}")
    for sentence in (*model.notes, *routing_headline(study.routes)):
        console.print(sentence)
    console.print(routing_table(study.routes))
    if splits:
        console.print(
            f"Note: {', '.join(splits)} planned as several matrices; today's engines train what the table above says."
        )
    for sentence in tables.headline(study):
        console.print(sentence)
    if len(study.stages) > 1:
        console.print(tables.stage_table(study))
    console.print(tables.rank_table(study.worst))
    console.print(tables.collective_table(study.worst))
    if rows:
        console.print(tables.what_if_table(study.worst.parts[0].name, rows))
    console.print(f"Plan {digest}: equal plans have equal names, on every rank and machine.")
