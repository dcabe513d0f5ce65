"""Whatever engine saved a run, in whatever format, and whatever engine loads it: it goes on as if there were no break.
A tour is one run through several engines. Each leg loads what the one before saved, as it is or converted, trains two
steps and saves; what it saves has the weights, states, rates and counters of a run without a break. Readers and writers
meet in one form, so every engine need not meet every other one: each occurs as the one that saves and as the one that
loads, with rules of every kind.

The legs of a tour are a route:

    route   = leg, {", ", leg}
    leg     = engine, " on ", ranks, {" ", word}    on how many ranks, and what else there is to it
    engine  = "plain" | "fsdp2" | "zero ", stage | "owned ", stage    stage: DeepSpeed's, of ZeRO or owned storage
    word    = a key of WORDS, which says what it sets of the leg, the cell or our optimizer

"owned 0 on 4 singles, plain on 4 twice": owned storage under DeepSpeed at stage 0 on 4 ranks, each its own instance;
then plain PyTorch on 4 ranks, which loads that converted to universal and then to its own format."""

import copy
import functools
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
from tests.cells import with_full
from tests.checkpoint_contents import same
from tests.checkpoint_engines import FROZEN, PARTS, Buffered
from tests.command_line import succeeds
from tests.engines import CLIENT, ENGINES, ZERO, Alone, Cell, ExactLM, running
from tests.fsdp2 import EVEN
from tests.fused import ATOMS as OF_FUSED
from tests.fused import PER_HEAD, FusedLM, HeadsLM
from tests.on_ranks import on_ranks
from tests.owned import exact_sums, shares
from tests.ranks import RankPool
from tests.references import SECTIONS
from tests.zero import ADAMW, OWN_ROWS

STEPS = 2
Pools = dict[int, RankPool]
ATOMS, PARTED_BY = {"atoms": OF_FUSED}, {"atoms": PARTS}
GoOn = Callable[["Tour"], None]
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
    """Some steps on one engine. ``via``: the formats that what it loads is converted to, one after the other. It is
    made with other rates than the run has, and has ``used`` steps behind it when it loads."""

    ranks: int
    cell: Cell
    via: tuple[str, ...] = ()
    used: int = 0
    steps: int = STEPS


FORMS = ("nested", "flat", "async", "full", "flat full", "bare")  # of torch's
WORDS: dict[str, dict[str, Any]] = {
    # of the leg
    **{"used": {"used": 2}, "untrained": {"steps": 0}},
    "twice": {"twice": True},  # converted, to universal first
    # of the cell
    **{form: {"form": form} for form in FORMS},
    **{word: {"sharding": word} for word in ("rows", "columns", "hybrid", "ignored_params")},
    **{"tensors": {"sharding": "tensor parallel"}, "roots": {"sharding": "several roots"}},
    "offloaded": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "aligned": {"zero": {"parameter_alignment": True}},
    # of our optimizer
    **{layout: {"layout": layout} for layout in ("padded", "compact", "auto")},
    **{policy: {"policy": policy} for policy in ("stay", "balance")},
    **{"pairs": {"group_size": 2}, "singles": {"group_size": 1}, "small": {"bucket_mb": 0.002}},
    **{"large": {"bucket_mb": 1.0}, "lazy": {"overlap_param_gather": True}},
    **{"kept": {"keep_full_grads": True}, "wide": {"grad_dtype": "float32"}},
}


def route(text: str, *further: str, native: bool = False) -> list[Leg]:
    """The legs of a route, all with the ``further`` words. Each loads what is converted to the format of its engine, or
    ``native``: as the leg before has saved it."""
    legs = []
    for words in text.split(", "):
        engine, _, rest = words.partition(" on ")
        ranks, *options = [*rest.split(), *further]
        how = {key: value for word in options for key, value in WORDS[word].items()}
        of_leg = {key: how.pop(key) for key in ("used", "steps") if key in how}
        of_cell = {key: how.pop(key) for key in ("zero", "sharding", "form") if key in how}
        if engine == "zero 3":  # some parameters are kept whole, most are not
            of_cell["zero"] = {"stage3_param_persistence_threshold": 100, **of_cell.get("zero", {})}
        via = () if native else ("dcp",) if engine in ("fsdp2", "plain") else ("universal",)
        via = ("universal", *via) if how.pop("twice", False) else via
        cell = Cell(engine, options=how, alike=True, falling=True, **of_cell)
        legs.append(Leg(int(ranks), cell, via, **of_leg))
    return legs


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


