"""Reads folders of torch.distributed.checkpoint (DCP): tensors box by box, owner state, other objects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents, convert
from lwopt_backend.checkpoint.contents import MATRICES, Checkpoint, CheckpointError, LazyTensor, OwnerStates, Param
from lwopt_backend.checkpoint.dcp.saving import METADATA as METADATA
from lwopt_backend.checkpoint.dcp.saving import Chunk, Entry, incomplete, read_metadata
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.checkpoint.files.torch_files import Stored, StoredTensor
from lwopt_backend.config import registry
from lwopt_backend.plan.layouts import boxes_of
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.state import STEPPED, STRUCTURE


class DcpFolder:
    """The tensors and objects of one step's folder. Raises CheckpointError for files that are missing or too short.

    ``tensors`` and ``objects`` are by their keys; ``paths`` are the keys' parts as the state dict was nested, where it
    was flattened; ``extra`` is what Megatron up to 0.15 noted about tensors. With ``metadata_only`` other files need
    not be there: nothing can be read then. ``proven`` says that a manifest lists them.
    """

    def __init__(self, path: Path, metadata_only: bool = False) -> None:
        metadata = read_metadata(path)
        self.proven = not metadata_only and metadata.check_files()
        self.path, self.tensors, self.objects, self.paths = path, metadata.tensors, metadata.objects, metadata.paths
        self.extra: Mapping[str, Mapping[str, Any]] = metadata.extra or {}
        self.has_extra = metadata.extra is not None
        self._saved: dict[Stored, StoredTensor] = {}
        self._as_read = torch_files.as_read()  # now: threads that read do not know it
        if self._as_read is not None:  # what stays in memory comes first, so that blocks of tensors leave no holes
            for key, entry in self.tensors.items():
                for chunk in entry.chunks:
                    self._stored(chunk, entry, f"{key} in {path}")

    def tensor(self, key: str) -> LazyTensor:
        entry = self.tensors[key]
        return self.box(key, (0,) * len(entry.shape), entry.shape, entry.shape)

    def box(self, key: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> LazyTensor:
        """A box of a tensor, reshaped to ``shape``, of which ranges can be read."""
        offsets, sizes, shape = tuple(offsets), tuple(sizes), tuple(shape)

        def read() -> Tensor:
            return self.read_box(key, offsets, sizes).view(shape)

        def read_range(start: int, stop: int) -> Tensor:
            boxes = [([a + b for a, b in zip(offsets, begin)], part) for begin, part in boxes_of(sizes, start, stop)]
            inside = [self.read_box(key, begin, part).view(-1) for begin, part in boxes]
            return torch.cat(inside) if len(inside) > 1 else inside[0]

        return LazyTensor(shape, self.tensors[key].dtype, read, f"{key} in {self.path}", read_range)

    def read_box(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The elements of tensor ``key`` from ``offsets`` on, ``sizes`` in each dimension; reads only these. Raises
        CheckpointError for damage, and if chunks are missing."""
        entry, where, sizes = self.tensors[key], f"{key} in {self.path}", tuple(sizes)
        found = None
        missing = math.prod(sizes)
        for chunk in entry.near(tuple(offsets), sizes):
            begin = [max(a, b) for a, b in zip(offsets, chunk.offsets)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes)]
            shape = tuple(b - a for a, b in zip(begin, end))
            if any(size <= 0 for size in shape):
                continue
            saved = self._stored(chunk, entry, where)
            first = sum((a - b) * step for a, b, step in zip(begin, chunk.offsets, saved.stride))
            part = saved.box(first, shape, saved.stride)
            missing -= part.numel()
            if shape == sizes:
                found = part
                continue
            if found is None:
                found = torch.empty(sizes, dtype=entry.dtype)
            found[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets))] = part
        if missing:
            raise CheckpointError(incomplete(where, math.prod(sizes) - missing, sizes, offsets))
        return torch.empty(sizes, dtype=entry.dtype) if found is None else found

    def check_range(self, key: str, start: int, stop: int) -> None:
        """Raises CheckpointError unless the elements [start, stop) of a tensor are as they were written."""
        entry, where = self.tensors[key], f"{key} in {self.path}"
        for offsets, sizes in boxes_of(entry.shape, start, stop):
            for chunk in entry.near(offsets, sizes):
                ends = zip(offsets, sizes, chunk.offsets, chunk.sizes)
                if all(a < b + m and b < a + n for a, n, b, m in ends):
                    self._stored(chunk, entry, where).record.check()

    def object(self, key: str) -> Any:
        """An object that is no tensor, with the tensors in it in memory."""
        stored = self.objects[key]
        if stored is None:
            raise CheckpointError(f"{self.path / METADATA} does not say where {key} is; copy it again")
        return torch_files.load_here(stored, f"{key} in {stored.path}")

    def _stored(self, chunk: Chunk, entry: Entry, where: str) -> StoredTensor:
        assert chunk.stored is not None  # checked before
        saved = self._saved.get(chunk.stored)
        if saved is None:
            loaded = torch_files.load_part(chunk.stored, f"{where}/{chunk.stored.path.name}", self._as_read)
            saved = self._saved.setdefault(chunk.stored, loaded)
        if not isinstance(saved, StoredTensor) or (saved.shape, saved.dtype) != (chunk.sizes, entry.dtype):
            found = f"{saved.dtype} of {saved.shape}" if isinstance(saved, StoredTensor) else type(saved).__name__
            raise CheckpointError(
                f"{where}: expected {entry.dtype} of shape {chunk.sizes} at {chunk.offsets}, found {found} in "
                f"{chunk.stored.path.name}; its files are not of one checkpoint"
            )
        return saved


