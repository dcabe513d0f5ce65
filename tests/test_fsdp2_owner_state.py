"""State that only owners hold: stepped as on one process, complete in every checkpoint, loaded by other owners."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from lwopt_backend import registry
from lwopt_backend.rule_options import MuonOptions
from lwopt_backend.rules import Muon, OwnerStateRule
from tests import test_fsdp2_checkpoint as checkpoint
from tests.fsdp2 import Sharded, backward, layer_wise, named, shard, weights_of
from tests.ranks import RankPool


@dataclass
class Whitened(OwnerStateRule, Muon):
    """A rule with factors as SOAP has them: of two shapes, and one number, none of them the parameter's."""

    def new_owner_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Tensor]:
        rows, columns = shape
        return {
            "left": torch.zeros(rows, rows, device=device),
            "right": torch.zeros(columns, columns, device=device),
            "diagonal": torch.zeros(rows, device=device),
            "count": torch.zeros(1, device=device),
        }

    def transform_with(self, matrix: Tensor, state: dict[str, Tensor]) -> Tensor:
        matrix = matrix.float()
        state["count"] += 1
        state["left"].lerp_(matrix @ matrix.mT, 0.5)
        state["right"].lerp_(matrix.mT @ matrix, 0.5)
        state["diagonal"].lerp_(matrix.square().sum(1), 0.5)
        mixed = state["left"] @ matrix @ state["right"] / (state["diagonal"].sum() + 1e-8) / state["count"]
        return mixed / (mixed.norm() + 1e-8)


KEYS = {"count", "diagonal", "left", "right"}


def build(**options: Any) -> Whitened:
    """What travels keeps the dtype in which this rule computes."""
    return Whitened(**{**options, "ns_dtype": "float32"})


def use_the_rule() -> None:
    registry.MATRIX_RULES["muon"] = replace(registry.MATRIX_RULES["muon"], build=build)


def use_muon() -> None:
    registry.MATRIX_RULES["muon"] = replace(registry.MATRIX_RULES["muon"], build=Muon)


class OneProcess:
    """The rule on whole matrices."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = {n: w for n, w in weights_of(model).items() if n in checkpoint_matrices()}
        self.momentum = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.rule = build(**MuonOptions(lr=0.02, weight_decay=0.1).model_dump())
        self.state = {n: self.rule.new_owner_state(tuple(w.shape), w.device) for n, w in self.weights.items()}

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            state = {"momentum_buffer": self.momentum[name]}
            self.rule.accumulate(grads[name], state)
            direction = self.rule.direction(grads[name], state)
            weight.mul_(1 - 0.02 * 0.1)
            update = self.rule.transform_with(direction, self.state[name])
            weight.add_(update, alpha=-0.02 * self.rule.scale(tuple(weight.shape)))


def checkpoint_matrices() -> set[str]:
    return {"layers.0.weight", "layers.2.weight", "layers.5.weight", "gate.weight"}


def train_beside_one_process(sharding: str, attach: bool) -> float:
    use_the_rule()
    try:
        sharded = shard(sharding, "fp32")
        optimizer, single = layer_wise(sharded.model), OneProcess(sharded.model)
        if attach:
            optimizer.attach(sharded.model)
        for step in range(4):
            backward(sharded, step)
            single.step(
                {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in named(sharded.model)}
            )
            optimizer.step()
            optimizer.zero_grad()
        saved = optimizer.state_dict()
        found = weights_of(sharded.model)
        differences = [float((found[n] - w).abs().max()) for n, w in single.weights.items()]
        for index, name in enumerate(name for group in optimizer._names for name in group):
            for key in sorted(KEYS) if name in single.state else ():
                value = saved["state"][index][key]
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                differences.append(float((whole - single.state[name][key]).abs().max()))
        return max(differences)
    finally:
        use_muon()


@pytest.mark.parametrize("ranks", [3, 4], indirect=True, ids=["3ranks", "4ranks"])
@pytest.mark.parametrize("attach", [False, True], ids=["", "attach"])
def test_rows(ranks: RankPool, attach: bool) -> None:
    assert ranks.run(train_beside_one_process, "rows", attach) == [0.0] * ranks.world_size


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
@pytest.mark.parametrize("sharding", ["hybrid", "columns", "tensor parallel", "several roots", "ignored_params"])
def test_every_sharding(ranks: RankPool, sharding: str) -> None:
    assert ranks.run(train_beside_one_process, sharding, False) == [0.0] * 4


def with_the_rule(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` with the rule in Muon's place."""
    use_the_rule()
    try:
        return function(*args)
    finally:
        use_muon()


WAYS = [(2, "rows", 3, "rows"), (4, "hybrid", 2, "rows"), (2, "columns", 4, "tensor parallel"), (3, "rows", 1, "rows")]


@pytest.mark.parametrize("kind", ["nested", "flat", "full", "flat full"])
@pytest.mark.parametrize(("before", "sharding", "after", "other"), WAYS, ids=str)
def test_checkpoints_move_it_to_other_owners(
    rank_pools: dict[int, RankPool], before: int, sharding: str, after: int, other: str, kind: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        expected = checkpoint.pool(rank_pools, before).run(with_the_rule, checkpoint.save, folder, sharding, kind)[0]
        for answer in checkpoint.pool(rank_pools, after).run(with_the_rule, checkpoint.load, folder, other, kind):
            checkpoint.assert_equal(answer, expected)


def full_state() -> dict[str, set[str]]:
    use_the_rule()
    try:
        sharded: Sharded = shard("rows", "fp32")
        optimizer = layer_wise(sharded.model)
        wanted = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(sharded.model, optimizer, options=wanted)
        return {name: set(entry) for name, entry in state.get("state", {}).items()}  # rank 0 has it
    finally:
        use_muon()


def test_a_full_state_dict_is_complete(ranks: RankPool) -> None:
    first, _ = ranks.run(full_state)
    assert {name for name, keys in first.items() if keys == KEYS | {"momentum_buffer"}} == checkpoint_matrices()
