"""What a weight is for, told by what models' own code does with it: on an example, on a guess, and in a first pass."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from lwopt_backend import LayerWiseOptimizer, explain
from lwopt_backend.engines.report import routing_headline
from lwopt_backend.routing.examples import remember
from tests.support.models import UnevenLM, batch, routed

F = nn.functional
D = 16


def told(model: Any, *, silent: bool = True, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error" if silent else "ignore")
        return {each.name: each for each in explain(model, show=False, lr=0.02, **options)}


def rules(model: Any, *names: str, **options: Any) -> list[str]:
    found = told(model, **options)
    return [found[f"{name}.weight"].rule for name in names]


# Output heads


class LM(nn.Module):
    """``read`` makes what is returned of the stream; the names of its modules are none that anybody knows."""

    def __init__(self, read: Callable[[Any, Tensor], Any], embeds: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, D) if embeds else nn.Linear(D, D)
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.norm, self.inner, self.far, self.near = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, 11), nn.Linear(D, 7)
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)
        self.read = read

    def forward(self, x: Tensor) -> Any:
        x = self.tokens(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.read(self, x)


IDS = ((torch.zeros(2, 5, dtype=torch.long),), {})


def attend(m: Any, x: Tensor) -> Any:
    weights = (m.q(x) @ m.k(x).mT).softmax(-1)
    return m.far(weights @ x), weights, m.k(x)  # attention maps and caches are returned as well


def route(m: Any, x: Tensor) -> Any:
    logits = m.near(x)
    return m.far(x + (logits.softmax(-1).unsqueeze(-1) * m.inner(x).unsqueeze(-2)).sum(-2)), logits


READS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {  # what is returned, and the heads in it
    "logits": (lambda m, x: m.far(m.norm(x)), "far"),
    "several, in a dictionary": (lambda m, x: {"a": m.far(x), "b": [m.near(x)]}, "far near"),
    "a loss": (lambda m, x: F.cross_entropy(m.far(x).mT.float(), (x[..., 0] > 0).long()), "far"),
    "two that are averaged": (lambda m, x: (m.far(x[:, 0]) + m.far(m.norm(x[:, 1]))) / 2, "far"),
    "capped": (lambda m, x: 30 * (m.far(x) / 30).tanh(), "far"),
    "added to the stream": (lambda m, x: x + m.inner(x), ""),
    "normed": (lambda m, x: m.norm(m.inner(x)), ""),
    "normalized": (lambda m, x: F.normalize(m.far(x), dim=-1), ""),
    "compared with another": (lambda m, x: F.normalize(m.q(x), dim=-1) @ F.normalize(m.k(x), dim=-1).mT, ""),
    "caches and attention maps": (attend, "far"),
    "logits of a router": (route, "far"),
    "compared element by element": (lambda m, x: (m.q(x)[:, :3] * m.k(x)[:, 2:5]).unflatten(-1, (4, 4)).sum(-1), ""),
    "a chosen logit": (lambda m, x: (m.far(x) * (x[..., :1] > 0)).sum(-1), "far"),
    "a likelihood": (lambda m, x: ((m.q(x) - 1).square() * (-m.k(x)).exp()).sum(-1), "q k"),
    "read by another": (lambda m, x: (m.far(m.inner(x)), m.inner(x)), "far"),
    "a value and advantages": (
        lambda m, x: m.near(x) - m.near(x).mean(-1, keepdim=True) + m.far(x)[..., :1],
        "far near",
    ),
}


@pytest.mark.parametrize("case", READS)
def test_heads_are_what_the_model_returns_and_nothing_else_reads(case: str) -> None:
    read, heads = READS[case]
    found = told(LM(read), example=IDS)
    of_head = {name.removesuffix(".weight") for name, each in found.items() if each.why.startswith("output head")}
    assert of_head == set(heads.split())
    assert {found[f"{name}.weight"].truth for name in of_head} <= {"example"}
    guessed = told(LM(read))  # tokens, so that the guess counts
    assert {name: each.rule for name, each in guessed.items()} == {name: each.rule for name, each in found.items()}


def test_what_an_example_shows_wins_over_a_name() -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.score, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x * self.score(self.body(x)).softmax(1))

    assert rules(Scored(), "score", "last", silent=False) == ["adamw", "muon"]
    assert rules(Scored(), "score", "last", example=((torch.zeros(1, 3, D),), {})) == ["muon", "adamw"]
    assert rules(Scored(), "score", "last", silent=False, include=["score.*"]) == ["muon", "muon"]


def test_what_a_guess_shows_wins_over_a_name() -> None:
    """Of a model that begins with tokens, and has hidden layers by the names of heads."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.output, self.logits = nn.Embedding(40, D), nn.Linear(D, D), nn.Linear(D, 40)
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Linear(D, 4)) for _ in range(4))
            self.fold, self.trunk = nn.Linear(40, D), nn.Linear(D, 40)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids) + self.output(torch.cat([head(self.tokens(ids)) for head in self.heads], -1))
            return self.trunk(x + self.fold(self.logits(x).softmax(-1)))

    names = ["output", "logits", "heads.0.1", "fold", "trunk"]
    assert rules(Named(), *names) == ["muon", "muon", "muon", "muon", "adamw"]


