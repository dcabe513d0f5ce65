"""Fused weights of models that are known: which outputs of a linear are q, k and v, or gate and up.

A layout is told by the class whose ``forward`` runs, or of torchtitan's modules by their attributes, and only if the
sizes agree with the module's attributes and with the linear that takes the result. A weight that is not recognised
stays whole, as it does in other optimizers; a wrong guess would be worse. Copies of Hugging Face's modelling code in
other packages (``trust_remote_code``) may differ, and are not looked at.

LoRA's B has the outputs of the weight that it changes. Where that is a stack of experts, PEFT has A and B of all of
them in one parameter each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from lwopt_backend.fused_families import TABLE, Fused, experts, thirds
from lwopt_backend.fused_torchtitan import BY_ATTRIBUTES
from lwopt_backend.peft_layers import LoRA, all_lora
from lwopt_backend.plan.blocks import Parts, equal, grouped

Sizes = Callable[[Tensor], tuple[int, int] | None]  # outputs and inputs of a matrix parameter, also one of a stack


@dataclass(frozen=True, slots=True)
class Fusion:
    """The parts of a weight's outputs and, where these are divided as well, of its inputs; empty: not divided.

    ``why`` says whose parts they are, or why a weight that is known stays whole.
    """

    outputs: Parts = ()
    inputs: Parts = ()
    why: str = ""


def fused_weights(model: nn.Module, sizes: Sizes) -> dict[int, Fusion]:
    """By the id of a weight what is known of its parts.

    ``sizes`` tells the outputs and inputs of a parameter, None of one that is no matrix, or no stack of them.
    """
    found: dict[int, Fusion] = {}
    disputed: set[int] = set()  # weights that two modules share and use in two ways
    for module in model.modules():
        name, recipes = _recipes(module)
        for fused in recipes:
            weight = _weight(module, fused.weight)
            out = weight if fused.out is None else _weight(module, fused.out)
            ours, theirs = (None if each is None else sizes(each) for each in (weight, out))
            if weight is None or ours is None or theirs is None:
                continue
            fusion = _fusion(module, name, fused, ours[0], theirs[0 if fused.out is None else 1])
            if fusion is not None and found.setdefault(id(weight), fusion).outputs != fusion.outputs:
                disputed.add(id(weight))
    found = {weight: fusion for weight, fusion in found.items() if weight not in disputed}
    for lora in all_lora(model):
        found.update(_of_lora(lora, found, sizes))
    return found


def _fusion(module: nn.Module, name: str, fused: Fused, outputs: int, width: int) -> Fusion | None:
    """The parts of ``outputs``, where the sizes add up and the part that is taken is ``width``."""
    try:
        layout = fused.layout(module, width)
    except (AttributeError, TypeError, ZeroDivisionError):  # a version of the module without these attributes
        return Fusion(why=f"whole, as {name} lacks the sizes of its parts")
    if layout is None:
        return None
    names, sizes, groups = layout
    fits = fused.taken is None or sizes[fused.taken] * groups == width
    if min(*sizes, groups) < 1 or sum(sizes) * groups != outputs or not fits:
        return Fusion(why=f"whole, as the sizes that {name} has for its parts do not add up")
    if min(sizes) * groups == 1:
        return Fusion(why=f"whole, as a part of it that {name} has is one row")
    return Fusion(grouped(names, sizes, groups), why=f"as {name} has them")


def _of_lora(lora: LoRA, found: dict[int, Fusion], sizes: Sizes) -> dict[int, Fusion]:
    """Of LoRA's factors what the weight that they change says of them."""
    changed = getattr(lora.base, lora.key, None)
    changed = getattr(lora.base, "in_proj_weight", None) if changed is None else changed  # torch's attention
    base, of_a, of_b = found.get(id(changed), Fusion()), sizes(lora.a), sizes(lora.b)
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


def _recipes(module: nn.Module) -> tuple[str, tuple[Fused, ...]]:
    """The name of the class whose ``forward`` the module runs, and what is known of that class."""
    runs = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if runs is nn.MultiheadAttention:
        return runs.__name__, (Fused("in_proj_weight", "out_proj", thirds),)
    for attributes, recipes in BY_ATTRIBUTES:
        if all(hasattr(module, attribute) for attribute in attributes):
            return runs.__name__, recipes
    package, _, path = runs.__module__.partition("models.")
    if package != "transformers.":
        return "", ()
    if all(isinstance(getattr(module, flag, None), bool) for flag in ("has_gate", "is_concatenated", "is_transposed")):
        return runs.__name__, (Fused("gate_up_proj", "down_proj", experts),)
    return runs.__name__, TABLE.get(f"{path.partition('.')[0]}.{runs.__name__}", ())


def _weight(module: nn.Module, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    found = found if isinstance(found, Tensor) else getattr(found, "weight", None)
    return found if isinstance(found, Tensor) else None
