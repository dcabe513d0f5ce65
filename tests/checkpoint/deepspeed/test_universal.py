"""Universal checkpoints under DeepSpeed, with either storage: weights alone, param groups, and what is refused.

That a run goes on from them to the bit is in test_checkpoints.py.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy
import pytest
import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.integrations.deepspeed import universal as loading
from tests.support.checkpoint_contents import same
from tests.support.checkpoint_engines import (
    FROZEN,
    Buffered,
    convert_as_deepspeed_does,
    flip,
    full_weights_of,
    scheduled,
    without_compiling,
)
from tests.support.checkpoint_engines import settings_for as of_engine
from tests.support.command_line import succeeds
from tests.support.fused import ATOMS, FusedLM
from tests.support.models import MATRICES, UnevenLM, batch
from tests.support.plain import BUCKET_MB
from tests.support.ranks import RankPool
from tests.support.references import ELEMENTWISE, SECTIONS
from tests.support.schedules import METRICS, RATES, SCHEDULES, all_of, alone, takes_metric
from tests.support.schedules import rates as rates_of_steps
from tests.support.zero import ADAMW, ROWS, config, engine_for, train

CLIENT = {"mine": 3, "random": torch.arange(9.0), "order": ([torch.arange(4)], {"n": numpy.float32(0.5)})}
Build = Callable[[int], nn.Module]


def settings_for(engine: str, rule: str = "muon", **options: Any) -> dict[str, Any]:
    storage, stage = engine.split()
    settings = scheduled(config(int(stage)))
    given = {"matrix": SECTIONS[rule], "elementwise": ELEMENTWISE["adamw"], "report": False, **options}
    if storage == "owned":
        given |= {"storage": "owned", "bucket_mb": BUCKET_MB}
    elif stage == "3":  # some are kept whole, most are not
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    settings["optimizer"] = {"type": "LayerWise", "params": given}
    return settings


def universal(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "checkpoint": {"load_universal": True}}


def uneven(seed: int, hidden: tuple[int, int] = (63, 41)) -> nn.Module:
    model = Buffered(seed=seed, hidden=hidden)
    model.get_parameter(FROZEN).requires_grad_(False).data.fill_(1.25 + seed)
    return model


def model_in(engine: Any) -> dict[str, Tensor]:
    """Masters, and the buffer and the frozen parameter where the model has them."""
    found = full_weights_of(engine)
    if hasattr(engine.module, "passes"):
        frozen = engine.module.get_parameter(FROZEN)
        with deepspeed.zero.GatheredParameters([frozen]):
            found |= {FROZEN: frozen.detach().clone(), "passes": engine.module.passes.clone()}
    return found


def counted(engine: Any) -> dict[str, Any]:
    counters = engine.global_steps, engine.global_samples, engine.skipped_steps
    return {"scheduler": engine.lr_scheduler.state_dict(), "counters": counters}


def save(folder: str, settings: dict[str, Any], build: Build) -> dict[str, Any]:
    """Train two steps and save; what was saved, and the next step's loss."""
    with without_compiling(), engine_for(settings, build(0)) as engine:
        train(engine, 2, same_rows=True)
        engine.save_checkpoint(folder, client_state=CLIENT)
        found = {"model": model_in(engine), **counted(engine)}
        return {**found, "loss": train(engine, range(2, 3), same_rows=True)}


Saved = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Saved]:
    """By engine, rule and model, made when first asked for: a folder with a native and a universal checkpoint.

    That of DeepSpeed's AdamW is converted by DeepSpeed.
    """

    class Made(dict[Any, Saved]):
        def __missing__(self, key: tuple[str, str, Build]) -> Saved:
            folder, (engine, rule, build) = tmp_path_factory.mktemp("checkpoint"), key
            options = {"atoms": ATOMS} if build is FusedLM else {}
            settings = settings_for(engine, "muon" if rule == "adamw" else rule, **options)
            if rule == "adamw":
                settings["optimizer"] = STOCK
            truth = rank_pools[2].run(save, str(folder / "native"), settings, build)[0]
            if rule == "adamw":
                Path(convert_as_deepspeed_does(folder / "native", "global_step2")).rename(folder / "universal")
            else:
                succeeds("convert", folder / "native", folder / "universal", "--to", "universal", "--json")
            self[key] = folder, truth
            return self[key]

    return Made()


