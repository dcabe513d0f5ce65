"""MuonClip's QK-clip on sharded weights: after a step, shrink the heads whose attention logits grew too large."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config.options import suggestion
from lwopt_backend.plan.atoms import Block, TrainedParam
from lwopt_backend.rules.qk_clip import qk_clip_factors, row_factors
from lwopt_backend.runtime.state import StatePiece

Shape = Sequence[int]


class RowScaling:
    """The factors by which an optimizer's next step multiplies weights. ``shapes`` has the shapes of all trained
    parameters, by name; ``matrices_in`` returns the matrices in one; those that tensor parallelism ``cut`` are refused.

    A weight of shape (outputs, inputs) is scaled by row; one in ``transposed``, of shape (inputs, outputs), by column;
    a bias by element.
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        transposed: frozenset[str],
        matrices_in: Callable[[str], Sequence[Block]],
        cut: Collection[str] = (),
    ) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._transposed, self.matrices_in, self._cut = transposed, matrices_in, cut
        self._factors: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._factors)

    def shape(self, name: str) -> Shape:
        """A parameter's shape. Raises ValueError if it is not trained."""
        if name not in self._shapes:
            raise ValueError(f"no trained parameter is named {name!r}; {suggestion(str(name), self._shapes)}")
        return self._shapes[name]

    def outputs(self, name: str) -> int:
        """A parameter's number of outputs. Raises ValueError if it is not trained."""
        return self.shape(name)[-1 if name in self._transposed else 0]

    def bias_of(self, weight: str) -> str | None:
        """The name of the trained bias of the layer that has this weight, if there is one."""
        bias = f"{weight.removesuffix('weight')}bias"
        return bias if weight.endswith("weight") and bias in self._shapes else None

    def set(self, factors: Mapping[str, Tensor]) -> None:
        """Replace all factors: one per output of each parameter named. Every rank must give the same.

        Raises ValueError for a parameter that is not trained, or a wrong number of factors.
        """
        for name, given in factors.items():
            if name in self._cut:
                raise ValueError(f"parameter {name!r} is cut by tensor parallelism, which QK-clip does not support")
            if given.ndim != 1 or len(given) != self.outputs(name):
                raise ValueError(
                    f"parameter {name!r} has {self.outputs(name)} outputs; expected a factor for each, found shape "
                    f"{tuple(given.shape)}"
                )
        self._factors = {name: given.detach().clone() for name, given in factors.items()}

    def clear(self) -> None:
        """Drop all factors, after a step applied or skipped them."""
        self._factors = {}

    def scale(self, params: Sequence[TrainedParam], pieces: Iterable[StatePiece]) -> bool:
        """Multiply the weights in ``pieces`` of ``params``, and drop their factors; False if there are none."""
        scaled = set()
        for piece in pieces:
            name, value = params[piece.member].name, piece.value
            if value is None or name not in self._factors:
                continue
            shape, factors = self._shapes[name], self._factors[name].to(value.device, value.dtype)
            dim = len(shape) - 1 if name in self._transposed else 0
            for place, box in piece.boxes(value, shape).items():
                here = factors[place[dim] : place[dim] + box.shape[dim]]
                box.mul_(here.view([-1 if i == dim else 1 for i in range(box.ndim)]))
            scaled.add(name)
        for name in scaled:
            del self._factors[name]
        return bool(scaled)


QUERY, KEY = "q", "k"  # names of the matrices in a fused weight


def _part(block: Block) -> str:
    """The part of a fused weight that contains a matrix: the matrix itself, or that of a head, ``"q.head0"``."""
    return block.name.partition(".")[0]


@dataclass(frozen=True)
class Heads:
    """One attention layer. Rows of the weights are ordered by head.

    Attributes:
        query: name of the query weight.
        key: name of the key weight. One fused weight may be both, if the routing table names its matrices "q" and "k".
        heads: number of query heads.
        key_heads: number of key heads; needed if the key has fewer outputs than the query.
        query_bias: name of the query projection's bias, if it has one.
        key_bias: name of the key projection's bias, if it has one.

    Examples:
        >>> Heads("layers.0.q_proj.weight", "layers.0.k_proj.weight", heads=32, key_heads=8)
    """

    query: str
    key: str
    heads: int
    key_heads: int | None = None
    query_bias: str | None = None
    key_bias: str | None = None

    def __post_init__(self) -> None:
        for what, count in (("heads", self.heads), ("key_heads", 1 if self.key_heads is None else self.key_heads)):
            if type(count) is not int or count < 1:
                raise ValueError(f"{what}: expected a number of heads of at least 1, found {count!r}")


