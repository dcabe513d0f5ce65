"""Reads checkpoints of torch's state dicts, of FSDP2 and of plain PyTorch, in folders of DCP."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint import contents, ties
from lwopt_backend.checkpoint.contents import MATRICES, Checkpoint, CheckpointError, LazyTensor, OwnerStates, Param
from lwopt_backend.checkpoint.dcp.reader import METADATA, DcpFolder
from lwopt_backend.checkpoint.files.folders import read_pointer
from lwopt_backend.checkpoint.files.pickles import plain, scalar
from lwopt_backend.groups import registry
from lwopt_backend.groups.rates import restored
from lwopt_backend.runtime import nested
from lwopt_backend.runtime.state import STEPPED, STRUCTURE


def _state_of(saved: Mapping[str, LazyTensor]) -> Mapping[str, Any]:
    found = {key: tensor.read() for key, tensor in saved.items() if key not in (STRUCTURE, STEPPED)}
    if STRUCTURE not in saved:
        return found
    described = saved[STRUCTURE]
    try:
        state: Mapping[str, Any] = nested.rebuild(nested.description(described.read()), found)
        return state
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{described.where}: expected the structure of {sorted(found)}, found another ({error!r}); copy it again"
        ) from error


def take_matrices(saved: dict[str, LazyTensor]) -> list[str] | None:
    """Pop and return the elements of a parameter's matrices; None if they are not saved."""
    described = saved.get(MATRICES)
    if described is None or described.dtype != torch.uint8 or len(described.shape) != 1:
        return None
    del saved[MATRICES]
    try:
        return list(map(str, nested.rebuild(nested.description(described.read()), {})))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{described.where}: the names of its matrices cannot be read ({error!r})") from error


def _own_keys(weight: LazyTensor, group: Mapping[str, Any]) -> set[str] | None:
    """The keys of the rule's state with the parameter's shape; None if it has no other state."""
    if group.get("rule", "") in {"", *registry.ELEMENTWISE_RULES}:
        return None
    if "class" in group:  # the file names the class, which is not imported; all its state is owner state
        return set()
    try:
        return set(registry.new_state(torch.empty(weight.shape, device="meta"), group))
    except (KeyError, TypeError, ValueError) as error:
        raise Strange(f"{weight.where}: the rule of its group fails ({error}): {dict(group)}") from error


# Checkpoints of FSDP2 runs, with or without this package, are made of torch's state dicts:
#
#     {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), anything else}
#
# nested (``state.<parameter>.<key>``, ``param_groups.<number>.<option>``) or flattened
# (``param_groups.<parameter>.<option>``), under whatever names. Parameters have the module's own names. Only
# ``iteration``, ``samples``, ``scheduler`` (a state dict), ``arguments`` and ``names`` are read otherwise, and mean
# what they mean in ``Checkpoint``; this package writes them under these keys, and training may.

ENTRIES = "lwopt_entries"  # this package's record of entries without tensors, not flattened
FORMS = "lwopt_forms"  # and of entries with tensors, with {PLACE: a tensor's key} for each
PLACE = "lwopt_place"
POINTER = "latest"
KNOWN = {"iteration": int, "samples": int, "scheduler": Mapping, "arguments": Mapping, "names": str}
GROUPS, STATE = "param_groups.", "state."
OF_MODEL, OF_OPTIMIZER = "pytorch_model_fsdp_", "optimizer_"  # with a number, Accelerate's folders of a model's parts
USUAL = ("model", "state_dict", "model_state_dict", "module")  # a model's name among other dictionaries of tensors
MOST_OPTIMIZERS = 64  # every key is compared with all their names
Path_ = tuple[Any, ...]  # of a key in the nested state dict


def recognises(path: Path) -> bool:
    """Whether it is a folder of DCP. Megatron's formats, which DCP also writes, must be tested first."""
    return _is_step(step_folder(path))


def _is_step(path: Path) -> bool:
    return any((folder / METADATA).is_file() for folder in (path, path / f"{OF_MODEL}0"))


