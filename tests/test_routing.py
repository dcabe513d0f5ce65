"""Which parameters go to the matrix rule and why: of models people train, of those that PEFT wrapped, and by name."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from lwopt_backend import peft_layers
from lwopt_backend.atoms import divide
from lwopt_backend.integrations import fsdp2
from lwopt_backend.model_shapes.by_name import route_by_name
from lwopt_backend.model_shapes.types import Stored
from lwopt_backend.plan.blocks import Block, Stripes
from lwopt_backend.report import routing_headline
from lwopt_backend.routing import Route, route
from tests.fused import BLOCKS, FusedLM, Separate
from tests.models import UnevenLM
from tests.ranks import RankPool
from tests.zero import ADAMW, MUON, Reference, config, engine_for, train


def routes_of(model: nn.Module, **options: Any) -> dict[str, Route]:
    return {r.name: r for r in route(model, **options)}


def reasons_of(model: nn.Module, **options: Any) -> dict[str, tuple[str, str]]:
    return {name: (r.kind, r.reason) for name, r in routes_of(model, **options).items()}


def kinds_of(model: nn.Module, **options: Any) -> dict[str, str]:
    return {name: r.kind for name, r in routes_of(model, **options).items()}


# Hugging Face's models

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 512}
FEW_KEYS = {**SMALL, "intermediate_size": 128, "num_key_value_heads": 2}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64}
FAMILIES: dict[str, hf.PretrainedConfig] = {
    "llama": hf.LlamaConfig(**FEW_KEYS),
    "llama-tied": hf.LlamaConfig(**SMALL, intermediate_size=128, tie_word_embeddings=True),
    "qwen3": hf.Qwen3Config(**FEW_KEYS, head_dim=16),
    "mistral": hf.MistralConfig(**FEW_KEYS),
    "gpt2": hf.GPT2Config(**GPT2, vocab_size=512),
    "gpt-neox": hf.GPTNeoXConfig(**SMALL, intermediate_size=128),
    "opt": hf.OPTConfig(**SMALL, ffn_dim=128, word_embed_proj_dim=32, max_position_embeddings=64),
    "cohere": hf.CohereConfig(**SMALL, intermediate_size=128, use_qk_norm=True),
}


def on_meta(made: hf.PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(made)
    model.tie_weights()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_heads_norms_and_biases_of_real_models_stay_elementwise(family: str) -> None:
    model = on_meta(FAMILIES[family])
    routes = routes_of(model)
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, param in model.named_parameters():
        position_table = "wpe" in name or "embed_positions" in name
        hidden = param.ndim == 2 and id(param) not in outside and "norm" not in name and not position_table
        assert routes[name].kind == ("matrix" if hidden else "elementwise"), routes[name]
    assert any(r.kind == "matrix" for r in routes.values())


SWIN = {"embed_dim": 8, "depths": [1], "num_heads": [2], "image_size": 32, "patch_size": 2, "window_size": 4}
GPT_OSS = {**SMALL, "intermediate_size": 96, "num_local_experts": 4, "num_key_value_heads": 2}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
ODD: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    (
        "GptOss",
        "ForCausalLM",
        GPT_OSS,
        {"model.layers.0.mlp.experts.down_proj_bias": "bias", "model.layers.0.mlp.router.weight": "2-D weight"},
    ),
    (
        "Mamba",
        "ForCausalLM",
        MAMBA,
        {
            "backbone.layers.0.mixer.A_log": "one decay per channel and state",
            "backbone.layers.0.mixer.out_proj.weight": "2-D weight",
        },
    ),
    (
        "Roberta",
        "ForSequenceClassification",
        {**SMALL, "intermediate_size": 96},
        {"classifier.dense.weight": "2-D weight", "classifier.out_proj.weight": "output head, named 'classifier'"},
    ),
    (
        "Bert",
        "ForSequenceClassification",
        {**SMALL, "intermediate_size": 96, "max_position_embeddings": 64},
        {"bert.pooler.dense.weight": "2-D weight", "classifier.weight": "output head, named 'classifier'"},
    ),
    (
        "ModernBert",
        "ForMaskedLM",
        {**SMALL, "intermediate_size": 96, "pad_token_id": 0},
        {"head.dense.weight": "2-D weight"},
    ),
    ("Swin", "ForImageClassification", SWIN, {"classifier.weight": "output head, named 'classifier'"}),
]


@pytest.mark.parametrize(("family", "task", "options", "expected"), ODD, ids=[row[0] for row in ODD])
def test_odd_parameters_of_real_models(
    family: str, task: str, options: dict[str, Any], expected: dict[str, str]
) -> None:
    with torch.device("meta"):
        model = getattr(hf, family + task)(getattr(hf, f"{family}Config")(**options))
    routes = routes_of(model)
    assert {name: routes[name].reason for name in expected} == expected
    assert not [r.name for r in routes.values() if r.kind == "matrix" and "bias" in r.name.rpartition(".")[2]]


def test_models_of_stacked_experts_say_how_little_is_a_matrix() -> None:
    headline, note = routing_headline(route(on_meta(hf.MixtralConfig(**{**FEW_KEYS, "intermediate_size": 256}))))
    assert "elements lie in parameters of 3 and more dimensions (stacked experts" in note
    assert len(routing_headline(route(UnevenLM()))) == 1


# Heads and tables


class Several(nn.Module):
    """What stands outside of layers: several heads, a head with a hidden layer, a pooler, tables of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.bag = nn.EmbeddingBag(12, 16)
        self.pos_emb = nn.Parameter(torch.zeros(8, 16))
        self.relative_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(16, 16), "head": nn.Linear(16, 50)})])
        self.pooler = nn.Linear(16, 32)  # as wide as there are positions, which are no vocabulary
        self.predictors = nn.ModuleList([nn.Linear(16, 50), nn.Linear(16, 50)])
        self.classifier = nn.Sequential(OrderedDict(dense=nn.Linear(16, 16), out_proj=nn.Linear(16, 3)))
        self.score = nn.Sequential(OrderedDict(dense=nn.Linear(16, 16)))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3)) for _ in range(2))


