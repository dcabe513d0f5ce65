"""The options of the rules that come with the package. Names and defaults are torch.optim's where it has the rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

import torch
from pydantic import PlainValidator, StrictBool, create_model, model_validator
from torch import Tensor

from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.config.optimizer_classes import (
    DECAY_FORM,
    Trial,
    checked_model,
    class_named,
    elementwise_state,
    path_of,
    try_cautious,
    try_matrix,
)
from lwopt_backend.config.options import Aspect, BelowOne, Count, NonNegative, Options, Steps, option, parse, suggestion
from lwopt_backend.plan.cost import SECOND_MOMENT_FLOPS, gram_flops, shampoo_flops, soap_flops
from lwopt_backend.routing.routing import Route
from lwopt_backend.rules import AdaMuon, MatrixRule, Muon, NorMuon, OwnerStateRule, WeightRule
from lwopt_backend.rules.newton_schulz import Coefficients, by_step, segments, table_of
from lwopt_backend.rules.torch_optimizer import TorchOptimizer
from lwopt_backend.runtime.collectives import rule_name
from lwopt_backend.runtime.elementwise import Counters

TORCH = "torch.optim.Muon"
ADAMW = "torch.optim.AdamW"
MOONLIGHT = "Muon is Scalable for LLM Training, arXiv 2502.16982"
NORMUON = "NorMuon, arXiv 2510.05491"
ADAMUON = "AdaMuon, arXiv 2507.11005"
CAUTIOUS = "Cautious Weight Decay, arXiv 2510.12402"
SCALE = (
    "factor on the learning rate by a matrix's rows and columns. 'original' (Megatron: 'shape_scaling'): "
    "sqrt(max(1, rows / columns)); 'match_rms_adamw' (dion: 'rms_norm'): 0.2 sqrt(max(rows, columns)); 'spectral': "
    "Megatron's sqrt(max(rows, columns)); 'unit_rms_norm' (dion: 'spectral_norm'): sqrt(rows / columns); 'none': 1. "
    "Mind that 'spectral' and 'spectral_norm' are not the same. Without a value: 'original'"
)
ScaleName = Literal[
    "original", "match_rms_adamw", "shape_scaling", "spectral", "unit_rms_norm", "spectral_norm", "rms_norm", "none"
]


def _coefficients(given: Any) -> Coefficients:
    """A name, three numbers, or three for every step; lists become tuples."""
    triples = table_of(given).triples
    if not all(math.isfinite(number) for triple in triples for number in triple):
        raise ValueError(f"ns_coefficients: expected finite numbers; found {given!r}")
    if isinstance(given, str):
        return given
    return triples if isinstance(given[0], Sequence) else triples[0]


class MuonOptions(Options):
    """torch.optim.Muon's arguments, then ours."""

    lr: NonNegative = option(1e-3, "learning rate, before the factor by shape", TORCH)
    weight_decay: NonNegative = option(0.1, "goes by the learning rate as it is, without the factor by shape", TORCH)
    momentum: BelowOne = option(0.95, "of the average of gradients", TORCH)
    nesterov: StrictBool = option(True, "go by the average that the next gradient like this one would give", TORCH)
    ns_coefficients: Annotated[Coefficients, PlainValidator(_coefficients)] = option(
        (3.4445, -4.7750, 2.0315),
        "of the quintic Newton-Schulz iteration: three numbers, or three for every step, or a published table: "
        "'simple' (any number of steps; these three numbers), 'quintic' (5 steps), 'polar_express' (any number), "
        "'polar_express_5' (5 steps; dion's and nanochat's)",
        f"{TORCH}; quintic: Cesista, You and Jordan 2025; Polar Express, arXiv 2505.16932",
    )
    eps: NonNegative = option(
        1e-7, "least norm that a matrix is divided by; one below it is scaled up first, so it is orthogonalized", TORCH
    )
    ns_steps: Steps = option(5, "Newton-Schulz iterations", TORCH)
    adjust_lr_fn: ScaleName | None = option(None, SCALE, f"{TORCH}; Megatron-Core; dion; Scion, arXiv 2502.07529")
    extra_scale_factor: NonNegative = option(1.0, "on the factor by shape", "Megatron-Core")
    momentum_form: Literal["ema", "sum"] = option(
        "ema",
        "B <- momentum B + (1 - momentum) G, as torch computes, or B <- momentum B + G, as dion and Moonlight; "
        "checkpoints differ by the factor 1 - momentum",
        f"{TORCH}; {MOONLIGHT}",
    )
    weight_decay_form: Literal["decoupled", "coupled", "cautious"] = option(
        "decoupled",
        "decay the weight; or add its share to the gradient; or decay only what the update moves towards zero",
        f"{TORCH}; {CAUTIOUS}",
    )
    ns_dtype: Literal["bfloat16", "float32"] = option("bfloat16", "dtype of the iteration, and of what travels", "ours")
    gram_aspect: Aspect | None = option(
        None,
        "matrices whose longer side is at least this many times the shorter take Gram Newton-Schulz; None: none do",
        "Dao-AILab, Gram Newton-Schulz",
    )
    gram_restarts: tuple[Count, ...] | None = option(
        None,
        "numbers of steps after which Gram Newton-Schulz forms its matrices anew; None: where rounding needs it, after "
        "3 of 5 steps of torch's coefficients and after 2 of the tables'",
        "Dao-AILab, Gram Newton-Schulz; the default is ours",
    )

    @model_validator(mode="after")
    def _steps_fit(self) -> MuonOptions:
        by_step(self.ns_coefficients, self.ns_steps)
        restarts = self.gram_restarts or ()
        if list(restarts) != sorted(set(restarts)) or any(restart >= self.ns_steps for restart in restarts):
            raise ValueError(
                f"gram_restarts: expected increasing numbers below ns_steps, {self.ns_steps}; found {restarts!r}"
            )
        if self.gram_restarts is not None and self.gram_aspect is None:
            raise ValueError(
                f"gram_restarts is {restarts!r}, but without gram_aspect no matrix takes Gram Newton-Schulz; set "
                "gram_aspect, 1.0 for all matrices, or leave gram_restarts out"
            )
        return self


