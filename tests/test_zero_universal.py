"""Universal checkpoints in engines with ZeRO's storage: any number of ranks, any stage, the run goes on."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.deepspeed import universal_writer as write_universal
from lwopt_backend.checkpoint.files.folders import write_folder
from tests.cells import cells, with_full
from tests.checkpoint_engines import Buffered, full_weights_of, scheduled
from tests.checkpoint_engines import settings_for as adamw_settings
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, PRECISIONS, config, engine_for, train

FROZEN = "layers.4.weight"
STAGES = [0, 1, 2, 3]
RULES: dict[str, Any] = {
    "muon": None,
    "soap": {"name": "soap", "lr": 3e-3, "precondition_frequency": 2},
    "normuon": {"name": "normuon", **MUON},
}


def settings_for(name: str, stage: int, precision: str = "fp32") -> dict[str, Any]:
    """With the rule of that name for matrices; for Muon it is LayerWiseMuon."""
    settings, rule = scheduled(config(stage)), RULES[name]
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 100  # some are kept whole, most are not
    if rule is not None:
        params = {"matrix": rule, "elementwise": {"name": "adamw", **ADAMW}, "report": False}
        settings["optimizer"] = {"type": "LayerWise", "params": params}
    return settings | PRECISIONS[precision]


def universal(settings: dict[str, Any]) -> dict[str, Any]:
    return {**settings, "checkpoint": {"load_universal": True}}


def model_for(seed: int = 0) -> Buffered:
    model = Buffered(seed=seed)
    with torch.no_grad():
        model.get_parameter(FROZEN).fill_(1.25 + seed).requires_grad_(False)
    return model


def seen(engine: Any) -> dict[str, Any]:
    """What a loaded engine must have as the one that saved had it."""
    frozen = engine.module.get_parameter(FROZEN)
    with deepspeed.zero.GatheredParameters([frozen]):
        whole = frozen.detach().clone()
    return {
        "weights": {FROZEN: whole, **full_weights_of(engine)},
        "passes": engine.module.passes.clone(),
        "groups": [
            {k: v for k, v in g.items() if k not in ("params", "from_group")} for g in engine.optimizer.param_groups
        ],
        "scheduler": engine.lr_scheduler.state_dict(),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
    }


def save(folder: str, settings: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Train, save, and go on without a break, all ranks on all rows."""
    with engine_for(settings, model_for()) as engine:
        train(engine, steps, same_rows=True)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        found = seen(engine)
        found["losses"] = train(engine, range(steps, steps + 3), same_rows=True)
        return {**found, "after": full_weights_of(engine)}


def load(
    folder: str, settings: dict[str, Any], steps: range = range(3, 6), used: int = 0, **choice: Any
) -> dict[str, Any]:
    """What is there after loading into another model, which may have trained on, and how training goes on."""
    with engine_for(universal(settings), model_for(seed=5)) as engine:
        train(engine, used, same_rows=True)
        path, client = engine.load_checkpoint(folder, **choice)
        found = {**seen(engine), "path": path, "client": client}
        found["losses"] = train(engine, steps, same_rows=True)
        return {**found, "after": full_weights_of(engine)}


def convert(source: Path, target: Path) -> Path:
    """The universal checkpoint of a native one; the folder to load from."""
    checkpoint = formats.read(source)
    fill = lambda folder: write_universal.write(checkpoint, folder)  # noqa: E731
    write_folder(target / "step3", fill, pointers={"latest_universal": "step3"})
    return target


def pool_of(rank_pools: dict[int, RankPool], world_size: int) -> RankPool:
    return rank_pools[world_size]


Saved = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Saved]:
    """By rule, stage and precision, made when they are first asked for: the universal folder, and what saved it."""

    class Made(dict[Any, Saved]):
        def __missing__(self, key: tuple[str, int, str]) -> Saved:
            native, target = (tmp_path_factory.mktemp("checkpoint") for _ in range(2))
            truth = pool_of(rank_pools, 2).run(save, str(native), settings_for(*key))[0]
            self[key] = convert(native, target), truth
            return self[key]

    return Made()


