"""Which weights are output heads, and what parameters are used for.

An output head is a weight whose outputs the model returns, with no residual sum, norm or attention on the way, and that
nothing else in the model reads: so caches, attention maps and the logits of routers are no heads. An example of the
model's arguments shows it. Without one: what the model's library says itself, then names and widths, then a run on our
own guess at its arguments, if that begins with tokens or an image, and so is a model and not a part of one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lwopt_backend.routing.models import (
    Adapter,
    NamedModule,
    called,
    has_forward,
    is_peft,
    modules_of,
    named_modules,
    parameters_of,
)
from lwopt_backend.routing.shown import Shown, Truth

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# A module with this name is an output head anywhere ...
HEAD_NAMES = frozenset({"lm_head", "embed_out", "unembed", "output_projection", "logits", "to_logits"})
# ... and one with this name is a head outside repeated blocks, in which the word means something else.
HEAD_NAMES_OUTSIDE_BLOCKS = frozenset({"head", "heads", "output", "output_layer", "classifier", "score", "qa_outputs"})
# Words that begin like this name tables of positions and segments; a head of equal width is a coincidence.
NOT_A_VOCABULARY = re.compile(r"(^|[._])(pos|wpe|type|segment|rel|.*bias)")


@dataclass(frozen=True, slots=True)
class Head:
    """Why a weight is an output head, and what told it. ``doubtful``: a name that means less within
    another module, or a width that another than the last linear has."""

    reason: str
    truth: Truth = "name"
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class OutputHeads:
    """The output heads of a model, by the ids of weights; and those of weights that may be heads, if nobody can tell:
    what the model returns, or its last linear."""

    found: Mapping[int, Head]
    unclear: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Widths:
    """What a model, or a pipeline stage of one, shows about heads as wide as a vocabulary."""

    rows: frozenset[int]  # of its embeddings
    outputs: frozenset[int]  # of those linears that may be a head
    tied: bool  # whether an embedding is also a head


def output_heads(
    model: nn.Module,
    rows: frozenset[int] | None = None,
    shown: Shown | None = None,
    decided: Collection[int] = (),
    flatten: bool = False,
) -> OutputHeads:
    """The output heads, with the reason for each.

    A head of several layers (a classifier with a hidden one) is its last linear; a list of heads is the last linear of
    each. A head tied to an embedding may be missing, because it is the embedding. PEFT's replacements of a head are
    also heads: its copies and its adapters. ``rows`` are those of the embeddings that heads are compared with, if
    ``model`` is a part of one: see ``rows_for_heads``. ``shown`` is what the model's code shows; nothing is followed
    for weights that options have ``decided``, by their ids. With ``flatten``, convolutions are matrices, of which the
    last may be a head as well.
    """
    heads: dict[int, Head] = {}
    for network, of_network in _with_rows(model, rows):
        by_library, by_name = _by_library(network), _by_name(network, of_network)
        both = {key: replace(by_name[key], truth="library") for key in by_name.keys() & by_library.keys()}
        heads = {**by_name, **heads, **by_library, **both}
    if shown is None:
        return OutputHeads(heads)
    convolutions = [one.weight for one in modules_of(model).values() if isinstance(one, nn.modules.conv._ConvNd)]
    return _by_runs(model, shown, heads, decided, convolutions if flatten else (), is_part=rows is not None)


def _with_rows(model: nn.Module, rows: frozenset[int] | None) -> Iterator[tuple[nn.Module, frozenset[int]]]:
    """The networks in a model, and the rows with which their heads are compared: their own, or, of modules that are one
    network together, those of all."""
    several = networks(model)
    together = [module for module in called(model) if module in several]
    of_all = dict(zip(together, rows_for_heads([widths(module) for module in together])))
    for network in several:
        own = rows_for_heads([widths(network)])[0]
        yield network, rows if rows is not None else own or of_all.get(network, own)


# What a run shows


def _by_runs(
    model: nn.Module,
    shown: Shown,
    heads: Mapping[int, Head],
    decided: Collection[int],
    convolutions: Sequence[Tensor],
    *,
    is_part: bool,
) -> OutputHeads:
    """The heads with what runs show: on an example, before all else; on a guess, of weights that nothing tells."""
    found, settled = dict(heads), {*decided}
    for module, ids, _ in shown.heads("example"):
        used = shown.used(module)
        settled |= used
        found = {key: head for key, head in found.items() if key not in used or head.truth == "library"}
        found |= dict.fromkeys(_with_adapters(model, ids), Head("output head, returned and not read", "example"))
    settled |= found.keys()
    linears = [id(one.weight) for one in _last_linears(model, in_lists=not found) if id(one.weight) not in settled]
    beside = [*_bare(model), *convolutions] if not found else []
    open_ones = [id(param) for param in beside if id(param) not in settled]
    doubtful = {key for key, head in found.items() if head.doubtful and head.truth == "name"}
    is_open = bool(linears or open_ones or doubtful)
    if not is_open or is_part or shown.has_example or _is_tied(model) or _is_told(model, found):
        return OutputHeads(found)
    unclear: frozenset[int] = frozenset()
    ran = 0
    for module, ids, reads in shown.heads("guess"):
        ran += 1
        if reads:  # whatever the name of what it does not return
            others = shown.used(module) - {*_with_adapters(model, ids)}
            found = {key: head for key, head in found.items() if head.truth != "name" or key not in others}
            found |= dict.fromkeys(_with_adapters(model, ids - found.keys()), Head(BY_GUESS, "guess"))
        else:
            unclear |= ids
    if linears and not found and ran < len(called(model)):
        unclear |= _last_of(model, linears, shown)
    last = [id(one) for one in convolutions if id(one) in open_ones][-1:]
    if last and not found and ran < len(called(model)):
        unclear |= {*last, *shown.last_used({*map(id, convolutions)})}
    return OutputHeads(found, unclear - found.keys())


def _last_of(model: nn.Module, linears: Sequence[int], shown: Shown) -> set[int]:
    """Of a model whose run on a guess stopped: the linear to which it came last, and the last one, or the one of the
    last module that this module returns. Of a model without a ``forward``, the last of each module that it has."""
    children = [child for one in called(model) for child in one._modules.values() if child is not None]
    last = next((c for c in reversed(children) if any(id(p) == linears[-1] for _, p in parameters_of(c))), None)
    returned = shown.returned(last) & {*linears} if last is not None and not isinstance(last, nn.Linear) else set()
    found = {*(returned or {linears[-1]}), *shown.last_used({*linears})}
    for one in called(model):
        for child in one._modules.values() if not has_forward(one) else ():
            inside = [] if child is None or isinstance(child, nn.Linear) else parameters_of(child)
            found |= {*[id(param) for _, param in inside if id(param) in linears][-1:]}
    return found


def _bare(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of two dimensions that models have beside their modules."""
    for one in called(model):
        yield from (param for param in dict.values(one._parameters) if param is not None and param.ndim == 2)


