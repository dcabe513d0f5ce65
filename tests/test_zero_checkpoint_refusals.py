"""A checkpoint that cannot be loaded is refused on every rank, with the reason, before anything of it is loaded."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.checkpoint_engines import convert_as_deepspeed_does
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import engine_for, full_weights, settings_for, train

Weights = dict[str, torch.Tensor]


def settings_of(kind: str, stage: int, precision: str = "fp32", **options: Any) -> dict[str, Any]:
    """Of a storage, or AdamW's, in one param group or in those that ours would make."""
    if not kind.startswith("AdamW"):
        return settings_for(kind, stage, precision, rows=4, **options)
    adamw = {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}
    return settings_for("zero", stage, rows=4) | {"optimizer": adamw}


def save(folder: str, kind: str, stage: int, **options: Any) -> dict[str, Weights]:
    """The weights at the tags "a" and "b", which are saved after the first and the second step."""
    model = UnevenLM()
    groups: list[Any] = list(model.parameters())
    if kind == "AdamW in our groups":
        named = dict(model.named_parameters())
        groups = [{"params": [named.pop(name) for name in MATRICES]}, {"params": list(named.values())}]
    weights = {}
    with engine_for(settings_of(kind, stage, **options), model, model_parameters=groups) as engine:
        for step, tag in enumerate("ab"):
            train(engine, range(step, step + 1), same_rows=True)
            engine.save_checkpoint(folder, tag=tag)
            weights[tag] = full_weights(engine)
    return weights


def weights_of(engine: Any) -> Weights:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def same(ours: Weights, theirs: Weights) -> bool:
    return all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def load(folder: str, kind: str, stage: int, options: dict[str, Any], **choice: Any) -> tuple[str | None, Weights]:
    """Where it was loaded from, and the weights. If loading raises, nothing has changed."""
    settings = settings_of(kind, stage, **options)
    settings["checkpoint"] = {"load_universal": choice.pop("universal", False)}
    with engine_for(settings, UnevenLM(seed=1)) as engine:
        before, rates = weights_of(engine), list(engine.get_lr())
        try:
            path, _ = engine.load_checkpoint(folder, **choice)
        except ValueError:
            assert same(weights_of(engine), before) and list(engine.get_lr()) == rates and engine.global_steps == 0
            raise
        return path, weights_of(engine)


Saving = Callable[..., tuple[str, dict[str, Weights]]]


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Saving:
    """The folder, and the weights by tag, of a checkpoint that two ranks made when it was first asked for."""

    @functools.cache
    def find(kind: str, stage: int, options: str = "{}") -> tuple[str, dict[str, Weights]]:
        folder = str(tmp_path_factory.mktemp("checkpoint"))
        return folder, rank_pools[2].run(save, folder, kind, stage, **json.loads(options))[0]

    return lambda kind, stage, options: find(kind, stage, json.dumps(options))


def only(name: str) -> dict[str, Any]:
    return {"exclude": [name]}


WEIGHTS_ONLY = {"load_optimizer_states": False}
ON_2 = r"^ValueError: the checkpoint '\S+/b' was saved on 2 data-parallel ranks and is loaded on {}; load it on 2\. "
UNIVERSAL = r"Another number of ranks needs DeepSpeed's universal format"
STRANGER = (
    r"^ValueError: the checkpoint '\S+/b' was written by another optimizer \(its ds_config says 'AdamW'\), whose state "
    r"this one cannot go on with; load its weights alone, with .*load_optimizer_states=False"
)
GROUP_0 = "^ValueError: group 0 holds other parameters than in the checkpoint: "
STAGE = "was saved at ZeRO stage {} and is loaded at stage {}"
CONVERT = "lwopt convert SRC DST --to universal"
FIRST = "'layers.0.weight' here, 'layers.2.weight' there;"
THEIRS = "holds other parameters: 'layers.2.weight' \\(41, 63\\) by adamw here, 'layers.2.weight' \\(41, 63\\) by"
Row = tuple[tuple[Any, ...], tuple[Any, ...], int, dict[str, Any], str]
# What was saved: by which storage at which stage, with which options; what loads it, on how many ranks; what it says.
REFUSED: list[Row] = [
    *(
        (("zero", stage), ("zero", stage), here, {}, ON_2.format(here) + UNIVERSAL + end)
        for stage, here, end in (
            (1, 1, ".*with load_optimizer_states=False$"),
            (2, 4, ".*with load_optimizer_states=False$"),
            (3, 1, ".*with load_optimizer_states=False$"),
            (3, 4, ".*true}$"),  # DeepSpeed would wait for ever for the ranks that find no file of theirs
        )
    ),
    (("zero", 3), ("zero", 3), 4, WEIGHTS_ONLY, "was saved on 2 data-parallel ranks and is loaded on 4"),
    (("owned", 1), ("owned", 1), 4, {}, f"was saved on 2 data-parallel ranks and is loaded on 4.*{CONVERT}"),
    *(
        (("zero", there), ("zero", here), 2, {}, STAGE.format(named, here))
        for there, here, named in ((0, 2, "0"), (0, 3, "0, 1 or 2"), (2, 0, "1 or 2"), (2, 3, "0, 1 or 2"), (3, 1, "3"))
    ),
    (("owned", 0), ("owned", 1), 2, {}, STAGE.format("0", 1)),
    (("owned", 1), ("owned", 0), 2, {}, STAGE.format("1 or 2", 0)),
    # Also where other numbers of parameters make DeepSpeed speak of parameter alignment.
    *(
        (("zero", stage, only(theirs)), ("zero", stage, only(ours)), 2, {}, GROUP_0 + difference)
        for stage, theirs, ours, difference in (
            (2, "layers.0.weight", "layers.2.weight", FIRST),
            (3, "layers.0.weight", "gate.bias", FIRST),
            (2, "gate.bias", "gate.weight", "no further parameter here, 'gate.weight' there;"),
            (3, "gate.bias", "gate.weight", "no further parameter here, 'gate.weight' there;"),
        )
    ),
    *((("owned", stage), ("owned", stage, only("layers.2.weight")), 2, {}, THEIRS) for stage in (0, 1, 2)),
    *((("AdamW in our groups", stage), ("zero", stage), 2, {}, STRANGER) for stage in range(4)),
    *((("AdamW", s), (kind, s), 2, {}, STRANGER) for kind, s in (("zero", 1), ("zero", 3), ("owned", 0), ("owned", 2))),
    *((("zero", s), ("owned", s), 2, {}, f'was not saved with "storage": "owned".*{CONVERT}') for s in range(3)),
    *((("owned", s), ("zero", s), 2, {}, 'was saved with "storage": "owned"; load it with that') for s in range(3)),
    (("owned", 1), ("owned", 1, {"group_size": 1}), 2, {}, f"is laid out otherwise.*{CONVERT}"),
    (("owned", 1, {"precision": "bf16"}), ("owned", 1), 2, {}, "load it in the precision it was saved in"),
    *(
        (("zero", stage), ("zero", stage), 2, {"tag": "c"}, r"^ValueError: the checkpoint '\S+/c' has no file ")
        for stage in (2, 3)
    ),
    (
        *(("zero", 3), ("zero", 3), 2, {"tag": "a", "load_module_only": True}),
        "^ValueError: only the weights of tag 'a' are asked for, but at stage 3 ",
    ),
    (
        *(("owned", 1), ("owned", 1), 2, {"tag": "b", "universal": True}),
        "is no universal checkpoint.*lwopt convert --to universal",
    ),
]


def in_short(row: Row) -> str:
    return " - ".join(" ".join(map(str, part[:2])) if isinstance(part, tuple) else str(part)[:40] for part in row)


@pytest.mark.parametrize("row", REFUSED, ids=in_short)
def test_a_checkpoint_that_does_not_fit_is_refused(rank_pools: dict[int, RankPool], saved: Saving, row: Row) -> None:
    theirs, ours, here, choice, message = row
    folder, _ = saved(*(*theirs, {})[:3])
    errors = rank_pools[here].errors(load, folder, *(*ours, {})[:3], **choice)
    assert all(re.search(message, error, re.DOTALL) for error in errors), errors


LOADED: list[Row] = [  # the last: at which tag
    (("zero", 1), ("zero", 1), 1, WEIGHTS_ONLY, "b"),
    (("zero", 2), ("zero", 2), 4, WEIGHTS_ONLY, "b"),
    (("zero", 3), ("zero", 3), 1, WEIGHTS_ONLY, "b"),
    (("zero", 3), ("zero", 3), 1, {"load_module_only": True}, "b"),
    (("zero", 1), ("zero", 2), 2, {}, "b"),
    (("zero", 2), ("zero", 1), 2, {}, "b"),
    *((("AdamW", stage), ("zero", stage), 2, WEIGHTS_ONLY, "b") for stage in (1, 2, 3)),
    *((("zero", stage), ("zero", stage), 2, {"tag": "a", "load_module_only": True}, "a") for stage in (1, 2)),
]


@pytest.mark.parametrize("row", LOADED, ids=in_short)
def test_weights_alone_and_stages_1_and_2_can_be_loaded(
    rank_pools: dict[int, RankPool], saved: Saving, row: Row
) -> None:
    """On other numbers of ranks, those of another optimizer, and those of an earlier tag."""
    theirs, ours, here, choice, tag = row
    folder, weights = saved(*theirs, {})
    assert not same(weights["a"], weights["b"])
    for path, found in rank_pools[here].run(load, folder, *ours, {}, **choice):
        assert str(path).startswith(f"{folder}/{tag}") and same(found, weights[tag])


@pytest.mark.parametrize("stage", [2, 3])
def test_a_folder_without_checkpoints_is_left_to_deepspeed(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    assert [path for path, _ in ranks.run(load, str(tmp_path), "zero", stage, {})] == [None, None]


def test_a_pointer_that_was_emptied_and_not_written_is_refused_with_the_tags(ranks: RankPool, tmp_path: Path) -> None:
    """DeepSpeed does both in turn."""
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "latest").touch()
    for error in ranks.errors(load, str(tmp_path), "zero", 2, {}):
        assert "latest is empty: the save that wrote it was interrupted" in error and error.endswith(": global_step7")


def test_universal_checkpoints_that_cannot_be_loaded_are_refused(
    ranks: RankPool, saved: Saving, tmp_path: Path
) -> None:
    """Those that DeepSpeed's converter made; of ours see test_universal_checkpoints.py."""
    folder, _ = saved("owned", 1, {})
    shutil.copytree(folder, tmp_path / "native")
    universal = Path(convert_as_deepspeed_does(tmp_path / "native", "b"))
    for error in ranks.errors(load, str(universal), "owned", 2, only("layers.2.weight"), universal=True):
        assert "parameter 'layers.2.weight', which 'adamw' trains: expected the states ['exp_avg', 'exp_avg_" in error
    (universal / "b" / "zero" / "gate.weight" / "exp_avg.pt").unlink()
    for error in ranks.errors(load, str(universal), "owned", 2, {}, universal=True):
        assert "parameter 'gate.weight', which 'muon' trains: expected the states ['momentum_buffer'], found " in error
