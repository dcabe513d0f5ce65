"""What buckets do with a model: checks, the meeting of ranks before a step, the report, and the bytes of a rank."""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lwopt_backend.config.hosts import NAME, PlainConfig
from lwopt_backend.engines import report
from lwopt_backend.engines.buffers.bucket_manager import IN_FLIGHT
from lwopt_backend.engines.buffers.hooks import BackwardPasses, is_followed
from lwopt_backend.engines.buffers.step import BufferCore, PlannedSet
from lwopt_backend.engines.output import binary_units
from lwopt_backend.groups import Groups
from lwopt_backend.groups.grouping import ADVICE, Grouping, InModel, Member
from lwopt_backend.groups.param_groups import NONE, CheckedGroups, ComparedOptions
from lwopt_backend.groups.registry import quantized_keys, state_nbytes
from lwopt_backend.plan.buffers.layout import Bucket
from lwopt_backend.plan.buffers.plan import BufferPlan
from lwopt_backend.plan.cost import RankMemory
from lwopt_backend.routing.models import check_is_module
from lwopt_backend.routing.routing import named_parameters
from lwopt_backend.runtime.agreement import RanksDisagree, StepRefused, disagreement
from lwopt_backend.runtime.collectives import all_reduce_nbytes
from lwopt_backend.runtime.presence import Presence, read_at_once
from lwopt_backend.runtime.quantized import BLOCK, SCALE_BYTES
from lwopt_backend.runtime.tensors import owned_dtype

