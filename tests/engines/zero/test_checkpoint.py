"""DeepSpeed's own checkpoints carry the optimizer, of either storage: a resumed run continues bit for bit. On other
ranks and stages, by conversion, it does in test_checkpoints.py."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from lwopt_backend.plan import Atom
from lwopt_backend.runtime import nested, owner_state
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.state import OwnerState
from tests.support.cells import cells
from tests.support.checkpoint_contents import same
from tests.support.checkpoint_engines import changed, scheduled, snapshot
from tests.support.command_line import succeeds
from tests.support.counted import Counted
from tests.support.models import MATRICES, UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool
from tests.support.references import layer_wise
from tests.support.zero import (
    ROWS,
    Reference,
    batch_shares,
    clips_of,
    engine_for,
    newton_schulz_in_float32,
    settings_for,
    train,
)

OF_SAVES = ["fp32", "bf16", "bf16+fp32", "fp16", "autocast"]
KINDS: dict[str, dict[str, Any]] = {
    "zero": {},
    "owned": {"storage": "owned"},
    "instances": {"storage": "owned", "group_size": 1},
    "pairs": {"storage": "owned", "group_size": 2, "layout": "compact"},
}
SOME = [(0, "fp32"), (1, "bf16+fp32"), (2, "fp32"), (3, "bf16")]


def settings_of(kind: str, stage: int, precision: str, **params: Any) -> dict[str, Any]:
    options = {"storage": "zero", "rows": ROWS // 2, **KINDS[kind], **params}
    return settings_for(stage=stage, precision=precision, **options)


def check_zero_to_fp32(folder: Path, engine: Any, kind: str, stage: int, precision: str) -> None:
    """DeepSpeed's class for bf16 with fp32 accumulation at stage 1 writes no stage, with every optimizer."""
    if (kind, stage, precision) == ("zero", 1, "bf16+fp32"):
        with pytest.raises(ValueError, match="is not a zero checkpoint$"):
            get_fp32_state_dict_from_zero_checkpoint(folder)
    elif stage > 0:
        found, masters = get_fp32_state_dict_from_zero_checkpoint(folder), snapshot(engine)["masters"]
        assert same({name: found[name] for name in masters}, masters)


def stop_and_go_on(folder: Path, kind: str, stage: int, precision: str, first: int, older: bool = False) -> None:
    """Save after ``first`` steps and go on; go back to there in the same engine, and in a new one."""
    settings, further = scheduled(settings_of(kind, stage, precision, clip=0.5)), range(first, first + 2)
    settings["checkpoint"] = {"load_universal": stage % 2 == 1}  # which decides where a folder has both kinds
    if older:
        settings["checkpoint"]["checkpoint_serialization"] = False
    with engine_for(settings) as engine:
        train(engine, first)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        before = snapshot(engine)
        if not older:  # which DeepSpeed's script cannot read
            check_zero_to_fp32(folder, engine, kind, stage, precision)
        losses = train(engine, further)
        after = snapshot(engine)
        engine.load_checkpoint(folder)
        assert train(engine, further) == losses
        assert changed(snapshot(engine), after) == set()
    with engine_for(settings, UnevenLM(seed=1)) as engine:
        _, client = engine.load_checkpoint(folder)
        assert client["rows"] == 3 and changed(snapshot(engine), before) == set()
        assert train(engine, further) == losses
        assert changed(snapshot(engine), after) == set()


def is_saved(kind: str, stage: int, precision: str = "fp32") -> bool:
    if kind != "zero":
        return stage < 3 and precision != "autocast"
    return precision in (("fp32", "autocast") if stage == 0 else ("fp32", "bf16", "bf16+fp32"))


@cells(is_saved, kind=["zero", "owned", "instances"], stage=range(4), precision=OF_SAVES)
@on_ranks()
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, kind: str, stage: int, precision: str) -> None:
    stop_and_go_on(tmp_path, kind, stage, precision, 3)


