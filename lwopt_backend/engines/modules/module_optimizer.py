"""The modules of a ``ModuleOptimizers`` on each rank: compared by all ranks, and the order of their collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config.options import suggestion
from lwopt_backend.engines.base import picked
from lwopt_backend.engines.buffers.gradients import BufferGradients
from lwopt_backend.engines.fsdp2.gradients import MeshGradients, sum_of_bits
from lwopt_backend.engines.gradients import ClipGroups, GradientNorms, Guard, Pick, Version, everything, version_of
from lwopt_backend.groups.param_groups import comparable, option_lines
from lwopt_backend.groups.registry import check_group, rule_of
from lwopt_backend.optimizer import LayerWiseOptimizer, PlainOptimizer
from lwopt_backend.runtime.agreement import (
    RanksDisagree,
    check_on_all,
    digest,
    first_difference,
    setting,
    unlike_lines,
)
from lwopt_backend.runtime.collectives import Collectives

NAME = "ModuleOptimizers"
HAS_STATE, PARAMS = "has_state", "params"  # keys in a module's state dict


def named_in(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """The parameters of a torch optimizer with the names that it was given, or else their numbers."""
    found: list[tuple[str, Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"{place} of group {number}" for place in range(len(group["params"]))]
        found += zip(names, group["params"])
    return found


class CopiedGradients:
    """The gradients of a plain torch optimizer, equal on all ranks with a copy; calls no collective."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._params = named_in(optimizer)

    def _grads(self, pick: Pick) -> list[Tensor]:
        return [param.grad for name, param in self._params if param.grad is not None and pick(name)]

    def norm(self, norm_type: float, pick: Pick = everything) -> Tensor:
        norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) for grad in self._grads(pick)]
        stacked = [norm.to(norms[0].device) for norm in norms]
        return torch.linalg.vector_norm(torch.stack(stacked), norm_type) if norms else torch.zeros(())

    def version(self) -> Version:
        return version_of([param.grad for _, param in self._params])

    def count_zeros(self, pick: Pick) -> int:
        """A parameter without a gradient counts as zeros."""
        chosen = [param for name, param in self._params if pick(name)]
        return sum(p.numel() if p.grad is None else int((p.grad == 0).sum()) for p in chosen)

    def scale(self, factor: float, pick: Pick = everything) -> None:
        for grad in self._grads(pick):
            grad.mul_(factor)