def _state_of(saved: Mapping[str, LazyTensor]) -> Mapping[str, Any]:
    found = {key: tensor.read() for key, tensor in saved.items() if key not in (STRUCTURE, STEPPED)}
    if STRUCTURE not in saved:
        return found
    described = saved[STRUCTURE]
    try:
        state: Mapping[str, Any] = nested.rebuild(nested.description(described.read()), found)
        return state
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{described.where}: it does not describe what is there, {sorted(found)} ({error!r})"
        ) from error


def take_matrices(saved: dict[str, LazyTensor]) -> list[str] | None:
    """Pop and return which elements a parameter's matrices have; None if that is not saved."""
    described = saved.get(MATRICES)
    if described is None or described.dtype != torch.uint8 or len(described.shape) != 1:
        return None
    del saved[MATRICES]
    try:
        return list(map(str, nested.rebuild(nested.description(described.read()), {})))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{described.where}: it does not tell which matrices there are ({error!r})") from error


def _own_keys(weight: LazyTensor, group: Mapping[str, Any]) -> set[str] | None:
    """The keys of the rule's state of the parameter's shape; None if it keeps no other."""
    if group.get("rule", "") in {"", *registry.ELEMENTWISE_RULES}:
        return None
    if "class" in group:  # the file names the class, which is not imported; all its state is owner state
        return set()
    try:
        return set(registry.new_state(torch.empty(weight.shape, device="meta"), group))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weight.where}: its group's rule cannot be made ({error}): {dict(group)}") from error


# Checkpoints of FSDP2 runs, ours and others', are made of torch's state dicts:
#
#     {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), anything else}
#
# nested (``state.<parameter>.<key>``, ``param_groups.<number>.<option>``) or flattened
# (``param_groups.<parameter>.<option>``), under whatever names. Parameters have the module's own names. Of anything
# else ``iteration``, ``samples``, ``scheduler`` (a state dict), ``arguments`` and ``names`` are taken for what
# ``Checkpoint`` calls so; our writer writes them under these keys, and training may.

GROUPS, STATE = "param_groups.", "state."
MOST_OPTIMIZERS = 64  # every key is compared with all their names


def recognises(path: Path) -> bool:
    """Whether DCP wrote it; Megatron's formats, which DCP also writes, must be tested first."""
    try:
        return (path / METADATA).is_file()
    except OSError:
        return False


