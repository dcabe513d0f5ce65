"""What ``ModuleOptimizers`` asks of one module's optimizer, and the three kinds of optimizers that it can ask.

::

    lwopt_backend.LayerWiseOptimizer   owners have the mean gradients         state: pieces in a folder
    one with ``gradients`` (FSDP2)     gradients are sharded over meshes      state: whole tensors
    any other torch.optim.Optimizer    every rank of the module has a copy    state: whole tensors
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lwopt_backend.config.options import suggestion
from lwopt_backend.optimizer import OwnedOptimizer
from lwopt_backend.runtime.agreement import agree, failing
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.storage.owned_files import write_whole


class Part(Protocol):
    """A module's optimizer on a rank that has the module.

    ``place`` is this rank's and the number of ranks that the optimizer works on; None where every rank has a copy that
    knows of no other. ``norm`` and ``count_zeros`` are called on all ranks of the module and equal on all of them.
    """

    @property
    def kind(self) -> str: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def place(self) -> tuple[int, int] | None: ...

    def params(self) -> Sequence[tuple[str, Tensor]]:
        """The trained parameters with their names."""

    def norm(self, norm_type: float) -> float:
        """The norm of the mean gradients, every element counted once."""

    def count_zeros(self) -> int:
        """How many elements of the mean gradients are zero, every element counted once."""

    def scale(self, factor: float) -> None:
        """Multiply the gradients that ``norm`` has seen; starts no collective."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes within it need not travel."""


class OwnedPart:
    """``lwopt_backend.LayerWiseOptimizer`` of a plain model."""

    kind = "pieces"

    def __init__(self, optimizer: OwnedOptimizer) -> None:
        if optimizer.config.step_in_backward:
            raise ValueError("step_in_backward uses gradients before all ranks know that all are finite; leave it out")
        self.optimizer = optimizer
        self.everyone = optimizer.core.holdings[0].sharers.everyone
        self.place = self.everyone.rank, self.everyone.world_size

    def params(self) -> Sequence[tuple[str, Tensor]]:
        return [(member.name, member.param) for member in self.optimizer.core.members]

    def norm(self, norm_type: float) -> float:
        return self.optimizer.grad_norm(norm_type=norm_type).item()

    def count_zeros(self) -> int:
        return self.optimizer.count_zeros()

    def scale(self, factor: float) -> None:
        self.optimizer.core.gradients.scale(factor)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()

    def process_groups(self) -> list[Any]:
        """Those through which gradients travel while a backward pass runs."""
        sharers = [held.sharers for held in self.optimizer.core.holdings]
        groups = [ranks for s in sharers for ranks in (s.everyone, s.instance, s.replicas) if ranks is not None]
        return [group for group in (getattr(g, "process_group", None) for g in groups) if group is not None]


class HostGradients(Protocol):
    """What an optimizer has as ``gradients``; the methods are those of ``Part``."""

    @property
    def place(self) -> tuple[int, int] | None: ...

    def params(self) -> Sequence[tuple[str, Tensor]]: ...

    def norm(self, norm_type: float) -> Tensor: ...

    def count_zeros(self) -> int: ...

    def scale(self, factor: float) -> None: ...


class HostPart:
    """An optimizer whose ``gradients`` count and scale for it: that of FSDP2."""

    kind = "whole"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.place = self._gradients().place

    def _gradients(self) -> HostGradients:
        gradients: HostGradients = self.optimizer.gradients
        return gradients

    def params(self) -> Sequence[tuple[str, Tensor]]:
        return self._gradients().params()

    def norm(self, norm_type: float) -> float:
        return self._gradients().norm(norm_type).item()

    def count_zeros(self) -> int:
        return self._gradients().count_zeros()

    def scale(self, factor: float) -> None:
        self._gradients().scale(factor)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class CopyPart:
    """Any torch optimizer of plain tensors: on one rank, or on several that hold copies and have equal gradients."""

    kind = "whole"
    place = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
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

    def norm(self, norm_type: float) -> float:
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64).cpu() for g in self._grads()]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type).item() if norms else 0.0

    def count_zeros(self) -> int:
        total = sum(param.numel() for _, param in self.params())
        return total - sum(int(torch.count_nonzero(grad)) for grad in self._grads())

    def scale(self, factor: float) -> None:
        for grad in self._grads():
            grad.mul_(factor)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _grads(self) -> list[Tensor]:
        return [param.grad for _, param in self.params() if param.grad is not None]


def part_of(optimizer: Any) -> Part:
    """Raises TypeError or ValueError for what is no optimizer, or one whose steps cannot be held back."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, or None on ranks without it; found {optimizer!r}")
    if isinstance(optimizer, OwnedOptimizer):
        return OwnedPart(optimizer)
    if hasattr(type(optimizer), "gradients"):
        return HostPart(optimizer)
    return CopyPart(optimizer)


# Modules that cannot be trained together, refused by name on all ranks.

NAME = "ModuleOptimizers"


@dataclass(frozen=True)
class Held:
    """What a rank has of a module: the kind of its optimizer, its ``place``, of copies what makes them equal, and the
    names of the optimizer's defaults."""

    kind: str
    place: tuple[int, int] | None
    lines: tuple[str, ...]
    defaults: tuple[str, ...]


