"""Checkpoints of DeepSpeed's own optimizers are read as they held them, and continue in this package."""

import functools
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, LazyTensor
from lwopt_backend.checkpoint.dcp import state_dicts as read_dcp
from lwopt_backend.checkpoint.dcp.reader import Chunk, DcpFolder, Entry
from lwopt_backend.checkpoint.deepspeed import universal as read_universal
from lwopt_backend.checkpoint.deepspeed import universal as write_universal
from lwopt_backend.checkpoint.deepspeed import zero as read_zero
from lwopt_backend.checkpoint.deepspeed.files import NAMES, ModelStates
from lwopt_backend.checkpoint.files import pickles
from lwopt_backend.checkpoint.files.folders import write_folder
from lwopt_backend.checkpoint.files.pickles import plain
from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.support import checkpoint_engines as engines
from tests.support.cells import cells
from tests.support.checkpoint_contents import params_of, same
from tests.support.checkpoint_engines import FROZEN, PARTS, assert_holds
from tests.support.command_line import succeeds
from tests.support.fsdp2 import shard
from tests.support.hostile import stage0
from tests.support.models import UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.ranks import RankPool
from tests.support.references import ELEMENTWISE, SECTIONS
from tests.support.zero import ROWS, engine_for, settings_for, train

ALL_KINDS: dict[str, Any] = {"model": functools.partial(engines.Buffered, tied=True), "frozen": (FROZEN,)}


# DeepSpeed
def universal(source: Path, folder: Path) -> Checkpoint:
    checkpoint = read_zero.read(source)
    pointers = {"latest_universal": "step3"}
    write_folder(folder / "step3", lambda new: write_universal.write(checkpoint, new), beside=pointers)
    return checkpoint


def there_is(optimizer: str, stage: int, precision: str, kinds: str) -> bool:
    """DeepSpeed has each; of frozen and tied parameters only those whose names the checkpoint tells."""
    if optimizer == "deepspeed muon":
        return precision != "bf16+fp32" and kinds == "plain"
    return precision == "fp32" or kinds == "plain" and (precision == "bf16" or stage == 1)


@cells(
    there_is,
    optimizer=["adamw", "deepspeed muon"],
    stage=[1, 2, 3],
    precision=["fp32", "bf16", "bf16+fp32"],
    kinds=["plain", "all kinds"],
)
def test_checkpoints_are_read_as_the_engine_held_them(
    ranks: RankPool, tmp_path: Path, optimizer: str, stage: int, precision: str, kinds: str
) -> None:
    """Native and universal checkpoints are read as the engine held them. With frozen and tied parameters, buffers, the
    schedule and what the user's program saved along. Those of our optimizers are compared in test_checkpoints.py."""
    native, converted = tmp_path / "native", tmp_path / "universal"
    options = ALL_KINDS if kinds == "all kinds" else {}
    how = (optimizer, stage, precision)
    truth = ranks.run(engines.save, str(native), how, **options)[0]
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


def test_pieces_of_zero_3_on_many_ranks_take_few_bytes() -> None:
    """1,000 ranks have millions, of which each took 835 bytes."""
    ranks, shapes = 64, {f"{number}.weight": (64, 5) for number in range(40)}
    of_ranks = []
    for rank in range(ranks):
        flat = torch.arange(5.0 * len(shapes)) + 1000 * rank
        whole = LazyTensor((flat.numel(),), flat.dtype, flat.clone, "a test's", lambda a, b, flat=flat: flat[a:b])
        optimizer = {"state": {0: {"step": 1.0, "exp_avg": whole}}, "param_groups": [{"params": [0]}]}
        of_ranks.append((Path(f"{rank}.pt"), {"fp32_flat_groups": [whole], "optimizer_state_dict": optimizer}))
    states = ModelStates(Path("model.pt"), {"dp_world_size": ranks}, [shapes], {}, {}, {}, {})
    tracemalloc.start()
    found = read_zero.read_stage3(states, of_ranks)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 150 * 2 * ranks * len(shapes)
    expected = torch.arange(15.0, 20.0) + 1000 * torch.arange(ranks)[:, None]
    for tensor in found.params["3.weight"].states.values():
        assert torch.equal(tensor.read(), expected)
        assert torch.equal(tensor.piece(3, 17).read(), expected.flatten()[3:17])


