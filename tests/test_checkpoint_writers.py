"""Megatron's torch_dist, DCP and safetensors: what is written is read back exactly, and is formed as the genuine."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.dcp import reader as dcp
from lwopt_backend.checkpoint.dcp import writer as write_dcp
from lwopt_backend.checkpoint.dcp.files import DcpFolder
from lwopt_backend.checkpoint.deepspeed import universal_reader as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed import universal_writer as write_universal
from lwopt_backend.checkpoint.lazy import LazyTensor, held
from lwopt_backend.checkpoint.megatron import dist_reader as megatron_dist
from lwopt_backend.checkpoint.megatron import dist_writer as write_megatron
from lwopt_backend.checkpoint.megatron import fsdp_reader as megatron_fsdp
from lwopt_backend.checkpoint.megatron import torch_reader as megatron_torch
from lwopt_backend.checkpoint.safetensors import writer as write_safetensors
from lwopt_backend.integrations import fsdp2
from tests.fsdp2 import layer_wise, shard
from tests.megatron_dist import Setup, truth
from tests.megatron_dist import write as write_sample
from tests.ranks import RankPool
from tests.rules import ELEMENTWISE, SECTIONS
from tests.test_checkpoint_dcp import saved as save_fsdp2
from tests.test_checkpoint_megatron_dist import same
from tests.test_fsdp2_checkpoint import assert_equal, load, results, train
from tests.test_rules_checkpoints import fsdp2_optimizer

SAMPLES = Path(__file__).parents[1].parent / "shared" / "megatron"
FOLDERS = sorted(path.name for path in SAMPLES.glob("[!B]*") if path.is_dir())
VERSIONS = ("0.16", "0.19")


def read_any(path: Path) -> Checkpoint:
    for reader in (megatron_dist, megatron_torch, megatron_fsdp):
        if reader.recognises(path):
            return reader.read(path)
    raise AssertionError(f"nothing recognises {path}")


def written(checkpoint: Checkpoint, folder: Path, version: str) -> Checkpoint:
    folder.mkdir()
    write_megatron.write(checkpoint, folder, version=version)
    assert megatron_dist.recognises(folder)
    return megatron_dist.read(folder)


def assert_same_tensors(found: Checkpoint, expected: Checkpoint) -> None:
    assert list(found.params) == list(expected.params)
    for name, param in expected.params.items():
        ours = found.params[name]
        if param.weight is not None:
            assert same(ours.weight.read(), param.weight.read()), name
        states = dict(param.states)
        if MASTER in states and MASTER not in ours.states:  # of an fp32 model
            assert same(ours.weight.read(), states.pop(MASTER).read()), name
        assert ours.states.keys() == states.keys(), name
        for key, tensor in states.items():
            assert same(ours.states[key].read(), tensor.read()), (name, key)
        assert ours.step == param.step, name
    assert found.buffers.keys() == expected.buffers.keys()
    assert all(same(found.buffers[name].read(), buffer.read()) for name, buffer in expected.buffers.items())


def comparable(group: Mapping[str, Any], version: str) -> dict[str, Any]:
    """A group of any version as ``version`` has it, in one order."""
    names = {"momentum_beta": "momentum"}
    found = {names.get(key, key): value for key, value in group.items() if key != "step"}
    if version == "0.19" and "betas" in found:
        found["optimizer"] = "adam"
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FOLDERS)
def test_genuine_checkpoints_come_back(tmp_path: Path, name: str, version: str) -> None:
    expected = read_any(SAMPLES / name)
    folder = tmp_path / "iter_0000003"
    found = written(expected, folder, version)
    assert_same_tensors(found, expected)
    assert (found.iteration, found.samples, found.names) == (expected.iteration, expected.samples, "megatron-core")
    assert found.scheduler == expected.scheduler
    assert found.world == expected.world
    assert found.tied == expected.tied
    assert {**expected.arguments, "no_save_rng": True}.items() <= found.arguments.items()
    assert {n: p.group for n, p in found.params.items()} == {n: p.group for n, p in expected.params.items()}
    ours, theirs = found.groups, expected.groups
    assert [comparable(g, version) for g in ours] == [comparable(g, version) for g in theirs]
    assert folder.joinpath("common.pt").exists() == (version == "0.16")


def form(folder: Path) -> tuple[dict[str, Any], set[str]]:
    found = DcpFolder(folder)
    tensors = {key: (entry.shape, entry.dtype) for key, entry in found.tensors.items()}
    return tensors, {key for key in found.objects if not key.startswith("rng_state/")}


LIKE = {
    "t16_lw_muon_dp2_torchdist": "0.16",
    "g16_lw_muon_dp2_torchdist": "0.16",
    "m16_lw_muon_dp2_torchdist": "0.16",
    "t16_lw_muon_tp2_torchdist": "0.16",
    "t16_do_adam_dp2_torchdist_full": "0.16",
    "t16_do_adam_tp2_torchdist_full": "0.16",
}


@pytest.mark.parametrize("name", sorted(LIKE.keys() & set(FOLDERS)))
def test_it_is_formed_as_the_genuine(tmp_path: Path, name: str) -> None:
    """The same keys, shapes and dtypes; the same common state but for arguments and random states."""
    (genuine,) = (SAMPLES / name).glob("iter_*")
    folder = tmp_path / genuine.name
    written(read_any(SAMPLES / name), folder, LIKE[name])
    assert form(folder) == form(genuine)
    assert folder.joinpath("metadata.json").read_text() == genuine.joinpath("metadata.json").read_text()
    assert pickle.loads((folder / ".metadata").read_bytes()).planner_data is None

    def common(path: Path) -> dict[str, Any]:
        from lwopt_backend.checkpoint.files.plain_data import plain

        found = dict(plain(megatron_dist._common(DcpFolder(path))))
        del found["args"], found["num_floating_point_operations_so_far"]
        return found

    assert common(folder) == common(genuine)


@pytest.mark.skipif("t20_lw_muon_dp2_torchdist_nolayout" not in FOLDERS, reason="the samples are not there")
def test_the_new_version_is_formed_as_the_genuine_weights_and_states(tmp_path: Path) -> None:
    """There is no genuine one in this layout: against one with prefixes, and other keys of masters."""
    (genuine,) = (SAMPLES / "t20_lw_muon_dp2_torchdist_nolayout").glob("iter_*")
    folder = tmp_path / genuine.name
    written(read_any(genuine), folder, "0.19")
    tensors, objects = form(genuine)
    expected = {
        key.replace("chained_0.", "")
        .replace("chained_1.optimizer.state.fp32_param", "optimizer.state.param")
        .replace("chained_1.", ""): value
        for key, value in tensors.items()
    }
    assert form(folder) == (expected, objects)
    assert folder.joinpath("metadata.json").read_text() == genuine.joinpath("metadata.json").read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in FOLDERS if "torchdist" in name])
def test_over_universal_and_back(tmp_path: Path, name: str, version: str) -> None:
    """Megatron's arguments, groups and scheduler travel along."""
    expected = read_any(SAMPLES / name)
    (tmp_path / "universal").mkdir()
    write_universal.write(expected, tmp_path / "universal")
    found = written(deepspeed_universal.read(tmp_path / "universal"), tmp_path / "iter_0000003", version)
    assert_same_tensors(found, expected)
    assert (found.iteration, found.samples) == (expected.iteration, expected.samples)
    assert found.scheduler == expected.scheduler
    arguments = {key: value for key, value in expected.arguments.items() if value is not None}
    assert {**arguments, "no_save_rng": True}.items() <= found.arguments.items()
    assert [comparable(g, version) for g in found.groups] == [comparable(g, version) for g in expected.groups]


