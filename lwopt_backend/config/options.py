"""Options as pydantic models: parsed, unknown keys with the nearest known one, other systems' names translated."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

DISTRIBUTION = "lwopt-backend"


def install_command(package: str, version: str = "") -> str:
    """The command that installs ``package``, by default in the versions that this project's extras require.

    It names the package itself and not the extra: ``pip install "lwopt-backend[hf]"`` would look for this project on an
    index, which is wrong for a checkout.
    """
    requirement = f"{package}{version}"
    if not version:
        try:
            found = [text.partition(";")[0].strip() for text in requires(DISTRIBUTION) or ()]
            requirement = {re.split(r"[^\w.-]", text)[0]: text for text in found}[package]
        except PackageNotFoundError:  # imported by path: the bare name
            pass
    return f"pip install {shlex.quote(requirement)}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, case aside, or None if nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def suggestion(name: str, known: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """A clause for an error message: the nearest known name, or all of them."""
    known = list(known)
    close = nearest(name, known)
    return f"did you mean {spelled(close)}?" if close else f"known: {', '.join(map(repr, known))}"


def glob_suggestion(glob: str, names: Iterable[str]) -> str:
    """A clause for an error message on a glob that matches none of ``names``."""
    names = list(names)
    close = nearest(glob, names)
    return f"did you mean {close!r}?" if close else f"names look like {(names or ['nothing'])[0]!r}"


# What other optimizers call otherwise: errors about unknown options and rules name ours.

# Options of torch, Keller Jordan's Muon, dion, Moonlight, DeepSpeed, Megatron and Hugging Face. A name of ours without
# a rule is the same in all rules; one with is of that rule alone.
OPTIONS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    **dict.fromkeys(("mu", "beta"), "momentum"),
    "use_nesterov": "nesterov",
    **dict.fromkeys(("backend_steps", "newton_schulz_steps", "num_ns_steps"), "ns_steps"),
    **dict.fromkeys(("coefficient_type", "ns_coeffs", "use_polar_express"), "ns_coefficients"),
    **dict.fromkeys(("adjust_lr", "scale_mode"), "adjust_lr_fn"),
    "cautious_wd": "weight_decay_form",
    "use_gram_newton_schulz": "ns_method",
    "fp32_matmul_prec": "ns_dtype",
    **dict.fromkeys(("betas", "beta1", "beta2"), "elementwise.betas"),
}
# Where others keep the options of both rules side by side, these words tell them apart: "muon_wd", "adam_beta1".
PREFIXES = {
    **dict.fromkeys(("matrix", "muon"), "matrix"),
    **dict.fromkeys(("elementwise", "scalar", "adam", "adamw"), "elementwise"),
}
PREFIXED = {"extra_scale_factor", *(name.rpartition(".")[2] for name in OPTIONS.values())}
RULES = {
    **dict.fromkeys(("adam", "torch_adam", "torch.optim.adamw", "torch_adamw", "fusedadam", "adam8bit"), "adamw"),
    **dict.fromkeys(("dist_muon", "muonwithauxadam", "torch.optim.muon"), "muon"),
}
# What has no counterpart: what to do.
ADVICE = {
    "torch_adam": "leave it out: what is not a matrix is trained by torch's AdamW, 'adamw', already",
    "adam_w_mode": "leave it out: AdamW's weight decay is decoupled",
    "bias_correction": "leave it out: AdamW corrects its averages",
    "fp32_optimizer_states": "leave it out: state has the dtype of the masters",
    **dict.fromkeys(
        ("max_grad_norm", "clip_grad"), "clip with gradient_clipping in ds_config.json, or with clip_grad_norm_"
    ),
    "gradient_clipping": "it stands beside the optimizer entry in ds_config.json; elsewhere call clip_grad_norm_",
    "use_muon": "the model's structure decides what is a matrix; 'include' and 'exclude' overrule it, by name",
    "algorithm": "the model's structure decides what is a matrix; 'include' and 'exclude' overrule it, by name",
    "muon_params": "pass the model; its structure decides what is a matrix, 'include' and 'exclude' overrule it",
    "adamw_params": "pass the model; its structure decides what is a matrix, 'include' and 'exclude' overrule it",
    "distributed_mesh": "leave it out: meshes are found from the model",
    "process_group": "leave it out: groups of ranks are found from the model, or are the engine's",
    "expert_params": "leave it out: experts are found from the mesh of their parameters, or are the engine's",
    "per_head_muon": "say how many heads a weight has: 'atoms': {'*.q_proj.weight': {'heads': 12}}",
    "num_heads": "say how many heads a weight has: 'atoms': {'*.q_proj.weight': {'heads': 12}}",
    "split_sizes": "say it by name: 'atoms': {'*.w_in.weight': {'split_sizes': [1024, 64]}}",
    "flatten": "say it by name: 'atoms': {'*.conv.weight': 'flatten'}",
}


def option_suggestion(name: str, known: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """A clause for an error message: our name for another optimizer's option ``name``, or the nearest known name.

    Known names are options of a section, or of a whole optimizer, where ``"adamw.betas"`` is one in a section.
    """
    known = list(known)
    if name.lower() in ADVICE:
        return ADVICE[name.lower()]
    meant = _meant(name.lower(), known)
    return f"did you mean {spelled(meant)}?" if meant else suggestion(name, known, spelled)


def rule_suggestion(name: str, known: Iterable[str], others: Iterable[str]) -> str:
    """``option_suggestion`` for the name of a rule. ``others`` are of the other kind, which cannot be used here."""
    ours = RULES.get(name.lower(), name.lower())
    if ours in others:
        return f"{ours!r} is a rule of the other kind; known here: {', '.join(map(repr, known))}"
    return suggestion(ours, known)


def is_foreign(name: str) -> bool:
    """Whether other optimizers have an option of that name, which has another name here, or no counterpart."""
    return _ours(name.lower()) is not None or name.lower() in ADVICE


def _ours(name: str) -> str | None:
    """Our name for another optimizer's option ``name``, with its rule if implied: ``"matrix.weight_decay"``."""
    prefix, _, rest = name.partition("_")
    key = OPTIONS.get(rest, rest).rpartition(".")[2]
    return f"{PREFIXES[prefix]}.{key}" if prefix in PREFIXES and key in PREFIXED else OPTIONS.get(name)


