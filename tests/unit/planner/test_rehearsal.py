"""A rehearsal: every engine's own step does what its plan says, on a GPU that is not there, and faults show."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from benchmarks.rehearsal.__main__ import run
from benchmarks.rehearsal.step import NEEDED, Rehearsal, rehearse, rehearse_share
from lwopt_backend.planner.study import Study
from lwopt_backend.rules.muon import Muon
from lwopt_backend.runtime.buffers import BucketBuffers, PartsPending
from tests.support.planner_shapes import MODEL, SMALL, study_in

pytestmark = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="a rehearsal needs torch 2.13")
EXPERTS = [[f"layers.{i}.experts.{e}.up", [96, 64]] for i in range(3) for e in range(4)]
HUGE = [["up", [2**17, 2**16]], ["down", [2**16, 2**17]], ["scale", [2**17]]]  # 32 GiB each in fp32


@pytest.fixture
def studied(tmp_path: Path) -> Callable[..., Study]:
    def plan(engine: str, ranks: int = 4, shapes: list[Any] = MODEL, spread: Any = (), **options: Any) -> Study:
        return study_in(tmp_path / "shapes.json", engine, ranks, options, shapes=shapes, spread=spread)

    return plan


def figures(found: Rehearsal) -> dict[str, int]:
    return {figure.what: figure.rehearsed for figure in found.figures}


INT8 = {"momentum_dtype": "int8"}
MUONH = {"name": "muon", "hyperball": True, "weight_decay": 0.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "plain, fp32": ("plain", {"dtype": torch.float32, **SMALL}),
    "plain, padded": ("plain", {"layout": "padded", **SMALL}),
    "plain, compact": ("plain", {"layout": "compact", "grad_dtype": "float32", **SMALL}),
    "plain, in pairs": ("plain", {"group_size": 2, **SMALL}),
    "plain, each by itself": ("plain", {"group_size": 1}),
    "plain, all gradients everywhere": ("plain", {"keep_full_grads": True, **SMALL}),
    "plain, soap": ("plain", {"matrix": "soap"}),
    "fsdp2": ("fsdp2", {}),
    "fsdp2, small buckets": ("fsdp2", {"bucket_matrices": 2}),
    "fsdp2, in pairs": ("fsdp2", {"group_size": 2, "share_copies": True}),
    "fsdp2, each pair by itself": ("fsdp2", {"group_size": 2, "share_copies": False}),
    "fsdp2, bf16": ("fsdp2", {"dtype": torch.bfloat16, "state_dtype": "float32"}),
    "fsdp2, normuon": ("fsdp2", {"matrix": "normuon"}),
    "fsdp2, muonh": ("fsdp2", {"matrix": MUONH, "bucket_matrices": 2}),
    "plain, int8": ("plain", INT8),
    "fsdp2, int8": ("fsdp2", INT8),
    "zero2, int8": ("zero2", {"policy": "balance", **INT8}),
    "zero3, int8": ("zero3", INT8),
    "fsdp2, soap": ("fsdp2", {"matrix": "soap"}),
    "fsdp2, shampoo": ("fsdp2", {"matrix": "shampoo"}),
    "zero1": ("zero1", {"policy": "balance", "bucket_numel": 9000}),
    "zero2": ("zero2", {}),
    "zero2, normuon": ("zero2", {"policy": "balance", "matrix": "normuon"}),
    "zero3": ("zero3", {"bucket_numel": 9000}),
    "zero3, adamh": ("zero3", {"matrix": "adamh", "bucket_numel": 9000}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_every_engine_does_what_its_plan_says(studied: Callable[..., Study], case: str) -> None:
    engine, options = CASES[case]
    for rank in (0, 3):
        (found,) = rehearse(studied(engine, **options), rank, steps=2)
        assert found.problems == ()
        assert found.rank == rank and found.ranks == 4


LLAMA = [
    [f"layers.{i}.{name}", shape]
    for i in range(4)
    for name, shape in {
        "q": [4096] * 2,
        "kv": [2048, 4096],
        "o": [4096] * 2,
        "up": [14336, 4096],
        "down": [4096, 14336],
    }.items()
]


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_step_needs_the_memory_that_is_planned(studied: Callable[..., Study], engine: str) -> None:
    """The largest phase of a step: of matrices of real sizes, whose norms and counters are nothing beside them."""
    study = studied(engine, 4, LLAMA)
    found = [rehearse(study, rank, steps=2)[0] for rank in range(4)]
    needs = [figure for each in found for figure in each.figures if figure.what == NEEDED]
    most, planned = (max(getattr(each, of) for each in needs) for of in ("rehearsed", "planned"))
    assert len(needs) == 4 and most == pytest.approx(planned, rel=0.05)


def test_a_rank_of_many_with_matrices_that_fit_no_machine(studied: Callable[..., Study]) -> None:
    for engine in ("plain", "fsdp2"):
        study = studied(engine, 1024, HUGE)
        (found,) = rehearse(study, study.worst.loads().index(max(study.worst.loads())))
        assert found.problems == () and figures(found)[NEEDED] > 2**35, "bytes that nobody has allocated"


def test_stages_and_parts_are_rehearsed_in_turn(studied: Callable[..., Study]) -> None:
    """Stages, and parts of layers and experts, are rehearsed one after another."""
    found = rehearse(studied("fsdp2", 8, MODEL + EXPERTS, spread=(1, 1, 4)), 5)
    assert [(each.name, each.rank, each.ranks, each.problems) for each in found] == [
        ("dense", 5, 8, ()),
        ("experts", 1, 2, ()),
    ]
    (found_there,) = rehearse(studied("fsdp2", 8, spread=(2, 2, 1)), 7)
    assert (found_there.rank, found_there.ranks, found_there.problems) == (1, 2, ())


# Faults, each of which a rehearsal must show.


def broken(monkeypatch: pytest.MonkeyPatch, how: Callable[[Tensor], Tensor]) -> None:
    transform = Muon.transform
    monkeypatch.setattr(Muon, "transform", lambda rule, matrix: transform(rule, how(matrix)))


ENGINES = ("plain", "fsdp2", "zero2")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_value_that_is_read_from_the_gpu_is_found(
    studied: Callable[..., Study], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studied(engine)
    broken(monkeypatch, lambda matrix: matrix * (1 + matrix.norm().item()))
    (found,) = rehearse(study, 0)
    assert [problem.partition(",")[0] for problem in found.problems] == [
        "waits for the GPU: read at runtime/step.py: transform"
    ]
    monkeypatch.undo()
    broken(monkeypatch, lambda matrix: matrix.cpu().to(matrix.device))
    (found,) = rehearse(study, 0)
    assert [problem.partition(" at ")[0] for problem in found.problems] == [
        "waits for the GPU: copy to the CPU",
        "waits for the GPU: copy to the GPU",
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_on_the_cpu_among_those_on_the_gpu_is_found(
    studied: Callable[..., Study], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = studied(engine)
    broken(monkeypatch, lambda matrix: matrix + torch.ones(matrix.shape, dtype=matrix.dtype))
    (found,) = rehearse(study, 0)
    (problem,) = found.problems
    assert problem.startswith("step 1 of 1: ") and "same device" in problem and "runtime/step.py" in problem


def test_memory_that_nobody_frees_is_found(studied: Callable[..., Study], monkeypatch: pytest.MonkeyPatch) -> None:
    study, kept = studied("plain"), []
    broken(monkeypatch, lambda matrix: kept.append(matrix.clone()) or matrix)  # type: ignore[func-returns-value]
    (found,) = rehearse(study, 0)
    (problem,) = found.problems
    assert "bytes are kept that nobody names" in problem


def test_a_collective_that_the_plan_does_not_know_is_found(
    studied: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, send = studied("plain"), BucketBuffers.send_values

    def twice(bucket: BucketBuffers) -> PartsPending:
        bucket.receive_values(send(bucket))
        return send(bucket)

    monkeypatch.setattr(BucketBuffers, "send_values", twice)
    (found,) = rehearse(study, 0)
    assert [problem.partition(":")[0] for problem in found.problems] == ["all-gathers", "sent"]
    assert "a difference of +2 calls" in found.problems[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_that_differs_from_what_the_engine_does_is_found(studied: Callable[..., Study], engine: str) -> None:
    stage, other = studied(engine).worst, studied(engine, shapes=MODEL[:-1]).worst
    planned, theirs = stage.planned[0], other.planned[0]
    more = tuple(replace(memory, state=memory.state + 4) for memory in planned.part.memory)
    wrong = {
        "plan digest": replace(planned, lines=theirs.lines),
        "matrices updated": replace(planned, part=replace(planned.part, placed=_moved(planned.part.placed))),
        "kept: state": replace(planned, part=replace(planned.part, memory=more)),
    }
    for what, false in wrong.items():
        found = rehearse_share(stage, false, 0, 1)
        assert any(problem.startswith(what) for problem in found.problems), (what, found.problems)


def _moved(placed: Any) -> Any:
    """The first matrix with another owner, to or from rank 0."""
    first, *others = placed.owners
    return replace(placed, owners=(0 if first else 1, *others))


# The command.


def ends(words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run(words.split())
    return int(ended.value.code or 0)


def test_rehearsal_ends_with_1_if_the_plan_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says what a step did, and ends with 1 if the plan says otherwise."""
    (tmp_path / "shapes.json").write_text(json.dumps(MODEL))
    words = f"--shapes {tmp_path}/shapes.json --world-size 4 --engine fsdp2"
    assert ends(f"{words} --rank 2") == 0
    printed = capsys.readouterr().out
    assert "rank 2 of the 4 that share them" in printed and "all-to-alls" in printed
    broken(monkeypatch, lambda matrix: matrix * matrix.norm().item())
    assert ends(f"{words} --json") == 1
    found, said = capsys.readouterr()
    (problem,) = json.loads(found)["rehearsals"][0]["problems"]
    assert problem.startswith("waits for the GPU: read at") and f"error: dense: {problem}" in said


def test_what_cannot_be_rehearsed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps(MODEL + EXPERTS))
    for options, said in {
        "--rank 4": "--rank: expected 0 to 3, found 4",
        "--cluster cpu": "--cluster cpu plans for CPUs",
        "--ep 2": "plain PyTorch with --ep",
        "--option capture=true": "leave capture out",
    }.items():
        assert ends(f"--shapes {tmp_path}/shapes.json --world-size 4 {options}") == 2
        assert said in " ".join(capsys.readouterr().err.split())
