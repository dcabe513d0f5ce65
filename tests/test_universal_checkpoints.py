"""Universal checkpoints under DeepSpeed, with either storage: weights alone, param groups, and what is refused.

That a run goes on from them to the bit is in test_checkpoints.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor, nn

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.files import manifest
from tests.cells import with_full
from tests.checkpoint_engines import FROZEN, Buffered, equal, flip, full_weights_of, scheduled, without_compiling
from tests.checkpoint_engines import settings_for as adamw_settings
from tests.command_line import succeeds
from tests.engines import OWNED, ZERO
from tests.fused import ATOMS, FusedLM
from tests.owned import BUCKET_MB
from tests.ranks import RankPool
from tests.rules import ELEMENTWISE, SECTIONS
from tests.zero import config, engine_for, train

FULL = pytest.mark.full
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


def wider(seed: int) -> nn.Module:
    return uneven(seed, (64, 41))


def fused(seed: int) -> nn.Module:
    return FusedLM(seed)


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
    with engine_for(settings, build(0)) as engine:
        train(engine, 2, same_rows=True)
        engine.save_checkpoint(folder, client_state={"mine": 3})
        found = {"model": model_in(engine), **counted(engine)}
        return {**found, "loss": train(engine, range(2, 3), same_rows=True)}


Saved = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Saved]:
    """By engine, rule and model, made when first asked for: a folder with a native and a universal checkpoint."""

    class Made(dict[Any, Saved]):
        def __missing__(self, key: tuple[str, str, Build]) -> Saved:
            folder, (engine, rule, build) = tmp_path_factory.mktemp("checkpoint"), key
            options = {"atoms": ATOMS} if build is fused else {}
            settings = settings_for(engine, rule, **options)
            truth = rank_pools[2].run(save, str(folder / "native"), settings, build)[0]
            succeeds("convert", folder / "native", folder / "universal", "--to", "universal", "--json")
            self[key] = folder, truth
            return self[key]

    return Made()


MUON, SOAP, FUSED = ("zero 2", "muon", uneven), ("owned 1", "soap", uneven), ("zero 2", "soap", fused)


# Weights alone


def load_weights(folder: str, settings: dict[str, Any], **choice: Any) -> dict[str, Any]:
    with engine_for(universal(settings), uneven(5)) as engine:
        engine.load_checkpoint(folder, **choice)
        found = {"model": model_in(engine), **counted(engine)}
        return {**found, "loss": train(engine, range(2, 3), same_rows=True)}


CHOICES = {"load_optimizer_states": False, "load_module_only": True}
ALONE = [
    *(("zero 0", "load_optimizer_states"), ("zero 2", "load_optimizer_states"), ("owned 2", "load_optimizer_states")),
    *(("zero 1", "load_module_only"), ("zero 3", "load_module_only"), ("owned 2", "load_module_only")),
]


@pytest.mark.parametrize(
    ("engine", "choice"), with_full(ALONE, [(engine, choice) for engine in (*ZERO, *OWNED) for choice in CHOICES])
)
def test_weights_alone_are_loaded(ranks: RankPool, saved: dict[Any, Saved], engine: str, choice: str) -> None:
    """Into whatever optimizer; counters go with the scheduler, as with DeepSpeed's own checkpoints."""
    folder, truth = saved[MUON]
    settings = settings_for(engine, "soap")
    for found in ranks.run(load_weights, str(folder / "universal"), settings, **{choice: CHOICES[choice]}):
        assert equal(found["model"], truth["model"]) and found["loss"] == truth["loss"]
        for key in ("scheduler", "counters"):
            assert (found[key] == truth[key]) == (choice == "load_optimizer_states")


def convert_as_deepspeed_does(source: Path, target: Path) -> None:
    folders = {"input_folder": str(source), "output_folder": str(target)}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(argparse.Namespace(**folders, **workers, inject_missing_state=True))


def save_adamw(folder: str, stage: int) -> None:
    with without_compiling(), engine_for(scheduled(adamw_settings("adamw", stage)), uneven(0)) as engine:
        train(engine, 2, same_rows=True)
        engine.save_checkpoint(folder)


def load_adamw(folder: str, settings: dict[str, Any]) -> tuple[str, int]:
    with engine_for(universal(settings), uneven(5)) as engine:
        with pytest.raises(ValueError) as refused:
            engine.load_checkpoint(folder)
        engine.load_checkpoint(folder, load_optimizer_states=False)
        return str(refused.value), engine.global_steps


