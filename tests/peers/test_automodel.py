"""NeMo Automodel's builders of optimizer and schedule with our optimizer as a recipe names it, against torch.optim."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.support.fsdp2 import mesh_of, weights_of
from tests.support.models import UnevenLM, batch, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.pages import blocks
from tests.support.zero import Reference, newton_schulz_in_float32

RECIPE = """
optimizer:
  _target_: lwopt_backend.integrations.automodel.LayerWiseConfig
  lr: 0.01
  weight_decay: 0.1
  arguments:
    matrix: {ns_dtype: float32}
    elementwise: {weight_decay: 0.05}
    report: false
lr_scheduler: {lr_warmup_steps: 2, lr_decay_style: cosine}
"""  # two decays, which Automodel's scheduler sets in every step


def recipe_of(text: str) -> Any:
    import yaml
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.recipes._typed_config import RecipeConfig

    return RecipeConfig(ConfigNode(yaml.safe_load(text)))


def made(recipe: Any, model: nn.Module) -> tuple[Any, Any]:
    steps = SimpleNamespace(epoch_len=6, num_epochs=1, max_steps=None)
    (optimizer,) = recipe.optimizer.build(model)
    (schedule,) = recipe.lr_scheduler.build(optimizer, steps)
    return optimizer, schedule


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return UnevenLM()


@on_ranks(2)
def test_a_recipe_trains_what_torch_optim_trains() -> None:
    """The ranks see the same rows, so that gradients are one process's."""
    model, matrix = model_of(), {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    fully_shard(model, mesh=mesh_of())
    recipe = recipe_of(RECIPE)
    optimizer, schedule = made(recipe, model)
    single = Reference(model_of(), muon=matrix, adamw={"lr": 0.01, "weight_decay": 0.05})
    steps = SimpleNamespace(epoch_len=6, num_epochs=1, max_steps=None)
    schedules = recipe.lr_scheduler.build(single.optimizers, steps)
    for step in range(6):
        for trains in (model, single.model):
            trains(*batch(step, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with newton_schulz_in_float32():
            single.step()
        for each in (schedule, *schedules):
            each.step(1)
    assert largest_difference(weights_of(model), single.model) < 1e-5


def test_the_pages_recipe_is_taken() -> None:
    (page,) = blocks("start/trainers", "yaml", "automodel")
    (optimizer,) = recipe_of(page.text).optimizer.build(model_of())
    matrices, others = optimizer.param_groups
    assert (matrices["lr"], others["lr"], others["weight_decay"]) == (1e-4, 1e-4, 0.1)
    assert (matrices["adjust_lr_fn"], others["betas"]) == ("match_rms_adamw", (0.9, 0.95))


class Experts(nn.Module):
    """Stacked as Automodel's: (experts, inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.down_projs = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.down_projs


def test_stacked_experts_of_automodel_are_matrices() -> None:
    """Stacked experts are matrices, and what would be lost is refused."""
    model = nn.Sequential(Experts())
    (optimizer,) = recipe_of(RECIPE).optimizer.build(model)
    (matrices,) = (group for group in optimizer.param_groups if group["rule"] == "muon")
    assert matrices["params"] == [model[0].down_projs]
    del optimizer, matrices
    for wrong, message in (
        ("param_group_overrides: [{pattern: down, lr_mult: 0.5}]", "write 'overrides' into arguments"),
        ("weight_decay: 0.0", "found 0.0 and 0.05; Automodel's scheduler"),
    ):
        text = RECIPE.replace("weight_decay: 0.1", wrong)
        with pytest.raises(ValueError, match=message):
            recipe_of(text).optimizer.build(nn.Sequential(nn.Linear(4, 4), Experts()))
