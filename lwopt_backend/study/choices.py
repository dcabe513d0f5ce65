"""What a study can be asked for, by name. The command's help shows these, so nothing here imports torch."""

from __future__ import annotations

ENGINES = ("owned", "zero1", "zero2", "zero3", "fsdp2")
EXPERTS = "*.experts.*"  # names of the parameters that expert parallelism spreads
