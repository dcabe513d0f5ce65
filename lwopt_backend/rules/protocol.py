"""What a matrix rule is: an update's mathematics, divided where sharding divides it; and any torch optimizer as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_torch
from torch.profiler import record_function

Check = Callable[[Any], Any]


def option(
    default: Any, meaning: str, source: str = "this package", *, check: Check | None = None, **bounds: float
) -> Any:
    """A field of a dataclass: the only declaration of an option of a rule or a host.

    ``lwopt rules`` shows ``meaning`` and ``source``, where the option comes from. ``bounds`` of a number are ``ge``,
    ``gt`` and ``lt``. ``check`` takes the given value and returns the one that is used, or raises ValueError. The
    dataclass's ``__post_init__`` checks whether options fit each other.
    """
    said = {"meaning": meaning, "source": source, "check": check, "bounds": bounds}
    if isinstance(default, dict):
        return field(default_factory=lambda: default, metadata=said)
    return field(default=default, metadata=said)


# The methods for many pieces at once, and what is said of a method, by the methods that they have to agree with.
OF_MANY = {
    "transform_reads": {"transform", "transform_with"},
    "accumulate_all": {"gradient", "accumulate"},
    "directions": {"gradient", "accumulate", "direction"},
    "apply_all": {"apply"},
}


class MatrixRule:
    """An optimizer for whole matrices. Subclass it, as a dataclass whose fields are the rule's options.

    *Element-wise* methods run on each piece of the matrix that a rank has, the others on the whole matrix, once, at its
    owner. None may call a collective. A method without a default raises NotImplementedError unless you override it. A
    step calls, in this order:

        grad = gradient(grad, value)       element-wise
        accumulate(grad, state)            element-wise, in place
        direction(grad, state)             element-wise; this is sent
        transform(directions)              whole: (..., rows, columns) to the same shape, rows are outputs
        apply(value, update, shape)        element-wise, in place

    The defaults are decoupled weight decay and a step of ``-lr * scale(shape)`` along the result of ``transform``.
    ``shape`` is always the whole matrix's (rows, columns).

    Examples:
        >>> @dataclass
        ... class SignMomentum(MatrixRule):
        ...     lr: float = 1e-3
        ...     state_keys = ("momentum",)
        ...     def accumulate(self, grad, state):
        ...         state["momentum"].lerp_(grad, 0.1)
        ...     def direction(self, grad, state):
        ...         return state["momentum"]
        ...     def transform(self, matrices):
        ...         return matrices.sign()
        >>> register_rule("sign_momentum", SignMomentum)
    """

    lr: float
    exchange_dtype: torch.dtype = torch.float32  # of directions and updates on the wire
    rule_name: str = ""  # its name in configurations and profiles
    block_period = 1  # steps from one update of whole matrices to the next
    blocks: MatrixRule | None = None  # the rule of each rank's block, in a step between

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of element-wise state, which is sharded like the weight, in its shape; a class attribute will do."""
        return ()

    @property
    def quantized(self) -> tuple[str, ...]:
        """Those of ``state_keys`` that are kept in 8 bits between steps (``runtime/quantized.py``), and in fp32 in
        checkpoints; a class attribute will do. Methods are given them in fp32, and gradients at least as wide."""
        return ()

    @property
    def stored_keys(self) -> tuple[str, ...]:
        """Those of ``state_keys`` that are kept as they are."""
        return tuple(key for key in self.state_keys if key not in self.quantized)

    @property
    def transform_reads(self) -> Sequence[str] | None:
        """The options that ``transform`` reads; a class attribute will do. None refuses the option ``capture``.

        A class that overrides ``transform`` does not inherit them. A captured ``transform`` must read no tensor on the
        host, draw no random numbers and use no tensors but those that it is given.
        """
        return None

    @property
    def needs_large_rate(self) -> bool:
        """Whether matrices hardly move at AdamW's learning rates: updates are orthogonal, without a factor for that."""
        return False

    def check_device(self, device: torch.device) -> None:
        """Refuse a device on which ``transform`` cannot run. Every rank calls this when an optimizer is made.

        Args:
            device: the device of the matrices.

        Raises:
            ValueError: if ``transform`` cannot run there.
        """

    def gradient(self, grad: Tensor, value: Tensor) -> Tensor:
        """The gradient that the rule uses.

        Args:
            grad: a piece of the gradient, which must not be changed.
            value: the same piece of the weight, which must not be changed.

        Returns:
            A tensor of ``grad``'s shape.
        """
        return grad

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        """Accumulate the gradient into the element-wise state.

        Args:
            grad: what ``gradient`` returned, which must not be changed.
            state: by name in ``state_keys``, tensors of ``grad``'s shape, changed in place.
        """

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The input of ``transform``.

        Args:
            grad: what ``gradient`` returned, which must not be changed.
            state: the element-wise state after ``accumulate``, which must not be changed.

        Returns:
            A tensor of ``grad``'s shape, which is sent to the owner in ``exchange_dtype``.
        """
        return grad

    def transform(self, matrices: Tensor) -> Tensor:
        """The updates of whole matrices, at their owner.

        Args:
            matrices: directions of shape (..., rows, columns), which must not be changed.

        Returns:
            A tensor of this shape. A step adds it to the weight times ``-lr * scale(shape)``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no transform")

    def scale(self, shape: tuple[int, int]) -> float:
        """The factor on the learning rate for a matrix.

        Args:
            shape: (rows, columns) of the whole matrix.

        Returns:
            The factor, without a unit.
        """
        return 1.0

    def apply(self, value: Tensor, update: Tensor, shape: tuple[int, int]) -> None:
        """Decay a piece of the weight, and add the same piece of the update times ``-lr * scale(shape)``.

        Args:
            value: the piece of the weight, changed in place.
            update: the piece of what ``transform`` returned.
            shape: (rows, columns) of the whole matrix.
        """
        decay = getattr(self, "weight_decay", 0.0)
        value.mul_(1 - self.lr * decay)
        value.add_(update, alpha=-self.lr * self.scale(shape))

    def of_blocks(self) -> MatrixRule:
        """The rule of a step between two updates of whole matrices, for ``block_period`` above 1.

        Returns:
            A rule that each rank calls for its block, as a whole matrix of the block's shape.
        """
        raise NotImplementedError(f"{type(self).__name__} has no of_blocks")

    # A rule whose step depends on norms of the whole weight and the whole update

    @property
    def by_norms(self) -> bool:
        """Whether ``factors`` and ``apply_by`` take the place of ``apply``, which then takes whole matrices only."""
        return False

    def factors(self, sums: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Per matrix, what to multiply the weight and the update by. Must read nothing on the host.

        Args:
            sums: per matrix, the sums of W^2, W U and U^2 over all its pieces: (matrices, 3), float64.
            shapes: (rows, columns) of each matrix.

        Returns:
            The factors of the weights and of the updates, each of shape (matrices,).
        """
        raise NotImplementedError(f"{type(self).__name__} has no factors")

    def apply_by(self, value: Tensor, update: Tensor, keep: Tensor, move: Tensor) -> None:
        """``value`` <- ``keep`` ``value`` - ``move`` ``update``.

        A value of 16 bits is rounded once: ``keep`` is near one, where bfloat16 has steps of 0.4 %.

        Args:
            value: a piece of the weight, changed in place; or pieces of several matrices, a row each.
            update: the same piece of the update, or pieces.
            keep: the matrix's first factor from ``factors``, a scalar; or a column of several matrices'.
            move: its second factor, or factors.
        """
        wide = value.float() if value.itemsize < 4 else value
        keep, move = (factor.to(wide.device, wide.dtype) for factor in (keep, move))
        wide.mul_(keep).sub_(update.to(wide.dtype) * move)
        if wide is not value:
            value.copy_(wide)

    # What a step calls, on pieces of many matrices at once. A rule may do the same in fewer operations.

    def accumulate_all(self, grads: list[Tensor], values: list[Tensor], states: Sequence[Mapping[str, Tensor]]) -> None:
        """``gradient`` and ``accumulate`` of many pieces, of which another rank sends the directions.

        Args:
            grads: the gradient of each piece.
            values: the weight of each piece.
            states: the element-wise state of each piece.
        """
        for grad, value, state in zip(grads, values, states):
            self.accumulate(self.gradient(grad, value), state)

    def directions(
        self, grads: list[Tensor], values: list[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """``gradient``, ``accumulate`` and ``direction`` of many pieces, once a step.

        Args:
            grads: the gradient of each piece.
            values: the weight of each piece.
            states: the element-wise state of each piece.

        Returns:
            The direction of each piece.
        """
        found = []
        for grad, value, state in zip(grads, values, states):
            grad = self.gradient(grad, value)
            self.accumulate(grad, state)
            found.append(self.direction(grad, state))
        return found

    def apply_all(self, values: list[Tensor], updates: list[Tensor], shapes: Sequence[tuple[int, int]]) -> None:
        """``apply`` to many pieces.

        Args:
            values: pieces of weights, changed in place.
            updates: the update of each piece.
            shapes: (rows, columns) of the whole matrix of each piece.
        """
        for value, update, shape in zip(values, updates, shapes):
            self.apply(value, update, shape)

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass that overrides a method for one piece takes pieces one by one, unless it overrides both.

        One that overrides ``transform`` inherits no ``transform_reads``.
        """
        super().__init_subclass__(**options)

        def place_of(method: str) -> int:
            return next((place for place, base in enumerate(cls.__mro__) if method in vars(base)), len(cls.__mro__))

        for of_many, of_one in OF_MANY.items():
            if min(map(place_of, of_one)) < place_of(of_many):
                setattr(cls, of_many, vars(MatrixRule)[of_many])


# In place, of many tensors. A number would first be rounded to tensors of 16 bits on a CPU, unlike by ``Tensor.mul_``.


def multiply_all(tensors: list[Tensor], factor: float) -> None:
    torch._foreach_mul_(tensors, torch.tensor(factor, dtype=torch.float64))


def add_to_all(tensors: list[Tensor], term: float) -> None:
    torch._foreach_add_(tensors, torch.tensor(term, dtype=torch.float64))


def sums_of(values: Tensor, updates: Tensor) -> Tensor:
    """The sums of W^2, W U and U^2 over each row, of shape (rows, 3): products in their dtype, sums in float64.

    So the sums over any pieces of a matrix add up to the same number within 1e-16; factors round it to the weight's
    dtype.
    """
    updates = updates.to(values.device, values.dtype)
    pairs = ((values, values), (values, updates), (updates, updates))
    return torch.stack([(a * b).sum(-1, dtype=torch.float64) for a, b in pairs], dim=-1)


def keeping_norms(sums: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """``factors`` of Hyperball, R Norm(W - lr R Norm(U)) with R = ||W||: arXiv 2606.16899.

    R is that of the current weight, which equals the first one up to rounding, as in the authors' entry for
    modded-nanogpt and in Emerging-Optimizers. So there is no state, and a run resumes on any ranks. The norm of the
    difference follows from the three sums. An update of zeros changes nothing.
    """
    squares, products, of_updates = sums.unbind(-1)
    radius = squares.sqrt()
    rate = torch.where(of_updates == 0, 0.0, lr * radius / of_updates.sqrt())
    after = squares - 2 * rate * products + rate.square() * of_updates
    keep = torch.where(after <= 0, 1.0, radius / after.sqrt())
    return keep, keep * rate


class OwnerStateRule(MatrixRule):
    """A matrix rule with owner state of any shapes, e.g. a matrix's second moments by row.

    ``transform_with`` replaces ``transform``, and takes one matrix at a time.

    Examples:
        >>> @dataclass
        ... class RowScaled(OwnerStateRule):
        ...     lr: float = 1e-3
        ...     def new_owner_state(self, shape, device):
        ...         return {"squares": torch.zeros(shape[0], 1, device=device)}
        ...     def transform_with(self, matrix, state):
        ...         state["squares"].lerp_(matrix.square().mean(1, keepdim=True), 0.05)
        ...         return matrix / state["squares"].sqrt().clamp(min=1e-8)
    """

    def new_owner_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
        """Fresh owner state, before a matrix's first step.

        Args:
            shape: (rows, columns) of the whole matrix.
            device: where to create the tensors.

        Returns:
            Tensors of any shapes, by name.
        """
        raise NotImplementedError(f"{type(self).__name__} has no owner state")

    def transform_with(self, matrix: Tensor, state: dict[str, Any]) -> Tensor:
        """``transform`` of one matrix with its owner state.

        Args:
            matrix: a direction of shape (rows, columns), which must not be changed.
            state: the matrix's owner state, changed in place.

        Returns:
            The update, in ``matrix``'s shape.
        """
        raise NotImplementedError(f"{type(self).__name__} has no transform")


class WeightRule(MatrixRule):
    """A rule that takes the whole weight and the whole gradient, and changes the weight itself.

    Both are sent to the owner in fp32, and the new weight is sent back. All state is owner state: anything that
    ``torch.save`` writes, in nested dictionaries and lists; its form is known after the first step.

    Examples:
        >>> @dataclass
        ... class ByColumn(WeightRule):
        ...     lr: float = 1e-3
        ...     def step(self, value, grad, state):
        ...         state["step"] = state.get("step", 0) + 1
        ...         value.sub_(grad / grad.norm(dim=0).clamp(min=1e-8), alpha=self.lr)
    """

    def step(self, value: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        """One step of a whole matrix, at its owner.

        Args:
            value: the weight, (rows, columns) in fp32, changed in place.
            grad: the mean gradient, in fp32.
            state: the matrix's owner state, changed in place; empty before the first step.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")


# Hooks on optimizers' steps see one step: not those of inner optimizers, not each of several calls.

BEFORE: MutableMapping[int, Any] = of_torch._global_optimizer_pre_hooks
AFTER: MutableMapping[int, Any] = of_torch._global_optimizer_post_hooks


@contextmanager
def inner_steps() -> Iterator[None]:
    """Within it, steps do not call the hooks on all optimizers (``register_optimizer_step_pre_hook``,
    ``..._post_hook``).

    torch calls them once for the outer step. The hooks are removed meanwhile, rather than the optimizer's ``step``
    unwrapped, because one that calls its base class's ``step`` would call them there.
    """
    kept: list[tuple[MutableMapping[int, Any], dict[int, Any]]] = [(hooks, dict(hooks)) for hooks in (BEFORE, AFTER)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


@contextmanager
def one_call(optimizer: torch.optim.Optimizer, *, begins: bool, ends: bool) -> Iterator[None]:
    """torch's hooks around ``step``, for an optimizer that a host calls several times a step.

    The pre-hooks run before the call that begins the step, the post-hooks after the one that ends it. ``step`` must
    have an attribute ``hooked``, with which torch does not wrap it.
    """
    with record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        for hook in chain(BEFORE.values(), optimizer._optimizer_step_pre_hooks.values()) if begins else ():
            hook(optimizer, (optimizer,), {})
        yield
        for hook in chain(optimizer._optimizer_step_post_hooks.values(), AFTER.values()) if ends else ():
            hook(optimizer, (optimizer,), {})


class TorchOptimizer(WeightRule):
    """Runs an optimizer class on one matrix: made for every matrix and step, with ``arguments`` and the saved state.

    Its only parameter is the whole weight, with the whole gradient as ``grad``. The matrix's owner state is what the
    class keeps in ``state`` of the parameter, and counts in its param group. Any other state, and changes of its
    arguments, would be lost: an error if the first step shows them, or any step changes ``lr``, which schedules write.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], **arguments: Any) -> None:
        self.optimizer_class = optimizer_class
        self._arguments = arguments

    @property
    def needs_large_rate(self) -> bool:
        is_muon = issubclass(self.optimizer_class, torch.optim.Muon)
        return is_muon and self._arguments.get("adjust_lr_fn") != "match_rms_adamw"

    def step(self, value: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        param = nn.Parameter(value)
        param.grad = grad
        inner = self.optimizer_class([param], **self._arguments)
        (group,) = inner.param_groups
        group.update(state.get("group", {}))
        if "state" in state:
            inner.state[param] = state["state"]
        before, attributes = _seen(group, "params"), {} if state else _seen(vars(inner), "state", "param_groups")
        with inner_steps():
            inner.step()
        counted = {key: group[key] for key, seen in _seen(group, "params").items() if before.get(key) != seen}
        if not state:
            self._check(inner, param, attributes, counted)
        elif "lr" in counted and "lr" in self._arguments:
            raise TypeError("expected an unchanged argument 'lr', found a class that changes it; only schedules may")
        state["group"] = {**state.get("group", {}), **counted}
        state["state"] = dict(inner.state.get(param, {}))
        if param.data_ptr() != value.data_ptr():  # it replaced the parameter's data
            value.copy_(param.detach())

    def _check(
        self, inner: torch.optim.Optimizer, param: Tensor, attributes: Mapping[str, Any], counted: Mapping[str, Any]
    ) -> None:
        """Raises TypeError for an optimizer with state that would be lost, or that changes its own arguments."""
        if rewritten := [key for key in counted if key in self._arguments]:
            raise TypeError(
                f"expected an unchanged argument {rewritten[0]!r}, found a class that changes it; only schedules may"
            )
        others = [key for key in inner.state if key is not param]
        now = _seen(vars(inner), "state", "param_groups")
        changed = [key for key, seen in now.items() if attributes.get(key) != seen]
        if others or changed:
            where = f"in its attribute {changed[0]!r}" if changed else f"under the key {others[0]!r} of its state"
            raise TypeError(
                f"expected all state in state[parameter] and in the param group, which checkpoints save; found more "
                f"{where}"
            )


def _seen(values: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Marks of the values, to see later which have changed, also in place."""
    return {key: _mark(value) for key, value in values.items() if key not in without}


def _mark(value: Any) -> Any:
    """What differs once the value has changed: its text; of a tensor on an accelerator, for whose text a host would
    wait, the tensor itself and its version."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return id(value), value._version, value  # kept, so that no other tensor gets its id
    if isinstance(value, Mapping):
        return [(key, _mark(each)) for key, each in value.items()]
    return [_mark(each) for each in value] if isinstance(value, (list, tuple)) else repr(value)
