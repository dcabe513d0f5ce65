"""Models of diffusion and flow matching: their conditions shift, scale and gate."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.truth import case

LATENT, TIMES, LABELS = torch.zeros(2, 4, 8, 8), torch.zeros(2), torch.zeros(2, dtype=torch.long)
TEXT = torch.zeros(2, 6, 12)
WIDTH = 24


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int = 4) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def waves(times: Tensor, width: int) -> Tensor:
    angles = times[:, None] * torch.arange(1, width // 2 + 1)
    return torch.cat([angles.sin(), angles.cos()], -1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def unpatchify(x: Tensor, channels: int = 4) -> Tensor:
    """(rows, 16, 4 * channels) to (rows, channels, 8, 8)."""
    return x.view(-1, 4, 4, 2, 2, channels).permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, 8, 8)


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SelfAttention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(attend(*self.qkv(x).chunk(3, -1)))


INSIDE = {"*.qkv.weight": "oi/3", "*.proj.weight": "oi", "*.fc?.weight": "oi"}


class SixFold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = SelfAttention(), Mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(F.layer_norm(x, (WIDTH,)), shift_a, scale_a))
        return x + gate_m.unsqueeze(1) * self.mlp(modulate(F.layer_norm(x, (WIDTH,)), shift_m, scale_m))


class LastLayer(nn.Module):
    def __init__(self, outputs: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(F.layer_norm(x, (WIDTH,)), shift, scale))


@case(
    {
        **{"x_embedder.weight": "convolution", "y_embedder.weight": "embedding", "t_embedder.*.weight": "oi", **INSIDE},
        **{"blocks.*.adaLN_modulation.1.weight": "oi/6", "final_layer.adaLN_modulation.1.weight": "oi/2"},
        "final_layer.linear.weight": "head",
    },
    LATENT,
    TIMES,
    LABELS,
)
class Modulated(nn.Module):
    """DiT, as published."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.y_embedder = nn.Conv2d(4, WIDTH, 2, 2), nn.Embedding(11, WIDTH)
        self.t_embedder = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks, self.final_layer = nn.ModuleList(SixFold() for _ in range(2)), LastLayer()

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2)
        c = self.t_embedder(waves(t, 16)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        return unpatchify(self.final_layer(x, c))


@case(
    {
        **{"embed.weight": "oi", "caption.*.weight": "oi", "time.*.weight": "oi", "time_block.1.weight": "oi/6"},
        **{"*scale_shift_table": "table", **INSIDE, "*.q.weight": "oi", "*.kv.weight": "oi/2", "*.o.weight": "oi"},
        "proj_out.weight": "head",
    },
    LATENT,
    TIMES,
    TEXT,
)
class SharedModulation(nn.Module):
    """PixArt: one modulation for all blocks, to which each adds a table."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = SelfAttention(), Mlp()
            self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.scale_shift_table = nn.Parameter(torch.zeros(6, WIDTH))

        def forward(self, x: Tensor, text: Tensor, t: Tensor) -> Tensor:
            parts = (self.scale_shift_table[None] + t.reshape(len(x), 6, -1)).chunk(6, dim=1)
            shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = parts
            x = x + gate_a * self.attn(F.layer_norm(x, (WIDTH,)) * (1 + scale_a) + shift_a)
            k, v = self.kv(text).view(len(x), -1, 2, WIDTH).unbind(2)
            x = x + self.o(attend(self.q(x), k, v))
            return x + gate_m * self.mlp(F.layer_norm(x, (WIDTH,)) * (1 + scale_m) + shift_m)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.caption = nn.Linear(16, WIDTH), nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 24))
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.time_block = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.blocks = nn.ModuleList(SharedModulation.Block() for _ in range(2))
        self.scale_shift_table, self.proj_out = nn.Parameter(torch.zeros(2, WIDTH)), nn.Linear(WIDTH, 16)

    def forward(self, latent: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        x, text = self.embed(F.unfold(latent, 2, stride=2).mT), self.caption(text)
        emb = self.time(waves(timestep, 16))
        t = self.time_block(emb)
        for block in self.blocks:
            x = block(x, text, t)
        shift, scale = (self.scale_shift_table[None] + emb[:, None]).chunk(2, dim=1)
        return unpatchify(self.proj_out(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift))


@case(
    {
        **{"img_in.weight": "oi", "txt_in.weight": "oi", "time_in.weight": "oi", "doubled.*_mod.lin.weight": "oi/6"},
        **{"doubled.*_attn.qkv.weight": "oi/3", "doubled.*_attn.proj.weight": "oi", "doubled.*_mlp.fc?.weight": "oi"},
        **{"single.modulation.lin.weight": "oi/3", "single.linear1.weight": "oi[24, 24, 24, 40]"},
        **{"single.linear2.weight": "oi", "final.linear.weight": "head", "final.adaLN_modulation.1.weight": "oi/2"},
    },
    LATENT,
    TEXT,
    TIMES,
)
class TwoStreams(nn.Module):
    """Flux: blocks of two streams, then one whose first linear makes queries, keys, values and the hidden layer."""

    class Modulation(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count, self.lin = count, nn.Linear(WIDTH, count * WIDTH)

        def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
            return self.lin(F.silu(vec))[:, None, :].chunk(self.count, dim=-1)

    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.img_mod, self.txt_mod = TwoStreams.Modulation(6), TwoStreams.Modulation(6)
            self.img_attn, self.txt_attn, self.img_mlp, self.txt_mlp = SelfAttention(), SelfAttention(), Mlp(), Mlp()

        def forward(self, img: Tensor, txt: Tensor, vec: Tensor) -> tuple[Tensor, Tensor]:
            streams = ((img, self.img_mod, self.img_attn), (txt, self.txt_mod, self.txt_attn))
            mods = [mod(vec) for _, mod, _ in streams]
            inner = [F.layer_norm(x, (WIDTH,)) * (1 + m[1]) + m[0] for (x, _, _), m in zip(streams, mods)]
            qkv = [a.qkv(x).unflatten(-1, (3, -1)).unbind(-2) for (_, _, a), x in zip(streams, inner)]
            mixed = attend(*(torch.cat([a, b], 1) for a, b in zip(*qkv)))
            img = img + mods[0][2] * self.img_attn.proj(mixed[:, : img.shape[1]])
            txt = txt + mods[1][2] * self.txt_attn.proj(mixed[:, img.shape[1] :])
            img = img + mods[0][5] * self.img_mlp(F.layer_norm(img, (WIDTH,)) * (1 + mods[0][4]) + mods[0][3])
            return img, txt + mods[1][5] * self.txt_mlp(F.layer_norm(txt, (WIDTH,)) * (1 + mods[1][4]) + mods[1][3])

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear1, self.linear2 = nn.Linear(WIDTH, 3 * WIDTH + 40), nn.Linear(WIDTH + 40, WIDTH)
            self.modulation = TwoStreams.Modulation(3)

        def forward(self, x: Tensor, vec: Tensor) -> Tensor:
            shift, scale, gate = self.modulation(vec)
            qkv, mlp = torch.split(
                self.linear1((1 + scale) * F.layer_norm(x, (WIDTH,)) + shift), [3 * WIDTH, 40], dim=-1
            )
            q, k, v = qkv.chunk(3, -1)
            return x + gate * self.linear2(torch.cat((attend(q, k, v), F.gelu(mlp)), 2))

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in, self.time_in = nn.Linear(16, WIDTH), nn.Linear(12, WIDTH), nn.Linear(16, WIDTH)
        self.doubled, self.single, self.final = TwoStreams.Double(), TwoStreams.Single(), LastLayer()

    def forward(self, latent: Tensor, text: Tensor, t: Tensor) -> Tensor:
        img, txt, vec = self.img_in(F.unfold(latent, 2, stride=2).mT), self.txt_in(text), self.time_in(waves(t, 16))
        img, txt = self.doubled(img, txt, vec)
        x = self.single(torch.cat((txt, img), 1), vec)[:, txt.shape[1] :]
        return unpatchify(self.final(x, vec))


@case(
    {
        **{"embed.weight": "convolution", "place": "table", "context_in.weight": "oi", "time.weight": "oi"},
        **{"joint.x.linear.weight": "oi/9", "joint.c.linear.weight": "oi/6", "last.x.linear.weight": "oi/6"},
        **{"last.c.linear.weight": "oi/2", "*.to_?.weight": "oi", "*.add_?.weight": "oi", "*.out*.weight": "oi"},
        **{"*.second.qkv.weight": "oi/3", "*.second.proj.weight": "oi", "*.ff*.fc?.weight": "oi"},
        **{"norm_out.weight": "oi/2", "proj_out.weight": "head"},
    },
    LATENT,
    TEXT,
    TIMES,
)
class JointStreams(nn.Module):
    """SD3.5: nine-fold modulation where a block attends twice; the last block ends the text with two."""

    class Norm(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, count * WIDTH)

        def forward(self, emb: Tensor) -> Tensor:
            return self.linear(F.silu(emb))

    class Block(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.last = last
            self.x, self.c = JointStreams.Norm(6 if last else 9), JointStreams.Norm(2 if last else 6)
            for name in ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v", "out", *(() if last else ("out_c",))):
                setattr(self, name, nn.Linear(WIDTH, WIDTH))
            self.second, self.ff = None if last else SelfAttention(), Mlp()
            self.ff_c = None if last else Mlp()

        def forward(self, hidden: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
            more = None
            normed, normed_c = F.layer_norm(hidden, (WIDTH,)), F.layer_norm(context, (WIDTH,))
            if self.last:
                shift, scale, gate, shift_m, scale_m, gate_m = self.x(temb).chunk(6, dim=1)
                scale_c, shift_c = self.c(temb).chunk(2, dim=1)
            else:
                shift, scale, gate, shift_m, scale_m, gate_m, *more = self.x(temb).chunk(9, dim=1)
                shift_c, scale_c, gate_c, shift_n, scale_n, gate_n = self.c(temb).chunk(6, dim=1)
            x = normed * (1 + scale[:, None]) + shift[:, None]
            c = normed_c * (1 + scale_c[:, None]) + shift_c[:, None]
            q = torch.cat([self.to_q(x), self.add_q(c)], 1)  # type: ignore[operator]
            k = torch.cat([self.to_k(x), self.add_k(c)], 1)  # type: ignore[operator]
            v = torch.cat([self.to_v(x), self.add_v(c)], 1)  # type: ignore[operator]
            x, c = attend(q, k, v).split([x.shape[1], c.shape[1]], 1)
            hidden = hidden + gate.unsqueeze(1) * self.out(x)  # type: ignore[operator]
            if more is not None and self.second is not None:
                again = normed * (1 + more[1][:, None]) + more[0][:, None]
                hidden = hidden + more[2].unsqueeze(1) * self.second(again)
            normed = F.layer_norm(hidden, (WIDTH,)) * (1 + scale_m[:, None]) + shift_m[:, None]
            hidden = hidden + gate_m.unsqueeze(1) * self.ff(normed)
            if self.ff_c is None:
                return hidden, context
            context = context + gate_c.unsqueeze(1) * self.out_c(c)  # type: ignore[operator]
            normed_c = F.layer_norm(context, (WIDTH,)) * (1 + scale_n[:, None]) + shift_n[:, None]
            return hidden, context + gate_n.unsqueeze(1) * self.ff_c(normed_c)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Conv2d(4, WIDTH, 2, 2), nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.context_in, self.time = nn.Linear(12, WIDTH), nn.Linear(16, WIDTH)
        self.joint, self.last = JointStreams.Block(False), JointStreams.Block(True)
        self.norm_out, self.proj_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, latent: Tensor, text: Tensor, t: Tensor) -> Tensor:
        x, c = self.embed(latent).flatten(2).mT + self.place, self.context_in(text)
        temb = self.time(waves(t, 16))
        x, c = self.joint(x, c, temb)
        x, c = self.last(x, c, temb)
        scale, shift = self.norm_out(F.silu(temb)).chunk(2, dim=1)
        return unpatchify(self.proj_out(F.layer_norm(x, (WIDTH,)) * (1 + scale)[:, None] + shift[:, None]))


@case(
    {
        **{"patch.weight": "convolution", "text.weight": "oi", "time.weight": "oi", "to_six.1.weight": "oi/6"},
        **{"*.modulation": "table", "*.q.weight": "oi", "*.k.weight": "oi", "*.v.weight": "oi", "*.o.weight": "oi"},
        **{"*.ffn.fc?.weight": "oi", "head.head.weight": "head"},
    },
    torch.zeros(2, 4, 2, 8, 8),
    TIMES,
    TEXT,
)
class Video(nn.Module):
    """Wan: a projection of six, to which each block adds a table of (1, 6, width)."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.norm_q, self.norm_k = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            return self.o(attend(self.norm_q(self.q(x)), self.norm_k(self.k(context)), self.v(context)))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mine, self.cross, self.ffn = Video.Attention(), Video.Attention(), Mlp()
            self.modulation = nn.Parameter(torch.zeros(1, 6, WIDTH))

        def forward(self, x: Tensor, e: Tensor, context: Tensor) -> Tensor:
            e6 = (self.modulation + e).chunk(6, dim=1)
            y = F.layer_norm(x, (WIDTH,)) * (1 + e6[1]) + e6[0]
            x = x + self.mine(y, y) * e6[2]
            x = x + self.cross(F.layer_norm(x, (WIDTH,)), context)
            return x + self.ffn(F.layer_norm(x, (WIDTH,)) * (1 + e6[4]) + e6[3]) * e6[5]

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.modulation = nn.Linear(WIDTH, 16), nn.Parameter(torch.zeros(1, 2, WIDTH))

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            shift, scale = (self.modulation + e.unsqueeze(1)).chunk(2, dim=1)
            return self.head(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.text = nn.Conv3d(4, WIDTH, (1, 2, 2), (1, 2, 2)), nn.Linear(12, WIDTH)
        self.time, self.to_six = nn.Linear(16, WIDTH), nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.blocks, self.head = nn.ModuleList(Video.Block() for _ in range(2)), Video.Head()

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        x, context = self.patch(x).flatten(2).transpose(1, 2), self.text(context)
        e = F.silu(self.time(waves(t, 16)))
        e0 = self.to_six(e).unflatten(1, (6, WIDTH))
        for block in self.blocks:
            x = block(x, e0, context)
        return self.head(x, e).view(-1, 2, 4, 4, 2, 2, 4).permute(0, 6, 1, 2, 4, 3, 5).reshape(-1, 4, 2, 8, 8)


@case(
    {
        **{"embed.weight": "oi", "when.weight": "oi", "*.modulation.weight": "oi/4", "*.qkv.weight": "oi/3"},
        **{"*.proj.weight": "oi", "*.fc?.weight": "oi", "end.weight": "oi", "out.weight": "head"},
    },
    LATENT,
    TIMES,
)
class FourFold(nn.Module):
    """Z-Image: two scales and two gates, which go through tanh; the last layer has a scale alone."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.feed_forward = SelfAttention(), Mlp()
            self.modulation = nn.Linear(WIDTH, 4 * WIDTH)
            self.n1, self.n2, self.n3, self.n4 = (nn.RMSNorm(WIDTH) for _ in range(4))

        def forward(self, x: Tensor, adaln_input: Tensor) -> Tensor:
            scale_a, gate_a, scale_m, gate_m = self.modulation(adaln_input).unsqueeze(1).chunk(4, dim=2)
            gate_a, gate_m, scale_a, scale_m = gate_a.tanh(), gate_m.tanh(), 1.0 + scale_a, 1.0 + scale_m
            x = x + gate_a * self.n2(self.attention(self.n1(x) * scale_a))
            return x + gate_m * self.n4(self.feed_forward(self.n3(x) * scale_m))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.when = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(FourFold.Block() for _ in range(2))
        self.end, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, latent: Tensor, t: Tensor) -> Tensor:
        x, c = self.embed(F.unfold(latent, 2, stride=2).mT), self.when(waves(t, 16))
        for layer in self.layers:
            x = layer(x, c)
        return unpatchify(self.out(F.layer_norm(x, (WIDTH,)) * (1 + self.end(F.silu(c))).unsqueeze(1)))


@case(
    {
        **{"conv_*.weight": "convolution", "*.conv?.weight": "convolution", "time_embedding.*.weight": "oi"},
        **{"down.time_emb_proj.weight": "oi/2", "mid.time_emb_proj.weight": "oi", "*.to_?.weight": "oi"},
        **{"*.to_out.weight": "oi", "*.net.proj.weight": "oi/2", "*.net.out.weight": "oi"},
    },
    LATENT,
    TIMES,
    TEXT,
)
class Unet(nn.Module):
    """A UNet: residual blocks whose time scales and shifts, or is added; a transformer block with GEGLU."""

    class Residual(nn.Module):
        def __init__(self, scales: bool) -> None:
            super().__init__()
            self.scales = scales
            self.conv1, self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, 1, 1), nn.Conv2d(WIDTH, WIDTH, 3, 1, 1)
            self.norm1, self.norm2 = nn.GroupNorm(4, WIDTH), nn.GroupNorm(4, WIDTH)
            self.time_emb_proj = nn.Linear(WIDTH, 2 * WIDTH if scales else WIDTH)

        def forward(self, x: Tensor, temb: Tensor) -> Tensor:
            h, emb = self.conv1(F.silu(self.norm1(x))), self.time_emb_proj(F.silu(temb))[:, :, None, None]
            if self.scales:
                scale, shift = torch.chunk(emb, 2, dim=1)
                h = self.norm2(h) * (1 + scale) + shift
            else:
                h = self.norm2(h + emb)
            return x + self.conv2(F.silu(h))

    class Geglu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.out = nn.Linear(WIDTH, 80), nn.Linear(40, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x, gate = self.proj(x).chunk(2, dim=-1)
            return self.out(x * F.gelu(gate))

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v = nn.Linear(WIDTH, WIDTH), nn.Linear(12, WIDTH), nn.Linear(12, WIDTH)
            self.to_out, self.net, self.norm = nn.Linear(WIDTH, WIDTH), Unet.Geglu(), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            y = x.flatten(2).mT
            y = y + self.to_out(attend(self.to_q(y), *(f(encoder_hidden_states) for f in (self.to_k, self.to_v))))
            y = y + self.net(self.norm(y))
            return x + y.mT.view_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, WIDTH, 3, 1, 1), nn.Conv2d(2 * WIDTH, 4, 3, 1, 1)
        self.time_embedding = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.down, self.cross, self.mid = Unet.Residual(True), Unet.Cross(), Unet.Residual(False)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        temb = self.time_embedding(waves(timestep, 16))
        skip = self.conv_in(sample)
        x = self.cross(self.down(skip, temb), encoder_hidden_states)
        return self.conv_out(F.silu(torch.cat([self.mid(x, temb), skip], dim=1)))


@case(
    {
        **{"embed.weight": "oi", "when.weight": "oi", "text.weight": "oi", "*.norm?.linear.weight": "oi/6"},
        **{"*.attn.qkv.weight": "oi/3", "*.attn.proj.weight": "oi", "*.ff.fc?.weight": "oi"},
        **{"norm_out.weight": "oi/2", "out.weight": "head"},
    },
    LATENT,
    TIMES,
    TEXT,
)
class Expanded(nn.Module):
    """CogVideoX: both norms are six-fold, three for the image and three for the text, which go on in one tensor."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, 6 * WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, text: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
            shift, scale, gate, enc_shift, enc_scale, enc_gate = self.linear(F.silu(temb)).chunk(6, dim=1)
            x = self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]
            text = self.norm(text) * (1 + enc_scale)[:, None, :] + enc_shift[:, None, :]
            return x, text, gate[:, None, :], enc_gate[:, None, :]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.attn, self.ff = Expanded.Norm(), Expanded.Norm(), SelfAttention(), Mlp()

        def forward(self, x: Tensor, text: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
            y, y_text, gate, gate_text = self.norm1(x, text, temb)
            both, count = self.attn(torch.cat([y_text, y], dim=1)), text.shape[1]
            x, text = x + gate * both[:, count:], text + gate_text * both[:, :count]
            y, y_text, gate, gate_text = self.norm2(x, text, temb)
            both = self.ff(torch.cat([y_text, y], dim=1))
            return x + gate * both[:, count:], text + gate_text * both[:, :count]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.text, self.when = nn.Linear(16, WIDTH), nn.Linear(12, WIDTH), nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Expanded.Block() for _ in range(2))
        self.norm_out, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, latent: Tensor, t: Tensor, text: Tensor) -> Tensor:
        x, text, temb = self.embed(F.unfold(latent, 2, stride=2).mT), self.text(text), self.when(waves(t, 16))
        for block in self.blocks:
            x, text = block(x, text, temb)
        both = F.layer_norm(torch.cat([text, x], dim=1), (WIDTH,))[:, text.shape[1] :]
        shift, scale = self.norm_out(F.silu(temb)).chunk(2, dim=1)
        return unpatchify(self.out(both * (1 + scale)[:, None, :] + shift[:, None, :]))


