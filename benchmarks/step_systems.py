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
OURS, GRAM, TORCHS = "ours", "ours, gram_aspect=1.5", "torch.optim.Muon"
DEEPSPEEDS = "DeepSpeed's Muon"
ENGINES = ("plain", "modules", "fsdp2", "zero0", "zero1", "zero2", "zero3", "owned")


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
    """A small byte-level GPT without positions, with its loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Matrices(nn.Module):
    """The matrices of such a GPT and no other parameters."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.Sequential(*(Block(width, nn.Identity) for _ in range(layers)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.sin(tokens.unsqueeze(-1) * torch.arange(1, self.width + 1, device=tokens.device))
        return self.blocks(x).square().mean()


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

    @property
    def matrices(self) -> int:
        return 4 * self.layers

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return (Matrices if self.matrices_only else Model)(self.layers, self.width).to(self.device)

    @property
    def muon(self) -> dict[str, Any]:
        """Options of this package's Muon."""
        return {**MUON, "report": False, **({"include": ["*"]} if self.matrices_only else {})}

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
    ``optimizer`` the optimizer alone. DeepSpeed's Muon orthogonalizes in backward at stages 1 and 2; that is both."""

    update: Around = lambda work: work()
    optimizer: Around = lambda work: work()


@dataclass
class System:
    """``step`` trains one step. ``optimizers`` hold what is kept between steps, ``params`` are by name.

    ``promised`` are the bytes that our plan says this rank sends in a step, ``padding`` its elements of padding.
    """

    name: str
    step: Callable[[Sequence[tuple[Tensor, Tensor]], Hooks], None]
    model: nn.Module
    optimizers: Sequence[Any]
    whole: Callable[[Tensor], Tensor]  # a parameter's weights, on all ranks
    promised: int | None = None
    padding: int | None = None
    close: Callable[[], None] = field(default=lambda: None)


Make = Callable[[], System]


def systems(engine: str, setting: Setting) -> dict[str, Make]:
    """The systems to compare on ``engine``, by name; this package's is the first. Peers that are not installed are left
    out."""
    if engine in ("plain", "modules", "fsdp2"):
        return _in_torch(engine, setting)
    if isinstance(imported("deepspeed"), str):
        return {}
    ours: dict[str, Any] = {"type": "LayerWiseMuon", "params": {**setting.muon, "adamw": ADAMW}}
    if engine == "owned":
        ours["params"]["storage"] = "owned"
        return {OURS: lambda: _under_deepspeed(OURS, setting, ours, 2)}
    shared = {key: value for key, value in ADAMW.items() if key != "lr"}  # its two halves have one weight decay
    muon = {**MUON, **shared, "muon_lr": MUON["lr"], "adam_lr": ADAMW["lr"], "torch_adam": True}
    entries: dict[str, dict[str, Any]] = {
        OURS: ours,
        GRAM: {"type": "LayerWiseMuon", "params": {**ours["params"], "gram_aspect": 1.5}},
        DEEPSPEEDS: {"type": "Muon", "params": {**muon, "ns_method": "standard"}},
        f"{DEEPSPEEDS}, gram": {"type": "Muon", "params": {**muon, "ns_method": "gram"}},
        "AdamW": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
    }
    make = functools.partial(_under_deepspeed, setting=setting, stage=int(engine[-1]))
    return {name: functools.partial(make, name, entry=entry) for name, entry in entries.items()}


