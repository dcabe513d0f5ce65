"""Checkpoints of FSDP2 runs, ours and others', as torch.distributed.checkpoint writes them from torch's state dicts:

    {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), anything else}

nested (``state.<parameter>.<key>``, ``param_groups.<number>.<option>``) or flattened
(``param_groups.<parameter>.<option>``), under whatever names. Parameters have the module's own names. Of anything else
``iteration``, ``samples``, ``scheduler`` (a state dict), ``arguments`` and ``names`` are taken for what ``Checkpoint``
calls so; our writer writes them under these keys, and training may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint import inferred
from lwopt_backend.checkpoint.contents import MATRICES, Checkpoint, CheckpointError, Param, read_as_expected
from lwopt_backend.checkpoint.dcp.files import METADATA, DcpFolder
from lwopt_backend.checkpoint.dcp.owners import take_matrices, with_owner_states
from lwopt_backend.checkpoint.files.plain_data import plain
from lwopt_backend.checkpoint.lazy import LazyTensor

GROUPS, STATE = "param_groups.", "state."
MOST_OPTIMIZERS = 64  # every key is compared with all their names


def recognises(path: Path) -> bool:
    """Whether DCP wrote it; Megatron's formats, which it also writes, are to be asked first."""
    try:
        return (path / METADATA).is_file()
    except OSError:
        return False


def read(path: Path) -> Checkpoint:
    """What is in it. Raises CheckpointError for what is damaged, and for tensors that are neither weight nor state."""
    return read_as_expected(lambda: _read(path), path, "DCP")


def _read(path: Path) -> Checkpoint:
    folder = DcpFolder(path)
    keys = _Keys(folder)
    weights = {name: folder.tensor(key) for name, key in keys.weights.items()}
    saved: dict[str, dict[str, LazyTensor]] = {}
    for key, rest in keys.states.items():
        name, state = _split(rest, weights, f"{key} in {path}")
        saved.setdefault(name, {})[state] = folder.tensor(key)
    groups, group_of = _groups(folder, keys.options, weights)
    matrices = {name: found for name, of_name in saved.items() if (found := take_matrices(of_name)) is not None}
    params, buffers = {}, {}
    for name, weight in weights.items():
        if not weight.dtype.is_floating_point:
            buffers[name] = weight
            continue
        number = group_of.get(name)
        params[name] = _param(weight, saved.get(name, {}), None if number is None else groups[number], number)
    tied = inferred.tied(params)
    known, client = inferred.split(_others(folder, keys.others))
    counted = inferred.iteration_of(params) if "iteration" not in known else None
    arguments = dict(known.get("arguments", {}))
    if matrices:
        arguments[MATRICES] = {**(arguments.get(MATRICES) or {}), **matrices}
    return Checkpoint(
        format="torch dcp",
        version="",
        names=known.get("names", "model"),
        params={name: param for name, param in params.items() if name not in tied},
        groups=tuple(groups),
        arguments=arguments,
        iteration=known.get("iteration", counted),
        samples=known.get("samples"),
        scheduler=known.get("scheduler"),
        tied=tied,
        buffers=buffers,
        client=client,
        notes=tuple(inferred.sentences(tied, path, counted)),
    )


def _others(folder: DcpFolder, keys: list[str]) -> dict[str, Any]:
    """What is neither the model's nor the optimizer's, nested as it was."""
    flat = {key: plain(folder.object(key)) for key in keys if key in folder.objects}
    flat.update({key: folder.tensor(key).read().item() for key in keys if key in folder.tensors})
    return _nested({tuple(folder.paths.get(key, (key,))): value for key, value in flat.items()}, folder)


class _Node(dict[Any, Any]):
    """A dictionary, or a list by place, that was flattened."""


