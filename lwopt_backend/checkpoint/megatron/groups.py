"""Which param group of Megatron's optimizers a parameter is in, by the rules that made the groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.files.plain_data import counter, plain
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron import names as naming

EMBEDDINGS = (naming.EMBEDDING, naming.OUTPUT)  # "is_embedding_or_output_parameter"
_Kind = tuple[bool, bool, bool, bool]  # is a sharded expert, a matrix's optimizer, has weight decay, has the usual lr


def groups_of(
    shapes: Mapping[str, Sequence[int]], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> dict[str, int | None]:
    """The number of each parameter's group; None where no group, or more than one, answers its description.

    A group says whether it is of sharded experts, of Muon (the one without ``betas``, if others have them), with weight
    decay (``wd_mult``), and with the usual learning rate. Muon gets the matrices but word
    embeddings and output layer, among them learned positions and routers (``get_megatron_muon_optimizer`` in
    megatron/core/optimizer/muon.py, ``_get_param_groups`` and ``get_standard_config_overrides`` beside it).
    """
    kinds = [_kind_of_group(group) for group in groups]
    if len({matrix for _, matrix, _, _ in kinds}) == 1:  # one optimizer for all
        kinds = [(expert, False, decay, usual) for expert, _, decay, usual in kinds]
        mixed = False
    else:
        mixed = True
    found: dict[str, int | None] = {}
    for name, shape in shapes.items():
        wanted = _kind_of(name, len(shape), arguments, mixed=mixed)
        numbers = [number for number, kind in enumerate(kinds) if kind == wanted]
        found[name] = numbers[0] if len(numbers) == 1 else None
    return found


def names_by_group(
    weights: Mapping[str, LazyTensor], groups: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any], where: str
) -> list[list[str]]:
    """The names in each group, in module order, that of ``weights``. Raises CheckpointError if it cannot be told."""
    found: list[list[str]] = [[] for _ in groups]
    for name, number in groups_of({name: w.shape for name, w in weights.items()}, groups, arguments).items():
        if number is None:
            raise CheckpointError(
                f"{where}: which of {len(groups)} param groups has {name} cannot be told from their options; save this "
                "checkpoint in the torch_dist format"
            )
        found[number].append(name)
    return found


def common_groups(ranks: Sequence[Sequence[Mapping[str, Any]]], where: str) -> tuple[dict[str, Any], ...]:
    """The groups' options as plain data, from the ranks' own: of each group from a rank that has parameters in it.

    Elsewhere counters in it may stand still. Raises CheckpointError if the ranks have not the same number of groups.
    """
    if len({len(groups) for groups in ranks}) > 1:
        raise CheckpointError(
            f"{where}: expected the same param groups on all ranks, found {[len(groups) for groups in ranks]} of them; "
            "the ranks' files are of different checkpoints: copy them again"
        )
    found = []
    for copies in zip(*ranks):
        group = next((copy for copy in copies if copy.get("params", True)), copies[0])
        found.append({key: plain(value) for key, value in group.items() if key != "params"})
    return tuple(found)


def step_of(groups: Sequence[Mapping[str, Any]], number: int | None) -> float | None:
    """How many steps a parameter of Adam's made: as its group says, or all of Adam's if its group is not known."""
    steps = {
        counter(group.get("step")) for group in (groups if number is None else [groups[number]]) if "betas" in group
    }
    step = steps.pop() if len(steps) == 1 else None
    return None if step is None else float(step)


def expert_groups(groups: Iterable[Mapping[str, Any]]) -> frozenset[int]:
    """The numbers of the groups of sharded experts."""
    return frozenset(number for number, group in enumerate(groups) if group.get("is_expert_parallel", False))


def is_sharded_expert(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether other ranks have other experts in its place."""
    return naming.is_expert(name) and int(arguments.get("expert_model_parallel_size") or 1) > 1


def _kind_of_group(group: Mapping[str, Any]) -> _Kind:
    usual = bool(group.get("default_config", True)) and not group.get("is_decoupled_lr", False)
    return (
        bool(group.get("is_expert_parallel", False)),
        "betas" not in group,
        group.get("wd_mult", 1.0) != 0,
        usual,
    )


def _kind_of(name: str, dims: int, arguments: Mapping[str, Any], *, mixed: bool) -> _Kind:
    matrix = mixed and dims == 2 and name not in EMBEDDINGS
    skipped = dims == 1 or name.endswith(".bias")
    if _norms_decay(arguments) and ("q_layernorm." in name or "k_layernorm." in name):
        skipped = False
    usual = arguments.get("decoupled_lr") is None or name not in EMBEDDINGS
    return (is_sharded_expert(name, arguments), matrix, not skipped, usual)


def _norms_decay(arguments: Mapping[str, Any]) -> bool:
    return bool(
        arguments.get("apply_wd_to_qk_layernorm")
        or arguments.get("no_weight_decay_cond_type") == "apply_wd_to_qk_layernorm"
    )
