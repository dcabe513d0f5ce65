"""NVIDIA's optimizers by the names of their registry: on every engine as the class alone, saved and resumed."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.groups.optimizer_classes import EMERGING, class_named
from tests.peers.stand_ins import without_triton
from tests.support.cells import cells
from tests.support.command_line import succeeds
from tests.support.engines import Cell, ExactLM, check, running
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.pages import blocks
from tests.support.plain import shares
from tests.support.ranks import RankPool
from tests.support.references import CLASSES, SECTIONS, Reference

LR = {"lr": 1e-3}
GIVEN: dict[str, list[dict[str, Any]]] = {
    "muon": [{}, {"coefficient_type": "deepseekv4", "num_ns_steps": 10, "weight_decay_method": "independent"}],
    "adaptive_muon": [
        {"momentum": 0.95, "weight_decay": 0.1},
        {"momentum": 0.95, "weight_decay": 0.1, "moment2_method": "namo", "weight_decay_method": "palm"},
    ],
    "soap": [{}, {"use_kl_shampoo": True}],
}
ENGINES = ("plain", "fsdp2", "zero 1", "zero 2", "zero 3")
NAMES = [name.partition(".")[2] for name in EMERGING]
TRAINED = [name for name in NAMES if name != "sinkhorn_muon"]  # which takes doubly stochastic weights only
RULES = [f"{name} {number}" for name in TRAINED for number in range(len(GIVEN.get(name, [{}])))]

with without_triton():
    CLASSES |= {name: class_named(path) for name, path in EMERGING.items()}
    registry: Any = importlib.import_module("emerging_optimizers.registry")
for rule in RULES:
    name, number = rule.split()
    SECTIONS[rule] = {"name": f"emerging_optimizers.{name}", **LR, **GIVEN.get(name, [{}])[int(number)]}


@contextlib.contextmanager
def drawing_alike() -> Iterator[None]:
    """PSGDPro draws numbers, and one process has others for its second matrix than the owner of that has."""
    draw = torch.randn

    def alike(*shape: Any, generator: Any = None, **how: Any) -> Tensor:
        return draw(*shape, generator=generator or torch.Generator().manual_seed(0), **how)

    with mock.patch.object(torch, "randn", alike), mock.patch.object(torch, "randn_like", lambda t: alike(t.shape)):
        yield


def test_every_name_is_of_the_registry() -> None:
    assert {*registry.get_optimizer_name_list()} == {*NAMES}
    assert all(registry.get_optimizer_cls(name) is CLASSES[f"emerging_optimizers.{name}"] for name in NAMES)


@cells(engine=ENGINES, rule=RULES)
@on_ranks(2)
def test_a_class_trains_as_it_does_alone(engine: str, rule: str) -> None:
    with drawing_alike():
        check(0.0, Cell(engine, rule))


def legs(cell: Cell, steps: range, load: str | None, save: str) -> dict[str, Tensor]:
    with drawing_alike(), running(cell, ExactLM(), converted=load is not None and "zero" in cell.engine) as engine:
        if load is not None:
            engine.train(range(7, 8))  # what it had before must not matter
            engine.load(load)
        engine.train(steps)
        engine.save(save)
        return engine.weights()


@cells(engine=ENGINES, rule=RULES)
def test_it_goes_on_on_other_ranks(rank_pools: dict[int, RankPool], tmp_path: Path, engine: str, rule: str) -> None:
    cell, saved, load = Cell(engine, rule, alike=True), tmp_path / "saved", tmp_path / "saved"
    rank_pools[2].run(legs, cell, range(2), None, str(saved))
    if "zero" in engine:
        load = tmp_path / "universal"
        succeeds("convert", saved, load, "--to", "universal", "--json")
    found, *_ = rank_pools[3].run(legs, cell, range(2, 4), str(load), str(tmp_path / "again"))
    (truth,) = rank_pools[1].run(alone, rule)
    assert largest_difference(found, truth) == 0.0


def alone(rule: str) -> dict[str, Tensor]:
    process = Reference(ExactLM(), rule)
    with drawing_alike():
        for step in range(4):
            process.step(shares(step, 1))
    return {name: param.detach().clone() for name, param in process.model.named_parameters()}


def test_its_options_are_listed_with_the_defaults_of_the_class() -> None:
    (listed,) = json.loads(succeeds("rules", "emerging_optimizers.soap", "--json"))["rules"]
    defaults = {option["name"]: json.loads(option["default"]) for option in listed["options"] if option["name"] != "lr"}
    assert listed["name"] == "emerging_optimizers.soap" and listed["state"] == "the class's"
    assert (defaults["use_kl_shampoo"], defaults["betas"], defaults["eps"]) == (False, [0.9, 0.95], 1e-8)


def test_the_pages_entries_train() -> None:
    ((*_, entry),), ((*_, python),) = (blocks("optimizers", language, "emerging") for language in ("json", "python"))
    given = f"optimizer = LayerWiseOptimizer(model, **json.loads({entry!r}))"
    for code in (python, given):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        names: dict[str, Any] = {"model": model, "LayerWiseOptimizer": LayerWiseOptimizer, "json": json}
        exec(code, names)
        optimizer = names["optimizer"]
        model(torch.ones(2, 8)).square().sum().backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


REFUSED = {
    "sinkhorn_muon": ({}, "SinkhornMuon cannot be made with one matrix .* Sinkhorn-normalized"),
    "muon_hyperball": ({"hyperball_radius": 2.0}, "MuonHyperball refuses these arguments: weights change as it is"),
    "muon": ({"nesterow": True}, "unknown key 'nesterow'; did you mean 'nesterov'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        LayerWiseOptimizer(nn.Linear(3, 2), {"name": f"emerging_optimizers.{name}", **LR, **given}, report=False)
