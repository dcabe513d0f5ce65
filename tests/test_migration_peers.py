"""Other Muons: their settings as the page gives them, by their own classes or published formulas; and their state."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lwopt_backend import migration
from lwopt_backend.groups.registry import optimizer_arguments
from lwopt_backend.migration import convert_named_momentum, from_checkpoint
from lwopt_backend.rules.newton_schulz import TABLES
from tests.migration import distance, eager, ours_for, rules_for
from tests.pages import PAGES
from tests.rule_steps import SHAPES, Table, gradients, orthogonalized, random, rule_of, trained, trained_by


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_bit_by_bit_and_pytorch_optimizer_to_bfloat16s_rounding(shape: tuple[int, int]) -> None:
    torchs, others = (trained(ours_for(peer, shape).rule, shape) for peer in ("torch", "pytorch_optimizer"))
    assert torch.equal(torchs, trained_by(lambda param: torch.optim.Muon([param], lr=0.02), shape))
    theirs = trained_by(lambda param: pytorch_optimizer.Muon([{"params": [param], "use_muon": True}]), shape)
    assert distance(others, theirs, random(shape, 1)) < 1e-2  # bfloat16 has 8 bits


# Published formulas
SIMPLE: Table = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC: Table = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]
QUINTIC += [(2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
POLAR = list(TABLES["polar_express_5"].triples)  # test_muon.py computes it as its paper does


def orthogonal(u: Tensor, table: Table, dtype: torch.dtype, margin: float = 1.0) -> Tensor:
    return orthogonalized(u.to(dtype), table, margin).float()


def keller_jordan(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.95 * buffer + 0.05 * grad)
    rows, columns = value.shape
    update = orthogonal(0.95 * buffer + 0.05 * grad, SIMPLE, dtype)
    value.sub_(0.02 * max(1, rows / columns) ** 0.5 * update)


def dion(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.95 * buffer + grad)
    rows, columns = value.shape
    value.mul_(1 - 0.01 * 0.01).sub_(0.01 * (rows / columns) ** 0.5 * orthogonal(buffer, POLAR, dtype, 1.02))


def megatron(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.9 * buffer + 0.1 * grad)
    value.mul_(1 - 3e-4 * 0.01).sub_(3e-4 * max(value.shape) ** 0.5 * orthogonal(buffer, QUINTIC, dtype))


def moonlight(value: Tensor, buffer: Tensor, grad: Tensor, dtype: torch.dtype) -> None:
    buffer.copy_(0.95 * buffer + grad)
    update = orthogonal(grad + 0.95 * buffer, SIMPLE, dtype)
    value.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * 0.2 * max(value.shape) ** 0.5 * update)


FORMULAS: list[Callable[[Tensor, Tensor, Tensor, torch.dtype], None]] = [keller_jordan, dion, megatron, moonlight]


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (32, 32), (200, 3)], ids=str)
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_published_formulas(formula: Callable[..., None], shape: tuple[int, int]) -> None:
    """In fp32 to its rounding, of weights that are thousands of times what they move by; in bfloat16 no farther from
    that than twice the formula's own rounding."""
    start, peer = random(shape, 1), formula.__name__
    ours, rounded = ours_for(peer, shape, ns_dtype="float32"), ours_for(peer, shape)
    exact, theirs = ((start.clone(), torch.zeros(shape)) for _ in range(2))
    for grad in gradients(shape):
        ours.step(grad)
        rounded.step(grad)
        formula(*exact, grad, torch.float32)
        formula(*theirs, grad, torch.bfloat16)
    assert distance(ours.value, exact[0], start) < 1e-3
    torch.testing.assert_close(ours.state["momentum_buffer"], exact[1])
    assert distance(rounded.value, exact[0], start) < 2 * distance(theirs[0], exact[0], start) < 0.3
    defaults = trained(rule_of("muon"), shape)
    assert shape != (48, 63) or distance(defaults, exact[0], start) > 0.1, "our defaults are other numbers"


# DeepSpeed's own Muon
@pytest.fixture
def deepspeed_muon() -> Iterator[Any]:
    from deepspeed.runtime.zero.muon import muon_optimizer

    with eager():
        yield muon_optimizer


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 1 not in shape], ids=str)
@pytest.mark.parametrize("method", ["gram", "standard"])
def test_deepspeeds_update(deepspeed_muon: Any, shape: tuple[int, int], method: str) -> None:
    """In fp32 to its rounding; where DeepSpeed iterates in 16 bits we are no farther from that than twice as it is."""
    changed = {} if method == "gram" else {"gram_aspect": None, "gram_restarts": None, "ns_dtype": "bfloat16"}
    ours, exact = ours_for("deepspeed", shape, **changed), ours_for("deepspeed", shape)
    buffer, zero = torch.zeros(shape), torch.zeros(shape)
    for grad in gradients(shape):
        expected = exact.update(grad) * ours.rule.scale(shape)
        mine = ours.update(grad).float() * ours.rule.scale(shape)
        theirs = deepspeed_muon.muon_update(grad.clone(), buffer, ns_method=method)
        assert distance(mine, expected, zero) < max(1e-4, 2 * distance(theirs, expected, zero)) < 0.5
        torch.testing.assert_close(ours.state["momentum_buffer"], buffer)


