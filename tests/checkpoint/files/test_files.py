"""Files and folders: written whole or not at all, and read without harm, whoever made or damaged them."""

import collections
import contextlib
import copy as copies
import dataclasses
import datetime
import enum
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.checkpoint import formats, gates
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, held, read_as_expected, reader
from lwopt_backend.checkpoint.dcp import state_dicts as dcp_reader
from lwopt_backend.checkpoint.deepspeed import files as deepspeed_files
from lwopt_backend.checkpoint.deepspeed import universal as write_universal
from lwopt_backend.checkpoint.files import folders, pickles, torch_files
from lwopt_backend.checkpoint.files import torch_files as zip_records
from lwopt_backend.checkpoint.files.folders import NEW, read_pointer, write_folder
from lwopt_backend.checkpoint.files.torch_files import ALIGNMENT, save
from lwopt_backend.checkpoint.megatron import torch_dist as megatron_dist
from tests.support import hostile
from tests.support.command_line import files, lwopt, refused, succeeds
from tests.support.hostile import Payload
from tests.support.launcher import ROOT, python

# Folders are written whole or not at all
FILES = ("a.pt", "zero/b.pt", "zero/deep/c.pt")


def fill(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    return write


def content(folder: Path) -> dict[str, str]:
    return {name: data.decode() for name, data in files(folder).items()}


def filled(text: str, step: str = "step1") -> dict[str, str]:
    return {f"{step}/{name}": text for name in FILES}


def test_folder_and_pointer_are_written_once(tmp_path: Path) -> None:
    """Nothing is replaced."""
    write_folder(tmp_path / "step1", fill("1"), beside={"latest": "step1"})
    assert content(tmp_path) == {"latest": "step1", **filled("1")}
    assert read_pointer(tmp_path / "latest") == tmp_path / "step1"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("step1", "file", "empty", "link"):
        with pytest.raises(CheckpointError, match=f"{name} already exists, .*choose another name, or remove it"):
            write_folder(tmp_path / name, fill("2"), beside={"latest": "none"})
    assert content(tmp_path) == {"latest": "step1", "file": "mine", **filled("1")}


def test_what_cannot_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    write_folder(tmp_path / "step1", fill("1"), beside={"latest": "step1"})

    def damaged(folder: Path) -> None:
        fill("2")(folder)
        raise CheckpointError("the source is damaged")

    def overtaken(folder: Path) -> None:
        fill("2")(folder)
        fill("1")(tmp_path / "step2")

    for target in ("step2", "further/step2"):
        with pytest.raises(CheckpointError, match="the source is damaged"):
            write_folder(tmp_path / target, damaged, beside={"latest": "step2"})
        assert content(tmp_path) == {"latest": "step1", **filled("1")}
    with pytest.raises(CheckpointError, match="step2 already exists"):
        write_folder(tmp_path / "step2", overtaken, beside={"latest": "step2"})
    assert content(tmp_path) == {"latest": "step1", **filled("1"), **filled("1", "step2")}


def test_a_name_that_leads_elsewhere_or_to_nothing_is_refused(tmp_path: Path) -> None:
    pointer = tmp_path / "root" / "latest"
    for folder in ("root", "step1"):
        (tmp_path / folder).mkdir()
    for name in ("..", ".", "", "a/b", "../step1", "/etc", "a\\b", f".step1.0123abcd{NEW}"):
        pointer.write_text(name)
        with pytest.raises(CheckpointError, match="leads elsewhere" if name else "latest is empty, because"):
            read_pointer(pointer)
        with pytest.raises(CheckpointError, match="leads elsewhere"):
            write_folder(tmp_path / "root" / "step1", fill("1"), beside={name: "step1"})
        assert content(tmp_path) == {"root/latest": name}
    for data, said in ((b"step9", "found 'step9'"), (b"\xff\xfe\x00", "cannot be read")):
        pointer.write_bytes(data)
        with pytest.raises(CheckpointError, match=said):
            read_pointer(pointer)


def test_what_gets_a_name_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    def watched(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*paths: Path) -> Any:
            done = real(*paths)
            parts = paths[-1].relative_to(tmp_path).parts
            shown = str(Path(*("new" if part.endswith(NEW) else part for part in parts)))
            events.append((what, shown))
            return done

        return call

    monkeypatch.setattr(folders, "flush", watched("flush", folders.flush))
    monkeypatch.setattr(Path, "rename", watched("rename", Path.rename))
    write_folder(tmp_path / "step1", fill("1"))
    place = events.index(("rename", "step1"))
    assert {what for _, what in events[:place]} >= {"new", *(f"new/{name}" for name in (*FILES, "zero", "zero/deep"))}
    assert events[place + 1] == ("flush", ".")


# A kill at any moment
CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}


