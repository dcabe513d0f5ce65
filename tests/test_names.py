"""Name maps: Hugging Face's models give the same logits through them, all are undone exactly, and misfits are said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lwopt_backend.atom_settings import AtomSettings, blocks_of
from lwopt_backend.checkpoint import formats, gates
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.lazy import LazyTensor, held
from lwopt_backend.checkpoint.names import CORE, FAMILIES, Numbers, apply, find, translate
from lwopt_backend.checkpoint.names.patterns import Pattern
from lwopt_backend.checkpoint.names.rules import NameMap, Rule, rule
from tests.command_line import genuine

Tensors = Mapping[str, Tensor]
EMBEDDING, HEAD, QKV = "embedding.word_embeddings.weight", "output_layer.weight", "self_attention.linear_qkv.weight"


def checkpoint_of(weights: Tensors, names: str, arguments: Mapping[str, Any] | None = None) -> Checkpoint:
    """With a momentum for matrices and Adam's moments for the rest: other values, each a function of the weight."""
    params = {}
    for name, weight in weights.items():
        states = {MASTER: held(weight.float() * 3, name)}
        if weight.ndim > 1:
            states["momentum_buffer"] = held(-weight.float(), name)
        else:
            states |= {"exp_avg": held(weight.float() + 1, name), "exp_avg_sq": held(weight.float() * 2, name)}
        params[name] = Param(held(weight, name), states, step=3.0)
    return Checkpoint("a test's", "", names, params, arguments=arguments or {})


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """After a check that every state followed its weight."""
    found = {}
    for name, param in checkpoint.params.items():
        weight = found[name] = param.weight.read()
        assert tuple(weight.shape) == param.shape and weight.is_contiguous() and param.step == 3.0
        expected = {MASTER: weight.float() * 3, "momentum_buffer": -weight.float()}
        if "momentum_buffer" not in param.states:
            expected = {MASTER: weight.float() * 3, "exp_avg": weight.float() + 1, "exp_avg_sq": weight.float() * 2}
        assert_equal({key: state.read() for key, state in param.states.items()}, expected)
    return found


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), name


def replaced(source: Checkpoint, name: str, **changes: Any) -> Checkpoint:
    return dataclasses.replace(
        source, params={**source.params, name: dataclasses.replace(source.params[name], **changes)}
    )


# Megatron-core's form of a Hugging Face model, written down row by row


def grouped_rows(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    rows = []
    for group in range(groups):
        for part in (q, k, v):
            size = len(part) // groups
            rows += [part[row] for row in range(group * size, (group + 1) * size)]
    return torch.stack(rows)


OF_LLAMA = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}
GATED = {"mlp.linear_fc1.weight": "mlp", "mlp.shared_experts.linear_fc1.weight": "mlp.shared_expert"}


