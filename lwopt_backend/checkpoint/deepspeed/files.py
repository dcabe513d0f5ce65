"""The files of a DeepSpeed checkpoint: their places, their contents, and state gathered from the ranks' parts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param, shape_of
from lwopt_backend.checkpoint.contents import MATRICES as MATRICES
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.checkpoint.files.folders import read_pointer
from lwopt_backend.checkpoint.files.pickles import Stub, options, plain
from lwopt_backend.runtime.state import CHECKPOINT_KEY

# The files of a DeepSpeed checkpoint, by DeepSpeed 0.19.8's names.
#
#     latest                                               the newest tag; latest_universal: the newest universal one
#     global_step100/                                      a tag
#       mp_rank_00_model_states.pt                           stages 0-2: the module, counters; at stage 0 the optimizer
#       zero_pp_rank_1_mp_rank_00_model_states.pt            stage 3: of every rank, the module without weights
#       [bf16_]zero_pp_rank_1_mp_rank_00_optim_states.pt     stages 1-3: of every rank, its part of the optimizer
#       layer_07-model_states.pt                             pipelines: a layer's weights; mp_rank_01 is stage 1
#       layer_0_expert_3_mp_rank_00_model_states.pt          an expert's weights; layer 0 is the first that has experts
#       expp_rank_1_mp_rank_00_optim_states.pt               stage 0: the optimizer, of every expert-parallel rank
#       zero/<parameter>/<key>.pt                            a universal checkpoint

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
LAYER = re.compile(r"layer_(\d+)-model_states\.pt")
OF_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_00_model_states\.pt")
WITH_EXPERTS = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")
UNIVERSAL_MARK = Path("zero", "optimizer_state.pt")
CONVERT = "convert it with DeepSpeed's ds_to_universal first, if that supports it, and give the new folder"


def tag_of(path: Path, pointer: str) -> Path:
    """The tag's folder: the one that ``pointer`` in ``path`` names, or ``path``. Raises CheckpointError."""
    file = path / pointer
    return read_pointer(file) if file.is_file() else path