def test_stage_0_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """The state of another optimizer at stage 0 has no names."""
    file = stage0(tmp_path) / "global_step3" / "mp_rank_00_model_states.pt"
    saved = torch.load(file)
    del saved["optimizer"][NAMES]
    torch.save(saved, file)
    with pytest.raises(CheckpointError, match="expected the parameters' names.*, and save it at ZeRO stage 1"):
        read_zero.read(tmp_path)


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
def test_deepspeed_itself_resumes_from_universal_checkpoints(
    rank_pools: dict[int, RankPool], tmp_path: Path, saved_at: int, precision: str, loads: list[tuple[int, int]]
) -> None:
    """Whole weights and states to the bit, and the losses of the run that had no break."""
    native, folder = str(tmp_path / "native"), tmp_path / "universal"
    expected = rank_pools[2].run(train_on, native, saved_at, precision, False)[0]
    universal(Path(native), folder)
    for count, stage in loads:
        found = rank_pools[count].run(train_on, str(folder), stage, precision, True)[0]
        assert (found["steps"], found["rates"]) == (3, expected["rates"])
        assert same(found["weights"], expected["weights"]) and same(found["states"], expected["states"])
        assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_of_deepspeeds_converter_are_read(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    truth = ranks.run(engines.save, str(tmp_path), ("adamw", stage, "bf16"))[0]
    converted = Path(engines.convert_as_deepspeed_does(tmp_path, "global_step3"))
    assert read_universal.recognises(converted)
    found, native = read_universal.read(converted), read_zero.read(tmp_path)
    assert_holds(found, truth)
    assert {p.step for p in found.params.values()} == {3.0} and found.iteration == 3
    assert found.groups == native.groups and list(found.params) == list(native.params)


# FSDP2
@on_ranks(2)
def test_fsdp2_refuses_owner_state_of_other_atoms() -> None:
    """The parts are as large: these rows lie one after the other, those interleaved."""
    rules = {"matrix": SECTIONS["soap"], "elementwise": ELEMENTWISE["adamw"], "report": False, "bucket_matrices": 2}
    other = {**PARTS, "layers.0.weight": {"qkv": [27, 18, 18], "groups": 1}}
    saved, optimizer = (LayerWiseOptimizer(shard("rows", "fp32").model, **rules, atoms=one) for one in (PARTS, other))
    said = r"expected matrices \['slice 0 rows 0:27.*the checkpoint has \['slice 0 rows 0:9 x 3 every 21"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved.state_dict())


@on_ranks(2, 4)
def test_a_dcp_folder_is_read_box_by_box(tmp_path: Path) -> None:
    """Tensors are cut by rows, by columns and in rectangles, or replicated."""
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


# What is not whole. What is damaged: test_damage.py
def save_ours(folder: Path, steps: int) -> None:
    with engine_for(settings_for("zero", 2, rows=ROWS // 2)) as engine:
        train(engine, steps)
        engine.save_checkpoint(folder)


def test_folders_that_are_not_whole_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(tmp_path / "saved", tmp_path / name))

    ranks.run(save_ours, tmp_path / "saved", 1)

    tag = copied("tp") / "global_step1"
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    (copied("pp") / "global_step1" / "layer_01-model_states.pt").write_bytes(b"")
    ranks.run(save_ours, tmp_path / "other", 2)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tmp_path / "other" / "global_step2" / name, copied("mixed") / "global_step1" / name)
    said = {
        "tp": "of 1 tensor-parallel ranks, as in mp_rank_00_model_states.pt, found 2",
        "pp": "layer_01-model_states.pt",
    }
    said |= {"mixed": "expected 'step' to be 1.0, as on the ranks before, found 2.0 in"}
    for case, words in said.items():
        with pytest.raises(CheckpointError, match=words):
            read_zero.read(tmp_path / case)


# Folders of torch.distributed.checkpoint
ONES = {"a": torch.ones(2)}


def with_state(name: str, size: int) -> dict[str, Any]:
    state = {name: {"m": torch.ones(size)}}
    return {"model": ONES, "optim": {"state": state, "param_groups": {"0": {"lr": 1}}}}


