"""Which matrices are in a parameter: as the modelling code uses them, or as it was set by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lwopt_backend.atom_settings import AtomSettings
from lwopt_backend.atoms import Divided, divide
from lwopt_backend.fused_families import TABLE
from lwopt_backend.plan.blocks import Block, Stripes
from lwopt_backend.routing import route

hf = pytest.importorskip("transformers")

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


# What a model does with the outputs of a fused linear: each output is given its number, and the numbers are followed


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


PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "scaled_dot_product_attention"}
CUTS = {"split", "chunk", "unbind"}
ACTIVATIONS = {"silu", "gelu", "relu"}
WATCHED = PRODUCTS | CUTS | ACTIVATIONS


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
    products = [given for name, given, _ in watch.calls if name in PRODUCTS]
    pairs = [(a, b) for given in products for n, a in enumerate(given) for b in given[n + 1 :]]
    assert "q" not in parts or (parts["q"], parts["k"]) in pairs
    assert any(parts["v"] == b for _, b in pairs)
    if "q" not in parts:
        assert any(parts["k"] == b for _, b in pairs) and parts["k"] != parts["v"]


def one_token() -> dict[str, Tensor]:
    """At position 0, where a rotation leaves queries and keys as they are."""
    return {"input_ids": torch.tensor([[3]])}


def pixels(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(1, 3, size, size)}


ATTENTION: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], Mapping[str, int]]] = {
    "gpt2": (lambda: causal(hf.GPT2Config(**GPT)), one_token, {"q": 32, "k": 32, "v": 32}),
    "gpt2 cross": (
        lambda: causal(hf.GPT2Config(**GPT, add_cross_attention=True)),
        lambda: {**one_token(), "encoder_hidden_states": torch.rand(1, 2, 32)},
        {"k": 32, "v": 32},
    ),
    "imagegpt": (lambda: hf.ImageGPTModel(hf.ImageGPTConfig(**GPT)), one_token, {"q": 32, "k": 32, "v": 32}),
    "openai": (lambda: causal(hf.OpenAIGPTConfig(**GPT)), one_token, {"q": 32, "k": 32, "v": 32}),
    "big code, one kv head": (lambda: causal(hf.GPTBigCodeConfig(**GPT)), one_token, {"q": 32, "k": 8, "v": 8}),
    "big code": (
        lambda: causal(hf.GPTBigCodeConfig(**GPT, multi_query=False)),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "neox": (lambda: causal(hf.GPTNeoXConfig(**TINY, intermediate_size=64)), one_token, {"q": 32, "k": 32, "v": 32}),
    "neox japanese": (
        lambda: causal(hf.GPTNeoXJapaneseConfig(**TINY, intermediate_multiple_size=2)),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "bloom": (
        lambda: causal(hf.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "persimmon": (
        lambda: causal(hf.PersimmonConfig(**TINY, intermediate_size=64, qk_layernorm=False)),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "falcon, one kv head": (lambda: causal(hf.FalconConfig(**TINY)), one_token, {"q": 32, "k": 8, "v": 8}),
    "falcon by head": (
        lambda: causal(hf.FalconConfig(**TINY, multi_query=False, alibi=True)),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "falcon by group": (
        lambda: causal(
            hf.FalconConfig(**{**TINY, "num_attention_heads": 8}, num_kv_heads=2, new_decoder_architecture=True)
        ),
        one_token,
        {"q": 32, "k": 8, "v": 8},
    ),
    "codegen": (
        lambda: causal(hf.CodeGenConfig(**{**GPT, "n_head": 8}, rotary_dim=4, n_positions=16)),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "phi3": (lambda: causal(hf.Phi3Config(**GROUPED)), one_token, {"q": 32, "k": 16, "v": 16}),
    "mpt": (
        lambda: causal(hf.MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=50)),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "modernbert": (
        lambda: hf.ModernBertModel(
            hf.ModernBertConfig(**TINY, intermediate_size=40, pad_token_id=0, cls_token_id=1, sep_token_id=2)
        ),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "bark": (
        lambda: hf.BarkSemanticModel(
            hf.BarkSemanticConfig(
                hidden_size=32, num_layers=1, num_heads=4, input_vocab_size=50, output_vocab_size=50, block_size=8
            )
        ),
        one_token,
        {"q": 32, "k": 32, "v": 32},
    ),
    "blip": (
        lambda: hf.BlipVisionModel(hf.BlipVisionConfig(**VISION, intermediate_size=48)),
        pixels,
        {"q": 32, "k": 32, "v": 32},
    ),
    "blip 2": (
        lambda: hf.Blip2VisionModel(hf.Blip2VisionConfig(**VISION, intermediate_size=48)),
        pixels,
        {"q": 32, "k": 32, "v": 32},
    ),
}


@pytest.mark.parametrize("family", ATTENTION)
def test_q_k_and_v_are_what_attention_multiplies(family: str) -> None:
    make, inputs, sizes = ATTENTION[family]
    model = make().eval()
    fused = {name: blocks for name, blocks in fused_of(model).items() if "v" in named(blocks)}
    assert any({n: len(o) for n, o in named(blocks).items()} == dict(sizes) for blocks in fused.values()), fused
    for name, blocks in fused.items():
        check_attention(named(blocks), watched(model, name, lambda: model(**inputs())))


# Latent attention: the parts are cut from what a linear gives

LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
CAUSAL = {**TINY, **LATENT, "num_key_value_heads": 4, "intermediate_size": 48}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXTURE = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LONGCAT = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "moe_topk": 2}
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "AXK1": {**CAUSAL, **MIXTURE},
    "DeepseekV2": {**CAUSAL, **MIXTURE},
    "DeepseekV3": {**CAUSAL, **MIXTURE},
    "DeepseekV32": {**CAUSAL, **MIXTURE},
    "Glm4MoeLite": {**CAUSAL, **MIXTURE},
    "GlmMoeDsa": {**CAUSAL, **MIXTURE},
    "KimiLinear": {**CAUSAL, "layer_types": ["full_attention"]},
    "LongcatFlash": {**CAUSAL, **LONGCAT, "num_layers": 1, "num_hidden_layers": 2, "head_dim": 4, "zero_expert_num": 2},
    "MiniCPM3": CAUSAL,
    "Youtu": CAUSAL,
}


def latent(family: str, queries: int | None = 8) -> nn.Module:
    if not hasattr(hf, f"{family}Config"):
        pytest.skip(f"this version of transformers does not have {family}")
    return causal(getattr(hf, f"{family}Config")(**LATENT_FAMILIES[family], **SPECIAL, q_lora_rank=queries))


@pytest.mark.parametrize(
    ("family", "queries"), [*((family, 8) for family in LATENT_FAMILIES), ("DeepseekV2", None), ("DeepseekV3", None)]
)
def test_the_parts_of_latent_attention_are_what_it_cuts(family: str, queries: int | None) -> None:
    model = latent(family, queries).eval()
    fused = {name: blocks for name, blocks in fused_of(model).items() if ".experts." not in name}
    sizes = {name.split(".")[-2]: {n: len(o) for n, o in named(blocks).items()} for name, blocks in fused.items()}
    rotated = {} if family == "KimiLinear" else {"q_b_proj" if queries else "q_proj": {"q_nope": 24, "q_rope": 16}}
    assert sizes == {
        **rotated,
        "kv_a_proj_with_mqa": {"kv": 8, "k_rope": 4},
        "kv_b_proj": {"k_nope": 24, "v": 40},
    }
    for name, blocks in fused.items():
        cuts = [returned for call, _, returned in watched(model, name, lambda: model(**one_token())).calls]
        assert list(named(blocks).values()) in cuts, name


# Attention modules of their own, which come with much around them in a model


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


def rotated(size: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of no rotation at all."""
    return torch.ones(*shape, size), torch.zeros(*shape, size)


