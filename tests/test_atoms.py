"""Which matrices are in a parameter: as the modelling code uses them, or as it was set by name.

What a family's code does is followed with real numbers: every output of a fused linear is given its own. In `make test`
one family stands for those that are laid out by the same function; the others, and the proof that none is left out,
are `full`, because importing them all takes a minute.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import TorchFunctionMode

from lwopt_backend.atom_settings import AtomSettings
from lwopt_backend.atoms import Divided, divide
from lwopt_backend.chosen import settings_of
from lwopt_backend.config import HostConfig
from lwopt_backend.fused_families import TABLE
from lwopt_backend.grouping import group_parameters
from lwopt_backend.model_shapes.by_name import route_by_name
from lwopt_backend.model_shapes.training import Training
from lwopt_backend.model_shapes.types import Stored
from lwopt_backend.plan.blocks import Block, Stripes
from lwopt_backend.plan.mesh import Sharding
from lwopt_backend.routing import Route, route
from lwopt_backend.runtime.views import local_views
from tests.fused import FusedGroupedExperts

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
GPT = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50}
GROUPED = {**TINY, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MIXED = {**GROUPED, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}


def causal(config: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def lm(family: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: causal(getattr(hf, f"{family}Config")(**options))


def bare(family: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, f"{family}Model")(getattr(hf, f"{family}Config")(**options))


def common(table: Mapping[str, Any], *names: str) -> list[Any]:
    """The keys of a table of families; those that are not named are `full`."""
    return [pytest.param(key, marks=[] if key in names else pytest.mark.full) for key in table]


def divided_of(model: nn.Module, atoms: Mapping[str, Any] | None = None) -> dict[str, Divided]:
    return divide(model, route(model, stacks=True), AtomSettings.parse(atoms or {}))


def fused_of(model: nn.Module) -> dict[str, tuple[Block, ...]]:
    """The parameters of which a slice has several blocks."""
    found = divided_of(model)
    return {name: d.blocks for name, d in found.items() if len(d.blocks) > d.blocks[0].grid.slices}


def indices(stripes: Stripes) -> list[int]:
    return [index for start, stop in stripes.runs() for index in range(start, stop)]


def outputs_of(block: Block) -> set[float]:
    """The outputs that a block of a fused weight stands for: its rows, or its columns where these are divided."""
    columns = block.columns.size < block.grid.columns
    return set(map(float, indices(block.columns if columns else block.rows)))


def named(blocks: Sequence[Block]) -> dict[str, set[float]]:
    return {block.name: outputs_of(block) for block in blocks}


# Following numbers


@dataclass
class Watch(TorchFunctionMode):
    """Every torch function that is called, with the sets of numbers in its tensors and in what it returns."""

    calls: list[tuple[str, list[set[float]], list[set[float]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in WATCHED:
            given = [numbers(each) for each in [*args, *(kwargs or {}).values()] if is_number(each)]
            returned = result if isinstance(result, (tuple, list)) else [result]
            self.calls.append((func.__name__, given, [numbers(each) for each in returned if is_number(each)]))
        return result

    def given(self, *names: str) -> list[list[set[float]]]:
        return [given for name, given, _ in self.calls if name in names]

    def returned(self, *names: str) -> list[list[set[float]]]:
        return [returned for name, _, returned in self.calls if name in names]


PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "scaled_dot_product_attention")
CUTS = ("split", "chunk", "unbind")
ACTIVATIONS = ("silu", "gelu", "relu")
WATCHED = {*PRODUCTS, *CUTS, *ACTIVATIONS, "clamp"}


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def numbers(value: Tensor) -> set[float]:
    return set(value.detach().flatten().tolist())


def watched(model: nn.Module, weight: str, run: Callable[[], Any]) -> Watch:
    """``run``, where every output of the linear of ``weight`` is its own number."""
    linear = model.get_submodule(weight.rpartition(".")[0])

    def number(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return torch.arange(output.shape[-1], dtype=output.dtype).expand_as(output)

    handle, watch = linear.register_forward_hook(number), Watch()
    with watch, torch.no_grad():
        run()
    handle.remove()
    return watch


def check_attention(parts: Mapping[str, set[float]], watch: Watch) -> None:
    """Queries are multiplied with keys, and something with values; as many numbers are in each as there are outputs."""
    products = watch.given(*PRODUCTS)
    pairs = [(a, b) for given in products for n, a in enumerate(given) for b in given[n + 1 :]]
    assert "q" not in parts or (parts["q"], parts["k"]) in pairs
    assert any(parts["v"] == b for _, b in pairs)
    if "q" not in parts:
        assert any(parts["k"] == b for _, b in pairs) and parts["k"] != parts["v"]


# Attention in whole models


def one_token() -> dict[str, Tensor]:
    """At position 0, where a rotation leaves queries and keys as they are."""
    return {"input_ids": torch.tensor([[3]])}


def encoded() -> dict[str, Tensor]:
    return {**one_token(), "encoder_hidden_states": torch.rand(1, 2, 32)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(1, 3, 16, 16)}


BARK = {"num_layers": 1, "num_heads": 4, "input_vocab_size": 50, "output_vocab_size": 50, "block_size": 8}
FALCON = {**TINY, "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True}
MODERN = {**TINY, "intermediate_size": 40, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, int]]] = {
    family: (make, inputs, {"q": 32, "k": keys, "v": keys})
    for family, make, inputs, keys in [
        ("gpt2", lm("GPT2", **GPT), one_token, 32),
        ("imagegpt", bare("ImageGPT", **GPT), one_token, 32),
        ("openai", lm("OpenAIGPT", **GPT), one_token, 32),
        ("big code, one kv head", lm("GPTBigCode", **GPT), one_token, 8),
        ("big code", lm("GPTBigCode", **GPT, multi_query=False), one_token, 32),
        ("neox", lm("GPTNeoX", **TINY, intermediate_size=64), one_token, 32),
        ("neox japanese", lm("GPTNeoXJapanese", **TINY, intermediate_multiple_size=2), one_token, 32),
        ("bloom", lm("Bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=50), one_token, 32),
        ("persimmon", lm("Persimmon", **TINY, intermediate_size=64, qk_layernorm=False), one_token, 32),
        ("falcon, one kv head", lm("Falcon", **TINY), one_token, 8),
        ("falcon by head", lm("Falcon", **TINY, multi_query=False, alibi=True), one_token, 32),
        ("falcon by group", lm("Falcon", **FALCON), one_token, 8),
        ("codegen", lm("CodeGen", **{**GPT, "n_head": 8}, rotary_dim=4, n_positions=16), one_token, 32),
        ("phi3", lm("Phi3", **GROUPED), one_token, 16),
        ("mpt", lm("Mpt", d_model=32, n_heads=4, n_layers=1, vocab_size=50), one_token, 32),
        ("modernbert", bare("ModernBert", **MODERN), one_token, 32),
        ("bark", bare("BarkSemantic", hidden_size=32, **BARK), one_token, 32),
        ("blip", bare("BlipVision", **VISION, intermediate_size=48), pixels, 32),
        ("blip 2", bare("Blip2Vision", **VISION, intermediate_size=48), pixels, 32),
    ]
}
MODELS["gpt2 cross"] = (lm("GPT2", **GPT, add_cross_attention=True), encoded, {"k": 32, "v": 32})
ONE_OF_EACH_KIND = (
    *("gpt2", "gpt2 cross", "big code", "big code, one kv head", "neox", "codegen", "phi3", "blip"),
    *("falcon, one kv head", "falcon by head", "falcon by group"),
)


@pytest.mark.parametrize("family", common(MODELS, *ONE_OF_EACH_KIND))
def test_q_k_and_v_are_what_attention_multiplies(family: str) -> None:
    make, inputs, sizes = MODELS[family]
    model = make().eval()
    fused = {name: blocks for name, blocks in fused_of(model).items() if "v" in named(blocks)}
    assert any({n: len(o) for n, o in named(blocks).items()} == sizes for blocks in fused.values()), fused
    for name, blocks in fused.items():
        check_attention(named(blocks), watched(model, name, lambda: model(**inputs())))


# Latent attention: the parts are cut from what a linear gives

RANKS = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
LATENT = {**TINY, **RANKS, "num_key_value_heads": 4, "intermediate_size": 48}
LATENT.update(pad_token_id=0, bos_token_id=1, eos_token_id=2)
MIXTURE = {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LONGCAT = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "moe_topk": 2, "num_layers": 1}
LONGCAT.update(num_hidden_layers=2, head_dim=4, zero_expert_num=2)
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("AXK1", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa"), MIXTURE),
    "KimiLinear": {**LATENT, "layer_types": ["full_attention"]},
    "LongcatFlash": {**LATENT, **LONGCAT},
    "MiniCPM3": LATENT,
    "Youtu": LATENT,
}


def latent(family: str, queries: int | None = 8) -> nn.Module:
    if not hasattr(hf, f"{family}Config"):
        pytest.skip(f"this version of transformers does not have {family}")
    return lm(family, **LATENT_FAMILIES[family], q_lora_rank=queries)()


@pytest.mark.parametrize(
    ("family", "queries"),
    [
        ("DeepseekV3", 8),
        ("DeepseekV3", None),
        ("KimiLinear", 8),
        *(pytest.param(f, 8, marks=pytest.mark.full) for f in LATENT_FAMILIES if f not in ("DeepseekV3", "KimiLinear")),
        pytest.param("DeepseekV2", None, marks=pytest.mark.full),
    ],
)
def test_the_parts_of_latent_attention_are_what_it_cuts(family: str, queries: int | None) -> None:
    model = latent(family, queries).eval()
    fused = {name: blocks for name, blocks in fused_of(model).items() if ".experts." not in name}
    sizes = {name.split(".")[-2]: {n: len(o) for n, o in named(blocks).items()} for name, blocks in fused.items()}
    rotated = {} if family == "KimiLinear" else {"q_b_proj" if queries else "q_proj": {"q_nope": 24, "q_rope": 16}}
    parts = {"kv_a_proj_with_mqa": {"kv": 8, "k_rope": 4}, "kv_b_proj": {"k_nope": 24, "v": 40}}
    assert sizes == {**rotated, **parts}
    for name, blocks in fused.items():
        cuts = watched(model, name, lambda: model(**one_token())).returned(*WATCHED)
        assert list(named(blocks).values()) in cuts, name


# Modules of their own, which come with much around them in a model


class Around(nn.Module):
    """A module in a model, and what it is called with."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner, self.args, self.kwargs = module, args, kwargs
        if hasattr(module, "scale"):
            module.scale = 1.0  # which some multiply queries with before they are multiplied with keys

    def forward(self) -> Any:
        return self.inner(*self.args, **self.kwargs)


