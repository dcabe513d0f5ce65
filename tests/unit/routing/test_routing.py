"""Which parameters go to the matrix rule and why: of models people train, of those that PEFT wrapped, and by name."""

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from lwopt_backend import explain
from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.engines.report import routing_headline
from lwopt_backend.integrations import fsdp2
from lwopt_backend.plan.atoms import Block, Stripes
from lwopt_backend.routing import models as peft_layers
from lwopt_backend.routing.matrices import divide
from lwopt_backend.routing.routing import Route
from tests.support.fused import FusedLM
from tests.support.models import UnevenLM, routed
from tests.support.on_ranks import on_ranks
from tests.support.zero import config, engine_for, train
from tests.unit.plan.test_blocks import indices


def routes_of(model: nn.Module, **options: Any) -> dict[str, Route]:
    """By names without ".weight"."""
    return {r.name.removesuffix(".weight"): r for r in routed(model, **options)}


def module(**parts: Any) -> nn.Module:
    made = nn.Module()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


# Models as they are; those of Hugging Face's families are in test_model_shapes.py
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50, "intermediate_size": 48}


def on_meta(made: hf.PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(made)
    model.tie_weights()
    return model


def test_routing_says_how_little_is_a_matrix() -> None:
    """Where stacked experts are excluded, routing says how little is a matrix."""
    model = on_meta(hf.MixtralConfig(**{**TINY, "intermediate_size": 128}))
    (headline,) = routing_headline(routed(model, exclude=["*.experts.*"]))
    assert re.search(r"elementwise trains \d\d[.\d]*% as excluded", headline)
    assert "matrix trains" in routing_headline(routed(UnevenLM()))[0]


# Heads, tables, odd modules, and everything that is no matrix
Make = Callable[[], nn.Module]


def real(family: str, task: str, sizes: dict[str, Any] = TINY, **options: Any) -> Make:
    def make() -> nn.Module:
        with torch.device("meta"):
            return getattr(hf, family + task)(getattr(hf, f"{family}Config")(**sizes, **options))

    return make


def linears(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs) for inputs, outputs in zip(sizes, sizes[1:])]


def several_heads() -> nn.Module:
    """What stands outside of layers: several heads, a head with a hidden layer, a pooler, tables of positions."""
    return module(
        **{"tokens": nn.Embedding(50, 16), "positions": nn.Embedding(32, 16), "bag": nn.EmbeddingBag(12, 16)},
        pos_emb=nn.Parameter(torch.zeros(8, 16)),
        relative_bias_table=nn.Parameter(torch.zeros(9, 2)),
        layers=nn.ModuleList([module(output=nn.Linear(16, 16), head=nn.Linear(16, 50))]),
        pooler=nn.Linear(16, 32),  # as wide as there are positions, which are no vocabulary
        predictors=nn.ModuleList([nn.Linear(16, 50), nn.Linear(16, 50)]),
        classifier=nn.Sequential(OrderedDict(dense=nn.Linear(16, 16), out_proj=nn.Linear(16, 3))),
        score=nn.Sequential(OrderedDict(dense=nn.Linear(16, 16))),
        heads=nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3)) for _ in range(2)),
    )


def tied_in_a_function() -> nn.Module:
    """The head is the embedding, used as a function: no linear anywhere. As wide as there are positions."""
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2))
    tables = {"tokens": nn.Embedding(100, 64), "positions": nn.Embedding(64, 64)}
    return module(**tables, layers=layers, pooler=nn.Linear(64, 64))


def tied() -> Any:
    last, out = nn.Linear(16, 50, bias=False), nn.Linear(16, 50, bias=False)
    model = module(tokens=nn.Embedding(50, 16), out=out, last=last)
    out.weight = model.tokens.weight
    return model


def shared() -> nn.Module:
    linear = nn.Linear(16, 16, bias=False)
    return module(first=linear, lm_head=linear)


class LowRank(nn.Linear):
    """torchtitan's LoRA: two linears within a linear, which are part of a head if that is one."""

    def __init__(self) -> None:
        super().__init__(16, 50, bias=False)
        self.lora_a, self.lora_b = nn.Linear(16, 4, bias=False), nn.Linear(4, 50, bias=False)


