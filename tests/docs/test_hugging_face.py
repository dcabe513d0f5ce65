"""The Trainer and Accelerate, with DeepSpeed and with FSDP2: they train, equal torch.optim, and resume exactly."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate import utils as accelerates
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lwopt_backend.checkpoint import formats
from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.support.cells import cells
from tests.support.command_line import lwopt
from tests.support.launcher import ROOT, metrics, run_script, succeeds, surroundings_kept
from tests.support.models import rounding
from tests.support.on_ranks import on_ranks
from tests.support.pages import table
from tests.support.ranks import RankPool, free_port
from tests.support.references import Reference, newton_schulz_in_float32

sys.path.append(str(ROOT / "examples"))

import hugging_face  # noqa: E402
from corpus import Corpus  # noqa: E402
from hugging_face import ADAMW, MUON, ROWS, Windows, small_llama  # noqa: E402

TEXT = ROOT / "docs"
STEPS, HALF, ACCUMULATION, LAYERS, WIDTH, CONTEXT, CLIP = 6, 3, 2, 2, 32, 32, 1.0
OPTIONS = {"data": TEXT, "steps": STEPS, "save-every": HALF, "accumulation": ACCUMULATION, "clip": CLIP}
SIZES = {"layers": LAYERS, "width": WIDTH, "context": CONTEXT}
# Two ranks sum gradients in another order than one process: fp32 rounds that at 6e-8 of each gradient. An iteration of
# Newton-Schulz multiplies small singular values by up to 3.4445, so five of them make 485 times that: 3e-5 of a matrix.
# AdamW divides a gradient by its own size, so the rounding of an element whose gradient is small moves all of it, and
# sums in other orders vary from run to run: up to 3.2e-6 of a bias was seen. A rate that is off by 0.1 % shows as 6e-4.
TOLERANCE = 3e-5
ACCELERATE, TRAINER = "accelerate_deepspeed.py", "hf_deepspeed.py"
ACCELERATE_FSDP2, TRAINER_FSDP2 = "accelerate_fsdp2.py", "hf_fsdp2.py"
BY_TRAINER, BY_CONFIG = "hf_deepspeed.json", "hf_deepspeed_schedule.json"
FSDP2_SETTINGS = ROOT / "configs" / "accelerate_fsdp2.yaml"
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # hosts would use an accelerator that processes see


@dataclass(frozen=True)
class Case:
    """A run: which launcher starts which example with which configuration (None: FSDP2, which has no such file). In
    ``make test-full`` it does, otherwise the example runs on ranks that are up."""

    launcher: str
    script: str
    config: str | None = None
    stage: int = 2
    more: tuple[str, ...] = ()


CASES = {
    "trainer": Case("deepspeed", TRAINER, BY_TRAINER, more=("--gradient-checkpointing",)),
    "accelerate": Case("accelerate", ACCELERATE, BY_CONFIG, more=("--gradient-checkpointing",)),
    "trainer-config-schedule-stage1": Case("deepspeed", TRAINER, BY_CONFIG, stage=1),
    "trainer-accelerate-stage3": Case("accelerate", TRAINER, BY_TRAINER, stage=3),
    "accelerate-stage0": Case("accelerate", ACCELERATE, BY_CONFIG, stage=0),
    "accelerate-fsdp2": Case("accelerate", ACCELERATE_FSDP2),
    "trainer-fsdp2": Case("torchrun", TRAINER_FSDP2),
}

ELSEWHERE = {  # what goes on from the first half of a case: another engine or stage, on how many ranks; and the format
    "trainer": (Case("torchrun", TRAINER_FSDP2), 2, "accelerate"),
    "accelerate": (Case("accelerate", ACCELERATE, BY_CONFIG), 1, "universal"),
    "trainer-accelerate-stage3": (Case("deepspeed", TRAINER, BY_TRAINER, stage=1), 1, "universal"),
    "accelerate-stage0": (Case("accelerate", ACCELERATE, BY_CONFIG, stage=2), 2, "universal"),
    "trainer-fsdp2": (Case("deepspeed", TRAINER, BY_TRAINER), 1, "universal"),
}


def written_config(name: str, folder: Path, stage: int) -> Path:
    """A shipped configuration at ``stage`` and with Newton-Schulz in fp32, in ``folder``."""
    settings = json.loads((ROOT / "configs" / name).read_text())
    settings["zero_optimization"]["stage"] = stage
    settings["optimizer"]["params"]["ns_dtype"] = "float32"
    path = folder / name
    path.write_text(json.dumps(settings))
    return path


def train(ranks: RankPool, case: Case, out: Path, *more: object, launched: bool) -> str:
    """Run an example to its end; what it printed."""
    options = [part for key, value in {**OPTIONS, **SIZES, "out": out}.items() for part in (f"--{key}", value)]
    config = written_config(case.config, out, case.stage) if case.config else None
    if config is None:
        options += ["--ns-dtype", "float32"]
    else:
        model: str | Path = "llama"
        if case.stage == 3:  # whose random weights are others
            model = out / "weights"
            small_llama(LAYERS, WIDTH).save_pretrained(model)
        options += ["--model", model, *(["--deepspeed", config] if case.launcher == "deepspeed" else [])]
    arguments = [str(part) for part in [ROOT / "examples" / case.script, "--cpu", *options, *case.more, *more]]
    if launched:
        command = command_of(case, config, ranks.world_size)
        return succeeds([sys.executable, "-m", *command, *arguments], ROOT, **HIDDEN)
    variables = variables_of(case, config, arguments, ranks.world_size)
    try:
        return "".join(ranks.run(run_example, arguments, variables, config is not None))
    finally:
        ranks.close()


def command_of(case: Case, config: Path | None, processes: int) -> list[str]:
    """The launcher's module, so that it is this interpreter's, and its options."""
    port = "--main_process_port" if case.launcher == "accelerate" else "--master_port"
    settings = FSDP2_SETTINGS if config is None else ROOT / "configs" / "accelerate_deepspeed.yaml"
    of_accelerate = ["accelerate.commands.launch", "--config_file", settings, "--num_processes", processes]
    command = {
        "deepspeed": ["deepspeed.launcher.runner", "--num_accelerators", processes],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", processes],
        "accelerate": [*of_accelerate, *(["--deepspeed_config_file", config] if config else [])],
    }[case.launcher]
    return [str(part) for part in [*command, port, free_port()]]


def variables_of(case: Case, config: Path | None, arguments: list[str], processes: int) -> dict[str, str]:
    """What a script learns from its launcher: of Accelerate's, what it gives to torch's."""
    found = {**HIDDEN, "MASTER_PORT": str(free_port())}
    if case.launcher == "accelerate":

        def start(given: Any) -> None:
            assert [given.training_script, *given.training_script_args] == arguments
            found.update({key: value for key, value in os.environ.items() if before.get(key) != value})

        _, *options = command_of(case, config, processes)
        before, given = dict(os.environ), launch_command_parser().parse_args([*options, *arguments])
        with mock.patch("torch.distributed.run.run", start), surroundings_kept():
            launch_command(given)
        assert len(found) > 2
    return found


def run_example(arguments: list[str], variables: dict[str, str], joined: bool) -> str:
    """On a rank."""
    with accelerate_as_it_was():
        code, printed = run_script(arguments, variables, joined)
    assert code == 0, printed
    return printed


@contextlib.contextmanager
def accelerate_as_it_was() -> Iterator[None]:
    """Takes back what Accelerate and the examples keep in globals, and begins without it."""
    kept = AcceleratorState.__init__, PartialState._prepare_backend
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        with surroundings_kept():
            yield
    finally:
        unset_hf_deepspeed_config()  # by which transformers would partition the next test's model
        AcceleratorState.__init__, PartialState._prepare_backend = kept
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


# The truth
def is_matrix(name: str) -> bool:
    return name.endswith("_proj.weight")


def schedule(by_config: bool, optimizer: torch.optim.Optimizer, rate: float) -> Any:
    """The Trainer's linear decay, or DeepSpeed's, both as they are alone with one optimizer."""
    if not by_config:
        return LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    return WarmupDecayLR(optimizer, total_num_steps=STEPS, warmup_max_lr=rate, warmup_num_steps=1)


@dataclass
class Truth:
    losses: list[float]
    norms: list[float]
    rates: list[list[float]]
    weights: dict[str, Tensor]


@cache
def reference(by_config: bool) -> Truth:
    """torch.optim on one process and the same batches."""
    model = small_llama(LAYERS, WIDTH)
    matrices = [name for name, _ in model.named_parameters() if is_matrix(name)]
    single = Reference(model, clip=CLIP, muon=MUON, adamw=ADAMW, matrices=matrices)
    schedules = [schedule(by_config, *both) for both in zip(single.optimizers, (MUON["lr"], ADAMW["lr"]))]
    parts, losses, norms, rates = ACCUMULATION * 2, list[float](), list[float](), []
    windows = Windows(Corpus.load(str(TEXT), CONTEXT), STEPS * parts * ROWS, CONTEXT)
    for step in range(STEPS):
        losses.append(0.0)
        for part in range(step * parts, (step + 1) * parts):
            tokens = torch.stack([windows[number]["input_ids"] for number in range(part * ROWS, (part + 1) * ROWS)])
            loss = model(input_ids=tokens, labels=tokens).loss / parts
            loss.backward()
            losses[-1] += loss.item()
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in single.optimizers])
        with newton_schulz_in_float32():
            norms += single.step()
        for its_schedule in schedules:
            its_schedule.step()
    return Truth(losses, norms, rates, {name: param.detach() for name, param in model.named_parameters()})


@pytest.mark.parametrize("case", CASES)
def test_trainer_equals_torch_optim_and_resumes(
    request: pytest.FixtureRequest, rank_pools: dict[int, RankPool], tmp_path: Path, case: str
) -> None:
    """A run routes matrices, equals torch.optim, and resumes exactly; converted, on another engine, stage or number of
    ranks too. Its last folder converts to the weights that the run saved at its end, whatever the format between."""
    ranks = rank_pools[2]
    of, (out, again), full = CASES[case], (tmp_path / "whole", tmp_path / "resumed"), request.config.getoption("full")
    for folder in (out, again):
        folder.mkdir()
    check_routing(of, train(ranks, of, out, launched=full))
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    check_numbers(of, rows, load_file(out / "model" / "model.safetensors"))
    train(ranks, of, again, "--resume", out / f"checkpoint-{HALF}", launched=full)
    keep = ("step", "loss", "grad_norm", "lr", "learning_rate")
    whole, resumed = ([{k: row[k] for k in keep if k in row} for row in metrics(path)] for path in (out, again))
    assert len(resumed) == STEPS - HALF and resumed == whole[HALF:]
    final = [(path / "model" / "model.safetensors").read_bytes() for path in (out, again)]
    assert final[0] == final[1]
    if case in ELSEWHERE:
        there, number, target = ELSEWHERE[case]
        elsewhere, converted = tmp_path / "elsewhere", tmp_path / "converted"
        elsewhere.mkdir()
        assert lwopt("convert", out / f"checkpoint-{HALF}", converted, "--to", target).code == 0
        more = ("--resume", converted, "--accumulation", 2 * ACCUMULATION // number)
        train(rank_pools[number], there, elsewhere, *more, launched=full)
        check_numbers(there, metrics(elsewhere), load_file(elsewhere / "model" / "model.safetensors"))
    kept = load_file(out / "model" / "model.safetensors")
    source = out / f"checkpoint-{STEPS}"
    for target in ("universal", "dcp", "safetensors"):
        assert lwopt("convert", source, tmp_path / target, "--to", target).code == 0
        source = tmp_path / target
    states = [set(param.states) for param in formats.read(tmp_path / "dcp").params.values()]
    assert states.count({"momentum_buffer"}) == 14 and states.count({"exp_avg", "exp_avg_sq"}) == 7
    made = load_file(source / "model.safetensors")
    assert made.keys() == kept.keys() and all(torch.equal(made[name], weight) for name, weight in kept.items())


def check_routing(case: Case, output: str) -> None:
    assert output.count("Routing: 14 of 21 trained parameters are matrices") == 1
    plan = "14 matrices by muon" if case.config else "14 matrices and 7 element-wise parameters on a mesh of"
    assert output.count(plan) == 1
    rules = dict(re.findall(r"│ (\S+) +│ [^│]+ │ (\w+)(?:: \w+)? +│", output))
    assert len(rules) > 5 and {name for name, r in rules.items() if r == "matrix"} == {n for n in rules if is_matrix(n)}


def check_numbers(case: Case, rows: list[dict[str, Any]], ours: dict[str, Tensor]) -> None:
    """Losses, gradient norms and rates of all steps or of the last ones, and final weights."""
    truth, first = reference(case.config == BY_CONFIG), STEPS - len(rows)
    assert ours.keys() == truth.weights.keys()
    assert first or rows[-1]["loss"] < rows[0]["loss"] - 0.1
    tokens, numel = 2 * ACCUMULATION * ROWS * CONTEXT, sum(true.numel() for true in truth.weights.values())
    for row, loss, norm in zip(rows, truth.losses[first:], truth.norms[first:], strict=True):
        assert row["loss"] == pytest.approx(loss, rel=rounding(tokens))
        assert row["grad_norm"] == pytest.approx(norm, rel=rounding(numel))
    if "lr" in rows[0]:
        for row, expected in zip(rows, truth.rates[first:], strict=True):
            assert row["lr"] == pytest.approx(expected, rel=1e-12)
    else:  # under DeepSpeed, the Trainer logs the rate that comes next
        logged = [matrix for matrix, _ in truth.rates[first + (case.config is not None) :]]
        assert [row["learning_rate"] for row in rows[: len(logged)]] == pytest.approx(logged)
    for name, true in truth.weights.items():
        assert (ours[name] - true).norm() <= TOLERANCE * true.norm(), name


# What a DeepSpeed configuration may say, under Accelerate's own prepare()
def loss_of(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    tokens = torch.randint(256, (2, 16), generator=generator)
    return model(input_ids=tokens, labels=tokens).loss


def slower_and_slower(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


@on_ranks(2)
def test_groups_keep_their_decay_and_ratio() -> None:
    """By the configuration with ``DummyOptim``, and as an object, whose schedule is made after ``prepare``."""
    losses: dict[bool, list[float]] = {True: [], False: []}
    for as_object in losses:
        settings: dict[str, Any] = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
        settings["train_micro_batch_size_per_gpu"], model = 2, small_llama(1, 32)
        named = list(model.named_parameters())
        decayed, kept = ([p for name, p in named if ("norm" in name) == is_norm] for is_norm in (False, True))
        # The two groups of nearly all of Hugging Face's scripts.
        given = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
        if not as_object:
            entry = {"lr": "auto", "weight_decay": "auto", "report": False, "adamw": {"lr": 3e-3}}
            settings["optimizer"] = {"type": "LayerWiseMuon", "params": entry}
        with accelerate_as_it_was():
            hugging_face.deepspeed_on_cpus_too()
            accelerator = Accelerator(deepspeed_plugin=accelerates.DeepSpeedPlugin(hf_ds_config=settings))
            optimizer: Any = accelerates.DummyOptim(given, lr=0.02)
            if as_object:
                optimizer = LayerWiseMuon(given, lr=0.02, adamw={"lr": 3e-3}, report=False)
                engine, optimizer = accelerator.prepare(model, optimizer)
                scheduler: Any = slower_and_slower(optimizer)
            else:
                scheduler = accelerates.DummyScheduler(optimizer, lr_scheduler_callable=slower_and_slower)
                engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            groups = [(group["rule"], group["weight_decay"]) for group in optimizer.param_groups]
            assert groups == [("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)]
            for step in range(4):
                rates = [group["lr"] * (1 + step) for group in optimizer.param_groups]
                assert rates == pytest.approx([0.02, 3e-3, 3e-3])
                loss = loss_of(engine, step)
                accelerator.backward(loss)
                losses[as_object].append(loss.item())
                scheduler.step()
            engine.destroy()
    assert losses[True] == losses[False] and len(set(losses[True])) == 4


# FSDP2's sharded_later, under Accelerate's own prepare()
@contextlib.contextmanager
def prepared(state_dict_type: str = "SHARDED_STATE_DICT") -> Iterator[tuple[Any, Any, Any]]:
    """An Accelerator, and a small Llama with its optimizer after ``prepare``."""
    with accelerate_as_it_was():
        hugging_face.shard_on_cpus_too()
        plugin = accelerates.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type=state_dict_type
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, elementwise = small_llama(1, 32), {"name": "adamw", **ADAMW}
        optimizer = LayerWiseOptimizer(model, **MUON, elementwise=elementwise, report=False, sharded_later=True)
        yield accelerator, *accelerator.prepare(model, optimizer)


@on_ranks(2)
def test_state_is_there_once_parameters_are_sharded() -> None:
    """State is there without a step. Otherwise torch.distributed.checkpoint takes a step to get state, which leaves
    AdamW's counters at 1."""
    with prepared() as (_, model, optimizer):
        before = [param.detach().to_local().clone() for param in model.parameters()]
        if torch.distributed.get_rank() == 0:
            assert len(optimizer.state) == 12  # one rank alone may look: nothing is exchanged for it
        state = get_optimizer_state_dict(model, optimizer)["state"]
        assert len(state) == 12 and sum("momentum_buffer" in values for values in state.values()) == 7
        assert {float(values["step"]) for values in state.values() if "step" in values} == {0.0}
        assert all(torch.equal(a, b.detach().to_local()) for a, b in zip(before, model.parameters()))