def step_folder(path: Path) -> Path:
    """``path``, or the folder of a step that a file ``latest`` in it names, as loops write it. Raises CheckpointError
    for a name of no folder."""
    pointer = path / POINTER
    return read_pointer(pointer) if pointer.is_file() and not _is_step(path) else path


def _opened(path: Path) -> DcpFolder:
    """The folder, or the content of Accelerate's folders in it. Raises CheckpointError."""
    model, optimizer, second = (path / name for name in (f"{OF_MODEL}0", f"{OF_OPTIMIZER}0", f"{OF_MODEL}1"))
    if (path / METADATA).is_file() or not model.is_dir():
        return DcpFolder(path)
    if second.exists():
        raise CheckpointError(
            f"{path}: expected one model, found {model.name} and {second.name}; give one of these folders, for its "
            "weights alone"
        )
    folder = DcpFolder(model)
    if optimizer.exists():
        folder.add(DcpFolder(optimizer))
        folder.path = path
    return folder


@contents.reader("DCP", step_folder)
def read(path: Path) -> Checkpoint:
    """A step's content. Raises CheckpointError for damage, and for tensors that are neither weight nor state."""
    told = list[str]()
    saved = Saved(_opened(path), partial(plain, notes=told))
    if not saved.weights:
        advice = "load a save of ModuleOptimizers with ModuleOptimizers"
        if path.name.startswith(OF_OPTIMIZER):
            advice = f"give the folder above, in which Accelerate also saves {OF_MODEL}0"
        raise CheckpointError(f"{path}: expected one model's weights, best under 'model', found none; {advice}")
    params, notes, left_out = _params(saved)
    notes += saved.keys.told
    others = saved.others()
    tied = ties.recorded(others.pop(ties.RECORD), params) if ties.RECORD in others else {}
    known = {key: others[key] for key, kind in KNOWN.items() if isinstance(others.get(key), kind)}
    client = {key: value for key, value in others.items() if key not in known}
    steps = {int(param.step) for param in params.values() if param.step is not None}
    if "iteration" not in known and len(steps) == 1:
        count = known["iteration"] = steps.pop()
        notes.append(f"{path} has no iteration: {count} is assumed, the optimizer's count of steps")
    arguments = dict(known.get("arguments", {}))
    if saved.matrices:
        arguments[MATRICES] = {**(arguments.get(MATRICES) or {}), **saved.matrices}
    return Checkpoint(
        format="torch dcp",
        version="",
        names=known.get("names", "model"),
        params={name: param for name, param in params.items() if name not in tied},
        groups=tuple(saved.groups),
        arguments=arguments,
        iteration=known.get("iteration"),
        samples=known.get("samples"),
        scheduler=known.get("scheduler"),
        tied=tied,
        buffers={name: weight for name, weight in saved.weights.items() if name not in params},
        client=client,
        notes=(*notes, *told),
        left_out=left_out | {saved.keys.weights[name]: f"a second name of {of}" for name, of in tied.items()},
    )


