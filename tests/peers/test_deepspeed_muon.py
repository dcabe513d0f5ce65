"""DeepSpeed's own Muon and this package's: one entry with another type, on the same batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import zero
from tests.support.migration import eager
from tests.support.models import MATRICES, UnevenLM
from tests.support.ranks import RankPool

ENTRY = {
    **{"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95]},
    "torch_adam": True,  # without it, DeepSpeed compiles its own
}


def weights_after_five_steps(kind: str, stage: int, **options: Any) -> dict[str, torch.Tensor]:
    settings, model = zero.config(stage), UnevenLM()
    settings["optimizer"] = {"type": kind, "params": {**ENTRY, **options}}
    for name, param in model.named_parameters():  # how DeepSpeed's is told what a matrix is
        if kind == "Muon":
            param.use_muon = name in MATRICES
    with eager(), zero.engine_for(settings, model) as engine:
        zero.train(engine, 5)
        return zero.full_weights(engine)


# How far DeepSpeed's weights may be from an iteration in fp32, in units of what they move by. The Gram iteration is in
# fp32 itself, on a CPU without arithmetic in fp16: found 1e-4, in the matrix of two rows. The standard one is in bf16:
# it rounds by up to 2^-9 what five steps multiply by up to 3.4 each, where singular values are small: found 0.06.
LIMITS = {"gram": 1e-3, "standard": 0.1}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("method", LIMITS)
def test_the_entry_with_another_type_goes_the_same_way(ranks: RankPool, stage: int, method: str) -> None:
    """This package is at most twice as far from an iteration in fp32 as DeepSpeed."""
    start = UnevenLM().state_dict()
    theirs = ranks.run(weights_after_five_steps, "Muon", stage, ns_method=method)[0]
    ours, exact = (
        ranks.run(weights_after_five_steps, "LayerWiseMuon", stage, ns_method=method, **how)[0]
        for how in ({}, {"ns_dtype": "float32"})
    )
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        moved, off = (weight - start[name]).norm(), (weight - exact[name]).norm()
        assert moved > 0 and off < LIMITS[method] * moved and (ours[name] - exact[name]).norm() <= 2 * off, name