def take_steps(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(loss_of(model, step))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@on_ranks(2)
@cells(kind=["SHARDED_STATE_DICT", "FULL_STATE_DICT"], saved_after=[0, 2])
def test_a_checkpoint_is_loaded_before_the_first_step(tmp_path: Path, kind: str, saved_after: int) -> None:
    """The run that saved and the one that loads have equal losses in the three steps after it."""
    after = range(saved_after, saved_after + 3)
    with prepared(kind) as (accelerator, model, optimizer):
        plugin = accelerator.state.fsdp_plugin
        take_steps(model, optimizer, range(saved_after))
        accelerates.save_fsdp_model(plugin, accelerator, model, str(tmp_path))
        accelerates.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path))
        whole = take_steps(model, optimizer, after)
    with prepared(kind) as (accelerator, model, optimizer):
        plugin = accelerator.state.fsdp_plugin
        accelerates.load_fsdp_model(plugin, accelerator, model, str(tmp_path))
        accelerates.load_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path))
        assert take_steps(model, optimizer, after) == whole


@on_ranks(2)
def test_a_checkpoint_is_read_as_it_was_held(tmp_path: Path) -> None:
    """From the folder with Accelerate's two folders."""
    with prepared() as (accelerator, model, optimizer):
        take_steps(model, optimizer, range(2))
        accelerates.save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(tmp_path))
        accelerates.save_fsdp_optimizer(accelerator.state.fsdp_plugin, accelerator, optimizer, model, str(tmp_path))
        whole = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(model, options=whole)
        state = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
    if torch.distributed.get_rank() != 0:  # the others have no whole tensors
        return
    found = formats.read(tmp_path)
    assert {each["rule"] for each in found.groups} == {"muon", "adamw"} and found.iteration == 2
    assert set(found.params) == set(state) == set(weights)
    for name, param in found.params.items():
        assert torch.equal(param.weight.read(), weights[name])
        assert param.step == state[name].pop("step", None)
        assert set(param.states) == set(state[name])
        assert all(torch.equal(tensor.read(), state[name][key]) for key, tensor in param.states.items())


def test_what_cannot_be_before_and_after_sharding_is_refused() -> None:
    optimizer = LayerWiseOptimizer(small_llama(1, 32), **MUON, report=False, sharded_later=True)
    assert not optimizer.state
    with pytest.raises(
        RuntimeError, match="expected DTensors in its param groups at the first step, found none; check that prepare"
    ):
        optimizer.step()
    with pytest.raises(RuntimeError, match="expected all param groups in the constructor"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


def test_the_pages_table_has_a_row_for_every_case() -> None:
    rows = table("tested", "Hugging Face", "script")[1:]
    told = {(row[0].split(",")[0], row[1].strip("`").split()[0], row[2][0]) for row in rows}
    names = {TRAINER: "Trainer", ACCELERATE: "Accelerate"}
    cases = [case for case in CASES.values() if case.config is not None]
    assert len(rows) == len(cases)
    assert told == {(names[case.script], case.launcher, str(case.stage)) for case in cases}
