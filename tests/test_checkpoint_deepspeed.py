"""DeepSpeed's checkpoints, native and universal: read as the engines held them, and loaded into engines again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.deepspeed import universal_reader as deepspeed_universal
from lwopt_backend.checkpoint.deepspeed import universal_writer as write_universal
from lwopt_backend.checkpoint.deepspeed import zero_reader as deepspeed_zero
from lwopt_backend.checkpoint.files.folders import write_folder
from tests.checkpoint_engines import FROZEN, Buffered, assert_holds, flip, held, save, scheduled, settings_for
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.test_rules_on_engines import ds_config
from tests.zero import Reference, engine_for, train

PATIENCE = 600.0  # the first engine with torch's AdamW imports a compiler
SHARDED = [(stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")] + [(1, "bf16+fp32")]
NATIVE = [
    *((optimizer, *at) for optimizer in ("adamw", "host") for at in SHARDED),
    *(("deepspeed muon", stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    *(("owned", stage, precision) for stage in (0, 1, 2) for precision in ("fp32", "bf16")),
    *(("adamw", 0, precision) for precision in ("fp32", "bf16")),
]


def universal(source: Path, folder: Path) -> Checkpoint:
    """Convert a native checkpoint; what was converted."""
    checkpoint = deepspeed_zero.read(source)
    pointers = {"latest_universal": "step3"}
    write_folder(folder / "step3", lambda new: write_universal.write(checkpoint, new), pointers=pointers)
    return checkpoint


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    """All of it, but for what tells where it came from."""
    assert list(found.params) == list(expected.params)
    for name, theirs in expected.params.items():
        ours = found.params[name]
        assert (ours.step, ours.group, ours.states.keys()) == (theirs.step, theirs.group, theirs.states.keys())
        assert (ours.weight is None) == (theirs.weight is None)
        for a, b in zip([ours.weight, *ours.states.values()], [theirs.weight, *theirs.states.values()]):
            assert a is None or b is not None and a.dtype == b.dtype and torch.equal(a.read(), b.read())
        assert repr(dict(ours.owner_states)) == repr(dict(theirs.owner_states))
    for key in ("groups", "arguments", "iteration", "samples", "scheduler", "world", "tied", "client", "names"):
        assert getattr(found, key) == getattr(expected, key), key
    assert {k: t.read().tolist() for k, t in found.buffers.items()} == {
        k: t.read().tolist() for k, t in expected.buffers.items()
    }


@pytest.mark.parametrize(("optimizer", "stage", "precision"), NATIVE)
def test_native_checkpoints_are_read_as_the_engine_held_them_and_so_is_the_universal_one(
    ranks: RankPool, tmp_path: Path, optimizer: str, stage: int, precision: str
) -> None:
    native, converted = tmp_path / "native", tmp_path / "universal"
    truth = ranks.run(save, str(native), (optimizer, stage, precision), timeout=PATIENCE)[0]
    assert deepspeed_zero.recognises(native) and deepspeed_zero.recognises(native / "global_step3")
    assert not deepspeed_universal.recognises(native)
    checkpoint = universal(native, converted)
    assert_holds(checkpoint, truth)
    assert all(torch.equal(a.read(), b.read()) for _, a, b in checkpoint.replicas)
    assert (checkpoint.iteration, checkpoint.samples, checkpoint.client) == (3, 24, {"rows": 3})
    assert [group["lr"] for group in checkpoint.groups] == truth["rates"]
    assert deepspeed_universal.recognises(converted) and not deepspeed_zero.recognises(converted / "step3")
    again = deepspeed_universal.read(converted)
    assert_holds(again, truth)
    assert_same(again, checkpoint)


def test_momentum_that_two_ranks_of_deepspeeds_muon_keep_is_given_to_be_compared(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save, str(tmp_path), ("deepspeed muon", 2, "fp32"), timeout=PATIENCE)
    assert len(deepspeed_zero.read(tmp_path).replicas) == 1


def states_of_a_single_process() -> dict[str, dict[str, torch.Tensor]]:
    single = Reference()
    single.train(3)
    names = {id(param): name for name, param in single.model.named_parameters()}
    states = {**single.muon.state, **single.adamw.state}
    return {names[id(param)]: state for param, state in states.items()}


def test_stage_0_of_ours_has_the_state_of_a_single_process(ranks: RankPool, tmp_path: Path) -> None:
    """Its file names no parameter; a wrong name would be another state altogether."""
    ranks.run(save, str(tmp_path), ("host", 0, "fp32"), timeout=PATIENCE)
    checkpoint = deepspeed_zero.read(tmp_path)
    expected = states_of_a_single_process()
    assert set(checkpoint.params) == set(expected)
    for name, state in expected.items():
        found = checkpoint.params[name].states
        assert {"fp32", *(key for key in state if key != "step")} == set(found)
        for key in set(found) - {"fp32"}:
            torch.testing.assert_close(found[key].read(), state[key], rtol=2e-2, atol=1e-5)


# What is not trained, and the user's own


@pytest.mark.parametrize(("optimizer", "stage"), [("adamw", 1), ("host", 2), ("adamw", 3), ("owned", 1), ("adamw", 0)])
def test_frozen_and_tied_parameters_buffers_and_the_schedule_are_taken_along(
    ranks: RankPool, tmp_path: Path, optimizer: str, stage: int
) -> None:
    truth = ranks.run(save_all_kinds, str(tmp_path / "native"), optimizer, stage, timeout=PATIENCE)[0]
    universal(tmp_path / "native", tmp_path / "universal")
    for checkpoint in (deepspeed_zero.read(tmp_path / "native"), deepspeed_universal.read(tmp_path / "universal")):
        assert_holds(checkpoint, truth)
        frozen = checkpoint.params[FROZEN]
        assert not frozen.states and frozen.weight is not None
        assert torch.equal(frozen.weight.read(), UnevenLM().get_parameter(FROZEN))
        assert dict(checkpoint.tied) == {"lm_head.weight": "embedding.weight"}
        assert torch.equal(checkpoint.buffers["passes"].read(), truth["buffers"]["passes"])
        assert "scratch" not in checkpoint.buffers
        assert checkpoint.scheduler is not None and checkpoint.scheduler["last_batch_iteration"] == 2


def save_all_kinds(folder: str, optimizer: str, stage: int) -> dict[str, Any]:
    return save(folder, scheduled(settings_for(optimizer, stage)), model=AllKinds, frozen=(FROZEN,))


class AllKinds(Buffered):
    def __init__(self) -> None:
        super().__init__(tied=True)


# Universal checkpoints in engines of DeepSpeed's


def load(folder: str, stage: int, precision: str, steps: range) -> dict[str, Any]:
    settings = scheduled(settings_for("adamw", stage, precision))
    settings["checkpoint"] = {"load_universal": True}
    torch._dynamo.config.disable = True
    with engine_for(settings, UnevenLM(seed=5)) as engine:
        _, client = engine.load_checkpoint(folder)
        found = held(engine)
        found["client"] = client["rows"]
        found["losses"] = train(engine, steps, same_rows=True)
        return found


def train_on(folder: str, stage: int, precision: str) -> dict[str, Any]:
    """Train, save, and go on without a break, all ranks on all rows."""
    torch._dynamo.config.disable = True
    with engine_for(scheduled(settings_for("adamw", stage, precision))) as engine:
        train(engine, 3, same_rows=True)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        found = held(engine)
        found["losses"] = train(engine, range(3, 6), same_rows=True)
        return found


LOADS = [(1, 1), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3)]  # ranks and stage


@pytest.mark.parametrize("saved_at", [1, 3])
def test_deepspeed_itself_goes_on_from_what_we_write(
    rank_pools: dict[int, RankPool], tmp_path: Path, saved_at: int
) -> None:
    """Stock AdamW: whole weights and states to the bit, and the losses of the run that had no break."""
    native, folder = tmp_path / "native", tmp_path / "universal"
    two = rank_pools.setdefault(2, RankPool(2))
    expected = two.run(train_on, str(native), saved_at, "fp32", timeout=PATIENCE)[0]
    universal(native, folder)
    for count, stage in LOADS:
        pool = rank_pools.setdefault(count, RankPool(count))
        found = pool.run(load, str(folder), stage, "fp32", range(3, 6), timeout=PATIENCE)[0]
        assert (found["steps"], found["rates"], found["client"]) == (3, expected["rates"], 3)
        for name, weight in expected["weights"].items():
            assert torch.equal(found["weights"][name], weight), name
            for key, state in expected["states"][name].items():
                assert torch.equal(found["states"][name][key], state), (name, key)
        assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6)


def test_weights_in_bf16_go_on_from_the_masters(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(train_on, str(tmp_path / "native"), 2, "bf16", timeout=PATIENCE)[0]
    universal(tmp_path / "native", tmp_path / "universal")
    found = ranks.run(load, str(tmp_path / "universal"), 1, "bf16", range(3, 6), timeout=PATIENCE)[0]
    assert all(torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items())
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeeds_converter_makes_is_read(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    truth = ranks.run(save, str(tmp_path), ("adamw", stage, "bf16"), timeout=PATIENCE)[0]
    tag = tmp_path / "global_step3"
    converter = ["deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--num_extract_workers", "1"]
    folders = ["--num_merge_workers", "1", "--input_folder", str(tag), "--output_folder", f"{tag}_universal"]
    run = [sys.executable, "-m", *converter, *folders]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run(run, check=True, capture_output=True, timeout=PATIENCE, env=environment)
    (tmp_path / "latest_universal").write_text("global_step3_universal")
    assert deepspeed_universal.recognises(tmp_path)
    found, native = deepspeed_universal.read(tmp_path), deepspeed_zero.read(tag)
    assert_holds(found, truth)
    assert {p.step for p in found.params.values()} == {3.0} and found.iteration == 3
    assert found.groups == native.groups and list(found.params) == list(native.params)


# What owners keep


def save_rule(folder: str, stage: int, storage: str) -> dict[str, Any]:
    with engine_for(
        ds_config(stage, "soap", "adamw", **({"storage": "owned"} if storage == "owned" else {}))
    ) as engine:
        train(engine, 3, same_rows=True)
        engine.save_checkpoint(folder)
        if storage == "owned":
            core = engine.optimizer.core
            return {core.members[n].name: core.stepper.owner_states(n) for n in range(len(core.members))}
        held_by = [s.matrices.owner_state.by_name() for s in engine.basic_optimizer._steppers.values() if s.matrices]
        return {name: {0: state} for states in held_by for name, state in states.items()}


@pytest.mark.parametrize(("storage", "stage"), [("host", 1), ("host", 3), ("owned", 2), ("owned", 0)])
def test_what_owners_keep_is_read_as_it_lay_and_written_where_deepspeed_does_not_look(
    ranks: RankPool, tmp_path: Path, storage: str, stage: int
) -> None:
    truth: dict[str, Any] = {}
    for of_rank in ranks.run(save_rule, str(tmp_path / "native"), stage, storage, timeout=PATIENCE):
        truth.update({name: states for name, states in of_rank.items() if states})
    universal(tmp_path / "native", tmp_path / "universal")
    assert truth
    for checkpoint in (deepspeed_zero.read(tmp_path / "native"), deepspeed_universal.read(tmp_path / "universal")):
        found = {name: param.owner_states for name, param in checkpoint.params.items() if param.owner_states}
        assert found.keys() == truth.keys()
        for name, states in truth.items():
            assert same(dict(found[name]), states), name
        for param in checkpoint.params.values():
            assert not param.owner_states or set(param.states) == {"fp32"}
    zero = tmp_path / "universal" / "step3" / "zero"
    assert {path.name for path in zero.glob("*/*")} == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt"}


def same(a: Any, b: Any) -> bool:
    """The bits, and how they lie in memory."""
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and torch.equal(a, b) and (a.stride() == b.stride() or 1 in b.shape)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# What is damaged, or made to do harm


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def harm(file: Path) -> None:
    torch.save({"module": {}, "optimizer_state_dict": Harm(file.parent / "harmed"), "param": 1}, file)


def another(file: Path) -> None:
    torch.save({"something": torch.ones(3)}, file)


DAMAGE = {
    remove: "is missing|has no file|expected the .* files",
    truncate: "is damaged",
    flip: "is damaged",
    harm: "asks for .*mkdir",
    another: "holds no|expected|is not as DeepSpeed writes it",
}


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every form."""
    found = {}
    pool = rank_pools.setdefault(2, RankPool(2))
    for optimizer, stage in (("host", 2), ("host", 3), ("owned", 1)):
        found[f"{optimizer} {stage}"] = folder = tmp_path_factory.mktemp("native")
        pool.run(save, str(folder), (optimizer, stage, "fp32"), steps=1, timeout=PATIENCE)
    found["universal"] = tmp_path_factory.mktemp("universal")
    universal(found["host 2"], found["universal"])
    return found


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("form", ["host 2", "host 3", "owned 1", "universal"])
def test_damaged_files_are_an_error_and_nothing_of_them_is_run(
    saved: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], form: str
) -> None:
    source = tmp_path / "source"
    reader = deepspeed_universal if form == "universal" else deepspeed_zero
    intact = sorted(path.relative_to(saved[form]) for path in saved[form].rglob("*.pt"))
    for name in intact:
        if _is_spare(name, form):
            continue
        shutil.copytree(saved[form], source)
        damage(source / name)
        with pytest.raises(CheckpointError, match=DAMAGE[damage]) as raised:
            checkpoint = reader.read(source)
            write_folder(tmp_path / "target", lambda new, c=checkpoint: write_universal.write(c, new))
        assert str(source) in str(raised.value)
        assert not list(tmp_path.rglob("harmed")) and {path.name for path in tmp_path.iterdir()} == {"source"}
        shutil.rmtree(source)


