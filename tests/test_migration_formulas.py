"""Settings that the page gives, and published formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from lwopt_backend.registry import optimizer_arguments
from tests.migration import distance, eager, ours_for, rules_for
from tests.rule_steps import SHAPES, Trained, gradients, random, rule_of


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_bit_by_bit_and_pytorch_optimizer_to_bfloat16s_rounding(shape: tuple[int, int]) -> None:
    for peer in ("torch", "pytorch_optimizer"):
        ours, param = ours_for(peer, shape), nn.Parameter(random(shape, 1))
        if peer == "torch":
            theirs = torch.optim.Muon([param], lr=0.02)
        else:
            theirs = pytorch_optimizer.Muon([{"params": [param], "use_muon": True}])
        for grad in gradients(shape):
            param.grad = grad.clone()
            theirs.step()
            ours.step(grad)
        if peer == "torch":
            assert torch.equal(ours.value, param.detach())
            assert torch.equal(ours.state["momentum_buffer"], theirs.state[param]["momentum_buffer"])
        assert distance(ours.value, param.detach(), random(shape, 1)) < 1e-2  # bfloat16 has 8 bits


SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


POLAR = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonal(u: Tensor, table: list[tuple[float, float, float]], dtype: torch.dtype, margin: float = 1.0) -> Tensor:
    x = u.to(dtype)
    x = x.mT if u.size(0) > u.size(1) else x
    x = x / (x.norm() * margin + 1e-8)
    for a, b, c in table:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if u.size(0) > u.size(1) else x).float()


Step = Callable[[Tensor, Tensor, Tensor, torch.dtype], None]


def keller_jordan(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.95 * buffer + 0.05 * grad)
    rows, columns = value.shape
    update = orthogonal(0.95 * buffer + 0.05 * grad, SIMPLE, dtype)
    value.sub_(0.02 * max(1, rows / columns) ** 0.5 * update)


def dion(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.95 * buffer + grad)
    rows, columns = value.shape
    value.mul_(1 - 0.01 * 0.01).sub_(0.01 * (rows / columns) ** 0.5 * orthogonal(buffer, POLAR, dtype, 1.02))


def megatron(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.9 * buffer + 0.1 * grad)
    value.mul_(1 - 3e-4 * 0.01).sub_(3e-4 * max(value.shape) ** 0.5 * orthogonal(buffer, QUINTIC, dtype))


def moonlight(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.95 * buffer + grad)
    update = orthogonal(grad + 0.95 * buffer, SIMPLE, dtype)
    value.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * 0.2 * max(value.shape) ** 0.5 * update)


FORMULAS: dict[str, Step] = {
    "keller_jordan": keller_jordan,
    "dion": dion,
    "megatron": megatron,
    "moonlight": moonlight,
}


def by_formula(peer: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weight and the momentum after some steps."""
    value, buffer = random(shape, 1), torch.zeros(shape)
    for grad in gradients(shape):
        FORMULAS[peer](value, buffer, grad, dtype)
    return value, buffer


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (32, 32), (200, 3)], ids=str)
@pytest.mark.parametrize("peer", FORMULAS)
def test_published_formulas(peer: str, shape: tuple[int, int]) -> None:
    """In fp32 to its rounding, of weights that are thousands of times what they move by; in bfloat16 no farther from
    that than twice the formula's own rounding."""
    start = random(shape, 1)
    ours, rounded = ours_for(peer, shape, ns_dtype="float32"), ours_for(peer, shape)
    for grad in gradients(shape):
        ours.step(grad)
        rounded.step(grad)
    value, buffer = by_formula(peer, shape, torch.float32)
    assert distance(ours.value, value, start) < 1e-3
    torch.testing.assert_close(ours.state["momentum_buffer"], buffer)
    theirs = distance(by_formula(peer, shape, torch.bfloat16)[0], value, start)
    assert distance(rounded.value, value, start) < 2 * theirs < 0.3
    defaults = Trained(rule_of("muon"), start)
    for grad in gradients(shape):
        defaults.step(grad)
    assert shape != (48, 63) or distance(defaults.value, value, start) > 0.1, "our defaults are other numbers"


def test_jordans_factor_of_convolutions_is_that_of_the_kernel() -> None:
    """And so DeepSpeed's: one for square kernels, which is ``none``."""
    kernel, grad = random((16, 2, 3, 3), 1), random((16, 2, 3, 3), 2)
    update = orthogonal((0.05 + 0.95 * 0.05) * grad.view(16, 18), SIMPLE, torch.float32)
    theirs = kernel.view(16, 18) - 0.02 * max(1, grad.size(-2) / grad.size(-1)) ** 0.5 * update
    options = {**rules_for("keller_jordan").matrix.options.model_dump(), "ns_dtype": "float32", "adjust_lr_fn": "none"}
    ours = Trained(rule_of("muon", **options), kernel.view(16, 18))
    assert distance(ours.step(grad.view(16, 18)), theirs, kernel.view(16, 18)) < 1e-4


def test_megatrons_spectral_is_not_dions() -> None:
    megatrons, dions = (ours_for(peer, (4096, 1024)).rule.scale((4096, 1024)) for peer in ("megatron", "dion"))
    assert (megatrons, dions) == (64.0, 2.0)


# DeepSpeed's own Muon


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
