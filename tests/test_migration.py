"""docs/migration.md: the settings it gives equal other Muons, and their state can be taken along to every engine."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend import migration as public
from lwopt_backend.chosen import Rules, settings_of
from lwopt_backend.config import ZeROConfig
from lwopt_backend.integrations.deepspeed_state import save_whole
from lwopt_backend.migration import (
    SOURCES,
    change_momentum_form,
    convert_momentum,
    convert_named_momentum,
    from_checkpoint,
    load_named_state,
)
from lwopt_backend.muon_config import muon_settings
from lwopt_backend.owned.state import MASTER, state_pieces
from lwopt_backend.rule_options import AdamWOptions, MuonOptions
from lwopt_backend.rules.coefficients import table_of
from tests import test_owned_experts as experts
from tests import test_zero_moe as moe
from tests import test_zero_pipeline as pipelines
from tests.fsdp2 import MATRIX_NAMES, Twin, backward, distribute_like, layer_wise, named, shard
from tests.launcher import ROOT, run_page
from tests.models import MATRICES, UnevenLM
from tests.owned import difference, exact_sums, optimizer_for, shares, train
from tests.ranks import RankPool
from tests.rule_steps import SHAPES, Trained, gradients, random, rule_of
from tests.zero import (
    ROWS,
    Reference,
    config,
    engine_for,
    full_weights,
    largest_difference,
    newton_schulz_in_float32,
)
from tests.zero import train as train_engine

PAGE = (ROOT / "docs" / "migration.md").read_text()
both_sizes = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids=["2ranks", "4ranks"])
PEERS = ["torch", "keller_jordan", "dion", "deepspeed", "megatron", "moonlight", "pytorch_optimizer"]


# The settings that the page gives


def entry(peer: str) -> dict[str, Any]:
    """The JSON block of that name on the page."""
    (block,) = re.findall(rf"^```json {peer}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return json.loads(block)


def rules_for(peer: str) -> Rules:
    given = entry(peer)
    parsers = {"LayerWise": lambda params: settings_of(ZeROConfig, params, peer), "LayerWiseMuon": muon_settings}
    if given["type"] == "LayerWiseMuon":
        return muon_settings(given["params"], peer)[0]
    return parsers[given["type"]](given["params"])[0]


def ours_for(peer: str, shape: tuple[int, int], **changed: Any) -> Trained:
    """A matrix under the page's settings."""
    return Trained(rule_of("muon", **{**rules_for(peer).matrix.options.model_dump(), **changed}), random(shape, 1))


def distance(ours: Tensor, theirs: Tensor, start: Tensor) -> float:
    """The largest difference of an element, in units of the largest move."""
    return float((ours - theirs).abs().max() / (theirs - start).abs().max())


