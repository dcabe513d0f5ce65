"""Optimizer state in plain PyTorch: what is written, and that what does not fit is an error and changes nothing. That
it goes on on other ranks and layouts, bit for bit, is in test_checkpoints.py."""

import contextlib
import copy
import io
import itertools
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.checkpoint import formats, ties
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, held
from lwopt_backend.checkpoint.dcp.reader import DcpFolder
from lwopt_backend.checkpoint.files import manifest
from lwopt_backend.engines.buffers import files as buffers_files
from lwopt_backend.engines.buffers import step
from lwopt_backend.engines.buffers.hooks import Hook
from lwopt_backend.engines.buffers.loading import put_state
from lwopt_backend.engines.buffers.state import state_pieces
from lwopt_backend.migration import load_pieces
from lwopt_backend.runtime.agreement import RanksDisagree
from tests.engines.plain.test_experts import MoE, expert_optimizer, one_pass, sharded, sharers_of_experts
from tests.support.checkpoint_contents import same
from tests.support.command_line import too_large
from tests.support.models import UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.plain import BUCKET_MB, optimizer_for, shares, train, train_ours
from tests.support.ranks import RankPool, gathered
from tests.support.zero import ADAMW, MUON


def model_of(dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    return UnevenLM(**options).to(dtype)


def trained(steps: int = 1, **options: Any) -> tuple[nn.Module, LayerWiseOptimizer]:
    model = model_of()
    optimizer = optimizer_for(model, **options)
    train(model, optimizer, steps)
    return model, optimizer


def owned_state(optimizer: LayerWiseOptimizer) -> list[Any]:
    pieces = state_pieces(optimizer.core)
    copies = {p.member: [{k: t.clone() for k, t in p.tensors.items()}, copy.deepcopy(p.owner)] for p in pieces}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [copies, groups, [member.param.detach().clone() for member in optimizer.core.members]]


def in_vain(optimizer: LayerWiseOptimizer, load: Callable[[], None], message: str) -> None:
    before = owned_state(optimizer)
    with pytest.raises(Exception) as error:
        load()
    assert message in str(error.value)
    assert same(owned_state(optimizer), before)


@on_ranks(2)
def test_state_dict_has_the_rule_of_its_own_matrices() -> None:
    """State dicts look at the rules of a parameter's own matrices. To look at those of all, for every parameter, took
    minutes with 50,000."""
    _, optimizer = trained()
    with mock.patch.object(step, "build_matrix_rules", side_effect=AssertionError("of all")):
        optimizer.load_state_dict(optimizer.state_dict())


# What a folder holds
ENTRIES = {"iteration": 2, "by": {3: {}, "a.b": Counter([1])}, "by.a": {"b": 4}, "mean": torch.ones(2)}
ENTRIES |= {"numbered": {3: torch.ones(2), "3.a": [{}, (torch.zeros(1), 4)], (1, 2): {}}}  # torch makes text of keys
ENTRIES |= {"kinds": {False: torch.ones(1), None: [torch.zeros(1)], 1.5: torch.ones(2), b"b": (), "False": 2}}
ENTRIES |= {"dots": {"b.c": torch.ones(1), "b": {"c": torch.zeros(1)}}}  # and one name of these two


@on_ranks(3)
def test_folder_holds_one_save_of_every_parameter(tmp_path: Path) -> None:
    """A folder holds the files of one save, and pieces of every parameter."""
    folder = tmp_path / "deep" / "folder"
    model, optimizer = trained(layout="padded")
    optimizer.save_state_dict(folder)
    first = set(os.listdir(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "lwopt_0123_1.distcp").write_bytes(b"of a save that was interrupted")
    train(model, optimizer, range(1, 2))
    optimizer.save_state_dict(folder, **ENTRIES)
    second, found, listed = set(os.listdir(folder)), DcpFolder(folder), manifest.read(folder)
    assert len(first) == len(second) == 5 and first & second == {".metadata", manifest.NAME}
    assert listed is not None and second == {*listed.files, manifest.NAME}
    weights = {key: entry.shape for key, entry in found.tensors.items() if key.startswith("model.")}
    assert list(weights.items()) == [(f"model.{name}", tuple(p.shape)) for name, p in model.named_parameters()]
    files = {key: {chunk.stored.path for chunk in entry.chunks} for key, entry in found.tensors.items()}
    assert len(files["model.embedding.weight"] | files["model.layers.0.weight"]) > 1
    assert any(len(of_key) > 1 for of_key in files.values())
    more = optimizer.load_state_dict_from(folder)
    assert same(more, ENTRIES) and type(more["by"]["a.b"]) is Counter


@on_ranks(2)
def test_a_second_name_is_taken_if_its_weight_is_equal(tmp_path: Path) -> None:
    """torch's functions save a tied weight under all its names, and its state under one."""
    model = UnevenLM(tied=True)
    optimizer = optimizer_for(model)
    train(model, optimizer, 1)
    weights, state = get_state_dict(model, optimizer)
    assert weights.keys() > {"embedding.weight", "lm_head.weight"}
    other = {**weights, "lm_head.weight": weights["embedding.weight"] + 1}
    for name, saved in {"equal": weights, "other": other}.items():
        dcp.save({"model": saved, "optimizer": state}, checkpoint_id=tmp_path / name)
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "alone")
    before = owned_state(optimizer)
    train(model, optimizer, 1)
    in_vain(
        optimizer, lambda: optimizer.load_state_dict_from(tmp_path / "other"), "equal weights of 'embedding.weight'"
    )
    in_vain(optimizer, lambda: optimizer.load_state_dict_from(tmp_path / "alone"), "found weights alone; load the w")
    optimizer.load_state_dict_from(tmp_path / "equal")
    assert same(owned_state(optimizer), before)


def test_a_model_that_loads_ties_the_names_of_a_folder() -> None:
    """Whichever of them has the state; DeepSpeed's load takes a universal folder so."""
    model = UnevenLM(tied=True)
    names = ties.names_in(model)
    assert names == {"lm_head.weight": "embedding.weight"}
    weight = held(model.embedding.weight, "a weight")
    one, trained_one = Param(weight), Param(weight, {"exp_avg": weight}, group=0)
    for first, second, kept in ((trained_one, one, "embedding"), (one, trained_one, "lm_head"), (None, one, "lm_head")):
        params = {n: p for n, p in {"embedding.weight": first, "lm_head.weight": second}.items() if p is not None}
        found = ties.of_model(Checkpoint("any", "", "model", params), names)
        assert [*found.params] == [f"{kept}.weight"] and found.name_of("embedding.weight") == f"{kept}.weight"
    other = Param(held(model.embedding.weight + 1, "another"))
    with pytest.raises(CheckpointError, match="expected equal weights of 'embedding.weight' and 'lm_head.weight'"):
        ties.of_model(Checkpoint("any", "", "model", {"embedding.weight": one, "lm_head.weight": other}), names)
    for kept, count in itertools.product(
        "abc", (2, 3)
    ):  # which has the state, and how many a folder has of three names
        params = {name: trained_one if name == kept else one for name in (kept, *sorted({*"abc"} - {kept}))[:count]}
        for first, *more in itertools.permutations("abc"):  # in the model that loads
            found = ties.of_model(Checkpoint("any", "", "model", params), dict.fromkeys(more, first))
            assert [*found.params] == [kept] == [*{*map(found.name_of, {first, *params})}]


@on_ranks(2)
def test_what_every_rank_has_is_written_once(tmp_path: Path) -> None:
    trained(group_size=1)[1].save_state_dict(tmp_path)
    stored = [place.length for place in DcpFolder(tmp_path).stored]
    assert sum(stored) == sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) < 2**18


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("there", ["alone", "over a save"])
@on_ranks(2)
def test_save_over_a_foreign_checkpoint_is_refused(tmp_path: Path, there: str) -> None:
    """A save over another program's checkpoint is refused before it writes. torch's own dcp.save has written FSDP2's or
    plain PyTorch's model, and leaves our manifest where it is."""
    _, optimizer = trained(layout="padded")
    if there == "over a save":
        optimizer.save_state_dict(tmp_path)
    dcp.save({"model": UnevenLM().state_dict()}, checkpoint_id=tmp_path)
    dist.barrier()
    before = files_in(tmp_path)
    with pytest.raises(
        ValueError, match=r"__0_0\.distcp: expected a folder without other programs' files, .*another fold"
    ):
        optimizer.save_state_dict(tmp_path)
    assert files_in(tmp_path) == before


