"""The reports: each parameter's route and why, what each rank will do, and what had no gradient."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Column, Table

from lwopt_backend.engines.output import binary_units, standard_output
from lwopt_backend.engines.zero.plan import GroupPlan
from lwopt_backend.groups import Groups
from lwopt_backend.groups.param_groups import ShownRates, rates
from lwopt_backend.groups.registry import (
    MATRIX_RULES,
    arguments,
    cost_of,
    flops_of_auto,
    quantized_keys,
    rule_of,
    rules_with_owner_state,
)
from lwopt_backend.plan import MatrixPlan, StepTime, TrainedParam
from lwopt_backend.plan.cost import PIECE_SECONDS, Machine, Shape
from lwopt_backend.plan.mesh import MeshLayout
from lwopt_backend.routing.routing import Route, shares
from lwopt_backend.rules import Muon
from lwopt_backend.rules.newton_schulz import multiplies_bf16
from lwopt_backend.runtime.quantized import BLOCK

BORDER = 3  # of a column, in characters
MOST_RANKS = 16
LOGGER = logging.getLogger("lwopt_backend")
LOGGER.addHandler(logging.NullHandler())

About = Literal["plan", "gradients", "copies", "blocks", "stacks", "pieces", "peers", "newton_schulz"]


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence on a plan that is printed at the start, and what it is about. ``str`` is the sentence."""

    about: About
    text: str

    def __str__(self) -> str:
        return self.text


Described = Iterable[Sequence[Note | Table]]  # of each set of ranks, notes on its plan, then a table


def show(
    routes: Sequence[Route],
    groups: Groups,
    plans: Described,
    plan_digest: str,
    trained: Iterable[TrainedParam],
    device: torch.device,
) -> ShownRates:
    """Report the routing table, ``plans`` and the plan digest. ``groups`` are the param groups, as configured, of the
    ``trained`` parameters, whose matrices are updated on ``device``. Returns the rates that were printed."""
    with reporting() as console:
        show_routing(console, routes, groups)
        waits = False  # whether the device does, so that less work for it is no gain
        for each in chain.from_iterable(plans):
            waits |= isinstance(each, Note) and each.about == "pieces"
            print_whole(console, each if isinstance(each, Table) else str(each))
        for note in (*slow_products(groups), *on_newton_schulz(groups, trained, device, saving=not waits)):
            console.print(str(note))
        show_digest(console, plan_digest)
    return ShownRates(groups, say)


def say(sentence: str) -> None:
    """Report one sentence."""
    with reporting() as console:
        console.print(sentence)


@contextmanager
def reporting() -> Iterator[Console]:
    """A console on standard output. At the end, what was printed is also one record of the logger ``lwopt_backend``."""
    console = standard_output()
    console.record = True
    yield console
    LOGGER.info(console.export_text().rstrip())


TOLD_AFTER = (1, 100)  # steps
MOST_NAMES = 10


class MissingGradients:
    """Reports the trained parameters that no rank had a gradient for since the start, after 1 step and after 100.

    ``names`` are of those that rank number ``rank`` reports, by what the engine calls them.
    """

    def __init__(self, names: Mapping[Any, str], rank: int = 0) -> None:
        self._missing, self._trained = dict(names), len(names)
        self._whose = f"Rank {rank}: " if rank else ""
        self._steps = 0
        self._due = list(TOLD_AFTER)

    def is_due(self, steps: float) -> bool:
        """Whether there is a report after this number of steps."""
        return bool(self._due) and steps >= self._due[0]

    def stepped(self, had_one: Callable[[Any], bool], steps: int | None = None) -> None:
        """Note a step, or the number of ``steps`` since the start, in which ``had_one`` tells whether any rank had a
        gradient for a parameter. It is asked of those alone that had none before."""
        self._steps = self._steps + 1 if steps is None else steps
        self._missing = {key: name for key, name in self._missing.items() if not had_one(key)}
        if not self.is_due(self._steps):
            return
        self._due.pop(0)
        if self._missing:
            names = list(self._missing.values())
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            since = "the first step" if self._steps == 1 else f"{self._steps} steps"
            say(
                f"{self._whose}{len(names)} of {self._trained} trained parameters had no gradient on any rank in "
                f"{since}: {', '.join(names[:MOST_NAMES])}{more}"
            )
        if not self._due:
            self._missing = {}


