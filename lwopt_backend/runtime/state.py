"""The optimizer's state on one rank: its pieces of whole tensors, and its owner state."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

import torch
from torch import Tensor

from lwopt_backend.plan import Atom, TrainedParam
from lwopt_backend.plan.layouts import View
from lwopt_backend.rules import MatrixRule, OwnerStateRule, WeightRule
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.collectives import Collectives, WithoutCollectives
from lwopt_backend.runtime.quantized import QuantizedPiece
from lwopt_backend.runtime.shown_state import ShownState, ShownTensor

# A rank's part of an optimizer's parameters, in one form for all engines. Code with whole tensors by parameter name (a
# checkpoint, another optimizer's state) loads them with ``put``.


class Lazy(Protocol):
    """A whole tensor in a file, read when it is needed."""

    def read(self) -> Tensor: ...

    def piece(self, start: int, stop: int) -> Lazy:
        """The elements [start, stop) of the flattened tensor."""

    def blocks(self) -> Iterator[Tensor]:
        """Yield all elements in order, in flat tensors of limited size."""


Whole = Tensor | Lazy
OwnerStates = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by parameter name and the matrix's place in the parameter


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Elements of one parameter that a rank stores together, with their state. All tensors are views of the storage.

    - ``member``: the parameter's number in the store; ``view``: these elements of the flattened parameter.
    - ``value``: the weights that are stepped (fp32 masters if the engine has them); None if another piece has them.
    - ``tensors``: the state by key, each of the view's shape; counters are scalars. What is kept in 8 bits is a new
      tensor whenever it is read, which ``changing`` puts back.
    - ``owner``: owner state, by the matrix's place in the parameter.
    """

    member: int
    view: View
    value: Tensor | None
    tensors: Mapping[str, Tensor]
    owner: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """The start of the piece in the flattened parameter."""
        return self.view.span[0]

    @property
    def stop(self) -> int:
        """The end of the span of its elements in the flattened parameter."""
        return self.view.span[1]

    @contextmanager
    def changing(self, key: str) -> Iterator[Tensor]:
        """The state under a key, to be changed in place."""
        tensor = self.tensors[key]
        yield tensor
        if isinstance(self.tensors, WithQuantized):
            self.tensors.put_back(key, tensor)

    def boxes(self, tensor: Tensor, shape: Sequence[int]) -> dict[tuple[int, ...], Tensor]:
        """``tensor``, of the view's shape, as boxes of a whole one of ``shape``, by place; a scalar as it is."""
        if not tensor.ndim:
            return {(): tensor}
        found, start = {}, 0
        for place, sizes in self.view.boxes(shape):
            found[place] = tensor if tensor.ndim > 1 else tensor.narrow(0, start, math.prod(sizes)).view(sizes)
            start += math.prod(sizes)
        return found


class WithQuantized(Mapping[str, Tensor]):
    """State by key: ``stored`` tensors, and new ones of what is ``quantized``, each made when it is read."""

    def __init__(self, stored: Mapping[str, Tensor], quantized: Mapping[str, QuantizedPiece]) -> None:
        self._stored, self._quantized = stored, quantized

    def __getitem__(self, key: str) -> Tensor:
        return self._quantized[key].read() if key in self._quantized else self._stored[key]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._quantized, *self._stored))

    def __len__(self) -> int:
        return len(self._quantized) + len(self._stored)

    def put_back(self, key: str, tensor: Tensor) -> None:
        """Quantize what was read."""
        if key in self._quantized:
            self._quantized[key].write(tensor)

    def shown(self) -> ShownState:
        """The same for ``optimizer.state``."""
        return ShownState(self._stored, {key: ShownTensor(piece) for key, piece in self._quantized.items()})


def with_quantized(stored: Mapping[str, Tensor], quantized: Mapping[str, QuantizedPiece]) -> Mapping[str, Tensor]:
    """State by key, with what is kept in 8 bits."""
    return WithQuantized(stored, quantized) if quantized else stored


