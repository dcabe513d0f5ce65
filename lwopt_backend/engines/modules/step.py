"""One optimizer over modules on different ranks: ``ModuleOptimizers({"vision": ..., "language": None})``.

Each module keeps its own optimizer, process groups and number of ranks. Decisions about all modules are made here:
finite gradients, their total norm, and whether all modules step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.config.options import checked, options_in
from lwopt_backend.engines.base import StepIntegrity, loaded, saved
from lwopt_backend.engines.gradients import (
    ClipGroups,
    GradientNorms,
    Guard,
    Pick,
    Version,
    check_finite,
    checked_order,
    clip_factor,
)
from lwopt_backend.engines.modules.module_optimizer import (
    NAME,
    ModuleOptimizer,
    check_held,
    check_names,
    check_none_failed,
    difference,
    facts_of,
    in_one_order,
    module_optimizers,
    together,
)
from lwopt_backend.groups.members import same
from lwopt_backend.groups.param_groups import COMPARED_EVERY, comparable
from lwopt_backend.groups.rates import MadeRates
from lwopt_backend.optimizer import PlainOptimizer
from lwopt_backend.routing.routing import as_globs, named_like
from lwopt_backend.rules.protocol import AFTER, inner_steps, one_call
from lwopt_backend.runtime.agreement import agree, check_on_all, digest, setting
from lwopt_backend.runtime.collectives import ranks_of
from lwopt_backend.runtime.undisturbed import undisturbed

Measured = dict[str, list[float]]  # by module
NORMS = "the norm of gradients"
NO_GROUPS = (
    "give a module's LayerWiseOptimizer all groups when you make it, and freeze what is to be trained later; one of "
    "torch's optimizers takes a group by .modules[name].add_param_group"
)


class ModuleOptimizers(torch.optim.Optimizer):
    """Steps the optimizers of several modules as one optimizer. Call the constructor and every method on all ranks.

    ``modules`` has this rank's optimizers by name, ``names`` the names of all modules.

    Args:
        optimizers: the optimizer of each module by name, or None on a rank without the module. All ranks give the same
            names in the same order. An optimizer is a ``LayerWiseOptimizer`` or one of torch's. The module of torch's
            optimizer is on one rank only, or each of its ranks has a copy, as under DDP.
        process_group: all ranks of all modules. Default: all ranks.
        on_nonfinite: what ``step`` does if any rank of any module has a NaN or infinite gradient: "skip" all modules
            ("auto" too), "raise" an error, or "step" anyway.
        skip_above: skip all modules if the norm of all their gradients before clipping is above this. Default: never.

    Raises:
        TypeError, ValueError, RuntimeError: on all ranks, for modules that cannot be trained together.

    Examples:
        >>> vision = LayerWiseOptimizer(model.vision) if rank < 2 else None
        >>> optimizer = ModuleOptimizers({"vision": vision, "text": LayerWiseOptimizer(model.text)})
    """

    @undisturbed()
    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer | None],
        *,
        process_group: Any = None,
        on_nonfinite: str = "auto",
        skip_above: float | None = None,
    ) -> None:
        self._everyone = ranks_of(process_group)
        given = {"on_nonfinite": on_nonfinite, "skip_above": skip_above}

        def decide() -> tuple[Guard, list[str]]:
            found = checked({key: options_in(HostConfig)[key] for key in given}, given)
            guard = Guard(NAME, found["on_nonfinite"], found["skip_above"], skips_by_default=True)
            return guard, [setting(key, comparable(value)) for key, value in found.items()]

        self._kept = GradientNorms(ClipGroups({}, {}), agree(self._everyone, NAME, decide))  # over all modules
        what = f"{NAME}: expected all modules on all ranks, in one order, with None for modules on other ranks"
        mine = agree(self._everyone, what, lambda: (module_optimizers(optimizers), list(optimizers)))
        self.names = tuple(optimizers)
        self.modules = {name: module.optimizer for name, module in mine.items()}
        # Describing this rank's modules may fail: then all ranks raise, and none waits.
        here = agree(self._everyone, NAME, lambda: ({name: facts_of(module) for name, module in mine.items()}, []))
        held = self._everyone.gather_objects(here)
        check_held(self._everyone, self.names, mine, held)
        self._mine = in_one_order(mine, held)
        found = [has for of_rank in held for has in of_rank.values()]
        # Clip groups; None is the rest.
        self._groups = tuple(dict.fromkeys([None, *chain(*(has.groups for has in found))]))
        self._clipped: dict[str, Version] | None = None  # by module, of the gradients that a call has clipped
        self._list, self._shown = list[dict[str, Any]](), list[dict[str, Any]]()  # param groups, also as last shown
        self.overflowed: tuple[str, ...] = ()
        self._steps = 0
        self._integrity = StepIntegrity(NAME)
        common = frozenset.intersection(*(has.defaults for has in found))
        defaults = next((optimizer.defaults for optimizer in self.modules.values()), {})
        # As after unpickling: the base class's constructor requires parameters, which a rank may not have.
        self.__setstate__({"defaults": {key: defaults.get(key) for key in sorted(common)}})
        self._rates = MadeRates(self.param_groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """This rank's modules' param groups, in order; may be changed. ``group["module"]`` is the module's name."""
        groups = [(name, group) for name, optimizer in self.modules.items() for group in optimizer.param_groups]
        for name, group in groups:
            group["module"] = name
        if same(self._list, self._shown):  # else the user has changed the list, which the next step refuses
            self._shown = [group for _, group in groups]
            self._list[:] = self._shown
        return self._list

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The ``state`` of this rank's optimizers, by parameter."""
        return {param: state for optimizer in self.modules.values() for param, state in optimizer.state.items()}

    # The loop

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of plain models on each rank within this context; FSDP2 and DDP have other switches.

        Returns:
            A context manager.
        """
        with ExitStack() as stack:
            for optimizer in self.modules.values():
                if isinstance(optimizer, PlainOptimizer):
                    stack.enter_context(optimizer.no_sync())
            yield

    @undisturbed()
    @torch.no_grad()
    def grad_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """The norm of each module's mean gradients, those of modules on other ranks included.

        Args:
            norm_type: order of the norm; ``inf`` is the largest absolute value.

        Returns:
            By module, an fp32 scalar on the CPU, equal on all ranks.

        Raises:
            ValueError: for a ``norm_type`` that is not positive.
            RuntimeError: on all ranks, if the ranks of a module have different gradients.
        """
        return {name: _total(norms, norm_type) for name, norms in self._norms(norm_type).items()}

    @undisturbed()
    @torch.no_grad()
    def grad_norm(self, names: str | Sequence[str] = "*", norm_type: float = 2.0) -> Tensor:
        """The norm of all modules' mean gradients as one vector, each element counted once.

        Args:
            names: a glob, or several, on names of parameters, each after its module's: ``"vision.*.weight"``.
            norm_type: order of the norm.

        Returns:
            An fp32 scalar on the CPU, equal on all ranks.

        Raises:
            ValueError, RuntimeError: as ``grad_norms``; ValueError also for a glob that no name matches.
        """
        order, picks = checked_order(norm_type), self._picks(names)
        norm = self._measure(NORMS, 1, lambda module: [module.gradients.norm(order, picks[module.name])])
        return _total([*chain(*norm.values())], norm_type)

    @undisturbed()
    @torch.no_grad()
    def count_zeros(self, names: str | Sequence[str] = "*") -> int:
        """Count the zeros in the modules' mean gradients; a parameter without a gradient counts as zeros.

        Args:
            names: as for ``grad_norm``.

        Returns:
            The number of elements, each counted once, equal on all ranks.

        Raises:
            ValueError, RuntimeError: as ``grad_norm``.
        """
        picks = self._picks(names)
        zeros = self._measure(
            "the zeros in gradients", 1, lambda module: [module.gradients.count_zeros(picks[module.name])]
        )
        return int(sum(chain(*zeros.values())))

    @undisturbed()
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float | Mapping[str, float],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Multiply all gradients by ``max_norm / (norm + 1e-6)`` if this is below 1, where ``norm`` is ``grad_norm``.

        Parameters in ``clip_groups`` do not count: the norm of each group, over all modules, clips the group here or,
        without a call, in ``step``. A non-finite norm changes no gradient, and ``step`` uses none.

        Args:
            max_norm: largest norm; a mapping has one for each module, each compared with the norm of all modules.
            norm_type: order of the norm.
            error_if_nonfinite: raise for a non-finite norm.
            foreach: no effect.

        Returns:
            The norm before clipping.

        Raises:
            RuntimeError: for a non-finite norm, with ``error_if_nonfinite``; also as ``grad_norms``.
            ValueError: if ``max_norm`` lacks a module, or has an unknown one; also as ``grad_norms``.
        """
        limits = max_norm if isinstance(max_norm, Mapping) else dict.fromkeys(self.names, max_norm)
        check_names("max_norm", limits, self.names, self.names)
        found = self._norms(norm_type)
        self._kept.of_all = _of_all(self._norms(2.0) if self._kept.guard.is_on and norm_type != 2 else found)
        self._clip(found, norm_type, limits)
        for norm in self._kept.of_groups.values():
            check_finite(norm, norm_type, error_if_nonfinite)
        self._clipped = {name: module.gradients.version() for name, module in self._mine.items()}
        return self._kept.of_groups[None]

    def _clip(self, found: Measured, norm_type: float, max_norms: Mapping[str, float] | None = None) -> None:
        """Clip each clip group by its norm, and the rest (None) of each module by ``max_norms``, if given. A non-finite
        norm prevents all clipping."""
        norms = {group: _total(norms, norm_type) for group, norms in zip(self._groups, zip(*found.values()))}
        self._kept.of_groups = norms
        finite = all(map(torch.isfinite, norms.values()))
        for name, module in self._mine.items():
            limits = dict(module.groups.limits)
            if max_norms is not None:
                limits[None] = max_norms[name]
            module.norms.of_groups |= {group: norms[group] for group in limits}
            for group, limit in limits.items() if finite else ():
                factor = clip_factor(limit, norms[group]).item()
                if factor < 1:
                    module.gradients.scale(factor, module.groups.pick(group))

    @property
    def clip_group_norms(self) -> dict[str, Tensor]:
        """The norm over all modules of each group in ``clip_groups`` before it was last clipped, fp32 on the CPU."""
        return self._kept.named

    @undisturbed()
    @torch.no_grad()
    def scale_grads(self, factor: float) -> None:
        """Multiply all gradients, e.g. after a backward pass from a scaled loss.

        Args:
            factor: what to multiply by.

        Raises:
            RuntimeError: on all ranks, as ``grad_norms``.
        """
        self._norms(2.0)  # reduces them to their owners
        for module in self._mine.values():
            module.gradients.scale(factor)

    @undisturbed()
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Step every module or none.

        If any rank has a non-finite gradient, no module steps, all gradients are dropped, and ``overflowed`` names the
        modules with such gradients, unless ``on_nonfinite`` says otherwise. So it is for a norm above ``skip_above``.

        Args:
            closure: must be None.

        Returns:
            Whether the modules have stepped, on all ranks.

        Raises:
            TypeError: for a closure.
            RuntimeError: on all ranks and before any module steps, for wrong gradients, for non-finite ones with
                ``on_nonfinite="raise"``, and for options of plain optimizers that differ between ranks.
        """
        if closure is not None:
            raise TypeError(f"{NAME}.step takes no closure; it returns whether all modules stepped")
        hooked = bool(self._optimizer_step_post_hooks or AFTER)  # such hooks may read parameters
        with one_call(self, begins=True, ends=True), ExitStack() as ends:
            for ours in (module.ours for module in self._mine.values() if module.ours is not None):
                ends.callback(ours._end_step)
            self._integrity.check()
            norms, changed = self._norms_at_step()
            self._steps += 1
            self.overflowed = tuple(name for name, found in norms.items() if not all(map(math.isfinite, found)))
            clipped, self._clipped = self._clipped is not None and not changed, None
            if not clipped:
                self._kept.of_all = _of_all(norms)
            if len(self._groups) > 1 and not clipped:
                self._clip(norms, 2.0)
            if self._kept.guard.skips(math.nan if self.overflowed else float(self._kept.of_all)):
                self.zero_grad()
                return False
            self._rates.warn(NAME, self.param_groups)
            with inner_steps():
                for number, module in enumerate(self._mine.values()):
                    if module.ours is not None:
                        module.ours._settles = False
                        module.ours._rates.told = True  # the rates of all modules were judged above
                    with self._integrity.changing(begun=number > 0):
                        module.optimizer.step()
                    if module.ours is not None and hooked:
                        module.ours.synchronize()
            return True

    step.hooked = True  # type: ignore[attr-defined]  # see one_call

    @undisturbed()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of an interrupted backward pass included.

        Args:
            set_to_none: as in torch. The gradients of plain models are always freed.
        """
        for module in self._mine.values():
            module.optimizer.zero_grad(set_to_none)

    @undisturbed()
    def reset_state(self, names: str | Sequence[str]) -> list[str]:
        """Make the state of some parameters as it was before the first step, as ``LayerWiseOptimizer.reset_state``.

        Args:
            names: as for ``grad_norm``. The same on all ranks.

        Returns:
            The names of those parameters that this rank trains, each after its module's.

        Raises:
            ValueError: on all ranks, for a glob that no name matches.
        """
        found, picks = list[str](), self._picks(names)

        def reset(name: str, module: ModuleOptimizer) -> None:
            chosen = [param for param, _ in module.params() if picks[name](param)]
            found.extend(f"{name}.{param}" for param in (module.reset_state(chosen) if chosen else ()))

        together(self._everyone, "reset_state", self._mine, reset)
        return found

    def _picks(self, names: str | Sequence[str]) -> dict[str, Pick]:
        """By module, what selects its parameters by globs on their names after the module's. Called on all ranks.

        Raises ValueError, on all of them, for other globs on another rank, and for one that matches nothing anywhere.
        """
        globs = as_globs(names, "names")
        if globs != ("*",):
            here = [*chain(*(module.full_names() for module in self._mine.values()))]
            found = self._everyone.gather_objects((globs, [any(map(named_like([glob]), here)) for glob in globs]))
            if len({given for given, _ in found}) > 1:
                given = "; ".join(f"rank {rank}: {list(given)}" for rank, (given, _) in enumerate(found))
                raise ValueError(f"{NAME}: names: expected the same on all ranks, found {given}")
            for glob, anywhere in zip(globs, map(any, zip(*(matched for _, matched in found)))):
                if not anywhere:
                    raise ValueError(f"{NAME}: names: {glob!r} matches no trained parameter; name its module first")
        pick = named_like(globs)

        def of(module: ModuleOptimizer) -> Pick:
            return lambda param: pick(f"{module.name}.{param}") and param not in module.out

        return {name: of(module) for name, module in self._mine.items()}

    def _norms(self, norm_type: float) -> Measured:
        """The norms of each module's gradients, one for each of ``_groups``."""
        order = checked_order(norm_type)
        return self._measure(NORMS, len(self._groups), lambda module: self._norms_of(module, order))

    def _norms_at_step(self) -> tuple[Measured, bool]:
        """The norms of order 2 of the gradients of a step, and whether any rank's gradients have changed since they
        were clipped."""

        def measure(module: ModuleOptimizer) -> list[Tensor | float]:
            if not same(self._list, self._shown):
                raise ValueError(f"param_groups: expected those of the modules, found others in the list; {NO_GROUPS}")
            if module.ours is not None:
                module.ours._begin_step()
            return self._norms_of(module, 2.0)

        def changed(module: ModuleOptimizer) -> bool:
            return self._clipped is not None and not module.gradients.version().same(self._clipped[module.name])

        compare = self._steps % COMPARED_EVERY == 0
        return self._measured(NORMS, len(self._groups), measure, changed, compare)

    def _norms_of(self, module: ModuleOptimizer, order: float) -> list[Tensor | float]:
        ours = (None, *module.groups.limits)
        found = [module.gradients.norm(order, module.groups.pick(g)) if g in ours else 0.0 for g in self._groups]
        if module.ours is not None:  # after the norm, in which the module's ranks meet
            module.ours._checked.check(module.ours.param_groups)
        return found

    def _measure(
        self, what: str, width: int, measure: Callable[[ModuleOptimizer], Sequence[Tensor | float]]
    ) -> Measured:
        """By module, ``width`` values of at least 0 that all of its ranks ``measure``, as ``_measured``."""
        return self._measured(what, width, measure)[0]

    def _measured(
        self,
        what: str,
        width: int,
        measure: Callable[[ModuleOptimizer], Sequence[Tensor | float]],
        flag: Callable[[ModuleOptimizer], bool] = lambda module: False,
        compare: bool = False,
    ) -> tuple[Measured, bool]:
        """By module, ``width`` values of at least 0 that all of its ranks ``measure``, on all ranks; NaN if any rank
        has NaN. And whether ``flag`` is true of any module on any rank. Raises RuntimeError, on all ranks, if a
        module's ranks differ or failed; with ``compare`` also in options.

        One all-reduce takes the maxima of the values and of their negatives, and the host reads them once. The last
        values are the flag and a hash of the options. gloo's MAX may drop a NaN, so a NaN is sent as infinity in both;
        a rank that failed sends infinity everywhere.
        """
        device = self._everyone.device
        table = torch.full((len(self.names), 2, width + 2), -math.inf, dtype=torch.float64, device=device)
        failed: dict[str, Exception] = {}
        measured: dict[str, Sequence[Tensor | float]] = {}
        for name, module in self._mine.items():
            try:
                number = float(int(digest(module.options())[:12], 16)) if compare else 0.0  # a double holds 48 bits
                measured[name] = [*measure(module), float(flag(module)), number]
            except Exception as error:  # other modules' ranks wait for this one, so it is raised below, on all ranks
                failed[name] = error
                measured[name] = [math.nan] * (width + 2)
        for name, values in zip(measured, scalars_on(device, list(measured.values()))):
            both = torch.stack([values, -values]).nan_to_num(math.inf, math.inf, -math.inf)
            table[self.names.index(name)] = both
        self._everyone.all_reduce_max(table).wait()
        found = dict(zip(self.names, table.tolist()))
        if any(negatives[-1] == math.inf for _, negatives in found.values()):
            check_none_failed(self._everyone, what, failed)
        flagged = False
        for name, (most, negatives) in found.items():
            if most.pop() != -negatives.pop():
                raise difference(self._everyone, name, self._mine[name].options() if name in self._mine else None)
            flagged = most.pop() > 0 or flagged
            for number, (largest, negative) in enumerate(zip(most, negatives)):
                if negative == math.inf:
                    most[number] = math.nan
                elif math.isfinite(largest) and not math.isclose(largest, -negative, rel_tol=1e-5):
                    raise RuntimeError(
                        f"{NAME}: {what} of module {name!r}: expected equal copies on its ranks, found {-negative} and "
                        f"{largest}; reduce their gradients before (DDP does)"
                    )
        return {name: most for name, (most, _) in found.items()}, flagged

    # Checkpoints

    @undisturbed()
    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's optimizers.

        ``torch.distributed.checkpoint`` saves and loads it for any split of ranks, ``torch.save`` for the same split.

        Returns:
            By module, the ``state_dict`` of its optimizer.
        """
        return saved(self, lambda: {name: self._mine[name].state_dict() for name in self.modules})

    @undisturbed()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's modules.

        Args:
            state_dict: what ``state_dict`` returned, with every module of this rank and any others.

        Raises:
            ValueError: on all ranks and before anything is changed, for unknown modules, missing modules, other
                parameters, and saved state that ``torch.distributed.checkpoint`` did not read, because a plain
                optimizer without a step asks for none.
        """
        loaded(self, state_dict, self._take_state)

    def _take_state(self, state_dict: dict[str, Any]) -> None:
        def check() -> None:
            check_names("load_state_dict", state_dict, self.names, tuple(self.modules))
            for name, module in self._mine.items():
                module.check_saved(state_dict[name])

        def load(name: str, module: ModuleOptimizer) -> None:
            module.optimizer.load_state_dict(state_dict[name])

        check_on_all(self._everyone, NAME, check)
        together(self._everyone, "load_state_dict", self._mine, load)
        self._integrity.loaded()
        self._rates.loaded(self.param_groups)

    @undisturbed()
    def save_state_dict(self, path: str | PathLike[str]) -> None:
        """Write ``state_dict`` of all ranks to a folder of torch.distributed.checkpoint.

        After an error, the folder's earlier save can still be loaded.

        Args:
            path: the folder, which all ranks must see.

        Raises:
            OSError, ValueError, RuntimeError: on all ranks, for an error on any rank, and for options that differ
                between ranks.
        """
        from lwopt_backend.engines.modules import state

        self._measured("options", 0, lambda module: [], compare=True)
        state.save(self._everyone, self.state_dict(), Path(path))

    @undisturbed()
    def load_state_dict_from(self, path: str | PathLike[str], *, check: bool = True) -> None:
        """Load what ``save_state_dict`` wrote; modules may be on other ranks now.

        Args:
            path: the folder, which all ranks must see.
            check: first compare all bytes with their checksums. Each rank reads a share of the files.

        Raises:
            ValueError: as ``load_state_dict``.
        """
        from lwopt_backend.engines.modules import state

        owned = [name for name, optimizer in self.modules.items() if isinstance(optimizer, PlainOptimizer)]
        self.load_state_dict(state.read(self._everyone, owned, self.state_dict(), Path(path), check))

    # What it is not

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: the plans of the modules know no later parameters."""
        raise RuntimeError(f"{NAME}: expected all param groups in the modules' optimizers, found one; {NO_GROUPS}")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler. Raises RuntimeError, because it would skip a step on some ranks only."""
        raise RuntimeError(
            f"{NAME}: GradScaler would skip a step on some ranks only; use scale_grads(), and step() skips on all"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{NAME} holds process groups and cannot be copied or pickled; use state_dict()")


def scalars_on(device: torch.device, rows: Sequence[Sequence[Tensor | float]]) -> list[Tensor]:
    """Rows of numbers and scalar tensors, fp64 on ``device``. One copy takes all tensors there: a host waits once."""
    scalars = [value for row in rows for value in row if isinstance(value, Tensor)]
    # The norm of a module without gradients is on the CPU: the others do not go there one by one.
    there = next((scalar.device for scalar in scalars if scalar.device.type != "cpu"), torch.device("cpu"))
    copied = iter(torch.stack([s.to(there, torch.float64) for s in scalars]).to(device) if scalars else ())
    # Unlike a copy to a GPU, filling in a number makes no host wait.
    filled = functools.partial(torch.full, (), dtype=torch.float64, device=device)
    return [torch.stack([next(copied) if isinstance(v, Tensor) else filled(v) for v in row]) for row in rows]


def _of_all(norms: Measured) -> float:
    """The norm of order 2 of all gradients, by those of modules and groups."""
    return math.hypot(*chain(*norms.values()))


def _total(norms: Sequence[float], norm_type: float) -> Tensor:
    """The total of these ``norms``, in fp32."""
    total: Tensor = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), checked_order(norm_type))
    return total.float()
