"""The replacement of ``engine.load_checkpoint``: refuses what does not fit, and loads universal checkpoints.

DeepSpeed's own loader of universal checkpoints handles only AdamW at stage 3 and nothing at stage 0, matches param
groups by position, and does not load buffers and frozen parameters. So this one replaces it: whole tensors by name, of
which every rank reads its pieces. Everything that an engine takes is chosen and checked before anything is loaded. A
param group's hyperparameters are matched by its parameters: the checkpoint's groups may differ, or be in another order.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils.logging import logger

from lwopt_backend.checkpoint import formats, ties, translation
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param
from lwopt_backend.checkpoint.deepspeed import universal as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed.files import STEP, renumbered, tag_of
from lwopt_backend.checkpoint.files.pickles import in_memory
from lwopt_backend.checkpoint.files.torch_files import Archive, check_files
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.groups import Group, Groups
from lwopt_backend.groups.others import Told
from lwopt_backend.groups.param_groups import MOMENTUM, OURS
from lwopt_backend.groups.rates import IN_GROUPS, regrouped
from lwopt_backend.groups.registry import MATRIX_RULES, arguments, check_group, known_in, new_state, quantized_keys
from lwopt_backend.integrations.deepspeed.checkpoints import check, prepare_saving
from lwopt_backend.integrations.deepspeed.engine import first_experts, shard_of
from lwopt_backend.integrations.deepspeed.zero import ALONE
from lwopt_backend.plan import TrainedParam
from lwopt_backend.routing.routing import full_shape
from lwopt_backend.runtime.agreement import agree_in_all, check_on_all, from_first, setting
from lwopt_backend.runtime.collectives import Collectives, ranks_of
from lwopt_backend.runtime.state import TO_DO, StateStore, Whole, keeps_state, put, reasons

WHAT = "load_checkpoint"
WriterOf = Mapping[str, Told | ValueError | None]  # by parameter: what is known of who wrote its state
PLACED = {"params", "name", "moe", MOMENTUM, *OURS}  # a group's keys that no checkpoint changes
KEPT = "owner state of the matrices"
BY_CONVERT = "convert the checkpoint with lwopt convert, which takes owner state along, load it with its 'atoms'"


def prepare_loading(
    engine: DeepSpeedEngine, optimizer: Any, ranks: Sequence[Collectives], core: BufferCore | None = None
) -> None:
    """Make ``engine.load_checkpoint`` load what the folder has: a universal checkpoint, or DeepSpeed's own files, which
    are checked first. ``load_universal`` decides where a folder names both. So a run that began from a universal
    checkpoint goes on from its own ones without a change of its configuration.

    Called once for an engine, on all ranks. From then on, ``load_checkpoint`` raises on every rank if a checkpoint does
    not fit on one. ``optimizer`` is this package's; ``ranks`` are the groups that share parameters with this rank;
    ``core`` is the engine's owned storage, if it has that.
    """
    everyone = ranks_of()
    prepare_saving(engine, optimizer, everyone)
    _take_frozen_since(engine)
    load, preferred = engine.load_checkpoint, engine.load_universal_checkpoint()
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any] | None]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        asked = call.arguments
        with_state = asked["load_optimizer_states"] and not asked["load_module_only"]
        here = functools.partial(is_universal, Path(asked["load_dir"]), asked["tag"], preferred)
        universal = from_first(everyone, WHAT, here)

        def fits() -> tuple[None, list[list[str]]]:
            return None, [check(engine, core, asked["load_dir"], asked["tag"], with_state)] * len(ranks)

        if not universal:
            agree_in_all(ranks, optimizer.name, fits)
        if engine.zero_optimization_stage() == 3:
            # With load_module_only alone, DeepSpeed silently reads the weights from a file that has none.
            asked["load_optimizer_states"] = with_state
        loaded: tuple[str | None, dict[str, Any] | None]
        if universal:
            loaded = _load(engine, optimizer, everyone, asked, with_state)
        else:
            engine._config.load_universal_checkpoint = False
            try:
                with _as_configured(engine.optimizer):
                    loaded = load(*call.args, **call.kwargs)
            finally:
                engine._config.load_universal_checkpoint = preferred
        if loaded[0] is not None and with_state and any(map(quantized_keys, optimizer.param_groups)):
            optimizer.state_store()  # which quantizes what was loaded: fp32 is not kept until the next step
        if loaded[0] is not None:  # the step begins anew; DeepSpeed goes on with an accumulation
            optimizer.gradients.drop()
            engine.micro_steps = 0
        return loaded

    engine.load_checkpoint = load_checkpoint


@contextmanager
def _as_configured(wrapper: Any) -> Iterator[None]:
    """Keep what the configuration says where DeepSpeed 0.19.8 takes what the checkpoint says: the norm at which
    gradients are clipped, and a loss scale unless both are dynamic, for those of other precisions are not."""
    keys = [key for key in ("clip_grad", "loss_scaler", "dynamic_loss_scale") if hasattr(wrapper, key)]
    configured = {key: getattr(wrapper, key) for key in keys}
    yield
    if "loss_scaler" in configured and configured["loss_scaler"].dynamic and wrapper.loss_scaler.dynamic:
        configured["loss_scaler"] = wrapper.loss_scaler
    for key, value in configured.items():
        setattr(wrapper, key, value)


def _take_frozen_since(engine: DeepSpeedEngine) -> None:
    """Let weights alone load into parameters that were trained at the save and are frozen here. DeepSpeed 0.19.8 puts
    them there from the module's state dict, and then takes the files' frozen parameters, which lack them: KeyError."""
    load = engine.load_module_state_dict

    @functools.wraps(load)
    def load_module_state_dict(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        frozen = checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        if frozen is not None:
            here = {name: getattr(param, "ds_tensor", param) for name, param in engine.module.named_parameters()}
            checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: {**here, **frozen}}
        return load(checkpoint, *args, **kwargs)

    engine.load_module_state_dict = load_module_state_dict


def _load(
    engine: DeepSpeedEngine, optimizer: Any, everyone: Collectives, asked: Mapping[str, Any], with_state: bool
) -> tuple[str, dict[str, Any]]:
    """Load what ``engine.load_checkpoint`` was ``asked`` for; returns the folder and the client state.

    The first of ``everyone`` reads the contents without tensors, and sends them. Raises, on every rank and before
    anything is changed, if the checkpoint does not fit, or if a file is damaged: each rank checks a share of the files.
    Then each reads its pieces; after an error, which every rank raises, no rank takes a step before a load succeeds.
    """
    store: StateStore = optimizer.state_store()
    folder, checkpoint, files = from_first(everyone, WHAT, lambda: open_folder(asked, ties.names_in(engine.module)))

    def decide() -> tuple[Choice, list[list[str]]]:
        choice = choose(engine, store, (folder, checkpoint), asked, with_state)
        return choice, [[setting(key, str(asked[key])) for key in ("load_dir", "tag")]] * len(store.ranks)

    choice = agree_in_all(store.ranks, WHAT, decide)
    check_on_all(everyone, WHAT, lambda: check_files(files[everyone.rank :: everyone.world_size]))
    parts = {"weights", "state"} if with_state else {"weights"}
    optimizer.half_loaded |= parts
    check_on_all(everyone, WHAT, lambda: _put(store, choice, with_state))
    store.publish()
    check_on_all(everyone, WHAT, lambda: _put_rest(engine, choice))
    optimizer.take_loaded(choice.options)
    if with_state:
        scaler, saved = getattr(engine.optimizer, "loss_scaler", None), choice.checkpoint.arguments.get("loss_scaler")
        if saved and getattr(scaler, "dynamic", False) and saved.get("dynamic"):  # of fp16, with its counters
            for key in saved.keys() & vars(scaler).keys():
                setattr(scaler, key, saved[key])
    optimizer.half_loaded -= parts
    notes = [*choice.notes, *([] if asked["load_module_only"] else _go_on(engine, choice, asked))]
    if engine.global_rank == 0:
        for note in notes:
            logger.warning(note)
    return str(choice.folder), in_memory(choice.checkpoint.client)


def _put(store: StateStore, choice: Choice, with_state: bool) -> None:
    """Load weights (into masters, if there are any), state, and owner state."""
    weights = {name: param.best for name, param in choice.params.items()}
    state: dict[str, dict[str, Whole]] = {name: dict(param.states) for name, param in choice.params.items()}
    for name, param in choice.params.items():
        if param.step is not None:
            state[name][STEP] = torch.tensor(param.step)
    put(store, weights=weights, state=state if with_state else None)
    if with_state:
        store.take_owner_states({name: param.owner_states for name, param in choice.params.items()})


@torch.no_grad()
def _put_rest(engine: DeepSpeedEngine, choice: Choice) -> None:
    """Load buffers and frozen parameters: of tensor-parallel ones this rank's shard, while the first rank reads those
    that stage 3 has partitioned. Called on all ranks, and raises at the end, because ranks gather them together."""
    first = first_experts(engine)
    named = [*engine.module.named_buffers(), *engine.module.named_parameters()]
    there = {renumbered(name, first): tensor for name, tensor in named}
    failures: list[Exception] = []
    for name, tensor in choice.rest.items():
        into, is_cut = there[name], hasattr(there[name], "ds_shape")
        with GatheredParameters([into], modifier_rank=0) if is_cut else nullcontext():
            try:
                if not is_cut:
                    into.data.copy_(shard_of(engine, into, tensor.read()))
                elif engine.global_rank == 0:
                    into.data.copy_(tensor.read())
            except Exception as error:
                failures.append(error)
    if failures:
        raise failures[0]


def _go_on(engine: DeepSpeedEngine, choice: Choice, asked: Mapping[str, Any]) -> list[str]:
    """Restore the engine's counters and the scheduler's state, if asked for; otherwise return advice about a scheduler
    at another step than the checkpoint."""
    checkpoint, scheduler = choice.checkpoint, engine.lr_scheduler
    engine.global_steps = checkpoint.iteration or 0
    engine.global_samples = checkpoint.samples or engine.global_steps * engine.train_batch_size()
    engine.skipped_steps = checkpoint.arguments.get("skipped_steps", 0)
    if asked["load_lr_scheduler_states"]:
        if scheduler is not None:
            scheduler.load_state_dict(in_memory(checkpoint.scheduler or {}))
        return []
    steps = engine.global_steps - engine.skipped_steps
    for key, there in {"last_epoch": steps, "last_batch_iteration": steps - 1}.items():  # torch's, and DeepSpeed's
        here = getattr(scheduler, key, None)
        if here not in (None, there):
            return [
                f"{choice.folder}: the scheduler's state is not loaded, so the scheduler continues from its {key} "
                f"{here}, but the checkpoint was saved after {steps} steps; leave it so to warm up anew; to continue "
                f"its schedule, set {key} to {there} after loading"
            ]
    return []


def is_universal(root: Path, tag: str | None, preferred: bool) -> bool:
    """Whether a load of this tag in ``root``, or of the newest, is of a universal checkpoint. If neither kind is there,
    or both are, it is if ``preferred``."""
    if tag is None:
        own, ours = ((root / name).is_file() for name in ("latest", deepspeed_universal.POINTER))
    else:
        ours = formats.recognises("universal", root / str(tag))
        own = (root / str(tag)).is_dir() and not ours
    return preferred if own == ours else ours


def open_folder(asked: Mapping[str, Any], tied: Mapping[str, str]) -> tuple[Path, Checkpoint, list[Path]]:
    """The folder of the checkpoint that an engine is ``asked`` for, its content, and its files. ``tied`` are further
    names in the engine's model. Raises CheckpointError."""
    root, tag = Path(asked["load_dir"]), asked["tag"]
    folder = tag_of(root, deepspeed_universal.POINTER) if tag is None else root / str(tag)
    if not formats.recognises("universal", folder):
        raise CheckpointError(
            f"expected a universal checkpoint in {folder}, found no zero/optimizer_state.pt; convert the "
            "checkpoint with lwopt convert --to universal, and load the new folder"
        )
    checkpoint = ties.of_model(deepspeed_universal.read(folder), tied)
    files = [file.stored.path for file in checkpoint.files if isinstance(file, Archive)]
    return folder, dataclasses.replace(checkpoint, files=()), files


