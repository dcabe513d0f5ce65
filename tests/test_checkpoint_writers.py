"""Megatron's torch_dist, DCP and safetensors: what is written is read back exactly, is formed as the genuine, and takes
``workers`` tensors of memory, whatever the size of the checkpoint."""

import dataclasses
import json
import pickle
import shutil
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lwopt_backend.checkpoint import choices, convert, formats, names
from lwopt_backend.checkpoint import contents as lazy
from lwopt_backend.checkpoint import safetensors as write_safetensors
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, end_to_end, held
from lwopt_backend.checkpoint.dcp import saving as write_dcp
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.differences import differences
from lwopt_backend.checkpoint.files import manifest, torch_files
from lwopt_backend.checkpoint.files.pickles import in_memory, plain
from lwopt_backend.checkpoint.megatron import dist as read_megatron
from lwopt_backend.checkpoint.megatron import writer as write_megatron
from tests.allocations import allocations
from tests.checkpoint_contents import params_of, same, watched
from tests.command_line import files, genuine, succeeds, torch_dist
from tests.megatron_torch import SCHEDULE

VERSIONS = ("0.16", "0.19")


def written(checkpoint: Checkpoint, folder: Path, version: str) -> Checkpoint:
    folder.mkdir()
    write_megatron.write(checkpoint, folder, version=version)
    assert read_megatron.recognises(folder)
    return read_megatron.read(folder)


def assert_same(found: Checkpoint, expected: Checkpoint, version: str) -> None:
    """Tensors to the bit, counters, and groups as that version has them."""
    ours, theirs = params_of(found), params_of(expected)
    assert list(ours) == list(theirs)
    for name, of_name in theirs.items():
        if of_name["weight"] is None:
            of_name["weight"] = ours[name]["weight"]
        if MASTER in of_name:  # of an fp32 model it is the weight
            ours[name].setdefault(MASTER, ours[name]["weight"])
        assert same(ours[name], of_name), name
    assert same(*({key: tensor.read() for key, tensor in of.buffers.items()} for of in (found, expected)))
    beside_muon = version == "0.19" and write_megatron.has_muon(expected)
    assert [comparable(g, beside_muon) for g in found.groups] == [comparable(g, beside_muon) for g in expected.groups]
    for key in ("iteration", "samples", "scheduler", "tied"):
        assert getattr(found, key) == getattr(expected, key), key
    known = {key: value for key, value in expected.arguments.items() if value is not None}
    assert {**known, "no_save_rng": True}.items() <= found.arguments.items()


def comparable(group: Mapping[str, Any], beside_muon: bool) -> dict[str, Any]:
    """A group of any version, in one form. From 0.19 on, Adam's beside Muon's say that they are Adam's."""
    found = {{"momentum_beta": "momentum"}.get(key, key): value for key, value in group.items() if key != "step"}
    return {**found, "optimizer": "adam"} if beside_muon and "betas" in found else found


# Megatron: genuine checkpoints
LIKE_16 = [  # those that our 0.16 is to be formed as
    *("t16_lw_muon_dp2_torchdist", "g16_lw_muon_dp2_torchdist", "m16_lw_muon_dp2_torchdist"),
    *("t16_lw_muon_tp2_torchdist", "t16_do_adam_dp2_torchdist_full", "t16_do_adam_tp2_torchdist_full"),
]
LIKE_19 = "t20_lw_muon_dp2_torchdist_nolayout"  # but for prefixes
NAMED_19 = {"chained_0.": "", "chained_1.": ""}
LAYOUT = {"chained_1.optimizer.state.fp32_param": "optimizer.state.param"}  # masters without that flag


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("source", genuine())
def test_genuine_checkpoints_come_back(tmp_path: Path, source: Path, version: str) -> None:
    """In one version straight, in the other over universal, and over DCP too; all straight whose form is compared."""
    expected = formats.read(source)
    like = source.name == LIKE_19 if version == "0.19" else source.name in LIKE_16
    checkpoint = expected
    if not like and version == "0.19":
        checkpoint = formats.read(converted(expected, "universal", tmp_path / "universal"))
        of_dcp = formats.read(converted(checkpoint, "dcp", tmp_path / "dcp"))
        again = formats.read(converted(of_dcp, "universal", tmp_path / "again"))
        assert not [one for other in (of_dcp, again) for one in differences(expected, other) if one.what]
    folder = tmp_path / "iter_0000003"
    found = written(checkpoint, folder, version)
    assert_same(found, expected, version)
    assert found.names == "megatron-core" and (checkpoint is not expected or found.world == expected.world)
    assert folder.joinpath("common.pt").exists() == (version == "0.16")
    if like:
        assert_formed_as(folder, next(source.glob("iter_*")), version, NAMED_19)
    if like and version == "0.19":
        told = {**expected.arguments, "use_layer_wise_param_layout": True}
        written(dataclasses.replace(expected, arguments=told), tmp_path / "layout", version)
        assert_formed_as(tmp_path / "layout", next(source.glob("iter_*")), version, LAYOUT | NAMED_19)


