"""Megatron-FSDP's ``fsdp_dtensor`` checkpoints: every tensor whole, by its name, with its own hyperparameters.

model.module.<name>                                                fp32: the master weight
optimizer.state.module.module.module.<name>.{exp_avg, exp_avg_sq}
optimizer.param_to_group_meta.module.module.module.<name>.<option> e.g. lr, betas, step
args, iteration, opt_param_scheduler.<option>, ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, reader
from lwopt_backend.checkpoint.dcp.reader import METADATA, DcpFolder
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.megatron import conventions
from lwopt_backend.checkpoint.megatron.conventions import POINTER, STATES, is_buffer, iteration_of, step_folder
from lwopt_backend.checkpoint.megatron.torch_dist import ordered, whole_name, with_gate_and_up

_MODEL = re.compile(r"model\.(?:module\.)+(.+)")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)*(.+)\.([^.]+)")
_OPTION = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)*(.+)\.([^.]+)")
_LEFT_OUT = re.compile(r"(checkpoint_version|num_floating_point_operations_so_far|content_metadata).*")
_RANDOM = re.compile(r"(rng_state|rerun_state_machine(_state)?)\b.*")
_SCHEDULER = "opt_param_scheduler."


def recognises(path: Path) -> bool:
    """Whether Megatron-FSDP wrote it; a step's folder, or the folder of steps."""
    step = step_folder(path)
    is_step = (path / POINTER).is_file() or step.name == "release" or iteration_of(step) is not None
    return is_step and (step / METADATA).is_file() and not (step / "metadata.json").exists()


@reader("Megatron", step_folder)
def read(step: Path) -> Checkpoint:
    """The checkpoint's content. Raises CheckpointError for damage, and for unknown keys."""
    folder = DcpFolder(step)
    weights: dict[str, LazyTensor] = {}
    by_state: dict[str, dict[str, LazyTensor]] = {}
    options, arguments, scheduler, notes = _objects(folder)
    for key in folder.tensors:
        if match := _MODEL.fullmatch(key):
            if not match[1].endswith("_extra_state"):
                weights[match[1]] = folder.tensor(key)
        elif (match := _STATE.fullmatch(key)) and match[2] in STATES:
            by_state.setdefault(match[2], {})[match[1]] = folder.tensor(key)
        elif match and match[2] == "step":  # torch's AdamW counts by parameter
            options.setdefault(match[1], {}).setdefault("step", folder.tensor(key).read().item())
        elif match := _OPTION.fullmatch(key):
            options.setdefault(match[1], {})[match[2]] = folder.tensor(key).read().item()
        elif not _RANDOM.fullmatch(key):
            raise CheckpointError(
                f"{key} in {step}: expected a weight or a known state ({', '.join(STATES)}); a checkpoint of another "
                "optimizer cannot be read"
            )
    groups: list[Mapping[str, Any]] = []  # of parameters with equal options
    numbers = {}
    for name, of_name in options.items():
        if of_name not in groups:
            groups.append(of_name)
        numbers[whole_name(name)] = groups.index(of_name)
    whole = with_gate_and_up(weights)
    states: dict[str, dict[str, LazyTensor]] = {}
    for state, tensors in by_state.items():
        for name, tensor in with_gate_and_up(tensors).items():
            states.setdefault(name, {})[state] = tensor
    conventions.check_states(states, whole, str(step))
    params = {}
    for name in ordered([name for name in whole if not is_buffer(name)], arguments):
        weight, number = whole[name], numbers.get(name)
        if weight.dtype != torch.float32:
            raise CheckpointError(f"{weight.where}: expected fp32 of Megatron-FSDP, found {weight.dtype}")
        made = None if number is None else groups[number].get("step")
        # The weights that the model computes with are not saved: the master weight also serves as the weight.
        kept = {MASTER: weight, **states.get(name, {})}
        params[name] = Param(weight, kept, None if made is None else float(made), number)
    saved = plain(folder.object("iteration")) if "iteration" in folder.objects else None
    return Checkpoint(
        format="megatron fsdp_dtensor",
        version="0.14 or later",
        names="megatron-core",
        params=params,
        groups=tuple(groups),
        arguments=arguments,
        iteration=saved if isinstance(saved, int) else iteration_of(step),
        samples=arguments.get("consumed_train_samples"),
        scheduler=scheduler or None,
        world=conventions.world(arguments),
        tied=conventions.tied(whole, arguments),
        buffers={name: tensor for name, tensor in whole.items() if is_buffer(name)},
        notes=notes,
    )


def _objects(folder: DcpFolder) -> tuple[dict[str, dict[str, Any]], dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Each parameter's options, Megatron's arguments, the scheduler's state, and omissions."""
    options: dict[str, dict[str, Any]] = {}
    scheduler: dict[str, Any] = {}
    left_out: dict[str, None] = {}
    for key in folder.objects:
        if match := _OPTION.fullmatch(key):
            options.setdefault(match[1], {})[match[2]] = plain(folder.object(key))
        elif key.startswith(_SCHEDULER):
            scheduler[key.removeprefix(_SCHEDULER)] = plain(folder.object(key))
        elif key not in ("args", "iteration") and not _LEFT_OUT.fullmatch(key):
            left_out.setdefault("rng_state" if _RANDOM.fullmatch(key) else key)
    arguments = plain(folder.object("args")) if "args" in folder.objects else {}
    return options, arguments, scheduler, tuple(f"left out: {what}" for what in left_out)
