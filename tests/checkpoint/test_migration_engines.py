"""Continuing with this package, on every engine, where another optimizer or another form of momentum has come to."""

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from lwopt_backend.checkpoint.deepspeed.files import renumbered
from lwopt_backend.engines.buffers.state import state_pieces
from lwopt_backend.integrations.deepspeed.engine import first_experts
from lwopt_backend.migration import change_momentum_form, from_checkpoint, load_named_state
from tests.engines.plain import test_experts as experts
from tests.engines.zero import test_experts as moe
from tests.engines.zero import test_pipeline as pipelines
from tests.support import zero
from tests.support.cells import cells
from tests.support.checkpoint_contents import same
from tests.support.checkpoint_engines import full_weights_of
from tests.support.command_line import succeeds
from tests.support.engines import ENGINES, OWNED, Alone, Cell, Engine, ExactLM, UnderDeepSpeed, running
from tests.support.fsdp2 import MATRIX_NAMES, layer_wise, named, shard, whole
from tests.support.migration import eager, entry
from tests.support.models import MATRICES, UnevenLM, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import shares
from tests.support.ranks import RankPool, gathered
from tests.support.references import random

BEFORE, AFTER = range(3), range(3, 6)
Named = dict[str, dict[str, Tensor]]


def named_state(alone: Alone) -> Named:
    (muon, adamw), (matrices, others) = alone.optimizers, alone.params
    found = from_checkpoint(muon.state_dict(), list(matrices))
    return {**found, **from_checkpoint(adamw.state_dict(), list(others), source="torch.optim.AdamW")}


def train_alone(alone: Alone, steps: range) -> None:
    for step in steps:
        alone.step(shares(step, 1), 1)


@contextlib.contextmanager
def moving(engine: str, matrix: str = "muon", **options: Any) -> Iterator[tuple[Engine, Alone]]:
    """An engine with the weights that one process has come to; all its ranks train on all rows."""
    alone, model = Alone(ExactLM(), "muon", "adamw"), ExactLM(seed=1)
    train_alone(alone, BEFORE)
    model.load_state_dict(alone.model.state_dict())
    with running(Cell(engine, matrix, alike=True, options=options), model) as made:
        yield made, alone


def target_of(engine: Engine) -> Any:
    return engine.made if isinstance(engine, UnderDeepSpeed) else engine.optimizer


def load(engine: Engine, state: Named, **how: Any) -> list[str]:
    return load_named_state(target_of(engine), state, **how)


def go_on(engine: Engine, alone: Alone, steps: range, limit: float = 0.0) -> None:
    engine.train(steps)
    train_alone(alone, steps)
    assert largest_difference(engine.weights(), alone.model) <= limit


def groups_of(engine: Engine) -> list[dict[str, Any]]:
    return copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups])


@cells(
    lambda ranks, engine, layout=None: layout in (None, "padded") or engine in ("plain", *OWNED),
    ranks=[2, 4],
    engine=ENGINES,
    layout=["padded", "compact"],
)
@on_ranks()
def test_an_engine_goes_on_bit_by_bit(engine: str, layout: str) -> None:
    """Also where later a part is loaded between steps: the momentum of one matrix."""
    options = {"layout": layout} if engine in ("plain", *OWNED) else {}
    with moving(engine, **options) as (ours, alone):
        state, groups = named_state(alone), groups_of(ours)
        assert load(ours, state) == [] and groups_of(ours) == groups
        for of_name in state.values():  # it is the caller's again
            for tensor in of_name.values():
                tensor.zero_()
        if engine == "fsdp2":
            assert_parts_alone_are_kept(ours.optimizer)
        go_on(ours, alone, AFTER)
        matrix = "layers.2.weight"
        alone.optimizers[0].state[alone.model.get_parameter(matrix)]["momentum_buffer"].mul_(-2)
        state = named_state(alone)
        part = {matrix: state[matrix], "nowhere": state[matrix]}
        assert sorted(load(ours, part, strict=False)) == sorted(set(state) - {matrix})
        go_on(ours, alone, range(6, 8))


