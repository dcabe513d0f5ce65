"""Going on with ours, on every engine, where another optimizer or another form of momentum has come to."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations.deepspeed import migration
from lwopt_backend.integrations.deepspeed.zero import save_whole
from lwopt_backend.migration import change_momentum_form, from_checkpoint, load_named_state
from lwopt_backend.storage.owned_state import MASTER, state_pieces
from tests import test_owned_experts as experts
from tests import test_zero_moe as moe
from tests import test_zero_pipeline as pipelines
from tests.cells import cells
from tests.engines import ENGINES, OWNED, Alone, Cell, Engine, ExactLM, UnderDeepSpeed, running
from tests.fsdp2 import MATRIX_NAMES, layer_wise, named, shard, whole
from tests.migration import eager, entry
from tests.models import MATRICES, UnevenLM
from tests.on_ranks import on_ranks
from tests.owned import difference, optimizer_for, shares, train
from tests.ranks import RankPool
from tests.rule_steps import random
from tests.zero import (
    PRECISIONS,
    ROWS,
    Reference,
    config,
    engine_for,
    full_weights,
    largest_difference,
    newton_schulz_in_float32,
)
from tests.zero import train as train_engine

BEFORE, AFTER = range(3), range(3, 6)
Named = dict[str, dict[str, Tensor]]


def named_state(alone: Alone, **how: Any) -> Named:
    """Both of torch's optimizers."""
    (muon, adamw), (matrices, others) = alone.optimizers, alone.params
    found = from_checkpoint(muon.state_dict(), list(matrices), **how)
    return {**found, **from_checkpoint(adamw.state_dict(), list(others), source="torch.optim.AdamW")}


def train_alone(alone: Alone, steps: range, ranks: int = 1) -> None:
    for step in steps:
        alone.step(shares(step, ranks), ranks)


@contextlib.contextmanager
def moving(engine: str, matrix: str = "muon", **options: Any) -> Iterator[tuple[Engine, Alone]]:
    """An engine with the weights that one process has come to; all its ranks train on all rows."""
    alone, model = Alone(ExactLM(), "muon", "adamw"), ExactLM(seed=1)
    train_alone(alone, BEFORE)
    model.load_state_dict(alone.model.state_dict())
    with running(Cell(engine, matrix, alike=True, options=options), model) as made:
        yield made, alone


def load(engine: Engine, state: Named, **how: Any) -> list[str]:
    if isinstance(engine, UnderDeepSpeed):
        return migration.load_named_state(engine.made, state, **how)
    return load_named_state(engine.optimizer, state, **how)


def assert_equal(engine: Engine, alone: Alone, limit: float = 0.0) -> None:
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
    options = {"layout": layout} if engine in ("plain", *OWNED) else {}
    with moving(engine, **options) as (ours, alone):
        state, groups = named_state(alone), groups_of(ours)
        assert load(ours, state) == [] and groups_of(ours) == groups
        for of_name in state.values():  # it is the caller's again
            for tensor in of_name.values():
                tensor.zero_()
        if engine == "fsdp2":
            assert_parts_alone_are_kept(ours.optimizer)
        ours.train(AFTER)
        train_alone(alone, AFTER)
        assert_equal(ours, alone)


def assert_parts_alone_are_kept(optimizer: Any) -> None:
    for state in optimizer.state.values():
        for key, tensor in state.items():
            assert isinstance(tensor, DTensor) == (key != "step")
            part = tensor if key == "step" else tensor.to_local()
            assert part.untyped_storage().nbytes() == part.nbytes, "the whole tensor is kept in memory"


@cells(engine=["plain", "zero 0", "zero 1", "zero 2", "zero 3", "owned 2", "fsdp2"])
@on_ranks()
def test_a_part_is_loaded_between_steps(engine: str) -> None:
    """The run that goes on is this engine's own, but for the momentum of one matrix."""
    with moving(engine) as (ours, alone):
        load(ours, named_state(alone))
        ours.train(range(3, 4))
        train_alone(alone, range(3, 4))
        matrix = "layers.2.weight"
        alone.optimizers[0].state[alone.model.get_parameter(matrix)]["momentum_buffer"].mul_(-2)
        state = named_state(alone)
        part = {matrix: state[matrix], "nowhere": state[matrix]}
        assert sorted(load(ours, part, strict=False)) == sorted(set(state) - {matrix})
        ours.train(range(4, 6))
        train_alone(alone, range(4, 6))
        assert_equal(ours, alone)


# What does not fit


def spoil(state: Named, what: str) -> None:
    if what == "unknown":
        state["layers.0.wait"] = state["layers.0.weight"]
    elif what == "missing":
        del state["layers.5.weight"]
    elif what == "keys":
        state["lm_head.weight"] = {"momentum_buffer": torch.zeros(37, 24)}
    elif what == "shape":
        state["layers.0.weight"] = {"momentum_buffer": torch.zeros(24, 63)}
    elif what == "counters":
        state["lm_head.weight"]["step"] = torch.tensor(9.0)


