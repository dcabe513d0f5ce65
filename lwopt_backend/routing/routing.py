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
from lwopt_backend.routing.by_use import Used, use_of
from lwopt_backend.routing.convolutions import CONVOLUTION, DEPTHWISE, FLATTENED, Convolution, of_module
from lwopt_backend.routing.fused import joined, side_by_side
from lwopt_backend.routing.models import LORA, Adapter, lora_of, modules_of, parameters_of
from lwopt_backend.routing.output_heads import EMBEDDINGS, Head, Use, plain_name, uses_of
from lwopt_backend.routing.shown import Shown, Truth
from lwopt_backend.routing.traced import is_bare, is_own_linear


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
NOT_MULTIPLIED = "added or looked up, not multiplied"
NOT_SHOWN = "2-D, but nothing shows that it is multiplied"
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


CATEGORIES = {  # of reasons for the element-wise rule
    "convolution": "convolutions",
    "^embedding|tied between": "embeddings",
    "output head": "heads",
    "^excluded|^marked|leaves it$": "excluded",
    "^norm|^bias|^[01]-D|^one (row|column)$|^A_log|^one decay": "norms and vectors",
    "^LoRA|^DoRA|PEFT|adapter": "adapters",
    "^added or looked up": "tables",
    "nothing shows": "parameters of unknown use",
    "-D$|stacked": "parameters of 3 and more dimensions",
}


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one parameter, and its reason. ``aliases`` are the other names of a tied parameter.

    A ``stack`` has a matrix in its last two dimensions for every index of the others; a ``transposed`` matrix is stored
    as (inputs, outputs), two ``side_by_side`` as (outputs, 2, inputs). ``grid`` is that of one matrix of more than two
    dimensions, or of a convolution's ``groups``. ``rule`` and ``overrides``, the numbers of those that select the
    parameter, are set once they are known. ``shape`` is the whole parameter's, ``cut`` how tensor parallelism cuts it.
    ``truth`` is what decided: an option, the name, the class of a module or of a library's, or a run of the model's
    code, on a guess at its arguments or on an example.
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
    grid: Grid | None = None
    groups: int = 1
    truth: Truth = "class"

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases

    @property
    def planes(self) -> tuple[int, ...]:
        """The shape in which the last two dimensions are those of a matrix."""
        return self.joined if self.grid is None else (self.grid.rows, self.grid.columns)

    @property
    def is_by_name(self) -> bool:
        """Whether its name alone would make a stack of it."""
        return named_as_stack(self.name, self.shape)

    @property
    def category(self) -> str:
        """What an element-wise parameter is, in one word, for the shares of rules."""
        return next((word for pattern, word in CATEGORIES.items() if re.search(pattern, self.reason)), "others")

    @property
    def side_by_side(self) -> bool:
        return side_by_side(self.name, self.shape)

    @property
    def joined(self) -> tuple[int, ...]:
        """The shape in which two matrices side by side are the halves of every row; otherwise the parameter's own."""
        return joined(self.name, self.shape)

    def as_stack(self, of: str = "experts") -> Route:
        """A stack of experts, or two matrices side by side, as matrices, unless these count as vectors."""
        if not (self.stack or self.side_by_side) or (self.kind, self.reason) != ("elementwise", f"{len(self.shape)}-D"):
            return self
        stacked = f"{math.prod(self.joined[:-2])} stacked {of}"
        if (one := vector(self.joined)) is not None:
            return replace(self, reason=f"{stacked} of {one}")
        return replace(self, kind="matrix", reason=stacked if self.stack else f"{self.reason} weight")


def blocks_of(route: Route, shape: Sequence[int], source: str, setting: Word | Division) -> tuple[Block, ...]:
    """The blocks of a parameter of ``shape`` by a setting. Raises ValueError if it does not fit them."""
    whose, cut, transposed = f"{source}: {route.name!r} of shape {tuple(shape)}", route.cut, route.transposed
    if setting in ("stack", "flatten") and len(shape) < 3:
        raise ValueError(f"{whose}: {setting!r} is for parameters of three dimensions or more")
    if setting == "flatten":
        grid = Grid.of(shape, 0)
        return divided(grid, undivided(grid.columns if transposed else grid.rows), transposed=transposed)
    outputs, inputs = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    try:
        parts = setting.parts(outputs, whose) if isinstance(setting, Division) else undivided(outputs)
    except ValueError as error:
        if isinstance(setting, Division) and setting.stored is None and setting.fits(inputs):
            other = "outputs_first" if transposed else "inputs_first"
            raise ValueError(
                f"{error}, or, if the weight has its outputs in the other dimension, add 'stored': {other!r}"
            ) from None
        raise
    if cut is not None and cut.shared and isinstance(setting, Division) and setting.heads is None:
        parts = _on_each_rank(parts, outputs, cut.ranks, whose)
    return divided(Grid.of(shape, len(shape) - 2), parts, transposed=transposed)


