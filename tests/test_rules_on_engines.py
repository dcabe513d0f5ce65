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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import fsdp2
from tests.cells import cells, with_full
from tests.engines import OWNED, RULES, ZERO, Cell, verdicts
from tests.fsdp2 import backward, copy_gradients, distribute_like, named, new_model, shard, weights_of, whole
from tests.models import MATRICES, UnevenLM
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.rules import CAUTIOUS, ELEMENTWISE, SECTIONS, elementwise_optimizer, matrix_optimizer
from tests.zero import ROWS, engine_for, full_weights, largest_difference, train

OWNER_RULES = ["soap", "adamuon", "shampoo", "a class"]
Pools = dict[int, RankPool]
# DeepSpeed's CPUAdam rounds otherwise in its loop over vectors than for what is left at the end, and where that is
# depends on how parameters are cut: a last bit of fp32 in each of the steps, of at most 0.003.
CPU_ADAM = {"name": "torch_optimizer", "class": "deepspeed.ops.adam.DeepSpeedCPUAdam", "lr": 3e-3, "weight_decay": 0.1}
BUILD = "import torch; from deepspeed.ops.adam import DeepSpeedCPUAdam as A; A([torch.nn.Parameter(torch.zeros(1))])"


def assert_exact(ranks: RankPool, *of: Cell, limit: float = 0.0) -> None:
    for cell, results in zip(of, zip(*ranks.run(verdicts, *of))):
        assert results[0].difference <= limit and len({result.digest for result in results}) == 1, cell


@cells(ranks=[4], sharding=["hybrid", "columns", "tensor parallel"], rule=["sum, coupled", "normuon", "soap"])
@on_ranks()
def test_rules_on_every_sharding_of_fsdp2(sharding: str, rule: str) -> None:
    """One process is given the whole gradients that FSDP2 has reduced."""
    sharded, single = shard(sharding, "fp32"), new_model(sharding, "fp32")
    theirs = dict(single.named_parameters())
    matrices = [theirs.pop(name) for name in MATRICES]
    adamw = elementwise_optimizer(list(theirs.values()), ELEMENTWISE["adamw"])
    optimizers = matrix_optimizer(matrices, SECTIONS[rule]), adamw, fsdp2_optimizer(sharded.model, rule)
    for step in range(3):
        backward(sharded, step)
        copy_gradients(sharded.model, single)
        for one in optimizers:
            one.step()
            one.zero_grad()
    assert largest_difference(weights_of(sharded.model), single) == 0.0


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
    built = subprocess.run([sys.executable, "-c", BUILD], env=environment, timeout=1800, capture_output=True, text=True)
    assert built.returncode == 0, f"DeepSpeed could not compile CPUAdam:\n{built.stdout}{built.stderr}"
    return str(folder)


@pytest.mark.full
@pytest.mark.parametrize("engine", [*ZERO, "plain", OWNED[0]])
@on_ranks(2)
def test_cpu_adam_trains_as_on_one_process(compiled: str, engine: str) -> None:
    with mock.patch.dict(os.environ, TORCH_EXTENSIONS_DIR=compiled), mock.patch.dict(RULES, {"cpu adam": CPU_ADAM}):
        assert verdicts(Cell(engine, elementwise="cpu adam"))[0].difference <= 1e-6


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
        optimizer.load_state_dict_from(folder)
    found = train_owned(model, optimizer, steps)
    if folder:
        optimizer.save_state_dict(folder)
    return found


@pytest.mark.parametrize("rule", OWNER_RULES)
def test_owned_storage_resumes_on_other_ranks_and_layouts(rank_pools: Pools, tmp_path: Path, rule: str) -> None:
    for number, (ranks, layout) in enumerate([(2, "padded"), (3, "compact"), (1, "padded"), (4, "compact")]):
        steps = range(2 * number, 2 * number + 2)
        found = rank_pools[ranks].run(part_of_a_run, str(tmp_path), rule, steps, layout=layout)[0]
    assert equal(found, rank_pools[4].run(part_of_a_run, "", rule, range(8))[0])