def packed(name: str, kind: str, config: str, **options: Any) -> Around:
    """Attention over packed images, as of Qwen's vision towers."""
    given = {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32), "position_embeddings": rotated(8, 4)}
    module = getattr(family(name), kind)(configured(name, config, **options))
    return Around(module, torch.rand(4, 32), **given)


def images(name: str, kind: str, config: str, *more: Any, **options: Any) -> Around:
    """Attention over windows of images, as of SAM."""
    made = configured(name, config, **{**VISION, "image_size": 32}, **options)
    return Around(getattr(family(name), kind)(made, *more), torch.rand(1, 4, 4, 32))


def sequences(name: str, kind: str, config: str, **options: Any) -> Around:
    return Around(getattr(family(name), kind)(configured(name, config, **options)), torch.rand(1, 5, 32))


def with_positions(name: str, kind: str, config: Any) -> Around:
    """Attention that is given its rotation."""
    given = {"position_embeddings": rotated(8, 1, 1), "attention_mask": None}
    return Around(getattr(family(name), kind)(config, 0), torch.rand(1, 1, 32), **given)


def dbrx_config() -> Any:
    """What the attention reads of DBRX's configuration, which version 5.23 cannot make itself."""
    attention = hf.PretrainedConfig(attn_pdrop=0.0, clip_qkv=1e4, kv_n_heads=2, rope_theta=1e4)
    config = hf.PretrainedConfig(d_model=32, n_heads=4, max_seq_len=8)
    config.attn_config, config._attn_implementation = attention, "eager"
    return config


