"""Training under DeepSpeed as people write it equals torch.optim.Muon and AdamW on one process, bit for bit."""

import contextlib
import functools
import io
import re
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.logging import logger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lwopt_backend.engines.zero import replicated
from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from lwopt_backend.plan import MACHINES, FlatPartition
from lwopt_backend.plan.owners import modelled_time
from lwopt_backend.runtime.buffers import BucketBuffers
from lwopt_backend.runtime.step import MatrixStepper
from tests.support import zero
from tests.support.checkpoint_contents import same
from tests.support.checkpoint_engines import changed, snapshot
from tests.support.engines import ExactLM, exact
from tests.support.models import MATRICES, NORM_ROUNDING, UnevenLM, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.zero import (
    BF16,
    ROWS,
    Reference,
    config,
    engine_for,
    full_weights,
    own_settings,
    settings_for,
    train,
)

STEPS = 3
STORED = [("zero", 0), ("zero", 1), ("zero", 2), ("zero", 3), ("owned", 0), ("owned", 1), ("owned", 2)]
each_stored = pytest.mark.parametrize(("storage", "stage"), STORED)


@on_ranks(2)
def test_new_values_are_gathered_in_known_chunks() -> None:
    """New values are gathered in chunks whose contents are found once. At stage 0: to look for every parameter in every
    chunk took seconds a step."""
    with engine_for(settings_for("zero", 0)) as engine:
        train(engine, 2, same_rows=True)
        expected = full_weights(engine)
    with mock.patch.object(replicated, "GATHERED_NUMEL", 20), engine_for(settings_for("zero", 0)) as engine:
        train(engine, 1, same_rows=True)
        with mock.patch.object(FlatPartition, "fragments", side_effect=AssertionError("looked for")):
            train(engine, range(1, 2), same_rows=True)
        assert same(full_weights(engine), expected)


# Loops over the micro-batches of a step
def accumulate(engine: Any, *parts: Any) -> None:
    for rows in parts:
        engine.backward(engine(*rows))
        engine.step()


def evaluate(engine: Any, *parts: Any) -> None:
    """After every micro-batch, the last of which took a step: nothing may change."""
    for rows in parts:
        accumulate(engine, rows)
        before = snapshot(engine)
        engine.eval()
        with torch.no_grad():
            engine(*rows)
        engine.train()
        assert changed(snapshot(engine), before) == set()


def call_backward_of_the_loss(engine: Any, *parts: Any) -> None:
    for rows in parts:
        engine(*rows).backward()  # DeepSpeed divides by the accumulation steps
        engine.step()


def accumulate_unmanaged(engine: Any, *parts: Any) -> None:
    for rows in parts:
        engine.backward(engine(*rows) / len(parts))
    engine.step()


def accumulate_without_sync(engine: Any, first: Any, second: Any) -> None:
    with engine.no_sync():
        engine.backward(engine(*first) / 2)
    engine.backward(engine(*second) / 2)
    engine.step()


def compile_eagerly(engine: Any, *parts: Any) -> None:
    if not engine.is_compiled:
        engine.compile(backend="eager")
    accumulate(engine, *parts)
    assert engine.is_compiled


AT_ONCE = {"gradient_accumulation_steps": 1}
LOOPS = {
    "eval": (evaluate, {}),
    "loss.backward": (call_backward_of_the_loss, {}),
    "unmanaged": (accumulate_unmanaged, {**AT_ONCE, "managed_gradient_accumulation": False}),
    "no_sync": (accumulate_without_sync, AT_ONCE),
}
OF_OWNED = {
    "compiled": (compile_eagerly, {}),
    # Gradients that are divided before their sum, which is exact of halves, or reduced after the backward pass.
    "prescaled": (accumulate, {"prescale_gradients": True}),
    "predivided": (accumulate, {"gradient_predivide_factor": 2}),
    "no overlap": (accumulate, {"zero_optimization": {"overlap_comm": False}}),
}
NO_SYNC = "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"
BY_DEEPSPEED = {
    ("zero", 0, "loss.backward"): "Direct calls to tensor.backward() are not supported in this configuration",
    **{(*stored, "no_sync"): NO_SYNC for stored in STORED if stored[1] > 1},
}


