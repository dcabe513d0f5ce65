"""The Trainer and Accelerate, with DeepSpeed and with FSDP2: they train, equal torch.optim, and resume exactly."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.launcher import ROOT, metrics, run_script, succeeds, surroundings_kept
from tests.ranks import RankPool, free_port
from tests.zero import newton_schulz_in_float32

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
sys.path.append(str(ROOT / "examples"))

from corpus import Corpus  # noqa: E402
from hugging_face import ADAMW, MUON, ROWS, Windows, small_llama, small_model  # noqa: E402

STEPS, HALF, ACCUMULATION, LAYERS, WIDTH, CONTEXT, CLIP = 6, 3, 2, 2, 32, 32, 1.0
OPTIONS = {
    "steps": STEPS,
    "save-every": HALF,
    "accumulation": ACCUMULATION,
    "clip": CLIP,
    "layers": LAYERS,
    "width": WIDTH,
    "context": CONTEXT,
}
# Two ranks sum gradients in another order than one process: fp32 rounds that at 6e-8 of each gradient. An iteration of
# Newton-Schulz multiplies small singular values by up to 3.4445, so five of them make 485 times that: 3e-5 of a matrix.
# What AdamW trains has no such factor. A rate that is off by 0.1 % shows as 6e-4, a weight decay by 1 % as 1e-5.
MATRIX_TOLERANCE, ELEMENTWISE_TOLERANCE = 3e-5, 1e-6
ACCELERATE, TRAINER = "accelerate_deepspeed.py", "hf_deepspeed.py"
ACCELERATE_FSDP2, TRAINER_FSDP2 = "accelerate_fsdp2.py", "hf_fsdp2.py"
BY_TRAINER, BY_CONFIG = "hf_deepspeed.json", "hf_deepspeed_schedule.json"
FSDP2_SETTINGS = ROOT / "configs" / "accelerate_fsdp2.yaml"
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}  # hosts would use an accelerator that processes see


@dataclass(frozen=True)
class Case:
    """A run: which launcher starts which example with which configuration (None: FSDP2, which has no such file).

    ``launched`` cases run under their launchers in ``make test``, too; others on ranks that are up.
    """

    launcher: str
    script: str
    config: str | None = None
    stage: int = 2
    model: str = "llama"
    more: tuple[str, ...] = ()
    launched: bool = False


CASES = {
    "trainer": Case("deepspeed", TRAINER, BY_TRAINER, more=("--gradient-checkpointing",), launched=True),
    "accelerate": Case("accelerate", ACCELERATE, BY_CONFIG, more=("--gradient-checkpointing",)),
    "trainer-config-schedule-stage1": Case("deepspeed", TRAINER, BY_CONFIG, stage=1),
    "trainer-accelerate-stage3": Case("accelerate", TRAINER, BY_TRAINER, stage=3),
    "accelerate-stage0": Case("accelerate", ACCELERATE, BY_CONFIG, stage=0),
    "trainer-gpt2": Case("deepspeed", TRAINER, BY_TRAINER, model="gpt2"),
    "accelerate-fsdp2": Case("accelerate", ACCELERATE_FSDP2, launched=True),
    "trainer-fsdp2": Case("torchrun", TRAINER_FSDP2),
}


def written_config(name: str, folder: Path, stage: int) -> Path:
    """A shipped configuration at ``stage`` and with Newton-Schulz in fp32, in ``folder``."""
    settings = json.loads((ROOT / "configs" / name).read_text())
    settings["zero_optimization"]["stage"] = stage
    # torch.optim.Muon, which runs are compared with, takes GPT-2's fused weights whole.
    settings["optimizer"]["params"].update({"ns_dtype": "float32", "atoms": {"*": "whole"}})
    path = folder / name
    path.write_text(json.dumps(settings))
    return path


def train(ranks: RankPool, case: Case, out: Path, *more: object, launched: bool) -> str:
    """Run an example to its end; what it printed."""
    options = [part for key, value in {**OPTIONS, "out": out}.items() for part in (f"--{key}", value)]
    script, config = ROOT / "examples" / case.script, None
    if case.config is None:
        options += ["--ns-dtype", "float32"]
    else:
        config = written_config(case.config, out, case.stage)
        model: str | Path = case.model
        if case.stage == 3:  # whose random weights are others
            model = out / "weights"
            small_model(case.model, LAYERS, WIDTH).save_pretrained(model)
        options += ["--model", model]
        options += ["--deepspeed", config] if case.launcher == "deepspeed" else []
    arguments = [str(part) for part in [script, "--cpu", *options, *case.more, *more]]
    if launched:
        return succeeds([*map(str, launcher_of(case, config)), *arguments], ROOT, **HIDDEN)
    try:
        port = {"MASTER_PORT": str(free_port())}
        printed = ranks.run(run_example, arguments, {**variables_of(case, config), **port}, case.config is not None)
    finally:
        ranks.renew()
    return "".join(printed)


def launcher_of(case: Case, config: Path | None) -> list[object]:
    """The launcher's program by its module, so that it is this interpreter's."""
    python = [sys.executable, "-m"]
    if case.launcher == "deepspeed":
        return [*python, "deepspeed.launcher.runner", "--num_accelerators", 2, "--master_port", free_port()]
    if case.launcher == "torchrun":
        return [*python, "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
    settings = FSDP2_SETTINGS if config is None else ROOT / "configs" / "accelerate_deepspeed.yaml"
    command = [*python, "accelerate.commands.launch", "--config_file", settings, "--num_processes", 2]
    return [*command, "--main_process_port", free_port(), *(["--deepspeed_config_file", config] if config else [])]


def variables_of(case: Case, config: Path | None) -> dict[str, str]:
    """What a script learns from its launcher."""
    if case.launcher != "accelerate":
        return HIDDEN
    if config is not None:
        return {**HIDDEN, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
    settings = yaml.safe_load(FSDP2_SETTINGS.read_text())["fsdp_config"]
    return {**HIDDEN, "ACCELERATE_USE_FSDP": "true", **{key.upper(): str(value) for key, value in settings.items()}}


def run_example(arguments: list[str], variables: dict[str, str], joined: bool) -> str:
    """On a rank."""
    with accelerate_as_it_was():
        code, printed = run_script(arguments, variables, joined)
    assert code == 0, printed
    return printed


@contextlib.contextmanager
def accelerate_as_it_was() -> Iterator[None]:
    """Takes back what Accelerate and the examples keep in globals, and begins without it."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kept = AcceleratorState.__init__, PartialState._prepare_backend
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        with surroundings_kept():
            yield
    finally:
        AcceleratorState.__init__, PartialState._prepare_backend = kept
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def run(
    request: pytest.FixtureRequest, rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Path, str]:
    """A whole run: what it was, its folder, and what it printed."""
    out, case = tmp_path_factory.mktemp("run"), request.param
    launched = case.launched or request.config.getoption("full")
    return case, out, train(rank_pools[2], case, out, launched=launched)


