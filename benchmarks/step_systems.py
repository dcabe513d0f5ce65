"""The optimizers that ``step.py`` compares, by engine. Weights, batches and options are equal."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers

VOCABULARY = 256
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
COMPARED_AFTER = 3  # steps
OURS, TORCHS, DEEPSPEEDS = "ours", "torch.optim.Muon", "DeepSpeed's Muon"
ENGINES: dict[str, dict[str, dict[str, Any]]] = {  # by engine, what is compared, with options of this package
    "plain": {OURS: {}, "ours, compact": {"layout": "compact"}, TORCHS: {}},
    "modules": {OURS: {}},
    "fsdp2": {
        OURS: {},
        "ours, gram_aspect=1.5": {"gram_aspect": 1.5},
        "ours, bucket_matrices=16": {"bucket_matrices": 16},
        TORCHS: {},
    },
    **{f"zero{stage}": {OURS: {}, DEEPSPEEDS: {}, "AdamW": {}} for stage in range(4)},
    "owned": {OURS: {"storage": "owned"}},
}


class Block(nn.Module):
    """Causal self-attention and an MLP in which no tensor feeds more than two operations.

    ZeRO-3's hooks change the order in which backward adds up a tensor's gradients, and the sum of three would round
    otherwise. So query, key and value are one matrix, and the norms are of the kind that is one operation.
    """

    def __init__(self, width: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.attention_norm, self.mlp_norm = (norm(width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, time, width)."""
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """A small byte-level GPT without positions, with its loss; or its matrices and no other parameters."""

    def __init__(self, layers: int, width: int, matrices_only: bool) -> None:
        super().__init__()
        self.width, self.matrices_only = width, matrices_only
        norm = nn.Identity if matrices_only else nn.LayerNorm
        if not matrices_only:
            self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, norm) for _ in range(layers)))
        if not matrices_only:
            self.norm = nn.LayerNorm(width, bias=False)
            self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.matrices_only:
            x = torch.sin(tokens.unsqueeze(-1) * torch.arange(1, self.width + 1, device=tokens.device))
            return self.blocks(x).square().mean()
        logits = self.lm_head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Setting:
    """What is trained, on how many ranks and on which kind of device. ``tokens`` are those of a micro-batch."""

    ranks: int
    layers: int
    width: int
    tokens: int
    accumulation: int
    bucket_mb: float
    device: str
    matrices_only: bool = False
    capture: bool = False

    @property
    def matrices(self) -> int:
        return 4 * self.layers

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model(self.layers, self.width, self.matrices_only).to(self.device)

    @property
    def muon(self) -> dict[str, Any]:
        """Options of this package's Muon."""
        given: dict[str, Any] = {"atoms": {"*.qkv.weight": "whole"}}  # as the other systems train it
        given |= {"include": ["*"]} if self.matrices_only else {}
        return {**MUON, "report": False, **given, **({"capture": True} if self.capture else {})}

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """A step's micro-batches, the same on every rank: their mean gradient is then every rank's own, to the bit."""
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCABULARY, (self.accumulation, 1, self.tokens + 1), generator=generator)
        return [(row[:, :-1], row[:, 1:]) for row in tokens.to(self.device)]


def is_matrix(name: str) -> bool:
    """Whether every Muon here takes the parameter: all do but the embedding, the head and the norms."""
    return ".weight" in name and "blocks." in name and "norm" not in name


Around = Callable[[Callable[[], Any]], Any]


@dataclass
class Hooks:
    """What makes the calls of a step's parts: ``update`` is the optimizer's part of it with the host's own work,
    ``optimizer`` the optimizer alone."""

    update: Around = lambda work: work()
    optimizer: Around = lambda work: work()


@dataclass
class System:
    """What is compared; ``step`` trains one step."""

    name: str
    step: Callable[[Sequence[tuple[Tensor, Tensor]], Hooks], None]
    model: nn.Module
    optimizers: Sequence[Any]
    whole: Callable[[Tensor], Tensor]  # a parameter's weights, on all ranks
    close: Callable[[], None] = field(default=lambda: None)


def systems(engine: str, setting: Setting) -> dict[str, Callable[[], System]]:
    """The systems to compare on ``engine``, by name; this package's is the first."""
    make = _trained if engine in ("plain", "modules", "fsdp2") else _under_deepspeed
    left_out = (DEEPSPEEDS, "AdamW") if setting.matrices_only else ()  # whose launches are in the host's code
    named = [(name, options) for name, options in ENGINES[engine].items() if name not in left_out]
    return {name: functools.partial(make, name, engine, setting, options) for name, options in named}


@contextmanager
def built(makes: Mapping[str, Callable[[], System]]) -> Iterator[list[System]]:
    """The systems, and the end of their engines."""
    made = [make() for make in makes.values()]
    try:
        yield made
    finally:
        for system in made:
            system.close()