def converted(source: Path, leg: Leg, tied: bool = False) -> Path:
    of_tied = ("--tied", "lm_head.weight=embedding.weight") * tied  # which torch's own folders do not record
    for number, target in enumerate(leg.via):
        folder = source.with_name(f"{source.name}, {number} {target}")
        succeeds("convert", source, folder, "--to", target, *of_tied, "--json")
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
            load = converted(load, leg, tour.model.get("tied", False))
        rank_pools[leg.ranks].run(travel, tour, leg, begin, [stop], [str(saved)], load and str(load))
        samples += leg.steps * OWN_ROWS * leg.ranks
        if "full" not in leg.cell.form:  # which the next leg reads
            check(read(saved), truth, tour, stop, samples)
        stage = leg.cell.engine.partition(" ")[2]
        if stage in ("1", "2", "3") and tour.precision != "bf16+fp32":
            check_zero_to_fp32(saved, truth, stage)
        load, begin = saved, stop
    if "full" not in leg.cell.form:
        check_safetensors(by_name(saved), truth)


@pytest.fixture
def go_on(rank_pools: Pools, tmp_path: Path) -> GoOn:
    return functools.partial(go_through, rank_pools, tmp_path)


MUON = "zero 2 on 2, owned 0 on 1, zero 3 on 4, fsdp2 on 3 twice, owned 1 on 2, zero 1 on 1 used, plain on 3, "
MUON += "zero 0 on 3, owned 1 on 4 pairs used, zero 2 on 2 offloaded, zero 3 on 2 offloaded, owned 2 on 2, fsdp2 on 1"
SOAP = "plain on 2, fsdp2 on 2, zero 1 on 4, owned 2 on 3 compact, fsdp2 on 1, owned 0 on 1, zero 0 on 2 used, "
SOAP += "owned 0 on 4 singles, zero 2 on 3, plain on 4 twice, zero 3 on 1"
NORMUON = "zero 3 on 2, zero 0 on 4, owned 1 on 3 compact, zero 1 on 3 used, zero 2 on 1, plain on 1, "
NORMUON += "owned 2 on 2 padded, zero 3 on 3, fsdp2 on 4"
SHAMPOO = (
    "zero 0 on 1, owned 1 on 4 pairs, zero 1 on 2 used, owned 2 on 2 singles, zero 2 on 4, fsdp2 on 3, zero 0 on 1"
)
PARTED = "fsdp2 on 2, zero 1 on 2, fsdp2 on 3, plain on 2"
FLAT = "fsdp2 on 2 flat, fsdp2 on 3 flat, fsdp2 on 1"
FUSED = "zero 3 on 2, zero 1 on 1, zero 2 on 4, owned 1 on 4, zero 0 on 2"
IN_BF16 = "zero 1 on 2, zero 1 on 1, zero 2 on 4 aligned, zero 1 on 4, zero 2 on 1"
OWNED = "owned 1 on 2 padded, owned 0 on 1 padded, owned 2 on 2 compact, owned 0 on 2 singles, "
OWNED += "owned 1 on 4 pairs, owned 2 on 4 padded, owned 1 on 2 compact singles, owned 2 on 2 compact"
OWNER_RULES = ("soap", "adamuon", "shampoo", "a class")
WAYS = {"muon": MUON, "soap": SOAP, "normuon": NORMUON, "shampoo": SHAMPOO}
ACROSS: dict[str, Tour] = {
    **{rule: Tour(rule, route(way), model={"tied": rule == "soap"}) for rule, way in WAYS.items()},
    "muon2": Tour(
        "muon2", route("zero 3 on 2, owned 1 on 3 compact, plain on 1, zero 2 on 4, fsdp2 on 3, zero 0 on 2")
    ),
    "muonh": Tour("muonh", route("zero 3 on 2, owned 1 on 3 compact, fsdp2 on 4, zero 0 on 2, plain on 1")),
    "adamh": Tour("adamh", route("zero 2 on 2, owned 1 on 3 compact, fsdp2 on 2, zero 0 on 2, plain on 1")),
    "parts": Tour("soap", route(PARTED), options=PARTED_BY),
    **{f"flat, {rule}": Tour(rule, route(FLAT)) for rule in ("muon", "adamuon", "shampoo", "a class")},
    "flat, parts": Tour("soap", route(FLAT), options=PARTED_BY),
    "fused, soap": Tour("soap", route(FUSED), fused, options=ATOMS),
    "fused, normuon": Tour("normuon", route("owned 2 on 2, zero 3 on 4, zero 2 on 2"), fused, options=ATOMS),
    "per head": Tour(
        "normuon", route("owned 1 on 2, zero 3 on 4, zero 2 on 2, plain on 3"), with_heads, options=PER_HEAD
    ),
    "fused, without ZeRO": Tour("muon", route("zero 0 on 2, zero 0 on 4", native=True), fused, options=ATOMS),
    "partial": Tour("soap", route("owned 1 on 2, owned 2 on 4"), Partial, {"tied": True}),
    "bf16": Tour("muon", route(IN_BF16), precision="bf16"),
    "bf16, stage 3": Tour("muon", route("zero 3 on 2, zero 3 on 1, zero 3 on 4"), precision="bf16"),
    "bf16, owned": Tour("muon", route("owned 1 on 2, owned 2 on 4, owned 0 on 1"), precision="bf16"),
    "bf16, to owned": Tour("muon", route("zero 3 on 2, owned 2 on 4 untrained"), precision="bf16"),
    **{f"{how}, owned": Tour("muon", route(OWNED), precision=how) for how in ("bf16+fp32", "fp16+fp32")},
    "bf16 + fp32": Tour("muon", route("zero 1 on 2, zero 1 on 4, zero 1 on 1"), precision="bf16+fp32"),
}


