"""The rule's arithmetic is torch.optim.Muon's."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon

from lwopt_backend.rules import Muon, newton_schulz

SIMPLE = (3.4445, -4.7750, 2.0315)
SHAPES = [(48, 63), (63, 48), (32, 32), (1, 7), (7, 1), (200, 3)]


def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return newton_schulz(matrix, steps=5, coefficients=SIMPLE, eps=1e-7, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_has_the_bits_of_torch(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept = matrix.clone()
    assert torch.equal(orthogonalize(matrix), _muon._zeropower_via_newtonschulz(matrix, SIMPLE, 5, 1e-7))
    assert torch.equal(matrix, kept)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_end_near_one(shape: tuple[int, int]) -> None:
    """Jordan's coefficients are chosen to end in [0.7, 1.2] or so, from singular values that are not tiny."""
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)), full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(0.5, 1.0, min(shape))) @ v
    values = torch.linalg.svdvals(orthogonalize(matrix, torch.float32))
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
def test_a_batch_equals_its_matrices(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = torch.randn((3, *shape), generator=torch.Generator().manual_seed(2))
    batched = orthogonalize(matrices, dtype)
    single = torch.stack([orthogonalize(matrix, dtype) for matrix in matrices])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2  # bf16: a rounding of the norm moves every element
    torch.testing.assert_close(batched, single, rtol=0, atol=tolerance)


def test_a_zero_matrix_stays_zero_and_a_tiny_one_is_orthogonalized() -> None:
    assert torch.equal(orthogonalize(torch.zeros(4, 4)), torch.zeros(4, 4, dtype=torch.bfloat16))
    tiny = torch.eye(4) * 1e-6
    assert torch.linalg.svdvals(orthogonalize(tiny, torch.float32)).min() > 0.6


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_is_torchs_learning_rate_adjustment(shape: tuple[int, int], adjust_lr_fn: str | None) -> None:
    rule = Muon(0.02, 0.1, 0.95, True, SIMPLE, 1e-7, 5, adjust_lr_fn)
    assert 0.02 * rule.scale(shape) == _muon._adjust_lr(0.02, adjust_lr_fn, torch.Size(shape))


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_direction_leave_their_inputs_alone(nesterov: bool) -> None:
    rule = Muon(0.02, 0.1, 0.9, nesterov, SIMPLE, 1e-7, 5, None)
    grad, state = torch.full((4,), 2.0), {"momentum_buffer": torch.full((4,), 1.0)}
    rule.accumulate(grad, state)
    assert torch.allclose(state["momentum_buffer"], torch.full((4,), 0.9 * 1.0 + 0.1 * 2.0))
    direction = rule.direction(grad, state)
    assert torch.allclose(direction, torch.full((4,), 0.1 * 2.0 + 0.9 * 1.1 if nesterov else 1.1))
    assert torch.equal(grad, torch.full((4,), 2.0))
