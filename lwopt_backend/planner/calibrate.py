"""Timing this project's Newton-Schulz on this device: the work behind ``lwopt calibrate``."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lwopt_backend.checkpoint.files.folders import write_whole
from lwopt_backend.plan.cost import RULE, CostTable, Shape, newton_schulz_flops
from lwopt_backend.rules import Muon, newton_schulz

STACK_NUMEL = 2**24  # elements of a stack at most: the default bucket_numel, the stepper's limit
SURELY_SHORT = 2**27  # flops that need no prediction: a seventh of a second on a core that does 1 GFLOP/s
MUON = Muon()

Progress = Callable[[int, int, str], None]  # shapes done, number of shapes, result of the last


def calibrate(
    shapes: Iterable[Shape],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    steps: int = 5,
    stack: int = 8,
    repeats: int = 10,
    max_seconds: float = 10.0,
    progress: Progress | None = None,
) -> CostTable:
    """Time Newton-Schulz on every distinct shape, alone and in stacks of up to ``stack``; medians of ``repeats``.

    ``max_seconds`` is the limit for one shape: a slow one is repeated less often, at least once after the warm-up, and
    one that alone is predicted to take longer is left out of the table (``CostTable.unmeasured`` lists these). Shapes
    of half the size may be timed for a prediction; they are in the table, too.
    """
    if min(steps, stack, repeats) < 1 or not max_seconds > 0:
        raise ValueError(f"expected positive limits; {steps=}, {stack=}, {repeats=}, {max_seconds=}")
    wanted = sorted({(min(shape), max(shape)) for shape in shapes}, key=lambda s: (newton_schulz_flops(s, steps), s))
    if not wanted or min(wanted)[0] < 1:
        raise ValueError(f"expected matrices with at least one element; found {wanted or 'none'}")
    bench = _Bench(torch.device(device), dtype, steps, stack, repeats, max_seconds)
    for done, shape in enumerate(wanted, start=1):
        outcome = bench.measure(shape)
        if progress is not None:
            progress(done, len(wanted), f"{shape[0]} x {shape[1]}: {outcome}")
    return bench.table()


@dataclass
class _Bench:
    device: torch.device
    dtype: torch.dtype
    steps: int
    stack: int
    repeats: int
    max_seconds: float
    seconds: dict[Shape, list[tuple[int, float]]] = field(default_factory=dict)

    def measure(self, shape: Shape) -> str:
        """Time ``shape`` unless it would take too long; if it seems to, first time half of it to predict better."""
        if shape not in self.seconds:
            if self._predicted(shape) > self.max_seconds:
                self.measure((max(1, shape[0] // 2), shape[1] // 2))
            if (predicted := self._predicted(shape)) > self.max_seconds:
                return f"not measured, one would take about {predicted:.3g} s and the limit is {self.max_seconds:.3g} s"
            # One matrix in half of the time; then, if two runs fit in the other half, a stack.
            alone = self._median(shape, 1)
            affordable = int(self.max_seconds / 2 / (2 * alone))
            batch = min(self.stack, STACK_NUMEL // (shape[0] * shape[1]), affordable)
            self.seconds[shape] = [(1, alone)] + ([(batch, self._median(shape, batch))] if batch > 1 else [])
        (_, alone), *stacks = self.seconds[shape]
        return ", ".join([f"{alone:.3g} s", *(f"{each:.3g} s each in a stack of {batch}" for batch, each in stacks)])

    def table(self) -> CostTable:
        entries = tuple((shape, batch, each) for shape, times in self.seconds.items() for batch, each in times)
        dtype = str(self.dtype).removeprefix("torch.")
        return CostTable(device_name(self.device), dtype, RULE, self.steps, str(torch.__version__), entries)

    def _predicted(self, shape: Shape) -> float:
        """Predicted seconds of one matrix alone, by flops from the measurements so far."""
        if newton_schulz_flops(shape, self.steps) <= SURELY_SHORT:
            return 0.0
        return self.table().model(stacked=False).of(shape) / 1e9 if self.seconds else math.inf

    @torch.no_grad()
    def _median(self, shape: Shape, batch: int) -> float:
        """Median seconds per matrix. The first run, which allocates and selects kernels, is not counted."""
        generator = torch.Generator(self.device).manual_seed(0)
        # fp32, as gradients are; the cast to the iteration's dtype is part of the work.
        matrices = torch.randn((batch, *shape), generator=generator, device=self.device)
        if batch == 1:
            matrices = matrices[0]  # the stepper's way for one: 2-D
        end = time.perf_counter() + self.max_seconds / 2
        self._run(matrices)
        times = [self._run(matrices)]
        while len(times) < self.repeats and time.perf_counter() + times[-1] < end:
            times.append(self._run(matrices))
        return statistics.median(times) / batch

    def _run(self, matrices: torch.Tensor) -> float:
        wait = torch.accelerator.synchronize if self.device.type != "cpu" else lambda device: None
        wait(self.device)
        begin = time.perf_counter()
        newton_schulz(matrices, steps=self.steps, coefficients=MUON.ns_coefficients, eps=MUON.eps, dtype=self.dtype)
        wait(self.device)
        return time.perf_counter() - begin


def device_name(device: torch.device | str) -> str:
    """The device's model; on a CPU with the number of threads, which affects times as much."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    name = model.group(1).strip() if model else platform.processor() or platform.machine()
    return f"cpu {name}, threads {torch.get_num_threads()}"


def default_path(device: torch.device | str) -> Path:
    """The path of this device's table in the user's cache folder: ``lwopt/cost-<device>.json``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"  # the XDG standard ignores relative ones
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return folder / "lwopt" / f"cost-{slug}.json"


def write_cost_table(table: CostTable, path: str | Path) -> None:
    """Write the file whole or not at all. Creates its folder."""
    write_whole(path, table.to_json().encode())
