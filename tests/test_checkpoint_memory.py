"""A conversion has in memory what it must have: ``workers`` tensors, whatever the size of the checkpoint.

PyTorch's allocator is asked, whose events do not depend on time. What is smaller than a block does not count.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lwopt_backend.checkpoint import convert, formats, lazy, names
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, Param
from lwopt_backend.checkpoint.lazy import LazyTensor, end_to_end
from tests.allocations import allocations

BLOCK = 1024  # elements: small, so that small tensors have many
LARGEST = 4 * 256 * 128  # bytes in fp32
SHAPES = {
    "embedding.word_embeddings.weight": (256, 128),
    **{
        f"decoder.layers.{layer}.{name}": shape
        for layer in range(6)
        for name, shape in {
            "input_layernorm.weight": (128,),
            "self_attention.linear_qkv.weight": (384, 64),
            "self_attention.linear_proj.weight": (64, 128),
            "pre_mlp_layernorm.weight": (128,),
            "mlp.linear_fc1.weight": (256, 100),
            "mlp.linear_fc2.weight": (100, 256),
        }.items()
    },
    "decoder.final_layernorm.weight": (128,),
}
ARGUMENTS = {"num_attention_heads": 4, "bf16": True, "untie_embeddings_and_output_weights": False}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lazy, "BLOCK", BLOCK)
    yield


def made() -> Checkpoint:
    """AdamW's, of tensors that are made when they are read."""

    def tensor(number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> LazyTensor:
        def read() -> Tensor:
            return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)

        return LazyTensor(shape, dtype, read, f"tensor {number}")

    params = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        states = {key: tensor(4 * number + part, shape) for part, key in enumerate((MASTER, "exp_avg", "exp_avg_sq"))}
        params[name] = Param(tensor(4 * number, shape, torch.bfloat16), states, step=3.0, group=0)
    group = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    return Checkpoint("made", "1", "megatron-core", params, (group,), ARGUMENTS, iteration=3, samples=12)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for target in ("universal", "megatron", "dcp"):
        found[target] = tmp_path_factory.mktemp(target)
        converted(made(), target, found[target] / "it")
    return found


def converted(checkpoint: Checkpoint, target: str, folder: Path, workers: int = 1) -> Path:
    checkpoint = convert.prepared(checkpoint, target, None, None, names.Numbers(), workers)
    place = convert.place_of(checkpoint, target, folder)
    convert.write(checkpoint, target, place, force=True, workers=workers)
    return place.folder


@pytest.mark.parametrize("target", ["universal", "megatron", "dcp", "safetensors"])
@pytest.mark.parametrize("source", ["universal", "megatron", "dcp"])
def test_a_conversion_holds_one_tensor(sources: dict[str, Path], tmp_path: Path, source: str, target: str) -> None:
    """The one that is written, the next one, which is read before the last one's name is taken, and a few blocks; to
    universal, from formats whose tensors are read in ranges, a few blocks alone."""
    convert_it = lambda: converted(formats.read(sources[source] / "it"), target, tmp_path / "to")  # noqa: E731
    convert_it()  # what is allocated once
    found = allocations(convert_it, at_least=2 * BLOCK)
    smaller = 2 if target == "safetensors" else 1  # weights, which are in bf16
    if target == "universal":
        assert 4 * BLOCK <= found.peak <= 16 * 4 * BLOCK < LARGEST
    else:
        assert LARGEST // smaller <= found.peak <= 2 * LARGEST + 16 * 4 * BLOCK
    assert found.left <= 0


@pytest.mark.parametrize("source", ["universal", "megatron", "dcp"])
def test_a_check_holds_blocks_alone(sources: dict[str, Path], source: str) -> None:
    found = formats.read(sources[source] / "it")
    check = lambda: convert.prepared(found, "universal", None, None, names.Numbers())  # noqa: E731
    check()
    assert allocations(check, at_least=2 * BLOCK).peak <= 16 * 4 * BLOCK < LARGEST


@pytest.mark.parametrize("target", ["universal", "megatron", "dcp", "safetensors"])
def test_files_are_the_same_whatever_the_number_of_workers(
    sources: dict[str, Path], tmp_path: Path, target: str
) -> None:
    written = []
    for workers in (1, 2, 5):
        folder = converted(formats.read(sources["universal"] / "it"), target, tmp_path / "to", workers)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        written.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
        shutil.rmtree(tmp_path / "to")
    assert written[0] and written[0].keys() == written[1].keys() == written[2].keys()
    for name, data in written[0].items():
        if name != ".metadata":  # torch draws a number for each saving
            assert data == written[1][name] == written[2][name], name


def test_parts_of_tensors_are_read_without_the_rest() -> None:
    """Of one that lies in three pieces, or under another shape: ranges reach through to the files."""
    read: list[tuple[int, int]] = []

    def piece(first: int, size: int) -> LazyTensor:
        def read_range(start: int, stop: int) -> Tensor:
            read.append((first + start, first + stop))
            return torch.arange(first + start, first + stop)

        return LazyTensor((size,), torch.int64, lambda: read_range(0, size), "a piece", read_range)

    whole = end_to_end([piece(0, 7), piece(7, 20), piece(27, 3)], (5, 6)).view((30,)).view((3, 10)).piece(4, 29)
    assert torch.equal(whole.piece(1, 6).read(), torch.arange(5, 10)) and read == [(5, 7), (7, 10)]
    read.clear()
    assert torch.equal(whole.read(), torch.arange(4, 29)) and read == [(4, 7), (7, 27), (27, 29)]
    read.clear()
    assert torch.equal(whole.to(torch.float32).piece(20, 24).read(), torch.arange(24.0, 28)) and read == [
        (24, 27),
        (27, 28),
    ]
