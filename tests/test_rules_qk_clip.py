"""QK-clip: logits of heads over the threshold come down to it, and no other head's change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lwopt_backend.rules import qk_clip_factors, row_factors
from tests.rule_steps import random

HEADS, WIDTH, SIZE, TOKENS = 4, 6, 10, 12


def logits(query: Tensor, key: Tensor, inputs: Tensor) -> Tensor:
    """(heads, tokens, tokens), of projections (heads or key heads * width, size)."""
    q = (inputs @ query.T).unflatten(-1, (-1, WIDTH)).transpose(0, 1)
    k = (inputs @ key.T).unflatten(-1, (-1, WIDTH)).transpose(0, 1)
    k = k.repeat_interleave(len(q) // len(k), 0)
    return q @ k.mT / WIDTH**0.5


def largest(matrix: Tensor) -> Tensor:
    return matrix.flatten(1).amax(1)


def projections(key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query weights whose heads have very different logits, key weights, and inputs."""
    query = random((HEADS * WIDTH, SIZE), 0) * torch.tensor([0.1, 30.0, 0.5, 60.0]).repeat_interleave(WIDTH)[:, None]
    return query, random((key_heads * WIDTH, SIZE), 1), random((TOKENS, SIZE), 2)


@pytest.mark.parametrize("query_share", [0.5, 0.0, 1.0, 0.3])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_heads_over_the_threshold_are_brought_down_to_it_and_the_others_stay(
    key_heads: int, query_share: float
) -> None:
    query, key, inputs = projections(key_heads)
    before = logits(query, key, inputs)
    threshold = 50.0
    assert ((largest(before) > threshold) == torch.tensor([False, True, False, True])).all()
    factors = qk_clip_factors(largest(before), threshold, key_heads=key_heads, query_share=query_share)
    query = query * row_factors([(WIDTH, factors.query)])[:, None]
    key = key * row_factors([(WIDTH, factors.key)])[:, None]
    after = logits(query, key, inputs)
    torch.testing.assert_close(largest(after)[[1, 3]], torch.full((2,), threshold))
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    if key_heads < HEADS:
        assert torch.equal(factors.key, torch.ones(key_heads))


def test_factors_are_those_of_the_paper() -> None:
    factors = qk_clip_factors(torch.tensor([50.0, 100.0, 400.0, -3.0, 0.0]))
    assert factors.query.tolist() == factors.key.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert factors.rotary_query.tolist() == [1.0, 1.0, 0.25, 1.0, 1.0]


def test_multi_head_latent_attention_is_clipped_in_both_parts() -> None:
    """A head's logit is q_c k_c + q_r k_r, with k_r shared by all heads; rows of values stay."""
    nope, rope, value = 6, 4, 5
    query, up = random((HEADS * (nope + rope), SIZE), 0) * 9, random((HEADS * (nope + value), SIZE), 1)
    shared, inputs = random((rope, SIZE), 2), random((TOKENS, SIZE), 3)

    def attention(query: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        q = (inputs @ query.T).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        k, v = (inputs @ up.T).unflatten(-1, (HEADS, -1)).transpose(0, 1).split([nope, value], -1)
        rotary = (inputs @ shared.T).expand(HEADS, -1, -1)
        return q @ torch.cat([k, rotary], -1).mT, v

    before, values = attention(query, up)
    threshold = float(largest(before).median())
    factors = qk_clip_factors(largest(before), threshold)
    query = query * row_factors([(nope, factors.query), (rope, factors.rotary_query)])[:, None]
    up = up * row_factors([(nope, factors.key), (value, None)])[:, None]
    after, values_after = attention(query, up)
    gamma = (threshold / largest(before)).clamp(max=1)
    assert (gamma < 1).any() and (gamma == 1).any()
    torch.testing.assert_close(after, before * gamma[:, None, None], rtol=1e-4, atol=1e-3)
    assert torch.equal(values, values_after)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_not_hidden(wrong: float) -> None:
    factors = qk_clip_factors(torch.tensor([1.0, wrong]))
    assert all(math.isnan(part[1]) and part[0] == 1 for part in factors)


def test_logits_in_bf16_give_factors_in_fp32() -> None:
    factors = qk_clip_factors(torch.tensor([300.0], dtype=torch.bfloat16))
    assert factors.query.dtype == torch.float32 and factors.query.item() == pytest.approx(3**-0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: qk_clip_factors(torch.ones(2, 3)),
            r"max_logits: expected one per head, \(heads,\); found shape \(2, 3\)",
        ),
        (lambda: qk_clip_factors(torch.ones(0)), "max_logits: expected one per head"),
        (
            lambda: qk_clip_factors(torch.ones(4), key_heads=3),
            "key_heads: expected a divisor of the 4 heads .* found 3",
        ),
        (lambda: qk_clip_factors(torch.ones(4), 0.0), "expected a threshold over 0 and a query_share in .* found 0.0"),
        (lambda: qk_clip_factors(torch.ones(4), math.nan), "expected a threshold over 0"),
        (lambda: qk_clip_factors(torch.ones(4), query_share=1.5), "found 100.0 and 1.5"),
        (lambda: row_factors([(3, None)]), "parts: expected factors of equally many heads"),
        (lambda: row_factors([(3, torch.ones(2)), (3, torch.ones(3))]), r"found \[\(2,\), \(3,\)\]"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_clipped_weights_are_those_of_pytorch_optimizers_muonclip() -> None:
    """With a learning rate of zero, so that only its QK-clip changes weights."""
    published = pytest.importorskip("pytorch_optimizer")
    query, key, inputs = projections(HEADS)
    params = {role: torch.nn.Parameter(weight.clone()) for role, weight in (("query", query), ("key", key))}
    groups = [
        {"params": [param], "use_muon": True, "lr": 0.0, "attention_name": "layer", "qk_clip": role}
        for role, param in params.items()
    ]
    optimizer = published.MuonClip(groups, qk_clip_threshold=30.0)
    for param in params.values():
        param.grad = torch.ones_like(param)
    most = largest(logits(query, key, inputs))
    optimizer.step(attention_max_logits={"layer": most})
    factors = qk_clip_factors(most, 30.0)
    torch.testing.assert_close(params["query"].detach(), query * row_factors([(WIDTH, factors.query)])[:, None])
    torch.testing.assert_close(params["key"].detach(), key * row_factors([(WIDTH, factors.key)])[:, None])
