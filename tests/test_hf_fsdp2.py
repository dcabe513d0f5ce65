"""Accelerate and the Trainer with FSDP2, under the real launcher: they train, equal torch.optim, and resume exactly."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
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
from hugging_face import ADAMW, MUON, ROWS, Windows, small_llama  # noqa: E402

STEPS, HALF, ACCUMULATION, LAYERS, WIDTH, CONTEXT, CLIP = 8, 4, 2, 2, 32, 32, 1.0
OPTIONS = {
    "steps": STEPS,
    "save-every": HALF,
    "accumulation": ACCUMULATION,
    "clip": CLIP,
    "layers": LAYERS,
    "width": WIDTH,
    "context": CONTEXT,
    "ns-dtype": "float32",
}
ACCELERATE = ["accelerate", "launch", "--config_file", "configs/accelerate_fsdp2.yaml", "--num_processes", 2]
TORCHRUN = ["torchrun", "--nproc_per_node", 2]
# Two ranks sum gradients in another order than one process: fp32 rounds that at 6e-8 of each gradient. An iteration of
# Newton-Schulz multiplies small singular values by up to 3.4445, so five of them make 485 times that: 3e-5 of a matrix.
# What AdamW trains has no such factor. A rate that is off by 0.1 % shows as 6e-4, a weight decay by 1 % as 1e-5.
MATRIX_TOLERANCE, ELEMENTWISE_TOLERANCE = 3e-5, 1e-6
PLAIN, TRAINER = "accelerate_fsdp2.py", "hf_fsdp2.py"


@pytest.fixture(scope="module", autouse=True)
def on_cpus() -> Iterator[None]:
    """FSDP2 shards on an accelerator if processes see one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def try_to_launch(launcher: list[Any], script: str | Path, *more: Any) -> subprocess.CompletedProcess[str]:
    port = "--main_process_port" if launcher[0] == "accelerate" else "--master_port"
    return run_on_cpu([str(part) for part in [*launcher, port, free_port(), script, *more]], ROOT)


