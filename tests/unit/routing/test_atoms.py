"""The option ``atoms``, which divides a parameter's outputs by name, the reasons that are printed, and ``per_head``."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed import _attention_head_count as of_deepspeed
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lwopt_backend import LayerWiseOptimizer, explain
from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.groups.choices import settings_of
from lwopt_backend.groups.grouping import group_parameters
from lwopt_backend.plan.atoms import Block, Stripes
from lwopt_backend.planner.shapes import Training
from lwopt_backend.routing.matrices import divide
from lwopt_backend.routing.routing import full_shape
from lwopt_backend.routing.traced import best_run
from tests.support.fused import FusedQKVLinear
from tests.support.models import routed
from tests.support.on_ranks import on_ranks
from tests.unit.routing.test_fused_weights import (
    GROUPED,
    MODELS,
    PHI3,
    TINY,
    TOKEN,
    Attention,
    Make,
    bare,
    divided_of,
    lm,
    named,
    outputs_of,
    phi3,
    side_by_side,
    stack_of,
    watched,
)


# Reasons
def reasons_of(model: nn.Module, **options: object) -> dict[str, str]:
    rules, config = settings_of(HostConfig, options, "test")
    found = group_parameters(model, [{"params": list(model.parameters())}], rules, config)
    return {r.name.removesuffix(".weight"): r.reason for r in found.routes}


def test_reason_tells_the_parts_of_a_weight() -> None:
    """The reason tells the parts and whose they are, or why a weight stays whole."""
    latent = Attention()
    latent.v_head_dim = 9
    model = nn.ModuleDict(
        {
            **{"m": FusedQKVLinear(), "a": Attention(), "phi3": phi3()[0], **side_by_side(), "last": nn.Linear(8, 8)},
            **{"b": FusedQKVLinear(heads=1, kv_heads=1, size=1), "c": latent},
        }
    )
    found, layer = reasons_of(model, atoms={"*.o_proj.weight": {"heads": 8}}), "phi3.model.layers.0"
    expected = {
        "m.wqkv": "2-D weight: q, k, v, as FusedQKVLinear has them",
        "a.wq": "2-D weight: q_nope, q_rope, as Attention has them",
        "a.wkv_b": "2-D weight: k_nope, v, as Attention has them",
        "a.wo": "2-D weight",
        "b.wqkv": "2-D weight: whole, as a part of it that FusedQKVLinear has is one row",
        "c.wkv_b": "2-D weight: part0, part1, as Attention has them",
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
        with pytest.warns(UserWarning, match="'0.wqkv.weight'"):
            reason = reasons_of(nn.Sequential(module))["0.wqkv"]
        assert reason == "2-D weight: whole, though it looks fused: FusedQKVLinear.forward stopped: RuntimeError"
    assert {name: each.reason for name, each in divided_of(stack_of("mixtral.MixtralExperts")).items()} == {
        "experts.gate_up_proj": "4 slices of gate, up, as MixtralExperts has them",
        "experts.down_proj": "4 slices",
    }


# Settings
def linears(**shapes: tuple[int, int]) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(inputs, outputs, bias=True) for name, (outputs, inputs) in shapes.items()})


def test_atoms_divide_outputs() -> None:
    """Atoms divide outputs into q, k and v, heads, gate and up, or split sizes."""
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


def test_globs_of_atoms_may_match_in_another_part_of_the_model() -> None:
    stages = linears(a=(12, 4)), linears(b=(12, 4))
    routes, settings = [routed(stage) for stage in stages], AtomSettings.parse({"a.*": {"heads": 3}})
    assert len(divide(stages[0], routes[0], settings, elsewhere=routes[1])["a.weight"].blocks) == 3
    assert len(divide(stages[1], routes[1], settings, elsewhere=routes[0])["b.weight"].blocks) == 1
    with pytest.raises(ValueError, match=r"atoms: 'a.\*' matches no parameter name"):
        divide(stages[1], routes[1], settings)


def test_atoms_come_before_known_fused_weights() -> None:
    """Atoms are about outputs, however a weight is stored."""
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


def test_forwards_are_followed_for_what_no_setting_decides() -> None:
    """To follow them was most of the time in which an optimizer is made, also with atoms {"*": "whole"}."""
    ran = []

    class Attends(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, outputs)

        def forward(self, x: Tensor) -> Tensor:
            ran.append(self.qkv.out_features)
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.mT) @ v

    decided = {"include": ["*"], "atoms": {"*": "whole"}, "lr": 0.1, "report": False}
    LayerWiseOptimizer(nn.ModuleList([Attends(12), Attends(24)]), **decided)
    assert ran == []
    LayerWiseOptimizer(nn.ModuleList([Attends(12), Attends(24)]), **{**decided, "atoms": {"0.*": "whole"}})
    assert {*ran} == {24}


def test_atoms_make_matrices_of_convolutions() -> None:
    """Convolutions become matrices where atoms say "stack" or "flatten"."""
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


FITS_NOT = r"atoms 'a.\*': 'a.weight' of shape \(12, 4\): expected "
WRONG: Any = [
    ({"a.wieght": "whole"}, r"atoms: 'a.wieght' matches no parameter name; did you mean 'a.weight'\?"),
    ({"a.bias": "whole"}, r"'a.bias' matches only parameters that no matrix rule updates, such as 'a.bias' \(elem"),
    ({"a.*": {"qkv": [8, 2, 3]}}, rf"{FITS_NOT}sizes whose sum is its 12 outputs, found 8\+2\+3; correct"),
    ({"a.*": {"qkv": [2, 1, 1], "groups": 4}}, rf"{FITS_NOT}sizes whose sum is its 12 outputs, found 2\+1\+1, 4 times"),
    ({"a.*": {"heads": 5}}, rf"{FITS_NOT}5 equal parts, found 12 outputs"),
    ({"odd.*": {"gate_up": "halves"}}, r"expected 2 equal parts, found 7 outputs"),
    ({"a.*": {"head": 3}}, r"atoms 'a.\*': unknown key 'head'; did you mean 'heads'\?"),
    ({"a.*": {"qkv": [8, 2, "2"]}}, r"qkv.2: input should be a valid integer; found '2'"),
    ({"a.*": {"gate_up": "half"}}, r"gate_up: input should be 'halves' or 'interleaved'; found 'half'"),
    ({"a.*": {"heads": 2, "gate_up": "halves"}}, r"expected one of .*; found 'heads' and 'gate_up'"),
    ({"a.*": {"split_sizes": []}}, r"expected one of 'split_sizes', .* with sizes; found 'split_sizes'"),
    ({"a.*": {}}, r"expected one of 'split_sizes', 'heads', 'qkv', 'gate_up', with sizes; found none"),
    ({"a.*": {"heads": 2, "groups": 2}}, r"expected 'groups' with 'qkv' or 'split_sizes' only, found it with 'heads'"),
    ({"a.*": "hole"}, r"atoms 'a.\*': unknown word 'hole'; did you mean 'whole'\?"),
    ({"a.*": 12}, r"atoms 'a.\*': expected one of 'whole', 'stack', 'flatten' or a mapping .*; found 12"),
    ({"a.weight": "stack"}, r"shape \(12, 4\): 'stack' is for parameters of three dimensions or more"),
    (["a.*"], r"atoms: expected a mapping of globs to divisions; found \['a.\*'\]"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_atoms_are_refused_by_name(settings: Any, message: str) -> None:
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
def test_per_head_of_a_fused_qkv_has_what_attention_multiplies(case: str) -> None:
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
def test_per_head_has_as_many_heads_as_deepspeeds_per_head_muon(case: str) -> None:
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
def test_per_head_of_unknown_heads_is_an_error(module: nn.Module, message: str) -> None:
    """`atoms` tells the heads."""
    model = nn.Sequential(module)
    with pytest.raises(ValueError, match=re.escape(message)):
        heads_of(model)
    assert {len(blocks) for blocks in heads_of(model, atoms={"*.weight": {"heads": 4}}).values()} == {4}
    rules, config = settings_of(HostConfig, PER_HEAD, "test")
    with pytest.raises(ValueError, match="per_head"):  # by shapes alone, nothing is known
        Training(rules, config).of(routed(model))


# What a model declares
class Declares(nn.Module):
    """A model's own class that says which matrices are in its weights."""

    def __init__(self, **declared: Any) -> None:
        super().__init__()
        self.qkv, self.stacked, self.declared = nn.Linear(4, 12), nn.Parameter(torch.randn(2, 4, 4)), declared

    def lwopt_atoms(self) -> dict[str, Any]:
        return self.declared


