"""Muons on several ranks, compared with the same rule in one process: a cell, or the table of docs/peers.md.

    python -m benchmarks.conformance --peer torch --case uneven
    python -m benchmarks.conformance --peer dion veomni --source dion=FOLDER veomni=FOLDER
    python -m benchmarks.conformance --json benchmarks/results/conformance.json --page docs/peers.md

A cell trains small matrices in fp32 for four steps on 2 or 4 ranks, which are processes here over gloo. All ranks have
the same gradients, so that their mean has the same bits as in one process. For comparison, one process steps the peer's
own rule (torch.optim.Muon's for this package and torch) on whole matrices, clips and accumulates as torch does, and
never stops.

A number                the largest ||W - W'|| / ||W' - W0|| of a matrix on any rank, W' being those of one process
trains something else   the same, above 0.05, and nothing said so: roundings in bf16 give up to 0.03
refused                 an error that the peer raises on all ranks, with a message
crashes, hangs          any other error; no end within --timeout
-                       there is no such case, for the reason that is printed

Peers come from the package index, or from a folder that is named. One that is not installed is left out, and what would
install it is printed. ``--json`` keeps what the file says of other cells.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import linecache
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks import record
from benchmarks.conformance_peers import PEERS, Gradients, Peer

STEPS, SAVED_AFTER, BOUND = 4, 2, 0.05
GRACE_SECONDS = 10  # for the other ranks, when one has failed
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")  # once, and not by every rank
REFERENCE = "one process"


@dataclass(frozen=True)
class Case:
    """What is trained. ``mesh`` has the sizes of a mesh's dimensions by name, of all ranks."""

    about: str
    shapes: Sequence[tuple[int, ...]] = (*[(64, 64)] * 4, *[(64, 32)] * 4)
    mesh: Mapping[str, int] = field(default_factory=lambda: {"shards": 2})
    micro_batches: int = 1
    clip: float = 0.0
    without: Sequence[int] = ()  # the steps in which the first matrix has no gradient
    resumed_on: int = 0  # ranks; 0 is not resumed

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    def named(self) -> dict[str, tuple[int, ...]]:
        return {f"matrix_{number}": shape for number, shape in enumerate(self.shapes)}

    def gradients(self, step: int) -> list[dict[str, Tensor]]:
        """A step's, by micro-batch. Clipped ones and their shards have whole norms, which no order of sums rounds."""
        generator = torch.Generator().manual_seed(1000 + step)
        found = []
        for _ in range(self.micro_batches):
            drawn = {name: torch.randn(shape, generator=generator) for name, shape in self.named().items()}
            if self.clip:
                drawn = {name: 2.0 ** (3 * (step % 2)) * whole_norms(drawn[name], generator) for name in drawn}
            found.append({name: g for name, g in drawn.items() if name != "matrix_0" or step not in self.without})
        return found