@on_ranks(2)
def test_file_system_may_know_an_old_size(tmp_path: Path) -> None:
    """A file system may know an old size of another rank's file. As NFS does until a file is opened."""
    _, optimizer = trained(layout="padded")
    stat, others = os.stat, f"_{1 - dist.get_rank()}.distcp"

    def old(path: Any, *args: Any, **options: Any) -> os.stat_result:
        found = stat(path, *args, **options)
        return os.stat_result([*found[:6], 0, *found[7:]]) if str(path).endswith(others) else found

    with mock.patch.object(os, "stat", old):
        optimizer.save_state_dict(tmp_path)
    optimizer.load_state_dict_from(tmp_path)


# What cannot be loaded
def without_a_chunk(path: Path) -> None:
    saved = pickle.loads((path.parent / ".metadata").read_bytes())
    saved.state_dict_metadata["optimizer.state.embedding.weight.exp_avg"].chunks.pop()
    (path.parent / ".metadata").write_bytes(pickle.dumps(saved))


def flip(path: Path) -> None:
    """A bit of the largest tensor."""
    chunks = [chunk for entry in DcpFolder(path.parent).tensors.values() for chunk in entry.chunks]
    place = max((c.stored for c in chunks if c.stored.path == path), key=lambda stored: stored.length)
    data = bytearray(path.read_bytes())
    data[place.offset + place.length // 2] ^= 4
    path.write_bytes(data)


def swap(path: Path) -> None:
    """Two ranks' files."""
    first, second = sorted(path.parent.glob("*.distcp"))
    os.rename(first, path.parent / "first")
    os.rename(second, first)
    os.rename(path.parent / "first", second)


SUM = "expected the saved file with CRC32"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {  # what is said without a manifest, and with one
    "missing": (Path.unlink, "is missing; copy all files", "is missing; copy all of"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 64), "ends early: expected", "ends early: expected"),
    "a flipped bit": (flip, "is damaged: a checksum is wrong", SUM),
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "is damaged", SUM),
    "no metadata": (lambda path: (path.parent / ".metadata").unlink(), "found no .metadata, which is written last", ""),
    "cut metadata": (lambda path: os.truncate(path.parent / ".metadata", 400), ".metadata", SUM),
    "hole": (without_a_chunk, "copy every rank's file", SUM),
    "swapped": (swap, "", "distcp"),
}


