"""The rules by name, in one table: options, cost, state, and the class that does the work.

``register_rule`` adds a matrix rule, ``register_elementwise`` an optimizer for everything that is not a matrix. The
options of a rule are the fields of its dataclass; AdamW is torch's, so its options are here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from lwopt_backend.config.foreign import RULES
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.config.options import Known, checked, options_in, spelling, within
from lwopt_backend.groups import Group, Groups
from lwopt_backend.groups.optimizer_classes import (
    EMERGING,
    CautiousDecay,
    arguments_of,
    check_arguments,
    check_without_modes,
    class_named,
    path_of,
)
from lwopt_backend.plan import Atom, TrainedParam
from lwopt_backend.plan.cost import SECOND_MOMENT_FLOPS, newton_schulz_flops, shampoo_flops, soap_flops
from lwopt_backend.plan.owners import Wire
from lwopt_backend.rules import AdamH, AdaMuon, MatrixRule, Muon, NorMuon, OwnerStateRule, WeightRule
from lwopt_backend.rules.adamh import checked_betas
from lwopt_backend.rules.muon import CAUTIOUS, takes_gram
from lwopt_backend.rules.newton_schulz import PACKAGES, segments
from lwopt_backend.rules.protocol import TorchOptimizer, option
from lwopt_backend.runtime.agreement import setting
from lwopt_backend.runtime.collectives import rule_name
from lwopt_backend.runtime.elementwise import Counters
from lwopt_backend.runtime.state import try_steps

if TYPE_CHECKING:
    from lwopt_backend.routing.routing import Route  # which imports all of routing, as no command on checkpoints needs

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
Takes: TypeAlias = "Callable[[Route], bool | None]"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """``declared`` says what the options are: the fields of that dataclass, or the arguments of the class that has this
    path; None: its path is the option ``class``."""

    name: str
    declared: type | str | None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class MatrixEntry(Registered):
    """A rule for whole matrices. ``build`` makes it from its options, by name; ``cost`` is its flops on one matrix."""

    build: Callable[..., MatrixRule]
    cost: Callable[[Shape, Mapping[str, Any]], int]
    work: str  # what the cost counts, for tables
    takes: Takes | None = None  # which parameters are its matrices, if not by structure alone


@dataclass(frozen=True, kw_only=True)
class ElementwiseEntry(Registered):
    """A torch optimizer, or its path, for element-wise parameters, and the state that it keeps per flat tensor.

    ``new_state`` creates the state that the optimizer would create in its first step, so that every checkpoint has it.
    ``counters`` are those that the optimizer keeps as Python numbers; ``new_state`` has a tensor for each. ``cautious``
    is whether a class may also decay weights cautiously. ``check`` raises ValueError for options that do not work here.
    """

    optimizer: type[torch.optim.Optimizer] | str
    new_state: Callable[[Tensor, Mapping[str, Any]], State]
    counters: Counters = Counters()
    cautious: bool = False
    check: Callable[[Mapping[str, Any]], object] = dict


MATRIX_RULES: dict[str, MatrixEntry] = {}
ELEMENTWISE_RULES: dict[str, ElementwiseEntry] = {}


def register_rule(
    name: str,
    rule: type[MatrixRule],
    *,
    cost: Callable[[Shape, Mapping[str, Any]], int] | None = None,
    work: str = "rule",
    takes: Takes | None = None,
    source: str = "",
) -> None:
    """Register a matrix rule for use in any later configuration. Call it on all ranks.

    Args:
        name: name of the rule in configurations.
        rule: a subclass of ``MatrixRule``, as a dataclass whose fields are the options.
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
    if not dataclasses.is_dataclass(rule):
        raise ValueError(f"rule {name!r}: expected a dataclass, whose fields are the options; found {rule!r}")
    flops = cost or (lambda shape, _: shape[0] * shape[1])
    made = MatrixEntry(name=name, declared=rule, build=rule, cost=flops, work=work, takes=takes, source=source)
    _add(MATRIX_RULES, made)


