"""On 8, 16 and 32 ranks every engine trains what one process trains, bit for bit, where most ranks have few rows of a
matrix, or none."""

from collections.abc import Iterator

import pytest

from tests.engines import OWNED, ZERO, Cell, check
from tests.ranks import RankPool


@pytest.fixture(scope="module", autouse=True)
def ended(rank_pools: dict[int, RankPool]) -> Iterator[None]:
    """Other files need few processes."""
    yield
    rank_pools[8].close()


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
    *(pytest.param(count, Cell("fsdp2", options={"attach": True}), **FULL) for count in (16, 32)),
    pytest.param(32, Cell("fsdp2", sharding="hybrid"), **FULL),
    pytest.param(16, Cell("fsdp2", sharding="tensor parallel", alike=True), **FULL),
]


@pytest.mark.parametrize(("ranks", "cell"), TABLE, indirect=["ranks"])
def test_many_ranks_train_the_weights_of_one_process(ranks: RankPool, cell: Cell) -> None:
    ranks.run(check, 0.0, cell)
