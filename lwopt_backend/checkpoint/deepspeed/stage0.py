"""Native checkpoints of stage 0: the first rank's optimizer, whole, in the file of model states.

State is by a parameter's number in the param groups, and no names are saved. They are found by replaying how groups
are filled, in the module's order, and verified: by shapes, and where our optimizer saved it by each group's digest of
its members. Where shapes leave more than one way, the checkpoint is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError
from lwopt_backend.checkpoint.deepspeed.model import ModelStates, checkpoint_of, groups_of, scaler_of
from lwopt_backend.checkpoint.deepspeed.owners import matrices_in, take_owner_states
from lwopt_backend.checkpoint.deepspeed.pieces import Gathered, params_of
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.runtime.agreement import digest

WAYS, STEPS = 10_000, 10_000_000  # that are tried before giving up
Shape = tuple[int, ...]
Named = list[str]


def read_stage0(states: ModelStates) -> Checkpoint:
    """Raises CheckpointError, also where the names of the states cannot be told for certain."""
    saved = states.saved["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)  # DeepSpeed's wrappers of 16-bit models have it inside
    if "fp32_groups_flat" in saved:
        inner, masters = _cut_flat(states, saved)
    else:
        masters = [tensor for group in saved.get("fp32_groups") or () for tensor in group]
    state, groups = inner["state"], inner["param_groups"]
    shapes = [_shapes(group["params"], state, masters) for group in groups]
    matrices = matrices_in(inner)
    named = _names(states, groups, shapes, matrices or {})
    gathered: dict[str, Gathered] = {}
    for number, (group, names) in enumerate(zip(groups, named)):
        for index, name in zip(group["params"], names):
            if state and index not in state and "rule" not in group:  # frozen, or it never had a gradient
                continue
            weight = states.module[name]
            found = gathered[name] = Gathered(weight.shape, number)
            found.copies[MASTER] = [masters[index] if masters else weight]
            for key, value in state.get(index, {}).items():
                if isinstance(value, LazyTensor) and value.shape:
                    found.copies[key] = [value]
                elif value is not None:
                    found.add_number(name, key, value, states.path)
    take_owner_states(gathered, [(states.path, inner)])
    frozen = {name: t for name, t in _candidates(states).items() if name not in gathered}
    everything = ModelStates(**{**vars(states), "frozen": frozen})
    params = params_of(gathered, everything)
    arguments = {"loss_scaler": scaler_of(saved), "matrices": matrices}
    return checkpoint_of(everything, "deepspeed stage 0", params, groups_of(groups), arguments)


def _candidates(states: ModelStates) -> dict[str, LazyTensor]:
    return {name: t for name, t in states.module.items() if name not in states.buffers and name not in states.tied}


def _shapes(
    indices: Sequence[int], state: Mapping[int, Mapping[str, Any]], masters: Sequence[LazyTensor]
) -> list[Shape | None]:
    """Of a group's parameters, as far as their states tell."""

    def shape(index: int) -> Shape | None:
        if masters:
            return masters[index].shape
        tensors = (t for t in state.get(index, {}).values() if isinstance(t, LazyTensor) and t.shape)
        return next((tensor.shape for tensor in tensors), None)

    return [shape(index) for index in indices]


def _names(
    states: ModelStates,
    groups: Sequence[Mapping[str, Any]],
    shapes: Sequence[Sequence[Shape | None]],
    matrices: Mapping[str, list[str]],
) -> list[Named]:
    """The parameters' names by group. Raises CheckpointError unless there is one way only.

    ``matrices`` are which there are in a parameter, as far as the file tells.
    """
    found = [(name, tensor.shape) for name, tensor in _candidates(states).items()]
    ways = list(islice(_ways(found, [list(group) for group in shapes]), WAYS))
    if all("members" in group for group in groups):
        verified = [
            way for way in ways if all(_is_verified(states, g, names, matrices) for g, names in zip(groups, way))
        ]
        ways = verified or ways
    if len(ways) == 1:
        return ways[0]
    what = "no way" if not ways else f"{len(ways) if len(ways) < WAYS else 'too many'} ways"
    raise CheckpointError(
        f"{states.path}: at stage 0 the optimizer's states have no names, and their shapes leave {what} to tell which "
        "parameter each is of; load it where it was saved, and save it at ZeRO stage 1 or 2"
    )


def _ways(params: list[tuple[str, Shape]], groups: list[list[Shape | None]]) -> Iterator[list[Named]]:
    """All ways in which the parameters, in their order, fill the groups, in theirs. What is left over is frozen.

    Raises CheckpointError where the search takes too long.
    """
    spare = len(params) - sum(map(len, groups))
    tried = 0

    def fill(place: int, filled: list[Named], left: int) -> Iterator[list[Named]]:
        nonlocal tried
        while place < len(params):
            tried += 1
            if tried > STEPS:
                raise CheckpointError("at stage 0 states have no names, and there are too many ways to name them")
            name, shape = params[place]
            fits = [
                number
                for number, group in enumerate(groups)
                if len(filled[number]) < len(group) and group[len(filled[number])] in (None, shape)
            ]
            if len(fits) + (left > 0) != 1:
                break
            place += 1
            if fits:
                filled = [[*names, name] if number == fits[0] else names for number, names in enumerate(filled)]
            else:
                left -= 1
        else:
            yield filled
            return
        for number in fits:
            yield from fill(place + 1, [[*n, name] if i == number else n for i, n in enumerate(filled)], left)
        if left:
            yield from fill(place + 1, filled, left - 1)

    if spare >= 0:
        yield from fill(0, [[] for _ in groups], spare)


def _is_verified(
    states: ModelStates, group: Mapping[str, Any], names: Named, matrices: Mapping[str, list[str]]
) -> bool:
    """By what our optimizer saved of a group's members (``lwopt_backend.group_plan.members_digest``)."""
    lines = []
    for name in names:
        several = matrices.get(name, [])
        lines.append(f"{name} {states.module[name].shape} {group['rule']}{several if len(several) > 1 else ''}")
    return bool(digest(lines)[:16] == group["members"])


def _cut_flat(states: ModelStates, saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[LazyTensor]]:
    """FP16_Optimizer's flat tensors, one per param group, as one per parameter. Raises CheckpointError for several."""
    flats, inner = saved["fp32_groups_flat"], saved["optimizer_state_dict"]
    found = _candidates(states)
    if len(flats) != 1 or flats[0].numel < sum(t.numel for t in found.values()):
        raise CheckpointError(
            f"{states.path}: a stage-0 checkpoint in 16 bits does not tell which parameters are in its {len(flats)} "
            "flat tensors; load it where it was saved, and save it at ZeRO stage 1 or 2"
        )
    masters, state, start = [], {}, 0
    for index, tensor in enumerate(found.values()):
        stop = start + tensor.numel

        def part(flat: LazyTensor, a: int = start, b: int = stop, shape: Shape = tensor.shape) -> LazyTensor:
            return flat.piece(a, b).view(shape)

        masters.append(part(flats[0]))
        state[index] = {
            key: part(value) if isinstance(value, LazyTensor) and value.numel == flats[0].numel else value
            for key, value in inner["state"].get(0, {}).items()
        }
        start = stop
    return {
        "state": state,
        "param_groups": [{**inner["param_groups"][0], "params": list(range(len(masters)))}],
    }, masters
