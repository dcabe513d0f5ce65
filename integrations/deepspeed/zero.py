"""ZeRO's storage: what DeepSpeed steps at a time, planned and compared with what it stores; state in checkpoints."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import logger
from torch import Tensor

from lwopt_backend import report
from lwopt_backend.checkpoint.deepspeed.files import MATRICES
from lwopt_backend.config.choices import Rules, settings_lines
from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.config.param_groups import of_another_optimizer
from lwopt_backend.config.registry import MATRIX_RULES, check_devices, new_state
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from lwopt_backend.integrations.deepspeed import pipeline as deepspeed_pipeline
from lwopt_backend.integrations.deepspeed.refusals import reasons_to_refuse
from lwopt_backend.plan import Replicas, TrainedParam, machine_of
from lwopt_backend.routing.grouping import Grouping, WatchedModel, group_parameters
from lwopt_backend.routing.routing import Route, full_shape
from lwopt_backend.runtime.agreement import agree_in_all, plan_digest
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives
from lwopt_backend.runtime.state import CHECKPOINT_KEY, OwnerStates, StatePiece, brought_here
from lwopt_backend.storage.flat import (
    GroupPlan,
    GroupStepper,
    HostLayout,
    UnitStepper,
    members_digest,
    plan_group,
    unit_layouts,
)
from lwopt_backend.storage.replicated import gather_whole, new_replicated_stepper, take_part

# What DeepSpeed steps at a time, as planned and as found before the first step.


@dataclass(frozen=True)
class Unit:
    """Parameters that are stepped together. ``group`` is the number of their param group; ``ranks`` share them."""

    group: int
    params: list[Tensor]
    layout: HostLayout
    ranks: Collectives


def units(engine: DeepSpeedEngine, groups: Sequence[Mapping[str, Any]], ranks: Sequence[Collectives]) -> list[Unit]:
    """What DeepSpeed will step at a time, in its order. ``ranks[i]`` share param group i."""
    stage = deepspeed_engine.sharding_stage(engine)
    found = []
    for number, (group, sharers) in enumerate(zip(groups, ranks)):
        params = group["params"]
        layouts = unit_layouts(
            [_numel(param) for param in params],
            sharers.world_size,
            stage,
            is_matrix=group["rule"] in MATRIX_RULES,
            sub_group_size=engine.zero_sub_group_size(),
            param_alignment=deepspeed_engine.param_alignment(engine, params),
        )
        found += [Unit(number, params[part], layout, sharers) for part, layout in layouts]
    return found


def _numel(param: Tensor) -> int:
    return math.prod(full_shape(param))


def flat_tensors(engine: DeepSpeedEngine, found: Sequence[Unit], groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """This rank's flat tensor of every unit, at stages 1 to 3."""
    if deepspeed_engine.sharding_stage(engine) == 3:
        return deepspeed_engine.sub_group_tensors(found[0].params[0])
    return [groups[unit.group]["params"][0] for unit in found]


def check_as_planned(unit: Unit, number: int, plan: GroupPlan, flat: Tensor, stage: int) -> None:
    """Raises RuntimeError if DeepSpeed stores this rank's pieces elsewhere than planned."""
    rank = unit.ranks.rank
    assert not isinstance(plan.layout, Replicas)
    if flat.numel() != plan.layout.partition_numel:
        raise RuntimeError(f"{plan.rule}: planned {plan.layout.partition_numel} elements a rank, found {flat.numel()}")
    for index, (trained, param) in enumerate(zip(plan.params, unit.params)):
        planned = plan.layout.fragment(index, rank)
        if stage == 3:
            found = deepspeed_engine.stored_part(param, rank, number)
        else:
            found = deepspeed_engine.stored_fragment(param, rank)
        if planned != found:
            raise RuntimeError(f"parameter {trained.name!r}: planned {planned}, but DeepSpeed stores {found}")