BY_GUESS = "output head, returned and not read"


def _with_adapters(model: nn.Module, ids: Collection[int]) -> Iterator[int]:
    """The ids of weights, and of what PEFT put around them."""
    yield from ids
    for each in named_modules(model).values():
        is_wrapped = each.is_own and each.outer is not each.module
        if is_wrapped and any(id(param) in ids for param in dict.values(each.module._parameters)):
            yield from (id(param) for _, param in parameters_of(each.outer))


def _last_linears(model: nn.Module, *, in_lists: bool = True) -> list[nn.Linear]:
    """The linears outside of repeated blocks, in their order; with those that are members of lists, or without."""
    blocks = _repeated_blocks(model)
    outside = [(each.name, one) for each, one in _linears(_own_modules(model)) if not _inside(each.name, blocks)]
    return [linear for name, linear in outside if in_lists or name not in blocks]


def _is_tied(model: nn.Module) -> bool:
    return any(widths(network).tied for network in networks(model)) and len(_last_linears(model)) == 1


# What a library says


def _by_library(model: nn.Module) -> dict[int, Head]:
    """By transformers' ``get_output_embeddings``, and what is outside of its ``base_model``; by timm's
    ``get_classifier`` and the names in its ``default_cfg``."""
    found: dict[int, Head] = {}
    heads: list[tuple[Any, str]] = []
    for one in modules_of(model).values():
        if isinstance(one, nn.AdaptiveLogSoftmaxWithLoss):
            parts = (one.head, *([*tail.children()][-1] for tail in one.tail))
            params = (param for part in parts for param in part.parameters())
            found |= dict.fromkeys(map(id, params), Head("output head, of an adaptive softmax", "library"))
    if _is_transformers(model):
        inside = [one for one in modules_of(model).values() if _is_transformers(one)]
        heads = [(_called(one, "get_output_embeddings"), "get_output_embeddings") for one in inside]
        base = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
        if isinstance(base, nn.Module) and base is not model:
            outside = (child for child in model._modules.values() if child is not None and child is not base)
            heads += [(child, "base_model_prefix") for child in outside]
    else:
        heads = [(one, "get_classifier") for one in _several(_called(model, "get_classifier"))]
        config = getattr(model, "default_cfg", None)
        names = _several(config.get("classifier")) if isinstance(config, Mapping) else []
        modules = modules_of(model) if names else {}
        heads += [(modules.get(name), "default_cfg") for name in names if isinstance(name, str)]
    for module, word in heads:
        if isinstance(module, nn.Module):
            for param in _last_weights(module):
                found.setdefault(id(param), Head(f"output head, by {type(model).__name__}.{word}", "library"))
    return found


