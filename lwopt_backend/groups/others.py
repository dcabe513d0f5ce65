"""What other optimizers write, in one table: the keys of their param groups and of their state, the form of their
momentum, and the rule here that keeps the same state.

A state dict does not say which class wrote it. Its param groups have every option of the class, so their keys tell
optimizers apart whose state has equal keys and another meaning. What no row describes is never loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lwopt_backend.config.options import suggestion

# Muon's momentum has two forms: a moving average of gradients, or their sum. Starting from zero, B <- mu B + (1 - mu) G
# equals 1 - mu times M <- mu M + G, as long as mu does not change. If mu was changed during a run, no factor is exact;
# the current mu's factor is right for the gradients since the change.

Form = Literal["ema", "sum"]
Group = Mapping[str, Any]
Options = Callable[[Group, Mapping[str, Any]], dict[str, Any]]
BUFFER = "momentum_buffer"
MOMENTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"}


def factor(momentum: float, source: str, target: str) -> float:
    """The factor from a buffer of form ``source`` to one of ``target``. Raises ValueError for an unknown form, and for
    a ``momentum`` outside [0, 1)."""
    check_form("source", source)
    check_form("target", target)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum: expected a number in [0, 1), found {momentum!r}")
    if source == target:
        return 1.0
    return 1 - momentum if target == "ema" else 1 / (1 - momentum)


def check_form(what: str, form: str) -> None:
    """Raises ValueError for an unknown form, with the nearest known one."""
    if form not in get_args(Form):
        raise ValueError(f"{what}: unknown form of momentum {form!r}; {suggestion(str(form), get_args(Form))}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """How an optimizer stores the state that a rule here keeps: the momentum of ``rule``, and Adam's moments.

    Keys of param groups tell optimizers apart that store other things under one key. ``marks`` are those that it may
    have, of all marks here and in ``OTHERS``; it has all that it ``needs``, of alternatives a|b one, where it keeps
    momentum, and ``adam_needs`` where it keeps Adam's moments. Where nobody says who wrote a state, its groups must
    have all of ``tells``, or ``adam_tells``, and none of ``without``; empty: it is never recognised. ``only`` is the
    system in whose checkpoints alone it is.

    ``form`` is that of the momentum; None: its param groups have it as ``momentum_form``. ``momentum`` are the keys of
    the decay rate in param groups; ``buffer`` is the key of the momentum, ``moments`` are Adam's keys by this
    package's; ``step`` is the key of the counter, in the param group if ``counts_in_group``. State may also have
    ``flags``, which say nothing more. ``options`` makes the rule's options from a param group and a checkpoint's
    arguments, and raises ValueError if they have no counterpart.
    """

    rule: str = "muon"
    form: Form | None = "ema"
    marks: str
    needs: str = ""
    adam_needs: str = "weight_decay"
    tells: str = ""
    adam_tells: str = ""
    without: str = ""
    only: str = ""
    momentum: tuple[str, ...] = ("momentum",)
    buffer: str = BUFFER
    moments: Mapping[str, str] = field(default_factory=lambda: MOMENTS)
    step: str = "step"
    counts_in_group: bool = False
    flags: tuple[str, ...] = ()
    options: Options

    def is_adams(self, state: Collection[str]) -> bool:
        """Whether a parameter's state has Adam's second moments."""
        return self.moments.get("exp_avg_sq") in state

    def keys(self, state: Collection[str]) -> dict[str, str]:
        """This package's keys of a parameter's state, the counter's aside, each with the optimizer's."""
        if self.is_adams(state):
            return {ours: theirs for ours, theirs in self.moments.items() if theirs in state}
        return {"exp_avg" if self.rule == "lion" else BUFFER: self.buffer}

    def problem(self, name: str, state: Collection[str], group: Group) -> str | None:
        """What shows that another optimizer than this, ``name``, wrote a parameter's state in a param group."""
        adams = self.is_adams(state)
        needed = [self.moments["exp_avg"], self.moments["exp_avg_sq"]] if adams else [self.buffer]
        counted = self.step if adams or self.rule == "lion" else self.buffer
        known = {*needed, *self.flags, counted, *(self.moments.values() if adams else ())}
        if unknown := [key for key in state if key not in known]:
            return f"has {', '.join(map(repr, unknown))} in its state, which {name!r} does not write"
        if lacking := [key for key in needed if key not in state]:
            return f"has no {lacking[0]!r} in its state, only {list(state)}"
        others = MARKS - set(self.marks.split())
        if foreign := [key for key in group if key in others]:
            return f"is in a param group with {foreign[0]!r}, which {name!r} does not write"
        for wanted in (self.adam_needs if adams else self.needs).split():
            if not any(key in group for key in wanted.split("|")):
                either = " or ".join(map(repr, wanted.split("|")))
                return f"is in a param group without {either}, which {name!r} writes"
        return None


