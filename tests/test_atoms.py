"""Which matrices are in a parameter: as the modelling code uses them, or as it was set by name. What a family's code
does is followed with real numbers: every output of a fused linear is given its own."""

import contextlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers as hf
from deepspeed import _attention_head_count as of_deepspeed
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.overrides import TorchFunctionMode

from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.groups.choices import settings_of
from lwopt_backend.groups.grouping import group_parameters
from lwopt_backend.plan.atoms import Block, Stripes
from lwopt_backend.planner.shapes import Training
from lwopt_backend.routing.fused import TABLE
from lwopt_backend.routing.matrices import Divided, divide
from tests.fused import FusedGroupedExperts
from tests.models import routed

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
    """A test of a family that this version of transformers does not have is skipped."""
    if not hasattr(hf, f"{family}Config"):
        pytest.skip(f"transformers {hf.__version__} does not have {family}")
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
def test_parts_are_what_a_model_uses_them_for(case: str) -> None:
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
    return pytest.importorskip(f"transformers.models.{family}.modeling_{family}")


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
def test_parts_are_what_a_module_uses_them_for(kind: str) -> None:
    inputs, arguments, options = MODULES[kind]
    check_module(configured(kind, *arguments, **options), *inputs)


def test_parts_of_hieras_attention_which_reads_no_configuration() -> None:
    check_module(code_of("hiera").HieraMaskUnitAttention(32, 64, 4), torch.rand(1, 4, 32))


@pytest.mark.parametrize("kind", DELTA_NETS)
def test_delta_nets_have_q_k_v_and_z_in_groups_or_q_k_and_v_one_after_the_other(kind: str) -> None:
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
def test_experts_have_gate_and_up_one_after_the_other(kind: str) -> None:
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


def test_experts_of_llama_4_are_divided_where_they_are_known_to_be_stored_transposed() -> None:
    model = stack_of("llama4.Llama4TextExperts")
    routes, name = routed(model), "experts.gate_up_proj"
    blocks = divide(model, [replace(each, transposed=True) for each in routes])[name].blocks
    watch = followed(model.experts.gate_up_proj, True, model.experts)
    assert [given[0] for given in watch.given(*ACTIVATIONS)] == [of_experts(blocks, "gate")]
    plain = divide(model, [replace(each, transposed=False) for each in routes])[name]
    assert len(plain.blocks) == 4, "with rows taken for outputs nothing fits, and nothing is guessed"


def is_there(kind: str) -> bool:
    """Whether this version of transformers has a class."""
    family, name = kind.split(".")
    module = f"transformers.models.{family}.modeling_{family}"
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None and hasattr(importlib.import_module(module), name)
    return False


def test_every_class_of_the_table_is_followed_here() -> None:
    """The classes in this version of transformers, which has nearly all."""
    models = set()
    for make, *_ in MODELS.values():
        with contextlib.suppress(pytest.skip.Exception):  # it lacks this family
            kinds = {type(module) for module in make().modules() if "models." in type(module).__module__}
            models |= {f"{kind.__module__.split('.')[2]}.{kind.__name__}" for kind in kinds}
    alone = {"hiera.HieraMaskUnitAttention", "jetmoe.JetMoeMoE", "llama4.Llama4TextExperts", *DELTA_NETS}
    there = set(filter(is_there, TABLE))
    assert len(there) > 0.9 * len(TABLE) and there <= models | set(MODULES) | alone
    assert set(MODULES) | alone <= set(TABLE), "none is followed that the table does not have"


# Right, or not at all
PHI3 = "model.layers.0.self_attn.qkv_proj.weight"


def phi3() -> tuple[Any, Any]:
    model: Any = MODELS["phi3"][0]()
    return model, model.model.layers[0].self_attn


def changed(model: Any, module: nn.Module, **attributes: Any) -> Any:
    vars(module).update(attributes)
    return model


