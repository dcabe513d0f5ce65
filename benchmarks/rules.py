"""Newton-Schulz and its variants: time of each by shape, batched and one by one.

    python -m benchmarks.rules                          a minute or two on a CPU, shapes at an eighth of their sides
    python -m benchmarks.rules --scale 1 --json rules.json
    python -m benchmarks.rules --device cuda            the default where there is a GPU, shapes as they are

The peer is the iteration of torch.optim.Muon, which takes one matrix after the other. Ours: plain, with the same
coefficients and, one by one, the same bits; on the Gram matrix; with Polar Express's coefficients, plain and Gram; and
in fp32. On a GPU the packages gram-newton-schulz (in fp16) and quack-kernels are also timed where they are
installed; square matrices take the standard iteration, and the row says so. Where one is not timed, a line says why.
"One by one" takes some matrices of a shape one after the other, "batched" stacks them and takes them together, the
stacking timed with it.

All variants take turns, a round at a time, so that a machine that slows down does so for all of them. Times are
medians over the rounds, per matrix; ratios are of medians, to torch.optim.Muon's: less is faster. The difference is
the largest, relative and in the Frobenius norm, to that peer's result: rounding, or for Polar Express other
polynomials. The program fails if the plain variant, one by one, differs in a bit from torch.optim.Muon.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.optim import _muon

from benchmarks import record
from lwopt_backend.rules import Muon, gram_newton_schulz, newton_schulz
from lwopt_backend.rules.newton_schulz import PACKAGES, check_package

SHAPES = {
    "GPT-2, fused QKV": (2304, 768),
    "Moonlight, expert": (1408, 2048),
    "Llama-3-8B, key": (1024, 4096),
    "Llama-3-8B, query": (4096, 4096),
    "Llama-3-8B, gate": (14336, 4096),
}
PEER, PLAIN = "torch.optim.Muon", "plain"
MUON = Muon()
Iterate = Callable[[Tensor], Tensor]
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass
class Row:
    """A variant on stacks of one shape: seconds per matrix of every round, and how far it is from the peer."""

    shape: tuple[int, int]
    of: str
    variant: str
    batched: bool
    seconds: list[float] = field(default_factory=list)
    ratio: float = 0.0
    difference: float = 0.0

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def torchs(matrix: Tensor) -> Tensor:
    return _muon._zeropower_via_newtonschulz(matrix, MUON.ns_coefficients, MUON.ns_steps, MUON.eps)


def variants(shape: tuple[int, int], packages: Mapping[str, Iterate]) -> dict[str, Iterate]:
    """By name; all but the peer take one matrix of ``shape``, or a stack of them."""
    options = {"steps": MUON.ns_steps, "eps": MUON.eps}
    bf16 = {**options, "dtype": torch.bfloat16}
    square = ", standard" if shape[0] == shape[1] else ""
    return {
        PEER: torchs,
        PLAIN: partial(newton_schulz, coefficients=MUON.ns_coefficients, **bf16),
        "gram": partial(gram_newton_schulz, coefficients=MUON.ns_coefficients, **bf16),
        "polar_express": partial(newton_schulz, coefficients="polar_express", **bf16),
        "polar_express, gram": partial(gram_newton_schulz, coefficients="polar_express", **bf16),
        "fp32": partial(newton_schulz, coefficients=MUON.ns_coefficients, dtype=torch.float32, **options),
        "fp32, gram": partial(gram_newton_schulz, coefficients=MUON.ns_coefficients, dtype=torch.float32, **options),
        **{f"{name}{square}": iterate for name, iterate in packages.items()},
    }


def packaged(device: torch.device) -> tuple[dict[str, Iterate], dict[str, str]]:
    """By name, the packages that run on ``device``, and why the others do not."""
    found: dict[str, Iterate] = {}
    why_not = {}
    for name in PACKAGES:
        try:
            check_package(name, device)
            found[name] = Muon(ns_method=name).transform
        except ValueError as error:
            why_not[name] = str(error)
    return found, why_not


def measure(
    shapes: dict[str, tuple[int, int]],
    count: int,
    rounds: int,
    device: torch.device,
    packages: Mapping[str, Iterate],
    done: Callable[[], None],
) -> list[Row]:
    """All rows. ``done`` is called after every timed call; the first rounds warm up."""
    rows, warm_up = [], warm_up_rounds(device)
    for of, shape in shapes.items():
        generator = torch.Generator().manual_seed(0)
        matrices = [torch.randn(shape, generator=generator).to(device) for _ in range(count)]
        expected = one_by_one(torchs, matrices)
        timed: list[tuple[Row, Run]] = []
        for name, iterate in variants(shape, packages).items():
            timed.append((Row(shape, of, name, False), partial(one_by_one, iterate)))
            if name != PEER:
                timed.append((Row(shape, of, name, True), partial(batched, iterate)))
        for turn in range(warm_up + rounds):
            for row, run in timed[turn % len(timed) :] + timed[: turn % len(timed)]:
                seconds, results = timing(run, matrices)
                if turn >= warm_up:
                    row.seconds.append(seconds / count)
                else:
                    row.difference = max(map(difference, results, expected))
                done()
        for row, _ in timed:
            row.ratio = row.milliseconds / timed[0][0].milliseconds
            rows.append(row)
    return rows


def warm_up_rounds(device: torch.device) -> int:
    """The packages' kernels are compiled at their first calls."""
    return 3 if device.type == "cuda" else 1


