"""``"load_universal": true``: choose and check what an engine takes from a universal checkpoint, then load it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils.logging import logger

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param
from lwopt_backend.checkpoint.deepspeed import universal as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed.files import STEP, tag_of
from lwopt_backend.checkpoint.deepspeed.universal import OWNERS
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.config.options import suggestion
from lwopt_backend.config.param_groups import of_another_optimizer
from lwopt_backend.config.registry import MATRIX_RULES, arguments, new_state
from lwopt_backend.integrations.deepspeed.checkpoints import Check, SaveMark, guard_loading, write_latest_last
from lwopt_backend.integrations.deepspeed.universal_groups import ALONE, Group, check_scheduler, options_of
from lwopt_backend.plan import TrainedParam
from lwopt_backend.runtime.agreement import agree_in_all, check_in_all
from lwopt_backend.runtime.collectives import Collectives, ranks_of
from lwopt_backend.runtime.state import OwnerStates, StateStore, Whole, keeps_state, put

# What an engine of any storage takes from a universal checkpoint: chosen and checked before any of it is loaded.
#
# Parameters are matched by name, and a param group's hyperparameters by the parameters in it: the checkpoint's groups
# may differ, or be in another order.


@dataclass(frozen=True)
class Choice:
    """``params`` are the trained ones, by our names; ``rest`` is frozen parameters and buffers. ``options`` are what
    each param group takes over; ``notes`` are what rank 0 logs about options that it does not."""

    folder: Path
    checkpoint: Checkpoint
    params: Mapping[str, Param]
    rest: Mapping[str, LazyTensor]
    options: Sequence[dict[str, Any]]
    notes: Sequence[str]


def choose(
    engine: DeepSpeedEngine,
    store: StateStore,
    folder: Path,
    checkpoint: Checkpoint,
    *,
    with_state: bool,
    with_scheduler: bool,
    strict: bool,
) -> Choice:
    """What an engine that trains the parameters in ``store`` takes from ``checkpoint``, which is in ``folder``.

    Raises CheckpointError, which is a ValueError, for parameters, shapes, states or rules that do not fit. ``strict``
    requires every frozen parameter and buffer, too.
    """
    trained, groups = {param.name: param for param in store.params}, store.groups
    others = _others(engine, trained)
    params = _matched(folder, checkpoint, trained, others)
    for name, param in trained.items():
        _check_shape(folder / "zero" / name / f"{MASTER}.pt", name, param.shape, params[name].shape)
    rest = _rest(folder, checkpoint, others, strict)
    options: list[dict[str, Any]] = [{} for _ in groups]
    notes: list[str] = []
    if with_state:
        members: list[dict[str, Param]] = [{} for _ in groups]
        for unit in store.units:
            notes += _check_states(folder, checkpoint, unit, groups, params)
        for param in store.params:
            members[param.group][param.name] = params[param.name]
        options, more = options_of(folder, checkpoint, groups, members)
        notes += more
    if with_scheduler and engine.lr_scheduler is not None:
        check_scheduler(folder, engine.lr_scheduler.state_dict(), checkpoint.scheduler)
    return Choice(folder, checkpoint, params, rest, options, notes)


def _others(engine: DeepSpeedEngine, trained: Mapping[str, TrainedParam]) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the module's frozen parameters, and of the buffers that its state dict has."""
    saved = engine.module.state_dict().keys()  # at stage 3, too: only the parameters' data is elsewhere
    buffers = {name: tuple(buffer.shape) for name, buffer in engine.module.named_buffers() if name in saved}
    params = engine.module.named_parameters()
    frozen = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in params if name not in trained}
    return {**frozen, **buffers}


def _matched(
    folder: Path, checkpoint: Checkpoint, trained: Mapping[str, TrainedParam], others: Mapping[str, Any]
) -> dict[str, Param]:
    there = checkpoint.params
    names = {name: name if name in there else checkpoint.tied.get(name, name) for name in trained}
    missing = [name for name, theirs in names.items() if theirs not in there or not there[theirs].states]
    if missing:
        kind = "has it frozen" if missing[0] in there else f"has none of that name; {suggestion(missing[0], there)}"
        raise CheckpointError(
            f"{folder}: expected the state of all {len(trained)} trained parameters, but {len(missing)} are missing, "
            f"first {missing[0]!r}: the checkpoint {kind}. Its names are {checkpoint.names!r}; convert it with lwopt "
            "convert --names where the model's are others"
        )
    taken = {*names.values(), *others, *(checkpoint.tied.get(name) for name in others)}
    left = [name for name in there if name not in taken]
    if left:
        raise CheckpointError(
            f"{folder} has {len(left)} parameters that the model does not train, first {left[0]!r}; "
            f"{suggestion(left[0], trained)} Load it into the model it was saved with"
        )
    return {name: there[theirs] for name, theirs in names.items()}