def assert_parts_alone_are_kept(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key, tensor in state.items():
            assert isinstance(tensor, DTensor) == (key != "step")
            part = tensor if key == "step" else tensor.to_local()
            assert part.untyped_storage().nbytes() == part.nbytes, "the whole tensor is kept in memory"


# What does not fit
OTHER, TURNED = torch.zeros(37, 24), torch.zeros(24, 63)
ADAMS = {"exp_avg": OTHER, "exp_avg_sq": OTHER}
RULE = "; train it with the rule of the checkpoint, by include, exclude or overrides"
EXPECTED = "'lm_head.weight': expected state ['exp_avg', 'exp_avg_sq', 'step'], the checkpoint has "
SHAPE = "'layers.0.weight': expected 'momentum_buffer' as a tensor of shape (63, 24), the checkpoint has a tensor of "
WRONG: dict[str, tuple[dict[str, Any], str]] = {  # what takes a state's place, or None, and what is said
    "unknown": ({"layers.0.wait": {}}, "'layers.0.wait' is in the checkpoint, but not trained here; here"),
    "missing": ({"layers.5.weight": None}, "parameter 'layers.5.weight' is trained here, but not in the checkpoint"),
    "keys": ({"lm_head.weight": {"momentum_buffer": OTHER}}, f"{EXPECTED}['momentum_buffer']{RULE}"),
    "shape": ({"layers.0.weight": {"momentum_buffer": TURNED}}, SHAPE),
    "counters": ({"lm_head.weight": {**ADAMS, "step": torch.tensor(9.0)}}, "expected counters {'step': "),  # of ZeRO
}
BY_NAME = "expected state by parameter name, as from_checkpoint returns it; found a "
SILENT: list[tuple[Any, str]] = [  # that could load as something else, or not at all
    ({"module.lm_head.weight": {}}, "none of the 1 names is trained, such as 'module.lm_head.weight'; did you mean"),
    ({"lm_head.weight": {**ADAMS, "step": torch.tensor(1.5)}}, "'step': expected a number of steps, found 1.5"),
    (
        {"lm_head.weight": {"exp_avg": OTHER * 1j}},
        "expected a whole tensor of real numbers, found torch.complex64 on cpu",
    ),
    ({"lm_head.weight": {"exp_avg": OTHER.to("meta")}}, "real numbers, found torch.float32 on meta"),
    ({"lm_head.weight": {"exp_avg": [1.0]}}, "'exp_avg': expected a tensor, found list"),
    ({"lm_head.weight": None}, "expected tensors by key under the parameter's name, found NoneType"),
    ({"state": {}, "param_groups": []}, f"{BY_NAME}state"),
    ([], f"{BY_NAME}list"),
]


def spoiled(state: Named, what: str) -> Named:
    return {name: found for name, found in {**state, **WRONG[what][0]}.items() if found is not None}


def parts_of(engine: Engine) -> Any:
    """What the engine's own state dict has of one parameter."""
    return {"lm_head.weight": next(iter(engine.optimizer.state_dict()["state"].values()))}


def refused(engine: Engine, state: Any, **how: Any) -> str:
    with pytest.raises(Exception) as error:
        load(engine, state, **how)
    return f"{type(error.value).__name__}: {error.value}"


@cells(engine=["plain", "zero 0", "zero 2", "zero 3", "fsdp2"])
@on_ranks()
def test_migrated_state_that_does_not_fit_changes_nothing(engine: str) -> None:
    """It is an error on all ranks."""
    with moving(engine) as (ours, alone):
        load(ours, named_state(alone))
        for what, (_, message) in WRONG.items():
            if what != "counters" or isinstance(ours, UnderDeepSpeed):
                error = refused(ours, spoiled(named_state(alone), what))
                assert error.startswith("ValueError: load_named_state: ") and message in error
        for given, message in SILENT:
            assert message in refused(ours, given, strict=False)
        if engine in ("plain", "fsdp2"):
            assert "found a DTensor, or another part" in refused(ours, parts_of(ours), strict=False)
        go_on(ours, alone, AFTER)


@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
@on_ranks(2)
def test_state_that_owners_keep_is_not_taken(engine: str) -> None:
    with moving(engine, "normuon") as (ours, alone):
        said = "which 'normuon' trains: expected a rule without owner state"
        assert said in refused(ours, named_state(alone))


@pytest.mark.parametrize(
    ("engine", "what", "strict"), [("plain", "missing", True), ("fsdp2", "shape", True), ("plain", "missing", False)]
)
@on_ranks(2)
def test_what_one_rank_is_given_otherwise_is_an_error_on_all(engine: str, what: str, strict: bool) -> None:
    with moving(engine) as (ours, alone):
        state = named_state(alone)
        error = refused(ours, spoiled(state, what) if dist.get_rank() == 1 else state, strict=strict)
        if strict:
            assert WRONG[what][1] in error and (dist.get_rank() == 1 or "rank 1 failed with" in error)
        else:
            assert re.match("RanksDisagree: load_named_state: .*layers.5.weight", error)


@pytest.mark.parametrize(("function", "given"), [(load_named_state, {}), (change_momentum_form, "sum")])
@on_ranks(2)
def test_other_optimizers_and_engines_are_refused(function: Callable[..., Any], given: Any) -> None:
    expected = (
        "expected a LayerWiseOptimizer, or a DeepSpeed engine whose optimizer is LayerWise or LayerWiseMuon, found "
    )
    with pytest.raises(TypeError, match=f"{expected}SGD; of ModuleOptimizers"):
        function(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), given)
    settings = {**zero.config(0), "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    with zero.engine_for(settings) as engine, pytest.raises(TypeError, match=f"{expected}DeepSpeedEngine with AdamW"):
        function(engine, given)


@on_ranks(2)
def test_sharded_state_is_refused() -> None:
    """torch.optim.Muon on FSDP2 has DTensors."""
    params = dict(named(shard("rows", "fp32").model))
    muon = torch.optim.Muon([("layers.0.weight", params["layers.0.weight"])])
    params["layers.0.weight"].grad = torch.zeros_like(params["layers.0.weight"])
    muon.step()
    expected = "'momentum_buffer': expected a whole tensor, found a DTensor"
    with pytest.raises(ValueError, match=expected):
        from_checkpoint(muon.state_dict())


@on_ranks(2)
def test_momentum_saved_by_another_rank_is_read() -> None:
    """A matrix whose momentum another rank saved is read from all ranks' files. pytorch_optimizer's DistributedMuon, as
    Keller Jordan's, keeps a matrix's momentum on one rank."""
    matrices, vector = [nn.Parameter(random((6, 4), n)) for n in range(3)], nn.Parameter(random((4,), 3))
    groups = [{"params": matrices, "use_muon": True}, {"params": [vector], "use_muon": False}]
    made = [cls(copy.deepcopy(groups)) for cls in (pytorch_optimizer.DistributedMuon, pytorch_optimizer.Muon)]
    for step in range(2):
        for optimizer in made:
            for place, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
                param.grad = random(tuple(param.shape), 10 * step + place)
            optimizer.step()
    names = ["a", "b", "c", "bias"]
    with pytest.raises(ValueError, match="parameter '[ab]' has no state. .* is in another rank's: pass a list of all"):
        from_checkpoint(made[0].state_dict(), names, source="pytorch_optimizer")
    found = from_checkpoint(gathered(made[0].state_dict()), names, source="pytorch_optimizer")
    torch.testing.assert_close(found, from_checkpoint(made[1].state_dict(), names, source="pytorch_optimizer"))


# Precisions, experts, pipelines
def numbers_for(shapes: dict[str, tuple[int, ...]], matrices: Callable[[str], bool]) -> Named:
    """A state of Muon and AdamW with other numbers for every parameter."""
    state = {}
    for seed, (name, shape) in enumerate(sorted(shapes.items())):
        keys = ["momentum_buffer"] if matrices(name) else ["exp_avg", "exp_avg_sq"]
        state[name] = {key: random(shape, 10 * seed + place) for place, key in enumerate(keys)}
        if not matrices(name):
            state[name]["step"] = torch.tensor(7.0)
    return state


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in named(model)}


