"""Errors of owned storage at work: of a transport, saying what it was doing, and of a model that it cannot follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def failing(what: Callable[[], str]) -> Iterator[None]:
    """Raises RuntimeError in place of a transport's: ``what()`` failed, and what may be the matter."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what()} failed; another rank has ended, hangs, or ran other backward passes. {error}"
        ) from error


def left_already(name: str, bucket: int) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r} got another gradient in one backward pass after bucket {bucket} had left with its first: "
        "it is used in several reentrant checkpoints; use checkpoint(..., use_reentrant=False), or "
        'overlap_grad_reduce=False (under DeepSpeed "overlap_comm": false)'
    )


def read_too_early(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter {name!r} was used before its new value had come, because its module was not called; call "
        "optimizer.synchronize() before the forward pass, or switch overlap_param_gather off"
    )
