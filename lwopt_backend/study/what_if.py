"""What else could be chosen, and what it would cost: other layouts, group and bucket sizes, and other systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lwopt_backend.plan.machine import StepTime
from lwopt_backend.study.engines import plan_share
from lwopt_backend.study.part import Part, Planned
from lwopt_backend.study.setting import Setting
from lwopt_backend.study.systems import compare

OTHER_GROUPS = 2  # group sizes besides all ranks and the chosen one
ONE_BUCKET_MB = 2.0**40


@dataclass(frozen=True, slots=True)
class Alternative:
    """One row: what would be different, and the same matrices' figures then. None where a figure does not apply."""

    what: str
    buckets: int | None
    padding: float | None
    flops_imbalance: float | None
    time: StepTime
    memory: int | None


Progress = Callable[[str], None]


def alternatives(planned: Planned, setting: Setting, progress: Progress = lambda what: None) -> Iterator[Alternative]:
    """Rows for the matrices of ``planned``: the chosen plan first, owned storage with other options, other systems.

    ``progress`` is told what is planned next. Raises ValueError if it has no matrix.
    """
    part = planned.part
    if part is None:
        raise ValueError(f"{planned.name}: there is no matrix to plan")
    yield _row(f"chosen: {part.layout}, groups of {part.group_size}", part)
    for what, options in _choices(part, setting):
        progress(what)
        other = plan_share(planned.name, planned.shared, part.ranks, setting.owned(**options), planned.base)
        assert other.part is not None
        yield _row(what, other.part)
    for figure in compare(part, setting)[1:]:
        yield Alternative(f"{figure.system}: {figure.detail}", None, None, None, figure.time, figure.memory)


def _choices(part: Part, setting: Setting) -> list[tuple[str, dict[str, Any]]]:
    """Layouts, group sizes and bucket sizes to look at, each with what it is.

    Groups of all ranks, the chosen size, and the largest that leave no rank idle; the chosen size with one bucket.
    """
    most = min(part.ranks - 1, len(part.atoms))
    smaller = [size for size in range(most, 0, -1) if part.ranks % size == 0]
    sizes = dict.fromkeys([part.ranks, part.group_size, *smaller[:OTHER_GROUPS]])
    rows = [(layout, size) for size in sizes for layout in ("padded", "compact")]
    chosen = (part.layout, part.group_size) if setting.engine == "owned" else None
    found: list[tuple[str, dict[str, Any]]] = [
        (f"{layout}, groups of {size}", {"layout": layout, "group_size": size})
        for layout, size in rows
        if (layout, size) != chosen
    ]
    one = {"layout": "padded", "group_size": part.group_size, "bucket_mb": ONE_BUCKET_MB}
    return [*found, (f"padded, groups of {part.group_size}, one bucket", one)]


def _row(what: str, part: Part) -> Alternative:
    memory = max(memory.peak for memory in part.memory)
    return Alternative(what, len(part.bucket_numels), part.padding, part.flops_imbalance, part.time, memory)