# torch, DeepSpeed and pytorch_optimizer: their own classes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_bit_by_bit(shape: tuple[int, int]) -> None:
    ours, param = ours_for("torch", shape), nn.Parameter(random(shape, 1))
    theirs = torch.optim.Muon([param], lr=0.02)
    for grad in gradients(shape):
        param.grad = grad.clone()
        theirs.step()
        ours.step(grad)
    assert torch.equal(ours.value, param.detach())
    assert torch.equal(ours.state["momentum_buffer"], theirs.state[param]["momentum_buffer"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch_optimizer(shape: tuple[int, int]) -> None:
    ours, param = ours_for("pytorch_optimizer", shape), nn.Parameter(random(shape, 1))
    theirs = pytorch_optimizer.Muon([{"params": [param], "use_muon": True}])
    for grad in gradients(shape):
        param.grad = grad.clone()
        theirs.step()
        ours.step(grad)
    assert distance(ours.value, param.detach(), random(shape, 1)) < 1e-2  # bfloat16 has 8 bits


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """DeepSpeed's Newton-Schulz as written rather than compiled."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


@pytest.fixture
def deepspeed_muon() -> Iterator[Any]:
    """DeepSpeed's module of it."""
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


def test_deepspeeds_whole_optimizer(deepspeed_muon: Any) -> None:
    """Without ZeRO, where it clips nothing; both halves, by the defaults of its param groups."""
    start, bias = random((24, 40), 1), random((24,), 2)
    weight, other = nn.Parameter(start.clone()), nn.Parameter(bias.clone())
    halves = [{"params": [weight], "use_muon": True}, {"params": [other], "use_muon": False}]
    theirs = deepspeed_muon.MuonWithAuxAdam(halves)
    rules, ours = rules_for("deepspeed"), ours_for("deepspeed", (24, 40))
    mine = nn.Parameter(bias.clone())
    adamw = torch.optim.AdamW([mine], **rules.elementwise.options.model_dump())
    for grad, of_bias in zip(gradients((24, 40)), gradients((24,))):
        ours.step(grad)
        weight.grad, other.grad, mine.grad = grad.clone(), of_bias.clone(), of_bias.clone()
        theirs.step()
        adamw.step()
    assert distance(ours.value, weight.detach(), start) < 1e-4
    assert distance(mine.detach(), other.detach(), bias) < 1e-4


# The others: their formulas, written out

SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
POLAR = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonal(u: Tensor, table: list[tuple[float, float, float]], dtype: torch.dtype, margin: float = 1.0) -> Tensor:
    x = u.to(dtype)
    x = x.mT if u.size(0) > u.size(1) else x
    x = x / (x.norm() * margin + 1e-8)
    for a, b, c in table:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if u.size(0) > u.size(1) else x).float()


Step = Callable[[Tensor, Tensor, Tensor, torch.dtype], None]


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


FORMULAS: dict[str, Step] = {
    "keller_jordan": keller_jordan,
    "dion": dion,
    "megatron": megatron,
    "moonlight": moonlight,
}


def by_formula(peer: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The weight and the momentum after some steps."""
    value, buffer = random(shape, 1), torch.zeros(shape)
    for grad in gradients(shape):
        FORMULAS[peer](value, buffer, grad, dtype)
    return value, buffer


@pytest.mark.parametrize("shape", [(48, 63), (63, 48), (32, 32), (200, 3)], ids=str)
@pytest.mark.parametrize("peer", FORMULAS)
def test_published_formulas(peer: str, shape: tuple[int, int]) -> None:
    """In fp32 to its rounding, of weights that are thousands of times what they move by; in bfloat16 no farther from
    that than twice the formula's own rounding."""
    start = random(shape, 1)
    ours, rounded = ours_for(peer, shape, ns_dtype="float32"), ours_for(peer, shape)
    for grad in gradients(shape):
        ours.step(grad)
        rounded.step(grad)
    value, buffer = by_formula(peer, shape, torch.float32)
    assert distance(ours.value, value, start) < 1e-3
    torch.testing.assert_close(ours.state["momentum_buffer"], buffer)
    theirs = distance(by_formula(peer, shape, torch.bfloat16)[0], value, start)
    assert distance(rounded.value, value, start) < 2 * theirs < 0.3


@pytest.mark.parametrize("peer", FORMULAS)
def test_our_defaults_are_other_numbers(peer: str) -> None:
    ours = Trained(rule_of("muon"), random((48, 63), 1))
    for grad in gradients((48, 63)):
        ours.step(grad)
    assert distance(ours.value, by_formula(peer, (48, 63), torch.bfloat16)[0], random((48, 63), 1)) > 0.1


def test_jordans_factor_of_convolutions_is_that_of_the_kernel() -> None:
    """And so DeepSpeed's: one for square kernels, which is ``none``."""
    kernel, grad = random((16, 2, 3, 3), 1), random((16, 2, 3, 3), 2)
    update = orthogonal((0.05 + 0.95 * 0.05) * grad.view(16, 18), SIMPLE, torch.float32)
    theirs = kernel.view(16, 18) - 0.02 * max(1, grad.size(-2) / grad.size(-1)) ** 0.5 * update
    options = {**rules_for("keller_jordan").matrix.options.model_dump(), "ns_dtype": "float32", "adjust_lr_fn": "none"}
    ours = Trained(rule_of("muon", **options), kernel.view(16, 18))
    assert distance(ours.step(grad.view(16, 18)), theirs, kernel.view(16, 18)) < 1e-4


def test_megatrons_spectral_is_not_dions() -> None:
    megatrons, dions = (ours_for(peer, (4096, 1024)).rule.scale((4096, 1024)) for peer in ("megatron", "dion"))
    assert (megatrons, dions) == (64.0, 2.0)


# Momentum between its forms


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.95, 0.999])
def test_there_and_back_again(momentum: float) -> None:
    """Two roundings of fp32, each half a unit in the last place, and one more of the factor."""
    buffer = random((64, 48), 1)
    kept = buffer.clone()
    total = convert_momentum(buffer, momentum, source="ema", target="sum")
    torch.testing.assert_close(total, buffer / (1 - momentum), rtol=2e-7, atol=0)
    back = convert_momentum(total, momentum, source="sum", target="ema")
    torch.testing.assert_close(back, buffer, rtol=4e-7, atol=0)
    assert torch.equal(buffer, kept)


