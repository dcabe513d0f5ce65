"""The first training pass of a model without an example shows what its weights are for: a word, if planned otherwise.

A plan is made before anything runs, from guesses where no example was given. A hook notes the names, shapes and dtypes
of the first training pass's arguments and goes. Before the next step, the model is followed on these once, without
memory, as when the optimizer was made: not in the pass, in which DeepSpeed's stage 3 gathers each parameter that anyone
looks at, on all ranks, and from then on in every pass. What trains does not change, because state and plans are made;
one warning names the weights. Only the first rank, which warns, does so; no rank communicates.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lwopt_backend.config.versions import is_first_rank
from lwopt_backend.engines.buffers.hooks import Hook
from lwopt_backend.groups.grouping import Grouping
from lwopt_backend.routing.examples import shapes_of
from lwopt_backend.routing.models import called
from lwopt_backend.routing.routing import Route, named, warn

SHOWN = 3  # weights in a warning


class FirstPass:
    """Waits for the first training pass of every module that is called, and for the ``optimizer``'s next step. Keep it
    as long as it should wait."""

    def __init__(self, model: nn.Module, grouping: Grouping, optimizer: torch.optim.Optimizer) -> None:
        self._grouping = grouping
        self._noted: dict[int, Any] = {}
        self._handles: list[Any] = []
        if is_first_rank() and grouping.again is not None and not grouping.followed:
            for number, module in enumerate(called(model)):
                hook = Hook(self, FirstPass._note, number)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            self._before_step = optimizer.register_step_pre_hook(Hook(self, FirstPass._compare))

    def _note(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        self._handles[number].remove()
        self._noted.setdefault(number, _shapes(args, kwargs))

    def _compare(self, *step: Any) -> None:
        if len(self._noted) < len(self._handles):
            return
        self._before_step.remove()
        noted = [self._noted[each] for each in sorted(self._noted)]
        example = noted if len(noted) > 1 else noted[0]
        assert self._grouping.again is not None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen = self._grouping.again(example)
        except Exception as error:  # a run goes on; nothing is known that was not known before
            if isinstance(error, ValueError):
                warn(f"The first training pass shows that this model's routing is an error with an example: {error}")
            return
        different = [*_different(self._grouping, seen)]
        if different:
            names = [name for name, _, _ in different]
            count = "1 weight is used" if len(different) == 1 else f"{len(different)} weights are used"
            shown = "; ".join(f"{name!r} is {ours}, and used as {theirs}" for name, ours, theirs in different[:SHOWN])
            warn(
                f"The first training pass shows that {count} otherwise than planned, {named(names)}: {shown}. "
                "The run goes on as planned. Pass example=(args, kwargs), with such arguments, to plan by them, or "
                "name what differs in the options include, exclude or atoms"
            )


def _shapes(args: Any, kwargs: Any) -> Any:
    try:
        return shapes_of(args), shapes_of(kwargs)
    except Exception:  # of anybody's containers; without an example, nothing is found
        return None


def _different(planned: Grouping, seen: Grouping) -> Iterator[tuple[str, str, str]]:
    """The weights that a run on an example shows to be something else: the name, and what they are in each."""
    theirs = {route.name: route for route in seen.routes}
    for route in planned.routes:
        other = theirs.get(route.name)
        if other is None or route.kind == "frozen" or route.truth == "option" or other.truth != "example":
            continue
        blocks = planned.matrices_in(route.name), seen.matrices_in(route.name)
        alike = route.kind == other.kind and (route.kind != "matrix" or route.transposed == other.transposed)
        if not alike or (route.kind == "matrix" and blocks[0] != blocks[1]):
            yield route.name, _said(route), _said(other)


def _said(route: Route) -> str:
    return f"{route.kind} ({route.reason})"
