"""The principle by which outputs of a weight are one matrix or several, one case for each of its sentences.

What each weight is stands beside its module, by hand: parts are numbers of outputs, in order.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lwopt_backend.routing.parts import Links
from lwopt_backend.routing.tracks import Ends
from tests.unit.routing.test_fused_weights import divided_of

D, H = 24, 4  # the width, and a head's
F = nn.functional


class Cut(nn.Module):
    """A linear of ``outputs`` on the condition ``c``, and what ``use`` does with them and the stream ``x``."""

    def __init__(self, outputs: int, use: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.made, self.use = nn.Linear(D, outputs), use
        self.norm, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.wide, self.out = nn.Linear(2 * D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.use(self, x, self.made(c))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, H)).transpose(-3, -2)


def angles(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    turns = torch.arange(x.shape[-2], device=x.device)[:, None] * torch.arange(size, device=x.device).float()
    return turns.cos(), turns.sin()


def by_halves(q: Tensor) -> Tensor:
    """As in transformers: the halves of a head, turned, beside each other."""
    cos, sin = angles(q, H)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat([-second, first], -1) * sin


def by_sums(q: Tensor) -> Tensor:
    cos, sin = angles(q, H // 2)
    first, second = q.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def by_pairs(q: Tensor) -> Tensor:
    cos, sin = angles(q, H // 2)
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def by_matrices(q: Tensor) -> Tensor:
    """As in Flux: a matrix of two rows for each pair, in one sum."""
    turns = torch.stack([*angles(q, H // 2), *angles(q, H // 2)], -1).unflatten(-1, (2, 2))
    pairs = q.unflatten(-1, (-1, 1, 2))
    return (turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]).flatten(-2)


def by_complex_numbers(q: Tensor) -> Tensor:
    turns = torch.polar(*(torch.ones(q.shape[-2], H // 2, device=q.device), angles(q, H // 2)[0]))
    return torch.view_as_real(torch.view_as_complex(q.float().unflatten(-1, (-1, 2))) * turns).flatten(-2)


def in_place(q: Tensor) -> Tensor:
    """Written into the two kinds of places of a new tensor."""
    cos, sin = angles(q, H // 2)
    turned = torch.empty_like(q)
    turned[..., ::2] = q[..., ::2] * cos - q[..., 1::2] * sin
    turned[..., 1::2] = q[..., 1::2] * cos + q[..., ::2] * sin
    return turned


def of_a_part(q: Tensor) -> Tensor:
    """Only the first half of a head is turned."""
    return torch.cat([by_sums(q.repeat_interleave(1, -1))[..., : H // 2], q[..., H // 2 :]], -1)


ROTATIONS = [by_halves, by_sums, by_pairs, by_matrices, by_complex_numbers, in_place, of_a_part]


def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (heads(q) @ heads(k).mT).softmax(-1)
    return (scores @ heads(v)).transpose(-3, -2).flatten(-2)


def modulation(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """DiT's block: shift, scale and gate of attention and MLP, from one condition for all tokens."""
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = made.chunk(6, -1)
    x = x + gate_a * m.attn(m.norm(x) * (1 + scale_a) + shift_a)
    return x + gate_m * m.down(m.up(m.norm2(x) * (1 + scale_m) + shift_m).relu())