# States that torch's optimizers make at a parameter's first gradient, all zero. Before it, they save none.
ZERO_AT_FIRST = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def _params(saved: Saved) -> tuple[dict[str, Param], list[str], dict[str, str]]:
    """The parameters with their state; notes, on what is not read of the state, and whose state is zero; and the keys
    of the former, each with the reason."""
    params, notes, strange = dict[str, Param](), list(saved.left), dict[int | None, str]()
    left_out = dict.fromkeys(saved.unknown, "state of no parameter of the model")
    for name, weight in saved.weights.items():
        if not contents.is_trained(weight.dtype):
            continue
        try:
            params[name] = saved.param(name, weight)
        except Strange as error:
            strange.setdefault(saved.group_of.get(name), str(error))
            params[name] = Param(weight, group=saved.group_of.get(name))
    for group, reason in strange.items():
        names = [name for name, param in params.items() if param.group == group]
        params.update({name: Param(params[name].weight, group=group) for name in names})
        notes.append(f"the state of {len(names)} parameter(s) is left out: {reason}")
        left = (saved.key_of.get((name, key)) for name in names for key in saved.states.get(name, ()))
        left_out.update(dict.fromkeys(filter(None, left), f"state of unknown form: {reason}"))
    for group in {param.group for param in params.values()} - {None}:
        members = {name: param for name, param in params.items() if param.group == group}
        never = [name for name, param in members.items() if not param.states.keys() - {contents.MASTER}]
        never = [name for name in never if members[name].step is None and not members[name].owner_states]
        like = [param for name, param in members.items() if name not in never]
        if not like or not never:
            continue
        keys = {key for param in like for key in param.states} - {contents.MASTER}
        known = keys <= ZERO_AT_FIRST and not any(param.owner_states for param in like)
        params.update({name: _before_first(members[name], like, known) for name in never})
        said = "is zero" if known else "is left out, and they are in no param group"
        notes.append(f"{len(never)} parameter(s), such as {never[0]!r}, never had a gradient: their state {said}")
    return params, notes, left_out


def _before_first(param: Param, others: Sequence[Param], known: bool) -> Param:
    """A parameter before its first gradient, with zeros for the state that ``others`` have, if it is ``known`` so."""
    if not known:
        return replace(param, group=None)
    dtype = param.best.dtype
    like = next((other for other in others if other.best.dtype == dtype), None)
    dtypes = {key: dtype if like is None else tensor.dtype for key, tensor in (like or others[0]).states.items()}
    zeros = {key: contents.zeros(param.shape, of_key, key) for key, of_key in dtypes.items() if key != contents.MASTER}
    return replace(param, states={**param.states, **zeros}, step=None if others[0].step is None else 0.0)


class Strange(CheckpointError):
    """State whose form is not known, of a parameter whose weight can be read."""