@case({"lift.weight": "oi", "film.?.weight": "oi/2", "layers.*.weight": "oi", "final.weight": "head"}, TEXT, TIMES)
class Film(nn.Module):
    """Features are scaled and shifted by a condition, side by side for each channel: (width, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.film = nn.Linear(12, WIDTH), nn.ModuleList(nn.Linear(16, 2 * WIDTH) for _ in range(2))
        self.layers, self.final = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.lift(x)
        for film, layer in zip(self.film, self.layers):
            gain, offset = film(waves(t, 16))[:, None].tensor_split(2, -1)
            x = x + F.relu(gain * layer(F.layer_norm(x, (WIDTH,))) + offset)
        return self.final(x)


@case({"lift.weight": "oi", "film.weight": "oi%2", "layer.weight": "oi", "final.weight": "head"}, TEXT, TIMES)
class InterleavedFilm(nn.Module):
    """The same, gain and offset of each channel beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.film = nn.Linear(12, WIDTH), nn.Linear(16, 2 * WIDTH)
        self.layer, self.final = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.lift(x)
        gain, offset = self.film(waves(t, 16))[:, None].unflatten(-1, (WIDTH, 2)).unbind(-1)
        return self.final(x + F.relu(gain * self.layer(F.layer_norm(x, (WIDTH,))) + offset))


