"""Any optimizer class as a rule: found by its path, and tried on a few numbers before it trains anything.

Whatever a class keeps must be in the state of its parameter, or be counted in its param group: that is what
checkpoints hold and what other ranks can go on with. Every rank tries a class before anything is trained with it; one
that trains otherwise when everything else is made anew is refused.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard, TypeVar

import torch
from pydantic import create_model
from torch import Tensor, nn

from lwopt_backend.config.options import Options, install_command, option, suggestion
from lwopt_backend.rules.protocol import TorchOptimizer, inner_steps
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.elementwise import Counters, ElementwiseStepper
from lwopt_backend.runtime.whole import Slices

STEPS = 8
LOWER_FROM, LOWER_BY = 3, 10  # from this step on the learning rate is so much lower, as under a schedule
REGISTER = "Register it with register_elementwise(..., new_state=...)"
T = TypeVar("T")


@dataclass(frozen=True)
class ElementwiseState:
    """The state that an optimizer keeps of an element-wise parameter: all zeros at first.

    ``like`` are the keys of tensors as large as the parameter, ``steps`` those of tensors without dimensions.
    """

    like: tuple[str, ...]
    steps: tuple[str, ...]
    counters: Counters
    steps_on_device: bool = False  # as fused implementations want it

    def new(self, flat: Tensor) -> dict[str, Tensor]:
        """Fresh state of the elements of ``flat``."""
        kinds = {**self.counters.state, **dict(self.counters.group.values())}
        device = flat.device if self.steps_on_device else "cpu"
        state = {key: torch.zeros((), device=device) for key in self.steps}
        state.update({k: torch.zeros((), dtype=torch.float32 if t is float else torch.int64) for k, t in kinds.items()})
        return {**state, **{key: torch.zeros_like(flat) for key in self.like}}


def _trial(run: Callable[[str, Mapping[str, Any], str], T]) -> Callable[[str, Mapping[str, Any]], T]:
    """Run a trial once for each path and arguments: on the CPU, or on the accelerator if only that works."""
    found: dict[str, T] = {}

    def once(path: str, arguments: Mapping[str, Any]) -> T:
        key = f"{path} {sorted(arguments.items(), key=str)!r}"
        if key not in found:
            try:
                found[key] = run(path, arguments, "cpu")
            except ValueError:
                if not torch.accelerator.is_available():
                    raise
                found[key] = run(path, arguments, str(torch.accelerator.current_accelerator()))
        return found[key]

    return once


@_trial
def try_matrix(path: str, arguments: Mapping[str, Any], device: str) -> None:
    """Raises ValueError for an optimizer that cannot be the rule of matrices."""
    value, grads = _numbers(device, 3, 2)
    whole, _, _ = _plain(path, arguments, value, grads)
    states: dict[str, Any] = {}
    ours = value.clone()
    with _tried(path):
        for step, grad in enumerate(grads):
            rule = TorchOptimizer(class_named(path), **_arguments(arguments, step))
            rule.step(ours, grad.clone(), states)
            states = copy.deepcopy(states)
            nested.check(states)
    _check_same(path, ours, whole)


@_trial
def elementwise_state(path: str, arguments: Mapping[str, Any], device: str) -> ElementwiseState:
    """What an optimizer keeps of an element-wise parameter.

    Raises ValueError for an optimizer whose update of some elements depends on others, which ranks that hold parts of a
    parameter could not tell; for one whose fresh state is not zeros; and for one that would lose some of it.
    """
    value, grads = _numbers(device, 6)
    whole, state, counted = _plain(path, arguments, value, grads)
    halves = [_plain(path, arguments, value[i : i + 3], [grad[i : i + 3] for grad in grads])[0] for i in (0, 3)]
    matrix = _plain(path, arguments, value.view(3, 2), [grad.view(3, 2) for grad in grads])[0]
    if not (_same(torch.cat(halves), whole) and _same(matrix.flatten(), whole)):
        raise ValueError(
            f"{path} is not element-wise: its update of some elements depends on the others, which other ranks hold, "
            "or on the shape; use it as the matrix rule, or another one here"
        )
    fused = bool(arguments.get("fused") or arguments.get("capturable"))
    found = replace(_form(path, state, counted, value), steps_on_device=fused)
    ours, kept = value.clone(), found.new(value)
    values = []
    with _tried(path):
        for step, grad in enumerate(grads):
            stepper = ElementwiseStepper(class_named(path), found.counters)
            stepper.step(_arguments(arguments, step), [Slices(ours, grad.clone(), kept)])
            values.append(ours.clone())
    if not _same(values[0], _plain(path, arguments, value, grads[:1])[0]):
        raise ValueError(f"{path}: its state does not begin with zeros. {REGISTER}")
    _check_same(path, ours, whole)
    return found


@_trial
def try_cautious(path: str, arguments: Mapping[str, Any], device: str) -> None:
    """Raises ValueError for an optimizer whose update depends on the weight, though it has no decay."""
    value, grads = _numbers(device, 6)
    moved = _plain(path, arguments, value, grads)[0] - value
    if not torch.allclose(moved, _plain(path, arguments, torch.zeros_like(value), grads)[0], rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"weight_decay_form is 'cautious', but the update of {path} depends on the weight even without decay; "
            "leave weight_decay_form out, or choose another optimizer"
        )


def _form(path: str, state: Mapping[str, Any], counted: Mapping[str, Any], value: Tensor) -> ElementwiseState:
    """The form of what an optimizer has after some steps."""
    like = tuple(k for k, v in state.items() if isinstance(v, Tensor) and v.shape == value.shape)
    steps = tuple(k for k, v in state.items() if isinstance(v, Tensor) and v.ndim == 0)
    rest = {k: v for k, v in state.items() if k not in (*like, *steps) and v is not None}
    for where, entries in (("state", rest), ("param group", counted)):
        odd = [key for key, entry in entries.items() if type(entry) not in (int, float)]
        if odd:
            raise ValueError(
                f"{path}: its {where} keeps {type(entries[odd[0]]).__name__} {odd[0]!r}; expected tensors as large as "
                f"the parameter, and numbers. {REGISTER}"
            )
    taken = {*like, *steps, *rest}
    group = {key: (f"group_{key}" if key in taken else key, type(entry)) for key, entry in counted.items()}
    return ElementwiseState(like, steps, Counters({key: type(entry) for key, entry in rest.items()}, group))


def _plain(
    path: str, arguments: Mapping[str, Any], value: Tensor, grads: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """The value, the state, and what changed in the param group, after some ordinary steps of the class itself."""
    with _tried(path):
        storage = value.clone()
        param = nn.Parameter(storage)
        inner = class_named(path)([param], **_arguments(arguments, 0))
        (group,) = inner.param_groups
        before = {key: repr(entry) for key, entry in group.items()}
        for step, grad in enumerate(grads):
            if step == LOWER_FROM:
                group.update({k: v for k, v in _arguments(arguments, step).items() if k == "lr" and k in group})
            param.grad = grad.clone()
            with inner_steps():
                inner.step()
        counted = {k: v for k, v in group.items() if k not in ("params", *arguments) and before.get(k) != repr(v)}
        return param.detach(), dict(inner.state.get(param, {})), counted


def _arguments(arguments: Mapping[str, Any], step: int) -> dict[str, Any]:
    lr = arguments.get("lr")
    lower = {"lr": lr / LOWER_BY} if step >= LOWER_FROM and isinstance(lr, (int, float)) else {}
    return {**arguments, **lower}


def _numbers(device: str, *shape: int) -> tuple[Tensor, list[Tensor]]:
    """A value and gradients of that shape, of six elements."""
    numbers = torch.Generator().manual_seed(0)
    value, *grads = torch.randn((1 + STEPS, 3, 2), generator=numbers).to(device)
    # The first gradient is nearly orthogonal to the value, row by row: only then do some optimizers project matrices.
    grads[0] = torch.stack([-value[:, 1], value[:, 0]], dim=1) + 0.05 * value
    return value.reshape(shape), [grad.reshape(shape) for grad in grads]


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal up to rounding: DeepSpeed's CPUAdam multiplies powers step by step, but not after a checkpoint."""
    return torch.allclose(one, other, rtol=2e-6, atol=2e-7)


