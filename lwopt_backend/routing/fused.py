"""Fused weights of known models: which outputs are q, k and v, or gate and up.

A layout is recognised by the class whose ``forward`` runs (torchtitan's modules by their attributes), and used only if
the sizes agree with the module's attributes and with the linear that takes the result. An unknown weight stays whole,
as in other optimizers; a wrong guess would be worse. Copies of Hugging Face's modelling code in other packages
(``trust_remote_code``) may differ, and are not examined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lwopt_backend.plan.atoms import Parts, equal, grouped
from lwopt_backend.routing.models import LoRA, all_lora

Sizes = Callable[[Tensor], tuple[int, int] | None]  # outputs and inputs of a matrix parameter, or of a stack


@dataclass(frozen=True, slots=True)
class Fusion:
    """The parts of a weight's outputs and, if these are divided as well, of its inputs; empty: not divided.

    ``why`` is where the parts are from, or why a known weight stays whole.
    """

    outputs: Parts = ()
    inputs: Parts = ()
    why: str = ""


def fused_weights(model: nn.Module, sizes: Sizes) -> dict[int, Fusion]:
    """The known parts of weights, by the weight's id.

    ``sizes`` returns the outputs and inputs of a parameter, None if it is neither a matrix nor a stack of them.
    """
    found: dict[int, Fusion] = {}
    disputed: set[int] = set()  # weights that two modules share and use in two ways
    for module in model.modules():
        name, recipes = _recipes(module)
        for fused in recipes:
            weight = weight_of(module, fused.weight)
            out = weight if fused.out is None else weight_of(module, fused.out)
            ours, theirs = (None if each is None else sizes(each) for each in (weight, out))
            if weight is None or ours is None or theirs is None:
                continue
            fusion = _fusion(module, name, fused, ours[0], theirs[0 if fused.out is None else 1])
            if fusion is not None and found.setdefault(id(weight), fusion).outputs != fusion.outputs:
                disputed.add(id(weight))
    found = {weight: fusion for weight, fusion in found.items() if weight not in disputed}
    for lora in all_lora(model):
        found.update(_of_lora(lora, found, sizes))
    return found


def _fusion(module: nn.Module, name: str, fused: Fused, outputs: int, width: int) -> Fusion | None:
    """The parts of ``outputs``, if the sizes add up and the part that is taken is ``width``."""
    try:
        layout = fused.layout(module, width)
    except (AttributeError, TypeError, ZeroDivisionError):  # a version of the module without these attributes
        return Fusion(why=f"whole, as {name} lacks the sizes of its parts")
    if layout is None:
        return None
    names, sizes, groups = layout
    fits = fused.taken is None or sizes[fused.taken] * groups == width
    if min(*sizes, groups) < 1 or sum(sizes) * groups != outputs or not fits:
        return Fusion(why=f"whole, as the sizes that {name} has for its parts do not add up")
    if min(sizes) * groups == 1:
        return Fusion(why=f"whole, as a part of it that {name} has is one row")
    return Fusion(grouped(names, sizes, groups), why=f"as {name} has them")


def _of_lora(lora: LoRA, found: dict[int, Fusion], sizes: Sizes) -> dict[int, Fusion]:
    """The parts of LoRA's factors: B has the outputs of the weight that it changes.

    For a stack of experts, PEFT has the A and B of all of them in one parameter each.
    """
    changed = getattr(lora.base, lora.key, None)
    changed = getattr(lora.base, "in_proj_weight", None) if changed is None else changed  # torch's attention
    base, of_a, of_b = found.get(id(changed), Fusion()), sizes(lora.a), sizes(lora.b)
    if of_a is None or of_b is None:
        return {}
    if sum(part.size for _, part in base.outputs) not in (0, of_b[0]):
        base = Fusion()
    if lora.stacked == 1:
        return {id(lora.b): base} if base.why else {}
    rank, names = of_a[0] // lora.stacked, [f"expert{number}" for number in range(lora.stacked)]
    in_turn, why = grouped(names, [1] * lora.stacked, rank), "as PEFT has them"
    return {
        id(lora.a): Fusion(equal(lora.stacked, rank, "expert"), why=why),
        id(lora.b): Fusion(base.outputs, in_turn, why),
    }


def _recipes(module: nn.Module) -> tuple[str, tuple[Fused, ...]]:
    """The name of the class whose ``forward`` the module runs, and the fused weights known of it."""
    runs = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    if runs is nn.MultiheadAttention:
        return runs.__name__, (Fused("in_proj_weight", "out_proj", THIRDS),)
    for attributes, recipes in BY_ATTRIBUTES:
        if all(hasattr(module, attribute) for attribute in attributes):
            return runs.__name__, recipes
    package, _, path = runs.__module__.partition("models.")
    if package != "transformers.":
        return "", ()
    if all(isinstance(getattr(module, flag, None), bool) for flag in ("has_gate", "is_concatenated", "is_transposed")):
        return runs.__name__, (Fused("gate_up_proj", "down_proj", experts),)
    return runs.__name__, TABLE.get(f"{path.partition('.')[0]}.{runs.__name__}", ())


def weight_of(module: nn.Module, name: str) -> Tensor | None:
    """The parameter ``name`` of a module, or the weight of its child of that name."""
    found = getattr(module, name, None)
    found = found if isinstance(found, Tensor) else getattr(found, "weight", None)
    return found if isinstance(found, Tensor) else None


# The layouts of models' fused weights: q, k and v, the parts of latent attention (MLA), or gate and up. Read from the
# modelling code of transformers 5.23, class by class; torchtitan's are below. ``fused_weights`` compares ``taken`` and
# the sizes of a layout with the weights themselves.

Outputs = tuple[tuple[str, ...], tuple[int, ...], int]  # names and sizes of the parts, and the number of groups of them
Layout = Callable[[Any, int], Outputs | None]
QKV = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class Fused:
    """``weight`` of a module has the layout ``layout``; ``out`` takes what part number ``taken`` leads to.

    ``layout`` is called with the module and the inputs of ``out``; without ``out``, the outputs of ``weight`` itself.
    Without ``taken``, the layout itself checks the inputs of ``out``.
    """

    weight: str
    out: str | None
    layout: Layout
    taken: int | None = 0


def _equal(*names: str) -> Layout:
    """Parts of the same size, one after the other."""
    return lambda module, width: (names, (width,) * len(names), 1)


def _by_head(size: str) -> Layout:
    """q, k and v of one head after another; the module's attribute ``size`` is a head's size."""
    return lambda module, width: (QKV, (getattr(module, size),) * 3, width // getattr(module, size))


def _fewer_keys(module: Any, width: int) -> Outputs:
    size = module.num_key_value_heads * module.head_dim
    return ("q", "k", "v"), (width, size, size), 1


def _big_code(module: Any, width: int) -> Outputs | None:
    if module.is_cross_attention:
        return None
    if module.multi_query:
        return QKV, (module.embed_dim, module.kv_dim, module.kv_dim), 1
    return _by_head("head_dim")(module, width)


def _falcon(module: Any, width: int) -> Outputs | None:
    size = module.head_dim
    if module.new_decoder_architecture:
        queries = module.num_heads // module.num_kv_heads
        return ("q", "k", "v"), (queries * size, size, size), module.num_kv_heads
    if module.multi_query:
        return ("q", "k", "v"), (width, size, size), 1
    return _by_head("head_dim")(module, width)


def _delta_net_qkvz(module: Any, width: int) -> Outputs:
    keys, values = module.head_k_dim, module.num_v_heads // module.num_k_heads * module.head_v_dim
    return ("q", "k", "v", "z"), (keys, keys, values, values), module.num_k_heads


def _delta_net_ba(module: Any, width: int) -> Outputs:
    values = module.num_v_heads // module.num_k_heads
    return ("b", "a"), (values, values), module.num_k_heads


def _latent_queries(module: Any, width: int) -> Outputs:
    heads = 0 if width % module.v_head_dim else width // module.v_head_dim
    return ("q_nope", "q_rope"), (module.qk_nope_head_dim, module.qk_rope_head_dim), heads


def latent(queries: Sequence[str], compressed: str, expanded: str, out: str) -> tuple[Fused, ...]:
    """Latent attention in weights with these names; models without a compressed query have the first of ``queries``.

    The matrices are those of DeepSeek's report (arXiv 2405.04434, 2.1): W_UQ and W_QR in the queries' weight, W_DKV and
    W_KR in the one that compresses, W_UK and W_UV in the one that expands.
    """

    def compresses(module: Any, width: int) -> Outputs:
        return ("kv", "k_rope"), (module.kv_lora_rank, module.qk_rope_head_dim), 1

    def expands(module: Any, width: int) -> Outputs:
        return ("k_nope", "v"), (module.qk_nope_head_dim, module.v_head_dim), width // module.v_head_dim

    by_query = (Fused(weight, out, _latent_queries, taken=None) for weight in queries)
    return *by_query, Fused(compressed, expanded, compresses), Fused(expanded, out, expands, taken=1)


GATE_UP = _equal("gate", "up")  # the gate is what goes through the activation
UP_GATE = _equal("up", "gate")


def gate_up_in_turn(module: Any, width: int) -> Outputs:
    return ("gate", "up"), (1, 1), width


def experts(module: Any, width: int) -> Outputs | None:
    """Experts' attributes say how gate and up are stored, and the gate's gradients for four outputs must agree."""
    if not module.has_gate:
        return None
    with torch.enable_grad():
        outputs = torch.tensor([[0.5, 0.6, 0.7, 0.8]], requires_grad=True)
        try:
            (used,) = torch.autograd.grad(module._apply_gate(outputs)[0, 0], outputs)
        except RuntimeError:  # an activation with tensors on another device
            return None
    expected = [True, False, True, False] if module.is_concatenated else [True, True, False, False]
    if (used[0] != 0).tolist() != expected:
        return None
    return (GATE_UP if module.is_concatenated else gate_up_in_turn)(module, width)


THIRDS = _equal(*QKV)
MLA = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")  # what compresses keys and values, what expands them, the output

# What is fused, and in which classes, as in ``transformers.models.<family>.modeling_<family>.<class>``
CLASSES: Sequence[tuple[tuple[Fused, ...], str]] = [
    (
        (Fused("c_attn", "c_proj", lambda m, width: (_equal("k", "v") if m.is_cross_attention else THIRDS)(m, width)),),
        """gpt2.GPT2Attention imagegpt.ImageGPTAttention
        decision_transformer.DecisionTransformerGPT2Attention""",
    ),
    ((Fused("c_attn", "c_proj", THIRDS),), "openai.Attention"),
    ((Fused("c_attn", "c_proj", _big_code),), "gpt_bigcode.GPTBigCodeAttention"),
    (
        (Fused("query_key_value", "dense", _by_head("head_size")),),
        "gpt_neox.GPTNeoXAttention gpt_neox_japanese.GPTNeoXJapaneseAttention",
    ),
    ((Fused("query_key_value", "dense", _by_head("head_dim")),), "bloom.BloomAttention persimmon.PersimmonAttention"),
    ((Fused("query_key_value", "dense", _falcon),), "falcon.FalconAttention"),
    ((Fused("qkv_proj", "out_proj", _by_head("head_dim")),), "minimax.MiniMaxLightningAttention"),
    (  # in four groups, one for each of the cores that it was trained on, and v before k
        (Fused("qkv_proj", "out_proj", lambda module, width: (("q", "v", "k"), (width // 4,) * 3, 4)),),
        "codegen.CodeGenAttention",
    ),
    ((Fused("qkv_proj", "o_proj", _fewer_keys),), "phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention"),
    ((Fused("Wqkv", "out_proj", THIRDS),), "mpt.MptAttention"),
    ((Fused("Wqkv", "out_proj", _fewer_keys),), "dbrx.DbrxAttention"),
    ((Fused("Wqkv", "Wo", THIRDS),), "modernbert.ModernBertAttention"),
    ((Fused("att_proj", "out_proj", THIRDS),), "bark.BarkSelfAttention"),
    (
        (Fused("qkv", "projection", THIRDS),),
        """blip.BlipAttention blip_2.Blip2Attention instructblip.InstructBlipAttention
        instructblipvideo.InstructBlipVideoAttention""",
    ),
    (
        (Fused("qkv", "proj", THIRDS),),
        """florence2.Florence2VisionChannelAttention florence2.Florence2VisionWindowAttention
        glm4v.Glm4vVisionAttention glm4v_moe.Glm4vMoeVisionAttention got_ocr2.GotOcr2VisionAttention
        hiera.HieraMaskUnitAttention mgp_str.MgpstrAttention qwen2_vl.VisionAttention
        qwen2_5_vl.Qwen2_5_VLVisionAttention qwen3_5.Qwen3_5VisionAttention qwen3_5_moe.Qwen3_5MoeVisionAttention
        qwen3_omni_moe.Qwen3OmniMoeVisionAttention qwen3_vl.Qwen3VLVisionAttention
        qwen3_vl_moe.Qwen3VLMoeVisionAttention sam.SamVisionAttention sam2.Sam2MultiScaleAttention
        sam_hq.SamHQVisionAttention seggpt.SegGptAttention ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention
        vitdet.VitDetAttention""",
    ),
    (
        (Fused("qkv", "proj", lambda module, width: (QKV, (module.q_dim, module.kv_dim, module.kv_dim), 1)),),
        "exaone4_5.Exaone4_5_VisionAttention",
    ),
    (
        (Fused("q_proj", "o_proj", lambda m, width: (("q", "gate"), (m.head_dim,) * 2, width // m.head_dim)),),
        "qwen3_next.Qwen3NextAttention qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention",
    ),
    (
        (
            Fused("in_proj_qkvz", "out_proj", _delta_net_qkvz, taken=2),
            Fused("in_proj_ba", None, _delta_net_ba, taken=None),
        ),
        "qwen3_next.Qwen3NextGatedDeltaNet",
    ),
    (
        (Fused("in_proj_qkv", "out_proj", lambda m, width: (QKV, (m.key_dim, m.key_dim, m.value_dim), 1), taken=2),),
        "qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    ),
    (
        (Fused("gate_up_proj", "down_proj", GATE_UP),),
        """phi3.Phi3MLP phi4_multimodal.Phi4MultimodalMLP glm.GlmMLP glm4.Glm4MLP glm4v.Glm4vTextMLP dia.DiaMLP
        zamba2.Zamba2MLP llama4.Llama4TextExperts""",
    ),
    ((Fused("gate_up_proj", "down_proj", UP_GATE),), "phi4_multimodal.Phi4MultimodalAudioMLP"),
    (
        (Fused("input_linear", "output_linear", GATE_UP),),
        "granitemoehybrid.GraniteMoeHybridMLP granitemoeshared.GraniteMoeSharedMLP jetmoe.JetMoeMoE",
    ),
    ((Fused("Wi", "Wo", GATE_UP),), "modernbert.ModernBertMLP modernbert_decoder.ModernBertDecoderMLP"),
    ((Fused("fc1", "fc2", UP_GATE),), "moonshine.MoonshineDecoderMLP"),
    (
        latent(("q_proj", "q_b_proj"), *MLA),
        """axk1.AXK1Attention deepseek_v2.DeepseekV2Attention deepseek_v3.DeepseekV3Attention
        deepseek_v32.DeepseekV32Attention glm4_moe_lite.Glm4MoeLiteAttention glm_moe_dsa.GlmMoeDsaAttention
        longcat_flash.LongcatFlashMLA minicpm3.MiniCPM3Attention youtu.YoutuAttention""",
    ),
    (latent((), *MLA), "kimi_linear.KimiLinearAttention"),  # its queries have no part that is rotated
]
TABLE: Mapping[str, tuple[Fused, ...]] = {name: fused for fused, names in CLASSES for name in names.split()}


def _by_group(module: Any, outputs: int) -> Outputs:
    """torchtitan's: group by group, the queries, their key and their value."""
    queries, size = module.heads_per_kv, module.head_dim
    groups = outputs // (module.r_dim * size) if module.r_dim == queries + 2 else 0
    return ("q", "k", "v"), (queries * size, size, size), groups


