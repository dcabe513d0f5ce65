"""Matrices of public models, and plans of every kind."""

import hashlib
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import public_models
from lwopt_backend.plan import Atom, FlatPartition, MatrixPlan, MeshLayout, Sharding, plan_matrices, plan_spread
from lwopt_backend.plan.buffers.layout import LAYOUTS, OwnedParam
from lwopt_backend.plan.buffers.owned import plan_owned
from lwopt_backend.plan.cost import CLUSTERS, MACHINES, newton_schulz_flops
from lwopt_backend.plan.owners import Limits
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import read_shapes_json
from lwopt_backend.planner.study import Deployment, Study, plan_study


@cache
def model(name: str, flavour: str = "hf") -> tuple[Atom, ...]:
    """A public model's matrices in model order, as the benchmark has them."""
    return tuple(public_models.atoms(name, flavour))


# Studies of a small model, as `lwopt plan` makes them
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


def atoms_of(shapes: Sequence[tuple[int, int]]) -> list[Atom]:
    return [Atom(f"layers.{i // 3}.{i % 3}", shape, newton_schulz_flops(shape)) for i, shape in enumerate(shapes)]


# Plans of every kind
UNEVEN_SHAPES = [(63, 24), (41, 63), (24, 41), (1, 5), (5, 1), (96, 96), (7, 300), (300, 7), (2, 2), (64, 64)]


def plan_of(shapes: list[tuple[int, int]], world_size: int, policy: str, bucket_numel: int = 3000) -> MatrixPlan:
    atoms = atoms_of(shapes)
    layout = FlatPartition.build([atom.numel for atom in atoms], world_size)
    machine = MACHINES["cpu"]
    limits = Limits(numel=bucket_numel)
    return plan_matrices(atoms, layout, limits, policy=policy, machine=machine, element_bytes=2)


def rows_over(shapes: Sequence[tuple[int, int]], ranks: int, sharding: type[Sharding] = Sharding) -> MeshLayout:
    kinds = {shape: sharding(shape, (ranks,), (0,), (False,)) for shape in set(shapes)}
    return MeshLayout(tuple((rank,) for rank in range(ranks)), tuple(kinds[shape] for shape in shapes))


def everything() -> str:
    """Plans of every kind, of which none may hang on the order of a set."""
    draw = random.Random(0)
    kinds = [(64 * draw.randint(1, 64), 64 * draw.randint(1, 64)) for _ in range(20)]
    kinds += [(128, 1024), (256, 512), (64, 2048), (2048, 1024), (4096, 512)]  # equal sizes, other costs
    atoms, many = atoms_of([draw.choice(kinds) for _ in range(500)]), UNEVEN_SHAPES * 20
    params = [OwnedParam(atom.name, atom.numel, "float32", atom) for atom in atoms]
    owned = [plan_owned(params, 24, layout, numel) for layout in LAYOUTS for numel in (1, 20_000_000)]
    found = [line for plan in owned for line in plan.lines()]
    spread = plan_spread(atoms_of(many), rows_over(many, 16))
    lines = [*plan_of(many, 16, "balance").lines(), *spread.lines(), *found]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
