"""ZeRO's storage: the units that DeepSpeed steps, their plans and a check of the storage; state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from lwopt_backend.checkpoint.deepspeed.files import CUTS, EXPERT, MATRICES, NAMES, renumbered
from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.engines import report
from lwopt_backend.engines.base import machine_for
from lwopt_backend.engines.zero.plan import (
    GroupPlan,
    GroupStepper,
    UnitStepper,
    members_digest,
    plan_group,
    unit_layouts,
)
from lwopt_backend.engines.zero.replicated import ElementwiseReplicas, MatrixReplicas, gather_whole, take_part
from lwopt_backend.groups import Groups
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Grouping, as_saved, group_parameters
from lwopt_backend.groups.param_groups import ShownRates, check_saved_groups, settings_lines
from lwopt_backend.groups.registry import MATRIX_RULES, check_devices, quantized_keys, stored_state
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from lwopt_backend.integrations.deepspeed import pipeline
from lwopt_backend.integrations.deepspeed.pipeline import PipelineStage
from lwopt_backend.integrations.deepspeed.refusals import reasons_to_refuse
from lwopt_backend.plan import Replicas, TensorShards
from lwopt_backend.routing.routing import Route, cut_of, named_parameters
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.agreement import agree_in_all, plan_digest
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives
from lwopt_backend.runtime.owner_state import bring
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.state import (
    CHECKPOINT_KEY,
    OwnerState,
    OwnerStates,
    StatePiece,
    StateStore,
    check_fits,
    keeps_state,
)


@dataclass(frozen=True)
class Unit:
    """Parameters that DeepSpeed steps together, of param group number ``group``, and their plan. ``ranks`` share them.

    ``first`` is the number of the first of them among the parameters of all units.
    """

    group: int
    first: int
    params: list[Tensor]
    plan: GroupPlan
    ranks: Collectives

    def numbers(self, data_parallel: Collectives) -> Sequence[int]:
        """The numbers among ``ranks`` of the data-parallel ranks ``data_parallel``, which store the same shards."""
        layout = None if self.plan.matrices is None else self.plan.matrices.layout
        return layout.beside(self.ranks.rank) if isinstance(layout, TensorShards) else range(data_parallel.world_size)

    def check_stored(self, flat: Tensor, sub_group: int | None) -> None:
        """Raises RuntimeError if DeepSpeed stores this rank's pieces in other places than planned.

        ``flat`` is the tensor that it steps; ``sub_group`` is that tensor's number at stage 3.
        """
        rank, layout = self.plan.place(self.ranks.rank), self.plan.layout
        assert not isinstance(layout, Replicas)
        if flat.numel() != (planned := layout.partition_numel):
            raise RuntimeError(f"{self.plan.rule}: expected {planned} planned elements, found {flat.numel()}")
        for index, (trained, param) in enumerate(zip(self.plan.params, self.params)):
            expected, found = layout.fragment(index, rank), deepspeed_engine.stored_fragment(param, rank, sub_group)
            if expected != found:
                raise RuntimeError(f"parameter {trained.name!r}: expected {expected}, but DeepSpeed stores {found}")


Stepper = UnitStepper[Any]
Stepped = tuple[Stepper, Mapping[str, Tensor]]


class ZeROStore(StateStore):
    """This rank's pieces in ZeRO's storage. ``stepped`` has, for each unit of the binding, its stepper and its state.
    Names are those in the whole model: experts are numbered through all ranks."""

    def __init__(self, binding: Binding, groups: Sequence[dict[str, Any]], stepped: Sequence[Stepped]) -> None:
        self._binding, self._stepped = binding, stepped
        first = deepspeed_engine.first_experts(binding.engine)
        units = [[replace(p, name=renumbered(p.name, first)) for p in unit.plan.params] for unit in binding.units]
        routes = () if binding.stage is None else binding.stage.all_routes
        elsewhere = {*(route.name for route in routes), *deepspeed_engine.all_experts(binding.engine)}
        super().__init__(binding.ranks, groups, units, elsewhere)

    def pieces(self) -> list[StatePiece]:
        pairs = zip(self._binding.units, self._stepped)
        return [piece for unit, (stepper, state) in pairs for piece in stepper.pieces(state, unit.first)]

    def take_owner_states(self, states: OwnerStates) -> None:
        for params, (stepper, _) in zip(self.units, self._stepped):
            if stepper.matrix_stepper is not None:
                places = [(param.name, place) for param in params for place in range(len(param.blocks))]
                owned = {atom: places[atom] for atom in stepper.matrix_stepper.owned}  # the others are not read
                stepper.matrix_stepper.owner_state.take(
                    {a: states.get(name, {}).get(i) for a, (name, i) in owned.items()}
                )

    def forget_owner_states(self, names: Collection[str]) -> None:
        for params, (stepper, _) in zip(self.units, self._stepped):
            if stepper.matrix_stepper is not None:
                of_atoms = [param.name for param in params for _ in param.blocks]
                stepper.matrix_stepper.owner_state.take({a: None for a, name in enumerate(of_atoms) if name in names})

    def publish(self) -> None:
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

WHAT, DIGEST = "load_checkpoint", "digest of parameters"
ALONE = "load the weights alone, with load_optimizer_states=False"
States = Mapping[int, Mapping[str, Any]]  # by the position of the tensor in all param groups


def check_groups(saved: Groups, groups: Groups, grouping: Grouping | None) -> None:
    """Raises ValueError if ``saved`` param groups have other rules or other members than ``groups``."""
    advice = "load it with the model, the 'include', 'exclude' and 'atoms' it was saved with"
    with as_saved(grouping):
        check_saved_groups(WHAT, groups, saved, lambda group: {DIGEST: group.get("members", "none")}, advice, ALONE)


def check_partitions(saved: Groups, state: States, groups: Groups) -> None:
    """Raises ValueError if the saved flat tensors have other numbers or sizes than those in ``groups``."""
    advice = "load with the zero_optimization.sub_group_size it was saved with"
    sides = ({n: {"number of flat tensors": len(g["params"])} for n, g in enumerate(some)} for some in (groups, saved))
    check_fits(WHAT, *sides, what="param group", advice=advice)
    numbered = [(number, tensor) for number, group in enumerate(groups) for tensor in group["params"]]
    for position, (number, flat) in enumerate(numbered):
        found = _elements(state.get(position, {}))
        here = {number: dict.fromkeys(found, flat.numel())}
        check_fits(WHAT, here, {number: found}, what="param group", advice="load it on the ranks it was saved on")


def _elements(state: Mapping[str, Any]) -> dict[str, int]:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0}
    return {f"number of elements of {key!r}": value.numel() for key, value in tensors.items()}


def save_whole(binding: Binding, states: Mapping[Tensor, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Every parameter's whole state at stage 0, on the first rank; nothing on the others. With experts on every
    rank, because DeepSpeed writes a file for each rank of the largest expert-parallel size. Called on all ranks."""
    experts = binding.engine.has_moe_layers
    saved: dict[int, dict[str, Any]] = {}
    for unit in binding.units:
        data_parallel = binding.ranks[0] if binding.places else unit.ranks
        state = states.get(unit.params[0], {})
        whole = gather_whole(unit.plan, state, data_parallel, unit.numbers(data_parallel), on_all=experts)
        saved.update((unit.first + i, state) for i, state in enumerate(whole or []) if state)
    return saved


