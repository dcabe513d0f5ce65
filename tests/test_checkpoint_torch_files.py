"""Files of torch.save: what is checked when, how often, and what a file can do to the program that reads it."""

from __future__ import annotations

import collections
import contextlib
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import pickles, torch_files, zip_records
from lwopt_backend.checkpoint.files.torch_saving import ALIGNMENT, save
from lwopt_backend.checkpoint.lazy import LazyTensor

SAVED = {
    "matrix": torch.arange(600.0).view(20, 30),
    "columns": torch.arange(600.0).view(20, 30).t(),
    "part": torch.arange(100)[40:60],
    "none": torch.empty(0, 3),
    "number": torch.tensor(3.0),
    "half": torch.linspace(-1, 1, 7).bfloat16(),
    "inside": [nn.Parameter(torch.ones(3)), {"again": (torch.zeros(2, dtype=torch.bool), 5)}],
}


def saved(path: Path, content: Any = None) -> Path:
    torch.save(SAVED if content is None else content, path)
    return path


def flip(path: Path, tensor: LazyTensor, byte: int) -> None:
    data = bytearray(path.read_bytes())
    assert tensor.place is not None
    data[tensor.place[1] + byte] ^= 1
    path.write_bytes(data)


def test_tensors_are_as_torch_loads_them_whole_and_in_part(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt")
    found, expected = torch_files.load(path), torch.load(path, weights_only=True)
    for key in ("matrix", "columns", "part", "none", "number", "half"):
        assert torch.equal(found[key].read(), expected[key]) and found[key].dtype == expected[key].dtype
        blocks = [block.clone() for block in found[key].blocks()]
        assert torch.equal(torch.cat(blocks) if blocks else torch.empty(0), expected[key].reshape(-1))
    assert torch.equal(found["matrix"].read_range(31, 95), expected["matrix"].view(-1)[31:95])
    assert found["columns"].read_range is None and found["columns"].stride == (1, 30)
    assert torch.equal(found["inside"][0].read(), torch.ones(3)) and found["inside"][1]["again"][1] == 5


@pytest.mark.parametrize("read", [lambda t: t.read(), lambda t: t.read_range(590, 591)], ids=["whole", "a part"])
def test_a_flipped_bit_is_noticed_by_whoever_reads_that_tensor(tmp_path: Path, read: Callable[[Any], Tensor]) -> None:
    path = saved(tmp_path / "a.pt")
    flip(path, torch_files.load(path)["matrix"], 5)
    found = torch_files.load(path)
    found["half"].read()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="a.pt is damaged: a checksum is wrong"):
            read(found["matrix"])
    with pytest.raises(CheckpointError, match="a checksum is wrong"):
        torch_files.check(path)


@pytest.mark.parametrize("order", [("whole", "part", "part"), ("part", "part", "whole")])
def test_bytes_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]) -> None:
    checked = [0]
    real = zlib.crc32

    def counted(data: Any, *start: int) -> int:
        checked[0] += len(memoryview(data).cast("B")) if len(data) else 0
        return real(data, *start)

    found = torch_files.load(saved(tmp_path / "a.pt"))["matrix"]
    monkeypatch.setattr(zip_records.zlib, "crc32", counted)
    for what in order:
        found.read() if what == "whole" else found.read_range(3, 9)
    assert checked == [4 * 600]


def test_what_is_checked_later_is_not_checked_when_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt")
    flip(path, torch_files.load(path)["matrix"], 5)
    with torch_files.checked_later() as files:
        found = torch_files.load(path)
    found["matrix"].read()
    found["matrix"].read_range(1, 2)
    assert files == {path}


def test_a_tensor_that_says_to_be_larger_than_its_bytes_is_an_error(tmp_path: Path) -> None:
    """Its shape is changed in the pickle, and the checksum is made to fit."""
    path = saved(tmp_path / "a.pt", {"x": torch.zeros(100, 101)})
    data = path.read_bytes()
    start = data.index(b"K\x64K\x65\x86")  # the size (100, 101)
    changed = data[:start] + b"K\x64K\x66\x86" + data[start + 5 :]
    archive = zip_records.Archive(zip_records.Stored(path, 0, len(data)), "")
    place = archive.records["data.pkl"].stored
    old, new = (zlib.crc32(whole[place.offset : place.offset + place.length]) for whole in (data, changed))
    path.write_bytes(changed.replace(old.to_bytes(4, "little"), new.to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match="said to have more elements than are stored"):
        torch_files.load(path)


@pytest.mark.parametrize(
    "of", [torch.Tensor, nn.Parameter, torch.UntypedStorage, collections.Counter, torch._utils._rebuild_tensor_v2]
)
def test_a_file_cannot_change_a_class_or_a_function_for_others(of: Any) -> None:
    """Pickles may set attributes of whatever they found; one that cannot be set is an error."""
    found, state = (pickle.dumps(part, 2)[2:-1] for part in (of, (None, {"harmed": 1})))
    with contextlib.suppress(CheckpointError):
        pickles.load(pickle.PROTO + b"\x02" + found + state + pickle.BUILD + pickle.STOP, "a file")
    assert not hasattr(of, "harmed")


def test_what_is_written_is_what_torch_would_write_whatever_the_number_of_workers(tmp_path: Path) -> None:
    found = torch_files.load(saved(tmp_path / "a.pt"))
    written = set()
    for workers in (1, 2, 5):
        save(found, tmp_path / "b.pt", workers)
        written.add((tmp_path / "b.pt").read_bytes())
    assert len(written) == 1
    again, expected = (torch.load(tmp_path / name, weights_only=True) for name in ("b.pt", "a.pt"))
    assert all(
        torch.equal(again[key], expected[key]) for key in ("matrix", "columns", "part", "none", "number", "half")
    )


@pytest.mark.parametrize("limit", [zipfile.ZIP64_LIMIT, 60])
def test_records_of_any_size_are_where_torch_maps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """With a low ``limit`` headers are those of records beyond 2 GB, which say their sizes elsewhere."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    content = {
        "large": torch.randn(5, 7),
        "columns": torch.randn(3, 4).t(),
        "none": torch.empty(0, 3),
        "flag": torch.tensor(True),
        "number": 3,
    }
    path = tmp_path / "c.pt"
    save(content, path)
    archive = torch._C.PyTorchFileReader(str(path))
    assert all(archive.get_record_offset(name) % ALIGNMENT == 0 for name in archive.get_all_records())
    for found in (torch.load(path, weights_only=True, mmap=True), torch.load(path), torch_files.load(path)):
        assert found.pop("number") == 3 and found.keys() == content.keys() - {"number"}
        for key, tensor in found.items():
            assert torch.equal(tensor if isinstance(tensor, Tensor) else tensor.read(), content[key])
