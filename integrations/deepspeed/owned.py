"""Owned storage under DeepSpeed: binding, the loss scale, clipping, checkpoints, and the optimizer itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.git_version_info import version
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor

from lwopt_backend.checkpoint.deepspeed.zero import MARK
from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.engines import report
from lwopt_backend.engines.base import picked
from lwopt_backend.engines.buffers.gradients import BufferGradients
from lwopt_backend.engines.buffers.hooks import tell_when_loaded
from lwopt_backend.engines.buffers.model import StepMeeting, check_model, check_trained, described
from lwopt_backend.engines.buffers.state import BufferStore
from lwopt_backend.engines.buffers.step import BufferCore, ParamSet
from lwopt_backend.engines.first_pass import FirstPass
from lwopt_backend.engines.gradients import Pick, but, checked_order, clip_factor
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Grouping, group_parameters
from lwopt_backend.groups.param_groups import ShownRates, as_configured, settings_lines
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from lwopt_backend.integrations.deepspeed import tensors
from lwopt_backend.integrations.deepspeed.gradients import watch
from lwopt_backend.integrations.deepspeed.optimizer import EngineOptimizer
from lwopt_backend.integrations.deepspeed.refusals import reasons_to_refuse_owned
from lwopt_backend.integrations.deepspeed.universal import prepare_loading
from lwopt_backend.integrations.deepspeed.zero import check_groups
from lwopt_backend.rules.protocol import one_call
from lwopt_backend.runtime.agreement import agree_in_all, digest
from lwopt_backend.runtime.collectives import Collectives, TorchCollectives
from lwopt_backend.runtime.state import CHECKPOINT_KEY, put
from lwopt_backend.runtime.undisturbed import undisturbed

# Keys of zero_optimization that owned storage uses; all others are refused or have no effect.
HONOURED = ("stage", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights")


@dataclass(frozen=True)
class OwnedBinding:
    """An optimizer's binding to the engine that has taken it. ``ranks`` share the parameters."""

    engine: DeepSpeedEngine
    grouping: Grouping
    ranks: TorchCollectives

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of gradients on their way to the owners; None is the parameter's."""
        dtype, accumulated = self.engine.get_data_types()
        return None if dtype == accumulated else accumulated

    @property
    def divisor(self) -> float:
        """Mean gradients are the sum over all ranks divided by this. Ranks that share a sequence count as one."""
        return self.ranks.world_size / self.engine.sequence_parallel_size if self.engine.gradient_average else 1.0

    def groups(self) -> list[dict[str, Any]]:
        """The param groups, each marked with a digest of its members for checkpoints."""
        names = self.grouping.names
        return [
            {**group, "members": digest([f"{names[id(p)]} {tuple(p.shape)}" for p in group["params"]])}
            for group in self.grouping.groups
        ]


def bind(
    name: str, engine: DeepSpeedEngine, given: list[dict[str, Any]], rules: Rules, config: ZeROConfig
) -> OwnedBinding:
    """Check settings, route parameters and compare ranks for the optimizer of type ``name``. Called on all ranks;
    raises on all of them for unsupported settings."""
    ranks = [TorchCollectives(group) for group in deepspeed_engine.process_groups(engine)]

    def decide() -> tuple[OwnedBinding, Sequence[Sequence[str]]]:
        if reasons := reasons_to_refuse_owned(engine, config):
            cannot = f'{name} with "storage": "owned" does not support this configuration; change:'
            raise ValueError("\n  ".join([cannot, *reasons]))
        check_model(engine.module, name)
        grouping = group_parameters(engine.module, given, rules, config)
        check_trained(grouping, name)
        lines = [*settings_lines(rules, config), *grouping.followed]
        return OwnedBinding(engine, grouping, ranks[0]), [lines] * len(ranks)

    return agree_in_all(ranks, name, decide)


def announce(binding: OwnedBinding, core: BufferCore) -> ShownRates:
    """Print the routing, the plan, and the settings without effect; returns the rates that were printed."""
    groups = binding.grouping.groups
    plans, members = described(core, groups), core.members
    shown = (binding.grouping.routes, groups, plans, core.plan_digest, members, members[0].param.device)
    rates = report.show(*shown)
    idle = [f"zero_optimization.{key}" for key in deepspeed_engine.zero_settings(binding.engine) if key not in HONOURED]
    if idle:
        report.say(f'Without effect with "storage": "owned": {", ".join(idle)}.')
    return rates