def routes_of(
    model: nn.Module,
    include: Sequence[str],
    exclude: Sequence[str],
    heads: Mapping[int, Head],
    atoms: AtomSettings | None = None,
    *,
    shown: Shown | None = None,
    flatten: bool = False,
) -> list[Route]:
    """Route every parameter of ``model``, or of a part of one, in ``named_parameters()`` order, by its plain name.

    Experts that a model stacks in one parameter go to the matrix rule, slice by slice, and with ``flatten``
    convolutions. ``include`` sends 2-D parameters to the matrix rule and ``exclude`` keeps parameters from it, both by
    globs on a parameter's names (a tied parameter has several); exclude wins. ``heads`` are the whole model's output
    heads, by the ids of weights. ``atoms`` may make matrices of a parameter with more than two dimensions, unless a
    glob excludes it. ``shown`` is what the model's code shows of its weights.
    """
    uses, shown = uses_of(model), shown or Shown(model, full_shape)
    routes = []
    for name, param in named_parameters(model):
        found = _routed(name, param, uses[id(param)], heads.get(id(param)), include, exclude)
        found = _flattened(found, uses[id(param)], heads.get(id(param))) if flatten else found
        set_so = atoms.makes_matrix(found.names, found.shape) if atoms is not None else None
        if set_so is not None and found.kind == "elementwise" and _first_match(found.names, exclude) is None:
            word = atoms.of(found.names) if atoms is not None else None
            flat = _flattened(found, uses[id(param)], None) if word is not None and word[1] == "flatten" else found
            found = replace(flat, kind="matrix", reason=set_so, truth="option")
        routes.append(found)
    routes = [
        _of_numbers(route, param)
        for route, (_, param) in zip(_by_use(model, routes, uses, shown, flatten, atoms), named_parameters(model))
    ]
    told = [found if (told := _set_transposed(found, atoms)) is None else told for found in routes]
    return [
        replace(r, reason=f"{r.reason}, stored transposed") if r.kind == "matrix" and r.transposed else r for r in told
    ]


def _of_numbers(route: Route, param: Tensor) -> Route:
    """Complex numbers element by element: matrix rules compute with real ones, and would drop the imaginary parts.

    Raises ValueError if an option says otherwise.
    """
    if route.kind != "matrix" or not param.is_complex():
        return route
    if route.truth == "option":
        raise ValueError(
            f"{route.name!r} is {str(param.dtype).removeprefix('torch.')}, and an option sends it to the matrix rule, "
            "which computes with real numbers; leave it to the element-wise rule, or store real and imaginary parts as "
            "two parameters"
        )
    return replace(route, kind="elementwise", reason="complex numbers", stack=False)


def _routed(
    name: str,
    param: Tensor,
    same: Sequence[Use],
    head: Head | None,
    include: Sequence[str],
    exclude: Sequence[str],
) -> Route:
    """The route of a parameter by the structure of the model, marks and globs."""
    shape, names = full_shape(param), [name] + [use.name for use in same if use.name != name]
    kind: Kind
    truth: Truth = "class"
    if not param.requires_grad:
        kind, reason = "frozen", "requires_grad is False"
    else:
        mark = next((f"{key}={value}" for key, value in MARKS.items() if getattr(param, key, None) is value), None)
        kind, reason, truth = _by_structure(shape, same, head)
        if mark is not None and (kind == "matrix" or reason in (f"{len(shape)}-D", CONVOLUTION)):
            kind, reason, truth = "elementwise", f"marked {mark}", "option"
        if (globbed := by_glob(shape, names, include, exclude)) is not None:
            (kind, reason), truth = globbed, "option"
    transposed, stack = any(_stored_transposed(use.module) for use in same), _is_stack(joined(name, shape), same)
    found = Route(
        name, shape, kind, reason, tuple(names[1:]), stack, transposed, cut=cut_of(param), truth=truth
    ).as_stack()
    return replace(found, truth="name") if found.kind == "matrix" and stack and truth == "class" else found