MODULES: dict[str, Callable[[], Around]] = {
    "qwen2 vl": lambda: packed("qwen2_vl", "VisionAttention", "Qwen2VLVisionConfig", embed_dim=32, num_heads=4),
    **{
        kind: lambda name=name, kind=kind, config=config: packed(name, kind, config, hidden_size=32, num_heads=4)
        for name, kind, config in [
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
    },
    "exaone": lambda: packed(
        "exaone4_5",
        "Exaone4_5_VisionAttention",
        "Exaone4_5_VisionConfig",
        hidden_size=32,
        num_heads=4,
        num_key_value_heads=2,
    ),
    "instructblip": lambda: sequences("instructblip", "InstructBlipAttention", "InstructBlipVisionConfig", **VISION),
    "instructblip video": lambda: sequences(
        "instructblipvideo", "InstructBlipVideoAttention", "InstructBlipVideoVisionConfig", **VISION
    ),
    "mgp": lambda: sequences("mgp_str", "MgpstrAttention", "MgpstrConfig", hidden_size=32, num_attention_heads=4),
    "decision transformer": lambda: sequences(
        "decision_transformer",
        "DecisionTransformerGPT2Attention",
        "DecisionTransformerConfig",
        hidden_size=32,
        n_layer=1,
        n_head=4,
    ),
    "sam": lambda: images("sam", "SamVisionAttention", "SamVisionConfig", 0, use_rel_pos=False),
    "sam hq": lambda: images("sam_hq", "SamHQVisionAttention", "SamHQVisionConfig", 0, use_rel_pos=False),
    "got": lambda: images("got_ocr2", "GotOcr2VisionAttention", "GotOcr2VisionConfig", 0, use_rel_pos=False),
    "seggpt": lambda: images("seggpt", "SegGptAttention", "SegGptConfig", use_relative_position_embeddings=False),
    "vitdet": lambda: images("vitdet", "VitDetAttention", "VitDetConfig", (4, 4)),
    "hiera": lambda: Around(family("hiera").HieraMaskUnitAttention(32, 64, 4), torch.rand(1, 4, 32)),
    "sam 2": lambda: Around(
        family("sam2").Sam2MultiScaleAttention(configured("sam2", "Sam2HieraDetConfig"), 32, 64, 4),
        torch.rand(1, 4, 4, 32),
    ),
    "florence, channels": lambda: Around(
        family("florence2").Florence2VisionChannelAttention(
            configured("florence2", "Florence2VisionConfig", embed_dim=[32], num_groups=[4]), 0
        ),
        torch.rand(1, 5, 32),
    ),
    "florence, windows": lambda: Around(
        family("florence2").Florence2VisionWindowAttention(
            configured("florence2", "Florence2VisionConfig", embed_dim=[32], num_heads=[4], window_size=2), 0
        ),
        torch.rand(1, 4, 4, 32),
    ),
    "phi4": lambda: with_positions(
        "phi4_multimodal",
        "Phi4MultimodalAttention",
        configured("phi4_multimodal", "Phi4MultimodalConfig", **GROUPED),
    ),
    "dbrx": lambda: with_positions("dbrx", "DbrxAttention", dbrx_config()),
}


@pytest.mark.parametrize("module", MODULES)
def test_q_k_and_v_of_a_module_are_what_it_multiplies(module: str) -> None:
    model = MODULES[module]().eval()
    ((name, blocks),) = fused_of(model).items()
    check_attention(named(blocks), watched(model, name, model))


@pytest.mark.parametrize("bias_k", [False, True])
def test_torch_s_attention_has_q_k_and_v_in_one_weight(bias_k: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=bias_k)
    model = nn.Sequential(attention)
    blocks = divided_of(model)["0.in_proj_weight"].blocks
    assert named(blocks) == {name: set(map(float, range(8 * n, 8 * n + 8))) for n, name in enumerate(("q", "k", "v"))}
    assert not fused_of(nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4, vdim=6)))


