"""The ranks that share parameters in owned storage."""

from __future__ import annotations

from lwopt_backend.runtime.ranks import PartCollectives


class Sharers:
    """The ranks that share some parameters: ``instance`` owns them, ``replicas`` are this rank's likes elsewhere.

    ``everyone`` are the ranks of all instances. A mean gradient is the sum over ``divisor``.
    """

    def __init__(
        self, everyone: PartCollectives, instance: PartCollectives, replicas: PartCollectives | None, divisor: float
    ) -> None:
        self.everyone = everyone
        self.instance = instance
        self.replicas = replicas
        self.divisor = divisor
