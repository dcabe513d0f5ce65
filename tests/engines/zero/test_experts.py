"""Experts of deepspeed.moe: every expert's matrices are updated whole, inside the ranks that share that expert. Four
ranks, expert parallel 2: ranks 0 and 2 share experts 0 and 1, ranks 1 and 3 share experts 2 and 3; all four share the
rest."""

import copy
import functools
import io
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from tests.support.checkpoint_engines import assert_missed, go_through
from tests.support.engines import falling
from tests.support.models import VOCABULARY, UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool
from tests.support.references import layer_wise
from tests.support.zero import ROWS, Beside, Reference, build, engine_for, train, train_step
from tests.support.zero import settings_for as zero_settings

pytestmark = pytest.mark.on_gloo  # followed forwards communicate
RANKS, EXPERTS, EXPERT_PARALLEL = 4, 4, 2
WIDTH = 24
LOCAL = "deepspeed_moe.experts.deepspeed_experts."
MATRICES = ("dense.weight", "router.weight", *(f"experts.{e}.{i}.weight" for e in range(EXPERTS) for i in (0, 2)))
# The second local expert's last matrix goes to AdamW in some tests, so that the middle one of three equal matrices lies
# across the border of the two ranks' partitions.
ODD = (f"*{LOCAL}1.2.weight", ("experts.1.2.weight", "experts.3.2.weight"))
WAYS = {
    "fp32": [(2, 1, False), (4, 2, False), (2, 0, False), (1, 0, False), (2, 2, True), (2, 0, True), (2, 1, False)],
    "bf16+fp32": [(2, 1, False), (4, 1, False), (1, 2, False), (2, 1, False)],
}


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
        logits = nn.functional.linear(x.float(), self.router.weight.float())  # as DeepSpeed: 16 bits choose others
        probabilities = logits.softmax(-1)
        chosen = (nn.functional.one_hot(probabilities.argmax(-1), EXPERTS) * probabilities).to(x.dtype)
        return sum(chosen[..., e, None] * layer(x) for e, layer in enumerate(self.experts))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.dense(self.embedding(tokens)))
        x = x + self.mix(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


class Mixture(WholeMixture):
    """The same with DeepSpeed's layer, of which this rank has some experts."""

    def __init__(self, parallel: int = EXPERT_PARALLEL) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, expert(0), EXPERTS, parallel, k=1, drop_tokens=False, use_rts=False, min_capacity=0)
        here = dist.get_rank() % parallel * (EXPERTS // parallel)
        for local, layer in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            layer.load_state_dict(self.experts[here + local].state_dict())
        self.moe.deepspeed_moe.gate.wg.load_state_dict(self.router.state_dict())
        del self.experts, self.router

    def mix(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def settings_for(stage: int, precision: str = "fp32", accumulation: int = 1, **options: Any) -> dict[str, Any]:
    return zero_settings("zero", stage, precision, rows=ROWS // RANKS, accumulation=accumulation, **options)


def whole_name(name: str) -> str:
    """The name in WholeMixture of what this rank calls ``name``."""
    prefix, found, rest = name.partition(LOCAL)
    if not found:
        return name.replace("moe.deepspeed_moe.gate.wg", "router")
    local, _, own = rest.partition(".")
    return f"experts.{dist.get_rank() % EXPERT_PARALLEL * 2 + int(local)}.{own}"


@on_ranks(RANKS)
@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "clip", "given"),
    [
        (0, "fp32", 1, 0.0, "parameters"),
        (0, "fp32", 2, 0.2, "groups"),
        (1, "fp32", 1, 0.0, "parameters"),
        (1, "fp32", 2, 0.2, "parameters"),
        (1, "bf16", 2, 0.0, "parameters"),
        (1, "bf16+fp32", 1, 0.0, "parameters"),
        (2, "fp32", 1, 0.2, "groups"),
        (2, "fp32", 2, 0.0, "instance"),
        (2, "bf16", 1, 0.0, "parameters"),
    ],
)
def test_experts_have_the_bits_of_torch_muon_and_resume(
    tmp_path: Path, stage: int, precision: str, accumulation: int, clip: float, given: str
) -> None:
    """Experts have the bits of torch.optim.Muon, given the same gradients."""
    settings = settings_for(stage, precision, accumulation, clip=clip, exclude=ODD[0])

    def new_engine() -> Any:
        model, own, kwargs = Mixture(), copy.deepcopy(settings), {}
        if given != "parameters":
            named = [{"params": list(model.parameters()), "name": "all"}]
            kwargs["model_parameters"] = split_params_into_different_moe_groups_for_optimizer(named)
        if given == "instance":
            kwargs["optimizer"] = LayerWiseMuon(kwargs["model_parameters"], **own.pop("optimizer")["params"])
            kwargs["model_parameters"] = None
        return engine_for(own, model, **kwargs)

    reference = Reference(WholeMixture(), matrices=[name for name in MATRICES if name not in ODD[1]])
    beside = Beside(reference, settings, whole_name=whole_name)
    binding = beside.train_and_resume(new_engine, tmp_path).basic_optimizer._binding
    sizes = [(unit.ranks.world_size, len(unit.params)) for unit in binding.units]
    assert sizes == [(4, 2), (4, 3), (2, 3), (2, 5)], "matrices and the rest of all ranks, then of the experts'"
    travelling = [len(plan.matrices.buckets) for plan in binding.plans if plan.matrices is not None]
    assert all(travelling), "some matrix must travel in both groups of ranks to be tested"


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


def engine_of(rule: str, precision: str, parallel: int, stage: int, rows: bool, universal: bool = True) -> Any:
    """With ``rows``, neighbouring ranks have the same experts. Each leg has other frozen parameters and buffers."""
    settings = settings_for(stage, precision) | {"checkpoint": {"load_universal": universal}}
    settings |= {"use_data_before_expert_parallelism": True} if rows else {}
    settings["optimizer"] = layer_wise(rule, bucket_numel=2000)
    model = Mixture(parallel)
    for layer in model.moe.deepspeed_moe.experts.deepspeed_experts:
        layer[2].bias.requires_grad_(False).data.add_(10 * parallel + stage)
        layer.register_buffer("passes", layer[2].bias.detach().clone())
    return engine_for(settings, model, lr_scheduler=falling)


@pytest.mark.parametrize(("rule", "precision"), [("muon", "fp32"), ("soap", "fp32"), ("muon", "bf16+fp32")])
def test_resumes_on_other_expert_parallel_sizes(
    rank_pools: dict[int, RankPool], tmp_path: Path, rule: str, precision: str
) -> None:
    """A run goes on with other numbers of expert-parallel ranks."""
    legs = [functools.partial(engine_of, rule, precision, *leg) for leg in WAYS[precision]]
    # DeepSpeed keeps the groups of an expert-parallel size.
    renewed = [i for i, (*_, rows) in enumerate(WAYS[precision]) if rows != WAYS[precision][i - 1][-1]]
    go_through(rank_pools[RANKS], tmp_path, legs, train_step, renewed)
    for leg, file, words in (
        (0, "layer_0_expert_3_mp_rank_00_model_states.pt", "files of as many experts moe.deepspeed_moe"),
        (0, "layer_0_expert_1_mp_rank_00_model_states.pt", "expected a file of expert 1 of moe.deepspeed_moe"),
        *[(5, "expp_rank_1_mp_rank_00_optim_states.pt", "expected a file expp_rank_.* with .moe.deepspeed")]
        * (precision == "fp32"),
    ):
        assert_missed(tmp_path / f"leg {leg}" / "global_step2", file, words)


@on_ranks(RANKS)
def test_state_that_owners_keep_is_resumed_at_stage_0(tmp_path: Path) -> None:
    """Where every rank of the largest expert-parallel size, here 4, writes a file; not with other experts on a rank."""
    build(settings_for(0), Mixture(4))
    with engine_of("soap", "fp32", 2, 0, False, universal=False) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, range(2, 4))
    with engine_of("soap", "fp32", 2, 0, False, universal=False) as engine:
        train(engine, range(7, 8))  # what it had before must not matter
        engine.load_checkpoint(tmp_path)
        assert train(engine, range(2, 4)) == losses
    refused = pytest.raises(ValueError, match="is trained here, but not in the checkpoint, which has")
    with engine_of("soap", "fp32", 1, 0, False, universal=False) as engine, refused:
        engine.load_checkpoint(tmp_path)