class StateStore:
    """What this rank stores of the parameters that an optimizer trains. Made on all ranks.

    - ``ranks``: the groups of ranks that share parameters with this one.
    - ``groups``: the optimizer's param groups.
    - ``units``: the parameters that this rank trains; those of one unit are stepped as one tensor, with one count of
      steps. ``params``: the same, in one list.
    - ``elsewhere``: names of parameters that only other ranks train.
    - ``ambiguous``: why one name may mean different parameters on different ranks; None if it may not.
    """

    def __init__(
        self,
        ranks: Sequence[Collectives],
        groups: Sequence[dict[str, Any]],
        units: Sequence[Sequence[TrainedParam]],
        elsewhere: Collection[str] = (),
        ambiguous: str | None = None,
    ) -> None:
        self.ranks, self.groups, self.units = ranks, groups, units
        self.params = [param for unit in units for param in unit]
        self.elsewhere, self.ambiguous = elsewhere, ambiguous

    def pieces(self) -> Sequence[StatePiece]:
        """All pieces of this rank; fresh state before the first step. Raises RuntimeError in the middle of a step."""
        raise NotImplementedError

    def take_owner_states(self, states: OwnerStates) -> None:
        """Replace the owner state of this rank's matrices; those missing in ``states`` start fresh."""
        raise NotImplementedError

    def forget_owner_states(self, names: Collection[str]) -> None:
        """Let the owner state of this rank's matrices in these parameters start fresh."""
        raise NotImplementedError

    def publish(self) -> None:
        """Copy changed weights into the module's parameters. Called on all ranks."""
        raise NotImplementedError


@torch.no_grad()
def put(
    store: StateStore,
    *,
    weights: Mapping[str, Whole] | None = None,
    state: Mapping[str, Mapping[str, Whole]] | None = None,
) -> None:
    """Copy this rank's elements of whole tensors, given by parameter name; ``state`` also by key.

    Other parameters and keys are not changed. Does not communicate, so it may raise on one rank alone.
    """
    for piece in store.pieces():
        name = store.params[piece.member].name
        if piece.value is not None and weights and name in weights:
            fill(piece.value, weights[name], piece.view)
        for key, whole in state.get(name, {}).items() if state else ():
            if key in piece.tensors:
                with piece.changing(key) as tensor:
                    fill(tensor, whole, piece.view)


def fill(into: Tensor, whole: Whole, view: View) -> None:
    """Copy the elements ``view`` of ``whole`` into a tensor of the view's shape; a scalar is copied as it is."""
    start, stop = view.span
    if not into.ndim:
        into.copy_(whole if isinstance(whole, Tensor) else whole.read())
    elif not isinstance(whole, Tensor) and stop - start == into.numel() and into.is_contiguous():
        flat, start = into.view(-1), 0
        for block in whole.piece(*view.span).blocks():
            flat[start : start + block.numel()] = block
            start += block.numel()
    elif into.numel():
        into.copy_(part_of(whole, view))


def part_of(whole: Whole, view: View) -> Tensor:
    """The elements ``view`` of ``whole``, in the view's shape. They share memory with a contiguous tensor."""
    start, stop = view.span
    if isinstance(whole, Tensor):
        flat = whole.detach().contiguous().view(-1)[start:stop]
    else:
        flat = whole.piece(start, stop).read()
    return flat.as_strided(view.sizes, view.strides)


# The check that saved state fits, for all engines and formats.

Facts = Mapping[Any, Mapping[str, Any]]  # by parameter; a fact that is missing or None is not compared
PARAM_GROUP = "the param group of"  # a fact: the first parameter in it
SAME_MODEL = "load it into the model it was saved with"
SAME_RULE = "train it with the rule of the checkpoint, by include, exclude or overrides"
WEIGHTS_ALONE = "load the model's weights alone"
TO_DO = {
    "shape": SAME_MODEL,
    "dtype": SAME_MODEL,
    "rule": SAME_RULE,
    "state": SAME_RULE,
    "matrices": "load it with the 'atoms' it was saved with",
    "counters": "DeepSpeed steps the parameters of a param group as one tensor; put them into separate groups",
    PARAM_GROUP: "make the param groups it was saved with",
}


