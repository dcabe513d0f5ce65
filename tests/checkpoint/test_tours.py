"""Whatever engine saved a run, in whatever format, and whatever engine loads it: it goes on as if there were no break.
A tour is one run through several engines. Each leg loads what the one before saved, as it is or converted, trains two
steps and saves; what it saves has the weights, states, rates and counters of a run without a break. Readers and writers
meet in one form, so every engine need not meet every other one: each occurs as the one that saves and as the one that
loads, with rules of every kind."""

import copy
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from torch import Tensor, nn

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint, Param, held
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.differences import differences
from tests.support.checkpoint_contents import same
from tests.support.checkpoint_engines import FROZEN, PARTS, Buffered
from tests.support.command_line import succeeds
from tests.support.engines import CLIENT, ENGINES, ZERO, Alone, Cell, ExactLM, running
from tests.support.fsdp2 import EVEN
from tests.support.fused import ATOMS as OF_FUSED
from tests.support.fused import PER_HEAD, FusedLM, HeadsLM
from tests.support.on_ranks import on_ranks
from tests.support.plain import exact_sums, shares
from tests.support.ranks import RankPool
from tests.support.references import SECTIONS
from tests.support.zero import ADAMW, OWN_ROWS

STEPS = 2
BF16, TIED = "bfloat16", {"model": {"tied": True}}
Pools = dict[int, RankPool]
STATES = {"fp32", "step", "exp_avg", "exp_avg_sq", "momentum_buffer", "second_moment"}  # files that ranks load


class LM(Buffered, ExactLM):
    """With buffers, of which training changes one, and a frozen parameter."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.get_parameter(FROZEN).requires_grad_(False).data.fill_(1.25 + options.get("seed", 0))


class Partial(LM):
    """With a matrix that has no gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unused = nn.Linear(4, 3, bias=False)


def fused(seed: int) -> nn.Module:
    return exact_sums(FusedLM(seed))


def with_heads(seed: int) -> nn.Module:
    return exact_sums(HeadsLM(seed))


@dataclass(frozen=True)
class Leg:
    """Some steps on one engine. ``via``: the formats that what it loads is converted to, one after the other; nothing
    if it loads what the leg before has saved. It is made with other rates than the run has, and has ``used`` steps
    behind it when it loads."""

    ranks: int
    cell: Cell
    via: tuple[str, ...] = ()
    used: int = 0
    steps: int = STEPS


def on(engine: str, ranks: int, *via: str, used: int = 0, steps: int = STEPS, **how: Any) -> Leg:
    """On an engine with DeepSpeed's stage, such as "zero 2". ``how`` are a cell's fields and our optimizer's options.
    Without ``via``, what it loads is converted to its own format."""
    of_cell = {key: how.pop(key) for key in ("zero", "sharding", "form") if key in how}
    if engine == "zero 3":  # some parameters are kept whole, most are not
        of_cell["zero"] = {"stage3_param_persistence_threshold": 100, **of_cell.get("zero", {})}
    cell = Cell(engine, options=how, alike=True, falling=True, **of_cell)
    return Leg(ranks, cell, via or (("dcp",) if engine in ("fsdp2", "plain") else ("universal",)), used, steps)


def native(*legs: Leg) -> list[Leg]:
    """Without conversions."""
    return [replace(each, via=()) for each in legs]


@dataclass(frozen=True)
class Tour:
    rule: str
    legs: list[Leg]
    build: Callable[..., nn.Module] = LM
    model: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)

    def made(self, seed: int) -> nn.Module:
        return self.build(seed=seed, **self.model).to(getattr(torch, self.dtype))

    def cell_of(self, leg: Leg) -> Cell:
        options = {**leg.cell.options, **self.options}
        return replace(leg.cell, matrix=self.rule, precision=self.precision, options=options)

    @property
    def known_alone(self) -> bool:
        """Whether the truth is what one process comes to; otherwise the first leg's engine without a break."""
        return self.build is LM and not self.options and (self.dtype, self.precision) == ("float32", "fp32")