def owner_states(steppers: Iterable[Stepper]) -> dict[str, dict[str, Any]]:
    """The owner state of this rank's matrices, by matrix name."""
    return {k: v for s in steppers if s.matrix_stepper for k, v in s.matrix_stepper.owner_state.by_name().items()}


def save_matrices(binding: Binding, held: Mapping[str, dict[str, Any]] | None) -> dict[str, Any]:
    """By parameter, its matrices' names and elements, in order. If the rules keep owner state, also that by matrix
    name: this rank's, ``held``; or if parameters are replicated, on the first rank that of all ranks and the
    parameters' names by param group. Called on all ranks."""
    found: dict[str, Any] = {}
    if binding.replicated:
        numbers = range(len(binding.grouping.groups))
        found[NAMES] = [
            [p.name for unit in binding.units if unit.group == i for p in unit.plan.params] for i in numbers
        ]
    found[MATRICES] = {
        param.name: [(b.of(param.name), elements) for b, elements in zip(param.blocks, param.matrices)]
        for unit in binding.units
        for param in unit.plan.params
        if param.blocks
    }
    if binding.places:
        cuts = {name: cut_of(param) for name, param in named_parameters(binding.engine.module)}
        found[CUTS] = {name: (cut.dim, cut.parts) for name, cut in cuts.items() if cut is not None}
    if held is None:
        return found
    if binding.replicated:
        of_units = (unit.ranks for unit in binding.units)  # without those of other stages
        data_parallel = dict.fromkeys(binding.ranks if binding.places else of_units)
        parts = [part for ranks in data_parallel for part in ranks.gather_objects_to_first(held) or []]
        held = {name: state for part in parts for name, state in part.items()}
    return {**found, CHECKPOINT_KEY: held}


