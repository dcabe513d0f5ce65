"""Checkpoints of every engine are read as the engine held them; DeepSpeed's and torch's own go on from ours."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from lwopt_backend import LayerWiseOptimizer as OwnedOptimizer
from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.dcp import reader as read_dcp
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.deepspeed import universal as read_universal
from lwopt_backend.checkpoint.deepspeed import universal as write_universal
from lwopt_backend.checkpoint.deepspeed import zero as read_zero
from lwopt_backend.checkpoint.deepspeed.files import SAVE
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.checkpoint.files.folders import write_folder
from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from lwopt_backend.storage.owned_state import state_pieces
from tests import checkpoint_engines as engines
from tests.cells import cells
from tests.checkpoint_contents import params_of, same
from tests.checkpoint_engines import FROZEN, PARTS, assert_holds
from tests.fsdp2 import shard
from tests.models import UnevenLM
from tests.on_ranks import on_ranks
from tests.owned import BUCKET_MB
from tests.owned import train as train_owned
from tests.ranks import RankPool
from tests.rules import ELEMENTWISE, SECTIONS
from tests.zero import engine_for, train

PATIENCE = 600.0  # the first engine with torch's AdamW imports a compiler


# DeepSpeed


def universal(source: Path, folder: Path) -> Checkpoint:
    """Convert a native checkpoint; what was converted."""
    checkpoint = read_zero.read(source)
    pointers = {"latest_universal": "step3"}
    write_folder(folder / "step3", lambda new: write_universal.write(checkpoint, new), pointers=pointers)
    return checkpoint


def save_scheduled(folder: str, *how: Any, **options: Any) -> dict[str, Any]:
    return engines.save(folder, engines.scheduled(engines.settings_for(*how)), **options)


def there_is(optimizer: str, stage: int, precision: str, kinds: str) -> bool:
    """DeepSpeed has each; of frozen and tied parameters only those whose names the checkpoint tells.

    Ours at stage 0 is in tests/test_zero_universal.py: its file names no parameter, and a run goes on with it exactly.
    """
    stages = {"adamw": (0, 1, 2, 3), "host": (1, 2, 3), "deepspeed muon": (1, 2, 3), "owned": (0, 1, 2)}[optimizer]
    if precision == "bf16+fp32" and (stage != 1 or optimizer not in ("adamw", "host")):
        return False
    return stage in stages and (kinds == "plain" or optimizer != "deepspeed muon" and precision == "fp32")


@cells(
    there_is,
    optimizer=["adamw", "host", "deepspeed muon", "owned"],
    stage=[0, 1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32"],
    kinds=["plain", "all kinds"],
)
def test_native_checkpoints_are_read_as_the_engine_held_them_and_so_is_the_universal_one(
    ranks: RankPool, tmp_path: Path, optimizer: str, stage: int, precision: str, kinds: str
) -> None:
    """With frozen and tied parameters, buffers, the schedule and what the user's program saved along."""
    native, converted = tmp_path / "native", tmp_path / "universal"
    options = {"model": engines.AllKinds, "frozen": (FROZEN,)} if kinds == "all kinds" else {}
    how = (optimizer, stage, precision)
    truth = ranks.run(save_scheduled, str(native), *how, **options, timeout=PATIENCE)[0]
    assert read_zero.recognises(native) and read_zero.recognises(native / "global_step3")
    assert not read_universal.recognises(native)
    checkpoint = universal(native, converted)
    assert_holds(checkpoint, truth)
    assert bool(checkpoint.replicas) == (optimizer == "deepspeed muon" and stage < 3)  # two ranks keep a momentum
    assert all(torch.equal(a.read(), b.read()) for _, a, b in checkpoint.replicas)
    assert (checkpoint.iteration, checkpoint.samples, checkpoint.client) == (3, 24, {"rows": 3})
    assert [group["lr"] for group in checkpoint.groups] == truth["rates"]
    assert checkpoint.scheduler is not None and checkpoint.scheduler["last_batch_iteration"] == 2
    if kinds == "all kinds":
        frozen = checkpoint.params[FROZEN]
        assert not frozen.states and torch.equal(frozen.weight.read(), UnevenLM().get_parameter(FROZEN))
        assert dict(checkpoint.tied) == {"lm_head.weight": "embedding.weight"}
        assert torch.equal(checkpoint.buffers["passes"].read(), truth["buffers"]["passes"])
        assert "scratch" not in checkpoint.buffers
    assert read_universal.recognises(converted) and not read_zero.recognises(converted / "step3")
    found = read_universal.read(converted)
    assert list(found.params) == list(checkpoint.params)
    assert same(params_of(found), params_of(checkpoint))
    for key in ("groups", "arguments", "iteration", "samples", "scheduler", "world", "tied", "client", "names"):
        assert getattr(found, key) == getattr(checkpoint, key), key
    buffers = [{key: tensor.read() for key, tensor in of.buffers.items()} for of in (found, checkpoint)]
    assert same(*buffers)


