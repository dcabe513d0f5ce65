"""The table of stages and precisions in docs/deepspeed.md, cell by cell, and the files that its other table names. In
every cell each rank trains on its own rows, in one and in two micro-batches. Given the gradients that DeepSpeed
reduced, the fp32 weights must be those of single-process torch.optim.Muon and torch.optim.AdamW to the last bit; or the
engine must refuse on every rank."""

import re
from typing import Any

import pytest

from tests import zero
from tests.cells import cells
from tests.launcher import ROOT
from tests.models import largest_difference
from tests.on_ranks import on_ranks
from tests.pages import table
from tests.zero import PRECISIONS, ROWS, Reference, build, config, engine_for, full_weights

STAGES = (0, 1, 2, 3)
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": zero.BF16,
    "bf16, fp32 accumulation": PRECISIONS["bf16+fp32"],
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "autocast to bf16": PRECISIONS["autocast"],
    "autocast to fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "16-bit masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}


SAYS = {name: dict(zip(STAGES, row, strict=True)) for name, *row in table("deepspeed", "Stages and precisions")[1:]}


def test_the_table_has_every_precision_and_stage() -> None:
    assert list(SAYS) == list(SETTINGS)


@cells(precision=SETTINGS, stage=STAGES, accumulation=[1, 2])
@on_ranks()
def test_the_cell_says_what_happens(precision: str, stage: int, accumulation: int) -> None:
    """How far all fp32 weights are off after some steps on the gradients that DeepSpeed reduced, or who refuses."""
    says, rows = SAYS[precision][stage], ROWS // 2 // accumulation
    settings = config(stage, rows=rows, accumulation=accumulation, bucket_numel=2000) | SETTINGS[precision]
    if "refuse" in says:
        with pytest.raises(Exception) as caught:
            build(settings)
        by_us = "LayerWiseMuon does not support this configuration; change:"
        assert (caught.type is ValueError and str(caught.value).startswith(by_us)) == (says == "refused")
        return
    both = zero.Beside(Reference(), settings)
    with engine_for(settings) as engine:
        both.start(engine)
        both.train(engine, range(3))
        assert largest_difference(full_weights(engine), both.single.model) == float(says)


@pytest.mark.parametrize("row", table("deepspeed", "Features")[1:], ids=lambda row: row[0])
def test_every_feature_names_a_file_of_tests(row: list[str]) -> None:
    assert set(row[1:5]) <= {"yes", "refused", "DeepSpeed refuses", "see below", "-"}
    names = re.findall(r"`(test_\w+)`", row[5])
    assert names and [name for name in names if not (ROOT / "tests" / f"{name}.py").is_file()] == []
