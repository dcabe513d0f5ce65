"""Fused weights of many families against a truth written by hand: what each forward takes as its parts."""

import importlib
import inspect
import re
import typing
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.unit.routing.test_fused_weights import divided_of, outputs_of

SIZES: dict[str, Any] = {  # of every configuration
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_heads": 4},
    **{"embed_dim": 32, "intermediate_size": 48, "moe_intermediate_size": 20, "max_position_embeddings": 16},
    **{"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "qk_head_dim": 10, "v_head_dim": 12},
    **{"q_lora_rank": 14, "index_n_heads": 2, "index_head_dim": 8, "num_experts_per_tok": 2},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 3),
    **{"mamba_expand": 2, "expand": 2, "mamba_n_heads": 4, "mamba_num_heads": 4, "n_mamba_heads": 4},
    **{"mamba_d_head": 16, "mamba_head_dim": 16, "mamba_headdim": 16, "mamba_d_ssm": 64, "mamba_d_state": 5},
    **{
        "ssm_state_size": 5,
        "state_size": 5,
        "mamba_n_groups": 2,
        "mamba_ngroups": 2,
        "n_groups": 2,
        "vocab_size": 50,
        "num_hidden_layers": 1,
    },
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
}
MAMBA = {"in_proj.weight": "gate 0+64 x 64+64 B 128+10 C 138+10 dt 148+4"}
QUERIES, COMPRESSED = "q_nope 0+6*4/10 q_rope 6+4*4/10", "kv 0+8 k_rope 8+4"
KEYS_VALUES = "k_nope 0+6*4/18 v 6+12*4/18"
LATENT = {"q_b_proj.weight": QUERIES, "kv_a_proj_with_mqa.weight": COMPRESSED, "kv_b_proj.weight": KEYS_VALUES}
THIRDS = {"qkv.weight": "q 0+32 k 32+32 v 64+32"}
HALVES = {"gate_up_proj.weight": "gate 0+48 up 48+48"}
EXPERTS = {"gate_up_proj": "gate 0+20 up 20+20"}
DELTA = {"layer_types": ["linear_attention"], "in_proj_qkv.weight": "q 0+16 k 16+16 v 32+24"}

MAMBA_1 = {"mamba_dt_rank": 3, "time_step_rank": 3, "in_proj.weight": "x 0+64 gate 64+64"}
SHORT = {"layer_types": ["conv"], "in_proj.weight": "B 0+32 C 32+32 x 64+32"}
KV = {"to_kv.weight": "k 0+32 v 32+32"}
IMAGES = {"image_size": 32, "patch_size": 8}
INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 6, "indexer_budget": 4}
INDEXED["indexer_compress_ratio"] = 2

