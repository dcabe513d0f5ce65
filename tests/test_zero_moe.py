"""Experts of deepspeed.moe: every expert's matrices are updated whole, inside the ranks that share that expert.

Four ranks, expert parallel 2: ranks 0 and 2 share experts 0 and 1, ranks 1 and 3 share experts 2 and 3; all four share
the rest.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.models import VOCABULARY, UnevenLM
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, ROWS, batch_shares, config, engine_for, gather_named, newton_schulz_in_float32

RANKS, EXPERTS, EXPERT_PARALLEL, STEPS = 4, 4, 2, 5
WIDTH = 24
LOCAL = "deepspeed_moe.experts.deepspeed_experts."
MATRICES = ("dense.weight", "router.weight", *(f"experts.{e}.{i}.weight" for e in range(EXPERTS) for i in (0, 2)))
all_precisions = pytest.mark.parametrize(
    ("stage", "precision"), [(1, {}), (2, {}), *((s, {"bf16": {"enabled": True}}) for s in (1, 2)), (1, "bf16_fp32")]
)


@pytest.fixture(scope="module")
def expert_ranks() -> Iterator[RankPool]:
    """Four ranks of this file's own: DeepSpeed keeps expert groups in globals of the process."""
    pool = RankPool(RANKS)
    yield pool
    pool.remove()


def expert(number: int) -> nn.Module:
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(WIDTH, 41), nn.GELU(), nn.Linear(41, WIDTH))


