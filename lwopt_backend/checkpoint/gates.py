"""Checks before anything is written: a checkpoint that is incomplete or inconsistent is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from lwopt_backend.checkpoint import contents
from lwopt_backend.checkpoint.contents import (
    MASTER,
    SHOWN,
    WEIGHT,
    Checkpoint,
    CheckpointError,
    LazyTensor,
    Param,
    listed,
)
from lwopt_backend.checkpoint.files.threads import in_order
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

    def __init__(self, problems: Sequence[str], advice: str) -> None:
        said = f"{len(problems)} problem(s), and nothing was written:{listed(problems)}"
        super().__init__(said + f"\n{advice}" * bool(advice))
        self.problems, self.advice = tuple(problems), advice


def check(checkpoint: Checkpoint, vocab_size: int | None = None) -> list[str]:
    """Check a checkpoint's form and its values together; return notes. Raises Refused."""
    return [*on_state(checkpoint), *check_values(checkpoint, problems=_problems(checkpoint, vocab_size))]


def check_form(checkpoint: Checkpoint, vocab_size: int | None = None, with_state: bool = True) -> None:
    """Raises Refused for problems that are visible without values: a ``vocab_size`` beyond the rows of the embedding or
    below its trained rows, and ``with_state`` missing states and states of another shape than their parameter's."""
    if problems := _problems(checkpoint, vocab_size) if with_state else list(_vocabulary(checkpoint, vocab_size)):
        raise Refused(problems, "")


def on_state(checkpoint: Checkpoint) -> list[str]:
    """A note on parameters without optimizer state."""
    if not any(param.states for param in checkpoint.params.values()):
        return ["There is no optimizer state, only weights."]
    frozen = list(_frozen(checkpoint))
    return [f"{len(frozen)} parameter(s) without a param group have no state, such as {frozen[0]!r}."] if frozen else []


def _problems(checkpoint: Checkpoint, vocab_size: int | None) -> list[str]:
    misshapen = [
        f"{key} of {name!r}: expected the parameter's shape {param.shape}, found {state.shape} ({state.where})"
        for name, param in checkpoint.params.items()
        for key, state in param.states.items()
        if state.shape != param.shape
    ]
    return [*_missing(checkpoint), *misshapen, *_vocabulary(checkpoint, vocab_size)]


def check_values(checkpoint: Checkpoint, workers: int = 1, problems: Sequence[str] = ()) -> list[str]:
    """Read every tensor, ``workers`` parameters at a time; return notes on what was checked. Raises Refused for master
    weights that do not round to the saved weights, bit for bit, for replicas that differ, and for earlier
    ``problems``."""
    problems, notes = list(problems), []
    wrong: dict[str, int] = {}
    masters = 0
    looks = (partial(_values, name, param) for name, param in checkpoint.params.items())
    for found, counts, both in in_order(looks, workers):
        masters += both
        problems += found
        wrong.update({what: count for what, count in counts.items() if count})
    for what, one, other in checkpoint.replicas:
        problems += _differing(what, one, other)
    checkpoint.finish()
    if problems:
        unrounded = any("does not round" in problem for problem in problems)
        raise Refused(problems, ADVICE if unrounded and checkpoint.format.startswith("megatron") else "")
    if masters:
        notes.append(f"All {masters} master weights round to the saved weights, bit for bit.")
    if checkpoint.replicas:
        notes.append(f"All {len(checkpoint.replicas)} replicas are equal.")
    where = ", ".join(f"{count} in {what}" for what, count in list(wrong.items())[:SHOWN])
    more = f" and others in {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    values = f"{sum(wrong.values())} values are infinite or NaN: {where}{more}."
    return [*notes, values if wrong else "All values are finite."]


def _missing(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield problems of parameters that lack states, or a count of steps, that others of their param group have.

    If groups are not known, all parameters are compared. A state counts as missing only if another parameter has all of
    this one's states, and more. A rule may keep its whole state in owner_states.
    """
    frozen = _frozen(checkpoint)
    trained = {name: param for name, param in checkpoint.params.items() if name not in frozen}
    kinds: dict[int | None, dict[frozenset[str], str]] = {}
    states = {n: frozenset({*p.states, *([] if p.step is None else ["step"])}) - {MASTER} for n, p in trained.items()}
    for name, param in trained.items():
        kinds.setdefault(param.group, {}).setdefault(states[name], name)
    with_master = next((name for name, param in trained.items() if MASTER in param.states), None)
    for name, param in trained.items():
        have = states[name]
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


def _values(name: str, param: Param) -> tuple[list[str], dict[str, int], bool]:
    """Problems of a parameter's values, the number of infinite or NaN values by tensor, and whether there is a master
    weight in addition to the weight."""
    weight, master, tensors = param.weight, param.states.get(MASTER), param.tensors
    both = () if weight is None or master is None or weight.shape != master.shape else (WEIGHT, MASTER)
    odd = {key: sum(map(contents.infinite, t.blocks())) for key, t in tensors.items() if key not in both}
    if weight is None or master is None or not both:
        return [], {f"{key} of {name!r}": many for key, many in odd.items()}, False
    odd |= dict.fromkeys(both, 0)
    count, start, first = 0, 0, None
    for saved, full in zip(weight.blocks(), master.blocks(), strict=True):
        odd[WEIGHT] += contents.infinite(saved)
        odd[MASTER] += contents.infinite(full)
        rounded = full.to(weight.dtype)  # to nearest even; NaN equals NaN
        if not contents.same(rounded, saved):
            differs = contents.unequal(rounded, saved)
            count += int(differs.sum())
            if first is None and count:
                at = int(differs.to(torch.uint8).argmax())
                first = f"element {start + at} is {full[at].item()!r}, the weight {saved[at].item()!r}"
        start += saved.numel()
    problem = (
        f"master weight of {name!r} does not round to the saved {weight.dtype} weight in {count} of {weight.numel} "
        f"elements ({first}; {master.where})"
    )
    return [problem] * (count > 0), {f"{key} of {name!r}": odd[key] for key in tensors}, True


def _differing(what: str, one: LazyTensor, other: LazyTensor) -> list[str]:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        found = f"{one.dtype} of shape {one.shape} and {other.dtype} of shape {other.shape}"
        return [f"replicas of {what} differ: {found} ({one.where}, {other.where})"]
    pairs = zip(one.blocks(), other.blocks(), strict=True)
    count = sum(0 if contents.same(*pair) else int(contents.unequal(*pair).sum()) for pair in pairs)
    said = f"replicas of {what} differ in {count} of {one.numel} elements ({one.where}, {other.where})"
    return [said] * (count > 0)


def _vocabulary(checkpoint: Checkpoint, size: int | None) -> Iterator[str]:
    """Padding rows are never looked up, so they get no gradients in an untied embedding. If it is also the output
    layer, all rows get gradients, and nothing can be checked."""
    if size is None:
        return
    embedding, head = vocabulary(checkpoint.names)
    for name in (embedding, head):
        if name in checkpoint.params and checkpoint.params[name].shape[0] < size:
            rows = checkpoint.params[name].shape[0]
            yield f"{name!r}: expected at least {size} rows, the given vocabulary, found {rows}; give the model's"
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
                f"{embedding!r}: expected untrained rows beyond the given vocabulary of {size}, found {len(trained)} "
                f"trained, such as row {trained[0]} ({state.where} is not zero there); give at least {trained[-1] + 1}"
            )
            return