def vectors() -> nn.Module:
    """A value head, a router of one expert, a projection of one number, and stacks of such."""
    stacks = {"rows": torch.ones(3, 1, 8), "columns": torch.ones(3, 8, 1), "up": torch.ones(3, 8, 2)}
    experts = module(**{name: nn.Parameter(stack) for name, stack in stacks.items()})
    linears = {"value": nn.Linear(8, 1), "router": nn.Linear(8, 1, bias=False), "time": nn.Linear(1, 8)}
    return module(**linears, experts=experts)


class CohereLayerNorm(nn.Module):
    """A weight for each head and channel, in a class that torch does not know; as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6))


def odd() -> nn.Module:
    parts: dict[str, Any] = {"conv": nn.Conv1d(4, 4, 3), "norm": nn.LayerNorm((4, 6)), "rnn": nn.GRU(4, 5)}
    parts |= {"of_queries": CohereLayerNorm()}
    parts |= {"scale": nn.Parameter(torch.ones(())), "bias": nn.Parameter(torch.ones(3, 3))}
    parts |= {"frozen": nn.Linear(4, 4, bias=False).requires_grad_(False), "empty": nn.Parameter(torch.empty(0, 4))}
    return module(**parts)


PLAIN, WIDE, NAMED = (
    "2-D weight",
    "output head, as many outputs as the embedding has rows",
    "output head, named '{}'".format,
)
DECAY = "one decay per channel and state"
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50, "eos_token_id": 1}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
SWIN = {"embed_dim": 8, "depths": [1], "num_heads": [2], "image_size": 32, "patch_size": 2, "window_size": 4}
CAUSAL, CLASSES, CLASSIFIER = "ForCausalLM", "ForSequenceClassification", NAMED("classifier")
EXPECTED: dict[Make, dict[str, str]] = {  # by reason the names, without ".weight"
    real("GptOss", CAUSAL, num_local_experts=4, num_key_value_heads=2): {
        **{"bias": "model.layers.0.mlp.experts.down_proj_bias", PLAIN: "model.layers.0.mlp.router"}
    },
    real("Mamba", CAUSAL, MAMBA): {DECAY: "backbone.layers.0.mixer.A_log", PLAIN: "backbone.layers.0.mixer.out_proj"},
    real("Roberta", CLASSES): {PLAIN: "classifier.dense", CLASSIFIER: "classifier.out_proj"},
    real("Bert", CLASSES, max_position_embeddings=32): {PLAIN: "bert.pooler.dense", CLASSIFIER: "classifier"},
    real("ModernBert", "ForMaskedLM", pad_token_id=0): {PLAIN: "head.dense"},
    real("Swin", "ForImageClassification", SWIN): {CLASSIFIER: "classifier"},
    several_heads: {
        **{"embedding": "tokens positions bag", "embedding by name": "pos_emb", "bias": "relative_bias_table"},
        PLAIN: "layers.0.output layers.0.head pooler classifier.dense score.dense heads.0.0 heads.1.0",
        **{WIDE: "predictors.0 predictors.1", CLASSIFIER: "classifier.out_proj", NAMED("heads"): "heads.0.1 heads.1.1"},
    },
    # As wide as a vocabulary, but not the last, so that what the model returns decides.
    lambda: nn.Sequential(nn.Embedding(50, 16), *linears(16, 50, 16, 50, 2)): {
        **{PLAIN: "1 2 3", "output head, returned and not read": "4"}
    },
    # A list of plain layers is not a list of blocks.
    lambda: nn.Sequential(nn.Embedding(50, 16), nn.Sequential(*linears(16, 16, 50))): {PLAIN: "1.0", WIDE: "1.1"},
    tied_in_a_function: {PLAIN: "layers.1.0 layers.1.2 pooler"},
    tied: {"embedding, tied to out": "tokens", PLAIN: "last"},
    shared: {NAMED("lm_head"): "first"},  # which one module's two names say
    # As GPT-2 medium with its 1024 positions and width 1024; the head is tied.
    lambda: on_meta(hf.GPT2Config(**GPT2, n_positions=32)): {
        **{"embedding, tied to lm_head": "transformer.wte", "embedding": "transformer.wpe"},
        f"{PLAIN}, stored transposed": "transformer.h.0.attn.c_proj",
    },
    lambda: module(lm_head=LowRank(), inner=LowRank()): {
        **{NAMED("lm_head"): "lm_head lm_head.lora_a lm_head.lora_b", PLAIN: "inner inner.lora_a inner.lora_b"}
    },
    vectors: {
        **{"one row": "value router", "one column": "time", "3 stacked experts": "experts.up"},
        **{"3 stacked experts of one row": "experts.rows", "3 stacked experts of one column": "experts.columns"},
    },
    odd: {
        **{"convolution": "conv", "1-D": "conv.bias", "norm": "norm norm.bias of_queries", "0-D": "scale"},
        **{"bias": "bias", "requires_grad is False": "frozen", "no elements": "empty", PLAIN: "rnn.weight_ih_l0"},
    },
}


@pytest.mark.parametrize(("make", "expected"), EXPECTED.items())
def test_parameters_are_routed_by_what_they_are_used_for(make: Make, expected: dict[str, str]) -> None:
    """Embeddings, heads, norms and biases are routed by what they are used for."""
    routes = routes_of(make())
    for reason, names in expected.items():
        is_matrix = re.fullmatch(r"2-D weight.*|\d+ stacked experts", reason)
        other = "frozen" if reason == "requires_grad is False" else "elementwise"
        for name in names.split():
            assert (routes[name].kind, routes[name].reason) == ("matrix" if is_matrix else other, reason)
    assert not [r.name for r in routes.values() if r.kind == "matrix" and "bias" in r.name.rpartition(".")[2]]


# Overrides by name
def test_include_and_exclude_overrule_structure() -> None:
    """`exclude` wins over `include`."""
    routes = routes_of(UnevenLM(), include=["lm_head.*", "layers.*"], exclude=["layers.2.*"])
    found = {name: (r.kind, r.reason) for name, r in routes.items()}
    assert found["lm_head"] == ("matrix", "included by 'lm_head.*'")
    assert found["layers.2"] == ("elementwise", "excluded by 'layers.2.*'")
    assert found["layers.0.bias"][0] == "elementwise", "a glob cannot make a matrix of a vector"
    (both,) = [r for r in routed(tied(), include=["out.weight"]) if r.aliases]
    assert (both.name, both.aliases, both.reason) == ("tokens.weight", ("out.weight",), "included by 'out.weight'")
    kinds = {name: r.kind for name, r in routes_of(vectors(), include=["router.*", "time.weight"]).items()}
    assert [kinds[name] for name in ("router", "time", "value")] == ["matrix", "matrix", "elementwise"]
    assert kinds["experts.up"] == "matrix" and kinds["experts.rows"] == kinds["experts.columns"] == "elementwise"


# What 2-D parameters of a module's own are for
class Uses(nn.Module):
    """One 2-D parameter, 12 x 8, and a forward that uses it."""

    def __init__(self, use: Callable[[Any, Tensor, Tensor], Tensor], name: str = "table") -> None:
        super().__init__()
        self.use, self.name = use, name
        self.to_q, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_parameter(name, nn.Parameter(torch.empty(12, 8)))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.use(self, hidden_states, getattr(self, self.name))


def a_failure(module: Uses, x: Tensor, table: Tensor) -> Tensor:
    raise TypeError(f"{module} wants something else")


FUNCTIONS = nn.functional
USES = {  # (what the forward does, whether it is a product)
    "router": (lambda m, x, w: FUNCTIONS.linear(x, w), True),
    "written out": (lambda m, x, w: x @ w.T, True),
    "scaled": (lambda m, x, w: x @ (w * w.new_ones(12, 1)).T, True),
    "of two": (lambda m, x, w: m.to_q(x) @ w.T, True),
    "positions": (lambda m, x, w: m.to_q(x + w[: x.shape[1]]), False),
    "positions, without a batch": (lambda m, x, w: m.to_q(m.norm(x + w[: x.shape[-2]])), False),
    "relative positions": (lambda m, x, w: m.to_q(x) @ w[torch.arange(7, device=w.device)].T, False),
    "tokens": (lambda m, x, w: m.to_q(torch.cat([w[None].expand(x.shape[0], 12, 8), x], 1)), False),
    "latents": (lambda m, x, w: m.to_q(w[None].expand(x.shape[0], 12, 8)) @ x.mT, False),
    "latents through a norm": (lambda m, x, w: m.to_q(m.norm(w[None])) @ x.mT, False),
    "channels": (lambda m, x, w: FUNCTIONS.conv1d(x.mT, w.T[:, None], groups=8), False),
}


@pytest.mark.parametrize("use", USES)
def test_own_parameter_is_a_matrix_if_multiplied(use: str) -> None:
    """A module's own parameter is a matrix if its forward multiplies with it."""
    forward, multiplied = USES[use]
    of_its_own = routes_of(Uses(forward))["table"]
    reason = "2-D weight" if multiplied else "added or looked up, not multiplied"
    assert (of_its_own.kind, of_its_own.reason) == ("matrix" if multiplied else "elementwise", reason)


