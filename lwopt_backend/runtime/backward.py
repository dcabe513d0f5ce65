"""Hooks by which a bucket manager follows backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from lwopt_backend.runtime.bucket_manager import BucketManager


class BackwardPasses:
    """Tells ``manager`` of every gradient, and of the end of every backward pass.

    A pass begins at the output of ``model``, or where that was not called, with its first gradient. Reentrant
    checkpoints run passes within the pass; that it began at the output tells it from theirs.
    """

    def __init__(self, manager: BucketManager, model: nn.Module) -> None:
        self._manager = manager
        self._running = False
        self._handles: list[Any] = [
            param.register_post_accumulate_grad_hook(self._gradient_hook(index))
            for index, param in enumerate(manager.params)
        ]
        self._handles.append(model.register_forward_pre_hook(self._before_forward))
        self._handles.append(model.register_forward_hook(self._after_forward))

    @property
    def interrupted(self) -> bool:
        """Whether the last backward pass on this rank ended in an exception."""
        return self._running and torch._C._current_graph_task_id() == -1

    def forget(self) -> None:
        """An interrupted pass is over."""
        self._running = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _gradient_hook(self, index: int) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            self._begin()
            self._manager.arrived(index)

        return hook

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
            self._running = True
            self._manager.begin_backward()
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._running = False
        self._manager.end_backward()
