"""Optimizer entries of ds_config.json that were written for DeepSpeed's Muon or for AdamW, in our words.

So switching is one word, the type. What an entry says holds, defaults included; what is taken as what is said once, and
what cannot be meant here is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lwopt_backend.foreign_names import ADVICE

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

    An entry is DeepSpeed's Muon's by ``muon_lr``, ``adam_lr``, ``ns_method``, ``per_head_muon``, or by ``momentum``
    beside ``betas``; by ``betas`` otherwise it is AdamW's. Options of ours may stand in both, and win. Raises
    ValueError for a value without counterpart.
    """
    if any(section in given for section in OWN_SECTIONS):
        return dict(given), None
    marks = [key for key in MUON_MARKS if key in given]
    if not marks and "betas" not in given:
        return dict(given), None
    _check_filled(given, where)
    is_muon, rest = bool(marks) or "momentum" in given, dict(given)
    torch_adam = rest.pop("torch_adam", False)
    for key, (only, instead) in GRANTED.items():
        if rest.pop(key, only) != only:
            raise ValueError(f"{where}: {key} is {given[key]!r}, which has no counterpart; {instead}")
    options = _from_muon(rest, where) if is_muon else _from_adamw(rest, TORCH_DECAY if torch_adam else 0.0)
    whose, remark = ("DeepSpeed's Muon", CLIPS) if is_muon else ("AdamW", "" if "adjust_lr_fn" in given else SCALED)
    mark = (*marks, "betas")[0]
    return options, f"{where}: {mark!r} makes this an entry of {whose}; taken as {json.dumps(options)}{remark}"


def _check_filled(given: Mapping[str, Any], where: str) -> None:
    unfilled = [key for key in (*ADAMW, "muon_lr", "adam_lr", "momentum") if given.get(key) == "auto"]
    if unfilled:
        raise ValueError(
            f"{where}: {', '.join(unfilled)}: found 'auto', which only Hugging Face's Trainer fills in, for "
            f"{', '.join(ADAMW)} (Accelerate for lr and weight_decay); write values"
        )


def _from_muon(rest: dict[str, Any], where: str) -> dict[str, Any]:
    shared, decay = rest.pop("lr", None), rest.pop("weight_decay", 0.0)
    muon_lr, adam_lr = rest.pop("muon_lr", shared), rest.pop("adam_lr", shared)
    method = rest.pop("ns_method", None)
    if method not in (None, *NS_METHODS):
        raise ValueError(f"{where}: ns_method: expected {' or '.join(map(repr, NS_METHODS))}; found {method!r}")
    adamw = {
        "lr": MUON_ADAM_LR if adam_lr is None else adam_lr,
        "betas": rest.pop("betas", MUON_BETAS),
        "eps": rest.pop("eps", MUON_EPS),
        "weight_decay": decay,
    }
    muon = {"lr": MUON_LR if muon_lr is None else muon_lr, "weight_decay": decay}
    return {**muon, **NS_METHODS[method or "gram"], **rest, "adamw": adamw}


def _from_adamw(rest: dict[str, Any], decay: float) -> dict[str, Any]:
    defaults = {"lr": ADAMW_LR, "betas": ADAMW_BETAS, "eps": ADAMW_EPS, "weight_decay": decay}
    adamw = {key: rest.pop(key, defaults[key]) for key in ADAMW}
    adamw.update({key: rest.pop(key) for key in ("amsgrad", "foreach", "fused") if key in rest})
    shared = {key: adamw[key] for key in ("lr", "weight_decay")}
    return {**shared, "adjust_lr_fn": "match_rms_adamw", **rest, "adamw": adamw}