def one_by_one(iterate: Iterate, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    return [iterate(matrix) for matrix in matrices]


def batched(iterate: Iterate, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    return iterate(torch.stack(list(matrices))).unbind(0)


def timing(run: Run, matrices: Sequence[Tensor]) -> tuple[float, Sequence[Tensor]]:
    """Seconds of one call, and what it returned."""
    synchronize(matrices[0].device)
    begin = time.perf_counter()
    results = run(matrices)
    synchronize(matrices[0].device)
    return time.perf_counter() - begin, results


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def difference(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def table(rows: Sequence[Row], title: str) -> Table:
    """One line per shape and variant, batched and one by one."""
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("shape")
    drawn.add_column("variant", no_wrap=True)
    for heading in ("one by one\nms a matrix", "\nratio", "batched\nms a matrix", "\nratio", "difference"):
        drawn.add_column(heading, justify="right")
    found = {(row.shape, row.of, row.variant, row.batched): row for row in rows}
    for row in rows:
        if row.batched:
            continue
        if row.variant == PEER:
            drawn.add_section()
        name = f"{row.shape[0]} x {row.shape[1]}, {row.of}" if row.variant == PEER else ""
        together = found.get((row.shape, row.of, row.variant, True))
        last = max(row.difference, together.difference if together else 0.0)
        drawn.add_row(name, row.variant, *cells(row), *(cells(together) if together else ("", "")), f"{last:.1e}")
    return drawn


def cells(row: Row) -> tuple[str, str]:
    return f"{row.milliseconds:.3f}", f"{row.ratio:.2f}x"


def scaled(scale: float) -> dict[str, tuple[int, int]]:
    return {name: tuple(max(1, round(side * scale)) for side in shape) for name, shape in SHAPES.items()}


def main(
    scale: Annotated[
        float | None, typer.Option(help="Scale of all sides; by default 1 on a GPU and 1/8 on a CPU.")
    ] = None,
    matrices: Annotated[int, typer.Option(min=1, help="In a stack.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Measured ones.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="On a CPU.")] = 1,
    device: Annotated[str | None, typer.Option(help="Default: the GPU, or the CPU.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shapes too small to time, to see that it runs.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time Newton-Schulz by shape and variant, batched and one by one."""
    torch.set_num_threads(threads)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if quick:
        scale, matrices, rounds = 1 / 128, 2, 1
    scale = scale or (1.0 if on.type == "cuda" else 1 / 8)
    shapes = scaled(scale)
    packages, why_not = packaged(on)
    calls = (warm_up_rounds(on) + rounds) * sum(2 * len(variants(shape, packages)) - 1 for shape in shapes.values())
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("timing", total=calls)
        rows = measure(shapes, matrices, rounds, on, packages, lambda: bar.advance(task))
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else f"CPU, {threads} thread(s)"
    console = Console(width=130 if not Console().is_terminal else None, highlight=False)
    console.print(table(rows, f"{name}; {matrices} matrices of each shape, {rounds} rounds"))
    for reason in why_not.values():
        console.print(f"not timed: {reason}", soft_wrap=True)
    if output:
        figures = [{"device": name, **asdict(row), "milliseconds": row.milliseconds} for row in rows]
        record.write(output, figures)
    unequal = [row.of for row in rows if row.variant == PLAIN and not row.batched and row.difference]
    if unequal:
        raise SystemExit(f"plain Newton-Schulz is not torch.optim.Muon's, bit by bit: {', '.join(unequal)}")


if __name__ == "__main__":
    typer.run(main)
