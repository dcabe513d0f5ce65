"""Ranks that differ all stop, with the first difference."""

import re

import pytest

from lwopt_backend.runtime.agreement import RanksDisagree, agree, digest, first_difference, setting
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.on_ranks import on_ranks


@on_ranks(2)
def test_equal_lines_agree_and_of_different_ones_every_rank_names_the_first_difference() -> None:
    collectives = TorchCollectives()

    def agree_with(other: list[str]) -> str:
        return agree(collectives, "a test", lambda: ("agreed", [["a", "b"], other][collectives.rank]))

    assert agree_with(["a", "b"]) == "agreed"
    for other, found in ((["a", "c"], "'c'"), (["a"], "nothing further")):
        with pytest.raises(RanksDisagree, match=f"^a test: ranks differ: rank 0 has 'b', rank 1 has {found}$"):
            agree_with(other)
    assert issubclass(RanksDisagree, RuntimeError)


@on_ranks(2)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_takes_the_others_with_it(failing: int) -> None:
    collectives = TorchCollectives()

    def decide() -> tuple[None, list[str]]:
        if collectives.rank == failing:
            raise KeyError("missing")
        return None, []

    told = re.escape(f"a test: rank {failing} failed with KeyError('missing')")
    mine = collectives.rank == failing
    with pytest.raises(KeyError if mine else RuntimeError, match="^'missing'$" if mine else f"^{told}"):
        agree(collectives, "a test", decide)


def test_a_setting_that_differs_is_named_with_both_values_and_nothing_else() -> None:
    ranks = [[setting("lr", 0.02), setting("betas", (0.9, beta)), setting("eps", 0)] for beta in (0.95, 0.95, 0.99)]
    found = first_difference(ranks)
    assert found == "ranks differ in betas: (0.9, 0.95) on rank 0, (0.9, 0.99) on rank 2; give all ranks the same"
    assert first_difference([["a"], ["a"]]) == "all lines are equal"
    assert digest(["a", "b"]) == digest(["a", "b"]) != digest(["a", "c"])