class ZeROStore:
    """A ``StateStore`` of this rank's pieces in ZeRO's storage. ``stepped`` has, for each unit of the binding, its
    stepper and its state."""

    def __init__(
        self,
        binding: Binding,
        groups: Sequence[dict[str, Any]],
        stepped: Sequence[tuple[UnitStepper, Mapping[str, Tensor]]],
    ) -> None:
        self._binding = binding
        self._stepped = stepped
        self.ranks: Sequence[Collectives] = binding.ranks
        self.groups = groups
        self.units: Sequence[Sequence[TrainedParam]] = [plan.params for plan in binding.plans]
        self.params: Sequence[TrainedParam] = [param for unit in self.units for param in unit]
        routes = () if binding.stage is None else binding.stage.all_routes
        self.elsewhere: Collection[str] = {route.name for route in routes}
        experts = any(groups[unit.group].get("moe") for unit in binding.units)
        self.ambiguous = "ranks have different experts under the same names" if experts else None

    def pieces(self) -> list[StatePiece]:
        found: list[StatePiece] = []
        first = 0
        for unit, (stepper, state) in zip(self._binding.units, self._stepped):
            found += stepper.pieces(state, first)
            first += len(unit.params)
        return found

    def take_owner_states(self, states: OwnerStates) -> None:
        """Replace the owner state of this rank's matrices; those missing in ``states`` start fresh."""
        for plan, (stepper, _) in zip(self._binding.plans, self._stepped):
            if stepper.matrices is None:
                continue
            places = [(param.name, place) for param in plan.params for place in range(len(param.blocks))]
            kept = {atom: states.get(places[atom][0], {}).get(places[atom][1]) for atom in stepper.matrices.owned}
            stepper.matrices.owner_state.take(kept)

    def publish(self) -> None:
        """Copy master weights into the module's parameters. Called on all ranks."""
        engine = self._binding.engine
        stage, wrapper = deepspeed_engine.sharding_stage(engine), engine.optimizer
        if stage in (1, 2):
            wrapper.update_lp_params()
        elif stage == 3:
            wrapper.checkpoint_event_prologue()
            for number in range(len(wrapper.fp32_partitioned_groups_flat)):
                wrapper._reassign_or_swap_out_partitioned_parameters(number)
            wrapper.checkpoint_event_epilogue()


# The optimizer's state in DeepSpeed's checkpoints: checks before loading, and state of stage 0, which is saved whole.

Groups = Sequence[Mapping[str, Any]]
States = Mapping[int, Mapping[str, Any]]  # by the position of the tensor in all param groups


def check_groups(saved: Groups, groups: Groups) -> None:
    """Raises ValueError if ``saved`` param groups have other rules or other members than ``groups``."""
    if of_another_optimizer(saved):
        raise ValueError(
            "the state was written by another optimizer: its param groups have no 'rule'; begin without it"
        )
    theirs, ours = ([group.get("rule", "unknown") for group in some] for some in (saved, groups))
    if theirs != ours:
        raise ValueError(f"the checkpoint's param groups follow the rules {theirs}, this optimizer's follow {ours}")
    for number, (their, our) in enumerate(zip(saved, groups)):
        if their.get("members") != our.get("members"):
            raise ValueError(
                f"param group {number} ({our['rule']}) holds other parameters than in the checkpoint; load it with "
                "the model, the 'include', 'exclude' and 'atoms' it was saved with"
            )


def check_partitions(saved: Groups, state: States, groups: Groups) -> None:
    """Raises ValueError if the saved flat tensors have other numbers or sizes than those in ``groups``."""
    for number, (their, our) in enumerate(zip(saved, groups)):
        counts = len(their["params"]), len(our["params"])
        if counts[0] != counts[1]:
            raise ValueError(
                f"param group {number}: saved in {counts[0]} flat tensors, found {counts[1]}; load with the "
                "zero_optimization.sub_group_size it was saved with"
            )
    numbered = [(number, tensor) for number, group in enumerate(groups) for tensor in group["params"]]
    for position, (number, flat) in enumerate(numbered):
        for key, value in state.get(position, {}).items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.numel() != flat.numel():
                raise ValueError(
                    f"param group {number}: the checkpoint's {key} has {value.numel()} elements for this rank, "
                    f"which stores {flat.numel()}"
                )


