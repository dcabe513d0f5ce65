"""QK-clip: shrink the query and key weights of heads whose attention logits grow too large (MuonClip, Kimi K2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class QKFactors(NamedTuple):
    """Factors for the rows of each head's projections; the first two also scale their biases."""

    query: Tensor  # (heads,)
    key: Tensor  # (key heads,)
    rotary_query: Tensor  # (heads,): rows of MLA's query whose keys all heads share


def qk_clip_factors(
    max_logits: Tensor, threshold: float = 100.0, *, key_heads: int | None = None, query_share: float = 0.5
) -> QKFactors:
    """Factors that reduce a head's largest logit S, if it is over the threshold t, to t.

    gamma = min(1, t / S) is split between both sides: gamma^query_share for the query, the rest for the key, half each
    in "Kimi K2: Open Agentic Intelligence", arXiv 2507.20534, section 2.1. A key that several heads share is not
    scaled, and the queries take all of gamma, as the paper does for MLA's rotary part: only then is a head clipped
    without effect on the others. So with fewer ``key_heads`` than heads (grouped queries), all key factors are one.

    Apply the factors after the update; momentum is not scaled.

    Args:
        max_logits: (heads,), each head's largest q k / sqrt(d) before the softmax since the last step, over all
            (accumulated) batches and data-parallel ranks. Every rank must pass the same.
        threshold: largest logit that is not reduced.
        key_heads: number of key heads. Default: that of query heads.
        query_share: exponent of gamma for the query.

    Returns:
        fp32 factors on the device of ``max_logits``, exactly one for a head within the threshold. A non-finite logit
        yields NaN, because a step that saw one should have been skipped.

    Raises:
        ValueError: for a wrong shape, threshold or share.

    Examples:
        >>> qk_clip_factors(torch.tensor([50.0, 400.0])).query
        tensor([1.0000, 0.5000])
    """
    if max_logits.ndim != 1 or not len(max_logits):
        raise ValueError(f"max_logits: expected one per head, (heads,); found shape {tuple(max_logits.shape)}")
    if not 0 < threshold < math.inf or not 0 <= query_share <= 1:
        raise ValueError(
            f"expected a finite threshold over 0 and a query_share in [0, 1]; found {threshold!r} and {query_share!r}"
        )
    heads = len(max_logits)
    key_heads = heads if key_heads is None else key_heads
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"key_heads: expected a divisor of the {heads} heads in max_logits; found {key_heads}")
    logits = max_logits.detach().float()
    gamma = threshold / torch.where(logits.isfinite(), logits, torch.nan).clamp(min=threshold)
    if key_heads < heads:
        return QKFactors(gamma, torch.ones_like(gamma[:key_heads]), gamma)
    return QKFactors(gamma**query_share, gamma ** (1 - query_share), gamma)


def row_factors(parts: Sequence[tuple[int, Tensor | None]]) -> Tensor:
    """One factor per row of a projection whose rows are ordered by head.

    Args:
        parts: the rows of one head in order: their number, and (heads,) factors, or None for a factor of one. For
            attention with d rows a head: ``[(d, factors.query)]`` for the query's projection, ``[(d, factors.key)]``
            for the key's; for MLA ``[(nope, factors.query), (rope, factors.rotary_query)]`` and
            ``[(nope, factors.key), (v, None)]``.

    Returns:
        A tensor of shape (rows,).

    Raises:
        ValueError: if no part has factors, or if their numbers of heads differ.

    Examples:
        >>> row_factors([(2, torch.tensor([1.0, 0.5]))])
        tensor([1.0000, 1.0000, 0.5000, 0.5000])
    """
    given = [factors for _, factors in parts if factors is not None]
    if not given or any(factors.shape != given[0].shape for factors in given):
        raise ValueError(f"parts: expected factors of equally many heads; found {[tuple(f.shape) for f in given]}")
    columns = [(torch.ones_like(given[0]) if f is None else f)[:, None].expand(-1, count) for count, f in parts]
    return torch.cat(columns, dim=1).reshape(-1)
