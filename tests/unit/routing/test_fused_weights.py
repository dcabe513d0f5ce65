"""Fused weights of known models: which outputs are q, k and v (by group, by head), the parts of MLA, gate and up.
What a family's code does is followed with real numbers: every output of a fused linear is given its own."""

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import TorchFunctionMode

from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.plan.atoms import Block
from lwopt_backend.routing.matrices import Divided, divide
from tests.support.fused import FusedGroupedExperts, FusedQKVLinear
from tests.support.models import routed

Make = Callable[[], nn.Module]
Inputs = tuple[Any, ...]


def lm(family: str, **options: Any) -> Make:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = configuration(family, **options)
            return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    return make


def bare(family: str, **options: Any) -> Make:
    return lambda: getattr(hf, f"{family}Model")(configuration(family, **options))


def configuration(family: str, **options: Any) -> Any:
    return getattr(hf, f"{family}Config")(**options)


def divided_of(model: nn.Module, atoms: Mapping[str, Any] | None = None) -> dict[str, Divided]:
    return divide(model, routed(model), AtomSettings.parse(atoms or {}))


def fused_of(model: nn.Module) -> dict[str, tuple[Block, ...]]:
    """The parameters of which a slice has several blocks."""
    found = divided_of(model)
    return {name: d.blocks for name, d in found.items() if len(d.blocks) > d.blocks[0].grid.slices}


def outputs_of(block: Block) -> set[float]:
    """The outputs that a block of a fused weight stands for: its rows, or its columns where these are divided."""
    stripes = block.columns if block.columns.size < block.grid.columns else block.rows
    return {float(index) for start, stop in stripes.runs() for index in range(start, stop)}


def named(blocks: Sequence[Block]) -> dict[str, set[float]]:
    return {block.name: outputs_of(block) for block in blocks}


# Following numbers
PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "scaled_dot_product_attention")
CUTS = ("split", "chunk", "unbind")
ACTIVATIONS = ("silu", "gelu", "relu")
WATCHED = {*PRODUCTS, *CUTS, *ACTIVATIONS, "clamp"}


@dataclass
class Watch(TorchFunctionMode):
    """Every torch function that is called, with the sets of numbers in its tensors and in what it returns."""

    calls: list[tuple[str, list[set[float]], list[set[float]]]] = field(default_factory=list)
    heads: set[frozenset[float]] = field(default_factory=set)  # of a head each, in what is multiplied

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in WATCHED:
            values = [*args, *(kwargs or {}).values()]
            of_heads = [value for value in values if isinstance(value, Tensor) and value.ndim > 2]
            self.heads |= {frozenset(numbers(head)) for value in of_heads for head in value.flatten(0, -3)}
            returned = result if isinstance(result, (tuple, list)) else [result]
            self.calls.append((func.__name__, _numbers(values), _numbers(returned)))
        return result

    def given(self, *names: str) -> list[list[set[float]]]:
        return [given for name, given, _ in self.calls if name in names]

    def returned(self, *names: str) -> list[list[set[float]]]:
        return [returned for name, _, returned in self.calls if name in names]


