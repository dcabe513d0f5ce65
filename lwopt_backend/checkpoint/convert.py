"""From one format to another: the translation of param groups, and the destination."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint import gates, names
from lwopt_backend.checkpoint.contents import MASTER, MATRICES, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.files.folders import write_folder, write_whole
from lwopt_backend.checkpoint.formats import FORMATS, TARGETS
from lwopt_backend.checkpoint.names.applying import with_matrices
from lwopt_backend.config.options import suggestion, within
from lwopt_backend.groups.rates import regrouped
from lwopt_backend.groups.registry import MATRIX_RULES, arguments, options_of, torchs_keys

# Param groups of other optimizers with this package's options, under which torch's DCP loads them: see
# docs/migration.md. Torch's own options are kept and completed, so that torch.optim.AdamW also finds its own.

MUON, ADAMW, LION = "muon", "adamw", "lion"
MOMENTS = {"exp_avg", "exp_avg_sq"}
OF_LION = {"exp_avg"}
_MEGATRON = {  # options here, and Megatron's arguments for them, some with older names
    "nesterov": ("muon_nesterov", "muon_use_nesterov"),
    "adjust_lr_fn": ("muon_scale_mode",),
    "extra_scale_factor": ("muon_extra_scale_factor",),
    "ns_steps": ("muon_num_ns_steps",),
}
ADAPTIVE_MUON = (
    "moment2_buffer is kept, but rule 'adamuon' does not load it: Emerging-Optimizers 0.2 averages squares of updates "
    "with the factor by shape, 0.3 and this package without the factor, and the checkpoint does not record the version"
)
WEIGHTS_ALONE = "DeepSpeed loads weights alone with engine.load_checkpoint(folder, load_optimizer_states=False)"
_PLACES = ("members", "from_group", "overrides")  # keys of engines that are no options


def as_ours(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with this package's param groups, with ``rule``, in the order in which its optimizers have them:
    those of another optimizer with matrices first. The lists in states of schedulers keep to the groups.

    A group without a rule of this package, or with unknown options, stays as it is, and the notes say why; this
    package's optimizers will not load it, because it lacks their options.
    """
    found, notes = translated(checkpoint)
    count = len(found)
    order = sorted(range(count), key=lambda number: _place_of(checkpoint.groups, found, number))
    place: dict[int | None, int] = {number: position for position, number in enumerate(order)}
    params = {
        name: replace(param, group=place.get(param.group, param.group)) for name, param in checkpoint.params.items()
    }
    return replace(
        checkpoint,
        params=params,
        groups=tuple(found[number] for number in order),
        scheduler=regrouped(checkpoint.scheduler, order, count),
        client=regrouped(dict(checkpoint.client), order, count),
        notes=(*checkpoint.notes, *notes),
    )


def _place_of(saved: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]], number: int) -> tuple[Any, ...]:
    """Sorts groups. This package saves them in its optimizers' order, except those of a pipeline's stages."""
    is_matrix = found[number].get("rule") in MATRIX_RULES
    if all("from_group" in group for group in saved):
        return saved[number]["from_group"], not is_matrix, saved[number].get("overrides", [])
    return (number,) if all("rule" in group for group in saved) else (not is_matrix, number)


def translated(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], list[str]]:
    """The groups in order, with ``rule`` if they have a counterpart; and sentences on those that have none."""
    members: dict[int, set[str]] = {}
    for param in checkpoint.params.values():
        if param.group is not None:
            members.setdefault(param.group, set()).update(set(param.states) - {MASTER})
    found, notes, peaks = [], [], _peaks(checkpoint)
    for number, (group, peak) in enumerate(zip(checkpoint.groups, peaks)):
        try:
            found.append(_translated(group, members.get(number, set()), checkpoint, peak))
        except ValueError as error:
            found.append(dict(group))
            if number in members:
                notes.append(f"param group {number} does not fit a rule of this package: {error}")
    return found, notes


def _peaks(checkpoint: Checkpoint) -> list[float | None]:
    """By group, the rate after the configured warm-up of DeepSpeed's schedulers, which save no rates; None if unknown.

    The number in a ds_config is the rate of the matrices, and this package gives each of its groups a share; without
    it, DeepSpeed writes the number into all groups.
    """
    groups = checkpoint.groups
    ds_config = checkpoint.arguments.get("ds_config") or {}
    peak = ((ds_config.get("scheduler") or {}).get("params") or {}).get("warmup_max_lr")
    is_theirs = "last_batch_iteration" in (checkpoint.scheduler or {})
    if is_theirs and isinstance(peak, list) and len(peak) == len(groups):
        return [float(each) for each in peak]
    if not is_theirs or not isinstance(peak, (int, float)):
        return [None] * len(groups)
    if not all("rule" in group for group in groups):
        return [float(peak)] * len(groups)
    main = next(group["lr"] for group in sorted(groups, key=lambda group: group["rule"] not in MATRIX_RULES))
    return [peak * (group["lr"] / main) if main else None for group in groups]


