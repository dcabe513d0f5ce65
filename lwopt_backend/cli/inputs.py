"""Options that several commands share, and the model that they name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from lwopt_backend.planner.shapes import ModelShapes, Training

Engine = Literal["plain", "zero1", "zero2", "zero3", "fsdp2"]
Layout = Literal["padded", "compact", "auto"]
Policy = Literal["auto", "stay", "balance"]
Dtype = Literal["bfloat16", "float16", "float32"]
GradDtype = Literal["parameter", "float32"]

MATRICES = r'A JSON file of matrices in model order: \[\["name", \[rows, columns]], ...].'
OPTION = "Set any other option of the engine, or a rule: matrix=soap. `lwopt rules` lists them. Repeatable."
CLUSTER = "Cluster to model: a known name, or a YAML file."
of_model, of_cluster, of_plan, of_output = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("The model", "The cluster", "The plan", "Output")
)

HuggingFace = Annotated[
    Path | None, of_model("--hf", metavar="PATH", help="A Hugging Face config.json, or its folder.")
]
Shapes = Annotated[Path | None, of_model(metavar="FILE", help=MATRICES)]
Include = Annotated[
    list[str] | None, of_model(metavar="GLOB", help="Treat parameters that match this glob as matrices. Repeatable.")
]
Exclude = Annotated[
    list[str] | None,
    of_model(metavar="GLOB", help="Treat parameters that match this glob as element-wise. Repeatable."),
]
Experts = Annotated[str, of_model(metavar="GLOB", help="Glob of the parameters that --ep distributes.")]
ParameterDtype = Annotated[
    Dtype | None,
    of_model(help="Parameter dtype. Default: that of config.json; otherwise float32 for fsdp2, or bfloat16."),
]

WorldSize = Annotated[int, of_cluster(min=1, max=2**16, help="Number of ranks.")]
TensorParallel = Annotated[int, of_cluster(min=1, help="Tensor-parallel ranks (plain, fsdp2).")]
PipelineParallel = Annotated[int, of_cluster(min=1, help="Number of pipeline stages.")]
ExpertParallel = Annotated[int, of_cluster(min=1, help="Expert-parallel ranks.")]
Cluster = Annotated[str, of_cluster(metavar="NAME|FILE", help=CLUSTER)]

PlannedEngine = Annotated[Engine, of_plan(help="Engine to plan for.")]
PlannedLayout = Annotated[
    Layout | None, of_plan(help="Bucket layout: with padding, without, or the engine's choice (plain).")
]
BucketMb = Annotated[float | None, of_plan(metavar="MIB", help="Bucket size in MiB of gradients (plain).")]
BucketNumel = Annotated[int | None, of_plan(min=1, help="Maximum elements of an all-to-all (zero1-3, fsdp2).")]
GroupSize = Annotated[
    int | None,
    of_plan(min=1, help="Number of ranks that store one copy; the others hold more copies, as in HSDP (plain, fsdp2)."),
]
PlannedPolicy = Annotated[
    Policy | None,
    of_plan(help="Choice of owners: stay (fewest bytes), balance (even work), auto (faster by the model) (zero1-3)."),
]
SubGroupSize = Annotated[int, of_plan(min=1, help="DeepSpeed's sub_group_size, in elements (zero3).")]
StackDim = Annotated[int, of_plan(min=0, max=2, help="Dimension of stacked experts that is sharded (fsdp2).")]
GradientDtype = Annotated[GradDtype, of_plan(help="Dtype of stored and sent gradients.")]
Option = Annotated[list[str] | None, of_plan(metavar="KEY=VALUE", help=OPTION)]

AsJSON = Annotated[bool, of_output("--json", help="Print the plan as JSON, and nothing else.")]
Assignments = Annotated[bool, of_output("--assignments", help="Add every matrix with its owner and bucket to --json.")]
HTML = Annotated[Path | None, of_output(metavar="FILE", help="Write a report with a picture to this file.")]
PNG = Annotated[Path | None, of_output(metavar="FILE", help="Write the picture to this file.")]


def read_model(hf: Path | None, shapes: Path | None, training: Training) -> ModelShapes:
    """The model that ``hf`` or ``shapes`` names. Raises ValueError for none and for both."""
    if (hf is None) == (shapes is None):
        raise ValueError(f"expected one of --hf and --shapes, found {'both' if hf else 'none'}; give one")
    from lwopt_backend.planner.shapes import read_hugging_face, read_shapes_json

    if hf:
        if not hf.exists() and hf.suffix != ".json":
            raise ValueError(
                f"--hf {hf}: expected a config.json or a folder with one on this machine, found none; of a model on "
                f"the hub, get it first: hf download {hf} config.json --local-dir model, then give --hf model"
            )
        return read_hugging_face(hf, training=training)
    if training.config.include or training.config.exclude:
        raise ValueError("expected --include and --exclude with a model, found a list of shapes; leave them out")
    assert shapes
    return read_shapes_json(shapes, training)
