"""The parameters of a model from shapes, configurations and checkpoints, compared with the model itself."""

import argparse
import json
import math
import os
import pickle
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

from lwopt_backend.planner.models import read_checkpoint
from lwopt_backend.planner.shapes import ModelShapes, Training, read_hugging_face, read_shapes_json
from tests import megatron_dist, megatron_torch
from tests.checkpoint_engines import convert_as_deepspeed_does
from tests.models import MATRICES, UnevenLM
from tests.ranks import RankPool
from tests.zero import config, engine_for, train

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
    "mistral": ("Mistral", "ForCausalLM", {**SMALL, "num_key_value_heads": 2}),
    "gpt-neox": ("GPTNeoX", "ForCausalLM", SMALL),
    "opt": ("OPT", "ForCausalLM", {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "mixtral": ("Mixtral", "ForCausalLM", {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4}),
    "deepseek-v3": ("DeepseekV3", "ForCausalLM", DEEPSEEK),
    "bert": ("Bert", "ForMaskedLM", SMALL),
    "roberta-classifier": ("Roberta", "ForSequenceClassification", SMALL),
    "albert": ("Albert", "ForMaskedLM", {**SMALL, "embedding_size": 32}),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "cohere": ("Cohere", "ForCausalLM", {**SMALL, "use_qk_norm": True}),
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


def save_dcp(state: dict[str, Any], folder: Path, **kwargs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no process group
        dcp.save(state, checkpoint_id=folder, no_dist=True, **kwargs)


# Shapes that the user lists
def test_listed_shapes_keep_their_order_and_every_2d_one_is_a_matrix(tmp_path: Path) -> None:
    listed = [["z.embedding", [64, 32]], ["a", [3, 3]], ["experts", [4, 8, 8]], ["norm", [32]]]
    for content in (listed, dict(listed)):
        shapes = read_shapes_json(written(tmp_path / "mine.json", content))
        assert shapes.source == "mine.json" and shapes.notes == ()
        assert [(r.name, r.shape, r.kind, r.reason) for r in shapes.routes] == [
            ("z.embedding", (64, 32), "matrix", "listed as a matrix"),
            ("a", (3, 3), "matrix", "listed as a matrix"),
            ("experts", (4, 8, 8), "elementwise", "3-D"),
            ("norm", (32,), "elementwise", "1-D"),
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
def test_errors_name_the_file_and_what_was_found(tmp_path: Path, file: str, content: Any, message: str) -> None:
    path = tmp_path / f"{file}.json"
    path = path if content is None else written(path, content)
    with pytest.raises(ValueError, match=rf"{file}\.json: (.|\n)*{message}"):
        (read_shapes_json if file == "mine" else read_hugging_face)(path)


# Hugging Face configurations and checkpoints
def saved(family: str, folder: Path) -> nn.Module:
    name, kind, sizes = FAMILIES[family]
    model = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**sizes))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_gives_the_models_shapes_and_a_checkpoint_the_same_routes(family: str, tmp_path: Path) -> None:
    """On every parameter whose name transformers does not change as it saves; it splits stacked experts."""
    model = saved(family, tmp_path)
    true = shapes_of(model)
    for path in (tmp_path, tmp_path / "config.json"):
        shapes = read_hugging_face(path)
        assert list(read_shapes(shapes).items()) == list(true.items())
        assert shapes.source == f"config.json of {type(model).__name__}"
    checkpoint = read_checkpoint(tmp_path)
    by_name, by_module = kinds(checkpoint), kinds(shapes)
    assert "matrix" in by_module.values()
    tables = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    if FAMILIES[family][1] in ("ForCausalLM", "LMHeadModel"):
        for name, param in model.named_parameters():
            outside = any(param is each for each in (*tables, model.get_output_embeddings().weight)) or "norm" in name
            hidden = (param.ndim == 2 or ".experts." in name) and not outside
            assert by_module[name] == ("matrix" if hidden else "elementwise"), name
    same = by_name.keys() & by_module.keys()
    assert {name: by_name[name] for name in same} == {name: by_module[name] for name in same}
    assert all(shape == true[name] for name, shape in read_shapes(checkpoint).items() if name in true)
    apart = {name for name in by_name.keys() - same if "bias" not in name and name != "embed_out.weight"}
    assert all(".experts." in name or ".gate." in name for name in apart)
    assert {by_name[name] for name in apart} <= {"matrix"}
    assert "routed by name" in checkpoint.notes[0] and "alphabetical order" in checkpoint.notes[1]
    if family == "deepseek-v3":  # whose experts transformers stacks
        name = "model.layers.1.mlp.experts.gate_up_proj"
        assert by_module[name] == "matrix" and len(shapes.divided[name].blocks) == 2 * true[name][0]
        assert by_name["model.layers.1.mlp.experts.3.gate_proj.weight"] == "matrix"


def test_meta_construction_of_the_full_deepseek_v3_allocates_nothing(tmp_path: Path) -> None:
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    shapes = read_hugging_face(tmp_path)
    routes = read_shapes(shapes)
    assert round(sum(map(math.prod, routes.values())) / 1e9) == 671  # as its authors count
    assert routes["model.layers.60.mlp.experts.down_proj"] == (256, 7168, 2048)
    assert routes["model.layers.60.self_attn.o_proj.weight"] == (7168, 128 * 128)
    assert "DeepseekV3ForCausalLM" in shapes.notes[0] and "names no architecture" in shapes.notes[0]


def test_a_configuration_may_ask_for_kernels_quantization_and_code_that_are_not_here(tmp_path: Path) -> None:
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


def test_both_readers_take_globs_and_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    for read in (read_hugging_face, read_checkpoint):
        found = kinds(read(tmp_path, training=Training.routed(["lm_head*"], ["*.0.mlp.up_proj.weight"])))
        names = ("lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")
        assert [found[name] for name in names] == ["matrix", "elementwise", "matrix"]
        with pytest.raises(ValueError, match="'lm_haed.weight' matches no .* did you mean 'lm_head.weight'"):
            read(tmp_path, training=Training.routed(["lm_haed.weight"]))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers<6,>=5'"):
        read_hugging_face(tmp_path)


# Routing by name
RELEASED: dict[str, tuple[tuple[int, ...], str]] = {
    "model.embed_tokens.weight": ((48, 8), "embedding by name"),
    "model.layers.0.mlp.up_proj.weight": ((6, 8), "2-D weight"),
    "model.layers.0.mlp.up_proj.weight_scale_inv": ((6, 8), "scale by name"),
    "model.layers.0.post_attention_layernorm.weight": ((8,), "1-D"),
    "model.layers.0.self_attn.q_norm.weight": ((6, 8), "norm"),
    "model.layers.0.ln_1.weight": ((6, 8), "norm"),
    "model.layers.0.attention.output.dense.weight": ((6, 8), "2-D weight"),
    "model.layers.0.mixer.A_log": ((6, 8), "one decay per channel and state"),
    "model.layers.0.relative_attention_bias.weight": ((6, 8), "bias"),
    "model.layers.10.eh_proj.weight": ((6, 8), "2-D weight"),
    "model.layers.61.embed_tokens.weight": ((48, 8), "embedding by name"),
    "model.layers.61.shared_head.head.weight": ((48, 8), "output head, named 'head'"),
    "output_layer.weight": ((6, 8), "output head, named 'output_layer'"),
    "classifier.0.weight": ((6, 8), "2-D weight"),
    "classifier.3.weight": ((3, 6), "output head, named 'classifier'"),
    "cls.decoder.weight": ((48, 8), "output head, as wide as an embedding has rows"),
    "wpe.weight": ((6, 8), "embedding by name"),
    "embed_proj.weight": ((6, 8), "2-D weight"),
    "head.dense.weight": ((8, 8), "2-D weight"),
    "model.layers.0.mlp.as_wide_as_the_vocabulary.weight": ((48, 8), "2-D weight"),
    "nothing.weight": ((0, 8), "no elements"),
    "experts.stacked": ((2, 6, 8), "2 stacked experts"),
    "layers.0.expert.weight": ((3, 1, 32), "3 stacked experts of one row"),
    "value_head.weight": ((1, 32), "one row"),
    "prompt_embeddings": ((4, 32), "prompt"),  # and others of PEFT's
    "base_model.model.layers.0.k_proj.ia3_l": ((32, 1), "IA3 gain"),
    "base_model.model.layers.0.q_proj.lora_A.weight": ((4, 32), "LoRA A of q_proj"),
    "base_model.model.layers.0.q_proj.lora_B.weight": ((32, 4), "LoRA B of q_proj"),
    "base_model.model.lm_head.lora_A.weight": ((4, 32), "LoRA A of lm_head: output head, named 'lm_head'"),
    "base_model.model.lm_head.lora_B.weight": ((50, 4), "LoRA B of lm_head: output head, named 'lm_head'"),
}


def test_names_of_released_checkpoints_are_routed_as_they_are_meant_in_the_order_of_layers(tmp_path: Path) -> None:
    """DeepSeek-V3's fp8 file has scales, and a further layer that predicts the token after the next one."""
    tensors = {name: torch.zeros(shape) for name, (shape, _) in RELEASED.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    routes = read_checkpoint(tmp_path).routes
    assert {r.name: r.reason for r in routes} == {name: reason for name, (_, reason) in RELEASED.items()}
    layers = [int(r.name.split(".")[2]) for r in routes if r.name.startswith("model.layers.")]
    assert layers == sorted(layers)


# Files of tensors
def test_safetensors_are_read_from_their_header_alone_and_what_only_ends_so_is_an_error(tmp_path: Path) -> None:
    """A terabyte of weights that is not there: only the header was written, the rest is a hole in the file."""
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2**20, 2**19], "data_offsets": [0, 2**40]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2**40)
    assert read_shapes(read_checkpoint(path)) == {"w": (2**20, 2**19)}
    for content, message in [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\n", " is damaged: .*Git LFS"),
        ((2).to_bytes(8, "little") + b"{}", ": expected .* no floating-point tensor"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"model\.safetensors{message}"):
            read_checkpoint(path)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_make_one_model_and_none_may_be_missing(tmp_path: Path, kind: str) -> None:
    model = UnevenLM()
    state = model.state_dict()
    halves = {f"pytorch_model-{i}-of-2.{kind}": dict(list(state.items())[i - 1 :: 2]) for i in (1, 2)}
    for file, half in halves.items():
        (save_file if kind == "safetensors" else torch.save)(half, tmp_path / file)
    first, last = halves
    weight_map = {name: file for file, half in halves.items() for name in half}
    stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    index = written(tmp_path / f"{stem}.index.json", {"weight_map": weight_map})
    for path in (tmp_path, index):
        shapes = read_checkpoint(path)
        assert read_shapes(shapes) == shapes_of(model)
        assert shapes.source == ("2 safetensors files" if kind == "safetensors" else "2 torch files")
    written(index, {"weight_map": weight_map | {"extra": first}})
    with pytest.raises(ValueError, match=f"expected 'extra' in {first}"):
        read_checkpoint(tmp_path)
    (tmp_path / last).unlink()
    with pytest.raises(ValueError, match=f"expected 2 .* found no {last}"):
        read_checkpoint(tmp_path)


def test_safetensors_without_an_index_are_one_model_unless_they_repeat_a_name(tmp_path: Path) -> None:
    for file, name in enumerate("ab", 1):
        save_file({name: torch.zeros(2, 3)}, tmp_path / f"{file}.safetensors")
    assert read_shapes(read_checkpoint(tmp_path)) == {"a": (2, 3), "b": (2, 3)}
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "3.safetensors")
    with pytest.raises(ValueError, match=r"3\.safetensors: .* found 'a', which is also in 1\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("key", [None, "model", "module", "state_dict", "model_state_dict"])
def test_a_torch_file_keeps_order_and_ties_and_no_optimizer_is_listed(tmp_path: Path, key: str | None) -> None:
    model = UnevenLM(tied=True)
    model.register_buffer("steps", torch.zeros(3, 3, dtype=torch.int64))
    moments = {"state": {0: {"exp_avg": torch.zeros(4, 4)}}, "param_groups": []}
    state = model.state_dict()
    torch.save(state if key is None else {"optimizer": moments, key: state}, tmp_path / "a.pt")
    shapes = read_checkpoint(tmp_path / "a.pt")
    assert list(read_shapes(shapes).items()) == list(shapes_of(model).items())
    assert {r.name for r in shapes.routes if r.kind == "matrix"} == set(MATRICES)
    assert len(shapes.notes) == 2 and "left out: 1 tensor(s)" in shapes.notes[1] and "'steps'" in shapes.notes[1]
    index = read_checkpoint(written(tmp_path / "b.index.json", {"weight_map": dict.fromkeys(state, "a.pt")}))
    assert read_shapes(index) == shapes_of(model)
    for found in (shapes, index):
        assert {r.name: r.aliases for r in found.routes if r.aliases} == {"embedding.weight": ("lm_head.weight",)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state": {}, "param_groups": []}, "expected a state dict .* found the keys"),
        ([1, 2], "found an object of list"),
        (argparse.Namespace(lr=1), "found an object of Namespace"),
        (nn.Linear(2, 2), "asks for torch.nn.modules.linear.Linear, .* may be made to run code"),
        (None, "torch.save of torch 1.6 or newer, .* found another"),
    ],
)
def test_a_torch_file_without_a_state_dict_is_an_error(tmp_path: Path, content: Any, message: str) -> None:
    old = {"_use_new_zipfile_serialization": content is not None}
    torch.save({"w": torch.zeros(2, 2)} if content is None else content, tmp_path / "a.pt", **old)
    with pytest.raises(ValueError, match=rf"a\.pt:? (.|\n)*{message}"):
        read_checkpoint(tmp_path / "a.pt")


# Folders of torch.distributed.checkpoint, Megatron and DeepSpeed
@pytest.mark.parametrize("nesting", ["flat", "model", "app"])
def test_a_dcp_folder_gives_the_model_and_not_its_optimizer(tmp_path: Path, nesting: str) -> None:
    model = UnevenLM().bfloat16()
    model.register_buffer("steps", torch.zeros(3, 3, dtype=torch.int64))
    moments = {name: {"exp_avg": torch.zeros_like(param)} for name, param in model.named_parameters()}
    state: dict[str, Any] = {"optim": {"state": moments}, "step": 3}
    state = state | ({"model": model.state_dict()} if nesting != "flat" else model.state_dict())
    save_dcp({"app": state} if nesting == "app" else state, tmp_path)
    shapes = read_checkpoint(tmp_path)
    assert list(read_shapes(shapes).items()) == list(shapes_of(model).items())
    assert shapes.source == f"torch.distributed.checkpoint folder {tmp_path.name}"
    assert "left out: 1 tensor(s)" in shapes.notes[-1]


def test_a_dcp_folder_of_flat_names_lists_no_optimizer_state(tmp_path: Path) -> None:
    """As Megatron writes it: nothing but the names says what is optimizer state."""
    state = {"layers.w": torch.zeros(4, 6), "optimizer.state.exp_avg.layers.w": torch.zeros(4, 6)}
    save_dcp(state, tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    assert read_shapes(read_checkpoint(tmp_path)) == {"layers.w": (4, 6)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(random.Random()))  # test_files.py has what is worse
    with pytest.raises(ValueError, match="metadata asks for random"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("setup", [megatron_dist.Setup(experts=True), megatron_torch.Setup("moe", tp=2, dp=2, ep=2)])
def test_a_megatron_folder_gives_whole_parameters_by_layer_and_expert(tmp_path: Path, setup: Any) -> None:
    """Not the stacks that torch_dist has, nor the parts that ranks have; and no more than metadata is needed."""
    if isinstance(setup, megatron_torch.Setup):
        writer, kind = megatron_torch.Writer(setup), "torch"
        writer.write(tmp_path)
        known = {name: tuple(of_name["weight"].shape) for name, of_name in writer.truth.items()}
    else:
        megatron_dist.write(tmp_path / "iter_0000007", setup, megatron_dist.truth(muon=True, experts=True))
        written(tmp_path / "latest_checkpointed_iteration.txt", "7")
        next(tmp_path.rglob("*.distcp")).unlink()
        known, kind = megatron_dist.shapes(experts=True), "torch_dist"
    shapes = read_checkpoint(tmp_path)
    assert shapes.source == f"Megatron's {kind} checkpoint {tmp_path.name}"
    assert sorted(read_shapes(shapes).items()) == sorted(known.items())
    found = kinds(shapes)
    assert found["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"] == "matrix"
    assert found["embedding.word_embeddings.weight"] == found["output_layer.weight"] == "elementwise"


def frozen_and_tied() -> nn.Module:
    model = UnevenLM(tied=True)
    model.gate.requires_grad_(False)
    model.register_buffer("table", torch.zeros(3, 4))
    return model


def save_deepspeed(folder: str, stage: int) -> None:
    settings = config(stage) | {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}
    model = frozen_and_tied()
    with engine_for(settings, model, model_parameters=[p for p in model.parameters() if p.requires_grad]) as engine:
        train(engine, 1)
        engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_deepspeed_checkpoint_gives_the_whole_model(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    ranks.run(save_deepspeed, str(tmp_path), stage)
    shapes, true = read_checkpoint(tmp_path), shapes_of(frozen_and_tied())
    frozen = {"gate.weight", "gate.bias"} if stage else set()  # stage 0 does not say
    assert list(read_shapes(shapes).items()) == list(true.items())
    assert {r.name for r in shapes.routes if r.kind == "frozen"} == frozen
    assert {r.name for r in shapes.routes if r.kind == "matrix"} == set(MATRICES) - frozen
    assert {r.name: r.aliases for r in shapes.routes if r.aliases} == {"embedding.weight": ("lm_head.weight",)}
    assert shapes.source == "DeepSpeed checkpoint global_step1"
    states = min((tmp_path / "global_step1").glob("*mp_rank_00_model_states.pt"))
    for path in (tmp_path / "global_step1", states):
        assert read_checkpoint(path).routes == shapes.routes
    if stage < 2:
        return
    folder = Path(convert_as_deepspeed_does(tmp_path, "global_step1"))
    assert read_checkpoint(folder).routes == shapes.routes
    for states in (folder / "global_step1").glob("*model_states.pt"):
        states.unlink()
    if stage == 3:  # which writes the parameters flat
        with pytest.raises(ValueError, match=r"fp32\.pt holds a flat tensor .* copy the \*_model_states\.pt files"):
            read_checkpoint(folder)
    else:
        universal = read_checkpoint(folder)
        assert {name: shape for name, shape in read_shapes(universal).items() if name in true} == true
        assert "universal" in universal.source and "alphabetical order" in universal.notes[1]


STATES, EXPERT = "mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt"
READABLE = "expected a .*safetensors .* DeepSpeed, found"
NOT_WHOLE: Any = [
    ([STATES, "mp_rank_01_model_states.pt"], "", "the parts of 2 model-parallel ranks"),
    ([STATES, EXPERT], "", "in files of their own"),
    ([STATES], "", "as with pipeline parallelism"),
    (["latest"], "", "latest: expected the name of a folder beside it, found 'global_step7'"),
    (["notes.txt"], "", f"{READABLE} notes.txt"),
    (["notes.txt"], "notes.txt", f"{READABLE} a file ending in '.txt'"),
    ([], "nothing.pt", "nothing.pt: expected a checkpoint, found nothing there"),
]


@pytest.mark.parametrize(("files", "given", "message"), NOT_WHOLE)
def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path, files: list[str], given: str, message: str) -> None:
    for file in files:
        written(tmp_path / file, "global_step7") if "pt" not in file else torch.save({"module": None}, tmp_path / file)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / given)