@pytest.mark.parametrize(
    ("ranks", "kind", "stage", "precision", "first"),
    [(2, "zero", 0, "fp32", 0), (2, "zero", 2, "fp32", 0), (2, "zero", 3, "bf16", 0), (2, "owned", 1, "bf16", 0)]
    + [(4, "pairs", 0, "bf16", 2), (4, "pairs", 1, "bf16", 2), (4, "zero", 3, "fp32", 2)],
    indirect=["ranks"],
)
@on_ranks()
def test_runs_resume_at_once_and_on_4_ranks(tmp_path: Path, kind: str, stage: int, precision: str, first: int) -> None:
    stop_and_go_on(tmp_path, kind, stage, precision, first)


@pytest.mark.parametrize(("kind", "stage"), [("zero", 1), ("zero", 3)])
@on_ranks()
def test_files_in_the_form_before_torch_1_6_resume_and_convert(tmp_path: Path, kind: str, stage: int) -> None:
    stop_and_go_on(tmp_path / "run", kind, stage, "fp32", 2, older=True)
    if torch.distributed.get_rank() == 0:
        succeeds("convert", tmp_path / "run", tmp_path / "universal", "--to", "universal")
        assert succeeds("diff", tmp_path / "run", tmp_path / "universal")


@pytest.mark.parametrize(("stage", "precision"), SOME)
@on_ranks()
def test_checkpoint_inside_an_accumulation(tmp_path: Path, stage: int, precision: str) -> None:
    """A checkpoint inside an accumulation resumes at its start."""
    settings = scheduled(settings_of("zero", stage, precision, accumulation=2))
    with engine_for(settings) as engine:
        expected_losses = train(engine, 4)
        expected = snapshot(engine)
    with engine_for(settings) as engine:
        losses = train(engine, 2)
        for number, share in enumerate(batch_shares(2, 4)[torch.distributed.get_rank() :: 2]):
            loss = engine(*share)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if number == 0:
                engine.save_checkpoint(tmp_path)
        assert losses + train(engine, range(3, 4)) == expected_losses
        assert changed(snapshot(engine), expected) == set()
    with engine_for(settings) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, range(2, 4)) == expected_losses[4:]
        assert changed(snapshot(engine), expected) == set()


ALONE = [("zero", *some, choice) for some, choice in zip(SOME, ["load_optimizer_states", "load_module_only"] * 2)]
ALONE += [("owned", 0, "bf16", "load_module_only"), ("owned", 1, "fp32", "load_optimizer_states")]
ALONE += [("owned", 2, "bf16+fp32", "load_module_only"), ("zero", 2, "fp32", "load_module_only")]


@pytest.mark.parametrize(("kind", "stage", "precision", "choice"), ALONE)
@on_ranks()
def test_weights_alone_load_with_new_states(tmp_path: Path, kind: str, stage: int, precision: str, choice: str) -> None:
    """They are what a new engine would start from that is given the model's weights, in their own dtype."""
    settings, how = settings_of(kind, stage, precision), {choice: choice == "load_module_only"}
    with engine_for(settings) as engine:
        train(engine, 2)
        trained = {name: weight.float() for name, weight in snapshot(engine)["model"].items()}
        engine.save_checkpoint(tmp_path)
    model = UnevenLM(seed=1)
    model.load_state_dict(trained)
    with engine_for(settings, model) as engine:
        start = snapshot(engine)
        losses = train(engine, 2)
        expected = snapshot(engine)
    with engine_for(settings, UnevenLM(seed=2)) as engine:
        fresh = snapshot(engine)
        engine.load_checkpoint(tmp_path, **how)
        loaded = snapshot(engine)
        assert same(start["model"], loaded["model"]) and same(fresh["states"], loaded["states"])
        if kind == "zero":
            assert same(start["masters"], loaded["masters"]) and not any(engine.basic_optimizer.state.values())
        assert train(engine, 2) == losses
        # load_optimizer_states=False goes on counting, load_module_only starts anew
        assert changed(snapshot(engine), expected) <= {"steps", "samples"}
    if kind == "owned":
        load_into_one_that_has_trained(tmp_path, settings, how, start["model"])


