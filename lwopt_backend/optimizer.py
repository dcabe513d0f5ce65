"""``LayerWiseOptimizer(model)``: layer-wise matrix optimizers in plain PyTorch and on FSDP2.

``OwnedOptimizer`` trains a plain model: backward reduces gradients to their owners, ``step()`` sends new parameters to
all ranks. ``MeshOptimizer`` trains a ``fully_shard`` model: tensors stay sharded DTensors; ``step()`` sends the pieces
of each matrix to one rank of its mesh, and returns the pieces of the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lwopt_backend.config.hosts import NAME, FSDP2Config, HostConfig, OwnedConfig
from lwopt_backend.engines.base import BaseOptimizer, loaded, saved
from lwopt_backend.engines.fsdp2 import plan as mesh
from lwopt_backend.engines.fsdp2 import state as mesh_state
from lwopt_backend.engines.fsdp2 import step as mesh_stepping
from lwopt_backend.engines.fsdp2.gradients import MeshGradients, scattered
from lwopt_backend.engines.fsdp2.step import Attachment, StateOnceSharded, check_is_of, check_sharded, same, step_all
from lwopt_backend.engines.gradients import ClipGroups, Pick, check_finite, checked_order
from lwopt_backend.engines.owned import model as owned_model
from lwopt_backend.engines.owned.gradients import OwnedGradients
from lwopt_backend.engines.owned.model import (
    Backward,
    check_model,
    check_not_compiled,
    check_options,
    tell_when_loaded,
    wait_in_forward,
)
from lwopt_backend.engines.owned.state import OwnedStore, held_state, state_of, take_state
from lwopt_backend.engines.owned.step import OwnedCore, Share, broadcast_untrained
from lwopt_backend.groups.choices import Rules, settings_lines
from lwopt_backend.groups.grouping import Given, Grouping, WatchedModel
from lwopt_backend.groups.param_groups import ComparedOptions, ElementwiseGroups, warn_of_small_rate, with_options
from lwopt_backend.groups.registry import build_matrix_rules, count_block_steps, with_torchs_keys
from lwopt_backend.plan.cost import RankMemory
from lwopt_backend.routing.routing import as_globs, check_globs, named_like
from lwopt_backend.rules import MatrixRule
from lwopt_backend.rules.protocol import AFTER, one_call
from lwopt_backend.runtime.agreement import StepRefused, agree, agree_in_all, plan_digest
from lwopt_backend.runtime.collectives import Collectives, ranks_of
from lwopt_backend.runtime.state import StateStore, keeps_state


class Sharing(NamedTuple):
    """The arguments about which ranks share a plain model's parameters."""

    process_group: Any = None
    expert_params: Sequence[str] = ()
    expert_process_group: Any = None
    expert_group_size: int | None = None