def test_a_class_with_a_forward_of_its_own_is_not_guessed_at() -> None:
    model, attention = phi3()
    known = type(attention)
    inherited = {"forward": known.forward, "__module__": known.__module__}
    for name, of_its_own, is_known in [
        ("FSDPPhi3Attention", {}, True),  # as FSDP2 does: another class, the same forward
        ("Phi3Attention", {"forward": lambda self, x: x}, False),
        ("Phi3Attention", inherited, True),
        # Code that came with the weights, or somebody's copy
        ("Phi3Attention", {**inherited, "__module__": "transformers_modules.phi3.modeling_phi3"}, False),
        ("Phi3Attention", {**inherited, "__module__": "elsewhere.models.phi3.modeling_phi3"}, False),
    ]:
        attention.__class__ = type(name, (known,), of_its_own)
        assert (PHI3 in fused_of(model)) == is_known, (name, of_its_own)


def test_sizes_that_do_not_fit_the_weight_or_what_takes_its_result_leave_it_whole() -> None:
    for key, value in (("head_dim", 4), ("num_key_value_heads", 3), ("num_key_value_heads", None)):
        model, attention = phi3()
        assert PHI3 not in fused_of(changed(model, attention, **{key: value}))
        delattr(attention, key)
        assert PHI3 not in fused_of(model)
    model = MODELS["big code, one kv head"][0]()
    assert [len(outputs) for blocks in fused_of(model).values() for outputs in named(blocks).values()] == [32, 8, 8]
    changed(model, model.transformer.h[0].attn, embed_dim=16, kv_dim=16)
    assert not fused_of(model), "16 + 16 + 16 are the 48 outputs, but 32 queries go into c_proj"


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


def test_a_weight_that_two_modules_use_in_two_ways_stays_whole() -> None:
    mpt, neox = (make() for make, *_ in (MODELS["mpt"], MODELS["neox"]))
    neox.gpt_neox.layers[0].attention.query_key_value.weight = mpt.transformer.blocks[0].attn.Wqkv.weight
    both = nn.ModuleDict({"mpt": mpt, "neox": neox})
    assert len(fused_of(mpt)) == len(fused_of(neox)) == 1 and not fused_of(both)


def test_wrapped_modules_are_seen_through() -> None:
    model, attention = phi3()
    plain = fused_of(model)
    attention.qkv_proj = checkpoint_wrapper(attention.qkv_proj)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert fused_of(model) == plain and len(plain) == 2


# torchtitan's modules, known by their attributes, and what they do with the outputs
class FusedQKVLinear(nn.Module):
    """Every group of queries has these, their key and their value."""

    def __init__(self, inputs: int = 24, heads: int = 6, kv_heads: int = 3, size: int = 4) -> None:
        super().__init__()
        self.heads_per_kv, self.head_dim, self.r_dim = heads // kv_heads, size, heads // kv_heads + 2
        self.wqkv = nn.Linear(inputs, kv_heads * self.r_dim * size, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        grouped = self.wqkv(x).unflatten(-1, (-1, self.r_dim, self.head_dim))
        return dict(zip("qkv", grouped.split([self.heads_per_kv, 1, 1], dim=-2)))


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
def test_parts_of_torchtitans_weights_are_what_its_modules_cut(module: Any, expected: dict[str, list[str]]) -> None:
    """The rows that have a gradient are those that a part depends on."""
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


def test_gate_and_up_that_lie_side_by_side_are_two_matrices_of_each_expert_or_as_set() -> None:
    """(experts, outputs, 2, inputs), with torchtitan's option ``fused_swiglu``."""
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


# Reasons
def reasons_of(model: nn.Module, **options: object) -> dict[str, str]:
    rules, config = settings_of(HostConfig, options, "test")
    found = group_parameters(model, [{"params": list(model.parameters())}], rules, config)
    return {r.name.removesuffix(".weight"): r.reason for r in found.routes}


def test_the_reason_tells_the_parts_and_whose_they_are_or_why_a_weight_stays_whole() -> None:
    latent = Attention()
    latent.v_head_dim = 9
    model = nn.ModuleDict(
        {
            **{"m": FusedQKVLinear(), "a": Attention(), "phi3": phi3()[0], **side_by_side(), "last": nn.Linear(8, 8)},
            **{"b": FusedQKVLinear(heads=1, kv_heads=1, size=1), "c": latent},
        }
    )
    found = reasons_of(model, atoms={"*.o_proj.weight": {"heads": 8}})
    layer, misfit = "phi3.model.layers.0", "2-D weight: whole, as the sizes that {} has for its parts do not add up"
    expected = {
        "m.wqkv": "2-D weight: q, k, v, as FusedQKVLinear has them",
        "a.wq": "2-D weight: q_nope, q_rope, as Attention has them",
        "a.wkv_b": "2-D weight: k_nope, v, as Attention has them",
        "a.wo": "2-D weight",
        "b.wqkv": "2-D weight: whole, as a part of it that FusedQKVLinear has is one row",
        **dict.fromkeys(("c.wq", "c.wkv_b"), misfit.format("Attention")),
        "c.wkv_a": "2-D weight: kv, k_rope, as Attention has them",
        "moe.w13": "3 stacked experts: 3 slices of gate, up, side by side",
        "shared_experts.w13": "3-D weight: gate, up, side by side",
        f"{layer}.self_attn.qkv_proj": "2-D weight: q, k, v, as Phi3Attention has them",
        f"{layer}.self_attn.o_proj": "2-D weight: head0, head1, ... head7, set by atoms '*.o_proj.weight'",
        f"{layer}.mlp.down_proj": "2-D weight",
    }
    assert {name: found[name] for name in expected} == expected
    for key, value in (("head_dim", 7), ("r_dim", 5), ("heads_per_kv", 3)):
        module = FusedQKVLinear()
        setattr(module, key, value)
        assert reasons_of(nn.Sequential(module))["0.wqkv"] == misfit.format("FusedQKVLinear")
    assert {name: each.reason for name, each in divided_of(stack_of("mixtral.MixtralExperts")).items()} == {
        "experts.gate_up_proj": "4 slices of gate, up, as MixtralExperts has them",
        "experts.down_proj": "4 slices",
    }


# Settings
def linears(**shapes: tuple[int, int]) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(inputs, outputs, bias=True) for name, (outputs, inputs) in shapes.items()})


