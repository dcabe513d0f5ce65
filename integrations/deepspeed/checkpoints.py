"""DeepSpeed's own checkpoints of this package's engines: all ranks refuse one that does not fit before it is loaded.

DeepSpeed notices late and rank by rank: it compares world sizes after it has loaded the weights. At stage 3, ranks with
missing files leave while the others wait for them. It loads some checkpoints in part without an error. The file of
model states has enough facts, and is read here without its tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.deepspeed.files import NAMES, inner, load_mapping
from lwopt_backend.checkpoint.deepspeed.zero import MARK
from lwopt_backend.checkpoint.files.pickles import options
from lwopt_backend.config.hosts import THESE_OF_BUCKETS
from lwopt_backend.engines.buffers.step import BufferCore
from lwopt_backend.groups.param_groups import of_another_optimizer
from lwopt_backend.groups.registry import check_group
from lwopt_backend.integrations.deepspeed.tensors import mark
from lwopt_backend.integrations.deepspeed.zero import ALONE
from lwopt_backend.runtime.collectives import Collectives
from lwopt_backend.runtime.state import TO_DO, check_fits

BY_UNIVERSAL = "convert the folder with lwopt convert SRC DST --to universal, and load DST"
CONVERT, CONVERT_OWNED = (
    f"{what} needs DeepSpeed's universal format: {BY_UNIVERSAL}"
    for what in ("A different number of ranks", "A different number of ranks or layout")
)
AS_SAVED = "load it with the optimizer, the model, the param groups, 'include' and 'exclude' it was saved with"
AS_LAID_OUT = f"load it with the {THESE_OF_BUCKETS} it was saved with"


@dataclass(frozen=True)
class SavedFacts:
    """A checkpoint's description of itself. ``groups`` has the parameters' names, one list per param group of the
    optimizer (stages 1 and 2) or per sub-group (stage 3); None at stage 0, where ``names`` has them. ``owned`` is the
    mark of owned storage, ``stranger`` describes another optimizer that wrote it. ``shards`` is the number of
    tensor-parallel ranks, or of pipeline stages. ``options`` are this package's param groups."""

    world_size: int
    groups: list[list[str]] | None
    names: list[list[str]] | None = None
    owned: Mapping[str, Any] | None = None
    stranger: str | None = None
    shards: int = 1
    options: Sequence[Mapping[str, Any]] = ()


def prepare_saving(engine: DeepSpeedEngine, optimizer: Any, ranks: Collectives) -> None:
    """Make a save wait for the files of all ranks before DeepSpeed's rank 0 names it in ``latest``. DeepSpeed does not
    wait, and a run that is killed meanwhile would leave ``latest`` at a checkpoint with missing files. The ranks'
    options are compared before.

    At stage 0 with experts, DeepSpeed asks only some ranks for the state of ``optimizer``, but all gather it, so all do
    that first."""
    save = engine.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        optimizer.check_loaded()
        optimizer.compare_options()
        writer = engine.checkpoint_engine
        commit = writer.commit

        def commit_after_all(info: Any) -> Any:
            ranks.barrier()
            return commit(info)

        writer.commit = commit_after_all
        if engine.has_moe_layers and engine.zero_optimization_stage() == 0:
            optimizer.gathered = optimizer.state_dict()
        try:
            return save(*args, **kwargs)
        finally:
            del writer.commit
            optimizer.gathered = None

    engine.save_checkpoint = save_checkpoint


