"""Checks before anything is written: a checkpoint that is incomplete or inconsistent is refused."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import MASTER, WEIGHT, Checkpoint, CheckpointError, LazyTensor, Param
from lwopt_backend.checkpoint.files.made import in_order
from lwopt_backend.checkpoint.files.manifest import combined
from lwopt_backend.checkpoint.names import CORE, FAMILIES
from lwopt_backend.checkpoint.names.core import EMBEDDING, HEAD

SHOWN = 20  # problems that are listed
ADVICE = (  # on master weights that do not round to the weights, in Megatron's checkpoints
    "The optimizer state is not that of these weights. Megatron-LM up to 0.19.1 writes such checkpoints with "
    "--dist-ckpt-optim-fully-reshardable and several gradient buckets (--overlap-grad-reduce), and loads them "
    "silently; other states are wrong there too. Take a checkpoint that was saved without that option. The weights "
    "are good: to begin with these and a new optimizer, load them in Megatron with --no-load-optim, save again "
    "without that option, and convert that"
)


class Refused(CheckpointError):
    """A checkpoint with ``problems``, one sentence each, and ``advice`` on all of them, which may be empty."""

    def __init__(self, problems: Sequence[str], advice: str) -> None:
        more = f"\n  ... and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        listed = "\n  ".join(problems[:SHOWN])
        super().__init__(
            f"{len(problems)} problem(s), so that nothing is written:\n  {listed}{more}" + f"\n{advice}" * bool(advice)
        )
        self.problems, self.advice = tuple(problems), advice


def check(checkpoint: Checkpoint, vocab_size: int | None = None, workers: int = 1) -> list[str]:
    """Check a checkpoint; return notes. Reads every tensor once, ``workers`` parameters at a time. Raises Refused."""
    return Gate(checkpoint, vocab_size).finish(workers)


class Gate:
    """Checks a checkpoint while its tensors are read for another purpose, from ``checkpoint`` instead of the given one.

    Problems are states that are missing or of another shape than their parameter; master weights that do not round to
    the saved weights, bit for bit; replicas that differ; a ``vocab_size`` beyond the rows of the embedding, or short of
    trained rows.
    """

    def __init__(self, checkpoint: Checkpoint, vocab_size: int | None = None) -> None:
        misshapen = [
            f"{key} of {name!r} has shape {state.shape}, but the parameter {param.shape} ({state.where})"
            for name, param in checkpoint.params.items()
            for key, state in param.states.items()
            if state.shape != param.shape
        ]
        self._problems = [*_missing(checkpoint), *misshapen, *_vocabulary(checkpoint, vocab_size)]
        self._given, self._watched, params = checkpoint, {}, {}
        for name, param in checkpoint.params.items():
            weight, master = param.weight, param.states.get(MASTER)
            both = weight is not None and master is not None and master.shape == weight.shape
            rounded = weight.dtype if weight is not None and both else None  # in which both are compared
            watches = {key: _Watch(t, rounded if key in (WEIGHT, MASTER) else None) for key, t in param.tensors.items()}
            self._watched[name], params[name] = watches, param.changed({key: w.lazy() for key, w in watches.items()})
        self.checkpoint = replace(checkpoint, params=params)

    def refuse(self) -> None:
        """Raises Refused for problems that show before any value is read."""
        problems, advice = self._problems, ""
        if self._given.format.startswith("megatron") and any("does not round" in problem for problem in problems):
            advice = ADVICE
        if problems:
            raise Refused(problems, advice)

    def finish(self, workers: int = 1) -> list[str]:
        """Read what has not been read yet; return notes on what was checked. Raises Refused with the problems."""
        checkpoint, notes = self._given, []
        if not any(param.states for param in checkpoint.params.values()):
            notes.append("There is no optimizer state, only weights.")
        elif frozen := list(_frozen(checkpoint)):
            notes.append(f"{len(frozen)} parameter(s) without a param group have no state, such as {frozen[0]!r}.")
        wrong: dict[str, int] = {}
        masters = 0
        looks = (partial(_values, name, self._watched[name]) for name in checkpoint.params)
        for found, counts, both in in_order(looks, workers):
            masters += both
            self._problems += found
            wrong.update({what: count for what, count in counts.items() if count})
        for what, one, other in checkpoint.replicas:
            self._problems += _differing(what, one, other)
        self.refuse()
        if masters:
            notes.append(f"All {masters} master weights round to the saved weights, bit for bit.")
        if checkpoint.replicas:
            notes.append(f"All {len(checkpoint.replicas)} replicas are equal.")
        listed = ", ".join(f"{count} in {what}" for what, count in list(wrong.items())[:SHOWN])
        more = f" and others in {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        values = f"{sum(wrong.values())} values are infinite or no numbers: {listed}{more}."
        return [*notes, values if wrong else "All values are finite."]


def _missing(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield problems of parameters that lack some or all of the states that others of their param group have.

    If groups are not known, all parameters are compared. A state counts as missing only if another parameter has all of
    this one's states, and more. Rules may keep all of theirs in owner_states.
    """
    frozen = _frozen(checkpoint)
    trained = {name: param for name, param in checkpoint.params.items() if name not in frozen}
    kinds: dict[int | None, dict[frozenset[str], str]] = {}
    for name, param in trained.items():
        kinds.setdefault(param.group, {}).setdefault(frozenset(param.states) - {MASTER}, name)
    with_master = next((name for name, param in trained.items() if MASTER in param.states), None)
    for name, param in trained.items():
        have = frozenset(param.states) - {MASTER}
        larger = [kind for kind in kinds[param.group] if have < kind and not param.owner_states]
        if larger and not have:
            known = " or ".join(sorted(" and ".join(sorted(kind)) for kind in larger))
            yield f"{name!r} has no optimizer state, while others have {known}"
        elif larger:
            fuller = min(larger, key=lambda kind: (len(kind), sorted(kind)))
            lacks = " and ".join(sorted(fuller - have))
            yield f"{name!r} has no {lacks}, which {kinds[param.group][fuller]!r} has"
        dtype = None if param.weight is None else param.weight.dtype
        needs_master = dtype is None or dtype.is_floating_point and dtype.itemsize < 4
        if with_master is not None and needs_master and MASTER not in param.states:
            yield f"{name!r} has no master weight ({MASTER}), which {with_master!r} has"


