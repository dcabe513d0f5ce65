"""The rules by name, in one table: options, cost, state, and the class that does the work.

``register_rule`` adds a matrix rule, ``register_elementwise`` an optimizer for everything that is not a matrix. The
options of a rule are the fields of its dataclass; AdamW is torch's, so its options are here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.config.options import Known, checked, options_in, suggestion, within
from lwopt_backend.groups.optimizer_classes import arguments_of, check_arguments, class_named, path_of
from lwopt_backend.plan import Atom, TrainedParam
from lwopt_backend.plan.cost import SECOND_MOMENT_FLOPS, newton_schulz_flops, shampoo_flops, soap_flops
from lwopt_backend.plan.owners import Wire
from lwopt_backend.routing.routing import Route
from lwopt_backend.rules import AdamH, AdaMuon, MatrixRule, Muon, NorMuon, OwnerStateRule, WeightRule
from lwopt_backend.rules.adamh import checked_betas
from lwopt_backend.rules.muon import CAUTIOUS, takes_gram
from lwopt_backend.rules.newton_schulz import PACKAGES, segments
from lwopt_backend.rules.protocol import TorchOptimizer, option
from lwopt_backend.runtime.collectives import rule_name
from lwopt_backend.runtime.elementwise import Counters
from lwopt_backend.runtime.state import try_steps

ADAMW, SGD, LION = "torch.optim.AdamW", "torch.optim.SGD", "pytorch_optimizer.Lion"


@dataclass
class AdamW:
    """torch.optim.AdamW's arguments."""

    lr: float = option(1e-3, "learning rate", ADAMW, ge=0)
    betas: tuple[float, float] = option(
        (0.9, 0.999), "decay rates of the averages of gradients and of their squares", ADAMW, check=checked_betas
    )
    eps: float = option(1e-8, "term added to the root of the mean square", ADAMW, ge=0)
    weight_decay: float = option(1e-2, "weight decay; a step multiplies it by the learning rate", ADAMW, ge=0)
    amsgrad: bool = option(False, "divide by the largest mean square so far", ADAMW)
    foreach: bool | None = option(None, "use torch's multi-tensor implementation; None: torch decides", ADAMW)
    fused: bool | None = option(None, "use torch's fused implementation; None: torch decides", ADAMW)
    weight_decay_form: Literal["decoupled", "cautious"] = option(
        "decoupled",
        "'decoupled': decay the weight; 'cautious': decay only elements that the update moves towards zero",
        CAUTIOUS,
    )

    def __post_init__(self) -> None:
        """Raises ValueError for two implementations."""
        if self.foreach and self.fused:
            raise ValueError("foreach and fused are both true, but torch supports one of them at a time; leave one out")


State = dict[str, Tensor]
Shape = tuple[int, int]
KnownOf = Callable[[Mapping[str, Any]], Known]
Takes = Callable[[Route], bool | None]
CountersOf = Callable[[Mapping[str, Any]], Counters]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """``known`` are its options, which may depend on given ones, such as a class. ``check`` raises ValueError for
    values that do not fit each other."""

    name: str
    known: KnownOf
    check: Callable[[Mapping[str, Any]], object]
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MatrixEntry(Rule):
    """A rule for whole matrices. ``build`` makes it from its options, by name; ``cost`` is its flops on one matrix."""

    build: Callable[..., MatrixRule]
    cost: Callable[[Shape, Mapping[str, Any]], int]
    work: str  # what the cost counts, for tables
    takes: Takes | None = None  # which parameters are its matrices, if not by structure alone


@dataclass(frozen=True, kw_only=True)
class ElementwiseEntry(Rule):
    """A torch optimizer for element-wise parameters, and the state that it keeps per flat tensor.

    ``new_state`` creates the state that the optimizer would create in its first step, so that every checkpoint has it.
    ``counters`` are those that the optimizer keeps as Python numbers; ``new_state`` has a tensor for each.
    """

    optimizer: Callable[[Mapping[str, Any]], type[torch.optim.Optimizer]]
    new_state: Callable[[Tensor, Mapping[str, Any]], State]
    counters: CountersOf = lambda options: Counters()


MATRIX_RULES: dict[str, MatrixEntry] = {}
ELEMENTWISE_RULES: dict[str, ElementwiseEntry] = {}