class Saved:
    """One model and its optimizer in a folder.

    ``weights`` are by parameter; ``states`` by parameter and key, owner state included; ``groups`` are the param
    groups' options; ``group_of`` is a parameter's group number; ``matrices`` are a parameter's, if saved. ``left`` has
    sentences on ``unknown``, keys of state of no known parameter. ``change`` converts other objects, by default to
    ``plain`` data.
    """

    def __init__(self, folder: DcpFolder, change: Callable[[Any], Any] = plain) -> None:
        self.folder, self.change = folder, change
        self.keys = keys = _Keys(folder)
        self.weights = {name: folder.tensor(key) for name, key in keys.weights.items()}
        self.groups, self.group_of, named, unknown = _groups(folder, keys.options, self.weights, change)
        names = {**self.weights, **self.group_of}
        self.states: dict[str, dict[str, LazyTensor]] = {}
        self.key_of: dict[tuple[str, str], str] = {}
        for key, rest in keys.states.items():
            number, _, of_param = rest.partition(".")
            rest = f"{named[number]}.{of_param}" if number in named else rest
            if (split := _split(rest, names)) is None:
                unknown.append(key)
                continue
            self.states.setdefault(split[0], {})[split[1]] = folder.tensor(key)
            self.key_of[split] = key
        self.left, self.unknown = _left_out(unknown, folder.path), tuple(unknown)
        found = {name: take_matrices(of_name) for name, of_name in self.states.items()}
        self.matrices = {name: matrices for name, matrices in found.items() if matrices is not None}

    @cached_property
    def _numbers(self) -> list[set[str]]:
        """By group, the keys of its rule's state that are numbers."""
        kept = map(registry.saved_state, self.groups)
        return [{key for key, like in of_group.items() if not like.ndim} for of_group in kept]

    def param(self, name: str, weight: LazyTensor) -> Param:
        """A parameter's saved tensors. Raises Strange for state of unknown shape or place.

        Owner state is saved as ``<key>``, or ``[<place>].<key>`` if the parameter has several matrices: one tensor
        each, cut by rows. State with more than tensors by name also has ``structure`` and ``stepped``, and a parameter
        whose shape does not define its matrices has ``matrices`` (``lwopt_backend/runtime/state.py``).
        """
        group, saved = self.group_of.get(name), dict(self.states.get(name, {}))
        counter, master = saved.pop("step", None), saved.pop(contents.MASTER, None)
        described = {key.removesuffix(STRUCTURE) for key in saved if key == STRUCTURE or key.endswith(f".{STRUCTURE}")}
        matrix_of = {key: max((m for m in described if key.startswith(m)), key=len, default=None) for key in saved}
        own = None  # the keys of state other than owner state, if known from the rule
        if group is not None and (None in matrix_of.values() or "" in described):
            own = _own_keys(weight, self.groups[group])
        numbers = set() if group is None else self._numbers[group]
        states = {} if master is None else {contents.MASTER: master}
        owners: dict[int, dict[str, LazyTensor]] = {}
        for key, tensor in saved.items():
            matrix = matrix_of[key]
            fits = tensor.shape == (() if key in numbers else weight.shape)
            if key in own if own is not None else matrix is None and fits:
                states[key] = tensor
            elif matrix is None and own is None:
                misshapen = f"{tensor.where}: expected the weight's shape {weight.shape}, found {tensor.shape}"
                raise Strange(f"{misshapen}; state of other shapes is read only for rules of this package")
            else:
                matrix = key.rpartition(".")[0] if matrix is None else matrix.removesuffix(".")
                number = re.fullmatch(r"\[(\d+)\]", matrix)
                if matrix and number is None:
                    raise Strange(
                        f"{tensor.where}: expected the rows of matrix {matrix!r} in a fused parameter, found none in "
                        "the checkpoint; save the state again where it was trained"
                    )
                of_owner = owners.setdefault(int(number[1]) if number else 0, {})
                of_owner[key.removeprefix(f"{matrix}." if matrix else "")] = tensor
        real = {  # before the first step, only the form of the state is saved
            place: partial(_state_of, state)
            for place, state in sorted(owners.items())
            if STEPPED not in state or bool(state[STEPPED].read().item())
        }
        step = None if counter is None else float(counter.read().item())
        return Param(weight, states, step, group, OwnerStates(real))

    def others(self) -> dict[str, Any]:
        """Entries other than the model's and the optimizer's, nested as they were saved."""
        folder, flat = self.folder, dict[tuple[Any, ...], Any]()
        for key in self.keys.others:
            path = tuple(folder.paths.get(key, (key,)))
            value = self.change(folder.object(key)) if key in folder.objects else folder.tensor(key)
            flat[path] = scalar(value) if path[0] in KNOWN else value
        whole, forms = (flat.pop((key,), {}) for key in (ENTRIES, FORMS))
        if forms:
            by_key = {".".join(map(str, path)): value for path, value in flat.items()}
            whole = {**whole, **{key: _formed(form, by_key, folder.path) for key, form in forms.items()}}
            flat = {path: value for path, value in flat.items() if path[0] not in forms}
        return {**{key: restored(value) for key, value in by_paths(flat, folder.path).items()}, **whole}


def _formed(form: Any, found: Mapping[str, Any], folder: Path) -> Any:
    """An entry of a program with its tensors, ``found`` by their keys in the folder."""
    if isinstance(form, Mapping) and form.keys() == {PLACE}:
        if form[PLACE] not in found:
            raise CheckpointError(f"{folder}: expected a tensor {form[PLACE]!r:.200}, found none; copy it again")
        return found[form[PLACE]]
    if isinstance(form, Mapping):
        return nested.with_values(form, lambda _, entry: _formed(entry, found, folder))
    return type(form)(_formed(e, found, folder) for e in form) if type(form) in (list, tuple) else form


class _Node(dict[Any, Any]):
    """A dictionary, or a list by index, that was flattened."""