def test_heads_of_adaptive_softmax_and_of_several_books() -> None:
    """torch's adaptive softmax, which reads its targets; and a parameter with the heads of several codebooks."""

    class Books(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.inner = nn.Embedding(40, D), nn.Linear(D, D)
            self.books = nn.Parameter(torch.zeros(3, 9, D))
            self.soft = nn.AdaptiveLogSoftmaxWithLoss(D, 40, [10, 20])

        def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
            x = self.tokens(ids)
            x = x + self.inner(x).relu()
            if targets is None:
                return torch.einsum("btd,nvd->bntv", x, self.books)
            return self.soft(x.flatten(0, 1), targets.flatten()).loss

    soft = {"soft.head.weight", "soft.tail.0.1.weight", "soft.tail.1.1.weight"}
    for example, of_books in ((None, False), (IDS, True), ((IDS[0] * 2, {}), False)):
        found = told(Books(), silent=False, example=example)
        heads = {name for name, each in found.items() if each.why.startswith("output head") and len(each.shape) > 1}
        assert heads == soft | ({"books"} if of_books else set())
        assert [found[f"{name}.weight"].rule for name in ("soft.tail.0.0", "inner")] == ["muon", "muon"]


def test_last_layer_of_each_part_is_unclear_without_a_forward() -> None:
    """Of a generator and a critic that the loop calls; and of a network of convolutions that are matrices."""
    model = nn.Module()
    model.make = nn.Sequential(nn.Linear(4, D), nn.ReLU(), nn.Linear(D, 9))
    model.judge = nn.Sequential(nn.Linear(9, D), nn.ReLU(), nn.Linear(D, 2))
    with pytest.warns(UserWarning, match=r"'make\.\*\.weight', 'judge\.\*\.weight' may be output heads"):
        explain(model, show=False, lr=0.02)

    class Denoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)

        def forward(self, image: Tensor) -> Tensor:
            raise ValueError(image.shape)

    with pytest.warns(UserWarning, match=r"'last\.weight' may be output heads"):
        explain(Denoise(), show=False, lr=0.02, convolutions="flatten")


def test_unclear_heads_are_muons_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 3))
    with pytest.warns(UserWarning, match=r"'2\.weight' may be output heads"):
        found = explain(model, show=False, lr=0.02)
    assert [each.rule for each in found if each.name.endswith("weight")] == ["muon", "muon"]
    assert rules(model, "0", "2", exclude=["2.weight"]) == ["muon", "adamw"]
    assert rules(model, "0", "2", include=["2.weight"]) == ["muon", "muon"]


