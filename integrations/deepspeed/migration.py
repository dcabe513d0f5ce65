"""Whole tensors by parameter name into the optimizer of a DeepSpeed engine, as ``lwopt_backend.migration`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from lwopt_backend import migration
from lwopt_backend.integrations.deepspeed.optimizer import EngineOptimizer, ZeROLayerWise
from lwopt_backend.integrations.deepspeed.owned import OwnedLayerWise
from lwopt_backend.integrations.deepspeed.zero import Binding, Unit, load_whole, save_whole
from lwopt_backend.migration import Form, Named, check_form
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.storage.flat import GroupPlan

WHAT = migration.WHAT
States = Mapping[str, Mapping[str, Tensor]]


def load_named_state(engine: DeepSpeedEngine, named: Named, *, strict: bool = True) -> list[str]:
    """``lwopt_backend.migration.load_named_state`` for an engine, at every stage and with both storages.

    Best right after ``deepspeed.initialize`` or ``load_checkpoint``, in any case between steps; what a first step would
    make of the state is made here. In a pipeline every stage takes its own parameters. Called on all ranks. Raises
    ValueError as it does, and for experts, of which ranks have different ones under one name; for element-wise
    parameters whose counts of steps differ, because DeepSpeed steps a param group as one tensor.
    """
    optimizer = _ours(engine, WHAT)
    if isinstance(optimizer, OwnedLayerWise):
        return migration.load_named_state(optimizer, named, strict=strict)
    assert isinstance(optimizer, ZeROLayerWise)
    binding, held = _held(optimizer)
    targets = [
        migration.Target(spec.name, tuple(spec.shape), optimizer.param_groups[unit.group])
        for unit, plan, _ in held
        for spec in plan.specs
    ]
    elsewhere = () if binding.stage is None else {route.name for route in binding.stage.all_routes}

    def check() -> tuple[States, list[list[str]]]:
        if any(optimizer.param_groups[unit.group].get("moe") for unit in binding.units):
            raise ValueError(f"{WHAT}: ranks have different experts under the same names")
        taken = migration.select(targets, named, strict=strict, elsewhere=elsewhere)
        for unit, plan, state in held:
            _check_counters(unit, plan, state, taken)
        return taken, [migration.lines(named) for _ in binding.ranks]

    taken = agree_in_all(binding.ranks, WHAT, check)
    if binding.replicated:
        _put_whole(binding, optimizer.state, taken)
    else:
        for unit, plan, state in held:
            _put_fragments(unit, plan, state, taken)
    return migration.left(targets, taken)


def change_momentum_form(engine: DeepSpeedEngine, target: Form) -> None:
    """``lwopt_backend.migration.change_momentum_form`` for an engine. Called on all ranks, between steps."""
    optimizer = _ours(engine, "change_momentum_form")
    if isinstance(optimizer, OwnedLayerWise):
        migration.change_momentum_form(optimizer, target)
        return
    check_form("target", target)
    assert isinstance(optimizer, ZeROLayerWise)
    _, held = _held(optimizer)
    groups = optimizer.param_groups
    migration.rescale([(groups[unit.group], state) for unit, _, state in held], groups, target)


def _ours(engine: Any, what: str) -> EngineOptimizer:
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, EngineOptimizer):
        raise TypeError(
            f"{what}: expected a DeepSpeed engine whose optimizer is LayerWise or LayerWiseMuon, found "
            f"{type(engine).__name__} with {type(optimizer).__name__}"
        )
    return optimizer


def _held(optimizer: ZeROLayerWise) -> tuple[Binding, list[tuple[Unit, GroupPlan, dict[str, Any]]]]:
    """What is stepped at a time, with its plan and this rank's state, which is made if no step has been."""
    binding, tensors = optimizer.prepared()
    return binding, [(u, plan, optimizer.state[t]) for u, plan, t in zip(binding.units, binding.plans, tensors)]


def _check_counters(unit: Unit, plan: GroupPlan, state: Mapping[str, Any], taken: States) -> None:
    """Raises ValueError if parameters that are stepped as one tensor come with different counts."""
    for key in (key for key, tensor in state.items() if tensor.ndim == 0):
        counts = {spec.name: float(taken[spec.name][key]) for spec in plan.specs if spec.name in taken}
        if len(set(counts.values())) > 1 or (counts and len(counts) < len(plan.specs)):
            raise ValueError(
                f"{WHAT}: DeepSpeed steps the parameters of param group {unit.group} as one tensor with one {key!r}; "
                f"expected the same of all {len(plan.specs)} of them, found {counts}"
            )


def _put_fragments(unit: Unit, plan: GroupPlan, state: Mapping[str, Tensor], taken: States) -> None:
    """Stages 1 to 3: of every parameter the elements that this rank stores."""
    for index, spec in enumerate(plan.specs):
        held = plan.layout.fragment(index, unit.ranks.rank)
        for key, value in taken.get(spec.name, {}).items():
            if state[key].ndim == 0:
                state[key].copy_(value)
            elif held is not None:
                part = value.reshape(-1)[held.start : held.stop]
                state[key].narrow(0, held.offset, held.numel).copy_(part)


def _put_whole(binding: Binding, states: Mapping[Tensor, dict[str, Any]], taken: States) -> None:
    """Stage 0: of every parameter what this rank steps. What is not taken is gathered, to be put back as it was."""
    specs = [spec for plan in binding.plans for spec in plan.specs]
    whole: dict[int, Mapping[str, Any]] = {}
    if not all(spec.name in taken for spec in specs):
        whole.update(binding.ranks[0].gather_objects(save_whole(binding, states))[0])
    whole.update({place: taken[spec.name] for place, spec in enumerate(specs) if spec.name in taken})
    for tensor, part in load_whole(binding, whole).items():
        for key, value in part.items():
            states[tensor][key].copy_(value)
