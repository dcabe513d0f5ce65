"""Owned storage in a folder of torch.distributed.checkpoint, which any number of ranks with any layout can load.

::

    model.<parameter>                                     the weights, and all else in the model's state dict
    optimizer.state.<parameter>.<key>                     state, fp32 masters of 16-bit parameters, owner state
    optimizer.param_groups.<number>.<option>              hyperparameters; ``params`` are the parameters' names
    lwopt_tied                                            further names of parameters, each with the one above
    <anything else>                                       what the program saves with it

FSDP2's checkpoints have the same form (``checkpoint/dcp``). Every rank writes the pieces that it owns,
as boxes of the whole tensors, into a file of its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.checkpoint.contents import MASTER, LazyTensor, Param, read_as_expected
from lwopt_backend.checkpoint.dcp import saving
from lwopt_backend.checkpoint.dcp.reader import METADATA, DcpFolder, Saved
from lwopt_backend.checkpoint.dcp.saving import Boxes, Shards, flattened, later, one_box, states_of, whole
from lwopt_backend.checkpoint.files.pickles import in_memory
from lwopt_backend.checkpoint.ties import RECORD
from lwopt_backend.engines.owned.state import (
    Groups,
    Names,
    OwnedStore,
    boxed,
    matrices_of,
    names_of,
    state_pieces,
)
from lwopt_backend.engines.owned.step import OwnedCore, broadcast_untrained, untrained
from lwopt_backend.groups.param_groups import DECIDED, with_options
from lwopt_backend.groups.registry import rule_of
from lwopt_backend.plan.atoms import matrices_of as matrices_by_shape
from lwopt_backend.plan.layouts import View
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.agreement import agree, check_on_all
from lwopt_backend.runtime.state import PARAM_GROUP, StatePiece, check_fits, fill, put
from lwopt_backend.runtime.whole import owned_dtype

SAVING, LOADING = "save_state_dict", "load_state_dict_from"
MODEL, OPTIMIZER, STEP = "model", "optimizer", "step"


def save(core: OwnedCore, groups: Groups, model: nn.Module, folder: Path, more: Mapping[str, Any]) -> None:
    """Write weights and state of all ranks, and the first rank's ``more``, into ``folder``, which all ranks see.

    Called on all ranks. An error on any rank is raised on all of them; the folder then has its earlier content.
    """
    everyone = core.holdings[0].sharers.everyone
    core.manager.receive_values()
    shards, names = shards_of(core, groups), names_of(core, groups)
    pieces = {piece.member: piece for piece in state_pieces(core)}
    numbers = {member.name: number for number, member in enumerate(core.members)}

    def add() -> None:
        for key in {MODEL, OPTIMIZER} & set(more):
            raise ValueError(f"{SAVING}: {key!r} is what weights and state are saved as; give it another name")
        check_readable(SAVING, more)
        if everyone.rank == 0:
            shards.objects.update(flattened(more))
            shards.objects[RECORD,] = _tied(core, model, names)
        for name, value in model.state_dict().items():  # in the model's order, on all ranks
            number = numbers.get(name)
            if number is not None:
                param, piece = core.members[number].param, pieces.get(number)
                boxes = Boxes(tuple(param.shape), {})  # of a rank that owns none of it
                if piece is not None:
                    boxes = _boxes(param.detach().reshape(-1)[piece.start : piece.stop], piece, param.shape, name)
                shards.tensors[MODEL, names.keys[number]] = boxes
            elif isinstance(value, Tensor):
                shards.tensors[MODEL, name] = whole(value, name)
            else:
                shards.objects[MODEL, name] = value

    check_on_all(everyone, SAVING, add)
    saving.save(folder, shards, everyone, SAVING)


def shards_of(core: OwnedCore, groups: Groups) -> Shards:
    """The optimizer's state that this rank saves. Called on all ranks, which raise together."""
    everyone = core.holdings[0].sharers.everyone
    names, options = names_of(core, groups), common_options(core, groups)
    shards = Shards()

    def fill() -> None:
        core.check_loaded()
        for piece in state_pieces(core):
            key, param = names.keys[piece.member], core.members[piece.member].param
            place = (OPTIMIZER, "state", key)
            for state, tensor in piece.tensors.items():
                shape = param.shape if tensor.ndim else ()
                shards.tensors[(*place, state)] = _boxes(tensor, piece, shape, f"{state} of {key}")
            owner = {number: nested.plain(of_matrix) for number, of_matrix in piece.owner.items()}
            kept = Param(_stub(param, key), owner_states=owner)
            for state, lazy in states_of(key, kept, matrices_of(core, piece.member)):
                shards.tensors[(*place, state)] = one_box(lazy)
        for number, (group, values) in enumerate(options.items()):
            params = [name for name, key in names.groups.items() if key == group]
            for option, value in {**values, "params": params}.items():
                shards.objects[(OPTIMIZER, "param_groups", number, option)] = value

    check_on_all(everyone, SAVING, fill)
    return shards


