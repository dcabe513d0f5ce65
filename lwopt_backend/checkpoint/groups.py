"""Param groups of other optimizers with the options of ours, which torch's DCP asks for by their names.

What is what in Megatron and DeepSpeed is told in docs/migration.md. Torch's own options are kept and filled up, so that
torch.optim.AdamW finds its own, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint
from lwopt_backend.linked_rates import OWN_RATES
from lwopt_backend.registry import MATRIX_RULES, options_of, rule_named
from lwopt_backend.torch_adamw import torchs

MUON, ADAMW = "muon", "adamw"
MOMENTS = {"exp_avg", "exp_avg_sq"}
_MEGATRON = {  # our options by Megatron's arguments, of which some have older names
    "nesterov": ("muon_nesterov", "muon_use_nesterov"),
    "adjust_lr_fn": ("muon_scale_mode",),
    "extra_scale_factor": ("muon_extra_scale_factor",),
    "ns_steps": ("muon_num_ns_steps",),
}
_PLACES = ("members", "from_group", "overrides")  # in what an engine of ours saved; no options


class _UnknownError(ValueError):
    """Why a group is not translated."""


def as_ours(checkpoint: Checkpoint) -> Checkpoint:
    """The same with groups as our optimizers have them, with ``rule``; those of matrix rules are first.

    A group that no rule of ours follows, or whose options are not known, stays as it is, and the notes say why: an
    optimizer of ours then does not load it, for it misses its options.
    """
    found, notes = translated(checkpoint)
    order = sorted(range(len(found)), key=lambda number: found[number].get("rule") not in MATRIX_RULES)
    place: dict[int | None, int] = {number: position for position, number in enumerate(order)}
    params = {
        name: dataclasses.replace(param, group=place.get(param.group, param.group))
        for name, param in checkpoint.params.items()
    }
    return dataclasses.replace(
        checkpoint,
        params=params,
        groups=tuple(found[number] for number in order),
        notes=(*checkpoint.notes, *notes),
    )


def translated(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups in their order, with ``rule`` where they have a counterpart; sentences on those that have none."""
    members: dict[int, set[str]] = {}
    for param in checkpoint.params.values():
        if param.group is not None:
            members.setdefault(param.group, set()).update(set(param.states) - {MASTER})
    found, notes = [], []
    for number, group in enumerate(checkpoint.groups):
        try:
            found.append(_translated(group, members.get(number, set()), checkpoint))
        except ValueError as error:
            found.append(dict(group))
            if number in members:
                notes.append(f"param group {number} has no options of ours: {error}")
    return found, notes


def _translated(group: Mapping[str, Any], states: set[str], checkpoint: Checkpoint) -> dict[str, Any]:
    """``states`` are the keys of its parameters' state. Raises ValueError with the reason why not."""
    if "rule" in group:
        peak = _peak(checkpoint)
        first = {} if peak is None else {"initial_lr": peak}
        return {**_filled(group), **first, **{key: value for key, value in group.items() if key not in _PLACES}}
    if "betas" in group and states >= MOMENTS:
        options = _adamw(group, checkpoint.arguments)
        kept = {**torchs(), **_without_none(group)}
    elif states == {"momentum_buffer"}:
        options, kept = _muon(group, checkpoint.arguments), dict(group)
    else:
        raise _UnknownError(f"none of our rules keeps {sorted(states)} with the options {sorted(group)}")
    rate = {} if (start := _first_rate(group, checkpoint)) is None else {"initial_lr": start}
    return {OWN_RATES: False, **kept, **options, **rate}


def _filled(group: Mapping[str, Any]) -> dict[str, Any]:
    """What groups of this rule may have and this one lacks, because an engine does not need it or it is older."""
    try:
        fields = rule_named(group["rule"]).model(group, "").model_fields
    except ValueError:  # a rule or a class that is not here
        fields = {}
    options = {k: f.get_default(call_default_factory=True) for k, f in fields.items() if not f.is_required()}
    return {OWN_RATES: False, **(torchs() if group["rule"] == ADAMW else {}), **options}


