"""How a model's own code uses its weights, found by running modules without memory.

Copies of modules run on the meta device, with parameters of the same shapes and without hooks: nothing is allocated or
communicated, and the model is not touched. What a run shows is kept, by the values of the module and its arguments, for
all modules of the process that are alike.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lwopt_backend.routing.arguments import CallArguments, Failure, image_sizes, input_sizes, likely, repairs, taken
from lwopt_backend.routing.copies import Kinds, Shape, bare, codes, dtype_of, thin
from lwopt_backend.routing.follow import Follow
from lwopt_backend.routing.meta import OnMeta
from lwopt_backend.routing.models import has_forward, modules_of, parameters_of
from lwopt_backend.routing.parts import partition
from lwopt_backend.routing.tracks import Ends, SliceUse, UsedAs

FIRST_TRIES, TRIES = 16, 40  # changes of such arguments that come no further
AT_A_TIME = 4  # of these for one run, before others have their turn
COPYING = 20  # operations that take as long as a copy of a module
# Operations of one run, and of all that look for the arguments of a module and of all modules: some seconds. A limit of
# time would stop ranks in different places.
OPERATIONS, ALL_OPERATIONS, ALL_KINDS = 20_000, 6_000, 20_000
KEPT = 512  # runs
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What became of a module's ``matrices``, by number, and how it failed.

    ``ends`` are those of outputs, by number and dimension, ``steps`` the operations on them, ``divided`` how many
    weights have parts. ``uses`` are those of ``is_bare`` modules' parameters. ``heads`` are weights whose outputs were
    returned, and that nothing else reads. ``convolved`` are those of convolutions, with their groups, and whether they
    are transposed, ``contracted`` the dimensions over which products summed, ``looked_up`` those of which an index took
    elements. ``reads``: an argument is looked up in an embedding, or goes through a convolution first. ``computations``
    are the operations that are no views. ``where`` is the class of the module in which the forward failed, ``line``
    where in the run module's own code. ``cost`` are the operations of all runs that looked for its arguments.
    """

    ends: Mapping[tuple[int, int], Ends]
    error: Exception | None
    steps: int
    divided: int = 0
    uses: Mapping[int, set[UsedAs]] = field(default_factory=dict)
    slices: Mapping[int, SliceUse] = field(default_factory=dict)
    heads: frozenset[int] = frozenset()
    convolved: Mapping[int, tuple[int, bool]] = field(default_factory=dict)
    contracted: frozenset[tuple[int, int]] = frozenset()
    looked_up: frozenset[int] = frozenset()
    reads: bool = False
    operations: int = 0
    computations: int = 0
    where: str = ""
    line: int = 0
    cost: int = 0

    @cached_property
    def used(self) -> frozenset[int]:
        """The weights that the run came to."""
        by_use = (number for number, uses in self.uses.items() if uses)
        of_ends = (number for number, _ in self.ends)
        return frozenset((*of_ends, *by_use, *self.slices, *self.heads, *self.convolved))

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        return self.is_whole, self.divided, self.computations, self.line

    @property
    def is_whole(self) -> bool:
        """Whether the forward ended, and used something."""
        return self.error is None and (bool(self.ends) or any(self.uses.values()))


def matrices(module: nn.Module) -> list[Tensor]:
    """The parameters of a module that may be matrices, or are a convolution's."""
    return [param for _, param in parameters_of(module) if len(getattr(param, "ds_shape", param.shape)) > 1]


def is_bare(module: nn.Module) -> bool:
    """Whether it is not known what is done with a module's parameters: its class is none of torch's, and no linear, or
    it only holds them, as those of a graph that torch.fx or torch.export has made."""
    if isinstance(module, nn.ParameterDict | nn.ParameterList) or type(module) is nn.Module:
        return True
    if type(module).__module__.startswith(("torch.fx.", "torch.export.")):
        return True
    return _is_own(module) and not _is_linear(module)


def is_own_linear(module: nn.Module) -> bool:
    """Whether it is a linear with a forward of its own, which may have its inputs first."""
    own = _is_own(module) and type(module).forward is not nn.Linear.forward
    return own and _is_linear(module) and type(module).__name__ != "Conv1D"


def _is_own(module: nn.Module) -> bool:
    return any(not f"{kind.__module__}.".startswith(("torch.", "builtins.")) for kind in type(module).__mro__)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"


