"""Modules' state: by module, whole or not at all, and on whatever ranks the modules are next."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lwopt_backend import ModuleOptimizers
from lwopt_backend.owned.state import state_pieces
from tests.modules import (
    EVERYWHERE,
    NAMES,
    ON_ONE,
    ONE_AND_THREE,
    OVERLAPPING,
    TWO_AND_TWO,
    OneProcess,
    Split,
    backward,
    group_of,
    modules_of,
    optimizers_of,
    owned,
    train,
)
from tests.ranks import RankPool

four_ranks = pytest.mark.parametrize("ranks", [4], indirect=True)
SPLITS = [TWO_AND_TWO, ONE_AND_THREE, OVERLAPPING, EVERYWHERE, ON_ONE]


def weights_of(modules: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of all modules, by module and name, gathered from the ranks that have them; copies must be equal."""
    mine = {f"{n}.{k}": p.detach().clone() for n, m in modules.items() for k, p in m.named_parameters()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    whole: dict[str, Tensor] = {}
    for of_rank in everyones:
        for name, tensor in of_rank.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), name
    return whole


def load_weights(modules: dict[str, Any], weights: dict[str, Tensor]) -> None:
    for name, module in modules.items():
        own = {key.removeprefix(f"{name}."): w for key, w in weights.items() if key.startswith(f"{name}.")}
        module.load_state_dict(own)


def save_after(split: Split, folder: Path, steps: int) -> dict[str, Tensor]:
    modules = modules_of(split)
    optimizers = optimizers_of(split, modules)
    train(split, modules, optimizers, range(steps), clip=0.05)
    for group in optimizers.param_groups:
        group["lr"] *= 0.5
    optimizers.save_state_dict(folder)
    return weights_of(modules)


def state_on(split: Split, folder: Path, weights: dict[str, Tensor]) -> dict[str, Any]:
    """Every parameter's state by module and name, put together from all ranks' pieces; learning rates; new weights."""
    modules = modules_of(split)
    load_weights(modules, weights)
    optimizers = optimizers_of(split, modules)
    optimizers.load_state_dict_from(folder)
    mine: dict[str, dict[int, Tensor]] = {}
    for module, optimizer in optimizers.modules.items():
        for piece in state_pieces(optimizer.core):
            for key, tensor in piece.tensors.items():
                name = f"{module}.{optimizer.core.members[piece.member].name}.{key}"
                mine.setdefault(name, {})[piece.start if tensor.ndim else 0] = tensor.clone()
    rates = {(group["module"], group["rule"], group["lr"]) for group in optimizers.param_groups}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (mine, rates))
    pieces: dict[str, dict[int, Tensor]] = {}
    for of_rank, _ in everyones:
        for name, found in of_rank.items():
            for start, tensor in found.items():
                assert torch.equal(pieces.setdefault(name, {}).setdefault(start, tensor), tensor), name
    whole = {name: torch.cat([found[at].flatten() for at in sorted(found)]).tolist() for name, found in pieces.items()}
    return {"state": whole, "rates": set().union(*(rates for _, rates in everyones))}


@four_ranks
def test_state_saved_on_one_split_is_the_same_on_every_other(ranks: RankPool, tmp_path: Path) -> None:
    weights = ranks.run(save_after, TWO_AND_TWO, tmp_path, 3)[0]
    expected = ranks.run(state_on, TWO_AND_TWO, tmp_path, weights)[0]
    assert {rate for *_, rate in expected["rates"]} == {0.01, 0.0015}
    for split in SPLITS[1:]:
        found = ranks.run(state_on, split, tmp_path, weights)[0]
        assert found["state"] == expected["state"] and found["rates"] == expected["rates"], split