class ModuleOptimizer:
    """A module's optimizer on a rank that has the module.

    ``ours`` is a ``LayerWiseOptimizer``, whose ranks share the work. It is None for any other torch optimizer, of which
    each rank of the module has a copy. Raises TypeError for anything else.
    """

    def __init__(self, name: str, optimizer: Any) -> None:
        self.name, self.where = name, f"{NAME}: module {name!r}"
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{self.where}: expected a torch.optim.Optimizer, or None on ranks without it; found {optimizer!r}"
            )
        self.optimizer = optimizer
        self.ours = optimizer if isinstance(optimizer, LayerWiseOptimizer) else None
        none = GradientNorms(ClipGroups({}, {}), Guard(NAME, "step", None))
        self.norms = none if self.ours is None else self.ours._norms
        self.groups = self.norms.groups
        if self.norms.guard.is_on:
            raise ValueError(
                f"{self.where}: expected no on_nonfinite and no skip_above, by which it would step or skip alone; give "
                f"them to {NAME}, which decides for all modules by their one norm"
            )
        sharded = [name for name, param in self.params() if self.ours is None and hasattr(param, "device_mesh")]
        if sharded:
            raise TypeError(
                f"{self.where}: expected no DTensors with {type(optimizer).__name__}, which cannot compute their norm; "
                f"found {sharded[0]!r}; use lwopt_backend.LayerWiseOptimizer"
            )

    def params(self) -> list[tuple[str, Tensor]]:
        """The trained parameters with their names."""
        return named_in(self.optimizer) if self.ours is None else self.ours.named_params()

    @property
    def out(self) -> Collection[str]:
        """The names of parameters that were taken out of their param groups."""
        return () if self.ours is None else self.ours._checked.out

    def full_names(self) -> list[str]:
        """Their names after the module's."""
        return [f"{self.name}.{name}" for name, _ in self.params()]

    @property
    def gradients(self) -> BufferGradients | MeshGradients | CopiedGradients:
        """The mean gradients, each element once. Read on all ranks of the module, where norms are equal."""
        return CopiedGradients(self.optimizer) if self.ours is None else self.ours.gradients

    def options(self) -> list[str]:
        """Lines that must be equal on all ranks of the module."""
        if self.ours is not None:
            return option_lines(self.ours.param_groups)
        groups = enumerate(self.optimizer.param_groups)
        items = [(number, key, value) for number, group in groups for key, value in group.items()]
        known = ("params", "param_names")
        return [setting(f"{key} of param group {n}", comparable(value)) for n, key, value in items if key not in known]

    def reset_state(self, names: str | Sequence[str]) -> list[str]:
        """As ``LayerWiseOptimizer.reset_state``."""
        if self.ours is not None:
            return self.ours.reset_state(names)
        params = dict(self.params())
        chosen = list(filter(picked(names, list(params)), params))
        for name in chosen:
            self.optimizer.state.pop(params[name], None)
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict, with facts to compare before a load."""
        return {**self.optimizer.state_dict(), HAS_STATE: bool(self.optimizer.state), PARAMS: self._named_shapes()}

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError for a ``state_dict`` of other parameters, with wrong options, or without saved state."""
        if self.ours is not None:
            self.ours._checked.arrange(self.ours.param_groups)
        for ours, theirs in zip_longest(self._named_shapes(), saved[PARAMS]):
            if ours != theirs:
                raise ValueError(
                    f"{self.where}: expected parameter {ours}, found {theirs}; load the state of the same parameters"
                )
        groups = [] if self.ours is None else self.ours.param_groups
        for number, (group, theirs) in enumerate(zip(groups, saved["param_groups"])):
            check_group({**theirs, "rule": rule_of(group)}, f"{self.where}: param group {number} in the checkpoint")
        if self.ours is None and saved[HAS_STATE] and not saved["state"]:
            raise ValueError(
                f"{self.where}: expected its saved state, found none, because the optimizer here has no state yet; "
                "load with load_state_dict_from(folder)"
            )

    def _named_shapes(self) -> list[list[Any]]:
        """Names and shapes of the parameters, by their numbers in the state dict."""
        names = {id(param): name for name, param in self.params()}
        params = chain(*(group["params"] for group in self.optimizer.param_groups))
        return [[names[id(param)], *param.shape] for param in params]

    def lines(self) -> list[str]:
        """Lines that must be equal on all ranks of the module at the start; copies are equal bit by bit."""
        params = self.params() if self.ours is None else []
        copies = (
            setting(f"parameter {name}", f"{tuple(p.shape)} {p.dtype} of sum {sum_of_bits(p.detach())}")
            for name, p in params
        )
        return [setting("optimizer", type(self.optimizer).__name__), *copies]


def module_optimizers(optimizers: Any) -> dict[str, ModuleOptimizer]:
    """This rank's modules by name. Raises TypeError or ValueError for problems visible on one rank."""
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise TypeError(f"{NAME}: expected a mapping from modules' names to optimizers, found {optimizers!r}")
    mine: dict[str, ModuleOptimizer] = {}
    homes: dict[int, tuple[str, str]] = {}
    for module, optimizer in optimizers.items():
        if optimizer is None:
            continue
        mine[module] = ModuleOptimizer(module, optimizer)
        for name, param in mine[module].params():
            other, others_name = homes.setdefault(id(param), (module, name))
            if other != module:
                raise ValueError(
                    f"{NAME}: expected every parameter in one module, found {others_name!r} of {other!r} as {name!r} "
                    f"of {module!r}; give it to one of them only"
                )
    return mine


def check_names(what: str, found: Mapping[str, Any], names: Sequence[str], needed: Sequence[str]) -> None:
    """Raises ValueError unless ``found`` has all modules that are ``needed``, and only those in ``names``."""
    for name in found:
        if name not in names:
            raise ValueError(f"{NAME}: {what}: unknown module {name!r}; {suggestion(str(name), names)}")
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(f"{NAME}: {what}: expected module {missing[0]!r}, found {sorted(found)}; give all modules")


@dataclass(frozen=True)
class ModuleFacts:
    """A module's optimizer on a rank, as other ranks know it.

    - ``place``: this rank, and the number of ranks that share the optimizer's work; None for copies.
    - ``numel``: of the gradients that this package sends in backward; infinite where DDP or FSDP2 sends them.
    - ``lines``: a digest of ``ModuleOptimizer.lines``.
    - ``defaults``: the names of the optimizer's defaults.
    - ``groups``: the names of its clip groups.
    """

    place: tuple[int, int] | None
    numel: float
    lines: str
    defaults: frozenset[str]
    groups: tuple[str | None, ...]


