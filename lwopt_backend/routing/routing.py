"""Routes each parameter to a rule, with the reason, and applies the setting ``atoms``."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from lwopt_backend.config.atoms import AtomSettings, Division, Word
from lwopt_backend.config.options import glob_suggestion, suggestion
from lwopt_backend.config.versions import is_first_rank
from lwopt_backend.plan.atoms import Block, Cut, Grid, Parts, Stripes, divided, repeated, undivided
from lwopt_backend.routing.fused import joined, side_by_side
from lwopt_backend.routing.models import LORA, Adapter, lora_of
from lwopt_backend.routing.output_heads import EMBEDDINGS, Use, plain_name, uses_of
from lwopt_backend.routing.traced import is_bare, unmultiplied


def blocks_of(
    name: str, shape: Sequence[int], transposed: bool, source: str, setting: Word | Division, cut: Cut | None = None
) -> tuple[Block, ...]:
    """The blocks of parameter ``name`` by a setting. Raises ValueError if it does not fit the shape or ``cut``."""
    whose = f"{source}: {name!r} of shape {tuple(shape)}"
    if setting in ("stack", "flatten") and len(shape) < 3:
        raise ValueError(f"{whose}: {setting!r} is for parameters of three dimensions or more")
    if setting == "flatten":
        return divided(Grid.of(shape, 0), undivided(shape[0]))
    outputs = shape[-1] if transposed else shape[-2]
    parts = setting.parts(outputs, whose) if isinstance(setting, Division) else undivided(outputs)
    if cut is not None and cut.shared and isinstance(setting, Division) and setting.heads is None:
        parts = _on_each_rank(parts, outputs, cut.ranks, whose)
    return divided(Grid.of(shape, len(shape) - 2), parts, transposed=transposed)


def _on_each_rank(parts: Parts, outputs: int, ranks: int, whose: str) -> Parts:
    """``parts``, if each of ``ranks`` has a share of every one; groups of parts are cut between groups."""
    if any(run.count > 1 for _, run in parts):
        return parts
    if any(run.length % ranks for _, run in parts):
        raise ValueError(
            f"{whose}: expected parts that {ranks} tensor-parallel ranks divide, found parts of "
            f"{[run.length for _, run in parts]} outputs; correct the sizes, or exclude the parameter"
        )
    of_one = [(name, Stripes(run.start // ranks, run.length // ranks)) for name, run in parts]
    return repeated(of_one, outputs // ranks, ranks)


# Which parameters go to the matrix rule: decided by the model's structure, overridden by name, always printed.
#
# A matrix rule is for the hidden layers' 2-D weights. Embeddings, output heads, norms, biases and everything that is
# not 2-D are updated element by element. The reason for each decision is kept and printed.

Kind = Literal["matrix", "elementwise", "frozen"]

TWO_D = "2-D weight"
MULTIPLIED = re.compile(r"weight|matri|proj|kernel|gate|^[wW][a-zA-Z0-9]?(_|$)")  # names of matrices
SHOWN = 4  # names in a warning
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# Words in the name of a module's own parameter that say what it is, whatever its shape.
BY_WORD = {
    "bias": "bias",  # a layer's own, a table of relative positions, one row per expert or head
    **dict.fromkeys(("embedding", "embeddings", "embed", "emb"), "embedding by name"),
}
BY_NAME = {"A_log": "one decay per channel and state"}  # of state-space models; used element by element
# Attributes by which DeepSpeed's and Megatron's users keep a parameter from the matrix rule, and their values.
MARKS = {"use_muon": False, "is_embedding_or_output_parameter": True}


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one parameter, and its reason. ``aliases`` are the other names of a tied parameter.

    A ``stack`` has a matrix in its last two dimensions for every index of the others; a ``transposed`` matrix is stored
    as (inputs, outputs), two ``side_by_side`` as (outputs, 2, inputs). ``rule`` and ``overrides``, the
    numbers of those that select the parameter, are set once they are known. ``shape`` is the whole parameter's, ``cut``
    how tensor parallelism cuts it.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    reason: str
    aliases: tuple[str, ...] = ()
    stack: bool = False
    transposed: bool = False
    rule: str = ""
    cut: Cut | None = None
    overrides: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def side_by_side(self) -> bool:
        return side_by_side(self.name, self.shape)

    @property
    def joined(self) -> tuple[int, ...]:
        """The shape in which two matrices side by side are the halves of every row; otherwise the parameter's own."""
        return joined(self.name, self.shape)

    def as_stack(self) -> Route:
        """A stack of experts, or two matrices side by side, as matrices, unless these count as vectors."""
        if not (self.stack or self.side_by_side) or (self.kind, self.reason) != ("elementwise", f"{len(self.shape)}-D"):
            return self
        stacked = f"{math.prod(self.joined[:-2])} stacked experts"
        if (one := vector(self.joined)) is not None:
            return replace(self, reason=f"{stacked} of {one}")
        return replace(self, kind="matrix", reason=stacked if self.stack else f"{self.reason} weight")


