"""NorMuon and AdaMuon, against what their papers and other implementations write down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.registry import MATRIX_RULES
from lwopt_backend.rules import NorMuon, OwnerStateRule
from tests.rule_steps import SHAPES, Trained, gradients, random, rule_of, trained, trained_by

SIMPLE = (3.4445, -4.7750, 2.0315)
NAMES = ["normuon", "adamuon"]


def orthogonal(matrix: Tensor) -> Tensor:
    """torch.optim.Muon's iteration, in fp32 from there on."""
    return _muon._zeropower_via_newtonschulz(matrix.clone(), SIMPLE, 5, 1e-7).float()


def paper_normuon(shape: tuple[int, int], lr: float, decay: float) -> Tensor:
    """Algorithm 1 of arXiv 2510.05491 with both betas 0.95."""
    rows, columns = shape
    weight, momentum, moment = random(shape, 1), torch.zeros(shape), torch.zeros(rows, 1)
    for grad in gradients(shape):
        momentum = 0.95 * momentum + 0.05 * grad
        update = orthogonal(momentum)
        moment = 0.95 * moment + 0.05 * (update * update).sum(1, keepdim=True) / columns
        update = update / (moment.sqrt() + 1e-8)
        rate = 0.2 * lr * (rows * columns) ** 0.5 / update.square().sum().sqrt()
        weight = weight - lr * decay * weight - rate * update
    return weight


def paper_adamuon(shape: tuple[int, int], lr: float, decay: float) -> Tensor:
    """Arxiv 2507.11005 with both betas 0.95."""
    weight, momentum, moment = random(shape, 1), torch.zeros(shape), torch.zeros(shape)
    for grad in gradients(shape):
        momentum = 0.95 * momentum + 0.05 * grad
        update = orthogonal(momentum.sign())
        moment = 0.95 * moment + 0.05 * update**2
        update = update / (moment.sqrt() + 1e-8)
        rate = 0.2 * lr * weight.numel() ** 0.5 / update.square().sum().sqrt()
        weight = weight - lr * decay * weight - rate * update
    return weight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "paper"), [("normuon", paper_normuon), ("adamuon", paper_adamuon)])
