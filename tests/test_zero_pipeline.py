"""Pipelines: two stages on two data-parallel ranks each train as torch.optim.Muon + AdamW do on the whole model.

Ranks 0 and 1 have the first stage, 2 and 3 the second; a stage plans for itself.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from tests.cells import cells, with_full
from tests.models import VOCABULARY
from tests.ranks import RankPool
from tests.zero import (
    ADAMW,
    BF16,
    IN_FP32,
    MUON,
    batch_shares,
    build,
    config,
    engine_for,
    gather_named,
    newton_schulz_in_float32,
)

RANKS, STAGES, DATA_PARALLEL, STEPS, MICRO_BATCHES = 4, 2, 2, 5, 2
WIDTH = 24
MATRICES = ("up.weight", "down.weight", "mix.weight")
PRECISIONS = {
    "fp32, stage 0": (0, {}),
    "fp32, stage 1": (1, {}),
    "bf16, stage 1": (1, BF16),
    "bf16 + fp32, stage 1": (1, {**BF16, **IN_FP32}),
}


@pytest.fixture(scope="module")
def pipeline_ranks(rank_pools: dict[int, RankPool]) -> Iterator[RankPool]:
    """Four ranks, and a new world after them: DeepSpeed keeps the pipeline's groups in globals of the process."""
    yield rank_pools[RANKS]
    rank_pools[RANKS].renew()


class Block(nn.Module):
    """A hidden layer as wide as the vocabulary, which no head is, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, VOCABULARY)
        self.down = nn.Linear(VOCABULARY, WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.mix(self.down(torch.tanh(self.up(x)))))


class Table(nn.Module):
    """A tied weight whose class tells nothing: a linear's weight that is looked up and multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


def multiply(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.weight.T


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def untied() -> list[Any]:
    return [
        LayerSpec(nn.Embedding, VOCABULARY, WIDTH),
        LayerSpec(Block),
        LayerSpec(Block),
        LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False),
    ]


def tied_table(module: type[nn.Module] = Table, *sizes: int) -> list[Any]:
    ends = (TiedLayerSpec("embed", module, *sizes), TiedLayerSpec("embed", module, *sizes, forward_fn=multiply))
    return [ends[0], LayerSpec(Block), LayerSpec(Block), ends[1]]


def tied_embedding() -> list[Any]:
    return tied_table(nn.Embedding, VOCABULARY, WIDTH)


MODELS = {"untied": untied, "tied embedding": tied_embedding, "tied table": tied_table}


def pipeline(layers: list[Any], **kwargs: Any) -> PipelineModule:
    return PipelineModule(
        layers, num_stages=STAGES, loss_fn=loss_of, partition_method="uniform", seed_layers=True, base_seed=7, **kwargs
    )


class Whole(nn.Module):
    """The pipeline's layers on one process, with the pipeline's names and weights."""

    def __init__(self, layers: list[Any], weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.calls = []
        for number, spec in enumerate(layers):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied_modules:
                    self.tied_modules[spec.key] = spec.build()
                self.calls.append((self.tied_modules[spec.key], spec.forward_fn))
            else:
                self.add_module(str(number), spec.build())
                self.calls.append((getattr(self, str(number)), None))
        self.load_state_dict(weights)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = tokens
        for module, function in self.calls:
            x = function(module, x) if function else module(x)
        return loss_of(x, targets)


class Reference:
    """torch.optim.Muon for the blocks' matrices and torch.optim.AdamW for everything else, on one process."""

    def __init__(self, layers: list[Any], weights: dict[str, Tensor]) -> None:
        self.model = Whole(layers, weights)
        named = dict(self.model.named_parameters())
        matrices = [named.pop(name) for name in list(named) if name.endswith(MATRICES)]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(list(named.values()), **ADAMW)]
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, **MUON))

    def step(self, grads: dict[str, Tensor] | None = None) -> None:
        for name, param in self.model.named_parameters():
            if grads is not None:
                param.grad = grads[name].clone()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def largest_difference(self, weights: dict[str, Tensor]) -> float:
        return max(float((weights[name] - p.detach()).abs().max()) for name, p in self.model.named_parameters())