@pytest.fixture(scope="module")
def saves(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    rank_pools[2].run(save_one, str(folder / "state"))
    return folder


def save_one(folder: str) -> None:
    trained(layout="padded")[1].save_state_dict(folder)


def load_all_in_vain(messages: dict[str, str]) -> None:
    _, optimizer = trained(layout="compact")
    for folder, message in messages.items():
        in_vain(optimizer, lambda folder=folder: optimizer.load_state_dict_from(folder), message)  # type: ignore[misc]


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_damaged_folder_fails_and_changes_nothing(ranks: RankPool, saves: Path, tmp_path: Path, rank: int) -> None:
    messages = {}
    for what, (damage, *said) in DAMAGE.items():
        for message, with_manifest in zip(said, (False, True)):
            folder = shutil.copytree(saves, tmp_path / f"{what} {with_manifest}") / "state"
            if not with_manifest:
                (folder / manifest.NAME).unlink()
            damage(next(folder.glob(f"*_{rank}.distcp")))
            messages |= {str(folder): message} if message else {}
    ranks.run(load_all_in_vain, messages)


@on_ranks(2)
def test_checksums_are_compared_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    _, optimizer = trained()
    optimizer.save_state_dict(tmp_path)
    with pytest.raises(RanksDisagree, match="check"):
        optimizer.load_state_dict_from(tmp_path, check=dist.get_rank() == 0)
    if dist.get_rank() == 0:  # what only a checksum tells
        flip(next(tmp_path.glob("*_0.distcp")))
    dist.barrier()
    with pytest.raises((ValueError, RuntimeError), match="CRC32"):
        optimizer.load_state_dict_from(tmp_path)
    optimizer.load_state_dict_from(tmp_path, check=False)


def load_what_is_lost_meanwhile(folder: str, good: str) -> None:
    model, optimizer = trained(layout="compact")

    def lose(*what: Any) -> None:
        for path in Path(folder).glob("*.distcp"):
            os.truncate(path, 0)
        put_state(*what)

    with mock.patch.object(buffers_files, "put_state", lose), pytest.raises(Exception, match="ends early|is damaged"):
        optimizer.load_state_dict_from(folder)
    for use in (optimizer.step, lambda: optimizer.save_state_dict(f"{folder}, again")):
        with pytest.raises(
            RuntimeError, match="failed after some weights and state had been loaded; load a checkpoint"
        ):
            use()
    optimizer.load_state_dict_from(good)
    again, expected = trained(layout="compact")
    expected.load_state_dict_from(good)
    optimizer.step()
    assert same(dict(model.state_dict()), dict(again.state_dict())) and same(
        owned_state(optimizer), owned_state(expected)
    )


def test_failed_load_needs_another_load(ranks: RankPool, saves: Path, tmp_path: Path) -> None:
    """After a load that failed in between no step is taken until one succeeds."""
    folder = shutil.copytree(saves, tmp_path / "lost") / "state"
    ranks.run(load_what_is_lost_meanwhile, str(folder), str(saves / "state"))


def with_more() -> nn.Module:
    model = model_of()
    model.more = nn.Linear(3, 3, dtype=torch.bfloat16)
    return model


def buffered() -> nn.Module:
    model = model_of()
    model.register_buffer("passes", torch.zeros(2))
    return model


def frozen(name: str) -> nn.Module:
    model = model_of()
    model.get_parameter(name).requires_grad = False
    return model


AMSGRAD = {"name": "adamw", **ADAMW, "amsgrad": True}
OTHERS: dict[str, tuple[Callable[[], LayerWiseOptimizer], str]] = {
    "shape": (lambda: optimizer_for(model_of(hidden=(63, 43))), "'layers.2.weight': expected shape (43, 63), the"),
    "dtype": (lambda: optimizer_for(UnevenLM()), "expected dtype float32, the checkpoint has bfloat16"),
    "rule": (lambda: optimizer_for(model_of(), exclude="layers.2.*"), "expected rule adamw, the checkpoint has muon"),
    "fewer": (lambda: optimizer_for(frozen("gate.bias")), "'gate.bias' is in the checkpoint, but not trained here"),
    "more": (lambda: optimizer_for(with_more()), "parameter 'more.weight' is trained here, but not in the checkpoint"),
    "state": (lambda: optimizer_for(model_of(), elementwise=AMSGRAD), "max_exp_avg_sq"),
    "a buffer": (lambda: optimizer_for(buffered()), "the weight 'passes' is only in this model"),
}


@pytest.mark.parametrize("other", OTHERS)
@on_ranks(2)
def test_another_models_state_is_refused(saves: Path, other: str) -> None:
    """Another model's state is an error on all ranks, and changes nothing."""
    make, message = OTHERS[other]
    optimizer = make()
    in_vain(optimizer, lambda: optimizer.load_state_dict_from(saves / "state"), message)


# Crashes
@pytest.mark.parametrize(("rank", "fault"), [(0, "rename"), (1, "fsync"), (1, "a file too large")])
@on_ranks(2)
def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, rank: int, fault: str) -> None:
    """A second save fails on one rank; the first must be as it was."""
    model, optimizer = trained(layout="padded")
    optimizer.save_state_dict(tmp_path)
    expected, first = owned_state(optimizer), set(os.listdir(tmp_path))
    train(model, optimizer, range(1, 2))
    disk: Any = contextlib.nullcontext()
    if dist.get_rank() == rank:
        full = mock.Mock(side_effect=OSError("no space left on device"))
        disk = too_large() if fault == "a file too large" else mock.patch.object(os, fault, full)
    with (
        disk,
        pytest.raises(OSError, match=f"{tmp_path} is unchanged, and nothing was written: .*(space|large)"),
    ):
        optimizer.save_state_dict(tmp_path)
    dist.barrier()  # the first rank has removed what is written
    assert first - {manifest.NAME} <= set(os.listdir(tmp_path)) <= first
    _, other = trained(2, layout="padded")
    other.load_state_dict_from(tmp_path)
    assert same(owned_state(other), expected)
    optimizer.save_state_dict(tmp_path)
    other.load_state_dict_from(tmp_path)
    assert same(owned_state(other), owned_state(optimizer)) and len(os.listdir(tmp_path)) == 4