def _flattened(route: Route, same: Sequence[Use], head: Head | None) -> Route:
    """A convolution as a matrix, unless something else decides."""
    found = next((one for use in same if (one := of_module(use.module)) is not None and use.key == "weight"), None)
    return route if found is None else _as_matrix(route, found, head)


def _as_matrix(route: Route, convolution: Convolution, head: Head | None) -> Route:
    if route.kind != "elementwise" or route.reason not in (f"{len(route.shape)}-D", CONVOLUTION) or 0 in route.shape:
        return route
    if head is not None:
        return replace(route, reason=head.reason, truth=head.truth)
    if convolution.is_depthwise(route.shape):
        return replace(route, reason=DEPTHWISE)
    if (one := vector(convolution.matrix(route.shape))) is not None:
        return replace(route, reason=f"convolution of {one}")
    grid, reason = Grid.of(route.shape, 0), f"{FLATTENED}{f', {convolution.groups} groups' * (convolution.groups > 1)}"
    flat = replace(route, kind="matrix", reason=reason, transposed=convolution.transposed, truth="option")
    return replace(flat, grid=grid, groups=convolution.groups)


def _by_use(
    model: nn.Module,
    routes: Sequence[Route],
    uses: Mapping[int, Sequence[Use]],
    shown: Shown,
    flatten: bool,
    atoms: AtomSettings | None,
) -> list[Route]:
    """What modules' own parameters are for (``by_use``), where no option, class or word in a name has said it.

    Some modules' ``forward`` does not show it. Of the 2-D parameters that transformers 5.24 has there, and no other
    reason tells, 19 of 24 are tables; and all five others that are matrices but two have one of the words in
    ``MULTIPLIED`` in their names.
    """
    params, found = dict(named_parameters(model)), []
    unclear, by_name = [], []
    for route in routes:
        same = uses[id(params[route.name])]
        is_set = atoms is not None and atoms.of(route.names) is not None and len(route.shape) > 2
        if _is_table(route, same, params[route.name], shown, atoms):
            found.append(
                replace(
                    route, kind="elementwise", reason=NOT_MULTIPLIED, truth="example" if shown.has_example else "guess"
                )
            )
            continue
        if not _is_asked(route, same) or is_set:
            found.append(route)
            continue
        used = use_of(shown, [use.holder for use in same], params[route.name], route.shape)
        if len(route.shape) == 2 and any(is_own_linear(use.module) and use.key == "weight" for use in same):
            found.append(route if used is None or used.table else _as_used(route, used, flatten))  # by its class
            continue
        if used is None and len(route.shape) == 2 and MULTIPLIED.search(_own_name(route.name)):
            if atoms is None or atoms.of(route.names) is None:
                by_name.append(route.name)
            found.append(replace(route, truth="name"))
        elif used is not None and used.across:
            unclear.append(route.name)
            found.append(replace(route, kind="elementwise", reason=f"{len(route.shape)}-D", stack=False))
        elif used is None:
            if not route.stack:
                unclear.append(route.name)
            found.append(route if len(route.shape) > 2 else replace(route, kind="elementwise", reason=NOT_SHOWN))
        else:
            found.append(_as_used(route, used, flatten))
    if unclear:
        warn(
            f"No forward showed what these parameters are for: {named(unclear)}. The element-wise rule trains them, "
            "as most such parameters are tables. Name those that are matrices in the option include, stacks of "
            "matrices as 'stack' in atoms, the others in exclude; an example of the model's arguments, "
            "example=(args, kwargs), may show it"
        )
    if by_name:
        warn(
            f"No forward showed how these weights are multiplied: {named(by_name)}. By their names each is one matrix, "
            "of (outputs, inputs). An example of the model's arguments, example=(args, kwargs), may show it. Otherwise "
            f"set the option atoms: {{{named(by_name[:1])}: 'whole'}}, or {{'stored': 'inputs_first'}} for 'whole'"
        )
    return found