def whole_norms(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Signs and zeros: 24^2 elements of the upper half, and 32^2 of the lower, so that all have the norm 40."""
    kept = torch.zeros(2, drawn.numel() // 2)
    for half, root in zip(kept, (24, 32)):
        half[torch.randperm(len(half), generator=generator)[: root**2]] = 1
    return drawn.sign() * kept.view_as(drawn)


CASES = {
    "equal": Case("equal rows"),
    "uneven": Case("uneven rows", (*[(65, 32)] * 4, *[(33, 64)] * 4)),
    "one-row": Case("one-row matrices", (*[(64, 64)] * 4, *[(1, 64)] * 4)),
    "hsdp": Case("HSDP, 2 copies of 2 shards", mesh={"copies": 2, "shards": 2}),
    "tp": Case("TP 2 x FSDP 2", mesh={"data": 2, "tensor": 2}),
    "experts": Case("experts in a stack", (*[(64, 64)] * 4, *[(4, 32, 64)] * 4)),
    "accumulation": Case("accumulation", micro_batches=2),
    "clipping": Case("clipping", [(64, 64)] * 4, clip=1.0),
    "no-gradient": Case("a parameter without a gradient", without=(0, 2)),
    "resume": Case("resume", resumed_on=2),
    "other-ranks": Case("resume on 4 ranks", resumed_on=4),
}


class Matrix(nn.Module):
    """A matrix whose gradient is the tensor that its forward is called with, to the bit."""

    def __init__(self, shape: Sequence[int], weight: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) / 50 if weight is None else weight)

    def forward(self, gradient: Tensor) -> Tensor:
        if not isinstance(self.weight, DTensor):
            return (self.weight * gradient).sum()
        mine = distribute_tensor(gradient, self.weight.device_mesh, self.weight.placements, src_data_rank=None)
        total: DTensor = (self.weight * mine).sum()
        return total.full_tensor()


class Matrices(nn.Module):
    """The matrices of a case, the same on all ranks; ``apart``, every expert of a stack is one."""

    def __init__(self, case: Case, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ModuleDict({name: Matrix(shape) for name, shape in case.named().items()})
        for name, shape in case.named().items():
            if apart and len(shape) == 3:
                stack = self.matrices.pop(name).weight.detach()
                self.matrices.update({f"{name}_{n}": Matrix(shape, expert.clone()) for n, expert in enumerate(stack)})

    def forward(self, gradients: Gradients) -> Tensor:
        return torch.stack([self.matrices[name](gradient) for name, gradient in gradients.items()]).sum()

    def named(self) -> dict[str, nn.Parameter]:
        return {name: matrix.weight for name, matrix in self.matrices.items()}


def experts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if tensor.ndim == 2}
    stacks = [(name, stack) for name, stack in tensors.items() if stack.ndim == 3]
    return found | {f"{name}_{n}": expert for name, stack in stacks for n, expert in enumerate(stack)}


# On a rank.


def run_rank(rank: int, ranks: int, phase: str, peer: str, case: str, folder: str, sources: dict[str, str]) -> None:
    """Train and write the weights, or how that failed."""
    said = Path(folder) / f"{phase}.{rank}"
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    sys.path[:0] = sources.values()
    log = os.open(f"{said}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    try:
        weights = train(rank, ranks, phase, PEERS[peer], CASES[case], Path(folder))
        torch.save(weights, f"{said}.pt.new")
        os.replace(f"{said}.pt.new", f"{said}.pt")
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".replace(folder, "FOLDER").split())
        told = {"error": text[:400], "refused": refuses(error, PEERS[peer].modules)}
        Path(f"{said}.json.new").write_text(json.dumps({**told, "rank": rank, "at": time.time()}))
        os.replace(f"{said}.json.new", f"{said}.json")
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)  # taking down gloo's groups now and then waits for ranks that went


def train(rank: int, ranks: int, phase: str, peer: Peer, case: Case, folder: Path) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True
    torch.compile = lambda function=None, **_: function if function is not None else lambda inner: inner
    dist.init_process_group("gloo", init_method=f"file://{folder}/{phase}.meeting", rank=rank, world_size=ranks)
    apart, saved = phase == REFERENCE, folder / "checkpoint"
    model = Matrices(case, apart)
    trainer: Any = peer.reference(model, case) if apart else peer.trainer(model, case, elsewhere=ranks != case.ranks)
    if phase == "resumed":
        trainer.load(saved)
    for step in range(SAVED_AFTER if phase == "resumed" else 0, STEPS):
        if step == SAVED_AFTER and phase == "trained" and case.resumed_on:
            saved.mkdir(exist_ok=True)
            trainer.save(saved)
            break
        gradients = case.gradients(step)
        if apart and peer.stage is not None:  # there, a missing gradient is a part of a flat one, and zero
            zeros = {name: torch.zeros(shape) for name, shape in case.named().items()}
            gradients = [zeros | each for each in gradients]
        trainer.step([experts_apart(each) for each in gradients] if apart else gradients)
    dist.barrier()
    return trainer.weights()


def refuses(error: BaseException, packages: str) -> bool:
    """Whether it was raised, with a message, by a line of the packages themselves."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    modules = [sys.modules[name] for name in packages.split() if name in sys.modules]
    places = [Path(place) for module in modules for place in getattr(module, "__path__", None) or [module.__file__]]
    theirs = any(place in (Path(frame.filename), *Path(frame.filename).parents) for place in places)
    raised = linecache.getline(frame.filename, frame.lineno or 0).strip().startswith(("raise", "assert"))
    return theirs and raised and bool(str(error).strip())


# Over all ranks.

Row = dict[str, Any]  # a cell: its peer, case and verdict, the difference, what was said, and the version


class Failed(Exception):
    """Has the verdict and what was said."""


def run_phase(phase: str, ranks: int, given: tuple[Any, ...], timeout: float) -> list[dict[str, Tensor]]:
    """The weights of every rank, called here on none of them. Raises Failed."""
    folder, context = Path(given[2]), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *["deepspeed"] * (PEERS[given[0]].stage is not None)])
    started = [context.Process(target=run_rank, args=(rank, ranks, phase, *given)) for rank in range(ranks)]
    for process in started:
        process.start()
    end = time.monotonic() + timeout
    while any(process.is_alive() for process in started) and time.monotonic() < end:
        if errors(phase, folder) or any(process.exitcode for process in started):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    codes = [process.exitcode for process in started if process.exitcode]
    for process in started:
        process.kill(), process.join()
    where = "" if phase == "trained" else f" ({phase})"
    if found := errors(phase, folder):
        everywhere = len(found) == ranks and all(error["refused"] for error in found)
        raise Failed("refused" if everywhere and phase != REFERENCE else "crashes", found[0]["error"] + where)
    if codes:
        raise Failed("crashes", f"exit code {codes[0]}{where}")
    weights = sorted(folder.glob(f"{phase}.*.pt"))
    if len(weights) < ranks:
        raise Failed("hangs", f"no end within {timeout:.0f} s{where}")
    return [torch.load(path) for path in weights]


