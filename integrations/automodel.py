"""``LayerWiseOptimizer`` in NeMo Automodel's recipes, 0.7.0, as an optimizer that a recipe names::

    optimizer:
      _target_: lwopt_backend.integrations.automodel.LayerWiseConfig
      lr: 1.0e-4

Automodel keeps sharding, gradients, clipping, schedules and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from nemo_automodel.components.optim.optimizer import OptimizerConfig
from torch import nn

from lwopt_backend.integrations.fsdp2 import at_one_rate
from lwopt_backend.optimizer import LayerWiseOptimizer


@dataclass
class LayerWiseConfig(OptimizerConfig):  # type: ignore[misc]
    """``LayerWiseOptimizer`` with ``lr`` and ``weight_decay`` for both rules (``at_one_rate``).

    Attributes:
        lr: learning rate of both rules.
        weight_decay: weight decay of both rules.
        adjust_lr: Muon's ``adjust_lr_fn``: Automodel's recipes look up values of keys that end in ``_fn`` as functions.
        arguments: further arguments of ``LayerWiseOptimizer``.

    Examples:
        >>> config = LayerWiseConfig(lr=1e-4, arguments={"elementwise": {"betas": [0.9, 0.95]}})
        >>> (optimizer,) = config.build(model)
    """

    supports_megatron_fsdp_sharding: ClassVar[bool] = False  # which flattens matrices

    lr: float = 1e-4
    weight_decay: float = 0.01
    adjust_lr: str = "match_rms_adamw"
    arguments: dict[str, Any] = field(default_factory=dict)

    def build(self, model: nn.Module, *, device_mesh: Any = None, is_peft: bool = False) -> list[LayerWiseOptimizer]:
        """Make the optimizers. The recipe calls it on all ranks, after it has sharded the model.

        Args:
            model: the model, or an object with the ``parts`` of this rank.
            device_mesh: no effect; the model has its mesh.
            is_peft: no effect.

        Returns:
            One optimizer for each model part of this rank.

        Raises:
            ValueError: for ``param_group_overrides``, and for a decay that Automodel's scheduler would drop.
        """
        if self.param_group_overrides:
            raise ValueError("automodel.LayerWiseConfig: param_group_overrides: write 'overrides' into arguments")
        more = {"adjust_lr_fn": self.adjust_lr, **self.arguments}
        arguments = {"allow_no_matrix": True, **at_one_rate(self.lr, self.weight_decay, **more)}
        made = [LayerWiseOptimizer(part, **arguments) for part in getattr(model, "parts", [model])]
        for decays in ([group["weight_decay"] for group in optimizer.param_groups] for optimizer in made):
            if decays[0] == 0.0 and any(decays):
                raise ValueError(
                    "automodel.LayerWiseConfig: expected a weight decay of the matrix rule, found 0.0 and "
                    f"{max(decays)}; Automodel's scheduler keeps decays as multiples of the first group's"
                )
        return made
