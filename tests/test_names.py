"""Name maps: Hugging Face's models give the same logits through them, all are undone exactly, and misfits are said."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from lwopt_backend.checkpoint import formats, gates
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param, held
from lwopt_backend.checkpoint.names import CORE, FAMILIES, Numbers, apply, find, translate
from lwopt_backend.checkpoint.names.rules import NameMap, Pattern, Rule, rule
from tests.checkpoint_contents import changed, params_of, same, watched
from tests.command_line import genuine

Tensors = Mapping[str, Tensor]
EMBEDDING, HEAD, LAYER = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers.0"
NORM, QKV = "decoder.final_layernorm", "self_attention.linear_qkv.weight"


def states_of(weight: Tensor, is_matrix: bool) -> dict[str, Tensor]:
    """A momentum for matrices and Adam's moments for the rest: other values, each a function of the weight."""
    weight = weight.float()
    adams = {"exp_avg": weight + 1, "exp_avg_sq": weight * 2}
    return {MASTER: weight * 3, **({"momentum_buffer": -weight} if is_matrix else adams)}


def checkpoint_of(weights: Tensors, names: str, arguments: Mapping[str, Any] | None = None) -> Checkpoint:
    params = {}
    for name, weight in weights.items():
        states = {key: held(state, name) for key, state in states_of(weight, weight.ndim > 1).items()}
        params[name] = Param(held(weight, name), states, step=3.0)
    return Checkpoint("a test's", "", names, params, arguments=arguments or {})


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """After a check that every state followed its weight."""
    found = {}
    for name, param in checkpoint.params.items():
        weight = found[name] = param.weight.read()
        assert tuple(weight.shape) == param.shape and weight.is_contiguous() and param.step == 3.0
        expected = states_of(weight, "momentum_buffer" in param.states)
        assert_equal({key: state.read() for key, state in param.states.items()}, expected)
    return found


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), name


