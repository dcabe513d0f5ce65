"""Fused weights: which of a weight's outputs are q, k and v, gate and up, or other matrices.

The model's own code says so. Each module's ``forward`` is followed (``traced``), and a weight is divided as it divides
the weight's outputs, if all of them are in a part, and in one only. Anything else stays whole, because a wrong cut
would be worse, and the table at the start has a word about it if it looks fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.plan.atoms import Parts, Stripes, equal, grouped
from lwopt_backend.routing.follow import LATENT, Ends, Outputs, partition
from lwopt_backend.routing.models import LoRA, all_lora
from lwopt_backend.routing.traced import Traced, traced

# The shape in which a whole parameter is stored, and whether its last dimension has the outputs
Stored = Callable[[Tensor], tuple[tuple[int, ...], bool] | None]
MOST = 12  # parts of a weight
LOOKS_FUSED = re.compile(r"qkv|query_key|key_value|c_attn|gate_up|up_gate|gate_and_up|kv_[ab]|in_proj|w13|w12|fused")


@dataclass(frozen=True, slots=True)
class Fusion:
    """The parts of a weight's outputs and, if these are divided as well, of its inputs; empty: not divided.

    ``why`` is where the parts are from, or why the weight stays whole; ``unknown`` if it looks fused all the same.
    """

    outputs: Parts = ()
    inputs: Parts = ()
    why: str = ""
    unknown: bool = False


def fused_weights(model: nn.Module, stored: Stored, asked: Collection[int]) -> dict[int, Fusion]:
    """The parts of fused weights, and why others that look fused stay whole, by the weight's id.

    ``stored`` returns how a parameter is stored; None if that is not known. Only the weights ``asked`` for are found,
    by id: to follow a model's ``forward`` takes longer than all else in routing.
    """
    if not asked:
        return {}
    known = {id(param): how for param in model.parameters() if (how := stored(param)) is not None}
    outputs = {param: 1 if last else 2 for param, (shape, last) in known.items() if len(shape) > 1 and 0 not in shape}

    def shape(param: Tensor) -> Sequence[int]:
        return known[id(param)][0] if id(param) in known else getattr(param, "ds_shape", param.shape)

    def sizes(param: Tensor) -> tuple[int, int] | None:
        """Outputs and inputs."""
        if id(param) not in outputs:
            return None
        rows, columns = shape(param)[-2:]
        return (rows, columns) if outputs[id(param)] == 2 else (columns, rows)

    followed = {*asked, *(id(_changed(lora)) for lora in all_lora(model))}
    found: dict[int, Fusion] = {}
    for weight, uses in traced(model, {key: dim for key, dim in outputs.items() if key in followed}, shape).items():
        told = [_told(use, sizes) for use in uses]
        alike = all(one.outputs == told[0].outputs for one in told)
        found[weight] = told[0] if alike else Fusion(why="whole, as two modules divide it in two ways")
    for module in model.modules():
        found.update(_of_experts(module, sizes))
    for lora in all_lora(model):
        found.update(_of_lora(lora, found, sizes))
    return {weight: fusion for weight, fusion in found.items() if weight in asked and fusion != Fusion()}


def _told(use: Traced, sizes: Callable[[Tensor], tuple[int, int] | None]) -> Fusion:
    """What a module's ``forward`` shows about the outputs of a weight."""
    whose = type(use.module).__name__
    parts = [] if use.ends is None else _without_heads(partition(use.ends, use.module), use.ends)
    if use.ends is None or not parts:
        if not _looks_fused(use, sizes):
            return Fusion()
        why = f"stopped: {type(use.error).__name__}" if use.error is not None else "does not show its parts"
        return Fusion(why=f"whole, though it looks fused: {whose}.forward {why}", unknown=True)
    if len(parts) == 1:
        return Fusion()
    runs = [stripes_of(outputs) for outputs in parts]
    if min(map(len, parts)) == 1:
        return Fusion(why=f"whole, as a part of it that {whose} has is one row")
    if None in runs or len(parts) > MOST:
        return Fusion(why=f"whole, though {whose} has {len(parts)} parts of it", unknown=True)
    names = _names(parts, use.ends, use.module, use.name)
    return Fusion([(name, run) for name, run in zip(names, runs) if run is not None], why=f"as {whose} has them")