@dataclass(frozen=True)
class Choice:
    """``params`` are the trained ones, by this model's names; ``rest`` is frozen parameters and buffers. ``options``
    are the ones that each param group takes over; ``notes`` on others are logged on rank 0."""

    folder: Path
    checkpoint: Checkpoint
    params: Mapping[str, Param]
    rest: Mapping[str, LazyTensor]
    options: Sequence[dict[str, Any]]
    notes: Sequence[str]


def choose(
    engine: DeepSpeedEngine,
    store: StateStore,
    opened: tuple[Path, Checkpoint],
    asked: Mapping[str, Any],
    with_state: bool,
) -> Choice:
    """What an engine that trains the parameters in ``store`` takes from the checkpoint that it is ``asked`` for.

    Raises ValueError for what is not supported; CheckpointError, which is a ValueError, for parameters, shapes, states
    or rules that do not fit, and, with ``load_module_strict``, for a frozen parameter or a buffer that is missing.
    """
    if asked["custom_load_fn"] is not None:
        raise ValueError("expected no custom_load_fn with a universal checkpoint; leave custom_load_fn out")
    folder, checkpoint = opened
    trained, groups = {param.name: param for param in store.params}, store.groups
    others, known = _others(engine, trained), translation.translated(checkpoint)
    by, more = translation.Writers(checkpoint), list[str]()
    writers = {name: by.of(param) for name, param in checkpoint.params.items()}
    if with_state:
        forms = {checkpoint.name_of(p.name): groups[p.group].get("momentum_form", "ema") for p in store.params}
        checkpoint, more = translation.with_our_state(checkpoint, lambda name: str(forms.get(name, "ema")))
    params, notes = _fitting(folder, checkpoint, store, {*others, *store.elsewhere}, writers if with_state else None)
    notes += [f"{folder}: {note}" for note in more]
    rest = _rest(folder, checkpoint, others, asked["load_module_strict"])
    options: list[dict[str, Any]] = [{} for _ in groups]
    if with_state:
        members: list[dict[str, Param]] = [{} for _ in groups]
        for param in store.params:
            members[param.group][param.name] = params[param.name]
        options, more = _options_of(folder, checkpoint, groups, members, known)
        notes += more
    with_scheduler = asked["load_lr_scheduler_states"] and not asked["load_module_only"]
    if with_scheduler and engine.lr_scheduler is not None:
        of_groups = [{params[p.name].group for p in store.params if p.group == number} for number in range(len(groups))]
        scheduler = _by_group(checkpoint.scheduler, of_groups, len(checkpoint.groups))
        checkpoint = dataclasses.replace(checkpoint, scheduler=scheduler)
        _check_scheduler(folder, engine.lr_scheduler.state_dict(), checkpoint.scheduler)
    return Choice(folder, checkpoint, params, rest, options, notes)