@pytest.mark.parametrize("name", ACROSS)
def test_a_run_goes_on_from_engine_to_engine(go_on: GoOn, name: str) -> None:
    go_on(ACROSS[name])


@pytest.mark.full
@pytest.mark.parametrize(("rule", "way"), [pair for pair in itertools.product(WAYS, WAYS) if len({*pair}) == 2])
def test_a_run_goes_on_with_every_rule_on_every_way(go_on: GoOn, rule: str, way: str) -> None:
    go_on(Tour(rule, route(WAYS[way])))


def test_every_engine_saves_and_loads_at_every_stage_on_every_number_of_ranks() -> None:
    legs = [(here.ranks, here.cell.engine) for tour in ACROSS.values() for here in tour.legs[1:]]
    assert {(ranks, engine) for engine in ZERO for ranks in (1, 2, 3, 4)} <= set(legs)
    assert {engine for _, engine in legs} == set(ENGINES)
    assert {here.cell.engine for tour in ACROSS.values() for here in tour.legs[:-1]} == set(ENGINES)


# Without a conversion
WIDE = {"float32": (), "bfloat16": ("wide",)}
LAYOUTS = {  # of owned storage in plain PyTorch
    "to compact": "plain on 2 padded, plain on 1 compact small, plain on 3 compact, plain on 4 padded large",
    "to padded": "plain on 2 compact lazy, plain on 1 padded, plain on 3 padded, plain on 4 compact lazy",
    "instances": "plain on 4 auto pairs, plain on 2 compact singles, plain on 4 padded singles, "
    "plain on 4 compact pairs lazy, plain on 1 padded",
    "kept gradients": "plain on 2 auto kept, plain on 3 compact kept, plain on 1 padded kept",
}
OFTEN = [("muon", *row) for row in zip(LAYOUTS, ("bfloat16", "float32", "bfloat16", "float32"))]
OFTEN += [(rule, layouts, "float32") for rule, layouts in zip(OWNER_RULES, [*LAYOUTS][:2] * 2)]
SELDOM = [("muon", *row) for row in zip(LAYOUTS, ("float32", "bfloat16", "float32"))]  # kept gradients are in bf16


@pytest.mark.parametrize(("rule", "layouts", "dtype"), with_full(OFTEN, SELDOM))
def test_owned_storage_goes_on_on_other_ranks_and_layouts(go_on: GoOn, rule: str, layouts: str, dtype: str) -> None:
    go_on(Tour(rule, route(LAYOUTS[layouts], *WIDE[dtype], native=True), dtype=dtype))


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_plain_pytorch_and_fsdp2_read_each_others_checkpoints(go_on: GoOn, rule: str) -> None:
    legs = route("fsdp2 on 2, plain on 3, fsdp2 on 1, plain on 4 small, plain on 1", native=True)
    go_on(Tour(rule, legs, options=PARTED_BY if rule == "soap" else {}))


ALONE = "{0} on 2, {0} on 1, {0} on 4"  # without ZeRO: on any number of ranks
AS_SAVED = [
    ("muon", ALONE.format("zero 0"), "fp32"),
    *(("muon", f"{ALONE.format('owned 0')} pairs compact", precision) for precision in ("fp32", "bf16")),
    *((rule, "zero 0 on 2, zero 0 on 4", "fp32") for rule in ("soap", "adamuon")),
    *((rule, f"zero {stage} on 2, zero {stage} on 2", "fp32") for stage, rule in enumerate(OWNER_RULES)),
    ("soap", "zero 2 on 2 stay, zero 2 on 2 balance", "fp32"),  # which brings what owners keep to others
    ("soap", "zero 3 on 2, zero 3 on 2", "fp32"),
    ("soap", "owned 0 on 2, owned 0 on 2", "fp32"),
    ("adamuon", "owned 2 on 2, owned 2 on 2", "fp32"),
]
ON_TWO = [f"{engine} on 2, {engine} on 2" for engine in (*ZERO, "owned 0", "owned 2")]


