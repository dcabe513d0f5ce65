"""How a model's own code divides the outputs of its weights, found by running modules without memory.

Copies of modules run on the meta device, with parameters of the same shapes and without hooks: nothing is allocated or
communicated, and the model is not touched. What a run shows is found once for modules that are alike.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.routing.follow import Ends, Follow, Lists, Use, partition
from lwopt_backend.routing.models import is_peft
from lwopt_backend.runtime.collectives import WithoutCollectives

Shape = Callable[[Tensor], Sequence[int]]  # of a parameter, whole
TOKENS = 7
MANY = 4096  # for modules that cut what they are given into windows
WIDTHS = 4  # sizes of inputs that are tried
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
LEVELS = 3  # modules around a weight whose ``forward`` may divide its outputs
COPIED = (dict, list, OrderedDict)  # what a ``forward`` may change
MOST = 64  # weights of a module that is run


@dataclass(frozen=True)
class Traced:
    """What became of the outputs of ``weight``, of that ``name``, when ``module`` ran; None if it was not used.

    ``error`` is why the module's ``forward`` stopped, if it did.
    """

    module: nn.Module
    name: str
    weight: Tensor
    ends: Ends | None
    error: Exception | None


def traced(model: nn.Module, outputs: Mapping[int, int], shape: Shape) -> dict[int, list[Traced]]:
    """What becomes of the outputs of weights, by id, for each module that holds the weight.

    ``outputs`` has the weights, and the dimension from the end that has a weight's outputs: 2 or 1.
    """
    modules, runs = dict(model.named_modules(remove_duplicate=False)), _Runs(shape)
    found: dict[int, list[Traced]] = {}
    for name, holder in {id(module): (name, module) for name, module in reversed(modules.items())}.values():
        for key, param in dict.items(holder._parameters):
            if param is not None and id(param) in outputs and len(shape(param)) in (2, 3):
                full = f"{name.rpartition('.')[2]}.{key}"
                use = _use(holder, full, param, outputs[id(param)], _users(name, modules), runs)
                found.setdefault(id(param), []).append(use)
    return found


def unmultiplied(model: nn.Module, params: Sequence[Tensor], shape: Shape) -> dict[int, bool]:
    """Whether ``params``, which no linear has, are only added, scaled with or looked up, by id; none if not known."""
    modules, runs, found = dict(model.named_modules(remove_duplicate=False)), _Runs(shape), dict[int, bool]()
    wanted = {id(param) for param in params}
    for name, holder in modules.items():
        for param in holder._parameters.values() if wanted else ():
            for module in _users(name, modules) if id(param) in wanted else ():
                places = runs.places(module)
                if len(places) > MOST:
                    break
                uses = runs.of(module).uses.get(places[id(param)], set())
                if "multiplied" in uses or uses == {"added"}:
                    found[id(param)] = "multiplied" not in uses
                if uses:
                    break
    return found


def is_bare(module: nn.Module) -> bool:
    """Whether it is not known what a module does with its parameters: its class is none of torch's, and no linear."""
    own = [kind for kind in type(module).__mro__ if not f"{kind.__module__}.".startswith(("torch.", "builtins."))]
    is_linear = isinstance(module, nn.Linear) or "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"
    return bool(own) and not is_linear


def _use(holder: nn.Module, name: str, weight: Tensor, dim: int, users: Iterator[nn.Module], runs: _Runs) -> Traced:
    """What the first module shows that uses the weight; if this only wraps it and returns its outputs, the next."""
    found = Traced(holder, name, weight, None, None)
    for module in users:
        places = runs.places(module)
        if len(places) > MOST:
            break
        its = runs.of(module)
        one = Traced(module, name, weight, its.ends.get((places[id(weight)], dim)), its.error)
        if found.ends is None:
            found = one
        if one.ends is not None:
            found = one
            if not (one.ends.returned and (len(places) == 1 or is_peft(module))):
                break
    return found


