"""A small byte-level GPT: rotary positions, RMSNorm, squared-ReLU MLP, tied or untied output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 256
    tied_head: bool = False


class Attention(nn.Module):
    """Causal self-attention. Query, key and value are separate matrices, so that each is orthogonalized on its own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.query_norm = nn.RMSNorm(config.width // config.heads)
        self.key_norm = nn.RMSNorm(config.width // config.heads)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: (batch, time, width)."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        query, key = rotate(self.query_norm(query), rotation), rotate(self.key_norm(key), rotation)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Returns the mean next-byte cross-entropy, in nats."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, VOCABULARY, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.embedding.weight
        self._initialize()

    def _initialize(self) -> None:
        """Small embeddings; residual outputs shrunk by depth so that the sum over layers starts at unit scale."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            for residual in (block.attention.out, block.mlp.down):
                nn.init.normal_(residual.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (batch, time) byte values."""
        x = self.embedding(tokens)
        rotation = rotations(tokens.shape[1], self.config.width // self.config.heads, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotations(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE (Su et al. 2021), each (length, width / 2), on ``like``'s device and in its dtype."""
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first half of the channels against the second, by position. x: (batch, heads, time, width)."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)