def killed(work: Callable[[], object], change: int) -> bool:
    """Do it in a copy of this process, killed before the ``change``-th change to the disk or flush; whether it was."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        flushes = event == "open" and arguments[1] is None  # by os.open
        if event in CHANGES or flushes or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            seen += 1
            if seen >= change:  # with several threads a count may be lost
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        signal.alarm(300)
        sys.addaudithook(watch)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


def tiny(folder: Path, value: float) -> Path:
    tensor = held(torch.full((2, 3), value), "a test's")
    params = {"a": Param(tensor, {"exp_avg": tensor}, 1.0, 0)}
    (folder / "global_step4").mkdir(parents=True)
    write_universal.write(Checkpoint("made here", "", "model", params, ({},), iteration=4), folder / "global_step4")
    (folder / "latest_universal").write_text("global_step4")
    return folder


def lasting(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(folder).items() if not any(map(folders.is_temporary, Path(name).parts))}


def test_killed_command_leaves_nothing_or_all(tmp_path: Path) -> None:
    """A command that is killed leaves nothing of a name, or all. What it wrote before it was killed is under a
    temporary name, which no command reads, and in nobody's way."""
    source, root = tiny(tmp_path / "source", 1.0), tmp_path / "in"
    target = root / "to"
    anew = ("convert", source, f"{target}/", "--to", "universal")

    def prepare() -> dict[str, bytes]:
        shutil.rmtree(root, ignore_errors=True)
        tiny(target, 2.0)
        (target / "global_step4").rename(target / "global_step3")
        (target / "latest_universal").write_text("global_step3")
        return lasting(root)

    old = prepare()
    succeeds(*anew)
    new = lasting(root)
    possible = {"old": old, "new": new, "new without its pointer": {**new, "to/latest_universal": b"global_step3"}}
    found = []
    for change in itertools.count(1):
        prepare()
        if not killed(lambda: succeeds(*anew), change):
            break
        state = lasting(root)
        found += [what for what, expected in possible.items() if state == expected] or [f"half: {sorted(state)}"]
        assert lwopt("inspect", target, "--no-check").code == 0
        assert lwopt(*anew).code == (0 if found[-1] == "old" else 2) and lasting(root) in (state, new)
    assert set(found) == set(possible) and len(found) > 10


