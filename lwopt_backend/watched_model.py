"""A model that is watched, so that no parameter stops being trained without a word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from lwopt_backend.routing import full_shape, named_parameters

ADVICE = "make the optimizer after the last such change"
SHOWN = 5  # names in a sentence


class WatchedModel:
    """The ``trained`` parameters of ``model``, with their names, as they were when an optimizer was made for them.

    With ``alone`` that optimizer trains all that is trained; otherwise what else required a gradient may go on to.
    ``restore`` is called before the model is looked at closely: some hosts put other tensors into modules for a while.
    ``advice`` ends the sentence.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[tuple[str, Tensor]],
        *,
        alone: bool = False,
        restore: Callable[[nn.Module], object] = lambda model: None,
        advice: str = ADVICE,
    ) -> None:
        self._model = model
        self._restore = restore
        self._advice = advice
        restore(model)
        here = {id(param) for param in model.parameters()}
        ours = {id(param) for _, param in trained}
        self._trained = [(name, param) for name, param in trained if id(param) in here]
        # Held, so that no other tensor gets their ids.
        self._others = [p for p in model.parameters() if p.requires_grad and id(p) not in ours and not alone]
        # What every module held when it was last looked at and nothing was wrong, and what was frozen then.
        self._seen: list[tuple[nn.Module, list[Tensor | None], list[nn.Module | None]]] | None = None
        self._frozen: list[Tensor] = []
        self._told: str | None = None

    def news(self) -> str | None:
        """``changes``, unless that is what was said last."""
        told, self._told = self._told, self.changes()
        return None if told == self._told else self._told

    def changes(self) -> str | None:
        """A sentence on parameters that were replaced, unfrozen or added, so that the optimizer does not train them.

        Costs a comparison per parameter and module, as long as they are the same objects.
        """
        if self._is_as_seen():
            return None
        self._restore(self._model)
        now = dict(named_parameters(self._model))
        there = {id(param) for param in now.values()}
        known = {id(param) for param in (*(param for _, param in self._trained), *self._others)}
        replaced = [name for name, param in self._trained if id(param) not in there]
        trained = [n for n, p in now.items() if p.requires_grad and id(p) not in known and 0 not in full_shape(p)]
        new = [name for name in trained if name not in replaced]
        said = []
        if replaced:
            said.append(f"{_are(replaced)} no longer in the model (replaced), and no step reaches what is there now")
        if new:
            since = "new, or requires_grad set since"
            said.append(
                f"{_are(new)} trained now, but not when the optimizer was made ({since}), so no step uses the gradient"
            )
        if said:
            return f"{'; '.join(said)}; {self._advice}"
        self._seen = [(m, [*m._parameters.values()], [*m._modules.values()]) for m in self._model.modules()]
        self._frozen = [param for param in self._model.parameters() if not param.requires_grad]
        return None

    def _is_as_seen(self) -> bool:
        if self._seen is None or any(param.requires_grad for param in self._frozen):
            return False
        return all(_same(params, m._parameters) and _same(modules, m._modules) for m, params, modules in self._seen)


def _same(before: list[Any], now: Mapping[str, Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now.values()))


def _are(names: Sequence[str]) -> str:
    """The beginning of a sentence on these parameters."""
    if len(names) == 1:
        return f"parameter {names[0]!r} is"
    shown, more = ", ".join(map(repr, names[:SHOWN])), len(names) - SHOWN
    return f"parameters {shown}{f' and {more} more' if more > 0 else ''} are"