def names_in(folder: Path) -> list[str]:
    """The files in a folder; none if it is not a folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def model_parallel_ranks(tag: Path) -> list[int]:
    """The numbers of the model-parallel ranks, or pipeline stages, that have files of model states."""
    return sorted({int(match[2]) for match in map(MODEL.fullmatch, names_in(tag)) if match})


def not_told(tag: Path, ranks: int) -> CheckpointError:
    return CheckpointError(
        f"{tag}: expected one model-parallel rank, found {ranks}, and the checkpoint does not record how their parts "
        f"fit together; {CONVERT}"
    )


def check_layers(tag: Path) -> None:
    """Raises CheckpointError for files of layers that are of no pipeline, or of one with experts."""
    names = names_in(tag)
    layers = [name for name in names if name.startswith("layer_") and not OF_EXPERT.fullmatch(name)]
    if not all(map(LAYER.fullmatch, layers)):
        raise not_told(tag, max(2, len(model_parallel_ranks(tag))))
    if layers and any(map(OF_EXPERT.fullmatch, names)):
        raise CheckpointError(f"{tag}: expected a pipeline without experts, found experts; {CONVERT}")


def model_files(tag: Path, part: int) -> list[Path]:
    """A pipeline stage's or a tensor-parallel rank's files of model states, by data-parallel rank; one at stages 0 to 2
    of ZeRO. Raises CheckpointError if one is missing."""
    matches = [match for match in map(MODEL.fullmatch, names_in(tag)) if match and int(match[2]) == part]
    return _complete(tag, {int(match[1] or 0): match[0] for match in matches}, f"mp_rank_{part:02d}_model_states.pt")


def optimizer_files(tag: Path, ranks: int, part: int = 0) -> list[Path]:
    """The files of a pipeline stage's or a tensor-parallel rank's optimizer state by data-parallel rank. Raises
    CheckpointError if there are not ``ranks``."""
    found: dict[int, str] = {}
    for match in filter(None, map(OPTIMIZER.fullmatch, names_in(tag))):
        rank = int(match[1])
        if int(match[2]) != part:
            continue
        if rank in found:
            raise CheckpointError(
                f"{tag}: expected one file of rank {rank}, found {found[rank]} and {match[0]}, of two saves; remove "
                "those of the older one"
            )
        found[rank] = match[0]
    files = _complete(tag, found, f"zero_pp_rank_0_mp_rank_{part:02d}_optim_states.pt")
    if len(files) != ranks:
        raise CheckpointError(
            f"{tag}: expected the optimizer's files of {ranks} data-parallel ranks, found {len(files)}; copy the "
            "whole folder again"
        )
    return files


def _complete(tag: Path, found: dict[int, str], first: str) -> list[Path]:
    if not found:
        raise CheckpointError(f"{tag}: expected a file {first}, found none; give the folder of a DeepSpeed checkpoint")
    for rank in range(max(found) + 1):
        if rank not in found:
            raise CheckpointError(f"{tag}: expected rank {rank}'s file next to {found[max(found)]}; copy it")
    return [tag / found[rank] for rank in range(len(found))]


# Keys that the engine writes; the rest is the user's.
ENGINE_KEYS = {
    *("module", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
    *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "ds_config", "ds_version", "universal_checkpoint_info"),
    "checkpoint_parallel_dimensions",
}
NOT_KEPT = ("data_sampler", "random_ltd")


@dataclass(frozen=True)
class ModelStates:
    """The content of one tag's files. ``shapes`` are the trained parameters' by name, in DeepSpeed's lists: by param
    group (stages 1 and 2) or sub-group (stage 3); None at stage 0. ``frozen`` parameters are whole. ``ranks`` is the
    number of data-parallel ranks that saved it."""

    path: Path
    saved: Mapping[str, Any]
    shapes: list[dict[str, tuple[int, ...]]] | None
    module: Mapping[str, LazyTensor]
    buffers: Mapping[str, LazyTensor]
    frozen: Mapping[str, LazyTensor]
    tied: Mapping[str, str]

    @property
    def ranks(self) -> int:
        return int(self.saved.get("dp_world_size") or 1)

    def weight(self, name: str, shape: tuple[int, ...]) -> LazyTensor | None:
        """The module's own weight, if the file has it whole."""
        found = self.module.get(name)
        return found if found is not None and found.shape == shape else None


# Separate files of weights: pipelines' layers and experts. A pipeline's parameters are named by their layer in the
# whole model; a layer that occurs several times is ``tied_modules.<key>``, and its files lack the key. deepspeed.moe
# numbers a rank's experts from 0, except in the names of these files and in their contents.

TIED = re.compile(r"tied_modules\.([^.]+)\..+")
EXPERT = re.compile(r"((?:.*\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")


def layers_in(tag: Path, shapes: Sequence[Mapping[str, tuple[int, ...] | None]]) -> list[dict[str, LazyTensor]]:
    """By pipeline stage, the module's tensors. ``shapes`` are those of the stages' parameters and buffers, if known.

    The tensors of an unknown layer are the first stage's. A tied layer that could be one of several is left out. Raises
    CheckpointError if another layer's file is missing.
    """
    found: list[dict[str, LazyTensor]] = [{} for _ in shapes]
    for match in filter(None, map(LAYER.fullmatch, names_in(tag))):
        tensors = {name: t for name, t in load_mapping(tag / match[0]).items() if isinstance(t, LazyTensor)}
        own = {f"{int(match[1])}.{name}": tensor for name, tensor in tensors.items()}
        stage = next((number for number, known in enumerate(shapes) if own.keys() & known.keys()), None)
        is_tied = False
        for number, known in enumerate(shapes if stage is None else ()):
            keys = {tied[1] for tied in map(TIED.fullmatch, known) if tied}
            named = [{f"tied_modules.{key}.{name}": tensor for name, tensor in tensors.items()} for key in keys]
            like = [one for one in named if all(known.get(name, ()) in (None, t.shape) for name, t in one.items())]
            is_tied |= bool(like)
            if len(like) == 1:
                found[number].update(like[0])
        if not is_tied:
            found[stage or 0].update(own)
    for known, tensors in zip(shapes, found):
        if missing := [name for name in known if name not in tensors and not TIED.fullmatch(name)]:
            raise CheckpointError(f"{tag}: expected a file of the layer with {missing[0]!r}; copy all files again")
    return found


