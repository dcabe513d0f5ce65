"""Clusters by name, or described in a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from lwopt_backend.options import Options, parse
from lwopt_backend.plan.machine import CLUSTERS, MACHINES, Machine
from lwopt_backend.spelling import suggestion

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ClusterOptions(Options):
    """A cluster file: what one rank can do. ``node_*`` and ``memory_bytes`` may be left out."""

    name: str
    flops_per_second: Positive
    bytes_per_second: Positive
    latency_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    node_size: Annotated[int, Field(ge=1)] = 1
    node_bytes_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    memory_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


def cluster_named(name: str) -> Machine:
    """The cluster called ``name``, or the one that the YAML file ``name`` describes. Raises ValueError."""
    known = {**CLUSTERS, **MACHINES}
    if name in known:
        return known[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise ValueError(f"unknown cluster {name!r}; {suggestion(name, known)} (or give a YAML file of one)")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cluster file {name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"cluster file {name}: expected a mapping with flops_per_second, bytes_per_second and so on")
    options = parse(ClusterOptions, {str(key): value for key, value in content.items()}, f"cluster file {name}")
    return Machine(**options.model_dump())
