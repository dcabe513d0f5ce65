"""Megatron's ``torch_dist`` checkpoints (0.16 and later), without Megatron: whole parameters and their optimizer state.

    iter_0000003/.metadata, __<rank>_<n>.distcp   weights by name; the optimizer's state by name or in flat buckets
    iter_0000003/common.pt                        arguments, iteration, groups; from 0.19 on an object in the .distcp

Tensors that were sharded over ranks become whole: they are read from chunks, one layer and expert at a time.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import (
    Checkpoint,
    CheckpointError,
    LazyTensor,
    Param,
    end_to_end,
    is_trained,
    reader,
)
from lwopt_backend.checkpoint.dcp.reader import METADATA, DcpFolder
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.pickles import plain, scalar
from lwopt_backend.checkpoint.megatron import conventions, mimo
from lwopt_backend.checkpoint.megatron.buffers import BUCKET, Chain, Replicas, chain_of, states_in_buckets
from lwopt_backend.checkpoint.megatron.conventions import BY_NAME, SAVED_WHOLE, is_buffer, module_order, respelled

Options = Mapping[str, Any]
LAYOUTS = (None, "fully_reshardable", "dp_reshardable")
MODEL_SPACE = "fully_sharded_model_space"  # of 0.14 and 0.15: fragments, whose real shapes are in DCP's metadata
_REAL_SHAPE = "nd_reformulated_orig_global_shape"
_CHAINED = re.compile(r"^(chained_\d+\.)+")
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
_HELD_WITH_BUCKETS = re.compile(
    r"optimizer\.distributed\..*\.(optimizer|per_bucket_numel(_unpadded)?)(/.+)?"
    r"|optimizer\.mimo\..*\.(param_groups|param_state_sharding_type|grad_scaler)/.+"
)
_COMMON = re.compile(r"common_state(/shard_.+)?")
_LEFT_OUT = re.compile(r"rng_state/.+|.*_extra_state(/.+)?|rerun_state_machine_state(/.+)?")
States = dict[str, dict[str, LazyTensor]]


def recognises(path: Path) -> bool:
    """Whether it is a torch_dist checkpoint, or the folder of one of its steps."""
    step = conventions.step_folder(path)
    return (step / METADATA).is_file() and (step / "metadata.json").is_file()


@reader("Megatron", conventions.step_folder)
def read(step: Path) -> Checkpoint:
    """The checkpoint's content. Raises CheckpointError for damage, and for unknown keys and layouts."""
    folder = DcpFolder(step)
    common = _common(folder)
    modules = mimo.modules(folder)
    if not modules:
        return _of_model(folder, common)
    notes, optimizers = _notes(modules.pop("")), common.get("optimizer") or {}
    parts = {}
    for name, of_module in modules.items():
        saved = {**common, "optimizer": optimizers.get(name)}
        try:
            part = _of_model(of_module, saved)
        except CheckpointError as error:
            raise CheckpointError(f"{step}: module {name}: {error}") from error
        parts[name] = replace(part, version=_version(folder, part.arguments))
    return mimo.joined(parts, notes)