SPLIT = "split groups with deepspeed"
REFUSED: list[tuple[Callable[[], nn.Module], str, str]] = [
    (Mixture, "unmarked", f"param group 0 has experts' parameters, but not 'moe': True; {SPLIT}"),
    (Mixture, "misnamed", "param group 1 has 'moe': True and name 'ep_size_3'; the model has 'ep_size_2'"),
    (Mixture, "mixed", f"param group 1 has 'moe': True, but not only experts' parameters; {SPLIT}"),
    (TwoSizes, "two sizes", "param group 1 is named 'ep_size_2', but has experts of 'ep_size_4'; split"),
    (UnevenLM, "no experts", "'moe': True and name 'e'; the model has none, as it has no deepspeed.moe"),
]


@on_ranks(RANKS)
@pytest.mark.parametrize(("model", "how", "message"), REFUSED)
def test_other_experts_are_refused(model: Callable[[], nn.Module], how: str, message: str) -> None:
    module = model()
    with pytest.raises(ValueError, match=re.escape(message)):
        build(settings_for(2), module, model_parameters=grouped(module, how))


@on_ranks(RANKS)
def test_expert_parallel_sizes_have_own_plans() -> None:
    """Layers of different expert-parallel sizes have own ranks and plans."""
    found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    with redirect_stdout(io.StringIO()) as printed, engine_for(settings_for(2, report=True), TwoSizes()) as engine:
        binding = engine.basic_optimizer._binding
        for unit, plan in zip(binding.units, binding.plans):
            for param in plan.params:
                layer = param.name.partition(".")[0] + (".experts" if LOCAL in param.name else "")
                found[layer].add(tuple(dist.get_process_group_ranks(unit.ranks.group)))
    rank, everybody = dist.get_rank(), {(0, 1, 2, 3)}
    of_experts = {"wide.experts": {(rank % 2, rank % 2 + 2)}, "wider.experts": {(rank,)}}
    assert found == {"wide": everybody, "wider": everybody, **of_experts}
    if rank:
        assert "Routing" not in printed.getvalue()
        return
    shared, experts, alone = re.split(r"Experts that \d rank", printed.getvalue())
    assert "Plan: 2 matrices by muon" in shared and "Plan: 4 matrices by muon" in experts
    assert [len(re.findall(r"^│ +\d+ │", part, re.MULTILINE)) for part in (shared, experts)] == [4, 2]


@on_ranks(RANKS)
def test_experts_without_a_gradient_are_named() -> None:
    """Experts without a gradient are named by their numbers in the whole model. The ranks of experts 2 and 3 do not use
    them."""
    model = Mixture()
    for layer in model.moe.deepspeed_moe.experts.deepspeed_experts if dist.get_rank() % 2 else ():
        layer.forward = lambda x: x
    with redirect_stdout(io.StringIO()) as printed, engine_for(settings_for(2, report=True), model) as engine:
        train(engine, 1)
    said = " ".join(printed.getvalue().partition("every rank and machine.")[2].split())
    names = [f"moe.{LOCAL}{e}.{i}.{kind}" for e in (2, 3) for i in (0, 2) for kind in ("weight", "bias")]
    told = "8 of 21 trained parameters had no gradient on any rank in the first step: "
    assert (told in said, all(name in said for name in names)) == (not dist.get_rank(), not dist.get_rank()), said