def _is_told(model: nn.Module, found: Mapping[int, Head]) -> bool:
    """Whether the library of a model has said which its heads are, so that there are no others."""
    by_library = any(head.truth == "library" for head in found.values())
    return by_library or all(callable(getattr(one, "get_classifier", None)) for one in called(model))


def _is_transformers(model: nn.Module) -> bool:
    is_its = any(kind.__module__.partition(".")[0] == "transformers" for kind in type(model).__mro__)
    return is_its and hasattr(model, "get_output_embeddings")


def _called(model: nn.Module, name: str) -> Any:
    method = getattr(model, name, None)
    try:
        return method() if callable(method) else None
    except Exception:  # of a model without one
        return None


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


# Names and widths: a heuristic, so the reason is printed


def _by_name(model: nn.Module, rows: frozenset[int]) -> dict[int, Head]:
    blocks = _repeated_blocks(model)
    heads = _as_wide_as_a_vocabulary(model, blocks, rows)
    for each in _own_modules(model, remove_duplicate=False):
        leaf = each.name.rpartition(".")[2]
        if leaf in HEAD_NAMES or (leaf in HEAD_NAMES_OUTSIDE_BLOCKS and not _inside(each.name, blocks)):
            head = Head(f"output head, named {leaf!r}", doubtful="." in each.name and leaf not in HEAD_NAMES)
            heads |= dict.fromkeys(map(id, _last_weights(each.outer)), head)
    return heads


def networks(model: nn.Module) -> list[nn.Module]:
    """The model, and the whole networks in it: what a list of modules has, and members of one kind (teacher and
    student, generator and critic) that have embeddings and layers of their own."""
    found = []
    for module in called(model):
        found.append(module)
        for inside in modules_of(module).values():
            found += _alike(inside)
    return [*dict.fromkeys(found)]


def _alike(module: nn.Module) -> list[nn.Module]:
    """The children of a module that are networks: several of one kind, or the members of a list."""
    children = [child for child in module._modules.values() if child is not None and _is_network(child)]
    kinds = [type(child) for child in children]
    in_a_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return [child for child in children if in_a_list or kinds.count(type(child)) > 1]


def _is_network(module: nn.Module) -> bool:
    """Whether it has an embedding of tokens, and layers, as its own children."""
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    embeds = any(isinstance(child, EMBEDDINGS) and not NOT_A_VOCABULARY.search(key) for key, child in children)
    return embeds and any(isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) for _, child in children)


