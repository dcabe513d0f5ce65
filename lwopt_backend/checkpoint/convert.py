"""From one format to another: one module, what a target stores, names, what was read, and the destination."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint import gates, names
from lwopt_backend.checkpoint.contents import MATRICES, Checkpoint, CheckpointError, Param, some
from lwopt_backend.checkpoint.files.folders import Content, put_whole, write_folder
from lwopt_backend.checkpoint.formats import FORMATS, ON_FSDP2, TARGETS
from lwopt_backend.checkpoint.names.applying import with_matrices
from lwopt_backend.checkpoint.translation import as_ours, on_loading, with_lions_steps
from lwopt_backend.config.options import suggestion
from lwopt_backend.groups.rates import regrouped

ADAPTIVE_MUON = (
    "moment2_buffer is kept, but rule 'adamuon' does not load it: Emerging-Optimizers 0.2 averages squares of updates "
    "with the factor by shape, 0.3 and this package without the factor, and the checkpoint does not record the version"
)
WEIGHTS_ALONE = "DeepSpeed loads weights alone with engine.load_checkpoint(folder, load_optimizer_states=False)"


def of_module(checkpoint: Checkpoint, module: str) -> Checkpoint:
    """One module: the parameters whose names begin with its name, under the rest of their names, and their groups.
    Raises CheckpointError if there are none."""
    start = f"{module}."
    own = {name: name.removeprefix(start) for name in (*checkpoint.params, *checkpoint.tied) if name.startswith(start)}
    if not own.keys() & checkpoint.params.keys():
        known = dict.fromkeys(name.partition(".")[0] for name in checkpoint.params)
        raise CheckpointError(f"--module: no parameter of {module!r}; {suggestion(module, tuple(known))}")
    numbers = sorted({n for name in own.keys() & checkpoint.params if (n := checkpoint.params[name].group) is not None})
    params = {own[name]: param for name, param in checkpoint.params.items() if name in own}
    groups = [{key: value for key, value in checkpoint.groups[n].items() if key != "module"} for n in numbers]
    count = len(checkpoint.groups)
    return replace(
        checkpoint,
        params={n: p if p.group is None else replace(p, group=numbers.index(p.group)) for n, p in params.items()},
        groups=tuple(groups),
        arguments=with_matrices(checkpoint.arguments, own),
        scheduler=regrouped(checkpoint.scheduler, numbers, count),
        client=regrouped(dict(checkpoint.client), numbers, count),
        replicas=(),
        tied={own[name]: own[of] for name, of in checkpoint.tied.items() if name in own and of in own},
        buffers={n.removeprefix(start): t for n, t in checkpoint.buffers.items() if n.startswith(start)},
    )


@dataclass(frozen=True)
class Destination:
    """The destination of a checkpoint: a ``folder``, which is written whole. In ``root``, which is this folder or its
    parent, ``files`` are written last: what comes along, then pointers."""

    folder: Path
    root: Path
    files: Mapping[str, Content]


def destination_of(
    checkpoint: Checkpoint,
    target: str,
    destination: Path,
    tag: str | None = None,
    files: Mapping[str, Content] | None = None,
) -> Destination:
    """A step's folder in ``destination``, if the format has a pointer to it; otherwise ``destination`` itself. The step
    keeps the ``tag`` that it has, by which trainers ask for it. ``files`` come along."""
    format, files = FORMATS[target], files or {}
    if format.pointer is None:
        return Destination(destination, destination, files)
    name = tag or format.step_folder.format(step=checkpoint.iteration or 0)
    return Destination(destination / name, destination, {**files, format.pointer: name})


def needed(
    checkpoint: Checkpoint, target: str, dtype: torch.dtype | None = None, vocab_size: int | None = None
) -> Checkpoint:
    """What ``target`` stores of the checkpoint: of ``safetensors`` the weights alone, in ``dtype`` if given.

    Raises Refused if state that it stores is missing or of another shape, and for trained rows beyond ``vocab_size``;
    other state may be of any form.
    """
    incomplete = [] if target == "safetensors" else gates.incomplete(checkpoint)
    if problems := [*incomplete, *gates.trained_beyond(checkpoint, vocab_size)]:
        raise gates.Refused(problems)
    if target != "safetensors":
        return checkpoint
    params = {name: Param(param.exported(dtype)) for name, param in checkpoint.params.items()}
    # Comparing replicas of state would read the state, which is most of a checkpoint and is not written.
    replicas = tuple(pair for pair in checkpoint.replicas if pair[0].startswith(("weight of", "buffer")))
    arguments = {key: value for key, value in checkpoint.arguments.items() if key != MATRICES}
    return replace(checkpoint, params=params, groups=(), arguments=arguments, replicas=replicas, client={})


def counted(found: Checkpoint, target: str) -> dict[str, Any]:
    """The tensors that the folder of ``found`` has by name, how many of them a conversion to ``target`` has read, and
    all others with the reason. Zeros for a format whose tensors have no names of their own."""
    tensors: dict[str, bool] = {}
    for file in found.files:
        tensors |= file.tensors_read()
    usual = "safetensors has weights and buffers alone" if target == "safetensors" else "no part of what was asked for"
    left = {name: found.left_out.get(name, usual) for name, is_read in tensors.items() if not is_read}
    return {"in_folder": len(tensors), "written": len(tensors) - len(left), "left_out": left}


def left_out(counts: Mapping[str, Any]) -> list[str]:
    """Notes on the tensors that ``counted`` found left out, one for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in counts["left_out"].items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{len(names)} tensor(s) left out, {some(names)}: {reason}" for reason, names in by_reason.items()]


