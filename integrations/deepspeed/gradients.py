"""The gradients of an engine between two steps, where DeepSpeed 0.19.8 loses or keeps some without a word:

- Two backward passes that each complete a step's gradient: at stages 1 and 2 only the last one's is used, unless 16-bit
  gradients add up in fp32, and at stage 3 if both forward passes came first. Here the first is an error in the step,
  and the second adds up. BF16_Optimizer counts the first twice if both losses are of one forward pass.
- ``zero_grad`` in the middle of an accumulation: at stages 2 and 3 the gradients stay. Here they go at every stage.
- A parameter without a gradient: at stage 3, and at stages 1 and 2 with an offloaded optimizer, gradients are in
  buffers that are never cleared. The first micro-batch of a step overwrites a parameter's buffer, later ones add to it.
  So a parameter that the loss does not depend on is trained with an earlier step's gradient, and one that only a later
  micro-batch uses with the sum of both. To an offloaded optimizer goes only what the last micro-batch used. Here, what
  is missing counts as zero, as at the other stages.
- A parameter that the last micro-batch does not use, at stage 1 with ``overlap_comm``: only the hooks of that backward
  pass reduce, so an owner steps on its own gradients of earlier micro-batches. Here they are reduced, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from deepspeed.utils.logging import logger
from torch import Tensor

from lwopt_backend.engines.gradients import nonfinite
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine

BUFFERS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # by a parameter's ds_id
VERSION = f"DeepSpeed {deepspeed.__version__}"


def watch(engine: DeepSpeedEngine, optimizer: Any) -> None:
    """Give ``optimizer`` the ``gradients`` of ``engine``, which takes it, as soon as DeepSpeed has wrapped it."""

    def begin(wrapper: Any) -> None:
        if hasattr(wrapper, "partition_grads"):
            kind: type[EngineGradients] = PartitionedGradients
        elif hasattr(wrapper, "averaged_gradients"):
            kind = FlatGradients
        else:
            kind = EngineGradients if isinstance(optimizer, ZeROOptimizer) else WholeGradients
        optimizer.gradients = kind(engine, optimizer.name)
        optimizer.gradients.raises = optimizer.config.on_nonfinite == "raise"

    deepspeed_engine.when_wrapped(engine, begin)


class EngineGradients:
    """The gradients of ``engine`` since the last step; of owned storage, which loses none."""

    raises = False  # whether a step that DeepSpeed skips is an error

    def __init__(self, engine: DeepSpeedEngine, name: str) -> None:
        self._engine, self._wrapper, self._name = engine, engine.optimizer, name
        self._passes = 0  # backward passes since the last step
        self._complete = 0  # those that completed a step's gradient
        self._in_step = self._has_begun = self._has_warned = False
        _replace(engine, "allreduce_gradients", self._end_of_pass)
        _replace(engine, "zero_grad", self._zero_all)
        if self._wrapper is not engine.basic_optimizer:
            _replace(self._wrapper, "step", self._step)
            _replace(self._wrapper, "zero_grad", self._zero)

    def _end_of_pass(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        reduce(*args, **kwargs)
        self._passes += 1
        if isinstance(self._wrapper, ZeROOptimizer):
            # A forward pass does this too. Without it, a second backward pass in a row passes for a part of the first.
            self._wrapper.clear_backward_seen_flag()

    def begin_step(self) -> None:
        """Called on all ranks. Raises RuntimeError if there is no gradient to step on, or if DeepSpeed lost one."""
        self.check()
        if not self._has_begun:
            deepspeed_engine.warn_of_rates_of_zero(self._engine)
        self._has_begun = True

    def end_step(self) -> None:
        """The gradients have been used, or an error ended the step."""
        self._passes = self._complete = 0

    def drop(self) -> None:
        """Drop all gradients, because the step begins anew. Called on all ranks."""
        self._passes = 0
        self._engine.zero_grad()

    def dropped(self) -> None:
        """Called when ``zero_grad`` has cleared what ``param.grad`` shows: drops what DeepSpeed holds besides."""
        if self._passes and not self._has_warned and self._engine.global_rank == 0:
            self._has_warned = True
            logger.warning(
                f"zero_grad() drops the gradients of {self._passes} backward pass(es) since the last step, at every "
                f"stage; {VERSION} alone would keep them at stages 2 and 3. The engine clears gradients after each "
                "step itself: remove the call if that is all it is for"
            )
        self._forget()
        self.end_step()

    def _zero_all(self, zero_grad: Callable[[], None]) -> None:
        zero_grad()
        self._wrapper.zero_grad()

    def _zero(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        zero_grad(*args, **kwargs)
        if not self._in_step:  # in which DeepSpeed clears only what it has copied
            self.dropped()

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        self._in_step = True
        try:
            self._fill()
            result = step(*args, **kwargs)
            if self.raises and self._wrapper.overflow:
                raise nonfinite(self._name, math.inf)
            return result
        finally:
            self._in_step = False
            self.end_step()

    def check(self) -> None:
        """Raises as ``begin_step`` does."""

    def _fill(self) -> None:
        """Give an offloaded optimizer the gradients that the last micro-batch did not use."""

    def _forget(self) -> None:
        """Drop the gradients in buffers."""

    def _refuse_none(self) -> None:
        raise RuntimeError(
            f"{self._name}: expected a backward pass of the step's last micro-batch, found {self._passes} earlier "
            "one(s) since the last step or zero_grad(); call engine.step() once after each engine.backward(loss) "
            f"({VERSION} does not see loss.backward() of a loss of several forward passes)"
        )


class WholeGradients(EngineGradients):
    """At stage 0, and of BF16_Optimizer, which have one sum."""

    def _end_of_pass(self, reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super()._end_of_pass(reduce, *args, **kwargs)
        self._complete += self._engine.is_gradient_accumulation_boundary()
        if isinstance(self._wrapper, BF16_Optimizer):
            self._wrapper.clear_lp_grads()  # as a forward pass does, or a second loss of one adds the first again

    def check(self) -> None:
        if not self._complete and self._engine.enable_backward_allreduce:  # which pipelines, for example, switch off
            self._refuse_none()


class _GradientsInBuffers(EngineGradients):
    def __init__(self, engine: DeepSpeedEngine, name: str) -> None:
        super().__init__(engine, name)
        self._reduced = 0  # passes whose gradients are in the buffers
        _replace(self._wrapper, "independent_gradient_partition_epilogue", self._end_of_reduction)

    def _end_of_reduction(self, end: Callable[[], None]) -> None:
        end()
        self._reduced += 1
        self._complete += self._engine.is_gradient_accumulation_boundary()

    def end_step(self) -> None:
        super().end_step()
        self._reduced = 0

    def check(self) -> None:
        if not (self._complete if self._engine.managed_gradient_accumulation() else self._reduced):
            self._refuse_none()


class FlatGradients(_GradientsInBuffers):
    """At stages 1 and 2."""

    def __init__(self, engine: DeepSpeedEngine, name: str) -> None:
        self._used = set[int]()  # offloaded parameters with a gradient of this step
        super().__init__(engine, name)
        if self._wrapper.cpu_offload:
            _replace(self._wrapper, "copy_grads_in_partition", self._copy)
        if self._wrapper.overlap_comm and not self._wrapper.partition_gradients:
            _replace(self._wrapper, "reduce_gradients", self._reduce)

    def end_step(self) -> None:
        super().end_step()
        self._used.clear()

    def check(self) -> None:
        super().check()
        if self._complete > 1 and not all(map(self._adds_up, range(len(self._wrapper.bit16_groups)))):
            raise RuntimeError(
                f"{self._name}: expected one backward pass to complete this step's gradient, found {self._complete}, "
                f"of which {VERSION} would use the last one alone at stages 1 and 2. Add up the losses for "
                "engine.backward(first + second), or run the passes in `with engine.coalesce_grad_reduction():`. "
                "engine.zero_grad() drops these gradients"
            )

    def _reduce(self, end: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Reduce what the hooks of the last micro-batch have not, in buckets of their own: ranks that used different
        layers in it then send unlike sizes as before, which transports refuse, and mix nothing."""
        wrapper, sent = self._wrapper, False
        hooked = {number for bucket in wrapper.ipg_buckets.values() for *_, number in bucket.params}
        for group, params in enumerate(wrapper.bit16_groups):
            for param in params:
                number = wrapper.get_param_id(param)
                done = wrapper.params_already_reduced[number] or number in hooked
                if done or wrapper.get_gradient_for_reduction(param) is None:
                    continue
                if not sent:
                    self._send_buckets()
                    sent = True
                wrapper.reduce_ready_partitions_and_remove_grads(param, group)
        end(*args, **kwargs)

    def _send_buckets(self) -> None:
        """As DeepSpeed sends buckets that are full."""
        self._wrapper.reduce_ipg_grads()
        for bucket in self._wrapper.ipg_buckets.values() if self._wrapper.contiguous_gradients else ():
            bucket.index = 1 - bucket.index

    def _adds_up(self, group: int) -> bool:
        """Whether a param group has a separate buffer, for sums in fp32 of 16-bit gradients; from 0.19.8 on."""
        method = getattr(self._wrapper, "_use_compact_grad_partition_buffer", None)
        return method is not None and method(group)

    def _forget(self) -> None:
        wrapper = self._wrapper
        for gradients in (wrapper.averaged_gradients, wrapper.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
        wrapper.micro_step_id = INITIAL_MICRO_STEP_ID  # the next pass overwrites what is offloaded
        if wrapper.cpu_offload:
            wrapper.reset_cpu_buffers()
            wrapper._offload_accumulated_param_ids.clear()

    def _copy(self, copy: Callable[..., None], param: Any, *args: Any) -> None:
        wrapper = self._wrapper
        number = wrapper.get_param_id(param)
        later = wrapper.micro_step_id > 0  # the first micro-batch overwrites the buffer
        if later and number not in self._used and number in wrapper.accumulated_grads_in_cpu:
            wrapper.accumulated_grads_in_cpu[number].zero_()
        self._used.add(number)
        copy(param, *args)

    def _fill(self) -> None:
        wrapper = self._wrapper
        for param in chain(*wrapper.params_in_partition) if wrapper.cpu_offload else ():
            number = wrapper.get_param_id(param)
            if number in wrapper.norm_for_param_grads:  # the last micro-batch used it
                continue
            group, start, offset, numel = wrapper.grad_position[number]
            grad = wrapper.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, numel)
            if number not in self._used:
                grad.zero_()
                continue
            get_accelerator().synchronize()  # what is copied to the CPU may not have arrived
            grad.copy_(self._summed(group, number, start, numel))
            wrapper.norm_for_param_grads[number] = grad.norm(2)
            wrapper.update_offload_overflow_tracker(grad)

    def _summed(self, group: int, number: int, start: int, numel: int) -> Tensor:
        """This rank's part of what earlier micro-batches gave a parameter."""
        wrapper = self._wrapper
        if self._adds_up(group):
            rank = wrapper.real_dp_process_group[group].rank()
            part: Tensor = wrapper._get_compact_grad_partition_slice(group, rank, number, numel)
            return part
        found: Tensor = wrapper.accumulated_grads_in_cpu[number]
        return found.view(-1).narrow(0, start, numel)


