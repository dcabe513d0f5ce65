"""Weights and state of buckets in a folder of torch.distributed.checkpoint, for any later number of ranks and layout.

::

    model.<parameter>                                     the weights, and the rest of the model's state dict
    optimizer.state.<parameter>.<key>                     state, fp32 masters of 16-bit parameters, owner state
    optimizer.param_groups.<number>.<option>              hyperparameters; ``params`` are the parameters' names
    lwopt_tied                                            further names of parameters, each with the name above
    lwopt_entries                                         the next, as they were, without those that have tensors
    <anything else>                                       other entries of the program

FSDP2's checkpoints have the same form (``checkpoint/dcp``). Every rank writes the pieces that it owns,
as boxes of the whole tensors, into its own file.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.checkpoint import ties
from lwopt_backend.checkpoint.contents import MASTER, read_as_expected
from lwopt_backend.checkpoint.dcp import saving
from lwopt_backend.checkpoint.dcp.reader import METADATA, DcpFolder
from lwopt_backend.checkpoint.dcp.saving import Values, entries_of
from lwopt_backend.checkpoint.dcp.state_dicts import Saved
from lwopt_backend.checkpoint.files.pickles import in_memory
from lwopt_backend.checkpoint.ties import RECORD
from lwopt_backend.engines.buffers.loading import Found, checked_state, put_state
from lwopt_backend.engines.buffers.partial import PartialTensor
from lwopt_backend.engines.buffers.state import Names, by_member, names_of, state_pieces
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.engines.buffers.untrained import broadcast_untrained, untrained
from lwopt_backend.groups import Groups
from lwopt_backend.groups.grouping import Member
from lwopt_backend.groups.others import rule_of_saved
from lwopt_backend.groups.param_groups import UNSAVED, with_options
from lwopt_backend.groups.registry import check_group, rule_of
from lwopt_backend.plan.layouts import View
from lwopt_backend.runtime.agreement import agree, check_on_all, setting
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.state import MATRICES, PARAM_GROUP, check_fits, fill
from lwopt_backend.runtime.tensors import owned_dtype

SAVING, LOADING = "save_state_dict", "load_state_dict_from"
MODEL, OPTIMIZER = "model", "optimizer"
INTO_MODEL = "load the weights into the model with torch.distributed.checkpoint.load, before the optimizer is made"


def save(core: BufferCore, groups: Groups, model: nn.Module, folder: Path, more: Mapping[str, Any]) -> None:
    """Write weights and state of all ranks, and the first rank's ``more``, into ``folder``, which all ranks see.

    Called on all ranks. An error on any rank is raised on all of them; the folder then keeps its earlier content.
    """
    everyone = core.everyone
    core.manager.receive_values()
    names, options = names_of(core, groups), common_options(core, groups)
    pieces = {piece.member: piece for piece in state_pieces(core)}
    numbers = {member.name: number for number, member in enumerate(core.members)}
    values: Values = {}

    def add() -> None:
        core.check_loaded()
        for key in {MODEL, OPTIMIZER} & set(more):
            raise ValueError(
                f"{SAVING}: expected entries with other names than the weights' and the state's, found {key!r}; rename "
                "it"
            )
        check_readable(SAVING, more)
        if everyone.rank == 0:
            values.update(entries_of(more))
            values[RECORD,] = _tied(core, model, names)
        for name, value in model.state_dict().items():  # in the model's order, on all ranks
            number = numbers.get(name)
            if number is None:
                check_readable(SAVING, {name: value})  # what a module's get_extra_state returns
                values[MODEL, name] = value
                continue
            param, piece = core.members[number].param.detach(), pieces.get(number)
            boxes = piece.boxes(param.reshape(-1)[piece.start : piece.stop], param.shape) if piece else {}
            values[MODEL, names.keys[number]] = PartialTensor(param.shape, param.dtype, boxes)
        for number, of_member in by_member(core, groups).items():
            for key, tensor in of_member.items():  # under a name that other experts do not have
                pieces_of = PartialTensor(tensor.shape, tensor.dtype, tensor.boxes)
                values[OPTIMIZER, "state", names.keys[number], key] = pieces_of
        for number, (group, of_group) in enumerate(options.items()):
            params = [name for name, key in names.groups.items() if key == group]
            for option, value in {**of_group, "params": params}.items():
                values[OPTIMIZER, "param_groups", number, option] = value

    check_on_all(everyone, SAVING, add)
    saving.save(folder, values, everyone, SAVING)


def others_of(core: BufferCore, model: nn.Module) -> dict[str, Any]:
    """A model's state dict without the trained parameters: frozen ones, buffers, tied names."""
    trained = {member.name for member in core.members}
    return {name: value for name, value in model.state_dict().items() if name not in trained}


