"""Every engine trains a cell of options, saves and loads, and one process trains the truth. Sums are exact, so bits can
be compared: gradients are rounded as they leave a layer's backward."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import gt
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import fsdp2 as fsdp2_engine
from lwopt_backend.integrations.deepspeed_zero import LayerWise
from tests.support import fsdp2
from tests.support.models import NORM_ROUNDING, UnevenLM, largest_difference
from tests.support.plain import BUCKET_MB, rounded, shares
from tests.support.ranks import gathered
from tests.support.references import (
    RULES,
    SECTIONS,
    Apart,
    Reference,
    clip_factor,
    newton_schulz_in_float32,
    precise,
    rows_of_all,
)
from tests.support.zero import OWN_ROWS, PRECISIONS, config, engine_for, full_weights

ZERO = ("zero 0", "zero 1", "zero 2", "zero 3")
OWNED = ("owned 0", "owned 1", "owned 2")  # owned storage under DeepSpeed
ENGINES = ("plain", *ZERO, *OWNED, "fsdp2")
Alone = Reference
CLIENT = {"mine": 3}  # what the user's own program saves along


@dataclass(frozen=True)
class Cell:
    """What is trained how; ``options`` are further ones of our optimizer, ``zero`` of DeepSpeed's zero_optimization.
    With ``alike`` all ranks train on all rows, so that any number of them comes to the same weights. Rates may be
    ``falling`` from step to step, and begin at ``rate`` if it is given. Param ``groups`` have beginnings of names as
    "params". ``form`` is how torch saves FSDP2's or plain PyTorch's state; without it plain PyTorch's is saved by
    ``save_state_dict``. With ``ns_in_fp32`` Newton-Schulz makes little of what rounds otherwise."""

    engine: str
    matrix: str = "muon"
    elementwise: str = "adamw"
    accumulation: int = 1
    clip: float = 0.0
    steps: int = 3
    sharding: str = "rows"
    options: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    groups: tuple[dict[str, Any], ...] = ()
    precision: str = "fp32"
    alike: bool = False
    falling: bool = False
    rate: float | None = None
    form: str = ""
    ns_in_fp32: bool = False

    @property
    def apart(self) -> dict[str, Any]:
        groups: dict[str, Any] = self.options.get("clip_groups", {})
        return groups


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return rounded(grad)


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(
            x, Rounded.apply(self.weight), self.bias if self.bias is None else Rounded.apply(self.bias)
        )


class _Embedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, Rounded.apply(self.weight))


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.normalized_shape, Rounded.apply(self.weight), Rounded.apply(self.bias))


EXACT = {nn.Linear: _Linear, nn.Embedding: _Embedding, nn.LayerNorm: _LayerNorm}


def exact(model: nn.Module) -> None:
    for module in model.modules():
        module.__class__ = EXACT.get(type(module), type(module))


class ExactLM(UnevenLM):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        exact(self)


def check(limit: float, *cells: Cell) -> None:
    """Train each cell on these ranks. Rank 0's weights are the truth's within ``limit``, and the others' are its. Norms
    are the truth's within the rounding of a sum of all squares; the truth clips by those found, for the same bits."""
    for cell in cells:
        apart = tuple((name, group["params"], group["max_norm"]) for name, group in cell.apart.items())
        limits = [limit for limit in (cell.clip, *(limit for *_, limit in apart)) if limit] * cell.steps
        with running(cell, model_for(cell.sharding)) as engine:
            norms = engine.train(range(cell.steps))
            weights = engine.weights()
        stage = ZERO.index(cell.engine) if cell.engine in ZERO else 0
        clips = tuple(clip_factor(*each, stage) for each in zip(limits, norms))
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
        assert len(set(gathered(digest))) == 1, f"ranks differ: {cell}"
        if dist.get_rank() == 0:
            parts = 1 if cell.alike else dist.get_world_size()
            how = cell.accumulation, (cell.clip, apart), cell.steps, cell.sharding, clips
            truth, true_norms = reference(cell.matrix, cell.elementwise, parts, *how)
            assert weights.keys() == truth.keys()
            assert all(map(gt, true_norms, limits)), ("the clip must bite to be tested", true_norms)
            assert norms == pytest.approx(true_norms, rel=NORM_ROUNDING), cell
            assert largest_difference(weights, truth) <= limit, cell