def test_the_same_form_is_a_copy() -> None:
    buffer = random((4, 3), 1)
    copied = convert_momentum(buffer, 0.95, source="sum", target="sum")
    assert torch.equal(copied, buffer) and copied.data_ptr() != buffer.data_ptr()


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


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"source": "emma"}, "source: unknown form of momentum 'emma'; did you mean 'ema'?"),
        ({"target": "total"}, "target: unknown form of momentum 'total'; known: 'ema', 'sum'"),
        ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\), found 1.0"),
        ({"momentum": -0.1}, r"momentum: expected a number in \[0, 1\), found -0.1"),
    ],
)
def test_wrong_conversions(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_momentum(torch.ones(2), **{"momentum": 0.9, "source": "ema", "target": "sum", **how})


def test_a_parameter_without_its_momentum() -> None:
    state = {"a": {"momentum_buffer": torch.ones(2)}}
    with pytest.raises(ValueError, match=r"momentum: expected a number for 'a', found those of \['b'\]"):
        convert_named_momentum(state, {"b": 0.9}, source="ema", target="sum")


# Reading others' state


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


def test_deepspeeds_and_jordans_optimizer_is_read_in_the_order_it_has(deepspeed_muon: Any) -> None:
    """It sorts the matrices of a group by size."""
    params = {"small": nn.Parameter(random((2, 3), 1)), "large": nn.Parameter(random((4, 3), 2))}
    bias = nn.Parameter(random((4,), 3))
    halves = [{"params": [*params.values()], "use_muon": True}, {"params": [bias], "use_muon": False}]
    optimizer = deepspeed_muon.MuonWithAuxAdam(halves)
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


@pytest.mark.parametrize("on_device", [True, False], ids=["step_dev", "step of the group"])
def test_dions_state(on_device: bool) -> None:
    """Momentum of both kinds of parameters is under one key, and the momentum's number is ``mu``."""
    moments = {"momentum": torch.ones(4), "variance": torch.full((4,), 2.0)}
    state_dict = {
        "state": {
            0: {"momentum": torch.full((3, 2), 20.0)},
            1: {**moments, "step_dev": torch.tensor(7.0)} if on_device else moments,
        },
        "param_groups": [
            {"params": [0], "mu": 0.95, "algorithm": "muon", "step": 7},
            {"params": [1], "mu": 0.95, "algorithm": "adamw", "step": 7},
        ],
    }
    found = from_checkpoint(state_dict, ["weight", "bias"], source="dion")
    torch.testing.assert_close(found["weight"]["momentum_buffer"], torch.ones(3, 2))
    assert found["bias"]["step"] == 7.0
    assert torch.equal(found["bias"]["exp_avg"], torch.ones(4))
    assert torch.equal(found["bias"]["exp_avg_sq"], torch.full((4,), 2.0))
    as_it_is = from_checkpoint(state_dict, ["weight", "bias"], source="dion", momentum_form="sum")
    assert torch.equal(as_it_is["weight"]["momentum_buffer"], torch.full((3, 2), 20.0))


@pytest.mark.parametrize("source", ["moonlight", "keller_jordan_2024"])
def test_sums_with_the_older_adam(source: str) -> None:
    state_dict = {
        "state": {
            0: {"use_muon": True, "momentum_buffer": torch.full((3, 2), 10.0)},
            1: {"use_muon": False, "step": 5, "moment1": torch.ones(4), "moment2": torch.ones(4)},
        },
        "param_groups": [{"params": [0, 1], "momentum": 0.9}],
    }
    found = from_checkpoint(state_dict, ["weight", "bias"], source=source)
    torch.testing.assert_close(found["weight"]["momentum_buffer"], torch.ones(3, 2))
    assert set(found["bias"]) == {"exp_avg", "exp_avg_sq", "step"} and found["bias"]["step"] == 5.0


@pytest.mark.parametrize("key", ["momentum", "momentum_beta"])
def test_megatrons_momentum_has_two_names(key: str) -> None:
    state_dict = state_of(1.0)
    state_dict["param_groups"] = [{"params": [0], key: 0.75}]
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


# Going on with ours, in plain PyTorch

BEFORE, AFTER = range(3), range(3, 6)


def named_state(muon: Any, adamw: Any, names: list[str], **how: Any) -> dict[str, dict[str, Tensor]]:
    """Both of torch's optimizers, as ``Reference`` and ``Twin`` make them: matrices in the order of MATRICES."""
    matrices = [name for name in names if name in MATRIX_NAMES]
    others = [name for name in names if name not in MATRIX_NAMES]
    found = from_checkpoint(muon.state_dict(), matrices, **how)
    return {**found, **from_checkpoint(adamw.state_dict(), others, source="torch.optim.AdamW")}


def train_peer(single: Reference, steps: range, parts: int) -> None:
    for step in steps:
        for tokens, targets in shares(step, parts):
            single.model(tokens, targets).backward()
        for param in single.model.parameters():
            param.grad.div_(parts)
        for optimizer in (single.muon, single.adamw):
            optimizer.step()
            optimizer.zero_grad()


def forget(state: dict[str, dict[str, Tensor]]) -> None:
    """What was given is the caller's again; an optimizer that shares its memory would go on with zeros."""
    for of_name in state.values():
        for tensor in of_name.values():
            tensor.zero_()


def names_of(model: nn.Module) -> list[str]:
    return [*MATRICES, *(name for name, _ in model.named_parameters() if name not in MATRICES)]


def differ_owned(layout: str) -> float:
    single = Reference(exact_sums(UnevenLM()))
    train_peer(single, BEFORE, dist.get_world_size())
    model = exact_sums(UnevenLM(seed=1))
    optimizer = optimizer_for(model, layout=layout)
    model.load_state_dict(single.model.state_dict())
    state = named_state(single.muon, single.adamw, names_of(model))
    assert load_named_state(optimizer, state) == []
    forget(state)
    train(model, optimizer, AFTER)
    train_peer(single, AFTER, dist.get_world_size())
    return difference(model, single.model)


@both_sizes
@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_owned_storage_goes_on_bit_by_bit(ranks: RankPool, layout: str) -> None:
    assert set(ranks.run(differ_owned, layout)) == {0.0}


def differ_in_sum_form(convert: bool) -> float:
    """Newton-Schulz in fp32, where both forms differ by its rounding only."""
    single = Reference(exact_sums(UnevenLM()))
    with newton_schulz_in_float32():
        train_peer(single, BEFORE, dist.get_world_size())
        model = exact_sums(UnevenLM(seed=1))
        optimizer = optimizer_for(model, momentum_form="sum", ns_dtype="float32")
        model.load_state_dict(single.model.state_dict())
        form = "sum" if convert else "ema"
        load_named_state(optimizer, named_state(single.muon, single.adamw, names_of(model), momentum_form=form))
        train(model, optimizer, AFTER)
        train_peer(single, AFTER, dist.get_world_size())
    return difference(model, single.model)


def test_owned_storage_goes_on_in_the_other_form(ranks: RankPool) -> None:
    assert max(ranks.run(differ_in_sum_form, True)) < 2e-5
    assert min(ranks.run(differ_in_sum_form, False)) > 1e-3


def whole_state(optimizer: LayerWiseOptimizer) -> dict[str, dict[str, Tensor]]:
    """All ranks' pieces by name, put together here."""
    mine = [
        (optimizer.core.members[piece.member].name, piece.start, piece.tensors)
        for piece in state_pieces(optimizer.core)
    ]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, start, tensors in (piece for pieces in of_ranks for piece in pieces):
        for key, tensor in tensors.items():
            parts.setdefault((name, key), {})[start] = tensor
    whole: dict[str, dict[str, Tensor]] = {}
    for (name, key), by_start in parts.items():
        tensors = [by_start[start] for start in sorted(by_start)]
        whole.setdefault(name, {})[key] = torch.cat(tensors) if tensors[0].ndim else tensors[0]
    return whole


def load_in_part() -> tuple[list[str], bool]:
    single = Reference()
    single.train(2)
    model = UnevenLM()
    optimizer = optimizer_for(model)
    train(model, optimizer, 1)
    before = whole_state(optimizer)
    named = named_state(single.muon, single.adamw, names_of(model))
    rest = named.pop("layers.2.weight"), named.pop("lm_head.weight")
    named["nowhere"] = rest[0]
    left = load_named_state(optimizer, named, strict=False)
    after = whole_state(optimizer)
    kept = all(torch.equal(before[name][key], after[name][key]) for name in left for key in before[name])
    taken = all(
        torch.equal(after[name][key], value.reshape(-1) if value.ndim else value)
        for name, state in named.items()
        if name != "nowhere"
        for key, value in state.items()
    )
    return left, kept and taken


def test_a_part_is_loaded_if_asked_for(ranks: RankPool) -> None:
    for left, right in ranks.run(load_in_part):
        assert sorted(left) == ["layers.2.weight", "lm_head.weight"] and right


def load_wrong(what: str, rank: int | None = None) -> None:
    """``rank``: only this one is given something wrong."""
    single = Reference()
    single.train(1)
    optimizer = optimizer_for(UnevenLM(), **({"matrix": "normuon"} if what == "rule" else {}))
    state = named_state(single.muon, single.adamw, names_of(single.model))
    before = whole_state(optimizer)
    if rank in (None, dist.get_rank()):
        spoil(state, what)
    try:
        load_named_state(optimizer, state)
    finally:
        after = whole_state(optimizer)
        assert all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n]), "something was changed"


