"""What the optimizer keeps of one parameter in a DCP checkpoint: state as large as it, and what owners keep beside it.

Owners' state is saved as ``<key>``, of several matrices in a parameter ``[<place>].<key>``, a row-wise cut tensor each;
state that is more than tensors by name has ``structure`` and ``stepped`` beside it, and a parameter whose shape does
not tell its matrices has ``matrices`` (``lwopt_backend/runtime/owner_shards.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lwopt_backend import registry
from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.owner_shards import MATRICES, STEPPED, STRUCTURE


class OwnerStates(Mapping[int, Mapping[str, Any]]):
    """State by a matrix's place in its parameter; it is read when it is asked for."""

    def __init__(self, saved: Mapping[int, dict[str, LazyTensor]]) -> None:
        self._saved = saved

    def __getitem__(self, place: int) -> Mapping[str, Any]:
        saved = self._saved[place]
        found = {key: tensor.read() for key, tensor in saved.items() if key not in (STRUCTURE, STEPPED)}
        if STRUCTURE not in saved:
            return found
        try:
            described = nested.description(saved[STRUCTURE].read())
            for path in _numbers(described):
                found[path] = found[path].view(())
            state: Mapping[str, Any] = nested.rebuild(described, found)
            return state
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{saved[STRUCTURE].where}: it does not describe what is there, {sorted(found)} ({error!r})"
            ) from error

    def __iter__(self) -> Iterator[int]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def take_matrices(saved: dict[str, LazyTensor]) -> list[str] | None:
    """Which elements a parameter's matrices are, taken out of all that is saved of it; None if that is not told."""
    described = saved.get(MATRICES)
    if described is None or described.dtype != torch.uint8 or len(described.shape) != 1:
        return None
    del saved[MATRICES]
    try:
        return list(map(str, nested.rebuild(nested.description(described.read()), {})))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{described.where}: it does not tell which matrices there are ({error!r})") from error


def with_owner_states(
    weight: LazyTensor, saved: Mapping[str, LazyTensor], group: Mapping[str, Any] | None
) -> tuple[dict[str, LazyTensor], OwnerStates]:
    """The states of ``weight`` that are as large as it, and its owners', from all that is saved of it, by key.

    ``group``: its options, with ``rule`` if it is one of our optimizers'. Raises CheckpointError for state that is
    neither, and for matrices in it whose place is not known.
    """
    matrices = {key.removesuffix(STRUCTURE) for key in saved if key == STRUCTURE or key.endswith(f".{STRUCTURE}")}
    of_matrix = {key: max((m for m in matrices if key.startswith(m)), key=len, default=None) for key in saved}
    own = _own_keys(weight, group) if None in of_matrix.values() else None
    states: dict[str, LazyTensor] = {}
    owners: dict[int, dict[str, LazyTensor]] = {}
    for key, tensor in saved.items():
        matrix = of_matrix[key]
        if matrix is None and (key in own if own is not None else tensor.shape == weight.shape):
            if tensor.shape != weight.shape:
                raise CheckpointError(
                    f"{tensor.where}: expected the weight's shape {weight.shape}, found {tensor.shape}"
                )
            states[key] = tensor
        elif matrix is None and own is None:
            raise CheckpointError(
                f"{tensor.where}: expected the weight's shape {weight.shape}, found {tensor.shape}; state of other "
                "shapes is read only of rules of ours"
            )
        else:
            matrix = key.rpartition(".")[0] if matrix is None else matrix.removesuffix(".")
            owners.setdefault(_place(matrix, tensor), {})[key.removeprefix(f"{matrix}." if matrix else "")] = tensor
    stepped = {place: state for place, state in sorted(owners.items()) if _was_stepped(state)}
    return states, OwnerStates(stepped)


def _was_stepped(state: Mapping[str, LazyTensor]) -> bool:
    """Whether it is of a real step; before the first one its form alone is saved."""
    return STEPPED not in state or bool(state[STEPPED].read().item())


def _own_keys(weight: LazyTensor, group: Mapping[str, Any] | None) -> set[str] | None:
    """The keys of the rule's state that lies where the parameter does; None if that is all there is."""
    if group is None or group.get("rule", "") in {"", *registry.ELEMENTWISE_RULES}:
        return None
    if "class" in group:  # what it names is the file's word, and not imported; its state is all at owners
        return set()
    try:
        return set(registry.new_state(torch.empty(weight.shape, device="meta"), group))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weight.where}: its group's rule cannot be made ({error}): {dict(group)}") from error


def _place(matrix: str, tensor: LazyTensor) -> int:
    """The number of a matrix in its parameter, by its name."""
    slice_number = re.fullmatch(r"\[(\d+)\]", matrix)
    if matrix and slice_number is None:
        raise CheckpointError(
            f"{tensor.where}: the owner of matrix {matrix!r} keeps state of a part of a fused parameter, and the "
            "checkpoint, which an earlier version saved, does not tell which rows it is; load it with that version, "
            'and save it with "storage": "owned"'
        )
    return int(slice_number[1]) if slice_number else 0


def _numbers(described: Any, path: str = "") -> Iterator[str]:
    """The paths of tensors without dimensions, which are saved with one."""
    if isinstance(described, str):
        if described == "tensor ":
            yield path
        return
    kind, content = described
    if kind == "value":
        return
    for key, part in content if kind == "dict" else enumerate(content):
        yield from _numbers(part, f"{path}.{key}" if path else str(key))
