"""Text to train on, as bytes: a file or folder of the user's, or the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

LIMIT_BYTES = 16 * 2**20  # more than any run of the example reads; keeps start-up short
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "turtledemo"}
VALIDATION_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes, from different files (or from the two ends of a single file)."""

    source: str
    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls, path: str | None, context: int) -> Corpus:
        """Read ``path``, or the standard library if it is None. Raises ValueError if there is too little text."""
        root = Path(path) if path else Path(sysconfig.get_path("stdlib"))
        if not root.exists():
            raise ValueError(f"--data {root}: no such file or folder")
        files = [root] if root.is_file() else list(_files(root, "*.py" if path is None else "*"))
        contents = list(_contents(files))
        if len(contents) > 1:
            train = b"".join(text for i, text in enumerate(contents) if i % VALIDATION_EVERY)
            validation = b"".join(contents[::VALIDATION_EVERY])
        else:
            whole = b"".join(contents)
            cut = len(whole) * (VALIDATION_EVERY - 1) // VALIDATION_EVERY
            train, validation = whole[:cut], whole[cut:]
        for part, found in (("training", train), ("validation", validation)):
            if len(found) < context + 2:
                raise ValueError(
                    f"--data {root}: {len(found)} bytes for {part}, at least {context + 2} are needed "
                    f"({len(contents)} text file(s) found, a tenth of the files or of the only file is for validation)"
                )
        return cls(str(root), _tensor(train), _tensor(validation))

    def train_batch(self, step: int, rows: range, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Rows of the global batch of ``step``: inputs and next bytes, (rows, context).

        A row depends on the seed, the step and its number only: every world size and a resumed run see the same data.
        """
        starts = []
        for row in rows:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 65_537 + row)
            starts.append(int(torch.randint(len(self.train) - context - 1, (1,), generator=generator)))
        return windows(self.train, starts, context)

    def validation_batches(self, count: int, rows: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """``count`` batches of ``rows`` windows spread evenly over the validation bytes; the same ones every time."""
        span = len(self.validation) - context - 1
        for batch in range(count):
            yield windows(
                self.validation, [(batch * rows + row) * span // (count * rows) for row in range(rows)], context
            )


def windows(data: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    """Inputs and next bytes of the windows that begin at ``starts``, (len(starts), context) int64 each."""
    rows = torch.stack([data[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def _files(root: Path, pattern: str) -> Iterator[Path]:
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root).parts
        hidden = any(part.startswith(".") or part in SKIPPED_FOLDERS for part in inside)
        if path.is_file() and not hidden:
            yield path


def _contents(files: list[Path]) -> Iterator[bytes]:
    """Contents of the text files, until the limit is reached; a NUL byte marks a file that is not text."""
    total = 0
    for path in files:
        text = path.read_bytes()[: LIMIT_BYTES - total]
        if text and b"\0" not in text[:4096]:
            total += len(text)
            yield text
        if total >= LIMIT_BYTES:
            return


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