def is_matrix(name: str) -> bool:
    return bool(re.search(r"\.(\w+_proj|c_attn|c_fc)\.weight$", name))


class StoredTransposed(torch.optim.Optimizer):
    """torch.optim.Muon on transposed copies of weights that a model stores as (in, out)."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {"lr": MUON["lr"]})
        self.copies = [torch.nn.Parameter(param.detach().T.clone()) for param in params]
        self.muon = torch.optim.Muon(self.copies, **MUON)

    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self.muon.param_groups[0]["lr"] = group["lr"]
        for copy, param in zip(self.copies, group["params"]):
            copy.grad = param.grad.T.clone()
        self.muon.step()
        with torch.no_grad():
            for copy, param in zip(self.copies, group["params"]):
                param.copy_(copy.T)


@cache
def reference(
    model_name: str, by_config: bool
) -> tuple[list[float], list[float], list[list[float]], dict[str, Tensor]]:
    """Losses, gradient norms, rates and final weights of torch.optim on one process and the same batches."""
    model = small_model(model_name, LAYERS, WIDTH)
    named = dict(model.named_parameters())
    matrices = [named.pop(name) for name in list(named) if is_matrix(name)]
    muon = StoredTransposed(matrices) if model_name == "gpt2" else torch.optim.Muon(matrices, **MUON)
    optimizers = [muon, torch.optim.AdamW(list(named.values()), **ADAMW)]
    schedules = [schedule(by_config, *both) for both in zip(optimizers, (MUON["lr"], ADAMW["lr"]))]
    parts = ACCUMULATION * 2
    windows = Windows(Corpus.load(None, CONTEXT), STEPS * parts * ROWS, CONTEXT)
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        total = 0.0
        for part in range(step * parts, (step + 1) * parts):
            tokens = torch.stack([windows[number]["input_ids"] for number in range(part * ROWS, (part + 1) * ROWS)])
            loss = model(input_ids=tokens, labels=tokens).loss / parts
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
        with newton_schulz_in_float32():
            for optimizer, its_schedule in zip(optimizers, schedules):
                optimizer.step()
                optimizer.zero_grad()
                its_schedule.step()
    return losses, norms, rates, {name: param.detach() for name, param in model.named_parameters()}


def schedule(by_config: bool, optimizer: torch.optim.Optimizer, rate: float) -> Any:
    """The Trainer's linear decay, or DeepSpeed's, both as they are alone with one optimizer."""
    if not by_config:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    return WarmupDecayLR(optimizer, total_num_steps=STEPS, warmup_max_lr=rate, warmup_num_steps=1)


def test_it_trains_and_routes_the_matrices(run: tuple[Case, Path, str]) -> None:
    case, out, output = run
    assert [row["step"] for row in metrics(out)] == list(range(1, STEPS + 1))
    matrices, trained = {"llama": (14, 21), "gpt2": (8, 28)}[case.model]
    assert output.count(f"Routing: {matrices} of {trained} trained parameters are matrices") == 1
    plan = f"{matrices} matrices by muon" if case.config else "14 matrices and 7 element-wise parameters on a mesh of"
    assert output.count(plan) == 1
    rules = dict(re.findall(r"│ (\S+) +│ [^│]+ │ (\w+)(?:: \w+)? +│", output))
    assert len(rules) > 5 and {name for name, r in rules.items() if r == "matrix"} == {n for n in rules if is_matrix(n)}


def test_it_equals_torch_optim_on_one_process(run: tuple[Case, Path, str]) -> None:
    from safetensors.torch import load_file

    case, out, _ = run
    losses, norms, rates, weights = reference(case.model, case.config == BY_CONFIG)
    ours = load_file(out / "model" / "model.safetensors")
    if case.model == "gpt2":  # tied; under DeepSpeed both names are saved
        assert torch.equal(ours.pop("lm_head.weight"), ours["transformer.wte.weight"])
    assert ours.keys() == weights.keys()
    rows = metrics(out)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    for row, loss, norm in zip(rows, losses, norms, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=2e-6)
    if "lr" in rows[0]:
        for row, expected in zip(rows, rates, strict=True):
            assert row["lr"] == pytest.approx(expected, rel=1e-12)
    else:  # under DeepSpeed, the Trainer logs the rate that comes next
        logged = [matrix for matrix, _ in rates[case.config is not None :]]
        assert [row["learning_rate"] for row in rows[: len(logged)]] == pytest.approx(logged)
    for name, weight in weights.items():
        tolerance = MATRIX_TOLERANCE if is_matrix(name) else ELEMENTWISE_TOLERANCE
        found, expected = without_key_bias(name, ours[name]), without_key_bias(name, weight)
        assert (found - expected).norm() <= tolerance * expected.norm(), name


def without_key_bias(name: str, weight: Tensor) -> Tensor:
    """Softmax takes no notice of the keys' bias: its gradient is rounding, which AdamW blows up."""
    if not name.endswith("c_attn.bias"):
        return weight
    query, _, value = weight.chunk(3)
    return torch.cat([query, value])


