"""Megatron's ``torch_dist`` checkpoints (0.14 and later), without Megatron: whole parameters and their optimizer state.

    iter_0000003/.metadata, __<rank>_<n>.distcp   weights by name; the optimizer's state by name or in flat buckets
    iter_0000003/common.pt                        arguments, iteration, groups; from 0.19 on an object in the .distcp

Everything that was sharded over ranks is whole here: tensors are read from chunks, one layer and expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, Param, reader
from lwopt_backend.checkpoint.dcp.reader import METADATA, DcpFolder
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.megatron import names as naming
from lwopt_backend.checkpoint.megatron.buffers import BUCKET, Replicas, states_in_buckets
from lwopt_backend.checkpoint.megatron.dist_names import Chain, Options, optimizers, ordered, parameters
from lwopt_backend.checkpoint.megatron.names import BY_NAME, SAVED_WHOLE, is_buffer

LAYOUTS = (None, "fully_reshardable", "dp_reshardable", "fully_sharded_model_space")
_CHAINED = re.compile(r"^(chained_\d+\.)+")
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
_OF_BUFFERS = re.compile(r"optimizer\.distributed\..*\.(optimizer|per_bucket_numel(_unpadded)?)(/.+)?")
_COMMON = re.compile(r"common_state(/shard_.+)?")
_LEFT_OUT = re.compile(r"rng_state/.+|.*_extra_state(/.+)?|rerun_state_machine_state(/.+)?")
States = dict[str, dict[str, LazyTensor]]


def recognises(path: Path) -> bool:
    """Whether it is a torch_dist checkpoint, or the folder of one of its steps."""
    try:
        step = naming.step_folder(path)
        return (step / METADATA).is_file() and (step / "metadata.json").is_file()
    except (CheckpointError, OSError):
        return False


@reader("Megatron", naming.step_folder)
def read(step: Path) -> Checkpoint:
    """The checkpoint's content. Raises CheckpointError for damage, and for unknown keys and layouts."""
    folder = DcpFolder(step)
    common = _common(folder)
    arguments = plain(common.get("args") or {})
    chained = optimizers(folder, common)
    groups = [group for chain in sorted(chained) for group in chained[chain]]
    weights, buffers, states, replicas = _tensors(folder, chained, arguments)
    numbers = naming.groups_of({name: weight.shape for name, weight in weights.items()}, groups, arguments)
    params = {}
    for name in ordered(weights, arguments):
        kept, number = states.get(name, {}), numbers[name]
        is_adam = "exp_avg" in kept
        if number is not None and (not kept or ("betas" in groups[number]) != is_adam):
            number = None  # its group's by the usual rules, which do not hold for another optimizer's states
        params[name] = Param(weights[name], kept, naming.step_of(groups, number) if is_adam else None, number)
    notes = _notes(folder)
    if groups and not any(param.states for param in params.values()):
        notes.append("there are param groups, but no state of a parameter is saved")
    without = [name for name, param in params.items() if "exp_avg" in param.states and param.step is None]
    if without:
        notes.append(f"how many steps Adam made is not saved ({len(without)} parameters, e.g. {without[0]})")
    return Checkpoint(
        format="megatron torch_dist",
        version=_version(folder, arguments),
        names="megatron-core",
        params=params,
        groups=tuple(groups),
        arguments=arguments,
        iteration=iteration if isinstance(iteration := common.get("iteration"), int) else naming.iteration_of(step),
        samples=arguments.get("consumed_train_samples"),
        scheduler=plain(common.get("opt_param_scheduler")),
        world=naming.world(arguments),
        replicas=tuple(replicas),
        tied=naming.tied(weights, arguments),
        buffers=buffers,
        notes=tuple(notes),
    )


@reader("Megatron", naming.step_folder)
def read_weights(step: Path) -> Mapping[str, Param]:
    """The parameters without the optimizer's state, from the folder's metadata alone. Raises CheckpointError."""
    folder = DcpFolder(step, metadata_only=True)
    of_model, _, _ = _keys(folder)
    return {name: Param(weight) for name, weight in parameters(folder, of_model).items() if not is_buffer(name)}