def travel(tour: Tour, leg: Leg, begin: int, stops: list[int], folders: list[str], load: str | None = None) -> None:
    """On a rank: train to every stop and save there, in its folder."""
    cell, model = replace(tour.cell_of(leg), **({"rate": 0.5} if load else {})), tour.made(seed=5 if load else 0)
    with running(cell, model, converted=bool(leg.via)) as engine:
        if load:
            engine.train(range(leg.used))
            engine.load(load)
        for stop, folder in zip(stops, folders, strict=True):
            engine.train(range(begin, stop))
            engine.save(folder)
            begin = stop


def alone(tour: Tour, stops: list[int]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """On one rank: the states of trained parameters at every stop, and what else is in the model."""
    process, found = Alone(tour.made(seed=0), tour.rule, "adamw"), []
    for step in range(stops[-1] + 1):
        if step in stops:
            states = process.states()
            rest = {name: tensor.clone() for name, tensor in process.model.state_dict().items() if name not in states}
            found += [(states, rest)] * stops.count(step)
        process.step(shares(step, 1), 1, 0.9**step)
    return found


def as_checkpoint(states: dict[str, dict[str, Any]], rest: dict[str, Tensor]) -> Checkpoint:
    params, buffers = {}, {"passes": held(rest["passes"], "")}
    for name, found in states.items():
        step, owner = found.pop("step", None), found.pop("owner")
        tensors = {key: held(tensor, name) for key, tensor in found.items()}
        step = None if step is None else float(step)
        params[name] = Param(tensors["fp32"], tensors, step, owner_states={0: owner} if owner else {})
    params[FROZEN] = Param(held(rest[FROZEN], FROZEN))
    tied = {} if "lm_head.weight" in params else {"lm_head.weight": "embedding.weight"}
    return Checkpoint("one process", "", "model", params, tied=tied, buffers=buffers)


def truths(rank_pools: Pools, tour: Tour, stops: list[int], folder: Path) -> list[Checkpoint]:
    if tour.known_alone:
        return [as_checkpoint(*found) for found in rank_pools[1].run(alone, tour, stops)[0]]
    different, first = sorted(set(stops)), tour.legs[0]
    folders = {stop: folder / f"truth {stop}" for stop in different}
    rank_pools[first.ranks].run(travel, tour, first, 0, different, [str(folders[stop]) for stop in different])
    return [read(folders[stop]) for stop in stops]


def read(folder: Path) -> Checkpoint:
    """torch.distributed.checkpoint does not tell which are buffers; here it is known."""
    found = formats.read(by_name(folder))
    params = dict(found.params)
    buffers = {name: params.pop(name).best for name in ("passes",) if name in params}
    return replace(found, params=params, buffers={**found.buffers, **buffers})


def by_name(folder: Path) -> Path:
    """Beside a checkpoint that numbers the parameters, there is the same by their names."""
    return folder / "named" if (folder / "named").is_dir() else folder


def converted(source: Path, leg: Leg) -> Path:
    """Torch's own folders do not record ties: the model that loads has them."""
    for number, target in enumerate(leg.via):
        folder = source.with_name(f"{source.name}, {number} {target}")
        succeeds("convert", source, folder, "--to", target, "--json")
        if target == "universal":
            assert {path.stem for path in folder.glob("*/zero/*/*")} <= STATES
        source = folder
    return source


def check(found: Checkpoint, truth: Checkpoint, tour: Tour, stop: int, samples: int) -> None:
    assert [one for one in differences(found, truth) if one.what] == []
    begin = {SECTIONS[tour.rule]["name"]: SECTIONS[tour.rule]["lr"], "adamw": ADAMW["lr"]}
    moved = truth.scheduler["last_epoch"] if "fp16" in tour.precision else stop  # not by steps that overflowed
    rates = {rule: pytest.approx(rate * 0.9**moved, rel=1e-15) for rule, rate in begin.items()}
    assert {group["rule"]: group["lr"] for group in found.groups} == rates
    assert (found.iteration, found.samples, found.scheduler["last_epoch"]) == (stop, samples, moved)
    assert found.client == (truth.client or CLIENT)


def check_full(found: dict[str, Any], truth: Checkpoint) -> None:
    states = found["optimizer"].get("state")
    for name, param in truth.params.items():
        assert torch.equal(found["model"][name], param.best.read()), name
        for key in param.states.keys() - {"fp32"}:
            state = found["optimizer"][f"state.{name}.{key}"] if states is None else states[name][key]
            assert torch.equal(state, param.states[key].read()), (name, key)


def check_zero_to_fp32(saved: Path, truth: Checkpoint, stage: str) -> None:
    """At stage 1 it has no frozen parameters, with any optimizer."""
    found = get_fp32_state_dict_from_zero_checkpoint(str(saved))
    assert truth.params.keys() - found.keys() == ({FROZEN} & truth.params.keys() if stage == "1" else set())
    for name in found.keys() & {*truth.params, *truth.tied}:
        assert torch.equal(found[name], truth.params[truth.tied.get(name, name)].best.read().float()), name


def check_safetensors(saved: Path, truth: Checkpoint) -> None:
    folder = saved.with_name("safetensors")
    succeeds("convert", saved, folder, "--to", "safetensors", "--dtype", "float32", "--json")
    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], param.best.read().float()) for name, param in truth.params.items())


