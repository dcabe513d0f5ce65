"""DCP, safetensors and universal folders: what is written is read back exactly, is formed as the genuine, and takes
``workers`` tensors of memory, whatever the size of the checkpoint."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from lwopt_backend.checkpoint import contents as lazy
from lwopt_backend.checkpoint import convert, formats, gates, names
from lwopt_backend.checkpoint import safetensors as write_safetensors
from lwopt_backend.checkpoint.contents import (
    MASTER,
    Checkpoint,
    CheckpointError,
    LazyTensor,
    OwnerStates,
    Param,
    end_to_end,
    held,
)
from lwopt_backend.checkpoint.dcp import saving as write_dcp
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.differences import differences
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.megatron import torch_dist as read_megatron
from tests.support import megatron_dist
from tests.support.allocations import allocations
from tests.support.checkpoint_contents import same, watched
from tests.support.command_line import files, genuine, torch_dist
from tests.support.megatron_torch import EMBEDDING, SCHEDULE

# Megatron's, over the formats that are written
OVER = ("universal", "dcp", "universal")
SETUPS: dict[str, dict[str, Any]] = {  # in addition to the genuine ones
    "muon, sharded experts": {"experts": True, "style": "single", "ep": 2},
    "adam, tied": {"muon": False, "tied": True},
    "adam, experts": {"muon": False, "experts": True, "ep": 2, "chained": True},
}


@pytest.mark.parametrize("source", [*genuine(), *SETUPS])
def test_megatrons_checkpoints_survive_every_format(tmp_path: Path, source: Path | str) -> None:
    """Megatron's checkpoints stay as they are over every format. Tensors to the bit, and counters; in a universal
    folder also param groups, schedule and arguments."""
    folder = torch_dist(tmp_path / "from", **SETUPS[source]) if isinstance(source, str) else source
    expected = found = formats.read(folder)
    has_groups = all(param.group is not None for param in expected.params.values())  # without, DCP's cannot be loaded
    for number, target in enumerate(OVER if has_groups else OVER[:1]):
        found = formats.read(converted(found, target, tmp_path / str(number)))
        assert not [one for one in differences(expected, found) if one.what]
        assert (found.names, dict(found.tied)) == ("megatron-core", dict(expected.tied))
        assert (found.iteration, found.samples) == (expected.iteration, expected.samples)
        if number == 0:
            assert found.groups == expected.groups and found.scheduler == expected.scheduler
            assert expected.arguments.items() <= found.arguments.items()


def sample(folder: Path) -> Checkpoint:
    return read_megatron.read(torch_dist(folder))


def changed(checkpoint: Checkpoint, **changes: Any) -> Checkpoint:
    param = dataclasses.replace(checkpoint.params[EMBEDDING], **changes)
    return dataclasses.replace(checkpoint, params={**checkpoint.params, EMBEDDING: param})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": None}, ", one of 3, which loading its state needs"),
        ({"owner_states": {1: {"a": torch.ones(1)}}}, "expected the rows of matrix number 1 in a fused parameter"),
    ],
)
def test_what_has_no_place_in_dcp_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "to").mkdir()
    with pytest.raises(CheckpointError, match=message):
        write_dcp.write(changed(sample(tmp_path / "from"), **change), tmp_path / "to")


def test_owner_state_is_read_at_most_twice(tmp_path: Path) -> None:
    """For the shapes of its tensors, and to write all of them."""
    state = {"GG": [torch.full((n, n), float(n)) for n in (2, 3, 4)], "Q": torch.ones(3, 2)}
    reads: list[int] = []
    owner = OwnerStates({0: lambda: reads.append(0) or state})
    (tmp_path / "to").mkdir()
    write_dcp.write(changed(sample(tmp_path / "from"), owner_states=owner), tmp_path / "to")
    assert len(reads) <= 2
    assert same(DcpFolder(tmp_path / "to").tensor(f"optimizer.state.{EMBEDDING}.GG.2").read(), state["GG"][2])


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
    strange = Param(held(torch.ones(2, dtype=torch.complex128), "strange"))
    with pytest.raises(CheckpointError, match="x: expected a dtype of safetensors, found torch.complex128"):
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


def test_range_of_a_joined_tensor_is_read_from_its_parts(small_blocks: None) -> None:
    """A range of a joined tensor is read from the parts that have it. 1,000 ranks have a part of each tensor, some of
    them none."""
    sizes = [int(n) for n in torch.randint(0, 4, (999,), generator=torch.Generator().manual_seed(0))] + [3]
    whole, looked_at = torch.arange(sum(sizes)), list[int]()

    class Parts(list[LazyTensor]):
        def __getitem__(self, number: Any) -> Any:
            looked_at.append(number)
            return super().__getitem__(number)

    parts = Parts(held(part, "part") for part in whole.split(sizes))
    parts[:] = [dataclasses.replace(part, read_range=lambda a, b, part=part: part.read()[a:b]) for part in parts]
    found = end_to_end(parts, (len(whole),))
    for start, stop in ((0, 1), (5, 17), (len(whole) - 3, len(whole)), (700, 701)):
        looked_at.clear()
        assert same(found.piece(start, stop).read(), whole[start:stop])
        assert len(looked_at) <= 3 * (stop - start) + 8
    assert same(found.read(), whole)


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
TARGETS = ("universal", "dcp", "safetensors")
SOURCES = ("universal", "dcp", "megatron")
WAYS = [*(("universal", target) for target in TARGETS), ("dcp", "universal"), ("megatron", "dcp")]


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
    known = {name: {key: t.read() for key, t in param.tensors.items()} for name, param in made().params.items()}
    megatron_dist.write(folder / "megatron" / "iter_0000007", megatron_dist.Setup(muon=False), known)
    return {source: converted(made(), source, folder / source) for source in SOURCES[:2]} | {
        "megatron": folder / "megatron" / "iter_0000007"
    }


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "BLOCK", BLOCK)


def converted(checkpoint: Checkpoint, target: str, folder: Path, workers: int = 1) -> Path:
    checks = gates.Checks(checkpoint)
    seen = lazy.watched(checkpoint, checks.see)
    made = convert.prepared(seen, target, None, None, names.Numbers())
    convert.write(made, target, convert.destination_of(made, target, folder), checks.finish, workers=workers)
    return folder


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_a_conversion_holds_one_tensor(
    small_blocks: None, sources: dict[str, Path], tmp_path: Path, source: str, target: str
) -> None:
    """The one that is written, the next one, which is read before the last one's name is taken, and a few blocks; to
    universal, from formats whose tensors are read in ranges, a few blocks alone. To check takes no more. To safetensors
    all of a file, as its library needs it."""
    found = formats.read(sources[source])
    convert_to = lambda folder: converted(formats.read(sources[source]), target, folder)  # noqa: E731
    convert_to(tmp_path / "first")  # what is allocated once
    held_then = allocations(partial(convert_to, tmp_path / "to"), at_least=2 * BLOCK)
    if target == "universal":
        assert 4 * BLOCK <= held_then.peak <= 16 * 4 * BLOCK < LARGEST
        check = lambda: gates.check(found)  # noqa: E731
        assert allocations(check, at_least=2 * BLOCK).peak <= 16 * 4 * BLOCK
    elif target == "safetensors":  # weights, which are in bf16
        nbytes = sum(param.weight.nbytes for param in found.params.values() if param.weight is not None)
        assert held_then.peak <= nbytes + LARGEST + 16 * 4 * BLOCK
    else:
        assert LARGEST <= held_then.peak <= 2 * LARGEST + 16 * 4 * BLOCK
    assert held_then.left <= 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_conversion_reads_each_tensor_that_it_needs_once(
    small_blocks: None, sources: dict[str, Path], tmp_path: Path, source: str, target: str
) -> None:
    """For the checks as well: a dcp folder has no 16-bit weights, but masters are compared with them."""
    read: list[tuple[int, int, int]] = []
    see = lambda tensor, start, part: read.append((id(tensor), start, start + part.numel()))  # noqa: E731
    found = formats.read(sources[source])
    stored = convert.needed(lazy.watched(found, see), target)
    converted(stored, target, tmp_path / "to")
    needed = [tensor for param in stored.params.values() for tensor in param.tensors.values()]
    assert len({*read}) == len(read) and sum(stop - start for _, start, stop in read) == sum(t.numel for t in needed)


@pytest.mark.parametrize("target", TARGETS)
def test_files_are_the_same_whatever_the_number_of_workers(
    small_blocks: None, sources: dict[str, Path], tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "new_save_id", lambda: "one")
    found = []
    for workers in (1, 5):
        folder = converted(formats.read(sources["universal"]), target, tmp_path / str(workers), workers)
        numbered = (".metadata", manifest.NAME)  # torch numbers savings there
        found.append({name: data for name, data in files(folder).items() if Path(name).name not in numbered})
    assert found[0] and found[0] == found[1]


def test_ranges_of_lazy_tensors_are_read_without_the_rest() -> None:
    """A tensor lies in three pieces, or has another shape: ranges reach through to the files."""
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