def test_heads_and_tables_outside_the_layers() -> None:
    routes = routes_of(Several())
    assert {name.removesuffix(".weight"): r.reason for name, r in routes.items() if len(r.shape) == 2} == {
        **dict.fromkeys(("tokens", "positions", "bag"), "embedding"),
        "pos_emb": "embedding by name",
        "relative_bias_table": "bias",
        **dict.fromkeys(("layers.0.output", "layers.0.head", "pooler"), "2-D weight"),
        **dict.fromkeys(("predictors.0", "predictors.1"), "output head, as wide as an embedding has rows"),
        **dict.fromkeys(("classifier.dense", "score.dense", "heads.0.0", "heads.1.0"), "2-D weight"),
        "classifier.out_proj": "output head, named 'classifier'",
        **dict.fromkeys(("heads.0.1", "heads.1.1"), "output head, named 'heads'"),
    }


class TiedInFunction(nn.Module):
    """The head is the embedding, used as a function: no linear anywhere. As wide as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, 64), nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))


def tied() -> nn.Module:
    model = nn.ModuleDict({"tokens": nn.Embedding(50, 16), "out": nn.Linear(16, 50, bias=False)})
    model["last"] = nn.Linear(16, 50, bias=False)
    model["out"].weight = model["tokens"].weight
    return model


def shared() -> nn.Module:
    linear = nn.Linear(16, 16, bias=False)
    return nn.ModuleDict({"first": linear, "lm_head": linear})


WIDE = "output head, as wide as an embedding has rows"
HEADS: list[tuple[Callable[[], nn.Module], dict[str, str]]] = [
    (
        lambda: nn.Sequential(
            nn.Embedding(50, 16), nn.Linear(16, 50), nn.Linear(50, 16), nn.Linear(16, 50), nn.Linear(50, 2)
        ),
        {"1.weight": "2-D weight", "2.weight": "2-D weight", "3.weight": WIDE, "4.weight": "2-D weight"},
    ),
    # A list of plain layers is not a list of blocks.
    (
        lambda: nn.Sequential(nn.Embedding(50, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 50))),
        {"1.0.weight": "2-D weight", "1.1.weight": WIDE},
    ),
    (TiedInFunction, {"layers.1.0.weight": "2-D weight", "layers.1.2.weight": "2-D weight"}),
    (tied, {"tokens.weight": "embedding, tied to out", "last.weight": "2-D weight"}),
    (shared, {"first.weight": "output head, named 'lm_head'"}),  # which one module's two names say
    # As GPT-2 medium with its 1024 positions and width 1024; the head is tied.
    (
        lambda: on_meta(hf.GPT2Config(**GPT2)),
        {
            "transformer.wte.weight": "embedding, tied to lm_head",
            "transformer.wpe.weight": "embedding",
            "transformer.h.1.attn.c_proj.weight": "2-D weight, stored transposed",
        },
    ),
]


@pytest.mark.parametrize(("make", "expected"), HEADS)
def test_a_head_is_found_and_no_hidden_layer_is_taken_for_one(
    make: Callable[[], nn.Module], expected: dict[str, str]
) -> None:
    routes = routes_of(make())
    assert {name: routes[name].reason for name in expected} == expected


class LowRank(nn.Linear):
    """torchtitan's LoRA: two linears within a linear."""

    def __init__(self) -> None:
        super().__init__(16, 50, bias=False)
        self.lora_a, self.lora_b = nn.Linear(16, 4, bias=False), nn.Linear(4, 50, bias=False)


