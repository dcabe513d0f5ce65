"""DeepSpeed's native checkpoints: stages 0 to 3, BF16_Optimizer, DeepSpeed's Muon, and owned storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import (
    MASTER,
    Checkpoint,
    CheckpointError,
    LazyTensor,
    OwnerStates,
    Param,
    held,
    reader,
    shape_of,
    uncut,
    zeros,
)
from lwopt_backend.checkpoint.deepspeed import files as ds
from lwopt_backend.checkpoint.deepspeed.files import STEP, Gathered, ModelStates
from lwopt_backend.groups import registry
from lwopt_backend.groups.rates import joined_schedules
from lwopt_backend.runtime.state import CHECKPOINT_KEY

# Names are the module's own. DeepSpeed is not imported.

POINTER = "latest"


def recognises(path: Path) -> bool:
    tag = ds.tag_of(path, POINTER)
    return not (tag / ds.UNIVERSAL_MARK).is_file() and any(map(ds.MODEL.fullmatch, ds.names_in(tag)))


OfRanks = list[tuple[Path, Mapping[str, Any]]]  # the files of the optimizer's state, with their content


@reader("DeepSpeed", lambda path: ds.tag_of(path, POINTER))
def read(tag: Path) -> Checkpoint:
    """The checkpoint of a tag's folder, or of the tag that ``latest`` in a folder names. Raises CheckpointError."""
    parts = _parts(tag)
    (_, of_ranks), *_ = parts
    found = [_read_part(*part) for part in parts]
    cuts = ds.inner(of_ranks[0][1]).get(ds.CUTS)
    whole = found[0] if len(found) == 1 else _joined(found) if cuts is None else _of_shards(tag, found, cuts)
    stages = len(parts) if any(map(ds.LAYER.fullmatch, ds.names_in(tag))) else 1
    return replace(_before_first(whole), world={**whole.world, "pp": stages})


def _before_first(checkpoint: Checkpoint) -> Checkpoint:
    """With the state that this package's rules begin with: a run that has taken no step has none in DeepSpeed's files,
    and every other writer saves it. A matrix of a class has owner state alone, which begins as none."""
    params = dict(checkpoint.params)
    for name, param in checkpoint.params.items():
        group = {} if param.group is None else checkpoint.groups[param.group]
        if param.states.keys() - {MASTER} or param.owner_states or param.step is not None:
            continue
        first = registry.saved_state(group)
        if group.get("rule") in registry.MATRIX_RULES and "class" not in group:
            first = registry.new_state(torch.zeros(1), group)
        states = {
            key: zeros(param.shape, value.dtype, key) if value.ndim else held(value, key)
            for key, value in first.items()
            if key != STEP
        }
        params[name] = replace(param, states={**param.states, **states}, step=0.0 if STEP in first else None)
    return replace(checkpoint, params=params)


