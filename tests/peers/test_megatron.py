"""megatron-core loads what `lwopt convert --to megatron` writes, and computes with it what transformers' model does.

On one CPU rank. Megatron's optimizers and its training loop need CUDA: of the optimizer's state, its own reader reads
every tensor here, and these are ours.
"""

from __future__ import annotations

import contextlib
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
from tests.command_line import lwopt
from tests.launcher import ROOT
from tests.ranks import free_port

sys.path.append(str(ROOT / "examples"))

HEADS, GROUPS, LAYERS, WIDTH, VOCABULARY = 4, 2, 2, 32, 256
SCHEDULE = {
    **{"max_lr": 0.02, "min_lr": 0.002, "lr_warmup_steps": 0, "lr_decay_steps": 80, "lr_decay_style": "linear"},
    **{"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 80, "samples": 4},
}


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron asks for the current CUDA device, and keeps a random state of it for dropout, of which there is none."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda self, *name: contextlib.nullcontext())

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


def megatron_model() -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        ffn_hidden_size=WIDTH * 5 // 2,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        attention_softmax_in_fp32=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
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
