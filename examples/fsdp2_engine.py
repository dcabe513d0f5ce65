"""FSDP2 as the example's engine: ``fully_shard`` and plain torch, with ``LayerWiseOptimizer`` as the optimizer."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from run_folder import write_whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.config.options import Count, parse
from lwopt_backend.rules import option


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The file given by ``--config``. Names are DeepSpeed's; ``optimizer`` is what LayerWiseOptimizer takes."""

    train_micro_batch_size_per_gpu: Count
    gradient_accumulation_steps: int = option(1, "micro-batches of a step", ge=1)
    gradient_clipping: float = option(1.0, "the largest norm of all gradients together; 0 does not clip", ge=0)
    optimizer: dict[str, Any]

    @classmethod
    def read(cls, path: str) -> TrainingConfig:
        """Raises SystemExit for a file that is not JSON, and for unknown or wrong keys."""
        try:
            content = json.loads(Path(path).read_text())
            if not isinstance(content, dict):
                raise ValueError(f"--config {path}: expected an object, found {content!r}")
            return parse(cls, content, f"--config {path}")
        except json.JSONDecodeError as error:
            raise SystemExit(f"--config {path} is not JSON: {error}") from None
        except ValueError as error:
            raise SystemExit(str(error)) from None


class FSDP2Engine:
    """Trains as ``args.config`` says. Made on all ranks that the launcher started."""

    def __init__(self, args: argparse.Namespace, make_model: Callable[[], nn.Module], schedule: Callable[[int], float]):
        config = TrainingConfig.read(args.config)
        self.device = _start_process_group()
        self.model = self._shard(make_model())
        try:
            self.optimizer = LayerWiseOptimizer(self.model, **config.optimizer)
        except ValueError as error:
            raise SystemExit(f"--config {args.config}, 'optimizer': {error}") from None
        self._scheduler = LambdaLR(self.optimizer, schedule)
        self._clipping = config.gradient_clipping or math.inf
        self._norm = torch.zeros(())
        self.micro_batch = config.train_micro_batch_size_per_gpu
        self.accumulation = config.gradient_accumulation_steps

    def _shard(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        model.to(self.device)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def train_step(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for part, batch in enumerate(batches, start=1):
            self.model.set_requires_gradient_sync(part == self.accumulation)
            loss = self.model(*(rows.to(self.device) for rows in batch)) / self.accumulation
            loss.backward()
            total += loss.detach()
        self._norm = self.optimizer.clip_grad_norm_(self._clipping)  # torch's knows no ``clip_groups``
        self.optimizer.step()
        self._scheduler.step()
        self.optimizer.zero_grad()
        return total

    def grad_norm(self) -> float:
        return self._norm.item()

    def save(self, folder: Path, step: int) -> None:
        """Write ``folder/step<n>`` under another name first, rename it, and point ``folder/latest`` to it last."""
        path, unfinished = folder / f"step{step}", folder / f".step{step}.tmp"
        is_first = dist.get_rank() == 0
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier()
        dcp.save(self._state(), checkpoint_id=unfinished)  # ends when all ranks have written
        if is_first:
            shutil.rmtree(path, ignore_errors=True)
            os.replace(unfinished, path)
            write_whole(folder / "latest", path.name.encode())
        dist.barrier()

    def load(self, folder: Path) -> int | None:
        latest = folder / "latest"
        if not latest.exists():
            return None
        state = self._state()
        dcp.load(state, checkpoint_id=folder / latest.read_text())
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return self._scheduler.last_epoch

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self._scheduler}


def _start_process_group() -> torch.device:
    """Join the ranks that the launcher started; the device of this one."""
    if "RANK" not in os.environ:
        raise SystemExit("--engine fsdp2 is started by `torchrun --nproc_per_node 2 ...`, also on one process")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