def family(name: str) -> Any:
    """Its modelling code; a test of a family that this version of transformers does not have yet is skipped."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def configured(name: str, kind: str, **options: Any) -> Any:
    module = pytest.importorskip(f"transformers.models.{name}.configuration_{name}")
    config = getattr(module, kind)(**options)
    config._attn_implementation = "eager"
    return config


def made(name: str, kind: str, config: Any, *more: Any, shape: Sequence[int] = (1, 5, 32), **options: Any) -> Around:
    config = configured(name, config, **options) if isinstance(config, str) else config
    return Around(getattr(family(name), kind)(config, *more), torch.rand(tuple(shape)))


def rotated(size: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of no rotation at all."""
    return torch.ones(*shape, size), torch.zeros(*shape, size)


def packed(name: str, kind: str, config: str, **options: Any) -> Around:
    """Attention over packed images, as of Qwen's vision towers."""
    found = made(name, kind, config, shape=(4, 32), **options)
    found.kwargs = {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32), "position_embeddings": rotated(8, 4)}
    return found


def images(name: str, kind: str, config: str, *more: Any, **options: Any) -> Around:
    """Attention over windows of images, as of SAM."""
    return made(name, kind, config, *more, shape=(1, 4, 4, 32), **{**VISION, "image_size": 32}, **options)


def with_positions(name: str, kind: str, config: Any) -> Around:
    """Attention that is given its rotation."""
    found = made(name, kind, config, 0, shape=(1, 1, 32))
    found.kwargs = {"position_embeddings": rotated(8, 1, 1), "attention_mask": None}
    return found


def dbrx_config() -> Any:
    """What the attention reads of DBRX's configuration, which version 5.23 cannot make itself."""
    attention = hf.PretrainedConfig(attn_pdrop=0.0, clip_qkv=1e4, kv_n_heads=2, rope_theta=1e4)
    config = hf.PretrainedConfig(d_model=32, n_heads=4, max_seq_len=8)
    config.attn_config, config._attn_implementation = attention, "eager"
    return config


