"""The Trainer and Accelerate with DeepSpeed, under real launchers: they train, equal torch.optim, resume exactly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launcher import ROOT, metrics, run_on_cpu
from tests.ranks import RankPool, free_port
from tests.zero import newton_schulz_in_float32

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
sys.path.append(str(ROOT / "examples"))

from corpus import Corpus  # noqa: E402
from hugging_face import ADAMW, MUON, ROWS, Windows, small_model  # noqa: E402

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
# As in test_hf_fsdp2.py: fp32 rounding of another order of summing gradients, 485 times that after Newton-Schulz.
MATRIX_TOLERANCE, ELEMENTWISE_TOLERANCE = 3e-5, 1e-6
PLAIN, TRAINER = "accelerate_deepspeed.py", "hf_deepspeed.py"
BY_TRAINER, BY_CONFIG = "hf_deepspeed.json", "hf_deepspeed_schedule.json"


@dataclass(frozen=True)
class Case:
    """A run: which launcher starts which example with which configuration."""

    launcher: str
    script: str
    config: str
    stage: int = 2
    model: str = "llama"
    more: tuple[str, ...] = ()


CASES = {
    "trainer": Case("deepspeed", TRAINER, BY_TRAINER, more=("--gradient-checkpointing",)),
    "accelerate": Case("accelerate", PLAIN, BY_CONFIG, more=("--gradient-checkpointing",)),
    "trainer-config-schedule-stage1": Case("deepspeed", TRAINER, BY_CONFIG, stage=1),
    "trainer-accelerate-stage3": Case("accelerate", TRAINER, BY_TRAINER, stage=3),
    "accelerate-stage0": Case("accelerate", PLAIN, BY_CONFIG, stage=0),
    "trainer-gpt2": Case("deepspeed", TRAINER, BY_TRAINER, model="gpt2"),
}


@pytest.fixture(scope="module", autouse=True)
def on_cpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def written_config(name: str, folder: Path, stage: int = 2, **params: Any) -> Path:
    """A shipped configuration at ``stage`` and with Newton-Schulz in fp32, in ``folder``."""
    settings = json.loads((ROOT / "configs" / name).read_text())
    settings["zero_optimization"]["stage"] = stage
    # torch.optim.Muon, which runs are compared with, takes GPT-2's fused weights whole.
    settings["optimizer"]["params"].update({"ns_dtype": "float32", "atoms": {"*": "whole"}, **params})
    path = folder / name
    path.write_text(json.dumps(settings))
    return path


def try_to_launch(launcher: str, config: Path, script: Path, *more: Any) -> subprocess.CompletedProcess[str]:
    command: list[Any]
    if launcher == "accelerate":
        command = ["accelerate", "launch", "--config_file", "configs/accelerate_deepspeed.yaml", "--num_processes", 2]
        command += ["--deepspeed_config_file", config, "--main_process_port", free_port(), script, *more]
    else:
        command = ["deepspeed", "--num_accelerators", 2, "--master_port", free_port(), script, *more]
        command += ["--deepspeed", config]
    return run_on_cpu([str(part) for part in command], ROOT)


def launch(case: Case, out: Path, *more: Any) -> str:
    config = written_config(case.config, out, case.stage)
    model: str | Path = case.model
    if case.stage == 3:  # whose random weights are others
        model = out / "weights"
        small_model(case.model, LAYERS, WIDTH).save_pretrained(model)
    options = [part for key, value in OPTIONS.items() for part in (f"--{key}", value)]
    script = ROOT / "examples" / case.script
    options += ["--cpu", "--out", out, "--model", model, *case.more]
    finished = try_to_launch(case.launcher, config, script, *options, *more)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path, str]:
    """A whole run: what it was, its folder, and what it printed."""
    out = tmp_path_factory.mktemp("run")
    return request.param, out, launch(request.param, out)


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
def reference(model_name: str, config: str) -> tuple[list[float], list[float], list[list[float]], dict[str, Tensor]]:
    """Losses, gradient norms, rates and final weights of torch.optim on one process and the same batches."""
    model = small_model(model_name, LAYERS, WIDTH)
    named = dict(model.named_parameters())
    matrices = [named.pop(name) for name in list(named) if is_matrix(name)]
    muon = StoredTransposed(matrices) if model_name == "gpt2" else torch.optim.Muon(matrices, **MUON)
    optimizers = [muon, torch.optim.AdamW(list(named.values()), **ADAMW)]
    schedules = [schedule(config, *both) for both in zip(optimizers, (MUON["lr"], ADAMW["lr"]))]
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


def schedule(config: str, optimizer: torch.optim.Optimizer, rate: float) -> Any:
    """The Trainer's linear decay, or DeepSpeed's, both as they are alone with one optimizer."""
    if config == BY_TRAINER:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    return WarmupDecayLR(optimizer, total_num_steps=STEPS, warmup_max_lr=rate, warmup_num_steps=1)


def test_it_trains_and_routes_the_matrices(run: tuple[Case, Path, str]) -> None:
    case, out, output = run
    assert [row["step"] for row in metrics(out)] == list(range(1, STEPS + 1))
    matrices, trained = {"llama": (14, 21), "gpt2": (8, 28)}[case.model]
    assert output.count(f"Routing: {matrices} of {trained} trained parameters are matrices") == 1
    assert output.count(f"Plan: {matrices} matrices by muon") == 1
    rules = dict(re.findall(r"│ (\S+) +│ [^│]+ │ (\w+) +│", output))
    assert {name for name, rule in rules.items() if rule == "matrix"} == {name for name in rules if is_matrix(name)}


def test_it_equals_torch_optim_on_one_process(run: tuple[Case, Path, str]) -> None:
    from safetensors.torch import load_file

    case, out, _ = run
    losses, norms, rates, weights = reference(case.model, case.config)
    ours = load_file(out / "model" / "model.safetensors")
    if case.model == "gpt2":  # tied; under DeepSpeed both names are saved
        assert torch.equal(ours.pop("lm_head.weight"), ours["transformer.wte.weight"])
    assert ours.keys() == weights.keys()
    rows = metrics(out)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    for row, loss, norm in zip(rows, losses, norms, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=2e-6)
    if case.script == PLAIN:
        for row, expected in zip(rows, rates, strict=True):
            assert row["lr"] == pytest.approx(expected, rel=1e-12)
    else:  # the Trainer logs the rate that comes next
        assert [row["learning_rate"] for row in rows[:-1]] == pytest.approx([matrix for matrix, _ in rates[1:]])
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


def test_a_resumed_run_has_exactly_the_losses_of_a_whole_one(run: tuple[Case, Path, str], tmp_path: Path) -> None:
    case, out, _ = run
    launch(case, tmp_path, "--resume", out / f"checkpoint-{HALF}")
    keep = ("step", "loss", "grad_norm", "lr", "learning_rate")
    whole, resumed = ([{k: row[k] for k in keep if k in row} for row in metrics(path)] for path in (out, tmp_path))
    assert len(resumed) == STEPS - HALF and resumed == whole[HALF:]
    final = [(path / "model" / "model.safetensors").read_bytes() for path in (out, tmp_path)]
    assert final[0] == final[1]


# -- what a configuration may say, under Accelerate's own prepare()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks of our own: Accelerate's state is global."""
    pool = RankPool(2)
    yield pool
    pool.remove()