class Runs:
    """Runs of modules, one for those that are alike."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._kinds = shape, Kinds(shape)
        self._places: dict[int, dict[int, int]] = {}
        self._paid: dict[Hashable, int] = {}

    def places(self, module: nn.Module) -> dict[int, int]:
        """The numbers of a module's ``matrices``, by id."""
        if id(module) not in self._places:
            self._places[id(module)] = {id(param): number for number, param in enumerate(matrices(module))}
        return self._places[id(module)]

    def of(self, module: nn.Module) -> Run:
        """The run that shows most, with arguments of our own.

        All kinds of modules of a model together may cost so much. What was followed before counts as if it had not
        been, so that ranks that have followed other models follow the same of this one.
        """
        kind = self._kinds.of(module)
        if kind not in self._paid and sum(self._paid.values()) > ALL_KINDS:
            return Run({}, None, 0)
        found = _kept((kind, "likely"), lambda: best_run(module, self._shape, self._kinds))
        self._paid[kind] = found.cost
        return found

    def on(self, module: nn.Module, given: CallArguments) -> Run:
        """The run on these arguments: of a few of many layers that are alike, or of all, if that stops."""

        def made() -> Run:
            one, failure = run(module, self._shape, given, self._kinds)
            if failure is not None and thin(module, self._kinds) is not None:
                return max(one, run(module, self._shape, given)[0], key=lambda found: found.rank)
            return one

        return _kept((self._kinds.of(module), given.key), made)


_RUNS: OrderedDict[Hashable, Run] = OrderedDict()


def _kept(key: Hashable, make: Callable[[], Run]) -> Run:
    if key not in _RUNS:
        _RUNS[key] = make()
        if len(_RUNS) > KEPT:
            _RUNS.popitem(last=False)
    _RUNS.move_to_end(key)
    return _RUNS[key]


def best_run(module: nn.Module, shape: Shape, kinds: Kinds | None = None) -> Run:
    """The run that shows most, of those with likely arguments, and of those that come further by a change of one."""
    if not has_forward(module):
        return Run({}, None, 0)
    return _Search(module, shape, kinds).best()


