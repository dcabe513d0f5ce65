"""Which weights are output heads: named so, or as wide as a vocabulary. A heuristic, so the reason is printed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# A module called this is an output head wherever it stands ...
HEAD_NAMES = frozenset({"lm_head", "embed_out", "unembed", "output_projection", "logits", "to_logits"})
# ... and one called this is a head unless it stands inside a repeated block, where the word means something else.
HEAD_NAMES_OUTSIDE_BLOCKS = frozenset(
    {"head", "heads", "output", "output_layer", "classifier", "score", "qa_outputs"},
)
# Words that begin like this name tables of positions and of segments, which no head is as wide as on purpose.
NOT_A_VOCABULARY = re.compile(r"(^|[._])(pos|wpe|type|segment)")


@dataclass(frozen=True, slots=True)
class Widths:
    """What a model, or the part of it that a pipeline stage has, says about heads as wide as a vocabulary."""

    rows: frozenset[int]  # of its embeddings
    outputs: frozenset[int]  # of its linears that may be a head
    tied: bool  # an embedding is a head as well


def output_heads(model: nn.Module, rows: frozenset[int] | None = None) -> dict[int, str]:
    """The ids of the output heads' weights, with the reason for each.

    A head that consists of several layers (a classifier with a hidden one) is its last linear; a list of heads is the
    last linear of each. A head tied to an embedding need not be among them: it is the embedding. ``rows`` are those of
    the embeddings that heads are compared with, where ``model`` is a part of one: see ``rows_for_heads``.
    """
    if rows is None:
        (rows,) = rows_for_heads([widths(model)])
    blocks = _repeated_blocks(model)
    return {**_as_wide_as_a_vocabulary(model, blocks, rows), **_by_name(model, blocks)}


def widths(model: nn.Module) -> Widths:
    """What ``rows_for_heads`` needs to know of a model or of a part of one."""
    blocks = _repeated_blocks(model)
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, EMBEDDINGS)]
    tables = {id(table.weight) for _, table in named}
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return Widths(
        frozenset(table.num_embeddings for name, table in named if not NOT_A_VOCABULARY.search(name)),
        frozenset(m.out_features for name, m in linears if not _inside(name, blocks)),
        any(id(linear.weight) in tables for _, linear in linears),
    )


def rows_for_heads(parts: Sequence[Widths]) -> list[frozenset[int]]:
    """How many outputs a head may have in each part of a model, in the model's order.

    Heads stand in the last part that has a linear as wide as any part's embedding has rows. They are not looked for
    where an embedding is already tied to a linear: that is the head.
    """
    rows = frozenset().union(*(part.rows for part in parts))
    last = max((number for number, part in enumerate(parts) if part.outputs & rows), default=None)
    if last is None or any(part.tied for part in parts):
        return [frozenset() for _ in parts]
    return [rows if number == last else frozenset() for number in range(len(parts))]


def _by_name(model: nn.Module, blocks: frozenset[str]) -> dict[int, str]:
    heads = {}
    for name, module in model.named_modules(remove_duplicate=False):
        leaf = name.rpartition(".")[2]
        if leaf in HEAD_NAMES or (leaf in HEAD_NAMES_OUTSIDE_BLOCKS and not _inside(name, blocks)):
            heads.update(dict.fromkeys(map(id, _last_weights(module)), f"output head, named {leaf!r}"))
    return heads


def _last_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Of a layer its own parameters, of a list those of each member, of anything else those of its last linear.

    A last linear that keeps the width is a hidden layer before the head proper (ModernBERT's ``head.dense``).
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for member in module.children():
            yield from _last_weights(member)
        return
    linears = [inner for inner in module.modules() if isinstance(inner, nn.Linear)]
    last = linears[-1] if linears else module
    if last is module or last.in_features != last.out_features:
        yield from last.parameters(recurse=False)


def _as_wide_as_a_vocabulary(model: nn.Module, blocks: frozenset[str], rows: frozenset[int]) -> dict[int, str]:
    """The last linear with as many outputs as an embedding has rows, and its like in the list it stands in.

    Not looked for inside a repeated block, where a hidden layer may happen to be as wide.
    """
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    wide = [(name, m) for name, m in linears if m.out_features in rows and not _inside(name, blocks)]
    if not wide:
        return {}
    last, head = wide[-1]
    container = last.rpartition(".")[0]
    in_a_list = isinstance(model.get_submodule(container), (nn.ModuleList, nn.ModuleDict))
    heads = [m for name, m in wide if in_a_list and name.rpartition(".")[0] == container] or [head]
    return {id(linear.weight): "output head, as wide as an embedding has rows" for linear in heads}


def _repeated_blocks(model: nn.Module) -> frozenset[str]:
    """Names of modules that stand in a list of layers, or beside another of their kind (experts)."""
    blocks = set()
    for name, container in model.named_modules():
        children = list(container.named_children())
        numbered = any(key.isdigit() for key, _ in children)  # a pipeline stage numbers its layers, too
        if not numbered and not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        if name.rpartition(".")[2] in HEAD_NAMES | HEAD_NAMES_OUTSIDE_BLOCKS:
            continue
        kinds = [type(child) for _, child in children]
        for key, child in children:
            if isinstance(container, nn.ModuleList) or kinds.count(type(child)) > 1:
                blocks.add(f"{name}.{key}" if name else key)
    return frozenset(blocks)


def _inside(name: str, blocks: frozenset[str]) -> bool:
    """Whether the module of that name is part of a block; the block itself is not."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in blocks for i in range(1, len(parts)))
