"""Routing of models that PEFT wrapped: by what a parameter is, never by the adapter's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lwopt_backend import peft_layers
from lwopt_backend.model_shapes.by_name import route_by_name
from lwopt_backend.model_shapes.types import Stored
from lwopt_backend.routing import Route, route
from tests.models import UnevenLM

peft = pytest.importorskip("peft")
hf = pytest.importorskip("transformers")

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50, "intermediate_size": 48}
NAMES = ("default", "emb", "my_head", "lm_head", "norm_bias")
CAUSAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
WHOLE = "model.layers.0."  # of a layer's parameters


def llama(**options: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY, **options))


def wrapped(config: Any, adapter: str = "default", model: nn.Module | None = None) -> nn.Module:
    return peft.get_peft_model(model or llama(), config, adapter_name=adapter)


def trained(model: nn.Module, adapter: str = "default", **options: Any) -> dict[str, Route]:
    """The routes of what is trained, by names without PEFT's prefix and the adapter's."""
    routes = [r for r in route(model, stacks=True, **options) if r.kind != "frozen"]
    return {without(adapter, r.name.removeprefix("base_model.model.")): r for r in routes}


def without(adapter: str, name: str) -> str:
    before, _, after = f"{name}.".rpartition(f".{adapter}.")
    return f"{before}.{after}".rstrip(".")


def matrices(routes: dict[str, Route]) -> set[str]:
    return {name for name, each in routes.items() if each.kind == "matrix"}


@pytest.mark.parametrize("adapter", NAMES)
@pytest.mark.parametrize("dora", [False, True])
def test_lora_of_linears_is_matrices_and_of_heads_and_embeddings_none(adapter: str, dora: bool) -> None:
    targets = ["q_proj", "down_proj", "lm_head", "embed_tokens"]
    routes = trained(wrapped(peft.LoraConfig(r=4, target_modules=targets, use_dora=dora), adapter), adapter)
    layers = (f"{WHOLE}self_attn.q_proj", f"{WHOLE}mlp.down_proj")
    assert matrices(routes) == {f"{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"}
    assert routes[f"{layers[0]}.lora_A.weight"].reason == "LoRA A of q_proj"
    assert routes["lm_head.lora_A.weight"].reason == "LoRA A of lm_head: output head, named 'lm_head'"
    assert routes["lm_head.lora_B.weight"].reason == "LoRA B of lm_head: output head, named 'lm_head'"
    embedding = {name: r.reason for name, r in routes.items() if "embed_tokens.lora_embedding" in name}
    assert set(embedding.values()) == {"LoRA of an embedding"} and len(embedding) == 2
    magnitudes = {r.reason for name, r in routes.items() if "magnitude" in name}
    assert magnitudes == ({"DoRA magnitude"} if dora else set())


# What else PEFT trains: a configuration, and the reasons for which none of it is a matrix
Q = {"target_modules": ["q_proj", "down_proj"]}
ELEMENTWISE: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "IA3": (lambda: peft.IA3Config(**Q, feedforward_modules=["down_proj"]), {"IA3 gain"}),
    "VeRA": (lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]), {"VeRA vector"}),
    "OFT": (lambda: peft.OFTConfig(oft_block_size=4, **Q), {"OFT rotation"}),
    "BOFT": (lambda: peft.BOFTConfig(boft_block_size=4, **Q), {"BOFT rotation", "BOFT gain"}),
    "LoHa": (lambda: peft.LoHaConfig(r=4, **Q), {"LoHa factor"}),
    "LoKr": (lambda: peft.LoKrConfig(r=2, decompose_both=True, **Q), {"LoKr factor"}),
    "HRA": (lambda: peft.HRAConfig(r=4, **Q), {"HRA reflection"}),
    "VB-LoRA": (
        lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=16, target_modules=["q_proj"]),
        {"VB-LoRA's logits and vectors"},
    ),
    "MiSS": (lambda: peft.MissConfig(r=4, **Q), {"MiSS block"}),
    "RandLoRA": (lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"]), {"RandLoRA scale"}),
    "token rows": (
        lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3], target_modules=["embed_tokens"]),
        {"trainable token rows"},
    ),
    "prompt": (lambda: peft.PromptTuningConfig(**CAUSAL), {"prompt"}),
    "prefix": (lambda: peft.PrefixTuningConfig(**CAUSAL), {"prompt"}),
    "prefix through a network": (
        lambda: peft.PrefixTuningConfig(**CAUSAL, prefix_projection=True, encoder_hidden_size=16),
        {"prompt"},
    ),
    "p-tuning": (lambda: peft.PromptEncoderConfig(**CAUSAL, encoder_hidden_size=16), {"prompt"}),
}


@pytest.mark.parametrize("adapter", ["default", "my_head"])
@pytest.mark.parametrize("method", ELEMENTWISE)
def test_what_is_no_linear_of_the_model_is_elementwise_whatever_its_shape(method: str, adapter: str) -> None:
    config, reasons = ELEMENTWISE[method]
    routes = trained(wrapped(config(), adapter), adapter)
    assert any(len(r.shape) == 2 for r in routes.values()) or method == "VeRA"
    assert not matrices(routes) and {r.reason for r in routes.values()} == reasons


@pytest.mark.parametrize("adapter", ["default", "emb"])
def test_adalora_has_two_matrices_and_singular_values(adapter: str) -> None:
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, tinit=1, tfinal=1, target_modules=["q_proj"])
    routes = trained(wrapped(config, adapter), adapter)
    reasons = {name.rpartition(".")[2]: (r.kind, r.reason) for name, r in routes.items()}
    assert reasons == {
        "lora_A": ("matrix", "LoRA A of q_proj"),
        "lora_B": ("matrix", "LoRA B of q_proj"),
        "lora_E": ("elementwise", "AdaLoRA's singular values"),
    }


def test_an_unknown_adapter_is_elementwise_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_layers, "ADAPTERS", {})
    routes = trained(wrapped(peft.LoHaConfig(r=4, **Q)))
    assert not matrices(routes)
    assert "PEFT's hada_w1_a, not known to be a linear's weight" in {r.reason for r in routes.values()}


def test_rank_1_and_factors_of_one_row_leave_out_both() -> None:
    assert {r.reason for r in trained(wrapped(peft.LoraConfig(r=1, target_modules=["q_proj"]))).values()} == {
        "LoRA A of q_proj: rank 1",
        "LoRA B of q_proj: rank 1",
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    routes = trained(wrapped(peft.LoraConfig(r=4, target_modules=["0", "2"]), model=model))
    assert matrices(routes) == {"0.lora_A.weight", "0.lora_B.weight"}
    assert routes["2.lora_A.weight"].reason == "LoRA A of 2: one row"


def test_lora_of_what_is_no_plain_linear_is_elementwise() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    routes = trained(wrapped(peft.LoraConfig(r=4, target_modules=["0"], lora_bias=True), model=model))
    assert {r.reason for name, r in routes.items() if "bias" not in name} == {"LoRA A of 0: 4-D", "LoRA B of 0: 4-D"}
    routes = trained(wrapped(peft.LoraConfig(r=4, target_modules=["2"], lora_bias=True), model=model))
    assert routes["2.lora_B.bias"].reason == "LoRA B of 2: 1-D" and len(matrices(routes)) == 2
    blocks = peft.tuners.lora.BdLoraConfig(nblocks=2, target_modules_bd_a=["q_proj"], target_modules_bd_b=[])
    routes = trained(wrapped(peft.LoraConfig(r=4, target_modules=["q_proj"], use_bdlora=blocks)))
    assert {r.reason.partition(": ")[2] for r in routes.values()} == {"not a plain linear"}, "one of A and B is blocks"


@pytest.mark.parametrize("adapter", ["default", "emb", "my_head"])
def test_copies_are_routed_as_what_they_are_copies_of(adapter: str) -> None:
    copied = ["lm_head", "embed_tokens", "up_proj"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=copied)
    model = wrapped(config, adapter)
    model.add_adapter("second", config)
    for active in (adapter, "second"):
        model.set_adapter(active)
        routes = trained(model, active)
        copies = {name: r.reason for name, r in routes.items() if "modules_to_save" in name}
        assert copies == {
            "model.embed_tokens.modules_to_save.weight": "embedding",
            f"{WHOLE}mlp.up_proj.modules_to_save.weight": "2-D weight",
            "lm_head.modules_to_save.weight": "output head, named 'lm_head'",
        }


def test_heads_are_found_where_a_classifier_is_copied_and_where_width_tells() -> None:
    model = hf.RobertaForSequenceClassification(hf.RobertaConfig(**TINY))
    config = peft.LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS")
    model = wrapped(config, "default", model)
    model.add_adapter("second", config)
    routes = trained(model)
    assert routes["classifier.modules_to_save.dense.weight"].kind == "matrix"
    assert routes["classifier.modules_to_save.out_proj.weight"].reason == "output head, named 'classifier'"
    several = nn.ModuleDict({"tokens": nn.Embedding(50, 16), "ways": nn.ModuleList(nn.Linear(16, 50) for _ in "ab")})
    routes = trained(wrapped(peft.LoraConfig(r=4, target_modules=["ways.0", "ways.1"]), model=several))
    assert len(routes) == 4
    assert {r.reason.partition(": ")[2] for r in routes.values()} == {"output head, as wide as an embedding has rows"}


def test_wrapped_models_keep_their_routes_under_further_wrappers_and_inside_a_model() -> None:
    def lora() -> nn.Module:
        return wrapped(peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), "emb")

    plain = [(r.kind, r.reason) for r in route(lora())]
    model = lora()
    inner = model.base_model.model
    inner.lm_head, inner.model.layers[0] = checkpoint_wrapper(inner.lm_head), checkpoint_wrapper(inner.model.layers[0])
    assert [(r.kind, r.reason) for r in route(model)] == plain
    assert [(r.kind, r.reason) for r in route(nn.ModuleDict({"policy": lora()}))] == plain
    assert [
        (r.kind, r.reason) for r in route(peft.inject_adapter_in_model(lora().peft_config["emb"], llama()))
    ] == plain


def test_globs_overrule_what_peft_layers_say() -> None:
    model = wrapped(peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    routes = trained(model, include=["*.lm_head.lora_*"], exclude=["*.q_proj.*"])
    assert matrices(routes) == {"lm_head.lora_A.weight", "lm_head.lora_B.weight"}


def test_frozen_base_weights_are_not_looked_at() -> None:
    """Quantized ones have shapes of their own, and some have no weight at all."""
    model = wrapped(peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    expected = trained(model)
    for layer in (model.base_model.model.lm_head, model.base_model.model.model.layers[0].self_attn.q_proj):
        layer.base_layer.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    assert trained(model) == expected


# Names alone


def by_name(state: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, str]]:
    routes = route_by_name([Stored(name, shape) for name, shape in state.items()], (), ())
    return {r.name: (r.kind, r.reason) for r in routes}


CHECKPOINTS = {
    "lora": lambda: peft.LoraConfig(
        r=4, target_modules=["q_proj", "lm_head", "embed_tokens"], modules_to_save=["up_proj"]
    ),
    "dora": lambda: peft.LoraConfig(r=4, **Q, use_dora=True),
    "rank 1": lambda: peft.LoraConfig(r=1, **Q),
    "copies": lambda: peft.LoraConfig(r=4, **Q, modules_to_save=["lm_head", "embed_tokens"]),
    "tokens": lambda: peft.LoraConfig(r=4, **Q, trainable_token_indices=[1, 2, 3]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, tinit=1, tfinal=1, **Q),
    **{method: config for method, (config, _) in ELEMENTWISE.items() if "prompt" not in _ and method != "token rows"},
}


@pytest.mark.parametrize("adapter", ["default", "emb"])
@pytest.mark.parametrize("method", CHECKPOINTS)
def test_names_of_checkpoints_tell_the_same_as_modules(method: str, adapter: str) -> None:
    model = wrapped(CHECKPOINTS[method](), adapter)
    expected = {r.name: r.kind for r in route(model) if r.kind != "frozen"}
    everything = by_name({name: tuple(param.shape) for name, param in model.named_parameters()})
    assert {name: everything[name][0] for name in expected} == expected
    saved = by_name({name: tuple(t.shape) for name, t in peft.get_peft_model_state_dict(model, None, adapter).items()})
    count = list(expected.values()).count
    assert [kind for kind, _ in saved.values()].count("matrix") == count("matrix"), saved


def test_names_tell_why() -> None:
    found = by_name(
        {
            "base_model.model.lm_head.lora_A.weight": (4, 32),
            "base_model.model.lm_head.lora_B.weight": (50, 4),
            "base_model.model.layers.0.q_proj.lora_A.weight": (4, 32),
            "base_model.model.layers.0.q_proj.lora_B.weight": (32, 4),
            "base_model.model.layers.0.k_proj.ia3_l": (32, 1),
            "prompt_embeddings": (4, 32),
            "value_head.weight": (1, 32),
            "layers.0.expert.weight": (3, 1, 32),
        }
    )
    assert [reason for _, reason in found.values()] == [
        "LoRA A of lm_head: output head, named 'lm_head'",
        "LoRA B of lm_head: output head, named 'lm_head'",
        "LoRA A of q_proj",
        "LoRA B of q_proj",
        "IA3 gain",
        "prompt",
        "one row",
        "3 stacked experts of one row",
    ]


def test_a_model_without_peft_has_every_module_to_itself() -> None:
    model = UnevenLM()
    found = peft_layers.places(model)
    assert {name: place.name for name, place in found.items()} == {name: name for name, _ in model.named_modules()}
    assert all(place.is_own and place.outer is place.module for place in found.values())
