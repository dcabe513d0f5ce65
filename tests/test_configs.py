"""Every DeepSpeed configuration that is shipped trains; test_train_gpt_fsdp2.py trains with FSDP2's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.zero import engine_for, train

FOLDER = Path(__file__).resolve().parent.parent / "configs"
CONFIGS = sorted(path for kind in ("stage*.json", "zero*.json") for path in FOLDER.glob(kind))


def losses_with(settings: dict[str, Any]) -> list[float]:
    with engine_for(settings) as engine:
        return train(engine, [0] * 8)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_train(request: pytest.FixtureRequest, path: Path) -> None:
    # DeepSpeed keeps "autocast is on" in a global of the process.
    pool: RankPool = request.getfixturevalue("ranks_to_spoil" if "autocast" in path.stem else "ranks")
    for losses in pool.run(losses_with, json.loads(path.read_text())):
        assert losses[-1] < losses[0]