def routes_of(
    model: nn.Module,
    include: Sequence[str],
    exclude: Sequence[str],
    heads: Mapping[int, str],
    atoms: AtomSettings | None = None,
) -> list[Route]:
    """Route every parameter of ``model``, or of a part of one, in ``named_parameters()`` order, by its plain name.

    Experts that a model stacks in one parameter go to the matrix rule, slice by slice. ``include`` sends 2-D parameters
    to the matrix rule and ``exclude`` keeps parameters from it, both by globs on a parameter's names (a tied parameter
    has several); exclude wins. ``heads`` are the whole model's output heads: ids of weights, reasons. ``atoms`` may
    make matrices of a parameter with more than two dimensions, unless a glob excludes it.
    """
    uses = uses_of(model)
    routes = []
    kind: Kind
    for name, param in named_parameters(model):
        shape, same = full_shape(param), uses[id(param)]
        names = [name] + [use.name for use in same if use.name != name]
        if not param.requires_grad:
            kind, reason = "frozen", "requires_grad is False"
        else:
            mark = next((f"{key}={value}" for key, value in MARKS.items() if getattr(param, key, None) is value), None)
            kind, reason = _by_structure(shape, same, heads.get(id(param)))
            if mark is not None and (kind == "matrix" or reason == f"{len(shape)}-D"):
                kind, reason = "elementwise", f"marked {mark}"
            kind, reason = by_glob(shape, names, include, exclude) or (kind, reason)
        transposed, stack = any(_stored_transposed(use.module) for use in same), _is_stack(joined(name, shape), same)
        found = Route(name, shape, kind, reason, tuple(names[1:]), stack, transposed, cut=cut_of(param)).as_stack()
        set_so = atoms.makes_matrix(names, shape) if atoms is not None else None
        if set_so is not None and found.kind == "elementwise" and _first_match(names, exclude) is None:
            found = replace(found, kind="matrix", reason=set_so)
        if found.kind == "matrix" and transposed:
            found = replace(found, reason=f"{found.reason}, stored transposed")
        routes.append(found)
    return _bare_ones_routed(model, routes, uses)


def _bare_ones_routed(model: nn.Module, routes: Sequence[Route], uses: Mapping[int, Sequence[Use]]) -> list[Route]:
    """Leave 2-D parameters that nothing multiplies, such as tables of positions, to the element-wise rule.

    Some modules' ``forward`` does not show it. Of the parameters that transformers 5.24 has there, and no other reason
    tells, 19 of 24 are tables; and all five others that are matrices but two have one of these words in their names.
    """
    params = dict(named_parameters(model))
    asked = [r for r in routes if (r.kind, r.reason) == ("matrix", TWO_D)]
    asked = [r for r in asked if all(is_bare(use.module) for use in uses[id(params[r.name])])]
    known = unmultiplied(model, [params[r.name] for r in asked], full_shape)
    told = {r.name: known.get(id(params[r.name]), MULTIPLIED.search(r.name.rpartition(".")[2]) is None) for r in asked}
    unclear = [r.name for r in asked if told[r.name] and id(params[r.name]) not in known]
    if unclear:
        warn(
            f"No forward showed what {named(unclear)} are for. They are left to the element-wise rule, as most tables "
            "are; name those that are matrices in the option include, the others in exclude"
        )
    reasons = {True: "added or looked up, not multiplied", False: "2-D, but nothing shows that it is multiplied"}
    return [
        replace(r, kind="elementwise", reason=reasons[id(params[r.name]) in known]) if told.get(r.name) else r
        for r in routes
    ]