def settings_for(precision: str, *, rows: int = 2, **kwargs: Any) -> dict[str, Any]:
    stage, more = PRECISIONS[precision]
    settings = config(stage, accumulation=MICRO_BATCHES, rows=rows, bucket_numel=2000, policy="balance", **kwargs)
    if stage == 0:
        settings["optimizer"]["params"]["policy"] = "auto"
    return settings | more


def shares_of_this_rank(engine: Any, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    shares = batch_shares(step, MICRO_BATCHES * DATA_PARALLEL)
    return iter(shares[engine.grid.get_data_parallel_id() :: DATA_PARALLEL])


def train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.train_batch(shares_of_this_rank(engine, step))


def weights_of(engine: Any) -> dict[str, Tensor]:
    sharded = hasattr(next(engine.module.parameters()), "_hp_mapping")
    get = safe_get_full_fp32_param if sharded else torch.Tensor.detach
    return gather_named({name: get(param).float().clone() for name, param in engine.module.named_parameters()})


def grads_of(engine: Any, units: list[Any], tensors: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of ``units`` that our optimizer is given in ``tensors``, put together from all ranks' parts."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    found = {}
    for unit, tensor in zip(units, tensors):
        if tensor is unit.params[0]:  # stage 0: the parameters themselves
            found.update((names[id(p)], torch.zeros_like(p) if p.grad is None else p.grad.clone()) for p in unit.params)
            continue
        flats = unit.ranks.gather_objects(tensor.grad.clone())
        for index, param in enumerate(unit.params):
            whole = torch.empty(param.numel())
            for part in unit.layout.fragments(index):
                whole[part.start : part.stop] = flats[part.rank][part.offset : part.offset + part.numel]
            found[names[id(param)]] = whole.view(param.shape)
    return found


def record_grads(engine: Any) -> dict[str, Tensor]:
    """A dictionary that holds, after every step, the gradients which that step was given on this rank's stage."""
    optimizer = engine.basic_optimizer
    units = optimizer._binding.units
    recorded: dict[str, Tensor] = {}
    tensors = [group["params"][0] for group in optimizer.param_groups]
    step = optimizer.step

    def record_and_step(*args: Any, **kwargs: Any) -> Any:
        now = [group["params"][0] for group in optimizer.param_groups if group["params"]]
        chosen = [(unit, t) for unit, t in zip(units, tensors) if any(t is other for other in now)]
        recorded.update(grads_of(engine, *map(list, zip(*chosen))))
        return step(*args, **kwargs)

    optimizer.step = record_and_step
    return recorded


def differ_given_the_same_gradients(model: str, settings: dict[str, Any], folder: str) -> tuple[list[float], list[str]]:
    """From one process, and from that of a run that was saved after three steps and went on."""
    layers = MODELS[model]()
    with engine_for(settings, pipeline(layers)) as engine:
        reference = Reference(layers, weights_of(engine))
        recorded = record_grads(engine)
        for step in range(STEPS):
            if step == 3:
                engine.save_checkpoint(folder, tag="middle")
            train(engine, range(step, step + 1))
            grads = gather_named(recorded)
            norm = float(torch.nn.utils.get_total_norm(grads.values()))
            assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-3)  # bf16's is summed in bf16
            reference.step(grads)
        plans = engine.basic_optimizer._binding.plans
        matrices = [spec.name for plan in plans if plan.matrices is not None for spec in plan.specs]
        assert all(plan.matrices.buckets for plan in plans if plan.matrices is not None), "some matrix must travel"
        differences = [reference.largest_difference(weights_of(engine))]
    with engine_for(settings, pipeline(MODELS[model]())) as engine:
        train(engine, range(7, 8))  # what it had before must not matter
        path, _ = engine.load_checkpoint(folder, tag="middle")
        assert path is not None and engine.global_steps == 3
        train(engine, range(3, STEPS))
        return [*differences, reference.largest_difference(weights_of(engine))], matrices


TIED = [
    ("tied embedding", "fp32, stage 1"),
    ("tied embedding", "bf16, stage 1"),
    ("tied table", "fp32, stage 0"),
    ("tied table", "bf16 + fp32, stage 1"),
]


@pytest.mark.parametrize(
    ("model", "precision"),
    with_full([*itertools.product(["untied"], PRECISIONS), *TIED], itertools.product(MODELS, PRECISIONS)),
)
def test_every_stage_has_the_bits_of_torch_muon_given_the_same_gradients_and_resumes(
    pipeline_ranks: RankPool, tmp_path: Path, model: str, precision: str
) -> None:
    settings = settings_for(precision)
    found = pipeline_ranks.run(differ_given_the_same_gradients, model, settings, str(tmp_path))
    assert [differences for differences, _ in found] == [[0.0, 0.0]] * RANKS
    first, second = ([f"{block}.{name}" for name in MATRICES] for block in (1, 2))
    assert [matrices for _, matrices in found] == [first, first, second, second]


def differ_from_whole_batch(model: str, settings: dict[str, Any]) -> tuple[float, list[tuple[float, float]]]:
    """The reference computes its own gradients, of all micro-batches at once; norms are (ours, torch's)."""
    layers = MODELS[model]()
    norms = []
    with engine_for(settings, pipeline(layers)) as engine, newton_schulz_in_float32():
        reference = Reference(layers, weights_of(engine))
        for step in range(STEPS):
            train(engine, range(step, step + 1))
            reference.model(*batch_shares(step, 1)[0]).backward()
            clip = settings["gradient_clipping"] or float("inf")
            truth = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), clip)
            norms.append((float(engine.get_global_grad_norm()), float(truth)))
            reference.step()
        return reference.largest_difference(weights_of(engine)), norms


