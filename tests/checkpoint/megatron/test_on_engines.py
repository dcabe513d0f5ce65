"""Megatron's runs make their next step here as on one process, to the bit; what is left out is said."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend import LayerWiseOptimizer as PlainOptimizer
from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.deepspeed import universal as universal_writer
from lwopt_backend.checkpoint.files.folders import write_folder
from lwopt_backend.integrations.deepspeed import universal as loading
from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.support import megatron_dist
from tests.support.checkpoint_engines import without_compiling
from tests.support.command_line import SAMPLES, succeeds
from tests.support.fsdp2 import mesh_of
from tests.support.ranks import RankPool
from tests.support.references import Trained, rule_of
from tests.support.zero import engine_for

States = dict[str, dict[str, Tensor]]
EMBEDDINGS = ("*word_embeddings.weight", "*output_layer.weight")
AS_MEGATRON = {"exclude": list(EMBEDDINGS), "atoms": {"*": "whole"}}
STOCK = {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}}
MUON_ARGUMENTS = {"muon_use_nesterov": False, "muon_scale_mode": "spectral", "muon_num_ns_steps": 5}
MUON_ARGUMENTS["muon_extra_scale_factor"] = 1.0


class Given(nn.Module):
    """One weight, and the modules whose names begin with its own. A matrix is multiplied with; this is its gradient."""

    def forward(self, grad: Tensor) -> Tensor:
        grad = grad.to(self.weight.dtype)
        if self.weight.ndim < 2:
            return (self.weight * grad).sum()
        return (grad @ self.weight.mT).diagonal(dim1=-2, dim2=-1).sum()


class Named(Given):
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        for name, shape in shapes.items():
            place: nn.Module = self
            for part in name.split(".")[:-1]:
                if part not in place._modules:
                    place.add_module(part, Given())
                place = place.get_submodule(part)
            place.weight = nn.Parameter(torch.ones(shape))

    def forward(self, step: int) -> Tensor:
        grads = gradients(self.shapes, step)
        return sum(self.get_submodule(name.removesuffix(".weight"))(grad) for name, grad in grads.items())


def gradients(shapes: dict[str, tuple[int, ...]], step: int) -> dict[str, Tensor]:
    """Multiples of 3 / 32 up to 60 / 32: bf16 holds them, a third of each, and the sums of up to four ranks."""
    generator = torch.Generator().manual_seed(step)
    whole = {name: torch.randint(-20, 21, shape, generator=generator) for name, shape in shapes.items()}
    return {name: (number * 3 / 32).bfloat16() for name, number in whole.items()}


@dataclass(frozen=True)
class Source:
    """A checkpoint of Megatron's, and what ``lwopt convert --to universal`` makes of it. ``states`` are known from
    elsewhere, by parameter, with ``fp32``."""

    folder: Path
    universal: Path
    states: States
    step: int
    muon: dict[str, float]
    adam: dict[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(states["fp32"].shape) for name, states in self.states.items()}


def ours(elementwise: str = "adamw", **matrix: Any) -> dict[str, Any]:
    rules = {"matrix": {"name": "muon", "lr": 1.0, **matrix}, "elementwise": {"name": elementwise, "lr": 1.0}}
    return {"type": "LayerWise", "params": {**rules, **AS_MEGATRON, "report": False}}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    decayed = [name for name, shape in model.shapes.items() if len(shape) == 2]
    parts = [params[name] for name in decayed], [p for name, p in params.items() if name not in decayed]
    return [{"params": part, "lr": 0.5, "weight_decay": 0.5} for part in parts]


def step_on_zero(
    load: str,
    shapes: dict[str, tuple[int, ...]],
    stage: int,
    optimizer: dict[str, Any],
    save: str | None = None,
    schedule: str = "none",
    **choice: Any,
) -> dict[str, Any]:
    """One step by an engine that is told other learning rates and decays than the checkpoint's, saved in a folder. Its
    param groups after loading, and what this rank said then."""
    said: list[str] = []
    warn, model = loading.logger.warning, Named(shapes)
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "bf16": {"enabled": True}}
    settings |= {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10}}
    settings |= {"optimizer": optimizer, "steps_per_print": 1_000_000, "checkpoint": {"load_universal": True}}
    kwargs: dict[str, Any] = {"model_parameters": groups_of(model)}
    if schedule == "torch":
        kwargs["lr_scheduler"] = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))
    elif schedule == "deepspeed":
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 20}}
    with without_compiling(), engine_for(settings, model, **kwargs) as engine:
        loading.logger.warning = lambda message, *_: said.append(message)
        try:
            engine.load_checkpoint(load, **choice)
        finally:
            loading.logger.warning = warn
        groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
        engine.backward(engine(engine.global_steps))
        engine.step()
        if save:
            engine.save_checkpoint(save)
        return {"groups": groups, "said": said}


def step_alone(source: Source) -> States:
    """torch.optim.Muon and torch.optim.AdamW on one process, from what the checkpoint is known to hold."""
    grads, found = gradients(source.shapes, source.step), {}
    for name, states in source.states.items():
        param = nn.Parameter(states["fp32"].clone())
        kept = {key: tensor.clone() for key, tensor in states.items() if key != "fp32"}
        if kept.keys() == {"exp_avg"}:  # Emerging-Optimizers' Lion
            (b1, b2), lr = source.adam["betas"], source.adam["lr"]
            param = param.detach() * (1 - lr * (source.muon["weight_decay"] if param.ndim == 2 else 0.0))
            param -= lr * kept["exp_avg"].lerp(grads[name].float(), 1 - b1).sign()
            found[name] = {"fp32": param, "exp_avg": kept["exp_avg"].lerp(grads[name].float(), 1 - b2)}
            continue
        if "momentum_buffer" in kept:
            optimizer = torch.optim.Muon([param], nesterov=False, **source.muon)
        else:
            decay = source.muon["weight_decay"] if param.ndim == 2 else 0.0
            optimizer = torch.optim.AdamW([param], weight_decay=decay, **source.adam)
            kept["step"] = torch.tensor(float(source.step))
        optimizer.state[param] = kept
        param.grad = grads[name].float()
        optimizer.step()
        state = {key: tensor for key, tensor in optimizer.state[param].items() if key != "step"}
        found[name] = {"fp32": param.detach(), **state}
    return found


def small_megatron(folder: Path, muon: bool, lion: bool = False) -> Source:
    arguments = {"num_attention_heads": 4, "num_query_groups": 2, "bf16": True, **MUON_ARGUMENTS}
    arguments |= {"muon_scalar_optimizer": "lion"} if lion else {}
    known, gone = megatron_dist.truth(muon), ("exp_avg_sq",) if lion else ()
    known = {name: {key: t for key, t in of.items() if key not in gone} for name, of in known.items()}
    place = folder / "megatron"
    setup = megatron_dist.Setup(muon=muon, arguments=arguments, step_in="nowhere" if lion else "group")
    megatron_dist.write(place / "iter_0000007", setup, known)  # Lion counts no steps
    (place / "latest_checkpointed_iteration.txt").write_text("7")
    states = {name: {k: tensor for k, tensor in of.items() if k != "weight"} for name, of in known.items()}
    rates = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
    return Source(place, folder / "universal", states, 7, *rates)


def genuine_megatron(folder: Path) -> Source:
    genuine = SAMPLES / "t16_lw_muon_dp2_torchdist"
    known = torch.load(genuine / "ground_truth.pt", weights_only=True)["params"]
    states = {
        name: {k.replace("fp32_param", "fp32"): t for k, t in of_name["states"].items() if t.ndim}
        for name, of_name in known.items()
    }
    rates = {"lr": 0.0073, "momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.0073, "betas": (0.9, 0.999), "eps": 1e-8}
    return Source(genuine, folder / "universal", states, 3, *rates)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    kinds = {"muon": (True,), "adam": (False,), "lion": (True, True)}
    found = {name: small_megatron(tmp_path_factory.mktemp(name), *kind) for name, kind in kinds.items()}
    found["genuine"] = genuine_megatron(tmp_path_factory.mktemp("genuine"))
    for source in found.values():
        succeeds("convert", source.folder, source.universal, "--to", "universal", "--json")
    return found


@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [("lion", 1, 2), ("muon", 1, 2), ("muon", 2, 3), ("muon", 3, 3), ("genuine", 3, 2)],
    indirect=["ranks"],
)
def test_megatrons_run_makes_a_step_here(
    ranks: RankPool, sources: dict[str, Source], tmp_path: Path, name: str, stage: int
) -> None:
    """The step is that of torch's own optimizers from what Megatron held; a conversion has its result."""
    source, save = sources[name], tmp_path / "native"
    expected = step_alone(source)
    rules = ours("lion" if name == "lion" else "adamw", momentum=0.9, nesterov=False)
    given = (str(source.universal), source.shapes, stage, rules, str(save))
    ranks.run(step_on_zero, *given)
    assert_states(states_in(save), expected)
    succeeds("convert", save, tmp_path / "to", "--to", "universal", "--source-names", "megatron-core", "--json")
    made = formats.read(tmp_path / "to")
    assert (made.names, made.iteration) == ("megatron-core", source.step + 1)
    assert made.samples == formats.read(save).samples
    assert_states(states_in(tmp_path / "to"), expected)
    for name, states in expected.items():
        param = made.params[name]
        assert torch.equal(param.best.read().bfloat16(), states["fp32"].bfloat16()), name
        assert param.step == (None if "momentum_buffer" in states else source.step + 1), name
        group = made.groups[param.group]
        assert group["lr"] == (source.muon if "momentum_buffer" in states else source.adam)["lr"]
        assert group["weight_decay"] == (0.0 if len(param.shape) == 1 else source.muon["weight_decay"])


