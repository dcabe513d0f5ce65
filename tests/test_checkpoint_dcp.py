"""Folders of torch.distributed.checkpoint: read box by box, damage is found, and all that was saved is there."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.dcp import reader
from lwopt_backend.checkpoint.dcp.files import DcpFolder
from tests.fsdp2 import layer_wise, named, shard, weights_of
from tests.ranks import RankPool
from tests.test_fsdp2_checkpoint import options_of, train, whole_state
from tests.test_rules_checkpoints import fsdp2_optimizer


def saved(folder: str, sharding: str, kind: str, make: Callable[[nn.Module], Any], **more: Any) -> dict[str, Any]:
    """Train and save; what was saved, by the optimizer itself."""
    sharded = shard(sharding, "fp32")
    optimizer = make(sharded.model)
    train(sharded, optimizer, range(3))
    options = options_of(kind)
    state = {
        "model": get_model_state_dict(sharded.model, options=options),
        "optimizer": get_optimizer_state_dict(sharded.model, optimizer, options=options),
        **more,
    }
    dcp.save(state, checkpoint_id=folder)
    names = [
        [name for name, param in named(sharded.model) if any(param is p for p in g["params"])]
        for g in optimizer.param_groups
    ]
    return {"weights": weights_of(sharded.model), "state": whole_state(optimizer), "names": names}


@pytest.mark.parametrize("kind", ["nested", "flat"])
@pytest.mark.parametrize("sharding", ["rows", "columns"])
def test_muon_and_adamw(ranks: RankPool, tmp_path: Path, sharding: str, kind: str) -> None:
    known = ranks.run(saved, str(tmp_path), sharding, kind, layer_wise, epoch=3)[0]
    assert reader.recognises(tmp_path)
    found = reader.read(tmp_path)
    assert found.names == "model"
    assert found.client == {"epoch": 3}
    assert found.params.keys() == known["weights"].keys()
    for name, param in found.params.items():
        expected = dict(known["state"][name])
        step = expected.pop("step", None)
        assert torch.equal(param.weight.read(), known["weights"][name])
        assert param.states.keys() == expected.keys()
        assert all(torch.equal(param.states[key].read(), expected[key]) for key in expected)
        assert param.step == (None if step is None else 3.0)
        assert found.groups[param.group]["rule"] == ("muon" if step is None else "adamw")
        assert not param.owner_states


def flat_of(state: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested state by its path."""
    if isinstance(state, dict):
        return {k: v for key, part in state.items() for k, v in flat_of(part, f"{path}{key}.").items()}
    if isinstance(state, (list, tuple)):
        return {k: v for key, part in enumerate(state) for k, v in flat_of(part, f"{path}{key}.").items()}
    return {path[:-1]: state}


@pytest.mark.parametrize("kind", ["nested", "flat"])
@pytest.mark.parametrize("rule", ["soap", "adamuon", "shampoo", "a class"])
def test_state_that_owners_hold(ranks: RankPool, tmp_path: Path, rule: str, kind: str) -> None:
    make = functools.partial(fsdp2_optimizer, rule=rule)
    known = ranks.run(saved, str(tmp_path), "rows", kind, make)[0]
    found = reader.read(tmp_path)
    matrices = 0
    for name, param in found.params.items():
        state = {key: tensor.read() for key, tensor in param.states.items()}
        expected = known["state"][name]
        if "rule" in found.groups[param.group] and found.groups[param.group]["rule"] != "adamw":
            matrices += 1
            assert list(param.owner_states) == [0]
            state |= flat_of(param.owner_states[0])
        else:
            expected = {key: tensor for key, tensor in expected.items() if key != "step"}
        expected = {key: t for key, t in expected.items() if key not in ("structure", "stepped")}
        for key, tensor in expected.items():
            value = state.pop(key)
            value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=tensor.dtype)
            assert value.dtype == tensor.dtype
            assert torch.equal(value.reshape(tensor.shape), tensor), (name, key)
        assert all(value is None or isinstance(value, (str, bool)) for value in state.values()), (name, state.keys())
    assert matrices == 4