WRONG = {
    "unknown": "no parameter 'layers.0.wait' is trained here; did you mean 'layers.0.weight'?",
    "missing": "there is no state of parameter 'layers.5.weight'; with strict=False it keeps what it has",
    "keys": "parameter 'lm_head.weight', which 'adamw' trains: expected ['exp_avg', 'exp_avg_sq', 'step'], found "
    "['momentum_buffer']; if another rule trained it, let the same rule train it here, with include or exclude",
    "shape": "parameter 'layers.0.weight', which 'muon' trains, 'momentum_buffer': expected shape (63, 24), found "
    "(24, 63)",
}
COUNTERS = "as one tensor with one 'step'; expected the same of all"  # under DeepSpeed


def refused(engine: Engine, state: Named) -> str:
    with pytest.raises(ValueError) as error:
        load(engine, state)
    assert str(error.value).startswith("load_named_state: ")
    return str(error.value)


@cells(engine=["plain", "zero 0", "zero 2", "zero 3", "fsdp2"])
@on_ranks()
def test_what_does_not_fit_is_an_error_on_all_ranks_and_changes_nothing(engine: str) -> None:
    with moving(engine) as (ours, alone):
        load(ours, named_state(alone))
        for what, message in (WRONG if engine in ("plain", "fsdp2") else {**WRONG, "counters": COUNTERS}).items():
            state = named_state(alone)
            spoil(state, what)
            assert message in refused(ours, state)
        ours.train(AFTER)
        train_alone(alone, AFTER)
        assert_equal(ours, alone)


@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
@on_ranks(2)
def test_state_that_owners_keep_is_not_taken(engine: str) -> None:
    with moving(engine, "normuon") as (ours, alone):
        assert "which 'normuon' trains: this rule keeps state at the matrix's owner" in refused(
            ours, named_state(alone)
        )


@pytest.mark.parametrize(("engine", "what"), [("plain", "missing"), ("plain", "shape"), ("fsdp2", "shape")])
@on_ranks(2)
def test_what_one_rank_is_given_wrong_is_an_error_on_all(engine: str, what: str) -> None:
    with moving(engine) as (ours, alone):
        state = named_state(alone)
        if dist.get_rank() == 1:
            spoil(state, what)
        with pytest.raises(Exception) as error:
            load(ours, state)
        assert WRONG[what] in str(error.value)
        assert dist.get_rank() == 1 or "rank 1 failed with" in str(error.value)


@on_ranks(2)
def test_ranks_have_to_be_given_the_same() -> None:
    with moving("plain") as (ours, alone):
        state = named_state(alone)
        if dist.get_rank() == 1:
            del state["gate.weight"]
        with pytest.raises(Exception, match="^load_named_state: .*gate.weight") as error:
            load(ours, state, strict=False)
        assert type(error.value).__name__ == "RanksDisagree"


@pytest.mark.parametrize("function", [lambda o: load_named_state(o, {}), lambda o: change_momentum_form(o, "sum")])
def test_other_optimizers_are_refused(function: Callable[[Any], Any]) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(TypeError, match="expected a LayerWiseOptimizer, found SGD; of DeepSpeed give the engine"):
        function(other)