def core_of_llama(model: nn.Module) -> dict[str, Tensor]:
    """Of any model that is called like Llama's, with transformers' stacked experts or without."""
    state, config = model.state_dict(), model.config
    core = {EMBEDDING: state["model.embed_tokens.weight"], "decoder.final_layernorm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        core[HEAD] = state["lm_head.weight"]
    for number in range(config.num_hidden_layers):
        ours, start = f"decoder.layers.{number}", f"model.layers.{number}."
        layer = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
        core |= {f"{ours}.{name}": layer[theirs] for name, theirs in OF_LLAMA.items() if theirs in layer}
        for name, theirs in GATED.items():
            if f"{theirs}.gate_proj.weight" in layer:
                halves = [layer[f"{theirs}.{part}_proj.weight"] for part in ("gate", "up")]
                core[f"{ours}.{name}"] = torch.cat(halves)
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in layer:
                parts = [layer[f"self_attn.{part}_proj.{kind}"] for part in "qkv"]
                fused = grouped_rows(*parts, config.num_key_value_heads)
                core[f"{ours}.self_attention.linear_qkv.{kind}"] = fused
        for expert in range(len(layer.get("mlp.experts.down_proj", ()))):
            local = f"{ours}.mlp.experts.local_experts.{expert}"
            core[f"{local}.linear_fc1.weight"] = layer["mlp.experts.gate_up_proj"][expert]
            core[f"{local}.linear_fc2.weight"] = layer["mlp.experts.down_proj"][expert]
    return {name: tensor.clone() for name, tensor in core.items()}


def core_of_gpt2(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    core = {EMBEDDING: state["transformer.wte.weight"]}
    core["embedding.position_embeddings.weight"] = state["transformer.wpe.weight"]
    called = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2", "self_attention.linear_proj": "attn.c_proj"}
    called |= {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        core[f"decoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for number in range(model.config.n_layer):
            for ours, theirs in called.items():
                core[f"decoder.layers.{number}.{ours}.{kind}"] = state[f"transformer.h.{number}.{theirs}.{kind}"].t()
            parts = state[f"transformer.h.{number}.attn.c_attn.{kind}"].t().chunk(3)
            fused = grouped_rows(*parts, model.config.n_head)
            core[f"decoder.layers.{number}.self_attention.linear_qkv.{kind}"] = fused
    return {name: tensor.contiguous().clone() for name, tensor in core.items()}


SMALL = dict(vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=32)
UNTIED = dict(SMALL, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=False)
SHARED = dict(mlp_only_layers=[0], shared_expert_intermediate_size=32)  # the first layer has no experts
MODELS = {  # the family of names in memory, that of files where it is another, and the model
    "llama": ("hf-llama", "", transformers.LlamaConfig, UNTIED),
    "qwen2": ("hf-llama", "", transformers.Qwen2Config, dict(UNTIED, num_key_value_heads=3, tie_word_embeddings=True)),
    "qwen3": ("hf-llama", "", transformers.Qwen3Config, dict(UNTIED, head_dim=8)),
    "mistral": ("hf-llama", "", transformers.MistralConfig, dict(UNTIED, num_key_value_heads=1)),
    "mixtral": ("hf-moe-stacked", "hf-mixtral", transformers.MixtralConfig, dict(UNTIED, num_local_experts=3)),
    "qwen2_moe": (
        *("hf-moe-stacked", "hf-qwen-moe", transformers.Qwen2MoeConfig),
        dict(UNTIED, **SHARED, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16),
    ),
    "qwen3_moe": (
        *("hf-moe-stacked", "hf-qwen-moe", transformers.Qwen3MoeConfig),
        dict(UNTIED, head_dim=4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16),
    ),
    "gpt2": ("hf-gpt2", "", transformers.GPT2Config, dict(vocab_size=29, n_embd=24, n_layer=2, n_head=6, n_inner=40)),
}


def built(name: str, seed: int = 5) -> nn.Module:
    """With random values, also in norms and biases, which begin as ones and zeros."""
    _, _, config, options = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(config(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10) % 29).logits


def core_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """And Megatron's args of it: without grouped queries their number of groups is an unused default."""
    config = model.config
    is_gpt2 = isinstance(model, transformers.GPT2LMHeadModel)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    arguments = {
        **{"num_layers": config.num_hidden_layers, "num_attention_heads": heads, "swiglu": not is_gpt2},
        **{"group_query_attention": groups != heads, "num_query_groups": groups if groups != heads else 1},
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "num_experts": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "muon_split_qkv": True,
    }
    return core_of_gpt2(model) if is_gpt2 else core_of_llama(model), arguments


@pytest.mark.parametrize("name", MODELS)
def test_a_model_from_megatrons_form_gives_the_same_logits_and_goes_back(name: str, tmp_path: Path) -> None:
    """In memory; and experts as in files, which are what transformers writes and reads."""
    in_memory, in_files, *_ = MODELS[name]
    model, fresh = built(name), built(name, seed=6)
    core, arguments = core_of(model)
    there = translate(checkpoint_of(core, CORE, arguments), in_memory)
    missing, unexpected = fresh.load_state_dict(weights_of(there), strict=False)
    assert not unexpected and (missing == [] or missing == ["lm_head.weight"])
    assert torch.equal(logits(fresh), logits(model))
    again = translate(there, CORE)
    assert again.names == CORE
    assert_equal(weights_of(again), core)
    if in_files:
        weights = weights_of(translate(checkpoint_of(core, CORE, arguments), in_files))
        model.save_pretrained(tmp_path)
        assert_equal(weights, load_file(tmp_path / "model.safetensors"))
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(read), logits(model))
        assert_equal(weights_of(translate(checkpoint_of(weights, in_files, arguments), CORE)), core)


def test_one_family_becomes_another() -> None:
    model = built("mixtral")
    stacked = checkpoint_of(model.state_dict(), "model", {"num_key_value_heads": 2, "num_attention_heads": 6})
    files = translate(stacked, "hf-mixtral", source="hf-moe-stacked")
    assert files.names == "hf-mixtral"
    again = translate(files, "hf-moe-stacked")
    assert_equal(weights_of(again), model.state_dict())
    assert len(set(again.notes)) == len(again.notes)
    assert translate(again, "hf-moe-stacked") is again
    cut = translate(again, "hf-moe-stacked", Numbers(vocab_size=20))
    assert cut.names == "hf-moe-stacked" and cut.params["lm_head.weight"].shape == (20, 24)


# Every map is undone exactly


def random_core(
    seed: int, *, gated: bool = True, experts: int = 0, tied: bool | None = None, layers: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights of a made-up Megatron model, every element another, and its arguments."""
    pick = random.Random(seed)
    drawn, groups, size, width = (pick.randint(*ends) for ends in ((1, 3), (1, 4), (1, 5), (1, 6)))
    layers, heads = layers or drawn, groups * pick.randint(1, 4)
    inner, vocabulary = pick.randint(1, 7), pick.randint(2, 9)
    has_bias, norm_bias, may_tie = (pick.random() < 0.5 for _ in range(3))
    linears = {"self_attention.linear_qkv": (size * (heads + 2 * groups), width)}
    linears["self_attention.linear_proj"] = (width, size * heads)
    for prefix in [f"mlp.experts.local_experts.{number}" for number in range(experts)] or ["mlp"]:
        linears[f"{prefix}.linear_fc1"] = ((2 if gated else 1) * inner, width)
        linears[f"{prefix}.linear_fc2"] = (width, inner)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, width)}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}"
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (width,)
            shapes |= {f"{prefix}.{norm}.bias": (width,)} if norm_bias and not gated else {}
        for name, shape in linears.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            shapes |= {f"{prefix}.{name}.bias": shape[:1]} if has_bias and not experts else {}
        shapes |= {f"{prefix}.mlp.router.weight": (experts, width)} if experts else {}
    shapes["decoder.final_layernorm.weight"] = (width,)
    if not (may_tie if tied is None else tied):
        shapes[HEAD] = (vocabulary, width)
    start, weights = 0.0, {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        weights[name] = torch.arange(start, start + count).view(shape)
        start += count
    arguments = {"num_layers": layers, "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": size}
    return weights, {**arguments, "num_experts": experts or None, "swiglu": gated}


CASES: dict[str, dict[str, Any]] = {
    "megatron-core": {},
    "megatron-deepspeed": dict(gated=False),
    "hf-llama": {},
    "hf-mixtral": dict(experts=3),
    "hf-qwen-moe": dict(experts=4),
    "hf-moe-stacked": dict(experts=1),
    "hf-gpt2": dict(gated=False, tied=False),
}


def core_for(family: str, seed: int, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A made-up model that the family has names for."""
    weights, arguments = random_core(seed, **CASES[family] | changes)
    if family == "hf-gpt2":
        weights["embedding.position_embeddings.weight"] = torch.full((3, weights[EMBEDDING].shape[1]), -1.0)
    return weights, arguments


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_undone_exactly(family: str, seed: int) -> None:
    weights, arguments = core_for(family, seed)
    numbers = Numbers(qkv_layout=("groups", "blocks")[seed % 2])
    there = apply(find(family), checkpoint_of(weights, CORE, arguments), numbers)
    if family == "hf-llama":
        assert any("fc1.bias" in name for name in weights) == any("gate_proj.bias" in name for name in there.params)
    assert there.names == family and there.arguments == arguments
    back = apply(find(family).inverse(), there, numbers)
    assert list(back.params) == list(weights) or family != "megatron-core"
    assert_equal(weights_of(back), weights)
    seen = torch.cat([param.weight.read().flatten() for param in there.params.values()])
    assert seen.sort().values.tolist() == sorted(torch.cat([w.flatten() for w in weights.values()]).tolist())


def test_the_way_back_of_the_way_back_is_the_way_there() -> None:
    for name, names in FAMILIES.items():
        plain = dataclasses.replace(names, rules=tuple(dataclasses.replace(r, only=None) for r in names.rules))
        assert plain.inverse().inverse() == plain, name
        assert plain.inverse() != plain or name == CORE


# Megatron-DeepSpeed


@pytest.mark.parametrize("tied", [True, False])
def test_stages_are_numbered_as_megatron_deepspeed_numbers_them(tied: bool) -> None:
    weights, arguments = random_core(7, tied=tied)
    weights = {name: weight for name, weight in weights.items() if not name.endswith("bias")}
    weights["decoder.final_layernorm.bias"] = torch.ones(2)
    layers = arguments["num_layers"]
    names = {f"{layers + 2}.weight", f"{layers + 2}.bias"}
    names |= {"tied_modules.embed.word_embeddings.weight"} if tied else {"1.word_embeddings.weight"}
    names |= set() if tied else {f"{layers + 3}.lm_head.weight"}
    modules = ("input_layernorm", "post_attention_layernorm", "self_attention.query_key_value", "self_attention.dense")
    modules += ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    names |= {f"{layer + 2}.{module}.weight" for layer in range(layers) for module in modules}
    there = translate(checkpoint_of(weights, CORE, arguments), "megatron-deepspeed", Numbers(qkv_layout="groups"))
    assert set(there.params) == names
    assert_equal(weights_of(translate(there, CORE, Numbers(qkv_layout="groups"))), weights)


def qkv_of(heads: int, groups: int, size: int, columns: int) -> list[Tensor]:
    numbers = ((heads, 0), (groups, 100), (groups, 200))
    return [torch.arange(n * size * float(columns)).view(-1, columns) + at for n, at in numbers]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_of_q_k_and_v_lie_rank_by_rank(ranks: int) -> None:
    parts = qkv_of(8, 4, 3, 2)
    arguments = {"num_attention_heads": 8, "num_query_groups": 4, "swiglu": False}
    source = checkpoint_of({f"decoder.layers.0.{QKV}": grouped_rows(*parts, 4)}, CORE, arguments)
    numbers = Numbers(qkv_layout="blocks", qkv_ranks=ranks)
    there = translate(source, "megatron-deepspeed", numbers)
    expected = torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in parts])
    assert torch.equal(there.params["2.self_attention.query_key_value.weight"].weight.read(), expected)
    assert_equal(weights_of(translate(there, CORE, numbers)), weights_of(source))


def test_a_stage_whose_number_does_not_follow_the_layers_is_refused() -> None:
    weights, arguments = random_core(2, tied=False, layers=2)
    groups = Numbers(qkv_layout="groups")
    there = weights_of(translate(checkpoint_of(weights, CORE, arguments), "megatron-deepspeed", groups))
    there["7.lm_head.weight"] = there.pop("5.lm_head.weight")
    with pytest.raises(CheckpointError, match=r"1 problem\(s\)(?s:.*)'7.lm_head.weight' fits no rule"):
        translate(checkpoint_of(there, "megatron-deepspeed", arguments), CORE, groups)


# Numbers


def only_qkv() -> NameMap:
    return dataclasses.replace(find("hf-llama"), rules=tuple(r for r in find("hf-llama").rules if "split_qkv" in r.do))


@pytest.mark.parametrize("known", itertools.combinations(["heads", "query_groups", "kv_channels"], 2))
def test_two_numbers_divide_a_fused_matrix(known: tuple[str, ...]) -> None:
    sizes = {"heads": 6, "query_groups": 2, "kv_channels": 4}
    parts, only = qkv_of(6, 2, 4, 5), only_qkv()
    source = checkpoint_of({f"decoder.layers.0.{QKV}": grouped_rows(*parts, 2)}, CORE)
    there = weights_of(apply(only, source, Numbers(**{key: sizes[key] for key in known})))
    assert_equal(there, {f"model.layers.0.self_attn.{n}_proj.weight": t for n, t in zip("qkv", parts)})
    for key in known:
        numbers = Numbers(**{key: sizes[key]})
        with pytest.raises(CheckpointError, match="two of heads, query_groups and kv_channels must be known"):
            apply(only, source, numbers)
        assert_equal(weights_of(apply(only.inverse(), checkpoint_of(there, "hf-llama"), numbers)), weights_of(source))
    with pytest.raises(CheckpointError, match="one of heads, query_groups and kv_channels must be known"):
        apply(only.inverse(), checkpoint_of(there, "hf-llama"))


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    def join(q: int, k: int, v: int, **numbers: int) -> None:
        rows = zip("qkv", (q, k, v))
        parts = {f"model.layers.0.self_attn.{part}_proj.weight": torch.ones(n, 4) for part, n in rows}
        apply(only_qkv().inverse(), checkpoint_of(parts, "hf-llama"), Numbers(**numbers))

    join(24, 8, 8, query_groups=2, heads=6)
    with pytest.raises(CheckpointError, match="k and v must be alike"):
        join(24, 8, 4, query_groups=2)
    for numbers in ({"query_groups": 2, "heads": 5}, {"query_groups": 3}, {"query_groups": 2, "kv_channels": 2}):
        with pytest.raises(CheckpointError, match="do not divide by heads"):
            join(24, 8, 8, **numbers)
    with pytest.raises(CheckpointError, match="20 rows of q, k and v do not divide"):
        join(12, 4, 4, query_groups=1, kv_channels=8)
    with pytest.raises(CheckpointError, match="28 rows of q, k and v do not divide"):  # one and a half heads a group
        join(12, 8, 8, query_groups=2)


def test_a_given_number_goes_before_the_arguments() -> None:
    weights, arguments = random_core(3)
    source = checkpoint_of(weights, CORE, arguments | {"num_attention_heads": 31})
    there = translate(source, "hf-llama", Numbers(heads=arguments["num_attention_heads"]))
    assert_equal(weights_of(there), weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama")))


def test_one_query_group_may_be_a_default_that_is_not_used() -> None:
    weights, arguments = random_core(3, layers=1)
    parts = qkv_of(6, 6, 2, 4)
    weights[f"decoder.layers.0.{QKV}"] = grouped_rows(*parts, 6)
    weights = {name: weight for name, weight in weights.items() if not name.endswith("linear_qkv.bias")}
    arguments |= {"num_attention_heads": 6, "num_query_groups": 1, "kv_channels": 2}
    for grouped in ({}, {"group_query_attention": False}):
        there = weights_of(translate(checkpoint_of(weights, CORE, arguments | grouped), "hf-llama"))
        assert torch.equal(there["model.layers.0.self_attn.k_proj.weight"], parts[1])
    arguments["kv_channels"] = None  # 36 rows might be 6 + 1 + 1 heads no more than 6 + 6 + 6
    with pytest.raises(CheckpointError, match="two of heads, query_groups and kv_channels must be known"):
        translate(checkpoint_of(weights, CORE, arguments), "hf-llama")
    with pytest.raises(CheckpointError, match="do not divide by heads"):
        translate(checkpoint_of(weights, CORE, arguments | {"group_query_attention": True}), "hf-llama")


# Refusals

BLOCKS_OF_97 = Numbers(qkv_layout="blocks", qkv_ranks=97)
TWO = dict(layers=2, tied=True)
WRONG_ARGUMENTS = [  # the family, its model, what the arguments say otherwise, numbers, and what is said
    ("megatron-deepspeed", {}, {}, Numbers(), "depends on its commit.*'groups'.*'blocks'"),
    ("megatron-deepspeed", {}, {}, BLOCKS_OF_97, r"\d query groups do not divide among qkv_ranks 97"),
    ("hf-llama", {}, {"num_attention_heads": 31}, Numbers(), "do not divide by heads"),
    ("hf-llama", {}, {"kv_channels": 99}, Numbers(), "do not divide by heads"),
    ("hf-llama", {}, {"num_attention_heads": "many"}, Numbers(), "is 'many'; expected a number; give 'heads'"),
    ("hf-llama", TWO, {"num_layers": 3}, Numbers(), r"nothing was found of layer\(s\) 2, but of others up to"),
    ("hf-llama", TWO, {"num_layers": 1}, Numbers(), "there are 2 layers, but 1 were expected"),
    ("hf-llama", TWO, {"rotary_interleaved": True}, Numbers(), "rotary_interleaved"),
    ("hf-llama", TWO, {"layernorm_zero_centered_gamma": True}, Numbers(), "layernorm_zero_centered_gamma"),
    ("hf-gpt2", TWO, {"layernorm_zero_centered_gamma": True}, Numbers(), "layernorm_zero_centered_gamma"),
    ("hf-llama", TWO, {"swiglu": False}, Numbers(), "swiglu"),
    ("hf-gpt2", TWO, {"swiglu": True}, Numbers(), "swiglu"),
    ("hf-moe-stacked", dict(experts=3), {"num_experts": 4}, Numbers(), r"experts.3.linear_fc1.weight' is missing"),
]


@pytest.mark.parametrize(("family", "model", "said", "numbers", "words"), WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_the_weights_are_refused(
    family: str, model: dict[str, Any], said: dict[str, Any], numbers: Numbers, words: str
) -> None:
    weights, arguments = core_for(family, 3, **model)
    if said:
        translate(checkpoint_of(weights, CORE, arguments), family, Numbers(qkv_layout="groups"))
    with pytest.raises(CheckpointError, match=words):
        translate(checkpoint_of(weights, CORE, arguments | said), family, numbers)


def test_a_stack_of_another_size_than_the_arguments_say_is_refused() -> None:
    weights, arguments = random_core(5, experts=3)
    there = translate(checkpoint_of(weights, CORE, arguments), "hf-moe-stacked")
    with pytest.raises(CheckpointError, match="is a stack of 3; expected were 4 experts"):
        translate(dataclasses.replace(there, arguments=arguments | {"num_experts": 4}), CORE)


def test_names_that_fit_no_rule_and_parts_that_are_missing_are_listed_in_one_error() -> None:
    weights, arguments = random_core(4)
    there = dict(weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama")))
    del there["model.layers.0.self_attn.k_proj.weight"]
    del there["model.norm.weight"]
    there |= {"model.layers.0.extra.weight": torch.ones(2), "other": torch.ones(2)}
    with pytest.raises(CheckpointError) as caught:
        translate(checkpoint_of(there, "hf-llama", arguments), CORE)
    for expected in (
        "4 problem(s)",
        "'model.layers.0.extra.weight' fits no rule",
        "'other' fits no rule",
        "'model.layers.0.self_attn.k_proj.weight' is missing, which belongs with 'model.layers.0.self_attn.q_proj",
        "'model.norm.weight' fits no name",
    ):
        assert expected in str(caught.value)


def test_at_most_twenty_problems_are_listed_and_all_are_counted() -> None:
    weights = {f"strange.{number}": torch.ones(1) for number in range(50)}
    names = NameMap(CORE, "mine", (rule("usual.{layer}", "other.{layer}", optional=True),))
    with pytest.raises(CheckpointError, match=r"50 problem\(s\)") as caught:
        apply(names, checkpoint_of(weights, CORE))
    assert str(caught.value).count("fits no rule") == 20 and "... and 30 more" in str(caught.value)


@pytest.mark.parametrize("told_by", ["arguments", "other layers", "arguments alone"])
def test_a_missing_expert_is_named(told_by: str) -> None:
    weights, arguments = random_core(5, experts=3)
    lost = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight"
    if told_by == "other layers":
        arguments["num_experts"] = None
        weights |= {name.replace("layers.0", f"layers.{arguments['num_layers']}"): w for name, w in weights.items()}
        arguments["num_layers"] += 1
    ends = "experts.2.linear_fc2.weight" if told_by == "arguments alone" else lost  # of all layers
    weights = {name: weight for name, weight in weights.items() if not name.endswith(ends)}
    with pytest.raises(CheckpointError, match=re.escape(f"{lost!r} is missing, which belongs with")):
        translate(checkpoint_of(weights, CORE, arguments), "hf-moe-stacked")


@pytest.mark.parametrize("family", ["hf-llama", "hf-gpt2", "megatron-deepspeed"])
def test_a_missing_layer_is_named(family: str) -> None:
    weights, arguments = random_core(6, gated=family == "hf-llama")
    weights |= {name.replace("layers.0", "layers.9"): weight for name, weight in weights.items()}
    with pytest.raises(CheckpointError, match=r"nothing was found of layer\(s\) .*8, but of others up to 9"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_layers": None}), family, Numbers(qkv_layout="groups"))


def test_a_layer_without_one_of_its_matrices_is_named() -> None:
    weights, arguments = random_core(8)
    weights |= {name.replace("layers.0", f"layers.{arguments['num_layers']}"): w for name, w in weights.items()}
    weights = {n: w for n, w in weights.items() if not n.startswith("decoder.layers.0.self_attention.linear_qkv.")}
    with pytest.raises(CheckpointError, match="linear_qkv.* is missing for layer 0"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_layers": None}), "hf-llama")


def test_states_of_another_form_follow_a_rename_only() -> None:
    weights, arguments = random_core(10)
    source = checkpoint_of(weights, CORE, arguments)
    fc1, fc2 = (f"decoder.layers.0.mlp.linear_fc{number}.weight" for number in (1, 2))
    owned = {0: {"row": torch.ones(3)}}
    odd = {name: {**source.params[name].states, "second": held(torch.ones(2), "second")} for name in (fc1, fc2)}
    there = translate(replaced(source, fc2, states=odd[fc2], owner_states=owned), "hf-llama")
    kept = there.params["model.layers.0.mlp.down_proj.weight"]
    assert kept.owner_states == owned and kept.states["second"].shape == (2,)
    with pytest.raises(CheckpointError, match=r"what a rule keeps of its matrices \(owner_states\), which cannot fo"):
        translate(replaced(source, fc1, owner_states=owned), "hf-llama")
    with pytest.raises(CheckpointError, match=r"'second' of shape \(2,\), which cannot follow"):
        translate(replaced(source, fc1, states=odd[fc1]), "hf-llama")
    padded = replaced(source, EMBEDDING, owner_states=owned)  # its padding stays, or is cut
    assert translate(padded, "hf-llama").params["model.embed_tokens.weight"].owner_states
    with pytest.raises(CheckpointError, match="owner_states"):
        translate(padded, "hf-llama", Numbers(vocab_size=1))


def test_which_matrices_there_are_follows_a_rename_only() -> None:
    """Of what is split, joined or permuted these elements are not the same any more, so nothing is said of it."""
    weights, arguments = random_core(10)
    fc1, fc2, qkv = (f"decoder.layers.0.{name}" for name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", QKV))
    matrices = {name: [f"some rows of {name}", "others"] for name in (fc1, fc2, qkv)}
    source = checkpoint_of(weights, CORE, {**arguments, "matrices": matrices})
    there = translate(source, "hf-llama")
    assert there.arguments["matrices"] == {"model.layers.0.mlp.down_proj.weight": matrices[fc2]}
    assert translate(there, CORE).arguments == {**arguments, "matrices": {fc2: matrices[fc2]}}
    only_split = dataclasses.replace(source, arguments={**arguments, "matrices": {fc1: matrices[fc1]}})
    assert translate(only_split, "hf-llama").arguments == arguments
    assert translate(source, CORE).arguments["matrices"] == matrices


@pytest.mark.parametrize("changes", [{"step": 4.0}, {"group": 1}, {"states": {}}, {"weight": torch.bfloat16}])
def test_parts_that_differ_are_not_joined(changes: dict[str, Any]) -> None:
    weights, arguments = random_core(11)
    there, name = translate(checkpoint_of(weights, CORE, arguments), "hf-llama"), "model.layers.0.mlp.up_proj.weight"
    said = "are joined by rule .*, but differ in"
    if "weight" in changes:
        changes, said = {"weight": there.params[name].weight.to(changes["weight"])}, "torch.bfloat16 .* cannot be join"
    with pytest.raises(CheckpointError, match=said):
        translate(replaced(there, name, **changes), CORE)


def test_names_that_are_made_twice_and_maps_of_other_names_are_refused() -> None:
    weights, arguments = random_core(0)
    weights["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = torch.ones(2)
    with pytest.raises(CheckpointError, match="'decoder.layers.0.input_layernorm.weight'; one of them is too many"):
        translate(checkpoint_of(weights, CORE, arguments), CORE)
    names = NameMap(CORE, "mine", (rule("a", "c"), rule("b", "c")))
    with pytest.raises(CheckpointError, match="two rules make 'c'"):
        apply(names, checkpoint_of({"a": torch.ones(1), "b": torch.ones(1)}, CORE))
    with pytest.raises(CheckpointError, match="the map is from megatron-core to hf-llama, but .* names are model"):
        apply(find("hf-llama"), checkpoint_of({}, "model"))
    with pytest.raises(CheckpointError, match="unknown names 'hf-lama'; did you mean 'hf-llama'?"):
        find("hf-lama")
    with pytest.raises(ValueError, match=r"rule a -> b \+ c: 1 tensors, but 2 names for them"):
        Rule((Pattern("a"),), (Pattern("b"), Pattern("c")))


# Aliases, ties, buffers, what is dropped, padding of the vocabulary


def test_names_of_transformer_engine_are_understood() -> None:
    weights, arguments = random_core(13, experts=2)
    called = {}
    for name, weight in weights.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        called[re.sub(r"local_experts\.(\d+)\.(linear_fc.)\.weight", r"\2.weight\1", name)] = weight
    assert len(set(called) & set(weights)) < len(weights) / 2
    assert_equal(weights_of(translate(checkpoint_of(called, CORE, arguments), CORE)), weights)


def test_ties_and_buffers_are_renamed_where_there_is_a_name_and_what_is_dropped_is_said() -> None:
    weights, arguments = random_core(14, tied=True)
    buffers = {"router.expert_bias": held(torch.ones(1), "bias")}
    source = dataclasses.replace(checkpoint_of(weights, CORE, arguments), tied={HEAD: EMBEDDING}, buffers=buffers)
    there = translate(source, "hf-llama")
    assert there.tied == {"lm_head.weight": "model.embed_tokens.weight"} and not there.buffers
    assert any("no name for 'router.expert_bias'; left out" in note for note in there.notes)
    assert translate(source, CORE).buffers == source.buffers
    assert translate(there, CORE).tied == source.tied
    both = checkpoint_of({"rotary": torch.ones(2, 2), "kept": torch.ones(2)}, CORE)
    found = apply(NameMap(CORE, "mine", (rule("rotary", []), rule("kept", "kept"))), both)
    assert list(found.params) == ["kept"] and found.notes == ("1 parameter(s) were dropped by the name map: 'rotary'.",)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_the_vocabulary_is_cut_and_put_back_as_zeros(family: str) -> None:
    weights, arguments = core_for(family, 15, tied=False)
    width = weights[EMBEDDING].shape[1]
    padded = torch.cat([torch.ones(5, width), torch.full((3, width), 7.0)])
    source = checkpoint_of(weights | {EMBEDDING: padded, HEAD: padded}, CORE, arguments)
    layout = {"qkv_layout": "groups"}
    there = apply(find(family), source, Numbers(vocab_size=5, **layout))
    assert sum(param.shape == (5, width) for param in there.params.values()) >= 2
    back = apply(find(family).inverse(), there, Numbers(vocab_multiple=4, **layout))
    for name in (EMBEDDING, HEAD):
        found = {"weight": back.params[name].weight, **back.params[name].states}
        for key, value in (("weight", 1.0), (MASTER, 3.0), ("momentum_buffer", -1.0)):
            expected = torch.cat([torch.full((5, width), value), torch.zeros(3, width)])
            assert torch.equal(found[key].read(), expected), (name, key)
    with pytest.raises(CheckpointError, match="has 8 rows, fewer than the vocabulary of 9 that was given"):
        apply(find(family), source, Numbers(vocab_size=9, **layout))


# Reading


def test_parts_read_no_more_than_themselves() -> None:
    reads: list[tuple[int, int]] = []

    def counted(weight: Tensor) -> LazyTensor:
        def part(start: int, stop: int) -> Tensor:
            reads.append((start, stop))
            return weight.flatten()[start:stop].clone()

        whole = (tuple(weight.shape), weight.dtype, lambda: part(0, weight.numel()).view(weight.shape))
        return LazyTensor(*whole, "w", part)

    weights = {QKV: torch.arange(96.0).view(48, 2), "mlp.linear_fc1.weight": torch.arange(40.0).view(20, 2)}
    params = {f"decoder.layers.0.{name}": Param(counted(weight)) for name, weight in weights.items()}
    source = Checkpoint("a test's", "", CORE, params)
    rules = tuple(rule for rule in find("hf-llama").rules if any("split" in name for name in rule.do))
    there = apply(NameMap(CORE, "mine", rules), source, Numbers(heads=8, query_groups=2))
    assert not reads
    size = 4 * 2  # channels of a head, times columns
    expected = {
        "self_attn.q_proj": [(0, 4 * size), (6 * size, 10 * size)],
        "self_attn.k_proj": [(4 * size, 5 * size), (10 * size, 11 * size)],
        "self_attn.v_proj": [(5 * size, 6 * size), (11 * size, 12 * size)],
        **{"mlp.gate_proj": [(0, 20)], "mlp.up_proj": [(20, 40)]},
    }
    for name, parts in expected.items():
        reads.clear()
        there.params[f"model.layers.0.{name}.weight"].weight.read()
        assert reads == parts, name
    stack = Checkpoint("", "", "mine", {"fc2": Param(counted(torch.randn(3, 4, 5)))})
    unstacked = apply(NameMap("mine", CORE, (rule("fc2", "layers.{layer}.fc2"),)), stack)
    reads.clear()
    unstacked.params["layers.1.fc2"].weight.read()
    assert reads == [(20, 40)]


# The user's own


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "names.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_users_file_serves_both_ways(tmp_path: Path) -> None:
    """With stacks of layers, of layers and experts, and of a layer's experts whose gate and up are apart."""
    layer, blocks = "decoder.layers.{layer}", ["qkv_blocks", "transpose"]
    expert, halves = f"{layer}.mlp.experts.local_experts.{{expert}}", ["{layer+1}.gate", "{layer+1}.up"]
    rules = [
        {"source": f"{layer}.{QKV}", "target": "blocks.{layer+1}.qkv", "do": blocks},
        {"source": f"{layer}.mlp.linear_fc2.weight", "target": "down"},
        {"source": f"{expert}.linear_fc2.weight", "target": "experts.down"},
        {"source": f"{expert}.linear_fc1.weight", "target": halves, "do": ["split_gate_up"]},
        {"source": "unused.{*}", "target": [], "optional": True},
    ]
    numbers = {"query_groups": 2, "heads": 4}
    path = written(tmp_path, {"target": "mine", "family": "hf-llama", "numbers": numbers, "rules": rules})
    parts = q, k, v = qkv_of(4, 2, 3, 5)
    weights = {EMBEDDING: torch.randn(7, 5), "decoder.final_layernorm.weight": torch.ones(5)}
    down, gate_up = torch.randn(2, 3, 3, 4), torch.randn(2, 2, 4, 5)  # the layer's own, and those of two experts
    for number in range(2):
        name = f"decoder.layers.{number}"
        weights |= {f"{name}.{QKV}": grouped_rows(*parts, 2), f"{name}.mlp.linear_fc2.weight": down[number, 0]}
        weights |= {f"{name}.{norm}_layernorm.weight": torch.ones(5) for norm in ("input", "pre_mlp")}
        weights[f"{name}.self_attention.linear_qkv.bias"] = torch.arange(24.0)
        for which in range(2):
            local = f"{name}.mlp.experts.local_experts.{which}"
            weights |= {f"{local}.linear_fc2.weight": down[number, 1 + which]}
            weights |= {f"{local}.linear_fc1.weight": gate_up[number, which]}
    there = translate(checkpoint_of(weights, CORE), path)
    assert there.names == "mine"
    found = weights_of(there)
    expected = {"blocks.2.qkv": torch.cat([q, k, v]).t(), "down": down[:, 0], "experts.down": down[:, 1:]}
    expected |= {"1.gate": gate_up[0, :, :2], "2.up": gate_up[1, :, 2:]}
    assert_equal({name: found[name] for name in expected}, expected)
    assert "model.layers.0.self_attn.q_proj.bias" in found
    assert_equal(weights_of(translate(there, CORE, source=path)), weights)


def one(source: Any, target: Any, **more: Any) -> dict[str, Any]:
    """A user's file with one rule."""
    return {"target": "a", "rules": [{"source": source, "target": target, **more}]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ([], "expected an object with 'target' and 'rules'; found list"),
        ({"target": "a", "rulse": []}, "unknown key 'rulse'; did you mean 'rules'?"),
        ({"target": "a"}, "no rules, and no family"),
        ({"target": "a", "family": "hf-lama"}, "unknown family 'hf-lama'; did you mean 'hf-llama'?"),
        ({"target": "a", "family": "hf-llama", "source": "b"}, "is for 'megatron-core', but source is 'b'"),
        ({**one("x", "y"), "source": "a"}, "are both 'a'"),
        ({"target": "a", "family": "hf-llama", "numbers": {"haeds": 3}}, "unknown key 'haeds'; did you mean 'heads'?"),
        ({"target": "a", "rules": [{"source": "x", "targte": 1}]}, "(?s)rule 0: .*unknown key 'targte'; did you mean"),
        (one("x", "y", do=["transpos"]), "did you mean 'transpose'?"),
        (one("x", "y", do=["split_qkv"]), "3 tensors, but 1 names"),
        (one("x", "y", do=["join_qkv"]), "takes 3 tensors, but .* 1"),
        (one("x", [], do=["transpose"]), "needs no operations"),
        (one("x{", "y"), "a brace is not closed"),
        (one("x{A-b}", "y"), r"\{A-b\} is no field"),
        (one("x{*}", "y"), "only numbers can be stacked over"),
        (one("x{a}", "y{b}"), "only in the source"),
        (one(["x{a}", "y"], ["x{a}", "y"]), "must have the same fields"),
        (one("x", ["y", "z"]), "1 tensors, but 2 names"),
    ],
)
def test_what_is_wrong_in_a_users_file_is_said(content: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(CheckpointError, match=said) as caught:
        find(path)
    assert path in str(caught.value)


def test_a_rule_of_a_users_file_that_fits_nothing_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, one("embeding.weight", "y"))
    with pytest.raises(CheckpointError, match="'embeding.weight' fits no name; did you mean 'embedding.weight'?"):
        translate(checkpoint_of({"embedding.weight": torch.ones(2, 2)}, CORE), path)


def test_patterns_read_and_write_names() -> None:
    pattern = Pattern("{layer+2}.mlp.{weight|bias}")
    assert pattern.match("5.mlp.bias") == {"layer": 3, "weight|bias": "bias"}
    assert pattern.format({"layer": 3, "weight|bias": "bias"}) == "5.mlp.bias"
    for name in ("1.mlp.bias", "05.mlp.bias", "5.mlp.other", "5.mlp.bias.more", "x5.mlp.bias"):
        assert pattern.match(name) is None, name
    assert Pattern("{a}.{a}").match("1.2") is None and Pattern("{a}.{a}").match("3.3") == {"a": 3}


# What changes for Muon

MUON = {"muon_split_qkv": True, "muon_num_ns_steps": 5, "muon_scale_mode": "spectral"}


def atoms_in(notes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for note in notes:
        yield from (json.loads(found) for found in re.findall(r"Set \"atoms\": (\{.*\}) for the same", note))


def blocks_by_part(checkpoint: Checkpoint, name: str, settings: dict[str, Any], transposed: bool) -> dict[str, Tensor]:
    """The matrices that the sentence's setting makes of a parameter: by "q", "k" and "v", or "g" and "u"."""
    found = AtomSettings.parse(settings).of([name])
    assert found is not None, (name, settings)
    weight = checkpoint.params[name].weight.read()
    blocks = blocks_of(name, tuple(weight.shape), transposed, *found)
    flat = weight.flatten()
    parts = {b.name[0]: torch.stack([flat[b.flat(at)] for at in range(b.numel)]).view(b.shape) for b in blocks}
    assert len(parts) == len(blocks)
    return parts


@pytest.mark.parametrize("layout", ["core", "groups", "blocks", "blocks of ranks", "gpt2"])
def test_the_setting_for_a_fused_matrix_divides_it_into_q_k_and_v(layout: str) -> None:
    heads, groups, size = (6, 6, 2) if layout == "gpt2" else (6, 3, 2)
    parts = qkv_of(heads, groups, size, 4)
    arguments = MUON | {"num_attention_heads": heads, "num_query_groups": groups, "swiglu": False}
    source = checkpoint_of({f"decoder.layers.0.{QKV}": grouped_rows(*parts, groups)}, CORE, arguments)
    names = find({"core": CORE, "gpt2": "hf-gpt2"}.get(layout, "megatron-deepspeed"))
    names = dataclasses.replace(names, rules=tuple(dataclasses.replace(r, optional=True) for r in names.rules))
    numbers = Numbers(qkv_layout="blocks" if "blocks" in layout else "groups", qkv_ranks=3 if "ranks" in layout else 1)
    there = apply(names, source, numbers)
    (settings,) = atoms_in(there.notes)
    (target,) = there.params
    found = blocks_by_part(there, target, settings, transposed=layout == "gpt2")
    for part, matrix in zip("qkv", parts, strict=True):
        mine = found[part].t() if layout == "gpt2" and found[part].shape != matrix.shape else found[part]
        assert torch.equal(mine, matrix), (layout, part, found.keys())


def test_joining_says_how_to_keep_matrices_apart() -> None:
    weights, arguments = random_core(3)
    there = translate(checkpoint_of(weights, CORE, arguments | MUON), "hf-llama")
    core, before = translate(there, CORE), weights_of(there)
    assert len(list(atoms_in(core.notes))) == 2
    settings = {key: value for each in atoms_in(core.notes) for key, value in each.items()}
    found = blocks_by_part(core, "decoder.layers.0.mlp.linear_fc1.weight", settings, False)
    found |= blocks_by_part(core, f"decoder.layers.0.{QKV}", settings, False)
    names = ("mlp.gate", "mlp.up", *(f"self_attn.{part}" for part in "qkv"))
    assert_equal(found, {n.split(".")[1][0]: before[f"model.layers.0.{n}_proj.weight"] for n in names})


@pytest.mark.parametrize(("split", "said"), [(True, "nothing changes"), (False, "no setting"), (None, "do not say")])
def test_splitting_says_what_megatron_orthogonalized(split: bool | None, said: str) -> None:
    weights, arguments = random_core(1, layers=2)
    arguments |= MUON | {"muon_split_qkv": split}
    notes = translate(checkpoint_of(weights, CORE, arguments), "hf-llama").notes
    (qkv,) = [note for note in notes if note.startswith("q, k and v are separate parameters now")]
    assert said in qkv and f"{arguments['num_layers']} parameters" in qkv and "linear_qkv.weight" in qkv
    (gated,) = [note for note in notes if note.startswith("Gate and up were one matrix")]
    assert "no setting of 'atoms' joins" in gated and "linear_fc1.weight" in gated
    (listed,) = [note for note in notes if "muon_num_ns_steps=5" in note]
    assert "muon_scale_mode='spectral'" in listed and "travel along" in listed


def test_one_sentence_serves_all_layers_and_blockwise_ranks_and_none_what_muon_did_not_train() -> None:
    weights, arguments = random_core(1, layers=3)
    source = checkpoint_of(weights, CORE, arguments | MUON | {"muon_tp_mode": "blockwise"})
    notes = translate(source, CORE).notes
    assert [list(settings) for settings in atoms_in(notes)] == [[f"decoder.layers.*.{QKV}"]]
    assert not any("blockwise'" in note and "ranks" in note for note in notes)
    of_ranks = translate(dataclasses.replace(source, world={"tp": 2}), CORE).notes
    assert any("each of 2 tensor-parallel ranks" in note for note in of_ranks)
    for name, param in source.params.items():
        states = {key: state for key, state in param.states.items() if key != "momentum_buffer"}
        source = replaced(source, name, states=states)
    assert translate(source, "hf-llama").notes == ()


# Genuine checkpoints


def families_of(source: Checkpoint) -> list[str]:
    """Those with names for what the arguments describe."""
    if source.arguments.get("num_experts"):
        return ["hf-mixtral", "hf-qwen-moe", "hf-moe-stacked"]
    if source.arguments.get("swiglu"):
        return ["hf-llama", "megatron-deepspeed"]
    return ["hf-gpt2", "megatron-deepspeed"]


@pytest.mark.parametrize("folder", genuine())
def test_genuine_megatron_checkpoints_go_to_every_family_and_back(folder: Path) -> None:
    numbers, source = Numbers(qkv_layout="blocks"), formats.read(folder)
    for family in families_of(source):
        there = translate(source, family, numbers)
        if family == "hf-llama":  # a matrix and its states by plain arithmetic
            args, qkv = source.arguments, source.params[f"decoder.layers.1.{QKV}"]
            groups, size = args["num_query_groups"], args["kv_channels"]
            each = args["num_attention_heads"] // groups * size
            for key, state in qkv.states.items():
                fused = state.read()
                q = torch.cat([fused[g * (each + 2 * size) : g * (each + 2 * size) + each] for g in range(groups)])
                assert torch.equal(there.params["model.layers.1.self_attn.q_proj.weight"].states[key].read(), q)
        gates.check(there)
        back = translate(there, CORE, numbers)
        assert set(back.params) == set(source.params)
        for name, param in source.params.items():
            mine = back.params[name]
            assert torch.equal(mine.weight.read(), param.weight.read()) and set(mine.states) == set(param.states)
            assert all(torch.equal(mine.states[key].read(), state.read()) for key, state in param.states.items())
            assert (mine.step, mine.group) == (param.step, param.group)