def train_on(folder: str, stage: int, precision: str, load: bool) -> dict[str, Any]:
    """Stock AdamW: train and save, or load; then go on, all ranks on all rows."""
    settings = engines.scheduled(engines.settings_for("adamw", stage, precision))
    settings["checkpoint"] = {"load_universal": load}
    with engines.without_compiling(), engine_for(settings, UnevenLM(seed=5) if load else None) as engine:
        if load:
            _, client = engine.load_checkpoint(folder)
            assert client["rows"] == 3
        else:
            train(engine, 3, same_rows=True)
            engine.save_checkpoint(folder, client_state={"rows": 3})
        found = engines.held(engine)
        found["losses"] = train(engine, range(3, 6), same_rows=True)
        return found


@pytest.mark.parametrize(
    ("saved_at", "precision", "loads"),  # ranks and stage
    [(1, "fp32", [(1, 1), (2, 3), (3, 2)]), (3, "fp32", [(2, 1), (2, 2), (3, 3)]), (2, "bf16", [(2, 1)])],
)
def test_deepspeed_itself_goes_on_from_what_we_write(
    rank_pools: dict[int, RankPool], tmp_path: Path, saved_at: int, precision: str, loads: list[tuple[int, int]]
) -> None:
    """Whole weights and states to the bit, and the losses of the run that had no break."""
    native, folder = str(tmp_path / "native"), tmp_path / "universal"
    expected = rank_pools[2].run(train_on, native, saved_at, precision, False, timeout=PATIENCE)[0]
    universal(Path(native), folder)
    for count, stage in loads:
        found = rank_pools[count].run(train_on, str(folder), stage, precision, True, timeout=PATIENCE)[0]
        assert (found["steps"], found["rates"]) == (3, expected["rates"])
        assert same(found["weights"], expected["weights"]) and same(found["states"], expected["states"])
        assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeeds_converter_makes_is_read(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    truth = ranks.run(engines.save, str(tmp_path), ("adamw", stage, "bf16"), timeout=PATIENCE)[0]
    tag = tmp_path / "global_step3"
    folders = {"input_folder": str(tag), "output_folder": f"{tag}_universal", "keep_temp_folder": False}
    more = {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True, "inject_missing_state": True}
    ds_to_universal.main(argparse.Namespace(**folders, **more))
    (tmp_path / "latest_universal").write_text("global_step3_universal")
    assert read_universal.recognises(tmp_path)
    found, native = read_universal.read(tmp_path), read_zero.read(tag)
    assert_holds(found, truth)
    assert {p.step for p in found.params.values()} == {3.0} and found.iteration == 3
    assert found.groups == native.groups and list(found.params) == list(native.params)


# FSDP2


@on_ranks(2)
def test_owners_state_of_other_parts_is_refused() -> None:
    """Of as large ones: these rows lie one after the other, those interleaved."""
    rules = {"matrix": SECTIONS["soap"], "elementwise": ELEMENTWISE["adamw"], "report": False, "bucket_matrices": 2}
    other = {**PARTS, "layers.0.weight": {"qkv": [27, 18, 18], "groups": 1}}
    saved, optimizer = (
        LayerWiseOptimizer(shard("rows", "fp32").model, **rules, atoms=atoms) for atoms in (PARTS, other)
    )
    said = r"rows 0:9 x 3 every 21.*expected those that there are here, \['slice 0 rows 0:27"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved.state_dict())


