"""Reads DeepSpeed's engine, and replaces some of its methods."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size
from deepspeed.utils.logging import logger
from torch import Tensor, nn
from torch.profiler import record_function

from lwopt_backend.groups import Groups
from lwopt_backend.groups.rates import small_rate
from lwopt_backend.plan import Cut, Fragment
from lwopt_backend.routing.routing import CUT, cut_of, named_parameters
from lwopt_backend.runtime.agreement import digest, setting, unlike_lines
from lwopt_backend.runtime.collectives import NORM, Collectives, TorchCollectives

EXPERTS = "deepspeed_moe.experts.deepspeed_experts."  # the experts' place in their layer
HOOKED = "_do_optimizer_sanity_check"  # ``versions`` lists what is replaced here; ``register()`` checks that it exists


def install(types: Mapping[str, Callable[..., Any]], classes: Iterable[type[torch.optim.Optimizer]]) -> None:
    """Register ``types``, functions that make optimizers, for ds_config.json, and ``bind`` instances of ``classes``.

    The engine calls ``_do_optimizer_sanity_check`` right before it wraps the optimizer. Only then are the module, the
    parameter names and the configuration known while the param groups may still be changed. The result of the method
    selects the wrapper; with None the optimizer stays unwrapped, as a ZeRO optimizer needs. A second call does nothing.
    """
    ours = tuple(classes)
    for name, make in types.items():
        for spelled in (name, name.lower()):  # of DeepSpeed's own types, case does not matter
            setattr(torch.optim, spelled, make)
    for optimizer_class in ours:
        if optimizer_class not in ZERO_SUPPORTED_OPTIMIZERS:
            ZERO_SUPPORTED_OPTIMIZERS.append(optimizer_class)
    original = getattr(DeepSpeedEngine, HOOKED)
    if getattr(original, "_lwopt_binds", None) is not None:
        return

    @functools.wraps(original)
    def check(self: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        if isinstance(basic_optimizer, ours):
            basic_optimizer.bind(self)  # type: ignore[attr-defined]
            if isinstance(basic_optimizer, ZeROOptimizer):
                return None
        elif any("from_group" in group for group in getattr(basic_optimizer, "param_groups", ())):
            raise ValueError(
                f"{type(basic_optimizer).__name__}: expected the engine's parameters, found the param groups of "
                f"{' or '.join(types)}, with which it would train nothing; Accelerate passes an optimizer object so "
                "under offload_optimizer: write the optimizer into ds_config.json, or set "
                '"zero_force_ds_cpu_optimizer": false'
            )
        return original(self, basic_optimizer)

    check._lwopt_binds = ours  # type: ignore[attr-defined]
    setattr(DeepSpeedEngine, HOOKED, check)


def param_alignment(engine: DeepSpeedEngine, params: Sequence[Tensor]) -> int:
    """The alignment, in elements, of ZeRO-1/2's parameter starts; compared with ``_hp_mapping`` at the first step."""
    if engine.zero_parameter_alignment() and not uses_bf16_optimizer(engine):
        return 16 // math.gcd(16, params[0].element_size())
    return 1