PACKED = [
    ("qwen2_5_vl", "Qwen2_5_VLVisionAttention", "Qwen2_5_VLVisionConfig"),
    ("qwen3_vl", "Qwen3VLVisionAttention", "Qwen3VLVisionConfig"),
    ("qwen3_vl_moe", "Qwen3VLMoeVisionAttention", "Qwen3VLMoeVisionConfig"),
    ("qwen3_5", "Qwen3_5VisionAttention", "Qwen3_5VisionConfig"),
    ("qwen3_5_moe", "Qwen3_5MoeVisionAttention", "Qwen3_5MoeVisionConfig"),
    ("qwen3_omni_moe", "Qwen3OmniMoeVisionAttention", "Qwen3OmniMoeVisionEncoderConfig"),
    ("glm4v", "Glm4vVisionAttention", "Glm4vVisionConfig"),
    ("glm4v_moe", "Glm4vMoeVisionAttention", "Glm4vMoeVisionConfig"),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionAttention", "Ernie4_5_VLMoeVisionConfig"),
]
HEADS_OF_32 = {"hidden_size": 32, "num_heads": 4}
FLAT = {"use_rel_pos": False}
FLORENCE = {"embed_dim": [32], "num_heads": [4], "num_groups": [4], "window_size": 2}
VIDEO = ("instructblipvideo", "InstructBlipVideoAttention", "InstructBlipVideoVisionConfig")
DECISION = ("decision_transformer", "DecisionTransformerGPT2Attention", "DecisionTransformerConfig")
MODULES: dict[str, Callable[[], Around]] = {
    **{name: functools.partial(packed, name, *rest, **HEADS_OF_32) for name, *rest in PACKED},
    "qwen2 vl": lambda: packed("qwen2_vl", "VisionAttention", "Qwen2VLVisionConfig", embed_dim=32, num_heads=4),
    "exaone": lambda: packed(
        "exaone4_5", "Exaone4_5_VisionAttention", "Exaone4_5_VisionConfig", **HEADS_OF_32, num_key_value_heads=2
    ),
    "instructblip": lambda: made("instructblip", "InstructBlipAttention", "InstructBlipVisionConfig", **VISION),
    "instructblip video": lambda: made(*VIDEO, **VISION),
    "mgp": lambda: made("mgp_str", "MgpstrAttention", "MgpstrConfig", hidden_size=32, num_attention_heads=4),
    "decision transformer": lambda: made(*DECISION, hidden_size=32, n_layer=1, n_head=4),
    "sam": lambda: images("sam", "SamVisionAttention", "SamVisionConfig", 0, **FLAT),
    "sam hq": lambda: images("sam_hq", "SamHQVisionAttention", "SamHQVisionConfig", 0, **FLAT),
    "got": lambda: images("got_ocr2", "GotOcr2VisionAttention", "GotOcr2VisionConfig", 0, **FLAT),
    "seggpt": lambda: images("seggpt", "SegGptAttention", "SegGptConfig", use_relative_position_embeddings=False),
    "vitdet": lambda: images("vitdet", "VitDetAttention", "VitDetConfig", (4, 4)),
    "hiera": lambda: Around(family("hiera").HieraMaskUnitAttention(32, 64, 4), torch.rand(1, 4, 32)),
    "sam 2": lambda: made("sam2", "Sam2MultiScaleAttention", "Sam2HieraDetConfig", 32, 64, 4, shape=(1, 4, 4, 32)),
    "florence, channels": lambda: made(
        "florence2", "Florence2VisionChannelAttention", "Florence2VisionConfig", 0, **FLORENCE
    ),
    "florence, windows": lambda: made(
        "florence2", "Florence2VisionWindowAttention", "Florence2VisionConfig", 0, shape=(1, 4, 4, 32), **FLORENCE
    ),
    "phi4": lambda: with_positions(
        "phi4_multimodal", "Phi4MultimodalAttention", configured("phi4_multimodal", "Phi4MultimodalConfig", **GROUPED)
    ),
    "dbrx": lambda: with_positions("dbrx", "DbrxAttention", dbrx_config()),
}


@pytest.mark.parametrize("module", common(MODULES, "qwen3_vl", "exaone"))
def test_q_k_and_v_of_a_module_are_what_it_multiplies(module: str) -> None:
    model = MODULES[module]().eval()
    ((name, blocks),) = fused_of(model).items()
    check_attention(named(blocks), watched(model, name, model))


@pytest.mark.parametrize("bias_k", [False, True])
def test_torch_s_attention_has_q_k_and_v_in_one_weight(bias_k: bool) -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, add_bias_kv=bias_k))
    blocks = divided_of(model)["0.in_proj_weight"].blocks
    assert named(blocks) == {name: set(map(float, range(8 * n, 8 * n + 8))) for n, name in enumerate(("q", "k", "v"))}
    assert not fused_of(nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4, vdim=6)))


def test_lightning_attention_of_minimax_has_q_k_and_v_head_by_head() -> None:
    config = hf.MiniMaxConfig(**GROUPED, num_local_experts=4, layer_types=["linear_attention"])
    attention = family("minimax").MiniMaxLightningAttention(config, 0)
    attention.act_fn = nn.Identity()
    model = Around(attention, torch.rand(1, 4, 32), rotated(8, 1, 4), None).eval()
    ((name, blocks),) = fused_of(model).items()
    assert list(named(blocks)) == ["q", "k", "v"]
    assert list(named(blocks).values()) in watched(model, name, model).returned("split")


def test_delta_net_has_q_k_v_and_z_in_groups() -> None:
    net = family("qwen3_next").Qwen3NextGatedDeltaNet(hf.Qwen3NextConfig(**MIXED, **DELTA, **EXPERTS), 0)
    (blocks,) = fused_of(nn.Sequential(net)).values()
    numbered = torch.arange(80.0).view(1, 1, 80)
    found = net.fix_query_key_value_ordering(numbered, torch.zeros(1, 1, 8))[:4]
    assert named(blocks) == {name: numbers(part) for name, part in zip("qkvz", found)}


@pytest.mark.parametrize("kind", common({"qwen3_5.Qwen3_5": 0, "qwen3_5_moe.Qwen3_5Moe": 0}, "qwen3_5.Qwen3_5"))
def test_delta_net_has_q_k_and_v_one_after_the_other(kind: str) -> None:
    name, prefix = kind.split(".")
    config = configured(name, f"{prefix}TextConfig", **MIXED, **DELTA)
    net = getattr(family(name), f"{prefix}GatedDeltaNet")(config, 0)
    (blocks,) = fused_of(nn.Sequential(net)).values()
    found = torch.arange(56.0).split([net.key_dim, net.key_dim, net.value_dim])
    assert named(blocks) == {name: numbers(part) for name, part in zip("qkv", found)}


