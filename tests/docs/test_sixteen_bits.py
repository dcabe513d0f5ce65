"""16 bits through the Trainer and Accelerate, on ZeRO 1 to 3 and on FSDP2: losses, norms and fp32 weights are those of
the same loop without them, to the bit; a run resumes exactly, goes on with other ranks, and is exported."""

import contextlib
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate import utils as accelerates
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import deepspeed_zero
from tests.docs.test_hugging_face import accelerate_as_it_was
from tests.support.cells import cells
from tests.support.command_line import lwopt
from tests.support.launcher import ROOT
from tests.support.models import rounding
from tests.support.ranks import RankPool
from tests.support.references import full_weights

sys.path.append(str(ROOT / "examples"))

from hugging_face import deepspeed_on_cpus_too, shard_on_cpus_too, small_llama  # noqa: E402

STEPS, HALF, CLIP, RATE, DECAY = 4, 2, 0.5, 0.02, 0.1
MICRO_BATCHES, ROWS, CONTEXT = 4, 2, 16  # of a step, on all ranks together; of a micro-batch; of a row
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95)}
ENTRY = {"type": "LayerWiseMuon", "params": {"lr": RATE, "weight_decay": DECAY, "adamw": ADAMW, "report": False}}
OURS = {"matrix": "muon", "lr": RATE, "weight_decay": DECAY, "elementwise": {"name": "adamw", **ADAMW}, "report": False}
TOKENS = [(torch.arange(CONTEXT) * (1 + number % 5) + number) % 256 for number in range(STEPS * MICRO_BATCHES * ROWS)]
DATA = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
SCALE_POWER = 20  # of a loss scale at which fp16 overflows at first
FSDP2 = "fsdp2"


@dataclass
class Run:
    """Mean loss and gradient norm of each step, and the fp32 weights after the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Steps:
    """A ``Run`` while it goes. The mean loss of micro-batches and ranks is added up in the Trainer's order."""

    def __init__(self) -> None:
        self.run, self.total, self.micro_batches = Run(), torch.zeros(()), 0

    def step_ends(self, loss: Tensor) -> bool:
        self.total += loss.detach() / accumulation()
        self.micro_batches += 1
        return self.micro_batches % accumulation() == 0

    def end(self, norm: Any) -> None:
        dist.all_reduce(self.total)
        self.run.losses.append(self.total.item() / dist.get_world_size())
        self.run.norms.append(float(norm))
        self.total.zero_()

    def done(self, model: Any) -> Run:
        self.run.weights = weights_of(model)
        return self.run


def weights_of(model: Any) -> dict[str, Tensor]:
    """On all ranks. Of a DeepSpeed engine the master weights, whose engine ends."""
    if not isinstance(model, deepspeed.DeepSpeedEngine):
        return {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    weights = full_weights(model)
    model.destroy()
    return weights


def accumulation() -> int:
    return MICRO_BATCHES // dist.get_world_size()


def left(step: int) -> float:
    """The Trainer's linear schedule."""
    return 1 - step / STEPS


def recomputing() -> Any:
    model = small_llama(1, 32)
    model.gradient_checkpointing_enable()
    return model.train()


def settings_of(stage: int, precision: str, enabled: bool | str) -> dict[str, Any]:
    scale = {"initial_scale_power": SCALE_POWER, "hysteresis": 1} if precision == "fp16" else {}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation(),
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": ENTRY,
        precision: {"enabled": enabled, **scale},
    }


@contextlib.contextmanager
def fp16_on_cpus() -> Iterator[None]:
    """A CPU without units for fp16 computes it anyway, but says that it does not."""
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


# The loop without a trainer, on every rank
def own_batches() -> Sequence[dict[str, Tensor]]:
    return [*DataLoader(DATA, batch_size=ROWS)][dist.get_rank() :: dist.get_world_size()]


def loss_of(model: Any, batch: Any) -> Tensor:
    return model(**batch).loss


def by_loop(engine: int | str, precision: str) -> Run:
    if isinstance(engine, str):
        return by_fsdp2(recomputing(), own_batches())
    return by_deepspeed(recomputing(), own_batches(), engine, precision)


