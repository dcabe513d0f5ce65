"""Separate environments next to the one that `make` prepared, in folders under .make, and their commands.

    python scripts/beside.py docs         the site of docs/, into site/; further arguments are mkdocs'
    python scripts/beside.py faults       the fault campaign, tests/faults; further arguments are pytest's
    python scripts/beside.py peers trl    this optimizer in third-party clients, and peers; default: all

FAULTS_SEED sets the seed of every attack, FAULTS_COUNT how many attacks each test makes in place of its own number.

Such an environment sees every package of the prepared one, this project among them, after its own: what is installed
into it comes first, and nothing of the prepared environment changes. It is made when it is first needed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import requires, version
from pathlib import Path
from xml.etree import ElementTree

from lwopt_backend.config.versions import VERSIONS, requirement

ROOT = Path(__file__).resolve().parent.parent
MADE = ROOT / ".make" / "beside"
VERLS = ["ray", "tensordict>=0.8,<=0.10", "hydra-core", "omegaconf<2.4", "antlr4-python3-runtime==4.9.3", "codetiming"]
VERLS += ["pyvers", "cloudpickle", "orjson", "datasets", "multiprocess", "pandas", "pyarrow", "dill", "xxhash"]
LLAMA_FACTORYS = ["transformers==5.6.0", "tokenizers==0.22.2", "huggingface-hub==1.33.0", "accelerate==1.11.0"]
LLAMA_FACTORYS += ["peft==0.18.1", "trl==0.24.0", "datasets==4.0.0", "multiprocess==0.70.16", "dill==0.3.8", "xxhash"]
LLAMA_FACTORYS += ["fsspec==2025.3.0", "pyarrow", "pandas<3", "pytz", "omegaconf", "scipy", "httpx", "httpcore<2"]
LLAMA_FACTORYS += ["aiohttp", "aiosignal", "aiohappyeyeballs", "frozenlist", "multidict", "propcache", "yarl"]
PEERS = {  # what an environment has beyond the prepared one
    # Emerging-Optimizers asks for Python 3.12, but runs on 3.11.
    "megatron": ["--ignore-requires-python", "megatron-core==0.19.2", "emerging-optimizers==0.3.0"],
    "trl": [requirement("trl"), requirement("peft"), "evaluate"],
    # It needs torch 2.14 or newer, and its main needs grain.
    "torchtitan": [f"torch=={VERSIONS['torch'].tested[-1]}", requirement("torchtitan"), "triton", "grain"],
    # Without what they ask for beyond what building an optimizer needs; verl and Automodel pin older transformers.
    "verl": ["--no-deps", requirement("verl"), *VERLS],
    "automodel": ["--no-deps", requirement("nemo-automodel")],
    # Without torchvision and torchaudio, whose builds for CUDA do not load on CPUs.
    "llamafactory": ["--no-deps", requirement("llamafactory"), *LLAMA_FACTORYS],
    "lightning": [requirement("lightning")],
    "hugging_face": ["--upgrade", requirement("accelerate"), requirement("transformers")],  # the newest
    "emerging": ["--ignore-requires-python", requirement("emerging-optimizers")],
    "pytorch_optimizer": ["--upgrade", requirement("pytorch-optimizer")],
    "gram_newton_schulz": ["--no-deps", "gram-newton-schulz==0.1.6"],  # without its kernels: its own path for CPUs
    "timm": ["--no-deps", "timm==1.0.31"],  # without torchvision: its schedulers alone
    "dion": ["triton"],  # and its sources, see the test
    "deepspeed_muon": ["--no-build-isolation", "--upgrade", requirement("deepspeed")],
}
IN_MAKE_TEST = {  # peers that are also in the prepared environment
    "hugging_face": ["docs/test_hugging_face.py", "docs/test_sixteen_bits.py"],
    "pytorch_optimizer": [
        "checkpoint/test_migration_peers.py",
        "engines/test_equality.py::test_every_rule_on_every_engine",
    ],
}


def environment(name: str, requirements: Sequence[str], *options: str) -> Path:
    """The interpreter of the environment ``name``, which has ``requirements``; made anew where one of these changed.

    ``options`` are pip's, which may not take another torch than the prepared one unless ``requirements`` name one.
    """
    folder = MADE / name
    python, stamp = folder / "bin" / "python", folder / "complete"
    constraint = [] if any(each.startswith("torch==") for each in requirements) else [f"torch=={version('torch')}"]
    told = f"{sys.executable} {sys.version} {constraint} {requirements} {options}"
    fingerprint = hashlib.sha256(told.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == fingerprint:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    sites = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # A line that begins with "import" is run; addsitedir also reads the folders' own .pth files.
    lines = ["import site", *(f"site.addsitedir({path!r})" for path in sites)]
    Path(sysconfig.get_path("purelib", "venv", paths), "prepared.pth").write_text("; ".join(lines) + "\n")
    (folder / "constraints.txt").write_text("".join(f"{line}\n" for line in constraint))
    names = " ".join(Path(each).name for each in requirements)
    print(f"installing {names} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(folder / "constraints.txt"), *options, *requirements]
    if subprocess.run(pip, stdout=sys.stderr).returncode != 0:
        raise SystemExit("pip failed, see above; running make again tries again")
    stamp.write_text(fingerprint)
    return python


def of_extra(extra: str) -> list[str]:
    """The requirements of one of this project's extras."""
    return [text.partition(";")[0].strip() for text in requires("lwopt-backend") or () if f'extra == "{extra}"' in text]


def run(python: Path, *words: object, **environ: str) -> int:
    """The exit status of a module that runs with ``python``, and finds the commands of both environments."""
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [str(python), "-m", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path, **environ}).returncode


def docs(arguments: Sequence[str]) -> int:
    """A broken link is an error."""
    python = environment("docs", of_extra("docs"))
    return run(python, "mkdocs", *(arguments or ["build"]), "--strict", NO_MKDOCS_2_WARNING="1")  # versions are pinned


def faults(arguments: Sequence[str]) -> int:
    chosen = arguments or sorted((ROOT / "tests" / "faults").glob("test_*.py"))
    options = ("-p", "no:cacheprovider", "-n", "2", "--durations=15")
    return run(environment("faults", of_extra("faults")), "pytest", *options, *chosen)


def peers(arguments: Sequence[str]) -> int:
    """A peer without a test that ran also fails, and every skipped test is named at the end."""
    chosen = arguments or list(PEERS)
    if unknown := set(chosen) - PEERS.keys():
        raise SystemExit(f"no such peer: {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}")
    failed, skipped = list[str](), list[str]()
    for name in chosen:
        python = environment(name, PEERS[name])
        print(f"{name}: {', '.join(PEERS[name])}", file=sys.stderr, flush=True)
        tests = [ROOT / "tests" / test for test in IN_MAKE_TEST.get(name, [f"peers/test_{name}.py"])]
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.xml")
            options = ("-p", "no:cacheprovider", "--durations=15", f"--junit-xml={results}")
            ended = run(python, "pytest", *options, *tests)
            found = [*ElementTree.parse(results).iter("testcase")] if results.exists() else []
        left = [case for case in found if case.find("skipped") is not None]
        skipped += [f"{name}: {case.get('name')}: {case[0].get('message')}" for case in left]
        if ended != 0:
            failed.append(name)
        elif len(left) == len(found):
            failed.append(f"{name} (no test ran)")
    if skipped:
        print("\n  ".join(["skipped:", *skipped]), file=sys.stderr)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    raise SystemExit({"docs": docs, "faults": faults, "peers": peers}[sys.argv[1]](sys.argv[2:]))