GATED_QUERIES = {
    "qwen3_next.Qwen3Next": "Config",
    "qwen3_5.Qwen3_5": "TextConfig",
    "qwen3_5_moe.Qwen3_5Moe": "TextConfig",
}


@pytest.mark.parametrize("kind", common(GATED_QUERIES, "qwen3_next.Qwen3Next"))
def test_queries_with_a_gate_have_both_in_every_head(kind: str) -> None:
    name, prefix = kind.split(".")
    config = configured(name, prefix + GATED_QUERIES[kind], **MIXED, **DELTA)
    attention = getattr(family(name), f"{prefix}Attention")(config, 1)
    attention.q_norm = nn.Identity()
    given = {"position_embeddings": rotated(8, 1, 1), "attention_mask": None}
    model = Around(attention, torch.rand(1, 1, 32), **given).eval()
    ((weight, blocks),) = fused_of(model).items()
    parts, watch = named(blocks), watched(model, weight, model)
    assert any(parts["q"] in given for given in watch.given(*PRODUCTS))
    assert [parts["q"], parts["gate"]] in watch.returned("chunk")


# Gate and up: what goes through the activation, and what it is multiplied with

ZAMBA = {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4}
ZAMBA.update(attention_head_dim=16, intermediate_size=48, mamba_d_state=8, n_mamba_heads=2, mamba_headdim=32)
ZAMBA.update(mamba_ngroups=1, use_mem_rope=True, num_mem_blocks=1, hybrid_layer_ids=[1])


def zamba() -> nn.Module:
    mlp = family("zamba2").Zamba2MLP(hf.Zamba2Config(**{**TINY, **ZAMBA}), num_fwd_mem_blocks=1, block_id=0)
    for adapter in mlp.gate_up_proj_adapter_list.parameters():
        nn.init.zeros_(adapter)
    return Around(mlp, torch.rand(1, 2, 32), 1)


HIDDEN = {"hidden_size": 32, "intermediate_size": 48}
SHARED = {"hidden_size": 32, "shared_intermediate_size": 48, "num_attention_heads": 4, "mamba_n_heads": 8}
GATED: dict[str, Callable[[], nn.Module]] = {
    name: functools.partial(made, *arguments, **options)
    for name, options, *arguments in [
        ("phi3", GROUPED, "phi3", "Phi3MLP", "Phi3Config"),
        ("phi4", GROUPED, "phi4_multimodal", "Phi4MultimodalMLP", "Phi4MultimodalConfig"),
        ("phi4 audio", HIDDEN, "phi4_multimodal", "Phi4MultimodalAudioMLP", "Phi4MultimodalAudioConfig"),
        ("glm", GROUPED, "glm", "GlmMLP", "GlmConfig"),
        ("glm4", GROUPED, "glm4", "Glm4MLP", "Glm4Config"),
        ("glm4v", HIDDEN, "glm4v", "Glm4vTextMLP", "Glm4vTextConfig"),
        ("dia", HIDDEN, "dia", "DiaMLP", "DiaEncoderConfig"),
        ("granite hybrid", SHARED, "granitemoehybrid", "GraniteMoeHybridMLP", "GraniteMoeHybridConfig"),
        ("granite shared", SHARED, "granitemoeshared", "GraniteMoeSharedMLP", "GraniteMoeSharedConfig"),
        ("modernbert", HIDDEN, "modernbert", "ModernBertMLP", "ModernBertConfig"),
        ("modernbert decoder", HIDDEN, "modernbert_decoder", "ModernBertDecoderMLP", "ModernBertDecoderConfig"),
        ("moonshine", HIDDEN, "moonshine", "MoonshineDecoderMLP", "MoonshineConfig", "silu"),
    ]
}
GATED["zamba2"] = zamba


@pytest.mark.parametrize("family", common(GATED, "phi3", "moonshine"))
def test_the_gate_is_what_goes_through_the_activation(family: str) -> None:
    model = GATED[family]().eval()
    ((name, blocks),) = [(n, b) for n, b in fused_of(model).items() if "adapter" not in n]
    watch = watched(model, name, model)
    assert [given[0] for given in watch.given(*ACTIVATIONS)] == [named(blocks)["gate"]]
    assert list(named(blocks).values()) in watch.returned("chunk")


def numbered_experts(weight: nn.Parameter, transposed: bool) -> None:
    """Of an input whose first element is 1, output j of expert e is j + 1000 e."""
    outputs = weight.shape[2 if transposed else 1]
    codes = torch.arange(len(weight))[:, None] * 1000.0 + torch.arange(outputs)
    with torch.no_grad():
        weight.zero_()
        (weight[:, 0, :] if transposed else weight[:, :, 0]).copy_(codes)


def first_inputs(count: int, inputs: int) -> Tensor:
    return torch.eye(inputs)[:1].expand(count, -1)


def of_experts(blocks: Sequence[Block], part: str) -> set[float]:
    chosen = [block for block in blocks if block.name == f"[{block.slice}].{part}"]
    assert [block.slice for block in chosen] == list(range(4))
    return {block.slice * 1000.0 + output for block in chosen for output in outputs_of(block)}


ARIA = {**GROUPED, "moe_num_experts": 4}
STACKS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lm("Mixtral", **GROUPED, num_local_experts=4),
    "qwen3 moe": lm("Qwen3Moe", **GROUPED, **EXPERTS, moe_intermediate_size=24),
    "deepseek v3": lm("DeepseekV3", **{**MIXTURE, "first_k_dense_replace": 0}, moe_intermediate_size=24, q_lora_rank=8),
    "granite": lm("GraniteMoe", **TINY, num_key_value_heads=2, intermediate_size=24, num_local_experts=4),
    "aria": lambda: nn.ModuleDict(
        {"experts": family("aria").AriaExperts(configured("aria", "AriaTextConfig", **ARIA))}
    ),
}


