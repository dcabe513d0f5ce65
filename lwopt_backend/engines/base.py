"""What all optimizers of this package share: their name in errors, hooks around state dicts, metrics, fixed groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lwopt_backend.config.hosts import NAME
from lwopt_backend.config.options import glob_suggestion, within
from lwopt_backend.config.versions import warn_if_newer
from lwopt_backend.groups import Groups
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import as_saved
from lwopt_backend.groups.param_groups import CheckedGroups, ShownRates, check_rates
from lwopt_backend.groups.rates import MadeRates
from lwopt_backend.groups.registry import arguments, new_state
from lwopt_backend.plan.cost import Machine, machine_of
from lwopt_backend.routing.routing import as_globs, named_like
from lwopt_backend.rules.newton_schulz import IMMEDIATE
from lwopt_backend.runtime.agreement import StepRefused, agree, setting
from lwopt_backend.runtime.collectives import RECORDERS, Collectives, Recorder
from lwopt_backend.runtime.state import StateStore
from lwopt_backend.runtime.undisturbed import undisturbed


def machine_for(device: torch.device) -> Machine:
    """The machine that an engine plans for whose parameters are on ``device``."""
    return machine_of("cpu" if device.type in IMMEDIATE else "cuda")


# Elements of equal matrices that a rule takes at once on an accelerator; more of them save launches, and need memory.
# 2^24 was the first default of ZeRO's ``bucket_numel``, when a bucket was a batch. FSDP2 has had 2^26 since its first
# version. No measurement chose either. Modelled launches decide how many buckets a plan has, so another number would
# give plans of today another digest.
BATCH_NUMEL = 2**24


def batch_numel_on(device: torch.device, numel: int) -> int:
    """The elements that a rule takes at once: ``numel`` on an accelerator, those of one matrix on a CPU."""
    return 0 if device.type in IMMEDIATE else numel


def picked(names: str | Sequence[str], known: Sequence[str], out: Collection[str] = ()) -> Callable[[str], bool]:
    """Selects names by globs, but none that is ``out``. Raises ValueError for a glob that matches none that is
    ``known``."""
    globs = as_globs(names, "names")
    for glob in globs:
        if not any(map(named_like([glob]), known)):
            raise ValueError(f"names: {glob!r} matches no trained parameter; {glob_suggestion(glob, known)}")
    pick = named_like(globs)
    return (lambda name: pick(name) and name not in out) if out else pick


def saved(optimizer: torch.optim.Optimizer, state_of: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A state dict, with torch's hooks around ``state_of``, which makes it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state_dict = state_of()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        state_dict = after(optimizer, state_dict) or state_dict
    return state_dict


def loaded(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], take: Callable[[dict[str, Any]], None]
) -> None:
    """Load a state dict with torch's hooks around ``take``, which takes it."""
    state_dict = dict(state_dict)  # torch's hooks may change the one they are given
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = before(optimizer, state_dict) or state_dict
    with as_saved(getattr(optimizer, "_grouping", None)):
        take(state_dict)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


class StepIntegrity:
    """Whether an optimizer's weights and state are those of whole steps. ``name`` is for errors."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._broken = ""

    def check(self) -> None:
        """Raises RuntimeError if an error has ended a step that had begun to change weights and state."""
        if self._broken:
            raise RuntimeError(
                f"{self._name}: the last step ended in an error after it had changed some weights and state; load a "
                f"checkpoint, or restart. The error was: {self._broken}"
            )

    @contextmanager
    def changing(self, *, begun: bool = False) -> Iterator[None]:
        """Context of a step's changes. ``StepRefused`` is raised before there are any, unless some have ``begun``."""
        try:
            yield
        except BaseException as error:
            if begun or not isinstance(error, StepRefused):
                self._broken = f"{type(error).__name__}: {error}"
            raise

    def loaded(self) -> None:
        """Weights and state have been loaded."""
        self._broken = ""


MOMENTA = ("momentum", "betas")  # defaults by which torch's OneCycleLR and CyclicLR choose what they cycle