def parts_of(optimizers: Any) -> dict[str, Part]:
    """This rank's modules by name. Raises TypeError or ValueError for what it can see itself."""
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
    _check_disjoint(parts)
    _check_process_groups(parts)
    return parts


def _check_disjoint(parts: Mapping[str, Part]) -> None:
    seen: dict[int, tuple[str, str]] = {}
    for module, part in parts.items():
        for name, param in part.params():
            other, others_name = seen.setdefault(id(param), (module, name))
            if other != module:
                raise ValueError(
                    f"{NAME}: modules {other!r} and {module!r} share a parameter, {others_name!r} of {other!r} is "
                    f"{name!r} of {module!r}; give it to one of them only"
                )


def _check_process_groups(parts: Mapping[str, Part]) -> None:
    """Their gradients travel during backward, in an order that is each module's own."""
    seen: dict[int, str] = {}
    for module, part in parts.items():
        if isinstance(part, OwnedPart) and part.everyone.world_size > 1:
            for group in part.process_groups():
                other = seen.setdefault(id(group), module)
                if other != module:
                    raise ValueError(
                        f"{NAME}: modules {other!r} and {module!r} reduce gradients over one process group, where "
                        "ranks need not agree whose come first; give each process_group=torch.distributed.new_group("
                        "ranks) of its own, and on the same ranks group_size=1 or as many as there are"
                    )


def held_by(part: Part) -> Held:
    """What the other ranks have to know of a part."""
    copied = part.params() if part.place is None else []
    return Held(part.kind, part.place, tuple(_line(*pair) for pair in copied), tuple(part.optimizer.defaults))


@torch.no_grad()
def _line(name: str, param: Tensor) -> str:
    """Copies are equal bit by bit, and so are their sums; those of different parameters are not."""
    wide = param.detach().double()
    return (
        f"{name} {tuple(param.shape)} {param.dtype} of sum {wide.sum().item()!r}, {wide.abs().sum().item()!r} unsigned"
    )


def check_held(names: Sequence[str], held: Sequence[Mapping[str, Held]]) -> None:
    """Raises ValueError, the same on all ranks, from what each rank has of each module."""
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


# What goes wrong in one module on one rank is an error on all ranks.

T = TypeVar("T")


def together(
    everyone: Collectives, what: str, parts: Mapping[str, Part], do: Callable[[str, Part], T]
) -> list[dict[str, T]]:
    """``do`` each of this rank's modules, in their order; per rank, its results by module. Called on all ranks.

    A module that fails keeps no other from its turn, whose ranks would wait. Then all ranks raise RuntimeError, which
    says in which modules and on which ranks there was what error.
    """
    done: dict[str, Any] = {}
    failed: dict[str, Exception] = {}
    for name, part in parts.items():
        try:
            done[name] = do(name, part)
        except Exception as error:  # reported to the other ranks first, then raised below
            failed[name] = error
    first = next(iter(failed.values()), None)
    try:
        with failing(lambda: f"{what}: hearing from all ranks"):
            reports = everyone.gather_objects((done, {name: repr(error) for name, error in failed.items()}))
    except RuntimeError as lost:
        if first is None:
            raise
        raise first from lost
    problems: dict[tuple[str, str], list[int]] = {}
    for rank, (_, errors) in enumerate(reports):
        for name, text in errors.items():
            problems.setdefault((name, text), []).append(rank)
    if problems:
        said = [f"module {name!r} failed on {_ranks(ranks)} with {text}" for (name, text), ranks in problems.items()]
        raise RuntimeError(f"{what}: {'; '.join(said)}") from first
    return [done for done, _ in reports]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# A module's state in whole tensors, for optimizers whose ``state_dict`` has them, or sharded ones.

FILE = "whole.pt"


def save_whole(part: Part, folder: Path, *, writes: bool) -> None:
    """Bring what is sharded together, tensor by tensor, on the rank that ``writes``. Called on all of the module's."""

    def gathered(tensor: Tensor) -> Tensor | None:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole.detach().cpu() if writes else None

    content = {"params": _params(part), "state_dict": _each_tensor(part.optimizer.state_dict(), gathered)}
    if writes:
        write_whole(folder / FILE, lambda file: torch.save(content, file))


def load_whole(part: Part, folder: Path) -> None:
    """Take what ``save_whole`` wrote. Called on all ranks of the module.

    Raises ValueError, before anything is changed, for a file that cannot be read and for other parameters.
    """
    path = folder / FILE
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        saved, state_dict = content["params"], content["state_dict"]
    except Exception as error:
        raise ValueError(f"{path} is missing, damaged or not a file of a module's state: {error}") from error
    ours = _params(part)
    if ours != saved:
        mine, theirs = next(((a, b) for a, b in zip(ours, saved) if a != b), (f"{len(ours)}", f"{len(saved)}"))
        raise ValueError(f"{path}: expected parameter {mine}, found {theirs}; load what the same parameters had")
    part.optimizer.load_state_dict(state_dict)
    for param, state in part.optimizer.state.items():  # nothing stays in the file, which the next save removes
        part.optimizer.state[param] = _each_tensor(state, torch.clone)


