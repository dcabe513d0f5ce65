"""Megatron's MimoModel in ``torch_dist``: modules with an optimizer each, such as an encoder and a language model.

    language_model.[module.]<key>                  weights of the module "language"
    modality_submodules.<name>.[module.]<key>      weights of another module; "module." for each wrapper (DDP)
    mimo.<name>.<key of the optimizer>             in which keys of states end with those of weights

Source: ``MimoModel.sharded_state_dict`` and ``MimoOptimizer.sharded_state_dict`` in megatron/core/models/mimo, 0.19.2.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, Param
from lwopt_backend.checkpoint.dcp.reader import DcpFolder

LANGUAGE = "language"  # Megatron's name of the module that every MimoModel has
_OF_MODEL = ("mimo.", "modality_submodules.")
_STATE = re.compile(r"mimo\.([^.]+)\.")
_WEIGHT = re.compile(r"(?<![^.])(?:language_model|modality_submodules\.([^.]+))\.(?:module\.)*")


def modules(folder: DcpFolder) -> dict[str, DcpFolder]:
    """The folder of each module, with the keys of a model of its own; of no module under ""; {} for another model.
    Raises CheckpointError for a tensor of no module."""
    every = (*folder.tensors, *folder.objects)
    if not any(key.startswith(_OF_MODEL) for key in every):
        return {}
    keys: dict[str, dict[str, str]] = {"": {}}
    for key in every:
        state, weight = _STATE.match(key), _WEIGHT.search(key)
        if state is None and (weight is None or weight.start()):
            if key in folder.tensors:
                raise CheckpointError(
                    f"{key} in {folder.path}: expected a tensor of a module of Megatron's MimoModel, found another; "
                    "save without it"
                )
            keys[""][key] = key
            continue
        name = state[1] if state else (weight and weight[1]) or LANGUAGE
        keys.setdefault(name, {})[_WEIGHT.sub("", key[state.end() :] if state else key, count=1)] = key
    return {name: _with_keys(folder, of_module) for name, of_module in keys.items()}


def _with_keys(folder: DcpFolder, keys: Mapping[str, str]) -> DcpFolder:
    """The folder with some of its tensors and objects, under new keys."""
    found = copy.copy(folder)
    found.tensors = {new: folder.tensors[key] for new, key in keys.items() if key in folder.tensors}
    found.objects = {new: folder.objects[key] for new, key in keys.items() if key in folder.objects}
    return found


def joined(parts: Mapping[str, Checkpoint], notes: Collection[str]) -> Checkpoint:
    """All modules in one checkpoint: names and groups begin with the module's. ``notes`` are on the whole."""
    params: dict[str, Param] = {}
    tied: dict[str, str] = {}
    buffers: dict[str, LazyTensor] = {}
    groups, replicas, said = list[Mapping[str, object]](), [], [*notes]
    for module, part in parts.items():
        for name, param in part.params.items():
            number = None if param.group is None else param.group + len(groups)
            params[f"{module}.{name}"] = replace(param, group=number)
        tied |= {f"{module}.{name}": f"{module}.{of}" for name, of in part.tied.items()}
        buffers |= {f"{module}.{name}": buffer for name, buffer in part.buffers.items()}
        replicas += [(f"{what} of module {module}", one, other) for what, one, other in part.replicas]
        groups += [{"module": module, **group} for group in part.groups]
        said += [f"{module}: {note}" for note in part.notes]
    steps = {param.step for param in params.values() if param.step is not None}
    uncounted = {name: param for name, param in params.items() if "exp_avg_sq" in param.states and param.step is None}
    if uncounted and len(steps) == 1:  # the first rank's modules have it: MimoOptimizer steps all modules or none
        (step,) = steps
        params |= {name: replace(param, step=step) for name, param in uncounted.items()}
        said.append(f"Adam's count of steps where it is not saved: {step:.0f}, that of the other modules")
    said.append(f"Modules of Megatron's MimoModel: {', '.join(parts)}. --module converts one of them.")
    whole = replace(next(iter(parts.values())), names="model", params=params, groups=tuple(groups), tied=tied)
    return replace(whole, buffers=buffers, replicas=tuple(replicas), notes=tuple(said))