def by_paths(flat: Mapping[tuple[Any, ...], Any], folder: Path) -> dict[str, Any]:
    """Nest values by their paths. Raises CheckpointError for paths that contradict each other."""
    root = _Node()
    for path, value in flat.items():
        place: Any = root
        for part in path[:-1]:
            place = place.setdefault(part, _Node())
            if not isinstance(place, _Node):
                raise CheckpointError(f"{folder}: expected {path} once, found a value and a dictionary; copy it again")
        place[path[-1]] = value

    def with_lists(value: Any) -> Any:
        if not isinstance(value, _Node):
            return value
        found = {key: with_lists(part) for key, part in value.items()}
        is_list = all(isinstance(key, int) for key in found)
        return [found[key] for key in sorted(found)] if is_list else found

    return {key: with_lists(value) for key, value in root.items()}


@dataclass
class _Keys:
    """A folder's keys by kind: weights by name; states and options by the rest of the key after the optimizer's.

    The model is the dictionary that has the names of the optimizer's state, with all its tensors, of any shape. At the
    top, among a program's own entries, a number without dimensions is the model's if it has state, or is in a module
    with a weight; without an optimizer's names, if it is of a float. ``told`` has a sentence on these.
    """

    folder: DcpFolder
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = self.folder
        every = [*folder.tensors, *folder.objects]
        starts = (re.search(rf"(^|\.){re.escape(GROUPS)}", key) for key in every)
        optimizers = {start.string[: start.end() - len(GROUPS)] for start in starts if start}
        if len(optimizers) > MOST_OPTIMIZERS:
            raise CheckpointError(f"{folder.path}: expected one optimizer's groups, found {len(optimizers)}")
        found: dict[Path_, dict[str, str]] = {}
        for key in every:
            optimizer = max((prefix for prefix in optimizers if key.startswith(prefix)), key=len, default=None)
            rest = "" if optimizer is None else key.removeprefix(optimizer)
            path = folder.paths.get(key, (key,))
            if rest.startswith(GROUPS):
                self.options[key] = rest.removeprefix(GROUPS)
            elif rest.startswith(STATE) and key in folder.tensors:
                self.states[key] = rest.removeprefix(STATE)
            elif key in folder.tensors:
                found.setdefault(tuple(path[:-1]), {})[str(path[-1])] = key
            else:
                self.others.append(key)
        named = [rest for rest in (*self.states.values(), *self.options.values()) if not rest[:1].isdecimal()]
        chosen = self._model_among(found, named)
        self.weights = found.pop(chosen, {})
        if not chosen:
            self._sort_numbers(named)
        self.others += [key for of_other in found.values() for key in of_other.values()]

    def _model_among(self, found: Mapping[Path_, Mapping[str, str]], named: Sequence[str]) -> Path_:
        """Which of the dictionaries with tensors is the model's: of those with all names that the optimizer's state
        has, or of all if it goes by numbers, the one with a usual name, or else the only one with more than numbers.
        Raises CheckpointError if that is not one."""
        fitting = [
            path for path, of in found.items() if named and all(_name_in(rest, of) is not None for rest in named)
        ]
        if len(fitting) == 1:
            return fitting[0]
        among = fitting or [*found]
        usual = [min(of, key=len) for of in ([p for p in among if p[-1:] == (name,)] for name in USUAL) if of]
        more = [path for path in among if any(self.folder.tensors[key].shape for key in found[path].values())]
        for paths in (usual[:1], more):
            if len(paths) == 1:
                return paths[0]
        if not more:
            return ()
        raise CheckpointError(
            f"{self.folder.path}: expected one model's weights, best under 'model', found tensors under "
            f"{sorted('.'.join(map(str, prefix)) for prefix in more)}; save the one to convert under 'model'"
        )

    def _sort_numbers(self, named: Sequence[str]) -> None:
        """Move the numbers at the top that are a program's entries from ``weights`` to ``others``."""
        shapes = {name: self.folder.tensors[key].shape for name, key in self.weights.items()}
        numbers = [name for name, shape in shapes.items() if not shape]
        if not numbers:
            return
        modules = {name[:at] for name, shape in shapes.items() if shape for at in _dots(name)}
        trained = {_name_in(rest, shapes) for rest in named}
        if not named:  # no optimizer says what is trained
            dtypes = {name: self.folder.tensors[key].dtype for name, key in self.weights.items()}
            trained = {name for name, dtype in dtypes.items() if contents.is_trained(dtype)}
        is_mine = {name: name in trained or name.rpartition(".")[0] in modules for name in numbers}
        mine, entries = ([name for name in numbers if is_mine[name] == own] for own in (True, False))
        self.others += [self.weights.pop(name) for name in entries]
        said = [f"{whose}: {contents.some(of)}" for of, whose in ((mine, "the model"), (entries, "the program")) if of]
        self.told.append(f"numbers without dimensions at the top were taken as those of {'; of '.join(said)}")