def check(
    engine: DeepSpeedEngine, core: BufferCore | None, load_dir: str, tag: str | None, with_state: bool
) -> list[str]:
    """Raises ValueError for a checkpoint of another world size, ZeRO stage, storage or optimizer. Returns lines that
    must be equal on all ranks. For a missing checkpoint DeepSpeed warns and returns (None, None).

    ``core`` is the engine's owned storage, if it has that.
    """
    latest = Path(load_dir, "latest")
    named = latest.read_text().strip() if latest.is_file() else None
    if tag is None and named is None:
        return ["no checkpoint"]
    if tag is None and not named:  # DeepSpeed empties the file before it writes it
        tags = sorted(path.name for path in Path(load_dir).iterdir() if path.is_dir())
        raise ValueError(
            f"{latest} is empty, because the save that wrote it was interrupted; load one of the tags by its "
            f"name, load_checkpoint(..., tag=...): {', '.join(tags)}"
        )
    folder = Path(load_dir) / str(named if tag is None else tag)
    stage = engine.zero_optimization_stage()
    saved = _read(folder, engine, with_state)
    if not engine.pipeline_parallelism and saved.shards != engine.mp_world_size:
        raise ValueError(
            f"the checkpoint {str(folder)!r}: expected {engine.mp_world_size} tensor-parallel ranks, found "
            f"{saved.shards}; load it on {saved.shards}. {CONVERT}"
        )
    if with_state:
        _check_optimizer(folder, saved, core, stage)
        for number, group in enumerate(saved.options):
            check_group(group, f"the checkpoint {str(folder)!r}: param group {number} ({group['rule']})")
    here, saved_on = engine.seq_dp_world_size, saved.world_size
    by_weights = stage < 3 or here <= saved_on  # at stage 3, every rank reads its own file
    if stage != 0 and here != saved_on and (with_state or not by_weights):
        raise ValueError(
            f"the checkpoint {str(folder)!r}: expected {here} data-parallel ranks, found {saved_on}; load it on "
            f"{saved_on}. {CONVERT if core is None else CONVERT_OWNED}"
            + ("; the weights alone can be loaded, with load_optimizer_states=False" if by_weights else "")
        )
    if stage == 3 and not with_state and folder.name != named:
        raise ValueError(
            f"expected tag {folder.name!r} in the file 'latest', from which DeepSpeed loads weights alone at stage 3, "
            f"found {named!r}; write {folder.name!r} into that file"
        )
    if with_state and core is not None:
        _check_owned(folder, saved.owned, core, stage)
    elif with_state and saved.groups is not None:
        _check_groups(folder, saved.groups, [list(group) for group in engine._get_zero_param_shapes()])
    elif with_state and saved.names is not None:
        engine.basic_optimizer._checked.arrange(engine.basic_optimizer.param_groups)
        params = [group["params"] for group in engine.basic_optimizer.param_groups]
        _check_groups(folder, saved.names, [[engine.param_names[param] for param in group] for group in params])
    return [f"{folder.name}, saved on {saved.world_size} ranks"]


def _check_optimizer(folder: Path, saved: SavedFacts, core: BufferCore | None, stage: int) -> None:
    """Raises ValueError for the state of another optimizer, storage or stage."""
    if saved.stranger is not None:  # its state has other names and other groups
        raise ValueError(
            f"the checkpoint {str(folder)!r}: expected this optimizer's state, found another's ({saved.stranger}); "
            "load the weights alone, with engine.load_checkpoint(..., load_optimizer_states=False), best after lwopt "
            "convert SRC DST --to universal, which keeps fp32 master weights. lwopt_backend.migration can load another "
            "Muon's momentum"
        )
    if core is None and saved.owned is not None:
        raise ValueError(
            f'the checkpoint {str(folder)!r} was saved with "storage": "owned"; load it with that, {BY_UNIVERSAL}, or '
            f"{ALONE}"
        )
    if (saved.groups is None) != (stage == 0):
        raise _wrong_stage(folder, "0" if saved.groups is None else "1 or 2", stage)