def test_settings_divide_outputs_by_name() -> None:
    settings = {"a.*": {"qkv": [8, 2, 2]}, "b.weight": {"qkv": [2, 1, 1], "groups": 3}, "c.*": {"heads": 3}}
    settings |= {"d.*": {"split_sizes": [3, 1], "groups": 3}, "[de].weight": {"gate_up": "interleaved"}}
    settings |= {"f.weight": {"gate_up": "halves"}}
    found = divided_of(linears(**dict.fromkeys("abcdef", (12, 4))), settings)
    assert {name[0]: {b.name: sorted(outputs_of(b)) for b in each.blocks} for name, each in found.items()} == {
        "a": {"q": list(range(8)), "k": [8, 9], "v": [10, 11]},
        "b": {"q": [0, 1, 4, 5, 8, 9], "k": [2, 6, 10], "v": [3, 7, 11]},
        "c": {"head0": [0, 1, 2, 3], "head1": [4, 5, 6, 7], "head2": [8, 9, 10, 11]},
        "d": {"part0": [0, 1, 2, 4, 5, 6, 8, 9, 10], "part1": [3, 7, 11]},  # the first glob counts
        "e": {"gate": [0, 2, 4, 6, 8, 10], "up": [1, 3, 5, 7, 9, 11]},
        "f": {"gate": list(range(6)), "up": list(range(6, 12))},
    }


def test_globs_may_match_in_another_part_of_the_model() -> None:
    stages = linears(a=(12, 4)), linears(b=(12, 4))
    routes, settings = [routed(stage) for stage in stages], AtomSettings.parse({"a.*": {"heads": 3}})
    assert len(divide(stages[0], routes[0], settings, elsewhere=routes[1])["a.weight"].blocks) == 3
    assert len(divide(stages[1], routes[1], settings, elsewhere=routes[0])["b.weight"].blocks) == 1
    with pytest.raises(ValueError, match=r"atoms: 'a.\*' matches no parameter name"):
        divide(stages[1], routes[1], settings)