def test_killed_save_leaves_the_one_before_or_its_own(tmp_path: Path) -> None:
    """A program that is killed as it saves owned state leaves the save before, or its own."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = LayerWiseOptimizer(model, lr=0.02, report=False)

    def trained_and_saved(folder: Path) -> Tensor:
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        optimizer.save_state_dict(folder)
        return momentum(folder)

    def momentum(folder: Path) -> Tensor:
        return dcp_reader.read(folder).params["weight"].states["momentum_buffer"].read()

    old, new = (trained_and_saved(tmp_path / name) for name in ("old", "new"))
    found = []
    for change in itertools.count(1):
        folder = Path(shutil.copytree(tmp_path / "old", tmp_path / str(change)))
        if not killed(lambda: optimizer.save_state_dict(folder), change):  # noqa: B023
            break
        found.append(torch.equal(momentum(folder), new))
        assert found[-1] or torch.equal(momentum(folder), old)
        optimizer.save_state_dict(folder)
        assert len(files(folder)) == 3 and torch.equal(momentum(folder), new)
    assert len(found) > 4 and set(found) == {False, True}


# Files of torch.save: what is checked when, and how often
SAVED = {
    "matrix": torch.arange(600.0).view(20, 30),
    "columns": torch.arange(600.0).view(20, 30).t(),
    "part": torch.arange(100)[40:60],
    "none": torch.empty(0, 3),
    "number": torch.tensor(3.0),
    "half": torch.linspace(-1, 1, 7).bfloat16(),
    "flag": torch.tensor(True),
    "new": torch.arange(8).to(torch.uint16),
    "inside": [nn.Parameter(torch.ones(3)), {"again": (torch.zeros(2, dtype=torch.bool), 5)}],
}
PLAIN = [key for key in SAVED if key != "inside"]


def saved(path: Path, content: Any = None) -> Path:
    torch.save(SAVED if content is None else content, path)
    return path


def flipped(data: bytes, at: int, bits: int) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def test_tensors_are_as_torch_loads_them_whole_and_in_part(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt")
    found, expected = torch_files.load(path), torch.load(path, weights_only=True)
    for key in PLAIN:
        assert torch.equal(found[key].read(), expected[key]) and found[key].dtype == expected[key].dtype
        blocks = [block.clone() for block in found[key].blocks()]
        assert torch.equal(torch.cat(blocks) if blocks else torch.empty(0), expected[key].reshape(-1))
    assert torch.equal(found["matrix"].read_range(31, 95), expected["matrix"].view(-1)[31:95])
    assert found["columns"].read_range is None and found["columns"].stride == (1, 30)
    assert torch.equal(found["inside"][0].read(), torch.ones(3)) and found["inside"][1]["again"][1] == 5
    part = {"x": torch.ones(2)}
    first, second = torch_files.load(saved(tmp_path / "b.pt", [part, part]))
    assert first is second and torch.equal(first["x"].read(), torch.ones(2))


def opened(path: Path) -> tuple[dict[str, Any], Checkpoint]:
    """The content of a file, and a checkpoint that opened it."""
    content: dict[str, Any] = {}

    @reader("a test")
    def read(folder: Path) -> Checkpoint:
        content.update(torch_files.load(folder))
        return Checkpoint("a test's", "", "model", {})

    checkpoint = read(path)
    return content, checkpoint


RANGES = [(0, 600)], [(0, 9), (9, 600)], [(9, 600), (0, 9)], [(5, 20), (100, 300), (20, 40), (10, 30)], [(590, 591)]


@pytest.mark.parametrize("ranges", RANGES)
def test_bytes_are_checked_once_as_they_are_read(tmp_path: Path, ranges: list[tuple[int, int]]) -> None:
    """Those between are checked at the end."""
    path = saved(tmp_path / "a.pt")
    found, checkpoint = opened(path)
    with mock.patch.object(zip_records.zlib, "crc32", wraps=zlib.crc32) as checked:
        for start, stop in ranges:
            assert torch.equal(found["matrix"].read_range(start, stop), torch.arange(float(start), stop))
        checkpoint.finish()
    if ranges != RANGES[3]:  # which overlap
        assert sum(memoryview(call.args[0]).nbytes for call in checked.call_args_list) == 4 * 600
    path.write_bytes(flipped(path.read_bytes(), found["matrix"].place[1] + 1605, 1))
    found, checkpoint = opened(path)
    found["half"].read()
    checkpoint.finish()
    with pytest.raises(CheckpointError, match="a.pt is damaged: a checksum is wrong"):
        for start, stop in ranges:
            found["matrix"].read_range(start, stop)
        assert ranges not in RANGES[:2], "a record that was read in order"
        checkpoint.finish()


def test_files_of_any_form_and_protocol_are_read(tmp_path: Path) -> None:
    """Fixed: `lwopt convert` refused files of torch.save without checksums. Files without checksums are read, too.
    set_crc32_options(False), checkpoint_serialization false in ds_config, and pickle_protocol."""
    torch.serialization.set_crc32_options(False)
    try:
        saved(tmp_path / "unchecked.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(SAVED, tmp_path / "older.pt", _use_new_zipfile_serialization=False)
    torch.save(SAVED, tmp_path / "older 4.pt", pickle_protocol=4, _use_new_zipfile_serialization=False)
    for protocol in (4, 5):
        torch.save(SAVED, tmp_path / f"{protocol}.pt", pickle_protocol=protocol)
    for name in ("unchecked", "older", "older 4", "4", "5"):
        found, checkpoint = opened(tmp_path / f"{name}.pt")
        for key in PLAIN:
            assert torch.equal(found[key].read(), SAVED[key]) and found[key].dtype == SAVED[key].dtype, (name, key)
        assert found["inside"][1]["again"][1] == 5
        checkpoint.finish()
        torch_files.check_files([tmp_path / f"{name}.pt"])
    data = (tmp_path / "older.pt").read_bytes()
    for name, content in (("cut", data[:-4]), ("cut in its structure", data[:300])):
        (tmp_path / f"{name}.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}.pt is damaged: it ends early|{name}.pt cannot be unpickled"):
            torch_files.load(tmp_path / f"{name}.pt")


@pytest.mark.parametrize("limit", [zipfile.ZIP64_LIMIT, 60])
def test_written_files_are_as_torch_maps_them(tmp_path: Path, limit: int) -> None:
    """Any number of workers write the same. With a low ``limit`` headers are those of records beyond 2 GB, which say
    their sizes elsewhere."""
    found, path, written = torch_files.load(saved(tmp_path / "a.pt")), tmp_path / "b.pt", set()
    for workers in (1, 2, 5):
        with mock.patch.object(zipfile, "ZIP64_LIMIT", limit):
            save(found, path, workers)
        written.add(path.read_bytes())
    assert len(written) == 1
    archive = torch._C.PyTorchFileReader(str(path))
    assert all(archive.get_record_offset(name) % ALIGNMENT == 0 for name in archive.get_all_records())
    for again in (torch.load(path, weights_only=True, mmap=True), torch.load(path), torch_files.load(path)):
        assert again.keys() == SAVED.keys() and again["inside"][1]["again"][1] == 5
        for key in PLAIN:
            assert torch.equal(again[key] if isinstance(again[key], Tensor) else again[key].read(), SAVED[key])


# What a file can do to the program that reads it
def test_tensors_are_not_larger_than_their_bytes(tmp_path: Path) -> None:
    """In the first the shape is changed in the pickle, and the checksum is made to fit."""
    path = saved(tmp_path / "a.pt", {"x": torch.zeros(100, 101)})
    data = path.read_bytes()
    start = data.index(b"K\x64K\x65\x86")  # the size (100, 101)
    changed = data[:start] + b"K\x64K\x66\x86" + data[start + 5 :]
    place = zip_records.Archive(zip_records.Stored(path, 0, len(data)), "").records["data.pkl"].stored
    old, new = (zlib.crc32(whole[place.offset : place.offset + place.length]) for whole in (data, changed))
    path.write_bytes(changed.replace(old.to_bytes(4, "little"), new.to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match="expected the elements of .*, found fewer"):
        torch_files.load(path)
    assert torch_files.load(saved(path, {"x": torch.zeros(1).expand(1000)}))["x"].read().shape == (1000,)


def test_torchscript_and_tar_files_are_refused(tmp_path: Path) -> None:
    """TorchScript's programs and tar files are refused before torch sees them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), str(tmp_path / "script.pt"))
    with tarfile.open(tmp_path / "tar.pt", "w") as archive:
        archive.add(ROOT / "README.md", "../storages")
    whole = zipfile.ZipFile(saved(tmp_path / "a.pt"))
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in whole.namelist():
            archive.writestr(entry, whole.read(entry))
    packed = "found it compressed or encrypted; unpack"
    for name, said in (
        ("packed", packed),
        ("script", "found TorchScript's, which is a program; save the"),
        ("tar", "expected a file of torch.save"),
    ):
        with pytest.raises(CheckpointError, match=said):
            torch_files.load(tmp_path / f"{name}.pt")


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    """Each would be read for its checksum: a file of 1 MB can name the same half of it ten thousand times."""
    with zipfile.ZipFile(saved(tmp_path / "a.pt", {"a": torch.ones(1000)}), "a") as archive:
        largest = max(archive.filelist, key=lambda entry: entry.file_size)
        for number in range(2):
            again = copies.copy(largest)
            again.filename = again.orig_filename = f"{largest.filename}{number}"
            archive.filelist.append(again)
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="its records overlap"):
        torch_files.load(tmp_path / "a.pt")