def assert_deepspeed_takes(engine: Any, state: Named, name_of: Callable[[str], str] = str) -> None:
    """And leaves fp32 masters of 16-bit parameters, which are weights, as they are."""
    masters = full_weights_of(engine)
    assert load_named_state(engine, state) == []
    for name, param in engine.module.named_parameters():
        name = name_of(name)
        for key in state[name].keys() - {"step"}:
            assert torch.equal(safe_get_full_optimizer_state(param, key), state[name][key]), (name, key)
    assert same(full_weights_of(engine), masters)


@cells(
    lambda storage, stage, **_: zero.there_is(storage, stage) and (storage, stage) != ("zero", 0),
    storage=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32"],
)
@on_ranks()
def test_deepspeed_sees_what_was_loaded(storage: str, stage: int, precision: str) -> None:
    with zero.engine_for(zero.settings_for(storage, stage, precision)) as engine:
        assert_deepspeed_takes(engine, numbers_for(shapes_of(engine.module), MATRICES.__contains__))


@on_ranks(4)
def test_ranks_take_the_experts_that_they_have() -> None:
    """Every rank is given all experts and has two."""
    model, shared = experts.sharded()
    optimizer = experts.optimizer_in(model, expert_params=["experts.*"], expert_process_group=shared)
    shapes = shapes_of(experts.MoE())
    state = numbers_for(shapes, lambda name: len(shapes[name]) == 2)
    assert load_named_state(optimizer, state) == []
    for piece in state_pieces(optimizer.core):
        name = optimizer.core.members[piece.member].name
        for key, tensor in piece.tensors.items():
            value = state[name][key]
            assert torch.equal(tensor, value.reshape(-1)[piece.start : piece.stop] if value.ndim else value), name