def torchs(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch.optim.Muon and AdamW."""
    named = list(model.named_parameters())
    others = [param for name, param in named if not is_matrix(name)]
    muon = torch.optim.Muon([param for name, param in named if is_matrix(name)], **MUON)
    return [muon, torch.optim.AdamW(others, **ADAMW)] if others else [muon]


def _trained(name: str, engine: str, setting: Setting, options: Mapping[str, Any]) -> System:
    """In plain PyTorch: torch's own optimizers on every rank (DDP), or on shards of FSDP2."""
    model = called = setting.model()
    if engine == "fsdp2":
        mesh = init_device_mesh(setting.device, (setting.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers: list[Any] = []
    if name.startswith(OURS):
        given = {**setting.muon, "elementwise": {"name": "adamw", **ADAMW}, **options}
        given |= {"bucket_mb": setting.bucket_mb} if engine == "plain" else {}
        optimizers = [LayerWiseOptimizer(model, **given)]
    else:
        optimizers = torchs(model)
        if engine == "plain" and setting.ranks > 1:
            called = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if engine == "modules":
        optimizers = [ModuleOptimizers({"all": optimizers[0]})]

    def step(batches: Sequence[tuple[Tensor, Tensor]], hooks: Hooks) -> None:
        for tokens, targets in batches:
            (called(tokens, targets) / setting.accumulation).backward()
        for optimizer in optimizers:
            hooks.update(functools.partial(hooks.optimizer, optimizer.step))
            optimizer.zero_grad()

    return System(name, step, model, optimizers, lambda p: p.full_tensor() if isinstance(p, DTensor) else p)


def _under_deepspeed(name: str, engine: str, setting: Setting, options: Mapping[str, Any]) -> System:
    deepspeed = importlib.import_module("deepspeed")
    importlib.import_module("lwopt_backend.integrations.deepspeed_zero").register()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    stage = 2 if engine == "owned" else int(engine[-1])
    bucket = setting.layers * 12 * setting.width**2 // 4  # a fraction of the model, as the defaults are of large ones
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = setting.width**2 - 1  # every matrix is partitioned
        # DeepSpeed's own backward of a linear layer rounds otherwise, and would stay for all later engines.
        zero["memory_efficient_linear"] = False
        zero["reduce_scatter"] = name != DEEPSPEEDS  # which refuses the default
    shared = {key: value for key, value in ADAMW.items() if key != "lr"}  # its two halves have one weight decay
    theirs = {**MUON, **shared, "muon_lr": MUON["lr"], "adam_lr": ADAMW["lr"], "torch_adam": True}
    entries: dict[str, dict[str, Any]] = {
        OURS: {"type": "LayerWiseMuon", "params": {**setting.muon, "adamw": ADAMW, **options}},
        DEEPSPEEDS: {"type": "Muon", "params": {**theirs, "ns_method": "standard"}},
        "AdamW": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
    }
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": setting.accumulation}
    config |= {"gradient_clipping": 0.0, "zero_optimization": zero, "optimizer": entries[name]}
    config |= {"steps_per_print": 1_000_000}
    model = setting.model()
    made, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    inner_step = made.basic_optimizer.step

    def step(batches: Sequence[tuple[Tensor, Tensor]], hooks: Hooks) -> None:
        made.basic_optimizer.step = lambda *args, **kwargs: hooks.optimizer(lambda: inner_step(*args, **kwargs))
        for tokens, targets in batches:
            made.backward(made(tokens, targets))
            hooks.update(made.step)

    def whole(param: Tensor) -> Tensor:
        on_every_rank = stage == 0 or engine == "owned"
        return param.detach() if on_every_rank else deepspeed.utils.safe_get_full_fp32_param(param)

    return System(name, step, model, [made.optimizer, made.basic_optimizer], whole, close=made.destroy)


def reference(setting: Setting) -> dict[str, Tensor]:
    """The weights after ``COMPARED_AFTER`` steps of torch.optim.Muon and AdamW in one process."""
    model = setting.model()
    optimizers = torchs(model)
    for step in range(COMPARED_AFTER):
        for tokens, targets in setting.batches(step):
            (model(tokens, targets) / setting.accumulation).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach().cpu() for name, param in model.named_parameters()}


def difference(system: System, expected: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest over all matrices, and over all other parameters. Called on all ranks."""
    largest = {True: 0.0, False: 0.0}
    for name, param in system.model.named_parameters():
        found = (system.whole(param).detach().cpu() - expected[name]).abs().max().item()
        largest[is_matrix(name)] = max(largest[is_matrix(name)], found)
    return largest[True], largest[False]
