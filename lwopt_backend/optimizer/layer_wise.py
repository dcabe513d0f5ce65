"""``LayerWiseOptimizer(model)``: layer-wise matrix optimizers in plain PyTorch and on FSDP2.

``PlainOptimizer`` trains a plain model: backward reduces gradients to their owners, ``step()`` sends new parameters to
all ranks. ``MeshOptimizer`` trains a ``fully_shard`` model: tensors stay sharded DTensors; ``step()`` sends the pieces
of each matrix to one rank of its mesh, and returns the pieces of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lwopt_backend.config.hosts import NAME, HostConfig, PlainConfig
from lwopt_backend.engines.base import BaseOptimizer, picked
from lwopt_backend.engines.buffers.gradients import BufferGradients
from lwopt_backend.engines.first_pass import FirstPass
from lwopt_backend.engines.fsdp2.gradients import MeshGradients
from lwopt_backend.engines.fsdp2.plan import is_sharded
from lwopt_backend.engines.gradients import ClipGroups, GradientNorms, Guard, Pick, checked_order
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Given, Grouping
from lwopt_backend.groups.members import Members
from lwopt_backend.groups.registry import with_torchs_keys
from lwopt_backend.plan.cost import RankMemory
from lwopt_backend.rules.protocol import AFTER, one_call
from lwopt_backend.runtime.state import StateStore
from lwopt_backend.runtime.undisturbed import uncompiled, undisturbed


class PlainArguments(NamedTuple):
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
        model: a plain module without a DDP wrapper, a ``fully_shard`` module, or a list of either, such as the pipeline
            stages of this rank.
        matrix: name of the matrix rule, or a mapping with its ``name`` and options.
        lr: learning rate of the matrix rule. Default: the rule's; Muon, NorMuon and AdaMuon have none.
        elementwise: name of the rule of all other parameters, or a mapping like ``{"name": "adamw", "eps": 1e-6}``.
        elementwise_lr: learning rate of the element-wise rule. Default: the rule's.
        params: param groups as in torch.optim, each with its own ``lr``, ``weight_decay`` and section ``"adamw"``.
            Default: one group of all trainable parameters.
        overrides: other options for some parameters: mappings with ``matrix`` or ``elementwise``, and with ``params``
            (globs on names, or a function of name, parameter and module) or ``attribute`` (one that is true of them).
        example: ``(args, kwargs)``, arguments of the model's ``forward``, of which shapes and dtypes count; of a list
            of modules, a list with one for each. The model's code is followed on them once, and what it does with a
            weight decides what the weight is (``explain``). The same on all ranks. Default: guesses, module by module.
        sharded_later: plan at the first step, for a model that will be sharded later, as Accelerate's ``prepare`` does.
        process_group: data-parallel ranks of a plain model. Default: all ranks, or this process alone.
        expert_params: globs of the parameters that only some ranks of a plain model share. Their gradients are also
            means over ``process_group``.
        expert_process_group: ranks that share the parameters in ``expert_params``.
        expert_group_size: number of ranks in ``expert_process_group`` that hold one instance of the experts.
        **options: the matrix rule's options by name, and the engine's. Both engines have ``include``, ``exclude``,
            ``atoms``, ``convolutions``, ``allow_no_matrix``, ``exchange_dtype``, ``capture``, ``clip_groups``,
            ``on_nonfinite``, ``skip_above`` and ``report``. A ``fully_shard`` model has ``bucket_matrices``,
            ``bucket_numel``, ``copies`` and ``state_dtype``. A plain model has ``layout``, ``bucket_mb``,
            ``pad_buckets_for_high_nccl_busbw``, ``group_size``, ``grad_dtype``, ``keep_full_grads``,
            ``broadcast_buffers``, ``overlap_grad_reduce`` and ``overlap_param_gather``.

    Raises:
        TypeError, ValueError: on all ranks, if the model or an option is not supported.

    Examples:
        >>> fully_shard(model)
        >>> optimizer = LayerWiseOptimizer(model, lr=0.02, elementwise_lr=3e-4, weight_decay=0.1)
    """

    config: Any
    _grouping: Grouping
    _model: nn.Module

    def __new__(cls, model: Any = None, *args: Any, sharded_later: bool = False, **options: Any) -> LayerWiseOptimizer:
        if cls is LayerWiseOptimizer:
            from lwopt_backend.optimizer import MeshOptimizer, PlainOptimizer

            cls = MeshOptimizer if sharded_later or is_sharded(model) else PlainOptimizer
        return super().__new__(cls)

    @undisturbed()
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
        example: Any = None,
        sharded_later: bool = False,
        process_group: Any = None,
        expert_params: Sequence[str] = (),
        expert_process_group: Any = None,
        expert_group_size: int | None = None,
        **options: Any,
    ) -> None:
        options |= {"matrix": matrix, "elementwise": elementwise, "overrides": overrides}
        rates = {"lr": lr, "elementwise_lr": elementwise_lr}
        given = Given({**options, **{key: rate for key, rate in rates.items() if rate is not None}}, params, example)
        plain = PlainArguments(process_group, expert_params, expert_process_group, expert_group_size)
        self._train(model, given, plain, sharded_later)
        self._first_pass = FirstPass(self._model, self._grouping, self)

    def _train(self, model: Any, given: Given, plain: PlainArguments, sharded_later: bool) -> None:
        """Route, plan and create the state. Called on all ranks."""
        raise TypeError(f"subclass PlainOptimizer or MeshOptimizer, not {NAME}, which chooses one of them")

    def _take_groups(self, rules: Rules) -> None:
        """Start with the routed param groups, without the marks that engines compare."""
        marks = ("from_group", "overrides")
        groups = [{k: v for k, v in group.items() if k not in marks} for group in self._grouping.groups]
        super().__init__(with_torchs_keys(groups), {})
        self._begin(rules, self._grouping.trains_matrices, self._grouping.rate, self._grouping.groups)
        self._checked.members = Members(self.param_groups, self._grouping.names)
        checked = self._checked  # not self, which would be a reference cycle
        clip_groups = ClipGroups(self.config.clip_groups, self._grouping.clip_groups, lambda: checked.out)
        self._norms = GradientNorms(clip_groups, Guard(self.name, self.config.on_nonfinite, self.config.skip_above))
        self._settles = True  # in a step; ModuleOptimizers settles for all modules

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients since the last step.

        A parameter without a gradient on any rank keeps its value and state. If only some ranks have a gradient, the
        gradients of the others count as zero; for a parameter that ``fully_shard`` shards, that is an error. A step
        that ``on_nonfinite`` or ``skip_above`` skips changes no weight and no state on any rank; ``skipped`` says so.

        Args:
            closure: computes the loss and its gradients again, as in torch.optim.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: on all ranks, for non-finite gradients with ``on_nonfinite="raise"``, and if options differ
                between ranks, which every 64th step compares; for a plain model also if a backward pass failed on any
                rank, or if other parameters are trained than before. Other errors are raised on one rank, for which the
                others wait until its program is ended.
        """
        with one_call(self, begins=True, ends=True):
            loss = None if closure is None else torch.enable_grad()(closure)()
            with undisturbed(), torch.no_grad():
                try:
                    self._begin_step()
                    skips = self._settles and self._norms.settle(lambda: self.gradients)
                    self._skip() if skips else self._step()
                finally:
                    self._end_step()
            if self._optimizer_step_post_hooks or AFTER:  # which may read parameters
                self.synchronize()
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # see one_call

    def _begin_step(self) -> None:
        """Raises RuntimeError, before anything is changed, if this step cannot be taken. Called on all ranks."""

    def _step(self) -> None:
        raise NotImplementedError

    def _skip(self) -> None:
        """End a step that changes nothing. Called on all ranks."""
        raise NotImplementedError

    @property
    def skipped(self) -> bool:
        """Whether the last ``step`` was skipped, by ``on_nonfinite`` or ``skip_above``; the same on all ranks."""
        return self._norms.guard.skipped

    def _skipped_steps(self) -> dict[str, int]:
        return self._norms.guard.take()

    def _end_step(self) -> None:
        """The step, or the attempt, is over."""

    @undisturbed()
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all gradients, however they are stored.

        A plain model adds up in fp64, without ``foreach``. If a mesh leaves out some ranks, those have other parameters
        (experts), which are added, or ``copies``, which count once. Parameters in ``clip_groups`` do not count: their
        groups' norms clip them, here or, without a call, in ``step``.

        Args:
            max_norm: largest norm after clipping.
            norm_type: order of the norm; ``inf`` is the largest absolute value.
            error_if_nonfinite: raise if the norm is NaN or infinite.
            foreach: as in torch; for a ``fully_shard`` model.

        Returns:
            The norm before clipping, a plain fp32 scalar, equal on all ranks. For one mesh it has torch's bits.

        Raises:
            RuntimeError: on all ranks, for a non-finite norm with ``error_if_nonfinite``.
            ValueError: for a ``norm_type`` that is not positive.
        """
        return self._norms.clip(self.gradients, max_norm, norm_type, error_if_nonfinite, foreach).float()

    @undisturbed()
    @torch.no_grad()
    def grad_norm(self, names: str | Sequence[str] = "*", norm_type: float = 2.0) -> Tensor:
        """The norm of mean gradients, between backward and step. Call it on all ranks.

        Args:
            names: a glob, or several, on names of parameters.
            norm_type: order of the norm.

        Returns:
            The norm of the gradients of the parameters whose names match, an fp32 scalar, equal on all ranks.

        Raises:
            ValueError: for a glob that no name matches, and for a ``norm_type`` that is not positive.
        """
        return self.gradients.norm(checked_order(norm_type), self._picked(names)).float()

    @undisturbed()
    def count_zeros(self, names: str | Sequence[str] = "*") -> int:
        """Count the zeros in mean gradients, between backward and step. Call it on all ranks.

        A parameter without a gradient counts as zeros.

        Args:
            names: a glob, or several, on names of parameters.

        Returns:
            The number of elements, each counted once, equal on all ranks.

        Raises:
            ValueError: for a glob that no name matches.
        """
        return self.gradients.count_zeros(self._picked(names))

    def _picked(self, names: str | Sequence[str]) -> Pick:
        return picked(names, [name for name, _ in self.named_params()], self._checked.out)

    @property
    def clip_group_norms(self) -> dict[str, Tensor]:
        """The norm of each group in ``clip_groups`` before it was last clipped, fp32, the same on all ranks."""
        return self._norms.named

    def _norms_before_clipping(self) -> tuple[Any, Mapping[str, Any]]:
        return self._norms.of_groups.get(None), self._norms.named

    @property
    def gradients(self) -> MeshGradients | BufferGradients:
        """Norm and scaling of the reduced gradients. Read on all ranks."""
        raise NotImplementedError

    def named_params(self) -> list[tuple[str, Tensor]]:
        """Name the trained parameters.

        Returns:
            Pairs of a name and a parameter.
        """
        raise NotImplementedError

    def state_store(self) -> StateStore:
        """Open this rank's weights and state for ``lwopt_backend.migration``.

        Returns:
            The store, which reads and writes them by name.
        """
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the parameters of the last step are on this rank (``overlap_param_gather``)."""

    @property
    def attach(self) -> NoReturn:
        """AttributeError: ``step`` does the exchange that ``attach`` began in the backward pass."""
        raise AttributeError(
            f"{NAME}.attach is gone: step() does the exchange that it began in the backward pass, with the same bits. "
            "Delete the call, and that of remove() on what it returned; nothing takes their place"
        )

    # For plain models

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank in backward passes within it; the next pass outside reduces them all.

        Returns:
            A context manager.

        Raises:
            TypeError: for a ``fully_shard`` model, which has ``set_requires_gradient_sync``.

        Examples:
            >>> with optimizer.no_sync():
            ...     model(first).sum().backward()
            >>> model(second).sum().backward()
        """
        raise self._only_of(PlainConfig, "no_sync")

    def refresh_masters(self) -> None:
        """Copy 16-bit parameters into their fp32 masters, after they were changed by hand. For plain models.

        Raises:
            TypeError: for a ``fully_shard`` model.
        """
        raise self._only_of(PlainConfig, "refresh_masters")

    def save_state_dict(self, path: str | PathLike[str], /, **more: Any) -> None:
        """Write weights, state and ``more`` to a folder that torch.distributed.checkpoint reads. For plain models.

        All ranks must see the folder, which holds only this checkpoint; an earlier one is replaced atomically.

        Args:
            path: the folder.
            **more: other entries: tensors, numbers, strings, and dicts, lists and tuples of these.

        Raises:
            OSError, ValueError: on all ranks, for an error on any rank.
            TypeError: for a ``fully_shard`` model.

        Examples:
            >>> optimizer.save_state_dict("checkpoints/100", step=100)
        """
        raise self._only_of(PlainConfig, "save_state_dict")

    def load_state_dict_from(self, path: str | PathLike[str], *, check: bool = True) -> dict[str, Any]:
        """Load any engine's ``{"model": ..., "optimizer": ...}``, saved on any number of ranks. For plain models.

        Args:
            path: the folder that ``save_state_dict`` or torch.distributed.checkpoint wrote.
            check: first compare all bytes with their checksums. Each rank reads a share of the files.

        Returns:
            The folder's other entries.

        Raises:
            ValueError: on all ranks, before anything is changed, for what does not fit.
            TypeError: for a ``fully_shard`` model.
        """
        raise self._only_of(PlainConfig, "load_state_dict_from")

    def memory_report(self) -> list[RankMemory]:
        """Measure what each rank stores. For plain models.

        Returns:
            Per rank of the process group, the bytes that it stores for this optimizer.

        Raises:
            TypeError: for a ``fully_shard`` model.
        """
        raise self._only_of(PlainConfig, "memory_report")

    def traffic(self) -> dict[str, int]:
        """Count what this rank has sent. For plain models.

        Returns:
            Bytes so far by kind, without flags and norms, which are a few bytes per parameter.

        Raises:
            TypeError: for a ``fully_shard`` model.
        """
        raise self._only_of(PlainConfig, "traffic")

    def _only_of(self, config: type[HostConfig], name: str) -> TypeError:
        return TypeError(f"{NAME}: {type(self.config).lacks(name, config)}")