def test_a_resumed_run_has_exactly_the_losses_of_a_whole_one(
    request: pytest.FixtureRequest, ranks: RankPool, run: tuple[Case, Path, str], tmp_path: Path
) -> None:
    case, out, _ = run
    train(ranks, case, tmp_path, "--resume", out / f"checkpoint-{HALF}", launched=request.config.getoption("full"))
    keep = ("step", "loss", "grad_norm", "lr", "learning_rate")
    whole, resumed = ([{k: row[k] for k in keep if k in row} for row in metrics(path)] for path in (out, tmp_path))
    assert len(resumed) == STEPS - HALF and resumed == whole[HALF:]
    final = [(path / "model" / "model.safetensors").read_bytes() for path in (out, tmp_path)]
    assert final[0] == final[1]


# -- what a DeepSpeed configuration may say, under Accelerate's own prepare()


def settings_for(stage: int = 2, params: dict[str, Any] | None = None) -> dict[str, Any]:
    optimizer = {"type": "LayerWiseMuon", "params": {"lr": "auto", "weight_decay": "auto", "report": False}}
    optimizer["params"].update({"adamw": {"lr": 3e-3}} if params is None else params)
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
    }


@contextlib.contextmanager
def deepspeed_accelerator(settings: dict[str, Any]) -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from hugging_face import deepspeed_on_cpus_too

    with accelerate_as_it_was():
        deepspeed_on_cpus_too()
        yield Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))