def widths(model: nn.Module) -> Widths:
    """What ``rows_for_heads`` needs of a model or of a part of one."""
    blocks = _repeated_blocks(model)
    own = _own_modules(model)
    named = [(each.name, each.module) for each in own if isinstance(each.module, EMBEDDINGS)]
    tables = {id(table.weight) for _, table in named}
    linears = _linears(own)
    return Widths(
        frozenset(table.num_embeddings for name, table in named if not NOT_A_VOCABULARY.search(name)),
        frozenset(linear.out_features for each, linear in linears if not _inside(each.name, blocks)),
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
        yield from _own_parameters(module)  # also a low-rank change inside it, as in torchtitan's LoRA
        return
    linears = _linears(_own_modules(module))
    if not linears:
        yield from _own_parameters(module, recurse=is_peft(module))
        return
    last, linear = linears[-1]
    if not last.name or linear.in_features != linear.out_features:
        for each, _ in linears:
            if each.name == last.name:
                yield from _parameters(each)


def _as_wide_as_a_vocabulary(model: nn.Module, blocks: frozenset[str], rows: frozenset[int]) -> dict[int, Head]:
    """The last linear with as many outputs as an embedding has rows, and similar ones in the same list.

    Repeated blocks are skipped, because a hidden layer in them may happen to be as wide.
    """
    own = _own_modules(model)
    linears = _linears(own)
    wide = [each for each, linear in linears if linear.out_features in rows and not _inside(each.name, blocks)]
    if not wide:
        return {}
    last = wide[-1].name
    container = last.rpartition(".")[0]
    in_a_list = container in {p.name for p in own if isinstance(p.module, (nn.ModuleList, nn.ModuleDict))}
    heads = [p for p in wide if p.name == last or (in_a_list and p.name.rpartition(".")[0] == container)]
    params = (param for each in heads for param in _parameters(each))
    is_last = linears[-1][0].name in {each.name for each in heads}
    return dict.fromkeys(
        map(id, params), Head("output head, as many outputs as the embedding has rows", doubtful=not is_last)
    )


def _parameters(each: NamedModule) -> Iterator[nn.Parameter]:
    """The parameters of a module and of what PEFT put around it."""
    return _own_parameters(each.outer, recurse=each.outer is not each.module)


def _own_parameters(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    of = parameters_of(module) if recurse else dict.items(module._parameters)
    return (param for _, param in of if param is not None)


def _own_modules(model: nn.Module, remove_duplicate: bool = True) -> list[NamedModule]:
    """The model's own modules, without what PEFT added."""
    return [each for each in named_modules(model, remove_duplicate).values() if each.is_own]


def _linears(modules: Sequence[NamedModule]) -> list[tuple[NamedModule, nn.Linear]]:
    return [(each, each.module) for each in modules if isinstance(each.module, nn.Linear)]


def _repeated_blocks(model: nn.Module) -> frozenset[str]:
    """Names of modules in a list of layers, or next to another of their kind (experts)."""
    blocks, own = set(), _own_modules(model)
    kinds_of = {id(each.outer): type(each.module) for each in own}
    for each in own:
        name, container = each.name, each.module
        children = list(container.named_children())
        numbered = any(key.isdigit() for key, _ in children)  # a pipeline stage also numbers its layers
        if not numbered and not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        if each.outer is model and isinstance(model, nn.ModuleList):
            continue  # modules of one model, such as a pipeline's stages
        if name.rpartition(".")[2] in HEAD_NAMES | HEAD_NAMES_OUTSIDE_BLOCKS:
            continue
        kinds = [kinds_of.get(id(child), type(child)) for _, child in children]
        for (key, child), kind in zip(children, kinds):
            if _is_network(child):
                continue
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
    """One use of a parameter. ``adapter`` describes it if PEFT added it. ``holder`` is the module's full name."""

    name: str
    module_name: str
    module: nn.Module
    adapter: Adapter | None = None
    holder: str = ""

    @property
    def key(self) -> str:
        """The parameter's own name within its module, e.g. ``"weight"``."""
        return self.name.rpartition(".")[2]


def uses_of(model: nn.Module) -> Mapping[int, list[Use]]:
    """Every use of each parameter, by the parameter's id; a tied parameter has several."""
    uses: dict[int, list[Use]] = {}
    found = named_modules(model)
    for module_name, each in found.items():
        for key, param in dict.items(each.module._parameters):
            if param is None:
                continue
            full_name = f"{module_name}.{key}" if module_name else key
            name, adapter = plain_name(full_name), None
            if each.added_by is not None:
                path = full_name.removeprefix(f"{each.added_by}.").split(".")
                adapter = Adapter(found[each.added_by], tuple(path))
            used = Use(name, name.rpartition(".")[0], each.module, adapter, module_name)
            uses.setdefault(id(param), []).append(used)
    return uses