@contextlib.contextmanager
def running(cell: Cell, model: nn.Module, *, converted: bool = False) -> Iterator[Engine]:
    """The engine of a cell. What it loads is ``converted``, for DeepSpeed to universal, or of an engine like it."""
    rate = {} if cell.rate is None else {"lr": cell.rate}
    matrix = {**SECTIONS[cell.matrix], **precise(cell.matrix, cell.clip or cell.apart or cell.ns_in_fp32), **rate}
    rules = {"matrix": matrix, "elementwise": {**RULES[cell.elementwise], **rate}}
    if cell.engine == "plain":
        options = {"bucket_mb": BUCKET_MB, **_options(cell), **_groups(cell, model, "params")}
        optimizer = LayerWiseOptimizer(model, **rules, **options)
        yield Engine(cell, model, optimizer, "" if converted else cell.form)
    elif cell.engine == "fsdp2":
        cell = replace(cell, form=cell.form or "nested")
        with _on_fsdp2(cell, model, rules) as engine:
            engine.loaded_form = "nested" if converted else cell.form
            yield engine
    else:
        given = {**({"lr_scheduler": falling} if cell.falling else {}), **_groups(cell, model, "model_parameters")}
        settings = _settings(cell, rules, converted)
        if any(callable(each.get("params")) for each in cell.options.get("overrides", ())):  # which JSON has not got
            given["optimizer"] = LayerWise(list(model.parameters()), **settings.pop("optimizer")["params"])
        with engine_for(settings, model, **given) as made:
            yield UnderDeepSpeed(cell, made)