class OwnedLayerWise(EngineOptimizer, ZeROOptimizer):  # type: ignore[misc]  # DeepSpeed has no types
    """The optimizer for ``"storage": "owned"``. As a ZeRO optimizer, it scales losses and is told of backward passes.

    ``param_groups`` have the model's parameters. ``state`` has, for parameters with a piece on this rank, the piece's
    flat state. ``param.grad`` is None after backward; the owners have the mean gradients until the step.

    The engine reports the end of a backward pass, and whether it completes a step. Buffers, reduction, clipping, loss
    scaling, masters and checkpoints are this class's. Methods are grouped by the time of the engine's call.
    """

    def __init__(self, name: str, params: Iterable[Any], rules: Rules, config: ZeROConfig) -> None:
        ZeROOptimizer.__init__(self)
        super().__init__(name, params, rules, config)
        self._owned: OwnedBinding | None = None
        self._handles: list[Any] = []
        self._reductions = 0  # backward passes since the last step that the engine reduces
        self._loaded = False  # weights were loaded into the model, but not yet into masters
        self.overflow = False
        self.loss_scaler: Any = None
        self.dynamic_loss_scale = False
        self.custom_loss_scaler = False  # ZeROOptimizer reads the next three
        self.external_loss_scale: Any = None  # DeepSpeed's engine writes a number
        self.torch_autocast_gradscaler = None

    def bind(self, engine: DeepSpeedEngine) -> None:
        """Check settings, route, plan and make the buffers for ``engine``, which takes this optimizer. On all ranks."""
        self.destroy()
        binding = bind(self.name, engine, self._given, self.rules, self.config)
        self._take_groups(binding.groups(), binding.grouping, True)
        deepspeed_engine.prepare_scheduler(engine, binding.grouping.groups, binding.grouping.rate)
        checks = not engine.bfloat16_enabled() or engine._config.bfloat16_config.check_grad_overflow
        self._guard = self._guard_for(checks)
        self._stage, self._clip = engine.zero_optimization_stage(), engine.gradient_clipping() or 0.0
        self.loss_scaler = CreateLossScaler(  # dynamic or static in fp16, without effect in other precisions
            dtype=engine.get_data_types()[0],
            static_loss_scale=engine.loss_scale(),
            dynamic_scaling=engine.dynamic_loss_scale(),
            dynamic_loss_args=engine.dynamic_loss_scale_args(),
        )
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self.core = BufferCore(
            binding.grouping,
            [ParamSet(binding.ranks, binding.divisor, self.config.group_size)],
            self.config,
            grad_dtype=binding.grad_dtype,
            overlap=deepspeed_engine.zero_settings(engine).get("overlap_comm") is not False,
        )
        self._owned, self.row_scaling = binding, self.core.row_scaling
        self._first_pass = FirstPass(engine.module, binding.grouping, self)
        self._plan_digest = self.core.plan_digest
        self._follow(binding)
        self._tensors = tensors.OwnedTensors(self.core, binding.grouping)
        self._tensors.attach()
        for number, state in self.core.stepper.state.items():
            self.state[self.core.members[number].param] = state
        watch(engine, self)
        prepare_loading(engine, self, [binding.ranks], self.core)
        if self._stage == 0:
            engine.clip_fp32_gradients = lambda: None  # the engine would also clip
        else:
            self.dp_process_group = binding.ranks.process_group  # with it the engine saves a file per rank
        if engine.global_rank == 0:
            if self.config.report:
                self._shown_rates = announce(binding, self.core)
            deepspeed_engine.warn(engine, binding.grouping.groups)

    def _follow(self, binding: OwnedBinding) -> None:
        """Register hooks on the model and its parameters."""
        model = binding.engine.module
        self.core.manager.reduces = self._reduces
        self._meeting = StepMeeting(self.core, model, self._checked, self.name)
        self._handles += tell_when_loaded(model, self._take_loaded)

    def destroy(self) -> None:
        """Detach from the model of an engine that ends; its parameters keep their values."""
        if self._owned is None:
            return
        self._meeting.remove()
        self._tensors.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._owned = self._plan_digest = None
        self.__dict__.pop("dp_process_group", None)
        self.state.clear()

    def _reduces(self) -> bool:
        """Whether the backward pass that begins reduces gradients to their owners, or only accumulates them here."""
        assert self._owned is not None
        engine = self._owned.engine
        if engine.inside_no_sync_ctxt or not engine.enable_backward_allreduce:
            return False
        return self._stage == 2 or bool(engine.is_gradient_accumulation_boundary())

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Send the buckets that hooks have not sent; a rank without a gradient in this pass takes part with zeros.

        Called at stage 1, at the end of a step's last backward pass; at stage 2, at the end of every one.
        """
        self._reductions += 1
        self.core.manager.finish(self._reductions)

    overlapping_partition_gradients_reduce_epilogue = reduce_gradients  # its name at stage 2

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Called at stage 0, at the end of a step's last backward pass: nothing is left for the engine to reduce."""
        self.reduce_gradients()
        return [], {}

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Called at stage 2, before a step that the training loop decides on: all gradients are reduced."""

    @undisturbed()
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step with the gradients of the backward passes since the last one. Called on all ranks.

        Non-finite gradients are dropped and ``overflow`` is set, except for bf16 with ``bf16.check_grad_overflow`` off,
        or as ``on_nonfinite`` and ``skip_above`` say. Raises RuntimeError outside an engine and, on all ranks, if a
        backward pass ended in an exception on one, the model's parameters were changed, or options differ.
        """
        if self._owned is None:
            raise self._no_engine()
        self._integrity.check()
        self.check_loaded()
        self.gradients.begin_step()
        with one_call(self, begins=True, ends=True):
            presences = self._meeting.finish(self.param_groups)
            self._check_groups(self.param_groups)
            if self._loaded:
                self.refresh_fp32_params()
            self.loss_scaler.update_scale(self._scale_gradients())
            if not self.overflow:
                self._rates.warn(self.name, self.param_groups, deepspeed_engine.idle_steps(self._owned.engine))
                with self._integrity.changing():
                    self.core.step(self.param_groups, presences)
                self.core.manager.receive_values()
            else:
                self.core.manager.drop_gradients()
                self.row_scaling.clear()
            self._reductions = 0
            self._meeting.stepped()
        self.gradients.end_step()

    step.hooked = True  # type: ignore[attr-defined]  # see one_call

    def _scale_gradients(self) -> bool:
        """Unscale and clip the mean gradients in place, unless the step is skipped, which sets ``overflow``. Also sets
        the norm before clipping, if it was needed. Returns whether the step is skipped for non-finite gradients."""
        assert self._owned is not None
        engine, gradients, loss_scale = self._owned.engine, self.core.gradients, self.loss_scale
        self._global_grad_norm, self.overflow, nonfinite = None, False, False
        factor: Tensor | float = 1.0
        if self._clip or self._guard.is_on or engine.zero_compute_grad_norm():
            norm = gradients.norm(2.0, but(self._checked.out)) / loss_scale
            total = norm.item()
            self.overflow = self._guard.skips(total)
            nonfinite = self.overflow and not math.isfinite(total)
            self._global_grad_norm = math.inf if nonfinite else total
            factor = clip_factor(self._clip, norm) if self._clip else factor
        if (self._clip or loss_scale != 1) and not self.overflow:
            gradients.scale(factor / loss_scale)
        return nonfinite

    @undisturbed()
    def grad_norm(self, names: str | Sequence[str] = "*", norm_type: float = 2.0) -> Tensor:
        return self._complete_gradients().norm(checked_order(norm_type), self._picked(names)) / self.loss_scale

    @undisturbed()
    def count_zeros(self, names: str | Sequence[str] = "*") -> int:
        return self._complete_gradients().count_zeros(self._picked(names))

    def _complete_gradients(self) -> BufferGradients:
        self._engine()
        self.gradients.check()
        self._meeting.finish(self.param_groups, reads=True)
        return self.core.gradients

    def _picked(self, names: str | Sequence[str]) -> Pick:
        return picked(names, self.core.manager.names, self._checked.out)

    def _engine(self) -> DeepSpeedEngine:
        if self._owned is None:
            raise self._no_engine()
        return self._owned.engine

    def _everyone(self) -> Collectives:
        return self.core.everyone

    _with_these_groups = _everyone

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. Called on all ranks."""
        if self._owned is None:
            super().zero_grad(set_to_none)
            return
        self._meeting.discard()
        self._reductions = 0
        self.gradients.dropped()

    @property
    def loss_scale(self) -> float:
        scale: float = self.external_loss_scale if self.custom_loss_scaler else self.loss_scaler.cur_scale
        return scale

    @property
    def cur_scale(self) -> float:
        """The loss scale, under the name that the engine's monitor reads."""
        return self.loss_scale

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError: states cannot be moved to CPU memory between steps."""
        raise RuntimeError('offloading: expected "storage": "zero", found "owned", which cannot move its states')

    reload_states = offload_states

    def _take_loaded(self) -> None:
        self._loaded = True

    def refresh_fp32_params(self) -> None:
        """Copy the parameters' values into the masters, after only weights were loaded."""
        self.core.refresh_masters()
        self._loaded = False

    _restore_from_bit16_weights = refresh_fp32_params  # its name at stages 1 and 2

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a save; at stage 0 the first rank's has everything. Called on all ranks."""
        if self._owned is None:
            return super().state_dict()
        saved = (tensors.save_parts if self._stage else tensors.save_whole)(self.core, self.param_groups)
        if not saved:
            return {}
        common = {key: getattr(self, key) for key in ("loss_scaler", "dynamic_loss_scale", "overflow")}
        marks = {MARK: tensors.mark(self.core), "zero_stage": self._stage, "ds_version": version}
        return {**saved, **common, "clip_grad": self._clip, **marks}

    def load_state_dict(
        self,
        state_dict: dict[str, Any] | None = None,
        load_optimizer_states: bool = True,
        *,
        state_dict_list: list[dict[str, Any]] | None = None,
        load_from_fp32_weights: bool = True,
        checkpoint_folder: str | None = None,
        load_serial: Any = None,
        param_shapes: Any = None,
    ) -> None:
        """Load what ``state_dict`` returned on this rank (``state_dict_list``: on all ranks). Called on all ranks.
        Raises ValueError for other param groups."""
        if self._owned is None:
            assert state_dict is not None
            super().load_state_dict(state_dict)
            return
        saved = state_dict_list[self._owned.ranks.rank] if state_dict_list is not None else state_dict
        assert saved is not None
        in_parts, store = state_dict_list is not None or self._stage > 0, self.state_store()
        groups = (saved["base_optimizer_state"] if in_parts else saved)["param_groups"]
        check_groups(groups, self.param_groups, self._owned.grouping)
        if in_parts:
            tensors.take_parts(self.core, saved, weights=load_from_fp32_weights, state=load_optimizer_states)
        else:
            weights = saved["weights"] if load_from_fp32_weights else {}
            put(store, weights=weights, state=saved["state"] if load_optimizer_states else {})
        if load_from_fp32_weights:
            store.publish()
        if load_optimizer_states:
            store.take_owner_states(saved.get(CHECKPOINT_KEY, {}))
            pairs = zip(groups, self.param_groups, strict=True)
            kept = (
                {**as_configured(g, ours), "params": ours["params"], "members": ours["members"]} for g, ours in pairs
            )
            self.set_groups(kept)
            self.loss_scaler, self.overflow = saved["loss_scaler"], saved["overflow"]
        if not load_from_fp32_weights:
            self.refresh_fp32_params()
        self._loaded = False

    def state_store(self) -> BufferStore:
        if self._owned is None:
            raise self._no_engine()
        return BufferStore(self.core, self.param_groups)

    def take_loaded(self, options: Sequence[dict[str, Any]]) -> None:
        super().take_loaded(options)
        self._loaded = self.overflow = False

    @property
    def round_robin_bit16_groups(self) -> list[list[Tensor]]:
        """The parameters in their order in a checkpoint, one per group."""
        return [[member.param] for member in self.core.members]
