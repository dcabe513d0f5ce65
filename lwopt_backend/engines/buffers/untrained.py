"""What is kept equal on all ranks although nobody trains it: frozen parameters and buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lwopt_backend.config.hosts import NAME
from lwopt_backend.config.versions import is_first_rank
from lwopt_backend.engines.buffers.hooks import is_followed
from lwopt_backend.engines.buffers.step import WHAT, ParamSet, set_number
from lwopt_backend.groups.param_groups import COMPARED_EVERY
from lwopt_backend.routing.routing import named, warn
from lwopt_backend.runtime.agreement import agree_in_all
from lwopt_backend.runtime.collectives import Collectives, Pending
from lwopt_backend.runtime.tensors import copy_alike

BROADCAST_NBYTES = 250 * 2**20  # of tensors that are broadcast together, as in DDP


def untrained(model: nn.Module, trained: Collection[int]) -> list[tuple[str, Tensor]]:
    """All buffers, and all parameters that are not ``trained``, by id, nor another optimizer's; by name."""
    params = ((name, param) for name, param in model.named_parameters() if id(param) not in trained)
    return [*((name, param.data) for name, param in params if not is_followed(param)), *model.named_buffers()]


def broadcast_untrained(
    model: nn.Module,
    trained: Collection[int],
    sets: Sequence[ParamSet],
    chosen: Callable[[str], bool] = lambda name: True,
) -> None:
    """Copy what is ``untrained`` and whose name is ``chosen`` from the first rank that shares it, as DDP does.
    Called on all ranks.

    Experts come from the first of their own ranks. Raises, on all ranks, ValueError for a tensor on a device for which
    its process group has no backend, and RanksDisagree if ranks have other names, shapes or dtypes.
    """
    found = _by_set([(name, tensor) for name, tensor in untrained(model, trained) if chosen(name)], sets)

    def check() -> tuple[list[list[list[Tensor]]], list[list[str]]]:
        lines = [[f"{name} {tuple(t.shape)} {t.dtype} {t.layout}" for name, t in named] for named in found]
        return [_batches(named, shared.ranks) for named, shared in zip(found, sets)], lines

    agreed = agree_in_all([shared.ranks for shared in sets], WHAT, check)
    for shared, batches in zip(sets, agreed):
        for tensors in batches:
            message = Message(tensors, shared.ranks)
            message.receive()


class Unreduced:
    """Tells once, on the first rank, of parameters of ``model`` that have a gradient and belong to no optimizer here.

    DDP would average these gradients over ``ranks``. Here nobody does, so that with another optimizer the ranks' values
    of such a parameter drift apart.
    """

    def __init__(self, model: nn.Module, trained: Collection[int], ranks: int) -> None:
        self._model, self._trained = model, frozenset(trained)
        self._steps, self._looks = 0, ranks > 1 and is_first_rank()

    def look(self) -> None:
        """Look at the gradients, in the first step and in every 64th. Called in every step."""
        if self._looks and self._steps % COMPARED_EVERY == 0:
            others = [(name, p) for name, p in self._model.named_parameters() if id(p) not in self._trained]
            names = [name for name, param in others if param.grad is not None and not is_followed(param)]
            if names:
                self._looks = False
                warn(
                    f"{NAME}: {len(names)} parameter(s) that no {NAME} trains have a gradient, {named(names)}. Such "
                    "gradients stay on each rank, where DDP would average them: another optimizer would train other "
                    f"values on each rank. Give the parameters to this optimizer, or to a second {NAME} with params; "
                    "or freeze them"
                )
        self._steps += 1


