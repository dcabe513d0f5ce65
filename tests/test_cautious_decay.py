"""Cautious weight decay of the element-wise rules, beside its formulas, which test_equality.py has."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.config.param_groups import ElementwiseGroups
from lwopt_backend.config.registry import new_state, options_of
from lwopt_backend.runtime import elementwise as cautious_decay
from lwopt_backend.runtime.whole import Slices
from tests.rule_steps import gradients, random

SHAPE = (13, 7)
GRADS = gradients(SHAPE, 20)


class Doubling(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self) -> None:  # type: ignore[override]
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(param.abs() * param.grad.sign(), alpha=-self.param_groups[0]["lr"])


def group_of(rule: str, **given: Any) -> dict[str, Any]:
    options = {"weight_decay": 0.1, "weight_decay_form": "cautious", **given}
    return {"rule": rule, **options_of(rule, options, "test").model_dump()}


def trained(group: dict[str, Any], start: Tensor) -> Tensor:
    value, optimizers = start.clone(), ElementwiseGroups()
    state = new_state(value, group)
    for grad in GRADS:
        optimizers.step(0, group, [Slices(value, grad.clone(), state)])
    return value


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
def test_a_parameter_that_is_stepped_in_chunks_has_the_same_bits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters advance once. A chunk has several parts and no more than its elements."""
    group, start = group_of(rule, lr=1e-2), random(SHAPE, 1)
    whole = trained(group, start)
    monkeypatch.setattr(cautious_decay, "CHUNK", 20)
    assert torch.equal(trained(group, start), whole)
    parts = [Slices(random((n,), n), random((n,), n), {}) for n in (8, 8, 8, 50)]
    chunks = [[piece.value.numel() for piece in some] for some in cautious_decay._chunks(parts)]
    assert chunks == [[8, 8], [8], [20], [20], [10]]


def test_an_update_too_small_to_change_a_weight_still_has_a_sign() -> None:
    value = torch.tensor([1e6, 1e6])
    group = group_of("lion", lr=1e-4, weight_decay=100.0)
    ElementwiseGroups().step(0, group, [Slices(value, torch.tensor([1.0, -1.0]), new_state(value, group))])
    assert value.tolist() == [pytest.approx(0.99e6), 1e6]


DOUBLING = f"{Doubling.__module__}.{Doubling.__qualname__}"
CLASS = "torch_optimizer_elementwise"
WRONG = [
    (CLASS, {"class": DOUBLING}, "depends on the weight even without decay; leave weight_decay_form out"),
    (CLASS, {"class": "pytorch_optimizer.MSVAG"}, "unknown key 'weight_decay_form'"),
    ("adamw", {"weight_decay_form": "cautius"}, "input should be 'decoupled' or 'cautious'; found 'cautius'"),
    ("lion", {"weight_decay_form": "cautius"}, "input should be 'own' or 'cautious'; found 'cautius'"),
]


@pytest.mark.parametrize(("rule", "given", "message"), WRONG)
def test_a_form_of_decay_that_there_is_not_is_refused(rule: str, given: dict[str, Any], message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    elementwise = {"name": rule, "weight_decay_form": "cautious", **given}
    with pytest.raises(ValueError, match=message):
        LayerWiseOptimizer(model, elementwise=elementwise, report=False)
