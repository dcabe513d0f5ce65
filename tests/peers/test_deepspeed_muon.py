"""DeepSpeed's own Muon beside ours: the same entry, whose type alone is changed, on the same batches."""

from __future__ import annotations

import pytest
import torch

from tests import zero
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool

ENTRY = {
    **{"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "muon_lr": 0.02, "adam_lr": 1e-3, "betas": [0.9, 0.95]},
    "torch_adam": True,  # without it, DeepSpeed compiles its own
}


def weights_after(kind: str, stage: int, method: str, steps: int) -> dict[str, torch.Tensor]:
    settings = zero.config(stage)
    settings["optimizer"] = {"type": kind, "params": {**ENTRY, "ns_method": method}}
    model = UnevenLM()
    for name, param in model.named_parameters():  # how DeepSpeed's is told what a matrix is
        if kind == "Muon":
            param.use_muon = name in MATRICES
    # Theirs would compile for a minute.
    with torch._dynamo.config.patch(disable=True), zero.engine_for(settings, model) as engine:
        zero.train(engine, steps)
        return zero.full_weights(engine)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_entry_with_another_type_goes_the_same_way(ranks: RankPool, stage: int, method: str) -> None:
    start = UnevenLM().state_dict()
    theirs = ranks.run(weights_after, "Muon", stage, method, 5)[0]
    ours = ranks.run(weights_after, "LayerWiseMuon", stage, method, 5)[0]
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        moved = (weight - start[name]).norm()
        # Both iterate in bf16 and round otherwise: found 0.06 after five steps.
        assert moved > 0 and (ours[name] - weight).norm() < 0.1 * moved, name
