"""Routing by structure on models people train, and the overrides by name."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import transformers
from torch import nn

from lwopt_backend.report import routing_headline
from lwopt_backend.routing import Route, route
from tests.models import UnevenLM


def routes_of(model: nn.Module, **globs: list[str]) -> dict[str, Route]:
    return {r.name: r for r in route(model, **globs)}


def hugging_face(config: transformers.PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 512}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL, intermediate_size=128, num_key_value_heads=2),
    "llama-tied": transformers.LlamaConfig(**SMALL, intermediate_size=128, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL, intermediate_size=128, num_key_value_heads=2, head_dim=16),
    "mistral": transformers.MistralConfig(**SMALL, intermediate_size=128, num_key_value_heads=2),
    "gpt2": transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=512, n_positions=64),
    "gpt-neox": transformers.GPTNeoXConfig(**SMALL, intermediate_size=128),
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=128, word_embed_proj_dim=32, max_position_embeddings=64),
    "cohere": transformers.CohereConfig(**SMALL, intermediate_size=128, use_qk_norm=True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_heads_norms_and_biases_of_real_models_stay_elementwise(family: str) -> None:
    model = hugging_face(FAMILIES[family])
    routes = routes_of(model)
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, param in model.named_parameters():
        position_table = "wpe" in name or "embed_positions" in name
        hidden = param.ndim == 2 and id(param) not in outside and "norm" not in name and not position_table
        assert routes[name].kind == ("matrix" if hidden else "elementwise"), routes[name]
    assert any(r.kind == "matrix" for r in routes.values())


def test_a_position_table_as_long_as_the_model_is_wide_claims_no_hidden_layer() -> None:
    """As GPT-2 medium with its 1024 positions and width 1024; the head is tied, no hidden layer may be taken for it."""
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=64)
    routes = routes_of(hugging_face(config))
    assert {r.reason for r in routes.values() if len(r.shape) == 2} == {
        "embedding, tied to lm_head",
        "embedding",
        "2-D weight, stored transposed",
    }


class TiedInFunction(nn.Module):
    """The head is the embedding, used as a function: no linear anywhere. As wide as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, 64), nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))


def test_a_hidden_layer_inside_a_repeated_block_is_not_taken_for_the_head() -> None:
    kinds = {r.name: r.kind for r in route(TiedInFunction())}
    assert [kinds[f"layers.1.{i}.weight"] for i in (0, 2)] == ["matrix", "matrix"]


def test_the_last_linear_as_wide_as_the_vocabulary_is_the_head_whatever_its_name() -> None:
    model = nn.Sequential(
        nn.Embedding(50, 16), nn.Linear(16, 50), nn.Linear(50, 16), nn.Linear(16, 50), nn.Linear(50, 2)
    )
    routes = routes_of(model)
    assert [routes[f"{i}.weight"].kind for i in range(5)] == [
        "elementwise",
        "matrix",
        "matrix",
        "elementwise",
        "matrix",
    ]
    assert routes["3.weight"].reason == "output head, as wide as an embedding has rows"


class Classifier(nn.Module):
    """A head named so, at the top; the same name inside a block means something else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"output": nn.Linear(8, 8)}) for _ in range(2))
        self.head = nn.Linear(8, 3)


def test_heads_by_name() -> None:
    routes = routes_of(Classifier())
    assert routes["head.weight"].reason == "output head, named 'head'"
    assert routes["blocks.0.output.weight"].kind == "matrix"


class Several(nn.Module):
    """What stands outside of layers: several heads, a head with a hidden layer, a pooler, tables of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.bag = nn.EmbeddingBag(12, 16)
        self.pos_emb = nn.Parameter(torch.zeros(8, 16))
        self.relative_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(16, 16), "head": nn.Linear(16, 50)})])
        self.pooler = nn.Linear(16, 32)
        self.predictors = nn.ModuleList([nn.Linear(16, 50), nn.Linear(16, 50)])
        self.classifier = nn.Sequential(OrderedDict(dense=nn.Linear(16, 16), out_proj=nn.Linear(16, 3)))
        self.score = nn.Sequential(OrderedDict(dense=nn.Linear(16, 16)))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3)) for _ in range(2))