def _nested(flat: Mapping[tuple[Any, ...], Any], folder: DcpFolder) -> dict[str, Any]:
    """Values by their paths, nested. Raises CheckpointError for paths that contradict each other."""
    root = _Node()
    for path, value in flat.items():
        place: Any = root
        for part in path[:-1]:
            place = place.setdefault(part, _Node())
            if not isinstance(place, _Node):
                raise CheckpointError(f"{folder.path}: {path} is both a value and a dictionary; copy it again")
        place[path[-1]] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Node):
        return value
    found = {key: _with_lists(part) for key, part in value.items()}
    is_list = all(isinstance(key, int) for key in found)
    return [found[key] for key in sorted(found)] if is_list else found


@dataclass
class _Keys:
    """A folder's keys by what they are of: weights by name; states and options by what stands after the optimizer."""

    folder: DcpFolder
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        every = [*self.folder.tensors, *self.folder.objects]
        optimizers = {key[: _found(key, GROUPS)] for key in every if _found(key, GROUPS) >= 0}
        if len(optimizers) > MOST_OPTIMIZERS:
            raise CheckpointError(f"{self.folder.path} has the param groups of {len(optimizers)} optimizers")
        model: dict[tuple[Any, ...], dict[str, str]] = {}
        for key in every:
            optimizer = max((prefix for prefix in optimizers if key.startswith(prefix)), key=len, default=None)
            rest = "" if optimizer is None else key.removeprefix(optimizer)
            if rest.startswith(GROUPS):
                self.options[key] = rest.removeprefix(GROUPS)
            elif rest.startswith(STATE) and key in self.folder.tensors:
                self.states[key] = rest.removeprefix(STATE)
            elif key in self.folder.tensors and self.folder.tensors[key].shape:
                path = self.folder.paths.get(key, (key,))
                model.setdefault(tuple(path[:-1]), {})[str(path[-1])] = key
            else:
                self.others.append(key)
        if len(model) > 1 and ("model",) in model:
            strange = next(
                key for prefix, of_prefix in model.items() if prefix != ("model",) for key in of_prefix.values()
            )
            raise CheckpointError(
                f"{strange} in {self.folder.path} is neither a weight under 'model' nor an optimizer's state; save it "
                "elsewhere: what is not known would be lost"
            )
        if len(model) != 1:
            raise CheckpointError(
                f"{self.folder.path}: expected one model's weights, best under 'model', found tensors under "
                f"{sorted('.'.join(map(str, prefix)) for prefix in model)}"
            )
        (self.weights,) = model.values()


def _found(key: str, word: str) -> int:
    """Where the word begins as a part of a key, or -1."""
    return 0 if key.startswith(word) else key.find(f".{word}") + 1 or -1


def _split(rest: str, names: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The parameter, with the longest name that fits, and what stands after it."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in names:
            return rest[:end], rest[end + 1 :]
    raise CheckpointError(f"{where} is state of none of the model's parameters; are its weights saved under 'model'?")


def _groups(
    folder: DcpFolder, options: Mapping[str, str], names: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The groups' options, and each parameter's group; flattened, groups are of those whose options are equal."""
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for key, rest in options.items():
        value = folder.tensor(key).read().tolist() if key in folder.tensors else plain(folder.object(key))
        first, _, option = rest.partition(".")
        if first.isdecimal() and not any(rest.startswith(f"{name}.") for name in names):
            numbered.setdefault(int(first), {})[option] = value
        else:
            name, option = _split(rest, names, f"{key} in {folder.path}")
            by_name.setdefault(name, {})[option] = value
    groups = [numbered[number] for number in sorted(numbered)]
    group_of = {name: number for number, group in enumerate(groups) for name in group.pop("params", [])}
    for name, of_name in by_name.items():
        if of_name not in groups:
            groups.append(of_name)
        group_of[name] = groups.index(of_name)
    return groups, group_of


def _param(
    weight: LazyTensor, saved: dict[str, LazyTensor], group: Mapping[str, Any] | None, number: int | None
) -> Param:
    """``saved``: all that the optimizer has for it, by key."""
    saved = dict(saved)
    counter = saved.pop("step", None)
    step = None if counter is None else float(counter.read().item())
    states, owner_states = with_owner_states(weight, saved, group)
    return Param(weight, states, step, number, owner_states)