def test_a_low_rank_change_within_a_head_is_part_of_the_head() -> None:
    kinds = kinds_of(nn.ModuleDict({"lm_head": LowRank(), "inner": LowRank()}))
    assert {kinds[f"lm_head.{key}weight"] for key in ("", "lora_a.", "lora_b.")} == {"elementwise"}
    assert {kinds[f"inner.{key}weight"] for key in ("", "lora_a.", "lora_b.")} == {"matrix"}


# Everything that is no matrix, and the overrides by name


class Vectors(nn.Module):
    """A value head, a router of one expert, a projection of one number, and stacks of such."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.router, self.time = nn.Linear(8, 1), nn.Linear(8, 1, bias=False), nn.Linear(1, 8)
        self.experts = nn.Module()
        self.experts.rows, self.experts.columns = nn.Parameter(torch.ones(3, 1, 8)), nn.Parameter(torch.ones(3, 8, 1))
        self.experts.up = nn.Parameter(torch.ones(3, 8, 2))


def test_one_row_or_one_column_is_elementwise_and_include_overrules() -> None:
    found = reasons_of(Vectors(), stacks=True)
    assert {name: reason for name, reason in found.items() if "bias" not in name} == {
        "value.weight": ("elementwise", "one row"),
        "router.weight": ("elementwise", "one row"),
        "time.weight": ("elementwise", "one column"),
        "experts.rows": ("elementwise", "3 stacked experts of one row"),
        "experts.columns": ("elementwise", "3 stacked experts of one column"),
        "experts.up": ("matrix", "3 stacked experts"),
    }
    found = reasons_of(Vectors(), include=["router.*", "time.weight"])
    assert found["router.weight"] == ("matrix", "included by 'router.*'") and found["time.weight"][0] == "matrix"
    assert found["value.weight"][0] == found["experts.up"][0] == "elementwise"


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm((4, 6))
        self.scale = nn.Parameter(torch.ones(()))
        self.bias = nn.Parameter(torch.ones(3, 3))
        self.rnn = nn.GRU(4, 5)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 4))


def test_everything_not_two_dimensional_and_odd_modules() -> None:
    found = reasons_of(Odd())
    assert found["rnn.weight_ih_l0"][0] == "matrix"
    assert {name: reason for name, reason in found.items() if not name.startswith("rnn")} == {
        "conv.weight": ("elementwise", "3-D"),
        "conv.bias": ("elementwise", "1-D"),
        **dict.fromkeys(("norm.weight", "norm.bias"), ("elementwise", "norm")),
        "scale": ("elementwise", "0-D"),
        "bias": ("elementwise", "bias"),
        "frozen.weight": ("frozen", "requires_grad is False"),
        "empty": ("elementwise", "no elements"),
    }


def test_globs_overrule_structure_and_exclude_wins_by_every_name_of_a_parameter() -> None:
    found = reasons_of(UnevenLM(), include=["lm_head.*", "layers.*"], exclude=["layers.2.*"])
    assert found["lm_head.weight"] == ("matrix", "included by 'lm_head.*'")
    assert found["layers.2.weight"] == ("elementwise", "excluded by 'layers.2.*'")
    assert found["layers.0.bias"][0] == "elementwise", "a glob cannot make a matrix of a vector"
    (both,) = [r for r in route(tied(), include=["out.weight"]) if r.aliases]
    assert (both.name, both.aliases, both.reason) == ("tokens.weight", ("out.weight",), "included by 'out.weight'")


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        ({"include": ["*.wieght"]}, "include: '*.wieght' matches no parameter name"),
        ({"exclude": ["gate.weigth"]}, "exclude: 'gate.weigth' matches no parameter name; did you mean 'gate.weight'?"),
        ({"include": ["*.bias"]}, "include: '*.bias' matches only parameters that are not 2-D"),
    ],
)
def test_globs_that_do_nothing_are_errors(globs: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        route(UnevenLM(), **globs)


# PEFT: by what a parameter is, never by the adapter's name

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50, "intermediate_size": 48}
LAYER = "model.layers.0."
Q = {"target_modules": ["q_proj"]}
BOTH = {"target_modules": ["q_proj", "down_proj"]}
ADALORA = {"init_r": 4, "target_r": 2, "total_step": 10, "tinit": 1, "tfinal": 1}
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
HEADED = {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]}
LORA = {f"LoRA {factor} of {layer}" for factor in "AB" for layer in ("q_proj", "down_proj")}
OF_HEAD = {f"LoRA {factor} of lm_head: output head, named 'lm_head'" for factor in "AB"} | {"LoRA of an embedding"}
METHODS: dict[str, tuple[Callable[[], Any], set[str], set[str]]] = {  # reasons of matrices, and of everything else
    "lora": (lambda: peft.LoraConfig(r=4, **HEADED), LORA, OF_HEAD),
    "dora": (lambda: peft.LoraConfig(r=4, **HEADED, use_dora=True), LORA, OF_HEAD | {"DoRA magnitude"}),
    "rank 1": (lambda: peft.LoraConfig(r=1, **Q), set(), {"LoRA A of q_proj: rank 1", "LoRA B of q_proj: rank 1"}),
    "copies": (
        lambda: peft.LoraConfig(r=4, **BOTH, modules_to_save=["lm_head", "embed_tokens", "up_proj"]),
        LORA | {"2-D weight"},
        {"output head, named 'lm_head'", "embedding"},
    ),
    "tokens": (lambda: peft.LoraConfig(r=4, **BOTH, trainable_token_indices=[1, 2, 3]), LORA, {"trainable token rows"}),
    "adalora": (
        lambda: peft.AdaLoraConfig(**ADALORA, **Q),
        {"LoRA A of q_proj", "LoRA B of q_proj"},
        {"AdaLoRA's singular values"},
    ),
    "IA3": (lambda: peft.IA3Config(**BOTH, feedforward_modules=["down_proj"]), set(), {"IA3 gain"}),
    "VeRA": (lambda: peft.VeraConfig(r=4, **Q), set(), {"VeRA vector"}),
    "OFT": (lambda: peft.OFTConfig(oft_block_size=4, **BOTH), set(), {"OFT rotation"}),
    "BOFT": (lambda: peft.BOFTConfig(boft_block_size=4, **BOTH), set(), {"BOFT rotation", "BOFT gain"}),
    "LoHa": (lambda: peft.LoHaConfig(r=4, **BOTH), set(), {"LoHa factor"}),
    "LoKr": (lambda: peft.LoKrConfig(r=2, decompose_both=True, **BOTH), set(), {"LoKr factor"}),
    "HRA": (lambda: peft.HRAConfig(r=4, **BOTH), set(), {"HRA reflection"}),
    "VB-LoRA": (
        lambda: peft.VBLoRAConfig(r=4, num_vectors=8, vector_length=16, **Q),
        set(),
        {"VB-LoRA's logits and vectors"},
    ),
    "MiSS": (lambda: peft.MissConfig(r=4, **BOTH), set(), {"MiSS block"}),
    "RandLoRA": (lambda: peft.RandLoraConfig(r=4, **Q), set(), {"RandLoRA scale"}),
    "token rows": (
        lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3], target_modules=["embed_tokens"]),
        set(),
        {"trainable token rows"},
    ),
    "prompt": (lambda: peft.PromptTuningConfig(**PROMPT), set(), {"prompt"}),
    "prefix": (lambda: peft.PrefixTuningConfig(**PROMPT), set(), {"prompt"}),
    "prefix through a network": (
        lambda: peft.PrefixTuningConfig(**PROMPT, prefix_projection=True, encoder_hidden_size=16),
        set(),
        {"prompt"},
    ),
    "p-tuning": (lambda: peft.PromptEncoderConfig(**PROMPT, encoder_hidden_size=16), set(), {"prompt"}),
}
NOT_BY_NAME = ("token rows", "prompt", "prefix", "prefix through a network", "p-tuning")
OTHER_NAMES = ("default", "emb", "lm_head", "norm_bias")


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY))


def wrapped(made: Any, adapter: str = "default", model: nn.Module | None = None) -> nn.Module:
    return peft.get_peft_model(model or llama(), made, adapter_name=adapter)


def lora(r: int = 4, model: nn.Module | None = None, **options: Any) -> nn.Module:
    return wrapped(peft.LoraConfig(r=r, **options), model=model)


def trained(model: nn.Module, adapter: str = "default", **options: Any) -> dict[str, Route]:
    """The routes of what is trained, by names without PEFT's prefix and the adapter's."""
    routes = [r for r in route(model, stacks=True, **options) if r.kind != "frozen"]
    return {without(adapter, r.name.removeprefix("base_model.model.")): r for r in routes}


def without(adapter: str, name: str) -> str:
    before, _, after = f"{name}.".rpartition(f".{adapter}.")
    return f"{before}.{after}".rstrip(".")


def matrices(routes: dict[str, Route]) -> set[str]:
    return {name for name, each in routes.items() if each.kind == "matrix"}


def by_name(state: dict[str, tuple[int, ...]]) -> dict[str, Route]:
    return {r.name: r for r in route_by_name([Stored(name, shape) for name, shape in state.items()], (), ())}


def shapes(tensors: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


@pytest.mark.parametrize(
    ("method", "adapter"),
    [
        *((method, "my_head") for method in METHODS),
        *(pytest.param(method, name, marks=pytest.mark.full) for method in METHODS for name in OTHER_NAMES),
    ],
)
def test_what_peft_trains_is_a_matrix_if_it_is_a_linear_of_the_model(method: str, adapter: str) -> None:
    """By the modules, and alike by the names in a checkpoint of the model and in one of PEFT's."""
    make, of_matrices, of_others = METHODS[method]
    model = wrapped(make(), adapter)
    routes = trained(model, adapter)
    assert {r.reason for r in routes.values() if r.kind == "matrix"} == of_matrices
    assert {r.reason for r in routes.values() if r.kind != "matrix"} == of_others
    if method in NOT_BY_NAME:
        return
    kinds = {r.name: r.kind for r in routes.values()}
    everything = by_name(shapes(model.named_parameters()))
    assert {name: everything[name].kind for name in kinds} == kinds
    saved = by_name(shapes(peft.get_peft_model_state_dict(model, None, adapter).items()))
    assert [r.kind for r in saved.values()].count("matrix") == list(kinds.values()).count("matrix"), saved


