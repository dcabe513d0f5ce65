"""Routing without modules: by the names and shapes that a checkpoint has. The words are routing's and output_heads'.

It is weaker than ``routing.route``, which sees the class of every module: an embedding called ``lookup`` is a matrix
here. ``include`` and ``exclude`` correct it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lwopt_backend.model_shapes.types import Stored
from lwopt_backend.output_heads import HEAD_NAMES, HEAD_NAMES_OUTSIDE_BLOCKS, NOT_A_VOCABULARY
from lwopt_backend.routing import BY_NAME, BY_WORD, Kind, Route, by_glob, check_globs, named_as_stack

# Modules that are embeddings by a name that is not made of BY_WORD's words: GPT-2's two, and T5's and BART's one.
EMBEDDING_MODULES = frozenset({"wte", "wpe", "shared"})
PROJECTION = re.compile(r"(^|_)(proj|map)")  # embed_proj, embedding_hidden_mapping_in: a linear behind an embedding
NORM = re.compile(r"norm|(^|_)ln(\d|_|$)", re.IGNORECASE)
SCALE = re.compile(r"(^|_)scales?(_inv)?$")  # of a quantized matrix, one per block of it


def route_by_name(tensors: Sequence[Stored], include: Sequence[str], exclude: Sequence[str]) -> tuple[Route, ...]:
    """Route ``tensors``, in their order. Raises ValueError for a glob that matches nothing it could apply to."""
    tables = {t.name for t in tensors if len(t.shape) == 2 and _word_of(t) == BY_WORD["embedding"]}
    widths = frozenset(t.shape[0] for t in tensors if t.name in tables and not NOT_A_VOCABULARY.search(t.name))
    named = _named_heads(tensors, widths)
    routes = []
    for tensor in tensors:
        kind, reason = _by_name(tensor, named, widths)
        if kind != "frozen":
            kind, reason = by_glob(tensor.shape, (tensor.name, *tensor.aliases), include, exclude) or (kind, reason)
        stack = named_as_stack(tensor.name, tensor.shape)
        routes.append(Route(tensor.name, tensor.shape, kind, reason, tensor.aliases, stack))
    check_globs("include", include, [r for r in routes if len(r.shape) == 2], routes)
    check_globs("exclude", exclude, routes, routes)
    return tuple(routes)


def _by_name(tensor: Stored, named: dict[str, str], widths: frozenset[int]) -> tuple[Kind, str]:
    if tensor.frozen:
        return "frozen", "frozen in the checkpoint"
    if len(tensor.shape) != 2:
        return "elementwise", f"{len(tensor.shape)}-D"
    if tensor.name in named:
        return "elementwise", named[tensor.name]
    word = _word_of(tensor)
    if word is not None:
        return "elementwise", word
    if tensor.shape[0] in widths and not _in_a_block(tensor.name.rpartition(".")[0]):
        return "elementwise", "output head, as wide as an embedding has rows"
    if 0 in tensor.shape:
        return "elementwise", "no elements"
    return "matrix", "2-D weight"


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