def _numbers(values: Iterable[Any]) -> list[set[float]]:
    return [numbers(value) for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def numbers(value: Tensor) -> set[float]:
    return set(value.detach().flatten().tolist())


def watched(model: nn.Module, inputs: Mapping[str, Tensor], weight: str) -> Watch:
    """A forward in which every output of the linear of ``weight`` is its own number."""

    def number(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return torch.arange(output.shape[-1], dtype=output.dtype).expand_as(output)

    handle, watch = model.get_submodule(weight.rpartition(".")[0]).register_forward_hook(number), Watch()
    with watch, torch.no_grad():
        model(**inputs)
    handle.remove()
    return watch


def check_use(parts: Mapping[str, set[float]], watch: Watch) -> None:
    """What the parts are named for is done with them; as many numbers are in each as there are outputs."""
    products = watch.given(*PRODUCTS)
    if "up" in parts:  # the gate goes through the activation
        assert [given[0] for given in watch.given(*ACTIVATIONS)] == [parts["gate"]]
        assert list(parts.values()) in watch.returned("chunk")
    elif "gate" in parts:
        assert any(parts["q"] in given for given in products)
        assert [parts["q"], parts["gate"]] in watch.returned("chunk")
    elif {"k", "v"} <= set(parts):  # queries are multiplied with keys, and something with values
        pairs = [(a, b) for given in products for n, a in enumerate(given) for b in given[n + 1 :]]
        assert any(parts["k"] == b and parts.get("q", a) == a for a, b in pairs)
        assert any(parts["v"] == b for _, b in pairs) and parts["k"] != parts["v"]
    else:  # of latent attention, which cuts them from what a linear gives
        assert list(parts.values()) in watch.returned(*WATCHED)


# Whole models, at position 0, where a rotation leaves queries and keys as they are
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
GPT = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50}
GROUPED = {**TINY, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "pad_token_id": 0}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
BARK = {"num_layers": 1, "num_heads": 4, "input_vocab_size": 50, "output_vocab_size": 50, "block_size": 8}
FALCON = {**TINY, "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True}
MODERN = {**TINY, "intermediate_size": 40, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
MLA = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10, "q_lora_rank": 8}
MLA.update(TINY, num_key_value_heads=4, intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MIXTURE = {**MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MIXTURE.update(num_experts=4, num_experts_per_tok=2)
LONGCAT = {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 4, "moe_topk": 2, "num_layers": 1}
LONGCAT.update(MLA, num_hidden_layers=2, head_dim=4, zero_expert_num=2)

TOKEN = {"input_ids": torch.tensor([[3]])}
ENCODED = {**TOKEN, "encoder_hidden_states": torch.rand(1, 2, 32)}
PIXELS = {"pixel_values": torch.rand(1, 3, 16, 16)}
QKV, GATED, LATENT = ("q k v",), ("q k v", "gate up"), ("q_nope q_rope", "kv k_rope", "k_nope v")
MODELS: dict[str, tuple[Make, dict[str, Tensor], tuple[str, ...]]] = {  # with inputs, and the parts in its weights
    "gpt2": (lm("GPT2", **GPT), TOKEN, QKV),
    "gpt2 cross": (lm("GPT2", **GPT, add_cross_attention=True), ENCODED, ("q k v", "k v")),
    "imagegpt": (bare("ImageGPT", **GPT), TOKEN, QKV),
    "openai": (lm("OpenAIGPT", **GPT), TOKEN, QKV),
    "big code, one kv head": (lm("GPTBigCode", **GPT), TOKEN, QKV),
    "big code": (lm("GPTBigCode", **GPT, multi_query=False), TOKEN, QKV),
    "neox": (lm("GPTNeoX", **TINY, intermediate_size=64), TOKEN, QKV),
    "neox japanese": (lm("GPTNeoXJapanese", **TINY, intermediate_multiple_size=2), TOKEN, QKV),
    "bloom": (lm("Bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=50), TOKEN, QKV),
    "persimmon": (lm("Persimmon", **TINY, intermediate_size=64, qk_layernorm=False), TOKEN, QKV),
    "falcon, one kv head": (lm("Falcon", **TINY), TOKEN, QKV),
    "falcon by head": (lm("Falcon", **TINY, multi_query=False, alibi=True), TOKEN, QKV),
    "falcon by group": (lm("Falcon", **FALCON), TOKEN, QKV),
    "codegen": (lm("CodeGen", **{**GPT, "n_head": 8}, rotary_dim=4, n_positions=16), TOKEN, ("q v k",)),
    "phi3": (lm("Phi3", **GROUPED), TOKEN, GATED),
    "mpt": (lm("Mpt", d_model=32, n_heads=4, n_layers=1, vocab_size=50), TOKEN, QKV),
    "modernbert": (bare("ModernBert", **MODERN), TOKEN, GATED),
    "bark": (bare("BarkSemantic", hidden_size=32, **BARK), TOKEN, QKV),
    "blip": (bare("BlipVision", **VISION, intermediate_size=48), PIXELS, QKV),
    "blip 2": (bare("Blip2Vision", **VISION, intermediate_size=48), PIXELS, QKV),
    **{
        family: (lm(family, **MIXTURE), TOKEN, LATENT)
        for family in ("AXK1", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa")
    },
    "DeepseekV2, plain queries": (lm("DeepseekV2", **{**MIXTURE, "q_lora_rank": None}), TOKEN, LATENT),
    "DeepseekV3, plain queries": (lm("DeepseekV3", **{**MIXTURE, "q_lora_rank": None}), TOKEN, LATENT),
    "KimiLinear": (lm("KimiLinear", **MLA, layer_types=["full_attention"]), TOKEN, LATENT[1:]),
    "LongcatFlash": (lm("LongcatFlash", **LONGCAT), TOKEN, LATENT),
    "MiniCPM3": (lm("MiniCPM3", **MLA), TOKEN, LATENT),
    "Youtu": (lm("Youtu", **MLA), TOKEN, LATENT),
}


@pytest.mark.parametrize("case", MODELS)
def test_fused_parts_are_what_a_model_uses_them_for(case: str) -> None:
    """q, k and v, gate and up, and the parts of MLA are what a model uses them for."""
    make, inputs, expected = MODELS[case]
    model = make().eval()
    fused = {name: named(blocks) for name, blocks in fused_of(model).items() if ".experts." not in name}
    assert {" ".join(parts) for parts in fused.values()} == set(expected)
    for name, parts in fused.items():
        check_use(parts, watched(model, inputs, name))


# Separate modules, which come with much around them in a model
CONFIG: dict[str, Any] = {  # what modules read of their configurations
    **GROUPED,
    **{"num_heads": 4, "embed_dim": 32, "image_size": 32, "patch_size": 8, "layer_types": ["linear_attention"]},
    **{"shared_intermediate_size": 48, "moe_intermediate_size": 24, "num_experts_per_tok": 4, "block_size": 8},
    **{"swiglu_alpha": 1.7, "swiglu_limit": 7.0},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
    **{"linear_conv_kernel_dim": 4, "max_position_embeddings": 8, "max_seq_len": 8, "rms_norm_eps": 1e-6},
    **dict.fromkeys(("hidden_act", "activation", "activation_function", "hidden_activation"), "silu"),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "dropout", "dropout_rate"), 0.0),
    **dict.fromkeys(("attn_drop_rate", "drop_rate", "mlp_dropout"), 0.0),
    **dict.fromkeys(("attention_bias", "qkv_bias", "mlp_bias", "use_rel_pos", "add_bias_linear"), False),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "use_relative_position_embeddings"), False),
    **dict.fromkeys(("scale_attn_weights", "reorder_and_upcast_attn"), False),
}


class Around(nn.Module):
    """A module in a model, and what it is called with. Nothing comes between the fused linear and its parts' use."""

    def __init__(self, module: nn.Module, *inputs: Any) -> None:
        super().__init__()
        self.inner, self.inputs = module, inputs
        if "Attention" in type(module).__name__:
            module.scale, module.q_norm, module.act_fn = 1.0, nn.Identity(), nn.Identity()
        for name, param in module.named_parameters():
            if "adapter" in name:
                nn.init.zeros_(param)

    def forward(self) -> Any:
        return self.inner(*self.inputs)


def code_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def configured(kind: str, *arguments: Any, **options: Any) -> nn.Module:
    config = hf.PretrainedConfig()
    vars(config).update({**CONFIG, **options})
    config._attn_implementation = config._experts_implementation = "eager"
    family, name = kind.split(".")
    return getattr(code_of(family), name)(config, *arguments)


def unrotated(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.ones(*shape, 8), torch.zeros(*shape, 8)


ONE, SEQUENCE, IMAGE = torch.rand(1, 1, 32), (torch.rand(1, 5, 32),), (torch.rand(1, 4, 4, 32),)
PACKED = (torch.rand(4, 32), torch.tensor([0, 4], dtype=torch.int32), unrotated(4))
ROTATED, MASKED = (ONE, unrotated(1, 1), None), (ONE, None, unrotated(1, 1))
FLORENCE = {"embed_dim": [32], "num_heads": [4], "num_groups": [4], "window_size": 2}
OF_DBRX = hf.PretrainedConfig(attn_pdrop=0.0, clip_qkv=1e4, kv_n_heads=2, rope_theta=1e4)
DBRX = {"d_model": 32, "n_heads": 4, "attn_config": OF_DBRX}
ZAMBA = {"num_mem_blocks": 1, "hybrid_layer_ids": [1], "adapter_rank": 4}
ON_PACKED_IMAGES = (
    "qwen2_vl.VisionAttention qwen2_5_vl.Qwen2_5_VLVisionAttention qwen3_vl.Qwen3VLVisionAttention "
    "qwen3_vl_moe.Qwen3VLMoeVisionAttention qwen3_5.Qwen3_5VisionAttention qwen3_5_moe.Qwen3_5MoeVisionAttention "
    "qwen3_omni_moe.Qwen3OmniMoeVisionAttention glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeVisionAttention "
    "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention exaone4_5.Exaone4_5_VisionAttention"
)
ON_SEQUENCES = (
    "instructblip.InstructBlipAttention instructblipvideo.InstructBlipVideoAttention mgp_str.MgpstrAttention "
    "decision_transformer.DecisionTransformerGPT2Attention phi4_multimodal.Phi4MultimodalMLP dia.DiaMLP glm.GlmMLP "
    "glm4.Glm4MLP glm4v.Glm4vTextMLP phi4_multimodal.Phi4MultimodalAudioMLP modernbert_decoder.ModernBertDecoderMLP "
    "granitemoehybrid.GraniteMoeHybridMLP granitemoeshared.GraniteMoeSharedMLP"
)
GATED_QUERIES = "qwen3_next.Qwen3NextAttention qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention"
MODULES: dict[str, tuple[Inputs, Inputs, dict[str, Any]]] = {  # what it is called with, and made with
    kind: (inputs, arguments, options)
    for kinds, inputs, arguments, options in [
        (ON_PACKED_IMAGES, PACKED, (), {}),
        (ON_SEQUENCES, SEQUENCE, (), {}),
        (GATED_QUERIES, ROTATED, (0,), {}),
        ("moonshine.MoonshineDecoderMLP", SEQUENCE, ("silu",), {}),
        ("florence2.Florence2VisionChannelAttention", SEQUENCE, (0,), FLORENCE),
        ("florence2.Florence2VisionWindowAttention", IMAGE, (0,), FLORENCE),
        ("sam.SamVisionAttention sam_hq.SamHQVisionAttention got_ocr2.GotOcr2VisionAttention", IMAGE, (0,), {}),
        ("seggpt.SegGptAttention vitdet.VitDetAttention", IMAGE, (), {}),
        ("sam2.Sam2MultiScaleAttention", IMAGE, (32, 64, 4), {}),
        ("phi4_multimodal.Phi4MultimodalAttention minimax.MiniMaxLightningAttention", ROTATED, (0,), {}),
        ("dbrx.DbrxAttention", MASKED, (), DBRX),
        ("zamba2.Zamba2MLP", (*SEQUENCE, 1), (1, 0), ZAMBA),
    ]
    for kind in kinds.split()
}
DELTA_NETS = [f"{kind}GatedDeltaNet" for kind in ("qwen3_next.Qwen3Next", "qwen3_5.Qwen3_5", "qwen3_5_moe.Qwen3_5Moe")]


def check_module(module: nn.Module, *inputs: Any) -> None:
    model = Around(module, *inputs).eval()
    ((name, blocks),) = [(name, blocks) for name, blocks in fused_of(model).items() if "adapter" not in name]
    check_use(named(blocks), watched(model, {}, name))


@pytest.mark.parametrize("kind", MODULES)
def test_qkv_and_gate_up_are_what_a_module_uses_them_for(kind: str) -> None:
    inputs, arguments, options = MODULES[kind]
    check_module(configured(kind, *arguments, **options), *inputs)


def test_qkv_of_hieras_attention_which_reads_no_configuration() -> None:
    check_module(code_of("hiera").HieraMaskUnitAttention(32, 64, 4), torch.rand(1, 4, 32))


@pytest.mark.parametrize("kind", DELTA_NETS)
def test_fused_weights_of_delta_nets(kind: str) -> None:
    """Delta nets have q, k, v and z in groups, or q, k and v one after the other."""
    net: Any = configured(kind, 0)
    blocks, *of_ba = fused_of(nn.Sequential(net)).values()
    if hasattr(net, "fix_query_key_value_ordering"):
        *found, b, a = net.fix_query_key_value_ordering(*(torch.arange(1.0 * n).view(1, 1, n) for n in (80, 8)))
        assert [named(of) for of in of_ba] == [{"b": numbers(b), "a": numbers(a)}]
    else:
        found = torch.arange(56.0).split([net.key_dim, net.key_dim, net.value_dim])
    assert named(blocks) == {name: numbers(part) for name, part in zip("qkvz", found)}


def test_torchs_attention_has_q_k_and_v_in_one_weight() -> None:
    for bias_k in (False, True):
        blocks = divided_of(nn.Sequential(nn.MultiheadAttention(8, 2, add_bias_kv=bias_k)))["0.in_proj_weight"].blocks
        assert named(blocks) == {name: numbers(torch.arange(8.0) + 8 * n) for n, name in enumerate("qkv")}
    assert not fused_of(nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4, vdim=6)))


# Experts
def stack_of(kind: str) -> Any:
    return nn.ModuleDict({"experts": configured(kind)})


def followed(weight: nn.Parameter, transposed: bool, run: Callable[[Tensor], Any]) -> Watch:
    """Four inputs whose first element is 1, of which output j of expert e is j + 1000 e."""
    outputs, inputs = weight.shape[:0:-1] if transposed else weight.shape[1:]
    watch = Watch()
    with torch.no_grad():
        weight.zero_()
        codes = torch.arange(4)[:, None] * 1000.0 + torch.arange(outputs)
        (weight[:, 0, :] if transposed else weight[:, :, 0]).copy_(codes)
        with watch:
            run(torch.eye(inputs)[:1].expand(4, -1))
    return watch


def of_experts(blocks: Sequence[Block], part: str) -> set[float]:
    chosen = [block for block in blocks if block.name == f"[{block.slice}].{part}"]
    assert [block.slice for block in chosen] == list(range(4))
    return {block.slice * 1000.0 + output for block in chosen for output in outputs_of(block)}


STACKS = "mixtral.MixtralExperts aria.AriaExperts qwen3_moe.Qwen3MoeExperts deepseek_v3.DeepseekV3Experts"
STACKS += " granitemoe.GraniteMoeExperts"


@pytest.mark.parametrize("kind", STACKS.split())
def test_stacked_experts_have_gate_and_up_one_after_the_other(kind: str) -> None:
    model = stack_of(kind)
    experts, found = model.experts, divided_of(model)
    blocks = found["experts.gate_up_proj"].blocks
    routed = torch.arange(4)[:, None], torch.ones(4, 1)
    watch = followed(experts.gate_up_proj, experts.is_transposed, lambda x: experts(x, *routed))
    assert set().union(*(given[0] for given in watch.given(*ACTIVATIONS))) == of_experts(blocks, "gate")
    assert set().union(*(returned[1] for returned in watch.returned("chunk"))) == of_experts(blocks, "up")
    assert [block.name for block in found["experts.down_proj"].blocks] == ["[0]", "[1]", "[2]", "[3]"]


def test_experts_of_gpt_oss_have_gate_and_up_in_turn() -> None:
    model, watch = stack_of("gpt_oss.GptOssExperts"), Watch()
    blocks = fused_of(model)["experts.gate_up_proj"]
    assert model.experts.gate_up_proj.shape == (4, 32, 96)
    with watch:
        model.experts._apply_gate(torch.arange(96.0))
    assert [given[0] for given in watch.given("clamp")] == [outputs_of(block) for block in blocks[:2]]
    assert [block.name for block in blocks] == [f"[{e}].{part}" for e in range(4) for part in ("gate", "up")]


def test_experts_of_jetmoe_have_gate_and_up_one_after_the_other() -> None:
    moe: Any = configured("jetmoe.JetMoeMoE").eval()
    ((_, blocks),) = fused_of(nn.Sequential(moe)).items()
    watch = followed(moe.input_linear.weight, False, lambda x: moe(x[None, :1]))
    assert of_experts(blocks, "gate") in [given[0] for given in watch.given(*ACTIVATIONS)]


def test_experts_of_llama_4_are_stored_transposed() -> None:
    """Experts of Llama 4 are divided where they are known to be stored transposed."""
    model = stack_of("llama4.Llama4TextExperts")
    routes, name = routed(model), "experts.gate_up_proj"
    blocks = divide(model, [replace(each, transposed=True) for each in routes])[name].blocks
    watch = followed(model.experts.gate_up_proj, True, model.experts)
    assert [given[0] for given in watch.given(*ACTIVATIONS)] == [of_experts(blocks, "gate")]
    plain = divide(model, [replace(each, transposed=False) for each in routes])[name]
    assert len(plain.blocks) == 4, "with rows taken for outputs nothing fits, and nothing is guessed"


# Right, or not at all
PHI3 = "model.layers.0.self_attn.qkv_proj.weight"


def phi3() -> tuple[Any, Any]:
    model: Any = MODELS["phi3"][0]()
    return model, model.model.layers[0].self_attn


def changed(model: Any, module: nn.Module, **attributes: Any) -> Any:
    vars(module).update(attributes)
    return model


def test_fused_qkv_is_what_the_running_forward_cuts() -> None:
    """Fused QKV is what the forward that runs cuts, wherever its class is from."""
    model, attention = phi3()
    known, q_k_v = type(attention), fused_of(model)[PHI3]
    inherited = {"forward": known.forward, "__module__": known.__module__}
    for name, of_its_own, expected in [
        ("FSDPPhi3Attention", {}, q_k_v),  # as FSDP2 does: another class, the same forward
        ("Phi3Attention", {"forward": lambda self, x: x}, None),
        # Code that came with the weights, or somebody's copy
        ("Phi3Attention", {**inherited, "__module__": "transformers_modules.phi3.modeling_phi3"}, q_k_v),
    ]:
        attention.__class__ = type(name, (known,), of_its_own)
        assert fused_of(model).get(PHI3) == expected, (name, of_its_own)


class Cuts(nn.Module):
    """What ``use`` makes of the outputs of a linear; then another takes as many as ``out`` of them."""

    def __init__(self, use: Callable[[Tensor], Tensor], outputs: int = 24, out: int = 12) -> None:
        super().__init__()
        self.fused_proj, self.out_proj = nn.Linear(8, outputs), nn.Linear(out, 8)
        self.use, self.calls = use, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.out_proj(self.use(self.fused_proj(x)))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first, second


TURNED = torch.cat  # a rotation takes halves apart, and joins or adds them again
WHOLE: list[Callable[[Tensor], Tensor]] = [
    lambda x: TURNED([-halves(x)[1], halves(x)[0]], dim=-1)[..., :12].softmax(-1) + x.softmax(-1)[..., :12],
    lambda x: torch.cat([halves(x)[0] * 2 - halves(x)[1], halves(x)[0] + halves(x)[1]], -1).cumsum(-1)[..., :12],
    lambda x: (x.cumsum(-1) * x.tanh())[..., :12],
]
UNKNOWN: list[Callable[[Tensor], Tensor]] = [
    lambda x: halves(x)[0].softmax(-1),  # the other half is never used
    lambda x: halves(x)[0].softmax(-1) + x[..., 6:18].softmax(-1) + halves(x)[1].softmax(-1),
    lambda x: x.new_tensor(x.shape).reshape(7, 7),  # fails
]


@pytest.mark.parametrize("use", WHOLE)
def test_outputs_that_are_joined_or_added_again_stay_one_matrix(use: Any) -> None:
    found = divided_of(nn.ModuleDict({"m": Cuts(use)}))["m.fused_proj.weight"]
    assert len(found.blocks) == 1 and not found.reason


@pytest.mark.parametrize("use", UNKNOWN)
def test_outputs_not_all_in_one_part_stay_whole(use: Any) -> None:
    """Outputs that are not all in one part stay whole, with a word."""
    model = nn.ModuleDict({"m": Cuts(use)})
    with pytest.warns(UserWarning, match=r"'m\.fused_proj\.weight'"):
        found = divided_of(model)["m.fused_proj.weight"]
    assert len(found.blocks) == 1 and "looks fused" in found.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided_of(model, {"*.fused_proj.weight": "whole"})


def test_following_a_forward_changes_nothing_of_the_model() -> None:
    module = Cuts(lambda x: halves(x)[0].tanh() * halves(x)[1])
    handle = module.register_forward_hook(lambda *_: pytest.fail("ran"))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert list(named(fused_of(nn.ModuleDict({"m": module}))["m.fused_proj.weight"])) == ["gate", "up"]
    handle.remove()
    assert module.calls == [0] and module.training
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_experts_whose_gate_does_not_do_what_they_say_stay_whole() -> None:
    model = stack_of("mixtral.MixtralExperts")
    assert fused_of(model)
    for wrong in (
        {"_apply_gate": lambda outputs: outputs[..., ::2] * outputs[..., 1::2]},
        {"_apply_gate": lambda outputs: outputs[..., :2] * torch.empty(2, device="meta")},
        {"_apply_gate": lambda outputs: outputs.detach()[..., :2]},
        {"is_concatenated": False},
        {"has_gate": False},
    ):
        with pytest.MonkeyPatch.context() as patch:
            for key, value in wrong.items():
                patch.setattr(model.experts, key, value)
            assert not fused_of(model)


def test_tied_fused_weight_used_in_two_ways_stays_whole() -> None:
    """A tied fused weight that two modules use in two ways stays whole."""
    mpt, neox = (make() for make, *_ in (MODELS["mpt"], MODELS["neox"]))
    neox.gpt_neox.layers[0].attention.query_key_value.weight = mpt.transformer.blocks[0].attn.Wqkv.weight
    both = nn.ModuleDict({"mpt": mpt, "neox": neox})
    assert len(fused_of(mpt)) == len(fused_of(neox)) == 1 and not fused_of(both)


def test_fused_weights_are_seen_through_activation_checkpointing() -> None:
    model, attention = phi3()
    plain = fused_of(model)
    attention.qkv_proj = checkpoint_wrapper(attention.qkv_proj)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert fused_of(model) == plain and len(plain) == 2


# torchtitan's modules, known by their attributes, and what they do with the outputs
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

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        query = self.wq_b(self.wq_a(x)) if self.q_lora_rank else self.wq(x)
        q_nope, q_rope = query.unflatten(-1, (-1, 10)).split([6, 4], -1)
        kv, k_rope = self.wkv_a(x).split([8, 4], -1)
        k_nope, v = self.wkv_b(kv).unflatten(-1, (-1, 16)).split([6, 10], -1)
        return {"q_nope": q_nope, "q_rope": q_rope, "kv": kv, "k_rope": k_rope, "k_nope": k_nope, "v": v}


KV_PARTS = {"wkv_a": ["kv", "k_rope"], "wkv_b": ["k_nope", "v"]}
OF_TORCHTITAN: Any = [
    *((FusedQKVLinear(heads=6, kv_heads=heads), {"wqkv": ["q", "k", "v"]}) for heads in (3, 6, 1)),
    (Attention(), {"wq": ["q_nope", "q_rope"], **KV_PARTS}),
    (Attention(queries=8), {"wq_b": ["q_nope", "q_rope"], **KV_PARTS}),
]


@pytest.mark.parametrize(("module", "expected"), OF_TORCHTITAN)
def test_fused_qkv_and_mla_of_torchtitan(module: Any, expected: dict[str, list[str]]) -> None:
    """Fused QKV and MLA of torchtitan are what its modules cut. The rows that have a gradient are those that a part
    depends on."""
    fused, x = fused_of(nn.ModuleDict({"m": module})), torch.randn(2, 24)
    assert {name.split(".")[1]: list(named(blocks)) for name, blocks in fused.items()} == expected
    for name, blocks in fused.items():
        for part, outputs in named(blocks).items():
            module.zero_grad()
            module(x)[part].square().sum().backward()
            used = module.get_parameter(name.removeprefix("m.")).grad.abs().sum(1).nonzero()
            assert outputs == {float(row) for row in used}, part


def test_experts_of_torchtitans_gpt_oss_have_gate_and_up_in_turn() -> None:
    shapes = {"mlp1_weight_EGD": (4, 10, 6), "mlp1_bias_EG": (4, 10), "mlp2_weight_EDF": (4, 6, 5)}
    experts = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})
    ((name, blocks),) = fused_of(nn.ModuleDict({"inner_experts": experts})).items()
    assert name == "inner_experts.mlp1_weight_EGD"
    assert [outputs_of(block) for block in blocks[:2]] == [numbers(torch.arange(s, 10.0, 2)) for s in (0, 1)]
    assert len(of_experts(blocks, "gate")) == 20


