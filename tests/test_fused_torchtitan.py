"""torchtitan's fused weights: modules with the attributes of its own, and what they do with the outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend.chosen import settings_of
from lwopt_backend.config import HostConfig
from lwopt_backend.grouping import group_parameters
from lwopt_backend.routing import Route
from tests.test_atoms import divided_of, fused_of, named, numbers, of_experts, outputs_of


class FusedQKVLinear(nn.Module):
    """Of every group of queries these, their key and their value."""

    def __init__(self, inputs: int = 24, heads: int = 6, kv_heads: int = 3, size: int = 4) -> None:
        super().__init__()
        self.heads_per_kv, self.head_dim, self.r_dim = heads // kv_heads, size, heads // kv_heads + 2
        self.wqkv = nn.Linear(inputs, kv_heads * self.r_dim * size, bias=False)

    def cut(self, outputs: Tensor) -> list[Tensor]:
        grouped = outputs.unflatten(-1, (-1, self.r_dim, self.head_dim))
        return list(grouped.split([self.heads_per_kv, 1, 1], dim=-2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.cut(self.wqkv(x))


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

    def parts(self, x: Tensor) -> dict[str, Tensor]:
        query = self.wq_b(self.wq_a(x)) if self.q_lora_rank else self.wq(x)
        q_nope, q_rope = query.unflatten(-1, (-1, 10)).split([6, 4], -1)
        kv, k_rope = self.wkv_a(x).split([8, 4], -1)
        k_nope, v = self.wkv_b(kv).unflatten(-1, (-1, 16)).split([6, 10], -1)
        return {"q_nope": q_nope, "q_rope": q_rope, "kv": kv, "k_rope": k_rope, "k_nope": k_nope, "v": v}

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parts(x)
        scores = parts["q_nope"] @ parts["k_nope"].mT + parts["q_rope"] @ parts["k_rope"].unsqueeze(-1)
        return self.wo((scores.softmax(-1) @ parts["v"]).flatten(-2))


class GptOssGroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp1_weight_EGD = nn.Parameter(torch.randn(4, 10, 6))
        self.mlp1_bias_EG = nn.Parameter(torch.randn(4, 10))
        self.mlp2_weight_EDF = nn.Parameter(torch.randn(4, 6, 5))


def used_by(model: nn.Module, weight: str, loss: Callable[[], Tensor]) -> set[float]:
    """The outputs of ``weight`` that a loss depends on: the rows that have a gradient."""
    model.zero_grad()
    loss().backward()
    return {float(row) for row in model.get_parameter(weight).grad.abs().sum(1).nonzero()}


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (6, 6), (6, 1)])
def test_the_fused_qkv_is_q_k_and_v_of_every_group(heads: int, kv_heads: int) -> None:
    module = FusedQKVLinear(heads=heads, kv_heads=kv_heads)
    model = nn.ModuleDict({"qkv_linear": module})
    found = named(fused_of(model)["qkv_linear.wqkv.weight"])
    x = torch.randn(2, 24)
    assert list(found) == ["q", "k", "v"]
    for number, outputs in enumerate(found.values()):
        assert outputs == used_by(module, "wqkv.weight", lambda part=number: module(x)[part].square().sum())
    assert [len(outputs) for outputs in found.values()] == [heads * 4, kv_heads * 4, kv_heads * 4]


@pytest.mark.parametrize("queries", [0, 8])
def test_latent_attention_has_the_matrices_of_its_report(queries: int) -> None:
    module, x = Attention(queries), torch.randn(2, 24)
    fused = fused_of(nn.ModuleDict({"attention": module}))
    expected = {
        "wq_b" if queries else "wq": ["q_nope", "q_rope"],
        "wkv_a": ["kv", "k_rope"],
        "wkv_b": ["k_nope", "v"],
    }
    assert {name.split(".")[1]: list(named(blocks)) for name, blocks in fused.items()} == expected
    for name, blocks in fused.items():
        weight = name.removeprefix("attention.")
        for part, outputs in named(blocks).items():
            assert outputs == used_by(module, weight, lambda part=part: module.parts(x)[part].square().sum())


def test_experts_of_gpt_oss_have_gate_and_up_in_turn() -> None:
    model = nn.ModuleDict({"inner_experts": GptOssGroupedExperts()})
    ((name, blocks),) = fused_of(model).items()
    assert name == "inner_experts.mlp1_weight_EGD"
    assert [outputs_of(block) for block in blocks[:2]] == [numbers(torch.arange(s, 10.0, 2)) for s in (0, 1)]
    assert len(of_experts(blocks, "gate")) == 20


def routes_of(model: nn.Module, **options: object) -> dict[str, Route]:
    rules, config = settings_of(HostConfig, options, "test")
    found = group_parameters(model, [{"params": list(model.parameters())}], rules, config, stacks=True)
    return {route.name: route for route in found.routes}


def test_the_table_says_what_was_split_into_what() -> None:
    model = nn.ModuleDict({"qkv_linear": FusedQKVLinear(), "attention": Attention()})
    reasons = {name: route.reason for name, route in routes_of(model).items()}
    assert reasons["qkv_linear.wqkv.weight"] == "2-D weight: q, k, v, as FusedQKVLinear has them"
    assert reasons["attention.wq.weight"] == "2-D weight: q_nope, q_rope, as Attention has them"
    assert reasons["attention.wkv_b.weight"] == "2-D weight: k_nope, v, as Attention has them"
    assert reasons["attention.wo.weight"] == "2-D weight"


def test_sizes_that_do_not_add_up_leave_a_weight_whole_and_say_so() -> None:
    whole = "2-D weight: whole, as the sizes that {} has for its parts do not add up"
    for key, value in (("head_dim", 7), ("r_dim", 5), ("heads_per_kv", 3)):
        module = FusedQKVLinear()
        setattr(module, key, value)
        route = routes_of(nn.ModuleDict({"m": module}))["m.wqkv.weight"]
        assert (route.kind, route.reason) == ("matrix", whole.format("FusedQKVLinear"))
    module = Attention()
    module.v_head_dim = 9
    routes = routes_of(nn.ModuleDict({"m": module}))
    assert routes["m.wq.weight"].reason == routes["m.wkv_b.weight"].reason == whole.format("Attention")
    assert routes["m.wkv_a.weight"].reason == "2-D weight: kv, k_rope, as Attention has them"
    routes = routes_of(nn.ModuleDict({"m": FusedQKVLinear(heads=1, kv_heads=1, size=1)}))
    assert routes["m.wqkv.weight"].reason == "2-D weight: whole, as a part of it that FusedQKVLinear has is one row"


def test_atoms_set_torchtitans_recipe_of_one_matrix_per_head() -> None:
    model = nn.ModuleDict({"attention": Attention()})
    found = divided_of(model, {"*.wq.weight": {"heads": 3}, "*.wkv_b.weight": {"heads": 3}, "*.wkv_a.weight": "whole"})
    assert [block.shape for block in found["attention.wq.weight"].blocks] == [(10, 24)] * 3
    assert [block.shape for block in found["attention.wkv_b.weight"].blocks] == [(16, 8)] * 3
    assert [block.shape for block in found["attention.wkv_a.weight"].blocks] == [(12, 24)]