def test_heads_and_tables_outside_the_layers() -> None:
    routes = routes_of(Several())
    assert {name: r.reason for name, r in routes.items() if len(r.shape) == 2} == {
        "tokens.weight": "embedding",
        "positions.weight": "embedding",
        "bag.weight": "embedding",
        "pos_emb": "embedding by name",
        "relative_bias_table": "bias",
        "layers.0.output.weight": "2-D weight",
        "layers.0.head.weight": "2-D weight",
        "pooler.weight": "2-D weight",
        "predictors.0.weight": "output head, as wide as an embedding has rows",
        "predictors.1.weight": "output head, as wide as an embedding has rows",
        "classifier.dense.weight": "2-D weight",
        "classifier.out_proj.weight": "output head, named 'classifier'",
        "score.dense.weight": "2-D weight",
        "heads.0.0.weight": "2-D weight",
        "heads.0.1.weight": "output head, named 'heads'",
        "heads.1.0.weight": "2-D weight",
        "heads.1.1.weight": "output head, named 'heads'",
    }


def test_where_the_head_is_tied_no_hidden_layer_is_taken_for_it() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(50, 16), "out": nn.Linear(16, 50, bias=False)})
    model["last"] = nn.Linear(16, 50, bias=False)
    model["out"].weight = model["tokens"].weight
    assert routes_of(model)["last.weight"].kind == "matrix"


def test_a_list_of_plain_layers_is_not_a_list_of_blocks() -> None:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 50)))
    assert routes_of(model)["1.1.weight"].reason == "output head, as wide as an embedding has rows"


def test_a_module_used_under_two_names_is_known_by_both() -> None:
    shared = nn.Linear(16, 16, bias=False)
    routes = routes_of(nn.ModuleDict({"first": shared, "lm_head": shared}))
    assert routes["first.weight"].aliases == ("lm_head.weight",)
    assert routes["first.weight"].reason == "output head, named 'lm_head'"


class LowRank(nn.Linear):
    """torchtitan's LoRA: two linears within a linear."""

    def __init__(self) -> None:
        super().__init__(16, 50, bias=False)
        self.lora_a, self.lora_b = nn.Linear(16, 4, bias=False), nn.Linear(4, 50, bias=False)


def test_a_low_rank_change_within_a_head_is_part_of_the_head() -> None:
    routes = routes_of(nn.ModuleDict({"lm_head": LowRank(), "inner": LowRank()}))
    kinds = {name: r.kind for name, r in routes.items()}
    assert {kinds[f"lm_head.{key}weight"] for key in ("", "lora_a.", "lora_b.")} == {"elementwise"}
    assert {kinds[f"inner.{key}weight"] for key in ("", "lora_a.", "lora_b.")} == {"matrix"}


