"""Layer-wise matrix optimizers in plain PyTorch: ``LayerWiseOptimizer(model)`` in place of DDP and an optimizer.

Every rank runs the whole model on its share of a batch. The optimizer reduces gradients during backward to the ranks
that own them, each matrix is updated by its owner once, and new parameters return to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend import torch_adamw
from lwopt_backend.chosen import Rules, arguments_of, settings_lines
from lwopt_backend.config import OwnedConfig
from lwopt_backend.gradient_norms import check_finite, checked_order
from lwopt_backend.grouping import Grouping, group_parameters
from lwopt_backend.linked_optimizer import LinkedOptimizer
from lwopt_backend.owned.backward import Backward
from lwopt_backend.owned.checks import NAME, check_model, check_options
from lwopt_backend.owned.core import OwnedCore, Share, broadcast_buffers
from lwopt_backend.owned.memory import RankMemory, memory_of, memory_of_all
from lwopt_backend.owned.model_hooks import tell_when_loaded, wait_in_forward
from lwopt_backend.owned.report import show
from lwopt_backend.owned.state_dicts import load_state_dict_into, state_dict_of
from lwopt_backend.owned.state_loading import load
from lwopt_backend.owned.state_saving import save
from lwopt_backend.owned.whole_state import held_state
from lwopt_backend.param_groups import as_groups
from lwopt_backend.routing import as_globs, check_globs, named_like
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.collectives import ranks_of


class LayerWiseOptimizer(LinkedOptimizer):
    """A matrix rule for the model's matrices and an element-wise rule for the rest, data-parallel.

    - ``model``: the module, as it is; not wrapped in DDP, which this replaces. Its parameters and buffers become those
      of the group's first rank.
    - ``matrix``, ``lr``: the matrix rule and its learning rate; torch.optim.Muon's other arguments by their names.
    - ``elementwise``, ``elementwise_lr``: the rule of everything else and its rate. Either rule may be given as a
      mapping with its options: ``elementwise={"name": "adamw", "lr": 3e-4, "betas": (0.9, 0.95)}``.
    - ``process_group``: the data-parallel ranks; by default all. Without torch.distributed this process trains alone.
    - ``expert_params``, ``expert_process_group``, ``expert_group_size``: globs of the parameters that only some of the
      ranks share, those ranks, and how many of them own together. Their gradients, too, are means over
      ``process_group``.
    - ``params``: param groups as torch.optim takes them, each with its own ``lr``, ``weight_decay`` and section
      ``"adamw"``; by default all trainable parameters in one group.
    - further options: those of ``OwnedConfig``.

    ``param_groups`` holds, for each group given, a matrix half and an element-wise half. After backward ``param.grad``
    is None, unless ``keep_full_grads``: the owners have the mean gradients. ``step`` uses them up. Everything here is
    called on all ranks. Raises TypeError or ValueError, on all of them, for a model or options that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix: str | Mapping[str, Any] = "muon",
        lr: float | None = None,
        elementwise: str | Mapping[str, Any] = "adamw",
        elementwise_lr: float | None = None,
        *,
        process_group: Any = None,
        params: Iterable[Any] | None = None,
        overrides: Iterable[Mapping[str, Any]] = (),
        expert_params: Sequence[str] = (),
        expert_process_group: Any = None,
        expert_group_size: int | None = None,
        **options: Any,
    ) -> None:
        everyone = ranks_of(process_group)

        def decide() -> tuple[tuple[Rules, OwnedConfig, Grouping, list[Share]], list[list[str]]]:
            check_model(model)
            rules, config = arguments_of(OwnedConfig, matrix, lr, elementwise, elementwise_lr, overrides, options, NAME)
            taken = as_groups([p for p in model.parameters() if p.requires_grad] if params is None else params)
            grouping = group_parameters(model, taken, rules, config, stacks=True)
            experts = as_globs(expert_params, "expert_params")
            check_globs("expert_params", experts, grouping.routes, grouping.routes)
            check_options(config, grouping, experts, expert_process_group, expert_group_size)
            shares = [Share(everyone, everyone.world_size, config.group_size)]
            if experts:
                theirs = ranks_of(expert_process_group, "expert_process_group")
                shares.append(Share(theirs, everyone.world_size, expert_group_size, named_like(experts)))
            return (rules, config, grouping, shares), [settings_lines(rules, config)]

        rules, self.config, self._grouping, shares = agree_in_all([everyone], NAME, decide)
        self.core = OwnedCore(
            self._grouping,
            shares,
            self.config,
            layout=self.config.layout,
            bucket_mb=self.config.bucket_mb,
            grad_dtype=torch.float32 if self.config.grad_dtype == "float32" else None,
            keep_full=self.config.keep_full_grads,
            overlap=self.config.overlap_grad_reduce,
            bus_alignment=self.config.bus_alignment,
        )
        self._plan_digest = self.core.plan_digest
        broadcast_buffers(model, shares)
        super().__init__(torch_adamw.shown(self._grouping.groups), {})
        self._begin(rules, self._grouping.groups, torch_adamw.marks_of(self._grouping.groups))
        self.state.update(held_state(self.core, self.param_groups))
        self._model = model
        self._manager, self.row_scaling = self.core.manager, self.core.row_scaling
        self._backward = Backward(self.core, model)
        self._loaded = False
        tell_when_loaded(model, self._take_loaded)
        if self.config.overlap_param_gather:
            wait_in_forward(model, self._manager)
        if self.config.step_in_backward:
            self._manager.on_launch = self._step_arrived
        if self.config.report and everyone.rank == 0:
            memory = partial(memory_of, self.core, self.param_groups, self.config)
            show(self._grouping.routes, self.core, self.param_groups, memory)

    # The loop

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it backward passes accumulate on this rank; the next one outside reduces what they left."""
        return self._manager.no_sync()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all mean gradients; the norm before clipping, in fp32, equal on all
        ranks. ``foreach`` changes nothing."""
        norm = self.grad_norm(norm_type=norm_type)
        check_finite(norm, norm_type, error_if_nonfinite)
        self.core.gradients.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def grad_norm(self, names: str | Sequence[str] = "*", norm_type: float = 2.0) -> Tensor:
        """The norm of the mean gradients of the parameters whose names match a glob, in fp32."""
        self._finish_backward()
        return self.core.gradients.norm(checked_order(norm_type), self._picked(names))

    def count_zeros(self, names: str | Sequence[str] = "*") -> int:
        """How many elements of the mean gradients are exactly zero."""
        self._finish_backward()
        return self.core.gradients.count_zeros(self._picked(names))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients of the backward passes since the last one; the closure's result.

        A parameter that has no gradient on any rank is left alone, state included; where only some ranks have one, the
        others count as zero. Raises RuntimeError, on all ranks, if a backward pass ended in an exception on one, if the
        model's parameters were replaced, or if some are trained now that were not when the optimizer was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        presences = self._backward.finish()
        if self._loaded:
            self.refresh_masters()
        self._manager.receive_values()
        self.core.step(self.param_groups, presences)
        self._backward.stepped()
        if not self.config.overlap_param_gather:
            self._manager.receive_values()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of an interrupted backward pass included."""
        self._backward.discard()

    def synchronize(self) -> None:
        """Return when the parameters of the last step are on this rank (``overlap_param_gather``)."""
        self._manager.receive_values()

    def refresh_masters(self) -> None:
        """Take the parameters' values into the fp32 masters of 16-bit parameters, after they were changed by hand."""
        self._manager.receive_values()
        self.core.refresh_masters()
        self._loaded = False

    def _take_loaded(self) -> None:
        self._loaded = True

    def _finish_backward(self) -> None:
        """All gradients are at their owners, to be looked at."""
        if self.config.step_in_backward:
            raise RuntimeError("with step_in_backward gradients are used before their norm is known; leave one of both")
        self._backward.finish()

    def _picked(self, names: str | Sequence[str]) -> Callable[[int], bool]:
        globs = [names] if isinstance(names, str) else list(names)
        check_globs("names", globs, self._grouping.routes, self._grouping.routes)
        like = named_like(globs)
        return lambda number: like(self.core.members[number].name)

    def _step_arrived(self, number: int) -> None:
        if number in self.core.stepper.updated:
            raise RuntimeError(
                f"{NAME}: step_in_backward has used the gradients of bucket {number} already; it takes one backward "
                "pass per step: accumulate under no_sync()"
            )
        if self._loaded:
            self.refresh_masters()
        self.core.stepper.step_arrived(self.param_groups)

    # Checkpoints

    def save_state_dict(self, path: str | PathLike[str]) -> None:
        """Write optimizer state into a folder of its own, for any ranks and layout; the model saves its weights."""
        save(self.core, self.param_groups, Path(path))

    def load_state_dict_from(self, path: str | PathLike[str]) -> None:
        """Read what this rank owns of what ``save_state_dict`` wrote; before or after the model's weights."""
        self.link_groups(load(self.core, self.param_groups, Path(path)))
        self._loaded = True

    def state_dict(self) -> dict[str, Any]:
        """This rank's own part of the state, for the same rank under the same plan; of AdamW alone torch's, whole."""
        return state_dict_of(self, self.core)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a ``state_dict``. Raises ValueError, on all ranks, if it is another rank's or of another plan."""
        load_state_dict_into(self, self.core, state_dict, self.link_groups)
        self._loaded = True

    def memory_report(self) -> list[RankMemory]:
        """Per rank of the process group, the bytes it holds for this optimizer."""
        return memory_of_all(self.core, self.param_groups, self.config)

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has sent so far, by what they were; flags and norms, a few per parameter, not."""
        return dict(self._manager.ledger.sent)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler. Raises RuntimeError without kept gradients, for it looks at ``param.grad``."""
        if not self.config.keep_full_grads:
            raise RuntimeError(f"{NAME}: GradScaler unscales param.grad, which only owners have; set keep_full_grads")
        return False

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{NAME} holds buffers and process groups and cannot be copied or pickled")