def _tied(core: BufferCore, model: nn.Module, names: Names) -> dict[str, str]:
    """The further names of trained parameters in a model's state dict, each with its name in the checkpoint."""
    first = {id(member.param): number for number, member in enumerate(core.members)}
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        number = first.get(id(param))
        if number is not None and name != core.members[number].name:
            found[name] = names.keys[number]
    return found


def _take_tied(saved: Saved, tied: Mapping[str, str], compares: bool) -> None:
    """Take the state that a folder has under a further name as that of the parameter. Raises CheckpointError for
    weights that differ, if this rank ``compares`` them."""
    for name, of in tied.items():
        if name in saved.weights and of in saved.weights and compares:
            ties.check_equal(of, saved.weights[of], name, saved.weights[name])
        kept: tuple[dict[str, Any], ...] = (saved.states, saved.group_of, saved.matrices)
        for found in kept:
            if name in found and of not in found:
                found[of] = found.pop(name)


def common_options(core: BufferCore, groups: Groups) -> dict[str, dict[str, Any]]:
    """The options of all ranks' param groups, by key. Called on all ranks.

    Raises, on all of them, RanksDisagree if options differ between ranks, and ValueError if ``torch.load`` cannot read
    them back.
    """
    everyone = core.everyone
    options = ({key: value for key, value in group.items() if key not in UNSAVED} for group in groups)
    mine = {k: {**of, "rule": rule_of(g)} for k, of, g in zip(core.group_keys, options, groups)}

    def check() -> None:
        for key, options in mine.items():
            check_readable(f"param group {key}", options)

    check_on_all(everyone, SAVING, check)
    common: dict[str, dict[str, Any]] = {}
    for of_rank in everyone.gather_objects(mine):
        common = {**common, **of_rank, **common}
    lines = [
        setting(f"{option} of param group {key}", value)
        for key, options in {**common, **mine}.items()
        for option, value in sorted(options.items())
    ]
    agree(everyone, SAVING, lambda: (None, lines))
    return common


LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set)