def _add(rules: dict[str, Any], made: Registered) -> None:
    """Raises ValueError for a name that is taken."""
    if made.name in MATRIX_RULES or made.name in ELEMENTWISE_RULES:
        raise ValueError(f"a rule named {made.name!r} is registered already; choose another name")
    rules[made.name] = made


def register_elementwise(
    name: str,
    optimizer: type[torch.optim.Optimizer],
    *,
    options: type | None = None,
    new_state: Callable[[Tensor, Mapping[str, Any]], State],
    counters: Counters = Counters(),  # noqa: B008
    source: str = "",
) -> None:
    """Register a torch optimizer as a rule for element-wise parameters. Call it on all ranks.

    Every rank steps the elements that it stores. So the update of an element must not depend on other elements or on
    the shape. This is not checked: such a class would train differently on a different number of ranks.

    Args:
        name: name of the rule in configurations.
        optimizer: the class.
        options: dataclass whose fields are the options. Default: the arguments in the signature of the class.
        new_state: from a flat tensor and the options, its state before the first step: tensors of its shape, and
            scalars.
        counters: what the class keeps as Python numbers, in the state of a parameter or in its param group.
        source: publication or package, for tables.

    Raises:
        ValueError: for a name that is taken, and a class with ``train()`` and ``eval()``.

    Examples:
        >>> def new_state(flat, options):
        ...     return {"step": torch.zeros(()), "square_avg": torch.zeros_like(flat)}
        >>> register_elementwise("my_rmsprop", torch.optim.RMSprop, new_state=new_state)
    """
    check_without_modes(optimizer)
    declared = options or path_of(optimizer)
    made = ElementwiseEntry(
        name=name, declared=declared, optimizer=optimizer, new_state=new_state, counters=counters, source=source
    )
    _add(ELEMENTWISE_RULES, made)


def rule_named(name: str) -> MatrixEntry | ElementwiseEntry:
    """The rule of that name, of either kind. Raises ValueError with the nearest known name."""
    found = MATRIX_RULES.get(name) or ELEMENTWISE_RULES.get(name)
    if found is None:
        raise ValueError(f"unknown rule {name!r}; {rule_hint(name, [*MATRIX_RULES, *ELEMENTWISE_RULES])}")
    return found


def rule_hint(name: str, known: Iterable[str]) -> str:
    """A clause for an error message on the name of a rule that is not ``known``."""
    if name.lower() in RULES:
        return RULES[name.lower()]
    known, of_nvidia = list(known), f"emerging_optimizers.{name}"
    is_class = of_nvidia in EMERGING and "torch_optimizer" in known
    return f"write {of_nvidia!r}, NVIDIA's class" if is_class else spelling(name, known)


def known_of(rule: str, given: Mapping[str, Any]) -> Known:
    """A rule's options, if it is given these."""
    found = rule_named(rule)
    declared = found.declared
    known = options_in(declared) if isinstance(declared, type) else arguments_of(given, declared)
    if isinstance(found, ElementwiseEntry) and found.cautious:
        known = {**known, **options_in(CautiousDecay)}
    if "lr" not in known:
        raise ValueError(f"{rule!r} has no option 'lr', which schedules write to every param group")
    return known