def facts_of(module: ModuleOptimizer) -> ModuleFacts:
    """The facts that other ranks must know about a module's optimizer."""
    everyone = None if module.ours is None else module.ours._everyone()
    place = None if everyone is None else (everyone.rank, everyone.world_size)
    in_backward = sum(param.numel() for _, param in module.params())
    numel = in_backward if isinstance(module.optimizer, PlainOptimizer) else math.inf
    return ModuleFacts(
        place, numel, digest(module.lines()), frozenset(module.optimizer.defaults), (*module.groups.limits,)
    )


def check_held(
    everyone: Collectives,
    names: Sequence[str],
    mine: Mapping[str, ModuleOptimizer],
    held: Sequence[Mapping[str, ModuleFacts]],
) -> None:
    """Compare each module's optimizers. Called on all ranks; raises the same error on all of them."""
    for name in names:
        found = {rank: of_rank[name] for rank, of_rank in enumerate(held) if name in of_rank}
        if not found:
            raise ValueError(
                f"{NAME}: module {name!r}: expected an optimizer on some rank, found none; leave its name out"
            )
        if len({has.lines for has in found.values()}) > 1:
            raise difference(everyone, name, mine[name].lines() if name in mine else None)
        places = {rank: has.place for rank, has in found.items() if has.place is not None}
        if places and sorted(places.values()) != [(place, len(found)) for place in range(len(found))]:
            raise ValueError(
                f"{NAME}: ranks {[*found]} have an optimizer of module {name!r}, but their process groups "
                f"have other sizes: { {rank: size for rank, (_, size) in places.items()} }. Pass the module on "
                "all ranks of its process group, and give parts on other groups (pipeline stages) separate names"
            )


def difference(everyone: Collectives, name: str, lines: Sequence[str] | None) -> RanksDisagree:
    """The first difference between the ``lines`` of a module's ranks; other ranks have None. Called on all ranks."""
    of_ranks = {rank: found for rank, found in enumerate(unlike_lines(everyone, lines)) if found is not None}
    said = first_difference([*of_ranks.values()], [*of_ranks])
    return RanksDisagree(
        f"{NAME}: module {name!r}: {said}. All its ranks must have a copy, or their parts of one optimizer. Give "
        "modules that differ between ranks separate names, and pass None on the other ranks"
    )


def in_one_order(
    mine: Mapping[str, ModuleOptimizer], held: Sequence[Mapping[str, ModuleFacts]]
) -> dict[str, ModuleOptimizer]:
    """The optimizers in the one order in which ranks call their collectives, those with the most elements first.

    Two groups that share ranks must start collectives in one order on all of these ranks. NCCL's kernels wait on the
    GPU, and if one has to end before another begins (CUDA_DEVICE_MAX_CONNECTIONS=1), ranks with different orders wait
    for each other. Backward passes come in any order. So among modules that share ranks, only the first sends gradients
    in backward. The others send their gradients in the next call, which all ranks make, after the first has sent the
    rest. FSDP2 and DDP always send in backward.
    """
    numel: dict[str, float] = {}
    ranks: dict[str, set[int]] = {}
    for rank, of_rank in enumerate(held):
        for name, has in of_rank.items():
            numel[name] = max(has.numel, numel.get(name, 0))
            ranks.setdefault(name, set()).add(rank)
    order = sorted(numel, key=lambda name: -numel[name])
    for number, name in enumerate(order):
        before = set().union(*(ranks[other] for other in order[:number] if len(ranks[other]) > 1))
        optimizer = mine[name].optimizer if name in mine else None
        if isinstance(optimizer, PlainOptimizer) and before & ranks[name]:
            optimizer.core.manager.overlap = False
    return {name: mine[name] for name in order if name in mine}


def together(
    everyone: Collectives, what: str, mine: Mapping[str, ModuleOptimizer], do: Callable[[str, ModuleOptimizer], None]
) -> None:
    """Run ``do`` for each of this rank's modules, in order. Called on all ranks, which raise if any fails.

    If it fails for one module, it still runs for the others, because their ranks would otherwise wait.
    """
    failed: dict[str, Exception] = {}
    for name, module in mine.items():
        try:
            do(name, module)
        except Exception as error:  # reported to the other ranks first, then raised below
            failed[name] = error
    check_none_failed(everyone, what, failed)


def check_none_failed(everyone: Collectives, what: str, failed: Mapping[str, Exception]) -> None:
    """Raises RuntimeError, on all ranks, which all call this, if any of them has ``failed`` in a module."""

    def check() -> None:
        if failed:
            said = (f"module {name!r} failed with {error!r}" for name, error in failed.items())
            raise RuntimeError(f"{what}: {'; '.join(said)}") from next(iter(failed.values()))

    check_on_all(everyone, what, check)