def _taken(keys: str, **constant: Any) -> Options:
    """Options of a param group; one that it lacks keeps this package's default."""

    def options(group: Group, _: Mapping[str, Any]) -> dict[str, Any]:
        return {**{key: group[key] for key in keys.split() if group.get(key) is not None}, **constant}

    return options


def _of_adam(group: Group, arguments: Mapping[str, Any]) -> dict[str, Any]:
    of_deepspeed = ((arguments.get("ds_config") or {}).get("optimizer") or {}).get("params") or {}
    decoupled = group.get("decoupled_weight_decay", of_deepspeed.get("adam_w_mode", True))
    if not decoupled and group.get("weight_decay"):
        raise ValueError("expected decoupled weight decay, found an Adam that adds it to the gradient")
    if not group.get("bias_correction", True) or group.get("maximize"):
        raise ValueError("expected bias correction and no maximize, found an Adam that differs")
    return _taken("lr betas eps weight_decay amsgrad")(group, arguments)


def _of_lion(group: Group, _: Mapping[str, Any]) -> dict[str, Any]:
    if not group.get("weight_decouple", True) or group.get("fixed_decay") or group.get("maximize"):
        raise ValueError("expected decoupled weight decay and no maximize, found a Lion that differs")
    return {key: group[key] for key in ("lr", "betas", "weight_decay") if key in group}


def _of_sgd(group: Group, _: Mapping[str, Any]) -> dict[str, Any]:
    if group.get("maximize"):
        raise ValueError("expected no maximize, found an SGD that differs")
    return {key: group[key] for key in ("lr", "momentum", "dampening", "weight_decay", "nesterov") if key in group}


_MUONS = "lr momentum weight_decay"
_torchs = _taken(f"{_MUONS} nesterov ns_coefficients eps ns_steps adjust_lr_fn")
_keller = _taken(f"{_MUONS} nesterov ns_steps")


def _keller_2024(group: Group, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"weight_decay": 0.0, **_keller(group, arguments)}


