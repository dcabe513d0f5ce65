"""On 8, 16 and 32 ranks every engine trains what one process trains, bit for bit, where most ranks have few rows of a
matrix, or none."""

from pathlib import Path

import pytest

from tests.checkpoint.test_tours import Tour, go_through, on
from tests.engines.modules import test_modules
from tests.engines.zero import test_pipeline as test_zero_pipeline
from tests.support.engines import OWNED, ZERO, Cell, check
from tests.support.fsdp2 import BesideTwin
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool

FULL = {"marks": pytest.mark.full}
TABLE = [
    *(pytest.param(8, Cell(engine)) for engine in ("plain", "fsdp2", "zero 1", "zero 3")),
    *(pytest.param(8, Cell(engine, accumulation=2), **FULL) for engine in ("zero 0", "zero 2", *OWNED)),
    *(
        pytest.param(count, Cell("plain", options={"layout": layout}), **FULL)
        for count in (16, 32)
        for layout in ("padded", "compact")
    ),
    *(pytest.param(16, Cell(engine), **FULL) for engine in ZERO),
    *(pytest.param(count, Cell("fsdp2"), **FULL) for count in (16, 32)),
    pytest.param(32, Cell("fsdp2", sharding="hybrid"), **FULL),
    pytest.param(16, Cell("fsdp2", sharding="tensor parallel", alike=True), **FULL),
]


@pytest.mark.parametrize(("ranks", "cell"), TABLE, indirect=["ranks"])
def test_many_ranks_train_the_weights_of_one_process(ranks: RankPool, cell: Cell) -> None:
    ranks.run(check, 0.0, cell)


@pytest.mark.full
@on_ranks(16)
def test_experts_on_16_ranks_equal_one_process() -> None:
    """Experts of four groups of four ranks train the weights of one process."""
    run = BesideTwin("expert parallel")
    run.train(3)
    run.check()


@pytest.mark.parametrize("kinds", [("owned", "FSDP2"), pytest.param(("FSDP2", "owned"), **FULL)])
@on_ranks(8)
def test_modules_on_disjoint_ranks_equal_one_process(kinds: tuple[str, str]) -> None:
    """Modules on disjoint ranks train the weights of one process."""
    run = test_modules.Beside(((0, 1, 2, 3), (4, 5, 6, 7)), kinds)
    run.train(range(3), clip=0.05)
    run.check()


@pytest.mark.full
@pytest.mark.usefixtures("ranks_to_spoil")
@on_ranks(8)
def test_pipeline_of_four_stages_equals_one_process() -> None:
    """A pipeline of four stages trains the weights of one process."""
    settings = test_zero_pipeline.settings_for("fp32, stage 0")  # some stages have no matrix
    run = test_zero_pipeline.beside("untied", settings)
    with test_zero_pipeline.engine_for(settings, test_zero_pipeline.pipeline(test_zero_pipeline.UNTIED, 4)) as engine:
        run.start(engine)
        run.train(engine, range(3))
        run.check(engine)


RESUMED = [on("plain", 8), on("fsdp2", 16), on("zero 1", 8), on("fsdp2", 32, sharding="hybrid"), on("zero 3", 16)]


@pytest.mark.full
def test_checkpoint_of_many_ranks_resumes_on_others(rank_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """A checkpoint of many ranks resumes on other numbers of ranks."""
    go_through(rank_pools, tmp_path, Tour("muon", [*RESUMED, on("plain", 32), on("zero 3", 2)]))