# Param groups
def with_groups(order: list[int], rates: list[float]) -> LayerWiseOptimizer:
    model = UnevenLM()
    parts = [list(model.layers.parameters()), list(model.embedding.parameters()) + list(model.lm_head.parameters())]
    parts.append(list(model.gate.parameters()))
    groups = [{"params": parts[part], "lr": rate, "note": f"part {part}"} for part, rate in zip(order, rates)]
    return LayerWiseOptimizer(model, **MUON, elementwise="adamw", params=groups, bucket_mb=BUCKET_MB, report=False)


@on_ranks(2)
def test_param_groups_are_known_by_their_members(tmp_path: Path) -> None:
    with_groups([0, 1, 2], [0.1, 0.2, 0.3]).save_state_dict(tmp_path)
    optimizer = with_groups([2, 0, 1], [0.5] * 3)
    optimizer.load_state_dict_from(tmp_path)
    rates = {f"{group['note']} {group['rule']}": group["lr"] for group in optimizer.param_groups}
    of_both = {f"part {part} {rule}": rate for part, rate in ((0, 0.1), (2, 0.3)) for rule in ("muon", "adamw")}
    assert rates == {**of_both, "part 1 adamw": 0.2}
    other = optimizer_for(UnevenLM())
    message = (
        "parameter 'layers.0.bias': expected the param group of embedding.weight, the checkpoint has layers.0.bias"
    )
    in_vain(other, lambda: other.load_state_dict_from(tmp_path), message)