def _parts(tag: Path) -> list[tuple[ModelStates, OfRanks]]:
    """The files of a tag, by pipeline stage or tensor-parallel rank; at stage 0 of ZeRO by expert-parallel rank, where
    each has its own optimizer. Raises CheckpointError."""
    ds.check_layers(tag)
    rank, *others = ds.model_parallel_ranks(tag) or [0]
    names, first = ds.names_in(tag), ds.model_files(tag, rank)
    if any(map(ds.LAYER.fullmatch, names)):
        count = int(ds.load_mapping(first[0]).get("mp_world_size") or 1)
        stages = [ds.model_files(tag, stage) for stage in range(count)]
        layers = ds.layers_in(tag, [_shapes_in(file, ds.load_mapping(file)) for file, *_ in stages])
        read = [ds.read_model_states(*pair) for pair in zip(stages, layers)]
        return [(states, _of_ranks(tag, states, number)) for number, states in enumerate(read)]
    states = ds.read_model_states(first)
    if not any(map(ds.OF_EXPERT.fullmatch, names)):
        return _shards(tag, (states, _of_ranks(tag, states, rank)), others)
    shapes = _shapes_in(states.path, states.saved)
    experts = ds.experts_in(tag, states.saved, shapes)
    whole = [{new: g[name] for name in g for new in experts.all_of(name)} for g in states.shapes or ()]
    held = {new for name in states.saved.get("buffer_names") or () for new in experts.all_of(name)}
    trained = {new for name in shapes for new in experts.all_of(name)} - held
    known, tensors = {*trained, *held}, experts.tensors.items()
    states = replace(
        states,
        shapes=whole if states.shapes is not None else None,
        module={**states.module, **experts.tensors},
        buffers={**states.buffers, **{name: tensor for name, tensor in tensors if name in held}},
        frozen={**states.frozen, **{name: tensor for name, tensor in tensors if name not in known}},
    )
    if states.shapes is not None:
        of_ranks = _of_ranks(tag, states)
        return [(states, [(f, _whole_names(o, experts.first(rank))) for rank, (f, o) in enumerate(of_ranks)])]
    files = sorted((int(m[1]), tag / m[0]) for m in map(ds.WITH_EXPERTS.fullmatch, names) if m)
    apart = experts.ranks // len(files) if experts.in_rows and files else 1  # ranks from one of these to the next
    found = [(file, ds.load_mapping(file)["optimizer"], experts.first(number * apart)) for number, file in files]
    of_ranks = [(file, _whole_names(optimizer, mine)) for file, optimizer, mine in found]
    if missing := trained - {name for _, saved in of_ranks for group in saved[ds.NAMES] for name in group}:
        raise CheckpointError(
            f"{tag}: expected a file expp_rank_..._optim_states.pt with {min(missing)!r}; copy it again"
        )
    return [(states, [of_rank]) for of_rank in of_ranks]


def _shards(tag: Path, first: tuple[ModelStates, OfRanks], others: Sequence[int]) -> list[tuple[ModelStates, OfRanks]]:
    """The files of a rank, ``first``, and of the ``others`` that are tensor-parallel. Raises CheckpointError."""
    states, of_ranks = first
    if (count := 1 + len(others)) != (saved_on := states.saved.get("mp_world_size") or 1):
        raise CheckpointError(
            f"{tag}: expected the files of {saved_on} tensor-parallel ranks, as in {states.path.name}, found {count}; "
            "copy the whole folder again"
        )
    if others and ds.CUTS not in ds.inner(of_ranks[0][1]):
        raise ds.not_told(tag, count)
    read = [(ds.read_model_states(ds.model_files(tag, other)), other) for other in others]
    return [first, *((states, _of_ranks(tag, states, other)) for states, other in read)]