def go_on(before: Split, after: Split, folder: Path) -> dict[str, Tensor]:
    """Three steps on one split, then from the checkpoint two on the other."""
    modules = modules_of(before)
    optimizers = optimizers_of(before, modules)
    train(before, modules, optimizers, range(3))
    optimizers.save_state_dict(folder)
    weights = weights_of(modules)
    modules = modules_of(after)
    load_weights(modules, weights)
    optimizers = optimizers_of(after, modules)
    optimizers.load_state_dict_from(folder)
    train(after, modules, optimizers, range(3, 5))
    single = OneProcess()
    for step in range(5):
        single.gradients(before if step < 3 else after, step)
        single.step()
    assert single.difference(modules) == 0.0
    return weights_of(modules)


@four_ranks
@pytest.mark.parametrize(
    ("before", "after"),
    [(TWO_AND_TWO, ONE_AND_THREE), (ONE_AND_THREE, ON_ONE), (ON_ONE, OVERLAPPING), (OVERLAPPING, TWO_AND_TWO)],
    ids=["2 + 2 to 1 + 3", "1 + 3 to one", "one to overlapping", "overlapping to 2 + 2"],
)
def test_training_goes_on_when_the_split_changed(ranks: RankPool, tmp_path: Path, before: Split, after: Split) -> None:
    ranks.run(go_on, before, after, tmp_path)


def go_on_alone(folder: Path, weights: dict[str, Tensor]) -> float:
    """One process, with torch.distributed or without, that has both modules."""
    modules = modules_of(ON_ONE)
    load_weights(modules, weights)
    optimizers = ModuleOptimizers({name: owned(modules[name], None) for name in NAMES})
    optimizers.load_state_dict_from(folder)
    for group in optimizers.param_groups:
        group["lr"] *= 2  # as it was before saving
    single = OneProcess()
    for step in range(5):
        single.gradients(TWO_AND_TWO if step < 3 else ON_ONE, step)
        norm = single.norm() if step >= 3 else 0.0
        if step >= 3:
            backward(ON_ONE, modules, step)
            assert optimizers.grad_norm().item() == pytest.approx(norm, rel=1e-6)
            assert optimizers.step()
        single.step()
    return single.difference(modules)


def save_without_clipping(folder: Path) -> dict[str, Tensor]:
    modules = modules_of(TWO_AND_TWO)
    optimizers = optimizers_of(TWO_AND_TWO, modules)
    train(TWO_AND_TWO, modules, optimizers, range(3))
    for group in optimizers.param_groups:
        group["lr"] /= 2
    optimizers.save_state_dict(folder)
    return weights_of(modules)


@four_ranks
def test_four_ranks_state_loads_on_a_single_process(ranks: RankPool, rank_pools: Any, tmp_path: Path) -> None:
    weights = ranks.run(save_without_clipping, tmp_path)[0]
    one = rank_pools.setdefault(1, RankPool(1))
    assert one.run(go_on_alone, tmp_path, weights) == [0.0]


def state_dicts_round_trip(split: Split) -> None:
    """``state_dict`` keyed by module, taken by new optimizers on the same ranks."""
    modules = modules_of(split)
    optimizers = optimizers_of(split, modules)
    train(split, modules, optimizers, range(2))
    told = []
    optimizers.register_state_dict_pre_hook(lambda optimizer: told.append("saved"))
    optimizers.register_load_state_dict_post_hook(lambda optimizer: told.append("loaded"))
    saved = {name: clone(state) for name, state in optimizers.state_dict().items()}
    assert list(saved) == list(modules)
    train(split, modules, optimizers, range(2, 4))
    expected = weights_of(modules)
    single = OneProcess()
    for step in range(2):
        single.gradients(split, step)
        single.step()
    for name, module in modules.items():
        module.load_state_dict(single.modules[name].state_dict())
    optimizers.load_state_dict({**saved, **{name: None for name in NAMES if name not in modules}})
    assert told == ["saved", "loaded"]
    train(split, modules, optimizers, range(2, 4))
    for name, tensor in weights_of(modules).items():
        assert torch.equal(tensor, expected[name]), name


def clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(entry) for key, entry in value.items()}
    return [clone(entry) for entry in value] if isinstance(value, list) else value


