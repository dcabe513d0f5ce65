"""Every engine trains what torch.optim.Muon, AdamW or a rule on whole matrices trains on one process, bit for bit."""

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.migration import load_named_state
from tests.support import fsdp2
from tests.support.cells import cells, with_full
from tests.support.engines import ENGINES, OWNED, ZERO, Cell, Engine, ExactLM, OnFSDP2, check, exact, model_for, running
from tests.support.models import MATRICES, NORM_ROUNDING, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import MODES as PLAIN_MODES
from tests.support.plain import rows as rows_of
from tests.support.plain import shares
from tests.support.ranks import RankPool, gathered
from tests.support.references import (
    ADAMW,
    CAUTIOUS,
    MUON,
    RULES,
    SECTIONS,
    Reference,
    elementwise_optimizer,
    matrix_optimizer,
    precise,
)
from tests.support.zero import DEEPSPEEDS_BUCKET

# torch's fused loop over vectors rounds otherwise than what it does with the last few elements. Which those are depends
# on how parameters are cut, and on the CPU. A step takes a weight below 4 to one of two neighbors, 2^-22 apart; in the
# next, ExactLM might round a gradient up on one side and down on the other.
FUSED = "adamw, fused"
OF_ALL: list[dict[str, Any]] = [{"overlap_comm": True}, {"contiguous_gradients": False}, {"reduce_scatter": False}]
ZERO_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "zero 0": [{}],
    **dict.fromkeys(("zero 1", "zero 2"), [*OF_ALL, {"parameter_alignment": True}, {"reduce_bucket_size": 500}]),
    "zero 3": [
        *(*OF_ALL, {"sub_group_size": 1000}, {"sub_group_size": 1}, {"stage3_param_persistence_threshold": 0}),
        {"stage3_param_persistence_threshold": 1000, "sub_group_size": 1000},
        {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0},
        {"zero_hpz_partition_size": 2},
    ],
}
LAYOUTS = ("padded", "compact", "auto")
STORAGE = ("plain", *OWNED)  # owned
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {  # further options, and the engines that have them
    "default": (ENGINES, {}),
    **{name: (("plain",), options) for name, options in PLAIN_MODES.items() if options},
    **{f"instances of {size}": (STORAGE, {"group_size": size}) for size in (1, 2)},
    **{policy: (("zero 1", "zero 2"), {"policy": policy}) for policy in ("stay", "balance")},
}
APART = {"layers": {"params": "layers.*", "max_norm": 0.2}, "gates": {"params": "gate.*", "max_norm": 0.001}}


def equal(ranks: RankPool, *of: Cell, limit: float = 0.0) -> None:
    """Every cell's weights are the truth's, and all ranks' are the same."""
    ranks.run(check, limit, *of)


def there_is(ranks: int, engine: str, layout: str, way: str, clip: float, **_: Any) -> bool:
    """FSDP2 loses the hooks that make the sums of three ranks exact, and norms of a third are rounded."""
    engines, options = WAYS[way]
    exact = ranks != 3 or (engine != "fsdp2" and not clip)
    stored = engine in STORAGE or layout == "auto"
    return engine in engines and exact and stored and ranks % options.get("group_size", 1) == 0


@cells(
    there_is,
    ranks=[1, 2, 3, 4],
    engine=ENGINES,
    layout=LAYOUTS,
    way=WAYS,
    accumulation=[1, 2],
    clip=[0.0, 0.3],
)
def test_training_equals_one_process(
    ranks: RankPool, engine: str, layout: str, way: str, accumulation: int, clip: float
) -> None:
    options = {**({"layout": layout} if engine in STORAGE else {}), **WAYS[way][1]}
    equal(ranks, Cell(engine, clip=clip, accumulation=accumulation, options=options))


@pytest.mark.parametrize("engine", ZERO)
def test_zero_options_change_no_bit(ranks: RankPool, engine: str) -> None:
    policy = {"policy": "balance"} if engine in ("zero 1", "zero 2") else {}
    equal(ranks, *(Cell(engine, options=policy, zero=options) for options in ZERO_OPTIONS[engine]))


