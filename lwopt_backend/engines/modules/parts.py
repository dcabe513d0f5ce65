"""Each module's optimizer under ``ModuleOptimizers``: the three kinds, their checks, and how they are saved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lwopt_backend.config.options import suggestion
from lwopt_backend.engines.gradients import ClipGroups, Pick, everything
from lwopt_backend.engines.owned.state import Pieces, names_of
from lwopt_backend.groups.param_groups import option_lines, plain
from lwopt_backend.optimizer import LayerWiseOptimizer, MeshOptimizer, OwnedOptimizer
from lwopt_backend.runtime.agreement import agree, setting
from lwopt_backend.runtime.collectives import Collectives

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a second to import
    from lwopt_backend.checkpoint.dcp.reader import DcpFolder
    from lwopt_backend.checkpoint.dcp.saving import Boxes, Shards


# What ``ModuleOptimizers`` needs from a module's optimizer, and the three kinds of optimizers that provide it.
#
# ::
#
#     lwopt_backend.LayerWiseOptimizer   owners have the mean gradients         state: pieces
#     the same on FSDP2                  gradients are sharded over meshes      state: DTensors
#     any other torch.optim.Optimizer    every rank of the module has a copy    state: whole tensors


class Part:
    """A module's optimizer on a rank that has the module.

    ``place`` is this rank and the number of ranks that share the optimizer's work; None if each rank has an independent
    copy. ``groups`` are its clip groups. ``norm`` and ``count_zeros`` are called on all ranks of the module and return
    the same on all of them.
    """

    kind: str
    optimizer: torch.optim.Optimizer
    place: tuple[int, int] | None
    groups: ClipGroups

    def params(self) -> Sequence[tuple[str, Tensor]]:
        """The trained parameters with their names."""
        raise NotImplementedError

    def keys(self) -> tuple[dict[int, str], list[list[Any]]]:
        """The names in a checkpoint of this rank's parameters, by id; all ranks' names, with shapes. Called on all
        ranks of the module."""
        named = self.params()
        return {id(param): name for name, param in named}, [[name, list(param.shape)] for name, param in named]

    def names(self) -> tuple[dict[int, str], list[list[Any]]]:
        """``keys``, but by the parameters' numbers in the optimizer's ``state_dict``."""
        keys, shapes = self.keys()
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {number: keys[id(param)] for number, param in enumerate(params)}, shapes

    def norm(self, norm_type: float, group: str | None) -> Tensor:
        """The norm of the mean gradients of a clip group, or of the rest (None), every element counted once."""
        raise NotImplementedError

    def count_zeros(self) -> int:
        """How many elements of the mean gradients are zero, every element counted once."""
        raise NotImplementedError

    def scale(self, factor: float, pick: Pick = everything) -> None:
        """Multiply the gradients that ``norm`` measured, of parameters that ``pick`` selects by name, by ``factor``;
        calls no collective."""
        raise NotImplementedError

    def step(self) -> None:
        """Step, without clipping the clip groups."""
        self.optimizer.step()

    def options(self) -> list[str]:
        """Lines of what all ranks of the module must have alike."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward passes need not exchange gradients."""
        return nullcontext()


class OurPart(Part):
    """``lwopt_backend.LayerWiseOptimizer``."""

    optimizer: LayerWiseOptimizer

    def __init__(self, optimizer: LayerWiseOptimizer) -> None:
        self.optimizer, self.groups = optimizer, optimizer._clip_groups

    def norm(self, norm_type: float, group: str | None) -> Tensor:
        return self.optimizer.gradients.norm(norm_type, self.groups.pick(group))

    def scale(self, factor: float, pick: Pick = everything) -> None:
        self.optimizer.gradients.scale(factor, pick)

    def options(self) -> list[str]:
        return option_lines(self.optimizer.param_groups)

    def step(self) -> None:
        self.optimizer._clipped = True
        self.optimizer.step()