@pytest.mark.parametrize(("peer", "limit"), [("deepspeed", 1e-4), ("pytorch_optimizer", 1e-2)])
def test_whole_optimizers_and_their_state(deepspeed_muon: Any, peer: str, limit: float) -> None:
    """Both halves, by the defaults of their param groups; DeepSpeed's without ZeRO, where it clips nothing."""
    start, bias = random((24, 40), 1), random((24,), 2)
    weight, other, mine = (nn.Parameter(tensor.clone()) for tensor in (start, bias, bias))
    make = deepspeed_muon.MuonWithAuxAdam if peer == "deepspeed" else pytorch_optimizer.Muon
    theirs = make([{"params": [weight], "use_muon": True}, {"params": [other], "use_muon": False}])
    ours = ours_for(peer, (24, 40))
    adamw = torch.optim.AdamW([mine], **optimizer_arguments(rules_for(peer).elementwise.options.model_dump()))
    for grad, of_bias in zip(gradients((24, 40)), gradients((24,))):
        ours.step(grad)
        weight.grad, other.grad, mine.grad = grad.clone(), of_bias.clone(), of_bias.clone()
        theirs.step()
        adamw.step()
    assert distance(ours.value, weight.detach(), start) < limit
    assert distance(mine.detach(), other.detach(), bias) < 1e-4
    found = from_checkpoint(theirs.state_dict(), ["weight", "bias"], source=peer)
    torch.testing.assert_close(found, {"weight": ours.state, "bias": adamw.state[mine]}, rtol=1e-5, atol=1e-7)


# Momentum in its two forms; that a run goes on in the other one is tested on the engines
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.95, 0.999])
def test_there_and_back_again(momentum: float) -> None:
    """Two roundings of fp32, each half a unit in the last place, and one more of the factor."""
    buffer = random((64, 48), 1)
    kept = buffer.clone()
    total = migration.convert_momentum(buffer, momentum, source="ema", target="sum")
    torch.testing.assert_close(total, buffer / (1 - momentum), rtol=2e-7, atol=0)
    back = migration.convert_momentum(total, momentum, source="sum", target="ema")
    torch.testing.assert_close(back, buffer, rtol=4e-7, atol=0)
    same = migration.convert_momentum(buffer, momentum, source="sum", target="sum")
    assert torch.equal(same, buffer) and same.data_ptr() != buffer.data_ptr()
    assert torch.equal(buffer, kept)


def test_named_states_are_converted_by_parameter() -> None:
    state = {"a": {"momentum_buffer": torch.ones(2)}, "b": {"momentum_buffer": torch.ones(2)}, "c": {"exp_avg": 1}}
    converted = convert_named_momentum(state, {"a": 0.5, "b": 0.75}, source="ema", target="sum")
    assert [float(converted[name]["momentum_buffer"][0]) for name in "ab"] == [2.0, 4.0]
    assert converted["c"] == {"exp_avg": 1} and float(state["a"]["momentum_buffer"][0]) == 1.0
    same = convert_named_momentum(state, 0.5, source="ema", target="sum")
    assert float(same["b"]["momentum_buffer"][0]) == 2.0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"source": "emma"}, "source: unknown form of momentum 'emma'; did you mean 'ema'?"),
        ({"target": "total"}, "target: unknown form of momentum 'total'; known: 'ema', 'sum'"),
        ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), found 1.0"),
        ({"momentum": -0.1}, r"momentum: expected a number in \[0, 1\), found -0.1"),
        ({"momentum": {"b": 0.9}}, r"momentum: expected a number for 'a', found numbers for \['b'\]"),
    ],
)
def test_wrong_conversions(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state = {"a": {"momentum_buffer": torch.ones(2)}}
        convert_named_momentum(state, **{"momentum": 0.9, "source": "ema", "target": "sum", **how})


# Their state. That torch's is read, and shares no memory with torch's, is seen where engines go on with it
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


def of_two(momentum: dict[str, Any], moments: dict[str, Any], *groups: dict[str, Any]) -> dict[str, Any]:
    """A state dict of a matrix and a vector, in one param group or two."""
    params = [[0], [1]] if len(groups) == 2 else [[0, 1]]
    in_groups = [{"params": of, **group} for of, group in zip(params, groups, strict=True)]
    return {"state": {0: momentum, 1: moments}, "param_groups": in_groups}


TWENTY, TWO = torch.full((3, 2), 20.0), torch.full((4,), 2.0)
HALF = torch.full((3, 2), 0.5, dtype=torch.bfloat16)
# dion has momentum of both kinds of parameters under one key, and the momentum's number is ``mu``.
DIONS = {"mu": 0.95, "algorithm": "muon", "step": 7}, {"mu": 0.95, "algorithm": "adamw", "step": 7}
OF_DION = {"momentum": TWENTY}, {"momentum": torch.ones(4), "variance": TWO}
ON_DEVICE = {**OF_DION[1], "step_dev": torch.tensor(7.0)}
OLDER = {"momentum_buffer": TWENTY}, {"use_muon": False, "step": 7, "moment1": torch.ones(4), "moment2": TWO}
ADAMS = {"exp_avg": torch.ones(4), "exp_avg_sq": TWO, "step": 7}
OF_HALF = {"momentum_buffer": HALF}, ADAMS
SUM = {"momentum_form": "sum"}
READ: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "dion, a counter on the device": (of_two(OF_DION[0], ON_DEVICE, *DIONS), {"source": "dion"}, 1.0),
    "dion, the counter of the group": (of_two(*OF_DION, *DIONS), {"source": "dion"}, 1.0),
    "dion, sums": (of_two(*OF_DION, *DIONS), {"source": "dion", **SUM}, 20.0),
    "moonlight": (of_two(*OLDER, {"momentum": 0.95}), {"source": "moonlight"}, 1.0),
    "Keller Jordan, 2024": (of_two(*OLDER, {"momentum": 0.95}), {"source": "keller_jordan_2024"}, 1.0),
    "Keller Jordan": (of_two(*OF_HALF, {"momentum": 0.75}), {"source": "keller_jordan", **SUM}, 2.0),
    "DeepSpeed": (of_two(*OF_HALF, {"momentum": 0.75}), {"source": "deepspeed", **SUM}, 2.0),
    "Megatron": (of_two(*OF_HALF, {"momentum": 0.75}), {"source": "megatron", **SUM}, 2.0),
    "Megatron's older name": (of_two(*OF_HALF, {"momentum_beta": 0.75}), {"source": "megatron", **SUM}, 2.0),
    "a given momentum goes first": (of_two(*OF_HALF, {"momentum": 0.9}), {"momentum": 0.5, **SUM}, 1.0),
    "ours": (of_two({"momentum_buffer": TWENTY}, ADAMS, {"momentum": 0.95, **SUM}), {"source": "lwopt_backend"}, 1.0),
}