def _check_same(path: str, ours: Tensor, whole: Tensor) -> None:
    if not _same(ours, whole):
        raise ValueError(
            f"{path} trains differently when it is made anew between steps, as after a checkpoint, or under a schedule"
            ": it keeps something outside state[parameter] and the counters in its param group, or follows other "
            "arguments than its own; expected all of it there"
        )


@contextmanager
def _tried(path: str) -> Iterator[None]:
    """Run an optimizer, always with the same random numbers; whatever it raises becomes a ValueError that names it."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # of the CPU alone: torch.manual_seed seeds accelerators, too
            yield
    except Exception as error:
        raise ValueError(f"{path} fails on a few numbers: {error or type(error).__name__}") from error


# Optimizers by the path of their class, ``"pytorch_optimizer.SOAP"``: their options, and whether they may be used.

Trial = Callable[[str, Mapping[str, Any]], object]
DECAY_FORM = "weight_decay_form"  # an option of ours, no argument of a class
PACKAGES = {"pytorch_optimizer": "pytorch-optimizer", "deepspeed": "deepspeed"}  # by the module that each installs


def path_of(given: Any) -> str:
    """The path of a class that is given as itself or as its path. Raises ValueError for anything else."""
    if isinstance(given, str):
        return given
    if isinstance(given, type):
        if "." in given.__qualname__:
            raise ValueError(
                f"class: {given.__qualname__} is defined inside a function or class; expected one at the top of a "
                "module, from which every rank can import it"
            )
        return f"{given.__module__}.{given.__qualname__}"
    raise ValueError(
        f"class: expected an optimizer's class or its path, e.g. 'pytorch_optimizer.SOAP'; found {given!r}"
    )


@functools.cache
def class_named(path: str) -> type[torch.optim.Optimizer]:
    """The optimizer class of that path. Raises ValueError if there is none, with the nearest name."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, ValueError) as error:  # TypeError: of ".a.B"
        package = PACKAGES.get(module_name.partition(".")[0])
        how = f"; run: {install_command(package)}" if package else ""
        raise ValueError(f"class {path!r} cannot be imported: {error}{how}") from error
    found = getattr(module, name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if _is_optimizer(value)]
        raise ValueError(f"class {path!r}: {module_name} has no {name!r}; {suggestion(name, known)}")
    if not _is_optimizer(found):
        raise ValueError(f"class {path!r}: expected a torch.optim.Optimizer, found {found!r}")
    return found