@on_ranks(2)
def test_state_on_fsdp2_keeps_its_dtype() -> None:
    """State that is kept in bfloat16 is rounded; the counter is not."""
    model = shard("rows", "bf16 parameters").model
    optimizer, state = layer_wise(model), numbers_for(shapes_of(model), MATRIX_NAMES.__contains__)
    load_named_state(optimizer, state)
    for name, param in named(model):
        for key, value in state[name].items():
            kept = value.to(torch.float32 if key == "step" else torch.bfloat16)
            assert torch.equal(whole(optimizer.state[param][key]), kept), (name, key)


@on_ranks(4)
def test_experts_under_one_name_are_refused_on_fsdp2() -> None:
    """Also if their values are equal now; copies are not refused."""
    for sharding in ("expert parallel", "tensor parallel"):
        sharded = shard(sharding, "fp32")
        state = numbers_for(shapes_of(sharded.model), MATRIX_NAMES.__contains__)
        with pytest.raises(Exception, match="ranks have different parameters \\(experts\\) under the same names"):
            load_named_state(layer_wise(sharded.model), state)
    assert load_named_state(layer_wise(sharded.model, **sharded.options), state) == []


@pytest.mark.usefixtures("ranks_to_spoil")
@on_ranks(4)
def test_every_rank_under_deepspeed_takes_its_own_experts() -> None:
    with zero.engine_for(moe.settings_for(2), moe.Mixture()) as engine:
        name_of = functools.partial(renumbered, first=first_experts(engine))
        mine = {name_of(name): tuple(param.shape) for name, param in engine.module.named_parameters()}
        state = numbers_for(
            {name: shape for of_rank in gathered(mine) for name, shape in of_rank.items()},
            lambda name: name.endswith("weight") and not name.startswith(("embedding", "lm_head")),
        )
        assert_deepspeed_takes(engine, state, name_of)


@pytest.mark.usefixtures("ranks_to_spoil")
@on_ranks(4)
def test_every_stage_of_a_pipeline_takes_its_own() -> None:
    shapes = shapes_of(pipelines.Whole(pipelines.UNTIED))
    state = numbers_for(shapes, lambda name: name.endswith(pipelines.MATRICES))
    with zero.engine_for(pipelines.settings_for("fp32, stage 1"), pipelines.pipeline(pipelines.UNTIED)) as engine:
        assert_deepspeed_takes(engine, state)


# From DeepSpeed's own Muon
@pytest.mark.parametrize(("stage", "storage"), [(0, "zero"), (3, "zero"), (2, "owned")], ids=str)
@on_ranks(2)
def test_deepspeeds_own_muon_goes_on_with_ours(stage: int, storage: str) -> None:
    """By the settings of the page. In fp32 to its rounding, which steps of 0.02 and Adam on gradients of nearly zero
    enlarge."""
    theirs = {**zero.config(0, rows=zero.ROWS), "optimizer": {"type": "Muon", "params": {"torch_adam": True}}}
    with eager(), zero.engine_for(theirs) as engine:
        zero.train(engine, BEFORE, same_rows=True)
        names = {id(param): name for name, param in engine.module.named_parameters()}
        order = [names[id(param)] for group in engine.optimizer.param_groups for param in group["params"]]
        state = from_checkpoint(engine.optimizer.state_dict(), order, source="deepspeed")
        model = UnevenLM()
        model.load_state_dict(engine.module.state_dict())
        zero.train(engine, AFTER, same_rows=True)
        expected = copy.deepcopy(engine.module)
    settings = zero.config(stage, rows=zero.ROWS)
    settings["optimizer"] = copy.deepcopy(entry("deepspeed"))
    settings["optimizer"]["params"].update(report=False, storage=storage)
    with zero.engine_for(settings, model) as engine:
        load_named_state(engine, state)
        zero.train(engine, AFTER, same_rows=True)
        assert largest_difference(zero.full_weights(engine), expected) < 1e-4