def losses_of(model: Any, backward: Any, after: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        tokens = torch.randint(256, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        after()
        losses.append(loss.item())
    return losses


def slower_and_slower(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def groups_and_rates(as_object: bool) -> tuple[list[tuple[Any, ...]], list[list[float]], list[float]]:
    """Rule and decay of every group, and the rates and losses of four steps."""
    from accelerate.utils import DummyOptim, DummyScheduler

    from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon

    settings, model = settings_for(), small_model("llama", 1, 32)
    named = list(model.named_parameters())
    decayed, kept = ([p for name, p in named if ("norm" in name) == is_norm] for is_norm in (False, True))
    # The two groups of nearly all of Hugging Face's scripts.
    given = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    if as_object:
        del settings["optimizer"]
    with deepspeed_accelerator(settings) as accelerator:
        optimizer: Any = DummyOptim(given, lr=0.02)
        if as_object:
            optimizer = LayerWiseMuon(given, lr=0.02, adamw={"lr": 3e-3}, report=False)
            engine, optimizer = accelerator.prepare(model, optimizer)
            scheduler: Any = slower_and_slower(optimizer)
        else:
            scheduler = DummyScheduler(optimizer, lr_scheduler_callable=slower_and_slower)
            engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        groups = [(group["rule"], group["weight_decay"]) for group in optimizer.param_groups]
        rates: list[list[float]] = []
        losses: list[float] = []
        for step in range(4):
            rates.append([group["lr"] for group in optimizer.param_groups])
            losses += losses_of(engine, accelerator.backward, lambda: None, range(step, step + 1))
            scheduler.step()
        engine.destroy()
    return groups, rates, losses


def test_groups_keep_their_decay_and_a_schedule_of_factors_their_ratio(ranks: RankPool) -> None:
    """By the configuration with ``DummyOptim``, and as an object, whose schedule is made after ``prepare``."""
    by_config = ranks.run(groups_and_rates, as_object=False)
    assert ranks.run(groups_and_rates, as_object=True) == by_config
    for groups, rates, losses in by_config:
        assert groups == [("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)]
        assert len(set(losses)) == 4
        for step, (matrix, *others) in enumerate(rates):
            assert matrix == pytest.approx(0.02 / (1 + step)) and others == pytest.approx([3e-3 / (1 + step)] * 2)


def prepare_only(settings: dict[str, Any]) -> None:
    from accelerate.utils import DummyOptim

    with deepspeed_accelerator(settings) as accelerator:
        model = small_model("llama", 1, 32)
        accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.02))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        # Accelerate knows no value for these and says so itself.
        ({"adamw": {"lr": "auto"}}, "`optimizer.params.adamw.lr` not found in kwargs"),
        ({"policy": "auto"}, "`optimizer.params.policy` not found in kwargs"),
        # What is left of AdamW's entry.
        ({"betas": [0.9, 0.999], "adamw": {"lr": 3e-3}}, "unknown key 'betas'; did you mean 'adamw.betas'?"),
        ({"torch_adam": True}, "unknown key 'torch_adam'"),
    ],
    ids=["adamw", "policy", "betas", "torch_adam"],
)
def test_what_cannot_be_filled_in_is_refused_by_name(ranks: RankPool, params: dict[str, Any], message: str) -> None:
    for error in ranks.errors(prepare_only, settings_for(params=params)):
        assert error.startswith("ValueError") and message in error


# -- FSDP2's sharded_later, under Accelerate's own prepare()


@contextlib.contextmanager
def prepared(state_dict_type: str = "SHARDED_STATE_DICT") -> Iterator[tuple[Any, Any, Any]]:
    """An Accelerator, and a small Llama with its optimizer after ``prepare``."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from hugging_face import shard_on_cpus_too

    from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer

    with accelerate_as_it_was():
        shard_on_cpus_too()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type=state_dict_type
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, elementwise = small_llama(1, 32), {"name": "adamw", **ADAMW}
        optimizer = LayerWiseOptimizer(model, **MUON, elementwise=elementwise, report=False, sharded_later=True)
        yield accelerator, *accelerator.prepare(model, optimizer)


def take_steps(model: Any, optimizer: Any, steps: range) -> list[float]:
    def after() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return losses_of(model, torch.autograd.backward, after, steps)


def state_before_the_first_step() -> tuple[int, int, set[float], bool]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with prepared() as (_, model, optimizer):
        before = [param.detach().to_local().clone() for param in model.parameters()]
        if torch.distributed.get_rank() == 0:
            assert len(optimizer.state) == 12  # one rank alone may look: nothing is exchanged for it
        state = get_optimizer_state_dict(model, optimizer)["state"]
        momenta = [values["momentum_buffer"] for values in state.values() if "momentum_buffer" in values]
        counters = {float(values["step"]) for values in state.values() if "step" in values}
        same = all(torch.equal(a, b.detach().to_local()) for a, b in zip(before, model.parameters()))
    return len(state), len(momenta), counters, same


def test_state_is_there_without_a_step_once_parameters_are_sharded(ranks: RankPool) -> None:
    """Otherwise torch.distributed.checkpoint takes a step to get state, which leaves AdamW's counters at 1."""
    for answer in ranks.run(state_before_the_first_step):
        assert answer == (12, 7, {0.0}, True)


def losses_after_loading(folder: str, saved_after: int) -> tuple[list[float], list[float]]:
    """Losses of the three steps after a save, of the run that saved and of one that loads before its first step."""
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    kind, after = Path(folder).name, range(saved_after, saved_after + 3)
    with prepared(kind) as (accelerator, model, optimizer):
        plugin = accelerator.state.fsdp_plugin
        take_steps(model, optimizer, range(saved_after))
        save_fsdp_model(plugin, accelerator, model, folder)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        whole = take_steps(model, optimizer, after)
    with prepared(kind) as (accelerator, model, optimizer):
        plugin = accelerator.state.fsdp_plugin
        load_fsdp_model(plugin, accelerator, model, folder)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        return whole, take_steps(model, optimizer, after)


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_checkpoint_is_loaded_before_the_first_step(
    ranks: RankPool, tmp_path: Path, kind: str, saved_after: int
) -> None:
    for whole, resumed in ranks.run(losses_after_loading, str(tmp_path / kind), saved_after):
        assert len(whole) == 3 and resumed == whole


def test_what_cannot_be_before_and_after_sharding_is_refused() -> None:
    from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer

    optimizer = LayerWiseOptimizer(small_llama(1, 32), **MUON, report=False, sharded_later=True)
    assert not optimizer.state
    with pytest.raises(RuntimeError, match="no parameter in its param groups is a DTensor; check that prepare"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="takes no param group after it was made"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})


# -- the page


def test_the_pages_optimizer_entry_is_complete() -> None:
    from lwopt_backend.muon_config import LayerWiseMuonConfig
    from lwopt_backend.options import parse

    page = (ROOT / "docs" / "deepspeed_hugging_face.md").read_text()
    (entry,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    params = json.loads(f"{{{entry}}}")["optimizer"]["params"]
    assert {key for key, value in params.items() if value == "auto"} == {"lr", "weight_decay"}
    parse(LayerWiseMuonConfig, {**params, "lr": 0.02, "weight_decay": 0.1}, "the page")


def test_the_pages_table_has_a_row_for_every_case() -> None:
    page = (ROOT / "docs" / "deepspeed_hugging_face.md").read_text()
    section = page[page.index("## What is checked") :]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    told = {(row[0].split(",")[0], row[1].strip("`").split()[0], row[2][0], row[3].split(",")[0]) for row in rows}
    names = {TRAINER: "Trainer", ACCELERATE: "Accelerate", "llama": "Llama", "gpt2": "GPT-2"}
    cases = [case for case in CASES.values() if case.config is not None]
    assert len(rows) == len(cases)
    assert told == {(names[c.script], c.launcher, str(c.stage), names[c.model]) for c in cases}
