"""The parameters of a model from shapes, configurations and checkpoints, compared with the model itself."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from lwopt_backend.planner.shapes import ModelShapes, Training, read_hugging_face, read_shapes_json

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 512}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96, **TOKENS}
DEEPSEEK = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 1, **SMALL,
}  # fmt: skip
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 32, **TOKENS}
T5 = {"num_layers": 2, "num_heads": 4, "d_model": 64, "d_kv": 16, "d_ff": 96, "vocab_size": 512}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # configuration, model and sizes
    "llama": ("Llama", "ForCausalLM", SMALL),
    "llama-tied": ("Llama", "ForCausalLM", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "ForCausalLM", {**SMALL, "num_key_value_heads": 2, "head_dim": 16}),
    "opt": ("OPT", "ForCausalLM", {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "mixtral": ("Mixtral", "ForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "deepseek-v3": ("DeepseekV3", "ForCausalLM", DEEPSEEK),
    "roberta-classifier": ("Roberta", "ForSequenceClassification", SMALL),
    "albert": ("Albert", "ForMaskedLM", {**SMALL, "embedding_size": 32}),
    "t5": ("T5", "ForConditionalGeneration", T5),
}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def read_shapes(shapes: ModelShapes) -> dict[str, tuple[int, ...]]:
    assert len({r.name for r in shapes.routes}) == len(shapes.routes)
    return {r.name: r.shape for r in shapes.routes}


def kinds(shapes: ModelShapes) -> dict[str, str]:
    return {name: r.kind for r in shapes.routes for name in (r.name, *r.aliases)}


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# Shapes that the user lists
def test_listed_shapes_keep_their_order(tmp_path: Path) -> None:
    """Every 2-D shape of a list is a matrix."""
    listed = [["z.embedding", [64, 32]], ["a", [3, 3]], ["experts", [4, 8, 8]], ["norm", [32]]]
    listed += [["experts.w", [4, 8, 8]], ["experts.gain", [4, 1, 8]]]
    for content in (listed, dict(listed)):
        shapes = read_shapes_json(written(tmp_path / "mine.json", content))
        assert shapes.source == "mine.json" and shapes.notes == ()
        assert [(r.name, r.shape, r.kind, r.reason) for r in shapes.routes] == [
            ("z.embedding", (64, 32), "matrix", "listed as a matrix"),
            ("a", (3, 3), "matrix", "listed as a matrix"),
            ("experts", (4, 8, 8), "elementwise", "3-D"),
            ("norm", (32,), "elementwise", "1-D"),
            ("experts.w", (4, 8, 8), "matrix", "4 stacked experts"),
            ("experts.gain", (4, 1, 8), "elementwise", "4 stacked experts of one row"),
        ]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("mine", None, "expected .* cannot be read: No such file"),
        ("mine", "[]", "found no entry"),
        ("mine", "7", "found 7"),
        ("mine", "[[", "not JSON"),
        ("mine", [["a", [1, 2]], ["a", [1, 2]]], r"entry 1 \('a'\): expected a new name, found that of entry 0"),
        ("mine", '{"a": [1, 2], "a": [1, 2]}', r"entry 1 \('a'\): expected a new name"),
        ("mine", [["a", [1, 2]], ["b", [0, 2]]], r"entry 1 \('b'\): .* shape of positive integers.* found \[0, 2\]"),
        *[("mine", [["a", wrong]], "found") for wrong in ([-1, 2], [2.0, 2], [True, 2], [], 4)],
        ("mine", [["a", 4, 4]], r"entry 0: expected \[\"name\", \[rows, columns\]\], found \['a', 4, 4\]"),
        ("mine", [[4, ["a"]]], "entry 0: expected"),
        ("config", None, "expected a Hugging Face config.json, .* No such file"),
        ("config", [], "found list"),
        ("config", {"hidden_size": 8}, "with a 'model_type', found None"),
        ("config", {"model_type": "lama"}, "'lama' is not one of transformers .* did you mean 'llama'"),
        ("config", {"model_type": "own", "auto_map": {"AutoModel": "own.Model"}}, "'own.Model'.* is not run"),
        ("config", {"model_type": "llama", "hidden_size": "wide"}, "cannot read the 'llama' configuration"),
        ("config", {"model_type": "llama", "num_attention_heads": 0}, "correct the file"),
    ],
)
def test_errors_in_json_files_name_the_file_and_what_was_found(
    tmp_path: Path, file: str, content: Any, message: str
) -> None:
    path = tmp_path / f"{file}.json"
    path = path if content is None else written(path, content)
    with pytest.raises(ValueError, match=rf"{file}\.json: (.|\n)*{message}"):
        (read_shapes_json if file == "mine" else read_hugging_face)(path)


# Hugging Face configurations
def saved(family: str, folder: Path) -> nn.Module:
    name, kind, sizes = FAMILIES[family]
    model = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**sizes))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_gives_the_models_shapes_and_hidden_matrices(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    true = shapes_of(model)
    for path in (tmp_path, tmp_path / "config.json"):
        shapes = read_hugging_face(path)
        assert list(read_shapes(shapes).items()) == list(true.items())
        assert shapes.source == f"config.json of {type(model).__name__}"
    by_module = kinds(shapes)
    assert "matrix" in by_module.values()
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    if FAMILIES[family][1] in ("ForCausalLM", "LMHeadModel"):
        for name, param in model.named_parameters():
            outside = any(param is each for each in (*tables, model.get_output_embeddings().weight)) or "norm" in name
            hidden = (param.ndim == 2 or ".experts." in name) and not outside
            assert by_module[name] == ("matrix" if hidden else "elementwise"), name
    if family == "deepseek-v3":  # whose experts transformers stacks
        name = "model.layers.1.mlp.experts.gate_up_proj"
        assert by_module[name] == "matrix" and len(shapes.divided[name].blocks) == 2 * true[name][0]


def test_deepseek_v3_on_meta_allocates_nothing(tmp_path: Path) -> None:
    """Construction of the full DeepSeek-V3 on the meta device allocates nothing."""
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    shapes = read_hugging_face(tmp_path)
    routes = read_shapes(shapes)
    assert round(sum(map(math.prod, routes.values())) / 1e9) == 671  # as its authors count
    assert routes["model.layers.60.mlp.experts.down_proj"] == (256, 7168, 2048)
    assert routes["model.layers.60.self_attn.o_proj.weight"] == (7168, 128 * 128)
    assert "DeepseekV3ForCausalLM" in shapes.notes[0] and "names no architecture" in shapes.notes[0]


def test_config_json_may_ask_for_what_is_not_here(tmp_path: Path) -> None:
    """config.json may ask for kernels, quantization and code that are not here."""
    model, path = saved("llama", tmp_path), tmp_path / "config.json"
    content = json.loads(path.read_text()) | {
        "_attn_implementation": "flash_attention_2",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "auto_map": {"AutoModelForCausalLM": "modeling.Llama"},
    }
    written(tmp_path / "modeling.py", "raise SystemExit('run')")
    assert read_shapes(read_hugging_face(written(path, content))) == shapes_of(model)
    for named in (["LlamaForNovelists"], None, ["LlamaConfig"]):
        shapes = read_hugging_face(written(path, content | {"architectures": named}))
        assert "LlamaForC" in shapes.source and "built as LlamaForC" in shapes.notes[0]
        assert (named or ["no architecture"])[0] in shapes.notes[0]
    # BART, of which transformers has the decoder alone as a causal model: its encoder is kept
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 96))}
    bart = transformers.BartConfig(d_model=64, vocab_size=512, **layers)
    bart.save_pretrained(tmp_path)
    assert read_shapes(read_hugging_face(tmp_path)) == shapes_of(transformers.BartForConditionalGeneration(bart))


def test_config_json_takes_include_and_exclude_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    found = kinds(read_hugging_face(tmp_path, training=Training.routed(["lm_head*"], ["*.0.mlp.up_proj.weight"])))
    names = ("lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
    assert [found[name] for name in names] == ["matrix", "elementwise", "matrix"]
    with pytest.raises(ValueError, match="'lm_haed.weight' matches no .* did you mean 'lm_head.weight'"):
        read_hugging_face(tmp_path, training=Training.routed(["lm_haed.weight"]))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers<6,>=5'"):
        read_hugging_face(tmp_path)
