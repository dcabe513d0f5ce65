"""What one optimizer step asks of a device: operations, host synchronisations, collectives and allocations, by engine.

    python benchmarks/launches.py                             all engines on 1, 2 and 4 ranks, two minutes
    python benchmarks/launches.py --engine fsdp2 --ranks 2    one of them
    python benchmarks/launches.py --json launches.json        write it down

Every operation on a GPU costs a launch, however little it computes, and so do all that a host waits for. Both can be
counted without a GPU: gloo ranks run a step as on an accelerator, in batches of equal shapes and without reading what
is computed. A stack of a transformer's matrices is trained for two steps; what the optimizer does in the second is
counted: views cost nothing, and a ``torch._foreach`` call that CUDA would run tensor by tensor counts for every tensor.
Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsdp2_systems
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp2_systems import MUON, around_newton_schulz, import_dion
from fsdp2_traffic import Watch
from rehearsal.absent_gpu import tensors_in
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.rules.newton_schulz import IMMEDIATE

READS = {"_local_scalar_dense", "nonzero"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
DEEPSPEEDS = "DeepSpeed's Muon"
NOT_LAUNCHED = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass
class Count:
    """What one rank did in one step. ``operations`` are by name, without those of Newton-Schulz."""

    operations: Counter[str] = field(default_factory=Counter)
    newton_schulz: Counter[str] = field(default_factory=Counter)
    calls: int = 0  # of Newton-Schulz: batches
    host_reads: int = 0
    collectives: int = 0
    sent_bytes: int = 0
    allocations: int = 0

    @property
    def launches(self) -> int:
        return self.operations.total() + self.newton_schulz.total()


class Watched(Watch):
    """Counts into ``count`` what is dispatched while it is open."""

    def __init__(self, count: Count, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.count = count
        self.inside = False  # Newton-Schulz

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.traffic.count
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented or func.namespace != "aten":
            self.count.collectives += self.traffic.count - before
            self.count.sent_bytes = self.traffic.nbytes
            return result
        name = func._overloadpacket.__name__
        self.count.host_reads += name in READS
        if not func.is_view and name not in READS:
            counted = self.count.newton_schulz if self.inside else self.count.operations
            counted[name] += 0 if name in NOT_LAUNCHED else launches(name, args)
            self.count.allocations += new_storages(result, [*args, *(kwargs or {}).values()])
        return result


class Reads(TorchFunctionMode):
    """Counts ``Tensor.tolist``, which copies to the host and dispatches nothing."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count.host_reads += func is Tensor.tolist
        return func(*args, **(kwargs or {}))


def launches(name: str, args: Sequence[Any]) -> int:
    """1, or for a list of tensors that CUDA takes one by one, their number."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    if not name.startswith("_foreach") or not lists:
        return 1
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    alike = all(len(found) == 1 for found in dtypes) and (name == "_foreach_copy_" or len(set().union(*dtypes)) == 1)
    alike = alike and all(len({(t.shape, t.stride()) for t in row}) == 1 and dense(row[0]) for row in zip(*lists))
    return 1 if alike else len(lists[0])


def dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous())


def new_storages(result: Any, args: Sequence[Any]) -> int:
    made, given = ({t.untyped_storage()._cdata for t in tensors_in(some)} for some in ([result], args))
    return len(made - given)


class Block(fsdp2_systems.Block):
    """A transformer layer's matrices, in a forward pass that uses all of them."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        x = x + self.attention(query * key * value)
        return x + self.down(self.up(x))


@dataclass(frozen=True)
class Shape:
    """What is trained on how many ranks."""

    layers: int
    width: int
    ranks: int

    @property
    def matrices(self) -> int:
        return 4 * self.layers

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width) for _ in range(self.layers)))


# Each engine trains a step when it is called with ``counted``, within which its optimizer's work is done.

Counted = Callable[[Callable[[], Any]], Any]
Step = Callable[[Counted], None]
OURS = {**MUON, "report": False, "include": ["*"]}