def show_digest(console: Console, plan_digest: str) -> None:
    """Print the last line about a plan, in a run and from ``lwopt plan``."""
    console.print(f"Plan {plan_digest}: equal plans have equal digests, on every rank and machine.")


def print_whole(console: Console, shown: str | Table) -> None:
    """Print a sentence or a table of figures. A table that is too wide is printed in parts, each with the first column:
    rich would cut figures."""
    wide = console.options.update_width(sys.maxsize)
    if not isinstance(shown, Table) or console.measure(shown, options=wide).maximum <= console.width:
        console.print(shown)
        return
    cells = [list(column.cells) for column in shown.columns]
    widths = [
        max(map(len, [*str(column.header).split(), *map(str, of_column)]))
        for column, of_column in zip(shown.columns, cells)
    ]
    parts: list[list[int]] = []
    for number in range(1, len(widths)):
        if not parts or 1 + sum(widths[each] + BORDER for each in (*parts[-1], number)) > console.width:
            parts.append([0])
        parts[-1].append(number)
    for part in parts:
        table = Table(title=shown.title, caption=shown.caption)
        for number in part:
            column = shown.columns[number]
            table.add_column(column.header, justify=column.justify, width=widths[number])
        for row in zip(*(cells[number] for number in part)):
            table.add_row(*row)
        console.print(table)


def numbers(*headings: str) -> list[Column]:
    """Columns of numbers for a table."""
    return [Column(heading, justify="right") for heading in headings]


def show_routing(console: Console, routes: Sequence[Route], groups: Groups) -> None:
    """Print each parameter's rule, the reason, its rate and decay; and a note on owner state."""
    for sentence in routing_headline(routes):
        console.print(sentence)
    console.print(routing_table(routes))
    table = Table("rule", *numbers("parameters", "lr", "weight decay"))
    for name, count, lr, decay in rates(groups):
        table.add_row(name, str(count), lr, decay)
    console.print(table)
    changed = Counter(number for group in groups for number in group["overrides"] for _ in group["params"])
    for number, count in sorted(changed.items()):
        console.print(f"overrides[{number}]: {count} parameter(s)")
    rules = rules_with_owner_state(groups)
    if rules:
        console.print(
            f"Note: owner state of {' and '.join(rules)} is created in the first step; 'state' below does not count it."
        )
    if in_8_bits := sum(len(group["params"]) for group in groups if quantized_keys(group)):
        console.print(f"Momentum of {in_8_bits} parameter(s): 8 bits, and an fp32 scale for each {BLOCK} of a row.")


def routing_headline(routes: Sequence[Route]) -> list[str]:
    """How many parameters are matrices; and the share of the elements that each rule trains, by what they are."""
    trained = [r for r in routes if r.kind != "frozen"]
    by_rule: dict[str, list[str]] = {}
    for (rule, what), share in shares(routes).items():
        by_rule.setdefault(rule, []).append(f"{_percent(share)}{f' as {what}' if what else ' of the elements'}")
    counts = f"{sum(r.kind == 'matrix' for r in routes)} of {len(trained)} trained parameters are matrices"
    trains = "; ".join(f"{rule} trains {', '.join(some)}" for rule, some in by_rule.items())
    return [f"Routing: {counts}. {trains}."]


def slow_products(groups: Groups) -> list[Note]:
    """A note if this CPU iterates in bfloat16, and has no instructions for it."""
    on_cpu = [group for group in groups if any(param.device.type == "cpu" for param in group["params"])]
    rules = [MATRIX_RULES[rule_of(g)].build(**arguments(g)) for g in on_cpu if rule_of(g) in MATRIX_RULES]
    if multiplies_bf16() or not any(isinstance(r, Muon) and r.iterates_in == torch.bfloat16 for r in rules):
        return []
    said = "This CPU has no products in bfloat16, in which Newton-Schulz runs: 'ns_dtype': 'float32' is quicker here."
    return [Note("newton_schulz", said)]


