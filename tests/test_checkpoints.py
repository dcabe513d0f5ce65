"""Whatever engine saved a run, in whatever format, and whatever engine loads it: it goes on as if there were no break.

A tour is one run through several engines. Each leg loads what the one before saved, as it is or converted, trains two
steps and saves; what it saves has the weights, states, rates and counters of a run without a break. Readers and writers
meet in one form, so every engine need not meet every other one: each occurs as the one that saves and as the one that
loads, with rules of every kind.
"""

from __future__ import annotations

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
from lwopt_backend.checkpoint.contents import Checkpoint, Param
from lwopt_backend.checkpoint.dcp.files import DcpFolder
from lwopt_backend.checkpoint.differences import differences
from lwopt_backend.checkpoint.lazy import held
from tests.cells import with_full
from tests.checkpoint_engines import FROZEN, PARTS
from tests.command_line import succeeds
from tests.engines import CLIENT, ENGINES, ZERO, Alone, Cell, ExactLM, running
from tests.fsdp2 import EVEN
from tests.fused import ATOMS, FusedLM
from tests.owned import exact_sums, shares
from tests.ranks import RankPool
from tests.rules import SECTIONS
from tests.zero import ADAMW, OWN_ROWS

STEPS = 2
Pools = dict[int, RankPool]
STATES = {"fp32", "step", "exp_avg", "exp_avg_sq", "momentum_buffer"}  # files that DeepSpeed's loader looks for


class LM(ExactLM):
    """With a buffer that training changes, and a frozen parameter."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("passes", torch.zeros(2))
        self.get_parameter(FROZEN).requires_grad_(False).data.fill_(1.25 + options.get("seed", 0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(tokens, targets)


class Partial(LM):
    """With a matrix that has no gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unused = nn.Linear(4, 3, bias=False)


def fused(seed: int) -> nn.Module:
    return exact_sums(FusedLM(seed))


@dataclass(frozen=True)
class Leg:
    """Some steps on one engine. ``via``: the formats that what it loads is converted to, one after the other.

    It is made with other rates than the run has, and has ``used`` steps behind it when it loads.
    """

    ranks: int
    cell: Cell
    via: tuple[str, ...] = ()
    used: int = 0
    weights_last: bool = False
    steps: int = STEPS


def leg(engine: str, ranks: int, *, via: tuple[str, ...] | None = None, **how: Any) -> Leg:
    """After a conversion to the format that the engine loads; further options are those of our optimizer."""
    of_leg = {key: how.pop(key) for key in ("used", "weights_last", "steps") if key in how}
    of_cell = {key: how.pop(key) for key in ("zero", "sharding", "form") if key in how}
    if engine == "zero 3":  # some parameters are kept whole, most are not
        of_cell["zero"] = {"stage3_param_persistence_threshold": 100, **of_cell.get("zero", {})}
    formats_of = {"fsdp2": ("dcp",), "plain": ("owned",)}
    via = formats_of.get(engine, ("universal",)) if via is None else via
    return Leg(ranks, Cell(engine, options=how, alike=True, falling=True, **of_cell), via, **of_leg)


def natively(*legs: Leg) -> list[Leg]:
    return [replace(one, via=()) for one in legs]


@dataclass(frozen=True)
class Tour:
    rule: str
    legs: list[Leg]
    build: Callable[..., nn.Module] = LM
    model: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    precision: str = "fp32"
    atoms: dict[str, Any] | None = None

    def made(self, seed: int) -> nn.Module:
        return self.build(seed=seed, **self.model).to(getattr(torch, self.dtype))

    def cell_of(self, leg: Leg) -> Cell:
        atoms = {} if self.atoms is None else {"atoms": self.atoms}
        return replace(leg.cell, matrix=self.rule, precision=self.precision, options={**leg.cell.options, **atoms})

    @property
    def known_alone(self) -> bool:
        """Whether the truth is what one process comes to; else what the first leg's engine does without a break."""
        return self.build is LM and self.atoms is None and (self.dtype, self.precision) == ("float32", "fp32")


