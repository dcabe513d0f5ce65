"""Newton-Schulz and its variants: time of each by shape, batched and one by one.

    python -m benchmarks.rules                          a minute or two on a CPU, shapes at an eighth of their sides
    python -m benchmarks.rules --scale 1 --json rules.json
    python -m benchmarks.rules --device cuda            shapes as they are

The peer is the iteration of torch.optim.Muon, which takes one matrix after the other. Ours: plain, with the same
coefficients and, one by one, the same bits; on the Gram matrix; with Polar Express's coefficients, plain and Gram; and
in fp32. On a GPU the packages gram-newton-schulz (in fp16) and quack-kernels are also timed where they can be. "One by
one" takes some matrices of a shape one after the other, "batched" stacks them and takes them together, the stacking
timed with it.

All variants take turns, a round at a time, so that a machine that slows down does so for all. Times are medians of the
rounds, per matrix: of CPU time, or on a GPU on the clock; ratios are to torch.optim.Muon's: less is faster. The program
fails if the plain variant, one by one, differs in a bit from torch.optim.Muon.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

from benchmarks import record
from lwopt_backend.rules import Muon, gram_newton_schulz, newton_schulz
from lwopt_backend.rules.newton_schulz import PACKAGES, check_package

SHAPES = {
    "GPT-2, QKV": (2304, 768),
    "Moonlight, expert": (1408, 2048),
    "Llama-3-8B, key": (1024, 4096),
    "Llama-3-8B, query": (4096, 4096),
    "Llama-3-8B, gate": (14336, 4096),
}
PEER, PLAIN = "torch.optim.Muon", "plain"
MUON = Muon()
COUNT = 4  # matrices of a shape
Iterate = Callable[[Tensor], Tensor]


def variants(device: torch.device) -> dict[str, Iterate]:
    """By name; all but the peer take one matrix, or a stack of them. Prints why a package is left out."""
    options: dict[str, Any] = {"steps": MUON.ns_steps, "eps": MUON.eps}
    peer = (MUON.ns_coefficients, MUON.ns_steps, MUON.eps)
    found: dict[str, Iterate] = {PEER: lambda matrix: _muon._zeropower_via_newtonschulz(matrix, *peer)}
    coefficients: dict[str, Any] = {"": MUON.ns_coefficients, "polar_express": "polar_express", "fp32": peer[0]}
    for name, chosen in coefficients.items():
        more = {**options, "coefficients": chosen, "dtype": torch.float32 if name == "fp32" else torch.bfloat16}
        found[name or PLAIN] = partial(newton_schulz, **more)
        found[f"{name}, gram".removeprefix(", ")] = partial(gram_newton_schulz, **more)
    for name in PACKAGES:
        try:
            check_package(name, device)
            found[name] = Muon(ns_method=name).transform
        except ValueError as error:
            print(f"not timed: {error}")
    return found


def one_by_one(iterate: Iterate, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    return [iterate(matrix) for matrix in matrices]


def batched(iterate: Iterate, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
    return iterate(torch.stack(list(matrices))).unbind(0)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        began = time.process_time()
        run()
        return time.process_time() - began
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure(
    of: str, shape: tuple[int, ...], iterations: dict[str, Iterate], rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """The rows of a shape: milliseconds a matrix, and their ratio to the peer's. The first rounds warm up."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).to(device) for _ in range(COUNT)]
    runs = {(name, False): partial(one_by_one, iterate, matrices) for name, iterate in iterations.items()}
    runs |= {(name, True): partial(batched, iterate, matrices) for name, iterate in iterations.items() if name != PEER}
    if not all(map(torch.equal, runs[PLAIN, False](), runs[PEER, False]())):
        raise SystemExit(f"plain Newton-Schulz is not torch.optim.Muon's, bit by bit: {of}")
    taken: dict[Any, list[float]] = {key: [] for key in runs}
    warm_up = 3 if device.type == "cuda" else 1  # kernels are compiled at their first calls
    for turn in range(warm_up + rounds):
        keys = [*runs]
        for key in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
            taken[key] += [seconds(runs[key], device)] * (turn >= warm_up)
    ms = {key: 1e3 * statistics.median(some) / COUNT for key, some in taken.items()}
    rows = [{"variant": name, "batched": many, "ms": ms[name, many]} for name, many in runs]
    return [{"of": of, "shape": shape, **row, "ratio": row["ms"] / ms[PEER, False]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, help="of all sides; by default 1 on a GPU and 1/8 on a CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    scale = options.scale or (1.0 if device.type == "cuda" else 1 / 8)
    iterations, figures = variants(device), []
    for of, shape in SHAPES.items():
        rows = measure(of, tuple(max(1, round(side * scale)) for side in shape), iterations, options.rounds, device)
        for row in rows:
            how = "batched" if row["batched"] else "one by one"
            print(f"{row['shape']!s:14} {of:18} {row['variant']:20} {how:10} {row['ms']:9.3f} ms {row['ratio']:5.2f}x")
        figures += rows
    if options.json:
        record.write(options.json, figures)


if __name__ == "__main__":
    main()
