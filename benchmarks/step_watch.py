"""What one training step does: its collectives, and what its optimizer dispatches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rehearsal.absent_gpu import replaced, sent
from benchmarks.step_systems import Hooks

NOT_COUNTED = ("barrier", "wait_tensor", "wrap_tensor_autograd")
READS = {"_local_scalar_dense", "nonzero"}
NOT_LAUNCHED = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NEWTON_SCHULZ = {  # the functions that are Newton-Schulz, where their callers look them up
    "lwopt_backend.rules.muon": ("newton_schulz", "gram_newton_schulz"),
    "torch.optim._muon": ("_zeropower_via_newtonschulz",),
}


@dataclass
class Count:
    """What one rank did in a step. ``step`` and ``update`` are the bytes that leave it, by collective, as if reductions
    and gathers went around a ring; the rest is its optimizer's. ``operations`` are without those of Newton-Schulz."""

    step: Counter[str] = field(default_factory=Counter)
    update: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    newton_schulz: int = 0
    calls: int = 0  # of Newton-Schulz: batches
    matrices: int = 0  # in them
    host_reads: int = 0
    collectives: int = 0

    def launches(self) -> int:
        return self.operations + self.newton_schulz

    def figures(self) -> dict[str, Any]:
        return {**vars(self), "step": dict(self.step), "update": dict(self.update)}


class Watch(TorchDispatchMode):
    """Sees every collective in which this rank takes part, whoever starts it, and all that its optimizer dispatches.

    All collectives are over all ranks. An operation counts as one launch; views cost nothing, and a ``torch._foreach``
    call that CUDA would run tensor by tensor counts for every tensor.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size, self.count = rank, world_size, Count()
        self.within = {"update": False, "optimizer": False, "newton_schulz": False}

    @contextmanager
    def watching(self) -> Iterator[Hooks]:
        """Watch within it; a step takes the hooks."""
        modules = [(sys.modules[module], names) for module, names in NEWTON_SCHULZ.items() if module in sys.modules]
        with ExitStack() as stack:
            for module, name in [(module, name) for module, names in modules for name in names]:
                stack.enter_context(replaced(module, name, self._counted(getattr(module, name))))
            stack.enter_context(_Reads(self))
            stack.enter_context(self)
            yield Hooks(lambda work: self._in("update", work), lambda work: self._in("optimizer", work))

    def _in(self, part: str, work: Callable[[], Any]) -> Any:
        before, self.within[part] = self.within[part], True
        try:
            return work()
        finally:
            self.within[part] = before

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(matrices: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count.calls += 1
            self.count.matrices += matrices.shape[:-2].numel()
            return self._in("newton_schulz", lambda: function(matrices, *args, **kwargs))

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again, with what it does to the shards
        result = func(*args, **(kwargs or {}))
        name, count = func._overloadpacket.__name__, self.count
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(name.strip("_"), args)
        elif func.namespace == "aten" and self.within["optimizer"]:
            count.host_reads += name in READS
            if not func.is_view and name not in READS:
                launched = 0 if name in NOT_LAUNCHED else launches(name, args)
                count.newton_schulz += launched * self.within["newton_schulz"]
                count.operations += launched * (not self.within["newton_schulz"])
        return result

    def _collective(self, name: str, args: Any) -> None:
        if name in NOT_COUNTED:
            return
        nbytes = sent(name, args, self.rank, self.world_size)
        self.count.step[name] += nbytes
        self.count.update[name] += nbytes * self.within["update"]
        self.count.collectives += self.within["optimizer"]


class _Reads(TorchFunctionMode):
    """Counts ``Tensor.tolist``, which copies to the host and dispatches nothing."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.count.host_reads += func is Tensor.tolist and self.watch.within["optimizer"]
        return func(*args, **(kwargs or {}))


def launches(name: str, args: Sequence[Any]) -> int:
    """1, or for a list of tensors that CUDA takes one by one, their number."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    if not name.startswith("_foreach") or not lists:
        return 1
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    alike = all(len(found) == 1 for found in dtypes) and (name == "_foreach_copy_" or len(set().union(*dtypes)) == 1)
    alike = alike and all(len({(t.shape, t.stride()) for t in row}) == 1 and dense(row[0]) for row in zip(*lists))
    return 1 if alike else len(lists[0])


def dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous())
