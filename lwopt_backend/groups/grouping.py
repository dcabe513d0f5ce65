"""A model's param groups, routed; and whether the model still has the parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from lwopt_backend.config.hosts import NAME, ClippingConfig, HostConfig
from lwopt_backend.groups import Groups
from lwopt_backend.groups.choices import Rules, settings_of
from lwopt_backend.groups.param_groups import MOMENTUM, as_groups, check_overrides, main_rate, split
from lwopt_backend.groups.registry import MATRIX_RULES, atoms_of
from lwopt_backend.plan import Atom
from lwopt_backend.plan.atoms import Block, TrainedParam
from lwopt_backend.qk_clip import RowScaling
from lwopt_backend.routing.convolutions import FLATTENED
from lwopt_backend.routing.examples import examples_of
from lwopt_backend.routing.examples import lines as example_lines
from lwopt_backend.routing.matrices import Divided, divide
from lwopt_backend.routing.models import check_code, check_memory, modules_of
from lwopt_backend.routing.output_heads import Head, output_heads
from lwopt_backend.routing.routing import (
    Kind,
    Route,
    atom_settings,
    by_glob,
    check_all_globs,
    check_globs,
    cut_of,
    full_shape,
    named,
    named_like,
    named_parameters,
    routes_of,
    warn,
    warn_of_share,
)
from lwopt_backend.routing.shown import Shown

ADVICE = "make the optimizer after the last such change"
SHOWN = 5  # names in a sentence
C = TypeVar("C", bound=HostConfig)


class InModel:
    """The ``trained`` parameters, with their names, that ``model`` has. Others are no business of their optimizer.

    ``restore`` is called before the model is examined, because some hosts replace tensors in modules for a while.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[tuple[str, Tensor]],
        restore: Callable[[nn.Module], object] = lambda model: None,
    ) -> None:
        self._model, self._restore = model, restore
        restore(model)
        here = {id(param) for param in model.parameters()}
        self._trained = [(name, param) for name, param in trained if id(param) in here]
        self._look()

    def replaced(self) -> str | None:
        """A sentence on those that the model no longer has, which would be trained for nothing; or None.

        Costs one comparison for each of them and each module around them, while these are the same objects.
        """
        if all(map(is_, map(dict.get, self._contents, self._keys), self._kept)):  # no call of Python a parameter
            return None
        self._restore(self._model)
        here = {id(param) for param in self._model.parameters()}
        if gone := [name for name, param in self._trained if id(param) not in here]:
            return f"{_are(gone)} no longer in the model (replaced), so no step changes the replacement; {ADVICE}"
        self._look()
        return None

    def _look(self) -> None:
        found = [*self._found()]
        self._contents = [content for content, _, _ in found]
        self._keys, self._kept = [key for _, key, _ in found], [kept for _, _, kept in found]

    def _found(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The parameters and the modules around them, each with its key in a module's content."""
        ours = {id(param) for _, param in self._trained}
        for module in self._model.modules():
            for key, child in module._modules.items():
                if child is not None and any(id(param) in ours for param in child.parameters()):
                    yield module._modules, key, child
            for key, param in module._parameters.items():
                if id(param) in ours:
                    yield module._parameters, key, param


def _are(names: Sequence[str]) -> str:
    """The beginning of a sentence about these parameters."""
    if len(names) == 1:
        return f"parameter {names[0]!r} is"
    shown, more = ", ".join(map(repr, names[:SHOWN])), len(names) - SHOWN
    return f"parameters {shown}{f' and {more} more' if more > 0 else ''} are"


@dataclass(frozen=True)
class Member(TrainedParam):
    """A trained parameter with its tensor on this rank."""

    param: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class Grouping:
    """``groups`` are param groups of one rule each; ``names`` has parameters' names by id.

    ``trains_matrices`` is whether the matrix rule trains anything, also in other parts of the model. ``rate`` is the
    ``main_rate``. ``followed`` are lines about the examples, which ranks compare. ``again`` groups the same model on an
    example, None for a part of a model.
    """

    routes: list[Route]
    groups: list[dict[str, Any]]
    names: Mapping[int, str]
    divided: Mapping[str, Divided]  # by name, of what the matrix rule updates, or tensor parallelism cuts by rows
    trains_matrices: bool
    clip_groups: Mapping[str, str] = field(default_factory=dict)  # of a parameter, by name, if it is in one
    rate: float = 0.0
    followed: tuple[str, ...] = ()
    again: Callable[[Any], Grouping] | None = None

    def row_scaling(self) -> RowScaling:
        """Row factors for the trained parameters, none set so far."""
        trained = {id(param) for group in self.groups for param in group["params"]}
        shapes = {route.name: route.shape for route in self.routes}
        names = [name for key, name in self.names.items() if key in trained]
        cut = {route.name for route in self.routes if route.cut is not None}
        return RowScaling({name: shapes[name] for name in names}, self.transposed, self.matrices_in, cut)

    def matrices_in(self, name: str) -> tuple[Block, ...]:
        """The matrices in a parameter; none if the matrix rule does not update it."""
        return self.divided[name].blocks if name in self.divided else ()

    def member(self, name: str, param: Tensor, group: int) -> Member:
        """The parameter of that name, in param group ``group``."""
        return Member(
            name,
            full_shape(param),
            str(param.dtype).removeprefix("torch."),
            self.groups[group]["rule"],
            group,
            name in self.transposed,
            name in self.tied,
            self.matrices_in(name),
            cut_of(param),
            self.parts(name, param),
            param=param,
        )

    def smallest_matrix(self, group: int) -> Atom | None:
        """The matrix with the fewest elements in param group ``group``, if it has any."""
        params = self.groups[group]["params"]
        members = [self.member(self.names[id(param)], param, group) for param in params]
        atoms = (atom for member in members for atom in atoms_of(member, self.groups[group]))
        return min(atoms, key=lambda atom: atom.numel, default=None)

    def parts(self, name: str, param: Tensor) -> tuple[int, ...]:
        """As in ``TrainedParam``, also of a frozen one; a bias has those of its layer's weight."""
        cut, weight = cut_of(param), f"{name.rpartition('.')[0]}.weight"
        if cut is None or cut.dim > 0:
            return ()
        divided = self.divided.get(name if name in self.divided or param.ndim > 1 else weight)
        return cut.parts or (() if divided is None else divided.parts)

    @property
    def old_routing(self) -> str:
        """The options with which what is told by use is trained as before it was; empty if nothing is.

        Until 0.1, heads were told by names and widths alone, and stacks by names.
        """
        by_use = [r for r in self.routes if r.truth in ("library", "guess", "example")]
        heads = [r.name for r in by_use if r.kind == "elementwise" and r.category == "heads" and len(r.shape) == 2]
        stacks = [r.name for r in by_use if r.kind == "matrix" and len(r.shape) > 2 and not r.is_by_name]
        some = [f"{word}=[{named(names)}]" for word, names in (("include", heads), ("exclude", stacks)) if names]
        return " and ".join(some)

    @cached_property
    def tied(self) -> frozenset[str]:
        """Names of the parameters that the model uses several times."""
        return frozenset(route.name for route in self.routes if route.aliases)

    @cached_property
    def transposed(self) -> frozenset[str]:
        """Names of the matrices that are stored as (inputs, outputs)."""
        return frozenset(r.name for r in self.routes if r.kind == "matrix" and r.transposed)


def group_parameters(
    model: nn.Module,
    given: Groups,
    rules: Rules,
    config: HostConfig,
    *,
    routes: Sequence[Route] | None = None,
    elsewhere: Sequence[Route] = (),
    example: Any = None,
) -> Grouping:
    """Route ``model``'s parameters and split the ``given`` param groups by rule.

    A part of a model comes with its ``routes``, from ``route_given``, and those of the other parts, ``elsewhere``. The
    ``example`` is of the model's arguments, as in ``explain``.
    Raises ValueError if a given parameter is not the model's, if parameters share memory, if a glob or an override
    matches nothing, or if no parameter is a matrix and the configuration does not allow that.
    """
    check_code(model)
    check_memory(model)
    names = {id(param): name for name, param in named_parameters(model)}
    for number, group in enumerate(given):
        for position, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(
                    f"param group {number}, position {position}: the parameter of shape {tuple(param.shape)} is not in "
                    "the model that is trained; pass that model's parameters, which fully_shard replaces and a forward "
                    "pass unshards: list them after it, and after model.reshard()"
                )
    examples = examples_of(model, example)
    shown = Shown(model, full_shape, examples)
    if routes is None:
        flatten = config.convolutions == "flatten"
        heads = output_heads(model, shown=shown, decided=_decided(model, config), flatten=flatten)
        routes = route_given(model, given, rules, config, heads.found, shown=shown)
        _warn_of_last([names[key] for key in names if key in heads.unclear], routes, rules)
    everywhere = [*routes, *elsewhere]
    check_all_globs(config.include, config.exclude, everywhere)
    kinds = [r.kind for r in everywhere if r.kind != "frozen" and math.prod(r.shape) > 0]
    if "matrix" not in kinds and not config.allow_no_matrix:
        raise ValueError(
            f"none of the {len(kinds)} trained parameters is a matrix, so {rules.matrix['rule']!r} would train "
            f"nothing; {_way_out(everywhere)}name some in 'include', use AdamW, or set 'allow_no_matrix'"
        )
    check_overrides(rules, everywhere)
    warn_of_share(everywhere)
    clip_groups = _clip_groups(config, everywhere)
    trains = "matrix" in kinds
    groups = split(given, _are_matrices(routes, names), rules, _overrides(routes, names))
    _check_momentum(groups, config)
    per_head = {names[id(param)] for group in groups if group.get("per_head") for param in group["params"]}
    settings = atom_settings(model, config.atoms)
    divided = divide(model, routes, settings, elsewhere=elsewhere, per_head=per_head, shown=shown)
    said = {name: f": {matrices.reason}" for name, matrices in divided.items() if not matrices.is_plain}
    routes = [replace(r, reason=f"{r.reason}{said.get(r.name, '')}{f'; {r.cut}' if r.cut else ''}") for r in routes]
    by = {name: matrices.truth for name, matrices in divided.items() if matrices.truth}
    routes = [replace(r, truth=by[r.name]) if r.name in by and r.truth == "class" else r for r in routes]
    for module, run in shown.stopped():
        warn(
            f"example: {type(module).__name__}.forward stopped in {run.where or type(module).__name__}, on tensors "
            f"without data: {type(run.error).__name__}: {str(run.error)[:200]}. What was seen up to there counts; the "
            "rest is told as without an example"
        )
    told = tuple(example_lines(examples))
    # By name: hosts put flat tensors in the groups, and fully_shard other parameters in the model.
    kept = [{**group, "params": [names[id(param)] for param in group["params"]]} for group in given]

    def again(example: Any) -> Grouping:
        now = dict(named_parameters(model))
        here = [{**group, "params": [now[name] for name in group["params"]]} for group in kept]
        return group_parameters(model, here, rules, config, example=example)

    rate, later = main_rate(given, rules, trains), None if elsewhere else again
    return Grouping(routes, groups, names, divided, trains, clip_groups, rate, told, later)


def _decided(model: nn.Module, config: HostConfig) -> set[int]:
    """The ids of parameters that are not trained, or that a glob sends to a rule."""
    globbed = named_like((*config.include, *config.exclude))
    return {id(param) for name, param in named_parameters(model) if not param.requires_grad or globbed(name)}


def _check_momentum(groups: Groups, config: HostConfig) -> None:
    """Raises ValueError for two dtypes of one momentum."""
    wanted = getattr(config, "state_dtype", "parameter")
    for number, group in enumerate(groups):
        if wanted != "parameter" and group.get(MOMENTUM) not in (None, wanted):
            raise ValueError(
                f"state_dtype is {wanted!r}, but {MOMENTUM} of param group {number} ({group['rule']}) is "
                f"{group[MOMENTUM]!r}, which takes its place for the momentum, and computes in fp32; leave one out"
            )


def _way_out(routes: Sequence[Route]) -> str:
    """What to write where convolutions are most of the model."""
    some = any(r.kind == "elementwise" and r.category == "convolutions" for r in routes)
    return "write convolutions='flatten', which trains convolutions as matrices, " if some else ""


def _warn_of_last(unclear: Sequence[str], routes: Sequence[Route], rules: Rules) -> None:
    """Warn of weights that may be output heads, if the matrix rule trains them and no option says so."""
    set_so = {r.name for r in routes if r.truth == "option" and not r.reason.startswith(FLATTENED)}
    some = [r.name for r in routes if r.name in unclear and r.kind == "matrix" and r.name not in set_so]
    if some:
        warn(
            f"{named(some)} may be output heads: the model returns what they make, or they are last, and nothing "
            f"tells whether it is a whole model. {rules.matrix['rule']!r} trains them. Write those that are heads in "
            "the option exclude, the others in include; an example of the model's arguments, example=(args, kwargs), "
            "tells as well"
        )


@contextmanager
def as_saved(grouping: Grouping | None) -> Iterator[None]:
    """Add to an error about saved rules or state how to train as an earlier version did, where routing is known."""
    try:
        yield
    except ValueError as error:
        old = "" if grouping is None else grouping.old_routing
        if type(error) is not ValueError or not old or not ABOUT_RULES.search(str(error)):
            raise
        raise ValueError(
            f"{error}. Output heads and stacks of matrices are now told by what the model does with them: for a run "
            f"that began before, {old} keeps the rules that it had"
        ) from error


ABOUT_RULES = re.compile(r"'?(rule|state|number of parameters|members|digest)")


def _clip_groups(config: HostConfig, routes: Sequence[Route]) -> dict[str, str]:
    """The clip group of each parameter that is in one. Raises ValueError for a glob without a trained parameter, and
    for a parameter in two groups."""
    trained = [route for route in routes if route.kind != "frozen"]
    found: dict[str, str] = {}
    for name, group in config.clip_groups.items() if isinstance(config, ClippingConfig) else ():
        of_kind = [route for route in trained if group.kind in (None, route.kind)]
        if not of_kind:
            raise ValueError(f"clip_groups[{name!r}]: no trained parameter is of the kind {group.kind!r}; leave it out")
        check_globs(f"clip_groups[{name!r}]", group.params, of_kind, routes, _why_not_clipped)
        inside = named_like(group.params or ("*",))
        for route in of_kind:
            if any(map(inside, route.names)) and found.setdefault(route.name, name) != name:
                both = f"clip_groups {found[route.name]!r} and {name!r}"
                raise ValueError(f"parameter {route.name!r} is in {both}; give it to one of them")
    return found


def _why_not_clipped(route: Route) -> str:
    return "are not trained" if route.kind == "frozen" else f"are of the kind {route.kind!r}"


def route_given(
    model: nn.Module,
    given: Groups,
    rules: Rules,
    config: HostConfig,
    heads: Mapping[int, Head],
    *,
    shown: Shown | None = None,
) -> list[Route]:
    """Route ``model``'s parameters for the configured matrix rule; those that are not in ``given`` are frozen."""
    names = {id(param): name for name, param in named_parameters(model)}
    wanted = {names.get(id(param)) for group in given for param in group["params"]}
    routes = [
        as_taken(r, rules.matrix["rule"], config)
        if r.name in wanted
        else replace(r, kind="frozen", reason="not given to the optimizer")
        for r in routes_of(
            model,
            config.include,
            config.exclude,
            heads,
            atom_settings(model, config.atoms),
            shown=shown,
            flatten=config.convolutions == "flatten",
        )
    ]
    modules = {id(p): module for module in modules_of(model).values() for p in dict.values(module._parameters)}
    params = {name: (param, modules[id(param)]) for name, param in named_parameters(model)}
    routes = [replace(r, overrides=rules.selecting(r.name, *params[r.name])) for r in routes]
    groups = split(given, _are_matrices(routes, names), rules, _overrides(routes, names))
    rule = {names[id(param)]: group.get("class", group["rule"]) for group in groups for param in group["params"]}
    return [replace(r, rule=rule.get(r.name, "")) for r in routes]


def _are_matrices(routes: Sequence[Route], names: Mapping[int, str]) -> dict[int, bool]:
    """By a trained parameter's id, whether it is a matrix."""
    trained = {r.name: r for r in routes if r.kind != "frozen" and math.prod(r.shape) > 0}
    return {key: trained[name].kind == "matrix" for key, name in names.items() if name in trained}


def _overrides(routes: Sequence[Route], names: Mapping[int, str]) -> dict[int, tuple[int, ...]]:
    """By a parameter's id, the overrides that select it."""
    by_name = {route.name: route.overrides for route in routes}
    return {key: by_name[name] for key, name in names.items() if name in by_name}


def as_taken(found: Route, rule: str, config: HostConfig) -> Route:
    """The route by the matrix rule's default routing, unless a glob decides."""
    takes = MATRIX_RULES[rule].takes
    names, shape = found.names, found.shape
    if takes is None or found.kind == "frozen" or by_glob(shape, names, config.include, config.exclude) is not None:
        return found
    taken = takes(found)
    if taken is None or len(shape) != 2 or 0 in shape or taken == (found.kind == "matrix"):
        return found
    kind: Kind = "matrix" if taken else "elementwise"
    return replace(found, kind=kind, reason=f"{found.reason}; {rule!r} {'takes' if taken else 'leaves'} it")


class Given(NamedTuple):
    """The arguments about which rules train a model, with which options."""

    options: Mapping[str, Any]
    params: Iterable[Any] | None
    example: Any = None

    def decide(self, config: type[C], model: nn.Module) -> tuple[Rules, C, Grouping]:
        """Validate options and route parameters. Raises ValueError for wrong options, and for foreign parameters."""
        rules, settings = settings_of(config, self.options, NAME)
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = as_groups(trained if self.params is None else self.params)
        return rules, settings, group_parameters(model, groups, rules, settings, example=self.example)
