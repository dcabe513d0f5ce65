"""One run through all engines: at every stop ``lwopt convert`` makes the next checkpoint, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend import LayerWiseOptimizer as OwnedOptimizer
from lwopt_backend.checkpoint import formats
from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests import megatron_dist
from tests.checkpoint_engines import full_weights_of
from tests.fsdp2 import mesh_of, weights_of, whole
from tests.models import VOCABULARY, batch
from tests.owned import BUCKET_MB
from tests.ranks import RankPool
from tests.rule_steps import Trained, rule_of
from tests.test_cli import run as lwopt
from tests.zero import ADAMW, MUON, ROWS, engine_for
from tests.zero import train as train_engine

STEPS = 2  # on each engine
RULES: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", **MUON},
    "soap": {"name": "soap", "lr": 3e-3, "precondition_frequency": 2},
    "soap of parts": {"name": "soap", "lr": 3e-3, "precondition_frequency": 2},
}
ATOMS: dict[str, dict[str, Any]] = {  # which matrices are in a parameter
    "soap of parts": {
        "layers.0.weight": {"qkv": [9, 6, 6], "groups": 3},
        "layers.2.weight": {"qkv": [21, 10, 10], "groups": 1},
    },
}
ELEMENTWISE = {"name": "adamw", **ADAMW}


# A model whose gradients are multiples of 2^-14, so that the mean of equal ones over any number of ranks is exact


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * 2**14).round() / 2**14


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else Rounded.apply(self.bias)
        return nn.functional.linear(x, Rounded.apply(self.weight), bias)


class Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, Rounded.apply(self.weight))


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], Rounded.apply(self.weight), Rounded.apply(self.bias))


class LM(nn.Module):
    def __init__(self, seed: int = 0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList([Linear(24, 63), Norm(63), Linear(63, 41, bias=False), Linear(41, 24)])
        self.lm_head = Linear(24, VOCABULARY, bias=False)
        self.register_buffer("passes", torch.zeros(2))
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.passes += 1
        x = self.embedding(tokens)
        y = x
        for layer in self.layers:
            y = nn.functional.gelu(layer(y))
        return nn.functional.cross_entropy(self.lm_head(x + y).flatten(0, 1), targets.flatten())


# The engines


@dataclass(frozen=True)
class Leg:
    """Some steps on one engine."""

    engine: str
    ranks: int
    stage: int = 0
    straight: bool = False  # it loads what is made of the saved checkpoint itself, not of the universal one


@dataclass(frozen=True)
class Run:
    rule: str
    tied: bool
    steps: range
    load: str | None = None
    save: str | None = None

    def model(self) -> LM:
        return LM(seed=0 if self.load is None else 5, tied=self.tied)


def atoms_of(run: Run) -> dict[str, Any]:
    return {"atoms": ATOMS[run.rule]} if run.rule in ATOMS else {}


def schedule(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def on_zero(run: Run, leg: Leg) -> dict[str, Any]:
    params = {"matrix": RULES[run.rule], "elementwise": ELEMENTWISE, "report": False, **atoms_of(run)}
    zero = {"stage": leg.stage, "stage3_param_persistence_threshold": 100}
    if leg.engine == "owned in DeepSpeed":
        params |= {"storage": "owned", "bucket_mb": 0.01}
        zero = {"stage": leg.stage}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": "LayerWise", "params": params},
        "steps_per_print": 1_000_000,
        "checkpoint": {"load_universal": run.load is not None},
    }
    with engine_for(settings, run.model(), lr_scheduler=schedule) as engine:
        if run.load:
            path, client = engine.load_checkpoint(run.load)
            assert path is not None and client == {"rows": 3}
        losses = train_engine(engine, run.steps, same_rows=True)
        assert engine.global_steps == run.steps.stop
        if run.save:
            engine.save_checkpoint(run.save, client_state={"rows": 3})
        return {"losses": losses, "weights": full_weights_of(engine), "passes": engine.module.passes.clone()}


def on_fsdp2(run: Run, leg: Leg) -> dict[str, Any]:
    model = run.model()
    mesh = mesh_of(dist.get_world_size())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = LayerWiseOptimizer(model, RULES[run.rule], elementwise=ELEMENTWISE, report=False, **atoms_of(run))
    scheduler = schedule(optimizer)
    if run.load:
        state = state_of(model, optimizer, scheduler, 0)
        dcp.load(state, checkpoint_id=run.load)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        assert (state["iteration"], state["rows"]) == (run.steps.start, 3)
    losses = train_alone(model, optimizer, scheduler, run.steps)
    if run.save:
        dcp.save(state_of(model, optimizer, scheduler, run.steps.stop), checkpoint_id=run.save)
    return {"losses": losses, "weights": weights_of(model), "passes": model.passes.clone()}


def state_of(model: nn.Module, optimizer: Any, scheduler: LambdaLR, iteration: int) -> dict[str, Any]:
    """As docs/fsdp2.md saves it."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "iteration": iteration,
        "samples": iteration * ROWS * dist.get_world_size(),
        "rows": 3,
    }