def go_through(rank_pools: Pools, folder: Path, tour: Tour) -> None:
    stops = list(itertools.accumulate(leg.steps for leg in tour.legs))
    expected = truths(rank_pools, tour, stops, folder)
    load: Path | None = None
    begin = samples = 0
    for number, (leg, stop, truth) in enumerate(zip(tour.legs, stops, expected, strict=True)):
        saved = folder / f"leg {number}"
        if load is not None:
            load = converted(load, leg)
        rank_pools[leg.ranks].run(travel, tour, leg, begin, [stop], [str(saved)], load and str(load))
        samples += leg.steps * OWN_ROWS * leg.ranks
        if "full" in leg.cell.form:
            check_full(torch.load(saved / "full.pt"), truth)
        else:
            check(read(saved), truth, tour, stop, samples)
        stage = leg.cell.engine.partition(" ")[2]
        if stage in ("1", "2", "3") and tour.precision != "bf16+fp32":
            check_zero_to_fp32(saved, truth, stage)
        load, begin = saved, stop
    if "full" not in leg.cell.form:
        check_safetensors(by_name(saved), truth)


PADDED, COMPACT, AUTO = ({"layout": layout} for layout in ("padded", "compact", "auto"))
PAIRS, SINGLES = {"group_size": 2}, {"group_size": 1}
OFFLOADED, ALIGNED = {"zero": {"offload_optimizer": {"device": "cpu"}}}, {"zero": {"parameter_alignment": True}}
INT8 = {"momentum_dtype": "int8"}  # whose blocks are rows here: where none is cut, they are the same on all ranks
TWICE, WIDE = ("universal", "dcp"), {"grad_dtype": "float32"}
FUSED, OF_PARTS = {"build": fused, "options": {"atoms": OF_FUSED}}, {"options": {"atoms": PARTS}}
OWNER_RULES = ("soap", "adamuon", "shampoo", "a class")
OWNED = [on("owned 1", 2, **PADDED), on("owned 0", 1, **PADDED), on("owned 2", 4, **COMPACT), on("owned 0", 2)]
ACROSS: dict[str, Tour] = {
    "muon": Tour("muon", [on("zero 2", 2), on("owned 0", 1), on("zero 3", 4), on("fsdp2", 3, *TWICE)]),
    "muon, used": Tour("muon", [on("owned 1", 2), on("zero 1", 1, used=2), on("plain", 3), on("zero 0", 3)]),
    "muon, offloaded": Tour("muon", [on("plain", 2), on("zero 2", 2, **OFFLOADED), on("zero 3", 2, **OFFLOADED)]),
    "muon, pairs": Tour("muon", [on("zero 0", 2), on("owned 1", 4, used=2, **PAIRS), on("owned 2", 2)]),
    "soap": Tour("soap", [on("plain", 2), on("fsdp2", 2), on("zero 1", 4), on("owned 2", 3, **COMPACT)]),
    "soap, twice": Tour("soap", [on("zero 2", 2), on("owned 0", 4, **SINGLES), on("plain", 4, *TWICE)]),
    "soap, tied": Tour("soap", [on("fsdp2", 1), on("zero 0", 2, used=2), on("zero 2", 3), on("zero 3", 1)], **TIED),
    "normuon": Tour("normuon", [on("zero 3", 2), on("zero 0", 4), on("owned 1", 3, **COMPACT), on("zero 2", 1)]),
    "normuon, used": Tour("normuon", [on("fsdp2", 2), on("zero 1", 3, used=2), on("zero 3", 3), on("plain", 1)]),
    "shampoo": Tour("shampoo", [on("owned 1", 4, **PAIRS), on("zero 1", 2), on("zero 2", 4), on("zero 0", 1)]),
    **{rule: Tour(rule, [on("zero 3", 2), on("owned 1", 3), on("fsdp2", 4)]) for rule in ("muon2", "muonh", "adamh")},
    "parts": Tour("soap", [on("fsdp2", 2), on("zero 1", 2), on("fsdp2", 3), on("plain", 2)], **OF_PARTS),
    **{
        f"flat, {rule}": Tour(rule, [on("fsdp2", 2, form="flat"), on("fsdp2", 3, form="flat"), on("fsdp2", 1)])
        for rule in ("muon", "shampoo", "a class")
    },
    "flat, parts": Tour("soap", [on("fsdp2", 2, form="flat"), on("fsdp2", 3, form="flat")], **OF_PARTS),
    "fused, soap": Tour("soap", [on("zero 3", 2), on("zero 2", 4), on("owned 1", 4), on("zero 0", 2)], **FUSED),
    "fused, normuon": Tour("normuon", [on("owned 2", 2), on("zero 3", 4)], **FUSED),
    "fused, as saved": Tour("muon", native(on("zero 0", 2), on("zero 0", 4)), **FUSED),
    "per head": Tour("normuon", [on("owned 1", 2), on("zero 3", 4), on("plain", 3)], with_heads, options=PER_HEAD),
    "int8": Tour("muon", [on("plain", 2), on("fsdp2", 4), on("zero 0", 1), on("owned 1", 3)], options=INT8),
    "int8, muon2": Tour("muon2", [on("owned 2", 2), on("fsdp2", 3), on("zero 0", 4)], options=INT8),
    "int8, parts": Tour("adamuon", [on("fsdp2", 2), on("plain", 3), on("zero 0", 2)], options={**INT8, "atoms": PARTS}),
    "partial": Tour("soap", [on("owned 1", 2), on("owned 2", 4)], Partial, {"tied": True}),
    "bf16": Tour("muon", [on("zero 1", 2), on("zero 2", 4, **ALIGNED), on("zero 1", 1)], precision="bf16"),
    "bf16, stage 3": Tour("muon", [on("zero 3", 2), on("zero 3", 1), on("zero 3", 4)], precision="bf16"),
    "bf16, owned": Tour("muon", [on("owned 1", 2), on("owned 2", 4), on("owned 0", 1)], precision="bf16"),
    "bf16, to owned": Tour("muon", [on("zero 3", 2), on("owned 2", 4, steps=0)], precision="bf16"),
    **{f"{precision}, owned": Tour("muon", OWNED, precision=precision) for precision in ("bf16+fp32", "fp16+fp32")},
    "bf16 + fp32": Tour("muon", [on("zero 1", 2), on("zero 1", 4)], precision="bf16+fp32"),
}
TWO, FOUR, THREE = on("plain", 2, **COMPACT), on("plain", 4, **PADDED, bucket_mb=1.0), on("plain", 3, **COMPACT)
LAZY, SMALL = {"overlap_param_gather": True}, on("plain", 1, **COMPACT, bucket_mb=0.002)
INSTANCES = native(on("plain", 4, **AUTO, **PAIRS), on("plain", 2, **COMPACT, **SINGLES), on("plain", 4, **SINGLES))
SHARDED = [on("fsdp2", 4, sharding=sharding) for sharding in ("several roots", "hybrid")]
APART = on("fsdp2", 4, sharding="hybrid", share_copies=False)
MESHES = [on("fsdp2", 4, sharding="tensor parallel"), on("fsdp2", 2, sharding="columns"), on("fsdp2", 3)]
AS_SAVED: dict[str, Tour] = {
    **{f"compact, {rule}": Tour(rule, native(FOUR, SMALL, THREE)) for rule in ("muon", "soap", "shampoo")},
    **{f"padded, {rule}": Tour(rule, native(TWO, FOUR)) for rule in ("adamuon", "a class")},
    "compact, bf16": Tour("muon", native(*(on("plain", n, **COMPACT, **LAZY, **WIDE) for n in (2, 4))), dtype=BF16),
    "instances": Tour("muon", INSTANCES),
    "kept gradients": Tour("muon", native(*(on("plain", n, keep_full_grads=True) for n in (2, 3, 1)))),
    "plain and fsdp2": Tour("soap", native(on("fsdp2", 2), on("plain", 3), on("fsdp2", 1), SMALL), **OF_PARTS),
    "zero 0": Tour("muon", native(on("zero 0", 2), on("zero 0", 1), on("zero 0", 4))),
    **{f"zero 0, {rule}": Tour(rule, native(on("zero 0", 2), on("zero 0", 4))) for rule in ("soap", "adamuon")},
    **{
        f"owned 0, {precision}": Tour(
            "muon", native(*(on("owned 0", n, **PAIRS, **COMPACT) for n in (2, 4))), precision=precision
        )
        for precision in ("fp32", "bf16")
    },
    **{
        f"{engine}, {rule}": Tour(rule, native(on(engine, 2), on(engine, 2)))
        for engine, rule in (
            *(("zero 1", "adamuon"), ("zero 2", "shampoo"), ("zero 3", "a class"), ("zero 3", "soap")),
            *(("owned 0", "soap"), ("owned 2", "adamuon")),
        )
    },
    "other owners": Tour("soap", native(on("zero 2", 2, policy="stay"), on("zero 2", 2, policy="balance"))),
    "torch, bare": Tour("soap", native(*(on("plain", n, form="bare") for n in (2, 3, 1))), **OF_PARTS),
    "torch, by name": Tour(
        "muon", native(on("plain", 2, form="nested"), on("fsdp2", 3), on("plain", 4, form="async"), on("plain", 3))
    ),
    "int8, by name": Tour("muon", native(on("plain", 2, form="nested"), on("fsdp2", 3), on("plain", 3)), options=INT8),
    "int8, flat": Tour("muon", native(on("fsdp2", 4, form="flat"), on("fsdp2", 3, form="flat")), options=INT8),
    "torch, flat": Tour("muon", native(*(on("plain", n, form="flat", **WIDE) for n in (2, 3))), dtype=BF16),
    "several roots": Tour("muon", native(*SHARDED, on("fsdp2", 3), on("fsdp2", 1))),
    "hybrid, apart": Tour("soap", native(APART, SHARDED[1], APART, on("fsdp2", 3))),
    "meshes": Tour("soap", native(*MESHES, on("fsdp2", 2, sharding="ignored_params")), model={"hidden": EVEN}),
    **{
        f"fsdp2, {form}, {rule}": Tour(
            rule, native(on("fsdp2", 4, form=form, sharding="hybrid"), on("fsdp2", 3, form=form))
        )
        for rule, form in zip(("muon", *OWNER_RULES), ("full", "flat full", "async", "flat", "bare"))
    },
}


