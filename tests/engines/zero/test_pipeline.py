"""Pipelines: two stages on two data-parallel ranks each train as torch.optim.Muon + AdamW do on the whole model. Ranks
0 and 1 have the first stage, 2 and 3 the second; a stage plans for itself."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from tests.support.cells import cells
from tests.support.checkpoint_contents import same
from tests.support.checkpoint_engines import assert_missed, convert_as_deepspeed_does, go_through, without_compiling
from tests.support.command_line import succeeds
from tests.support.engines import falling
from tests.support.models import VOCABULARY
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool, gathered
from tests.support.references import layer_wise
from tests.support.zero import (
    ADAMW,
    BF16,
    IN_FP32,
    MUON,
    ROWS,
    Beside,
    Reference,
    build,
    config,
    engine_for,
    full_weights,
    train,
    train_step,
)
from tests.support.zero import settings_for as zero_settings

RANKS, STAGES, DATA_PARALLEL, MICRO_BATCHES = 4, 2, 2, 2
WIDTH = 24
MATRICES = ("up.weight", "down.weight", "mix.weight")
PRECISIONS = {
    "fp32, stage 0": (0, {}),
    "fp32, stage 1": (1, {}),
    "bf16, stage 1": (1, BF16),
    "bf16 + fp32, stage 1": (1, {**BF16, **IN_FP32}),
}


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


class BlockAndHead(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Block(), nn.Linear(WIDTH, VOCABULARY, bias=False))


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


EMBEDDING = LayerSpec(nn.Embedding, VOCABULARY, WIDTH)
HEAD = LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)
UNTIED = [EMBEDDING, LayerSpec(Block), LayerSpec(Block), HEAD]


def tied(module: type[nn.Module], *sizes: int) -> list[Any]:
    ends = (TiedLayerSpec("embed", module, *sizes), TiedLayerSpec("embed", module, *sizes, forward_fn=multiply))
    return [ends[0], LayerSpec(Block), LayerSpec(Block), ends[1]]


MODELS = {
    "untied": UNTIED,
    "tied embedding": (TIED := tied(nn.Embedding, VOCABULARY, WIDTH)),
    "tied table": tied(Table),
    "tied alone": [*TIED[:2], LayerSpec(nn.Identity), TIED[-1]],
    "embedding first": [EMBEDDING, LayerSpec(BlockAndHead)],
    "embedding and head": [EMBEDDING, HEAD],
    "experts": [LayerSpec(MoE, 8, nn.Linear(8, 8), 2)] * 2,
}


LAYERS: dict[str, Any] = {"partition_method": "uniform", "seed_layers": True, "base_seed": 7}


def pipeline(layers: list[Any], stages: int = STAGES) -> PipelineModule:
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of, **LAYERS)


class Whole(PipelineModule):
    """All layers on one process, with the pipeline's names."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers, num_stages=1, **LAYERS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(super().forward(tokens), targets)


