from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.remove()


@pytest.fixture
def ranks(rank_pools: dict[int, RankPool], request: pytest.FixtureRequest) -> RankPool:
    """Ranks of the run's pool: 2, or as many as ``@pytest.mark.parametrize("ranks", [4], indirect=True)`` says."""
    return _pool(rank_pools, getattr(request, "param", 2))


@pytest.fixture
def ranks_to_spoil(rank_pools: dict[int, RankPool]) -> Iterator[RankPool]:
    """Two ranks for a test that changes DeepSpeed's globals (tensor, expert, pipeline groups); ended afterwards."""
    pool = _pool(rank_pools, 2)
    yield pool
    pool.close()


def _pool(rank_pools: dict[int, RankPool], world_size: int) -> RankPool:
    if world_size not in rank_pools:
        rank_pools[world_size] = RankPool(world_size)
    return rank_pools[world_size]