class Libraries(nn.Module):
    """timm's: a classifier that a method and ``default_cfg`` name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.cls_fc, self.dist_fc = nn.Linear(D, D), nn.Linear(D, 3), nn.Linear(D, 3)
        self.default_cfg = {"classifier": ("cls_fc", "dist_fc")}

    def get_classifier(self) -> nn.Module:
        return self.cls_fc

    def forward(self, x: Tensor, unknown: Any) -> Tensor:
        raise ValueError(unknown)


def test_heads_that_a_library_names_are_heads() -> None:
    found = told(Libraries())
    assert [found[f"{name}.weight"].truth for name in ("cls_fc", "dist_fc")] == ["library", "library"]
    assert found["body.weight"].rule == "muon"


class Part(nn.Module):
    """A language model, or a stage of one."""

    def __init__(self, first: bool = True, last: bool = True, head: str = "out") -> None:
        super().__init__()
        self.tokens = nn.Embedding(37, D) if first else None
        self.layers, self.head_name = nn.ModuleDict({"0": nn.Linear(D, D)}), head
        setattr(self, head, nn.Linear(D, 37, bias=False) if last else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        x = x + self.layers["0"](x)
        head = getattr(self, self.head_name)
        return x if head is None else head(x)


@pytest.mark.parametrize("head", ["out", "output", "lm_head"])
def test_heads_inside_lists_of_models_are_those_of_each(head: str) -> None:
    models: list[Any] = [[Part(head=head)], [Part(last=False, head=head), Part(first=False, head=head)]]
    models += [nn.ModuleList([Part(head=head), Part(head=head)]), nn.ModuleDict({"a": Part(head=head)})]
    both = nn.Module()
    both.teacher, both.student = Part(head=head), Part(head=head)
    for model in (*models, both):
        found = told(model, silent=False)
        of_heads = {each.rule for name, each in found.items() if f".{head}." in name}
        assert of_heads == {"adamw"}, model
        assert {each.rule for name, each in found.items() if ".layers." in name and "weight" in name} == {"muon"}


# Convolutions and shares


class Net(nn.Module):
    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.conv, self.depthwise = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.grouped, self.up = nn.Conv2d(8, 12, 3, groups=4, bias=False), nn.ConvTranspose2d(12, 6, 2, 2, bias=False)
        self.up_grouped = nn.ConvTranspose2d(6, 8, 2, groups=2, bias=False)
        self.qkv, self.mix = nn.Conv2d(8, 24, 1, bias=False), nn.Linear(8, 8) if hidden else nn.Identity()
        self.some_name = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up_grouped(self.up(self.grouped(self.depthwise(self.conv(x).relu())).relu()))
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        return self.some_name(self.mix((v @ (q.mT @ k).softmax(-1).mT).mean(2)).relu())


def test_convolutions_are_matrices_by_group() -> None:
    found = told(Net(), convolutions="flatten")
    shapes = {name.removesuffix(".weight"): list(each.matrices.values()) for name, each in found.items()}
    assert shapes["conv"] == [(8, 27)] and shapes["grouped"] == [(3, 18)] * 4 and not shapes["depthwise"]
    assert shapes["up"] == [(12, 24)] and shapes["up_grouped"] == [(3, 16)] * 2
    assert shapes["qkv"] == [(8, 8)] * 3 and list(found["qkv.weight"].matrices) == ["q", "k", "v"]
    assert [found[f"{name}.weight"].transposed for name in ("conv", "up", "up_grouped")] == [False, True, True]
    assert found["depthwise.weight"].why == "depthwise convolution"
    assert told(Net(), convolutions="flatten", exclude=["up.*"])["up.weight"].rule == "adamw"
    one = told(Net(), silent=False, atoms={"up.weight": "flatten"}, allow_no_matrix=True)["up.weight"]
    assert (list(one.matrices.values()), one.transposed) == ([(12, 24)], True)


def test_error_without_matrices_names_convolutions() -> None:
    with pytest.raises(ValueError, match=re.escape("write convolutions='flatten'")):
        explain(Net(), show=False, lr=0.02)


def test_share_of_each_rule_is_said() -> None:
    with pytest.warns(UserWarning, match="most others are convolutions.*write convolutions='flatten'"):
        found = explain(Net(hidden=True), show=False, lr=0.02)
    shares = {key: round(share, 3) for key, share in found.shares.items()}
    sizes = {each.name: torch.Size(each.shape).numel() for each in found}
    total = sum(sizes.values())
    of_convolutions = sum(torch.Size(each.shape).numel() for each in found if len(each.shape) == 4)
    assert shares[("muon", "")] == round(64 / total, 3)
    assert shares[("adamw", "convolutions")] == round(of_convolutions / total, 3)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert "trains" in routing_headline(routed(UnevenLM()))[0]
    told(Net(hidden=True), convolutions="flatten")
    told(Net(hidden=True), exclude=["conv.*", "*up*", "grouped.*", "qkv.*", "depthwise.*"])


# Gates, orientation, stacks, kernels


@pytest.mark.parametrize(
    ("module", "gates"),
    [
        (nn.LSTM(D, 6, 2, bidirectional=True, proj_size=3), "i f g o"),
        *((kind(D, 6), "i f g o") for kind in (nn.LSTM, nn.LSTMCell)),
        *((kind(D, 6), "r z n") for kind in (nn.GRU, nn.GRUCell)),
        *((kind(D, 6), "") for kind in (nn.RNN, nn.RNNCell)),
    ],
)
def test_gates_are_matrices_in_torchs_documented_order(module: nn.Module, gates: str) -> None:
    found = told(nn.ModuleDict({"m": module}), silent=False)
    for name, each in found.items():
        if "weight_ih" in name or "weight_hh" in name:
            assert list(each.matrices) == (gates.split() or [""]) and each.truth == "class"
        elif "weight_hr" in name:
            assert list(each.matrices) == [""]


class Bare(nn.Module):
    """Parameters of its own by shape, ``p0``, ``p1``, ..., and what ``use`` makes of them."""

    def __init__(self, use: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.use, self.count = use, len(shapes)
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(shape)))
        self.before = nn.Linear(D, D)

    def forward(self, hidden_states: Tensor) -> Any:
        return self.use(self.before(hidden_states), *(getattr(self, f"p{n}") for n in range(self.count)))


def experts_in_turn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + torch.stack([(x @ up[e].T).relu() @ down[e].T for e in range(3)]).sum(0)


def gathered(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    chosen = x[..., :3].topk(2).indices
    hidden = torch.einsum("btd,btkfd->btkf", x, up[chosen]).relu()
    return x + torch.einsum("btkf,btkdf->btd", hidden, down[chosen])


def all_at_once(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = torch.einsum("btd,efd->btef", x, up).relu()
    return x + torch.einsum("btef,edf->bted", hidden, down).sum(-2)


def gated_mixture(x: Tensor, up: Tensor) -> Tensor:
    return x + (torch.einsum("btd,efd->btef", x, up) * x[..., :3].softmax(-1)[..., None]).sum(-2)


def folded(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    up, down = up.unflatten(0, (3, 8)), down.unflatten(0, (3, 8))
    return x + sum((x @ up[e].T).relu() @ down[e] for e in range(3))


def by_head(x: Tensor, q: Tensor, k: Tensor, o: Tensor) -> Tensor:
    q, k = torch.einsum("btd,dhk->bhtk", x, q), torch.einsum("btd,dhk->bhtk", x, k)
    return x + torch.einsum("bhtk,hkd->btd", (q @ k.mT).softmax(-1) @ k, o)


def glu_kernel(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, other = torch.einsum("btd,dgf->btgf", x, up).unbind(-2)
    return x + (F.silu(gate) * other) @ down


def of_bases(x: Tensor, bases: Tensor, mix: Tensor, down: Tensor) -> Tensor:
    """Relations of a graph, each of which mixes the bases."""
    relations = (mix @ bases.view(2, -1)).view(3, D, 6)
    return x + sum((x @ relations[r]).relu() for r in range(3)) @ down


def learned_queries(x: Tensor, latents: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return latents + F.scaled_dot_product_attention((latents @ q).expand(len(x), -1, -1), x @ k, x)


def weighed_sums(x: Tensor, rows: Tensor, columns: Tensor, by_head: Tensor) -> Tensor:
    hidden = (x[..., None, :] * rows).sum(-1).relu()
    x = x + (hidden[..., None] * columns).sum(-2)
    return x * (x.unflatten(-1, (4, 4)) * by_head).sum(-1, keepdim=True).expand(*x.shape[:-1], 4, 4).flatten(-2)


def layers_in_turn(x: Tensor, qkv: Tensor, o: Tensor) -> Tensor:
    for of_layer, out in zip(qkv, o):
        q, k, v = torch.einsum("btd,dshk->sbhtk", x, of_layer)
        x = x + torch.einsum("bhtk,hkd->btd", (q @ k.mT).softmax(-1) @ v, out)
    return x


STACK: list[tuple[int, ...]] = [(3, 8, D), (3, D, 8)]
USES: list[tuple[Callable[..., Any], list[tuple[int, ...]], list[tuple[list[tuple[int, int]], bool]]]] = [
    # What the forward does, shapes, and of each parameter its matrices as stored and whether it is (inputs, outputs)
    (experts_in_turn, STACK, [([(8, D)] * 3, False), ([(D, 8)] * 3, False)]),
    (gathered, STACK, [([(8, D)] * 3, False), ([(D, 8)] * 3, False)]),
    (all_at_once, STACK, [([(8, D)] * 3, False), ([(D, 8)] * 3, False)]),
    (gated_mixture, [(3, D, D)], [([(D, D)] * 3, False)]),
    (lambda x, w: x + torch.bmm(x, w[:1]), [(4, D, D)], [([(D, D)] * 4, True)]),
    (folded, [(24, D), (24, D)], [([(8, D)] * 3, False), ([(8, D)] * 3, True)]),
    (by_head, [(D, 2, 4), (D, 2, 4), (2, 4, D)], [([(D, 8)], True), ([(D, 8)], True), ([(8, D)], True)]),
    (glu_kernel, [(D, 2, 6), (6, D)], [([(D, 6)] * 2, True), ([(6, D)], True)]),
    (layers_in_turn, [(2, D, 3, 2, 4), (2, 2, 4, D)], [([(D, 8)] * 6, True), ([(8, D)] * 2, True)]),
    (lambda x, w, o: layers_in_turn(x, w[None], o[None]), [(D, 3, 2, 4), (2, 4, D)], [([(D, 8)] * 3, True)]),
    (of_bases, [(2, D, 6), (3, 2), (6, D)], [([(D, 6)] * 2, True), ([(3, 2)], False), ([(6, D)], True)]),
    (learned_queries, [(5, D), (D, D), (D, D)], [([], False), ([(D, D)], True), ([(D, D)], True)]),
    (weighed_sums, [(9, D), (9, D), (4, 4)], [([(9, D)], False), ([(9, D)], True), ([], False)]),
    (lambda x, w: x + w[(x @ w.T).argmax(-1)], [(9, D)], [([], False)]),  # codes, the nearest of which is taken
    (lambda x, w: x + (x @ w).relu() @ w.T, [(D, 9)], [([(D, 9)], False)]),  # both ways: as it is stored
    (lambda x, w: x + F.linear(x, w), [(D, D)], [([(D, D)], False)]),
    (lambda x, w: x + x @ w, [(D, D)], [([(D, D)], True)]),
    (lambda x, w: x + torch.einsum("btd,df->btf", x, w), [(D, D)], [([(D, D)], True)]),
    (lambda x, w: x + w[: x.shape[1]], [(40, D)], [([], False)]),
    (lambda x, w: x + w[:, : x.shape[1]], [(1, 40, D)], [([], False)]),
    (lambda x, w: torch.cat([w[0].expand(len(x), -1, -1), x], 1) * 2, [(3, 4, D)], [([], False)]),
    (
        lambda x, w: torch.fft.irfft(torch.fft.rfft(x.mT.float()) * torch.fft.rfft(w, n=x.shape[1])).mT,
        [(D, 5)],
        [([], False)],
    ),
]


@pytest.mark.parametrize(("use", "shapes", "expected"), USES)
def test_own_parameters_are_what_the_forward_does_with_them(use: Any, shapes: Any, expected: Any) -> None:
    found = told(nn.ModuleDict({"m": Bare(use, *shapes)}), silent=False)
    for number, (matrices, transposed) in enumerate(expected):
        each = found[f"m.p{number}"]
        assert (list(each.matrices.values()), each.transposed) == (matrices, transposed), each
        assert each.truth == "guess"


def test_stacks_in_other_dimensions_are_elementwise_and_told() -> None:
    """Of a module that is called experts: its last two dimensions are no matrix of one of them."""

    def experts_last(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.einsum("btd,edf->btfe", x, up).relu()
        return x + torch.einsum("btfe,fde->btde", hidden, down).sum(-1)

    model = nn.ModuleDict({"experts": Bare(experts_last, (3, D, 8), (8, D, 3))})
    with pytest.warns(UserWarning, match=r"No forward showed what these parameters are for: 'experts\.p1'"):
        found = explain(model, show=False, lr=0.02)
    by_name = {each.name: each for each in found}
    assert list(by_name["experts.p0"].matrices.values()) == [(D, 8)] * 3 and by_name["experts.p1"].rule == "adamw"


def test_weight_on_the_right_moves_as_on_the_left() -> None:
    """The same network, stored in both ways: equal factors by shape, and equal bits, also of the fused one."""
    weights = []
    for turned in (False, True):
        torch.manual_seed(0)
        up, qkv = torch.randn(40, D), torch.randn(3 * D, D)

        def use(x: Tensor, up: Tensor, qkv: Tensor, turned: bool = turned) -> Tensor:
            q, k, v = (x @ qkv if turned else F.linear(x, qkv)).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v)
            return x + (x @ up if turned else F.linear(x, up))[..., :D]

        model = Bare(use, *((tuple(w.T.shape) if turned else tuple(w.shape)) for w in (up, qkv)))
        with torch.no_grad():
            model.p0.copy_(up.T if turned else up)
            model.p1.copy_(qkv.T if turned else qkv)
        torch.manual_seed(1)
        with warnings.catch_warnings(action="ignore"):
            optimizer = LayerWiseOptimizer(model, lr=0.02, weight_decay=0.0, report=False, elementwise_lr=0.0)
        model(torch.randn(2, 5, D)).square().mean().backward()
        optimizer.step()
        weights.append([(w.detach().T if turned else w.detach()) for w in (model.p0, model.p1)])
    for one, other in zip(*weights):
        assert torch.equal(one, other)


def test_weight_on_the_right_is_cut_by_the_option() -> None:
    def use(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v)

    for atoms in ({"split_sizes": [D] * 3}, {"qkv": [D] * 3}, {"heads": 3}):
        assert (
            list(told(Bare(use, (D, 3 * D)), silent=False, atoms={"p0": atoms})["p0"].matrices.values()) == [(D, D)] * 3
        )

    def stops(x: Tensor, w: Tensor) -> Tensor:
        raise ValueError(str(x))

    said = r"add 'stored': 'inputs_first'"
    with pytest.raises(ValueError, match=said):
        told(Bare(stops, (D, 3 * D)), silent=False, atoms={"p0": {"qkv": [D] * 3}}, include=["p0"])
    atoms = {"p0": {"qkv": [D] * 3, "stored": "inputs_first"}}
    assert len(told(Bare(stops, (D, 3 * D)), silent=False, atoms=atoms, include=["p0"])["p0"].matrices) == 3
    one = told(Bare(stops, (D, 40)), silent=False, atoms={"p0": {"stored": "inputs_first"}}, include=["p0"])["p0"]
    assert one.transposed and one.truth == "option"


# Examples


class Conditioned(nn.Module):
    """A modulation in a module of its own, which a block far away takes apart, for a condition that no guess finds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.made = nn.Linear(6, D), nn.Sequential(nn.SiLU(), nn.Linear(D, 3 * D))
        self.attn, self.norm = nn.Linear(D, D), nn.LayerNorm(D, elementwise_affine=False)

    def forward(self, x: Tensor, request: dict[str, Tensor]) -> Tensor:
        a, b, c = self.made(self.embed(request["what"]["of"])).chunk(3, -1)
        return x + c * self.attn(self.norm(x) * (1 + a) + b)


