"""Run parts of `make test` with other releases of torch, DeepSpeed and transformers than the prepared one: all tested.

Each is installed into a separate environment; everything else is the prepared one's. Arguments: a package's name, a
release as in torch==2.15.0, or `oldest`, for those only, and then pytest's. `zoo` is no release: it installs libraries
of models, and compares what is told of their weights with a judge (tests/support/zoo); then families may follow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from beside import ROOT, environment, run

from lwopt_backend.config.versions import VERSIONS, requirement

RELEASE = "TESTED_RELEASE"  # the one that pytest runs with, as in RELEASES
REFUSED = re.compile(r"zero_optimization\.\S+ is \S+ on a CPU, where Deep")  # pytest cuts long texts
# An index of CPU builds, for machines whose default one has CUDA builds only: those work as well, and are larger.
INDEX = [f"--index-url={url}"] if (url := os.environ.get("TORCH_INDEX_URL")) else []


@dataclass(frozen=True)
class Part:
    """pip's options, and which test files run; ``left_out`` names values of their cells' axes that do not."""

    options: tuple[str, ...]
    files: tuple[str, ...]
    left_out: dict[str, tuple[Any, ...]]
    more: tuple[str, ...] = ()  # arguments of pytest


PARTS = {
    "deepspeed": Part(
        # Without build isolation, in which pip would fetch a second torch; the tools to build it are installed.
        ("--no-deps", "--no-build-isolation"),
        ("engines/test_equality", "engines/zero/test_checkpoint", "engines/test_refusals"),
        {"ranks": (1, 3, 4), "engine": ("plain", "fsdp2")},  # on two ranks; other numbers are the newest one's
    ),
    "torch": Part(
        tuple(INDEX),
        (
            "engines/test_equality",
            "engines/test_planned",
            "engines/fsdp2/*",
            "engines/plain/*",
            "engines/modules/test_modules",
        )
        + ("checkpoint/test_tours", "unit/plan/test_plan", "unit/rules/test_muon", "unit/rules/test_newton_schulz"),
        {},
    ),
    "transformers": Part(
        ("--no-deps",), ("unit/routing/test_fused_weights", "unit/routing/test_families"), {}, ("--full",)
    ),  # every family
}
# torchvision's releases are built for one torch each; on a machine without CUDA its models run all the same.
ZOO = ("timm==1.0.31", "torchvision==0.28.0", "diffusers==0.42.1", requirement("transformers"))
RELEASES = {
    f"{package}=={release}": package
    for package in PARTS
    for release in VERSIONS[package].tested
    if release != version(package).partition("+")[0]
}


def main() -> None:
    if sys.argv[1:2] == ["zoo"]:
        raise SystemExit(run(environment("zoo", ZOO, "--no-deps"), "tests.support.zoo", *sys.argv[2:]))
    oldest = {f"{package}=={VERSIONS[package].tested[0]}" for package in ("torch", "deepspeed")}
    words = {name: {name} for name in RELEASES} | {"oldest": oldest & RELEASES.keys()}
    words |= {package: {name for name, of in RELEASES.items() if of == package} for package in PARTS}
    chosen = words.get(sys.argv[1] if len(sys.argv) > 1 else "")
    arguments = sys.argv[1 if chosen is None else 2 :]
    failed = []
    for name in RELEASES if chosen is None else sorted(chosen):
        part = PARTS[RELEASES[name]]
        python = environment(name, [name], *part.options)
        print(f"tests with {name}", file=sys.stderr, flush=True)
        # pytest's workers load this file as a plugin, by its name.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        told = {**os.environ, RELEASE: name, "PYTHONPATH": path}
        if RELEASES[name] == "deepspeed":
            told["DEEPSPEED_UNDER_TEST"] = name.partition("==")[2]
        options = ["-p", "versions", "-p", "no:cacheprovider", "--durations=15", "-n", "2", "--dist", "loadfile"]
        command = [str(python), "-m", "pytest", *options, *part.more, *(arguments or files_of(part))]
        if subprocess.run(command, cwd=ROOT, env=told).returncode != 0:
            failed.append(name)
    print("without the zoo of models, which is ARGS=zoo, and in the nightly workflow", file=sys.stderr)
    if failed:
        raise SystemExit(
            f"failed with {' and '.join(failed)} (make test-versions ARGS={failed[0]} runs that one alone)"
        )


def files_of(part: Part) -> list[str]:
    """Its tests, without those that start programs of the prepared environment."""
    by_pattern = {pattern: list((ROOT / "tests").glob(f"{pattern}.py")) for pattern in part.files}
    if missing := [pattern for pattern, paths in by_pattern.items() if not paths]:
        raise SystemExit(f"scripts/versions.py expected existing tests, found no {', '.join(missing)}")
    found = sorted({path for paths in by_pattern.values() for path in paths if path.name.startswith("test_")})
    return [str(path) for path in found if not re.search(r"\blaunch\(|run_on_cpu", path.read_text())]


# As pytest's plugin: leaves out cells by values of their axes, and those that we refuse because of the version.


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    left_out = PARTS[os.environ[RELEASE].partition("==")[0]].left_out

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