def test_parameters_of_unknown_use_are_elementwise() -> None:
    """Parameters whose use nothing shows are named, and element-wise; or matrices by their names, and named as well."""
    model = nn.ModuleList([Uses(a_failure), Uses(a_failure), Uses(a_failure, "in_proj"), Uses(a_failure, "w1")])
    by_name = r"No forward showed how these weights are multiplied: '2.in_proj', '3.w1'\. .*'2.in_proj': 'whole'"
    with (
        pytest.warns(UserWarning, match=r"No forward showed what these parameters are for: '0.table', '1.table'"),
        pytest.warns(UserWarning, match=by_name),
    ):
        routes = routes_of(model)
    reasons = {name: route.reason for name, route in routes.items() if name[2:] in ("table", "in_proj", "w1")}
    unclear = "2-D, but nothing shows that it is multiplied"
    assert reasons == {"0.table": unclear, "1.table": unclear, "2.in_proj": "2-D weight", "3.w1": "2-D weight"}
    ends_it = AtomSettings.parse({"2.in_proj": "whole", "3.w1": {"stored": "inputs_first"}})
    with warnings.catch_warnings(action="error"):
        asked = routes_of(model, include=["0.table"], exclude=["1.table"], atoms=ends_it)
    assert asked["3.w1"].transposed and not asked["2.in_proj"].transposed
    assert [asked[f"{n}.table"].kind for n in (0, 1)] == ["matrix", "elementwise"]