def settings_for(precision: str, **options: Any) -> dict[str, Any]:
    stage, more = PRECISIONS[precision]
    return zero_settings("zero", stage, rows=ROWS // DATA_PARALLEL, accumulation=MICRO_BATCHES, **options) | more


def beside(model: str, settings: dict[str, Any]) -> Beside:
    whole = Whole(MODELS[model])
    matrices = [name for name, _ in whole.named_parameters() if name.endswith(MATRICES)]
    return Beside(Reference(whole, matrices=matrices), settings)


@on_ranks(RANKS)
@cells(
    lambda model, precision, clip=0.0: clip == 0.0 or precision.startswith("fp32"),
    model=["untied", "tied embedding", "tied table"],
    precision=PRECISIONS,
    clip=[0.0, 0.5],
)
def test_pipeline_stages_have_the_bits_of_torch_muon(tmp_path: Path, model: str, precision: str, clip: float) -> None:
    """Every stage has the bits, given the same gradients, and resumes."""
    settings = settings_for(precision, clip=clip)
    engine = beside(model, settings).train_and_resume(lambda: engine_for(settings, pipeline(MODELS[model])), tmp_path)
    plans = [plan for plan in engine.basic_optimizer._binding.plans if plan.matrices is not None]
    block = 1 if dist.get_rank() < DATA_PARALLEL else 2
    assert [param.name for plan in plans for param in plan.params] == [f"{block}.{name}" for name in MATRICES]
    assert all(plan.matrices.buckets for plan in plans), "some matrix must travel"


class Plain(nn.Sequential):
    """The layers of an untied pipeline, with the same names, for an engine without pipeline parallelism."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return loss_of(super().forward(tokens), targets)


def engine_of(model: str, rule: str, precision: str, stages: int, zero: int) -> Any:
    """An engine of ``stages`` pipeline stages, 0 for none, that loads universal checkpoints. In each leg, frozen
    parameters and buffers are others."""
    settings = settings_for(precision) | {"checkpoint": {"load_universal": True}}
    settings["zero_optimization"] |= {"stage": zero}  # buffers of DeepSpeed's own sizes take 4 GiB a rank
    settings["optimizer"] = layer_wise(rule, bucket_numel=2000)
    module = pipeline(MODELS[model], stages) if stages else Plain(*(layer.build() for layer in UNTIED))
    for block in module.modules():
        if isinstance(block, Block):
            block.mix.bias.requires_grad_(False).data.fill_(stages)
            block.register_buffer("passes", torch.full((2,), float(zero)))
    return engine_for(settings, module, lr_scheduler=falling)


WAYS = {
    "fp32, stage 1": [(2, 1), (1, 1), (4, 0), (1, 0), (0, 3), (0, 0), (2, 1)],
    "bf16 + fp32, stage 1": [(2, 1), (1, 1), (4, 1), (2, 1)],
}


@pytest.mark.parametrize(
    ("model", "rule", "precision"),
    [
        ("untied", "muon", "fp32, stage 1"),
        ("untied", "soap", "fp32, stage 1"),
        ("tied embedding", "muon", "fp32, stage 1"),
        ("untied", "muon", "bf16 + fp32, stage 1"),
    ],
)
def test_a_run_goes_on_with_other_numbers_of_stages(
    rank_pools: dict[int, RankPool], tmp_path: Path, model: str, rule: str, precision: str
) -> None:
    numbers = [(stages, zero) for stages, zero in WAYS[precision] if stages or model == "untied"]
    legs = [functools.partial(engine_of, model, rule, precision, *leg) for leg in numbers]
    # DeepSpeed does not forget a pipeline's groups.
    renewed = [i for i, (stages, _) in enumerate(numbers) if 0 in {stages, numbers[i - 1][0]}]
    go_through(rank_pools[RANKS], tmp_path, legs, train_step, renewed)
    for leg, file, words in (
        (0, "mp_rank_01_model_states.pt", "expected a file mp_rank_01_model_states.pt"),
        (2, "mp_rank_03_model_states.pt", "expected a file mp_rank_03_model_states.pt"),
        (2, "layer_02-model_states.pt", "expected a file of the layer with '2."),
    ):
        assert_missed(tmp_path / f"leg {leg}" / "global_step2", file, words)


def moments(engine: Any) -> dict[str, Any]:
    """Weights and AdamW's state of all stages."""
    get = deepspeed.utils.safe_get_full_optimizer_state
    named = engine.module.named_parameters()
    state = {name: [get(param, key).clone() for key in ("exp_avg", "exp_avg_sq")] for name, param in named}
    mine = {name: [full_weights(engine)[name], *of_param] for name, of_param in state.items()}
    return {name: found for of_rank in gathered(mine) for name, found in of_rank.items()}


@on_ranks(RANKS)
@pytest.mark.parametrize("model", ["untied", "tied embedding"])
def test_adamw_of_deepspeeds_own_pipelines_goes_on(tmp_path: Path, model: str) -> None:
    """As DeepSpeed converts it, which cannot where weights are tied, and as we do; here, and in DeepSpeed itself."""
    settings = settings_for("fp32, stage 1") | {"optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}}
    with without_compiling(), engine_for(settings, pipeline(MODELS[model])) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path)
        truth = moments(engine)
    folders = [tmp_path / "ours", *[tmp_path / "theirs"] * (model == "untied")]
    if dist.get_rank() == 0:
        succeeds("convert", tmp_path, folders[0], "--to", "universal", "--json")
        if model == "untied":
            convert_as_deepspeed_does(tmp_path, "global_step2")
            (folders[1] / "latest_universal").write_text("global_step2")
    dist.barrier()
    settings["checkpoint"] = {"load_universal": True}
    ours = settings | {"optimizer": layer_wise("muon", exclude=["*"], allow_no_matrix=True)}
    for loading, folder in itertools.product([settings, ours], folders):
        with engine_for(loading, pipeline(MODELS[model], 1)) as engine:
            engine.load_checkpoint(folder)
            assert engine.global_steps == 2 and same(moments(engine), truth)


@on_ranks(RANKS)
@cells(model=["embedding first", "tied alone"], precision=["fp32, stage 0", "bf16 + fp32, stage 1"], given=[0, 1])
def test_stage_without_matrices_keeps_to_the_schedule(model: str, precision: str, given: int) -> None:
    """A stage without matrices trains, and keeps to the schedule. With tied weights alone, of which another stage
    counts the gradients, there are none for DeepSpeed's norm. A schedule that is not ``given`` but configured has the
    share of AdamW's group that it would have beside matrices."""
    settings, share = settings_for(precision), ADAMW["lr"] / MUON["lr"]
    warmup = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02, "warmup_num_steps": 3}
    both = beside(model, settings)
    if given:
        schedules = [falling(optimizer) for optimizer in both.single.optimizers]
    else:
        settings["scheduler"] = {"type": "WarmupLR", "params": warmup}
        peaks = zip(both.single.optimizers, (1.0, share))
        schedules = [WarmupLR(one, warmup["warmup_min_lr"] * part, 0.02 * part, 3) for one, part in peaks]
    with engine_for(settings, pipeline(MODELS[model]), **({"lr_scheduler": falling} if given else {})) as engine:
        both.start(engine)
        groups, theirs = engine.basic_optimizer.param_groups, [one.param_groups[0] for one in both.single.optimizers]
        without = (dist.get_rank() < DATA_PARALLEL) == (model == "embedding first")
        assert [group["rule"] for group in groups] == (["adamw"] if without else ["muon", "adamw"])
        for step in range(4):
            both.train(engine, range(step, step + 1))
            for schedule in schedules:
                schedule.step()
            assert [g["lr"] for g in groups] == pytest.approx([g["lr"] for g in theirs[-len(groups) :]])
        both.check(engine, 0.0 if given else 1e-7)  # a share of the peak is a product: rounding