@cells(ranks=[2], engine=ZERO[1:])
@on_ranks()
def test_deepspeeds_own_bucket_size(engine: str) -> None:
    """Of the 2 GB of a bucket only what gradients need is touched: torch does not fill it here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        check(0.0, Cell(engine, zero={"reduce_bucket_size": DEEPSPEEDS_BUCKET}))


@cells(ranks=[1, 2, 4], engine=["plain", "fsdp2"], clip=[0.0, 0.3])
def test_clip_groups_have_their_own_norms(ranks: RankPool, engine: str, clip: float) -> None:
    """If nothing clips the rest, the step clips the groups."""
    cell = Cell(engine, clip=clip, accumulation=2, options={"clip_groups": APART})
    kept = [replace(cell, options={**cell.options, "keep_full_grads": True})] if engine == "plain" else []
    equal(ranks, cell, *kept)


@cells(ranks=[2], engine=["plain", "fsdp2"])
def test_a_clip_group_may_be_what_one_kind_of_rule_trains(ranks: RankPool, engine: str) -> None:
    ranks.run(_check_clip_of_a_kind, engine)


def _check_clip_of_a_kind(engine: str) -> None:
    by_name = {"params": ["embedding.*", "lm_head.*", "*.bias", "layers.4.weight"]}
    runs = []
    for group in ({"kind": "elementwise"}, by_name):
        cell = Cell(engine, steps=2, options={"clip_groups": {"adamw": {**group, "max_norm": 0.01}}})
        with running(cell, ExactLM()) as run:
            runs.append((run.train(range(2)), run.weights()))
    (norms, weights), (others, named) = runs
    assert norms == others and min(norms) > 0.01 and largest_difference(weights, named) == 0.0


# Rules meet engines through four protocols: a rule, one with state that only owners have, one that sees the weight, one
# that uses norms, whose sums are added over the ranks. They came out in the same bits; 1e-6 is what is promised. Of
# element-wise rules one is registered, one counts steps in its group, one masks its decay, one keeps a third state.
OF_EACH = ("sum, coupled", "adamuon", "soap", "muonh")
MET = (*OF_EACH, "muon2", "u/w floor")  # by every engine: muon2 has several states, the floor is of pieces' norms
MET_ELEMENTWISE = ("a class", "counts in its group", "adamw, amsgrad", "cautious adamw")
ALL_RULES_ON = "zero 2"
SEVERAL = [  # rules in further circumstances; DeepSpeed steps each sub-group of ZeRO-3 by itself
    (1, SECTIONS, Cell("plain")),
    (2, ("counts in its group", "lion", *CAUTIOUS), Cell("zero 3", zero={"sub_group_size": 1000})),
    *((4, (*OF_EACH, "normuon", "muon2"), Cell("fsdp2", sharding=way)) for way in ("hybrid", "columns")),
    (6, ("muonh",), Cell("fsdp2", sharding="hybrid")),  # a piece's copies are an odd number of ranks apart
    *((n, (*OF_EACH, "muon2"), Cell("fsdp2", sharding="hybrid", options={"share_copies": False})) for n in (4, 6)),
    (4, (*OF_EACH, "normuon", "muon2", "adamh"), Cell("fsdp2", sharding="tensor parallel", alike=True)),
]


@pytest.mark.parametrize(("ranks", "rules", "cell"), SEVERAL, indirect=["ranks"])
def test_several_rules(ranks: RankPool, rules: Iterable[str], cell: Cell) -> None:
    kinds = (("matrix" if rule in SECTIONS else "elementwise", rule) for rule in rules)
    equal(ranks, *(replace(cell, **{kind: rule}) for kind, rule in kinds))


@cells(ranks=[2, 4], engine=ENGINES, rule=MET)
def test_every_protocol_on_every_engine(ranks: RankPool, engine: str, rule: str) -> None:
    travels = {"policy": "balance"} if engine in ("zero 1", "zero 2") and ranks.world_size > 2 else {}
    equal(ranks, Cell(engine, rule, options=travels))


def on_one_engine(rules: Iterable[str], on_all: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Every rule on one engine and some on all, in `make test-full` every one on all."""
    chosen = [(engine, rule) for engine in ENGINES for rule in (rules if engine == ALL_RULES_ON else on_all)]
    return pytest.mark.parametrize(("engine", "rule"), with_full(chosen, itertools.product(ENGINES, rules)))