def falling(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


class Engine:
    """A model in training on these ranks, each on its rows or all on all; here in plain PyTorch."""

    def __init__(self, cell: Cell, model: nn.Module, optimizer: Any, loaded_form: str = "") -> None:
        self.cell, self.model, self.optimizer, self.loaded_form = cell, model, optimizer, loaded_form
        self.part, self.parts = (0, 1) if cell.alike else (dist.get_rank(), dist.get_world_size())
        self.scheduler = falling(optimizer) if cell.falling else None
        self.iteration = self.samples = 0

    def train(self, steps: range) -> list[float]:
        """The norms that it clipped by."""
        count = self.parts * self.cell.accumulation
        return [norm for step in steps for norm in self.step(shares(step, count)[self.part :: self.parts])]

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> list[float]:
        self.backward(micro_batches)
        norms = [float(self.optimizer.clip_grad_norm_(self.cell.clip))] if self.cell.clip else []
        self.optimizer.step()
        norms += map(float, self.optimizer.clip_group_norms.values())
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        self.iteration += 1
        self.samples += OWN_ROWS * dist.get_world_size() // self.parts
        return norms

    def backward(self, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
        *first, last = micro_batches
        with self.optimizer.no_sync():
            for rows in first:
                (self.model(*rows) / len(micro_batches)).backward()
        (self.model(*last) / len(micro_batches)).backward()

    def weights(self) -> dict[str, Tensor]:
        self.optimizer.synchronize()
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def progress(self) -> dict[str, Any]:
        """What a training program saves of itself."""
        schedule = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {"iteration": self.iteration, "samples": self.samples, **schedule, **CLIENT}

    def go_on_from(self, progress: dict[str, Any]) -> None:
        assert progress.items() >= CLIENT.items()
        self.iteration, self.samples = progress["iteration"], progress["samples"]
        if self.scheduler is not None:
            self.scheduler.load_state_dict(progress["scheduler"])

    def save(self, folder: str) -> None:
        if self.cell.form:
            self.save_by_torch(folder)
        else:
            self.optimizer.save_state_dict(folder, **self.progress())

    def load(self, folder: str) -> None:
        if self.loaded_form:
            self.load_by_torch(folder)
        else:
            self.go_on_from(self.optimizer.load_state_dict_from(folder))

    def save_by_torch(self, folder: str) -> None:
        state = {**self._state(_options_of(self.cell.form)), **self.progress()}
        if self.cell.form == "bare":  # and once more, by name
            dcp.save({"model": self.model, "optimizer": self.optimizer, **self.progress()}, checkpoint_id=folder)
            dcp.save(state, checkpoint_id=f"{folder}/named")
        elif self.cell.form == "async":
            dcp.async_save(state, checkpoint_id=folder).result()
        elif "full" not in self.cell.form:
            dcp.save(state, checkpoint_id=folder)
        elif dist.get_rank() == 0:
            Path(folder).mkdir()
            torch.save(state, f"{folder}/full.pt")
        dist.barrier()

    def load_by_torch(self, folder: str) -> None:
        options = _options_of(self.loaded_form)
        if self.loaded_form == "bare":
            state = {"model": self.model, "optimizer": self.optimizer, **self.progress()}
            dcp.load(state, checkpoint_id=folder)
            self.go_on_from(state)
            return
        if "full" not in self.loaded_form:
            state = {**self._state(options), **self.progress()}
            dcp.load(state, checkpoint_id=folder)
        else:
            state = torch.load(f"{folder}/full.pt")
            if self.loaded_form == "full" and dist.get_rank() > 0:
                state = {**state, "model": {}, "optimizer": {}}
        state_dict.set_model_state_dict(self.model, state["model"], options=options)
        if self.loaded_form == "flat full":  # torch 2.13 cannot shard one while loading, not for its own AdamW either
            options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
        state_dict.set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
        self.go_on_from(state)

    def _state(self, options: state_dict.StateDictOptions) -> dict[str, Any]:
        """As docs/fsdp2.md saves it."""
        optimizer = state_dict.get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return {"model": state_dict.get_model_state_dict(self.model, options=options), "optimizer": optimizer}


@contextlib.contextmanager
def _on_fsdp2(cell: Cell, model: nn.Module, rules: dict[str, Any]) -> Iterator[OnFSDP2]:
    whole = copy.deepcopy(model) if cell.sharding == "tensor parallel" else None
    sharded = fsdp2.SHARDINGS[cell.sharding](model)
    options = {**sharded.options, **_options(cell), **_groups(cell, sharded.model, "params")}
    optimizer = fsdp2_engine.LayerWiseOptimizer(sharded.model, **rules, bucket_matrices=2, **options)
    engine = OnFSDP2(cell, sharded.model, optimizer)
    engine.whole = whole
    if not cell.alike:
        engine.part, engine.parts = sharded.part, sharded.parts
    yield engine


class OnFSDP2(Engine):
    whole: nn.Module | None

    def backward(self, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
        if self.whole is not None:
            self._deal_gradients(self.whole, micro_batches)
            return
        for number, rows in enumerate(micro_batches):
            fsdp2.set_sync(self.model, number == len(micro_batches) - 1)
            (self.model(*rows) / len(micro_batches)).backward()

    def _deal_gradients(self, whole: nn.Module, micro_batches: list[tuple[Tensor, Tensor]]) -> None:
        """Tensor parallelism adds up in parts, which rounds otherwise: gradients are those of the whole model here."""
        buffers = dict(self.model.named_buffers())
        whole.load_state_dict({**self.weights(), **{key: buffers[key] for key in whole.state_dict().keys() & buffers}})
        whole.zero_grad()
        for rows in micro_batches:
            (whole(*rows) / len(micro_batches)).backward()
        for (_, param), of_whole in zip(fsdp2.named(self.model), whole.parameters(), strict=True):
            if of_whole.grad is not None:
                kept = {"run_check": False, "shape": param.shape, "stride": param.stride()}
                part = fsdp2.distribute_like(of_whole.grad, param)
                param.grad = DTensor.from_local(part, param.device_mesh, param.placements, **kept)
        for buffer, of_whole in zip(self.model.buffers(), whole.buffers(), strict=True):
            buffer.copy_(of_whole)

    def weights(self) -> dict[str, Tensor]:
        return fsdp2.weights_of(self.model)


def _options_of(form: str) -> state_dict.StateDictOptions:
    full = dict.fromkeys(("full_state_dict", "cpu_offload", "broadcast_from_rank0"), "full" in form)
    return state_dict.StateDictOptions(flatten_optimizer_state_dict="flat" in form, **full)


class UnderDeepSpeed(Engine):
    """DeepSpeed counts, and moves the schedule, itself."""

    def __init__(self, cell: Cell, made: Any) -> None:
        super().__init__(replace(cell, falling=False), made.module, made.optimizer)
        self.made = made

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> list[float]:
        for rows in micro_batches:
            self.made.backward(self.made(*rows))
            self.made.step()
        return [float(self.made.get_global_grad_norm())] if self.cell.clip else []

    def weights(self) -> dict[str, Tensor]:
        return full_weights(self.made)

    def save(self, folder: str) -> None:
        self.made.save_checkpoint(folder, client_state={**CLIENT, **self.scale()})

    def load(self, folder: str) -> None:
        if self.cell.engine in OWNED and self.cell.precision != "fp32":  # masters are not to be made of these
            self.model.load_state_dict(self.model.state_dict())
        path, client = self.made.load_checkpoint(folder)
        assert path is not None and client.items() >= {**CLIENT, **self.scale()}.items()

    def scale(self) -> dict[str, float]:
        """The scale of losses in fp16."""
        return {"scale": self.made.optimizer.cur_scale} if self.cell.precision.startswith("fp16") else {}


def _settings(cell: Cell, rules: dict[str, Any], universal: bool) -> dict[str, Any]:
    storage, stage = cell.engine.split()
    sizes = {"bucket_mb": BUCKET_MB} if storage == "owned" else {"bucket_numel": 2000}
    parts = 1 if cell.alike else dist.get_world_size()
    rows = rows_of_all(cell.accumulation * parts) // cell.accumulation // parts
    settings = config(int(stage), accumulation=cell.accumulation, clip=cell.clip, rows=rows)
    settings["zero_optimization"] |= cell.zero
    settings["optimizer"] = {"type": "LayerWise", "params": {**rules, "storage": storage, **sizes, **_options(cell)}}
    return {**settings, "checkpoint": {"load_universal": universal}, **PRECISIONS[cell.precision]}


def _options(cell: Cell) -> dict[str, Any]:
    return {"report": False, "atoms": {"*": "whole"}, **cell.options}  # the truth takes fused weights whole


def _groups(cell: Cell, model: nn.Module, argument: str) -> dict[str, Any]:
    named = fsdp2.named(model)
    of = [{**group, "params": [p for name, p in named if name.startswith(group["params"])]} for group in cell.groups]
    return {argument: of} if of else {}


def model_for(sharding: str) -> ExactLM:
    return ExactLM(hidden=fsdp2.EVEN) if sharding in fsdp2.EVEN_ONLY else ExactLM()


@functools.cache
def reference(
    matrix: str,
    elementwise: str,
    parts: int,
    accumulation: int,
    limits: tuple[float, Apart],
    steps: int,
    sharding: str,
    clips: tuple[float, ...],
) -> tuple[dict[str, Tensor], list[float]]:
    """One process on the micro-batches of all ``parts``, whose gradients are multiplied by ``clips``."""
    alone, norms = Reference(model_for(sharding), matrix, elementwise, *limits), list[float]()
    count = len(clips) // steps
    with newton_schulz_in_float32() if any(limits) else contextlib.nullcontext():
        for step in range(steps):
            of_step = clips[step * count : (step + 1) * count]
            norms += alone.step(shares(step, parts * accumulation), parts, clips=of_step)
    return {name: param.detach().clone() for name, param in alone.model.named_parameters()}, norms
