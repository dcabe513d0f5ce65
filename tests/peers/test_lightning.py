"""Lightning's Trainer and Fabric: FSDP2 by their ModelParallelStrategy and ZeRO by their DeepSpeedStrategy on 2 ranks;
the Trainer in one process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset

from lwopt_backend import LayerWiseOptimizer
from tests.docs.test_sixteen_bits import fp16_on_cpus, same
from tests.support.command_line import lwopt
from tests.support.launcher import succeeds, surroundings_kept, torchrun
from tests.support.pages import unpack_page
from tests.support.ranks import RankPool
from tests.support.references import full_weights
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
        return ModelParallelStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1)
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


# 16 bits, by the Trainer and by Fabric
MICRO_BATCHES = 4  # of one row each, of a step on all ranks together
LOW = {"bf16": torch.bfloat16, "16": torch.float16}


@dataclass
class Run:
    """This rank's loss of each micro-batch, and the fp32 weights after the last step."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.inner, inputs, use_reentrant=False)


class Held(nn.Module):
    """Has the names that a LightningModule gives."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Recomputed()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def accumulation() -> int:
    return MICRO_BATCHES // dist.get_world_size()


def own_rows() -> DataLoader[Any]:
    return DataLoader(Subset(Rows(), range(dist.get_rank(), HALF * ROWS, dist.get_world_size())), batch_size=1)


def config_of(low: torch.dtype | None = None) -> dict[str, Any]:
    """With ``low``, what Lightning writes for that precision."""
    scale = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
    of_low = {torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True, **scale}}}
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation()}
    zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    return {**batch, **zero, "gradient_clipping": CLIP, **(of_low[low] if low else {})}


def zero_optimizer(parameters: Any) -> Any:
    from lwopt_backend.integrations import deepspeed_zero

    return deepspeed_zero.LayerWise(parameters, **OURS, exclude=["*4.weight"], report=False)


def fsdp2_optimizer(model: nn.Module, matrix: Any = OURS["matrix"]) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(model, **{**OURS, "matrix": matrix}, exclude=["*4.weight"], report=False)


def weights_of(model: Any) -> dict[str, Tensor]:
    if not hasattr(model, "zero_optimization_stage"):
        return {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    return full_weights(model)


def by_loop(program: str, kind: str, precision: str) -> Run:
    """Without Lightning. On FSDP2 in mixed precision, torch's autocast; else everything has the dtype. Fabric casts
    outputs to fp32, and reduces gradients once a step on FSDP2, the Trainer for each micro-batch. Under DeepSpeed, the
    Trainer divides the loss by the number of micro-batches, as DeepSpeed does once more."""
    import deepspeed
    from torch.distributed.fsdp import fully_shard

    run, model, (bits, how), seen = Run(), Held(), precision.split("-"), 0
    low, autocast = LOW[bits], kind == "fsdp2" and how == "mixed"
    if how == "true":
        model.to(low)
    if kind == "fsdp2":
        fully_shard(model)
        optimizer = fsdp2_optimizer(model)
    else:
        with fp16_on_cpus():
            model, *_ = deepspeed.initialize(
                model=model, optimizer=zero_optimizer(model.parameters()), config=config_of(low)
            )
    for inputs, labels in [*own_rows()] * 2:
        if kind == "fsdp2" and program == "Fabric":
            model.set_requires_gradient_sync((seen + 1) % accumulation() == 0)
        with torch.autocast("cpu", low, enabled=autocast):
            outputs = model(inputs if autocast else inputs.to(low))
            loss = F.cross_entropy(outputs.float() if program == "Fabric" else outputs, labels)
        run.losses.append(loss.item())
        seen += 1
        if kind != "fsdp2":
            model.backward(loss / accumulation() if program == "Trainer" else loss)
            model.step()
            continue
        (loss / accumulation()).backward()
        if seen % accumulation() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    run.weights = weights_of(model)
    return run


@contextlib.contextmanager
def as_under_torchrun() -> Iterator[None]:
    with surroundings_kept(), fp16_on_cpus():
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
        yield


def by_trainer(
    kind: str, precision: str, folder: Path, resume: Path | None = None, matrix: Any = OURS["matrix"]
) -> Run:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.fsdp import fully_shard

    run = Run()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Recomputed()

        def configure_model(self) -> None:
            if kind == "fsdp2":
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            return fsdp2_optimizer(self.model, matrix) if kind == "fsdp2" else zero_optimizer(self.parameters())

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            run.losses.append(loss.item())
            return loss

        def on_train_end(self) -> None:
            run.weights = weights_of(self if kind == "fsdp2" else self.trainer.strategy.model)

    with as_under_torchrun():
        strategy = strategy_of("fsdp2") if kind == "fsdp2" else strategy_of("deepspeed")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            precision=precision,
            max_epochs=2,
            accumulate_grad_batches=accumulation(),
            gradient_clip_val=CLIP,
            callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), own_rows(), ckpt_path=str(resume) if resume else None)
    return run


def fabrics_strategy(kind: str) -> Any:
    from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class OnCPUs(DeepSpeedStrategy):  # type: ignore[misc]
        root_device = torch.device("cpu", 0)

        def setup_environment(self) -> None:
            super(DDPStrategy, self).setup_environment()
            self._set_world_ranks()
            self._format_config()

    def sharded(model: nn.Module, mesh: Any) -> nn.Module:
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    if kind == "fsdp2":
        return ModelParallelStrategy(sharded, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return OnCPUs(config=config_of())


def by_fabric(kind: str, precision: str, folder: Path, resume: Path | None = None) -> Run:
    from lightning.fabric import Fabric

    run, held, is_fsdp2, rows = Run(), Held(), kind == "fsdp2", [*own_rows()] * 2
    with as_under_torchrun():
        ranks = dist.get_world_size()
        fabric = Fabric(accelerator="cpu", devices=ranks, strategy=fabrics_strategy(kind), precision=precision)
        fabric.launch()
        if is_fsdp2:
            model = fabric.setup_module(held)
            optimizer = fabric.setup_optimizers(fsdp2_optimizer(held))
        else:
            model, optimizer = fabric.setup(held, zero_optimizer(held.parameters()))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "done": 0}
        if resume:
            fabric.load(resume, state)
        for done, (inputs, labels) in enumerate(rows, 1):
            if done * ranks <= state["done"]:
                continue
            ends = done % accumulation() == 0
            with fabric.no_backward_sync(model, enabled=not ends) if is_fsdp2 else contextlib.nullcontext():
                loss = F.cross_entropy(model(inputs), labels)
                fabric.backward(loss / accumulation() if is_fsdp2 else loss)
            run.losses.append(loss.item())
            if not is_fsdp2:  # its optimizer's step() is not the engine's, which counts micro-batches
                fabric.strategy.model.step()
            elif ends:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if done % (len(rows) // 2) == 0:
                fabric.save(folder / f"epoch={2 * done // len(rows) - 1}.ckpt", {**state, "done": done * ranks})
        run.weights = weights_of(held if is_fsdp2 else fabric.strategy.model)
    return run


def of_one_step(runs: list[Run], begin: int) -> list[float]:
    """The losses of a step's micro-batches, in the order of their rows."""
    stop = begin + MICRO_BATCHES // len(runs)
    return [loss for of_ranks in zip(*(run.losses[begin:stop] for run in runs)) for loss in of_ranks]


