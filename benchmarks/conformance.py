"""Muons on several ranks, compared with the same rule in one process: a cell, or the table of docs/peers.md.

    python -m benchmarks.conformance --peer torch --case uneven
    python -m benchmarks.conformance --json benchmarks/results/conformance.json --page docs/peers.md

A cell trains small matrices in fp32 for four steps on 2 or 4 ranks, which are processes here over gloo. All ranks have
the same gradients, so that their mean has the same bits as in one process, which steps the peer's own rule
(torch.optim.Muon's for this package and torch) on whole matrices.

A number                the largest ||W - W'|| / ||W' - W0|| of a matrix on any rank, W' being those of one process
trains something else   the same, above 0.05, and nothing said so: roundings in bf16 give up to 0.03
refused                 an error that the peer raises on all ranks, with a message
crashes, hangs          any other error; no end within two minutes
-                       there is no such case, for the reason that is printed

Peers come from the package index, or from a folder that is named. One that is not installed is left out, and what would
install it is printed. ``--json`` keeps what the file says of other cells.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import itertools
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
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import record

STEPS, SAVED_AFTER, BOUND = 4, 2, 0.05
SECONDS, GRACE_SECONDS = 120, 10  # of a cell's phase, and then for the other ranks, when one has failed
IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")  # once, and not by every rank
REFERENCE = "one process"
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
MUON: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM}
Gradients = Mapping[str, Tensor]
Make = Callable[[Any, DeviceMesh | None], torch.optim.Optimizer]
Row = dict[str, Any]  # a cell: its peer, case and verdict, the difference, what was said, and the version


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


# How a system trains.


class InTorch:
    """Trains in plain PyTorch: on a mesh by ``fully_shard``, or on replicas by DDP, as ``sharded`` says."""

    def __init__(self, make: Make, model: Matrices, case: Case, sharded: bool) -> None:
        self.case, self.model, mesh = case, model, None
        self.called: nn.Module = self.model
        if sharded:
            sizes = case.mesh if dist.get_world_size() == case.ranks else {"shards": dist.get_world_size()}
            mesh = whole = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            if "tensor" in sizes:
                mesh = whole["data"]
                for number, matrix in enumerate(self.model.matrices.values()):  # by columns and by rows in turn
                    cut = distribute_tensor(matrix.weight.data, whole["tensor"], [Shard(number % 2)])
                    matrix.weight = nn.Parameter(cut)
            fully_shard(self.model, mesh=mesh)
        elif dist.get_world_size() > 1:
            self.called = DistributedDataParallel(self.model, find_unused_parameters=bool(case.without))
        self.optimizer = make(self.model, mesh)

    def step(self, micro_batches: Sequence[Gradients]) -> None:
        for gradients in micro_batches:
            (self.called(gradients) / len(micro_batches)).backward()
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        params = self.model.named().items()
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in params}

    def state(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint; on replicas, of which that would take one rank's, for every rank's file."""
        get = get_optimizer_state_dict if self.called is self.model else lambda model, optimizer: optimizer.state_dict()
        return {"model": self.model.state_dict(), "optimizer": get(self.model, self.optimizer)}

    def save(self, folder: Path) -> None:
        if self.called is self.model:
            dcp.save(self.state(), checkpoint_id=folder)
        else:
            torch.save(self.state(), folder / f"{dist.get_rank()}.pt")

    def load(self, folder: Path) -> None:
        if self.called is self.model:
            dcp.load(found := self.state(), checkpoint_id=folder)
            set_optimizer_state_dict(self.model, self.optimizer, found["optimizer"])
        else:  # a new rank takes the first's
            found = torch.load(min(folder.glob(f"{dist.get_rank()}.pt"), default=folder / "0.pt"))
            self.optimizer.load_state_dict(found["optimizer"])
        self.model.load_state_dict(found["model"])


