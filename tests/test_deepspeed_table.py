"""The table of stages and precisions in docs/deepspeed.md, cell by cell, and the tests that its other table names.

In every cell each rank trains on its own rows, in one and in two micro-batches. Given the gradients that DeepSpeed
reduced, the fp32 weights must be those of single-process torch.optim.Muon and torch.optim.AdamW to the last bit; or the
engine must refuse on every rank.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from torch import nn

from tests.launcher import ROOT
from tests.models import MATRICES
from tests.ranks import RankPool
from tests.test_zero_precision import fp16_supported
from tests.zero import ADAMW, MUON, ROWS, batch_shares, config, engine_for, full_weights

PAGE = (ROOT / "docs" / "deepspeed.md").read_text()
STAGES, STEPS = (0, 1, 2, 3), 3
BF16 = {"bf16": {"enabled": True}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16, fp32 accumulation": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "autocast to bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast to fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "16-bit masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = PAGE[PAGE.index(f"## {heading}") :]
    section = section[: section.find("\n## ", 3)]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


CELLS = [
    (name, stage, accumulation, cell)
    for name, *cells in rows_of("Stages and precisions")
    for stage, cell in zip(STAGES, cells, strict=True)
    for accumulation in (1, 2)
]


def differ_given_the_reduced_gradients(settings: dict[str, Any]) -> float:
    """Of all fp32 weights, after some steps."""
    with fp16_supported(), engine_for(settings) as engine:
        rank, stage = engine.global_rank, engine.zero_optimization_stage()
        accumulation = engine.gradient_accumulation_steps()
        params = {name: nn.Parameter(weight) for name, weight in full_weights(engine).items()}
        optimizers = [
            torch.optim.Muon([params[name] for name in MATRICES], **MUON),
            torch.optim.AdamW([param for name, param in params.items() if name not in MATRICES], **ADAMW),
        ]
        scale = float(engine.optimizer.cur_scale) if "fp16" in settings else 1.0
        for step in range(STEPS):
            shares = batch_shares(step, 2 * accumulation)
            for part in range(accumulation):
                if part:
                    engine.step()
                engine.backward(engine(*shares[2 * part + rank]))
            for name, param in engine.module.named_parameters():
                grad = param.grad if stage == 0 else safe_get_full_grad(param)
                params[name].grad = grad.float() / scale
            engine.step()
            for optimizer in optimizers:
                optimizer.step()
        ours = full_weights(engine)
        return max(float((ours[name] - param.detach()).abs().max()) for name, param in params.items())


def build(settings: dict[str, Any]) -> None:
    with fp16_supported(), engine_for(settings):
        pass


def test_the_table_has_every_precision_and_stage() -> None:
    assert [name for name, *_ in rows_of("Stages and precisions")] == list(PRECISIONS)


@pytest.fixture(scope="module")
def autocast_ranks() -> Any:
    """DeepSpeed keeps "autocast is on" in a global of the process, so these ranks are this file's own."""
    pool = RankPool(2)
    yield pool
    pool.remove()


@pytest.mark.parametrize(("precision", "stage", "accumulation", "cell"), CELLS)
def test_the_cell_says_what_happens(
    ranks: RankPool, autocast_ranks: RankPool, precision: str, stage: int, accumulation: int, cell: str
) -> None:
    rows = ROWS // 2 // accumulation
    settings = config(stage, rows=rows, accumulation=accumulation, bucket_numel=2000) | PRECISIONS[precision]
    pool = autocast_ranks if "autocast" in precision else ranks
    if "refuse" in cell:
        by_us = "ValueError: LayerWiseMuon cannot train with this configuration:"
        for error in pool.errors(build, settings):
            assert error.startswith(by_us) == (cell == "refused")
    else:
        assert pool.run(differ_given_the_reduced_gradients, settings) == [float(cell)] * 2


@pytest.mark.parametrize("row", rows_of("Features"), ids=lambda row: row[0])
def test_every_feature_names_a_test_that_is_there(row: list[str]) -> None:
    assert set(row[1:5]) <= {"yes", "refused", "DeepSpeed refuses", "see below", "-"}
    names = re.findall(r"`(test_\w+)(?:::(test_\w+))?`", row[5])
    assert names, "no test is named"
    for module, function in names:
        tests = importlib.import_module(f"tests.{module}")
        assert not function or callable(getattr(tests, function))