class OwnedPart(OurPart):
    """``lwopt_backend.LayerWiseOptimizer`` of a plain model."""

    kind = "pieces"
    optimizer: OwnedOptimizer

    def __init__(self, optimizer: OwnedOptimizer) -> None:
        super().__init__(optimizer)
        self.everyone = optimizer.core.holdings[0].sharers.everyone
        self.place = self.everyone.rank, self.everyone.world_size

    def params(self) -> Sequence[tuple[str, Tensor]]:
        return [(member.name, member.param) for member in self.optimizer.core.members]

    def keys(self) -> tuple[dict[int, str], list[list[Any]]]:
        core = self.optimizer.core
        names = names_of(core, self.optimizer.param_groups)
        shapes = [[key, list(param.shape)] for key, param in names.params.items()]
        return {id(member.param): names.keys[number] for number, member in enumerate(core.members)}, shapes

    def count_zeros(self) -> int:
        return self.optimizer.count_zeros()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()

    def process_groups(self) -> list[Any]:
        """The process groups that exchange gradients during a backward pass."""
        sharers = [held.sharers for held in self.optimizer.core.holdings]
        groups = [ranks for s in sharers for ranks in (s.everyone, s.instance, s.replicas) if ranks is not None]
        return [group for group in (getattr(g, "process_group", None) for g in groups) if group is not None]


class MeshPart(OurPart):
    """``lwopt_backend.LayerWiseOptimizer`` of a sharded model."""

    kind = "whole"
    optimizer: MeshOptimizer

    def __init__(self, optimizer: MeshOptimizer) -> None:
        super().__init__(optimizer)
        self.place = optimizer.gradients.place

    def params(self) -> Sequence[tuple[str, Tensor]]:
        return self.optimizer.gradients.params()

    def count_zeros(self) -> int:
        return self.optimizer.gradients.count_zeros()


class CopyPart(Part):
    """Any torch optimizer of plain tensors, on one rank, or on several with copies and equal gradients."""

    kind = "whole"
    place = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.groups = optimizer, ClipGroups({}, {})
        for name, param in self.params():
            if hasattr(param, "device_mesh"):
                raise TypeError(
                    f"{name!r} is a DTensor, whose norm {type(optimizer).__name__} cannot tell; use "
                    "lwopt_backend.LayerWiseOptimizer"
                )

    def params(self) -> Sequence[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []
        for number, group in enumerate(self.optimizer.param_groups):
            names = group.get("param_names") or [f"{place} of group {number}" for place in range(len(group["params"]))]
            found += zip(names, group["params"])
        return found

    def norm(self, norm_type: float, group: str | None) -> Tensor:
        norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) for grad in self._grads()]
        stacked = [norm.to(norms[0].device) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(stacked), norm_type) if norms else torch.zeros(())

    def count_zeros(self) -> int:
        total = sum(param.numel() for _, param in self.params())
        return total - sum(int(torch.count_nonzero(grad)) for grad in self._grads())

    def options(self) -> list[str]:
        return [
            setting(f"{key} of param group {number}", plain(value))
            for number, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if key not in ("params", "param_names")
        ]

    def scale(self, factor: float, pick: Pick = everything) -> None:
        for grad in self._grads():
            grad.mul_(factor)

    def _grads(self) -> list[Tensor]:
        return [param.grad for _, param in self.params() if param.grad is not None]


