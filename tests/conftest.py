import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests import SEED_ADDED, shift_seeds
from tests.support.cells import table
from tests.support.ranks import RankPool, RankProcesses


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lwopt_backend")
    group.addoption("--full", action="store_true", help="whole tables in place of pairs, and tests marked `full`")
    group.addoption("--transport", choices=["strict"], help="only tests on ranks, on tests/support/strict_transport.py")
    group.addoption(
        "--device",
        choices=["cpu", "cuda"],
        help="only tests marked `gpu`, on it: one rank, or several by that transport",
    )
    group.addoption("--seed", type=int, default=0, metavar="N", help="added to the seeds of torch in all tests")
    group.addoption("--one-in", type=int, default=1, metavar="N", help="of the tests selected, every Nth")


def pytest_configure(config: pytest.Config) -> None:
    if (seed := config.getoption("seed")) and SEED_ADDED not in os.environ:
        os.environ[SEED_ADDED] = str(seed)
        shift_seeds()
    if config.getoption("device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"no GPU: torch {torch.__version__} finds none; run this on a machine with one")
    config.addinivalue_line("markers", "full: runs in `make test-full` only")
    config.addinivalue_line("markers", "gpu: runs with `--device` only, as in `make test-gpu`")
    config.addinivalue_line("markers", "on_gloo: needs gloo itself, and is not run with `--transport strict`")
    config.addinivalue_line("markers", "cells(where, axes): a table of arguments, see tests/support/cells.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("cells"):
        where, axes = mark.args
        rows = table(axes, where, metafunc.config.getoption("full"))
        metafunc.parametrize(tuple(axes), rows, indirect=[name for name in axes if name == "ranks"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    transport = config.getoption("transport")
    left_out = set() if config.getoption("full") else {item for item in items if item.get_closest_marker("full")}
    left_out |= {item for item in items if bool(item.get_closest_marker("gpu")) != bool(config.getoption("device"))}
    if transport is not None:
        left_out |= {item for item in items if "rank_pools" not in getattr(item, "fixturenames", ())}
        left_out |= {item for item in items if item.get_closest_marker("on_gloo")}
    left = [item for item in items if item not in left_out][:: config.getoption("one_in")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
    items[:] = left


def pytest_collection_finish() -> None:
    """To look through what tests have imported would take the garbage collector half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def rank_pools(pytestconfig: pytest.Config) -> Iterator[dict[int, RankPool]]:
    """Worlds of some numbers of ranks, all on the same processes."""
    device = pytestconfig.getoption("device")
    transport = "strict" if device else pytestconfig.getoption("transport") or "gloo"
    processes = RankProcesses(pytestconfig.getini("filterwarnings"), transport, device)
    yield {world_size: RankPool(world_size, processes) for world_size in (1, 2, 3, 4, 8, 16, 32)}
    processes.remove()


@pytest.fixture(autouse=True)
def rested(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rank processes that have come to be in many groups are ended after the test."""
    yield
    if "rank_pools" in request.fixturenames:
        request.getfixturevalue("rank_pools")[1].processes.rest()


@pytest.fixture
def ranks(rank_pools: dict[int, RankPool], request: pytest.FixtureRequest) -> RankPool:
    """2 ranks, or as many as ``@cells(ranks=[...])`` says."""
    return rank_pools[getattr(request, "param", 2)]


@pytest.fixture
def ranks_to_spoil(rank_pools: dict[int, RankPool]) -> Iterator[RankPool]:
    """Two ranks for a test that changes DeepSpeed's globals (tensor, expert, pipeline, sequence groups)."""
    rank_pools[2].renew()
    yield rank_pools[2]
    rank_pools[2].renew()


@pytest.fixture(scope="module")
def worlds_to_spoil(rank_pools: dict[int, RankPool]) -> Iterator[None]:
    """For a file whose tests change them, all in one way."""
    yield
    rank_pools[2].renew()
