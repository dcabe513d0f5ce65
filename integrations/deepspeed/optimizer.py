"""This package's optimizers inside DeepSpeed: their base class, and the one that DeepSpeed's ZeRO wraps.

With ZeRO, DeepSpeed keeps its tasks: sharding, master weights, gradient reduction, clipping, loss scaling, checkpoints.
The optimizer steps each rank's elements; matrices that are cut, or owned elsewhere, are sent to their owner and back.
``owned`` is the other storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.engines.base import BaseOptimizer, picked
from lwopt_backend.engines.first_pass import FirstPass
from lwopt_backend.engines.gradients import Guard, checked_order
from lwopt_backend.engines.zero.plan import UnitStepper
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Grouping
from lwopt_backend.groups.members import Members
from lwopt_backend.groups.param_groups import (
    NONE,
    ComparedOptions,
    as_configured,
    as_groups,
    main_rate,
    option_lines,
    split,
    with_options,
)
from lwopt_backend.groups.registry import build_matrix_rules, count_block_steps
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from lwopt_backend.integrations.deepspeed import zero
from lwopt_backend.integrations.deepspeed.engine import tensor_ranks
from lwopt_backend.integrations.deepspeed.gradients import EngineGradients, watch
from lwopt_backend.integrations.deepspeed.universal import prepare_loading
from lwopt_backend.integrations.deepspeed.zero import Binding, ZeROStore
from lwopt_backend.routing.routing import full_shape, named_parameters
from lwopt_backend.rules.protocol import one_call
from lwopt_backend.runtime.agreement import StepRefused, agree, disagreement
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.state import CHECKPOINT_KEY, StateStore, keeps_state
from lwopt_backend.runtime.undisturbed import undisturbed


class EngineOptimizer(BaseOptimizer):
    """An optimizer for an engine, which takes it with ``bind``; before, groups are split by dimensions alone.

    ``name`` is its type in ds_config.json. ``param_groups`` has, for each group given, a part for its matrices and one
    for the others, and more where overrides differ.
    """

    gradients: EngineGradients  # once it has an engine
    gathered: dict[str, Any] | None = None  # its state dict during a save that asks only some ranks for it

    def __init__(self, name: str, params: Iterable[Any], rules: Rules, config: ZeROConfig) -> None:
        self.name, self.rules, self.config = name, rules, config
        self.half_loaded = set[str]()  # "weights" and "state" that the last load replaced in part
        self._given = as_groups(params)
        trainable = [p for group in self._given for p in group["params"] if p.requires_grad]
        is_matrix = {id(p): len(full_shape(p)) == 2 for p in trainable}
        trains_matrices = not config.allow_no_matrix or any(is_matrix.values())
        super().__init__(split(self._given, is_matrix, rules), {})
        self._begin(rules, trains_matrices, main_rate(self._given, rules, trains_matrices), self.param_groups)

    def _guard_for(self, skips_nonfinite: bool) -> Guard:
        """The decision on steps where this optimizer decides; ``skips_nonfinite`` is what DeepSpeed's settings say."""
        return Guard(self.name, self.config.on_nonfinite, self.config.skip_above, skips_by_default=skips_nonfinite)

    def bind(self, engine: DeepSpeedEngine) -> None:
        """Route, plan and compare ranks for ``engine``, which is about to take this optimizer. Called on all ranks."""
        raise NotImplementedError

    def _take_groups(self, groups: list[dict[str, Any]], grouping: Grouping, shows_params: bool) -> None:
        """Replace the provisional groups by the routed ones, keeping what a scheduler has already written into them.

        ``shows_params``: the groups have the model's parameters; ZeRO 1 to 3 put flat tensors in their place."""
        both = (self.param_groups, groups)
        before, after = ([(g["from_group"], g["rule"], g["overrides"]) for g in some] for some in both)
        if before == after:
            pairs = zip(self.param_groups, groups)
            groups = [{**old, "params": new["params"], "members": new["members"]} for old, new in pairs]
        elif any("initial_lr" in group for group in self.param_groups):  # torch's schedulers write it
            raise ValueError(
                f"the lr_scheduler: expected {len(groups)} param groups, as the routed model has, found {len(before)}"
                f"{' without overrides' * (len(groups) == len(before))}; pass a callable instead, lr_scheduler=lambda "
                "optimizer: ..., or under Accelerate make it on the optimizer that prepare() returned"
            )
        self.param_groups = groups
        self._begin(self.rules, grouping.trains_matrices, grouping.rate, grouping.groups)
        if shows_params:
            self._checked.members = Members(self.param_groups, grouping.names)

    def state_store(self) -> StateStore:
        """The store of this rank's weights and state. Called on all ranks. Raises RuntimeError outside an engine."""
        raise NotImplementedError

    def compare_options(self) -> None:
        """Raises RanksDisagree, on all ranks with these param groups, if options differ. Called on all of them."""
        agree(self._with_these_groups(), self.name, lambda: (None, option_lines(self.param_groups)))

    def _with_these_groups(self) -> Collectives:
        """The ranks with equal param groups: in a pipeline, those of this stage."""
        raise NotImplementedError

    def _norms_before_clipping(self) -> tuple[Any, Mapping[str, Any]]:
        return self._engine().get_global_grad_norm(), {}

    def _engine(self) -> DeepSpeedEngine:
        raise NotImplementedError

    @undisturbed()
    @torch.no_grad()
    def grad_norm(self, names: str | Sequence[str] = "*", norm_type: float = 2.0) -> Tensor:
        """As ``LayerWiseOptimizer.grad_norm``, between ``engine.backward`` and ``engine.step``. With storage "zero",
        all ranks gather one gradient after another.

        Raises:
            RuntimeError: before a backward pass that completes the gradients; and with storage "zero" for offloaded
                gradients, and for models that not only data-parallel ranks share.
        """
        order = checked_order(norm_type)
        norms = [torch.linalg.vector_norm(grad, order, dtype=torch.float64) for grad in self._whole_gradients(names)]
        scale: float = getattr(self._engine().optimizer, "cur_scale", 1.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
        return (total / scale).float()

    @undisturbed()
    @torch.no_grad()
    def count_zeros(self, names: str | Sequence[str] = "*") -> int:
        """As ``LayerWiseOptimizer.count_zeros``, when and where ``grad_norm`` can be called."""
        return int(sum((grad == 0).sum() for grad in self._whole_gradients(names)))

    def _whole_gradients(self, names: str | Sequence[str]) -> Iterator[Tensor]:
        """Yield the whole gradients of these parameters, on all ranks; zeros for those that have none."""
        engine = self._engine()
        alone = not (engine.pipeline_parallelism or engine.has_moe_layers or tensor_ranks(engine) > 1)
        if not alone or engine.zero_cpu_offload():
            raise RuntimeError(
                f"{self.name}: expected gradients of data-parallel ranks alone, not offloaded, found others; after "
                "engine.step(), engine.get_global_grad_norm() is the norm of all"
            )
        self.gradients.check()
        params = {name: param for name, param in named_parameters(engine.module) if param.requires_grad}
        for name in filter(picked(names, list(params)), params):
            grad = safe_get_full_grad(params[name])
            yield torch.zeros_like(params[name], dtype=torch.float32) if grad is None else grad

    def take_loaded(self, options: Sequence[dict[str, Any]]) -> None:
        """Take over loaded ``options`` by param group, after weights and state were loaded."""
        self.set_groups(map(with_options, self.param_groups, options))

    def check_loaded(self) -> None:
        """Raises RuntimeError, on all ranks, if an error ended the last load halfway."""
        if self.half_loaded:
            raise RuntimeError(
                f"{self.name}: the last load_checkpoint failed after some {' and '.join(sorted(self.half_loaded))} had "
                "been loaded; load a checkpoint again, or restart"
            )

    def _routed(self) -> Grouping | None:
        """What the engine's model was routed to, None before there is an engine."""
        return None

    def _no_engine(self) -> RuntimeError:
        return RuntimeError(f"{self.name}: expected an engine; pass it to deepspeed.initialize(optimizer=...)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises ValueError if it was saved with other parameters or partitions."""
        saved = state_dict["param_groups"]
        zero.check_groups(saved, self.param_groups, self._routed())
        zero.check_partitions(saved, state_dict["state"], self.param_groups)
        before = self.param_groups
        super().load_state_dict({**state_dict, "param_groups": [*map(as_configured, saved, before)]})
        self.set_groups(self.param_groups, before)


class ZeROLayerWise(EngineOptimizer):
    """The optimizer for ``"storage": "zero"``: DeepSpeed's optimizers of stages 0 to 3 wrap it."""

    def __init__(self, name: str, params: Iterable[Any], rules: Rules, config: ZeROConfig) -> None:
        self._binding: Binding | None = None
        self._steppers: dict[int, UnitStepper[Any]] = {}  # by id of their tensor
        self._owner_state: dict[str, dict[str, Any]] = {}  # loaded, by a matrix's name, until the steppers are made
        self._arrivals: zero.Arrivals | None = None  # once it has an engine
        self._global_grad_norm: Any = None  # the engine reads this and the next at stage 0
        self.overflow = False
        self.norm_before_clipping: Any = None  # written by the engine at stage 0
        super().__init__(name, params, rules, config)

    def _routed(self) -> Grouping | None:
        return None if self._binding is None else self._binding.grouping

    def bind(self, engine: DeepSpeedEngine) -> None:
        self._binding = binding = zero.bind(self.name, engine, self._given, self.rules, self.config)
        self._plan_digest = binding.plan_digest
        self._guard = self._guard_for(True)
        self.row_scaling = binding.grouping.row_scaling()
        self._steppers = {}
        self.state.clear()  # an earlier engine's, whose partitions are gone
        if binding.replicated:
            deepspeed_engine.report_norm(engine, self)
        elif deepspeed_engine.uses_bf16_optimizer(engine):
            deepspeed_engine.when_wrapped(engine, deepspeed_engine.count_on_every_rank)
        elif deepspeed_engine.counts_cut_alone(engine):
            deepspeed_engine.when_wrapped(engine, deepspeed_engine.hear_of_copies)
        watch(engine, self)
        if self._arrivals is not None:
            self._arrivals.remove()
        self._arrivals = zero.Arrivals(binding, self._with_these_groups().rank == 0 and self.config.report)
        self._take_groups(self._binding.groups(), self._binding.grouping, binding.replicated)
        self._options = ComparedOptions(self._checked)
        deepspeed_engine.prepare_scheduler(engine, binding.grouping.groups, binding.grouping.rate)
        prepare_loading(engine, self, self._binding.ranks)
        zero.guard_state_keys(engine, self, self._binding.grouping)
        self._shown_rates = self._binding.announce(self.config)
        self._first_pass = FirstPass(engine.module, binding.grouping, self)

    def _engine(self) -> DeepSpeedEngine:
        if self._binding is None:
            raise self._no_engine()
        return self._binding.engine

    def _everyone(self) -> Collectives:
        assert self._binding is not None
        return max(self._binding.ranks, key=lambda ranks: ranks.world_size)

    def _with_these_groups(self) -> Collectives:
        assert self._binding is not None
        return self._binding.ranks[-1 if self._binding.places else 0]

    def _show_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        super()._show_groups(groups)
        self._all_groups = self.param_groups  # DeepSpeed replaces the list by its own

    @undisturbed()
    def step(self) -> None:  # type: ignore[override]
        """One step of the current ``param_groups`` of DeepSpeed: everything (stage 0, BF16_Optimizer), a param group
        (ZeRO-1/2) or a sub-group (ZeRO-3). Called on all ranks, without a closure.

        Non-finite gradients set ``overflow`` at stage 0, and change nothing else, as at the other stages; so does a
        norm above ``skip_above``.
        Raises RuntimeError outside an engine, and on every rank, before anything is changed, if DeepSpeed's storage is
        not as planned, or if options differ.
        """
        self._integrity.check()
        self.check_loaded()
        replicated = self._binding is not None and self._binding.replicated
        if replicated:
            self._checked.check(self._all_groups)
            if self._overflows():
                return
        binding = self._prepare()
        if replicated:  # one call for all, of which the user may have taken parameters out of their groups
            pairs = zip(binding.units, binding.stored(self._all_groups), strict=True)
            shown = {id(tensor): (self._all_groups[unit.group], tensor) for unit, tensor in pairs}
        else:
            held = ((group, tensor) for group in self.param_groups for tensor in group["params"])
            shown = {id(tensor): (group, tensor) for group, tensor in held if id(tensor) in self._steppers}
        units = list(self._steppers)  # in the order of a step's calls
        begins, ends = units[0] in shown, units[-1] in shown
        with one_call(self, begins=begins, ends=ends):
            if begins:
                self._check_groups(self._all_groups)
                self._compare_options(binding)
                self._rates.warn(self.name, self._all_groups, deepspeed_engine.idle_steps(binding.engine))
            for unit, (group, tensor) in shown.items():
                stepper = self._steppers[unit]
                with self._integrity.changing():
                    stepper.step(group, self.state[tensor], self._checked.out)
                if self.row_scaling:
                    self.row_scaling.scale(stepper.params, stepper.pieces({}, 0))
            if ends:
                count_block_steps(self._all_groups)
        if replicated:
            self.gradients.end_step()

    step.hooked = True  # type: ignore[attr-defined]  # see one_call

    def _overflows(self) -> bool:
        """At stage 0: whether the step is skipped, by the norm before clipping, which is equal on all ranks."""
        self.gradients.begin_step()
        norm, self.norm_before_clipping = self.norm_before_clipping, None
        if norm is None:
            norm = deepspeed_engine.clip_whole(self._engine(), 0.0)
        total = float(norm)
        try:
            self.overflow = self._guard.skips(total)
        except StepRefused:
            self.gradients.end_step()
            raise
        self._global_grad_norm = math.inf if self.overflow and not math.isfinite(total) else norm
        if self.overflow:
            self.row_scaling.clear()
            self.gradients.end_step()
        return self.overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Called on all ranks."""
        super().zero_grad(set_to_none)
        if self._binding is not None and self._binding.replicated:
            self.gradients.dropped()

    def _compare_options(self, binding: Binding) -> None:
        """Every 64th step, which exchanges two numbers for this; other steps exchange nothing. The first, and the first
        after 100, also exchange which parameters have had a gradient."""
        flags, ranks = self._options.flags(self._all_groups), self._with_these_groups()
        if flags[0] == NONE:
            return
        assert self._arrivals is not None
        presence = Presence(ranks, self._arrivals.here(self._options.steps), binding.engine.device, options=flags)
        if self._options.differ(presence.largest("options")):
            raise disagreement(ranks, self.name, self._options.lines(self._all_groups))
        self._arrivals.report(presence, self._options.steps)

    @property
    def _keeps_owner_state(self) -> bool:
        return any(map(keeps_state, build_matrix_rules(self.param_groups, self.config).values()))

    def state_store(self) -> ZeROStore:
        """As in ``EngineOptimizer``; creates the state if there was no step."""
        binding = self._prepare()
        tensors = binding.stored(self._all_groups)
        stepped = [(self._steppers[id(tensor)], self.state[tensor]) for tensor in tensors]
        return ZeROStore(binding, self.param_groups, stepped)

    def _prepare(self) -> Binding:
        """The binding. Before the first step, compare DeepSpeed's storage with the plan, and create every state.

        All at once, because DeepSpeed links every group's state to its parameters after the first group has stepped.
        Raises RuntimeError outside an engine.
        """
        binding = self._binding
        if binding is None:
            raise self._no_engine()
        if self._steppers:
            return binding
        steppers: dict[int, UnitStepper[Any]] = {}
        for unit, tensor in zip(binding.units, binding.stored(self._all_groups), strict=True):
            stepper = binding.stepper(unit, tensor, self.config)
            stepper.fill_state(self._all_groups[unit.group], self.state[tensor])
            steppers[id(tensor)] = stepper
        rules = build_matrix_rules(self._all_groups, self.config)  # of this pipeline stage: others may keep state
        zero.take_owner_states(binding, list(steppers.values()), self._owner_state, rules)
        self._steppers, self._owner_state = steppers, {}
        return binding

    def state_dict(self) -> dict[str, Any]:
        """A state dict as in torch's optimizers. At stage 0 DeepSpeed saves one rank's, so the first rank's has every
        parameter's whole state. It is then called on all ranks."""
        if self.gathered is not None:
            return self.gathered
        self._checked.arrange(self.param_groups)
        state_dict = super().state_dict()
        replicated = self._binding is not None and self._binding.replicated
        wide = {key: stepper.wide_state(to_send=replicated) for key, stepper in self._steppers.items()}
        if self._binding is not None and replicated:
            states = {tensor: {**state, **wide.get(id(tensor), {})} for tensor, state in self.state.items()}
            state_dict["state"] = zero.save_whole(self._binding, states)
        else:
            held = (tensor for group in self.param_groups for tensor in group["params"])
            for number, tensor in enumerate(held):
                if more := wide.get(id(tensor)):
                    state_dict["state"][number] = {**state_dict["state"].get(number, {}), **more}
        if self._binding is not None:
            kept = zero.owner_states(self._steppers.values()) if self._steppers else self._owner_state
            state_dict.update(zero.save_matrices(self._binding, kept if self._keeps_owner_state else None))
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._binding is not None and self._binding.replicated:
            groups = state_dict["param_groups"]
            zero.check_groups(groups, self.param_groups, self._binding.grouping)
            parts = zero.load_whole(self._binding, state_dict["state"])
            configured = [*map(as_configured, groups, self.param_groups)]
            super().load_state_dict({"param_groups": configured, "state": {}})
            self.state.update(parts)
        else:
            super().load_state_dict(state_dict)
        self._steppers = {}  # a save from before the first step lacks state
        self._owner_state = state_dict.get(CHECKPOINT_KEY, {})
