"""What a checkpoint must be: complete, and with tensors that are equal where they must be."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import MASTER, SHOWN, Checkpoint, CheckpointError, LazyTensor, Param, listed
from lwopt_backend.checkpoint.files.threads import all_done
from lwopt_backend.checkpoint.names import vocabulary

ADVICE = (  # on master weights that do not round to the weights, in Megatron's checkpoints
    "The optimizer state does not belong to these weights. Megatron-LM up to 0.19.2 writes such checkpoints with "
    "--dist-ckpt-optim-fully-reshardable and several gradient buckets (--overlap-grad-reduce), and loads them "
    "silently; other states are wrong there as well. Take a checkpoint that was saved without that option. The weights "
    "are correct: to begin with them and a new optimizer, load them in Megatron with --no-load-optim, save again "
    "without that option, and convert the result"
)


class Refused(CheckpointError):
    """A checkpoint with ``problems``, one sentence each, and ``advice`` on all of them, which may be empty."""

    def __init__(self, problems: Sequence[str], advice: str = "") -> None:
        said = f"{len(problems)} problem(s), and nothing was written:{listed(problems)}"
        super().__init__(said + f"\n{advice}" * bool(advice))
        self.problems, self.advice = tuple(problems), advice


def on_state(checkpoint: Checkpoint) -> list[str]:
    """A note on parameters without optimizer state."""
    if not any(param.states for param in checkpoint.params.values()):
        return ["There is no optimizer state, only weights."]
    frozen = list(_frozen(checkpoint))
    if not frozen:
        return []
    said = f"{len(frozen)} parameter(s) without a param group have no state, such as {frozen[0]!r}"
    return [f"{said}; give --tied if one is a second name of a trained one, as where an embedding is the output head."]


def incomplete(checkpoint: Checkpoint) -> list[str]:
    """Problems that are visible without values: states of another shape than their parameter's, and parameters that
    lack states, a count of steps or a master weight that others of their param group have.

    If groups are not known, all parameters are compared. A state counts as missing only if another parameter has all of
    this one's states, and more. A rule may keep its whole state in owner_states.
    """
    problems = [
        f"{key} of {name!r}: expected the parameter's shape {param.shape}, found {state.shape} ({state.where})"
        for name, param in checkpoint.params.items()
        for key, state in param.states.items()
        if state.shape != param.shape
    ]
    frozen = _frozen(checkpoint)
    trained = {name: param for name, param in checkpoint.params.items() if name not in frozen}
    kinds: dict[int | None, dict[frozenset[str], str]] = {}  # by group, the sets of states, each with a parameter
    with_master = next((name for name, param in trained.items() if MASTER in param.states), None)
    for name, param in trained.items():
        kinds.setdefault(param.group, {}).setdefault(_kept(param), name)
    for name, param in trained.items():
        have, known = _kept(param), kinds[param.group]
        larger = [kind for kind in known if have < kind and not param.owner_states]
        if larger:
            fuller = min(larger, key=lambda kind: (len(kind), sorted(kind)))
            problems.append(f"{name!r} has no {' and '.join(sorted(fuller - have))}, which {known[fuller]!r} has")
        dtype = None if param.weight is None else param.weight.dtype
        needs_master = dtype is None or dtype.is_floating_point and dtype.itemsize < 4
        if with_master is not None and needs_master and MASTER not in param.states:
            problems.append(f"{name!r} has no master weight ({MASTER}), which {with_master!r} has")
    return problems


def _kept(param: Param) -> frozenset[str]:
    """The keys of a parameter's state, its count of steps among them."""
    # Masters are judged apart: of the parameters of one group, those in fp32 have none.
    return frozenset({*param.states, *([] if param.step is None else ["step"])}) - {MASTER}


def _frozen(checkpoint: Checkpoint) -> dict[str, Param]:
    """Parameters without state and without a group, if others have one."""
    params = checkpoint.params
    if all(param.group is None for param in params.values()):
        return {}
    return {n: p for n, p in params.items() if not p.states and p.weight is not None and p.group is None}


def trained_beyond(checkpoint: Checkpoint, size: int | None) -> list[str]:
    """A problem if the embedding has trained rows that a vocabulary of ``size`` cuts off. Padding rows are never looked
    up, so they get no gradients. If the embedding is also the output layer, all rows get gradients, and nothing can be
    told."""
    embedding, head = vocabulary(checkpoint.names)
    if size is None or embedding not in checkpoint.params or head not in checkpoint.params:
        return []
    param = checkpoint.params[embedding]
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        state = param.states.get(key)
        if state is None or state.shape != param.shape or state.shape[0] <= size:
            continue
        width = state.numel // state.shape[0]
        beyond = state.piece(size * width, state.numel).read().view(-1, width)
        if trained := [size + int(row) for row in beyond.any(dim=1).nonzero()]:
            return [
                f"{embedding!r}: expected untrained rows beyond the given vocabulary of {size}, found {len(trained)} "
                f"trained, such as row {trained[0]} ({state.where} is not zero there); give at least {trained[-1] + 1}"
            ]
    return []