def _translated(
    group: Mapping[str, Any], states: set[str], checkpoint: Checkpoint, peak: float | None
) -> dict[str, Any]:
    """``states`` are the keys of its parameters' state. Raises ValueError with the reason if it has no counterpart."""
    ds_config = checkpoint.arguments.get("ds_config") or {}
    if "rule" in group:
        known: dict[str, Any] = {}
        with suppress(ValueError):  # an unknown rule or class
            known = arguments(group)
        first = {} if peak is None else {"initial_lr": peak}
        own = {key: value for key, value in group.items() if key not in _PLACES}
        return {**(torchs_keys() if group["rule"] == ADAMW else {}), **known, **first, **own}
    of_deepspeed = (ds_config.get("optimizer") or {}).get("params") or {}
    if "betas" in group and states >= MOMENTS:
        rule, given = ADAMW, _adamw(group, of_deepspeed)
        kept = {**torchs_keys(), **{key: value for key, value in group.items() if value is not None}}
    elif "betas" in group and "eps" not in group and states == OF_LION:
        rule, kept = LION, dict(group)
        given = {key: group[key] for key in ("lr", "betas", "weight_decay") if key in group}
    elif states == {"momentum_buffer"}:
        rule, given, kept = MUON, _muon(group, checkpoint.arguments, of_deepspeed), dict(group)
    else:
        raise ValueError(f"expected a known rule, found the state {sorted(states)}, the options {sorted(group)}")
    # The base learning rate that a schedule multiplies: torch's ``initial_lr``.
    start = group.get("initial_lr", group.get("max_lr"))
    if start is None:
        start = group.get("lr") if checkpoint.scheduler is None else peak
    with within(f"a group of {rule}"):
        options = options_of(rule, given)
    return {**kept, "rule": rule, **options, **({} if start is None else {"initial_lr": start})}