def load_into_one_that_has_trained(
    folder: Path, settings: dict[str, Any], how: dict[str, bool], expected: dict[str, Tensor]
) -> None:
    """Owned storage also takes weights into such an engine: its state stays, so one that learns nothing is seen."""
    with engine_for(settings, UnevenLM(seed=2)) as engine:
        train(engine, 1)
        kept = snapshot(engine)["states"]
        engine.load_checkpoint(folder, **how)
        loaded = snapshot(engine)
        assert same(expected, loaded["model"]) and same(kept, loaded["states"])
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train(engine, 1)
        masters = snapshot(engine)["masters"]
        assert same(expected, {name: master.to(expected[name].dtype) for name, master in masters.items()})


SCALED = [("zero", 1, "fp16 fp16"), ("zero", 2, "fp32 fp16"), ("zero", 3, "fp16 fp32"), ("zero", 1, "bf16 fp16")]
SCALED += [("zero", 2, "fp16 bf16"), ("owned", 1, "fp16 fp16"), ("owned", 2, "fp32 fp16"), ("owned", 1, "fp16 bf16")]


@pytest.mark.parametrize(("kind", "stage", "precisions"), SCALED)
@on_ranks()
def test_a_loss_scale_is_loaded_only_where_it_is_dynamic_as_well(
    tmp_path: Path, kind: str, stage: int, precisions: str
) -> None:
    """Fixed: After a load, the loss scale was the saved one, though another was configured. DeepSpeed itself takes any,
    with which fp16 would begin at 1. Its files of bf16 load in bf16 only."""
    before, after = precisions.split()
    options = {"bucket_mb": 1.0} if kind == "owned" else {}  # one bucket in any precision
    with engine_for(settings_of(kind, stage, before, **options)) as engine:
        train(engine, 1)
        if before == "fp16":
            engine.optimizer.loss_scaler.cur_scale = 64.0
        engine.save_checkpoint(tmp_path)
    settings, folder = settings_of(kind, stage, after, **options), tmp_path
    if "bf16" in precisions:
        folder = tmp_path / "universal"
        if torch.distributed.get_rank() == 0:
            succeeds("convert", tmp_path, folder, "--to", "universal")
        torch.distributed.barrier()
    with engine_for(settings, UnevenLM(seed=1)) as engine:
        configured = engine.optimizer.cur_scale
        assert configured == (2.0**8 if after == "fp16" else 1.0)
        engine.load_checkpoint(folder)
        assert engine.optimizer.cur_scale == (64.0 if precisions == "fp16 fp16" else configured)


@pytest.mark.parametrize(("kind", "stage"), [("zero", 1), ("zero", 3), ("owned", 1)])
@on_ranks()
def test_gradients_are_clipped_as_configured_after_a_load(tmp_path: Path, kind: str, stage: int) -> None:
    """Fixed: After a load, gradients were clipped at the norm of the saved run. And not as before the save, as in
    DeepSpeed itself at stages 1 and 2."""
    single = Reference()
    with newton_schulz_in_float32():
        for step, clip in enumerate((0.0, 0.25)):
            with engine_for(settings_of(kind, stage, "fp32", clip=clip, ns_dtype="float32")) as engine:
                if step:
                    engine.load_checkpoint(tmp_path)
                train(engine, range(step, step + 1), same_rows=True)
                engine.save_checkpoint(tmp_path)
                single.clip = clip
                single.step(batch_shares(step, 1), clips=clips_of(engine))
                assert single.norm > 0.25
                single.check(engine)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks()
def test_the_schedule_starts_anew_where_its_state_is_not_loaded(tmp_path: Path, stage: int) -> None:
    settings = scheduled(settings_of("zero", stage, "fp32"))

    def rates(engine: Any) -> list[list[float]]:
        return [list(engine.get_lr()) for step in range(3) if train(engine, range(step, step + 1))]

    with engine_for(settings) as engine:
        first = rates(engine)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
    with engine_for(settings) as engine:
        engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
        assert changed(snapshot(engine), saved) == {"schedule"} and rates(engine) == first