SAVED = 0.95  # of the flops, from which on what is saved is told
BY_ROUNDING = "it differs from the standard iteration by rounding"


def on_newton_schulz(
    groups: Groups, trained: Iterable[TrainedParam], device: torch.device, *, saving: bool = True
) -> list[Note]:
    """Notes on how ``ns_method`` "auto" computes each shape on ``device``; or, if ``saving``, what it would save of
    the matrix rules' flops."""
    now = then = 0
    ways: dict[tuple[bool, str | None], Counter[Shape]] = {}
    rules = {n: MATRIX_RULES[rule_of(group)].build(**arguments(group)) for n, group in _with_matrices(groups)}
    for (number, shape), count in Counter((p.group, block.shape) for p in trained for block in p.blocks).items():
        rule = rules[number]
        if isinstance(rule, Muon) and rule.ns_method == "auto":
            ways.setdefault(rule.way(shape, device), Counter())[shape] += count
        flops = cost_of(shape, groups[number])
        cheaper = flops_of_auto(shape, groups[number])
        now, then = now + count * flops, then + count * (flops if cheaper is None else cheaper)
    found = []
    for (on_gram, package), shapes in ways.items():
        those = [f"{rows} x {columns} ({count})" for (rows, columns), count in shapes.most_common(MOST_NAMES)]
        more = f" and {len(shapes) - MOST_NAMES} more shapes" if len(shapes) > MOST_NAMES else ""
        how = f"{'Gram' if on_gram else 'standard'} iteration{f' with {package}' if package else ''}"
        found.append(f"Newton-Schulz by 'auto': {how} for {', '.join(those)}{more}.")
    if saving and then < SAVED * now:
        found.append(f"Newton-Schulz: {then / now:.2f} of the flops with 'ns_method': 'auto'; {BY_ROUNDING}.")
    return [Note("newton_schulz", said) for said in found]


def _with_matrices(groups: Groups) -> Iterator[tuple[int, Mapping[str, Any]]]:
    return ((number, group) for number, group in enumerate(groups) if rule_of(group) in MATRIX_RULES)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 or share > 0.9 else f"{share:.0%}"


def routing_table(routes: Sequence[Route]) -> Table:
    """One row per parameter; parameters that differ only in their layer's number share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for r in routes:
        pattern = re.sub(r"\.\d+(?=\.)", ".*", r.name)
        shape = " x ".join(map(str, r.shape)) or "scalar"
        rows.setdefault((pattern, shape, f"{r.kind}: {r.rule}" if r.rule else r.kind, r.reason), []).append(r.name)
    folded = [Column(heading, overflow="fold") for heading in ("parameter", "shape", "rule", "why")]
    table = Table(*folded, *numbers("count"))
    for (pattern, *cells), names in rows.items():
        table.add_row(names[0] if len(names) == 1 else pattern, *cells, str(len(names)))
    return table


def described(plans: Mapping[str, Sequence[GroupPlan]]) -> Described:
    """ZeRO's plans. The keys describe their ranks, or are empty."""
    for whose, planned in plans.items():
        yield [*([Note("plan", whose)] if whose else []), *choices(planned), plan_table(planned)]