def train_alone(model: nn.Module, optimizer: Any, scheduler: LambdaLR, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(*batch(step, ROWS))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def on_owned(run: Run, leg: Leg) -> dict[str, Any]:
    model = run.model()
    options = {"report": False, "bucket_mb": BUCKET_MB, **atoms_of(run)}
    optimizer = OwnedOptimizer(model, RULES[run.rule], elementwise=ELEMENTWISE, **options)
    scheduler = schedule(optimizer)
    if run.load:
        folder = Path(run.load)
        model.load_state_dict(torch.load(folder / "model.pt"))
        optimizer.load_state_dict_from(folder)
        training = torch.load(folder / "training.pt")
        scheduler.load_state_dict(training["scheduler"])
        assert (training["iteration"], training["rows"]) == (run.steps.start, 3)
    losses = train_alone(model, optimizer, scheduler, run.steps)
    if run.save:
        optimizer.save_state_dict(run.save)
        if dist.get_rank() == 0:
            steps = run.steps.stop
            samples = steps * ROWS * dist.get_world_size()
            training = {"scheduler": scheduler.state_dict(), "iteration": steps, "samples": samples, "rows": 3}
            torch.save(model.state_dict(), Path(run.save) / "model.pt")
            torch.save(training, Path(run.save) / "training.pt")
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {"losses": losses, "weights": weights, "passes": model.passes.clone()}


ENGINES = {"zero": on_zero, "owned in DeepSpeed": on_zero, "fsdp2": on_fsdp2, "owned": on_owned}
TARGETS = {"fsdp2": "dcp", "owned": "owned"}  # of lwopt convert; universal for the others


# The chain


def pool_of(rank_pools: dict[int, RankPool], world_size: int) -> RankPool:
    return rank_pools.setdefault(world_size, RankPool(world_size))


def through(
    rank_pools: dict[int, RankPool], folder: Path, rule: str, tied: bool, legs: Sequence[Leg]
) -> list[dict[str, Any]]:
    """What each leg came to, all ranks alike. Between them is a universal checkpoint, and of it what the next loads."""
    found: list[dict[str, Any]] = []
    load: Path | None = None
    for number, leg in enumerate(legs):
        saved, universal = folder / f"saved {number}", folder / f"universal {number}"
        steps = range(number * STEPS, (number + 1) * STEPS)
        if load is not None and leg.engine in TARGETS:
            source = folder / f"saved {number - 1}" if leg.straight else load
            lwopt("convert", source, folder / f"load {number}", "--to", TARGETS[leg.engine], "--json")
            load = folder / f"load {number}"
        run = Run(rule, tied, steps, None if load is None else str(load), str(saved))
        answers = pool_of(rank_pools, leg.ranks).run(ENGINES[leg.engine], run, leg)
        assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
        found.append(answers[0])
        lwopt("convert", saved, universal, "--to", "universal", "--json")
        load = universal
    return found


CHAINS = {
    "zero first": [
        Leg("zero", 2, stage=2),
        Leg("fsdp2", 3),
        Leg("owned in DeepSpeed", 2, stage=1),
        Leg("zero", 1, stage=3),
        Leg("owned", 3, straight=True),
        Leg("zero", 4, stage=3),
    ],
    "owned first": [
        Leg("owned", 2),
        Leg("fsdp2", 2, straight=True),
        Leg("zero", 4, stage=1),
        Leg("owned in DeepSpeed", 3, stage=2),
        Leg("fsdp2", 1, straight=True),
        Leg("owned in DeepSpeed", 1, stage=0),
        Leg("zero", 2, stage=0),
    ],
    "fsdp2 first": [Leg("fsdp2", 2), Leg("zero", 2, stage=1), Leg("fsdp2", 3), Leg("owned", 2, straight=True)],
}


@pytest.mark.parametrize(
    ("chain", "rule", "tied"),
    [
        ("zero first", "muon", False),
        ("zero first", "soap", True),
        ("owned first", "muon", True),
        ("owned first", "soap", False),
        ("fsdp2 first", "soap of parts", False),
    ],
)
def test_losses_are_those_of_a_run_without_a_stop(
    rank_pools: dict[int, RankPool], tmp_path: Path, chain: str, rule: str, tied: bool
) -> None:
    legs = CHAINS[chain]
    whole = Run(rule, tied, range(STEPS * len(legs)))
    expected = pool_of(rank_pools, 2).run(on_zero, whole, Leg("zero", 2, 2))[0]
    found = through(rank_pools, tmp_path, rule, tied, legs)
    assert [leg["losses"] for leg in found] == [
        expected["losses"][start : start + STEPS] for start in range(0, STEPS * len(legs), STEPS)
    ]
    last = found[-1]
    for name, weight in last["weights"].items():
        assert torch.equal(weight, expected["weights"][name]), name
    assert torch.equal(last["passes"], expected["passes"])


# From Megatron and back


class Given:
    """A layer whose weight has the gradient that it is called with."""

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad.to(self.weight.dtype)).sum()


