"""Routing without modules: by the names and shapes that a checkpoint has. The words are routing's and output_heads'.

It is weaker than ``routing.route``, which sees the class of every module: an embedding called ``lookup`` is a matrix
here. ``include`` and ``exclude`` correct it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lwopt_backend.model_shapes.types import Stored
from lwopt_backend.output_heads import HEAD_NAMES, HEAD_NAMES_OUTSIDE_BLOCKS, NOT_A_VOCABULARY
from lwopt_backend.peft_layers import ADAPTERS, LORA, adapter_in, without_peft
from lwopt_backend.routing import (
    BY_NAME,
    BY_WORD,
    Kind,
    Route,
    by_glob,
    check_globs,
    lora_factor,
    named_as_stack,
    stacked,
    vector,
)

# Modules that are embeddings by a name that is not made of BY_WORD's words: GPT-2's two, and T5's and BART's one.
EMBEDDING_MODULES = frozenset({"wte", "wpe", "shared"})
PROJECTION = re.compile(r"(^|_)(proj|map)")  # embed_proj, embedding_hidden_mapping_in: a linear behind an embedding
NORM = re.compile(r"norm|(^|_)ln(\d|_|$)", re.IGNORECASE)
SCALE = re.compile(r"(^|_)scales?(_inv)?$")  # of a quantized matrix, one per block of it


def route_by_name(tensors: Sequence[Stored], include: Sequence[str], exclude: Sequence[str]) -> tuple[Route, ...]:
    """Route ``tensors``, in their order. Raises ValueError for a glob that matches nothing it could apply to."""
    known = _as_the_model_has_it(tensors)
    own = list(known.values())
    tables = {t.name for t in own if len(t.shape) == 2 and _word_of(t) == BY_WORD["embedding"]}
    widths = frozenset(t.shape[0] for t in own if t.name in tables and not NOT_A_VOCABULARY.search(t.name))
    named = _named_heads(own, widths)
    routes = []
    for tensor in tensors:
        kind, reason = _route_of(tensor, known, named, widths)
        if kind != "frozen":
            kind, reason = by_glob(tensor.shape, (tensor.name, *tensor.aliases), include, exclude) or (kind, reason)
        stack = named_as_stack(tensor.name, tensor.shape)
        routes.append(Route(tensor.name, tensor.shape, kind, reason, tensor.aliases, stack))
    check_globs("include", include, [r for r in routes if len(r.shape) == 2], routes)
    check_globs("exclude", exclude, routes, routes)
    return tuple(routes)


def _as_the_model_has_it(tensors: Sequence[Stored]) -> Mapping[str, Stored]:
    """By the name of every tensor, the model's own as it is without PEFT; for LoRA's factors the weight they change."""
    by_name, known = {tensor.name: tensor for tensor in tensors}, {}
    for tensor in tensors:
        found = adapter_in(tensor.name)
        if found is None:
            known[tensor.name] = replace(tensor, name=without_peft(tensor.name))
        elif found[1] in LORA:
            layer, attribute = found
            a, b = (by_name.get(_with_factor(tensor.name, attribute, factor), tensor) for factor in sorted(LORA))
            shape = (b.shape[0], a.shape[1]) if len(a.shape) == len(b.shape) == 2 else tensor.shape
            known[tensor.name] = replace(tensor, name=f"{layer}.weight", shape=shape)
    return known


def _with_factor(name: str, attribute: str, factor: str) -> str:
    """The name of LoRA's other factor, or of the same."""
    return ".".join(factor if part == attribute else part for part in name.split("."))


def _route_of(
    tensor: Stored, known: Mapping[str, Stored], named: Mapping[str, str], widths: frozenset[int]
) -> tuple[Kind, str]:
    found = adapter_in(tensor.name)
    if found is None or tensor.frozen:
        return _by_name(known.get(tensor.name, tensor), named, widths)
    layer, attribute = found
    if attribute in ADAPTERS:
        return "elementwise", ADAPTERS[attribute]
    said, weight = lora_factor(attribute, layer), known[tensor.name]
    kind, reason = _by_name(weight, named, widths) if len(tensor.shape) == 2 else ("elementwise", _dimensions(tensor))
    if kind == "matrix" and vector(tensor.shape) is not None:
        kind, reason = "elementwise", "rank 1"
    return kind, said if kind == "matrix" else f"{said}: {reason}"


def _by_name(tensor: Stored, named: Mapping[str, str], widths: frozenset[int]) -> tuple[Kind, str]:
    if tensor.frozen:
        return "frozen", "frozen in the checkpoint"
    if len(tensor.shape) != 2:
        return "elementwise", _dimensions(tensor)
    if tensor.name in named:
        return "elementwise", named[tensor.name]
    word = _word_of(tensor)
    if word is not None:
        return "elementwise", word
    if tensor.shape[0] in widths and not _in_a_block(tensor.name.rpartition(".")[0]):
        return "elementwise", "output head, as wide as an embedding has rows"
    if 0 in tensor.shape:
        return "elementwise", "no elements"
    one = vector(tensor.shape)
    return ("matrix", "2-D weight") if one is None else ("elementwise", one)


def _dimensions(tensor: Stored) -> str:
    if named_as_stack(tensor.name, tensor.shape) and vector(tensor.shape) is not None:
        return f"{stacked(tensor.shape)} of {vector(tensor.shape)}"
    return f"{len(tensor.shape)}-D"


def _word_of(tensor: Stored) -> str | None:
    """What a word in the names of the parameter and of its module says of a 2-D weight, or None."""
    module, key = _module_and_key(tensor.name)
    if NORM.search(module):
        return "norm"
    if key in BY_NAME:
        return BY_NAME[key]
    if SCALE.search(key):
        return "scale by name"
    if module in EMBEDDING_MODULES:
        return BY_WORD["embedding"]
    words = key.split("_") if PROJECTION.search(module) else key.split("_") + module.split("_")
    return next((BY_WORD[word] for word in words if word in BY_WORD), None)


def _named_heads(tensors: Sequence[Stored], widths: frozenset[int]) -> dict[str, str]:
    """The last weight of every module that is called like a head, unless it keeps the width: see output_heads."""
    last: dict[str, Stored] = {}
    for tensor in tensors:
        for path in _modules(tensor.name) if len(tensor.shape) == 2 else ():
            leaf = path.rpartition(".")[2]
            # One inside a block is a head if it is as wide as a vocabulary: DeepSeek's for the token after the next.
            elsewhere = not _in_a_block(path) or tensor.shape[0] in widths
            if leaf in HEAD_NAMES or (leaf in HEAD_NAMES_OUTSIDE_BLOCKS and elsewhere):
                last[path] = tensor
    return {
        tensor.name: f"output head, named {path.rpartition('.')[2]!r}"
        for path, tensor in last.items()
        if tensor.name.rpartition(".")[0] == path or tensor.shape[0] != tensor.shape[1]
    }


def _module_and_key(name: str) -> tuple[str, str]:
    """``"layers.0.q_proj.weight"``: the owning module's own name, ``"q_proj"``, and the parameter's, ``"weight"``."""
    owner, _, key = name.rpartition(".")
    return owner.rpartition(".")[2], key


def _modules(name: str) -> list[str]:
    """The paths of all modules the parameter is in, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _in_a_block(path: str) -> bool:
    """Whether the module of that name stands inside a numbered one, such as ``layers.0``; that itself does not."""
    return any(part.isdecimal() for part in path.split(".")[:-1])
