"""State for parameters that somebody else shards after the optimizer was made, as Accelerate's ``prepare`` does.

What happens to the optimizer there, in this order:

1. It is made for the plain model, and routes its parameters.
2. ``prepare`` loads its own state dict into it, to place state on the device. It has no state yet.
3. ``prepare`` puts placeholders into the param groups, shards the model, and puts the sharded parameters there.
4. A checkpoint may be saved or loaded before the first step. ``torch.distributed.checkpoint`` looks at ``state`` and,
   where it is empty, takes a step without gradients to have some: AdamW's counter would begin at 1.

So state is made when it is first looked at after 3. That needs no other rank. Planning does, and waits for the step.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lwopt_backend import report
from lwopt_backend.config import linked_rates
from lwopt_backend.config.choices import Rules, arguments_of, settings_lines
from lwopt_backend.config.hosts import FSDP2Config
from lwopt_backend.config.linked_rates import LinkedOptimizer
from lwopt_backend.config.param_groups import ElementwiseGroups, as_groups
from lwopt_backend.config.registry import ELEMENTWISE_RULES, MATRIX_RULES, build_matrix_rules
from lwopt_backend.qk_clip import RowScaling
from lwopt_backend.routing.grouping import Grouping, WatchedModel, group_parameters
from lwopt_backend.routing.routing import Route
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.agreement import agree_in_all, plan_digest
from lwopt_backend.runtime.collectives import Presence
from lwopt_backend.runtime.state import keeps_state
from lwopt_backend.runtime.stepper import EarlyExchange
from lwopt_backend.runtime.whole import Slices
from lwopt_backend.storage.gradients import MeshGradients, hold_different_parameters
from lwopt_backend.storage.mesh import (
    NAME,
    Exchange,
    Mesh,
    MeshStepper,
    Shards,
    States,
    bind,
    exchange_groups,
    mesh_state_nbytes,
    names_of,
    new_state,
    reshard,
    sharded_module,
)
from lwopt_backend.storage.mesh_state import (
    Of,
    check_loadable,
    check_matrices,
    owner_shards,
    restore_dtypes,
    restore_groups,
    take_owner_state,
    with_owner_keys,
    with_owner_state,
    with_shards,
)


class StateOnceSharded:
    """The attribute ``state`` of an optimizer: made for the parameters of the param groups when they become DTensors.

    The optimizer's ``_make_state`` makes what is missing; its ``_stated`` lists the parameters that this was done for.
    """

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        if optimizer is None:
            return self
        held = [param for group in optimizer.param_groups for param in group["params"]]
        if any(isinstance(param, DTensor) for param in held) and not same(held, optimizer._stated):
            optimizer._make_state()
        return optimizer.__dict__["state"]

    def __set__(self, optimizer: Any, state: Any) -> None:
        optimizer.__dict__["state"] = state  # where Optimizer.__setstate__ writes it, too


def check_sharded(params: Iterable[Tensor]) -> None:
    """Raise RuntimeError if nobody has sharded the parameters by the first step."""
    if not any(isinstance(param, DTensor) for param in params):
        raise RuntimeError(
            "LayerWiseOptimizer was made with sharded_later=True, and at the first step no parameter in its param "
            "groups is a DTensor; check that prepare() was given the model and this optimizer together, and that "
            "Accelerate runs with FSDP, fsdp_version 2 (on CPUs it falls back to DDP without a word)"
        )


def same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same objects; tensors cannot be compared by ``==``."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


# Norms, zeros and scaling of all gradients of a model whose parameters lie on several meshes, or on none.


# The hook: exchange begins in the backward pass, when FSDP2 has reduced a bucket's last gradient.

RulesNow = Callable[[], Mapping[int, MatrixRule]]


def check_is_of(module: nn.Module, params: Sequence[Sequence[Tensor]], names: Sequence[Sequence[str]]) -> None:
    """Raise ValueError for a parameter that is not the module's."""
    theirs = {id(param) for param in module.parameters()}
    for group, group_names in zip(params, names):
        for param, name in zip(group, group_names):
            if id(param) not in theirs:
                raise ValueError(f"attach: parameter {name!r} of this optimizer is not the model's")