class GivenLinear(Given, nn.Linear): ...


class GivenEmbedding(Given, nn.Embedding): ...


class GivenNorm(Given, nn.LayerNorm): ...


class Named(nn.Module):
    """Modules whose parameters have the names and shapes of a checkpoint's, and gradients that are known."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        for name, shape in shapes.items():
            *path, last, _ = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            if "embeddings" in last:
                place.add_module(last, GivenEmbedding(*shape))
            elif len(shape) == 2:
                place.add_module(last, GivenLinear(shape[1], shape[0], bias=False))
            else:
                place.add_module(last, GivenNorm(shape, bias=False))

    def forward(self, step: int) -> Tensor:
        grads = gradients(self.shapes, step)
        return sum(self.get_submodule(name.removesuffix(".weight"))(grad) for name, grad in grads.items())


def gradients(shapes: dict[str, tuple[int, ...]], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


EMBEDDINGS = ["embedding.word_embeddings.weight", "output_layer.weight"]


@dataclass(frozen=True)
class Megatron:
    """A checkpoint of Megatron's; ``states`` are known from elsewhere, by parameter, with ``fp32``."""

    folder: Path
    states: dict[str, dict[str, Tensor]]
    step: int
    muon: dict[str, float]
    adam: dict[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(states["fp32"].shape) for name, states in self.states.items()}


