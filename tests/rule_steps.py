"""Rules on whole matrices in one process, as the steppers drive them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.config.options import parse
from lwopt_backend.groups.registry import MATRIX_RULES, build_matrix_rule
from lwopt_backend.rules import MatrixRule, OwnerStateRule

SHAPES = [(48, 63), (63, 48), (32, 32), (1, 7), (7, 1), (200, 3)]


def rule_of(name: str, **options: Any) -> MatrixRule:
    checked = parse(MATRIX_RULES[name].model({}, name), options, name)
    return build_matrix_rule({"rule": name, **checked.model_dump()}, HostConfig())


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Table = Sequence[tuple[float, float, float]]


def orthogonalized(matrix: Tensor, table: Table, margin: float = 1.0) -> Tensor:
    """Newton-Schulz with a row of ``table`` for each step, in the matrix's dtype; written out here, not taken from our
    rules."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / (x.norm() * margin).clamp(min=1e-7)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


class Trained:
    def __init__(self, rule: MatrixRule, value: Tensor) -> None:
        self.rule = rule
        self.value = value.clone()
        self.state = {key: torch.zeros_like(value) for key in rule.state_keys}
        self.owner_state: dict[str, Any] = {}
        if isinstance(rule, OwnerStateRule):
            self.owner_state = rule.new_owner_state(tuple(value.shape), value.device)

    def update(self, grad: Tensor) -> Tensor:
        """What the owner sends back for ``grad``."""
        grad = self.rule.gradient(grad, self.value)
        self.rule.accumulate(grad, self.state)
        direction = self.rule.direction(grad, self.state).to(self.rule.exchange_dtype)
        if isinstance(self.rule, OwnerStateRule):
            return self.rule.transform_with(direction, self.owner_state)
        return self.rule.transform(direction)

    def step(self, grad: Tensor) -> Tensor:
        self.rule.apply(self.value, self.update(grad), tuple(self.value.shape))
        return self.value


def gradients(shape: tuple[int, ...], steps: int = 4) -> Sequence[Tensor]:
    return [random(shape, 100 + step) for step in range(steps)]


def trained(rule: MatrixRule, shape: tuple[int, ...], steps: int = 4) -> Tensor:
    matrix = Trained(rule, random(shape, 1))
    for grad in gradients(shape, steps):
        matrix.step(grad)
    return matrix.value


def trained_by(make: Callable[[torch.nn.Parameter], torch.optim.Optimizer], shape: tuple[int, int]) -> Tensor:
    param = torch.nn.Parameter(random(shape, 1))
    optimizer = make(param)
    for grad in gradients(shape):
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()
