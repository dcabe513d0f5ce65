"""Maps of names: Hugging Face's models give the same logits through them, and what does not fit is said."""

import dataclasses
import itertools
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
from lwopt_backend.checkpoint.names import CORE, Numbers, computes, families, load_map, translate
from tests.support.checkpoint_contents import changed, watched
from tests.support.command_line import genuine

Tensors = Mapping[str, Tensor]
EMBEDDING, HEAD, LAYER = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers.0"
NORM, QKV = "decoder.final_layernorm", "self_attention.linear_qkv.weight"
FC1, FC2 = (f"{LAYER}.mlp.linear_fc{number}.weight" for number in (1, 2))
DOWN = "model.layers.0.mlp.down_proj.weight"


def states_of(weight: Tensor, is_matrix: bool) -> dict[str, Tensor]:
    """A momentum for matrices and Adam's moments for the rest: other values, each a function of the weight."""
    weight = weight.float()
    adams = {"exp_avg": weight + 1, "exp_avg_sq": weight * 2}
    return {MASTER: weight * 3, **({"momentum_buffer": -weight} if is_matrix else adams)}


def checkpoint_of(weights: Tensors, names: str = CORE, arguments: Mapping[str, Any] | None = None) -> Checkpoint:
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


# Megatron-core's form of a Hugging Face model
def grouped_rows(parts: list[Tensor], groups: int) -> Tensor:
    return torch.cat([part.chunk(groups)[group] for group in range(groups) for part in parts])


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
                    whole = grouped_rows(parts, groups) if len(parts) == 3 else torch.cat(parts)
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


UNTIED = dict(vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=32)
UNTIED |= dict(intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=False)
EXPERTS = dict(UNTIED, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED = dict(mlp_only_layers=[0], shared_expert_intermediate_size=32)  # the first layer has no experts
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # families of names: of the model in memory, and in its files
    "Llama, biases": ("hf-llama", "", dict(UNTIED, attention_bias=True, mlp_bias=True)),
    "Qwen2": ("hf-llama", "", dict(UNTIED, num_key_value_heads=3, tie_word_embeddings=True)),
    "Qwen3": ("hf-llama", "", dict(UNTIED, head_dim=8)),
    "Mistral": ("hf-llama", "", dict(UNTIED, num_key_value_heads=1)),
    "Mixtral": ("hf-moe-stacked", "hf-mixtral", dict(UNTIED, num_local_experts=3)),
    "Qwen2Moe": ("hf-moe-stacked", "hf-qwen-moe", dict(EXPERTS, **SHARED, num_experts=3)),
    "Qwen3Moe": ("hf-moe-stacked", "hf-qwen-moe", dict(EXPERTS, head_dim=4, num_experts=11)),
    "GPT2": ("hf-gpt2", "", dict(vocab_size=29, n_embd=24, n_layer=2, n_head=6, n_inner=40)),
}
OF_FAMILY = {"hf-llama": "Mistral", "hf-moe-stacked": "Mixtral", "hf-gpt2": "GPT2"}


