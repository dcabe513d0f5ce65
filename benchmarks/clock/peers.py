"""Peers' steps on the same clock: their own code on tensors without memory, recorded and priced like this package.

torch.optim.Muon and dion.Muon run whole, on the DTensors of FSDP2 or on whole matrices on every rank. DeepSpeed's
engine needs a GPU to begin with; of it run the methods that update matrices, on an engine that is not initialized.
Compiled functions run as they are written. Rows are predictions.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from benchmarks.clock.play import Rates, play
from benchmarks.clock.record import Event, Record, Start, Tracer, Wait, Work
from benchmarks.public_models import load, study
from benchmarks.record import write
from benchmarks.rehearsal.absent_gpu import DEVICE, absent_gpu, pretended, replaced
from benchmarks.step_systems import MUON, imported
from lwopt_backend.engines.fsdp2.plan import in_rows, over_all_ranks
from lwopt_backend.plan.cost import CLUSTERS, newton_schulz_flops
from lwopt_backend.planner.study import Study

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Records = Iterable[tuple[Record, int]]  # the distinct ones of all ranks, each with the ranks that have it
GRADS = torch.bfloat16
HANDLED = ("all_to_all", "all_gather", "all_gather_into_tensor")


@contextmanager
def scene(rank: int, ranks: int) -> Iterator[Tracer]:
    """Be ``rank`` of ``ranks`` on a GPU that is not there."""
    tracer = Tracer()

    def handled(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = start(*args, **kwargs)
        return work if work is None else tracer.waiting(work)

    with ExitStack() as stack:
        stack.enter_context(pretended(rank, ranks, lambda mine, count: [mine] * count))
        stack.enter_context(absent_gpu(tracer))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name in HANDLED:
            stack.enter_context(replaced(dist, name, partial(handled, getattr(dist, name))))
        yield tracer


# torch.optim and those that are used like it.


def stepped(make: Callable[..., torch.optim.Optimizer], sharded: bool, shapes: Shapes, ranks: int) -> Records:
    """The second step of an optimizer. Rank 0 stores the most rows of every matrix, so all are played as rank 0."""
    with scene(0, ranks) as tracer:
        mesh = over_all_ranks(DEVICE.type, ranks, 0)
        new: Callable[[Shape], Tensor] = partial(torch.empty, dtype=GRADS, device=DEVICE)
        if sharded:
            new = lambda shape: in_rows(shape, GRADS, mesh)  # noqa: E731
        params = [nn.Parameter(new(shape)) for shape in shapes]
        optimizer = make(params, mesh)
        for begin in (lambda: None, tracer.begin):
            for param in params:
                param.grad = new(param.shape)
            begin()
            optimizer.step()
        return [(tracer.end(), ranks)]


def torchs(params: list[Tensor], mesh: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, **MUON)


def dions(params: list[Tensor], mesh: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = imported("dion").Muon(params, distributed_mesh=mesh)
    return made


# DeepSpeed.


@contextmanager
def deepspeeds(rank: int, ranks: int) -> Iterator[tuple[Tracer, Any]]:
    """A scene with DeepSpeed's communication, and its Newton-Schulz in the dtypes that it takes on a GPU."""
    imported("deepspeed").utils.logger.setLevel(logging.ERROR)
    muon = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    comm = importlib.import_module("deepspeed.comm.comm")
    dtypes = {"gram": torch.float16, "standard": torch.bfloat16}
    with (
        scene(rank, ranks) as tracer,
        replaced(comm, "cdb", dist),  # DeepSpeed's own starts with a GPU, and calls the functions of torch's
        replaced(muon, "ns_compute_dtype", lambda method="gram": dtypes[method]),
    ):
        yield tracer, importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def bare(module: str, name: str, **attributes: Any) -> Any:
    """An engine of DeepSpeed's that is not initialized."""
    kind = getattr(importlib.import_module(f"deepspeed.runtime.zero.{module}"), name)
    found = kind.__new__(kind)
    vars(found).update(attributes)
    return found


def muon_groups(params: list[Tensor], method: str) -> list[dict[str, Any]]:
    for param in params:
        param.use_muon = True  # type: ignore[attr-defined]
    return [{"params": params, "use_muon": True, "ns_method": method, **MUON}]