def spoil(state: dict[str, dict[str, Tensor]], what: str) -> None:
    if what == "unknown":
        state["layers.0.wait"] = state["layers.0.weight"]
    elif what == "missing":
        del state["layers.5.weight"]
    elif what == "keys":
        state["lm_head.weight"] = {"momentum_buffer": torch.zeros(37, 24)}
    elif what == "shape":
        state["layers.0.weight"] = {"momentum_buffer": torch.zeros(24, 63)}


WRONG = {
    "unknown": "no parameter 'layers.0.wait' is trained here; did you mean 'layers.0.weight'?",
    "missing": "there is no state of parameter 'layers.5.weight'; with strict=False it keeps what it has",
    "keys": "parameter 'lm_head.weight', which 'adamw' trains: expected ['exp_avg', 'exp_avg_sq', 'step'], found "
    "['momentum_buffer']; if another rule trained it, let the same rule train it here, with include or exclude",
    "shape": "parameter 'layers.0.weight', which 'muon' trains, 'momentum_buffer': expected shape (63, 24), found "
    "(24, 63)",
    "rule": "which 'normuon' trains: this rule keeps state at the matrix's owner",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_an_error_on_all_ranks(ranks: RankPool, what: str) -> None:
    for error in ranks.errors(load_wrong, what):
        assert error.startswith("ValueError: load_named_state: ") and WRONG[what] in error


@pytest.mark.parametrize("what", ["missing", "shape"])
def test_what_one_rank_is_given_wrong_is_an_error_on_all(ranks: RankPool, what: str) -> None:
    first, second = ranks.errors(load_wrong, what, 1)
    assert WRONG[what] in second and "rank 1 failed with" in first and WRONG[what] in first


def give_different_states() -> None:
    single = Reference()
    single.train(1)
    state = named_state(single.muon, single.adamw, names_of(single.model))
    if dist.get_rank() == 1:
        del state["gate.weight"]
    load_named_state(optimizer_for(UnevenLM()), state, strict=False)


def test_ranks_have_to_be_given_the_same(ranks: RankPool) -> None:
    for error in ranks.errors(give_different_states):
        assert error.startswith("RanksDisagree: load_named_state: ") and "gate.weight" in error


@pytest.mark.parametrize("function", [lambda o: load_named_state(o, {}), lambda o: change_momentum_form(o, "sum")])
def test_other_optimizers_are_refused(function: Callable[[Any], Any]) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(TypeError, match="expected a LayerWiseOptimizer, found SGD; of DeepSpeed give the engine"):
        function(other)


def numbers_for(shapes: dict[str, tuple[int, ...]], matrices: Callable[[str], bool]) -> dict[str, dict[str, Tensor]]:
    """A state of Muon and AdamW with other numbers for every parameter."""
    state = {}
    for seed, (name, shape) in enumerate(sorted(shapes.items())):
        keys = ["momentum_buffer"] if matrices(name) else ["exp_avg", "exp_avg_sq"]
        state[name] = {key: random(shape, 10 * seed + place) for place, key in enumerate(keys)}
        if not matrices(name):
            state[name]["step"] = torch.tensor(7.0)
    return state


def pieces_differ(optimizer: Any, state: dict[str, dict[str, Tensor]]) -> int:
    """How many of this rank's tensors are not what they should be."""
    wrong = 0
    for piece in state_pieces(optimizer.core):
        for key, tensor in piece.tensors.items():
            if key == MASTER:
                continue
            value = state[optimizer.core.members[piece.member].name][key]
            wrong += not torch.equal(tensor, value.reshape(-1)[piece.start : piece.stop] if value.ndim else value)
    return wrong


def load_experts() -> int:
    """Every rank is given all experts and has two."""
    model, shared = experts.sharded()
    optimizer = experts.optimizer_for(model, expert_params=["experts.*"], expert_process_group=shared)
    shapes = {name: tuple(param.shape) for name, param in experts.MoE().named_parameters()}
    state = numbers_for(shapes, lambda name: len(shapes[name]) == 2)
    assert load_named_state(optimizer, state) == []
    return pieces_differ(optimizer, state)


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
def test_ranks_take_the_experts_that_they_have(ranks: RankPool) -> None:
    assert ranks.run(load_experts) == [0, 0, 0, 0]


def load_into_bf16() -> tuple[int, bool]:
    """The masters of 16-bit parameters are weights; they stay what they are."""
    model = UnevenLM().to(torch.bfloat16)
    optimizer = optimizer_for(model)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    state = numbers_for(shapes, MATRICES.__contains__)
    before = whole_state(optimizer)
    load_named_state(optimizer, state)
    after = whole_state(optimizer)
    return pieces_differ(optimizer, state), all(
        torch.equal(before[name][MASTER], after[name][MASTER]) for name in after
    )


def test_masters_of_16_bit_parameters_stay(ranks: RankPool) -> None:
    assert ranks.run(load_into_bf16) == [(0, True), (0, True)]


# Going on with ours, on FSDP2


def twin_on_fsdp2(steps: int) -> tuple[Any, Twin]:
    """A sharded model after ``steps`` of torch's optimizers on whole parameters."""
    sharded = shard("rows", "fp32")
    twin = Twin(sharded.model)
    for step in range(steps):
        backward(sharded, step)
        twin.step_with_gradients_of(sharded.model)
        with torch.no_grad():
            for name, param in named(sharded.model):
                param.to_local().copy_(distribute_like(twin.params[name].detach(), param))
                param.grad = None
    return sharded, twin


def names_in(twin: Twin) -> list[str]:
    return list(twin.params)


def differ_on_fsdp2() -> tuple[float, bool]:
    sharded, twin = twin_on_fsdp2(3)
    optimizer = layer_wise(sharded.model)
    options = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    given = named_state(*twin.optimizers, names_in(twin))
    assert load_named_state(optimizer, given) == []
    forget(given)
    for state in optimizer.state.values():
        for key, tensor in state.items():
            assert isinstance(tensor, DTensor) == (key != "step")
            part = tensor if key == "step" else tensor.to_local()
            assert part.untyped_storage().nbytes() == part.nbytes, "the whole tensor is kept in memory"
    for step in range(3, 6):
        backward(sharded, step)
        twin.step_with_gradients_of(sharded.model)
        optimizer.step()
        optimizer.zero_grad()
    same = options == [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return twin.difference(sharded.model), same


@both_sizes
def test_fsdp2_goes_on_bit_by_bit(ranks: RankPool) -> None:
    assert set(ranks.run(differ_on_fsdp2)) == {(0.0, True)}


def part_on_fsdp2() -> tuple[list[str], list[bool]]:
    sharded, twin = twin_on_fsdp2(2)
    optimizer = layer_wise(sharded.model)
    backward(sharded, 2)
    optimizer.step()
    states = {name: optimizer.state[param] for name, param in named(sharded.model)}
    before = copy.deepcopy({name: {k: whole(v) for k, v in state.items()} for name, state in states.items()})
    state = named_state(*twin.optimizers, names_in(twin))
    del state["gate.weight"]
    left = load_named_state(optimizer, state, strict=False)
    found = {name: {k: whole(v) for k, v in optimizer.state[p].items()} for name, p in named(sharded.model)}
    kept = all(torch.equal(found["gate.weight"][k], v) for k, v in before["gate.weight"].items())
    taken = all(torch.equal(found[name][k], v) for name, of in state.items() for k, v in of.items())
    return left, [kept, taken]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_a_part_is_loaded_on_fsdp2(ranks: RankPool) -> None:
    assert ranks.run(part_on_fsdp2) == [(["gate.weight"], [True, True])] * 2


def load_wrong_on_fsdp2(what: str, rank: int | None = None) -> None:
    sharded, twin = twin_on_fsdp2(1)
    options = {"matrix": "normuon"} if what == "rule" else {}
    optimizer = layer_wise(sharded.model) if not options else normuon_on_fsdp2(sharded.model)
    state = named_state(*twin.optimizers, names_in(twin))
    if rank in (None, dist.get_rank()):
        spoil(state, what)
    load_named_state(optimizer, state)


def normuon_on_fsdp2(model: nn.Module) -> Any:
    from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer as OnFSDP2

    return OnFSDP2(model, "normuon", report=False)


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_on_fsdp2(ranks: RankPool, what: str) -> None:
    for error in ranks.errors(load_wrong_on_fsdp2, what):
        assert error.startswith("ValueError: load_named_state: ") and WRONG[what] in error


def test_what_one_rank_is_given_wrong_on_fsdp2(ranks: RankPool) -> None:
    first, second = ranks.errors(load_wrong_on_fsdp2, "shape", 1)
    assert WRONG["shape"] in second and "rank 1 failed with" in first


def load_into_bf16_on_fsdp2() -> list[bool]:
    """State that is kept in bfloat16 is rounded; the counter is not."""
    sharded = shard("rows", "bf16 parameters")
    optimizer = layer_wise(sharded.model)
    shapes = {name: tuple(param.shape) for name, param in named(sharded.model)}
    state = numbers_for(shapes, MATRIX_NAMES.__contains__)
    load_named_state(optimizer, state)
    found = {name: {k: whole(v) for k, v in optimizer.state[p].items()} for name, p in named(sharded.model)}
    return [
        torch.equal(found[name][key], value.to(torch.float32 if key == "step" else torch.bfloat16))
        for name, of_name in state.items()
        for key, value in of_name.items()
    ]


def test_state_on_fsdp2_keeps_its_dtype(ranks: RankPool) -> None:
    for right in ranks.run(load_into_bf16_on_fsdp2):
        assert len(right) == 4 + 3 * 7 and all(right)


def load_experts_on_fsdp2() -> None:
    sharded = shard("expert parallel", "fp32")
    optimizer = layer_wise(sharded.model)
    shapes = {name: tuple(param.shape) for name, param in named(sharded.model)}
    load_named_state(optimizer, numbers_for(shapes, MATRIX_NAMES.__contains__))


@pytest.mark.parametrize("ranks", [4], indirect=True, ids=["4ranks"])
def test_experts_under_one_name_are_refused_on_fsdp2(ranks: RankPool) -> None:
    for error in ranks.errors(load_experts_on_fsdp2):
        assert "ranks have different parameters (experts) under the same names" in error


def read_sharded_state() -> None:
    """torch.optim.Muon on FSDP2 has DTensors."""
    sharded = shard("rows", "fp32")
    params = dict(named(sharded.model))
    muon = torch.optim.Muon([("layers.0.weight", params["layers.0.weight"])])
    backward(sharded, 0)
    muon.step()
    from_checkpoint(muon.state_dict())


def test_sharded_state_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(read_sharded_state):
        assert "'momentum_buffer' is a DTensor, of which every rank has a part; save it whole" in error


# Going on with ours, under DeepSpeed


def moved_to_engine(engine: Any, single: Reference, **how: Any) -> list[str]:
    from lwopt_backend.integrations import deepspeed_migration

    state = named_state(single.muon, single.adamw, names_of(single.model))
    left = deepspeed_migration.load_named_state(engine, state, **how)
    forget(state)
    return left


def trained_before(steps: int = 3) -> tuple[Reference, UnevenLM]:
    """One process's run, and the model it has come to."""
    single, model = Reference(), UnevenLM()
    single.train(steps)
    model.load_state_dict(single.model.state_dict())
    return single, model


def differ_on_deepspeed(stage: int, **options: Any) -> float:
    """All ranks train on the same rows, so that the mean gradient has the bits of one process's."""
    single, model = trained_before()
    with engine_for(config(stage, rows=ROWS, **options), model) as engine:
        assert moved_to_engine(engine, single) == []
        train_engine(engine, AFTER, same_rows=True)
        single.train(AFTER)
        return largest_difference(full_weights(engine), single.model)


@both_sizes
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_goes_on_bit_by_bit(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(differ_on_deepspeed, stage)) == {0.0}


@pytest.mark.parametrize("stage", [0, 2])
def test_owned_storage_in_deepspeed_goes_on_bit_by_bit(ranks: RankPool, stage: int) -> None:
    assert set(ranks.run(differ_on_deepspeed, stage, storage="owned")) == {0.0}


def part_on_deepspeed(stage: int, storage: str) -> float:
    """The run that goes on is this engine's own, but for the momentum of one matrix."""
    single, model = trained_before()
    with engine_for(config(stage, rows=ROWS, storage=storage), copy.deepcopy(model)) as engine:
        moved_to_engine(engine, single)
        train_engine(engine, range(3, 4), same_rows=True)
        single.train(range(3, 4))
        from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

        single.muon.state[single.model.layers[2].weight]["momentum_buffer"].mul_(-2)  # not what the engine has
        state = named_state(single.muon, single.adamw, names_of(single.model))
        left = load(engine, {"layers.2.weight": state["layers.2.weight"]}, strict=False)
        assert sorted(left) == sorted(set(state) - {"layers.2.weight"})
        train_engine(engine, range(4, 6), same_rows=True)
        single.train(range(4, 6))
        return largest_difference(full_weights(engine), single.model)


@pytest.mark.parametrize(
    ("stage", "storage"), [(0, "zero"), (1, "zero"), (2, "zero"), (3, "zero"), (2, "owned")], ids=str
)
def test_a_part_is_loaded_under_deepspeed_between_steps(ranks: RankPool, stage: int, storage: str) -> None:
    assert ranks.run(part_on_deepspeed, stage, storage) == [0.0, 0.0]


def load_wrong_under_deepspeed(stage: int, what: str) -> None:
    single, model = trained_before(1)
    with engine_for(config(stage, rows=ROWS), model) as engine:
        state = named_state(single.muon, single.adamw, names_of(single.model))
        if what == "counters":
            state["lm_head.weight"]["step"] = torch.tensor(9.0)
        spoil(state, what)
        from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

        load(engine, state)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("what", ["unknown", "missing", "keys", "shape", "counters"])
def test_what_does_not_fit_under_deepspeed(ranks: RankPool, stage: int, what: str) -> None:
    counters = "as one tensor with one 'step'; expected the same of all"
    for error in ranks.errors(load_wrong_under_deepspeed, stage, what):
        assert error.startswith("ValueError: load_named_state: ") and {**WRONG, "counters": counters}[what] in error


def state_seen_by_deepspeed(stage: int, precision: str) -> int:
    """How many tensors are not what was given, asked with DeepSpeed's own function."""
    from deepspeed.utils import safe_get_full_optimizer_state

    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    more = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
    more["bf16 + fp32"] = {**more["bf16"], "data_types": {"grad_accum_dtype": "fp32"}}
    with engine_for(config(stage, rows=ROWS) | more[precision]) as engine:
        named_params = dict(engine.module.named_parameters())
        shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named_params.items()}
        state = numbers_for(shapes, MATRICES.__contains__)
        load(engine, state)
        return sum(
            not torch.equal(safe_get_full_optimizer_state(named_params[name], key), value)
            for name, of_name in state.items()
            for key, value in of_name.items()
            if key != "step"
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 + fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_sees_what_was_loaded(ranks: RankPool, stage: int, precision: str) -> None:
    assert ranks.run(state_seen_by_deepspeed, stage, precision) == [0, 0]


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Four ranks of this file's own: DeepSpeed keeps groups of experts and pipelines in globals of the process."""
    pool = RankPool(4)
    yield pool
    pool.remove()


def load_experts_under_deepspeed() -> None:
    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    with engine_for(moe.settings_for(2), moe.Mixture()) as engine:
        load(engine, {}, strict=False)


def test_experts_under_one_name_are_refused_under_deepspeed(own_ranks: RankPool) -> None:
    for error in own_ranks.errors(load_experts_under_deepspeed):
        assert "ranks have different experts under the same names" in error


def load_into_a_pipeline(precision: str) -> tuple[int, int]:
    """Every stage is given the whole model's state; how many states it has, and how many of them are wrong."""
    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    with engine_for(pipelines.settings_for(precision), pipelines.pipeline(pipelines.untied())) as engine:
        mine = {name: tuple(param.shape) for name, param in engine.module.named_parameters()}
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, mine)
        shapes = {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}
        state = numbers_for(shapes, lambda name: name.endswith(pipelines.MATRICES))
        assert load(engine, state) == []
        optimizer = engine.basic_optimizer
        whole_states = optimizer._binding.ranks[0].gather_objects(save_whole_of(optimizer))[0]
        wrong = sum(
            not torch.equal(whole_states[name][key].view(-1), value.view(-1).cpu())
            for name in mine
            for key, value in state[name].items()
        )
        return len(whole_states), wrong


def save_whole_of(optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """At stage 0, by name, on the first rank of a stage."""
    saved = save_whole(optimizer._binding, optimizer.state)
    names = [spec.name for plan in optimizer._binding.plans for spec in plan.specs]
    return {names[place]: state for place, state in saved.items()}


def test_every_stage_of_a_pipeline_takes_its_own(own_ranks: RankPool) -> None:
    for count, wrong in own_ranks.run(load_into_a_pipeline, "fp32, stage 0"):
        assert count > 0 and wrong == 0


def norms_of_deepspeeds_muon(stage: int) -> tuple[float, float]:
    """The norm that its engine reports and clips by, and that of the gradients."""
    settings = config(stage, rows=ROWS)
    settings["optimizer"] = {"type": "Muon", "params": {"torch_adam": True}}
    settings["zero_optimization"]["reduce_scatter"] = False  # it refuses stage 3 with it
    with eager(), engine_for(settings) as engine:
        train_engine(engine, 1, same_rows=True)
        return float(engine.get_global_grad_norm()), Reference().train(1)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_muon_clips_updates(ranks: RankPool, stage: int) -> None:
    """Which the page says has no counterpart: the norm is near the root of the sum of all matrices' shorter sides."""
    for reported, true in ranks.run(norms_of_deepspeeds_muon, stage):
        assert reported > 5 * true


def differ_from_deepspeeds_muon(stage: int, storage: str) -> float:
    """DeepSpeed's Muon at stage 0, its state into our engine by the settings of the page, both go on."""
    theirs = config(0, rows=ROWS)
    theirs["optimizer"] = {"type": "Muon", "params": {"torch_adam": True}}
    settings = config(stage, rows=ROWS)
    settings["optimizer"] = copy.deepcopy(entry("deepspeed"))
    settings["optimizer"]["params"].update(report=False, storage=storage)
    from lwopt_backend.integrations.deepspeed_migration import load_named_state as load

    with eager(), engine_for(theirs) as engine:
        train_engine(engine, BEFORE, same_rows=True)
        names = {id(param): name for name, param in engine.module.named_parameters()}
        order = [names[id(param)] for group in engine.optimizer.param_groups for param in group["params"]]
        state = from_checkpoint(engine.optimizer.state_dict(), order, source="deepspeed")
        model = UnevenLM()
        model.load_state_dict(engine.module.state_dict())
        train_engine(engine, AFTER, same_rows=True)
        expected = copy.deepcopy(engine.module)
    with engine_for(settings, model) as engine:
        load(engine, state)
        train_engine(engine, AFTER, same_rows=True)
        return largest_difference(full_weights(engine), expected)


@pytest.mark.parametrize(("stage", "storage"), [(0, "zero"), (2, "zero"), (3, "zero"), (2, "owned")], ids=str)
def test_deepspeeds_own_muon_goes_on_with_ours(ranks: RankPool, stage: int, storage: str) -> None:
    """In fp32 to its rounding, which steps of 0.02 and Adam on gradients of nearly zero enlarge."""
    assert max(ranks.run(differ_from_deepspeeds_muon, stage, storage)) < 1e-4


def give_another_engine() -> None:
    from lwopt_backend.integrations import deepspeed_migration

    settings = {**config(0), "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    with engine_for(settings) as engine:
        deepspeed_migration.load_named_state(engine, {})


def test_another_engine_is_refused(ranks: RankPool) -> None:
    for error in ranks.errors(give_another_engine):
        assert (
            "expected a DeepSpeed engine whose optimizer is LayerWise or LayerWiseMuon, found DeepSpeedEngine" in error
        )


# Changing the form of momentum in the middle of a run


def change_form_owned() -> tuple[float, list[Any]]:
    """Newton-Schulz in fp32, where both forms differ by its rounding only."""
    models = [exact_sums(UnevenLM()) for _ in range(2)]
    optimizers = [optimizer_for(model, ns_dtype="float32") for model in models]
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, BEFORE)
    change_momentum_form(optimizers[1], "sum")
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, AFTER)
    return difference(*models), [group.get("momentum_form") for group in optimizers[1].param_groups]


def change_form_on_fsdp2() -> tuple[float, list[Any]]:
    weights = []
    for change in (False, True):
        sharded = shard("rows", "fp32")
        optimizer = layer_wise(sharded.model, ns_dtype="float32")
        for step in range(6):
            if change and step == 3:
                change_momentum_form(optimizer, "sum")
            backward(sharded, step)
            optimizer.step()
            optimizer.zero_grad()
        weights.append({name: whole(param.detach()) for name, param in named(sharded.model)})
    largest = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return largest, [group.get("momentum_form") for group in optimizer.param_groups]


def change_form_under_deepspeed(stage: int, storage: str) -> tuple[float, list[Any]]:
    from lwopt_backend.integrations import deepspeed_migration

    weights = []
    for change in (False, True):
        with engine_for(config(stage, rows=ROWS, ns_dtype="float32", storage=storage)) as engine:
            train_engine(engine, BEFORE, same_rows=True)
            if change:
                deepspeed_migration.change_momentum_form(engine, "sum")
            train_engine(engine, AFTER, same_rows=True)
            weights.append(full_weights(engine))
            forms = [group.get("momentum_form") for group in engine.basic_optimizer.param_groups]
    return max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0]), forms