def _params(part: Part) -> list[list[Any]]:
    return [[name, list(param.shape)] for name, param in part.params()]


def _each_tensor(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_tensor(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each_tensor(entry, change) for entry in value)
    return value


# All modules' state in one folder, that any split of ranks over the modules can load.
#
# ::
#
#     modules.json               the pointer, written last: which save, and how each module's state was written
#     save-<id>/<module>/        owned storage: what its own save_state_dict writes
#     save-<id>/<module>/whole.pt  others: whole tensors in one file
#
# A save has a folder of its own, and those of earlier saves are removed once the pointer names it; so what the pointer
# names, if it is there, is whole.

POINTER = "modules.json"
FORMAT, VERSION = "lwopt_backend module optimizers", 1


def save(
    everyone: Collectives, names: Sequence[str], parts: Mapping[str, Part], first: Mapping[str, int], folder: Path
) -> None:
    """Write the state of all modules; ``first`` are their first ranks. Called on all ranks.

    Raises, on all of them, what went wrong on any. The save that the folder held can then still be loaded.
    """
    save_id = everyone.gather_objects(secrets.token_hex(8))[0]
    here = folder / f"save-{save_id}"
    kinds = {
        name: kind
        for found in everyone.gather_objects({n: p.kind for n, p in parts.items()})
        for name, kind in found.items()
    }

    def write(name: str, part: Part) -> None:
        (here / name).mkdir(parents=True, exist_ok=True)
        if isinstance(part, OwnedPart):
            part.optimizer.save_state_dict(here / name)
        else:
            save_whole(part, here / name, writes=everyone.rank == first[name])

    def point() -> tuple[None, list[str]]:
        if everyone.rank == 0:
            for name in names:
                if not (here / name).is_dir():
                    raise FileNotFoundError(f"{here / name} is not there; the folder has to be the same for all ranks")
            content = {"format": FORMAT, "version": VERSION, "save": save_id, "modules": kinds}
            write_whole(folder / POINTER, lambda file: file.write(json.dumps(content).encode()))
            _remove_others(folder, here)
        return None, []

    try:
        together(everyone, "save_state_dict", parts, write)
    except RuntimeError:
        if everyone.rank == 0:
            shutil.rmtree(here, ignore_errors=True)
        raise
    agree(everyone, "save_state_dict", point)


def load(everyone: Collectives, names: Sequence[str], parts: Mapping[str, Part], folder: Path) -> None:
    """Take the state of this rank's modules. Called on all ranks.

    Raises, on all of them and before anything is changed, for a folder without a whole save and for other modules; then
    what is wrong with a module's state, before anything of that module is changed.
    """

    def check() -> tuple[str, list[str]]:
        save_id, kinds = _read(folder)
        for name in [*names, *kinds]:
            if name not in kinds or name not in names:
                where, other = (folder, kinds) if name in names else ("this optimizer", names)
                raise ValueError(f"{NAME}: {where} has no module {name!r}; {suggestion(name, other)}")
        for name, part in parts.items():
            if part.kind != kinds[name]:
                written = {"pieces": "owned storage", "whole": "FSDP2's or a plain optimizer"}[kinds[name]]
                raise ValueError(f"{NAME}: module {name!r} was saved by {written}, which this optimizer cannot read")
            if not (folder / f"save-{save_id}" / name).is_dir():
                raise FileNotFoundError(f"{folder / f'save-{save_id}' / name} is missing")
        return save_id, [save_id]

    here = folder / f"save-{agree(everyone, 'load_state_dict_from', check)}"

    def take(name: str, part: Part) -> None:
        if isinstance(part, OwnedPart):
            part.optimizer.load_state_dict_from(here / name)
        else:
            load_whole(part, here / name)

    together(everyone, "load_state_dict_from", parts, take)


def _read(folder: Path) -> tuple[str, dict[str, str]]:
    """The id of the save that the pointer names, and the kinds of its modules' state."""
    path = folder / POINTER
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no modules' state, or its saving was not finished: there is no {POINTER}, which is "
            "written last"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is {content['format']!r} of version {content['version']}, expected {FORMAT!r} of 1")
        if not re.fullmatch("[0-9a-f]{16}", content["save"]):
            raise ValueError(f"the save's id is {content['save']!r}")
        return content["save"], dict(content["modules"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or not of modules' state: {error!r}") from error


def _remove_others(folder: Path, here: Path) -> None:
    for path in folder.glob("save-*"):
        if path != here and re.fullmatch("save-[0-9a-f]{16}", path.name):
            shutil.rmtree(path, ignore_errors=True)