@cells(model=MODELS, precision=["fp32, stage 0", "fp32, stage 1"], clip=[0.5, 0.0])
def test_parameters_and_norms_equal_a_single_process_on_the_whole_batch(
    pipeline_ranks: RankPool, model: str, precision: str, clip: float
) -> None:
    settings = settings_for(precision, clip=clip, ns_dtype="float32")
    for difference, norms in pipeline_ranks.run(differ_from_whole_batch, model, settings):
        assert difference <= 2e-6
        assert all(ours == pytest.approx(truth, rel=1e-5) for ours, truth in norms)
        assert clip == 0.0 or all(truth > clip for _, truth in norms), "the clip must bite to be tested"


def differ_with_an_embedding_stage(settings: dict[str, Any], **kwargs: Any) -> tuple[float, list[str]]:
    layers = [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(BlockAndHead)]
    with engine_for(settings, pipeline(layers), **kwargs) as engine:
        reference = Reference(layers, weights_of(engine))
        recorded = record_grads(engine)
        rates = []
        for step in range(STEPS):
            rates.append(engine.basic_optimizer.param_groups[-1]["lr"] / ADAMW["lr"])
            factor = rates[-1]
            for optimizer in reference.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
            train(engine, range(step, step + 1))
            reference.step(gather_named(recorded))
        rules = [group["rule"] for group in engine.basic_optimizer.param_groups]
        return reference.largest_difference(weights_of(engine)), [*rules, f"{rates[-1]:.2f}"]


class BlockAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def slower_and_slower(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.1 * step)


@pytest.mark.parametrize("precision", ["fp32, stage 0", "bf16 + fp32, stage 1"])
def test_a_stage_without_matrices_trains_and_keeps_to_the_schedule(pipeline_ranks: RankPool, precision: str) -> None:
    settings = settings_for(precision)
    found = pipeline_ranks.run(differ_with_an_embedding_stage, settings, lr_scheduler=slower_and_slower)
    for (difference, facts), expected in zip(found, [["adamw"]] * 2 + [["muon", "adamw"]] * 2):
        assert difference == 0.0
        assert facts == [*expected, "0.60"]


@pytest.mark.parametrize("precision", ["fp32, stage 0", "bf16 + fp32, stage 1"])
def test_one_rate_for_all_groups_stops_every_stage_where_one_has_no_matrices(
    pipeline_ranks: RankPool, precision: str
) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 3}}
    settings = settings_for(precision) | {"scheduler": warmup}
    for error in pipeline_ranks.errors(differ_with_an_embedding_stage, settings):
        assert re.search(r"schedule made adamw's learning rate \S+ on pipeline stage 0, but \S+ on stage 1", error)


