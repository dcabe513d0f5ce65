"""Models that owned storage cannot train, and models that were changed behind its back: refused by name."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lwopt_backend.config import OwnedConfig
from lwopt_backend.grouping import Grouping
from lwopt_backend.model_argument import check_is_module
from lwopt_backend.routing import named_parameters
from lwopt_backend.runtime.backward import is_followed
from lwopt_backend.watched_model import ADVICE

NAME = "LayerWiseOptimizer"
FSDP2 = "for fully_shard models use lwopt_backend.integrations.fsdp2.LayerWiseOptimizer"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_model(model: nn.Module, caller: str = NAME) -> None:
    """Raises TypeError or ValueError for a model whose parameters cannot become views of ``caller``'s buffers."""
    check_is_module(model, caller)
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            place = f"its module {name!r} is" if name else "it is"
            raise TypeError(
                f"{caller} reduces gradients itself and takes a plain module, but {place} wrapped in "
                f"{type(module).__name__}; pass the module inside, model.module"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(f"{caller}: {name!r} makes sparse gradients, which no buffer holds; set sparse=False")
    devices: dict[torch.device, str] = {}
    for name, param in named_parameters(model):
        if hasattr(param, "device_mesh"):
            raise TypeError(f"{caller}: parameter {name!r} is a DTensor; {FSDP2}")
        if not param.requires_grad:
            continue
        if is_followed(param) and _still_followed(param):
            raise ValueError(
                f"{caller}: parameter {name!r} belongs to an earlier optimizer of ours, which is still in use; remove "
                "every reference to that one first (del optimizer)"
            )
        if param.dtype not in DTYPES:
            raise TypeError(
                f"{caller}: parameter {name!r} is stored in {_spell(param.dtype)}; expected float32, bfloat16, "
                "float16 or float64 (computing in fp8 over bfloat16 parameters works)"
            )
        if param.device.type == "meta":
            raise ValueError(
                f"{caller}: parameter {name!r} is on the meta device and has no values yet; materialize it"
            )
        devices.setdefault(param.device, name)
    for name, module in model.named_modules():
        if getattr(module, "_is_fsdp_managed_module", False):
            which = f"module {name!r}" if name else "the model"
            raise TypeError(
                f"{caller}: {which} is sharded by FullyShardedDataParallel, which flattens matrices; pass the plain "
                f"module, or shard it with fully_shard instead: {FSDP2}"
            )
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"{caller}: parameters are on several devices, {places}; move the model to one")


def moved(names: Sequence[str], params: Sequence[Tensor], places: Sequence[int]) -> str | None:
    """A sentence on a parameter that is no longer a view of our buffers, if there is one."""
    for name, param, place in zip(names, params, places):
        if param.data_ptr() != place:
            return f"parameter {name!r} was moved or got other data (model.to(), param.data = ...); {ADVICE}"
    return None


def check_options(
    config: OwnedConfig,
    grouping: Grouping,
    expert_params: Sequence[str],
    expert_process_group: Any,
    expert_group_size: int | None,
) -> None:
    """Raises ValueError for options that exclude each other, or do not fit the parameters."""
    if bool(expert_params) != (expert_process_group is not None):
        raise ValueError(f"{NAME}: expert_params and expert_process_group belong together; give both or neither")
    if expert_group_size is not None and not expert_params:
        raise ValueError(f"{NAME}: expert_group_size is {expert_group_size}, but no expert_params say whose; name them")
    by_name = {grouping.names[id(p)]: p for group in grouping.groups for p in group["params"]}
    narrow = [name for name, p in by_name.items() if p.dtype.itemsize < 4]
    if config.keep_full_grads and config.grad_dtype == "float32" and narrow:
        raise ValueError(
            f"{NAME}: keep_full_grads puts gradients into param.grad, which has the parameter's dtype, but grad_dtype "
            f"is 'float32' and {narrow[0]!r} is narrower; leave one of both"
        )
    if config.step_in_backward and (config.keep_full_grads or not config.overlap_grad_reduce):
        raise ValueError(f"{NAME}: step_in_backward needs overlap_grad_reduce, and no keep_full_grads")


def _still_followed(param: Tensor) -> bool:
    """``is_followed``, once optimizers are gone that only cycles of references hold."""
    gc.collect()
    return is_followed(param)


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
