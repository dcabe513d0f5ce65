"""Megatron's torch_dist: keys as parameters' names, param groups and step counts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint.contents import CheckpointError, LazyTensor, end_to_end
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.files.made import shape_of
from lwopt_backend.checkpoint.files.pickles import counter, plain
from lwopt_backend.checkpoint.megatron.names import local_spec, module_order

# The files have every group's options, but not which parameters are in it: ``names.groups_of`` tells. Chained
# optimizers are numbered, and those that are chained in a chained one once more.

Options = Mapping[str, Any]
Chain = tuple[int, ...]  # of an optimizer its number in the chain, in the chain in that, ...; () if it is alone
_OF_BUFFERS = re.compile(r"((?:chained_\d+\.)*)optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_.+")


def chain_of(prefix: str) -> Chain:
    """``"chained_1."``: (1,)."""
    return tuple(map(int, re.findall(r"\d+", prefix)))


def optimizers(folder: DcpFolder, common: Mapping[str, Any]) -> dict[Chain, tuple[Options, ...]]:
    """Each optimizer's groups. Adam's have "step", if it was saved."""
    saved = dict(_unchained(common.get("optimizer") or {}, folder))
    of_buffers = {chain_of(match[1]): key for key in folder.objects if (match := _OF_BUFFERS.fullmatch(key))}
    found: dict[Chain, tuple[Options, ...]] = {}
    for chain in sorted(saved.keys() | of_buffers.keys()):
        state = saved.get(chain, {})
        inner = state.get("optimizer", state)
        groups = inner.get("param_groups", [])
        if chain in of_buffers:
            key = of_buffers[chain]
            held = plain(folder.object(key))
            held = held[0] if isinstance(held, list) and len(held) == 1 else held
            if not isinstance(held, Mapping) or "param_groups" not in held:
                raise CheckpointError(f"{key} in {folder.path}: expected param_groups, found {held!r:.200}")
            groups = held["param_groups"]
        kept = inner.get("state") or {}
        beside = [*(state.get("param_state") or {}).values(), *kept.values(), {"step": kept.get("common_step")}]
        counts = [one.get("step") for one in beside if isinstance(one, Mapping)]
        steps = sorted({counter(count) for count in counts if count is not None})
        if len(steps) == 1:
            groups = [{"step": steps[0], **group} if "betas" in group else group for group in groups]
        found[chain] = tuple(
            {key: counter(value) if key == "step" else value for key, value in group.items() if key != "params"}
            for group in groups
        )
    return found


def _unchained(saved: Any, folder: DcpFolder, chain: Chain = ()) -> Iterator[tuple[Chain, dict[str, Any]]]:
    """Yield the optimizers' states in a chain of them."""
    if isinstance(saved, (list, tuple)):
        saved = dict(enumerate(saved))
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{folder.path}: expected the optimizer's state as a dictionary, found {saved!r}")
    if saved and all(str(number).isdecimal() for number in saved):  # as text where DCP flattened it
        for number, state in saved.items():
            yield from _unchained(state or {}, folder, (*chain, int(number)))
    elif saved:
        yield chain, plain(saved)


# Keys of parameters: layers and experts are stacked into one tensor, gate and up may be apart.
#
# decoder.layers.mlp.linear_fc1.weight (L, F, H)                    layers that are alike
# decoder.layers.3.mlp.linear_fc1.weight (F, H)                     layers that differ
# decoder.layers.mlp.experts.experts.linear_fc1.weight (L, E, F, H) experts in them
# decoder.layers.3.mlp.experts.experts.linear_fc1.weight (E, F, H)
# decoder.layers.3.mlp.experts.experts.1.linear_fc1.weight_w, ..._v every tensor by itself; gate and up apart