def check_options(rule: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError for values of a rule's options that do not fit each other."""
    found = rule_named(rule)
    if isinstance(found, ElementwiseEntry):
        found.check(values)
    if isinstance(found.declared, type):
        found.declared(**values)
    else:
        check_arguments(values, found.declared, MATRIX_RULES)


def options_of(rule: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a rule's options; a class becomes its path. Raises ValueError for wrong ones."""
    values = checked(known_of(rule, given), given)
    check_options(rule, values)
    return values


ROUNDED_ZERO = -1e-12  # cyclic schedules end below 0 by rounding


def check_group(group: Group, where: str) -> None:
    """Raises ValueError for options in a param group that the constructor would refuse."""
    with within(where):
        given = {key: group[key] for key in known_in(group) if key in group}
        rate = given.get("lr")
        if isinstance(rate, (int, float, Tensor)) and ROUNDED_ZERO <= rate < 0:
            given["lr"] = 0.0
        options_of(rule_of(group), given)


BLOCK_STEP = "block_step"  # of a group with ``block_period``, its steps since matrices were last due whole


def rule_of(group: Group) -> str:
    """The name of a param group's rule. Groups without one are AdamW's, as ``with_torchs_keys`` makes them."""
    return str(group.get("rule", "adamw")).partition(" ")[0]


def known_in(group: Group) -> Known:
    """The options of a param group's rule."""
    return known_of(rule_of(group), group)


def arguments(group: Group) -> dict[str, Any]:
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


def with_torchs_keys(groups: Groups) -> list[dict[str, Any]]:
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


def check_torchs_keys(group: Group, where: str) -> None:
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


def build_matrix_rule(group: Group, config: HostConfig) -> MatrixRule:
    """The matrix rule of a param group with its current hyperparameters, in its current step of ``block_period``.

    Made anew in every step: a schedule or the user may have written any option into the group since the last one.
    """
    rule = MATRIX_RULES[rule_of(group)].build(**arguments(group))
    object.__setattr__(rule, "rule_name", rule_name(group))  # also on a frozen dataclass
    if rule.block_period > 1 and config.stores_whole:
        raise ValueError(
            f'block_period is {rule.block_period}, but plain PyTorch and DeepSpeed with "storage": "owned" keep every '
            "matrix whole at one rank, so no rank has a block of it; leave block_period out"
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


def build_matrix_rules(groups: Groups, config: HostConfig) -> dict[int, MatrixRule]:
    """By param group number, its matrix rule with its current hyperparameters."""
    matrices = {number: group for number, group in enumerate(groups) if rule_of(group) in MATRIX_RULES}
    return {number: build_matrix_rule(group, config) for number, group in matrices.items()}


def check_devices(
    groups: Groups,
    config: HostConfig,
    device: torch.device,
    smallest_matrix: Callable[[int], Atom | None],
) -> list[str]:
    """Raises ValueError for a matrix rule that does not run on ``device``. Returns the lines on how the rules run
    there, which must be equal on all ranks.

    A ``WeightRule`` takes two steps of a matrix of random numbers, as large as the smallest in its param group: the
    second is the first with state.
    """
    lines = []
    for number, rule in build_matrix_rules(groups, config).items():
        rule.check_device(device)
        if isinstance(rule, Muon) and rule.ns_method == "auto":
            what = f"the package with kernels that ns_method 'auto' finds for param group {number}, on {device.type}"
            lines.append(setting(what, rule.package_on(device)))
        if config.capture:
            check_capture(rule, device)
        atom = smallest_matrix(number) if isinstance(rule, WeightRule) and device.type != "meta" else None
        if atom is not None and isinstance(rule, WeightRule):
            try_steps(rule, atom, device, 2)
    return lines


def check_capture(rule: MatrixRule, device: torch.device) -> None:
    """Raises ValueError for a rule whose ``transform`` cannot be captured, and for a device without CUDA graphs."""
    package = rule.package_on(device) if isinstance(rule, Muon) else None
    if rule.transform_reads is None or package is not None or isinstance(rule, WeightRule):
        why = "steps on the host" if isinstance(rule, WeightRule) else "has no transform_reads with these options"
        why = why if package is None else f"takes {package} here, whose kernels nobody has captured"
        raise ValueError(
            f"capture: expected rules that can be captured, found {rule.rule_name!r}, which {why}; leave capture out, "
            "or use another rule, or an ns_method without a package, such as 'gram'"
        )
    if device.type not in ("cuda", "cpu", "meta"):
        raise ValueError(f"capture: expected a device with CUDA graphs, found {device.type!r}; leave capture out")


def rules_with_owner_state(groups: Groups) -> list[str]:
    """Names of the param groups' matrix rules that keep owner state."""
    matrices = [group for group in groups if rule_of(group) in MATRIX_RULES]
    found = {rule_of(group): MATRIX_RULES[rule_of(group)].build(**arguments(group)) for group in matrices}
    return sorted(name for name, rule in found.items() if isinstance(rule, (OwnerStateRule, WeightRule)))


def wire_of(rule: MatrixRule) -> Wire:
    """A rule's exchange, as plans need it: bytes of an element, tensors sent to the owner, and steps between."""
    tensors = 2 if isinstance(rule, WeightRule) else 1
    return {"element_bytes": rule.exchange_dtype.itemsize, "tensors": tensors, "block_period": rule.block_period}


def atoms_of(param: TrainedParam, group: Group, costs: dict[Shape, int] | None = None) -> list[Atom]:
    """The matrices in a parameter, with the costs of its param group's rule; none in an element-wise one.

    ``costs`` is a cache of costs by shape, for the group's parameters.
    """
    costs = {} if costs is None else costs
    found, tiles = [], param.tiles
    for block in param.blocks:
        shape = block.shape
        if shape not in costs:
            costs[shape] = cost_of(shape, group)
        found.append(Atom(block.of(param.name), shape, costs[shape], param.transposed, tiles))
    return found


def cost_of(shape: Shape, group: Group) -> int:
    """The flops of a param group's matrix rule on a matrix of ``shape``."""
    return MATRIX_RULES[rule_of(group)].cost(shape, arguments(group))


def new_state(flat: Tensor, group: Group) -> State:
    """Fresh element-wise state for ``flat``, by a param group's rule of either kind."""
    if rule_of(group) in ELEMENTWISE_RULES:
        return ELEMENTWISE_RULES[rule_of(group)].new_state(flat, arguments(group))
    return {key: torch.zeros_like(flat) for key in _built(group).state_keys}


def stored_state(flat: Tensor, group: Group) -> State:
    """``new_state`` without what is kept in 8 bits."""
    if rule_of(group) in ELEMENTWISE_RULES:
        return new_state(flat, group)
    return {key: torch.zeros_like(flat) for key in _built(group).stored_keys}


def quantized_keys(group: Group) -> tuple[str, ...]:
    """The keys of state that a param group's rule keeps in 8 bits."""
    return () if rule_of(group) in ELEMENTWISE_RULES else _built(group).quantized


def _built(group: Group) -> MatrixRule:
    return MATRIX_RULES[rule_of(group)].build(**arguments(group))


def dtype_of_steps(group: Group) -> torch.dtype:
    """The dtype of the count of steps that a param group's rule keeps; torch's fp32 for other optimizers."""
    counter = saved_state(group).get("step")
    return torch.float32 if counter is None else counter.dtype


def saved_state(group: Group) -> State:
    """The state of one element that a saved param group's element-wise rule keeps, without importing its class; nothing
    of other rules and of other optimizers."""
    entry = ELEMENTWISE_RULES.get(str(group.get("rule")))
    return {} if entry is None else entry.new_state(torch.zeros(1), {"amsgrad": False, **group})


def state_nbytes(numel: int, group: Group, dtype: torch.dtype = torch.float32, in_8_bits: int = 0) -> int:
    """Bytes of the state of ``numel`` elements, computed by the rule from a tensor without memory. They take
    ``in_8_bits`` bytes in each state that is kept so."""
    state = stored_state(torch.empty(numel, dtype=dtype, device="meta"), group)
    stored = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    return stored + len(quantized_keys(group)) * in_8_bits


# Muon and its variants in the registry: what an update costs, and which options it has.


def _muon_flops(shape: Shape, options: Mapping[str, Any]) -> int:
    """Those of "auto" are without a package, so that a plan does not depend on what is installed where it is made."""
    method, steps = options["ns_method"], options["ns_steps"]
    on_gram = takes_gram(shape, method, options["gram_aspect"])
    count = len(segments(options["ns_coefficients"], steps, options["gram_restarts"])) if on_gram else None
    return newton_schulz_flops(shape, steps, count, symmetric=method in PACKAGES)


def flops_of_auto(shape: Shape, group: Group) -> int | None:
    """The flops of a param group's rule on a matrix if its ``ns_method`` were "auto", without a package; None if the
    rule has no such option, or if its options choose another way already."""
    options = arguments(group)
    if options.get("ns_method") != "standard" or options.get("gram_aspect") is not None:
        return None
    return cost_of(shape, {**group, "ns_method": "auto"})


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
    """Flops by options that only SOAP, Shampoo and Muon have; for any other class, the number of elements."""
    if {"precondition_frequency", "max_precondition_dim"} <= options.keys():
        return soap_flops(shape, options["precondition_frequency"], options["max_precondition_dim"])
    if "preconditioning_compute_steps" in options:
        return shampoo_flops(shape, options["preconditioning_compute_steps"], max(shape))  # it has no largest side
    if "num_ns_steps" in options:
        return newton_schulz_flops(shape, options["num_ns_steps"])
    if "shampoo_beta" in options:
        return soap_flops(shape, 1, max(shape))
    return shape[0] * shape[1]


def _adam_moments(flat: Tensor, options: Mapping[str, Any]) -> State:
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])
    step = torch.zeros((), device=flat.device if options.get("fused") else "cpu")  # as torch keeps its counter
    return {"step": step, **{key: torch.zeros_like(flat) for key in moments}}


def _matrix(name: str, path: str | None, source: str, work: str) -> None:
    def rule(**options: Any) -> TorchOptimizer:
        return TorchOptimizer(class_named(path or options["class"]), **optimizer_arguments(options))

    _add(MATRIX_RULES, MatrixEntry(name=name, declared=path, build=rule, cost=_flops, work=work, source=source))


def _of_lion(flat: Tensor, options: Mapping[str, Any]) -> State:
    return {"step": torch.zeros((), dtype=torch.int64), "exp_avg": torch.zeros_like(flat)}


def _check_sgd(values: Mapping[str, Any]) -> None:
    if values["momentum"] and values["dampening"]:
        raise ValueError(
            "dampening: expected 0, because momentum starts with zeros here and with an undampened gradient in torch; "
            f"found {values['dampening']!r}; leave it out"
        )


def _of_sgd(flat: Tensor, options: Mapping[str, Any]) -> State:
    return {"momentum_buffer": torch.zeros_like(flat)} if options["momentum"] else {}


_matrix("torch_optimizer", None, "the class", "update")
_matrix("soap", "pytorch_optimizer.SOAP", "pytorch_optimizer.SOAP, arXiv 2409.11321", "SOAP")
_matrix("shampoo", "pytorch_optimizer.Shampoo", "pytorch_optimizer.Shampoo, arXiv 1802.09568", "Shampoo")
register_elementwise("adamw", torch.optim.AdamW, options=AdamW, new_state=_adam_moments, source=ADAMW)
_add(
    ELEMENTWISE_RULES,
    ElementwiseEntry(
        name="lion",
        declared=LION,
        optimizer=LION,
        new_state=_of_lion,
        counters=Counters(group={"step": ("step", int)}),
        cautious=True,
        source=f"{LION}, arXiv 2302.06675",
    ),
)
_add(
    ELEMENTWISE_RULES,
    ElementwiseEntry(
        name="sgd", declared=SGD, optimizer=SGD, new_state=_of_sgd, cautious=True, check=_check_sgd, source=SGD
    ),
)