@on_ranks(2, 4)
def test_any_box_is_that_of_the_whole(tmp_path: Path) -> None:
    """Of tensors cut by rows, by columns and in rectangles, and of what is replicated."""
    sharded = shard("tensor parallel" if dist.get_world_size() == 4 else "columns", "fp32")
    dcp.save({"model": get_model_state_dict(sharded.model)}, checkpoint_id=tmp_path)
    folder = DcpFolder(tmp_path)
    generator = torch.Generator().manual_seed(0)
    assert max(len(entry.chunks) for entry in folder.tensors.values()) >= 2
    for key, entry in folder.tensors.items():
        of_all = folder.tensor(key).read()
        for _ in range(5):
            begin = [int(torch.randint(size, (1,), generator=generator)) for size in entry.shape]
            sizes = [int(torch.randint(size - b, (1,), generator=generator)) + 1 for size, b in zip(entry.shape, begin)]
            expected = of_all[tuple(slice(b, b + size) for b, size in zip(begin, sizes))]
            assert same(folder.read_box(key, begin, sizes), expected.contiguous())


# Owned storage


def owned_optimizer() -> tuple[UnevenLM, Any]:
    """In bf16, so that there are masters."""
    model = UnevenLM().to(torch.bfloat16)
    options = {"report": False, "bucket_mb": BUCKET_MB, "grad_dtype": "float32"}
    return model, OwnedOptimizer(model, SECTIONS["muon"], elementwise=ELEMENTWISE["adamw"], **options)