def _users(name: str, modules: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """The modules whose ``forward`` may use a weight of module ``name``, from within."""
    path = name.split(".") if name else []
    above = (modules[".".join(path[:length])] for length in range(len(path), -1, -1))
    return islice((module for module in above if not isinstance(module, (nn.Linear, *CONTAINERS))), LEVELS)


def matrices(module: nn.Module) -> list[Tensor]:
    """The parameters of a module that may be matrices."""
    return [param for param in module.parameters() if len(getattr(param, "ds_shape", param.shape)) in (2, 3)]


class _Runs:
    """Runs of modules, one for those that are alike."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._known: dict[Hashable, Run] = {}
        self._places: dict[int, dict[int, int]] = {}

    def places(self, module: nn.Module) -> dict[int, int]:
        """The numbers of a module's ``matrices``, by id."""
        if id(module) not in self._places:
            self._places[id(module)] = {id(param): number for number, param in enumerate(matrices(module))}
        return self._places[id(module)]

    def of(self, module: nn.Module) -> Run:
        key = _kind(module, self._shape)
        if key not in self._known:
            self._known[key] = best_run(module, self._shape)
        return self._known[key]


def _kind(module: nn.Module, shape: Shape) -> Hashable:
    """What modules that are alike have in common."""

    def of(one: nn.Module) -> Hashable:
        plain = {key: value for key, value in vars(one).items() if type(value) in (int, bool, str, type(None))}
        plain = {key: value for key, value in plain.items() if not key.endswith(("idx", "index", "number", "_id"))}
        return type(one), tuple(sorted(plain.items(), key=str)), id(vars(one).get("config"))

    params = tuple((name, tuple(shape(param))) for name, param in module.named_parameters())
    return tuple((name, of(one)) for name, one in module.named_modules()), params


# Copies of modules


def bare(module: nn.Module, shape: Shape, memo: dict[int, Any]) -> Any:
    """A copy of a module and what is in it, on the meta device, without hooks; ``memo`` has what is copied, by id."""
    if id(module) in memo:
        return memo[id(module)]
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    own = {key: value.copy() if type(value) in COPIED else value for key, value in vars(module).items()}
    own.update({key: type(value)() for key, value in own.items() if key.endswith("_hooks") and value})
    own.update(training=False, _compiled_call_impl=None)
    forward = own.pop("forward", None)
    if isinstance(forward, MethodType) and forward.__self__ is module:
        own["forward"] = MethodType(forward.__func__, copied)
    own["_parameters"] = {key: _bare(param, shape, memo) for key, param in dict.items(module._parameters)}
    own["_buffers"] = {key: None if one is None else one.to("meta") for key, one in dict.items(module._buffers)}
    own["_modules"] = {key: one and bare(one, shape, memo) for key, one in dict.items(module._modules)}
    vars(copied).update(own)
    return copied


def _bare(param: Tensor | None, shape: Shape, memo: dict[int, Any]) -> Tensor | None:
    if param is None:
        return None
    if id(param) not in memo:
        empty = torch.empty(tuple(shape(param)), dtype=torch.bfloat16, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=False)
    found: Tensor = memo[id(param)]
    return found


# Runs


@dataclass(frozen=True)
class Run:
    """What became of the outputs of a module's ``matrices``, by number and dimension; and how it failed.

    ``steps`` are the operations on them, ``divided`` is how many weights have parts. ``uses`` are those of ``is_bare``
    modules' parameters, by number.
    """

    ends: Mapping[tuple[int, int], Ends]
    error: Exception | None
    steps: int
    divided: int = 0
    uses: Mapping[int, set[Use]] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[bool, int, int]:
        return self.is_whole, self.divided, self.steps

    @property
    def is_whole(self) -> bool:
        """Whether the forward ended, and used something."""
        return self.error is None and (bool(self.ends) or any(self.uses.values()))


def best_run(module: nn.Module, shape: Shape) -> Run:
    """The run that shows most, of those with likely arguments."""
    best = Run({}, None, 0)
    forward = vars(module).get("forward") or type(module).forward
    if forward in (nn.Module.forward, nn.modules.module._forward_unimplemented):
        return best
    signature = inspect.signature(module.forward)
    for width in _widths(module, shape):
        for args, kwargs in _arguments(module, signature, width):
            one = run(module, shape, args, kwargs)
            best = one if one.rank > best.rank or not best.steps else best
            if one.is_whole:
                return best
            if one.steps == 1:  # another size of the inputs
                break
    return best


def run(module: nn.Module, shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    """Run a copy of ``module``."""
    memo: dict[int, Any] = {}
    copied = bare(module, shape, memo)
    held = matrices(module)
    bare_ones = {id(param) for one in module.modules() if is_bare(one) for param in one._parameters.values()}
    linears = [number for number, param in enumerate(held) if id(param) not in bare_ones]
    follow = Follow([memo[id(param)] for param in held], _codes(module), linears)
    try:
        with torch.no_grad(), WithoutCollectives(), Lists(), torch.device("meta"), follow:
            result = copied.forward(*args, **kwargs)
        follow.returned(result)
    except Exception as error:  # anybody's code
        follow.failed(error.__traceback__)
        return _seen(follow, module, error.with_traceback(None))
    return _seen(follow, module, None)


def _seen(follow: Follow, module: nn.Module, error: Exception | None) -> Run:
    divided = sum(len(partition(ends, module)) > 1 for ends in follow.ends.values())
    return Run(follow.ends, error, follow.steps, divided, follow.uses)


def _codes(module: nn.Module) -> set[CodeType]:
    """Those of the methods of the module's classes, but torch's."""
    kinds = [kind for kind in type(module).__mro__ if kind not in nn.Module.__mro__]
    methods = [*(method for kind in kinds for method in vars(kind).values()), vars(module).get("forward")]
    plain = [inspect.unwrap(method) for method in methods if callable(method)]
    return {method.__code__ for method in plain if hasattr(method, "__code__")}


# Arguments of a ``forward``

ROTATIONS = ("position_embedding", "rotary", "freqs", "rope")
LIKE_INPUT = ("hidden", "states", "input", "query", "key", "value", "residual", "embeds", "context")
NOT_INPUT = ("past", "cache", "mask", "output", "position")
OF_HEADS = ("qk_rope_head_dim", "rotary_ndims", "rotary_dim", "head_dim", "head_size", "attention_head_size")


def _arguments(
    module: nn.Module, signature: inspect.Signature, width: int
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Likely arguments, the likeliest first."""
    every = signature.parameters.values()
    params = [each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    size = next((s for s in (getattr(module, name, None) for name in OF_HEADS) if type(s) is int and s > 0), 2)
    layer = next((key for of in vars(module).values() if type(of) is dict for key in of if type(key) is int), 0)
    turning = any(word in each.name for each in params for word in ROTATIONS)
    angles = torch.empty(1, TOKENS, size, dtype=torch.bfloat16, device="meta")
    pairs = [(each, each) for each in (angles, angles[..., :1], angles[..., : size // 2])]
    rotations = [*pairs, angles[..., :1], angles[0, :, : size // 2]] if turning else [None]
    optional = any(_is_input(each) and each.default is None for each in params[1:])
    rows = {(1, len(param)) for param in module._parameters.values() if param is not None and param.ndim == 2}
    leads = [(1, TOKENS), (TOKENS,), (1, TOKENS, TOKENS), (1, MANY), *sorted(rows)]
    ways = product((False, True) if optional else (False,), leads, rotations)
    for filled, lead, rotation in ways:
        value = torch.empty(*lead, width, dtype=torch.bfloat16, device="meta")
        given = {each.name: _value(each, number, value, rotation, layer) for number, each in enumerate(params)}
        given.update((each.name, value) for each in params if filled and given[each.name] is None and _is_input(each))
        positional = [each.name for each in params if each.kind is each.POSITIONAL_ONLY]
        yield [given.pop(name) for name in positional], given


def _value(param: inspect.Parameter, number: int, value: Tensor, rotation: Any, layer: int) -> Any:
    if number == 0:
        return value
    if param.name.endswith(("idx", "index")) and param.default in (None, param.empty):
        return layer
    if any(word in param.name for word in ROTATIONS) and param.default in (None, param.empty):
        return rotation
    if param.default is not param.empty:
        return param.default
    if "seqlens" in param.name or "lengths" in param.name:
        return torch.arange(2, dtype=torch.int32, device="meta")
    if "mask" in param.name or "cache" in param.name or "past" in param.name:
        return None
    if "position" in param.name:
        return torch.arange(TOKENS, device="meta")[None]
    return value if _is_input(param) else None


def _is_input(param: inspect.Parameter) -> bool:
    return any(word in param.name for word in LIKE_INPUT) and not any(word in param.name for word in NOT_INPUT)


def _widths(module: nn.Module, shape: Shape) -> list[int]:
    """Likely sizes of the inputs: those of the first linears' inputs, then those of the first weights."""
    inputs = [shape(one.weight)[-1] for one in module.modules() if isinstance(one, nn.Linear)][: WIDTHS // 2]
    sizes = [size for param in matrices(module) for size in (shape(param)[-1], shape(param)[-2])]
    return [*dict.fromkeys([*inputs, *sizes])][:WIDTHS]