def test_an_unknown_adapter_is_elementwise_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_layers, "ADAPTERS", {})
    routes = trained(wrapped(METHODS["LoHa"][0]()))
    assert not matrices(routes)
    assert "PEFT's hada_w1_a, not known to be a linear's weight" in {r.reason for r in routes.values()}


def test_lora_of_what_is_no_plain_linear_is_elementwise() -> None:
    routes = trained(lora(model=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), target_modules=["0", "2"]))
    assert matrices(routes) == {"0.lora_A.weight", "0.lora_B.weight"}
    assert routes["2.lora_A.weight"].reason == "LoRA A of 2: one row"
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    routes = trained(lora(model=convolution, target_modules=["0", "2"], lora_bias=True))
    reasons = {r.reason for name, r in routes.items() if name.startswith("0") and "bias" not in name}
    assert reasons == {"LoRA A of 0: 4-D", "LoRA B of 0: 4-D"}
    assert routes["2.lora_B.bias"].reason == "LoRA B of 2: 1-D" and len(matrices(routes)) == 2
    blocks = peft.tuners.lora.BdLoraConfig(nblocks=2, target_modules_bd_a=["q_proj"], target_modules_bd_b=[])
    reasons = {r.reason.partition(": ")[2] for r in trained(lora(**Q, use_bdlora=blocks)).values()}
    assert reasons == {"not a plain linear"}, "one of A and B is blocks"


