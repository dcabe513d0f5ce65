"""Reads folders of torch.distributed.checkpoint (DCP): tensors box by box, owner state, other objects."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents, ties
from lwopt_backend.checkpoint.contents import (
    MATRICES,
    Checkpoint,
    CheckpointError,
    LazyTensor,
    OwnerStates,
    Param,
    shape_of,
)
from lwopt_backend.checkpoint.files import manifest, pickles, torch_files
from lwopt_backend.checkpoint.files.folders import check_inside
from lwopt_backend.checkpoint.files.pickles import plain, scalar
from lwopt_backend.checkpoint.files.torch_files import Stored, StoredTensor
from lwopt_backend.groups import registry
from lwopt_backend.groups.rates import factors_of, restored, scaled, with_true_rates
from lwopt_backend.plan.layouts import boxes_of
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.state import STEPPED, STRUCTURE

# DCP's file ``.metadata``: a folder's tensors with their chunks, other objects, and their places.

METADATA, FILE = ".metadata", ".distcp"
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and its place. ``stored`` is None if the folder's metadata does not have it."""

    offsets: Sizes
    sizes: Sizes
    stored: Stored | None


@dataclass(frozen=True)
class Entry:
    """A tensor, and the boxes in which it was saved."""

    shape: Sizes
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def near(self, offsets: Sizes, sizes: Sizes) -> Sequence[Chunk]:
        """The chunks with rows in common with a box. A tensor may have a chunk of every rank, or of every layer."""
        if not self.shape:
            return self.chunks
        chunks, starts, ends = self._by_row
        return chunks[bisect.bisect_right(ends, offsets[0]) : bisect.bisect_left(starts, offsets[0] + sizes[0])]

    @functools.cached_property
    def _by_row(self) -> tuple[list[Chunk], list[int], list[int]]:
        """The chunks by their first rows; these; and for each chunk the last row up to it, plus one."""
        chunks = sorted(self.chunks, key=lambda chunk: chunk.offsets[0])
        ends = itertools.accumulate((chunk.offsets[0] + chunk.sizes[0] for chunk in chunks), max)
        return chunks, [chunk.offsets[0] for chunk in chunks], list(ends)


