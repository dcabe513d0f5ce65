"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lwopt_backend.config.options import suggestion
from lwopt_backend.plan.cost import COSTS, CostModel, read_cost_table

if TYPE_CHECKING:
    import torch

    from lwopt_backend.planner.shapes import ModelShapes, Training


Engine = Literal["owned", "zero1", "zero2", "zero3", "fsdp2"]
Layout = Literal["padded", "compact", "auto"]
Dtype = Literal["bfloat16", "float16", "float32"]
GradDtype = Literal["parameter", "float32"]

MEASURED = "measured"
MODEL, CLUSTER, PLAN, OUTPUT = "The model", "The cluster", "The plan", "Output"

HuggingFace = Annotated[
    Path | None,
    typer.Option("--hf", metavar="PATH", help="A Hugging Face config.json, or its folder.", rich_help_panel=MODEL),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="A checkpoint; only names and shapes are read.", rich_help_panel=MODEL),
]
Shapes = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=r'JSON of matrices in model order: \[\["name", \[rows, columns]], ...].',
        rich_help_panel=MODEL,
    ),
]
Include = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Names that are matrices all the same.", rich_help_panel=MODEL)
]
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Names that are not matrices.", rich_help_panel=MODEL)
]
Cluster = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="A known cluster, or a YAML file of one.", rich_help_panel=CLUSTER)
]
Cost = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=f"What work is counted by: {', '.join(COSTS)}, or {MEASURED}: the table that `lwopt calibrate` made, or "
        "its file. Default: the flops of the matrix rule.",
        rich_help_panel=PLAN,
    ),
]
BucketMb = Annotated[
    float | None,
    typer.Option(metavar="MIB", help="Of owned storage: MiB of gradients that close a bucket.", rich_help_panel=PLAN),
]

WorldSize = Annotated[int, typer.Option(min=1, max=2**16, help="All ranks.", rich_help_panel=CLUSTER)]
TensorParallel = Annotated[int, typer.Option(min=1, help="Tensor parallelism.", rich_help_panel=CLUSTER)]
PipelineParallel = Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=CLUSTER)]
ExpertParallel = Annotated[int, typer.Option(min=1, help="Expert parallelism.", rich_help_panel=CLUSTER)]
Experts = Annotated[str, typer.Option(metavar="GLOB", help="Parameters that --ep spreads.", rich_help_panel=MODEL)]
ParameterDtype = Annotated[
    Dtype | None, typer.Option(help="Of parameters. Default: bfloat16, on fsdp2 float32.", rich_help_panel=MODEL)
]
PlannedEngine = Annotated[Engine, typer.Option(help="Who stores parameters.", rich_help_panel=PLAN)]
PlannedLayout = Annotated[
    Layout | None,
    typer.Option(help="Of buckets: with padding, without, or what the engine chooses.", rich_help_panel=PLAN),
]
BucketNumel = Annotated[
    int | None, typer.Option(min=1, help="Of zero and fsdp2: most elements of an exchange.", rich_help_panel=PLAN)
]
GroupSize = Annotated[
    str | None, typer.Option(metavar="N|auto", help="Of owned: ranks that share ownership.", rich_help_panel=PLAN)
]
PlannedPolicy = Annotated[
    Literal["auto", "stay", "balance"] | None, typer.Option(help="Of zero: who owns a matrix.", rich_help_panel=PLAN)
]
SubGroupSize = Annotated[int, typer.Option(min=1, help="DeepSpeed's, of zero3.", rich_help_panel=PLAN)]
GradientDtype = Annotated[GradDtype, typer.Option(help="Of gradients, kept and sent.", rich_help_panel=PLAN)]
Option = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Any other option of the engine, or a section of rules: matrix=soap. `lwopt rules` lists them.",
        rich_help_panel=PLAN,
    ),
]
WhatIf = Annotated[
    bool | None, typer.Option(help="Rows for other choices. Default: yes, unless --json.", rich_help_panel=OUTPUT)
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print the plan as JSON, nothing else.", rich_help_panel=OUTPUT)]
HTML = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report.", rich_help_panel=OUTPUT)]
PNG = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture.", rich_help_panel=OUTPUT)]


def read_model(hf: Path | None, checkpoint: Path | None, shapes: Path | None, training: Training) -> ModelShapes:
    """The model that exactly one of ``hf``, ``checkpoint`` and ``shapes`` names. Raises ValueError otherwise."""
    given = [name for name, path in (("--hf", hf), ("--checkpoint", checkpoint), ("--shapes", shapes)) if path]
    if len(given) != 1:
        raise ValueError(f"give one of --hf, --checkpoint and --shapes; found {' and '.join(given) or 'none'}")
    from lwopt_backend.planner.models import read_checkpoint
    from lwopt_backend.planner.shapes import read_hugging_face, read_shapes_json

    if hf:
        return read_hugging_face(hf, training=training)
    if checkpoint:
        return read_checkpoint(checkpoint, training=training)
    if training.config.include or training.config.exclude:
        raise ValueError("--include and --exclude choose among a model's parameters; a list of shapes is all matrices")
    assert shapes
    return read_shapes_json(shapes, training)


def cost_named(name: str | None) -> CostModel | None:
    """None, the cost model called ``name``, or the measured table in the file ``name``. Raises ValueError."""
    if name is None:
        return None
    if name in COSTS:
        return COSTS[name]
    if name == MEASURED:
        from lwopt_backend.planner.calibrate import default_path

        table = read_cost_table(default_path(own_device()))
    elif Path(name).suffix:
        table = read_cost_table(Path(name))
    else:
        raise ValueError(f"unknown cost {name!r}; {suggestion(name, [*COSTS, MEASURED])} (or give a table's file)")
    # The stepper stacks equal matrices on a GPU and takes them one by one on a CPU.
    return table.model(stacked=not table.device.startswith("cpu"))


def own_device() -> torch.device:
    """The accelerator of this machine, or its CPU."""
    import torch

    return torch.accelerator.current_accelerator() or torch.device("cpu")