PROGRAMS = {"Trainer": by_trainer, "Fabric": by_fabric}
PRECISIONS = [("Trainer", "fsdp2", "bf16-mixed"), ("Trainer", "fsdp2", "bf16-true"), ("Fabric", "fsdp2", "bf16-mixed")]
PRECISIONS += [("Trainer", "deepspeed", precision) for precision in ("bf16-mixed", "bf16-true", "16-mixed")]
PRECISIONS += [("Fabric", "deepspeed", "bf16-mixed")]


@pytest.mark.parametrize(("program", "kind", "precision"), PRECISIONS)
def test_in_16_bits_it_is_the_loop_to_the_bit(
    rank_pools: dict[int, RankPool], tmp_path: Path, program: str, kind: str, precision: str
) -> None:
    """With accumulation, clipping and recomputation; each rank's losses. Other ranks go on where two were."""
    by, two, saved = PROGRAMS[program], rank_pools[2], tmp_path / "whole" / "epoch=0.ckpt"
    whole = two.run(by, kind, precision, tmp_path / "whole")
    loop = two.run(by_loop, program, kind, precision)
    resumed = two.run(by, kind, precision, tmp_path / "resumed", saved)
    half = len(whole[0].losses) // 2
    for ours, theirs, again in zip(whole, loop, resumed, strict=True):
        assert ours.losses == theirs.losses and len(set(ours.losses)) > half
        assert again.losses == ours.losses[half:]
        same(ours.weights, theirs.weights)
        same(again.weights, ours.weights)
    moved, ranks = saved, 4
    if kind == "deepspeed":
        moved, ranks = tmp_path / "moved.ckpt", 1
        assert lwopt("convert", saved, moved, "--to", "universal").code == 0
    elsewhere = rank_pools[ranks].run(by, kind, precision, tmp_path / "elsewhere", moved)
    assert of_one_step(elsewhere, 0) == of_one_step(whole, half)
    exported, last = tmp_path / "weights", tmp_path / "whole" / "epoch=1.ckpt"
    assert lwopt("convert", last, exported, "--to", "safetensors", "--dtype", "float32").code == 0
    same(load_file(exported / "model.safetensors"), {n: w.float() for n, w in whole[0].weights.items()})


@pytest.mark.parametrize("matrix", [{**OURS["matrix"], "momentum_dtype": "int8"}, {"name": "soap", "lr": 0.01}])
def test_state_in_8_bits_and_at_owners_resumes(rank_pools: dict[int, RankPool], tmp_path: Path, matrix: Any) -> None:
    """When a run begins, Lightning moves all state to the device, and no tensor holds this."""
    two, saved = rank_pools[2], tmp_path / "whole" / "epoch=0.ckpt"
    whole = two.run(by_trainer, "fsdp2", "32-true", tmp_path / "whole", None, matrix)
    resumed = two.run(by_trainer, "fsdp2", "32-true", tmp_path / "resumed", saved, matrix)
    for ours, again in zip(whole, resumed, strict=True):
        assert again.losses == ours.losses[len(ours.losses) // 2 :] and len(set(again.losses)) == len(again.losses)
        same(again.weights, ours.weights)


if __name__ == "__main__":
    losses = fit(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] or None, int(sys.argv[5]))
    if dist.get_rank() == 0:
        Path(sys.argv[1], f"{sys.argv[2]}.json").write_text(json.dumps(losses))
