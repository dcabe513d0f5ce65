"""What a study plans for: an engine with its own options, and by what seconds are counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lwopt_backend.chosen import Rules, settings_of
from lwopt_backend.config import FSDP2Config, HostConfig, OwnedConfig, ZeROConfig
from lwopt_backend.model_shapes.training import Training
from lwopt_backend.plan.buffers.step import Elements
from lwopt_backend.plan.cost import CostModel, Shape
from lwopt_backend.plan.machine import CLUSTERS, MACHINES, Machine
from lwopt_backend.plan.storage import SUB_GROUP_SIZE
from lwopt_backend.registry import MATRIX_RULES, cost_of

ENGINES: Mapping[str, type[HostConfig]] = {
    "owned": OwnedConfig,
    "zero1": ZeROConfig,
    "zero2": ZeROConfig,
    "zero3": ZeROConfig,
    "fsdp2": FSDP2Config,
}
WHERE = "lwopt plan"


@dataclass(frozen=True)
class Setting:
    """What a model is planned for.

    - ``config``, ``rules``: the engine's options, with the engine's defaults.
    - ``machine``: the cluster whose seconds are modelled; ``cost`` says what work costs there, None as the rule does.
      Neither changes the plan, which is made for ``plans_for``: an engine knows whether it is on CPUs, and no more.
    - ``dtype``, ``grad_dtype``: of parameters, and of gradients as they are kept and sent.
    - ``sub_group_size``: ZeRO-3's.
    """

    engine: str
    config: HostConfig
    rules: Rules
    machine: Machine
    cost: CostModel | None
    dtype: torch.dtype
    grad_dtype: torch.dtype
    plans_for: Machine
    sub_group_size: int = SUB_GROUP_SIZE

    @classmethod
    def of(
        cls,
        engine: str = "owned",
        machine: Machine = CLUSTERS["h100-8x-ib"],
        cost: CostModel | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
        grad_dtype: str = "parameter",
        plans_for: Machine | None = None,
        sub_group_size: int = SUB_GROUP_SIZE,
    ) -> Setting:
        """For an engine with ``options`` as its optimizer takes them: the engine's own, and sections of rules.

        ``dtype`` is bf16 by default, on FSDP2, whose shards are the masters, fp32. ``plans_for`` is a CPU on the
        cluster of that name, else an accelerator. Raises ValueError for wrong options.
        """
        given = {**({"grad_dtype": grad_dtype} if engine == "owned" else {}), **(options or {})}
        rules, config = settings_of(ENGINES[engine], given, f"{WHERE}, engine {engine!r}")
        dtype = dtype or (torch.float32 if engine == "fsdp2" else torch.bfloat16)
        wide = (config.grad_dtype if isinstance(config, OwnedConfig) else grad_dtype) == "float32"
        plans_for = plans_for or (machine if machine == MACHINES["cpu"] else MACHINES["cuda"])
        grad = torch.float32 if wide else dtype
        return cls(engine, config, rules, machine, cost, dtype, grad, plans_for, sub_group_size)

    @property
    def training(self) -> Training:
        return Training(self.rules, self.config)

    @property
    def work(self) -> CostModel:
        """What work costs: as was said, or the flops of the matrix rule."""
        if self.cost is not None:
            return self.cost
        name = self.rules.matrix.rule
        group = {"rule": name, **self.rules.matrix.options.model_dump()}
        return CostModel(name, "flops", lambda shape: cost_of(shape, group), f"flops of {MATRIX_RULES[name].work}")

    def seconds(self, cost: int) -> float:
        """What work of that cost takes a rank."""
        return self.work.seconds(cost, self.machine.flops_per_second)

    def costs(self, planned: int, whole: Shape, ranks: int) -> int:
        """The cost of a matrix whose cost was ``planned``; if ``ranks`` take turns in it, each one's share."""
        if self.cost is None and ranks == 1:
            return planned
        return -(-self.work.of(whole) // ranks)

    @property
    def elements(self) -> Elements:
        """Bytes of an element, in systems that are compared."""
        masters = 4 if self.dtype.itemsize < 4 else 0
        return Elements(self.dtype.itemsize, self.grad_dtype.itemsize, masters, 4)

    @property
    def bucket_numel(self) -> int:
        """The least elements of a bucket, in systems that are compared: as many as of owned storage."""
        config = self.owned().config
        assert isinstance(config, OwnedConfig)
        return max(1, int(config.bucket_mb * 2**20 / self.grad_dtype.itemsize))

    def owned(self, **options: Any) -> Setting:
        """The same for owned storage, with other ``options``; of another engine's only those of every host are kept."""
        if isinstance(self.config, OwnedConfig):
            return replace(self, config=OwnedConfig(**{**self.config.model_dump(), **options}))
        common = {name: getattr(self.config, name) for name in HostConfig.model_fields}
        grad = "float32" if self.grad_dtype == torch.float32 else "parameter"
        return replace(self, engine="owned", config=OwnedConfig(**{**common, "grad_dtype": grad, **options}))
