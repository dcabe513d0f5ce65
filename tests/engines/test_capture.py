"""The option ``capture``: what a rule's batch uses stays where it is, and no more than that is said to be read."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.engines import report
from lwopt_backend.groups import param_groups
from lwopt_backend.groups.registry import MATRIX_RULES
from lwopt_backend.rules import OwnerStateRule
from lwopt_backend.rules.muon import Muon
from lwopt_backend.rules.newton_schulz import IMMEDIATE
from lwopt_backend.rules.second_moment import NorMuon
from lwopt_backend.runtime.capture import Capture, reads_of
from tests.engines.fsdp2.test_training import Reads
from tests.support.cells import cells
from tests.support.engines import ZERO, Cell, ExactLM, running
from tests.support.on_ranks import on_ranks
from tests.support.references import SECTIONS, random, rule_of

# Options are compared and parameters without a gradient are told in some of the steps: 0, 8 and 16, and 1 and 11.
STEPS, COMPARED_EVERY, TOLD_AFTER = 20, 8, (1, 11)


class Watched:
    """By step: where that lies which the rule of each batch uses, and how often the host reads."""

    def __init__(self, patch: pytest.MonkeyPatch, optimizer: Any) -> None:
        self.places: list[list[int]] = []
        self.reads: list[int] = []
        run, with_state, step = Capture.run, NorMuon.transform_with, optimizer.step

        def stepping(*args: Any) -> Any:
            with Reads(optimizer) as seen:
                found = step(*args)
            self.reads[-1] += seen.count
            return found

        def transforming(rule: Any, given: Tensor, state: dict[str, Tensor]) -> Tensor:
            return with_state(rule, self.note(given), {key: self.note(tensor) for key, tensor in state.items()})

        patch.setattr(Capture, "run", lambda *args: self.note(run(*args)))
        patch.setattr(NorMuon, "transform_with", transforming)
        patch.setattr(optimizer, "step", stepping)

    def note(self, tensor: Tensor) -> Tensor:
        self.places[-1].append(tensor.data_ptr())
        return tensor


@pytest.mark.on_gloo  # that transport's own operations would be seen
@cells(ranks=[2], engine=["plain", *ZERO, "fsdp2"])
@on_ranks()
def test_what_a_batch_uses_stays_where_it_is_and_no_host_reads(engine: str) -> None:
    """As on an accelerator: a rule's input and output, its owner state, and the state that is sharded. Where steps may
    be skipped, the host reads whether they are."""
    IMMEDIATE.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(param_groups, "COMPARED_EVERY", COMPARED_EVERY)
            patch.setattr(report, "TOLD_AFTER", TOLD_AFTER)
            with running(Cell(engine, "normuon", options={"capture": True}), ExactLM()) as run:
                ours = run.optimizer.optimizer if engine in ZERO[1:] else run.optimizer
                watched = Watched(patch, ours)
                for number in range(STEPS):
                    watched.places.append([])
                    watched.reads.append(0)
                    run.train(range(number % 3, number % 3 + 1))
                    for state in ours.state.values():
                        for tensor in state.values():
                            watched.note(tensor)
    finally:
        IMMEDIATE.add("cpu")
    assert watched.places[2] and all(step == watched.places[2] for step in watched.places[3:])
    if engine in (*ZERO[1:], "fsdp2"):
        assert not any(count for step, count in enumerate(watched.reads) if step % COMPARED_EVERY)


class Scaled(Muon):
    transform_reads = ("lr",)


def test_a_rate_that_a_transform_reads_is_a_number_in_its_graph() -> None:
    """A tensor that is changed in place is captured again."""
    rule, given = Scaled(lr=torch.tensor(1.0)), torch.ones(2, 2)  # type: ignore[arg-type]
    before = reads_of(rule, {}, given)
    assert reads_of(rule, {}, given) == before
    rule.lr *= 3
    assert reads_of(rule, {}, given) != before


def test_other_batches_keep_no_more_than_two_buffers() -> None:
    """Batches of ever other matrices keep no more than two buffers each."""
    capture, rule = Capture(8), rule_of("muon")
    for begin in range(40):
        for _ in range(4):
            capture.run(rule, (begin % 4, begin + 4), {}, rule.transform, random((2, 8, 8), begin))
    assert 0 < sum(len(atoms) for atoms in capture._batches) <= 8


@pytest.mark.parametrize(
    "section", [name for name, section in SECTIONS.items() if "muon" in section["name"] or section["name"] == "adamh"]
)
def test_a_transform_reads_what_its_rule_says(section: str) -> None:
    options = dict(SECTIONS[section])
    rule, read = rule_of(options.pop("name"), **options), set[str]()
    said = rule.transform_reads
    state = rule.new_owner_state((16, 24), torch.device("cpu")) if isinstance(rule, OwnerStateRule) else {}

    def noting(rule: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(rule, name)

    rule.__class__ = type("Noted", (type(rule),), {"__getattribute__": noting})  # type: ignore[assignment]
    given = random((16, 24), 0)
    rule.transform_with(given, state) if isinstance(rule, OwnerStateRule) else rule.transform(given)
    assert read & {*vars(rule)} <= {*(said or ())}


class Signs(Muon):
    """It reads what Muon does not."""

    def transform(self, matrices: Tensor) -> Tensor:
        return matrices.sign() * self.momentum


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        ({"name": "soap"}, "'soap', which steps on the host"),
        ({"name": "torch_optimizer", "class": "torch.optim.Muon"}, "which steps on the host"),
        ({"name": "signs", "lr": 0.02}, "'signs', which has no transform_reads"),
    ],
)
def test_rules_that_cannot_be_captured_are_refused_by_name(
    matrix: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MATRIX_RULES, "signs", dataclasses.replace(MATRIX_RULES["muon"], build=Signs))
    with pytest.raises(
        ValueError, match=f"capture: expected rules that can be captured, found .*{said}.*; leave capture out"
    ):
        LayerWiseOptimizer(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), matrix=matrix, elementwise_lr=0.1, capture=True
        )