class DcpFolder:
    """The tensors and objects of one step's folder. Raises CheckpointError for files that are missing, truncated, or of
    another save than the manifest's, for content that DCP does not write, and for places outside the folder.

    ``tensors`` and ``objects`` are by their keys; ``paths`` are the keys' parts in the nested state dict, if it was
    flattened; ``extra`` is Megatron's note about tensors up to 0.15, None for other writers; ``stored`` are all places.
    Without ``with_files`` the files are first checked when they are read, because another rank checks them.
    """

    def __init__(self, path: Path, with_files: bool = True) -> None:
        self.path, metadata = path, path / METADATA
        try:
            check_inside(metadata, path)
            content = metadata.read_bytes()
            manifest.check(metadata, lambda: zlib.crc32(content))
            saved = pickles.load_metadata(content, str(metadata))
        except OSError as error:
            raise CheckpointError(
                f"{metadata} cannot be read ({error}), and the folder's other files need it; copy it again"
            ) from error
        try:
            stored = _stored(metadata, saved)
            self.tensors = dict(_tensors(saved, stored))
            keys = [key for key in saved.state_dict_metadata if key not in self.tensors]
            self.objects = {key: stored.get((key, None)) for key in keys}
            self.paths: dict[str, tuple[Any, ...]] = {}
            for key, parts in (saved.planner_data or {}).items():
                if type(key) is not str or type(parts) is not tuple or not all(type(p) in (str, int) for p in parts):
                    raise ValueError("expected the path of a key as names and numbers, found others")
                self.paths.update({key: parts} if parts else {})
            self.extra = dict(saved.mcore_data or {}) if hasattr(saved, "mcore_data") else None
        except CheckpointError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{metadata} is not what DCP writes: {error}; copy it again") from error
        self.stored = tuple(stored.values())
        self._check_chunks()
        if with_files:
            self._check_files()
        self._saved: dict[Stored, StoredTensor] = {}

    def _check_files(self) -> None:
        """Raises CheckpointError for files that are missing, truncated, or of another save."""
        folder, metadata = self.path, self.path / METADATA
        listed = manifest.check_files(folder)
        if listed is not None:
            manifest.check_marks(listed, FILE)
        ends: dict[Path, int] = {}
        used: dict[Path, int] = {}
        for place in self.stored:
            if place.offset < 0 or place.length < 0:
                raise CheckpointError(f"{metadata} is damaged: a negative place in {place.path.name}; copy it")
            ends[place.path] = max(ends.get(place.path, 0), place.offset + place.length)
            used[place.path] = used.get(place.path, 0) + place.length
        for path, end in sorted(ends.items()):
            check_inside(path, folder)
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; copy all files of {folder}")
            size = path.stat().st_size
            if size < end:
                raise CheckpointError(f"{path} ends early: expected {end} bytes, found {size}; copy it again")
            if size < used[path]:
                raise CheckpointError(f"{metadata} is damaged: several tensors have one place in {path}; copy it again")

    def _check_chunks(self) -> None:
        """Raises CheckpointError for tensors with parts that the metadata lacks."""
        folder, metadata = self.path, self.path / METADATA
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                if chunk.stored is None:
                    raise CheckpointError(f"{metadata}: expected the place of {key}, found none; copy it again")
                nbytes, found = math.prod(chunk.sizes) * entry.dtype.itemsize, chunk.stored.length
                if nbytes > found:
                    raise CheckpointError(
                        f"{metadata} is damaged: {key}: expected a chunk of {nbytes} bytes, found {found}"
                    )
            saved = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if saved < math.prod(entry.shape):
                start = (0,) * len(entry.shape)
                raise CheckpointError(incomplete(f"{key} in {folder}", saved, entry.shape, start))

    def add(self, other: DcpFolder) -> None:
        """Add the tensors and objects of another folder. Raises CheckpointError for a key that is in both."""
        if twice := {*self.tensors, *self.objects} & {*other.tensors, *other.objects}:
            raise CheckpointError(f"{other.path}: expected other keys than in {self.path}, found {min(twice)} in both")
        self.tensors.update(other.tensors)
        self.objects.update(other.objects)
        self.paths.update(other.paths)
        self.stored += other.stored

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
        """Raises CheckpointError unless the elements [start, stop) of a tensor have their checksums."""
        entry, where = self.tensors[key], f"{key} in {self.path}"
        for offsets, sizes in boxes_of(entry.shape, start, stop):
            for chunk in entry.near(offsets, sizes):
                ends = zip(offsets, sizes, chunk.offsets, chunk.sizes)
                if all(a < b + m and b < a + n for a, n, b, m in ends):
                    self._stored(chunk, entry, where).record.check()

    def object(self, key: str) -> Any:
        """An object other than a tensor, with the tensors in it in memory."""
        stored = self.objects[key]
        if stored is None:
            raise CheckpointError(f"{self.path}: expected the place of {key} in {METADATA}, found none; copy it again")
        return torch_files.load_here(stored, f"{key} in {stored.path}")

    def _stored(self, chunk: Chunk, entry: Entry, where: str) -> StoredTensor:
        assert chunk.stored is not None  # checked before
        saved = self._saved.get(chunk.stored)
        if saved is None:
            loaded = torch_files.load_part(chunk.stored, f"{where}/{chunk.stored.path.name}")
            saved = self._saved.setdefault(chunk.stored, loaded)
        if not isinstance(saved, StoredTensor) or (saved.shape, saved.dtype) != (chunk.sizes, entry.dtype):
            found = f"{saved.dtype} of {saved.shape}" if isinstance(saved, StoredTensor) else type(saved).__name__
            raise CheckpointError(
                f"{where}: expected {entry.dtype} of shape {chunk.sizes} at {chunk.offsets}, found {found} in "
                f"{chunk.stored.path.name}; the files are of different checkpoints: copy one again"
            )
        return saved