# How torchtitan's modules lay out their fused weights, read from its release 0.3.0: attributes that a module must have,
# and its weights. torchtitan is made to be copied and changed: its own variants of a module replace ``forward`` and
# keep the parameters.
BY_ATTRIBUTES: Sequence[tuple[tuple[str, ...], tuple[Fused, ...]]] = [
    (("wqkv", "heads_per_kv", "r_dim", "head_dim"), (Fused("wqkv", None, _by_group, taken=None),)),
    (
        ("wkv_a", "wkv_b", "wo", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        latent(("wq", "wq_b"), "wkv_a", "wkv_b", "wo"),
    ),
    (("mlp1_weight_EGD", "mlp2_weight_EDF"), (Fused("mlp1_weight_EGD", "mlp2_weight_EDF", gate_up_in_turn),)),
]


def side_by_side(name: str, shape: Sequence[int]) -> bool:
    """Gate and up in one parameter of (..., outputs, 2, inputs): ``w13`` of torchtitan's opt-in ``fused_swiglu``."""
    return name.rpartition(".")[2] == "w13" and len(shape) > 2 and shape[-2] == 2 and 0 not in shape


def joined(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which gate and up side by side are the halves of every row; of other parameters, their own."""
    return (*shape[:-2], 2 * shape[-1]) if side_by_side(name, shape) else tuple(shape)
