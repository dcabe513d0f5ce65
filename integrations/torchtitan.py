"""``LayerWiseOptimizer`` in torchtitan's trainer, 0.3.0 and main of August 2026, by a name that any recipe takes::

    --override.imports lwopt_backend.integrations.torchtitan.layer_wise
    --override.imports 'lwopt_backend.integrations.torchtitan.layer_wise={"lr": 0.02, "elementwise_lr": 8e-4}'

torchtitan keeps sharding, gradients, clipping, schedules and checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override
from torchtitan.distributed.flex_shard import BlockShard

from lwopt_backend.optimizer import LayerWiseOptimizer
from lwopt_backend.routing.output_heads import plain_name

KINDS = {"DistMuon": "matrix", "AdamW": "elementwise"}
RULES = {"matrix": "muon", "elementwise": "adamw"}
SPEED_ONLY = ("foreach", "fused")  # without an effect on results


class LayerWiseOptimizers(OptimizersContainer):  # type: ignore[misc]
    """One ``LayerWiseOptimizer`` for each model part of a rank, which has several parts under pipeline parallelism.

    The trainer makes it on all ranks after it has sharded the model. A part without a matrix, such as a stage with only
    the embedding, is trained element-wise.

    Args:
        config: its ``arguments`` are ``LayerWiseOptimizer``'s. Default: those of the recipe.
        model_parts: the sharded parts of this rank.

    Raises:
        ValueError: for param groups with an optimizer that has no counterpart here.

    Examples:
        >>> optimizer = LayerWiseOptimizers.Config(arguments={"matrix": "muon", "lr": 0.02, "elementwise_lr": 8e-4})
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        arguments: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = []
        for part in model_parts:
            arguments = config.arguments or from_recipe(config, part)
            self.optimizers.append(LayerWiseOptimizer(part, **{"allow_no_matrix": True, **arguments}))
        names = {id(param): canonical_fqn(name) for part in model_parts for name, param in part.named_parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group in groups:  # torchtitan's checkpoints identify state by these
            group["param_names"] = [names[id(param)] for param in group["params"]]
        params = [param for group in groups for param in group["params"]]
        self._validate_params(params)
        self._post_init(params)


@override(target=OptimizersContainer.Config, description="LayerWiseOptimizer for all parameters")  # type: ignore[untyped-decorator]
def layer_wise(config: OptimizersContainer.Config, **arguments: Any) -> LayerWiseOptimizers.Config:
    """Replace a recipe's optimizer by ``LayerWiseOptimizers``.

    Args:
        config: the recipe's optimizer.
        **arguments: ``LayerWiseOptimizer``'s. Default: those of the recipe.

    Returns:
        A configuration to put in place of ``config``.

    Examples:
        >>> config.optimizer = layer_wise(config.optimizer, lr=0.02, elementwise_lr=8e-4)
    """
    made: LayerWiseOptimizers.Config = derive(config, LayerWiseOptimizers.Config, arguments=arguments)
    return made


def from_recipe(config: OptimizersContainer.Config, model: nn.Module) -> dict[str, Any]:
    """The arguments of ``LayerWiseOptimizer`` for a model part with ``config.param_groups``.

    If they have AdamW alone, the default routing finds the matrices, and Muon's updates have the size of AdamW's, for
    which ``lr`` was chosen. If they have DistMuon, every parameter keeps its rule, and DistMuon's matrices are kept:
    whole weights, equal blocks of rows (heads), slices of stacks. Raises ValueError for other optimizers, and for state
    in bfloat16, which only Adam's would have.
    """
    if config.implementation == "fused_opt_states_bf16":
        raise ValueError("torchtitan: expected fused_opt_states_bf16 off; pass arguments with 'state_dtype'")
    left: dict[str, Tensor] = {
        plain_name(name): param for name, param in model.named_parameters() if param.requires_grad
    }
    groups = list[tuple[str, dict[str, Any], dict[str, Tensor]]]()
    for group in config.param_groups:
        mine = {name: left.pop(name) for name in [*left] if re.search(group.pattern, name)}
        options = {key: value for key, value in group.optimizer_kwargs.items() if key not in SPEED_ONLY}
        if group.optimizer_name not in KINDS:
            raise ValueError(
                f"torchtitan: expected AdamW or DistMuon, found optimizer {group.optimizer_name!r}; use one of these, "
                "or pass arguments of LayerWiseOptimizer"
            )
        if mine:
            groups.append((KINDS[group.optimizer_name], options, mine))
    if any(kind == "matrix" for kind, _, _ in groups):
        if left:
            raise ValueError(f"torchtitan: {[*left][0]!r} and {len(left) - 1} more: expected a param group; add one")
        return _as_divided(config, groups)
    params = []
    for _, options, mine in groups:
        shared = {key: options.pop(key, default) for key, default in (("lr", 1e-3), ("weight_decay", 0.01))}
        params.append({"params": [*mine.values()], **shared, "adamw": options})
    return {"matrix": {"name": "muon", "adjust_lr_fn": "match_rms_adamw"}, "params": params}


def _as_divided(
    config: OptimizersContainer.Config, groups: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Tensor]]]
) -> dict[str, Any]:
    """Arguments with which every parameter has the rule and the options of its group, and DistMuon's matrices."""
    layouts = config.optimizer_factory_kwargs_by_name["DistMuon"]["compute_sharding_by_fqn"]
    found: dict[str, Any] = {"overrides": [], "include": [], "exclude": [], "atoms": {}}
    for kind, options, mine in groups:
        found.setdefault(kind, {"name": RULES[kind], "lr": options.get("lr", 1e-3)})
        found["overrides"].append({"params": [*mine], kind: dict(options)})
        for name, param in mine.items():
            if kind == "elementwise":
                found["exclude"].append(name)
                continue
            shardings = layouts[canonical_fqn(name)].shardings_by_mesh_axis.values()
            sizes = [sharding.block_size for sharding in shardings if isinstance(sharding, BlockShard)]
            found["include"] += [name] if param.ndim == 2 else []
            whole = "whole" if param.ndim == 2 else "stack"
            found["atoms"][name] = {"heads": param.shape[0] // sizes[0]} if sizes else whole
    return found
