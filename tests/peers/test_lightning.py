"""Lightning's Trainer: FSDP2 by its ModelParallelStrategy on 2 ranks, and owned storage in one process."""

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
from tests.launcher import ROOT, succeeds, torchrun, unpack_page
from tests.zero import ADAMW, MUON, Reference, newton_schulz_in_float32

ROWS, STEPS, HALF = 4, 6, 3  # of each of two epochs
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
        losses.append(loss.item())
        with newton_schulz_in_float32():
            single.step()
    return losses


def fit(folder: Path, name: str, fsdp2: bool, resume: bool) -> list[float]:
    """A run of Lightning's Trainer, on every rank; the losses of its steps over all ranks."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from lwopt_backend.integrations import fsdp2 as sharded

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if fsdp2:
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            optimizer: Any = sharded.LayerWiseOptimizer if fsdp2 else LayerWiseOptimizer
            return optimizer(self.model, **OURS, exclude=["4.weight"], report=False)

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            total = loss.detach().clone()
            if fsdp2:
                dist.all_reduce(total)
            self.losses.append(total.item() / ranks)
            return loss

    torch.set_num_threads(1)
    ranks = 2 if fsdp2 else 1
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if fsdp2 else "auto"
    checkpoints = ModelCheckpoint(folder, filename=f"{name}-{{epoch}}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=2,
        callbacks=[checkpoints],
        use_distributed_sampler=False,
        **quiet,
    )
    module = Module()
    path = str(folder / "whole-epoch=0.ckpt") if resume else None
    mine = Subset(Rows(), range(int(os.environ.get("RANK", 0)), HALF * ROWS, ranks))
    trainer.fit(module, DataLoader(mine, batch_size=ROWS // ranks), ckpt_path=path)
    return module.losses


@pytest.mark.parametrize("fsdp2", [False, True])
def test_it_has_the_losses_of_torch_optim_and_resumes_with_them(tmp_path: Path, fsdp2: bool) -> None:
    found = {}
    for name in ("whole", "resumed"):
        if fsdp2:
            torchrun("-m", "tests.peers.test_lightning", tmp_path, name)
            found[name] = json.loads((tmp_path / f"{name}.json").read_text())
        else:
            found[name] = fit(tmp_path, name, fsdp2, name == "resumed")
    assert found["whole"] == pytest.approx(by_torch(), rel=1e-5) and len(set(found["whole"])) == STEPS
    assert found["resumed"] == found["whole"][HALF:]


def test_the_pages_script_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start" / "lightning.md").read_text()
    printed = succeeds(unpack_page(page, tmp_path, sys.executable), tmp_path)
    assert re.search(r"loss [01]\.\d+ after 40 steps", printed) and "Routing: 1 of 5" in printed, printed


if __name__ == "__main__":
    losses = fit(Path(sys.argv[1]), sys.argv[2], True, sys.argv[2] == "resumed")
    if dist.get_rank() == 0:
        Path(sys.argv[1], f"{sys.argv[2]}.json").write_text(json.dumps(losses))
