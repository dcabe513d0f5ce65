"""Muon in every dialect: against torch.optim.Muon bit by bit, short plain references, and published implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from lwopt_backend.rules import gram_newton_schulz, newton_schulz
from lwopt_backend.rules.coefficients import TABLES, by_step
from lwopt_backend.rules.scales import SCALES
from tests.rule_steps import SHAPES, Trained, gradients, random, rule_of, trained, trained_by

SIMPLE = (3.4445, -4.7750, 2.0315)
ALL_RULES = ["muon", "normuon", "adamuon"]


# Against torch.optim.Muon


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"lr": 0.02, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "weight_decay": 0.3},
    ],
    ids=str,
)
def test_the_defaults_are_torchs_bit_by_bit(shape: tuple[int, int], options: dict[str, Any]) -> None:
    theirs = trained_by(torch.optim.Muon, shape, grouped=False, **options)
    assert torch.equal(trained(rule_of("muon", **options), shape), theirs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coupled_decay_is_torch_with_the_weight_in_the_gradient(shape: tuple[int, int]) -> None:
    param = torch.nn.Parameter(random(shape, 1))
    optimizer = torch.optim.Muon([param], weight_decay=0)
    for grad in gradients(shape):
        param.grad = grad + 0.3 * param.detach()
        optimizer.step()
    ours = trained(rule_of("muon", weight_decay=0.3, weight_decay_form="coupled"), shape)
    torch.testing.assert_close(ours, param.detach(), rtol=0, atol=1e-5)
    assert not torch.allclose(ours, trained(rule_of("muon", weight_decay=0.3), shape), rtol=0, atol=1e-4)


# Momentum


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("form", ["ema", "sum"])
def test_momentum_and_direction_are_those_written_down_here(form: str, nesterov: bool) -> None:
    rule = rule_of("muon", momentum=0.9, momentum_form=form, nesterov=nesterov)
    state, expected = {"momentum_buffer": torch.zeros(3)}, torch.zeros(3)
    for grad in (random((3,), seed) for seed in range(4)):
        kept = grad.clone()
        rule.accumulate(grad, state)
        expected = 0.9 * expected + (0.1 if form == "ema" else 1.0) * grad
        torch.testing.assert_close(state["momentum_buffer"], expected)
        ahead = 0.9 * expected + (0.1 if form == "ema" else 1.0) * grad
        torch.testing.assert_close(rule.direction(grad, state), ahead if nesterov else expected)
        torch.testing.assert_close(state["momentum_buffer"], expected)
        assert torch.equal(grad, kept)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_sum_form_has_a_buffer_twenty_times_as_large_and_the_same_updates(nesterov: bool) -> None:
    ema, total = (
        Trained(rule_of("muon", ns_dtype="float32", momentum_form=form, nesterov=nesterov), random((12, 8), 1))
        for form in ("ema", "sum")
    )
    for grad in gradients((12, 8)):
        torch.testing.assert_close(ema.update(grad), total.update(grad), rtol=0, atol=1e-5)
        torch.testing.assert_close(20 * ema.state["momentum_buffer"], total.state["momentum_buffer"])


# Factors by shape

SCALES_WRITTEN_OUT: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: max(1, m / n) ** 0.5,
    "shape_scaling": lambda m, n: max(1, m / n) ** 0.5,
    "match_rms_adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "rms_norm": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "spectral": lambda m, n: max(m, n) ** 0.5,
    "unit_rms_norm": lambda m, n: (m / n) ** 0.5,
    "spectral_norm": lambda m, n: (m / n) ** 0.5,
    "none": lambda m, n: 1.0,
}


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("shape", [(6, 24), (24, 6), (5, 5)], ids=str)
def test_the_factor_by_shape_is_on_the_update_and_not_on_the_decay(name: str, shape: tuple[int, int]) -> None:
    rule = rule_of("muon", lr=0.1, weight_decay=0.5, adjust_lr_fn=name, extra_scale_factor=3.0)
    assert math.isclose(rule.scale(shape), 3 * SCALES_WRITTEN_OUT[name](*shape), rel_tol=1e-12)
    value, update = random(shape, 0), random(shape, 1)
    expected = value * (1 - 0.1 * 0.5) - 0.1 * 3 * SCALES_WRITTEN_OUT[name](*shape) * update
    rule.apply(value, update, shape)
    torch.testing.assert_close(value, expected)


def test_every_name_is_written_out_here() -> None:
    assert set(SCALES_WRITTEN_OUT) == set(SCALES)


# Weight decay


def test_cautious_decay_takes_elements_that_the_update_moves_towards_zero() -> None:
    rule = rule_of("muon", lr=0.1, weight_decay=0.5, weight_decay_form="cautious")
    value, update = random((8, 8), 0), random((8, 8), 1).bfloat16()
    update[0], value[1] = 0.0, 0.0
    value[2], update[2] = 1e-30, -1e-30  # whose product is zero
    expected = value.clone()
    for i in range(8):
        for j in range(8):
            towards_zero = (value[i, j] >= 0) == (update[i, j] >= 0) or value[i, j] == 0 or update[i, j] == 0
            expected[i, j] = value[i, j] * (0.95 if towards_zero else 1.0) - 0.1 * update[i, j].float()
    rule.apply(value, update, (8, 8))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(value[2], torch.full((8,), 1.1e-30), rtol=1e-2, atol=0)  # no decay, away from zero


def test_cautious_decay_of_aligned_elements_has_the_bits_of_decoupled_decay() -> None:
    values = [random((8, 8), 0) for _ in range(2)]
    for form, value in zip(("decoupled", "cautious"), values):
        rule_of("muon", lr=0.1, weight_decay=0.5, weight_decay_form=form).apply(value, value.sign(), (8, 8))
    assert torch.equal(*values)


# Tables of coefficients


def minimax_quintic(low: float, high: float) -> list[float]:
    """Of odd polynomials of degree 5, the one nearest to one on [low, high] (Remez' exchange, fp64)."""
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    error = previous = math.inf
    while error == math.inf or abs(error - previous) > 1e-15:
        points = [low, *inner, high]
        rows = [[x, x**3, x**5, (-1.0) ** i] for i, x in enumerate(points)]
        a, b, c, new = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.ones(4).double()).tolist()
        error, previous = new, error
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
    return [a, b, c]