FORM_CHANGES = {
    "owned": (change_form_owned, ()),
    "fsdp2": (change_form_on_fsdp2, ()),
    **{f"stage {stage}": (change_form_under_deepspeed, (stage, "zero")) for stage in range(4)},
    "stage 2, owned": (change_form_under_deepspeed, (2, "owned")),
}


@pytest.mark.parametrize("engine", FORM_CHANGES)
def test_the_form_can_change_in_the_middle_of_a_run(ranks: RankPool, engine: str) -> None:
    function, arguments = FORM_CHANGES[engine]
    for largest, forms in ranks.run(function, *arguments):
        assert largest < 2e-5 and forms == ["sum", None]


def load_into_the_other_form(folder: str) -> tuple[float, list[str], list[str]]:
    """A checkpoint brings its form with it; then it is changed."""
    model = exact_sums(UnevenLM())
    optimizer = optimizer_for(model, ns_dtype="float32")
    train(model, optimizer, BEFORE)
    optimizer.save_state_dict(folder)
    other = exact_sums(UnevenLM(seed=1))
    made_for_sums = optimizer_for(other, ns_dtype="float32", momentum_form="sum")
    other.load_state_dict(model.state_dict())
    made_for_sums.load_state_dict_from(folder)
    loaded = [group["momentum_form"] for group in made_for_sums.param_groups if "momentum_form" in group]
    change_momentum_form(made_for_sums, "sum")
    changed = [group["momentum_form"] for group in made_for_sums.param_groups if "momentum_form" in group]
    train(model, optimizer, AFTER)
    train(other, made_for_sums, AFTER)
    return difference(model, other), loaded, changed


