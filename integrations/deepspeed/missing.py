"""A parameter without a gradient in a step: DeepSpeed may train it with the gradient of an earlier step.

At stage 3, and at stages 1 and 2 with an offloaded optimizer, DeepSpeed keeps gradients in buffers. The first
micro-batch of a step overwrites a parameter's buffer, and later ones add to it. No buffer is cleared. So a parameter
that the loss does not depend on is trained with an earlier gradient, and one that only a later micro-batch uses with
the sum of both. To an offloaded optimizer goes only what the last micro-batch used. Here, what is missing counts as
zero, as at the other stages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

BUFFERS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # by a parameter's ds_id


def count_as_zero(wrapper: Any) -> None:
    """Let ``wrapper``, of stage 1, 2 or 3, count missing gradients as zero."""
    if hasattr(wrapper, "partition_grads"):
        _at_stage_3(wrapper)
    elif wrapper.cpu_offload:
        _offloaded(wrapper)


def _at_stage_3(wrapper: Any) -> None:
    partition, end_backward = wrapper.partition_grads, wrapper.independent_gradient_partition_epilogue
    step, zero_grad = wrapper.step, wrapper.zero_grad
    every = {param.ds_id for param in chain(*wrapper.fp16_groups)}
    stale = set(every)  # parameters whose buffers have no gradient of this step

    def partition_grads(params: Sequence[Any], *args: Any) -> Any:
        stale.difference_update(param.ds_id for param in params)
        return partition(params, *args)

    def independent_gradient_partition_epilogue() -> None:
        end_backward()
        if stale:  # after a step's first micro-batch; a later one visits no parameter
            buffers = getattr(wrapper, BUFFERS)
            torch._foreach_zero_([buffers[number] for number in stale])
            stale.clear()

    def zero_grad_too(*args: Any, **kwargs: Any) -> None:
        stale.update(every)
        zero_grad(*args, **kwargs)

    def step_with_all(*args: Any, **kwargs: Any) -> Any:
        if wrapper.offload_optimizer:
            for param in chain(*wrapper.fp16_groups):
                number, buffer = wrapper.get_param_id(param), getattr(wrapper, BUFFERS)[param.ds_id]
                if number not in wrapper.norm_for_param_grads:  # the last micro-batch did not use it
                    group, offset, numel = wrapper.grad_position[number]
                    wrapper.fp32_partitioned_groups_flat[group].grad.narrow(0, offset, numel).copy_(buffer)
                    norm = wrapper._constant_buffered_norm2(buffer)
                    # DeepSpeed adds up norms in place, those of parameters with a gradient on the accelerator.
                    wrapper.norm_for_param_grads[number] = norm.to(get_accelerator().current_device_name())
        try:
            return step(*args, **kwargs)
        finally:
            stale.update(every)

    wrapper.partition_grads = partition_grads
    wrapper.independent_gradient_partition_epilogue = independent_gradient_partition_epilogue
    wrapper.zero_grad = functools.wraps(zero_grad)(zero_grad_too)
    wrapper.step = functools.wraps(step)(step_with_all)


def _offloaded(wrapper: Any) -> None:
    """At stages 1 and 2."""
    copy, step = wrapper.copy_grads_in_partition, wrapper.step
    reduced: set[int] = set()
    is_compact = getattr(wrapper, "_use_compact_grad_partition_buffer", lambda group: False)

    def copy_grads_in_partition(param: Any, *args: Any) -> None:
        number = wrapper.get_param_id(param)
        later = wrapper.micro_step_id > 0  # the first micro-batch overwrites the buffer
        if later and number not in reduced and number in wrapper.accumulated_grads_in_cpu:
            wrapper.accumulated_grads_in_cpu[number].zero_()
        reduced.add(number)
        copy(param, *args)

    def summed(group: int, number: int, start: int, numel: int) -> Tensor:
        """This rank's part of what earlier micro-batches gave a parameter."""
        if is_compact(group):
            rank = wrapper.real_dp_process_group[group].rank()
            part: Tensor = wrapper._get_compact_grad_partition_slice(group, rank, number, numel)
            return part
        found: Tensor = wrapper.accumulated_grads_in_cpu[number]
        return found.view(-1).narrow(0, start, numel)

    def step_with_all(*args: Any, **kwargs: Any) -> Any:
        for param in chain(*wrapper.params_in_partition):
            number = wrapper.get_param_id(param)
            if number in wrapper.norm_for_param_grads:  # the last micro-batch used it
                continue
            group, start, offset, numel = wrapper.grad_position[number]
            grad = wrapper.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, numel)
            if number not in reduced:
                grad.zero_()
                continue
            get_accelerator().synchronize()  # what is copied to the CPU may not have arrived
            grad.copy_(summed(group, number, start, numel))
            wrapper.norm_for_param_grads[number] = grad.norm(2)
            wrapper.update_offload_overflow_tracker(grad)
        try:
            return step(*args, **kwargs)
        finally:
            reduced.clear()

    wrapper.copy_grads_in_partition = copy_grads_in_partition
    wrapper.step = functools.wraps(step)(step_with_all)
