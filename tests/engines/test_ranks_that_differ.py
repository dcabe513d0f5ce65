"""Ranks that differ, or fail: every engine comes to the same decision on all of them, or to an error that says why."""

import functools
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lwopt_backend import ModuleOptimizers
from lwopt_backend.groups import param_groups
from lwopt_backend.groups.param_groups import ComparedOptions
from lwopt_backend.rules import muon
from lwopt_backend.runtime.agreement import RanksDisagree, agree, digest, first_difference, setting
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.elementwise import ElementwiseStepper
from tests.support.cells import cells
from tests.support.engines import ENGINES, ZERO, Cell, Engine, ExactLM, UnderDeepSpeed, running
from tests.support.launcher import run_on_ranks
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import shares
from tests.support.ranks import RankFailed, RankPool
from tests.support.references import SECTIONS


# One decision
@on_ranks(2)
def test_every_rank_names_the_first_difference() -> None:
    """Equal lines agree, and every rank names the first difference of others."""
    collectives = TorchCollectives()

    def agree_with(other: list[str]) -> str:
        return agree(collectives, "a test", lambda: ("agreed", [["a", "b"], other][collectives.rank]))

    assert agree_with(["a", "b"]) == "agreed"
    ours, nothing = "'b'", "nothing further"
    for other, here, there in ((["a", "c"], ours, "'c'"), (["a"], ours, nothing), (["a", "b", "c"], nothing, "'c'")):
        with pytest.raises(RanksDisagree, match=f"^a test: ranks differ: rank 0 has {here}, rank 1 has {there}$"):
            agree_with(other)


@on_ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_takes_the_others_with_it(failing: int) -> None:
    collectives = TorchCollectives()
    mine = collectives.rank == failing

    def decide() -> tuple[None, list[str]]:
        if mine:
            raise KeyError("missing")
        return None, []

    told = re.escape(f"a test: rank {failing} failed with KeyError('missing')")
    with pytest.raises(KeyError if mine else RuntimeError, match="^'missing'$" if mine else f"^{told}"):
        agree(collectives, "a test", decide)


@on_ranks(2)
def test_a_difference_is_found_without_sending_all_lines() -> None:
    """Which would be gigabytes on a thousand ranks."""
    collectives, sent = TorchCollectives(), []
    lines = [f"layers.{number}.weight" for number in range(10_000)]
    if collectives.rank == 1:
        lines[7000] += "'"
        lines[9999] += "'"
        lines.append("one more")
    original = TorchCollectives.gather_objects

    def gather_objects(self: TorchCollectives, value: Any) -> list[Any]:
        sent.append(len(repr(value)))
        return original(self, value)

    with (
        mock.patch.object(TorchCollectives, "gather_objects", gather_objects),
        pytest.raises(RanksDisagree, match="rank 0 has 'layers.7000.weight', rank 1 has \"layers.7000.weight'\"$"),
    ):
        agree(collectives, "a test", lambda: (None, lines))
    assert sum(sent) < 0.05 * len(repr(lines))


def test_setting_that_differs_is_named_with_both_values() -> None:
    """A setting that differs is named with both values, and nothing else is."""
    ranks = [[setting("lr", 0.02), setting("betas", (0.9, beta)), setting("eps", 0)] for beta in (0.95, 0.95, 0.99)]
    found = first_difference(ranks)
    assert found == "ranks differ in betas: (0.9, 0.95) on rank 0, (0.9, 0.99) on rank 2; give all ranks the same value"
    assert first_difference([["a"], ["a"]]) == "all lines are equal"
    assert digest(["a", "b"]) == digest(["a", "b"]) != digest(["a", "c"])


OWNED = ("plain", "owned 0", "owned 1", "owned 2")


def step(engine: Engine, number: int) -> None:
    engine.step(shares(number, 2)[dist.get_rank() : dist.get_rank() + 1])


class Broken(RuntimeError):
    """The user's own."""


def fail(*_: Any, **__: Any) -> Any:
    raise Broken("here")


