"""Reading a JSON file, with errors that a user can act on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Pairs = list[tuple[str, Any]]


def read_json(path: Path, expected: str, objects: Callable[[Pairs], Any] = dict) -> Any:
    """The content of ``path``; ``expected`` says for errors what should stand there.

    ``objects`` makes an object from its pairs; a dict forgets which names came twice. Raises ValueError for a missing
    file and for anything that is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=objects)
    except OSError as error:
        raise ValueError(f"{path}: expected {expected}, but the file cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {expected}, but this is not JSON: {error}; correct the file") from error
