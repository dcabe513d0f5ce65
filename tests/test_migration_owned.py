"""Going on with ours, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.migration import change_momentum_form, load_named_state
from lwopt_backend.owned.state import MASTER, state_pieces
from tests import test_owned_experts as experts
from tests.migration import AFTER, BEFORE, WRONG, both_sizes, forget, named_state, names_of, numbers_for, spoil
from tests.models import MATRICES, UnevenLM
from tests.owned import difference, exact_sums, optimizer_for, shares, train
from tests.ranks import RankPool
from tests.zero import Reference, newton_schulz_in_float32


def train_peer(single: Reference, steps: range, parts: int) -> None:
    for step in steps:
        for tokens, targets in shares(step, parts):
            single.model(tokens, targets).backward()
        for param in single.model.parameters():
            param.grad.div_(parts)
        for optimizer in (single.muon, single.adamw):
            optimizer.step()
            optimizer.zero_grad()


def differ_owned(layout: str) -> float:
    single = Reference(exact_sums(UnevenLM()))
    train_peer(single, BEFORE, dist.get_world_size())
    model = exact_sums(UnevenLM(seed=1))
    optimizer = optimizer_for(model, layout=layout)
    model.load_state_dict(single.model.state_dict())
    state = named_state(single.muon, single.adamw, names_of(model))
    assert load_named_state(optimizer, state) == []
    forget(state)
    train(model, optimizer, AFTER)
    train_peer(single, AFTER, dist.get_world_size())
    return difference(model, single.model)


@both_sizes
@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_owned_storage_goes_on_bit_by_bit(ranks: RankPool, layout: str) -> None:
    assert set(ranks.run(differ_owned, layout)) == {0.0}


def differ_in_sum_form(convert: bool) -> float:
    """Newton-Schulz in fp32, where both forms differ by its rounding only."""
    single = Reference(exact_sums(UnevenLM()))
    with newton_schulz_in_float32():
        train_peer(single, BEFORE, dist.get_world_size())
        model = exact_sums(UnevenLM(seed=1))
        optimizer = optimizer_for(model, momentum_form="sum", ns_dtype="float32")
        model.load_state_dict(single.model.state_dict())
        form = "sum" if convert else "ema"
        load_named_state(optimizer, named_state(single.muon, single.adamw, names_of(model), momentum_form=form))
        train(model, optimizer, AFTER)
        train_peer(single, AFTER, dist.get_world_size())
    return difference(model, single.model)


def test_owned_storage_goes_on_in_the_other_form(ranks: RankPool) -> None:
    assert max(ranks.run(differ_in_sum_form, True)) < 2e-5
    assert min(ranks.run(differ_in_sum_form, False)) > 1e-3


def whole_state(optimizer: LayerWiseOptimizer) -> dict[str, dict[str, Tensor]]:
    """All ranks' pieces by name, put together here."""
    mine = [
        (optimizer.core.members[piece.member].name, piece.start, piece.tensors)
        for piece in state_pieces(optimizer.core)
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, start, tensors in (piece for pieces in of_ranks for piece in pieces):
        for key, tensor in tensors.items():
            parts.setdefault((name, key), {})[start] = tensor
    whole: dict[str, dict[str, Tensor]] = {}
    for (name, key), by_start in parts.items():
        tensors = [by_start[start] for start in sorted(by_start)]
        whole.setdefault(name, {})[key] = torch.cat(tensors) if tensors[0].ndim else tensors[0]
    return whole


def load_in_part() -> tuple[list[str], bool]:
    single = Reference()
    single.train(2)
    model = UnevenLM()
    optimizer = optimizer_for(model)
    train(model, optimizer, 1)
    before = whole_state(optimizer)
    named = named_state(single.muon, single.adamw, names_of(model))
    rest = named.pop("layers.2.weight"), named.pop("lm_head.weight")
    named["nowhere"] = rest[0]
    left = load_named_state(optimizer, named, strict=False)
    after = whole_state(optimizer)
    kept = all(torch.equal(before[name][key], after[name][key]) for name in left for key in before[name])
    taken = all(
        torch.equal(after[name][key], value.reshape(-1) if value.ndim else value)
        for name, state in named.items()
        if name != "nowhere"
        for key, value in state.items()
    )
    return left, kept and taken


def test_a_part_is_loaded_if_asked_for(ranks: RankPool) -> None:
    for left, right in ranks.run(load_in_part):
        assert sorted(left) == ["layers.2.weight", "lm_head.weight"] and right


def load_wrong(what: str, rank: int | None = None) -> None:
    """``rank``: only this one is given something wrong."""
    single = Reference()
    single.train(1)
    optimizer = optimizer_for(UnevenLM(), **({"matrix": "normuon"} if what == "rule" else {}))
    state = named_state(single.muon, single.adamw, names_of(single.model))
    before = whole_state(optimizer)
    if rank in (None, dist.get_rank()):
        spoil(state, what)
    try:
        load_named_state(optimizer, state)
    finally:
        after = whole_state(optimizer)
        assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n]), "something was changed"


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_an_error_on_all_ranks(ranks: RankPool, what: str) -> None:
    for error in ranks.errors(load_wrong, what):
        assert error.startswith("ValueError: load_named_state: ") and WRONG[what] in error


