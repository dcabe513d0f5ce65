"""Applies a map of names to a checkpoint, without reading a tensor."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lwopt_backend.checkpoint.contents import (
    MATRICES,
    SHOWN,
    Checkpoint,
    CheckpointError,
    LazyTensor,
    Param,
    end_to_end,
    listed,
    some,
)
from lwopt_backend.checkpoint.formats import Numbers
from lwopt_backend.checkpoint.megatron.conventions import expert_of, layer_of, respelled
from lwopt_backend.checkpoint.names.families import in_layer
from lwopt_backend.checkpoint.names.operations import Family, Model

_IN_STACK = re.compile(r"(.+)\[(0|[1-9]\d*)\]")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")


def apply(family: Family, called: str, checkpoint: Checkpoint, model: Model, names: str) -> Checkpoint:
    """The checkpoint under the names that ``family`` makes, a vocabulary ``names``, with notes on omissions.

    ``called`` is the map in messages. Raises CheckpointError for names that it does not know, listing all; for names
    that it makes twice; for states that cannot follow their parameter; for gaps in a stack.
    """
    params: dict[str, Param] = {}
    unchanged: dict[str, str] = {}
    stacks: dict[str, dict[int, str]] = {}  # the parameters of which each is made, by their place
    dropped: list[str] = []
    unknown: list[str] = []
    for name, param in checkpoint.params.items():
        made = _made(family, name, param, model)
        if made is None:
            unknown.append(f"{name!r} has no name in {called}")
            continue
        dropped += [] if made else [name]
        for target, moved in made.items():
            if target in params:
                raise CheckpointError(f"{called} makes {target!r} twice, the second time of {name!r}")
            params[target] = moved
            if in_stack := _IN_STACK.fullmatch(target):
                stacks.setdefault(in_stack[1], {})[int(in_stack[2])] = target
            elif moved is param:
                unchanged[name] = target
    if unknown:
        raise CheckpointError(
            f"expected names that {called} knows, found {len(unknown)} problem(s); give another family, or --map:"
            f"{listed(unknown)}"
        )
    tied, buffers, lost = _beside(family, checkpoint, model, unchanged)
    notes = [f"{len(dropped)} parameter(s) were dropped by {called}: {some(dropped)}."] if dropped else []
    notes += [f"{called} has no name for {some(lost)}; left out."] if lost else []
    return dataclasses.replace(
        checkpoint,
        names=names,
        params=_joined(params, stacks, called),
        arguments=with_matrices(checkpoint.arguments, unchanged),
        notes=(*checkpoint.notes, *notes),
        tied=tied,
        buffers=buffers,
    )


def _made(family: Family, name: str, param: Param, model: Model) -> dict[str, Param] | None:
    """The parameters that one becomes, with all its states; a renamed one keeps states of any form."""
    tensors = param.tensors
    first = next(iter(tensors.values()))
    found = family(name, first, model)
    if not found or [*found.values()] == [first]:
        return None if found is None else dict.fromkeys(found, param)
    odd = [f"{key!r} of shape {tensor.shape}" for key, tensor in tensors.items() if tensor.shape != param.shape]
    odd += ["owner state of its matrices (owner_states)"] if param.owner_states else []
    if odd:
        raise CheckpointError(
            f"{name!r} of shape {param.shape}: expected only states of this shape, because the map splits, joins or "
            f"permutes them, found {', '.join(odd)}; give a map that only renames the parameter"
        )
    # A map moves elements and computes nothing, so what it does with the weight is right for each state as well.
    moved = {key: family(name, tensor, model) or {} for key, tensor in tensors.items()}
    if any(of.keys() != found.keys() for of in moved.values()):
        raise CheckpointError(
            f"{name!r}: expected a map that makes the same names of each of its tensors, found others"
        )
    return {
        target: Param(None, {}, param.step, param.group).changed({key: of[target] for key, of in moved.items()})
        for target in found
    }


def _joined(params: Mapping[str, Param], stacks: Mapping[str, Mapping[int, str]], called: str) -> dict[str, Param]:
    """The parameters in their order, with each stack in the place of the first of its parameters."""
    inside = {target: name for name, places in stacks.items() for target in places.values()}
    found: dict[str, Param] = {}
    for target, param in params.items():
        name = inside.get(target)
        if name is None:
            found[target] = param
        elif name in params:
            raise CheckpointError(f"{called} makes {name!r} twice, once as a stack")
        elif name not in found:
            found[name] = _stack(name, {number: params[one] for number, one in stacks[name].items()})
    return found


def _stack(name: str, parts: Mapping[int, Param]) -> Param:
    """One parameter of all, in the order of their numbers."""
    if missing := set(range(len(parts))) - set(parts):
        raise CheckpointError(f"{name!r}: expected a stack without gaps, found no number {min(missing)}")
    first = parts[0]
    for number, part in parts.items():
        pairs: list[tuple[str, object, object]] = [("steps", first.step, part.step)]
        pairs += [("param group", first.group, part.group), ("owner_states", {}, dict(part.owner_states))]
        pairs += [("tensors", {key: (t.dtype, first.shape) for key, t in first.tensors.items()}, _forms(part))]
        for what, expected, other in pairs:
            if expected != other:
                raise CheckpointError(
                    f"expected equal {what} of numbers 0 and {number} of the stack {name!r}, found {expected} and "
                    f"{other}; give a map that keeps them apart"
                )
    every = [parts[number].tensors for number in range(len(parts))]
    tensors = {key: end_to_end([of[key] for of in every], (len(parts), *first.shape)) for key in first.tensors}
    return Param(None, {}, first.step, first.group).changed(tensors)


def _forms(param: Param) -> dict[str, Any]:
    return {key: (tensor.dtype, tensor.shape) for key, tensor in param.tensors.items()}


def _beside(
    family: Family, checkpoint: Checkpoint, model: Model, unchanged: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, LazyTensor], list[str]]:
    """Tied names and buffers under the map's names, and the names without a counterpart."""

    def renamed(name: str, tensor: LazyTensor) -> str | None:
        found = family(name, tensor, model)
        return next(iter(found)) if found and [*found.values()] == [tensor] else None

    ties = {name: renamed(name, checkpoint.params[of].best) for name, of in checkpoint.tied.items()}
    tied = {new: unchanged[of] for name, of in checkpoint.tied.items() if (new := ties[name]) and of in unchanged}
    called = {name: renamed(name, buffer) for name, buffer in checkpoint.buffers.items()}
    buffers = {new: checkpoint.buffers[name] for name, new in called.items() if new}
    lost = [name for name, new in (ties | called).items() if new not in tied and new not in buffers]
    return tied, buffers, lost