@pytest.mark.parametrize("tour", [pytest.param(tour, id=name) for name, tour in (ACROSS | AS_SAVED).items()])
def test_a_checkpoint_resumes_on_every_engine(rank_pools: Pools, tmp_path: Path, tour: Tour) -> None:
    go_through(rank_pools, tmp_path, tour)


def test_every_engine_loads_on_every_number_of_ranks() -> None:
    """Every engine saves and loads at every stage."""
    legs = [(here.ranks, here.cell.engine) for tour in ACROSS.values() for here in tour.legs[1:]]
    assert {(ranks, engine) for engine in ZERO for ranks in (1, 2, 3, 4)} <= set(legs)
    assert {engine for _, engine in legs} == set(ENGINES)
    assert {here.cell.engine for tour in ACROSS.values() for here in tour.legs[:-1]} == set(ENGINES)


# What converters write is what the engine itself would have
def test_what_is_written_for_fsdp2_is_formed_as_torch_writes_it(rank_pools: Pools, tmp_path: Path) -> None:
    """Paths, shapes and dtypes of weights and states."""

    def form(folder: Path) -> dict[str, Any]:
        found = DcpFolder(folder)
        keys = [key for key in found.tensors if key.startswith(("model.", "optimizer.state."))]
        return {key: (found.paths[key], found.tensors[key].shape, found.tensors[key].dtype) for key in keys}

    saving = on("fsdp2", 2)
    for tour in (Tour("muon", [saving]), Tour("soap", [saving], **OF_PARTS)):
        saved = tmp_path / tour.rule
        rank_pools[2].run(travel, tour, saving, 0, [STEPS], [str(saved)])
        assert form(converted(saved, saving)) == form(saved)