def polar_express(steps: int, cushion: float, margin: float = 1.0) -> list[list[float]]:
    """Theorem 3.1 and algorithm 1 of arXiv 2505.16932, from singular values in [0.001, 1]."""
    low, high, rows = 1e-3, 1.0, []
    for step in range(steps):
        near = max(low, cushion * high)
        row = minimax_quintic(near, high) if near / high < 1 - 5e-6 else [15 / 8, -10 / 8, 3 / 8]
        p_low, p_high = (sum(k * x**power for k, power in zip(row, (1, 3, 5))) for x in (low, high))
        if near > low:  # centred around one again
            row = [2 * k / (p_low + p_high) for k in row]
        if step < steps - 1:
            row = [k / margin**power for k, power in zip(row, (1, 3, 5))]
        rows.append(row)
        low = sum(k * low**power for k, power in zip(row, (1, 3, 5)))
        high = 2 - low
    return rows


def test_polar_express_is_what_its_paper_computes() -> None:
    """The paper's table is composed without a margin, which is then put into all rows but the last."""
    rows = polar_express(8, cushion=0.02407327424182761)
    for row, given in zip(rows[:7], TABLES["polar_express"].triples):
        assert [k / 1.01**power for k, power in zip(row, (1, 3, 5))] == pytest.approx(given, abs=1e-9)
    assert TABLES["polar_express"].triples[7] == pytest.approx(rows[7], abs=1e-8) == (15 / 8, -10 / 8, 3 / 8)


def test_polar_express_5_is_the_composition_for_five_steps() -> None:
    rows = polar_express(5, cushion=0.02, margin=1.02)
    for row, given in zip(rows, TABLES["polar_express_5"].triples, strict=True):
        assert row == pytest.approx(given, abs=1e-9)


