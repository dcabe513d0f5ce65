"""Plans of small models, with the standard library alone: ``python tests/support/plans.py`` starts in no time."""

import hashlib
import random
from collections.abc import Sequence

from lwopt_backend.plan import MatrixPlan
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import LAYOUTS, BufferParam
from lwopt_backend.plan.buffers.plan import plan_buffers
from lwopt_backend.plan.cost import MACHINES, newton_schulz_flops
from lwopt_backend.plan.layouts import FlatPartition
from lwopt_backend.plan.mesh import MeshLayout, Sharding
from lwopt_backend.plan.owners import Limits, plan_matrices, plan_spread

SHAPES = [(63, 24), (41, 63), (24, 41), (1, 5), (5, 1), (96, 96), (7, 300), (300, 7), (2, 2), (64, 64)]


def atoms_of(shapes: Sequence[tuple[int, int]]) -> list[Atom]:
    return [Atom(f"layers.{i // 3}.{i % 3}", shape, newton_schulz_flops(shape)) for i, shape in enumerate(shapes)]


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
    """The hash of plans of every kind, of which none may hang on the order of a set."""
    draw = random.Random(0)
    kinds = [(64 * draw.randint(1, 64), 64 * draw.randint(1, 64)) for _ in range(20)]
    kinds += [(128, 1024), (256, 512), (64, 2048), (2048, 1024), (4096, 512)]  # equal sizes, other costs
    atoms, many = atoms_of([draw.choice(kinds) for _ in range(500)]), SHAPES * 20
    params = [BufferParam(atom.name, atom.numel, "float32", atom) for atom in atoms]
    owned = [plan_buffers(params, 24, layout, numel) for layout in LAYOUTS for numel in (1, 20_000_000)]
    found = [line for plan in owned for line in plan.lines()]
    spread = plan_spread(atoms_of(many), rows_over(many, 16))
    lines = [*plan_of(many, 16, "balance").lines(), *spread.lines(), *found]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


if __name__ == "__main__":
    print(everything())