@pytest.mark.parametrize("family", common(STACKS, "mixtral", "aria"))
def test_experts_have_gate_and_up_one_after_the_other(family: str) -> None:
    model = STACKS[family]().eval()
    ((name, blocks),) = [(name, blocks) for name, blocks in fused_of(model).items() if "expert" in name]
    experts = model.get_submodule(name.rpartition(".")[0])
    experts.config._experts_implementation = "eager"
    numbered_experts(experts.gate_up_proj, experts.is_transposed)
    inputs, watch = experts.gate_up_proj.shape[1 if experts.is_transposed else 2], Watch()
    with watch, torch.no_grad():
        experts(first_inputs(4, inputs), torch.arange(4)[:, None], torch.ones(4, 1))
    assert set().union(*(given[0] for given in watch.given(*ACTIVATIONS))) == of_experts(blocks, "gate")
    assert set().union(*(returned[1] for returned in watch.returned("chunk"))) == of_experts(blocks, "up")
    down = [d for name, d in divided_of(model).items() if name.endswith("down_proj") and len(d.blocks) == 4]
    assert [block.name for block in down[0].blocks] == ["[0]", "[1]", "[2]", "[3]"]


def test_experts_of_gpt_oss_have_gate_and_up_in_turn() -> None:
    model = lm("GptOss", **GROUPED, num_local_experts=4, num_experts_per_tok=2)()
    ((name, blocks),) = fused_of(model).items()
    experts, watch = model.get_submodule(name.rpartition(".")[0]), Watch()
    assert experts.gate_up_proj.shape == (4, 32, 96)
    with watch:
        experts._apply_gate(torch.arange(96.0))
    assert [given[0] for given in watch.given("clamp")] == [outputs_of(block) for block in blocks[:2]]
    assert [block.name for block in blocks] == [f"[{e}].{part}" for e in range(4) for part in ("gate", "up")]


@pytest.mark.full
def test_experts_of_jetmoe_have_gate_and_up_one_after_the_other() -> None:
    config = configured("jetmoe", "JetMoeConfig", **HIDDEN, num_local_experts=4, num_experts_per_tok=4)
    model = Around(family("jetmoe").JetMoeMoE(config), first_inputs(1, 32).view(1, 1, 32)).eval()
    ((_, blocks),) = fused_of(model).items()
    numbered_experts(model.inner.input_linear.weight, False)
    watch = Watch()
    with watch, torch.no_grad():
        model()
    assert of_experts(blocks, "gate") in [given[0] for given in watch.given(*ACTIVATIONS)]


def test_experts_of_llama_4_are_divided_where_they_are_known_to_be_stored_transposed() -> None:
    config = configured("llama4", "Llama4TextConfig", **GROUPED, num_local_experts=4)
    model = nn.ModuleDict({"experts": family("llama4").Llama4TextExperts(config)})
    routes, watch = route(model, stacks=True), Watch()
    blocks = divide(model, [replace(each, transposed=True) for each in routes])["experts.gate_up_proj"].blocks
    numbered_experts(model["experts"].gate_up_proj, True)
    with watch, torch.no_grad():
        model["experts"](first_inputs(4, 32))
    assert [given[0] for given in watch.given(*ACTIVATIONS)] == [of_experts(blocks, "gate")]
    plain = divide(model, [replace(each, transposed=False) for each in routes])["experts.gate_up_proj"]
    assert len(plain.blocks) == 4, "with rows taken for outputs nothing fits, and nothing is guessed"


@pytest.mark.full
def test_every_class_of_the_table_is_followed_here() -> None:
    models = [make() for make, *_ in MODELS.values()]
    models += [make() for makers in (MODULES, GATED) for make in makers.values()]
    models += [latent(family) for family in LATENT_FAMILIES]
    followed = {type(module) for model in models for module in model.modules()}
    ours = [kind for kind in followed if kind.__module__.startswith("transformers.models.")]
    by_themselves = {
        *("minimax.MiniMaxLightningAttention", "jetmoe.JetMoeMoE", "llama4.Llama4TextExperts"),
        *("qwen3_next.Qwen3NextAttention", "qwen3_5.Qwen3_5Attention", "qwen3_5_moe.Qwen3_5MoeAttention"),
        *("qwen3_next.Qwen3NextGatedDeltaNet", "qwen3_5.Qwen3_5GatedDeltaNet", "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet"),
    }
    assert set(TABLE) - {f"{kind.__module__.split('.')[2]}.{kind.__name__}" for kind in ours} == by_themselves


# Right, or not at all

QKV = "model.layers.0.self_attn.qkv_proj.weight"


def phi3() -> nn.Module:
    return lm("Phi3", **GROUPED)()


def test_a_class_with_a_forward_of_its_own_is_not_guessed_at() -> None:
    model = phi3()
    attention = model.model.layers[0].self_attn
    known = type(attention)
    attention.__class__ = type("FSDPPhi3Attention", (known,), {})
    assert QKV in fused_of(model), "as FSDP2 does: another class, the same forward"
    attention.__class__ = type("Phi3Attention", (known,), {"forward": lambda self, x: x})
    assert QKV not in fused_of(model)
    attention.__class__ = type("Phi3Attention", (known,), {"forward": known.forward, "__module__": known.__module__})
    assert QKV in fused_of(model)
    for copied in ("transformers_modules.phi3.modeling_phi3", "elsewhere.models.phi3.modeling_phi3"):
        attention.__class__ = type("Phi3Attention", (known,), {"forward": known.forward, "__module__": copied})
        assert QKV not in fused_of(model), "code that came with the weights, or somebody's copy"


@pytest.mark.parametrize(("key", "value"), [("head_dim", 4), ("num_key_value_heads", 3), ("num_key_value_heads", None)])
def test_sizes_that_do_not_fit_leave_a_weight_whole(key: str, value: int | None) -> None:
    model = phi3()
    attention = model.model.layers[0].self_attn
    setattr(attention, key, value)
    assert QKV not in fused_of(model)
    delattr(attention, key)
    assert QKV not in fused_of(model)


def test_sizes_must_also_fit_the_linear_that_takes_the_result() -> None:
    model = MODELS["big code, one kv head"][0]()
    attention = model.transformer.h[0].attn
    parts = named(fused_of(model)["transformer.h.0.attn.c_attn.weight"])
    assert [len(outputs) for outputs in parts.values()] == [32, 8, 8]
    attention.embed_dim, attention.kv_dim = 16, 16
    assert not fused_of(model), "16 + 16 + 16 are the 48 outputs, but 32 queries go into c_proj"


