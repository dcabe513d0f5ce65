"""Hooks by which a bucket manager follows backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from lwopt_backend.runtime.bucket_manager import BucketManager


class Hook:
    """``call(owner, *first, *arguments of the hook)`` as long as ``owner`` lives; copies and pickles of it do nothing.

    So a model with hooks can be copied and saved, and what hooks work for ends when nobody else holds it.
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


class _NoHook:
    """What becomes of a hook in a copy of its module."""

    def __call__(self, *args: Any) -> None:
        return None


def is_followed(param: Tensor) -> bool:
    """Whether a bucket manager that is still in use takes this parameter's gradients."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return any(isinstance(hook, Hook) and hook.alive for hook in hooks.values())


class BackwardPasses:
    """Tells ``manager`` of every gradient, and of the end of every backward pass.

    A pass begins at the output of ``model``, or where that was not called, with its first gradient. Reentrant
    checkpoints run passes within the pass; that it began at the output tells it from theirs. ``torch.autograd.grad``
    goes through the output, too, but brings no gradients: the manager hears nothing of it.
    """

    def __init__(self, manager: BucketManager, model: nn.Module) -> None:
        self._manager = manager
        self._running = False
        self._told = False  # the manager knows of the running pass
        self._handles: list[Any] = [
            param.register_post_accumulate_grad_hook(Hook(self, BackwardPasses._take, index))
            for index, param in enumerate(manager.params)
        ]
        self._handles.append(model.register_forward_pre_hook(Hook(self, BackwardPasses._before_forward)))
        self._handles.append(model.register_forward_hook(Hook(self, BackwardPasses._after_forward)))

    @property
    def interrupted(self) -> bool:
        """Whether the last backward pass on this rank ended in an exception."""
        return self._running and torch._C._current_graph_task_id() == -1

    def forget(self) -> None:
        """An interrupted pass is over. It counts as one, as it does on other ranks, even without a gradient."""
        if self._running and not self._told:
            self._manager.begin_backward()
        self._running = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _take(self, index: int, param: Tensor) -> None:
        self._begin()
        if not self._told:
            self._manager.begin_backward()
            self._told = True
        self._manager.arrived(index)

    def _before_forward(self, model: nn.Module, args: Sequence[Any]) -> None:
        if self.interrupted and torch.is_grad_enabled():
            raise RuntimeError(
                "a backward pass ended in an exception, and some of its gradients are on their way; call "
                "optimizer.zero_grad() on all ranks before the next forward pass"
            )

    def _after_forward(self, model: nn.Module, args: Sequence[Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._on_output)

    def _on_output(self, grad: Tensor) -> None:
        self._begin()

    def _begin(self) -> None:
        if not self._running:
            self._running, self._told = True, False
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._running = False
        self._manager.end_backward()
