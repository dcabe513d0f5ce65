"""The optimizers that ``deepspeed_step.py`` compares, each in a real engine: equal weights, batches and options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from fsdp2_traffic import Traffic
from torch import Tensor, nn

VOCABULARY = 256
MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
COMPARED_AFTER = 3  # steps
OURS = "LayerWiseMuon"


def optimizer_entries() -> dict[str, dict[str, Any]]:
    """The ``"optimizer"`` entries of ds_config.json, by what the tables call them; ours is the first."""
    ours = {**MUON, "adamw": ADAMW, "report": False}
    shared = {key: value for key, value in ADAMW.items() if key != "lr"}  # its two halves have one weight decay
    theirs = {**MUON, **shared, "muon_lr": MUON["lr"], "adam_lr": ADAMW["lr"], "torch_adam": True}
    return {
        OURS: {"type": "LayerWiseMuon", "params": ours},
        f"{OURS}, gram_aspect=1.5": {"type": "LayerWiseMuon", "params": {**ours, "gram_aspect": 1.5}},
        "DeepSpeed Muon, standard": {"type": "Muon", "params": {**theirs, "ns_method": "standard"}},
        "DeepSpeed Muon, gram": {"type": "Muon", "params": {**theirs, "ns_method": "gram"}},
        "DeepSpeed AdamW": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
    }


class Block(nn.Module):
    """Causal self-attention and an MLP in which no tensor feeds more than two operations.

    ZeRO-3's hooks change the order in which backward adds up a tensor's gradients, and the sum of three would round
    otherwise. So query, key and value are one matrix, and the norms are of the kind that is one operation.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
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
    """A small byte-level GPT without positions."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(self.blocks(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Setting:
    """What is trained and how: one cell of the benchmark."""

    stage: int
    accumulation: int
    ranks: int
    layers: int
    width: int
    tokens: int  # of a micro-batch's one row
    clip: float

    def config(self, entry: dict[str, Any]) -> dict[str, Any]:
        bucket = self.layers * 12 * self.width**2 // 4  # a fraction of the model, as the defaults are of large ones
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = self.width**2 - 1  # every matrix is partitioned
            # DeepSpeed's own backward of a linear layer rounds otherwise, and would stay for all later engines.
            zero["memory_efficient_linear"] = False
            if entry["type"] == "Muon":
                zero["reduce_scatter"] = False  # it refuses the default
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": zero,
            "optimizer": entry,
            "steps_per_print": 1_000_000,
        }

    def model(self) -> Model:
        torch.manual_seed(0)
        return Model(self.layers, self.width)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """A step's micro-batches, the same on every rank: their mean gradient is then every rank's own, to the bit."""
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCABULARY, (self.accumulation, 1, self.tokens + 1), generator=generator)
        return [(row[:, :-1], row[:, 1:]) for row in tokens]


@dataclass
class System:
    """An optimizer in its engine, and what was measured on this rank."""

    name: str
    engine: Any
    update_cpu: list[float] = field(default_factory=list)
    update_wall: list[float] = field(default_factory=list)
    step_cpu: list[float] = field(default_factory=list)
    step_wall: list[float] = field(default_factory=list)
    newton_schulz: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    state: dict[str, int] = field(default_factory=dict)
    difference: tuple[float, float] = (float("nan"), float("nan"))

    @property
    def kind(self) -> str:
        return "AdamW" if "AdamW" in self.name else "Muon"


def build(setting: Setting, name: str, entry: dict[str, Any]) -> System:
    model = setting.model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=setting.config(entry)
    )
    return System(name, engine)


def matrix_names(model: Model) -> list[str]:
    """Of what every Muon here takes: all but the embedding, the head and the norms."""
    return [name for name, _ in model.named_parameters() if name.startswith("blocks.") and "norm" not in name]


def reference(setting: Setting, kind: str) -> dict[str, Tensor]:
    """The weights after ``COMPARED_AFTER`` steps of torch.optim in one process: AdamW, and for ``"Muon"`` that too."""
    model = setting.model()
    named = dict(model.named_parameters())
    optimizers: list[torch.optim.Optimizer] = []
    if kind == "Muon":
        optimizers.append(torch.optim.Muon([named.pop(name) for name in matrix_names(model)], **MUON))
    optimizers.append(torch.optim.AdamW(list(named.values()), **ADAMW))
    for step in range(COMPARED_AFTER):
        for tokens, targets in setting.batches(step):
            (model(tokens, targets) / setting.accumulation).backward()
        if setting.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def difference(setting: Setting, system: System, expected: dict[str, Tensor]) -> tuple[float, float]:
    """The largest over all matrices, and over all other parameters. Called on all ranks."""
    matrices, others = [], []
    names = matrix_names(system.engine.module)
    for name, param in system.engine.module.named_parameters():
        whole = param.detach() if setting.stage == 0 else deepspeed.utils.safe_get_full_fp32_param(param)
        (matrices if name in names else others).append((whole - expected[name]).abs().max().item())
    return max(matrices), max(others)