@pytest.mark.parametrize("rule", OWNER_RULES)
@on_ranks(2)
def test_owned_state_dicts_resume(rule: str) -> None:
    """The memory report counts them. Each rank's own state_dict, loaded into another optimizer."""
    cell, file = Cell("plain", rule), io.BytesIO()
    with running(cell, ExactLM()) as engine, running(cell, ExactLM(seed=5)) as again:
        before = sum(of_rank.state for of_rank in engine.optimizer.memory_report())
        engine.train(range(3))
        again.model.load_state_dict(engine.weights())
        grown = sum(of_rank.state for of_rank in engine.optimizer.memory_report()) - before
        if rule == "soap":  # two moments of the matrix, and a statistic and a basis of every side
            shapes = [(63, 24), (41, 63), (24, 41), (2, 5)]
            least = sum(4 * (2 * m * n + 2 * (m * m + n * n)) for m, n in shapes)
            assert least <= grown <= least * 1.01
        torch.save(engine.optimizer.state_dict(), file)
        file.seek(0)
        again.optimizer.load_state_dict(torch.load(file, weights_only=True))
        for one in (engine, again):
            one.train(range(3, 6))
        assert same(engine.weights(), again.weights())


@pytest.mark.parametrize("rule", ["muon", *OWNER_RULES])
@on_ranks(2)
def test_fsdp2_state_before_the_first_step(rule: str) -> None:
    """State of FSDP2 before the first step is that of a fresh optimizer. Whatever was tried to know the form of its
    state."""
    cell = Cell("fsdp2", rule)
    with running(cell, ExactLM()) as saved, running(cell, ExactLM()) as loaded, running(cell, ExactLM()) as untouched:
        loaded.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
        for one in (saved, loaded, untouched):
            one.train(range(2))
        assert same(saved.weights(), untouched.weights()) and same(loaded.weights(), untouched.weights())