@on_one_engine(SECTIONS)
def test_every_rule_on_every_engine(ranks: RankPool, engine: str, rule: str) -> None:
    equal(ranks, Cell(engine, rule))


@on_one_engine(RULES, MET_ELEMENTWISE)
def test_every_elementwise_rule_on_every_engine(ranks: RankPool, engine: str, rule: str) -> None:
    exact = rule != FUSED
    equal(ranks, Cell(engine, elementwise=rule, steps=3 if exact else 1), limit=0.0 if exact else 2**-22)


# A group's lr and weight decay are those of matrices and of the rest, where its section says nothing else. One is so
# small that at ZeRO 2 not every one of four ranks stores a part of it.
GROUPS: tuple[dict[str, Any], ...] = (
    {"params": ("embedding", "layers", "lm_head"), "lr": 0.01, "weight_decay": 0.2, "adamw": {"lr": 1e-3}},
    {"params": "gate.weight", "lr": 0.005},
    {"params": "gate.bias", "weight_decay": 0.0},
)
RATES = [("muon", 0.01, 0.2), ("adamw", 1e-3, 0.2), ("muon", 0.005, 0.1), ("adamw", 3e-3, 0.0)]


@cells(ranks=[2, 4], engine=ENGINES)
@on_ranks()
def test_param_groups_have_their_own_rates(engine: str) -> None:
    """Also what has loaded them."""
    cell, single, world_size = Cell(engine, groups=GROUPS), Reference(ExactLM()), dist.get_world_size()
    rest = dict(single.model.named_parameters())
    (*matrices, gate), bias = [rest.pop(name) for name in MATRICES], rest.pop("gate.bias")
    of_muon = [{"params": matrices, "lr": 0.01, "weight_decay": 0.2}, {"params": gate, "lr": 0.005}]
    of_adamw = [{"params": [*rest.values()], "lr": 1e-3, "weight_decay": 0.2}, {"params": bias, "weight_decay": 0.0}]
    single.optimizers = [torch.optim.Muon(of_muon, **MUON), torch.optim.AdamW(of_adamw, **ADAMW)]
    loads = engine in ("plain", "fsdp2")
    with running(cell, ExactLM()) as one, running(cell, ExactLM()) if loads else nullcontext(one) as other:
        groups = one.optimizer.param_groups
        for step in range(3):
            one.train(range(step, step + 1))
            single.step(shares(step, world_size), world_size)
            assert largest_difference(one.weights(), single.model) == 0.0
            if step == 0:
                assert [(group["rule"], group["lr"], group["weight_decay"]) for group in groups] == RATES
            for place, group in enumerate(groups):
                group["lr"] = 1e-3 * (1 + place + step)
                single.optimizers[place % 2].param_groups[place // 2]["lr"] = group["lr"]
        if loads:
            other.optimizer.load_state_dict(one.optimizer.state_dict())
        assert [group["lr"] for group in other.optimizer.param_groups] == [group["lr"] for group in groups]


def is_late(name: str, param: Tensor, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and param is module.weight and name in LATE


LATE = ("layers.2.weight", "gate.weight")
SELECTORS: list[dict[str, Any]] = [{"params": LATE}, {"attribute": ["never", "late"]}, {"params": is_late}]


@cells(ranks=[2], engine=ENGINES)
@on_ranks()
def test_globs_attributes_and_functions_select_alike(engine: str) -> None:
    found = []
    for selector in ({}, *SELECTORS):
        model, overrides = ExactLM(), [{**selector, "matrix": {"lr": 0.005}}] if selector else []
        for name in LATE:
            model.get_parameter(name).late = True  # type: ignore[attr-defined]
        cell = Cell(engine, options={"overrides": overrides})
        if engine == "fsdp2" and "attribute" in selector:
            lost = pytest.raises(ValueError, match="'late' selects no trained parameter; fully_shard")
            with lost, running(cell, model):
                pass
            continue
        with running(cell, model) as run:
            run.train(range(2))
            found.append(run.weights())
    plain, first, *others = found
    assert largest_difference(plain, first) > 0
    assert [largest_difference(other, first) for other in others] == [0.0] * len(others)


# Several optimizers on one model, and parameters that its optimizer has not got


@pytest.mark.also_on_gloo
@cells(ranks=[2], engine=ENGINES)
def test_parameters_that_are_frozen_for_a_step_or_unfrozen(ranks: RankPool, engine: str) -> None:
    for what in (frozen_for_a_step, unfrozen_later):
        ranks.run(what, engine)


@cells(ranks=[2], engine=ENGINES, matrix=["muon", "normuon"], capture=[False, True])
@on_ranks()
def test_what_a_host_moves_between_steps_is_found_again(
    engine: str, matrix: str, capture: bool, tmp_path: Path
) -> None:
    """State in other memory, and state that is loaded; an option of the rule; a parameter that is frozen for two steps
    (ZeRO takes no gradient for zeros). On FSDP2 a model that was on another device, in another dtype or without memory
    until it was loaded, which torch refuses while anything has a weak reference to a parameter, and gradients that are
    zeros."""
    alone, trains = Reference(ExactLM(), matrix), [engine in ZERO or step not in (5, 6) for step in range(9)]
    with running(Cell(engine, matrix, options={"capture": capture}), ExactLM()) as run:
        for step, all_of_it in enumerate(trains):
            run.model.gate.requires_grad_(all_of_it)
            run.train(range(step, step + 1))
            for state in run.optimizer.state.values():
                state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})
            if engine == "fsdp2":
                run.optimizer.zero_grad(set_to_none=step % 2 == 0)
                run.model.to(torch.float64).to(torch.float32)
            if step == 3:
                run.save(str(tmp_path / "saved"))
                if engine == "fsdp2":
                    run.model.to_empty(device="cpu")
                run.load(str(tmp_path / "saved"))
            if step == 6:
                run.optimizer.param_groups[0]["ns_steps"] = 3
        found = run.weights()
    for step, all_of_it in enumerate(trains):
        alone.model.gate.requires_grad_(all_of_it)
        alone.step(shares(step, 2), 2)
        of_rule = alone.optimizers[0]
        for options in [vars(m.rule) for m in of_rule.matrices] if matrix == "normuon" else of_rule.param_groups:
            options["ns_steps"] = 5 if step < 6 else 3
    assert largest_difference(found, alone.model) == 0.0