def _others(engine: DeepSpeedEngine, trained: Mapping[str, TrainedParam]) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the module's frozen parameters, and of the buffers that its state dict has."""
    saved = engine.module.state_dict().keys()  # also at stage 3: only the parameters' data is elsewhere
    buffers = {name: tuple(buffer.shape) for name, buffer in engine.module.named_buffers() if name in saved}
    shapes = {name: full_shape(param) for name, param in engine.module.named_parameters()}
    first = first_experts(engine)
    named = {renumbered(name, first): shape for name, shape in {**shapes, **buffers}.items()}
    return {name: shape for name, shape in named.items() if name not in trained}


def _fitting(
    folder: Path, checkpoint: Checkpoint, store: StateStore, others: Collection[str], writers: WriterOf | None
) -> tuple[dict[str, Param], list[str]]:
    """The trained parameters in the checkpoint, by this model's names, and sentences about permitted differences.

    Raises CheckpointError for other parameters or shapes than here and for other state; not for state without
    ``writers``, those who wrote that of the checkpoint's parameters.
    """
    names = {param.name: checkpoint.name_of(param.name) for param in store.params}
    params = {name: checkpoint.params[theirs] for name, theirs in names.items() if theirs in checkpoint.params}
    left = {*checkpoint.params} - {*names.values(), *others, *map(checkpoint.name_of, others)}
    there: dict[str, dict[str, Any]] = {name: {} for name in left}
    there |= {name: {"shape": p.shape} for name, p in params.items()}
    here: dict[str, dict[str, Any]] = {param.name: {"shape": param.shape} for param in store.params}
    if writers is not None:
        for name, saved in params.items():
            here[name]["status"], there[name]["status"] = "trained", "trained" if saved.states else "frozen"
    notes: list[str] = []
    params |= _stepped_together(store, params)
    keep_any = any(param.owner_states for param in checkpoint.params.values())
    for unit in store.units if writers is not None else ():
        first = params.get(unit[0].name)
        for param in (param for param in unit if param.name in params):
            by = (writers or {}).get(names[param.name])
            if isinstance(by, ValueError):
                raise CheckpointError(f"{folder}: parameter {param.name!r}: {by}; {ALONE}")
            mine, theirs, more = _facts_of_state(checkpoint, store.groups[param.group], param, params, keep_any)
            theirs = theirs if by is None else {**theirs, "rule": by.rule}
            here[param.name] |= {**mine, "counters": {STEP: first.step} if first and STEP in mine["state"] else None}
            there[param.name] |= {**theirs, "counters": {STEP: params[param.name].step}}
            notes += [f"{folder}: {note}" for note in more]
    advice = f"its names are {checkpoint.names!r}; convert it with lwopt convert --names if the model's differ"
    to_do = {"matrices": TO_DO["matrices"], "counters": TO_DO["counters"], "status": "freeze it", KEPT: BY_CONVERT}
    to_do = {**TO_DO, **{fact: f"{text}, or {ALONE}" for fact, text in to_do.items()}}
    for reason in reasons(here, there, advice=advice, to_do=to_do, alone=ALONE):
        raise CheckpointError(f"{folder}: {reason}")
    return params, notes


