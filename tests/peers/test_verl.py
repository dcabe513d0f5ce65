"""verl's FSDP engine with our optimizer by the names in its configuration, on two ranks, against torch.optim."""

from __future__ import annotations

import io
import shlex
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lwopt_backend.integrations.verl import LayerWise
from tests.support.fsdp2 import mesh_of, weights_of
from tests.support.models import UnevenLM, batch, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.pages import blocks
from tests.support.zero import Reference, newton_schulz_in_float32

STEPS, WARMUP = 6, 3


def engine_of(module: nn.Module, **more: Any) -> Any:
    """verl's engine, of which what builds an optimizer and its schedule is used."""
    from verl.workers.config import FSDPOptimizerConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    engine = FSDPEngine.__new__(FSDPEngine)
    names = {"optimizer_impl": "lwopt_backend.integrations.verl", "optimizer": "LayerWise"}
    schedule = {"lr_warmup_steps": WARMUP, "total_training_steps": STEPS}
    engine.optimizer_config = FSDPOptimizerConfig(lr=0.01, weight_decay=0.1, **schedule, **names, **more)
    engine.rank, engine.module = dist.get_rank(), module
    engine.optimizer = engine._build_optimizer(module)
    engine.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)
    return engine


def step_of(engine: Any, step: int) -> None:
    engine.optimizer_zero_grad()
    engine.module(*batch(step, 4)).backward()
    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)  # verl's asks for a GPU
    engine.optimizer.step()
    engine.lr_scheduler_step()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return UnevenLM()


def sharded() -> nn.Module:
    module = model_of()
    fully_shard(module, mesh=mesh_of())
    return module


SETTINGS = {"matrix": {"ns_dtype": "float32"}, "report": False}


@on_ranks(2)
def test_its_engine_trains_what_torch_optim_trains_and_resumes() -> None:
    """The ranks see the same rows, so that gradients are one process's."""
    module, rates = sharded(), {"lr": 0.01, "weight_decay": 0.1}
    engine = engine_of(module, override_optimizer_config=SETTINGS)
    single = Reference(model_of(), muon={**rates, "adjust_lr_fn": "match_rms_adamw"}, adamw=rates)
    both = single.optimizers
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: min(1.0, step / WARMUP)) for each in both]
    file = io.BytesIO()
    for step in range(STEPS):
        if step == STEPS // 2:  # what verl's checkpoints have
            state = (module.state_dict(), engine.optimizer.state_dict(), engine.lr_scheduler.state_dict())
            torch.save(state, file)
        step_of(engine, step)
        single.model(*batch(step, 4)).backward()
        with newton_schulz_in_float32():
            single.clip = 1.0
            single.step()
        for schedule in schedules:
            schedule.step()
    assert largest_difference(weights_of(module), single.model) < 1e-5
    other = sharded()
    resumed = engine_of(other, override_optimizer_config=SETTINGS)
    file.seek(0)
    for part, loaded in zip((other, resumed.optimizer, resumed.lr_scheduler), torch.load(file, weights_only=False)):
        part.load_state_dict(loaded)
    for step in range(STEPS // 2, STEPS):
        step_of(resumed, step)
    assert largest_difference(weights_of(other), weights_of(module)) == 0.0


@on_ranks(1)
def test_the_pages_command_is_taken_and_both_rules_have_its_rate() -> None:
    import verl
    from hydra import compose, initialize_config_dir
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import build_optimizer

    (command,) = blocks("start/trainers", "bash", "verl")
    words = [word for word in shlex.split(command.text) if word.startswith("actor_rollout_ref")]
    with initialize_config_dir(f"{verl.__path__[0]}/trainer/config", version_base=None):
        chosen = compose("ppo_trainer", words).actor_rollout_ref.actor
    made = build_optimizer(sharded().parameters(), omega_conf_to_dataclass(chosen.optim))
    assert chosen.strategy == "fsdp2" and {group["lr"] for group in made.param_groups} == {1e-6}
    matrices, others = made.param_groups
    assert (matrices["adjust_lr_fn"], others["betas"]) == ("match_rms_adamw", (0.9, 0.95))


@on_ranks(2)
def test_it_refuses_flat_parameters_and_lists_by_name() -> None:
    for original in (False, True):
        flat = FullyShardedDataParallel(model_of(), device_id=torch.device("cpu"), use_orig_params=original)
        first = next(name for name, _ in flat.named_parameters())
        with pytest.raises(ValueError, match=f"found '{first}' of shape .*FSDP1 flattens matrices.; set strategy"):
            engine_of(flat)
    with pytest.raises(TypeError, match="expected module.parameters.., .* found list; call LayerWiseOptimizer"):
        LayerWise([*sharded().parameters()], lr=0.01)  # type: ignore[arg-type]
