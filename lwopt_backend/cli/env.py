"""``lwopt env``: facts for a bug report."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from lwopt_backend.config.options import DISTRIBUTION
from lwopt_backend.config.versions import VERSIONS

LAUNCHED = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "OMP_NUM_THREADS")
PREFIXES = ("NCCL_", "TORCH_NCCL_", "PYTORCH_")


def env(
    plan: Annotated[
        Path | None, typer.Option(help="A file that `lwopt plan --json` wrote, to print its digest and options.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print facts for an issue: versions, devices, the world, and the digest of a plan.

    Run it where training runs: under the launcher, it shows the world.
    """
    parts = (("plan", _plan(plan)), ("versions", _versions()), ("devices", _devices()), ("world", _world()))
    sections: dict[str, list[tuple[str, object]]] = {section: [*rows] for section, rows in parts}
    if as_json:
        print(json.dumps({section: dict(rows) for section, rows in sections.items()}, indent=2))
        return
    for section, rows in sections.items():
        print(f"{section}:")
        for name, value in rows:
            print(f"  {name}: {value}")


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", platform.platform()
    for package in (DISTRIBUTION, *VERSIONS):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "not installed"
        known = VERSIONS.get(package)
        yield package, found + (f" (supported: {known.supported}, tested: {', '.join(known.tested)})" if known else "")


def _devices() -> Iterator[tuple[str, str]]:
    import torch
    import torch.cuda.nccl

    yield "CPU cores", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"
    yield "torch built for CUDA", str(torch.version.cuda)
    if torch.cuda.is_available():
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield f"GPU {index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"


def _world() -> Iterator[tuple[str, str]]:
    for name in sorted(os.environ):
        if name in LAUNCHED or name.startswith(PREFIXES):
            yield name, os.environ[name]
    if "WORLD_SIZE" not in os.environ:
        yield "WORLD_SIZE", "not set: this process was not started by a launcher"


def _plan(path: Path | None) -> Iterator[tuple[str, object]]:
    if path is None:
        yield "digest", "the last line that training prints before its first step, or --plan FILE"
        return
    try:
        document = json.loads(path.read_text())
        digest = document["digest"]
        named = {name: value for name, value in document.items() if isinstance(value, (str, int))}
        yield from ({"digest": digest} | named).items()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"--plan {path}: expected the JSON that `lwopt plan --json` wrote, found other content ({error!r}); "
            "run: lwopt plan ... --json > plan.json"
        ) from error
