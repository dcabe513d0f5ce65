"""A model with several matrices in a parameter, and by hand which they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import VOCABULARY
from tests.support.references import Blocks

WIDTH = 24


class Conv1D(nn.Module):
    """Hugging Face's: a linear whose weight is stored as (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Experts(nn.Module):
    def __init__(self, count: int, outputs: int, is_transposed: bool = False) -> None:
        super().__init__()
        up, self.is_transposed = torch.randn(count, outputs, WIDTH) / WIDTH**0.5, is_transposed
        self.up = nn.Parameter(up.mT.contiguous() if is_transposed else up)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btw,eow->bto", x, self.up.mT if self.is_transposed else self.up).tanh()


class FusedGroupedExperts(nn.Module):
    """torchtitan's: the gates and ups of all experts in one parameter, side by side."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(count, hidden, 2, WIDTH) / WIDTH**0.5)
        self.w2_EDF = nn.Parameter(torch.randn(count, WIDTH, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("btd,efgd->btefg", x, self.w13).unbind(-1)
        return torch.einsum("btef,edf->btd", gate.sigmoid() * up, self.w2_EDF)


class FusedLM(nn.Module):
    """q, k and v in blocks and by group, gate and up in both ways, experts in stacks of both ways, a convolution."""

    layers = ()  # FSDP2 has it in one part

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 40)
        self.grouped = nn.Linear(WIDTH, 32, bias=False)
        self.down = nn.Linear(32, WIDTH, bias=False)
        self.gate_up = Conv1D(WIDTH, 46)
        self.out = nn.Linear(23, WIDTH)
        self.experts = Experts(3, 10)
        self.mix = nn.Linear(10, WIDTH, bias=False)
        self.moe = FusedGroupedExperts(2, 8)
        self.turned = Experts(5, WIDTH, is_transposed=True)
        self.conv = nn.Conv1d(WIDTH, 12, 3, padding=1)
        self.lm_head = nn.Linear(12, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        qkv = self.qkv(x)
        x = x + qkv[..., :WIDTH] * qkv[..., WIDTH:].mean(-1, keepdim=True).tanh()
        x = x + self.down(self.grouped(x).tanh())
        gate, up = self.gate_up(x).chunk(2, -1)
        x = x + self.out(gate.sigmoid() * up)
        x = x + self.mix(self.experts(x)) + self.moe(x) + self.turned(x)
        x = self.conv(x.mT).mT
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


ATOMS: dict[str, Any] = {"qkv.weight": {"qkv": [24, 8, 8]}, "grouped.weight": {"qkv": [8, 4, 4], "groups": 2}}
ATOMS |= {"gate_up.weight": {"gate_up": "halves"}, "conv.weight": "flatten"}
MATRICES = (
    *(f"{name}.weight" for name in ("qkv", "grouped", "down", "gate_up", "out", "mix", "conv")),
    *("experts.up", "moe.w13", "moe.w2_EDF", "turned.up"),
)


def _rows(*rows: range) -> Callable[[Tensor], Tensor]:
    index = torch.tensor([row for some in rows for row in some])
    return lambda tensor: tensor[index]


# By hand: which elements of a parameter are a matrix of (outputs, inputs), to read.
BLOCKS: Blocks = {
    "qkv.weight": [_rows(range(0, 24)), _rows(range(24, 32)), _rows(range(32, 40))],
    "grouped.weight": [
        _rows(range(0, 8), range(16, 24)),
        _rows(range(8, 12), range(24, 28)),
        _rows(range(12, 16), range(28, 32)),
    ],
    "gate_up.weight": [lambda tensor: tensor[:, :23].T, lambda tensor: tensor[:, 23:].T],
    "experts.up": [lambda tensor, i=i: tensor[i] for i in range(3)],
    "turned.up": [lambda tensor, i=i: tensor[i].T for i in range(5)],
    "moe.w13": [lambda tensor, e=e, part=part: tensor[e, :, part] for e in range(2) for part in range(2)],
    "moe.w2_EDF": [lambda tensor, e=e: tensor[e] for e in range(2)],
    "conv.weight": [lambda tensor: tensor.reshape(12, 72)],
}


class FusedQKVLinear(nn.Module):
    """torchtitan's: every group of queries has these, their key and their value."""

    def __init__(self, inputs: int = 24, heads: int = 6, kv_heads: int = 3, size: int = 4) -> None:
        super().__init__()
        self.heads_per_kv, self.head_dim, self.r_dim = heads // kv_heads, size, heads // kv_heads + 2
        self.wqkv = nn.Linear(inputs, kv_heads * self.r_dim * size, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        grouped = self.wqkv(x).unflatten(-1, (-1, self.r_dim, self.head_dim))
        return dict(zip("qkv", grouped.split([self.heads_per_kv, 1, 1], dim=-2)))


class Grouped(nn.Module):
    """Attention of 6 heads of which 3 share a key; the configuration alone says how large a head is."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.q_proj(x).tanh()) * (self.k_proj(x) * self.v_proj(x)).mean(-1, keepdim=True)


class Latent(nn.Module):
    """MLA's weights: 4 heads, of 3 + 2 outputs for queries and of 3 + 4 for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 4, 3, 2, 4
        self.q_b_proj, self.kv_b_proj = nn.Linear(WIDTH, 20, bias=False), nn.Linear(WIDTH, 28, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q_b_proj(x).mean(-1, keepdim=True) * self.kv_b_proj(x)[..., :WIDTH]).tanh()


class Sizes:
    hidden_size, num_attention_heads, num_key_value_heads, head_dim = WIDTH, 6, 2, 4


class HeadsLM(nn.Module):
    """Attention's weights of three kinds, whose heads are matrices with ``per_head``; nothing attends."""

    layers = ()

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = Sizes()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.grouped, self.latent, self.fused = Grouped(), Latent(), FusedQKVLinear(heads=4, kv_heads=2)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.grouped(x)
        x = x + self.latent(x)
        x = x + self.fused.wqkv(x).tanh().mean(-1, keepdim=True)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


PER_HEAD = {"atoms": {}, "overrides": [{"params": "*.weight", "matrix": {"per_head": True}}]}
HEAD_ROWS = {"grouped.q_proj": 4, "grouped.k_proj": 4, "grouped.v_proj": 4, "latent.q_b_proj": 5, "latent.kv_b_proj": 7}
HEADS: Blocks = {
    f"{name}.weight": [lambda tensor, i=i, size=size: tensor[i * size : i * size + size] for i in range(count)]
    for (name, size), count in zip({**HEAD_ROWS, "fused.wqkv": 4}.items(), (6, 2, 2, 4, 4, 8), strict=True)
}


# What a weight is, told by use: nothing is set but ``convolutions``
class UsedLM(nn.Module):
    """A modulation of six, gates of a cell, weights on the right, experts in two dimensions, a bank, kernels by head,
    stacks of these, and convolutions of all kinds."""

    layers = ()

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.modulation, self.norm = nn.Linear(WIDTH, 6 * WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.cell, self.mix = nn.GRUCell(WIDTH, 10), nn.Linear(10, WIDTH)
        shapes = {"w_qkv": (WIDTH, 30), "w_out": (10, WIDTH), "w1": (36, WIDTH), "w2": (36, WIDTH)}
        shapes |= {"bank": (4, WIDTH, 7), "back": (4, 7, WIDTH), "split": (WIDTH, 2, 5), "join": (2, 5, WIDTH)}
        shapes |= {"splits": (2, WIDTH, 2, 5), "joins": (2, 2, 5, WIDTH)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 5))
        self.conv, self.grouped = nn.Conv1d(WIDTH, 12, 3, padding=1), nn.Conv1d(12, 12, 3, padding=1, groups=3)
        self.spread, self.depthwise = nn.ConvTranspose1d(12, 10, 2, stride=2), nn.Conv1d(10, 10, 2, stride=2, groups=10)
        self.lm_head = nn.Linear(10, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        shift, scale, gate, shift_m, scale_m, gate_m = self.modulation(x.mean(1, keepdim=True)).chunk(6, -1)
        x = x + gate * self.attn(self.norm(x) * (1 + scale) + shift)
        x = x + gate_m * self.down(self.up(self.norm(x) * (1 + scale_m) + shift_m).relu())
        state = x.new_zeros(len(x), 10)
        for place in range(3):
            state = self.cell(x[:, place], state)
        x = x + self.mix(state)[:, None]
        q, k, v = (x @ self.w_qkv).chunk(3, -1)
        x = x + ((q @ k.mT).softmax(-1) @ v) @ self.w_out
        w1, w2 = self.w1.unflatten(0, (3, 12)), self.w2.unflatten(0, (3, 12))
        x = x + torch.stack([(x @ w1[e].T).relu() @ w2[e] for e in range(3)]).mean(0)
        hidden = torch.einsum("btd,edf->betf", x, self.bank).tanh()
        x = x + torch.einsum("betf,efd->betd", hidden, self.back).mean(1)
        x = x + torch.einsum("bthk,hkd->btd", torch.einsum("btd,dhk->bthk", x, self.split).tanh(), self.join)
        for split, join in zip(self.splits, self.joins):
            x = x + torch.einsum("bthk,hkd->btd", torch.einsum("btd,dhk->bthk", x, split).tanh(), join)
        y = self.depthwise(self.spread(self.grouped(self.conv(x.mT).relu()))).mT
        return nn.functional.cross_entropy(self.lm_head(y).float().flatten(0, 1), targets.flatten())


def _parts(rows: int, count: int) -> list[Callable[[Tensor], Tensor]]:
    return [lambda tensor, i=i: tensor[i * rows : i * rows + rows] for i in range(count)]  # type: ignore[misc]


def _turned(*reads: Callable[[Tensor], Tensor]) -> list[Callable[[Tensor], Tensor]]:
    return [lambda tensor, read=read: read(tensor).T for read in reads]  # type: ignore[misc]


# By hand, as above: (outputs, inputs) of every matrix.
USED: Blocks = {
    "modulation.weight": _parts(WIDTH, 6),
    "cell.weight_ih": _parts(10, 3),
    "cell.weight_hh": _parts(10, 3),
    "w_qkv": [lambda tensor, i=i: tensor[:, i * 10 : i * 10 + 10].T for i in range(3)],
    "w_out": _turned(lambda tensor: tensor),
    "w1": _parts(12, 3),
    "w2": _turned(*_parts(12, 3)),
    "bank": [lambda tensor, i=i: tensor[i].T for i in range(4)],
    "back": [lambda tensor, i=i: tensor[i].T for i in range(4)],
    "split": _turned(lambda tensor: tensor.reshape(WIDTH, 10)),
    "join": _turned(lambda tensor: tensor.reshape(10, WIDTH)),
    "splits": [lambda tensor, i=i: tensor[i].reshape(WIDTH, 10).T for i in range(2)],
    "joins": [lambda tensor, i=i: tensor[i].reshape(10, WIDTH).T for i in range(2)],
    "conv.weight": [lambda tensor: tensor.reshape(12, 72)],
    "grouped.weight": [lambda tensor, i=i: tensor[i * 4 : i * 4 + 4].reshape(4, 12) for i in range(3)],
    "spread.weight": _turned(lambda tensor: tensor.reshape(12, 20)),
}