class Checks:
    """Compares what must be equal while a conversion reads it: master weights, rounded, with the weights, bit for bit,
    and replicas. Counts infinite and NaN values.

    ``see`` takes the CRC32 of each block of such a tensor, so that nothing is read a second time. ``finish`` compares
    these; it reads what nobody has read, and both tensors again, for the message, where the sums differ.
    """

    def __init__(self, checkpoint: Checkpoint, problems: Sequence[str] = ()) -> None:
        self._checkpoint, self._problems = checkpoint, list(problems)
        both = {n: (p.weight, p.states[MASTER]) for n, p in checkpoint.params.items() if MASTER in p.states}
        self._masters = {n: (w, m) for n, (w, m) in both.items() if w is not None and w.shape == m.shape}
        pairs = [*self._masters.values(), *((one, other) for _, one, other in checkpoint.replicas)]
        self._sums: dict[tuple[int, torch.dtype], dict[int, int]] = {
            (id(tensor), one.dtype): {} for one, other in pairs for tensor in (one, other)
        }
        self._odd = {id(tensor): 0 for param in checkpoint.params.values() for tensor in param.tensors.values()}
        self._dtypes: dict[int, list[torch.dtype]] = {}
        for tensor, dtype in self._sums:
            self._dtypes.setdefault(tensor, []).append(dtype)

    def see(self, tensor: LazyTensor, start: int, found: Tensor) -> None:
        """Elements that were read of a tensor of the checkpoint, from ``start`` on. Threads may call it, for
        different tensors."""
        if id(tensor) in self._odd:
            self._odd[id(tensor)] += contents.infinite(found)
        for dtype in self._dtypes.get(id(tensor), ()):
            for number, block in enumerate(found.view(-1).split(contents.BLOCK)):
                at = start + number * contents.BLOCK
                # A master is rounded to its weight's dtype before the sum, so that equal sums mean equal bits.
                self._sums[id(tensor), dtype][at] = zlib.crc32(contents.memory(block.to(dtype)))

    def finish(self) -> list[str]:
        """Notes on what was compared. Raises Refused for problems, and CheckpointError for a wrong checksum."""
        problems, unrounded = self._problems, 0
        for name, (weight, master) in self._masters.items():
            count, first, _ = self._compared(weight, master)
            if count:
                unrounded += 1
                values = [each.piece(first, first + 1).read().item() for each in (master, weight)]
                problems.append(
                    f"master weight of {name!r} does not round to the saved {weight.dtype} weight in {count} of "
                    f"{weight.numel} elements (element {first} is {values[0]!r}, the weight {values[1]!r}; "
                    f"{master.where})"
                )
        for what, one, other in self._checkpoint.replicas:
            where = f"({one.where}, {other.where})"
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                forms = f"{one.dtype} of shape {one.shape} and {other.dtype} of shape {other.shape}"
                problems.append(f"replicas of {what} differ: {forms} {where}")
            elif count := self._compared(one, other)[0]:
                problems.append(f"replicas of {what} differ in {count} of {one.numel} elements {where}")
        self._checkpoint.finish()
        if problems:
            is_megatrons = bool(unrounded) and self._checkpoint.format.startswith("megatron")
            raise Refused(problems, ADVICE if is_megatrons else "")
        masters, replicas = len(self._masters), len(self._checkpoint.replicas)
        rounded = [f"All {masters} master weights round to the saved weights, bit for bit."] * (masters > 0)
        return [*rounded, *[f"All {replicas} replicas are equal."] * (replicas > 0), self._infinite()]

    def _infinite(self) -> str:
        named = ((name, *of) for name, param in self._checkpoint.params.items() for of in param.tensors.items())
        odd = {f"{key} of {name!r}": count for name, key, tensor in named if (count := self._odd[id(tensor)])}
        if not odd:
            return "All values are finite."
        where = ", ".join(f"{count} in {what}" for what, count in list(odd.items())[:SHOWN])
        more = f" and others in {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        return f"{sum(odd.values())} values are infinite or NaN: {where}{more}."

    def _compared(self, one: LazyTensor, other: LazyTensor) -> tuple[int, int, float]:
        sums = []
        for tensor in (one, other):
            if not self._sums[id(tensor), one.dtype]:
                for number, block in enumerate(tensor.blocks()):
                    self.see(tensor, number * contents.BLOCK, block)
            sums.append(self._sums[id(tensor), one.dtype])
        # Most tensors are equal: only what differs is read again, to name the elements.
        return (0, 0, 0.0) if sums[0] == sums[1] else contents.differing(one, other.to(one.dtype))


def check(checkpoint: Checkpoint, *watchers: Callable[[LazyTensor, int, Tensor], None]) -> list[str]:
    """Read every tensor; return notes on what was checked. Raises Refused for problems of form and of values."""
    checks = Checks(checkpoint, incomplete(checkpoint))
    read_all(contents.watched(checkpoint, checks.see, *watchers))
    return [*on_state(checkpoint), *checks.finish()]


def read_all(checkpoint: Checkpoint, workers: int = 1) -> None:
    """Read every tensor of the parameters, the buffers and the program's entries, ``workers`` at a time, and owner
    state matrix by matrix."""
    tensors = [tensor for param in checkpoint.params.values() for tensor in param.tensors.values()]
    tensors += [*checkpoint.buffers.values(), *contents.lazy_tensors(checkpoint.client)]
    all_done([partial(_read, tensor) for tensor in tensors], workers)
    for param in checkpoint.params.values():
        for place in param.owner_states:
            param.owner_states[place]


def _read(tensor: LazyTensor) -> None:
    for _ in tensor.blocks():
        pass