def test_lightning_attention_of_minimax_has_q_k_and_v_head_by_head() -> None:
    config = hf.MiniMaxConfig(**GROUPED, num_local_experts=4, layer_types=["linear_attention"])
    attention = family("minimax").MiniMaxLightningAttention(config, 0)
    attention.act_fn = nn.Identity()
    model = Around(attention, torch.rand(1, 4, 32), rotated(8, 1, 4), None).eval()
    ((name, blocks),) = fused_of(model).items()
    cuts = [returned for call, _, returned in watched(model, name, model).calls if call == "split"]
    assert list(named(blocks)) == ["q", "k", "v"] and list(named(blocks).values()) in cuts


def test_delta_net_has_q_k_v_and_z_in_groups_or_one_after_the_other() -> None:
    config = hf.Qwen3NextConfig(**MIXED, **DELTA, **EXPERTS)
    net = family("qwen3_next").Qwen3NextGatedDeltaNet(config, 0)
    (blocks,) = fused_of(nn.Sequential(net)).values()
    numbered = torch.arange(80.0).view(1, 1, 80)
    found = net.fix_query_key_value_ordering(numbered, torch.zeros(1, 1, 8))[:4]
    assert named(blocks) == {name: numbers(part) for name, part in zip("qkvz", found)}
    for name, kind, config in [("qwen3_5", "Qwen3_5", "TextConfig"), ("qwen3_5_moe", "Qwen3_5Moe", "TextConfig")]:
        net = getattr(family(name), f"{kind}GatedDeltaNet")(configured(name, kind + config, **MIXED, **DELTA), 0)
        (blocks,) = fused_of(nn.Sequential(net)).values()
        found = torch.arange(56.0).split([net.key_dim, net.key_dim, net.value_dim])
        assert named(blocks) == {name: numbers(part) for name, part in zip("qkv", found)}


@pytest.mark.parametrize("kind", ["qwen3_next.Qwen3Next", "qwen3_5.Qwen3_5", "qwen3_5_moe.Qwen3_5Moe"])
def test_queries_with_a_gate_have_both_in_every_head(kind: str) -> None:
    name, prefix = kind.split(".")
    text = "Config" if name == "qwen3_next" else "TextConfig"
    attention = getattr(family(name), f"{prefix}Attention")(configured(name, prefix + text, **MIXED, **DELTA), 1)
    attention.q_norm = nn.Identity()
    given = {"position_embeddings": rotated(8, 1, 1), "attention_mask": None}
    model = Around(attention, torch.rand(1, 1, 32), **given).eval()
    ((weight, blocks),) = fused_of(model).items()
    parts, watch = named(blocks), watched(model, weight, model)
    assert any(parts["q"] in given for call, given, _ in watch.calls if call in PRODUCTS)
    assert any(returned == [parts["q"], parts["gate"]] for call, _, returned in watch.calls if call == "chunk")


# Gate and up: what goes through the activation, and what it is multiplied with