def travel(tour: Tour, leg: Leg, begin: int, stops: list[int], folders: list[str], load: str | None = None) -> None:
    """On a rank: train to every stop and save there, in its folder."""
    strange = {"rate": 0.5} if load else {}
    with running(
        replace(tour.cell_of(leg), **strange), tour.made(seed=5 if load else 0), converted=bool(leg.via)
    ) as engine:
        if load:
            engine.train(range(leg.used))
            engine.load(load, weights_last=leg.weights_last)
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
    found = formats.read(folder)
    params = dict(found.params)
    buffers = {name: params.pop(name).best for name in ("passes",) if name in params}
    return replace(found, params=params, buffers={**found.buffers, **buffers})


def converted(source: Path, leg: Leg) -> Path:
    """What the leg loads."""
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
    assert {group["rule"]: group["lr"] for group in found.groups} == {
        rule: rate * 0.9**stop for rule, rate in begin.items()
    }
    assert (found.iteration, found.samples, found.scheduler["last_epoch"]) == (stop, samples, stop)
    assert found.client == CLIENT


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


def go_on(rank_pools: Pools, folder: Path, tour: Tour) -> None:
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
        if "full" not in leg.cell.form:  # which the next leg reads
            check(read(saved), truth, tour, stop, samples)
        stage = leg.cell.engine.partition(" ")[2]
        if stage in ("1", "2", "3") and tour.precision != "bf16+fp32":
            check_zero_to_fp32(saved, truth, stage)
        load, begin = saved, stop
    if "full" not in leg.cell.form:
        check_safetensors(saved, truth)


OFFLOADED, ALIGNED = {"offload_optimizer": {"device": "cpu"}}, {"parameter_alignment": True}
MUON = [
    leg("zero 2", 2),
    leg("owned 0", 1),
    leg("zero 3", 4),
    leg("fsdp2", 3, via=("universal", "dcp")),
    leg("owned 1", 2),
    leg("zero 1", 1, used=2),
    leg("plain", 3),
    leg("zero 0", 3),
    leg("owned 1", 4, group_size=2, used=1),
    leg("zero 2", 2, zero=OFFLOADED),
    leg("zero 3", 2, zero=OFFLOADED),
    leg("owned 2", 2, layout="padded"),
    leg("fsdp2", 1),
]
SOAP = [
    leg("plain", 2),
    leg("fsdp2", 2),
    leg("zero 1", 4),
    leg("owned 2", 3, layout="compact"),
    leg("fsdp2", 1),
    leg("owned 0", 1),
    leg("zero 0", 2, used=2),
    leg("owned 0", 4, group_size=1),
    leg("zero 2", 3),
    leg("plain", 4, via=("universal", "owned")),
    leg("zero 3", 1),
]
NORMUON = [
    leg("zero 3", 2),
    leg("zero 0", 4),
    leg("owned 1", 3, layout="compact"),
    leg("zero 1", 3, used=2),
    leg("zero 2", 1),
    leg("plain", 1),
    leg("owned 2", 2, layout="padded"),
    leg("zero 3", 3),
    leg("fsdp2", 4),
]
SHAMPOO = [
    leg("zero 0", 1),
    leg("owned 1", 4, group_size=2),
    leg("zero 1", 2, used=2),
    leg("owned 2", 2, group_size=1),
    leg("zero 2", 4),
    leg("fsdp2", 3),
    leg("zero 0", 1),
]
PARTED = [leg("fsdp2", 2), leg("zero 1", 2), leg("fsdp2", 3), leg("plain", 2)]
FLAT = [leg("fsdp2", 2, form="flat"), leg("fsdp2", 3, form="flat"), leg("fsdp2", 1)]
FUSED = [leg("zero 3", 2), leg("zero 1", 1), leg("zero 2", 4), leg("owned 1", 4), leg("zero 0", 2)]
ACROSS: dict[str, Tour] = {
    "muon": Tour("muon", MUON),
    "soap": Tour("soap", SOAP, model={"tied": True}),
    "normuon": Tour("normuon", NORMUON),
    "shampoo": Tour("shampoo", SHAMPOO),
    "parts": Tour("soap", PARTED, atoms=PARTS),
    **{f"flat, {rule}": Tour(rule, FLAT) for rule in ("muon", "adamuon", "shampoo", "a class")},
    "flat, parts": Tour("soap", FLAT, atoms=PARTS),
    "fused, soap": Tour("soap", FUSED, fused, atoms=ATOMS),
    "fused, normuon": Tour("normuon", [leg("owned 2", 2), *FUSED[:3]], fused, atoms=ATOMS),
    "partial": Tour("soap", [leg("owned 1", 2), leg("owned 2", 4)], Partial, {"tied": True}),
    "bf16": Tour("muon", [leg("zero 1", 2), leg("zero 1", 1), leg("zero 2", 4, zero=ALIGNED)], precision="bf16"),
    "bf16, stage 3": Tour("muon", [leg("zero 3", 2), leg("zero 3", 1)], precision="bf16"),
    "bf16, owned": Tour("muon", [leg("owned 1", 2), leg("owned 2", 4), leg("owned 0", 1)], precision="bf16"),
    "bf16, to owned": Tour("muon", [leg("zero 3", 2), leg("owned 2", 4, steps=0)], precision="bf16"),
    "bf16 + fp32": Tour("muon", [leg("zero 1", 2), leg("zero 1", 4)], precision="bf16+fp32"),
}