def save_whole(binding: Binding, states: Mapping[Tensor, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Every parameter's whole state at stage 0, on the first rank; nothing on the others. Called on all ranks."""
    saved: dict[int, dict[str, Any]] = {}
    first = 0
    for unit, plan in zip(binding.units, binding.plans):
        whole = gather_whole(plan, states.get(unit.params[0], {}), unit.ranks)
        saved.update((first + i, state) for i, state in enumerate(whole or []) if state)
        first += len(unit.params)
    return saved


def owner_states(steppers: Iterable[UnitStepper]) -> dict[str, dict[str, Any]]:
    """The owner state of this rank's matrices, by matrix name."""
    return {k: v for s in steppers if s.matrices for k, v in s.matrices.owner_state.by_name().items()}


def save_matrices(binding: Binding, held: Mapping[str, dict[str, Any]] | None) -> dict[str, Any]:
    """By parameter, its matrices' names and which elements they have, in order; and owner state by matrix name, if the
    rules keep any: this rank's, ``held``, or if parameters are replicated that of all ranks, on the first. Called on
    all ranks."""
    matrices = {
        param.name: [(block.of(param.name), str(block)) for block in param.blocks]
        for plan in binding.plans
        for param in plan.params
        if param.blocks
    }
    if held is None:
        return {MATRICES: matrices}
    return {MATRICES: matrices, CHECKPOINT_KEY: _gather_named(binding, held) if binding.replicated else held}


def _gather_named(binding: Binding, held: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """All ranks' states by name, on the first rank of every group. Called on all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for ranks in binding.ranks:
        for part in ranks.gather_objects_to_first(held) or []:
            found.update(part)
    return found


def take_owner_states(binding: Binding, steppers: Sequence[UnitStepper], saved: Mapping[str, dict[str, Any]]) -> None:
    """Send what ``owner_states`` returned, on any ranks, to the current owners. Called on all ranks."""
    for unit, plan, stepper in zip(binding.units, binding.plans, steppers):
        if stepper.matrices is not None and plan.matrices is not None:
            names = {atom: plan.matrices.atoms[atom].name for atom in stepper.matrices.owned}
            found = brought_here(saved, list(names.values()), unit.ranks)
            stepper.matrices.owner_state.take({atom: found.get(name) for atom, name in names.items()})


def load_whole(binding: Binding, saved: States) -> dict[Tensor, dict[str, Any]]:
    """This rank's part of the states that ``save_whole`` returned on the first rank."""
    states: dict[Tensor, dict[str, Any]] = {}
    first = 0
    for unit, plan in zip(binding.units, binding.plans):
        of_unit = [saved.get(first + index, {}) for index in range(len(unit.params))]
        _check_shapes(plan.params, of_unit)
        if of_unit[0]:
            states[unit.params[0]] = take_part(plan, of_unit, unit.ranks.rank, binding.engine.device)
        first += len(unit.params)
    return states


def _check_shapes(params: Sequence[TrainedParam], states: Sequence[Mapping[str, Any]]) -> None:
    for param, state in zip(params, states):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.numel() != param.numel:
                raise ValueError(
                    f"parameter {param.name!r} has shape {param.shape}, the checkpoint's {key} {tuple(value.shape)}"
                )


# ``deepspeed.utils.safe_get_full_optimizer_state`` and related functions: a missing key raises on all ranks.
#
# At stages 1 and 2, only ranks that store a piece of the parameter look the key up; they raise, while the others wait
# for them in an all-reduce. DeepSpeed also loses the states' places when a checkpoint is loaded. All ranks know a
# parameter's keys from its rule, so they check here, before DeepSpeed is called.

OF_PARAMETERS = ("get_full_hp_param", "set_full_hp_param")  # stages 1 and 2 set these methods on every parameter
OF_OPTIMIZER = (*OF_PARAMETERS, "get_local_fp32_param", "set_local_hp_param")  # stage 3's optimizer has them all
RELINKS = ("_link_all_hp_params", "_lazy_init_hp_params_optimizer_state")  # methods of the optimizers of stages 1 and 2

Check = Callable[[Tensor, "str | None"], None]


@dataclass(frozen=True)
class Kept:
    """The optimizer state of one parameter: the keys of the tensors of its size."""

    param: Tensor
    name: str
    rule: str
    keys: tuple[str, ...]


def guard_state_keys(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, grouping: Grouping) -> None:
    """Make every access to an optimizer state of ``engine`` check the key first; ``optimizer`` is ours, not yet
    wrapped.

    Called once for an engine, on all ranks, while DeepSpeed builds it. Then a key that a parameter's rule does not keep
    raises ValueError on every rank that asks; a state before the first step raises RuntimeError. At stage 0, DeepSpeed
    still returns None for every key.
    """
    kept = kept_states(grouping)
    configure = engine._configure_lr_scheduler  # the first method called after the optimizer was wrapped

    @functools.wraps(configure)
    def configure_lr_scheduler() -> None:
        _guard(engine.optimizer, optimizer, kept)
        configure()

    engine._configure_lr_scheduler = configure_lr_scheduler


def kept_states(grouping: Grouping) -> dict[int, Kept]:
    """The state that the optimizer keeps, by the parameter's id."""
    kept = {}
    for group in grouping.groups:
        state = new_state(torch.empty(1, device="meta"), group)
        keys = tuple(key for key, tensor in state.items() if tensor.ndim > 0)
        for param in group["params"]:
            kept[id(param)] = Kept(param, grouping.names[id(param)], group["rule"], keys)
    return kept


def check_key(found: Kept, key: str | None) -> None:
    """Raises ValueError if a parameter has no state ``key``; None means the weights."""
    if key is not None and key not in found.keys:
        raise ValueError(
            f"parameter {found.name!r} has no optimizer state {key!r}; its rule, {found.rule!r}, keeps "
            f"{', '.join(map(repr, found.keys))}"
        )


def _guard(wrapper: Any, optimizer: torch.optim.Optimizer, kept: dict[int, Kept]) -> None:
    def check(param: Tensor, key: str | None) -> None:
        if key is None or id(param) not in kept:  # the weights, or a frozen parameter
            return
        found = kept[id(param)]
        check_key(found, key)
        if not any(optimizer.state.values()):
            raise RuntimeError(f"parameter {found.name!r} has no {key!r} yet; the first step makes it")

    if all(hasattr(wrapper, name) for name in RELINKS):
        _guard_parameters(wrapper, [state.param for state in kept.values()], check)
    elif all(hasattr(wrapper, name) for name in OF_OPTIMIZER):
        for name in OF_OPTIMIZER:
            setattr(wrapper, name, _checked(getattr(wrapper, name), check))


def _guard_parameters(wrapper: Any, params: list[Tensor], check: Check) -> None:
    """For stages 1 and 2, and BF16_Optimizer, which set new methods on the parameters whenever they link them."""
    link = wrapper._link_all_hp_params

    def check_and_link_state(param: Tensor, key: str | None) -> None:
        check(param, key)
        if key is not None:
            wrapper._lazy_init_hp_params_optimizer_state()

    def put_guards() -> None:
        for param in params:
            for name in OF_PARAMETERS:
                setattr(param, name, _checked(getattr(param, name), check_and_link_state, param))

    def link_all() -> None:
        link()
        wrapper._hp_optimizer_states_linked = False  # or, after a load, DeepSpeed never links the states again
        put_guards()

    wrapper._link_all_hp_params = link_all
    put_guards()


def _checked(method: Callable[..., Any], check: Check, param: Tensor | None = None) -> Callable[..., Any]:
    """``method``, called after ``check`` of its key and its parameter, which is ``param`` or an argument."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        check(given["param"] if param is None else param, given.get("optim_state_key"))
        return method(*args, **kwargs)

    return checked


# Decisions made when an engine takes the optimizer: routing, groups, what is stepped at a time, and its plans.


@dataclass(frozen=True)
class Binding:
    """An optimizer's binding to the engine that has taken it. ``plans[i]`` is the plan of ``units[i]``."""

    name: str  # of the optimizer's type, for errors
    engine: DeepSpeedEngine
    grouping: Grouping
    ranks: list[Collectives]  # the groups of ranks that share parameters with this one
    units: list[Unit]
    plans: list[GroupPlan]
    stage: deepspeed_pipeline.Stage | None  # of a pipeline
    watched: WatchedModel

    @property
    def replicated(self) -> bool:
        """Whether every rank stores all parameters whole."""
        return deepspeed_engine.sharding_stage(self.engine) == 0

    @property
    def plan_digest(self) -> str:
        """The digest of the plan of this rank's parameters."""
        return plan_digest(line for plan in self.plans for line in plan.plan_lines())

    def groups(self) -> list[dict[str, Any]]:
        """The param groups, each marked with a digest of its members for checkpoints."""
        return [{**group, "members": self._members(number)} for number, group in enumerate(self.grouping.groups)]

    def _members(self, group: int) -> str:
        return members_digest([plan for unit, plan in zip(self.units, self.plans) if unit.group == group])

    def announce(self, config: ZeROConfig, notes: Sequence[str]) -> None:
        """On the first rank, print routing and plans; warn of ``notes`` and of clipping by DeepSpeed's default."""
        if self.engine.global_rank == 0:
            if config.report:
                report.show(*self.announcement(), self.plan_digest)
            deepspeed_engine.warn(self.engine, notes)

    def announcement(self) -> tuple[list[Route], dict[str, list[GroupPlan]], list[dict[str, Any]]]:
        """What ``report.show`` prints: the whole model's routes, the plans by who shares them, and the param groups."""
        plans: dict[str, list[GroupPlan]] = {}
        for ranks in self.ranks:
            shared = [plan for unit, plan in zip(self.units, self.plans) if unit.ranks is ranks]
            experts = any(self.grouping.groups[unit.group].get("moe") for unit in self.units if unit.ranks is ranks)
            whose = "" if self.stage is None else self.stage.note
            if experts:
                whose = f"Experts that {ranks.world_size} ranks share (of each such set, this is the first):"
            if shared:
                plans.setdefault(whose, []).extend(shared)
        own = {route.name: route for route in self.grouping.routes}
        everyone = self.grouping.routes if self.stage is None else self.stage.all_routes
        return [own.get(route.name, route) for route in everyone], plans, self.grouping.groups

    def stepper(self, unit: Unit, plan: GroupPlan, tensor: Tensor, config: ZeROConfig) -> UnitStepper:
        """The stepper of a unit; DeepSpeed steps ``tensor``."""
        if self.replicated:
            return new_replicated_stepper(plan, unit.params, unit.ranks, config, self.engine.device)
        return GroupStepper(plan, tensor, unit.ranks, config, self.engine.device)

    def warn_of_changes(self) -> None:
        """Warn once, on the first of the ranks that share parameters, of parameters that DeepSpeed does not train."""
        news = self.watched.news() if self.ranks[0].rank == 0 else None
        if news is not None:
            logger.warning(f"{self.name}: {news}")

    def stored(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Per unit, the tensor that DeepSpeed steps; of replicated parameters the first. Called on all ranks.

        Raises RuntimeError, on every rank, if DeepSpeed stores parameters elsewhere than planned. ``groups`` are the
        optimizer's param groups.
        """
        if self.replicated:
            return [unit.params[0] for unit in self.units]

        def check() -> tuple[list[Tensor], list[list[str]]]:
            stage = deepspeed_engine.sharding_stage(self.engine)
            flats = flat_tensors(self.engine, self.units, groups)
            for number, (unit, plan, flat) in enumerate(zip(self.units, self.plans, flats, strict=True)):
                check_as_planned(unit, number, plan, flat, stage)
            return flats, [[] for _ in self.ranks]

        return agree_in_all(self.ranks, self.name, check)


def bind(name: str, engine: DeepSpeedEngine, given: list[dict[str, Any]], rules: Rules, config: ZeROConfig) -> Binding:
    """Route, plan and compare ranks for the optimizer of type ``name``. Called on all ranks; raises on all of them what
    is not supported."""
    ranks = [TorchCollectives(group) for group in deepspeed_engine.process_groups(engine)]
    stage = deepspeed_pipeline.meet(engine, given, rules, config)
    return agree_in_all(ranks, name, lambda: _decide(name, engine, given, rules, config, ranks, stage))


def _decide(
    name: str,
    engine: DeepSpeedEngine,
    given: list[dict[str, Any]],
    rules: Rules,
    config: ZeROConfig,
    ranks: list[TorchCollectives],
    stage: deepspeed_pipeline.Stage | None,
) -> tuple[Binding, list[list[str]]]:
    reasons = reasons_to_refuse(engine, given)
    if reasons:
        raise ValueError("\n  ".join([f"{name} cannot train with this configuration:", *reasons]))
    if stage is None:
        grouping = group_parameters(engine.module, given, rules, config, stacks=True)
    else:
        grouping = group_parameters(engine.module, given, rules, config, routes=stage.routes, elsewhere=stage.elsewhere)
        deepspeed_pipeline.check_tied(engine, stage)
        deepspeed_pipeline.check_groups(engine, stage)
    check_devices(grouping.groups, config, torch.device("cpu") if config.ns_device == "cpu" else engine.device)
    machine = machine_of(engine.device.type)
    by_group = {sharers.group: sharers for sharers in ranks}
    of_groups = [by_group[deepspeed_engine.group_ranks(engine, group)] for group in grouping.groups]
    found = units(engine, grouping.groups, of_groups)
    plans = []
    for unit in found:
        members = [grouping.member(grouping.names[id(param)], param, unit.group) for param in unit.params]
        plans.append(plan_group(grouping.groups[unit.group], members, unit.layout, config, machine))
    lines = [settings_lines(rules, config) for _ in ranks]
    for sharers, of_sharers in zip(ranks, lines):
        of_sharers += [line for unit, plan in zip(found, plans) if unit.ranks is sharers for line in plan.lines()]
    trained = [(grouping.names[id(param)], param) for group in grouping.groups for param in group["params"]]
    watched = WatchedModel(engine.module, trained, advice="call deepspeed.initialize after the last such change")
    return Binding(name, engine, grouping, list(ranks), found, plans, stage, watched), lines