def zamba() -> nn.Module:
    config = hf.Zamba2Config(
        **{**TINY, "num_hidden_layers": 2},
        layers_block_type=["mamba", "hybrid"],
        num_key_value_heads=4,
        attention_head_dim=16,
        intermediate_size=48,
        mamba_d_state=8,
        n_mamba_heads=2,
        mamba_headdim=32,
        mamba_ngroups=1,
        use_mem_rope=True,
        num_mem_blocks=1,
        hybrid_layer_ids=[1],
    )
    mlp = family("zamba2").Zamba2MLP(config, num_fwd_mem_blocks=1, block_id=0)
    for adapter in mlp.gate_up_proj_adapter_list.parameters():
        nn.init.zeros_(adapter)
    return Around(mlp, torch.rand(1, 2, 32), 1)


def mlp(name: str, kind: str, config: str, *more: Any, **options: Any) -> Callable[[], Around]:
    def make() -> Around:
        return Around(getattr(family(name), kind)(configured(name, config, **options), *more), torch.rand(1, 2, 32))

    return make


HIDDEN = {"hidden_size": 32, "intermediate_size": 48}
SHARED = {"hidden_size": 32, "shared_intermediate_size": 48, "num_attention_heads": 4, "mamba_n_heads": 8}
GATED = {
    "phi3": mlp("phi3", "Phi3MLP", "Phi3Config", **GROUPED),
    "phi4": mlp("phi4_multimodal", "Phi4MultimodalMLP", "Phi4MultimodalConfig", **GROUPED),
    "phi4 audio": mlp("phi4_multimodal", "Phi4MultimodalAudioMLP", "Phi4MultimodalAudioConfig", **HIDDEN),
    "glm": mlp("glm", "GlmMLP", "GlmConfig", **GROUPED),
    "glm4": mlp("glm4", "Glm4MLP", "Glm4Config", **GROUPED),
    "glm4v": mlp("glm4v", "Glm4vTextMLP", "Glm4vTextConfig", **HIDDEN),
    "dia": mlp("dia", "DiaMLP", "DiaEncoderConfig", **HIDDEN),
    "granite hybrid": mlp("granitemoehybrid", "GraniteMoeHybridMLP", "GraniteMoeHybridConfig", **SHARED),
    "granite shared": mlp("granitemoeshared", "GraniteMoeSharedMLP", "GraniteMoeSharedConfig", **SHARED),
    "modernbert": mlp("modernbert", "ModernBertMLP", "ModernBertConfig", **HIDDEN),
    "modernbert decoder": mlp("modernbert_decoder", "ModernBertDecoderMLP", "ModernBertDecoderConfig", **HIDDEN),
    "moonshine": mlp("moonshine", "MoonshineDecoderMLP", "MoonshineConfig", "silu", **HIDDEN),
    "zamba2": zamba,
}


@pytest.mark.parametrize("family", GATED)
def test_the_gate_is_what_goes_through_the_activation(family: str) -> None:
    model = GATED[family]().eval()
    ((name, blocks),) = [(n, b) for n, b in fused_of(model).items() if "adapter" not in n]
    calls = watched(model, name, model).calls
    activated = [given[0] for call, given, _ in calls if call in ACTIVATIONS]
    cut = [returned for call, _, returned in calls if call == "chunk"]
    assert activated == [named(blocks)["gate"]] and list(named(blocks).values()) in cut


def numbered_experts(weight: nn.Parameter, transposed: bool) -> None:
    """Of an input whose first element is 1, output j of expert e is j + 1000 e."""
    outputs = weight.shape[2 if transposed else 1]
    codes = torch.arange(len(weight))[:, None] * 1000.0 + torch.arange(outputs)
    with torch.no_grad():
        weight.zero_()
        (weight[:, 0, :] if transposed else weight[:, :, 0]).copy_(codes)


def of_experts(blocks: Sequence[Block], part: str) -> set[float]:
    chosen = [block for block in blocks if block.name == f"[{block.slice}].{part}"]
    assert [block.slice for block in chosen] == list(range(4))
    return {block.slice * 1000.0 + output for block in chosen for output in outputs_of(block)}


