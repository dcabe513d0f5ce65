"""Speech, recurrent cells, state-space models."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.truth import add, case

SERIES, FRAMES, TOKENS = torch.zeros(2, 5, 12), torch.zeros(2, 9, 20), torch.zeros(2, 5, dtype=torch.long)


class Stack(nn.Module):
    """A recurrent module of torch, and a linear after it."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.vocabulary = inner, nn.Linear(width, 30)

    def forward(self, x: Tensor) -> Tensor:
        return self.vocabulary(self.inner(x)[0])


OUT = {"vocabulary.weight": "head"}
add(
    "recurrent.LSTM of two layers",
    lambda: Stack(nn.LSTM(12, 16, 2, batch_first=True), 16),
    {**OUT, "inner.weight_[ih]h_l?": "oi/4"},
    SERIES,
)
add(
    "recurrent.LSTM of both directions, projected",
    lambda: Stack(nn.LSTM(12, 16, batch_first=True, bidirectional=True, proj_size=7), 14),
    {**OUT, "inner.weight_[ih]h_l0*": "oi/4", "inner.weight_hr_l0*": "oi"},
    SERIES,
)
add(
    "recurrent.GRU of both directions",
    lambda: Stack(nn.GRU(12, 16, 2, bidirectional=True), 32),
    {**OUT, "inner.weight_[ih]h_l?*": "oi/3"},
    SERIES,
)
add(
    "recurrent.RNN",
    lambda: Stack(nn.RNN(12, 16, nonlinearity="relu"), 16),
    {**OUT, "inner.weight_[ih]h_l?": "oi"},
    SERIES,
)