# When the optimizer is made
def of_another_shape(model: nn.Module) -> None:
    model.lm_head = nn.Linear(24, 38, bias=False)


def in_another_order(model: nn.Module) -> None:
    first = model.embedding
    del model.embedding
    model.embedding = first


def of_another_dtype(model: nn.Module) -> None:
    model.layers[2].double()


def with_another_torch(model: nn.Module) -> None:
    torch.__version__ = "2.13.1"


def same(model: nn.Module) -> None:
    pass


def both(name: str, first: str, other: str) -> str:
    said = f"ranks differ in {name}: {first} on rank 0, {other} on rank 1; give all ranks the same value"
    return rf"^(LayerWiseOptimizer|LayerWise): {re.escape(said)}$"


MATRIX = {  # rules of one rank, which stores and sends other parts of matrices by them
    "in blocks": {**SECTIONS["muon"], "block_period": 2},
    "head by head": {**SECTIONS["muon"], "per_head": True},
}
THREE_HEADS = {"layers.0.weight": {"heads": 3}}
FORMS = both("elementwise.weight_decay_form", "'decoupled'", "'cautious'")
DIFFERENCES: dict[str, tuple[Callable[[nn.Module], None], dict[str, Any], str]] = {
    "shape": (of_another_shape, {}, r"ranks differ: rank 0 has .*lm_head.*, rank 1 has .*lm_head"),
    "order": (in_another_order, {}, "ranks differ: rank 0 has "),
    "dtype": (of_another_dtype, {}, r"ranks differ: rank 0 has .*layers\.2.*, rank 1 has .*layers\.2"),
    "torch": (with_another_torch, {}, both("torch.__version__", repr(str(torch.__version__)), "'2.13.1'")),
    "routing": (same, {"options": {"exclude": ("layers.2.*",)}}, both("exclude", "()", "('layers.2.*',)")),
    "rate": (same, {"rate": 0.5}, both("matrix.lr", "0.02", "0.5")),
    "block_period": (same, {"matrix": "in blocks"}, both("matrix.block_period", "1", "2")),
    "per_head": (
        same,
        {"matrix": "head by head", "options": {"atoms": THREE_HEADS}},
        both("matrix.per_head", "False", "True"),
    ),
    "element-wise option": (same, {"elementwise": "cautious adamw"}, FORMS),
}


KERNELS = {**SECTIONS["muon"], "ns_method": "auto", "ns_dtype": "bfloat16"}


@on_ranks(2)
@cells(engine=["plain", "fsdp2", "zero 2", "owned 1"])
def test_ranks_on_which_auto_finds_other_kernels_all_stop(engine: str) -> None:
    """A matrix would have other bits by the rank that owns it."""
    message = "on cpu: 'quack-kernels' on rank 0, None on rank 1; give all ranks the same value"
    with (
        mock.patch.dict(SECTIONS, {"auto": KERNELS}),
        mock.patch.object(muon, "has_package", lambda *_: dist.get_rank() == 0),
        pytest.raises(RanksDisagree, match=f"the package with kernels that ns_method 'auto' finds.*{message}"),
        running(Cell(engine, "auto"), ExactLM()),
    ):
        pass


UNDER_DEEPSPEED = ["zero 2", "zero 3", "owned 1"]


@on_ranks(2)
@cells(
    # DeepSpeed broadcasts weights in their order before it takes an optimizer, and ends there.
    lambda engine, what: engine not in UNDER_DEEPSPEED or what not in ("shape", "order", "dtype"),
    engine=["plain", "fsdp2", *UNDER_DEEPSPEED],
    what=[*DIFFERENCES],
)
def test_ranks_given_different_things_all_stop(engine: str, what: str) -> None:
    """Ranks that are given different things all stop, and show both."""
    all_stop(engine, what)


@pytest.mark.on_gloo  # which carries broadcasts of unlike sizes
@on_ranks(2)
@cells(engine=UNDER_DEEPSPEED, what=["shape", "dtype"])
def test_ranks_with_unlike_weights_all_stop_under_deepspeed(engine: str, what: str) -> None:
    all_stop(engine, what)