def _read(folder: Path, engine: DeepSpeedEngine, with_state: bool) -> SavedFacts:
    """Read the file of this rank's model-parallel part and, with ``with_state``, its optimizer's file."""
    stage = engine.zero_optimization_stage()
    name = f"mp_rank_{engine.checkpoint_mp_rank:02d}_model_states.pt"
    by_rank = f"zero_pp_rank_0_{name}"
    file, other = (folder / by_rank, folder / name) if stage == 3 else (folder / name, folder / by_rank)
    if not file.is_file():
        if other.is_file():
            raise _wrong_stage(folder, "0, 1 or 2" if stage == 3 else "3", stage)
        raise ValueError(f"the checkpoint {str(folder)!r}: expected a file {file.name!r}; load another tag")
    states = _without_tensors(file)
    shapes = states.get("param_shapes")
    optimizer = states.get("optimizer")
    if with_state and shapes is not None and stage > 0 and states["dp_world_size"] == engine.seq_dp_world_size:
        of_rank = Path(engine._get_zero_ckpt_name(str(folder.parent), folder.name))
        if not of_rank.is_file():
            raise ValueError(
                f"the checkpoint {str(folder)!r} has no file {of_rank.name!r}: its save was interrupted (load another "
                "tag), or it was made in another precision; load it in the precision it was saved in"
            )
        optimizer = _without_tensors(of_rank)["optimizer_state_dict"]
    owned = optimizer.get(MARK) if isinstance(optimizer, Mapping) else None
    groups = None if shapes is None else [list(group) for group in shapes]
    names = optimizer.get(NAMES) if isinstance(optimizer, Mapping) else None
    stranger, shards = None if owned else _stranger(states, optimizer), states.get("mp_world_size") or 1
    ours = [options(group) for group in inner(optimizer).get("param_groups") or () if "rule" in group]
    return SavedFacts(states["dp_world_size"], groups, names, owned, stranger, shards, ours)


def _stranger(states: Mapping[str, Any], optimizer: Any) -> str | None:
    """A description of the optimizer that wrote a checkpoint, if its param groups are another optimizer's."""
    groups: Any = inner(optimizer).get("param_groups")
    if not of_another_optimizer(groups):
        return None
    name = ((states.get("ds_config") or {}).get("optimizer") or {}).get("type")
    options = ", ".join(key for key in groups[0] if key != "params")
    return f"its ds_config says {name!r}" if name else f"its param groups have {options}"


def _without_tensors(file: Path) -> Mapping[str, Any]:
    try:
        return load_mapping(file)
    except CheckpointError as error:
        raise ValueError(
            f"{str(file)!r} cannot be read ({error}): its save was interrupted, or it was damaged; load another tag"
        ) from error


def _wrong_stage(folder: Path, saved_at: str, stage: int) -> ValueError:
    return ValueError(
        f"the checkpoint {str(folder)!r}: expected ZeRO stage {stage}, found {saved_at}; load it at the stage it was "
        f"saved at (1 and 2 can load each other's), or {BY_UNIVERSAL}"
    )


def _check_groups(folder: Path, saved: list[list[str]], ours: list[list[str]]) -> None:
    """DeepSpeed copies by position and notices only different lengths, with an error about alignment."""
    sides = (
        {
            name: {"place": f"{place} of group {number} of {len(groups)}"}
            for number, group in enumerate(groups)
            for place, name in enumerate(group)
        }
        for groups in (ours, saved)
    )
    check_fits(f"the checkpoint {str(folder)!r}", *sides, advice=AS_SAVED)


def _check_owned(folder: Path, owned: Mapping[str, Any] | None, core: BufferCore, stage: int) -> None:
    if owned is None:
        raise ValueError(
            f'the checkpoint {str(folder)!r}: expected "storage": "owned", found another, which has the optimizer\'s '
            f"state in other pieces; load it with the storage it was saved with, {BY_UNIVERSAL}, or {ALONE}"
        )
    to_do = {**TO_DO, "place": AS_SAVED, "elements": f"{AS_LAID_OUT}. {CONVERT_OWNED}"}
    for in_parts in (False, True) if stage > 0 else (False,):
        sides = (_facts(of_rank, in_parts) for of_rank in (mark(core), owned))
        check_fits(f"the checkpoint {str(folder)!r}", *sides, advice=AS_SAVED, to_do=to_do, alone=ALONE)


def _facts(mark: Mapping[str, Any], in_parts: bool) -> dict[str, dict[str, Any]]:
    """Facts of the parameters in a mark of owned storage. ``in_parts``: a rank saves its own parts of them."""
    found: dict[str, dict[str, Any]] = {}
    for place, (name, shape, rule, matrices) in enumerate(mark["members"]):
        found[name] = {"shape": tuple(shape), "rule": rule, "matrices": matrices, "place": place}
        if in_parts:
            found[name]["elements"] = tuple(mark["pieces"].get(name, ("none",)))
    return found
