"""The output of ``lwopt plan``."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from lwopt_backend.engines.output import WIDTH_WITHOUT_TERMINAL, binary_units
from lwopt_backend.engines.report import numbers, shown_ranks, which_ranks
from lwopt_backend.groups.registry import MATRIX_RULES
from lwopt_backend.plan.buffers.layout import imbalance
from lwopt_backend.planner.part import Part
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.study import Stage, Study

NONE = "–"
UNEVEN = 1.25  # busiest rank over mean that is explained


def recording() -> Console:
    """A console that records its output, for a page."""
    return Console(record=True, file=io.StringIO(), width=WIDTH_WITHOUT_TERMINAL, highlight=False, markup=False)


def headline(study: Study) -> list[str]:
    """The deployment, and a sentence on each buffer's plan."""
    d, stage = study.deployment, study.worst
    cut = ", ".join(f"{name} {size}" for name, size in (("tp", d.tp), ("pp", d.pp), ("ep", d.ep)) if size > 1)
    setting = study.setting
    sentences = [
        f"Deployment: {d.world_size} ranks{f' ({cut})' if cut else ''}, {d.dp} data-parallel; "
        f"engine {setting.engine}; "
        f"work in flops of {MATRIX_RULES[setting.rules.matrix['rule']].work}; cluster {setting.machine.name}"
    ]
    if len(study.stages) > 1:
        sentences.append(f"Stage {stage.index} is shown, the slowest of {len(study.stages)}.")
    sentences += [sentence for part in stage.parts for sentence in (_choice(part), *map(str, part.notes))]
    sentences += [sentence for part in stage.parts if (sentence := _uneven(part, setting))]
    time = stage.time
    work, wire, latency = (f"{1e3 * seconds:.3g}" for seconds in (time.compute, time.wire, time.latency))
    spelled = f"{1e3 * time.total:.4g} ms = {work} work + {wire} wire + {latency} latency"
    own = "" if setting.engine == "plain" else f", without {setting.engine}'s own collectives"
    step = 1e3 * stage.timeline.seconds
    sentences.append(f"Modelled step: {step:.4g} ms, with transfers behind work where possible{own}.")
    sentences.append(f"Everything one after another: {spelled}.")
    fullest, limit = max(stage.memory(), key=lambda m: max(m.peak, m.backward)), setting.machine.memory_bytes
    peak = max(fullest.peak, fullest.backward)
    if fullest.transient > max(fullest.workspace, fullest.long_lived // 4):
        sentences.append(
            f"A backward pass needs {binary_units(fullest.transient)} more than it keeps, for gradients on their way "
            "in buckets: a padded bucket has room for the largest matrix on every rank. --layout compact, with a "
            "smaller --bucket-mb, needs less."
        )
    if 0 < limit < peak:
        sentences.append(
            f"Does not fit: the fullest rank holds {binary_units(peak)} of parameters, gradients and state, "
            f"{setting.machine.name} has {binary_units(int(limit))}."
        )
    return sentences


def _choice(part: Part) -> str:
    instances = part.ranks // part.group_size
    groups = f"owned by all {part.ranks} ranks"
    if instances > 1:
        groups = f"owned by groups of {part.group_size}, in {instances} instances of {part.ranks} ranks"
    buckets = f"{len(part.bucket_numels)} bucket(s)" if part.bucket_numels else "nothing travels"
    return (
        f"Plan of the {part.name} matrices: {len(part.atoms)}, {groups}; {part.layout} layout, {buckets}, "
        f"padding {part.padding:.2%}, busiest rank over mean {part.flops_imbalance:.3f} ({part.strategy}); "
        f"the last rank finishes in {part.path_over_longest_first:.3f} of the longest-first bound."
    )


def _uneven(part: Part, setting: Setting) -> str | None:
    """A sentence if one matrix is most of the busiest rank's work, so that the others wait for it."""
    largest = max(part.atoms, key=lambda atom: atom.cost)
    if part.flops_imbalance < UNEVEN or 2 * largest.cost <= max(part.loads):
        return None
    alone = setting.seconds(largest.cost)
    return (
        f"The {part.name} work is uneven: {len(part.atoms)} matrices for {part.group_size} ranks, and one of them, "
        f"{largest.name!r}, takes {1e3 * alone:.3g} ms alone. No placement changes that."
    )


def rank_table(stage: Stage) -> Table:
    """Work and memory of the ranks of a stage; of many ranks, the first few, the busiest and the least busy."""
    loads, memory = stage.loads(), stage.memory()
    kinds = ["parameters", "gradients", "masters", "state", "padding", "workspace", "exchange", "peak"]
    kinds += ["transient", "backward"]
    if stage.setting.engine == "plain":
        kinds.remove("exchange")
    else:
        kinds = kinds[:-2]
    table = Table(*numbers("rank", "work ms", *kinds), title="Per rank", caption=which_ranks(loads))
    for rank in shown_ranks(loads):
        sizes = [binary_units(getattr(memory[rank], kind)) for kind in kinds]
        table.add_row(str(rank), f"{1e3 * stage.setting.seconds(loads[rank]):.3g}", *sizes)
    return table


def collective_table(stage: Stage) -> Table:
    """The busiest rank's traffic in a step."""
    table = Table("of", "collective", *numbers("calls", "bytes a call", "bytes a step"), title="Per step")
    rows = [(part.name, one) for part in stage.parts for one in part.collectives]
    rows += [("element-wise", one) for each in stage.planned for one in each.elementwise.collectives]
    for whose, one in rows:
        each = binary_units(one.nbytes // one.count) if one.count else NONE
        table.add_row(whose, one.what, str(one.count), each, binary_units(one.nbytes))
    return table


def stage_table(study: Study) -> Table:
    """One row per pipeline stage."""
    headings = ("matrices", "group", "padding", "busiest / mean", "step ms", "peak")
    table = Table(*numbers("stage"), "buffer", *numbers(*headings), title="Stages")
    for stage in study.stages:
        for index, part in enumerate(stage.parts):
            step = f"{1e3 * stage.time.total:.4g}" if index == 0 else ""
            peak = binary_units(max(memory.peak for memory in stage.memory())) if index == 0 else ""
            cells = (str(len(part.atoms)), str(part.group_size), f"{part.padding:.2%}", f"{imbalance(part.loads):.3f}")
            table.add_row(str(stage.index) if index == 0 else "", part.name, *cells, step, peak)
    return table
