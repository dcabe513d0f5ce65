"""Kinds that have nothing else here: clouds of points, fields, flows, equations, capsules, splines, trees and slots."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.truth import case

CLOUD, STATE, WORDS = torch.zeros(2, 9, 3), torch.zeros(2, 6), torch.zeros(2, 5, dtype=torch.long)
PICTURE, SET = torch.zeros(2, 3, 8, 8), torch.zeros(2, 7, 6)


@case(
    {"turn.*.weight": "oi", "lift.*.weight": "oi", "wide.weight": "oi", "label.weight": "head"},
    CLOUD,
)
class Cloud(nn.Module):
    """PointNet: a small network makes the matrix that turns the points, a maximum over points makes the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 9))
        self.lift = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 20))
        self.wide, self.label = nn.Linear(20, 24), nn.Linear(24, 7)

    def forward(self, points: Tensor) -> Tensor:
        turn = self.turn(points.amax(1)).view(-1, 3, 3) + torch.eye(3, device=points.device)
        each = self.lift(torch.bmm(points, turn))
        return self.label(F.relu(self.wide(each.max(dim=1).values)))


@case({"slope.0.weight": "oi", "slope.2.weight": "oi", "enter.weight": "oi", "leave.weight": "head"}, STATE)
class Flowing(nn.Module):
    """A neural differential equation, by the rule of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 10), nn.Linear(10, 4)
        self.slope = nn.Sequential(nn.Linear(10 + 1, 22), nn.Tanh(), nn.Linear(22, 10))

    def rate(self, t: float, y: Tensor) -> Tensor:
        return self.slope(torch.cat([y, torch.full_like(y[..., :1], t)], -1))

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.enter(x), 0.5
        for step in range(2):
            t = step * h
            k1 = self.rate(t, y)
            k2 = self.rate(t + h / 2, y + h / 2 * k1)
            k3 = self.rate(t + h / 2, y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.rate(t + h, y + h * k3))
        return self.leave(y)


@case({"eyes.weight": "convolution", "routes": "eooi", "rebuild.0.weight": "oi", "rebuild.2.weight": "head"}, PICTURE)
class Capsules(nn.Module):
    """Each capsule predicts each class by a matrix of its own; classes agree with the predictions step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes, self.routes = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(8, 3, 6, 4))
        self.rebuild = nn.Sequential(nn.Linear(18, 11), nn.ReLU(), nn.Linear(11, 14))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        size = x.square().sum(-1, keepdim=True)
        return x * size / (1 + size) / (size + 1e-8).sqrt()

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        capsules = self.squash(self.eyes(image).flatten(2))
        votes = torch.einsum("bci,ckoi->bcko", capsules, self.routes)
        logits = votes.new_zeros(votes.shape[:3])
        for _ in range(2):
            classes = self.squash((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes * classes[:, None]).sum(-1)
        return classes.norm(dim=-1), self.rebuild(classes.flatten(1))


@case(
    {
        **{"vocab.weight": "embedding", "mix.three.weight": "oi/3", "mix.short.weight": "convolution"},
        **{"mix.filters.?.weight": "oi", "mix.leave.weight": "oi", "words.weight": "head"},
    },
    WORDS,
)
class LongConvolution(nn.Module):
    """Hyena: two gates and a value, filtered over the whole length through Fourier transforms."""

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three, self.leave = nn.Linear(16, 48), nn.Linear(16, 16)
            self.short = nn.Conv1d(48, 48, 3, padding=2, groups=48)
            self.filters = nn.Sequential(nn.Linear(5, 12), nn.SiLU(), nn.Linear(12, 16))

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            one, two, v = self.short(self.three(x).transpose(1, 2))[..., :length].split(16, dim=1)
            t = torch.linspace(0, 1, length, device=x.device)[:, None]
            h = self.filters(torch.cat([t, torch.sin(t), torch.cos(t), torch.sin(2 * t), torch.cos(2 * t)], -1)).T
            v = v * one
            y = torch.fft.irfft(torch.fft.rfft(v, n=2 * length) * torch.fft.rfft(h, n=2 * length), n=2 * length)
            return self.leave((y[..., :length] * two).transpose(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.vocab, self.mix, self.words = nn.Embedding(30, 16), LongConvolution.Mix(), nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.vocab(ids)
        return self.words(F.layer_norm(x + self.mix(F.layer_norm(x, (16,))), (16,)))


@case(
    {
        **{"words.weight": "embedding", "turns.three.weight": "oi/3", "turns.far.weight": "oi", "turns.o.weight": "oi"},
        **{"turns.u": "table", "turns.w": "table", "next.weight": "head"},
    },
    WORDS,
    torch.zeros(2, 4, 16),
)
class Segments(nn.Module):
    """Transformer-XL: keys and values of the segment before, distances by a linear, two biases of queries."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.three, self.far, self.o = (nn.Linear(16, n, bias=False) for n in (48, 16, 16))
            self.u, self.w = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(2, 8))

        def forward(self, x: Tensor, before: Tensor) -> Tensor:
            both = torch.cat([before, x], 1)
            q, k, v = (y.unflatten(-1, (2, 8)) for y in self.three(both).chunk(3, -1))
            q, n, m = q[:, -x.shape[1] :], both.shape[1], x.shape[1]
            place = torch.arange(n - 1, -1, -1.0, device=x.device)[:, None] / torch.arange(1.0, 9, device=x.device)
            r = self.far(torch.cat([place.sin(), place.cos()], -1)).view(n, 2, 8)
            scores = torch.einsum("bihd,bjhd->bhij", q + self.u, k)
            far = F.pad(torch.einsum("bihd,jhd->bhij", q + self.w, r), (1, 0))
            far = far.reshape(len(x), 2, n + 1, m)[:, :, 1:].reshape(len(x), 2, m, n)
            mixed = torch.einsum("bhij,bjhd->bihd", ((scores + far) / math.sqrt(8)).softmax(-1), v)
            return F.layer_norm(x + self.o(mixed.flatten(2)), (16,))

    def __init__(self) -> None:
        super().__init__()
        self.words, self.turns, self.next = nn.Embedding(30, 16), Segments.Turns(), nn.Linear(16, 30)

    def forward(self, ids: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids)
        return self.next(self.turns(x, memory)), x.detach()


@case({"trunk.*.weight": "oi", "mixture.weight": "head"}, STATE, torch.zeros(2, 2))
class Mixture(nn.Module):
    """A mixture density: shares, means and widths of four Gaussians in one linear, of which the loss is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 15), nn.Tanh())
        self.mixture = nn.Linear(15, 4 + 4 * 2 + 4 * 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, mean, width = self.mixture(self.trunk(x)).split([4, 8, 8], -1)
        far = (y[:, None] - mean.unflatten(-1, (4, 2))) * (-width.unflatten(-1, (4, 2))).exp()
        each = -0.5 * far.square().sum(-1) - width.unflatten(-1, (4, 2)).sum(-1)
        return -torch.logsumexp(share.log_softmax(-1) + each, -1).mean()


@case(
    {
        **{"*down?.weight": "convolution", "*up?.weight": "convolution", "*mid.weight": "convolution"},
        **{"paint.weight": "convolution", "hear.0.weight": "oi", "hear.2.weight": "oi[8, 8, 12, 12]"},
    },
    PICTURE,
    STATE,
)
class Tinted(nn.Module):
    """A U-Net whose levels are scaled and shifted by one linear of a condition, together."""

    def __init__(self) -> None:
        super().__init__()
        self.down0, self.down1 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, 2, 1)
        self.mid, self.up1 = nn.Conv2d(12, 12, 3, padding=1), nn.ConvTranspose2d(12, 8, 2, 2)
        self.paint = nn.Conv2d(16, 3, 1)
        self.hear = nn.Sequential(nn.Linear(6, 14), nn.SiLU(), nn.Linear(14, 40))

    def forward(self, image: Tensor, told: Tensor) -> Tensor:
        gamma0, beta0, gamma1, beta1 = self.hear(told)[..., None, None].split([8, 8, 12, 12], 1)
        first = F.silu(F.group_norm(self.down0(image), 2) * (1 + gamma0) + beta0)
        second = F.silu(F.group_norm(self.down1(first), 2) * (1 + gamma1) + beta1)
        return self.paint(torch.cat([first, self.up1(self.mid(second))], 1))


@case({"*.inner.weight": "oi", "*.both.weight": "oi/2"}, STATE)
class Couplings(nn.Module):
    """A RealNVP: half of the inputs makes logarithms of scales, and shifts, of the other half."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.both = nn.Linear(3, 17), nn.Linear(17, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept, changed = x.chunk(2, -1)
            log_scale, shift = self.both(self.inner(kept).relu()).chunk(2, -1)
            log_scale = log_scale.tanh()
            return torch.cat([changed * log_scale.exp() + shift, kept], -1), log_scale.sum(-1)

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Couplings.Half() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        volume = x.new_zeros(len(x))
        for half in self.halves:
            x, more = half(x)
            volume = volume + more
        return x, volume


@case(
    {
        **{"eye.weight": "convolution", "centre": "table", "spread": "table", "keys_values.weight": "oi/2"},
        **{"ask.weight": "oi", "keep.weight_?h": "oi/3", "more.*.weight": "oi", "answer.weight": "head"},
    },
    PICTURE,
)
class Slots(nn.Module):
    """Slots compete for pixels, and remember by a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.eye, self.keys_values = nn.Conv2d(3, 12, 2, 2), nn.Linear(12, 32)
        self.centre, self.spread = nn.Parameter(torch.zeros(1, 16)), nn.Parameter(torch.zeros(1, 16))
        self.ask, self.keep, self.answer = nn.Linear(16, 16), nn.GRUCell(16, 16), nn.Linear(16, 5)
        self.more = nn.Sequential(nn.Linear(16, 28), nn.ReLU(), nn.Linear(28, 16))

    def forward(self, image: Tensor) -> Tensor:
        pixels = self.eye(image).flatten(2).mT
        k, v = self.keys_values(F.layer_norm(pixels, (12,))).chunk(2, -1)
        slots = self.centre + self.spread.exp() * torch.ones(len(image), 4, 16, device=image.device)
        for _ in range(2):
            share = (self.ask(F.layer_norm(slots, (16,))) @ k.mT).softmax(1)
            seen = (share / share.sum(-1, keepdim=True)) @ v
            slots = self.keep(seen.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.more(F.layer_norm(slots, (16,)))
        return self.answer(slots)


@case({"curves.*": "oii", "straight.weight": "oi", "result.weight": "head"}, STATE)
class Splines(nn.Module):
    """Kolmogorov and Arnold: each output sums a curve of each input, by coefficients of a basis."""

    def __init__(self) -> None:
        super().__init__()
        self.curves = nn.ParameterList([torch.zeros(10, 6, 5)])
        self.straight, self.result = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        bumps = torch.exp(-(x[..., None] - torch.linspace(-1, 1, 5, device=x.device)).square())
        return self.result(torch.einsum("bik,oik->bo", bumps, self.curves[0]) + self.straight(F.silu(x)))


@case(
    {
        **{"leaves.weight": "embedding", "iou_x.weight": "oi/3", "iou_h.weight": "oi/3"},
        **{"f_x.weight": "oi", "f_h.weight": "oi", "sense.weight": "head"},
    },
    WORDS,
)
class Tree(nn.Module):
    """A Tree-LSTM over a chain of pairs: children are summed, each has a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves = nn.Embedding(30, 12)
        self.iou_x, self.iou_h = nn.Linear(12, 30), nn.Linear(10, 30, bias=False)
        self.f_x, self.f_h, self.sense = nn.Linear(12, 10), nn.Linear(10, 10, bias=False), nn.Linear(10, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.leaves(ids)
        h = c = x.new_zeros(len(x), 2, 10)
        for now in x.unbind(1):
            i, o, u = (self.iou_x(now) + self.iou_h(h.sum(1))).chunk(3, -1)
            f = torch.sigmoid(self.f_x(now)[:, None] + self.f_h(h))
            cell = i.sigmoid() * u.tanh() + (f * c).sum(1)
            hidden = o.sigmoid() * cell.tanh()
            h, c = torch.stack([hidden, h[:, 0]], 1), torch.stack([cell, c[:, 0]], 1)
        return self.sense(h[:, 0])


@case(
    {
        **{"deep.*.weight": "oi", "again.*.weight": "oi", "sigma.weight": "vector"},
        **{"feature.weight": "oi", "side.weight": "oi", "rgb.weight": "head"},
    },
    torch.zeros(5, 3),
    torch.zeros(5, 3),
)
class Field(nn.Module):
    """A NeRF: waves of positions, a skip, a density and a colour that depends on the direction."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(18, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU())
        self.again = nn.Sequential(nn.Linear(38, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU())
        self.sigma, self.feature = nn.Linear(20, 1), nn.Linear(20, 20)
        self.side, self.rgb = nn.Linear(32, 11), nn.Linear(11, 3)

    def waves(self, x: Tensor, n: int) -> Tensor:
        scaled = (x[..., None] * 2.0 ** torch.arange(n, device=x.device)).flatten(-2)
        return torch.cat([scaled.sin(), scaled.cos()], -1)

    def forward(self, where: Tensor, to: Tensor) -> Tensor:
        p, d = self.waves(where, 3), self.waves(to, 2)
        h = self.again(torch.cat([self.deep(p), p], -1))
        rgb = torch.sigmoid(self.rgb(F.relu(self.side(torch.cat([self.feature(h), d], -1)))))
        return torch.cat([rgb, F.softplus(self.sigma(h))], -1)


@case(
    {
        **{"points": "table", "*.q.weight": "oi", "*.kv.weight": "oi/2", "*.o.weight": "oi"},
        **{"*.ff.weight": "oi", "label.weight": "head"},
    },
    SET,
)
class Inducing(nn.Module):
    """A set transformer with inducing points."""

    class Block(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.q, self.kv, self.o, self.ff = nn.Linear(a, 16), nn.Linear(b, 32), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            q = self.q(x)
            k, v = self.kv(y).chunk(2, -1)
            heads = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
            h = q + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            return h + F.relu(self.ff(self.o(h)))

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.zeros(1, 4, 16))
        self.first, self.second, self.label = self.Block(16, 6), self.Block(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.label(self.second(x, self.first(self.points.expand(len(x), -1, -1), x)).mean(1))


@case({"embed.weight": "embedding", "latent.weight": "oi", "share.weight": "head", "each.weight": "head"}, WORDS)
class Softmaxes(nn.Module):
    """A mixture of softmaxes: shares are returned as much as what they weigh, scaled by each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.share, self.latent, self.each = nn.Linear(12, 3), nn.Linear(12, 36), nn.Linear(12, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        share = self.share(x).softmax(-1)
        logits = self.each(torch.tanh(self.latent(x)).unflatten(-1, (3, 12)))
        return (logits.softmax(-1) * share[..., None]).sum(-2).log()


@case(
    {
        **{"bottom.*.weight": "oi", "tables.*.weight": "embedding", "top.0.weight": "oi"},
        **{"top.2.weight": "vector"},
    },
    STATE,
    torch.zeros(2, 3, dtype=torch.long),
)
class Clicks(nn.Module):
    """DLRM: products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 8), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(11, 8) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(8 + 6, 13), nn.ReLU(), nn.Linear(13, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        all_ = torch.stack([x, *(t(sparse[:, n]) for n, t in enumerate(self.tables))], 1)
        z = torch.bmm(all_, all_.mT)
        i, j = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, z[:, i, j]], 1)).sigmoid()


@case(
    {
        **{"words.weight": "embedding", "att.qkv": "eioo", "att.out": "iio", "glu.w": "eio/2"},
        **{"glu.v": "eio", "glu.route.weight": "oi", "next_.weight": "head"},
    },
    WORDS,
)
class Stacked(nn.Module):
    """Queries, keys and values in one parameter of four dimensions; experts chosen by an index, gate and up in one."""

    class Att(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Parameter(torch.zeros(3, 16, 2, 8)), nn.Parameter(torch.zeros(2, 8, 16))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = torch.einsum("btd,cdhk->cbhtk", x, self.qkv)
            return torch.einsum("bhtk,hkd->btd", F.scaled_dot_product_attention(q, k, v), self.out)

    class Glu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route = nn.Linear(16, 4)
            self.w, self.v = nn.Parameter(torch.zeros(4, 16, 22)), nn.Parameter(torch.zeros(4, 11, 16))

        def forward(self, x: Tensor) -> Tensor:
            share, best = self.route(x).softmax(-1).max(-1)
            a, b = torch.einsum("btd,btdf->btf", x, self.w[best]).chunk(2, -1)
            return share[..., None] * torch.einsum("btf,btfd->btd", F.silu(a) * b, self.v[best])

    def __init__(self) -> None:
        super().__init__()
        self.words, self.att, self.glu, self.next_ = nn.Embedding(30, 16), self.Att(), self.Glu(), nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.att(F.layer_norm(x, (16,)))
        return self.next_(F.layer_norm(x + self.glu(F.layer_norm(x, (16,))), (16,)))


@case(
    {
        **{"see.weight": "convolution", "control.weight_ih": "oi/4", "control.weight_hh": "oi/4"},
        **{"keys.weight": "oi", "erase_add.weight": "oi/2", "start": "table", "tell.weight": "head"},
    },
    SET,
)
class Notes(nn.Module):
    """A neural Turing machine: reads by likeness to keys, writes by an erase and an add vector."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Conv1d(6, 10, 1)
        self.control, self.keys = nn.LSTMCell(10 + 9, 16), nn.Linear(16, 18)
        self.erase_add, self.start, self.tell = nn.Linear(16, 18), nn.Parameter(torch.zeros(5, 9)), nn.Linear(25, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, memory, state, read = self.see(x.mT).mT, self.start.expand(len(x), -1, -1), None, x.new_zeros(len(x), 9)
        made = []
        for now in x.unbind(1):
            state = self.control(torch.cat([now, read], -1), state)
            ask = self.keys(state[0]).unflatten(-1, (2, 9))
            where = F.cosine_similarity(ask[:, :, None], memory[:, None], dim=-1).softmax(-1)
            erase, add = self.erase_add(state[0]).chunk(2, -1)
            write = where[:, 0, :, None]
            memory = memory * (1 - write * erase.sigmoid()[:, None]) + write * add.tanh()[:, None]
            read = (where[:, 1, :, None] * memory).sum(1)
            made.append(self.tell(torch.cat([state[0], read], -1)))
        return torch.stack(made, 1)


def _kernels(**shapes: tuple[int, ...]) -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})


@case(
    {
        **{"tokens": "table", "positions": "table", "layers.?.q.kernel": "ioo", "layers.?.kv.kernel": "eioo"},
        **{"layers.?.o.kernel": "iio", "layers.?.wi.kernel": "io/2", "layers.?.wo.kernel": "io"},
        **{"layers.?.q.bias": "vector", "unembed.kernel": "head"},
    },
    WORDS,
)
class Ported(nn.Module):
    """From JAX: dictionaries of kernels with their inputs first, one of which has those of keys and of values."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Parameter(torch.zeros(30, 16)), nn.Parameter(torch.zeros(5, 16))
        self.layers, self.unembed = nn.ModuleList(self._layer() for _ in range(2)), _kernels(kernel=(16, 30))

    def _layer(self) -> nn.ModuleDict:
        attention = {"q": _kernels(kernel=(16, 2, 8), bias=(2, 8)), "kv": _kernels(kernel=(2, 16, 2, 8))}
        mlp = {"wi": _kernels(kernel=(16, 44)), "wo": _kernels(kernel=(22, 16))}
        return nn.ModuleDict({**attention, "o": _kernels(kernel=(2, 8, 16)), **mlp})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens[ids] + self.positions
        for layer in self.layers:
            p = {name: dict(one.items()) for name, one in layer.items()}  # type: ignore[operator, union-attr]
            y = F.layer_norm(x, (16,))
            q = torch.einsum("btd,dhk->bthk", y, p["q"]["kernel"]) + p["q"]["bias"]
            k, v = (torch.einsum("btd,dhk->bthk", y, kernel) for kernel in p["kv"]["kernel"])
            near = torch.einsum("bthk,bshk->bhts", q, k).softmax(-1)
            x = x + torch.einsum("bhts,bshk,hkd->btd", near, v, p["o"]["kernel"])
            gate, up = (F.layer_norm(x, (16,)) @ p["wi"]["kernel"]).split(22, -1)
            x = x + (F.gelu(gate) * up) @ p["wo"]["kernel"]
        return F.layer_norm(x, (16,)) @ self.unembed["kernel"]


class _InputsFirst(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class _ScaledLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight) * self.weight.shape[0] ** -0.5


@case({"widen.weight": "io/2", "narrow.weight": "io", "same.weight": "oi", "sort.weight": "head"}, SET)
class Subclassed(nn.Module):
    """Linears of its own: two that have their inputs first, and one that scales what torch's makes."""

    class Same(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 0.1 * super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = _InputsFirst(6, 22), _ScaledLinear(11, 6)
        self.same, self.sort = self.Same(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.widen(x).chunk(2, -1)
        x = x + self.narrow(up * gate.sigmoid())
        return self.sort(F.layer_norm(x + self.same(x), (6,)))


@case({"enter.weight": "oi", "base.weight": "oi/2", "up": "oi/2", "down": "oi", "mean.weight": "head"}, SET)
class Factored(nn.Module):
    """Factors of low rank are added to the weight of a linear, which has gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.base, self.mean = nn.Linear(6, 16), nn.Linear(16, 32, bias=False), nn.Linear(16, 2)
        self.up, self.down = nn.Parameter(torch.zeros(32, 3)), nn.Parameter(torch.zeros(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        gate, up = F.linear(x, self.base.weight + 0.5 * (self.up @ self.down)).chunk(2, -1)
        return self.mean(F.layer_norm(x + gate.sigmoid() * up, (16,)))


@case(
    {
        **{"words.weight": "embedding", "qkv.weight": "oi/3", "out.weight": "oi", "far.weight": "table"},
        **{"guess.weight": "head"},
    },
    WORDS,
)
class Distances(nn.Module):
    """LayoutLMv3: biases of distances are the weight of a linear, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.far = nn.Embedding(30, 16), nn.Linear(9, 2, bias=False)
        self.qkv, self.out, self.guess = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.words(ids), torch.arange(ids.shape[1], device=ids.device)
        bias = self.far.weight.t()[places[:, None] - places + 4].permute(2, 0, 1)
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(F.layer_norm(x, (16,))).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        return self.guess(F.layer_norm(x, (16,)))