def built(name: str, seed: int = 5, **options: Any) -> nn.Module:
    """With random values, also in norms and biases, which begin as ones and zeros."""
    config = getattr(transformers, f"{name.split(',')[0]}Config")(**{**MODELS[name][2], **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.eval()


def core(name: str = "Mistral", **options: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two layers in Megatron-core's form, untied unless asked otherwise, and Megatron's args."""
    return core_of(built(name, **options))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10) % 29).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_model_from_megatrons_form_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """In memory; and experts as in files, which are what transformers writes and reads. The padding of a vocabulary
    can be cut before or after."""
    in_memory, in_files, _ = MODELS[name]
    model, fresh = built(name), built(name, seed=6)
    weights, arguments = core_of(model)
    padded = {key: functional.pad(weights[key], (0, 0, 0, 3)) for key in (EMBEDDING, HEAD) if key in weights}
    source, cut = checkpoint_of(weights | padded, CORE, arguments), Numbers(vocab_size=29)
    there = translate(source, in_memory, cut)
    assert there.names == in_memory and there.arguments == arguments and translate(there, in_memory) is there
    assert_equal(weights_of(translate(translate(source, in_memory), in_memory, cut)), weights_of(there))
    assert_equal(weights_of(translate(source, CORE, cut)), weights)
    missing, unexpected = fresh.load_state_dict(weights_of(there), strict=False)
    assert not unexpected and (missing == [] or missing == ["lm_head.weight"])
    assert torch.equal(logits(fresh), logits(model))
    if in_files:
        weights = weights_of(translate(source, in_files, cut))
        model.save_pretrained(tmp_path)
        assert_equal(weights, load_file(tmp_path / "model.safetensors"))
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(logits(read), logits(model))


# Numbers
@pytest.mark.parametrize(
    "known", list(itertools.combinations({"heads": 6, "query_groups": 1, "kv_channels": 4}.items(), 2))
)
def test_two_numbers_divide_a_fused_matrix(known: tuple[tuple[str, int], ...]) -> None:
    """Without arguments, which would tell what else the model computes."""
    weights, arguments = core()
    expected = translate(checkpoint_of(weights, CORE, arguments | {"normalization": "RMSNorm"}), "hf-llama")
    without = translate(checkpoint_of(weights), "hf-llama", Numbers(**dict(known)))
    assert_equal(weights_of(without), weights_of(expected))
    said = "without Megatron's arguments, it is not known whether hf-llama computes the same"
    assert said in without.notes and said not in expected.notes
    for key, number in known:
        with pytest.raises(CheckpointError, match="expected two of heads, query_groups and kv_channels"):
            translate(checkpoint_of(weights), "hf-llama", Numbers(**{key: number}))


def test_given_query_groups_go_before_arguments() -> None:
    """A given number goes before arguments, whose one query group may be a default."""
    weights, arguments = core()
    wrong = checkpoint_of(weights, CORE, arguments | {"num_attention_heads": 31})
    expected = weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama"))
    assert_equal(weights_of(translate(wrong, "hf-llama", Numbers(heads=6))), expected)
    weights, arguments = core(num_key_value_heads=6)
    expected = weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama"))
    del arguments["group_query_attention"]
    for grouped in ({}, {"group_query_attention": False}):
        assert_equal(weights_of(translate(checkpoint_of(weights, CORE, arguments | grouped), "hf-llama")), expected)
    arguments["kv_channels"] = None  # 72 rows might be 6 + 1 + 1 heads no more than 6 + 6 + 6
    with pytest.raises(CheckpointError, match="expected two of heads, query_groups"):
        translate(checkpoint_of(weights, CORE, arguments), "hf-llama")


# Refusals
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without(end: str) -> Change:
    return lambda weights: {name: weight for name, weight in weights.items() if not name.endswith(end)}


def renumbered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.1", "layers.9"): weight for name, weight in weights.items()}


LAST, PLUS_ONE = "experts.2.linear_fc2.weight", "layernorm_zero_centered_gamma"
POSITIONS = "embedding.position_embeddings.weight"
NO_EXPERT = re.escape(f"'{LAYER}.mlp.experts.local_{LAST}' is missing, although")
STRANGE = {f"{LAYER}.strange.{number}": torch.ones(1) for number in range(50)}
WRONG: list[tuple[str, Change, dict[str, Any], str]] = [  # family, what changes, other arguments, and what is said
    ("hf-llama", dict, {"num_attention_heads": 31}, "do not divide by heads"),
    ("hf-llama", dict, {"num_attention_heads": 5, "kv_channels": 4}, "do not divide by heads 5"),
    ("hf-llama", dict, {"num_attention_heads": "many"}, "is 'many'; expected a number; give 'heads'"),
    ("hf-llama", dict, {"num_layers": 3}, "expected 3 layers by the arguments, found 2"),
    ("hf-llama", dict, {"num_layers": 1}, "expected 1 layers by the arguments, found 2"),
    ("hf-llama", dict, {"rotary_interleaved": True}, "rotary_interleaved"),
    ("hf-moe-stacked", dict, {PLUS_ONE: True}, PLUS_ONE),
    ("hf-gpt2", dict, {PLUS_ONE: True}, PLUS_ONE),
    ("hf-llama", dict, {"swiglu": False}, "expected a gated fc1, .* swiglu"),
    ("hf-gpt2", dict, {"swiglu": True}, "swiglu"),
    ("hf-gpt2", without(POSITIONS), {}, f"'{POSITIONS}' is missing"),
    ("hf-moe-stacked", dict, {"num_experts": 4}, r"experts.3.linear_fc1.weight' is missing"),
    ("hf-moe-stacked", without(LAST), {}, NO_EXPERT),
    ("hf-moe-stacked", without(f"0.mlp.experts.local_{LAST}"), {"num_experts": None}, NO_EXPERT),  # others tell
    ("hf-gpt2", renumbered, {"num_layers": None}, "layer 1 is missing, although layer 9 is there"),
    ("hf-llama", without(f"0.{QKV}"), {"num_layers": None}, f"'{LAYER}.{QKV}' is missing, although '.*layers.1"),
    ("hf-llama", without(f"{NORM}.weight"), {}, f"1 problem.*\n.*'{NORM}.weight' is missing"),
    ("hf-llama", lambda w: w | {"mixer": w[FC2]}, {}, "'mixer' has no name in hf-llama"),
]


@pytest.mark.parametrize(("family", "change", "said", "words"), WRONG)
def test_weights_and_arguments_that_do_not_fit_are_refused(
    family: str, change: Change, said: dict[str, Any], words: str
) -> None:
    weights, arguments = core(OF_FAMILY[family])
    with pytest.raises(CheckpointError, match=words):
        translate(checkpoint_of(change(weights), CORE, arguments | said), family)


def test_at_most_twenty_problems_are_listed() -> None:
    """Other names need their family."""
    weights, arguments = core()
    weights |= {name.replace(".0.", f".{layer}."): t for name, t in STRANGE.items() for layer in range(2)}
    with pytest.raises(CheckpointError, match=r"100 problem\(s\)") as caught:
        translate(checkpoint_of(weights, CORE, arguments), "hf-llama")
    assert str(caught.value).count("has no name in") == 20 and "... and 80 more" in str(caught.value)
    for names, found in (("model", "does not record their family"), ("hf-gpt2", "has those of hf-gpt2")):
        with pytest.raises(CheckpointError, match=f"the checkpoint {found}; name their family with --source-names"):
            translate(checkpoint_of({}, names), "hf-llama")


@pytest.mark.parametrize("heads", [6, 3])
@pytest.mark.parametrize("said", [{"attention_output_gate": True}, {}])
@pytest.mark.parametrize("family", ["hf-llama", "hf-gpt2"])
def test_gated_attention_has_no_place_in_other_families(family: str, said: dict[str, bool], heads: int) -> None:
    """Megatron-core's rows are queries, gates, keys and values of each group; without its argument, shapes tell."""
    weights, arguments = core(OF_FAMILY[family])
    more = {"num_attention_heads": heads, "num_query_groups": 3, "group_query_attention": True, "kv_channels": 2}
    for layer in range(2):
        weights[f"decoder.layers.{layer}.{QKV}"] = torch.ones(4 * heads + 12, 4)
        weights[f"decoder.layers.{layer}.self_attention.linear_proj.weight"] = torch.ones(4, 2 * heads)
    source = checkpoint_of(weights, CORE, arguments | more | said)
    assert_equal(weights_of(translate(source, CORE)), weights)
    with pytest.raises(CheckpointError, match="linear_qkv.*has the gates of a gated attention"):
        translate(source, family)


# What follows a parameter
def test_states_of_another_form_follow_a_rename_only() -> None:
    """States of another form, and matrices, follow a rename only. A split or permutation changes which elements
    matrices are, so nothing is said of them."""
    weights, arguments = core()
    matrices = {name: [f"some rows of {name}", "others"] for name in (EMBEDDING, FC1, FC2)}
    source = checkpoint_of(weights, CORE, arguments | {"matrices": matrices})
    owned = {0: {"row": torch.ones(3)}}
    odd = {name: {**source.params[name].states, "second": held(torch.ones(2), "second")} for name in (FC1, FC2)}
    there = translate(changed(source, FC2, states=odd[FC2], owner_states=owned), "hf-llama", Numbers(vocab_size=28))
    assert there.params[DOWN].owner_states == owned and there.params[DOWN].states["second"].shape == (2,)
    assert there.arguments == arguments | {"matrices": {DOWN: matrices[FC2]}}
    assert translate(source, CORE).arguments["matrices"] == matrices
    for more, said in (
        ({"owner_states": owned}, r"\(owner_states\)"),
        ({"states": odd[FC1]}, r"'second' of shape \(2,\)"),
    ):
        with pytest.raises(CheckpointError, match=f"found .*{said}; give a map"):
            translate(changed(source, FC1, **more), "hf-llama")
    with pytest.raises(CheckpointError, match="owner_states"):
        translate(changed(source, EMBEDDING, owner_states=owned), "hf-llama", Numbers(vocab_size=1))


DIFFERENT = [{"step": 4.0}, {"group": 1}, {"states": {}}, {"weight": torch.bfloat16}, {"owner_states": {0: {}}}]


@pytest.mark.parametrize("changes", DIFFERENT)
def test_experts_that_differ_are_not_stacked(changes: dict[str, Any]) -> None:
    weights, arguments = core("Mixtral")
    source, name = checkpoint_of(weights, CORE, arguments), f"{LAYER}.mlp.experts.local_experts.1.linear_fc2.weight"
    if "weight" in changes:
        changes = {"weight": source.params[name].weight.to(changes["weight"])}
    with pytest.raises(CheckpointError, match="expected equal .* of numbers 0 and 1 of the stack .*down_proj"):
        translate(changed(source, name, **changes), "hf-moe-stacked")


def test_names_of_transformer_engine_are_understood() -> None:
    weights, arguments = core("Mixtral")
    called = {}
    for name, weight in weights.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        called[re.sub(r"local_experts\.(\d+)\.(linear_fc.)\.weight", r"\2.weight\1", name)] = weight
    assert len(set(called) & set(weights)) < len(weights) / 2
    assert_equal(weights_of(translate(checkpoint_of(called, CORE, arguments), CORE)), weights)
    with pytest.raises(CheckpointError, match=f"one parameter '{LAYER}.input_layernorm.weight', found two spellings"):
        translate(checkpoint_of(weights | called, CORE, arguments), CORE)


def test_ties_and_buffers_are_renamed() -> None:
    weights, arguments = core(tie_word_embeddings=True)
    buffers = {"router.local_tokens_per_expert": held(torch.ones(1), "a count")}
    source = dataclasses.replace(checkpoint_of(weights, CORE, arguments), tied={HEAD: EMBEDDING}, buffers=buffers)
    there = translate(source, "hf-llama")
    assert there.tied == {"lm_head.weight": "model.embed_tokens.weight"} and not there.buffers
    assert any("no name for 'router.local_tokens_per_expert'; left out" in note for note in there.notes)
    assert translate(source, CORE).buffers == source.buffers
    bias = dataclasses.replace(source, buffers={"router.expert_bias": held(torch.ones(1), "bias")})
    with pytest.raises(CheckpointError, match="'router.expert_bias' has no name in hf-llama, and the forward"):
        translate(bias, "hf-llama")


@pytest.mark.parametrize("family", computes.FAMILIES)
def test_value_a_family_would_compute_otherwise_is_refused(family: str) -> None:
    """One argument at a time, at a value of Megatron's that is not in the family's list; all that it allows pass."""
    weights, arguments = core(OF_FAMILY.get(family, "Mixtral" if "m" in family.removeprefix("hf-") else "Mistral"))
    others = {bool: True, str: "another", int: 3, float: 0.5}
    for argument, (values, _) in computes.FAMILIES[family].items():
        wrong = others[type(values[0])] if values else 2
        with pytest.raises(CheckpointError, match=rf"expected {argument} .*, found {wrong!r}: "):
            translate(checkpoint_of(weights, CORE, arguments | {argument: wrong}), family)
        for value in (*values, None):
            assert computes.problems(family, {argument: value}) == []


PAIRED, HYBRIDS_NORM = {"hybrid_layer_pattern": "*-|*-", "num_layers": 4}, "decoder.final_norm"


def as_hybrid(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As Megatron's own conversion of a GPTModel to a HybridModel names them: attention and MLP are layers each."""

    def named(name: str) -> str:
        number, rest = families.in_layer(name)
        is_mlp = rest.startswith(("mlp.", "pre_mlp_layernorm."))
        return f"decoder.layers.{2 * int(number) + is_mlp}.{rest}" if number else name.replace(NORM, HYBRIDS_NORM)

    return {named(name): weight for name, weight in weights.items()}


def test_hybrid_model_is_named_as_its_gpt_model() -> None:
    weights, arguments = core()
    expected = translate(checkpoint_of(weights, CORE, arguments), "hf-llama")
    hybrid = checkpoint_of(as_hybrid(weights), CORE, arguments | PAIRED)
    assert_equal(weights_of(translate(hybrid, "hf-llama")), weights_of(expected))
    assert_equal(weights_of(translate(hybrid, CORE)), as_hybrid(weights))
    for pattern in ("M-*-", "*-*", "*-*-/MM"):
        other = dataclasses.replace(hybrid, arguments=arguments | {"hybrid_layer_pattern": pattern, "num_layers": 4})
        with pytest.raises(CheckpointError, match=re.escape(f"found pattern {pattern!r}; give --names megatron-core")):
            translate(other, "hf-llama")


def test_parts_read_no_more_than_themselves() -> None:
    reads: list[tuple[int, int]] = []
    weights, arguments = core("Mistral", num_key_value_heads=3)
    source = checkpoint_of(weights, CORE, arguments)
    for name in (f"{LAYER}.{QKV}", FC1):
        source = changed(source, name, weight=watched(weights[name], reads))
    there = translate(source, "hf-llama")
    assert not reads
    size = 4 * 24  # channels of a head, times columns; a group has two heads of q, one of k, one of v
    for name, expected in {
        "self_attn.q_proj": [(0, 2 * size), (4 * size, 6 * size), (8 * size, 10 * size)],
        "self_attn.v_proj": [(3 * size, 4 * size), (7 * size, 8 * size), (11 * size, 12 * size)],
        "mlp.up_proj": [(40 * 24, 80 * 24)],
    }.items():
        reads.clear()
        there.params[f"model.layers.0.{name}.weight"].weight.read()
        assert reads == expected, name


# The user's own
OWN = """
from lwopt_backend.checkpoint.names.families import hf_llama, in_layer


def mine(name, tensor, model):
    number, rest = in_layer(name)
    if rest == "mlp.linear_fc2.weight":
        return {f"down[{number}]": tensor}
    if name == "output_layer.weight":
        return {}
    return hf_llama(name, tensor, model)
"""


def own(folder: Path, text: str) -> Any:
    (folder / "own.py").write_text(text)
    return load_map(f"{folder / 'own.py'}:mine")


def test_a_users_function_is_a_map_of_any_names(tmp_path: Path) -> None:
    weights, arguments = core()
    source = checkpoint_of(weights, CORE, arguments)
    there, llama = translate(source, own(tmp_path, OWN)), weights_of(translate(source, "hf-llama"))
    down = torch.stack([llama.pop(DOWN.replace("0", number)) for number in "01"])
    del llama["lm_head.weight"]
    assert_equal(weights_of(there), {**llama, "down": down})
    assert there.names == "model" and there.notes == ("1 parameter(s) were dropped by the map: 'output_layer.weight'.",)
    other = translate(
        checkpoint_of({"a": down}, "model"), own(tmp_path, "def mine(name, t, _): return {name + 'b': t}")
    )
    assert_equal(weights_of(other), {"ab": down})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def mine(", "own.py:mine: SyntaxError"),
        ("other = 1", "own.py:mine: KeyError: 'mine'"),
        ("def mine(name, tensor, model): return 1 / 0", "own.py:mine: 'a': ZeroDivisionError"),
        ("def mine(name, tensor, model): return name", "'a': expected tensors by their names, or None, found 'a'"),
        ("def mine(name, tensor, model): return {name: tensor.read()}", "'a': expected tensors by their names"),
        ("def mine(name, tensor, model): return {'x': tensor}", "the map makes 'x' twice, the second time of 'b'"),
        (
            "def mine(name, tensor, model): return {'x[0]' if name == 'a' else 'x': tensor}",
            "'x' twice, once as a stack",
        ),
        ("def mine(name, tensor, model): return {f'x[{2 * ord(name)}]': tensor}", "without gaps, found no number 0"),
        (
            "def mine(name, tensor, model): return {str(id(tensor)): tensor.mapped(abs, tensor.shape)}",
            "the same names of each of its tensors",
        ),
        ("def mine(name, tensor, model): return None", "'b' has no name in the map"),
    ],
)
def test_what_is_wrong_in_a_users_function_is_said(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        translate(checkpoint_of({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, "model"), own(tmp_path, text))


@pytest.mark.parametrize("folder", genuine())
def test_genuine_megatron_checkpoints_go_to_every_family(folder: Path) -> None:
    source = formats.read(folder)
    dense = ["hf-llama" if source.arguments.get("swiglu") else "hf-gpt2"]
    for family in ["hf-mixtral", "hf-qwen-moe", "hf-moe-stacked"] if source.arguments.get("num_experts") else dense:
        said = "expected rotary_percent 1.0, found 0.5.*\n.*no_rope_freq none" * bool(source.arguments["no_rope_freq"])
        if family == "hf-mixtral" and source.arguments["moe_router_pre_softmax"]:
            said = "expected moe_router_pre_softmax False, found True"
        if said:
            with pytest.raises(CheckpointError, match=said):
                translate(source, family)
        else:
            gates.check(translate(source, family))