# Megatron-core's form of a Hugging Face model, written down row by row
def grouped_rows(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    rows = []
    for group in range(groups):
        for part in (q, k, v):
            size = len(part) // groups
            rows += [part[row] for row in range(group * size, (group + 1) * size)]
    return torch.stack(rows)


# By Megatron-core's name the parameters of a layer that are joined into one, where the model has them
OF_LLAMA = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc1": "mlp.gate_proj mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared_experts.linear_fc1": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_expert.down_proj",
}
OF_GPT2 = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2", "self_attention.linear_qkv": "q k v"}
OF_GPT2 |= {"self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}


def core_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """And Megatron's args of it: without grouped queries their number of groups is an unused default."""
    config, state, is_gpt2 = model.config, model.state_dict(), isinstance(model, transformers.GPT2LMHeadModel)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if is_gpt2:
        core = {EMBEDDING: state["transformer.wte.weight"]}
        core["embedding.position_embeddings.weight"] = state["transformer.wpe.weight"]
        core |= {f"{NORM}.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    else:
        core = {EMBEDDING: state["model.embed_tokens.weight"], f"{NORM}.weight": state["model.norm.weight"]}
        core |= {} if config.tie_word_embeddings else {HEAD: state["lm_head.weight"]}
    for number in range(config.num_hidden_layers):
        ours, start = f"decoder.layers.{number}", f"transformer.h.{number}." if is_gpt2 else f"model.layers.{number}."
        layer = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
        if is_gpt2:
            layer = {name: tensor.t() for name, tensor in layer.items()}
        for kind in ("weight", "bias"):
            if is_gpt2:
                layer |= {f"{part}.{kind}": t for part, t in zip("qkv", layer[f"attn.c_attn.{kind}"].chunk(3))}
            for name, theirs in (OF_GPT2 if is_gpt2 else OF_LLAMA).items():
                parts = [layer[f"{each}.{kind}"] for each in theirs.split() if f"{each}.{kind}" in layer]
                if parts:
                    whole = grouped_rows(*parts, groups) if len(parts) == 3 else torch.cat(parts)
                    core[f"{ours}.{name}.{kind}"] = whole
        if "mlp.shared_expert_gate.weight" in layer:
            core[f"{ours}.mlp.shared_experts.gate_weight"] = layer["mlp.shared_expert_gate.weight"]
        for expert in range(len(layer.get("mlp.experts.down_proj", ()))):
            local = f"{ours}.mlp.experts.local_experts.{expert}"
            core[f"{local}.linear_fc1.weight"] = layer["mlp.experts.gate_up_proj"][expert]
            core[f"{local}.linear_fc2.weight"] = layer["mlp.experts.down_proj"][expert]
    arguments = {
        **{"num_layers": config.num_hidden_layers, "num_attention_heads": heads, "swiglu": not is_gpt2},
        **{"group_query_attention": groups != heads, "num_query_groups": groups if groups != heads else 1},
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "num_experts": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "muon_split_qkv": True,
    }
    return {name: tensor.contiguous().clone() for name, tensor in core.items()}, arguments


SMALL = dict(vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=32)
UNTIED = dict(SMALL, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=False)
EXPERTS = dict(UNTIED, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED = dict(mlp_only_layers=[0], shared_expert_intermediate_size=32)  # the first layer has no experts
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # families of names: of the model in memory, and others
    "Llama": ("hf-llama", "", UNTIED),
    "Llama, biases": ("hf-llama", "", dict(UNTIED, attention_bias=True, mlp_bias=True)),
    "Qwen2": ("hf-llama", "", dict(UNTIED, num_key_value_heads=3, tie_word_embeddings=True)),
    "Qwen3": ("hf-llama", "", dict(UNTIED, head_dim=8)),
    "Mistral": ("hf-llama", "", dict(UNTIED, num_key_value_heads=1)),
    "Mixtral": ("hf-moe-stacked", "hf-mixtral hf-qwen-moe", dict(UNTIED, num_local_experts=3)),
    "Qwen2Moe": ("hf-moe-stacked", "hf-qwen-moe", dict(EXPERTS, **SHARED, num_experts=3)),
    "Qwen3Moe": ("hf-moe-stacked", "hf-qwen-moe", dict(EXPERTS, head_dim=4, num_experts=5)),
    "GPT2": ("hf-gpt2", "", dict(vocab_size=29, n_embd=24, n_layer=2, n_head=6, n_inner=40)),
}
OF_FAMILY = {**dict.fromkeys(FAMILIES, "Llama"), **dict.fromkeys(("hf-mixtral", "hf-moe-stacked"), "Mixtral")}
OF_FAMILY.update({"hf-qwen-moe": "Qwen3Moe", "hf-gpt2": "GPT2"})


def built(name: str, seed: int = 5, **options: Any) -> nn.Module:
    """With random values, also in norms and biases, which begin as ones and zeros."""
    config = getattr(transformers, f"{name.split(',')[0]}Config")(**{**MODELS[name][2], **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.eval()


def core(name: str = "Llama", **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two layers in Megatron-core's form, untied unless asked otherwise, and Megatron's args."""
    return core_of(built(name, **options))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10) % 29).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_model_from_megatrons_form_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """In memory; and experts as in files, which are what transformers writes and reads."""
    in_memory, others, _ = MODELS[name]
    model, fresh = built(name), built(name, seed=6)
    weights, arguments = core_of(model)
    source = checkpoint_of(weights, CORE, arguments)
    missing, unexpected = fresh.load_state_dict(weights_of(translate(source, in_memory)), strict=False)
    assert not unexpected and (missing == [] or missing == ["lm_head.weight"])
    assert torch.equal(logits(fresh), logits(model))
    if in_memory == "hf-moe-stacked":
        weights = weights_of(translate(source, others.split()[0]))
        model.save_pretrained(tmp_path)
        assert_equal(weights, load_file(tmp_path / "model.safetensors"))
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(read), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_every_map_is_undone_exactly_and_cuts_a_vocabularys_padding(name: str) -> None:
    in_memory, others, _ = MODELS[name]
    weights, arguments = core(name)
    padded = {key: functional.pad(weights[key], (0, 0, 0, 3)) for key in (EMBEDDING, HEAD) if key in weights}
    source = checkpoint_of(weights | padded, CORE, arguments)
    for family in (CORE, in_memory, *others.split()):
        back = apply(find(family).inverse(), apply(find(family), source))
        assert list(back.params) == list(weights) or family != CORE
        assert_equal(weights_of(back), weights | padded)
        there = apply(find(family), source, Numbers(vocab_size=29))
        assert there.names == family and there.arguments == arguments
        assert_equal(weights_of(translate(there, CORE)), weights)
        seen, known = (
            torch.cat([tensor.flatten() for tensor in tensors])
            for tensors in ([param.weight.read() for param in there.params.values()], weights.values())
        )
        assert torch.equal(seen.sort().values, known.sort().values)


def test_one_family_becomes_another() -> None:
    model = built("Mixtral")
    stacked = checkpoint_of(model.state_dict(), "model", {"num_key_value_heads": 2, "num_attention_heads": 6})
    files = translate(stacked, "hf-mixtral", source="hf-moe-stacked")
    assert files.names == "hf-mixtral"
    again = translate(files, "hf-moe-stacked")
    assert_equal(weights_of(again), model.state_dict())
    assert not again.notes
    assert translate(again, "hf-moe-stacked") is again
    cut = translate(again, "hf-moe-stacked", Numbers(vocab_size=20))
    assert cut.names == "hf-moe-stacked" and cut.params["lm_head.weight"].shape == (20, 24)


def qkv_of(heads: int, groups: int, size: int, columns: int) -> list[Tensor]:
    numbers = ((heads, 0), (groups, 100), (groups, 200))
    return [torch.arange(n * size * float(columns)).view(-1, columns) + at for n, at in numbers]


# Numbers
def only_qkv() -> NameMap:
    return dataclasses.replace(find("hf-llama"), rules=tuple(r for r in find("hf-llama").rules if "split_qkv" in r.do))


@pytest.mark.parametrize("known", list(itertools.combinations(["heads", "query_groups", "kv_channels"], 2)))
def test_two_numbers_divide_a_fused_matrix(known: tuple[str, ...]) -> None:
    sizes = {"heads": 6, "query_groups": 2, "kv_channels": 4}
    parts, only = qkv_of(6, 2, 4, 5), only_qkv()
    source = checkpoint_of({f"{LAYER}.{QKV}": grouped_rows(*parts, 2)}, CORE)
    there = weights_of(apply(only, source, Numbers(**{key: sizes[key] for key in known})))
    assert_equal(there, {f"model.layers.0.self_attn.{n}_proj.weight": t for n, t in zip("qkv", parts)})
    for key in known:
        numbers = Numbers(**{key: sizes[key]})
        with pytest.raises(CheckpointError, match="expected two of heads, query_groups and kv_channels"):
            apply(only, source, numbers)
        assert_equal(weights_of(apply(only.inverse(), checkpoint_of(there, "hf-llama"), numbers)), weights_of(source))
    with pytest.raises(CheckpointError, match="expected one of heads, query_groups and kv_channels"):
        apply(only.inverse(), checkpoint_of(there, "hf-llama"))


def joined(rows: tuple[int, int, int], **numbers: int) -> Checkpoint:
    parts = {f"model.layers.0.self_attn.{part}_proj.weight": torch.ones(n, 4) for part, n in zip("qkv", rows)}
    return apply(only_qkv().inverse(), checkpoint_of(parts, "hf-llama"), Numbers(**numbers))


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    joined((24, 8, 8), query_groups=2, heads=6)
    for rows, numbers, said in [
        ((24, 8, 4), {"query_groups": 2}, "expected k and v alike"),
        ((24, 8, 8), {"query_groups": 2, "heads": 5}, "do not divide by heads"),
        ((24, 8, 8), {"query_groups": 3}, "do not divide by heads"),
        ((24, 8, 8), {"query_groups": 2, "kv_channels": 2}, "do not divide by heads"),
        ((12, 4, 4), {"query_groups": 1, "kv_channels": 8}, "rows of q, k and v, found 20, which do not divide"),
        # one and a half heads a group
        ((12, 8, 8), {"query_groups": 2}, "rows of q, k and v, found 28, which do not divide"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            joined(rows, **numbers)


def test_a_given_number_goes_before_arguments_whose_one_query_group_may_be_a_default() -> None:
    weights, arguments = core(num_hidden_layers=1)
    expected = weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama"))
    wrong = checkpoint_of(weights, CORE, arguments | {"num_attention_heads": 31})
    assert_equal(weights_of(translate(wrong, "hf-llama", Numbers(heads=6))), expected)
    parts = qkv_of(6, 6, 2, 4)
    weights[f"{LAYER}.{QKV}"] = grouped_rows(*parts, 6)
    del arguments["group_query_attention"]
    arguments |= {"num_query_groups": 1, "kv_channels": 2}
    for grouped in ({}, {"group_query_attention": False}):
        there = weights_of(translate(checkpoint_of(weights, CORE, arguments | grouped), "hf-llama"))
        assert torch.equal(there["model.layers.0.self_attn.k_proj.weight"], parts[1])
    arguments["kv_channels"] = None  # 36 rows might be 6 + 1 + 1 heads no more than 6 + 6 + 6
    for grouped, said in (({}, "two of heads, query_groups"), ({"group_query_attention": True}, "do not divide by")):
        with pytest.raises(CheckpointError, match=said):
            translate(checkpoint_of(weights, CORE, arguments | grouped), "hf-llama")


# Refusals
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without(end: str) -> Change:
    return lambda weights: {name: weight for name, weight in weights.items() if not name.endswith(end)}


def renumbered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.1", "layers.9"): weight for name, weight in weights.items()}


LAST, PLUS_ONE, NO = "experts.2.linear_fc2.weight", "layernorm_zero_centered_gamma", Numbers()
NO_EXPERT = re.escape(f"'{LAYER}.mlp.experts.local_{LAST}' is missing, although")
NO_LAYERS = "expected layers 0 to 9, found none of .*8;"
WRONG: list[tuple[str, Change | None, dict[str, Any], Numbers, str]] = [
    # the family, what is changed, what the arguments say otherwise, numbers, and what is said
    ("hf-llama", None, {"num_attention_heads": 31}, NO, "do not divide by heads"),
    ("hf-llama", None, {"num_attention_heads": "many"}, NO, "is 'many'; expected a number; give 'heads'"),
    ("hf-llama", None, {"num_layers": 3}, NO, "expected layers 0 to .*, found none of 2;"),
    ("hf-llama", None, {"num_layers": 1}, NO, "expected 1 layers by the arguments, found 2"),
    ("hf-llama", None, {"rotary_interleaved": True}, NO, "rotary_interleaved"),
    ("hf-llama", None, {PLUS_ONE: True}, NO, PLUS_ONE),
    ("hf-gpt2", None, {PLUS_ONE: True}, NO, PLUS_ONE),
    ("hf-llama", None, {"swiglu": False}, NO, "swiglu"),
    ("hf-gpt2", None, {"swiglu": True}, NO, "swiglu"),
    ("hf-moe-stacked", None, {"num_experts": 4}, NO, r"experts.3.linear_fc1.weight' is missing"),
    ("hf-moe-stacked", without(LAST), {}, NO, NO_EXPERT),
    ("hf-moe-stacked", without(f"0.mlp.experts.local_{LAST}"), {}, NO, NO_EXPERT),
    ("hf-moe-stacked", without(f"0.mlp.experts.local_{LAST}"), {"num_experts": None}, NO, NO_EXPERT),  # others tell
    ("hf-gpt2", renumbered, {"num_layers": None}, NO, NO_LAYERS),
    ("hf-llama", without(f"0.{QKV}"), {"num_layers": None}, NO, "linear_qkv.* is missing for layer 0"),
]


@pytest.mark.parametrize(("family", "change", "said", "numbers", "words"), WRONG)
def test_weights_and_arguments_that_do_not_fit_are_refused(
    family: str, change: Change | None, said: dict[str, Any], numbers: Numbers, words: str
) -> None:
    weights, arguments = core(OF_FAMILY[family])
    translate(checkpoint_of(weights, CORE, arguments), family)
    weights = change(weights) if change else weights
    with pytest.raises(CheckpointError, match=words):
        translate(checkpoint_of(weights, CORE, arguments | said), family, numbers)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("hf-")])
def test_qwen3_next_is_refused_as_its_norms_are_not_all_centered_alike(family: str) -> None:
    """Megatron-core has one setting for all norms."""
    sizes = {f"linear_{name}": 4 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
    kinds = ["linear_attention", "full_attention"]
    config = transformers.Qwen3NextConfig(**EXPERTS, **sizes, head_dim=4, num_experts=3, layer_types=kinds)
    weights = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    for name, weight in ((name, weight) for name, weight in weights.items() if "norm" in name):  # as they begin
        assert torch.all(weight == float(name.endswith("linear_attn.norm.weight"))), name
    with pytest.raises(CheckpointError, match="'model.layers.0.linear_attn.norm.weight' fits no rule"):
        translate(checkpoint_of(weights, "model"), CORE, Numbers(heads=6, query_groups=2), source=family)


def test_names_that_fit_no_rule_and_parts_that_are_missing_are_listed_in_one_error() -> None:
    """At most twenty, and all are counted."""
    weights, arguments = core()
    there = dict(weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama")))
    del there["model.layers.0.self_attn.k_proj.weight"]
    del there["model.norm.weight"]
    there |= {"model.layers.0.extra.weight": torch.ones(2), "other": torch.ones(2)}
    with pytest.raises(CheckpointError) as caught:
        translate(checkpoint_of(there, "hf-llama", arguments), CORE)
    said, missing = str(caught.value), "'model.layers.0.self_attn.k_proj.weight' is missing, although"
    assert "4 problem(s)" in said and f"{missing} 'model.layers.0.self_attn.q_proj" in said
    assert "'model.layers.0.extra.weight' fits no rule" in said and "'other' fits no rule" in said
    assert "'model.norm.weight' fits no name" in said
    strange = {f"strange.{number}": torch.ones(1) for number in range(50)}
    names = NameMap(CORE, "mine", (rule("usual.{layer}", "other.{layer}", optional=True),))
    with pytest.raises(CheckpointError, match=r"50 problem\(s\)") as caught:
        apply(names, checkpoint_of(strange, CORE))
    assert str(caught.value).count("fits no rule") == 20 and "... and 30 more" in str(caught.value)


def test_states_of_another_form_follow_a_rename_only() -> None:
    weights, arguments = core()
    source = checkpoint_of(weights, CORE, arguments)
    fc1, fc2 = (f"{LAYER}.mlp.linear_fc{number}.weight" for number in (1, 2))
    owned = {0: {"row": torch.ones(3)}}
    odd = {name: {**source.params[name].states, "second": held(torch.ones(2), "second")} for name in (fc1, fc2)}
    there = translate(changed(source, fc2, states=odd[fc2], owner_states=owned), "hf-llama")
    kept = there.params["model.layers.0.mlp.down_proj.weight"]
    assert kept.owner_states == owned and kept.states["second"].shape == (2,)
    with pytest.raises(CheckpointError, match=r"found owner state of its matrices \(owner_states\); give a map"):
        translate(changed(source, fc1, owner_states=owned), "hf-llama")
    with pytest.raises(CheckpointError, match=r"found 'second' of shape \(2,\); give a map"):
        translate(changed(source, fc1, states=odd[fc1]), "hf-llama")
    padded = changed(source, EMBEDDING, owner_states=owned)  # its padding stays, or is cut
    assert translate(padded, "hf-llama").params["model.embed_tokens.weight"].owner_states
    with pytest.raises(CheckpointError, match="owner_states"):
        translate(padded, "hf-llama", Numbers(vocab_size=1))


def test_which_matrices_there_are_follows_a_rename_only() -> None:
    """A split, join or permutation changes which elements these are, so nothing is said of them."""
    weights, arguments = core()
    fc1, fc2, qkv = (f"{LAYER}.{name}" for name in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight", QKV))
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
    weights, arguments = core()
    there, name = translate(checkpoint_of(weights, CORE, arguments), "hf-llama"), "model.layers.0.mlp.up_proj.weight"
    said = "expected equal .* which rule .* joins, found"
    if "weight" in changes:
        changes = {"weight": there.params[name].weight.to(changes["weight"])}
        said = "expected tensors that can be joined, found .*torch.bfloat16"
    with pytest.raises(CheckpointError, match=said):
        translate(changed(there, name, **changes), CORE)


def test_names_made_twice_maps_of_other_names_and_stacks_of_other_sizes_are_refused() -> None:
    weights, arguments = core()
    weights[f"{LAYER}.self_attention.linear_qkv.layer_norm_weight"] = torch.ones(2)
    with pytest.raises(CheckpointError, match=f"'{LAYER}.input_layernorm.weight', found .* and another; drop one"):
        translate(checkpoint_of(weights, CORE, arguments), CORE)
    names = NameMap(CORE, "mine", (rule("a", "c"), rule("b", "c")))
    with pytest.raises(CheckpointError, match="two rules make 'c'"):
        apply(names, checkpoint_of({"a": torch.ones(1), "b": torch.ones(1)}, CORE))
    said = "the checkpoint does not record their family; name their family with --source-names"
    with pytest.raises(CheckpointError, match=said):
        apply(find("hf-llama"), checkpoint_of({}, "model"))
    weights, arguments = core("Mixtral")
    there = translate(checkpoint_of(weights, CORE, arguments), "hf-moe-stacked")
    with pytest.raises(CheckpointError, match="expected a stack of 4 experts, found 3"):
        translate(dataclasses.replace(there, arguments=arguments | {"num_experts": 4}), CORE)
    with pytest.raises(ValueError, match=r"rule a -> b \+ c: expected 1 targets, one for each tensor, found 2"):
        Rule((Pattern("a"),), (Pattern("b"), Pattern("c")))


# Aliases, ties, buffers, what is dropped
def test_names_of_transformer_engine_are_understood() -> None:
    weights, arguments = core("Mixtral")
    called = {}
    for name, weight in weights.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        called[re.sub(r"local_experts\.(\d+)\.(linear_fc.)\.weight", r"\2.weight\1", name)] = weight
    assert len(set(called) & set(weights)) < len(weights) / 2
    assert_equal(weights_of(translate(checkpoint_of(called, CORE, arguments), CORE)), weights)


@pytest.mark.parametrize("name", MODELS)
def test_names_of_a_model_without_a_head_are_understood(name: str) -> None:
    model, family = built(name), MODELS[name][0]
    weights, arguments = core_of(model)
    bare = checkpoint_of(model.base_model.state_dict(), family, arguments)
    assert_equal(weights_of(translate(bare, CORE)), {key: weights[key] for key in weights if key != HEAD})
    assert set(translate(bare, family).params) == set(model.state_dict()) - {"lm_head.weight"}


def test_ties_and_buffers_are_renamed_and_what_is_dropped_is_said() -> None:
    weights, arguments = core(tie_word_embeddings=True)
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


# Reading
def test_parts_read_no_more_than_themselves() -> None:
    reads: list[tuple[int, int]] = []
    params = {QKV: Param(watched(torch.ones(48, 2), reads))}
    params["mlp.linear_fc1.weight"] = Param(watched(torch.ones(20, 2), reads))
    source = Checkpoint("a test's", "", CORE, {f"{LAYER}.{name}": param for name, param in params.items()})
    rules = tuple(rule for rule in find("hf-llama").rules if any("split" in name for name in rule.do))
    there = apply(NameMap(CORE, "mine", rules), source, Numbers(heads=8, query_groups=2))
    stack = Checkpoint("", "", "mine", {"fc2": Param(watched(torch.ones(3, 4, 5), reads))})
    unstacked = apply(NameMap("mine", CORE, (rule("fc2", "layers.{layer}.fc2"),)), stack)
    assert not reads
    size = 4 * 2  # channels of a head, times columns
    for name, expected in {
        "model.layers.0.self_attn.q_proj.weight": [(0, 4 * size), (6 * size, 10 * size)],
        "model.layers.0.self_attn.v_proj.weight": [(5 * size, 6 * size), (11 * size, 12 * size)],
        "model.layers.0.mlp.up_proj.weight": [(20, 40)],
        "layers.1.fc2": [(20, 40)],
    }.items():
        reads.clear()
        {**there.params, **unstacked.params}[name].weight.read()
        assert reads == expected, name


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
        {"source": f"{layer}.{QKV}", "target": "layers.{layer+1}.qkv", "do": blocks},
        {"source": f"{layer}.mlp.linear_fc2.weight", "target": "down"},
        {"source": f"{expert}.linear_fc2.weight", "target": "experts.down"},
        {"source": f"{expert}.linear_fc1.weight", "target": halves, "do": ["split_gate_up"]},
        {"source": "unused.{*}", "target": [], "optional": True},
    ]
    numbers = {"query_groups": 2, "heads": 4}
    path = written(tmp_path, {"target": "mine", "family": "hf-llama", "numbers": numbers, "rules": rules})
    parts = q, k, v = qkv_of(4, 2, 3, 5)
    weights = {EMBEDDING: torch.randn(7, 5), f"{NORM}.weight": torch.ones(5)}
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
    expected = {"layers.2.qkv": torch.cat([q, k, v]).t(), "down": down[:, 0], "experts.down": down[:, 1:]}
    expected |= {"1.gate": gate_up[0, :, :2], "2.up": gate_up[1, :, 2:]}
    assert_equal({name: found[name] for name in expected}, expected)
    assert "model.layers.0.self_attn.q_proj.bias" in found
    assert_equal(weights_of(translate(there, CORE, source=path)), weights)


def one(source: Any, target: Any, **more: Any) -> dict[str, Any]:
    return {"target": "a", "rules": [{"source": source, "target": target, **more}]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ([], "expected an object with 'target' and 'rules'; found list"),
        ({"target": "a", "rulse": []}, "unknown key 'rulse'; did you mean 'rules'?"),
        ({"target": "a"}, "expected 'rules', or a 'family' with rules"),
        ({"target": "a", "family": "hf-lama"}, "unknown family 'hf-lama'; did you mean 'hf-llama'?"),
        ({"target": "a", "family": "hf-llama", "source": "b"}, "is for 'megatron-core', but source is 'b'"),
        ({**one("x", "y"), "source": "a"}, "are both 'a'"),
        ({"target": "a", "family": "hf-llama", "numbers": {"haeds": 3}}, "unknown key 'haeds'; did you mean 'heads'?"),
        ({"target": "a", "rules": [{"source": "x", "targte": 1}]}, "(?s)rule 0: .*unknown key 'targte'; did you mean"),
        (one("x", "y", do=["transpos"]), "did you mean 'transpose'?"),
        (one("x", "y", do=["split_qkv"]), "expected 3 targets, one for each tensor, found 1"),
        (one("x", "y", do=["join_qkv"]), "expected 3 tensors for .* found 1"),
        (one("x", [], do=["transpose"]), "expected no operations on a dropped name"),
        (one("x{", "y"), "expected pairs of braces"),
        (one("x{A-b}", "y"), r"expected a field .*, found \{A-b\}"),
        (one("x{*}", "y"), "expected a number to stack over"),
        (one("x{a}", "y{b}"), "expected extra fields on one side"),
        (one(["x{a}", "y"], ["x{a}", "y"]), "expected equal fields, in one order"),
        (one("x", ["y", "z"]), "expected 1 targets, one for each tensor, found 2"),
        (one("embeding.weight", "y"), "'embeding.weight' fits no name; did you mean 'embedding.weight'?"),
    ],
)
def test_what_is_wrong_in_a_users_file_is_said(content: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(CheckpointError, match=said) as caught:
        translate(checkpoint_of({"embedding.weight": torch.ones(2, 2)}, CORE), path)
    assert path in str(caught.value) or "fits no name" in said


def test_patterns_read_and_write_names() -> None:
    pattern = Pattern("{layer+2}.mlp.{weight|bias}")
    assert pattern.match("5.mlp.bias") == {"layer": 3, "weight|bias": "bias"}
    assert pattern.format({"layer": 3, "weight|bias": "bias"}) == "5.mlp.bias"
    for name in ("1.mlp.bias", "05.mlp.bias", "5.mlp.other", "5.mlp.bias.more", "x5.mlp.bias"):
        assert pattern.match(name) is None, name
    assert Pattern("{a}.{a}").match("1.2") is None and Pattern("{a}.{a}").match("3.3") == {"a": 3}


@pytest.mark.parametrize("heads", [6, 3])
@pytest.mark.parametrize("said", [{"attention_output_gate": True}, {}])
def test_gated_attention_has_no_place_in_other_families(said: dict[str, bool], heads: int) -> None:
    """Megatron-core's rows are queries, gates, keys and values of each group; without its argument, shapes tell."""
    arguments = {"num_attention_heads": heads, "num_query_groups": 3, "group_query_attention": True, **said}
    weights = {f"{LAYER}.{QKV}": torch.ones(4 * heads + 12, 4)}
    weights[f"{LAYER}.self_attention.linear_proj.weight"] = torch.ones(4, 2 * heads)
    source = checkpoint_of(weights, CORE, arguments)
    assert_equal(weights_of(translate(source, CORE)), weights)
    for family in ("hf-llama", "hf-gpt2"):
        names = find(family)
        names = dataclasses.replace(names, rules=tuple(dataclasses.replace(r, optional=True) for r in names.rules))
        with pytest.raises(CheckpointError, match="linear_qkv.*has the gates of a gated attention"):
            apply(names, source)


# Genuine checkpoints
@pytest.mark.parametrize("folder", genuine())
def test_genuine_megatron_checkpoints_go_to_every_family_and_back(folder: Path) -> None:
    source = formats.read(folder)
    families = ["hf-llama" if source.arguments.get("swiglu") else "hf-gpt2"]
    for family in ["hf-mixtral", "hf-qwen-moe", "hf-moe-stacked"] if source.arguments.get("num_experts") else families:
        there = translate(source, family)
        gates.check(there)
        back = translate(there, CORE)
        assert same(params_of(back), params_of(source))