def settings_for(stage: int = 2, params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "LayerWiseMuon", "params": {"lr": "auto", "weight_decay": "auto", "report": False}}
    optimizer["params"].update({"adamw": {"lr": 3e-3}} if params is None else params)
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
        **more,
    }


def accelerator_for(settings: dict[str, Any]) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin
    from hugging_face import deepspeed_on_cpus_too

    from lwopt_backend.integrations import deepspeed_zero

    AcceleratorState._reset_state(reset_partial_state=True)
    deepspeed_zero.register()
    deepspeed_on_cpus_too()
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))


def take_steps(accelerator: Any, model: Any, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        tokens = torch.randint(256, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        losses.append(loss.item())
    return losses


def decayed_and_not(model: Any) -> list[dict[str, Any]]:
    """The two groups of nearly all of Hugging Face's scripts."""
    named = list(model.named_parameters())
    kept = [param for name, param in named if "norm" in name]
    decayed = [param for name, param in named if "norm" not in name]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]


def groups_and_rates(settings: dict[str, Any]) -> tuple[list[tuple[Any, ...]], list[list[float]], list[float]]:
    """Rule and decay of every group, and the rates and losses of four steps."""
    from accelerate.utils import DummyOptim, DummyScheduler

    accelerator = accelerator_for(settings)
    model = small_model("llama", 1, 32)
    optimizer = DummyOptim(decayed_and_not(model), lr=0.02)
    scheduler = DummyScheduler(optimizer, lr_scheduler_callable=slower_and_slower)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return rates_and_losses(accelerator, model, optimizer, scheduler)


def groups_and_rates_of_an_object(
    settings: dict[str, Any],
) -> tuple[list[tuple[Any, ...]], list[list[float]], list[float]]:
    from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon

    accelerator = accelerator_for(settings)
    model = small_model("llama", 1, 32)
    optimizer = LayerWiseMuon(decayed_and_not(model), lr=0.02, adamw={"lr": 3e-3}, report=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    return rates_and_losses(accelerator, model, optimizer, slower_and_slower(optimizer))


def slower_and_slower(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def rates_and_losses(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any
) -> tuple[list[tuple[Any, ...]], list[list[float]], list[float]]:
    groups = [(group["rule"], group["weight_decay"]) for group in optimizer.param_groups]
    rates, losses = [], []
    for _ in range(4):
        rates.append([group["lr"] for group in optimizer.param_groups])
        losses += take_steps(accelerator, model, 1)
        scheduler.step()
    model.destroy()
    return groups, rates, losses


def test_groups_keep_their_decay_and_a_schedule_of_factors_their_ratio(ranks: RankPool) -> None:
    """By the configuration with ``DummyOptim``, and as an object, whose schedule is made after ``prepare``."""
    by_config = ranks.run(groups_and_rates, settings_for())
    settings = settings_for()
    del settings["optimizer"]
    assert ranks.run(groups_and_rates_of_an_object, settings) == by_config
    for groups, rates, losses in by_config:
        assert groups == [("muon", 0.1), ("adamw", 0.1), ("adamw", 0.0)]
        assert len(set(losses)) == 4
        for step, (matrix, *others) in enumerate(rates):
            assert matrix == pytest.approx(0.02 / (1 + step)) and others == pytest.approx([3e-3 / (1 + step)] * 2)


def prepare_only(settings: dict[str, Any]) -> None:
    from accelerate.utils import DummyOptim

    accelerator = accelerator_for(settings)
    model = small_model("llama", 1, 32)
    engine, _ = accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.02))
    engine.destroy()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        # Accelerate knows no value for these and says so itself.
        ({"adamw": {"lr": "auto"}}, "`optimizer.params.adamw.lr` not found in kwargs"),
        ({"policy": "auto"}, "`optimizer.params.policy` not found in kwargs"),
        ({"exchange_dtype": "auto"}, "`optimizer.params.exchange_dtype` not found in kwargs"),
        # What is left of AdamW's entry.
        ({"betas": [0.9, 0.999], "adamw": {"lr": 3e-3}}, "unknown key 'betas'; did you mean 'adamw.betas'?"),
        ({"torch_adam": True}, "unknown key 'torch_adam'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_filled_in_is_refused_by_name(ranks: RankPool, params: dict[str, Any], message: str) -> None:
    for error in ranks.errors(prepare_only, settings_for(params=params)):
        assert error.startswith("ValueError") and message in error


# -- the page


PAGE = ROOT / "docs" / "deepspeed_hugging_face.md"


def test_the_pages_links_lead_somewhere_and_its_snippets_are_python() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target.partition("#")[0]).exists(), target
    for snippet in re.findall(r"^```python.*?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        compile(snippet, str(PAGE), "exec")


def test_the_pages_optimizer_entry_is_complete() -> None:
    from lwopt_backend.muon_config import LayerWiseMuonConfig
    from lwopt_backend.options import parse

    (entry,) = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    params = json.loads(f"{{{entry}}}")["optimizer"]["params"]
    assert {key for key, value in params.items() if value == "auto"} == {"lr", "weight_decay"}
    parse(LayerWiseMuonConfig, {**params, "lr": 0.02, "weight_decay": 0.1}, "the page")


def test_the_pages_table_has_a_row_for_every_case() -> None:
    section = PAGE.read_text()[PAGE.read_text().index("## What is checked") :]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    told = {(row[0].split(",")[0], row[1].strip("`").split()[0], row[2][0], row[3].split(",")[0]) for row in rows}
    names = {TRAINER: "Trainer", PLAIN: "Accelerate", "llama": "Llama", "gpt2": "GPT-2"}
    assert len(rows) == len(CASES)
    assert told == {(names[c.script], c.launcher, str(c.stage), names[c.model]) for c in CASES.values()}
