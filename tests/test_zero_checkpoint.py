"""DeepSpeed's own checkpoints carry the optimizer, of either storage: a resumed run continues bit for bit.

On other ranks and stages, by conversion, it does in test_checkpoints.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor

from tests.cells import cells
from tests.checkpoint_engines import changed, equal, scheduled, snapshot
from tests.models import UnevenLM
from tests.on_ranks import on_ranks
from tests.zero import ROWS, batch_shares, engine_for, settings_for, train

KINDS: dict[str, dict[str, Any]] = {
    "zero": {},
    "owned": {"storage": "owned"},
    "instances": {"storage": "owned", "group_size": 1},
    "pairs": {"storage": "owned", "group_size": 2, "layout": "compact"},
}


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
        assert equal({name: found[name] for name in masters}, masters)


def stop_and_go_on(folder: Path, kind: str, stage: int, precision: str, first: int) -> None:
    """Save after ``first`` steps and go on; go back to there in the same engine, and in a new one."""
    settings, further = scheduled(settings_of(kind, stage, precision, clip=0.5)), range(first, first + 2)
    with engine_for(settings) as engine:
        train(engine, first)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        before = snapshot(engine)
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


SOME = [(0, "fp32"), (1, "bf16+fp32"), (2, "fp32"), (3, "bf16")]


def is_saved(kind: str, stage: int, precision: str = "fp32") -> bool:
    if kind != "zero":
        return stage < 3 and precision != "autocast"
    return precision in (("fp32", "autocast") if stage == 0 else ("fp32", "bf16", "bf16+fp32"))


@cells(
    is_saved,
    kind=["zero", "owned", "instances"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32", "fp16", "autocast"],
)
@on_ranks()
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, kind: str, stage: int, precision: str) -> None:
    stop_and_go_on(tmp_path, kind, stage, precision, 3)


@pytest.mark.parametrize(
    ("ranks", "kind", "stage", "precision", "first"),
    [*((2, "zero", *some, 0) for some in SOME), (2, "owned", 1, "bf16", 0), (4, "pairs", 0, "bf16", 2)]
    + [(4, "pairs", 1, "bf16", 2), (4, "zero", 3, "fp32", 2)],
    indirect=["ranks"],
)
@on_ranks()
def test_runs_resume_at_once_and_on_4_ranks(tmp_path: Path, kind: str, stage: int, precision: str, first: int) -> None:
    stop_and_go_on(tmp_path, kind, stage, precision, first)


@pytest.mark.parametrize(("stage", "precision"), SOME)
@on_ranks()
def test_a_checkpoint_inside_an_accumulation_resumes_at_its_start(tmp_path: Path, stage: int, precision: str) -> None:
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


@cells(
    lambda kind, stage, precision, choice: is_saved(kind, stage) and (kind == "owned" or (stage, precision) in SOME),
    kind=["zero", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32"],
    choice=["load_optimizer_states", "load_module_only"],
)
@on_ranks()
def test_weights_alone_are_loaded_with_fresh_optimizer_states(
    tmp_path: Path, kind: str, stage: int, precision: str, choice: str
) -> None:
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
        assert equal(start["model"], loaded["model"]) and equal(fresh["states"], loaded["states"])
        if kind == "zero":
            assert equal(start["masters"], loaded["masters"]) and not any(engine.basic_optimizer.state.values())
        assert train(engine, 2) == losses
        # load_optimizer_states=False goes on counting, load_module_only starts anew
        assert changed(snapshot(engine), expected) <= {"steps", "samples"}
    if kind == "owned":
        load_into_one_that_has_trained(tmp_path, settings, how, start["model"])


def load_into_one_that_has_trained(
    folder: Path, settings: dict[str, Any], how: dict[str, bool], expected: dict[str, Tensor]
) -> None:
    """Owned storage takes weights into such an engine, too: its state stays, so one that learns nothing is seen."""
    with engine_for(settings, UnevenLM(seed=2)) as engine:
        train(engine, 1)
        kept = snapshot(engine)["states"]
        engine.load_checkpoint(folder, **how)
        loaded = snapshot(engine)
        assert equal(expected, loaded["model"]) and equal(kept, loaded["states"])
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train(engine, 1)
        masters = snapshot(engine)["masters"]
        assert equal(expected, {name: master.to(expected[name].dtype) for name, master in masters.items()})


@pytest.mark.parametrize("stage", [0, 2, 3])
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
