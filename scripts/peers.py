"""Run our optimizer under clients, and beside peers, that are not ours, each in an environment of its own.

Arguments choose peers; without one, all run. An environment is made when it is first needed and kept under .make. A
peer none of whose tests ran fails, too, and every test that was skipped is named at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from beside import ROOT, environment

PEERS = {  # what an environment has beyond the prepared one
    # Emerging-Optimizers asks for Python 3.12, but runs on 3.11.
    "megatron": ["--ignore-requires-python", "megatron-core==0.16.1", "emerging-optimizers==0.3.0"],
    "trl": ["trl>=1.16,<2", "peft>=0.18", "evaluate"],
    "torchtitan": ["torchtitan==0.3.0", "triton", "grain"],  # its main needs grain
    "lightning": ["lightning>=2.6,<3"],
    "hugging_face": ["--upgrade", "accelerate>=1.15", "transformers>=5,<6"],  # the newest
    "pytorch_optimizer": ["--upgrade", "pytorch-optimizer>=4.1,<5"],
    "gram_newton_schulz": ["--no-deps", "gram-newton-schulz==0.1.6"],  # without its kernels: its own path for CPUs
    "dion": ["triton"],  # and its sources, see the test
    "deepspeed_muon": ["--no-build-isolation", "--upgrade", "deepspeed>=0.19.7,<0.20"],
}


IN_MAKE_TEST = {  # peers that the prepared environment has, too
    "hugging_face": ["test_hugging_face.py"],
    "pytorch_optimizer": ["test_migration_peers.py", "test_equality.py::test_every_rule_on_every_engine"],
}


def tests_of(name: str) -> list[str]:
    return [str(ROOT / "tests" / test) for test in IN_MAKE_TEST.get(name, [f"peers/test_{name}.py"])]


def main() -> None:
    chosen = sys.argv[1:] or list(PEERS)
    if unknown := set(chosen) - PEERS.keys():
        raise SystemExit(f"no such peer: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    failed, skipped = list[str](), list[str]()
    for name in chosen:
        python = environment(name, PEERS[name])
        print(f"{name}: {', '.join(PEERS[name])}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.xml")
            command = [python, "-m", "pytest", "-p", "no:cacheprovider", "--durations=15", f"--junit-xml={results}"]
            path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
            ended = subprocess.run([*command, *tests_of(name)], cwd=ROOT, env={**os.environ, "PATH": path})
            cases = [*ElementTree.parse(results).iter("testcase")] if results.exists() else []
        left = [case for case in cases if case.find("skipped") is not None]
        skipped += [f"{name}: {case.get('name')}: {case.find('skipped').get('message')}" for case in left]
        if ended.returncode != 0:
            failed.append(name)
        elif len(left) == len(cases):
            failed.append(f"{name} (no test ran)")
    if skipped:
        print("\n  ".join(["skipped:", *skipped]), file=sys.stderr)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