def test_experts_whose_gate_does_not_do_what_they_say_stay_whole() -> None:
    model = STACKS["mixtral"]()
    experts = model.model.layers[0].mlp.experts
    assert fused_of(model)
    for wrong in (
        lambda outputs: outputs[..., ::2] * outputs[..., 1::2],
        lambda outputs: outputs[..., :2] * torch.empty(2, device="meta"),
        lambda outputs: outputs.detach()[..., :2],
    ):
        experts._apply_gate = wrong
        assert not fused_of(model)
    del experts._apply_gate
    experts.is_concatenated = False
    assert not fused_of(model)
    experts.is_concatenated, experts.has_gate = True, False
    assert not fused_of(model)


def test_a_weight_that_two_modules_use_in_two_ways_stays_whole() -> None:
    mpt, neox = MODELS["mpt"][0](), MODELS["neox"][0]()
    neox.gpt_neox.layers[0].attention.query_key_value.weight = mpt.transformer.blocks[0].attn.Wqkv.weight
    both = nn.ModuleDict({"mpt": mpt, "neox": neox})
    assert len(fused_of(mpt)) == len(fused_of(neox)) == 1 and not fused_of(both)


def test_wrapped_modules_are_seen_through() -> None:
    model = phi3()
    plain = fused_of(model)
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = checkpoint_wrapper(attention.qkv_proj)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert fused_of(model) == plain and len(plain) == 2


def test_the_reason_tells_the_parts_and_whose_they_are() -> None:
    found = divided_of(phi3(), {"*.o_proj.weight": {"heads": 8}})
    reasons = {name.partition("layers.0.")[2]: each.reason for name, each in found.items()}
    assert reasons["self_attn.qkv_proj.weight"] == "q, k, v, as Phi3Attention has them"
    assert reasons["self_attn.o_proj.weight"] == "head0, head1, ... head7, set by atoms '*.o_proj.weight'"
    assert reasons["mlp.down_proj.weight"] == ""
    found = divided_of(STACKS["mixtral"]())
    reasons = {name.rpartition(".")[2]: each.reason for name, each in found.items() if "experts" in name}
    assert reasons == {"gate_up_proj": "4 slices of gate, up, as MixtralExperts has them", "down_proj": "4 slices"}


# torchtitan's modules, known by their attributes, and what they do with the outputs


class FusedQKVLinear(nn.Module):
    """Of every group of queries these, their key and their value."""

    def __init__(self, inputs: int = 24, heads: int = 6, kv_heads: int = 3, size: int = 4) -> None:
        super().__init__()
        self.heads_per_kv, self.head_dim, self.r_dim = heads // kv_heads, size, heads // kv_heads + 2
        self.wqkv = nn.Linear(inputs, kv_heads * self.r_dim * size, bias=False)

    def parts(self, x: Tensor) -> dict[str, Tensor]:
        grouped = self.wqkv(x).unflatten(-1, (-1, self.r_dim, self.head_dim))
        return dict(zip("qkv", grouped.split([self.heads_per_kv, 1, 1], dim=-2)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.parts(x)


class Attention(nn.Module):
    """Latent attention, with a compressed query or without."""

    def __init__(self, queries: int = 0, heads: int = 3) -> None:
        super().__init__()
        self.n_heads, self.q_lora_rank, self.kv_lora_rank = heads, queries, 8
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = 6, 4, 10
        if queries:
            self.wq_a, self.wq_b = nn.Linear(24, queries, bias=False), nn.Linear(queries, heads * 10, bias=False)
        else:
            self.wq = nn.Linear(24, heads * 10, bias=False)
        self.wkv_a, self.wkv_b = nn.Linear(24, 8 + 4, bias=False), nn.Linear(8, heads * 16, bias=False)
        self.wo = nn.Linear(heads * 10, 24, bias=False)

    def parts(self, x: Tensor) -> dict[str, Tensor]:
        query = self.wq_b(self.wq_a(x)) if self.q_lora_rank else self.wq(x)
        q_nope, q_rope = query.unflatten(-1, (-1, 10)).split([6, 4], -1)
        kv, k_rope = self.wkv_a(x).split([8, 4], -1)
        k_nope, v = self.wkv_b(kv).unflatten(-1, (-1, 16)).split([6, 10], -1)
        return {"q_nope": q_nope, "q_rope": q_rope, "kv": kv, "k_rope": k_rope, "k_nope": k_nope, "v": v}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.parts(x)


class GptOssGroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp1_weight_EGD = nn.Parameter(torch.randn(4, 10, 6))
        self.mlp1_bias_EG = nn.Parameter(torch.randn(4, 10))
        self.mlp2_weight_EDF = nn.Parameter(torch.randn(4, 6, 5))


LATENT_PARTS = {"wkv_a": ["kv", "k_rope"], "wkv_b": ["k_nope", "v"]}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        *((FusedQKVLinear(heads=6, kv_heads=heads), {"wqkv": ["q", "k", "v"]}) for heads in (3, 6, 1)),
        (Attention(), {"wq": ["q_nope", "q_rope"], **LATENT_PARTS}),
        (Attention(queries=8), {"wq_b": ["q_nope", "q_rope"], **LATENT_PARTS}),
    ],
)
def test_parts_of_torchtitans_weights_are_what_its_modules_cut(module: Any, expected: dict[str, list[str]]) -> None:
    """The rows that have a gradient are those that a part depends on."""
    fused, x = fused_of(nn.ModuleDict({"m": module})), torch.randn(2, 24)
    assert {name.split(".")[1]: list(named(blocks)) for name, blocks in fused.items()} == expected
    for name, blocks in fused.items():
        for part, outputs in named(blocks).items():
            module.zero_grad()
            module.parts(x)[part].square().sum().backward()
            used = module.get_parameter(name.removeprefix("m.")).grad.abs().sum(1).nonzero()
            assert outputs == {float(row) for row in used}, part


def test_experts_of_torchtitans_gpt_oss_have_gate_and_up_in_turn() -> None:
    ((name, blocks),) = fused_of(nn.ModuleDict({"inner_experts": GptOssGroupedExperts()})).items()
    assert name == "inner_experts.mlp1_weight_EGD"
    assert [outputs_of(block) for block in blocks[:2]] == [numbers(torch.arange(s, 10.0, 2)) for s in (0, 1)]
    assert len(of_experts(blocks, "gate")) == 20


def routes_of(model: nn.Module, **options: object) -> dict[str, Route]:
    rules, config = settings_of(HostConfig, options, "test")
    found = group_parameters(model, [{"params": list(model.parameters())}], rules, config, stacks=True)
    return {route.name: route for route in found.routes}