class QKClip:
    """QK-Clip: scales query and key rows of heads whose largest logit exceeds a threshold, after the update.

    Call ``clip(max_logits)`` before every step, on all ranks that step the layers; construct on the same ranks.
    ``qk_clip_factors`` has the formula and its limits.

    Args:
        optimizer: a ``LayerWiseOptimizer``, or DeepSpeed's ``engine.basic_optimizer`` (``engine.optimizer`` with
            ``"storage": "owned"``).
        layers: the attention layers, by any names.
        threshold: largest logit that is not scaled.
        query_share: share of a factor that the query takes, as an exponent; the key takes the rest.

    Raises:
        TypeError: for another optimizer.
        ValueError: for parameters that are not trained, whose outputs do not divide into heads, or that do not show
            which rows are query and key.

    Examples:
        >>> clip = QKClip(optimizer, {"0": Heads("0.q_proj.weight", "0.k_proj.weight", heads=12)})
        >>> clip({"0": max_logits})  # (heads,) over all batches and ranks since the last step
        >>> optimizer.step()
    """

    def __init__(
        self, optimizer: Any, layers: Mapping[str, Heads], threshold: float = 100.0, query_share: float = 0.5
    ) -> None:
        if not isinstance(getattr(optimizer, "row_scaling", None), RowScaling):
            raise TypeError(
                "QKClip: expected an optimizer of this package: a LayerWiseOptimizer, or on DeepSpeed, after "
                'deepspeed.initialize, engine.basic_optimizer (with "storage": "owned", engine.optimizer); found '
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            )
        self._optimizer = optimizer
        self._layers = dict(layers)
        self._options = {"threshold": threshold, "query_share": query_share}
        self._outputs: dict[tuple[str, str, str], Tensor] = {}
        if not self._layers:
            raise ValueError("layers: expected at least one attention layer, found none")
        for layer, heads in self._layers.items():
            if not isinstance(heads, Heads):
                raise ValueError(f"layer {layer!r}: expected Heads(query, key, heads=...), found {heads!r}")
            self._check_apart(layer, heads)
            self._factors(layer, torch.ones(heads.heads))
            self._check_whole(layer, heads)

    def __call__(self, max_logits: Mapping[str, Tensor]) -> None:
        """Make the next step clip by ``max_logits``: by layer, each head's largest logit since the last step.

        Every rank must give the same, the maximum over all ranks. Other layers are not clipped. Raises ValueError for
        an unknown layer, and for logits that are not a tensor of shape (heads,).
        """
        if not isinstance(max_logits, Mapping):
            raise ValueError(
                "max_logits: expected a mapping of layers to tensors of shape (heads,); found "
                f"a {type(max_logits).__name__}"
            )
        factors: dict[str, Tensor] = {}
        for layer, logits in max_logits.items():
            if layer not in self._layers:
                raise ValueError(f"unknown layer {layer!r}; {suggestion(str(layer), self._layers)}")
            for name, found in self._factors(layer, logits).items():
                factors[name] = found * factors[name] if name in factors else found
        self._optimizer.row_scaling.set(factors)

    def _check_apart(self, layer: str, of: Heads) -> None:
        """Raises ValueError if query and key are one matrix, all of whose outputs would be scaled by both factors."""
        scaling = self._optimizer.row_scaling
        for weight, bias in ((of.query, of.query_bias), (of.key, of.key_bias)):
            outputs = scaling.outputs(weight)
            for name, ndim in ((weight, 2), *(() if bias is None else ((bias, 1),))):
                if len(scaling.shape(name)) != ndim:
                    raise ValueError(
                        f"layer {layer!r}: expected a weight with two dimensions and a bias with one, found {name!r} "
                        f"of shape {scaling.shape(name)}"
                    )
            if bias is not None and scaling.outputs(bias) != outputs:
                raise ValueError(
                    f"layer {layer!r}: expected a bias of {outputs} outputs, as {weight!r} has; found {bias!r} with "
                    f"{scaling.outputs(bias)}"
                )
        if of.query != of.key and of.query_bias is not None and of.query_bias == of.key_bias:
            raise ValueError(
                f"layer {layer!r}: {of.query_bias!r} is query_bias and key_bias, but query and key are two weights, "
                f"{of.query!r} and {of.key!r}; expected a bias of each"
            )
        names = [_part(block) for block in scaling.matrices_in(of.query)]
        if of.query == of.key and not {QUERY, KEY} <= set(names):
            inside = ", ".join(map(repr, names)) if any(names) else "a single matrix"
            raise ValueError(
                f"layer {layer!r}: {of.query!r} is query and key; expected matrices 'q' and 'k' in it, found "
                f"{inside if names else 'none, because no matrix rule updates it'}; divide it with the option "
                f'"atoms": {{"{of.query}": {{"qkv": [outputs of q, of k, of v]}}}}'
            )

    def _check_whole(self, layer: str, of: Heads) -> None:
        """Raises ValueError if a head's query or key has more than is named, or other sizes."""
        scaling = self._optimizer.row_scaling
        sides = (("query", QUERY, of.query, of.query_bias), ("key", KEY, of.key, of.key_bias))
        for side, _, weight, bias in sides:
            if bias is None and (own := scaling.bias_of(weight)) is not None:
                raise ValueError(
                    f"layer {layer!r}: expected {side}_bias={own!r}, found None; logits shrink only if the bias of "
                    f"{weight!r} does too"
                )
        query, key = (len(self._outputs_of(weight, weight, part)) for _, part, weight, _ in sides)
        if of.key_heads is None and query != key:
            raise ValueError(
                f"layer {layer!r}: expected as many outputs of the key as of the query, found {key} and {query}; give "
                "key_heads, the number of key heads"
            )

    def _factors(self, layer: str, logits: Tensor) -> dict[str, Tensor]:
        of = self._layers[layer]
        if not isinstance(logits, Tensor) or logits.shape != (of.heads,):
            found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            expected = f"max_logits as a tensor of shape {(of.heads,)}, one per head"
            raise ValueError(f"layer {layer!r}: expected {expected}; found {found}")
        try:
            by_head = qk_clip_factors(logits, key_heads=of.key_heads, **self._options)
        except ValueError as error:
            raise ValueError(f"layer {layer!r}: {error}") from error
        factors: dict[str, Tensor] = {}
        for side, part, weight, bias in (
            (by_head.query, QUERY, of.query, of.query_bias),
            (by_head.key, KEY, of.key, of.key_bias),
        ):
            for name in (weight, bias):
                if name is not None:
                    spread = self._spread(layer, name, weight if name == bias else name, part, side)
                    factors[name] = factors[name] * spread if name in factors else spread
        return factors

    def _spread(self, layer: str, name: str, weight: str, part: str, by_head: Tensor) -> Tensor:
        """One factor per output of a parameter, which may be fused with others; 1 for outputs of other parts."""
        places = self._outputs_of(name, weight, part).to(by_head.device)
        self._outputs[name, weight, part] = places
        if len(places) % len(by_head):
            raise ValueError(
                f"layer {layer!r}: expected outputs of {part!r} that divide into {len(by_head)} heads, found "
                f"{len(places)} in {name!r}; correct the number of heads"
            )
        factors = torch.ones(self._optimizer.row_scaling.outputs(name), device=by_head.device)
        factors[places] = row_factors([(len(places) // len(by_head), by_head)])
        return factors

    def _outputs_of(self, name: str, weight: str, part: str) -> Tensor:
        """The outputs of the query or of the key, ``part``, in a parameter; found once, because they may be many."""
        if (name, weight, part) in self._outputs:
            return self._outputs[name, weight, part]
        blocks = [block for block in self._optimizer.row_scaling.matrices_in(weight) if _part(block) == part]
        stripes = [block.columns if block.rows.size == block.grid.rows else block.rows for block in blocks]
        ranges = [torch.arange(*run) for outputs in stripes for run in outputs.runs()]
        return torch.cat(ranges) if ranges else torch.arange(self._optimizer.row_scaling.outputs(name))