@pytest.mark.parametrize("rule", OWNER_RULES)
@on_ranks(2)
def test_owned_state_dicts_go_on_and_the_memory_report_counts_them(rule: str) -> None:
    """Each rank's own state_dict, loaded into another optimizer."""
    model, other, file = UnevenLM(), UnevenLM(seed=5), io.BytesIO()
    optimizer, again = optimizer_on(model, rule), optimizer_on(other, rule)
    before = sum(of_rank.state for of_rank in optimizer.memory_report())
    other.load_state_dict(train_owned(model, optimizer, range(3)))
    grown = sum(of_rank.state for of_rank in optimizer.memory_report()) - before
    if rule == "soap":  # two moments of the matrix, and a statistic and a basis of every side
        shapes = [(63, 24), (41, 63), (24, 41), (2, 5)]
        least = sum(4 * (2 * m * n + 2 * (m * m + n * n)) for m, n in shapes)
        assert least <= grown <= least * 1.01
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert equal(train_owned(model, optimizer, range(3, 6)), train_owned(other, again, range(3, 6)))


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
    *((stage, rule, SMALL, SMALL, 2) for stage, rule in enumerate(OWNER_RULES)),
    (3, "soap", SMALL, SMALL, 2),
    (2, "soap", {"policy": "stay"}, {"policy": "balance"}, 2),  # which brings what owners keep to others
    (0, "soap", OWNED_STORAGE, OWNED_STORAGE, 2),
    (2, "adamuon", OWNED_STORAGE, OWNED_STORAGE, 2),
    (0, "soap", {}, {}, 4),
    (0, "adamuon", {}, {}, 4),
]
MORE_RESUMES = [
    *((stage, rule, SMALL, SMALL, 2) for stage in range(4) for rule in OWNER_RULES),
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


def trained_on(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Its weights after two more steps, and the whole state."""
    weights = train_fsdp2(model, optimizer, range(3, 5))
    states = optimizer.state_dict()["state"].items()
    return weights | {
        f"{index}.{key}": whole(value)
        for index, state in states
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def save_fsdp2(folder: str, sharding: str, rule: str, kind: str) -> dict[str, Tensor]:
    model = shard(sharding, "fp32").model
    optimizer, full = fsdp2_optimizer(model, rule), "full" in kind
    train_fsdp2(model, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict="flat" in kind, full_state_dict=full, cpu_offload=full)
    state = state_of(model, optimizer, options)
    if not full:
        dcp.save(state, checkpoint_id=folder)
    elif dist.get_rank() == 0:
        torch.save(state, f"{folder}/full.pt")
    return trained_on(model, optimizer)


def load_fsdp2(folder: str, sharding: str, rule: str, kind: str) -> dict[str, Tensor]:
    model = shard(sharding, "fp32").model
    optimizer = fsdp2_optimizer(model, rule)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    options = StateDictOptions(flatten_optimizer_state_dict="flat" in kind, full_state_dict=kind == "full")
    state = torch.load(f"{folder}/full.pt") if "full" in kind else state_of(model, optimizer, options)
    if "full" not in kind:
        dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict="full" in kind))
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return trained_on(model, optimizer)


def state_of(model: nn.Module, optimizer: Any, options: StateDictOptions) -> dict[str, Any]:
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model, options=options), "optimizer": of_optimizer}


@cells(
    rule=OWNER_RULES,
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
    expected = rank_pools[before].run(save_fsdp2, str(tmp_path), sharding, rule, kind)[0]
    for found in rank_pools[after].run(load_fsdp2, str(tmp_path), other, rule, kind):
        assert equal(found, expected)


@pytest.mark.parametrize("rule", OWNER_RULES)
@on_ranks(2)
def test_a_checkpoint_before_the_first_step_is_that_of_a_fresh_optimizer(rule: str) -> None:
    """Whatever was tried to know the form of its state."""
    models = [shard("rows", "fp32").model for _ in range(3)]
    saved, loaded, untouched = optimizers = [fsdp2_optimizer(model, rule) for model in models]
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    first, *others = [train_fsdp2(model, by, range(2)) for model, by in zip(models, optimizers)]
    assert all(equal(weights, first) for weights in others)
