"""``LayerWiseOptimizer`` of a plain model: backward reduces gradients to owners, ``step()`` sends parameters back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config.hosts import NAME, PlainConfig
from lwopt_backend.engines import report
from lwopt_backend.engines.base import loaded, saved
from lwopt_backend.engines.buffers import model as of_model
from lwopt_backend.engines.buffers.gradients import BufferGradients
from lwopt_backend.engines.buffers.hooks import Hook, remove_with, tell_when_loaded, wait_in_forward
from lwopt_backend.engines.buffers.loading import take_state
from lwopt_backend.engines.buffers.model import (
    StepMeeting,
    check_model,
    check_not_compiled,
    check_options,
    check_trained,
)
from lwopt_backend.engines.buffers.shown import gradients_shown
from lwopt_backend.engines.buffers.state import BufferStore, held_state, state_of
from lwopt_backend.engines.buffers.step import BufferCore, ParamSet
from lwopt_backend.engines.buffers.untrained import Buffers, Unreduced, broadcast_untrained
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Given, Grouping, as_saved
from lwopt_backend.groups.members import is_by_number
from lwopt_backend.groups.param_groups import settings_lines
from lwopt_backend.groups.rates import warn_of_small_rate
from lwopt_backend.optimizer.layer_wise import LayerWiseOptimizer, PlainArguments
from lwopt_backend.plan.cost import RankMemory
from lwopt_backend.routing.models import as_module, called
from lwopt_backend.routing.routing import as_globs, check_globs, named_like
from lwopt_backend.runtime.agreement import agree
from lwopt_backend.runtime.collectives import Collectives, ranks_of
from lwopt_backend.runtime.presence import Presence
from lwopt_backend.runtime.undisturbed import undisturbed


class PlainOptimizer(LayerWiseOptimizer):
    """``LayerWiseOptimizer`` of a plain model; copies all parameters and buffers from the group's first rank to all.

    After backward, the owners have the mean gradients, which ``step`` frees. ``param.grad`` is a ``ReducedGradient``,
    with ``keep_full_grads`` the mean gradient itself.
    """

    config: PlainConfig

    def _train(self, model: Any, given: Given, plain: PlainArguments, sharded_later: bool) -> None:
        everyone = ranks_of(plain.process_group)

        def decide() -> tuple[tuple[Any, Rules, PlainConfig, Grouping, list[ParamSet]], list[str]]:
            module = as_module(model, NAME)
            check_model(module)
            rules, config, grouping = given.decide(PlainConfig, module)
            check_trained(grouping)
            if config.overlap_param_gather:
                check_not_compiled(module)
            experts = as_globs(plain.expert_params, "expert_params")
            check_globs("expert_params", experts, grouping.routes, grouping.routes)
            check_options(config, grouping, experts, *plain[2:])
            sets = [ParamSet(everyone, everyone.world_size, config.group_size)]
            if experts:
                theirs = ranks_of(plain.expert_process_group, "expert_process_group")
                sets.append(ParamSet(theirs, everyone.world_size, plain.expert_group_size, named_like(experts)))
            lines = [*settings_lines(rules, config), *grouping.followed]
            return (module, rules, config, grouping, sets), lines

        model, rules, self.config, self._grouping, sets = agree(everyone, NAME, decide)
        trained = {id(param) for group in self._grouping.groups for param in group["params"]}
        kept = () if self.config.broadcast_buffers else {name for name, _ in model.named_buffers()}
        broadcast_untrained(model, trained, sets, lambda name: name not in kept)
        self.core = BufferCore(
            self._grouping,
            sets,
            self.config,
            grad_dtype=torch.float32 if self.config.grad_dtype == "float32" else None,
            keep_full=self.config.keep_full_grads,
            overlap=self.config.overlap_grad_reduce,
        )
        self._plan_digest = self.core.plan_digest
        self._take_groups(rules)
        self.state.update(held_state(self.core, self.param_groups))
        self._model = model
        self._manager, self.row_scaling = self.core.manager, self.core.row_scaling
        if not self.config.keep_full_grads:
            self._manager.marks.extend(gradients_shown(self._manager.names, self._manager.params, self))
        self._meeting = StepMeeting(self.core, model, self._checked)
        self._presences: list[Presence] | None = None  # in a step, once ranks have met
        self._buffers = Buffers(model, sets if self.config.broadcast_buffers else (), self._manager.ledger.send)
        self._manager.pass_ended = self._buffers.send
        if self._buffers.any:
            receives = Hook(self._buffers, lambda buffers, *args: buffers.receive())
            remove_with(self._buffers, [module.register_forward_pre_hook(receives) for module in called(model)])
        self._unreduced = Unreduced(model, trained, everyone.world_size)
        self._loaded = False
        tell_when_loaded(model, self._take_loaded)
        if self.config.overlap_param_gather:
            wait_in_forward(model, self._manager)
            self.core.stepper.last_first = True
        if everyone.rank == 0:
            warn_of_small_rate(self._grouping.groups)
            if self.config.report:
                groups = self._grouping.groups
                plans = of_model.described(self.core, groups)
                members = self.core.members
                device = members[0].param.device
                shown = (self._grouping.routes, groups, plans, self.core.plan_digest, members, device)
                self._shown_rates = report.show(*shown)

    # The loop

    def no_sync(self) -> AbstractContextManager[None]:
        return self._manager.no_sync()

    def _begin_step(self) -> None:
        if self._presences is None:
            self._integrity.check()
            self.core.check_loaded()
            self._presences = self._meeting.finish(self.param_groups)
            self._unreduced.look()
            self._buffers.receive()

    def _step(self) -> None:
        assert self._presences is not None
        self._check_groups(self.param_groups)
        self._rates.warn(self.name, self.param_groups)
        if self._loaded:
            self.refresh_masters()
        self._manager.receive_values()
        with self._integrity.changing():
            self.core.step(self.param_groups, self._presences)
        if not self.config.overlap_param_gather:
            self._manager.receive_values()
        self._meeting.stepped()

    def _skip(self) -> None:
        self.row_scaling.clear()
        assert self._presences is not None
        self.core.end_step(self._presences)
        self._meeting.stepped()

    def _end_step(self) -> None:
        self._presences = None

    @undisturbed()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of an interrupted backward pass included, or set them to zero as torch does."""
        self._meeting.discard(to_zero=not set_to_none)

    @undisturbed()
    def synchronize(self) -> None:
        self._manager.receive_values()

    @undisturbed()
    def refresh_masters(self) -> None:
        self._manager.receive_values()
        self.core.refresh_masters()
        self._loaded = False

    def _take_loaded(self) -> None:
        self._loaded = True
        self._buffers.receive(keep=True)

    @property
    def gradients(self) -> BufferGradients:
        """Waits until all gradients are at their owners. Read on all ranks, which compare what they have done."""
        if self._presences is None:
            self._meeting.finish(self.param_groups, reads=True)
        return self.core.gradients

    @property
    def version(self) -> int:
        """As ``Reader``."""
        return self._manager.version

    def shown(self, *, order: float | None = None, together: bool = False, scales: bool = False) -> BufferGradients:
        """As ``Reader``."""
        manager, said = self._manager, ""
        if torch._C._current_graph_task_id() != -1:
            said = "expected the end of backward, because ranks add it up until then; use it after backward"
        elif not manager.has_unused_gradients:
            said = "the step has used it; read it before the step"
        elif manager.apart and self._everyone().world_size > 1:
            if scales and not manager.passes:
                return self.core.gradients
            said = "ranks have not added up the passes under no_sync(); use it after a pass outside"
        if said:
            raise RuntimeError(f"{NAME}: param.grad: {said}")
        if together or not self._meeting.has_met or not (order is None or self.core.gradients.knows(order)):
            return self.gradients
        return self.core.gradients

    def zero(self, numbers: Sequence[int]) -> None:
        """As ``Reader``."""
        self._manager.zero(numbers)

    # Checkpoints

    def named_params(self) -> list[tuple[str, Tensor]]:
        return [(member.name, member.param) for member in self.core.members]

    def state_store(self) -> BufferStore:
        return BufferStore(self.core, self.param_groups)

    @undisturbed()
    def save_state_dict(self, path: str | PathLike[str], /, **more: Any) -> None:
        from lwopt_backend.engines.buffers import files

        files.save(self.core, self.param_groups, self._model, Path(path), more)

    @undisturbed()
    def load_state_dict_from(self, path: str | PathLike[str], *, check: bool = True) -> dict[str, Any]:
        from lwopt_backend.engines.buffers import files

        self._buffers.receive()
        with as_saved(self._grouping):
            groups, more = files.load(self.core, self.param_groups, self._model, Path(path), check)
        self.take_groups(groups)
        return more

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        """Replace the param groups by those that were loaded with state."""
        self.set_groups(groups)
        self._meeting.options.compare_next()
        self._loaded = True

    @undisturbed()
    def state_dict(self) -> dict[str, Any]:
        """This rank's pieces of the state, which torch.distributed.checkpoint saves for any number of ranks."""
        self._meeting.options.compare_next()
        return saved(self, self._state)

    def _state(self) -> dict[str, Any]:
        self._checked.arrange(self.param_groups)
        found = state_of(self.core, self.param_groups)
        self._checked.sign(found["param_groups"])
        return found

    @undisturbed()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this rank, or one of whole tensors. Called on all ranks.

        What does not fit raises, on all of them, before anything is changed.
        """

        def take(found: dict[str, Any]) -> None:
            if is_by_number(found):
                self._checked.arrange(self.param_groups)
            self.take_groups(take_state(self.core, self.param_groups, found, self._checked.members))

        loaded(self, state_dict, take)

    @undisturbed()
    def memory_report(self) -> list[RankMemory]:
        return of_model.memory_of_all(self.core, self.param_groups)

    def traffic(self) -> dict[str, int]:
        return dict(self._manager.ledger.sent)

    def _everyone(self) -> Collectives:
        return self.core.everyone