UNREADABLE = [  # some of which torch.load reads with weights_only=True, but no file of DCP's has them as they are
    (Path("a"), "pathlib.PosixPath"),
    (bytearray(b"a"), "builtins.bytearray"),
    (torch.strided, "torch.layout"),
    ({torch.per_tensor_affine: 1}, "torch.qscheme"),
    (torch.eye(2).to_sparse(), "torch.Tensor"),
    (torch.ones(1, device="meta"), "torch.Tensor"),
    (np.float64(1), "numpy.float64"),
]
ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@on_ranks(2)
def test_what_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    """Param groups and entries that would not come back as they are now are an error on all ranks."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.1 * dist.get_rank()
    with pytest.raises(Exception, match="ranks differ in lr of param group 0.muon: 0.0 on rank 0, 0.1 on rank 1"):
        optimizer.save_state_dict(tmp_path)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.param_groups[1]["path"] = tmp_path
    with pytest.raises(Exception, match="found a pathlib.PosixPath in 'path'"):
        optimizer.save_state_dict(tmp_path)
    del optimizer.param_groups[1]["path"]
    for value, found in UNREADABLE:
        with pytest.raises(Exception, match=f"expected values that come back as they are: .* found a {found} in 'x'"):
            optimizer.save_state_dict(tmp_path, x={1: [value]})
    with pytest.raises(Exception, match="expected 'x' to be less deep, or not to contain itself"):
        optimizer.save_state_dict(tmp_path, x=ENDLESS)
    of_module = mock.patch.object(type(model), "get_extra_state", lambda module: {1: tmp_path})
    with of_module, pytest.raises(Exception, match="found a pathlib.PosixPath in '_extra_state'"):
        optimizer.save_state_dict(tmp_path)
    with pytest.raises(Exception, match="found 'model'; rename it"):
        optimizer.save_state_dict(tmp_path, model=1)
    assert not list(tmp_path.iterdir())


# Experts that only some ranks have
def summary(optimizer: LayerWiseOptimizer) -> Counter[tuple[str, str]]:
    """By parameter and key the sum of absolute values of this rank's state, apart from the counts of steps."""
    pieces = [(optimizer.core.members[piece.member].name, piece.tensors) for piece in state_pieces(optimizer.core)]
    sums = {(name, key): tensor.double().abs().sum().item() for name, of in pieces for key, tensor in of.items()}
    return Counter({of: total for of, total in sums.items() if of[1] != "step"})


