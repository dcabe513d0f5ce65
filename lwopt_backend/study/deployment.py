"""How a model is spread over ranks by tensor, pipeline and expert parallelism, and what is left to each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch comes with it, and the command's help names EXPERTS
    from lwopt_backend.atoms import Divided
    from lwopt_backend.routing import Route

EXPERTS = "*.experts.*"  # names of parameters that are spread over ``ep`` ranks
EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")  # one expert's number in its parameters' names


@dataclass(frozen=True, slots=True)
class Deployment:
    """``world_size`` ranks: ``pp`` stages, each of ``tp`` x ``dp`` ranks; experts over ``ep`` of a stage's ranks.

    Experts are not cut by ``tp``. Raises ValueError where the numbers do not divide.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.world_size % (self.tp * self.pp):
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of tp x pp = {self.tp} x {self.pp}; "
                f"give the number of all ranks, e.g. {self.tp * self.pp * self.world_size} for {self.world_size} "
                "data-parallel ranks"
            )
        if self.stage_ranks % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {self.stage_ranks} ranks of a pipeline stage "
                f"(world_size {self.world_size} / pp {self.pp}); world_size counts all ranks, not data-parallel ones"
            )

    @property
    def stage_ranks(self) -> int:
        return self.world_size // self.pp

    @property
    def dp(self) -> int:
        """Ranks over which a dense matrix's owner is chosen."""
        return self.world_size // (self.tp * self.pp)

    @property
    def expert_dp(self) -> int:
        """Ranks over which an expert matrix's owner is chosen."""
        return self.stage_ranks // self.ep


def stages(routes: Sequence[Route], pp: int) -> list[list[Route]]:
    """The parameters of each pipeline stage: whole layers, as evenly as they go, earlier stages the longer ones.

    A layer is what shares the first number in its name. What precedes the first layer joins the first stage, what
    follows the last one the last. Raises ValueError if there are fewer layers than stages.
    """
    if pp == 1:
        return [list(routes)]
    layers = sorted({int(number.group()) for r in routes if (number := re.search(r"\d+", r.name))})
    if len(layers) < pp:
        raise ValueError(f"pp {pp}: the parameters' names show only {len(layers)} layers to spread over the stages")
    sizes = [len(layers) // pp + (stage < len(layers) % pp) for stage in range(pp)]
    stage_of = dict(zip(layers, (stage for stage, size in enumerate(sizes) for _ in range(size))))
    found: list[list[Route]] = [[] for _ in range(pp)]
    last_seen = 0
    seen_layer = False
    for route in routes:
        number = re.search(r"\d+", route.name)
        if number:
            last_seen, seen_layer = stage_of[int(number.group())], True
        found[last_seen if number else (pp - 1 if seen_layer else 0)].append(route)
    return found


def is_expert(route: Route, pattern: str) -> bool:
    """Whether a parameter belongs to the experts that ``ep`` spreads, by a glob on its name."""
    return fnmatchcase(route.name, pattern)


def local_experts(
    routes: Sequence[Route], divided: Mapping[str, Divided], ep: int, pattern: str
) -> tuple[list[Route], dict[str, Divided]]:
    """What one rank of ``ep`` holds of the expert parameters among ``routes``: the first ``1/ep`` of every layer's.

    And the matrices in them, of the ``divided`` ones. Experts are counted by the number behind ``.experts.`` in their
    names, or by the first dimension of a stack. All ranks hold equally many, so one stands for all. Raises ValueError
    where ``ep`` does not divide them.
    """

    experts = [route for route in routes if is_expert(route, pattern)]
    numbers = [EXPERT.search(route.name) for route in experts]
    stacked = [route for route, number in zip(experts, numbers) if number is None]
    for route in stacked:
        if len(route.shape) < 3 or route.shape[0] % ep:
            raise ValueError(
                f"ep {ep}: {route.name!r} of shape {route.shape} is neither one numbered expert "
                f"(...experts.<number>...) nor a stack whose first dimension {ep} divides"
            )
    count = 1 + max((int(number.group()) for number in numbers if number), default=-1)
    if count % ep:
        raise ValueError(f"ep {ep} does not divide the {count} experts of a layer")
    local = []
    parts = {}
    for route, number in zip(experts, numbers):
        if number is not None and int(number.group()) >= count // ep:
            continue
        local.append(route if number else replace(route, shape=(route.shape[0] // ep, *route.shape[1:])))
        if route.name in divided:
            parts[route.name] = divided[route.name] if number else _first(divided[route.name], ep)
    return local, parts


def _first(divided: Divided, ep: int) -> Divided:
    """The matrices in the first ``1/ep`` of a stack's slices."""
    count = divided.blocks[0].grid.slices // ep
    blocks = [replace(b, grid=replace(b.grid, slices=count)) for b in divided.blocks if b.slice < count]
    return replace(divided, blocks=tuple(blocks))
