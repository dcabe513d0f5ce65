"""The rule's arithmetic is torch.optim.Muon's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import _muon
from torch.utils.flop_counter import FlopCounterMode

from lwopt_backend.registry import MATRIX_RULES
from lwopt_backend.rule_options import MuonOptions
from lwopt_backend.rules import Muon, gram_newton_schulz, newton_schulz
from lwopt_backend.rules.gram_newton_schulz import segments
from tests.rule_steps import SHAPES, rule_of

SIMPLE = (3.4445, -4.7750, 2.0315)
TABLES = {"simple": 5, "quintic": 5, "polar_express": 8, "polar_express_5": 5}  # and numbers of steps


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


def iterate(
    function: Callable[..., torch.Tensor], matrices: torch.Tensor, dtype: torch.dtype, steps: int = 5
) -> torch.Tensor:
    return function(matrices, steps=steps, coefficients=SIMPLE, eps=1e-7, dtype=dtype)


def matrices_of(spectrum: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """fp64 matrices of Gaussians, or with given singular values."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if spectrum == "gaussian":
        return matrices
    u, values, v = torch.linalg.svd(matrices, full_matrices=False)
    count = values.size(-1)
    spectra = {
        "even in logarithm to 1e-2": torch.logspace(0, -2, count),
        "even in logarithm to 1e-6": torch.logspace(0, -6, count),
        "one large": torch.cat([torch.ones(1), torch.full((count - 1,), 1e-3)]),
        "half zero": (torch.arange(count) < count // 2).float(),
    }
    return u @ torch.diag(spectra[spectrum].double()) @ v


SPECTRA = ["gaussian", "even in logarithm to 1e-2", "even in logarithm to 1e-6", "one large", "half zero"]
LONG = [(48, 192), (192, 48), (31, 47), (200, 3), (7, 1), (1, 1), (3, 24, 40), (2, 40, 24)]


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gram_newton_schulz_is_the_same_polynomial(spectrum: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """To rounding, which a step makes up to 3.4 times as large: p(0) is the first coefficient."""
    matrices = matrices_of(spectrum, shape)
    kept = matrices.clone()
    for steps in range(1, 8):
        plain, gram = (iterate(function, matrices, dtype, steps) for function in (newton_schulz, gram_newton_schulz))
        assert gram.dtype == dtype and gram.shape == matrices.shape
        torch.testing.assert_close(gram, plain, rtol=0, atol=2 * torch.finfo(dtype).eps * SIMPLE[0] ** steps)
    assert torch.equal(matrices, kept)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(96, 144), (144, 96), (96, 384), (384, 96)], ids=str)
def test_gram_newton_schulz_in_bf16_keeps_singular_values_in_the_band(spectrum: str, shape: tuple[int, int]) -> None:
    """No value above what Jordan's coefficients allow; and those that exact steps bring to the band are there."""
    matrix = matrices_of(spectrum, shape)
    exact = iterate(newton_schulz, matrix, torch.float64)
    values = torch.linalg.svdvals(iterate(gram_newton_schulz, matrix, torch.bfloat16).double())
    assert values.max() < 1.25
    arrived = int((torch.linalg.svdvals(exact) > 0.65).sum())
    assert (values[:arrived] > 0.55).all()


def test_gram_newton_schulz_takes_any_number_of_batch_dimensions() -> None:
    matrices = matrices_of("gaussian", (2, 3, 40, 24))
    one_by_one = [iterate(gram_newton_schulz, matrix, torch.float64) for matrix in matrices.flatten(0, 1)]
    batched = iterate(gram_newton_schulz, matrices, torch.float64)
    torch.testing.assert_close(batched, torch.stack(one_by_one).view(2, 3, 40, 24), rtol=0, atol=1e-12)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("restarts", [None, (), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (2, 3, 24, 40)], ids=str)