def side_by_side() -> nn.Module:
    """torchtitan's experts, and its linear for shared ones."""
    shared = nn.ParameterDict({"w13": torch.randn(6, 2, 8)})
    return nn.ModuleDict({"moe": FusedGroupedExperts(3, 6), "shared_experts": shared, "first": nn.Linear(8, 8)})


def test_fused_swiglu_of_torchtitan() -> None:
    """torchtitan's fused SwiGLU is gate and up of each expert, or as set. (experts, outputs, 2, inputs), with
    torchtitan's option ``fused_swiglu``."""
    model = side_by_side()
    found = divided_of(model)
    for name in ("moe.w13", "shared_experts.w13"):
        param = model.get_parameter(name)
        numbered = torch.arange(param.numel()).view(-1, 6, 2, param.shape[-1])
        for block in found[name].blocks:
            matrix = numbered[block.slice, :, int(block.name.endswith("up"))]
            assert block.shape == tuple(matrix.shape)
            assert [block.flat(i) for i in range(block.numel)] == matrix.flatten().tolist()
    ways = [("whole", [(6, 48)] * 3), ({"heads": 2}, [(3, 48)] * 6), ("stack", [(2, 24)] * 18), ("flatten", [(3, 288)])]
    for atoms, shapes in ways:
        assert [block.shape for block in divided_of(model, {"moe.w13": atoms})["moe.w13"].blocks] == shapes


class Packed(nn.Module):
    """A linear with two weights in a byte, which its own kernel alone reads."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        packed = torch.zeros(in_features * out_features // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("a kernel")


class PackedAttention(nn.Module):
    """LoRA beside a frozen weight of 4 bits, in a model that computes in bfloat16, as QLoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = Packed(16, 48), nn.Linear(16, 4, bias=False), nn.Linear(4, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.base(x) + self.up(self.down(x))).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_forward_is_followed_through_quantized_linears() -> None:
    (parts,) = fused_of(PackedAttention().bfloat16()).values()
    assert [outputs_of(part) for part in parts] == [{*range(16)}, {*range(16, 32)}, {*range(32, 48)}]