def zero12(method: str, shapes: Shapes, ranks: int) -> Records:
    """ZeRO 1 and 2: each rank updates every matrix of which its partition has a part. There are no collectives."""
    found: Counter[Record] = Counter()
    with deepspeeds(0, ranks) as (tracer, module):
        params = [nn.Parameter(torch.empty(shape, dtype=GRADS, device=DEVICE)) for shape in shapes]
        optimizer = module.MuonWithAuxAdam(muon_groups(params, method))
        ordered = optimizer.param_groups[0]["params"]
        numel = 2 * math.ceil(sum(param.numel() for param in params) / (2 * ranks))
        for rank in range(ranks):
            flat = nn.Parameter(torch.zeros(numel, device=DEVICE))
            optimizer.param_groups[0]["params"], optimizer.state = [flat], {flat: {}}
            engine = bare(
                "stage_1_and_2",
                "DeepSpeedZeroOptimizer",
                optimizer=optimizer,
                round_robin_bit16_padding=[[0]],
                groups_lacking_loss_scale=set(),
                flatten=_flatten_dense_tensors,
                _muon_pending_momentum={},
            )
            mine, _, first = engine.get_partition_info(ordered, numel, rank)
            for begin in (lambda: None, tracer.begin):
                engine.all_grad_tensors = {0: [torch.empty_like(param) for param in mine]}
                begin()
                grad = engine.get_flat_partition(mine, first, numel, GRADS, DEVICE, 0)
                engine._commit_muon_momentum()
                flat.grad = grad.to(torch.float32)
                optimizer.step()
            found[tracer.end()] += 1
    return found.items()


def zero3(method: str, shapes: Shapes, ranks: int) -> Records:
    """ZeRO 3: buckets of matrices are gathered with their momentum, and updated in rounds of one matrix a rank."""
    found: Counter[Record] = Counter()
    gathers: dict[Any, list[Event]] = {}
    for rank in range(ranks):
        record = _zero3(method, shapes, rank, ranks, gathers)
        if not any(isinstance(event, Work) and event.flops for event in record):
            found[record] += ranks - rank  # rounds are filled from rank 0 on, so later ranks have no matrix, either
            break
        found[record] += 1
    return found.items()


def partitioned(shapes: Shapes, ranks: int) -> list[Tensor]:
    """Parameters as zero.Init leaves them, which keep no order of sizes."""
    params: list[Tensor] = [nn.Parameter(torch.empty(0, dtype=GRADS, device=DEVICE)) for _ in shapes]
    for number, (param, shape) in enumerate(zip(params, shapes)):
        numel = math.prod(shape)
        part = partial(int, math.ceil(numel / ranks))
        vars(param).update(ds_shape=torch.Size(shape), ds_numel=numel, ds_id=number, partition_numel=part)
    return params


