"""Rules on engines, beside what test_equality.py has: more shardings, and what owners keep goes on after a resume."""

from __future__ import annotations

import copy
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import fsdp2
from tests.cells import cells, with_full
from tests.engines import OWNED, ZERO, Cell, verdicts
from tests.fsdp2 import backward, copy_gradients, distribute_like, named, new_model, shard, weights_of
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.rules import CAUTIOUS, ELEMENTWISE, SECTIONS, elementwise_optimizer, matrix_optimizer
from tests.zero import ROWS, engine_for, full_weights, largest_difference, train

RULES = ["soap", "adamuon", "shampoo", "a class"]
Pools = dict[int, RankPool]
# DeepSpeed's CPUAdam rounds otherwise in its loop over vectors than for what is left at the end, and where that is
# depends on how parameters are cut: a last bit of fp32 in each of the steps, of at most 0.003.
CPU_ADAM = {"name": "torch_optimizer", "class": "deepspeed.ops.adam.DeepSpeedCPUAdam", "lr": 3e-3, "weight_decay": 0.1}
BUILD = "import torch; from deepspeed.ops.adam import DeepSpeedCPUAdam as A; A([torch.nn.Parameter(torch.zeros(1))])"


def assert_exact(ranks: RankPool, *of: Cell, limit: float = 0.0) -> None:
    for cell, results in zip(of, zip(*ranks.run(verdicts, *of))):
        assert results[0].difference <= limit and len({result.digest for result in results}) == 1, cell


def differ_on_fsdp2(sharding: str, rule: str) -> float:
    """One process is given the whole gradients that FSDP2 has reduced."""
    sharded, single = shard(sharding, "fp32"), new_model(sharding, "fp32")
    optimizer, theirs = fsdp2_optimizer(sharded.model, rule), dict(single.named_parameters())
    others = [param for name, param in theirs.items() if name not in MATRICES]
    references = [
        matrix_optimizer([theirs[name] for name in MATRICES], SECTIONS[rule]),
        elementwise_optimizer(others, ELEMENTWISE["adamw"]),
    ]
    for step in range(3):
        backward(sharded, step)
        copy_gradients(sharded.model, single)
        for one in (*references, optimizer):
            one.step()
            one.zero_grad()
    return largest_difference(weights_of(sharded.model), single)


@cells(ranks=[4], sharding=["hybrid", "columns", "tensor parallel"], rule=["sum, coupled", "normuon", "soap"])
def test_rules_on_every_sharding_of_fsdp2(ranks: RankPool, sharding: str, rule: str) -> None:
    assert set(ranks.run(differ_on_fsdp2, sharding, rule)) == {0.0}


def test_rules_attached_to_fsdp2(ranks: RankPool) -> None:
    rules = ("sum, coupled", "adamuon", "soap")
    assert_exact(ranks, *(Cell("fsdp2", rule, options={"attach": True}) for rule in rules))


@cells(ranks=[1])
def test_every_rule_on_one_rank(ranks: RankPool) -> None:
    assert_exact(ranks, *(Cell("plain", rule) for rule in SECTIONS))