def by_deepspeed(
    model: Any, batches: Iterable[Any], stage: int, precision: str, loss_of: Callable[[Any, Any], Tensor] = loss_of
) -> Run:
    deepspeed_zero.register()
    steps = Steps()
    with fp16_on_cpus():
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=settings_of(stage, precision, True),
            lr_scheduler=lambda inner: LambdaLR(inner, left),
        )
    for batch in batches:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        if steps.step_ends(loss):
            steps.end(engine.get_global_grad_norm())
    return steps.done(engine)


def by_fsdp2(model: Any, batches: Iterable[Any], loss_of: Callable[[Any, Any], Tensor] = loss_of) -> Run:
    """In bf16, outputs too, as Accelerate asks of FSDP2: so each loss is rounded."""
    steps = Steps()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = LayerWiseOptimizer(model, **OURS)
    schedule = LambdaLR(optimizer, left)
    for batch in batches:
        model.set_requires_gradient_sync((steps.micro_batches + 1) % accumulation() == 0)
        loss = loss_of(model, batch).float()
        (loss / accumulation()).backward()
        if steps.step_ends(loss):
            steps.end(nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return steps.done(model)


# With one, on every rank
@contextlib.contextmanager
def trainers_arguments(engine: int | str, precision: str, out: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Those of ``TrainingArguments`` and its subclasses, and the Trainer's ``optimizer_cls_and_kwargs``."""
    deepspeed_zero.register()
    with accelerate_as_it_was(), fp16_on_cpus():
        if isinstance(engine, int):
            how: dict[str, Any] = {"deepspeed": settings_of(engine, precision, "auto")}
            optimizer: Any = None
        else:
            shard_on_cpus_too()
            how = {"fsdp": True, "fsdp_config": {"version": 2}}
            optimizer = (lambda: LayerWiseOptimizer, {**OURS, "sharded_later": True})
        arguments = {
            "output_dir": str(out),
            "max_steps": STEPS,
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": accumulation(),
            "gradient_checkpointing": True,
            "learning_rate": RATE,
            "lr_scheduler_type": "linear",
            "weight_decay": DECAY,
            "max_grad_norm": CLIP,
            "train_sampling_strategy": "sequential",
            "save_steps": HALF,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            precision: True,
        }
        yield {**arguments, **how}, optimizer


def run_of(trainer: Trainer, resume: Path | None) -> Run:
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    rows = [each for each in trainer.state.log_history if "loss" in each][HALF if resume else 0 :]
    losses, norms = ([each[key] for each in rows] for key in ("loss", "grad_norm"))
    return Run(losses, norms, weights_of(trainer.model_wrapped))


def by_trainer(engine: int | str, precision: str, out: Path, resume: Path | None = None) -> Run:
    with trainers_arguments(engine, precision, out) as (arguments, optimizer):
        args = TrainingArguments(**arguments)
        return run_of(Trainer(small_llama(1, 32), args, train_dataset=DATA, optimizer_cls_and_kwargs=optimizer), resume)


def by_accelerate(engine: int | str, precision: str, out: Path, resume: Path | None = None) -> Run:
    deepspeed_zero.register()
    with accelerate_as_it_was(), fp16_on_cpus():
        model, steps, loader = recomputing(), Steps(), DataLoader(DATA, batch_size=ROWS)
        of_step = {"gradient_accumulation_steps": accumulation(), "mixed_precision": precision}
        if isinstance(engine, int):
            deepspeed_on_cpus_too()
            settings = settings_of(engine, precision, "auto")
            accelerator = Accelerator(**of_step, deepspeed_plugin=accelerates.DeepSpeedPlugin(hf_ds_config=settings))
            optimizer: Any = accelerates.DummyOptim(model.parameters(), lr=RATE, weight_decay=DECAY)
            scheduler = accelerates.DummyScheduler(optimizer, lr_scheduler_callable=lambda inner: LambdaLR(inner, left))
            model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, scheduler)
        else:
            shard_on_cpus_too()
            plugin = accelerates.FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
            )
            accelerator = Accelerator(**of_step, cpu=True, fsdp_plugin=plugin)
            optimizer = LayerWiseOptimizer(model, **OURS, sharded_later=True)
            schedule = LambdaLR(optimizer, left)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.register_for_checkpointing(schedule)
        if resume:
            accelerator.load_state(str(resume))
            accelerator.step = 0  # micro-batches, of which a step may now have another number
            loader = accelerator.skip_first_batches(loader, HALF * accumulation())
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), CLIP) if accelerator.sync_gradients else None
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            if steps.step_ends(loss):
                steps.end(model.get_global_grad_norm() if isinstance(engine, int) else norm)
                if len(steps.run.losses) % HALF == 0:
                    number = len(steps.run.losses) + (HALF if resume else 0)
                    accelerator.save_state(str(out / f"checkpoint-{number}"))
        return steps.done(model)