def _stored(path: Path, metadata: Any) -> dict[tuple[str, Sizes | None], Stored]:
    found = {}
    for index, info in metadata.storage_data.items():
        if type(index.fqn) is not str or not all(type(n) is int for n in (info.offset, info.length)):
            raise ValueError("expected a place in a file as a name and two numbers")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{index.fqn} in {path.parent}: expected uncompressed data, found {info.transform_descriptors}, which "
                "is not supported; save it again without storage extensions"
            )
        relative = info.relative_path
        if manifest.leads_out(relative):
            raise CheckpointError(
                f"{path}: expected {index.fqn} in this folder, found the place {relative!r} outside of it, which no "
                "writer of checkpoints makes; do not use it"
            )
        offset = vars(index).get("offset")  # None is not pickled
        offset = None if offset is None else shape_of(offset)
        found[index.fqn, offset] = Stored(path.parent / relative, info.offset, info.length)
    return found


def _tensors(metadata: Any, stored: Mapping[tuple[str, Sizes | None], Stored]) -> Iterator[tuple[str, Entry]]:
    for key, found in metadata.state_dict_metadata.items():
        if type(key) is not str or len(key) > contents.LONGEST_NAME:
            raise ValueError(f"expected a key as text, found a {type(key).__name__}, or a long one")
        if not hasattr(found, "chunks"):
            continue
        shape, whole = shape_of(found.size), stored.get((key, None))
        chunks = {}
        for chunk in found.chunks:
            offsets, sizes = shape_of(chunk.offsets), shape_of(chunk.sizes)
            inside = all(first + size <= end for first, size, end in zip(offsets, sizes, shape))
            if not len(offsets) == len(sizes) == len(shape) or not inside:
                raise ValueError(f"expected chunks of {key} within shape {shape}, found {sizes} at {offsets}")
            place = stored.get((key, offsets), whole if len(found.chunks) == 1 else None)
            chunks[offsets, sizes] = Chunk(offsets, sizes, place)
        dtype, *_ = found.properties.stub_state  # TensorProperties pickles itself as a tuple
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"expected a dtype of {key}, found a {type(dtype).__name__}")
        yield key, Entry(shape, dtype, tuple(chunks.values()))


def incomplete(where: str, saved: int, sizes: Sequence[int], offsets: Sequence[int]) -> str:
    """The error for a box with only ``saved`` elements."""
    return (
        f"{where}: expected {math.prod(sizes)} elements at {tuple(offsets)}, found {saved} in the saved chunks; copy "
        "every rank's file"
    )


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
            f"{described.where}: expected the structure of {sorted(found)}, found another ({error!r}); copy it again"
        ) from error


def take_matrices(saved: dict[str, LazyTensor]) -> list[str] | None:
    """Pop and return the elements of a parameter's matrices; None if they are not saved."""
    described = saved.get(MATRICES)
    if described is None or described.dtype != torch.uint8 or len(described.shape) != 1:
        return None
    del saved[MATRICES]
    try:
        return list(map(str, nested.rebuild(nested.description(described.read()), {})))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{described.where}: the names of its matrices cannot be read ({error!r})") from error


def _own_keys(weight: LazyTensor, group: Mapping[str, Any]) -> set[str] | None:
    """The keys of the rule's state with the parameter's shape; None if it has no other state."""
    if group.get("rule", "") in {"", *registry.ELEMENTWISE_RULES}:
        return None
    if "class" in group:  # the file names the class, which is not imported; all its state is owner state
        return set()
    try:
        return set(registry.new_state(torch.empty(weight.shape, device="meta"), group))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weight.where}: the rule of its group fails ({error}): {dict(group)}") from error


# Checkpoints of FSDP2 runs, with or without this package, are made of torch's state dicts:
#
#     {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), anything else}
#
# nested (``state.<parameter>.<key>``, ``param_groups.<number>.<option>``) or flattened
# (``param_groups.<parameter>.<option>``), under whatever names. Parameters have the module's own names. Only
# ``iteration``, ``samples``, ``scheduler`` (a state dict), ``arguments`` and ``names`` are read otherwise, and mean
# what they mean in ``Checkpoint``; this package writes them under these keys, and training may.

ENTRIES = "lwopt_entries"  # this package's record of entries without tensors, not flattened
KNOWN = {"iteration": int, "samples": int, "scheduler": Mapping, "arguments": Mapping, "names": str}
GROUPS, STATE = "param_groups.", "state."
OF_MODEL, OF_OPTIMIZER = "pytorch_model_fsdp_", "optimizer_"  # with a number, Accelerate's folders of a model's parts
MOST_OPTIMIZERS = 64  # every key is compared with all their names


