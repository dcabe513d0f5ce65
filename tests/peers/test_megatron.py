"""megatron-core loads what `lwopt convert --to megatron` writes, and computes with it what transformers' model does.

Megatron 0.19 and later are tested where LWOPT_MEGATRON_SOURCES names folders, as PYTHONPATH does, that have its
packages ``megatron`` and ``emerging_optimizers``: from the package index one gets neither its training loop nor, for
older Pythons, these versions.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lwopt_backend import LayerWiseOptimizer
from tests.command_line import SAMPLES, lwopt, succeeds
from tests.launcher import ROOT, torchrun
from tests.launcher import succeeds as ran
from tests.peers.megatron_on_cpus import batch, pretend_triton
from tests.ranks import free_port
from tests.rule_steps import Trained, rule_of

sys.path.append(str(ROOT / "examples"))

HEADS, GROUPS, LAYERS, WIDTH, VOCABULARY = 4, 2, 2, 32, 256
SCHEDULE = {
    **{"max_lr": 0.02, "min_lr": 0.002, "lr_warmup_steps": 0, "lr_decay_steps": 80, "lr_decay_style": "linear"},
    **{"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 80, "samples": 4},
}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Megatron asks for the current CUDA device, and keeps a random state of it for dropout, of which there is none."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "current_device", lambda: "cpu")
        patched.setattr(CudaRNGStatesTracker, "fork", lambda self, *name: contextlib.nullcontext())
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            patched.setenv(name, value)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def trained_llama(folder: Path) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """transformers' Llama after two steps, saved in ``folder``; and our optimizer's state by name."""
    from hugging_face import small_llama

    model = small_llama(LAYERS, WIDTH)
    optimizer = LayerWiseOptimizer(
        model, {"name": "muon", "nesterov": False}, lr=0.02, elementwise_lr=3e-3, report=False
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    for step in range(2):
        tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    optimizer.save_state_dict(folder)
    state = {name: optimizer.state[param] for name, param in model.named_parameters()}
    return model, state


def megatron_model(**changed: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    options: dict[str, Any] = {
        **{"num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": WIDTH * 5 // 2},
        **{"num_attention_heads": HEADS, "num_query_groups": GROUPS, "normalization": "RMSNorm"},
        **{"layernorm_epsilon": 1e-6, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        **{"add_bias_linear": False, "use_cpu_initialization": True, "attention_softmax_in_fp32": True},
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
        **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
        **dict.fromkeys(("persist_layer_norm", "apply_rope_fusion"), False),
    }
    vocabulary = changed.pop("vocabulary", VOCABULARY)
    return GPTModel(
        TransformerConfig(**{**options, **changed}),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocabulary,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    )


def test_megatron_loads_what_we_write_and_computes_the_same(one_rank: None, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    llama, state = trained_llama(tmp_path / "trained")
    options = ["--source-names", "hf-llama", "--heads", HEADS, "--query-groups", GROUPS, "--vocab-size", VOCABULARY]
    options += [word for key, value in SCHEDULE.items() for word in (f"--{key.replace('_', '-')}", value)]
    ended = lwopt("convert", tmp_path / "trained", tmp_path / "megatron", "--to", "megatron", *options)
    assert ended.code == 0, ended
    (folder,) = (tmp_path / "megatron").glob("iter_*")
    model = megatron_model().eval()
    wanted = {"model": model.sharded_state_dict()}
    loaded = dist_checkpointing.load(wanted, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    missing, unexpected = model.load_state_dict(loaded["model"], strict=False)
    assert not unexpected and all("_extra_state" in name for name in missing)
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(9))
    above = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with torch.no_grad():
        ours = llama(input_ids=tokens).logits
        torch.testing.assert_close(model(tokens, None, above), ours, rtol=1e-4, atol=1e-5)
    tensors = dist_checkpointing.load_plain_tensors(str(folder))
    for ours_called, theirs_called in (("model.norm", "decoder.final_layernorm"), ("lm_head", "output_layer")):
        for kept in ("exp_avg", "exp_avg_sq"):
            (key,) = [key for key in tensors if key.endswith(f"{kept}.{theirs_called}.weight")]
            assert torch.equal(tensors[key].flatten(), state[f"{ours_called}.weight"][kept].flatten()), key
    assert len([key for key in tensors if ".momentum_buffer." in key]) > 0, sorted(tensors)
    goes_on(dist_checkpointing.load_common_state_dict(str(folder)))


def goes_on(common: dict[str, Any]) -> None:
    """Megatron's scheduler compares every number with its own, and sets the rate of the samples so far."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    saved = [group for one in common["optimizer"].values() for group in one["optimizer"]["param_groups"]]
    given = {key: value for key, value in SCHEDULE.items() if key != "samples"}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=saved),
        init_lr=0.0,
        **{**given, "wd_incr_style": "constant"},
        use_checkpoint_opt_param_scheduler=False,
    )
    scheduler.load_state_dict(common["opt_param_scheduler"])
    assert {group["lr"] for group in saved} == {0.002 + (0.02 - 0.002) * (1 - 4 / 80)}
    assert {group["weight_decay"] for group in saved} == {0.0, 0.01}


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(32, 48), (96, 32), (64, 64)], ids=str)
def test_a_step_is_that_of_its_muon(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], nesterov: bool, precision: str
) -> None:
    """Emerging-Optimizers' Muon, which Megatron's is made of, from the same state and gradient."""
    monkeypatch.setattr(torch, "compile", torch.compile)  # put back after the test
    pretend_triton()
    from emerging_optimizers.orthogonalized_optimizers import Muon

    for name in ("triton", "triton.language"):
        sys.modules.pop(name)
    weight, momentum, grad = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    param = torch.nn.Parameter(weight.clone())
    param.grad = grad
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    theirs = Muon([param], **options, fp32_matmul_prec=precision)
    theirs.state[param]["momentum_buffer"] = momentum.clone()
    theirs.step()
    exact = {"ns_dtype": "float32", "gram_aspect": None} if precision == "highest" else {}
    rule = rule_of("muon", **options, **exact, ns_coefficients="quintic", adjust_lr_fn="spectral", eps=1e-15)
    rule.exchange_dtype = torch.float32
    ours = Trained(rule, weight.clone())
    ours.state["momentum_buffer"] = momentum.clone()
    found = ours.step(grad)
    assert torch.equal(ours.state["momentum_buffer"], theirs.state[param]["momentum_buffer"])
    far = float((found - param.detach()).norm() / (param.detach() - weight).norm())
    assert far < {"medium": 1.2e-2, "highest": 1e-5}[precision], far