def train_experts(folder: str, **options: Any) -> Counter[tuple[str, str]]:
    model, _ = sharded()
    optimizer = expert_optimizer(model, **options)
    train_ours(model, optimizer, 1, one_pass)
    optimizer.save_state_dict(folder)
    return summary(optimizer)


def load_experts(folder: str) -> Counter[tuple[str, str]]:
    optimizer = optimizer_for(MoE(), exclude=("last.weight",))
    optimizer.load_state_dict_from(folder)
    return summary(optimizer)


@pytest.mark.parametrize("options", [{}, {"group_size": 2, "expert_group_size": 1}], ids=str)
def test_experts_load_on_all_ranks(rank_pools: dict[int, RankPool], tmp_path: Path, options: dict[str, Any]) -> None:
    # With options, two instances: of the dense ranks 0, 1 and 2, 3, and of those that share experts, 0, 2 and 1, 3.
    parts = rank_pools[4].run(train_experts, str(tmp_path), **options)[: 2 if options else 4]
    totals: Counter[tuple[str, str]] = sum(parts, Counter())
    (alone,) = rank_pools[1].run(load_experts, str(tmp_path))
    assert alone == pytest.approx(totals, rel=1e-12)


class OneExpert(nn.Module):
    """Every set of ranks has another expert under the same name."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(24, 24)
        torch.manual_seed(number)
        self.expert = nn.Linear(24, 40)


def save_and_load_local_experts(folder: str) -> None:
    mine = dist.get_rank() % 2
    groups = {"expert_params": ["expert.*"], "expert_process_group": sharers_of_experts()}
    model, other = OneExpert(10 + mine), optimizer_for(OneExpert(10 + mine), **groups)
    optimizer = optimizer_for(model, **groups)
    model.expert(model.dense(torch.full((2, 24), 1.0 + mine))).square().sum().backward()
    optimizer.step()
    optimizer.save_state_dict(folder)
    other.load_state_dict_from(folder)
    assert same(owned_state(other), owned_state(optimizer))


def local_experts_alone(folder: str) -> None:
    optimizer_for(OneExpert(10)).load_state_dict_from(folder)


def test_experts_of_one_name_are_told_apart_by_their_ranks(rank_pools: dict[int, RankPool], tmp_path: Path) -> None:
    rank_pools[4].run(save_and_load_local_experts, str(tmp_path))
    names = formats.read(tmp_path).params
    assert {"expert.weight of expert set 0", "expert.weight of expert set 1", "dense.weight"} <= set(names)
    (error,) = rank_pools[1].errors(local_experts_alone, str(tmp_path))
    assert "parameter 'expert.weight' is trained here, but not in the checkpoint" in error


# torch's own state_dict
@on_ranks(2)
def test_whole_state_dict_resumes_on_another_layout() -> None:
    """A state dict of whole tensors goes on, bit for bit, on another layout. With a schedule's rates. Gradients are
    summed in fp32, since bf16 sums round where ranks reduce-scatter and do not where instances of one rank all-reduce.
    One of pieces is in test_checkpoints.py."""
    model, optimizer = trained(2, layout="compact", group_size=1, grad_dtype="float32")
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule.step()
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 4))
    for state in saved["state"].values():
        for key, parts in state.items():
            state[key] = torch.cat([box.flatten() for box in parts.boxes.values()]).view(parts.shape)
    other = model_of(seed=99)
    again = optimizer_for(other, layout="padded", grad_dtype="float32")
    again.load_state_dict(saved)
    other.load_state_dict(weights)
    assert [group["lr"] for group in again.param_groups] == [MUON["lr"] / 2, ADAMW["lr"] / 2]
    train(other, again, range(2, 4))
    assert same(dict(model.state_dict()), dict(other.state_dict()))


@on_ranks(2)
def test_what_torch_would_lose_is_refused(tmp_path: Path) -> None:
    """Experts that other ranks have others of under the same number; SOAP's factors in the flattened form."""
    model = OneExpert(dist.get_rank())
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    optimizer = optimizer_for(model, expert_params=["expert.*"], expert_process_group=group)
    with pytest.raises(CheckpointException, match="found 'expert.weight' in expert_params"):
        dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    model = UnevenLM()
    optimizer = LayerWiseOptimizer(model, "soap", elementwise="adamw", report=False)
    train(model, optimizer, 1)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    with pytest.raises(ValueError, match="; torch's flattened form lacks owner state, so save the nested one"):
        set_optimizer_state_dict(model, optimizer, state, options=flat)


