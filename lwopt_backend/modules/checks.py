"""Modules that cannot be trained together, refused by name on all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.modules.parts import OwnedPart, Part, part_of

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
