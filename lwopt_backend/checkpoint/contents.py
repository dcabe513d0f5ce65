"""What is in a checkpoint, whatever its format: the form between all readers and all writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lwopt_backend.checkpoint.errors import CheckpointError as CheckpointError
from lwopt_backend.checkpoint.lazy import LazyTensor

MASTER = "fp32"  # the key of master weights, as in DeepSpeed's universal format
MATRICES = "matrices"  # the argument that tells, by parameter, which elements its matrices are, in their order


@dataclass(frozen=True)
class Param:
    """One parameter, whole. ``weight`` is what the model has (bf16, say), ``states`` are as large as it: the fp32
    master weight under ``"fp32"``, ``momentum_buffer``, ``exp_avg``, ``exp_avg_sq``, ... A frozen one has none.

    ``step`` counts the optimizer's steps where that is known by parameter; ``group`` is the number of its param group.
    ``owner_states`` is what a rule keeps of each matrix in it beside these, by the matrix's place: dictionaries and
    lists of tensors and numbers, in memory.
    """

    weight: LazyTensor | None
    states: Mapping[str, LazyTensor] = field(default_factory=dict)
    step: float | None = None
    group: int | None = None
    owner_states: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        found = self.weight if self.weight is not None else next(iter(self.states.values()))
        return found.shape

    @property
    def best(self) -> LazyTensor:
        """The master weight if there is one, else the weight."""
        found = self.states.get(MASTER, self.weight)
        assert found is not None
        return found


@dataclass(frozen=True)
class Checkpoint:
    """What a reader found.

    - ``format``: e.g. ``"megatron torch_dist"``; ``version``: of what wrote it, as far as it says.
    - ``names``: the vocabulary of its parameter names: ``"megatron-core"``, ``"model"`` (the module's own), ...
    - ``params``: in the model's order where that is known.
    - ``groups``: the param groups' options as plain data, without parameters.
    - ``arguments``: how it was trained, as plain data (Megatron's ``args``, a ds_config).
    - ``iteration``, ``samples``: trained so far. ``scheduler``: its state as plain data, or None.
    - ``world``: sizes by name, e.g. ``{"dp": 2, "tp": 1}``.
    - ``replicas``: pairs of tensors that must be equal, e.g. a tied embedding's two copies, with what they are.
    - ``tied``: names under which a parameter is used once more, each with the name that is in ``params``.
    - ``buffers``: the module's, by name. ``client``: what the user's own program saved along, as plain data.
    - ``notes``: sentences on what was left out or looks odd; no reason to refuse.
    """

    format: str
    version: str
    names: str
    params: Mapping[str, Param]
    groups: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    iteration: int | None = None
    samples: int | None = None
    scheduler: Mapping[str, Any] | None = None
    world: Mapping[str, int] = field(default_factory=dict)
    replicas: tuple[tuple[str, LazyTensor, LazyTensor], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, LazyTensor] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_as_expected(read: Callable[[], Checkpoint], where: Path, writer: str) -> Checkpoint:
    """What ``read`` returns. Raises CheckpointError where files are whole, but not as ``writer`` forms them."""
    try:
        return read()
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{where} is not as {writer} writes it ({type(error).__name__}: {error}); was it written by another "
            "version, or changed?"
        ) from error
