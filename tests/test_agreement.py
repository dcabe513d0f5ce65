"""Ranks that differ all stop, with the first difference."""

from __future__ import annotations

import pytest

from lwopt_backend.runtime.agreement import RanksDisagree, agree, digest, first_difference, setting
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
        (["a", "c"], "ranks differ: rank 0 has 'b', rank 1 has 'c'"),
        (["a"], "ranks differ: rank 0 has 'b', rank 1 has nothing further"),
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


def test_a_setting_that_differs_is_named_with_both_values_and_nothing_else() -> None:
    ranks = [[setting("lr", 0.02), setting("betas", (0.9, beta)), setting("eps", 0)] for beta in (0.95, 0.95, 0.99)]
    found = first_difference(ranks)
    assert found == "ranks differ in betas: (0.9, 0.95) on rank 0, (0.9, 0.99) on rank 2; give all ranks the same"


def test_digest_is_of_the_text() -> None:
    assert digest(["a", "b"]) == digest(["a", "b"]) != digest(["a", "c"])
    assert first_difference([["a"], ["a"]]) == "all lines are equal"
