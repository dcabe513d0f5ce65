"""What profilers and hooks see of a step: its parts by name, and one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.integrations import fsdp2
from tests import fsdp2 as fsdp
from tests import zero
from tests.models import UnevenLM
from tests.owned import BUCKET_MB, shares
from tests.ranks import RankPool


class Inherited(torch.optim.AdamW):
    """Its step is another optimizer's step, of which torch tells hooks again."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


MUON = {"name": "muon", "lr": 0.02}
INHERITED = {"name": "torch_optimizer", "class": f"{__name__}.Inherited", "lr": 0.02}


def on_fsdp2(during: Callable[[], Any], **options: Any) -> None:
    sharded = fsdp.shard("rows", "fp32")
    fsdp.backward(sharded, 0)  # FSDP2's first pass sets up its own
    with during():
        optimizer = fsdp2.LayerWiseOptimizer(sharded.model, **{"matrix": MUON, "report": False, **options})
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


def on_owned(during: Callable[[], Any], **options: Any) -> None:
    model = UnevenLM()
    with during():
        settings = {"matrix": MUON, "report": False, "bucket_mb": BUCKET_MB, **options}
        optimizer = LayerWiseOptimizer(model, **settings)
        model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()


def on_modules(during: Callable[[], Any], **options: Any) -> None:
    model = UnevenLM()
    with during():
        settings = {"matrix": MUON, "report": False, "bucket_mb": BUCKET_MB, **options}
        optimizer = ModuleOptimizers({"all": LayerWiseOptimizer(model, **settings)})
        model(*shares(0, dist.get_world_size())[dist.get_rank()]).backward()
        optimizer.step()


def on_deepspeed(during: Callable[[], Any], stage: int, storage: str = "zero", **options: Any) -> None:
    settings = zero.config(stage, clip=1.0)
    params = {"matrix": MUON, "storage": storage, "report": False, **options}
    settings["optimizer"] = {"type": "LayerWise", "params": params}
    settings["zero_optimization"] = {"stage": stage, "sub_group_size": 1000}
    with ExitStack() as inside:
        inside.enter_context(during())
        zero.train(inside.enter_context(zero.engine_for(settings)), 1)


ENGINES = {"fsdp2": on_fsdp2, "owned": on_owned, "modules": on_modules, "deepspeed": on_deepspeed}


def labels(engine: str, **options: Any) -> set[str]:
    prof = profile(activities=[ProfilerActivity.CPU])
    ENGINES[engine](lambda: prof, **options)
    return {event.key for event in prof.key_averages() if event.key.startswith("lwopt")}


def told(engine: str, **options: Any) -> list[str]:
    """What hooks on every optimizer's steps are told while an optimizer is made and steps."""
    seen: list[str] = []
    handles = ExitStack()

    def listen() -> ExitStack:
        for when, register in (("pre", register_optimizer_step_pre_hook), ("post", register_optimizer_step_post_hook)):
            handle = register(lambda optimizer, *_, when=when: seen.append(f"{when} {type(optimizer).__name__}"))
            handles.callback(handle.remove)
        return handles

    ENGINES[engine](listen, matrix=INHERITED, **options)
    return seen


PARTS = {f"lwopt: {part}" for part in ("exchange out", "rule muon", "exchange back", "elementwise adamw", "norm")}


# What is seen of: an engine, its options, the optimizer of which hooks are told, and the parts that a profile names.
# At stages 1 to 3 the norm is DeepSpeed's; it steps a group at a time, of which hooks are told once.
SEEN: list[tuple[str, dict[str, Any], str, set[str] | None]] = [
    ("fsdp2", {}, "LayerWiseOptimizer", PARTS),
    ("owned", {}, "LayerWiseOptimizer", PARTS),
    ("modules", {}, "ModuleOptimizers", None),
    ("deepspeed", {"stage": 0}, "LayerWise", PARTS),
    ("deepspeed", {"stage": 1}, "LayerWise", None),
    ("deepspeed", {"stage": 2}, "LayerWise", PARTS - {"lwopt: norm"}),
    ("deepspeed", {"stage": 3}, "LayerWise", None),
    ("deepspeed", {"stage": 2, "storage": "owned"}, "OwnedLayerWise", None),
]


@pytest.mark.parametrize(("engine", "options", "optimizer", "parts"), SEEN)
def test_a_profile_names_the_parts_of_a_step_and_hooks_are_told_of_one(
    ranks: RankPool, engine: str, options: dict[str, Any], optimizer: str, parts: set[str] | None
) -> None:
    if parts is not None:
        assert set().union(*ranks.run(labels, engine, **options)) == parts
    assert ranks.run(told, engine, **options) == [[f"pre {optimizer}", f"post {optimizer}"]] * 2
