"""What a model's own code shows of its weights: on an example of its arguments, or module by module on guesses.

An example shows most: the whole model runs on it once. Without one, the modules around each weight run with arguments
that make their ``forward`` complete, and the whole model does where these leave something open. Nothing runs until
something is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from torch import Tensor, nn

from lwopt_backend.routing.arguments import CallArguments
from lwopt_backend.routing.copies import Shape
from lwopt_backend.routing.examples import as_given
from lwopt_backend.routing.models import called, modules_of
from lwopt_backend.routing.traced import Run, Runs
from lwopt_backend.routing.tracks import CHANNELS, KERNEL, Ends, SliceUse, UsedAs

# What decided about a parameter: an option, a name, the class of its module, its library's own word, or a run of the
# model's code, on a guess at its arguments or on an example.
Truth = Literal["option", "name", "class", "library", "guess", "example"]
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
LEVELS = 3  # modules around a weight that run on guesses
MOST = 64  # weights of such a module


@dataclass(frozen=True)
class Sight:
    """What a run of ``module`` shows of the weight with this ``number`` in it. ``truth`` is whose arguments it had."""

    module: nn.Module
    run: Run
    number: int
    weights: int
    truth: Truth

    def ends(self, dim: int, *, kernel: bool = False) -> Ends | None:
        """What became of its outputs, if these are dimension ``dim`` from the end; None if it was not used so.

        Of a ``kernel``, they are those of all dimensions that are outputs.
        """
        of, found = self.run.ends, (self.number, dim)
        return (of.get((self.number, KERNEL)) if kernel else None) or of.get(found) or of.get((self.number, CHANNELS))

    @property
    def error(self) -> Exception | None:
        return self.run.error

    @property
    def uses(self) -> set[UsedAs]:
        return self.run.uses.get(self.number, set())

    @property
    def is_added(self) -> bool:
        """Whether it is only added, scaled with or looked up."""
        return self.uses == {"added"}

    @property
    def is_convolved(self) -> bool:
        return self.number in self.run.convolved

    @property
    def is_looked_up(self) -> bool:
        """Whether an index takes rows of it."""
        return self.number in self.run.looked_up

    @property
    def is_returned(self) -> bool:
        """Whether the module returns its outputs, and nothing in it reads them."""
        return self.run.is_whole and self.number in self.run.heads

    @property
    def slices(self) -> SliceUse | None:
        return self.run.slices.get(self.number)

    @property
    def is_used(self) -> bool:
        """Whether the run came to the weight."""
        return self.number in self.run.used

    @property
    def transposed(self) -> bool | None:
        """Whether products take the weight as (inputs, outputs); None if they take it both ways, or not at all."""
        rows, columns = ((self.number, dim) in self.run.ends for dim in (2, 1))
        if columns and not rows and (self.number, 1) in self.run.contracted:  # a factor, before which another stands
            return False
        return None if rows == columns else columns


class Shown:
    """What runs show of the weights of ``model``, lazily."""

    def __init__(
        self, model: nn.Module, shape: Shape, examples: Mapping[nn.Module, CallArguments] | None = None
    ) -> None:
        self._model, self._examples = model, examples or {}
        self._modules = modules_of(model, remove_duplicate=False)
        self._runs = Runs(shape)

    @property
    def has_example(self) -> bool:
        return bool(self._examples)

    def of(self, name: str, param: Tensor, *, whole: bool = False) -> Iterator[Sight]:
        """What is shown of parameter ``param`` of the module ``name``, the surest first; nothing that was not used.

        With ``whole``, also by the whole model on a guess.
        """
        for module, run in self._on_examples:
            sight = self._sight(module, run, param, "example")
            if sight is not None and sight.is_used:
                yield sight
        for module in islice(self._around(name), LEVELS):
            if len(self._runs.places(module)) > MOST:
                break
            sight = self._sight(module, self._runs.of(module), param, "guess")
            if sight is not None:
                yield sight
        for module, run in self._guessed if whole else ():
            sight = self._sight(module, run, param, "guess")
            if sight is not None and sight.is_used:
                yield sight

    def _sight(self, module: nn.Module, run: Run, param: Tensor, truth: Truth) -> Sight | None:
        places = self._runs.places(module)
        return Sight(module, run, places[id(param)], len(places), truth) if id(param) in places else None

    def around(self, name: str) -> nn.Module | None:
        """The innermost of the modules whose ``forward`` may use a weight of module ``name``."""
        return next(self._around(name), None)

    def is_called(self, module: nn.Module) -> bool:
        """Whether what the module returns leaves the model."""
        return module is self._model or any(module is one for one in called(self._model))

    def _around(self, name: str) -> Iterator[nn.Module]:
        """The modules whose ``forward`` may use a weight of module ``name``, from within."""
        path = name.split(".") if name else []
        above = (self._modules[".".join(path[:length])] for length in range(len(path), -1, -1))
        return (module for module in above if not isinstance(module, (nn.Linear, *CONTAINERS)))

    @cached_property
    def _on_examples(self) -> list[tuple[nn.Module, Run]]:
        return [(module, self._runs.on(module, given)) for module, given in self._examples.items()]

    @cached_property
    def _guessed(self) -> list[tuple[nn.Module, Run]]:
        """Runs of the modules that are called and have no example."""
        found = []
        for module in called(self._model):
            if module not in self._examples and self._model not in self._examples:
                given = dummy(module)
                run = None if given is None else self._runs.on(module, given)
                found.append((module, run if run is not None and run.is_whole else self._runs.of(module)))
        return found

    def heads(self, truth: Truth) -> Iterator[tuple[nn.Module, frozenset[int], bool]]:
        """Of each module that is called, the ids of weights whose outputs it returns and that nothing else reads; and
        whether it begins with tokens or an image. Only of runs that came to their end."""
        for module, run in self._on_examples if truth == "example" else self._guessed:
            if run.is_whole:
                by_number = {number: key for key, number in self._runs.places(module).items()}
                yield module, frozenset(by_number[number] for number in run.heads), run.reads

    def only_looked_up(self, name: str, param: Tensor) -> bool:
        """Whether a parameter of the module ``name`` is looked up in, as a table is, and nothing is multiplied with it,
        as far as the surest run that uses it shows."""
        for sight in self.of(name, param):
            is_multiplied = any((sight.number, dim) in sight.run.ends for dim in (1, 2))
            if is_multiplied or sight.number in sight.run.looked_up:
                return not is_multiplied
        return False

    def last_used(self, ids: Collection[int]) -> set[int]:
        """Of each module whose run on a guess stopped, which of these weights it came to last."""
        found = set()
        for module, run in self._guessed:
            by_number = {number: key for key, number in self._runs.places(module).items()}
            used = [key for number, _ in run.ends if (key := by_number[number]) in ids]
            found |= {*used[-1:]} if not run.is_whole else set()
        return found

    def returned(self, module: nn.Module) -> set[int]:
        """The ids of weights whose outputs a module within the model returns on a guess, if its run ends."""
        run = self._runs.of(module)
        return {key for key, n in self._runs.places(module).items() if n in run.heads} if run.is_whole else set()

    def used(self, module: nn.Module) -> set[int]:
        """The ids of the weights that the run of a module that is called came to, on its example or on a guess."""
        run = dict(self._on_examples if module in self._examples else self._guessed)[module]
        return {key for key, number in self._runs.places(module).items() if number in run.used}

    def stopped(self) -> list[tuple[nn.Module, Run]]:
        """The modules whose ``forward`` did not end on its example."""
        return [(module, run) for module, run in self._on_examples if run.error is not None]


def dummy(module: nn.Module) -> CallArguments | None:
    """transformers' own dummy inputs of a model."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__):
        return None
    try:
        inputs: Any = getattr(module, "dummy_inputs", None)
        return None if not isinstance(inputs, Mapping) else as_given(((), inputs))
    except Exception:  # of several hundred model families
        return None