def frozen_for_a_step(engine: str) -> None:
    """ZeRO takes no gradient for zeros; elsewhere the step leaves the parameter and its state alone."""
    with running(Cell(engine), ExactLM()) as run:
        for step in range(3):
            run.model.gate.requires_grad_(step != 1)
            run.train(range(step, step + 1))
        found = run.weights()
    alone = Reference(ExactLM())
    for step in range(3):
        alone.model.gate.requires_grad_(step != 1 or engine in ZERO)
        zeroed = alone.model.gate.parameters() if step == 1 and engine in ZERO else ()
        handles = [param.register_hook(torch.zeros_like) for param in zeroed]
        alone.step(shares(step, 2), 2)
        for handle in handles:
            handle.remove()
    assert largest_difference(found, alone.model) == 0.0


def unfrozen_later(engine: str) -> None:
    """They are not trained, and others are as without them."""
    found = []
    for changes in (False, True):
        model = ExactLM()
        model.gate.requires_grad_(False)
        with running(Cell(engine), model) as run:
            run.train(range(1))
            if changes:
                run.model.gate.requires_grad_(True)
                if engine != "zero 3":  # whose next step fails in DeepSpeed 0.19.8
                    run.model.add_module("new", nn.Linear(3, 3))
            run.train(range(1, 3))
            run.model.gate.requires_grad_(False)  # to be read under DeepSpeed
            found.append(run.weights())
    assert largest_difference(found[1], found[0]) == 0.0