def _dots(name: str) -> Iterator[int]:
    """Yield the places of the dots in a name."""
    return (at for at, letter in enumerate(name) if letter == ".")


def _name_in(key: str, names: Collection[str]) -> str | None:
    """The longest of ``names`` with which a key begins, before a dot."""
    end = len(key)
    while (end := key.rfind(".", 0, end)) > 0:
        if key[:end] in names:
            return key[:end]
    return None


def _split(rest: str, names: Collection[str]) -> tuple[str, str] | None:
    """The parameter, with the longest name that fits, and the rest of the key; None for an unknown parameter."""
    name = _name_in(rest, names)
    return None if name is None else (name, rest[len(name) + 1 :])


def _left_out(keys: Sequence[str], folder: Path) -> list[str]:
    """A sentence on the ``keys`` of an optimizer's state that are of no known parameter."""
    if not keys:
        return []
    why = "it belongs to no weight of the model"
    if any(part.isdecimal() for part in keys[0].partition(STATE)[2].split(".")[:1]):
        why = "it has the parameters' numbers, and not their names: save it with torch's get_optimizer_state_dict, or "
        why += "give the optimizer named_parameters()"
    return [f"{len(keys)} entries of the optimizer's state in {folder}, such as {keys[0]}, are left out: {why}"]


def _groups(
    folder: DcpFolder, options: Mapping[str, str], names: Collection[str], change: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], dict[str, int], dict[str, str], list[str]]:
    """The groups' options, each parameter's group, the names that groups have for parameters' numbers, and the keys of
    unknown parameters; if flattened, equal options make a group.

    Optimizers that were given ``named_parameters()`` save names as ``param_names``. Without them, groups of numbers are
    left out.
    """
    numbered: dict[int, dict[str, Any]] = {}
    by_name: dict[str, dict[str, Any]] = {}
    unknown: list[str] = []
    for key, rest in options.items():
        value = folder.tensor(key).read().tolist() if key in folder.tensors else scalar(change(folder.object(key)))
        if rest.endswith(".rule") and isinstance(value, str):
            value = registry.rule_of({"rule": value})  # a state dict signs it, see groups/members.py
        first, _, option = rest.partition(".")
        if first.isdecimal() and _name_in(rest, names) is None:
            numbered.setdefault(int(first), {})[option] = value
        elif (split := _split(rest, names)) is not None:
            by_name.setdefault(split[0], {})[split[1]] = value
        else:
            unknown.append(key)
    groups = [numbered[number] for number in sorted(numbered)]
    members = [group.pop("params", []) for group in groups]
    given = [group.pop("param_names", None) for group in groups]
    named: dict[str, str] = {}
    if all(isinstance(of_group, list) for of_group in (*members, *given)):
        pairs = [pair for numbers, of_group in zip(members, given) for pair in zip(numbers, of_group)]
        if all(type(number) is int and type(name) is str and name in names for number, name in pairs):
            named, members = {str(number): name for number, name in pairs}, given
    if any(type(name) is not str for of_group in members for name in of_group):
        groups, members = [], []
    group_of = {name: number for number, of_group in enumerate(members) for name in of_group}
    for name, of_name in by_name.items():
        if of_name not in groups:
            groups.append(of_name)
        group_of[name] = groups.index(of_name)
    return groups, group_of, named, unknown
