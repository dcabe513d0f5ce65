"""One learning rate for groups that need different ones: the ratio is kept, and only where there is one to keep."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from lwopt_backend.linked_rates import LinkedRates


def linked(*rates: float, lr: float | None = None) -> list[Any]:
    groups = [{"lr": rate} for rate in rates]
    return LinkedRates.of(groups, rates[0] if lr is None else lr).link(groups)


def write(groups: list[Any], *rates: float) -> list[float]:
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    return [group["lr"] for group in groups]


def test_one_rate_written_to_all_keeps_the_ratio() -> None:
    groups = linked(0.02, 0.001, 0.01)
    for group in groups:
        group["lr"] = 0.2
    assert [group["lr"] for group in groups] == pytest.approx([0.2, 0.01, 0.1])


def test_rates_written_group_by_group_are_taken_as_they_are_and_for_good() -> None:
    groups = linked(0.02, 0.001)
    for rates in ([0.012, 0.0024], [0.004, 0.004]):  # a cosine to the same floor ends in equal rates
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        assert [group["lr"] for group in groups] == rates


def test_a_rate_written_to_one_group_changes_that_group_only() -> None:
    groups = linked(0.02, 0.001)
    groups[0]["lr"] = 0.5
    assert [group["lr"] for group in groups] == [0.5, 0.001]
    for group in groups:
        group["lr"] = 0.2
    assert [group["lr"] for group in groups] == pytest.approx([0.2, 0.01])


def test_param_groups_are_saved_as_plain_dictionaries() -> None:
    (group, _) = linked(0.02, 0.001)
    assert type(pickle.loads(pickle.dumps(group))) is dict and type(copy.deepcopy(group)) is dict


@pytest.mark.parametrize("rates", [(0.005, 0.005), (3e-4,)])
def test_where_all_groups_have_one_rate_it_is_taken_as_written(rates: tuple[float, ...]) -> None:
    """Whatever the optimizer's own ``lr`` is: a schedule that reads rates back would shrink them step by step."""
    groups = linked(*rates, lr=0.02)
    for factor in (1.0, 0.5, 0.5):
        written = [group["lr"] * factor for group in groups]
        assert write(groups, *written) == written


def test_rates_scaled_together_stay_linked() -> None:
    groups = linked(0.02, 3e-4)
    for group in groups:
        group["lr"] *= 0.5
    assert [group["lr"] for group in groups] == [0.01, 1.5e-4]
    assert write(groups, 0.02, 0.02) == pytest.approx([0.02, 3e-4])


def test_a_schedule_that_starts_at_zero_says_nothing_about_the_ratio() -> None:
    groups = linked(0.02, 3e-4)
    assert write(groups, 0.0, 0.0) == [0.0, 0.0]
    assert write(groups, 0.02, 0.02) == pytest.approx([0.02, 3e-4])


def test_without_a_rate_to_relate_to_nothing_is_linked() -> None:
    assert write(linked(0.0, 3e-4, lr=0.0), 0.1, 0.1) == [0.1, 0.1]


def test_update_writes_a_rate_like_an_assignment() -> None:
    groups = linked(0.02, 3e-4)
    for group in groups:
        group.update(lr=0.04)
    assert [group["lr"] for group in groups] == pytest.approx([0.04, 6e-4])


def test_own_rates_outlast_a_checkpoint() -> None:
    """The end of a cosine, resumed: both rates have reached the same floor and must not be taken for one rate."""
    groups = linked(0.02, 3e-4)
    write(groups, 0.012, 2.4e-4)
    fresh = LinkedRates([1.0, 0.015])
    resumed = fresh.link([dict(group) for group in groups])
    assert write(resumed, 1e-5, 1e-5) == [1e-5, 1e-5]
    again = fresh.link([{"lr": 0.02}, {"lr": 3e-4}])
    assert write(again, 1e-5, 1e-5) == [1e-5, 1e-5], "nor does a checkpoint of a linked run forget what was seen here"


def test_a_rate_written_to_the_last_group_alone_is_not_the_end_of_a_round() -> None:
    groups = linked(0.02, 3e-4)
    groups[1]["lr"] = 0.5
    assert [group["lr"] for group in groups] == [0.02, 0.5]
    assert write(groups, 0.04, 0.04) == pytest.approx([0.04, 6e-4])


def test_a_new_link_begins_a_new_round() -> None:
    rates = LinkedRates([1.0, 0.015])
    rates.link([{"lr": 0.02}, {"lr": 3e-4}])[0]["lr"] = 0.5
    groups = rates.link([{"lr": 0.02}, {"lr": 3e-4}])
    groups[1]["lr"] = 0.5
    assert [group["lr"] for group in groups] == [0.02, 0.5]