def _rest(
    folder: Path, checkpoint: Checkpoint, others: Mapping[str, tuple[int, ...]], strict: bool
) -> dict[str, LazyTensor]:
    """Tensors for frozen parameters and buffers, by name; DeepSpeed's converter saves both as parameters."""
    found = {}
    for name, shape in others.items():
        there = checkpoint.params.get(checkpoint.tied.get(name, name))
        tensor = checkpoint.buffers.get(name) if there is None or name in checkpoint.buffers else there.best
        if tensor is not None:
            _check_shape(folder, name, shape, tensor.shape)
            found[name] = tensor
        elif strict:
            raise CheckpointError(
                f"{folder}: the files of model states have no {name!r}, which is frozen or a buffer; with "
                "load_module_strict=False it keeps what it has"
            )
    return found


def _check_shape(file: Path, name: str, expected: Sequence[int], found: Sequence[int]) -> None:
    if tuple(expected) != tuple(found):
        raise CheckpointError(
            f"{file}, parameter {name!r}: expected shape {tuple(expected)}, found {tuple(found)}; load it into the "
            "model it was saved with"
        )


def _check_states(
    folder: Path,
    checkpoint: Checkpoint,
    unit: Sequence[TrainedParam],
    groups: Sequence[Group],
    params: Mapping[str, Param],
) -> list[str]:
    """Raises CheckpointError unless the checkpoint has all state that the rule keeps of a unit's parameters. Returns
    sentences about other differences."""
    group, rule = groups[unit[0].group], unit[0].rule
    like = new_state(torch.empty(1, device="meta"), group)
    expected = sorted(key for key, tensor in like.items() if tensor.ndim)
    keeps_owner_state = rule in MATRIX_RULES and keeps_state(MATRIX_RULES[rule].build(**arguments(group)))
    notes = []
    for trained in unit:
        name, param = trained.name, params[trained.name]
        whose = f"parameter {name!r}, which {rule!r} trains"
        found = sorted(key for key in param.states if key != MASTER)
        if found != expected:
            others = "; another optimizer wrote the checkpoint" if of_another_optimizer(checkpoint.groups) else ""
            raise CheckpointError(
                f"{folder / 'zero' / name}: {whose}: expected the states {expected}, found {found}{others}; let the "
                f"rule train it that trained it there, with include, exclude or overrides, or {ALONE}"
            )
        if STEP in like and param.step is None:
            raise CheckpointError(f"{folder / 'zero' / name / STEP}.pt is missing: {whose}; {ALONE}")
        if keeps_owner_state and checkpoint.iteration != 0:
            notes += _check_owner_states(folder, checkpoint, trained, whose, param, rule)
        elif param.owner_states and not keeps_owner_state:
            raise CheckpointError(f"{folder / OWNERS / name}.pt: {whose}, a rule that keeps no such state; {ALONE}")
        ours, theirs = list(map(str, trained.blocks)), _matrices(checkpoint, name)
        if theirs not in (None, ours):
            notes.append(f"{folder}: {whose} as the matrices {ours}, was trained as {theirs}; their updates differ")
    steps = {trained.name: params[trained.name].step for trained in unit}
    if STEP in like and len(set(steps.values())) > 1:
        raise CheckpointError(
            f"{folder}: DeepSpeed steps the parameters of a param group as one tensor; expected one count of steps for "
            f"those of {rule!r}, found {steps}; put them into groups of their own"
        )
    return notes


def _matrices(checkpoint: Checkpoint, name: str) -> list[str] | None:
    """The matrices that a parameter was trained as, if the checkpoint says."""
    found = (checkpoint.arguments.get("matrices") or {}).get(checkpoint.tied.get(name, name))
    return None if found is None else list(found)


