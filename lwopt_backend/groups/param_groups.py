"""Param groups: the user's split by rule, and the element-wise optimizers of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.config.foreign import ADVICE, GRANTED, MEANT, SHARED
from lwopt_backend.config.hosts import HOSTS, HostConfig
from lwopt_backend.config.options import Known, nearest, option_suggestion, options_in, within
from lwopt_backend.groups import Group, Groups, others
from lwopt_backend.groups.choices import Rules, add, changed
from lwopt_backend.groups.members import Members
from lwopt_backend.groups.optimizer_classes import class_of
from lwopt_backend.groups.registry import (
    BLOCK_STEP,
    ELEMENTWISE_RULES,
    arguments,
    check_group,
    check_torchs_keys,
    is_cautious,
    known_in,
    optimizer_arguments,
    rule_of,
)
from lwopt_backend.routing.routing import Route, check_globs
from lwopt_backend.runtime.agreement import digest, setting
from lwopt_backend.runtime.collectives import changing, of_elementwise, phase, rule_name
from lwopt_backend.runtime.elementwise import ElementwiseStepper, step_cautiously
from lwopt_backend.runtime.pieces import Slices
from lwopt_backend.runtime.state import SAME_RULE, WEIGHTS_ALONE, check_fits


class ElementwiseGroups:
    """Steps parts of element-wise param groups; every group's optimizer is made once."""

    def __init__(self) -> None:
        self._steppers: dict[int, ElementwiseStepper] = {}

    def step(
        self,
        number: int,
        group: Group,
        parts: Sequence[Slices],
        weights: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        """One step of ``parts``, of param group ``number``, with its current options.

        ``weights`` returns the weights in them, if state is stepped as well.
        """
        options = arguments(group)
        given = optimizer_arguments(options)
        if number not in self._steppers:
            rule = ELEMENTWISE_RULES[rule_of(group)]
            self._steppers[number] = ElementwiseStepper(class_of(rule.optimizer), rule.counters)
        stepper = self._steppers[number]
        weights = weights or (lambda: [part.value for part in parts])
        with phase(of_elementwise(group)), changing(rule_name(group), weights):
            if is_cautious(options):
                step_cautiously(stepper, given, options["lr"] * options["weight_decay"], parts)
            else:
                stepper.step(given, parts)


# Param groups' options at a step must be the same on all ranks.

COMPARED_EVERY = 64  # steps, beginning with the first
NONE = 2**31 - 1  # above every hash: the flag of a rank that compares nothing in this step, so that no rank does


class CheckedGroups:
    """Checks the options in param groups as the constructor does, in steps before which they were changed; and their
    parameters, where the groups have the model's. ``groups`` are as the optimizer was made with them."""

    def __init__(self, groups: Groups = (), members: Members | None = None) -> None:
        self.members = members
        self._momentum = [group.get(MOMENTUM) for group in groups]
        self._found: list[dict[str, Any]] = []

    @property
    def out(self) -> frozenset[str]:
        """Names of the parameters that were taken out of the groups."""
        return frozenset() if self.members is None else self.members.out

    def sign(self, groups: Sequence[dict[str, Any]]) -> None:
        """``Members.sign``, where the groups have the model's parameters."""
        if self.members is not None:
            self.members.sign(groups)

    def arrange(self, groups: Groups) -> None:
        """``Members.look``, where the groups have the model's parameters, before a state dict counts them."""
        if self.members is not None and self.members.knows_any(groups):
            self.members.look(groups)

    def check(self, groups: Groups) -> None:
        """Raises ValueError that names option or parameter, group and choices. Called in every step, before anything
        is changed."""
        if self.members is not None:
            self.members.look(groups)
        found = [arguments(group) for group in groups]
        rates = [options.pop("lr", 0.0) for options in found]
        if found == self._found and all(isinstance(rate, float) and 0 <= rate < math.inf for rate in rates):
            return
        for number, group in enumerate(groups):
            check_group(group, f"param group {number} ({rule_of(group)})")
        for number, (group, made) in enumerate(zip(groups, self._momentum)):
            if group.get(MOMENTUM) != made:
                raise ValueError(
                    f"param group {number} ({rule_of(group)}): {MOMENTUM}: expected {made!r}, with which the optimizer "
                    f"was made, found {group.get(MOMENTUM)!r}; save, make another optimizer, and load"
                )
        self._found = found

    def problem(self, groups: Groups) -> str | None:
        """What ``check`` raises, as a sentence."""
        try:
            self.check(groups)
        except ValueError as error:
            return str(error)
        return None


class ComparedOptions:
    """The hash of the options in ``checked`` groups as two flags. A step takes the maximum of every flag over all
    ranks."""

    def __init__(self, checked: CheckedGroups) -> None:
        self.steps = 0
        self._checked = checked
        self._due = False

    def compare_next(self) -> None:
        """Compare in the next step, whatever its number, if all ranks call this."""
        self._due = True

    def flags(self, groups: Groups) -> list[int]:
        """The two flags of this rank. Called once in every step."""
        due, self._due = self._due or self.steps % COMPARED_EVERY == 0, False
        self.steps += 1
        number = int(digest(self.lines(groups))[:7], 16) if due else 0
        return [number, -number] if due else [NONE, NONE]

    def lines(self, groups: Groups) -> list[str]:
        """What must be equal on all ranks: options, and the parameters that were taken out."""
        return [*option_lines(groups), *(() if self._checked.members is None else self._checked.members.lines())]

    @staticmethod
    def differ(largest: Sequence[int]) -> bool:
        """Whether ranks have different options, by the largest flags of all ranks; not if any rank compares nothing.

        If this is true, all ranks compare, all read the flags, and all reach this result.
        """
        return largest[0] != NONE and largest[0] != -largest[1]


def option_lines(groups: Groups) -> list[str]:
    """The options of all param groups, one line each."""
    return [
        setting(f"{key} of param group {number} ({rule_of(group)})", comparable(value))
        for number, group in enumerate(groups)
        for key, value in arguments(group).items()
    ]


def settings_lines(rules: Rules, config: HostConfig) -> list[str]:
    """One line for each setting that must be equal on all ranks, which excludes ``report``."""
    lines = [setting("torch.__version__", str(torch.__version__))]
    for kind, group in (("matrix", rules.matrix), ("elementwise", rules.elementwise)):
        lines += [setting(f"{kind}.{key}", comparable(value)) for key, value in group.items()]
    for number, override in enumerate(rules.overrides):
        lines += [setting(f"overrides[{number}].{key}", comparable(value)) for key, value in vars(override).items()]
    return lines + [setting(key, comparable(value)) for key, value in asdict(config).items() if key != "report"]


def comparable(value: Any) -> Any:
    """Spell equal values alike: 1 and 1.0, a tensor and its number, a list and a tuple. A value without a spelling,
    such as a function, becomes the name of its type."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(map(comparable, value))
    if isinstance(value, Mapping):
        return {key: comparable(entry) for key, entry in value.items()}
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(value)
    return value if value is None or isinstance(value, (int, str, torch.dtype)) else type(value).__qualname__


# Param groups: every group of the user's is split by rule, and by the overrides that its parameters have.

OURS = frozenset({"rule", "from_group", "overrides", "members"})  # added to the parts
UNSAVED = OURS | {"params"}  # options of a group that no checkpoint has
MOMENTUM = "momentum_dtype"  # decides how state is kept, so it stays as it was when the optimizer was made
DECIDED = UNSAVED | {"per_head", MOMENTUM}  # options that no checkpoint changes


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """``params`` as torch.optim takes it (parameters, named parameters, or group dictionaries) as a list of groups.

    Names are dropped in favor of the model's. Raises TypeError for anything else, ValueError for no parameter or
    repeated ones.
    """
    if isinstance(params, Tensor) or not _is_ordered(params):
        found = "a single tensor" if isinstance(params, Tensor) else _kind(params)
        raise TypeError(
            f"params: expected an iterable of parameters or of param groups, in one order on all ranks; found "
            f"{found}; pass model.parameters() or a list of param groups"
        )
    items = list(params)
    if not items:
        raise ValueError(
            "params: expected at least one parameter, found none; pass model.parameters() or a list of param groups"
        )
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    for number, group in enumerate(items):
        if not isinstance(group, Mapping):
            raise TypeError(f"param group {number}: expected a dictionary like the other groups, found {_kind(group)}")
        if "params" not in group:
            raise ValueError(f"param group {number}: expected a key 'params', found {', '.join(map(repr, group))}")
        if not _is_ordered(group["params"]):
            found = _kind(group["params"])
            raise TypeError(f"param group {number}: params: expected a list of parameters, found {found}")
    seen: set[int] = set()
    groups = []
    for number, group in enumerate(items):
        given = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        params = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in given]
        for position, param in enumerate(params):
            place = f"param group {number}, position {position} of 'params'"
            if not isinstance(param, Tensor):
                raise TypeError(f"{place}: expected a parameter, found {_kind(param)}")
            if id(param) in seen:
                raise ValueError(f"{place}: the parameter of shape {tuple(param.shape)} was given before; remove one")
            seen.add(id(param))
        kept = {key: value for key, value in group.items() if key != "param_names"}  # torch adds it
        groups.append({**kept, "params": params})
    return groups


def _is_ordered(params: Any) -> bool:
    """Whether these can be parameters; a set has another order on every rank."""
    if isinstance(params, (Set, Mapping)) or isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        return False
    return isinstance(params, (Tensor, Iterable))


def _kind(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (int, float)) else f"a {type(value).__name__}"


def as_configured(saved: Group, group: Group) -> dict[str, Any]:
    """A saved param group with the momentum's dtype of this optimizer's ``group``, for loaders that replace groups."""
    return {**saved, MOMENTUM: group[MOMENTUM]} if MOMENTUM in group else dict(saved)


def with_options(group: Group, saved: Group) -> dict[str, Any]:
    """A param group with the options of a ``saved`` one; a rate that is a tensor stays one."""
    options = {key: value for key, value in saved.items() if key not in DECIDED}
    rate = group.get("lr")
    if isinstance(rate, Tensor) and not isinstance(options.get("lr", rate), Tensor):
        options["lr"] = torch.full_like(rate, options["lr"])
    return {**group, **options}


def of_another_optimizer(saved: Any) -> bool:
    """Whether these are a checkpoint's param groups, and none has the rule that this package writes."""
    groups = isinstance(saved, Sequence) and bool(saved) and all(isinstance(group, Mapping) for group in saved)
    return groups and not any("rule" in group for group in saved)


def check_saved_groups(
    where: str,
    groups: Groups,
    saved: Groups,
    facts: Callable[[Group], dict[str, Any]] = lambda group: {"number of parameters": len(group["params"])},
    advice: str = "make the param groups it was saved with",
    alone: str = WEIGHTS_ALONE,
    members: Members | None = None,
) -> None:
    """Raises ValueError for saved param groups of another optimizer, with other rules, with other ``facts``, with other
    ``members``, or with options that the constructor would refuse."""
    if of_another_optimizer(saved) and any(rule_of(group) != "adamw" for group in groups):
        raise ValueError(
            f"{where}: the checkpoint was written by another optimizer: its param groups have no 'rule'; load the "
            "model's weights alone and begin with new state, or load another Muon's state with "
            "lwopt_backend.migration"
        )
    for number, group in enumerate(saved):
        if "rule" not in group and (found := others.rule_of_saved((), group)) != "adamw":
            raise ValueError(f"{where}: param group {number}: expected AdamW's, found {found}; load the weights alone")
    theirs = dict.fromkeys(map(rule_of, saved))
    for rule in (rule for rule in map(rule_of, groups) if theirs and rule not in theirs):
        raise ValueError(
            f"{where}: expected param groups that {rule!r} trains, the checkpoint has those of {[*theirs]}; {alone}, "
            f"and begin with new state, or {SAME_RULE}"
        )
    sides = ({n: {"rule": rule_of(g), **facts(g)} for n, g in enumerate(some)} for some in (groups, saved))
    check_fits(where, *sides, what="param group", advice=advice, alone=alone)
    if members is not None:
        members.check_signed(where, saved)
    for number, (group, of_group) in enumerate(zip(groups, saved)):
        name = f"{where}: param group {number}"
        if rule_of(group) == "adamw":
            check_torchs_keys(of_group, name)
        check_group({**of_group, "rule": rule_of(group)}, f"{name} ({rule_of(group)}) in the checkpoint")


def split(
    groups: Groups,
    is_matrix: Mapping[int, bool],
    rules: Rules,
    overrides: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Each group's matrices, then its element-wise parameters, both in the group's order; empty parts are left out.

    ``is_matrix`` tells by ``id(parameter)``; parameters missing from it (frozen ones) are dropped. Parameters with
    other ``overrides``, by id, become separate parts. A group's own ``lr`` and
    ``weight_decay`` hold for all its parts. Its other options are the matrix rule's; those in the section
    ``"elementwise"``, or in the section of that rule's name, are the element-wise rule's. Overrides come last. Keys
    that are no option stay in all parts. The number of parts depends on the model and the user's groups, not on ranks.
    """
    parts = []
    for number, group in enumerate(groups):
        with within(f"param group {number}"):
            matrix, elementwise, extra = _options(group, rules)
        for kind, made in (("matrix", matrix), ("elementwise", elementwise)):
            wanted = [p for p in group["params"] if is_matrix.get(id(p)) == (kind == "matrix")]
            by_overrides: dict[tuple[int, ...], list[Any]] = {}
            for param in wanted:
                which = overrides_of(overrides.get(id(param), ()), kind, rules)
                by_overrides.setdefault(which, []).append(param)
            for which, params in sorted(by_overrides.items()):
                part = made
                for override in which:
                    with within(f"overrides[{override}]: {kind}"):
                        part = changed(part, getattr(rules.overrides[override], kind))
                steps = {BLOCK_STEP: 0} if kind == "matrix" and part.get("block_period", 1) > 1 else {}
                marks = {"from_group": number, "overrides": list(which)}
                parts.append({"params": params, **extra, **part, **steps, **marks})
    return parts


def main_rate(groups: Groups, rules: Rules, trains_matrices: bool) -> float:
    """The rate that the numbers of a schedule mean, and ``defaults["lr"]``: the one that all of the user's ``groups``
    have, or else the matrix rule's; the element-wise rule's in a model that has no matrices on any pipeline stage, or
    if only groups and overrides have rates for matrices."""
    main = rules.matrix if trains_matrices and rules.matrix["lr"] is not None else rules.elementwise
    given = [float(group.get("lr", -1.0)) for group in groups]
    return given[0] if given and given[0] >= 0 and len(set(given)) == 1 else float(main["lr"])


def overrides_of(selecting: Sequence[int], kind: str, rules: Rules) -> tuple[int, ...]:
    """The numbers of the overrides, of those ``selecting`` a parameter, that change its rule."""
    return tuple(number for number in selecting if getattr(rules.overrides[number], kind))


def _options(group: Group, rules: Rules) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
    """A group's rules with its own options, and its keys that are none."""
    name = rules.elementwise["rule"]
    of_matrix, of_others = map(known_in, (rules.matrix, rules.elementwise))
    rest = {key: value for key, value in group.items() if key != "params"}
    sections: dict[str, dict[str, Any]] = {"matrix": {}, "elementwise": {}}
    for key, kind in (("matrix", "matrix"), ("elementwise", "elementwise"), (name, "elementwise")):
        add(sections[kind], rest.pop(key, {}), key)
    shared = {key: rest[key] for key in SHARED if key in rest and key in of_others}
    add(sections["matrix"], {key: rest.pop(key) for key in [*rest] if key in of_matrix}, "matrix")
    for key in rest:
        _check_extra(str(key), name, of_matrix, of_others)
    matrix = changed(rules.matrix, sections["matrix"])
    with within(name):
        return matrix, changed(rules.elementwise, {**shared, **sections["elementwise"]}), rest


def _check_extra(key: str, name: str, of_matrix: Known, of_others: Known) -> None:
    """Raises ValueError for a key that looks like an option but would do nothing; other keys are the user's.

    ``name`` is the element-wise rule's.
    """
    if key in of_others:
        raise ValueError(f"{key!r} is an option of {name!r}; write it into the group's section {name!r}")
    if any(key in options_in(config) for config in HOSTS.values()):
        raise ValueError(f"{key!r} is an option of the whole optimizer, not of a param group")
    if key in OURS or key == BLOCK_STEP:
        raise ValueError(f"{key!r} is a key that this optimizer writes itself; rename yours")
    known = ["params", "matrix", "elementwise", name, *of_matrix]
    if nearest(key, known, cutoff=0.8) or {key.lower()} & {*MEANT, *GRANTED, *ADVICE}:
        meant = MEANT.get(key.lower(), key).removeprefix("matrix.").replace("elementwise", name)
        hint = option_suggestion(meant, [*known, *(f"{name}.{option}" for option in of_others)])
        raise ValueError(f"unknown key {key!r}; {hint}")


def rates(groups: Groups) -> list[tuple[str, int, str, str]]:
    """The rule of each param group, the number of its parameters, its learning rate and its weight decay.

    Groups alike in these are one. Values that are the default's are marked, because they may not be intended.
    """
    counts: dict[tuple[str, str, str], int] = {}
    for group in groups:
        known, options = known_in(group), arguments(group)
        lr, decay = (
            f"{text}{', the default' if options.get(key) is not None and options[key] == known[key].default else ''}"
            for key, text in _spelled(group).items()
        )
        row = (rule_name(group), lr, decay)
        counts[row] = counts.get(row, 0) + len(group["params"])
    return [(name, count, lr, decay) for (name, lr, decay), count in counts.items()]


def _spelled(group: Group) -> dict[str, str]:
    """A param group's learning rate and weight decay, for a reader."""
    known, options = known_in(group), arguments(group)
    absent = {key: "left to the class" if key in known.keys() - options.keys() else "none" for key in SHARED}
    return {k: f"{comparable(options[k]):g}" if options.get(k) is not None else absent[k] for k in SHARED}


MOST_SAID = 10


class ShownRates:
    """The learning rates and weight decays that were printed of param ``groups``. ``say`` prints what a load makes of
    them."""

    def __init__(self, groups: Groups, say: Callable[[str], None]) -> None:
        self._counts = [len(group["params"]) for group in groups]
        self._shown = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._say = say

    def loaded(self, before: Groups, groups: Groups) -> None:
        """Say in one line which values a load has changed, of those ``before`` it, to others than were shown last. An
        optimizer that loads its own state, as some trainers let it, changes none, whatever a schedule has written."""
        changes: dict[tuple[str, str], int] = {}
        for count, shown, old, group in zip(self._counts, self._shown, before, groups):
            was, now = _spelled(old), _spelled(group)
            for key, value in _spelled(shown).items():
                if now[key] not in (value, was[key]):
                    change = f"{key.replace('_', ' ')} {now[key]}, not {value}", rule_name(shown)
                    changes[change] = changes.get(change, 0) + count
                    shown[key] = arguments(group).get(key)
        said = [f"{what}, for {count} parameter(s) of {rule}" for (what, rule), count in changes.items()]
        if said:
            more = f"; and {len(said) - MOST_SAID} more" if len(said) > MOST_SAID else ""
            self._say(f"Loaded: {'; '.join(said[:MOST_SAID])}{more}.")


def check_rates(groups: Groups) -> None:
    """Raises ValueError for param groups without a learning rate, whose rule has no default."""
    for group in groups:
        if group["lr"] is None:
            rate = known_in(group)["lr"].meaning
            raise ValueError(
                f"expected 'lr' of rule {rule_of(group)!r}, which has no default, found none; add the {rate}"
            )


def check_overrides(rules: Rules, routes: Sequence[Route]) -> None:
    """Raises ValueError for an override that changes nothing in a model with these routes."""
    trained = [route for route in routes if route.kind != "frozen"]
    for number, override in enumerate(rules.overrides):
        where = f"overrides[{number}]"
        if not callable(override.params):
            check_globs(where, override.params, trained, routes, lambda route: "are not trained")
        kinds = {route.kind for route in trained if number in route.overrides}
        if not kinds:
            where_lost = "; fully_shard and to_empty drop attributes, so set them after it" * bool(override.attribute)
            raise ValueError(f"{where}: {override} selects no trained parameter{where_lost}")
        for kind, other in (("matrix", "elementwise"), ("elementwise", "matrix")):
            if getattr(override, kind) and kind not in kinds:
                raise ValueError(f"{where}: {override}: options in {kind!r}, but only match parameters of {other!r}")