MARGINS = {"simple": 1.0, "quintic": 1.0, "polar_express": 1.01, "polar_express_5": 1.02}  # on the norm
# Where five steps take singular values of 0.01 to 1 in fp64.
BANDS = {
    "simple": (0.68, 1.14),
    "quintic": (0.97, 1.04),
    "polar_express": (0.87, 1.13),
    "polar_express_5": (0.85, 1.15),
}


@pytest.mark.parametrize("iterate", [newton_schulz, gram_newton_schulz])
@pytest.mark.parametrize("table", TABLES)
def test_a_table_takes_singular_values_where_its_polynomials_do(table: str, iterate: Callable[..., Tensor]) -> None:
    values = torch.logspace(-2, 0, 40, dtype=torch.float64)
    u, _, v = torch.linalg.svd(random((40, 64), 0).double(), full_matrices=False)
    matrix = u @ torch.diag(values) @ v
    done = iterate(matrix, steps=5, coefficients=table, eps=1e-7, dtype=torch.float64)
    x = values / values.norm() / MARGINS[table]
    for a, b, c in by_step(table, 5):
        x = a * x + b * x**3 + c * x**5
    torch.testing.assert_close(done, u @ torch.diag(x) @ v, rtol=0, atol=1e-9)
    full = torch.logspace(-2, 0, 1000, dtype=torch.float64) / MARGINS[table]
    for a, b, c in by_step(table, 5):
        full = a * full + b * full**3 + c * full**5
    assert full.min() > BANDS[table][0] and full.max() < BANDS[table][1]