def _check_owner_states(
    folder: Path, checkpoint: Checkpoint, trained: TrainedParam, whose: str, param: Param, rule: str
) -> list[str]:
    """Raises CheckpointError unless there is owner state of every matrix, and of the same matrices.

    A matrix that never had a gradient has none; if other matrices have some, a note says so instead of an error.
    """
    ours, theirs = list(map(str, trained.blocks)), _matrices(checkpoint, trained.name)
    found, file = param.owner_states, f"{folder / OWNERS / trained.name}.pt: {whose}"
    if found and (theirs not in (None, ours) or max(found) >= len(ours)):
        raise CheckpointError(
            f"{file} as the matrices {ours}: found what owners keep of {theirs or sorted(found)}; load it with the "
            f"'atoms' it was saved with, or {ALONE}"
        )
    if len(found) == len(ours):
        return []
    number = len(checkpoint.groups) if param.group is None else param.group
    by = checkpoint.groups[number].get("rule") if number in range(len(checkpoint.groups)) else None
    if by != rule or not any(other.owner_states for other in checkpoint.params.values()):
        raise CheckpointError(
            f"{file}: expected what the owner keeps of {len(ours)} matrices, found {len(found)}; convert the "
            f"checkpoint with lwopt convert, which takes it along, or {ALONE}"
        )
    return [f"{file}: nothing was kept of {len(ours) - len(found)} of {len(ours)} matrices; they begin anew"]


# ``"checkpoint": {"load_universal": true}``: whole tensors by name, of which every rank reads its pieces.
#
# DeepSpeed's own loader handles only AdamW at stage 3 and nothing at stage 0, matches param groups by position, and
# does not load buffers and frozen parameters. So ours replaces it.

WHAT = "load_checkpoint"


class EngineStore(StateStore, Protocol):
    """The ``StateStore`` of an engine, with what loading needs besides ``put``."""

    def take_owner_states(self, states: OwnerStates) -> None:
        """Replace the owner state of this rank's matrices; those missing in ``states`` start fresh."""

    def publish(self) -> None:
        """Copy changed weights into the module's parameters. Called on all ranks."""


def prepare_loading(engine: DeepSpeedEngine, optimizer: Any, ranks: Sequence[Collectives], check: Check) -> None:
    """Make ``engine.load_checkpoint`` load universal checkpoints if configured, else ``check`` DeepSpeed's own first.

    Called once for an engine, on all ranks. ``optimizer`` is ours; ``ranks`` are the groups that share parameters with
    this rank.
    """
    everyone = ranks_of()
    mark = optimizer.save_mark = SaveMark(engine, everyone)
    write_latest_last(engine, everyone)
    if not engine.load_universal_checkpoint():
        guard_loading(optimizer.name, engine, ranks, check, mark)
        return
    signature = inspect.signature(engine.load_checkpoint)

    @functools.wraps(engine.load_checkpoint)
    def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        mark.loads += 1
        return _load(engine, optimizer, call.arguments)

    engine.load_checkpoint = load_checkpoint