@case({"read.weight": "embedding", "cells.*.weight_?h": "oi/4", "write.weight": "head"}, TOKENS)
class Cells(nn.Module):
    """torch's cells, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(30, 12), nn.Linear(16, 30)
        self.cells = nn.ModuleList([nn.LSTMCell(12, 16), nn.LSTMCell(16, 16, bias=False)])

    def forward(self, tokens: Tensor) -> Tensor:
        states: list[tuple[Tensor, Tensor] | None] = [None, None]
        written = []
        for x in self.read(tokens).unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(x, states[number])
                x = states[number][0]  # type: ignore[index]
            written.append(self.write(x))
        return torch.stack(written, 1)


@case({"all_gates.weight": "oi/4", "transcribe.weight": "head"}, SERIES)
class OneLinearCell(nn.Module):
    """An LSTM whose gates are one linear of input and state together."""

    def __init__(self) -> None:
        super().__init__()
        self.all_gates, self.transcribe = nn.Linear(12 + 16, 64), nn.Linear(16, 30)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 16)
        for now in x.unbind(1):
            i, f, o, g = torch.split(self.all_gates(torch.cat([now, h], 1)), 16, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.transcribe(h)


@case({"x2h": "io/3", "h2h": "io/3", "w_out": "head"}, SERIES)
class ScratchGru(nn.Module):
    """A GRU of bare parameters, multiplied from the right."""

    def __init__(self) -> None:
        super().__init__()
        self.x2h, self.h2h = nn.Parameter(torch.zeros(12, 48)), nn.Parameter(torch.zeros(16, 48))
        self.bias, self.w_out = nn.Parameter(torch.zeros(48)), nn.Parameter(torch.zeros(16, 30))

    def forward(self, series: Tensor) -> Tensor:
        state = series.new_zeros(series.shape[0], 16)
        for x in series.transpose(0, 1):
            gates, hidden = x @ self.x2h + self.bias, state @ self.h2h
            reset = torch.sigmoid(gates[:, :16] + hidden[:, :16])
            update = torch.sigmoid(gates[:, 16:32] + hidden[:, 16:32])
            new = torch.tanh(gates[:, 32:] + reset * hidden[:, 32:])
            state = update * state + (1 - update) * new
        return state @ self.w_out


@case(
    {"embed.weight": "embedding", "mingru.to_hidden_and_gate.weight": "oi/2", "mingru.out.weight": "oi"}
    | {"sru.w.weight": "oi/3", "to_logits.weight": "head"},
    TOKENS,
)
class LightRecurrences(nn.Module):
    """minGRU and SRU: gates of the input alone."""

    class MinGru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_hidden_and_gate, self.out = nn.Linear(16, 48, bias=False), nn.Linear(24, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden, gate = self.to_hidden_and_gate(x).chunk(2, dim=-1)
            gate, h, seen = gate.sigmoid(), torch.zeros_like(hidden[:, 0]), []
            for now in range(x.shape[1]):
                h = torch.lerp(h, hidden[:, now], gate[:, now])
                seen.append(h)
            return self.out(torch.stack(seen, 1))

    class Sru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Linear(16, 48, bias=False), nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            z, f, r = self.w(x).unflatten(-1, (3, 16)).unbind(-2)
            f, r, c, out = (f + self.b).sigmoid(), (r + self.b).sigmoid(), torch.zeros_like(x[:, 0]), []
            for now in range(x.shape[1]):
                c = f[:, now] * c + (1 - f[:, now]) * z[:, now]
                out.append(r[:, now] * c.tanh() + (1 - r[:, now]) * x[:, now])
            return torch.stack(out, 1)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mingru, self.sru = nn.Embedding(30, 16), self.MinGru(), self.Sru()
        self.norm, self.to_logits = nn.LayerNorm(16), nn.Linear(16, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.to_logits(self.norm(self.sru(x + self.mingru(x))))


@case(
    {
        **{"subsample.weight": "convolution", "project.weight": "oi", "*.ff?.*.weight": "oi", "*.pointwise_in": "oi/2"},
        **{"*.depthwise.weight": "convolution", "*.pointwise_out": "oi", "*.linear_?.weight": "oi"},
        **{"*.linear_pos.weight": "oi", "*.pos_bias_?": "table", "ctc_lo.weight": "head"},
    },
    FRAMES,
)
class Conformer(nn.Module):
    """Relative positions whose two biases are added to queries, and a gated convolution."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ff1, self.ff2 = (nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(2))
            self.linear_q, self.linear_k, self.linear_v, self.linear_o = (nn.Linear(16, 16) for _ in range(4))
            self.linear_pos = nn.Linear(16, 16, bias=False)
            self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
            self.pointwise_in, self.pointwise_out = nn.Parameter(torch.zeros(32, 16)), nn.Parameter(torch.zeros(16, 16))
            self.depthwise, self.norm = nn.Conv1d(16, 16, 3, padding=1, groups=16), nn.BatchNorm1d(16)

        def forward(self, x: Tensor, pos: Tensor) -> Tensor:
            x = x + 0.5 * self.ff1(F.layer_norm(x, (16,)))
            q, k, v = (f(x).unflatten(-1, (4, 4)) for f in (self.linear_q, self.linear_k, self.linear_v))
            p = self.linear_pos(pos).unflatten(-1, (4, 4)).transpose(0, 1)
            scores = (q + self.pos_bias_u).transpose(1, 2) @ k.permute(0, 2, 3, 1)
            moved = (q + self.pos_bias_v).transpose(1, 2) @ p.mT
            x = x + self.linear_o(((scores + moved).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
            y = F.glu(F.linear(F.layer_norm(x, (16,)), self.pointwise_in), dim=-1)
            y = F.silu(self.norm(self.depthwise(y.mT))).mT
            x = x + F.linear(y, self.pointwise_out)
            return x + 0.5 * self.ff2(F.layer_norm(x, (16,)))

    def __init__(self) -> None:
        super().__init__()
        self.subsample, self.project = nn.Conv1d(20, 24, 3, 2, 1), nn.Linear(24, 16)
        self.blocks, self.ctc_lo = nn.ModuleList(Conformer.Block() for _ in range(2)), nn.Linear(16, 30)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.project(F.relu(self.subsample(frames.mT)).mT)
        pos = torch.outer(torch.arange(x.shape[1]), torch.arange(16)).sin()
        for block in self.blocks:
            x = block(x, pos)
        return self.ctc_lo(F.layer_norm(x, (16,))).log_softmax(-1)


@case(
    {
        **{"conv?.weight": "convolution", "embed_tokens.weight": "embedding", "embed_positions": "table"},
        **{"*.query.weight": "oi", "*.key.weight": "oi", "*.value.weight": "oi", "*.out.weight": "oi"},
        **{"*.fc?.weight": "oi"},
    },
    FRAMES,
    TOKENS,
)
class Transcriber(nn.Module):
    """Whisper: convolutions, then encoder and decoder; the embedding's transpose makes the logits."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
            self.out = nn.Linear(16, 16)

        def forward(self, x: Tensor, xa: Tensor | None = None) -> Tensor:
            of = x if xa is None else xa
            q, k, v = (
                y.view(*y.shape[:2], 2, 8).permute(0, 2, 1, 3) for y in (self.query(x), self.key(of), self.value(of))
            )
            a = F.scaled_dot_product_attention(q, k, v, is_causal=xa is None)
            return self.out(a.permute(0, 2, 1, 3).flatten(start_dim=2))

    class Layer(nn.Module):
        def __init__(self, crosses: bool) -> None:
            super().__init__()
            self.attn, self.cross = Transcriber.Attention(), Transcriber.Attention() if crosses else None
            self.fc1, self.fc2 = nn.Linear(16, 40), nn.Linear(40, 16)

        def forward(self, x: Tensor, xa: Tensor | None = None) -> Tensor:
            x = x + self.attn(F.layer_norm(x, (16,)))
            if self.cross is not None:
                x = x + self.cross(F.layer_norm(x, (16,)), xa)
            return x + self.fc2(F.gelu(self.fc1(F.layer_norm(x, (16,)))))

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(20, 16, 3, padding=1), nn.Conv1d(16, 16, 3, 2, 1)
        self.encoder, self.decoder = Transcriber.Layer(False), Transcriber.Layer(True)
        self.embed_tokens, self.embed_positions = nn.Embedding(30, 16), nn.Parameter(torch.zeros(9, 16))

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        xa = self.encoder(F.gelu(self.conv2(F.gelu(self.conv1(mel.mT)))).mT)
        x = self.embed_tokens(tokens) + self.embed_positions[: tokens.shape[1]]
        return self.decoder(x, xa) @ self.embed_tokens.weight.t()


@case(
    {
        **{
            "emb.weight": "embedding",
            "*.maa_*": "table",
            "*.mix_w1": "io or io/5",
            "*.mix_w2": "eio",
            "*.decay_w1": "io",
        },
        **{"*.decay_w2": "io", "*.decay": "table", "*.faaaa": "table", "*.receptance.weight": "oi"},
        **{"*.key.weight": "oi", "*.value.weight": "oi", "*.gate.weight": "oi", "*.output.weight": "oi"},
        **{"ffn_key.weight": "oi", "ffn_value.weight": "oi", "ffn_receptance.weight": "oi", "unembed.weight": "head"},
    },
    TOKENS,
)
class TimeMix(nn.Module):
    """RWKV-6: five mixtures of a token and the one before, by factors of low rank, each with its own second factor."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("maa_x", "maa_w", "maa_k", "maa_v", "maa_r", "maa_g"):
                self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, 16)))
            self.mix_w1, self.mix_w2 = nn.Parameter(torch.zeros(16, 5 * 3)), nn.Parameter(torch.zeros(5, 3, 16))
            self.decay, self.faaaa = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(4, 4))
            self.decay_w1, self.decay_w2 = nn.Parameter(torch.zeros(16, 6)), nn.Parameter(torch.zeros(6, 16))
            self.receptance, self.key, self.value, self.gate = (nn.Linear(16, 16, bias=False) for _ in range(4))
            self.output, self.ln_x = nn.Linear(16, 16, bias=False), nn.GroupNorm(4, 16)

        def forward(self, x: Tensor) -> Tensor:
            rows, time, width = x.shape
            xx = F.pad(x, (0, 0, 1, -1)) - x
            xxx = torch.tanh((x + xx * self.maa_x) @ self.mix_w1).view(rows * time, 5, -1).transpose(0, 1)
            mw, mk, mv, mr, mg = torch.bmm(xxx, self.mix_w2).view(5, rows, time, width).unbind(0)
            r, k = self.receptance(x + xx * (self.maa_r + mr)), self.key(x + xx * (self.maa_k + mk))
            v, g = self.value(x + xx * (self.maa_v + mv)), F.silu(self.gate(x + xx * (self.maa_g + mg)))
            w = self.decay + torch.tanh((x + xx * (self.maa_w + mw)) @ self.decay_w1) @ self.decay_w2
            r, k, v, w = (y.view(rows, time, 4, 4).transpose(1, 2) for y in (r, k, v, (-w.exp()).exp()))
            state, out = x.new_zeros(rows, 4, 4, 4), []
            for t in range(time):
                kv = k[:, :, t, :, None] * v[:, :, t, None, :]
                out.append((r[:, :, t, None, :] @ (state + self.faaaa[..., None] * kv)).flatten(1))
                state = kv + w[:, :, t, :, None] * state
            return self.output(self.ln_x(torch.stack(out, 1).flatten(0, 1)).view(rows, time, width) * g)

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.att, self.unembed = nn.Embedding(30, 16), TimeMix.Attention(), nn.Linear(16, 30, bias=False)
        self.ffn_key, self.ffn_value = nn.Linear(16, 40, bias=False), nn.Linear(40, 16, bias=False)
        self.ffn_receptance = nn.Linear(16, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        x = x + self.att(F.layer_norm(x, (16,)))
        y = F.layer_norm(x, (16,))
        x = x + torch.sigmoid(self.ffn_receptance(y)) * self.ffn_value(torch.relu(self.ffn_key(y)) ** 2)
        return self.unembed(F.layer_norm(x, (16,)))


@case(
    {
        **{"emb.weight": "embedding", "*.expand.weight": "oi/2", "*.conv.weight": "convolution", "*.dt.weight": "oi"},
        **{"*.select.weight": "oi[3, 5, 5]", "*.A_log": "table", "*.contract.weight": "oi", "unembed.weight": "head"},
    },
    TOKENS,
)
class Selective(nn.Module):
    """Mamba, under other names: the scan's step, its input and its output are in one weight."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expand, self.contract = nn.Linear(16, 48, bias=False), nn.Linear(24, 16, bias=False)
            self.conv, self.select = nn.Conv1d(24, 24, 3, padding=2, groups=24), nn.Linear(24, 13, bias=False)
            self.dt, self.A_log = nn.Linear(3, 24), nn.Parameter(torch.zeros(24, 5))
            self.D = nn.Parameter(torch.ones(24))

        def forward(self, x: Tensor) -> Tensor:
            u, z = self.expand(x).chunk(2, dim=-1)
            u = F.silu(self.conv(u.mT)[..., : x.shape[1]]).mT
            step, b, c = self.select(u).split((3, 5, 5), dim=-1)
            step, state, seen = F.softplus(self.dt(step)), u.new_zeros(len(u), 24, 5), []
            for t in range(x.shape[1]):
                decay = torch.exp(step[:, t, :, None] * -self.A_log.exp())
                state = decay * state + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
                seen.append((state * c[:, t, None]).sum(-1))
            return self.contract((torch.stack(seen, 1) + u * self.D) * F.silu(z))

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.cell, self.unembed = nn.Embedding(30, 16), Selective.Cell(), nn.Linear(16, 30, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        return self.unembed(F.layer_norm(x + self.cell(F.layer_norm(x, (16,))), (16,)))


@case(
    {
        **{"emb.weight": "embedding", "enter.weight": "oi[24, 24, 10, 10, 4]", "conv.weight": "convolution"},
        **{"leave.weight": "oi", "unembed.weight": "head"},
    },
    TOKENS,
)
class ScalarDecay(nn.Module):
    """Mamba 2, under other names: z, x, B, C and dt of four heads, x, B and C through one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.enter, self.leave = nn.Embedding(30, 16), nn.Linear(16, 72, bias=False), nn.Linear(24, 16)
        self.conv, self.norm = nn.Conv1d(44, 44, 3, padding=2, groups=44), nn.RMSNorm(24)
        self.A, self.bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.unembed = nn.Linear(16, 30, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.emb(tokens)
        z, xbc, dt = torch.split(self.enter(F.layer_norm(h, (16,))), [24, 44, 4], dim=-1)
        x, b, c = F.silu(self.conv(xbc.mT)[..., : h.shape[1]].mT).split([24, 10, 10], -1)
        dt, x = F.softplus(dt + self.bias), x.unflatten(-1, (4, 6))
        state, seen = x.new_zeros(len(x), 4, 6, 10), []
        for t in range(h.shape[1]):
            decay = torch.exp(-dt[:, t] * self.A.exp())[..., None, None]
            state = state * decay + torch.einsum("bh,bn,bhp->bhpn", dt[:, t], b[:, t], x[:, t])
            seen.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]).flatten(1))
        h = h + self.leave(self.norm(torch.stack(seen, 1) * F.silu(z)))
        return self.unembed(F.layer_norm(h, (16,)))


