"""A program's time and processor time, and the memory of it and all that it starts, as Linux counts them.

Two things are looked at ten times a second: the proportional set sizes (PSS) of all its processes, whose sum is their
memory with what they share counted once; and each one's own highest resident memory so far (VmHWM), which Linux keeps
and no peak escapes. The peak is the larger of the largest sum and the largest of those; of one process, its VmHWM.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
EVERY = 0.1  # seconds


@dataclass(frozen=True)
class Finished:
    """Seconds, those that processors worked for it (user and system), and bytes at most."""

    seconds: float
    cpu: float
    peak: int = 0


def _worked(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def run(command: Sequence[str], log: Path) -> Finished:
    """Run a program to its end. Raises SystemExit, with what it said, if it fails."""
    peak = 0
    start, before = time.perf_counter(), _worked(resource.RUSAGE_CHILDREN)
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None:
            peak = max(peak, _now(process.pid))
            time.sleep(EVERY)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
    return Finished(seconds, _worked(resource.RUSAGE_CHILDREN) - before, peak)


def copy(source: Path, target: Path) -> Finished:
    """Copy a folder's files and have the disk hold them: what no conversion of as many bytes can beat."""
    start, before = time.perf_counter(), _worked(resource.RUSAGE_SELF)
    buffer = memoryview(bytearray(2**22))
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        new = target / path.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb", buffering=0) as reading, new.open("wb", buffering=0) as writing:
            while count := reading.readinto(buffer):
                writing.write(buffer[:count])
    flush(target)
    return Finished(time.perf_counter() - start, _worked(resource.RUSAGE_SELF) - before)


def flush(folder: Path, *, forget: bool = False) -> None:
    """Have the disk hold a folder's files; with ``forget``, the disk alone, as if another machine had written them."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
            if forget:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _now(session: int) -> int:
    shared = highest = 0
    for place in PROC.iterdir():
        if not place.name.isdigit():
            continue
        try:
            if int((place / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            shared += _kilobytes(place / "smaps_rollup", "Pss")
            highest = max(highest, _kilobytes(place / "status", "VmHWM"))
        except (OSError, IndexError):  # it has just ended
            continue
    return 1024 * max(shared, highest)


def _kilobytes(path: Path, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    return 0 if found is None else int(found[1])
