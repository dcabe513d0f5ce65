"""Momentum between its forms, and reading the state of others."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lwopt_backend.migration import SOURCES, convert_momentum, convert_named_momentum, from_checkpoint
from tests.migration import PAGE, eager
from tests.models import MATRICES
from tests.rule_steps import Trained, gradients, random, rule_of
from tests.zero import Reference


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.95, 0.999])
def test_there_and_back_again(momentum: float) -> None:
    """Two roundings of fp32, each half a unit in the last place, and one more of the factor."""
    buffer = random((64, 48), 1)
    kept = buffer.clone()
    total = convert_momentum(buffer, momentum, source="ema", target="sum")
    torch.testing.assert_close(total, buffer / (1 - momentum), rtol=2e-7, atol=0)
    back = convert_momentum(total, momentum, source="sum", target="ema")
    torch.testing.assert_close(back, buffer, rtol=4e-7, atol=0)
    same = convert_momentum(buffer, momentum, source="sum", target="sum")
    assert torch.equal(same, buffer) and same.data_ptr() != buffer.data_ptr()
    assert torch.equal(buffer, kept)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_converted_buffer_goes_on_as_the_other_form_would(nesterov: bool) -> None:
    def trained(form: str) -> Trained:
        return Trained(rule_of("muon", ns_dtype="float32", momentum_form=form, nesterov=nesterov), random((12, 8), 1))

    average, total = trained("ema"), trained("sum")
    for grad in gradients((12, 8)):
        average.step(grad)
        total.step(grad)
    moved, not_converted = trained("sum"), trained("sum")
    moved.value, not_converted.value = average.value.clone(), average.value.clone()
    buffer = average.state["momentum_buffer"]
    moved.state["momentum_buffer"] = convert_momentum(buffer, 0.95, source="ema", target="sum")
    not_converted.state["momentum_buffer"] = buffer.clone()
    for grad in (random((12, 8), 200 + step) for step in range(3)):
        average.step(grad)
        moved.step(grad)
        not_converted.step(grad)
    torch.testing.assert_close(moved.value, average.value, rtol=0, atol=1e-6)
    assert (not_converted.value - average.value).abs().max() > 1e-4


def test_named_states_are_converted_by_parameter() -> None:
    state = {"a": {"momentum_buffer": torch.ones(2)}, "b": {"momentum_buffer": torch.ones(2)}, "c": {"exp_avg": 1}}
    converted = convert_named_momentum(state, {"a": 0.5, "b": 0.75}, source="ema", target="sum")
    assert [float(converted[name]["momentum_buffer"][0]) for name in "ab"] == [2.0, 4.0]
    assert converted["c"] == {"exp_avg": 1} and float(state["a"]["momentum_buffer"][0]) == 1.0
    same = convert_named_momentum(state, 0.5, source="ema", target="sum")
    assert float(same["b"]["momentum_buffer"][0]) == 2.0


CONVERSIONS: list[tuple[dict[str, Any], str]] = [
    ({"source": "emma"}, "source: unknown form of momentum 'emma'; did you mean 'ema'?"),
    ({"target": "total"}, "target: unknown form of momentum 'total'; known: 'ema', 'sum'"),
    ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), found 1.0"),
    ({"momentum": -0.1}, r"momentum: expected a number in \[0, 1\), found -0.1"),
    ({"momentum": {"b": 0.9}}, r"momentum: expected a number for 'a', found those of \['b'\]"),
]


@pytest.mark.parametrize(("how", "message"), CONVERSIONS)
def test_wrong_conversions(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state = {"a": {"momentum_buffer": torch.ones(2)}}
        convert_named_momentum(state, **{"momentum": 0.9, "source": "ema", "target": "sum", **how})


def state_of(momentum: Any = 1.0, **group: Any) -> dict[str, Any]:
    """A state dict of one matrix."""
    return {
        "state": {0: {"momentum_buffer": torch.full((3, 2), momentum)}},
        "param_groups": [{"params": [0], "momentum": 0.9, **group}],
    }


def test_torchs_two_optimizers() -> None:
    single = Reference()
    single.train(2)
    others = [name for name, _ in single.model.named_parameters() if name not in MATRICES]
    found = from_checkpoint(single.muon.state_dict(), MATRICES)
    found |= from_checkpoint(single.adamw.state_dict(), others, source="torch.optim.AdamW")
    params = dict(single.model.named_parameters())
    assert set(found) == set(params)
    for name, state in found.items():
        theirs = (single.muon if name in MATRICES else single.adamw).state[params[name]]
        assert set(state) == set(theirs)
        for key, tensor in state.items():
            assert torch.equal(tensor, theirs[key]) and tensor.data_ptr() != theirs[key].data_ptr()


def test_state_is_read_by_name_where_it_is_by_name() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Muon([("weight", model.weight)], lr=0.1)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    by_number = from_checkpoint(optimizer.state_dict())  # its groups have torch's param_names
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    by_name = from_checkpoint(whole)
    assert by_number.keys() == by_name.keys() == {"weight"}
    for found in (by_number, by_name):
        assert torch.equal(found["weight"]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


def test_pytorch_optimizers_count_of_steps_is_in_the_param_group() -> None:
    weight, bias = nn.Parameter(random((4, 3), 1)), nn.Parameter(random((4,), 2))
    optimizer = pytorch_optimizer.Muon(
        [{"params": [weight], "use_muon": True}, {"params": [bias], "use_muon": False}], lr=0.02
    )
    for step in range(3):
        weight.grad, bias.grad = random((4, 3), step), random((4,), step)
        optimizer.step()
    found = from_checkpoint(optimizer.state_dict(), ["weight", "bias"], source="pytorch_optimizer")
    assert found["bias"]["step"] == 3.0 and set(found["bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(found["weight"]["momentum_buffer"], optimizer.state[weight]["momentum_buffer"])


def of_two(momentum: dict[str, Any], moments: dict[str, Any], *groups: dict[str, Any]) -> dict[str, Any]:
    """A state dict of a matrix and a vector, in one param group or two."""
    params = [[0], [1]] if len(groups) == 2 else [[0, 1]]
    return {
        "state": {0: momentum, 1: moments},
        "param_groups": [{"params": of, **group} for of, group in zip(params, groups, strict=True)],
    }


# dion has momentum of both kinds of parameters under one key, and the momentum's number is ``mu``.
DIONS = {"mu": 0.95, "algorithm": "muon", "step": 7}, {"mu": 0.95, "algorithm": "adamw", "step": 7}
DIONS_MOMENTS = {"momentum": torch.ones(4), "variance": torch.full((4,), 2.0)}
OF_20 = {"momentum": torch.full((3, 2), 20.0)}
OLDER_ADAM = of_two(
    {"use_muon": True, "momentum_buffer": torch.full((3, 2), 10.0)},
    {"use_muon": False, "step": 7, "moment1": torch.ones(4), "moment2": torch.full((4,), 2.0)},
    {"momentum": 0.9},
)
READ: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "dion, a counter on the device": (
        of_two(OF_20, {**DIONS_MOMENTS, "step_dev": torch.tensor(7.0)}, *DIONS),
        {"source": "dion"},
        1.0,
    ),
    "dion, the counter of the group": (of_two(OF_20, DIONS_MOMENTS, *DIONS), {"source": "dion"}, 1.0),
    "dion, sums": (of_two(OF_20, DIONS_MOMENTS, *DIONS), {"source": "dion", "momentum_form": "sum"}, 20.0),
    "moonlight": (OLDER_ADAM, {"source": "moonlight"}, 1.0),
    "Keller Jordan, 2024": (OLDER_ADAM, {"source": "keller_jordan_2024"}, 1.0),
}


@pytest.mark.parametrize("case", READ)
def test_sums_become_averages_and_moments_of_other_names_adamws(case: str) -> None:
    state_dict, how, momentum = READ[case]
    found = from_checkpoint(state_dict, ["weight", "bias"], **how)
    torch.testing.assert_close(found["weight"], {"momentum_buffer": torch.full((3, 2), momentum)})
    expected = {"exp_avg": torch.ones(4), "exp_avg_sq": torch.full((4,), 2.0), "step": torch.tensor(7.0)}
    torch.testing.assert_close(found["bias"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("key", ["momentum", "momentum_beta"])
def test_megatrons_momentum_has_two_names(key: str) -> None:
    state_dict = {**state_of(1.0), "param_groups": [{"params": [0], key: 0.75}]}
    found = from_checkpoint(state_dict, ["weight"], source="megatron", momentum_form="sum")
    assert torch.equal(found["weight"]["momentum_buffer"], torch.full((3, 2), 4.0))


def test_bfloat16_state_becomes_fp32_and_a_given_momentum_goes_first() -> None:
    state_dict = state_of(1.0)
    state_dict["state"][0]["momentum_buffer"] = torch.ones(3, 2, dtype=torch.bfloat16)
    found = from_checkpoint(state_dict, ["weight"], momentum=0.5, momentum_form="sum")["weight"]["momentum_buffer"]
    assert found.dtype == torch.float32 and torch.equal(found, torch.full((3, 2), 2.0))


def test_our_own_state_says_its_form() -> None:
    found = from_checkpoint(state_of(10.0, momentum_form="sum"), ["weight"], source="lwopt_backend")
    torch.testing.assert_close(found["weight"]["momentum_buffer"], torch.ones(3, 2))
    with pytest.raises(ValueError, match="in a param group without 'momentum_form'"):
        from_checkpoint(state_of(), ["weight"], source="lwopt_backend")


def adam_of(**state: Any) -> dict[str, Any]:
    return {"state": {0: state}, "param_groups": [{"params": [0]}]}


@pytest.mark.parametrize(
    ("state_dict", "how", "message"),
    [
        (
            state_of(),
            {"source": "torch.optim.Moun"},
            "unknown source 'torch.optim.Moun'; did you mean 'torch.optim.Muon'?",
        ),
        (state_of(), {"source": "sgd"}, "unknown source 'sgd'; known: 'torch.optim.Muon'"),
        (state_of(), {"momentum_form": "som"}, "momentum_form: unknown form of momentum 'som'; did you mean 'sum'?"),
        (
            {"optimizer_state_dict": {}},
            {},
            r"expected keys 'state' and 'param_groups', found \['optimizer_state_dict'\]",
        ),
        (state_of(), {"names": None}, "knows its parameters by number; pass their names"),
        (state_of(), {"names": ["a", "b"]}, r"names: expected 1, .* \(1\); found 2"),
        (state_of(params=[0, 0]), {"names": ["a", "a"]}, "names: 'a' occurs twice"),
        (
            {"state": {}, "param_groups": [{"params": [0]}]},
            {},
            "parameter 'a' has no state; it has had no gradient yet",
        ),
        (state_of(), {"source": "dion"}, r"has no 'momentum', only \['momentum_buffer'\]; the source may be one of"),
        (state_of(params=[0], algorithm="lion"), {}, "is trained by Lion, whose state is not converted"),
        (adam_of(momentum_buffer=3.0), {}, "'momentum_buffer': expected a tensor, found 3.0"),
        (
            {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
            {"momentum_form": "sum"},
            "in a param group without 'momentum'; pass momentum, to convert 'ema' to 'sum'",
        ),
        (adam_of(exp_avg=torch.ones(2), exp_avg_sq=torch.ones(3), step=1), {}, "has moments of different shapes"),
        (
            adam_of(exp_avg=torch.ones(2), exp_avg_sq=torch.ones(2)),
            {},
            "has no 'step', nor has its param group a 'step'",
        ),
        (adam_of(exp_avg_sq=torch.ones(2), step=1), {}, r"has no 'exp_avg', only \['exp_avg_sq', 'step'\]"),
    ],
)
def test_what_cannot_be_read(state_dict: dict[str, Any], how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_checkpoint(state_dict, **{"names": ["a"], **how})


def test_every_source_is_on_the_page() -> None:
    for source in SOURCES:
        assert f"`{source}`" in PAGE


def test_deepspeeds_and_jordans_optimizer_is_read_in_the_order_it_has() -> None:
    """It sorts the matrices of a group by size."""
    from deepspeed.runtime.zero.muon import muon_optimizer

    params = {"small": nn.Parameter(random((2, 3), 1)), "large": nn.Parameter(random((4, 3), 2))}
    bias = nn.Parameter(random((4,), 3))
    halves = [{"params": [*params.values()], "use_muon": True}, {"params": [bias], "use_muon": False}]
    with eager():
        optimizer = muon_optimizer.MuonWithAuxAdam(halves)
        for step in range(2):
            for param in [*params.values(), bias]:
                param.grad = random(tuple(param.shape), 10 + step)
            optimizer.step()
    names = {id(param): name for name, param in {**params, "bias": bias}.items()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    assert order == ["large", "small", "bias"]
    for source in ("deepspeed", "keller_jordan"):
        found = from_checkpoint(optimizer.state_dict(), order, source=source, momentum_form="sum")
        for name, param in params.items():
            expected = optimizer.state[param]["momentum_buffer"] / (1 - 0.95)
            torch.testing.assert_close(found[name]["momentum_buffer"], expected)
        assert found["bias"]["step"] == 2.0
        assert torch.equal(found["bias"]["exp_avg_sq"], optimizer.state[bias]["exp_avg_sq"])
