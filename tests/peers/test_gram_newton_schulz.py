"""The package gram-newton-schulz on a CPU, in fp16 and without its kernels, beside our iterations."""

from __future__ import annotations

import pytest
import torch

from lwopt_backend.rules import gram_newton_schulz, newton_schulz
from lwopt_backend.rules.newton_schulz import TABLES, packaged_newton_schulz
from tests.rule_steps import random, rule_of

STEPS = {"simple": 5, "quintic": 5, "polar_express": 8, "polar_express_5": 5}


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64), (3, 48, 64)], ids=str)
@pytest.mark.parametrize("on_gram", [True, False])
@pytest.mark.parametrize("table", list(TABLES))
def test_it_is_the_same_polynomial(table: str, on_gram: bool, shape: tuple[int, ...]) -> None:
    """In fp16 it is nearer to exact steps than our iteration in bfloat16 is; and no matrix is too small for it."""
    options = {"steps": STEPS[table], "coefficients": table, "eps": 1e-7}
    matrices = random(shape, 0)
    exact = newton_schulz(matrices.double(), **options, dtype=torch.float64)
    ours = (gram_newton_schulz if on_gram else newton_schulz)(matrices, **options, dtype=torch.bfloat16)
    for scale in (1.0, 1e-12, 1e-30):
        theirs = packaged_newton_schulz(
            matrices * scale, **options, dtype=torch.bfloat16, restarts=None, on_gram=on_gram
        )
        assert theirs.dtype == torch.bfloat16 and theirs.shape == matrices.shape
        assert (theirs.double() - exact).norm() <= (ours.double() - exact).norm()
    zero = packaged_newton_schulz(torch.zeros(shape), **options, dtype=torch.bfloat16, restarts=None, on_gram=on_gram)
    assert not zero.any()


def test_a_rule_takes_it() -> None:
    update = rule_of("muon", ns_method="gram-newton-schulz").transform(random((48, 96), 0))
    plain = rule_of("muon", ns_dtype="float32").transform(random((48, 96), 0))
    torch.testing.assert_close(update.float(), plain, rtol=0, atol=0.01)