MUON, SOAP, FUSED = ("zero 2", "muon", uneven), ("owned 1", "soap", uneven), ("zero 2", "soap", FusedLM)
ADAM = ("zero 3", "adamw", uneven)


# Weights alone


def load_weights(folder: str, settings: dict[str, Any], **choice: Any) -> dict[str, Any]:
    with engine_for(universal(settings), uneven(5)) as engine:
        _, client = engine.load_checkpoint(folder, **choice)
        assert same({key: client[key] for key in CLIENT}, CLIENT)
        found = {"model": model_in(engine), **counted(engine)}
        return {**found, "loss": train(engine, range(2, 3), same_rows=True)}


STOCK = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
CHOICES = {"load_optimizer_states": False, "load_module_only": True}
ALONE = [
    *((MUON, engine, "load_optimizer_states") for engine in ("zero 0", "zero 2", "owned 2")),
    *((MUON, engine, "load_module_only") for engine in ("zero 1", "zero 3", "owned 2")),
    (ADAM, "zero 3", "load_optimizer_states"),
]


@pytest.mark.parametrize(("source", "engine", "choice"), ALONE)
def test_weights_alone_are_loaded(
    ranks: RankPool, saved: dict[Any, Saved], source: Any, engine: str, choice: str
) -> None:
    """Into whatever optimizer; counters go with the scheduler, as with DeepSpeed's own checkpoints."""
    folder, truth = saved[source]
    settings = settings_for(engine, "soap")
    for found in ranks.run(load_weights, str(folder / "universal"), settings, **{choice: CHOICES[choice]}):
        assert same(found["model"], truth["model"]) and found["loss"] == truth["loss"]
        for key in ("scheduler", "counters"):
            assert (found[key] == truth[key]) == (choice == "load_optimizer_states")