@pytest.mark.parametrize("stage", [0, 3, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)])
def test_a_run_of_adamw_has_no_momentum(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """What DeepSpeed's converter wrote: the weights can be loaded, and the message says so."""
    ranks.run(save_adamw, str(tmp_path / "native"), 3 if stage == 3 else 2)
    convert_as_deepspeed_does(tmp_path / "native" / "global_step2", tmp_path / "universal" / "step2")
    (tmp_path / "universal" / "latest_universal").write_text("step2")
    for error, steps in ranks.run(load_adamw, str(tmp_path / "universal"), settings_for(f"zero {stage}")):
        states = "expected the states ['momentum_buffer'], found ['exp_avg', 'exp_avg_sq']; another opt"
        assert "layers.0.weight" in error and states in error
        assert "load the weights alone, with load_optimizer_states=False" in error
        assert steps == 2


# Param groups


ONE, OTHER = ("embedding", "layers.0", "layers.2"), ("layers.5", "gate", "lm_head")


def grouped(settings: dict[str, Any], names: list[tuple[str, ...]], rates: list[float]) -> Any:
    """An engine with param groups by the beginnings of names, each with a rate of its own, and no schedule."""
    model = uneven(0)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups = [
        {"params": [param for name, param in trained.items() if name.startswith(of_group)], "lr": rate}
        for of_group, rate in zip(names, rates)
    ]
    settings = {key: value for key, value in settings.items() if key != "scheduler"}
    return engine_for(settings, model, model_parameters=groups)


def save_grouped(folder: str, settings: dict[str, Any]) -> list[float]:
    with grouped(settings, [ONE, OTHER], [0.03, 0.01]) as engine:
        train(engine, 3, same_rows=True)
        engine.save_checkpoint(folder)
        return train(engine, range(3, 6), same_rows=True)


def load_grouped(
    folder: str, settings: dict[str, Any], names: list[tuple[str, ...]]
) -> tuple[list[tuple[str, float]], list[float]]:
    with grouped(universal(settings), names, [1.0] * len(names)) as engine:
        engine.load_checkpoint(folder)
        rates = [(group["rule"], group["lr"]) for group in engine.optimizer.param_groups]
        return rates, train(engine, range(3, 6), same_rows=True)


@pytest.mark.parametrize("stage", [0, 3, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)])
def test_param_groups_are_known_by_their_parameters(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """Those of the checkpoint are in another order, and one of ours is a part of one."""
    losses = ranks.run(save_grouped, str(tmp_path / "native"), settings_for("zero 2"))[0]
    folder, settings = str(tmp_path / "universal"), settings_for(f"zero {stage}")
    succeeds("convert", tmp_path / "native", folder, "--to", "universal", "--json")
    for rates, found in ranks.run(load_grouped, folder, settings, [OTHER[:2], ONE, OTHER[2:]]):
        assert rates == [("muon", 0.01), ("adamw", 0.01), ("muon", 0.03), ("adamw", 0.03), ("adamw", 0.01)]
        assert found == losses
    for error in ranks.errors(load_grouped, folder, settings, [ONE + OTHER]):
        assert "param group 0 here has parameters of the checkpoint's groups [0, 2], whose 'lr' are [0.03," in error


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
            assert equal(everything(engine), before), folder
            said.append(str(refused.value))
    return said


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


def keep(step: Path) -> None:
    """As it was saved."""


MOMENTUM, OWNER = f"{GATE}/momentum_buffer.pt", "owner_state/gate.weight.pt"
EXCLUDED, COSINE = {"exclude": ["gate.weight"]}, {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}}
# What loads: the rule, its options, what is changed in the ds_config, and the model. Then what is loaded, what is done
# to it before, how it is loaded, and what is said.
Case = tuple[tuple[Any, ...], Callable[[Path], None], dict[str, Any], list[str]]
MISFITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Build, list[Case]]] = {
    "muon": (
        *("muon", {}, {}, uneven),
        [
            (MUON, without(MOMENTUM), {}, [f"{MOMENTUM} is missing; copy the whole folder"]),
            (MUON, keep, {"tag": "step4"}, ["step4 is no universal checkpoint", "lwopt convert --to universal"]),
            (MUON, forget_which, {}, ["is no universal checkpoint"]),
            (MUON, keep, {"custom_load_fn": print}, ["custom_load_fn"]),
            (MUON, cut_in_half, {}, [f"{GATE}/fp32.pt"]),
            (MUON, take_anothers, {}, ["expected shape (2, 5)"]),
        ],
    ),
    "soap": (
        *("soap", {}, {}, uneven),
        [
            (MUON, keep, {}, ["layers.0.weight", "'soap' trains: expected the states []", "found ['momentum_"]),
            (SOAP, without(OWNER), {}, [OWNER, "is missing"]),
        ],
    ),
    "normuon": (
        *("normuon", {}, {}, uneven),
        [
            (MUON, keep, {}, ["owner_state/", "expected what the owner keeps of 1 matrices, found 0"]),
            (SOAP, keep, {}, ["expected the states ['momentum_buffer']", "load_optimizer_states"]),
        ],
    ),
    "shampoo": ("shampoo", {}, {}, uneven, [(SOAP, keep, {}, ["was trained by 'soap', here by 'shampoo'"])]),
    "shape": ("muon", {}, {}, wider, [(MUON, keep, {}, ["expected shape (64, 24), found (63, 24)"])]),
    "routing": (
        *("muon", EXCLUDED, {}, uneven),
        [(MUON, keep, {}, ["'gate.weight', which 'adamw' trains: expected"])],
    ),
    "schedule": (
        *("muon", {}, COSINE, uneven),
        [(MUON, keep, {}, ["expected the state of a scheduler like the one here", "['last_batch_it"])],
    ),
    "parts": (
        *("soap", {}, {}, fused),
        [
            (
                FUSED,
                keep,
                {},
                ["owner_state/qkv.weight.pt: parameter 'qkv.weight'", "with the 'atoms' it was saved with"],
            )
        ],
    ),
}
ONCE = [(f"zero {number % 4}", what) for number, what in enumerate(MISFITS)]