@case(
    {
        **{"prenet.*.weight": "oi", "rnn.weight_?h": "oi/4", "query.weight": "oi", "memory.weight": "oi"},
        **{"location.weight": "convolution", "location_dense.weight": "oi", "energy.weight": "vector"},
        **{"mel_linear.weight": "head", "stop.weight": "vector", "text.weight": "embedding"},
    },
    FRAMES,
    TOKENS,
)
class Synthesizer(nn.Module):
    """Tacotron 2: a cell, and attention that adds the query, the memory and where it looked before."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.prenet = nn.Embedding(30, 14), nn.Sequential(nn.Linear(20, 18), nn.ReLU(), nn.Linear(18, 18))
        self.rnn, self.query, self.memory = nn.LSTMCell(18 + 14, 16), nn.Linear(16, 10), nn.Linear(14, 10)
        self.location, self.location_dense = nn.Conv1d(1, 4, 3, padding=1), nn.Linear(4, 10)
        self.energy, self.mel_linear, self.stop = nn.Linear(10, 1), nn.Linear(30, 20), nn.Linear(30, 1)

    def forward(self, frames: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        memory = self.text(tokens)
        keys, looked, state, mels, stops = self.memory(memory), memory.new_zeros(memory.shape[:2]), None, [], []
        context = memory.new_zeros(len(memory), 14)
        for frame in frames.unbind(1):
            state = self.rnn(torch.cat([self.prenet(frame), context], -1), state)
            where = self.location_dense(self.location(looked[:, None]).mT)
            looked = self.energy(torch.tanh(self.query(state[0])[:, None] + keys + where)).squeeze(-1).softmax(-1)
            context = (looked[:, None] @ memory)[:, 0]
            both = torch.cat([state[0], context], -1)
            mels.append(self.mel_linear(both))
            stops.append(self.stop(both))
        return torch.stack(mels, 1), torch.cat(stops, 1)


@case(
    {"u.weight": "oi", "log_A": "table", "C": "table", "mixed.weight": "oi/2", "decode.weight": "head"},
    SERIES,
)
class Diagonal(nn.Module):
    """S4D: a diagonal state whose kernel is made of tables, then a gated linear."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.mixed, self.decode = nn.Linear(12, 16), nn.Linear(16, 32), nn.Linear(16, 30)
        self.log_A, self.C = nn.Parameter(torch.zeros(16, 4)), nn.Parameter(torch.zeros(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        u, time = self.u(x), torch.arange(x.shape[1])
        kernel = (self.C[..., None] * torch.exp(-self.log_A.exp()[..., None] * time)).sum(1)
        y = torch.stack([(u[:, : t + 1].flip(1) * kernel.mT[: t + 1]).sum(1) for t in time.tolist()], 1)
        return self.decode(u + F.glu(self.mixed(F.gelu(y)), -1))