@pytest.mark.parametrize(
    ("rule", "way", "precision"), with_full(AS_SAVED, itertools.product(OWNER_RULES, ON_TWO, ["fp32"]))
)
def test_deepspeed_goes_on_from_what_it_has_saved(go_on: GoOn, rule: str, way: str, precision: str) -> None:
    go_on(Tour(rule, route(way, native=True), precision=precision))


BY_TORCH = {
    "bare": "plain on 2 bare, plain on 3 compact bare, plain on 1 bare, plain on 4 padded pairs bare",
    "by name": "plain on 2 nested, fsdp2 on 3, plain on 1 padded nested, plain on 4 compact async, plain on 3",
    "flat": "plain on 2 flat, plain on 3 padded flat, plain on 1",
}


FORMATS = [("soap", "bare", "float32"), ("muon", "bare", "bfloat16")]
FORMATS += [("muon", "by name", "float32"), ("muon", "flat", "bfloat16")]


@pytest.mark.parametrize(("rule", "way", "dtype"), with_full(FORMATS, [("muon", "bare", "float32")]))
def test_plain_pytorch_goes_on_with_torchs_own_formats_in_layouts(go_on: GoOn, rule: str, way: str, dtype: str) -> None:
    legs = route(BY_TORCH[way], *WIDE[dtype], native=True)
    go_on(Tour(rule, legs, dtype=dtype, options=PARTED_BY if rule == "soap" else {}))


UNEVEN = "fsdp2 on 4 roots, fsdp2 on 4 hybrid, fsdp2 on 3, fsdp2 on 1, fsdp2 on 2, fsdp2 on 4 hybrid, fsdp2 on 2, "
UNEVEN += "fsdp2 on 4, fsdp2 on 3"
SQUARE = "fsdp2 on 4 tensors, fsdp2 on 2 columns, fsdp2 on 4 tensors, fsdp2 on 4 hybrid, fsdp2 on 2, fsdp2 on 3, "
SQUARE += "fsdp2 on 2 ignored_params, fsdp2 on 4 roots, fsdp2 on 1"


LONG_WAYS = {"uneven": UNEVEN, "square": SQUARE, "short": "fsdp2 on 4 hybrid, fsdp2 on 3, fsdp2 on 1"}
RULES_AND_WAYS = [("muon", "uneven"), ("soap", "square")]
OF_TORCH = [*((rule, ways, "nested") for rule, ways in RULES_AND_WAYS), ("muon", "square, 0", "nested")]
OF_TORCH += [(rule, f"{ways}, {n}", form) for rule, ways in RULES_AND_WAYS for n, form in enumerate(FORMS[1:])]
FURTHER = zip(OWNER_RULES[1:] * 2, ("nested", "full", "flat full", "flat full", "nested", "full"))
OF_TORCH += [(rule, "short", form) for rule, form in FURTHER]


@pytest.mark.parametrize(
    ("rule", "ways", "form"), with_full(OF_TORCH, itertools.product(("muon", "soap"), ("uneven", "square"), FORMS))
)
def test_fsdp2_goes_on_with_torchs_own_formats_on_other_ranks_and_shardings(
    go_on: GoOn, rule: str, ways: str, form: str
) -> None:
    """All legs of a way, or the four from twice the number on; those of numbers 0 to 4 are all of it."""
    way, _, number = ways.partition(", ")
    legs = route(LONG_WAYS[way], form, native=True)
    legs = (legs * 2)[2 * int(number) :][:4] if number else legs
    go_on(Tour(rule, legs, model={"hidden": EVEN} if way == "square" else {}))


# What converters write is what the engine itself would have
def test_what_is_written_for_fsdp2_is_formed_as_torch_writes_it(rank_pools: Pools, tmp_path: Path) -> None:
    """Paths, shapes and dtypes of weights and states."""

    def form(folder: Path) -> dict[str, Any]:
        found = DcpFolder(folder)
        keys = [key for key in found.tensors if key.startswith(("model.", "optimizer.state."))]
        return {key: (found.paths[key], found.tensors[key].shape, found.tensors[key].dtype) for key in keys}

    legs = route("fsdp2 on 2")
    for tour in (Tour("muon", legs), Tour("soap", legs, options=PARTED_BY)):
        saved = tmp_path / tour.rule
        rank_pools[2].run(travel, tour, *legs, 0, [STEPS], [str(saved)])
        assert form(converted(saved, *legs)) == form(saved)


@pytest.mark.parametrize("rule", OWNER_RULES)
@on_ranks(2)
def test_owned_state_dicts_go_on_and_the_memory_report_counts_them(rule: str) -> None:
    """Each rank's own state_dict, loaded into another optimizer."""
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
def test_state_of_fsdp2_before_the_first_step_is_that_of_a_fresh_optimizer(rule: str) -> None:
    """Whatever was tried to know the form of its state."""
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
def test_a_frozen_copy_is_no_tied_weight(ranks: RankPool, tmp_path: Path, way: str, form: str) -> None:
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