def uses_bf16_optimizer(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed's BF16_Optimizer, which shards as stage 1 does, has the parameters: at stage 1 with bf16
    parameters and fp32 accumulation, not offloaded, and with bf16 in a pipeline without ZeRO."""
    stage, dtypes = engine.zero_optimization_stage(), engine.get_data_types()
    if stage == 0:
        return bool(engine.pipeline_parallelism) and dtypes[0] == torch.bfloat16
    return stage == 1 and dtypes == (torch.bfloat16, torch.float32) and not engine.zero_cpu_offload()


def sharding_stage(engine: DeepSpeedEngine) -> int:
    """The ZeRO stage by whose rules parameters are sharded."""
    return 1 if uses_bf16_optimizer(engine) else engine.zero_optimization_stage()


def uses_auto_ep(engine: DeepSpeedEngine) -> bool:
    """Whether DeepSpeed has replaced the model's expert layers by its own."""
    settings = engine._config.expert_parallel_config
    return settings is not None and settings.enabled


def process_groups(engine: DeepSpeedEngine) -> list[Any]:
    """The groups of ranks that share parameters with this one: first the data-parallel ranks, then those of experts.

    Under tensor parallelism, and in a pipeline, the last is all ranks (None): pipeline stages share errors, not
    parameters.
    """
    experts = engine.expert_data_parallel_group if engine.has_moe_layers else {}
    world = [None] if engine.pipeline_parallelism or tensor_ranks(engine) > 1 else []
    return list(dict.fromkeys([engine.seq_data_parallel_group, *(experts[name] for name in sorted(experts)), *world]))


# Tensor parallelism, by an mpu or by AutoTP, which makes DeepSpeed's ``groups`` the mpu.

AUTOTP_MARK = "ds_autotp_universal_checkpoint_meta"  # AutoTP's description of a parameter that its layers have
CUT_MARK = "tensor_model_parallel"  # Megatron's mark


def tensor_ranks(engine: DeepSpeedEngine) -> int:
    """The number of ranks that together have the whole of each layer; 1 without tensor parallelism."""
    if engine.mpu is None or engine.pipeline_parallelism or engine.mp_world_size == 1:
        return 1
    return int(bwc_tensor_model_parallel_world_size(engine.mpu))


def mark_cuts(engine: DeepSpeedEngine, ranks: Collectives) -> tuple[list[tuple[int, int]], list[str]]:
    """Mark the parameters that tensor parallelism cuts. Called on all ``ranks`` of the engine.

    Returns every rank's tensor- and data-parallel rank, and why parameters cannot be trained, one sentence each.
    """
    count, found, reasons = tensor_ranks(engine), {}, []
    lines: dict[int, str] = {}  # of all parameters, so that those of two ranks are in one order
    for module_name, module in engine.module.named_modules():
        for key, param in module.named_parameters(recurse=False):
            name = f"{module_name}.{key}" if module_name else key
            lines[id(param)] = setting(name, "marked")
            try:
                found[id(param)] = name, param, _cut(module, param, count)
            except ValueError as error:
                reasons.append(f"parameter {name!r} of shape {tuple(param.shape)} {error}")
    for number, (name, param, cut) in found.items():
        setattr(param, CUT, cut)
        if cut is not None:  # DeepSpeed's norm uses it; AutoTP omits it on a sharded embedding
            setattr(param, CUT_MARK, True)
        else:
            lines[number] = setting(name, _digest(param))
    place = bwc_tensor_model_parallel_rank(engine.mpu), engine.mpu.get_data_parallel_rank()
    of_ranks = ranks.gather_objects((place, digest([*lines.values()])))
    if len({of_lines for _, of_lines in of_ranks}) > 1:
        all_lines = [of_rank or [] for of_rank in unlike_lines(ranks, [*lines.values()])]
        copies = {lines[number]: name for number, (name, _, cut) in found.items() if cut is None}
        here = [line for line in all_lines[ranks.rank] if line in copies]
        differ = [copies[line] for line in here if any(line not in others for others in all_lines)]
        reasons += [
            f"parameter {name!r}: expected a mark of tensor parallelism (tensor_model_parallel and partition_dim), "
            "found none, although its values differ between tensor-parallel ranks: mark it, or make them equal"
            for name in differ[:1]
        ]
    return [place for place, _ in of_ranks], reasons


def _cut(module: nn.Module, param: Tensor, ranks: int) -> Cut | None:
    """How tensor parallelism cuts a parameter of ``module``; None if all ranks have it whole.

    Raises ValueError, with the end of a sentence about the parameter, if the cut is unknown or has no plan.
    """
    of_autotp = getattr(param, AUTOTP_MARK, None)
    if of_autotp is None and getattr(param, "sequence_parallel", False):
        raise ValueError(
            "is marked sequence_parallel, so that its gradients differ between tensor-parallel ranks, which is not "
            "supported; disable sequence parallelism"
        )
    if of_autotp is None and not is_model_parallel_parameter(param):
        return None
    if of_autotp is None:
        dim = getattr(param, "partition_dim", 0 if param.ndim == 1 else -1)
        if dim not in range(param.ndim):
            raise ValueError(
                f"is marked as tensor-parallel, but its partition_dim is {dim}; set the dimension that is cut"
            )
        stride = getattr(param, "partition_stride", 1) if dim == 0 else 1
        parts = (len(param) // stride,) * stride if stride > 1 else ()
        return Cut(dim, ranks, not getattr(module, "gather_output", False), parts)
    if of_autotp["replicated"]:
        return None
    widths, whole = of_autotp.get("sub_param_shard_widths") or (), of_autotp.get("partition_sizes") or ()
    if of_autotp["partition_dim"] is None or not (widths or whole):
        why = of_autotp["conversion"].get("unsupported_reason") or "AutoTP records no sizes of the parts"
        raise ValueError(f"is cut by AutoTP into unknown parts: {why}; exclude the layer from AutoTP, or use an mpu")
    cut = Cut(of_autotp["partition_dim"], ranks, bool(widths), tuple(of_part[0] for of_part in widths))
    sizes = [*widths, whole]
    if cut.whole(param.shape) != tuple(of_autotp["original_shape"]) or any(len(set(some)) > 1 for some in sizes):
        raise ValueError(f"is an unequal shard of {tuple(of_autotp['original_shape'])} by AutoTP; exclude its layer")
    return cut


def note_parts(param: Tensor, parts: tuple[int, ...]) -> None:
    """Note the rows that each rank has of every part of a parameter that tensor parallelism cuts."""
    if (cut := cut_of(param)) is not None:
        setattr(param, CUT, replace(cut, parts=parts))


def shard_of(engine: DeepSpeedEngine, param: Tensor, whole: Tensor) -> Tensor:
    """This rank's shard of the ``whole`` parameter; the whole, if tensor parallelism does not cut it."""
    if (cut := cut_of(param)) is None:
        return whole
    parts = whole.split([rows * cut.ranks for rows in cut.parts] or whole.shape[cut.dim], cut.dim)
    rank = bwc_tensor_model_parallel_rank(engine.mpu)
    return torch.cat([part.chunk(cut.ranks, cut.dim)[rank] for part in parts], cut.dim)


def _digest(param: Tensor) -> int:
    """The sum of a parameter's bits, which usually shows a difference; needs no memory."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[param.itemsize]
    return int(param.detach().contiguous().view(bits).sum(dtype=torch.int64))


def pipeline_group(engine: DeepSpeedEngine) -> Any:
    """One rank of every pipeline stage, in stage order: those that process this rank's micro-batches."""
    return engine.mpu.get_pipe_parallel_group()


def tied_modules(engine: DeepSpeedEngine) -> Mapping[str, nn.Module]:
    """The modules that occur more than once in a pipeline, by key."""
    return dict(engine.module.tied_modules.items())


def first_experts(engine: DeepSpeedEngine) -> dict[str, int]:
    """The number in the whole model of this rank's first expert, by the beginning of the experts' names."""
    found = {}
    for name, layer in engine.module.named_modules():
        if isinstance(layer, MoE):
            place = TorchCollectives(engine.expert_parallel_group[layer.expert_group_name]).rank
            found[f"{name}.{EXPERTS}".lstrip(".")] = place * layer.num_local_experts
    return found


def all_experts(engine: DeepSpeedEngine) -> set[str]:
    """The names in the whole model of all experts' parameters."""
    return {
        f"{name}.{EXPERTS}{number}.{param}".lstrip(".")
        for name, layer in engine.module.named_modules()
        if isinstance(layer, MoE)
        for number in range(layer.num_experts)
        for param, _ in layer.deepspeed_moe.experts.deepspeed_experts[0].named_parameters()
    }


def stored_fragment(param: Tensor, rank: int, sub_group: int | None) -> Fragment | None:
    """The fragment of ``param`` that this rank stores in its flat partition, according to DeepSpeed; at stage 3 in the
    flat tensor of ``sub_group``."""
    if sub_group is None:
        mapping = param._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        inside, stored = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Fragment(rank, inside.start, inside.start + inside.numel, stored.start)
    partitioned: Any = param  # DeepSpeed puts attributes on it
    zero = partitioned._z3_optimizer
    found, offset, size = zero.grad_position[zero.get_param_id(param)]
    if found != sub_group:
        shape = tuple(partitioned.ds_shape)
        raise RuntimeError(f"a parameter of shape {shape}: expected sub-group {sub_group}, found {found}")
    start, stop = rank * size, min((rank + 1) * size, partitioned.ds_numel)
    return Fragment(rank, start, stop, offset) if start < stop else None


def zero_settings(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The section zero_optimization of the configuration, without DeepSpeed's defaults."""
    settings = dict(engine._config._param_dict)
    return dict(settings.get("zero_optimization", {}))


def warn(engine: DeepSpeedEngine, groups: Groups) -> None:
    """Log a warning if matrices would hardly move, and if gradients are clipped by default."""
    if (slow := small_rate(groups)) is not None:
        logger.warning(slow)
    norm = engine.gradient_clipping()
    if norm and "gradient_clipping" not in engine._config._param_dict:
        logger.warning(
            f"gradient_clipping is not set, so DeepSpeed clips gradients at its default norm of {norm}; set it to 0 to "
            'switch clipping off, or to "auto" for the max_grad_norm of Hugging Face\'s Trainer, which is not used now'
        )


def warn_of_rounded_sums(engine: DeepSpeedEngine) -> None:
    """Log a warning if DeepSpeed rounds gradients that add up in fp32 before the step, as its BF16_Optimizer does."""
    sent = engine.communication_data_type
    if uses_bf16_optimizer(engine) and sent != torch.float32:
        logger.warning(
            f"data_types.grad_accum_dtype is fp32, but DeepSpeed {deepspeed.__version__} rounds the sum to "
            f"{str(sent).removeprefix('torch.')} at stage 1, in which it sends it; set communication_data_type to "
            "fp32, which sends twice as many bytes"
        )


def idle_steps(engine: DeepSpeedEngine) -> int:
    """The steps that the engine's schedule takes at its first rate beyond one: DeepSpeed's warm-ups take two."""
    return int(isinstance(engine.lr_scheduler, (lr_schedules.WarmupLR, lr_schedules.WarmupCosineLR)))


def warn_of_rates_of_zero(engine: DeepSpeedEngine) -> None:
    """Log a warning if a warm-up of DeepSpeed's begins with a rate of 0. Called in the first step."""
    scheduler = engine.lr_scheduler
    if (
        engine.global_rank == 0
        and idle_steps(engine)
        and not any(group["lr"] for group in engine.optimizer.param_groups)
    ):
        logger.warning(
            f"{type(scheduler).__name__}: this step has a learning rate of 0 and changes no weight, and DeepSpeed "
            f"{deepspeed.__version__} takes two steps at the first rate; set a larger one (warmup_min_lr of WarmupLR "
            "and WarmupDecayLR), or expect one or two steps less"
        )


WRITE_ONE_RATE = {  # the rates that these write over all param groups, if a configuration gives one number
    **dict.fromkeys(("WarmupLR", "WarmupDecayLR"), ("warmup_min_lr", "warmup_max_lr")),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "LRRangeTest": ("lr_range_test_min_lr",),
    "OneCycleLR": ("max_lr",),
    "CyclicLR": ("base_lr", "max_lr"),
}


def prepare_scheduler(engine: DeepSpeedEngine, groups: Groups, main: float) -> None:
    """Prepare the scheduler in the configuration for an optimizer with these param ``groups``, as configured.

    A number that it would write over all of them becomes a list with each group's share: the number is meant for a
    group of the rate ``main``. The user's configuration does not change.
    """
    name, params = engine.scheduler_name(), engine.scheduler_params() or {}
    if name is None or engine.client_lr_scheduler is not None:
        return
    of_deepspeed = getattr(lr_schedules, name, None)
    scheduler_class: Any = of_deepspeed or getattr(torch.optim.lr_scheduler, name, None)
    if name in WRITE_ONE_RATE:
        defaults = {key: each.default for key, each in inspect.signature(scheduler_class).parameters.items()}
        given = {key: params.get(key, defaults[key]) for key in WRITE_ONE_RATE[name]}
        shares = [float(group["lr"]) / main if main else 1.0 for group in groups]
        lists = {k: [rate * share for share in shares] for k, rate in given.items() if isinstance(rate, (int, float))}
        params = engine._config.scheduler_params = {**params, **lists}
    if of_deepspeed is None and scheduler_class is not None:
        _adopt_torchs(engine, name, scheduler_class, params)


def _adopt_torchs(engine: DeepSpeedEngine, name: str, scheduler_class: Any, params: Mapping[str, Any]) -> None:
    """Make ``"scheduler": {"type": <a torch scheduler>}`` work under ZeRO.

    DeepSpeed builds a scheduler named in the configuration on its own wrapper, which torch's schedulers refuse
    ("DeepSpeedZeroOptimizer is not an Optimizer"). It builds one given as a callable on the inner optimizer, so this
    makes it one. Raises ValueError for a scheduler that a configuration cannot describe.
    """
    if name == "ReduceLROnPlateau":
        raise ValueError(
            f"scheduler.type: expected a scheduler without a metric, found {name!r}: DeepSpeed would give it the batch "
            f"size as metric; pass deepspeed.initialize(lr_scheduler=lambda optimizer: {name}(optimizer, ...)) and "
            "call engine.step(lr_kwargs={'metrics': loss})"
        )
    engine.client_lr_scheduler = lambda optimizer: scheduler_class(optimizer, **params)


def report_norm(engine: DeepSpeedEngine, optimizer: Any) -> None:
    """At stage 0, clip by the norm of all gradients, and give ``optimizer`` that norm, which DeepSpeed drops.

    DeepSpeed's own norm counts the gradients of a pipeline's first stage only.
    """

    def clip_fp32_gradients() -> None:
        optimizer.norm_before_clipping = clip_whole(engine, engine.gradient_clipping())

    engine.clip_fp32_gradients = clip_fp32_gradients


def clip_whole(engine: DeepSpeedEngine, max_norm: float) -> Tensor:
    """Clip at stage 0 by ``max_norm``, unless it is 0; returns the norm before it."""
    params = [param for _, param in named_parameters(engine.module)]
    norm = grad_norm(engine, params)
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def counts_cut_alone(engine: DeepSpeedEngine) -> bool:
    """Whether another tensor-parallel rank counts the parameters that are whole on every rank in the norm."""
    return tensor_ranks(engine) > 1 and bwc_tensor_model_parallel_rank(engine.mpu) > 0


def zero_or_nan(grads: Iterable[Tensor]) -> Tensor:
    """0, or NaN if any element is non-finite. Added to the norm for gradients that another rank counts, so that all
    ranks learn of a NaN without an extra collective."""
    return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]).sum() * 0


def hear_of_copies(wrapper: Any) -> None:
    """Let ``wrapper``, of stages 1 and 2 on a rank that ``counts_cut_alone``, add ``zero_or_nan`` of the rest."""
    of_grads, of_offloaded = wrapper.get_grad_norm_direct, wrapper.complete_grad_norm_calculation_for_cpu_offload
    counted: Any = SimpleNamespace(tensor_model_parallel=True)
    number = -1  # of no parameter
    wrapper.param_id[id(counted)] = number

    def get_grad_norm_direct(grads: Sequence[Tensor], params: Sequence[Tensor], *args: Any) -> Any:
        rows = list(zip((grad for grad in grads if not getattr(grad, "_zero_padding", False)), params))
        cut = [row for row in rows if cut_of(row[1]) is not None]
        copies = [grad for grad, param in rows if cut_of(param) is None]
        rows = cut + [(zero_or_nan(copies), counted)] if copies else cut
        return of_grads([grad for grad, _ in rows], [param for _, param in rows], *args)

    def complete_grad_norm_calculation_for_cpu_offload(params: Sequence[Tensor]) -> Any:
        norms = wrapper.norm_for_param_grads
        copies = (wrapper.get_param_id(param) for param in params if cut_of(param) is None)
        norms[number] = sum((norms[copy] for copy in copies if copy in norms), torch.zeros(())) * 0
        return of_offloaded([*(param for param in params if cut_of(param) is not None), counted])

    wrapper.get_grad_norm_direct = get_grad_norm_direct
    wrapper.complete_grad_norm_calculation_for_cpu_offload = complete_grad_norm_calculation_for_cpu_offload


def count_on_every_rank(wrapper: BF16_Optimizer) -> None:
    """Let ``wrapper`` take its norm also on a rank that counts no gradient: DeepSpeed skips the norm of no tensors,
    while the other ranks wait, and 0.19.7 skips a norm of 0. Under tensor parallelism, add ``zero_or_nan`` of the
    gradients that another rank counts."""
    counted = wrapper.get_grads_for_norm
    beside = bwc_tensor_model_parallel_rank(wrapper.mpu) > 0

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return counted(for_clipping=True)
        grads, of_experts = counted()
        pairs = zip(chain(*wrapper.bf16_groups), chain(*wrapper.fp32_groups_gradients))
        copies = [grad for param, grad in pairs if beside and cut_of(param) is None]
        least = torch.full((), 1e-15, device=wrapper.fp32_groups_flat_partition[0].device)
        return [*(grads or [least]), *([zero_or_nan(copies)] if copies else [])], of_experts

    wrapper.get_grads_for_norm = get_grads_for_norm


@record_function(NORM)
def grad_norm(engine: DeepSpeedEngine, params: Iterable[Tensor]) -> Tensor:
    """The norm of the gradients of ``params`` at stage 0. It covers all stages of a pipeline, counting tied weights
    once; the experts of all ranks; and all tensor-parallel shards, counting parameters that are whole on every rank
    once. NaN if a copy of these is non-finite."""
    dense: list[Tensor] = []
    copies: list[Tensor] = []
    experts: dict[str, list[Tensor]] = {}
    shards = tensor_ranks(engine) > 1
    beside = counts_cut_alone(engine)
    for param in params:
        grads = experts.setdefault(getattr(param, "group_name", ""), []) if is_moe_param(param) else dense
        if param.grad is not None and not getattr(param, "ds_pipe_replicated", False):
            (copies if beside and cut_of(param) is None else grads).append(param.grad)
    norm = torch.nn.utils.get_total_norm(dense).to(engine.device)  # that of no gradients is on the CPU
    if copies:
        norm = norm + zero_or_nan(copies)
    if engine.pipeline_parallelism or shards:
        squared = norm.square()
        group = engine.mpu.get_model_parallel_group() if shards else pipeline_group(engine)
        TorchCollectives(group).all_reduce(squared)
        return squared.sqrt()
    for name in sorted(experts):
        squared = torch.nn.utils.get_total_norm(experts[name]).to(engine.device).square()
        TorchCollectives(engine.expert_parallel_group[name]).all_reduce(squared)
        norm = (norm.square() + squared).sqrt()
    return norm


def when_wrapped(engine: DeepSpeedEngine, do: Callable[[Any], None]) -> None:
    """Call ``do`` with the optimizer that DeepSpeed wraps this one in, as soon as it has."""
    configure = engine._configure_lr_scheduler  # the first method called after that

    @functools.wraps(configure)
    def configure_lr_scheduler() -> None:
        do(engine.optimizer)
        configure()

    engine._configure_lr_scheduler = configure_lr_scheduler


def compile_nothing() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce; called before the first collective.

    Only inference uses the op, yet ``deepspeed.init_distributed`` builds it. Without a compiler that fails, and a
    killed build leaves a lock on which every later run waits forever. Does nothing on an accelerator.
    """
    import deepspeed.ops as ops
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
