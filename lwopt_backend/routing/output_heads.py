"""Which weights are output heads, and what parameters are used for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lwopt_backend.routing.models import Adapter, Place, is_peft, places

# Which weights are output heads: named so, or as wide as a vocabulary. A heuristic, so the reason is printed.

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# A module with this name is an output head anywhere ...
HEAD_NAMES = frozenset({"lm_head", "embed_out", "unembed", "output_projection", "logits", "to_logits"})
# ... and one with this name is a head outside repeated blocks, in which the word means something else.
HEAD_NAMES_OUTSIDE_BLOCKS = frozenset({"head", "heads", "output", "output_layer", "classifier", "score", "qa_outputs"})
# Words that begin like this name tables of positions and segments; a head of equal width is a coincidence.
NOT_A_VOCABULARY = re.compile(r"(^|[._])(pos|wpe|type|segment)")


@dataclass(frozen=True, slots=True)
class Widths:
    """What a model, or a pipeline stage of one, shows about heads as wide as a vocabulary."""

    rows: frozenset[int]  # of its embeddings
    outputs: frozenset[int]  # of those linears that may be a head
    tied: bool  # whether an embedding is also a head


def output_heads(model: nn.Module, rows: frozenset[int] | None = None) -> dict[int, str]:
    """The ids of the output heads' weights, with the reason for each.

    A head of several layers (a classifier with a hidden one) is its last linear; a list of heads is the last linear of
    each. A head tied to an embedding may be missing, because it is the embedding. PEFT's replacements of a head are
    also heads: its copies and its adapters. ``rows`` are those of the embeddings that heads are compared with, if
    ``model`` is a part of one: see ``rows_for_heads``.
    """
    if rows is None:
        (rows,) = rows_for_heads([widths(model)])
    blocks = _repeated_blocks(model)
    heads = _as_wide_as_a_vocabulary(model, blocks, rows)
    for place in _own_modules(model, remove_duplicate=False):
        leaf = place.name.rpartition(".")[2]
        if leaf in HEAD_NAMES or (leaf in HEAD_NAMES_OUTSIDE_BLOCKS and not _inside(place.name, blocks)):
            heads |= dict.fromkeys(map(id, _last_weights(place.outer)), f"output head, named {leaf!r}")
    return heads


def widths(model: nn.Module) -> Widths:
    """What ``rows_for_heads`` needs of a model or of a part of one."""
    blocks = _repeated_blocks(model)
    own = _own_modules(model)
    named = [(place.name, place.module) for place in own if isinstance(place.module, EMBEDDINGS)]
    tables = {id(table.weight) for _, table in named}
    linears = _linears(own)
    return Widths(
        frozenset(table.num_embeddings for name, table in named if not NOT_A_VOCABULARY.search(name)),
        frozenset(linear.out_features for place, linear in linears if not _inside(place.name, blocks)),
        any(id(linear.weight) in tables for _, linear in linears),
    )


def rows_for_heads(parts: Sequence[Widths]) -> list[frozenset[int]]:
    """The numbers of outputs that a head may have in each part of a model, in the model's order.

    Heads are in the last part that has a linear as wide as any part's embedding has rows. If an embedding is already
    tied to a linear, that is the head, and no other is searched for.
    """
    rows = frozenset().union(*(part.rows for part in parts))
    last = max((number for number, part in enumerate(parts) if part.outputs & rows), default=None)
    if last is None or any(part.tied for part in parts):
        return [frozenset() for _ in parts]
    return [rows if number == last else frozenset() for number in range(len(parts))]


def _last_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a layer, of each member of a list, or of the last linear of anything else.

    A last linear that keeps the width is a hidden layer before the actual head (ModernBERT's ``head.dense``).
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for member in module.children():
            yield from _last_weights(member)
        return
    if isinstance(module, nn.Linear):
        yield from module.parameters()  # also a low-rank change inside it, as in torchtitan's LoRA
        return
    linears = _linears(_own_modules(module))
    if not linears:
        yield from module.parameters(recurse=is_peft(module))
        return
    place, last = linears[-1]
    if not place.name or last.in_features != last.out_features:
        for each, _ in linears:
            if each.name == place.name:
                yield from _parameters(each)


def _as_wide_as_a_vocabulary(model: nn.Module, blocks: frozenset[str], rows: frozenset[int]) -> dict[int, str]:
    """The last linear with as many outputs as an embedding has rows, and similar ones in the same list.

    Repeated blocks are skipped, because a hidden layer in them may happen to be as wide.
    """
    own = _own_modules(model)
    linears = _linears(own)
    wide = [place for place, linear in linears if linear.out_features in rows and not _inside(place.name, blocks)]
    if not wide:
        return {}
    last = wide[-1].name
    container = last.rpartition(".")[0]
    in_a_list = container in {p.name for p in own if isinstance(p.module, (nn.ModuleList, nn.ModuleDict))}
    heads = [p for p in wide if p.name == last or (in_a_list and p.name.rpartition(".")[0] == container)]
    params = (param for place in heads for param in _parameters(place))
    return dict.fromkeys(map(id, params), "output head, as wide as an embedding has rows")


def _parameters(place: Place) -> Iterator[nn.Parameter]:
    """The parameters of a module and of what PEFT put around it."""
    return place.outer.parameters(recurse=place.outer is not place.module)


def _own_modules(model: nn.Module, remove_duplicate: bool = True) -> list[Place]:
    """The model's own modules, without what PEFT added."""
    return [place for place in places(model, remove_duplicate).values() if place.is_own]