def _shapes_in(file: Path, saved: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The shapes of the parameters of a file of model states, and names of buffers. Raises CheckpointError."""
    listed, optimizer = saved.get("param_shapes"), saved.get("optimizer")
    if listed is not None:
        shapes = {name: shape_of(shape) for group in listed for name, shape in group.items()}
        return {**dict.fromkeys(saved.get("buffer_names") or ()), **shapes}
    names = [name for group in _names_at_stage0(file, optimizer) for name in group]
    return dict.fromkeys((*(saved.get("buffer_names") or ()), *names))


def _of_ranks(tag: Path, states: ModelStates, part: int = 0) -> OfRanks:
    """The files of the optimizer's state of a pipeline stage or tensor-parallel rank. Raises CheckpointError."""
    if states.shapes is None:
        optimizer = states.saved.get("optimizer")
        if not isinstance(optimizer, Mapping):
            raise CheckpointError(f"{states.path}: expected an optimizer's state, found only weights")
        return [(states.path, optimizer)]
    found = []
    for file in ds.optimizer_files(tag, states.ranks, part):
        saved = ds.load_mapping(file).get("optimizer_state_dict")
        if not isinstance(saved, Mapping):
            raise CheckpointError(f"{file}: expected 'optimizer_state_dict'; copy ZeRO's file again")
        found.append((file, saved))
    return found


def _whole_names(saved: Mapping[str, Any], first: Mapping[str, int]) -> dict[str, Any]:
    """A rank's optimizer state, with the experts' names in the whole model."""

    def renamed(named: Mapping[str, Any]) -> dict[str, Any]:
        return {ds.renumbered(name, first): value for name, value in named.items()}

    found = dict(saved)
    if isinstance(saved.get("base_optimizer_state"), Mapping):
        found["base_optimizer_state"] = _whole_names(saved["base_optimizer_state"], first)
    if "param_slice_mappings" in saved:
        found["param_slice_mappings"] = [renamed(places) for places in saved["param_slice_mappings"]]
    if ds.MATRICES in saved:
        found[ds.MATRICES] = renamed(saved[ds.MATRICES])
    if ds.NAMES in saved:
        found[ds.NAMES] = [[ds.renumbered(name, first) for name in group] for group in saved[ds.NAMES]]
    return found


def _read_part(states: ModelStates, of_ranks: OfRanks) -> Checkpoint:
    if all(MARK in saved for _, saved in of_ranks):
        return read_owned(states, of_ranks)
    if states.shapes is None:
        return read_stage0(states, of_ranks[0][1])
    if not all("fp32_flat_groups" in saved for _, saved in of_ranks):
        return read_partitions(states, of_ranks)
    tag = states.path.parent
    first, *others = ds.model_parallel_ranks(tag)
    if others:
        raise ds.not_told(tag, 1 + len(others))
    if apart := [name for name in ds.names_in(tag) if name.startswith("layer_")]:
        raise CheckpointError(f"{tag}: expected the whole model in one file at stage 3, found {apart[0]}; {ds.CONVERT}")
    if (files := len(ds.model_files(tag, first))) != states.ranks:
        raise CheckpointError(
            f"{tag}: expected the model states' files of {states.ranks} ranks, found {files}; copy it again"
        )
    return read_stage3(states, of_ranks)


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether param groups of two parts of a model are one. None means unknown, e.g. a rate in a single group."""
    keys = {*one, *other} - {"members"}
    return all(one.get(key) == other.get(key) or None in (one.get(key), other.get(key)) for key in keys)


def _joined(parts: Sequence[Checkpoint]) -> Checkpoint:
    """The whole of ``parts``: stages of a pipeline, or ranks with different experts. A parameter in several parts must
    be the same in all. Raises CheckpointError if the parts are of different steps."""
    first = parts[0]
    groups: list[Mapping[str, Any]] = []
    params: dict[str, Param] = {}
    replicas = [each for part in parts for each in part.replicas]
    of_parts: list[list[int]] = []  # the numbers of each part's groups
    for part in parts:
        if part.iteration != first.iteration:
            counts = f"{first.iteration} and {part.iteration} steps"
            raise CheckpointError(f"expected model states of one step, found {counts}; copy one save again")
        numbers: list[int] = []
        for group in part.groups:
            fits = [n for n, other in enumerate(groups) if n not in numbers and _alike(group, other)]
            numbers.append(fits[0] if fits else len(groups))
            known = {key: value for n in fits[:1] for key, value in groups[n].items() if value is not None}
            groups[numbers[-1] : numbers[-1] + 1] = [{**group, **known}]
        of_parts.append(numbers)
        for name, param in part.params.items():
            before = params.get(name)
            if before is None or param.states and not before.states:
                params[name] = param if param.group is None else replace(param, group=numbers[param.group])
            elif before.states and param.states:
                common = before.states.keys() & param.states.keys()
                replicas += [(f"{key} of {name}", before.states[key], param.states[key]) for key in sorted(common)]
    matrices = {name: of for part in parts for name, of in part.arguments.get(ds.MATRICES, {}).items()}
    return replace(
        first,
        scheduler=joined_schedules([part.scheduler for part in parts], of_parts),
        client=joined_schedules([part.client for part in parts], of_parts),
        params=params,
        groups=tuple(groups),
        arguments={**first.arguments, **({ds.MATRICES: matrices} if matrices else {})},
        replicas=tuple(replicas),
        tied={name: of for part in parts for name, of in part.tied.items()},
        buffers={name: tensor for part in parts for name, tensor in part.buffers.items()},
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _of_shards(tag: Path, parts: Sequence[Checkpoint], cuts: Mapping[str, Any]) -> Checkpoint:
    """The whole model, of which ``parts`` are the tensor-parallel ranks' shards. Raises CheckpointError."""
    first, replicas = parts[0], [each for part in parts for each in part.replicas]
    params: dict[str, Param] = {}
    for name, param in first.params.items():
        of_parts = [part.params.get(name, param) for part in parts]
        if any(each.step != param.step or each.tensors.keys() != param.tensors.keys() for each in of_parts):
            raise CheckpointError(f"{tag}: expected states of {name!r} to agree; copy all of one save")
        tensors = {}
        for key, tensor in param.tensors.items():
            shards = [each.tensors[key] for each in of_parts]
            if name in cuts and tensor.shape:
                tensors[key] = uncut(shards, *cuts[name])
            else:
                tensors[key] = tensor
                replicas += [(f"{key} of {name} on tensor-parallel ranks", tensor, other) for other in shards[1:]]
        owner = {place: partial(e.owner_states.__getitem__, place) for e in of_parts for place in e.owner_states}
        params[name] = replace(param.changed(tensors), owner_states=OwnerStates(owner))
    for name, buffer in first.buffers.items():
        others = [part.buffers[name] for part in parts[1:] if name in part.buffers]
        replicas += [(f"buffer {name} on tensor-parallel ranks", buffer, other) for other in others]
    world = {**first.world, "tp": len(parts)}
    return replace(first, params=params, replicas=tuple(replicas), world=world)


# ZeRO 1 and 2, BF16_Optimizer among them: a flat tensor per param group, cut over the ranks.
# ``param_slice_mappings`` has the places: by group and parameter, the start of its elements in the rank's part, and
# their number. A parameter's pieces follow each other in the order of the ranks. State is placed like the weights,
# except with DeepSpeed's own Muon: a rank keeps momentum, in whole tensors and in the same order, of all parameters
# with elements in its part (stage_1_and_2.py, ``_get_flat_partition_unpadded``), unless optimizer state is offloaded.
# Read in 0.19.8.

BUFFER = "momentum_buffer"


def read_partitions(states: ModelStates, of_ranks: OfRanks) -> Checkpoint:
    """Read a checkpoint of stage 1 or 2. Raises CheckpointError."""
    assert states.shapes is not None
    gathered = {n: Gathered(n, shape, g) for g, params in enumerate(states.shapes) for n, shape in params.items()}
    offload = (states.saved.get("ds_config") or {}).get("zero_optimization", {}).get("offload_optimizer") or {}
    for file, saved in of_ranks:
        base = saved["base_optimizer_state"]
        if not isinstance(base, Mapping):
            raise CheckpointError(
                f"{file}: expected 'base_optimizer_state' as a dictionary, found a list, as written with "
                "zero_optimization.elastic_checkpoint; load it with DeepSpeed and save it with elastic_checkpoint off"
            )
        # BF16_Optimizer, which saves no stage, cuts the momentum of DeepSpeed's Muon.
        keeps_whole = "zero_stage" in saved and offload.get("device", "none") == "none"
        for number, places in enumerate(saved["param_slice_mappings"]):
            state = {MASTER: saved["single_partition_of_fp32_groups"][number], **base["state"].get(number, {})}
            ordered = sorted(places.items(), key=lambda place: place[1].start)
            unknown = [name for name, _ in ordered if name not in gathered]
            if unknown:
                raise CheckpointError(f"{file}: {unknown[0]!r}: expected it in {states.path}; copy one save")
            params = [gathered[name] for name, _ in ordered]
            copied, buffer = None, state.get(BUFFER)
            use_muon = keeps_whole and base["param_groups"][number].get("use_muon")
            is_whole = isinstance(buffer, LazyTensor) and buffer.numel == sum(found.numel for found in params)
            if use_muon and is_whole:
                copied = state.pop(BUFFER)
            offset = 0
            for found, (_, place) in zip(params, ordered):
                if copied is not None:
                    copy = ds.cut(copied, offset, found.numel, f"{BUFFER} of {found.name!r}", file)
                    found.copies.setdefault(BUFFER, []).append(copy.view(found.shape))
                begin = sum(numel for *_, numel, _ in found.pieces.get(MASTER, ()))  # in the order of the ranks
                found.add(state, place.start, place.numel, begin, file)
                offset += found.numel
    ds.take_owner_states(gathered, (saved["base_optimizer_state"] for _, saved in of_ranks))
    _, first = of_ranks[0]
    base, stage = first["base_optimizer_state"], "1 or 2" if "zero_stage" in first else "1 (BF16_Optimizer)"
    said = [ds.matrices_in(saved["base_optimizer_state"]) for _, saved in of_ranks]  # ranks may have other experts
    matrices = None if said[0] is None else {name: of for each in said for name, of in (each or {}).items()}
    return ds.checkpoint_of(states, f"deepspeed zero {stage}", gathered, base["param_groups"], first, matrices)


# Checkpoints of owned storage under DeepSpeed, ``"storage": "owned"``, stages 0 to 2; see the mark in the file.
# At stages 1 and 2 a rank's file has the pieces of parameters that it owns, each in its own group; at stage 0 the
# file of model states has everything whole. Both have names of parameters, and their matrices.

MARK = "lwopt.owned"  # the key under which a checkpoint of owned storage describes itself


def read_owned(states: ModelStates, of_ranks: OfRanks) -> Checkpoint:
    """Read a checkpoint of owned storage; at stage 0, ``of_ranks`` has one entry. Raises CheckpointError."""
    _, first = of_ranks[0]
    whole, members = "weights" in first, first[MARK]["members"]
    groups = first["param_groups"] if whole else first["base_optimizer_state"]["param_groups"]
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    gathered = {name: Gathered(name, tuple(shape), group_of[name]) for name, shape, _, _ in members}
    owners: dict[str, dict[int, Any]] = {}
    for file, saved in of_ranks:
        for number, (name, *_) in enumerate(members):
            if whole:
                start, weights, state = 0, saved["weights"][name], saved["state"][name]
            else:
                start, stop = saved[MARK]["pieces"].get(name, (0, 0))
                weights = saved["single_partition_of_fp32_groups"][number]
                if not weights.numel:
                    continue
                if weights.numel != stop - start:
                    expected = f"expected {stop - start} elements of {name!r}, found {weights.numel}"
                    raise CheckpointError(f"{file}: {expected}; copy it again")
                state = saved["base_optimizer_state"]["state"][number]
            kept = {MASTER: weights, **state}
            flat = {key: v.view((v.numel,)) if isinstance(v, LazyTensor) and v.shape else v for key, v in kept.items()}
            gathered[name].add(flat, 0, weights.numel, start, file)
        for name, of_places in (saved.get(CHECKPOINT_KEY) or {}).items():
            owners.setdefault(name, {}).update(of_places)  # ranks may own matrices of one parameter
    for name, of_places in owners.items():
        gathered[name].owner = ds.owner_states(dict(sorted(of_places.items())))
    format = f'deepspeed with "storage": "owned", stage {first.get("zero_stage")}'
    matrices = {name: list(of_member) for name, _, _, of_member in members}
    return ds.checkpoint_of(states, format, gathered, groups, first, matrices)


# Native checkpoints of stage 0: the first rank's optimizer, whole, in the file of model states.
# State is by a parameter's number in the param groups. This package saves names; DeepSpeed saves none.


def _names_at_stage0(file: Path, optimizer: Any) -> list[list[str]]:
    """The parameters' names by param group. Raises CheckpointError for another optimizer's state, which has none."""
    if not isinstance(optimizer, Mapping) or ds.NAMES not in optimizer:
        raise CheckpointError(
            f"{file}: expected the parameters' names, found none, because DeepSpeed saves states at stage 0 by number; "
            "load the checkpoint where it was saved, and save it at ZeRO stage 1"
        )
    names: list[list[str]] = optimizer[ds.NAMES]
    return names


def read_stage0(states: ModelStates, saved: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint of stage 0, of which this package's optimizer has ``saved``. Raises CheckpointError."""
    gathered: dict[str, Gathered] = {}
    groups, state = saved["param_groups"], saved["state"]
    for number, (group, names) in enumerate(zip(groups, _names_at_stage0(states.path, saved))):
        for index, name in zip(group["params"], names):
            weight = states.module.get(name)
            if weight is None:
                raise CheckpointError(f"{states.path}: expected a file with weights of {name!r}; copy it")
            found = gathered[name] = Gathered(name, weight.shape, number)
            found.copies[MASTER] = [weight]
            for key, value in state.get(index, {}).items():
                if isinstance(value, LazyTensor) and value.shape:
                    found.copies[key] = [value]
                elif value is not None:
                    found.add_number(key, value, states.path)
    ds.take_owner_states(gathered, [saved])
    return ds.checkpoint_of(states, "deepspeed stage 0", gathered, groups, saved, ds.matrices_in(saved))


# Native checkpoints of ZeRO 3: every parameter cut into equal flat parts, one for each rank, by sub-groups.
# A rank's flat tensor of a sub-group holds its parts of the sub-group's parameters one after the other, each as long as
# the first rank's; the excess on the last ranks is padding (stage3.py, ``_create_fp16_sub_groups``). Read in 0.19.8.


def read_stage3(states: ModelStates, of_ranks: OfRanks) -> Checkpoint:
    assert states.shapes is not None
    file, first = of_ranks[0]
    if first.get("ds_zero_partition_groups"):
        raise CheckpointError(f"{file}: expected no experts on some ranks only (AutoEP); use ds_to_universal")
    optimizer, ranks = first["optimizer_state_dict"], len(of_ranks)
    groups = optimizer["param_groups"]
    group_of = {index: number for number, group in enumerate(groups) for index in group["params"]}
    listed = [(name, shape, i) for i, params in enumerate(states.shapes) for name, shape in params.items()]
    gathered = {name: Gathered(name, shape, group_of.get(i, 0)) for name, shape, i in listed}
    for rank, (file, saved) in enumerate(of_ranks):
        flats = saved["fp32_flat_groups"]
        if len(flats) != len(states.shapes):
            raise CheckpointError(
                f"{file}: expected {len(states.shapes)} sub-groups, as in {states.path}, found {len(flats)}; copy all "
                "files of one save"
            )
        for index, (flat, sub_group) in enumerate(zip(flats, states.shapes)):
            state = {MASTER: flat, **saved["optimizer_state_dict"]["state"].get(index, {})}
            offset = 0
            for found in map(gathered.__getitem__, sub_group):
                numel = found.numel
                part = -(-numel // ranks)
                begin = min(rank * part, numel)
                found.add(state, offset, min(part, numel - begin), begin, file)
                offset += part
    ds.take_owner_states(gathered, (saved["optimizer_state_dict"] for _, saved in of_ranks))
    return ds.checkpoint_of(states, "deepspeed zero 3", gathered, groups, first, ds.matrices_in(optimizer))