@pytest.mark.parametrize(("kind", "stage"), [("zero", 0), ("zero", 2), ("zero", 3), ("owned", 1)])
@on_ranks()
def test_weights_load_where_others_are_frozen_now(tmp_path: Path, kind: str, stage: int) -> None:
    """Fixed: at stages 2 and 3 DeepSpeed ended with a KeyError where a parameter was trained at the save and is frozen
    now, and weights alone of a universal folder were refused where one was frozen at the save. With state, both are
    refused in words, but for state of what is frozen now in a universal folder."""

    def engine_of(frozen: str, seed: int, **more: Any) -> Any:
        model = UnevenLM(seed=seed)
        model.get_parameter(frozen).requires_grad_(False)
        return engine_for({**settings_of(kind, stage, "fp32"), **more}, model)

    with engine_of(MATRICES[0], 0) as engine:
        train(engine, 1, same_rows=True)
        engine.save_checkpoint(tmp_path / "own")
        saved = weights_of(engine)
    if torch.distributed.get_rank() == 0:
        succeeds("convert", tmp_path / "own", tmp_path / "universal", "--to", "universal")
    torch.distributed.barrier()
    here = f"parameter {MATRICES[0]!r}"
    for folder, more, said in (
        ("own", {}, f"{here} is trained here, but not in the checkpoint"),
        ("universal", {"checkpoint": {"load_universal": True}}, f"{here}: expected status trained.*freeze it, or load"),
    ):
        for asked in ({"load_optimizer_states": False}, {"load_module_only": True}):
            with engine_of(MATRICES[1], 1, **more) as engine:
                engine.load_checkpoint(tmp_path / folder, **asked)
                assert same(weights_of(engine), saved)
        with engine_of(MATRICES[1], 1, **more) as engine:
            with pytest.raises(ValueError, match=said):
                engine.load_checkpoint(tmp_path / folder)
            assert not same(weights_of(engine), saved)


# What does not fit
Weights = dict[str, torch.Tensor]
Saving = Callable[..., tuple[str, dict[str, Weights]]]


def settings_at(kind: str, stage: int, precision: str = "fp32", **options: Any) -> dict[str, Any]:
    """Either storage, or AdamW, in one param group or in those that this package would make."""
    if not kind.startswith("AdamW"):
        return settings_for(kind, stage, precision, rows=4, **options)
    adamw = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}
    return settings_for("zero", stage, rows=4) | {"optimizer": adamw}


def save(folder: str, kind: str, stage: int, **options: Any) -> dict[str, Weights]:
    model = UnevenLM()
    groups: list[Any] = list(model.parameters())
    if kind == "AdamW in our groups":
        named = dict(model.named_parameters())
        groups = [{"params": [named.pop(name) for name in MATRICES]}, {"params": list(named.values())}]
    weights = {}
    with engine_for(settings_at(kind, stage, **options), model, model_parameters=groups) as engine:
        for step, tag in enumerate("ab"):
            train(engine, range(step, step + 1), same_rows=True)
            engine.save_checkpoint(folder, tag=tag)
            weights[tag] = weights_of(engine)
    return weights


def weights_of(engine: Any) -> Weights:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def load(folder: str, kind: str, stage: int, options: dict[str, Any], **choice: Any) -> tuple[str | None, Weights]:
    """Where it was loaded from, and the weights. If loading raises, nothing has changed."""
    with engine_for(settings_at(kind, stage, **options), UnevenLM(seed=1)) as engine:
        before = [weights_of(engine), list(engine.get_lr()), 0]
        try:
            path, _ = engine.load_checkpoint(folder, **choice)
        except (ValueError, RuntimeError):  # of this rank, or of another
            assert same([weights_of(engine), list(engine.get_lr()), engine.global_steps], before)
            raise
        return path, weights_of(engine)


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Saving:
    made: dict[str, tuple[str, dict[str, Weights]]] = {}

    def find(kind: str, stage: int, options: dict[str, Any]) -> tuple[str, dict[str, Weights]]:
        key = repr((kind, stage, options))
        if key not in made:
            folder = str(tmp_path_factory.mktemp("checkpoint"))
            made[key] = folder, rank_pools[2].run(save, folder, kind, stage, **options)[0]
        return made[key]

    return find