def check_readable(where: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError for values that do not come back from a folder as they are now. Objects of other classes do
    not, as loading runs no code of theirs."""
    for key, value in values.items():
        try:
            other = next(_unreadable(value), None)
        except RecursionError as error:
            raise ValueError(f"{where}: expected {key!r} to be less deep, or not to contain itself") from error
        if other is not None:
            kind = ".".join((type(other).__module__, type(other).__qualname__))
            raise ValueError(
                f"{where}: expected values that come back as they are: numbers, text, dense tensors, and dictionaries, "
                f"lists, tuples and sets of these; found a {kind} in {key!r}, {other!r:.200}; convert it to these, or "
                "keep it elsewhere"
            )


def _unreadable(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        dense = value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_nested)
        if not dense or hasattr(value, "full_tensor"):  # a DTensor, of which a rank has a part
            yield value
    elif type(value) in CONTAINERS:
        entries = itertools.chain(value, value.values()) if isinstance(value, dict) else value
        for entry in entries:
            yield from _unreadable(entry)
    elif type(value) not in LEAVES:
        yield value


# Reading this rank's pieces from a folder, whichever ranks, layout or engine wrote it.


def opened(everyone: Collectives, folder: Path, check: bool) -> DcpFolder:
    """Open a checkpoint; with ``check``, all bytes are compared with their checksums, by each rank a share of them.

    Called on all ranks. Raises, on all of them, FileNotFoundError if there is none, ValueError if it is damaged or
    incomplete, or if ranks differ in ``check``.
    """

    def open_folder() -> DcpFolder:
        if not (folder / METADATA).is_file():
            raise FileNotFoundError(
                f"{folder}: expected a finished checkpoint, found no {METADATA}, which is written last; give another "
                "folder, or convert a checkpoint of another system with lwopt convert --to dcp"
            )
        first = everyone.rank == 0  # which checks that all files are there; the others open those that they load from
        return read_as_expected(lambda: DcpFolder(folder, with_files=first), folder, "DCP")

    found = agree(everyone, LOADING, lambda: (open_folder(), [setting("check", check)]))
    if check:
        check_on_all(everyone, LOADING, lambda: found.check(everyone.rank, everyone.world_size))
    found.compares = False
    return found


def load(
    core: BufferCore, groups: Groups, model: nn.Module, folder: Path, check: bool = True
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Load weights and state; returns the param groups to use from now on, and the program's other entries.

    Called on all ranks. A rank reads the state and weights that it owns; the weights then go to all ranks as after a
    step. Raises, on all ranks and before anything is changed, for missing files, for files of different saves, and for
    other parameters, rules or groups; with ``check``, for wrong checksums. A file that cannot be read later is an error
    on all ranks, which take no step before a load succeeds.
    """
    everyone = core.everyone
    names, others = names_of(core, groups), others_of(core, model)
    elsewhere = {name for of_rank in everyone.gather_objects(list(others)) for name in of_rank}

    source, tied = opened(everyone, folder, check), _tied(core, model, names)
    found = agree(everyone, LOADING, lambda: (_fitting(core, groups, names, (others, elsewhere, tied), source), []))
    saved, rest = found.saved, found.rest
    rest.pop(RECORD, None)
    core.manager.receive_values()

    def take() -> None:
        put_state(core, groups, found.state)
        kept = rest.pop(MODEL, {})
        weights = {key: saved.weights[key].read() for key in others if reads(key)}
        model.load_state_dict({**kept, **weights}, strict=False)
        with torch.no_grad():
            for piece in state_pieces(core):
                key, values = names.keys[piece.member], core.members[piece.member].param.detach().reshape(-1)
                fill(values[piece.start : piece.stop], saved.weights[key], View.of_range(piece.start, piece.stop))

    def reads(key: str) -> bool:
        """Whether this rank reads an entry that is not a trained weight: the first rank that shares it does. This
        includes broadcast tensors; further names of trained weights are read by the weights' owners."""
        mine = key not in from_first or core.set_of(key).ranks.rank == 0
        return mine and key in saved.weights

    trained = {id(member.param) for member in core.members}
    sent = {name for name, _ in untrained(model, trained)} & set(others)
    from_first = {*sent, *tied}
    _take(core, take)
    for number in range(len(core.manager.buckets)):
        core.manager.send_values(number)
    core.manager.receive_values()
    broadcast_untrained(model, trained, core.sets, sent.__contains__)
    core.half_loaded = False
    return found.groups, rest


def _take(core: BufferCore, take: Callable[[], None]) -> None:
    """Call ``take`` on all ranks; if it fails on one, all ranks raise, and take no step before a load succeeds."""
    core.half_loaded = True
    check_on_all(core.everyone, LOADING, take)


@dataclass(frozen=True)
class Fitting:
    """A folder that fits: this rank's ``state`` in it by member, the new param ``groups``, and other entries."""

    saved: Saved
    state: dict[int, dict[str, Found]]
    groups: list[dict[str, Any]]
    rest: dict[str, Any]


def _fitting(
    core: BufferCore,
    groups: Groups,
    names: Names,
    beside: tuple[Mapping[str, Any], Collection[str], Mapping[str, str]],
    folder: DcpFolder,
) -> Fitting:
    """What this rank loads. ``beside`` are the entries that are not trained weights, here and on any rank, and further
    names of trained weights. Raises ValueError for a checkpoint that does not fit."""
    others, elsewhere, tied = beside
    saved = read_as_expected(lambda: Saved(folder, lambda value: value), folder.path, "DCP")
    where = f"{LOADING}: {folder.path}"
    for sentence in saved.left:
        raise ValueError(f"{where}: {sentence}")
    if names.params and not (saved.states or saved.group_of):
        raise ValueError(
            f"{where}: expected weights and an optimizer's state, found weights alone; {INTO_MODEL}, and begin with "
            "new state"
        )
    _take_tied(saved, tied, core.everyone.rank == 0)
    check_fits(where, *_params_of(names, saved), alone=INTO_MODEL)
    known = {*saved.weights, *(key.removeprefix(f"{MODEL}.") for key in saved.keys.others)}
    for key in [*names.keys.values(), *others, *saved.weights]:
        if key not in known or key not in names.params and key not in elsewhere:
            raise ValueError(
                f"the weight {key!r} is only in {_side(key in known)}; load a checkpoint of the same model"
            )
    for key, value in others.items():
        if isinstance(value, Tensor) and value.shape != saved.weights[key].shape:
            found = saved.weights[key].shape
            raise ValueError(f"the weight {key!r}: expected shape {tuple(value.shape)}, the checkpoint has {found}")
    in_folder = [_state_in(saved, names.keys[number], member) for number, member in enumerate(core.members)]
    state = checked_state(core, groups, where, in_folder, anew=True)
    options = {core.members[n].group: saved.groups[saved.group_of[key]] for n, key in names.keys.items()}
    in_use = [with_options(group, options[number]) for number, group in enumerate(groups)]
    for number, group in enumerate(in_use):
        check_group(group, f"{where}: param group {number} ({rule_of(group)})")
    return Fitting(saved, state, in_use, in_memory(read_as_expected(saved.others, folder.path, "DCP")))


def _state_in(saved: Saved, key: str, member: Member) -> dict[str, Any]:
    """A member's state in a folder, with its matrices and masters of 16-bit weights, by default the weights."""
    found: dict[str, Any] = dict(saved.states.get(key, {}))
    if key in saved.matrices:
        found[MATRICES] = saved.matrices[key]
    dtype = owned_dtype(member.param.dtype)
    if dtype != member.param.dtype:
        found[MASTER] = found.get(MASTER, saved.weights[key]).to(dtype)
    return found


def _side(in_checkpoint: bool) -> str:
    return "the checkpoint" if in_checkpoint else "this model"


def _params_of(names: Names, saved: Saved) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Facts of all ranks' parameters, here and in the folder. A group's key is its first parameter."""
    here: dict[str, dict[str, Any]] = {}
    there: dict[str, dict[str, Any]] = {key: {} for key in {**saved.group_of, **saved.states}}
    firsts: dict[Any, str] = {}
    for key, ours in names.params.items():
        number, weight = saved.group_of.get(key), saved.weights.get(key)
        group = {} if number is None else saved.groups[number]
        of_group = {PARAM_GROUP: firsts.setdefault(names.groups[key], key)}
        here[key] = {"shape": ours.shape, "dtype": ours.dtype, "rule": ours.rule, **of_group}
        if key in there:
            rule = group.get("rule") or rule_of_saved({*saved.states.get(key, {})}, group)
            there[key] = {"rule": rule, PARAM_GROUP: firsts.setdefault(number, key)}
            if weight is not None:
                dtype = str(weight.dtype).removeprefix("torch.")
                is_master = dtype == "float32" and ours.dtype in ("bfloat16", "float16")
                there[key] |= {"shape": weight.shape, "dtype": ours.dtype if is_master else dtype}
    return here, there
