"""Encoders with decoders, detectors, and heads of tasks; torch's own modules among them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.truth import case

SOURCE, TARGET, IMAGES = torch.arange(10).view(2, 5), torch.arange(8).view(2, 4), torch.zeros(2, 3, 16, 16)
WIDTH = 16
ATTENTION = {f"*.{name}_proj.weight": "oi" for name in ("q", "k", "v", "out")}
FEEDFORWARD = {"*.fc1.weight": "oi", "*.fc2.weight": "oi"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        other = x if other is None else other
        q, k, v = (
            y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(other), self.v_proj(other))
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, crosses: bool = False) -> None:
        super().__init__()
        self.mine, self.cross = Attention(), Attention() if crosses else None
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.n1(x + self.mine(x))
        if self.cross is not None:
            x = self.n2(x + self.cross(x, memory))
        return self.n3(x + self.fc2(F.gelu(self.fc1(x))))


@case(
    {
        **{"shared.weight": "embedding", "positions.weight": "embedding", **ATTENTION, **FEEDFORWARD},
        **{"classification_head.dense.weight": "oi", "classification_head.final.weight": "head"},
    },
    SOURCE,
    TARGET,
)
class SequencePair(nn.Module):
    """BART with a classifier, whose first linear is a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.positions = nn.Embedding(30, WIDTH), nn.Embedding(9, WIDTH)
        self.encoder, self.decoder = Layer(), Layer(True)
        self.classification_head = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "final": nn.Linear(WIDTH, 3)})

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.shared(source) + self.positions(torch.arange(source.shape[1])))
        x = self.decoder(self.shared(target) + self.positions(torch.arange(target.shape[1])), memory)
        return self.classification_head["final"](torch.tanh(self.classification_head["dense"](x[:, -1])))


@case(
    {
        **{"shared.weight": "embedding", "offsets.weight": "embedding", "*.q.weight": "oi", "*.k.weight": "oi"},
        **{"*.v.weight": "oi", "*.o.weight": "oi", "*.wi_?.weight": "oi", "*.wo.weight": "oi"},
        "to_words.weight": "head",
    },
    SOURCE,
    TARGET,
)
class TextToText(nn.Module):
    """T5 1.1: relative positions from an embedding, gated layers, an untied output."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.wi_0, self.wi_1 = nn.Linear(WIDTH, 24, bias=False), nn.Linear(WIDTH, 24, bias=False)
            self.wo, self.n1, self.n2 = nn.Linear(24, WIDTH, bias=False), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

        def forward(self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> Tensor:
            y = self.n1(x)
            of = y if memory is None else memory
            q, k, v = (z.view(*z.shape[:2], 2, -1).transpose(1, 2) for z in (self.q(y), self.k(of), self.v(of)))
            scores = q.matmul(k.transpose(3, 2)) + (0 if bias is None else bias)
            x = x + self.o(scores.float().softmax(-1).matmul(v).transpose(1, 2).flatten(2))
            y = self.n2(x)
            return x + self.wo(F.gelu(self.wi_0(y)) * self.wi_1(y))

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.offsets = nn.Embedding(30, WIDTH), nn.Embedding(9, 2)
        self.read, self.write, self.cross = TextToText.Block(), TextToText.Block(), TextToText.Block()
        self.norm, self.to_words = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 30, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        def bias(length: int) -> Tensor:
            at = torch.arange(length)
            return self.offsets(at[:, None] - at + 4).permute(2, 0, 1)[None]

        memory = self.read(self.shared(source), bias(source.shape[1]))
        x = self.cross(self.write(self.shared(target), bias(target.shape[1])), None, memory)
        return self.to_words(self.norm(x))


@case(
    {
        **{"source.weight": "embedding", "target.weight": "embedding", "core.*.in_proj_weight": "oi/3"},
        **{"core.*.out_proj.weight": "oi", "core.*.linear?.weight": "oi", "generator.weight": "head"},
    },
    SOURCE,
    TARGET,
)
class Translator(nn.Module):
    """torch's nn.Transformer between two vocabularies; the output layer is called ``generator``."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(30, WIDTH), nn.Embedding(29, WIDTH)
        self.core = nn.Transformer(WIDTH, 2, 1, 1, 24, batch_first=True)
        self.generator = nn.Linear(WIDTH, 29)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.generator(self.core(self.source(source), self.target(target)))