# Its optimizers, on two ranks, with a genuine run that went over a universal folder

DRIVER = Path(__file__).with_name("megatron_on_cpus.py")
GENUINE = {"muon": "t16_lw_muon_dp2_torchdist", "adam": "t16_do_adam_dp2_torch"}
SOURCES = os.environ.get("LWOPT_MEGATRON_SOURCES", "")
needs_sources = pytest.mark.skipif(not SOURCES, reason="LWOPT_MEGATRON_SOURCES names no folder of Megatron's sources")


def universal(kind: str, folder: Path) -> tuple[Path, Path]:
    """The run as a universal folder, and a file with what Megatron's optimizer held."""
    truth = torch.load(SAMPLES / GENUINE[kind] / "ground_truth.pt", weights_only=True)["params"]
    states = {name: {key: t for key, t in of["states"].items() if key != "step"} for name, of in truth.items()}
    torch.save(states, folder / "truth.pt")
    succeeds("convert", SAMPLES / GENUINE[kind], folder / "universal", "--to", "universal", "--json")
    return folder / "universal", folder / "truth.pt"


@pytest.mark.parametrize("kind", GENUINE)
def test_its_optimizers_hold_what_we_write_at_any_size(kind: str, tmp_path: Path) -> None:
    source, truth = universal(kind, tmp_path)
    succeeds("convert", source, tmp_path / "megatron", "--to", "megatron", "--json")
    printed = torchrun(DRIVER, "core", kind, tmp_path / "megatron" / "iter_0000003", truth)
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2)):
        assert f"{kind} held at tp {tensor}, pp {pipeline}" in printed, printed


