"""The package gram-newton-schulz on a CPU, in fp16 and without its kernels, compared with this package's iterations."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from lwopt_backend.rules import gram_newton_schulz, newton_schulz
from lwopt_backend.rules.newton_schulz import TABLES, packaged_newton_schulz
from tests.support.references import random, rule_of
from tests.unit.rules.test_newton_schulz import STEPS, table_restarts

module: Any = import_module("lwopt_backend.rules.newton_schulz")


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (3, 48, 64)], ids=str)
@pytest.mark.parametrize("on_gram", [True, False])
@pytest.mark.parametrize("table", list(TABLES))
def test_it_is_the_same_polynomial(table: str, on_gram: bool, shape: tuple[int, ...]) -> None:
    """In fp16 it is nearer to exact steps than our iteration in bfloat16 is; no matrix is too small for it, and none is
    changed. Restarts are those given, or this package's."""
    options = {"steps": STEPS[table], "coefficients": table, "eps": 1e-7}
    matrices = random(shape, 0)
    exact = newton_schulz(matrices.double(), **options, dtype=torch.float64)
    ours = (gram_newton_schulz if on_gram else newton_schulz)(matrices, **options, dtype=torch.bfloat16)
    for scale, restarts in ((1.0, None), (1e-12, None), (1e-30, None), (1.0, (1, 3))):
        given = matrices * scale
        kept, how = given.clone(), {"restarts": restarts, "on_gram": on_gram}
        theirs = packaged_newton_schulz(given, **options, dtype=torch.bfloat16, **how)
        assert torch.equal(given, kept) and theirs.dtype == torch.bfloat16 and theirs.shape == matrices.shape
        assert restarts or (theirs.double() - exact).norm() <= (ours.double() - exact).norm()
        torch.testing.assert_close(theirs.double(), exact, rtol=0, atol=0.05)
    misses = module._iteration.cache_info().misses
    made = module._iteration(module._for_norm_one(table, STEPS[table]), table_restarts(table), on_gram, False)
    assert module._iteration.cache_info().misses == misses, "found again"
    assert not on_gram or made.gram_newton_schulz_reset_iterations == list(table_restarts(table))
    zero = packaged_newton_schulz(torch.zeros(shape), **options, dtype=torch.bfloat16, restarts=None, on_gram=on_gram)
    assert not zero.any()


def test_a_rule_takes_it() -> None:
    update = rule_of("muon", ns_method="gram-newton-schulz").transform(random((48, 96), 0))
    plain = rule_of("muon", ns_dtype="float32").transform(random((48, 96), 0))
    torch.testing.assert_close(update.float(), plain, rtol=0, atol=0.01)