def test_only_memory_in_common_is_shared_memory() -> None:
    """Rows in turn, as of one weight that two modules have, lie between each other; cuDNN's weights lie end to end."""
    model, rows = nn.Sequential(nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)), torch.ones(9, 6)
    for number, of_rows in enumerate((rows[:8:2], rows[1:9:2], torch.ones(4, 6))):
        model[number].weight.data = of_rows
    explain(model, matrix="muon", lr=0.1, show=False)
    for shared in (rows[2:6], rows[::2][1:], rows[:4, :1].expand(4, 6)):
        model[2].weight.data = shared
        with pytest.raises(ValueError, match="'(0|1).weight' and '2.weight' share memory|'2.weight' and '0.weight'"):
            explain(model, matrix="muon", lr=0.1, show=False)


class Waves(nn.Module):
    """Fourier neural operators and S5 have such weights."""

    def __init__(self) -> None:
        super().__init__()
        self.modes, self.back = nn.Parameter(torch.zeros(6, 6, dtype=torch.complex64)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back((x.to(torch.complex64) @ self.modes).real)


def test_complex_weights_are_elementwise() -> None:
    """Newton-Schulz in bfloat16 would step the real parts alone."""
    for example in (None, ((torch.zeros(2, 6),), {})):
        options = {"example": example, "allow_no_matrix": True}
        found = {each.name: each for each in explain(Waves(), matrix="muon", lr=0.1, show=False, **options)}
        assert (found["modes"].rule, found["modes"].why) == ("adamw", "complex numbers")
    with pytest.raises(ValueError, match="'modes' is complex64, and an option sends it to the matrix rule"):
        explain(Waves(), matrix="muon", lr=0.1, show=False, include=["modes"])


@pytest.mark.filterwarnings("ignore:.*jit")
def test_torchscript_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 6), torch.jit.trace(nn.Linear(6, 6), torch.zeros(1, 6)))
    with pytest.raises(TypeError, match="found module '1' of TorchScript; pass the module that was scripted"):
        explain(model, matrix="muon", lr=0.1, show=False)