def test_polar_express_goes_on_with_its_last_row_and_converges() -> None:
    assert by_step("polar_express", 10)[7:] == ((1.875, -1.25, 0.375),) * 3
    assert by_step("polar_express", 3) == TABLES["polar_express"].triples[:3]
    matrix = random((24, 40), 0).double()
    done = newton_schulz(matrix, steps=10, coefficients="polar_express", eps=1e-7, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(done, u @ v, rtol=0, atol=1e-9)


@pytest.mark.parametrize("iterate", [newton_schulz, gram_newton_schulz])
def test_a_list_has_three_numbers_for_every_step(iterate: Callable[..., Tensor]) -> None:
    matrix, rows = random((8, 12), 0).double(), [(3.0, -3.2, 1.2), (2.0, -1.5, 0.5)]
    expected = matrix / matrix.norm()
    for a, b, c in rows:
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected
    done = iterate(matrix, steps=2, coefficients=rows, eps=1e-7, dtype=torch.float64)
    torch.testing.assert_close(done, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ns_coefficients": "quintik"},
            "one of 'simple', 'quintic', 'polar_express', 'polar_express_5'; found 'quintik'",
        ),
        (
            {"ns_coefficients": "quintic", "ns_steps": 6},
            "'quintic' is for 5 steps, but ns_steps is 6; set ns_steps to 5",
        ),
        ({"ns_coefficients": [[2, -1.5, 0.5]] * 7}, "the list given is for 7 steps, but ns_steps is 5"),
        ({"ns_coefficients": [1.0, 2.0]}, "expected three numbers"),
        ({"ns_coefficients": [[1.0, 2.0, True]] * 5}, "expected three numbers"),
        ({"ns_coefficients": [1.0, 2.0, math.inf]}, "expected finite numbers"),
        ({"gram_restarts": [3, 2]}, "gram_restarts: expected increasing numbers below ns_steps, 5; found"),
        ({"gram_restarts": [5]}, "gram_restarts: expected increasing numbers below ns_steps, 5; found"),
        ({"gram_restarts": [2, 4]}, "gram_restarts is (2, 4), but without gram_aspect no matrix takes Gram"),
        ({"gram_restarts": []}, "gram_restarts is (), but without gram_aspect"),
        ({"adjust_lr_fn": "spectral_nrm"}, "adjust_lr_fn: input should be 'original', 'match_rms_adamw'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        rule_of("muon", **options)
    assert message in str(caught.value)


# Small, large, zero and not finite


def clipped(shape: tuple[int, ...], norm: float) -> Tensor:
    """A well-conditioned matrix of this norm."""
    u, _, v = torch.linalg.svd(random(shape, 3), full_matrices=False)
    return (u @ v) / min(shape[-2:]) ** 0.5 * norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm", [1e-8, 1e-12, 1e-20, 1e-30, 1e-37, 1e25])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16), (1, 8), (3, 12, 20)], ids=str)
@pytest.mark.parametrize("iterate", [newton_schulz, gram_newton_schulz])
def test_a_matrix_that_clipping_left_tiny_is_orthogonalized(
    iterate: Callable[..., Tensor], shape: tuple[int, ...], norm: float, dtype: torch.dtype
) -> None:
    options = {"steps": 5, "coefficients": SIMPLE, "eps": 1e-7, "dtype": dtype}
    matrices = clipped(shape, norm)
    values = torch.linalg.svdvals(iterate(matrices, **options).float())
    usual = torch.linalg.svdvals(iterate(clipped(shape, 1.0), **options).float())
    torch.testing.assert_close(values, usual, rtol=0, atol=0.05)
    assert values.min() > 0.6 and values.max() < 1.25
    if len(shape) == 2 and norm < 1e-10:  # without the guard this is not so
        assert torch.linalg.svdvals(_muon._zeropower_via_newtonschulz(matrices, SIMPLE, 5, 1e-7).float()).max() < 0.6


@pytest.mark.parametrize("norm", [1.01e-7, 2e-7, 1e-3, 1e15])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_eps_on_the_bits_are_torchs(shape: tuple[int, int], norm: float) -> None:
    matrix = clipped(shape, norm)
    ours = newton_schulz(matrix, steps=5, coefficients=SIMPLE, eps=1e-7, dtype=torch.bfloat16)
    assert torch.equal(ours, _muon._zeropower_via_newtonschulz(matrix, SIMPLE, 5, 1e-7))


def test_a_tiny_matrix_does_not_change_the_others_of_its_batch() -> None:
    options = {"steps": 5, "coefficients": SIMPLE, "eps": 1e-7, "dtype": torch.bfloat16}
    matrices = torch.stack([random((12, 20), 0), clipped((12, 20), 1e-20), torch.zeros(12, 20), random((12, 20), 1)])
    together = newton_schulz(matrices, **options)
    without = newton_schulz(matrices[[0, 0, 3, 3]], **options)
    assert torch.equal(together[[0, 3]], without[[0, 3]])
    assert together[2].abs().max() == 0 and torch.linalg.svdvals(together[1].float()).min() > 0.6


@pytest.mark.parametrize("eps", [0.0, 1e-7])
@pytest.mark.parametrize("shape", [(4, 8), (8, 4), (2, 8, 4), (1, 5)], ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_zero_stays_zero(table: str, shape: tuple[int, ...], eps: float) -> None:
    options = {"steps": 5, "coefficients": table, "eps": eps, "dtype": torch.bfloat16}
    for iterate in (newton_schulz, gram_newton_schulz):
        assert torch.equal(iterate(torch.zeros(shape), **options), torch.zeros(shape).bfloat16())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (1, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"gram_aspect": 1.0}, {"weight_decay_form": "cautious"}], ids=str)
@pytest.mark.parametrize("name", ALL_RULES)
def test_what_is_not_finite_is_seen_in_the_weight(
    name: str, options: dict[str, Any], shape: tuple[int, int], wrong: float
) -> None:
    matrix = Trained(rule_of(name, **options), random(shape, 1))
    grad = random(shape, 2)
    grad[0, 1] = wrong
    assert matrix.step(grad).isnan().all()


@pytest.mark.parametrize("name", ALL_RULES)
def test_a_zero_gradient_only_decays_by_the_unadjusted_learning_rate(name: str) -> None:
    matrix = Trained(rule_of(name, lr=0.1, weight_decay=0.5), random((9, 6), 1))
    torch.testing.assert_close(matrix.step(torch.zeros(9, 6)), random((9, 6), 1) * 0.95, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(5, 24, 40), (5, 40, 24), (2, 3, 1, 8), (5, 8, 1)], ids=str)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("iterate", [newton_schulz, gram_newton_schulz])