def register_rule(
    name: str,
    rule: Callable[..., MatrixRule],
    *,
    options: type | None = None,
    cost: Callable[[Shape, Mapping[str, Any]], int] | None = None,
    work: str = "rule",
    takes: Takes | None = None,
    source: str = "",
) -> None:
    """Register a matrix rule for use in any later configuration. Call it on all ranks.

    Args:
        name: name of the rule in configurations.
        rule: a subclass of ``MatrixRule``, or a function that makes one; called with the options by name.
        options: dataclass whose fields are the options. Default: ``rule``, which must be a dataclass.
        cost: flops on a matrix, from its (rows, columns) and the options. Default: the number of elements.
        work: what ``cost`` counts, for tables.
        takes: default routing: whether the 2-D parameter with this route is a matrix for this rule, or None to keep the
            route. Globs in ``include`` and ``exclude`` take precedence.
        source: publication or package, for tables.

    Raises:
        ValueError: for a name that is taken, and for a rule without options.

    Examples:
        >>> @dataclass
        ... class SignSGD(MatrixRule):
        ...     lr: float = 1e-3
        ...     def transform(self, matrices):
        ...         return matrices.sign()
        >>> register_rule("signsgd", SignSGD)
    """
    declared: Any = options or rule
    if not (isinstance(declared, type) and dataclasses.is_dataclass(declared)):
        raise ValueError(f"rule {name!r}: expected a dataclass, or one with the options in 'options'")
    flops = cost or (lambda shape, _: shape[0] * shape[1])
    entry = MatrixEntry(name=name, **_declared(declared), build=rule, cost=flops, work=work, takes=takes, source=source)
    _add(MATRIX_RULES, entry)


def _add(rules: dict[str, Any], entry: Rule) -> None:
    """Raises ValueError for a name that is taken."""
    if entry.name in MATRIX_RULES or entry.name in ELEMENTWISE_RULES:
        raise ValueError(f"a rule named {entry.name!r} is registered already; choose another name")
    rules[entry.name] = entry


def _declared(declared: type) -> dict[str, Any]:
    """The options of a rule whose dataclass declares them. They fit each other if it can be made of them."""

    @functools.cache
    def known() -> Known:
        options = options_in(declared)
        rates = {
            key: replace(option, check=partial(_rate, option.check)) for key, option in options.items() if key == "lr"
        }
        return {**options, **rates}

    return {"known": lambda given: known(), "check": lambda values: declared(**values)}


def _rate(check: Callable[[Any], float], given: Any) -> Any:
    """A number, or the given tensor of one element itself, so that it can be changed in place."""
    is_one = isinstance(given, Tensor) and given.numel() == 1
    found = check(given.item() if is_one else given)
    return given if is_one else found


def register_elementwise(
    name: str,
    optimizer: type[torch.optim.Optimizer] | Callable[[Mapping[str, Any]], type[torch.optim.Optimizer]],
    *,
    options: type | None = None,
    new_state: Callable[[Tensor, Mapping[str, Any]], State],
    counters: CountersOf = lambda options: Counters(),
    source: str = "",
) -> None:
    """Register a torch optimizer as a rule for element-wise parameters. Call it on all ranks.

    Every rank steps the elements that it stores. So the update of an element must not depend on other elements or on
    the shape. This is not checked: such a class would train differently on a different number of ranks.

    Args:
        name: name of the rule in configurations.
        optimizer: the class, or a function that returns the class from the options.
        options: dataclass whose fields are the options. Default: the arguments in the signature of the class.
        new_state: from a flat tensor and the options, its state before the first step: tensors of its shape, and
            scalars.
        counters: what the class keeps as Python numbers, in the state of a parameter or in its param group.
        source: publication or package, for tables.

    Raises:
        ValueError: for a name that is taken.

    Examples:
        >>> def new_state(flat, options):
        ...     return {"step": torch.zeros(()), "square_avg": torch.zeros_like(flat)}
        >>> register_elementwise("my_rmsprop", torch.optim.RMSprop, new_state=new_state)
    """
    if options is not None:
        declared = _declared(options)
    elif isinstance(optimizer, type):
        declared = _arguments(path_of(optimizer))
    else:
        raise ValueError(f"rule {name!r}: expected a class, or a dataclass with the options in 'options'")
    of_class: Any = optimizer if not isinstance(optimizer, type) else lambda _: optimizer
    entry = ElementwiseEntry(
        name=name, **declared, optimizer=of_class, new_state=new_state, counters=counters, source=source
    )
    _add(ELEMENTWISE_RULES, entry)


def _arguments(path: str | None, *, with_form: bool = False) -> dict[str, Any]:
    """The options of a rule that is a class."""
    return {
        "known": partial(arguments_of, path=path, with_form=with_form),
        "check": partial(check_arguments, path=path),
    }