def test_parameters_of_a_plain_module_are_told_by_use() -> None:
    """As in what torch.export makes of a model: its modules hold parameters, and have no class."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in {"tokens": (40, 6), "inner": (9, 6), "outer": (6, 9)}.items():
                setattr(self, name, nn.Module())
                getattr(self, name).weight = nn.Parameter(torch.zeros(shape))

        def forward(self, ids: Tensor) -> Tensor:
            x = nn.functional.embedding(ids, self.tokens.weight)
            return x + nn.functional.linear(nn.functional.linear(x, self.inner.weight).relu(), self.outer.weight)

    found = explain(Graph(), matrix="muon", lr=0.1, show=False, example=((torch.zeros(1, 5, dtype=torch.long),), {}))
    assert {each.name: each.rule for each in found} == {
        **{"tokens.weight": "adamw", "inner.weight": "muon", "outer.weight": "muon"},
    }


def test_marks_of_megatron_and_deepspeed_are_heeded() -> None:
    """Marks of Megatron and DeepSpeed keep a parameter from the matrix rule."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.ones(2, 4, 4))

    model = module(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4), d=nn.Linear(4, 4), experts=Experts())
    model.a.weight.use_muon = False
    model.b.weight.is_embedding_or_output_parameter = True
    model.c.weight.use_muon = model.d.weight.is_embedding_or_output_parameter = None
    model.experts.w1.use_muon = False
    found = {name: (r.kind, r.reason) for name, r in routes_of(model).items()}
    unless = ("elementwise", "marked use_muon=False")
    assert found["a"] == found["experts.w1"] == unless
    assert found["b"] == ("elementwise", "marked is_embedding_or_output_parameter=True")
    assert found["c"][0] == found["d"][0] == "matrix"
    assert routes_of(model, include=["a.weight"])["a"].kind == "matrix"


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        ({"include": ["*.wieght"]}, "include: '*.wieght' matches no parameter name"),
        ({"exclude": ["gate.weigth"]}, "exclude: 'gate.weigth' matches no parameter name; did you mean 'gate.weight'?"),
        ({"include": ["*.bias"]}, "include: '*.bias' matches only parameters that are not 2-D"),
    ],
)
def test_include_and_exclude_globs_that_do_nothing_are_errors(globs: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        routed(UnevenLM(), **globs)


# PEFT: by what a parameter is, never by the adapter's name
Q = {"target_modules": ["q_proj"]}
BOTH = {"target_modules": ["q_proj", "down_proj"]}
FOUR, HEADED = {"r": 4, **BOTH}, {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]}
COPIED = {**FOUR, "modules_to_save": ["lm_head", "embed_tokens", "up_proj"]}
ADALORA = {"init_r": 4, "target_r": 2, "total_step": 10, "tinit": 1, "tfinal": 1, **Q}
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
NETWORK = {**PROMPT, "encoder_hidden_size": 16}
LORA = {f"LoRA {factor} of {layer}" for factor in "AB" for layer in ("q_proj", "down_proj")}
OF_HEAD = {f"LoRA {factor} of lm_head: {NAMED('lm_head')}" for factor in "AB"} | {"LoRA of an embedding"}
RANK_1 = {"LoRA A of q_proj: rank 1", "LoRA B of q_proj: rank 1"}
TOKENS = {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]}
VECTORS = {"r": 4, "num_vectors": 8, "vector_length": 16, **Q}
METHODS: dict[str, tuple[Any, dict[str, Any], set[str], set[str]]] = {  # reasons of matrices, and of everything else
    "lora": (peft.LoraConfig, HEADED, LORA, OF_HEAD),
    "dora": (peft.LoraConfig, {**HEADED, "use_dora": True}, LORA, OF_HEAD | {"DoRA magnitude"}),
    "rank 1": (peft.LoraConfig, {"r": 1, **Q}, set(), RANK_1),
    "copies": (peft.LoraConfig, COPIED, LORA | {PLAIN}, {NAMED("lm_head"), "embedding"}),
    "tokens": (peft.LoraConfig, {**FOUR, "trainable_token_indices": [1, 2, 3]}, LORA, {"trainable token rows"}),
    "adalora": (peft.AdaLoraConfig, ADALORA, {f"LoRA {f} of q_proj" for f in "AB"}, {"AdaLoRA's singular values"}),
    "IA3": (peft.IA3Config, {**BOTH, "feedforward_modules": ["down_proj"]}, set(), {"IA3 gain"}),
    "VeRA": (peft.VeraConfig, {"r": 4, **Q}, set(), {"VeRA vector"}),
    "OFT": (peft.OFTConfig, {"oft_block_size": 4, **BOTH}, set(), {"OFT rotation"}),
    "BOFT": (peft.BOFTConfig, {"boft_block_size": 4, **BOTH}, set(), {"BOFT rotation", "BOFT gain"}),
    "LoHa": (peft.LoHaConfig, FOUR, set(), {"LoHa factor"}),
    "LoKr": (peft.LoKrConfig, {"r": 2, "decompose_both": True, **BOTH}, set(), {"LoKr factor"}),
    "HRA": (peft.HRAConfig, FOUR, set(), {"HRA reflection"}),
    "VB-LoRA": (peft.VBLoRAConfig, VECTORS, set(), {"VB-LoRA's logits and vectors"}),
    "MiSS": (peft.MissConfig, FOUR, set(), {"MiSS block"}),
    "RandLoRA": (peft.RandLoraConfig, {"r": 4, **Q}, set(), {"RandLoRA scale"}),
    "token rows": (peft.TrainableTokensConfig, TOKENS, set(), {"trainable token rows"}),
    "prompt": (peft.PromptTuningConfig, PROMPT, set(), {"prompt"}),
    "prefix": (peft.PrefixTuningConfig, PROMPT, set(), {"prompt"}),
    "prefix through a network": (peft.PrefixTuningConfig, {**NETWORK, "prefix_projection": True}, set(), {"prompt"}),
    "p-tuning": (peft.PromptEncoderConfig, NETWORK, set(), {"prompt"}),
}
ADAPTERS = ("default", "lm_head", "norm_bias")  # of which no name says what an adapter is


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY))