def model_parallel(shards: int) -> Any:
    """What DeepSpeed calls an mpu, as Megatron's: neighbours share every matrix."""
    count, rank = dist.get_world_size(), dist.get_rank()
    of_model = [dist.new_group([*range(first, first + shards)]) for first in range(0, count, shards)][rank // shards]
    of_data = [dist.new_group([*range(first, count, shards)]) for first in range(shards)][rank % shards]
    found: dict[str, Any] = {}
    for of, group in (("model", of_model), ("data", of_data)):
        values = {"group": group, "rank": dist.get_rank(group), "world_size": dist.get_world_size(group)}
        found |= {f"get_{of}_parallel_{name}": lambda value=value: value for name, value in values.items()}
    return types.SimpleNamespace(**found)


class UnderDeepSpeed:
    """Trains with an engine of DeepSpeed. A ``universal`` one loads what ``convert`` makes of other ranks' folder."""

    def __init__(self, peer: Peer, model: Matrices, case: Case, universal: bool) -> None:
        self.deepspeed, self.peer, self.case, self.mpu = importlib.import_module("deepspeed"), peer, case, None
        self.stage, self.universal = peer.stage, universal and bool(peer.stage)
        entry = {"type": "Muon", "params": THEIRS}
        if peer.distribution != "deepspeed":
            importlib.import_module("lwopt_backend.integrations.deepspeed_zero").register()
            entry = {"type": "LayerWiseMuon", "params": {**OURS, "atoms": stacks(model)}}
        self.deepspeed.utils.logger.setLevel(logging.ERROR)
        self.deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled first
        zero: dict[str, Any] = {"stage": peer.stage, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
            zero["reduce_scatter"] = entry["type"] != "Muon"  # which refuses the default
        if "copies" in case.mesh:
            zero["zero_hpz_partition_size"] = case.mesh["shards"]
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": case.micro_batches}
        config |= {"gradient_clipping": case.clip, "zero_optimization": zero, "optimizer": entry}
        config |= {"steps_per_print": 1_000_000, "checkpoint": {"load_universal": self.universal}}
        if "tensor" in case.mesh:
            self.mpu = model_parallel(case.mesh["tensor"])
            for number, matrix in enumerate(model.matrices.values()):
                matrix.weight.data = self._cut(matrix.weight.data, number)
                matrix.weight.tensor_model_parallel, matrix.weight.partition_dim = True, number % 2
        self.engine, *_ = self.deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config, mpu=self.mpu
        )

    def _cut(self, whole: Tensor, number: int) -> Tensor:
        rank, count = self.mpu.get_model_parallel_rank(), self.mpu.get_model_parallel_world_size()
        return whole.chunk(count, number % 2)[rank].clone()

    def step(self, micro_batches: Sequence[Gradients]) -> None:
        for gradients in micro_batches:
            if self.mpu is not None:
                gradients = {name: self._cut(whole, number) for number, (name, whole) in enumerate(gradients.items())}
            self.engine.backward(self.engine(gradients))
            self.engine.step()

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for number, (name, param) in enumerate(self.engine.module.named().items()):
            weight = self.deepspeed.utils.safe_get_full_fp32_param(param) if self.stage else param.detach()
            if self.mpu is not None:
                parts = [torch.empty_like(weight) for _ in range(self.mpu.get_model_parallel_world_size())]
                dist.all_gather(parts, weight.contiguous(), group=self.mpu.get_model_parallel_group())
                weight = torch.cat(parts, number % 2)
            found[name] = weight.clone()
        return found

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="saved")
        dist.barrier()
        if self.stage and self.case.resumed_on != self.case.ranks and dist.get_rank() == 0:
            self.peer.convert(folder)

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder / "universal" if self.universal else folder))


def by_deepspeed(folder: Path) -> None:
    """Its own conversion to a universal checkpoint."""
    convert = importlib.import_module("deepspeed.checkpoint.ds_to_universal").main
    folders = {"input_folder": str(folder / "saved"), "output_folder": str(folder / "universal" / "saved")}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    convert(types.SimpleNamespace(**folders, **workers, inject_missing_state=True))