class Nets(nn.Module):
    """A generator, and a discriminator that is shown rows and what the generator makes of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gen, self.disc = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        exact(self)

    def forward(self, x: Tensor, turn: str) -> Tensor:
        made = self.gen(x)
        if turn == "gen":
            return (self.disc(made) - 1).square().mean()
        found = self.disc(torch.cat([x, made.detach()]))
        return (found - torch.cat([torch.ones_like(x), torch.zeros_like(x)])).square().mean()


def alternate(nets: Nets, make: Callable[[str], Any], parts: Sequence[int], freeze: bool, late: bool) -> None:
    """Turns of the networks, first and last the generator's, on the rows of these of two ranks. ``late``: the
    discriminator is frozen in the first turn, and gets its optimizers, from ``make``, after it."""
    optimizers: dict[str, list[Any]] = {}
    for turn, name in enumerate(("gen", "disc", "gen", "disc", "gen")):
        for net in ("gen", "disc"):
            getattr(nets, net).requires_grad_(net == name or not (late and turn == 0 or freeze and turn > 0))
        for net in ("gen", "disc") if turn or not late else ("gen",):
            optimizers[net] = optimizers.get(net) or make(net)
        for part in parts:
            nets(rows_of(turn, part), name).backward()
        for param in nets.parameters() if len(parts) > 1 else ():
            if param.grad is not None:
                param.grad /= len(parts)
        for optimizer in optimizers[name]:
            optimizer.step()
        for optimizer in itertools.chain(*optimizers.values()):
            optimizer.zero_grad()


@cells(
    lambda engine, second, **_: second == "ours" or engine == "fsdp2",
    engine=["plain", "plain, lazy", "fsdp2"],
    second=["ours", "torch"],
    freeze=[False, True],
    late=[False, True],
)
@on_ranks(2)
def test_two_optimizers_take_turns_on_one_model(engine: str, second: str, freeze: bool, late: bool) -> None:
    nets, truth = Nets(), Nets()
    if "fsdp2" in engine:
        for part in (nets.gen, nets.disc, nets):
            fully_shard(part, mesh=fsdp2.mesh_of())

    def make(name: str) -> list[Any]:
        params = list(getattr(nets, name).parameters())
        if (name, second) == ("disc", "torch"):
            return [torch.optim.AdamW(params, **ADAMW)]
        settings = {"overlap_param_gather": True} if engine == "plain, lazy" else {}
        sections = {"elementwise": {"name": "adamw", **ADAMW}, "report": False}
        optimizers.append(LayerWiseOptimizer(nets, **MUON, params=params, **sections, **settings))
        return optimizers[-1:]

    def alone(name: str) -> list[Any]:
        net = getattr(truth, name)
        if (name, second) == ("disc", "torch"):
            return [torch.optim.AdamW(net.parameters(), **ADAMW)]
        return Reference(net, matrices=("0.weight", "2.weight")).optimizers

    optimizers: list[Any] = []
    alternate(nets, make, [dist.get_rank()], freeze, late)
    alternate(truth, alone, [0, 1], freeze, late)
    found = fsdp2.weights_of(nets if "fsdp2" in engine else copy.deepcopy(nets))  # a copy waits for what is under way
    assert largest_difference(found, dict(truth.named_parameters())) == 0.0


@on_ranks(2)
@cells(engine=["plain", "plain, lazy", "fsdp2"])
def test_one_optimizer_trains_a_list_of_model_chunks(engine: str) -> None:
    nets, truth = Nets(), Nets()
    for nets_or_truth in (nets, truth):
        nets_or_truth.gen.register_buffer("seen", torch.zeros(()))
    if engine == "fsdp2":
        for part in (nets.gen, nets.disc, nets):
            fully_shard(part, mesh=fsdp2.mesh_of())
    lazy = {"overlap_param_gather": True} if "lazy" in engine else {}
    rules = {**MUON, "elementwise": {"name": "adamw", **ADAMW}, "report": False, **lazy}
    optimizer = LayerWiseOptimizer([nets.gen, nets.disc], **rules)
    alone = Reference(truth, matrices=("gen.0.weight", "gen.2.weight", "disc.0.weight", "disc.2.weight"))
    for step in range(3):
        nets.gen.seen.fill_(step + dist.get_rank() + 1)
        nets(rows_of(step, dist.get_rank()), "gen").backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in (0, 1):
            truth(rows_of(step, part), "gen").backward()
        alone.step(parts=2)
    found = fsdp2.weights_of(nets if engine == "fsdp2" else copy.deepcopy(nets))
    assert largest_difference(found, dict(truth.named_parameters())) == 0.0
    if engine != "fsdp2":
        nets.gen(rows_of(3, 0))  # whose hook waits for the first rank's buffers
        assert nets.gen.seen == 3


@pytest.mark.parametrize("sharding", ["rows", "hybrid", "columns", "tensor parallel", "several roots"])
@on_ranks(4)
def test_norms_and_zeros_by_names_on_fsdp2(sharding: str) -> None:
    """Norms and zeros of some gradients on FSDP2 are those of one process."""
    truth, parts = model_for(sharding), shares(0, 4)
    alike = sharding == "tensor parallel"  # where the engine of the tests gives ranks the gradients of their own rows
    for rows in parts[:1] if alike else parts:
        truth(*rows).backward()
    truth.get_parameter(MATRICES[0]).grad.zero_()
    with running(Cell("fsdp2", sharding=sharding), model_for(sharding)) as run:
        run.backward([parts[0 if alike else dist.get_rank()]])
        run.model.get_parameter(MATRICES[0]).grad = None
        for glob in ("*", "layers.*", MATRICES[0]):
            grads = [
                p.grad.flatten() / (1 if alike else 4) for n, p in truth.named_parameters() if fnmatchcase(n, glob)
            ]
            flat = torch.cat(grads).double()
            assert run.optimizer.count_zeros(glob) == int((flat == 0).sum()), glob
            assert float(run.optimizer.grad_norm(glob)) == pytest.approx(float(flat.norm()), rel=NORM_ROUNDING), glob
        with pytest.raises(ValueError, match="'layer.0' matches no trained parameter; did you mean"):
            run.optimizer.count_zeros("layer.0")


NAMES_ANEW = ["layers.0.weight", "layers.4.bias"]


@cells(engine=["plain", *ZERO, *OWNED, "fsdp2", "modules"], matrix=["muon", "soap"])
@on_ranks(2)
def test_a_parameters_state_begins_anew(engine: str, matrix: str) -> None:
    is_modules, whole_units = engine == "modules", engine in ZERO
    names = NAMES_ANEW[:1] if whole_units else NAMES_ANEW  # ZeRO counts the steps of all vectors together
    truth = Reference(ExactLM(), matrix)
    with running(Cell("plain" if is_modules else engine, matrix), ExactLM()) as run:
        optimizer = getattr(getattr(run, "made", None), "basic_optimizer", None) or run.optimizer
        run.train(range(2))
        truth.train_on_all(2)
        if is_modules:
            of_all = [f"all.{name}" for name in names]
            assert ModuleOptimizers({"all": optimizer}).reset_state(of_all) == of_all
        else:
            assert optimizer.reset_state(names) == names
        for half, name in zip((0, 1), names):
            begins_anew(truth, half, name, matrix)
        run.train(range(2, 4))
        truth.train_on_all(range(2, 4))
        truth.check(run.weights())
        with pytest.raises(ValueError, match="'layer.0.*' matches no trained parameter; did you mean"):
            optimizer.reset_state("layer.0.*")
        if whole_units:
            with pytest.raises(ValueError, match="steps as one tensor, with one count of steps, but not"):
                optimizer.reset_state(NAMES_ANEW[1])


def begins_anew(truth: Reference, half: int, name: str, matrix: str) -> None:
    """Let another optimizer train this parameter."""
    (group,), param = truth.optimizers[half].param_groups, truth.params[half][name]
    group["params"] = [each for each in group["params"] if each is not param]
    section = RULES["adamw"] if half else SECTIONS[matrix]
    truth.optimizers.append((elementwise_optimizer if half else matrix_optimizer)([param], section))


@contextmanager
def deterministic() -> Iterator[None]:
    """An operation that is not raises; ranks warn of it. torch also fills memory that it has not written with NaN, as
    it does on these ranks before and after."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "a default device": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
}


