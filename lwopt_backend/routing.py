"""Which parameters go to the matrix rule: decided by the model's structure, overruled by name, never silent.

A matrix rule is for the hidden layers' 2-D weights. Embeddings, output heads, norms, biases and everything that is not
2-D are updated element by element. The reason for each decision is kept and printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from lwopt_backend.spelling import nearest

Kind = Literal["matrix", "elementwise", "frozen"]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# A module called this is an output head wherever it stands ...
HEAD_NAMES = frozenset({"lm_head", "embed_out", "unembed", "output_projection", "logits", "to_logits"})
# ... and one called this is a head unless it stands inside a repeated block, where the word means something else.
HEAD_NAMES_OUTSIDE_BLOCKS = frozenset({"head", "output", "output_layer", "classifier", "score", "qa_outputs"})


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes and why. ``aliases`` are the other names of a tied parameter."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    reason: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Use:
    """One place where a parameter is used."""

    name: str
    module_name: str
    module: nn.Module

    @property
    def leaf(self) -> str:
        return self.module_name.rpartition(".")[2]


def route(model: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Route]:
    """Route every parameter of ``model``, in ``named_parameters()`` order.

    ``include`` sends 2-D parameters to the matrix rule and ``exclude`` keeps parameters from it, both by glob on the
    parameter's names (a tied parameter has several); exclude wins. Raises ValueError for a glob that matches nothing,
    or an ``include`` that matches nothing with two dimensions.
    """
    uses = _uses(model)
    embeddings = {
        id(use.module.weight): use.module
        for same in uses.values()
        for use in same
        if isinstance(use.module, EMBEDDINGS)
    }
    blocks = _repeated_blocks(model)
    head = _vocabulary_head(model, uses, embeddings, blocks)
    routes = []
    for name, param in model.named_parameters():
        same = uses[id(param)]
        names = [name] + [use.name for use in same if use.name != name]
        if not param.requires_grad:
            kind, reason = "frozen", "requires_grad is False"
        else:
            kind, reason = _by_structure(param, same, id(param) in embeddings, id(param) == head, blocks)
            kind, reason = _by_glob(param, names, include, exclude) or (kind, reason)
        routes.append(Route(name, tuple(param.shape), kind, reason, tuple(names[1:])))
    _check_globs("include", include, [r for r in routes if len(r.shape) == 2], routes)
    _check_globs("exclude", exclude, routes, routes)
    return routes


def _by_structure(
    param: nn.Parameter, uses: Sequence[_Use], is_embedding: bool, is_head: bool, blocks: frozenset[str]
) -> tuple[Kind, str]:
    if is_embedding:
        tied = [use.module_name for use in uses if not isinstance(use.module, EMBEDDINGS)]
        return "elementwise", f"embedding, tied to {tied[0]}" if tied else "embedding"
    if param.ndim != 2:
        return "elementwise", f"{param.ndim}-D"
    for use in uses:
        # A norm may have one weight per head and channel (Cohere's does), and every model family brings its own class.
        if isinstance(use.module, NORMS) or type(use.module).__name__.endswith("Norm"):
            return "elementwise", "norm"
        if use.name.rpartition(".")[2] == "bias":
            return "elementwise", "bias"
        if use.leaf in HEAD_NAMES or (use.leaf in HEAD_NAMES_OUTSIDE_BLOCKS and not _inside(use.module_name, blocks)):
            return "elementwise", f"output head, named {use.leaf!r}"
    if is_head:
        return "elementwise", "output head, as wide as an embedding has rows"
    if param.numel() == 0:
        return "elementwise", "no elements"
    return "matrix", "2-D weight"


def _by_glob(
    param: nn.Parameter, names: Sequence[str], include: Sequence[str], exclude: Sequence[str]
) -> tuple[Kind, str] | None:
    excluded = _first_match(names, exclude)
    if excluded is not None:
        return "elementwise", f"excluded by {excluded!r}"
    included = _first_match(names, include)
    if included is not None and param.ndim == 2 and param.numel() > 0:
        return "matrix", f"included by {included!r}"
    return None


def _first_match(names: Sequence[str], globs: Sequence[str]) -> str | None:
    return next((glob for glob in globs if any(fnmatchcase(name, glob) for name in names)), None)


def _check_globs(option: str, globs: Sequence[str], eligible: Iterable[Route], routes: Iterable[Route]) -> None:
    eligible, routes = list(eligible), list(routes)
    for glob in globs:
        if any(_first_match([r.name, *r.aliases], [glob]) for r in eligible):
            continue
        names = [name for r in routes for name in (r.name, *r.aliases)]
        if _first_match(names, [glob]):
            raise ValueError(
                f"{option}: {glob!r} matches only parameters that are not 2-D; a matrix rule cannot take them"
            )
        close = nearest(glob, names)
        hint = f"did you mean {close!r}?" if close else f"names look like {names[0]!r}"
        raise ValueError(f"{option}: {glob!r} matches no parameter name; {hint}")


def _uses(model: nn.Module) -> Mapping[int, list[_Use]]:
    """Every place each parameter is used in, by the parameter's id; a tied parameter has several."""
    uses: dict[int, list[_Use]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{module_name}.{key}" if module_name else key
            uses.setdefault(id(param), []).append(_Use(name, module_name, module))
    return uses


def _vocabulary_head(
    model: nn.Module, uses: Mapping[int, list[_Use]], embeddings: Mapping[int, nn.Module], blocks: frozenset[str]
) -> int | None:
    """The id of the last linear weight with as many outputs as an embedding has rows, or None.

    Not looked for where an embedding is already tied to a linear (that is the head), nor inside a repeated block, where
    a hidden layer may be as wide as a table of positions is long.
    """
    tied = any(isinstance(use.module, nn.Linear) for key in embeddings for use in uses[key])
    if tied:
        return None
    rows = {module.num_embeddings for module in embeddings.values()}
    wide = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features in rows and not _inside(name, blocks)
    ]
    return id(wide[-1]) if wide else None


def _repeated_blocks(model: nn.Module) -> frozenset[str]:
    """Names of modules that stand in a list beside another of their kind (layers, experts) and have children."""
    blocks = set()
    for name, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        children = list(container.named_children())
        kinds = [type(child) for _, child in children]
        prefix = f"{name}." if name else ""
        for key, child in children:
            if kinds.count(type(child)) > 1 and next(child.children(), None) is not None:
                blocks.add(prefix + key)
    return frozenset(blocks)


def _inside(name: str, blocks: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in blocks for i in range(1, len(parts)))