def reasons(
    here: Facts,
    saved: Facts,
    *,
    advice: str = SAME_MODEL,
    to_do: Mapping[str, str] = TO_DO,
    alone: str | None = WEIGHTS_ALONE,
    what: str = "parameter",
) -> Iterator[str]:
    """Yield a sentence for each reason why ``saved`` does not fit; nothing if it fits.

    Both sides have facts by parameter, or by the thing that ``what`` names: ``"shape"``, ``"rule"``, ``"state"`` (its
    keys), ``"'exp_avg' as"`` (the form of a tensor). ``to_do`` has the advice on a fact, and ``advice`` that on all
    others. ``alone`` says how to load no state, if there is a way: where nothing in ``saved`` has this side's rule or
    state, the optimizer is another one, and this comes first.
    """
    for name in [*(name for name in here if name not in saved), *(name for name in saved if name not in here)]:
        mine, known = name in here, saved if name in here else here
        where = "is trained here, but not in the checkpoint" if mine else "is in the checkpoint, but not trained here"
        close = get_close_matches(str(name), map(str, known), 1)
        there = f", which has {close[0]!r}" if close and mine else f"; here is {close[0]!r}" if close else ""
        yield f"{what} {name!r} {where}{there}; {advice}"
    for name in (name for name in here if name in saved):
        for fact, expected in here[name].items():
            found = saved[name].get(fact)
            if expected is not None and found is not None and expected != found:
                advised = to_do.get(fact, advice)
                if alone is not None and fact in ("rule", "state"):
                    ways = [advised, f"{alone}, and begin with new state"]
                    is_another = all(facts.get(fact) != expected for facts in saved.values())
                    advised = ", or ".join(ways[::-1] if is_another else ways)
                yield f"{what} {name!r}: expected {fact} {expected}, the checkpoint has {found}; {advised}"


def check_fits(where: str, here: Facts, saved: Facts, **more: Any) -> None:
    """Raises ValueError with the first of the ``reasons``."""
    for reason in reasons(here, saved, **more):
        raise ValueError(f"{where}: {reason}")


def form_of(value: Any, boxes: Any = None) -> str:
    """A tensor's kind, shape and placements, or any other value. ``boxes`` are this rank's boxes of it."""
    if not isinstance(value, Tensor):
        return repr(value)
    placements = getattr(value, "placements", None)
    kind = f"the boxes {boxes}" if boxes is not None else "a DTensor" if placements else "a plain tensor"
    return f"{kind} of shape {tuple(value.shape)}" + (f" placed as {placements}" if placements else "")


# Owner state: state that only a matrix's owner keeps, e.g. the factors of SOAP or Shampoo; any shapes, any number.

CHECKPOINT_KEY = "owner_state"  # its key in DeepSpeed's checkpoints
STRUCTURE, STEPPED = "structure", "stepped"  # keys of state with more than tensors by name
MATRICES = "matrices"  # key of the elements of matrices that a parameter's shape does not define


