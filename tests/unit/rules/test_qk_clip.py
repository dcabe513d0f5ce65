"""QK-clip: heads whose logits are over the threshold come down to it, and no other head changes. That every engine
scales their rows: tests/engines/test_atoms.py."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lwopt_backend import Heads, QKClip
from lwopt_backend.plan import TrainedParam
from lwopt_backend.plan.layouts import View
from lwopt_backend.qk_clip import RowScaling
from lwopt_backend.rules import qk_clip_factors, row_factors
from lwopt_backend.runtime.state import StatePiece, part_of
from tests.support.cells import cells
from tests.support.fused import ATOMS, PER_HEAD, FusedLM, HeadsLM
from tests.support.on_ranks import on_ranks
from tests.support.plain import optimizer_for, shares
from tests.support.references import random
from tests.support.zero import config, engine_for

HEADS, WIDTH, SIZE, TOKENS = 4, 6, 10, 12
BOUND = 100.0
FUSED = Heads("qkv.weight", "qkv.weight", heads=4, key_heads=4, query_bias="qkv.bias", key_bias="qkv.bias")


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
def test_qk_clip_brings_heads_down_to_the_threshold(key_heads: int, query_share: float) -> None:
    """Heads below the threshold stay."""
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


def test_qk_clip_factors_are_those_of_the_paper() -> None:
    """The factors are computed in fp32, and show what is not finite."""
    factors = qk_clip_factors(torch.tensor([50.0, 100.0, 400.0, -3.0, 0.0]).bfloat16())
    assert factors.query.tolist() == factors.key.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert factors.rotary_query.tolist() == [1.0, 1.0, 0.25, 1.0, 1.0] and factors.query.dtype == torch.float32
    for wrong in (math.nan, math.inf):
        assert all(math.isnan(part[1]) and part[0] == 1 for part in qk_clip_factors(torch.tensor([1.0, wrong])))


def test_qk_clip_factors_of_the_parts_of_a_head() -> None:
    """QK-clip gives the rows of a head the factors of their part. As multi-head latent attention needs it: its logit is
    q_c k_c + q_r k_r, with k_r shared by all heads."""
    factors = qk_clip_factors(torch.tensor([400.0, 1600.0]))
    of_query = row_factors([(2, factors.query), (1, factors.rotary_query)])
    assert of_query.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.0625], "q_c goes with k_c, q_r alone"
    assert row_factors([(1, factors.key), (2, None)]).tolist() == [0.5, 1.0, 1.0, 0.25, 1.0, 1.0], "values stay"


# QKClip with an optimizer
def test_qk_clip_scales_any_range_by_its_outputs() -> None:
    """QK-clip scales any range and box of a parameter by its outputs. However it is cut, within a row or not; stored
    transposed, of one dimension or of three."""
    shapes = {"plain": (6, 4), "transposed": (4, 6), "bias": (6,), "conv": (6, 2, 2)}
    factors = torch.arange(2.0, 8.0)
    scaling = RowScaling(shapes, frozenset({"transposed"}), lambda name: ())
    for name, shape in shapes.items():
        param = TrainedParam(name, shape, "float32", "muon")
        outputs = factors if name in ("transposed", "bias") else factors.view(-1, *[1] * (len(shape) - 1))
        whole = torch.ones(shape) * outputs
        views = [View.of_range(*cut) for cut in itertools.combinations(range(whole.numel() + 1), 2)]
        cuts = itertools.product(*(itertools.combinations(range(size + 1), 2) for size in shape))
        views += [View.of_box(shape, [(start, stop - start) for start, stop in cut]) for cut in cuts]
        for view in views:
            scaling.set({name: factors})
            elements = torch.ones(view.sizes)
            assert scaling.scale([param], [StatePiece(0, view, elements, {})])
            assert torch.equal(elements, part_of(whole, view)) and not scaling
            assert not scaling.scale([param], [StatePiece(0, view, elements, {})])


@on_ranks(2)
def test_qk_clip_of_fp32_masters() -> None:
    """QK-clip of fp32 masters leaves the parameter their rounding."""
    model = FusedLM().bfloat16()
    optimizer = optimizer_for(model, atoms=ATOMS, grad_dtype="float32")
    clip, seen = QKClip(optimizer, {"fused": FUSED}, BOUND), []
    for _ in range(2):
        model(*shares(0, 1)[0]).backward()
        optimizer.step()
        optimizer.synchronize()
        seen.append(model.qkv.weight.detach().clone())
        optimizer.zero_grad()
        clip({"fused": torch.full((4,), 400.0)})
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    before, after = seen
    assert torch.equal(after[:32], before[:32] / 2) and torch.equal(after[32:], before[32:])


def test_qk_clip_of_a_fused_qkv_is_the_same_with_per_head() -> None:
    found = [HeadsLM().fused.wqkv.weight]
    for options in ({"atoms": {}}, PER_HEAD):
        model = HeadsLM()
        optimizer = optimizer_for(model, **options)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        layer = Heads("fused.wqkv.weight", "fused.wqkv.weight", heads=4, key_heads=2)
        clip = QKClip(optimizer, {"0": layer}, BOUND)
        with mock.patch.object(
            optimizer.row_scaling, "matrices_in", side_effect=AssertionError("looked up every step")
        ):
            clip({"0": torch.tensor([400.0, 100.0, 90.0, 250.0])})
        model(*shares(0, 1)[0]).backward()
        optimizer.step()
        found.append(model.fused.wqkv.weight.detach())
    before, apart, by_head = found
    assert torch.equal(by_head, apart) and not torch.equal(apart, before)


# What is refused
def clip_of(layers: Any, **options: Any) -> QKClip:
    return QKClip(optimizer_for(FusedLM(), **{"atoms": ATOMS, **options}), layers)


def layer(*given: Any, **more: Any) -> Callable[[], object]:
    return lambda: clip_of({"fused": Heads(*given, **more)})


def fused(**options: Any) -> Callable[[], object]:
    return lambda: clip_of({"fused": FUSED}, **options)


def logged(given: Any) -> Callable[[], object]:
    return lambda: clip_of({"fused": FUSED})(given)


MIX = ("mix.weight", "down.weight", 2)
APART = "layer 'fused': 'qkv.weight' is query and key; expected matrices 'q' and 'k' in it, found "
DIVIDE = '; divide it with the option "atoms": {"qkv.weight": {"qkv": ['
OTHER_BIAS = "layer 'fused': expected a bias of 24 outputs, as 'mix.weight' has; found 'qkv.bias' with 40"
TWO_WEIGHTS = "'out.bias' is query_bias and key_bias, but query and key are two weights, 'mix.weight' and"
ONE_PER_HEAD = "layer 'fused': expected max_logits as a tensor of shape (4,), one per head; found "
WITHOUT_BIAS = "expected key_bias='out.bias', found None; logits shrink only if the bias"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: qk_clip_factors(torch.ones(2, 3)), "expected one per head, (heads,); found shape (2, 3"),
    (lambda: qk_clip_factors(torch.ones(4), key_heads=3), "key_heads: expected a divisor of the 4 "),
    (lambda: qk_clip_factors(torch.ones(4), 0.0), "expected a finite threshold over 0 and a query_share "),
    (lambda: qk_clip_factors(torch.ones(4), math.nan), "expected a finite threshold over 0"),
    (lambda: qk_clip_factors(torch.ones(4), query_share=1.5), "found 100.0 and 1.5"),
    (lambda: row_factors([(3, torch.ones(2)), (3, torch.ones(3))]), "found [(2,), (3,)]"),
    *((lambda wrong=wrong: Heads("q", "k", wrong), "expected a number of heads of at least 1") for wrong in (0, 4.0)),
    (lambda: Heads("q", "k", 4, key_heads=True), "key_heads: expected a number of heads of at least 1, found"),
    (lambda: clip_of({}), "layers: expected at least one attention layer, found none"),
    (lambda: clip_of({"fused": {"query": "mix.weight"}}), "'fused': expected Heads(query, key, heads=...), found {'q"),
    (layer("qvk.weight", "down.weight", 2), "no trained parameter is named 'qvk.weight'; did you mean 'qkv.we"),
    (layer("qkv.weight", "qkv.weight", 5), "outputs of 'q' that divide into 5 heads, found 24 in 'qkv"),
    (layer("mix.weight", "out.weight", 6, key_heads=4), "layer 'fused': key_heads: expected a divisor of the 6"),
    (layer(*MIX, query_bias="out.bias", key_bias="out.bias"), TWO_WEIGHTS),
    (layer(*MIX, query_bias="qkv.bias"), OTHER_BIAS),
    (layer("gate_up.weight", "down.weight", 2), "as many outputs of the key as of the query, found 24 and 46; give"),
    (layer("mix.weight", "out.weight", 6), WITHOUT_BIAS),
    (layer("qkv.weight", "out.weight", 4, 4, "qkv.weight"), "with one, found 'qkv.weight' of shape (40, 24)"),
    (fused(atoms={"qkv.weight": "whole"}), f"{APART}a single matrix{DIVIDE}"),
    (fused(atoms={"qkv.weight": {"split_sizes": [24, 8, 8]}}), f"{APART}'part0', 'part1', 'part2'{DIVIDE}"),
    (fused(atoms={}, exclude=["qkv.weight"]), f"{APART}none, because no matrix rule updates it{DIVIDE}"),
    (logged({"fusd": torch.ones(4)}), "unknown layer 'fusd'; did you mean 'fused'?"),
    (logged(torch.ones(4)), "max_logits: expected a mapping of layers to tensors of shape (heads,); found a Tensor"),
    (logged({"fused": torch.ones(3)}), f"{ONE_PER_HEAD}shape (3,)"),
    (logged({"fused": torch.tensor(1.0)}), f"{ONE_PER_HEAD}shape ()"),
    (logged({"fused": [1.0, 2.0, 3.0, 4.0]}), f"{ONE_PER_HEAD}a list"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_arguments_layers_and_logits_of_qk_clip_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@on_ranks(2)
def test_qk_clip_refuses_other_optimizers_with_what_to_pass() -> None:
    """Also the optimizer that ZeRO wraps; and this package's where a fused weight was left whole."""
    with engine_for(config(2, rows=8, atoms={"qkv.weight": "whole"}), FusedLM()) as engine:
        for other, name in (
            (torch.optim.SGD(FusedLM().parameters()), "torch.optim.sgd.SGD"),
            (engine.optimizer, "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"),
        ):
            with pytest.raises(TypeError, match=f"QKClip: expected .* engine.basic_optimizer .*; found {name}"):
                QKClip(other, {"fused": FUSED})
        with pytest.raises(ValueError, match=re.escape(APART)):
            QKClip(engine.basic_optimizer, {"fused": FUSED})
