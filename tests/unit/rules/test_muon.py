"""Muon, NorMuon and AdaMuon on whole matrices in one process: momentum, factors by shape, forms of weight decay,
scaling around Newton-Schulz, norms, second moments; against torch.optim.Muon and the papers' formulas."""

import math
from collections.abc import Callable, Mapping
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

from lwopt_backend.groups.registry import MATRIX_RULES, options_of
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.rules import MatrixRule
from lwopt_backend.rules.muon import DEFINED, SCALES, Muon
from lwopt_backend.rules.newton_schulz import TABLES
from lwopt_backend.rules.protocol import sums_of
from tests.support.references import (
    SHAPES,
    SIMPLE,
    Trained,
    gradients,
    newton_schulz_rounding,
    orthogonalized,
    random,
    rule_of,
    trained,
    trained_by,
)

RULES = ("muon", "normuon", "adamuon")
DECAYS = ("decoupled", "coupled", "cautious")
HYPERBALL = {"hyperball": True, "weight_decay": 0.0}


@pytest.mark.parametrize("seed", range(20))
def test_muon_is_torchs_bit_by_bit(seed: int) -> None:
    """With torch's defaults, and with any of its options."""
    draw = Random(seed)
    shape = draw.choice([*SHAPES, (draw.randint(1, 64), draw.randint(1, 64))])
    drawn: dict[str, Any] = {
        "lr": draw.choice([0.001, 0.02, 0.3]),
        "weight_decay": draw.choice([0.0, 0.1, 0.3]),
        "momentum": draw.choice([0.0, 0.8, 0.95]),
        "nesterov": draw.random() < 0.5,
        "ns_coefficients": draw.choice([SIMPLE, (2.0, -1.5, 0.5)]),
        "ns_steps": draw.choice([1, 3, 5, 6]),
        "adjust_lr_fn": draw.choice(["original", "match_rms_adamw", None]),
    }
    for options in ({}, {key: drawn[key] for key in draw.sample(list(drawn), 3)}, drawn):
        theirs = trained_by(lambda param, given=options: torch.optim.Muon([param], **given), shape)
        assert torch.equal(trained(rule_of("muon", **options), shape), theirs), (shape, options)


# As the papers write it, in fp64
LAST_FOUR = TABLES["quintic"].triples[1:]


def norm(x: Tensor) -> Tensor:
    return (x * x).sum().sqrt()


def rows_to_one(x: Tensor, eps: float = 0.0) -> Tensor:
    return torch.diag(((x**2).sum(1) + eps) ** -0.5) @ x


def columns_to_one(x: Tensor, eps: float = 0.0) -> Tensor:
    return x @ torch.diag(((x**2).sum(0) + eps) ** -0.5)


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


PRECONDITIONED: dict[str, Callable[[Tensor], Tensor]] = {  # the direction to its orthogonal matrix
    **dict.fromkeys(("none", "muon2"), keller),
    "muoneq_r": lambda x: keller(rows_to_one(x)),
    "muoneq_c": lambda x: keller(columns_to_one(x)),
    "muoneq_rc": lambda x: keller(torch.diag((x**2).sum(1) ** -0.5) @ x @ torch.diag((x**2).sum(0) ** -0.5)),
    "aol": turbo,
}
PLUS = 1e-7  # in the root, as in the code of Muon+'s authors
RENORMALIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "row": lambda x: rows_to_one(x, PLUS),
    "col": lambda x: columns_to_one(x, PLUS),
    "row_col": lambda x: columns_to_one(rows_to_one(x, PLUS), PLUS),
    "col_row": lambda x: rows_to_one(columns_to_one(x, PLUS), PLUS),
    "frobenius": lambda x: x * min(x.shape) ** 0.5 / norm(x),
}
SCALED: dict[str, Callable[[int, int], float]] = {
    **dict.fromkeys(("original", "shape_scaling"), lambda m, n: max(1, m / n) ** 0.5),
    **dict.fromkeys(("match_rms_adamw", "rms_norm"), lambda m, n: 0.2 * max(m, n) ** 0.5),
    **dict.fromkeys(("unit_rms_norm", "spectral_norm", "spectral_unclamped"), lambda m, n: (m / n) ** 0.5),
    "spectral": lambda m, n: max(m, n) ** 0.5,
    "none": lambda m, n: 1.0,
}
PAIRS = [(before, after) for before, afters in DEFINED.items() for after in afters]