def step_whole(rule: WeightRule, atom: Atom, value: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
    """A step of a whole matrix. The first shows whether checkpoints can hold the rule's state.

    Raises ValueError, also in place of the rule's own errors, with the names of the rule and of the matrix.
    """
    is_first = not state
    try:
        rule.step(value, grad, state)
        if is_first:
            nested.check(state)
    except Exception as error:
        name = rule.rule_name or type(rule).__name__
        raise ValueError(f"{name} cannot train matrix {atom.name!r}: {error or type(error).__name__}") from error


def try_steps(rule: WeightRule, atom: Atom, device: torch.device, steps: int) -> dict[str, Any]:
    """The owner state of a matrix of the shape of ``atom``, of random numbers, after ``steps`` steps.

    Raises ValueError, as ``step_whole``, also for a rule that communicates: its owner would wait for the other ranks.
    """
    numbers, shape = torch.Generator().manual_seed(0), atom.rule_shape
    state: dict[str, Any] = {}
    of_device = [device] if device.type != "cpu" and torch.accelerator.is_available() else []
    kept = torch.random.fork_rng(of_device, device_type=device.type if of_device else "cuda")
    # A function that is first called under a dispatch mode is never compiled, unless nothing is there.
    eager = torch.compiler.set_stance("force_eager")
    with kept, eager, torch.no_grad(), WithoutCollectives():
        value = torch.randn(shape, generator=numbers).to(device)
        for _ in range(steps):  # the rule may draw numbers as well
            step_whole(rule, atom, value, torch.randn(shape, generator=numbers).to(device), state)
    return state


class OwnerState:
    """The owner state of those ``atoms`` that this rank owns, by atom, on ``device``."""

    def __init__(self, atoms: Sequence[Atom], device: torch.device) -> None:
        self._atoms = atoms
        self._device = device
        self._held: dict[int, dict[str, Any]] = {}
        self._tried: set[int] = set()  # atoms with the state of a trial step

    def of(self, atom: int, rule: MatrixRule) -> dict[str, Any]:
        """The state of a matrix for its next step; the rule changes it in place."""
        if atom in self._tried:
            self._tried.discard(atom)
            self._held[atom].clear()
        if atom not in self._held:
            self._held[atom] = self._new(atom, rule)
        return self._held[atom]

    def _new(self, atom: int, rule: MatrixRule) -> dict[str, Any]:
        if isinstance(rule, OwnerStateRule):
            return rule.new_owner_state(self._atoms[atom].rule_shape, self._device)
        return {}

    def held(self) -> Mapping[int, dict[str, Any]]:
        """The state of every atom, without what trial steps created."""
        return {atom: state for atom, state in self._held.items() if atom not in self._tried}

    def make(self, rules: Mapping[int, MatrixRule]) -> None:
        """Create the state of atoms, by their ``rules``, so that a checkpoint has its names and shapes before the first
        step.

        A ``WeightRule`` creates its state in its first step, so this takes a trial step on random numbers. The real
        first step discards that state.
        """
        for atom, rule in rules.items():
            if self._held.get(atom):
                continue
            if isinstance(rule, WeightRule):
                self._tried.add(atom)
                self._held[atom] = try_steps(rule, self._atoms[atom], self._device, 1)
            else:
                self._held[atom] = self._new(atom, rule)

    def put(self, atom: int, state: Mapping[str, Any]) -> None:
        """Replace an atom's state by a copy of ``state``."""
        self.hold(atom, nested.to_device(dict(state), self._device))

    def hold(self, atom: int, state: dict[str, Any]) -> None:
        """Replace an atom's state by ``state`` itself."""
        self._tried.discard(atom)
        self._held[atom] = state

    def empty_like(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with uninitialized tensors, where this rank keeps them."""

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty_like(leaf, device=self._device if leaf.ndim else "cpu")

        found: dict[str, Any] = nested.mapped(state, made)
        return found

    def tensors(self, atom: int, *, ordered: bool = False) -> dict[str, Tensor]:
        """A matrix's state ``as_tensors``. Called after ``make``."""
        return as_tensors(self._held[atom], stepped=atom in self.held(), ordered=ordered)

    def put_tensors(self, atom: int, found: Mapping[str, Tensor]) -> None:
        """Restore the result of ``tensors``, from this or another rank; fresh state if it is empty."""
        found = dict(found)
        stepped, described = found.pop(STEPPED, None), found.pop(STRUCTURE, None)
        if stepped is not None and not stepped.item() or not found and described is None:
            self.forget(atom)
        else:
            self.put(atom, found if described is None else nested.rebuild(nested.description(described.cpu()), found))

    def forget(self, atom: int) -> None:
        """Drop an atom's state."""
        self._tried.discard(atom)
        self._held.pop(atom, None)

    def by_name(self) -> dict[str, dict[str, Any]]:
        """``held``, by the matrices' names."""
        return {self._atoms[atom].name: state for atom, state in self.held().items()}

    def take(self, states: Mapping[int, Mapping[str, Any] | None]) -> None:
        """Replace the state of these atoms; None drops it."""
        for atom, state in states.items():
            self.forget(atom) if state is None else self.put(atom, state)

    def nbytes(self) -> int:
        """Bytes of all tensors in ``held``."""
        tensors = (t for state in self.held().values() for _, t in nested.leaves(state) if isinstance(t, Tensor))
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def as_tensors(state: dict[str, Any], *, stepped: bool = True, ordered: bool = True) -> dict[str, Tensor]:
    """Owner state as tensors of at least one dimension, by path. Adds its structure if it is more than that and, if
    ``ordered``, for tensors in a different order in memory. ``stepped`` marks state after the first step."""
    found = {key: tensor.reshape(tensor.shape or (1,)) for key, tensor in nested.leaves(state)}
    in_order = not ordered or all(tensor.is_contiguous() for tensor in found.values())
    if not (nested.is_plain(state) and in_order):
        found[STRUCTURE] = nested.described(state)
        found[STEPPED] = torch.tensor([stepped])
    return found


def owner_key(path: str, place: int, matrices: int) -> str:
    """The key of a tensor of owner state in a state dict; with the matrix's place if the parameter has several."""
    return f"[{place}].{path}" if matrices > 1 else path


def keeps_state(rule: MatrixRule) -> bool:
    """Whether a rule keeps owner state."""
    return isinstance(rule, (OwnerStateRule, WeightRule))