def load_export(folder: str, settings: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    with engine_for(universal(settings), uneven(5)) as engine:
        with pytest.raises(ValueError) as caught:
            engine.load_checkpoint(folder)
        engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
        return str(caught.value), model_in(engine)


def test_safetensors_load_over_a_universal_folder(ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path) -> None:
    """Weights of safetensors are loaded over a universal folder."""
    folder, truth = saved[MUON]
    succeeds("convert", folder / "native", tmp_path / "weights", "--to", "safetensors", "--json")
    told = succeeds("convert", tmp_path / "weights", tmp_path / "new", "--to", "universal", "--json")
    assert "load_optimizer_states=False" in told
    for said, weights in ranks.run(load_export, str(tmp_path / "new"), settings_for("zero 1")):
        assert "expected state" in said and "load_optimizer_states=False" in said
        assert same(weights, {name: truth["model"][name] for name in weights})


# Schedules


ROUTES = [
    ("deepspeed muon 1", "transformers linear"),
    ("deepspeed muon 2", "SequentialLR"),
    ("zero 0", "ChainedScheduler"),
    ("zero 1", "DeepSpeed's WarmupLR"),
    ("zero 3", "OneCycleLR"),
    ("owned 2", "ReduceLROnPlateau"),
]


def rates_on(engine: str, name: str, folder: str, load: bool, steps: range) -> list[list[float]]:
    """The rates of these steps of an engine that saves after them, or loads before."""
    model, muon = UnevenLM(), engine.startswith("deepspeed")
    settings = of_engine(*engine.rsplit(" ", 1)) if muon else settings_for(engine)
    params = settings["optimizer"]["params"]
    if muon:
        params |= {"muon_lr": RATES[0], "adam_lr": RATES[1]}
        for param_name, param in model.named_parameters():
            param.use_muon = param_name in MATRICES  # type: ignore[attr-defined]
    else:
        params |= {kind: {**params[kind], "lr": rate} for kind, rate in zip(("matrix", "elementwise"), RATES)}
    settings.pop("scheduler", None)
    found = []
    make = functools.partial(SCHEDULES[name], of=all_of)
    with without_compiling(), engine_for(settings, model, lr_scheduler=make) as made:
        if load:
            made.load_checkpoint(folder)
        for step in steps:
            found.append([float(group["lr"]) for group in made.optimizer.param_groups])
            made.backward(made(*batch(step, ROWS)))
            made.step(lr_kwargs={"metrics": METRICS[step]} if takes_metric(made.lr_scheduler) else None)
        if not load:
            made.save_checkpoint(folder)
    return found


@pytest.mark.parametrize(("engine", "name"), ROUTES)
def test_rates_go_on_as_in_the_run_that_is_not_interrupted(
    ranks: RankPool, tmp_path: Path, engine: str, name: str
) -> None:
    """From DeepSpeed's own Muon or an engine with our optimizer, to an engine and to plain PyTorch."""
    of_groups = []
    for group, rate in enumerate(RATES):
        single = torch.optim.SGD([torch.zeros(1)], lr=rate)
        schedule = SCHEDULES[name](single, alone(group))
        of_groups.append([rates[0] for rates in rates_of_steps(single, schedule, range(13))])
    truth = [pytest.approx([*rates], rel=1e-14) for rates in zip(*of_groups)]
    native, universal, dcp = (str(tmp_path / key) for key in ("native", "universal", "dcp"))
    assert ranks.run(rates_on, engine, name, native, False, range(3))[0] == truth[:3]
    succeeds("convert", native, universal, "--to", "universal", "--json")
    succeeds("convert", native, dcp, "--to", "dcp", "--json")
    here = "zero 2" if engine.startswith("deepspeed") else engine
    assert ranks.run(rates_on, here, name, universal, True, range(3, 13))[0] == truth[3:]
    optimizer = LayerWiseOptimizer(UnevenLM(), lr=0.02, report=False)
    schedule = SCHEDULES[name](optimizer, all_of)
    schedule.load_state_dict(optimizer.load_state_dict_from(dcp)["scheduler"])
    assert [*rates_of_steps(optimizer, schedule, range(3, 13))] == truth[3:]


# Param groups


ONE, OTHER = ("embedding", "layers.0", "layers.2"), ("layers.5", "gate", "lm_head")


def train_grouped(
    folder: str, settings: dict[str, Any], names: list[tuple[str, ...]], rates: list[float], load: bool
) -> tuple[list[tuple[str, float]], list[float]]:
    """Save, or load, with param groups by the beginnings of names, each with its own rate, and no schedule.

    The rates then, and the losses of further steps.
    """
    model = uneven(0)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups = [
        {"params": [param for name, param in trained.items() if name.startswith(of_group)], "lr": rate}
        for of_group, rate in zip(names, rates)
    ]
    del settings["scheduler"]
    with engine_for({**settings, "checkpoint": {"load_universal": load}}, model, model_parameters=groups) as engine:
        if load:
            engine.load_checkpoint(folder)
        else:
            train(engine, 3, same_rows=True)
            engine.save_checkpoint(folder)
        found = [(group["rule"], group["lr"]) for group in engine.optimizer.param_groups]
        return found, train(engine, range(3, 6), same_rows=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_param_groups_are_known_by_their_parameters(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """Those of the checkpoint are in another order, and one here is a part of one."""
    native, folder, here = str(tmp_path / "native"), str(tmp_path / "universal"), settings_for(f"zero {stage}")
    _, losses = ranks.run(train_grouped, native, settings_for("zero 2"), [ONE, OTHER], [0.03, 0.01], False)[0]
    succeeds("convert", native, folder, "--to", "universal", "--json")
    for rates, found in ranks.run(train_grouped, folder, here, [OTHER[:2], ONE, OTHER[2:]], [1.0] * 3, True):
        assert rates == [("muon", 0.01), ("adamw", 0.01), ("muon", 0.03), ("adamw", 0.03), ("adamw", 0.01)]
        assert found == losses
    for error in ranks.errors(train_grouped, folder, here, [ONE + OTHER], [1.0], True):
        assert (
            "param group 0 here has parameters of the checkpoint's groups [0, 2], whose 'lr' are [0.03, 0.01]" in error
        )


# Refusals


def everything(engine: Any) -> dict[str, Any]:
    """A copy of all that loading may change."""
    core = getattr(engine.optimizer, "core", None)
    held = engine.basic_optimizer if core is None else core.stepper
    return {
        "model": model_in(engine),
        **counted(engine),
        "state": [{k: t.clone() for k, t in state.items() if isinstance(t, Tensor)} for state in held.state.values()],
        "owners": [] if core is None else [repr(held.owner_states(number)) for number in range(len(core.members))],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
    }


def refusals(settings: dict[str, Any], build: Build, loads: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What an engine that has trained says to each load; none of them changes anything."""
    said = []
    with engine_for(universal(settings), build(5)) as engine:
        train(engine, 1, same_rows=True)
        for folder, choice in loads:
            before = everything(engine)
            with pytest.raises((ValueError, RuntimeError)) as refused:
                engine.load_checkpoint(folder, **choice)
            assert same(everything(engine), before), folder
            said.append(str(refused.value))
    return said


def loads_in_part(settings: dict[str, Any], folder: str, file: str, whole: str) -> str:
    """What an engine says to a folder of which a file is lost while it loads; it goes on once it has loaded another."""
    with engine_for(universal(settings), uneven(5)) as engine:
        lost = mock.patch.object(loading, "check_files", lambda _: Path(folder, file).unlink(missing_ok=True))
        with lost, pytest.raises((ValueError, RuntimeError)) as refused:
            engine.load_checkpoint(folder)
        for forbidden in (lambda: train(engine, 1), lambda: engine.save_checkpoint(folder)):
            with pytest.raises(
                RuntimeError, match="load_checkpoint failed after some state and weights had been loaded"
            ):
                forbidden()
        engine.optimizer.zero_grad()
        engine.load_checkpoint(whole)
        train(engine, 1)
    return str(refused.value)


GATE = Path("zero/gate.weight")


def without(file: str) -> Callable[[Path], None]:
    return lambda step: (step / file).unlink()


def cut_in_half(step: Path) -> None:
    file = step / GATE / "fp32.pt"
    os.truncate(file, file.stat().st_size // 2)


def take_anothers(step: Path) -> None:
    shutil.copy(step / "zero" / "layers.0.weight" / "momentum_buffer.pt", step / GATE / "momentum_buffer.pt")


def forget_which(step: Path) -> None:
    (step.parent / "latest_universal").unlink()


def call_muon_normuon(step: Path) -> None:
    """Whose owners keep more than Muon's."""
    file = step / "zero/optimizer_state.pt"
    saved = torch.load(file, weights_only=False)
    for group in saved["param_groups"]:
        group["rule"] = group["rule"].replace("muon", "normuon")
    torch.save(saved, file)


def calls_muon(**options: Any) -> Callable[[Path], None]:
    """The matrices' param groups as another optimizer writes them, with these options."""

    def call(step: Path) -> None:
        file = step / "zero/optimizer_state.pt"
        saved = torch.load(file, weights_only=False)
        for groups in (saved["param_groups"], saved["optimizer_state_dict"]["param_groups"]):
            groups[:] = [{**options, "params": g["params"]} if g.get("rule") == "muon" else g for g in groups]
        torch.save(saved, file)

    return call


SGDS = torch.optim.SGD([torch.ones(1)], momentum=0.9).defaults
JORDANS = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5}  # of 2024, whose momentum is a sum


def keep(step: Path) -> None:
    """As it was saved."""


MOMENTUM, OWNER = f"{GATE}/momentum_buffer.pt", "owner_state/gate.weight.pt"
BEGIN_ANEW = "load the weights alone, with load_optimizer_states=False, and begin with new state, or train it with"
OF_ADAM = [f"expected rule muon, the checkpoint has adamw; {BEGIN_ANEW}"]
WITH_ATOMS = "with the 'atoms' it was saved with"
COSINE = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}}


@dataclass(frozen=True)
class Here:
    """What loads: the rule and its options, what is changed in the ds_config, and the model."""

    rule: str = "muon"
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    build: Build = uneven


# What loads. Then what is loaded, what is done to it before, how it is loaded, and what is said.
Case = tuple[tuple[str, str, Build], Callable[[Path], None], dict[str, Any], list[str]]
MISFITS: dict[str, tuple[Here, list[Case]]] = {
    "muon": (
        Here(),
        [
            (MUON, without(MOMENTUM), {}, ["parameter 'gate.weight': expected state ['momentum_buffer']"]),
            (MUON, keep, {"tag": "step4"}, ["step4, found no zero/optimizer_state.pt", "lwopt convert --to universal"]),
            (MUON, forget_which, {}, ["expected a universal checkpoint"]),
            (MUON, keep, {"custom_load_fn": print}, ["custom_load_fn"]),
            (MUON, cut_in_half, {}, [f"{GATE}/fp32.pt"]),
            (MUON, take_anothers, {}, ["expected shape (2, 5)"]),
            (ADAM, keep, {}, ["'layers.0.weight'", *OF_ADAM]),
            (MUON, calls_muon(**SGDS), {}, [f"expected rule muon, the checkpoint has sgd; {BEGIN_ANEW}"]),
            (
                MUON,
                calls_muon(lr=0.1, momentum=0.9),
                {},
                ["the state of a known optimizer", "load_optimizer_"],
            ),
        ],
    ),
    "soap": (
        Here("soap"),
        [
            (MUON, keep, {}, ["parameter 'layers.0.weight': expected rule soap, the checkpoint has muon"]),
            (SOAP, without(OWNER), {}, [OWNER, "is missing"]),
        ],
    ),
    "normuon": (
        Here("normuon"),
        [(MUON, call_muon_normuon, {}, ["'layers.0.weight': expected owner state of the matrices [0], the ch"])],
    ),
    "shape": (
        Here(build=functools.partial(uneven, hidden=(64, 41))),
        [(MUON, keep, {}, ["expected shape (64, 24), the checkpoint has (63, 24)"])],
    ),
    "schedule": (Here(changes=COSINE), [(MUON, keep, {}, ["expected the state of this scheduler", "['last_batch_it"])]),
    "parts": (Here("soap", build=FusedLM), [(FUSED, keep, {}, ["'qkv.weight': expected matrices", WITH_ATOMS])]),
}
ONCE = [
    *((f"zero {number % 4}", what) for number, what in enumerate(MISFITS)),
    ("owned 1", "muon"),
    ("owned 1", "soap"),
]


@pytest.mark.parametrize(("engine", "what"), ONCE)
def test_universal_folder_that_does_not_fit_is_refused(
    ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, engine: str, what: str
) -> None:
    """It is refused on every rank, and changes nothing."""
    (here, cases), loads = MISFITS[what], []
    for number, (source, spoil, choice, _) in enumerate(cases):
        copy = shutil.copytree(saved[source][0] / "universal", tmp_path / str(number))
        (copy / "global_step2" / manifest.NAME).unlink(missing_ok=True)  # which would refuse them before they are read
        spoil(copy / "global_step2")
        loads.append((str(copy), choice))
    settings = settings_for(engine, here.rule, **here.options) | here.changes
    for said in ranks.run(refusals, settings, here.build, loads):
        for error, (*_, words) in zip(said, cases, strict=True):
            assert all(word in error for word in words), error


def momenta(settings: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """This rank's pieces of the momentum after a load."""
    with engine_for(universal(settings), uneven(5)) as engine:
        engine.load_checkpoint(folder)
        store = engine.basic_optimizer.state_store()
        pieces = {f"{store.params[piece.member].name} {piece.start}": piece.tensors for piece in store.pieces()}
        return {name: of["momentum_buffer"].clone() for name, of in pieces.items() if "momentum_buffer" in of}


@pytest.mark.parametrize(("engine", "form", "factor"), [("zero 1", "ema", 1 - 0.95), ("owned 1", "sum", 1.0)])
def test_another_muons_sum_becomes_the_form_that_is_configured(
    ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, engine: str, form: str, factor: float
) -> None:
    """Elements of a universal folder whose groups are those of Keller Jordan's Muon of 2024."""
    settings, source = settings_for(engine, "muon", momentum_form=form), saved[MUON][0] / "universal"
    copy = shutil.copytree(source, tmp_path / "copy")
    (copy / "global_step2" / manifest.NAME).unlink()
    calls_muon(**JORDANS)(copy / "global_step2")
    as_saved = ranks.run(momenta, settings_for(engine, "muon"), str(source))
    for found, expected in zip(ranks.run(momenta, settings, str(copy)), as_saved, strict=True):
        assert found and found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name] * factor) for name in found)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_flipped_bit_in_any_file_is_found(ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path) -> None:
    """It is found before anything is loaded. Whichever rank checks the file."""
    whole, copies = saved[SOAP][0] / "universal", {}
    read = [path for path in whole.rglob("*.pt") if not path.name.startswith("zero_pp")]  # which is for DeepSpeed's own
    for file in [path.relative_to(whole) for path in read]:
        copies[file.name, str(tmp_path / str(len(copies)))] = file
    for (_, copy), file in copies.items():
        flip(Path(shutil.copytree(whole, copy)) / file)
    loads: list[tuple[str, dict[str, Any]]] = [(copy, {}) for _, copy in copies]
    for said in ranks.run(refusals, settings_for("zero 3", "soap"), uneven, loads):
        assert [name in error for (name, _), error in zip(copies, said, strict=True)] == [True] * len(copies)