@pytest.mark.parametrize("case", READ)
def test_state_of_any_form_and_dtype_becomes_ours(case: str) -> None:
    state_dict, how, momentum = READ[case]
    found = from_checkpoint(state_dict, ["weight", "bias"], **how)
    torch.testing.assert_close(found["weight"], {"momentum_buffer": torch.full((3, 2), momentum)})
    expected = {"exp_avg": torch.ones(4), "exp_avg_sq": TWO, "step": torch.tensor(7.0)}
    torch.testing.assert_close(found["bias"], expected, rtol=0, atol=0)


def state_of(state: dict[str, Any] | None = None, **group: Any) -> dict[str, Any]:
    group = {"params": [0], "momentum": 0.9, **group}
    return {"state": {0: {"momentum_buffer": TWENTY} if state is None else state}, "param_groups": [group]}


MOMENTS = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
NO_MOMENTUM = {"state": {0: {"momentum_buffer": TWENTY}}, "param_groups": [{"params": [0]}]}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (state_of(), {"source": "torch.optim.Moun"}, "unknown source 'torch.optim.Moun'; did you mean 'torch.optim.Muon'?"),
    (state_of(), {"source": "sgd"}, "unknown source 'sgd'; known: 'torch.optim.Muon'"),
    (state_of(), {"momentum_form": "som"}, "momentum_form: unknown form of momentum 'som'; did you mean 'sum'?"),
    ({"optimizer": {}}, {}, r"expected keys 'state' and 'param_groups', found \['optimizer'\]"),
    (state_of(), {"names": None}, "has parameters by number; pass their names"),
    (state_of(), {"names": ["a", "b"]}, r"names: expected 1, .* \(1\); found 2"),
    (state_of(params=[0, 0]), {"names": ["a", "a"]}, "expected each name once, found 'a' twice"),
    ({**state_of(), "state": {}}, {}, "parameter 'a' has no state; it has had no gradient yet"),
    (state_of(), {"source": "dion"}, r"has no 'momentum', only \['momentum_buffer'\]; the source may be one of"),
    (state_of(), {"source": "lwopt_backend"}, "in a param group without 'momentum_form'"),
    (state_of(algorithm="lion"), {}, "is trained by Lion, whose state is not converted"),
    (state_of({"momentum_buffer": 3.0}), {}, "'momentum_buffer': expected a tensor, found 3.0"),
    (NO_MOMENTUM, SUM, "in a param group without 'momentum'; pass momentum, to convert 'ema' to 'sum'"),
    (state_of({**MOMENTS, "exp_avg": torch.ones(3), "step": 1}), {}, "has moments of different shapes"),
    (state_of(MOMENTS), {}, "has no counter, neither 'step' nor 'step' in"),
    (state_of({"exp_avg_sq": torch.ones(2), "step": 1}), {}, r"has no 'exp_avg', only \['exp_avg_sq', 'step'\]"),
]


@pytest.mark.parametrize(("state_dict", "how", "message"), WRONG)
def test_what_cannot_be_read(state_dict: dict[str, Any], how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_checkpoint(state_dict, **{"names": ["a"], **how})


def test_every_source_is_on_the_page() -> None:
    for source in migration.SOURCES:
        assert f"`{source}`" in PAGES["checkpoints"]