class Vectors(nn.Module):
    """A value head, a router of one expert, a projection of one number, and stacks of such."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.router, self.time = nn.Linear(8, 1), nn.Linear(8, 1, bias=False), nn.Linear(1, 8)
        self.experts = nn.Module()
        self.experts.rows, self.experts.columns = nn.Parameter(torch.ones(3, 1, 8)), nn.Parameter(torch.ones(3, 8, 1))
        self.experts.up = nn.Parameter(torch.ones(3, 8, 2))


def test_one_row_or_one_column_is_elementwise_and_include_overrules() -> None:
    reasons = {r.name: (r.kind, r.reason) for r in route(Vectors(), stacks=True) if len(r.shape) > 1}
    assert reasons == {
        "value.weight": ("elementwise", "one row"),
        "router.weight": ("elementwise", "one row"),
        "time.weight": ("elementwise", "one column"),
        "experts.rows": ("elementwise", "3 stacked experts of one row"),
        "experts.columns": ("elementwise", "3 stacked experts of one column"),
        "experts.up": ("matrix", "3 stacked experts"),
    }
    routes = routes_of(Vectors(), include=["router.*", "time.weight"])
    assert (routes["router.weight"].kind, routes["router.weight"].reason) == ("matrix", "included by 'router.*'")
    assert routes["time.weight"].kind == "matrix" and routes["value.weight"].kind == "elementwise"


REAL = {
    "gpt-oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig(**SMALL, intermediate_size=96, num_local_experts=4, num_key_value_heads=2),
        {"model.layers.0.mlp.experts.down_proj_bias": "bias", "model.layers.0.mlp.router.weight": "2-D weight"},
    ),
    "mamba": (
        transformers.MambaForCausalLM,
        transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=512),
        {
            "backbone.layers.0.mixer.A_log": "one decay per channel and state",
            "backbone.layers.0.mixer.out_proj.weight": "2-D weight",
        },
    ),
    "roberta": (
        transformers.RobertaForSequenceClassification,
        transformers.RobertaConfig(**SMALL, intermediate_size=96),
        {
            "classifier.dense.weight": "2-D weight",
            "classifier.out_proj.weight": "output head, named 'classifier'",
        },
    ),
    "bert": (
        transformers.BertForSequenceClassification,
        transformers.BertConfig(**SMALL, intermediate_size=96, max_position_embeddings=64),
        {"bert.pooler.dense.weight": "2-D weight", "classifier.weight": "output head, named 'classifier'"},
    ),
    "modernbert": (
        transformers.ModernBertForMaskedLM,
        transformers.ModernBertConfig(**SMALL, intermediate_size=96, pad_token_id=0),
        {"head.dense.weight": "2-D weight"},
    ),
    "swin": (
        transformers.SwinForImageClassification,
        transformers.SwinConfig(embed_dim=8, depths=[1], num_heads=[2], image_size=32, patch_size=2, window_size=4),
        {"classifier.weight": "output head, named 'classifier'"},
    ),
}


@pytest.mark.parametrize("family", REAL)
def test_odd_parameters_of_real_models(family: str) -> None:
    kind, config, expected = REAL[family]
    with torch.device("meta"):
        routes = routes_of(kind(config))
    assert {name: routes[name].reason for name in expected} == expected
    assert not [r.name for r in routes.values() if r.kind == "matrix" and "bias" in r.name.rpartition(".")[2]]


def test_models_of_stacked_experts_say_how_little_is_a_matrix() -> None:
    config = transformers.MixtralConfig(**SMALL, intermediate_size=256, num_key_value_heads=2)
    headline, note = routing_headline(route(hugging_face(config)))
    assert "elements lie in parameters of 3 and more dimensions (stacked experts" in note
    assert len(routing_headline(route(UnevenLM()))) == 1


def test_everything_not_two_dimensional_and_odd_modules() -> None:
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

    routes = routes_of(Odd())
    assert {name: (r.kind, r.reason) for name, r in routes.items() if not name.startswith("rnn")} == {
        "conv.weight": ("elementwise", "3-D"),
        "conv.bias": ("elementwise", "1-D"),
        "norm.weight": ("elementwise", "norm"),
        "norm.bias": ("elementwise", "norm"),
        "scale": ("elementwise", "0-D"),
        "bias": ("elementwise", "bias"),
        "frozen.weight": ("frozen", "requires_grad is False"),
        "empty": ("elementwise", "no elements"),
    }
    assert routes["rnn.weight_ih_l0"].kind == "matrix"


def test_globs_overrule_structure_and_exclude_wins() -> None:
    routes = routes_of(UnevenLM(), include=["lm_head.*", "layers.*"], exclude=["layers.2.*"])
    assert (routes["lm_head.weight"].kind, routes["lm_head.weight"].reason) == ("matrix", "included by 'lm_head.*'")
    assert (routes["layers.2.weight"].kind, routes["layers.2.weight"].reason) == (
        "elementwise",
        "excluded by 'layers.2.*'",
    )
    assert routes["layers.0.bias"].kind == "elementwise", "a glob cannot make a matrix of a vector"


def test_globs_match_every_name_of_a_tied_parameter() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "out": nn.Linear(4, 10, bias=False)})
    model["out"].weight = model["embedding"].weight
    routes = routes_of(model, include=["out.weight"])
    assert list(routes) == ["embedding.weight"]
    assert routes["embedding.weight"].reason == "included by 'out.weight'"
    assert routes["embedding.weight"].aliases == ("out.weight",)


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        ({"include": ["*.wieght"]}, r"include: '\*.wieght' matches no parameter name"),
        ({"exclude": ["gate.weigth"]}, "exclude: 'gate.weigth' matches no parameter name; did you mean 'gate.weight'?"),
        ({"include": ["*.bias"]}, r"include: '\*.bias' matches only parameters that are not 2-D"),
    ],
)
def test_globs_that_do_nothing_are_errors(globs: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(UnevenLM(), **globs)