STACKS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: causal(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
    "qwen3 moe": lambda: causal(hf.Qwen3MoeConfig(**GROUPED, **EXPERTS, moe_intermediate_size=24)),
    "deepseek v3": lambda: causal(
        hf.DeepseekV3Config(
            **{**GROUPED, "num_key_value_heads": 4},
            n_routed_experts=4,
            moe_intermediate_size=24,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=0,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    ),
    "granite": lambda: causal(
        hf.GraniteMoeConfig(**TINY, num_key_value_heads=2, intermediate_size=24, num_local_experts=4)
    ),
    "aria": lambda: nn.ModuleDict(
        {"experts": family("aria").AriaExperts(configured("aria", "AriaTextConfig", **GROUPED, moe_num_experts=4))}
    ),
}


@pytest.mark.parametrize("family", STACKS)
def test_experts_have_gate_and_up_one_after_the_other(family: str) -> None:
    model = STACKS[family]().eval()
    ((name, blocks),) = [(name, blocks) for name, blocks in fused_of(model).items() if "expert" in name]
    experts = model.get_submodule(name.rpartition(".")[0])
    experts.config._experts_implementation = "eager"
    numbered_experts(experts.gate_up_proj, experts.is_transposed)
    tokens = torch.zeros(4, experts.gate_up_proj.shape[1 if experts.is_transposed else 2])
    tokens[:, 0] = 1
    watch = Watch()
    with watch, torch.no_grad():
        experts(tokens, torch.arange(4)[:, None], torch.ones(4, 1))
    activated = set().union(*(given[0] for call, given, _ in watch.calls if call in ACTIVATIONS))
    assert activated == of_experts(blocks, "gate")
    cut = [returned for call, _, returned in watch.calls if call == "chunk"]
    assert set().union(*(returned[1] for returned in cut)) == of_experts(blocks, "up")
    down = [d for name, d in divided_of(model).items() if name.endswith("down_proj") and len(d.blocks) == 4]
    assert [block.name for block in down[0].blocks] == ["[0]", "[1]", "[2]", "[3]"]


def test_experts_of_gpt_oss_have_gate_and_up_in_turn() -> None:
    model = causal(hf.GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2))
    ((name, blocks),) = fused_of(model).items()
    experts = model.get_submodule(name.rpartition(".")[0])
    assert experts.gate_up_proj.shape == (4, 32, 96)
    watch, numbered = Watch(), torch.arange(96.0)
    WATCHED.add("clamp")
    with watch:
        experts._apply_gate(numbered)
    WATCHED.discard("clamp")
    clamped = [given[0] for call, given, _ in watch.calls if call == "clamp"]
    assert clamped == [outputs_of(block) for block in blocks[:2]]
    assert [block.name for block in blocks[:2]] == ["[0].gate", "[0].up"]
    assert [block.name for block in blocks[2:]] == [f"[{e}].{part}" for e in (1, 2, 3) for part in ("gate", "up")]


def test_experts_of_jetmoe_have_gate_and_up_one_after_the_other() -> None:
    config = configured("jetmoe", "JetMoeConfig", **HIDDEN, num_local_experts=4, num_experts_per_tok=4)
    model = Around(family("jetmoe").JetMoeMoE(config), torch.eye(32)[:1].view(1, 1, 32)).eval()
    ((_, blocks),) = fused_of(model).items()
    numbered_experts(model.inner.input_linear.weight, False)
    watch = Watch()
    with watch, torch.no_grad():
        model()
    activated = [given[0] for call, given, _ in watch.calls if call in ACTIVATIONS]
    assert of_experts(blocks, "gate") in activated


def test_experts_of_llama_4_are_divided_where_they_are_known_to_be_stored_transposed() -> None:
    experts = family("llama4").Llama4TextExperts(
        configured("llama4", "Llama4TextConfig", **GROUPED, num_local_experts=4)
    )
    model = nn.ModuleDict({"experts": experts})
    routes = route(model, stacks=True)
    transposed = [replace(each, transposed=True) for each in routes]
    blocks = divide(model, transposed)["experts.gate_up_proj"].blocks
    numbered_experts(experts.gate_up_proj, True)
    watch, tokens = Watch(), torch.zeros(4, 32)
    tokens[:, 0] = 1
    with watch, torch.no_grad():
        experts(tokens)
    assert [given[0] for call, given, _ in watch.calls if call in ACTIVATIONS] == [of_experts(blocks, "gate")]
    plain = divide(model, [replace(each, transposed=False) for each in routes])["experts.gate_up_proj"]
    assert len(plain.blocks) == 4, "with rows taken for outputs nothing fits, and nothing is guessed"


