"""Muon, NorMuon, AdaMuon and QK-clip's factors: against torch.optim.Muon and short formulas."""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon
from torch.utils.flop_counter import FlopCounterMode

from lwopt_backend.groups.registry import MATRIX_RULES, MuonOptions
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.rules import MatrixRule, gram_newton_schulz, newton_schulz, qk_clip_factors, row_factors
from lwopt_backend.rules.muon import DEFINED, SCALES, Muon, takes_gram
from lwopt_backend.rules.newton_schulz import TABLES, by_step, segments
from lwopt_backend.rules.protocol import sums_of
from tests.cells import cells
from tests.references import SHAPES, Trained, gradients, orthogonalized, random, rule_of, trained, trained_by

SIMPLE = (3.4445, -4.7750, 2.0315)
STEPS = {"simple": 5, "quintic": 5, "polar_express": 8, "polar_express_5": 5}  # that a table is for
WAYS = (newton_schulz, gram_newton_schulz)
MOMENTS = ("normuon", "adamuon")
Iterate = Callable[..., Tensor]


def iterated(iterate: Iterate, matrices: Tensor, dtype: torch.dtype, table: Any = SIMPLE, **options: Any) -> Tensor:
    return iterate(matrices, **{"steps": 5, "coefficients": table, "eps": 1e-7, "dtype": dtype, **options})


