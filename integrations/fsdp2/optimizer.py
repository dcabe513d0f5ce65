"""Layer-wise matrix optimizers on FSDP2: ``LayerWiseOptimizer(model)`` after ``fully_shard(model)``.

FSDP2 keeps what is its own: sharding, gradient reduction, mixed precision, offload. Parameters, gradients and state
stay sharded DTensors; at ``step()`` every matrix is brought to one rank of its mesh, updated there whole, and sent
back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend import torch_adamw
from lwopt_backend.chosen import Rules, arguments_of, settings_lines
from lwopt_backend.config import FSDP2Config
from lwopt_backend.elementwise_groups import ElementwiseGroups
from lwopt_backend.grouping import Grouping, group_parameters
from lwopt_backend.integrations.fsdp2.attach import Attachment, check_is_of
from lwopt_backend.integrations.fsdp2.binding import NAME, Exchange, bind, exchange_groups, names_of
from lwopt_backend.integrations.fsdp2.late import StateOnceSharded, check_sharded, same
from lwopt_backend.integrations.fsdp2.meshes import reshard, sharded_module
from lwopt_backend.integrations.fsdp2.norm import MeshGradients, hold_different_parameters
from lwopt_backend.integrations.fsdp2.owner_state import (
    Of,
    check_matrices,
    owner_shards,
    take_owner_state,
    with_owner_keys,
    with_owner_state,
)
from lwopt_backend.integrations.fsdp2.report import show
from lwopt_backend.integrations.fsdp2.state import (
    check_loadable,
    restore_dtypes,
    restore_groups,
    with_shards,
)
from lwopt_backend.integrations.fsdp2.stepper import MeshStepper
from lwopt_backend.integrations.fsdp2.stepping import step_all
from lwopt_backend.linked_optimizer import LinkedOptimizer
from lwopt_backend.mesh_plan import new_state
from lwopt_backend.param_groups import as_groups
from lwopt_backend.registry import build_matrix_rules
from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime.agreement import agree_in_all, plan_digest
from lwopt_backend.runtime.owner_state import keeps_state
from lwopt_backend.watched_model import WatchedModel


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
        shown = torch_adamw.shown(self._grouping.groups)
        groups = [{k: v for k, v in group.items() if k not in marks} for group in shown]
        super().__init__(groups, {})
        self._begin(rules, self._grouping.groups, torch_adamw.marks_of(self._grouping.groups))
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
