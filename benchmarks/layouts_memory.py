"""This process's resident memory and what the loopback interface carries, as Linux counts them."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Resident memory, after what was freed has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def restart_peak() -> None:
    """Forget the highest resident memory so far."""
    resident_bytes()
    CLEAR.write_text("5")


def peak_bytes() -> int:
    """The highest resident memory since ``restart_peak``."""
    return _status("VmHWM")


def wire_bytes() -> int:
    """Bytes that the loopback interface has carried since the machine started, other programs' included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    return 0


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))