def only(name: str) -> dict[str, Any]:
    return {"exclude": [name]}


WEIGHTS_ONLY = {"load_optimizer_states": False}
ON_2 = r"^ValueError: the checkpoint '\S+/b': expected {} data-parallel ranks, found 2; load it on 2\. "
UNIVERSAL = r"A different number of ranks needs DeepSpeed's universal format"
STRANGER = (
    r"^ValueError: the checkpoint '\S+/b': expected this optimizer's state, found .*its ds_config says 'AdamW'"
    r".*; load the weights alone, with .*load_optimizer_states=False"
)
PLACED = r"^ValueError: the checkpoint '\S+/b': parameter 'layers.0.weight': expected place \d of group 0 of 2, the che"
STAGE = "expected ZeRO stage {1}, found {0}"
CONVERT = "lwopt convert SRC DST --to universal"
THEIRS = "parameter 'layers.2.weight': expected rule adamw, the checkpoint has muon; "
Row = tuple[tuple[Any, ...], tuple[Any, ...], int, dict[str, Any], str]
# What was saved: by which storage at which stage, with which options; what loads it, on how many ranks; what it says.
REFUSED: list[Row] = [
    (("zero", 2), ("zero", 2), 4, {}, ON_2.format(4) + UNIVERSAL + ".*with load_optimizer_states=False$"),
    # On more ranks DeepSpeed would wait for ever for those that find no file.
    (("zero", 3), ("zero", 3), 4, {}, ON_2.format(4) + UNIVERSAL + ".*and load DST$"),
    (("zero", 3), ("zero", 3), 4, WEIGHTS_ONLY, "expected 4 data-parallel ranks, found 2"),
    (("owned", 1), ("owned", 1), 4, {}, f"expected 4 data-parallel ranks, found 2.*{CONVERT}"),
    (("zero", 0), ("zero", 2), 2, {}, STAGE.format("0", 2)),
    (("zero", 2), ("zero", 0), 2, {}, STAGE.format("1 or 2", 0)),
    (("zero", 2), ("zero", 3), 2, {}, STAGE.format("0, 1 or 2", 3)),
    (("zero", 3), ("zero", 1), 2, {}, STAGE.format("3", 1)),
    (("owned", 1), ("owned", 0), 2, {}, STAGE.format("1 or 2", 0)),
    # Also where a different count of parameters makes DeepSpeed speak of parameter alignment.
    (("zero", 2, only("layers.0.weight")), ("zero", 2, only("layers.2.weight")), 2, {}, PLACED),
    (("zero", 3, only("layers.0.weight")), ("zero", 3, only("gate.bias")), 2, {}, PLACED),
    *((("owned", stage), ("owned", stage, only("layers.2.weight")), 2, {}, THEIRS) for stage in (0, 1)),
    *((("AdamW in our groups", stage), ("zero", stage), 2, {}, STRANGER) for stage in (0, 2)),
    *((("AdamW", s), (kind, s), 2, {}, STRANGER) for kind, s in (("zero", 3), ("owned", 0), ("owned", 2))),
    *((("zero", s), ("owned", s), 2, {}, f'expected "storage": "owned", found another.*{CONVERT}') for s in (0, 1)),
    *((("owned", s), ("zero", s), 2, {}, 'was saved with "storage": "owned"; load it with that') for s in (0, 1)),
    (("owned", 1), ("owned", 1, {"group_size": 1}), 2, {}, f"expected elements .*layout, bucket_mb.*{CONVERT}"),
    (("owned", 1, {"precision": "bf16"}), ("owned", 1), 2, {}, "load it in the precision it was saved in"),
    (("zero", 2), ("zero", 2), 2, {"tag": "c"}, r"^ValueError: the checkpoint '\S+/c': expected a file "),
    (
        *(("zero", 3), ("zero", 3), 2, {"tag": "a", "load_module_only": True}),
        "^ValueError: expected tag 'a' in the file 'latest', from which DeepSpeed loads weights alone at stage 3",
    ),
]


