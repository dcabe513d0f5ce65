"""No file makes a command crash, hang, run out of memory or print a traceback; see ``tests.hostile``."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from lwopt_backend.checkpoint import gates, inferred
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, read_as_expected
from lwopt_backend.checkpoint.dcp import reader as dcp_reader
from lwopt_backend.checkpoint.files import pickles, torch_files
from lwopt_backend.checkpoint.lazy import LazyTensor, held
from lwopt_backend.checkpoint.megatron import dist_names
from lwopt_backend.checkpoint.owned import reader as owned_reader
from tests import hostile
from tests.command_line import refused

ROOT = Path(__file__).parents[1]
MOST_MEMORY = 2e9  # bytes, with what torch takes by itself


def test_bombs_and_damaged_files_are_refused_in_plain_words_and_take_little_memory(tmp_path: Path) -> None:
    """In one process of their own; each payload in one place of one format, and a few random damages."""
    words = [sys.executable, "-m", "tests.hostile", str(tmp_path / "samples"), "bombs", "84", "flips", "0", "25"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    *wrong, last = map(json.loads, run.stdout.splitlines())
    assert not wrong and last["runs"] >= len(hostile.PAYLOADS) + 100
    assert last["peak"] < MOST_MEMORY


REFUSED = {
    "an array with an object field": "numpy's dtype V8 is|not one of plain",
    "an array of objects": "not one of plain",
    "a dtype with another's state": "has the state of another",
    "an array of more than its bytes": "has 8 bytes",
    "an array of fewer than none": "sizes that cannot be",
    "a number of objects": "expected numpy's dtype",
    "a list of a range": "makes a container of a range",
    "a bytearray by its length": "expected bytes, found a int",
    "a storage": "it calls StorageKind",
    "an array by its shape": "it calls numpy.ndarray",
    "lists in lists": "uses parts again and again",
    "tuples in tuples": "uses parts again and again",
    "objects in objects": "uses parts again and again",
    "a text again and again": "uses parts again and again",
    "a key that takes long to hash": "a key of a dictionary",
    "numbers that hash alike": "a key of a dictionary",
    "tuples within tuples": "levels deep",
    "a list in itself": "holds itself",
    "an object in itself": "holds itself",
    "copies of a list": "more than a file of this size can hold",
    "copies of a text": "more than a file of this size can hold",
    "an integer of 900,000 digits": "900000 digits",
    "a list that is set by slices": "sets items of a list",
    "attributes of a function": "sets the state of a Named",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_payload_is_refused_for_what_it_is(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"a file cannot be unpickled .*({REFUSED[name]})"):
        pickles.load(hostile.START + hostile.PAYLOADS[name] + b".", "a file")


def test_states_of_random_generators_and_numbers_of_numpy_are_read(tmp_path: Path) -> None:
    """As training programs save them."""
    old, new = numpy.random.RandomState(3).get_state(), numpy.random.default_rng(3).bit_generator.state
    columns = numpy.arange(6.0).reshape(2, 3).T
    saved = {"old": old, "new": new, "columns": columns, "number": numpy.float32(0.1), "flag": numpy.bool_(True)}
    torch.save({**saved, "word": numpy.array(["ab", "c"]), "none": numpy.zeros((0, 3))}, tmp_path / "a.pt")
    found = torch_files.load(tmp_path / "a.pt")
    assert found["old"][0] == "MT19937" and (found["old"][1] == old[1]).all() and found["old"][2:] == old[2:]
    assert found["new"] == new and (found["columns"] == columns).all()
    assert found["number"] == numpy.float32(0.1) and found["number"].dtype == numpy.float32 and found["flag"]
    assert found["word"].tolist() == ["ab", "c"] and found["none"].shape == (0, 3)


def test_tensors_together_are_not_far_larger_than_their_file(tmp_path: Path) -> None:
    """One element that was expanded is read; 34 GB of it are not."""
    torch.save({"zeros": torch.zeros(1).expand(1000)}, tmp_path / "a.pt")
    assert torch_files.load(tmp_path / "a.pt")["zeros"].read().shape == (1000,)
    torch.save({"zeros": torch.zeros(1).expand(2**33)}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="use the same bytes more than 64 times"):
        torch_files.load(tmp_path / "b.pt")
    one = torch.zeros(50_000)
    torch.save([one[:] for _ in range(100)], tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="use the same bytes more than 64 times"):
        torch_files.load(tmp_path / "c.pt")


def test_shared_parts_are_walked_once_and_stay_shared(tmp_path: Path) -> None:
    part = {"x": torch.ones(2)}
    torch.save([part, part], tmp_path / "a.pt")
    first, second = torch_files.load(tmp_path / "a.pt")
    assert first is second and torch.equal(first["x"].read(), torch.ones(2))


def test_owned_state_without_its_weights_says_what_is_missing(tmp_path: Path) -> None:
    folder = hostile.owned(tmp_path / "run" / "state")
    owned_reader.read(folder)
    for saved, found in (([1, 2], "found list"), ({"c": torch.ones(2)}, "found the keys \\['c'\\]")):
        torch.save(saved, folder / "model.pt")
        with pytest.raises(
            CheckpointError, match=f"model.pt: expected the model's state dict, with 'a.weight', {found}"
        ):
            owned_reader.read(folder)
    torch.save({"a.weight": torch.ones(4, 3)}, folder / "model.pt")
    with pytest.raises(CheckpointError, match="the weight 'b.weight' is missing"):
        owned_reader.read(folder)
    (folder / "model.pt").unlink()
    with pytest.raises(CheckpointError, match="the weight 'a.weight' is missing"):
        owned_reader.read(folder)


def metadata_of(folder: Path) -> Any:
    """Of a folder by DCP with two tensors and an object."""
    state = {"model": {"a": torch.ones(4, 3), "b": torch.ones(5)}, "iteration": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes())


def larger(metadata: Any) -> None:
    """A tensor of 2**40 elements, and its chunk too."""
    tensor = metadata.state_dict_metadata["model.a"]
    tensor.size = torch.Size([2**40])
    tensor.chunks[0].offsets, tensor.chunks[0].sizes = torch.Size([0]), tensor.size
    index = next(index for index in metadata.storage_data if index.fqn == "model.a")
    metadata.storage_data[dataclasses.replace(index, offset=torch.Size([0]))] = metadata.storage_data.pop(index)


def of_no_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].properties.dtype = "float32"


def of_texts(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].size = ("4", "3")


def beyond(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].chunks[0].offsets = torch.Size([1, 0])


def at_one_place(metadata: Any) -> None:
    """As many tensors as one likes of the same bytes."""
    infos = list(metadata.storage_data.values())
    most = max(infos, key=lambda info: info.length)
    for index in metadata.storage_data:
        metadata.storage_data[index] = most


def long(metadata: Any) -> None:
    metadata.state_dict_metadata["a" * 2000] = metadata.state_dict_metadata["model.a"]


DAMAGED = {
    larger: "model.a has a chunk of .* bytes, but .* are stored",
    of_no_dtype: "model.a has a str for its dtype",
    of_texts: "a shape has sizes that cannot be",
    beyond: r"model.a of shape \(4, 3\) has a chunk of \(4, 3\) at \(1, 0\)",
    at_one_place: "several tensors are at one place",
    long: "a key is a str, or a long one",
}


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: damage.__name__)
def test_metadata_of_dcp_is_compared_with_what_is_stored(tmp_path: Path, damage: Callable[[Any], None]) -> None:
    metadata = metadata_of(tmp_path)
    damage(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=rf"\.metadata is .*{DAMAGED[damage]}"):
        dcp_reader.read(tmp_path)


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    """Each would be read for its checksum: a file of 1 MB can name the same half of it ten thousand times."""
    torch.save({"a": torch.ones(1000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        largest = max(archive.filelist, key=lambda entry: entry.file_size)
        for number in range(2):
            again = copy.copy(largest)
            again.filename = again.orig_filename = f"{largest.filename}{number}"
            archive.filelist.append(again)
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="its records overlap"):
        torch_files.load(tmp_path / "a.pt")


def test_an_error_in_a_reader_is_one_of_the_checkpoint_and_keeps_its_cause(tmp_path: Path) -> None:
    def read() -> None:
        raise RecursionError("too deep")

    with pytest.raises(CheckpointError, match=r"is not as DCP writes it \(RecursionError: too deep\)") as caught:
        read_as_expected(read, tmp_path, "DCP")
    assert isinstance(caught.value.__cause__, RecursionError)


def test_a_stack_of_more_layers_than_any_model_has_is_refused_before_they_are_named() -> None:
    with pytest.raises(CheckpointError, match="no model has so many layers or experts"):
        next(dist_names._unstacked("decoder.layers.mlp.linear_fc1.weight", (2**40, 1), "a file"))


def test_weights_that_may_be_tied_are_read_once_each_however_many_there_are() -> None:
    reads: list[str] = []

    def counted(name: str, value: float) -> LazyTensor:
        def read() -> torch.Tensor:
            reads.append(name)
            return torch.full((2, 2), value)

        return LazyTensor((2, 2), torch.float32, read, name)

    trained = {f"a{i}": counted(f"a{i}", float(i)) for i in range(30)}
    others = {f"b{i}": counted(f"b{i}", -1.0 - i) for i in range(30)}
    params = {name: Param(weight, {"exp_avg": weight}, group=0) for name, weight in trained.items()}
    params |= {name: Param(weight) for name, weight in others.items()}
    params["twin"] = Param(counted("twin", 7.0))
    assert inferred.tied(params) == {"twin": "a7"}
    assert len(reads) == 30 + 30 + 1 + 2  # the twin and a7 once more, to be compared whole


def test_a_name_of_many_parts_is_refused_by_plan(tmp_path: Path) -> None:
    """All modules that it is in are looked at: their names would take as many bytes as its square."""
    save_file({"a." * 1000 + "w": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    for words in (("plan", "--world-size", 2, "--checkpoint"), ("inspect",)):
        assert "a parameter" in refused(*words, tmp_path)


def test_looking_for_frozen_parameters_goes_through_them_once() -> None:
    weight = held(torch.ones(2), "x")
    looks = [0]

    class Counted(dict[str, Param]):
        def values(self) -> Any:
            looks[0] += 1
            return super().values()

    params = Counted({str(number): Param(weight) for number in range(50)})
    list(gates._missing(Checkpoint("made here", "", "model", params)))
    assert looks[0] < 5