def within(context: Callable[[], AbstractContextManager[Any]], cell: Cell, folder: str) -> tuple[list[Any], Any]:
    """What an optimizer returns that is made in a context, where its methods, all of them, are called too; and the
    weights of this rank."""
    returned: list[Any] = []
    model, plain = ExactLM(), cell.engine == "plain"
    buffer = torch.ones_like(model.get_parameter(MATRICES[0]))
    rules = {"matrix": {**SECTIONS[cell.matrix], **precise(cell.matrix, True)}, "elementwise": RULES["adamw"]}
    if not plain:
        fsdp2.fsdp(model, fsdp2.mesh_of())
    with context():
        optimizer: Any = LayerWiseOptimizer(model, **rules, report=False)
    run = (Engine if plain else OnFSDP2)(cell, model, optimizer)
    run.whole = None  # type: ignore[attr-defined]
    for step in range(3):
        run.backward(shares(step, dist.get_world_size())[dist.get_rank() :][:1])
        with context():
            returned.append(float(optimizer.clip_grad_norm_(1.0)))
            returned += [float(optimizer.grad_norm("layers.*")), optimizer.count_zeros()]
            if plain:
                returned.append(float(clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.record_metrics()
            optimizer.step()
            returned.append({**optimizer.metrics(), "seconds": None})
            optimizer.synchronize()
            optimizer.zero_grad()
            saved = optimizer.state_dict()
            if step == 1 and plain:
                optimizer.save_state_dict(folder)
                optimizer.load_state_dict_from(folder)
                optimizer.refresh_masters()
                returned += [optimizer.memory_report(), optimizer.traffic()]
            if step == 1:
                optimizer.load_state_dict(saved)
            if step == 1 and cell.matrix == "muon":
                load_named_state(optimizer, {MATRICES[0]: {"momentum_buffer": buffer}}, strict=False)
    return returned, run.weights()


@on_ranks(2)
@cells(engine=["plain", "fsdp2"], matrix=["muon", "soap"])
def test_a_callers_contexts_change_nothing(engine: str, matrix: str) -> None:
    """Fixed: Newton-Schulz ran in autocast's dtype, whatever `ns_dtype` said."""
    cell = Cell(engine, matrix)
    with tempfile.TemporaryDirectory() as own:
        folder = f"{gathered(own)[0]}/saved"
        returned, weights = within(nullcontext, cell, folder)
        for what, context in CONTEXTS.items():
            found, others = within(context, cell, folder)
            assert found == returned, what
            assert all(torch.equal(weights[name], others[name]) for name in weights), what
        dist.barrier()


@on_ranks(2)
@cells(engine=[*ZERO, *OWNED])
def test_a_step_of_deepspeed_may_be_within_autocast(engine: str) -> None:
    found = []
    for context in (nullcontext, CONTEXTS["autocast"]):
        with running(Cell(engine, clip=1.0), ExactLM()) as run:
            run.made.backward(run.made(*shares(0, 2)[dist.get_rank()]))
            with context():
                run.made.step()
            found.append(run.weights())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
