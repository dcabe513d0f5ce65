"""What a conversion changes for Muon: which rows are orthogonalized together. Said in sentences, never silent."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.names.matching import Unit
from lwopt_backend.checkpoint.numbers import Numbers, qkv_of_fused, qkv_of_parts

MOMENTUM = "momentum_buffer"  # what Muon keeps; a parameter without it is not Muon's


def sentences(checkpoint: Checkpoint, units: Sequence[Unit], numbers: Numbers) -> list[str]:
    """What is orthogonalized otherwise after a conversion, and what sets it as it was. ``checkpoint`` is the source."""
    kept = [unit for unit in units if unit.rule.targets]
    trained = [unit for unit in kept if any(MOMENTUM in checkpoint.params[name].states for name in unit.names)]
    if not trained:
        return []
    groups: dict[str, list[Unit]] = {}
    for unit in trained:
        said = _sentence(checkpoint, unit, numbers)
        if said:
            groups.setdefault(said, []).append(unit)
    found = [f"{said} This holds for {_counted(same)}." for said, same in groups.items()]
    return [*_arguments(checkpoint.arguments), *_blockwise(checkpoint), *found]


def _arguments(arguments: Mapping[str, Any]) -> list[str]:
    muon = {key: value for key, value in sorted(arguments.items()) if key.startswith("muon_")}
    if not muon:
        return []
    listed = ", ".join(f"{key}={value!r}" for key, value in muon.items())
    return [f"Megatron's Muon ran with {listed}; they travel along in the checkpoint's arguments."]


def _blockwise(checkpoint: Checkpoint) -> list[str]:
    ranks, mode = checkpoint.world.get("tp", 1), checkpoint.arguments.get("muon_tp_mode")
    if ranks == 1 or mode != "blockwise":
        return []
    return [
        f"muon_tp_mode='blockwise': each of {ranks} tensor-parallel ranks orthogonalized its own part of a matrix; "
        "here whole matrices are."
    ]


def _sentence(checkpoint: Checkpoint, unit: Unit, numbers: Numbers) -> str | None:
    """Of one unit; the same for all layers, so that they can be counted."""
    source, kinds = unit.sources[0][0], set(unit.rule.do)
    split = checkpoint.arguments.get("muon_split_qkv")
    if "split_gate_up" in kinds:
        return (
            "Gate and up were one matrix, orthogonalized together (as Megatron does), and are separate parameters now: "
            "each is orthogonalized by itself, and no setting of 'atoms' joins parameters."
        )
    if "join_gate_up" in kinds:
        return _set("Gate and up were separate parameters and are one now.", unit, {"gate_up": "halves"})
    if "split_qkv" in kinds:
        told: dict[object, str] = {
            True: "muon_split_qkv=True orthogonalized each by itself too, so that nothing changes",
            False: "muon_split_qkv=False orthogonalized them together, which no setting of 'atoms' does",
        }
        unknown = "the arguments do not say whether they were orthogonalized together before (muon_split_qkv)"
        before = told.get(split, unknown)
        return f"q, k and v are separate parameters now, each orthogonalized by itself; {before}."
    if "join_qkv" in kinds:
        q, k = (checkpoint.params[name].shape[0] for name in unit.sources[0][:2])
        found = qkv_of_parts(numbers, q, k, source)
        division = {"qkv": list(found.sizes), "groups": found.groups}
        return _set("q, k and v were separate parameters and are one now.", unit, division)
    if checkpoint.names == "megatron-core" and source.endswith("linear_qkv.weight"):
        return _fused(checkpoint, unit, numbers)
    if checkpoint.names == "megatron-core" and unit.rule.targets[0].text.endswith("gate_up_proj"):
        return _set("Megatron orthogonalizes an expert's gate and up as one matrix.", unit, "stack")
    return None


def _fused(checkpoint: Checkpoint, unit: Unit, numbers: Numbers) -> str | None:
    """Of q, k and v that stay in one parameter."""
    split = checkpoint.arguments.get("muon_split_qkv")
    if split is None:
        return None
    if not split:
        return _set("muon_split_qkv=False orthogonalized q, k and v as one matrix.", unit, "whole")
    what = "muon_split_qkv=True orthogonalized q, k and v each by itself."
    try:
        return _set(what, unit, _division(checkpoint, unit, numbers))
    except CheckpointError:  # nothing is divided here, so that no number is needed
        return f"{what} 'atoms' can do the same with us, but how they lie is not known."


def _division(checkpoint: Checkpoint, unit: Unit, numbers: Numbers) -> dict[str, Any]:
    """How q, k and v lie in a parameter that stays fused; outputs, however it is stored."""
    name = unit.sources[0][0]
    found = qkv_of_fused(numbers, checkpoint.params[name].shape[0], name)
    blocks = "qkv_blocks" in unit.rule.do or ("qkv_to_layout" in unit.rule.do and numbers.qkv_layout == "blocks")
    if not blocks:
        return {"qkv": list(found.sizes), "groups": found.groups}
    ranks = numbers.qkv_ranks if "qkv_to_layout" in unit.rule.do else 1
    return {"qkv": [size * found.groups // ranks for size in found.sizes], "groups": ranks}


def _set(what: str, unit: Unit, division: Any) -> str:
    glob = re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", unit.rule.targets[0].glob(unit.values))  # also numbers in {*}
    return f'{what} Set "atoms": {json.dumps({glob: division})} for the same with us.'


def _counted(units: Sequence[Unit]) -> str:
    first = units[0].names[0]
    return repr(first) if len(units) == 1 else f"{len(units)} parameters, the first of which is {first!r}"


def check_gated(arguments: Mapping[str, Any], units: Sequence[Unit]) -> None:
    """Raises CheckpointError if a rule divides gate and up of a model that has none."""
    if arguments.get("swiglu") is not False or arguments.get("quick_geglu"):
        return
    for unit in units:
        if {"split_gate_up", "join_gate_up"} & set(unit.rule.do):
            raise CheckpointError(
                f"{unit.names[0]!r}: {unit.rule} divides gate and up, but the checkpoint's argument swiglu is False: "
                "its fc1 is one matrix; give the map of another family"
            )
