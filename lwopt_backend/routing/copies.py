"""Copies of modules on the meta device, and what modules that are alike have in common."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.routing.models import modules_of, parameters_of

Shape = Callable[[Tensor], Sequence[int]]  # of a parameter, whole
COPIED = (dict, list, OrderedDict)  # what a ``forward`` may change
PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type)
# Attributes of a module that say nothing about its ``forward``
OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})
NUMBERED = ("idx", "index", "number", "_id")  # ends of attributes that number layers
DEPTH = 4
OF_HOOKS = ("_v", "_orig")  # ends of the names of parameters of which hooks compute others


def bare(module: nn.Module, shape: Shape, memo: dict[int, Any], kept: Mapping[int, Sequence[str]] | None = None) -> Any:
    """A copy of a module and what is in it, on the meta device, without hooks; ``memo`` has what is copied, by id.

    torch.compile's wrapper is left out, and a linear whose weight is quantized is a linear. Lists of modules have the
    members that are ``kept``, by the list's id; the others have all.
    """
    if id(module) in memo:
        return memo[id(module)]
    if type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, "_orig_mod", None), nn.Module):
        memo[id(module)] = bare(module._orig_mod, shape, memo, kept)  # type: ignore[arg-type]
        return memo[id(module)]
    if _is_quantized(module):
        memo[id(module)] = linear = _as_linear(module)
        if (weight := module._parameters.get("weight")) is not None:
            memo[id(weight)] = linear.weight
        return linear
    copied: Any = object.__new__(type(module))
    memo[id(module)] = copied
    own = {key: value.copy() if type(value) in COPIED else value for key, value in vars(module).items()}
    own.update({key: type(value)() for key, value in own.items() if key.endswith("_hooks") and value})
    own.update(training=False, _compiled_call_impl=None)
    forward = own.pop("forward", None)
    if isinstance(forward, MethodType) and forward.__self__ is module:
        own["forward"] = MethodType(forward.__func__, copied)
    elif forward is not None and not _is_compiled(forward):
        own["forward"] = forward
    own["_parameters"] = {key: _bare(param, shape, memo) for key, param in dict.items(module._parameters)}
    own.update({key: _beside(key, own[key], shape, memo, own["_parameters"]) for key in own if key not in OWN})
    own["_buffers"] = {key: None if one is None else one.to("meta") for key, one in dict.items(module._buffers)}
    names = (kept or {}).get(id(module))
    inside = module._modules if names is None else {str(place): module._modules[key] for place, key in enumerate(names)}
    own["_modules"] = {key: one and bare(one, shape, memo, kept) for key, one in inside.items()}
    vars(copied).update(own)
    for key, value in own.items():  # modules beside their place
        if isinstance(value, nn.Module):
            vars(copied)[key] = bare(value, shape, memo, kept)
    return copied


def _is_data(value: Any) -> bool:
    if type(value) in COPIED:
        return any(map(_is_data, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and value.ndim > (0 if value.is_floating_point() or value.is_complex() else 1)


def _beside(key: str, value: Any, shape: Shape, memo: dict[int, Any], params: Mapping[str, Tensor | None]) -> Any:
    """What a module with these ``params`` keeps as an attribute: a tensor, or a container of some, on the meta device.

    Few integers keep their values, as sizes. A parameter, such as those in the list of torch's recurrent modules, is
    its copy. So is what a hook computes of one before each call: torch's earlier ``weight_norm`` and ``spectral_norm``,
    and pruning.
    """
    if not _is_data(value):
        return value
    if isinstance(value, dict):
        return type(value)((name, _beside(name, each, shape, memo, {})) for name, each in value.items())
    if isinstance(value, list):
        return [_beside("", each, shape, memo, {}) for each in value]
    if isinstance(value, nn.Parameter):
        return _bare(value, shape, memo)
    of_hook = next((param for end in OF_HOOKS if (param := params.get(f"{key}{end}")) is not None), None)
    return value.to("meta") if of_hook is None or of_hook.shape != value.shape else of_hook


def _bare(param: Tensor | None, shape: Shape, memo: dict[int, Any]) -> Tensor | None:
    if param is None:
        return None
    if id(param) not in memo:
        dtype = param.dtype if param.is_complex() or _is_plain(param.dtype) else torch.bfloat16
        empty = torch.empty(tuple(shape(param)), dtype=dtype, device="meta")
        memo[id(param)] = nn.Parameter(empty, requires_grad=False)
    found: Tensor = memo[id(param)]
    return found


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def dtype_of(module: nn.Module) -> torch.dtype:
    """That of the module's first plain floating-point parameter, for numbers that it is given."""
    dtypes = (param.dtype for _, param in parameters_of(module))
    return next((dtype for dtype in dtypes if _is_plain(dtype)), torch.float32)


def _is_compiled(forward: Any) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable")


def _is_quantized(module: nn.Module) -> bool:
    """A linear that stores its weight in another form, which only its own kernels read."""
    if not all(type(getattr(module, key, None)) is int for key in ("in_features", "out_features")):
        return False
    weight = module._parameters.get("weight", module._buffers.get("weight"))
    if any(f"weight{end}" in module._parameters for end in OF_HOOKS):
        return False
    if weight is None:
        return any(key.startswith(("qweight", "weight_")) for key in (*module._buffers, *module._parameters))
    plain = weight.is_floating_point() and type(weight).__module__.startswith("torch.")
    return not plain and weight.ndim == 2 and not weight.requires_grad


def _as_linear(module: Any) -> nn.Module:
    with torch.device("meta"):
        linear = nn.Linear(module.in_features, module.out_features, bias=False)
    return linear.requires_grad_(False)


