"""Universal checkpoints in engines with owned storage: from any engine, any number of ranks, and back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.checkpoint import convert as conversion
from lwopt_backend.checkpoint import formats, names
from lwopt_backend.checkpoint.deepspeed import universal_reader as deepspeed_universal
from tests.cells import with_full
from tests.checkpoint_engines import Buffered, flip, full_weights_of, scheduled
from tests.fused import ATOMS, FusedLM
from tests.models import UnevenLM
from tests.owned import BUCKET_MB, exact_sums
from tests.ranks import RankPool
from tests.rules import ELEMENTWISE, SECTIONS
from tests.test_zero_universal import FROZEN, assert_goes_on, assert_same, model_for, seen, universal
from tests.zero import batch_shares, config, engine_for, train

Build = Callable[[int], nn.Module]
Pools = dict[int, RankPool]
FULL = pytest.mark.full
IN_TURN = pytest.mark.parametrize("first", [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)])


def settings_for(rule: str, storage: str, stage: int, **options: Any) -> dict[str, Any]:
    """With the rule of that name for matrices, and ``storage`` of our optimizer's."""
    settings = scheduled(config(stage))
    given = {"matrix": SECTIONS[rule], "elementwise": ELEMENTWISE["adamw"], "report": False, **options}
    settings["optimizer"] = {"type": "LayerWise", "params": given}
    if storage == "owned":
        given.update({"storage": "owned", "bucket_mb": BUCKET_MB, **options})
        settings["zero_optimization"] = {"stage": stage}
    else:
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    return settings


def seen_of(engine: Any) -> dict[str, Any]:
    """What a loaded engine must have; of a model without a frozen parameter and a buffer, the weights."""
    return seen(engine) if hasattr(engine.module, "passes") else {"weights": full_weights_of(engine)}


def save(folder: str, settings: dict[str, Any], build: Build = model_for) -> dict[str, Any]:
    """Train, save, and go on without a break, all ranks on all rows.

    Gradients are rounded, so that three times one by three is that one, with owned storage."""
    with engine_for(settings, exact_sums(build(0))) as engine:
        train(engine, 2, same_rows=True)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        found = seen_of(engine)
        found["losses"] = train(engine, range(2, 8), same_rows=True)
        return {**found, "after": full_weights_of(engine)}


def go_on(
    source: str,
    settings: dict[str, Any],
    steps: range = range(2, 8),
    build: Build = model_for,
    *,
    target: str | None = None,
    weights_first: bool = False,
    **choice: Any,
) -> dict[str, Any]:
    """Load into another model, train the steps, and save. The user's own program may load weights before."""
    with engine_for(universal(settings), exact_sums(build(5))) as engine:
        if weights_first:
            engine.module.load_state_dict(engine.module.state_dict())
        path, client = engine.load_checkpoint(source, **choice)
        found = {**seen_of(engine), "path": path, "client": client}
        found["shown"] = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        found["losses"] = train(engine, steps, same_rows=True)
        if target is not None:
            engine.save_checkpoint(target, client_state=client)
        return {**found, "after": full_weights_of(engine)}


def convert(source: Path, target: Path) -> Path:
    """As ``lwopt convert SRC DST --to universal`` does; the folder to load from."""
    checkpoint = conversion.prepared(formats.read(source), "universal", None, None, names.Numbers())
    conversion.write(checkpoint, "universal", conversion.place_of(checkpoint, "universal", target))
    return target


Saved = tuple[Path, dict[str, Any]]


def saved_by(pool: RankPool, folder: Path, settings: dict[str, Any], build: Build = model_for) -> Saved:
    truth = pool.run(save, str(folder / "native"), settings, build)[0]
    return convert(folder / "native", folder / "universal"), truth


