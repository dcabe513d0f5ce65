"""Costs: flops of a rule, seconds on a machine, and measured tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

# The cost of a rule's work on one matrix. A multiply-add is two flops; s is the shorter side, l the longer.
#
# A cost is an integer, so that sums and comparisons are the same on every machine.

Shape = tuple[int, int]

# An H100's dense bf16 rate over its memory bandwidth (989e12 / 3.35e12): flops that pass while one byte is moved.
FLOPS_PER_BYTE = 295
FLOPS_PER_ESTIMATE = 24  # Newton-Schulz flops per l s^2: 30 for a square matrix, 20 for a very long one
GRAM_ASPECT = 1.5  # at this aspect, both forms cost the same, for any number of steps
SOAP_FREQUENCY = 10  # steps between two updates of the eigenbases, SOAP's default
SHAMPOO_FREQUENCY = 100  # steps between two inverse roots, Distributed Shampoo's advice for large models
ADAM_FLOPS = 12  # per element of Adam's step; the only cost if both sides are too long
SECOND_MOMENT_FLOPS = 9  # per element: square, average (3), root and sum, division, norm (2), product
LARGEST_PRECONDITIONER = 10_000  # a longer side keeps the identity, SOAP's and Distributed Shampoo's usual limit


def newton_schulz_flops(shape: Shape, steps: int = 5) -> int:
    """Flops of ``steps`` quintic Newton-Schulz iterations on a (rows, columns) matrix: ``steps * (4 s^2 l + 2 s^3)``.

    One iteration is X X^T (2 s^2 l), A A (2 s^3) and B X (2 s^2 l). Element-wise work is left out, because it is
    smaller by a factor s.
    """
    short, long = sorted(shape)
    return steps * (4 * short * short * long + 2 * short**3)


def batched_flops(shape: Shape, steps: int = 5) -> int:
    """Newton-Schulz of a matrix within a stack of equal ones: its flops, and its memory traffic in flops.

    A stack pays no kernel launches per matrix; a small matrix still pays its traffic. An iteration in bf16 reads X
    three times and writes it once, and reads or writes an s x s matrix six times.
    """
    short, long = sorted(shape)
    traffic = 2 * steps * (4 * short * long + 6 * short * short)
    return newton_schulz_flops(shape, steps) + FLOPS_PER_BYTE * traffic


def gram_flops(
    shape: Shape,
    steps: int = 5,
    aspect: float | None = GRAM_ASPECT,
    segments: int | None = None,
    symmetric: bool = False,
) -> int:
    """Newton-Schulz on the Gram matrix if the longer side is at least ``aspect`` times the shorter, else plain.

    Every segment of steps forms X X^T and applies the product of its polynomials once (4 s^2 l each). A step in between
    is four s x s products (8 s^3); a segment's first step saves one of them and its last step two (6 s^3 a segment).
    The default segments are those of Jordan's coefficients: 3 steps, then 2 each. With ``aspect`` None, all are plain.
    With ``symmetric``, products whose result is symmetric, all but the last of a step or segment, cost half.
    """
    short, long = sorted(shape)
    saved = 2 if symmetric else 1
    if aspect is None or long < aspect * short:
        return steps * (2 + 2 // saved) * short * short * long + steps * 2 // saved * short**3
    segments = 1 + max(0, steps - 2) // 2 if segments is None else segments
    return segments * (2 + 2 // saved) * short * short * long + (8 * steps - 6 * segments) // saved * short**3


def max_min_squared(shape: Shape) -> int:
    """``l s^2``: only the leading term, Megatron-Core's planner's estimate of a matrix's work."""
    short, long = sorted(shape)
    return long * short * short