# Of each class, with what its constructor takes beside the configuration: the parts of its weights, `start+length` or
# `start+length*count/pitch`, in the order of their outputs; and what differs from SIZES. `whole`: no parts; `named`:
# these parts, but ours only says that the weight looks fused.
TRUTH: dict[str, dict[str, Any]] = {
    "bamba.BambaMixer 0": MAMBA,
    "nemotron_h.NemotronHMamba2Mixer 0": MAMBA,
    "zamba2.Zamba2MambaMixer 0": MAMBA,
    "falcon_h1.FalconH1Model": {f"layers.0.mamba.{key}": value for key, value in MAMBA.items()},
    "granitemoehybrid.GraniteMoeHybridMambaLayer 0": MAMBA,
    "lfm2_moe.Lfm2MoeShortConv 0": SHORT,
    "lfm2_moe.Lfm2MoeExperts": EXPERTS,
    "glm5_next.Glm5NextTextAttention 0": {**LATENT, "q_b_proj.weight": "whole", "indexer_types": ["full"]},
    "glm5_next.Glm5NextVisionAttention": THIRDS,
    "mistral4.Mistral4Attention 0": LATENT,
    "hy_v4.HYV4Attention 0": {**LATENT, "indexer_types": ["full"]},
    "axk2.AXK2Attention 0": {
        "q_gate_proj.weight": "q_nope 0+6*4/22 q_rope 6+4*4/22 gate 10+12*4/22",
        **{"kv_a_proj_with_mqa.weight": COMPRESSED, "kv_b_proj.weight": KEYS_VALUES},
    },
    "dots3_note.Dots3NoteTextAttention 0": LATENT,
    "dots3_note.Dots3NoteAudioMLP": HALVES,
    "dots3_note.Dots3NoteVisionAttention": THIRDS,
    "bailing_hybrid.BailingHybridAttention 0": LATENT,
    "qwen4_exp.Qwen4ExpTextGatedDeltaNet 0": DELTA,
    "qwen4_exp.Qwen4ExpTextAttention 0": {
        **INDEXED,
        **{"q_proj.weight": "q 0+8*4/16 gate 8+8*4/16", "indexer.index_qk_proj.weight": "q 0+12 token_k 12+6"},
    },
    "qwen4_exp.Qwen4ExpVisionAttention": THIRDS,
    "lara_mini.LaraMiniGatedDeltaNet 0": DELTA,
    "minimax_m3_vl.MiniMaxM3VLDenseMLP 48": HALVES,
    "glm_ocr.GlmOcrTextMLP": {**HALVES, "config": "GlmOcrText"},
    "glm_ocr.GlmOcrVisionAttention": THIRDS,
    "mamba2.Mamba2Mixer 0": {**MAMBA, "head_dim": 16},
    # The width of the inputs is not among those that are tried
    "mamba.MambaMixer 0": {**MAMBA_1, "intermediate_size": 64},
    "falcon_mamba.FalconMambaMixer 0": {**MAMBA_1, "intermediate_size": 64},
    "jamba.JambaMambaMixer 0": MAMBA_1,
    "zamba.ZambaMambaMixer 0": {"in_proj.weight": "x 0+1*64/2 gate 1+1*64/2"},
    "lfm2.Lfm2ShortConv 0": SHORT,
    "lfm3.Lfm3ShortConv 0": SHORT,
    "lfm3_vl.Lfm3VlVisionShortConv 0": {"in_proj.weight": "input_gate 0+32 output_gate 32+32 conv_input 64+32"},
    "mistral_large4.MistralLarge4TextAttention 0": {
        **{"q_proj.weight": QUERIES, "kv_a_proj_with_mqa.weight": COMPRESSED, "kv_b_proj.weight": KEYS_VALUES},
    },
    "hy_v4_vl.HYV4VLAttention 0": {**LATENT, "indexer_types": ["full"]},
    "granite_speech.GraniteSpeechConformerAttention": {**KV, "hidden_dim": 32, "dim_head": 8},
    "granite_speech_plus.GraniteSpeechPlusConformerAttention": {**KV, "hidden_dim": 32, "dim_head": 8},
    "evolla.EvollaSequenceCompressorAttention 32 8 4": KV,
    "granite_speech5.GraniteSpeech5EncoderConvolutionModule": {"pointwise_lin1.weight": "up 0+64 gate 64+64"},
    "gemma4.Gemma4AudioLightConv1d": {"linear_start.linear.weight": "up 0+32 gate 32+32"},
    "gemma3n.Gemma3nAudioConformerLightConv1d": {"linear_start.weight": "up 0+32 gate 32+32"},
    "granitemoe_swa.GraniteMoeSWAMLP": {"shared_intermediate_size": 48, "input_linear.weight": "gate 0+48 up 48+48"},
    "glm_image.GlmImageVisionAttention": THIRDS,
    "glm_image.GlmImageTextMLP": {**HALVES, "config": "GlmImageText"},
    "cohere_compass.CohereCompassVisionAttention": THIRDS,
    "deepseek_ocr2.DeepseekOcr2SamVisionAttention 0": {**THIRDS, **IMAGES, "config": "DeepseekOcr2SamVision"},
    "pp_formulanet.PPFormulaNetVisionAttention 0": {**THIRDS, **IMAGES, "config": "PPFormulaNetVision"},
    "slanext.SLANeXtVisionAttention 0": {**THIRDS, **IMAGES, "config": "SLANeXtVision"},
    "pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention": {**THIRDS, "config": "PPOCRV5MobileRec"},
    "timesformer.TimesformerSelfAttention": THIRDS,
    "siglip.SiglipMultiheadAttentionPoolingHead": {"attention.in_proj_weight": THIRDS["qkv.weight"]},
    "layoutlmv2.LayoutLMv2SelfAttention": {
        **{"config": "LayoutLMv2", "fast_qkv": True, "qkv_linear.weight": "q 0+32 k 32+32 v 64+32"},
    },
    "deberta.DisentangledSelfAttention": {"config": "Deberta", "in_proj.weight": "q 0+8*4/24 k 8+8*4/24 v 16+8*4/24"},
    "levit.LevitAttention 32 8 4 2 4": {
        "queries_keys_values.linear.weight": "q 0+8*4/32 k 8+8*4/32 v 16+16*4/32",
    },
    "clvp.ClvpGatedLinearUnit": {"config": "ClvpEncoder", "proj.weight": "up 0+48 gate 48+48"},
    "cohere2_vision.Cohere2VisionMultiModalProjector": {
        **{"config": "Cohere2Vision", "linear_1.weight": "named up 0+18432 gate 18432+18432"},
    },
    "aya_vision.AyaVisionMultiModalProjector": {
        **{"config": "AyaVision", "linear_1.weight": "named up 0+4096 gate 4096+4096"},
    },
    "moshi.MoshiGatingMLP": {"config": "Moshi", "ffn_dim": 96, "fc1.weight": "named gate 0+48 up 48+48"},
    "esmfold2.EsmFold2SwiGLU 32 48": HALVES,
    "esmfold2.EsmFold2TriangleMultiplicativeUpdate": {
        **{"pairwise_hidden_size": 8, "proj_bundle.weight": "up 0+16 gate 16+16"},
    },
    "xlstm.xLSTMLayer": {
        **{"weight_mode": "fused", "qkv_opreact.weight": "q 0+16 k 16+16 v 32+32 o_preact 64+32"},
        "ifgate_preact.weight": "i_preact 0+4 f_preact 4+4",
    },
    "jetmoe.JetMoeAttention 0": {"kv_channels": 16, "kv_proj.weight": "named k 0+32 v 32+32"},
    "beam.BeamExperts": EXPERTS,
    "inkling2.Inkling2Experts": EXPERTS,
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": {
        **{"config": "OpenAIPrivacyFilter", "gate_up_proj": "gate 0+48 up 48+48"},
    },
    "qwen2_5_omni.Qwen2_5_OmniAdaLayerNormZero 16": {
        "linear.weight": "shift_msa 0+16 scale_msa 16+16 gate_msa 32+16 shift_mlp 48+16 scale_mlp 64+16 gate_mlp 80+16",
    },
    "wavlm.WavLMAttention 32 4": {"gru_rel_pos_linear.weight": "gate_a 0+4 gate_b 4+4"},
}