def _of_model(folder: DcpFolder, common: Options) -> Checkpoint:
    """The content of a folder of one model."""
    step = folder.path
    arguments = plain(common.get("args") or {})
    chained = optimizers(folder, common)
    groups = [group for chain in sorted(chained) for group in chained[chain]]
    weights, buffers, states, replicas = _tensors(folder, chained, arguments)
    numbers = conventions.groups_of({name: weight.shape for name, weight in weights.items()}, groups, arguments)
    params = {}
    for name in ordered(weights, arguments):
        kept, number = states.get(name, {}), numbers[name]
        is_adam = "exp_avg" in kept
        if number is not None and (not kept or ("betas" in groups[number]) != is_adam):
            number = None  # the usual rules for groups do not hold for another optimizer's states
        params[name] = Param(weights[name], kept, conventions.step_of(groups, number) if is_adam else None, number)
        if number is not None and "eps" in groups[number] and is_adam and "exp_avg_sq" not in kept:
            raise CheckpointError(
                f"{folder.path}: expected exp_avg_sq of {name}, which Adam trains; Megatron does not save it with "
                "--optimizer lion --use-distributed-optimizer. Save without --use-distributed-optimizer"
            )
    notes = _notes(folder)
    if groups and not any(param.states for param in params.values()):
        notes.append("there are param groups, but no parameter has state")
    without = [name for name, param in params.items() if "exp_avg_sq" in param.states and param.step is None]
    if without:
        notes.append(f"Adam's count of steps is not saved ({len(without)} parameters, e.g. {without[0]})")
    return Checkpoint(
        format="megatron torch_dist",
        version=_version(folder, arguments),
        names="megatron-core",
        params=params,
        groups=tuple(groups),
        arguments=arguments,
        iteration=common["iteration"] if isinstance(common.get("iteration"), int) else conventions.iteration_of(step),
        samples=arguments.get("consumed_train_samples"),
        scheduler=plain(common.get("opt_param_scheduler")),
        world=conventions.world(arguments),
        replicas=tuple(replicas),
        tied=conventions.tied(weights, arguments),
        buffers=buffers,
        notes=(*notes, *conventions.training_notes(arguments, params)),
    )


def _common(folder: DcpFolder) -> Mapping[str, Any]:
    """Objects other than tensors: from common.pt, or from 0.19 on from an object in the folder's files."""
    path = folder.path / "common.pt"
    keys = [key for key in folder.objects if _COMMON.fullmatch(key)]
    if path.is_file():
        found = torch_files.load(path)
    elif keys:
        found = folder.object(keys[0])
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
    else:
        raise CheckpointError(f"{path}: expected this file, or common_state in {METADATA}; copy all files")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"common state of {folder.path}: expected a dictionary, found a {type(found).__name__}")
    layout = (found.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if layout == MODEL_SPACE or any(_REAL_SHAPE in note for note in (folder.extra or {}).values()):
        raise CheckpointError(
            f"{folder.path}: expected whole tensors, or flat buffers, of the optimizer, found the fragments that only "
            f"Megatron 0.14 and 0.15 write ({MODEL_SPACE}); load it in 0.16 or newer, and save it once"
        )
    if layout not in LAYOUTS:
        raise CheckpointError(
            f"{folder.path}: expected an optimizer's layout of {', '.join(map(str, LAYOUTS[1:]))}, found {layout!r}; "
            f"{SAVED_WHOLE}"
        )
    return found


def _tensors(
    folder: DcpFolder,
    chained: Mapping[Chain, tuple[Options, ...]],
    arguments: Mapping[str, Any],
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor], States, Replicas]:
    """Weights, buffers, states by parameter, and pairs that must be equal."""
    of_model, of_state, has_buckets = _keys(folder)
    found = parameters(folder, of_model)
    buffers = {name: t for name, t in found.items() if is_buffer(name) or not is_trained(t.dtype)}
    weights = {name: tensor for name, tensor in found.items() if name not in buffers}
    states: States = {}
    for saved, keys in of_state.items():
        for name, tensor in parameters(folder, keys).items():
            if BY_NAME[saved] in states.setdefault(name, {}):
                raise CheckpointError(f"{tensor.where}: expected one master weight of {name}; copy one save")
            states[name][BY_NAME[saved]] = tensor
    replicas: Replicas = []
    if has_buckets:
        unnamed = {name: weight for name, weight in weights.items() if name not in states}
        of_experts = {c: any(g.get("is_expert_parallel") for g in groups) for c, groups in chained.items()}
        more, replicas = states_in_buckets(folder, unnamed, of_experts, arguments)
        states.update(more)
    conventions.check_states(states, weights, str(folder.path))
    return weights, buffers, states, replicas