# Without the samples


def sample(tmp_path: Path, **setup: Any) -> Checkpoint:
    chosen = Setup(**setup)
    write_sample(tmp_path / "iter_0000007", chosen, truth(chosen.muon, chosen.experts, chosen.tied))
    found = megatron_dist.read(tmp_path / "iter_0000007")
    return dataclasses.replace(found, arguments={**found.arguments, "num_attention_heads": 4})


SETUPS: dict[str, dict[str, Any]] = {
    "muon": {},
    "muon, experts": {"experts": True},
    "muon, sharded experts": {"experts": True, "style": "single", "ep": 2},
    "adam": {"muon": False},
    "adam, tied": {"muon": False, "tied": True},
    "adam, experts": {"muon": False, "experts": True, "ep": 2, "chained": True},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", SETUPS)
def test_written_ones_come_back(tmp_path: Path, kind: str, version: str) -> None:
    expected = sample(tmp_path, **SETUPS[kind])
    found = written(expected, tmp_path / "iter_0000008", version)
    assert_same_tensors(found, expected)
    assert [comparable(g, version) for g in found.groups] == [comparable(g, version) for g in expected.groups]
    assert {n: p.group for n, p in found.params.items()} == {n: p.group for n, p in expected.params.items()}


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    expected = sample(tmp_path)
    name = "decoder.layers.1.self_attention.q_layernorm.weight"
    one = Param(held(torch.ones(3, dtype=torch.bfloat16), name))
    found = written(
        dataclasses.replace(expected, params={**expected.params, name: one}), tmp_path / "iter_0000008", "0.16"
    )
    assert found.params.keys() == {*expected.params, name}
    keys = DcpFolder(tmp_path / "iter_0000008").tensors
    assert "decoder.layers.1.self_attention.q_layernorm.weight" in keys
    assert not any(key.startswith("decoder.layers.mlp.") for key in keys)


@pytest.mark.parametrize("version", VERSIONS)
def test_groups_of_other_optimizers_become_megatrons(tmp_path: Path, version: str) -> None:
    saved = sample(tmp_path)
    groups = (
        {"rule": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
        {"rule": "adamw", "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-9, "weight_decay": 0.1},
    )
    params = {n: dataclasses.replace(p, group=int("exp_avg" in p.states)) for n, p in saved.params.items()}
    found = written(
        dataclasses.replace(saved, groups=groups, params=params, scheduler={"last_epoch": 3}),
        tmp_path / "iter_0000008",
        version,
    )
    assert_same_tensors(found, saved)
    assert [group["lr"] for group in found.groups] == [0.02, 0.01, 0.01]
    assert [group["wd_mult"] for group in found.groups] == [1.0, 1.0, 0.0]
    assert found.groups[0]["momentum_beta" if version == "0.16" else "momentum"] == 0.9
    assert found.groups[1]["betas"] == (0.9, 0.99)
    assert {group.get("step") for group in found.groups} == {None, 7}
    assert found.groups[found.params["decoder.final_layernorm.weight"].group]["wd_mult"] == 0.0
    assert found.scheduler["num_steps"] == saved.samples


def watched(checkpoint: Checkpoint) -> tuple[Checkpoint, list[int]]:
    """The same, and a list of how many of its tensors were in memory whenever one was read."""
    storages: list[StorageWeakRef] = []
    counts: list[int] = []

    def watch(tensor: LazyTensor) -> LazyTensor:
        def counted(read: Callable[..., torch.Tensor], *range: int) -> torch.Tensor:
            found = read(*range)
            storages.append(StorageWeakRef(found.untyped_storage()))
            counts.append(sum(not storage.expired() for storage in storages))
            return found

        ranged = tensor.read_range and functools.partial(counted, tensor.read_range)
        return dataclasses.replace(tensor, read=functools.partial(counted, tensor.read), read_range=ranged)

    params = {
        name: dataclasses.replace(
            param,
            weight=None if param.weight is None else watch(param.weight),
            states={key: watch(tensor) for key, tensor in param.states.items()},
        )
        for name, param in checkpoint.params.items()
    }
    return dataclasses.replace(checkpoint, params=params), counts


WRITERS: dict[str, Callable[[Checkpoint, Path], None]] = {
    "megatron 0.16": functools.partial(write_megatron.write, version="0.16"),
    "megatron 0.19": functools.partial(write_megatron.write, version="0.19"),
    "dcp": write_dcp.write,
    "safetensors": write_safetensors.write,
    "safetensors, fp16": functools.partial(write_safetensors.write, dtype=torch.float16),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_one_tensor_of_one_layer_is_in_memory_at_a_time(tmp_path: Path, kind: str) -> None:
    checkpoint, counts = watched(sample(tmp_path))
    WRITERS[kind](checkpoint, tmp_path)
    assert len(counts) >= len(checkpoint.params)
    assert max(counts) <= 2  # the one before may live until the next one has taken its name


def changed(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    name, param = next((n, p) for n, p in checkpoint.params.items() if "exp_avg" in p.states)
    return dataclasses.replace(checkpoint, params={**checkpoint.params, name: dataclasses.replace(param, **changes)})


def missing(checkpoint: Checkpoint) -> Checkpoint:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    states = {k: t for k, t in checkpoint.params[name].states.items() if k != "momentum_buffer"}
    return dataclasses.replace(
        checkpoint, params={**checkpoint.params, name: dataclasses.replace(checkpoint.params[name], states=states)}
    )


REFUSED = {
    "names": (lambda c: dataclasses.replace(c, names="model"), "expected parameters named as in Megatron-core"),
    "owners": (lambda c: changed(c, owner_states={0: {"a": 1}}), "no place for what the rule's owner keeps"),
    "state": (lambda c: changed(c, states={"ema": held(torch.ones(1), "ema")}), "no place for ema"),
    "steps": (lambda c: changed(c, step=3.0), r"made \[3.0, 7.0\] steps"),
    "heads": (lambda c: dataclasses.replace(c, arguments={}), "expected num_attention_heads"),
    "a layer without momentum": (missing, "momentum_buffer.decoder.layers.mlp.linear_fc2.weight: expected"),
    "fused names": (
        lambda c: dataclasses.replace(
            c, params={**c.params, "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": Param(held(torch.ones(2), ""))}
        ),
        "expected the local spec's name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_place_is_refused(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    checkpoint = change(sample(tmp_path))
    with pytest.raises(CheckpointError, match=message):
        written(checkpoint, tmp_path / "iter_0000008", "0.16")


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"version '0\.14'"):
        write_megatron.write(sample(tmp_path), tmp_path, version="0.14")


# Safetensors


def test_weights_as_safetensors(tmp_path: Path) -> None:
    checkpoint = sample(tmp_path)
    buffers = {"count": held(torch.tensor([3]), "count")}
    folder = tmp_path / "weights"
    folder.mkdir()
    write_safetensors.write(dataclasses.replace(checkpoint, buffers=buffers), folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    found = load_file(folder / "model.safetensors")
    expected = {name: param.weight.read() for name, param in checkpoint.params.items()}
    expected.update({name: buffer.read() for name, buffer in buffers.items()})
    assert found.keys() == expected.keys()
    assert all(same(found[name], tensor) for name, tensor in expected.items())
    with safe_open(folder / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # which transformers asks for


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_of_another_dtype_are_made_from_masters(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = sample(tmp_path)
    write_safetensors.write(checkpoint, tmp_path, dtype=dtype)
    found = load_file(tmp_path / "model.safetensors")
    for name, param in checkpoint.params.items():
        assert same(found[name], param.states[MASTER].read().to(dtype)), name


def test_safetensors_in_several_files(tmp_path: Path) -> None:
    checkpoint = sample(tmp_path)
    sizes = {name: param.weight.nbytes for name, param in checkpoint.params.items()}
    limit = 2 * sorted(sizes.values())[-2]
    folder = tmp_path / "weights"
    folder.mkdir()
    write_safetensors.write(checkpoint, folder, file_bytes=limit)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files == sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for file in files:
        content = load_file(folder / file)
        assert content.keys() == {name for name, place in index["weight_map"].items() if place == file}
        assert sum(sizes[name] for name in content) <= limit or len(content) == 1
        assert all(same(tensor, checkpoint.params[name].weight.read()) for name, tensor in content.items())
    assert index["weight_map"].keys() == checkpoint.params.keys()


def test_safetensors_has_no_complex_numbers(tmp_path: Path) -> None:
    checkpoint = sample(tmp_path)
    strange = Param(held(torch.ones(2, dtype=torch.complex64), "strange"))
    with pytest.raises(CheckpointError, match="safetensors has no torch.complex64, which x is"):
        write_safetensors.write(dataclasses.replace(checkpoint, params={"x": strange}), tmp_path)


# DCP


def test_dcp_comes_back(tmp_path: Path) -> None:
    expected = sample(tmp_path)
    folder = tmp_path / "dcp"
    folder.mkdir()
    write_dcp.write(dataclasses.replace(expected, client={"epoch": 3, "own": {"a": [1, 2]}}), folder)
    assert dcp.recognises(folder)
    found = dcp.read(folder)
    assert found.params.keys() == expected.params.keys()
    for name, param in expected.params.items():
        ours = found.params[name]
        states = dict(param.states)
        assert same(ours.weight.read(), states.pop(MASTER).read()), name
        assert ours.states.keys() == states.keys(), name
        assert all(same(ours.states[key].read(), tensor.read()) for key, tensor in states.items()), name
        assert (ours.step, ours.group) == (param.step, param.group), name
    assert list(found.groups) == [dict(group) for group in expected.groups]
    for key in ("arguments", "iteration", "samples", "scheduler", "names"):
        assert getattr(found, key) == getattr(expected, key), key
    assert found.client == {"epoch": 3, "own": {"a": [1, 2]}}


def reshaped(source: str, target: str) -> None:
    """Read what FSDP2 saved, and write it anew."""
    Path(target).mkdir()
    write_dcp.write(dcp.read(Path(source)), Path(target))


def train_on(sharding: str, make: Callable[[Any], Any]) -> dict[str, Any]:
    """Without a checkpoint between."""
    sharded = shard(sharding, "fp32")
    optimizer = make(sharded.model)
    train(sharded, optimizer, range(5))
    return results(sharded, optimizer)


@pytest.mark.parametrize("rule", ["muon", "soap", "adamuon", "shampoo", "a class"])
def test_fsdp2_loads_it_and_goes_on(ranks: RankPool, tmp_path: Path, rule: str) -> None:
    """With ``torch.distributed.checkpoint.load``, on another sharding; owners' state too."""
    make = layer_wise if rule == "muon" else functools.partial(fsdp2_optimizer, rule=rule)
    ranks.run(save_fsdp2, str(tmp_path / "saved"), "rows", "nested", make)
    reshaped(str(tmp_path / "saved"), str(tmp_path / "written"))
    expected = ranks.run(train_on, "rows", make)[0]
    for found in ranks.run(load, str(tmp_path / "written"), "rows", "nested", make):
        assert_equal(found, expected)


@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_dcp_is_formed_as_torchs(ranks: RankPool, tmp_path: Path, rule: str) -> None:
    make = layer_wise if rule == "muon" else functools.partial(fsdp2_optimizer, rule=rule)
    ranks.run(save_fsdp2, str(tmp_path / "saved"), "rows", "nested", make)
    reshaped(str(tmp_path / "saved"), str(tmp_path / "written"))
    theirs, ours = (DcpFolder(tmp_path / name) for name in ("saved", "written"))
    tensors, objects = form(tmp_path / "written")
    assert (tensors, objects - {"iteration"}) == form(tmp_path / "saved")
    assert {key: path for key, path in ours.paths.items() if key != "iteration"} == theirs.paths


PARTS: dict[str, Any] = {
    "layers.0.weight": {"qkv": [9, 6, 6], "groups": 3},
    "layers.2.weight": {"qkv": [21, 10, 10], "groups": 1},
}


def of_parts(model: nn.Module, **atoms: Any) -> Any:
    rules = {"matrix": SECTIONS["soap"], "elementwise": ELEMENTWISE["adamw"]}
    return fsdp2.LayerWiseOptimizer(model, **rules, report=False, bucket_matrices=2, atoms={**PARTS, **atoms})


def test_owners_state_of_parts_of_a_parameter(ranks: RankPool, tmp_path: Path) -> None:
    """Which elements they are is saved: through the universal format, too, and back into FSDP2."""
    ranks.run(save_fsdp2, str(tmp_path / "saved"), "rows", "nested", of_parts)
    found = dcp.read(tmp_path / "saved")
    assert list(found.params["layers.0.weight"].owner_states) == [0, 1, 2]
    assert found.arguments["matrices"].keys() == PARTS.keys()
    assert found.arguments["matrices"]["layers.2.weight"] == [
        f"slice 0 rows {rows} columns 0:63 of 1 x 41 x 63" for rows in ("0:21", "21:31", "31:41")
    ]
    (tmp_path / "universal").mkdir()
    write_universal.write(dataclasses.replace(found, iteration=3), tmp_path / "universal")
    (tmp_path / "written").mkdir()
    write_dcp.write(deepspeed_universal.read(tmp_path / "universal"), tmp_path / "written")
    expected = ranks.run(train_on, "rows", of_parts)[0]
    for loaded in ranks.run(load, str(tmp_path / "written"), "rows", "nested", of_parts):
        assert_equal(loaded, expected)


def refused_parts(**atoms: Any) -> None:
    saved, other = (shard("rows", "fp32").model for _ in range(2))
    of_parts(other, **atoms).load_state_dict(of_parts(saved).state_dict())


def test_owners_state_of_other_parts_is_refused(ranks: RankPool) -> None:
    """Also of as large ones: these rows lie one after the other, those interleaved."""
    other = {"layers.0.weight": {"qkv": [27, 18, 18], "groups": 1}}
    for error in ranks.errors(refused_parts, **other):
        assert "rows 0:9 x 3 every 21" in error and "expected those that there are here, ['slice 0 rows 0:27" in error


def test_dcp_needs_every_group(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="which of the 3 param groups has .* is not known"):
        write_dcp.write(changed(sample(tmp_path), group=None), tmp_path)


def test_dcp_refuses_parts_of_fused_parameters(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="matrix number 1 keeps state of a part of a fused parameter"):
        write_dcp.write(changed(sample(tmp_path), owner_states={1: {"a": torch.ones(1)}}), tmp_path)