@pytest.mark.parametrize("precision", ["fp32, stage 1", "bf16, stage 1"])
def test_a_stage_without_matrices_is_refused_where_deepspeed_would_wait_forever(
    pipeline_ranks: RankPool, precision: str
) -> None:
    for error in pipeline_ranks.errors(differ_with_an_embedding_stage, settings_for(precision)):
        assert "pipeline stage 0 has 1 param group(s) and another stage 2: it has no matrices, or nothing else" in error


def kinds_with(settings: dict[str, Any]) -> dict[str, str]:
    with engine_for(settings, pipeline(untied())) as engine:
        return {route.name: route.kind for route in engine.basic_optimizer._binding.stage.all_routes}


def test_globs_may_match_on_any_stage(pipeline_ranks: RankPool) -> None:
    options = {"exclude": ["1.up.*"], "include": ["3.weight"]}
    for kinds in pipeline_ranks.run(kinds_with, settings_for("fp32, stage 1", **options)):
        assert kinds["1.up.weight"] == "elementwise" and kinds["2.up.weight"] == "matrix"
        assert kinds["3.weight"] == "matrix" and len(kinds) == 16


def model_to_refuse(kind: str) -> PipelineModule:
    if kind == "shards":
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        return PipelineModule(untied(), topology=topology, loss_fn=loss_of, partition_method="uniform")
    if kind == "experts":
        return pipeline([LayerSpec(MoE, 8, nn.Linear(8, 8), 2), LayerSpec(MoE, 8, nn.Linear(8, 8), 2)])
    if kind == "only an embedding first":
        return pipeline([LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY, False)])
    model = pipeline(tied_table() if kind == "tied" else untied())
    if kind == "tagged" and torch.distributed.get_rank() == 3:
        next(model.parameters()).use_muon = True
    return model


def build_pipeline(settings: dict[str, Any], kind: str) -> None:
    build(settings, model_to_refuse(kind))


FP32 = settings_for("fp32, stage 1")


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        (config(0) | BF16, "untied", "stage is 0 and the pipeline is trained in bfloat16, where DeepSpeed saves one"),
        (config(2), "untied", "the model is a PipelineModule and zero_optimization.stage is 2; use stage 0 or 1"),
        (config(3), "untied", "the model is a PipelineModule and zero_optimization.stage is 3; use stage 0 or 1"),
        (
            FP32,
            "only an embedding first",
            "none of the 2 trained parameters is a matrix, so 'muon' would train nothing",
        ),
        (
            settings_for("fp32, stage 1", exclude=["1.upp.*"]),
            *("untied", "exclude: '1.upp.*' matches no parameter name; did you mean '1.up."),
        ),
        (
            settings_for("fp32, stage 1", include=["tied_modules.*"]),
            *("tied", "include: 'tied_modules.embed.weight' is tied between pipeline layers; such weights stay"),
        ),
        (FP32, "shards", "the pipeline's topology has model parallelism of 2: each rank holds a shard"),
        (FP32, "tagged", "carry use_muon=True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pipelines_that_cannot_be_trained_are_refused(
    pipeline_ranks: RankPool, settings: dict[str, Any], kind: str, message: str
) -> None:
    errors = pipeline_ranks.errors(build_pipeline, settings, kind)
    assert all(message in error for error in errors)
    if kind == "tagged":  # on one rank, whose error stops the others
        assert errors[3].startswith("ValueError") and all(error.startswith("RuntimeError") for error in errors[:3])


def test_experts_in_a_pipeline_are_refused(ranks_to_spoil: RankPool) -> None:
    for error in ranks_to_spoil.errors(build_pipeline, FP32, "experts"):
        assert "the model is a PipelineModule with deepspeed.moe layers; use one of the two" in error


def printed_by_a_build(settings: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        build(settings, pipeline(untied()))
    return printed.getvalue()


def test_the_report_shows_the_whole_models_routing_and_whose_plan_it_is(pipeline_ranks: RankPool) -> None:
    first, *others = pipeline_ranks.run(printed_by_a_build, settings_for("fp32, stage 1", report=True))
    assert "Routing: 6 of 16 trained parameters are matrices" in first
    assert re.search(r"3.weight .* output head, as wide as an embedding has rows", first)
    assert "Pipeline: 2 stages, each planned for by itself; this is the plan of stage 0" in first
    assert not any("Routing" in other for other in others)