def prepared(
    checkpoint: Checkpoint,
    target: str,
    vocabulary: str | names.Family | None,
    source_vocabulary: str | None,
    numbers: names.Numbers,
) -> Checkpoint:
    """The checkpoint under the names of ``vocabulary``, by default its own, or as a map makes them.

    On FSDP2, param groups get this package's options, under which its optimizers load them. Raises CheckpointError;
    nothing is written before.
    """
    vocabulary = vocabulary or source_vocabulary or (checkpoint.names if checkpoint.names in names.FAMILIES else None)
    given = {name for name, number in vars(numbers).items() if number is not None}
    _check_used(checkpoint, vocabulary, source_vocabulary, given)
    if vocabulary is not None:
        checkpoint = names.translate(checkpoint, vocabulary, numbers, source=source_vocabulary)
    checkpoint = with_lions_steps(checkpoint)
    if any("moment2_buffer" in param.states for param in checkpoint.params.values()):
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, ADAPTIVE_MUON))
    if target == "universal":
        notes = (*checkpoint.notes, *_without_group(checkpoint), *on_loading(checkpoint))
        if not any(param.states or param.owner_states for param in checkpoint.params.values()):
            notes = (*notes, WEIGHTS_ALONE)
        checkpoint = replace(checkpoint, notes=notes)
    return as_ours(checkpoint) if target in ON_FSDP2 else checkpoint


def _without_group(checkpoint: Checkpoint) -> list[str]:
    """A note on parameters with state, but without a known group."""
    names = [name for name, param in checkpoint.params.items() if param.states and param.group is None]
    if not names or not checkpoint.groups:
        return []
    return [
        f"the param groups of {', '.join(names[:3])}{', ...' * (len(names) > 3)} are unknown ({len(names)} "
        "parameter(s) with state): param_shapes leaves them out, as DeepSpeed would give them another group's options"
    ]


def _check_used(checkpoint: Checkpoint, wanted: str | names.Family | None, source: str | None, given: set[str]) -> None:
    """Raises CheckpointError for numbers that were given but are not used."""
    of_shapes = given - {"vocab_size"}
    if wanted is None and given:
        raise CheckpointError(
            f"{_options(given)}: expected known names in this checkpoint, found none; give --source-names "
            f"({', '.join(names.FAMILIES)})"
        )
    if wanted == (source or checkpoint.names) and of_shapes:
        raise CheckpointError(f"{_options(of_shapes)}: expected a change of names, found none; leave it out")


def _options(fields: set[str]) -> str:
    return ", ".join(f"--{field.replace('_', '-')}" for field in sorted(fields))


def write(
    checkpoint: Checkpoint,
    target: str,
    destination: Destination,
    check: Callable[[], object] = lambda: None,
    *,
    workers: int = 1,
    **options: object,
) -> None:
    """Write a checkpoint, ``workers`` tensors at a time. ``options``: safetensors' ``dtype``.

    ``check`` is called when all is read and written, but has no name yet; if it raises, nothing remains. What lies
    beside the step's folder comes last, pointers at the end. A new destination appears with all of it, at once.
    """
    name = FORMATS[target].writer if target in TARGETS else None
    if name is None:
        raise CheckpointError(f"expected a target of {', '.join(TARGETS)}, found {target!r}")
    writer = importlib.import_module(name)

    def fill(folder: Path) -> None:
        writer.write(checkpoint, folder, workers=workers, **options)
        check()

    def fill_root(folder: Path) -> None:
        inner = folder if destination.root == destination.folder else folder / destination.folder.name
        inner.mkdir(exist_ok=True)
        fill(inner)
        for name, content in destination.files.items():
            put_whole(folder / name, content)

    # A new root gets its name with the step and the pointer in it. One that is there has other steps: only the step is
    # a folder of its own then, and the pointer is replaced after it.
    if destination.root == destination.folder or not destination.root.exists():
        write_folder(destination.root, fill_root)
    else:
        write_folder(destination.folder, fill, beside=destination.files)
