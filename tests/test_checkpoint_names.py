"""Name maps: Hugging Face's models give the same logits through them, all are undone exactly, and misfits are said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lwopt_backend.atom_settings import AtomSettings, blocks_of
from lwopt_backend.checkpoint import gates
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.lazy import LazyTensor, held
from lwopt_backend.checkpoint.megatron import dist_reader as megatron_dist
from lwopt_backend.checkpoint.names import CORE, FAMILIES, Numbers, apply, find, translate
from lwopt_backend.checkpoint.names.patterns import Pattern
from lwopt_backend.checkpoint.names.rules import NameMap, Rule, rule

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "megatron"
SMALL = dict(vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=32)
Tensors = Mapping[str, Tensor]


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
        states = {key: state.read() for key, state in param.states.items()}
        assert torch.equal(states.pop(MASTER), weight.float() * 3), name
        if "momentum_buffer" in states:
            assert torch.equal(states.pop("momentum_buffer"), -weight.float()), name
        else:
            assert torch.equal(states.pop("exp_avg"), weight.float() + 1), name
            assert torch.equal(states.pop("exp_avg_sq"), weight.float() * 2), name
        assert not states
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


def core_of_llama(model: nn.Module, experts: int = 0) -> dict[str, Tensor]:
    """Of any model that is called like Llama's, with transformers' stacked experts or without."""
    state, config = model.state_dict(), model.config
    core = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        core["output_layer.weight"] = state["lm_head.weight"]
    for number in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        core[f"{ours}.input_layernorm.weight"] = state[f"{theirs}.input_layernorm.weight"]
        core[f"{ours}.pre_mlp_layernorm.weight"] = state[f"{theirs}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{theirs}.self_attn.q_proj.{kind}" in state:
                parts = [state[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                fused = grouped_rows(*parts, config.num_key_value_heads)
                core[f"{ours}.self_attention.linear_qkv.{kind}"] = fused
        core[f"{ours}.self_attention.linear_proj.weight"] = state[f"{theirs}.self_attn.o_proj.weight"]
        for part in "qk":
            if f"{theirs}.self_attn.{part}_norm.weight" in state:
                core[f"{ours}.self_attention.{part}_layernorm.weight"] = state[f"{theirs}.self_attn.{part}_norm.weight"]
        if f"{theirs}.mlp.gate_proj.weight" in state:
            halves = [state[f"{theirs}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
            core[f"{ours}.mlp.linear_fc1.weight"] = torch.cat(halves)
            core[f"{ours}.mlp.linear_fc2.weight"] = state[f"{theirs}.mlp.down_proj.weight"]
            continue
        core[f"{ours}.mlp.router.weight"] = state[f"{theirs}.mlp.gate.weight"]
        for expert in range(experts):
            local = f"{ours}.mlp.experts.local_experts.{expert}"
            core[f"{local}.linear_fc1.weight"] = state[f"{theirs}.mlp.experts.gate_up_proj"][expert]
            core[f"{local}.linear_fc2.weight"] = state[f"{theirs}.mlp.experts.down_proj"][expert]
        if f"{theirs}.mlp.shared_expert_gate.weight" in state:
            halves = [state[f"{theirs}.mlp.shared_expert.{part}_proj.weight"] for part in ("gate", "up")]
            core[f"{ours}.mlp.shared_experts.linear_fc1.weight"] = torch.cat(halves)
            core[f"{ours}.mlp.shared_experts.linear_fc2.weight"] = state[f"{theirs}.mlp.shared_expert.down_proj.weight"]
            core[f"{ours}.mlp.shared_experts.gate_weight"] = state[f"{theirs}.mlp.shared_expert_gate.weight"]
    return {name: tensor.clone() for name, tensor in core.items()}


def core_of_gpt2(model: nn.Module) -> dict[str, Tensor]:
    state, heads = model.state_dict(), model.config.n_head
    core = {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
    }
    called = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2", "self_attention.linear_proj": "attn.c_proj"}
    called |= {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"}
    for kind in ("weight", "bias"):
        core[f"decoder.final_layernorm.{kind}"] = state[f"transformer.ln_f.{kind}"]
        for number in range(model.config.n_layer):
            for ours, theirs in called.items():
                core[f"decoder.layers.{number}.{ours}.{kind}"] = state[f"transformer.h.{number}.{theirs}.{kind}"].t()
            fused = state[f"transformer.h.{number}.attn.c_attn.{kind}"].t()
            q, k, v = fused.chunk(3)
            core[f"decoder.layers.{number}.self_attention.linear_qkv.{kind}"] = grouped_rows(q, k, v, heads)
    return {name: tensor.contiguous().clone() for name, tensor in core.items()}


def randomized(model: nn.Module) -> nn.Module:
    """Also norms and biases, which begin as ones and zeros."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return model.eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20).view(2, 10) % 29).logits


def llama(**changes: Any) -> nn.Module:
    config = dict(SMALL, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=False) | changes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def qwen2() -> nn.Module:
    config = dict(SMALL, intermediate_size=40, num_key_value_heads=3, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config))


def qwen3() -> nn.Module:
    config = dict(SMALL, intermediate_size=40, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))


def mistral() -> nn.Module:
    config = dict(SMALL, intermediate_size=40, num_key_value_heads=1, tie_word_embeddings=False)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**config))


def mixtral() -> nn.Module:
    config = dict(SMALL, intermediate_size=20, num_key_value_heads=2, num_local_experts=3, tie_word_embeddings=False)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))


def qwen2_moe() -> nn.Module:
    """Whose first layer has no experts."""
    experts = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=32)
    config = dict(SMALL, intermediate_size=40, num_key_value_heads=2, mlp_only_layers=[0], tie_word_embeddings=False)
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**config, **experts))


def qwen3_moe() -> nn.Module:
    config = dict(SMALL, num_key_value_heads=2, head_dim=4, num_experts=5, num_experts_per_tok=2)
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**config, moe_intermediate_size=16, tie_word_embeddings=False)
    )


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=29, n_embd=24, n_layer=2, n_head=6, n_positions=32, n_inner=40)
    return transformers.GPT2LMHeadModel(config)


