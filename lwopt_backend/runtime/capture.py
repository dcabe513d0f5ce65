"""CUDA graphs of a rule's work on batches of whole matrices: the option ``capture``.

A graph reads and writes the addresses that it was captured with. So what a rule takes is copied into a buffer that is
kept, and what it returns into another; everything else of a step may lie elsewhere in every step. A rule that changed,
or owner state that lies elsewhere, is captured again. On a CPU, the rule runs on the same buffers without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.rules import MatrixRule
from lwopt_backend.runtime import nested

WARM_UP = 2  # runs of a batch before it is captured, in which kernels are loaded and tuned
Work = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Captured:
    """A batch. ``reads`` is what its graph has taken in besides the buffers ``given`` and ``found``."""

    reads: Any
    runs: int = 0
    given: Tensor | None = None
    found: Tensor | None = None
    replay: Callable[[], object] | None = None
    pool: Any = None


class Capture:
    """Runs the work of rules on batches of matrices. Begins anew if the batches it has seen have over ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._batches: dict[tuple[int, ...], Captured] = {}

    def run(
        self, rule: MatrixRule, atoms: tuple[int, ...], state: Mapping[str, Any], work: Work, given: Tensor
    ) -> Tensor:
        """``work(given)``, the rule's on these atoms with their owner ``state``, valid until their next run."""
        batch = self._batch(atoms, reads_of(rule, state, given))
        batch.runs += 1
        if batch.given is None or batch.found is None:
            found = work(given)
            if batch.runs == WARM_UP:
                batch.given, batch.found = torch.empty_like(given), torch.empty_like(found)
            return found
        batch.given.copy_(given)
        if batch.replay is None:
            self._capture(batch, work, batch.given, batch.found)
        assert batch.replay is not None
        batch.replay()
        return batch.found

    def _batch(self, atoms: tuple[int, ...], reads: Any) -> Captured:
        batch = self._batches.get(atoms)
        if batch is None or batch.reads != reads:
            if sum(map(len, self._batches)) + len(atoms) > self._most:
                self._batches.clear()
            batch = self._batches[atoms] = Captured(reads)
        return batch

    def _capture(self, batch: Captured, work: Work, given: Tensor, found: Tensor) -> None:
        def play() -> None:
            found.copy_(work(given))

        if given.device.type == "cpu":
            batch.replay = play
            return
        graph = torch.cuda.CUDAGraph()
        # Nothing in the memory of a graph outlives its replay, so they share it, in whatever order they are replayed.
        pool = next((other.pool for other in self._batches.values() if other.pool is not None), None)
        # Other threads may use the GPU meanwhile: NCCL's watchdog, a loader that pins memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            play()
        batch.replay, batch.pool = graph.replay, graph.pool()


def reads_of(rule: MatrixRule, state: Mapping[str, Any], given: Tensor) -> Any:
    """What a graph of the rule's work takes in: options, the form of what is given, and where owner state lies."""
    options = [getattr(rule, name) for name in rule.transform_reads or ()]
    values = [option.item() if isinstance(option, Tensor) else option for option in options]

    def taken(leaf: Any) -> Any:
        return (*_form(leaf), leaf.data_ptr()) if isinstance(leaf, Tensor) else leaf

    return values, _form(given), nested.mapped(state, taken)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype
