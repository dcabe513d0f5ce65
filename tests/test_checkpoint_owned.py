"""Folders of optimizer state of our owned storage, read as the optimizer itself reads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.deepspeed import universal_reader as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed import universal_writer as write_universal
from lwopt_backend.checkpoint.files.folders import write_folder
from lwopt_backend.checkpoint.owned import reader as owned
from tests.ranks import RankPool
from tests.test_owned_state import DAMAGE, DTYPES, model_of, part_of_a_run, save_one
from tests.test_owned_state import optimizer_for as muon
from tests.test_rules_checkpoints import part_of_a_run as part_of_a_run_of
from tests.test_rules_on_engines import owned_optimizer

DAMAGES = {damage.__name__: damage for damage in DAMAGE if damage.__name__ != "exchange"}


def pool(rank_pools: dict[int, RankPool], ranks: int) -> RankPool:
    return rank_pools.setdefault(ranks, RankPool(ranks))


def on_one_rank(folder: str, dtype: str, rule: str | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The state as the optimizer has it when one rank owns everything, and its param groups."""
    model = model_of(dtype, seed=99)
    optimizer = owned_optimizer(model, rule) if rule else muon(model)
    model.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
    optimizer.load_state_dict_from(f"{folder}/optimizer")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return optimizer.state_dict()["state"], groups


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks_of_it", [1, 3])
def test_state_and_weights_are_read_whole(
    rank_pools: dict[int, RankPool], tmp_path: Path, dtype: str, ranks_of_it: int
) -> None:
    weights = pool(rank_pools, ranks_of_it).run(part_of_a_run, str(tmp_path), dtype, range(2))[0]
    state, groups = pool(rank_pools, 1).run(on_one_rank, str(tmp_path), dtype)[0]
    assert owned.recognises(tmp_path / "optimizer") and not owned.recognises(tmp_path)
    checkpoint = owned.read(tmp_path / "optimizer")
    assert list(checkpoint.params) == list(weights)
    for name, param in checkpoint.params.items():
        assert param.weight is not None and torch.equal(param.weight.read(), weights[name])
        expected = {{"master": "fp32"}.get(key, key): tensor for key, tensor in state[name].items()}
        step = expected.pop("step", None)
        assert param.step == (None if step is None else step.item())
        if dtype == "float32":
            expected["fp32"] = weights[name].flatten()
        assert param.states.keys() == expected.keys()
        for key, tensor in param.states.items():
            assert tensor.shape == weights[name].shape
            assert torch.equal(tensor.read().flatten(), expected[key]), (name, key)
        group = checkpoint.groups[param.group]
        ours = next(g for g in groups if (g["from_group"], g["rule"]) == (group["from_group"], group["rule"]))
        assert group.items() >= {k: v for k, v in ours.items() if k not in ("members",)}.items()


def test_what_owners_keep_goes_through_the_universal_format(rank_pools: dict[int, RankPool], tmp_path: Path) -> None:
    pool(rank_pools, 3).run(part_of_a_run_of, str(tmp_path), "soap", range(2))
    state, _ = pool(rank_pools, 1).run(on_one_rank, str(tmp_path), "float32", "soap")[0]
    checkpoint = owned.read(tmp_path / "optimizer")
    write_folder(tmp_path / "step2", lambda new: write_universal.write(checkpoint, new))
    for found in (checkpoint, deepspeed_universal.read(tmp_path / "step2")):
        for name, of_param in state.items():
            theirs = of_param.get("owner", {})
            ours = dict(found.params[name].owner_states)
            assert repr(ours) == repr(theirs) and ours.keys() == theirs.keys()
    assert any("owner" in of_param for of_param in state.values())


@pytest.mark.parametrize("place", ["in it", "beside it"])
def test_weights_of_safetensors_are_found(ranks: RankPool, tmp_path: Path, place: str) -> None:
    weights = ranks.run(part_of_a_run, str(tmp_path), "bfloat16", range(1))[0]
    (tmp_path / "model.pt").unlink()
    folder = tmp_path / "optimizer"
    save_file(weights, (folder if place == "in it" else tmp_path) / "model.safetensors")
    found = owned.read(folder).params
    assert all(torch.equal(found[name].weight.read(), weight) for name, weight in weights.items())


def test_without_weights_there_is_state_and_a_note(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_one, str(tmp_path / "state"))
    checkpoint = owned.read(tmp_path / "state")
    assert any("no weights beside" in note for note in checkpoint.notes)
    assert all(param.weight is None and param.states["fp32"].numel for param in checkpoint.params.values())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_an_error(ranks: RankPool, tmp_path: Path, damage: str, rank: int) -> None:
    folder = tmp_path / "state"
    ranks.run(save_one, str(folder))
    index = json.loads((folder / "optimizer.json").read_text())
    DAMAGES[damage](folder, index, next(name for name in index["files"] if name.endswith(f"rank{rank:05d}.pt")))
    with pytest.raises(CheckpointError):
        owned.read(folder)


def test_a_flipped_bit_and_a_hostile_pickle_are_errors(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_one, str(tmp_path / "state"))
    index = json.loads((tmp_path / "state" / "optimizer.json").read_text())
    for name in index["files"]:
        for damage, message in (("flip", "is damaged"), ("harm", "asks for .*mkdir")):
            folder, named = tmp_path / damage, json.loads(json.dumps(index))
            shutil.copytree(tmp_path / "state", folder)
            if damage == "flip":
                data = bytearray((folder / name).read_bytes())
                data[len(data) // 2] ^= 4
                (folder / name).write_bytes(data)
            else:
                torch.save({"name": name, "pieces": Harm(tmp_path / "harmed")}, folder / name)
                named["files"][name] = (folder / name).stat().st_size
                (folder / "optimizer.json").write_text(json.dumps(named))
            with pytest.raises(CheckpointError, match=message):
                read_all(owned.read(folder))
            shutil.rmtree(folder)
    assert not (tmp_path / "harmed").exists()


def read_all(checkpoint: Checkpoint) -> None:
    for param in checkpoint.params.values():
        for tensor in param.states.values():
            tensor.read()


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_an_index_that_leads_out_of_the_folder_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    ranks.run(save_one, str(folder))
    text = (folder / "optimizer.json").read_text()
    name = next(iter(json.loads(text)["files"]))
    shutil.copy(folder / name, tmp_path / name)
    (folder / "optimizer.json").write_text(text.replace(name, f"../{name}"))
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        owned.read(folder)