EXAMPLE = ((torch.zeros(2, 5, D),), {"request": {"what": {"of": torch.zeros(2, 1, 6)}}})


def test_an_example_shows_what_no_guess_does() -> None:
    guessed, shown = told(Conditioned(), silent=False), told(Conditioned(), example=EXAMPLE)
    assert guessed["made.1.weight"].looks_fused and len(guessed["made.1.weight"].matrices) == 1
    assert list(shown["made.1.weight"].matrices) == ["a", "b", "c"] and shown["made.1.weight"].truth == "example"


class Request:
    def __init__(self, of: Tensor) -> None:
        self.of, self.kind = of, "depth"

    def mapping(self) -> dict[str, Any]:
        return {"what": {"of": self.of}}


class ConditionedByObject(Conditioned):
    def forward(self, x: Tensor, request: Request) -> Tensor:  # type: ignore[override]
        return super().forward(x, request.mapping())


def test_an_example_may_have_objects_with_tensors() -> None:
    given = torch.zeros(2, 1, 6)
    request = Request(given)
    found = told(ConditionedByObject(), example=(EXAMPLE[0], {"request": request}))
    assert list(found["made.1.weight"].matrices) == ["a", "b", "c"]
    assert request.of is given


def test_guesses_do_not_grow_without_bound() -> None:
    class Wants(nn.Module):  # more channels than it is given, however many these are
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(D, 3 * D)

        def forward(self, image: Tensor) -> Tensor:
            n, channels, height, width = image.shape
            return self.wide(image.mean((2, 3)) @ image.new_zeros(1, 1).expand(2**20 * channels, D))

    assert told(Wants(), silent=False)["wide.weight"].rule == "muon"