@pytest.mark.parametrize("first", ["default", "emb"])
def test_copies_of_every_adapter_are_routed_as_what_they_are_copies_of(first: str) -> None:
    made = peft.LoraConfig(r=4, **Q, modules_to_save=["lm_head", "embed_tokens", "up_proj"])
    model = wrapped(made, first)
    model.add_adapter("second", made)
    for active in (first, "second"):
        model.set_adapter(active)
        routes = trained(model, active)
        assert {name: r.reason for name, r in routes.items() if "modules_to_save" in name} == {
            "model.embed_tokens.modules_to_save.weight": "embedding",
            f"{LAYER}mlp.up_proj.modules_to_save.weight": "2-D weight",
            "lm_head.modules_to_save.weight": "output head, named 'lm_head'",
        }


def test_heads_are_found_where_a_classifier_is_copied_and_where_width_tells() -> None:
    roberta = hf.RobertaForSequenceClassification(hf.RobertaConfig(**TINY))
    made = peft.LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS")
    model = wrapped(made, model=roberta)
    model.add_adapter("second", made)
    routes = trained(model)
    assert routes["classifier.modules_to_save.dense.weight"].kind == "matrix"
    assert routes["classifier.modules_to_save.out_proj.weight"].reason == "output head, named 'classifier'"
    several = nn.ModuleDict({"tokens": nn.Embedding(50, 16), "ways": nn.ModuleList(nn.Linear(16, 50) for _ in "ab")})
    routes = trained(lora(model=several, target_modules=["ways.0", "ways.1"]))
    assert len(routes) == 4 and {r.reason.partition(": ")[2] for r in routes.values()} == {WIDE}