def megatron_arguments(model: nn.Module) -> dict[str, Any]:
    """As Megatron's args have them: without grouped queries their number of groups is an unused default."""
    config = model.config
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": size,
        "num_experts": experts,
        "swiglu": not isinstance(model, transformers.GPT2LMHeadModel),
        "muon_split_qkv": True,
    }


IN_MEMORY = [
    *[("hf-llama", model) for model in (llama, qwen2, qwen3, mistral)],
    *[("hf-moe-stacked", model) for model in (mixtral, qwen2_moe, qwen3_moe)],
    ("hf-gpt2", gpt2),
]


@pytest.mark.parametrize(("family", "build"), IN_MEMORY, ids=lambda value: getattr(value, "__name__", value))
def test_a_model_from_megatrons_form_gives_the_same_logits_and_goes_back(family: str, build: Callable) -> None:
    model, fresh = randomized(build()), build().eval()
    core = core_of_gpt2(model) if family == "hf-gpt2" else core_of_llama(model, experts=5 if build is qwen3_moe else 3)
    source = checkpoint_of(core, CORE, megatron_arguments(model))
    there = translate(source, family)
    weights = weights_of(there)
    missing, unexpected = fresh.load_state_dict(weights, strict=False)
    assert not unexpected and (missing == [] or missing == ["lm_head.weight"])
    assert torch.equal(logits(fresh), logits(model))
    again = translate(there, CORE)
    assert again.names == CORE
    assert_equal(weights_of(again), core)