def by_table(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """PixArt's: the condition as six rows, selected one by one."""
    rows = made.unflatten(-1, (6, D))
    shift, scale, gate = (rows[..., number, :] for number in (0, 1, 2))
    x = x + gate * m.attn(m.norm(x) * (1 + scale) + shift)
    shift, scale, gate = (rows[..., number, :] for number in (3, 4, 5))
    return x + gate * m.down(m.up(m.norm2(x) * (1 + scale) + shift).relu())


def film(m: Any, x: Tensor, made: Tensor) -> Tensor:
    scale, shift = made.chunk(2, -1)
    return m.attn(m.norm(x) * scale + shift)


def skipped(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """Two gates on the stream, of which an earlier and a later state lie side by side (U-ViT)."""
    one, other = made.chunk(2, -1)
    early = x + one * m.attn(m.norm(x))
    late = early + other * m.attn(m.norm2(early))
    return m.wide(torch.cat([late, early], -1))


def several_scales(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """Two states of the stream that have both gates, side by side."""
    one, other = made.chunk(2, -1)
    early = x + one * m.attn(m.norm(x)) + other * m.out(m.norm2(x))
    return m.wide(torch.cat([early + m.attn(early), early], -1))


def parallel(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """q, k, v and an MLP in one weight, values and hidden outputs side by side for one weight (Flux.2, ViT-22B)."""
    q, k, v, hidden = made.split([D, D, D, D], -1)
    return m.wide(torch.cat([attend(m, q, k, v), F.gelu(hidden)], -1))


def parallel_gated(m: Any, x: Tensor, made: Tensor) -> Tensor:
    q, k, v, gate, up = made.chunk(5, -1)
    return m.wide(torch.cat([attend(m, q, k, v), F.silu(gate) * up], -1))


def compared(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """Maxout: the larger of two, position by position."""
    one, other = made.chunk(2, -1)
    return m.out(torch.maximum(one, other))


def added(m: Any, x: Tensor, made: Tensor) -> Tensor:
    one, other = made.chunk(2, -1)
    return m.out(one + other)


def added_within_a_product(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """What a product's own operation adds, as a bias, is paired with what it makes."""
    one, other = torch.broadcast_to(made, (*x.shape[:-1], 2 * D)).chunk(2, -1)
    return m.out(torch.baddbmm(one, (x @ x.mT).softmax(-1), other))


def decayed(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """A state that begins with zeros, and that one part scales and the other is added to."""
    decay, new = torch.broadcast_to(made, (*x.shape[:-1], 2 * D)).chunk(2, -1)
    state, states = x.new_zeros(len(x), D), []
    for t in range(x.shape[1]):
        state = state * decay[:, t].sigmoid() + new[:, t]
        states.append(state)
    return m.out(torch.stack(states, 1))


def returned(m: Any, x: Tensor, made: Tensor) -> Any:
    """A mean and a variance, each returned."""
    mean, variance = made.chunk(2, -1)
    return x, mean, variance


def normed_together(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """Queries and keys are normed in one call, each head by itself."""
    q, k, v = made.chunk(3, -1)
    both = torch.stack([heads(q), heads(k)])
    both = both * torch.rsqrt(both.square().mean(-1, keepdim=True) + 1e-6)
    return m.out((both[0] @ both[1].mT).softmax(-1).matmul(heads(v)).transpose(-3, -2).flatten(-2))


def regularized(m: Any, x: Tensor, made: Tensor) -> Any:
    """A loss on all outputs is no norm."""
    q, k, v = made.chunk(3, -1)
    return m.out(attend(m, q, k, v)), made.square().mean()


APART: list[tuple[Callable[..., Any], list[int]]] = [
    (modulation, [D] * 6),
    (by_table, [D] * 6),
    (film, [D] * 2),
    (skipped, [D] * 2),
    (several_scales, [D] * 2),
    (parallel, [D] * 4),
    (parallel_gated, [D] * 5),
    (compared, [D] * 2),
    (added, [D] * 2),
    (added_within_a_product, [D] * 2),
    (decayed, [D] * 2),
    (returned, [D] * 2),
    (normed_together, [D] * 3),
    (regularized, [D] * 3),
    *(
        (lambda m, x, made, turn=turn: m.out(turned(m, made, turn)), [D] * 3)  # type: ignore[misc]
        for turn in ROTATIONS
    ),
]


def turned(m: Any, made: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = made.chunk(3, -1)
    scores = (turn(heads(q)) @ turn(heads(k)).mT).softmax(-1)
    return (scores @ heads(v)).transpose(-3, -2).flatten(-2)


def sizes_of(module: nn.Module, name: str = "m.made.weight") -> list[int]:
    blocks = divided_of(nn.ModuleDict({"m": module}))[name].blocks
    starts = [(min(start for start, _ in block.rows.runs()), block.rows.size) for block in blocks]
    return [size for _, size in sorted(starts)]


@pytest.mark.parametrize(("use", "parts"), APART)
def test_outputs_that_are_paired_are_different_matrices(use: Any, parts: list[int]) -> None:
    assert sizes_of(Cut(sum(parts), use)) == parts


def normed_whole(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """A norm over all outputs, which are halves of one run, even if they gate each other later."""
    one, other = m.norm2(made).chunk(2, -1)
    return m.out(torch.cat([one * other.sigmoid()] * 2, -1))


def shuffled(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """Each token's outputs are four neighbouring places of a larger image."""
    return m.out(made.unflatten(-1, (4, D)).flatten(-3, -2))


def averaged_heads(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """A mean over heads, as of GAT: heads are one matrix unless per_head says otherwise."""
    return m.out(made.unflatten(-1, (3, D)).mean(-2))


def copied_heads(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """Values of grouped heads, each copied for two heads of queries; and one copy less a part of another."""
    v = heads(made).repeat_interleave(2, -3)
    first, second = v.chunk(2, -3)
    return m.out(torch.cat([first - 0.5 * second, second], -3).transpose(-3, -2).flatten(-2)[..., :D])


def in_windows(m: Any, x: Tensor, made: Tensor) -> Tensor:
    """A stream that was scaled and shifted is folded, two tokens into one (Swin's merging)."""
    return m.wide(made[..., : made.shape[-2] // 2 * 2, :].unflatten(-2, (-1, 2)).flatten(-2))


TOGETHER: list[tuple[Callable[..., Any], int]] = [
    (lambda m, x, made: m.out(made), D),
    (lambda m, x, made: m.out(torch.cat([made.relu(), (-made).relu()], -1)[..., :D]), D),
    (lambda m, x, made: x + made, D),
    (normed_whole, D),
    (shuffled, 4 * D),
    (averaged_heads, 3 * D),
    (copied_heads, D),
    (in_windows, D),
    *((lambda m, x, made, turn=turn: (turn(heads(made)) @ heads(x).mT).softmax(-1), D) for turn in ROTATIONS),
]


@pytest.mark.parametrize(("use", "outputs"), TOGETHER)
def test_outputs_read_along_one_axis_are_one_matrix(use: Any, outputs: int) -> None:
    assert sizes_of(Cut(outputs, use)) == [outputs]


def test_outputs_are_linked_by_any_chain_of_sums() -> None:
    """0 is added to 5, and 3 to 5, so that 3 belongs to 0; and 40 to each other in a random order."""
    linked = Links(Ends(8, links=[np.array([[0, 3], [5, 5]]), np.array([[1], [2]])]))
    assert [linked.all_of(1 << output) for output in (3, 2, 4)] == [0b101001, 0b110, 0b10000]
    chain = np.random.default_rng(0).permutation(40)
    assert Links(Ends(40, links=[np.stack([chain[:-1], chain[1:]])])).all_of(1) == 2**40 - 1


def test_outputs_together_and_apart_stay_whole() -> None:
    def both(m: Any, x: Tensor, made: Tensor) -> Tensor:
        one, other = made.chunk(2, -1)
        return m.out(one * other.sigmoid()) + m.wide(made)

    with pytest.warns(UserWarning, match="fused, and the matrix rule trains each as one"):
        found = divided_of(nn.ModuleDict({"m": Cut(2 * D, both)}))["m.made.weight"]
    assert len(found.blocks) == 1 and "together by one step and apart by another" in found.reason


# Arguments


class Takes(nn.Module):
    """A block whose forward needs ``names``, in this order, after ``x``; ``make`` says what they are like."""

    def __init__(self, signature: str, body: str) -> None:
        super().__init__()
        self.mod, self.attn, self.out = nn.Linear(16, 3 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm, self.ids = nn.LayerNorm(D, elementwise_affine=False), nn.Embedding(5, 16)
        scope: dict[str, Any] = {"torch": torch, "math": math}
        exec(f"def forward(self, x, {signature}):\n    {body}\n    {CUT}", scope)
        self.forward = scope["forward"].__get__(self)


CUT = "a, b, g = m.chunk(3, -1); return x + g * self.attn(self.norm(x) * (1 + a) + b)"
ARGUMENTS = {
    "a vector": ("c", "m = self.mod(c)[:, None]"),
    "a vector of time, optional": ("mask=None, temb=None", "m = self.mod(temb).unsqueeze(1)"),
    "one for each token": ("vec", "m = self.mod(vec); assert m.shape[:2] == x.shape[:2]"),
    "a class": ("y", "m = self.mod(self.ids(y))[:, None]"),
    "a number, embedded": ("t", "m = self.mod(torch.outer(t, torch.arange(16, device=x.device)).sin())[:, None]"),
    "a list": ("conds", "m = self.mod(conds[0])[:, None]"),
    "a mask and a vector": ("attn_mask, emb", "x = x.masked_fill(attn_mask[..., None], 0); m = self.mod(emb)[:, None]"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_unknown_names_get_values(case: str) -> None:
    assert sizes_of(Takes(*ARGUMENTS[case]), "m.mod.weight") == [D] * 3