def take_owner_states(
    binding: Binding, steppers: Sequence[Stepper], saved: Mapping[str, dict[str, Any]], rules: Mapping[int, MatrixRule]
) -> None:
    """Send the results of ``owner_states`` of all ranks to the current owners. ``rules`` are by param group."""
    owned: list[dict[str, tuple[OwnerState, int]]] = [{} for _ in binding.ranks]
    for unit, stepper in zip(binding.units, steppers):
        planned, matrices = unit.plan.matrices, stepper.matrix_stepper
        if planned is not None and matrices is not None and keeps_state(rules[unit.group]):
            names = {planned.atoms[atom].name: (matrices.owner_state, atom) for atom in matrices.owned}
            owned[binding.ranks.index(unit.ranks)].update(names)
    bring(f"{binding.name}: {WHAT}", binding.ranks, owned, saved)


def load_whole(binding: Binding, saved: States) -> dict[Tensor, dict[str, Any]]:
    """This rank's part of the states that ``save_whole`` returned on the first rank."""
    states: dict[Tensor, dict[str, Any]] = {}
    for unit in binding.units:
        of_unit = [saved.get(unit.first + index, {}) for index in range(len(unit.params))]
        for param, state in zip(unit.plan.params, of_unit):
            found = _elements(state)
            check_fits(WHAT, {param.name: dict.fromkeys(found, math.prod(param.local_shape))}, {param.name: found})
        if of_unit[0]:
            states[unit.params[0]] = take_part(unit.plan, of_unit, unit.ranks.rank, binding.engine.device)
    return states


# ``deepspeed.utils.safe_get_full_optimizer_state`` and related functions: a missing key raises on all ranks.
#
# At stages 1 and 2, only ranks that store a piece of the parameter look the key up. They raise while the others wait in
# an all-reduce. DeepSpeed also loses the states' places when a checkpoint is loaded. All ranks know a parameter's keys
# from its rule, so they check here, before DeepSpeed's call. At stage 3 every rank looks them up.

OF_PARAMETERS = ("get_full_hp_param", "set_full_hp_param")  # DeepSpeed sets them whenever it links parameters