def rule_named(name: str) -> MatrixEntry | ElementwiseEntry:
    """The rule of that name, of either kind. Raises ValueError with the nearest known name."""
    rules: dict[str, MatrixEntry | ElementwiseEntry] = {**MATRIX_RULES, **ELEMENTWISE_RULES}
    if name not in rules:
        raise ValueError(f"unknown rule {name!r}; {suggestion(name, rules)}")
    return rules[name]


def known_of(rule: str, given: Mapping[str, Any]) -> Known:
    """A rule's options, if it is given these."""
    known = rule_named(rule).known(given)
    if "lr" not in known:
        raise ValueError(f"{rule!r} has no option 'lr', which schedules write to every param group")
    return known


def options_of(rule: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a rule's options; a class becomes its path. Raises ValueError for wrong ones."""
    values = checked(known_of(rule, given), given)
    rule_named(rule).check(values)
    return values


ROUNDED_ZERO = -1e-12  # cyclic schedules end below 0 by rounding


def check_group(group: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for options in a param group that the constructor would refuse."""
    with within(where):
        given = {key: group[key] for key in known_in(group) if key in group}
        rate = given.get("lr")
        if isinstance(rate, (int, float, Tensor)) and ROUNDED_ZERO <= rate < 0:
            given["lr"] = 0.0
        options_of(rule_of(group), given)


BLOCK_STEP = "block_step"  # of a group with ``block_period``, its steps since matrices were last due whole


def rule_of(group: Mapping[str, Any]) -> str:
    """The name of a param group's rule. Groups without one are AdamW's, as ``with_torchs_keys`` makes them."""
    return str(group.get("rule", "adamw"))


def known_in(group: Mapping[str, Any]) -> Known:
    """The options of a param group's rule."""
    return known_of(rule_of(group), group)


def arguments(group: Mapping[str, Any]) -> dict[str, Any]:
    """The current options of a param group's rule, with defaults for those that it lacks, unless they are left to its
    class; ``lr`` as a number."""
    known = known_in(group).items()
    found = {key: group.get(key, option.default) for key, option in known if key in group or option.has_default}
    return {key: value.item() if key == "lr" and isinstance(value, Tensor) else value for key, value in found.items()}


class _WithoutGroups(torch.optim.AdamW):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Replaces torch's, which imports the compiler: that takes longer than reading and writing a gigabyte."""


@functools.cache
def torchs_keys() -> Mapping[str, Any]:
    """The options in torch.optim.AdamW's param groups, with their defaults."""
    return _WithoutGroups([torch.zeros(1)]).defaults


def with_torchs_keys(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of AdamW alone with torch.optim.AdamW's keys, as other groups are.

    torch.distributed.checkpoint reads a flattened state dict by the groups' keys, so these make state dicts
    interchangeable with torch's. Options that torch lacks are included unless they have their default.
    """
    if any(rule_of(group) != "adamw" for group in groups):
        return [dict(group) for group in groups]
    ours = {"rule": "adamw"}
    ours |= {key: option.default for key, option in options_in(AdamW).items() if key not in torchs_keys()}
    without = ({k: v for k, v in group.items() if k not in ours or v != ours[k]} for group in groups)
    return [{**torchs_keys(), **group} for group in without]


def check_torchs_keys(group: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for an option of torch.optim.AdamW that this package's AdamW would ignore."""
    for key, value in torchs_keys().items():
        if key not in options_in(AdamW) and group.get(key, value) != value:
            raise ValueError(
                f"{where}: {key!r} is {group[key]!r}, but AdamW here has {value!r} only; set it to that, if the "
                "training so far allows it"
            )


def optimizer_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """A torch optimizer's arguments from a rule's options: all but its class, and without cautious weight decay."""
    found = {key: value for key, value in options.items() if key not in ("class", "weight_decay_form")}
    return {**found, "weight_decay": 0.0} if is_cautious(options) else found


def is_cautious(options: Mapping[str, Any]) -> bool:
    """Whether an element-wise rule decays cautiously: only elements that the update moves towards zero."""
    return options.get("weight_decay_form") == "cautious"


def build_matrix_rule(group: Mapping[str, Any], config: HostConfig) -> MatrixRule:
    """The matrix rule of a param group with its current hyperparameters, in its current step of ``block_period``."""
    rule = MATRIX_RULES[rule_of(group)].build(**arguments(group))
    object.__setattr__(rule, "rule_name", rule_name(group))  # also on a frozen dataclass
    if rule.block_period > 1 and config.is_owned:
        raise ValueError(
            f"block_period is {rule.block_period}, but owned storage keeps every matrix whole at one rank, so no rank "
            "has another block; leave block_period out"
        )
    if config.exchange_dtype != "auto":
        rule.exchange_dtype = getattr(torch, config.exchange_dtype)
    if isinstance(rule, WeightRule) and rule.exchange_dtype != torch.float32:
        takes = f"{rule_of(group)!r} takes weights and gradients in float32"
        raise ValueError(f"exchange_dtype is {config.exchange_dtype!r}, but {takes}")
    if rule.block_period > 1 and group.get(BLOCK_STEP, 0) % rule.block_period:
        rule.blocks = rule.of_blocks()
    return rule


def count_block_steps(groups: Sequence[dict[str, Any]]) -> None:
    """Count a step in the groups that have ``block_period``. Called after it, on all ranks."""
    for group in groups:
        if BLOCK_STEP in group:
            group[BLOCK_STEP] = (group[BLOCK_STEP] + 1) % group["block_period"]


def build_matrix_rules(groups: Sequence[Mapping[str, Any]], config: HostConfig) -> dict[int, MatrixRule]:
    """By param group number, its matrix rule with its current hyperparameters."""
    matrices = {number: group for number, group in enumerate(groups) if rule_of(group) in MATRIX_RULES}
    return {number: build_matrix_rule(group, config) for number, group in matrices.items()}


def check_devices(
    groups: Sequence[Mapping[str, Any]],
    config: HostConfig,
    device: torch.device,
    smallest_matrix: Callable[[int], Atom | None],
) -> None:
    """Raises ValueError for a matrix rule that does not run on ``device``.

    A ``WeightRule`` takes two steps of a matrix of random numbers, as large as the smallest in its param group: the
    second is the first with state.
    """
    for number, rule in build_matrix_rules(groups, config).items():
        rule.check_device(device)
        atom = smallest_matrix(number) if isinstance(rule, WeightRule) and device.type != "meta" else None
        if atom is not None and isinstance(rule, WeightRule):
            try_steps(rule, atom, device, 2)


def rules_with_owner_state(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the param groups' matrix rules that keep owner state."""
    matrices = [group for group in groups if rule_of(group) in MATRIX_RULES]
    found = {rule_of(group): MATRIX_RULES[rule_of(group)].build(**arguments(group)) for group in matrices}
    return sorted(name for name, rule in found.items() if isinstance(rule, (OwnerStateRule, WeightRule)))


def wire_of(rule: MatrixRule) -> Wire:
    """A rule's exchange, as plans need it: bytes of an element, tensors sent to the owner, and steps between."""
    tensors = 2 if isinstance(rule, WeightRule) else 1
    return {"element_bytes": rule.exchange_dtype.itemsize, "tensors": tensors, "block_period": rule.block_period}


def atoms_of(param: TrainedParam, group: Mapping[str, Any], costs: dict[Shape, int] | None = None) -> list[Atom]:
    """The matrices in a parameter, with the costs of its param group's rule; none in an element-wise one.

    ``costs`` is a cache of costs by shape, for the group's parameters.
    """
    costs = {} if costs is None else costs
    for block in param.blocks:
        if block.shape not in costs:
            costs[block.shape] = cost_of(block.shape, group)
    return [
        Atom(block.of(param.name), block.shape, costs[block.shape], param.transposed, param.tiles)
        for block in param.blocks
    ]


def cost_of(shape: Shape, group: Mapping[str, Any]) -> int:
    """The flops of a param group's matrix rule on a matrix of ``shape``."""
    return MATRIX_RULES[rule_of(group)].cost(shape, arguments(group))


def new_state(flat: Tensor, group: Mapping[str, Any]) -> State:
    """Fresh element-wise state for ``flat``, by a param group's rule of either kind."""
    if rule_of(group) in ELEMENTWISE_RULES:
        return ELEMENTWISE_RULES[rule_of(group)].new_state(flat, arguments(group))
    keys = MATRIX_RULES[rule_of(group)].build(**arguments(group)).state_keys
    return {key: torch.zeros_like(flat) for key in keys}


def state_nbytes(numel: int, group: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the state of ``numel`` elements, computed by the rule from a tensor without memory."""
    state = new_state(torch.empty(numel, dtype=dtype, device="meta"), group)
    return sum(tensor.numel() * tensor.itemsize for tensor in state.values())


# Muon and its variants in the registry: what an update costs, and which options it has.


def _muon_flops(shape: Shape, options: Mapping[str, Any]) -> int:
    method, steps = options["ns_method"], options["ns_steps"]
    on_gram = takes_gram(shape, method, options["gram_aspect"])
    count = len(segments(options["ns_coefficients"], steps, options["gram_restarts"])) if on_gram else None
    return newton_schulz_flops(shape, steps, count, symmetric=method in PACKAGES)


def _second_moment_flops(shape: Shape, options: Mapping[str, Any]) -> int:
    return _muon_flops(shape, options) + SECOND_MOMENT_FLOPS * shape[0] * shape[1]


register_rule("muon", Muon, cost=_muon_flops, work="Newton-Schulz", source="Keller Jordan 2024")
register_rule(
    "normuon",
    NorMuon,
    cost=_second_moment_flops,
    work="Newton-Schulz, second moments by row",
    source="arXiv 2510.05491",
)
register_rule(
    "adamuon", AdaMuon, cost=_second_moment_flops, work="Newton-Schulz, second moments", source="arXiv 2507.11005"
)
register_rule("adamh", AdamH, work="Adam, element by element", source="Hyperball, arXiv 2606.16899")


# Optimizers of torch and of pytorch-optimizer as rules: ``torch_optimizer`` takes any class for matrices, ``{"name":
# "torch_optimizer", "class": "my_package.MyOptimizer", ...}``; the others have a fixed class.


def _flops(shape: Shape, options: Mapping[str, Any]) -> int:
    """SOAP's and Shampoo's flops by options that only they have; for any other class, its number of elements."""
    if {"precondition_frequency", "max_precondition_dim"} <= options.keys():
        return soap_flops(shape, options["precondition_frequency"], options["max_precondition_dim"])
    if "preconditioning_compute_steps" in options:
        return shampoo_flops(shape, options["preconditioning_compute_steps"], max(shape))  # it has no largest side
    return shape[0] * shape[1]


def _adam_moments(flat: Tensor, options: Mapping[str, Any]) -> State:
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])
    step = torch.zeros((), device=flat.device if options.get("fused") else "cpu")  # as torch keeps its counter
    return {"step": step, **{key: torch.zeros_like(flat) for key in moments}}


def _matrix(name: str, path: str | None, source: str, work: str) -> None:
    def rule(**options: Any) -> TorchOptimizer:
        return TorchOptimizer(class_named(path or options["class"]), **optimizer_arguments(options))

    _add(MATRIX_RULES, MatrixEntry(name=name, **_arguments(path), build=rule, cost=_flops, work=work, source=source))


def _of_lion(flat: Tensor, options: Mapping[str, Any]) -> State:
    return {"step": torch.zeros((), dtype=torch.int64), "exp_avg": torch.zeros_like(flat)}


def _check_sgd(values: Mapping[str, Any]) -> None:
    if values["momentum"] and values["dampening"]:
        raise ValueError(
            f"dampening: expected 0, because momentum starts with zeros here and with an undampened gradient in torch; "
            f"found {values['dampening']!r}; leave it out"
        )
    check_arguments(values, path=SGD)


def _of_sgd(flat: Tensor, options: Mapping[str, Any]) -> State:
    return {"momentum_buffer": torch.zeros_like(flat)} if options["momentum"] else {}


_matrix("torch_optimizer", None, "the class", "update")
_matrix("soap", "pytorch_optimizer.SOAP", "pytorch_optimizer.SOAP, arXiv 2409.11321", "SOAP")
_matrix("shampoo", "pytorch_optimizer.Shampoo", "pytorch_optimizer.Shampoo, arXiv 1802.09568", "Shampoo")
register_elementwise("adamw", torch.optim.AdamW, options=AdamW, new_state=_adam_moments, source=ADAMW)
LION_ENTRY = ElementwiseEntry(
    name="lion",
    **_arguments(LION, with_form=True),
    optimizer=lambda options: class_named(LION),
    new_state=_of_lion,
    counters=lambda options: Counters(group={"step": ("step", int)}),
    source=f"{LION}, arXiv 2302.06675",
)
SGD_ENTRY = ElementwiseEntry(
    name="sgd",
    known=partial(arguments_of, path=SGD, with_form=True),
    check=_check_sgd,
    optimizer=lambda options: torch.optim.SGD,
    new_state=_of_sgd,
    source=SGD,
)
ELEMENTWISE_RULES.update({entry.name: entry for entry in (LION_ENTRY, SGD_ENTRY)})
