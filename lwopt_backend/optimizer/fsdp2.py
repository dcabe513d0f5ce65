"""``LayerWiseOptimizer`` of a ``fully_shard`` model: ``step()`` sends each matrix's pieces to one rank, and back."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

from torch import Tensor

from lwopt_backend.config.hosts import NAME, FSDP2Config, PlainConfig
from lwopt_backend.engines import report
from lwopt_backend.engines.base import loaded
from lwopt_backend.engines.fsdp2 import plan as mesh
from lwopt_backend.engines.fsdp2 import state as mesh_state
from lwopt_backend.engines.fsdp2 import step as mesh_stepping
from lwopt_backend.engines.fsdp2.gradients import MeshGradients, check_one_has_all, counted_of
from lwopt_backend.engines.fsdp2.step import StateOnceSharded, check_scaler, check_sharded, step_all
from lwopt_backend.groups.choices import Rules
from lwopt_backend.groups.grouping import Given, Grouping, InModel
from lwopt_backend.groups.members import Members, check_all_held, is_by_number
from lwopt_backend.groups.param_groups import (
    ComparedOptions,
    ElementwiseGroups,
    check_saved_groups,
    settings_lines,
    with_options,
)
from lwopt_backend.groups.rates import warn_of_small_rate
from lwopt_backend.groups.registry import build_matrix_rules, count_block_steps
from lwopt_backend.optimizer.layer_wise import LayerWiseOptimizer, PlainArguments
from lwopt_backend.routing.routing import check_globs, named_like
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.agreement import StepRefused, agree_in_all, plan_digest
from lwopt_backend.runtime.collectives import Collectives, ranks_of
from lwopt_backend.runtime.state import keeps_state
from lwopt_backend.runtime.undisturbed import undisturbed

# By a parameter's id, the last optimizer that was made for it, which keeps it alive. A weak reference to the parameter
# itself would forbid ``model.to(...)``: torch swaps DTensors, but none that has such references.
MADE_LAST: weakref.WeakValueDictionary[int, MeshOptimizer] = weakref.WeakValueDictionary()


class MeshOptimizer(LayerWiseOptimizer):
    """``LayerWiseOptimizer`` of a model that ``fully_shard`` has sharded, or will have by the first step.

    Constructed on all ranks of the model's meshes. Raises, on all of them, for a model without DTensors or without a
    matrix, and for placements that are not supported.
    """

    config: FSDP2Config
    state = StateOnceSharded()

    def _train(self, model: Any, given: Given, plain: PlainArguments, sharded_later: bool) -> None:
        module = mesh.sharded_module(model, NAME)
        self._steppers: list[mesh.MeshStepper] = []
        self._elementwise = ElementwiseGroups()
        self._without_gradient = report.MissingGradients({})
        self._bound: list[list[Tensor]] = []
        self._stated = set[int]()  # ids of the parameters that have state
        self._taken: str | None = None  # a parameter for which an optimizer was made later
        self._model = module
        mesh.reshard(module)
        exchange = [] if sharded_later else mesh.exchange_groups(module.parameters())

        def decide() -> tuple[tuple[Rules, FSDP2Config, Grouping], list[list[str]]]:
            for name, value in plain._asdict().items():
                if value is not None and value != ():
                    raise ValueError(f"{NAME}: {FSDP2Config.lacks(repr(name), PlainConfig)}; meshes define the ranks")
            rules, config, grouping = given.decide(FSDP2Config, module)
            trained = [route for route in grouping.routes if route.kind != "frozen"]
            check_globs("copies", config.copies, trained, grouping.routes, lambda route: "are not trained")
            lines = [*settings_lines(rules, config), *(f"{r.name} {r.shape} {r.kind}" for r in grouping.routes)]
            lines += grouping.followed
            return (rules, config, grouping), [lines for _ in exchange]

        rules, self.config, self._grouping = agree_in_all([c for _, c in exchange], NAME, decide)
        self.row_scaling = self._grouping.row_scaling()
        self._names = [[self._grouping.names[id(p)] for p in group["params"]] for group in self._grouping.groups]
        self._take_groups(rules)
        self._options = ComparedOptions(self._checked)
        if not sharded_later:
            self._bind(exchange)

    def _bind(self, exchange: mesh.Exchange) -> None:
        """Plan for the parameters now in the param groups, and create their state. Called on all ranks."""
        held = [group["params"] for group in self.param_groups]
        self._names = mesh.names_of(held, self._bound, self._names)
        self._steppers = mesh.bind(exchange, self.param_groups, self._names, self._grouping, self.config)
        self._plan_digest = plan_digest(line for stepper in self._steppers for line in stepper.planned.lines())
        self._bound = [list(params) for params in held]
        for group, params in zip(self._grouping.groups, held):
            group["params"] = list(params)  # no longer whole ones, if the model was sharded later
        names = zip(chain(*held), chain(*self._names))
        self._checked.members = Members(self.param_groups, {id(param): name for param, name in names})
        trained = [(member.name, member.param) for stepper in self._steppers for member in stepper.members]
        self._in_model = InModel(self._model, trained, restore=mesh.reshard)
        self._take_over(trained)
        self._make_state()
        self._owner_shards()  # adds their keys to ``state``
        self._counted = counted_of(self._steppers, named_like(self.config.copies))
        mesh_stepping.check_units(self._model, self._steppers, self._counted)
        if self._norms.guard.is_on:
            check_one_has_all(self._steppers)
        if self.config.report:
            self._without_gradient = mesh_stepping.without_gradient(self._steppers, self._counted, exchange[-1][1])
        if exchange[-1][1].rank == 0:
            warn_of_small_rate(self._grouping.groups)  # as configured, before a schedule changes them
            if self.config.report:
                plans = mesh_stepping.described(self._steppers, self._counted, mesh.reduction(self._model))
                members = [member for stepper in self._steppers for member in stepper.members]
                groups, device = self._grouping.groups, self._steppers[0].device
                shown = (self._grouping.routes, groups, plans, self.plan_digest, members, device)
                self._shown_rates = report.show(*shown)

    def _take_over(self, trained: Sequence[tuple[str, Tensor]]) -> None:
        """Let no earlier optimizer of these parameters step again: both steps would count."""
        for key in [key for key, optimizer in MADE_LAST.items() if optimizer is self]:
            del MADE_LAST[key]
        for name, param in trained:
            earlier = MADE_LAST.get(id(param))
            if earlier not in (None, self):
                earlier._taken = name
            MADE_LAST[id(param)] = self

    def _make_state(self) -> None:
        """Create missing state, e.g. momentum, before the first step, so that every checkpoint has it."""
        before: mesh.States = self.__dict__["state"]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        held = self._bound or [group["params"] for group in self.param_groups]  # also what was taken out of its group
        for group, params in zip(self.param_groups, held):
            for param in params:
                state[param] = before.get(param) or mesh.new_state(param, group, self.config)
        mesh_state.show_in_8_bits(self._steppers, state)
        self.state, self._stated = state, {id(param) for param in state}

    def _begin_step(self) -> None:
        self._integrity.check()
        self._ensure_bound()
        if self._taken is not None:
            raise StepRefused(
                f"{NAME}: parameter {self._taken!r} belongs to a LayerWiseOptimizer that was made later; step only that"
                " one, or give each optimizer its own parameters in 'params'"
            )
        self._check_groups(self.param_groups)
        if (changed := self._in_model.replaced()) is not None:
            raise StepRefused(f"{NAME}: {changed} (rank {ranks_of().rank})")

    def _step(self) -> None:
        kept = (self._elementwise, self.state, self.row_scaling)
        rules = self._matrix_rules()
        self._rates.warn(self.name, self.param_groups)
        with self._integrity.changing():
            presences = step_all(self._steppers, self.param_groups, rules, *kept, self._options, self._checked.out)
        self._without_gradient.stepped(lambda place: presences[place[0]](place[1]))
        count_block_steps(self.param_groups)

    def _skip(self) -> None:
        self.row_scaling.clear()

    def _matrix_rules(self) -> dict[int, MatrixRule]:
        try:
            return build_matrix_rules(self.param_groups, self.config)
        except Exception:  # in state_dict(), which does not look at the options otherwise
            self._checked.check(self.param_groups)
            raise

    @property
    def gradients(self) -> MeshGradients:
        self._ensure_bound()
        return MeshGradients(self._steppers, self._counted)

    def _everyone(self) -> Collectives:
        return self.gradients.everyone

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler before it steps, or skips. Raises RuntimeError if not all ranks would skip."""
        self._ensure_bound()
        check_scaler(zip(chain(*self._names), chain(*self._bound)))
        return False

    def _ensure_bound(self) -> None:
        """Plan for the parameters in the param groups, once they are sharded; and again if all were replaced."""
        members = self._checked.members
        assert members is not None
        if self._steppers and members.knows_any(self.param_groups):
            members.look(self.param_groups)
            return
        held = [param for group in self.param_groups for param in group["params"]]
        check_sharded(held)
        self._bind(mesh.exchange_groups(held))

    def _held_names(self) -> list[list[str]]:
        """The names of the parameters that are now in each param group."""
        names = {id(param): name for param, name in zip(chain(*self._bound), chain(*self._names))}
        return [[names[id(param)] for param in group["params"]] for group in self.param_groups]

    def named_params(self) -> list[tuple[str, Tensor]]:
        return self.gradients.params()

    def state_store(self) -> mesh_state.MeshStore:
        self._ensure_bound()
        different = any(each.different for each in self._counted)
        return mesh_state.MeshStore(self._steppers, self.param_groups, self.state, different)

    def _owner_shards(self) -> list[mesh_state.OwnerShards]:
        """The owner state. Called on all ranks if any rule keeps some.

        Plans parameters that were sharded later, which otherwise waits for the first step: owner state needs owners.
        """
        rules = self._matrix_rules()
        if not any(map(keeps_state, rules.values())):
            return []
        self._ensure_bound()
        return mesh_state.owner_shards(self._steppers, rules, self.state)

    @undisturbed()
    def state_dict(self) -> dict[str, Any]:
        """As every torch optimizer's, with owner state as DTensors; called on all ranks if there is any owner state."""
        self._options.compare_next()
        self._checked.arrange(self.param_groups)
        mesh.reshard(self._model)  # torch's get_optimizer_state_dict lists the model's parameters after this call
        shards = self._owner_shards() if self.state else []
        held = [group["params"] for group in self.param_groups]
        trained, every = {id(param) for param in chain(*held)}, self.__dict__["state"]
        self.state = {param: state for param, state in every.items() if id(param) in trained}
        try:
            found = super().state_dict()
        finally:
            self.state = every
        self._checked.sign(found["param_groups"])
        found = mesh_state.with_wide_state(found, self._steppers, self.param_groups)
        return mesh_state.with_owner_state(found, shards, held)

    @undisturbed()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. State that does not fit raises on all ranks, before anything is changed.

        State keeps the dtype that it was created with, whatever the parameters'; rules are never loaded. This rank's
        part of a whole tensor is copied.
        """
        self._options.compare_next()
        loaded(self, state_dict, self._take_state)

    def _take_state(self, state_dict: dict[str, Any]) -> None:
        if is_by_number(state_dict):
            self._checked.arrange(self.param_groups)
        if self.state:
            self._ensure_bound()  # to what was sharded, or replaced, after the state was made
            shards = self._owner_shards()
            ranks = [stepper.collectives for stepper in self._steppers]

            def check() -> tuple[None, list[list[str]]]:
                check_all_held(mesh_state.WHAT, self._checked.out)
                given = (self.param_groups, self._held_names(), self.state, shards, self._checked.members)
                mesh_state.check_loadable(state_dict, *given)
                return None, [[] for _ in ranks]

            agree_in_all(ranks, mesh_state.WHAT, check)
            if not state_dict["state"]:  # saved before the first state: start fresh
                self.state_store().forget_owner_states([name for name, _ in self.named_params()])
                for stepper in self._steppers:
                    stepper.matrix_stepper.matrices.quantized.forget()
                self.state = {}
                self._make_state()
            held = [group["params"] for group in self.param_groups]
            mesh_state.take_state(state_dict, held, self.state, shards, self._steppers)
        else:
            saved = state_dict["param_groups"]
            check_saved_groups(mesh_state.WHAT, self.param_groups, saved, members=self._checked.members)
        if state_dict["state"] and not self.state:
            raise ValueError(
                "load_state_dict: the model is not sharded yet, so there is no state to load into; call it after "
                "fully_shard, or after the prepare() that shards the model"
            )
        self.set_groups(map(with_options, self.param_groups, deepcopy(state_dict["param_groups"])))