@contents.reader("DCP")
def read(path: Path) -> Checkpoint:
    """A checkpoint's content. Raises CheckpointError for damage, and for tensors that are neither weight nor state."""
    folder = DcpFolder(path)
    saved = Saved(folder)
    if not saved.weights:
        raise CheckpointError(
            f"{path}: expected one model's weights, best under 'model', found none; what ModuleOptimizers saved is "
            "read by these alone"
        )
    params = {name: saved.param(name, w) for name, w in saved.weights.items() if w.dtype.is_floating_point}
    tied = convert.tied(params)
    known, client = convert.split(saved.others())
    counted = convert.iteration_of(params) if "iteration" not in known else None
    arguments = dict(known.get("arguments", {}))
    if saved.matrices:
        arguments[MATRICES] = {**(arguments.get(MATRICES) or {}), **saved.matrices}
    return Checkpoint(
        format="torch dcp",
        version="",
        names=known.get("names", "model"),
        params={name: param for name, param in params.items() if name not in tied},
        groups=tuple(saved.groups),
        arguments=arguments,
        iteration=known.get("iteration", counted),
        samples=known.get("samples"),
        scheduler=known.get("scheduler"),
        tied=tied,
        buffers={name: weight for name, weight in saved.weights.items() if name not in params},
        client=client,
        notes=tuple(convert.sentences(tied, path, counted)),
        proven=folder.proven,
    )


class Saved:
    """What a folder has of one model and its optimizer, under ``prefix`` if it has several.

    ``weights`` are by parameter; ``states`` by parameter and key, owner state included; ``groups`` are the param
    groups' options; ``group_of`` is a parameter's group number; ``matrices`` are a parameter's, if saved. ``change``
    converts other objects, by default to ``plain`` data. Raises CheckpointError for state of unknown parameters.
    """

    def __init__(self, folder: DcpFolder, prefix: str = "", change: Callable[[Any], Any] = plain) -> None:
        self.folder, self.change = folder, change
        self.keys = keys = _Keys(folder, prefix)
        self.weights = {name: folder.tensor(key) for name, key in keys.weights.items()}
        self.groups, self.group_of = _groups(folder, keys.options, self.weights, change)
        names = {**self.weights, **self.group_of}
        self.states: dict[str, dict[str, LazyTensor]] = {}
        self.key_of: dict[tuple[str, str], str] = {}
        for key, rest in keys.states.items():
            name, state = _split(rest, names, f"{key} in {folder.path}")
            self.states.setdefault(name, {})[state] = folder.tensor(key)
            self.key_of[name, state] = key
        found = {name: take_matrices(of_name) for name, of_name in self.states.items()}
        self.matrices = {name: matrices for name, matrices in found.items() if matrices is not None}

    def param(self, name: str, weight: LazyTensor) -> Param:
        """All that is saved of a parameter. Raises CheckpointError for state whose shape or place is not known.

        Owner state is saved as ``<key>``, or ``[<place>].<key>`` if the parameter has several matrices: one tensor
        each, cut by rows. State that is more than tensors by name also has ``structure`` and ``stepped``, and a
        parameter whose shape does not tell its matrices has ``matrices`` (``lwopt_backend/runtime/state.py``).
        """
        group, saved = self.group_of.get(name), dict(self.states.get(name, {}))
        counter, master = saved.pop("step", None), saved.pop(contents.MASTER, None)
        described = {key.removesuffix(STRUCTURE) for key in saved if key == STRUCTURE or key.endswith(f".{STRUCTURE}")}
        matrix_of = {key: max((m for m in described if key.startswith(m)), key=len, default=None) for key in saved}
        own = None  # the keys of state that is not owner state, if the rule tells
        if group is not None and (None in matrix_of.values() or "" in described):
            own = _own_keys(weight, self.groups[group])
        states = {} if master is None else {contents.MASTER: master}
        owners: dict[int, dict[str, LazyTensor]] = {}
        for key, tensor in saved.items():
            matrix = matrix_of[key]
            misshapen = f"{tensor.where}: expected the weight's shape {weight.shape}, found {tensor.shape}"
            if key in own if own is not None else matrix is None and tensor.shape in (weight.shape, ()):
                if tensor.shape != weight.shape and own is not None:
                    raise CheckpointError(misshapen)
                states[key] = tensor
            elif matrix is None and own is None:
                raise CheckpointError(f"{misshapen}; state of other shapes is read only of rules of ours")
            else:
                matrix = key.rpartition(".")[0] if matrix is None else matrix.removesuffix(".")
                number = re.fullmatch(r"\[(\d+)\]", matrix)
                if matrix and number is None:
                    raise CheckpointError(
                        f"{tensor.where}: the owner of matrix {matrix!r} keeps state of a part of a fused parameter, "
                        "and the checkpoint does not tell which rows it is; save it again where it was trained"
                    )
                of_owner = owners.setdefault(int(number[1]) if number else 0, {})
                of_owner[key.removeprefix(f"{matrix}." if matrix else "")] = tensor
        real = {  # before the first step, only the form of the state is saved
            place: partial(_state_of, state)
            for place, state in sorted(owners.items())
            if STEPPED not in state or bool(state[STEPPED].read().item())
        }
        step = None if counter is None else float(counter.read().item())
        return Param(weight, states, step, group, OwnerStates(real))

    def others(self) -> dict[str, Any]:
        """What is neither the model's nor the optimizer's, nested as it was saved."""
        folder, flat = self.folder, {}
        for key in self.keys.others:
            value = self.change(folder.object(key)) if key in folder.objects else folder.tensor(key).read().item()
            flat[tuple(folder.paths.get(key, (key,)))] = value
        return by_paths(flat, folder.path)