@pytest.fixture(scope="module")
def saved(rank_pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Saved]:
    """By rule, storage and stage, made on two ranks when they are first asked for: the universal folder, and what saved
    it."""

    class Made(dict[Any, Saved]):
        def __missing__(self, key: tuple[str, str, int]) -> Saved:
            self[key] = saved_by(rank_pools[2], tmp_path_factory.mktemp("checkpoint"), settings_for(*key))
            return self[key]

    return Made()


def assert_same_run(found: dict[str, Any], truth: dict[str, Any], steps: slice) -> None:
    """The same weights, schedule, rates and counters, and the losses of the run that had no break."""
    assert_same(found, truth, but=("groups",))
    rates, of_truth = ([(group["rule"], group["lr"]) for group in run["groups"]] for run in (found, truth))
    assert rates == of_truth
    assert found["losses"] == truth["losses"][steps]


RULES = ("muon", "soap", "shampoo", "normuon")
SOURCES = [("zero", 0), ("zero", 1), ("zero", 2), ("zero", 3), ("owned", 0), ("owned", 1), ("owned", 2)]
Place = tuple[int, int, dict[str, Any]]  # ranks, stage, options
PLACES: list[Place] = [
    (1, 0, {}),
    (2, 2, {"layout": "padded"}),
    (3, 1, {"layout": "compact"}),
    (4, 1, {"group_size": 2}),
    (4, 0, {"group_size": 1}),
]


@IN_TURN
@pytest.mark.parametrize("number", range(len(SOURCES)), ids=lambda number: str(SOURCES[number]))
def test_owned_storage_goes_on_with_any_engines_run(
    rank_pools: Pools, saved: dict[Any, Saved], number: int, first: int
) -> None:
    """Each source with another rule, at another place; all rules and all places occur."""
    rule, (ranks, stage, options) = RULES[(number + first) % 4], PLACES[(number + first) % 5]
    folder, truth = saved[(rule, *SOURCES[number])]
    for found in rank_pools[ranks].run(go_on, str(folder), settings_for(rule, "owned", stage, **options)):
        assert_same_run(found, truth, slice(None))
        assert (found["client"], found["path"]) == ({"rows": 3}, str(folder / "global_step2"))
        assert_goes_on(found, truth, exactly=True)


WAYS: list[tuple[str, tuple[int, int], Place, tuple[int, int]]] = [  # ranks and stage: with ZeRO, owned, with ZeRO
    ("muon", (2, 1), (3, 2, {"layout": "compact"}), (4, 3)),
    ("soap", (4, 3), (1, 1, {}), (2, 2)),
    ("normuon", (2, 2), (4, 0, {"group_size": 2}), (1, 1)),
    ("shampoo", (1, 0), (3, 1, {"layout": "padded"}), (2, 0)),
]


@pytest.mark.parametrize(("rule", "first", "between", "last"), with_full(WAYS[:2], WAYS), ids=str)
def test_a_run_goes_from_zero_to_owned_storage_and_back(
    rank_pools: Pools, tmp_path: Path, rule: str, first: tuple[int, int], between: Place, last: tuple[int, int]
) -> None:
    """Saved and converted twice on the way, at other numbers of ranks and stages, by the losses of one that was not."""
    there, truth = saved_by(rank_pools[first[0]], tmp_path / "there", settings_for(rule, "zero", first[1]))
    settings, back = settings_for(rule, "owned", between[1], **between[2]), tmp_path / "back"
    for found in rank_pools[between[0]].run(go_on, str(there), settings, range(2, 5), target=str(back)):
        assert_same_run(found, truth, slice(0, 3))
    here = str(convert(back, tmp_path / "here"))
    for found in rank_pools[last[0]].run(go_on, here, settings_for(rule, "zero", last[1]), range(5, 8)):
        assert found["client"] == {"rows": 3}
        assert_goes_on({**found, "losses": truth["losses"][:3] + found["losses"]}, truth, exactly=True)