def test_example_is_followed_on_shapes_alone() -> None:
    model = Conditioned()
    before = copy.deepcopy(model.state_dict())
    handle = model.register_forward_hook(lambda *_: pytest.fail("ran"))
    on_meta = ((EXAMPLE[0][0].to("meta"),), {"request": {"what": {"of": torch.zeros(2, 1, 6, device="meta")}}})
    assert told(model, example=on_meta) == told(model, example=EXAMPLE)
    handle.remove()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert told(torch.compile(model), example=EXAMPLE).keys() == told(model, example=EXAMPLE).keys()
    compiled = told(torch.compile(model), example=EXAMPLE)
    assert {n: e.matrices for n, e in compiled.items()} == {
        n: e.matrices for n, e in told(model, example=EXAMPLE).items()
    }


def test_where_an_example_stops_is_said_and_what_was_seen_counts() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[: int(x.sum().numpy())]

    class Stops(Conditioned):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()

        def forward(self, x: Tensor, request: Any) -> Tensor:
            return self.reads(super().forward(x, request))

    with pytest.warns(UserWarning, match=r"Stops\.forward stopped in Reads"):
        found = {each.name: each for each in explain(Stops(), example=EXAMPLE, show=False, lr=0.02)}
    assert len(found["made.1.weight"].matrices) == 3


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (torch.zeros(1, 3, D), r"expected \(args, kwargs\).*found a Tensor"),
        ((torch.zeros(1, 3, D), torch.zeros(1)), r"expected \(args, kwargs\).*found a tuple of Tensor, Tensor"),
        (
            (EXAMPLE[0], {**EXAMPLE[1], "mask": None}),
            r"Conditioned\.forward\(x, request\).*'mask', 'request'\] by name.*unexpected",
        ),
        (((*EXAMPLE[0], None, None), {}), r"expected.*found 3 by position and \[\] by name: too many positional"),
        ((EXAMPLE[0][:1], {}), r"found 1 by position.*missing a required argument: 'request'"),
    ],
)
@pytest.mark.parametrize("way", ["model", "compiled", "of a list", "remembered"])
def test_what_is_no_example_is_an_error(example: Any, said: str, way: str) -> None:
    model: nn.Module = Conditioned()
    model = torch.compile(model) if way == "compiled" else nn.ModuleList([model]) if way == "of a list" else model
    with pytest.raises(TypeError, match=said):
        if way == "remembered":
            remember(model, example)
        else:
            explain(model, example=[example] if way == "of a list" else example, show=False, lr=0.02)


