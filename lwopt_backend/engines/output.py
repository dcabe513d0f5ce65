"""What is printed on: a console, and bytes in units. Commands on checkpoints need no more of the reports."""

from __future__ import annotations

import sys

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 140  # a launcher's pipe has no width; 80 columns would cut names


def standard_output() -> Console:
    """A console on standard output, with a minimum width outside a terminal."""
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(file=sys.stdout, width=width, highlight=False, markup=False)


def binary_units(count: int) -> str:
    """Bytes in binary units, e.g. ``"1.5 MiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
