import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import SEED_ADDED, shift_seeds
from tests.support.cells import table
from tests.support.ranks import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lwopt_backend")
    group.addoption("--full", action="store_true", help="whole tables in place of pairs, and tests marked `full`")
    group.addoption(
        "--transport",
        choices=["gloo", "shared", "strict"],
        help="only tests on ranks, on it; else on shared, every tenth also on strict, and with --full on gloo",
    )
    group.addoption(
        "--device",
        choices=["cpu", "cuda"],
        help="only tests marked `gpu`, on it: one rank, or several by that transport",
    )
    group.addoption("--seed", type=int, default=0, metavar="N", help="added to the seeds of torch in all tests")


def pytest_configure(config: pytest.Config) -> None:
    if (seed := config.getoption("seed")) and SEED_ADDED not in os.environ:
        os.environ[SEED_ADDED] = str(seed)
        shift_seeds()
    if config.getoption("device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"no GPU: torch {torch.__version__} finds none; run this on a machine with one")
    config.addinivalue_line("markers", "full: runs in `make test-full` only")
    config.addinivalue_line("markers", "gpu: runs with `--device` only, as in `make test-gpu`")
    config.addinivalue_line("markers", "on_gloo: needs gloo itself, and runs on no other transport")
    config.addinivalue_line("markers", "also_on_gloo: runs on it as well, where gloo is not what all tests run on")
    config.addinivalue_line("markers", "cells(where, axes): a table of arguments, see tests/support/cells.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("cells"):
        where, axes = mark.args
        rows = table(axes, where, metafunc.config.getoption("full"))
        metafunc.parametrize(tuple(axes), rows, indirect=[name for name in axes if name == "ranks"])
    if "transport" in metafunc.fixturenames:
        first, *others = transports_of(metafunc.definition)
        values = [pytest.param(first, id=pytest.HIDDEN_PARAM), *others]
        metafunc.parametrize("transport", values, indirect=True, scope="module")


ON_GLOO = {"peers", "faults"}  # folders of what is run as users run it
ALSO_ON_STRICT = 10


def transports_of(node: pytest.Item) -> list[str]:
    """On which a test runs; on strict, after the first, one in ``ALSO_ON_STRICT`` does."""
    config = node.config
    if config.getoption("device"):
        return ["strict"]
    if node.get_closest_marker("on_gloo"):
        return ["gloo"]
    if chosen := config.getoption("transport"):
        return [chosen]
    if config.getoption("full") or ON_GLOO.intersection(node.path.relative_to(config.rootpath).parts):
        return ["gloo"]
    return ["shared", *["gloo"] * bool(node.get_closest_marker("also_on_gloo")), "strict"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def left(taken: Callable[[pytest.Item], bool]) -> list[pytest.Item]:
        config.hook.pytest_deselected(items=[item for item in items if not taken(item)])
        return [item for item in items if taken(item)]

    def runs(item: pytest.Item) -> bool:
        on_gloo, on_ranks = item.get_closest_marker("on_gloo"), "transport" in getattr(item, "fixturenames", ())
        chosen = config.getoption("transport")
        return (
            (config.getoption("full") or not item.get_closest_marker("full"))
            and bool(item.get_closest_marker("gpu")) == bool(config.getoption("device"))
            and (chosen is None or on_ranks and (chosen == "gloo" or not on_gloo))
        )

    def on(item: pytest.Item) -> str:
        return item.callspec.params.get("transport", "") if hasattr(item, "callspec") else ""

    items[:] = left(runs)
    if not config.getoption("transport") and not config.getoption("device"):
        strict = [item for item in items if on(item) == "strict"]
        left_out = {*strict} - {*strict[::ALSO_ON_STRICT]}
        items[:] = left(lambda item: item not in left_out)


def pytest_collection_finish() -> None:
    """To look through what tests have imported would take the garbage collector half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def transport(request: pytest.FixtureRequest) -> str:
    """What ranks talk over."""
    return getattr(request, "param", None) or transports_of(request.node)[0]


@pytest.fixture(scope="module")
def rank_pools(pytestconfig: pytest.Config, transport: str) -> Iterator[dict[int, RankPool]]:
    """Worlds of some numbers of ranks, for the tests of a file."""
    settings = transport, pytestconfig.getoption("device"), pytestconfig.getini("filterwarnings")
    pools = {world_size: RankPool(world_size, *settings) for world_size in (1, 2, 3, 4, 6, 8, 16, 32)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(rank_pools: dict[int, RankPool], request: pytest.FixtureRequest) -> RankPool:
    """2 ranks, or as many as ``@cells(ranks=[...])`` says."""
    return rank_pools[getattr(request, "param", 2)]


@pytest.fixture
def ranks_to_spoil(ranks: RankPool) -> Iterator[RankPool]:
    """Ranks for a test that changes what torch or DeepSpeed keep of a world, such as DeepSpeed's tensor, expert,
    pipeline or sequence groups."""
    ranks.close()
    yield ranks
    ranks.close()