def wrapped(made: Any, adapter: str = "default", model: nn.Module | None = None) -> Any:
    return peft.get_peft_model(model or llama(), made, adapter_name=adapter)


def lora(model: nn.Module | None = None, adapter: str = "default", **options: Any) -> Any:
    return wrapped(peft.LoraConfig(**{"r": 4, **options}), adapter, model)


def trained(model: nn.Module, adapter: str = "default", **options: Any) -> dict[str, Route]:
    """The routes of what is trained, by names without PEFT's prefix and the adapter's."""
    found = {}
    for each in routed(model, **options):
        if each.kind != "frozen":
            before, _, after = f"{each.name.removeprefix('base_model.model.')}.".rpartition(f".{adapter}.")
            found[f"{before}.{after}".rstrip(".")] = each
    return found


def matrices(routes: dict[str, Route]) -> set[str]:
    return {name for name, each in routes.items() if each.kind == "matrix"}


def causes(routes: dict[str, Route]) -> set[str]:
    return {r.reason.partition(": ")[2] for r in routes.values()}


@pytest.mark.parametrize("method", METHODS)
def test_what_peft_trains_is_a_matrix_if_it_is_lora_of_a_linear(method: str) -> None:
    made, options, of_matrices, of_others = METHODS[method]
    for adapter in ADAPTERS:
        if (method, adapter) == ("copies", "lm_head"):
            continue  # PEFT 0.21 refuses an adapter that is called like a module whose copy is trained
        model = wrapped(made(**options), adapter)
        routes = list(trained(model, adapter).values())
        assert {r.reason for r in routes if r.kind == "matrix"} == of_matrices, adapter
        assert {r.reason for r in routes if r.kind != "matrix"} == of_others, adapter