class StateKeys:
    """The keys of every parameter's state that are tensors of the parameter's size, by its rule."""

    def __init__(self, grouping: Grouping) -> None:
        self._names, self._keys = grouping.names, dict[int, list[str]]()
        self._quantized = dict[int, tuple[str, ...]]()
        for group in grouping.groups:
            state = stored_state(torch.empty(1, device="meta"), group)
            keys = [key for key, tensor in state.items() if tensor.ndim > 0]
            self._keys.update((id(param), keys) for param in group["params"])
            self._quantized.update((id(param), quantized_keys(group)) for param in group["params"])

    def check(self, param: Tensor, key: str) -> None:
        """Raises ValueError if the parameter has no state ``key``, or has it in 8 bits."""
        if key in self._quantized[id(param)]:
            raise ValueError(
                f"parameter {self._names[id(param)]!r}: expected a key of state that is kept in floating point, found "
                f"{key!r}, kept in 8 bits by momentum_dtype; a checkpoint has it in fp32"
            )
        if key not in self._keys[id(param)]:
            kept = ", ".join(map(repr, self._keys[id(param)]))
            raise ValueError(f"parameter {self._names[id(param)]!r}: expected a key in {kept}, found {key!r}")


def guard_state_keys(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, grouping: Grouping) -> None:
    """Check every state key in calls on the parameters of ``engine`` at stages 1 and 2.

    Called on all ranks, while DeepSpeed builds the engine; ``optimizer`` is the one that DeepSpeed wraps next. Then a
    key that a parameter's rule does not keep raises ValueError, and a state before the first step RuntimeError.
    """
    known = StateKeys(grouping)

    def guarded(wrapper: Any, param: Tensor, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            for key in (arg for arg in args if isinstance(arg, str)):  # none if the weights are meant
                known.check(param, key)
                if not any(optimizer.state.values()):
                    name = grouping.names[id(param)]
                    raise RuntimeError(f"parameter {name!r} has no {key!r} before the first step; take a step")
                wrapper._lazy_init_hp_params_optimizer_state()
            return method(*args)

        return call

    def guard(wrapper: Any) -> None:
        if not hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):  # of stage 3, or without a wrapper
            return
        link = wrapper._link_all_hp_params

        def link_all() -> None:
            link()
            wrapper._hp_optimizer_states_linked = False  # or, after a load, DeepSpeed never links the states again
            for param in (param for group in grouping.groups for param in group["params"]):
                for name in OF_PARAMETERS:
                    setattr(param, name, guarded(wrapper, param, getattr(param, name)))

        wrapper._link_all_hp_params = link_all
        link_all()

    deepspeed_engine.when_wrapped(engine, guard)


# Decisions made when an engine takes the optimizer: routing, groups, units and their plans.


