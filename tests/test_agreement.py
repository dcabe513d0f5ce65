"""Ranks that differ all stop, with the first difference."""

from __future__ import annotations

import pytest

from lwopt_backend.runtime.agreement import RanksDisagree, agree, digest, first_difference
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.ranks import RankPool


def agree_on(lines_by_rank: list[list[str]]) -> str:
    collectives = TorchCollectives()
    return agree(collectives, "a test", lambda: ("agreed", lines_by_rank[collectives.rank]))


def test_equal_lines_agree(ranks: RankPool) -> None:
    assert ranks.run(agree_on, [["a", "b"], ["a", "b"]]) == ["agreed", "agreed"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["a", "c"], "ranks differ from line 1 on: rank 0 has 'b', rank 1 has 'c'"),
        (["a"], "ranks differ from line 1 on: rank 0 has 'b', rank 1 has None"),
    ],
)
def test_different_lines_name_the_first_difference_on_every_rank(
    ranks: RankPool, other: list[str], message: str
) -> None:
    assert ranks.errors(agree_on, [["a", "b"], other]) == [f"RanksDisagree: a test: {message}"] * 2
    assert issubclass(RanksDisagree, RuntimeError)


def fail_on_rank(failing: int) -> None:
    collectives = TorchCollectives()

    def decide() -> tuple[None, list[str]]:
        if collectives.rank == failing:
            raise KeyError("missing")
        return None, []

    agree(collectives, "a test", decide)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_takes_the_others_with_it(ranks: RankPool, failing: int) -> None:
    errors = ranks.errors(fail_on_rank, failing)
    assert errors[failing] == "KeyError: 'missing'"
    assert errors[1 - failing].startswith(f"RuntimeError: a test: rank {failing} failed with KeyError('missing')")


def test_digest_is_of_the_text() -> None:
    assert digest(["a", "b"]) == digest(["a", "b"]) != digest(["a", "c"])
    assert first_difference([["a"], ["a"]]) == "all lines are equal"
