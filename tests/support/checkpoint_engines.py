"""What tests of checkpoints under DeepSpeed share: engines of every stage and optimizer, and what they hold."""

import argparse
import copy
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from torch import Tensor, nn

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError
from lwopt_backend.checkpoint.differences import differences
from tests.support.checkpoint_contents import same
from tests.support.command_line import succeeds
from tests.support.models import MATRICES, UnevenLM
from tests.support.ranks import RankPool, gathered
from tests.support.zero import ADAMW, MUON, PRECISIONS, ROWS, config, engine_for, train

FROZEN = "layers.4.weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
States = dict[str, dict[str, Tensor]]
PARTS: dict[str, Any] = {  # which matrices are in a parameter
    "layers.0.weight": {"qkv": [9, 6, 6], "groups": 3},
    "layers.2.weight": {"qkv": [21, 10, 10], "groups": 1},
}
Engines = Sequence[Callable[[], Any]]
Step = Callable[[Any, int], object]


class Buffered(UnevenLM):
    """With a buffer that counts forward passes, and one that is not saved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("passes", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(tokens, targets)


def settings_for(optimizer: str, stage: int, precision: str = "fp32") -> dict[str, Any]:
    """A ds_config without this package: "adamw" is torch's in DeepSpeed, "deepspeed muon" DeepSpeed's."""
    settings = config(stage, rows=ROWS // dist.get_world_size()) | PRECISIONS[precision]
    settings["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
    if optimizer == "deepspeed muon":
        settings["optimizer"] = {"type": "Muon", "params": {**MUON, "torch_adam": True, "ns_method": "standard"}}
        settings["zero_optimization"]["reduce_scatter"] = False
    return settings


def scheduled(settings: dict[str, Any]) -> dict[str, Any]:
    params = {"warmup_max_lr": 3e-3, "warmup_num_steps": 8}
    return {**settings, "scheduler": {"type": "WarmupLR", "params": params}}


def without_compiling() -> Any:
    """DeepSpeed's Muon and torch's AdamW in it are compiled at their first step, which takes minutes."""
    return torch._dynamo.config.patch(disable=True)


def save(
    folder: str, how: tuple[str, int, str], *, model: Callable[[], nn.Module] = UnevenLM, frozen: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Train three steps and save; what was saved as the engine has it."""
    made = model()
    for name in frozen:
        made.get_parameter(name).requires_grad_(False)
    with without_compiling(), engine_for(scheduled(settings_for(*how)), made) as engine:
        train(engine, 3)
        engine.save_checkpoint(folder, client_state={"rows": 3})
        return held(engine)


def held(engine: Any) -> dict[str, Any]:
    """Whole fp32 weights and states by parameter, buffers, counters."""
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    found = {"weights": full_weights_of(engine), "states": states_of(engine), "buffers": buffers}
    return {**found, "steps": engine.global_steps, "rates": rates_of(engine)}


def rates_of(engine: Any) -> list[float]:
    """The effective rates by param group."""
    return [group["lr"] for group in engine.optimizer.param_groups]


def full_weights_of(engine: Any) -> dict[str, Tensor]:
    trained = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    if engine.zero_optimization_stage() == 0 and not hasattr(engine.optimizer, "core"):
        return {name: master.detach().clone() for name, master in zip(trained, _of_stage_0(engine))}
    get = deepspeed.utils.safe_get_full_fp32_param
    return {name: get(param).clone() for name, param in trained.items()}


def _of_stage_0(engine: Any) -> list[Tensor]:
    """What torch's optimizer steps: the trained parameters, in their order."""
    return [param for param in engine.module.parameters() if param.requires_grad]


def states_of(engine: Any) -> States:
    """By what the optimizer keeps of each parameter: momentum if it is a matrix that Muon trains, otherwise moments."""
    get = deepspeed.utils.safe_get_full_optimizer_state
    if engine.optimizer_name() == "muon" and engine.zero_optimization_stage() < 3:
        return _states_of_their_muon(engine)
    if engine.zero_optimization_stage() == 0 and not hasattr(engine.optimizer, "core"):
        if engine.optimizer_name() == "LayerWiseMuon":  # every rank has the state of what it owns
            return {}
        names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
        state = engine.basic_optimizer.state
        return {n: {k: state[p][k].clone() for k in MOMENTS} for n, p in zip(names, _of_stage_0(engine))}
    found: States = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            of_ours = name in MATRICES and engine.optimizer_name() == "LayerWiseMuon"
            matrix = of_ours or getattr(param, "use_muon", False)
            found[name] = {key: get(param, key).clone() for key in (("momentum_buffer",) if matrix else MOMENTS)}
    return found