class Attachment:
    """Hooks on the sharded matrices of an optimizer; ``remove()`` takes them off, also at the end of a ``with``.

    ``Tensor.register_post_accumulate_grad_hook`` on a sharded parameter is the one public sign that its gradient has
    been reduced: FSDP2 calls it in the order of the backward pass, which is the same on all ranks.
    """

    def __init__(self, steppers: Sequence[MeshStepper], rules: RulesNow, states: Callable[[], States]) -> None:
        self._rules = rules
        self._states = states
        self._early: dict[int, EarlyExchange] = {}
        self._handles: list[Any] = []
        for number, stepper in enumerate(steppers):
            if stepper.plan.buckets:
                self._early[number] = EarlyExchange(stepper.stepper, stepper.plan.buckets)
                for atom, index in enumerate(stepper.matrices):
                    hook = self._hook(number, stepper, atom)
                    self._handles.append(stepper.members[index].param.register_post_accumulate_grad_hook(hook))

    def _hook(self, number: int, stepper: MeshStepper, atom: int) -> Callable[[Tensor], None]:
        def now() -> tuple[Sequence[MatrixRule], Shards]:
            return stepper.rules_of(self._rules()), stepper.storage(self._states())

        return lambda param: self._early[number].ready(atom, now)

    def touched(self, number: int, stepper: MeshStepper, rules: Sequence[MatrixRule], storage: Shards) -> Tensor | None:
        """Per bucket of a stepper, whether what has left is not what the step would send; None where nothing leaves."""
        if number not in self._early:
            return None
        missing = {atom for atom, i in enumerate(stepper.matrices) if stepper.members[i].param.grad is None}
        return self._early[number].touched(rules, storage, missing, stepper.device)

    def settle(self, number: int, touched: Sequence[int]) -> Mapping[int, Any]:
        return self._early[number].settle(touched) if number in self._early else {}

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        with torch.no_grad():
            for early in self._early.values():
                early.forget()
        self._early = {}

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


# One step of all steppers of a model: matrices mesh by mesh, the rest while the first bucket travels.


def step_all(
    steppers: Sequence[MeshStepper],
    groups: Sequence[Mapping[str, Any]],
    rules: Mapping[int, MatrixRule],
    optimizers: ElementwiseGroups,
    states: States,
    attachment: Attachment | None,
    row_scaling: RowScaling,
    changed: str | None,
) -> None:
    """One step from the gradients that are there. ``rules`` are by param group. Called on all ranks of the meshes.

    ``changed`` says what has happened to the model on this rank that ends its training. Raises RuntimeError, on all
    ranks and before any weight is changed, if there is such a thing on any.
    """
    of_steppers = [stepper.rules_of(rules) for stepper in steppers]
    storages = [stepper.storage(states) for stepper in steppers]
    touched: list[Tensor | None] = [None] * len(steppers)
    if attachment is not None:
        parts = zip(steppers, of_steppers, storages)
        touched = [attachment.touched(number, *part) for number, part in enumerate(parts)]
    presences = [stepper.presence(flags, changed=changed is not None) for stepper, flags in zip(steppers, touched)]
    changed = _changed_anywhere(steppers, presences, changed)
    if changed is not None:
        if attachment is not None:
            attachment.remove()
        raise RuntimeError(f"{NAME}: {changed}")
    meanwhile: Callable[[], None] | None = functools.partial(
        _step_elementwise, optimizers, groups, steppers, presences, states
    )
    for number, (stepper, presence) in enumerate(zip(steppers, presences)):
        departed: Mapping[int, Any] = {}
        if attachment is not None and touched[number] is not None:
            departed = attachment.settle(number, presence.anywhere()[len(stepper.members) + 1 :])
        stepper.step_matrices(of_steppers[number], storages[number], presence, departed, meanwhile)
        presence.finish()
        meanwhile = None
    if row_scaling:
        for stepper in steppers:
            stepper.scale_rows(row_scaling)
        row_scaling.clear()


def _changed_anywhere(
    steppers: Sequence[MeshStepper], presences: Sequence[Presence], changed: str | None
) -> str | None:
    """What the first rank of a mesh says that has something to say. Called on all ranks of the meshes."""
    found = None
    for stepper, presence in zip(steppers, presences):
        if presence.anywhere()[len(stepper.members)]:
            of_ranks = stepper.collectives.gather_objects(changed)
            ranks = sorted(stepper.mesh.ranks) if stepper.mesh is not None else [0]
            first = next(f"{said} (rank {rank})" for rank, said in zip(ranks, of_ranks) if said is not None)
            found = found or first
    return found