class SecondMomentOptions(MuonOptions):
    """What NorMuon and AdaMuon have beside Muon's options."""

    nesterov: StrictBool = option(False, "go by the average that the next gradient like this one would give", TORCH)
    beta2: BelowOne = option(0.95, "of the moving average of the update's squares", f"{NORMUON}; {ADAMUON}")
    second_moment_eps: NonNegative = option(1e-8, "added to the root of that average", "dion")
    update_norm: Literal["match_rms", "preserve", "none"] = option(
        "match_rms",
        "the update's length: a root mean square of 0.2, in place of the factor by shape; or the Frobenius norm that "
        "it had before the division, as in dion and, since 0.3.0, in Emerging-Optimizers' NorMuon; or what the "
        "division gave, as in its AdaMuon. 0.2.0 of it is 'none' with adjust_lr_fn 'none' in both",
        f"{NORMUON}; {ADAMUON}; dion; Emerging-Optimizers",
    )

    @model_validator(mode="after")
    def _one_scale(self) -> SecondMomentOptions:
        if self.update_norm == "match_rms" and self.adjust_lr_fn is not None:
            raise ValueError(
                f"adjust_lr_fn is {self.adjust_lr_fn!r}, but with update_norm 'match_rms' there is no factor by shape; "
                "leave adjust_lr_fn out, or choose update_norm 'preserve' or 'none'"
            )
        return self


class NorMuonOptions(SecondMomentOptions):
    """Muon whose neurons have second moments."""

    second_moment_of: Literal["rows", "longer_side"] = option(
        "rows",
        "a second moment for every row, an output neuron; or for every line of the longer side, as Emerging-Optimizers",
        f"{NORMUON}; Emerging-Optimizers",
    )


