"""Options that several commands share, and what they stand for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from lwopt_backend.planner.shapes import ModelShapes, Training

Engine = Literal["owned", "zero1", "zero2", "zero3", "fsdp2"]
Layout = Literal["padded", "compact", "auto"]
Policy = Literal["auto", "stay", "balance"]
Dtype = Literal["bfloat16", "float16", "float32"]
GradDtype = Literal["parameter", "float32"]

MATRICES = r'JSON of matrices in model order: \[\["name", \[rows, columns]], ...].'
OPTION = "Any other option of the engine, or a section of rules: matrix=soap. `lwopt rules` lists them."
CLUSTER = "A known cluster, or a YAML file of one."
of_model, of_cluster, of_plan, of_output = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("The model", "The cluster", "The plan", "Output")
)

HuggingFace = Annotated[Path | None, of_model("--hf", metavar="PATH", help="A Hugging Face config.json or its folder.")]
Shapes = Annotated[Path | None, of_model(metavar="FILE", help=MATRICES)]
Include = Annotated[list[str] | None, of_model(metavar="GLOB", help="Names that are matrices all the same.")]
Exclude = Annotated[list[str] | None, of_model(metavar="GLOB", help="Names that are not matrices.")]
Experts = Annotated[str, of_model(metavar="GLOB", help="Parameters that --ep spreads.")]
ParameterDtype = Annotated[
    Dtype | None, of_model(help="Of parameters. Default: config.json's, else bfloat16, on fsdp2 float32.")
]

WorldSize = Annotated[int, of_cluster(min=1, max=2**16, help="All ranks.")]
TensorParallel = Annotated[int, of_cluster(min=1, help="Tensor parallelism.")]
PipelineParallel = Annotated[int, of_cluster(min=1, help="Pipeline stages.")]
ExpertParallel = Annotated[int, of_cluster(min=1, help="Expert parallelism.")]
Cluster = Annotated[str, of_cluster(metavar="NAME|FILE", help=CLUSTER)]

PlannedEngine = Annotated[Engine, of_plan(help="Who stores parameters.")]
PlannedLayout = Annotated[Layout | None, of_plan(help="Of buckets: with padding, without, or what the engine chooses.")]
BucketMb = Annotated[float | None, of_plan(metavar="MIB", help="Of owned: MiB of gradients that close a bucket.")]
BucketNumel = Annotated[int | None, of_plan(min=1, help="Of zero and fsdp2: most elements of an exchange.")]
GroupSize = Annotated[int | None, of_plan(min=1, help="Of owned: ranks that share ownership.")]
PlannedPolicy = Annotated[Policy | None, of_plan(help="Of zero: who owns a matrix.")]
SubGroupSize = Annotated[int, of_plan(min=1, help="DeepSpeed's, of zero3.")]
GradientDtype = Annotated[GradDtype, of_plan(help="Of gradients, kept and sent.")]
Option = Annotated[list[str] | None, of_plan(metavar="KEY=VALUE", help=OPTION)]

AsJSON = Annotated[bool, of_output("--json", help="Print the plan as JSON, nothing else.")]
Assignments = Annotated[bool, of_output("--assignments", help="With --json: every matrix, its owner and bucket.")]
HTML = Annotated[Path | None, of_output(metavar="FILE", help="Write a report.")]
PNG = Annotated[Path | None, of_output(metavar="FILE", help="Write a picture.")]


def read_model(hf: Path | None, shapes: Path | None, training: Training) -> ModelShapes:
    """The model that ``hf`` or ``shapes`` names. Raises ValueError for none and for both."""
    if (hf is None) == (shapes is None):
        raise ValueError(f"give one of --hf and --shapes; found {'--hf and --shapes' if hf else 'none'}")
    from lwopt_backend.planner.shapes import read_hugging_face, read_shapes_json

    if hf:
        return read_hugging_face(hf, training=training)
    if training.config.include or training.config.exclude:
        raise ValueError("--include and --exclude choose among a model's parameters; a list of shapes is all matrices")
    assert shapes
    return read_shapes_json(shapes, training)