class PartitionedGradients(_GradientsInBuffers):
    """At stage 3."""

    def __init__(self, engine: DeepSpeedEngine, name: str) -> None:
        super().__init__(engine, name)
        self._every = {param.ds_id for param in chain(*self._wrapper.fp16_groups)}
        self._stale = set(self._every)  # parameters whose buffers have no gradient of this step
        _replace(self._wrapper, "partition_grads", self._partition)

    def end_step(self) -> None:
        super().end_step()
        self._stale.update(self._every)

    def _partition(self, partition: Callable[..., Any], params: Sequence[Any], *args: Any) -> Any:
        self._stale.difference_update(param.ds_id for param in params)
        return partition(params, *args)

    def _end_of_reduction(self, end: Callable[[], None]) -> None:
        super()._end_of_reduction(end)
        if self._stale:  # after a step's first micro-batch; a later one visits no parameter
            buffers = getattr(self._wrapper, BUFFERS)
            torch._foreach_zero_([buffers[number] for number in self._stale])
            self._stale.clear()

    def _forget(self) -> None:
        self._wrapper.reset_cpu_buffers()

    def _fill(self) -> None:
        wrapper = self._wrapper
        for param in chain(*wrapper.fp16_groups) if wrapper.offload_optimizer else ():
            number, buffer = wrapper.get_param_id(param), getattr(wrapper, BUFFERS)[param.ds_id]
            if number not in wrapper.norm_for_param_grads:  # the last micro-batch did not use it
                group, offset, numel = wrapper.grad_position[number]
                wrapper.fp32_partitioned_groups_flat[group].grad.narrow(0, offset, numel).copy_(buffer)
                norm = wrapper._constant_buffered_norm2(buffer)
                # DeepSpeed adds up norms in place, those of parameters with a gradient on the accelerator.
                wrapper.norm_for_param_grads[number] = norm.to(get_accelerator().current_device_name())


def _replace(holder: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a method of ``holder`` by ``call``, whose first argument is the method."""
    original = getattr(holder, name)
    setattr(holder, name, functools.wraps(original)(functools.partial(call, original)))
