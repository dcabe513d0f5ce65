"""``"checkpoint": {"load_universal": true}``: whole tensors by name, of which every rank reads what it stores.

DeepSpeed's own loader knows AdamW at stage 3 and nothing at stage 0, pairs param groups by position, and leaves
buffers and frozen parameters as they are. So ours takes its place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils.logging import logger

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.deepspeed import universal_reader as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed.folder import tag_of
from lwopt_backend.checkpoint.files import torch_files
from lwopt_backend.integrations.deepspeed_universal_choice import Choice, Stepped, choose
from lwopt_backend.runtime.agreement import agree_in_all, check_in_all
from lwopt_backend.runtime.ranks import Collectives

WHAT = "load_checkpoint"


class Storage(Protocol):
    """Where an engine has the parameters that it trains. ``ranks`` are all groups that share some with this rank."""

    ranks: Sequence[Collectives]

    def groups(self) -> Sequence[Mapping[str, Any]]: ...  # the optimizer's param groups

    def stepped(self) -> Sequence[Stepped]: ...

    def put(self, choice: Choice, with_state: bool) -> None:
        """Take what this rank stores of weights and states. It may fail on one rank alone."""

    def finish(self, choice: Choice, with_state: bool) -> None:
        """Take options, and bring weights to those who need them. Called on all ranks."""


def load_instead(engine: DeepSpeedEngine, storage: Callable[[], Storage]) -> None:
    """Make ``engine.load_checkpoint`` load universal checkpoints, into what ``storage`` gives then on all ranks."""
    signature = inspect.signature(engine.load_checkpoint)

    @functools.wraps(engine.load_checkpoint)
    def load_checkpoint(*args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        return _load(engine, storage(), call.arguments)

    engine.load_checkpoint = load_checkpoint


def _load(engine: DeepSpeedEngine, storage: Storage, asked: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Load what ``engine.load_checkpoint`` was ``asked`` for; the folder and the client's state.

    Raises ValueError, on every rank and before anything is changed, if it cannot be loaded.
    """
    alone = asked["load_module_only"]
    with_state = asked["load_optimizer_states"] and not alone
    with_scheduler = asked["load_lr_scheduler_states"] and not alone

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
            storage.stepped(),
            storage.groups(),
            folder,
            checkpoint,
            with_state=with_state,
            with_scheduler=with_scheduler,
            strict=asked["load_module_strict"],
        )
        ranks = storage.ranks[0]
        for file in sorted(files)[ranks.rank :: ranks.world_size]:  # together the ranks check every byte
            torch_files.check(file)
        return choice, [[f"{folder.name}, after {checkpoint.iteration} steps"]] * len(storage.ranks)

    choice = agree_in_all(storage.ranks, WHAT, decide)
    check_in_all(storage.ranks, WHAT, lambda: storage.put(choice, with_state))
    storage.finish(choice, with_state)
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
    """The loss scale of fp16, and what it follows."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for key, value in (choice.checkpoint.arguments.get("loss_scaler") or {}).items():
        if key in getattr(scaler, "__dict__", ()):
            setattr(scaler, key, value)


@torch.no_grad()
def _put_rest(engine: DeepSpeedEngine, choice: Choice) -> None:
    """Buffers and frozen parameters, whole; what stage 3 has cut is read by the first rank. Called on all ranks."""
    there = {**dict(engine.module.named_buffers()), **dict(engine.module.named_parameters())}
    for name, tensor in choice.rest.items():
        if hasattr(there[name], "ds_shape"):
            with GatheredParameters([there[name]], modifier_rank=0):
                if engine.global_rank == 0:
                    there[name].data.copy_(tensor.read())
        else:
            there[name].data.copy_(tensor.read())


def _count(engine: DeepSpeedEngine, choice: Choice, with_scheduler: bool) -> None:
    """Go on counting, and with the schedule, from where the checkpoint was saved."""
    checkpoint = choice.checkpoint
    engine.global_steps = checkpoint.iteration or 0
    engine.global_samples = checkpoint.samples or engine.global_steps * engine.train_batch_size()
    engine.skipped_steps = checkpoint.arguments.get("skipped_steps", 0)
    if with_scheduler and engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(dict(checkpoint.scheduler or {}))


def _scheduler_notes(engine: DeepSpeedEngine, choice: Choice) -> list[str]:
    """What to do about a schedule that is not loaded, where it stands elsewhere than the checkpoint's."""
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