def _is_optimizer(value: Any) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)


@functools.cache
def options_of_class(path: str, *, with_class: bool, with_form: bool = False) -> type[Options]:
    """The arguments of a class as an options model: names and defaults as in its signature.

    One with ``**kwargs`` takes those of its base class, too. Of one with weight decay it can be said how it decays.
    """
    fields: dict[str, Any] = {"class": (str, ...)} if with_class else {}
    for name, parameter in _parameters(class_named(path)).items():
        fields[name] = (Any, ... if parameter.default is parameter.empty else parameter.default)
    if with_form and "weight_decay" in fields:
        meaning = "as the class has it; or only what the update moves towards zero"
        form = option("own", meaning, "Cautious Weight Decay, arXiv 2510.12402")
        fields[DECAY_FORM] = (Literal["own", "cautious"], form)
    return create_model(path.rpartition(".")[2], __base__=Options, **fields)


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The parameters of a class's constructor, except ``self`` and the optimizer's parameters."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if base is torch.optim.Optimizer:
            break
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.items())[2:]
        named = {k: p for k, p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and k != "defaults"}
        found = {**named, **found}
        if len(named) == len(parameters):
            break
    return found


def check_arguments(path: str, model: type[Options], given: Mapping[str, Any], trial: Trial) -> None:
    """Raises ValueError for arguments that the class itself refuses, or that fail in a ``trial``."""
    named = {key: value for key, value in given.items() if key != "class"}
    if not set(named) <= set(model.model_fields):
        return  # the model tells which are unknown
    fields = {key: field for key, field in model.model_fields.items() if key != "class"}
    defaults = {key: field.default for key, field in fields.items() if not field.is_required()}
    missing = [key for key in fields if key not in defaults and key not in named]
    if missing:
        raise ValueError(f"{path} refuses these arguments: {missing[0]!r} is missing")
    arguments = {key: value for key, value in named.items() if key != DECAY_FORM}
    error = _error_of(path, arguments)
    if error is not None:
        said = str(error)
        if not isinstance(error, ValueError):  # Python's, of a value that the class does not expect: say which it is
            needed = {key: value for key, value in arguments.items() if key not in defaults}
            alone = [key for key in arguments if _error_of(path, {**needed, key: arguments[key]})] or list(arguments)
            likes = {key: f"; expected a value like {defaults[key]!r}" for key in alone if key in defaults}
            said = ", ".join(f"{key} is {arguments[key]!r}{likes.get(key, '')}" for key in alone)
        raise ValueError(f"{path} refuses these arguments: {said}") from error
    trial(path, {**defaults, **named})


def _error_of(path: str, arguments: Mapping[str, Any]) -> Exception | None:
    """The exception that the class raises when made with these arguments, if any."""
    try:
        class_named(path)([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except Exception as error:
        return error
    return None