class _Node(dict[Any, Any]):
    """A dictionary, or a list by index, that was flattened."""


def by_paths(flat: Mapping[tuple[Any, ...], Any], folder: Path) -> dict[str, Any]:
    """Nest values by their paths. Raises CheckpointError for paths that contradict each other."""
    root = _Node()
    for path, value in flat.items():
        place: Any = root
        for part in path[:-1]:
            place = place.setdefault(part, _Node())
            if not isinstance(place, _Node):
                raise CheckpointError(f"{folder}: {path} is both a value and a dictionary; copy it again")
        place[path[-1]] = value

    def with_lists(value: Any) -> Any:
        if not isinstance(value, _Node):
            return value
        found = {key: with_lists(part) for key, part in value.items()}
        is_list = all(isinstance(key, int) for key in found)
        return [found[key] for key in sorted(found)] if is_list else found

    return {key: with_lists(value) for key, value in root.items()}


@dataclass
class _Keys:
    """A folder's keys by kind: weights by name; states and options by the rest of the key after the optimizer's."""

    folder: DcpFolder
    prefix: str
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = self.folder
        every = [key for key in (*folder.tensors, *folder.objects) if key.startswith(self.prefix)]
        starts = (re.search(rf"(^|\.){re.escape(GROUPS)}", key) for key in every)
        optimizers = {start.string[: start.end() - len(GROUPS)] for start in starts if start}
        if len(optimizers) > MOST_OPTIMIZERS:
            raise CheckpointError(f"{folder.path} has the param groups of {len(optimizers)} optimizers")
        model: dict[tuple[Any, ...], dict[str, str]] = {}
        for key in every:
            optimizer = max((prefix for prefix in optimizers if key.startswith(prefix)), key=len, default=None)
            rest = "" if optimizer is None else key.removeprefix(optimizer)
            path = folder.paths.get(key, (key,))
            if rest.startswith(GROUPS):
                self.options[key] = rest.removeprefix(GROUPS)
            elif rest.startswith(STATE) and key in folder.tensors:
                self.states[key] = rest.removeprefix(STATE)
            elif key in folder.tensors and (folder.tensors[key].shape or path[:-1] == ("model",)):
                model.setdefault(tuple(path[:-1]), {})[str(path[-1])] = key
            else:
                self.others.append(key)
        if len(model) > 1 and ("model",) in model:
            strange = next(key for prefix in model if prefix != ("model",) for key in model[prefix].values())
            raise CheckpointError(
                f"{strange} in {folder.path} is neither a weight under 'model' nor an optimizer's state; save it "
                "elsewhere: what is not known would be lost"
            )
        if len(model) > 1:
            raise CheckpointError(
                f"{folder.path}: expected one model's weights, best under 'model', found tensors under "
                f"{sorted('.'.join(map(str, prefix)) for prefix in model)}"
            )
        self.weights = next(iter(model.values()), {})


def _split(rest: str, names: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The parameter, with the longest name that fits, and the rest of the key."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in names:
            return rest[:end], rest[end + 1 :]
    if rest.partition(".")[0].isdecimal():
        raise CheckpointError(
            f"{where} is state of a numbered parameter; to convert it, save the state with torch's "
            "get_optimizer_state_dict, which names them"
        )
    raise CheckpointError(f"{where} is state of none of the model's parameters; are its weights saved under 'model'?")


def _groups(
    folder: DcpFolder, options: Mapping[str, str], names: Mapping[str, Any], change: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The groups' options, and each parameter's group; if flattened, parameters with equal options are a group."""
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for key, rest in options.items():
        value = folder.tensor(key).read().tolist() if key in folder.tensors else change(folder.object(key))
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