def test_a_file_cannot_change_a_class_or_a_function_for_others(tmp_path: Path) -> None:
    """Pickles may set attributes of whatever they found; one that cannot be set is an error."""
    state = pickle.dumps((None, {"harmed": 1}), 2)[2:-1]
    ours = (collections.Counter, collections.OrderedDict, collections.defaultdict, torch.Size, torch.device, bytes)
    for of in (Tensor, nn.Parameter, torch.UntypedStorage, torch._utils._rebuild_tensor_v2, *ours):
        data = pickle.dumps(of, 2)[:-1] + state + pickle.BUILD + pickle.STOP
        with contextlib.suppress(CheckpointError):
            pickles.load(data, "a file")
        assert not hasattr(of, "harmed")
    path = saved(tmp_path / "a.pt", torch.ones(2))
    path.write_bytes(hostile.with_pickle(path, hostile.pickled_in(path)[:-1] + b"}U\x04readNsb."))
    with pytest.raises(CheckpointError, match="expected a tensor of the file as it is"):
        torch_files.load(path)


REFUSED = {
    "expected the bytes of .* found 8": ["an array of more than its bytes"],
    "expected sizes of 0 or more": ["an array of fewer than none"],
    "expected numpy's dtype and bytes": ["a number of objects"],
    "contains itself": ["a list in itself", "an object in itself"],
    "nested less deep": ["lists within lists", "tuples within tuples", "dictionaries within dictionaries"],
    "Exceeds the limit|unregistered extension": ["an integer of 900,000 digits", "a registered extension"],
    "list indices must be": ["a list that is set by slices"],
    "expected the state of an object, found one of a function": ["attributes of a function"],
    "truncated|underflow": ["a frame beyond the end", "nothing"],
}
STUBS = {
    **{"a range": "range(", "a list of a range": "list(", "a bytearray by its length": "bytearray("},
    **{"a storage": "UntypedStorage(", "an array by its shape": "{'ndarray': "},
    **{"an array with an object field": "numpy.ndarray(", "an array of objects": "numpy.ndarray("},
}
Harm = Callable[[Any, Any], None]