class BaseOptimizer(torch.optim.Optimizer):
    """An optimizer with as many param groups as it was made with."""

    name = NAME  # for errors
    _made = False  # whether the base class's constructor has added all param groups
    _plan_digest: str | None = None  # once there is a plan
    _recorder: Recorder | None = None  # while steps are measured
    _integrity: StepIntegrity
    _shown_rates: ShownRates | None = None  # on the rank that has printed them

    @property
    def plan_digest(self) -> str:
        """The name of this rank's plan: the ``digest`` of ``lwopt plan`` for the same model, ranks and options.

        Raises:
            RuntimeError: before there is a plan.
        """
        if self._plan_digest is None:
            raise RuntimeError(
                f"this {self.name} has no plan yet, so plan_digest has no value; "
                "read it after deepspeed.initialize, or with sharded_later after the first step"
            )
        return self._plan_digest

    def record_metrics(self, on: bool = True) -> None:
        """Start or stop measuring steps for ``metrics``. Off by default.

        Args:
            on: whether to measure.
        """
        self._recorder = Recorder() if on else None
        if self._recorder is not None:
            RECORDERS.add(self._recorder)

    @undisturbed()
    def metrics(self) -> dict[str, Any]:
        """Measurements of the steps since the last call, by name. Call it on all ranks, after a step.

        - ``grad_norm``: before the last clipping, if this optimizer or DeepSpeed clipped or measured it; without the
          parameters in ``clip_group_norms``
        - ``update_rms``: by rule, the root mean square of what a step changes in a weight
        - ``orthogonality``: by matrix rule, of a sampled update that one rank computed, how far its shorter side is
          from orthogonal, 0 if it is: ||U U^T - 1|| / sqrt(rows)
        - ``exchange_bytes``: what the busiest rank has sent
        - ``seconds``: of the busiest rank, by part: exchange, rule, elementwise and norm
        - ``lr``: by param group, the learning rate
        - ``skipped_steps``: how many ``on_nonfinite`` and ``skip_above`` skipped, if any can be

        Steps of other optimizers in this process are included.

        Returns:
            Numbers, and objects and lists of numbers; equal on all ranks.

        Raises:
            RuntimeError: without ``record_metrics``.
        """
        if self._recorder is None:
            raise RuntimeError(
                f"{self.name}: expected record_metrics() before the steps that metrics() reports; call it"
            )
        norm, groups = self._norms_before_clipping()
        norms = {} if norm is None else {"grad_norm": float(norm)}
        named = {"clip_group_norms": {name: float(each) for name, each in groups.items()}} if groups else {}
        rates = {"lr": [float(group["lr"]) for group in self.param_groups]}
        return {**norms, **named, **self._recorder.take(self._everyone()), **rates, **self._skipped_steps()}

    def _skipped_steps(self) -> dict[str, int]:
        """The metric of this name, if this optimizer skips steps itself."""
        return {}

    @undisturbed()
    @torch.no_grad()
    def reset_state(self, names: str | Sequence[str]) -> list[str]:
        """Make the state of some parameters as it was before the first step. Their weights do not change.

        For parameters that stand for something else from now on, such as an adapter whose place another task takes.
        Call it on all ranks, with the same names, between steps.

        Args:
            names: a glob, or several, on names of parameters, as checkpoints have them.

        Returns:
            The names of those parameters that this rank trains.

        Raises:
            ValueError: on all ranks, before anything is changed, for a glob that matches no trained parameter; under
                DeepSpeed also for parameters that have one count of steps with others, which it steps as one tensor.

        Examples:
            >>> optimizer.reset_state("*.lora_[AB].third.*")
        """
        store = self.state_store()

        def decide() -> tuple[Callable[[str], bool], list[str]]:
            pick = picked(names, [*(param.name for param in store.params), *store.elsewhere])
            counted = {piece.member for piece in store.pieces() if any(not t.ndim for t in piece.tensors.values())}
            members = iter(range(len(store.params)))
            for unit in store.units:
                numbers = [next(members) for _ in unit]
                if len({pick(param.name) for param in unit}) > 1 and counted.intersection(numbers):
                    other = next(param.name for param in unit if not pick(param.name))
                    raise ValueError(
                        f"names: {names!r} has some of the parameters that DeepSpeed steps as one tensor, with "
                        f"one count of steps, but not {other!r}; reset all of them, or put them into separate groups"
                    )
            return pick, [setting("names", names)]

        pick = agree(self._everyone(), f"{self.name}: reset_state", decide)
        chosen = {param.name: param for param in store.params if pick(param.name)}
        for piece in store.pieces():
            param = store.params[piece.member]
            if param.name in chosen and piece.tensors:
                like = next(iter(piece.tensors.values())) if piece.value is None else piece.value
                fresh = new_state(torch.empty_like(like), store.groups[param.group])
                for key in fresh.keys() & piece.tensors.keys():
                    with piece.changing(key) as tensor:
                        tensor.copy_(fresh[key])
        store.forget_owner_states(chosen.keys())
        return list(chosen)

    def state_store(self) -> StateStore:
        raise NotImplementedError

    def _norms_before_clipping(self) -> tuple[Any, Mapping[str, Any]]:
        """The norm of the gradients in no clip group, None if not measured, and the norms of the clip groups."""
        raise NotImplementedError

    def _everyone(self) -> Collectives:
        """All ranks that step together."""
        raise NotImplementedError

    def _begin(self, rules: Rules, trains_matrices: bool, rate: float, groups: Groups) -> None:
        """Set the ``defaults`` that schedulers read, and accept no further param group. ``groups`` are as configured,
        and ``rate`` is their ``main_rate``. Raises ValueError for one without a rate.

        ``trains_matrices`` is whether the matrix rule trains anything, on any pipeline stage. Then no momentum is among
        the defaults: both halves have one, under two names, and schedulers would cycle that of one half.
        """
        with within(self.name):
            check_rates(groups)
        warn_if_newer("torch", torch.__version__)
        main = rules.matrix if trains_matrices else rules.elementwise
        options = {key: value for key, value in arguments(main).items() if not (trains_matrices and key in MOMENTA)}
        self.defaults = {**options, "lr": rate}
        self._rates, self._checked = MadeRates(groups), CheckedGroups(groups)
        self._made = True
        self._integrity = StepIntegrity(self.name)
        self._show_groups(self.param_groups)

    def set_groups(self, groups: Iterable[Mapping[str, Any]], before: Groups | None = None) -> None:
        """Replace the param groups, or those ``before`` the load, by those of a checkpoint."""
        before = self.param_groups if before is None else before
        self._integrity.loaded()
        self._show_groups(groups)
        self._rates.loaded(self.param_groups)
        if self._shown_rates is not None:
            self._shown_rates.loaded(before, self.param_groups)

    def _show_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        self.param_groups = [dict(group) for group in groups]

    def _check_groups(self, groups: Groups) -> None:
        """Look at what was written into the param groups. Called in every step, before anything is changed.

        Raises ValueError for options that the constructor would refuse, and for parameters that were added or moved.
        """
        self._checked.check(groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the base class's constructor. Raises RuntimeError afterwards: the plan knows no later parameters."""
        if self._made:
            raise RuntimeError(
                f"{self.name}: expected all param groups in the constructor, found one after it; give the constructor "
                "all groups and freeze what is to be trained later, or make another optimizer for these parameters"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{self.name} belongs to its process groups and cannot be copied or pickled; use state_dict()")
