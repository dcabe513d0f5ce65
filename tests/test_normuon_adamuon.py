"""NorMuon and AdaMuon on whole matrices in one process: their papers' formulas and other packages', written out."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from lwopt_backend.groups.registry import MATRIX_RULES
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.rules.muon import DEFINED
from tests.references import SHAPES, SIMPLE, Trained, gradients, orthogonalized, random, rule_of, trained

RULES = ("normuon", "adamuon")
ROWS, LONGER_SIDE = "rows", "longer_side"


def of_torch(matrix: Tensor) -> Tensor:
    """torch.optim.Muon's iteration in bf16."""
    return _muon._zeropower_via_newtonschulz(matrix.float(), SIMPLE, 5, 1e-7).double()


def in_fp64(matrix: Tensor) -> Tensor:
    return orthogonalized(matrix, [SIMPLE] * 5)


def written_out(
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


@pytest.mark.parametrize("name", RULES)
def test_normuon_and_adamuon_are_their_papers_with_torchs_newton_schulz(name: str) -> None:
    for shape in SHAPES:
        expected, exact = written_out(name, shape, of_torch), rule_of(name, lr=0.05)
        exact.exchange_dtype = torch.float32
        assert distance(exact, shape, expected) < 1e-5, shape
        # The update travels in bf16, which rounds by up to 2^-9.
        assert distance(rule_of(name, lr=0.05), shape, expected) < 4e-3, shape


# Emerging-Optimizers' AdaptiveMuon since 0.3.0 restores the norm of rows' or columns' updates. In 0.2.0 the factor by
# shape came first, so that the division took it out again. dion has momentum as a sum and sqrt(rows / columns).
OTHERS: list[tuple[str, dict[str, Any]]] = [  # with the settings of docs/variants.md
    ("normuon", {"update_norm": "preserve", "adjust_lr_fn": "spectral", "second_moment_of": LONGER_SIDE}),
    ("adamuon", {"update_norm": "none", "adjust_lr_fn": "spectral", "sign_momentum": False}),
    ("normuon", {"update_norm": "none", "adjust_lr_fn": "none", "second_moment_of": LONGER_SIDE}),
    ("adamuon", {"update_norm": "none", "adjust_lr_fn": "none", "sign_momentum": False}),
    ("normuon", {"momentum_form": "sum", "update_norm": "preserve", "adjust_lr_fn": "spectral_norm"}),
]


@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_normuon_and_adamuon_of_other_packages(name: str, options: dict[str, Any]) -> None:
    """AdaMuon's quotients of tiny elements show any rounding, so it has torch's own Newton-Schulz."""
    orthogonal = of_torch if name == "adamuon" else in_fp64
    limit, ns_dtype = (1e-4, "bfloat16") if name == "adamuon" else (1e-5, "float32")
    formula = {**options, "signs": options.get("sign_momentum", True)}
    formula.pop("sign_momentum", None)
    for shape, nesterov in product(SHAPES, (True, False)):
        rule = rule_of(name, lr=0.05, nesterov=nesterov, ns_dtype=ns_dtype, **options)
        rule.exchange_dtype = torch.float32
        expected = written_out(name, shape, orthogonal, nesterov=nesterov, **formula)
        assert distance(rule, shape, expected) < limit, (shape, nesterov)


def test_options_without_a_publication_for_normuon_and_adamuon_are_refused() -> None:
    for options in ({"hyperball": True, "weight_decay": 0.0}, {"uw_floor": 0.3}):
        with pytest.raises(ValueError, match="expected AdaMuon without hyperball and uw_floor"):
            rule_of("adamuon", **options)
    pairs = [(before, after) for before, afters in DEFINED.items() for after in afters]
    for name, (before, after) in product(RULES, pairs):
        published = name == "normuon" and before in ("none", "muoneq_r") and after in ("none", "frobenius")
        if published or before == after == "none":
            rule_of(name, precondition=before, renormalize=after)
            continue
        with pytest.raises(ValueError, match="a combination without a publication for (NorMuon|AdaMuon)"):
            rule_of(name, precondition=before, renormalize=after)


@pytest.mark.parametrize("name", RULES)
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
    assert made("normuon", second_moment_of=LONGER_SIDE) == ((rows, 1) if rows >= columns else (1, columns))


@pytest.mark.parametrize("name", RULES)
def test_normuon_and_adamuon_exchange_one_dtype_and_cost_a_little_more_than_muon(name: str) -> None:
    for exchange in (torch.bfloat16, torch.float32):
        rule = rule_of(name)
        rule.exchange_dtype = exchange
        assert Trained(rule, random((6, 9), 1)).update(random((6, 9), 2)).dtype == exchange
    cost = MATRIX_RULES[name].cost((64, 96), MATRIX_RULES[name].model({}, name)().model_dump())
    assert isinstance(cost, int) and newton_schulz_flops((64, 96)) < cost < 1.02 * newton_schulz_flops((64, 96))
