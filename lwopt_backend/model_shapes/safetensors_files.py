"""Names and shapes of *.safetensors: their header is JSON, and nothing behind it is read.

Layout: 8 bytes, the header's length as a little-endian integer; the header; the tensors.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lwopt_backend.model_shapes.types import Stored

MOST_HEADER_BYTES = 100_000_000  # the format's own limit


def read_safetensors(path: Path) -> list[Stored]:
    """The tensors of one file, in its order, which is by dtype and name. Raises ValueError if it is no such file."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if nbytes < 8 or length > min(nbytes - 8, MOST_HEADER_BYTES):
            raise ValueError(
                f"{path}: expected a safetensors file, found {nbytes} bytes that do not begin with the length of a "
                "header; download it again (a Git LFS pointer has some 130 bytes)"
            )
        header = file.read(length)
    try:
        entries = json.loads(header)
        return [_stored(name, entry) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected a safetensors header with a dtype and a shape per tensor, found something else "
            f"({type(error).__name__}: {error}); download it again"
        ) from error


def _stored(name: str, entry: Any) -> Stored:
    floating = entry["dtype"].startswith(("F", "BF"))  # F32, BF16, F8_E4M3, ...; others are I, U, BOOL and C
    return Stored(name, tuple(map(int, entry["shape"])), floating)