def in_short(row: Row) -> str:
    return " - ".join(" ".join(map(str, part[:2])) if isinstance(part, tuple) else str(part)[:40] for part in row)


@pytest.mark.parametrize("row", REFUSED, ids=in_short)
def test_a_checkpoint_that_does_not_fit_is_refused(rank_pools: dict[int, RankPool], saved: Saving, row: Row) -> None:
    theirs, ours, here, choice, message = row
    folder, _ = saved(*(*theirs, {})[:3])
    errors = rank_pools[here].errors(load, folder, *(*ours, {})[:3], **choice)
    assert all(re.search(message, error, re.DOTALL) for error in errors), "\n".join(errors)


LOADED: list[Row] = [  # the last: at which tag
    (("zero", 2), ("zero", 2), 4, WEIGHTS_ONLY, "b"),
    (("zero", 3), ("zero", 3), 1, WEIGHTS_ONLY, "b"),
    (("zero", 1), ("zero", 2), 2, {}, "b"),
    (("zero", 2), ("zero", 1), 2, {}, "b"),
    *((("AdamW", stage), ("zero", stage), 2, WEIGHTS_ONLY, "b") for stage in (1, 3)),
    (("zero", 2), ("zero", 2), 2, {"tag": "a", "load_module_only": True}, "a"),
]


@pytest.mark.parametrize("row", LOADED, ids=in_short)
def test_weights_alone_and_stages_1_or_2_can_load(rank_pools: dict[int, RankPool], saved: Saving, row: Row) -> None:
    """On a different number of ranks, those of another optimizer, and those of an earlier tag."""
    theirs, ours, here, choice, tag = row
    folder, weights = saved(*theirs, {})
    assert not same(weights["a"], weights["b"])
    for path, found in rank_pools[here].run(load, folder, *ours, {}, **choice):
        assert str(path).startswith(f"{folder}/{tag}") and same(found, weights[tag])


@pytest.mark.parametrize("stage", [3])
def test_a_folder_without_checkpoints_is_left_to_deepspeed(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    assert [path for path, _ in ranks.run(load, str(tmp_path), "zero", stage, {})] == [None, None]


def test_emptied_pointer_is_refused_with_the_tags(ranks: RankPool, tmp_path: Path) -> None:
    """A pointer that was emptied and not written is refused with the tags. DeepSpeed does both in turn."""
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "latest").touch()
    for error in ranks.errors(load, str(tmp_path), "zero", 2, {}):
        assert "latest is empty, because the save that wrote it was interrupted" in error and error.endswith(
            ": global_step7"
        )


# State of owners that have changed
MATRIX = [f"layers.{number}.weight" for number in range(6)]
SAVED_ON = {0: [0, 1, 2, 5], 1: [3, 4, 5]}  # the last one on both
OWNED_NOW = {0: [0], 1: [1, 4], 2: [2, 3, 5], 3: []}


def owner_state_of(number: int) -> dict[str, Any]:
    """Sizes that no other matrix has, nested, in several dtypes; one tensor lies by columns, one in parts."""
    seeded = torch.Generator().manual_seed(number)
    left, right, wide = (torch.randn(3 + number, size, generator=seeded) for size in (5, 7, 9))
    factors = [left.T, right.bfloat16(), wide[:, ::2], torch.empty(0, 3)]
    return {"GG": factors, "count": number, "last": (torch.tensor(2.0), None, "word")}


def test_owner_state_comes_back_from_tensors_alone() -> None:
    """Checkpoints store it so. 0.1 is no float32, and 2**40 + 1 no int32."""
    state = {**owner_state_of(1), "rate": 0.1, "many": 2**40 + 1, "on": True}
    found = nested.rebuild(nested.description(nested.described(state)), dict(nested.leaves(state)))
    assert repr(found) == repr(state)
    assert found["GG"][0].stride() == state["GG"][0].stride()


