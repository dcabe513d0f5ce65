"""One optimizer over modules on different ranks: ``ModuleOptimizers({"vision": ..., "language": None})``.

Each module keeps its own optimizer, process groups and number of ranks. Decisions about all modules are made here:
whether every gradient is finite, what their total norm is, whether all modules step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config.options import suggestion
from lwopt_backend.engines.base import loaded, saved
from lwopt_backend.engines.gradients import checked_order, clip_factor
from lwopt_backend.engines.modules.parts import (
    NAME,
    OurPart,
    Part,
    check_held,
    held_by,
    load,
    parts_of,
    raise_on_all,
    save,
    together,
)
from lwopt_backend.groups.param_groups import COMPARED_EVERY
from lwopt_backend.rules.protocol import AFTER, inner_steps, one_call
from lwopt_backend.runtime.agreement import RanksDisagree, agree, check_on_all, digest, first_difference
from lwopt_backend.runtime.collectives import ranks_of

Norms = dict[str | None, dict[str, float]]  # by clip group, None for the rest, and module

HAS_STATE = "has_state"  # a key beside a module's state in a state dict


class ModuleOptimizers(torch.optim.Optimizer):
    """Steps the optimizers of several modules as one.

    - ``optimizers``: the optimizer of each module, by name, or None on a rank that does not have the module. All ranks
      give the same names in the same order. An optimizer is a ``LayerWiseOptimizer``, or any of torch's, whose module
      is then on one rank only, or a copy on each of its ranks, as under DDP.
    - ``process_group``: all ranks of all modules; by default all ranks.

    ``modules`` has this rank's optimizers by name, ``names`` all modules. Every method is called on all ranks. Raises
    TypeError, ValueError or RuntimeError, on all of them, for modules that cannot be trained together.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer | None], *, process_group: Any = None) -> None:
        self._everyone = ranks_of(process_group)
        what = f"{NAME}: all ranks name all modules in one order, with None for those that they do not have"
        self._parts = agree(self._everyone, what, lambda: (parts_of(optimizers), list(optimizers)))
        self.names = tuple(optimizers)
        self.modules = {name: part.optimizer for name, part in self._parts.items()}
        held = self._everyone.gather_objects({name: held_by(part) for name, part in self._parts.items()})
        check_held(self.names, held)
        self.overflowed: tuple[str, ...] = ()
        self._steps = 0
        self._limits = {g: limit for of_rank in held for has in of_rank.values() for g, limit in has.limits.items()}
        self._clipped, self._group_norms = False, dict[str, Tensor]()
        common = set.intersection(*(set(has.defaults) for of_rank in held for has in of_rank.values()))
        mine = next((optimizer.defaults for optimizer in self.modules.values()), {})
        # As after unpickling: the base class's constructor requires parameters, which a rank may not have.
        self.__setstate__({"defaults": {key: mine.get(key) for key in sorted(common)}})
        self._mark()  # the same on all ranks: checkpoints compare groups between ranks

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """This rank's modules' param groups, in order; may be changed. ``group["module"]`` is the module's name."""
        self._mark()
        return [group for optimizer in self.modules.values() for group in optimizer.param_groups]

    def _mark(self) -> None:
        for name, optimizer in self.modules.items():
            for group in optimizer.param_groups:
                group["module"] = name

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The ``state`` of this rank's optimizers, by parameter."""
        return {param: state for optimizer in self.modules.values() for param, state in optimizer.state.items()}

    # The loop

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, plain models' modules accumulate gradients on their ranks; hosts have switches of their own."""
        with ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.no_sync())
            yield

    @torch.no_grad()
    def grad_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """The norm of each module's mean gradients, fp32 on the CPU; all modules' norms on all ranks."""
        found = self._norms(norm_type).values()
        return {name: _total([of[name] for of in found], norm_type) for name in self.names}

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all modules' mean gradients as one vector, each element counted once, fp32 on the CPU."""
        return _total([norm for of in self._norms(norm_type).values() for norm in of.values()], norm_type)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float | Mapping[str, float],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Multiply all gradients by ``max_norm / (norm + 1e-6)``, if that is below 1, where ``norm`` is ``grad_norm``.

        If ``max_norm`` is a mapping, each module has its own, over that same norm. ``foreach`` has no effect. Returns
        the norm before clipping. If it is not finite, gradients are not changed (``step`` will use none of them), and
        with ``error_if_nonfinite`` it raises RuntimeError. Raises ValueError for missing or unknown modules in
        ``max_norm``.

        Parameters in ``clip_groups`` do not count: each group, of one name in all modules, is clipped by its own norm
        over them, here or else in the step.
        """
        limits = max_norm if isinstance(max_norm, Mapping) else dict.fromkeys(self.names, max_norm)
        self._check_names("max_norm", limits, self.names)
        norms = self._clip(self._norms(norm_type), norm_type, limits)
        wrong = [norm.item() for norm in norms.values() if not torch.isfinite(norm)]
        if wrong and error_if_nonfinite:
            raise RuntimeError(
                f"the total norm of order {norm_type} of all modules' gradients is {wrong[0]}; set "
                "error_if_nonfinite=False to have step() skip them"
            )
        return norms[None]

    def _clip(
        self, found: Norms, norm_type: float, max_norms: Mapping[str, float] | None = None
    ) -> dict[str | None, Tensor]:
        """Clip each clip group by its norm, which this returns, and the rest (None) of each module by ``max_norms``, if
        given; nothing, if a norm is not finite."""
        norms = {group: _total([*of.values()], norm_type) for group, of in found.items()}
        self._clipped, self._group_norms = True, {group: norm for group, norm in norms.items() if group is not None}
        finite = all(map(torch.isfinite, norms.values()))
        for name, part in self._parts.items():
            limits = dict(part.groups.limits)
            if max_norms is not None:
                limits[None] = max_norms[name]
            part.groups.norms.update({group: norms[group] for group in limits})
            for group, limit in limits.items() if finite else ():
                factor = clip_factor(limit, norms[group]).item()
                if factor < 1:
                    part.scale(factor, part.groups.pick(group))
        return norms

    @property
    def clip_group_norms(self) -> dict[str, Tensor]:
        """The norm over all modules of each group in ``clip_groups`` before it was last clipped, fp32 on the CPU."""
        return dict(self._group_norms)

    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiply all gradients by ``factor``, e.g. after a backward pass from a scaled loss."""
        self._norms(2.0)  # reduces them to their owners
        for part in self._parts.values():
            part.scale(factor)

    @torch.no_grad()
    def zero_counts(self) -> dict[str, int]:
        """The number of exact zeros in each module's mean gradients; all modules' numbers on all ranks."""
        found = self._measure("the number of zeros", 1, lambda part: [part.count_zeros()])
        return {name: round(count) for name, (count,) in found.items()}

    def count_zeros(self) -> int:
        """The number of exact zeros in all modules' mean gradients."""
        return sum(self.zero_counts().values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Step every module or none; returns whether all ranks have stepped.

        If any gradient on any rank is not finite, no module steps, all gradients are dropped, ``overflowed`` names the
        modules with such gradients, and all ranks return False. Options of plain optimizers that differ, and what is
        wrong with gradients, raise RuntimeError on all ranks before any module steps.
        """
        if closure is not None:
            raise TypeError(f"{NAME}.step takes no closure; it returns whether all modules stepped")
        hooked = bool(self._optimizer_step_post_hooks or AFTER)  # by hooks that may read parameters
        with one_call(self, begins=True, ends=True):
            norms = self._norms(2.0, compare=self._steps % COMPARED_EVERY == 0)
            self._steps += 1
            self.overflowed = tuple(n for n in self.names if not all(math.isfinite(of[n]) for of in norms.values()))
            if self._limits and not self._clipped:
                self._clip(norms, 2.0)
            self._clipped = False
            if self.overflowed:
                self.zero_grad()
                return False
            with inner_steps():
                for part in self._parts.values():
                    part.step()
                    if hooked and isinstance(part, OurPart):
                        part.optimizer.synchronize()
            return True

    step.hooked = True  # type: ignore[attr-defined]  # see one_call

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of an interrupted backward pass included."""
        for optimizer in self.modules.values():
            optimizer.zero_grad(set_to_none)

    def _norms(self, norm_type: float, *, compare: bool = False) -> Norms:
        """The norms of gradients, by clip group and module; if asked to ``compare``, options must be alike, too."""
        order, groups = checked_order(norm_type), (None, *self._limits)

        def measure(part: Part) -> list[Tensor | float]:
            ours = (None, *part.groups.limits)
            return [part.norm(order, group) if group in ours else 0.0 for group in groups]

        found = self._measure("the norm of gradients", len(groups), measure, compare)
        return {group: {name: found[name][number] for name in self.names} for number, group in enumerate(groups)}

    def _measure(
        self, what: str, width: int, measure: Callable[[Part], Sequence[Tensor | float]], compare: bool = False
    ) -> dict[str, list[float]]:
        """By module ``width`` values that all of its ranks ``measure``, on all ranks; NaN if any rank's is.

        One all-reduce of the largest value, of the least, and of a flag for NaN, which gloo's MAX may drop. A hash of
        the options to ``compare`` travels with them, and a flag for ranks that failed. Raises RuntimeError, on all
        ranks, where ranks of a module differ or failed.
        """
        device = self._everyone.device
        table = torch.full((len(self.names), 3 * width + 3), -math.inf, dtype=torch.float64, device=device)
        failed: dict[str, Exception] = {}
        for row, name in zip(table, self.names):
            if (part := self._parts.get(name)) is None:
                continue
            number = int(digest(part.options())[:12], 16) if compare else 0  # a double holds 48 bits exactly
            row[-3:] = torch.tensor([number, -number, 0.0], dtype=torch.float64)
            try:
                values = torch.stack([torch.as_tensor(v).to(device, torch.float64) for v in measure(part)])
                known = values.nan_to_num(0.0, math.inf)
                row[:-3] = torch.cat([known, -known, values.isnan()])
            except Exception as error:  # other modules' ranks wait for this one, so it is raised below, on all ranks
                failed[name] = error
                row[-1] = 1.0
        self._everyone.all_reduce_max(table).wait()
        rows = dict(zip(self.names, table.tolist()))
        if any(row[-1] for row in rows.values()):
            raise_on_all(self._everyone, what, failed)
        for name, row in rows.items():
            if row[-3] != -row[-2]:
                options = self._everyone.gather_objects(self._parts[name].options() if name in self._parts else None)
                ranks = [rank for rank, lines in enumerate(options) if lines is not None]
                difference = first_difference([options[rank] for rank in ranks], ranks)
                raise RanksDisagree(f"{NAME}: module {name!r}: {difference}")
        return {name: self._agreed(what, name, row[:-3], width) for name, row in rows.items()}

    def _agreed(self, what: str, name: str, row: Sequence[float], width: int) -> list[float]:
        agreed = []
        for most, least, is_nan in zip(row[:width], row[width : 2 * width], row[2 * width :]):
            if math.isfinite(most) and not is_nan and not math.isclose(most, -least, rel_tol=1e-5):
                raise RuntimeError(
                    f"{NAME}: {what} of module {name!r} is {-least} on one of its ranks and {most} on another; its "
                    "ranks hold copies, so reduce their gradients before (DDP does)"
                )
            agreed.append(math.nan if is_nan else most)
        return agreed

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """By module, the ``state_dict`` of this rank's optimizers.

        ``torch.distributed.checkpoint`` saves and loads it for any split of ranks, ``torch.save`` for the same split.
        """
        modules = self.modules.items()
        return saved(self, lambda: {n: {**each.state_dict(), HAS_STATE: bool(each.state)} for n, each in modules})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each of this rank's modules; the state dict may have other ranks' modules, too.

        Raises, on all ranks and before anything is changed, for unknown and for missing modules, and for saved state
        that ``torch.distributed.checkpoint`` did not read, because a plain optimizer without a step asks for none.
        """
        loaded(self, state_dict, self._take_state)

    def _take_state(self, state_dict: dict[str, Any]) -> None:
        names = tuple(self.modules)

        def check() -> None:
            self._check_names("load_state_dict", state_dict, names)
            for name in names:
                if state_dict[name].get(HAS_STATE) and not state_dict[name]["state"]:
                    raise ValueError(
                        f"{NAME}: module {name!r} was saved with state, of which nothing was read, because its "
                        f"{type(self.modules[name]).__name__} has made none yet; load it with "
                        "load_state_dict_from(folder)"
                    )

        def take(name: str, part: Part) -> None:
            part.optimizer.load_state_dict({k: v for k, v in state_dict[name].items() if k != HAS_STATE})

        check_on_all(self._everyone, NAME, check)
        together(self._everyone, "load_state_dict", self._parts, take)

    def save_state_dict(self, path: str | PathLike[str]) -> None:
        """Write all modules' state to a folder of torch.distributed.checkpoint, which all ranks must see.

        Raises RanksDisagree, on all ranks, where options differ between ranks.
        """
        self._measure("options", 1, lambda part: [0.0], compare=True)
        save(self._everyone, self._parts, Path(path))

    def load_state_dict_from(self, path: str | PathLike[str]) -> None:
        """Load what ``save_state_dict`` wrote; modules may be on other ranks now."""
        load(self._everyone, self.names, self._parts, Path(path))

    def _check_names(self, what: str, found: Mapping[str, Any], needed: tuple[str, ...]) -> None:
        for name in found:
            if name not in self.names:
                raise ValueError(f"{NAME}: {what} has an unknown module {name!r}; {suggestion(str(name), self.names)}")
        missing = [name for name in needed if name not in found]
        if missing:
            raise ValueError(f"{NAME}: {what} lacks module {missing[0]!r}; it has {sorted(found)}")

    # What it is not

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError; add the group to a module's optimizer instead."""
        raise RuntimeError(f"{NAME} has no param groups of its own; add this one to a module's: .modules[name]")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler. Raises RuntimeError, because it would skip a step on some ranks only."""
        raise RuntimeError(f"{NAME}: GradScaler decides on each rank alone; use scale_grads(), and step() skips on all")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{NAME} holds process groups and cannot be copied or pickled; use state_dict()")


def _total(norms: Sequence[float], norm_type: float) -> Tensor:
    """The norm of what has these ``norms``, in fp32."""
    order, values = checked_order(norm_type), torch.tensor(norms, dtype=torch.float64)
    largest = values.max()
    if order != math.inf and 0 < largest < math.inf:  # the norms are divided by it first, so that none overflows
        largest = largest * torch.linalg.vector_norm(values / largest, order)
    return largest.float()
