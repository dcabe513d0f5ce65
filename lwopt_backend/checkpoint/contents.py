"""What is in a checkpoint, whatever its format: the form between all readers and all writers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lwopt_backend.checkpoint.errors import CheckpointError as CheckpointError
from lwopt_backend.checkpoint.lazy import LazyTensor

T = TypeVar("T")
MASTER = "fp32"  # the key of master weights, as in DeepSpeed's universal format
LONGEST_NAME = 1000  # characters of a parameter's name, or of a key with it; what takes names apart need not be fast
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

    def __post_init__(self) -> None:
        """Raises CheckpointError where files have something else in place of names, numbers and dictionaries."""
        names = (*self.params, *self.tied, *self.tied.values(), *self.buffers)
        wrong = [name for name in names if type(name) is not str or len(name) > LONGEST_NAME]
        if wrong:
            raise CheckpointError(
                f"{self.format}: a parameter has a {type(wrong[0]).__name__} for its name, or a long one"
            )
        kinds: dict[str, tuple[type, ...]] = {
            **dict.fromkeys(("iteration", "samples"), (int, type(None))),
            **dict.fromkeys(("scheduler",), (Mapping, type(None))),
            **dict.fromkeys(("arguments", "client"), (Mapping,)),
            **dict.fromkeys(("version", "names"), (str,)),
        }
        for field_name, kind in kinds.items():
            _check_kind(self.format, field_name, getattr(self, field_name), kind)
        for group in self.groups:
            _check_kind(self.format, "a param group", group, (Mapping,))
        for name, size in self.world.items():
            _check_kind(self.format, f"the number of {name} ranks", size, (int,))


def _check_kind(where: str, what: str, value: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        raise CheckpointError(f"{where}: {what} is a {type(value).__name__}, no {kinds[0].__name__}; copy it again")


def read_as_expected(read: Callable[[], T], where: Path, writer: str, said: type[ValueError] = CheckpointError) -> T:
    """What ``read`` returns. Raises CheckpointError for whatever happens in files that ``writer`` did not form.

    It is the last resort: what is wrong with a file is better said where it is noticed, with an error that is ``said``.
    """
    try:
        return read()
    except (said, MemoryError, ImportError):
        raise
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
        raise CheckpointError(
            f"{where} is not as {writer} writes it ({reason}); was it written by another version, or changed?"
        ) from error