def with_spectrum(values: Tensor, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """fp64 matrices with these singular values."""
    u, _, v = torch.linalg.svd(random(shape, seed).double(), full_matrices=False)
    return u @ torch.diag(values.double()) @ v


SPECTRA: dict[str, Callable[[int], Tensor] | None] = {
    "gaussian": None,
    "even in logarithm to 1e-2": lambda count: torch.logspace(0, -2, count),
    "even in logarithm to 1e-6": lambda count: torch.logspace(0, -6, count),
    "one large": lambda count: torch.cat([torch.ones(1), torch.full((count - 1,), 1e-3)]),
    "half zero": lambda count: (torch.arange(count) < count // 2).float(),
}


def matrices_of(spectrum: str, shape: tuple[int, ...]) -> Tensor:
    values = SPECTRA[spectrum]
    return with_spectrum(values(min(shape[-2:])), shape) if values else random(shape, 0).double()


# Momentum, factors by shape, weight decay
@cells(
    shape=SHAPES,
    options=[
        {},
        {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"lr": 0.02, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "weight_decay": 0.3},
    ],
)
def test_the_defaults_are_torchs_bit_by_bit(shape: tuple[int, int], options: dict[str, Any]) -> None:
    theirs = trained_by(lambda param: torch.optim.Muon([param], **options), shape)
    assert torch.equal(trained(rule_of("muon", **options), shape), theirs)


@cells(nesterov=[True, False], form=["ema", "sum"])
def test_momentum_and_direction_are_those_written_down_here(form: str, nesterov: bool) -> None:
    rule, share = rule_of("muon", momentum=0.9, momentum_form=form, nesterov=nesterov), 0.1 if form == "ema" else 1.0
    state, expected = {"momentum_buffer": torch.zeros(3)}, torch.zeros(3)
    for grad in (random((3,), seed) for seed in range(4)):
        kept = grad.clone()
        rule.accumulate(grad, state)
        expected = 0.9 * expected + share * grad
        direction = rule.direction(grad, state)
        torch.testing.assert_close(direction, 0.9 * expected + share * grad if nesterov else expected)
        torch.testing.assert_close(state["momentum_buffer"], expected)
        assert torch.equal(grad, kept)


SCALES_WRITTEN_OUT: dict[str, Callable[[int, int], float]] = {
    **dict.fromkeys(("original", "shape_scaling"), lambda m, n: max(1, m / n) ** 0.5),
    **dict.fromkeys(("match_rms_adamw", "rms_norm"), lambda m, n: 0.2 * max(m, n) ** 0.5),
    **dict.fromkeys(("unit_rms_norm", "spectral_norm", "spectral_unclamped"), lambda m, n: (m / n) ** 0.5),
    "spectral": lambda m, n: max(m, n) ** 0.5,
    "none": lambda m, n: 1.0,
}


@cells(name=list(SCALES), shape=[(6, 24), (24, 6), (5, 5)])
def test_the_factor_by_shape_is_on_the_update_and_not_on_the_decay(name: str, shape: tuple[int, int]) -> None:
    rule = rule_of("muon", lr=0.1, weight_decay=0.5, adjust_lr_fn=name, extra_scale_factor=3.0)
    assert math.isclose(rule.scale(shape), 3 * SCALES_WRITTEN_OUT[name](*shape), rel_tol=1e-12)
    value, update = random(shape, 0), random(shape, 1)
    expected = value * (1 - 0.1 * 0.5) - 0.1 * 3 * SCALES_WRITTEN_OUT[name](*shape) * update
    rule.apply(value, update, shape)
    torch.testing.assert_close(value, expected)


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


def test_cautious_decay_takes_elements_that_the_update_moves_towards_zero() -> None:
    rule = rule_of("muon", lr=0.1, weight_decay=0.5, weight_decay_form="cautious")
    value, update = random((8, 8), 0), random((8, 8), 1).bfloat16()
    update[0], value[1] = 0.0, 0.0
    value[2], update[2] = 1e-30, -1e-30  # whose product is zero
    towards_zero = value.sign() * update.sign() >= 0
    expected = value * torch.where(towards_zero, 0.95, 1.0) - 0.1 * update.float()
    rule.apply(value, update, (8, 8))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(value[2], torch.full((8,), 1.1e-30), rtol=1e-2, atol=0)  # no decay, away from zero
    aligned = [random((8, 8), 0) for _ in range(2)]
    for form, value in zip(("decoupled", "cautious"), aligned):
        rule_of("muon", lr=0.1, weight_decay=0.5, weight_decay_form=form).apply(value, value.sign(), (8, 8))
    assert torch.equal(*aligned)


def stepped_together(rule: MatrixRule, way: type[MatrixRule], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Directions, states and weights of three pieces after two steps as ``way`` takes many."""
    shapes = [(6, 24), (5, 5), (6, 24)]
    values, updates = ([random(shape, seed + at).to(dtype) for seed, shape in enumerate(shapes)] for at in (0, 10))
    states = [{key: torch.zeros_like(value) for key in rule.state_keys} for value in values]
    found: list[Tensor] = []
    for step in (20, 30):
        grads = [random(shape, seed + step).to(dtype) for seed, shape in enumerate(shapes)]
        found += way.directions(rule, grads, values, states, advance=True)
        way.apply_all(rule, values, updates, shapes)
    return [*found, *values, *(tensor for state in states for tensor in state.values())]


@cells(
    form=["ema", "sum"], nesterov=[True, False], decay=["decoupled", "coupled", "cautious"], before=["none", "muon2"]
)
def test_many_pieces_take_the_same_step_as_one_by_one(form: str, nesterov: bool, decay: str, before: str) -> None:
    options = {"weight_decay_form": decay, "weight_decay": 0.3, "precondition": before}
    rule = rule_of("muon", momentum_form=form, nesterov=nesterov, lr=0.1, **options)
    for dtype in (torch.float32, torch.bfloat16):
        ways = [stepped_together(rule, way, dtype) for way in (Muon, MatrixRule)]
        assert all(map(torch.equal, *ways))


class Halved(Muon):
    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return super().direction(grad, state) / 2


class Unmoved(Halved):
    def apply(self, value: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        """Leave the weight."""


def test_a_subclass_that_changes_one_piece_changes_many() -> None:
    muon, halved, unmoved = (stepped_together(rule, type(rule)) for rule in (Muon(), Halved(), Unmoved()))
    assert all(torch.equal(half, whole / 2) for half, whole in zip(halved[:6], muon[:6]))
    assert all(map(torch.equal, halved[6:], muon[6:])) and all(map(torch.equal, unmoved[:6], halved[:6]))
    assert torch.equal(unmoved[6], random((6, 24), 0))


@pytest.mark.parametrize("name", ["muon", *MOMENTS])
def test_a_zero_gradient_only_decays_by_the_unadjusted_learning_rate(name: str) -> None:
    matrix = Trained(rule_of(name, lr=0.1, weight_decay=0.5), random((9, 6), 1))
    torch.testing.assert_close(matrix.step(torch.zeros(9, 6)), random((9, 6), 1) * 0.95, rtol=1e-6, atol=0)


@cells(
    wrong=[math.nan, math.inf, -math.inf],
    shape=[(6, 9), (9, 6), (1, 4)],
    options=[{}, {"gram_aspect": 1.0}, {"weight_decay_form": "cautious"}],
    name=["muon", *MOMENTS],
)
def test_what_is_not_finite_is_seen(name: str, options: dict[str, Any], shape: tuple[int, int], wrong: float) -> None:
    matrix, grad = Trained(rule_of(name, **options), random(shape, 1)), random(shape, 2)
    grad[0, 1] = wrong
    assert matrix.step(grad).isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_coefficients": "quintik"}, "one of 'simple', 'quintic', 'polar_express', 'polar_express_5'; found 'quin"),
        ({"ns_coefficients": "quintic", "ns_steps": 6}, "'quintic' is for 5 steps, but ns_steps is 6; set ns_steps to"),
        ({"ns_coefficients": [[2, -1.5, 0.5]] * 7}, "the list given is for 7 steps, but ns_steps is 5"),
        ({"ns_coefficients": [1.0, 2.0]}, "expected three numbers"),
        ({"ns_coefficients": [[1.0, 2.0, True]] * 5}, "expected three numbers"),
        ({"ns_coefficients": [1.0, 2.0, math.inf]}, "expected finite numbers"),
        ({"gram_restarts": [3, 2]}, "gram_restarts: expected increasing numbers below ns_steps (5), found"),
        ({"gram_restarts": [5]}, "gram_restarts: expected increasing numbers below ns_steps (5), found"),
        ({"gram_restarts": [2, 4]}, "gram_restarts is (2, 4), but with ns_method 'standard' and without gram_"),
        ({"gram_restarts": []}, "gram_restarts is (), but with ns_method 'standard'"),
        ({"ns_method": "grim"}, "ns_method: input should be 'standard', 'gram', 'auto', 'gram-newton-schulz' or"),
        ({"ns_method": "quack-kernels", "ns_dtype": "float32"}, "'float32', but quack-kernels computes in 16 bits"),
        (
            {"precondition": "muon2", "renormalize": "row"},
            "found precondition 'muon2' with renormalize 'row', a combination without",
        ),
        (
            {"precondition_beta2": 0.9},
            "precondition_beta2: expected none with precondition 'none', which does not use it",
        ),
        (
            {"precondition": "muoneq_r", "precondition_beta2": 0.9},
            "found 0.9; leave it out, or set precondition to 'muon2",
        ),
        (
            {"precondition": "aol", "precondition_eps": 0.1},
            "set precondition to 'muon2' or 'muoneq_r' or 'muoneq_c' or ",
        ),
        ({"hyperball": True}, "hyperball keeps the weight's norm, but weight_decay is 0.1; set weight_decay to 0"),
        ({"hyperball": True, "weight_decay": 0.0, "adjust_lr_fn": "original"}, "long, but adjust_lr_fn is 'original'"),
        ({"hyperball": True, "weight_decay": 0.0, "uw_floor": 0.3}, "and uw_floor 0.3; leave them out"),
        ({"uw_floor": 0.3, "weight_decay_form": "cautious"}, "uw_floor: expected 0 with weight_decay_form 'cautious'"),
        ({"precondition": "aol", "ns_method": "gram-newton-schulz"}, "but gram-newton-schulz divides by the norm itse"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        rule_of("muon", **options)
    assert message in str(caught.value)


# Scaling before and after Newton-Schulz, as the papers write it, with fp32 iterations
LAST_FOUR = TABLES["quintic"].triples[1:]


def keller(matrix: Tensor) -> Tensor:
    """Jordan's iteration, in the dtype of the matrix."""
    return orthogonalized(matrix, [SIMPLE] * 5)


def turbo(matrix: Tensor) -> Tensor:
    """Turbo-Muon, arXiv 2512.04632: rows of the shorter side over sqrt(|A| 1), and four steps."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = torch.diag((x @ x.T).abs().sum(1) ** -0.5) @ x
    assert torch.linalg.matrix_norm(x, 2) <= 1 + 1e-12
    for a, b, c in LAST_FOUR:
        x = a * x + (b * (x @ x.T) + c * (x @ x.T) @ (x @ x.T)) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def rows_to_one(x: Tensor) -> Tensor:
    return torch.diag((x**2).sum(1) ** -0.5) @ x


def columns_to_one(x: Tensor) -> Tensor:
    return x @ torch.diag((x**2).sum(0) ** -0.5)


PRECONDITIONED: dict[str, Callable[[Tensor], Tensor]] = {  # the matrix to its orthogonal one
    "none": keller,
    "muoneq_r": lambda x: keller(rows_to_one(x)),
    "muoneq_c": lambda x: keller(columns_to_one(x)),
    "muoneq_rc": lambda x: keller(torch.diag((x**2).sum(1) ** -0.5) @ x @ torch.diag((x**2).sum(0) ** -0.5)),
    "aol": turbo,
}
RENORMALIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "row": rows_to_one,
    "col": columns_to_one,
    "row_col": lambda x: columns_to_one(rows_to_one(x)),
    "col_row": lambda x: rows_to_one(columns_to_one(x)),
    "frobenius": lambda x: x * (min(x.shape) / (x**2).sum()) ** 0.5,
}
PAIRS = [(before, after) for before, afters in DEFINED.items() for after in afters if before != "muon2"]
AOL = {"ns_coefficients": LAST_FOUR, "ns_steps": 4}


def scaled(before: str, after: str, **options: Any) -> MatrixRule:
    options = {**(AOL if before == "aol" else {}), "ns_dtype": "float32", **options}
    return rule_of("muon", lr=0.1, weight_decay=0.0, precondition=before, renormalize=after, **options)


@cells(pair=PAIRS, shape=SHAPES, method=["standard", "gram"])
def test_scaling_around_the_iteration_is_the_papers(pair: tuple[str, str], shape: tuple[int, int], method: str) -> None:
    """Also on tiny gradients, of which a part is zero: MuonEq's and AOL's own codes do not scale these."""
    before, after = pair
    rule = scaled(before, after, ns_method=method)
    grad = random(shape, 3)
    expected = RENORMALIZED[after](PRECONDITIONED[before](grad.double()))
    for size in (1.0, 1e-12):
        ours = rule.transform(grad * size).double()
        assert (ours - expected).norm() < 1e-4 * expected.norm(), size
    if shape[0] > 2:
        grad[1] = 0.0
        assert rule.transform(grad).isfinite().all() and not rule.transform(grad)[1].any()
    assert not rule.transform(torch.zeros(shape)).any()
    for wrong in (math.nan, math.inf):
        grad[0, 0] = wrong
        assert rule.transform(grad).isnan().all()


@cells(
    pair=[(before, afters[-1]) for before, afters in DEFINED.items()], shape=SHAPES[:2], dtype=["bfloat16", "float32"]
)
def test_scaling_of_a_batch_equals_that_of_its_matrices(pair: tuple[str, str], shape: Any, dtype: str) -> None:
    rule, stack = scaled(*pair, ns_dtype=dtype), random((3, *shape), 0)
    stack[1] *= 1e-15
    kept = stack.clone()
    together, apart = rule.transform(stack), torch.stack([rule.transform(matrix) for matrix in stack])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5 if dtype == "float32" else 4e-2)
    assert together.dtype == rule.exchange_dtype == getattr(torch, dtype) and torch.equal(stack, kept)


@cells(shape=SHAPES, nesterov=[True, False])
def test_muon_squared_is_adams_ratio_orthogonalized(shape: tuple[int, int], nesterov: bool) -> None:
    """arXiv 2604.09967, algorithm 1, and dion's form of Nesterov's momentum."""
    options = {"momentum_form": "sum", "nesterov": nesterov, "precondition_beta2": 0.9, "precondition_eps": 1e-4}
    weight, mean, square = random(shape, 1).double(), torch.zeros(shape).double(), torch.zeros(shape).double()
    for grad in gradients(shape):
        mean = 0.95 * mean + grad.double()
        square = 0.9 * square + 0.1 * grad.double() ** 2
        direction = (grad.double() + 0.95 * mean if nesterov else mean) / (square.sqrt() + 1e-4)
        weight -= 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * keller(direction)
    ours = trained(scaled("muon2", "none", **options), shape)
    torch.testing.assert_close(ours.double(), weight, rtol=0, atol=2e-4)


def test_scaled_rules_of_second_moments_are_those_that_are_published() -> None:
    for options in ({"hyperball": True, "weight_decay": 0.0}, {"uw_floor": 0.3}):
        with pytest.raises(ValueError, match="expected AdaMuon without hyperball and uw_floor"):
            rule_of("adamuon", **options)
    for name in MOMENTS:
        for before, afters in DEFINED.items():
            for after in afters:
                published = name == "normuon" and before in ("none", "muoneq_r") and after in ("none", "frobenius")
                if published or before == after == "none":
                    rule_of(name, precondition=before, renormalize=after)
                    continue
                with pytest.raises(ValueError, match="a combination without a publication for (NorMuon|AdaMuon)"):
                    rule_of(name, precondition=before, renormalize=after)


# Steps by norms of the whole weight and update
def to_norm(x: Tensor, norm: Tensor) -> Tensor:
    return x * norm / torch.linalg.matrix_norm(x)


@cells(name=["muon", "normuon"], shape=SHAPES)
def test_hyperball_is_the_papers(name: str, shape: tuple[int, int]) -> None:
    """arXiv 2606.16899 with the first weight's norm, on what the same rule without it sends back."""
    base = Trained(rule_of(name, ns_dtype="float32", weight_decay=0.0), random(shape, 1))
    ours = Trained(rule_of(name, ns_dtype="float32", weight_decay=0.0, lr=0.05, hyperball=True), random(shape, 1))
    weight = random(shape, 1).double()
    radius = torch.linalg.matrix_norm(weight)
    for grad in gradients(shape):
        update = base.update(grad).double()
        weight = to_norm(weight - 0.05 * to_norm(update, radius), radius)
        ours.step(grad)
        torch.testing.assert_close(ours.value.double(), weight, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_adamh_is_the_papers_with_torchs_adam(shape: tuple[int, int]) -> None:
    """Bias correction only makes ``eps`` smaller."""
    ours, weight = Trained(rule_of("adamh", lr=0.05, eps=1e-12), random(shape, 1)), random(shape, 1).double()
    radius, moved = torch.linalg.matrix_norm(weight), nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    adam = torch.optim.Adam([moved], lr=1.0, betas=(0.9, 0.95), eps=1e-12)
    for grad in gradients(shape):
        moved.data.zero_()
        moved.grad = grad.double()
        adam.step()
        weight = to_norm(weight + 0.05 * to_norm(moved.data, radius), radius)
        ours.step(grad)
        torch.testing.assert_close(ours.value.double(), weight, rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match=r"weight_decay: expected 0, because AdamH"):
        rule_of("adamh", weight_decay=0.1)
    for betas in ((0.9,), (0.9, 1.0), 0.9, (True, 0.9)):
        with pytest.raises(ValueError, match="betas: expected two numbers from 0 to below 1; found"):
            rule_of("adamh", betas=betas)


def test_hyperball_keeps_the_norm_and_leaves_what_has_no_direction() -> None:
    rule = rule_of("muon", weight_decay=0.0, lr=0.05, hyperball=True)
    value, zero = random((24, 16), 0), torch.zeros(24, 16)
    radius, kept = value.double().norm(), value.clone()
    rule.apply(value, zero, (24, 16))
    assert torch.equal(value, kept)
    rule.apply(zero, random((24, 16), 1), (24, 16))
    assert not zero.any()
    for step in range(2000):
        rule.apply(value, random((24, 16), step), (24, 16))
    assert abs(value.double().norm() / radius - 1) < 1e-5
    rule.apply(value, torch.full((24, 16), math.nan), (24, 16))
    assert value.isnan().all()


NORMS: list[tuple[str, dict[str, Any]]] = [
    ("muon", {"hyperball": True, "weight_decay": 0.0}),
    ("muon", {"uw_floor": 0.35}),
    ("adamh", {}),
]


@pytest.mark.parametrize(("name", "given"), NORMS)
def test_a_weight_of_16_bits_is_rounded_once_not_its_decay_as_well(name: str, given: dict[str, Any]) -> None:
    """A factor of 0.998 is 0.996 in bfloat16, which would decay twice as much; one of 0.9995 would not decay."""
    rule = rule_of(name, lr=0.02, **given)
    value, update = random((24, 16), 0).bfloat16(), random((24, 16), 1).bfloat16()
    keep, move = (factor[0].float() for factor in rule.factors(sums_of([value], [update])[None], [(24, 16)]))
    expected = value.float() * keep - update.float() * move
    rule.apply(value, update, (24, 16))
    assert torch.equal(value, expected.bfloat16())


@cells(floor=[0.01, 0.35], shape=SHAPES)
def test_the_floor_is_under_the_updates_norm_over_the_weights(floor: float, shape: tuple[int, int]) -> None:
    rule = rule_of("muon", weight_decay=0.2, lr=0.05, uw_floor=floor)
    value, update = random(shape, 0), random(shape, 1) / 20
    with_factor = update * max(1, shape[0] / shape[1]) ** 0.5
    factor = max(1.0, floor * float(value.norm() / with_factor.norm()))
    expected = value * (1 - 0.05 * 0.2) - 0.05 * factor * with_factor
    rule.apply(value, update, shape)
    torch.testing.assert_close(value, expected)
    rule.apply(value, torch.zeros(shape), shape)
    torch.testing.assert_close(value, expected * 0.99)


# Coefficients
def minimax_quintic(low: float, high: float) -> list[float]:
    """The odd polynomial of degree 5 that is nearest to one on [low, high] (Remez' exchange, fp64)."""
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


def test_polar_express_is_what_its_paper_computes_and_goes_on_with_its_last_row() -> None:
    """The paper's table is composed without a margin, which is then put into all rows but the last."""
    table, rows = TABLES["polar_express"].triples, polar_express(8, cushion=0.02407327424182761)
    for row, given in zip(rows[:7], table):
        assert [k / 1.01**power for k, power in zip(row, (1, 3, 5))] == pytest.approx(given, abs=1e-9)
    assert table[7] == pytest.approx(rows[7], abs=1e-8) == (15 / 8, -10 / 8, 3 / 8)
    for row, given in zip(polar_express(5, 0.02, 1.02), TABLES["polar_express_5"].triples, strict=True):
        assert row == pytest.approx(given, abs=1e-9)
    assert by_step("polar_express", 10)[7:] == (table[7],) * 3 and by_step("polar_express", 3) == table[:3]
    matrix = random((24, 40), 0).double()
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    done = iterated(newton_schulz, matrix, torch.float64, "polar_express", steps=10)
    torch.testing.assert_close(done, u @ v, rtol=0, atol=1e-9)


# The margin on the norm, and where five steps take singular values of 0.01 to 1 in fp64.
BANDS = {"simple": (1.0, 0.68, 1.14), "quintic": (1.0, 0.97, 1.04), "polar_express": (1.01, 0.87, 1.13)}
BANDS |= {"polar_express_5": (1.02, 0.85, 1.15)}


@cells(iterate=WAYS, table=list(TABLES))
def test_a_table_takes_singular_values_where_its_polynomials_do(table: str, iterate: Iterate) -> None:
    def polynomials(x: Tensor) -> Tensor:
        for a, b, c in by_step(table, 5):
            x = a * x + b * x**3 + c * x**5
        return x

    margin, low, high = BANDS[table]
    values = torch.logspace(-2, 0, 40, dtype=torch.float64)
    done = iterated(iterate, with_spectrum(values, (40, 64)), torch.float64, table)
    expected = with_spectrum(polynomials(values / values.norm() / margin), (40, 64))
    torch.testing.assert_close(done, expected, rtol=0, atol=1e-9)
    full = polynomials(torch.logspace(-2, 0, 1000, dtype=torch.float64) / margin)
    assert full.min() > low and full.max() < high


# Newton-Schulz: batches; tiny, large and zero matrices
@cells(norm=[1.01e-7, 1e-3, 1.0, 1e15], shape=SHAPES)
def test_from_eps_on_the_bits_are_torchs(shape: tuple[int, int], norm: float) -> None:
    matrix = random(shape, 3)
    matrix *= norm / matrix.norm()
    theirs = _muon._zeropower_via_newtonschulz(matrix.clone(), SIMPLE, 5, 1e-7)
    assert torch.equal(iterated(newton_schulz, matrix, torch.bfloat16), theirs)


@cells(iterate=WAYS, table=list(TABLES), shape=[(5, 24, 40), (5, 40, 24), (2, 3, 1, 8), (5, 8, 1)])
def test_a_batch_of_any_dimensions_equals_its_matrices(iterate: Iterate, table: str, shape: tuple[int, ...]) -> None:
    matrices = random(shape, 0)
    kept = matrices.clone()
    together = iterated(iterate, matrices, torch.float32, table)
    one_by_one = [iterated(iterate, matrix, torch.float32, table) for matrix in matrices.flatten(0, -3)]
    torch.testing.assert_close(together, torch.stack(one_by_one).view(shape), rtol=0, atol=1e-4)
    assert torch.equal(matrices, kept)
    zero = iterated(iterate, torch.zeros(shape), torch.bfloat16, table, eps=0.0)
    assert torch.equal(zero, torch.zeros(shape).bfloat16())


def of_norm(shape: tuple[int, ...], norm: float) -> Tensor:
    """A well-conditioned matrix, as clipping may leave it."""
    u, _, v = torch.linalg.svd(random(shape, 3), full_matrices=False)
    return (u @ v) / min(shape[-2:]) ** 0.5 * norm


@cells(
    iterate=WAYS,
    shape=[(12, 20), (20, 12), (16, 16), (1, 8), (3, 12, 20)],
    norm=[1e-8, 1e-12, 1e-20, 1e-30, 1e-37, 1e25],
    dtype=[torch.bfloat16, torch.float32],
)
def test_a_tiny_matrix_is_orthogonal(iterate: Iterate, shape: tuple[int, ...], norm: float, dtype: torch.dtype) -> None:
    values = torch.linalg.svdvals(iterated(iterate, of_norm(shape, norm), dtype).float())
    usual = torch.linalg.svdvals(iterated(iterate, of_norm(shape, 1.0), dtype).float())
    torch.testing.assert_close(values, usual, rtol=0, atol=0.05)
    assert values.min() > 0.6 and values.max() < 1.25
    if len(shape) == 2 and norm < 1e-10:  # without the guard this is not so
        unguarded = _muon._zeropower_via_newtonschulz(of_norm(shape, norm), SIMPLE, 5, 1e-7)
        assert torch.linalg.svdvals(unguarded.float()).max() < 0.6


def test_a_tiny_matrix_does_not_change_the_others_of_its_batch() -> None:
    matrices = torch.stack([random((12, 20), 0), of_norm((12, 20), 1e-20), torch.zeros(12, 20), random((12, 20), 1)])
    together = iterated(newton_schulz, matrices, torch.bfloat16)
    assert torch.equal(together[[0, 3]], iterated(newton_schulz, matrices[[0, 0, 3, 3]], torch.bfloat16)[[0, 3]])
    assert together[2].abs().max() == 0 and torch.linalg.svdvals(together[1].float()).min() > 0.6


# Gram Newton-Schulz
@cells(
    spectrum=list(SPECTRA),
    shape=[(48, 192), (192, 48), (31, 47), (200, 3), (7, 1), (1, 1), (3, 24, 40), (2, 40, 24)],
    dtype=[torch.float64, torch.float32],
)
def test_gram_newton_schulz_is_the_same_polynomial(spectrum: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """To rounding, which a step makes up to 3.4 times as large: p(0) is the first coefficient."""
    matrices = matrices_of(spectrum, shape)
    for steps in range(1, 8):
        plain, gram = (iterated(way, matrices, dtype, steps=steps) for way in (newton_schulz, gram_newton_schulz))
        assert gram.dtype == dtype and gram.shape == matrices.shape
        torch.testing.assert_close(gram, plain, rtol=0, atol=2 * torch.finfo(dtype).eps * SIMPLE[0] ** steps)


@cells(spectrum=list(SPECTRA), shape=[(96, 144), (384, 96)])
def test_gram_newton_schulz_in_bf16_keeps_singular_values_in_the_band(spectrum: str, shape: tuple[int, int]) -> None:
    """None above what the coefficients allow; those that exact steps bring to the band are there. With 3 steps before
    the restart, as for torch's coefficients, some of the other tables end 0.5 to 2.5 above."""
    matrix = matrices_of(spectrum, shape)
    exact = iterated(newton_schulz, matrix, torch.float64)
    values = torch.linalg.svdvals(iterated(gram_newton_schulz, matrix, torch.bfloat16).double())
    assert values.max() < 1.25
    assert (values[: int((torch.linalg.svdvals(exact) > 0.65).sum())] > 0.55).all()
    for table, above in (("quintic", 0.2), ("polar_express", 0.3), ("polar_express_5", 0.3)):
        plain, gram = (
            torch.linalg.svdvals(iterated(way, matrix, torch.bfloat16, table).double())
            for way in (newton_schulz, gram_newton_schulz)
        )
        assert gram.max() < plain.max() + above, table


def table_restarts(table: str) -> tuple[int, ...]:
    lengths = [len(segment) for segment in segments(table, STEPS[table])]
    return tuple(sum(lengths[:count]) for count in range(1, len(lengths)))


def test_restarts_come_by_default_before_slopes_grow_too_large() -> None:
    assert {table: table_restarts(table) for table in STEPS} == {
        "simple": (3,), "quintic": (2,), "polar_express": (2, 5), "polar_express_5": (2,),
    }  # fmt: skip
    assert [len(segment) for segment in segments("simple", 9)] == [3, 2, 2, 2]
    assert [len(segment) for segment in segments((50.0, 1.0, 1.0), 3)] == [1, 1, 1]  # never none


@cells(table=list(STEPS), restarts=[None, (), (2,), (1, 3)], shape=[(40, 24), (24, 40), (2, 3, 24, 40)])
def test_gram_with_any_table_and_restarts(table: str, restarts: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
    matrices, steps = random(shape, 0).double(), STEPS[table]
    plain = iterated(newton_schulz, matrices, torch.float64, table, steps=steps)
    gram = iterated(gram_newton_schulz, matrices, torch.float64, table, steps=steps, restarts=restarts)
    torch.testing.assert_close(gram, plain, rtol=0, atol=1e-9)
    by_default = iterated(gram_newton_schulz, matrices, torch.float64, table, steps=steps)
    assert torch.equal(gram, by_default) == (restarts is None or table_restarts(table) == restarts)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (4, 30, 20), (29, 20), (20, 20), (4, 20, 80)], ids=str)
def test_ns_method_and_gram_aspect_decide_which_iteration_a_matrix_takes(shape: tuple[int, ...]) -> None:
    plain, gram = (iterated(way, random(shape, 3), torch.bfloat16) for way in (newton_schulz, gram_newton_schulz))
    assert not torch.equal(plain, gram)
    ratio = max(shape[-2:]) / min(shape[-2:])
    ways = [({}, plain), ({"ns_method": "standard"}, plain), ({"ns_method": "gram"}, gram)]
    ways += [({"gram_aspect": aspect}, gram if ratio >= aspect else plain) for aspect in (1.0, 1.5, 1.51)]
    ways += [({"ns_method": "auto"}, gram if shape == (4, 20, 80) else plain)]
    ways += [({"ns_method": "auto", "gram_aspect": 1.0}, gram), ({"ns_method": "gram", "gram_aspect": 9.0}, plain)]
    for options, expected in ways:
        assert torch.equal(rule_of("muon", **options).transform(random(shape, 3)), expected), options


def cost_and_flops(shape: tuple[int, int], **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        rule_of("muon", **options).transform(torch.ones(shape))
    cost = MATRIX_RULES["muon"].cost(shape, MuonOptions(**options).model_dump())
    assert cost == counter.get_total_flops() and isinstance(cost, int)
    return cost


@pytest.mark.parametrize("shape", [(16, 16), (16, 20), (24, 16), (16, 64), (64, 16)])
def test_the_cost_of_a_matrix_is_the_flops_that_its_transform_runs(shape: tuple[int, int]) -> None:
    for steps in (1, 2, 3, 4, 5, 6, 9):
        plain, all_gram, some_gram = (cost_and_flops(shape, gram_aspect=a, ns_steps=steps) for a in (None, 1.0, 1.5))
        assert some_gram in (plain, all_gram) and some_gram <= plain
        assert cost_and_flops(shape, ns_method="auto", ns_steps=steps) in (plain, all_gram)
        assert cost_and_flops(shape, ns_method="gram", ns_steps=steps) == all_gram
    for table, restarts in itertools.product(STEPS, [None, (1,), (1, 2, 4)]):
        given = {"ns_coefficients": table, "ns_steps": STEPS[table], "gram_restarts": restarts}
        cost_and_flops(shape, gram_aspect=1.5, **given)


@cells(short=[16, 128, 512, 1024, 4096, 16384], steps=[2, 5, 9])
def test_auto_takes_what_has_fewer_flops_and_traffic(short: int, steps: int) -> None:
    """Reads and writes in elements of 16 bits: of X, 4 a plain step and 3 a segment; of s x s matrices, 6 a plain step,
    16 a step on the Gram matrix, and 10 fewer a segment."""
    flops_per_byte = 295  # an H100's dense bf16 rate over its memory bandwidth, 989e12 / 3.35e12
    count, gram_at = len(segments(SIMPLE, steps)), []
    for aspect in torch.linspace(1, 4, 61).tolist():
        shape = (short, round(aspect * short))
        sides, square = shape[0] * shape[1], short * short
        plain = newton_schulz_flops(shape, steps) + flops_per_byte * 2 * steps * (4 * sides + 6 * square)
        traffic = 2 * (3 * count * sides + (16 * steps - 10 * count) * square)
        gram = newton_schulz_flops(shape, steps, count) + flops_per_byte * traffic
        takes = takes_gram(shape, "auto", None)
        gram_at += [aspect] if takes else []
        assert (gram if takes else plain) <= 1.1 * min(plain, gram), aspect
        assert takes <= (gram < plain), aspect  # never against it
    assert gram_at == [aspect for aspect in torch.linspace(1, 4, 61).tolist() if aspect >= gram_at[0]]
    assert 1.5 < gram_at[0] <= 2.55 and (short < 16384 or gram_at[0] < 1.6)


# NorMuon and AdaMuon
def orthogonal(matrix: Tensor) -> Tensor:
    """torch.optim.Muon's iteration, in fp32 from there on."""
    return _muon._zeropower_via_newtonschulz(matrix.clone(), SIMPLE, 5, 1e-7).float()


def paper(name: str, shape: tuple[int, int]) -> Tensor:
    """NorMuon, algorithm 1 of arXiv 2510.05491, and AdaMuon, arXiv 2507.11005; both betas 0.95."""
    weight, momentum, moment = random(shape, 1), torch.zeros(shape), torch.zeros(1)
    for grad in gradients(shape):
        momentum = 0.95 * momentum + 0.05 * grad
        update = orthogonal(momentum if name == "normuon" else momentum.sign())
        squares = (update * update).sum(1, keepdim=True) / shape[1] if name == "normuon" else update**2
        moment = 0.95 * moment + 0.05 * squares
        update = update / (moment.sqrt() + 1e-8)
        rate = 0.2 * 0.05 * (shape[0] * shape[1]) ** 0.5 / update.square().sum().sqrt()
        weight = weight - 0.05 * 0.1 * weight - rate * update
    return weight


def emerging_optimizers(name: str, shape: tuple[int, int], factor_first: bool = False) -> Tensor:
    """AdaptiveMuon with Nesterov's momentum and without signs; moments are of the longer side or of elements. Since
    0.3.0 the factor by shape comes last, and moments of the longer side leave the norm as it was. In 0.2.0 the factor
    came first, so the division took it out again, and no norm was restored."""
    weight, momentum, moment, elementwise = random(shape, 1), torch.zeros(shape), 0.0, name == "adamuon"
    factor, axis = max(shape) ** 0.5, 1 if shape[0] >= shape[1] else 0
    for grad in gradients(shape):
        momentum = 0.95 * momentum + 0.05 * grad
        update = orthogonal(0.05 * grad + 0.95 * momentum) * (factor if factor_first else 1)
        squares = update**2 if elementwise else (update**2).mean(axis, keepdim=True)
        moment = 0.95 * moment + 0.05 * squares
        divided = update / (moment.sqrt() + 1e-8 if elementwise else moment.clamp(min=1e-8).sqrt())
        if not factor_first:
            divided *= factor if elementwise else factor * update.norm() / divided.norm()
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * divided
    return weight


def dion(name: str, shape: tuple[int, int]) -> Tensor:
    """dion's: sum momentum, rows, the norm before the division, sqrt(rows / columns)."""
    weight, momentum, moment = random(shape, 1), torch.zeros(shape), torch.zeros(shape[0], 1)
    for grad in gradients(shape):
        momentum = 0.95 * momentum + grad
        update = orthogonal(momentum)
        moment = 0.95 * moment + 0.05 * (update**2).mean(1, keepdim=True)
        divided = update / (moment.sqrt() + 1e-8)
        rate = 0.01 * (shape[0] / shape[1]) ** 0.5 * update.norm() / divided.norm()
        weight = weight * (1 - 0.01 * 0.1) - rate * divided
    return weight


emerging_optimizers_0_2 = partial(emerging_optimizers, factor_first=True)
LONGER = {"second_moment_of": "longer_side", "nesterov": True}
NO_SIGN = {"sign_momentum": False, "nesterov": True}
SPECTRAL = {"adjust_lr_fn": "spectral"}
WRITTEN_OUT: list[tuple[str, dict[str, Any], Callable[..., Tensor], float]] = [  # with the settings of docs/variants.md
    ("normuon", {"lr": 0.05}, paper, 1e-5),
    ("adamuon", {"lr": 0.05}, paper, 1e-5),
    ("normuon", {"update_norm": "preserve", **SPECTRAL, **LONGER}, emerging_optimizers, 1e-4),
    ("adamuon", {"update_norm": "none", **SPECTRAL, **NO_SIGN}, emerging_optimizers, 1e-4),
    ("normuon", {"update_norm": "none", "adjust_lr_fn": "none", **LONGER}, emerging_optimizers_0_2, 1e-4),
    ("adamuon", {"update_norm": "none", "adjust_lr_fn": "none", **NO_SIGN}, emerging_optimizers_0_2, 1e-4),
    # In fp32 its buffer may round to a direction whose bf16 differs in a bit here and there.
    ("normuon", {"momentum_form": "sum", "update_norm": "preserve", "adjust_lr_fn": "spectral_norm"}, dion, 5e-3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "options", "formula", "tolerance"), WRITTEN_OUT)
def test_second_moments_are_those_written_down_here(
    name: str, options: dict[str, Any], formula: Callable[..., Tensor], tolerance: float, shape: tuple[int, int]
) -> None:
    options = {"lr": 0.01, **options}
    exact, expected = rule_of(name, **options), formula(name, shape)
    exact.exchange_dtype = torch.float32
    moved = (expected - random(shape, 1)).norm()
    assert (trained(exact, shape) - expected).norm() < tolerance * moved
    if formula is paper:  # the update travels in bf16, which rounds the papers' by up to 2^-9
        assert (trained(rule_of(name, **options), shape) - expected).norm() < 4e-3 * moved


@pytest.mark.parametrize("name", MOMENTS)
def test_the_factor_by_shape_is_muons_unless_the_root_mean_square_is_fixed(name: str) -> None:
    assert rule_of(name, extra_scale_factor=2.0).scale((8, 2)) == 0.4
    for norm in ("preserve", "none"):
        assert rule_of(name, update_norm=norm).scale((8, 2)) == 2.0
        assert rule_of(name, update_norm=norm, adjust_lr_fn="spectral", extra_scale_factor=3.0).scale((4, 16)) == 12.0
    with pytest.raises(ValueError, match="expected none with update_norm 'match_rms', which has no factor by shape"):
        rule_of(name, adjust_lr_fn="original")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_second_moments_are_the_smallest_that_do_and_change_in_place(shape: tuple[int, int]) -> None:
    def made(name: str, **options: Any) -> tuple[int, ...]:
        matrix = Trained(rule_of(name, **options), random(shape, 1))
        ((key, moment),) = matrix.owner_state.items()
        assert key == "second_moment" and moment.dtype == torch.float32 and not moment.any()
        matrix.update(random(shape, 2))
        assert matrix.owner_state[key] is moment and moment.any()
        return tuple(moment.shape)

    rows, columns = shape
    assert made("normuon") == (rows, 1) and made("adamuon") == shape
    assert made("normuon", second_moment_of="longer_side") == ((rows, 1) if rows >= columns else (1, columns))


@cells(name=MOMENTS, exchange=[torch.bfloat16, torch.float32])
def test_what_travels_is_in_one_dtype_and_costs_a_little_more_than_muon(name: str, exchange: torch.dtype) -> None:
    rule = rule_of(name)
    rule.exchange_dtype = exchange
    assert Trained(rule, random((6, 9), 1)).update(random((6, 9), 2)).dtype == exchange
    cost = MATRIX_RULES[name].cost((64, 96), MATRIX_RULES[name].model({}, name)().model_dump())
    assert isinstance(cost, int) and newton_schulz_flops((64, 96)) < cost < 1.02 * newton_schulz_flops((64, 96))


# QK-clip: logits of heads over the threshold come down to it, and no other head's change
HEADS, WIDTH, SIZE, TOKENS = 4, 6, 10, 12


def logits(query: Tensor, key: Tensor, inputs: Tensor) -> Tensor:
    """(heads, tokens, tokens), of projections (heads or key heads * width, size)."""
    q = (inputs @ query.T).unflatten(-1, (-1, WIDTH)).transpose(0, 1)
    k = (inputs @ key.T).unflatten(-1, (-1, WIDTH)).transpose(0, 1)
    return q @ k.repeat_interleave(len(q) // len(k), 0).mT / WIDTH**0.5


def projections(key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query weights whose heads have very different logits, key weights, and inputs."""
    query = random((HEADS * WIDTH, SIZE), 0) * torch.tensor([0.1, 30.0, 0.5, 60.0]).repeat_interleave(WIDTH)[:, None]
    return query, random((key_heads * WIDTH, SIZE), 1), random((TOKENS, SIZE), 2)


@cells(query_share=[0.5, 0.0, 1.0, 0.3], key_heads=[4, 2, 1])
def test_heads_over_the_threshold_are_brought_down_to_it_and_others_stay(key_heads: int, query_share: float) -> None:
    query, key, inputs = projections(key_heads)
    before = logits(query, key, inputs)
    largest = before.flatten(1).amax(1)
    assert ((largest > 50.0) == torch.tensor([False, True, False, True])).all()
    factors = qk_clip_factors(largest, 50.0, key_heads=key_heads, query_share=query_share)
    query = query * row_factors([(WIDTH, factors.query)])[:, None]
    key = key * row_factors([(WIDTH, factors.key)])[:, None]
    after = logits(query, key, inputs)
    torch.testing.assert_close(after.flatten(1).amax(1)[[1, 3]], torch.full((2,), 50.0))
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert key_heads == HEADS or torch.equal(factors.key, torch.ones(key_heads))


def test_factors_are_those_of_the_paper_in_fp32_and_show_what_is_not_finite() -> None:
    factors = qk_clip_factors(torch.tensor([50.0, 100.0, 400.0, -3.0, 0.0]).bfloat16())
    assert factors.query.tolist() == factors.key.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert factors.rotary_query.tolist() == [1.0, 1.0, 0.25, 1.0, 1.0] and factors.query.dtype == torch.float32
    for wrong in (math.nan, math.inf):
        assert all(math.isnan(part[1]) and part[0] == 1 for part in qk_clip_factors(torch.tensor([1.0, wrong])))


def test_rows_of_a_head_have_the_factors_of_their_part() -> None:
    """As multi-head latent attention needs it: its logit is q_c k_c + q_r k_r, with k_r shared by all heads."""
    factors = qk_clip_factors(torch.tensor([400.0, 1600.0]))
    of_query = row_factors([(2, factors.query), (1, factors.rotary_query)])
    assert of_query.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.0625], "q_c goes with k_c, q_r alone"
    assert row_factors([(1, factors.key), (2, None)]).tolist() == [0.5, 1.0, 1.0, 0.25, 1.0, 1.0], "values stay"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: qk_clip_factors(torch.ones(2, 3)), r"expected one per head, \(heads,\); found shape \(2, 3"),
        (lambda: qk_clip_factors(torch.ones(0)), "max_logits: expected one per head"),
        (lambda: qk_clip_factors(torch.ones(4), key_heads=3), "key_heads: expected a divisor of the 4 .* found 3"),
        (
            lambda: qk_clip_factors(torch.ones(4), 0.0),
            "expected a finite threshold over 0 and a query_share .* found 0.0",
        ),
        (lambda: qk_clip_factors(torch.ones(4), math.nan), "expected a finite threshold over 0"),
        (lambda: qk_clip_factors(torch.ones(4), math.inf), "expected a finite threshold over 0"),
        (lambda: qk_clip_factors(torch.ones(4), query_share=1.5), "found 100.0 and 1.5"),
        (lambda: row_factors([(3, None)]), "parts: expected factors of equally many heads"),
        (lambda: row_factors([(3, torch.ones(2)), (3, torch.ones(3))]), r"found \[\(2,\), \(3,\)\]"),
    ],
)
def test_wrong_arguments_of_qk_clip_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