def boxes(folder: str) -> None:
    """Tensors cut by rows, by columns and in rectangles, and what is replicated."""
    sharded = shard("tensor parallel" if dist.get_world_size() == 4 else "columns", "fp32")
    dcp.save({"model": get_model_state_dict(sharded.model)}, checkpoint_id=folder)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_box_is_that_of_the_whole(rank_pools: dict[int, RankPool], tmp_path: Path, world_size: int) -> None:
    if world_size not in rank_pools:
        rank_pools[world_size] = RankPool(world_size)
    rank_pools[world_size].run(boxes, str(tmp_path))
    folder = DcpFolder(tmp_path)
    generator = torch.Generator().manual_seed(0)
    assert max(len(entry.chunks) for entry in folder.tensors.values()) >= 2
    for key, entry in folder.tensors.items():
        whole = folder.tensor(key).read()
        for _ in range(5):
            begin = [int(torch.randint(size, (1,), generator=generator)) for size in entry.shape]
            sizes = [int(torch.randint(size - b, (1,), generator=generator)) + 1 for size, b in zip(entry.shape, begin)]
            box = folder.read_box(key, begin, sizes)
            assert box.is_contiguous()
            assert torch.equal(box, whole[tuple(slice(b, b + s) for b, s in zip(begin, sizes))])


# Damage


def small(folder: Path) -> dict[str, Any]:
    state = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, "note": {"x": [1]}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return state


def everything(folder: Path) -> None:
    found = DcpFolder(folder)
    for key in found.tensors:
        found.tensor(key).read()
    for key in found.objects:
        found.object(key)


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def elsewhere(relative: str) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", relative)

    return lambda folder: changed(folder, change)


def hole(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.a"]
    object.__setattr__(entry, "size", torch.Size((4, 3)))


def swapped(metadata: Any) -> None:
    indices = [index for index in metadata.storage_data if index.fqn.startswith("model.")]
    infos = [metadata.storage_data[index] for index in reversed(indices)]
    metadata.storage_data.update(dict(zip(indices, infos)))


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("this must not be printed",))


def truncate(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


DAMAGE = {
    "no metadata": (lambda f: (f / ".metadata").unlink(), "cannot be read"),
    "metadata ends early": (lambda f: truncate(f / ".metadata", 50), "cannot be unpickled"),
    "metadata of another kind": (lambda f: (f / ".metadata").write_bytes(pickle.dumps([1])), "is not what DCP writes"),
    "metadata that runs code": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Harmful())), "builtins.print"),
    "a missing file": (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a file that ends early": (lambda f: truncate(f / "__0_0.distcp", 1), "ends early"),
    "a path upwards": (elsewhere("../x/__0_0.distcp"), "outside the folder"),
    "a path from the root": (elsewhere("/etc/passwd"), "outside the folder"),
    "a path for Windows": (elsewhere("..\\x"), "outside the folder"),
    "a tensor with a hole": (lambda f: changed(f, hole), "the chunks saved have 6 of the 12 elements"),
    "tensors in each other's place": (lambda f: changed(f, swapped), "its files are not of one checkpoint"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_an_error(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    small(tmp_path)
    everything(tmp_path)
    damage, message = DAMAGE[case]
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        everything(tmp_path)
    assert "must not be printed" not in capsys.readouterr().out


def test_a_flipped_bit_of_data_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    """In every byte, one after another: what is read is what was written, or there is an error."""
    state = small(tmp_path)
    path = tmp_path / "__0_0.distcp"
    data = path.read_bytes()
    found = 0
    for place in itertools.chain(range(0, len(data), 7)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        try:
            folder = DcpFolder(tmp_path)
            for name, tensor in state["model"].items():
                assert torch.equal(folder.tensor(f"model.{name}").read(), tensor), place
            assert [folder.object(key) for key in folder.objects] == [[1]], place
        except CheckpointError:
            found += 1
    assert found > 100


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"a": torch.ones(2)}, "ema": {"a": torch.ones(2)}}, "ema.a in .* is neither a weight"),
        ({"one": {"a": torch.ones(2)}, "two": {"a": torch.ones(2)}}, "expected one model's weights"),
        (
            {
                "model": {"a": torch.ones(2)},
                "optim": {"state": {"b": {"m": torch.ones(2)}}, "param_groups": {"0": {"lr": 1}}},
            },
            "state of none of the model's parameters",
        ),
        (
            {
                "model": {"a": torch.ones(2)},
                "optim": {"state": {"a": {"m": torch.ones(3)}}, "param_groups": {"0": {"lr": 1}}},
            },
            r"expected the weight's shape \(2,\), found \(3,\)",
        ),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=message):
        reader.read(tmp_path)


def test_a_bare_model(tmp_path: Path) -> None:
    """A state dict without anything around it, of names with dots, and with a buffer that no optimizer has."""
    state = {"model.layers.0.weight": torch.ones(2, 2), "model.count": torch.tensor([3])}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = reader.read(tmp_path)
    assert list(found.params) == ["model.layers.0.weight"]
    assert found.buffers["model.count"].read().tolist() == [3]