def recognises(path: Path) -> bool:
    """Whether it is a folder of DCP. Megatron's formats, which DCP also writes, must be tested first."""
    return any((folder / METADATA).is_file() for folder in (path, path / f"{OF_MODEL}0"))


def _opened(path: Path) -> DcpFolder:
    """The folder, or the content of Accelerate's folders in it. Raises CheckpointError."""
    model, optimizer, second = (path / name for name in (f"{OF_MODEL}0", f"{OF_OPTIMIZER}0", f"{OF_MODEL}1"))
    if (path / METADATA).is_file() or not model.is_dir():
        return DcpFolder(path)
    if second.exists():
        raise CheckpointError(
            f"{path}: expected one model, found {model.name} and {second.name}; give one of these folders, for its "
            "weights alone"
        )
    folder = DcpFolder(model)
    if optimizer.exists():
        folder.add(DcpFolder(optimizer))
        folder.path = path
    return folder


@contents.reader("DCP")
def read(path: Path) -> Checkpoint:
    """A checkpoint's content. Raises CheckpointError for damage, and for tensors that are neither weight nor state."""
    saved = Saved(_opened(path))
    if not saved.weights:
        advice = "load a save of ModuleOptimizers with ModuleOptimizers"
        if path.name.startswith(OF_OPTIMIZER):
            advice = f"give the folder above, in which Accelerate also saves {OF_MODEL}0"
        raise CheckpointError(f"{path}: expected one model's weights, best under 'model', found none; {advice}")
    params = {name: saved.param(name, w) for name, w in saved.weights.items() if w.dtype.is_floating_point}
    others, notes = saved.others(), list[str]()
    if ties.RECORD in others:
        tied = ties.recorded(others.pop(ties.RECORD), params)
    else:
        tied, notes = ties.heads(params)
    known = {key: others[key] for key, kind in KNOWN.items() if isinstance(others.get(key), kind)}
    client = {key: value for key, value in others.items() if key not in known}
    steps = {int(param.step) for param in params.values() if param.step is not None}
    if "iteration" not in known and len(steps) == 1:
        count = known["iteration"] = steps.pop()
        notes.append(f"{path} has no iteration: {count} is assumed, the optimizer's count of steps")
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
        iteration=known.get("iteration"),
        samples=known.get("samples"),
        scheduler=known.get("scheduler"),
        tied=tied,
        buffers={name: weight for name, weight in saved.weights.items() if name not in params},
        client=client,
        notes=tuple(notes),
    )