class Pooled(nn.Module):
    """With a layer that gets no gradient, and parameters in double precision and of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.pooler = nn.Linear(6, 4), nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, dtype=torch.float64)
        self.c = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x).double()) * self.c).abs().sum()


Make = Callable[[nn.Module], torch.optim.Optimizer]


def trained(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Pooled()
    optimizer = make(model)
    for step in range(3):
        model(torch.full((2, 6), 0.1 * step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), amsgrad=True)


def adamw_named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([*model.named_parameters()][::-1], amsgrad=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([param for param in model.parameters() if not param.is_complex()])


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def with_average(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, state = by_name(model, optimizer).values()
    more = {"ema": {name: weight + 1 for name, weight in weights.items()}, "rng": torch.get_rng_state()}
    return {"state_dict": weights, "optimizer": state, **more}


def numbered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def of_another(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = by_name(model, optimizer)["optimizer"]
    state["state"]["critic.weight"] = {"exp_avg": torch.ones(2)}
    return {**by_name(model, optimizer), "optimizer": state}


# How it is trained and saved, whether its state is read, and the note on what is not as usual
ORDINARY: dict[str, tuple[Make, Callable[..., dict[str, Any]], bool, str]] = {
    "a parameter without gradients": (adamw, by_name, True, "2 parameter(s), such as 'pooler.weight', never had a gra"),
    "an average and random numbers": (adamw, with_average, True, "never had a gradient: their state is zero"),
    "state of other shapes": (adafactor, by_name, False, "expected the weight's shape (4, 6), found (4, 1)"),
    "state by number": (adamw, numbered, False, "such as optimizer.state.0.step, are left out: it has the parameters'"),
    "state by number, with names": (adamw_named, numbered, True, "2 parameter(s), such as 'pooler.weight', never had"),
    "state of another model": (adamw, of_another, True, "such as optimizer.state.critic.weight.exp_avg, are left out"),
}


@pytest.mark.parametrize("case", ORDINARY)
def test_weights_of_ordinary_checkpoints_are_converted(tmp_path: Path, case: str) -> None:
    """Fixed: `lwopt convert` refused weights for state that it does not know, such as Adafactor's. Weights are
    converted whatever the state is. Bit for bit, in every dtype; a parameter without gradients has zeros, as it would
    at its first."""
    make, content, has_state, note = ORDINARY[case]
    model, optimizer = trained(make)
    dcp.save(content(model, optimizer), checkpoint_id=tmp_path / "saved", no_dist=True)
    for target in ("dcp", "universal", "safetensors"):
        told = json.loads(succeeds("convert", tmp_path / "saved", tmp_path / target, "--to", target, "--json"))
        assert [said for said in told["notes"] if note in said], told["notes"]
        found = formats.read(tmp_path / target)
        for name, weight in model.state_dict().items():
            assert same(found.params[name].best.read(), weight), name
        for name, param in model.named_parameters() if has_state and target != "safetensors" else ():
            zeros = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
            expected = {**zeros, "step": torch.tensor(0.0), **optimizer.state[param]}
            read = {key: tensor.read() for key, tensor in found.params[name].states.items() if key != "fp32"}
            assert same({**read, "step": torch.tensor(found.params[name].step)}, expected), name
        if "average" in case and target != "safetensors":
            assert same(found.client["ema"]["b.weight"].read(), model.b.weight.detach() + 1)


class Clip(nn.Module):
    """With a weight and buffers without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn(self.vision(x)) * self.logit_scale.exp()).square().sum()


MORE = {"tokens_seen": torch.tensor(7), "train": {"step": torch.tensor(3)}}
LAYOUTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "model": lambda weights, state: {"model": weights, "optimizer": state, **MORE},
    "torch's recipe": lambda weights, state: {"app": {"model": weights, "optim": state}, **MORE},
    "Lightning's": lambda weights, state: {"state_dict": weights, "optimizer": state, **MORE},
    "beside an average": lambda weights, state: {"net": weights, "o": state, "module": {"x": torch.ones(2)}, **MORE},
    "torchtitan's, at the top": lambda weights, state: {**weights, "optimizer": state, **MORE},
    "weights alone": lambda weights, _: {"module": weights, **MORE},
    "nothing but weights": lambda weights, _: weights,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_a_model_is_lost_wherever_it_is_in_a_folder(tmp_path: Path, layout: str) -> None:
    """Weights, their state and buffers without dimensions are the model's, other numbers stay the program's, and every
    tensor of the folder is converted or named with the reason."""
    model = Clip()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save(LAYOUTS[layout](weights, state), checkpoint_id=tmp_path / "saved", no_dist=True)
    stored, at_top = DcpFolder(tmp_path / "saved").tensors, "top" in layout or layout == "nothing but weights"
    for target in ("universal", "dcp", "safetensors"):
        convert = ("convert", tmp_path / "saved", tmp_path / target, "--to", target, "--json")
        planned, told = (json.loads(succeeds(*convert, *more)) for more in (["--dry-run"], []))
        assert planned["tensors"] == told["tensors"] and planned["result"]["states"] == told["result"]["states"]
        kept = told["tensors"]
        assert kept["in_folder"] == len(stored) == kept["written"] + len(kept["left_out"])
        assert target == "safetensors" or not kept["left_out"]
        assert any("numbers without dimensions at the top" in note for note in told["notes"]) == at_top
        found = formats.read(tmp_path / target)
        of_model = {name: param.best for name, param in found.params.items()} | dict(found.buffers)
        assert all(same(of_model[name].read(), weight) for name, weight in weights.items() if name != "calls")
        if at_top:  # a number of no module, without state
            assert target == "safetensors" or same(found.client["calls"].read(), weights["calls"])
        else:
            assert same(of_model["calls"].read(), weights["calls"])
        if target != "safetensors" and "weights" not in layout:
            param = found.params["logit_scale"]
            moments = {key: param.states[key].read() for key in ("exp_avg", "exp_avg_sq")}
            assert same({**moments, "step": torch.tensor(param.step)}, optimizer.state[model.logit_scale])
            client = pickles.in_memory(found.client)
            assert same(client.get("module", {}), {"x": torch.ones(2)} if "average" in layout else {})
            assert client["tokens_seen"] == 7


