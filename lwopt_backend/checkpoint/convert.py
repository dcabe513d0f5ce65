"""From one checkpoint to another: read, checked, renamed, written."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lwopt_backend.checkpoint import gates, groups, names
from lwopt_backend.checkpoint.choices import WRITERS
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.files.folders import refuse_existing, write_folder, write_pointer
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.numbers import ARGUMENTS


@dataclass(frozen=True)
class Place:
    """Where a checkpoint goes: a ``folder``, which is written whole, and the pointers beside it, by file name."""

    folder: Path
    pointers: Mapping[str, str]


def place_of(checkpoint: Checkpoint, target: str, destination: Path) -> Place:
    """A universal or Megatron checkpoint is a folder of its step in ``destination``; the others are that itself."""
    step = checkpoint.iteration or 0
    if target == "universal":
        tag = f"global_step{step}"
        return Place(destination / tag, {"latest_universal": tag})
    if target == "megatron":
        return Place(destination / f"iter_{step:07d}", {"latest_checkpointed_iteration.txt": str(step)})
    return Place(destination, {})


def prepared(
    checkpoint: Checkpoint,
    target: str,
    vocabulary: str | None,
    source_vocabulary: str | None,
    numbers: names.Numbers,
    workers: int = 1,
) -> Checkpoint:
    """Checked, and under the names that are wanted: Megatron-core's for what Megatron wrote, else those it has.

    For DCP and owned storage, param groups get the options of our optimizers, by which these load them.

    Raises CheckpointError; nothing is written by then.
    """
    vocabulary = _names_of(checkpoint, target, vocabulary, source_vocabulary)
    _check_used(checkpoint, target, vocabulary, source_vocabulary, numbers.model_fields_set)
    notes = gates.check(checkpoint, numbers.vocab_size, workers)
    checkpoint = dataclasses.replace(checkpoint, notes=(*checkpoint.notes, *notes))
    if vocabulary is not None:
        checkpoint = names.translate(checkpoint, vocabulary, numbers, source=source_vocabulary)
    if target == "megatron":
        checkpoint = dataclasses.replace(checkpoint, arguments=_megatron_arguments(checkpoint, numbers))
    return groups.as_ours(checkpoint) if target in ("dcp", "owned") else checkpoint


def _names_of(checkpoint: Checkpoint, target: str, wanted: str | None, source: str | None) -> str | None:
    """The new names: those it has, where they are known; Megatron's for Megatron; None if nothing is to be renamed."""
    known = source or (checkpoint.names if checkpoint.names in (names.CORE, *names.FAMILIES) else None)
    return wanted or (names.CORE if target == "megatron" else known)


def _check_used(checkpoint: Checkpoint, target: str, wanted: str | None, source: str | None, given: set[str]) -> None:
    """Raises CheckpointError for ``given`` numbers that nothing is done with."""
    if wanted is None and given:
        raise CheckpointError(
            f"{_options(given)} cannot be used, as it is not known what this checkpoint's names mean; say it with "
            f"--source-names ({', '.join(names.FAMILIES)}, or a .json file)"
        )
    sides = (wanted or "", source or checkpoint.names)
    layout = given & {"qkv_layout", "qkv_ranks"}
    if layout and not any(side == "megatron-deepspeed" or side.endswith(".json") for side in sides):
        raise CheckpointError(
            f"{_options(layout)} is of megatron-deepspeed's names, which there are none of; leave it out"
        )
    used = {"vocab_size", "vocab_multiple"}
    if target == "megatron":
        used |= {"heads", "query_groups", "kv_channels", "experts"}
    if sides[0] == sides[1] and given - used:
        raise CheckpointError(f"{_options(given - used)} is not used, as names stay as they are; leave it out")


def _options(fields: set[str]) -> str:
    return ", ".join(f"--{field.replace('_', '-')}" for field in sorted(fields))


