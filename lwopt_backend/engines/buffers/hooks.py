"""Hooks on a model: they report gradients and passes to its bucket manager, and make readers of parameters wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from lwopt_backend.routing.models import called

if TYPE_CHECKING:
    from lwopt_backend.engines.buffers.bucket_manager import BucketManager


class Hook:
    """Runs ``call(owner, *first, *args)`` with a hook's ``args`` while ``owner`` is alive; copies and pickles do
    nothing.

    A model with hooks can therefore be copied and saved, and its hooks do not keep ``owner`` alive.
    """

    __slots__ = ("_owner", "_call", "_first")

    def __init__(self, owner: object, call: Callable[..., Any], *first: Any) -> None:
        self._owner = weakref.ref(owner)
        self._call = call
        self._first = first

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        return None if owner is None else self._call(owner, *self._first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHook, ()

    @property
    def alive(self) -> bool:
        return self._owner() is not None


def remove_with(owner: object, handles: Iterable[Any]) -> None:
    """Remove these hooks once ``owner`` is gone: a model may have many optimizers one after another."""
    weakref.finalize(owner, _remove, [*handles]).atexit = False


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


class _NoHook:
    """Replaces a hook in a copy of its module."""

    def __call__(self, *args: Any) -> None:
        return None


def is_followed(param: Tensor) -> bool:
    """Whether a live bucket manager takes this parameter's gradients."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, Hook) and hook.alive for hook in hooks.values())


# Of a backward pass


class BackwardPasses:
    """Reports every gradient, and the end of every backward pass, to ``manager``.

    A pass begins at the output of ``model``, or with the first gradient if ``model`` was not called. Reentrant
    checkpoints run nested passes; the hook on the output distinguishes the outer pass. ``torch.autograd.grad`` also
    runs that hook, but produces no ``param.grad``, so no pass begins for the manager.
    """

    def __init__(self, manager: BucketManager, model: nn.Module) -> None:
        self._manager = manager
        self._running = False
        self._told = False  # whether the manager was told of the running pass
        self._handles: list[Any] = []
        for index, param in enumerate(manager.params):
            if manager.marks:
                self._handles.append(param.register_hook(Hook(self, BackwardPasses._before, index)))
            self._handles.append(param.register_post_accumulate_grad_hook(Hook(self, BackwardPasses._take, index)))
        for module in called(model):
            self._handles.append(module.register_forward_pre_hook(Hook(self, BackwardPasses._before_forward)))
            self._handles.append(module.register_forward_hook(Hook(self, BackwardPasses._after_forward)))
        remove_with(self, self._handles)

    @property
    def interrupted(self) -> bool:
        """Whether the last backward pass on this rank ended in an exception."""
        return self._running and torch._C._current_graph_task_id() == -1

    def forget(self) -> None:
        """End an interrupted pass. It counts even without a gradient, because it counts on other ranks."""
        if self._running and not self._told:
            self._manager.begin_backward()
        self._running = False

    def remove(self) -> None:
        _remove(self._handles)

    def _before(self, index: int, grad: Tensor) -> None:
        """autograd also runs this for ``torch.autograd.grad``, where nothing is accumulated."""
        self._begin()
        self._manager.lift(index)

    def _take(self, index: int, param: Tensor) -> None:
        self._begin()
        if not self._told:
            self._manager.begin_backward()
            self._told = True
        self._manager.arrived(index)

    def _before_forward(self, model: nn.Module, args: Sequence[Any]) -> None:
        if self.interrupted and torch.is_grad_enabled():
            raise RuntimeError(
                "a backward pass ended in an exception while some of its gradients were in transit; call "
                "optimizer.zero_grad() on all ranks before the next forward pass"
            )

    def _after_forward(self, model: nn.Module, args: Sequence[Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        begins = Hook(self, BackwardPasses._at_output)  # a loss that is kept does not keep the optimizer
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(begins)

    def _at_output(self, grad: Tensor) -> None:
        self._begin()

    def _begin(self) -> None:
        if not self._running:
            self._running, self._told = True, False
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._manager.end_backward()
        self._running = False  # unless that has raised


# Of whoever reads parameters, which are views of buffers: each waits for them first.


def wait_in_forward(model: nn.Module, manager: BucketManager) -> None:
    """A called module waits for the parameters that it reads; one that is saved, loaded or copied waits for all.

    A module reads its own, and those of submodules that were never called, because it may use their weights, as
    ``nn.MultiheadAttention`` uses those of its output projection.
    """
    numbers = {id(param): manager.bucket_of[index] for index, param in enumerate(manager.params)}
    own = {}
    for module in model.modules():
        own[id(module)] = {numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers}
    called: set[int] = set()
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(Hook(manager, _before_call, own, called)))
        handles.append(module.register_state_dict_pre_hook(Hook(manager, _before_reading)))
        handles.append(module.register_load_state_dict_pre_hook(Hook(manager, _before_reading)))
        module.__dict__["__getstate__"] = _StateForCopies(manager, module)
        handles.append(module.__dict__["__getstate__"])
    remove_with(manager, handles)


def tell_when_loaded(model: nn.Module, loaded: Callable[[], None]) -> list[Any]:
    """Call ``loaded``, a bound method, after weights were loaded into the model or a part of it."""
    method = loaded.__func__  # type: ignore[attr-defined]
    hook = Hook(loaded.__self__, lambda owner, *args: method(owner))  # type: ignore[attr-defined]
    handles = [module.register_load_state_dict_post_hook(hook) for module in model.modules()]
    remove_with(loaded.__self__, handles)  # type: ignore[attr-defined]
    return handles


def _before_call(
    manager: BucketManager, own: Mapping[int, set[int]], called: set[int], module: nn.Module, *args: Any
) -> None:
    called.add(id(module))
    if manager.returning:
        within = [m for m in module.modules() if m is module or id(m) not in called]
        manager.receive_values(set().union(*(own.get(id(m), ()) for m in within)))


def _before_reading(manager: BucketManager, *args: Any) -> None:
    manager.receive_values()


class _StateForCopies:
    """A module's ``__getstate__``, which ``copy`` and ``pickle`` call: waits for its parameters first."""

    def __init__(self, manager: BucketManager, module: nn.Module) -> None:
        earlier = module.__dict__.get("__getstate__")
        others = earlier._managers if isinstance(earlier, _StateForCopies) else ()
        self._managers: list[weakref.ref[BucketManager]] = [*others, weakref.ref(manager)]
        self._module = weakref.ref(module)

    def remove(self) -> None:
        """Once its manager is gone. The module keeps one that waits for another."""
        module = self._module()
        found = None if module is None else module.__dict__.get("__getstate__")
        if isinstance(found, _StateForCopies) and not any(reference() for reference in found._managers):
            del module.__dict__["__getstate__"]

    def __call__(self) -> dict[str, Any]:
        module = self._module()
        assert module is not None
        for manager in filter(None, (reference() for reference in self._managers)):
            manager.receive_values()
        of_class = getattr(type(module), "__getstate__", None)
        state = module.__dict__ if of_class is None else of_class(module)
        return {key: value for key, value in state.items() if value is not self}