def states_in(folder: Path) -> States:
    params = formats.read(folder).params.items()
    return {n: {"fp32": p.best.read(), **{key: tensor.read() for key, tensor in p.states.items()}} for n, p in params}


def assert_states(found: States, expected: States) -> None:
    assert found.keys() == expected.keys()
    for name, states in expected.items():
        assert found[name].keys() == states.keys(), name
        assert all(torch.equal(found[name][key], tensor) for key, tensor in states.items()), name


@pytest.mark.parametrize("stage", [1, 2])
def test_adam_goes_on_with_deepspeeds(ranks: RankPool, sources: dict[str, Source], tmp_path: Path, stage: int) -> None:
    """At stage 3 DeepSpeed 0.19.8 itself gives all param groups the options of the first."""
    source = sources["adam"]
    ranks.run(step_on_zero, str(source.universal), source.shapes, stage, STOCK, str(tmp_path))
    assert_states(states_in(tmp_path), step_alone(source))


# From Megatron to FSDP2
def step_on_fsdp2(load: str, source: Source, elementwise: str, save: str) -> list[dict[str, Any]]:
    """One step by our optimizer, or without a rule by torch's AdamW, saved in a folder; its param groups."""
    model = Named(source.shapes)
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    if not elementwise:
        optimizer: Any = torch.optim.AdamW(groups_of(model), betas=(0.5, 0.5))
    else:
        rules: dict[str, Any] = {"elementwise": {"name": elementwise, "lr": 1.0}, **AS_MEGATRON}
        optimizer = LayerWiseOptimizer(model, "muon", 1.0, params=groups_of(model), **rules, report=False)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=load)
    state_dict.set_model_state_dict(model, state["model"])
    state_dict.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    model(source.step).backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=save)
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