def test_a_checkpoint_of_the_other_form(ranks: RankPool, tmp_path: Path) -> None:
    for largest, loaded, changed in ranks.run(load_into_the_other_form, str(tmp_path / "checkpoint")):
        assert largest < 2e-5 and loaded == ["ema"] and changed == ["sum"]


# What the page shows


def test_the_script_runs_as_printed(tmp_path: Path) -> None:
    printed = run_page(PAGE, tmp_path)
    assert "largest difference after 10 more steps: 0.0" in printed


def test_snippets_parse_and_import_what_there_is() -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        imports = [node for node in ast.parse(snippet).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert imports
        exec(compile(ast.Module(imports, type_ignores=[]), "snippet", "exec"), {})
    found = {name for name in re.findall(r"`(\w+)`", PAGE) if hasattr(public, name)}
    assert found >= {"from_checkpoint", "load_named_state", "convert_momentum", "convert_named_momentum"}


@pytest.mark.parametrize("peer", PEERS)
def test_the_settings_are_arguments_in_python_too(peer: str) -> None:
    optimizer = LayerWiseOptimizer(UnevenLM(), **entry(peer)["params"], report=False)
    rules = rules_for(peer)
    for group, choice in zip(optimizer.param_groups, (rules.matrix, rules.elementwise), strict=True):
        assert group["rule"] == choice.rule
        for key, value in choice.options.model_dump().items():
            assert group[key] == value


def test_every_peer_has_a_table_and_every_key_in_it_is_ours() -> None:
    assert re.findall(r"^```json (\w+)$", PAGE, re.MULTILINE) == PEERS
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", PAGE, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(matrix|elementwise)\.(\w+)`", row)}
    muon, adamw = (choice.options for choice in (rules_for("torch").matrix, rules_for("torch").elementwise))
    assert len(keys) > 15
    for kind, key in keys:
        assert key in type(muon if kind == "matrix" else adamw).model_fields, (kind, key)