def _is_spare(name: Path, form: str) -> bool:
    """The second file of model states, which is stage 3's, is read by DeepSpeed alone."""
    return form == "universal" and name.name.startswith("zero_pp_rank")


def test_a_pointer_that_leads_out_of_the_folder_is_an_error(saved: dict[str, Path], tmp_path: Path) -> None:
    for form, pointer, reader in (
        ("host 2", "latest", deepspeed_zero),
        ("universal", "latest_universal", deepspeed_universal),
    ):
        folder = tmp_path / form
        folder.mkdir()
        tag = next(path for path in saved[form].iterdir() if path.is_dir())
        (folder / pointer).write_text(os.path.relpath(tag, folder))
        assert not reader.recognises(folder)
        with pytest.raises(CheckpointError, match="leads elsewhere"):
            reader.read(folder)


def test_a_parameter_whose_name_leads_out_of_the_folder_is_not_written(saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = deepspeed_zero.read(saved["host 2"])
    params = {f"../../{name}": param for name, param in checkpoint.params.items()}
    changed = Checkpoint(**{**vars(checkpoint), "params": params})
    with pytest.raises(CheckpointError, match="leads elsewhere"):
        write_folder(tmp_path / "a" / "target", lambda new: write_universal.write(changed, new))
    assert not list(tmp_path.iterdir())


def test_parts_of_a_model_are_refused_with_the_reason(saved: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(saved["host 2"], tmp_path / "tp")
    tag = tmp_path / "tp" / "global_step1"
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="2 model-parallel ranks"):
        deepspeed_zero.read(tmp_path / "tp")
    shutil.copytree(saved["host 2"], tmp_path / "pp")
    (tmp_path / "pp" / "global_step1" / "layer_01-model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="files of their own"):
        deepspeed_zero.read(tmp_path / "pp")


def test_files_of_two_savings_are_refused(saved: dict[str, Path], ranks: RankPool, tmp_path: Path) -> None:
    """The state of one rank from another step."""
    shutil.copytree(saved["host 2"], tmp_path / "mixed")
    ranks.run(save, str(tmp_path / "other"), ("host", 2, "fp32"), steps=2, timeout=PATIENCE)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "other" / "global_step2" / name, tmp_path / "mixed" / "global_step1" / name)
    with pytest.raises(CheckpointError, match="'step' is 1.0 on the ranks before, 2.0 in"):
        deepspeed_zero.read(tmp_path / "mixed")