class WholeMixture(nn.Module):
    """The model as one process has it: every token goes to the expert its router likes best, times the probability."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.experts = nn.ModuleList(expert(number) for number in range(EXPERTS))

    def mix(self, x: Tensor) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        chosen = nn.functional.one_hot(probabilities.argmax(-1), EXPERTS) * probabilities
        return sum(chosen[..., e, None] * layer(x) for e, layer in enumerate(self.experts))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.dense(self.embedding(tokens)))
        x = x + self.mix(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


class Mixture(WholeMixture):
    """The same with DeepSpeed's layer, of which this rank has two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(
            WIDTH, expert(0), EXPERTS, EXPERT_PARALLEL, k=1, drop_tokens=False, use_rts=False, min_capacity=0
        )
        here = torch.distributed.get_rank() % EXPERT_PARALLEL * 2
        for local, layer in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            layer.load_state_dict(self.experts[here + local].state_dict())
        self.moe.deepspeed_moe.gate.wg.load_state_dict(self.router.state_dict())
        del self.experts, self.router

    def mix(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def settings_for(stage: int, precision: Any = None, **kwargs: Any) -> dict[str, Any]:
    settings = config(stage, rows=kwargs.pop("rows", ROWS // RANKS), bucket_numel=2000, **kwargs)
    if precision == "bf16_fp32":
        precision = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings | (precision or {})


def whole_name(name: str, rank: int) -> str:
    """The name in WholeMixture of what rank ``rank`` calls ``name``."""
    prefix, found, rest = name.partition(LOCAL)
    if not found:
        return name.replace("moe.deepspeed_moe.gate.wg", "router")
    local, _, own = rest.partition(".")
    return f"experts.{rank % EXPERT_PARALLEL * 2 + int(local)}.{own}"


def gathered(engine: Any, get: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """``get`` of every parameter, by its name in WholeMixture; fails if ranks that share one do not have the same."""
    rank = torch.distributed.get_rank()
    mine = {whole_name(name, rank): get(param).float().clone() for name, param in engine.module.named_parameters()}
    return gather_named(mine)


class GivenGradients:
    """torch.optim.Muon and torch.optim.AdamW on one process that has all experts."""

    def __init__(self, weights: dict[str, Tensor], muon: dict[str, Any] = MUON, adamw: dict[str, Any] = ADAMW) -> None:
        self.params = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
        others = [param for name, param in self.params.items() if name not in MATRICES]
        self.optimizers = [
            torch.optim.Muon([self.params[name] for name in MATRICES], **muon),
            torch.optim.AdamW(others, **adamw),
        ]

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, param in self.params.items():
            param.grad = grads[name].clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def largest_difference(self, weights: dict[str, Tensor]) -> float:
        return max(float((weights[name] - param.detach()).abs().max()) for name, param in self.params.items())


def backward(engine: Any, step: int) -> None:
    accumulation = engine.gradient_accumulation_steps()
    shares = batch_shares(step, accumulation * RANKS)
    for part in range(accumulation):
        if part:
            engine.step()
        engine.backward(engine(*shares[part * RANKS + torch.distributed.get_rank()]))


def differ_given_the_reduced_gradients(
    settings: dict[str, Any], given: str
) -> tuple[float, list[tuple[int, int]], list[int]]:
    model = Mixture()
    kwargs: dict[str, Any] = {}
    if given != "parameters":
        named = [{"params": list(model.parameters()), "name": "all"}]
        kwargs["model_parameters"] = split_params_into_different_moe_groups_for_optimizer(named)
    if given == "instance":
        kwargs["optimizer"] = LayerWiseMuon(kwargs.pop("model_parameters"), **settings.pop("optimizer")["params"])
        kwargs["model_parameters"] = None
    with engine_for(settings, model, **kwargs) as engine:
        reference = GivenGradients(gathered(engine, safe_get_full_fp32_param))
        for step in range(STEPS):
            backward(engine, step)
            reference.step(gathered(engine, safe_get_full_grad))
            engine.step()
        binding = engine.basic_optimizer._binding
        sizes = [(unit.ranks.world_size, len(unit.params)) for unit in binding.units]
        travelling = [len(plan.matrices.buckets) for plan in binding.plans if plan.matrices is not None]
        return reference.largest_difference(gathered(engine, safe_get_full_fp32_param)), sizes, travelling


@all_precisions
def test_experts_have_the_bits_of_torch_muon_given_the_same_gradients(
    expert_ranks: RankPool, stage: int, precision: Any
) -> None:
    settings = settings_for(stage, precision, policy="balance")
    for difference, sizes, travelling in expert_ranks.run(differ_given_the_reduced_gradients, settings, "parameters"):
        assert difference == 0.0
        assert sizes == [(4, 2), (4, 3), (2, 4), (2, 4)], "matrices and the rest of all ranks, then of the experts'"
        assert all(travelling), "some matrix must travel in both groups of ranks to be tested"


@pytest.mark.parametrize("given", ["groups", "instance"])
def test_param_groups_made_by_the_user_train_the_same(expert_ranks: RankPool, given: str) -> None:
    settings = settings_for(2, policy="balance")
    for difference, sizes, _ in expert_ranks.run(differ_given_the_reduced_gradients, settings, given):
        assert difference == 0.0
        assert sizes == [(4, 2), (4, 3), (2, 4), (2, 4)]


def differ_from_full_batch(settings: dict[str, Any]) -> tuple[float, list[tuple[float, float]]]:
    """Every rank trains on its own rows, the reference on all of them; norms before clipping are (ours, torch's)."""
    reference = WholeMixture()
    named = dict(reference.named_parameters())
    optimizers = [
        torch.optim.Muon([named[name] for name in MATRICES], **MUON),
        torch.optim.AdamW([param for name, param in named.items() if name not in MATRICES], **ADAMW),
    ]
    norms = []
    with engine_for(settings, Mixture()) as engine, newton_schulz_in_float32():
        for step in range(STEPS):
            backward(engine, step)
            engine.step()
            reference(*batch_shares(step, 1)[0]).backward()
            truth = torch.nn.utils.clip_grad_norm_(named.values(), settings["gradient_clipping"] or float("inf"))
            norms.append((float(engine.get_global_grad_norm()), float(truth)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights = gathered(engine, safe_get_full_fp32_param)
    return max(float((weights[name] - param.detach()).abs().max()) for name, param in named.items()), norms


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_parameters_equal_a_single_process_with_all_experts(
    expert_ranks: RankPool, stage: int, accumulation: int, clip: float
) -> None:
    settings = settings_for(
        stage, clip=clip, accumulation=accumulation, rows=ROWS // RANKS // accumulation, ns_dtype="float32"
    )
    for difference, norms in expert_ranks.run(differ_from_full_batch, settings):
        assert difference <= 1e-6
        assert all(ours == pytest.approx(truth, rel=1e-5) for ours, truth in norms)
        assert clip == 0.0 or all(truth > clip for _, truth in norms), "the clip must bite to be tested"


def trained_in_two_parts(settings: dict[str, Any], folder: str) -> float:
    def run(engine: Any, steps: range) -> None:
        for step in steps:
            backward(engine, step)
            engine.step()

    with engine_for(settings, Mixture()) as engine:
        run(engine, range(3))
        engine.save_checkpoint(folder, tag="middle")
        run(engine, range(3, STEPS))
        without_a_break = gathered(engine, safe_get_full_fp32_param)
    with engine_for(settings, Mixture()) as engine:
        run(engine, range(7, 8))  # what it had before must not matter
        path, _ = engine.load_checkpoint(folder, tag="middle")
        assert path is not None and engine.global_steps == 3
        run(engine, range(3, STEPS))
        resumed = gathered(engine, safe_get_full_fp32_param)
    return max(float((without_a_break[name] - weight).abs().max()) for name, weight in resumed.items())


@all_precisions
def test_a_checkpoint_with_experts_resumes_with_the_same_bits(
    expert_ranks: RankPool, stage: int, precision: Any, tmp_path: Path
) -> None:
    assert set(expert_ranks.run(trained_in_two_parts, settings_for(stage, precision), str(tmp_path))) == {0.0}


def build(
    stage: int, model: Callable[[], nn.Module] = Mixture, groups: Callable[[nn.Module], Any] | None = None
) -> None:
    module = model()
    kwargs = {} if groups is None else {"model_parameters": groups(module)}
    with engine_for(settings_for(stage), module, **kwargs):
        pass


@pytest.mark.parametrize("stage", [0, 3])
def test_experts_at_other_stages_are_refused(expert_ranks: RankPool, stage: int) -> None:
    for error in expert_ranks.errors(build, stage):
        assert f"the model has deepspeed.moe layers and zero_optimization.stage is {stage}; use stage 1 or 2" in error


def marked(module: nn.Module, name: str, *, dense_too: bool = False) -> list[dict[str, Any]]:
    experts = [param for param in module.parameters() if is_moe_param(param) or dense_too]
    dense = [param for param in module.parameters() if not is_moe_param(param) and not dense_too]
    return [group for group in ({"params": dense}, {"params": experts, "moe": True, "name": name}) if group["params"]]


def all_in_one(module: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(module.parameters()), "moe": False}]


def misnamed(module: nn.Module) -> list[dict[str, Any]]:
    return marked(module, "ep_size_3")


def mixed(module: nn.Module) -> list[dict[str, Any]]:
    return marked(module, "ep_size_2", dense_too=True)


def wrong_expert_size(module: nn.Module) -> list[dict[str, Any]]:
    """Experts of the model's second layer, which are shared by one rank each, in a group of the first's name."""
    return marked(module, "ep_size_2")


class TwoSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = MoE(WIDTH, expert(0), EXPERTS, ep_size=2)
        self.wider = MoE(WIDTH, expert(1), EXPERTS, ep_size=4)


@pytest.mark.parametrize(
    ("model", "groups", "message"),
    [
        (
            Mixture,
            all_in_one,
            "param group 0 has experts' parameters, but not 'moe': True; split groups with deepspeed",
        ),
        (Mixture, misnamed, "param group 1 has 'moe': True and name 'ep_size_3'; the model has 'ep_size_2'"),
        (
            Mixture,
            mixed,
            "param group 0 has 'moe': True, but not only experts' parameters; split groups with deepspeed",
        ),
        (TwoSizes, wrong_expert_size, "param group 1 is named 'ep_size_2', but has experts of 'ep_size_4'; split"),
    ],
    ids=["unmarked", "misnamed", "mixed", "two sizes"],
)
def test_param_groups_that_do_not_fit_the_experts_are_refused(
    expert_ranks: RankPool, model: Callable[[], nn.Module], groups: Callable[[nn.Module], Any], message: str
) -> None:
    for error in expert_ranks.errors(build, 2, model, groups):
        assert message in error


def build_with_a_marked_group_of_a_dense_model() -> None:
    build(2, UnevenLM, lambda module: [{"params": list(module.parameters()), "moe": True, "name": "e"}])


def test_a_group_of_experts_without_experts_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(build_with_a_marked_group_of_a_dense_model):
        assert (
            "param group 0 has 'moe': True and name 'e'; the model has none, because it has no deepspeed.moe" in error
        )


def owners_of_two_sizes() -> dict[str, set[tuple[int, ...]]]:
    """Which global ranks own matrices of each layer, in a model with experts on two and on four ranks."""
    with engine_for(settings_for(2), TwoSizes()) as engine:
        found: dict[str, set[tuple[int, ...]]] = {}
        binding = engine.basic_optimizer._binding
        for unit, plan in zip(binding.units, binding.plans):
            members = tuple(torch.distributed.get_process_group_ranks(unit.ranks.group))
            for spec in plan.specs:
                found.setdefault(spec.name.partition(".")[0] + (".experts" if LOCAL in spec.name else ""), set()).add(
                    members
                )
        assert set(deepspeed_groups._get_expert_data_parallel_group_dict()) >= {"ep_size_2", "ep_size_4"}
        return found


def test_layers_of_different_expert_parallel_sizes_have_ranks_of_their_own(expert_ranks: RankPool) -> None:
    for rank, found in enumerate(expert_ranks.run(owners_of_two_sizes)):
        everybody = {(0, 1, 2, 3)}
        assert found == {
            "wide": everybody,
            "wider": everybody,
            "wide.experts": {(rank % 2, rank % 2 + 2)},
            "wider.experts": {(rank,)},
        }


def printed_by_a_build(settings: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed, engine_for(settings, Mixture()):
        pass
    return printed.getvalue()


def test_the_report_has_a_plan_for_all_ranks_and_one_for_those_that_share_experts(expert_ranks: RankPool) -> None:
    first, *others = expert_ranks.run(printed_by_a_build, settings_for(2, report=True))
    shared, experts = first.split("Experts that 2 ranks share")
    assert "Plan: 2 matrices by muon" in shared and "Plan: 4 matrices by muon" in experts
    assert [len(re.findall(r"^│ +\d+ │", part, re.MULTILINE)) for part in (shared, experts)] == [4, 2]
    assert not any("Routing" in other for other in others)
