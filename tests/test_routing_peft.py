"""Routing of models that PEFT wrapped: by what a parameter is, never by the adapter's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from lwopt_backend import peft_layers
from lwopt_backend.atoms import divide
from lwopt_backend.integrations import fsdp2
from lwopt_backend.model_shapes.by_name import route_by_name
from lwopt_backend.model_shapes.types import Stored
from lwopt_backend.plan.blocks import Block, Stripes
from lwopt_backend.routing import Route, route
from tests.fused import BLOCKS, FusedLM, Separate
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, Reference, config, engine_for, train

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


# Which matrices are in LoRA's factors


def blocks_of(model: nn.Module) -> dict[str, list[Block]]:
    routes = route(model, stacks=True)
    return {name.removeprefix("base_model.model."): list(d.blocks) for name, d in divide(model, routes).items()}


def test_b_of_a_fused_weight_has_its_outputs() -> None:
    gpt = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, eos_token_id=1))
    model = wrapped(peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True), model=gpt)
    found = blocks_of(model)
    a, b = (found[f"transformer.h.0.attn.c_attn.lora_{factor}.default.weight"] for factor in "AB")
    assert [block.shape for block in a] == [(4, 32)]
    assert [(block.name, block.rows, block.columns) for block in b] == [
        (name, Stripes(32 * number, 32), Stripes(0, 4)) for number, name in enumerate("qkv")
    ]


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])  # which store experts as (outputs, inputs), and transposed
def test_lora_of_stacked_experts_has_matrices_for_each(kind: str) -> None:
    config = getattr(hf, f"{kind}Config")(**TINY, num_key_value_heads=2, head_dim=8, num_local_experts=3)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = wrapped(
        peft.LoraConfig(r=4, target_modules=[], target_parameters=targets),
        model=getattr(hf, f"{kind}ForCausalLM")(config),
    )
    found = blocks_of(model)
    for module in (m for m in model.modules() if isinstance(m, peft.tuners.lora.layer.ParamWrapper)):
        prefix = next(name for name, m in model.named_modules() if m is module).removeprefix("base_model.model.")
        a, b = (found[f"{prefix}.lora_{factor}.default.weight"] for factor in "AB")
        assert [block.name for block in a] == ["expert0", "expert1", "expert2"]
        for number in range(3):
            rows = changed_by(module, number, "lora_A").any(1)
            columns = changed_by(module, number, "lora_B").any(0)
            assert rows.nonzero().flatten().tolist() == list(range(a[number].rows.start, a[number].rows.stop))
            of_expert = [block for block in b if block.name.startswith(f"expert{number}")]
            for block in of_expert:
                runs = [index for start, stop in block.columns.runs() for index in range(start, stop)]
                assert columns.nonzero().flatten().tolist() == runs
            gated = module.parameter_name == "gate_up_proj"
            assert [block.name.partition(".")[2] for block in of_expert] == (["gate", "up"] if gated else [""])
            assert sum(block.numel for block in of_expert) == 4 * len(module.lora_B.default.weight)


def changed_by(module: Any, expert: int, factor: str) -> torch.Tensor:
    """Which elements of a factor the change of one expert depends on."""
    module.zero_grad()
    nn.init.ones_(module.lora_A.default.weight)
    nn.init.ones_(module.lora_B.default.weight)
    module.get_delta_weight("default")[expert].sum().backward()
    return getattr(module, factor).default.weight.grad != 0


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


# Every engine


EXPERTS = "base_model.model.experts.lora_"
PIECES = {  # of experts' factors, by the formula of PEFT's change of a weight: "o r e, e r i -> e o i"
    f"{EXPERTS}A.default.weight": [lambda a, e=e: a.unflatten(0, (3, 4))[e] for e in range(3)],
    f"{EXPERTS}B.default.weight": [lambda b, e=e: b.unflatten(1, (4, 3))[..., e] for e in range(3)],
}
TRAINED = ("down", "experts", "mix.modules_to_save")


def adapted() -> nn.Module:
    """LoRA of a linear, of a stack of experts and of the head; a linear that is trained as a copy."""
    model = FusedLM()
    targets = {"target_modules": ["down", "lm_head"], "target_parameters": ["experts.up"]}
    lora = peft.LoraConfig(r=4, modules_to_save=["mix"], init_lora_weights="gaussian", **targets)
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora)


class AdaptedReference(Reference):
    """One process: torch's Muon on every matrix as a parameter of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = adapted()
        named = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        ours = [name for name in named if name.removeprefix("base_model.model.").startswith(TRAINED)]
        for name, pieces in PIECES.items():
            monkeypatch.setitem(BLOCKS, name, pieces)
        self.muon = Separate({name: named.pop(name) for name in ours}, **MUON)
        self.adamw = torch.optim.AdamW(list(named.values()), **ADAMW)


def told(routes: list[Route]) -> list[tuple[str, str]]:
    """Without what an optimizer adds: why it has no frozen weights, and the matrices in a parameter."""
    return [(r.kind, r.kind if r.kind == "frozen" else r.reason.partition(": ")[0]) for r in routes]


def differ_on_zero(stage: int) -> tuple[float, bool]:
    model = adapted()
    expected = told(route(model, stacks=True))
    wanted = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with engine_for(config(stage, rows=8), model, model_parameters=list(wanted.values())) as engine:
        train(engine, 4, same_rows=True)
        with pytest.MonkeyPatch.context() as patch:
            reference = AdaptedReference(patch)
        reference.train(4)
        theirs = dict(reference.model.named_parameters())
        found = {name: deepspeed.utils.safe_get_full_fp32_param(param) for name, param in wanted.items()}
        worst = max(float((found[name] - theirs[name]).abs().max()) for name in wanted)
        return worst, told(engine.basic_optimizer._binding.grouping.routes) == expected


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_routes_alike_and_equals_a_single_process(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(differ_on_zero, stage)) == {(0.0, True)}


def differ_on_fsdp2() -> Any:
    model = wrapped(peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"]), "emb")
    plain = told(route(model))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return told(fsdp2.LayerWiseOptimizer(model, report=False)._grouping.routes), plain


def test_fsdp2_routes_alike(ranks: RankPool) -> None:
    for sharded, plain in ranks.run(differ_on_fsdp2):
        assert sharded == plain
