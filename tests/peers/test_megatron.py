"""transformers' model computes with what megatron-core saved what megatron-core's does; a step is that of its Muon."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.peers.stand_ins import on_cpus, without_triton
from tests.support.command_line import refused, succeeds
from tests.support.launcher import ROOT
from tests.support.ranks import free_port
from tests.support.references import Trained, rule_of

sys.path.append(str(ROOT / "examples"))

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's own
HEADS, GROUPS, LAYERS, WIDTH, VOCABULARY = 4, 2, 2, 32, 256


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with without_triton(), pytest.MonkeyPatch.context() as patched, on_cpus():
        from megatron.core import parallel_state

        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            patched.setenv(name, value)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron_model(norms: bool = False, experts: int = 0, gpt2: bool = False) -> Any:
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
        **{"init_method_std": 0.3, "qk_layernorm": norms},
    }
    if experts:
        options |= {"num_moe_experts": experts, "moe_router_topk": 2, "moe_router_load_balancing_type": "aux_loss"}
        options |= {"moe_ffn_hidden_size": WIDTH, "moe_token_dispatcher_type": "allgather"}
    if gpt2:
        options |= {"num_query_groups": HEADS, "normalization": "LayerNorm", "gated_linear_unit": False}
        options |= {"activation_func": torch.nn.functional.gelu, "add_bias_linear": True}
    model = GPTModel(
        TransformerConfig(**options),
        get_gpt_layer_local_spec(
            num_experts=experts or None, qk_layernorm=norms, normalization=options["normalization"]
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="learned_absolute" if gpt2 else "rope",
        share_embeddings_and_output_weights=gpt2,
        parallel_output=False,
    )
    with torch.no_grad():
        for name, param in model.named_parameters():  # which begin as ones and zeros
            if "norm" in name or name.endswith("bias"):
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(3)), alpha=0.2)
    return model


def configured(name: str) -> Any:
    """transformers' model of these sizes."""
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes |= {"num_key_value_heads": GROUPS, "head_dim": WIDTH // HEADS, "tie_word_embeddings": False}
    sizes |= {"intermediate_size": WIDTH * 5 // 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    if name == "Mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": WIDTH}
    if name == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "norm_topk_prob": True}
    if name == "GPT2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
        sizes |= {"n_inner": WIDTH * 5 // 2, "activation_function": "gelu", "layer_norm_epsilon": 1e-6}
    return getattr(transformers, f"{name}Config")(**sizes)


# The family of names, transformers' model, Megatron's, and Megatron's arguments
ROPE = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "num_query_groups": GROUPS}
ROPE |= {"group_query_attention": True, "untie_embeddings_and_output_weights": True}
LEARNED = {"swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
LEARNED |= {"group_query_attention": False, "untie_embeddings_and_output_weights": False}
SPARSE = {"num_experts": 4, "moe_router_topk": 2, "moe_router_score_function": "softmax", "moe_layer_freq": 1}
COMPUTED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("hf-llama", "Qwen3", {"norms": True}, {**ROPE, "qk_layernorm": True}),
    ("hf-mixtral", "Mixtral", {"experts": 4}, {**ROPE, **SPARSE, "moe_router_pre_softmax": False}),
    ("hf-qwen-moe", "Qwen3Moe", {"experts": 4, "norms": True}, {**ROPE, **SPARSE, "qk_layernorm": True}),
    ("hf-gpt2", "GPT2", {"gpt2": True}, LEARNED),
]


@pytest.mark.parametrize(("family", "name", "made", "said"), COMPUTED)
def test_each_family_has_the_losses_of_megatrons_model(
    one_rank: None, tmp_path: Path, family: str, name: str, made: dict[str, Any], said: dict[str, Any]
) -> None:
    import transformers
    from megatron.core import dist_checkpointing

    model, step, weights = megatron_model(**made).eval(), tmp_path / "iter_0000003", tmp_path / "weights"
    step.mkdir()
    args = argparse.Namespace(num_layers=LAYERS, num_attention_heads=HEADS, **said)
    dist_checkpointing.save({"args": args, "iteration": 3, "model": model.sharded_state_dict()}, str(step))
    succeeds("convert", step, weights, "--to", "safetensors", "--names", family)
    configured(name).save_pretrained(weights)
    read, info = transformers.AutoModelForCausalLM.from_pretrained(weights, output_loading_info=True)
    assert not info["unexpected_keys"] and set(info["missing_keys"]) <= {"lm_head.weight"}
    tokens = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(9))
    above = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with torch.no_grad():
        both = model(tokens[:, :-1], torch.arange(16).expand(2, 16), above), read.eval()(tokens[:, :-1]).logits
    losses = [torch.nn.functional.cross_entropy(each.flatten(0, 1), tokens[:, 1:].flatten()) for each in both]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    args = argparse.Namespace(**{**vars(args), "rotary_percent": 0.5, "softmax_type": "off-by-one"})
    dist_checkpointing.save({"args": args, "iteration": 3, "model": model.sharded_state_dict()}, str(step))
    assert "softmax_type" in refused("convert", step, tmp_path / "more", "--to", "safetensors", "--names", family)


def test_transformers_computes_the_same_with_what_megatron_saved(one_rank: None, tmp_path: Path) -> None:
    from hugging_face import small_llama
    from megatron.core import dist_checkpointing

    model, llama, step = megatron_model().eval(), small_llama(LAYERS, WIDTH), tmp_path / "iter_0000003"
    step.mkdir()
    sizes = {"num_layers": LAYERS, "num_attention_heads": HEADS, "num_query_groups": GROUPS, "swiglu": True}
    args = argparse.Namespace(**sizes, group_query_attention=True, untie_embeddings_and_output_weights=True)
    saved = {"args": args, "iteration": 3, "model": model.sharded_state_dict()}
    dist_checkpointing.save(saved, str(step))
    succeeds("convert", step, tmp_path / "weights", "--to", "safetensors", "--names", "hf-llama")
    llama.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(9))
    above = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with torch.no_grad():
        theirs = model(tokens, None, above)
        torch.testing.assert_close(llama.eval()(input_ids=tokens).logits, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(32, 48), (96, 32), (64, 64)], ids=str)
def test_a_step_is_that_of_its_muon(shape: tuple[int, int], nesterov: bool, precision: str) -> None:
    """Emerging-Optimizers' Muon, which Megatron's is made of, from the same state and gradient."""
    with without_triton():
        from emerging_optimizers.orthogonalized_optimizers import Muon

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