# The form of momentum. Newton-Schulz is in fp32, where both forms differ by its rounding only; and nothing rounds the
# gradients, as ExactLM does: to one side here and there to the other
def forms_of(optimizer: Any) -> list[str | None]:
    return [group.get("momentum_form") for group in optimizer.param_groups]


@cells(engine=["plain", "fsdp2", "zero 0", "zero 1", "zero 2", "zero 3", "owned 2"])
@on_ranks()
def test_the_form_can_change_in_the_middle_of_a_run(engine: str) -> None:
    alone = Alone(UnevenLM(), "gram", "adamw")
    train_alone(alone, BEFORE)
    with running(Cell(engine, "gram", alike=True), UnevenLM()) as ours:
        ours.train(BEFORE)
        change_momentum_form(target_of(ours), "sum")
        assert forms_of(ours.optimizer) == ["sum", None]
        go_on(ours, alone, AFTER, limit=2e-5)


@on_ranks(2)
def test_checkpoint_brings_its_momentum_form(tmp_path: Path) -> None:
    """A checkpoint brings its form with it, and then it can be changed."""
    cell = Cell("plain", "gram")
    with running(cell, UnevenLM()) as saved, running(cell, UnevenLM(seed=1)) as loaded:
        saved.train(BEFORE)
        saved.save(str(tmp_path))
        change_momentum_form(loaded.optimizer, "sum")
        loaded.load(str(tmp_path))
        assert forms_of(loaded.optimizer) == ["ema", None]
        change_momentum_form(loaded.optimizer, "sum")
        assert forms_of(loaded.optimizer) == ["sum", None]
        saved.train(AFTER)
        loaded.train(AFTER)
        assert largest_difference(saved.weights(), loaded.model) < 2e-5


# A run of AdamW goes on with Muon


def saved_by_adamw(folder: str) -> None:
    """By torch's functions, and once more in a file."""
    model = ExactLM()
    adamw = torch.optim.AdamW(model.parameters())
    model(*shares(0, 1)[0]).backward()
    adamw.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, adamw)))
    dcp.save(state, checkpoint_id=folder)
    torch.save(state, f"{folder}.pt")


def goes_on_with_muon(engine: str, folder: str) -> tuple[str, dict[str, Tensor]]:
    """What a load of everything says, and the weights of two steps after one of the weights alone."""
    cell, state = Cell(engine, alike=True), torch.load(f"{folder}.pt")
    with running(cell, ExactLM(seed=5), converted=True) as made, pytest.raises(ValueError) as error:
        if engine == "fsdp2":
            set_optimizer_state_dict(made.model, made.optimizer, state["optimizer"])
        else:
            made.load(folder if engine == "plain" else f"{folder} universal")
    model = ExactLM(seed=5)
    if engine == "plain":
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    with running(cell, model, converted=True) as made:
        if engine == "fsdp2":
            set_model_state_dict(made.model, state["model"], options=StateDictOptions(full_state_dict=True))
        elif isinstance(made, UnderDeepSpeed):
            made.made.load_checkpoint(f"{folder} universal", load_optimizer_states=False)
        made.train(range(1, 3))
        return str(error.value), made.weights()


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "zero 0", "zero 1", "zero 2", "zero 3", "owned 1"])
def test_after_adamw_muon_begins_with_the_weights(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    """Where the optimizer is another one, the first remedy is to load the weights alone, which trains as a new run."""
    folder = tmp_path / "adamw"
    saved_by_adamw(str(folder))
    succeeds("convert", folder, f"{folder} universal", "--to", "universal")
    alone = Alone(ExactLM(), "muon", "adamw")
    alone.model.load_state_dict(torch.load(f"{folder}.pt")["model"])
    train_alone(alone, range(1, 3))
    for said, weights in ranks.run(goes_on_with_muon, engine, str(folder)):
        assert re.search("; load the (model's )?weights (alone|into the model)", said), said
        assert largest_difference(weights, alone.model) == 0.0