def others_of(core: OwnedCore, model: nn.Module) -> dict[str, Any]:
    """A model's state dict without the trained parameters: frozen ones, buffers, tied names."""
    trained = {member.name for member in core.members}
    return {name: value for name, value in model.state_dict().items() if name not in trained}


def _tied(core: OwnedCore, model: nn.Module, names: Names) -> dict[str, str]:
    """The further names of trained parameters in a model's state dict, each with the name that it is saved as."""
    first = {id(member.param): number for number, member in enumerate(core.members)}
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        number = first.get(id(param))
        if number is not None and name != core.members[number].name:
            found[name] = names.keys[number]
    return found


def _stub(param: Tensor, name: str) -> LazyTensor:
    """A lazy tensor that stands for a parameter's shape."""
    return LazyTensor(tuple(param.shape), param.dtype, lambda: param.detach().cpu(), name)


def _boxes(flat: Tensor, piece: StatePiece, shape: Sequence[int], where: str) -> Boxes:
    """A piece of a flattened tensor as boxes of the whole tensor; a scalar as it is."""
    parts = {place: later(box, box.shape, where) for place, box in boxed(flat, piece, shape).items()}
    return Boxes(tuple(shape), parts)


def common_options(core: OwnedCore, groups: Groups) -> dict[str, dict[str, Any]]:
    """The options of all ranks' param groups, by key. Called on all ranks.

    Raises, on all of them, if options differ between ranks or cannot be read back by ``torch.load``.
    """
    everyone = core.holdings[0].sharers.everyone
    options = ({key: value for key, value in group.items() if key not in DECIDED} for group in groups)
    mine = {k: {**of, "rule": rule_of(g)} for k, of, g in zip(core.group_keys, options, groups)}

    def check() -> None:
        for key, options in mine.items():
            check_readable(f"param group {key}", options)

    check_on_all(everyone, SAVING, check)
    common: dict[str, dict[str, Any]] = {}
    for rank, of_rank in enumerate(everyone.gather_objects(mine)):
        for key, options in of_rank.items():
            expected = common.setdefault(key, options)
            wrong = [
                o
                for o in {**expected, **options}
                if repr(expected.get(o, "nothing")) != repr(options.get(o, "nothing"))
            ]
            if wrong:
                raise ValueError(
                    f"param group {key}: ranks differ in {wrong[0]!r}, rank {rank} has "
                    f"{options.get(wrong[0], 'nothing')!r}, one before it {expected.get(wrong[0], 'nothing')!r}; set "
                    "it alike on all ranks"
                )
    return common