def _keys(folder: DcpFolder) -> tuple[dict[str, str], dict[str, dict[str, str]], bool]:
    """The folder's keys by torch_dist names: the model's, and each state's; and whether there are buckets."""
    of_model: dict[str, str] = {}
    of_state: dict[str, dict[str, str]] = {}
    has_buckets = False
    for key in folder.tensors:
        plain_key = _CHAINED.sub("", key)
        match = _STATE.fullmatch(plain_key)
        if match is not None and match[1] in BY_NAME:
            of_state.setdefault(match[1], {})[match[2]] = key
        elif BUCKET.fullmatch(key):
            has_buckets = True
        elif plain_key.startswith("optimizer."):
            raise CheckpointError(
                f"{key} in {folder.path}: expected a known state ({', '.join(BY_NAME)}; flat buckets of param, "
                "exp_avg, exp_avg_sq); save without precision-aware or other optimizers' own state"
            )
        elif not _LEFT_OUT.fullmatch(key):
            of_model[key] = key
    for key in of_model:
        _check_of_model(folder, key, of_model)
    return of_model, of_state, has_buckets


def _check_of_model(folder: DcpFolder, key: str, of_model: Mapping[str, str]) -> None:
    """Raises CheckpointError for a key that is a state's with a changed byte: another key of the model's, of the same
    shape, behind names. Any other name may be a model's."""
    _, *ends = itertools.accumulate(reversed(key.split(".")), lambda end, name: f"{name}.{end}")
    for end in ends[:-2]:
        if end in of_model and folder.tensors[end].shape == folder.tensors[key].shape:
            raise CheckpointError(
                f"{key} in {folder.path}: expected a state of {end} under optimizer.state, or another weight, found "
                f"neither; copy {METADATA} again"
            )


def _version(folder: DcpFolder, arguments: Mapping[str, Any]) -> str:
    """Megatron-core's version, as far as it can be inferred; none is saved."""
    if any(_COMMON.fullmatch(key) for key in folder.objects):
        return "0.19 or later"
    if folder.extra is not None:
        return "0.15 or earlier"
    if arguments.get("optimizer") == "dist_muon":
        return "0.16 or 0.17"
    return "0.18" if arguments.get("optimizer") == "muon" else "0.16 to 0.18"


def _notes(folder: DcpFolder) -> list[str]:
    """Notes on omissions. Raises CheckpointError for unknown optimizer state, which must not be omitted."""
    left_out: dict[str, int] = {}
    for key in folder.objects:
        plain_key = _CHAINED.sub("", key)
        if plain_key.startswith("optimizer.") and not _HELD_WITH_BUCKETS.fullmatch(plain_key):
            raise CheckpointError(f"{key} in {folder.path}: expected known state; {SAVED_WHOLE}")
        if not _COMMON.fullmatch(key) and not _HELD_WITH_BUCKETS.fullmatch(plain_key):
            kind = key.partition("/")[0].rpartition(".")[2]
            left_out[kind] = left_out.get(kind, 0) + 1
    return [f"left out: {kind} ({count} objects)" for kind, count in sorted(left_out.items())]


# The files have every group's options, but not its parameters, which ``conventions.groups_of`` infers. Chained
# optimizers are numbered, and so are those in a chained one.

_OF_MODULE = re.compile(r"optimizer\.mimo\.[^.]+(?:\.(\d+))?\.param_groups/shard_.+")
_OF_BUFFERS = re.compile(r"((?:chained_\d+\.)*)optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_.+")


def optimizers(folder: DcpFolder, common: Mapping[str, Any]) -> dict[Chain, tuple[Options, ...]]:
    """Each optimizer's groups. Adam's have "step", if it was saved."""
    saved = dict(_unchained(common.get("optimizer") or {}, folder))
    of_buffers = {chain_of(match[1]): key for key in folder.objects if (match := _OF_BUFFERS.fullmatch(key))}
    of_module = {int(match[1] or 0): key for key in folder.objects if (match := _OF_MODULE.fullmatch(key))}
    for number, key in of_module.items():
        state = saved.setdefault((number,) if max(of_module) else (), {})
        (groups,) = plain(folder.object(key))
        state["optimizer"] = {**state.get("optimizer", {}), "param_groups": groups}
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
        steps = sorted({scalar(count) for count in counts if count is not None})
        if len(steps) == 1:
            groups = [{"step": steps[0], **group} if "betas" in group else group for group in groups]
        found[chain] = tuple(
            {key: scalar(value) if key == "step" else value for key, value in group.items() if key != "params"}
            for group in groups
        )
    return found