def gathered_once(engine: Any, tracer: Tracer, known: dict[Any, list[Event]]) -> Callable[..., list[Tensor]]:
    """The engine's gather of whole matrices, which does the same on every rank: run once for some shapes, and
    recorded again for others like them. A gather makes a copy for every matrix and rank."""
    gather = engine._partitioned_buffers_all_gather

    def gathered(params: Sequence[Any], buffers: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        tracer.flush()
        key, begin, number = tuple(param.ds_shape for param in params), len(tracer.events), 0
        if key not in known:
            found: list[Tensor] = gather(params, buffers, dtype)
            tracer.flush()
            known[key] = tracer.events[begin:]
            return found
        for event in known[key]:
            if isinstance(event, Start):
                number = tracer.start(event)
            else:
                tracer.add(replace(event, start=number) if isinstance(event, Wait) else event)
        return [torch.empty(param.ds_shape, dtype=dtype, device=DEVICE) for param in params]

    return gathered


def _zero3(method: str, shapes: Shapes, rank: int, ranks: int, gathers: dict[Any, list[Event]]) -> Record:
    with deepspeeds(rank, ranks) as (tracer, module):
        params = partitioned(shapes, ranks)
        optimizer = module.MuonWithAuxAdam(muon_groups(params, method))
        config = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
        engine = bare(
            "stage3",
            "DeepSpeedZeroOptimizer_Stage3",
            optimizer=optimizer,
            use_muon=True,
            muon_beta=MUON["momentum"],
            muon_ns_method=method,
            offload_optimizer=False,
            save_muon_momentum_buffer_in_memory=False,
            sub_group_size=config.sub_group_size,
            reduce_bucket_size=config.reduce_bucket_size,
            communication_data_type=GRADS,
            gradient_accumulation_dtype=GRADS,
            sub_groups_lacking_loss_scale=set(),
            dp_process_group=dist.group.WORLD,
            device=DEVICE,
            torch_autocast_gradscaler=None,
            zenflow=None,
            swap_optimizer=False,
            flatten=_flatten_dense_tensors,
            _muon_allgather_buffers=OrderedDict(),
            _muon_allgather_buffer_bytes=0,
            _muon_allgather_max_cached_bytes=2**28,
        )
        groups = engine._create_fp16_sub_groups(optimizer.param_groups[0]["params"])
        count = range(len(groups))
        flats = [nn.Parameter(torch.zeros(sum(p.partition_numel() for p in group), device=DEVICE)) for group in groups]
        vars(engine).update(
            fp16_groups=groups,
            fp32_partitioned_groups_flat=flats,
            fp16_partitioned_groups_flat_numel=[flat.numel() for flat in flats],
            sub_groups_using_muon=[True for _ in count],
            sub_group_process_groups=[dist.group.WORLD for _ in count],
            sub_group_to_group_id=dict.fromkeys(count, 0),
            grad_position={
                engine.get_param_id(param): (number, sum(p.partition_numel() for p in group[:place]))
                for number, group in enumerate(groups)
                for place, param in enumerate(group)
            },
        )
        engine._partitioned_buffers_all_gather = gathered_once(engine, tracer, gathers)
        for number, flat in enumerate(flats):
            engine._create_momentum_buffer(flat.numel(), number, 0)
        engine.averaged_gradients = {
            number: [torch.empty(p.partition_numel(), dtype=GRADS, device=DEVICE) for p in group]
            for number, group in enumerate(groups)
        }
        tracer.begin()
        engine._apply_muon_to_accumulated_grads()
        for number in count:
            engine._prepare_sub_group(number, None)
            engine._optimizer_step(number)
        return tracer.end()


# The table.

OURS = "ours"
GRAM = "ours, gram_aspect=1.5"
TORCHS, DIONS, DEEPSPEEDS = "torch.optim.Muon", "dion.Muon", "DeepSpeed's Muon"
PEERS: dict[str, dict[str, Callable[[Shapes, int], Records]]] = {
    "fsdp2": {TORCHS: partial(stepped, torchs, True), DIONS: partial(stepped, dions, True)},
    "zero1": {DEEPSPEEDS: partial(zero12, "gram"), f"{DEEPSPEEDS}, standard": partial(zero12, "standard")},
    "zero3": {DEEPSPEEDS: partial(zero3, "gram"), f"{DEEPSPEEDS}, standard": partial(zero3, "standard")},
    "owned": {f"{TORCHS} on every rank": partial(stepped, torchs, False)},
}
ENGINES = {"fsdp2": "FSDP2", "zero1": "ZeRO 1, 2", "zero3": "ZeRO 3", "owned": "in place of DDP"}
CELLS = (("llama3.1-8b", 8), ("llama3.1-8b", 64), ("llama3.1-70b", 64))
NEEDS = {DIONS: "dion", DEEPSPEEDS: "deepspeed"}


@dataclass(frozen=True)
class Row:
    """A predicted step. ``products`` is those of the busiest rank; ``redundancy`` those of all ranks, over those of
    one standard iteration of each matrix. ``launches`` are the busiest rank's."""

    model: str
    ranks: int
    engine: str
    system: str
    ms: float
    over_ours: float
    products_ms: float
    redundancy: float
    collectives: int
    wire_ms: float
    launches: int


def rows(recorded: Callable[[Study], Records], models: Sequence[str] = ()) -> Iterator[Row]:
    """The rows of all cells, or of those of ``models``; ``recorded`` has our records of a study."""
    for model, ranks in CELLS:
        for engine in PEERS if not models or model in models else ():
            ours: float | None = None
            for name, options in ((OURS, {}), (GRAM, {"matrix": {"name": "muon", "gram_aspect": 1.5}})):
                row = _row(model, ranks, engine, name, list(recorded(study(model, engine, ranks, options=options))))
                ours = ours or row.ms
                yield replace(row, over_ours=row.ms / ours)
            for name, peer in PEERS[engine].items():
                if isinstance(missing := imported(NEEDS.get(name.partition(",")[0], "torch")), str):
                    print(missing, file=sys.stderr)
                    continue
                row = _row(model, ranks, engine, name, list(peer([shape for _, shape in load(model)], ranks)))
                yield replace(row, over_ours=row.ms / ours)


def _row(model: str, ranks: int, engine: str, name: str, records: list[tuple[Record, int]]) -> Row:
    rates = Rates.of(CLUSTERS["h100-8x-ib"])
    played = play(records, rates)
    works = [([event for event in record if isinstance(event, Work)], count) for record, count in records]
    busiest, _ = works[played.busiest]
    done = sum(event.flops * count for some, count in works for event in some) / sum(count for _, count in works)
    needed = sum(newton_schulz_flops(shape) for _, shape in load(model))
    return Row(
        model,
        ranks,
        ENGINES[engine],
        name,
        played.seconds * 1e3,
        math.nan,
        sum(event.flops for event in busiest) / rates.machine.flops_per_second * 1e3,
        done * ranks / needed,
        len(played.trips),
        played.wire * 1e3,
        sum(event.calls for event in busiest),
    )


HEADINGS = ("model, ranks", "engine", "system", "ms", "over this package", "products ms", "redundancy", "collectives")
HEADINGS += ("wire ms", "launches")


def show(recorded: Callable[[Study], Records], models: Sequence[str], results: Path | None) -> None:
    """Print the rows in Markdown, and write them to ``results``."""
    print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}")
    found = []
    for row in rows(recorded, models):
        shown = (f"{row.ms:.1f}", f"{row.over_ours:.2f}", f"{row.products_ms:.1f}", f"{row.redundancy:.2f}")
        last = (str(row.collectives), f"{row.wire_ms:.1f}", str(row.launches))
        print(f"| {' | '.join((f'{row.model}, {row.ranks}', row.engine, row.system, *shown, *last))} |", flush=True)
        found.append(asdict(row))
    if results:
        write(results, found)
