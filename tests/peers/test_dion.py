"""dion's own Muon and NorMuon compared with this package's, with the settings of docs/migration.md.

dion is in no package index. The folder of its checkout is named by LWOPT_DION_SOURCES; without it, nothing is run.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lwopt_backend import LayerWiseOptimizer
from tests.support.migration import entry
from tests.support.references import random

STEPS = 20
LIMIT = 0.03  # of what a matrix moves by: both iterate in bf16, and dion also takes its step in it; found 0.014
ELEMENTWISE = 1e-4  # with cautious decay, an element near zero may be decayed by one of them alone; found 3e-5


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_the_pages_settings_go_the_same_way(algorithm: str, cautious: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if "LWOPT_DION_SOURCES" not in os.environ:
        pytest.skip("LWOPT_DION_SOURCES: no folder of dion's sources is named")
    monkeypatch.setattr(sys, "path", [os.environ["LWOPT_DION_SOURCES"], *sys.path])
    monkeypatch.setattr(torch, "compile", lambda *function, **_: function[0] if function else lambda inner: inner)
    import dion

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Embedding(32, 48), nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 32))
    theirs = copy.deepcopy(ours)
    embedding, *linears = (layer for layer in theirs if not isinstance(layer, nn.ReLU))
    groups: list[dict[str, Any]] = [
        {"params": [layer.weight for layer in linears[:2]]},
        {"params": [linears[2].weight], "algorithm": "lion", "lr": 1e-3},
        {"params": [embedding.weight, *(layer.bias for layer in linears)], "algorithm": "adamw", "lr": 2e-3},
    ]
    made = {"muon": dion.Muon, "normuon": dion.NorMuon}[algorithm](groups, lr=0.02, cautious_wd=cautious)
    decay = {"weight_decay": 0.01, "weight_decay_form": "cautious" if cautious else "decoupled"}
    own = {"weight_decay": 0.01, "weight_decay_form": "cautious" if cautious else "own"}
    more = {"beta2": 0.95, "update_norm": "preserve"} if algorithm == "normuon" else {}
    matrix = {**entry("dion")["params"]["matrix"], "name": algorithm, **decay, **more}
    adamw = {**entry("dion")["params"]["elementwise"], "lr": 2e-3, **decay}
    lion = {"name": "lion", "lr": 1e-3, "betas": (0.9, 0.95), **own}
    mine = LayerWiseOptimizer(
        ours,
        matrix={**matrix, "lr": 0.02},
        elementwise=adamw,
        overrides=[{"params": "4.weight", "elementwise": lion}],
        exclude="4.weight",
        report=False,
    )
    start = copy.deepcopy(ours.state_dict())
    assert {group["rule"] for group in mine.param_groups} == {algorithm, "lion", "adamw"}
    for step in range(STEPS):
        for model, optimizer in ((ours, mine), (theirs, made)):
            rows = [
                torch.linspace(0.1, 1, len(param)).reshape(-1, *[1] * (param.ndim - 1)) for param in ours.parameters()
            ]
            drawn = [random(tuple(param.shape), 100 * step + n) for n, param in enumerate(ours.parameters())]
            torch.stack([(p * r * g).sum() for p, r, g in zip(model.parameters(), rows, drawn)]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters()):
        moved, off = (other - start[name]).detach().norm(), (weight - other).detach().norm()
        limit = LIMIT if name in ("1.weight", "3.weight") else ELEMENTWISE
        assert moved > 0 and off <= limit * moved, (name, float(off / moved))