def assert_formed_as(folder: Path, genuine: Path, version: str, named: Mapping[str, str]) -> None:
    """The same keys, shapes and dtypes; the same common state but for arguments and random states."""
    tensors, objects = form(genuine)
    for theirs, ours in named.items() if version == "0.19" else ():
        tensors = {key.replace(theirs, ours): value for key, value in tensors.items()}
    assert form(folder) == (tensors, objects)
    assert folder.joinpath("metadata.json").read_text() == genuine.joinpath("metadata.json").read_text()
    assert pickle.loads((folder / ".metadata").read_bytes()).planner_data is None
    if version == "0.16":
        ours, theirs = (in_memory(plain(read_megatron._common(DcpFolder(path)))) for path in (folder, genuine))
        varying = dict.fromkeys(("args", "num_floating_point_operations_so_far"))
        assert {**ours, **varying} == {**theirs, **varying}


def form(folder: Path) -> tuple[dict[str, Any], set[str]]:
    found = DcpFolder(folder)
    tensors = {key: (entry.shape, entry.dtype) for key, entry in found.tensors.items()}
    return tensors, {key for key in found.objects if not key.startswith("rng_state/")}


# Megatron: our own samples
def sample(folder: Path, **setup: Any) -> Checkpoint:
    found = read_megatron.read(torch_dist(folder, **setup))
    return dataclasses.replace(found, arguments={**found.arguments, "num_attention_heads": 4})


SETUPS: dict[str, dict[str, Any]] = {  # beside what there are genuine ones of
    "muon, experts": {"experts": True},
    "muon, sharded experts": {"experts": True, "style": "single", "ep": 2},
    "adam, tied": {"muon": False, "tied": True},
    "adam, experts": {"muon": False, "experts": True, "ep": 2, "chained": True},
}
NORM, FC2 = "decoder.final_layernorm.weight", "decoder.layers.0.mlp.linear_fc2.weight"
FUSED = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
ALONE = {MASTER: held(torch.ones(8, 12), "")}
OF_PARTS = {1: {"a": torch.ones(1)}}
OLD, OURS = partial(write_megatron.write, version="0.14"), partial(write_megatron.write, version="0.16")
NEW = partial(write_megatron.write, version="0.19")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", SETUPS)
def test_written_ones_come_back(tmp_path: Path, kind: str, version: str) -> None:
    expected = sample(tmp_path / "from", **SETUPS[kind])
    found = written(expected, tmp_path / "to", version)
    assert_same(dataclasses.replace(found, scheduler=None), dataclasses.replace(expected, scheduler=None), version)


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    expected, name = sample(tmp_path / "from"), "decoder.layers.1.self_attention.q_layernorm.weight"
    one = Param(held(torch.ones(3, dtype=torch.bfloat16), name))
    more = dataclasses.replace(expected, params={**expected.params, name: one})
    assert written(more, tmp_path / "to", "0.16").params.keys() == {*expected.params, name}
    keys = DcpFolder(tmp_path / "to").tensors
    assert name in keys and not any(key.startswith("decoder.layers.mlp.") for key in keys)