_STACKED_LAYERS = re.compile(r"^(.*?\blayers)\.(?!\d+\.)")
_EXPERTS = re.compile(r"\.mlp\.experts\.experts\.(\d+\.)?")
_HALF = re.compile(r"(.+\.(?:weight|bias)\d*)_([wv])")
MOST_PARTS = 2**18  # layers times experts of one tensor; more is damage
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class Stack:
    """A tensor of a folder in the model's shape. Up to 0.15, the optimizer's may be stored in another order: cut along
    each axis into ``fragments``, each flat; the saved shape is (*fragments, elements in each)."""

    folder: DcpFolder
    key: str
    shape: tuple[int, ...]
    fragments: tuple[int, ...] | None = None

    def at(self, place: Sequence[int]) -> LazyTensor:
        """The tensor at ``place`` along the first axes, which is all that is read; () is the whole tensor."""
        place = tuple(place)
        shape = self.shape[len(place) :]
        if self.fragments is None:
            offsets = place + (0,) * len(shape)
            return self.folder.box(self.key, offsets, (1,) * len(place) + shape, shape)
        inner = [size // count for size, count in zip(self.shape, self.fragments)]
        outer = tuple(index // size for index, size in zip(place, inner))
        counts = (1,) * len(place) + self.fragments[len(place) :]
        saved = self.folder.tensors[self.key].shape
        boxes = (*counts, saved[-1])
        flat = self.folder.box(self.key, outer + (0,) * (len(saved) - len(place)), boxes, boxes)

        def put_together(tensor: Tensor) -> Tensor:
            axes = len(inner)
            tensor = tensor.view(*counts, *inner).permute(*(i for n in range(axes) for i in (n, axes + n)))
            tensor = tensor.reshape([count * size for count, size in zip(counts, inner)])
            return tensor[tuple(index % size for index, size in zip(place, inner))]

        return flat.mapped(put_together, shape)


def stack(folder: DcpFolder, key: str) -> Stack:
    """The tensor ``key``. Raises CheckpointError if it is in pieces that do not make up its shape."""
    saved = folder.tensors[key].shape
    original = folder.extra.get(key, {}).get(_ORIGINAL_SHAPE)
    if original is None:
        return Stack(folder, key, saved)
    shape, fragments = shape_of(tuple(original)), saved[:-1]
    pieces = [size // count for size, count in zip(shape, fragments) if count and size % count == 0]
    if len(fragments) != len(shape) or len(pieces) != len(shape) or torch.Size(pieces).numel() != saved[-1]:
        raise CheckpointError(f"{key} in {folder.path}: expected pieces of shape {shape}, found {saved}; copy it again")
    return Stack(folder, key, shape, fragments)


def parameters(folder: DcpFolder, keys: Mapping[str, str]) -> dict[str, LazyTensor]:
    """Whole parameters by local-spec names, from ``keys``: the folder's keys by their torch_dist names.

    Raises CheckpointError for a name that is not of a GPT model, and for one that occurs twice.
    """
    found: dict[str, LazyTensor] = {}
    for fused, key in keys.items():
        of_key = stack(folder, key)
        for name, place in _unstacked(fused, of_key.shape, f"{key} in {folder.path}"):
            if name in found:
                raise CheckpointError(f"{key} in {folder.path}: {name} is there twice, also as {found[name].where}")
            found[name] = of_key.at(place)
    return with_gate_and_up(found)


def ordered(names: Iterable[str], arguments: Mapping[str, Any]) -> list[str]:
    """Names in the order of the model's modules, or as they are if a place is unknown."""
    names = list(names)
    try:
        return module_order(names, arguments)
    except CheckpointError:  # only flat buffers need the order
        return names


def whole_name(name: str) -> str:
    """The local-spec name of a parameter, also if ``name`` is its gate or up alone."""
    half = _HALF.fullmatch(name)
    return local_spec(half[1] if half else name)


def with_gate_and_up(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Join ``<name>_w`` and ``<name>_v`` into ``<name>``, and use the local spec's names."""
    halves: dict[str, dict[str, LazyTensor]] = {}
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if half := _HALF.fullmatch(name):
            halves.setdefault(half[1], {})[half[2]] = tensor
        else:
            found[local_spec(name)] = tensor
    for name, of_name in halves.items():
        if len(of_name) == 1 or local_spec(name) in found:
            (has, tensor), *_ = of_name.items()
            raise CheckpointError(
                f"{tensor.where}: expected {name}_w (gate) and {name}_v (up) and nothing else of it, found only the "
                f"one that ends in _{has}, or {name} too; copy the checkpoint again"
            )
        gate, up = of_name["w"], of_name["v"]
        found[local_spec(name)] = end_to_end([gate, up], (gate.shape[0] + up.shape[0], *gate.shape[1:]))
    return found


def _unstacked(name: str, shape: Sequence[int], where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names in a tensor, each with its place along the first axes."""
    layers, experts = _STACKED_LAYERS.search(name), _EXPERTS.search(name)
    are_stacked = experts is not None and experts[1] is None
    axes = (layers is not None) + are_stacked
    if len(shape) <= axes:
        raise CheckpointError(f"{where}: expected a stack of layers or experts, found shape {tuple(shape)}")
    if math.prod(shape[:axes]) > MOST_PARTS:
        raise CheckpointError(f"{where}: no model has so many layers or experts as its shape {tuple(shape)} says")
    for place in itertools.product(*map(range, shape[:axes])):
        one = name
        if layers is not None:
            one = f"{layers[1]}.{place[0]}.{one[layers.end() :]}"
        if experts is not None:
            number = f"{place[-1]}." if are_stacked else experts[1]
            one = _EXPERTS.sub(f".mlp.experts.local_experts.{number}", one)
        yield one, place