@pytest.mark.parametrize(("name", "words"), [(name, words) for words, names in REFUSED.items() for name in names])
def test_a_payload_is_refused_for_what_it_is(tmp_path: Path, name: str, words: str) -> None:
    path, data = saved(tmp_path / "a.pt", {}), hostile.OF_TORCH + hostile.PAYLOADS[name] + b"."
    path.write_bytes(hostile.with_pickle(path, data))
    with pytest.raises(CheckpointError, match=words):
        pickles.plain(torch_files.load(path))


@pytest.mark.parametrize("name", STUBS)
def test_a_function_that_is_not_known_is_not_called(tmp_path: Path, name: str) -> None:
    path, data = saved(tmp_path / "a.pt", {}), hostile.OF_TORCH + hostile.PAYLOADS[name] + b"."
    path.write_bytes(hostile.with_pickle(path, data))
    assert str(pickles.plain(torch_files.load(path), notes := [])).startswith(STUBS[name]) and notes


def test_hostile_and_damaged_files_are_refused_in_plain_words(tmp_path: Path) -> None:
    """In one separate process; each payload in one place of one format, and a few random damages."""
    printed = python("-m", "tests.support.hostile", tmp_path, 60, 0, 40)  # CPython may say something between
    *wrong, last = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert not wrong and last["runs"] >= len(hostile.PAYLOADS) + 100