def _step_elementwise(
    optimizers: ElementwiseGroups,
    groups: Sequence[Mapping[str, Any]],
    steppers: Sequence[MeshStepper],
    presences: Sequence[Presence],
    states: States,
) -> None:
    """One step of every element-wise param group, on this rank's pieces of whatever mesh.

    Where the state has a wider dtype than the parameter, the step is computed in the state's and rounded at its end.
    """
    for number, group in enumerate(groups):
        if group["rule"] not in ELEMENTWISE_RULES:
            continue
        parts = [
            part for stepper, here in zip(steppers, presences) for part in stepper.elementwise(number, states, here)
        ]
        wide = [
            part
            if part.value.dtype == part.grad.dtype
            else Slices(part.value.to(part.grad.dtype), part.grad, part.state)
            for part in parts
        ]
        optimizers.step(number, group, wide)
        for part, computed in zip(parts, wide):
            if computed is not part:
                part.value.copy_(computed.value)


# What is printed when an optimizer is made for an FSDP2 model: the routing, and the plan of every mesh.


def show(routes: Sequence[Route], steppers: Sequence[MeshStepper], plan_digest: str) -> None:
    """Print the routing table, one plan table per mesh, and the plan's name to standard output."""
    console = report.standard_output()
    report.show_routing(console, routes, steppers[0].groups)
    for stepper in steppers:
        console.print(_sentence(stepper))
        if stepper.mesh is not None:
            console.print(_table(stepper, stepper.mesh))
    report.show_digest(console, plan_digest)


def _sentence(stepper: MeshStepper) -> str:
    plan, elements = stepper.plan, len(stepper.members) - len(stepper.matrices)
    counts = f"{len(plan.atoms)} matrices and {elements} element-wise parameters"
    if stepper.mesh is None:
        return f"Plan: {counts} are plain tensors; every rank steps its own copy."
    travelling = sum(map(len, plan.buckets))
    padded = sum(split is not None for split in plan.splits)
    return (
        f"Plan: {counts} on a {stepper.mesh}; {travelling} matrices travel, in {len(plan.buckets)} bucket(s), "
        f"{padded} in equal parts; busiest rank over mean {plan.ownership.imbalance:.3f}."
    )


def _table(stepper: MeshStepper, mesh: Mesh) -> Table:
    """One row per rank: what it owns, how much work that is, the state it keeps, and what it sends."""
    plan = stepper.plan
    loads, sent, owned = plan.ownership.loads, plan.wire_bytes(), plan.owned_counts()
    work = " / ".join(sorted({MATRIX_RULES[m.rule].work for m in stepper.members if m.rule in MATRIX_RULES}))
    table = Table()
    for heading in ("rank", "atoms", f"{work or 'matrix'} GFLOP", "of all", "state", "sent a step"):
        table.add_column(heading, justify="right")
    ranks = sorted(mesh.ranks)
    for place in report.shown_ranks(loads):
        table.add_row(
            str(ranks[place]),
            str(owned[place]),
            f"{loads[place] / 1e9:.3g}",
            f"{loads[place] / max(1, sum(loads)):.1%}",
            report.nbytes(mesh_state_nbytes(stepper.members, stepper.groups, stepper.config, mesh.coordinates[place])),
            report.nbytes(sent[place]),
        )
    return table


# Layer-wise matrix optimizers on FSDP2: ``LayerWiseOptimizer(model)`` after ``fully_shard(model)``.
#
# FSDP2 keeps what is its own: sharding, gradient reduction, mixed precision, offload. Parameters, gradients and state
# stay sharded DTensors; at ``step()`` every matrix is brought to one rank of its mesh, updated there whole, and sent
# back.


