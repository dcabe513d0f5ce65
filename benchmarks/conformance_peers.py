"""How ``conformance.py`` trains with each system: how it is imported, made, stepped, saved and loaded.

No line of a peer is here. What keeps a peer from running on a CPU is worked around by name: ``torch.compile`` does
nothing, and packages that import their whole trainer are entered at the one module that has the optimizer.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from benchmarks.conformance import Case, Matrices

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
Gradients = Mapping[str, Tensor]
Make = Callable[[Any, DeviceMesh | None], torch.optim.Optimizer]


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
    found = types.SimpleNamespace()
    for of, group in (("model", of_model), ("data", of_data)):
        for name, value in (
            ("group", group),
            ("rank", dist.get_rank(group)),
            ("world_size", dist.get_world_size(group)),
        ):
            setattr(found, f"get_{of}_parallel_{name}", functools.partial(next, itertools.repeat(value)))
    return found


class UnderDeepSpeed:
    """Trains with an engine of DeepSpeed. A ``universal`` one loads what ``convert`` makes of a folder for others."""

    def __init__(self, peer: Peer, model: Matrices, case: Case, universal: bool) -> None:
        self.deepspeed, self.peer, self.case = importlib.import_module("deepspeed"), peer, case
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
        self.mpu = None
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

    def trainer(self, model: Matrices, case: Case, *, elsewhere: bool) -> InTorch | UnderDeepSpeed:
        """``elsewhere`` loads what other ranks have saved."""
        if self.stage is None:
            return InTorch(self.make, model, case, self.sharded)
        return UnderDeepSpeed(self, model, case, elsewhere)

    def reference(self, model: Matrices, case: Case) -> InTorch:
        return InTorch(self.alone or self.make, model, case, self.dtensors)


def entered(modules: str) -> Any:
    """The last module, without running its parent packages, which import everything."""
    parents = [itertools.accumulate(module.split(".")[:-1], "{}.{}".format) for module in modules.split()]
    for name in itertools.chain(*parents):
        folders = [Path(entry, *name.split(".")) for entry in sys.path]
        if name not in sys.modules and any(found := [str(folder) for folder in folders if folder.is_dir()]):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = found
    return importlib.import_module(modules.split()[-1])


MUON: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM}
OURS = {**MUON, "include": ["*"], "report": False}
NAMED = {"lr": LR, "weight_decay": DECAY, "mu": MOMENTUM, "nesterov": True}  # by dion, and xtuner after it
THEIRS = {**MUON, "muon_lr": LR, "adam_lr": LR, "ns_method": "standard", "torch_adam": True}


def groups(model: Matrices, **more: Any) -> list[dict[str, Any]]:
    """One of every shape: some peers send those of a group at once, and gloo only equal shapes."""
    by_shape = {p.shape: [q for q in model.parameters() if q.shape == p.shape] for p in model.parameters()}
    return [{"params": params, **MUON, **more} for params in by_shape.values()]


def plain(module: str, name: str = "Muon", **options: Any) -> Make:
    return lambda model, mesh: getattr(entered(module), name)(model.parameters(), **options)


def grouped(module: str, name: str = "Muon", **options: Any) -> Make:
    return lambda model, mesh: getattr(entered(module), name)(groups(model, **options))


def ours(model: Matrices, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    return importlib.import_module("lwopt_backend").LayerWiseOptimizer(model, **OURS, atoms=stacks(model))


def stacks(model: Matrices) -> dict[str, str]:
    """Ours is told which parameters have a matrix an expert."""
    return {name: "stack" for name, param in model.named_parameters() if param.ndim == 3}


def deepspeeds(model: Matrices, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    return importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer").MuonWithAuxAdam(
        groups(model, use_muon=True, ns_method="standard")
    )


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

PEERS: dict[str, Peer] = {"ours-fsdp2": Peer(*LWOPT, alone=TORCH)}
for _stage in range(1, 4):
    PEERS[f"ours-zero{_stage}"] = Peer(*LWOPT, alone=TORCH, stage=_stage, convert=by_ours, lacks=LACKS[_stage])
PEERS["torch"] = Peer("torch.optim", TORCH, "torch")
for _stage in range(4):
    PEERS[f"deepspeed-zero{_stage}"] = Peer("deepspeed", deepspeeds, "deepspeed", stage=_stage, lacks=LACKS[_stage])
PEERS |= {
    "pytorch_optimizer": Peer("pytorch_optimizer", ON_REPLICAS, "pytorch_optimizer", sharded=False, lacks=REPLICAS),
    "dion": Peer("dion", dions, home="microsoft/dion"),
    "muon-fsdp2": Peer("muon_fsdp2", grouped("muon_fsdp2", use_muon=True), "muon-fsdp2", dtensors=True),
    "muonium": Peer("muonium", muoniums, "muonium"),
    "heavyball": Peer("heavyball", heavyballs, "heavyball"),
    "veomni": Peer("veomni", IN_VEOMNI, home="ByteDance-Seed/VeOmni"),
    "xtuner": Peer("xtuner", IN_XTUNER, home="InternLM/xtuner", dtensors=True),
    "pithtrain": Peer("pithtrain", plain("pithtrain.modules.optimizer", **MUON), home="mlc-ai/pith-train"),
}