class Distilled(ExactLM):
    """A student and its frozen teacher, equal at the start, each with its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.teacher = ExactLM(tied=True).requires_grad_(False)


def save_distilled(way: str, form: str, folder: str) -> None:
    """After a step at a rate of 0, which changes no weight."""
    with running(Cell(way, form=form, rate=0.0), Distilled()) as engine:
        engine.train(range(1))
        engine.save(folder)


WITH_A_TEACHER = [
    ("plain", "nested"),
    ("fsdp2", "flat"),
    ("plain", ""),
    ("zero 0", ""),
    ("zero 3", ""),
    ("owned 1", ""),
]


@pytest.mark.parametrize(("way", "form"), WITH_A_TEACHER)
def test_a_frozen_copy_is_no_tied_weight_in_any_format(ranks: RankPool, tmp_path: Path, way: str, form: str) -> None:
    """From every format, and through each: heads that are said to be embeddings, the teacher, and nothing else."""
    ranks.run(save_distilled, way, form, str(tmp_path / "saved"))
    held = dict(Distilled().named_parameters())
    assert torch.equal(held["layers.0.weight"], held["teacher.layers.0.weight"]) and "lm_head.weight" not in held
    pairs = (f"{of}lm_head.weight={of}embedding.weight" for of in ("", "teacher."))
    tied = [word for pair in pairs for word in ("--tied", pair)]  # torch records neither, DeepSpeed no frozen one
    for at, to in itertools.pairwise(["saved", "universal", "dcp", "safetensors"]):
        succeeds("convert", tmp_path / at, tmp_path / to, "--to", to, *(tied if at == "saved" else ()))
    exported = load_file(tmp_path / "safetensors" / "model.safetensors")
    assert exported.keys() == held.keys()
    assert all(torch.equal(tensor, held[name]) for name, tensor in exported.items())
