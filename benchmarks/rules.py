"""Newton-Schulz beside what else computes it: time of each variant by shape, batched and one by one.

    python benchmarks/rules.py                          a minute or two on a CPU, shapes at an eighth of their sides
    python benchmarks/rules.py --scale 1 --json rules.json
    python benchmarks/rules.py --device cuda            the default where there is a GPU, shapes as they are

The peer is the iteration of torch.optim.Muon, which takes one matrix after the other. Ours: plain, with the same
coefficients and, one by one, the same bits; on the Gram matrix; with Polar Express's coefficients, plain and Gram; and
in fp32. On a GPU the package gram-newton-schulz (fp16, its own kernels) is timed beside them where it is installed;
for square matrices it runs its standard iteration, and the row says so. Where it is not timed, a line says why.
"One by one" takes some matrices of a shape one after the other, "batched" stacks them and takes them together, the
stacking timed with it.

All variants take turns, a round at a time, so that a machine that slows down does so for all of them. Times are
medians over the rounds, per matrix; ratios are of medians, to torch.optim.Muon's: less is faster. The difference is
the largest, relative and in the Frobenius norm, to that peer's result: rounding, or for Polar Express other
polynomials. The program fails if the plain variant, one by one, differs in a bit from torch.optim.Muon.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
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

from lwopt_backend.config.registry import MuonOptions
from lwopt_backend.rules import gram_newton_schulz, newton_schulz

SHAPES = {
    "GPT-2, fused QKV": (2304, 768),
    "Moonlight, expert": (1408, 2048),
    "Llama-3-8B, key": (1024, 4096),
    "Llama-3-8B, query": (4096, 4096),
    "Llama-3-8B, gate": (14336, 4096),
}
PEER, PLAIN, PACKAGE = "torch.optim.Muon", "plain", "gram-newton-schulz"
MUON = MuonOptions()
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


def variants(shape: tuple[int, int], package: Iterate | None) -> dict[str, Iterate]:
    """By name; all but the peer take one matrix of ``shape``, or a stack of them."""
    options = {"steps": MUON.ns_steps, "eps": MUON.eps}
    bf16 = {**options, "dtype": torch.bfloat16}
    found: dict[str, Iterate] = {
        PEER: torchs,
        PLAIN: partial(newton_schulz, coefficients=MUON.ns_coefficients, **bf16),
        "gram": partial(gram_newton_schulz, coefficients=MUON.ns_coefficients, **bf16),
        "polar_express": partial(newton_schulz, coefficients="polar_express", **bf16),
        "polar_express, gram": partial(gram_newton_schulz, coefficients="polar_express", **bf16),
        "fp32": partial(newton_schulz, coefficients=MUON.ns_coefficients, dtype=torch.float32, **options),
        "fp32, gram": partial(gram_newton_schulz, coefficients=MUON.ns_coefficients, dtype=torch.float32, **options),
    }
    if package is not None:
        found[package_row(shape)] = package
    return found


def package_row(shape: tuple[int, int]) -> str:
    """The package takes the Gram matrix of what is not square only."""
    return f"{PACKAGE}, standard" if shape[0] == shape[1] else PACKAGE


def packaged(device: torch.device) -> tuple[Iterate | None, str]:
    """The package gram-newton-schulz with torch.optim.Muon's coefficients; or None, and why it is not timed."""
    if device.type != "cuda":
        return None, "not timed, its kernels need a GPU"
    try:
        package = importlib.import_module("gram_newton_schulz")
        rows = [MUON.ns_coefficients] * MUON.ns_steps
        gram = package.GramNewtonSchulz(ns_coefficients=rows, gram_newton_schulz_reset_iterations=[3])
    except ModuleNotFoundError as error:
        if error.name == "gram_newton_schulz":
            return None, "not timed, it is not installed"
        return None, f"not timed, what it needs is not installed: {error}"
    except ImportError as error:
        return None, f"not timed, it cannot be imported: {error}"
    return lambda matrices: gram(matrices.clone()), ""  # because it divides what it is given by its norm, in place


def measure(
    shapes: dict[str, tuple[int, int]],
    count: int,
    rounds: int,
    device: torch.device,
    package: Iterate | None,
    done: Callable[[], None],
) -> list[Row]:
    """All rows. ``done`` is called after every timed call; the first rounds warm up."""
    rows, warm_up = [], warm_up_rounds(device)
    for of, shape in shapes.items():
        generator = torch.Generator().manual_seed(0)
        matrices = [torch.randn(shape, generator=generator).to(device) for _ in range(count)]
        expected = one_by_one(torchs, matrices)
        timed: list[tuple[Row, Run]] = []
        for name, iterate in variants(shape, package).items():
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
    """The package's kernels are compiled at their first calls."""
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
    """One line per shape and variant, batched beside one by one."""
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
    scale: Annotated[float | None, typer.Option(help="Of all sides; by default 1 on a GPU and 1/8 on a CPU.")] = None,
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
    package, why_not = packaged(on)
    calls = (warm_up_rounds(on) + rounds) * sum(2 * len(variants(shape, package)) - 1 for shape in shapes.values())
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("timing", total=calls)
        rows = measure(shapes, matrices, rounds, on, package, lambda: bar.advance(task))
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else f"CPU, {threads} thread(s)"
    console = Console(width=130 if not Console().is_terminal else None, highlight=False)
    console.print(table(rows, f"{name}; {matrices} matrices of each shape, {rounds} rounds"))
    if package is None:
        console.print(f"{PACKAGE}: {why_not}", soft_wrap=True)
    if output:
        figures = [{**asdict(row), "milliseconds": row.milliseconds} for row in rows]
        output.write_text(json.dumps({"torch": torch.__version__, "device": name, "rows": figures}, indent=2) + "\n")
    unequal = [row.of for row in rows if row.variant == PLAIN and not row.batched and row.difference]
    if unequal:
        raise SystemExit(f"plain Newton-Schulz is not torch.optim.Muon's, bit by bit: {', '.join(unequal)}")


if __name__ == "__main__":
    typer.run(main)