@case(
    {
        **{"encoder.*.weight": "oi", "moments.weight": "oi/2", "decoder.0.weight": "oi", "decoder.2.weight": "head"},
    },
    TEXT,
)
class Variational(nn.Module):
    """An autoencoder: mean and logarithm of the variance in one linear, added after noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU())
        self.moments, self.decoder = nn.Linear(20, 16), nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 12))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.moments(self.encoder(x)).chunk(2, -1)
        return self.decoder(mean + torch.exp(0.5 * log_variance) * torch.ones_like(mean))


@case({"entry.*.weight": "oi", "codes": "table", "exit.0.weight": "oi", "exit.2.weight": "head"}, TEXT)
class Codebook(nn.Module):
    """A VQ-VAE: the nearest row of a table takes the place of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8))
        self.codes = nn.Parameter(torch.zeros(30, 8))
        self.exit = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.entry(x)
        code = self.codes[(z.unsqueeze(-2) - self.codes).square().sum(-1).argmin(-1)]
        return self.exit(z + (code - z).detach()), (code - z.detach()).square().mean()


@case(
    {
        **{"fold.weight": "oi", "a.qkv.weight": "oi/3", "a.proj.weight": "oi", "b.qkv.weight": "oi/3"},
        **{"b.proj.weight": "oi", "skip_linear.weight": "oi", "unfold.weight": "head", "when.weight": "oi"},
    },
    LATENT,
    TIMES,
)
class LongSkips(nn.Module):
    """A U-ViT: time is a token, and a linear joins a block with an earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.fold, self.when, self.unfold = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.a, self.b, self.skip_linear = SelfAttention(), SelfAttention(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, latent: Tensor, t: Tensor) -> Tensor:
        x = torch.cat([self.when(waves(t, 16))[:, None], self.fold(F.unfold(latent, 2, stride=2).mT)], 1)
        skip = x
        x = x + self.a(F.layer_norm(x, (WIDTH,)))
        x = self.skip_linear(torch.cat([x, skip], -1))
        x = x + self.b(F.layer_norm(x, (WIDTH,)))
        return unpatchify(self.unfold(F.layer_norm(x, (WIDTH,))[:, 1:]))


@case(
    {
        **{"fold.weight": "oi", "block.six.1.weight": "oi/6", "block.?.weight": "oi", "block.mlp.fc?.weight": "oi"},
        **{"unfold.weight": "head"},
    },
    LATENT,
    TIMES,
)
class TwoSteps(nn.Module):
    """Kandinsky: the modulation is divided into two, and each half into three; queries and keys are turned by matrices.

    The block does without the matrices, but its caller gives them.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.six = nn.Sequential(nn.SiLU(), nn.Linear(10, 6 * WIDTH))
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.mlp = Mlp()

        def forward(self, x: Tensor, when: Tensor, rope: Tensor) -> Tensor:
            of_attention, of_mlp = self.six(when).unsqueeze(1).chunk(2, -1)
            shift, scale, gate = of_attention.chunk(3, -1)
            y = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
            q, k = (self._turned(linear(y), rope) for linear in (self.q, self.k))
            x = x + gate * self.o(attend(q, k, self.v(y)))
            shift, scale, gate = of_mlp.chunk(3, -1)
            return x + gate * self.mlp(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)

        def _turned(self, x: Tensor, rope: Tensor) -> Tensor:
            pairs = x.unflatten(-1, (4, -1, 1, 2))
            return (rope * pairs).sum(-1).flatten(-3)

    def __init__(self) -> None:
        super().__init__()
        self.fold, self.block, self.unfold = nn.Linear(16, WIDTH), self.Block(), nn.Linear(WIDTH, 16)

    def forward(self, latent: Tensor, t: Tensor) -> Tensor:
        angles = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
        rope = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).view(16, 1, 3, 2, 2)
        x = self.block(self.fold(F.unfold(latent, 2, stride=2).mT), waves(t, 10), rope.to(latent.device))
        return unpatchify(self.unfold(F.layer_norm(x, (WIDTH,))))