@pytest.mark.parametrize("version", choices.VERSIONS)
def test_groups_of_other_optimizers_become_megatrons(tmp_path: Path, version: str) -> None:
    saved = sample(tmp_path / "from")
    groups = (
        {"rule": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1},
        {"rule": "adamw", "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-9, "weight_decay": 0.1},
    )
    params = {n: dataclasses.replace(p, group=int("exp_avg" in p.states)) for n, p in saved.params.items()}
    other = dataclasses.replace(saved, groups=groups, params=params, scheduler={"last_epoch": 3})
    known = {key: value for key, value in SCHEDULE.items() if key not in ("num_steps", "start_wd", "end_wd")}
    scheduled = convert.scheduled(other, choices.Schedule(**known))
    assert scheduled.notes[-1].startswith("learning rates are 0.01, 0.02; Megatron has one schedule")
    found = written(scheduled, tmp_path / "to", version)
    assert [(group["lr"], group["wd_mult"]) for group in found.groups] == [(0.02, 1.0), (0.01, 1.0), (0.01, 0.0)]
    assert found.groups[0]["momentum_beta" if version == "0.16" else "momentum"] == 0.9
    assert found.groups[1]["betas"] == (0.9, 0.99)
    assert {group.get("step") for group in found.groups} == {None, 7}
    assert found.groups[found.params["decoder.final_layernorm.weight"].group]["wd_mult"] == 0.0
    assert found.scheduler == SCHEDULE
    masters = {key.partition(".embedding.")[0] for key in DcpFolder(tmp_path / "to").tensors if ".embedding." in key}
    assert f"optimizer.state.{'param' if version == '0.19' else 'fp32_param'}" in masters
    assert {(group["max_lr"], group["min_lr"]) for group in found.groups} == {(0.01, 0.001)}


def test_weights_alone_need_no_schedule(tmp_path: Path) -> None:
    saved = sample(tmp_path / "from")
    alone = {name: Param(param.weight) for name, param in saved.params.items()}
    other = convert.scheduled(dataclasses.replace(saved, params=alone, scheduler=None), choices.NO_SCHEDULE)
    assert written(other, tmp_path / "to", "0.16").scheduler is None


def changed(checkpoint: Checkpoint, name: str = "embedding.word_embeddings.weight", **changes: Any) -> Checkpoint:
    param = dataclasses.replace(checkpoint.params.get(name, checkpoint.params[NORM]), **changes)
    return dataclasses.replace(checkpoint, params={**checkpoint.params, name: param})


def of_lion_alone(checkpoint: Checkpoint) -> Checkpoint:
    """A run that Megatron did not make."""
    groups = tuple({key: value for key, value in group.items() if key != "wd_mult"} for group in checkpoint.groups)
    moment = {"exp_avg": checkpoint.params["output_layer.weight"].states["exp_avg"]}
    return changed(dataclasses.replace(checkpoint, groups=groups), "output_layer.weight", states=moment)


REFUSED: list[tuple[Callable[..., None], Callable[[Checkpoint], Checkpoint], str]] = [
    (OURS, lambda c: dataclasses.replace(c, names="model"), "expected parameters named as in Megatron-core"),
    (OURS, lambda c: changed(c, owner_states={0: {"a": 1}}), "no place for what the rule's owner keeps"),
    (OURS, lambda c: changed(c, states={"ema": held(torch.ones(1), "ema")}), "no place for ema"),
    (OURS, lambda c: changed(c, step=3.0), r"made \[3.0, 7.0\] steps"),
    (OURS, lambda c: dataclasses.replace(c, arguments={}), "expected num_attention_heads"),
    (OURS, lambda c: dataclasses.replace(c, scheduler={"last_epoch": 3}), "expected the state of Megatron's scheduler"),
    (OURS, lambda c: changed(c, FC2, states=ALONE), "momentum_buffer.decoder.layers.mlp.linear_fc2.weight: expected"),
    (OURS, lambda c: changed(c, FUSED), "expected the local spec's name"),
    (OLD, lambda c: c, r"version '0\.14'"),
    (NEW, of_lion_alone, "Lion trained what it does not in Megatron"),
    (write_dcp.write, lambda c: changed(c, group=None), "which of the 3 param groups has .* is not known"),
    (
        write_dcp.write,
        lambda c: changed(c, owner_states=OF_PARTS),
        "matrix number 1 keeps state of a part of a fused parameter",
    ),
]


@pytest.mark.parametrize(("write", "change", "message"), REFUSED)
def test_what_has_no_place_is_refused(
    tmp_path: Path, write: Callable[..., None], change: Callable[[Checkpoint], Checkpoint], message: str
) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(CheckpointError, match=message):
        write(change(sample(tmp_path / "from")), tmp_path / "to")


# Safetensors
def test_weights_as_safetensors(tmp_path: Path) -> None:
    """Those of another dtype are made from masters."""
    buffers = {"count": held(torch.tensor([3]), "count")}
    checkpoint = dataclasses.replace(sample(tmp_path / "from"), buffers=buffers)
    for dtype in (None, torch.float32, torch.float16, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        write_safetensors.write(checkpoint, folder, dtype=dtype)
        assert {path.name for path in folder.iterdir()} == {"model.safetensors", "lwopt_manifest.json"}
        found = load_file(folder / "model.safetensors")
        assert found.keys() == {*checkpoint.params, "count"} and same(found["count"], torch.tensor([3]))
        for name, param in checkpoint.params.items():
            assert same(found[name], param.weight.read() if dtype is None else param.states[MASTER].read().to(dtype))
        with safe_open(folder / "model.safetensors", "pt") as opened:
            assert opened.metadata()["format"] == "pt"  # which transformers asks for
    strange = Param(held(torch.ones(2, dtype=torch.complex64), "strange"))
    with pytest.raises(CheckpointError, match="safetensors has no torch.complex64, which x is"):
        write_safetensors.write(dataclasses.replace(checkpoint, params={"x": strange}), tmp_path)


def test_safetensors_in_several_files(tmp_path: Path) -> None:
    checkpoint, folder = sample(tmp_path / "from"), tmp_path / "weights"
    sizes = {name: param.weight.nbytes for name, param in checkpoint.params.items()}
    limit = 2 * sorted(sizes.values())[-2]
    folder.mkdir()
    write_safetensors.write(checkpoint, folder, file_bytes=limit)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 1
    assert files == [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    content = {file: load_file(folder / file) for file in files}
    assert index["weight_map"] == {name: file for file, tensors in content.items() for name in tensors}
    assert all(sum(sizes[name] for name in of) <= limit or len(of) == 1 for of in content.values())
    weights = {name: tensor for tensors in content.values() for name, tensor in tensors.items()}
    assert same(weights, {name: param.weight.read() for name, param in checkpoint.params.items()})


# Memory. PyTorch's allocator is asked, whose events do not depend on time; what is smaller than a block does not count
BLOCK = 1024  # elements: small, so that small tensors have many
LARGEST = 4 * 256 * 128  # bytes in fp32
LAYER = {"input_layernorm.weight": (128,), "self_attention.linear_qkv.weight": (384, 64)}
LAYER |= {"self_attention.linear_proj.weight": (64, 128), "mlp.linear_fc1.weight": (256, 100)}
LAYER |= {"mlp.linear_fc2.weight": (100, 256)}
SHAPES = {
    "embedding.word_embeddings.weight": (256, 128),
    **{f"decoder.layers.{layer}.{name}": shape for layer in range(3) for name, shape in LAYER.items()},
    "decoder.final_layernorm.weight": (128,),
}
TARGETS = ("universal", "megatron", "dcp", "safetensors")
WAYS = [
    pytest.param(source, target, marks=() if "universal" in (source, target) else pytest.mark.full)
    for source in TARGETS[:3]
    for target in TARGETS
]


def made() -> Checkpoint:
    def tensor(number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> LazyTensor:
        def read() -> Tensor:
            return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)

        return LazyTensor(shape, dtype, read, f"tensor {number}")

    params = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        states = {key: tensor(4 * number + part, shape) for part, key in enumerate((MASTER, "exp_avg", "exp_avg_sq"))}
        params[name] = Param(tensor(4 * number, shape, torch.bfloat16), states, step=3.0, group=0)
    group = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    arguments = {"num_attention_heads": 4, "bf16": True, "untie_embeddings_and_output_weights": False}
    counts: dict[str, Any] = {"iteration": 3, "samples": 12, "scheduler": SCHEDULE}
    return Checkpoint("made", "1", "megatron-core", params, (group,), arguments, **counts)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {target: converted(made(), target, folder / target) for target in ("universal", "megatron", "dcp")}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "BLOCK", BLOCK)


def converted(checkpoint: Checkpoint, target: str, folder: Path, workers: int = 1) -> Path:
    checkpoint, gate = convert.prepared(checkpoint, target, None, None, names.Numbers())
    place = convert.place_of(checkpoint, target, folder)
    convert.write(checkpoint, target, place, workers=workers, finish=partial(gate.finish, workers))
    return folder


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_conversion_holds_one_tensor(
    small_blocks: None, sources: dict[str, Path], tmp_path: Path, source: str, target: str
) -> None:
    """The one that is written, the next one, which is read before the last one's name is taken, and a few blocks; to
    universal, from formats whose tensors are read in ranges, a few blocks alone. To check takes no more."""
    found = formats.read(sources[source])
    convert_to = lambda folder: converted(formats.read(sources[source]), target, folder)  # noqa: E731
    convert_to(tmp_path / "first")  # what is allocated once
    held_then = allocations(partial(convert_to, tmp_path / "to"), at_least=2 * BLOCK)
    smaller = 2 if target == "safetensors" else 1  # weights, which are in bf16
    if target == "universal":
        assert 4 * BLOCK <= held_then.peak <= 16 * 4 * BLOCK < LARGEST
        check = lambda: convert.prepared(found, "universal", None, None, names.Numbers())[1].finish()  # noqa: E731
        assert allocations(check, at_least=2 * BLOCK).peak <= 16 * 4 * BLOCK
    else:
        assert LARGEST // smaller <= held_then.peak <= 2 * LARGEST + 16 * 4 * BLOCK
    assert held_then.left <= 0


@pytest.mark.parametrize("source", ["universal", "megatron"])
def test_a_conversion_reads_each_byte_once(
    small_blocks: None, sources: dict[str, Path], tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums, values and what is written are of one reading. DCP's fp32 weights are written twice, and read so."""
    found, read, summed = formats.read(sources[source]), [0], [0]
    read_strided, crc_of, crc32 = torch_files.read_strided, torch_files._crc_of, zlib.crc32

    def summing(data: Any, before: int = 0) -> int:
        summed[0] += len(data) * (len(data) > 1000)
        return crc32(data, before)

    def reading(*where: Any) -> Tensor:
        tensor = read_strided(*where)
        read[0] += tensor.nbytes
        return tensor

    def checking(stored: torch_files.Stored) -> int:
        read[0] += stored.length * (stored.length > BLOCK)  # a tensor's
        return crc_of(stored)

    monkeypatch.setattr(torch_files, "read_strided", reading)
    monkeypatch.setattr(torch_files, "_crc_of", checking)
    monkeypatch.setattr(zlib, "crc32", summing)
    succeeds("convert", sources[source], tmp_path / "to", "--to", "universal")
    assert convert.nbytes(found) <= read[0] < 1.01 * convert.nbytes(found)
    assert summed[0] < 1.5 * convert.nbytes(found)  # and once more in 16 bits, where masters are compared with weights


def test_a_checksum_stays_with_a_tensor_until_that_changes() -> None:
    tensor = torch.arange(6.0)
    before = lazy.crc32(tensor)
    assert before == lazy.crc32(lazy.flat(tensor.view(2, 3))) == zlib.crc32(lazy.memory(torch.arange(6.0)))
    tensor[1] = 5.0
    assert lazy.crc32(tensor) == zlib.crc32(lazy.memory(tensor)) != before


@pytest.mark.parametrize("target", TARGETS)
def test_files_are_the_same_whatever_the_number_of_workers(
    small_blocks: None, sources: dict[str, Path], tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "new_save_id", lambda: "one")
    found = []
    for workers in (1, 2, 5):
        folder = converted(formats.read(sources["universal"]), target, tmp_path / "to", workers)
        numbered = (".metadata", manifest.NAME)  # torch numbers savings there
        found.append({name: data for name, data in files(folder).items() if Path(name).name not in numbered})
        shutil.rmtree(tmp_path / "to")
    assert found[0] and found[0] == found[1] == found[2]


def test_parts_of_tensors_are_read_without_the_rest() -> None:
    """Of one that lies in three pieces, or under another shape: ranges reach through to the files."""
    read: list[tuple[int, int]] = []
    pieces = [watched(torch.arange(start, stop), read, start) for start, stop in ((0, 7), (7, 27), (27, 30))]
    whole = end_to_end(pieces, (5, 6)).view((30,)).view((3, 10)).piece(4, 29)
    for tensor, expected, ranges in (
        (whole.piece(1, 6), torch.arange(5, 10), [(5, 7), (7, 10)]),
        (whole, torch.arange(4, 29), [(4, 7), (7, 27), (27, 29)]),
        (whole.to(torch.float32).piece(20, 24), torch.arange(24.0, 28), [(24, 27), (27, 28)]),
    ):
        read.clear()
        assert torch.equal(tensor.read(), expected) and read == ranges