def renumbered(name: str, first: Mapping[str, int]) -> str:
    """An expert's name in the whole model; ``first`` has the number of a rank's first expert, by the beginning of the
    name. Other names are returned as they are."""
    match = EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + first.get(match[1], 0)}{match[3]}"


@dataclass(frozen=True)
class Experts:
    """The experts of a checkpoint. By the beginning of their names: all ``tensors``, by whole name, the number of
    experts, and the number on a rank. ``ranks`` share the dense parameters."""

    tensors: Mapping[str, LazyTensor]
    count: Mapping[str, int]
    local: Mapping[str, int]
    ranks: int
    in_rows: bool  # use_data_before_expert_parallelism: neighbouring ranks have the same experts

    def first(self, rank: int) -> dict[str, int]:
        """The number of the first expert of ``rank``."""
        sizes = {prefix: count // self.local.get(prefix, count) for prefix, count in self.count.items()}
        places = {
            prefix: rank // (self.ranks // size) if self.in_rows else rank % size for prefix, size in sizes.items()
        }
        return {prefix: place * self.local.get(prefix, 0) for prefix, place in places.items()}

    def all_of(self, name: str) -> list[str]:
        """The names in the whole model for a rank's ``name``."""
        match = EXPERT.fullmatch(name)
        if match is None or match[1] not in self.count:
            return [name]
        return [renumbered(name, {match[1]: first}) for first in range(0, self.count[match[1]], self.local[match[1]])]


def experts_in(tag: Path, saved: Mapping[str, Any], names: Iterable[str]) -> Experts:
    """The experts of a checkpoint; none if it has no files of them. ``saved`` is the content of the file of model
    states, ``names`` are of parameters on one rank. Raises CheckpointError for files that are missing."""
    tensors: dict[str, LazyTensor] = {}
    for file in filter(OF_EXPERT.fullmatch, names_in(tag)):
        tensors.update({name: t for name, t in load_mapping(tag / file).items() if isinstance(t, LazyTensor)})

    def numbers(of: Iterable[str]) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for match in filter(None, map(EXPERT.fullmatch, of)):
            found.setdefault(match[1], set()).add(int(match[2]))
        return found

    for prefix, found in numbers(tensors).items():
        missing = next(number for number in range(len(found) + 1) if number not in found)
        if missing < len(found):
            raise CheckpointError(f"{tag}: expected a file of expert {missing} of {prefix}; copy all files again")
    count, local = ({prefix: len(found) for prefix, found in numbers(of).items()} for of in (tensors, names))
    ranks = int(saved.get("dp_world_size") or 1)
    for prefix, number in local.items():
        total = count.get(prefix, 0)
        if not total or total % number or ranks % (total // number):
            raise CheckpointError(
                f"{tag}: expected files of as many experts {prefix} as on {ranks} ranks with {number} each, found "
                f"{total}; copy the whole folder again"
            )
    in_rows = bool((saved.get("ds_config") or {}).get("use_data_before_expert_parallelism"))
    return Experts(tensors, count, local, ranks, in_rows)


def read_model_states(
    files: list[Path],
    layers: Mapping[str, LazyTensor] | None = None,
    of_first: Mapping[str, Any] | None = None,
) -> ModelStates:
    """The first rank's model states, and the other ranks' fragments of frozen parameters. ``layers`` are a pipeline
    stage's tensors, of other files; ``of_first`` is the content of the first file, if it was read before. Raises
    CheckpointError."""
    of_ranks = [load_mapping(files[0]) if of_first is None else of_first, *map(load_mapping, files[1:])]
    saved = of_ranks[0]
    for file, of_rank in zip(files, of_ranks):
        if layers is None and not isinstance(of_rank.get("module"), Mapping):
            raise CheckpointError(
                f"{file}: expected the model under 'module', found {type(of_rank.get('module')).__name__}; give a file "
                "of DeepSpeed's model states"
            )
        if of_rank.get("global_steps") != saved.get("global_steps"):
            counts = f"{of_rank.get('global_steps')} steps, {files[0].name} after {saved.get('global_steps')}"
            raise CheckpointError(f"{file}: expected one step, found {counts}; copy all files of one save")
    module = saved["module"] if layers is None else layers
    tensors = {name: value for name, value in module.items() if isinstance(value, LazyTensor)}
    buffers = {name: tensors[name] for name in saved.get("buffer_names") or () if name in tensors}
    listed = saved.get("param_shapes")
    shapes = None if listed is None else [{name: shape_of(shape) for name, shape in g.items()} for g in listed]
    tied = dict(saved.get("shared_params") or {})
    if shapes is None and not tied:  # DeepSpeed lists none at stage 0: tensors with the bytes of another
        tied = contents.aliases(tensors)
    trained = {name for group in shapes or () for name in group}
    frozen = _frozen(files[0], of_ranks, tensors)
    if shapes is not None:  # DeepSpeed lists no frozen parameters at stage 1, but the module has them
        known = {*trained, *buffers, *tied, *frozen}
        frozen.update({name: t for name, t in tensors.items() if name not in known and t.numel})
    return ModelStates(files[0], saved, shapes, tensors, buffers, frozen, tied)


NAMES = "lwopt.names"  # the key in this package's state at stage 0: the parameters' names by param group
CUTS = "lwopt.cuts"  # how tensor parallelism cuts parameters: by name the dimension, and the rows of each part of one


def inner(optimizer: Any) -> Mapping[str, Any]:
    """The state of the optimizer in ZeRO's wrapper, or of one that is in no wrapper; empty for anything else."""
    if isinstance(optimizer, Mapping) and "param_groups" not in optimizer:
        optimizer = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    return optimizer if isinstance(optimizer, Mapping) else {}


def load_mapping(file: Path) -> Mapping[str, Any]:
    """``torch_files.load`` of a file that must contain a dictionary. Raises CheckpointError."""
    saved = torch_files.load(file)
    if isinstance(saved, Mapping):
        return saved
    raise CheckpointError(f"{file}: expected DeepSpeed's dictionary, found {type(saved).__name__}")


def _frozen(file: Path, of_ranks: list[Mapping[str, Any]], module: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Frozen parameters: whole in the module (stages 1, 2), or cut into equal flat parts over the ranks (stage 3)."""
    found = {}
    for name, saved in (of_ranks[0].get("frozen_param_shapes") or {}).items():
        shape = shape_of(saved)
        if name in module and module[name].shape == shape:
            found[name] = module[name]
            continue
        parts = [(of_rank.get("frozen_param_fragments") or {}).get(name) for of_rank in of_ranks]
        tensors = [part for part in parts if isinstance(part, LazyTensor)]
        missing, has = math.prod(shape), sum(part.numel for part in tensors)
        if len(tensors) != len(parts) or has < missing:
            raise CheckpointError(
                f"frozen parameter {name!r}: expected {missing} elements over {len(parts)} ranks' files, of which the "
                f"first is {file}, found {has} in {len(tensors)}; copy the whole folder again"
            )
        pieces: list[LazyTensor] = []
        for part in tensors:  # elements beyond the last are padding
            taken = min(missing, part.numel)
            if taken or not pieces:
                pieces.append(part.piece(0, taken))
            missing -= taken
        found[name] = contents.end_to_end(pieces, shape)
    return found


def checkpoint_of(
    states: ModelStates,
    format: str,
    found: Mapping[str, Param | Gathered],
    groups: Iterable[Mapping[str, Any]],
    common: Mapping[str, Any],
    matrices: Mapping[str, list[str]] | None,
    *,
    names: str = "model",
    world: Mapping[str, int] | None = None,
    notes: Iterable[str] = (),
) -> Checkpoint:
    """The result of the readers of all stages: trained parameters, as they were ``found``, and everything else.

    ``common`` is the first rank's optimizer state, ``groups`` its param groups; ``matrices`` are each parameter's, if
    the files have them. Raises CheckpointError.
    """
    params = {name: each.param(states) if isinstance(each, Gathered) else each for name, each in found.items()}
    gathered = [each for each in found.values() if isinstance(each, Gathered)]
    saved, told = states.saved, list(notes)
    told += [f"{key!r} of {states.path} is not kept" for key in NOT_KEPT if saved.get(key) is not None]
    frozen = states.frozen
    if states.shapes is None:  # DeepSpeed lists no frozen parameters at stage 0
        listed = {*params, *states.buffers, *states.tied}
        frozen = {name: tensor for name, tensor in states.module.items() if name not in listed}
    everything = {**params, **{name: Param(weight) for name, weight in frozen.items() if name not in params}}
    order = dict.fromkeys((*(name for name in states.module if name in everything), *everything))
    scaler = common.get("loss_scaler")
    numbers = vars(scaler).items() if isinstance(scaler, Stub) else None
    of_scaler = (
        None if numbers is None else {key: plain(value) for key, value in numbers if not key.startswith("stub_")}
    )
    known = {"clip_grad": common.get("clip_grad"), "loss_scaler": of_scaler, MATRICES: matrices}
    return Checkpoint(
        format=format,
        version=str(saved.get("ds_version") or "unknown"),
        names=names,
        params={name: everything[name] for name in order},
        groups=tuple(map(options, groups)),
        arguments={
            "ds_config": plain(saved.get("ds_config") or {}, told),
            "skipped_steps": saved.get("skipped_steps") or 0,
            **{key: value for key, value in known.items() if value is not None},
        },
        iteration=saved.get("global_steps"),
        samples=saved.get("global_samples"),
        scheduler=plain(saved.get("lr_scheduler"), told),
        world={"dp": states.ranks, "tp": 1, "pp": 1, **(world or {})},
        replicas=tuple(
            (f"{key} of {each.name}, which several ranks store whole", first, other)
            for each in gathered
            for key, (first, *others) in each.copies.items()
            for other in others
        ),
        tied=states.tied,
        buffers=states.buffers,
        client={k: plain(value, told) for k, value in saved.items() if k not in ENGINE_KEYS},
        notes=tuple(told),
    )


def as_number(value: Any) -> float | None:
    """A counter as a float; it may be a tensor in the file."""
    found = value.read() if isinstance(value, LazyTensor) else value
    return None if found is None else float(found)


STEP = "step"


@dataclass
class Gathered:
    """The ranks' data of one parameter. ``pieces`` are (start, first, numel, flat tensor) by key, of which ``numel``
    elements from ``first`` on are the parameter's from ``start`` on; ``copies`` by key are whole and must be equal;
    ``numbers`` are the same on all ranks."""

    name: str
    shape: tuple[int, ...]
    group: int
    pieces: dict[str, list[tuple[int, int, int, LazyTensor]]] = field(default_factory=dict)
    copies: dict[str, list[LazyTensor]] = field(default_factory=dict)
    numbers: dict[str, LazyTensor | float] = field(default_factory=dict)
    owner: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def add(self, state: Mapping[str, Any], first: int, numel: int, start: int, file: Path) -> None:
        """Add a rank's ``state`` from ``file``: its numbers, and from every flat tensor the ``numel`` elements from
        ``first``, which begin at the parameter's element ``start``. Raises CheckpointError if these are too few."""
        for key, value in state.items():
            if key == MASTER or isinstance(value, LazyTensor) and value.shape:
                flat = check_cut(value, first, numel, f"{key} of {self.name!r}", file)
                self.pieces.setdefault(key, []).append((start, first, numel, flat))
            elif value is not None:
                self.add_number(key, value, file)

    def add_number(self, key: str, value: Any, file: Path) -> None:
        """Raises CheckpointError if ranks have different numbers."""
        before, found = as_number(self.numbers.setdefault(key, value)), as_number(value)
        if before != found:
            raise CheckpointError(
                f"parameter {self.name!r}: expected {key!r} to be {before}, as on the ranks before, found {found} in "
                f"{file}; copy all files of one save"
            )

    def param(self, states: ModelStates) -> Param:
        """Raises CheckpointError unless the pieces cover the whole parameter once."""
        found = {}
        for key, pieces in self.pieces.items():
            end, what = 0, f"{key} of parameter {self.name!r} in {states.path.parent}"
            pieces = sorted(pieces, key=lambda piece: piece[0])
            for start, _, numel, tensor in pieces:
                if start != end:
                    raise CheckpointError(
                        f"{what}: expected a piece from element {end} on, found one from {start} on ({tensor.where}); "
                        "copy all files of one save"
                    )
                end += numel
            if end != self.numel:
                raise CheckpointError(
                    f"{what}: expected {self.numel} elements, found {end} in all ranks' files; copy the whole folder "
                    "again"
                )
            kept = [piece for piece in pieces if piece[2]] or pieces[:1]
            found[key] = contents.end_to_end(contents.FlatPieces(piece[1:] for piece in kept), self.shape)
        found.update({key: copies[0] for key, copies in self.copies.items()})
        for key, value in self.numbers.items():
            if key != STEP:
                lazy = value if isinstance(value, LazyTensor) else contents.held(torch.tensor(float(value)), key)
                found[key] = lazy
        ordered = {key: found[key] for key in sorted(found, key=lambda key: key != MASTER)}
        weight, step = states.weight(self.name, self.shape), as_number(self.numbers.get(STEP))
        return Param(weight, ordered, step, self.group, self.owner)


def cut(tensor: Any, start: int, numel: int, what: str, file: Path) -> LazyTensor:
    """``numel`` elements from ``start`` of a flat tensor. Raises CheckpointError if there are too few."""
    return check_cut(tensor, start, numel, what, file).piece(start, start + numel)


def check_cut(tensor: Any, start: int, numel: int, what: str, file: Path) -> LazyTensor:
    """The flat tensor. Raises CheckpointError unless it has ``numel`` elements from ``start``."""
    if not isinstance(tensor, LazyTensor) or len(tensor.shape) != 1 or start < 0 or start + numel > tensor.numel:
        found = tensor.shape if isinstance(tensor, LazyTensor) else type(tensor).__name__
        raise CheckpointError(f"{what}: expected flat elements {start} to {start + numel} in {file}, found {found}")
    return tensor


def owner_states(saved: Mapping[Any, Any]) -> contents.OwnerStates:
    """Owner state by a matrix's place; tensors are read from the file when accessed."""
    return contents.OwnerStates({place: partial(read_as_it_lay, state) for place, state in saved.items()})


def read_as_it_lay(state: Any) -> Any:
    """``state`` with its lazy tensors read, in their saved memory layout."""

    def read(saved: LazyTensor) -> Tensor:
        tensor, stride = saved.read(), saved.stride
        if stride is None or stride == tensor.stride() or 0 in stride:
            return tensor
        # The bits of a matrix product depend on its factors' memory layout.
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)

    return tree_map_only(LazyTensor, read, state)


def matrices_in(saved: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """By parameter, the elements of its matrices, if this package saved them; otherwise None."""
    if MATRICES not in saved:
        return None
    return {name: [elements for _, elements in matrices] for name, matrices in saved[MATRICES].items()}


def take_owner_states(gathered: Mapping[str, Gathered], of_ranks: Iterable[Mapping[str, Any]]) -> None:
    """Assign owner state, which files have by matrix name, to parameters. Raises CheckpointError."""
    found: dict[str, dict[int, Any]] = {}
    for saved in of_ranks:
        listed = (saved.get(MATRICES) or {}).items()
        places = {matrix: (name, i) for name, matrices in listed for i, (matrix, _) in enumerate(matrices)}
        for matrix, state in (saved.get(CHECKPOINT_KEY) or {}).items():
            if matrix not in places:
                raise CheckpointError(
                    f"expected owner state of listed matrices, found {matrix!r}; copy the whole folder again"
                )
            name, place = places[matrix]
            found.setdefault(name, {})[place] = state
    for name, states in found.items():
        gathered[name].owner = owner_states(dict(sorted(states.items())))