TRAINERS = {"Trainer": by_trainer, "Accelerate": by_accelerate}


@cells(
    lambda engine, precision, **_: engine != FSDP2 or precision == "bf16",
    trainer=TRAINERS,
    engine=[1, 2, 3, FSDP2],
    precision=["bf16", "fp16"],
)
def test_a_run_is_that_of_the_loop_to_the_bit(
    rank_pools: dict[int, RankPool], tmp_path: Path, trainer: str, engine: int | str, precision: str
) -> None:
    """With accumulation, clipping and recomputation. In fp16 the first step overflows and is skipped."""
    two, by = rank_pools[2], TRAINERS[trainer]
    whole, *_ = two.run(by, engine, precision, tmp_path / "whole")
    loop, *_ = two.run(by_loop, engine, precision)
    assert (whole.losses, whole.norms) == (loop.losses, loop.norms)
    assert len(set(whole.losses)) == STEPS and min(whole.norms) > CLIP
    assert math.isinf(whole.norms[0]) == (precision == "fp16") and max(whole.norms[HALF:]) < math.inf
    same(whole.weights, loop.weights)
    half, last = (tmp_path / "whole" / f"checkpoint-{step}" for step in (HALF, STEPS))
    resumed, *_ = two.run(by, engine, precision, tmp_path / "resumed", half)
    assert (resumed.losses, resumed.norms) == (whole.losses[HALF:], whole.norms[HALF:])
    same(resumed.weights, whole.weights)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert lwopt("convert", last, tmp_path / name, "--to", "safetensors", "--dtype", name).code == 0
        exported = load_file(tmp_path / name / "model.safetensors")
        same(exported, {name: weight.to(dtype) for name, weight in whole.weights.items()})
    goes_on_elsewhere(rank_pools, tmp_path, whole, half, trainer, engine, precision)


def goes_on_elsewhere(
    rank_pools: dict[int, RankPool],
    folder: Path,
    whole: Run,
    half: Path,
    trainer: str,
    engine: int | str,
    precision: str,
) -> None:
    """First with the same weights, so the losses are those of the same micro-batches, added in another order. Gradients
    are too, and round in bf16, as the exchange of their momentum does; so the change of the loss by the next step is
    off by as much of itself. On FSDP2 each loss is rounded to bf16 as well."""
    ranks = 4
    if isinstance(engine, int):
        assert lwopt("convert", half, folder / "moved", "--to", "universal").code == 0
        half, ranks = folder / "moved", 1
    elsewhere, *_ = rank_pools[ranks].run(TRAINERS[trainer], engine, precision, folder / "elsewhere", half)
    (first, second), (was_first, was_second) = elsewhere.losses, whole.losses[HALF:]
    assert first == pytest.approx(was_first, rel=rounding(MICRO_BATCHES * ROWS * CONTEXT))
    eps, step = torch.finfo(torch.bfloat16).eps, max(abs(b - a) for a, b in itertools.pairwise(whole.losses))
    assert second == pytest.approx(was_second, abs=eps * (step + was_second * (engine == FSDP2)))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("trainer", TRAINERS)
def test_stage_0_is_refused_by_name(rank_pools: dict[int, RankPool], tmp_path: Path, trainer: str) -> None:
    for told in rank_pools[2].errors(TRAINERS[trainer], 0, "bf16", tmp_path):
        assert "zero_optimization.stage is 0 with a model trained in bfloat16" in told and "use stage 1" in told