@dataclass(frozen=True)
class Binding:
    """An optimizer's binding to the engine that has taken it."""

    name: str  # the optimizer's type, for errors
    engine: DeepSpeedEngine
    grouping: Grouping
    ranks: list[Collectives]  # the groups of ranks that share parameters with this one
    units: list[Unit]
    stage: PipelineStage | None  # of a pipeline
    places: Sequence[tuple[int, int]]  # of tensor parallelism, as in ``TensorShards``

    @property
    def replicated(self) -> bool:
        """Whether every rank stores all parameters whole."""
        return deepspeed_engine.sharding_stage(self.engine) == 0

    @property
    def plans(self) -> list[GroupPlan]:
        return [unit.plan for unit in self.units]

    @property
    def plan_digest(self) -> str:
        """The digest of the plan of this rank's parameters."""
        return plan_digest(line for plan in self.plans for line in plan.plan_lines())

    def groups(self) -> list[dict[str, Any]]:
        """The param groups, each marked with a digest of its members for checkpoints."""
        plans = [[unit.plan for unit in self.units if unit.group == i] for i in range(len(self.grouping.groups))]
        pairs = zip(self.grouping.groups, plans)
        return [{**group, "members": members_digest(of_group)} for group, of_group in pairs]

    def announce(self, config: ZeROConfig) -> ShownRates | None:
        """On the first rank, print routing and plans; warn of small rates and of clipping by DeepSpeed's default.
        Returns the rates that were printed."""
        rates = None
        if self.engine.global_rank == 0:
            if config.report:
                routes, plans = self.announcement()
                trained = [param for plan in self.plans for param in plan.params]
                device = _rule_device(self.engine, config)
                shown = report.described(plans)
                rates = report.show(routes, self.grouping.groups, shown, self.plan_digest, trained, device)
            deepspeed_engine.warn(self.engine, self.grouping.groups)
            deepspeed_engine.warn_of_rounded_sums(self.engine)
        return rates

    def announcement(self) -> tuple[list[Route], dict[str, list[GroupPlan]]]:
        """The whole model's routes, and plans by their ranks."""
        plans: dict[str, list[GroupPlan]] = {}
        for ranks in self.ranks:
            shared = [unit for unit in self.units if unit.ranks is ranks]
            whose = "" if self.stage is None else self.stage.note
            if any(self.grouping.groups[unit.group].get("moe") for unit in shared):
                whose = f"Experts that {ranks.world_size} ranks share (of each such set, this is the first):"
            if shared:
                plans.setdefault(whose, []).extend(unit.plan for unit in shared)
        own = {route.name: route for route in self.grouping.routes}
        everyone = self.grouping.routes if self.stage is None else self.stage.all_routes
        return [own.get(route.name, route) for route in everyone], plans

    def stepper(self, unit: Unit, tensor: Tensor, config: ZeROConfig) -> Stepper:
        """The stepper of a unit; DeepSpeed steps ``tensor``."""
        shard = self.places[self.ranks[-1].rank][0] if self.places else 0
        more = unit.ranks, config, self.engine.device, shard
        if self.replicated:
            replicas = ElementwiseReplicas if unit.plan.matrices is None else MatrixReplicas
            return replicas(unit.plan, unit.params, *more)
        return GroupStepper(unit.plan, tensor, *more)

    def stored(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Per unit, the tensor that DeepSpeed steps; of replicated parameters the first. Called on all ranks.

        Raises RuntimeError, on every rank, if DeepSpeed's storage is not as planned. ``groups`` are the
        optimizer's param groups.
        """
        if self.replicated:
            return [unit.params[0] for unit in self.units]

        def check() -> tuple[list[Tensor], list[list[str]]]:
            in_sub_groups = deepspeed_engine.sharding_stage(self.engine) == 3
            if in_sub_groups:
                param: Any = self.units[0].params[0]
                flats = param._z3_optimizer.fp32_partitioned_groups_flat
            else:
                flats = [groups[unit.group]["params"][0] for unit in self.units]
            for number, (unit, flat) in enumerate(zip(self.units, flats, strict=True)):
                unit.check_stored(flat, number if in_sub_groups else None)
            return flats, [[] for _ in self.ranks]

        return agree_in_all(self.ranks, self.name, check)


class Arrivals:
    """Which trained parameters have had a gradient since the start, and the report on the others, if this rank
    ``speaks``.

    DeepSpeed makes zeros of a missing gradient before the step, so a hook on every parameter notes the first one. Ranks
    exchange the notes with the options that they compare. Experts have their names in the whole model.
    """

    def __init__(self, binding: Binding, speaks: bool) -> None:
        first = deepspeed_engine.first_experts(binding.engine)
        trained = {id(param): param for unit in binding.units for param in unit.params}
        of_model = ((renumbered(name, first), trained.get(number)) for number, name in binding.grouping.names.items())
        params = {name: param for name, param in of_model if param is not None}
        alike = {EXPERT.sub(r"\1\3", name) for name in params if EXPERT.fullmatch(name)}
        experts = {n for n in deepspeed_engine.all_experts(binding.engine) if EXPERT.sub(r"\1\3", n) in alike}
        self._names = [*(name for name in params if name not in experts), *sorted(experts)]
        self._had = set[str]()
        self._handles = {
            name: param.register_post_accumulate_grad_hook(lambda _, name=name: self._had.add(name))
            for name, param in params.items()
        }
        names = dict(enumerate(self._names)) if speaks else {}
        self._without = report.MissingGradients(names, binding.engine.global_rank)

    def here(self, steps: int) -> list[bool]:
        """Whether each has had one on this rank; empty if no report is due in step number ``steps``."""
        if not self._without.is_due(steps):
            return []
        for name in self._had.intersection(self._handles):
            self._handles.pop(name).remove()
        return [name in self._had for name in self._names]

    def report(self, presence: Presence, steps: int) -> None:
        """Report what all ranks have missed, if it is due."""
        if self._without.is_due(steps):
            self._without.stepped(presence, steps)
            if not self._without.is_due(math.inf):
                self.remove()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}


def bind(name: str, engine: DeepSpeedEngine, given: list[dict[str, Any]], rules: Rules, config: ZeROConfig) -> Binding:
    """Route, plan and compare ranks for the optimizer of type ``name``. Called on all ranks, which raise for
    unsupported settings."""
    ranks = [TorchCollectives(group) for group in deepspeed_engine.process_groups(engine)]
    stage = pipeline.meet(engine, given, rules, config)
    cut = deepspeed_engine.tensor_ranks(engine) > 1
    places, unclear = deepspeed_engine.mark_cuts(engine, ranks[-1]) if cut else ([], [])

    def decide() -> tuple[Binding, list[list[str]]]:
        if reasons := [*reasons_to_refuse(engine, given, config), *unclear]:
            raise ValueError("\n  ".join([f"{name} does not support this configuration; change:", *reasons]))
        model = engine.module
        if stage is None:
            grouping = group_parameters(model, given, rules, config)
        else:
            grouping = group_parameters(model, given, rules, config, routes=stage.routes, elsewhere=stage.elsewhere)
            pipeline.check(engine, stage)
        for of_model, param in named_parameters(model) if cut else ():
            deepspeed_engine.note_parts(param, grouping.parts(of_model, param))
        device = _rule_device(engine, config)
        ways = check_devices(grouping.groups, config, device, grouping.smallest_matrix)
        units = _units(engine, grouping, config, ranks, places)
        lines = [[*settings_lines(rules, config), *grouping.followed, *ways] for _ in ranks]
        for data_parallel, of_group in zip(ranks, lines):
            of_group += [line for unit in units if unit.ranks is data_parallel for line in unit.plan.lines()]
        return Binding(name, engine, grouping, list(ranks), units, stage, places), lines

    return agree_in_all(ranks, name, decide)


def _rule_device(engine: DeepSpeedEngine, config: ZeROConfig) -> torch.device:
    return torch.device("cpu") if config.ns_device == "cpu" else engine.device


def _units(
    engine: DeepSpeedEngine,
    grouping: Grouping,
    config: ZeROConfig,
    ranks: Sequence[TorchCollectives],
    places: Sequence[tuple[int, int]],
) -> list[Unit]:
    """DeepSpeed's successive steps, in its order."""
    by_group = {data_parallel.group: data_parallel for data_parallel in ranks}
    machine = machine_for(engine.device)
    found: list[Unit] = []
    earlier: dict[Collectives, Sequence[int]] = {}  # each rank's work in the units so far, by who shares them
    for number, group in enumerate(grouping.groups):
        experts, params = group.get("moe"), group["params"]
        of_group = engine.expert_data_parallel_group[group["name"]] if experts else engine.seq_data_parallel_group
        is_matrix = group["rule"] in MATRIX_RULES
        every = [grouping.member(grouping.names[id(param)], param, number) for param in params]
        layouts = unit_layouts(
            [math.prod(member.local_shape) for member in every],
            by_group[of_group].world_size,
            deepspeed_engine.sharding_stage(engine),
            is_matrix=is_matrix,
            sub_group_size=engine.zero_sub_group_size(),
            param_alignment=deepspeed_engine.param_alignment(engine, params),
        )
        data_parallel = ranks[-1] if places and is_matrix else by_group[of_group]
        for part, layout in layouts:
            plan = plan_group(group, every[part], layout, config, machine, places, earlier.get(data_parallel, ()))
            earlier[data_parallel] = plan.work(earlier.get(data_parallel, ()))
            first = found[-1].first + len(found[-1].params) if found else 0
            found.append(Unit(number, first, params[part], plan, data_parallel))
    return found