def test_the_table_says_what_was_split_into_what_or_why_not() -> None:
    reasons = {
        name: r.reason for name, r in routes_of(nn.ModuleDict({"m": FusedQKVLinear(), "a": Attention()})).items()
    }
    assert reasons["m.wqkv.weight"] == "2-D weight: q, k, v, as FusedQKVLinear has them"
    assert reasons["a.wq.weight"] == "2-D weight: q_nope, q_rope, as Attention has them"
    assert reasons["a.wkv_b.weight"] == "2-D weight: k_nope, v, as Attention has them"
    assert reasons["a.wo.weight"] == "2-D weight"
    whole = "2-D weight: whole, as the sizes that {} has for its parts do not add up"
    for key, value in (("head_dim", 7), ("r_dim", 5), ("heads_per_kv", 3)):
        module: nn.Module = FusedQKVLinear()
        setattr(module, key, value)
        found = routes_of(nn.ModuleDict({"m": module}))["m.wqkv.weight"]
        assert (found.kind, found.reason) == ("matrix", whole.format("FusedQKVLinear"))
    module = Attention()
    module.v_head_dim = 9
    routes = routes_of(nn.ModuleDict({"m": module}))
    assert routes["m.wq.weight"].reason == routes["m.wkv_b.weight"].reason == whole.format("Attention")
    assert routes["m.wkv_a.weight"].reason == "2-D weight: kv, k_rope, as Attention has them"
    routes = routes_of(nn.ModuleDict({"m": FusedQKVLinear(heads=1, kv_heads=1, size=1)}))
    assert routes["m.wqkv.weight"].reason == "2-D weight: whole, as a part of it that FusedQKVLinear has is one row"


class FusedSwiGLU(nn.Module):
    """torchtitan's: as its experts have it, in one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.w13, self.w2 = nn.Parameter(torch.randn(6, 2, 8)), nn.Linear(6, 8, bias=False)


def side_by_side() -> nn.Module:
    return nn.ModuleDict({"moe": FusedGroupedExperts(3, 6), "shared_experts": FusedSwiGLU(), "first": nn.Linear(8, 8)})


def test_gate_and_up_that_lie_side_by_side_are_two_matrices_of_each_expert() -> None:
    """(experts, outputs, 2, inputs), with torchtitan's option ``fused_swiglu``; by modules as by names alone."""
    model = side_by_side()
    routes, found = routes_of(model), divided_of(model)
    assert routes["moe.w13"].reason == "3 stacked experts: 3 slices of gate, up, side by side"
    assert routes["shared_experts.w13"].reason == "3-D weight: gate, up, side by side"
    stored = [Stored(name, tuple(param.shape)) for name, param in model.named_parameters()]
    renamed = [replace(tensor, name=tensor.name.replace("moe.", "experts.")) for tensor in stored]
    by_name, by_names_divided = Training().of(route_by_name(renamed, (), ()))
    assert [r.reason for r in by_name if r.name.endswith("w13")] == ["3 stacked experts", "3-D weight"]
    for name, known in (("moe.w13", "experts.w13"), ("shared_experts.w13", "shared_experts.w13")):
        assert found[name].blocks == by_names_divided[known].blocks
        param = model.get_parameter(name)
        numbered = torch.arange(param.numel()).view(param.shape)
        for block in found[name].blocks:
            matrix = numbered.view(-1, 6, 2, param.shape[-1])[block.slice, :, int(block.name.endswith("up"))]
            assert block.shape == tuple(matrix.shape)
            assert torch.equal(torch.tensor([block.flat(i) for i in range(block.numel)]), matrix.flatten())
            check_boxes(block, param, numbered, matrix)


def check_boxes(block: Block, param: Tensor, numbered: Tensor, matrix: Tensor) -> None:
    """Ranks that hold a part of the outputs, or of the experts, have views of the block's part there."""
    outputs = param.ndim - 3
    for dims, mesh in (((outputs,), (4,)), ((0, outputs), (2, 2))):
        sharding = Sharding(tuple(param.shape), mesh, dims, (False,) * len(dims), block)
        seen = []
        for coordinate in torch.cartesian_prod(*map(torch.arange, mesh)).view(-1, len(mesh)).tolist():
            box = sharding.box(tuple(coordinate))
            local = numbered[tuple(slice(begin, begin + size) for begin, size in box)].contiguous()
            seen += [view.flatten() for view in local_views(local, block, tuple(param.shape), box)]
        assert torch.equal(torch.cat(seen).sort().values, matrix.flatten().sort().values)


@pytest.mark.parametrize(
    ("atoms", "shapes"),
    [("whole", [(6, 48)] * 3), ({"heads": 2}, [(3, 48)] * 6), ("stack", [(2, 24)] * 18), ("flatten", [(3, 288)])],
    ids=str,
)
def test_atoms_say_what_is_in_a_weight_with_gate_and_up_side_by_side(atoms: Any, shapes: list[tuple[int, int]]) -> None:
    found = divided_of(side_by_side(), {"moe.w13": atoms})["moe.w13"]
    assert [block.shape for block in found.blocks] == shapes


# Settings


def linears(**shapes: tuple[int, int]) -> nn.Module:
    """Linears with so many outputs and inputs, by name."""
    return nn.ModuleDict({name: nn.Linear(inputs, outputs, bias=True) for name, (outputs, inputs) in shapes.items()})


def test_settings_divide_outputs_by_name() -> None:
    settings = {
        "a.*": {"qkv": [8, 2, 2]},
        "b.weight": {"qkv": [2, 1, 1], "groups": 3},
        "c.*": {"heads": 3},
        "d.*": {"split_sizes": [3, 1], "groups": 3},
        "[de].weight": {"gate_up": "interleaved"},
        "f.weight": {"gate_up": "halves"},
    }
    found = divided_of(linears(**dict.fromkeys("abcdef", (12, 4))), settings)
    parts = {name[0]: {block.name: sorted(outputs_of(block)) for block in each.blocks} for name, each in found.items()}
    assert parts["a"] == {"q": list(range(8)), "k": [8, 9], "v": [10, 11]}
    assert parts["b"] == {"q": [0, 1, 4, 5, 8, 9], "k": [2, 6, 10], "v": [3, 7, 11]}
    assert parts["c"] == {"head0": [0, 1, 2, 3], "head1": [4, 5, 6, 7], "head2": [8, 9, 10, 11]}
    assert parts["d"] == {"part0": [0, 1, 2, 4, 5, 6, 8, 9, 10], "part1": [3, 7, 11]}, "the first glob counts"
    assert parts["e"] == {"gate": [0, 2, 4, 6, 8, 10], "up": [1, 3, 5, 7, 9, 11]}
    assert parts["f"] == {"gate": list(range(6)), "up": list(range(6, 12))}