def errors(phase: str, folder: Path) -> list[dict[str, Any]]:
    """Those of ranks that have failed, the first one first."""
    return sorted((json.loads(path.read_text()) for path in folder.glob(f"{phase}.*.json")), key=lambda e: e["at"])


def run_cell(name: str, case_name: str, timeout: float, sources: dict[str, str]) -> Row:
    peer, case = PEERS[name], CASES[case_name]
    row: Row = {"peer": name, "case": case_name, "version": version(name, sources), "verdict": "-", "difference": None}
    if case_name in peer.lacks:
        return {**row, "said": peer.lacks[case_name]}
    with tempfile.TemporaryDirectory() as folder:
        given = (name, case_name, folder, sources)
        try:
            (expected,) = run_phase(REFERENCE, 1, given, timeout)
            found = run_phase("trained", case.ranks, given, timeout)
            if case.resumed_on:
                found = run_phase("resumed", case.resumed_on, given, timeout)
        except Failed as failed:
            return {**row, "verdict": failed.args[0], "said": failed.args[1]}
    start = experts_apart({key: p.detach() for key, p in Matrices(case, apart=False).named().items()})
    differ = max(difference(experts_apart(weights), expected, start) for weights in found)
    return {**row, "verdict": "a number" if differ <= BOUND else "trains something else", "difference": differ}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """The largest over matrices, in units of what the matrix has moved by; infinite where it is not a number."""
    differ = [float((found[key] - w).norm() / (w - start[key]).norm()) for key, w in expected.items()]
    return max(value if math.isfinite(value) else math.inf for value in differ)


def version(name: str, sources: Mapping[str, str]) -> str | None:
    """That of the installed package, or the commit of the folder that is named; None without either."""
    distribution = PEERS[name].distribution
    if name in sources:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=sources[name], capture_output=True, text=True)
        return head.stdout.strip()[:10] or "a folder"
    try:
        return importlib.metadata.version(distribution) if distribution else None
    except importlib.metadata.PackageNotFoundError:
        return None


# What is shown.


def shown(row: Row) -> str:
    if row["difference"] is None:
        return str(row["verdict"])
    value = f"{row['difference']:.0e}" if row["difference"] else "0.0"
    return value if row["verdict"] == "a number" else f"**{row['verdict']}** ({row['difference']:.2g})"


def table(rows: Mapping[tuple[str, str], Row]) -> str:
    """Two Markdown tables, a line a system, each as wide as a page; then the errors of the cells without a number."""
    kept = [rows[peer, case] for peer in PEERS for case in CASES if (peer, case) in rows]
    peers = list(dict.fromkeys(row["peer"] for row in kept))
    lines = list[str]()
    for cases in ([*CASES][:6], [*CASES][6:]):
        cells = [["system", "version", *(CASES[case].about for case in cases)], ["---"] * (2 + len(cases))]
        for peer in peers:
            versions = sorted({row["version"] for row in kept if row["peer"] == peer})
            figures = [shown(rows[peer, case]) if (peer, case) in rows else "" for case in cases]
            cells.append([peer, ", ".join(versions), *figures])
        lines += [*("| " + " | ".join(line) + " |" for line in cells), ""]
    failed = [row for row in kept if row["verdict"] in ("refused", "crashes", "hangs")]
    lines += [f"- {row['peer']}, `--case {row['case']}`: {row['verdict']}, `{row['said'][:200]}`" for row in failed]
    return "\n".join(lines)


BEGIN, END = "<!-- written by benchmarks/conformance.py --page -->\n", "<!-- end -->\n"


def write_page(path: Path, rows: Mapping[tuple[str, str], Row]) -> None:
    """Replace what stands between the two marks."""
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table(rows)}\n\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", "--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--source", nargs="+", default=[], metavar="PEER=FOLDER", help="of one that has no package")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a cell's phase")
    parser.add_argument("--json", type=Path, help="put the cells in there")
    parser.add_argument("--page", type=Path, help="write the table of --json into this page")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    sources = dict(word.split("=", 1) for word in options.source)
    known = json.loads(options.json.read_text())["figures"] if options.json and options.json.exists() else []
    rows = {(row["peer"], row["case"]): row for row in known}
    for peer in options.peer:
        if version(peer, sources) is None:
            cloned = f"git clone https://github.com/{PEERS[peer].home}, and --source {peer}=FOLDER"
            print(f"{peer} is left out: {cloned if PEERS[peer].home else 'pip install ' + PEERS[peer].distribution}")
            continue
        for case in options.case:
            row = rows[peer, case] = run_cell(peer, case, options.timeout, sources)
            command = f"python -m benchmarks.conformance --peer {peer} --case {case}"
            print(f"{shown(row):30} {command}  {row.get('said', '')}", flush=True)
    if options.json:
        record.write(options.json, [rows[peer, case] for peer in PEERS for case in CASES if (peer, case) in rows])
    if options.page:
        write_page(options.page, rows)


if __name__ == "__main__":
    main()
