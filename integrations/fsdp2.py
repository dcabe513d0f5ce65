"""Layer-wise matrix optimizers on FSDP2: ``LayerWiseOptimizer(model)`` after ``fully_shard(model)``.

FSDP2 keeps what is its own: sharding, gradient reduction, mixed precision, offload. Parameters, gradients and state
stay sharded DTensors; at ``step()`` every matrix is brought to one rank of its mesh, updated there whole, and sent
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.config import FSDP2Config, MuonOptions
from lwopt_backend.grouping import Grouping, group_parameters
from lwopt_backend.integrations.fsdp2_meshes import Mesh, mesh_of, meshes_of, reshard, sharding_of
from lwopt_backend.integrations.fsdp2_options import fsdp2_config
from lwopt_backend.integrations.fsdp2_report import show
from lwopt_backend.integrations.fsdp2_state import check_loadable, new_state, restore_dtypes
from lwopt_backend.integrations.fsdp2_stepper import Member, MeshStepper, own_group, step_elementwise_group
from lwopt_backend.param_groups import as_groups
from lwopt_backend.registry import ELEMENTWISE_RULES, MATRIX_RULES, build_matrix_rule
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.collectives import Alone, Collectives

NAME = "LayerWiseOptimizer"


class LayerWiseOptimizer(torch.optim.Optimizer):
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

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        matrix: str | Mapping[str, Any] = "muon",
        lr: float | None = None,
        elementwise: str | Mapping[str, Any] = "adamw",
        elementwise_lr: float | None = None,
        *,
        params: Iterable[Any] | None = None,
        sharded_later: bool = False,
        **options: Any,
    ) -> None:
        module = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        self._steppers: list[MeshStepper] = []
        self._bound: list[list[Tensor]] = []
        reshard(module)
        exchange = [] if sharded_later else self._exchange_groups(module.parameters())

        def decide() -> tuple[tuple[FSDP2Config, Grouping], list[str]]:
            config = fsdp2_config(matrix, lr, elementwise, elementwise_lr, options)
            trained = [param for param in module.parameters() if param.requires_grad]
            given = as_groups(trained if params is None else params)
            grouping = group_parameters(module, given, config)
            lines = [repr(config), *(f"{r.name} {r.shape} {r.kind}" for r in grouping.routes)]
            return (config, grouping), [lines for _ in exchange]

        self.config, self._grouping = agree_in_all([c for _, c in exchange], NAME, decide)
        names = self._grouping.names
        self._names = [[names[id(p)] for p in group["params"]] for group in self._grouping.groups]
        self._rules = [group["rule"] for group in self._grouping.groups]
        groups = [{k: v for k, v in group.items() if k != "from_group"} for group in self._grouping.groups]
        super().__init__(groups, {})
        self.defaults = {key: getattr(self.config, key) for key in MuonOptions.model_fields}  # schedulers read them
        if not sharded_later:
            self._bind(exchange)

    # -- construction

    def _exchange_groups(self, params: Iterable[Tensor]) -> list[tuple[Mesh, Collectives]]:
        """The meshes of the parameters with their exchange groups, in the order in which all ranks go through them."""
        meshes = meshes_of(params)
        if not meshes:
            raise ValueError(
                f"{NAME}: no parameter of the model is a DTensor; call fully_shard(model) before, or pass "
                "sharded_later=True if Accelerate shards it in prepare()"
            )
        return [(mesh, own_group(mesh)) for mesh in meshes]

    def _bind(self, exchange: Sequence[tuple[Mesh, Collectives]]) -> None:
        """Plan for the parameters that the param groups hold now, and make their state. Called on all ranks."""

        def decide() -> tuple[list[Member], list[list[str]]]:
            members = self._members()
            return members, [[m.line() for m in members if mesh_of(m.param) == mesh] for mesh, _ in exchange]

        members = agree_in_all([c for _, c in exchange], NAME, decide)
        load = 0  # of this rank, in the meshes before
        steppers = []
        for mesh, collectives in exchange:
            own = [member for member in members if mesh_of(member.param) == mesh]
            loads = collectives.gather_objects(load)
            stepper = MeshStepper(mesh, collectives, own, self.param_groups, self.config, loads)
            load = stepper.plan.ownership.loads[collectives.rank]
            steppers.append(stepper)
        agree_in_all([c for _, c in exchange], NAME, lambda: (None, [stepper.lines() for stepper in steppers]))
        plain = [member for member in members if mesh_of(member.param) is None]
        if plain:
            steppers.append(MeshStepper(None, Alone(), plain, self.param_groups, self.config, [0]))
        self._steppers = steppers
        self._bound = [list(group["params"]) for group in self.param_groups]
        self._make_state()
        if self.config.report and exchange[-1][1].rank == 0:
            show(self._grouping.routes, steppers)

    def _members(self) -> list[Member]:
        """The parameters in the model's order. Raises ValueError for a placement that is not supported."""
        members = []
        for number, (group, names) in enumerate(zip(self.param_groups, self._names)):
            for name, param in zip(names, group["params"]):
                if param.is_meta:
                    raise ValueError(
                        f"parameter {name!r} is on the meta device; call model.to_empty(device=...) and initialise it "
                        "before the optimizer is made"
                    )
                members.append(Member(name, param, number, self._rules[number], sharding_of(name, param)))
        order = {name: position for position, name in enumerate(self._grouping.names.values())}
        return sorted(members, key=lambda member: order[member.name])

    def _make_state(self) -> None:
        """State for every parameter before the first step, so that no checkpoint ever lacks any."""
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                self.state[param] = new_state(self._rules[number], param.detach(), group, self.config)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the base class's constructor. Raises RuntimeError afterwards: the plan knows no later parameters."""
        if self._bound:
            raise RuntimeError(f"{NAME} takes no param group after it was made; give all groups to the constructor")
        super().add_param_group(param_group)

    # -- training

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients that are there; the closure's result. Called on all ranks of the meshes.

        A parameter that has no gradient on any rank is left alone, state included; where only some ranks have one, the
        others count as zero.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ensure_bound()
        presences = [stepper.presence() for stepper in self._steppers]
        rules = {
            number: build_matrix_rule(rule, self.param_groups[number], self.config)
            for number, rule in enumerate(self._rules)
            if rule in MATRIX_RULES
        }
        meanwhile: Callable[[], None] | None = lambda: self._step_elementwise(presences)  # noqa: E731
        for stepper, presence in zip(self._steppers, presences):
            stepper.step_matrices(rules, self.state, presence, meanwhile=meanwhile)
            presence.finish()
            meanwhile = None
        return loss

    def _step_elementwise(self, presences: Sequence[Any]) -> None:
        for number, rule in enumerate(self._rules):
            if rule in ELEMENTWISE_RULES:
                pieces = [
                    found
                    for stepper, presence in zip(self._steppers, presences)
                    for found in stepper.elementwise(number, self.state, presence)
                ]
                step_elementwise_group(rule, self.param_groups[number], pieces)

    def _ensure_bound(self) -> None:
        """Plan again if the param groups hold other parameters than were planned for."""
        held = [group["params"] for group in self.param_groups]
        if len(held) == len(self._bound) and all(
            len(a) == len(b) and all(x is y for x, y in zip(a, b)) for a, b in zip(held, self._bound)
        ):
            return
        self._bind(self._exchange_groups(param for params in held for param in params))

    # -- checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises ValueError for state that does not fit, before anything is changed.

        State keeps the dtype it was made with, whatever the parameters have; which rule trains what is never loaded.
        """
        if self._bound:
            check_loadable(state_dict, self.param_groups, self._names, self._rules, self.state)
        made = {param: dict(state) for param, state in self.state.items()}
        super().load_state_dict(state_dict)
        for group, rule in zip(self.param_groups, self._rules):
            group["rule"] = rule
        restore_dtypes(self, made, state_dict)