def with_matrices(arguments: Mapping[str, Any], unchanged: Mapping[str, str]) -> dict[str, Any]:
    """The arguments, with ``matrices`` by new names. Split, joined or permuted parameters lose their entries."""
    known = (arguments.get(MATRICES) or {}).items()
    renamed = {unchanged[name]: matrices for name, matrices in known if name in unchanged}
    rest = {key: value for key, value in arguments.items() if key != MATRICES}
    return {**rest, MATRICES: renamed} if renamed else rest


def in_local_spec(checkpoint: Checkpoint) -> Checkpoint:
    """Megatron-core's names as its local spec spells them. Raises CheckpointError for two spellings of one."""
    spelled = {name: respelled(name) for name in checkpoint.params}
    if twice := [name for name, count in Counter(spelled.values()).items() if count > 1]:
        raise CheckpointError(f"expected one parameter {twice[0]!r}, found two spellings of its name; drop one")
    params = {spelled[name]: param for name, param in checkpoint.params.items()}
    return dataclasses.replace(checkpoint, params=params, arguments=with_matrices(checkpoint.arguments, spelled))


_PAIRS = re.compile(r"(\*[-E])+")  # attention, then an MLP or experts: a layer of GPTModel


def in_gpt_form(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of a HybridModel, in which attention, MLPs and experts are layers of their own, under the names of
    the GPTModel that computes the same. Another model's stays as it is. Raises CheckpointError for layers that no
    GPTModel has."""
    arguments = checkpoint.arguments
    given = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    if not isinstance(given, str):
        return checkpoint
    pattern = given.replace("|", "")
    if not _PAIRS.fullmatch(pattern):
        raise CheckpointError(
            f"expected a HybridModel of attention and MLP or experts in turn ('*-', '*E'), found pattern {given!r}; "
            "give --names megatron-core, for a model with its own class, or --map"
        )

    def named(name: str) -> str:
        name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
        number, rest = in_layer(name)
        return f"decoder.layers.{int(number) // 2}.{rest}" if number else name

    renamed = {name: named(name) for name in (*checkpoint.params, *checkpoint.buffers)}
    arguments = {**with_matrices(arguments, renamed), "num_layers": len(pattern) // 2, "moe_layer_freq": None}
    return dataclasses.replace(
        checkpoint,
        params={renamed[name]: param for name, param in checkpoint.params.items()},
        buffers={renamed[name]: buffer for name, buffer in checkpoint.buffers.items()},
        arguments=arguments,
    )


def gaps(names: Iterable[str], numbers: Numbers) -> Iterator[str]:
    """Yield problems of Megatron-core's names: a layer that is missing, or another number of layers than the given."""
    seen = {number for number in map(layer_of, names) if number is not None}
    absent = next((number for number in range(len(seen)) if number not in seen), None)
    if absent is not None:
        yield f"layer {absent} is missing, although layer {max(seen)} is there; copy all files"
    elif seen and numbers.layers not in (None, len(seen)):
        yield f"expected {numbers.layers} layers by the arguments, found {len(seen)}; copy all files of one checkpoint"


def missing(names: Sequence[str], needed: Sequence[str], numbers: Numbers) -> Iterator[str]:
    """Yield problems of Megatron-core's names: those ``needed``, and those that another layer has, or another expert.
    Layers with experts and layers without are two kinds."""
    found = set(names)
    yield from (f"{name!r} is missing" for name in needed if name not in found)
    of_layers: dict[str, set[str]] = {}
    for name in names:
        number, rest = in_layer(name)
        if number:
            of_layers.setdefault(number, set()).add(rest)
    mixed = {number for number, rests in of_layers.items() if any(map(_EXPERT.search, rests))}
    experts = {expert for name in names if (expert := expert_of(name)) is not None}
    # At most SHOWN absent experts are looked for: a wrong number in a file may be a billion.
    count = min(max(numbers.experts or 0, 1 + max(experts, default=-1)), len(experts) + SHOWN)
    for kind in (mixed, of_layers.keys() - mixed):
        there = {rest: f"decoder.layers.{number}.{rest}" for number in kind for rest in of_layers[number]}
        one_of = {_EXPERT.sub("{}", rest): name for rest, name in there.items() if _EXPERT.search(rest)}
        wanted = {form.format(expert): name for form, name in one_of.items() for expert in range(count)} | there
        for number in sorted(kind, key=int):
            for rest in sorted(wanted.keys() - of_layers[number]):
                yield f"'decoder.layers.{number}.{rest}' is missing, although {wanted[rest]!r} is there"
