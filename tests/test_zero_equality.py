"""Under DeepSpeed's ZeRO-1/2 every parameter equals that of torch.optim.Muon + torch.optim.AdamW on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from tests.models import VOCABULARY, UnevenLM
from tests.ranks import RankPool
from tests.zero import (
    ADAMW,
    MUON,
    ROWS,
    Reference,
    batch_shares,
    config,
    engine_for,
    full_weights,
    largest_difference,
    newton_schulz_in_float32,
    train,
)

STEPS = 5
all_sizes = pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True, ids=["1rank", "2ranks", "4ranks"])
both_sizes = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])
all_stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def differ_from_full_batch(stage: int, accumulation: int, clip: float) -> tuple[float, list[tuple[float, float]]]:
    """Every rank trains on its own rows; the reference sees all of them at once. Norms are pairs (ours, torch's)."""
    world_size = torch.distributed.get_world_size()
    rows = ROWS // world_size // accumulation
    settings = config(
        stage, accumulation=accumulation, clip=clip, rows=rows, ns_dtype="float32", policy="balance", bucket_numel=2000
    )
    reference = Reference()
    norms = []
    with engine_for(settings) as engine, newton_schulz_in_float32():
        for step in range(STEPS):
            train(engine, range(step, step + 1))
            norms.append((float(engine.get_global_grad_norm()), *reference.train(range(step, step + 1), clip=clip)))
        return largest_difference(full_weights(engine), reference.model), norms


@both_sizes
@all_stages
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_parameters_equal_a_single_process_on_the_full_batch(
    ranks: RankPool, stage: int, accumulation: int, clip: float
) -> None:
    for difference, norms in ranks.run(differ_from_full_batch, stage, accumulation, clip):
        assert difference <= 1e-6
        assert all(ours == pytest.approx(truth, rel=1e-5) for ours, truth in norms)
        assert clip == 0.0 or all(truth > clip for _, truth in norms), "the clip must bite to be tested"


def differ_bit_for_bit(stage: int, policy: str, accumulation: int) -> tuple[float, int]:
    """Every rank trains on the same rows, so the averaged gradient has the bits of a single process's."""
    settings = config(stage, rows=ROWS // accumulation, accumulation=accumulation, policy=policy, bucket_numel=2000)
    reference = Reference()
    with engine_for(settings) as engine:
        train(engine, STEPS, same_rows=True)
        reference.train(STEPS, parts=accumulation)
        plan = engine.basic_optimizer._binding.plans[0].matrices
        return largest_difference(full_weights(engine), reference.model), len(plan.buckets)


@all_sizes
@pytest.mark.parametrize(
    ("stage", "policy"), [(0, "auto"), (1, "stay"), (1, "balance"), (2, "stay"), (2, "balance"), (3, "auto")]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_have_the_bits_of_torch_muon_given_the_same_gradients(
    ranks: RankPool, stage: int, policy: str, accumulation: int
) -> None:
    for difference, buckets in ranks.run(differ_bit_for_bit, stage, policy, accumulation):
        assert difference == 0.0
        assert buckets >= 1 or ranks.world_size == 1, "some matrix must travel to be tested"


def differ_with_zero_options(stage: int, options: dict[str, Any]) -> tuple[float, int]:
    settings = config(stage, rows=ROWS, policy="balance", bucket_numel=2000)
    settings["zero_optimization"] |= options
    reference = Reference()
    with engine_for(settings) as engine:
        train(engine, STEPS, same_rows=True)
        reference.train(STEPS)
        optimizer = engine.basic_optimizer
        planned = sum(plan.state_bytes[torch.distributed.get_rank()] for plan in optimizer._binding.plans)
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        return largest_difference(full_weights(engine), reference.model), planned - sum(t.nbytes for t in tensors)


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (0, {}),
        *(
            (stage, options)
            for stage in (1, 2)
            for options in (
                {},
                {"overlap_comm": True},
                {"contiguous_gradients": False},
                {"reduce_scatter": False},
                {"parameter_alignment": True},
                {"reduce_bucket_size": 500},
            )
        ),
        *(
            (3, options)
            for options in (
                {},
                {"overlap_comm": True},
                {"contiguous_gradients": False},
                {"reduce_scatter": False},
                {"sub_group_size": 1000},
                {"sub_group_size": 1},
                {"stage3_param_persistence_threshold": 0},
                {"stage3_param_persistence_threshold": 1000, "sub_group_size": 1000},
                {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0},
                {"zero_hpz_partition_size": 2},
            )
        ),
    ],
    ids=str,
)
def test_zero_options_change_no_bit_and_state_is_as_large_as_planned(
    ranks: RankPool, stage: int, options: dict[str, Any]
) -> None:
    assert ranks.run(differ_with_zero_options, stage, options) == [(0.0, 0), (0.0, 0)]


class TiedAndFrozen(nn.Module):
    """A head tied to the embedding, a frozen layer, a layer that is never used, a matrix used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 20)
        self.first, self.frozen, self.unused = (nn.Linear(20, 20) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(20, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.first(torch.tanh(self.first(self.frozen(self.embedding(tokens)))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def differ_when_tied_and_frozen() -> tuple[float, list[str]]:
    model, reference = TiedAndFrozen(), TiedAndFrozen()
    muon = torch.optim.Muon([reference.first.weight, reference.unused.weight], **MUON)
    rest = [reference.embedding.weight, reference.first.bias, reference.unused.bias]
    adamw = torch.optim.AdamW(rest, **ADAMW)
    with engine_for(config(2, rows=ROWS), model) as engine:
        train(engine, STEPS, same_rows=True)
        for step in range(STEPS):
            reference(*batch_shares(step, 1)[0]).backward()
            for unused in reference.unused.parameters():  # ZeRO counts a missing gradient as zero, with decay
                unused.grad = torch.zeros_like(unused)
            for optimizer in (muon, adamw):
                optimizer.step()
                optimizer.zero_grad()
        routes = engine.basic_optimizer._binding.grouping.routes
        trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
        ours = {name: safe_get_full_fp32_param(param) for name, param in trained.items()}
        truth = dict(reference.named_parameters())
        difference = max(float((ours[name] - truth[name]).abs().max()) for name in ours)
        return difference, [r.name for r in routes if r.kind == "matrix"]


def test_tied_frozen_unused_and_twice_used_parameters(ranks: RankPool) -> None:
    expected = (0.0, ["first.weight", "unused.weight"])
    assert ranks.run(differ_when_tied_and_frozen) == [expected, expected]


def train_twice() -> list[bool]:
    runs = []
    for _ in range(2):
        with engine_for(config(2, policy="balance", bucket_numel=2000)) as engine:
            train(engine, STEPS)
            runs.append(full_weights(engine))
    return [torch.equal(runs[0][name], runs[1][name]) for name in runs[0]]


@both_sizes
def test_two_runs_with_one_seed_are_bitwise_equal(ranks: RankPool) -> None:
    assert all(all(equal) for equal in ranks.run(train_twice))


def differ_with_amsgrad() -> tuple[float, set[str]]:
    adamw = {**ADAMW, "amsgrad": True}
    reference = Reference(adamw=adamw)
    with engine_for(config(2, rows=ROWS, adamw=adamw)) as engine:
        train(engine, STEPS, same_rows=True)
        reference.train(STEPS)
        states = engine.basic_optimizer.state.values()
        return largest_difference(full_weights(engine), reference.model), {key for state in states for key in state}


def test_every_option_of_adamw_is_torchs(ranks: RankPool) -> None:
    for difference, keys in ranks.run(differ_with_amsgrad):
        assert difference == 0.0 and "max_exp_avg_sq" in keys


def differ_with_own_groups() -> tuple[float, list[dict[str, Any]], list[int]]:
    """Three param groups with their own rates and decays, one so small that a rank stores none of it."""
    model = UnevenLM()
    named = dict(model.named_parameters())
    gate = [named.pop("gate.weight")]
    decayed = [p for p in named.values() if p.ndim == 2]
    plain = [p for p in named.values() if p.ndim != 2]
    groups = [
        {"params": decayed, "weight_decay": 0.2, "lr": 0.01},
        {"params": plain, "weight_decay": 0.0},
        {"params": gate, "lr": 0.005, "adamw": {"lr": 1e-4}},
    ]
    reference = UnevenLM()
    theirs = dict(reference.named_parameters())
    matrix = [theirs[name] for name in ("layers.0.weight", "layers.2.weight", "layers.5.weight")]
    outer = [theirs[name] for name in ("embedding.weight", "lm_head.weight")]
    optimizers = [
        torch.optim.Muon(matrix, lr=0.01, weight_decay=0.2),
        torch.optim.AdamW(outer, **{**ADAMW, "lr": 0.01, "weight_decay": 0.2}),
        torch.optim.AdamW([p for p in theirs.values() if p.ndim != 2], **{**ADAMW, "weight_decay": 0.0}),
        torch.optim.Muon([theirs["gate.weight"]], lr=0.005, weight_decay=MUON["weight_decay"]),
    ]
    with engine_for(config(2, rows=ROWS), model, model_parameters=groups) as engine:
        train(engine, STEPS, same_rows=True)
        for step in range(STEPS):
            reference(*batch_shares(step, 1)[0]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        kept = [{k: g[k] for k in ("rule", "lr", "weight_decay")} for g in engine.optimizer.param_groups]
        layout = engine.basic_optimizer._binding.plans[-1].layout
        stored = [layout.stored_numel(rank) for rank in range(layout.world_size)]
        return largest_difference(full_weights(engine), reference), kept, stored


@both_sizes
def test_param_groups_keep_their_own_lr_and_weight_decay(ranks: RankPool) -> None:
    for difference, kept, stored in ranks.run(differ_with_own_groups):
        assert kept == [
            {"rule": "muon", "lr": 0.01, "weight_decay": 0.2},
            {"rule": "adamw", "lr": 0.01, "weight_decay": 0.2},
            {"rule": "adamw", "lr": 3e-3, "weight_decay": 0.0},
            {"rule": "muon", "lr": 0.005, "weight_decay": 0.1},
        ]
        assert difference == 0.0
        assert sum(stored) == 10
        assert len(stored) == 2 or min(stored) == 0, "one of four ranks must store nothing to be tested"