@pytest.mark.parametrize(
    ("engine", "what"),
    with_full(
        [*ONCE, *(("owned 1", what) for what in MISFITS)],
        [(engine, what) for engine in (*ZERO, *OWNED) for what in MISFITS],
    ),
)
def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, engine: str, what: str
) -> None:
    rule, options, changes, build, cases = MISFITS[what]
    loads = []
    for number, (source, spoil, choice, _) in enumerate(cases):
        copy = shutil.copytree(saved[source][0] / "universal", tmp_path / str(number))
        (copy / "global_step2" / manifest.NAME).unlink()  # by it they would be refused before they are read
        spoil(copy / "global_step2")
        loads.append((str(copy), choice))
    for said in ranks.run(refusals, settings_for(engine, rule, **options) | changes, build, loads):
        for error, (*_, words) in zip(said, cases, strict=True):
            assert all(word in error for word in words), error


def flipped_one_by_one(folder: str, settings: dict[str, Any]) -> list[str]:
    """Which files were damaged, one at a time, when loading raised nothing; those that are read in another way."""
    missed = []
    with engine_for(universal(settings), uneven(5)) as engine:
        before = everything(engine)
        for file in sorted(Path(folder).glob("**/*.pt")):
            whole = file.read_bytes()
            dist.barrier()
            if dist.get_rank() == 0:
                flip(file)
            dist.barrier()
            try:
                engine.load_checkpoint(folder)
                missed.append(file.name)
            except (ValueError, RuntimeError) as error:
                assert file.name in str(error), error
                assert equal(everything(engine), before), file
            dist.barrier()
            if dist.get_rank() == 0:
                file.write_bytes(whole)
            dist.barrier()
        engine.load_checkpoint(folder)
        assert engine.global_steps == 2
    return missed


@pytest.mark.parametrize("source", [MUON, pytest.param(SOAP, marks=FULL)], ids=["muon", "soap"])
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_flipped_bit_in_any_file_is_found_before_anything_is_changed(
    ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, source: tuple[str, str, Build]
) -> None:
    """Though each rank checks a part of them only. The file of stage 3's loader has what is in another one."""
    folder = shutil.copytree(saved[source][0] / "universal", tmp_path / "copy")
    for missed in ranks.run(flipped_one_by_one, str(folder), settings_for("owned 1", source[1])):
        assert missed == ["zero_pp_rank_0_mp_rank_00_model_states.pt"]


def test_owners_states_of_an_earlier_version_are_read_where_names_tell_their_places(
    saved: dict[Any, Saved], tmp_path: Path
) -> None:
    for build in (uneven, fused):
        native = shutil.copytree(saved["zero 2", "soap", build][0] / "native", tmp_path / build.__name__)
        for file in native.glob("*/*optim_states.pt"):
            content = torch.load(file, weights_only=False)
            del content["optimizer_state_dict"]["base_optimizer_state"]["matrices"]
            torch.save(content, file)
    kept = formats.read(tmp_path / "uneven").params["gate.weight"].owner_states
    assert set(kept) == {0} and kept[0]
    with pytest.raises(ValueError, match="part of a fused parameter, and the checkpoint, which an earlier version"):
        formats.read(tmp_path / "fused")