def payloads(mark: Path) -> dict[str, Any]:
    return {
        "eval": {"iteration": 3, "args": Payload(eval, f"open({str(mark)!r}, 'w')")},
        "popen": [torch.ones(2), Payload(subprocess.check_call, ["touch", str(mark)])],
        "getattr": Payload(getattr, Payload(__import__, "os"), "getcwd"),
    }


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for kind, payload in payloads(mark).items():
        path, notes = saved(tmp_path / "a.pt", payload), list[str]()
        pickles.plain(torch_files.load(path), notes)
        assert notes and not mark.exists()
        if kind != "getattr":
            torch.load(path, weights_only=False)
            assert mark.exists(), "the payload would run elsewhere, so that this tests something"
            mark.unlink()


def test_random_states_and_numpy_numbers_are_read(tmp_path: Path) -> None:
    """States of random generators and numbers of numpy are read."""
    old, new = numpy.random.RandomState(3).get_state(), numpy.random.default_rng(3).bit_generator.state
    columns = numpy.arange(6.0).reshape(2, 3).T
    numbers = {"old": old, "new": new, "columns": columns, "number": numpy.float32(0.1), "flag": numpy.bool_(True)}
    more = {"word": numpy.array(["ab", "c"]), "none": numpy.zeros((0, 3))}
    found = pickles.plain(torch_files.load(saved(tmp_path / "a.pt", {**numbers, **more})))
    assert found["old"][0] == "MT19937" and (found["old"][1] == old[1]).all() and found["old"][2:] == old[2:]
    assert found["new"] == new and (found["columns"] == columns).all()
    assert found["number"] == numpy.float32(0.1) and found["number"].dtype == numpy.float32 and found["flag"]
    assert found["word"].tolist() == ["ab", "c"] and found["none"].shape == (0, 3)


def in_metadata(change: Harm) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata, metadata.state_dict_metadata["a"])
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return harm


def larger(metadata: Any, tensor: Any) -> None:
    tensor.size = torch.Size([2**40])
    tensor.chunks[0].offsets, tensor.chunks[0].sizes = torch.Size([0]), tensor.size
    index = next(index for index in metadata.storage_data if index.fqn == "a")
    metadata.storage_data[dataclasses.replace(index, offset=torch.Size([0]))] = metadata.storage_data.pop(index)


def at_one_place(metadata: Any, tensor: Any) -> None:
    """As many tensors as one likes of the same bytes."""
    most = max(metadata.storage_data.values(), key=lambda info: info.length)
    metadata.storage_data.update(dict.fromkeys(metadata.storage_data, most))


def swapped(metadata: Any, tensor: Any) -> None:
    indices = [index for index in metadata.storage_data if index.fqn in ("a", "b")]
    infos = [metadata.storage_data[index] for index in reversed(indices)]
    metadata.storage_data.update(dict(zip(indices, infos)))


DAMAGED: dict[str, Harm] = {
    "a: expected a chunk of .* bytes, found": larger,
    "expected a dtype of a, found a str": lambda whole, a: setattr(a.properties, "dtype", "float32"),
    "expected sizes of 0 or more": lambda whole, a: setattr(a, "size", ("4", "3")),
    r"within shape \(4, 3\), found \(4, 3\) at \(1, 0\)": lambda whole, a: setattr(a.chunks[0], "offsets", (1, 0)),
    "several tensors have one place": at_one_place,
    "expected a key as text, found a str, or a long one": lambda whole, a: whole.state_dict_metadata.update(
        {"a" * 2000: a}
    ),
}
IN_FILES: dict[str, Callable[[Path], object]] = {
    "expected 24 elements .* found 12 in the saved chunks": in_metadata(
        lambda whole, a: setattr(a, "size", torch.Size((8, 3)))
    ),
    "the files are of different checkpoints": in_metadata(swapped),
    "cannot be read": lambda folder: (folder / ".metadata").unlink(),
    "ends early": lambda folder: os.truncate(folder / "__0_0.distcp", (folder / "__0_0.distcp").stat().st_size - 1),
}


