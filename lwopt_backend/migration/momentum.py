"""Muon's momentum in its two forms: a moving average of gradients, or their sum.

From zero, B <- mu B + (1 - mu) G gives 1 - mu times what M <- mu M + G gives, as long as mu stays what it is. After mu
was changed in the middle of a run no factor is exact; the one of the mu in use is right for the gradients since then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch import Tensor

from lwopt_backend.spelling import suggestion

Form = Literal["ema", "sum"]
Named = Mapping[str, Mapping[str, Tensor]]  # by a parameter's name, its state in whole tensors
BUFFER = "momentum_buffer"


def convert_momentum(buffer: Tensor, momentum: float, *, source: Form, target: Form) -> Tensor:
    """A momentum buffer of form ``source`` as a new one of form ``target``, of the same shape and dtype.

    Raises ValueError for a form that does not exist, and for a ``momentum`` outside [0, 1).
    """
    return buffer.detach() * factor(momentum, source, target)


def convert_named_momentum(
    named: Named, momentum: float | Mapping[str, float], *, source: Form, target: Form
) -> dict[str, dict[str, Tensor]]:
    """``convert_momentum`` for every momentum buffer in a state by parameter name; all else is taken over.

    ``momentum`` is one number, or one for each parameter that has a buffer. Raises ValueError as above and for a
    parameter that ``momentum`` lacks.
    """
    converted = {name: dict(state) for name, state in named.items()}
    for name, state in converted.items():
        if BUFFER not in state:
            continue
        if isinstance(momentum, Mapping) and name not in momentum:
            raise ValueError(f"momentum: expected a number for {name!r}, found those of {list(momentum)}")
        mu = momentum[name] if isinstance(momentum, Mapping) else momentum
        state[BUFFER] = convert_momentum(state[BUFFER], mu, source=source, target=target)
    return converted


def factor(momentum: float, source: str, target: str) -> float:
    """What a buffer of form ``source`` has to be multiplied by. Raises ValueError as ``convert_momentum``."""
    check_form("source", source)
    check_form("target", target)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum: expected a number in [0, 1), found {momentum!r}")
    if source == target:
        return 1.0
    return 1 - momentum if target == "ema" else 1 / (1 - momentum)


def check_form(what: str, form: str) -> None:
    """Raises ValueError with the nearest known form."""
    if form not in get_args(Form):
        raise ValueError(f"{what}: unknown form of momentum {form!r}; {suggestion(str(form), get_args(Form))}")
