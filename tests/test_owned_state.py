"""Optimizer state of owned storage: written by some ranks and read by others, or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests.cells import with_full
from tests.models import UnevenLM, batch
from tests.owned import BUCKET_MB, optimizer_for
from tests.owned_scenarios import train_ours
from tests.ranks import RankPool
from tests.test_owned_experts import MoE, expert_optimizer, one_pass, sharded, sharers_of_experts
from tests.zero import ADAMW, MUON

MICRO_BATCHES = 12  # of a step, at every world size
ROWS = 24
FULL = pytest.mark.full
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_of(dtype: str, **options: Any) -> nn.Module:
    """Its gradients are few bits wide, so that their sums are exact in fp32 in any order, and a mean of W ranks is the
    sum of all micro-batches, at any W."""
    model = UnevenLM(**options).to(DTYPES[dtype])
    ranks = dist.get_world_size()
    for param in model.parameters():
        param.register_hook(lambda grad: (grad * 2**10).round().clamp(-60, 60) / 2**10 * ranks)
    return model


def train(model: nn.Module, optimizer: LayerWiseOptimizer, steps: range) -> None:
    """Every rank takes its share of the same micro-batches. The last step's parameters may still be on their way."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        tokens, targets = batch(step, ROWS)
        mine = list(zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)))[rank::ranks]
        with optimizer.no_sync():
            for part in mine[:-1]:
                model(*part).backward()
        model(*mine[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def part_of_a_run(
    folder: str, dtype: str, steps: range, *, save: bool = True, weights_last: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Resume where steps before these ended, train them, and save."""
    model = model_of(dtype, seed=0 if steps.start == 0 else 99)
    optimizer = optimizer_for(model, grad_dtype="float32" if dtype == "bfloat16" else "parameter", **options)
    if steps.start:
        saved = torch.load(f"{folder}/model.pt", weights_only=True)
        loads = [lambda: model.load_state_dict(saved), lambda: optimizer.load_state_dict_from(f"{folder}/optimizer")]
        for load in reversed(loads) if weights_last else loads:
            load()
    train(model, optimizer, steps)
    if save:
        optimizer.save_state_dict(f"{folder}/optimizer")
    found = weights(model)
    if save and dist.get_rank() == 0:
        torch.save(found, f"{folder}/model.pt")
    return found


LEGS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "padded to compact": [
        (2, {"layout": "padded"}),
        (1, {"layout": "compact", "bucket_mb": 0.002}),
        (3, {"layout": "compact", "weights_last": True}),
        (4, {"layout": "padded", "bucket_mb": 1.0}),
    ],
    "compact to padded": [
        (2, {"layout": "compact", "overlap_param_gather": True}),
        (1, {"layout": "padded", "weights_last": True}),
        (3, {"layout": "padded", "bus_alignment": True}),
        (4, {"layout": "compact", "overlap_param_gather": True, "weights_last": True}),
    ],
    "instances": [
        (4, {"layout": "auto", "group_size": 2}),
        (2, {"layout": "compact", "group_size": 1, "weights_last": True}),
        (4, {"layout": "padded", "group_size": 1}),
        (4, {"layout": "compact", "group_size": 2, "overlap_param_gather": True}),
        (1, {"layout": "padded"}),
    ],
    "kept gradients": [
        (2, {"layout": "auto", "keep_full_grads": True}),
        (3, {"layout": "compact", "keep_full_grads": True}),
        (1, {"layout": "padded", "keep_full_grads": True}),
    ],
}


# Kept gradients have the parameter's dtype, and in bf16 sums over micro-batches are not exact.
OFTEN_LEGS = list(zip(LEGS, ("bfloat16", "float32", "bfloat16", "float32")))
SELDOM_LEGS = list(zip(LEGS, ("float32", "bfloat16", "float32")))


@pytest.mark.parametrize("legs, dtype", with_full(OFTEN_LEGS, SELDOM_LEGS))
def test_a_run_goes_on_bit_for_bit_on_other_ranks_and_layouts(
    rank_pools: dict[int, RankPool], tmp_path: Path, legs: str, dtype: str
) -> None:
    for number, (ranks, options) in enumerate(LEGS[legs]):
        steps = range(2 * number, 2 * number + 2)
        found = rank_pools[ranks].run(part_of_a_run, str(tmp_path), dtype, steps, **options)
        assert all(equal(found[0], other) for other in found)
    whole = rank_pools[1].run(part_of_a_run, "", dtype, range(2 * len(LEGS[legs])), save=False, layout="padded")[0]
    assert equal(found[0], whole)
    untrained = rank_pools[1].run(part_of_a_run, "", dtype, range(0), save=False)[0]
    assert not any(torch.equal(whole[name], untrained[name]) for name in whole)


# What a folder holds


def owned_state(optimizer: LayerWiseOptimizer) -> list[tuple[str, Any]]:
    """A copy of all that loading may change."""
    found: list[tuple[str, Any]] = []
    for name, state in optimizer.state_dict()["state"].items():
        found += [(f"{name}.{key}", tensor.clone()) for key, tensor in state.items()]
    for number, group in enumerate(optimizer.param_groups):
        found += [(f"{number} {key}", value) for key, value in sorted(group.items()) if key != "params"]
    return found


def same(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> bool:
    return len(ours) == len(theirs) and all(
        a == b and (torch.equal(x, y) if isinstance(x, Tensor) else x == y) for (a, x), (b, y) in zip(ours, theirs)
    )


def trained(steps: int = 1, dtype: str = "bfloat16", **options: Any) -> tuple[nn.Module, LayerWiseOptimizer]:
    model = model_of(dtype)
    optimizer = optimizer_for(model, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def in_vain(optimizer: LayerWiseOptimizer, load: Callable[[], None]) -> None:
    """Loading raises, and leaves everything as it was."""
    before = owned_state(optimizer)
    try:
        load()
    finally:
        assert same(owned_state(optimizer), before)


def save_twice(folder: str) -> tuple[list[str], list[str]]:
    model, optimizer = trained(layout="padded")
    optimizer.save_state_dict(folder)
    first = sorted(os.listdir(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(folder, f"{first[1]}.tmp").write_bytes(b"of a save that was interrupted")
    train(model, optimizer, range(1, 2))
    optimizer.save_state_dict(folder)
    return first, sorted(os.listdir(folder))


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_folder_holds_the_files_of_one_save_and_pieces_of_every_parameter(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    found = ranks.run(save_twice, str(folder))
    index = json.loads((folder / "optimizer.json").read_text())
    for first, second in found:
        assert len(first) == len(second) == 4 and set(first) & set(second) == {"optimizer.json"}
        assert set(second) == {"optimizer.json", *index["files"]}
    assert {key: tuple(entry["shape"]) for key, entry in index["params"].items()} == {
        name: tuple(param.shape) for name, param in UnevenLM().named_parameters()
    }
    assert any(len(entry["pieces"]) > 1 for entry in index["params"].values())


def save_one(folder: str, steps: int = 1, **options: Any) -> None:
    trained(steps, **{"layout": "padded", **options})[1].save_state_dict(folder)


def test_only_the_first_instance_writes(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_one, str(tmp_path), group_size=1)
    files = sorted(os.listdir(tmp_path))
    assert len(files) == 2 and files[0].endswith("rank00000.pt")


# What cannot be loaded


def load_in_vain(folder: str) -> None:
    _, optimizer = trained(layout="compact")
    in_vain(optimizer, lambda: optimizer.load_state_dict_from(folder))


def remove(folder: Path, index: dict[str, Any], name: str) -> None:
    (folder / name).unlink()


def truncate(folder: Path, index: dict[str, Any], name: str) -> None:
    os.truncate(folder / name, index["files"][name] - 64)


def overwrite(folder: Path, index: dict[str, Any], name: str) -> None:
    (folder / name).write_bytes(bytes(index["files"][name]))


def exchange(folder: Path, index: dict[str, Any], name: str) -> None:
    """The file of an earlier save under this one's name."""
    other = next((folder.parent / "other").glob(f"*{name[-12:]}"))
    (folder / name).write_bytes(other.read_bytes())
    index["files"][name] = other.stat().st_size
    (folder / "optimizer.json").write_text(json.dumps(index))


def swap(folder: Path, index: dict[str, Any], name: str) -> None:
    """Another rank's file of the same save under this name."""
    other = next(file for file in index["files"] if file != name)
    (folder / name).write_bytes((folder / other).read_bytes())
    index["files"][name] = index["files"][other]
    (folder / "optimizer.json").write_text(json.dumps(index))


def forget_index(folder: Path, index: dict[str, Any], name: str) -> None:
    (folder / "optimizer.json").unlink()


def cut_index(folder: Path, index: dict[str, Any], name: str) -> None:
    os.truncate(folder / "optimizer.json", (folder / "optimizer.json").stat().st_size // 2)


def newer_index(folder: Path, index: dict[str, Any], name: str) -> None:
    (folder / "optimizer.json").write_text(json.dumps({**index, "version": 2}))


def hole_in_index(folder: Path, index: dict[str, Any], name: str) -> None:
    index["params"]["embedding.weight"]["pieces"].pop()
    (folder / "optimizer.json").write_text(json.dumps(index))


DAMAGE = {
    remove: "is missing; the folder has to be the same one for all ranks",
    truncate: "is damaged: expected",
    overwrite: "is damaged or not a file of optimizer state",
    exchange: "a file of another save or rank",
    swap: "a file of another save or rank",
    forget_index: "there is no optimizer.json, which is written last",
    cut_index: "is damaged or not an index of optimizer state",
    newer_index: "it is of version 2, this program reads version 1",
    hole_in_index: "parameter 'embedding.weight'",
}


@pytest.fixture(scope="module")
def saves(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saves, of other steps: "state" and "other"."""
    folder = tmp_path_factory.mktemp("saves")
    rank_pools[2].run(save_one, str(folder / "other"), 2)
    rank_pools[2].run(save_one, str(folder / "state"))
    return folder


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=FULL)])
def test_a_damaged_folder_is_an_error_on_all_ranks_and_changes_nothing(
    ranks: RankPool, saves: Path, tmp_path: Path, damage: Callable[..., None], rank: int
) -> None:
    shutil.copytree(saves, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "state"
    index = json.loads((folder / "optimizer.json").read_text())
    name = next(name for name in index["files"] if name.endswith(f"rank{rank:05d}.pt"))
    damage(folder, index, name)
    assert all(DAMAGE[damage] in error for error in ranks.errors(load_in_vain, str(folder)))


def with_more() -> nn.Module:
    model = model_of("bfloat16")
    model.more = nn.Linear(3, 3, dtype=torch.bfloat16)
    return model


def frozen(name: str) -> nn.Module:
    model = model_of("bfloat16")
    model.get_parameter(name).requires_grad = False
    return model


def adamw_with(**options: Any) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(
        model_of("bfloat16"), **MUON, elementwise={**ADAMW, "name": "adamw", **options}, report=False
    )


OTHERS: dict[str, tuple[Callable[[], LayerWiseOptimizer], str]] = {
    "shape": (
        lambda: optimizer_for(model_of("bfloat16", hidden=(63, 43))),
        "parameter 'layers.2.weight': expected shape (43, 63), the checkpoint",
    ),
    "dtype": (lambda: optimizer_for(model_of("float32")), "expected dtype float32, the checkpoint has bfloat16"),
    "rule": (
        lambda: optimizer_for(model_of("bfloat16"), exclude=("layers.2.weight",)),
        "expected rule adamw, the checkpoint has muon",
    ),
    "fewer": (
        lambda: optimizer_for(frozen("gate.bias")),
        "parameter 'gate.bias' is in the checkpoint, and not trained here",
    ),
    "more": (lambda: optimizer_for(with_more()), "parameter 'more.weight' is in this model, and not in the checkpoint"),
    "state": (lambda: adamw_with(amsgrad=True), "max_exp_avg_sq"),
    "groups": (
        lambda: optimizer_for(model_of("float32")),
        "param group 0 (muon) has the parameters of the checkpoint's groups ['0.muon'",
    ),
}


def load_into_other(folder: str, other: str) -> None:
    optimizer = OTHERS[other][0]()
    in_vain(optimizer, lambda: optimizer.load_state_dict_from(folder))


@pytest.mark.parametrize("other", OTHERS)
def test_another_models_state_is_an_error_on_all_ranks_and_changes_nothing(
    ranks: RankPool, saves: Path, tmp_path: Path, other: str
) -> None:
    folder = saves / "state"
    if other == "groups":
        folder = tmp_path
        ranks.run(save_groups, str(folder))
    assert all(OTHERS[other][1] in error for error in ranks.errors(load_into_other, str(folder), other))


# Crashes


def save_and_fail(folder: str, rank: int, fault: str) -> None:
    """A second save that fails on one rank; the first must be as it was."""
    model, optimizer = trained(layout="padded")
    optimizer.save_state_dict(folder)
    expected = owned_state(optimizer)
    train(model, optimizer, range(1, 2))
    originals = os.replace, os.fsync

    def full_disk(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if dist.get_rank() == rank and (fault != "index" or str(args[-1]).endswith(".json")):
                raise OSError("no space left on device")
            return original(*args)

        return call

    try:
        if fault == "fsync":
            os.fsync = full_disk(os.fsync)
        else:
            os.replace = full_disk(os.replace)
        with pytest.raises((OSError, RuntimeError), match="no space left on device"):
            optimizer.save_state_dict(folder)
    finally:
        os.replace, os.fsync = originals
    _, other = trained(2, layout="padded")
    other.load_state_dict_from(folder)
    assert same(owned_state(other), expected)
    optimizer.save_state_dict(folder)
    index = json.loads(Path(folder, "optimizer.json").read_text())
    assert set(os.listdir(folder)) == {"optimizer.json", *index["files"]}
    other.load_state_dict_from(folder)
    assert same(owned_state(other), owned_state(optimizer))


OFTEN, SELDOM = [(0, "index"), (1, "fsync"), (0, "file")], [(0, "fsync"), (1, "file")]


@pytest.mark.parametrize("rank, fault", with_full(OFTEN, SELDOM))
def test_a_save_that_fails_leaves_the_one_before(ranks: RankPool, tmp_path: Path, rank: int, fault: str) -> None:
    ranks.run(save_and_fail, str(tmp_path), rank, fault)


# Param groups


def with_groups(order: list[int], rates: list[float]) -> LayerWiseOptimizer:
    model = model_of("float32")
    parts = [list(model.layers.parameters()), list(model.embedding.parameters()) + list(model.lm_head.parameters())]
    parts.append(list(model.gate.parameters()))
    groups = [{"params": parts[part], "lr": rate, "note": f"part {part}"} for part, rate in zip(order, rates)]
    return LayerWiseOptimizer(model, **MUON, elementwise="adamw", params=groups, bucket_mb=BUCKET_MB, report=False)


def save_groups(folder: str) -> None:
    with_groups([0, 1, 2], [0.1, 0.2, 0.3]).save_state_dict(folder)


def load_groups(folder: str, order: list[int]) -> dict[str, float]:
    optimizer = with_groups(order, [0.5] * len(order))
    optimizer.load_state_dict_from(folder)
    return {f"{group['note']} {group['rule']}": group["lr"] for group in optimizer.param_groups}


def test_param_groups_are_known_by_their_members(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_groups, str(tmp_path))
    for rates in ranks.run(load_groups, str(tmp_path), [2, 0, 1]):
        assert rates == {
            "part 0 muon": 0.1,
            "part 0 adamw": 0.1,
            "part 1 adamw": 0.2,
            "part 2 muon": 0.3,
            "part 2 adamw": 0.3,
        }


def save_disagreeing(folder: str) -> None:
    _, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.1 * dist.get_rank()
    optimizer.save_state_dict(folder)


def save_unreadable(folder: str) -> None:
    _, optimizer = trained()
    optimizer.param_groups[1]["path"] = Path(folder)
    optimizer.save_state_dict(folder)


def test_param_groups_that_cannot_be_saved_are_an_error_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks.errors(save_disagreeing, str(tmp_path))
    assert all("param group 0.muon: ranks differ in 'lr', rank 1 has 0.1, one before it 0.0" in e for e in errors)
    errors = ranks.errors(save_unreadable, str(tmp_path))
    assert all("of 'path' cannot be read back" in error for error in errors)
    assert not list(tmp_path.iterdir())


# Experts that only some ranks have


def summary(optimizer: LayerWiseOptimizer) -> dict[tuple[str, str], float]:
    """By parameter and key the sum of absolute values of this rank's state."""
    state = optimizer.state_dict()["state"]
    return {(n, key): float(tensor.double().abs().sum()) for n, of in state.items() for key, tensor in of.items()}


def train_experts(folder: str, **options: Any) -> dict[tuple[str, str], float]:
    model, _ = sharded()
    optimizer = expert_optimizer(model, **options)
    train_ours(model, optimizer, 1, one_pass)
    optimizer.save_state_dict(folder)
    return summary(optimizer)


def load_experts(folder: str) -> dict[tuple[str, str], float]:
    optimizer = optimizer_for(MoE(), exclude=("last.weight",))
    optimizer.load_state_dict_from(folder)
    return summary(optimizer)


@pytest.mark.parametrize("options", [{}, {"group_size": 2, "expert_group_size": 1}], ids=str)
def test_experts_are_loaded_where_all_ranks_have_all(
    rank_pools: dict[int, RankPool], tmp_path: Path, options: dict[str, Any]
) -> None:
    totals: Counter[tuple[str, str]] = Counter()
    # With options, two instances: of the dense ranks 0, 1 and 2, 3, and of those that share experts, 0, 2 and 1, 3.
    for of_rank in rank_pools[4].run(train_experts, str(tmp_path), **options)[: 2 if options else 4]:
        totals.update(of_rank)
    (alone,) = rank_pools[1].run(load_experts, str(tmp_path))
    assert set(alone) == set(totals)
    for (name, key), total in alone.items():
        assert total == (1.0 if key == "step" else pytest.approx(totals[name, key], rel=1e-12))


class OneExpert(nn.Module):
    """Every set of ranks has another expert under the same name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(24, 24)
        torch.manual_seed(number)
        self.expert = nn.Linear(24, 40)


def local_experts(folder: str, load: bool) -> list[tuple[str, Any]]:
    mine = dist.get_rank() % 2
    model = OneExpert(10 + mine)
    groups = {"expert_params": ["expert.*"], "expert_process_group": sharers_of_experts()}
    optimizer = optimizer_for(model, **groups)
    if load:
        optimizer.load_state_dict_from(folder)
        return owned_state(optimizer)
    model.expert(model.dense(torch.full((2, 24), 1.0 + mine))).square().sum().backward()
    optimizer.step()
    optimizer.save_state_dict(folder)
    return owned_state(optimizer)


def local_experts_alone(folder: str) -> None:
    optimizer_for(OneExpert(10)).load_state_dict_from(folder)


def test_experts_of_one_name_are_told_apart_by_the_ranks_that_have_them(
    rank_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    saved, loaded = (rank_pools[4].run(local_experts, str(tmp_path), load) for load in (False, True))
    assert all(same(a, b) for a, b in zip(saved, loaded))
    names = json.loads((tmp_path / "optimizer.json").read_text())["params"]
    assert {"expert.weight of expert set 0", "expert.weight of expert set 1", "dense.weight"} <= set(names)
    (error,) = rank_pools[1].errors(local_experts_alone, str(tmp_path))
    assert "parameter 'expert.weight' is in this model, and not in the checkpoint" in error


# torch's own state_dict


def resumed_by_state_dict(folder: str, **options: Any) -> bool:
    model, optimizer = trained(2, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule.step()
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, path)
    state = weights(model)
    train(model, optimizer, range(2, 4))

    other = model_of("bfloat16", seed=99)
    again = optimizer_for(other, **options)
    following = torch.optim.lr_scheduler.LambdaLR(again, lambda step: 1 / (1 + step))
    saved = torch.load(path, weights_only=True)
    again.load_state_dict(saved["optimizer"])
    following.load_state_dict(saved["schedule"])
    other.load_state_dict(state)
    assert [group["lr"] for group in again.param_groups] == [MUON["lr"] / 2, ADAMW["lr"] / 2]
    train(other, again, range(2, 4))
    return equal(weights(model), weights(other))


@pytest.mark.parametrize("options", [{"layout": "padded"}, {"layout": "compact", "group_size": 1}], ids=str)
def test_a_state_dict_resumes_the_same_rank_bit_for_bit(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert all(ranks.run(resumed_by_state_dict, str(tmp_path), **options))


def load_state_dict_in_vain(case: str) -> None:
    _, optimizer = trained(layout="padded")
    state = optimizer.state_dict()
    if case == "another rank's":
        everyones: list[Any] = [None, None]
        dist.all_gather_object(everyones, state)
        state = everyones[1 - dist.get_rank()]
    elif case == "torch's":
        state = torch.optim.AdamW(UnevenLM().parameters()).state_dict()
    elif case == "one rank has none" and dist.get_rank() == 1:
        state = {}
    elif case == "without a key":
        name = next(iter(state["state"]))
        state["state"][name].pop(next(iter(state["state"][name])))
    elif case == "of other groups":
        state["param_groups"][0]["params"] = state["param_groups"][0]["params"][1:]
    _, other = trained(2, layout="compact" if case == "of another layout" else "padded")
    in_vain(other, lambda: other.load_state_dict(state))


POINTER = "load with optimizer.load_state_dict_from(folder)"


@pytest.mark.parametrize(
    "case, message",
    [
        ("another rank's", POINTER),
        ("of another layout", POINTER),
        ("torch's", "this state_dict was written by another optimizer: its param groups have no 'rule'; load the"),
        ("one rank has none", POINTER),
        ("without a key", "expected a tensor, found None"),
        ("of other groups", "param groups hold"),
    ],
)
def test_any_other_state_dict_is_an_error_on_all_ranks(ranks: RankPool, case: str, message: str) -> None:
    errors = ranks.errors(load_state_dict_in_vain, case)
    assert all(message in error for error in errors), errors


def hooks_called() -> list[str]:
    _, optimizer = trained()
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda opt: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: called.append(f"before loading {state['mine']}"))
    optimizer.register_load_state_dict_post_hook(lambda opt: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    return called


def test_torchs_state_dict_hooks_are_called(ranks: RankPool) -> None:
    assert ranks.run(hooks_called)[0] == ["before saving", "before loading 1", "after loading"]


def save_within_a_step(folder: str) -> None:
    model, optimizer = trained(step_in_backward=True, bucket_mb=0.001)
    model(*batch(0, 4)).backward()
    optimizer.save_state_dict(folder)


def test_saving_between_backward_and_a_step_that_has_begun_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks.errors(save_within_a_step, str(tmp_path))
    assert all("save or load optimizer state after step()" in error for error in errors)