def test_a_dcp_folder_of_two_models_is_refused(tmp_path: Path) -> None:
    dcp.save({"one": ONES, "two": ONES}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"found tensors under \['one', 'two'\]; save the one to convert under"):
        read_dcp.read(tmp_path)


def test_accelerates_two_folders_are_read_as_one(tmp_path: Path) -> None:
    state = with_state("a", 2)
    state["optim"]["param_groups"]["0"]["params"] = ["a"]
    apart = {"pytorch_model_fsdp_0": {"model": state["model"]}, "optimizer_0": {"optimizer": state["optim"]}}
    for name, content in {"one": state, **apart}.items():
        dcp.save(content, checkpoint_id=tmp_path / name, no_dist=True)
    found, expected = read_dcp.read(tmp_path), read_dcp.read(tmp_path / "one")
    assert read_dcp.recognises(tmp_path) and expected.params["a"].states
    assert same(params_of(found), params_of(expected)) and found.groups == expected.groups
    with pytest.raises(CheckpointError, match="found none; give the folder above, in which Accelerate also saves"):
        read_dcp.read(tmp_path / "optimizer_0")
    (tmp_path / "optimizer_0" / ".metadata").rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="optimizer_0/.metadata cannot be read"):
        read_dcp.read(tmp_path)
    shutil.rmtree(tmp_path / "optimizer_0")
    assert not read_dcp.read(tmp_path).params["a"].states
    (tmp_path / "pytorch_model_fsdp_1").mkdir()
    with pytest.raises(CheckpointError, match="expected one model, found pytorch_model_fsdp_0 and pytorch_model_fsdp_"):
        read_dcp.read(tmp_path)


def test_a_dcp_folder_of_a_bare_model_is_read(tmp_path: Path) -> None:
    """A state dict without anything around it, of names with dots, and with a buffer that no optimizer has."""
    state = {"model.layers.0.weight": torch.ones(2, 2), "model.count": torch.tensor([3])}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = read_dcp.read(tmp_path)
    assert list(found.params) == ["model.layers.0.weight"]
    assert found.buffers["model.count"].read().tolist() == [3]


def test_options_of_numbered_layers_are_read_in_one_pass() -> None:
    """Options of numbered layers are not compared with every name. In a flattened state, an nn.Sequential's names begin
    like the numbers of param groups."""

    class Names(dict[str, int]):
        def __iter__(self) -> Any:
            pytest.fail("every name was looked at")

    listed = [f"{layer}.weight" for layer in range(3)]
    rates = {f"optimizer.param_groups.{name}.lr": 0.5 for name in listed}
    folder = mock.Mock(path=Path("step"), tensors={}, objects=rates, object=rates.__getitem__)
    options = {key: key.removeprefix("optimizer.param_groups.") for key in rates}
    groups, group_of, *_ = read_dcp._groups(folder, options, Names.fromkeys(listed, 0), plain)
    assert groups == [{"lr": 0.5}] and group_of == dict.fromkeys(listed, 0)


@pytest.mark.parametrize("cuts", [(1024, 1), (16, 8), (1, 32)])
def test_a_box_of_dcp_is_looked_for_in_the_chunks_with_its_rows(cuts: tuple[int, int]) -> None:
    """A tensor may have a chunk of each of 1,000 ranks, and is read in many boxes."""
    rows, columns = (1024 // cut for cut in cuts)
    chunks = [
        Chunk((row, column), (rows, columns), None)
        for column in range(0, 1024, columns)
        for row in range(0, 1024, rows)
    ]
    entry = Entry((1024, 1024), torch.float32, tuple(chunks))
    for first, count in ((0, 1), (1023, 1), (7, 100), (512, 512), (0, 1024), (5, 0)):
        overlap = {c for c in chunks if c.offsets[0] < first + count and c.offsets[0] + rows > first and count}
        found = entry.near((first, 3), (count, 9))
        assert overlap <= set(found) and len(found) <= len(overlap) + cuts[1] * (count == 0)