class AdaMuonOptions(SecondMomentOptions):
    """Muon whose elements have second moments."""

    sign_momentum: StrictBool = option(
        True, "orthogonalize the signs of the momentum; false: the momentum, as Emerging-Optimizers", ADAMUON
    )


class AdamWOptions(Options):
    """torch.optim.AdamW's arguments."""

    lr: NonNegative = option(1e-3, "learning rate", ADAMW)
    betas: tuple[BelowOne, BelowOne] = option((0.9, 0.999), "of the moving averages of gradients and squares", ADAMW)
    eps: NonNegative = option(1e-8, "added to the root of the mean square", ADAMW)
    weight_decay: NonNegative = option(1e-2, "goes by the learning rate", ADAMW)
    amsgrad: StrictBool = option(False, "divide by the largest mean square so far", ADAMW)
    foreach: StrictBool | None = option(None, "torch's multi-tensor implementation; None: torch decides", ADAMW)
    fused: StrictBool | None = option(None, "torch's fused implementation; None: torch decides", ADAMW)
    weight_decay_form: Literal["decoupled", "cautious"] = option(
        "decoupled", "decay the weight; or only what the update moves towards zero", CAUTIOUS
    )

    @model_validator(mode="after")
    def _one_implementation(self) -> AdamWOptions:
        if self.foreach and self.fused:
            raise ValueError("foreach and fused are both true, but torch has them one at a time; leave one of them out")
        return self


# The rules by name, in one table: options, cost, state, and the class that does the work.
#
# ``register_rule`` adds a matrix rule, ``register_elementwise`` an optimizer for everything that is not a matrix.

State = dict[str, Tensor]
Shape = tuple[int, int]
ModelOf = Callable[[Mapping[str, Any], str], type[Options]]
Takes = Callable[[Route], bool | None]
CountersOf = Callable[[Mapping[str, Any]], Counters]


@dataclass(frozen=True)
class MatrixEntry:
    """A rule for whole matrices. ``build`` makes it from its options, by name; ``cost`` is its flops on one matrix.

    ``model`` gives the options' model, for rules whose options depend on what is given, such as a class's arguments.
    """

    name: str
    model: ModelOf
    build: Callable[..., MatrixRule]
    cost: Callable[[Shape, Mapping[str, Any]], int]
    work: str  # what the cost counts, for tables
    takes: Takes | None = None  # which parameters are its matrices, where it decides otherwise than their structure
    source: str = ""


@dataclass(frozen=True)
class ElementwiseEntry:
    """A torch optimizer for element-wise parameters, and the state it keeps per flat tensor.

    ``new_state`` makes the state that the optimizer would make on its first step, so that no checkpoint lacks it.
    ``counters`` are what the optimizer wants as numbers of Python; ``new_state`` has a tensor for each.
    """

    name: str
    model: ModelOf
    optimizer: Callable[[Mapping[str, Any]], type[torch.optim.Optimizer]]
    new_state: Callable[[Tensor, Mapping[str, Any]], State]
    counters: CountersOf
    source: str = ""


# A name says which table a rule is in, so one that both kinds have is spelled out for elements.
ELEMENTWISE = {"torch_optimizer": "torch_optimizer_elementwise"}
MATRIX_RULES: dict[str, MatrixEntry] = {}
ELEMENTWISE_RULES: dict[str, ElementwiseEntry] = {}


