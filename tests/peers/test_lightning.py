"""Lightning's Trainer: FSDP2 by its ModelParallelStrategy and ZeRO by its DeepSpeedStrategy on 2 ranks, and owned
storage in one process."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lwopt_backend import LayerWiseOptimizer
from tests.support.command_line import lwopt
from tests.support.launcher import succeeds, torchrun
from tests.support.pages import unpack_page
from tests.support.zero import ADAMW, MUON, Reference, newton_schulz_in_float32

ROWS, STEPS, HALF, CLIP = 4, 6, 3, 0.5  # steps of each of two epochs
OURS = {"matrix": {"name": "muon", "ns_dtype": "float32", **MUON}, "elementwise": {"name": "adamw", **ADAMW}}


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The same rows for any number of ranks, which a loader without shuffling deals out one by one."""

    def __len__(self) -> int:
        return HALF * ROWS

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(24, generator=generator), torch.randint(7, (), generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 7))


def by_torch() -> list[float]:
    """The losses of torch.optim on one process."""
    single, losses = Reference(network(), matrices=("0.weight", "2.weight")), []
    for inputs, labels in [*DataLoader(Rows(), batch_size=ROWS)] * 2:
        loss = F.cross_entropy(single.model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(single.model.parameters(), CLIP)
        losses.append(loss.item())
        with newton_schulz_in_float32():
            single.step()
    return losses


def strategy_of(kind: str) -> Any:
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

    class OnCPUs(DeepSpeedStrategy):  # type: ignore[misc]
        """Lightning refuses CPUs; what comes after that works on them."""

        root_device = torch.device("cpu", 0)  # DeepSpeed compares its number

        def setup_environment(self) -> None:
            super(DDPStrategy, self).setup_environment()

    if kind == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    entry = {"type": "LayerWise", "params": {**OURS, "exclude": ["*4.weight"], "report": False}}
    config = {"zero_optimization": {"stage": 2}, **({"optimizer": entry} if kind == "entry" else {})}
    return "auto" if kind == "owned" else OnCPUs(config={**config, "zero_allow_untested_optimizer": True})


def fit(folder: Path, name: str, kind: str, resume: str | None, ranks: int) -> list[float]:
    """A run of Lightning's Trainer, on every rank; the losses of its steps over all ranks."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.fsdp import fully_shard

    from lwopt_backend.integrations import deepspeed_zero

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if kind == "fsdp2":
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            if kind == "deepspeed":
                return deepspeed_zero.LayerWise(self.parameters(), **OURS, exclude=["*4.weight"], report=False)
            kept: Any = {"keep_full_grads": True} if kind == "owned" else {}  # for Lightning to clip
            return LayerWiseOptimizer(self.model, **OURS, **kept, exclude=["4.weight"], report=False)

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            total = loss.detach().clone()
            if ranks > 1:
                dist.all_reduce(total)
            self.losses.append(total.item() / ranks)
            return loss

    torch.set_num_threads(1)
    deepspeed_zero.register()
    checkpoints = ModelCheckpoint(folder, filename=f"{name}-{{epoch}}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy_of(kind),
        max_epochs=2,
        gradient_clip_val=CLIP,
        callbacks=[checkpoints],
        use_distributed_sampler=False,
        **quiet,
    )
    module = Module()
    path = str(folder / resume) if resume else None
    mine = Subset(Rows(), range(int(os.environ.get("RANK", 0)), HALF * ROWS, ranks))
    trainer.fit(module, DataLoader(mine, batch_size=ROWS // ranks), ckpt_path=path)
    return module.losses


@pytest.mark.parametrize("kind", ["fsdp2", "owned", "deepspeed", "entry"])
def test_it_has_the_losses_of_torch_optim_and_resumes_with_them(tmp_path: Path, kind: str) -> None:
    """``deepspeed`` has the optimizer from ``configure_optimizers``, ``entry`` from DeepSpeed's configuration."""
    found, saved = dict[str, list[float]](), "whole-epoch=0.ckpt"

    def run(name: str, resume: str | None, ranks: int = 2) -> None:
        if kind == "owned":
            found[name] = fit(tmp_path, name, kind, resume, 1)
        else:
            given = (tmp_path, name, kind, resume or "", ranks)
            torchrun("-m", "tests.peers.test_lightning", *given, processes=ranks)
            found[name] = json.loads((tmp_path / f"{name}.json").read_text())

    run("whole", None)
    run("resumed", saved)
    assert found["whole"] == pytest.approx(by_torch(), rel=1e-5) and len(set(found["whole"])) == STEPS
    assert found["resumed"] == found["whole"][HALF:]
    if kind in ("deepspeed", "entry"):  # on another number of ranks
        assert lwopt("convert", tmp_path / saved, tmp_path / "moved.ckpt", "--to", "universal").code == 0
        run("moved", "moved.ckpt", 1)
        assert found["moved"] == pytest.approx(found["whole"][HALF:], rel=1e-5)


def test_the_pages_script_trains(tmp_path: Path) -> None:
    command = unpack_page("start/trainers", "lightning_train.py", tmp_path, sys.executable)
    printed = succeeds(command, tmp_path)
    assert re.search(r"loss [01]\.\d+ after 40 steps", printed) and "Routing: 1 of 5" in printed, printed


if __name__ == "__main__":
    losses = fit(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] or None, int(sys.argv[5]))
    if dist.get_rank() == 0:
        Path(sys.argv[1], f"{sys.argv[2]}.json").write_text(json.dumps(losses))
