"""What needs a GPU, in parts of at most ten minutes each, on a machine with one NVIDIA GPU and no network.

    python scripts/gpu.py                                all parts; results go to runs/gpu, or to the folder $OUT
    python scripts/gpu.py --wheels FOLDER one-rank step  some parts, with packages from a folder
    python scripts/gpu.py --device cpu                   what of them runs on a CPU, small: the end of `make test-full`

A part writes PART.xml (JUnit) or PART.json, and PART.log; results.json has all with the figures of tests. A part that
ran no test, or whose time is up, fails. The suite, `make test`, is on a CPU only run if it is named.

FOLDER has wheels of what this machine lacks of pyproject.toml's requirements with the extras deepspeed and test, of
setuptools from 77 on (torch 2.11 takes none from 82 on), and, if they are to be measured, of gram-newton-schulz and
quack-kernels. They and this project are installed into `.make/beside/gpu`, on top of this interpreter's
packages with their torch; pip names what is still missing. To collect wheels elsewhere:

    DS_BUILD_OPS=0 pip wheel --no-deps --no-build-isolation -w FOLDER deepspeed
    pip download --no-deps --only-binary=:all: --python-version 3.12 -d FOLDER setuptools==81.0.0 pydantic ...
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beside import ROOT, cases, environment

SECONDS = 600
ENGINES = ("plain", "fsdp2", "zero1", "zero2", "zero3", "owned")


def commands(device: str) -> dict[str, list[str]]:
    """By part, what Python runs."""
    cpu = device == "cpu"
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", "--durations=10"]
    on_device = [*pytest, "tests/test_gpu.py", "--device", device, "-k"]
    size = "--layers 1 --width 64 --tokens 8 --rounds 1" if cpu else "--layers 6 --width 2048 --tokens 2048"
    options = ["--device", device, "--ranks", "1", "--engine", *ENGINES, *size.split()]
    small = ["--scale", "0.01", "--rounds", "1"] if cpu else []
    return {
        "suite": [*pytest, "-n", str(min(8, os.cpu_count() or 1)), "--dist", "loadfile"],
        "one-rank": [*on_device, "not several_ranks"],
        "ranks": [*on_device, "several_ranks"],
        "newton-schulz": ["-m", "benchmarks.rules", "--device", device, *small],
        "step": ["-m", "benchmarks.step", *options],
    }


def run(part: str, words: Sequence[str], out: Path) -> dict[str, Any]:
    """Run a part; what to report of it, with its ``problem`` in words, if there is one."""
    tests = "pytest" in words
    results, log = out / f"{part}.{'xml' if tests else 'json'}", out / f"{part}.log"
    results.unlink(missing_ok=True)
    # cuBLAS sums in one order; the suite finds what it finds on machines without a GPU.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if part == "suite" else {}
    told = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **hidden}
    command = [sys.executable, *words, f"--junit-xml={results}" if tests else f"--json={results}"]
    began = time.monotonic()
    with log.open("w") as file:
        ways: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT}
        started = subprocess.Popen(command, cwd=ROOT, env=told, start_new_session=True, **ways)
        try:
            problem = f"exit status {started.returncode}" if started.wait(SECONDS) else ""
        except subprocess.TimeoutExpired:
            problem = f"not done in {SECONDS} seconds"
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)  # with its ranks
    found: dict[str, Any] = {"part": part, "seconds": round(time.monotonic() - began, 1)}
    if not tests:
        return {**found, "problem": problem or ("" if results.exists() else "no figures")}
    ran, found["skipped"] = cases(results)
    noted = {case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in ran}
    figures = {test: {name: json.loads(value) for name, value in of.items()} for test, of in noted.items() if of}
    found |= {"tests": len(ran), "figures": figures}
    return {**found, "problem": problem or ("" if ran else "no test ran")}


def installed(wheels: Path) -> Path:
    """The interpreter of an environment with these wheels and this project."""
    found = [str(path) for path in sorted(wheels.glob("*.whl"))]
    python = environment("gpu", found, "--no-index", "--no-deps")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    keep = ["--no-index", f"--constraint={python.parent.parent / 'constraints.txt'}"]  # this torch
    project = [*keep, "--no-build-isolation", "--editable", f"{ROOT}[deepspeed,test]"]
    if subprocess.run([*pip, *project], stdout=sys.stderr).returncode:
        raise SystemExit(f"pip failed, see above; put what is missing into {wheels}")
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help="default: all, on a CPU all but suite")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"no GPU: torch {torch.__version__} finds none; run make test-gpu on a machine with one")
    if options.wheels:
        python = str(installed(options.wheels.resolve()))
        os.execv(python, [python, __file__, *options.part, "--device", options.device])
    known = commands(options.device)
    chosen = options.part or [part for part in known if part != "suite" or options.device == "cuda"]
    if unknown := set(chosen) - known.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    out = Path(os.environ.get("OUT") or ROOT / "runs" / "gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(ROOT))
    from benchmarks import record

    rows: list[dict[str, Any]] = []
    for part in chosen:
        rows.append(found := run(part, known[part], out))
        record.write(out / "results.json", rows)
        last = (out / f"{part}.log").read_text().splitlines()[-40:] if found["problem"] else []
        skipped = [f"  skipped: {test}" for test in found.get("skipped", ())]
        print(f"{part}: {found['problem'] or 'passed'}, {found['seconds']} s", *skipped, *last, sep="\n", flush=True)
    if failed := [row["part"] for row in rows if row["problem"]]:
        raise SystemExit(f"failed: {', '.join(failed)}; see {out}")


if __name__ == "__main__":
    main()