# Layers that are alike

FEW = 4  # layers that are alike, of which all run


@dataclass(frozen=True)
class Thin:
    """Which members of lists of modules run, of many that are alike: the first two and the last. ``kept`` has their
    names by the list's id; ``same`` the parameter of the second in place of that of one left out, by their ids."""

    kept: Mapping[int, Sequence[str]]
    same: Mapping[int, int]


def thin(module: nn.Module, kinds: Kinds) -> Thin | None:
    """None if no list has so many members that are alike."""
    kept: dict[int, list[str]] = {}
    same: dict[int, int] = {}
    for one in modules_of(module).values():
        if not isinstance(one, (nn.ModuleList, nn.Sequential)) or len(one) <= FEW:
            continue
        members = [(key, child) for key, child in one._modules.items() if child is not None]
        of_list: list[str] = []
        for _, run in groupby(members, key=lambda member: kinds.of(member[1])):
            alike = [*run]
            left_out = alike[2:-1] if len(alike) > FEW else []
            of_list += [name for name, _ in ([*alike[:2], alike[-1]] if left_out else alike)]
            for _, child in left_out:
                pairs = zip(parameters_of(child), parameters_of(alike[1][1]), strict=True)
                same.update({id(theirs): id(ours) for (_, theirs), (_, ours) in pairs})
        if len(of_list) < len(members):
            kept[id(one)] = of_list
    return Thin(kept, same) if kept else None


# Values of modules: equal for modules of which one run shows all


class Kinds:
    """Numbers of kinds of modules, the same for modules with equal classes, code, sizes, flags and configurations.

    Everything is compared by value; an object of which the values are not known stands for itself, and is kept.
    Attributes that number layers are left out. What a ``forward`` calls outside of its module's classes is taken to be
    the same.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._of_modules: dict[int, int] = {}
        self._of_objects: dict[int, Hashable] = {}
        self._alive: list[Any] = []

    def of(self, module: nn.Module) -> int:
        if id(module) not in self._of_modules:
            self._of_modules[id(module)] = -1  # of a module within itself
            children = tuple((key, one and self.of(one)) for key, one in module._modules.items())
            params = tuple((key, self._tensor(one)) for key, one in dict.items(module._parameters))
            buffers = tuple((key, _like(one)) for key, one in dict.items(module._buffers))
            tied = self._tied(module) if children else ()
            own = tuple(sorted((key, self._value(value, DEPTH)) for key, value in _own(module)))
            key = type(module), codes_of(type(module)), own, params, buffers, children, tied
            self._of_modules[id(module)] = _NUMBERS.setdefault(key, len(_NUMBERS))
            self._alive.append(module)
        return self._of_modules[id(module)]

    def _tensor(self, param: Tensor | None) -> Hashable:
        if param is None:
            return None
        return tuple(self._shape(param)), type(param), param.dtype, param.requires_grad

    def _tied(self, module: nn.Module) -> Hashable:
        """Which parameters in the module are the same ones."""
        names: dict[int, list[str]] = {}
        for name, param in parameters_of(module, remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        return tuple(tuple(same) for same in names.values() if len(same) > 1)

    def _value(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, PLAIN):
            return (type(value), value) if isinstance(value, (bool, int, float)) else value
        if isinstance(value, Tensor):
            return _like(value)
        if isinstance(value, nn.Module):
            return self.of(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            if len(value) > 10**4:
                return type(value), len(value)
            return type(value), tuple(self._value(each, depth - 1) for each in value) if depth > 0 else len(value)
        if isinstance(value, dict):
            items = ((repr(key), self._value(each, depth - 1)) for key, each in value.items()) if depth > 0 else ()
            return type(value), tuple(sorted(items, key=lambda item: item[0]))
        if isinstance(value, MethodType):
            return getattr(value.__func__, "__code__", MethodType)
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()] if depth > 0 else []
            return value.__code__, self._value(value.__defaults__, depth - 1), self._value(cells, depth - 1)
        if id(value) not in self._of_objects:
            self._alive.append(value)
            kind: Any = type(value)
            self._of_objects[id(value)] = kind  # of an object within itself
            inside = getattr(value, "__dict__", None)
            if inside is not None and depth > 0:
                pairs = ((key, self._value(each, depth - 1)) for key, each in inside.items())
                self._of_objects[id(value)] = kind, tuple(sorted(pairs, key=lambda pair: pair[0]))
        return self._of_objects[id(value)]


_NUMBERS: dict[Hashable, int] = {}


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key in OWN or key.endswith("_hooks") or key.endswith("_hooks_with_kwargs") or key.endswith(NUMBERED):
            continue
        if key.startswith("_") and key.endswith(("hooks_always_called", "_impl")):
            continue
        yield key, value


def _like(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def codes(module: nn.Module) -> set[CodeType]:
    """Those of the methods of the classes of a module and what is in it, but torch's."""
    found: set[CodeType] = set()
    every = [*modules_of(module).values()]
    for kind in {type(one) for one in every}:
        found.update(codes_of(kind))
    for one in every:
        forward = vars(one).get("forward")
        code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
        if code is not None:
            found.add(code)
    return found


def codes_of(kind: type) -> tuple[CodeType, ...]:
    kinds = [each for each in kind.__mro__ if each not in nn.Module.__mro__]
    methods = (method for each in kinds if not _is_torchs(each) for method in vars(each).values())
    plain = (inspect.unwrap(method) for method in methods if callable(method))
    return tuple(method.__code__ for method in plain if hasattr(method, "__code__"))


def _is_torchs(kind: type) -> bool:
    return f"{kind.__module__}.".startswith("torch.")