def choices(groups: Sequence[GroupPlan]) -> list[Note]:
    """Notes on each group of matrices: the plan, the modelled times that chose the policy, and blocks."""

    def spell(policy: str, time: StepTime) -> str:
        work, wire, latency, total = (1e3 * s for s in (time.compute, time.wire, time.latency, time.total))
        return f"{policy} {total:.3g} ms = {work:.3g} work + {wire:.3g} wire + {latency:.3g} latency"

    found: list[Note] = []
    for rule, plan in ((group.rule, group.matrices) for group in groups if group.matrices is not None):
        said = (
            f"Plan: {len(plan.atoms)} matrices by {rule}, policy {plan.ownership.policy!r}; "
            f"{sum(map(len, plan.buckets))} of them travel, in {len(plan.buckets)} bucket(s); busiest rank over mean "
            f"{plan.ownership.imbalance:.3f}. "
            f"Modelled step: {'; '.join(spell(policy, time) for policy, time in plan.modelled)}."
        )
        found += [Note("plan", said), *on_blocks(plan)]
    return found + on_peers(group.matrices for group in groups if group.matrices is not None)


def on_blocks(plan: MatrixPlan) -> list[Note]:
    """A note on the traffic of steps that update each rank's blocks, and on matrices without blocks."""
    if plan.block_period == 1:
        return []
    always = sum(map(len, plan.between.buckets))
    rest = f"; {always} cut inside a row are updated whole in every step" if always else ""
    said = (
        f"Blocks: in {plan.block_period - 1} of {plan.block_period} steps each rank updates its own block of "
        f"{len(plan.in_blocks)} of {len(plan.atoms)} matrices, without traffic{rest}. Such a step sends "
        f"{binary_units(max(plan.between.wire_bytes()))} from the busiest rank, a step of whole matrices "
        f"{binary_units(max(plan.wire_bytes()))}. A different number of ranks has other blocks, and trains differently."
    )
    return [Note("blocks", said)]


def on_copies(plan: MatrixPlan) -> list[Note]:
    """A note on whether the copies of a mesh (HSDP) share the work, and the modelled times that were compared."""
    if not plan.is_copied:
        return []
    shared = "the copies of each matrix share the work, and send each other the updates"
    alone = "each copy computes all updates by itself; devices of two types may drift apart"
    found = f"HSDP: {shared if plan.instances is None else alone}."
    if plan.compared is not None:
        both = zip(("shared", "by itself"), plan.compared)
        found += f" Modelled step: {', '.join(f'{what} {1e3 * seconds:.3g} ms' for what, seconds in both)}."
    return [Note("copies", found)]


def on_stacks(plan: MatrixPlan) -> list[Note]:
    """A note on stacked matrices that are cut between, not within, and are fewer than the ranks that share them."""
    layout, first = plan.layout, dict[tuple[Any, ...], int]()  # without blocks, of which each matrix has its own
    for atom, sharding in enumerate(layout.shardings if isinstance(layout, MeshLayout) else ()):
        if sharding.block is not None and len(sharding.shape) == 3:
            first.setdefault((sharding.shape, sharding.mesh_shape, sharding.dims), atom)
    for (shape, mesh_shape, dims), atom in first.items():
        parts = math.prod(size for size, dim in zip(mesh_shape, dims) if dim == 0)
        if parts > shape[0]:
            said = (
                f"Stacks: {shape[0]} matrices, such as {plan.atoms[atom].name!r}, are cut by Shard(0) over "
                f"{parts} ranks, so {1 - shape[0] / parts:.0%} of these store none, and the others all of "
                "them. Cut within matrices: fully_shard(..., shard_placement_fn=lambda param: Shard(1) if param.ndim "
                "== 3 else None)."
            )
            return [Note("stacks", said)]
    return []


MANY_PIECES = 1000  # fewer cost the host some milliseconds


def on_pieces(plan: MatrixPlan, machine: Machine) -> list[Note]:
    """A note on matrices of which a rank stores so many pieces that a step's host work exceeds its device's."""
    layout = plan.layout
    first: dict[Hashable, int] = {}
    kinds = Counter(first.setdefault(layout.kind(atom), atom) for atom in range(len(plan.atoms)))
    pieces = sum(count * len(layout.fragments(atom)) for atom, count in kinds.items()) // max(1, layout.world_size)
    host, device = pieces * PIECE_SECONDS, max(plan.ownership.loads) / machine.flops_per_second
    if pieces < MANY_PIECES or host < device or not machine.launch_seconds:
        return []
    said = (
        f"Separate: each rank stores pieces of {pieces} matrices, which cost its host some {1e3 * host:.0f} ms a step; "
        f"the busiest device works for {1e3 * device:.3g} ms. Stack the experts of a layer in one parameter, or spread "
        "them by expert parallelism: a rank then stores pieces of fewer."
    )
    return [Note("pieces", said)]