class Message:
    """A broadcast from the first rank of ``tensors`` on one device, by their bytes. Made on all ranks, which starts
    it."""

    def __init__(self, tensors: Sequence[Tensor], ranks: Collectives) -> None:
        self._ranks = ranks
        self._alike: dict[torch.dtype, list[Tensor]] = {}
        for tensor in sorted(tensors, key=lambda tensor: (-tensor.itemsize, str(tensor.dtype))):  # each starts aligned
            self._alike.setdefault(tensor.dtype, []).append(tensor)
        flat = [torch._C._nn.flatten_dense_tensors(some).view(torch.uint8) for some in self._alike.values()]
        self._bytes = torch.cat(flat) if len(flat) > 1 else flat[0]
        self._receives = ranks.rank > 0
        some = chain.from_iterable(self._alike.values() if self._receives else ())
        self._versions = {id(tensor): tensor._version for tensor in some}
        self._pending: Pending = ranks.start_broadcast(self._bytes)

    @property
    def nbytes(self) -> int:
        """What the first rank sends to the others."""
        return self._bytes.numel() * (self._ranks.world_size - 1) if self._ranks.rank == 0 else 0

    def receive(self, *, keep: bool = False) -> None:
        """Wait, and copy what has come, unless to ``keep`` this rank's. A tensor that has been changed since stays: all
        ranks change it, and what has come is from before."""
        self._pending.wait()
        parts = self._bytes.split([sum(tensor.nbytes for tensor in some) for some in self._alike.values()])
        for (dtype, some), part in zip(self._alike.items(), parts) if self._receives and not keep else ():
            pairs = zip(some, torch._C._nn.unflatten_dense_tensors(part.view(dtype), some))
            unchanged = [pair for pair in pairs if pair[0]._version == self._versions[id(pair[0])]]
            copy_alike([into for into, _ in unchanged], [come for _, come in unchanged])


class Buffers:
    """Copies ``model``'s buffers from the first rank that shares them. Methods are called on all ranks.

    DDP does so before a forward pass if gradients of the one before were reduced. Here they leave when these have left,
    and arrive by the next forward pass or step: an evaluation may then run on some ranks only, and all have equal ones.
    """

    def __init__(self, model: nn.Module, sets: Sequence[ParamSet], sent: Callable[[str, int], None]) -> None:
        self._model, self._sets, self._sent = model, sets, sent
        self._messages: list[Message] = []
        weakref.finalize(self, _wait_for_all, self._messages).atexit = False
        # Whether there is anything to do. A model without buffers is not searched for them in every pass, as in DDP.
        self.any = any(True for _ in model.buffers()) and any(shared.ranks.world_size > 1 for shared in sets)

    @torch.no_grad()
    def send(self) -> None:
        """Start to copy them. The model may have got others since the last time, the same on all ranks."""
        self.receive()
        if not self.any:
            return
        for some, shared in zip(_by_set([*self._model.named_buffers()], self._sets), self._sets):
            for tensors in _batches(some, shared.ranks):
                self._messages.append(Message(tensors, shared.ranks))
                self._sent("buffers", self._messages[-1].nbytes)

    @torch.no_grad()
    def receive(self, *, keep: bool = False) -> None:
        """Wait for them; ``keep`` this rank's, if others have been loaded in between."""
        messages = [*self._messages]
        self._messages.clear()
        for message in messages:
            message.receive(keep=keep)


def _wait_for_all(messages: Sequence[Message]) -> None:
    """Of buffers that are gone: a transport whose buffers are freed hangs. When Python exits, nothing waits."""
    with suppress(RuntimeError):
        for message in messages:
            message.receive(keep=True)


def _by_set(named: Sequence[tuple[str, Tensor]], sets: Sequence[ParamSet]) -> list[list[tuple[str, Tensor]]]:
    """For each of the sets, the stored tensors that its ranks have in common."""
    found: list[list[tuple[str, Tensor]]] = [[] for _ in sets]
    for name, tensor in named:
        found[set_number(name, sets)] += _stored(name, tensor.detach())
    return found


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the tensors in which a subclass stores its elements, such as a quantized weight."""
    if is_traceable_wrapper_subclass(tensor):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _stored(f"{name}.{inner}", getattr(tensor, inner))
    else:
        yield name, tensor


def _batches(named: Sequence[tuple[str, Tensor]], ranks: Collectives) -> list[list[Tensor]]:
    """The tensors that are broadcast together: on one device, at most BROADCAST_NBYTES or one tensor."""
    batches: list[list[Tensor]] = []
    room: dict[torch.device, tuple[list[Tensor], int]] = {}
    for name, tensor in named:
        if not ranks.sends(tensor):
            raise ValueError(
                f"{WHAT}: expected every frozen parameter and buffer where the process group can send it, found "
                f"{name!r}, a {tensor.layout} tensor on {tensor.device}; move it to the device of the trained "
                "parameters"
            )
        nbytes = tensor.numel() * tensor.itemsize
        batch, held = room.get(tensor.device, ([], BROADCAST_NBYTES))
        if held + nbytes > BROADCAST_NBYTES:
            batch, held = [], 0
            batches.append(batch)
        batch.append(tensor)
        room[tensor.device] = (batch, held + nbytes)
    return batches