def all_stop(engine: str, what: str) -> None:
    make, changes, message = DIFFERENCES[what]
    cell, model, version = Cell(engine), ExactLM(), torch.__version__
    if dist.get_rank() == 1:
        cell = replace(cell, **changes)
        make(model)
    try:
        with (
            mock.patch.dict(SECTIONS, MATRIX),
            pytest.raises((RuntimeError, ValueError, TypeError), match=message),
            running(cell, model),
        ):
            pass
    finally:
        torch.__version__ = version


# Options at a step
CHANGES: dict[str, tuple[int, str, Any]] = {  # of param group 0, muon's, or 1, adamw's
    "lr": (0, "lr", 0.5),
    "weight decay": (1, "weight_decay", 0.5),
    "momentum": (0, "momentum", 0.5),
    "betas": (1, "betas", (0.5, 0.25)),
}


def change(engine: Engine, what: str) -> str:
    """Change an option on rank 1; what all ranks are to say."""
    number, key, value = CHANGES[what]
    group = engine.optimizer.param_groups[number]
    before = group[key]
    if dist.get_rank() == 1:
        group[key] = value
    name = f"{key} of param group {number} ({('muon', 'adamw')[number]})"
    return re.escape(
        f"ranks differ in {name}: {before!r} on rank 0, {value!r} on rank 1; give all ranks the same value"
    )


@on_ranks(2)
@cells(engine=ENGINES)
def test_option_that_differs_on_one_rank_is_an_error(engine: str) -> None:
    """An option that one rank has otherwise is an error on all. In the first step, and in every 64th after it, here
    every second; in between nobody looks."""
    number = ENGINES.index(engine)
    with mock.patch.object(param_groups, "COMPARED_EVERY", 2), running(Cell(engine), ExactLM()) as run:
        step(run, 0)
        message = change(run, [*CHANGES][number % len(CHANGES)])
        step(run, 1)
        with pytest.raises(RanksDisagree, match=message):
            step(run, 2)
    with running(Cell(engine), ExactLM()) as run, pytest.raises(RanksDisagree, match=change(run, "lr")):
        step(run, 0)


@on_ranks(2)
@cells(engine=["plain", "fsdp2"])
def test_option_can_be_set_right_and_the_step_taken(engine: str) -> None:
    """Where nothing was changed the option can be set right, and the step taken."""
    with (
        mock.patch.object(param_groups, "COMPARED_EVERY", 1),
        running(Cell(engine), ExactLM()) as run,
        running(Cell(engine), ExactLM()) as twin,
    ):
        for number, what in enumerate(CHANGES):
            before = [dict(group) for group in run.optimizer.param_groups]
            run.backward(shares(number, 2)[dist.get_rank() : dist.get_rank() + 1])
            with pytest.raises(RanksDisagree, match=change(run, what)):
                run.optimizer.step()
            for group, old in zip(run.optimizer.param_groups, before):
                group.update({key: value for key, value in old.items() if key != "params"})
            run.optimizer.step()
            run.optimizer.zero_grad()
            step(twin, number)
        assert largest_difference(run.weights(), twin.weights()) == 0.0


