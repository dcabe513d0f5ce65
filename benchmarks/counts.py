"""What a step of Muon asks of its ranks, by system, in numbers that no machine changes.

    python -m benchmarks.counts --system "ours, FSDP2" "torch.optim.Muon, FSDP2" --model gpt2-124m --ranks 8
    python -m benchmarks.counts --json benchmarks/results/counts.json --page docs/peers.md

One process is every rank in turn. The other ranks and the GPU are not there (benchmarks/rehearsal): tensors have no
memory, and collectives move nothing. What is counted is what a rank would launch and send in its second step: the flops
of its matrix products, its operations, its collectives, and their bytes, of which the larger of what is sent and
received counts. Gradients are summed by FSDP2 itself, which is not counted, and on replicas by the system or by DDP, in
buckets of 25 MiB, which is.

- flops: over the floor, which is every matrix once in five steps of Newton-Schulz, shared evenly by all ranks;
  of the busiest rank, and the mean
- bytes: of the busiest rank, over the floor: on FSDP2, every element goes once to an owner and once back, in bf16; on
  replicas, gradients are summed and parameters return, both in fp32
- launches: operations of the rank that launches most, a matrix of the model

Peers are those of benchmarks/conformance.py, with its settings. One that is not installed, and has no ``--source``, is
left out. ``--json`` keeps what the file says of other cells.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import public_models, record
from benchmarks.clock.record import cost, moved
from benchmarks.conformance import NAMED, PEERS, version
from benchmarks.rehearsal.absent_gpu import DEVICE, Recorder, absent_gpu, pretended, tensors_in
from benchmarks.rehearsal.engines import ENGINES, sharded
from benchmarks.rehearsal.step import others_of
from lwopt_backend.plan.cost import newton_schulz_flops

MODELS = ("gpt2-124m", "llama3.1-8b")  # equal blocks; grouped heads
RANKS = (8, 64)
WARM_UP = 1  # steps, which make state and caches
DDP_BYTES = 25 * 2**20  # of a bucket
Row = dict[str, Any]


class Meter(Recorder):
    """Counts the flops of products, the operations, the collectives and their bytes."""

    flops = launches = count = nbytes = 0

    def restart(self) -> None:
        self.flops = self.launches = self.count = self.nbytes = 0

    def _note(self, func: Any, args: Any, found: Any) -> None:
        for each in tensors_in((found,)):
            self._record(each)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func._schema.name.partition("::")[2], args, found)
        elif not self._starts_nothing(func):
            self.launches += 1
            self.flops += cost(func._schema.name, args, found)[0]

    def _collective(self, name: str, args: Any, found: Any) -> None:
        if not name.startswith("wait_tensor"):
            other = found if isinstance(found, Tensor) else args[1]  # a functional collective returns what it receives
            self.count += 1
            self.nbytes += moved(name, (args[0], other, *args[2:]), dist.get_rank(), dist.get_world_size())


@dataclass(frozen=True)
class System:
    """A system of ``peer``, on FSDP2 or on replicas (``sharded``). Without ``make`` it is this package, whose
    ``options`` are given. ``alike`` is whether all ranks do the same, so that the first and the last are counted."""

    peer: str
    sharded: bool = True
    make: Callable[[Any, DeviceMesh | None], torch.optim.Optimizer] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    alike: bool = False


def dion_on_replicas(model: nn.Module, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    more = {"distributed_mesh": dist.group.WORLD, "adjust_lr": "rms_norm", "use_polar_express": False}
    made: torch.optim.Optimizer = importlib.import_module("dion").Muon(model.parameters(), **NAMED, **more)
    return made


def of_peer(name: str, **more: Any) -> System:
    return System(name, **{"make": PEERS[name].make, **more})


OURS, AUTO = "ours-fsdp2", {"matrix": {"name": "muon", "ns_method": "auto"}}
SYSTEMS: dict[str, System] = {
    "ours, FSDP2": System(OURS),
    "ours, FSDP2, ns_method auto": System(OURS, options=AUTO),
    "dion, FSDP2": of_peer("dion", alike=True),
    "muon-fsdp2, FSDP2": of_peer("muon-fsdp2"),
    "PithTrain, FSDP2": of_peer("pithtrain"),
    "torch.optim.Muon, FSDP2": of_peer("torch", alike=True),
    "ours, replicas": System(OURS, sharded=False),
    "dion, replicas": of_peer("dion", make=dion_on_replicas, sharded=False, alike=True),
    "pytorch_optimizer, replicas": of_peer("pytorch_optimizer", sharded=False),
    "torch.optim.Muon, replicas": of_peer("torch", sharded=False, alike=True),
}


class OfPeer:
    """A peer's optimizer of a model without memory, with a gradient of every parameter in each step."""

    def __init__(self, system: System, shapes: Mapping[str, tuple[int, int]], ranks: int) -> None:
        self._system, self.model = system, nn.Module()
        mesh = DeviceMesh(DEVICE.type, torch.arange(ranks), mesh_dim_names=("shards",)) if system.sharded else None
        self._mesh = mesh
        self.model._parameters.update({name: nn.Parameter(self._tensor(shape)) for name, shape in shapes.items()})
        assert system.make is not None
        self.optimizer = system.make(self.model, mesh)

    def _tensor(self, shape: Sequence[int]) -> Tensor:
        if self._mesh is not None:
            return sharded(shape, torch.float32, self._mesh)
        return torch.empty(shape, device=DEVICE)

    def backward(self) -> None:
        for param in self.model.parameters():
            param.grad = self._tensor(param.shape)
        if not self._system.sharded:
            left = sum(param.numel() * param.itemsize for param in self.model.parameters())
            while left > 0:
                dist.all_reduce(torch.empty(min(left, DDP_BYTES) // 4, device=DEVICE))
                left -= DDP_BYTES

    def step(self) -> None:
        self.optimizer.step()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within it, torch compiles nothing."""
    compile, disabled = torch.compile, torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    torch.compile = lambda function=None, **_: function if function is not None else lambda inner: inner  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile, torch._dynamo.config.disable = compile, disabled


def of_rank(name: str, model: str, ranks: int, rank: int) -> Meter:
    """What one rank does in its third step, and in the backward pass before it."""
    system, meter = SYSTEMS[name], Meter()
    engine = "fsdp2" if system.sharded else "plain"
    (planned,) = (
        study := public_models.study(model, engine, ranks, options=system.options, dtype=torch.float32)
    ).worst.planned
    others = others_of(planned) if system.make is None else lambda mine, count: [mine] * count
    with pretended(rank, ranks, others), absent_gpu(meter), uncompiled():
        if system.make is None:
            made: Any = ENGINES[engine](planned, study.setting)
        else:
            made = OfPeer(system, dict(public_models.load(model)), ranks)
        for number in range(WARM_UP + 1):
            if number == WARM_UP:
                meter.restart()
            made.backward()
            made.step()
    return meter


def row(name: str, model: str, ranks: int) -> Row:
    """The figures of a system, over all ranks."""
    shapes = [shape for _, shape in public_models.load(model)]
    numel = sum(rows * columns for rows, columns in shapes)
    least = sum(map(newton_schulz_flops, shapes)) / ranks
    wire = (2 + 2 if SYSTEMS[name].sharded else 4 + 4) * numel / ranks * (1 if SYSTEMS[name].sharded else ranks)
    meters = [of_rank(name, model, ranks, rank) for rank in ((0, ranks - 1) if SYSTEMS[name].alike else range(ranks))]
    flops = [meter.flops / least for meter in meters]
    assert not SYSTEMS[name].alike or len({*flops}) == 1, f"ranks of {name} differ; count all"
    return {
        "system": name,
        "model": model,
        "ranks": ranks,
        "busiest": round(max(flops), 3),
        "mean": round(sum(flops) / len(flops), 3),
        "bytes": round(max(meter.nbytes for meter in meters) / (wire * (ranks - 1) / ranks), 3),
        "collectives": max(meter.count for meter in meters),
        "launches": round(max(meter.launches for meter in meters) / len(shapes), 1),
    }


# What is shown.

ABOUT = {"busiest": "flops, busiest rank", "mean": "flops, mean", "bytes": "bytes"}
ABOUT |= {"collectives": "collectives", "launches": "launches a matrix"}


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of each model, a line a system and number of ranks."""
    lines = list[str]()
    for model in dict.fromkeys(row["model"] for row in rows):
        count = len(public_models.load(model))
        lines += [f"{model}, {count} matrices:", "", f"| system | ranks | {' | '.join(ABOUT.values())} |"]
        lines.append("| --- " * (2 + len(ABOUT)) + "|")
        for ranks in sorted({row["ranks"] for row in rows}):
            some = {row["system"]: row for row in rows if (row["model"], row["ranks"]) == (model, ranks)}
            for name in (name for name in SYSTEMS if name in some):
                version = f" {some[name]['version']}" if not name.startswith("ours") else ""
                peer, comma, rest = name.partition(",")
                cells = [f"{some[name][key]:g}" for key in ABOUT]
                lines.append(f"| {peer}{version}{comma}{rest} | {ranks} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="SYSTEM")
    parser.add_argument("--model", nargs="+", choices=public_models.MODELS, default=[*MODELS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[*RANKS])
    parser.add_argument("--source", nargs="+", default=[], metavar="PEER=FOLDER", help="of one that has no package")
    parser.add_argument("--json", type=Path, help="put the figures in there")
    parser.add_argument("--page", type=Path, help="write the tables of --json into this page")
    options = parser.parse_args()
    sources = dict(word.split("=", 1) for word in options.source)
    sys.path[:0] = sources.values()
    warnings.simplefilter("ignore")
    known = json.loads(options.json.read_text())["figures"] if options.json and options.json.exists() else []
    rows = {(row["system"], row["model"], row["ranks"]): row for row in known}
    for name in options.system:
        peer = SYSTEMS[name].peer
        if (found := version(peer, sources)) is None:
            home = PEERS[peer].home
            how = f"git clone https://github.com/{home}, and --source {peer}=FOLDER" if home else "pip install"
            print(f"{name} is left out: {how} {'' if home else PEERS[peer].distribution}")
            continue
        for model in options.model:
            for ranks in options.ranks:
                try:
                    made = rows[name, model, ranks] = {**row(name, model, ranks), "version": found}
                except Exception as error:  # a peer's, on tensors without memory
                    print(f"{name}, {model}, {ranks} ranks is not counted: {type(error).__name__}: {error}", flush=True)
                    continue
                print(", ".join(f"{key} {value}" for key, value in made.items()), flush=True)
                if options.json:
                    record.write(options.json, [*rows.values()])
    if options.page:
        options.page.write_text(record.with_table(options.page.read_text(), "counts", table([*rows.values()])))


if __name__ == "__main__":
    main()