def _load(engine: DeepSpeedEngine, optimizer: Any, asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Load what ``engine.load_checkpoint`` was ``asked`` for; returns the folder and the client state.

    Raises, on every rank and before anything is changed, if it cannot be loaded.
    """
    alone = asked["load_module_only"]
    with_state = asked["load_optimizer_states"] and not alone
    with_scheduler = asked["load_lr_scheduler_states"] and not alone
    store: EngineStore = optimizer.state_store()

    def decide() -> tuple[Choice, list[list[str]]]:
        _refuse(engine, asked)
        root, tag = Path(asked["load_dir"]), asked["tag"]
        folder = tag_of(root, deepspeed_universal.POINTER) if tag is None else root / str(tag)
        if not deepspeed_universal.recognises(folder):
            raise CheckpointError(
                f"checkpoint.load_universal is on, but {folder} is no universal checkpoint: it has no file "
                "zero/optimizer_state.pt; switch it off, or convert the checkpoint first, with lwopt convert --to "
                "universal"
            )
        with torch_files.checked_later() as files:
            checkpoint = deepspeed_universal.read(folder)
        choice = choose(
            engine,
            store,
            folder,
            checkpoint,
            with_state=with_state,
            with_scheduler=with_scheduler,
            strict=asked["load_module_strict"],
        )
        ranks = store.ranks[0]
        for file in sorted(files)[ranks.rank :: ranks.world_size]:  # together the ranks check every byte
            torch_files.check(file)
        return choice, [[f"{folder.name}, after {checkpoint.iteration} steps"]] * len(store.ranks)

    choice = agree_in_all(store.ranks, WHAT, decide)
    check_in_all(store.ranks, WHAT, lambda: _put(store, choice, with_state))
    store.publish()
    optimizer.take_loaded(choice.options)
    if with_state:
        _restore_scaler(engine, choice)
    _put_rest(engine, choice)
    if not alone:
        _count(engine, choice, with_scheduler)
    notes = [*choice.notes, *([] if alone or with_scheduler else _scheduler_notes(engine, choice))]
    if engine.global_rank == 0:
        for note in notes:
            logger.warning(note)
    return str(choice.folder), dict(choice.checkpoint.client)


def _put(store: EngineStore, choice: Choice, with_state: bool) -> None:
    """Load weights (into masters, if there are any), state, and owner state."""
    weights = {name: param.best for name, param in choice.params.items()}
    state: dict[str, dict[str, Whole]] = {name: dict(param.states) for name, param in choice.params.items()}
    for name, param in choice.params.items():
        if param.step is not None:
            state[name][STEP] = torch.tensor(param.step)
    put(store, weights=weights, state=state if with_state else None)
    if with_state:
        store.take_owner_states({name: param.owner_states for name, param in choice.params.items()})


def _refuse(engine: DeepSpeedEngine, asked: Mapping[str, Any]) -> None:
    """Raises ValueError for what is not supported."""
    if asked["custom_load_fn"] is not None:
        raise ValueError("checkpoint.load_universal is on, with which there is no use for custom_load_fn; leave it out")
    if engine.pipeline_parallelism or engine.has_moe_layers:
        what = "a PipelineModule" if engine.pipeline_parallelism else "deepspeed.moe layers"
        raise ValueError(
            f"checkpoint.load_universal is on, and this version loads no universal checkpoint into {what}; load "
            "DeepSpeed's own on as many ranks as it was saved on"
        )


def _restore_scaler(engine: DeepSpeedEngine, choice: Choice) -> None:
    """Restore the loss scale of fp16 and its counters."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for key, value in (choice.checkpoint.arguments.get("loss_scaler") or {}).items():
        if key in getattr(scaler, "__dict__", ()):
            setattr(scaler, key, value)


@torch.no_grad()
def _put_rest(engine: DeepSpeedEngine, choice: Choice) -> None:
    """Load buffers and frozen parameters; the first rank reads those that stage 3 has cut. Called on all ranks."""
    there = {**dict(engine.module.named_buffers()), **dict(engine.module.named_parameters())}
    for name, tensor in choice.rest.items():
        if hasattr(there[name], "ds_shape"):
            with GatheredParameters([there[name]], modifier_rank=0):
                if engine.global_rank == 0:
                    there[name].data.copy_(tensor.read())
        else:
            there[name].data.copy_(tensor.read())


def _count(engine: DeepSpeedEngine, choice: Choice, with_scheduler: bool) -> None:
    """Restore the engine's counters and the scheduler's state."""
    checkpoint = choice.checkpoint
    engine.global_steps = checkpoint.iteration or 0
    engine.global_samples = checkpoint.samples or engine.global_steps * engine.train_batch_size()
    engine.skipped_steps = checkpoint.arguments.get("skipped_steps", 0)
    if with_scheduler and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(dict(checkpoint.scheduler or {}))


def _scheduler_notes(engine: DeepSpeedEngine, choice: Choice) -> list[str]:
    """Advice about a scheduler that was not loaded, if it is at another step than the checkpoint."""
    steps = engine.global_steps - engine.skipped_steps
    scheduler = engine.lr_scheduler
    for key, there in {"last_epoch": steps, "last_batch_iteration": steps - 1}.items():  # torch's, and DeepSpeed's
        here = getattr(scheduler, key, None)
        if here not in (None, there):
            return [
                f"{choice.folder}: the scheduler's state is not loaded, so it goes on from its {key} {here}, but the "
                f"checkpoint was saved after {steps} steps; to go on with the schedule from there, set its {key} to "
                f"{there} after loading"
            ]
    return []