def rows_on_the_page(heading: str) -> list[list[str]]:
    """The four columns of a section's table, below its head."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)][2:]


def values_in(cell: str) -> list[Any]:
    """What a cell lists, numbers as numbers; what is no value as its text."""
    words = {"on": True, "off": False, "none": None}
    return [words[v] if v in words else parsed(v) for v in re.findall(r"\([^)]*\)|[^,\s`][^,`]*", cell)]


def parsed(value: str) -> Any:
    try:
        found = json.loads(re.sub(r"^\((.*)\)$", r"[\1]", value))
    except json.JSONDecodeError:
        return value
    return tuple(found) if isinstance(found, list) else found


def paired(names: list[str], cell: str) -> list[tuple[str, Any]]:
    """A default for each name, or the same for all; nothing where the cell lists something else."""
    values = values_in(cell)
    if cell in ("", "the same") or len(values) not in (1, len(names)):
        return []
    return list(zip(names, values * len(names) if len(values) == 1 else values))


@pytest.mark.parametrize("heading", re.findall(r"^## (.*)$", PAGE, re.MULTILINE)[1:8])
def test_our_defaults_on_the_page_are_ours(heading: str) -> None:
    models = {"matrix": MuonOptions(), "elementwise": AdamWOptions(), "adamw": AdamWOptions()}
    checked = set()
    for _, ours, _, cell in rows_on_the_page(heading):
        tokens = [token.rpartition(".")[::2] for token in re.findall(r"`([\w.]+)`", ours)]
        options = [(section or "matrix", key) for section, key in tokens]
        known = [(section, key) for section, key in options if hasattr(models.get(section), key)]
        for (section, key), value in paired(known, cell):
            default = getattr(models[section], key)
            if key == "ns_coefficients":
                value, default = (table_of(which).triples for which in (value, default))
            assert value == (default or "original" if key == "adjust_lr_fn" else default), key
            checked.add(key)
    assert checked >= {"lr", "weight_decay", "momentum"} - ({"momentum"} if heading == "pytorch_optimizer" else set())


@pytest.mark.parametrize(
    ("heading", "peer"), [("torch.optim.Muon", torch.optim.Muon), ("pytorch_optimizer", pytorch_optimizer.Muon)]
)
def test_their_defaults_on_the_page_are_theirs(heading: str, peer: Any) -> None:
    arguments = inspect.signature(peer).parameters
    checked = 0
    for theirs, _, cell, _ in rows_on_the_page(heading):
        for name, value in paired([name for name in re.findall(r"`(\w+)`", theirs) if name in arguments], cell):
            if name != "adjust_lr_fn":
                assert arguments[name].default == value, name
                checked += 1
    assert checked >= 7


def test_every_heading_is_in_the_list() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert re.findall(r"^- \[(.*?)\]\(#", PAGE, re.MULTILINE) == headings
