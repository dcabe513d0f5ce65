"""DeepSpeed's own Muon beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lwopt_backend.migration import from_checkpoint
from lwopt_backend.registry import optimizer_arguments
from tests.migration import distance, eager, ours_for, rules_for
from tests.rule_steps import SHAPES, gradients, random


@pytest.fixture
def deepspeed_muon() -> Iterator[Any]:
    """DeepSpeed's module of it."""
    from deepspeed.runtime.zero.muon import muon_optimizer

    with eager():
        yield muon_optimizer


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 1 not in shape], ids=str)
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_deepspeeds_update(deepspeed_muon: Any, shape: tuple[int, int], method: str) -> None:
    """In fp32 to its rounding; where DeepSpeed iterates in 16 bits we are no farther from that than twice as it is."""
    changed = {} if method == "gram" else {"gram_aspect": None, "gram_restarts": None, "ns_dtype": "bfloat16"}
    ours, exact = ours_for("deepspeed", shape, **changed), ours_for("deepspeed", shape)
    buffer, zero = torch.zeros(shape), torch.zeros(shape)
    for grad in gradients(shape):
        expected = exact.update(grad) * ours.rule.scale(shape)
        mine = ours.update(grad).float() * ours.rule.scale(shape)
        theirs = deepspeed_muon.muon_update(grad.clone(), buffer, ns_method=method)
        assert distance(mine, expected, zero) < max(1e-4, 2 * distance(theirs, expected, zero)) < 0.5
        torch.testing.assert_close(ours.state["momentum_buffer"], buffer)


def test_deepspeeds_whole_optimizer(deepspeed_muon: Any) -> None:
    """Without ZeRO, where it clips nothing; both halves, by the defaults of its param groups."""
    start, bias = random((24, 40), 1), random((24,), 2)
    weight, other = nn.Parameter(start.clone()), nn.Parameter(bias.clone())
    halves = [{"params": [weight], "use_muon": True}, {"params": [other], "use_muon": False}]
    theirs = deepspeed_muon.MuonWithAuxAdam(halves)
    rules, ours = rules_for("deepspeed"), ours_for("deepspeed", (24, 40))
    mine = nn.Parameter(bias.clone())
    adamw = torch.optim.AdamW([mine], **optimizer_arguments(rules.elementwise.options.model_dump()))
    for grad, of_bias in zip(gradients((24, 40)), gradients((24,))):
        ours.step(grad)
        weight.grad, other.grad, mine.grad = grad.clone(), of_bias.clone(), of_bias.clone()
        theirs.step()
        adamw.step()
    assert distance(ours.value, weight.detach(), start) < 1e-4
    assert distance(mine.detach(), other.detach(), bias) < 1e-4


def test_deepspeeds_and_jordans_optimizer_is_read_in_the_order_it_has(deepspeed_muon: Any) -> None:
    """It sorts the matrices of a group by size."""
    params = {"small": nn.Parameter(random((2, 3), 1)), "large": nn.Parameter(random((4, 3), 2))}
    bias = nn.Parameter(random((4,), 3))
    halves = [{"params": [*params.values()], "use_muon": True}, {"params": [bias], "use_muon": False}]
    optimizer = deepspeed_muon.MuonWithAuxAdam(halves)
    for step in range(2):
        for param in [*params.values(), bias]:
            param.grad = random(tuple(param.shape), 10 + step)
        optimizer.step()
    names = {id(param): name for name, param in {**params, "bias": bias}.items()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    assert order == ["large", "small", "bias"]
    for source in ("deepspeed", "keller_jordan"):
        found = from_checkpoint(optimizer.state_dict(), order, source=source, momentum_form="sum")
        for name, param in params.items():
            expected = optimizer.state[param]["momentum_buffer"] / (1 - 0.95)
            torch.testing.assert_close(found[name]["momentum_buffer"], expected)
        assert found["bias"]["step"] == 2.0
        assert torch.equal(found["bias"]["exp_avg_sq"], optimizer.state[bias]["exp_avg_sq"])