@pytest.mark.parametrize("name", ACROSS)
def test_a_run_goes_on_from_engine_to_engine(rank_pools: Pools, tmp_path: Path, name: str) -> None:
    go_on(rank_pools, tmp_path, ACROSS[name])


def test_every_engine_saves_and_loads_and_zero_does_at_every_stage_on_every_number_of_ranks() -> None:
    legs = [(here.ranks, here.cell.engine) for tour in ACROSS.values() for here in tour.legs[1:]]
    assert {(ranks, engine) for engine in ZERO for ranks in (1, 2, 3, 4)} <= set(legs)
    assert {engine for _, engine in legs} == set(ENGINES)
    assert {here.cell.engine for tour in ACROSS.values() for here in tour.legs[:-1]} == set(ENGINES)


# Without a conversion


PADDED, COMPACT = {"layout": "padded"}, {"layout": "compact"}
LAZY = {"overlap_param_gather": True}
LAYOUTS = {  # of owned storage in plain PyTorch
    "padded to compact": [
        leg("plain", 2, **PADDED),
        leg("plain", 1, **COMPACT, bucket_mb=0.002),
        leg("plain", 3, **COMPACT, weights_last=True),
        leg("plain", 4, **PADDED, bucket_mb=1.0),
    ],
    "compact to padded": [
        leg("plain", 2, **COMPACT, **LAZY),
        leg("plain", 1, **PADDED, weights_last=True),
        leg("plain", 3, **PADDED, bus_alignment=True),
        leg("plain", 4, **COMPACT, **LAZY, weights_last=True),
    ],
    "instances": [
        leg("plain", 4, layout="auto", group_size=2),
        leg("plain", 2, **COMPACT, group_size=1, weights_last=True),
        leg("plain", 4, **PADDED, group_size=1),
        leg("plain", 4, **COMPACT, group_size=2, **LAZY),
        leg("plain", 1, **PADDED),
    ],
    "kept gradients": [
        leg("plain", 2, layout="auto", keep_full_grads=True),
        leg("plain", 3, **COMPACT, keep_full_grads=True),
        leg("plain", 1, **PADDED, keep_full_grads=True),
    ],
}
OFTEN = [*zip(LAYOUTS, ("bfloat16", "float32", "bfloat16", "float32"))]
SELDOM = [*zip(LAYOUTS, ("float32", "bfloat16", "float32"))]  # kept gradients of bf16 are in bf16 themselves