def _states_of_their_muon(engine: Any) -> States:
    """DeepSpeed's Muon at ZeRO 1 and 2: whole momentum on the ranks that store a part, moments in parts."""
    outer, inner = engine.optimizer, engine.optimizer.optimizer
    names = {id(param): name for name, param in engine.module.named_parameters()}
    mine: list[tuple[str, str, Tensor]] = []
    partitions = getattr(outer, "params_in_partition", None) or [[] for _ in inner.param_groups]
    for group, params in zip(inner.param_groups, partitions):
        state, begin = inner.state[group["params"][0]], 0
        for param in params:
            if group["use_muon"]:
                flat = state["momentum_buffer"][begin : begin + param.numel()]
                mine.append((names[id(param)], "momentum_buffer", flat.view(param.shape).clone()))
            else:
                place = param._hp_mapping.get_hp_fragment_address()
                mine += [(names[id(param)], k, state[k].narrow(0, place.start, place.numel).clone()) for k in MOMENTS]
            begin += param.numel()
    pieces: dict[str, dict[str, list[Tensor]]] = {}
    for name, key, tensor in (entry for of_rank in gathered(mine) for entry in of_rank):
        pieces.setdefault(name, {}).setdefault(key, []).append(tensor)
    found: States = {}
    for name, param in engine.module.named_parameters():
        for key, parts in pieces[name].items():
            whole = parts[0] if key == "momentum_buffer" else torch.cat([part.flatten() for part in parts])
            assert key in MOMENTS or all(torch.equal(whole, part) for part in parts)
            found.setdefault(name, {})[key] = whole.view(param.shape)
    return found


def snapshot(engine: Any) -> dict[str, Any]:
    """All that training goes on from, whole where DeepSpeed can tell. Called on all ranks."""
    state, schedule = engine.basic_optimizer.state, engine.lr_scheduler
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        model = {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}
    return {
        "masters": full_weights_of(engine),
        "model": model,
        "states": states_of(engine) if hasattr(engine.optimizer, "core") or any(state.values()) else {},
        "this rank's states": copy.deepcopy([dict(of_param) for of_param in state.values()]),
        "steps": (engine.global_steps, engine.skipped_steps),
        "samples": engine.global_samples,
        "scale": getattr(engine.optimizer, "cur_scale", 1.0),
        "rates": rates_of(engine),
        "schedule": None if schedule is None else copy.deepcopy(schedule.state_dict()),
    }


def changed(found: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    return {key for key in expected if not same(found[key], expected[key])}


def assert_holds(checkpoint: Checkpoint, truth: dict[str, Any]) -> None:
    """The checkpoint's fp32 weights and states are those that the engine held, and no others."""
    trained = {name: param for name, param in checkpoint.params.items() if param.states}
    assert set(trained) == set(truth["weights"])
    for name, param in trained.items():
        expected = {"fp32": truth["weights"][name], **truth["states"][name]}
        assert set(param.states) == set(expected), name
        for key, tensor in param.states.items():
            found = tensor.read()
            assert tuple(found.shape) == tensor.shape == tuple(expected[key].shape), (name, key)
            assert found.dtype == tensor.dtype and torch.equal(found.float(), expected[key].float().cpu()), (name, key)


def convert_as_deepspeed_does(folder: Path, tag: str) -> str:
    into = folder / "theirs"
    folders = {"input_folder": str(folder / tag), "output_folder": str(into / tag)}
    workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(argparse.Namespace(**folders, **workers, inject_missing_state=True))
    return str(into)


def go_through(pool: RankPool, folder: Path, legs: Engines, train_step: Step, renewed: Collection[int]) -> None:
    """One run through several engines, by universal checkpoints. Each has what it has loaded, to the bit, and the last,
    which is like the first, goes on as that does. ``renewed`` legs are on new processes."""
    load, goings_on = None, []
    for number, leg in enumerate(legs):
        if number in renewed:
            pool.close()
        saved, ends = folder / f"leg {number}", number in (0, len(legs) - 1)
        found = pool.run(_travel, str(saved), load and str(load), ends, leg, train_step)
        goings_on += [found] * ends
        new = folder / f"universal {number}"
        succeeds("convert", saved, new, "--to", "universal", "--json")
        assert load is None or not [d for d in differences(formats.read(saved), formats.read(load)) if d.what]
        load = new
    assert same(*goings_on)


def _travel(
    folder: str, load: str | None, goes_on: bool, leg: Callable[[], Any], train_step: Step
) -> dict[str, Tensor]:
    """Two steps, or what was loaded; then one more if the run ``goes_on``, and the weights."""
    with leg() as engine:
        for step in range(2) if load is None else [7]:  # what it had before must not matter
            train_step(engine, step)
        if load is not None:
            engine.load_checkpoint(load)
        assert engine.global_steps == 2 and engine.lr_scheduler.last_epoch == 2
        engine.save_checkpoint(folder)
        if goes_on:
            train_step(engine, 2)
        return full_weights_of(engine)


def assert_missed(tag: Path, file: str, words: str) -> None:
    """The folder is not read without the file."""
    (tag / file).rename(tag.parent / file)
    with pytest.raises(CheckpointError, match=words):
        formats.read(tag)
    (tag.parent / file).rename(tag / file)


def flip(file: Path, of: str = "") -> None:
    """One bit of the largest record of a file that torch.save wrote, of those whose names have ``of`` in them."""
    with zipfile.ZipFile(file) as archive:
        entry = max((e for e in archive.infolist() if of in e.filename), key=lambda entry: entry.file_size)
        with archive.open(entry) as record:
            inside = record.read()
    data = bytearray(file.read_bytes())
    place = bytes(data).index(inside, entry.header_offset)
    data[place + len(inside) // 2] ^= 4
    file.write_bytes(data)