@pytest.mark.parametrize("said", [*DAMAGED, *IN_FILES])
def test_metadata_of_dcp_is_compared_with_what_is_stored(tmp_path: Path, said: str) -> None:
    dcp.save({"a": torch.ones(4, 3), "b": torch.ones(5), "iteration": 3}, checkpoint_id=tmp_path, no_dist=True)
    IN_FILES[said](tmp_path) if said in IN_FILES else in_metadata(DAMAGED[said])(tmp_path)
    with pytest.raises(CheckpointError, match=said if said in IN_FILES else rf"\.metadata is .*{said}"):
        gates.check(dcp_reader.read(tmp_path))


def test_error_in_a_reader_keeps_its_cause(tmp_path: Path) -> None:
    """An error in a reader is one of the checkpoint."""
    cause = RecursionError("too deep")
    said = r"cannot be read as DCP writes it \(RecursionError: too deep\): a bug, or a file of another version"
    with pytest.raises(CheckpointError, match=said) as caught:
        read_as_expected(mock.Mock(side_effect=cause), tmp_path, "DCP")
    assert caught.value.__cause__ is cause


def test_debugging_shows_tracebacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debugging shows the traceback of a command and of a reader."""
    folder = hostile.stage0(tmp_path / "a")
    monkeypatch.setattr(deepspeed_files, "plain", mock.Mock(side_effect=RecursionError("too deep")))
    said = refused("inspect", folder)
    assert "a bug, or a file of another version; LWOPT_DEBUG=1 shows the traceback" in said
    monkeypatch.setenv("LWOPT_DEBUG", "1")
    run = lwopt("inspect", folder)
    assert run.code == 2 and "deepspeed/files.py" in run.err and "RecursionError: too deep" in run.err
    with pytest.raises(CheckpointError), contextlib.redirect_stderr(io.StringIO()) as shown:
        formats.read(folder)
    assert "RecursionError: too deep" in shown.getvalue()


@dataclasses.dataclass
class Settings:
    """A class of the user's script."""

    rate: float = 0.5


class Mine(dict[str, int]):
    """Another, which has entries."""