def test_settings_come_before_what_is_known_and_are_about_outputs() -> None:
    (whole,) = divided_of(phi3()[0], {"*qkv_proj*": "whole"})[PHI3].blocks
    assert whole.is_everything
    parts = divided_of(phi3()[0], {"*qkv_proj*": {"split_sizes": [48, 16]}})[PHI3].blocks
    assert [part.name for part in parts] == ["part0", "part1"]
    blocks = divided_of(MODELS["gpt2"][0](), {"*c_proj*": {"heads": 4}})["transformer.h.0.attn.c_proj.weight"].blocks
    assert [(block.rows, block.columns) for block in blocks] == [(Stripes(0, 32), Stripes(8 * n, 8)) for n in range(4)]
    experts = divided_of(stack_of("mixtral.MixtralExperts"), {"*.down_proj": {"heads": 2}})
    blocks = experts["experts.down_proj"].blocks
    assert [block.of("w") for block in blocks[:3]] == ["w[0].head0", "w[0].head1", "w[1].head0"]
    assert [block.shape for block in blocks] == [(16, 48)] * 8


def test_parameters_of_more_dimensions_become_matrices_where_a_setting_says_how() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 2), "back": nn.ConvTranspose2d(3, 8, 2), "a": nn.Linear(4, 4)})
    settings = AtomSettings.parse({"conv.*": "flatten", "back.*": "stack", "a.weight": "whole"})
    asked = {name: settings.makes_matrix([name], param.shape) for name, param in model.named_parameters()}
    assert asked["conv.weight"] == "4-D, set by atoms 'conv.*'" and asked["back.weight"] == "4-D, set by atoms 'back.*'"
    assert asked["conv.bias"] is asked["a.weight"] is asked["a.bias"] is None
    assert AtomSettings.parse({"conv.*": "whole"}).makes_matrix(["conv.weight"], (8, 3, 2, 2)) is None
    routes = [replace(each, kind="matrix") if asked[each.name] else each for each in routed(model)]
    found = divide(model, routes, settings)
    (kernel,) = found["conv.weight"].blocks
    assert kernel.shape == (8, 12) and kernel.is_everything and len(found["back.weight"].blocks) == 24
    with pytest.raises(ValueError, match=r"atoms '\*': 'back.weight' belongs to a transposed convolution"):
        divide(model, [each for each in routes if "back" in each.name], AtomSettings.parse({"*": "flatten"}))