def test_an_example_fits_whatever_takes_any_argument() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Conditioned()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    assert told(Wrapper(), example=EXAMPLE)["inner.made.1.weight"].truth == "example"


@pytest.mark.parametrize("followed", [True, False])
def test_parameters_in_containers_are_told_by_use(followed: bool) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.zeros(D, 7), torch.zeros(7, D)])
            self.tables = nn.ParameterDict({"row": torch.zeros(5, D), "weight": torch.zeros(5, D)})
            self.last = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            if not followed:
                x.numpy()
            x = x + self.tables["row"] + self.tables["weight"]
            return x + self.last((x @ self.weights[0]).relu() @ self.weights[1])

    found = told(Own(), silent=False, example=((torch.zeros(5, D),), {}))
    assert [found[f"weights.{n}"].rule for n in (0, 1)] == ["muon", "muon"]
    assert found["tables.row"].rule == "adamw" and (found["tables.weight"].rule == "adamw") == followed
    assert [found[f"weights.{n}"].why.endswith("stored transposed") for n in (0, 1)] == [followed] * 2


def test_parametrized_linears_are_matrices() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = weight_norm(nn.Linear(D, 7)), spectral_norm(nn.Linear(7, D))
            self.last = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.two(self.one(x).relu()).relu())

    found = told(Normed(), example=((torch.zeros(5, D),), {}))
    rules = {name: each.rule for name, each in found.items() if len(each.shape) == 2}
    assert rules == {
        "one.parametrizations.weight.original0": "adamw",  # one length for each output
        "one.parametrizations.weight.original1": "muon",
        "two.parametrizations.weight.original": "muon",
        "last.weight": "adamw",
    }