def _of_use_muon(group: Group, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's, and Keller Jordan's since June 2025, whose groups are the same."""
    of_deepspeed = ((arguments.get("ds_config") or {}).get("optimizer") or {}).get("params")
    if of_deepspeed is None:
        return _taken(_MUONS)(group, arguments)
    if of_deepspeed.get("per_head_muon"):
        raise ValueError("per_head_muon orthogonalized each head; set 'per_head' (docs/migration.md)")
    if of_deepspeed.get("ns_method", "gram") == "standard":
        return _taken(_MUONS)(group, arguments)
    return _taken(_MUONS, ns_dtype="float32", gram_aspect=1.0, gram_restarts=(2,))(group, arguments)


def _of_pytorch_optimizer(group: Group, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if group.get("ns_method") != "newton_schulz":
        raise ValueError("ns_method has no counterpart by name (docs/migration.md)")
    triples = [*map(tuple, group["ns_coeffs"])]
    coefficients = {"ns_coefficients": triples[0] if len(triples) == 1 else triples}
    adjust = {"adjust_lr_fn": "match_rms_adamw"} if group.get("use_adjusted_lr") else {}
    form = {} if group.get("weight_decouple", True) else {"weight_decay_form": "coupled"}
    return {**_keller(group, arguments), **coefficients, **adjust, **form}


_MEGATRON = {  # options here, and Megatron's arguments for them, some with older names
    "nesterov": ("muon_nesterov", "muon_use_nesterov"),
    "adjust_lr_fn": ("muon_scale_mode",),
    "extra_scale_factor": ("muon_extra_scale_factor",),
    "ns_steps": ("muon_num_ns_steps",),
}


def _of_megatron(group: Group, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Emerging-Optimizers' Muon, most of whose options Megatron keeps as arguments, not in param groups."""
    found: dict[str, Any] = {"eps": 1e-15}
    for ours, theirs in _MEGATRON.items():
        known = [arguments[key] for key in theirs if arguments.get(key) is not None]
        if not known:
            raise ValueError(f"the checkpoint's arguments lack {theirs[0]}")
        found[ours] = known[0]
    table = arguments.get("muon_coefficient_type", "quintic")  # the only table in versions without the argument
    if table not in ("simple", "quintic"):
        raise ValueError(f"muon_coefficient_type={table!r} has no counterpart by name; see docs/migration.md")
    exact = arguments.get("muon_fp32_matmul_prec", "medium") != "medium"
    rates = {"lr": group.get("lr"), "weight_decay": group.get("weight_decay")}
    rates["momentum"] = group.get("momentum", group.get("momentum_beta"))
    return {**rates, **found, "ns_coefficients": table, "ns_dtype": "float32" if exact else "bfloat16"}


def _moonlight(group: Group, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**_keller({**group, "weight_decay": group.get("wd")}, arguments), "adjust_lr_fn": "match_rms_adamw"}


def _elsewhere(group: Group, _: Mapping[str, Any]) -> dict[str, Any]:
    raise ValueError("its settings are not all in its param groups; docs/migration.md has them")


_JORDANS_ADAM = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
_OLDER: dict[str, Any] = dict(moments=_JORDANS_ADAM, flags=("use_muon",))
SOURCES: dict[str, Source] = {
    "torch.optim.Muon": Source(
        marks="weight_decay adjust_lr_fn ns_coefficients",
        needs="adjust_lr_fn",
        tells="lr weight_decay momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn",
        options=_torchs,
    ),
    # And Adam. RAdam has the same moments, and no amsgrad.
    "torch.optim.AdamW": Source(
        marks="weight_decay",
        adam_needs="",
        adam_tells="lr betas eps weight_decay amsgrad|decoupled_weight_decay",
        buffer="",
        options=_of_adam,
    ),
    # From June 2025 on; from February to May 2025; before, when the average was a sum.
    "keller_jordan": Source(
        marks="weight_decay use_muon update_buffer",
        needs="weight_decay momentum",
        tells="lr momentum weight_decay use_muon",
        adam_tells="lr betas eps weight_decay use_muon",
        options=_of_use_muon,
    ),
    "keller_jordan_2025": Source(
        marks="weight_decay adamw_betas update_buffer",
        needs="update_buffer",
        adam_needs="update_buffer",
        tells="lr weight_decay momentum nesterov ns_steps update_buffer",
        options=_keller,
        **_OLDER,
    ),
    "keller_jordan_2024": Source(
        form="sum",
        marks="adamw_betas",
        needs="ns_steps",
        adam_needs="ns_steps",
        tells="lr momentum nesterov ns_steps",
        options=_keller_2024,
        **_OLDER,
    ),
    "moonlight": Source(
        form="sum",
        marks="adamw_betas wd",
        needs="wd",
        adam_needs="wd",
        tells="lr wd momentum nesterov ns_steps",
        options=_moonlight,
        **_OLDER,
    ),
    "dion": Source(
        form="sum",
        marks="weight_decay algorithm mu",
        needs="algorithm",
        adam_needs="algorithm",
        momentum=("mu",),
        buffer="momentum",
        moments={"exp_avg": "momentum", "exp_avg_sq": "variance"},
        step="step_dev",
        counts_in_group=True,
        options=_elsewhere,
    ),
    "deepspeed": Source(
        marks="weight_decay use_muon",
        needs="use_muon",
        adam_tells="lr betas eps weight_decay bias_correction",  # its own Adams, apex's, Transformer Engine's
        counts_in_group=True,
        flags=("master_param",),
        options=_of_adam,
    ),
    "megatron": Source(
        marks="weight_decay",
        needs="weight_decay momentum|momentum_beta",
        tells="lr weight_decay momentum|momentum_beta",
        adam_tells="lr betas eps weight_decay",
        only="megatron",
        momentum=("momentum", "momentum_beta"),  # Emerging-Optimizers 0.1 says momentum_beta
        counts_in_group=True,
        flags=("master_param",),  # of Transformer Engine's Adam
        options=_of_megatron,
    ),
    "pytorch_optimizer": Source(
        marks="weight_decay use_muon weight_decouple",
        needs="use_muon",
        adam_needs="use_muon",
        tells="lr momentum weight_decay weight_decouple use_muon ns_steps ns_coeffs ns_method",
        adam_tells="lr betas eps weight_decay weight_decouple use_muon",
        counts_in_group=True,
        options=_of_pytorch_optimizer,
    ),
    "lwopt_backend": Source(
        form=None,
        marks="weight_decay adjust_lr_fn ns_coefficients momentum_form rule",
        needs="momentum_form",
        options=_elsewhere,
    ),
}
# State for element-wise rules here, of optimizers that are no Muon; not read by ``from_checkpoint``.
ELEMENTWISE = {
    "torch.optim.SGD": Source(
        rule="sgd",
        form="sum",
        marks="weight_decay dampening",
        tells="lr momentum dampening weight_decay nesterov maximize|wd_after_momentum",  # torch's; apex's FusedSGD
        options=_of_sgd,
    ),
    "Lion": Source(  # DeepSpeedCPULion has second moments as well, which it never uses
        rule="lion",
        marks="weight_decay weight_decouple fixed_decay",
        tells="lr betas weight_decay",
        without="eps",
        buffer="exp_avg",
        moments={},
        counts_in_group=True,
        flags=("exp_avg_sq",),
        options=_of_lion,
    ),
}
OTHERS = {  # optimizers without counterpart, with keys of their state or of their param groups that no source has
    "torch.optim.SGD, whose momentum is a sum": "dampening",
    "muonium, whose momentum is a sum": "lr_ratio orthogonalization_strategy",
    "pytorch_optimizer's MuonClip, whose momentum is a sum": "qk_clip_threshold",
    "SOAP, whose second moments are in another basis": "GG Q_L Q_R shampoo_beta",
    "LaProp, whose momentum is of scaled gradients": "exp_avg_lr_1 correct_bias",
    "NorMuon or AdaMuon, whose second moments have no counterpart": (
        "variance_neuron second_momentum_buffer moment2_buffer second_moment"
    ),
    "torch.optim.NAdam, whose steps go with a product of momenta": "momentum_decay mu_product",
    "torch.optim.RMSprop, whose momentum is of scaled gradients": "square_avg centered",
    "torch.optim.Adagrad, whose sums of squares have no counterpart": "lr_decay",
    "torch.optim.Adadelta, whose averages of updates have no counterpart": "rho acc_delta",
    "torch.optim.Adamax, whose largest gradients have no counterpart": "exp_inf",
    "torch.optim.Adafactor, whose second moments are factors": "beta2_decay row_var",
    "torch.optim.ASGD, whose averages of weights have no counterpart": "lambd ax",
    "torch.optim.Rprop, whose step sizes have no counterpart": "etas",
    "LAMB or LARS, which scale steps by layer": "max_coeff min_coeff trust_ratio trust_coefficient",  # and DeepSpeed's
    "DeepSpeed's 1-bit or 0/1 Adam, with errors of compression": "worker_error server_error",  # from its source
    "a class of pytorch_optimizer": "fixed_decay",
}
MARKS = {
    mark
    for known in (*(kind.marks for kind in (*SOURCES.values(), *ELEMENTWISE.values())), *OTHERS.values())
    for mark in known.split()
}


def may_be(state: Collection[str], group: Group) -> str:
    """A clause on who wrote a parameter's state."""
    fitting = [source for source, kind in SOURCES.items() if kind.problem(source, state, group) is None]
    if fitting:
        return f"the source may be one of {fitting}"
    seen = {*state, *group}
    others = [other for other, keys in OTHERS.items() if seen & set(keys.split())]
    return f"it may be that of {others[0]}" if others else "no source writes such a state"


@dataclass(frozen=True)
class Told:
    """Who wrote a param group and its parameters' state, ``name``, and what its ``source`` says of it; the state is
    ``adams``, or that of the source's rule."""

    name: str
    source: Source
    adams: bool

    @property
    def rule(self) -> str:
        return "adamw" if self.adams else self.source.rule

    def options(self, group: Group, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The rule's options. Raises ValueError if they have no counterpart."""
        return (_of_adam if self.adams else self.source.options)(group, arguments)

    def scale(self, group: Group, form: str) -> float:
        """The factor of the momentum from the form in which it was saved to ``form``. Raises ValueError without a
        decay rate, or for one of 1 or more."""
        saved = self.source.form
        if self.rule != "muon" or saved is None or saved == form:
            return 1.0
        rates = [float(group[key]) for key in self.source.momentum if key in group]
        if not rates:
            raise ValueError(f"expected a momentum in [0, 1), to convert {saved!r} to {form!r}, found none")
        return factor(rates[0], saved, form)


def rule_of_saved(state: Collection[str], group: Group) -> str:
    """The rule here that keeps the state with these keys as another optimizer wrote it, or words that are no rule.
    Without ``state``, whether the group is an Adam's."""
    try:
        found = told({*state} - {"fp32", "step"} or {"exp_avg", "exp_avg_sq"}, group, {})
    except ValueError:
        return f"another optimizer's, with the options {sorted(map(str, group))}"
    return "adamw" if found.rule == "adamw" else f"{found.name}'s, which lwopt convert --to dcp makes one of these"


def told(state: Collection[str], group: Group, arguments: Mapping[str, Any]) -> Told:
    """Who wrote a param group, and the state of its parameters with these keys. ``arguments`` are how the checkpoint
    was trained. Raises ValueError, with a guess, for what no row of the table describes: it is never loaded."""
    optimizer = arguments.get("optimizer")
    system = "megatron" if isinstance(optimizer, str) else ""
    for name, source in {**SOURCES, **ELEMENTWISE}.items():
        adams = source.is_adams(state)
        tells = source.adam_tells if adams else source.tells
        has_all = all(any(key in group for key in wanted.split("|")) for wanted in tells.split())
        if not tells or not has_all or any(key in group for key in source.without.split()):
            continue
        if source.only not in ("", system) or source.only and not adams and "muon" not in str(optimizer):
            continue
        if source.problem(name, state, group) is None:
            return Told(name, source, adams)
    raise ValueError(
        f"expected the state of a known optimizer, found the state {sorted(state)} and the options {sorted(group)}; "
        f"{may_be(state, group)}"
    )