def test_lwopt_atoms_declared_by_a_model() -> None:
    """A model's declaration wins over what its code shows, and loses to the option."""
    module = Declares(**{"qkv.weight": {"qkv": [8, 2, 2]}, "stacked": "stack"})
    model = nn.ModuleDict({"a": checkpoint_wrapper(module)})
    found = reasons_of(model)
    assert found["a.qkv"] == "2-D weight: q, k, v, set by Declares.lwopt_atoms"
    assert found["a.stacked"] == "3-D, set by Declares.lwopt_atoms: 2 slices, set by Declares.lwopt_atoms"
    assert reasons_of(model, atoms={"a.qkv.weight": "whole"})["a.qkv"].endswith(
        "one matrix, set by atoms 'a.qkv.weight'"
    )


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        (
            {"qkv.weigth": "whole"},
            "'qkv.weigth' is not the name of a parameter of the module; did you",
        ),
        ({"qkv.weight": {"qkv": [8, 2]}}, r"Declares.lwopt_atoms 'qkv.weight': "),
        ({"qkv.weight": {"qkv": [8, 2, 3]}}, "Declares.lwopt_atoms: 'qkv.weight' of shape .* found 8\\+2\\+3"),
    ],
)
def test_a_models_declaration_is_checked_as_the_option_is(declared: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        reasons_of(Declares(**declared))


class Reduces(nn.Linear):
    def forward(self, hidden_states: Tensor) -> Tensor:
        found = super().forward(hidden_states)
        dist.all_reduce(found)
        return found


@pytest.mark.on_gloo  # the strict transport is Python, below which nothing is seen
@on_ranks(2)
def test_a_followed_forward_stops_before_it_communicates() -> None:
    stopped = best_run(Reduces(4, 4), full_shape).error
    assert "found the collective c10d.allreduce_" in str(stopped)


# What would happen to a model
def test_explain_a_model_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    """A model without memory is explained as it would be trained."""
    with torch.device("meta"):
        model = nn.ModuleDict({"m": FusedQKVLinear(), "norm": nn.LayerNorm(4), "w_fused": nn.Linear(4, 8)})
    model.norm.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="'w_fused.weight'"):
        found = {each.name: each for each in explain(model, matrix="soap", elementwise="lion", lr=0.1)}
    assert {name: (each.kind, each.rule) for name, each in found.items()} == {
        "m.wqkv.weight": ("matrix", "soap"),
        "norm.weight": ("frozen", ""),
        "norm.bias": ("elementwise", "lion"),
        "w_fused.weight": ("matrix", "soap"),
        "w_fused.bias": ("elementwise", "lion"),
    }
    assert found["m.wqkv.weight"].matrices == {"q": (24, 24), "k": (12, 24), "v": (12, 24)}
    assert [name for name, each in found.items() if each.looks_fused] == ["w_fused.weight"]
    assert "q, k, v, as FusedQKVLinear has them" in capsys.readouterr().out
