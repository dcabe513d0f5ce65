"""Maps of names: functions from Megatron-core's names to those of model families, and a user's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor, held, listed
from lwopt_backend.checkpoint.formats import FAMILIES, Numbers
from lwopt_backend.checkpoint.megatron.conventions import EMBEDDING, HEAD
from lwopt_backend.checkpoint.names import computes, families
from lwopt_backend.checkpoint.names.applying import apply, gaps, in_gpt_form, in_local_spec, missing, with_matrices
from lwopt_backend.checkpoint.names.operations import Family, Model, Moved, first_rows
from lwopt_backend.config.options import suggestion

__all__ = ["CORE", "FAMILIES", "Family", "Model", "Numbers", "find", "load_map", "translate", "vocabulary"]

CORE = "megatron-core"
UNNAMED = "model"  # the names of checkpoints that do not record them


def find(name: str) -> str:
    """The name. Raises CheckpointError if it is not one of FAMILIES."""
    if name not in FAMILIES:
        raise CheckpointError(f"unknown names {name!r}; {suggestion(name, FAMILIES)}, or give your own by --map")
    return name


def load_map(place: str) -> Family:
    """A user's function, from ``file.py:function``. Runs the file. Raises CheckpointError for all that goes wrong, also
    in the function."""
    file, _, name = place.rpartition(":")
    scope: dict[str, Any] = {"__name__": "map_of_names", "__file__": file}
    try:
        exec(compile(Path(file).read_bytes(), file, "exec"), scope)
        function = scope[name]
    except Exception as error:
        raise CheckpointError(f"--map {place}: {type(error).__name__}: {error}") from error

    def family(name: str, tensor: LazyTensor, model: Model) -> Moved | None:
        try:
            found: Moved | None = function(name, tensor, model)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"--map {place}: {name!r}: {type(error).__name__}: {error}") from error
        pairs = found.items() if isinstance(found, dict) else [] if found is None else [(found, None)]
        if not all(isinstance(target, str) and isinstance(of, LazyTensor) for target, of in pairs):
            raise CheckpointError(f"--map {place}: {name!r}: expected tensors by their names, or None, found {found!r}")
        return found

    return family


def translate(
    checkpoint: Checkpoint, target: str | Family, numbers: Numbers | None = None, *, source: str | None = None
) -> Checkpoint:
    """The checkpoint under the names of ``target``, one of FAMILIES, or by a map.

    ``source`` is the vocabulary of its names, if the checkpoint itself does not have it ("model"). Reads no tensor.
    Given ``numbers`` take precedence over the checkpoint's arguments. Raises CheckpointError for names that do not fit,
    listing all; for sizes that do not divide; for states that cannot follow their parameter.
    """
    given = numbers or Numbers()
    if isinstance(target, str):
        find(target)
    if source is not None:
        checkpoint = dataclasses.replace(checkpoint, names=find(source))
    if checkpoint.names == CORE:
        checkpoint = in_local_spec(checkpoint)
    if given.vocab_size is not None:
        checkpoint = _cut(checkpoint, given.vocab_size)
    if checkpoint.names == target:
        return checkpoint
    if checkpoint.names == CORE and isinstance(target, str):
        checkpoint = in_gpt_form(checkpoint)
    filled = given.filled(checkpoint.arguments)
    is_core = checkpoint.names == CORE
    model = Model(filled, checkpoint.arguments, is_core and _is_gated(checkpoint, filled))
    lacking = list(gaps(checkpoint.params, filled)) if is_core else []
    if isinstance(target, str):
        if not is_core or target == CORE:
            has = "does not record their family" if checkpoint.names == UNNAMED else f"has those of {checkpoint.names}"
            raise CheckpointError(
                f"--names {target}: expected names of {CORE}, the checkpoint {has}; name their family with "
                f"--source-names (in lwopt diff --names-a or --names-b), {target} if they are those already, or give "
                "--map"
            )
        lacking += missing(list(checkpoint.params), families.NEEDED[target], filled)
    if lacking:
        raise CheckpointError(f"expected a whole model, found {len(lacking)} problem(s):{listed(lacking)}")
    if isinstance(target, str):
        family = families.FAMILIES[target]
        unnamed = [name for name, buffer in checkpoint.buffers.items() if not family(name, buffer, model)]
        if wrong := computes.problems(target, checkpoint.arguments, unnamed):
            raise CheckpointError(
                f"--names {target}: expected a model that computes what this family does, found {len(wrong)} "
                f"problem(s); give --names {CORE}, for a model with its own class, or --map:{listed(wrong)}"
            )
        found = apply(family, target, checkpoint, model, target)
        settings = computes.settings(target, checkpoint.arguments).items()
        said = [f"{key} {value}" for key, value in settings if value is not None]
        notes = [f"the model's config.json needs {', '.join(said)}"] if said else []
        if not computes.FAMILIES[target].keys() & checkpoint.arguments.keys():
            notes.append(f"without Megatron's arguments, it is not known whether {target} computes the same")
        return dataclasses.replace(found, notes=(*found.notes, *notes))
    return apply(target, "the map", checkpoint, model, UNNAMED)


def vocabulary(names: str) -> tuple[str, ...]:
    """The names of the embedding and of the output layer in a family, and in Megatron-core."""
    if names not in families.FAMILIES:
        return EMBEDDING, HEAD
    family, model, rows = families.FAMILIES[names], Model(Numbers(), {}, False), held(torch.empty(0, 1), "rows")
    return tuple(next(iter(family(name, rows, model) or {}), name) for name in (EMBEDDING, HEAD))


def _cut(checkpoint: Checkpoint, size: int) -> Checkpoint:
    """The checkpoint with the first ``size`` rows of its vocabulary."""
    if checkpoint.names not in FAMILIES:
        raise CheckpointError("--vocab-size: expected known names in this checkpoint, found none; give --source-names")
    params, whole = dict(checkpoint.params), {name: name for name in checkpoint.params}
    for name in vocabulary(checkpoint.names):
        param = params.get(name)
        if param is None or param.shape[0] == size:
            continue
        if param.owner_states or any(tensor.shape != param.shape for tensor in param.tensors.values()):
            raise CheckpointError(
                f"{name!r}: expected only states of its shape, to cut them to a vocabulary of {size}, found others, or "
                "owner state (owner_states); leave --vocab-size out"
            )
        params[name] = param.changed({key: first_rows(tensor, size) for key, tensor in param.tensors.items()})
        del whole[name]
    return dataclasses.replace(checkpoint, params=params, arguments=with_matrices(checkpoint.arguments, whole))


def _is_gated(checkpoint: Checkpoint, numbers: Numbers) -> bool:
    """Whether linear_qkv has the queries, gates, keys and values of each group in turn (--attention-output-gate).
    Arguments decide; without them, shapes: linear_proj has a column for every query."""
    if (said := checkpoint.arguments.get("attention_output_gate")) is not None:
        return bool(said)
    for name, param in checkpoint.params.items():
        layer, qkv, _ = name.partition("linear_qkv.weight")
        if qkv and (proj := checkpoint.params.get(f"{layer}linear_proj.weight")):
            rows, queries, groups = param.shape[0], proj.shape[1], numbers.query_groups
            if numbers.heads and groups:
                return rows == 2 * queries + 2 * queries * groups // numbers.heads
            return rows > 2 * queries and rows != 3 * queries  # these are q, k and v with a key for each query
    return False