def _megatron_arguments(checkpoint: Checkpoint, numbers: names.Numbers) -> dict[str, Any]:
    """With what Megatron compares when it loads. Raises CheckpointError if the number of heads is not known."""
    found = numbers.filled(checkpoint.arguments)
    if found.heads is None:
        raise CheckpointError(
            f"{checkpoint.format}: the number of attention heads is not in the checkpoint, and Megatron compares it "
            "when it loads; give --heads (and --query-groups, --kv-channels if they are not the usual ones)"
        )
    told = {theirs[0]: getattr(found, ours) for ours, theirs in ARGUMENTS.items() if getattr(found, ours) is not None}
    if found.query_groups is not None:
        told["group_query_attention"] = found.query_groups != found.heads
    given = {key: value for key, value in checkpoint.arguments.items() if value is not None}
    return {**checkpoint.arguments, **{key: value for key, value in told.items() if key not in given}}


def write(
    checkpoint: Checkpoint, target: str, place: Place, *, force: bool = False, workers: int = 1, **options: object
) -> None:
    """Write it, ``workers`` tensors at a time. ``options``: Megatron's ``version``, safetensors' ``dtype``.

    Pointers come last. A destination that is not there yet appears with its pointers, at once.
    """
    if target not in WRITERS:
        raise CheckpointError(f"unknown target {target!r}; known: {', '.join(WRITERS)}")
    writer = importlib.import_module(WRITERS[target])

    def fill(folder: Path) -> None:
        writer.write(checkpoint, folder, workers=workers, **options)

    def fill_destination(folder: Path) -> None:
        inner = folder / place.folder.name
        inner.mkdir()
        fill(inner)
        for name, text in place.pointers.items():
            write_pointer(folder / name, text)

    destination = place.folder.parent
    if place.pointers and not destination.exists():
        write_folder(destination, fill_destination, force=force)
    else:
        write_folder(place.folder, fill, force=force, pointers=place.pointers)


def check_free(place: Place, force: bool, source: Path) -> None:
    """Raises CheckpointError if something is there, before hours are spent on reading.

    Also with ``force`` if it is, or has in it, the source or the folder that the user is in, or if it is the step of
    the source that its pointer names.
    """
    folder = place.folder.resolve()
    for kept, what in ((source, "the source"), (Path.cwd(), "the current folder"), (Path.home(), "your home folder")):
        if kept.resolve().is_relative_to(folder):
            raise CheckpointError(f"{place.folder} would replace {what}, {kept}; choose another folder")
    if folder.exists() and folder.is_relative_to(source.resolve()):
        raise CheckpointError(f"{place.folder} would replace what is in the source, {source}; choose another folder")
    if not force:
        refuse_existing(place.folder)


def watched(checkpoint: Checkpoint, seen: Callable[[int], None]) -> Checkpoint:
    """The same; ``seen`` is called with the bytes of every tensor that is read."""
    return dataclasses.replace(
        checkpoint, params={name: _watched(param, seen) for name, param in checkpoint.params.items()}
    )


def _watched(param: Param, seen: Callable[[int], None]) -> Param:
    def watch(tensor: LazyTensor) -> LazyTensor:
        def counted(found: Tensor) -> Tensor:
            seen(found.nbytes)
            return found

        whole, part = tensor.read, tensor.read_range
        ranged = None if part is None else lambda start, stop: counted(part(start, stop))
        return dataclasses.replace(tensor, read=lambda: counted(whole()), read_range=ranged)

    weight = None if param.weight is None else watch(param.weight)
    return dataclasses.replace(
        param, weight=weight, states={key: watch(tensor) for key, tensor in param.states.items()}
    )


def nbytes(checkpoint: Checkpoint) -> int:
    """Of all tensors as they are read."""
    tensors = (
        tensor
        for param in checkpoint.params.values()
        for tensor in (*([] if param.weight is None else [param.weight]), *param.states.values())
    )
    return sum(tensor.nbytes for tensor in tensors)