class Saved:
    """One model and its optimizer in a folder.

    ``weights`` are by parameter; ``states`` by parameter and key, owner state included; ``groups`` are the param
    groups' options; ``group_of`` is a parameter's group number; ``matrices`` are a parameter's, if saved. ``change``
    converts other objects, by default to ``plain`` data. Raises CheckpointError for state of unknown parameters.
    """

    def __init__(self, folder: DcpFolder, change: Callable[[Any], Any] = plain) -> None:
        self.folder, self.change = folder, change
        self.keys = keys = _Keys(folder)
        self.weights = {name: folder.tensor(key) for name, key in keys.weights.items()}
        groups, self.group_of = _groups(folder, keys.options, self.weights, change)
        self.groups, self._factors = with_true_rates(groups), factors_of(groups)
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
        """A parameter's saved tensors. Raises CheckpointError for state of unknown shape or place.

        Owner state is saved as ``<key>``, or ``[<place>].<key>`` if the parameter has several matrices: one tensor
        each, cut by rows. State with more than tensors by name also has ``structure`` and ``stepped``, and a parameter
        whose shape does not define its matrices has ``matrices`` (``lwopt_backend/runtime/state.py``).
        """
        group, saved = self.group_of.get(name), dict(self.states.get(name, {}))
        counter, master = saved.pop("step", None), saved.pop(contents.MASTER, None)
        described = {key.removesuffix(STRUCTURE) for key in saved if key == STRUCTURE or key.endswith(f".{STRUCTURE}")}
        matrix_of = {key: max((m for m in described if key.startswith(m)), key=len, default=None) for key in saved}
        own = None  # the keys of state other than owner state, if known from the rule
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
                raise CheckpointError(f"{misshapen}; state of other shapes is read only for rules of this package")
            else:
                matrix = key.rpartition(".")[0] if matrix is None else matrix.removesuffix(".")
                number = re.fullmatch(r"\[(\d+)\]", matrix)
                if matrix and number is None:
                    raise CheckpointError(
                        f"{tensor.where}: expected the rows of matrix {matrix!r} in a fused parameter, found none in "
                        "the checkpoint; save the state again where it was trained"
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
        """Entries other than the model's and the optimizer's, nested as they were saved."""
        folder, flat = self.folder, dict[tuple[Any, ...], Any]()
        for key in self.keys.others:
            path = tuple(folder.paths.get(key, (key,)))
            value = self.change(folder.object(key)) if key in folder.objects else folder.tensor(key)
            flat[path] = scalar(value) if path[0] in KNOWN else value
        whole = flat.pop((ENTRIES,), {})
        found = {**{key: restored(value) for key, value in by_paths(flat, folder.path).items()}, **whole}
        return {key: scaled(value, self._factors) for key, value in found.items()}


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
                raise CheckpointError(f"{folder}: expected {path} once, found a value and a dictionary; copy it again")
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
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = self.folder
        every = [*folder.tensors, *folder.objects]
        starts = (re.search(rf"(^|\.){re.escape(GROUPS)}", key) for key in every)
        optimizers = {start.string[: start.end() - len(GROUPS)] for start in starts if start}
        if len(optimizers) > MOST_OPTIMIZERS:
            raise CheckpointError(f"{folder.path}: expected one optimizer's groups, found {len(optimizers)}")
        model: dict[tuple[Any, ...], dict[str, str]] = {}
        has_model = any(folder.paths.get(key, (key,))[:-1] == ("model",) for key in every if key in folder.tensors)
        for key in every:
            optimizer = max((prefix for prefix in optimizers if key.startswith(prefix)), key=len, default=None)
            rest = "" if optimizer is None else key.removeprefix(optimizer)
            path = folder.paths.get(key, (key,))
            if rest.startswith(GROUPS):
                self.options[key] = rest.removeprefix(GROUPS)
            elif rest.startswith(STATE) and key in folder.tensors:
                self.states[key] = rest.removeprefix(STATE)
            elif key in folder.tensors and (path[:-1] == ("model",) or folder.tensors[key].shape and not has_model):
                model.setdefault(tuple(path[:-1]), {})[str(path[-1])] = key
            else:
                self.others.append(key)
        if len(model) > 1:
            raise CheckpointError(
                f"{folder.path}: expected one model's weights, best under 'model', found tensors under "
                f"{sorted('.'.join(map(str, prefix)) for prefix in model)}"
            )
        self.weights = next(iter(model.values()), {})


def _name_in(key: str, names: Collection[str]) -> str | None:
    """The longest of ``names`` with which a key begins, before a dot."""
    end = len(key)
    while (end := key.rfind(".", 0, end)) > 0:
        if key[:end] in names:
            return key[:end]
    return None


def _split(rest: str, names: Collection[str], where: str) -> tuple[str, str]:
    """The parameter, with the longest name that fits, and the rest of the key."""
    if (name := _name_in(rest, names)) is not None:
        return name, rest[len(name) + 1 :]
    if rest.partition(".")[0].isdecimal():
        raise CheckpointError(
            f"{where}: expected state by a parameter's name, found a number; save the state with torch's "
            "get_optimizer_state_dict, which names parameters"
        )
    raise CheckpointError(f"{where}: expected state of a known parameter; save the weights under 'model'")


def _groups(
    folder: DcpFolder, options: Mapping[str, str], names: Collection[str], change: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The groups' options, and each parameter's group; if flattened, equal options make a group."""
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    for key, rest in options.items():
        value = folder.tensor(key).read().tolist() if key in folder.tensors else scalar(change(folder.object(key)))
        first, _, option = rest.partition(".")
        if first.isdecimal() and _name_in(rest, names) is None:
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