def test_wrapped_models_keep_their_routes_under_further_wrappers_and_inside_a_model() -> None:
    def made() -> nn.Module:
        return wrapped(peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), "emb")

    plain, model = list(reasons_of(made()).values()), made()
    inner = model.base_model.model
    inner.lm_head, inner.model.layers[0] = checkpoint_wrapper(inner.lm_head), checkpoint_wrapper(inner.model.layers[0])
    injected = peft.inject_adapter_in_model(made().peft_config["emb"], llama())
    for other in (model, nn.ModuleDict({"policy": made()}), injected):
        assert list(reasons_of(other).values()) == plain


def test_globs_overrule_what_peft_layers_say_and_frozen_weights_are_not_looked_at() -> None:
    """Quantized ones have shapes of their own, and some have no weight at all."""
    model = lora(target_modules=["q_proj", "lm_head"])
    routes = trained(model, include=["*.lm_head.lora_*"], exclude=["*.q_proj.*"])
    assert matrices(routes) == {"lm_head.lora_A.weight", "lm_head.lora_B.weight"}
    expected = trained(model)
    for layer in (model.base_model.model.lm_head, model.base_model.model.model.layers[0].self_attn.q_proj):
        layer.base_layer.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    assert trained(model) == expected


def test_a_model_without_peft_has_every_module_to_itself() -> None:
    model = UnevenLM()
    found = peft_layers.places(model)
    assert {name: place.name for name, place in found.items()} == {name: name for name, _ in model.named_modules()}
    assert all(place.is_own and place.outer is place.module for place in found.values())


def test_names_alone_tell_why() -> None:
    layer = "base_model.model.layers.0."
    expected = {
        "base_model.model.lm_head.lora_A.weight": ((4, 32), "LoRA A of lm_head: output head, named 'lm_head'"),
        "base_model.model.lm_head.lora_B.weight": ((50, 4), "LoRA B of lm_head: output head, named 'lm_head'"),
        f"{layer}q_proj.lora_A.weight": ((4, 32), "LoRA A of q_proj"),
        f"{layer}q_proj.lora_B.weight": ((32, 4), "LoRA B of q_proj"),
        f"{layer}k_proj.ia3_l": ((32, 1), "IA3 gain"),
        "prompt_embeddings": ((4, 32), "prompt"),
        "value_head.weight": ((1, 32), "one row"),
        "layers.0.expert.weight": ((3, 1, 32), "3 stacked experts of one row"),
    }
    found = by_name({name: shape for name, (shape, _) in expected.items()})
    assert {name: r.reason for name, r in found.items()} == {name: reason for name, (_, reason) in expected.items()}