def warn(text: str) -> None:
    """Warn of what the table at the start has in every line that it concerns. On the first rank: all find the same."""
    if is_first_rank():
        warnings.warn(text, stacklevel=3)


def named(names: Sequence[str]) -> str:
    """The first names, those that differ only in the number of a layer once, and how many more there are."""
    kinds = [*dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)]
    return ", ".join(map(repr, kinds[:SHOWN])) + (f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else "")


def check_all_globs(include: Sequence[str], exclude: Sequence[str], routes: Sequence[Route]) -> None:
    """Raises ValueError for a glob that matches nothing in a model with these routes."""
    check_globs("include", include, [r for r in routes if len(r.shape) == 2], routes)
    check_globs("exclude", exclude, routes, routes)


def _by_structure(shape: Sequence[int], uses: Sequence[Use], head: str | None) -> tuple[Kind, str]:
    added = next((use.adapter for use in uses if use.adapter is not None), None)
    if added is not None:
        return _by_adapter(added, shape, head)
    if any(_is_embedding(use.module) for use in uses):
        tied = [use.module_name for use in uses if not _is_embedding(use.module)]
        return "elementwise", f"embedding, tied to {tied[0]}" if tied else "embedding"
    if len(shape) != 2:
        return "elementwise", f"{len(shape)}-D"
    for use in uses:
        # A norm may have one weight per head and channel (Cohere's does), and every model family brings its own class.
        if isinstance(use.module, NORMS) or type(use.module).__name__.endswith("Norm"):
            return "elementwise", "norm"
        if use.key in BY_NAME:
            return "elementwise", BY_NAME[use.key]
        for word in use.key.split("_"):
            if word in BY_WORD:
                return "elementwise", BY_WORD[word]
    if head is not None:
        return "elementwise", head
    if 0 in shape:
        return "elementwise", "no elements"
    one = vector(shape)
    return ("matrix", TWO_D) if one is None else ("elementwise", one)


def _is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is torch's embedding, or a tensor-parallel one of Megatron or AutoTP."""
    return isinstance(module, EMBEDDINGS) or type(module).__name__.endswith("ParallelEmbedding")


def vector(shape: Sequence[int]) -> str | None:
    """The reason why a matrix, or those of a stack, count as vectors: orthogonalizing a vector only normalizes it."""
    if 1 not in shape[-2:]:
        return None
    return "one row" if shape[-2] == 1 else "one column"


def _by_adapter(adapter: Adapter, shape: Sequence[int], head: str | None) -> tuple[Kind, str]:
    """LoRA's A and B are routed as the weight that they change, both or neither."""
    if adapter.path[0] not in LORA:
        return "elementwise", adapter.what
    name = plain_name(adapter.layer.name)
    said, lora = lora_factor(adapter.path[0], name), lora_of(adapter.layer.module, adapter.path[1])
    if len(shape) != 2 or lora is None:
        return "elementwise", f"{said}: {f'{len(shape)}-D' if len(shape) != 2 else 'not a plain linear'}"
    a, b = full_shape(lora.a), full_shape(lora.b)
    kind, reason = _by_structure((b[0], a[1]), [Use(f"{name}.{lora.key}", name, lora.base)], head)
    if kind == "elementwise":
        return kind, f"{said}: {reason}"
    rank = a[0] // lora.stacked
    return (kind, said) if rank > 1 else ("elementwise", f"{said}: rank {rank}")


def lora_factor(attribute: str, layer: str) -> str:
    """E.g. ``"LoRA A of q_proj"``, the same for layers that differ only in their number."""
    words = [part for part in layer.split(".") if not part.isdecimal()]
    leaf = layer.rpartition(".")[2] if not words or layer.endswith(words[-1]) else f"{words[-1]}.*"
    return f"LoRA {attribute.removeprefix('lora_')} of {leaf}"


def _is_stack(shape: Sequence[int], uses: Sequence[Use]) -> bool:
    """Whether a parameter is a stack of experts, by its module's class name or place."""
    if len(shape) < 3 or 0 in shape or any(use.adapter is not None for use in uses):
        return False
    return any("expert" in f"{use.module_name.rpartition('.')[2]} {type(use.module).__name__}".lower() for use in uses)


