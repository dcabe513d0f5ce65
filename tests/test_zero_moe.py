"""Experts of deepspeed.moe: every expert's matrices are updated whole, inside the ranks that share that expert.

Four ranks, expert parallel 2: ranks 0 and 2 share experts 0 and 1, ranks 1 and 3 share experts 2 and 3; all four share
the rest.
"""

from __future__ import annotations

import contextlib
import copy
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
from tests.cells import cells
from tests.models import VOCABULARY, UnevenLM
from tests.ranks import RankPool
from tests.zero import (
    ADAMW,
    MUON,
    PRECISIONS,
    ROWS,
    batch_shares,
    build,
    config,
    engine_for,
    gather_named,
    newton_schulz_in_float32,
)

RANKS, EXPERTS, EXPERT_PARALLEL, STEPS = 4, 4, 2, 5
WIDTH = 24
LOCAL = "deepspeed_moe.experts.deepspeed_experts."
MATRICES = ("dense.weight", "router.weight", *(f"experts.{e}.{i}.weight" for e in range(EXPERTS) for i in (0, 2)))


@pytest.fixture(scope="module")
def expert_ranks(rank_pools: dict[int, RankPool]) -> Iterator[RankPool]:
    """Four ranks, and a new world after them: DeepSpeed keeps expert groups in globals of the process."""
    yield rank_pools[RANKS]
    rank_pools[RANKS].renew()


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