@pytest.mark.parametrize("what", ["missing", "shape"])
def test_what_one_rank_is_given_wrong_is_an_error_on_all(ranks: RankPool, what: str) -> None:
    first, second = ranks.errors(load_wrong, what, 1)
    assert WRONG[what] in second and "rank 1 failed with" in first and WRONG[what] in first


def give_different_states() -> None:
    single = Reference()
    single.train(1)
    state = named_state(single.muon, single.adamw, names_of(single.model))
    if dist.get_rank() == 1:
        del state["gate.weight"]
    load_named_state(optimizer_for(UnevenLM()), state, strict=False)


def test_ranks_have_to_be_given_the_same(ranks: RankPool) -> None:
    for error in ranks.errors(give_different_states):
        assert error.startswith("RanksDisagree: load_named_state: ") and "gate.weight" in error


@pytest.mark.parametrize("function", [lambda o: load_named_state(o, {}), lambda o: change_momentum_form(o, "sum")])
def test_other_optimizers_are_refused(function: Callable[[Any], Any]) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(TypeError, match="expected a LayerWiseOptimizer, found SGD; of DeepSpeed give the engine"):
        function(other)


def pieces_differ(optimizer: Any, state: dict[str, dict[str, Tensor]]) -> int:
    """How many of this rank's tensors are not what they should be."""
    wrong = 0
    for piece in state_pieces(optimizer.core):
        for key, tensor in piece.tensors.items():
            if key == MASTER:
                continue
            value = state[optimizer.core.members[piece.member].name][key]
            wrong += not torch.equal(tensor, value.reshape(-1)[piece.start : piece.stop] if value.ndim else value)
    return wrong


def load_experts() -> int:
    """Every rank is given all experts and has two."""
    model, shared = experts.sharded()
    optimizer = experts.optimizer_for(model, expert_params=["experts.*"], expert_process_group=shared)
    shapes = {name: tuple(param.shape) for name, param in experts.MoE().named_parameters()}
    state = numbers_for(shapes, lambda name: len(shapes[name]) == 2)
    assert load_named_state(optimizer, state) == []
    return pieces_differ(optimizer, state)


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
def test_ranks_take_the_experts_that_they_have(ranks: RankPool) -> None:
    assert ranks.run(load_experts) == [0, 0, 0, 0]


def load_into_bf16() -> tuple[int, bool]:
    """The masters of 16-bit parameters are weights; they stay what they are."""
    model = UnevenLM().to(torch.bfloat16)
    optimizer = optimizer_for(model)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    state = numbers_for(shapes, MATRICES.__contains__)
    before = whole_state(optimizer)
    load_named_state(optimizer, state)
    after = whole_state(optimizer)
    return pieces_differ(optimizer, state), all(
        torch.equal(before[name][MASTER], after[name][MASTER]) for name in after
    )


def test_masters_of_16_bit_parameters_stay(ranks: RankPool) -> None:
    assert ranks.run(load_into_bf16) == [(0, True), (0, True)]
