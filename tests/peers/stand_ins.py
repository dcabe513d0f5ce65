"""What Emerging-Optimizers lacks on Python 3.11 and without Triton, and Megatron without a GPU."""

from __future__ import annotations

import contextlib
import sys
import typing
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

OVERRIDE = getattr(typing, "override", lambda function: function)


class Anything(ModuleType):
    """Triton, of whose kernels none is run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *given: Any, **more: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not more else Anything("value")

    def __or__(self, other: Any) -> Any:
        return self


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Emerging-Optimizers can be imported, and compiles nothing. It also needs a word of Python 3.12."""
    import torch._dynamo
    import torch.utils._triton  # notes now that Triton is missing

    torch.utils._triton.has_triton_package()
    triton = Anything("triton")
    triton.__spec__, triton.__version__, triton.constexpr = ModuleSpec("triton", None), "3.0.0", int
    triton.language = triton
    compiled = mock.patch.object(torch, "compile", lambda *given, **_: given[0] if given else lambda function: function)
    modules = {"triton": triton, "triton.language": triton}
    with compiled, mock.patch.dict(sys.modules, modules), mock.patch.object(typing, "override", OVERRIDE, create=True):
        yield


class OnCpus(TorchFunctionMode):
    """Tensors for a CUDA device are made on the CPU, and call themselves CUDA's."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), more: Any = None) -> Any:
        more = dict(more or {})
        if str(more.get("device")).startswith("cuda"):
            more["device"] = "cpu"
        if function is Tensor.cuda:
            return given[0]
        if function is Tensor.type and len(given) == 1 and not more:
            return function(*given).replace("torch.", "torch.cuda.")
        return function(*given, **more)


@contextlib.contextmanager
def on_cpus() -> Iterator[None]:
    """megatron-core trains on CPUs over gloo, and warns of nothing. What is saved, and how, is its own."""
    gather = dist.all_gather

    def gather_uneven(into: list[Tensor], mine: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({tensor.numel() for tensor in into}) == 1:  # all that gloo takes; NCCL takes other sizes, too
            return gather(into, mine, group=group, async_op=async_op)
        into[dist.get_rank(group)].copy_(mine)
        works = [dist.broadcast(each, group=group, group_src=rank, async_op=async_op) for rank, each in enumerate(into)]
        return works[-1]

    with contextlib.ExitStack() as patches:
        patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        of_cuda: dict[str, Any] = {"current_device": lambda: "cpu", "current_stream": lambda *_: None}
        of_cuda |= {"synchronize": lambda *_: None, "get_rng_state": lambda *_: torch.get_rng_state()}
        for name, stand_in in of_cuda.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        fork = mock.patch.object(CudaRNGStatesTracker, "fork", lambda self, *name: contextlib.nullcontext())
        patches.enter_context(fork)  # for dropout, of which there is none
        patches.enter_context(mock.patch.object(dist, "all_gather", gather_uneven))
        patches.enter_context(OnCpus())
        yield