def _first_rate(group: Mapping[str, Any], checkpoint: Checkpoint) -> float | None:
    """What a schedule multiplies: torch's schedulers keep it in the group."""
    found: float | None = group.get("initial_lr", group.get("max_lr"))
    if found is not None:
        return found
    return group.get("lr") if checkpoint.scheduler is None else _peak(checkpoint)


def _peak(checkpoint: Checkpoint) -> float | None:
    """The rate to which a schedule of DeepSpeed's warms up, as it was configured: it has no rates of its own."""
    schedule = (checkpoint.arguments.get("ds_config") or {}).get("scheduler") or {}
    peak = (schedule.get("params") or {}).get("warmup_max_lr")
    is_theirs = "last_batch_iteration" in (checkpoint.scheduler or {})
    return float(peak) if is_theirs and isinstance(peak, (int, float)) else None


def _without_none(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if value is not None}


def _adamw(group: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    of_deepspeed = _of_ds_config(arguments)
    decoupled = group.get("decoupled_weight_decay", of_deepspeed.get("adam_w_mode", True))
    if not decoupled and group.get("weight_decay"):
        raise _UnknownError("its Adam adds the weight decay to the gradient, which our AdamW does not")
    if not group.get("bias_correction", True) or group.get("maximize"):
        raise _UnknownError("its Adam has no bias correction, or maximizes, which our AdamW does not")
    wanted = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return _checked(ADAMW, {key: group[key] for key in wanted if group.get(key) is not None})


def _muon(group: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    if "use_muon" in group:
        more = _of_deepspeed(_of_ds_config(arguments))
    elif "muon" in str(arguments.get("optimizer")):
        more = _of_megatron(arguments)
    elif "ns_coefficients" in group:  # torch.optim.Muon's groups say it all
        names = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        more = {key: group[key] for key in names if key in group}
    else:
        raise _UnknownError(f"whose momentum it is cannot be told from its options, {sorted(group)}")
    momentum = group.get("momentum", group.get("momentum_beta"))
    needed = {"lr": group.get("lr"), "weight_decay": group.get("weight_decay"), "momentum": momentum}
    missing = [key for key, value in needed.items() if value is None]
    if missing:
        raise _UnknownError(f"it has no {missing[0]}, only {sorted(group)}")
    return _checked(MUON, {**needed, **more})


def _of_megatron(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Emerging-Optimizers' Muon; what is no param group's option there is an argument."""
    found: dict[str, Any] = {"eps": 1e-15}
    for ours, theirs in _MEGATRON.items():
        known = [arguments[key] for key in theirs if arguments.get(key) is not None]
        if not known:
            raise _UnknownError(f"the checkpoint's arguments lack {theirs[0]}")
        found[ours] = known[0]
    table = arguments.get("muon_coefficient_type", "quintic")  # the only one before it was an argument
    if table not in ("simple", "quintic"):
        raise _UnknownError(f"muon_coefficient_type={table!r} has no counterpart by name; see docs/migration.md")
    exact = arguments.get("muon_fp32_matmul_prec", "medium") != "medium"
    return {**found, "ns_coefficients": table, "ns_dtype": "float32" if exact else "bfloat16"}


def _of_deepspeed(params: Mapping[str, Any]) -> dict[str, Any]:
    if params.get("per_head_muon"):
        raise _UnknownError("per_head_muon orthogonalized heads by themselves; set 'atoms', and see docs/migration.md")
    if params.get("ns_method", "gram") == "standard":
        return {}
    return {"ns_dtype": "float32", "gram_aspect": 1.0, "gram_restarts": (2,)}


def _of_ds_config(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of DeepSpeed's optimizer, as they were configured."""
    optimizer = (arguments.get("ds_config") or {}).get("optimizer") or {}
    return optimizer.get("params") or {}


def _checked(rule: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"rule": rule, **options_of(rule, given, f"a group of {rule}").model_dump()}