def test_every_class_of_the_table_is_followed_here() -> None:
    models = [make() for make, *_ in ATTENTION.values()]
    models += [make() for makers in (MODULES, GATED) for make in makers.values()]
    models += [latent(family) for family in LATENT_FAMILIES]
    followed = {type(module) for model in models for module in model.modules()}
    ours = [kind for kind in followed if kind.__module__.startswith("transformers.models.")]
    names = {f"{kind.__module__.split('.')[2]}.{kind.__name__}" for kind in ours}
    by_themselves = {
        *("minimax.MiniMaxLightningAttention", "jetmoe.JetMoeMoE", "llama4.Llama4TextExperts"),
        *("qwen3_next.Qwen3NextAttention", "qwen3_5.Qwen3_5Attention", "qwen3_5_moe.Qwen3_5MoeAttention"),
        *("qwen3_next.Qwen3NextGatedDeltaNet", "qwen3_5.Qwen3_5GatedDeltaNet", "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet"),
    }
    assert set(TABLE) - names == by_themselves


# Right, or not at all


def phi3() -> nn.Module:
    return causal(hf.Phi3Config(**GROUPED))


def test_a_class_with_a_forward_of_its_own_is_not_guessed_at() -> None:
    model = phi3()
    attention = model.model.layers[0].self_attn
    known = type(attention)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    attention.__class__ = type("FSDPPhi3Attention", (known,), {})
    assert name in fused_of(model), "as FSDP2 does: another class, the same forward"
    attention.__class__ = type("Phi3Attention", (known,), {"forward": lambda self, x: x})
    assert name not in fused_of(model)
    attention.__class__ = type("Phi3Attention", (known,), {"forward": known.forward, "__module__": known.__module__})
    assert name in fused_of(model)
    for copied in ("transformers_modules.phi3.modeling_phi3", "elsewhere.models.phi3.modeling_phi3"):
        attention.__class__ = type("Phi3Attention", (known,), {"forward": known.forward, "__module__": copied})
        assert name not in fused_of(model), "code that came with the weights, or somebody's copy"


@pytest.mark.parametrize(("key", "value"), [("head_dim", 4), ("num_key_value_heads", 3), ("num_key_value_heads", None)])
def test_sizes_that_do_not_fit_leave_a_weight_whole(key: str, value: int | None) -> None:
    model = phi3()
    attention = model.model.layers[0].self_attn
    setattr(attention, key, value)
    assert "model.layers.0.self_attn.qkv_proj.weight" not in fused_of(model)
    delattr(attention, key)
    assert "model.layers.0.self_attn.qkv_proj.weight" not in fused_of(model)


def test_sizes_must_also_fit_the_linear_that_takes_the_result() -> None:
    model = ATTENTION["big code, one kv head"][0]()
    attention = model.transformer.h[0].attn
    assert [len(outputs) for outputs in named(fused_of(model)["transformer.h.0.attn.c_attn.weight"]).values()] == [
        32,
        8,
        8,
    ]
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
    gpt, neox = ATTENTION["mpt"][0](), ATTENTION["neox"][0]()
    attention = neox.gpt_neox.layers[0].attention
    attention.query_key_value.weight = gpt.transformer.blocks[0].attn.Wqkv.weight
    both = nn.ModuleDict({"gpt": gpt, "neox": neox})
    assert len(fused_of(gpt)) == len(fused_of(neox)) == 1 and not fused_of(both)


def test_wrapped_modules_are_seen_through() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = phi3()
    plain = fused_of(model)
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = checkpoint_wrapper(attention.qkv_proj)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert fused_of(model) == plain and len(plain) == 2


