"""``LayerWiseOptimizer`` in torchtitan's trainer, 0.3.0 and main of August 2026, by a name that any recipe takes::

    --override.imports lwopt_backend.integrations.torchtitan.layer_wise
    --override.imports 'lwopt_backend.integrations.torchtitan.layer_wise={"lr": 0.02, "elementwise_lr": 8e-4}'

torchtitan keeps sharding, gradients, clipping, schedules and checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override
from torchtitan.distributed.flex_shard import BlockShard

from lwopt_backend.migration import Theirs, as_arguments
from lwopt_backend.optimizer import LayerWiseOptimizer

SPEED_ONLY = ("foreach", "fused")  # which change no result


class LayerWiseOptimizers(OptimizersContainer):  # type: ignore[misc]
    """One ``LayerWiseOptimizer`` for each model part of a rank, which has several under pipeline parallelism.

    Made by the trainer after it has sharded the model. ``arguments`` are ``LayerWiseOptimizer``'s. Without any, those
    of ``from_recipe``. A part without a matrix, such as a stage with only the embedding, is trained element-wise.
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
        for group in groups:  # by which torchtitan's checkpoints know state
            group["param_names"] = [names[id(param)] for param in group["params"]]
        params = [param for group in groups for param in group["params"]]
        self._validate_params(params)
        self._post_init(params)


@override(target=OptimizersContainer.Config, description="LayerWiseOptimizer for all parameters")  # type: ignore[untyped-decorator]
def layer_wise(config: OptimizersContainer.Config, **arguments: Any) -> LayerWiseOptimizers.Config:
    """The recipe's optimizer replaced by ours, with these arguments of ``LayerWiseOptimizer`` or as the recipe says."""
    made: LayerWiseOptimizers.Config = derive(config, LayerWiseOptimizers.Config, arguments=arguments)
    return made


def from_recipe(config: OptimizersContainer.Config, model: nn.Module) -> dict[str, Any]:
    """The arguments with which ``LayerWiseOptimizer`` trains a model part as ``config.param_groups`` say.

    If they have AdamW alone, our routing finds the matrices, and Muon's updates have the size of AdamW's, for which
    ``lr`` was chosen. If they have DistMuon, every parameter keeps its rule, and DistMuon's matrices are ours: whole
    weights, equal blocks of rows (heads), slices of stacks. Raises ValueError for other optimizers, and for state in
    bfloat16, which only Adam's would have.
    """
    if config.implementation == "fused_opt_states_bf16":
        raise ValueError("torchtitan: fused_opt_states_bf16 has no counterpart; pass arguments with 'state_dtype'")
    left = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups, theirs = list[dict[str, Any]](), list[Theirs]()
    for group in config.param_groups:
        mine = {name: left.pop(name) for name in [*left] if re.search(group.pattern, name)}
        options = {key: value for key, value in group.optimizer_kwargs.items() if key not in SPEED_ONLY}
        if group.optimizer_name == "DistMuon":
            for atom, params in _by_atom(config, mine):
                theirs.append(Theirs(params, "matrix", {"name": "muon", **options}, atom))
        elif group.optimizer_name == "AdamW":
            theirs.append(Theirs([*mine.values()], "elementwise", {"name": "adamw", **options}))
            shared = {key: options.pop(key, default) for key, default in (("lr", 1e-3), ("weight_decay", 0.01))}
            groups.append({"params": [*mine.values()], **shared, "adamw": options})
        else:
            raise ValueError(
                f"torchtitan: optimizer {group.optimizer_name!r} has no counterpart; expected AdamW or DistMuon, or "
                "arguments of LayerWiseOptimizer"
            )
    if any(group.optimizer_name == "DistMuon" for group in config.param_groups):
        return as_arguments("torchtitan", theirs, model)
    return {"matrix": {"name": "muon", "adjust_lr_fn": "match_rms_adamw"}, "params": [g for g in groups if g["params"]]}


def _by_atom(config: OptimizersContainer.Config, params: Mapping[str, Tensor]) -> list[tuple[Any, list[Tensor]]]:
    """Parameters of DistMuon by what their matrices are."""
    layouts = config.optimizer_factory_kwargs_by_name["DistMuon"]["compute_sharding_by_fqn"]
    found: dict[int, list[Tensor]] = {}
    for name, param in params.items():
        shardings = layouts[canonical_fqn(name)].shardings_by_mesh_axis.values()
        sizes = {sharding.block_size for sharding in shardings if isinstance(sharding, BlockShard)}
        found.setdefault(param.shape[0] // sizes.pop() if sizes else 0, []).append(param)
    return [({"heads": heads} if heads else "stack", some) for heads, some in found.items()]
