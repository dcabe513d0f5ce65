"""Small models with shapes that divide by nothing, what they train on, and how far two are apart."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.routing.output_heads import output_heads
from lwopt_backend.routing.routing import Route, check_all_globs, full_shape, routes_of
from lwopt_backend.routing.shown import Shown

VOCABULARY = 37
MATRICES = ("layers.0.weight", "layers.2.weight", "layers.5.weight", "gate.weight")


class UnevenLM(nn.Module):
    """Embedding, hidden layers of odd sizes (tall, wide, two rows), a norm and an untied head."""

    def __init__(self, seed: int = 0, hidden: tuple[int, int] = (63, 41), tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        first, second = hidden
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.Sequential(
            nn.Linear(24, first),
            nn.GELU(),
            nn.Linear(first, second),
            nn.GELU(),
            nn.LayerNorm(second),
            nn.Linear(second, 24, bias=False),
        )
        self.gate = nn.Linear(5, 2)
        self.lm_head = nn.Linear(24, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: (rows, time); the mean cross-entropy."""
        x = self.embedding(tokens)
        x = x + self.layers(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())

    def gated(self, x: Tensor) -> Tensor:
        """One for each half of the channels, so that the rows of its gradient do not depend on each other."""
        return torch.sigmoid(self.gate(x[..., :5])).repeat_interleave(12, dim=-1)


def signed_sum(param: Tensor, size: float) -> Tensor:
    """The sum of its elements, of which every third one counts as negative, times ``size``."""
    signs = 1.0 - 2 * (torch.arange(param.numel()) % 3 == 0).to(param)
    return (param * signs.view(param.shape)).sum() * size


class LinearLoss(nn.Module):
    """A loss that is linear in the weights: gradients are ``factor`` times whole numbers, whatever the weights are.

    Their norms at 1 are 96 of the first weight, 24 and 32 of the last weight and bias, and 104 of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 12, bias=False), nn.Linear(9, 4)

    def forward(self, factor: float) -> Tensor:
        params = ((self.first.weight, 8.0), (self.last.weight, 4.0), (self.last.bias, 16.0))
        return torch.stack([signed_sum(*each) for each in params]).sum() * factor


def batch(step: int, rows: int, time: int = 9) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (rows, time) tokens and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (rows, time + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def largest_difference(ours: nn.Module | Mapping[str, Tensor], theirs: nn.Module | Mapping[str, Tensor]) -> float:
    """The largest difference from a parameter of ``theirs``; NaN if either has a NaN."""
    mine, others = (dict(of.named_parameters()) if isinstance(of, nn.Module) else of for of in (ours, theirs))
    pairs = [(mine[name].detach(), other.detach()) for name, other in others.items() if other.numel()]
    return float(torch.stack([(one - other).abs().max().double() for one, other in pairs]).max())


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """How far sums of that many numbers may be from each other in two orders, in parts of the sum of their magnitudes.
    Each is off by some sqrt(terms) roundings, which go up as often as down (Higham and Mary, "A New Approach to
    Probabilistic Rounding Error Analysis", 2019); the worst case is ``terms`` roundings. Which order there is depends
    on the CPU's vectors."""
    return float(terms**0.5 * torch.finfo(dtype).eps)


NORM_ROUNDING = rounding(8_000)  # of the norm of all gradients of a model here, summed in fp32


def routed(
    model: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = (), atoms: AtomSettings | None = None
) -> list[Route]:
    """The routes of a whole model, all of whose parameters are given to the optimizer."""
    shown = Shown(model, full_shape)
    routes = routes_of(model, include, exclude, output_heads(model, shown=shown).found, atoms, shown=shown)
    check_all_globs(include, exclude, routes)
    return routes
