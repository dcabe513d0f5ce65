"""A study as plain data: ``--json`` prints it, and the report and the picture are made from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lwopt_backend.config.hosts import UNPLANNED
from lwopt_backend.plan.buffers.layout import imbalance
from lwopt_backend.plan.cost import StepTime, max_min_squared, per_rank
from lwopt_backend.planner.part import Part
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Stage, Study

SCHEMA = 1


def document(study: Study, *, source: str, notes: Sequence[str] = (), assignments: bool = False) -> dict[str, Any]:
    """The study as JSON-able data.

    ``digest`` is the name of the plan; ``stages`` has one for each pipeline stage. The figures at the top are those of
    the slowest stage, over all its buffers of matrices: ``buckets`` (their number), ``buffer_numel``, ``padding_pct``,
    ``cost_imbalance`` (max over mean of l s^2 per rank), ``flops_imbalance`` (of the work), ``numel_imbalance``,
    ``path_over_longest_first`` (the cost until the last rank is done, over the busiest rank's if all matrices were
    dealt at once, longest first), ``group_size`` (of the dense buffer), ``seconds`` (modelled, parts added),
    ``seconds_overlapped`` (modelled, transfers behind work where they can be) and the buckets' times of the latter,
    ``timeline``. ``notes`` are sentences on the model. Memory is in bytes. Percentages have two decimal places and
    ratios four; ``buffer_numel`` and ``numel`` are exact.

    With ``assignments`` there is a list of every matrix, its owner (the rank within its buffer's group) and its bucket,
    None if it is not exchanged: in the order of exchange, buckets numbered through all of a part's plans.
    """
    stage, timeline = study.worst, study.worst.timeline
    numel = sum(part.numel for part in stage.parts)
    buffer_numel = sum(part.buffer_numel for part in stage.parts)
    body = {
        "schema": SCHEMA,
        "source": source,
        "engine": study.setting.engine,
        "options": _options(study.setting),
        "cluster": asdict(study.setting.machine),
        "routing": _routing(study),
        "deployment": asdict(study.deployment) | {"dp": study.deployment.dp, "expert_dp": study.deployment.expert_dp},
        "buckets": sum(len(part.bucket_numels) for part in stage.parts),
        "numel": numel,
        "buffer_numel": buffer_numel,
        "padding_pct": _percent(buffer_numel / numel - 1),
        "cost_imbalance": _ratio(_per_rank(stage, [_estimates(part) for part in stage.parts])),
        "flops_imbalance": _ratio(stage.loads()),
        "numel_imbalance": _ratio(_per_rank(stage, [part.owned_numels for part in stage.parts])),
        "path_over_longest_first": round(stage.parts[0].path_over_longest_first, 4),
        "group_size": stage.parts[0].group_size,
        "layout": stage.parts[0].layout,
        "seconds": stage.time.total,
        "seconds_parts": _seconds(stage.time),
        "seconds_overlapped": timeline.seconds,
        "timeline": _dicts(timeline.buckets),
        "peak_bytes": max(memory.peak for memory in stage.memory()),
        "stage": stage.index,
        "stages": [_stage_line(each) for each in study.stages],
        "parts": [_part(part) for part in stage.parts],
        "elementwise": [
            {"name": each.name, "numel": each.elementwise.numel, "collectives": _dicts(each.elementwise.collectives)}
            for each in stage.planned
        ],
        "load_per_rank": stage.loads(),
        "memory_per_rank": _dicts(stage.memory()),
        "notes": list(notes),
    }
    if assignments:
        body["assignments"] = [list(one) for part in stage.parts for one in part.assignments]
    return body | {"digest": study.digest}


def _routing(study: Study) -> list[dict[str, Any]]:
    routed: dict[tuple[str, str], list[int]] = {}
    for route in study.routes:
        routed.setdefault((route.kind, route.reason), []).append(math.prod(route.shape))
    return [
        {"kind": kind, "reason": reason, "parameters": len(numels), "numel": sum(numels)}
        for (kind, reason), numels in routed.items()
    ]


def _part(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "matrices": len(part.atoms),
        "ranks": part.ranks,
        "group_size": part.group_size,
        "instances": part.ranks // part.group_size,
        "layout": part.layout,
        "strategy": part.strategy,
        "buckets": len(part.bucket_numels),
        "bucket_numels": list(part.bucket_numels),
        "exchanged": sum(bucket >= 0 for bucket in part.buckets),
        "numel": part.numel,
        "buffer_numel": part.buffer_numel,
        "padding_pct": _percent(part.padding),
        "cost_imbalance": _ratio(_estimates(part)),
        "flops_imbalance": _ratio(part.loads),
        "numel_imbalance": _ratio(part.owned_numels),
        "path_over_longest_first": round(part.path_over_longest_first, 4),
        "seconds": part.time.total,
        "seconds_parts": _seconds(part.time),
        "collectives": _dicts(part.collectives),
        "loads": list(part.loads),
    }


def _options(setting: Setting) -> dict[str, Any]:
    """The engine's options, and everything else that a plan depends on."""
    dtypes = {key: str(getattr(setting, key)).removeprefix("torch.") for key in ("dtype", "grad_dtype")}
    rules = {"matrix": setting.rules.matrix["rule"], "elementwise": setting.rules.elementwise["rule"]}
    config = {key: value for key, value in asdict(setting.config).items() if key not in UNPLANNED}
    return config | dtypes | rules


def _stage_line(stage: Stage) -> dict[str, Any]:
    return {
        "stage": stage.index,
        "matrices": sum(len(part.atoms) for part in stage.parts),
        "padding_pct": {part.name: _percent(part.padding) for part in stage.parts},
        "group_size": {part.name: part.group_size for part in stage.parts},
        "flops_imbalance": _ratio(stage.loads()),
        "seconds": stage.time.total,
        "peak_bytes": max(memory.peak for memory in stage.memory()),
        "digest": stage.digest,
    }


def _dicts(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(each) for each in found]


def _percent(share: float) -> float:
    return round(100 * share, 2)


def _ratio(loads: Sequence[int]) -> float:
    """Largest over mean, to four decimal places."""
    return round(imbalance(loads), 4)


def _seconds(time: StepTime) -> dict[str, float]:
    return {"compute": time.compute, "wire": time.wire, "latency": time.latency}


def _estimates(part: Part) -> list[int]:
    return per_rank(part.owners, [max_min_squared(atom.shape) for atom in part.atoms], part.group_size)


def _per_rank(stage: Stage, amounts: Sequence[Sequence[int]]) -> list[int]:
    """Per rank of the stage, the sum of its shards' amounts over all buffers."""
    return [
        sum(per_shard[stage.place(part, rank)] for part, per_shard in zip(stage.parts, amounts))
        for rank in range(stage.ranks)
    ]