def assert_same(found: dict[str, Any], truth: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    for key in ("groups", "scheduler", "counters"):
        assert key in but or found[key] == truth[key], key
    assert torch.equal(found["passes"], truth["passes"])
    assert found["weights"].keys() == truth["weights"].keys()
    assert all(torch.equal(weight, truth["weights"][name]) for name, weight in found["weights"].items())


def assert_goes_on(found: dict[str, Any], truth: dict[str, Any], *, exactly: bool) -> None:
    """The same losses and weights; exactly where the mean over ranks of equal gradients is that gradient."""
    if exactly:
        assert found["losses"] == truth["losses"]
        assert all(torch.equal(weight, truth["after"][name]) for name, weight in found["after"].items())
    else:
        assert found["losses"] == pytest.approx(truth["losses"], rel=1e-4)


SOURCES = [("muon", 2), ("soap", 1), ("normuon", 3), ("muon", 0)]


@cells(world_size=[1, 2, 3, 4], stage=STAGES, source=SOURCES, used=[0, 2])
def test_a_run_goes_on_at_any_number_of_ranks_and_any_stage(
    rank_pools: dict[int, RankPool],
    saved: dict[Any, Saved],
    source: tuple[str, int],
    world_size: int,
    stage: int,
    used: int,
) -> None:
    """What was saved with owned storage goes on with ZeRO's in tests/test_owned_universal.py."""
    folder, truth = saved[(*source, "fp32")]
    for found in rank_pools[world_size].run(load, str(folder), settings_for(source[0], stage), used=used):
        assert_same(found, truth)
        assert found["client"] == {"rows": 3}
        assert found["path"] == str(folder / "step3")
        assert_goes_on(found, truth, exactly=world_size != 3)


@pytest.mark.parametrize(
    ("precision", "stage", "world_size"),
    with_full(
        [("bf16", 1, 1), ("bf16", 2, 4), ("bf16", 3, 1), ("bf16+fp32", 1, 4)],
        [("bf16", 1, 4), ("bf16", 2, 1), ("bf16", 3, 4), ("bf16+fp32", 1, 1)],
    ),
)
def test_master_weights_are_restored(
    rank_pools: dict[int, RankPool], saved: dict[Any, Saved], precision: str, stage: int, world_size: int
) -> None:
    folder, truth = saved["muon", stage, precision]
    for found in rank_pools[world_size].run(load, str(folder), settings_for("muon", stage, precision)):
        assert_same(found, truth)
        assert_goes_on(found, truth, exactly=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_offloaded_state_is_restored(ranks: RankPool, saved: dict[Any, Saved], stage: int) -> None:
    folder, truth = saved["muon", 2, "fp32"]
    settings = settings_for("muon", stage)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    for found in ranks.run(load, str(folder), settings):
        assert_same(found, truth)
        assert_goes_on(found, truth, exactly=True)


@pytest.mark.parametrize(
    ("stage", "choice"),
    [
        pytest.param(stage, choice, marks=() if stage % 2 == number else pytest.mark.full)
        for number, choice in enumerate(("load_optimizer_states", "load_module_only"))
        for stage in STAGES
    ],
)
def test_weights_alone_are_loaded(ranks: RankPool, saved: dict[Any, Saved], stage: int, choice: str) -> None:
    """Into whatever optimizer; counters go with the scheduler, as with DeepSpeed's own checkpoints."""
    folder, truth = saved["muon", 2, "fp32"]
    for found in ranks.run(load, str(folder), settings_for("soap", stage), range(3, 4), **{choice: choice[5] == "m"}):
        counted = choice == "load_optimizer_states"
        assert (found["counters"] == truth["counters"]) == counted
        assert (found["scheduler"] == truth["scheduler"]) == counted
        assert_same(found, truth, but=("groups", "counters", "scheduler"))
        assert found["losses"][0] == truth["losses"][0]


def grouped(settings: dict[str, Any], names: list[tuple[str, ...]], rates: list[float], **kwargs: Any) -> Any:
    """An engine with param groups by the beginnings of names, each with a rate of its own, and no schedule."""
    model = model_for()
    settings = {key: value for key, value in settings.items() if key != "scheduler"}
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if p.requires_grad and name.startswith(of_group)],
            "lr": lr,
        }
        for of_group, lr in zip(names, rates)
    ]
    return engine_for(settings, model, model_parameters=groups, **kwargs)


ONE, OTHER = ("embedding", "layers.0", "layers.2"), ("layers.5", "gate", "lm_head")


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


ONE_EACH = [pytest.param(stage, marks=() if stage in (0, 3) else pytest.mark.full) for stage in STAGES]