def test_an_unknown_peft_adapter_is_elementwise_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_layers, "ADAPTERS", {})
    routes = trained(wrapped(peft.LoHaConfig(**FOUR)))
    assert not matrices(routes)
    assert "PEFT's hada_w1_a, not known to be a linear's weight" in {r.reason for r in routes.values()}


def test_lora_of_what_is_no_plain_linear_is_elementwise() -> None:
    routes = trained(lora(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), target_modules=["0", "2"]))
    assert matrices(routes) == {"0.lora_A.weight", "0.lora_B.weight"}
    assert routes["2.lora_A.weight"].reason == "LoRA A of 2: one row"
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8))
    routes = trained(lora(convolution, target_modules=["0", "2"], lora_bias=True))
    assert {routes[f"0.lora_{f}.weight"].reason for f in "AB"} == {f"LoRA {f} of 0: 4-D" for f in "AB"}
    assert routes["2.lora_B.bias"].reason == "LoRA B of 2: 1-D" and len(matrices(routes)) == 2
    blocks = peft.tuners.lora.BdLoraConfig(nblocks=2, target_modules_bd_a=["q_proj"], target_modules_bd_b=[])
    assert causes(trained(lora(**Q, use_bdlora=blocks))) == {"not a plain linear"}, "one of A and B is blocks"


@pytest.mark.parametrize("first", ["default", "emb"])
def test_modules_to_save_are_routed_as_their_originals(first: str) -> None:
    """`modules_to_save` of every adapter are routed as what they are copies of."""
    made = peft.LoraConfig(**{**COPIED, **Q})
    model = wrapped(made, first)
    model.add_adapter("second", made)
    for active in (first, "second"):
        model.set_adapter(active)
        routes = trained(model, active)
        copies = {name: r.reason for name, r in routes.items() if "modules_to_save" in name}
        own = {"model.embed_tokens": "embedding", "model.layers.0.mlp.up_proj": PLAIN, "lm_head": NAMED("lm_head")}
        assert copies == {f"{name}.modules_to_save.weight": reason for name, reason in own.items()}


def test_output_heads_of_peft_models_are_found() -> None:
    """Output heads are found where a classifier is copied, and where width tells."""
    made = peft.LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS")
    model = wrapped(made, model=hf.RobertaForSequenceClassification(hf.RobertaConfig(**TINY)))
    model.add_adapter("second", made)
    routes = trained(model)
    assert routes["classifier.modules_to_save.dense.weight"].kind == "matrix"
    assert routes["classifier.modules_to_save.out_proj.weight"].reason == NAMED("classifier")
    several = module(tokens=nn.Embedding(50, 16), ways=nn.ModuleList(nn.Linear(16, 50) for _ in "ab"))
    routes = trained(lora(several, target_modules=["ways.0", "ways.1"]))
    assert len(routes) == 4 and causes(routes) == {WIDE}


def test_peft_models_keep_their_routes_when_wrapped() -> None:
    """PEFT models keep their routes under further wrappers, and inside a model."""
    plain, model, inside = (lora(adapter="emb", target_modules=["q_proj", "lm_head"]) for _ in range(3))
    inner = model.base_model.model
    inner.lm_head, inner.model.layers[0] = checkpoint_wrapper(inner.lm_head), checkpoint_wrapper(inner.model.layers[0])
    injected = peft.inject_adapter_in_model(plain.peft_config["emb"], llama())
    for other in (model, module(policy=inside), injected):
        assert [(r.kind, r.reason) for r in routed(other)] == [(r.kind, r.reason) for r in routed(plain)]


def test_globs_overrule_what_peft_layers_say() -> None:
    """Quantized weights are not looked at. Quantized ones have different shapes, and some have no weight at all."""
    model = lora(target_modules=["q_proj", "lm_head"])
    routes = trained(model, include=["*.lm_head.lora_*"], exclude=["*.q_proj.*"])
    assert matrices(routes) == {"lm_head.lora_A.weight", "lm_head.lora_B.weight"}
    expected = trained(model)
    for layer in (model.base_model.model.lm_head, model.base_model.model.model.layers[0].self_attn.q_proj):
        layer.base_layer.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    assert trained(model) == expected


