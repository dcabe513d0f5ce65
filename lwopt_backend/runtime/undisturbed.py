"""The caller's contexts, kept away from what this package computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A function that is not compiled as part of a caller's code, because torch cannot trace process groups. What is
    compiled by itself within it stays so, such as a closure's model."""
    return cast(F, _disable_dynamo(function))  # torch.compiler.disable would import the compiler here


class undisturbed(ContextDecorator):
    """Context, or decorator, in which autocast, inference mode and a default device of the caller have no effect.

    They would choose the dtype of Newton-Schulz, make state that later steps may not change, and put flags elsewhere.
    Inference mode is left with gradients enabled. What is decorated is also ``uncompiled``.
    """

    def __enter__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            for kind in {"cpu", "cpu" if accelerator is None else accelerator.type}:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _recreate_cm(self) -> undisturbed:
        """One for each call of what is decorated, as contextlib's."""
        return undisturbed()

    def __call__(self, function: F) -> F:
        return uncompiled(super().__call__(function))
