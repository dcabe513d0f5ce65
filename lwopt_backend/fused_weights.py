"""Fused weights in Hugging Face's models: which outputs of a linear are q, k and v, or gate and up.

A layout is told by the class whose ``forward`` runs, and only if the sizes agree with the module's attributes and with
the linear that takes the result. A weight that is not recognised stays whole, as it does in other optimizers; a wrong
guess would be worse. Copies of the modelling code in other packages (``trust_remote_code``) may differ, and are not
looked at.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from lwopt_backend.fused_families import TABLE, Fused, experts, thirds
from lwopt_backend.plan.blocks import Parts, grouped

Sizes = Callable[[Tensor], tuple[int, int] | None]  # outputs and inputs of a matrix parameter, also one of a stack


def fused_weights(model: nn.Module, sizes: Sizes) -> dict[int, tuple[Parts, str]]:
    """By the id of a weight the parts of its outputs, and whose they are.

    ``sizes`` tells the outputs and inputs of a parameter, None of one that is no matrix, or no stack of them.
    """
    found: dict[int, tuple[Parts, str]] = {}
    disputed: set[int] = set()  # weights that two modules share and use in two ways
    for module in model.modules():
        name, recipes = _recipes(module)
        for fused in recipes:
            weight, out = _weight(module, fused.weight), _weight(module, fused.out)
            if weight is None or out is None:
                continue
            of_weight, of_out = sizes(weight), sizes(out)
            if of_weight is None or of_out is None:
                continue
            parts = _parts(module, fused, of_weight[0], of_out[1])
            if parts is not None and found.setdefault(id(weight), (parts, name))[0] != parts:
                disputed.add(id(weight))
    return {weight: parts for weight, parts in found.items() if weight not in disputed}


def _parts(module: nn.Module, fused: Fused, outputs: int, width: int) -> Parts | None:
    """The parts of ``outputs``, or None unless the sizes add up and the part that is taken is ``width``."""
    try:
        layout = fused.layout(module, width)
    except (AttributeError, TypeError, ZeroDivisionError):  # a version of the module without these attributes
        return None
    if layout is None:
        return None
    names, sizes, groups = layout
    if min(*sizes, groups) < 1 or sum(sizes) * groups != outputs or sizes[fused.taken] * groups != width:
        return None
    return grouped(names, sizes, groups)


def _recipes(module: nn.Module) -> tuple[str, tuple[Fused, ...]]:
    """The name of the class whose ``forward`` the module runs, and what is known of that class."""
    runs = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if runs is nn.MultiheadAttention:
        return runs.__name__, (Fused("in_proj_weight", "out_proj", thirds),)
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
