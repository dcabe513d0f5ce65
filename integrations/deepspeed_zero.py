"""Layer-wise Muon inside DeepSpeed's ZeRO-1/2 (host storage): ``"type": "LayerWiseMuon"`` in ds_config.json.

DeepSpeed keeps what is its own: sharding, master weights, gradient reduction, clipping, loss scaling, checkpoints. Our
optimizer is the inner one. It steps on each rank's flat partition; matrices that are cut by a partition boundary, or
owned elsewhere, travel to their owner and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.logging import logger
from torch import Tensor

from lwopt_backend import report
from lwopt_backend.config import LayerWiseMuonConfig, MuonOptions, parse
from lwopt_backend.group_plan import GroupPlan, Member, plan_group
from lwopt_backend.group_stepper import GroupStepper
from lwopt_backend.grouping import Grouping, group_parameters
from lwopt_backend.integrations import deepspeed_cpu, deepspeed_engine
from lwopt_backend.integrations.deepspeed_refusals import reasons_to_refuse
from lwopt_backend.linked_rates import LinkedRates
from lwopt_backend.param_groups import as_groups, split
from lwopt_backend.plan import MACHINES
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives


def register() -> None:
    """Make ``"type": "LayerWiseMuon"`` known to ds_config.json. Call it once, before ``deepspeed.initialize``.

    On a CPU it also keeps DeepSpeed from compiling an op that training does not use (``deepspeed_cpu``).
    """
    deepspeed_cpu.compile_nothing()
    deepspeed_engine.install(LayerWiseMuon, lambda optimizer, engine: optimizer.bind(engine))


@dataclass(frozen=True)
class Binding:
    """What an optimizer knows once an engine has taken it. ``params`` are the model's, group by group."""

    collectives: Collectives
    grouping: Grouping
    plans: list[GroupPlan]
    params: list[list[Tensor]]


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
        self._steppers: list[GroupStepper] = []
        trainable = [p for group in self._given for p in group["params"] if p.requires_grad]
        groups = split(self._given, {id(p): p.ndim == 2 for p in trainable}, self.config)
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
        collectives = TorchCollectives(engine.seq_data_parallel_group)
        self._binding = agree(collectives, type(self).__name__, lambda: self._decide(engine, collectives))
        self._steppers = []
        self.state.clear()  # an earlier engine's, whose partitions are gone
        self._take_groups(self._binding, engine)
        deepspeed_engine.adopt_torch_scheduler(engine)
        if collectives.rank == 0:
            self._announce(engine, self._binding)

    def _decide(self, engine: DeepSpeedEngine, collectives: Collectives) -> tuple[Binding, list[str]]:
        reasons = reasons_to_refuse(engine, self._given)
        if reasons:
            raise ValueError("\n  ".join(["LayerWiseMuon cannot train with this configuration:", *reasons]))
        grouping = group_parameters(engine.module, self._given, self.config)
        machine = MACHINES.get(engine.device.type, MACHINES["cuda"])
        plans = []
        for group in grouping.groups:
            layout = deepspeed_engine.flat_partition(engine, group["params"], collectives.world_size)
            members = [_member(p, grouping.names[id(p)]) for p in group["params"]]
            plans.append(plan_group(group, members, layout, self.config, machine))
        binding = Binding(collectives, grouping, plans, [group["params"] for group in grouping.groups])
        return binding, [line for plan in plans for line in plan.lines()]

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
        self.param_groups = [{**group, "members": plan.members_digest} for group, plan in zip(groups, binding.plans)]
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
        """One step of the param groups DeepSpeed shows us: ZeRO one at a time, BF16_Optimizer all. Called on all ranks.

        It takes no closure, because DeepSpeed never gives one. Raises RuntimeError outside an engine, and on every rank
        if DeepSpeed stores parameters elsewhere than planned.
        """
        if self._binding is None:
            raise RuntimeError("this LayerWiseMuon has no engine; give it to deepspeed.initialize(optimizer=...)")
        if not self._steppers:
            self._prepare(self._binding)
        for group in self.param_groups:
            position = next(i for i, linked in enumerate(self._linked) if linked is group)
            self._steppers[position].step(group, self.state[group["params"][0]])

    def _prepare(self, binding: Binding) -> None:
        """Before the first step: check that DeepSpeed stores what was planned, and make the state of every group.

        All groups at once: DeepSpeed links every group's state to its parameters after the first one has stepped.
        """
        agree(binding.collectives, type(self).__name__, lambda: (None, self._check_storage(binding)))
        for group, plan in zip(self._linked, binding.plans):
            flat = group["params"][0]
            stepper = GroupStepper(plan, group, flat, binding.collectives, self.config)
            stepper.fill_state(group, self.state[flat])
            self._steppers.append(stepper)

    def _check_storage(self, binding: Binding) -> list[str]:
        rank = binding.collectives.rank
        for group, plan, params in zip(self._linked, binding.plans, binding.params):
            numel = group["params"][0].numel()
            if numel != plan.layout.partition_numel:
                raise RuntimeError(f"{plan.rule}: planned {plan.layout.partition_numel} elements a rank, found {numel}")
            for index, (spec, param) in enumerate(zip(plan.specs, params)):
                planned, found = plan.layout.fragment(index, rank), deepspeed_engine.stored_fragment(param, rank)
                if planned != found:
                    raise RuntimeError(f"parameter {spec.name!r}: planned {planned}, but DeepSpeed stores {found}")
        return []

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("LayerWiseMuon belongs to its engine and cannot be copied or pickled; use state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises ValueError if it was saved with other parameters or partitions."""
        self._check_loadable(state_dict["param_groups"], state_dict["state"])
        super().load_state_dict(state_dict)
        self._link(self._rates)
        self._steppers = []  # what was loaded may lack state: it was saved before the first step

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
    return name, tuple(param.shape), str(param.dtype).removeprefix("torch.")