def state_dict_of(case: str, optimizer: LayerWiseOptimizer) -> dict[str, Any]:
    state = optimizer.state_dict()
    if case == "another rank's":
        return gathered(state)[1 - dist.get_rank()]
    if case == "torch's":
        return torch.optim.AdamW(UnevenLM().parameters()).state_dict()
    if case == "one rank has none" and dist.get_rank() == 1:
        return {}
    if case == "without a key":
        name = next(iter(state["state"]))
        state["state"][name].pop(next(iter(state["state"][name])))
    elif case == "of other groups":
        state["param_groups"][0]["params"] = state["param_groups"][0]["params"][1:]
    return state


POINTER = "load with optimizer.load_state_dict_from(folder)"
STRANGERS = {
    "another rank's": POINTER,
    "of another layout": POINTER,
    "torch's": "the checkpoint was written by another optimizer: its param groups have no 'rule'; load the",
    "one rank has none": "expected a state dict with 'state' and 'param_groups'; found []",
    "without a key": "state ['exp_avg', 'exp_avg_sq', 'step'], the checkpoint has ['exp_avg', 'exp_avg_sq']",
    "of other groups": "param group 0: expected number of parameters",
}


@pytest.mark.parametrize("case", STRANGERS)
@on_ranks(2)
def test_any_other_state_dict_is_an_error_on_all_ranks(case: str) -> None:
    state = state_dict_of(case, trained(layout="padded")[1])
    _, other = trained(2, layout="compact" if case == "of another layout" else "padded")
    in_vain(other, lambda: other.load_state_dict(state), STRANGERS[case])


