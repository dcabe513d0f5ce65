"""A model's backward and forward pass as blocks of work between its parameters' gradients, with FSDP2's collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from benchmarks.clock.record import COMPUTE, GATHER, REDUCE, Join, Start, Tracer, Wait, Work
from benchmarks.rehearsal.engines import Passes

BACKWARD, FORWARD = "backward", "forward"  # what given work is called
PARAMETER_BYTES = 2  # bf16, in which FSDP2 gathers


@dataclass(frozen=True)
class Given:
    """What a rank's model computes in a step: ``tokens``, each of which passes ``active`` of the experts' weights."""

    tokens: int
    active: float = 1.0

    def flops(self, name: str, numel: int) -> float:
        """The flops of a forward pass through a weight: a multiply-add a token and element."""
        return 2.0 * self.tokens * numel * (self.active if ".experts" in name else 1.0)


class GivenPasses(Passes):
    """Records the work of a model, whose parameters' ``names`` are given by id. Attention's products are left out."""

    def __init__(self, given: Given, tracer: Tracer, names: Mapping[int, str]) -> None:
        self._given = given
        self._names = names
        self.tracer = tracer

    def _work(self, what: str, params: Sequence[Tensor], passes: int) -> None:
        flops = sum(self._given.flops(self._names[id(param)], param.numel()) for param in params)
        self.tracer.add(Work(what, flops=int(passes * flops), calls=len(params)))

    def backward(self, params: Sequence[Tensor], following: Sequence[Tensor] = ()) -> None:
        self._work(BACKWARD, params, 2)

    def forward(self, params: Sequence[Tensor]) -> None:
        self._work(FORWARD, params, 1)


class ShardedPasses(GivenPasses):
    """The same with FSDP2's collectives over ``ranks`` ranks: a block's weights are gathered while the block before it
    is computed, and its gradients, of ``gradient_bytes``, are reduced on a side stream."""

    def __init__(self, given: Given, tracer: Tracer, names: Mapping[int, str], ranks: int, gradient_bytes: int) -> None:
        super().__init__(given, tracer, names)
        self._ranks = ranks
        self._gradient_bytes = gradient_bytes
        self._gathered: int | None = None

    def _start(self, kind: str, params: Sequence[Tensor], itemsize: int, stream: str) -> int:
        nbytes = sum(param.numel() for param in params) * itemsize * (self._ranks - 1) // self._ranks
        return self.tracer.start(Start(f"FSDP2's {kind}", kind, nbytes, self._ranks, of_host=True, stream=stream))

    def backward(self, params: Sequence[Tensor], following: Sequence[Tensor] = ()) -> None:
        """The first block's weights are still there from the forward pass."""
        if self._gathered is not None:
            self.tracer.add(Wait(self._gathered, COMPUTE))
        self._gathered = self._start("all-gather", following, PARAMETER_BYTES, GATHER) if following else None
        super().backward(params)

    @contextmanager
    def reduced(self, params: Sequence[Tensor]) -> Iterator[None]:
        tracer = self.tracer
        tracer.add(Join(on=COMPUTE, stream=REDUCE))
        tracer.add(Wait(self._start("reduce-scatter", params, self._gradient_bytes, REDUCE), REDUCE))
        with tracer.on_stream(REDUCE):
            yield

    def end(self) -> None:
        self.tracer.add(Join(on=REDUCE, stream=COMPUTE))