def register_rule(
    name: str,
    rule: Callable[..., MatrixRule],
    *,
    options: type[Options] | ModelOf | None = None,
    cost: Callable[[Shape, Mapping[str, Any]], int] | None = None,
    work: str = "rule",
    takes: Takes | None = None,
    source: str = "",
) -> None:
    """Make a matrix rule known by ``name``, wherever a configuration names one. Called on all ranks, before that.

    - ``rule``: a subclass of ``MatrixRule``; it is called with the options by name.
    - ``options``: their pydantic model; for a dataclass it may be left out, its fields are the options.
    - ``cost``: flops on a matrix of a shape, given the options; by default as many as the matrix has elements.
    - ``takes``: default routing: of a 2-D parameter's route, whether it is a matrix for this rule; None: as it is.
      Globs in ``include`` and ``exclude`` still win.

    Raises ValueError for a name that is taken.
    """
    _check_free(name)
    model = _model_of(name, rule, options)
    MATRIX_RULES[name] = MatrixEntry(
        name, model, rule, cost or (lambda shape, _: shape[0] * shape[1]), work, takes, source
    )


def register_elementwise(
    name: str,
    optimizer: type[torch.optim.Optimizer] | Callable[[Mapping[str, Any]], type[torch.optim.Optimizer]],
    *,
    options: type[Options] | ModelOf,
    new_state: Callable[[Tensor, Mapping[str, Any]], State],
    counters: CountersOf = lambda options: Counters(),
    source: str = "",
) -> None:
    """Make a torch optimizer known by ``name`` as a rule for element-wise parameters. Raises ValueError as above."""
    _check_free(name)
    given = (lambda _: optimizer) if isinstance(optimizer, type) else optimizer
    ELEMENTWISE_RULES[name] = ElementwiseEntry(
        name, _model_of(name, optimizer, options), given, new_state, counters, source
    )


def _check_free(name: str) -> None:
    if name in MATRIX_RULES or name in ELEMENTWISE_RULES:
        raise ValueError(f"a rule named {name!r} is registered already; choose another name")


def _model_of(name: str, rule: Any, options: type[Options] | ModelOf | None) -> ModelOf:
    if isinstance(options, type):
        return lambda given, where: options
    if options is not None:
        return options
    if not dataclasses.is_dataclass(rule):
        raise ValueError(f"rule {name!r}: expected a dataclass, or the options' model in 'options'")
    hints = get_type_hints(rule)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(rule)
    }
    model = create_model(f"{name}Options", __base__=Options, **fields)
    return lambda given, where: model


def rule_named(name: str) -> MatrixEntry | ElementwiseEntry:
    """The rule of that name, of either kind. Raises ValueError with the nearest known name."""
    rules: dict[str, MatrixEntry | ElementwiseEntry] = {**MATRIX_RULES, **ELEMENTWISE_RULES}
    if name not in rules:
        raise ValueError(f"unknown rule {name!r}; {suggestion(name, rules)}")
    return rules[name]


def options_of(rule: str, given: Mapping[str, Any], where: str) -> Options:
    """Raises ValueError for wrong options of a rule. A class among them becomes its path."""
    if "class" in given:
        given = {**given, "class": path_of(given["class"])}
    model = rule_named(rule).model(given, where)
    if "lr" not in model.model_fields:
        raise ValueError(f"{where}: {rule!r} has no option 'lr', which schedules write to every param group")
    return parse(model, given, where)


def option_names(group: Mapping[str, Any]) -> list[str]:
    """Which keys of a param group are options of its rule."""
    return list(rule_named(group["rule"]).model(group, "").model_fields)


def arguments(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group's rule as they are now; of those that an older checkpoint lacks, the defaults."""
    fields = rule_named(group["rule"]).model(group, "").model_fields
    return {
        key: group[key] if key in group or field.is_required() else field.get_default(call_default_factory=True)
        for key, field in fields.items()
    }


def optimizer_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a torch optimizer is made with, of a rule's options: all but its class, and no decay that is cautious."""
    found = {key: value for key, value in options.items() if key not in ("class", DECAY_FORM)}
    return {**found, "weight_decay": 0.0} if is_cautious(options) else found


def is_cautious(options: Mapping[str, Any]) -> bool:
    """Whether the decay of an element-wise rule is ours: of elements that the update moves towards zero."""
    return options.get(DECAY_FORM) == "cautious"


def build_matrix_rule(group: Mapping[str, Any], config: HostConfig) -> MatrixRule:
    """The matrix rule of a param group with the hyperparameters that it has now."""
    rule = MATRIX_RULES[group["rule"]].build(**arguments(group))
    object.__setattr__(rule, "rule_name", rule_name(group))  # a frozen dataclass, too
    if config.exchange_dtype != "auto":
        rule.exchange_dtype = getattr(torch, config.exchange_dtype)
    if isinstance(rule, WeightRule) and rule.exchange_dtype != torch.float32:
        raise ValueError(
            f"exchange_dtype is {config.exchange_dtype!r}, but {group['rule']!r} takes weights and gradients in float32"
        )
    return rule


def build_matrix_rules(groups: Sequence[Mapping[str, Any]], config: HostConfig) -> dict[int, MatrixRule]:
    """By a param group's number, its matrix rule with the hyperparameters that the group has now."""
    return {
        number: build_matrix_rule(group, config) for number, group in enumerate(groups) if group["rule"] in MATRIX_RULES
    }


def rules_with_owner_state(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the param groups' matrix rules that keep state at the owners alone."""
    found = {g["rule"]: MATRIX_RULES[g["rule"]].build(**arguments(g)) for g in groups if g["rule"] in MATRIX_RULES}
    return sorted(name for name, rule in found.items() if isinstance(rule, (OwnerStateRule, WeightRule)))


class Wire(TypedDict, total=False):
    """Arguments of plans."""

    element_bytes: int
    tensors: int


def wire_of(rule: MatrixRule) -> Wire:
    """What plans must know of a rule's exchange: the bytes of an element, and the tensors that go to the owner."""
    return {"element_bytes": rule.exchange_dtype.itemsize, "tensors": 2 if isinstance(rule, WeightRule) else 1}


def cost_of(shape: Shape, group: Mapping[str, Any]) -> int:
    """The flops of a param group's matrix rule on a matrix of ``shape``."""
    return MATRIX_RULES[group["rule"]].cost(shape, arguments(group))


def new_state(flat: Tensor, group: Mapping[str, Any]) -> State:
    """Fresh state that lies where the elements of ``flat`` do, of a param group's rule of either kind."""
    if group["rule"] in ELEMENTWISE_RULES:
        return ELEMENTWISE_RULES[group["rule"]].new_state(flat, arguments(group))
    keys = MATRIX_RULES[group["rule"]].build(**arguments(group)).state_keys
    return {key: torch.zeros_like(flat) for key in keys}


def state_nbytes(numel: int, group: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the state of so many elements; asked of the rule itself, on a tensor without memory."""
    state = new_state(torch.empty(numel, dtype=dtype, device="meta"), group)
    return sum(tensor.numel() * tensor.itemsize for tensor in state.values())


# Muon and its variants in the registry: what an update costs, and which options it has.


def _muon_flops(shape: Shape, options: Mapping[str, Any]) -> int:
    count = len(segments(options["ns_coefficients"], options["ns_steps"], options["gram_restarts"]))
    return gram_flops(shape, options["ns_steps"], options["gram_aspect"], count)


def _second_moment_flops(shape: Shape, options: Mapping[str, Any]) -> int:
    return _muon_flops(shape, options) + SECOND_MOMENT_FLOPS * shape[0] * shape[1]


register_rule("muon", Muon, options=MuonOptions, cost=_muon_flops, work="Newton-Schulz", source="Keller Jordan 2024")
register_rule(
    "normuon",
    NorMuon,
    options=NorMuonOptions,
    cost=_second_moment_flops,
    work="Newton-Schulz, second moments by row",
    source="arXiv 2510.05491",
)
register_rule(
    "adamuon",
    AdaMuon,
    options=AdaMuonOptions,
    cost=_second_moment_flops,
    work="Newton-Schulz, second moments",
    source="arXiv 2507.11005",
)


# Optimizers of torch and of pytorch-optimizer as rules, by name or by the path of their class.
#
# ``torch_optimizer`` takes any class, ``{"name": "torch_optimizer", "class": "my_package.MyOptimizer", ...}``; the
# others
# are short for one.

Path = Callable[[Mapping[str, Any]], str]
ANY = "torch_optimizer"


def _given(options: Mapping[str, Any]) -> str:
    if "class" not in options:
        raise ValueError("expected 'class', the path of an optimizer's class, e.g. 'pytorch_optimizer.SOAP'")
    return path_of(options["class"])


def _model(path: Path, trial: Trial, *, with_class: bool, with_form: bool = False) -> ModelOf:
    def model(given: Mapping[str, Any], where: str) -> type[Options]:
        try:
            found = path(given)
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if where else str(error)) from error
        return checked_model(found, given, where, trial, with_class=with_class, with_form=with_form)

    return model


def _rule(path: Path, **options: Any) -> TorchOptimizer:
    return TorchOptimizer(class_named(path(options)), **optimizer_arguments(options))


def _flops(shape: Shape, options: Mapping[str, Any]) -> int:
    """SOAP's and Shampoo's by the options that only they have; of any other class as many as it has elements."""
    if {"precondition_frequency", "max_precondition_dim"} <= options.keys():
        return soap_flops(shape, options["precondition_frequency"], options["max_precondition_dim"])
    if "preconditioning_compute_steps" in options:
        return shampoo_flops(shape, options["preconditioning_compute_steps"], max(shape))  # it has no largest side
    return shape[0] * shape[1]


def _new_state(path: Path, flat: Tensor, options: Mapping[str, Any]) -> State:
    return elementwise_state(path(options), optimizer_arguments(options)).new(flat)


def _counters(path: Path, options: Mapping[str, Any]) -> Counters:
    return elementwise_state(path(options), optimizer_arguments(options)).counters


def _try_elementwise(path: str, options: Mapping[str, Any]) -> None:
    elementwise_state(path, optimizer_arguments(options))
    if is_cautious(options):
        try_cautious(path, optimizer_arguments(options))


def _adam_moments(flat: Tensor, options: Mapping[str, Any]) -> State:
    moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if options["amsgrad"] else [])
    step = torch.zeros((), device=flat.device if options.get("fused") else "cpu")  # as torch keeps its counter
    return {"step": step, **{key: torch.zeros_like(flat) for key in moments}}


def _always(path: str) -> Path:
    return lambda options: path


def _matrix(name: str, path: Path, source: str, work: str) -> None:
    model = _model(path, try_matrix, with_class=name == ANY)
    register_rule(name, partial(_rule, path), options=model, cost=_flops, work=work, source=source)


def _elementwise(name: str, path: Path, source: str) -> None:
    register_elementwise(
        name,
        lambda options: class_named(path(options)),
        options=_model(path, _try_elementwise, with_class=name == ELEMENTWISE[ANY], with_form=True),
        new_state=partial(_new_state, path),
        counters=partial(_counters, path),
        source=source,
    )


_matrix(ANY, _given, "the class", "update")
_matrix("soap", _always("pytorch_optimizer.SOAP"), "pytorch_optimizer.SOAP, arXiv 2409.11321", "SOAP")
_matrix("shampoo", _always("pytorch_optimizer.Shampoo"), "pytorch_optimizer.Shampoo, arXiv 1802.09568", "Shampoo")
register_elementwise(
    "adamw", torch.optim.AdamW, options=AdamWOptions, new_state=_adam_moments, source="torch.optim.AdamW"
)
_elementwise("lion", _always("pytorch_optimizer.Lion"), "pytorch_optimizer.Lion, arXiv 2302.06675")
_elementwise("sgd", _always("torch.optim.SGD"), "torch.optim.SGD")
_elementwise(ELEMENTWISE[ANY], _given, "the class")