def written_out(shape: tuple[int, int], options: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weight, the momentum and the mean of squares after four steps; and where updates were so large that rounding
    cannot change their signs, by which cautious decay goes."""
    weight, momentum, lr, decay = random(shape, 1).double(), options["momentum"], options["lr"], options["weight_decay"]
    buffer, square, radius = torch.zeros_like(weight), torch.zeros_like(weight), norm(weight)
    is_sum, form = options["momentum_form"] == "sum", options["weight_decay_form"]
    scale = 3 * SCALED[options.get("adjust_lr_fn", "original")](*shape)
    clear = torch.ones(shape, dtype=torch.bool)
    for grad in gradients(shape):
        grad = grad.double() + (decay * weight if form == "coupled" else 0)
        buffer = momentum * buffer + (1 if is_sum else 1 - momentum) * grad
        direction = buffer
        if options["nesterov"]:
            direction = (1 if is_sum else 1 - momentum) * grad + momentum * buffer
        if options["precondition"] == "muon2":  # algorithm 1 of arXiv 2604.09967
            square = 0.9 * square + 0.1 * grad**2
            direction = direction / (square.sqrt() + 1e-4)
        update = RENORMALIZED[options["renormalize"]](PRECONDITIONED[options["precondition"]](direction))
        clear &= update.abs() > newton_schulz_rounding(shape) * norm(update)
        if options.get("hyperball"):  # arXiv 2606.16899, with the first weight's norm
            moved = weight - lr * radius / norm(update) * update
            weight = moved * radius / norm(moved)
            continue
        floor = options.get("uw_floor", 0) * norm(weight) / norm(scale * update)
        decays = {"decoupled": 1, "coupled": 0, "cautious": weight * update >= 0}[form]
        weight = weight * (1 - lr * decay * decays) - lr * max(1, floor) * scale * update
    return weight, buffer, square, clear


def drawn_options(draw: Random) -> dict[str, Any]:
    """Any options that may be given together."""
    before, after = draw.choice(PAIRS)
    options: dict[str, Any] = {"precondition": before, "renormalize": after, "lr": 0.1, "ns_dtype": "float32"}
    options |= {"momentum": draw.choice([0.5, 0.9]), "momentum_form": draw.choice(["ema", "sum"])}
    options |= {"nesterov": draw.random() < 0.5, "ns_method": draw.choice(["standard", "gram"])}
    options |= {"weight_decay": 0.3, "weight_decay_form": draw.choice(DECAYS)}
    options |= {"precondition_beta2": 0.9, "precondition_eps": 1e-4} if before == "muon2" else {}
    options |= {"ns_coefficients": LAST_FOUR, "ns_steps": 4} if before == "aol" else {}
    by_norm = draw.choice(["", "", "hyperball", "floor"])
    if by_norm == "hyperball":
        return options | HYPERBALL
    if by_norm == "floor":
        options |= {"uw_floor": draw.choice([0.01, 0.35]), "weight_decay_form": draw.choice(DECAYS[:2])}
    return options | {"extra_scale_factor": 3.0, "adjust_lr_fn": draw.choice(list(SCALES))}


@pytest.mark.parametrize("seed", range(20))
def test_muon_is_the_papers_formula(seed: int) -> None:
    """Momentum and nesterov, weight decay, preconditions, renormalization, factors by shape, hyperball, u/w floor."""
    draw = Random(seed)
    for _ in range(6):
        shape, options = draw.choice([*SHAPES[:3], (draw.randint(5, 64), draw.randint(5, 64))]), drawn_options(draw)
        expected, buffer, square, clear = written_out(shape, options)
        ours, first = Trained(rule_of("muon", **options), random(shape, 1)), random(shape, 1).double()
        for grad in gradients(shape):
            ours.step(grad)
        far = ours.value.double() - expected
        if options["weight_decay_form"] == "cautious":
            assert clear.double().mean() > 0.95
            far = far * clear
        assert norm(far) < newton_schulz_rounding(shape) * norm(expected - first), (shape, options)
        torch.testing.assert_close(ours.state["momentum_buffer"], buffer.float())
        torch.testing.assert_close(ours.state.get("second_moment", torch.zeros(shape)), square.float())


# Zeros, tiny numbers, and non-finite ones
@pytest.mark.parametrize("name", RULES)
def test_zero_gradient_only_decays(name: str) -> None:
    """A zero gradient only decays, by the unadjusted learning rate."""
    matrix = Trained(rule_of(name, lr=0.1, weight_decay=0.5), random((9, 6), 1))
    torch.testing.assert_close(matrix.step(torch.zeros(9, 6)), random((9, 6), 1) * 0.95, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", RULES)
def test_nan_and_inf_in_a_gradient_make_the_weight_nan(name: str) -> None:
    ways = ({}, {"gram_aspect": 1.0}, {"weight_decay_form": "cautious"})
    for wrong, shape, options in product((math.nan, math.inf, -math.inf), ((6, 9), (9, 6), (1, 4)), ways):
        matrix, grad = Trained(rule_of(name, **options), random(shape, 1)), random(shape, 2)
        grad[0, 1] = wrong
        assert matrix.step(grad).isnan().all(), (wrong, shape, options)


def test_cautious_weight_decay_of_zeros_and_of_tiny_numbers() -> None:
    rule = rule_of("muon", lr=0.1, weight_decay=0.5, weight_decay_form="cautious")
    value, update = random((8, 8), 0), random((8, 8), 1).bfloat16()
    update[0], value[1] = 0.0, 0.0  # which counts as towards zero
    value[2], update[2] = 1e-30, -1e-30  # whose product is zero
    expected = value * torch.where(value.sign() * update.sign() >= 0, 0.95, 1.0) - 0.1 * update.float()
    rule.apply(value, update, (8, 8))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(value[2], torch.full((8,), 1.1e-30), rtol=1e-2, atol=0)  # no decay, away from zero
    aligned = [random((8, 8), 0) for _ in range(2)]
    for form, value in zip(("decoupled", "cautious"), aligned):
        rule_of("muon", lr=0.1, weight_decay=0.5, weight_decay_form=form).apply(value, value.sign(), (8, 8))
    assert torch.equal(*aligned)


def scaled(before: str, after: str, **options: Any) -> MatrixRule:
    of_aol = {"ns_coefficients": LAST_FOUR, "ns_steps": 4} if before == "aol" else {}
    return rule_of("muon", precondition=before, renormalize=after, **{**of_aol, "ns_dtype": "float32", **options})


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_preconditioned_updates_of_tiny_gradients(before: str, after: str) -> None:
    """Preconditioned updates of tiny and zero gradients, and of batches, are those of the formula. MuonEq's and AOL's
    own codes do not scale these."""
    for shape, method in product(SHAPES, ("standard", "gram")):
        rule, grad = scaled(before, after, ns_method=method), random(shape, 3)
        expected = RENORMALIZED[after](PRECONDITIONED[before](grad.double()))
        for size in (1.0, 1e-12):
            far = norm(rule.transform(grad * size).double() - expected)
            assert far < newton_schulz_rounding(shape) * norm(expected), (shape, size)
        if shape[0] > 2:
            grad[1] = 0.0
            assert rule.transform(grad).isfinite().all() and not rule.transform(grad)[1].any()
        assert not rule.transform(torch.zeros(shape)).any()
        for wrong in (math.nan, math.inf):
            grad[0, 0] = wrong
            assert rule.transform(grad).isnan().all()
    for shape, (dtype, limit) in product(SHAPES[:2], {"bfloat16": 4e-2, "float32": 1e-5}.items()):
        rule, stack = scaled(before, after, ns_dtype=dtype), random((3, *shape), 0)
        stack[1] *= 1e-15
        kept = stack.clone()
        together, apart = rule.transform(stack), torch.stack([rule.transform(matrix) for matrix in stack])
        torch.testing.assert_close(together, apart, rtol=0, atol=limit)
        assert together.dtype == rule.exchange_dtype == getattr(torch, dtype) and torch.equal(stack, kept)


# Many pieces at once
def stepped_together(rule: MatrixRule, way: type[MatrixRule], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Directions, states and weights of three pieces after two steps as ``way`` takes many."""
    shapes = [(6, 24), (5, 5), (6, 24)]
    values, updates = ([random(shape, seed + at).to(dtype) for seed, shape in enumerate(shapes)] for at in (0, 10))
    states = [{key: torch.zeros_like(value) for key in rule.state_keys} for value in values]
    found: list[Tensor] = []
    for step in (20, 30):
        grads = [random(shape, seed + step).to(dtype) for seed, shape in enumerate(shapes)]
        found += way.directions(rule, grads, values, states)
        way.apply_all(rule, values, updates, shapes)
    return [*found, *values, *(tensor for state in states for tensor in state.values())]


@pytest.mark.parametrize("decay", DECAYS)
def test_foreach_steps_of_many_pieces_are_those_one_by_one(decay: str) -> None:
    forms = product(["ema", "sum"], [True, False], ["none", "muon2"], [torch.float32, torch.bfloat16])
    for momentum, nesterov, before, dtype in forms:
        options = {"momentum_form": momentum, "nesterov": nesterov, "precondition": before}
        rule = rule_of("muon", lr=0.1, weight_decay=0.3, weight_decay_form=decay, **options)
        ways = [stepped_together(rule, way, dtype) for way in (Muon, MatrixRule)]
        assert all(map(torch.equal, *ways)), (options, dtype)


class Halved(Muon):
    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return super().direction(grad, state) / 2


class Unmoved(Halved):
    def apply(self, value: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        """Leave the weight."""


def test_a_subclass_of_muon_that_changes_one_piece_changes_many() -> None:
    of_each = (Muon(lr=1e-3), Halved(lr=1e-3), Unmoved(lr=1e-3))
    muon, halved, unmoved = (stepped_together(rule, type(rule)) for rule in of_each)
    directions = 2 * 3
    assert all(torch.equal(half, whole / 2) for half, whole in zip(halved[:directions], muon))
    assert all(map(torch.equal, halved[directions:], muon[directions:]))
    assert all(map(torch.equal, unmoved[:directions], halved)) and torch.equal(unmoved[directions], random((6, 24), 0))


# Steps by norms: MuonH, AdamH and the u/w floor
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adamh_is_the_papers_with_torchs_adam(shape: tuple[int, int]) -> None:
    """Bias correction only makes ``eps`` smaller."""
    ours, weight = Trained(rule_of("adamh", lr=0.05, eps=1e-12), random(shape, 1)), random(shape, 1).double()
    radius, moved = norm(weight), nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    adam = torch.optim.Adam([moved], lr=1.0, betas=(0.9, 0.95), eps=1e-12)
    for grad in gradients(shape):
        moved.data.zero_()
        moved.grad = grad.double()
        adam.step()
        weight = weight + 0.05 * radius / norm(moved.data) * moved.data
        weight = weight * radius / norm(weight)
        ours.step(grad)
        # Three operations in each of four steps round the largest weight.
        torch.testing.assert_close(ours.value.double(), weight, rtol=0, atol=12 * float(weight.abs().max()) * 2**-24)


def test_wrong_options_of_adamh_are_named() -> None:
    with pytest.raises(ValueError, match=r"weight_decay: expected 0, because AdamH"):
        rule_of("adamh", weight_decay=0.1)
    for betas in ((0.9,), (0.9, 1.0), 0.9, (True, 0.9)):
        with pytest.raises(ValueError, match="betas: expected two numbers from 0 to below 1; found"):
            rule_of("adamh", betas=betas)


def test_hyperball_keeps_the_norm() -> None:
    """Hyperball keeps the norm, and leaves what has no direction."""
    rule = rule_of("muon", lr=0.05, **HYPERBALL)
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


def test_under_a_uw_floor_a_zero_update_only_decays() -> None:
    value = random((24, 16), 0)
    rule_of("muon", weight_decay=0.2, lr=0.05, uw_floor=0.35).apply(value, torch.zeros(24, 16), (24, 16))
    torch.testing.assert_close(value, random((24, 16), 0) * 0.99)


@pytest.mark.parametrize(("name", "given"), [("muon", HYPERBALL), ("muon", {"uw_floor": 0.35}), ("adamh", {})])
def test_a_bf16_weight_is_rounded_once_not_its_decay_as_well(name: str, given: dict[str, Any]) -> None:
    """A factor of 0.998 is 0.996 in bfloat16, which would decay twice as much; one of 0.9995 would not decay."""
    rule = rule_of(name, lr=0.02, **given)
    value, update = random((24, 16), 0).bfloat16(), random((24, 16), 1).bfloat16()
    sums = sums_of(value.view(1, -1), update.view(1, -1))
    keep, move = (factor[0].float() for factor in rule.factors(sums, [(24, 16)]))
    expected = value.float() * keep - update.float() * move
    rule.apply(value, update, (24, 16))
    assert torch.equal(value, expected.bfloat16())


def test_sums_for_norms_are_the_same_over_any_pieces() -> None:
    """Ranks add up those of their pieces. 2**24 + 1 is no float32."""
    value, update = torch.tensor([[2.0**12, 1.0]]), torch.tensor([[1.0, 1.0]])
    assert sums_of(value, update).tolist() == [[2.0**24 + 1, 2.0**12 + 1, 2.0]]


# Wrong options
LEAVE_OUT = "found 0.9; leave it out, or set precondition to 'muon2"
WITHOUT_GRAM = "but with ns_method 'standard' and without gram_"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"ns_coefficients": "quintik"}, "one of 'simple', 'quintic', 'polar_express', 'polar_express_5'; found 'quin"),
    ({"ns_coefficients": "quintic", "ns_steps": 6}, "'quintic' is for 5 steps, but ns_steps is 6; set ns_steps to"),
    ({"ns_coefficients": [[2, -1.5, 0.5]] * 7}, "the list given is for 7 steps, but ns_steps is 5"),
    ({"ns_coefficients": [1.0, 2.0]}, "expected three numbers"),
    ({"ns_coefficients": [[1.0, 2.0, True]] * 5}, "expected three numbers"),
    ({"ns_coefficients": [1.0, 2.0, math.inf]}, "expected finite numbers"),
    ({"gram_restarts": [3, 2]}, "gram_restarts: expected increasing numbers below ns_steps (5), found"),
    ({"gram_restarts": [5]}, "gram_restarts: expected increasing numbers below ns_steps (5), found"),
    ({"gram_restarts": [2, 4]}, f"gram_restarts is (2, 4), {WITHOUT_GRAM}"),
    ({"gram_restarts": []}, f"gram_restarts is (), {WITHOUT_GRAM}"),
    ({"ns_method": "grim"}, "ns_method: input should be 'standard', 'gram', 'auto', 'gram-newton-schulz' or"),
    ({"ns_method": "quack-kernels", "ns_dtype": "float32"}, "'float32', but quack-kernels computes in 16 bits"),
    ({"precondition": "muon2", "renormalize": "row"}, "'muon2' with renormalize 'row', a combination without"),
    ({"precondition_beta2": 0.9}, "precondition_beta2: expected none with precondition 'none', which does not use it"),
    ({"precondition": "muoneq_r", "precondition_beta2": 0.9}, LEAVE_OUT),
    ({"precondition": "aol", "precondition_eps": 0.1}, "to 'muon2' or 'muoneq_r' or 'muoneq_c' or "),
    ({"hyperball": True}, "hyperball keeps the weight's norm, but weight_decay is 0.1; set weight_decay to 0"),
    ({**HYPERBALL, "adjust_lr_fn": "original"}, "long, but adjust_lr_fn is 'original'"),
    ({**HYPERBALL, "uw_floor": 0.3}, "and uw_floor 0.3; leave them out"),
    ({"uw_floor": 0.3, "weight_decay_form": "cautious"}, "uw_floor: expected 0 with weight_decay_form 'cautious'"),
    ({"precondition": "aol", "ns_method": "gram-newton-schulz"}, "but gram-newton-schulz divides by the norm itse"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_of_muon_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        rule_of("muon", **options)
    assert message in str(caught.value)


# NorMuon and AdaMuon, by their papers' formulas and other packages'
ROWS, LONGER_SIDE = "rows", "longer_side"


def of_torch(matrix: Tensor) -> Tensor:
    """torch.optim.Muon's iteration in bf16."""
    return _muon._zeropower_via_newtonschulz(matrix.float(), SIMPLE, 5, 1e-7).double()


def adapted(
    name: str,
    shape: tuple[int, int],
    orthogonal: Callable[[Tensor], Tensor],
    *,
    signs: bool = True,
    nesterov: bool = False,
    momentum_form: str = "ema",
    second_moment_of: str = ROWS,
    update_norm: str = "match_rms",
    adjust_lr_fn: str = "none",
) -> Tensor:
    """The weight after four steps: NorMuon, algorithm 1 of arXiv 2510.05491, and AdaMuon, arXiv 2507.11005, with the
    options of other packages; all betas are 0.95."""
    weight, momentum, moment = random(shape, 1).double(), torch.zeros(shape).double(), torch.zeros(1).double()
    rows, columns = shape
    axis = 1 if second_moment_of == ROWS or rows >= columns else 0
    scale = {"none": 1.0, "spectral": max(shape) ** 0.5, "spectral_norm": (rows / columns) ** 0.5}[adjust_lr_fn]
    share = 0.05 if momentum_form == "ema" else 1.0
    for grad in gradients(shape):
        momentum = 0.95 * momentum + share * grad.double()
        direction = share * grad.double() + 0.95 * momentum if nesterov else momentum
        update = orthogonal(direction.sign() if name == "adamuon" and signs else direction)
        squares = (update**2).mean(axis, keepdim=True) if name == "normuon" else update**2
        moment = 0.95 * moment + 0.05 * squares
        divided = update / (moment.sqrt() + 1e-8)
        length = (divided**2).sum().sqrt()
        if update_norm == "match_rms":
            divided = divided * 0.2 * (rows * columns) ** 0.5 / length
        elif update_norm == "preserve":
            divided = divided * (update**2).sum().sqrt() / length
        weight = weight * (1 - 0.05 * 0.1) - 0.05 * scale * divided
    return weight


def distance(rule: Any, shape: tuple[int, int], expected: Tensor) -> float:
    """Over the distance that the weight moved."""
    return float((trained(rule, shape) - expected).norm() / (expected - random(shape, 1)).norm())


@pytest.mark.parametrize("name", RULES[1:])
def test_normuon_and_adamuon_are_their_papers(name: str) -> None:
    """NorMuon and AdaMuon are their papers' with torch's Newton-Schulz."""
    for shape in SHAPES:
        expected, exact = adapted(name, shape, of_torch), rule_of(name, lr=0.05)
        exact.exchange_dtype = torch.float32
        assert distance(exact, shape, expected) < 1e-5, shape
        # The update travels in bf16, which rounds by up to 2^-9.
        assert distance(rule_of(name, lr=0.05), shape, expected) < 4e-3, shape


# Emerging-Optimizers' AdaptiveMuon since 0.3.0 restores the norm of rows' or columns' updates. In 0.2.0 the factor by
# shape came first, so that the division took it out again. dion has momentum as a sum and sqrt(rows / columns).
OTHERS: list[tuple[str, dict[str, Any]]] = [  # with the settings of docs/rules.md
    ("normuon", {"update_norm": "preserve", "adjust_lr_fn": "spectral", "second_moment_of": LONGER_SIDE}),
    ("adamuon", {"update_norm": "none", "adjust_lr_fn": "spectral", "sign_momentum": False}),
    ("normuon", {"update_norm": "none", "adjust_lr_fn": "none", "second_moment_of": LONGER_SIDE}),
    ("adamuon", {"update_norm": "none", "adjust_lr_fn": "none", "sign_momentum": False}),
    ("normuon", {"momentum_form": "sum", "update_norm": "preserve", "adjust_lr_fn": "spectral_norm"}),
]


@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_normuon_and_adamuon_of_other_packages(name: str, options: dict[str, Any]) -> None:
    """AdaMuon's quotients of tiny elements show any rounding, so it has torch's own Newton-Schulz."""
    orthogonal = of_torch if name == "adamuon" else keller
    ns_dtype = "bfloat16" if name == "adamuon" else "float32"
    formula = {**options, "signs": options.get("sign_momentum", True)}
    formula.pop("sign_momentum", None)
    for shape, nesterov in product(SHAPES, (True, False)):
        rule = rule_of(name, lr=0.05, nesterov=nesterov, ns_dtype=ns_dtype, **options)
        rule.exchange_dtype = torch.float32
        expected = adapted(name, shape, orthogonal, nesterov=nesterov, **formula)
        limit = 1e-4 if name == "adamuon" else newton_schulz_rounding(shape)
        assert distance(rule, shape, expected) < limit, (shape, nesterov)


def test_unpublished_options_of_normuon_are_refused() -> None:
    """Options without a publication for NorMuon and AdaMuon are refused."""
    for options in ({"hyperball": True, "weight_decay": 0.0}, {"uw_floor": 0.3}):
        with pytest.raises(ValueError, match="expected AdaMuon without hyperball and uw_floor"):
            rule_of("adamuon", **options)
    for name, (before, after) in product(RULES[1:], PAIRS):
        published = name == "normuon" and before in ("none", "muoneq_r") and after in ("none", "frobenius")
        if published or before == after == "none":
            rule_of(name, precondition=before, renormalize=after)
            continue
        with pytest.raises(ValueError, match="a combination without a publication for (NorMuon|AdaMuon)"):
            rule_of(name, precondition=before, renormalize=after)


@pytest.mark.parametrize("name", RULES[1:])
def test_factor_by_shape_is_muons(name: str) -> None:
    """The factor by shape is Muon's, unless the root mean square is fixed."""
    assert rule_of(name, extra_scale_factor=2.0).scale((8, 2)) == 0.4
    for norm in ("preserve", "none"):
        assert rule_of(name, update_norm=norm).scale((8, 2)) == 2.0
        assert rule_of(name, update_norm=norm, adjust_lr_fn="spectral", extra_scale_factor=3.0).scale((4, 16)) == 12.0
    with pytest.raises(ValueError, match="expected none with update_norm 'match_rms', which has no factor by shape"):
        rule_of(name, adjust_lr_fn="original")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_second_moments_are_small_and_change_in_place(shape: tuple[int, int]) -> None:
    """Second moments are the smallest that do."""

    def made(name: str, **options: Any) -> tuple[int, ...]:
        matrix = Trained(rule_of(name, **options), random(shape, 1))
        ((key, moment),) = matrix.owner_state.items()
        assert key == "second_moment" and moment.dtype == torch.float32 and not moment.any()
        matrix.update(random(shape, 2))
        assert matrix.owner_state[key] is moment and moment.any()
        return tuple(moment.shape)

    rows, columns = shape
    assert made("normuon") == (rows, 1) and made("adamuon") == shape
    assert made("normuon", second_moment_of=LONGER_SIDE) == ((rows, 1) if rows >= columns else (1, columns))


@pytest.mark.parametrize("name", RULES[1:])
def test_traffic_and_cost_of_normuon_and_adamuon(name: str) -> None:
    """NorMuon and AdaMuon exchange one dtype, and cost a little more than Muon."""
    for exchange in (torch.bfloat16, torch.float32):
        rule = rule_of(name)
        rule.exchange_dtype = exchange
        assert Trained(rule, random((6, 9), 1)).update(random((6, 9), 2)).dtype == exchange
    for rows, columns in ((64, 96), (96, 64)):
        cost = MATRIX_RULES[name].cost((rows, columns), options_of(name, {}))
        # Of an element: its square, the average of squares (3), root and sum, the division, a norm (2), its factor.
        assert cost == newton_schulz_flops((rows, columns)) + 9 * rows * columns
        assert isinstance(cost, int) and cost < 1.02 * newton_schulz_flops((rows, columns))