@functools.cache
def on_one_process() -> Reference:
    single = Reference(ExactLM())
    single.train_on_all(2, parts=2)
    return single


@on_ranks(2)
@pytest.mark.parametrize(
    ("storage", "stage", "loop"),
    [
        *((*stored, loop) for stored in STORED for loop in LOOPS),
        *(("owned", stage, loop) for stage, loop in [(0, "prescaled"), (2, "predivided"), (1, "no overlap")]),
        pytest.param("owned", 2, "compiled", marks=pytest.mark.full),  # it imports the compiler
    ],
)
def test_training_loops_equal_a_single_process(storage: str, stage: int, loop: str) -> None:
    run, changes = {**LOOPS, **OF_OWNED}[loop]
    settings = own_settings(storage, stage, 2)
    options = settings["zero_optimization"] | changes.get("zero_optimization", {})
    refusal = BY_DEEPSPEED.get((storage, stage, loop))
    with engine_for(settings | changes | {"zero_optimization": options}, ExactLM()) as engine:
        if refusal is not None:
            with pytest.raises((RuntimeError, AssertionError), match=re.escape(refusal)):
                run(engine, *zero.own_rows(0, 2))
            return
        for step in range(2):
            run(engine, *zero.own_rows(step, 2))
        on_one_process().check(engine)


@on_ranks(2)
def test_owned_buckets_leave_in_backward_with_overlap_comm() -> None:
    """The embedding's gradient is the last. How many buckets have left by then?"""
    launch, left = BucketBuffers.launch, list[int]()
    with mock.patch.object(BucketBuffers, "launch", autospec=True, side_effect=launch) as launched:
        for given in ({}, {"overlap_comm": True}, {"overlap_comm": False}):
            settings = settings_for("owned", 2)
            settings["zero_optimization"] |= given
            with engine_for(settings) as engine:
                embedding, before = engine.module.embedding.weight, launched.call_count
                embedding.register_hook(lambda _, before=before: left.append(launched.call_count - before))
                train(engine, 1)
    assert left[0] == left[1] > 0 == left[2]


CPU = {"device": "cpu"}