def test_elementwise_rules_in_several_sub_groups_of_zero_3(ranks: RankPool) -> None:
    """DeepSpeed steps each by itself."""
    rules, zero = ("counts in its group", "lion", *CAUTIOUS), {"sub_group_size": 1000}
    assert_exact(ranks, *(Cell("zero 3", elementwise=rule, zero=zero) for rule in rules))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> str:
    """Where DeepSpeed's compiled op is; kept for the next run."""
    if not (shutil.which("g++") and shutil.which("ninja")):
        pytest.skip("needs g++ and ninja: DeepSpeed compiles CPUAdam")
    folder = Path(request.config.cache.mkdir("torch_extensions"))
    for lock in folder.rglob("lock"):  # of a run that was killed; torch would wait for it for ever
        lock.unlink()
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", BUILD]
    built = subprocess.run(
        command, env=environment, timeout=1800, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert built.returncode == 0, f"DeepSpeed could not compile CPUAdam:\n{built.stdout}"
    return str(folder)


def with_cpu_adam(folder: str, engine: str) -> float:
    before, os.environ["TORCH_EXTENSIONS_DIR"] = os.environ["TORCH_EXTENSIONS_DIR"], folder
    ELEMENTWISE["cpu adam"] = CPU_ADAM
    try:
        from tests import engines

        engines.RULES["cpu adam"] = CPU_ADAM
        return verdicts(Cell(engine, elementwise="cpu adam"))[0].difference
    finally:
        os.environ["TORCH_EXTENSIONS_DIR"] = before
        del ELEMENTWISE["cpu adam"], engines.RULES["cpu adam"]


@pytest.mark.full
@pytest.mark.parametrize("engine", [*ZERO, "plain", OWNED[0]])
def test_cpu_adam_trains_as_on_one_process(ranks: RankPool, compiled: str, engine: str) -> None:
    assert max(ranks.run(with_cpu_adam, compiled, engine)) <= 1e-6


# Owned storage: any number of ranks, any layout


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """The same on every rank, and few bits wide, so that means over any number of ranks are exact."""
    generator = torch.Generator().manual_seed(step)
    params = dict(model.named_parameters())
    return {
        name: (torch.randn(params[name].shape, generator=generator) * 2**10).round() / 2**10 for name in sorted(params)
    }


def optimizer_on(model: nn.Module, rule: str, **options: Any) -> LayerWiseOptimizer:
    settings = {"elementwise": ELEMENTWISE["adamw"], "bucket_mb": 0.004, "report": False, **options}
    return LayerWiseOptimizer(model, SECTIONS[rule], **settings)


def train_owned(model: nn.Module, optimizer: LayerWiseOptimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        params, grads = dict(model.named_parameters()), gradients(model, step)
        sum((params[name] * grad).sum() for name, grad in grads.items()).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def part_of_a_run(folder: str, rule: str, steps: range, **options: Any) -> dict[str, Tensor]:
    """Resume where steps before these ended, train them, and save."""
    model = UnevenLM(seed=0 if steps.start == 0 else 99)
    optimizer = optimizer_on(model, rule, **options)
    if steps.start:
        model.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
        optimizer.load_state_dict_from(f"{folder}/optimizer")
    found = train_owned(model, optimizer, steps)
    if folder:
        optimizer.save_state_dict(f"{folder}/optimizer")
        if dist.get_rank() == 0:
            torch.save(found, f"{folder}/model.pt")
    return found


@pytest.mark.parametrize("rule", RULES)
def test_owned_storage_resumes_on_other_ranks_and_layouts(rank_pools: Pools, tmp_path: Path, rule: str) -> None:
    for number, (ranks, layout) in enumerate([(2, "padded"), (3, "compact"), (1, "padded"), (4, "compact")]):
        steps = range(2 * number, 2 * number + 2)
        found = rank_pools[ranks].run(part_of_a_run, str(tmp_path), rule, steps, layout=layout)[0]
    assert equal(found, rank_pools[4].run(part_of_a_run, "", rule, range(8))[0])


def continue_from_state_dict(rule: str) -> tuple[bool, int]:
    """This rank's own state_dict, loaded into another optimizer, goes on; and what the report counts of its state."""
    model, other, file = UnevenLM(), UnevenLM(seed=5), io.BytesIO()
    optimizer, again = optimizer_on(model, rule), optimizer_on(other, rule)
    before = optimizer.memory_report()[dist.get_rank()].state
    other.load_state_dict(train_owned(model, optimizer, range(3)))
    grown = optimizer.memory_report()[dist.get_rank()].state - before
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    return equal(train_owned(model, optimizer, range(3, 6)), train_owned(other, again, range(3, 6))), grown


@pytest.mark.parametrize("rule", RULES)
def test_owned_state_dicts_go_on_and_the_memory_report_counts_them(ranks: RankPool, rule: str) -> None:
    found = ranks.run(continue_from_state_dict, rule)
    assert all(same for same, _ in found)
    if rule == "soap":  # two moments of the matrix, and a statistic and a basis of every side
        shapes = [(63, 24), (41, 63), (24, 41), (2, 5)]
        least = sum(4 * (2 * m * n + 2 * (m * m + n * n)) for m, n in shapes)
        assert least <= sum(grown for _, grown in found) <= least * 1.01


# DeepSpeed


def ds_config(stage: int, rule: str, **options: Any) -> dict[str, Any]:
    params = {"matrix": SECTIONS[rule], "elementwise": ELEMENTWISE["adamw"], "report": False, **options}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
        "optimizer": {"type": "LayerWise", "params": params},
        "steps_per_print": 1_000_000,
    }


def run_engine(folder: str, settings: dict[str, Any], load: bool) -> dict[str, Tensor]:
    """Train and save, or load into a fresh engine; and train on."""
    with engine_for(settings, UnevenLM(7 if load else 0)) as engine:
        if load:
            engine.load_checkpoint(folder, tag="there")
        else:
            train(engine, 3, same_rows=True)
            engine.save_checkpoint(folder, tag="there")
        train(engine, range(3, 6), same_rows=True)
        return full_weights(engine)


SMALL, OWNED_STORAGE = {"bucket_numel": 2000}, {"storage": "owned"}
RESUMES: list[tuple[int, str, dict[str, Any], dict[str, Any], int]] = [  # stage, rule, options before and after, ranks
    *((stage, rule, SMALL, SMALL, 2) for stage, rule in enumerate(RULES)),
    (3, "soap", SMALL, SMALL, 2),
    (2, "soap", {"policy": "stay"}, {"policy": "balance"}, 2),  # which brings what owners keep to others
    (0, "soap", OWNED_STORAGE, OWNED_STORAGE, 2),
    (2, "adamuon", OWNED_STORAGE, OWNED_STORAGE, 2),
    (0, "soap", {}, {}, 4),
    (0, "adamuon", {}, {}, 4),
]
MORE_RESUMES = [
    *((stage, rule, SMALL, SMALL, 2) for stage in range(4) for rule in RULES),
    *((stage, rule, OWNED_STORAGE, OWNED_STORAGE, 2) for stage in (0, 2) for rule in ("soap", "adamuon")),
]


@pytest.mark.parametrize(
    ("stage", "rule", "saved", "loaded", "after"),
    with_full(RESUMES, MORE_RESUMES),
)
def test_deepspeed_resumes(
    rank_pools: Pools, tmp_path: Path, stage: int, rule: str, saved: dict[str, Any], loaded: dict[str, Any], after: int
) -> None:
    expected = rank_pools[2].run(run_engine, str(tmp_path), ds_config(stage, rule, **saved), False)[0]
    for found in rank_pools[after].run(run_engine, str(tmp_path), ds_config(stage, rule, **loaded), True):
        assert equal(found, expected)


# FSDP2: torch.distributed.checkpoint, any number of ranks and any sharding


def fsdp2_optimizer(model: nn.Module, rule: str) -> Any:
    options = {"elementwise": ELEMENTWISE["adamw"], "report": False, "bucket_matrices": 2}
    return fsdp2.LayerWiseOptimizer(model, SECTIONS[rule], **options)


def train_fsdp2(model: nn.Module, optimizer: Any, steps: range) -> dict[str, Tensor]:
    for step in steps:
        grads, params = gradients(model, step), dict(named(model))
        for name, param in params.items():
            kept = {"run_check": False, "shape": param.shape, "stride": param.stride()}
            part = distribute_like(grads[name], param)
            param.grad = DTensor.from_local(part, param.device_mesh, param.placements, **kept)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def run_fsdp2(folder: str, sharding: str, rule: str, kind: str, load: bool) -> dict[str, Any]:
    """Train and save, or load into another model; and train on. Its weights, and the whole state."""
    model = shard(sharding, "fp32").model
    optimizer = fsdp2_optimizer(model, rule)
    options = dcp_state.StateDictOptions(
        flatten_optimizer_state_dict="flat" in kind, full_state_dict="full" in kind, cpu_offload="full" in kind
    )
    if load:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    else:
        train_fsdp2(model, optimizer, range(3))
    if load and "full" in kind:
        state = torch.load(f"{folder}/full.pt")
        options = dcp_state.StateDictOptions(
            flatten_optimizer_state_dict="flat" in kind, full_state_dict=kind == "full"
        )
    else:
        parts = dcp_state.get_model_state_dict, dcp_state.get_optimizer_state_dict
        state = {"model": parts[0](model, options=options), "optimizer": parts[1](model, optimizer, options=options)}
    if not load and "full" in kind:
        if dist.get_rank() == 0:
            torch.save(state, f"{folder}/full.pt")
        dist.barrier()
    elif "full" not in kind:
        (dcp.load if load else dcp.save)(state, checkpoint_id=folder)
    if load:
        whole = dcp_state.StateDictOptions(full_state_dict="full" in kind)
        dcp_state.set_model_state_dict(model, state["model"], options=whole)
        dcp_state.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    weights = train_fsdp2(model, optimizer, range(3, 5))
    state = optimizer.state_dict()["state"]
    found = {
        f"{index}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for index in state
        for key, value in state[index].items()
        if isinstance(value, Tensor)
    }
    return {**weights, **found}


@cells(
    rule=RULES,
    kind=["nested", "flat", "full", "flat full"],
    way=[
        (2, "rows", 3, "rows"),
        (4, "hybrid", 2, "rows"),
        (2, "columns", 4, "tensor parallel"),
        (3, "rows", 1, "rows"),
    ],
)
def test_fsdp2_resumes_on_other_ranks_and_shardings(
    rank_pools: Pools, tmp_path: Path, rule: str, kind: str, way: tuple[int, str, int, str]
) -> None:
    before, sharding, after, other = way
    expected = rank_pools[before].run(run_fsdp2, str(tmp_path), sharding, rule, kind, False)[0]
    for found in rank_pools[after].run(run_fsdp2, str(tmp_path), other, rule, kind, True):
        assert equal(found, expected)


def saved_before_a_step(rule: str) -> bool:
    """A checkpoint of an optimizer that has not stepped is that of a fresh one, whatever was tried to know its form."""
    models = [shard("rows", "fp32").model for _ in range(3)]
    saved, loaded, untouched = (fsdp2_optimizer(model, rule) for model in models)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    steps = [train_fsdp2(model, by, range(2)) for model, by in zip(models, (saved, loaded, untouched))]
    return all(equal(weights, steps[2]) for weights in steps)


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_before_the_first_step_is_a_fresh_one(ranks: RankPool, rule: str) -> None:
    assert all(ranks.run(saved_before_a_step, rule))