def _meant(name: str, known: list[str]) -> str | None:
    """Our name for another optimizer's option, if it is a known one."""
    rule, _, key = (_ours(name) or name).rpartition(".")
    of_sections = [candidate for candidate in known if candidate.endswith(f".{key}")]
    if rule == "elementwise":
        candidates = [f"elementwise_{key}", *(each for each in of_sections if each != f"matrix.{key}")]
    elif rule == "matrix":  # within a section there is nothing to say: it may be that of the other rule
        candidates = [key, f"matrix.{key}"] if any("." in each for each in known) else []
    else:
        candidates = [key, f"matrix.{key}", *of_sections]
    return next((candidate for candidate in candidates if candidate in known), None)


# Optimizer entries of ds_config.json that were written for DeepSpeed's Muon or for AdamW, in our words. So switching is
# one word, the type. What an entry says holds, defaults included; what cannot be meant here is an error.

OWN_SECTIONS = ("adamw", "matrix", "elementwise")  # with one of them, or none of the marks, an entry is ours
MUON_MARKS = ("muon_lr", "adam_lr", "ns_method", "per_head_muon")
ADAMW = ("lr", "betas", "eps", "weight_decay")
# Defaults of DeepSpeed 0.19's MuonWithAuxAdam, of its FusedAdam and CPUAdam, and torch's weight decay.
MUON_LR, MUON_ADAM_LR, MUON_BETAS, MUON_EPS = 0.02, 3e-4, (0.9, 0.95), 1e-10
ADAMW_LR, ADAMW_BETAS, ADAMW_EPS, TORCH_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
NS_METHODS: dict[str, dict[str, Any]] = {
    "gram": {"gram_aspect": 1.0, "gram_restarts": [2], "ns_dtype": "float32"},
    "standard": {},
}
CLIPS = "; gradient_clipping limits gradients here, not updates as there"
SCALED = "; 'match_rms_adamw' gives the updates of matrices the size of AdamW's, for which lr was chosen"
# Keys of theirs that say what is so anyway, and what to do about another value.
GRANTED = {
    "adam_w_mode": (True, "with the type LayerWise, 'elementwise' may be a torch_optimizer of class torch.optim.Adam"),
    "bias_correction": (True, "AdamW's averages are always corrected here"),
    "fp32_optimizer_states": (True, "state has the dtype of the masters here"),
    "per_head_muon": (False, ADVICE["per_head_muon"]),
}


def translated(given: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str | None]:
    """``given`` as options of LayerWiseMuon, and the line that says so; as it is, without a line, if it is ours.

    An entry is DeepSpeed's Muon's by ``muon_lr``, ``adam_lr``, ``per_head_muon``, by ``ns_method`` "gram" or
    "standard", or by ``momentum`` beside ``betas``; by ``betas`` otherwise it is AdamW's. Options of ours may stand in
    both, and win. Raises ValueError for a value without counterpart.
    """
    if any(section in given for section in OWN_SECTIONS):
        return dict(given), None
    ours = given.get("ns_method") not in (None, *NS_METHODS)
    marks = [key for key in MUON_MARKS if key in given and not (ours and key == "ns_method")]
    if not marks and "betas" not in given:
        return dict(given), None
    unfilled = [key for key in (*ADAMW, "muon_lr", "adam_lr", "momentum") if given.get(key) == "auto"]
    if unfilled:
        raise ValueError(
            f"{where}: {', '.join(unfilled)}: found 'auto', which only Hugging Face's Trainer fills in, for "
            f"{', '.join(ADAMW)} (Accelerate for lr and weight_decay); write values"
        )
    is_muon, rest = bool(marks) or "momentum" in given, dict(given)
    torch_adam = rest.pop("torch_adam", False)
    for key, (only, instead) in GRANTED.items():
        if rest.pop(key, only) != only:
            raise ValueError(f"{where}: {key} is {given[key]!r}, which has no counterpart; {instead}")
    options = _from_muon(rest) if is_muon else _from_adamw(rest, TORCH_DECAY if torch_adam else 0.0)
    whose, remark = ("DeepSpeed's Muon", CLIPS) if is_muon else ("AdamW", "" if "adjust_lr_fn" in given else SCALED)
    mark = (*marks, "betas")[0]
    return options, f"{where}: {mark!r} makes this an entry of {whose}; taken as {json.dumps(options)}{remark}"


def _from_muon(rest: dict[str, Any]) -> dict[str, Any]:
    shared, decay = rest.pop("lr", None), rest.pop("weight_decay", 0.0)
    muon_lr, adam_lr = rest.pop("muon_lr", shared), rest.pop("adam_lr", shared)
    method = NS_METHODS[rest.pop("ns_method", None) or "gram"] if rest.get("ns_method") in (None, *NS_METHODS) else {}
    adamw = {
        "lr": MUON_ADAM_LR if adam_lr is None else adam_lr,
        "betas": rest.pop("betas", MUON_BETAS),
        "eps": rest.pop("eps", MUON_EPS),
        "weight_decay": decay,
    }
    muon = {"lr": MUON_LR if muon_lr is None else muon_lr, "weight_decay": decay}
    return {**muon, **method, **rest, "adamw": adamw}


def _from_adamw(rest: dict[str, Any], decay: float) -> dict[str, Any]:
    defaults = {"lr": ADAMW_LR, "betas": ADAMW_BETAS, "eps": ADAMW_EPS, "weight_decay": decay}
    adamw = {key: rest.pop(key, defaults[key]) for key in ADAMW}
    adamw.update({key: rest.pop(key) for key in ("amsgrad", "foreach", "fused") if key in rest})
    shared = {key: adamw[key] for key in ("lr", "weight_decay")}
    return {**shared, "adjust_lr_fn": "match_rms_adamw", **rest, "adamw": adamw}


# What all options are made of. Strict: a number in quotes, or true for 1, is a slip that should be seen.
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Globs = Annotated[tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)]

# What pydantic calls otherwise than a configuration does, by its names of errors.
EXPECTED = {"tuple_type": "input should be a list", "dict_type": "input should be a mapping"}
NO_WORDS = ("float_type", "int_type", "tuple_type")
ONLY_HUGGING_FACE = (
    "which only Hugging Face's Trainer and Accelerate replace, where it stands beside the sections; write a value"
)


class Options(BaseModel):
    """Base of all options: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


M = TypeVar("M", bound=Options)


def option(default: Any, meaning: str, source: str = "this package") -> Any:
    """A field of an options model, with its description for ``lwopt rules``."""
    return Field(default, description=meaning, json_schema_extra={"source": source})


def parse(model: type[M], options: Mapping[str, Any], where: str) -> M:
    """Build ``model`` from ``options``. Raises ValueError with every wrong key, what was expected and found."""
    try:
        return model(**options)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors()]
    raise ValueError("\n  ".join([f"{where}: {len(problems)} wrong option(s)", *problems]))


def _problem(model: type[Options], detail: Mapping[str, Any]) -> str:
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] == "extra_forbidden":
        *sections, name = location
        for section in sections:
            model = _sections(model)[section]
        inside = [f"{section}.{key}" for section, options in _sections(model).items() for key in options.model_fields]
        return f"unknown key {key!r}; {option_suggestion(name, [*model.model_fields, *inside])}"
    expected = EXPECTED.get(detail["type"], f"{detail['msg'][0].lower()}{detail['msg'][1:]}")
    found = f"{key}: {expected}; found {detail['input']!r}"
    return f"{found}, {ONLY_HUGGING_FACE}" if detail["input"] == "auto" and detail["type"] in NO_WORDS else found


def _sections(model: type[Options]) -> dict[str, type[Options]]:
    """The options of a model that are sections with options of their own."""
    kinds = {key: field.annotation for key, field in model.model_fields.items()}
    return {key: kind for key, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Options)}
