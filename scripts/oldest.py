"""Run parts of `make test` with the oldest DeepSpeed and with the oldest torch that are supported.

Each is installed into an environment of its own; everything else is the prepared one's. Arguments: deepspeed or torch,
for one of them only, and then pytest's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from beside import ROOT, environment

from lwopt_backend.integrations.deepspeed.versions import OLDEST

(OLDEST_TORCH,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
PART = "OLDEST_PART"  # which of PARTS pytest runs
REFUSED = re.compile(r"zero_optimization\.\S+ is \S+ on a CPU, where Deep")  # pytest cuts long texts
# An index of CPU builds, for machines whose default one has CUDA builds only: those work as well, and are larger.
INDEX = [f"--index-url={url}"] if (url := os.environ.get("TORCH_INDEX_URL")) else []


@dataclass(frozen=True)
class Part:
    """What is installed, and which test files run; ``left_out`` names values of their cells' axes that do not."""

    requirement: str
    options: tuple[str, ...]
    files: tuple[str, ...]
    left_out: dict[str, tuple[Any, ...]]


PARTS = {
    "deepspeed": Part(
        f"deepspeed=={OLDEST}",
        # Without build isolation, in which pip would fetch a second torch; the tools to build it are installed.
        ("--no-deps", "--no-build-isolation"),
        ("test_equality", "test_zero_checkpoint*", "test_refusals"),
        {"ranks": (1, 3, 4), "engine": ("plain", "fsdp2")},  # on two ranks; other numbers are the newest one's
    ),
    "torch": Part(
        f"torch=={OLDEST_TORCH}",
        tuple(INDEX),
        ("test_equality", "test_checkpoints", "test_fsdp2*", "test_owned*", "test_muon", "test_modules*")
        + ("test_plan*",),
        {},
    ),
}


def main() -> None:
    chosen = [name for name in sys.argv[1:2] if name in PARTS]
    arguments = sys.argv[1 + len(chosen) :]
    failed = []
    for name in chosen or PARTS:
        part = PARTS[name]
        python = environment(part.requirement, [part.requirement], *part.options, keep_torch=name != "torch")
        print(f"tests with {part.requirement}, the oldest that is supported", file=sys.stderr, flush=True)
        # pytest's workers load this file as a plugin, by its name.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        told = {**os.environ, PART: name, "PYTHONPATH": path}
        if name == "deepspeed":
            told["DEEPSPEED_UNDER_TEST"] = OLDEST
        options = ["-p", "oldest", "-p", "no:cacheprovider", "--durations=15", "-n", "2", "--dist", "loadfile"]
        command = [str(python), "-m", "pytest", *options, *(arguments or files_of(part))]
        if subprocess.run(command, cwd=ROOT, env=told).returncode != 0:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed with the oldest {' and '.join(failed)} (make test-oldest runs this part alone)")


def files_of(part: Part) -> list[str]:
    """Its tests, without those that start programs of the prepared environment."""
    by_pattern = {pattern: list((ROOT / "tests").glob(f"{pattern}.py")) for pattern in part.files}
    if missing := [pattern for pattern, paths in by_pattern.items() if not paths]:
        raise SystemExit(f"scripts/oldest.py names tests that there are not: {', '.join(missing)}")
    found = sorted({path for paths in by_pattern.values() for path in paths})
    return [str(path) for path in found if not re.search(r"\blaunch\(|run_on_cpu", path.read_text())]


# As pytest's plugin: leaves out cells by values of their axes, and those that we refuse because of the version.


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    left_out = PARTS[os.environ[PART]].left_out

    def is_left_out(item: pytest.Item) -> bool:
        values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        return any(values.get(axis) in without for axis, without in left_out.items())

    items[:] = [item for item in items if not is_left_out(item)]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """What this DeepSpeed cannot do on a CPU we refuse (integrations/deepspeed/refusals.py), as we should."""
    try:
        return (yield)
    except Exception as error:
        if refused := REFUSED.search(str(error)):
            pytest.skip(refused[0])
        raise


if __name__ == "__main__":
    main()