class LayerWiseOptimizer(LinkedOptimizer):
    """A matrix rule for the model's matrices and an element-wise rule for the rest, on a ``fully_shard`` model.

    - ``model``: the sharded module, or a list of modules (pipeline stages of one rank).
    - ``matrix``, ``lr``: the matrix rule and its learning rate; torch.optim.Muon's other arguments by their names.
    - ``elementwise``, ``elementwise_lr``: the rule of everything else and its rate. Either rule may be given as a
      mapping with its options: ``elementwise={"name": "adamw", "lr": 3e-4, "betas": (0.9, 0.95)}``.
    - ``params``: param groups as torch.optim takes them, each with its own ``lr``, ``weight_decay`` and section
      ``"adamw"``; by default all trainable parameters in one group.
    - ``sharded_later``: the model is not sharded yet and somebody else will put the sharded parameters into
      ``param_groups`` (Accelerate's ``prepare``).
    - further options: those of ``FSDP2Config``.

    ``param_groups`` holds, for each group given, a matrix half and an element-wise half. Made on all ranks of the
    model's meshes. Raises ValueError, on all of them, for wrong options, for a model without DTensors or without a
    matrix, and for placements that are not supported.
    """

    state = StateOnceSharded()

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        matrix: str | Mapping[str, Any] = "muon",
        lr: float | None = None,
        elementwise: str | Mapping[str, Any] = "adamw",
        elementwise_lr: float | None = None,
        *,
        params: Iterable[Any] | None = None,
        overrides: Iterable[Mapping[str, Any]] = (),
        sharded_later: bool = False,
        **options: Any,
    ) -> None:
        module = sharded_module(model, NAME)
        self._steppers: list[MeshStepper] = []
        self._elementwise = ElementwiseGroups()
        self._attachment: Attachment | None = None
        self._bound: list[list[Tensor]] = []
        self._stated: list[Tensor] = []
        self._model = module
        reshard(module)
        exchange = [] if sharded_later else exchange_groups(module.parameters())

        def decide() -> tuple[tuple[Rules, FSDP2Config, Grouping], list[list[str]]]:
            rules, config = arguments_of(FSDP2Config, matrix, lr, elementwise, elementwise_lr, overrides, options, NAME)
            trained = [param for param in module.parameters() if param.requires_grad]
            given = as_groups(trained if params is None else params)
            grouping = group_parameters(module, given, rules, config, stacks=True)
            lines = [
                *settings_lines(rules, config),
                *(f"{r.name} {r.shape} {r.kind}" for r in grouping.routes),
            ]
            return (rules, config, grouping), [lines for _ in exchange]

        rules, self.config, self._grouping = agree_in_all([c for _, c in exchange], NAME, decide)
        self.row_scaling = self._grouping.row_scaling()
        self._names = [[self._grouping.names[id(p)] for p in group["params"]] for group in self._grouping.groups]
        self._rules = [group["rule"] for group in self._grouping.groups]
        marks = ("from_group", "overrides")
        shown = linked_rates.shown(self._grouping.groups)
        groups = [{k: v for k, v in group.items() if k not in marks} for group in shown]
        super().__init__(groups, {})
        self._begin(rules, self._grouping.groups, linked_rates.marks_of(self._grouping.groups))
        if not sharded_later:
            self._bind(exchange)

    def _bind(self, exchange: Exchange) -> None:
        """Plan for the parameters that the param groups hold now, and make their state. Called on all ranks."""
        held = [group["params"] for group in self.param_groups]
        self._names = names_of(held, self._bound, self._names)
        self._steppers = bind(exchange, self.param_groups, self._names, self._grouping, self.config)
        self._plan_digest = plan_digest(line for stepper in self._steppers for line in stepper.planned.lines())
        self._bound = [list(group["params"]) for group in self.param_groups]
        trained = [(member.name, member.param) for stepper in self._steppers for member in stepper.members]
        self._watched = WatchedModel(self._model, trained, restore=reshard)
        self._make_state()
        self._owner_shards()  # its names are read from ``state``
        self._different = hold_different_parameters(self._steppers)
        if self._attachment is not None and self._attachment.is_on:
            self._attachment.remove()
            self._attachment = Attachment(self._steppers, self._matrix_rules, lambda: self.state)
        if self.config.report and exchange[-1][1].rank == 0:
            show(self._grouping.routes, self._steppers, self.plan_digest)

    def _make_state(self) -> None:
        """State for every parameter before the first step, so that no checkpoint lacks any; what is there stays."""
        before: Mapping[Tensor, dict[str, Any]] = self.__dict__["state"]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for group in self.param_groups:
            for param in group["params"]:
                state[param] = before.get(param) or new_state(param.detach(), group, self.config)
        self.state, self._stated = state, list(state)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{NAME} holds process groups and cannot be copied or pickled; use state_dict()")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients that are there; the closure's result. Called on all ranks of the meshes.

        A parameter that has no gradient on any rank is left alone, state included; where only some ranks have one, the
        others count as zero. Raises RuntimeError, on all ranks, if a parameter was replaced or unfrozen on one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ensure_bound()
        rules, kept = self._matrix_rules(), (self._elementwise, self.state, self._attachment, self.row_scaling)
        step_all(self._steppers, self.param_groups, rules, *kept, self._watched.changes())
        return loss

    def attach(self, model: nn.Module | Sequence[nn.Module]) -> Attachment:
        """Begin the exchange of a bucket in the backward pass, as soon as its last gradient has been reduced.

        The result is that of a step without it, bit for bit, whatever happens to the gradients in between: a bucket
        whose gradients were touched after they had left (clipped, unscaled) is exchanged again, and a few steps are
        then left alone. Costs the memory of what has been sent and received until the step. Returns a handle whose
        ``remove()`` takes the hooks off. Called on all ranks. Raises ValueError for a model other than the optimizer's.
        """
        module = sharded_module(model, "attach")
        self._ensure_bound()
        reshard(module)
        check_is_of(module, [group["params"] for group in self.param_groups], self._names)
        if self._attachment is not None:
            self._attachment.remove()
        self._attachment = Attachment(self._steppers, self._matrix_rules, lambda: self.state)
        return self._attachment

    def _matrix_rules(self) -> dict[int, MatrixRule]:
        return build_matrix_rules(self.param_groups, self.config)

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over all parameters, also where they lie on several meshes.

        Returns the norm before clipping, a plain fp32 tensor that is the same on all ranks. Called on all ranks. With
        parameters on one mesh it gives the bits of torch's. Parameters on a mesh that leaves out some ranks count once
        if those have copies, and together with theirs if they have others (experts).
        """
        return self.gradients.clip(max_norm, norm_type, error_if_nonfinite, foreach).float()

    @property
    def gradients(self) -> MeshGradients:
        """Norms, zero counts and scaling of all gradients; ``ModuleOptimizers`` asks for them."""
        self._ensure_bound()
        return MeshGradients(self._steppers, self._different)

    def _ensure_bound(self) -> None:
        """Plan again if the param groups hold other parameters than were planned for."""
        held = [group["params"] for group in self.param_groups]
        if len(held) == len(self._bound) and all(map(same, held, self._bound)):
            return
        check_sharded(param for params in held for param in params)
        self._bind(exchange_groups(param for params in held for param in params))

    def _owner_shards(self) -> Of:
        """What owners hold, if rules keep state there; then called on all ranks.

        Parameters that were sharded late are planned for at the first step; state that owners hold needs owners.
        """
        rules = self._matrix_rules()
        if not any(map(keeps_state, rules.values())):
            return []
        self._ensure_bound()
        return owner_shards(self._steppers, rules, self.state)

    def state_dict(self) -> dict[str, Any]:
        """As of every torch optimizer, owner-held state in sharded tensors; if there is any, called on all ranks."""
        shards = self._owner_shards() if self.state else []
        return with_owner_state(super().state_dict(), shards, self._bound)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises ValueError for state that does not fit, before anything is changed.

        State keeps the dtype it was made with, whatever the parameters have; which rule trains what is never loaded. A
        whole tensor is cut to this rank's part.
        """
        if self.state:
            shards = self._owner_shards()
            expected = with_owner_keys(self.state, shards)
            check_matrices(state_dict, shards, self._bound)
            check_loadable(state_dict, self.param_groups, self._names, self._rules, expected)
            state_dict = with_shards(state_dict, self.param_groups, expected)
            state_dict = take_owner_state(state_dict, shards, self._bound)
            if not state_dict["state"]:  # saved before there was any: begin anew
                self.state = {}
                self._make_state()
        made = {param: dict(state) for param, state in self.state.items()}
        groups = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        restore_groups(self, groups, self._rules)
        self.link_groups(self.param_groups)
        restore_dtypes(self, made, state_dict)
