"""Fused weights: which of a weight's outputs are q, k and v, gate and up, or other matrices.

The model's own code says so. Each module's ``forward`` is followed (``traced``), and a weight is divided as it divides
the weight's outputs, if all of them are in a part, and in one only. Anything else stays whole, because a wrong cut
would be worse, and the table at the start has a word about it if it looks fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lwopt_backend.plan.atoms import Parts, Stripes, equal, grouped
from lwopt_backend.routing.models import LoRA, all_lora, modules_of, parameters_of
from lwopt_backend.routing.numbered import Outputs, runs_of
from lwopt_backend.routing.numbered import first as first_of
from lwopt_backend.routing.parts import Parted, partition, said_by, with_links
from lwopt_backend.routing.shown import Shown, Sight, Truth
from lwopt_backend.routing.tracks import Ends

# The shape in which a whole parameter is stored, and whether its last dimension has the outputs
Stored = Callable[[Tensor], tuple[tuple[int, ...], bool] | None]
MOST = 12  # parts of a weight
LONGEST = 16  # name of a variable that names a part
LOOKS_FUSED = re.compile(r"qkv|query_key|key_value|c_attn|gate_up|up_gate|gate_and_up|kv_[ab]|in_proj|w13|w12|fused")


@dataclass(frozen=True, slots=True)
class Fusion:
    """The parts of a weight's outputs and, if these are divided as well, of its inputs; empty: not divided.

    ``why`` is where the parts are from, or why the weight stays whole; ``unknown`` if it looks fused all the same.
    ``truth`` is what told it: the module's class, or a run of its code on a guess or an example.
    """

    outputs: Parts = ()
    inputs: Parts = ()
    why: str = ""
    unknown: bool = False
    truth: Truth | None = None


Sizes = Callable[[Tensor], tuple[int, int] | None]  # outputs and inputs of a parameter
Inputs = Callable[[nn.Module], Collection[int]]  # the numbers of inputs of the weights in a module


def fused_weights(
    model: nn.Module, stored: Stored, shown: Shown, asked: Collection[int] | None = None
) -> dict[int, Fusion]:
    """The parts of fused weights, and why others that look fused stay whole, by the weight's id.

    ``stored`` returns how a parameter is stored; None if that is not known. ``asked`` are those that matter, by id.
    """
    known = {id(param): how for _, param in parameters_of(model) if (how := stored(param)) is not None}
    outputs = {param: 1 if last else 2 for param, (shape, last) in known.items() if len(shape) > 1 and 0 not in shape}

    def sizes(param: Tensor) -> tuple[int, int] | None:
        if id(param) not in outputs:
            return None
        rows, columns = known[id(param)][0][-2:]
        return (rows, columns) if outputs[id(param)] == 2 else (columns, rows)

    @cache  # a list of weights has the same around each of them
    def inputs_in(module: nn.Module) -> frozenset[int]:
        return frozenset(its[1] for _, param in parameters_of(module) if (its := sizes(param)) is not None)

    found: dict[int, Fusion] = {}
    by_class: dict[int, Fusion] = {}
    for module in modules_of(model).values():
        by_class.update(of_recurrent(module))
        by_class.update(_of_experts(module, sizes))
    for name, holder in modules_of(model).items():
        for key, param in dict.items(holder._parameters):
            if param is None or id(param) not in outputs or (asked is not None and id(param) not in asked):
                continue
            if id(param) in by_class:
                told = by_class[id(param)]
            else:
                full = f"{name.rpartition('.')[2]}.{key}"
                is_kernel = len(known[id(param)][0]) < param.ndim
                told = _told(
                    ModuleParam(name, full, holder, param, is_kernel), shown, outputs[id(param)], sizes, inputs_in
                )
            if found.setdefault(id(param), told).outputs != told.outputs:
                found[id(param)] = Fusion(why="whole, as two modules divide it in two ways")
    for lora in all_lora(model):
        found.update(_of_lora(lora, found, sizes))
    return {weight: fusion for weight, fusion in found.items() if fusion != Fusion()}


class ModuleParam(NamedTuple):
    """A parameter, the module that holds it, that module's name, and the last two names of the parameter. A kernel has
    more dimensions than its matrix."""

    module_name: str
    name: str
    module: nn.Module
    param: Tensor
    is_kernel: bool = False


def _told(held: ModuleParam, shown: Shown, dim: int, sizes: Sizes, inputs_in: Inputs) -> Fusion:
    """What runs show about the outputs of a weight: the surest that uses it, and does not only return them."""
    looks = _looks_fused(held, shown.around(held.module_name) or held.module, sizes, inputs_in)
    best: tuple[Sight, Ends, Parted] | None = None
    first: Sight | None = None
    for sight in shown.of(held.module_name, held.param, whole=looks):
        first = first or sight
        ends = sight.ends(dim, kernel=held.is_kernel)
        if (folded := _folded(held.name, sight, dim, sizes(held.param))) is not None:
            return folded
        size = sizes(held.param)
        if ends is None or (held.is_kernel and not sight.is_convolved and size is not None and ends.count != size[0]):
            continue  # of one dimension of several
        if sight.truth == "guess" and sight.is_returned and shown.is_called(sight.module):
            return Fusion()  # it may be a head
        parted = partition(ends)
        if best is None or _rank(ends, parted) > _rank(*best[1:]):
            best = sight, ends, parted
        if (parted.parts or parted.unclear) and not _is_only_returned(ends, parted):
            break
    if best is None:
        return _unknown(type(first.module if first else held.module).__name__, first, "") if looks else Fusion()
    sight, ends, parted = best
    whose = ends.whose or type(sight.module).__name__
    if parted.unclear:
        return _unknown(whose, sight, "has parts of it that are together by one step and apart by another")
    if not parted.parts or (_is_only_returned(ends, parted) and not shown.is_called(sight.module)):
        return _unknown(whose, sight, "") if looks else Fusion()
    key = "fusion", held.name, whose, sight.truth
    if key not in ends.read:  # once for layers that are alike
        ends.read[key] = _divided(held.name, parted.parts, ends, whose, sight.truth)
    found: Fusion = ends.read[key]
    return found


def _is_only_returned(ends: Ends, parted: Parted) -> bool:
    """Whether a module returns all outputs as they are, so that what is done with them is not seen in it."""
    return ends.returned and len(parted.parts) == 1 and all(end.numbers is None for end in ends.ends)


def _rank(ends: Ends, parted: Parted) -> tuple[bool, int, bool]:
    return bool(parted.parts), len(parted.parts), not _is_only_returned(ends, parted)


def _unknown(whose: str, sight: Sight | None, why: str) -> Fusion:
    error = sight.error if sight is not None else None
    why = why or (f"stopped: {type(error).__name__}" if error is not None else "does not show its parts")
    return Fusion(why=f"whole, though it looks fused: {whose}.forward {why}", unknown=True)


def _divided(name: str, parts: Sequence[Outputs], ends: Ends, whose: str, truth: Truth) -> Fusion:
    ends = with_links(ends)
    parts = _without_heads(parts, ends)
    if len(parts) == 1:
        return Fusion()
    runs = [stripes_of(outputs) for outputs in parts]
    if min(part.bit_count() for part in parts) == 1:
        return Fusion(why=f"whole, as a part of it that {whose} has is one row", truth=truth)
    if None in runs or len(parts) > MOST:
        return Fusion(why=f"whole, though {whose} has {len(parts)} parts of it", unknown=True, truth=truth)
    names = _names(parts, ends, name)
    found = [(name, run) for name, run in zip(names, runs) if run is not None]
    return Fusion(found, why=f"as {whose} has them", truth=truth)


def _folded(name: str, sight: Sight, dim: int, size: tuple[int, int] | None) -> Fusion | None:
    """The experts in a weight of two dimensions of which each product takes equal runs of rows; None if none does."""
    use = sight.slices
    if use is None or not use.rows or size is None:
        return None
    found = []
    for as_inputs in (False, True):
        rows = [outputs for outputs, inputs in use.rows if inputs == as_inputs]
        count = (size[0] if dim == 2 else size[1]) if not as_inputs else (size[1] if dim == 1 else size[0])
        runs = sorted(run for outputs in rows for run in runs_of(outputs))
        even = len({stop - start for start, stop in runs}) == 1 and len(runs) == len(rows) > 1
        if even and [start for start, _ in runs] == [*range(0, count, runs[0][1])] and (as_inputs == (dim == 1)):
            parts, ends = equal(len(runs), runs[0][1], "expert"), sight.ends(dim)
            of_outputs = [] if ends is None or as_inputs else partition(ends).parts
            if ends is not None and 1 < len(of_outputs) <= MOST and _names(of_outputs, ends, name)[0] != "part0":
                continue  # queries, keys and values, whose names say what they are for
            whose = (ends.whose if ends is not None else "") or type(sight.module).__name__
            why = f"as {whose} takes them"
            found.append(
                Fusion((), parts, why, truth=sight.truth) if as_inputs else Fusion(parts, (), why, truth=sight.truth)
            )
    return found[0] if len(found) == 1 else None


def _looks_fused(held: ModuleParam, around: nn.Module, sizes: Sizes, inputs_in: Inputs) -> bool:
    """By its name; or by its size: no weight beside it takes all its outputs, and they are several times its inputs, or
    twice or three times those of another."""
    ours = sizes(held.param)
    if ours is None or min(ours) == 1:
        return False
    if LOOKS_FUSED.search(held.name) is not None:
        return True
    beside = inputs_in(around)
    several = any(size > 1 and ours[0] in (2 * size, 3 * size) for size in beside)
    of_its_own = ours[0] in [number * ours[1] for number in range(2, MOST + 1)]
    return ours[0] not in beside and (several or of_its_own)


def _without_heads(parts: Sequence[Outputs], ends: Ends) -> list[Outputs]:
    """The parts, as one those that the forward takes from one variable, without names and not paired with each other:
    heads in a loop."""
    found = [*parts]
    for outputs in ends.names.values():
        within = [part for part in found if part != outputs and part & outputs == part]
        together = 0
        for part in within:
            together |= part
        alike = len({part.bit_count() for part in within}) == 1 and together == outputs
        alike = alike and not any((one | other) & outputs == one | other for one, other in ends.apart)
        if alike and outputs.bit_count() < ends.count and not any(_name(part, ends) for part in within):
            found = sorted([*(part for part in found if part not in within), outputs], key=first_of)
    return found


# Where parts lie, and their names. A gate is what goes through the activation.


def stripes_of(outputs: Outputs) -> Stripes | None:
    """The outputs as equal runs at equal distances, None if they are not."""
    runs = runs_of(outputs)
    starts, lengths = [start for start, _ in runs], {stop - start for start, stop in runs}
    pitches = {later - start for start, later in zip(starts, starts[1:])} or {0}
    if len(lengths) > 1 or len(pitches) > 1:
        return None
    return Stripes(starts[0], lengths.pop(), len(starts), pitches.pop())


def _names(parts: Sequence[Outputs], ends: Ends, weight: str) -> list[str]:
    if len(ends.latent) == 4 and all(ends.latent) and len(parts) == 2:
        of_latent = _latent_names(parts, "kv" in weight, *ends.latent)
        if of_latent:
            return of_latent
    found = [_name(part, ends) for part in parts]
    if len(ends.latent) == 4 and all(ends.latent) and len(parts) == 3:  # queries and their gate
        for one, other in ((0, 1), (0, 2), (1, 2)):
            if pair := _latent_names([parts[one], parts[other]], False, *ends.latent):
                found[one], found[other] = pair
                break
    activated = [part in ends.activated for part in parts]
    if len(parts) == 2 and sum(activated) == 1 and _are_multiplied(parts, ends):
        gate = activated.index(True)
        found[gate] = "gate"
        found[1 - gate] = "q" if found[1 - gate] == "q" else "up"
    if all(found) and len({*found}) == len(found):
        return found
    if len(parts) == 3 and re.search("qkv|in_proj_weight", weight):
        return ["q", "k", "v"]
    return [f"part{number}" for number in range(len(parts))]


def _are_multiplied(parts: Sequence[Outputs], ends: Ends) -> bool:
    """Whether two parts are a gate and what it gates: they meet in a product, as far as the forward went, and nothing
    else reads them."""
    one, other = parts
    if any(end.numbers is not None and end.outputs in parts for end in ends.ends):
        return False
    return (bool(ends.left) and not ends.apart) or any(
        (a & one and b & other) or (a & other and b & one) for a, b in ends.multiplied
    )


def _latent_names(parts: Sequence[Outputs], expands: bool, nope: int, rope: int, rank: int, value: int) -> list[str]:
    """The names of the parts of a weight of latent attention, by their sizes; none if they fit none."""
    sizes = [part.bit_count() for part in parts]
    if sizes == [rank, rope]:
        return ["kv", "k_rope"]
    names, of_head = (("k_nope", "v"), (nope, value)) if expands else (("q_nope", "q_rope"), (nope, rope))
    for way, (one, other) in (names, of_head), (names[::-1], of_head[::-1]):
        if sizes[0] * other == sizes[1] * one:
            return [*way]
    return []


def _name(part: Outputs, ends: Ends) -> str:
    """The name of a variable that has exactly a part; one to which nothing was added, if there is one."""
    for names in (ends.names, ends.added):
        variables = [name for name, outputs in names.items() if outputs == part]
        if known := next(filter(None, map(said_by, variables)), ""):
            return known
        if short := next((name for name in variables if len(name) < LONGEST), ""):
            return short
    return ""


# Gates of torch's recurrent modules, in the order that its documentation has; their kernels are not followed

GATES = {"LSTM": ("i", "f", "g", "o"), "GRU": ("r", "z", "n")}


def of_recurrent(module: nn.Module) -> Iterator[tuple[int, Fusion]]:
    if isinstance(module, nn.RNNBase):
        gates, size = GATES.get(module.mode, ()), module.hidden_size
    elif isinstance(module, (nn.LSTMCell, nn.GRUCell)):
        gates, size = GATES["LSTM" if isinstance(module, nn.LSTMCell) else "GRU"], module.hidden_size
    else:
        return
    for key, param in dict.items(module._parameters):
        if param is not None and key.startswith(("weight_ih", "weight_hh")):
            why = f"as torch's {type(module).__name__} has them"
            yield id(param), Fusion(grouped(gates, [size] * len(gates)), why=why, truth="class") if gates else Fusion()


# Experts, whose ``forward`` depends on data


def _of_experts(module: nn.Module, sizes: Sizes) -> Iterator[tuple[int, Fusion]]:
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
            yield id(weight), Fusion(parts, why=f"as {type(module).__name__} has them", truth="class")


def _gate_agrees(module: Any, in_turn: bool) -> bool:
    """Whether the gate of four outputs has gradients for those that it should have."""
    with torch.enable_grad():
        outputs = torch.tensor([[0.5, 0.6, 0.7, 0.8]], requires_grad=True)
        try:
            (used,) = torch.autograd.grad(module._apply_gate(outputs)[0, 0], outputs)
        except RuntimeError:  # an activation with tensors on another device
            return False
    return bool((used[0] != 0).tolist() == ([True, True, False, False] if in_turn else [True, False, True, False]))


def _of_lora(lora: LoRA, found: dict[int, Fusion], sizes: Sizes) -> dict[int, Fusion]:
    """The parts of LoRA's factors: B has the outputs of the weight that it changes.

    For a stack of experts, PEFT has the A and B of all of them in one parameter each.
    """
    base, of_a, of_b = found.get(id(lora.changed), Fusion()), sizes(lora.a), sizes(lora.b)
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