def bring_to_new_owners(harm: str = "none") -> tuple[dict[str, Any], Counted]:
    ranks = TorchCollectives()
    held = OwnerState([Atom(name, (4, 4), 1) for name in MATRIX], torch.device("cpu"))
    saved: Any = {MATRIX[number]: owner_state_of(number) for number in SAVED_ON.get(ranks.rank, [])}
    if harm == "no state on rank 1":
        saved = {} if ranks.rank == 1 else saved
    elif harm == "a set" and ranks.rank == 0:
        saved[MATRIX[2]] = {"GG": [{3}]}
    for atom in (before := OWNED_NOW[ranks.rank]):
        held.put(atom, {"before": torch.ones(2)})
    owned = {MATRIX[number]: (held, number) for number in before}
    with Counted() as counted, pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner_state, "BUCKET_BYTES", 300)
        try:
            owner_state.bring("a load", [ranks], [owned], saved)
        except (ValueError, TypeError, RuntimeError):
            assert {*map(str, held.by_name().values())} <= {str({"before": torch.ones(2)})} and not counted.calls
            raise
    return held.by_name(), counted


@on_ranks(4)
def test_owner_receives_only_the_state_it_lacks() -> None:
    """An owner receives the state that it has not, and no more at once."""
    rank = torch.distributed.get_rank()
    found, counted = bring_to_new_owners()
    assert repr(found) == repr({MATRIX[number]: owner_state_of(number) for number in OWNED_NOW[rank]})
    for name, state in found.items():
        expected = owner_state_of(MATRIX.index(name))["GG"][0]
        assert state["GG"][0].stride() == expected.stride() == (1, 5)
    numels = {number: 4 * (3 + number) * 5 + 2 * (3 + number) * 7 + 4 * (3 + number) * 5 + 4 for number in range(6)}
    new = [number for number in OWNED_NOW[rank] if number not in SAVED_ON.get(rank, [])]
    assert counted.received_bytes == sum(numels[number] for number in new)
    assert counted.most_bytes <= 600 and counted.most_in_flight == 1 and counted.calls["uneven"] == 4


REFUSED_STATE = {
    "no state on rank 1": "matrix 'layers.4.weight': expected owner state, as others have, found none; a file is dam",
    "a set": "found a set at 'layers.2.weight.GG.0', which checkpoints do not hold",
}


@pytest.mark.parametrize("harm", REFUSED_STATE)
def test_lost_owner_state_is_refused(rank_pools: dict[int, RankPool], harm: str) -> None:
    """Owner state that is lost or is no state is refused on all ranks."""
    for error in rank_pools[4].errors(bring_to_new_owners, harm):
        assert REFUSED_STATE[harm].split(": ")[0] in error and REFUSED_STATE[harm].split("; ")[0] in error, error


@on_ranks()
def test_checkpoint_without_one_owners_state_is_refused(tmp_path: Path) -> None:
    """A checkpoint without the state of one owner is never taken."""
    settings = settings_for("zero", 1, rows=ROWS // 2) | {"optimizer": layer_wise("soap", policy="balance")}
    with engine_for(settings) as engine:
        train(engine, 1)
        engine.save_checkpoint(tmp_path)
    if torch.distributed.get_rank() == 0:
        *_, file = sorted(tmp_path.rglob("*optim_states.pt"))
        saved = torch.load(file, weights_only=False)
        saved["optimizer_state_dict"]["base_optimizer_state"]["owner_state"] = {}
        torch.save(saved, file)
    torch.distributed.barrier()
    with engine_for(settings) as engine:
        engine.load_checkpoint(tmp_path)
        for _ in range(2):
            with pytest.raises(
                (ValueError, RuntimeError), match="load_checkpoint.* failed with|matrix 'layers"
            ) as raised:
                engine.basic_optimizer.state_store()
            assert "expected owner state, as others have, found none" in str(raised.value)