@pytest.mark.parametrize("choice", ["load_optimizer_states", "load_module_only"])
@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=FULL)])
def test_weights_alone_are_loaded(ranks: RankPool, saved: dict[Any, Saved], stage: int, choice: str) -> None:
    """Into whatever optimizer; counters go with the scheduler, as with DeepSpeed's own checkpoints."""
    folder, truth = saved["muon", "zero", 2]
    settings, how = settings_for("soap", "owned", stage), {choice: choice == "load_module_only"}
    for found in ranks.run(go_on, str(folder), settings, range(2, 3), **how):
        counted = choice == "load_optimizer_states"
        assert (found["counters"] == truth["counters"]) == counted
        assert (found["scheduler"] == truth["scheduler"]) == counted
        assert_same(found, truth, but=("groups", "counters", "scheduler"))
        assert found["losses"][0] == truth["losses"][0]


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("source", [("zero", 3), ("owned", 1)], ids=str)
@pytest.mark.parametrize(("size", "stage"), [(4, 2), pytest.param(1, 0, marks=FULL)])
def test_masters_of_weights_in_bf16_are_restored(
    rank_pools: Pools, tmp_path: Path, source: tuple[str, int], size: int, stage: int
) -> None:
    """And they are not taken from weights that were loaded before."""
    folder, truth = saved_by(rank_pools[2], tmp_path, {**settings_for("muon", *source), **BF16})
    settings = {**settings_for("muon", "owned", stage), **BF16}
    for found in rank_pools[size].run(go_on, str(folder), settings, weights_first=True):
        assert {str(shown.dtype) for shown in found["shown"].values()} == {"torch.bfloat16"}
        assert all(torch.equal(found["shown"][name], w.bfloat16()) for name, w in found["weights"].items())
        assert_same(found, truth, but=("groups",))
        if source[0] == "owned":
            assert_goes_on(found, truth, exactly=True)
        else:  # engines do not compute in bf16 alike
            assert found["losses"] == pytest.approx(truth["losses"], rel=1e-3)


# Several matrices in a parameter, tied parameters, some without gradients


def fused(seed: int) -> nn.Module:
    return FusedLM(seed)


FUSED = [("soap", "zero", 3), ("normuon", "owned", 2), ("soap", "zero", 0), ("normuon", "zero", 1)]


@pytest.mark.parametrize(("rule", "storage", "stage"), with_full(FUSED[:2], FUSED))
def test_parts_of_fused_parameters_keep_their_state(
    rank_pools: Pools, tmp_path: Path, rule: str, storage: str, stage: int
) -> None:
    """q, k and v, gate and up, experts: what owners keep of each goes to each."""
    folder, truth = saved_by(rank_pools[2], tmp_path, settings_for(rule, storage, stage, atoms=ATOMS), fused)
    kept = {name: p.owner_states for name, p in deepspeed_universal.read(folder).params.items() if p.owner_states}
    assert {len(kept[name]) for name in ("qkv.weight", "grouped.weight", "experts.up")} == {3}
    for ranks, *place in ((1, "zero", 1), (4, "zero", 2), (4, "zero", 3), (2, "zero", 0), (4, "owned", 1)):
        settings = settings_for(rule, *place, atoms=ATOMS)
        for found in rank_pools[ranks].run(go_on, str(folder), settings, range(2, 8), fused):
            assert_goes_on(found, truth, exactly=True)
    for other in ("zero", "owned"):
        for error in rank_pools[2].errors(go_on, str(folder), settings_for(rule, other, 1), range(2, 8), fused):
            assert "owner_state/qkv.weight.pt: parameter 'qkv.weight'" in error
            assert "load it with the 'atoms' it was saved with" in error