def _common(folder: DcpFolder) -> Mapping[str, Any]:
    """The objects that are no tensors: from common.pt, or from 0.19 on from an object in the folder's files."""
    path = folder.path / "common.pt"
    keys = [key for key in folder.objects if _COMMON.fullmatch(key)]
    if path.is_file():
        found = torch_files.load(path)
    elif keys:
        found = folder.object(keys[0])
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
    else:
        raise CheckpointError(f"{path} is missing, and {METADATA} has no common_state; copy all files of the folder")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"common state of {folder.path}: expected a dictionary, found a {type(found).__name__}")
    layout = (found.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if layout not in LAYOUTS:
        raise CheckpointError(
            f"{folder.path}: the optimizer's layout {layout!r} is not read, only {', '.join(map(str, LAYOUTS[1:]))}; "
            f"{SAVED_WHOLE}"
        )
    return found


def _tensors(
    folder: DcpFolder, chained: Mapping[Chain, tuple[Options, ...]], arguments: Mapping[str, Any]
) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor], States, Replicas]:
    """Weights, buffers, states by parameter, and pairs that must be equal."""
    of_model, of_state, has_buckets = _keys(folder)
    found = parameters(folder, of_model)
    buffers = {name: tensor for name, tensor in found.items() if is_buffer(name)}
    weights = {name: tensor for name, tensor in found.items() if name not in buffers}
    states: States = {}
    for saved, keys in of_state.items():
        for name, tensor in parameters(folder, keys).items():
            if BY_NAME[saved] in states.setdefault(name, {}):
                raise CheckpointError(f"{tensor.where}: {name} has two master weights; its files are of two savings")
            states[name][BY_NAME[saved]] = tensor
    replicas: Replicas = []
    if has_buckets:
        unnamed = {name: weight for name, weight in weights.items() if name not in states}
        of_experts = {c: any(g.get("is_expert_parallel") for g in groups) for c, groups in chained.items()}
        more, replicas = states_in_buckets(folder, unnamed, of_experts, arguments)
        states.update(more)
    naming.check_states(states, weights)
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
                f"{key} in {folder.path} is a state that is not known (known: {', '.join(BY_NAME)}; flat buckets of "
                "param, exp_avg, exp_avg_sq); save without precision-aware or other optimizers' own state"
            )
        elif not _LEFT_OUT.fullmatch(key):
            of_model[key] = key
    return of_model, of_state, has_buckets


def _version(folder: DcpFolder, arguments: Mapping[str, Any]) -> str:
    """Megatron-core's version, as far as it can be inferred; none is saved."""
    if any(_COMMON.fullmatch(key) for key in folder.objects):
        return "0.19 or later"
    if folder.has_extra:
        return "0.15 or earlier"
    if arguments.get("optimizer") == "dist_muon":
        return "0.16 or 0.17"
    return "0.18" if arguments.get("optimizer") == "muon" else "0.16 to 0.18"


def _notes(folder: DcpFolder) -> list[str]:
    """Notes on what was left out. Raises CheckpointError for unknown optimizer state, which must not be."""
    left_out: dict[str, int] = {}
    for key in folder.objects:
        plain_key = _CHAINED.sub("", key)
        if plain_key.startswith("optimizer.") and not _OF_BUFFERS.fullmatch(plain_key):
            raise CheckpointError(f"{key} in {folder.path} is optimizer state that is not known; {SAVED_WHOLE}")
        if not _COMMON.fullmatch(key) and not _OF_BUFFERS.fullmatch(plain_key):
            kind = key.partition("/")[0].rpartition(".")[2]
            left_out[kind] = left_out.get(kind, 0) + 1
    return [f"left out: {kind} ({count} objects)" for kind, count in sorted(left_out.items())]