def _frozen(checkpoint: Checkpoint) -> dict[str, Param]:
    """Parameters without state and without a group, if others have one."""
    params = checkpoint.params
    if all(param.group is None for param in params.values()):
        return {}
    return {n: p for n, p in params.items() if not p.states and p.weight is not None and p.group is None}


class _Watch:
    """Counts a tensor's values that are not finite while it is read, whole or in blocks, in any order, by any thread.
    If a dtype ``rounded`` is given, also computes the CRC32 of the elements in it."""

    def __init__(self, tensor: LazyTensor, rounded: torch.dtype | None) -> None:
        self.tensor, self._rounded = tensor, rounded
        self._parts: dict[int, tuple[int, int, int]] = {}  # by their first elements: how many, not finite, CRC32

    def lazy(self) -> LazyTensor:
        """The tensor as a lazy one that is watched when it is read."""
        whole, part = self.tensor.read, self.tensor.read_range
        ranged = None if part is None else lambda start, stop: self._saw(start, part(start, stop))
        return replace(self.tensor, read=lambda: self._saw(0, whole()), read_range=ranged)

    def finish(self) -> tuple[int, int]:
        """Read the rest; return the number of values that are not finite, and the CRC32."""
        ends = [0, *(start + numel for start, (numel, *_) in sorted(self._parts.items()))]
        if ends != [*sorted(self._parts), self.tensor.numel]:  # not one after the other, from the first to the last
            self._parts, start = {}, 0
            for read in self.tensor.block_reads():
                start += self._saw(start, read()).numel()
        crc = 0
        for _, (numel, _, of_part) in sorted(self._parts.items()):
            crc = combined(crc, of_part, numel * self._rounded.itemsize if self._rounded else 0)
        return sum(odd for _, odd, _ in self._parts.values()), crc

    def _saw(self, start: int, values: Tensor) -> Tensor:
        if start not in self._parts:
            odd, crc = 0, contents.crc32(values) if values.dtype == self._rounded else 0
            for block in values.reshape(-1).split(contents.BLOCK):
                odd += contents.infinite(block)
                if self._rounded not in (None, values.dtype):
                    crc = zlib.crc32(contents.memory(block.to(self._rounded)), crc)
            self._parts[start] = values.numel(), odd, crc
        return values


