"""The example's data: disjoint, repeatable, and refused with a reason when there is too little."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from corpus import Corpus
from gpt import GPT, GPTConfig
from run_folder import RunFolder, read_metrics


def test_standard_library_is_there_and_large_enough() -> None:
    corpus = Corpus.load(None, 256)
    assert len(corpus.train) > 2**20 and len(corpus.validation) > 2**17
    assert corpus.train.dtype == torch.uint8


def test_training_and_validation_files_are_disjoint(tmp_path: Path) -> None:
    for number in range(25):
        (tmp_path / f"{number:02}.txt").write_bytes(bytes([number or ord("A")]) * 100)
    (tmp_path / "binary.bin").write_bytes(b"\0" * 500)
    (tmp_path / ".hidden").write_bytes(b"x" * 500)
    corpus = Corpus.load(str(tmp_path), 16)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert train.isdisjoint(validation) and validation == {ord("A"), 10, 20}
    assert len(corpus.train) + len(corpus.validation) == 2500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"", "0 bytes for training"),
        (b"x" * 50, "5 bytes for validation"),
        ("a folder", r"0 bytes for training, at least 18 are needed \(0 text file"),
    ],
)
def test_missing_empty_or_small_sources_are_errors(tmp_path: Path, content: bytes | str | None, message: str) -> None:
    path = tmp_path / "text"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    with pytest.raises(ValueError, match=message):
        Corpus.load(str(path), 16)


def test_batches_depend_on_seed_step_and_row_only(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(1, 256)) * 20)
    corpus = Corpus.load(str(tmp_path / "text"), 16)
    both, _ = corpus.train_batch(3, range(4), 16, seed=1)
    second, targets = corpus.train_batch(3, range(2, 4), 16, seed=1)
    assert torch.equal(both[2:], second)
    assert torch.equal(targets, second % 255 + 1), "the next byte, in a text that counts up"
    assert not torch.equal(both, corpus.train_batch(4, range(4), 16, seed=1)[0])
    assert not torch.equal(both, corpus.train_batch(3, range(4), 16, seed=2)[0])


def test_the_model_is_causal_and_can_tie_its_head() -> None:
    torch.manual_seed(0)
    model, tokens = GPT(GPTConfig(layers=2, width=32, context=16)), torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    outputs: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: outputs.append(output))
    for some in (tokens, changed):
        model(some, tokens)
    assert torch.equal(outputs[0][:, :10], outputs[1][:, :10]), "a later byte must not change earlier predictions"
    assert not torch.equal(outputs[0][:, 10:], outputs[1][:, 10:])
    tied = GPT(GPTConfig(layers=1, width=32, tied_head=True))
    assert tied.lm_head.weight is tied.embedding.weight


def test_metrics_of_a_killed_run_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, is_writer=True)
    folder.log({"step": 0, "validation_loss": 5.0})
    for step in (1, 2, 3):
        folder.log({"step": step, "loss": 4.0})
    folder.log({"step": 3, "validation_loss": 3.9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    folder.keep_until(2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