@four_ranks
@pytest.mark.parametrize("split", [TWO_AND_TWO, OVERLAPPING], ids=["2 + 2", "overlapping"])
def test_state_dicts_are_keyed_by_module(ranks: RankPool, split: Split) -> None:
    ranks.run(state_dicts_round_trip, split)


def load_other_names(keys: tuple[str, ...]) -> None:
    modules = modules_of(TWO_AND_TWO)
    optimizers = optimizers_of(TWO_AND_TWO, modules)
    optimizers.load_state_dict({key: None for key in keys})


@four_ranks
def test_a_state_dict_with_other_modules_is_refused_on_all_ranks(ranks: RankPool) -> None:
    for error in ranks.errors(load_other_names, ("vision", "langauge")):
        assert "unknown module 'langauge'; did you mean 'language'?" in error.replace('\\"', '"').replace("\\'", "'")
    for error in ranks.errors(load_other_names, ("vision",)):
        assert "lacks module" in error and "language" in error


def load_on_two_and_two(folder: Path, names: tuple[str, str] = NAMES) -> None:
    modules = modules_of(TWO_AND_TWO)
    groups = {name: group_of(TWO_AND_TWO.ranks(name), name) for name in NAMES}
    optimizers = ModuleOptimizers(
        {other: owned(modules[n], groups[n]) if n in modules else None for n, other in zip(NAMES, names)}
    )
    optimizers.load_state_dict_from(folder)


@four_ranks
def test_folders_that_hold_no_whole_save_are_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "state"

    def said(*arguments: Any) -> set[str]:
        return set(ranks.errors(load_on_two_and_two, folder, *arguments))

    assert all("holds no modules' state" in error for error in said())
    ranks.run(save_after, TWO_AND_TWO, folder, 1)
    assert all("did you mean" in error and "langauge" in error for error in said(("vision", "langauge")))
    (save,) = folder.glob("save-*")
    pointer = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(pointer.replace('"pieces"', '"whole"'))
    assert all("was saved by FSDP2's or a plain optimizer" in error for error in said())
    (folder / "modules.json").write_text(pointer[:-20])
    assert all("is damaged or not of modules' state" in error for error in said())
    (folder / "modules.json").write_text(json.dumps({**json.loads(pointer), "save": "../../elsewhere"}))
    assert all("is damaged or not of modules' state" in error for error in said())
    (folder / "modules.json").write_text(pointer)
    ranks.run(load_on_two_and_two, folder)
    index = save / "language" / "optimizer.json"
    index.rename(tmp_path / "index")
    assert all("module 'language' failed on rank" in e and "holds no optimizer state" in e for e in said())
    shutil.rmtree(save / "language")
    assert all("is missing" in error for error in said())


def unreadable_option(folder: Path) -> None:
    """A second save, in which a param group of one module has what no checkpoint can hold."""
    modules = modules_of(TWO_AND_TWO)
    optimizers = optimizers_of(TWO_AND_TWO, modules)
    for group in optimizers.param_groups:
        if group["module"] == "language":
            group["note"] = lambda: None
    optimizers.save_state_dict(folder)


@four_ranks
def test_a_save_that_fails_leaves_the_one_before_and_the_next_removes_it(ranks: RankPool, tmp_path: Path) -> None:
    weights = ranks.run(save_after, TWO_AND_TWO, tmp_path, 2)[0]
    expected = ranks.run(state_on, ONE_AND_THREE, tmp_path, weights)[0]
    (before,) = tmp_path.glob("save-*")
    for error in ranks.errors(unreadable_option, tmp_path):
        assert "module 'language' failed on rank 2 with" in error and "cannot be read back" in error
    assert list(tmp_path.glob("save-*")) == [before]  # vision's part of the new one is gone
    assert ranks.run(state_on, ONE_AND_THREE, tmp_path, weights)[0] == expected
    (tmp_path / "save-0123456789abcdef").mkdir()  # as a crash leaves one
    ranks.run(save_after, TWO_AND_TWO, tmp_path, 1)
    (after,) = tmp_path.glob("save-*")
    assert after != before and json.loads((tmp_path / "modules.json").read_text())["save"] in after.name