@pytest.mark.parametrize(("layouts", "dtype"), with_full(OFTEN, SELDOM))
def test_owned_storage_goes_on_on_other_ranks_and_layouts(
    rank_pools: Pools, tmp_path: Path, layouts: str, dtype: str
) -> None:
    grads = {"grad_dtype": "float32"} if dtype == "bfloat16" else {}
    legs = [replace(one, cell=replace(one.cell, options={**one.cell.options, **grads})) for one in LAYOUTS[layouts]]
    go_on(rank_pools, tmp_path, Tour("muon", natively(*legs), dtype=dtype))


@pytest.mark.parametrize(("engine", "precision"), [("zero 0", "fp32"), ("owned 0", "fp32"), ("owned 0", "bf16")])
def test_without_zero_deepspeeds_checkpoint_resumes_on_any_number_of_ranks(
    rank_pools: Pools, tmp_path: Path, engine: str, precision: str
) -> None:
    pairs = {"group_size": 2, "layout": "compact"} if engine == "owned 0" else {}
    legs = natively(leg(engine, 2), leg(engine, 1), leg(engine, 4, **pairs))
    go_on(rank_pools, tmp_path, Tour("muon", legs, precision=precision))


UNEVEN = [
    *((4, "several roots"), (4, "hybrid"), (3, "rows"), (1, "rows"), (2, "rows"), (4, "hybrid")),
    *((2, "rows"), (4, "rows"), (3, "rows")),
]
SQUARE = [
    *((4, "tensor parallel"), (2, "columns"), (4, "tensor parallel"), (4, "hybrid"), (2, "rows"), (3, "rows")),
    *((2, "ignored_params"), (4, "several roots"), (1, "rows")),
]
FORMS = ("nested", "flat", "async", "full", "flat full")
OF_TORCH = [(rule, ways, form) for rule, ways in (("muon", "uneven"), ("soap", "square")) for form in FORMS]


@pytest.mark.parametrize(
    ("rule", "ways", "form"),
    with_full([*OF_TORCH, ("muon", "square", "nested")], [("muon", "square", form) for form in FORMS]),
)
def test_fsdp2_goes_on_with_torchs_own_formats_on_other_ranks_and_shardings(
    rank_pools: Pools, tmp_path: Path, rule: str, ways: str, form: str
) -> None:
    places = UNEVEN if ways == "uneven" else SQUARE
    legs = natively(*(leg("fsdp2", ranks, sharding=sharding, form=form) for ranks, sharding in places))
    go_on(rank_pools, tmp_path, Tour(rule, legs, model={"hidden": EVEN} if ways == "square" else {}))


# What converters write is what the engine itself would have


def test_what_is_written_for_fsdp2_is_formed_as_torch_writes_it(rank_pools: Pools, tmp_path: Path) -> None:
    """Paths, shapes and dtypes of weights and states."""

    def form(folder: Path) -> dict[str, Any]:
        found = DcpFolder(folder)
        keys = [key for key in found.tensors if key.startswith(("model.", "optimizer.state."))]
        return {key: (found.paths[key], found.tensors[key].shape, found.tensors[key].dtype) for key in keys}

    for tour in (Tour("muon", [leg("fsdp2", 2)]), Tour("soap", [leg("fsdp2", 2)], atoms=PARTS)):
        saved = tmp_path / tour.rule
        rank_pools[2].run(travel, tour, tour.legs[0], 0, [STEPS], [str(saved)])
        assert form(converted(saved, tour.legs[0])) == form(saved)


def test_owners_keep_state_of_every_part_of_a_fused_parameter(rank_pools: Pools, tmp_path: Path) -> None:
    tour = ACROSS["fused, soap"]
    rank_pools[2].run(travel, tour, tour.legs[0], 0, [STEPS], [str(tmp_path)])
    kept = formats.read(tmp_path).params
    assert {len(kept[name].owner_states) for name in ("qkv.weight", "grouped.weight", "experts.up")} == {3}