def soap_flops(shape: Shape, frequency: int = SOAP_FREQUENCY, largest: int = LARGEST_PRECONDITIONER) -> int:
    """One SOAP step (Vyas et al. 2024, algorithm 3): both statistics, two projections and the way back.

    A preconditioned side of size k costs 2 m n k for its statistic and for either direction of the projection, and
    10/3 k^3 for one power iteration with QR every ``frequency`` steps. Sides over ``largest`` keep the identity.
    """
    rows, columns = shape
    sides = [side for side in shape if side <= largest]
    adam = ADAM_FLOPS * rows * columns
    return adam + sum(6 * rows * columns * side + 10 * side**3 // (3 * frequency) for side in sides)


def shampoo_flops(shape: Shape, frequency: int = SHAMPOO_FREQUENCY, largest: int = LARGEST_PRECONDITIONER) -> int:
    """One Shampoo step (Gupta et al. 2018): both statistics, both products, and the inverse roots' share.

    An inverse root by a symmetric eigendecomposition is 9 k^3 (Golub and Van Loan, 8.3) every ``frequency`` steps.
    """
    rows, columns = shape
    sides = [side for side in shape if side <= largest]
    adam = ADAM_FLOPS * rows * columns  # the grafted step
    return adam + sum(4 * rows * columns * side + 9 * side**3 // frequency for side in sides)


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost that planning balances: ``of(shape)`` in ``unit``: "flops", "ns", or "l s^2" (24 flops each)."""

    name: str
    unit: str
    of: Callable[[Shape], int]
    meaning: str

    def seconds(self, cost: int | float, flops_per_second: float) -> float:
        """Seconds that ``cost`` takes on a device that reaches ``flops_per_second``."""
        if self.unit == "ns":
            return cost / 1e9
        return cost * (FLOPS_PER_ESTIMATE if self.unit == "l s^2" else 1) / flops_per_second


COSTS: Mapping[str, CostModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            CostModel("newton_schulz", "flops", newton_schulz_flops, "5 (4 s^2 l + 2 s^3), exact"),
            CostModel("batched", "flops", batched_flops, "newton_schulz and its memory traffic, launches shared"),
            CostModel("gram", "flops", gram_flops, "Newton-Schulz on the Gram matrix from aspect 1.5 on"),
            CostModel("max_min_squared", "l s^2", max_min_squared, "l s^2, Megatron-Core's estimate"),
            CostModel("soap", "flops", soap_flops, "statistics, projections, eigenbases every 10 steps"),
            CostModel("shampoo", "flops", shampoo_flops, "statistics, products, inverse roots every 100 steps"),
        )
    }
)


def per_rank(owners: Iterable[int], amounts: Iterable[int], ranks: int) -> list[int]:
    """Per rank, the sum of ``amounts`` over what it owns."""
    sums = [0] * ranks
    for owner, amount in zip(owners, amounts):
        sums[owner] += amount
    return sums


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of one rank: matrix flops per second, bytes per second on the wire, seconds per collective.

    ``bytes_per_second`` is a rank's share of the network; between the ``node_size`` ranks of one node it is
    ``node_bytes_per_second``. ``memory_bytes`` is a rank's memory, 0 if unknown.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float
    node_size: int = 1
    node_bytes_per_second: float = 0.0
    memory_bytes: float = 0.0

    def link(self, ranks: int, stride: int = 1, of: int | None = None) -> float:
        """Bytes per second that each of ``ranks`` ranks, ``stride`` apart, can send to the others at once.

        Groups follow one another from rank 0, ``of`` ranks in all (one group by default). All of them are within nodes
        if one node has all ranks, or if a group's extent divides a node.
        """
        extent = ranks * stride
        inside = (of or extent) <= self.node_size or self.node_size % extent == 0
        return self.node_bytes_per_second if inside and self.node_bytes_per_second else self.bytes_per_second


# Round figures, good enough to rank two plans and the same on every rank; they are not measured at run time, because
# ranks that measured differently would choose differently. cuda: an H100's bf16 matmul rate as reached by
# Newton-Schulz, and one 200 Gb/s network card per GPU. cpu: one core's bf16 rate and gloo on loopback.
MACHINES = {"cuda": Machine("cuda", 4e14, 25e9, 3e-5), "cpu": Machine("cpu", 5e10, 1e9, 3e-4)}


def machine_of(device_type: str) -> Machine:
    """The machine that an engine plans for, by the type of its parameters' device: ``"cpu"``, or any accelerator."""
    return MACHINES.get(device_type, MACHINES["cuda"])


# Clusters for planning ahead. Flops: 40 % of the dense bf16 peak, what batched Newton-Schulz reaches on large matrices.
# Wires: 80 % of a rank's network card (400 Gb/s NDR, 200 Gb/s HDR) and of its NVLink or Infinity Fabric, one direction.
CLUSTERS = {
    machine.name: machine
    for machine in (
        Machine("h100-8x-ib", 4.0e14, 40e9, 2e-5, 8, 360e9, 80e9),
        Machine("h200-8x-ib", 4.0e14, 40e9, 2e-5, 8, 360e9, 141e9),
        Machine("b200-8x-ib", 9.0e14, 40e9, 2e-5, 8, 720e9, 180e9),
        Machine("gb200-72x-ib", 1.0e15, 40e9, 2e-5, 72, 720e9, 186e9),
        Machine("a100-8x-ib", 1.25e14, 20e9, 2e-5, 8, 240e9, 80e9),
        Machine("mi300x-8x-roce", 5.2e14, 40e9, 3e-5, 8, 358e9, 192e9),
        Machine("h100-8x-ethernet", 4.0e14, 10e9, 5e-5, 8, 360e9, 80e9),
    )
}


@dataclass(frozen=True, slots=True)
class StepTime:
    """Modelled seconds of one optimizer step's matrix part on the busiest rank.

    The parts are added, not overlapped: an upper bound that does not depend on how well a host hides transport.
    """

    compute: float
    wire: float
    latency: float

    @property
    def total(self) -> float:
        return self.compute + self.wire + self.latency

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(self.compute + other.compute, self.wire + other.wire, self.latency + other.latency)


def gather_seconds(
    machine: Machine, nbytes: float, ranks: int, *, stride: int = 1, of: int | None = None
) -> tuple[float, float]:
    """(wire, latency) of an all-gather or reduce-scatter of ``nbytes`` in all; ranks as in ``Machine.link``.

    A rank sends the share (ranks - 1) / ranks of them, in ceil(log2(ranks)) rounds of latency.
    """
    if ranks == 1 or not nbytes:
        return 0.0, 0.0
    wire = nbytes * (ranks - 1) / ranks / machine.link(ranks, stride, of)
    return wire, machine.latency_seconds * math.ceil(math.log2(ranks))


def all_reduce_seconds(machine: Machine, nbytes: float, ranks: int, *, stride: int = 1) -> tuple[float, float]:
    """(wire, latency) of an all-reduce: a reduce-scatter and an all-gather."""
    wire, latency = gather_seconds(machine, nbytes, ranks, stride=stride)
    return 2 * wire, 2 * latency


# Measured costs: the seconds of Newton-Schulz on one device, as a cost model for planning.
#
# Ranks that plan with a table must read the same one: different tables make different plans, which raise an error.

SCHEMA = 1
RULE = "newton_schulz"  # whose flops scale unmeasured shapes
TABLE_KEYS: Mapping[str, type] = {
    "schema": int,
    "device": str,
    "dtype": str,
    "rule": str,
    "steps": int,
    "torch_version": str,
    "entries": list,
}
ENTRY_KEYS: Mapping[str, type] = {"rows": int, "columns": int, "batch": int, "seconds": float}


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measurements and their conditions. ``seconds`` has (rows, columns), the stack's size, median seconds per matrix.

    Raises ValueError, naming the entry, for a table that cannot have been measured.
    """

    device: str
    dtype: str  # of the iteration, e.g. "bfloat16"
    rule: str
    steps: int
    torch_version: str
    seconds: tuple[tuple[Shape, int, float], ...]

    def __post_init__(self) -> None:
        if self.rule != RULE:
            raise ValueError(f"rule: expected {RULE!r}, found {self.rule!r}")
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, found {self.steps}")
        if not self.seconds:
            raise ValueError("entries: expected at least one measurement, found none")
        seen: set[tuple[Shape, int]] = set()
        for index, (shape, batch, seconds) in enumerate(self.seconds):
            if problem := _problem(shape, batch, seconds, seen):
                raise ValueError(f"entries[{index}] ({shape[0]} x {shape[1]}, batch {batch}): {problem}")
            seen.add((_sides(shape), batch))

    def to_json(self) -> str:
        entries = [dict(zip(ENTRY_KEYS, (*shape, batch, float(seconds)))) for shape, batch, seconds in self.seconds]
        head = (SCHEMA, self.device, self.dtype, self.rule, self.steps, self.torch_version)
        return json.dumps(dict(zip(TABLE_KEYS, (*head, entries))), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """The table that ``to_json`` wrote. Raises ValueError that names what is wrong."""
        found = json.loads(text)
        schema = found.get("schema", SCHEMA) if isinstance(found, dict) else SCHEMA
        if schema != SCHEMA:  # before the keys, which may differ in another schema
            raise ValueError(f"schema: expected {SCHEMA}, found {schema!r}; make a new table with `lwopt calibrate`")
        _, device, dtype, rule, steps, torch_version, entries = _values(found, TABLE_KEYS, "table")
        read = [_values(entry, ENTRY_KEYS, f"entries[{index}]") for index, entry in enumerate(entries)]
        measured = tuple(((rows, columns), batch, seconds) for rows, columns, batch, seconds in read)
        return cls(device, dtype, rule, steps, torch_version, measured)

    def unmeasured(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Those of ``shapes``, in order and with sorted sides, whose cost is not measured but scaled from another's."""
        known = {_sides(shape) for shape, _, _ in self.seconds}
        return [shape for shape in dict.fromkeys(map(_sides, shapes)) if shape not in known]

    def model(self, stacked: bool = True) -> CostModel:
        """Nanoseconds per matrix, at least 1: as measured, else scaled by flops from the nearest measured shape.

        With ``stacked`` a shape's largest stack counts, as on an accelerator; without, its smallest, mostly one
        matrix alone, as on a CPU.
        """
        measured: dict[Shape, int] = {}
        for shape, _, seconds in sorted(self.seconds, key=lambda entry: entry[1], reverse=not stacked):
            measured[_sides(shape)] = max(1, round(seconds * 1e9))
        how = "in stacks" if stacked else "one by one"
        meaning = f"measured on {self.device} in {self.dtype}, {how}"
        return CostModel("table", "ns", partial(_nanoseconds, measured), meaning)


def read_cost_table(path: str | Path) -> CostTable:
    """Read a table. Raises FileNotFoundError, or ValueError that names the file and what is wrong in it."""
    path = Path(path)
    try:
        return CostTable.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no cost table; `lwopt calibrate` makes one") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid cost table: {error}") from error


def _nanoseconds(measured: Mapping[Shape, int], shape: Shape) -> int:
    sides = _sides((max(1, shape[0]), max(1, shape[1])))  # an empty matrix has the smallest cost
    if sides in measured:
        return measured[sides]

    def distance(known: Shape) -> Fraction:
        """exp(|log s - log s'| + |log l - log l'|), exact: rounded logarithms could break ties otherwise elsewhere."""
        short, long = (Fraction(max(pair), min(pair)) for pair in zip(sides, known))
        return short * long

    nearest = min(measured, key=lambda known: (distance(known), known))
    return max(1, measured[nearest] * newton_schulz_flops(sides) // newton_schulz_flops(nearest))


def _sides(shape: Shape) -> Shape:
    return min(shape), max(shape)


def _problem(shape: Shape, batch: int, seconds: float, seen: Collection[tuple[Shape, int]]) -> str | None:
    if min(*shape, batch) < 1:
        return "rows, columns and batch must be at least 1"
    if not (math.isfinite(seconds) and seconds > 0):
        return f"seconds must be positive and finite, found {seconds}"
    if (_sides(shape), batch) in seen:
        return "measured twice; (rows, columns) and (columns, rows) are one shape"
    return None


def _values(found: Any, keys: Mapping[str, type], where: str) -> list[Any]:
    """The values of ``keys``, in order. Raises ValueError for missing and unknown keys and for other types."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected an object, found {found!r:.60}")
    if unknown := sorted(set(found) - set(keys)):
        raise ValueError(f"{where}: unknown key(s) {', '.join(unknown)}; known: {', '.join(keys)}")
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"{where}: missing key(s) {', '.join(missing)}")
    for key, kind in keys.items():
        if type(found[key]) is not kind:  # exactly: True is no integer here
            raise ValueError(f"{where}: {key} must be of type {kind.__name__}, found {found[key]!r:.60}")
    return [found[key] for key in keys]


# The memory of a rank.


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank. ``parameters`` to ``padding`` are kept between a backward pass and its step.

    - ``gradients`` are gone after the step unless all ranks keep them; ``padding`` is that of parameters and gradients.
    - ``workspace``: what a step's largest batch of matrices needs in addition, in a plan; ``exchange``: what the
      buffers need at most in which a host's matrices travel.
    - ``transient``: what backward passes need in addition on owned storage, for gradients on their way; in a run, what
      they have needed. A flag per parameter is not counted.
    - ``sent``: what a step with one backward pass sends.
    """

    parameters: int = 0
    gradients: int = 0
    masters: int = 0
    state: int = 0
    padding: int = 0
    workspace: int = 0
    exchange: int = 0
    transient: int = 0
    sent: int = 0

    @property
    def long_lived(self) -> int:
        return self.parameters + self.gradients + self.masters + self.state + self.padding

    @property
    def peak(self) -> int:
        """The planned peak of a step."""
        return self.long_lived + self.workspace + self.exchange

    @property
    def backward(self) -> int:
        """The planned peak of the backward pass before it, without activations."""
        return self.long_lived + self.transient

    def __add__(self, other: RankMemory) -> RankMemory:
        """The sum of two buffers on one rank; the step uses one workspace and one exchange after the other."""
        return RankMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.masters + other.masters,
            self.state + other.state,
            self.padding + other.padding,
            max(self.workspace, other.workspace),
            max(self.exchange, other.exchange),
            self.transient + other.transient,
            self.sent + other.sent,
        )