@on_ranks(2)
@cells(engine=["plain", "zero 0", "zero 2", "zero 3", "owned 1", "fsdp2"])
def test_options_are_compared_when_they_are_saved(engine: str, tmp_path: Path) -> None:
    """A state dict, which one rank may take alone, leaves that to the next step."""
    with running(Cell(engine), ExactLM()) as run:
        step(run, 0)
        message = change(run, "betas")
        if engine in ("plain", "fsdp2"):
            if dist.get_rank() == 0:
                run.optimizer.state_dict()
            step(run, 1)
            run.optimizer.state_dict()
            with pytest.raises(RanksDisagree, match=message):
                step(run, 2)
        if engine == "plain":
            with pytest.raises(RanksDisagree, match="ranks differ in betas of param group"):
                run.optimizer.save_state_dict(tmp_path)
        elif engine != "fsdp2":
            with pytest.raises(RanksDisagree, match=message):
                run.made.save_checkpoint(str(tmp_path))
            assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_plain_optimizers_are_compared_every_64_norms() -> None:
    """Plain optimizers of a module are compared with every 64th norm."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = ModuleOptimizers({"all": torch.optim.AdamW(model.parameters(), lr=0.25)})

    def train() -> bool:
        model(torch.ones(1, 3)).sum().backward()
        return optimizer.step()

    assert train()
    optimizer.param_groups[0]["lr"] += 0.25 * dist.get_rank()
    assert all(train() for _ in range(63))
    told = "'all': ranks differ in lr of param group 0.*: 0.25 on rank 0, 0.5 on rank 1"
    with pytest.raises(RanksDisagree, match=told):
        train()


def test_options_are_compared_every_64_steps() -> None:
    """Options are compared every 64th step, and equal values are alike."""
    group = {"rule": "adamw", "lr": 1.0, "betas": [0.5, 0.75]}
    compared = functools.partial(ComparedOptions, param_groups.CheckedGroups())
    options = compared()
    found = {number: options.flags([group]) for number in range(130)}
    assert [number for number, flags in found.items() if flags[0] != param_groups.NONE] == [0, 64, 128]
    options.compare_next()
    assert options.flags([group]) == found[0] and options.flags([group]) != found[0]
    alike: list[dict[str, Any]] = [{"lr": 1, "betas": (0.5, 0.75)}, {"lr": torch.tensor(1.0)}]
    assert all(compared().flags([{**group, **changes}]) == found[0] for changes in alike)
    other, none = compared().flags([{**group, "lr": 0.5}]), [param_groups.NONE] * 2
    alone = [found[0], other, none]  # to name the difference is a collective, which not all would be in
    for ranks, differ in (([found[0], other], True), ([found[0]] * 2, False), (alone, False), ([none, none], False)):
        assert ComparedOptions.differ([max(flags) for flags in zip(*ranks)]) == differ
    assert 0 <= found[0][0] < 2**31
    given = [fail, {"a": 2.0}, None, torch.float32]
    assert param_groups.comparable(given) == ("function", {"a": 2}, None, torch.float32)


@on_ranks(2)
@cells(engine=ENGINES)
def test_nonfinite_gradients_of_one_rank_are_one_decision(engine: str) -> None:
    """Gradients of one rank that are not finite are one decision of all."""
    skips = engine in (*ZERO, *OWNED[1:])
    with running(Cell(engine), ExactLM()) as run:
        step(run, 0)
        for value in (float("inf"), float("nan")) if skips else (float("nan"),):
            if dist.get_rank() == 1:
                head = run.model.get_submodule("lm_head")
                hook = head.register_full_backward_pre_hook(lambda _, grads, by=value: (grads[0] * by,))
            step(run, 1)
            if dist.get_rank() == 1:
                hook.remove()
            weights = run.weights().values()
            assert all(weight.isfinite().all() for weight in weights) == skips
            for weight in weights:
                theirs = weight.nan_to_num()
                dist.broadcast(theirs, 0)
                assert torch.equal(weight.nan_to_num(), theirs)


# A step that ends in between: some weights and state are those of the next step
class Ended(Exception):
    """In the middle of a step."""


@pytest.mark.on_gloo  # the step that ends leaves an exchange that nobody waits for
@on_ranks(2)
@cells(engine=[*ENGINES, "modules"])
def test_interrupted_step_needs_a_load(engine: str, tmp_path: Path) -> None:
    """Fixed: After an error in the middle of a step, the next step trained half-changed weights. After a step that
    ended in between no other is taken before a load."""
    folder, modules = str(tmp_path / "saved"), engine == "modules"
    with running(Cell("plain" if modules else engine), ExactLM()) as run:
        if modules:
            run.optimizer = ModuleOptimizers({"all": run.optimizer})
        step(run, 0)
        run.save(folder) if not modules else run.optimizer.save_state_dict(folder)
        with mock.patch.object(ElementwiseStepper, "step", side_effect=Ended), pytest.raises(Ended):
            step(run, 1)
        sharded = engine in ("zero 1", "zero 2", "zero 3")  # DeepSpeed has no gradients left
        said = "a backward pass" if sharded else "the last step ended in an error after .* The error was: Ended"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said):
                run.made.step() if isinstance(run, UnderDeepSpeed) else run.optimizer.step()
        if engine in ("plain", "fsdp2"):
            run.load(folder)
            run.optimizer.zero_grad()
            step(run, 1)
            with running(Cell(engine), ExactLM()) as other:
                other.train(range(2))
                assert largest_difference(run.weights(), other.weights()) == 0.0


# A rank that fails: it raises its own error, and the others end when its program does
def in_a_rule(engine: Engine) -> None:
    muon.newton_schulz = fail


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_before(engine: Engine) -> None:
    engine.model.register_forward_pre_hook(die)


def killed_in_a_rule(engine: Engine) -> None:
    muon.newton_schulz = die


def replaced(engine: Engine) -> str:
    model = engine.model
    model.load_state_dict({key: tensor.clone() for key, tensor in model.state_dict().items()}, assign=True)
    return r"are no longer in the model \(replaced\).* \(rank 1\)$"


def one_rank_ends(engine: str, where: Callable[[Engine], str | None]) -> None:
    """Rank 1, as a program ends that catches nothing, or is killed."""
    with running(Cell(engine), ExactLM()) as run:
        step(run, 0)
        if dist.get_rank() != 1:
            step(run, 1)
            step(run, 2)
            return
        told = where(run) or "^here$"
        with pytest.raises(RuntimeError, match=told):
            step(run, 1)
        os._exit(1)


ENDS = [
    ("fsdp2", in_a_rule),
    ("plain", in_a_rule),
    ("zero 1", killed_in_a_rule),
    ("plain", killed_before),
    ("fsdp2", replaced),
]


@pytest.mark.parametrize(("engine", "where"), ENDS)
def test_when_a_ranks_program_ends_the_others_end(engine: str, where: Callable[[Engine], str | None]) -> None:
    ranks = RankPool(2)
    try:
        with pytest.raises(RankFailed) as caught:
            ranks.run(one_rank_ends, engine, where)
    finally:
        ranks.close()
    told, gone = caught.value.errors
    assert "lost: rank 1 died" in str(gone)
    assert told is not None, "the other has not trained on alone"
    assert "did not answer" not in told, "nor waited: gloo's own timeout is longer than that of a call"


FREED = """
import gc, weakref
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers

def trained(model, **options):
    optimizer = LayerWiseOptimizer(model, lr=0.1, report=False, **options)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return optimizer

def on_fsdp2():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    trained(model)

dist.init_process_group("gloo")
plain, pair = trained(nn.Linear(8, 8), group_size=2), dist.new_group([0, 1, 2, 3])
modules = ModuleOptimizers({"one": trained(nn.Linear(8, 8), process_group=pair)}, process_group=pair)
on_fsdp2()
del pair
kept_by_torch = "mesh_"  # FSDP2 itself keeps those of its mesh
found = [group for group in dist.distributed_c10d._world.pg_map if not group.group_desc.startswith(kept_by_torch)]
groups = [weakref.ref(group) for group in found]
del found
dist.destroy_process_group()
gc.collect()
alive = [group() for group in groups if group() is not None]
assert len(groups) > 3 and alive == [], (len(groups), [gc.get_referrers(group) for group in alive])
try:
    modules.step()
except RuntimeError as error:
    assert "expected the optimizer's process group, found it destroyed; make the optimizer again" in str(error), error
"""


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_no_group_outlives_destroy_process_group(ranks: RankPool, tmp_path: Path) -> None:
    """Its threads would still free tensors while Python ends, which ends the process with SIGABRT."""
    (tmp_path / "script.py").write_text(FREED)
    codes, printed = run_on_ranks(ranks, tmp_path / "script.py", joined=False)
    assert codes == [0] * 4, printed