def test_globs_may_match_in_another_part_of_the_model() -> None:
    stages = linears(a=(12, 4)), linears(b=(12, 4))
    routes, settings = [route(stage) for stage in stages], AtomSettings.parse({"a.*": {"heads": 3}})
    assert len(divide(stages[0], routes[0], settings, elsewhere=routes[1])["a.weight"].blocks) == 3
    assert len(divide(stages[1], routes[1], settings, elsewhere=routes[0])["b.weight"].blocks) == 1
    with pytest.raises(ValueError, match=r"atoms: 'a.\*' matches no parameter name"):
        divide(stages[1], routes[1], settings)


def test_settings_come_before_what_is_known_and_are_about_outputs_however_a_matrix_is_stored() -> None:
    (whole,) = divided_of(phi3(), {"*qkv_proj*": "whole"})[QKV].blocks
    assert whole.is_everything
    parts = divided_of(phi3(), {"*qkv_proj*": {"split_sizes": [48, 16]}})[QKV].blocks
    assert [part.name for part in parts] == ["part0", "part1"]
    blocks = divided_of(MODELS["gpt2"][0](), {"*c_proj*": {"heads": 4}})["transformer.h.0.attn.c_proj.weight"].blocks
    assert [(block.rows, block.columns) for block in blocks] == [(Stripes(0, 32), Stripes(8 * n, 8)) for n in range(4)]
    experts = divided_of(STACKS["mixtral"](), {"*.down_proj": {"heads": 2}})
    blocks = experts["model.layers.0.mlp.experts.down_proj"].blocks
    assert [block.of("w") for block in blocks[:3]] == ["w[0].head0", "w[0].head1", "w[1].head0"]
    assert [block.shape for block in blocks] == [(16, 48)] * 8
    recipe = {
        "*.wq.weight": {"heads": 3},
        "*.wkv_b.weight": {"heads": 3},
        "*.wkv_a.weight": "whole",
    }  # torchtitan's own
    found = divided_of(nn.ModuleDict({"a": Attention()}), recipe)
    shapes = {name: [block.shape for block in each.blocks] for name, each in found.items()}
    assert shapes["a.wq.weight"] == [(10, 24)] * 3 and shapes["a.wkv_b.weight"] == [(16, 8)] * 3
    assert shapes["a.wkv_a.weight"] == [(12, 24)]


def test_parameters_of_more_dimensions_become_matrices_where_a_setting_says_how() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 2), "back": nn.ConvTranspose2d(3, 8, 2), "a": nn.Linear(4, 4)})
    settings = AtomSettings.parse({"conv.*": "flatten", "back.*": "stack", "a.weight": "whole"})
    asked = {name: settings.makes_matrix([name], param.shape) for name, param in model.named_parameters()}
    assert asked["conv.weight"] == "4-D, set by atoms 'conv.*'" and asked["back.weight"] == "4-D, set by atoms 'back.*'"
    assert asked["conv.bias"] is asked["a.weight"] is asked["a.bias"] is None
    assert AtomSettings.parse({"conv.*": "whole"}).makes_matrix(["conv.weight"], (8, 3, 2, 2)) is None
    routes = [replace(each, kind="matrix") if asked[each.name] else each for each in route(model)]
    found = divide(model, routes, settings)
    (kernel,) = found["conv.weight"].blocks
    assert kernel.shape == (8, 12) and kernel.is_everything and len(found["back.weight"].blocks) == 24
    with pytest.raises(ValueError, match=r"atoms '\*': 'back.weight' is of a transposed convolution"):
        divide(model, [each for each in routes if "back" in each.name], AtomSettings.parse({"*": "flatten"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a.wieght": "whole"}, r"atoms: 'a.wieght' matches no parameter name; did you mean 'a.weight'\?"),
        ({"a.bias": "whole"}, r"'a.bias' matches only parameters that no matrix rule updates, such as 'a.bias' \(elem"),
        (
            {"a.*": {"qkv": [8, 2, 3]}},
            r"atoms 'a.\*': 'a.weight' of shape \(12, 4\) has 12 outputs, but 8\+2\+3 are 13",
        ),
        ({"a.*": {"qkv": [2, 1, 1], "groups": 4}}, r"has 12 outputs, but 2\+1\+1, 4 times, are 16"),
        ({"a.*": {"heads": 5}}, r"has 12 outputs, which do not divide into 5 equal parts"),
        ({"odd.*": {"gate_up": "halves"}}, r"has 7 outputs, which do not divide into 2 equal parts"),
        ({"a.*": {"head": 3}}, r"atoms 'a.\*': 1 wrong option\(s\)\n  unknown key 'head'; did you mean 'heads'\?"),
        ({"a.*": {"qkv": [8, 4]}}, r"atoms 'a.\*': 1 wrong option\(s\)\n  qkv"),
        ({"a.*": {"qkv": [8, 2, "2"]}}, r"qkv.2: input should be a valid integer; found '2'"),
        ({"a.*": {"gate_up": "half"}}, r"gate_up: input should be 'halves' or 'interleaved'; found 'half'"),
        ({"a.*": {"heads": 2, "gate_up": "halves"}}, r"expected one of .*; found 'heads' and 'gate_up'"),
        ({"a.*": {"split_sizes": []}}, r"expected one of 'split_sizes', .* with sizes; found 'split_sizes'"),
        ({"a.*": {}}, r"expected one of 'split_sizes', 'heads', 'qkv', 'gate_up', with sizes; found none"),
        ({"a.*": {"heads": 2, "groups": 2}}, r"'groups' goes with 'qkv' or 'split_sizes'; found it with 'heads'"),
        ({"a.*": "hole"}, r"atoms 'a.\*': unknown word 'hole'; did you mean 'whole'\?"),
        ({"a.*": 12}, r"atoms 'a.\*': expected one of 'whole', 'stack', 'flatten' or a mapping .*; found 12"),
        (
            {"a.weight": "stack"},
            r"'a.weight' of shape \(12, 4\): 'stack' is for parameters of three dimensions or more",
        ),
        ({"a.weight": "flatten"}, r"'flatten' is for parameters of three dimensions or more"),
        (["a.*"], r"atoms: expected a mapping of globs to divisions; found \['a.\*'\]"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divided_of(linears(a=(12, 4), odd=(7, 3)), settings)
