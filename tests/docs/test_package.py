"""The package as a user gets it: built, installed with torch alone, and run without a warning."""

import email
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import lwopt_backend
from lwopt_backend.config.options import install_command
from lwopt_backend.config.versions import VERSIONS, requirement
from lwopt_backend.groups.optimizer_classes import PACKAGES
from tests.support.launcher import ROOT, TIMEOUT_SECONDS
from tests.support.pages import unpack_page

NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"  # the functions that pip calls, PEP 517


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("built") / "checkout", ignore=NOT_SOURCES))


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build("wheel", checkout, checkout.parent / "wheel")


def build(what: str, source: Path, destination: Path) -> Path:
    destination.mkdir()
    run([sys.executable, "-c", BUILD.format(what, str(destination))], source)
    (path,) = destination.iterdir()
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, what pip installs for it, and the torch that is here.
    Only torch and its requirements are linked into it, so that a requirement that we forget to name is
    missing. They are pinned: pip would replace what the links lead to."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    found = requirements_of("torch")
    for distribution in found.values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(distribution.locate_file(top)))
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={distribution.version}\n" for name, distribution in found.items()))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
    run([*pip, "--constraint", str(pins), str(wheel)], folder)
    return python


def requirements_of(name: str) -> dict[str, importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [name]
    while wanted:
        distribution = importlib.metadata.distribution(wanted.pop())
        if distribution.metadata["Name"] not in found:
            found[distribution.metadata["Name"]] = distribution
            requirements = [Requirement(text) for text in distribution.requires or ()]
            wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONWARNINGS")}
    how = {"capture_output": True, "text": True, "timeout": TIMEOUT_SECONDS, "cwd": folder}
    finished = subprocess.run([*map(str, command)], env={**environment, "OMP_NUM_THREADS": "1"}, **how)
    assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.full
def test_the_sdist_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(build("sdist", checkout, tmp_path / "sdist"), tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "again")
    assert again.name == wheel.name and members(again) == members(wheel)


def test_wheel_has_every_module_and_the_license(wheel: Path) -> None:
    """The wheel has the mark of types, too."""
    found = members(wheel)
    folders = {"lwopt_backend": ROOT / "lwopt_backend", "lwopt_backend/integrations": ROOT / "integrations"}
    modules = {f"{name}/{path.relative_to(top)}" for name, top in folders.items() for path in top.rglob("*.py")}
    assert {name for name in found if ".dist-info/" not in name} == {*modules, "lwopt_backend/py.typed"}
    (license,) = [name for name in found if name.endswith("/LICENSE")]
    assert found[license] == (ROOT / "LICENSE").read_bytes()


def test_the_extra_all_is_every_extra_for_users(wheel: Path) -> None:
    (text,) = [content for name, content in members(wheel).items() if name.endswith("/METADATA")]
    metadata = email.message_from_bytes(text)
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    (everything,) = [r for r in requirements if r.marker and r.marker.evaluate({"extra": "all"})]
    assert everything.name == metadata["Name"] and everything.extras == {"deepspeed", "hf", "plots", "optimizers"}
    assert everything.extras < set(metadata.get_all("Provides-Extra", []))


@pytest.mark.full
@pytest.mark.parametrize("script", ["fsdp2_train.py", "plain_train.py"])
def test_documented_scripts_train_without_a_warning(python: Path, tmp_path: Path, script: str) -> None:
    command = shlex.split(unpack_page("start/quickstart", script, tmp_path, python))
    finished = run(command, tmp_path)
    assert re.search(r"loss [01]\.\d+ after 40 steps", finished.stdout)
    assert "warn" not in finished.stderr.lower(), finished.stderr


COMMANDS = """
import json, sys
from pathlib import Path

import torch
from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.cli import main

model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
optimizer = LayerWiseOptimizer(model, matrix="muon", lr=0.02, elementwise="adamw", elementwise_lr=3e-3, report=False)
model(torch.ones(2, 16)).sum().backward()
optimizer.step()
optimizer.save_state_dict("trained")
Path("shapes.json").write_text(json.dumps([["layers.0.q", [64, 64]], ["layers.0.up", [128, 64]]]))
Path("config.json").write_text('{"model_type": "llama"}')
codes = {}
for line in sys.argv[1:]:
    sys.argv = ["lwopt", *line.split()]
    try:
        main()
    except SystemExit as ended:
        codes[line] = ended.code
Path("codes.json").write_text(json.dumps(codes))
"""
PLANNED = "--shapes shapes.json --world-size 8"
SUCCEED = (
    *("--help", "rules", f"plan {PLANNED}", f"plan {PLANNED} --json"),
    f"plan {PLANNED} --engine fsdp2",
    *(f"convert trained {target} --to {target}" for target in ("universal", "dcp", "safetensors")),
    *(f"inspect {made}" for made in ("trained", "universal", "dcp", "safetensors")),
    *("diff trained universal", "diff universal dcp --weights", "diff trained safetensors --weights"),
)
NEED_AN_EXTRA = {f"plan {PLANNED} --png plan.png": "matplotlib", f"plan {PLANNED} --html plan.html": "matplotlib"}
NEED_AN_EXTRA |= {"plan --hf config.json --world-size 8": "transformers"}


@pytest.mark.full
def test_every_command_runs_without_a_warning(python: Path, tmp_path: Path) -> None:
    """Every command names the package that it lacks."""
    finished = run([python, "-c", COMMANDS, *SUCCEED, *NEED_AN_EXTRA], tmp_path)
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes == {**dict.fromkeys(SUCCEED, 0), **dict.fromkeys(NEED_AN_EXTRA, 2)}, finished.stderr
    lines = [line for line in finished.stderr.splitlines() if line.strip() and not line.startswith("timing ")]
    assert len(lines) == len(NEED_AN_EXTRA), finished.stderr
    for line, package in zip(lines, NEED_AN_EXTRA.values()):
        assert line.startswith("error: ") and line.endswith(install_command(package)), line
    shown = run([python.with_name("lwopt"), "--help"], tmp_path)
    assert "Usage: lwopt" in shown.stdout and not shown.stderr


def test_pip_installs_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer torch is one warning."""
    project = (ROOT / "pyproject.toml").read_text()
    of_test_peers = {"trl", "lightning", "torchtitan", "verl", "nemo-automodel", "llamafactory"}
    for package in VERSIONS.keys() - of_test_peers:
        assert f'"{requirement(package)}"' in project
    prepared = re.findall(r'TORCH = "torch==(.*)"', (ROOT / "scripts" / "environment.py").read_text())
    assert {*prepared} <= {*VERSIONS["torch"].tested}
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(UserWarning, match="expected torch .* or older.*, found 2.99.0; run `make test`") as warned:
        for _ in range(2):
            lwopt_backend.LayerWiseOptimizer(nn.Linear(2, 2), lr=0.02)
    assert sum("2.99.0" in str(warning.message) for warning in warned) == 1


@pytest.mark.parametrize("package", ["matplotlib", "transformers", *PACKAGES.values()])
def test_what_messages_tell_to_install_is_what_an_extra_asks_for(package: str) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    *words, told = shlex.split(install_command(package))
    assert words == ["pip", "install"]
    assert Requirement(told) in [Requirement(text) for texts in extras.values() for text in texts]