FP32 = settings_for("fp32, stage 1")
NO_MATRICES = "pipeline stage 0 has 1 param group(s) and another stage 2, because one of the given groups has"
TIED_STAY = "include: 'tied_modules.embed.weight' is tied between pipeline layers; such weights stay"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("untied", config(0) | BF16, "stage is 0 in a pipeline trained in bfloat16: DeepSpeed then saves one"),
    ("embedding and head", FP32, "none of the 2 trained parameters is a matrix, so 'muon' would train nothing"),
    # Where DeepSpeed would wait forever.
    ("embedding first", FP32, NO_MATRICES),
    ("embedding first", settings_for("bf16, stage 1"), NO_MATRICES),
    ("untied", settings_for("fp32, stage 1", exclude=["1.upp.*"]), "'1.upp.*' matches no parameter name; did you mean"),
    ("tied table", settings_for("fp32, stage 1", include=["tied_modules.*"]), TIED_STAY),
    ("shards", FP32, "the pipeline's topology has model parallelism of 2: each rank holds a shard"),
    ("tagged", FP32, "carry use_muon=True"),
    ("experts", FP32, "the model is a PipelineModule with deepspeed.moe layers; use one of the two"),
    ("untied", config(2), "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),  # by DeepSpeed
    ("untied", config(3), "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
]


def with_shards() -> PipelineModule:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    return PipelineModule(UNTIED, topology=topology, loss_fn=loss_of, partition_method="uniform")


@on_ranks(RANKS)
@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_pipelines_that_cannot_be_trained_are_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    """Where one rank is at fault, its error stops the others."""
    model = pipeline(MODELS.get(kind, UNTIED)) if kind != "shards" else with_shards()
    expected: type[Exception] = AssertionError if message.startswith("ZeRO-2") else ValueError
    if kind == "tagged" and dist.get_rank() == 3:
        next(model.parameters()).use_muon = True
    elif kind == "tagged":
        expected = RuntimeError
    with pytest.raises(expected, match=re.escape(message)) as caught:
        build(settings, model)
    assert caught.type is expected


@on_ranks(RANKS)
def test_globs_match_on_any_stage() -> None:
    """Globs may match on any stage, and the report shows the whole model's routing."""
    settings = settings_for("fp32, stage 1", include=["0.weight"], exclude=["2.up.*"], report=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed, engine_for(settings, pipeline(UNTIED)) as engine:
        kinds = {route.name: route.kind for route in engine.basic_optimizer._binding.stage.all_routes}
    assert (kinds["0.weight"], kinds["1.up.weight"], kinds["2.up.weight"]) == ("matrix", "matrix", "elementwise")
    report = printed.getvalue()
    if dist.get_rank():
        assert "Routing" not in report
        return
    assert f"Routing: 6 of {len(kinds)} trained parameters are matrices" in report
    assert re.search(r"3.weight .* output head, as many outputs as the embedding has rows", report)
    assert "Pipeline: 2 stages, each with its own plan; this is the plan of stage 0" in report
