"""Which parameters show a gradient for the step: a mark in param.grad, which the user may remove.

The gradient itself was taken from there. Removing the mark drops what has accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


class ShownMarks:
    """Which of ``params`` show a gradient for the step, if nobody has removed it. There are no ``marks`` under
    DeepSpeed, and with ``keeps_full``, where param.grad is the gradient itself."""

    def __init__(self, params: Sequence[Tensor], keeps_full: bool) -> None:
        self.marks: list[Tensor] = []
        self._params, self._keeps_full = params, keeps_full
        self.clear()

    def clear(self) -> None:
        """No parameter shows a gradient for the step."""
        self._here = [False] * len(self._params)
        self._lifted: dict[int, bool] = {}  # in a backward pass, marks that were taken away, and whether one was shown

    def show(self, index: int) -> None:
        """Put the mark into param.grad."""
        if self.marks:
            self._lifted.pop(index, None)
            try:
                self._params[index].grad = self.marks[index]
            except RuntimeError:  # the parameter was cast or moved, which the step refuses
                return
            self._here[index] = True

    def lift(self, index: int) -> None:
        """Take the mark out of param.grad, to which autograd is about to add a gradient."""
        if self._params[index].grad is self.marks[index]:
            self._params[index].grad = None
            self._lifted[index], self._here[index] = self._here[index], False

    def put_back(self) -> None:
        """At the end of a pass: the marks into which torch.autograd.grad has accumulated nothing."""
        for index, shown in self._lifted.items():
            self._params[index].grad, self._here[index] = self.marks[index], shown
        self._lifted = {}

    def show_others(self) -> None:
        """The marks where other ranks may have a gradient, and this one has none."""
        for index, shown in enumerate(self._here):
            if not shown and index not in self._lifted:
                self.show(index)

    def note_all(self) -> None:
        """param.grad is the gradient itself."""
        self._here = [param.grad is not None for param in self._params]

    def removed(self, indices: Iterable[int]) -> list[int]:
        """Those of these parameters whose gradient was removed since it was shown."""
        found = []
        for index in indices:
            if self._here[index]:
                grad = self._params[index].grad
                if grad is None if self._keeps_full else grad is not self.marks[index]:
                    self._here[index] = False
                    found.append(index)
        return found

    def is_mark(self, index: int) -> bool:
        """Whether param.grad is its mark."""
        return bool(self.marks) and self._params[index].grad is self.marks[index]

    def is_used(self, index: int) -> bool:
        """Whether param.grad is the mark of a gradient that the last step has used."""
        return self.is_mark(index) and not self._here[index]

    def count_again(self, index: int) -> None:
        """What param.grad shows is for the next step."""
        self._here[index] = True

    def drop(self, indices: Iterable[int]) -> None:
        """Take these parameters' marks away."""
        for index in indices if self.marks else ():
            if self.is_mark(index):
                self._params[index].grad = None