class LayerWiseOptimizer(BaseOptimizer):
    """Layer-wise optimizer of a plain model, in place of DDP, or of a ``fully_shard`` model.

    A matrix rule (Muon by default) trains weight matrices, an element-wise rule (AdamW) trains all other parameters.
    One data-parallel rank updates each matrix whole. ``param_groups`` has, for each group given, one group of matrices
    and one of other parameters. Call the constructor and every method on all ranks.

    Args:
        model: a plain module without a DDP wrapper, a ``fully_shard`` module, or a list of the pipeline stages of this
            rank, each of which ``fully_shard`` has sharded.
        matrix: name of the matrix rule, or a mapping with its ``name`` and options.
        lr: learning rate of the matrix rule. Default: the rule's.
        elementwise: name of the rule of all other parameters, or a mapping like ``{"name": "adamw", "eps": 1e-6}``.
        elementwise_lr: learning rate of the element-wise rule. Default: the rule's.
        params: param groups as in torch.optim, each with its own ``lr``, ``weight_decay`` and section ``"adamw"``.
            Default: one group of all trainable parameters.
        overrides: other options for some parameters: mappings with ``params`` (globs on names) and ``matrix`` or
            ``elementwise``.
        sharded_later: plan at the first step, for a model that will be sharded later, as Accelerate's ``prepare`` does.
        process_group: data-parallel ranks of a plain model. Default: all ranks, or this process alone.
        expert_params: globs of the parameters that only some ranks of a plain model share. Their gradients are also
            means over ``process_group``.
        expert_process_group: ranks that share the parameters in ``expert_params``.
        expert_group_size: number of ranks in ``expert_process_group`` that hold one instance of the experts.
        **options: the matrix rule's options by name, and the engine's. Both engines have ``include``, ``exclude``,
            ``atoms``, ``allow_no_matrix``, ``exchange_dtype``, ``clip_groups`` and ``report``. A ``fully_shard`` model
            has ``bucket_matrices``, ``bucket_numel`` and ``state_dtype``. A plain model has ``layout``, ``bucket_mb``,
            ``group_size``, ``grad_dtype``, ``keep_full_grads``, ``overlap_grad_reduce`` and ``overlap_param_gather``.

    Raises:
        TypeError, ValueError: on all ranks, if the model or an option is not supported.

    Examples:
        >>> fully_shard(model)
        >>> optimizer = LayerWiseOptimizer(model, lr=0.02, elementwise_lr=3e-4, weight_decay=0.1)
    """

    config: Any
    _grouping: Grouping

    def __new__(cls, model: Any = None, *args: Any, sharded_later: bool = False, **options: Any) -> LayerWiseOptimizer:
        if cls is LayerWiseOptimizer:
            cls = MeshOptimizer if sharded_later or mesh.is_sharded(model) else OwnedOptimizer
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        matrix: str | Mapping[str, Any] = "muon",
        lr: float | None = None,
        elementwise: str | Mapping[str, Any] = "adamw",
        elementwise_lr: float | None = None,
        *,
        params: Iterable[Any] | None = None,
        overrides: Iterable[Mapping[str, Any]] = (),
        sharded_later: bool = False,
        process_group: Any = None,
        expert_params: Sequence[str] = (),
        expert_process_group: Any = None,
        expert_group_size: int | None = None,
        **options: Any,
    ) -> None:
        given = Given(matrix, lr, elementwise, elementwise_lr, overrides, options, params)
        sharing = Sharing(process_group, expert_params, expert_process_group, expert_group_size)
        self._train(model, given, sharing, sharded_later)

    def _train(self, model: Any, given: Given, sharing: Sharing, sharded_later: bool) -> None:
        """Route, plan and create the state. Called on all ranks."""
        raise TypeError(f"subclass OwnedOptimizer or MeshOptimizer, not {NAME}, which chooses one of them")

    def _take_groups(self, rules: Rules) -> None:
        """Start with the routed param groups, without the marks that engines compare."""
        marks = ("from_group", "overrides")
        groups = [{k: v for k, v in group.items() if k not in marks} for group in self._grouping.groups]
        super().__init__(with_torchs_keys(groups), {})
        self._begin(rules, self._grouping.trains_matrices)
        self._clip_groups = ClipGroups(self.config.clip_groups, self._grouping.clip_groups)
        self._clipped = False  # since the last step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients since the last step.

        A parameter without a gradient on any rank keeps its value and state. If only some ranks have a gradient, the
        gradients of the others count as zero.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: on all ranks, if options differ between ranks, which every 64th step compares; for a plain
                model also if a backward pass failed on any rank, or if other parameters are trained than before. Other
                errors are raised on one rank, for which the others wait until its program is ended.
        """
        with one_call(self, begins=True, ends=True):
            loss = None if closure is None else torch.enable_grad()(closure)()
            if self._clip_groups.limits and not self._clipped:
                self._clip(self._clip_groups.limits)
            self._clipped = False
            self._step()
            if self._optimizer_step_post_hooks or AFTER:  # which may read parameters
                self.synchronize()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # see one_call

    def _step(self) -> None:
        raise NotImplementedError

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all gradients, however they are stored.

        A plain model adds up in fp64, without ``foreach``. If a mesh leaves out some ranks, its parameters count once
        where those ranks hold copies, and are added where they hold other parameters (experts). Parameters in
        ``clip_groups`` do not count: their groups' norms clip them, here or, without a call, in ``step``.

        Returns:
            The norm before clipping, a plain fp32 scalar, equal on all ranks. For one mesh it has torch's bits.
        """
        limits = {**self._clip_groups.limits, None: max_norm}
        return self._clip(limits, norm_type, error_if_nonfinite, foreach)[None].float()

    @torch.no_grad()
    def _clip(
        self, limits: Mapping[str | None, float], norm_type: float = 2.0, finite: bool = False, foreach: Any = None
    ) -> dict[str | None, Tensor]:
        """Clip each of these clip groups by its norm, and return the norms; None is the rest. Called on all ranks."""
        gradients, order = self.gradients, checked_order(norm_type)
        norms = self._clip_groups.measure(limits, lambda pick: gradients.norm(order, pick, foreach))
        for norm in norms.values():
            check_finite(norm, norm_type, finite)
        for group, norm in norms.items():
            gradients.clip(limits[group], norm, self._clip_groups.pick(group), foreach)
        self._clipped = True
        return norms

    @property
    def clip_group_norms(self) -> dict[str, Tensor]:
        """The norm of each group in ``clip_groups`` before it was last clipped, fp32, the same on all ranks."""
        return self._clip_groups.named

    def _norms_before_clipping(self) -> tuple[Any, Mapping[str, Any]]:
        return self._clip_groups.norms.get(None), self._clip_groups.named

    @property
    def gradients(self) -> MeshGradients | OwnedGradients:
        """Norm and scaling of the reduced gradients. Read on all ranks."""
        raise NotImplementedError

    def named_params(self) -> list[tuple[str, Tensor]]:
        """The trained parameters with their names."""
        raise NotImplementedError

    def state_store(self) -> StateStore:
        """The store of this rank's weights and state, for ``lwopt_backend.migration``. Called on all ranks."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the parameters of the last step are on this rank (``overlap_param_gather``)."""

    # On FSDP2

    def attach(self, model: nn.Module | Sequence[nn.Module]) -> Attachment:
        """Start the exchange of each bucket in the backward pass, as soon as its last gradient has been reduced.

        Results do not change by a bit: a bucket whose gradients are changed after it was sent (clipped, unscaled) is
        exchanged again, and early exchange pauses for a few steps. Buckets in flight cost memory until the step.

        Returns:
            A handle whose ``remove()`` removes the hooks.

        Raises:
            ValueError: for a model other than the optimizer's.
        """
        raise self._only_of(FSDP2Config, "attach")

    # For plain models

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank in backward passes within it; the next pass outside reduces them all."""
        raise self._only_of(OwnedConfig, "no_sync")

    def grad_norm(self, names: str | Sequence[str] = "*", norm_type: float = 2.0) -> Tensor:
        """The norm of the mean gradients of the parameters whose names match a glob, in fp32."""
        raise self._only_of(OwnedConfig, "grad_norm")

    def count_zeros(self, names: str | Sequence[str] = "*") -> int:
        """The number of elements of these mean gradients that are exactly zero."""
        raise self._only_of(OwnedConfig, "count_zeros")

    def refresh_masters(self) -> None:
        """Copy the parameters' values into the fp32 masters of 16-bit parameters, after they were changed by hand."""
        raise self._only_of(OwnedConfig, "refresh_masters")

    def save_state_dict(self, path: str | PathLike[str], /, **more: Any) -> None:
        """Write weights, state and ``more`` to a folder that torch.distributed.checkpoint reads. For plain models.

        All ranks must see the folder, which holds only this checkpoint; an earlier one is replaced atomically. An error
        on any rank is raised on all ranks.
        """
        raise self._only_of(OwnedConfig, "save_state_dict")

    def load_state_dict_from(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Load any engine's ``{"model": ..., "optimizer": ...}``, saved on any number of ranks. For plain models.

        Returns:
            The folder's other entries.

        Raises:
            ValueError: on all ranks, before anything is changed, for what does not fit.
        """
        raise self._only_of(OwnedConfig, "load_state_dict_from")

    def memory_report(self) -> list[RankMemory]:
        """Per rank of the process group, the bytes that it stores for this optimizer."""
        raise self._only_of(OwnedConfig, "memory_report")

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has sent so far, by kind; without flags and norms, a few bytes per parameter."""
        raise self._only_of(OwnedConfig, "traffic")

    def _only_of(self, config: type[HostConfig], name: str) -> TypeError:
        return TypeError(f"{NAME}: {type(self.config).lacks(name, config)}")


class OwnedOptimizer(LayerWiseOptimizer):
    """``LayerWiseOptimizer`` of a plain model; copies all parameters and buffers from the group's first rank to all.

    After backward, ``param.grad`` is None unless ``keep_full_grads`` is set: the owners have the mean gradients, which
    ``step`` frees.
    """

    config: OwnedConfig

    def _train(self, model: Any, given: Given, sharing: Sharing, sharded_later: bool) -> None:
        everyone = ranks_of(sharing.process_group)

        def decide() -> tuple[tuple[Rules, OwnedConfig, Grouping, list[Share]], list[str]]:
            check_model(model)
            rules, config, grouping = given.decide(OwnedConfig, model)
            if config.overlap_param_gather:
                check_not_compiled(model)
            experts = as_globs(sharing.expert_params, "expert_params")
            check_globs("expert_params", experts, grouping.routes, grouping.routes)
            check_options(config, grouping, experts, *sharing[2:])
            shares = [Share(everyone, everyone.world_size, config.group_size)]
            if experts:
                theirs = ranks_of(sharing.expert_process_group, "expert_process_group")
                shares.append(Share(theirs, everyone.world_size, sharing.expert_group_size, named_like(experts)))
            return (rules, config, grouping, shares), settings_lines(rules, config)

        rules, self.config, self._grouping, shares = agree(everyone, NAME, decide)
        broadcast_untrained(model, shares)
        self.core = OwnedCore(
            self._grouping,
            shares,
            self.config,
            layout=self.config.layout,
            bucket_mb=self.config.bucket_mb,
            grad_dtype=torch.float32 if self.config.grad_dtype == "float32" else None,
            keep_full=self.config.keep_full_grads,
            overlap=self.config.overlap_grad_reduce,
        )
        self._plan_digest = self.core.plan_digest
        self._take_groups(rules)
        self.state.update(held_state(self.core, self.param_groups))
        self._model = model
        self._manager, self.row_scaling = self.core.manager, self.core.row_scaling
        self._backward = Backward(self.core, model)
        self._loaded = False
        tell_when_loaded(model, self._take_loaded)
        if self.config.overlap_param_gather:
            wait_in_forward(model, self._manager)
            self.core.stepper.last_first = True
        if everyone.rank == 0:
            warn_of_small_rate(self._grouping.groups)
            if self.config.report:
                owned_model.show(self._grouping.routes, self.core, self._grouping.groups)

    # The loop

    def no_sync(self) -> AbstractContextManager[None]:
        return self._manager.no_sync()

    def grad_norm(self, names: str | Sequence[str] = "*", norm_type: float = 2.0) -> Tensor:
        return self.gradients.norm(checked_order(norm_type), self._picked(names))

    def count_zeros(self, names: str | Sequence[str] = "*") -> int:
        return self.gradients.count_zeros(self._picked(names))

    def _step(self) -> None:
        self.core.check_loaded()
        presences = self._backward.finish(self.param_groups)
        if self._loaded:
            self.refresh_masters()
        self._manager.receive_values()
        self.core.step(self.param_groups, presences)
        if not self.config.overlap_param_gather:
            self._manager.receive_values()
        self._backward.stepped()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of an interrupted backward pass included."""
        self._backward.discard()

    def synchronize(self) -> None:
        self._manager.receive_values()

    def refresh_masters(self) -> None:
        self._manager.receive_values()
        self.core.refresh_masters()
        self._loaded = False

    def _take_loaded(self) -> None:
        self._loaded = True

    @property
    def gradients(self) -> OwnedGradients:
        """Waits until all gradients are at their owners."""
        self._backward.finish(self.param_groups)
        return self.core.gradients

    def _picked(self, names: str | Sequence[str]) -> Pick:
        globs = [names] if isinstance(names, str) else list(names)
        check_globs("names", globs, self._grouping.routes, self._grouping.routes)
        return named_like(globs)

    # Checkpoints

    def named_params(self) -> list[tuple[str, Tensor]]:
        return [(member.name, member.param) for member in self.core.members]

    def state_store(self) -> OwnedStore:
        return OwnedStore(self.core, self.param_groups)

    def save_state_dict(self, path: str | PathLike[str], /, **more: Any) -> None:
        from lwopt_backend.engines.owned import files as owned_files

        owned_files.save(self.core, self.param_groups, self._model, Path(path), more)

    def load_state_dict_from(self, path: str | PathLike[str]) -> dict[str, Any]:
        from lwopt_backend.engines.owned import files as owned_files

        groups, more = owned_files.load(self.core, self.param_groups, self._model, Path(path))
        self.take_groups(groups)
        return more

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        """Replace the param groups by those that were loaded with state."""
        self.set_groups(groups)
        self._backward.options.compare_next()
        self._loaded = True

    def state_dict(self) -> dict[str, Any]:
        """This rank's pieces of the state, which torch.distributed.checkpoint saves for any number of ranks."""
        self._backward.options.compare_next()
        return saved(self, lambda: state_of(self.core, self.param_groups))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this rank, or one of whole tensors. Called on all ranks.

        What does not fit raises, on all of them, before anything is changed.
        """
        loaded(self, state_dict, lambda found: self.take_groups(take_state(self.core, self.param_groups, found)))

    def memory_report(self) -> list[RankMemory]:
        return owned_model.memory_of_all(self.core, self.param_groups)

    def traffic(self) -> dict[str, int]:
        return dict(self._manager.ledger.sent)

    def _everyone(self) -> Collectives:
        return self.core.holdings[0].sharers.everyone

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler, which needs ``param.grad``. Raises RuntimeError unless ``keep_full_grads``."""
        if not self.config.keep_full_grads:
            raise RuntimeError(f"{NAME}: GradScaler unscales param.grad, which only owners have; set keep_full_grads")
        return False


class MeshOptimizer(LayerWiseOptimizer):
    """``LayerWiseOptimizer`` of a model that ``fully_shard`` has sharded, or will have by the first step.

    Constructed on all ranks of the model's meshes. Raises, on all of them, for a model without DTensors or without a
    matrix, and for placements that are not supported.
    """

    config: FSDP2Config
    state = StateOnceSharded()

    def _train(self, model: Any, given: Given, sharing: Sharing, sharded_later: bool) -> None:
        module = mesh.sharded_module(model, NAME)
        self._steppers: list[mesh.MeshStepper] = []
        self._elementwise, self._options = ElementwiseGroups(), ComparedOptions()
        self._attachment: Attachment | None = None
        self._bound: list[list[Tensor]] = []
        self._stated: list[Tensor] = []
        self._model = module
        mesh.reshard(module)
        exchange = [] if sharded_later else mesh.exchange_groups(module.parameters())

        def decide() -> tuple[tuple[Rules, FSDP2Config, Grouping], list[list[str]]]:
            for name, value in sharing._asdict().items():
                if value is not None and value != ():
                    raise ValueError(f"{NAME}: {FSDP2Config.lacks(repr(name), OwnedConfig)}; meshes define the ranks")
            rules, config, grouping = given.decide(FSDP2Config, module)
            lines = [*settings_lines(rules, config), *(f"{r.name} {r.shape} {r.kind}" for r in grouping.routes)]
            return (rules, config, grouping), [lines for _ in exchange]

        rules, self.config, self._grouping = agree_in_all([c for _, c in exchange], NAME, decide)
        self.row_scaling = self._grouping.row_scaling()
        self._names = [[self._grouping.names[id(p)] for p in group["params"]] for group in self._grouping.groups]
        self._take_groups(rules)
        if not sharded_later:
            self._bind(exchange)

    def _bind(self, exchange: mesh.Exchange) -> None:
        """Plan for the parameters now in the param groups, and create their state. Called on all ranks."""
        held = [group["params"] for group in self.param_groups]
        self._names = mesh.names_of(held, self._bound, self._names)
        self._steppers = mesh.bind(exchange, self.param_groups, self._names, self._grouping, self.config)
        self._plan_digest = plan_digest(line for stepper in self._steppers for line in stepper.planned.lines())
        self._bound = [list(group["params"]) for group in self.param_groups]
        trained = [(member.name, member.param) for stepper in self._steppers for member in stepper.members]
        self._watched = WatchedModel(self._model, trained, restore=mesh.reshard)
        self._make_state()
        self._owner_shards()  # adds their keys to ``state``
        self._scattered = scattered(self._steppers)
        if self._attachment is not None and self._attachment.is_on:
            self._attachment.remove()
            self._attachment = Attachment(self._steppers, self._matrix_rules, lambda: self.state)
        if exchange[-1][1].rank == 0:
            warn_of_small_rate(self._grouping.groups)  # as configured, before a schedule changes them
            if self.config.report:
                mesh_stepping.show(self._grouping.routes, self._grouping.groups, self._steppers, self.plan_digest)

    def _make_state(self) -> None:
        """Create every parameter's missing state before the first step, so that every checkpoint has it."""
        before: Mapping[Tensor, dict[str, Any]] = self.__dict__["state"]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for group in self.param_groups:
            for param in group["params"]:
                state[param] = before.get(param) or mesh.new_state(param.detach(), group, self.config)
        self.state, self._stated = state, list(state)

    def _step(self) -> None:
        self._ensure_bound()
        if (changed := self._watched.changes()) is not None:
            if self._attachment is not None:
                self._attachment.remove()
            raise StepRefused(f"{NAME}: {changed} (rank {ranks_of().rank})")
        kept = (self._elementwise, self.state, self._attachment, self.row_scaling)
        step_all(self._steppers, self.param_groups, self._matrix_rules(), *kept, self._options)
        count_block_steps(self.param_groups)

    def attach(self, model: nn.Module | Sequence[nn.Module]) -> Attachment:
        module = mesh.sharded_module(model, "attach")
        self._ensure_bound()
        mesh.reshard(module)
        check_is_of(module, [group["params"] for group in self.param_groups], self._names)
        if self._attachment is not None:
            self._attachment.remove()
        self._attachment = Attachment(self._steppers, self._matrix_rules, lambda: self.state)
        return self._attachment

    def _matrix_rules(self) -> dict[int, MatrixRule]:
        return build_matrix_rules(self.param_groups, self.config)

    @property
    def gradients(self) -> MeshGradients:
        self._ensure_bound()
        return MeshGradients(self._steppers, self._scattered)

    def _everyone(self) -> Collectives:
        return self.gradients.everyone

    def _ensure_bound(self) -> None:
        """Plan again if the param groups have other parameters than were planned for."""
        held = [group["params"] for group in self.param_groups]
        if len(held) == len(self._bound) and all(map(same, held, self._bound)):
            return
        check_sharded(param for params in held for param in params)
        self._bind(mesh.exchange_groups(param for params in held for param in params))

    def named_params(self) -> list[tuple[str, Tensor]]:
        return self.gradients.params()

    def state_store(self) -> mesh_state.MeshStore:
        self._ensure_bound()
        different = any(each is not None and each.different for each in self._scattered)
        return mesh_state.MeshStore(self._steppers, self.param_groups, self.state, different)

    def _owner_shards(self) -> list[mesh_state.OwnerShards]:
        """The owner state. Called on all ranks if any rule keeps some.

        Plans parameters that were sharded later, which otherwise waits for the first step: owner state needs owners.
        """
        rules = self._matrix_rules()
        if not any(map(keeps_state, rules.values())):
            return []
        self._ensure_bound()
        return mesh_state.owner_shards(self._steppers, rules, self.state)

    def state_dict(self) -> dict[str, Any]:
        """As every torch optimizer's, with owner state as DTensors; called on all ranks if there is any owner state."""
        self._options.compare_next()
        shards = self._owner_shards() if self.state else []
        return mesh_state.with_owner_state(super().state_dict(), shards, self._bound)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises ValueError for state that does not fit, before anything is changed.

        State keeps the dtype that it was created with, whatever the parameters'; rules are never loaded. This rank's
        part of a whole tensor is copied.
        """
        self._options.compare_next()
        loaded(self, state_dict, self._take_state)

    def _take_state(self, state_dict: dict[str, Any]) -> None:
        if self.state:
            shards = self._owner_shards()
            mesh_state.check_loadable(state_dict, self.param_groups, self._names, self.state, shards)
            if not state_dict["state"]:  # saved before the first state: start fresh
                self.state = {}
                self._make_state()
            held = [group["params"] for group in self.param_groups]
            mesh_state.take_state(state_dict, held, self.state, shards)
        elif state_dict["state"]:
            raise ValueError(
                "load_state_dict: the model is not sharded yet, so there is no state to load into; call it after "
                "fully_shard, or after the prepare() that shards the model"
            )
        self.set_groups(map(with_options, self.param_groups, deepcopy(state_dict["param_groups"])))