@on_ranks(2)
def test_another_engine_is_refused() -> None:
    settings = {**config(0), "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    expected = "expected a DeepSpeed engine whose optimizer is LayerWise or LayerWiseMuon, found DeepSpeedEngine"
    with engine_for(settings) as engine, pytest.raises(TypeError, match=expected):
        migration.load_named_state(engine, {})


@on_ranks(2)
def test_sharded_state_is_refused() -> None:
    """torch.optim.Muon on FSDP2 has DTensors."""
    params = dict(named(shard("rows", "fp32").model))
    muon = torch.optim.Muon([("layers.0.weight", params["layers.0.weight"])])
    params["layers.0.weight"].grad = torch.zeros_like(params["layers.0.weight"])
    muon.step()
    expected = "'momentum_buffer' is a DTensor, of which every rank has a part; save it whole"
    with pytest.raises(ValueError, match=expected):
        from_checkpoint(muon.state_dict())


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


def shapes_of(params: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in params.items()}


@cells(stage=[1, 2, 3], precision=["fp32", "bf16", "bf16+fp32"])
@on_ranks()
def test_deepspeed_sees_what_was_loaded(stage: int, precision: str) -> None:
    with engine_for(config(stage, rows=ROWS) | PRECISIONS[precision]) as engine:
        params = dict(engine.module.named_parameters())
        state = numbers_for(shapes_of(params), MATRICES.__contains__)
        migration.load_named_state(engine, state)
        for name, of_name in state.items():
            for key in of_name.keys() - {"step"}:
                assert torch.equal(safe_get_full_optimizer_state(params[name], key), of_name[key]), (name, key)


def pieces(optimizer: LayerWiseOptimizer) -> Iterator[tuple[str, Any, str, Tensor]]:
    for piece in state_pieces(optimizer.core):
        for key, tensor in piece.tensors.items():
            yield optimizer.core.members[piece.member].name, piece, key, tensor


def assert_pieces_of(state: Named, optimizer: LayerWiseOptimizer) -> None:
    for name, piece, key, tensor in pieces(optimizer):
        if key != MASTER:
            value = state[name][key]
            assert torch.equal(tensor, value.reshape(-1)[piece.start : piece.stop] if value.ndim else value), name


@on_ranks(4)
def test_ranks_take_the_experts_that_they_have() -> None:
    """Every rank is given all experts and has two."""
    model, shared = experts.sharded()
    optimizer = experts.optimizer_for(model, expert_params=["experts.*"], expert_process_group=shared)
    shapes = shapes_of(dict(experts.MoE().named_parameters()))
    state = numbers_for(shapes, lambda name: len(shapes[name]) == 2)
    assert load_named_state(optimizer, state) == []
    assert_pieces_of(state, optimizer)


@on_ranks(2)
def test_masters_of_16_bit_parameters_stay() -> None:
    """They are weights."""
    model = UnevenLM().to(torch.bfloat16)
    optimizer = optimizer_for(model)
    state = numbers_for(shapes_of(dict(model.named_parameters())), MATRICES.__contains__)
    before = [tensor.clone() for *_, key, tensor in pieces(optimizer) if key == MASTER]
    load_named_state(optimizer, state)
    after = [tensor for *_, key, tensor in pieces(optimizer) if key == MASTER]
    assert before and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_pieces_of(state, optimizer)


@on_ranks(2)
def test_state_on_fsdp2_keeps_its_dtype() -> None:
    """State that is kept in bfloat16 is rounded; the counter is not."""
    params = dict(named(model := shard("rows", "bf16 parameters").model))
    optimizer = layer_wise(model)
    state = numbers_for(shapes_of(params), MATRIX_NAMES.__contains__)
    load_named_state(optimizer, state)
    assert sum(map(len, state.values())) == 4 + 3 * 7
    for name, of_name in state.items():
        for key, value in of_name.items():
            kept = value.to(torch.float32 if key == "step" else torch.bfloat16)
            assert torch.equal(whole(optimizer.state[params[name]][key]), kept), (name, key)


@on_ranks(4)
def test_experts_under_one_name_are_refused_on_fsdp2() -> None:
    model = shard("expert parallel", "fp32").model
    state = numbers_for(shapes_of(dict(named(model))), MATRIX_NAMES.__contains__)
    with pytest.raises(Exception, match="ranks have different parameters \\(experts\\) under the same names"):
        load_named_state(layer_wise(model), state)


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Four ranks of this file's own: DeepSpeed keeps groups of experts and pipelines in globals of the process."""
    pool = RankPool(4)
    yield pool
    pool.remove()


def load_experts_under_deepspeed() -> None:
    with engine_for(moe.settings_for(2), moe.Mixture()) as engine:
        migration.load_named_state(engine, {}, strict=False)


def test_experts_under_one_name_are_refused_under_deepspeed(own_ranks: RankPool) -> None:
    for error in own_ranks.errors(load_experts_under_deepspeed):
        assert "ranks have different experts under the same names" in error


def load_into_a_pipeline(precision: str) -> None:
    """Every stage is given the whole model's state; its first rank has what is its own, at stage 0 of ZeRO."""
    with engine_for(pipelines.settings_for(precision), pipelines.pipeline(pipelines.untied())) as engine:
        mine = shapes_of(dict(engine.module.named_parameters()))
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, mine)
        shapes = {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}
        state = numbers_for(shapes, lambda name: name.endswith(pipelines.MATRICES))
        assert migration.load_named_state(engine, state) == []
        binding = engine.basic_optimizer._binding
        names = [param.name for plan in binding.plans for param in plan.params]
        saved = {
            names[place]: of_place for place, of_place in save_whole(binding, engine.basic_optimizer.state).items()
        }
        found = binding.ranks[0].gather_objects(saved)[0]
        assert found.keys() == mine.keys()
        for name in mine:
            assert all(torch.equal(found[name][key].view(-1), t.view(-1)) for key, t in state[name].items()), name


def test_every_stage_of_a_pipeline_takes_its_own(own_ranks: RankPool) -> None:
    own_ranks.run(load_into_a_pipeline, "fp32, stage 0")


# From DeepSpeed's own Muon


