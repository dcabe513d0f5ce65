"""Mixtures of experts and other banks of weights, of own making: no name says ``expert``."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.truth import case

TOKENS = torch.arange(10).view(2, 5)
NET = {"emb.weight": "embedding", "attn.weight": "oi", "lm_head.weight": "head", "mlp.router.weight": "oi"}
WIDTH, HIDDEN, COUNT = 16, 20, 4


class Net(nn.Module):
    """An embedding, the mixture in a residual block, a head."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.emb, self.attn, self.mlp = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, WIDTH), mlp
        self.lm_head = nn.Linear(WIDTH, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        x = x + F.silu(self.attn(x))
        return self.lm_head(F.layer_norm(x + self.mlp(F.layer_norm(x, (WIDTH,))), (WIDTH,)))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)

    def shares(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1)


@case({**NET, "mlp.w1": "eoi", "mlp.w2": "eoi"}, TOKENS)
class Dense(Net):
    """All of them for every token, by einsum."""

    class Mix(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.zeros(COUNT, HIDDEN, WIDTH))
            self.w2 = nn.Parameter(torch.zeros(COUNT, WIDTH, HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.einsum("btd,efd->btef", x, self.w1).relu()
            return (torch.einsum("btef,edf->bted", h, self.w2) * self.shares(x)[..., None]).sum(-2)

    def __init__(self) -> None:
        super().__init__(self.Mix())


@case({**NET, "mlp.w1": "4*oi", "mlp.w2": "4*io"}, TOKENS)
class Folded(Net):
    """MegaBlocks' and DBRX's: (experts x hidden, width), the second used as it lies."""

    class Mix(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = (nn.Parameter(torch.zeros(COUNT * HIDDEN, WIDTH)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            w1, w2 = (w.view(COUNT, -1, WIDTH) for w in (self.w1, self.w2))
            y = [torch.relu(x @ w1[i].T) @ w2[i] for i in range(COUNT)]
            return (torch.stack(y, -2) * self.shares(x)[..., None]).sum(-2)

    def __init__(self) -> None:
        super().__init__(self.Mix())


@case({**NET, "mlp.bank_in": "eio/2", "mlp.bank_out": "eio"}, TOKENS)
class Batched(Net):
    """Stored (experts, inputs, outputs), gate and up beside each other; a batch of products."""

    class Mix(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.bank_in = nn.Parameter(torch.zeros(COUNT, WIDTH, 2 * HIDDEN))
            self.bank_out = nn.Parameter(torch.zeros(COUNT, HIDDEN, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            gate, up = torch.bmm(x.flatten(0, 1).expand(COUNT, -1, -1), self.bank_in).chunk(2, -1)
            y = torch.bmm(F.silu(gate) * up, self.bank_out)
            return (y * self.shares(x).flatten(0, 1).t()[..., None]).sum(0).view_as(x)

    def __init__(self) -> None:
        super().__init__(self.Mix())


@case({**NET, "mlp.up": "eoi[20, 20]", "mlp.down": "eoi"}, TOKENS)
class Looped(Net):
    """A loop over those that some token chose: what runs depends on values."""

    class Mix(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(COUNT, 2 * HIDDEN, WIDTH))
            self.down = nn.Parameter(torch.zeros(COUNT, WIDTH, HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, 1)
            weight, chosen = self.shares(flat).topk(2, -1)
            out = torch.zeros_like(flat)
            for number in chosen.unique().tolist():
                row, place = torch.where(chosen == number)
                gate, up = F.linear(flat[row], self.up[number]).split(HIDDEN, -1)
                y = F.linear(F.silu(gate) * up, self.down[number])
                out.index_add_(0, row, y * weight[row, place, None])
            return out.view_as(x)

    def __init__(self) -> None:
        super().__init__(self.Mix())


@case({**NET, "mlp.ins.*": "oi", "mlp.outs.*": "oi"}, TOKENS)
class Listed(Net):
    """A list of parameters."""

    class Mix(Routed):
        def __init__(self) -> None:
            super().__init__()
            self.ins = nn.ParameterList(torch.zeros(HIDDEN, WIDTH) for _ in range(COUNT))
            self.outs = nn.ParameterList(torch.zeros(WIDTH, HIDDEN) for _ in range(COUNT))

        def forward(self, x: Tensor) -> Tensor:
            shares = self.shares(x).unbind(-1)
            return sum(
                (
                    share[..., None] * F.linear(F.relu(F.linear(x, a)), b)
                    for share, a, b in zip(shares, self.ins, self.outs)
                ),
                torch.zeros_like(x),
            )

    def __init__(self) -> None:
        super().__init__(self.Mix())


@case(
    {key: truth for key, truth in NET.items() if "router" not in key}
    | {"mlp.phi": "io", "mlp.a": "eio", "mlp.b": "eio"},
    TOKENS,
)
class Soft(Net):
    """Slots of mixed tokens: dispatch and combination are softmaxes of one product."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phi, self.a = (
                nn.Parameter(torch.zeros(WIDTH, COUNT * 3)),
                nn.Parameter(torch.zeros(COUNT, WIDTH, HIDDEN)),
            )
            self.b = nn.Parameter(torch.zeros(COUNT, HIDDEN, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            logits = x @ self.phi
            slots = (logits.softmax(1).mT @ x).unflatten(1, (COUNT, 3))
            y = torch.einsum("besh,ehd->besd", torch.einsum("besd,edh->besh", slots, self.a).relu(), self.b)
            return logits.softmax(-1) @ y.flatten(1, 2)

    def __init__(self) -> None:
        super().__init__(self.Mix())


@case(
    {key: truth for key, truth in NET.items() if "router" not in key}
    | {"mlp.w_gate": "io", "mlp.w_noise": "io", "mlp.first": "eio", "mlp.second": "eio"},
    TOKENS,
)
class Noisy(Net):
    """Shazeer's gates: the noise has a weight as well; each token's slices are indexed."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w_gate, self.w_noise = (nn.Parameter(torch.zeros(WIDTH, COUNT)) for _ in range(2))
            self.first = nn.Parameter(torch.zeros(COUNT, WIDTH, HIDDEN))
            self.second = nn.Parameter(torch.zeros(COUNT, HIDDEN, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, WIDTH)
            noisy = flat @ self.w_gate + F.softplus(flat @ self.w_noise) * 0.1
            share, chosen = noisy.softmax(-1).max(-1, keepdim=True)
            h = torch.bmm(flat[:, None], self.first[chosen[:, 0]]).relu()
            return (share * torch.bmm(h, self.second[chosen[:, 0]])[:, 0]).view_as(x)

    def __init__(self) -> None:
        super().__init__(self.Mix())


@case(
    {"emb.weight": "embedding", "w?": "ioo", "o.wo": "iio", "bias": "table", "mix.*": "oi", "lm_head.weight": "head"},
    TOKENS,
)
class Kernels(nn.Module):
    """A port from JAX: kernels of (width, heads, head) in and (heads, head, width) out."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lm_head = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.zeros(WIDTH, 2, 6)) for _ in range(3))
        self.o, self.bias = nn.ParameterDict({"wo": torch.zeros(2, 6, WIDTH)}), nn.Parameter(torch.zeros(2, 6))
        self.mix = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        q, k, v = (torch.einsum("btd,dhk->bthk", x, w) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bqhk,bshk->bhqs", q + self.bias, k).softmax(-1)
        x = x + torch.einsum("bqhk,hkd->bqd", torch.einsum("bhqs,bshk->bqhk", scores, v), self.o["wo"])
        return self.lm_head(F.layer_norm(x + self.mix(x), (WIDTH,)))


@case(
    {
        "emb.weight": "embedding",
        "query.weight": "oi or oi/2",
        "keys": "eoi",
        "values.weight": "embedding",
        "out.weight": "head",
    },
    TOKENS,
)
class ProductKeys(nn.Module):
    """A memory: each half of a query is compared with its own keys, and rows of a table are the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.query, self.out = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 30)
        self.keys, self.values = nn.Parameter(torch.zeros(2, 5, 6)), nn.Embedding(25, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        scores = torch.einsum("bthk,hnk->bthn", self.query(x).unflatten(-1, (2, 6)), self.keys)
        best, place = scores.max(-1)
        read = self.values(place[..., 0] * 5 + place[..., 1]) * best.sum(-1, keepdim=True).sigmoid()
        return self.out(F.layer_norm(x + read, (WIDTH,)))


@case(
    {
        "emb.weight": "embedding",
        "prompts": "table",
        "per_layer": "table",
        "body.*.weight": "oi",
        "fc_out.weight": "head",
    },
    TOKENS,
)
class Banks(nn.Module):
    """Three dimensions, and no matrix: prompts that are joined to the input, biases that each layer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.prompts = nn.Embedding(30, WIDTH), nn.Parameter(torch.zeros(3, 2, WIDTH))
        self.per_layer = nn.Parameter(torch.zeros(3, 7, WIDTH))
        self.body, self.fc_out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        task = int(tokens[0, 0]) % 3 if not tokens.is_meta else 0
        x = torch.cat([self.prompts[task].expand(len(tokens), -1, -1), self.emb(tokens)], 1)
        for number, layer in enumerate(self.body):
            x = x + F.gelu(layer(F.layer_norm(x, (WIDTH,)) + self.per_layer[number]))
        return self.fc_out(F.layer_norm(x, (WIDTH,)))
