"""Something for a forward pass: values by the names of its arguments, tried until the pass ends."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.judge import without_values

Candidates = Mapping[str, Sequence[Callable[[], Any]]]
ROUNDS = 3
ENDED = 10**9


def filled(module: nn.Module, known: Candidates, optional: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of ``forward`` with which it ends, or with which it gets farthest.

    Of ``known``, those that it requires, or that are ``optional``; one argument is changed at a time.
    """
    params = [
        one
        for one in inspect.signature(module.forward).parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and (one.default is one.empty or one.name in optional)
    ]
    values = {one.name: known.get(one.name, [lambda: None]) for one in params}
    chosen = dict.fromkeys(values, 0)

    def progress() -> int:
        return _operations(module, {name: values[name][place]() for name, place in chosen.items()})

    best = progress()
    for _ in range(ROUNDS):
        before = best
        for name, options in values.items():
            for place in range(len(options)) if best < ENDED else ():
                kept, chosen[name] = chosen[name], place
                if place == kept or (got := progress()) <= best:
                    chosen[name] = kept
                else:
                    best = got
        if best in (before, ENDED):
            break
    return {name: values[name][place]() for name, place in chosen.items()}


class _Count(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = without_values(func, args)
        return func(*args, **(kwargs or {})) if result is None else result


def _operations(module: nn.Module, keywords: Mapping[str, Any]) -> int:
    """How many operations a pass makes before it stops."""
    counting = _Count()  # type: ignore[no-untyped-call]
    device = next(module.parameters()).device
    with torch.no_grad(), torch.device(device), warnings.catch_warnings(action="ignore"), counting:
        try:
            module(**keywords)
        except Exception:  # of anybody's forward
            return counting.count
    return ENDED


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "meta") -> Callable[[], Tensor]:
    return lambda: torch.zeros(shape, dtype=dtype, device=device)
