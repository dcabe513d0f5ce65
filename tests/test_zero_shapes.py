"""Matrices that are not stored as one (outputs, inputs) parameter each: stacked experts, transposed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.models import VOCABULARY
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, ROWS, batch_shares, config, engine_for, full_weights, train

STEPS = 4
EXPERTS = 5


class StackedExperts(nn.Module):
    """Five experts in one parameter, (experts, outputs, inputs), or (experts, inputs, outputs) if it says so."""

    def __init__(self, width: int, outputs: int, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape = (width, outputs) if is_transposed else (outputs, width)
        self.weight = nn.Parameter(torch.randn(EXPERTS, *shape) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.is_transposed else self.weight.transpose(1, 2)
        return (x.unsqueeze(-3) @ weight).mean(-3)


class OddlyStored(nn.Module):
    """An embedding, a linear that is stored transposed, experts of both orientations, a convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.wide = Conv1D(31, 12)
        self.square = Conv1D(31, 31)
        self.experts = StackedExperts(31, 18, is_transposed=False)
        self.back_experts = StackedExperts(18, 12, is_transposed=True)
        self.mix = nn.Conv1d(12, 12, 3, padding=1)
        self.lm_head = nn.Linear(12, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.back_experts(torch.tanh(self.experts(torch.tanh(self.square(torch.tanh(self.wide(x)))))))
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


MATRICES = {"wide.weight": True, "square.weight": True, "experts.weight": False, "back_experts.weight": True}


def step_reference(model: nn.Module, muon: dict[str, list[nn.Parameter]], adamw: torch.optim.Optimizer) -> None:
    """Every slice is a parameter of torch.optim.Muon's own, as (outputs, inputs)."""
    named = dict(model.named_parameters())
    for name, slices in muon.items():
        grads = named[name].grad.reshape(-1, *named[name].shape[-2:])
        for own, grad in zip(slices, grads):
            own.grad = (grad.T if MATRICES[name] else grad).contiguous()
    adamw.step()


def differ_from_slices(stage: int, policy: str) -> tuple[float, dict[str, str]]:
    reference = OddlyStored()
    named = dict(reference.named_parameters())
    slices = {
        name: [
            nn.Parameter((part.T if transposed else part).detach().contiguous().clone())
            for part in named[name].reshape(-1, *named[name].shape[-2:])
        ]
        for name, transposed in MATRICES.items()
    }
    muon = torch.optim.Muon([own for parts in slices.values() for own in parts], **MUON)
    adamw = torch.optim.AdamW([p for name, p in named.items() if name not in MATRICES], **ADAMW)
    with engine_for(config(stage, rows=ROWS, policy=policy, bucket_numel=1500), OddlyStored()) as engine:
        train(engine, STEPS, same_rows=True)
        for step in range(STEPS):
            reference(*batch_shares(step, 1)[0]).backward()
            step_reference(reference, slices, adamw)
            muon.step()
            with torch.no_grad():
                for name, parts in slices.items():
                    stack = torch.stack([own.T if MATRICES[name] else own for own in parts])
                    named[name].copy_(stack.view(named[name].shape))
            reference.zero_grad()
        ours = full_weights(engine)
        routes = engine.basic_optimizer._binding.grouping.routes
        difference = max(float((ours[name] - param.detach()).abs().max()) for name, param in named.items())
        return difference, {route.name: route.reason for route in routes if route.kind == "matrix"}


@pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])
@pytest.mark.parametrize(("stage", "policy"), [(0, "auto"), (1, "balance"), (2, "stay"), (2, "balance"), (3, "auto")])
def test_every_slice_is_a_matrix_of_outputs_by_inputs(ranks: RankPool, stage: int, policy: str) -> None:
    for difference, reasons in ranks.run(differ_from_slices, stage, policy):
        assert difference == 0.0
        assert reasons == {
            "wide.weight": "2-D weight, stored transposed",
            "square.weight": "2-D weight, stored transposed",
            "experts.weight": "5 stacked experts",
            "back_experts.weight": "5 stacked experts, stored transposed",
        }


def owners_of_slices(stage: int) -> list[Any]:
    with engine_for(config(stage, policy="balance"), OddlyStored()) as engine:
        plan = next(plan for plan in engine.basic_optimizer._binding.plans if plan.rule == "muon")
        named = zip(plan.matrices.atoms, plan.matrices.ownership.owners)
        return [(atom.name, atom.shape, owner) for atom, owner in named if "experts" in atom.name]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_slices_of_one_stack_have_owners_of_their_own(ranks: RankPool, stage: int) -> None:
    first, second = ranks.run(owners_of_slices, stage)
    assert first == second and len(first) == 2 * EXPERTS
    assert [name for name, shape, _ in first if shape == (18, 31)] == [f"experts.weight[{n}]" for n in range(EXPERTS)]
    assert {owner for _, _, owner in first} == {0, 1}