def _values(name: str, watched: Mapping[str, _Watch]) -> tuple[list[str], dict[str, int], bool]:
    """What is wrong with a parameter's values, how many of each tensor's are infinite or no numbers, and whether there
    is a master weight beside the weight. These are only compared element by element if their checksums differ."""
    found = {key: watch.finish() for key, watch in watched.items()}
    counts = {f"{key} of {name!r}": odd for key, (odd, _) in found.items()}
    if MASTER not in watched or WEIGHT not in watched:
        return [], counts, False
    weight, master = watched[WEIGHT].tensor, watched[MASTER].tensor
    if weight.shape != master.shape:
        return [], counts, False
    if found[WEIGHT][1] == found[MASTER][1]:
        return [], counts, True
    count, start, first = 0, 0, None
    for saved, full in zip(weight.blocks(), master.blocks(), strict=True):
        rounded = full.to(weight.dtype)  # to nearest even; NaN equals NaN
        if not contents.same(rounded, saved):
            differs = contents.unequal(rounded, saved)
            count += int(differs.sum())
            if first is None and count:
                at = int(differs.to(torch.uint8).argmax())
                first = f"element {start + at} is {full[at].item()!r}, but the weight {saved[at].item()!r}"
        start += saved.numel()
    problem = (
        f"master weight of {name!r} does not round to the saved {weight.dtype} weight in {count} of {weight.numel} "
        f"elements ({first}; {master.where})"
    )
    return [problem] * (count > 0), counts, True


def _differing(what: str, one: LazyTensor, other: LazyTensor) -> list[str]:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        found = f"{one.dtype} of shape {one.shape} and {other.dtype} of shape {other.shape}"
        return [f"replicas of {what} differ: {found} ({one.where}, {other.where})"]
    pairs = zip(one.blocks(), other.blocks(), strict=True)
    count = sum(0 if contents.same(*pair) else int(contents.unequal(*pair).sum()) for pair in pairs)
    said = f"replicas of {what} differ in {count} of {one.numel} elements ({one.where}, {other.where})"
    return [said] * (count > 0)


def _vocabulary(checkpoint: Checkpoint, size: int | None) -> Iterator[str]:
    """Padding rows are never looked up, so the rows of an untied embedding get no gradients there. If it is also the
    output layer, all rows get gradients, and nothing can be checked."""
    if size is None:
        return
    embedding, head = EMBEDDING, HEAD
    if checkpoint.names in FAMILIES and checkpoint.names != CORE:  # their names in that family, where it has them
        rules = [rule for rule in FAMILIES[checkpoint.names].rules if rule.sources]
        names = {rule.sources[0].text: rule.targets[0].text for rule in reversed(rules) if rule.targets}
        embedding, head = names.get(EMBEDDING, EMBEDDING), names.get(HEAD, HEAD)
    for name in (embedding, head):
        if name in checkpoint.params and checkpoint.params[name].shape[0] < size:
            rows = checkpoint.params[name].shape[0]
            yield f"{name!r} has {rows} rows, fewer than the vocabulary of {size} that was given; give the model's own"
    if embedding not in checkpoint.params or head not in checkpoint.params:
        return
    param = checkpoint.params[embedding]
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        state = param.states.get(key)
        if state is None or state.shape != param.shape or state.shape[0] <= size:
            continue
        width = state.numel // state.shape[0]
        beyond = state.piece(size * width, state.numel).read().view(-1, width)
        trained = [size + int(row) for row in beyond.any(dim=1).nonzero()]
        if trained:
            yield (
                f"{len(trained)} row(s) of {embedding!r} beyond the given vocabulary of {size} were trained, such "
                f"as row {trained[0]} ({state.where} is not zero there); give at least {trained[-1] + 1}"
            )
            return