def _is_table(route: Route, same: Sequence[Use], param: Tensor, shown: Shown, atoms: AtomSettings | None) -> bool:
    """Whether it is the weight of a linear that is never called: rows are taken from it."""
    is_plain = (route.kind, route.reason, route.truth) == ("matrix", TWO_D, "class") and len(same) == 1
    if not is_plain or not isinstance(same[0].module, nn.Linear) or (atoms is not None and atoms.of(route.names)):
        return False
    return shown.only_looked_up(same[0].holder, param)


def _own_name(name: str) -> str:
    """The last part that is no number, as of the members of a ParameterList."""
    return next((part for part in reversed(name.split(".")) if not part.isdecimal()), name)


def _is_asked(route: Route, same: Sequence[Use]) -> bool:
    if route.kind == "frozen" or route.truth == "option" or any(use.adapter is not None for use in same):
        return False
    if 0 in route.shape or route.transposed:
        return False
    if len(route.shape) == 2 and all(is_bare(use.module) or is_own_linear(use.module) for use in same):
        return (route.kind, route.reason) == ("matrix", TWO_D)
    is_plain = (route.kind, route.reason) == ("elementwise", f"{len(route.shape)}-D")
    bare = len(route.shape) > 2 and all(is_bare(use.module) or is_own_linear(use.module) for use in same)
    return bare and not route.side_by_side and (route.stack or is_plain)


def _as_used(route: Route, used: Used, flatten: bool) -> Route:
    truth: Truth = used.truth
    if used.table:
        return replace(route, kind="elementwise", reason=NOT_MULTIPLIED, stack=False, truth=truth)
    if used.convolution is not None:
        found = replace(route, reason=CONVOLUTION, truth=truth)
        return _as_matrix(found, used.convolution, None) if flatten else found
    transposed = bool(used.transposed)
    if len(route.shape) == 2 or (route.stack and route.kind == "matrix" and used.grid is None):
        return replace(route, transposed=transposed, truth=truth)
    if used.stack:
        return replace(route, stack=True, transposed=transposed, truth=truth).as_stack("matrices")
    if used.grid is None or (one := vector((used.grid.rows, used.grid.columns))) is not None:
        return route if used.grid is None else replace(route, reason=one or "", truth=truth)
    slices = used.grid.slices
    reason = f"{slices} stacked kernels" if slices > 1 else f"{len(route.shape)}-D weight of one matrix"
    return replace(route, kind="matrix", reason=reason, stack=False, transposed=transposed, grid=used.grid, truth=truth)


def _set_transposed(route: Route, atoms: AtomSettings | None) -> Route | None:
    """The route as a setting says that it is stored; None if none does."""
    set_so = atoms.transposed(route.names) if atoms is not None else None
    return None if set_so is None else replace(route, transposed=set_so, truth="option")


def shares(routes: Sequence[Route]) -> dict[tuple[str, str], float]:
    """The share of the trained elements by rule and by what they are: "" for matrices. The largest of a rule first."""
    trained = [route for route in routes if route.kind != "frozen"]
    total = max(1, sum(math.prod(route.shape) for route in trained))
    found: dict[tuple[str, str], int] = {}
    for route in trained:
        key = route.rule or route.kind, "" if route.kind == "matrix" else route.category
        found[key] = found.get(key, 0) + math.prod(route.shape)
    order = sorted(found, key=lambda key: (key[1] != "", -found[key]))
    return {key: found[key] / total for key in order if found[key]}


SMALLEST_SHARE = 0.5
NOT_HIDDEN = ("embeddings", "heads", "tables", "excluded", "adapters", "norms and vectors")


def warn_of_share(routes: Sequence[Route]) -> None:
    """Warn if the matrix rule trains less than half of what is neither embedding, head, table, norm nor excluded.

    These are element-wise whatever one chooses. Of the rest, which is what a matrix rule is chosen for, the larger half
    decides how the model trains, so below a half another rule decides than the one that was named.
    """
    sizes = {"": 0}
    for route in routes:
        if route.kind != "frozen":
            what = "" if route.kind == "matrix" else route.category
            sizes[what] = sizes.get(what, 0) + math.prod(route.shape)
    hidden = {what: size for what, size in sizes.items() if what not in NOT_HIDDEN}
    share = hidden[""] / max(1, sum(hidden.values()))
    largest = max((what for what in hidden if what), key=hidden.__getitem__, default="")
    if not largest or share >= SMALLEST_SHARE or not hidden[""]:
        return
    rule = next(route.rule for route in routes if route.kind == "matrix")
    warn(
        f"{rule} trains {share:.1%} of the elements that are neither embeddings, heads, tables nor norms, and most "
        f"others are {largest}. {WAYS.get(largest, WAYS['parameters of unknown use'])}, or name them in the option "
        "exclude, if that is meant"
    )