def trained(kind: str, folder: Path, truth: Path | str, steps: int, *flags: str) -> dict[str, dict[str, Tensor]]:
    """What Megatron holds after it loaded ``folder``, which must be ``truth``, and trained so many steps."""
    out = folder.with_suffix(".pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2, "--master_port", free_port()]
    command += [DRIVER, "training", kind, folder, truth, steps, out, *flags]
    more = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": SOURCES}
    printed = ran(list(map(str, command)), ROOT, **more)
    assert f"{kind} held after" in printed, printed
    return torch.load(out, weights_only=True) if steps else {}


NO_LAYOUT = "--no-use-layer-wise-param-layout"
SIZES = {"dp 2": [], "tp 2": ["--tensor-model-parallel-size", "2"], "pp 2": ["--pipeline-model-parallel-size", "2"]}


@needs_sources
@pytest.mark.parametrize(("kind", "size"), [*itertools.product(GENUINE, SIZES), ("muon", NO_LAYOUT)])
def test_newer_ones_load_checkpoint(kind: str, size: str, tmp_path: Path) -> None:
    source, truth = universal(kind, tmp_path)
    version = "0.19-no-layout" if size == NO_LAYOUT else "0.19"
    succeeds("convert", source, tmp_path / "it", "--to", "megatron", "--megatron-version", version, "--json")
    trained(kind, tmp_path / "it", truth, 0, *SIZES.get(size, [size]))


RATE = {"max_lr": 0.01, "min_lr": 0.001, "lr_warmup_steps": 0, "lr_decay_steps": 40, "lr_decay_style": "linear"}
OURS: dict[str, Any] = {
    "matrix": {"name": "muon", "lr": 0.01, "momentum": 0.9, "nesterov": False, "weight_decay": 0.1}
    | {"ns_coefficients": "quintic", "adjust_lr_fn": "spectral", "eps": 1e-15},
    "elementwise": {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1},
    "overrides": [{"params": "*norm.weight", "elementwise": {"weight_decay": 0.0}}],
}
OF_KIND: dict[str, dict[str, Any]] = {
    "muon": {"atoms": {"*.linear_qkv.weight": {"qkv": [16, 8, 8], "groups": 2}, "*.linear_fc1.weight": "whole"}},
    "adam": {"exclude": ["*"], "allow_no_matrix": True},
}
EXACT = ["--muon-fp32-matmul-prec", "high"]  # fp32 on CPUs; and what is the same of ours
FAR = {("muon", "medium"): 0.05, ("muon", "high"): 0.035, ("adam", "medium"): 0.006}  # masters, over their way


def three_steps(kind: str, precision: str, load: Path, save: Path) -> None:
    """megatron-core's model under DeepSpeed, with our optimizer."""
    import deepspeed
    from torch.optim.lr_scheduler import LambdaLR

    from lwopt_backend.integrations import deepspeed_zero

    deepspeed_zero.register()
    exact = {"ns_dtype": "float32", "gram_aspect": None}
    matrix = {**OURS["matrix"], **(exact if precision == "high" else {})}
    options = {**OURS, **OF_KIND[kind], "matrix": matrix}
    model = megatron_model(vocabulary=64, ffn_hidden_size=48, layernorm_epsilon=1e-5, attention_softmax_in_fp32=False)
    config = {
        **{"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0},
        **{"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}},
        **{
            "checkpoint": {"load_universal": True},
            "optimizer": {"type": "LayerWise", "params": options},
        },
    }
    engine, _, _, schedule = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 - 0.9 * step / 10),
    )
    engine.load_checkpoint(load, load_lr_scheduler_states=False)
    schedule.last_epoch = engine.global_steps
    above = torch.triu(torch.ones(1, 1, 16, 16), 1).bool()
    for step in range(3, 6):
        for number in range(4):
            tokens = batch(step, number)
            engine.backward(engine(tokens[:, :-1], torch.arange(16)[None], above, labels=tokens[:, 1:]).float().mean())
            engine.step()
    engine.save_checkpoint(save)


@needs_sources
@pytest.mark.parametrize(("kind", "precision"), FAR)
def test_three_steps_under_deepspeed_are_megatrons(one_rank: None, kind: str, precision: str, tmp_path: Path) -> None:
    """Megatron's run over a universal folder to DeepSpeed and back, beside the same run without that way."""
    source, truth = universal(kind, tmp_path)
    as_19 = ["--to", "megatron", "--megatron-version", "0.19", "--json"]
    succeeds("convert", source, tmp_path / "before", *as_19)
    three_steps(kind, precision, source, tmp_path / "run")
    succeeds("convert", tmp_path / "run", tmp_path / "universal2", "--to", "universal", "--json")
    given = [word for key, value in RATE.items() for word in (f"--{key.replace('_', '-')}", value)]
    given += ["--wd-incr-steps", 40, "--heads", HEADS, "--query-groups", GROUPS]
    succeeds("convert", tmp_path / "universal2", tmp_path / "after", *as_19, *given)
    flags = EXACT if precision == "high" else []
    expected = trained(kind, tmp_path / "before", truth, 5, *flags)
    found, start = trained(kind, tmp_path / "after", "", 2, *flags), torch.load(truth, weights_only=True)
    for key in ("fp32_param", "momentum_buffer", "exp_avg", "exp_avg_sq"):
        names = [name for name in expected if key in expected[name]]
        if names:
            theirs, ours, before = (torch.cat([of[n][key].flatten() for n in names]) for of in (expected, found, start))
            far = (ours - theirs).norm() / (theirs - before).norm()
            assert far < (FAR[kind, precision] if key == "fp32_param" else 0.0125), (key, far)
            assert abs(ours @ theirs / (theirs @ theirs) - 1) < 1e-3, f"{key}: the difference is no rounding"
