"""Steps of one planned param group whose pieces lie in one flat tensor on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lwopt_backend.config import LayerWiseMuonConfig
from lwopt_backend.group_plan import GroupPlan
from lwopt_backend.registry import ELEMENTWISE_RULES, build_matrix_rule, elementwise_options, rule_named
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.elementwise import step_elementwise
from lwopt_backend.runtime.stepper import MatrixStepper
from lwopt_backend.runtime.storage import FlatStorage, Slices


class GroupStepper:
    """Steps one group. ``flat`` is this rank's partition of its weights; hyperparameters are read anew every step."""

    def __init__(
        self,
        plan: GroupPlan,
        group: Mapping[str, Any],
        flat: Tensor,
        collectives: Collectives,
        config: LayerWiseMuonConfig,
    ) -> None:
        self._plan = plan
        self._flat = flat
        self._rank = collectives.rank
        self._config = config
        self._matrices: MatrixStepper | None = None
        if plan.matrices is not None:
            batch_numel = 0 if flat.device.type == "cpu" else config.bucket_numel
            self._matrices = MatrixStepper(plan.matrices, collectives, flat.device, batch_numel=batch_numel)

    def fill_state(self, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Add the state tensors that a fresh optimizer lacks; what a checkpoint restored is kept."""
        for key, tensor in rule_named(self._plan.rule).new_state(self._flat, group).items():
            state.setdefault(key, tensor)

    def step(self, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """One step from ``flat.grad`` with the hyperparameters in ``group``. Called on all ranks of the group."""
        if self._matrices is None:
            optimizer = ELEMENTWISE_RULES[self._plan.rule].optimizer
            options = elementwise_options(self._plan.rule, group)
            step_elementwise(optimizer, options, [Slices(self._flat, self._flat.grad, state)])
            return
        rule = build_matrix_rule(self._plan.rule, group, self._config)
        elements = Slices(self._flat, self._flat.grad, {key: state[key] for key in rule.state_keys})
        storage = FlatStorage(self._plan.layout, self._rank, elements)
        self._matrices.step([rule] * len(self._plan.specs), storage)