# Which matrices are in LoRA's factors


def blocks_of(model: nn.Module) -> dict[str, list[Block]]:
    routes = route(model, stacks=True)
    return {name.removeprefix("base_model.model."): list(d.blocks) for name, d in divide(model, routes).items()}


def test_b_of_a_fused_weight_has_its_outputs() -> None:
    gpt = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, eos_token_id=1))
    found = blocks_of(lora(model=gpt, target_modules=["c_attn"], fan_in_fan_out=True))
    a, b = (found[f"transformer.h.0.attn.c_attn.lora_{factor}.default.weight"] for factor in "AB")
    assert [block.shape for block in a] == [(4, 32)]
    expected = [(name, Stripes(32 * number, 32), Stripes(0, 4)) for number, name in enumerate("qkv")]
    assert [(block.name, block.rows, block.columns) for block in b] == expected


def of_experts(kind: str, r: int) -> nn.Module:
    made = getattr(hf, f"{kind}Config")(**TINY, num_key_value_heads=2, head_dim=8, num_local_experts=3)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return lora(r, getattr(hf, f"{kind}ForCausalLM")(made), target_modules=[], target_parameters=targets)


def test_rank_1_of_stacked_experts_is_elementwise() -> None:
    routes = trained(of_experts("Mixtral", 1))
    assert not matrices(routes) and {r.reason.rpartition(": ")[2] for r in routes.values()} == {"rank 1"}


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])  # which store experts as (outputs, inputs), and transposed
def test_lora_of_stacked_experts_has_matrices_for_each(kind: str) -> None:
    model = of_experts(kind, 4)
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


def changed_by(module: Any, expert: int, factor: str) -> Tensor:
    """Which elements of a factor the change of one expert depends on."""
    module.zero_grad()
    nn.init.ones_(module.lora_A.default.weight)
    nn.init.ones_(module.lora_B.default.weight)
    module.get_delta_weight("default")[expert].sum().backward()
    return getattr(module, factor).default.weight.grad != 0


# PEFT on engines

EXPERTS = "base_model.model.experts.lora_"
PIECES = {  # of experts' factors, by the formula of PEFT's change of a weight: "o r e, e r i -> e o i"
    f"{EXPERTS}A.default.weight": [lambda a, e=e: a.unflatten(0, (3, 4))[e] for e in range(3)],
    f"{EXPERTS}B.default.weight": [lambda b, e=e: b.unflatten(1, (4, 3))[..., e] for e in range(3)],
}


def adapted() -> nn.Module:
    """LoRA of a linear, of a stack of experts and of the head; a linear that is trained as a copy."""
    model = FusedLM()
    targets = {"target_modules": ["down", "lm_head"], "target_parameters": ["experts.up"]}
    made = peft.LoraConfig(r=4, modules_to_save=["mix"], init_lora_weights="gaussian", **targets)
    torch.manual_seed(1)
    return peft.get_peft_model(model, made)


class AdaptedReference(Reference):
    """One process: torch's Muon on every matrix as a parameter of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = adapted()
        named = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        of_matrices = tuple(f"base_model.model.{layer}" for layer in ("down", "experts", "mix.modules_to_save"))
        for name, pieces in PIECES.items():
            monkeypatch.setitem(BLOCKS, name, pieces)
        self.muon = Separate({name: named.pop(name) for name in list(named) if name.startswith(of_matrices)}, **MUON)
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


def routes_under_fsdp2() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    model = wrapped(peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"]), "emb")
    plain = told(route(model))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return told(fsdp2.LayerWiseOptimizer(model, report=False)._grouping.routes), plain


def test_fsdp2_routes_alike(ranks: RankPool) -> None:
    for sharded, plain in ranks.run(routes_under_fsdp2):
        assert sharded == plain