def _stepped_together(store: StateStore, params: Mapping[str, Param]) -> dict[str, Param]:
    """Parameters that were never stepped, with the count of those that are stepped with them as one tensor here."""
    found: dict[str, Param] = {}
    for unit in store.units:
        names = [param.name for param in unit if param.name in params]
        counts = {params[name].step for name in names} - {None, 0.0}
        if len(counts) == 1:
            (count,) = counts
            found |= {n: dataclasses.replace(params[n], step=count) for n in names if params[n].step == 0.0}
    return found


def _facts_of_state(
    checkpoint: Checkpoint, group: Group, trained: TrainedParam, params: Mapping[str, Param], keep_any: bool
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Facts of a parameter's state, here and in the checkpoint, and sentences about permitted differences.

    A matrix that never had a gradient has no owner state; if other matrices have some, it starts fresh.
    """
    param, ours, rule = params[trained.name], trained.matrices, trained.rule
    like = new_state(torch.empty(1, device="meta"), group)
    steps = {STEP} & {*like} if param.step is not None else set()
    number = len(checkpoint.groups) if param.group is None else param.group
    by = checkpoint.groups[number].get("rule") if number in range(len(checkpoint.groups)) else None
    here: dict[str, Any] = {"rule": rule, "state": sorted(key for key, t in like.items() if t.ndim or key == STEP)}
    there: dict[str, Any] = {"rule": by, "state": sorted({*param.states} - {MASTER} | steps)}
    theirs = (checkpoint.arguments.get("matrices") or {}).get(checkpoint.name_of(trained.name))  # if recorded
    theirs, kept = None if theirs is None else list(theirs), sorted(param.owner_states)
    keeps = rule in MATRIX_RULES and keeps_state(MATRIX_RULES[rule].build(**arguments(group)))
    whose, notes = f"parameter {trained.name!r}, which {rule!r} trains", []
    if keeps and kept:
        here["matrices"], there["matrices"] = ours, theirs
    elif theirs not in (None, ours):
        notes.append(f"{whose} as the matrices {ours}, was trained as {theirs}; the updates differ")
    if not keeps or checkpoint.iteration != 0:
        here[KEPT], there[KEPT] = list(range(len(ours))) if keeps else [], kept
    if keeps and by == rule and keep_any and {*kept} < {*range(len(ours))}:
        there[KEPT] = None
        notes.append(f"{whose}: {len(ours) - len(kept)} of {len(ours)} matrices have no saved state and start without")
    return here, there, notes


def _rest(
    folder: Path, checkpoint: Checkpoint, others: Mapping[str, tuple[int, ...]], strict: bool
) -> dict[str, LazyTensor]:
    """Tensors for frozen parameters and buffers, by name; DeepSpeed's converter saves both as parameters."""
    found = {}
    for name, shape in others.items():
        there = checkpoint.params.get(checkpoint.name_of(name))
        tensor = checkpoint.buffers.get(name) if there is None or name in checkpoint.buffers else there.best
        if tensor is not None:
            _check_shape(folder, name, shape, tensor.shape)
            found[name] = tensor
        elif strict:
            raise CheckpointError(
                f"{folder}: expected {name!r}, which is frozen or a buffer, in the files of model states, found none; "
                "with load_module_strict=False it keeps its values"
            )
    return found


def _check_shape(file: Path, name: str, expected: Sequence[int], found: Sequence[int]) -> None:
    if tuple(expected) != tuple(found):
        raise CheckpointError(
            f"{file}, parameter {name!r}: expected shape {tuple(expected)}, found {tuple(found)}; load it into the "
            "same model"
        )


def _options_of(
    folder: Path,
    checkpoint: Checkpoint,
    groups: Groups,
    members: Sequence[Mapping[str, Param]],
    known: tuple[list[dict[str, Any]], list[str]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """The options that each of the param ``groups`` takes over, and sentences about those that it does not take.

    ``members`` are, by group, its parameters in the checkpoint, by this model's names; ``known`` are the checkpoint's
    groups under this package's options, and sentences on them. Raises CheckpointError if they have other rules, or
    options that one group cannot have.
    """
    translated, notes = known
    # Megatron's Muon has used two names for its momentum.
    saved = [{"momentum": g["momentum_beta"], **g} if "momentum_beta" in g else g for g in checkpoint.groups]
    checkpoint = dataclasses.replace(checkpoint, groups=tuple(saved))
    said: dict[str, None] = {}  # arguments of the other optimizer outside its groups, with other values here
    for number, (group, of_group) in enumerate(zip(groups, members)):
        for theirs in sorted({p.group for p in of_group.values() if p.group is not None and p.group < len(saved)}):
            made = translated[theirs]
            if "rule" in saved[theirs] or made.get("rule") != group["rule"]:
                continue
            keys = [key for key in known_in(group) if key in made and key not in saved[theirs]]
            listed = [f"{key} {made[key]!r} (here {group.get(key)!r})" for key in keys if made[key] != group.get(key)]
            if listed:
                trained = f"param group {number} was trained with {', '.join(listed)} where it comes from"
                said[f"{folder}: {trained}, and continues with the options configured here"] = None
    notes = [*(f"{folder}: {note}" for note in notes), *said]
    numbered = enumerate(zip(groups, members))
    return [_options(folder, checkpoint, i, group, of_group, notes) for i, (group, of_group) in numbered], notes


def _options(
    folder: Path, checkpoint: Checkpoint, number: int, group: Group, members: Mapping[str, Param], notes: list[str]
) -> dict[str, Any]:
    """The options that param group ``number`` takes over. ``members`` are its parameters in the checkpoint.

    Groups of this package's optimizers name their rule, and give all keys but ``PLACED``. Others give the rule's
    options, and what torch's schedulers keep in groups.
    """
    numbers = sorted({p.group for p in members.values() if p.group is not None and p.group < len(checkpoint.groups)})
    theirs = [checkpoint.groups[n] for n in numbers]
    ours = all("rule" in of_group for of_group in theirs)
    written = IN_GROUPS if all("initial_lr" in of_group for of_group in theirs) else ()  # Megatron has other max_lr
    wanted = {*known_in(group), "initial_lr", *written}
    keys = dict.fromkeys(key for of_group in theirs for key in of_group)
    taken: dict[str, Any] = {}
    for key in (key for key in keys if (key not in PLACED if ours else key in wanted)):
        values = [of_group.get(key) for of_group in theirs]
        if all(value == values[0] for value in values):
            taken[key] = values[0]
            continue
        whose = f"param group {number} here has parameters of the checkpoint's groups {numbers}"
        text = f"{folder}: {whose}, whose {key!r} are {values}"
        if ours:
            raise CheckpointError(f"{text}; make the param groups of the checkpoint, or {ALONE}")
        notes.append(f"{text}; it keeps {group.get(key)}, as configured")
    check_group({**group, **taken}, f"{folder}: param group {number} ({group['rule']})")
    return taken


def _by_group(
    state: Mapping[str, Any] | None, of_groups: Sequence[set[int | None]], count: int
) -> Mapping[str, Any] | None:
    """A scheduler's state with an entry for each param group here. The checkpoint's ``count`` groups may differ, as on
    another pipeline stage: ``of_groups`` are those with parameters of each."""
    numbers = [sorted(number for number in of_group if number is not None)[:1] for of_group in of_groups]
    if state is None or not all(numbers):
        return state
    found: Mapping[str, Any] = regrouped(state, [number for (number,) in numbers], count)
    return found


def _check_scheduler(folder: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> None:
    """Check the form: a scheduler loads any state, and later fails or continues with another scheduler's numbers."""

    def form(state: Mapping[str, Any]) -> list[tuple[str, int | None]]:
        return sorted((key, len(value) if isinstance(value, list) else None) for key, value in state.items())

    if theirs is None or form(theirs) != form(ours):
        raise CheckpointError(
            f"{folder}: expected the state of this scheduler, with {sorted(ours)}, found "
            f"{'none' if theirs is None else sorted(theirs)}; use the checkpoint's scheduler and param groups, or "
            "load_lr_scheduler_states=False"
        )