# Which matrices are in LoRA's factors
def blocks_of(model: nn.Module) -> dict[str, list[Block]]:
    routes = routed(model)
    return {name.removeprefix("base_model.model."): list(d.blocks) for name, d in divide(model, routes).items()}


def test_lora_b_of_a_fused_weight_has_its_q_k_and_v() -> None:
    gpt = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))
    found = blocks_of(lora(gpt, target_modules=["c_attn"], fan_in_fan_out=True))
    a, b = (found[f"transformer.h.0.attn.c_attn.lora_{factor}.default.weight"] for factor in "AB")
    assert [block.shape for block in a] == [(4, 32)]
    expected = [(name, Stripes(32 * number, 32), Stripes(0, 4)) for number, name in enumerate("qkv")]
    assert [(block.name, block.rows, block.columns) for block in b] == expected


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])  # which store experts as (outputs, inputs), and transposed
def test_lora_of_stacked_experts_has_matrices_for_each_expert(kind: str) -> None:
    def of_experts(r: int) -> nn.Module:
        made = getattr(hf, f"{kind}Config")(**TINY, num_key_value_heads=2, head_dim=8, num_local_experts=3)
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return lora(getattr(hf, f"{kind}ForCausalLM")(made), r=r, target_modules=[], target_parameters=targets)

    rank_1 = trained(of_experts(1))
    assert not matrices(rank_1) and {r.reason.rpartition(": ")[2] for r in rank_1.values()} == {"rank 1"}
    model = of_experts(4)
    found = blocks_of(model)
    for prefix, layer in model.named_modules():
        if not isinstance(layer, peft.tuners.lora.layer.ParamWrapper):
            continue
        prefix, gated = prefix.removeprefix("base_model.model."), layer.parameter_name == "gate_up_proj"
        a, b = (found[f"{prefix}.lora_{factor}.default.weight"] for factor in "AB")
        assert [block.name for block in a] == ["expert0", "expert1", "expert2"]
        for number in range(3):
            rows = changed_by(layer, number, "lora_A").any(1)
            assert rows.nonzero().flatten().tolist() == indices(a[number].rows)
            columns = changed_by(layer, number, "lora_B").any(0).nonzero().flatten().tolist()
            of_expert = [block for block in b if block.name.startswith(f"expert{number}")]
            assert all(indices(block.columns) == columns for block in of_expert)
            assert [block.name.partition(".")[2] for block in of_expert] == (["gate", "up"] if gated else [""])
            assert sum(block.numel for block in of_expert) == 4 * len(layer.lora_B.default.weight)


def changed_by(layer: Any, expert: int, factor: str) -> Tensor:
    """Which elements of a factor the change of one expert depends on."""
    layer.zero_grad()
    nn.init.ones_(layer.lora_A.default.weight)
    nn.init.ones_(layer.lora_B.default.weight)
    layer.get_delta_weight("default")[expert].sum().backward()
    return getattr(layer, factor).default.weight.grad != 0


# PEFT on engines
def told(routes: list[Route]) -> list[tuple[str, str]]:
    return [(r.kind, r.kind if r.kind == "frozen" else r.reason.partition(": ")[0]) for r in routes]


@on_ranks(2)
def test_lora_on_sharded_parameters_is_routed_as_on_whole_ones() -> None:
    """Of a linear, of a stack of experts, of the head and the embedding; a linear is trained as a copy."""
    targets = {"target_modules": ["down", "lm_head"], "target_parameters": ["experts.up"]}
    model = lora(FusedLM(), modules_to_save=["mix"], **targets)
    plain = told(routed(model))
    wanted = [param for param in model.parameters() if param.requires_grad]
    with engine_for(config(3, rows=8), model, model_parameters=wanted) as engine:
        train(engine, 1)
        assert told(engine.basic_optimizer._binding.grouping.routes) == plain
    model = lora(adapter="emb", target_modules=["q_proj", "lm_head", "embed_tokens"])
    plain = told(routed(model))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert told(fsdp2.LayerWiseOptimizer(model, lr=0.02, report=False)._grouping.routes) == plain
