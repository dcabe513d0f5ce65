"""No file makes a command crash, hang, run out of memory or print a traceback; see ``tests.hostile``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files import pickles, torch_files
from lwopt_backend.checkpoint.owned import reader as owned_reader
from tests import hostile

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