PARAM = re.compile(r"weight$|proj$")


def built(case: str, options: dict[str, Any]) -> nn.Module:
    """The module in a model on the meta device."""
    kind, *arguments = case.split()
    family, name = kind.split(".")
    found = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        if "config" not in inspect.signature(found).parameters:
            return nn.ModuleDict({"m": found(*map(int, arguments))})
        hint = inspect.signature(found).parameters["config"].annotation
        made = hint if inspect.isclass(hint) else (*typing.get_args(hint), None)[0]
        config: Any = getattr(hf, f"{options['config']}Config")() if "config" in options else made()
        vars(config).update({**SIZES, **options})
        config._attn_implementation = config._experts_implementation = "eager"
        return nn.ModuleDict({"m": found(config, *map(int, arguments))})


def parts_in(truth: str) -> list[tuple[str, set[float]]]:
    words = truth.split()
    return [(name, rows_in(rows)) for name, rows in zip(words[::2], words[1::2])]


def rows_in(text: str) -> set[float]:
    start, length, *repeated = (int(number) for number in text.replace("*", "+").replace("/", "+").split("+"))
    count, pitch = repeated or (1, 0)
    return {float(start + pitch * one + row) for one in range(count) for row in range(length)}


@pytest.mark.parametrize("case", TRUTH)
def test_parts_are_those_that_the_code_takes(case: str) -> None:
    options = {key: value for key, value in TRUTH[case].items() if not PARAM.search(key)}
    found = divided_of(built(case, options))
    for name in TRUTH[case].keys() - options.keys():
        blocks = [block for block in found[f"m.{name}"].blocks if block.slice == 0]
        parts = [(block.name.removeprefix("[0]").removeprefix("."), outputs_of(block)) for block in blocks]
        if TRUTH[case][name].startswith(("whole", "named")):
            assert len(parts) == 1 and found[f"m.{name}"].looks_fused == TRUTH[case][name].startswith("named"), name
        else:
            truth = parts_in(TRUTH[case][name])
            assert [rows for _, rows in parts] == [rows for _, rows in truth], name
            assert all(ours in (theirs, f"part{n}") for n, ((ours, _), (theirs, _)) in enumerate(zip(parts, truth)))
