"""Steps of planned parameters whose pieces lie in one flat tensor on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config import ZeROConfig
from lwopt_backend.elementwise_groups import ElementwiseGroups
from lwopt_backend.group_plan import GroupPlan
from lwopt_backend.plan import MatrixPlan
from lwopt_backend.plan.block_storage import BlockPartition
from lwopt_backend.plan.storage import Partition
from lwopt_backend.registry import build_matrix_rule, new_state
from lwopt_backend.runtime.ranks import Collectives
from lwopt_backend.runtime.stepper import MatrixStepper
from lwopt_backend.runtime.storage import FlatStorage, Slices


class GroupStepper:
    """Steps what ``plan`` is about. ``flat`` is this rank's partition of its weights, ``device`` where matrices travel.

    Hyperparameters are read anew every step.
    """

    def __init__(
        self, plan: GroupPlan, flat: Tensor, collectives: Collectives, config: ZeROConfig, device: torch.device
    ) -> None:
        self._plan = plan
        self._flat = flat
        self._rank = collectives.rank
        self._config = config
        self._matrices: MatrixStepper | None = None
        self._elementwise = ElementwiseGroups()
        if plan.matrices is not None:
            self._matrices = matrix_stepper(plan.matrices, collectives, config, device)

    @property
    def matrices(self) -> MatrixStepper | None:
        """The stepper of a matrix rule's parameters."""
        return self._matrices

    def fill_state(self, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Add the state tensors that a fresh optimizer lacks; what a checkpoint restored is kept."""
        for key, tensor in new_state(self._flat, group).items():
            state.setdefault(key, tensor)

    def step(self, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """One step from ``flat.grad`` with the hyperparameters in ``group``. Called on all ranks of the group."""
        planned, grad = self._plan.matrices, self._flat.grad
        assert grad is not None
        if self._matrices is None or planned is None:
            self._elementwise.step(0, group, [Slices(self._flat, grad, state)])
            return
        rule, layout = build_matrix_rule(group, self._config), planned.layout
        assert isinstance(layout, (Partition, BlockPartition))
        elements = Slices(self._flat, grad, {key: state[key] for key in rule.state_keys})
        storage = FlatStorage(layout, self._rank, elements)
        self._matrices.step([rule] * len(planned.atoms), storage)


def matrix_stepper(
    plan: MatrixPlan, collectives: Collectives, config: ZeROConfig, device: torch.device
) -> MatrixStepper:
    """The stepper of ``plan`` whose matrices travel on ``device`` and are computed where the configuration says."""
    rule_device = torch.device("cpu") if config.ns_device == "cpu" else device
    batch_numel = 0 if rule_device.type == "cpu" else config.bucket_numel
    return MatrixStepper(plan, collectives, device, batch_numel=batch_numel, rule_device=rule_device)