def _in_torch(engine: str, setting: Setting) -> dict[str, Make]:
    def ours(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
        options = {**setting.muon, "elementwise": {"name": "adamw", **ADAMW}, **options}
        if engine == "plain":
            options["bucket_mb"] = setting.bucket_mb
        return [LayerWiseOptimizer(model, **options)]

    def modules(model: nn.Module) -> list[Any]:
        return [ModuleOptimizers({"all": ours(model)[0]})]

    def dions(model: nn.Module) -> list[torch.optim.Optimizer]:
        # Its names for the same: the sum form of momentum has another scale, which Newton-Schulz takes out.
        muon = {"lr": MUON["lr"], "weight_decay": MUON["weight_decay"], "mu": MUON["momentum"], "nesterov": True}
        muon |= {"adjust_lr": "rms_norm", "use_polar_express": False}
        matrices, others = _split(model)
        mesh = init_device_mesh(setting.device, (setting.ranks,))
        dion = imported("dion")
        return [dion.Muon(matrices, distributed_mesh=mesh, **muon), *_adamw(others)]

    make = functools.partial(_trained, setting=setting, sharded=engine == "fsdp2")
    if engine == "modules":
        return {OURS: lambda: make(OURS, modules)}
    found = {OURS: lambda: make(OURS, ours), GRAM: lambda: make(GRAM, functools.partial(ours, gram_aspect=1.5))}
    for layout in ("padded", "compact") if engine == "plain" and setting.ranks > 1 else ():
        name = f"ours, {layout}"
        found[name] = functools.partial(make, name, functools.partial(ours, layout=layout))
    found[TORCHS] = lambda: make(TORCHS, torchs)
    found["AdamW"] = lambda: make("AdamW", lambda model: _adamw(list(model.parameters())))
    if engine == "fsdp2":
        name = "ours, bucket_matrices=16"
        found[name] = lambda: make(name, functools.partial(ours, bucket_matrices=16))
        if not isinstance(imported("dion"), str):
            found["dion.Muon"] = lambda: make("dion.Muon", dions)
    return found


def torchs(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch.optim.Muon and AdamW."""
    matrices, others = _split(model)
    return [torch.optim.Muon(matrices, **MUON), *_adamw(others)]


def _adamw(params: list[Tensor]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(params, **ADAMW)] if params else []


def _split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    named = list(model.named_parameters())
    return [p for name, p in named if is_matrix(name)], [p for name, p in named if not is_matrix(name)]


def _trained(name: str, optimizers_of: Callable[[nn.Module], list[Any]], setting: Setting, sharded: bool) -> System:
    """In plain PyTorch: torch's own optimizers on every rank (DDP), or on shards of FSDP2."""
    model: nn.Module = setting.model()
    if sharded:
        mesh = init_device_mesh(setting.device, (setting.ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizers = optimizers_of(model)
    called = model
    if not sharded and setting.ranks > 1 and not name.startswith(OURS):
        called = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(batches: Sequence[tuple[Tensor, Tensor]], hooks: Hooks) -> None:
        for tokens, targets in batches:
            (called(tokens, targets) / setting.accumulation).backward()
        for optimizer in optimizers:
            hooks.update(functools.partial(hooks.optimizer, optimizer.step))
            optimizer.zero_grad()

    found = System(name, step, model, optimizers, lambda p: p.full_tensor() if isinstance(p, DTensor) else p)
    if hasattr(first := optimizers[0], "core"):  # owned storage's
        found.padding = first.core.holdings[0].plan.padding
        found.promised = first.memory_report()[torch.distributed.get_rank()].sent
    elif isinstance(first, LayerWiseOptimizer):  # on FSDP2, in its two exchanges
        found.promised = sum(stepper.plan.wire_bytes()[torch.distributed.get_rank()] for stepper in first._steppers)
    return found


def _under_deepspeed(name: str, setting: Setting, entry: dict[str, Any], stage: int) -> System:
    deepspeed = imported("deepspeed")
    muon_module = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    importlib.import_module("lwopt_backend.integrations.deepspeed_zero").register()
    deepspeed.utils.logger.setLevel(logging.ERROR)
    bucket = setting.layers * 12 * setting.width**2 // 4  # a fraction of the model, as the defaults are of large ones
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = setting.width**2 - 1  # every matrix is partitioned
        # DeepSpeed's own backward of a linear layer rounds otherwise, and would stay for all later engines.
        zero["memory_efficient_linear"] = False
        if entry["type"] == "Muon":
            zero["reduce_scatter"] = False  # it refuses the default
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": entry,
        "steps_per_print": 1_000_000,
    }
    model = setting.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    inner = engine.basic_optimizer
    inner_step, muon_update = inner.step, muon_module.muon_update

    def step(batches: Sequence[tuple[Tensor, Tensor]], hooks: Hooks) -> None:
        in_step = False

        def optimizer_step(*args: Any, **kwargs: Any) -> Any:
            return hooks.optimizer(lambda: inner_step(*args, **kwargs))

        def orthogonalized(*args: Any, **kwargs: Any) -> Any:
            work = functools.partial(muon_update, *args, **kwargs)
            return hooks.optimizer(work) if in_step else hooks.update(lambda: hooks.optimizer(work))

        inner.step, muon_module.muon_update = optimizer_step, orthogonalized
        for tokens, targets in batches:
            engine.backward(engine(tokens, targets))
            in_step = True
            hooks.update(engine.step)
            in_step = False
        inner.step, muon_module.muon_update = inner_step, muon_update

    def whole(param: Tensor) -> Tensor:
        return param.detach() if stage == 0 else deepspeed.utils.safe_get_full_fp32_param(param)

    if entry["params"].get("storage") == "owned":
        whole = lambda param: param.detach()  # noqa: E731
    return System(name, step, model, [engine.optimizer, inner], whole, close=engine.destroy)


def imported(name: str) -> Any:
    """The module, or in words why it is left out."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever goes wrong there is no reason to measure nothing
        return f"{name} is left out: {type(error).__name__}: {error}"


def reference(setting: Setting, adamw: bool) -> dict[str, Tensor]:
    """The weights after ``COMPARED_AFTER`` steps of torch.optim in one process: AdamW alone, or Muon for matrices."""
    model = setting.model()
    optimizers = [torch.optim.AdamW(model.parameters(), **ADAMW)] if adamw else torchs(model)
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


@contextmanager
def built(makes: Mapping[str, Make]) -> Iterator[list[System]]:
    """The systems, and the end of their engines."""
    made = [make() for make in makes.values()]
    try:
        yield made
    finally:
        for system in made:
            system.close()