@on_ranks(2)
def test_torchs_state_dict_hooks_are_called() -> None:
    _, optimizer = trained()
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda opt: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: called.append(f"before loading {state['mine']}"))
    optimizer.register_load_state_dict_post_hook(lambda opt: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", "before loading 1", "after loading"]


# ``torch.save`` of what ranks hold


def pickled(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file)
    return found


@pytest.mark.parametrize("ours_in", ["one", "modules"])
@on_ranks(2)
def test_a_save_of_one_rank_alone_is_an_error_in_the_next_step(ours_in: str) -> None:
    """Every DDP script has the line ``if rank == 0: torch.save(...)``. The file had one rank's share, and the loss
    showed it days later. Saves of all ranks, one after the other too, and copies are none."""
    model = UnevenLM()
    one = optimizer_for(model)
    optimizer: Any = ModuleOptimizers({"all": one}) if ours_in == "modules" else one

    def step() -> None:
        model(*shares(0, 2)[dist.get_rank()]).backward()
        optimizer.step()
        one.synchronize()

    step()
    for rank in range(2):
        if dist.get_rank() == rank:
            pickled(optimizer.state_dict())
        dist.barrier()
    copy.deepcopy(optimizer.state_dict())
    step()
    if dist.get_rank() == 0:
        pickled(copy.deepcopy(optimizer.state_dict()))  # which a thread may save whenever it likes
        pickled(optimizer.state_dict())
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"one rank.*save_state_dict\(folder\)"):
        step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    step()
    assert not any(map(torch.equal, before, model.parameters()))


@on_ranks(2)
def test_last_save_of_one_rank_is_told_at_exit() -> None:
    model, optimizer = trained()
    pickled(optimizer.state_dict())
    assert not optimizer.core.saves.alone()
    train(model, optimizer, 1)
    if dist.get_rank() == 0:
        pickled(optimizer.state_dict())
    dist.barrier()
    assert optimizer.core.saves.alone(patience=0.1)


@on_ranks(2)
def test_file_of_one_rank_is_told_and_loaded_in_part() -> None:
    """The message was "expected 'step' as the boxes {(): ()}", for another model too."""
    model = UnevenLM()
    optimizer = optimizer_for(model)
    train(model, optimizer, 1)
    of_first, _ = gathered(pickled(optimizer.state_dict()))
    before = owned_state(optimizer)
    said = "these are the pieces of the state that rank 0 of 2 ranks owns, and rank 1 of 2 owns others"
    with pytest.raises((ValueError, RuntimeError), match=said):
        optimizer.load_state_dict(of_first)
    assert same(owned_state(optimizer), before)
    wider = optimizer_for(UnevenLM(hidden=(64, 41)))
    with pytest.raises((ValueError, RuntimeError), match=r"of shape \(64, 24\), the state dict has \(63, 24\); it was"):
        wider.load_state_dict(of_first)
    other_model = UnevenLM()
    other = optimizer_for(other_model)
    new = owned_state(other)[0]
    train(other_model, other, 2)
    fresh = load_pieces(other, of_first)
    assert 0 < len(fresh) < len(optimizer.core.members)
    for number, (state, _) in owned_state(other)[0].items():
        name = other.core.members[number].name
        assert same(state, (new if name in fresh else before[0])[number][0]), name


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("earlier", ["owned.state\nPieces", "buffers.state\nPartialTensor"])
@on_ranks(2)
def test_state_dict_pickled_under_an_earlier_name_loads(weights_only: bool, earlier: str) -> None:
    """Its tensors' class was ``Pieces`` in ``engines.owned.state``, then in ``engines.buffers.state``."""
    (_, optimizer), (_, other), file = trained(), trained(0), io.BytesIO()
    torch.save(optimizer.state_dict(), file, _use_new_zipfile_serialization=False)  # which has names and no sizes
    now, then = b"engines.buffers.partial\nPartialTensor\n", f"engines.{earlier}\n".encode()
    assert now in file.getvalue()
    renamed = io.BytesIO(file.getvalue().replace(now, then))
    other.load_state_dict(torch.load(renamed, weights_only=weights_only))
    assert same(owned_state(other)[0], owned_state(optimizer)[0])


def test_hooks_pickled_under_an_earlier_name_load() -> None:
    """As in a whole model that ``torch.save`` has written."""
    now, then = b"engines.buffers.hooks\n", b"engines.buffers.bucket_manager\n"
    pickled_hook = pickle.dumps(Hook(io.BytesIO, print), protocol=0)
    assert now in pickled_hook
    assert pickle.loads(pickled_hook.replace(now, then))("nothing") is None