FSDP2 = "for fully_shard models use lwopt_backend.LayerWiseOptimizer"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_model(model: nn.Module, caller: str = NAME) -> None:
    """Raises TypeError or ValueError for a model that ``caller`` cannot train: wrapped, sharded, or sparse."""
    check_is_module(model, caller)
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            place = f"its module {name!r} is" if name else "it is"
            raise TypeError(
                f"{caller}: expected a plain module, because it reduces gradients itself; {place} wrapped in "
                f"{type(module).__name__}; pass the module inside, model.module"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(f"{caller}: expected dense gradients, found sparse ones of {name!r}; set sparse=False")
    for name, param in named_parameters(model):
        if hasattr(param, "device_mesh"):
            raise TypeError(f"{caller}: parameter {name!r} is a DTensor; {FSDP2}")
    for name, module in model.named_modules():
        if getattr(module, "_is_fsdp_managed_module", False):
            which = f"module {name!r}" if name else "the model"
            raise TypeError(
                f"{caller}: expected a plain module, found {which} sharded by FullyShardedDataParallel, which flattens "
                f"matrices; pass the plain module, or shard it with fully_shard instead: {FSDP2}"
            )


def check_trained(grouping: Grouping, caller: str = NAME) -> None:
    """Raises TypeError or ValueError for parameters to train that cannot become views of ``caller``'s buffers."""
    devices: dict[torch.device, str] = {}
    for name, param in ((grouping.names[id(p)], p) for group in grouping.groups for p in group["params"]):
        if is_followed(param):
            gc.collect()  # optimizers in reference cycles
        if is_followed(param):
            raise ValueError(
                f"{caller}: parameter {name!r} belongs to an earlier LayerWiseOptimizer that is still in use; remove "
                "every reference to the earlier optimizer first (del optimizer)"
            )
        if param.dtype not in DTYPES:
            raise TypeError(
                f"{caller}: parameter {name!r} is stored in {str(param.dtype).removeprefix('torch.')}; expected "
                "float32, bfloat16, float16 or float64 (computing in fp8 over bfloat16 parameters works)"
            )
        if param.device.type == "meta":
            raise ValueError(
                f"{caller}: parameter {name!r}: expected values, found none on the meta device; materialize it"
            )
        devices.setdefault(param.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"{caller}: expected parameters on one device, found {places}; move the model to one")


def moved(names: Sequence[str], params: Sequence[Tensor], data_ptrs: Sequence[int]) -> str | None:
    """A sentence about a parameter that is no longer a view of its buffer; None if all are."""
    for name, param, data_ptr in zip(names, params, data_ptrs):
        if param.data_ptr() != data_ptr:
            return f"parameter {name!r} was moved or has new data (model.to(), param.data = ...); {ADVICE}"
    return None


def check_not_compiled(model: nn.Module) -> None:
    """Raises ValueError if a module of the model has run in code of torch.compile, which is still cached.

    torch.compile traces a module with its hooks, and does not check for hooks that are added later
    (``torch._dynamo.config.skip_nnmodule_hook_guards``). Such code would read parameters that are still in flight. It
    marks the parameters that it has read; only ``torch.compiler.reset`` makes the mark void.
    """
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None or not any(code() is not None for code in compiler.input_codes.seen):
        return
    for name, param in named_parameters(model):
        if param.requires_grad and getattr(param, "_dynamo_static_input_type", None) is not None:
            raise ValueError(
                f"{NAME}: expected {name!r} before its first run in torch.compile, because overlap_param_gather adds "
                "hooks that compiled code does not see; make the optimizer before the compiled model first runs, call "
                "torch.compiler.reset() before making the optimizer, or switch overlap_param_gather off"
            )


def check_options(
    config: PlainConfig,
    grouping: Grouping,
    expert_params: Sequence[str],
    expert_process_group: Any,
    expert_group_size: int | None,
) -> None:
    """Raises ValueError for options that exclude each other, or do not fit the parameters."""
    if bool(expert_params) != (expert_process_group is not None):
        raise ValueError(
            f"{NAME}: expected expert_params and expert_process_group together, found one; give both or neither"
        )
    if expert_group_size is not None and not expert_params:
        raise ValueError(
            f"{NAME}: expected expert_params with expert_group_size {expert_group_size}, found none; name the experts"
        )
    by_name = {grouping.names[id(p)]: p for group in grouping.groups for p in group["params"]}
    narrow = [name for name, p in by_name.items() if p.dtype.itemsize < 4]
    if config.keep_full_grads and config.grad_dtype == "float32" and narrow:
        raise ValueError(
            f"{NAME}: keep_full_grads puts gradients into param.grad, which has the parameter's dtype, but grad_dtype "
            f"is 'float32' and {narrow[0]!r} is narrower; leave one of the two options out"
        )


# From backward to a step: all buckets are sent, and ranks exchange errors and which parameters have gradients.


class StepMeeting:
    """The meeting of all ranks before a step: they agree on what has come of the backward passes of ``model``, whose
    parameters are ``core``'s. ``BackwardPasses`` reduces the gradients. Methods are called on all ranks.

    One vector, of which ranks take the maximum, has a flag for each parameter with a gradient, and

    - ``alike``: backward passes, whether the gradients are only read, a hash of what was done to them, and saves; and
      ``negated``, the same below zero. Ranks differ where the largest and the smallest are not equal;
    - ``ends``: whether this rank has an error to report, and whether it drops its gradients;
    - ``options``: a hash of the param groups' options, in every 64th step.
    """

    def __init__(self, core: BufferCore, model: nn.Module, checked: CheckedGroups, name: str = NAME) -> None:
        self._core = core
        self._name = name  # for errors
        self._manager = core.manager
        self._in_model = InModel(model, list(zip(core.manager.names, core.manager.params)))
        self._passes = BackwardPasses(core.manager, model)
        self.options, self._checked = ComparedOptions(checked), checked
        self._read: int | None = None  # the number of passes when ranks have last agreed to use the gradients
        self._refused = ""  # why steps are, until the gradients are cleared

    def finish(self, groups: Groups, *, reads: bool = False) -> list[Presence]:
        """Which parameters have a gradient on any rank, for a step, or for a use before that, which ``reads``.

        Raises RuntimeError, on all ranks, if one reports an error, if ranks have done different things, or if options
        in the param ``groups`` differ. After an error other than the last, gradients must be cleared.
        """
        if self._refused:
            raise StepRefused(
                f"{self._name}: expected the optimizer's zero_grad() on all ranks after an error that concerned all of "
                f"them, found none; call it, then run the next backward pass. The error was: {self._refused}"
            )
        presences, error = self._agree(groups, reads=reads)
        if error is not None:
            self._read = None
            if not isinstance(error, RanksDisagree):  # the step can be repeated with equal options
                self._manager.drop_gradients()
                self._refused = str(error)
            raise error
        self._read = self._manager.passes
        self._manager.take_changed()
        if not reads:
            self._core.without_gradient.stepped(self._core.had_gradient(presences))
        return presences

    @property
    def has_met(self) -> bool:
        """Whether ``finish`` was called since the last backward pass."""
        return self._read == self._manager.passes and self._manager.all_left

    def stepped(self) -> None:
        """The gradients have been used."""
        self._read = None

    def discard(self, *, to_zero: bool = False) -> None:
        """Drop all gradients, or set them ``to_zero``. Ranks whose pass was interrupted meet the others here, or in
        their step."""
        if self._passes.interrupted or self._manager.has_unused_gradients:
            self._agree((), drops=True)
        self._read, self._refused = None, ""
        self._manager.drop_gradients(to_zero=to_zero)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._passes.remove()

    def _agree(
        self, groups: Groups, *, reads: bool = False, drops: bool = False
    ) -> tuple[list[Presence], Exception | None]:
        """Send the rest of a backward pass, exchange reports with all ranks, and return an error of any rank.

        All ranks call the same collectives in any case. A rank that ``drops`` its gradients may meet ranks here that
        want to use their gradients; those get an error.
        """
        manager = self._manager
        mine = self._in_model.replaced() or moved(manager.names, manager.params, manager.data_ptrs)
        if mine is None and self._passes.interrupted:
            mine = "a backward pass ended in an exception; all gradients are dropped, on all ranks"
        if mine is None and manager.lost:
            mine = f"reducing gradients ended in an exception; all are dropped, on all ranks. It was: {manager.lost}"
        if mine is None and not drops and (unused := manager.unused_grad()) is not None:
            mine = (
                f"parameter {unused!r}: expected a .grad from a backward pass of the model, found an assigned one, "
                "which would not be used; set keep_full_grads=True to assign gradients"
            )
        if mine is None and not drops and (used := manager.stepped_grad()) is not None:
            mine = (
                f"parameter {used!r}: expected a backward pass or zero_grad() since the last step, which used and "
                "freed its gradient, found neither; torch.optim would use the gradient again. Call zero_grad() after "
                "each step, or keep gradients with keep_full_grads=True"
            )
        if mine is None and not drops:
            mine = self._checked.problem(groups)
        self._passes.forget()
        manager.finish()
        alike = (manager.passes, int(reads), manager.changes, self._core.saves.count)
        options = (NONE, NONE) if reads or drops else self.options.flags(groups)
        negated = [-each for each in alike]  # the largest of which is that of the smallest number
        ends = (mine is not None, drops)
        presences = self._core.presences(self._checked.out, ends=ends, alike=alike, negated=negated, options=options)
        read_at_once(presences)
        any_problem, any_drops = presences[0].largest("ends")
        most, fewest = presences[0].largest("alike"), [-each for each in presences[0].largest("negated")]
        if most[0] != fewest[0]:
            manager.finish(most[0])  # with zeros, or what others have sent would stay in flight
            return presences, RuntimeError(
                f"{self._name}: ranks ran different numbers of backward passes since the last step: {most[0]} on some, "
                f"{fewest[0]} on others, {alike[0]} on this rank; run equally many on all, or accumulate under "
                "no_sync()"
            )
        everyone = self._core.everyone
        if any_problem:
            rank, said = next((rank, said) for rank, said in enumerate(everyone.gather_objects(mine)) if said)
            return presences, StepRefused(f"{self._name}: {said} (rank {rank})")
        if any_drops:
            return presences, None if drops else RuntimeError(
                f"{self._name}: another rank has called zero_grad() where this one uses its gradients; all ranks drop "
                "them. Call the same methods on all ranks"
            )
        if most[1] != fewest[1]:
            ours, theirs = ("uses gradients (a norm, clipping)", "steps")[:: 1 if reads else -1]
            return presences, RuntimeError(
                f"{self._name}: another rank {theirs} where this one {ours}; all ranks drop the gradients. Call the "
                "same functions on all ranks"
            )
        if most[2] != fewest[2]:
            return presences, RuntimeError(
                f"{self._name}: ranks did different things to their gradients (param.grad = None, zero_grad(), "
                "scaling); all ranks drop them. Do the same on all ranks"
            )
        if most[3] != fewest[3]:
            said = self._core.saves.unlike(most[3], fewest[3])
            self._core.saves.met(most[3])
            return presences, StepRefused(f"{self._name}: {said}")
        self._core.saves.met(most[3])
        self._core.order_buckets(presences)
        differ = self.options.differ(presences[0].largest("options"))
        return presences, disagreement(everyone, self._name, self.options.lines(groups)) if differ else None


# What is printed when the buckets are made: the routing, the layout with its reason, and what each rank owns.


def described(core: BufferCore, groups: Sequence[Mapping[str, Any]]) -> report.Described:
    """For each set of ranks, its layout and a row per rank of an instance."""
    for number, planned in enumerate(core.planned_sets):
        plan = planned.plan
        count = planned.rank_groups.everyone.world_size
        whose = f"{count} {'ranks that share experts' if number else 'data-parallel ranks'}"
        kinds = [bucket.kind for bucket in plan.buckets]
        counts = f"{kinds.count('matrix')} matrix and {kinds.count('elementwise')} element-wise bucket(s)"
        storage = f"Buffers of {whose}: {counts}, {plan.padding} elements of padding."
        yield [*(report.Note("plan", said) for said in (storage, *plan.choices)), _table(core, groups, planned)]


def _table(core: BufferCore, groups: Sequence[Mapping[str, Any]], planned: PlannedSet) -> Table:
    """One row per rank: its matrices and their work, its bytes between steps, and the bytes that it sends in a step."""
    members = [core.members[number] for number in planned.numbers]

    def owned(rank: int) -> str:
        pieces = [piece for bucket in planned.plan.buckets for piece in bucket.pieces(rank)]
        return str(sum(p.start <= block.flat(0) < p.stop for p in pieces for block in members[p.param].blocks))

    memory = memories_of(core, groups, planned)
    columns = {
        "matrices": owned,
        "parameters": lambda rank: binary_units(memory[rank].parameters + memory[rank].padding),
        "masters": lambda rank: binary_units(memory[rank].masters),
        "state": lambda rank: binary_units(memory[rank].state),
        "sent a step": lambda rank: binary_units(memory[rank].sent),
    }
    return report.rank_table(planned.plan.loads, [groups[member.group]["rule"] for member in members], columns)


# The bytes that a rank stores and sends, computed from the plan.


def memory_of_all(core: BufferCore, groups: Sequence[Mapping[str, Any]]) -> list[RankMemory]:
    """The bytes of every rank, transient ones as measured. Called on all ranks."""
    mine = RankMemory(state=core.stepper.owner_nbytes())
    for planned in core.planned_sets:
        mine += memories_of(core, groups, planned)[planned.rank_groups.instance.rank]
    kept = sum(bucket.grad_nbytes for bucket in core.manager.buckets)
    mine = replace(mine, transient=max(0, core.manager.ledger.most_held - kept))
    return core.everyone.gather_objects(mine)


def memories_of(core: BufferCore, groups: Sequence[Mapping[str, Any]], planned: PlannedSet) -> list[RankMemory]:
    """The bytes of every rank of an instance for the members of ``planned``."""
    members = [core.members[number] for number in planned.numbers]
    return rank_memories(planned.plan, members, groups, grad_dtype=core.grad_dtype, keep_full=core.keep_full)


def rank_memories(
    plan: BufferPlan,
    members: Sequence[Member],
    groups: Sequence[Mapping[str, Any]],
    *,
    grad_dtype: torch.dtype | None,
    keep_full: bool,
) -> list[RankMemory]:
    """The bytes of every rank of an instance for ``members``, which the plan's slots name by position."""
    more = _transients(plan, members, grad_dtype=grad_dtype, keep_full=keep_full)
    found = [RankMemory(transient=transient) for transient in more]
    # Ranks own pieces of a few sizes.
    scales = [_scales_of(member) if quantized_keys(groups[member.group]) else Fraction(0) for member in members]

    @cache
    def state(numel: int, group: int, scales: Fraction, dtype: torch.dtype) -> int:
        return state_nbytes(numel, groups[group], dtype, numel + SCALE_BYTES * math.ceil(numel * scales))

    for bucket in plan.buckets:
        known: dict[tuple[Any, ...], RankMemory] = {}  # by a part's elements, and the pieces in it
        for rank, (pieces, (start, stop)) in enumerate(zip(bucket.pieces_of_all(), bucket.parts)):
            alike = Counter((piece.numel, members[piece.param].group, scales[piece.param]) for piece in pieces)
            key = (stop - start, *alike.items())
            if key not in known:
                known[key] = _of_bucket(bucket, rank, alike, plan, members, state, grad_dtype, keep_full)
            found[rank] += known[key]
    return found


def _scales_of(member: Member) -> Fraction:
    """How many scales an element has, if its state is kept in 8 bits: a rank has whole rows."""
    shapes = Counter(block.shape for block in member.blocks)
    scales = sum(count * rows * -(-columns // BLOCK) for (rows, columns), count in shapes.items())
    return Fraction(scales, max(1, member.param.numel()))


def _transients(
    plan: BufferPlan, members: Sequence[Member], *, grad_dtype: torch.dtype | None, keep_full: bool
) -> list[int]:
    """Per rank of an instance, the bytes that a backward pass needs in addition to the gradients that it keeps.

    By the rules of ``BucketManager._launch``, if gradients come one after another from the last parameter to the first.
    Buckets then leave in the plan's order from the first backward pass on.
    """
    buckets, in_place = plan.buckets, plan.group_size == 1 and not keep_full  # the buffer is the sum
    bucket_of = {slot.param: number for number, bucket in enumerate(buckets) for slot in bucket.slots}
    waiting = [len(bucket.slots) for bucket in buckets]
    kept = torch.zeros(plan.group_size, dtype=torch.int64)  # of arrived gradients; and the maximum held
    most, under_way, filling, opened, sent = kept.clone(), kept.clone(), 0, set[int](), 0

    def sizes(number: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Bytes of a bucket's buffer while it fills; and by rank, those in transit, kept, and widened."""
        bucket, dtype = buckets[number], members[buckets[number].slots[0].param].param.dtype
        wire, part = grad_dtype or dtype, torch.tensor([stop - start for start, stop in bucket.parts])
        owned, none = part * owned_dtype(dtype).itemsize, 0 * part
        widened = owned if wire != owned_dtype(dtype) else none
        whole, summed = bucket.numel * wire.itemsize, part * wire.itemsize
        if in_place:
            return whole, none, owned, widened + whole * (widened > 0)
        return (0, summed, none, widened) if keep_full else (whole, summed, owned, widened)

    def arrives(number: int) -> None:
        nonlocal kept, most, under_way
        whole, summed, owned, widened = sizes(number)
        under_way = under_way - whole
        most = torch.maximum(most, kept + under_way + filling + widened)
        under_way, kept = under_way - summed, kept + owned

    for param in reversed(range(len(members))):
        number = bucket_of[param]
        if number not in opened:
            opened.add(number)
            filling += sizes(number)[0]
            most = torch.maximum(most, kept + under_way + filling)
        waiting[number] -= 1
        while sent < len(buckets) and not waiting[sent]:
            if sent >= IN_FLIGHT:
                arrives(sent - IN_FLIGHT)
            whole, summed, *_ = sizes(sent)
            filling, under_way, sent = filling - whole, under_way + whole + summed, sent + 1
            most = torch.maximum(most, kept + under_way + filling)
    for number in range(max(0, sent - IN_FLIGHT), sent):
        arrives(number)
    return [int(each) for each in (most - kept).clamp(min=0)]


def _of_bucket(
    bucket: Bucket,
    rank: int,
    alike: Mapping[tuple[int, int, Fraction], int],
    plan: BufferPlan,
    members: Sequence[Member],
    state_of: Callable[[int, int, Fraction, torch.dtype], int],
    grad_dtype: torch.dtype | None,
    keep_full: bool,
) -> RankMemory:
    """``alike`` counts the rank's pieces by their elements, param group, and scales of an element."""
    dtype = members[bucket.slots[0].param].param.dtype
    stepped = owned_dtype(dtype)
    wire = (grad_dtype or dtype).itemsize
    filled = bucket.numel - bucket.padding
    owned = sum(times * numel for (numel, *_), times in alike.items())
    start, stop = bucket.parts[rank]
    if keep_full:
        gradients, padding = filled * wire, bucket.padding * wire
    else:
        gradients, padding = owned * stepped.itemsize, (stop - start - owned) * stepped.itemsize
    state = sum(times * state_of(*of_piece, stepped) for of_piece, times in alike.items())
    reduced, gathered = bucket.sent_numels(rank)
    sent = reduced * wire + gathered * (dtype.itemsize + (wire if keep_full else 0))
    sent += all_reduce_nbytes((stop - start) * stepped.itemsize, plan.instances)
    return RankMemory(
        parameters=filled * dtype.itemsize,
        gradients=gradients,
        masters=owned * stepped.itemsize if stepped != dtype else 0,
        state=state,
        padding=bucket.padding * dtype.itemsize + padding,
        sent=sent,
    )
