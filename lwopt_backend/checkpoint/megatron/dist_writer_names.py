"""Parameters under the keys of Megatron's torch_dist format: the way back from ``megatron.dist_names``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lwopt_backend.checkpoint.dcp.saving import Boxes, Place, stacked
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron.names import FUSED, is_expert

_LAYER = re.compile(r"^(decoder\.layers)\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_LINEAR = re.compile(r"(.*\.linear_\w+)\.weight")
_OF_EXPERTS = ".pre_mlp_layernorm."


class Keys:
    """Where each parameter of a model goes.

    Layers are stacked if they are all alike, experts always. Norms have the names of Transformer Engine's fused
    modules, also where the local spec is used; but in a layer with experts Transformer Engine keeps the norm before
    them by itself.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, Any]) -> None:
        layers: dict[int, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            if layer := _LAYER.match(name):
                layers.setdefault(int(layer[2]), {})[name[layer.end() :]] = shape
        self._count = len(layers)
        alike = sorted(layers) == list(range(len(layers)))
        self._stacked = alike and all(of_layer == layers[0] for of_layer in layers.values())
        local = arguments.get("transformer_impl") == "local"
        with_experts = {
            number for number, of_layer in layers.items() if any(is_expert(f".{name}") for name in of_layer)
        }
        self._own_norm = set() if local else with_experts

    def place(self, name: str) -> tuple[str, Place]:
        """The key, and the parameter's place along its first axes."""
        layer, expert = _LAYER.match(name), _EXPERT.search(name)
        place: list[int] = []
        key = name
        for fused, separate in FUSED:
            if not (separate == _OF_EXPERTS and layer is not None and int(layer[2]) in self._own_norm):
                key = key.replace(separate, fused)
        if layer is not None and self._stacked:
            key = _LAYER.sub(r"\1.", key)
            place.append(int(layer[2]))
        if expert is not None:
            key = _EXPERT.sub(".mlp.experts.experts.", key)
            place.append(int(expert[1]))
        return key, tuple(place)

    def stacks(self, tensors: Mapping[str, LazyTensor], prefix: str = "") -> dict[str, Boxes]:
        """Tensors by names as torch_dist has them, by its keys. Raises CheckpointError where layers lack something."""
        found: dict[str, dict[Place, LazyTensor]] = {}
        for name, tensor in tensors.items():
            key, place = self.place(name)
            found.setdefault(prefix + key, {})[place] = tensor
        return {key: stacked(parts, key) for key, parts in found.items()}

    def extra_states(self, names: Iterable[str]) -> dict[str, Any]:
        """What linear modules of layers save beside their weights, by key: nothing, in a list."""
        found: dict[str, list[Place]] = {}
        for name in names:
            key, place = self.place(name)
            if _LAYER.match(name) and (linear := _LINEAR.fullmatch(key)):
                found.setdefault(f"{linear[1]}._extra_state", []).append(place)
        return {
            f"{key}/shard_{_numbers(place or (0,))}_{_numbers([max(n) + 1 for n in zip(*places)] or [1])}": [None]
            for key, places in found.items()
            for place in places
        }


def _numbers(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))