def _looks_fused(use: Traced, sizes: Callable[[Tensor], tuple[int, int] | None]) -> bool:
    """By its name; or by its size: no weight beside it takes all outputs, and one takes a half or a third of them."""
    ours = sizes(use.weight)
    if ours is None or min(ours) == 1:
        return False
    beside = {its[1] for its in map(sizes, use.module.parameters()) if its is not None}
    by_size = ours[0] not in beside and any(size > 1 and ours[0] in (2 * size, 3 * size) for size in beside)
    return by_size or LOOKS_FUSED.search(use.name) is not None


def _without_heads(parts: Sequence[Outputs], ends: Ends) -> list[Outputs]:
    """The parts, as one those that the forward takes from one variable, without names: heads in a loop."""
    found = [*parts]
    for outputs in ends.names.values():
        within = [part for part in found if part < outputs]
        alike = len({*map(len, within)}) == 1 and frozenset().union(*within) == outputs
        if alike and len(outputs) < ends.count and not any(_name(part, ends) for part in within):
            found = sorted([*(part for part in found if part not in within), outputs], key=min)
    return found


# Where parts lie, and their names. A gate is what goes through the activation.


def stripes_of(outputs: Outputs) -> Stripes | None:
    """The outputs as equal runs at equal distances, None if they are not."""
    places = sorted(outputs)
    starts = [place for before, place in zip([-2, *places], places) if place != before + 1]
    length = len(places) // len(starts)
    pitch = starts[1] - starts[0] if len(starts) > 1 else 0
    runs = Stripes(starts[0], length, len(starts), pitch)
    return runs if [i for start, stop in runs.runs() for i in range(start, stop)] == places else None


CALLED = {
    "q": r"q|quer(y|ies)|xq",
    "k": r"k|keys?|xk",
    "v": r"v|values?|xv",
    "gate": r"gates?",
    "up": r"ups?",
    "x": r"x|hidden",
}
PLAIN = re.compile(r"^(mixed_|new_|fused_)|(_(states?|layers?|proj|heads?|pass|out))+$")


def _names(parts: Sequence[Outputs], ends: Ends, module: nn.Module, weight: str) -> list[str]:
    latent = [getattr(module, name, 0) for name in (*LATENT, "kv_lora_rank", "v_head_dim")]
    if all(type(size) is int and size > 0 for size in latent) and len(parts) == 2:
        of_latent = _latent_names(parts, "kv" in weight, *latent)
        if of_latent:
            return of_latent
    found = [_name(part, ends) for part in parts]
    activated = [part in ends.activated for part in parts]
    if len(parts) == 2 and sum(activated) == 1:
        gate = activated.index(True)
        found[gate] = "gate"
        found[1 - gate] = "q" if found[1 - gate] == "q" else "up"
    if all(found) and len({*found}) == len(found):
        return found
    if len(parts) == 3 and re.search("qkv|in_proj_weight", weight):
        return ["q", "k", "v"]
    return [f"part{number}" for number in range(len(parts))]


def _latent_names(parts: Sequence[Outputs], expands: bool, nope: int, rope: int, rank: int, value: int) -> list[str]:
    """The names of the parts of a weight of latent attention, by their sizes; none if they fit none."""
    sizes = [*map(len, parts)]
    if sizes == [rank, rope]:
        return ["kv", "k_rope"]
    names, of_head = (("k_nope", "v"), (nope, value)) if expands else (("q_nope", "q_rope"), (nope, rope))
    for way, (one, other) in (names, of_head), (names[::-1], of_head[::-1]):
        if sizes[0] * other == sizes[1] * one:
            return [*way]
    return []


def _name(part: Outputs, ends: Ends) -> str:
    for variable in (name for name, outputs in ends.names.items() if outputs == part):
        plain = PLAIN.sub("", variable)
        for name, pattern in CALLED.items():
            if re.fullmatch(pattern, plain, re.IGNORECASE):
                return name
    return next((name for name, outputs in ends.names.items() if outputs == part and len(name) < 9), "")