def deepspeeds_muon(stage: int) -> dict[str, Any]:
    settings = config(stage, rows=ROWS)
    settings["optimizer"] = {"type": "Muon", "params": {"torch_adam": True}}
    settings["zero_optimization"]["reduce_scatter"] = False  # it refuses stage 3 with it
    return settings


@cells(stage=[1, 2, 3])
@on_ranks()
def test_deepspeeds_muon_clips_updates(stage: int) -> None:
    """Which the page says has no counterpart: the norm is near the root of the sum of all matrices' shorter sides."""
    with eager(), engine_for(deepspeeds_muon(stage)) as engine:
        train_engine(engine, 1, same_rows=True)
        assert float(engine.get_global_grad_norm()) > 5 * Reference().train(1)[0]


@pytest.mark.parametrize(("stage", "storage"), [(0, "zero"), (2, "zero"), (3, "zero"), (2, "owned")], ids=str)
@on_ranks(2)
def test_deepspeeds_own_muon_goes_on_with_ours(stage: int, storage: str) -> None:
    """By the settings of the page. In fp32 to its rounding, which steps of 0.02 and Adam on gradients of nearly zero
    enlarge."""
    with eager(), engine_for(deepspeeds_muon(0)) as engine:
        train_engine(engine, BEFORE, same_rows=True)
        names = {id(param): name for name, param in engine.module.named_parameters()}
        order = [names[id(param)] for group in engine.optimizer.param_groups for param in group["params"]]
        state = from_checkpoint(engine.optimizer.state_dict(), order, source="deepspeed")
        model = UnevenLM()
        model.load_state_dict(engine.module.state_dict())
        train_engine(engine, AFTER, same_rows=True)
        expected = copy.deepcopy(engine.module)
    settings = config(stage, rows=ROWS)
    settings["optimizer"] = copy.deepcopy(entry("deepspeed"))
    settings["optimizer"]["params"].update(report=False, storage=storage)
    with engine_for(settings, model) as engine:
        migration.load_named_state(engine, state)
        train_engine(engine, AFTER, same_rows=True)
        assert largest_difference(full_weights(engine), expected) < 1e-4


# The form of momentum. Newton-Schulz is in fp32, where both forms differ by its rounding only


def forms_of(optimizer: Any) -> list[str | None]:
    return [group.get("momentum_form") for group in optimizer.param_groups]


@cells(engine=["plain", "fsdp2", "zero 0", "zero 1", "zero 2", "zero 3", "owned 2"])
@on_ranks()
def test_the_form_can_change_in_the_middle_of_a_run(engine: str) -> None:
    alone = Alone(ExactLM(), "gram", "adamw")
    train_alone(alone, range(6))
    with running(Cell(engine, "gram", alike=True), ExactLM()) as ours:
        ours.train(BEFORE)
        if isinstance(ours, UnderDeepSpeed):
            migration.change_momentum_form(ours.made, "sum")
            assert forms_of(ours.made.basic_optimizer) == ["sum", None]
        else:
            change_momentum_form(ours.optimizer, "sum")
            assert forms_of(ours.optimizer) == ["sum", None]
        ours.train(AFTER)
        assert_equal(ours, alone, limit=2e-5)


@pytest.mark.parametrize("form", ["sum", "ema"])
@on_ranks(2)
def test_another_optimizers_state_goes_on_in_the_form_that_it_is_converted_to(form: str) -> None:
    """And not in the other."""
    alone, model, ranks = Alone(ExactLM(), "muon", "adamw"), ExactLM(seed=1), dist.get_world_size()
    with newton_schulz_in_float32():
        train_alone(alone, BEFORE, ranks)
        optimizer = optimizer_for(model, momentum_form="sum", ns_dtype="float32")
        model.load_state_dict(alone.model.state_dict())
        load_named_state(optimizer, named_state(alone, momentum_form=form))
        train(model, optimizer, AFTER)
        train_alone(alone, AFTER, ranks)
    off = difference(model, alone.model)
    assert off < 2e-5 if form == "sum" else off > 1e-3


@on_ranks(2)
def test_a_checkpoint_brings_its_form_with_it_and_then_it_can_be_changed(tmp_path: Path) -> None:
    model, other = ExactLM(), ExactLM(seed=1)
    optimizer = optimizer_for(model, ns_dtype="float32")
    train(model, optimizer, BEFORE)
    optimizer.save_state_dict(tmp_path)
    made_for_sums = optimizer_for(other, ns_dtype="float32", momentum_form="sum")
    made_for_sums.load_state_dict_from(tmp_path)
    assert forms_of(made_for_sums) == ["ema", None]
    change_momentum_form(made_for_sums, "sum")
    assert forms_of(made_for_sums) == ["sum", None]
    train(model, optimizer, AFTER)
    train(other, made_for_sums, AFTER)
    assert difference(model, other) < 2e-5