MANY_PEERS = 256  # from some hundreds on, users of all-to-all saw transports run out of queue pairs


def on_peers(plans: Iterable[MatrixPlan]) -> list[Note]:
    """A note on the ranks that one rank exchanges pieces of matrices with, if there are any."""
    most = max((plan.peers() for plan in plans), default=0)
    if not most:
        return []
    bound = (
        " Each pair takes connections (queue pairs), of which transports have a limited number: HSDP on FSDP2, "
        "or group_size on plain PyTorch, bounds them."
    )
    said = f"Peers: a rank exchanges pieces with at most {most} other rank(s).{bound * (most > MANY_PEERS)}"
    return [Note("peers", said)]


def plan_table(groups: Sequence[GroupPlan]) -> Table:
    """One row per rank: its matrices, their work, its state, and its traffic."""
    plans = [group.matrices for group in groups if group.matrices is not None]
    layouts = [(group.layout, group.place) for group in groups if group.matrices is not None]

    def total(figures: Iterable[Sequence[int]]) -> list[int]:
        return [*map(sum, zip(*figures))] or [0] * len(groups[0].state_bytes)

    owned, moved, sent = (total(map(of, plans)) for of in _FIGURES)
    state = total(group.state_bytes for group in groups)
    columns = {
        "matrices": lambda rank: str(owned[rank]),
        "state": lambda rank: binary_units(state[rank]),
        "elements that move": lambda rank: (
            f"{moved[rank] / max(1, sum(layout.stored_numel(place(rank)) for layout, place in layouts)):.2%}"
        ),
        "sent a step": lambda rank: binary_units(sent[rank]),
    }
    return rank_table(total(plan.ownership.loads for plan in plans), [group.rule for group in groups], columns)


_FIGURES = (MatrixPlan.owned_counts, MatrixPlan.moved_numel, MatrixPlan.wire_bytes)


def rank_table(
    loads: Sequence[int],
    rules: Iterable[str],
    columns: Mapping[str, Callable[[int], str]],
    ranks: Sequence[int] = (),
) -> Table:
    """One row per rank: its work by the matrix rules among ``rules``, the share of all work, and the ``columns``.

    ``ranks`` are the ranks' numbers, if not 0, 1, 2, ... Beyond 16 ranks, only the first few, the busiest and the least
    busy are shown.
    """
    work = " / ".join(sorted({MATRIX_RULES[rule].work for rule in rules if rule in MATRIX_RULES})) or "matrix"
    table = Table(*numbers("rank", f"{work} GFLOP", "of all", *columns), caption=which_ranks(loads))
    for place in shown_ranks(loads):
        number = str(ranks[place] if ranks else place)
        shares = f"{loads[place] / 1e9:.3g}", f"{loads[place] / max(1, sum(loads)):.1%}"
        table.add_row(number, *shares, *(cell(place) for cell in columns.values()))
    return table


def shown_ranks(loads: Sequence[int]) -> list[int]:
    """All ranks; of many, the first few, the busiest and the least busy."""
    ranks = range(len(loads))
    if len(loads) <= MOST_RANKS:
        return list(ranks)
    extremes = {max(ranks, key=loads.__getitem__), min(ranks, key=loads.__getitem__)}
    return sorted(extremes | set(ranks[: MOST_RANKS - 2]))


def which_ranks(loads: Sequence[int]) -> str | None:
    """A caption, if ``shown_ranks`` are not all."""
    shown = len(shown_ranks(loads))
    return f"{shown} of {len(loads)} ranks: the first, the busiest, the least busy" if shown < len(loads) else None