def test_parameters_of_somebodys_linear_are_told_by_use() -> None:
    """Of classes that are called linears: what scales the weight is a table, and a weight of each head or expert a
    stack."""

    class ScaledLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.curves = nn.Parameter(torch.zeros(D, D)), nn.Parameter(torch.zeros(D, D, 3))
            self.scale = nn.Parameter(torch.zeros(D, D))

        def forward(self, x: Tensor) -> Tensor:
            of_curves = (self.curves * self.scale.unsqueeze(-1)).view(D, -1)
            return F.linear(x, self.base) + F.linear(torch.stack([x, x**2, x**3], -1).flatten(-2), of_curves)

    class BlockLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(4, 4, 4)), nn.Parameter(torch.zeros(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.einsum("...hi,hio->...ho", x.unflatten(-1, (4, 4)), self.weight) + self.bias).flatten(-2)

    model = nn.Sequential(nn.Linear(D, D), ScaledLinear(), BlockLinear(), nn.Linear(D, 3))
    for example in (None, ((torch.zeros(2, D),), {})):
        found = told(model, silent=False, example=example)
        assert [found[f"1.{name}"].rule for name in ("base", "scale")] == ["muon", "adamw"]
        assert list(found["1.curves"].matrices.values()) == [(D, 3 * D)]
        assert list(found["2.weight"].matrices.values()) == [(4, 4)] * 4 and found["2.weight"].transposed
        assert found["2.bias"].rule == "adamw"


def test_tensors_and_hooks_beside_parameters_stop_no_run() -> None:
    """Angles and masks that are plain attributes, as Meta's Llama has them, and weights that hooks compute: torch's
    earlier normalizations, and pruning."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.down, self.last = nn.Embedding(40, D), nn.Linear(9, D), nn.Linear(D, 40)
            self.qkv, self.out, self.up = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 18)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is deprecated
                nn.utils.weight_norm(self.qkv)
            nn.utils.spectral_norm(self.out)
            prune.l1_unstructured(self.up, "weight", 0.3)
            self.angles, self.more = torch.ones(40, D), {"mask": torch.ones(40, 40, dtype=torch.bool).tril()}
            self.sizes = torch.tensor([9, 9])
            self.rows, self.square = nn.Parameter(torch.zeros(40, D)), nn.Parameter(torch.zeros(D, D))
            self.both = [self.rows, self.square]

        def forward(self, ids: Tensor) -> Tensor:
            x, n = self.tokens(ids), ids.shape[1]
            x = x + self.both[0][:n] @ self.both[1].T.to(x.dtype) + self.both[0][:n]
            q, k, v = self.qkv(x * self.angles[:n].to(x.device)).chunk(3, -1)
            near = (q @ k.mT).masked_fill(~self.more["mask"][:n, :n], -9.0)
            x = x + self.out(near.softmax(-1) @ v)
            gate, up = self.up(x).split(self.sizes.tolist(), -1)
            return self.last(x + self.down(F.silu(gate) * up))

    for example in (None, IDS):
        found = told(Hooked(), example=example)
        assert list(found["qkv.weight_v"].matrices) == ["q", "k", "v"] and found["qkv.weight_g"].rule == "adamw"
        assert list(found["up.weight_orig"].matrices) == ["gate", "up"] and found["out.weight_orig"].rule == "muon"
        assert [found[name].rule for name in ("last.weight", "rows", "square")] == ["adamw", "adamw", "muon"]


def test_low_rank_parametrization_is_stored_as_linears_are() -> None:
    """The product of both factors alone does not tell which side is the outputs; the linear around it does."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3, D)), nn.Parameter(torch.zeros(7, 3))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.b @ self.a

    linear = nn.Linear(D, 7).requires_grad_(False)
    register_parametrization(linear, "weight", LowRank())
    model = nn.Sequential(nn.Linear(D, D), linear, nn.Linear(7, 3))
    for example in (None, ((torch.zeros(5, D),), {})):
        found = told(model, silent=False, example=example)
        factors = [found[f"1.parametrizations.weight.0.{name}"] for name in "ab"]
        assert [(each.rule, each.transposed) for each in factors] == [("muon", False)] * 2


def test_lists_of_modules_have_an_example_each() -> None:
    stages = [LM(lambda m, x: x), LM(lambda m, x: m.far(x), embeds=False)]
    examples = [IDS, ((torch.zeros(2, 5, D),), {})]
    assert told(stages, example=examples)["1.far.weight"].why.startswith("output head")
    with pytest.raises(ValueError, match="expected one for each of 2 modules; found 1"):
        explain(stages, example=examples[:1], show=False, lr=0.02)
    with pytest.raises(TypeError, match="expected a list"):
        explain(stages, example=IDS, show=False, lr=0.02)


def test_first_pass_warns_of_what_was_planned_otherwise() -> None:
    model = Conditioned()
    with warnings.catch_warnings(action="ignore"):
        optimizer = LayerWiseOptimizer(model, lr=0.02, report=False)
    hooks = len(model._forward_pre_hooks)
    args, kwargs = EXAMPLE
    model.eval()(*args, **kwargs)  # no training pass
    model.train()
    copied = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(*args, **kwargs).sum().backward()
    with pytest.warns(
        UserWarning, match=r"2 weights are used otherwise.*'made\.1\.weight'.*used as.*a, b, c"
    ) as warned:
        optimizer.step()
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(*args, **kwargs).sum().backward()
        copied(*args, **kwargs)
        optimizer.step()
    assert len(model._forward_pre_hooks) == hooks - 1


def test_first_pass_as_planned_says_nothing() -> None:
    hooks = []
    for example in (None, (batch(0, 2), {})):
        model = UnevenLM()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = LayerWiseOptimizer(model, lr=0.02, report=False, example=example)
            hooks.append(len(model._forward_pre_hooks))
            model(*batch(0, 2)).backward()
            optimizer.step()
        hooks.append(len(model._forward_pre_hooks))
    assert hooks == [hooks[-1] + 1, *[hooks[-1]] * 3]


def test_modules_that_are_alike_are_followed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lwopt_backend.routing import traced

    runs: list[str] = []
    monkeypatch.setattr(traced, "_RUNS", type(traced._RUNS)())
    run = traced.run
    monkeypatch.setattr(
        traced, "run", lambda module, *more: (runs.append(type(module).__name__), run(module, *more))[1]
    )
    told(nn.ModuleList(Conditioned() for _ in range(3)), silent=False, atoms={"*": "whole"}, exclude=["*embed*"])
    followed = len(runs)
    told(nn.ModuleList(Conditioned() for _ in range(3)), silent=False, atoms={"*": "whole"}, exclude=["*embed*"])
    assert len(runs) == followed
    other = Conditioned()
    other.made[1] = nn.Linear(D, 3 * D, bias=False)  # another module of the same class
    told(other, silent=False)
    assert len(runs) > followed
    runs.clear()
    told(UnevenLM(), atoms={"*": "whole"}, include=["gate.weight"])
    assert not runs
