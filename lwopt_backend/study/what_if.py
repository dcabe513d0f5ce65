"""What else could be chosen, and what it would cost: other layouts, group sizes, teams, and Megatron's own plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lwopt_backend.plan.buffers.groups import plan_buffer
from lwopt_backend.plan.buffers.teams import plan_teams
from lwopt_backend.plan.machine import StepTime
from lwopt_backend.study.owned import owned_part
from lwopt_backend.study.part import Part, Setting
from lwopt_backend.study.systems import compare

OTHER_GROUPS = 2  # group sizes besides all ranks and the chosen one


@dataclass(frozen=True, slots=True)
class Alternative:
    """One row: what would be different, and the same part's figures then. None where a figure does not apply."""

    what: str
    buckets: int | None
    padding: float | None
    flops_imbalance: float | None
    time: StepTime
    memory: int | None


Progress = Callable[[str], None]


def alternatives(part: Part, setting: Setting, progress: Progress = lambda what: None) -> Iterator[Alternative]:
    """Rows for ``part`` under owned storage, the chosen plan first. ``progress`` is told what is planned next."""
    yield _row(f"chosen: {part.layout}, groups of {part.group_size}", part)
    for layout, size, bucket_numel in _choices(part, setting):
        what = f"{layout}, groups of {size}{', one bucket' if bucket_numel != setting.bucket_numel else ''}"
        progress(what)
        grouped = plan_buffer(
            part.atoms,
            part.ranks,
            layout=layout,
            bucket_numel=bucket_numel,
            machine=setting.machine,
            cost=setting.cost,
            group_size=size,
            elements=setting.elements,
        )
        yield _row(what, owned_part(part.name, grouped, setting))
    progress("teams")
    teams = plan_teams(part.atoms, part.ranks, machine=setting.machine, cost=setting.cost)
    if teams.shared:
        wire = StepTime(teams.busiest, part.time.wire, part.time.latency)
        yield Alternative(
            f"{teams.shared} matrices shared by teams of {teams.team_size}, compact", None, 0.0, None, wire, None
        )
    for figure in compare(part.atoms, part.ranks, setting)[1:]:
        yield Alternative(f"{figure.system}: {figure.detail}", None, None, None, figure.time, figure.memory)


def _choices(part: Part, setting: Setting) -> list[tuple[str, int, int | None]]:
    """Layouts, group sizes and bucket sizes to look at.

    Groups of all ranks, the chosen size, and the largest that leave no rank idle; the chosen size with one bucket.
    """
    most = min(part.ranks - 1, len(part.atoms))
    smaller = [size for size in range(most, 0, -1) if part.ranks % size == 0]
    sizes = dict.fromkeys([part.ranks, part.group_size, *smaller[:OTHER_GROUPS]])
    rows = [(layout, size, setting.bucket_numel) for size in sizes for layout in ("padded", "compact")]
    rows.append(("padded", part.group_size, None))
    chosen = (part.layout, part.group_size, setting.bucket_numel) if setting.engine == "owned" else None
    return [row for row in dict.fromkeys(rows) if row != chosen]


def _row(what: str, part: Part) -> Alternative:
    memory = max(memory.peak for memory in part.memory)
    return Alternative(what, len(part.bucket_numels), part.padding, part.flops_imbalance, part.time, memory)