@case(
    {
        **{"backbone.weight": "convolution", "query_embed.weight": "embedding", **ATTENTION, **FEEDFORWARD},
        **{"class_labels.weight": "head", "boxes.0.weight": "oi", "boxes.2.weight": "oi", "boxes.4.weight": "head"},
        "squares.weight": "table",
    },
    IMAGES,
)
class Detector(nn.Module):
    """DETR: queries are looked up whole, boxes have two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.squares = nn.Conv2d(3, WIDTH, 4, 4), nn.ParameterDict({"weight": torch.zeros(16, WIDTH)})
        self.query_embed, self.encoder, self.decoder = nn.Embedding(5, WIDTH), Layer(), Layer(True)
        self.class_labels = nn.Linear(WIDTH, 4)
        hidden = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        self.boxes = nn.Sequential(*hidden)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        memory = self.encoder(self.backbone(images).flatten(2).mT + self.squares["weight"])
        x = self.decoder(self.query_embed.weight[None].expand(len(images), -1, -1), memory)
        return {"logits": self.class_labels(x), "boxes": self.boxes(x).sigmoid()}


@case(
    {
        **{
            "pixels.weight": "convolution",
            "slots": "table",
            **ATTENTION,
            **FEEDFORWARD,
            "class_predictor.weight": "head",
        },
        "mask_embedder.?.weight": "oi",
    },
    IMAGES,
)
class MaskClassifier(nn.Module):
    """MaskFormer: masks are products of embeddings with pixels, so that only the classes' linear is a head."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels, self.slots, self.decoder = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(5, 16)), Layer(True)
        self.class_predictor = nn.Linear(WIDTH, 4)
        self.mask_embedder = nn.Sequential(nn.Linear(WIDTH, 20), nn.ReLU(), nn.Linear(20, WIDTH))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = self.pixels(images)
        x = self.decoder(self.slots.expand(len(images), -1, -1), pixels.flatten(2).mT)
        return self.class_predictor(x), torch.einsum("bqc,bchw->bqhw", self.mask_embedder(x), pixels)


@case(
    {
        **{
            "source.weight": "embedding",
            "target.weight": "embedding",
            "reader.weight_?h_l0*": "oi/3",
            "fold.weight": "oi",
        },
        **{
            "writer.weight_?h": "oi/3",
            "W_a.weight": "oi",
            "U_a.weight": "oi",
            "v_a": "vector",
            "to_target.weight": "head",
        },
    },
    SOURCE,
    TARGET,
)
class Aligner(nn.Module):
    """Bahdanau's: a GRU of both directions, a cell, attention by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(30, 12), nn.Embedding(29, 10)
        self.reader, self.fold = nn.GRU(12, 14, bidirectional=True, batch_first=True), nn.Linear(14, WIDTH)
        self.writer, self.to_target = nn.GRUCell(10 + 28, WIDTH), nn.Linear(WIDTH + 28, 29)
        self.W_a, self.U_a = nn.Linear(WIDTH, 11, bias=False), nn.Linear(28, 11, bias=False)
        self.v_a = nn.Parameter(torch.zeros(1, 11))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.reader(self.source(source))
        keys, state, written = self.U_a(memory), torch.tanh(self.fold(last[-1])), []
        for word in self.target(target).unbind(1):
            scores = (torch.tanh(self.W_a(state)[:, None] + keys) * self.v_a).sum(-1)
            context = torch.einsum("bt,btd->bd", scores.softmax(-1), memory)
            state = self.writer(torch.cat([word, context], -1), state)
            written.append(self.to_target(torch.cat([state, context], -1)))
        return torch.stack(written, 1)


@case(
    {
        **{"words.weight": "embedding", "encoder.*.weight": "oi", "encoder.layers.*.in_proj_weight": "oi/3"},
        **{"pool.weight": "oi", "span.weight": "head", "relation.weight": "head"},
    },
    SOURCE,
)
class Reader(nn.Module):
    """An encoder of torch with the heads of BERT: spans for each token, a relation from a pooled one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True, norm_first=True)
        self.words, self.encoder = nn.Embedding(30, WIDTH), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool, self.span, self.relation = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.layer_norm(self.encoder(self.words(tokens)), (WIDTH,))
        start, end = self.span(x).split(1, dim=-1)
        return start.squeeze(-1), end.squeeze(-1), self.relation(torch.tanh(self.pool(x[:, 0])))


@case(
    {
        **{"words.weight": "embedding", "body.*in_proj_weight": "oi/3", "body.*out_proj.weight": "oi"},
        **{"body.linear?.weight": "oi", "emit.weight": "head", "transitions": "table"},
    },
    SOURCE,
)
class Tagger(nn.Module):
    """A conditional random field over what a linear emits: the best scores of each tag."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.emit = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 5)
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True)
        self.transitions = nn.Parameter(torch.zeros(5, 5))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        emitted = self.emit(self.body(self.words(tokens)))
        score = emitted[:, 0]
        for now in emitted.unbind(1)[1:]:
            score = (score[:, :, None] + self.transitions).max(1).values + now
        return emitted, score


@case(
    {
        **{"seen.in_proj_weight": "oi/3", "seen.out_proj.weight": "oi", "heard.[qkv]_proj_weight": "oi"},
        **{"heard.out_proj.weight": "oi", "close.weight": "head"},
    },
    torch.zeros(2, 5, 16),
    torch.zeros(2, 6, 12),
)
class TwoSenses(nn.Module):
    """nn.MultiheadAttention in both of its forms: one weight, and three where keys have another width."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.heard = nn.MultiheadAttention(WIDTH, 2, kdim=12, vdim=12, batch_first=True)
        self.close = nn.Linear(WIDTH, 3)

    def forward(self, seen: Tensor, heard: Tensor) -> Tensor:
        x = seen + self.seen(seen, seen, seen, need_weights=False)[0]
        x = x + self.heard(x, heard, heard)[0]
        return self.close(F.layer_norm(x, (WIDTH,)).mean(1))