OURS = {
    "type": "LayerWise",
    "params": {
        "matrix": {"name": "muon", "lr": 1.0, "momentum": 0.9, "nesterov": False},
        "elementwise": {"name": "adamw", "lr": 1.0},
        **{"exclude": EMBEDDINGS, "atoms": {"*": "whole"}, "report": False},
    },
}
STOCK = {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As Megatron has them, by whether weights decay; with hyperparameters that the checkpoint's must replace."""
    params = dict(model.named_parameters())
    decayed = [name for name, shape in model.shapes.items() if len(shape) == 2]
    return [
        {"params": [params[name] for name in decayed], "lr": 0.5, "weight_decay": 0.5},
        {"params": [p for name, p in params.items() if name not in decayed], "lr": 0.5, "weight_decay": 0.5},
    ]


def step_on_zero(
    load: str, save: str | None, shapes: dict[str, tuple[int, ...]], stage: int, optimizer: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """One step by an engine that is told other learning rates and decays than the checkpoint's."""
    torch._dynamo.config.disable = True  # torch's AdamW in DeepSpeed would be compiled
    model = Named(shapes)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "optimizer": optimizer,
        "steps_per_print": 1_000_000,
        "checkpoint": {"load_universal": True},
    }
    with engine_for(settings, model, model_parameters=groups_of(model)) as engine:
        engine.load_checkpoint(load)
        engine.backward(engine(engine.global_steps))
        engine.step()
        if save:
            engine.save_checkpoint(save)
        get, state = deepspeed.utils.safe_get_full_fp32_param, deepspeed.utils.safe_get_full_optimizer_state
        muon = optimizer["type"] == "LayerWise"
        return {
            name: {"fp32": get(p).clone(), **{k: state(p, k).clone() for k in keys_of(name, shapes[name], muon)}}
            for name, p in engine.module.named_parameters()
        }


def keys_of(name: str, shape: tuple[int, ...], muon: bool) -> tuple[str, ...]:
    is_matrix = muon and len(shape) == 2 and name not in EMBEDDINGS
    return ("momentum_buffer",) if is_matrix else ("exp_avg", "exp_avg_sq")


def step_alone(
    source: Megatron, *, decay_of_vectors: float = 0.0, steps_of_vectors: int = 0
) -> dict[str, dict[str, Tensor]]:
    """torch.optim.Muon and torch.optim.AdamW on one process, from what the checkpoint is known to hold."""
    grads, found = gradients(source.shapes, source.step), {}
    for name, states in source.states.items():
        param = nn.Parameter(states["fp32"].clone())
        kept = {key: tensor.clone() for key, tensor in states.items() if key != "fp32"}
        if "momentum_buffer" in kept:
            optimizer = torch.optim.Muon([param], nesterov=False, **source.muon)
        else:
            decay = source.muon["weight_decay"] if param.ndim == 2 else decay_of_vectors
            optimizer = torch.optim.AdamW([param], weight_decay=decay, **source.adam)
            kept["step"] = torch.tensor(float(source.step if param.ndim == 2 else steps_of_vectors or source.step))
        optimizer.state[param] = kept
        param.grad = grads[name].float()
        optimizer.step()
        state = {key: tensor for key, tensor in optimizer.state[param].items() if key != "step"}
        found[name] = {"fp32": param.detach(), **state}
    return found


MUON_ARGUMENTS = {
    "muon_use_nesterov": False,
    "muon_scale_mode": "spectral",
    "muon_num_ns_steps": 5,
    "muon_extra_scale_factor": 1.0,
}


def small_megatron(folder: Path, muon: bool = True) -> Megatron:
    """With torch's own DCP writer, in Megatron 0.16's layout."""
    arguments = {"num_attention_heads": 4, "num_query_groups": 2, "bf16": True, **MUON_ARGUMENTS}
    known = megatron_dist.truth(muon)
    for states in known.values():
        if "exp_avg_sq" in states:
            states["exp_avg_sq"].abs_()
    megatron_dist.write(folder / "iter_0000007", megatron_dist.Setup(muon=muon, arguments=arguments), known)
    return Megatron(
        folder / "iter_0000007",
        {name: {k: tensor for k, tensor in states.items() if k != "weight"} for name, states in known.items()},
        step=7,
        muon={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
        adam={"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8},
    )


GENUINE = Path(__file__).parents[1].parent / "shared" / "megatron" / "t16_lw_muon_dp2_torchdist"


def genuine_megatron(folder: Path) -> Megatron:
    known = torch.load(GENUINE / "ground_truth.pt", weights_only=True)["params"]
    states = {
        name: {k.replace("fp32_param", "fp32"): t for k, t in of_name["states"].items() if t.ndim}
        for name, of_name in known.items()
    }
    return Megatron(
        GENUINE,
        states,
        step=3,
        muon={"lr": 0.0073, "momentum": 0.9, "weight_decay": 0.1},
        adam={"lr": 0.0073, "betas": (0.9, 0.999), "eps": 1e-8},
    )


SOURCES = [
    pytest.param(small_megatron, id="small"),
    pytest.param(
        genuine_megatron,
        id="genuine",
        marks=pytest.mark.skipif(not GENUINE.is_dir(), reason="the genuine checkpoints are not there"),
    ),
]
HEADS = ("--heads", 4, "--query-groups", 2)  # DeepSpeed's checkpoints do not keep them


@pytest.mark.parametrize(("stage", "version"), [(1, "0.16"), (2, "0.19"), (3, "0.16")])
@pytest.mark.parametrize("make", SOURCES)
def test_megatrons_run_makes_a_step_here_and_goes_back(
    ranks: RankPool, tmp_path: Path, make: Callable[[Path], Megatron], stage: int, version: str
) -> None:
    """The step is that of torch's own optimizers from what Megatron held, and Megatron's format has its result."""
    source = make(tmp_path / "megatron")
    lwopt("convert", source.folder, tmp_path / "universal", "--to", "universal", "--json")
    load, save = str(tmp_path / "universal"), str(tmp_path / "native")
    expected = step_alone(source)
    for found in ranks.run(step_on_zero, load, save, source.shapes, stage, OURS):
        for name, states in expected.items():
            assert found[name].keys() == states.keys()
            assert all(torch.equal(found[name][key], tensor) for key, tensor in states.items()), name
    names = ("--source-names", "megatron-core")
    lwopt("convert", save, tmp_path / "again", "--to", "universal", *names, "--json")
    version_of = ("--megatron-version", version)
    lwopt("convert", tmp_path / "again", tmp_path / "back", "--to", "megatron", *HEADS, *version_of, "--json")
    back = formats.read(tmp_path / "back")
    assert (back.format, back.names, back.iteration) == ("megatron torch_dist", "megatron-core", source.step + 1)
    assert back.params.keys() == expected.keys()
    for name, states in expected.items():
        param = back.params[name]
        assert param.states.keys() == states.keys(), name
        assert torch.equal(param.weight.read(), states["fp32"].bfloat16()), name
        assert all(torch.equal(param.states[key].read(), tensor) for key, tensor in states.items()), name
        assert param.step == (None if "momentum_buffer" in states else source.step + 1), name
        group = back.groups[param.group]
        theirs = source.muon if "momentum_buffer" in states else source.adam
        assert group["lr"] == theirs["lr"]
        assert group["weight_decay"] == (0.0 if len(param.shape) == 1 else source.muon["weight_decay"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_megatrons_run_of_adam_goes_on_with_deepspeeds_own(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """At stage 3 DeepSpeed 0.19.8 gives all param groups the options of the first, and one counter that each counts up.

    So parameters of the second group, vectors, are decayed here, and a step further than they are.
    """
    source = small_megatron(tmp_path / "megatron", muon=False)
    lwopt("convert", source.folder, tmp_path / "universal", "--to", "universal", "--json")
    load = str(tmp_path / "universal")
    as_deepspeed = {"decay_of_vectors": source.muon["weight_decay"], "steps_of_vectors": source.step + 1}
    expected = step_alone(source, **(as_deepspeed if stage == 3 else {}))
    for found in ranks.run(step_on_zero, load, None, source.shapes, stage, STOCK, timeout=600.0):
        for name, states in expected.items():
            assert all(torch.equal(found[name][key], tensor) for key, tensor in states.items()), name


@pytest.mark.parametrize("version", ["0.16", "0.19"])
@pytest.mark.parametrize("make", SOURCES)
def test_megatrons_checkpoint_comes_back_untouched(
    tmp_path: Path, make: Callable[[Path], Megatron], version: str
) -> None:
    source = make(tmp_path / "megatron")
    lwopt("convert", source.folder, tmp_path / "universal", "--to", "universal", "--json")
    version_of = ("--megatron-version", version)
    lwopt("convert", tmp_path / "universal", tmp_path / "back", "--to", "megatron", *version_of, "--json")
    for folder in ("universal", "back"):
        found = json.loads(lwopt("diff", source.folder, tmp_path / folder, "--json"))
        assert (found["different"], found["notes"]) == ([], [])
        assert found["equal"] > 3 * len(source.states)


# From Megatron to FSDP2


def step_on_fsdp2(load: str, shapes: dict[str, tuple[int, ...]], step: int, stock: bool) -> dict[str, Any]:
    """One step by our optimizer, or by torch's AdamW; groups, weights and states afterwards."""
    model = Named(shapes)
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    if stock:
        optimizer: Any = torch.optim.AdamW(groups_of(model), betas=(0.5, 0.5))
    else:
        options = {"exclude": EMBEDDINGS, "atoms": {"*": "whole"}, "report": False}
        optimizer = LayerWiseOptimizer(model, "muon", 1.0, params=groups_of(model), **options)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=load)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    model(step).backward()
    optimizer.step()
    states = get_optimizer_state_dict(model, optimizer)["state"]
    return {
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        "states": {
            name: {"fp32": whole(p), **{key: whole(t) for key, t in states[name].items() if key != "step"}}
            for name, p in model.named_parameters()
        },
    }


MUON_OF_MEGATRON = {
    **{"nesterov": False, "ns_coefficients": "quintic", "eps": 1e-15, "adjust_lr_fn": "spectral"},
    **{"ns_steps": 5, "extra_scale_factor": 1.0, "momentum_form": "ema", "weight_decay_form": "decoupled"},
    **{"ns_dtype": "bfloat16", "gram_aspect": None, "gram_restarts": None},
}


def step_as_megatron(source: Megatron) -> dict[str, dict[str, Tensor]]:
    """``step_alone``, with Emerging-Optimizers' Muon for torch's: as our rule computes it on one whole matrix."""
    grads, found = gradients(source.shapes, source.step), step_alone(source)
    for name, states in source.states.items():
        if "momentum_buffer" in states:
            alone = Trained(rule_of("muon", **source.muon, **MUON_OF_MEGATRON), states["fp32"])
            alone.state["momentum_buffer"] = states["momentum_buffer"].clone()
            found[name] = {"fp32": alone.step(grads[name].float()), **alone.state}
    return found


@pytest.mark.parametrize("over", ["straight", "over universal"])
@pytest.mark.parametrize("make", SOURCES)
def test_megatrons_run_goes_on_with_fsdp2(
    ranks: RankPool, tmp_path: Path, make: Callable[[Path], Megatron], over: str
) -> None:
    """With Megatron's own hyperparameters, whatever the optimizer was made with."""
    source = make(tmp_path / "megatron")
    folder = source.folder
    if over == "over universal":
        folder = tmp_path / "universal"
        lwopt("convert", source.folder, folder, "--to", "universal", "--json")
    lwopt("convert", folder, tmp_path / "dcp", "--to", "dcp", "--json")
    expected = step_as_megatron(source)
    for found in ranks.run(step_on_fsdp2, str(tmp_path / "dcp"), source.shapes, source.step, False):
        muon, *others = found["groups"]
        assert muon.items() >= {"rule": "muon", **source.muon, **MUON_OF_MEGATRON}.items()
        for group, decay in zip(others, (source.muon["weight_decay"], 0.0), strict=True):
            assert group.items() >= {"rule": "adamw", **source.adam, "weight_decay": decay}.items()
        for name, states in expected.items():
            assert found["states"][name].keys() == states.keys()
            assert all(torch.equal(found["states"][name][key], t) for key, t in states.items()), name


def test_megatrons_run_of_adam_goes_on_with_torchs_own_on_fsdp2(ranks: RankPool, tmp_path: Path) -> None:
    source = small_megatron(tmp_path / "megatron", muon=False)
    lwopt("convert", source.folder, tmp_path / "dcp", "--to", "dcp", "--json")
    expected = step_alone(source)
    for found in ranks.run(step_on_fsdp2, str(tmp_path / "dcp"), source.shapes, source.step, True):
        for group, decay in zip(found["groups"], (source.muon["weight_decay"], 0.0), strict=True):
            assert group.items() >= {**source.adam, "weight_decay": decay}.items()
        for name, states in expected.items():
            assert all(torch.equal(found["states"][name][key], t) for key, t in states.items()), name