@pytest.mark.parametrize("build", [mixtral, qwen2_moe, qwen3_moe])
def test_experts_as_in_files_are_what_transformers_writes_and_reads(build: Callable, tmp_path: Path) -> None:
    model = randomized(build())
    family = "hf-mixtral" if build is mixtral else "hf-qwen-moe"
    core = core_of_llama(model, experts=5 if build is qwen3_moe else 3)
    weights = weights_of(translate(checkpoint_of(core, CORE, megatron_arguments(model)), family))
    model.save_pretrained(tmp_path / "theirs")
    assert_equal(weights, load_file(tmp_path / "theirs" / "model.safetensors"))
    model.config.save_pretrained(tmp_path / "ours")
    save_file(weights, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(logits(read), logits(model))
    assert_equal(weights_of(translate(checkpoint_of(weights, family, megatron_arguments(model)), CORE)), core)


def test_one_family_becomes_another() -> None:
    model = randomized(mixtral())
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
    seed: int, *, gated: bool, experts: int = 0, tied: bool | None = None, layers: int | None = None
) -> tuple[dict, dict[str, Any]]:
    """Weights of a made-up Megatron model, every element another, and its arguments."""
    pick = random.Random(seed)
    layers, groups, size, width = (
        layers or pick.randint(1, 3),
        pick.randint(1, 4),
        pick.randint(1, 5),
        pick.randint(1, 6),
    )
    heads = groups * pick.randint(1, 4)
    inner, vocabulary = pick.randint(1, 7), pick.randint(2, 9)
    has_bias, norm_bias, tied = pick.random() < 0.5, pick.random() < 0.5, pick.random() < 0.5 if tied is None else tied
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, width)}
    linears = {"self_attention.linear_qkv": (size * (heads + 2 * groups), width)}
    linears["self_attention.linear_proj"] = (width, size * heads)
    mlp = {"linear_fc1": ((2 if gated else 1) * inner, width), "linear_fc2": (width, inner)}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}"
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (width,)
            shapes |= {f"{prefix}.{norm}.bias": (width,)} if norm_bias and not gated else {}
        inner_names = [f"mlp.experts.local_experts.{number}." for number in range(experts)] or ["mlp."]
        here = linears | {f"{name}{key}": shape for name in inner_names for key, shape in mlp.items()}
        for name, shape in here.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if has_bias and not experts:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        if experts:
            shapes[f"{prefix}.mlp.router.weight"] = (experts, width)
    shapes["decoder.final_layernorm.weight"] = (width,)
    if not tied:
        shapes["output_layer.weight"] = (vocabulary, width)
    start, weights = 0.0, {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        weights[name] = torch.arange(start, start + count).view(shape)
        start += count
    arguments = {"num_layers": layers, "num_attention_heads": heads, "num_query_groups": groups, "kv_channels": size}
    return weights, {**arguments, "num_experts": experts or None, "swiglu": gated}


CASES = {
    "megatron-core": dict(gated=True),
    "megatron-deepspeed": dict(gated=False),
    "hf-llama": dict(gated=True),
    "hf-mixtral": dict(gated=True, experts=3),
    "hf-qwen-moe": dict(gated=True, experts=4),
    "hf-moe-stacked": dict(gated=True, experts=1),
    "hf-gpt2": dict(gated=False, tied=False),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_undone_exactly(family: str, seed: int) -> None:
    weights, arguments = random_core(seed, **CASES[family])
    if family == "hf-gpt2":
        weights["embedding.position_embeddings.weight"] = torch.full((3, weights["output_layer.weight"].shape[1]), -1.0)
    if any(name.endswith("fc1.bias") for name in weights) and family == "hf-llama":
        assert any(
            "gate_proj.bias" in name for name in apply(find(family), checkpoint_of(weights, CORE, arguments)).params
        )
    numbers = Numbers(qkv_layout=("groups", "blocks")[seed % 2])
    there = apply(find(family), checkpoint_of(weights, CORE, arguments), numbers)
    assert there.names == family and there.arguments == arguments
    back = apply(find(family).inverse(), there, numbers)
    assert list(back.params) == list(weights) or family != "megatron-core"
    assert_equal(weights_of(back), weights)
    total = sum(weight.numel() for weight in weights.values())
    seen = torch.cat([param.weight.read().flatten() for param in there.params.values()])
    assert seen.sort().values.tolist() == sorted(torch.cat([w.flatten() for w in weights.values()]).tolist())
    assert len(seen) == total


STACKS = {
    "layers": rule("decoder.layers.{layer}.mlp.linear_fc2.weight", "fc2"),
    "layers and experts": rule("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight", "fc1"),
    "experts of a layer, gate and up apart": rule(
        "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ["{layer+1}.gate", "{layer+1}.up"],
        "split_gate_up",
    ),
}


@pytest.mark.parametrize("case", STACKS)
def test_layers_and_experts_are_stacked_and_unstacked(case: str) -> None:
    of = STACKS[case]
    weights = {}
    for layer, expert in itertools.product(range(3), range(2)):
        values = {"layer": layer, "expert": expert}
        weights[of.sources[0].format(values)] = torch.randn(4, 5)
    expected = {
        "layers": lambda: {"fc2": torch.stack(list(weights.values()))},
        "layers and experts": lambda: {"fc1": torch.stack(list(weights.values())).view(3, 2, 4, 5)},
        "experts of a layer, gate and up apart": lambda: {
            f"{layer + 1}.{part}": torch.stack([w[rows] for w in list(weights.values())[2 * layer : 2 * layer + 2]])
            for layer in range(3)
            for part, rows in (("gate", slice(0, 2)), ("up", slice(2, 4)))
        },
    }[case]()
    names = NameMap(CORE, "stacks", (of,))
    there = apply(names, checkpoint_of(weights, CORE))
    assert_equal(weights_of(there), expected)
    assert_equal(weights_of(apply(names.inverse(), there)), weights)


# Megatron-DeepSpeed


def deepspeed_names(layers: int, tied: bool) -> set[str]:
    names = {f"{layers + 2}.weight", f"{layers + 2}.bias"}
    names |= {"tied_modules.embed.word_embeddings.weight"} if tied else {"1.word_embeddings.weight"}
    names |= set() if tied else {f"{layers + 3}.lm_head.weight"}
    for layer in range(layers):
        for module in ("input_layernorm", "post_attention_layernorm"):
            names |= {f"{layer + 2}.{module}.weight"}
        for module in (
            "self_attention.query_key_value",
            "self_attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ):
            names |= {f"{layer + 2}.{module}.weight"}
    return names


@pytest.mark.parametrize("tied", [True, False])
def test_stages_are_numbered_as_megatron_deepspeed_numbers_them(tied: bool) -> None:
    weights, arguments = random_core(7, gated=True, tied=tied)
    weights = {name: weight for name, weight in weights.items() if not name.endswith("bias")}
    weights["decoder.final_layernorm.bias"] = torch.ones(2)
    there = translate(checkpoint_of(weights, CORE, arguments), "megatron-deepspeed", Numbers(qkv_layout="groups"))
    assert set(there.params) == deepspeed_names(arguments["num_layers"], tied)
    assert_equal(weights_of(translate(there, CORE, Numbers(qkv_layout="groups"))), weights)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_blocks_of_q_k_and_v_lie_rank_by_rank(ranks: int) -> None:
    heads, groups, size = 8, 4, 3
    q, k, v = (torch.arange(n * size * 2.0).view(-1, 2) + at for n, at in ((heads, 0), (groups, 100), (groups, 200)))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    arguments = {"num_attention_heads": heads, "num_query_groups": groups, "swiglu": False}
    source = checkpoint_of({name: grouped_rows(q, k, v, groups)}, CORE, arguments)
    numbers = Numbers(qkv_layout="blocks", qkv_ranks=ranks)
    there = translate(source, "megatron-deepspeed", numbers)
    expected = torch.cat([part.chunk(ranks)[rank] for rank in range(ranks) for part in (q, k, v)])
    assert torch.equal(there.params["2.self_attention.query_key_value.weight"].weight.read(), expected)
    assert_equal(weights_of(translate(there, CORE, numbers)), weights_of(source))


def test_the_layout_of_q_k_and_v_has_no_default() -> None:
    weights, arguments = random_core(1, gated=True)
    with pytest.raises(CheckpointError, match="depends on its commit.*'groups'.*'blocks'"):
        translate(checkpoint_of(weights, CORE, arguments), "megatron-deepspeed")


def test_qkv_ranks_that_do_not_divide_the_groups_are_refused() -> None:
    weights, arguments = random_core(2, gated=True)
    groups = arguments["num_query_groups"]
    with pytest.raises(CheckpointError, match=f"{groups} query groups do not divide among qkv_ranks {groups + 1}"):
        numbers = Numbers(qkv_layout="blocks", qkv_ranks=groups + 1)
        translate(checkpoint_of(weights, CORE, arguments), "megatron-deepspeed", numbers)


# Numbers


@pytest.mark.parametrize("known", itertools.combinations(["heads", "query_groups", "kv_channels"], 2))
def test_two_numbers_divide_a_fused_matrix(known: tuple[str, ...]) -> None:
    sizes = {"heads": 6, "query_groups": 2, "kv_channels": 4}
    q, k, v = torch.randn(24, 5), torch.randn(8, 5), torch.randn(8, 5)
    names = find("hf-llama")
    only = dataclasses.replace(names, rules=tuple(r for r in names.rules if "split_qkv" in r.do))
    source = checkpoint_of({"decoder.layers.0.self_attention.linear_qkv.weight": grouped_rows(q, k, v, 2)}, CORE)
    there = weights_of(apply(only, source, Numbers(**{key: sizes[key] for key in known})))
    assert_equal(there, {f"model.layers.0.self_attn.{n}_proj.weight": t for n, t in zip("qkv", (q, k, v))})
    for key in known:
        numbers = Numbers(**{key: sizes[key]})
        with pytest.raises(CheckpointError, match="two of heads, query_groups and kv_channels must be known"):
            apply(only, source, numbers)
        back = weights_of(apply(only.inverse(), checkpoint_of(there, "hf-llama"), numbers))
        assert_equal(back, weights_of(source))
    with pytest.raises(CheckpointError, match="one of heads, query_groups and kv_channels must be known"):
        apply(only.inverse(), checkpoint_of(there, "hf-llama"))


def test_numbers_that_do_not_fit_the_rows_are_refused() -> None:
    weights, arguments = random_core(3, gated=True)
    for change in ({"num_attention_heads": 31}, {"kv_channels": arguments["kv_channels"] + 1}):
        with pytest.raises(CheckpointError, match="do not divide by heads"):
            translate(checkpoint_of(weights, CORE, arguments | change), "hf-llama")


def test_parts_that_do_not_fit_each_other_are_refused() -> None:
    def join(q: int, k: int, v: int, **numbers: int) -> None:
        sizes = dict(zip("qkv", (q, k, v)))
        parts = {f"model.layers.0.self_attn.{part}_proj.weight": torch.ones(n, 4) for part, n in sizes.items()}
        rules = tuple(r for r in find("hf-llama").rules if "split_qkv" in r.do)
        apply(NameMap(CORE, "hf-llama", rules).inverse(), checkpoint_of(parts, "hf-llama"), Numbers(**numbers))

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


def test_a_stage_whose_number_does_not_follow_the_layers_is_refused() -> None:
    weights, arguments = random_core(2, gated=True, tied=False, layers=2)
    there = weights_of(
        translate(checkpoint_of(weights, CORE, arguments), "megatron-deepspeed", Numbers(qkv_layout="groups"))
    )
    there["7.lm_head.weight"] = there.pop("5.lm_head.weight")
    with pytest.raises(CheckpointError, match=r"1 problem\(s\)(?s:.*)'7.lm_head.weight' fits no rule"):
        translate(checkpoint_of(there, "megatron-deepspeed", arguments), CORE, Numbers(qkv_layout="groups"))


def test_a_stack_of_another_size_than_the_arguments_say_is_refused() -> None:
    weights, arguments = random_core(5, gated=True, experts=3)
    there = translate(checkpoint_of(weights, CORE, arguments), "hf-moe-stacked")
    with pytest.raises(CheckpointError, match="is a stack of 3; expected were 4 experts"):
        translate(dataclasses.replace(there, arguments=arguments | {"num_experts": 4}), CORE)
    with pytest.raises(CheckpointError, match=r"local_experts.3.linear_fc1.weight' is missing"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_experts": 4}), "hf-moe-stacked")


def test_a_given_number_goes_before_the_arguments() -> None:
    weights, arguments = random_core(3, gated=True)
    right = arguments["num_attention_heads"]
    source = checkpoint_of(weights, CORE, arguments | {"num_attention_heads": 31})
    there = translate(source, "hf-llama", Numbers(heads=right))
    assert_equal(weights_of(there), weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama")))


def test_one_query_group_may_be_a_default_that_is_not_used() -> None:
    weights, arguments = random_core(3, gated=True)
    q, k, v = (torch.randn(12, 4) for _ in range(3))
    weights["decoder.layers.0.self_attention.linear_qkv.weight"] = grouped_rows(q, k, v, 6)
    weights = {name: weight for name, weight in weights.items() if not name.endswith("linear_qkv.bias")}
    arguments |= {"num_layers": 1, "num_attention_heads": 6, "num_query_groups": 1, "kv_channels": 2}
    weights = {name: weight for name, weight in weights.items() if not name.startswith("decoder.layers.1")}
    for grouped in ({}, {"group_query_attention": False}):
        there = weights_of(translate(checkpoint_of(weights, CORE, arguments | grouped), "hf-llama"))
        assert torch.equal(there["model.layers.0.self_attn.k_proj.weight"], k)
    arguments["kv_channels"] = None  # 36 rows might be 6 + 1 + 1 heads no more than 6 + 6 + 6
    with pytest.raises(CheckpointError, match="two of heads, query_groups and kv_channels must be known"):
        translate(checkpoint_of(weights, CORE, arguments), "hf-llama")
    with pytest.raises(CheckpointError, match="do not divide by heads"):
        translate(checkpoint_of(weights, CORE, arguments | {"group_query_attention": True}), "hf-llama")


def test_an_argument_that_is_no_number_is_refused() -> None:
    weights, arguments = random_core(3, gated=True)
    with pytest.raises(CheckpointError, match="'num_attention_heads' is 'many'; expected a number; give 'heads'"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_attention_heads": "many"}), "hf-llama")


# Refusals


def test_names_that_fit_no_rule_and_parts_that_are_missing_are_listed_in_one_error() -> None:
    weights, arguments = random_core(4, gated=True)
    there = dict(weights_of(translate(checkpoint_of(weights, CORE, arguments), "hf-llama")))
    del there["model.layers.0.self_attn.k_proj.weight"]
    del there["model.norm.weight"]
    there |= {"model.layers.0.extra.weight": torch.ones(2), "other": torch.ones(2)}
    with pytest.raises(CheckpointError) as caught:
        translate(checkpoint_of(there, "hf-llama", arguments), CORE)
    message = str(caught.value)
    for expected in (
        "4 problem(s)",
        "'model.layers.0.extra.weight' fits no rule",
        "'other' fits no rule",
        "'model.layers.0.self_attn.k_proj.weight' is missing, which belongs with 'model.layers.0.self_attn.q_proj",
        "'model.norm.weight' fits no name",
    ):
        assert expected in message, message


def test_at_most_twenty_problems_are_listed_and_all_are_counted() -> None:
    weights = {f"strange.{number}": torch.ones(1) for number in range(50)}
    names = NameMap(CORE, "mine", (rule("usual.{layer}", "other.{layer}", optional=True),))
    with pytest.raises(CheckpointError, match=r"50 problem\(s\)") as caught:
        apply(names, checkpoint_of(weights, CORE))
    assert str(caught.value).count("fits no rule") == 20 and "... and 30 more" in str(caught.value)


@pytest.mark.parametrize("said", [True, False])
def test_a_missing_expert_is_named(said: bool) -> None:
    weights, arguments = random_core(5, gated=True, experts=3)
    lost = "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight"
    if not said:  # other layers, or the arguments, tell how many there are
        arguments["num_experts"] = None
        weights |= {name.replace("layers.0", f"layers.{arguments['num_layers']}"): w for name, w in weights.items()}
        arguments["num_layers"] += 1
    weights = {name: weight for name, weight in weights.items() if name != lost}
    with pytest.raises(CheckpointError, match=re.escape(f"{lost!r} is missing, which belongs with")):
        translate(checkpoint_of(weights, CORE, arguments), "hf-moe-stacked")


@pytest.mark.parametrize("family", ["hf-llama", "hf-gpt2", "megatron-deepspeed"])
def test_a_missing_layer_is_named(family: str) -> None:
    weights, arguments = random_core(6, gated=family == "hf-llama")
    weights |= {name.replace("layers.0", "layers.9"): weight for name, weight in weights.items()}
    with pytest.raises(CheckpointError, match=r"nothing was found of layer\(s\) .*8, but of others up to 9"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_layers": None}), family, Numbers(qkv_layout="groups"))


def test_layers_that_the_arguments_promise_but_are_not_there_are_named() -> None:
    layers = 2
    weights, arguments = random_core(6, gated=True, layers=layers)
    with pytest.raises(CheckpointError, match=rf"nothing was found of layer\(s\) {layers}, but of others up to"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_layers": layers + 1}), "hf-llama")
    with pytest.raises(CheckpointError, match="there are 2 layers, but 1 were expected"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_layers": 1}), "hf-llama")


def test_a_layer_without_one_of_its_matrices_is_named() -> None:
    weights, arguments = random_core(8, gated=True)
    weights |= {name.replace("layers.0", f"layers.{arguments['num_layers']}"): w for name, w in weights.items()}
    weights = {n: w for n, w in weights.items() if not n.startswith("decoder.layers.0.self_attention.linear_qkv.")}
    with pytest.raises(CheckpointError, match="linear_qkv.* is missing for layer 0"):
        translate(checkpoint_of(weights, CORE, arguments | {"num_layers": None}), "hf-llama")


@pytest.mark.parametrize(
    ("key", "value", "family"),
    [
        ("rotary_interleaved", True, "hf-llama"),
        ("layernorm_zero_centered_gamma", True, "hf-llama"),
        ("layernorm_zero_centered_gamma", True, "hf-gpt2"),
        ("swiglu", False, "hf-llama"),
        ("swiglu", True, "hf-gpt2"),
    ],
)
def test_a_model_that_computes_otherwise_is_refused(key: str, value: bool, family: str) -> None:
    weights, arguments = random_core(9, gated=family == "hf-llama", tied=True)
    weights["embedding.position_embeddings.weight"] = torch.ones(2, 2)
    if family == "hf-llama":
        del weights["embedding.position_embeddings.weight"]
    translate(checkpoint_of(weights, CORE, arguments), family)
    with pytest.raises(CheckpointError, match=key):
        translate(checkpoint_of(weights, CORE, arguments | {key: value}), family)


def replaced(source: Checkpoint, name: str, **changes: Any) -> Checkpoint:
    params = dict(source.params)
    params[name] = dataclasses.replace(params[name], **changes)
    return dataclasses.replace(source, params=params)


def test_states_of_another_form_follow_a_rename_only() -> None:
    weights, arguments = random_core(10, gated=True)
    source = checkpoint_of(weights, CORE, arguments)
    fc1, fc2 = (f"decoder.layers.0.mlp.linear_fc{number}.weight" for number in (1, 2))
    owned = {0: {"row": torch.ones(3)}}
    odd = {**source.params[fc2].states, "second": held(torch.ones(2), "second")}
    there = translate(replaced(source, fc2, states=odd, owner_states=owned), "hf-llama")
    kept = there.params["model.layers.0.mlp.down_proj.weight"]
    assert kept.owner_states == owned and kept.states["second"].shape == (2,)
    with pytest.raises(
        CheckpointError, match=r"what a rule keeps of its matrices \(owner_states\), which cannot follow"
    ):
        translate(replaced(source, fc1, owner_states=owned), "hf-llama")
    odd = {**source.params[fc1].states, "second": held(torch.ones(2), "second")}
    with pytest.raises(CheckpointError, match=r"'second' of shape \(2,\), which cannot follow"):
        translate(replaced(source, fc1, states=odd), "hf-llama")


def test_which_matrices_there_are_follows_a_rename_only() -> None:
    """Of what is split, joined or permuted these elements are not the same any more, so nothing is said of it."""
    weights, arguments = random_core(10, gated=True)
    fc1, fc2, qkv = (
        f"decoder.layers.0.{name}.weight" for name in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv")
    )
    matrices = {name: [f"some rows of {name}", "others"] for name in (fc1, fc2, qkv)}
    source = checkpoint_of(weights, CORE, {**arguments, "matrices": matrices})
    there = translate(source, "hf-llama")
    assert there.arguments["matrices"] == {"model.layers.0.mlp.down_proj.weight": matrices[fc2]}
    back = translate(there, CORE)
    assert back.arguments["matrices"] == {fc2: matrices[fc2]}
    assert {k: v for k, v in back.arguments.items() if k != "matrices"} == arguments
    only_split = dataclasses.replace(source, arguments={**arguments, "matrices": {fc1: matrices[fc1]}})
    assert translate(only_split, "hf-llama").arguments == arguments
    assert translate(source, CORE).arguments["matrices"] == matrices


def test_an_embedding_whose_padding_stays_keeps_states_of_any_form() -> None:
    weights, arguments = random_core(10, gated=True)
    name = "embedding.word_embeddings.weight"
    source = replaced(checkpoint_of(weights, CORE, arguments), name, owner_states={0: {"row": torch.ones(3)}})
    assert translate(source, "hf-llama").params["model.embed_tokens.weight"].owner_states
    with pytest.raises(CheckpointError, match="owner_states"):
        translate(source, "hf-llama", Numbers(vocab_size=1))


@pytest.mark.parametrize("changes", [{"step": 4.0}, {"group": 1}, {"states": {}}])
def test_parts_that_were_trained_otherwise_are_not_joined(changes: dict[str, Any]) -> None:
    weights, arguments = random_core(11, gated=True)
    there = translate(checkpoint_of(weights, CORE, arguments), "hf-llama")
    with pytest.raises(CheckpointError, match="are joined by rule .*, but differ in"):
        translate(replaced(there, "model.layers.0.mlp.up_proj.weight", **changes), CORE)


def test_parts_of_another_dtype_are_not_joined() -> None:
    weights, arguments = random_core(11, gated=True)
    there = translate(checkpoint_of(weights, CORE, arguments), "hf-llama")
    name = "model.layers.0.mlp.up_proj.weight"
    low = replaced(there, name, weight=there.params[name].weight.to(torch.bfloat16))
    with pytest.raises(CheckpointError, match="torch.bfloat16 of shape .* cannot be joined"):
        translate(low, CORE)


def test_two_spellings_of_one_name_are_refused() -> None:
    weights, arguments = random_core(0, gated=True)
    weights["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"] = torch.ones(2)
    with pytest.raises(CheckpointError, match="'decoder.layers.0.input_layernorm.weight'; one of them is too many"):
        translate(checkpoint_of(weights, CORE, arguments), CORE)


def test_two_rules_that_make_one_name_are_refused() -> None:
    names = NameMap(CORE, "mine", (rule("a", "c"), rule("b", "c")))
    with pytest.raises(CheckpointError, match="two rules make 'c'"):
        apply(names, checkpoint_of({"a": torch.ones(1), "b": torch.ones(1)}, CORE))


def test_a_map_for_other_names_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the map is from megatron-core to hf-llama, but .* names are model"):
        apply(find("hf-llama"), checkpoint_of({}, "model"))
    with pytest.raises(CheckpointError, match="unknown names 'hf-lama'; did you mean 'hf-llama'?"):
        find("hf-lama")


# Aliases, ties, buffers, what is dropped


def test_names_of_transformer_engine_are_understood() -> None:
    weights, arguments = random_core(13, gated=True, experts=2)
    called = {}
    for name, weight in weights.items():
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        called[re.sub(r"local_experts\.(\d+)\.(linear_fc.)\.weight", r"\2.weight\1", name)] = weight
    assert len(set(called) & set(weights)) < len(weights) / 2
    assert_equal(weights_of(translate(checkpoint_of(called, CORE, arguments), CORE)), weights)


def test_ties_and_buffers_are_renamed_where_there_is_a_name() -> None:
    weights, arguments = random_core(14, gated=True, tied=True)
    source = checkpoint_of(weights, CORE, arguments)
    embedding, bias = "embedding.word_embeddings.weight", held(torch.ones(1), "bias")
    source = dataclasses.replace(source, tied={"output_layer.weight": embedding}, buffers={"router.expert_bias": bias})
    there = translate(source, "hf-llama")
    assert there.tied == {"lm_head.weight": "model.embed_tokens.weight"} and not there.buffers
    assert any("no name for 'router.expert_bias'; left out" in note for note in there.notes)
    assert translate(source, CORE).buffers == source.buffers
    assert translate(there, CORE).tied == source.tied


def test_what_is_dropped_is_said() -> None:
    there = checkpoint_of({"rotary": torch.ones(2, 2), "kept": torch.ones(2)}, CORE)
    found = apply(NameMap(CORE, "mine", (rule("rotary", []), rule("kept", "kept"))), there)
    assert list(found.params) == ["kept"] and found.notes == ("1 parameter(s) were dropped by the name map: 'rotary'.",)


# Vocabulary


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_of_the_vocabulary_is_cut_and_put_back_as_zeros(family: str) -> None:
    weights, arguments = random_core(15, **CASES[family] | {"tied": False})
    if family == "hf-gpt2":
        weights["embedding.position_embeddings.weight"] = torch.ones(2, 2)
    padded = ("embedding.word_embeddings.weight", "output_layer.weight")
    width = weights[padded[0]].shape[1]
    weights |= {name: torch.cat([torch.ones(5, width), torch.full((3, width), 7.0)]) for name in padded}
    layout = {"qkv_layout": "groups"}
    source = checkpoint_of(weights, CORE, arguments)
    there = apply(find(family), source, Numbers(vocab_size=5, **layout))
    assert sum(param.shape == (5, width) for param in there.params.values()) >= 2
    back = apply(find(family).inverse(), there, Numbers(vocab_multiple=4, **layout))
    for name in padded:
        for key, value in (("weight", 1.0), (MASTER, 3.0), ("momentum_buffer", -1.0)):
            found = (back.params[name].weight if key == "weight" else back.params[name].states[key]).read()
            assert torch.equal(found, torch.cat([torch.full((5, width), value), torch.zeros(3, width)])), (name, key)
    with pytest.raises(CheckpointError, match="has 8 rows, fewer than the vocabulary of 9 that was given"):
        apply(find(family), source, Numbers(vocab_size=9, **layout))


# Reading


def counted(weight: Tensor, reads: list[tuple[int, int]]) -> LazyTensor:
    def part(start: int, stop: int) -> Tensor:
        reads.append((start, stop))
        return weight.flatten()[start:stop].clone()

    return LazyTensor(tuple(weight.shape), weight.dtype, lambda: part(0, weight.numel()).view(weight.shape), "w", part)


def test_parts_read_no_more_than_themselves() -> None:
    reads: list[tuple[int, int]] = []
    weights = {
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.arange(96.0).view(48, 2),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.arange(40.0).view(20, 2),
    }
    params = {name: Param(counted(weight, reads)) for name, weight in weights.items()}
    source = Checkpoint("a test's", "", CORE, params)
    rules = tuple(rule for rule in find("hf-llama").rules if any("split" in name for name in rule.do))
    there = apply(NameMap(CORE, "mine", rules), source, Numbers(heads=8, query_groups=2))
    assert not reads
    size, prefix = 4 * 2, "model.layers.0"  # channels of a head, times columns
    expected = {
        f"{prefix}.self_attn.q_proj.weight": [(0, 4 * size), (6 * size, 10 * size)],
        f"{prefix}.self_attn.k_proj.weight": [(4 * size, 5 * size), (10 * size, 11 * size)],
        f"{prefix}.self_attn.v_proj.weight": [(5 * size, 6 * size), (11 * size, 12 * size)],
        f"{prefix}.mlp.gate_proj.weight": [(0, 20)],
        f"{prefix}.mlp.up_proj.weight": [(20, 40)],
    }
    for name, parts in expected.items():
        reads.clear()
        there.params[name].weight.read()
        assert reads == parts, name
    stack = Checkpoint("", "", "mine", {"fc2": Param(counted(torch.randn(3, 4, 5), reads))})
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
    path = written(
        tmp_path,
        {
            "target": "mine",
            "family": "hf-llama",
            "numbers": {"query_groups": 2, "heads": 4},
            "rules": [
                {
                    "source": "decoder.layers.{layer}.self_attention.linear_qkv.weight",
                    "target": "blocks.{layer+1}.qkv",
                    "do": ["qkv_blocks", "transpose"],
                },
                {"source": "decoder.layers.{layer}.mlp.linear_fc2.weight", "target": "down"},
                {"source": "unused.{*}", "target": [], "optional": True},
            ],
        },
    )
    q, k, v = torch.randn(12, 5), torch.randn(6, 5), torch.randn(6, 5)
    weights = {f"decoder.layers.{n}.self_attention.linear_qkv.weight": grouped_rows(q, k, v, 2) for n in range(2)}
    weights |= {f"decoder.layers.{n}.mlp.linear_fc2.weight": torch.randn(3, 4) for n in range(2)}
    weights |= {
        f"decoder.layers.{n}.{m}.weight": torch.ones(5)
        for n in range(2)
        for m in ("input_layernorm", "pre_mlp_layernorm")
    }
    weights |= {"embedding.word_embeddings.weight": torch.randn(7, 5), "decoder.final_layernorm.weight": torch.ones(5)}
    weights |= {f"decoder.layers.{n}.self_attention.linear_qkv.bias": torch.arange(24.0) for n in range(2)}
    there = translate(checkpoint_of(weights, CORE), path)
    assert there.names == "mine"
    found = weights_of(there)
    assert torch.equal(found["blocks.2.qkv"], torch.cat([q, k, v]).t())
    assert torch.equal(
        found["down"], torch.stack([weights[f"decoder.layers.{n}.mlp.linear_fc2.weight"] for n in range(2)])
    )
    assert "model.layers.0.self_attn.q_proj.bias" in found
    assert_equal(weights_of(translate(there, CORE, source=path)), weights)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ([], "expected an object with 'target' and 'rules'; found list"),
        ({"target": "a", "rulse": []}, "unknown key 'rulse'; did you mean 'rules'?"),
        ({"target": "a"}, "no rules, and no family"),
        ({"target": "a", "family": "hf-lama"}, "unknown family 'hf-lama'; did you mean 'hf-llama'?"),
        ({"target": "a", "family": "hf-llama", "source": "b"}, "is for 'megatron-core', but source is 'b'"),
        ({"target": "a", "source": "a", "rules": [{"source": "x", "target": "y"}]}, "are both 'a'"),
        ({"target": "a", "family": "hf-llama", "numbers": {"haeds": 3}}, "unknown key 'haeds'; did you mean 'heads'?"),
        (
            {"target": "a", "rules": [{"source": "x", "targte": "y"}]},
            "(?s)rule 0: .*unknown key 'targte'; did you mean",
        ),
        ({"target": "a", "rules": [{"source": "x", "target": "y", "do": ["transpos"]}]}, "did you mean 'transpose'?"),
        ({"target": "a", "rules": [{"source": "x", "target": "y", "do": ["split_qkv"]}]}, "3 tensors, but 1 names"),
        ({"target": "a", "rules": [{"source": "x", "target": "y", "do": ["join_qkv"]}]}, "takes 3 tensors, but .* 1"),
        ({"target": "a", "rules": [{"source": "x", "target": [], "do": ["transpose"]}]}, "needs no operations"),
        ({"target": "a", "rules": [{"source": "x{", "target": "y"}]}, "a brace is not closed"),
        ({"target": "a", "rules": [{"source": "x{A-b}", "target": "y"}]}, r"\{A-b\} is no field"),
        ({"target": "a", "rules": [{"source": "x{*}", "target": "y"}]}, "only numbers can be stacked over"),
        ({"target": "a", "rules": [{"source": "x{a}", "target": "y{b}"}]}, "only in the source"),
        ({"target": "a", "rules": [{"source": ["x{a}", "y"], "target": ["x{a}", "y"]}]}, "must have the same fields"),
        ({"target": "a", "rules": [{"source": "x", "target": ["y", "z"]}]}, "1 tensors, but 2 names"),
    ],
)
def test_what_is_wrong_in_a_users_file_is_said(content: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(CheckpointError, match=said) as caught:
        find(path)
    assert path in str(caught.value)


def test_a_rule_of_a_users_file_that_fits_nothing_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, {"target": "a", "rules": [{"source": "embeding.weight", "target": "y"}]})
    with pytest.raises(CheckpointError, match="'embeding.weight' fits no name; did you mean 'embedding.weight'?"):
        translate(checkpoint_of({"embedding.weight": torch.ones(2, 2)}, CORE), path)


def test_patterns_read_and_write_names() -> None:
    pattern = Pattern("{layer+2}.mlp.{weight|bias}")
    assert pattern.match("5.mlp.bias") == {"layer": 3, "weight|bias": "bias"}
    assert pattern.format({"layer": 3, "weight|bias": "bias"}) == "5.mlp.bias"
    for name in ("1.mlp.bias", "05.mlp.bias", "5.mlp.other", "5.mlp.bias.more", "x5.mlp.bias"):
        assert pattern.match(name) is None, name
    assert Pattern("{a}.{a}").match("1.2") is None and Pattern("{a}.{a}").match("3.3") == {"a": 3}


def test_the_way_back_of_the_way_back_is_the_way_there() -> None:
    for name, names in FAMILIES.items():
        plain = dataclasses.replace(names, rules=tuple(dataclasses.replace(r, only=None) for r in names.rules))
        assert plain.inverse().inverse() == plain, name
        assert plain.inverse() != plain or name == CORE


def test_a_rule_that_makes_no_sense_names_itself() -> None:
    with pytest.raises(ValueError, match=r"rule a -> b \+ c: 1 tensors, but 2 names for them"):
        Rule((Pattern("a"),), (Pattern("b"), Pattern("c")))


# What changes for Muon


MUON = {"muon_split_qkv": True, "muon_num_ns_steps": 5, "muon_scale_mode": "spectral"}


def atoms_in(notes: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for note in notes:
        yield from (json.loads(found) for found in re.findall(r"Set \"atoms\": (\{.*\}) for the same", note))


def blocks_by_name(checkpoint: Checkpoint, name: str, settings: dict[str, Any], transposed: bool) -> dict[str, Tensor]:
    """The matrices that the sentence's setting makes of a parameter."""
    found = AtomSettings.parse(settings).of([name])
    assert found is not None, (name, settings)
    weight = checkpoint.params[name].weight.read()
    blocks = blocks_of(name, tuple(weight.shape), transposed, *found)
    flat = weight.flatten()
    return {b.name: torch.stack([flat[b.flat(place)] for place in range(b.numel)]).view(b.shape) for b in blocks}


@pytest.mark.parametrize("layout", ["core", "groups", "blocks", "blocks of ranks", "gpt2"])
def test_the_setting_for_a_fused_matrix_divides_it_into_q_k_and_v(layout: str) -> None:
    heads, groups, size = (6, 6, 2) if layout == "gpt2" else (6, 3, 2)
    q, k, v = (torch.arange(n * size * 4.0).view(-1, 4) + at for n, at in ((heads, 0), (groups, 100), (groups, 200)))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    arguments = MUON | {"num_attention_heads": heads, "num_query_groups": groups, "swiglu": False}
    source = checkpoint_of({name: grouped_rows(q, k, v, groups)}, CORE, arguments)
    family = {"core": CORE, "gpt2": "hf-gpt2"}.get(layout, "megatron-deepspeed")
    names = find(family)
    names = dataclasses.replace(names, rules=tuple(dataclasses.replace(r, optional=True) for r in names.rules))
    numbers = Numbers(qkv_layout="blocks" if "blocks" in layout else "groups", qkv_ranks=3 if "ranks" in layout else 1)
    there = apply(names, source, numbers)
    (settings,) = atoms_in(there.notes)
    (target,) = there.params
    found = blocks_by_name(there, target, settings, transposed=layout == "gpt2")
    expected = {"q": q, "k": k, "v": v}
    for part, matrix in expected.items():
        mine = [block for called, block in found.items() if called.startswith(part)]
        mine = [block.t() if layout == "gpt2" and block.shape != matrix.shape else block for block in mine]
        assert len(mine) == 1 and torch.equal(mine[0], matrix), (layout, part, found.keys())


def test_joining_says_how_to_keep_matrices_apart() -> None:
    weights, arguments = random_core(3, gated=True)
    there = translate(checkpoint_of(weights, CORE, arguments | MUON), "hf-llama")
    core = translate(there, CORE)
    assert len(list(atoms_in(core.notes))) == 2
    settings = {key: value for each in atoms_in(core.notes) for key, value in each.items()}
    fc1, qkv = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
    found = blocks_by_name(core, fc1, settings, False)
    before = weights_of(there)
    for part in ("gate", "up"):
        assert torch.equal(found[part], before[f"model.layers.0.mlp.{part}_proj.weight"])
    found = blocks_by_name(core, qkv, settings, False)
    for part in "qkv":
        (mine,) = [block for called, block in found.items() if called.startswith(part)]
        assert torch.equal(mine, before[f"model.layers.0.self_attn.{part}_proj.weight"])


@pytest.mark.parametrize(("split", "said"), [(True, "nothing changes"), (False, "no setting"), (None, "do not say")])
def test_splitting_says_what_megatron_orthogonalized(split: bool | None, said: str) -> None:
    weights, arguments = random_core(1, gated=True, layers=2)
    arguments |= MUON | {"muon_split_qkv": split}
    notes = translate(checkpoint_of(weights, CORE, arguments), "hf-llama").notes
    (qkv,) = [note for note in notes if note.startswith("q, k and v are separate parameters now")]
    assert said in qkv and f"{arguments['num_layers']} parameters" in qkv and "linear_qkv.weight" in qkv
    (gated,) = [note for note in notes if note.startswith("Gate and up were one matrix")]
    assert "no setting of 'atoms' joins" in gated and "linear_fc1.weight" in gated
    (listed,) = [note for note in notes if "muon_num_ns_steps=5" in note]
    assert "muon_scale_mode='spectral'" in listed and "travel along" in listed


def test_one_sentence_serves_all_layers() -> None:
    weights, arguments = random_core(1, gated=True, layers=3)
    (settings,) = atoms_in(translate(checkpoint_of(weights, CORE, arguments | MUON), CORE).notes)
    assert list(settings) == ["decoder.layers.*.self_attention.linear_qkv.weight"]


def test_nothing_is_said_of_muon_where_it_did_not_train() -> None:
    weights, arguments = random_core(3, gated=True)
    source = checkpoint_of(weights, CORE, arguments | MUON)
    params = {
        name: dataclasses.replace(param, states={k: s for k, s in param.states.items() if k != "momentum_buffer"})
        for name, param in source.params.items()
    }
    assert translate(dataclasses.replace(source, params=params), "hf-llama").notes == ()


def test_blockwise_muon_under_tensor_parallelism_is_said() -> None:
    weights, arguments = random_core(3, gated=True)
    source = checkpoint_of(weights, CORE, arguments | MUON | {"muon_tp_mode": "blockwise"})
    assert not any("blockwise'" in note and "ranks" in note for note in translate(source, CORE).notes)
    source = dataclasses.replace(source, world={"tp": 2})
    assert any("each of 2 tensor-parallel ranks" in note for note in translate(source, CORE).notes)


# Genuine checkpoints

GENUINE = [
    ("t16_lw_muon_dp2_torchdist", "hf-llama"),
    ("t16_lw_muon_tp2_torchdist", "hf-llama"),
    ("t20_lw_muon_dp2_torchdist", "hf-llama"),
    ("m16_lw_muon_dp2_torchdist", "hf-mixtral"),
    ("m16_lw_muon_dp2_torchdist", "hf-qwen-moe"),
    ("m16_lw_muon_dp2_torchdist", "hf-moe-stacked"),
    ("g16_lw_muon_dp2_torchdist", "hf-gpt2"),
    ("g16_lw_muon_dp2_torchdist", "megatron-deepspeed"),
    ("t16_do_adam_tp2_torchdist_full", "megatron-deepspeed"),
]


@pytest.mark.parametrize(("folder", "family"), GENUINE)
def test_genuine_megatron_checkpoints_go_to_every_family_and_back(folder: str, family: str) -> None:
    if not (SHARED / folder).is_dir():
        pytest.skip("needs the genuine checkpoints beside this project")
    numbers = Numbers(qkv_layout="blocks")
    source = megatron_dist.read(SHARED / folder)
    there = translate(source, family, numbers)
    if family == "hf-llama":  # a norm, a matrix and its momentum by plain arithmetic
        args, qkv = source.arguments, "decoder.layers.1.self_attention.linear_qkv.weight"
        groups, size = args["num_query_groups"], args["kv_channels"]
        each = args["num_attention_heads"] // groups * size
        for key in source.params[qkv].states:
            fused = source.params[qkv].states[key].read()
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