FITS_NOT = r"atoms 'a.\*': 'a.weight' of shape \(12, 4\): expected "
WRONG: Any = [
    ({"a.wieght": "whole"}, r"atoms: 'a.wieght' matches no parameter name; did you mean 'a.weight'\?"),
    ({"a.bias": "whole"}, r"'a.bias' matches only parameters that no matrix rule updates, such as 'a.bias' \(elem"),
    ({"a.*": {"qkv": [8, 2, 3]}}, rf"{FITS_NOT}sizes whose sum is its 12 outputs, found 8\+2\+3; correct"),
    ({"a.*": {"qkv": [2, 1, 1], "groups": 4}}, rf"{FITS_NOT}sizes whose sum is its 12 outputs, found 2\+1\+1, 4 times"),
    ({"a.*": {"heads": 5}}, rf"{FITS_NOT}5 equal parts, found 12 outputs"),
    ({"odd.*": {"gate_up": "halves"}}, r"expected 2 equal parts, found 7 outputs"),
    ({"a.*": {"head": 3}}, r"atoms 'a.\*': unknown key 'head'; did you mean 'heads'\?"),
    ({"a.*": {"qkv": [8, 4]}}, r"atoms 'a.\*': qkv"),
    ({"a.*": {"qkv": [8, 2, "2"]}}, r"qkv.2: input should be a valid integer; found '2'"),
    ({"a.*": {"gate_up": "half"}}, r"gate_up: input should be 'halves' or 'interleaved'; found 'half'"),
    ({"a.*": {"heads": 2, "gate_up": "halves"}}, r"expected one of .*; found 'heads' and 'gate_up'"),
    ({"a.*": {"split_sizes": []}}, r"expected one of 'split_sizes', .* with sizes; found 'split_sizes'"),
    ({"a.*": {}}, r"expected one of 'split_sizes', 'heads', 'qkv', 'gate_up', with sizes; found none"),
    ({"a.*": {"heads": 2, "groups": 2}}, r"expected 'groups' with 'qkv' or 'split_sizes' only, found it with 'heads'"),
    ({"a.*": "hole"}, r"atoms 'a.\*': unknown word 'hole'; did you mean 'whole'\?"),
    ({"a.*": 12}, r"atoms 'a.\*': expected one of 'whole', 'stack', 'flatten' or a mapping .*; found 12"),
    ({"a.weight": "stack"}, r"shape \(12, 4\): 'stack' is for parameters of three dimensions or more"),
    ({"a.weight": "flatten"}, r"'flatten' is for parameters of three dimensions or more"),
    (["a.*"], r"atoms: expected a mapping of globs to divisions; found \['a.\*'\]"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divided_of(linears(a=(12, 4), odd=(7, 3)), settings)


# Heads
PER_HEAD: dict[str, Any] = {"matrix": {"name": "muon", "per_head": True}}
FUSED_HEADS = ("gpt2", "falcon by group", "codegen", "big code, one kv head", "bloom", "mpt", "phi3", "neox")


def heads_of(model: nn.Module, **options: Any) -> dict[str, tuple[Block, ...]]:
    rules, config = settings_of(HostConfig, {**PER_HEAD, **options}, "test")
    found = group_parameters(model, [{"params": list(model.parameters())}], rules, config).divided
    return {name: d.blocks for name, d in found.items() if ".head" in d.blocks[0].of("")}


@pytest.mark.parametrize("case", FUSED_HEADS)
def test_heads_of_a_fused_weight_are_what_attention_multiplies(case: str) -> None:
    model = MODELS[case][0]().eval()
    ((name, blocks),) = heads_of(model).items()
    used = watched(model, TOKEN, name).heads
    assert {frozenset(outputs) for part, outputs in named(blocks).items() if part[0] in "qk"} <= used
    assert sum(block.numel for block in blocks) == model.get_parameter(name).numel()


OF_DEEPSPEED: dict[str, Make] = {
    **{case: MODELS[case][0] for case in ("DeepseekV3", "DeepseekV2, plain queries", "GlmMoeDsa", "Youtu")},
    "llama": lm("Llama", **GROUPED),
    "bert": bare("Bert", **TINY, intermediate_size=64),
}


@pytest.mark.parametrize("case", OF_DEEPSPEED)
def test_heads_of_other_weights_are_as_many_as_deepspeeds_per_head_muon_has(case: str) -> None:
    model = OF_DEEPSPEED[case]()
    theirs = {name: of_deepspeed(name, param, model) for name, param in model.named_parameters()}
    assert {name: len(blocks) for name, blocks in heads_of(model).items()} == {n: c for n, c in theirs.items() if c}
    assert any(theirs.values())


class Jordans(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.n_head, self.c_attn = 4, nn.Linear(32, 96)
        vars(self).update(attributes)


def apart(**attributes: Any) -> nn.Module:
    module = nn.ModuleDict({f"{name}_proj": nn.Linear(32, 32) for name in "qkv"})
    vars(module).update(attributes)
    return module


UNKNOWN_HEADS: list[tuple[nn.Module, str]] = [
    (Jordans(), "'0.c_attn.weight': expected attention with known heads, but Jordans is not known by how it lays out"),
    (apart(), "ModuleDict has 32 outputs, and neither it nor a configuration has the size of a head. Set the "),
    (apart(head_dim=5), "ModuleDict has 32 outputs, which heads of 5 do not divide"),
    (apart(head_dim=8, num_heads=2), "ModuleDict has 32 outputs, 4 heads of 8, but 2 heads are declared"),
    (nn.Linear(8, 8), "expected a query, key or value weight of a known kind, found none in '0.weight', ...; name th"),
]


@pytest.mark.parametrize(("module", "message"), UNKNOWN_HEADS)
def test_heads_that_cannot_be_told_are_errors_and_atoms_tells_them(module: nn.Module, message: str) -> None:
    model = nn.Sequential(module)
    with pytest.raises(ValueError, match=re.escape(message)):
        heads_of(model)
    assert {len(blocks) for blocks in heads_of(model, atoms={"*.weight": {"heads": 4}}).values()} == {4}
    rules, config = settings_of(HostConfig, PER_HEAD, "test")
    with pytest.raises(ValueError, match="per_head"):  # by shapes alone, nothing is known
        Training(rules, config).of(routed(model))