# Experts, whose ``forward`` depends on data


def _of_experts(module: nn.Module, sizes: Callable[[Tensor], tuple[int, int] | None]) -> Iterator[tuple[int, Fusion]]:
    """Gate and up of transformers' experts, which say how they store them, of its JetMoE and of torchtitan's."""
    flags = [getattr(module, flag, None) for flag in ("has_gate", "is_concatenated", "is_transposed")]
    in_turn = False
    if all(isinstance(flag, bool) for flag in flags):
        in_turn, first, last = not flags[1], "gate_up_proj", "down_proj"
        if not flags[0] or not _gate_agrees(module, in_turn):
            return
    elif hasattr(module, "mlp1_weight_EGD"):
        in_turn, first, last = True, "mlp1_weight_EGD", "mlp2_weight_EDF"
    elif type(module).__name__ == "JetMoeMoE":
        first, last = "input_linear", "output_linear"
    else:
        return
    weight, out = weight_of(module, first), weight_of(module, last)
    if weight is not None and out is not None:
        ours, theirs = sizes(weight), sizes(out)
        if ours is not None and theirs is not None and ours[0] == 2 * theirs[1]:
            half = theirs[1]
            parts = grouped(("gate", "up"), (1, 1), half) if in_turn else grouped(("gate", "up"), (half, half))
            yield id(weight), Fusion(parts, why=f"as {type(module).__name__} has them")


def _gate_agrees(module: Any, in_turn: bool) -> bool:
    """Whether the gate of four outputs has gradients for those that it should have."""
    with torch.enable_grad():
        outputs = torch.tensor([[0.5, 0.6, 0.7, 0.8]], requires_grad=True)
        try:
            (used,) = torch.autograd.grad(module._apply_gate(outputs)[0, 0], outputs)
        except RuntimeError:  # an activation with tensors on another device
            return False
    return bool((used[0] != 0).tolist() == ([True, True, False, False] if in_turn else [True, False, True, False]))


def _of_lora(
    lora: LoRA, found: dict[int, Fusion], sizes: Callable[[Tensor], tuple[int, int] | None]
) -> dict[int, Fusion]:
    """The parts of LoRA's factors: B has the outputs of the weight that it changes.

    For a stack of experts, PEFT has the A and B of all of them in one parameter each.
    """
    base, of_a, of_b = found.get(id(_changed(lora)), Fusion()), sizes(lora.a), sizes(lora.b)
    if of_a is None or of_b is None:
        return {}
    if sum(part.size for _, part in base.outputs) not in (0, of_b[0]):
        base = Fusion()
    if lora.stacked == 1:
        return {id(lora.b): base} if base.why else {}
    rank, names = of_a[0] // lora.stacked, [f"expert{number}" for number in range(lora.stacked)]
    in_turn, why = grouped(names, [1] * lora.stacked, rank), "as PEFT has them"
    return {
        id(lora.a): Fusion(equal(lora.stacked, rank, "expert"), why=why),
        id(lora.b): Fusion(base.outputs, in_turn, why),
    }


def _changed(lora: LoRA) -> Any:
    """The weight that ``lora`` changes, or None."""
    weight = getattr(lora.base, lora.key, None)
    return getattr(lora.base, "in_proj_weight", None) if weight is None else weight  # torch's attention


def weight_of(module: nn.Module, name: str) -> Tensor | None:
    """The parameter ``name`` of a module, or the weight of its child of that name."""
    found = getattr(module, name, None)
    found = found if isinstance(found, Tensor) else getattr(found, "weight", None)
    return found if isinstance(found, Tensor) else None


def side_by_side(name: str, shape: Sequence[int]) -> bool:
    """Gate and up in one parameter of (..., outputs, 2, inputs): ``w13`` of torchtitan's opt-in ``fused_swiglu``."""
    return name.rpartition(".")[2] == "w13" and len(shape) > 2 and shape[-2] == 2 and 0 not in shape


def joined(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which gate and up side by side are the halves of every row; of other parameters, their own."""
    return (*shape[:-2], 2 * shape[-1]) if side_by_side(name, shape) else tuple(shape)
