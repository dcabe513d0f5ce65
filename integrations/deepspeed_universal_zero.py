"""Universal checkpoints in engines with ZeRO's storage: a rank takes the parts of whole tensors that it stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from lwopt_backend.checkpoint.contents import Param
from lwopt_backend.integrations import deepspeed_checkpoints
from lwopt_backend.integrations.deepspeed_binding import Binding
from lwopt_backend.integrations.deepspeed_engine import sharding_stage
from lwopt_backend.integrations.deepspeed_universal_choice import STEP, Choice, Stepped, Trained
from lwopt_backend.integrations.deepspeed_universal_loading import load_instead
from lwopt_backend.replicated_state import take_part
from lwopt_backend.runtime.ranks import Collectives


def prepare_loading(engine: DeepSpeedEngine, optimizer: Any, ranks: Sequence[Collectives]) -> None:
    """Make ``engine.load_checkpoint`` load universal checkpoints if it shall, else check DeepSpeed's own first.

    Called once for an engine, on all ranks. ``optimizer`` is ours, ``ranks`` are the groups that share parameters with
    this rank.
    """
    if engine.load_universal_checkpoint():
        load_instead(engine, lambda: ZeROStorage(optimizer))
    else:
        check = partial(deepspeed_checkpoints.check, engine)
        deepspeed_checkpoints.guard_loading(optimizer.name, engine, ranks, check)


class ZeROStorage:
    """What an engine stores of the parameters that ``optimizer``, which is ours, trains. Made on all ranks."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._binding, self._tensors = optimizer.prepared()
        self.ranks: Sequence[Collectives] = self._binding.ranks

    def groups(self) -> Sequence[Mapping[str, Any]]:
        groups: Sequence[Mapping[str, Any]] = self._optimizer.param_groups
        return groups

    def stepped(self) -> list[Stepped]:
        return [
            Stepped(
                unit.group,
                plan.rule,
                tuple(Trained(spec.name, spec.shape, blocks) for spec, blocks in zip(plan.specs, plan.blocks)),
            )
            for unit, plan in zip(self._binding.units, self._binding.plans)
        ]

    @torch.no_grad()
    def put(self, choice: Choice, with_state: bool) -> None:
        """Weights, master weights where there are, and state, as far as this rank has them."""
        binding = self._binding
        for unit, plan, tensor in zip(binding.units, binding.plans, self._tensors):
            state = self._optimizer.state[tensor]
            of_unit = [choice.params[spec.name] for spec in plan.specs]
            if binding.replicated:
                for param, saved in zip(unit.params, of_unit):
                    param.data.copy_(saved.best.read())
                if with_state:
                    whole = [_States(saved, list(state)) for saved in of_unit]
                    for key, value in take_part(plan, whole, unit.ranks.rank, binding.engine.device).items():
                        state[key].copy_(value)
                continue
            for index, saved in enumerate(of_unit):
                held = plan.layout.fragment(index, unit.ranks.rank)
                if held is None:
                    continue
                tensor.data.narrow(0, held.offset, held.numel).copy_(saved.best.piece(held.start, held.stop).read())
                for key in (key for key, value in state.items() if with_state and value.ndim):
                    part = saved.states[key].piece(held.start, held.stop).read()
                    state[key].narrow(0, held.offset, held.numel).copy_(part)
            if with_state and STEP in state:
                state[STEP].fill_(of_unit[0].step)

    def finish(self, choice: Choice, with_state: bool) -> None:
        """Hyperparameters and what owners keep; then the module's parameters show the new master weights."""
        if with_state:
            self._optimizer.take_loaded(choice.options, dict(_owner_states(self._binding, choice.params)))
        engine = self._binding.engine
        stage, wrapper = sharding_stage(engine), engine.optimizer
        if stage in (1, 2):
            wrapper.update_lp_params()
        elif stage == 3:
            wrapper.checkpoint_event_prologue()
            for number in range(len(wrapper.fp32_partitioned_groups_flat)):
                wrapper._reassign_or_swap_out_partitioned_parameters(number)
            wrapper.checkpoint_event_epilogue()


class _States(Mapping[str, Tensor]):
    """The states ``keys`` of a parameter, which are read when they are asked for."""

    def __init__(self, param: Param, keys: Sequence[str]) -> None:
        self._param = param
        self._keys = keys

    def __getitem__(self, key: str) -> Tensor:
        if key == STEP:
            return torch.tensor(float(self._param.step or 0))
        return self._param.states[key].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _owner_states(binding: Binding, params: Mapping[str, Param]) -> Iterator[tuple[str, dict[str, Any]]]:
    """By a matrix's name, what is kept of those that this rank owns."""
    for unit, plan in zip(binding.units, binding.plans):
        places = [(params[s.name], place) for s, blocks in zip(plan.specs, plan.blocks) for place in range(len(blocks))]
        if plan.matrices is None:
            continue
        for atom, owner, (param, place) in zip(plan.matrices.atoms, plan.matrices.ownership.owners, places):
            if owner == unit.ranks.rank and place in param.owner_states:
                yield atom.name, dict(param.owner_states[place])
