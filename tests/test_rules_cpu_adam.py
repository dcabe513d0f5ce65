"""DeepSpeed's CPUAdam as the element-wise rule. DeepSpeed compiles it at its first use, which takes minutes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.rules import ELEMENTWISE
from tests.test_rules_on_engines import EVERY, differ_on_zero, differ_owned

CLASS = "deepspeed.ops.adam.DeepSpeedCPUAdam"
FOLDER = "TORCH_EXTENSIONS_DIR"
BUILD = "import torch; from deepspeed.ops.adam import DeepSpeedCPUAdam as A; A([torch.nn.Parameter(torch.zeros(1))])"
# Its loop over vectors rounds otherwise than the one over what is left at the end, and where that is depends on how
# parameters are cut: a last bit of fp32 in each of five steps of at most 0.003.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> str:
    """Where the compiled op is; kept for the next run."""
    if not (shutil.which("g++") and shutil.which("ninja")):
        pytest.skip("needs g++ and ninja: DeepSpeed compiles CPUAdam")
    folder = Path(request.config.cache.mkdir("torch_extensions"))
    for lock in folder.rglob("lock"):  # of a run that was killed; torch would wait for it for ever
        lock.unlink()
    environment = {**os.environ, FOLDER: str(folder), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", BUILD], env=environment, check=True, timeout=1800, capture_output=True)
    return str(folder)


def differ(folder: str, engine: str) -> float:
    os.environ[FOLDER] = folder
    section = {"name": "torch_optimizer", "class": CLASS, "lr": 3e-3, "weight_decay": 0.1}
    EVERY["cpu adam"] = ELEMENTWISE["cpu adam"] = section
    return differ_owned("muon", "cpu adam") if engine == "owned" else differ_on_zero(int(engine), "muon", "cpu adam")


@pytest.mark.parametrize("engine", ["0", "1", "2", "3", "owned"])
def test_trains_as_on_one_process(ranks: RankPool, compiled: str, engine: str) -> None:
    assert max(ranks.run(differ, compiled, engine)) <= TOLERANCE
