"""What is decided when an engine takes an optimizer with owned storage, and the buffers that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend import report
from lwopt_backend.chosen import Rules, settings_lines
from lwopt_backend.config import ZeROConfig
from lwopt_backend.grouping import Grouping, group_parameters
from lwopt_backend.integrations import deepspeed_engine
from lwopt_backend.integrations.deepspeed_owned_refusals import reasons_to_refuse, without_effect
from lwopt_backend.owned.checks import check_model
from lwopt_backend.owned.core import OwnedCore, Share
from lwopt_backend.owned.memory import rank_memory
from lwopt_backend.owned.report import show
from lwopt_backend.runtime.agreement import agree_in_all, digest
from lwopt_backend.runtime.collectives import TorchCollectives


@dataclass(frozen=True)
class OwnedBinding:
    """What an optimizer knows once an engine has taken it. ``ranks`` are those that share the parameters."""

    name: str  # of the optimizer's type, for errors
    engine: DeepSpeedEngine
    grouping: Grouping
    ranks: TorchCollectives

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Of gradients until they are at their owners; None is the parameter's."""
        dtype, accumulated = self.engine.get_data_types()
        return None if dtype == accumulated else accumulated

    @property
    def divisor(self) -> float:
        """Gradients are the sum over all ranks by this. Those of the ranks that share a sequence are parts of one."""
        return self.ranks.world_size / self.engine.sequence_parallel_size if self.engine.gradient_average else 1.0

    @property
    def predivisor(self) -> float:
        """How much of the divisor is applied before gradients are summed."""
        if not self.engine.gradient_average:
            return 1.0
        return self.engine.gradient_predivide_factor() if self.engine.postscale_gradients() else self.divisor

    def groups(self) -> list[dict[str, Any]]:
        """The param groups, each marked with what identifies its members in a checkpoint."""
        names = self.grouping.names
        return [
            {**group, "members": digest([f"{names[id(p)]} {tuple(p.shape)}" for p in group["params"]])}
            for group in self.grouping.groups
        ]


def bind(
    name: str, engine: DeepSpeedEngine, given: list[dict[str, Any]], rules: Rules, config: ZeROConfig
) -> OwnedBinding:
    """Refuse, route and agree for the optimizer of type ``name``. Called on all ranks; raises ValueError on all of them
    where something cannot work."""
    ranks = [TorchCollectives(group) for group in deepspeed_engine.process_groups(engine)]

    def decide() -> tuple[OwnedBinding, Sequence[Sequence[str]]]:
        reasons = reasons_to_refuse(engine)
        if reasons:
            raise ValueError(
                "\n  ".join([f"{name} with owned storage cannot train with this configuration:", *reasons])
            )
        check_model(engine.module, name)
        grouping = group_parameters(engine.module, given, rules, config, stacks=True)
        return OwnedBinding(name, engine, grouping, ranks[0]), [settings_lines(rules, config)] * len(ranks)

    return agree_in_all(ranks, name, decide)


def build_core(binding: OwnedBinding, config: ZeROConfig) -> OwnedCore:
    """The buffers of the model's parameters, which become views of them. Called on all ranks."""
    overlap = deepspeed_engine.zero_settings(binding.engine).get("overlap_comm")
    return OwnedCore(
        binding.grouping,
        [Share(binding.ranks, binding.divisor / binding.predivisor, config.group_size)],
        config,
        layout=config.layout,
        bucket_mb=config.bucket_mb,
        grad_dtype=binding.grad_dtype,
        overlap=overlap is not False,
    )


def announce(binding: OwnedBinding, core: OwnedCore) -> None:
    """Print the routing, the plan, and what the configuration says in vain."""
    (held,) = core.holdings
    members = [core.members[number] for number in held.numbers]
    groups, grad_dtype = binding.grouping.groups, binding.grad_dtype
    show(
        binding.grouping.routes,
        core,
        groups,
        lambda held, rank: rank_memory(held.plan, rank, members, groups, grad_dtype=grad_dtype, keep_full=False),
    )
    idle = without_effect(binding.engine)
    if idle:
        report.standard_output().print(f"Without effect on owned storage: {', '.join(idle)}.")