def _linears(places: Sequence[Place]) -> list[tuple[Place, nn.Linear]]:
    return [(place, place.module) for place in places if isinstance(place.module, nn.Linear)]


def _repeated_blocks(model: nn.Module) -> frozenset[str]:
    """Names of modules in a list of layers, or next to another of their kind (experts)."""
    blocks, own = set(), _own_modules(model)
    kinds_of = {id(place.outer): type(place.module) for place in own}
    for place in own:
        name, container = place.name, place.module
        children = list(container.named_children())
        numbered = any(key.isdigit() for key, _ in children)  # a pipeline stage also numbers its layers
        if not numbered and not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        if name.rpartition(".")[2] in HEAD_NAMES | HEAD_NAMES_OUTSIDE_BLOCKS:
            continue
        kinds = [kinds_of.get(id(child), type(child)) for _, child in children]
        for (key, _), kind in zip(children, kinds):
            if isinstance(container, nn.ModuleList) or kinds.count(kind) > 1:
                blocks.add(f"{name}.{key}" if name else key)
    return frozenset(blocks)


def _inside(name: str, blocks: frozenset[str]) -> bool:
    """Whether a module is inside a block; the block itself is not."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in blocks for i in range(1, len(parts)))


# Where each parameter of a model is used, by names that no wrapper around a module changes.

# What activation checkpointing, torch.compile and FSDP1 put between a module's name and its parameter's.
WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def plain_name(name: str) -> str:
    """The name of a parameter or module without the names that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a parameter. ``adapter`` describes it if PEFT added it."""

    name: str
    module_name: str
    module: nn.Module
    adapter: Adapter | None = None

    @property
    def key(self) -> str:
        """The parameter's own name within its module, e.g. ``"weight"``."""
        return self.name.rpartition(".")[2]


def uses_of(model: nn.Module) -> Mapping[int, list[Use]]:
    """Every use of each parameter, by the parameter's id; a tied parameter has several."""
    uses: dict[int, list[Use]] = {}
    found = places(model)
    for module_name, place in found.items():
        for key, param in place.module.named_parameters(recurse=False, remove_duplicate=False):
            full_name = f"{module_name}.{key}" if module_name else key
            name, adapter = plain_name(full_name), None
            if place.added_by is not None:
                path = full_name.removeprefix(f"{place.added_by}.").split(".")
                adapter = Adapter(found[place.added_by], tuple(path))
            uses.setdefault(id(param), []).append(Use(name, name.rpartition(".")[0], place.module, adapter))
    return uses