def test_owners_states_of_an_earlier_version_are_read_where_names_tell_their_places(
    ranks: RankPool, tmp_path: Path
) -> None:
    for build, options in ((model_for, {}), (fused, {"atoms": ATOMS})):
        native = tmp_path / build.__name__
        ranks.run(save, str(native), settings_for("soap", "zero", 2, **options), build)
        for file in native.glob("*/*optim_states.pt"):
            content = torch.load(file, weights_only=False)
            del content["optimizer_state_dict"]["base_optimizer_state"]["matrices"]
            torch.save(content, file)
    kept = formats.read(tmp_path / "model_for").params["gate.weight"].owner_states
    assert set(kept) == {0} and kept[0]
    with pytest.raises(ValueError, match="part of a fused parameter, and the checkpoint, which an earlier version"):
        formats.read(tmp_path / "fused")


class Partial(UnevenLM):
    """With a head that is the embedding, and a matrix without gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, tied=True)
        self.unused = nn.Linear(4, 3, bias=False)


@pytest.mark.parametrize("storage", ["owned", pytest.param("zero", marks=FULL)])
def test_tied_parameters_and_those_without_gradients(rank_pools: Pools, tmp_path: Path, storage: str) -> None:
    folder, truth = saved_by(rank_pools[2], tmp_path, settings_for("soap", storage, 1), Partial)
    for found in rank_pools[4].run(go_on, str(folder), settings_for("soap", "owned", 2), range(2, 8), Partial):
        assert_goes_on(found, truth, exactly=storage == "owned")  # ZeRO steps it with zeros


def save_plain(folder: str, rule: str) -> dict[str, Any]:
    """Owned storage without DeepSpeed, which an engine goes on with."""
    model = exact_sums(UnevenLM())
    options = {"elementwise": ELEMENTWISE["adamw"], "bucket_mb": BUCKET_MB, "report": False}
    optimizer = LayerWiseOptimizer(model, SECTIONS[rule], **options)
    losses = []
    for step in range(6):
        loss = model(*batch_shares(step, 1)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            optimizer.save_state_dict(f"{folder}/optimizer")
            if dist.get_rank() == 0:
                torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, f"{folder}/model.pt")
    return {"losses": losses[2:], "after": {name: param.detach().clone() for name, param in model.named_parameters()}}


def plain(seed: int) -> nn.Module:
    return UnevenLM(seed=seed)


@IN_TURN
@pytest.mark.parametrize("number", range(3))
def test_engines_go_on_with_owned_storage_in_plain_pytorch(
    rank_pools: Pools, tmp_path: Path, number: int, first: int
) -> None:
    rule = ("muon", "soap", "normuon")[(number + first) % 3]
    size, *place = ((1, "owned", 1), (3, "owned", 2), (4, "zero", 2))[number]
    (tmp_path / "native").mkdir()
    truth = rank_pools[2].run(save_plain, str(tmp_path / "native"), rule)[0]
    folder = str(convert(tmp_path / "native" / "optimizer", tmp_path / "universal"))
    settings = settings_for(rule, *place)
    del settings["scheduler"]
    for found in rank_pools[size].run(go_on, folder, settings, range(2, 6), plain):
        assert_goes_on(found, truth, exactly=True)


# Refusals


def everything(engine: Any) -> dict[str, Any]:
    """A copy of all that loading may change."""
    optimizer, core = engine.optimizer, engine.optimizer.core
    return {
        **{name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()},
        "state": {n: {k: t.clone() for k, t in state.items()} for n, state in core.stepper.state.items()},
        "owners": {n: repr(core.stepper.owner_states(n)) for n in range(len(core.members))},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "schedule": repr(engine.lr_scheduler.state_dict()),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def refused(folder: str, settings: dict[str, Any], hidden: tuple[int, int] = (63, 41), **choice: Any) -> None:
    """Loading raises, and has changed nothing."""
    model = Buffered(seed=5, hidden=hidden)
    model.get_parameter(FROZEN).requires_grad_(False)
    with engine_for(universal(settings), model) as engine:
        train(engine, 1, same_rows=True)
        before = everything(engine)
        try:
            engine.load_checkpoint(folder, **choice)
        finally:
            assert same(everything(engine), before)


def without(folder: Path, copy: Path, file: str) -> Path:
    shutil.copytree(folder, copy)
    (copy / "global_step2" / file).unlink()
    return copy


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=FULL), pytest.param(2, marks=FULL)])
def test_what_does_not_fit_is_refused_on_every_rank(
    ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, stage: int
) -> None:
    muon, soap = saved["muon", "zero", 2][0], saved["soap", "owned", 1][0]
    gate = "global_step2/zero/gate.weight"
    momentum, owner = "zero/gate.weight/momentum_buffer.pt", "owner_state/gate.weight.pt"
    here = lambda rule, **options: settings_for(rule, "owned", stage, **options)  # noqa: E731
    schedule = {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}}
    short, other = (Path(shutil.copytree(muon, tmp_path / name)) for name in ("short", "other"))
    os.truncate(short / gate / "fp32.pt", (short / gate / "fp32.pt").stat().st_size // 2)
    of_layer = other / "global_step2" / "zero" / "layers.0.weight" / "momentum_buffer.pt"
    shutil.copy(of_layer, other / gate / "momentum_buffer.pt")
    for folder, settings, choice, words in (
        (muon, here("soap"), {}, ["layers.0.weight", "'soap' trains: expected the states []", "found ['momentum_"]),
        (muon, here("normuon"), {}, ["owner_state/", "expected what the owner keeps of 1 matrices, found 0"]),
        (soap, here("normuon"), {}, ["expected the states ['momentum_buffer']", "load_optimizer_states"]),
        (soap, here("shampoo"), {}, ["was trained by 'soap', here by 'shampoo'"]),
        (
            without(muon, tmp_path / "no momentum", momentum),
            here("muon"),
            {},
            [f"{momentum} is missing; copy the whole"],
        ),
        (without(soap, tmp_path / "no owner", owner), here("soap"), {}, [owner, "is missing"]),
        (muon, here("muon"), {"hidden": (64, 41)}, ["expected shape (64, 24), found (63, 24)"]),
        (muon, here("muon", exclude=["gate.weight"]), {}, ["'gate.weight', which 'adamw' trains: expected"]),
        (muon, {**here("muon"), **schedule}, {}, ["expected the state of a scheduler like the one here"]),
        (muon, here("muon"), {"tag": "step4"}, ["step4 is no universal checkpoint", "lwopt convert --to universal"]),
        (tmp_path, here("muon"), {}, ["is no universal checkpoint"]),
        (muon, here("muon"), {"custom_load_fn": print}, ["custom_load_fn"]),
        (short, here("muon"), {}, [str(short / gate / "fp32.pt")]),
        (other, here("muon"), {}, ["expected shape (2, 5)"]),
    ):
        for error in ranks.errors(refused, str(folder), settings, **choice):
            assert all(word in error for word in words), error


def flipped_one_by_one(folder: str, settings: dict[str, Any]) -> list[str]:
    """Which files were damaged, one at a time, when loading raised nothing; those that are read in another way."""
    missed = []
    with engine_for(universal(settings), model_for(5)) as engine:
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
                assert same(everything(engine), before), file
            dist.barrier()
            if dist.get_rank() == 0:
                file.write_bytes(whole)
            dist.barrier()
        engine.load_checkpoint(folder)
        assert engine.global_steps == 2
    return missed


@pytest.mark.parametrize("rule", ["muon", pytest.param("soap", marks=FULL)])
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_flipped_bit_in_any_file_is_found_before_anything_is_changed(
    ranks: RankPool, saved: dict[Any, Saved], tmp_path: Path, rule: str
) -> None:
    """Though each rank checks a part of them only. The file of stage 3's loader has what is in another one."""
    folder = shutil.copytree(saved[rule, "zero", 2][0], tmp_path / "copy")
    for missed in ranks.run(flipped_one_by_one, str(folder), settings_for(rule, "owned", 1)):
        assert missed == ["zero_pp_rank_0_mp_rank_00_model_states.pt"]