def _adamw(group: Mapping[str, Any], of_deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    decoupled = group.get("decoupled_weight_decay", of_deepspeed.get("adam_w_mode", True))
    if not decoupled and group.get("weight_decay"):
        raise ValueError("expected decoupled weight decay, found an Adam that adds it to the gradient")
    if not group.get("bias_correction", True) or group.get("maximize"):
        raise ValueError("expected bias correction and no maximize, found an Adam that differs")
    wanted = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return {key: group[key] for key in wanted if group.get(key) is not None}


def _muon(group: Mapping[str, Any], arguments: Mapping[str, Any], of_deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if "use_muon" in group:
        if of_deepspeed.get("per_head_muon"):
            raise ValueError("per_head_muon orthogonalized each head; set 'per_head' (docs/migration.md)")
        if of_deepspeed.get("ns_method", "gram") != "standard":
            more = {"ns_dtype": "float32", "gram_aspect": 1.0, "gram_restarts": (2,)}
    elif "muon" in str(arguments.get("optimizer")):
        more = _of_megatron(arguments)
    elif "ns_coefficients" in group:  # torch.optim.Muon's groups have all options
        names = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        more = {key: group[key] for key in names if key in group}
    else:
        raise ValueError(f"expected the options of a Muon with momentum, found {sorted(group)}")
    momentum = group.get("momentum", group.get("momentum_beta"))
    needed = {"lr": group.get("lr"), "weight_decay": group.get("weight_decay"), "momentum": momentum}
    missing = [key for key, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"expected {missing[0]} in the param group, found only {sorted(group)}")
    return {**needed, **more}


def _of_megatron(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Options of Emerging-Optimizers' Muon that Megatron keeps as arguments, not in param groups."""
    found: dict[str, Any] = {"eps": 1e-15}
    for ours, theirs in _MEGATRON.items():
        known = [arguments[key] for key in theirs if arguments.get(key) is not None]
        if not known:
            raise ValueError(f"the checkpoint's arguments lack {theirs[0]}")
        found[ours] = known[0]
    table = arguments.get("muon_coefficient_type", "quintic")  # the only table in versions without the argument
    if table not in ("simple", "quintic"):
        raise ValueError(f"muon_coefficient_type={table!r} has no counterpart by name; see docs/migration.md")
    exact = arguments.get("muon_fp32_matmul_prec", "medium") != "medium"
    return {**found, "ns_coefficients": table, "ns_dtype": "float32" if exact else "bfloat16"}


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
class Place:
    """The destination of a checkpoint: a ``folder``, which is written whole, and pointers in its parent, by name."""

    folder: Path
    pointers: Mapping[str, str]


def place_of(checkpoint: Checkpoint, target: str, destination: Path) -> Place:
    """A step's folder in ``destination``, if the format has a pointer to it; otherwise ``destination`` itself."""
    format = FORMATS[target]
    if format.pointer is None:
        return Place(destination, {})
    name = format.step_folder.format(step=checkpoint.iteration or 0)
    return Place(destination / name, {format.pointer: name})


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
    replicas = tuple(pair for pair in checkpoint.replicas if pair[0].startswith(("weight of", "buffer")))
    arguments = {key: value for key, value in checkpoint.arguments.items() if key != MATRICES}
    return replace(checkpoint, params=params, groups=(), arguments=arguments, replicas=replicas)


def _stepped_together(params: Mapping[str, Param]) -> dict[str, Param]:
    """The parameters as ZeRO counts them: those that were never stepped get their group's count of steps."""
    counts: dict[int | None, set[float]] = {}
    for param in params.values():
        if param.step:
            counts.setdefault(param.group, set()).add(param.step)
    common = {group: min(steps) for group, steps in counts.items() if len(steps) == 1}
    return {n: replace(p, step=common.get(p.group, 0.0)) if p.step == 0 else p for n, p in params.items()}


def prepared(
    checkpoint: Checkpoint,
    target: str,
    vocabulary: str | names.Family | None,
    source_vocabulary: str | None,
    numbers: names.Numbers,
) -> Checkpoint:
    """The checkpoint under the names of ``vocabulary``, by default its own, or as a map makes them.

    For DCP, param groups get this package's options, under which its optimizers load them. Raises CheckpointError;
    nothing is written before.
    """
    vocabulary = vocabulary or source_vocabulary or (checkpoint.names if checkpoint.names in names.FAMILIES else None)
    given = {name for name, number in vars(numbers).items() if number is not None}
    _check_used(checkpoint, vocabulary, source_vocabulary, given)
    if vocabulary is not None:
        checkpoint = names.translate(checkpoint, vocabulary, numbers, source=source_vocabulary)
    checkpoint = _with_lions_steps(checkpoint)
    if any("moment2_buffer" in param.states for param in checkpoint.params.values()):
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, ADAPTIVE_MUON))
    if target == "universal":
        notes = (*checkpoint.notes, *_without_group(checkpoint))
        if not any(param.states or param.owner_states for param in checkpoint.params.values()):
            notes = (*notes, WEIGHTS_ALONE)
        checkpoint = replace(checkpoint, params=_stepped_together(checkpoint.params), notes=notes)
    return as_ours(checkpoint) if target == "dcp" else checkpoint


def _without_group(checkpoint: Checkpoint) -> list[str]:
    """A note on parameters with state, but without a known group."""
    names = [name for name, param in checkpoint.params.items() if param.states and param.group is None]
    if not names or not checkpoint.groups:
        return []
    return [
        f"the param groups of {', '.join(names[:3])}{', ...' * (len(names) > 3)} are unknown ({len(names)} "
        "parameter(s) with state): param_shapes leaves them out, as DeepSpeed would give them another group's options"
    ]


def _with_lions_steps(checkpoint: Checkpoint) -> Checkpoint:
    """Megatron's Lion counts no steps; this package's Lion does, although no update depends on them."""

    def counted(param: Param) -> Param:
        is_lion = param.step is None and set(param.states) - {MASTER} == OF_LION
        return replace(param, step=float(checkpoint.iteration or 0)) if is_lion else param

    return replace(checkpoint, params={name: counted(param) for name, param in checkpoint.params.items()})


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
    place: Place,
    check: Callable[[], object] = lambda: None,
    *,
    workers: int = 1,
    **options: object,
) -> None:
    """Write a checkpoint, ``workers`` tensors at a time. ``options``: safetensors' ``dtype``.

    ``check`` is called when all is read and written, but has no name yet; if it raises, nothing remains. Pointers come
    last. A new destination appears with its pointers, at once.
    """
    name = FORMATS[target].writer if target in TARGETS else None
    if name is None:
        raise CheckpointError(f"expected a target of {', '.join(TARGETS)}, found {target!r}")
    writer = importlib.import_module(name)

    def fill(folder: Path) -> None:
        writer.write(checkpoint, folder, workers=workers, **options)
        check()

    def fill_destination(folder: Path) -> None:
        inner = folder / place.folder.name
        inner.mkdir()
        fill(inner)
        for name, text in place.pointers.items():
            write_whole(folder / name, text.encode())

    destination = place.folder.parent
    if place.pointers and not destination.exists():
        write_folder(destination, fill_destination)
    else:
        write_folder(place.folder, fill, pointers=place.pointers)