def named_as_stack(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a stack of experts by its name, if its module is not available."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return len(joined(name, shape)) > 2 and 0 not in shape and "expert" in module.lower()


def _stored_transposed(module: nn.Module) -> bool:
    """Whether it is Hugging Face's Conv1D (GPT-2's linear), Llama 4's experts, or experts with ``is_transposed``."""
    return type(module).__name__ in ("Conv1D", "Llama4TextExperts") or getattr(module, "is_transposed", False) is True


def by_glob(
    shape: Sequence[int], names: Sequence[str], include: Sequence[str], exclude: Sequence[str]
) -> tuple[Kind, str] | None:
    """The globs' decision on the parameter with these names, or None; exclude wins."""
    excluded = _first_match(names, exclude)
    if excluded is not None:
        return "elementwise", f"excluded by {excluded!r}"
    included = _first_match(names, include)
    if included is not None and len(shape) == 2 and 0 not in shape:
        return "matrix", f"included by {included!r}"
    return None


def _first_match(names: Sequence[str], globs: Sequence[str]) -> str | None:
    return next((glob for glob in globs if any(fnmatchcase(name, glob) for name in names)), None)


def named_like(globs: Sequence[str]) -> Callable[[str], bool]:
    """A predicate: whether a name matches any of the globs."""
    return lambda name: _first_match([name], globs) is not None


def as_globs(given: Any, option: str) -> tuple[str, ...]:
    """One glob or several, as a tuple. Raises ValueError for anything else."""
    globs = (given,) if isinstance(given, str) else given
    if not isinstance(globs, Sequence) or not all(isinstance(glob, str) for glob in globs):
        raise ValueError(f"{option}: expected a glob on names, or a list of them; found {given!r}")
    return tuple(globs)


def check_globs(
    option: str,
    globs: Sequence[str],
    eligible: Iterable[Route],
    routes: Iterable[Route],
    why_not: Callable[[Route], str] = lambda route: "are not 2-D; a matrix rule cannot take them",
) -> None:
    """Raises ValueError for a glob that matches none of ``eligible``; ``routes`` are all routes.

    ``why_not`` returns why a route that it matches instead does not count.
    """
    eligible, routes = list(eligible), list(routes)
    for glob in globs:
        if any(_first_match(route.names, [glob]) for route in eligible):
            continue
        others = [route for route in routes if _first_match(route.names, [glob])]
        if others:
            raise ValueError(f"{option}: {glob!r} matches only parameters that {why_not(others[0])}")
        hint = glob_suggestion(glob, [name for route in routes for name in route.names])
        raise ValueError(f"{option}: {glob!r} matches no parameter name; {hint}")


DECLARES = "lwopt_atoms"  # method of a module
CUT = "_lwopt_cut"  # attribute of a parameter that tensor parallelism cuts


def cut_of(param: Tensor) -> Cut | None:
    """How tensor parallelism cuts the parameter, as an integration has marked it."""
    return getattr(param, CUT, None)


def full_shape(param: Tensor) -> tuple[int, ...]:
    """The parameter's shape, even if DeepSpeed's ZeRO-3 has partitioned it and shows an empty tensor, or if tensor
    parallelism cuts it."""
    shape, cut = tuple(getattr(param, "ds_shape", param.shape)), cut_of(param)
    return shape if cut is None else cut.whole(shape)


def atom_settings(model: nn.Module, atoms: Mapping[str, Any]) -> AtomSettings:
    """The option ``atoms``, and what modules declare in ``lwopt_atoms``: settings by the names of their parameters.

    Raises ValueError for a name that is not one of the module's parameters, and for a value that is no setting.
    """
    names, declared = {id(param): name for name, param in named_parameters(model)}, {}
    for module in model.modules():
        if not callable(getattr(module, DECLARES, None)):
            continue
        source, own = f"{type(module).__name__}.{DECLARES}", dict(module.named_parameters())
        for key, setting in AtomSettings.parse(getattr(module, DECLARES)(), source).by_glob:
            param = next((param for name, param in own.items() if plain_name(name) == key), None)
            if param is None:
                hint = suggestion(key, list(own))
                raise ValueError(f"{source}: {key!r} is not the name of a parameter of the module; {hint}")
            declared[names[id(param)]] = source, setting
    return replace(AtomSettings.parse(atoms), declared=declared)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()`` with plain names."""
    return ((plain_name(name), param) for name, param in model.named_parameters())