@contextmanager
def in_torch(shape: Shape, make: Callable[[nn.Module], torch.optim.Optimizer], sharded: bool) -> Iterator[Step]:
    model = shape.model()
    if sharded:
        mesh = init_device_mesh("cpu", (shape.ranks,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make(model)

    def step(counted: Counted) -> None:
        loss_of(model, shape).backward()
        counted(optimizer.step)
        optimizer.zero_grad()

    yield step


def loss_of(model: Callable[[Tensor], Tensor], shape: Shape) -> Tensor:
    return model(torch.randn(2, shape.width, generator=torch.Generator().manual_seed(1))).square().mean()


@contextmanager
def under_deepspeed(shape: Shape, optimizer: dict[str, Any], stage: int) -> Iterator[Step]:
    """DeepSpeed's Muon works in backward, too, at stages 1 and 2."""
    import deepspeed
    import deepspeed.runtime.zero.muon.original_muon as deepspeed_muon

    from lwopt_backend.integrations import deepspeed_zero

    deepspeed_zero.register()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    if stage == 3 and optimizer["type"] == "Muon":
        zero["reduce_scatter"] = False  # it refuses the default
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": optimizer,
        "steps_per_print": 1_000_000,
    }
    model = shape.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    inner = engine.basic_optimizer
    inner_step, muon_update = inner.step, deepspeed_muon.muon_update

    def step(counted: Counted) -> None:
        def within(function: Callable[..., Any]) -> Callable[..., Any]:
            return functools.wraps(function)(lambda *args, **kwargs: counted(lambda: function(*args, **kwargs)))

        inner.step, deepspeed_muon.muon_update = within(inner_step), within(muon_update)
        engine.backward(loss_of(engine, shape))
        engine.step()
        deepspeed_muon.muon_update = muon_update

    yield step
    engine.destroy()


def systems(shape: Shape) -> dict[str, dict[str, Callable[[], AbstractContextManager[Step]]]]:
    """By engine, ours and its peers; each makes what trains one step."""

    def ours(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        return LayerWiseOptimizer(model, **OURS, **options)

    def theirs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon(model.parameters(), **MUON)

    def dions(model: nn.Module) -> torch.optim.Optimizer:
        options = {"lr": MUON["lr"], "mu": MUON["momentum"], "nesterov": True, "adjust_lr": "rms_norm"}
        mesh = init_device_mesh("cpu", (shape.ranks,))
        return import_dion().Muon(model.parameters(), distributed_mesh=mesh, **options)

    torchs = functools.partial(in_torch, shape)
    found: dict[str, dict[str, Callable[[], AbstractContextManager[Step]]]] = {
        "plain": {"ours": lambda: torchs(ours, False)},
        "modules": {"ours": lambda: torchs(lambda model: ModuleOptimizers({"all": ours(model)}), False)},
    }
    if shape.ranks == 1:
        found["plain"]["torch.optim.Muon"] = lambda: torchs(theirs, False)
    else:
        found["fsdp2"] = {
            "ours": lambda: torchs(ours, True),
            "ours, bucket_matrices=16": lambda: torchs(functools.partial(ours, bucket_matrices=16), True),
            "torch.optim.Muon": lambda: torchs(theirs, True),
        }
        if not isinstance(import_dion(), str):
            found["fsdp2"]["dion.Muon"] = lambda: torchs(dions, True)
    if isinstance(import_deepspeed(), str):
        return found
    own = {"type": "LayerWiseMuon", "params": OURS}
    muon = {"type": "Muon", "params": {key: MUON[key] for key in ("lr", "weight_decay", "momentum")}}
    under = functools.partial(under_deepspeed, shape)
    for stage in range(4):
        found[f"zero{stage}"] = {
            "ours": functools.partial(under, own, stage),
            DEEPSPEEDS: functools.partial(under, muon, stage),
        }
    owned = {"type": "LayerWiseMuon", "params": {**OURS, "storage": "owned"}}
    found["owned"] = {"ours": functools.partial(under, owned, 2)}
    return found


ENGINES = ("plain", "modules", "fsdp2", "zero0", "zero1", "zero2", "zero3", "owned")


def import_deepspeed() -> Any:
    """The module, or in words why it is left out."""
    try:
        return importlib.import_module("deepspeed")
    except Exception as error:  # whatever goes wrong there is no reason to count nothing
        return f"DeepSpeed is left out: {type(error).__name__}: {error}"


def count_step(make: Callable[[], AbstractContextManager[Step]], shape: Shape) -> Count:
    """What the optimizer does in the second step."""
    count = Count()
    watch = Watched(count, dist.get_rank() if dist.is_initialized() else 0, shape.ranks)

    def counted(work: Callable[[], Any]) -> Any:
        with Reads(count), watch:
            return work()

    def inside(function: Callable[[], Any]) -> Any:
        count.calls += 1
        watch.inside = True
        try:
            return function()
        finally:
            watch.inside = False

    with make() as step:
        step(lambda work: work())
        with around_newton_schulz(inside):
            step(counted)
    return count


def run_rank(rank: int, shape: Shape, engines: Sequence[str], batched: bool, folder: str, messages: Any) -> None:
    """All systems of ``engines`` on one rank, called on all of them."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    torch._dynamo.config.disable = True
    if batched:
        IMMEDIATE.clear()
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(shape.ranks))
    os.environ["LOCAL_SIZE"] = str(shape.ranks)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=shape.ranks)
    for engine, by_name in systems(shape).items():
        for name, make in by_name.items() if engine in engines else ():
            try:
                count: Any = count_step(make, shape)
            except Exception as error:
                if name == "ours":
                    raise
                count = f"{type(error).__name__}: {error}"
            gathered: list[Any] = [None] * shape.ranks
            dist.all_gather_object(gathered, count)
            if rank == 0:
                messages.put((engine, name, gathered))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Row:
    """A system's figures: those of the rank with most operations."""

    engine: str
    ranks: int
    system: str
    matrices: int
    count: Count

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "count": vars(self.count)}

    def cells(self) -> list[str]:
        count = self.count
        outside, inside = count.operations.total() / self.matrices, count.newton_schulz.total() / self.matrices
        products = sum(count.newton_schulz[name] for name in PRODUCTS)
        each = f"{products / count.calls:.0f} x {count.calls}" if count.calls else ""
        sent = [str(count.collectives), f"{count.sent_bytes / 1e6:.2f}"]
        if self.system == DEEPSPEEDS:  # outside the optimizer, in ZeRO's wrapper
            sent = ["", ""]
        shares = [f"{outside + inside:.1f}", f"{outside:.1f}", f"{inside:.1f}"]
        return [*shares, each, str(count.host_reads), *sent, str(count.allocations)]


def table(rows: Sequence[Row]) -> Table:
    drawn = Table(title=f"One optimizer step of {rows[0].matrices} matrices", title_justify="left")
    for heading in ("engine", "ranks", "system"):
        drawn.add_column(heading, justify="right" if heading == "ranks" else "left")
    headings = ("operations\na matrix", "\noutside NS", "\nin NS", "NS: products\nx batches", "host\nreads")
    for heading in (*headings, "collec-\ntives", "sent,\nMB", "alloca-\ntions"):
        drawn.add_column(heading, justify="right")
    for row in rows:
        drawn.add_row(row.engine, str(row.ranks), row.system, *row.cells())
    return drawn


def run(shape: Shape, engines: Sequence[str], batched: bool, console: Console) -> list[Row]:
    messages = mp.get_context("spawn").SimpleQueue()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = (shape, engines, batched, folder, messages)
        ranks = mp.spawn(run_rank, arguments, nprocs=shape.ranks, join=False)
        over = False
        while not over:
            over = ranks.join(timeout=0.1)  # raises what a rank raised
            while not messages.empty():
                engine, name, counts = messages.get()
                wrong = next((count for count in counts if isinstance(count, str)), None)
                if wrong is None:
                    most = max(counts, key=lambda count: count.launches)
                    rows.append(Row(engine, shape.ranks, name, shape.matrices, most))
                else:
                    console.print(f"{name} on {shape.ranks} ranks of {engine} is left out: {wrong}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES, metavar="{" + ",".join(ENGINES) + "}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--one-by-one", action="store_true", help="count as on a CPU: matrix by matrix")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    console = Console(width=150 if not Console().is_terminal else None, highlight=False)
    rows: list[Row] = []
    for ranks in options.ranks:
        rows += run(Shape(options.layers, options.width, ranks), options.engine, not options.one_by_one, console)
    rows.sort(key=lambda row: (ENGINES.index(row.engine), row.ranks))
    console.print(table(rows))
    console.print(
        "Of the rank with most operations. NS: Newton-Schulz with its normalization; a batch has equal shapes."
    )
    for missing in (import_dion(), import_deepspeed()):
        if isinstance(missing, str):
            console.print(missing)
    if options.json:
        options.json.write_text(json.dumps([row.figures() for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