def launch(launcher: list[Any], script: str, out: Path, *more: Any) -> str:
    options = [part for key, value in OPTIONS.items() for part in (f"--{key}", value)]
    finished = try_to_launch(launcher, ROOT / "examples" / script, "--cpu", "--out", out, *options, *more)
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.fixture(scope="module", params=[(ACCELERATE, PLAIN), (TORCHRUN, TRAINER)], ids=["accelerate", "trainer"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str, Path, str]:
    """A whole run: its launcher, its script, its folder, and what it printed."""
    launcher, script = request.param
    out = tmp_path_factory.mktemp("run")
    return launcher, script, out, launch(launcher, script, out)


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of torch.optim.Muon and AdamW on one process and the same batches."""
    model = small_llama(LAYERS, WIDTH)
    named = dict(model.named_parameters())
    matrices = [named.pop(name) for name in list(named) if name.endswith("_proj.weight")]
    optimizers = [torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(list(named.values()), **ADAMW)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 - step / STEPS) for o in optimizers]
    parts = ACCUMULATION * 2
    windows = Windows(Corpus.load(None, CONTEXT), STEPS * parts * ROWS, CONTEXT)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for part in range(step * parts, (step + 1) * parts):
            tokens = torch.stack([windows[number]["input_ids"] for number in range(part * ROWS, (part + 1) * ROWS)])
            loss = model(input_ids=tokens, labels=tokens).loss / parts
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        with newton_schulz_in_float32():
            for optimizer, schedule in zip(optimizers, schedules):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def test_it_trains_and_routes_the_llamas_matrices(run: tuple[list[Any], str, Path, str]) -> None:
    _, _, out, output = run
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert output.count("Routing: 14 of 21 trained parameters are matrices") == 1
    assert output.count("14 matrices and 7 element-wise parameters on a mesh of ranks 0-1") == 1
    rules = dict(re.findall(r"│ (\S+) +│ [^│]+ │ (\w+: \w+) +│", output))
    assert {name: rule for name, rule in rules.items() if not name.endswith("_proj.weight")} == {
        "model.embed_tokens.weight": "elementwise: adamw",
        "model.layers.*.input_layernorm.weight": "elementwise: adamw",
        "model.layers.*.post_attention_layernorm.weight": "elementwise: adamw",
        "model.norm.weight": "elementwise: adamw",
        "lm_head.weight": "elementwise: adamw",
    }
    assert {rule for name, rule in rules.items() if name.endswith("_proj.weight")} == {"matrix: muon"}


def test_it_equals_torch_optim_on_one_process(run: tuple[list[Any], str, Path, str], reference: Any) -> None:
    from safetensors.torch import load_file

    _, _, out, _ = run
    losses, norms, weights = reference
    rows = metrics(out)
    ours = load_file(out / "model" / "model.safetensors")
    assert ours.keys() == weights.keys()
    for row, loss, norm in zip(rows, losses, norms, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=2e-6)
    for name, weight in weights.items():
        tolerance = MATRIX_TOLERANCE if name.endswith("_proj.weight") else ELEMENTWISE_TOLERANCE
        assert (ours[name] - weight).norm() <= tolerance * weight.norm(), name


def test_a_resumed_run_has_exactly_the_losses_of_a_whole_one(
    run: tuple[list[Any], str, Path, str], tmp_path: Path
) -> None:
    launcher, script, out, _ = run
    launch(launcher, script, tmp_path, "--resume", out / f"checkpoint-{HALF}")
    keep = ("step", "loss", "grad_norm", "lr", "learning_rate")
    whole, resumed = ([{k: row[k] for k in keep if k in row} for row in metrics(path)] for path in (out, tmp_path))
    assert len(resumed) == STEPS - HALF and resumed == whole[HALF:]
    final = [(path / "model" / "model.safetensors").read_bytes() for path in (out, tmp_path)]
    assert final[0] == final[1]


# -- sharded_later, under Accelerate's own prepare()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks of our own: Accelerate's state is global."""
    pool = RankPool(2)
    yield pool
    pool.remove()


def prepared(state_dict_type: str = "SHARDED_STATE_DICT") -> tuple[Any, Any, Any]:
    """An Accelerator, and a small Llama with its optimizer after ``prepare``."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from hugging_face import shard_on_cpus_too

    from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer

    AcceleratorState._reset_state(reset_partial_state=True)
    shard_on_cpus_too()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type=state_dict_type
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = small_llama(1, 32)
    elementwise = {"name": "adamw", **ADAMW}
    optimizer = LayerWiseOptimizer(model, **MUON, elementwise=elementwise, report=False, sharded_later=True)
    return accelerator, *accelerator.prepare(model, optimizer)


def take_steps(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        tokens = torch.randint(256, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def local_weights(model: Any) -> list[Tensor]:
    return [param.detach().to_local().clone() for param in model.parameters()]


def state_before_the_first_step() -> tuple[int, int, set[float], bool]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    _, model, optimizer = prepared()
    before = local_weights(model)
    if torch.distributed.get_rank() == 0:
        assert len(optimizer.state) == 12  # one rank alone may look: nothing is exchanged for it
    state = get_optimizer_state_dict(model, optimizer)["state"]
    momenta = [values["momentum_buffer"] for values in state.values() if "momentum_buffer" in values]
    counters = {float(values["step"]) for values in state.values() if "step" in values}
    same = all(torch.equal(a, b) for a, b in zip(before, local_weights(model)))
    return len(state), len(momenta), counters, same


def test_state_is_there_without_a_step_once_parameters_are_sharded(ranks: RankPool) -> None:
    """Otherwise torch.distributed.checkpoint takes a step to get state, which leaves AdamW's counters at 1."""
    for answer in ranks.run(state_before_the_first_step):
        assert answer == (12, 7, {0.0}, True)


def losses_after_loading(folder: str, saved_after: int) -> tuple[list[float], list[float]]:
    """Losses of steps 3 and 4, of a run that saved before and of one that loads this before its first step."""
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    state_dict_type = Path(folder).name
    accelerator, model, optimizer = prepared(state_dict_type)
    plugin = accelerator.state.fsdp_plugin
    take_steps(model, optimizer, range(saved_after))
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    whole = take_steps(model, optimizer, range(saved_after, saved_after + 3))

    accelerator, model, optimizer = prepared(state_dict_type)
    plugin = accelerator.state.fsdp_plugin
    load_fsdp_model(plugin, accelerator, model, folder)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    return whole, take_steps(model, optimizer, range(saved_after, saved_after + 3))


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_checkpoint_is_loaded_before_the_first_step(
    ranks: RankPool, tmp_path: Path, kind: str, saved_after: int
) -> None:
    for whole, resumed in ranks.run(losses_after_loading, str(tmp_path / kind), saved_after):
        assert len(whole) == 3 and resumed == whole


def test_a_model_that_nobody_sharded_is_refused_at_the_first_step() -> None:
    from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer

    optimizer = LayerWiseOptimizer(small_llama(1, 32), **MUON, report=False, sharded_later=True)
    assert not optimizer.state
    with pytest.raises(RuntimeError, match="no parameter in its param groups is a DTensor; check that prepare"):
        optimizer.step()


def test_param_groups_are_final_before_parameters_are_sharded() -> None:
    from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer

    optimizer = LayerWiseOptimizer(small_llama(1, 32), **MUON, report=False, sharded_later=True)
    with pytest.raises(RuntimeError, match="takes no param group after it was made"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 2))]})


def test_the_pages_links_lead_somewhere_and_its_snippets_are_python() -> None:
    page = ROOT / "docs" / "fsdp2_hugging_face.md"
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / target.split("#")[0]).exists(), target
    for snippet in re.findall(r"^```python.*?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(snippet, str(page), "exec")
