"""How each engine plans what some ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from lwopt_backend.study.fsdp2 import plan_fsdp2_share
from lwopt_backend.study.grouping import Share
from lwopt_backend.study.owned import plan_owned_share
from lwopt_backend.study.part import Planned
from lwopt_backend.study.setting import Setting
from lwopt_backend.study.zero import plan_zero_share


def plan_share(name: str, shared: Share, ranks: int, setting: Setting, base: Sequence[int] | None = None) -> Planned:
    """Plan over ``ranks`` ranks for ``setting.engine``, as it does itself.

    ``base`` is the work that each rank has elsewhere, which DeepSpeed's groups do not look at.
    """
    if setting.engine == "owned":
        return plan_owned_share(name, shared, ranks, setting, base)
    if setting.engine == "fsdp2":
        return plan_fsdp2_share(name, shared, ranks, setting, base)
    return plan_zero_share(name, shared, ranks, setting)