def test_the_reason_tells_the_parts_and_whose_they_are() -> None:
    found = divided_of(causal(hf.Phi3Config(**GROUPED)), {"*.o_proj.weight": {"heads": 8}})
    reasons = {name.partition("layers.0.")[2]: each.reason for name, each in found.items()}
    assert reasons["self_attn.qkv_proj.weight"] == "q, k, v, as Phi3Attention has them"
    assert reasons["self_attn.o_proj.weight"] == "head0, head1, ... head7, set by atoms '*.o_proj.weight'"
    assert reasons["mlp.down_proj.weight"] == ""
    experts = divided_of(STACKS["mixtral"]())
    assert (
        experts["model.layers.0.mlp.experts.gate_up_proj"].reason == "4 slices of gate, up, as MixtralExperts has them"
    )
    assert experts["model.layers.0.mlp.experts.down_proj"].reason == "4 slices"


# Settings


def linears(**shapes: tuple[int, int]) -> nn.Module:
    """Linears with so many outputs and inputs, by name."""
    return nn.ModuleDict({name: nn.Linear(inputs, outputs, bias=True) for name, (outputs, inputs) in shapes.items()})


def test_settings_divide_outputs_by_name() -> None:
    model = linears(a=(12, 4), b=(12, 4), c=(12, 4), d=(12, 4), e=(12, 4))
    found = divided_of(
        model,
        {
            "a.*": {"qkv": [8, 2, 2]},
            "b.weight": {"qkv": [2, 1, 1], "groups": 3},
            "c.*": {"heads": 3},
            "d.*": {"split_sizes": [3, 1], "groups": 3},
            "[de].weight": {"gate_up": "interleaved"},
        },
    )
    parts = {name[0]: {block.name: sorted(outputs_of(block)) for block in each.blocks} for name, each in found.items()}
    assert parts["a"] == {"q": list(range(8)), "k": [8, 9], "v": [10, 11]}
    assert parts["b"] == {"q": [0, 1, 4, 5, 8, 9], "k": [2, 6, 10], "v": [3, 7, 11]}
    assert parts["c"] == {"head0": [0, 1, 2, 3], "head1": [4, 5, 6, 7], "head2": [8, 9, 10, 11]}
    assert parts["d"] == {"part0": [0, 1, 2, 4, 5, 6, 8, 9, 10], "part1": [3, 7, 11]}, "the first glob counts"
    assert parts["e"] == {"gate": [0, 2, 4, 6, 8, 10], "up": [1, 3, 5, 7, 9, 11]}


def test_globs_may_match_in_another_part_of_the_model() -> None:
    stages = linears(a=(12, 4)), linears(b=(12, 4))
    routes, settings = [route(stage) for stage in stages], AtomSettings.parse({"a.*": {"heads": 3}})
    assert len(divide(stages[0], routes[0], settings, elsewhere=routes[1])["a.weight"].blocks) == 3
    assert len(divide(stages[1], routes[1], settings, elsewhere=routes[0])["b.weight"].blocks) == 1
    with pytest.raises(ValueError, match=r"atoms: 'a.\*' matches no parameter name"):
        divide(stages[1], routes[1], settings)


def test_settings_come_before_what_is_known_of_a_module() -> None:
    model = phi3()
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert len(fused_of(model)[name]) == 3
    (whole,) = divided_of(model, {"*qkv_proj*": "whole"})[name].blocks
    assert whole.is_everything
    parts = divided_of(model, {"*qkv_proj*": {"split_sizes": [48, 16]}})[name].blocks
    assert [part.name for part in parts] == ["part0", "part1"]


def test_settings_are_about_outputs_however_a_matrix_is_stored_and_in_every_slice() -> None:
    gpt = causal(hf.GPT2Config(**GPT))
    blocks = divided_of(gpt, {"*c_proj*": {"heads": 4}})["transformer.h.0.attn.c_proj.weight"].blocks
    assert [(block.rows, block.columns) for block in blocks] == [(Stripes(0, 32), Stripes(8 * n, 8)) for n in range(4)]
    experts = STACKS["mixtral"]()
    blocks = divided_of(experts, {"*.down_proj": {"heads": 2}})["model.layers.0.mlp.experts.down_proj"].blocks
    assert [block.of("w") for block in blocks[:3]] == ["w[0].head0", "w[0].head1", "w[1].head0"]
    assert [block.shape for block in blocks] == [(16, 48)] * 8


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