def settings_for(stage: int, precision: str = "fp32", **kwargs: Any) -> dict[str, Any]:
    settings = config(stage, rows=kwargs.pop("rows", ROWS // RANKS), bucket_numel=2000, **kwargs)
    return settings | PRECISIONS[precision]


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


class SingleProcess:
    """torch.optim.Muon and torch.optim.AdamW on one process that has all experts."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params
        others = [param for name, param in params.items() if name not in MATRICES]
        matrices = [params[name] for name in MATRICES]
        self.optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, **ADAMW)]

    def step(self, grads: dict[str, Tensor] | None = None) -> None:
        for name, param in self.params.items():
            param.grad = param.grad if grads is None else grads[name].clone()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

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
    settings: dict[str, Any], given: str, folder: str
) -> tuple[list[float], list[tuple[int, int]], list[int]]:
    """From one process, and from that of a run that was saved after three steps and went on."""
    model = Mixture()
    kwargs: dict[str, Any] = {}
    if given != "parameters":
        named = [{"params": list(model.parameters()), "name": "all"}]
        kwargs["model_parameters"] = split_params_into_different_moe_groups_for_optimizer(named)
    again = copy.deepcopy(settings)
    if given == "instance":
        kwargs["optimizer"] = LayerWiseMuon(kwargs.pop("model_parameters"), **settings.pop("optimizer")["params"])
        kwargs["model_parameters"] = None
    with engine_for(settings, model, **kwargs) as engine:
        weights = gathered(engine, safe_get_full_fp32_param)
        single = SingleProcess({name: nn.Parameter(weight.clone()) for name, weight in weights.items()})
        for step in range(STEPS):
            if step == 3:
                engine.save_checkpoint(folder, tag="middle")
            backward(engine, step)
            single.step(gathered(engine, safe_get_full_grad))
            engine.step()
        binding = engine.basic_optimizer._binding
        sizes = [(unit.ranks.world_size, len(unit.params)) for unit in binding.units]
        travelling = [len(plan.matrices.buckets) for plan in binding.plans if plan.matrices is not None]
        differences = [single.largest_difference(gathered(engine, safe_get_full_fp32_param))]
    if given == "parameters":
        with engine_for(again, Mixture()) as engine:
            backward(engine, 7)  # what it had before must not matter
            engine.step()
            path, _ = engine.load_checkpoint(folder, tag="middle")
            assert path is not None and engine.global_steps == 3
            for step in range(3, STEPS):
                backward(engine, step)
                engine.step()
            differences.append(single.largest_difference(gathered(engine, safe_get_full_fp32_param)))
    return differences, sizes, travelling


@pytest.mark.parametrize(
    ("stage", "precision", "given"),
    [
        *((stage, precision, "parameters") for stage in (1, 2) for precision in ("fp32", "bf16")),
        (1, "bf16+fp32", "parameters"),
        (2, "fp32", "groups"),
        (2, "fp32", "instance"),
    ],
)
def test_experts_have_the_bits_of_torch_muon_given_the_same_gradients_and_resume(
    expert_ranks: RankPool, tmp_path: Path, stage: int, precision: str, given: str
) -> None:
    settings = settings_for(stage, precision, policy="balance")
    found = expert_ranks.run(differ_given_the_reduced_gradients, settings, given, str(tmp_path))
    for differences, sizes, travelling in found:
        assert set(differences) == {0.0}
        assert sizes == [(4, 2), (4, 3), (2, 4), (2, 4)], "matrices and the rest of all ranks, then of the experts'"
        assert all(travelling), "some matrix must travel in both groups of ranks to be tested"


def differ_from_full_batch(settings: dict[str, Any]) -> tuple[float, list[tuple[float, float]]]:
    """Every rank trains on its own rows, the reference on all of them; norms before clipping are (ours, torch's)."""
    whole = WholeMixture()
    single = SingleProcess(dict(whole.named_parameters()))
    norms = []
    with engine_for(settings, Mixture()) as engine, newton_schulz_in_float32():
        for step in range(STEPS):
            backward(engine, step)
            engine.step()
            whole(*batch_shares(step, 1)[0]).backward()
            truth = nn.utils.clip_grad_norm_(whole.parameters(), settings["gradient_clipping"] or float("inf"))
            norms.append((float(engine.get_global_grad_norm()), float(truth)))
            single.step()
        return single.largest_difference(gathered(engine, safe_get_full_fp32_param)), norms


@cells(stage=[1, 2], accumulation=[1, 2], clip=[0.0, 0.2])
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


class TwoSizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = MoE(WIDTH, expert(0), EXPERTS, ep_size=2)
        self.wider = MoE(WIDTH, expert(1), EXPERTS, ep_size=4)


def grouped(module: nn.Module, how: str) -> list[dict[str, Any]]:
    """Param groups that do not fit: all experts of ``TwoSizes`` in a group of one size's name, for instance."""
    params = list(module.parameters())
    experts = [param for param in params if is_moe_param(param)]
    dense = [param for param in params if not is_moe_param(param)]
    return {
        "unmarked": [{"params": params, "moe": False}],
        "misnamed": [{"params": dense}, {"params": experts, "moe": True, "name": "ep_size_3"}],
        "mixed": [{"params": dense[:1]}, {"params": [*dense[1:], *experts], "moe": True, "name": "ep_size_2"}],
        "two sizes": [{"params": dense}, {"params": experts, "moe": True, "name": "ep_size_2"}],
        "no experts": [{"params": params, "moe": True, "name": "e"}],
    }[how]


def build_with_groups(stage: int, model: Callable[[], nn.Module], how: str | None) -> None:
    module = model()
    build(settings_for(stage), module, **({} if how is None else {"model_parameters": grouped(module, how)}))


SPLIT = "split groups with deepspeed"


@pytest.mark.parametrize(
    ("stage", "model", "how", "message"),
    [
        (0, Mixture, None, "the model has deepspeed.moe layers and zero_optimization.stage is 0; use stage 1 or 2"),
        (3, Mixture, None, "the model has deepspeed.moe layers and zero_optimization.stage is 3; use stage 1 or 2"),
        (2, Mixture, "unmarked", f"param group 0 has experts' parameters, but not 'moe': True; {SPLIT}"),
        (2, Mixture, "misnamed", "param group 1 has 'moe': True and name 'ep_size_3'; the model has 'ep_size_2'"),
        (2, Mixture, "mixed", f"param group 1 has 'moe': True, but not only experts' parameters; {SPLIT}"),
        (2, TwoSizes, "two sizes", "param group 1 is named 'ep_size_2', but has experts of 'ep_size_4'; split"),
        (
            *(2, UnevenLM, "no experts"),
            "param group 0 has 'moe': True and name 'e'; the model has none, because it has no deepspeed.moe",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_experts_that_cannot_be_trained_are_refused(
    expert_ranks: RankPool, stage: int, model: Callable[[], nn.Module], how: str | None, message: str
) -> None:
    for error in expert_ranks.errors(build_with_groups, stage, model, how):
        assert message in error


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