def check_readable(where: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError for values that ``torch.load(weights_only=True)`` cannot read back."""
    for key, value in values.items():
        try:
            stored = io.BytesIO()
            torch.save(value, stored)
            stored.seek(0)
            torch.load(stored, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{where}: the value {value!r} of {key!r} cannot be read back with torch.load(weights_only=True); keep "
                f"it elsewhere. {error}"
            ) from error


# Reading this rank's pieces from a folder, whichever ranks, layout or engine wrote it.


def open_folder(folder: Path, with_files: bool = True) -> DcpFolder:
    """Open a checkpoint. Raises FileNotFoundError if there is none, ValueError if it is damaged or incomplete. One rank
    looks at all files (``with_files``); the others open those that they load from."""
    if not (folder / METADATA).is_file():
        raise FileNotFoundError(
            f"{folder} holds no checkpoint, or its saving was not finished: there is no {METADATA}, which is written "
            "last. What another system wrote is brought here with lwopt convert --to dcp"
        )
    return read_as_expected(lambda: DcpFolder(folder, with_files=with_files), folder, "DCP")


def load(
    core: OwnedCore, groups: Groups, model: nn.Module, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Load weights and state; returns the param groups to use from now on, and what the program saved with them.

    Called on all ranks. A rank reads what it owns of state and weights, which then go to all ranks as after a step.
    Raises, on all ranks and before anything is changed, for files that are missing or of different saves, and for other
    parameters, rules or groups. A tensor whose checksum is wrong is found when it is to be copied: all ranks raise, and
    take no step before a load succeeds.
    """
    everyone = core.holdings[0].sharers.everyone
    names, others = names_of(core, groups), others_of(core, model)
    elsewhere = {name for of_rank in everyone.gather_objects(list(others)) for name in of_rank}

    opened = agree(everyone, LOADING, lambda: (open_folder(folder, with_files=everyone.rank == 0), []))

    def check() -> tuple[tuple[Checked, dict[str, Any]], list[str]]:
        checked = Checked(core, groups, names, opened)
        saved = checked.saved
        known = {*saved.weights, *(key.removeprefix(f"{MODEL}.") for key in saved.keys.others)}
        for key in [*names.keys.values(), *others, *saved.weights]:
            if key not in known or key not in names.params and key not in elsewhere:
                raise ValueError(f"the weight {key!r} is in {_side(key in known)}; load a checkpoint of the same model")
        for key, value in others.items():
            if isinstance(value, Tensor) and value.shape != saved.weights[key].shape:
                found = saved.weights[key].shape
                raise ValueError(f"the weight {key!r}: expected shape {tuple(value.shape)}, the checkpoint has {found}")
        rest = in_memory(read_as_expected(saved.others, folder, "DCP"))
        return (checked, rest), []

    checked, rest = agree(everyone, LOADING, check)
    rest.pop(RECORD, None)
    core.manager.receive_values()

    def take() -> None:
        checked.take()
        kept, saved = rest.pop(MODEL, {}), checked.saved
        found = {key: saved.weights[key].read() for key in others if reads(key)}
        model.load_state_dict({**kept, **found}, strict=False)
        with torch.no_grad():
            for piece in state_pieces(core):
                key, values = names.keys[piece.member], core.members[piece.member].param.detach().reshape(-1)
                fill(values[piece.start : piece.stop], saved.weights[key], View.of_range(piece.start, piece.stop))

    def reads(key: str) -> bool:
        """Whether this rank reads what is no trained weight: of what all ranks get afterwards, the first that shares
        it does. That is what is sent, and further names of trained weights, which their owners send."""
        mine = key not in from_first or core.share_of(key).ranks.rank == 0
        return mine and key in checked.saved.weights

    sent = {name for name, _ in untrained(model)} & set(others)
    from_first = {*sent, *_tied(core, model, names)}
    _take(core, take)
    for number in range(len(core.manager.buckets)):
        core.manager.send_values(number)
    core.manager.receive_values()
    broadcast_untrained(model, core.shares, sent.__contains__)
    core.half_loaded = False
    return checked.groups, rest


def _take(core: OwnedCore, take: Callable[[], None]) -> None:
    """Call ``take`` on all ranks; if it fails on one, all ranks raise, and take no step before a load succeeds."""
    core.half_loaded = True
    check_on_all(core.holdings[0].sharers.everyone, LOADING, take)


class Checked:
    """This rank's part of a folder, checked when made; nothing is changed before ``take``."""

    def __init__(self, core: OwnedCore, groups: Groups, names: Names, folder: DcpFolder) -> None:
        """Raises ValueError for anything that does not fit."""
        self._store = OwnedStore(core, groups, names)
        self._core, pieces = core, self._store.pieces()
        self.saved = read_as_expected(lambda: Saved(folder, lambda value: value), folder.path, "DCP")
        self._state: dict[str, dict[str, LazyTensor]] = {}
        self._owner: dict[str, Mapping[int, Mapping[str, Any]]] = {}
        where = f"{LOADING}: {folder.path}"
        check_fits(where, *_params_of(names, self.saved))
        here, there = dict[str, Any](), dict[str, Any]()
        for piece in pieces:
            key = names.keys[piece.member]
            here[key], there[key] = self._add(piece, key)
        check_fits(where, here, there)
        for piece in pieces:
            self._check_piece(piece, names.keys[piece.member])
        options = {core.members[n].group: self.saved.groups[self.saved.group_of[key]] for n, key in names.keys.items()}
        self.groups = [with_options(group, options[number]) for number, group in enumerate(groups)]

    def _add(self, piece: StatePiece, key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Facts of a parameter's state, here and in the folder."""
        param, found = self._found(key, self._core.members[piece.member].param)
        self._state[key], self._owner[key] = found, param.owner_states
        here: dict[str, Any] = {"state": sorted(piece.tensors)}
        there: dict[str, Any] = {"state": sorted(found)}
        for name in piece.tensors.keys() & found.keys():
            into, saved = piece.tensors[name], found[name]
            here[f"{name!r} as"] = f"{into.dtype} of shape {tuple(param.shape if into.ndim else ())}"
            there[f"{name!r} as"] = f"{saved.dtype} of shape {saved.shape}"
        if param.owner_states:
            here["matrices"] = matrices_of(self._core, piece.member)
            there["matrices"] = self.saved.matrices.get(key, list(map(str, matrices_by_shape(param.shape))))
        return here, there

    def _check_piece(self, piece: StatePiece, key: str) -> None:
        """Raises CheckpointError for wrong checksums of what this rank reads of a parameter's state."""
        for name in (name for name, into in piece.tensors.items() if into.ndim):
            self._check_bytes(key, name, piece.start, piece.stop)
        if self._owner[key]:
            for name in self.saved.states[key].keys() - self._state[key].keys():
                self._check_bytes(key, name, 0, self.saved.states[key][name].numel)

    def _found(self, key: str, ours: Tensor) -> tuple[Param, dict[str, LazyTensor]]:
        """A saved parameter, and its state tensors by our keys."""
        saved = self.saved
        weight = saved.weights.get(key, _stub(ours, key))
        param = read_as_expected(lambda: saved.param(key, weight), saved.folder.path, "DCP")
        found = {name: tensor for name, tensor in param.states.items() if name != MASTER}
        if param.step is not None:
            found[STEP] = saved.states[key][STEP]
        if owned_dtype(ours.dtype) != ours.dtype:
            found[MASTER] = param.best.to(owned_dtype(ours.dtype))
        return param, found

    def _check_bytes(self, key: str, name: str, start: int, stop: int) -> None:
        saved = self.saved
        place = saved.key_of.get((key, name)) or saved.keys.weights[key]
        saved.folder.check_range(place, start, stop)

    def take(self) -> None:
        """Read the state into this rank's pieces."""
        put(self._store, state=self._state)
        self._store.take_owner_states(self._owner)


def _side(in_checkpoint: bool) -> str:
    return "the checkpoint, and not in this model" if in_checkpoint else "this model, and not in the checkpoint"


def _params_of(names: Names, saved: Saved) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Facts of all ranks' parameters, here and in the folder. Groups are known by the first parameter in them."""
    here: dict[str, dict[str, Any]] = {}
    there: dict[str, dict[str, Any]] = {key: {} for key in {**saved.group_of, **saved.states}}
    firsts: dict[Any, str] = {}
    for key, ours in names.params.items():
        number, weight = saved.group_of.get(key), saved.weights.get(key)
        group = {} if number is None else saved.groups[number]
        of_group = {PARAM_GROUP: firsts.setdefault(names.groups[key], key)}
        here[key] = {"shape": ours.shape, "dtype": ours.dtype, "rule": ours.rule, **of_group}
        if key in there:
            rule = group.get("rule", "adamw" if "betas" in group else "none")  # torch's groups have none
            there[key] = {"rule": rule, PARAM_GROUP: firsts.setdefault(number, key)}
            if weight is not None:
                dtype = str(weight.dtype).removeprefix("torch.")
                is_master = dtype == "float32" and ours.dtype in ("bfloat16", "float16")
                there[key] |= {"shape": weight.shape, "dtype": ours.dtype if is_master else dtype}
    return here, there