WAYS = {  # to train more as matrices
    "convolutions": "To train these as matrices, write convolutions='flatten'",
    "parameters of 3 and more dimensions": "If they are stacks of matrices, write 'stack' for them in the option atoms",
    "parameters of unknown use": "Name those that are matrices in the option include",
}


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


def _by_structure(shape: Sequence[int], uses: Sequence[Use], head: Head | None) -> tuple[Kind, str, Truth]:
    added = next((use.adapter for use in uses if use.adapter is not None), None)
    if added is not None:
        return *_by_adapter(added, shape, head), "class"
    if any(_is_embedding(use.module) for use in uses):
        tied = [use.module_name for use in uses if not _is_embedding(use.module)]
        return "elementwise", f"embedding, tied to {tied[0]}" if tied else "embedding", "class"
    if len(shape) != 2:
        if any(use.key == "weight" and of_module(use.module) is not None for use in uses):
            return "elementwise", CONVOLUTION, "class"
        if head is not None and len(shape) > 2:
            return "elementwise", head.reason, head.truth
        return "elementwise", f"{len(shape)}-D", "class"
    for use in uses:
        # A norm may have one weight per head and channel (Cohere's does), and every model family brings its own class.
        if isinstance(use.module, NORMS) or type(use.module).__name__.endswith("Norm"):
            return "elementwise", "norm", "class"
        if use.key in BY_NAME:
            return "elementwise", BY_NAME[use.key], "name"
        for word in use.key.split("_"):
            if word in BY_WORD:
                return "elementwise", BY_WORD[word], "name"
    if head is not None:
        return "elementwise", head.reason, head.truth
    if 0 in shape:
        return "elementwise", "no elements", "class"
    one = vector(shape)
    return ("matrix", TWO_D, "class") if one is None else ("elementwise", one, "class")


def _is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is torch's embedding, or a tensor-parallel one of Megatron or AutoTP."""
    return isinstance(module, EMBEDDINGS) or type(module).__name__.endswith("ParallelEmbedding")


def vector(shape: Sequence[int]) -> str | None:
    """The reason why a matrix, or those of a stack, count as vectors: orthogonalizing a vector only normalizes it."""
    if 1 not in shape[-2:]:
        return None
    return "one row" if shape[-2] == 1 else "one column"


def _by_adapter(adapter: Adapter, shape: Sequence[int], head: Head | None) -> tuple[Kind, str]:
    """LoRA's A and B are routed as the weight that they change, both or neither."""
    if adapter.path[0] not in LORA:
        return "elementwise", adapter.what
    name = plain_name(adapter.layer.name)
    said, lora = lora_factor(adapter.path[0], name), lora_of(adapter.layer.module, adapter.path[1])
    if len(shape) != 2 or lora is None:
        return "elementwise", f"{said}: {f'{len(shape)}-D' if len(shape) != 2 else 'not a plain linear'}"
    a, b = full_shape(lora.a), full_shape(lora.b)
    kind, reason, _ = _by_structure((b[0], a[1]), [Use(f"{name}.{lora.key}", name, lora.base)], head)
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
    for module in modules_of(model).values():
        if not callable(getattr(module, DECLARES, None)):
            continue
        source, own = f"{type(module).__name__}.{DECLARES}", dict(parameters_of(module))
        for key, setting in AtomSettings.parse(getattr(module, DECLARES)(), source).by_glob:
            param = next((param for name, param in own.items() if plain_name(name) == key), None)
            if param is None:
                hint = suggestion(key, list(own))
                raise ValueError(f"{source}: {key!r} is not the name of a parameter of the module; {hint}")
            declared[names[id(param)]] = source, setting
    return replace(AtomSettings.parse(atoms), declared=declared)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()`` with plain names."""
    return ((plain_name(name), param) for name, param in parameters_of(model))