def by_ours(folder: Path) -> None:
    command = [sys.executable, "-c", "from lwopt_backend.cli import main; main()", "convert", folder]
    subprocess.run([*command, folder / "universal", "--to", "universal"], check=True, capture_output=True)


@dataclass(frozen=True)
class Peer:
    """A system, from a package of the index or a repository (``home``), and its rule ``alone`` if that is another.
    ``sharded`` trains on FSDP2, others on DDP's replicas; ``stage`` is DeepSpeed's. ``dtensors`` takes nothing else,
    also in one process. ``lacks`` says why there is no such case. Errors that ``modules`` raise are refusals.
    """

    modules: str
    make: Make
    distribution: str = ""
    home: str = ""
    alone: Make | None = None
    sharded: bool = True
    dtensors: bool = False
    stage: int | None = None
    convert: Callable[[Path], None] = by_deepspeed
    lacks: Mapping[str, str] = field(default_factory=dict)


def entered(modules: str) -> Any:
    """The last module, without running its parent packages, which import everything."""
    parents = [itertools.accumulate(module.split(".")[:-1], "{}.{}".format) for module in modules.split()]
    for name in itertools.chain(*parents):
        folders = [Path(entry, *name.split(".")) for entry in sys.path]
        if name not in sys.modules and any(found := [str(folder) for folder in folders if folder.is_dir()]):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = found
    return importlib.import_module(modules.split()[-1])


OURS = {**MUON, "include": ["*"], "report": False}
NAMED = {"lr": LR, "weight_decay": DECAY, "mu": MOMENTUM, "nesterov": True}  # by dion, and xtuner after it
THEIRS = {**MUON, "muon_lr": LR, "adam_lr": LR, "ns_method": "standard", "torch_adam": True}


def groups(model: Matrices, **more: Any) -> list[dict[str, Any]]:
    """One of every shape: some peers send those of a group at once, and gloo only equal shapes."""
    by_shape = {p.shape: [q for q in model.parameters() if q.shape == p.shape] for p in model.parameters()}
    return [{"params": params, **MUON, **more} for params in by_shape.values()]


def plain(module: str, **options: Any) -> Make:
    return lambda model, mesh: entered(module).Muon(model.parameters(), **options)


def grouped(module: str, name: str = "Muon", **options: Any) -> Make:
    return lambda model, mesh: getattr(entered(module), name)(groups(model, **options))