def part_of(optimizer: Any) -> Part:
    """The part for an optimizer. Raises TypeError or ValueError if it is no optimizer, or cannot be one of several."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, or None on ranks without it; found {optimizer!r}")
    if isinstance(optimizer, OwnedOptimizer):
        return OwnedPart(optimizer)
    if isinstance(optimizer, MeshOptimizer):
        return MeshPart(optimizer)
    return CopyPart(optimizer)


# Modules that cannot be trained together, refused by name on all ranks.

NAME = "ModuleOptimizers"


@dataclass(frozen=True)
class Held:
    """What a rank has of a module: the kind of its optimizer, its ``place``, lines that are equal for copies, the names
    of the optimizer's defaults, and its clip groups' largest norms."""

    kind: str
    place: tuple[int, int] | None
    lines: tuple[str, ...]
    defaults: tuple[str, ...]
    limits: Mapping[str | None, float]


def parts_of(optimizers: Any) -> dict[str, Part]:
    """This rank's modules by name. Raises TypeError or ValueError for what a rank can check alone."""
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise TypeError(f"{NAME}: expected a mapping from modules' names to optimizers, found {optimizers!r}")
    for name in optimizers:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"{NAME}: the module's name {name!r} cannot name a folder; use letters, digits, '_', '-' and '.'"
            )
    parts: dict[str, Part] = {}
    for name, optimizer in optimizers.items():
        if optimizer is None:
            continue
        try:
            parts[name] = part_of(optimizer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{NAME}: module {name!r}: {error}") from error
    homes: dict[int, tuple[str, str]] = {}
    for module, part in parts.items():
        for name, param in part.params():
            other, others_name = homes.setdefault(id(param), (module, name))
            if other != module:
                raise ValueError(
                    f"{NAME}: modules {other!r} and {module!r} share a parameter, {others_name!r} of {other!r} is "
                    f"{name!r} of {module!r}; give it to one of them only"
                )
    # Modules reduce gradients during backward, each in its own order, so none may share a process group.
    users: dict[int, str] = {}
    for module, part in parts.items():
        if isinstance(part, OwnedPart) and part.everyone.world_size > 1:
            for group in part.process_groups():
                other = users.setdefault(id(group), module)
                if other != module:
                    raise ValueError(
                        f"{NAME}: modules {other!r} and {module!r} reduce gradients over one process group, where "
                        "ranks need not agree whose come first; give each process_group=torch.distributed.new_group("
                        "ranks) of its own, and on the same ranks group_size=1 or as many as there are"
                    )
    return parts


def held_by(part: Part) -> Held:
    """What the other ranks must know of a part."""
    lines = []
    for name, param in part.params() if part.place is None else ():
        # Copies are equal bit by bit, and so are their sums; different parameters have different sums.
        wide = param.detach().double()
        sums = f"{wide.sum().item()!r}, {wide.abs().sum().item()!r} unsigned"
        lines.append(f"{name} {tuple(param.shape)} {param.dtype} of sum {sums}")
    return Held(part.kind, part.place, tuple(lines), tuple(part.optimizer.defaults), part.groups.limits)


def check_held(names: Sequence[str], held: Sequence[Mapping[str, Held]]) -> None:
    """Compare what each rank has of each module. Raises ValueError, the same on all ranks."""
    of_group: dict[str | None, tuple[float, str]] = {}
    for name, found in ((name, of_rank[name]) for of_rank in held for name in of_rank):
        for group, limit in found.limits.items():
            other, where = of_group.setdefault(group, (limit, name))
            if other != limit:
                raise ValueError(
                    f"{NAME}: clip_groups[{group!r}] has the max_norm {other} in module {where!r} and {limit} in "
                    f"{name!r}, but a group is clipped as one; give it one max_norm, or two names"
                )
    for name in names:
        ranks = [rank for rank, modules in enumerate(held) if name in modules]
        if not ranks:
            raise ValueError(f"{NAME}: no rank has an optimizer of module {name!r}; leave its name out")
        first = held[ranks[0]][name]
        places = [(rank, place) for rank in ranks if (place := held[rank][name].place) is not None]
        for rank in ranks:
            _check_alike(name, ranks[0], first, rank, held[rank][name])
        whole = [(place, len(ranks)) for place in range(len(ranks))]
        if first.place is not None and sorted(place for _, place in places) != whole:
            sizes = {rank: size for rank, (_, size) in places}
            raise ValueError(
                f"{NAME}: ranks {ranks} have an optimizer of module {name!r}, but those work on so many: {sizes}. "
                "All ranks of its process group give it, and parts on other groups (pipeline stages) get names of "
                "their own"
            )


def _check_alike(name: str, first_rank: int, first: Held, rank: int, other: Held) -> None:
    if (first.kind, first.place is None) != (other.kind, other.place is None):
        raise ValueError(
            f"{NAME}: module {name!r} has optimizers of different kinds on ranks {first_rank} and {rank}; use one kind"
        )
    if first.place is None and first.lines != other.lines:
        mine, theirs = next(
            ((a, b) for a, b in zip(first.lines, other.lines) if a != b),
            (f"{len(first.lines)} parameters", f"{len(other.lines)}"),
        )
        raise ValueError(
            f"{NAME}: module {name!r} is not the same on ranks {first_rank} and {rank}: parameter {mine!r} there, "
            f"{theirs!r} here; a plain torch optimizer's module is a copy on each of its ranks (DDP). Parts that "
            "differ get names of their own, and None on the other ranks"
        )


# An error in one module on one rank is an error on all ranks.


def together(everyone: Collectives, what: str, parts: Mapping[str, Part], do: Callable[[str, Part], None]) -> None:
    """Run ``do`` for each of this rank's modules, in order. Called on all ranks.

    If it fails for one module, it still runs for the others, because their ranks would otherwise wait. Then all ranks
    raise RuntimeError, which names the modules, the ranks and the errors.
    """
    failed: dict[str, Exception] = {}
    for name, part in parts.items():
        try:
            do(name, part)
        except Exception as error:  # reported to the other ranks first, then raised below
            failed[name] = error
    raise_on_all(everyone, what, failed)


def raise_on_all(everyone: Collectives, what: str, failed: Mapping[str, Exception]) -> None:
    """If any rank has ``failed`` in modules, raise RuntimeError on all of them. Called on all ranks."""
    problems: dict[tuple[str, str], list[int]] = {}
    for rank, errors in enumerate(everyone.gather_objects({name: repr(error) for name, error in failed.items()})):
        for name, text in errors.items():
            problems.setdefault((name, text), []).append(rank)
    if problems:
        said = [
            f"module {name!r} failed on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} with {text}"
            for (name, text), ranks in problems.items()
        ]
        raise RuntimeError(f"{what}: {'; '.join(said)}") from next(iter(failed.values()), None)


# All modules' state in one folder of torch.distributed.checkpoint, which any split of ranks over the modules can load.
#
# ::
#
#     <module>.optimizer.state.<parameter>.<key>           each rank writes its shards of the optimizers' ``state_dict``
#     <module>.optimizer.param_groups.<number>.<option>
#     <module>.params                                      names and shapes

PARAMS = "params"
LOADING = "load_state_dict_from"


def save(everyone: Collectives, parts: Mapping[str, Part], folder: Path) -> None:
    """Write the state of all modules. Called on all ranks.

    An error on any rank is raised on all of them. The folder's earlier save can then still be loaded.
    """
    from lwopt_backend.checkpoint.dcp import saving

    shards = saving.Shards()

    def collect(name: str, part: Part) -> None:
        found = _shards_of(part, name)
        shards.tensors.update(found.tensors)
        shards.objects.update(found.objects)

    together(everyone, "save_state_dict", parts, collect)
    saving.save(folder, shards, everyone, "save_state_dict")


def load(everyone: Collectives, names: Sequence[str], parts: Mapping[str, Part], folder: Path) -> None:
    """Load the state of this rank's modules. Called on all ranks.

    An incomplete save, or other modules, raise on all ranks before anything is changed; then state that does not fit a
    module raises before that module is changed.
    """
    from lwopt_backend.engines.owned.files import open_folder

    def check() -> tuple[DcpFolder, list[str]]:
        found = open_folder(folder, with_files=everyone.rank == 0)
        saved = list(dict.fromkeys(str(path[0]) for path in found.paths.values()))
        for name in [*names, *saved]:
            if name not in saved or name not in names:
                where, other = (folder, saved) if name in names else ("this optimizer", names)
                raise ValueError(f"{NAME}: {where} has no module {name!r}; {suggestion(name, other)}")
        return found, saved

    found = agree(everyone, LOADING, check)

    together(everyone, LOADING, parts, lambda name, part: _take(part, found, name))


def _shards_of(part: Part, module: str) -> Shards:
    """This rank's shards of an optimizer's ``state_dict``. Called on all ranks of the module."""
    from lwopt_backend.checkpoint.dcp.saving import Shards
    from lwopt_backend.engines.owned.files import check_readable

    state_dict, (names, params) = part.optimizer.state_dict(), part.names()
    place, shards = (module, "optimizer"), Shards(objects={(module, PARAMS): params})
    for number, group in enumerate(state_dict["param_groups"]):
        numbered = [names[index] for index in group["params"]]
        check_readable(f"param group {number}", {key: value for key, value in group.items() if key != "params"})
        shards.objects |= {(*place, "param_groups", number, key): value for key, value in group.items()}
        shards.objects[(*place, "param_groups", number, "params")] = numbered
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            path = (*place, "state", names[index], key)
            if isinstance(value, Tensor):
                shards.tensors[path] = _shard_of(value, key)
            else:
                shards.objects[path] = value
    return shards


def _take(part: Part, folder: DcpFolder, module: str) -> None:
    """Load what ``_shards_of`` returned. Called on all ranks of the module.

    Raises ValueError, before anything is changed, if the folder cannot be read or has other parameters.
    """
    (names, ours), saved = part.names(), folder.object(f"{module}.{PARAMS}")
    if ours != saved:
        mine, theirs = next(((a, b) for a, b in zip(ours, saved) if a != b), (f"{len(ours)}", f"{len(saved)}"))
        raise ValueError(f"{folder.path}: expected parameter {mine}, found {theirs}; load what the same parameters had")
    now = part.optimizer.state_dict()["state"]
    numbers = {name: index for index, name in names.items()}
    groups: dict[int, dict[str, Any]] = {}
    state: dict[int, dict[str, Any]] = {}
    for key, path in folder.paths.items():
        if path[:3] == (module, "optimizer", "param_groups"):
            groups.setdefault(path[3], {})[path[4]] = folder.object(key)
        elif path[:3] == (module, "optimizer", "state"):
            if (index := numbers.get(path[3])) is None:
                continue  # an expert that other ranks have
            of_param = now.get(index, {})
            if isinstance(part, OwnedPart) and _is_elsewhere(path[4], of_param):
                continue
            like = of_param.get(path[4])
            value = folder.object(key) if key in folder.objects else _read_like(folder, key, like)
            state.setdefault(index, {})[path[4]] = value
    in_order = [groups[number] for number in sorted(groups)]
    named = [{**group, "params": [numbers[name] for name in group["params"]]} for group in in_order]
    part.optimizer.load_state_dict({"state": state, "param_groups": named})


def _is_elsewhere(key: str, here: Mapping[str, Any]) -> bool:
    """Whether a key is of what other ranks' owners keep: of a parameter, or of a matrix in it, of which this rank has
    nothing. Any other key that is not ``here`` is one too many, which the optimizer refuses."""
    return key not in here and (key.startswith("[") or not any(value.boxes for value in here.values()))


def _shard_of(tensor: Tensor, where: str) -> Boxes:
    """This rank's boxes of a tensor of owned storage, its box of a DTensor, or all of a plain tensor."""
    from lwopt_backend.checkpoint.dcp.saving import Boxes, later, whole
    from lwopt_backend.engines.fsdp2.state import box_of

    if isinstance(tensor, Pieces):
        return Boxes(tuple(tensor.shape), {at: later(box, box.shape, where) for at, box in tensor.boxes.items()})
    if not hasattr(tensor, "to_local"):
        return whole(tensor, where)
    begin, sizes = box_of(tensor)  # type: ignore[arg-type]
    is_here = math.prod(sizes) > 0 or tensor.numel() == 0
    return Boxes(tuple(tensor.shape), {begin: later(tensor.to_local(), sizes, where)} if is_here else {})


def _read_like(folder: DcpFolder, key: str, like: Any) -> Tensor:
    """What this rank has of a saved tensor, as of ``like``; all of it if that is None or a plain tensor."""
    from lwopt_backend.engines.fsdp2.state import as_shard, box_of

    shape = folder.tensors[key].shape
    if not isinstance(like, Pieces) and not hasattr(like, "to_local"):
        return folder.tensor(key).read()
    if shape != tuple(like.shape):
        raise ValueError(f"{key} in {folder.path}: expected shape {tuple(like.shape)}, found {shape}")
    if isinstance(like, Pieces):
        boxes = {at: folder.read_box(key, at, box.shape) for at, box in like.boxes.items()}
        return Pieces(shape, folder.tensors[key].dtype, boxes)
    return as_shard(folder.read_box(key, *box_of(like)), like)
