"""Layer-wise Muon inside DeepSpeed: ``"type": "LayerWiseMuon"`` in ds_config.json.

With the storage of ZeRO, which this file is about, DeepSpeed keeps what is its own: sharding, master weights, gradient
reduction, clipping, loss scaling, checkpoints. Our optimizer is the inner one. It steps on what each rank stores;
matrices that are cut, or owned elsewhere, travel to their owner and back. ``deepspeed_owned`` is the other storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend import report
from lwopt_backend.config import LayerWiseMuonConfig, MuonOptions, parse
from lwopt_backend.group_stepper import GroupStepper
from lwopt_backend.integrations import (
    deepspeed_check,
    deepspeed_checkpoints,
    deepspeed_cpu,
    deepspeed_engine,
    deepspeed_tensors,
)
from lwopt_backend.integrations.deepspeed_binding import Binding, bind
from lwopt_backend.integrations.deepspeed_pipeline import check_rates
from lwopt_backend.integrations.deepspeed_state import check_groups, check_partitions, load_whole, save_whole
from lwopt_backend.linked_rates import LinkedRates
from lwopt_backend.param_groups import as_groups, split
from lwopt_backend.replicated_stepper import ReplicatedStepper, new_replicated_stepper
from lwopt_backend.routing import full_shape


def register() -> None:
    """Make ``"type": "LayerWiseMuon"`` known to ds_config.json. Call it once, before ``deepspeed.initialize``.

    On a CPU it also keeps DeepSpeed from compiling an op that training does not use (``deepspeed_cpu``). Raises
    ImportError for a DeepSpeed that is not supported (``deepspeed_check``).
    """
    deepspeed_check.check()
    deepspeed_cpu.compile_nothing()
    deepspeed_engine.install(LayerWiseMuon, lambda optimizer, engine: optimizer.bind(engine))


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

    def __new__(cls, params: Iterable[Any], **options: Any) -> LayerWiseMuon:
        if cls is LayerWiseMuon and options.get("storage") == "owned":
            from lwopt_backend.integrations.deepspeed_owned import OwnedLayerWiseMuon  # which builds on this module

            cls = OwnedLayerWiseMuon
        return super().__new__(cls)

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        register()
        self.config = parse(LayerWiseMuonConfig, options, LayerWiseMuon.__name__)
        self._given = as_groups(params)
        self._binding: Binding | None = None
        self._steppers: dict[int, GroupStepper | ReplicatedStepper] = {}  # by id of their tensor
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
        self._binding = bind(engine, self._given, self.config)
        self._steppers = {}
        self.state.clear()  # an earlier engine's, whose partitions are gone
        if self._binding.replicated:
            deepspeed_engine.report_norm(engine, self)
        self._take_groups(self._binding.groups())
        deepspeed_engine.adopt_torch_scheduler(engine)
        deepspeed_checkpoints.guard_loading(
            engine, self._binding.ranks, lambda *asked: deepspeed_checkpoints.check(engine, *asked)
        )
        deepspeed_tensors.guard_state_keys(engine, self, self._binding.grouping)
        if engine.global_rank == 0:
            if self.config.report:
                report.show(*self._binding.announcement())
            deepspeed_engine.warn_of_default_clipping(engine)

    def _take_groups(self, groups: list[dict[str, Any]]) -> None:
        """Put the routed groups in place of the provisional ones, keeping what a scheduler already wrote into those."""
        rates = LinkedRates.of(groups, self.config.lr)
        before, after = ([(g["from_group"], g["rule"]) for g in some] for some in (self.param_groups, groups))
        if before == after:
            groups = [
                {**old, **{key: new[key] for key in ("params", "members")}}
                for old, new in zip(self.param_groups, groups)
            ]
        elif any("initial_lr" in group for group in self.param_groups):  # torch's schedulers write it
            raise ValueError(
                f"the lr_scheduler was built on {len(before)} param groups, but routing the model makes {len(groups)}; "
                "pass a callable instead, lr_scheduler=lambda optimizer: ..., or under Accelerate make it on the "
                "optimizer that prepare() returned"
            )
        self.param_groups = groups
        self._link(rates)

    def _link(self, rates: LinkedRates) -> None:
        self._rates = rates
        self.param_groups = self._linked = rates.link(self.param_groups)

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
        if self._binding.stage is not None and self._binding.stage.groups_differ:
            check_rates(self._binding.stage, self._linked)
        if self._binding.replicated:
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
        for unit, plan, tensor in zip(binding.units, binding.plans, binding.stored(self._linked), strict=True):
            device = binding.engine.device
            if binding.replicated:
                stepper = new_replicated_stepper(plan, unit.params, unit.ranks, self.config, device)
            else:
                stepper = GroupStepper(plan, tensor, unit.ranks, self.config, device)
            stepper.fill_state(self._linked[unit.group], self.state[tensor])
            self._steppers[id(tensor)] = stepper

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("LayerWiseMuon belongs to its engine and cannot be copied or pickled; use state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """What torch's optimizers return. At stage 0, where DeepSpeed saves one rank's, the first rank's has every
        parameter's state whole, and it must be called on all ranks."""
        state_dict = super().state_dict()
        if self._binding is not None and self._binding.replicated:
            state_dict["state"] = save_whole(self._binding, self.state)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises ValueError if it was saved with other parameters or partitions."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        check_groups(groups, self.param_groups)
        if self._binding is not None and self._binding.replicated:
            parts = load_whole(self._binding, state)
            super().load_state_dict({"param_groups": groups, "state": {}})
            self.state.update(parts)
        else:
            check_partitions(groups, state, self.param_groups)
            super().load_state_dict(state_dict)
        self._link(self._rates)
        self._steppers = {}  # what was loaded may lack state: it was saved before the first step