def ours(model: Matrices, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    return importlib.import_module("lwopt_backend").LayerWiseOptimizer(model, **OURS, atoms=stacks(model))


def stacks(model: Matrices) -> dict[str, str]:
    """Ours is told which parameters have a matrix an expert."""
    return {name: "stack" for name, param in model.named_parameters() if param.ndim == 3}


def deepspeeds(model: Matrices, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    module = importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    return module.MuonWithAuxAdam(groups(model, use_muon=True, ns_method="standard"))


def dions(model: Matrices, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    over = mesh["shards"] if mesh is not None and mesh.ndim > 1 else mesh  # as its README says for HSDP
    more = {"distributed_mesh": over, "adjust_lr": "rms_norm", "use_polar_express": False}
    return importlib.import_module("dion").Muon(model.parameters(), **NAMED, **more)


def muoniums(model: Matrices, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    module = importlib.import_module("muonium.orthogonalize.orthogonalize")
    module._get_orthogonalization_fn = lambda strategy, use_triton: module.ns_loop  # its kernel is for GPUs
    more = {"use_cautious_wd": False, "orthogonalization_strategy": "newton_schulz", "foreach": False}
    return importlib.import_module("muonium").Muon(model.parameters(), lr=LR, wd=DECAY, momentum=MOMENTUM, **more)


def heavyballs(model: Matrices, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    importlib.import_module("heavyball.utils").compile_mode = None
    return plain("heavyball", lr=LR, weight_decay=DECAY, betas=(MOMENTUM, 0.99))(model, mesh)


TORCH = plain("torch.optim", **MUON)
LWOPT = ("lwopt_backend lwopt_backend.integrations", ours, "lwopt-backend")
LACKS: list[dict[str, str]] = [*[{"hsdp": "ZeRO has no copies of shards before stage 3"}] * 3, {}]  # by stage
REPLICAS = dict.fromkeys(("hsdp", "tp"), "every rank has all parameters")
ON_REPLICAS = grouped("pytorch_optimizer", "DistributedMuon", use_muon=True)
IN_VEOMNI = grouped("veomni.optim.muon", "DistributedMuon", ns_implementation="std")
IN_XTUNER = plain("xtuner.v1.utils.dtensor xtuner.v1.optim.muon", **NAMED, adjust_lr="none")

PEERS: dict[str, Peer] = {
    "ours-fsdp2": Peer(*LWOPT, alone=TORCH),
    **{f"ours-zero{n}": Peer(*LWOPT, alone=TORCH, stage=n, convert=by_ours, lacks=LACKS[n]) for n in (1, 2, 3)},
    "torch": Peer("torch.optim", TORCH, "torch"),
    **{f"deepspeed-zero{n}": Peer("deepspeed", deepspeeds, "deepspeed", stage=n, lacks=LACKS[n]) for n in range(4)},
    "pytorch_optimizer": Peer("pytorch_optimizer", ON_REPLICAS, "pytorch_optimizer", sharded=False, lacks=REPLICAS),
    "dion": Peer("dion", dions, home="microsoft/dion"),
    "muon-fsdp2": Peer("muon_fsdp2", grouped("muon_fsdp2", use_muon=True), "muon-fsdp2", dtensors=True),
    "muonium": Peer("muonium", muoniums, "muonium"),
    "heavyball": Peer("heavyball", heavyballs, "heavyball"),
    "veomni": Peer("veomni", IN_VEOMNI, home="ByteDance-Seed/VeOmni"),
    "xtuner": Peer("xtuner", IN_XTUNER, home="InternLM/xtuner", dtensors=True),
    "pithtrain": Peer("pithtrain", plain("pithtrain.modules.optimizer", **MUON), home="mlc-ai/pith-train"),
}


# On a rank.


def run_rank(rank: int, ranks: int, phase: str, peer: str, case: str, folder: str, sources: dict[str, str]) -> None:
    """Train and write the weights, or how that failed."""
    said = Path(folder) / f"{phase}.{rank}"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks))
    sys.path[:0] = sources.values()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1), os.dup2(1, 2)
    try:
        found: Any = train(rank, ranks, phase, PEERS[peer], CASES[case], Path(folder))
        path = f"{said}.weights"
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".replace(folder, "FOLDER").split())
        found = {"at": time.time(), "error": text[:400], "refused": refuses(error, PEERS[peer].modules)}
        path = f"{said}.error"
    torch.save(found, f"{said}.new")
    os.replace(f"{said}.new", path)
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
    trainer: InTorch | UnderDeepSpeed
    if apart:
        trainer = InTorch(peer.alone or peer.make, model, case, peer.dtensors)
    elif peer.stage is None:
        trainer = InTorch(peer.make, model, case, peer.sharded)
    else:
        trainer = UnderDeepSpeed(peer, model, case, universal=ranks != case.ranks)
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


class Failed(Exception):
    """Has the verdict, and what was said."""


def run_phase(phase: str, ranks: int, given: tuple[Any, ...]) -> list[dict[str, Tensor]]:
    """The weights of every rank, called here on none of them. Raises Failed."""
    folder, context = Path(given[2]), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *["deepspeed"] * (PEERS[given[0]].stage is not None)])
    started = [context.Process(target=run_rank, args=(rank, ranks, phase, *given)) for rank in range(ranks)]
    for process in started:
        process.start()
    end = time.monotonic() + SECONDS
    while any(process.is_alive() for process in started) and time.monotonic() < end:
        if any(folder.glob(f"{phase}.*.error")) or any(process.exitcode for process in started):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    codes = [process.exitcode for process in started if process.exitcode]
    for process in started:
        process.kill(), process.join()
    where = "" if phase == "trained" else f" ({phase})"
    found = [torch.load(path) for path in folder.glob(f"{phase}.*.error")]
    if found:
        first = min(found, key=lambda error: error["at"])
        refused = phase != REFERENCE and len(found) == ranks and all(error["refused"] for error in found)
        raise Failed("refused" if refused else "crashes", first["error"] + where)
    weights = sorted(folder.glob(f"{phase}.*.weights"))
    if len(weights) < ranks:
        how = f"exit code {codes[0]}" if codes else f"no end within {SECONDS} s"
        raise Failed("crashes" if codes else "hangs", how + where)
    return [torch.load(path) for path in weights]