class _Search:
    """Looks for arguments that make a module's ``forward`` complete."""

    def __init__(self, module: nn.Module, shape: Shape, kinds: Kinds | None = None) -> None:
        self._module, self._shape, self._kinds = module, shape, kinds
        self._params = taken(module)
        self._sizes = [*dict.fromkeys(_sizes(module, shape))]
        self._images = [*dict.fromkeys(image_sizes(module))]
        self._left, self._tried = ALL_OPERATIONS, dict[Any, Run]()
        self._stopped: list[_StoppedRun] = []
        self._found, self._given = Run({}, None, 0), CallArguments({})
        convolutions = (one for one in modules_of(module).values() if isinstance(one, nn.modules.conv._ConvNd))
        self._channels = tuple(dict.fromkeys(one.in_channels for one in convolutions))

    def best(self) -> Run:
        """The run that shows most: of the likeliest arguments, of changes of them, of other likely ones, and of changes
        of all these."""
        for width in input_sizes(self._module, matrices(self._module), self._shape):
            for given in likely(self._module, self._params, width):
                one = self._run(given.filled(self._given))
                if len(self._stopped) == 1:
                    self._repair(FIRST_TRIES)
                if self._found.is_whole or self._left < 0:
                    return replace(self._found, cost=ALL_OPERATIONS - self._left)
                if one.steps == 1:  # another size of the inputs
                    break
        self._repair(TRIES)
        return replace(self._found, cost=ALL_OPERATIONS - self._left)

    def _run(self, given: CallArguments) -> Run:
        if given.key not in self._tried:
            one, failure = run(self._module, self._shape, given, self._kinds)
            self._tried[given.key] = one
            self._left -= one.operations + COPYING
            if not self._stopped or one.rank > self._found.rank:
                self._found, self._given = one, given
            failure = failure and replace(failure, channels=self._channels)
            changes = repairs(given, failure, self._params, self._sizes, self._images) if failure else iter(())
            self._stopped.append(_StoppedRun(one, changes))
        return self._tried[given.key]

    def _repair(self, most: int) -> None:
        """Try changes of arguments, a few at a time of those that came furthest."""
        while most > 0 and self._left > 0 and not self._found.is_whole:
            open_ones = [stopped for stopped in self._stopped if not stopped.is_done]
            if not open_ones:
                return
            stopped = max(open_ones, key=lambda stopped: (-(stopped.tries // AT_A_TIME), stopped.run.rank))
            given = next(stopped.changes, None)
            stopped.tries += 1
            if given is None:
                stopped.is_done = True
            elif given.key not in self._tried and not given.is_huge:
                before = self._found.rank
                self._run(given)
                most -= 1 if self._found.rank == before else 0


@dataclass(slots=True)
class _StoppedRun:
    """A run that stopped, and what could be changed in its arguments."""

    run: Run
    changes: Iterator[CallArguments]
    tries: int = 0
    is_done: bool = False


def _sizes(module: nn.Module, shape: Shape) -> Iterator[int]:
    for one in modules_of(module).values():
        if isinstance(one, nn.Linear):
            yield shape(one.weight)[-1]
    for param in module._parameters.values():
        if param is not None and param.ndim > 1:
            yield from shape(param)[-2:]


def run(
    module: nn.Module, shape: Shape, given: CallArguments, kinds: Kinds | None = None
) -> tuple[Run, Failure | None]:
    """Run a copy of ``module``; and why it stopped, if it did.

    With ``kinds``, of many layers that are alike a few run, and stand for the others.
    """
    few = None if kinds is None else thin(module, kinds)
    memo: dict[int, Any] = {}
    copied = bare(module, shape, memo, None if few is None else few.kept)
    held = matrices(module)
    same = few.same if few is not None else {}
    here = [param for param in held if id(param) in memo or id(param) not in same]
    numbers = {id(param): number for number, param in enumerate(here)}
    of_all = [numbers[id(param)] if id(param) in numbers else numbers[same[id(param)]] for param in held]
    unknown = [one for one in modules_of(module).values() if is_bare(one) or is_own_linear(one)]
    bare_ones = {id(param) for one in unknown for param in one._parameters.values()}
    linears = [number for number, param in enumerate(here) if id(param) not in bare_ones]
    weights = [memo.get(id(param), param) for param in here]  # those of quantized linears are not copied
    with torch.no_grad():
        args, kwargs, whose, constant = given.made(dtype_of(module))
        follow = Follow(weights, codes(module), linears, OPERATIONS)
        follow.begin([args, kwargs], whose, constant)
        try:
            with ExitStack() as stack:
                for context in (OnMeta(), torch.device("meta"), follow):
                    stack.enter_context(context)
                if "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                result = copied.forward(*args, **kwargs)
            follow.returned(result)
        except Exception as error:  # anybody's code
            follow.failed(error.__traceback__)
            where = _where(error, copied)
            return _seen(follow, of_all, error.with_traceback(None), *where), follow.failure(error)
    return _seen(follow, of_all, None), None


def _where(error: Exception, module: nn.Module) -> tuple[str, int]:
    """The class of the innermost module in whose methods an error arose, and the line of the module that ran."""
    found, line, trace = "", 0, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get((*trace.tb_frame.f_code.co_varnames, "self")[0])
        found = type(owner).__name__ if isinstance(owner, nn.Module) else found
        line = trace.tb_lineno if owner is module else line
        trace = trace.tb_next
    return found, line


def _seen(follow: Follow, of_all: Sequence[int], error: Exception | None, where: str = "", line: int = 0) -> Run:
    """What a run shows; ``of_all`` has the number of each weight among those that ran."""
    known, alike = follow.known, dict[int, list[int]]()
    for number, ran in enumerate(of_all):
        alike.setdefault(ran, []).append(number)

    def spread(found: Mapping[int, T]) -> dict[int, T]:
        return {number: value for ran, value in found.items() for number in alike[ran]}

    return Run(
        {(number, dim): ends for (ran, dim), ends in known.ends.items() for number in alike[ran]},
        error,
        follow.steps,
        sum(len(partition(ends).parts) > 1 for ends in known.ends.values()),
        spread(known.uses),
        spread(known.slices),
        frozenset(number for ran in follow.heads for number in alike[ran]),
        spread(known.convolved),
        frozenset((number, dim) for ran, dim in known.contracted for number in alike[ran]),
        frozenset(number for ran in known.looked_up for number in alike[ran]),
        follow.reads,
        follow.operations,
        follow.computations,
        where,
        line,
    )
