"""The name of the plan that an optimizer trains by."""

from __future__ import annotations


class NamedPlan:
    """An optimizer that plans: when it has, it says so in ``_plan_digest``."""

    _plan_digest: str | None = None

    @property
    def plan_digest(self) -> str:
        """The name of this rank's plan: the ``digest`` of ``lwopt plan`` for the same model, ranks and options.

        Raises RuntimeError before there is a plan.
        """
        if self._plan_digest is None:
            raise RuntimeError(
                f"this {getattr(self, 'name', type(self).__name__)} has no plan yet, so plan_digest has no value; "
                "under DeepSpeed it plans in deepspeed.initialize, with sharded_later in the first step: ask after that"
            )
        return self._plan_digest