@pytest.mark.parametrize("stage", ONE_EACH)
def test_param_groups_are_known_by_their_parameters(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """Those of the checkpoint are in another order, and one of ours is a part of one."""
    losses = ranks.run(save_grouped, str(tmp_path / "native"), settings_for("muon", 2))[0]
    folder = str(convert(tmp_path / "native", tmp_path / "universal"))
    for rates, found in ranks.run(load_grouped, folder, settings_for("muon", stage), [OTHER[:2], ONE, OTHER[2:]]):
        assert rates == [("muon", 0.01), ("adamw", 0.01), ("muon", 0.03), ("adamw", 0.03), ("adamw", 0.01)]
        assert found == losses
    for error in ranks.errors(load_grouped, folder, settings_for("muon", stage), [ONE + OTHER]):
        assert "param group 0 here has parameters of the checkpoint's groups [0, 2], whose 'lr' are [0.03," in error


# Refusals


def refused(folder: str, settings: dict[str, Any], shape: tuple[int, int] = (63, 41), **choice: Any) -> None:
    """Loading raises, and has changed nothing."""
    model = Buffered(seed=5, hidden=shape)
    model.get_parameter(FROZEN).requires_grad_(False)
    with engine_for(universal(settings), model) as engine:
        before = seen(engine)
        try:
            engine.load_checkpoint(folder, **choice)
        except ValueError:
            after = seen(engine)
            assert_same(after, before)
            raise


MOMENTUM, OWNER = "zero/gate.weight/momentum_buffer.pt", "owner_state/gate.weight.pt"
COSINE = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}}
MISFITS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    # The checkpoint's rule, and the engine's; how it is loaded; what the error says.
    "stranger's": ("muon", "soap", {}, ["layers.0.weight", "'soap' trains: expected", "found ['momentum_"]),
    "owner's": ("muon", "normuon", {}, ["owner_state/", "expected what the owner keeps of 1 matrices"]),
    "no states": ("soap", "normuon", {}, ["expected the states ['momentum_buffer']", "load_optimizer_states"]),
    "a state is missing": ("muon", "muon", {"without": MOMENTUM}, [MOMENTUM, "is missing; copy the whole folder"]),
    "an owner's is missing": ("soap", "soap", {"without": OWNER}, [OWNER, "is missing"]),
    "shape": ("muon", "muon", {"shape": (64, 41)}, ["expected shape (64, 24), found (63, 24)"]),
    "schedule": ("muon", "muon", COSINE, ["expected the state of a scheduler like the one here", "['last_batch_it"]),
    "tag": ("muon", "muon", {"tag": "step4"}, ["step4 is no universal checkpoint", "lwopt convert"]),
    "nothing": ("muon", "muon", {"without": "latest_universal"}, ["is no universal checkpoint"]),
    "function": ("muon", "muon", {"custom_load_fn": print}, ["custom_load_fn"]),
}


@pytest.mark.parametrize(
    ("what", "stage"),
    [
        pytest.param(what, stage, marks=() if stage == number % 4 else pytest.mark.full)
        for number, what in enumerate(MISFITS)
        for stage in STAGES
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(
    ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, what: str, stage: int
) -> None:
    theirs, ours, how, words = MISFITS[what]
    folder, choice = saved[theirs, {"muon": 2, "soap": 1}[theirs], "fp32"][0], dict(how)
    settings = settings_for(ours, stage) | {key: choice.pop(key) for key in how if key == "scheduler"}
    if lacks := choice.pop("without", None):
        folder = Path(shutil.copytree(folder, tmp_path / "copy"))
        (folder / ("" if lacks == "latest_universal" else "step3") / lacks).unlink()
    errors = ranks.errors(refused, str(folder), settings, **choice)
    assert all(word in error for word in words for error in errors), errors


def convert_as_deepspeed_does(source: Path, target: Path) -> None:
    folders = {"input_folder": str(source), "output_folder": str(target)}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(argparse.Namespace(**folders, **workers, inject_missing_state=True))


def save_adamw(folder: str, stage: int) -> None:
    torch._dynamo.config.disable = True
    with engine_for(scheduled(adamw_settings("adamw", stage)), model_for()) as engine:
        train(engine, 2, same_rows=True)
        engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", ONE_EACH)
def test_a_run_of_adamw_has_no_momentum(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """What DeepSpeed's converter wrote: the weights can be loaded, and the message says so."""
    ranks.run(save_adamw, str(tmp_path / "native"), 3 if stage == 3 else 2)
    convert_as_deepspeed_does(tmp_path / "native" / "global_step2", tmp_path / "universal" / "step2")
    for error in ranks.errors(refused, str(tmp_path / "universal"), settings_for("muon", stage)):
        for words in (
            "layers.0.weight",
            "expected the states ['momentum_buffer'], found ['exp_avg', 'exp_avg_sq']; another opt",
        ):
            assert words in error
        assert "load the weights alone, with load_optimizer_states=False" in error
    choice = {"load_optimizer_states": False}
    for found in ranks.run(load, str(tmp_path / "universal"), settings_for("muon", stage), range(2, 3), **choice):
        assert found["counters"][0] == 2