def test_a_batch_of_any_dimensions_equals_its_matrices(
    iterate: Callable[..., Tensor], table: str, shape: tuple[int, ...]
) -> None:
    matrices = random(shape, 0)
    kept = matrices.clone()
    options = {"steps": 5, "coefficients": table, "eps": 1e-7, "dtype": torch.float32}
    together = iterate(matrices, **options)
    one_by_one = [iterate(matrix, **options) for matrix in matrices.flatten(0, -3)]
    torch.testing.assert_close(together, torch.stack(one_by_one).view(shape), rtol=0, atol=1e-4)
    assert torch.equal(matrices, kept)


# Published implementations

PYTORCH_OPTIMIZER = {
    "original": {},
    "rms": {"adjust_lr_fn": "match_rms_adamw"},
    "quintic": {"ns_coefficients": "quintic"},
    "no nesterov": {"nesterov": False},
    "coupled": {"weight_decay_form": "coupled"},
}
THEIRS = {
    "original": {},
    "rms": {"use_adjusted_lr": True},
    "quintic": {"ns_coeffs": "quintic"},
    "no nesterov": {"nesterov": False},
    "coupled": {"weight_decouple": False},
}


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (32, 32), (200, 3)], ids=str)
@pytest.mark.parametrize("case", THEIRS)
def test_muon_is_that_of_pytorch_optimizer(case: str, shape: tuple[int, int]) -> None:
    """It reduces its norms in another order, which a rounding of bf16 carries into every element."""
    published = pytest.importorskip("pytorch_optimizer")
    shared = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    theirs = trained_by(published.Muon, shape, grouped=True, **shared, **THEIRS[case])
    ours = trained(rule_of("muon", **shared, **PYTORCH_OPTIMIZER[case]), shape)
    assert (ours - theirs).norm() < 0.01 * (theirs - random(shape, 1)).norm()


@pytest.mark.parametrize("shape", [(48, 63), (63, 48)], ids=str)
def test_the_sum_form_is_the_momentum_of_pytorch_optimizers_muonclip(shape: tuple[int, int]) -> None:
    published = pytest.importorskip("pytorch_optimizer")
    shared = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    theirs = trained_by(published.MuonClip, shape, grouped=True, **shared)
    ours = Trained(
        rule_of("muon", **shared, momentum_form="sum", nesterov=False, adjust_lr_fn="match_rms_adamw"), random(shape, 1)
    )
    for grad in gradients(shape):
        ours.step(grad)
    assert (ours.value - theirs).norm() < 0.01 * (theirs - random(shape, 1)).norm()


@pytest.mark.parametrize("restarts", [(2,), (1, 3)], ids=str)
@pytest.mark.parametrize("table", ["simple", "quintic"])
def test_gram_newton_schulz_is_that_of_pytorch_optimizer(table: str, restarts: tuple[int, ...]) -> None:
    matrix_module = pytest.importorskip("pytorch_optimizer.optimizer.utils.matrix")
    matrix = random((24, 96), 0)
    theirs = matrix_module.zero_power_via_gram_newton_schulz(
        matrix, weights="original" if table == "simple" else table, dtype=torch.float32, reset_steps=restarts
    )
    ours = gram_newton_schulz(matrix, steps=5, coefficients=table, eps=1e-7, dtype=torch.float32, restarts=restarts)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_newton_schulz_is_that_of_the_package_gram_newton_schulz() -> None:
    """Which iterates in fp16, and without its kernels runs anywhere."""
    package = pytest.importorskip("gram_newton_schulz")
    rows = TABLES["quintic"].triples
    theirs = package.GramNewtonSchulz(ns_use_kernels=False, ns_coefficients=rows, compile_kwargs=None)(
        random((24, 96), 0)
    )
    ours = gram_newton_schulz(
        random((24, 96), 0), steps=5, coefficients="quintic", eps=1e-7, dtype=torch.float32, restarts=(2,)
    )
    assert (ours - theirs).norm() < 0.02 * ours.norm()