def run_cell(name: str, case_name: str, sources: dict[str, str]) -> Row:
    peer, case = PEERS[name], CASES[case_name]
    row: Row = {"peer": name, "case": case_name, "version": version(name, sources), "verdict": "-", "difference": None}
    if case_name in peer.lacks:
        return {**row, "said": peer.lacks[case_name]}
    with tempfile.TemporaryDirectory() as folder:
        given = (name, case_name, folder, sources)
        try:
            (expected,) = run_phase(REFERENCE, 1, given)
            found = run_phase("trained", case.ranks, given)
            if case.resumed_on:
                found = run_phase("resumed", case.resumed_on, given)
        except Failed as failed:
            return {**row, "verdict": failed.args[0], "said": failed.args[1]}
    start = experts_apart({key: p.detach() for key, p in Matrices(case, apart=False).named().items()})
    pairs = [(weights[key], w, start[key]) for weights in map(experts_apart, found) for key, w in expected.items()]
    differs = [float((weight - w).norm() / (w - before).norm()) for weight, w, before in pairs]
    differ = max(value if math.isfinite(value) else math.inf for value in differs)
    return {**row, "verdict": "a number" if differ <= BOUND else "trains something else", "difference": differ}


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
    lines = list[str]()
    for cases in ([*CASES][:6], [*CASES][6:]):
        cells = [["system", "version", *(CASES[case].about for case in cases)], ["---"] * (2 + len(cases))]
        for peer in dict.fromkeys(row["peer"] for row in kept):
            versions = sorted({row["version"] for row in kept if row["peer"] == peer})
            figures = [shown(rows[peer, case]) if (peer, case) in rows else "" for case in cases]
            cells.append([peer, ", ".join(versions), *figures])
        lines += [*("| " + " | ".join(line) + " |" for line in cells), ""]
    failed = [row for row in kept if row["verdict"] in ("refused", "crashes", "hangs")]
    lines += [f"- {row['peer']}, `--case {row['case']}`: {row['verdict']}, `{row['said'][:200]}`" for row in failed]
    return "\n".join(lines)


def with_table(page: str, rows: Mapping[tuple[str, str], Row]) -> str:
    """The page with the table between its two marks."""
    return record.with_table(page, "conformance", table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", "--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER")
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--source", nargs="+", default=[], metavar="PEER=FOLDER", help="of one that has no package")
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
            row = rows[peer, case] = run_cell(peer, case, sources)
            command = f"python -m benchmarks.conformance --peer {peer} --case {case}"
            print(f"{shown(row):30} {command}  {row.get('said', '')}", flush=True)
    if options.json:
        record.write(options.json, [rows[peer, case] for peer in PEERS for case in CASES if (peer, case) in rows])
    if options.page:
        options.page.write_text(with_table(options.page.read_text(), rows))


if __name__ == "__main__":
    main()
