"""Layer-wise Muon as DeepSpeed's final optimizer: owned storage, ``"storage": "owned"``, at stages 0 to 2.

The engine says when a backward pass ends and whether it completes a step; buffers, reduction, clipping, loss scaling,
masters and checkpoints are ours. What the engine asks of its optimizer is in the sections below, by when it asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from lwopt_backend.integrations import deepspeed_engine
from lwopt_backend.integrations.deepspeed_owned_binding import OwnedBinding, announce, bind, build_core
from lwopt_backend.integrations.deepspeed_owned_checkpoint import OwnedCheckpoint
from lwopt_backend.integrations.deepspeed_owned_scaling import GradientScaling, loss_scaler
from lwopt_backend.integrations.deepspeed_owned_tensors import OwnedTensors, no_offload
from lwopt_backend.integrations.deepspeed_zero import LayerWise, LayerWiseMuon
from lwopt_backend.owned.backward import Backward
from lwopt_backend.owned.core import OwnedCore
from lwopt_backend.owned.model_hooks import tell_when_loaded


class OwnedLayerWise(LayerWise, ZeROOptimizer):  # type: ignore[misc]  # DeepSpeed has no types
    """What ``LayerWise(params, storage="owned")`` is. It is a ZeRO optimizer, which the engine asks to scale losses
    and tells of backward passes.

    ``param_groups`` hold the model's parameters, ``state`` has, for those of which this rank owns a piece, the state of
    that piece, flat. ``param.grad`` is None after backward; the owners have the mean gradients until the step.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        ZeROOptimizer.__init__(self)
        super().__init__(params, **options)
        self._owned: OwnedBinding | None = None
        self._handles: list[Any] = []
        self._reductions = 0  # backward passes since the last step whose gradients the engine wants reduced
        self._loaded = False  # weights into the model, but not yet into masters
        self.overflow = False
        self.loss_scaler: Any = None
        self.dynamic_loss_scale = False
        self.custom_loss_scaler = False  # the next three are asked by ZeROOptimizer
        self.external_loss_scale: Any = None  # DeepSpeed's engine writes a number
        self.torch_autocast_gradscaler = None

    # When the engine is built

    def bind(self, engine: DeepSpeedEngine) -> None:
        """Refuse, route, plan and make the buffers for ``engine``, whose optimizer this is. Called on all ranks."""
        self.destroy()
        binding = bind(self.name, engine, self._given, self.rules, self.config)
        self._take_groups(binding.groups())
        deepspeed_engine.adopt_torch_scheduler(engine)
        self._stage = engine.zero_optimization_stage()
        self._scaling, self.loss_scaler = GradientScaling.of(engine), loss_scaler(engine)
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self.core = build_core(binding, self.config)
        self._owned, self.row_scaling = binding, self.core.row_scaling
        self._plan_digest = self.core.plan_digest
        self._follow(binding, self.core)
        self._tensors = OwnedTensors(self.core, binding.grouping)
        self._tensors.attach()
        for number, state in self.core.stepper.state.items():
            self.state[self.core.members[number].param] = state
        self._checkpoint = OwnedCheckpoint(binding, self.core)
        self._checkpoint.prepare_loading(self)
        if self._stage == 0:
            deepspeed_engine.leave_clipping_to_optimizer(engine)
        else:
            self.dp_process_group = binding.ranks.process_group  # with it the engine saves a file per rank
        if engine.global_rank == 0:
            if self.config.report:
                announce(binding, self.core)
            deepspeed_engine.warn(engine, self.rules.notes)

    def _follow(self, binding: OwnedBinding, core: OwnedCore) -> None:
        """Hooks on the model and its parameters."""
        model, factor = binding.engine.module, 1 / binding.predivisor
        if factor != 1:

            def predivide(param: Tensor) -> None:
                assert param.grad is not None
                param.grad.mul_(factor)

            self._handles += [p.register_post_accumulate_grad_hook(predivide) for p in core.manager.params]
        core.manager.reduces = self._reduces
        self._backward = Backward(core, model, self.name)
        self._handles += tell_when_loaded(model, self._take_loaded)

    def destroy(self) -> None:
        """Let go of the model of an engine that ends; its parameters keep their values."""
        if self._owned is None:
            return
        self._backward.remove()
        self._tensors.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._owned = self._plan_digest = None
        self.__dict__.pop("dp_process_group", None)
        self.state.clear()

    # In and after backward

    def _reduces(self) -> bool:
        """Whether the backward pass that begins is to bring gradients to their owners, or only adds to them here."""
        assert self._owned is not None
        engine = self._owned.engine
        if engine.inside_no_sync_ctxt or not engine.enable_backward_allreduce:
            return False
        return self._stage == 2 or bool(engine.is_gradient_accumulation_boundary())

    def _reduce(self) -> None:
        """Bring on its way what the hooks have not; a rank that had no gradient in this pass takes part with zeros."""
        self._reductions += 1
        self.core.manager.finish(self._reductions)

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Stage 0, at the end of a step's last backward pass: nothing is left for the engine to reduce."""
        self._reduce()
        return [], {}

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Stage 1, at the end of a step's last backward pass."""
        self._reduce()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Stage 2, at the end of every backward pass."""
        self._reduce()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Stage 2, before a step of a loop that says itself when to step: everything has been reduced."""

    # The step

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step from the gradients of the backward passes since the last one. Called on all ranks.

        Gradients that are not finite are dropped and ``overflow`` is set, but for bf16 with
        ``bf16.check_grad_overflow`` off. Raises RuntimeError outside an engine and, on all ranks, if a backward pass
        ended in an exception on one or the model's parameters were changed.
        """
        if self._owned is None:
            raise RuntimeError(f"this {self.name} has no engine; give it to deepspeed.initialize(optimizer=...)")
        presences = self._backward.finish()
        if self._loaded:
            self.refresh_fp32_params()
        self._global_grad_norm, self.overflow = self._scaling.apply(self.core.gradients, self.loss_scale)
        self.loss_scaler.update_scale(self.overflow)
        if not self.overflow:
            self.core.step(self.param_groups, presences)
            self.core.manager.receive_values()
        else:
            self.core.manager.drop_gradients()
            self.row_scaling.clear()
        self._backward.stepped()
        self._reductions = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. Called on all ranks."""
        if self._owned is None:
            super().zero_grad(set_to_none)
            return
        self._backward.discard()
        self._reductions = 0

    @property
    def loss_scale(self) -> float:
        scale: float = self.external_loss_scale if self.custom_loss_scaler else self.loss_scaler.cur_scale
        return scale

    @property
    def cur_scale(self) -> float:
        """The name by which the engine's monitor asks."""
        return self.loss_scale

    offload_states = reload_states = no_offload

    # Checkpoints

    def _take_loaded(self) -> None:
        self._loaded = True

    def refresh_fp32_params(self) -> None:
        """Take the parameters' values into the masters, after weights alone were loaded."""
        self.core.refresh_masters()
        self._loaded = False

    def _restore_from_bit16_weights(self) -> None:
        """Stages 1 and 2, after weights alone were loaded."""
        self.refresh_fp32_params()

    def state_dict(self) -> dict[str, Any]:
        """What this rank saves; at stage 0 all there is, on the first rank. Called on all ranks."""
        if self._owned is None:
            return super().state_dict()
        common = {key: getattr(self, key) for key in ("loss_scaler", "dynamic_loss_scale", "overflow")}
        return self._checkpoint.save(self.param_groups, {**common, "clip_grad": self._scaling.clip})

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
        """Load what ``state_dict`` returned on this rank (``state_dict_list``: on all). Called on all ranks. Raises
        ValueError for other param groups."""
        if self._owned is None:
            assert state_dict is not None
            super().load_state_dict(state_dict)
            return
        common, groups = self._checkpoint.load(
            self.param_groups, state_dict, state_dict_list, weights=load_from_fp32_weights, state=load_optimizer_states
        )
        if load_optimizer_states:
            self.link_groups(groups)
            self.loss_scaler, self.overflow = common["loss_scaler"], common["overflow"]
        if not load_from_fp32_weights:
            self.refresh_fp32_params()
        self._loaded = False

    def take_loaded(self, options: Sequence[dict[str, Any]], held: dict[str, dict[str, Any]]) -> None:
        """Go on with hyperparameters by param group, after weights, states and masters were loaded."""
        super().take_loaded(options, held)
        self._loaded = self.overflow = False

    @property
    def round_robin_bit16_groups(self) -> list[list[Tensor]]:
        """The parameters in the order in which a checkpoint has them, one to a group."""
        return [[member.param] for member in self.core.members]


class OwnedLayerWiseMuon(OwnedLayerWise, LayerWiseMuon):
    """What ``LayerWiseMuon(params, storage="owned")`` is."""