def test_the_defaults_are_the_papers(name: str, paper: Any, shape: tuple[int, int]) -> None:
    """The update travels in bf16, which rounds the papers' by up to 2^-9."""
    expected = paper(shape, 0.05, 0.1)
    moved = (expected - random(shape, 1)).norm()
    rounded = rule_of(name, lr=0.05)
    assert (trained(rounded, shape) - expected).norm() < 4e-3 * moved
    exact = rule_of(name, lr=0.05)
    exact.exchange_dtype = torch.float32
    assert (trained(exact, shape) - expected).norm() < 1e-5 * moved


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_update_is_global_and_has_the_length_that_was_asked_for(name: str, shape: tuple[int, int]) -> None:
    """Of the whole matrix: halves of it that were normalized on their own would differ."""
    for norm, expected in [("match_rms", torch.tensor(shape).prod().sqrt()), ("preserve", None)]:
        matrix = Trained(rule_of(name, update_norm=norm, ns_dtype="float32"), random(shape, 1))
        muon = rule_of("muon", nesterov=False, ns_dtype="float32")
        for grad in gradients(shape):
            update = matrix.update(grad)
        direction = matrix.state["momentum_buffer"]
        if expected is None:
            expected = muon.transform(direction.sign() if name == "adamuon" else direction).norm()
        torch.testing.assert_close(update.norm(), expected.float(), rtol=1e-5, atol=0)
    if shape == (48, 63):
        top = Trained(rule_of(name, ns_dtype="float32"), random(shape, 1)[:24])
        assert not torch.allclose(top.update(gradients(shape)[0][:24]), update[:24], atol=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_the_factor_by_shape_is_muons_unless_the_root_mean_square_is_fixed(name: str) -> None:
    assert rule_of(name, extra_scale_factor=2.0).scale((8, 2)) == 0.4
    for norm in ("preserve", "none"):
        assert rule_of(name, update_norm=norm).scale((8, 2)) == 2.0
        assert rule_of(name, update_norm=norm, adjust_lr_fn="spectral", extra_scale_factor=3.0).scale((4, 16)) == 12.0
    with pytest.raises(
        ValueError, match="with update_norm 'match_rms' there is no factor by shape; leave adjust_lr_fn"
    ):
        rule_of(name, adjust_lr_fn="original")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_second_moments_are_the_smallest_that_do(shape: tuple[int, int]) -> None:
    rows, columns = shape

    def made(name: str, **options: Any) -> tuple[int, ...]:
        rule = rule_of(name, **options)
        assert isinstance(rule, OwnerStateRule)
        ((key, moment),) = rule.new_owner_state(shape, torch.device("cpu")).items()
        assert key == "second_moment" and moment.dtype == torch.float32 and not moment.any()
        return tuple(moment.shape)

    assert made("normuon") == (rows, 1)
    assert made("normuon", second_moment_of="longer_side") == ((rows, 1) if rows >= columns else (1, columns))
    assert made("adamuon") == shape


@pytest.mark.parametrize("name", NAMES)
def test_state_is_changed_in_place_and_goes_on(name: str) -> None:
    whole = Trained(rule_of(name), random((12, 8), 1))
    moment = whole.owner_state["second_moment"]
    for grad in gradients((12, 8)):
        whole.step(grad)
        assert whole.owner_state["second_moment"] is moment and moment.any()
    forgetful = Trained(rule_of(name), random((12, 8), 1))
    for grad in gradients((12, 8)):
        forgetful.owner_state["second_moment"].zero_()
        forgetful.step(grad)
    assert not torch.allclose(whole.value, forgetful.value, atol=1e-5)


def emerging_optimizers(shape: tuple[int, int], elementwise: bool, factor_first: bool) -> Tensor:
    """AdaptiveMuon with Nesterov's momentum and without signs; moments are of the longer side or of elements.

    Since 0.3.0 the factor by shape comes last, and moments of the longer side leave the norm as it was. In 0.2.0 the
    factor came first, so the division took it out again, and no norm was restored.
    """
    weight, momentum, moment = random(shape, 1), torch.zeros(shape), 0.0
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


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (1, 7)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_emerging_optimizers_variant_can_be_chosen(version: str, name: str, shape: tuple[int, int]) -> None:
    """With the settings that docs/rules.md gives."""
    own: dict[str, Any] = {"sign_momentum": False} if name == "adamuon" else {"second_moment_of": "longer_side"}
    norm = "preserve" if name == "normuon" and version == "0.3.0" else "none"
    factor = "spectral" if version == "0.3.0" else "none"
    rule = rule_of(name, lr=0.01, nesterov=True, update_norm=norm, adjust_lr_fn=factor, **own)
    rule.exchange_dtype = torch.float32
    expected = emerging_optimizers(shape, elementwise=name == "adamuon", factor_first=version == "0.2.0")
    assert (trained(rule, shape) - expected).norm() < 1e-4 * (expected - random(shape, 1)).norm()


def dion_normuon(shape: tuple[int, int]) -> Tensor:
    """dion's: sum momentum, rows, the norm before the division, sqrt(rows / columns)."""
    rows, columns = shape
    weight, momentum, moment = random(shape, 1), torch.zeros(shape), torch.zeros(rows, 1)
    for grad in gradients(shape):
        momentum = 0.95 * momentum + grad
        update = orthogonal(momentum)
        norm = update.norm()
        moment = 0.95 * moment + 0.05 * (update**2).mean(1, keepdim=True)
        update = update / (moment.sqrt() + 1e-8)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * (rows / columns) ** 0.5 * update * norm / update.norm()
    return weight


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (7, 1)], ids=str)
def test_dions_normuon_can_be_chosen(shape: tuple[int, int]) -> None:
    """In fp32 its buffer may round to a direction whose bf16 differs in a bit here and there."""
    rule = rule_of("normuon", lr=0.01, momentum_form="sum", update_norm="preserve", adjust_lr_fn="spectral_norm")
    rule.exchange_dtype = torch.float32
    expected = dion_normuon(shape)
    assert (trained(rule, shape) - expected).norm() < 5e-3 * (expected - random(shape, 1)).norm()


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (32, 32), (200, 3)], ids=str)
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"nesterov": True, "update_norm": "preserve"}, {}),
        ({"update_norm": "preserve", "adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False, "use_adjusted_lr": True}),
        ({}, {"nesterov": False, "update_scale": "match_rms"}),
    ],
    ids=["preserve", "rms", "paper"],
)
def test_normuon_is_that_of_pytorch_optimizer(
    options: dict[str, Any], theirs: dict[str, Any], shape: tuple[int, int]
) -> None:
    """Which reduces the norm before Newton-Schulz in another order, hence a rounding of bf16."""
    published = pytest.importorskip("pytorch_optimizer")
    shared = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "beta2": 0.8}
    expected = trained_by(published.NorMuon, shape, grouped=True, **shared, **theirs)
    rule = rule_of("normuon", **shared, **options, second_moment_eps=1e-10)
    assert isinstance(rule, NorMuon)
    assert (trained(rule, shape) - expected).norm() < 0.01 * (expected - random(shape, 1)).norm()


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (32, 32), (200, 3)], ids=str)
def test_adamuon_is_that_of_pytorch_optimizer_without_signs(shape: tuple[int, int]) -> None:
    """It has no sign, divides in bf16, and corrects a bias that the fixed root mean square takes out again."""
    published = pytest.importorskip("pytorch_optimizer")
    shared = {"lr": 0.02, "weight_decay": 0.1}
    expected = trained_by(published.AdaMuon, shape, grouped=True, **shared, betas=(0.9, 0.8))
    rule = rule_of("adamuon", **shared, momentum=0.9, beta2=0.8, sign_momentum=False, second_moment_eps=1e-10)
    assert (trained(rule, shape) - expected).norm() < 0.02 * (expected - random(shape, 1)).norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exchange", [torch.bfloat16, torch.float32])
def test_what_travels_is_in_one_dtype_and_costs_a_little_more_than_muon(name: str, exchange: torch.dtype) -> None:
    rule = rule_of(name)
    rule.exchange_dtype = exchange
    assert Trained(rule, random((6, 9), 1)).update(random((6, 9), 2)).dtype == exchange
    options = MATRIX_RULES[name].model({}, name)().model_dump()
    cost = MATRIX_RULES[name].cost((64, 96), options)
    assert isinstance(cost, int) and newton_schulz_flops((64, 96)) < cost < 1.02 * newton_schulz_flops((64, 96))