@pytest.mark.parametrize("engine", ["owned 1", "zero 3"])
def test_no_rank_goes_on_with_a_part(ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, engine: str) -> None:
    whole, file = saved[MUON][0] / "universal", "global_step2/zero/gate.weight/momentum_buffer.pt"
    copy = str(shutil.copytree(whole, tmp_path / "copy"))
    for said in ranks.run(loads_in_part, settings_for(engine), copy, file, str(whole)):
        assert file in said


# Files that a rank opens


def opened_files(folder: str, settings: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The files that loading opens on this rank, and the parameters of which it has pieces."""
    here = str(Path(folder) / "global_step2") + os.sep
    opened: set[str] = set()
    listening = True

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open" and str(arguments[0]).startswith(here):
            opened.add(str(arguments[0]).removeprefix(here))

    with engine_for(universal(settings), uneven(5)) as engine:
        held = engine.basic_optimizer if hasattr(engine, "basic_optimizer") else engine.optimizer
        store = held.state_store()
        sys.addaudithook(listen)  # stays, and then returns at once
        engine.load_checkpoint(folder)
        listening = False
        return opened, {store.params[piece.member].name for piece in store.pieces() if piece.stop > piece.start}


@pytest.mark.parametrize("engine", ["zero 1", "owned 1"])
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_ranks_open_the_files_of_their_pieces(ranks: RankPool, saved: dict[Any, Saved], engine: str) -> None:
    """And those of its share, which it checks; the first one also opens all for what is in them."""
    folder = saved[SOAP][0] / "universal"
    step = folder / "global_step2"
    all_files = {str(path.relative_to(step)) for path in step.rglob("*.pt")}
    found = ranks.run(opened_files, str(folder), settings_for(engine, "soap"))
    for opened, pieces in found[1:]:
        mine = {*pieces, *(f"{name}.pt" for name in pieces)}
        others = {name for name in opened & all_files if not mine & {*name.split("/")}}
        assert 0 < len(others) <= len(all_files) / len(found) + 2  # with what is not trained
        assert len(pieces) < len(list((step / "zero").glob("*/fp32.pt")))