MUON_OF_MEGATRON = {
    **{"nesterov": False, "ns_coefficients": "quintic", "eps": 1e-15, "adjust_lr_fn": "spectral"},
    **{"ns_steps": 5, "extra_scale_factor": 1.0, "momentum_form": "ema", "weight_decay_form": "decoupled"},
    **{"ns_dtype": "bfloat16", "gram_aspect": None, "gram_restarts": None},
}


def step_as_megatron(source: Source) -> States:
    """``step_alone``, with Emerging-Optimizers' Muon for torch's: as our rule computes it on one whole matrix."""
    grads, found = gradients(source.shapes, source.step), step_alone(source)
    for name, states in source.states.items():
        if "momentum_buffer" in states:
            alone = Trained(rule_of("muon", **source.muon, **MUON_OF_MEGATRON), states["fp32"])
            alone.state["momentum_buffer"] = states["momentum_buffer"].clone()
            found[name] = {"fp32": alone.step(grads[name].float()), **alone.state}
    return found


@pytest.mark.parametrize(
    ("name", "over", "ranks"),
    [("muon", "universal", 3), ("lion", "", 2), ("genuine", "", 2), ("adam", "", 3)],
    indirect=["ranks"],
)
def test_megatrons_run_goes_on_with_fsdp2(
    ranks: RankPool, sources: dict[str, Source], tmp_path: Path, name: str, over: str
) -> None:
    """With Megatron's own hyperparameters, whatever the optimizer was made with; of Adam with torch's AdamW."""
    source, stock = sources[name], name == "adam"
    succeeds("convert", source.universal if over else source.folder, tmp_path / "dcp", "--to", "dcp", "--json")
    expected = step_alone(source) if stock else step_as_megatron(source)
    elementwise = {"adam": "", "lion": "lion"}.get(name, "adamw")
    of_muon, of_adamw = ({} if stock else {"rule": rule} for rule in ("muon", elementwise))
    of_adamw |= {key: value for key, value in source.adam.items() if key != "eps" or name != "lion"}
    for found in ranks.run(step_on_fsdp2, str(tmp_path / "dcp"), source, elementwise, str(tmp_path / "saved")):
        groups = [{**group, "lr": pytest.approx(group["lr"], rel=1e-15)} for group in found]
        *muon, decayed, vectors = groups
        assert len(muon) == (0 if stock else 1)
        for group in muon:
            assert {**group, **of_muon, **source.muon, **MUON_OF_MEGATRON} == group
        for group, decay in ((decayed, source.muon["weight_decay"]), (vectors, 0.0)):
            assert {**group, **of_adamw, "weight_decay": decay} == group
    assert_states(states_in(tmp_path / "saved"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_megatrons_run_goes_on_in_plain_pytorch(sources: dict[str, Source], tmp_path: Path, dtype: torch.dtype) -> None:
    """Megatron's weights were in bf16. Here they may be, with Megatron's masters as masters, or are these masters."""
    source = sources["muon"]
    succeeds("convert", source.folder, tmp_path / "dcp", "--to", "dcp", "--json")
    model = Named(source.shapes).to(dtype)
    optimizer = PlainOptimizer(model, "muon", 1.0, params=groups_of(model), **AS_MEGATRON, report=False)
    optimizer.load_state_dict_from(tmp_path / "dcp")
    optimizer.save_state_dict(tmp_path / "again")
    assert_states(states_in(tmp_path / "again"), source.states)
    assert {param.weight.dtype for param in formats.read(tmp_path / "again").params.values()} == {dtype}


# Options of Megatron's param groups in our engines: what is taken, and what is said of the rest
CONFIGURED = {"momentum": 0.5, "nesterov": False, "ns_coefficients": "quintic", "eps": 1e-15}
CONFIGURED |= {"adjust_lr_fn": "spectral"}  # as Megatron has them, but for momentum, which its groups tell
OTHER = {**CONFIGURED, "nesterov": True, "extra_scale_factor": 0.5}
TRAINED = "param group 0 was trained with nesterov False (here True), extra_scale_factor 1.0 (here 0.5) where it comes "
LACKS = "does not fit a rule of this package: the checkpoint's arguments lack muon_nesterov"
NO_ADAM = "param group {} does not fit a rule of this package: expected decoupled"
# What is left out of the arguments; Adam's options; what is configured here; Muon's options then; what is said
SAID: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    ("muon_use_nesterov", {}, CONFIGURED, {"momentum": 0.9}, [LACKS]),
    ("", {}, OTHER, {**OTHER, "momentum": 0.9}, [f"/step: {TRAINED}from, and continues with the options configured"]),
    (
        *("", {"decoupled_weight_decay": False, "weight_decay": 0.1}),
        *(CONFIGURED, {"momentum": 0.9}, [NO_ADAM.format(1), NO_ADAM.format(2)]),  # once of each
    ),
]


@pytest.mark.parametrize(("left_out", "of_adam", "configured", "muon", "said"), SAID)
def test_options_are_the_checkpoints_and_rank_0_says_what_is_not(
    ranks: RankPool,
    sources: dict[str, Source],
    tmp_path: Path,
    left_out: str,
    of_adam: dict[str, Any],
    configured: dict[str, Any],
    muon: dict[str, Any],
    said: list[str],
) -> None:
    """Also of parameters under other names than Megatron's."""
    found = formats.read(sources["muon"].folder)
    params = {f"wrapped.{name}": param for name, param in found.params.items()}
    arguments = {key: value for key, value in found.arguments.items() if key != left_out}
    groups = tuple({**group, **(of_adam if "betas" in group else {})} for group in found.groups)
    checkpoint = dataclasses.replace(found, params=params, groups=groups, arguments=arguments, names="mine")
    folder, pointers = tmp_path / "universal", {"latest_universal": "step"}
    write_folder(folder / "step", lambda made: universal_writer.write(checkpoint, made), beside=pointers)
    shapes = {f"wrapped.{name}": shape for name, shape in sources["muon"].shapes.items()}
    first, second = ranks.run(step_on_zero, str(folder), shapes, 1, ours(**configured))
    for of_rank in (first, second):
        (group,) = (group for group in of_rank["groups"] if group["rule"] == "muon")
        assert group.items() >= muon.items() and "momentum_beta" not in group
    assert second["said"] == [] and all(text.startswith(f"{folder}") for text in first["said"])
    assert [words in text for words, text in zip(said, first["said"], strict=True)] == [True] * len(said)


SCHEDULES = {
    "none": [],
    "torch": ["from its last_epoch 0, but the checkpoint was saved after 7 steps"],
    "deepspeed": ["set last_batch_iteration to 6 after loading"],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_is_not_loaded_is_told(ranks: RankPool, sources: dict[str, Source], schedule: str) -> None:
    source = sources["muon"]
    given = (str(source.universal), source.shapes, 1, ours(**CONFIGURED), None, schedule)
    first, second = ranks.run(step_on_zero, *given, load_lr_scheduler_states=False)
    assert second["said"] == []
    assert [words in said for words, said in zip(SCHEDULES[schedule], first["said"], strict=True)] in ([], [True])
    found = ranks.run(step_on_zero, *given, load_module_only=True)
    assert [of_rank["said"] for of_rank in found] == [[], []]