# Models
class Peculiar(ExactLM):
    """A tied head, frozen layers, parameters of no elements, layers that are run as ``how`` says, and one that is not,
    but may be ``touched``, which makes its gradient zero."""

    def __init__(self, *, empty: bool = True, touched: bool = False) -> None:
        super().__init__(tied=True)
        self.how, self.touched = "once", touched
        for module in (self.layers[2], self.layers[4]):
            module.requires_grad_(False)
        self.unused = nn.Linear(24, 24)
        if empty:
            self.down, self.up = nn.Parameter(torch.zeros(24, 0)), nn.Parameter(torch.zeros(0, 24))
            self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if hasattr(self, "nothing"):
            x = x + x @ self.down @ self.up + self.nothing.sum()
        if self.touched:
            x = x + 0.0 * self.unused(x)
        x = x + self.inner(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    def inner(self, x: Tensor) -> Tensor:
        if self.how == "recomputed by DeepSpeed":
            if not deepspeed.checkpointing.is_configured():
                deepspeed.checkpointing.configure(None)
            return deepspeed.checkpointing.checkpoint(self.layers, x)
        if self.how.startswith("recomputed"):
            return checkpoint(self.layers, x, use_reentrant=self.how == "recomputed, reentrant")
        return self.layers(self.layers(x)) if self.how == "twice" else self.layers(x)


@on_ranks(2)
@each_stored
def test_models_equal_a_single_process(storage: str, stage: int) -> None:
    """ZeRO counts a missing gradient as zero, with weight decay."""
    empty = stage < 3
    single = Reference(Peculiar(empty=empty, touched=storage == "zero"), matrices=(*MATRICES, "unused.weight"))
    with engine_for(own_settings(storage, stage), Peculiar(empty=empty)) as engine:
        ways = ("once", "recomputed", "recomputed, reentrant", "recomputed by DeepSpeed", "twice")
        for step, how in enumerate(ways):
            engine.module.how, single.model.how = how, "twice" if how == "twice" else "once"
            train(engine, range(step, step + 1), rows=zero.OWN_ROWS)
            single.train_on_all(range(step, step + 1))
        optimizer = engine.basic_optimizer
        grouping = (optimizer._owned if storage == "owned" else optimizer._binding).grouping
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            ours = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        if storage == "owned":
            assert not any(optimizer.state.get(p, {}).get("step", 0) for p in engine.module.unused.parameters())
        else:
            planned = sum(plan.state_bytes[dist.get_rank()] for plan in optimizer._binding.plans)
            assert planned == sum(t.nbytes for state in optimizer.state.values() for t in state.values()) > 0
    for name, param in single.model.named_parameters():
        assert ours[name].shape == param.shape and torch.equal(ours[name], param), name
    assert torch.equal(ours["layers.2.weight"], ExactLM().layers[2].weight), "frozen"
    matrices = [route.name for route in grouping.routes if route.kind == "matrix"]
    assert matrices == ["layers.0.weight", "layers.5.weight", "gate.weight", "unused.weight"]


@on_ranks(2)
@each_stored
def test_a_group_of_frozen_parameters_trains_nothing(storage: str, stage: int) -> None:
    """At stages 1 and 2, DeepSpeed's own AdamW ends in an IndexError."""
    model, on_one = ExactLM(), ExactLM()
    groups = [{"params": [*model.layers[2].parameters()]}, {"params": [*model.embedding.parameters()]}]
    for trained in (model, on_one):
        trained.layers.requires_grad_(False)
    groups.append({"params": [param for param in model.parameters() if param.requires_grad][1:]})
    single = Reference(on_one)
    single.train_on_all(2)
    with engine_for(own_settings(storage, stage), model, model_parameters=groups) as engine:
        train(engine, 2, rows=zero.OWN_ROWS)
        with deepspeed.zero.GatheredParameters([*model.parameters()]):
            assert largest_difference(model, single.model) == 0.0


@on_ranks(2)
def test_parameters_without_elements_are_refused_at_stage_3() -> None:
    """ZeRO-3 takes what it never gathers for what it has not gathered yet."""
    with pytest.raises(ValueError, match="have no elements, which ZeRO-3 cannot gather"):
        zero.build(own_settings("zero", 3), Peculiar())


@on_ranks(2)
def test_parameters_made_under_zero_init() -> None:
    """They are empty when the engine sees them; what is gathered to be read is what was trained."""
    settings, single = config(3, rows=ROWS), Reference()
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = UnevenLM()
    assert {param.shape for param in model.parameters()} == {torch.Size([0])}
    single.train(STEPS)
    with engine_for(settings, model) as engine:
        train(engine, STEPS, same_rows=True)
        single.check(engine)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for name, param in model.named_parameters():
                assert torch.equal(param, single.model.get_parameter(name))
        routes = engine.basic_optimizer._binding.grouping.routes
        assert [route.name for route in routes if route.kind == "matrix"] == list(MATRICES)


class Forked(ExactLM):
    """Two ways of one shape, of which a rank takes one. ``touching`` the other gives it a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        exact(self)

    def forward(self, tokens: Tensor, targets: Tensor, way: int, touching: bool) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.ways[way](x)
        x = x + self.layers(x) * self.gated(x)
        loss = nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())
        return loss + 0.0 * sum(p.sum() for p in self.ways[1 - way].parameters()) if touching else loss


@on_ranks(2)
@pytest.mark.parametrize(
    ("storage", "stage", "touching", "mixed_up"),
    [*(("owned", stage, False, False) for stage in (0, 1, 2)), ("zero", 0, False, False), ("zero", 1, True, False)]
    + [("zero", 1, False, True), ("zero", 2, True, True)],
)
def test_unused_parameters_count_as_zero_gradients(storage: str, stage: int, touching: bool, mixed_up: bool) -> None:
    """What only some ranks use counts as a zero gradient of the others. ZeRO adds up buckets in the order in which each
    rank filled its own, with any optimizer, and says nothing. Should a row of those fail, DeepSpeed has learnt better,
    and the documentation must."""
    settings = settings_for(storage, stage, rows=ROWS // 2, ns_dtype="float32")
    single = Reference(Forked(), matrices=(*MATRICES, "ways.0.weight", "ways.1.weight"))
    with zero.newton_schulz_in_float32(), engine_for(settings, Forked()) as engine:
        for step in range(STEPS):
            shares = zero.batch_shares(step, 2)
            engine.backward(engine(*shares[dist.get_rank()], dist.get_rank(), touching))
            engine.step()
            single.step([(*rows, way, touching) for way, rows in enumerate(shares)], 2)
        difference = single.difference(engine)
        assert difference > 1e-3 if mixed_up else difference == 0.0


# Offloading
OFFLOADED: Any = [
    (1, {"offload_optimizer": CPU}, {}, 0.5),
    (2, {"offload_optimizer": CPU}, BF16, 0.0),
    (2, {"offload_optimizer": {**CPU, "pin_memory": True}}, {}, 0.0),
    (3, {"offload_param": CPU}, {}, 0.5),
    (3, {"offload_param": CPU, "offload_optimizer": CPU, "sub_group_size": 1000}, BF16, 0.0),
]


@on_ranks(2)
@pytest.mark.parametrize(("stage", "offload", "changes", "clip"), OFFLOADED, ids=str)
def test_offload_changes_no_bit_and_resumes(
    tmp_path: Path, stage: int, offload: dict[str, Any], changes: dict[str, Any], clip: float
) -> None:
    """DeepSpeed adds up the norm of offloaded gradients in another order; one process clips by that norm."""
    settings = config(stage, rows=ROWS // 4, accumulation=2, clip=clip, ns_dtype="float32") | changes
    single = Reference(ExactLM(), clip=clip)
    with engine_for(settings, ExactLM()) as engine:
        train(engine, 3)
        plain = full_weights(engine)
    settings["zero_optimization"] = {**settings["zero_optimization"], **offload}
    with engine_for(settings, ExactLM()) as engine, zero.newton_schulz_in_float32():
        for step in range(3):
            if step == 2:
                engine.save_checkpoint(tmp_path)
            train(engine, range(step, step + 1))
            if clip:
                (norm,) = single.step(zero.batch_shares(step, 4), 2, clips=zero.clips_of(engine))
                assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=NORM_ROUNDING)
        ours, states = full_weights(engine), engine.basic_optimizer.state.values()
        assert {tensor.device.type for state in states for tensor in state.values()} == {"cpu"}
        assert largest_difference(ours, single.model if clip else plain) == 0.0
    with engine_for(settings, ExactLM()) as engine:
        engine.load_checkpoint(tmp_path)
        train(engine, range(2, 3))
        resumed = full_weights(engine)
    assert same(ours, resumed)


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("ns_device", "expected"), [("auto", "meta meta True"), ("cpu", "meta cpu False")])
def test_matrices_are_computed_where_the_configuration_says(stage: int, ns_device: str, expected: str) -> None:
    """Where each stepper sends matrices and runs the rule, if the engine's device were an accelerator."""
    seen: list[str] = []
    original = MatrixStepper.__init__

    def note(self: MatrixStepper, *args: Any, **kwargs: Any) -> None:
        seen.append(f"{args[3]} {kwargs['rule_device']} {kwargs['batch_numel'] > 0}")
        original(self, *args, **kwargs)

    settings = config(stage, ns_device=ns_device)
    settings["zero_optimization"]["offload_optimizer"] = CPU
    with engine_for(settings) as engine, mock.patch.object(MatrixStepper, "__init__", note):
        engine.device = torch.device("meta")
        engine.basic_optimizer._prepare()
    assert seen == [expected]


# An engine's life
@on_ranks(2)
@each_stored
def test_optimizer_serves_a_second_engine(tmp_path: Path, storage: str, stage: int) -> None:
    """An optimizer serves a second engine when the first is gone. The second goes on with its model, from fresh
    state."""
    settings, model, on_one, kept = own_settings(storage, stage), ExactLM(), ExactLM(), []
    optimizer = LayerWiseMuon(model.parameters(), **settings.pop("optimizer")["params"])
    for steps in (range(2), range(2, 4)):
        single = Reference(on_one)
        single.train_on_all(steps)
        with engine_for(settings, model, optimizer=optimizer) as engine:
            train(engine, steps, rows=zero.OWN_ROWS)
            kept.append(len(optimizer.state))
            engine.save_checkpoint(tmp_path)
            single.check(engine)
    assert len(set(kept)) == 1, "nothing of the first engine's is kept"
    if storage == "zero":
        assert kept[0] == 2, "one per group"
    else:
        assert not any(hasattr(p, "_hp_mapping") or p._post_accumulate_grad_hooks for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_failed_backward_is_an_error_on_every_rank(stage: int) -> None:
    """A backward pass that fails is an error on every rank, and training can go on. The second step's with owned
    storage, on rank 1, after some gradients have come. Other faults of a pass, or of the model, are told in the same
    way: tests/engines/plain/test_failures.py."""

    def fail(grad: Tensor) -> None:
        raise FloatingPointError("stumbled")

    model, single = ExactLM(), Reference(ExactLM())
    single.train_on_all(3)
    with engine_for(own_settings("owned", stage), model) as engine:
        train(engine, 1, rows=zero.OWN_ROWS)
        handle = model.embedding.weight.register_hook(fail if dist.get_rank() == 1 else torch.clone)
        with pytest.raises(FloatingPointError) if dist.get_rank() == 1 else contextlib.nullcontext():
            engine.backward(engine(*zero.own_rows(7, 1)[0]))
        handle.remove()
        with pytest.raises(RuntimeError, match="^LayerWiseMuon: a backward pass ended in an exception.*rank 1"):
            engine.step()
        engine.optimizer.zero_grad()
        train(engine, range(1, 3), rows=zero.OWN_ROWS)
        single.check(engine)


@on_ranks(2)
def test_first_rank_reports_owners_and_unused_settings() -> None:
    """The first rank says who owns what, and which settings have no effect."""
    settings = settings_for("owned", 2, report=True)
    settings["zero_optimization"]["reduce_bucket_size"] = 1000
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        zero.build(settings)
    without = 'Without effect with "storage": "owned": zero_optimization.reduce_bucket_size.'
    for line in ("Buffers of 2 data-parallel ranks: ", without, "4 of 11 trained parameters are matrices"):
        assert (line in printed.getvalue()) == (dist.get_rank() == 0)


@on_ranks(2)
def test_deepspeeds_default_clipping_is_announced_once() -> None:
    """Fixed: Gradients were clipped at 1.0 though nothing was configured."""
    silent = config(2, clip=0.0)
    default = {key: value for key, value in silent.items() if key != "gradient_clipping"}
    for settings, expected in ((default, 1 - dist.get_rank()), (silent, 0)):
        with mock.patch.object(logger, "warning") as said:
            zero.build(settings)
        lines = [call.args[0] for call in said.call_args_list if "gradient_clipping" in call.args[0]]
        assert len(lines) == expected
        assert all("clips gradients at its default norm of 1.0; set it to 0" in line for line in lines)


@on_ranks(2)
def test_policies_are_compared_on_the_training_machine() -> None:
    """Policies are compared on the kind of machine that trains."""
    with engine_for(config(2)) as engine:
        plan = engine.basic_optimizer._binding.plans[0].matrices
        assert plan.modelled[0][1] == modelled_time(plan, MACHINES["cpu"])
