"""Layer-wise Muon inside DeepSpeed's ZeRO-1/2 (host storage): ``"type": "LayerWiseMuon"`` in ds_config.json.

DeepSpeed keeps what is its own: sharding, master weights, gradient reduction, clipping, loss scaling, checkpoints. Our
optimizer is the inner one. It steps on each rank's flat partition; matrices that are cut by a partition boundary, or
owned elsewhere, travel to their owner and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import logger
from torch import Tensor

from lwopt_backend import report
from lwopt_backend.config import LayerWiseMuonConfig, MuonOptions, parse
from lwopt_backend.group_plan import GroupPlan, Member, members_digest, plan_group
from lwopt_backend.group_stepper import GroupStepper
from lwopt_backend.grouping import Grouping, group_parameters
from lwopt_backend.integrations import deepspeed_cpu, deepspeed_engine
from lwopt_backend.integrations.deepspeed_refusals import reasons_to_refuse
from lwopt_backend.integrations.deepspeed_storage import Unit, check_as_planned, flat_tensors, units
from lwopt_backend.linked_rates import LinkedRates
from lwopt_backend.param_groups import as_groups, split
from lwopt_backend.plan import MACHINES
from lwopt_backend.replicated_stepper import ElementwiseReplicas, MatrixReplicas, new_replicated_stepper
from lwopt_backend.routing import full_shape
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives


def register() -> None:
    """Make ``"type": "LayerWiseMuon"`` known to ds_config.json. Call it once, before ``deepspeed.initialize``.

    On a CPU it also keeps DeepSpeed from compiling an op that training does not use (``deepspeed_cpu``).
    """
    deepspeed_cpu.compile_nothing()
    deepspeed_engine.install(LayerWiseMuon, lambda optimizer, engine: optimizer.bind(engine))


@dataclass(frozen=True)
class Binding:
    """What an optimizer knows once an engine has taken it: what is stepped at a time, and its plan."""

    engine: DeepSpeedEngine
    grouping: Grouping
    ranks: list[Collectives]  # every group of ranks that this one shares parameters with
    units: list[Unit]
    plans: list[GroupPlan]

    def plans_of(self, group: int) -> list[GroupPlan]:
        return [plan for unit, plan in zip(self.units, self.plans) if unit.group == group]


class LayerWiseMuon(torch.optim.Optimizer):
    """Muon for matrices, AdamW for the rest, with each matrix updated whole by one data-parallel rank.

    ``params`` is what every torch optimizer takes: parameters, or groups with their own ``lr`` and ``weight_decay``.
    The options are those of ``LayerWiseMuonConfig``: torch.optim.Muon's arguments, an ``adamw`` section with
    torch.optim.AdamW's, and ours. ``param_groups`` holds, for each group given, a matrix half and an element-wise half.

    Made from ds_config.json, given to ``deepspeed.initialize(optimizer=...)``, or by a callable given there. Parameters
    are routed when the engine takes the optimizer, because only then is the model known; until then a group is split by
    dimensions alone. Raises ValueError for wrong options here, and when the engine is built, on every rank, for a model
    or a configuration that cannot work.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        register()
        self.config = parse(LayerWiseMuonConfig, options, type(self).__name__)
        self._given = as_groups(params)
        self._binding: Binding | None = None
        self._steppers: dict[int, GroupStepper | MatrixReplicas | ElementwiseReplicas] = {}  # by id of their tensor
        self._global_grad_norm: Any = None  # read by the engine at stage 0
        self.norm_before_clipping: Any = None  # written by the engine at stage 0
        trainable = [p for group in self._given for p in group["params"] if p.requires_grad]
        groups = split(self._given, {id(p): len(full_shape(p)) == 2 for p in trainable}, self.config)
        super().__init__(groups, {})
        self.defaults = {key: getattr(self.config, key) for key in MuonOptions.model_fields}  # schedulers read them
        self._link(LinkedRates.of(groups, self.config.lr))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the base class's constructor. Raises RuntimeError afterwards: the plan knows no later parameters."""
        if hasattr(self, "_linked"):
            raise RuntimeError(
                "LayerWiseMuon takes no param group after it was made; give all groups to the constructor"
            )
        super().add_param_group(param_group)

    def bind(self, engine: DeepSpeedEngine) -> None:
        """Route, plan and agree for ``engine``, which is about to wrap this optimizer. Called on all ranks."""
        everybody = [TorchCollectives(group) for group in deepspeed_engine.process_groups(engine)]
        name = type(self).__name__
        self._binding = agree_in_all(everybody, name, lambda: self._decide(engine, everybody))
        self._steppers = {}
        self.state.clear()  # an earlier engine's, whose partitions are gone
        self._replicated = deepspeed_engine.sharding_stage(engine) == 0
        if self._replicated:
            deepspeed_engine.report_norm(engine, self)
        self._take_groups(self._binding, engine)
        deepspeed_engine.adopt_torch_scheduler(engine)
        if everybody[0].rank == 0:
            self._announce(engine, self._binding)

    def _decide(self, engine: DeepSpeedEngine, everybody: Sequence[Collectives]) -> tuple[Binding, list[list[str]]]:
        reasons = reasons_to_refuse(engine, self._given)
        if reasons:
            raise ValueError("\n  ".join(["LayerWiseMuon cannot train with this configuration:", *reasons]))
        grouping = group_parameters(engine.module, self._given, self.config)
        machine = MACHINES.get(engine.device.type, MACHINES["cuda"])
        by_group = {ranks.group: ranks for ranks in everybody}
        ranks = [by_group[deepspeed_engine.group_ranks(engine, group)] for group in grouping.groups]
        found = units(engine, grouping.groups, ranks)
        plans = []
        for unit in found:
            members = [_member(p, grouping.names[id(p)]) for p in unit.params]
            plans.append(plan_group(grouping.groups[unit.group], members, unit.layout, self.config, machine))
        lines = [
            [line for unit, plan in zip(found, plans) if unit.ranks is sharers for line in plan.lines()]
            for sharers in everybody
        ]
        return Binding(engine, grouping, list(everybody), found, plans), lines

    def _take_groups(self, binding: Binding, engine: DeepSpeedEngine) -> None:
        """Put the routed groups in place of the provisional ones, keeping what a scheduler already wrote into those."""
        groups = binding.grouping.groups
        rates = LinkedRates.of(groups, self.config.lr)
        before, after = ([(g["from_group"], g["rule"]) for g in some] for some in (self.param_groups, groups))
        if before == after:
            groups = [{**old, "params": new["params"]} for old, new in zip(self.param_groups, groups)]
        elif isinstance(engine.client_lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise ValueError(
                f"the lr_scheduler was built on {len(before)} param groups, but routing the model makes {len(groups)}; "
                "pass a callable instead: lr_scheduler=lambda optimizer: ..."
            )
        self.param_groups = [
            {**group, "members": members_digest(binding.plans_of(number))} for number, group in enumerate(groups)
        ]
        self._link(rates)

    def _link(self, rates: LinkedRates) -> None:
        self._rates = rates
        self.param_groups = self._linked = rates.link(self.param_groups)

    def _announce(self, engine: DeepSpeedEngine, binding: Binding) -> None:
        if self.config.report:
            report.show(binding.grouping.routes, binding.plans)
        clipping = deepspeed_engine.default_clipping(engine)
        if clipping is not None:
            logger.warning(
                f"gradient_clipping is not set, so DeepSpeed clips gradients at its default norm of {clipping}; "
                "set it to 0 to switch clipping off"
            )

    def step(self) -> None:  # type: ignore[override]
        """One step of what DeepSpeed shows us: everything (stage 0, BF16_Optimizer), a param group (ZeRO-1/2) or a
        sub-group (ZeRO-3). Called on all ranks.

        It takes no closure, because DeepSpeed never gives one. Raises RuntimeError outside an engine, and on every rank
        if DeepSpeed stores parameters elsewhere than planned.
        """
        if self._binding is None:
            raise RuntimeError("this LayerWiseMuon has no engine; give it to deepspeed.initialize(optimizer=...)")
        if not self._steppers:
            self._prepare(self._binding)
        if self._replicated:
            clipped, self.norm_before_clipping = self.norm_before_clipping, None
            self._global_grad_norm = deepspeed_engine.grad_norm(self._binding.engine) if clipped is None else clipped
        for group in self.param_groups:
            for tensor in group["params"]:
                if id(tensor) in self._steppers:
                    self._steppers[id(tensor)].step(group, self.state[tensor])

    def _prepare(self, binding: Binding) -> None:
        """Before the first step: check that DeepSpeed stores what was planned, and make the state of every group.

        All groups at once: DeepSpeed links every group's state to its parameters after the first one has stepped.
        """
        keys = agree_in_all(binding.ranks, type(self).__name__, lambda: self._check_storage(binding))
        for unit, plan, key in zip(binding.units, binding.plans, keys):
            if self._replicated:
                stepper = new_replicated_stepper(plan, unit.params, unit.ranks, self.config, binding.engine.device)
            else:
                stepper = GroupStepper(plan, key, unit.ranks, self.config, binding.engine.device)
            stepper.fill_state(self._linked[unit.group], self.state[key])
            self._steppers[id(key)] = stepper

    def _check_storage(self, binding: Binding) -> tuple[list[Tensor], list[list[str]]]:
        """The tensor under which each unit's state is kept."""
        nothing: list[list[str]] = [[] for _ in binding.ranks]
        if self._replicated:
            return [unit.params[0] for unit in binding.units], nothing
        stage = deepspeed_engine.sharding_stage(binding.engine)
        flats = flat_tensors(binding.engine, binding.units, self._linked)
        for number, (unit, plan, flat) in enumerate(zip(binding.units, binding.plans, flats, strict=True)):
            check_as_planned(unit, number, plan, flat, stage)
        return flats, nothing

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("LayerWiseMuon belongs to its engine and cannot be copied or pickled; use state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises ValueError if it was saved with other parameters or partitions."""
        self._check_loadable(state_dict["param_groups"], state_dict["state"])
        super().load_state_dict(state_dict)
        self._link(self._rates)
        self._steppers = {}  # what was loaded may lack state: it was saved before the first step

    def _check_loadable(self, saved: list[dict[str, Any]], state: Mapping[int, Mapping[str, Any]]) -> None:
        theirs, ours = ([group.get("rule", "unknown") for group in groups] for groups in (saved, self.param_groups))
        if theirs != ours:
            raise ValueError(f"the checkpoint's param groups follow the rules {theirs}, this optimizer's follow {ours}")
        for number, (their, our) in enumerate(zip(saved, self.param_groups)):
            if their.get("members") != our.get("members"):
                raise ValueError(
                    f"param group {number} ({our['rule']}) holds other parameters than in the checkpoint; load it with "
                    "the model, the 'include' and the 'exclude' it was saved with"
                )
            numel = our["params"][0].numel()
            for key, value in state.get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim > 0 and value.numel() != numel:
                    raise ValueError(
                        f"param group {number}: the checkpoint's {key} has {value.numel()} elements for this rank, "
                        f"which stores {numel}"
                    )


def _member(param: Tensor, name: str) -> Member:
    return name, full_shape(param), str(param.dtype).removeprefix("torch.")