def save_owned(folder: str) -> dict[str, Tensor]:
    model, optimizer = owned_optimizer()
    train_owned(model, optimizer, 2)
    optimizer.save_state_dict(folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def on_one_rank(folder: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The state as the optimizer has it when one rank owns everything, and its param groups."""
    model, optimizer = owned_optimizer()
    optimizer.load_state_dict_from(folder)
    groups = [{k: v for k, v in group.items() if k not in ("params", "members")} for group in optimizer.param_groups]
    members = optimizer.core.members
    return {members[piece.member].name: piece.tensors for piece in state_pieces(optimizer.core)}, groups


def test_state_and_weights_of_owned_storage_are_read_whole(rank_pools: dict[int, RankPool], tmp_path: Path) -> None:
    """That engines go on with that of fp32 models and of other rules is tested with DeepSpeed's engines."""
    weights = rank_pools[3].run(save_owned, str(tmp_path))[0]
    state, groups = rank_pools[1].run(on_one_rank, str(tmp_path))[0]
    checkpoint = formats.read(tmp_path)
    assert list(checkpoint.params) == list(weights)
    for name, found in params_of(checkpoint).items():
        step = state[name].pop("step", None)
        expected = {key: t.view(weights[name].shape) for key, t in state[name].items()}
        group = checkpoint.groups[found.pop("group")]
        ours = next(g for g in groups if g["rule"] == group["rule"])
        assert group.items() >= ours.items()
        steps = None if step is None else step.item()
        assert same(found, {"weight": weights[name], **expected, "step": steps, "owners": {}}), name


# What is damaged, made to do harm, or not whole


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def harm(file: Path) -> None:
    torch.save({"module": {}, "optimizer_state_dict": Harm(file.parent / "harmed"), "param": 1}, file)


def another(file: Path) -> None:
    torch.save({"something": torch.ones(3)}, file)


DAMAGE: dict[Callable[[Path], None], str] = {
    Path.unlink: "is missing|has no file|expected the .* files|where there is none",
    truncate: "is damaged",
    engines.flip: "is damaged",
    harm: "asks for .*mkdir",
    another: "holds no|expected|is not as DeepSpeed writes it",
}
FORMS = {"host 2": ("host", 2, "fp32"), "host 3": ("host", 3, "fp32"), "owned 1": ("owned", 1, "fp32")}


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every form; without a manifest, by which damaged ones would be refused before they are read."""
    found = {form: tmp_path_factory.mktemp("saved") for form in (*FORMS, "universal")}
    for form, how in FORMS.items():
        rank_pools[2].run(engines.save, str(found[form]), how, steps=1, timeout=PATIENCE)
    universal(found["host 2"], found["universal"])
    for path in found["universal"].rglob(manifest.NAME):
        path.unlink()
    return found


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("form", [*FORMS, "universal"])
def test_damaged_files_are_an_error_and_nothing_of_them_is_run(
    saved: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], form: str
) -> None:
    source = Path(shutil.copytree(saved[form], tmp_path / "source"))
    by_name = {path.name: path for path in sorted(source.rglob("*.pt"))}  # of files with a name, one
    for file in by_name.values():
        if form == "universal" and file.name.startswith("zero_pp_rank"):  # DeepSpeed alone reads it, at stage 3
            continue
        kept = file.read_bytes()
        damage(file)
        with pytest.raises(CheckpointError, match=DAMAGE[damage]) as raised:
            checkpoint = formats.read(source)
            write_folder(tmp_path / "target", lambda new, c=checkpoint: write_universal.write(c, new))
        assert str(source) in str(raised.value)
        assert not list(tmp_path.rglob("harmed")) and {path.name for path in tmp_path.iterdir()} == {"source"}
        file.write_bytes(kept)


def test_folders_that_are_not_whole_or_lead_elsewhere_are_refused(
    saved: dict[str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    def copied(form: str, name: str) -> Path:
        return Path(shutil.copytree(saved[form], tmp_path / name))

    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "latest").write_text(os.path.relpath(saved["host 2"] / "global_step1", folder))
    assert not read_zero.recognises(folder)
    tag = copied("host 2", "tp") / "global_step1"
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    (copied("host 2", "pp") / "global_step1" / "layer_01-model_states.pt").write_bytes(b"")
    ranks.run(engines.save, str(tmp_path / "other"), ("host", 2, "fp32"), steps=2)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "other" / "global_step2" / name, copied("host 2", "mixed") / "global_step1" / name)
    for file in Path(shutil.copytree(tmp_path / "mixed", tmp_path / "unmarked")).rglob("*optim_states.pt"):
        content = torch.load(file, weights_only=False)
        del content["optimizer_state_dict"]["base_optimizer_state"][SAVE]
        torch.save(content, file)
    for case, words in (
        ("elsewhere", "leads elsewhere"),
        ("tp", "2 model-parallel ranks"),
        ("pp", "files of their own"),
        ("mixed", "it was saved after 2 steps, mp_rank_00_model_states.pt after 1"),
        ("unmarked", "'step' is 1.0 on the ranks before, 2.0 in"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_zero.read(tmp_path / case)


# Folders of torch.distributed.checkpoint


ONES = {"a": torch.ones(2)}


def with_state(name: str, size: int) -> dict[str, Any]:
    state = {name: {"m": torch.ones(size)}}
    return {"model": ONES, "optim": {"state": state, "param_groups": {"0": {"lr": 1}}}}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": ONES, "ema": ONES}, "ema.a in .* is neither a weight"),
        ({"one": ONES, "two": ONES}, "expected one model's weights"),
        (with_state("b", 2), "state of none of the model's parameters"),
        (with_state("3", 2), "state of a numbered parameter"),
        (with_state("a", 3), r"expected the weight's shape \(2,\), found \(3,\)"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=message):
        read_dcp.read(tmp_path)


def test_a_bare_model(tmp_path: Path) -> None:
    """A state dict without anything around it, of names with dots, and with a buffer that no optimizer has."""
    state = {"model.layers.0.weight": torch.ones(2, 2), "model.count": torch.tensor([3])}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = read_dcp.read(tmp_path)
    assert list(found.params) == ["model.layers.0.weight"]
    assert found.buffers["model.count"].read().tolist() == [3]