def _unchained(saved: Any, folder: DcpFolder, chain: Chain = ()) -> Iterator[tuple[Chain, dict[str, Any]]]:
    """Yield the optimizers' states in a chain."""
    if isinstance(saved, (list, tuple)):
        saved = dict(enumerate(saved))
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{folder.path}: expected the optimizer's state as a dictionary, found {saved!r}")
    if saved and all(str(number).isdecimal() for number in saved):  # as text where DCP flattened it
        for number, state in saved.items():
            yield from _unchained(state or {}, folder, (*chain, int(number)))
    elif saved:
        yield chain, plain(saved)


# Keys of parameters: layers and experts are stacked into one tensor, gate and up may be separate.
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


def parameters(folder: DcpFolder, keys: Mapping[str, str]) -> dict[str, LazyTensor]:
    """Whole parameters by local-spec names, from ``keys``: the folder's keys by their torch_dist names. Raises
    CheckpointError for a name that occurs twice."""
    found: dict[str, LazyTensor] = {}
    for fused, key in keys.items():
        saved = folder.tensors[key].shape
        for name, place in _unstacked(fused, saved, f"{key} in {folder.path}"):
            if name in found:
                raise CheckpointError(f"{key} in {folder.path}: expected no second {name}, as {found[name].where}")
            shape = saved[len(place) :]
            found[name] = folder.box(key, place + (0,) * len(shape), (1,) * len(place) + shape, shape)
    return with_gate_and_up(found)


def ordered(names: Iterable[str], arguments: Mapping[str, Any]) -> list[str]:
    """Names in the order of the model's modules; unchanged if a place is unknown."""
    names = list(names)
    try:
        return module_order(names, arguments)
    except CheckpointError:  # only flat buffers need the order
        return names


def whole_name(name: str) -> str:
    """The local-spec name of a parameter, of which ``name`` may be the gate or up alone."""
    half = _HALF.fullmatch(name)
    return respelled(half[1] if half else name)


def with_gate_and_up(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Join ``<name>_w`` and ``<name>_v`` into ``<name>``, and use the local spec's names."""
    halves: dict[str, dict[str, LazyTensor]] = {}
    found: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if half := _HALF.fullmatch(name):
            halves.setdefault(half[1], {})[half[2]] = tensor
        else:
            found[respelled(name)] = tensor
    for name, of_name in halves.items():
        if len(of_name) == 1 or respelled(name) in found:
            (has, tensor), *_ = of_name.items()
            raise CheckpointError(
                f"{tensor.where}: expected exactly {name}_w (gate) and {name}_v (up), found only the one that ends in "
                f"_{has}, or {name} as well; copy the checkpoint again"
            )
        gate, up = of_name["w"], of_name["v"]
        found[respelled(name)] = end_to_end([gate, up], (gate.shape[0] + up.shape[0], *gate.shape[1:]))
    return found


def _unstacked(name: str, shape: Sequence[int], where: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names in a tensor, each with its place along the first axes."""
    layers, experts = _STACKED_LAYERS.search(name), _EXPERTS.search(name)
    are_stacked = experts is not None and experts[1] is None
    axes = (layers is not None) + are_stacked
    if len(shape) <= axes:
        raise CheckpointError(f"{where}: expected a stack of layers or experts, found shape {tuple(shape)}")
    if math.prod(shape[:axes]) > MOST_PARTS:
        raise CheckpointError(f"{where}: expected possible layers or experts, found {tuple(shape)}; copy it again")
    for place in itertools.product(*map(range, shape[:axes])):
        one = name
        if layers is not None:
            one = f"{layers[1]}.{place[0]}.{one[layers.end() :]}"
        if experts is not None:
            number = f"{place[-1]}." if are_stacked else experts[1]
            one = _EXPERTS.sub(f".mlp.experts.local_experts.{number}", one)
        yield one, place
