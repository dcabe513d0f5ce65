"""DeepSpeed as the example's engine. The only line that is not plain DeepSpeed is ``deepspeed_zero.register()``."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend.integrations import deepspeed_zero


class DeepSpeedEngine:
    """Trains as ``args.deepspeed_config`` says. Made on all ranks that the launcher started."""

    def __init__(self, args: argparse.Namespace, make_model: Callable[[], nn.Module], schedule: Callable[[int], float]):
        # DeepSpeed 0.19 calls collectives by names that torch 2.13 has renamed; once per process is once too often.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        deepspeed_zero.register()
        deepspeed.init_distributed()
        model = make_model()
        self._engine, *_ = deepspeed.initialize(
            args=args,
            model=model,
            model_parameters=model.parameters(),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, schedule),
        )
        self.model = self._engine.module
        self.optimizer = self._engine.basic_optimizer
        self.device = torch.device(self._engine.device)
        self.micro_batch = self._engine.train_micro_batch_size_per_gpu()
        self.accumulation = self._engine.gradient_accumulation_steps()

    def train_step(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        total = torch.zeros((), device=self.device)
        for batch in batches:
            loss = self._engine(*(rows.to(self.device) for rows in batch))
            self._engine.backward(loss)
            self._engine.step()
            total += loss.detach() / self.accumulation
        return total

    def grad_norm(self) -> float:
        return float(self._engine.get_global_grad_norm())

    def save(self, folder: Path, step: int) -> None:
        self._engine.save_checkpoint(str(folder), tag=f"step{step}", client_state={"step": step})

    def load(self, folder: Path) -> int | None:
        path, state = self._engine.load_checkpoint(str(folder))
        return None if path is None else state["step"]
