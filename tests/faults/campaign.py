"""What the campaign's attacks share: how many, with which seed, and which errors are this package's. ``FAULTS_SEED``
sets the seed, ``FAULTS_COUNT`` how many attacks a row makes in place of its own number."""

import os
import re
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("FAULTS_SEED", "0"))
OURS = tuple(str(ROOT / name) for name in ("lwopt_backend", "integrations"))
# How Python, torch and pydantic say what somebody else did wrong.
RAW = re.compile(
    r"has no attribute|object is not|not supported between|unsupported operand|positional argument|"
    r"unexpected keyword|unhashable|must be real number|cannot be interpreted|out of range|invalid literal|"
    r"expected str|recursion|incompatible function|could not be converted|concatenate|not iterable|pydantic|"
    r"KeyError|IndexError|AssertionError|AttributeError|ZeroDivisionError|OverflowError|must be (a )?str|"
    r"too large to convert|cannot convert|can't convert|embedded null|codec can't"
)


def count(number: int) -> int:
    return int(os.environ.get("FAULTS_COUNT", number))


def raw(error: BaseException) -> str:
    """What is wrong with how an error is told, if anything: that this package has not raised it, or its words."""
    where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "<lambda>"][-1]
    told = f"{type(error).__name__}: {error}"[:400]
    if not where.filename.startswith(OURS) or not (where.line or "").startswith("raise"):
        return f"{told} (raised in {where.filename}:{where.lineno})"
    return in_raw_words(told)


def in_raw_words(told: str) -> str:
    return told if not told.partition(": ")[2].strip() or RAW.search(told) else ""
