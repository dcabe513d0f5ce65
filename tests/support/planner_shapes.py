"""Studies of a small model, as `lwopt plan` makes them."""

import json
from pathlib import Path
from typing import Any

from lwopt_backend.plan.cost import CLUSTERS
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import read_shapes_json
from lwopt_backend.planner.study import Deployment, Study, plan_study

LAYER = {"q.weight": [64, 64], "o.weight": [64, 64], "up.weight": [200, 64], "down.weight": [64, 200], "norm": [64]}
MODEL = [[f"layers.{i}.{name}", shape] for i in range(3) for name, shape in LAYER.items()]
SMALL = {"bucket_mb": 0.05}


def study_in(
    path: Path, engine: str, ranks: int, options: dict[str, Any], *, shapes: list[Any] = MODEL, spread: Any = ()
) -> Study:
    """``options`` are the engine's, and ``dtype``; ``spread`` is over stages, tensor and expert parallelism."""
    path.write_text(json.dumps(shapes))
    given = {key: value for key, value in options.items() if key != "dtype"}
    setting = Setting.of(engine, CLUSTERS["h100-8x-ib"], given, dtype=options.get("dtype"))
    return plan_study(read_shapes_json(path, setting.training), Deployment(ranks, *spread), setting)