def test_gram_newton_schulz_takes_every_table_and_any_restarts(
    table: str, restarts: tuple[int, ...] | None, shape: tuple[int, ...]
) -> None:
    matrices = matrices_of("gaussian", shape)
    options = {"steps": TABLES[table], "coefficients": table, "eps": 1e-7, "dtype": torch.float64}
    plain, gram = newton_schulz(matrices, **options), gram_newton_schulz(matrices, restarts=restarts, **options)
    torch.testing.assert_close(gram, plain, rtol=0, atol=1e-9)
    assert (torch.equal(gram, gram_newton_schulz(matrices, **options))) == (
        restarts is None or table_restarts(table) == restarts
    )


def table_restarts(table: str) -> tuple[int, ...]:
    """Where restarts are by default."""
    lengths = [len(segment) for segment in segments(table, TABLES[table])]
    return tuple(sum(lengths[:count]) for count in range(1, len(lengths)))


def test_restarts_come_by_default_before_slopes_grow_too_large() -> None:
    assert {table: table_restarts(table) for table in TABLES} == {
        "simple": (3,), "quintic": (2,), "polar_express": (2, 5), "polar_express_5": (2,),
    }  # fmt: skip
    assert [len(segment) for segment in segments("simple", 9)] == [3, 2, 2, 2]
    assert [len(segment) for segment in segments((50.0, 1.0, 1.0), 3)] == [1, 1, 1]  # never none


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(96, 144), (96, 384)], ids=str)
@pytest.mark.parametrize(("table", "above"), [("quintic", 0.2), ("polar_express", 0.3), ("polar_express_5", 0.3)])
def test_restarts_of_the_tables_hold_rounding_down_in_bf16(
    table: str, above: float, shape: tuple[int, int], spectrum: str
) -> None:
    """With 3 steps before the restart, as for torch's coefficients, some of these end 0.5 to 2.5 above."""
    matrix = matrices_of(spectrum, shape)
    options = {"steps": 5, "coefficients": table, "eps": 1e-7}
    plain = torch.linalg.svdvals(newton_schulz(matrix, dtype=torch.bfloat16, **options).double())
    gram = torch.linalg.svdvals(gram_newton_schulz(matrix, dtype=torch.bfloat16, **options).double())
    assert gram.max() < plain.max() + above


def muon(gram_aspect: float | None, **options: Any) -> tuple[Muon, dict[str, Any]]:
    options = {"gram_aspect": gram_aspect, **options}
    return rule_of("muon", **options), MuonOptions(**options).model_dump()


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (4, 30, 20)], ids=str)
def test_gram_aspect_decides_by_the_sides_which_iteration_a_matrix_takes(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    plain, gram = (iterate(function, matrices, torch.bfloat16) for function in (newton_schulz, gram_newton_schulz))
    assert not torch.equal(plain, gram)
    for aspect, expected in [(None, plain), (1.51, plain), (1.5, gram), (1.0, gram)]:
        assert torch.equal(muon(aspect)[0].transform(matrices), expected), aspect


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("aspect", [None, 1.0, 1.5])
@pytest.mark.parametrize("shape", [(16, 16), (16, 20), (24, 16), (16, 64), (64, 16)], ids=str)
def test_the_cost_of_a_matrix_is_the_flops_that_its_transform_runs(
    shape: tuple[int, int], aspect: float | None, steps: int
) -> None:
    cost = cost_and_flops(shape, aspect, ns_steps=steps)
    if aspect == 1.5:
        assert cost <= cost_and_flops(shape, None, ns_steps=steps)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("restarts", [None, (1,), (1, 2, 4)], ids=str)
def test_the_cost_knows_tables_and_restarts(table: str, restarts: tuple[int, ...] | None) -> None:
    cost_and_flops((16, 64), 1.5, ns_coefficients=table, ns_steps=TABLES[table], gram_restarts=restarts)


def cost_and_flops(shape: tuple[int, int], aspect: float | None, **given: Any) -> int:
    """The cost, which is what runs."""
    rule, options = muon(aspect, **given)
    with FlopCounterMode(display=False) as counter:
        rule.transform(torch.ones(shape))
    cost = MATRIX_RULES["muon"].cost(shape, options)
    assert cost == counter.get_total_flops()
    assert isinstance(cost, int)
    return cost