@pytest.mark.filterwarnings("ignore")
def test_objects_of_users_classes_become_plain_data(tmp_path: Path) -> None:
    """Fixed: `lwopt convert` refused files of torch.save with objects. Objects of a user's classes become plain data
    with a note."""
    source = hostile.stage0(tmp_path / "stage0")
    file = next(source.rglob("*.pt"))
    when, colour = datetime.datetime(2026, 11, 28), enum.Enum("Colour", "RED", module=__name__)
    with mock.patch.object(sys.modules[__name__], "Colour", colour, create=True):
        mine = {"settings": Settings(), "when": when, "colour": colour.RED, "mine": Mine(a=1), "raw": bytearray(b"a")}
        mine |= {
            "colours": {colour.RED},
            "by": {(colour.RED, 2): collections.Counter},
            "sparse": torch.eye(3).to_sparse(),
        }
        mine |= {
            "dates": numpy.array(["2026"], "M8[Y]"),
            "objects": numpy.array([None]),
            "bytes": torch.UntypedStorage(3),
        }
        mine |= {"quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "layer": nn.Linear(2, 2)}
        mine = {**torch.load(file), **mine}
        for older in (True, False):
            torch.save(mine, file, _use_new_zipfile_serialization=not older)
            succeeds("convert", source, tmp_path / f"older {older}", "--to", "universal")
        dcp.save(
            {"model": {"a.weight": torch.ones(3, 4)}, "mine": [when]}, checkpoint_id=tmp_path / "dcp", no_dist=True
        )
    note = "an object of class {} was kept as plain data"
    assert note.format("datetime") in formats.read(tmp_path / "dcp").notes
    found = formats.read(source)
    client = pickles.in_memory(found.client)
    assert client["settings"] == {"rate": 0.5} and client["mine"] == {"items": [("a", 1)]}
    texts = ("when", "colour", "raw", "dates", "objects", "bytes")
    assert all(type(client[key]) is str for key in texts)
    assert client["colours"] == {client["colour"]} and client["by"] == {(client["colour"], 2): "collections.Counter"}
    _, (_, values, *_), *_ = client["sparse"]["_rebuild_sparse_tensor"]
    assert torch.equal(values, torch.ones(3))
    assert {note.format("Settings"), note.format("_rebuild_qtensor"), note.format("Linear")} < {*found.notes}
    assert any("numpy.dtype('M8')) was kept as this text" in said for said in found.notes)


# What a program saves in addition to its model
CLIENT = {
    "torch": torch.get_rng_state(),
    "numpy": numpy.random.RandomState(3).get_state(),
    "python": random.Random(3).getstate(),
    "ema": {"a.weight": torch.full((3, 4), 0.5), "count": torch.tensor(3)},
    "sampler": (numpy.arange(5), [torch.randperm(7), {"seed": numpy.float32(0.1)}]),
    "dtype": torch.bfloat16,
    "recent": collections.deque([torch.ones(2), 5], 3),
}


def same_client(found: Any, expected: Any) -> bool:
    """Equal, of the same types."""
    if isinstance(expected, Tensor):
        return type(found) is Tensor and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, (numpy.ndarray, numpy.generic)):
        return type(found) is type(expected) and found.dtype == expected.dtype and (found == expected).all()
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_client(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple, collections.deque)):
        return type(found) is type(expected) and len(found) == len(expected) and all(map(same_client, found, expected))
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("source", ["stage 0", "dcp.save"])
def test_client_state_survives_deepspeed_and_dcp(tmp_path: Path, source: str) -> None:
    """What a program saved beside its model survives DeepSpeed and DCP."""
    steps = [tmp_path / name for name in ("source", "universal", "dcp", "again")]
    if source == "stage 0":
        file = next(hostile.stage0(steps[0]).rglob("*.pt"))
        torch.save({**torch.load(file), **CLIENT, "mine": 3}, file)
    else:
        saved = {"model": {"a.weight": torch.ones(3, 4)}, "iteration": torch.tensor(4), "mine": 3, **CLIENT}
        dcp.save(saved, checkpoint_id=steps[0], no_dist=True)
        found = formats.read(steps[0])
        assert found.params.keys() == {"a.weight"} and found.iteration == 4
        assert same_client(pickles.in_memory(found.client), {**CLIENT, "mine": 3})
    for before, after, target in zip(steps, steps[1:], ("universal", "dcp", "universal")):
        succeeds("convert", before, after, "--to", target)
        assert same_client(pickles.in_memory(formats.read(after).client), {**CLIENT, "mine": 3}), target
        succeeds("inspect", after)
        succeeds("diff", before, after)


def test_quadratic_work_is_refused_or_done_once(tmp_path: Path) -> None:
    """What would take a square of the size is refused, or gone through once."""
    with pytest.raises(CheckpointError, match="expected possible layers or experts"):
        next(megatron_dist._unstacked("decoder.layers.mlp.linear_fc1.weight", (2**40, 1), "a file"))
    save_file({"a." * 1000 + "w": torch.ones(2, 2)}, tmp_path / "model.safetensors")  # in a thousand modules
    assert "a parameter" in refused("inspect", tmp_path)
    params = mock.MagicMock(wraps={str(number): Param(held(torch.ones(2), "x")) for number in range(50)})
    assert gates.incomplete(Checkpoint("made here", "", "model", params)) == []
    assert 0 < params.items.call_count < 5
