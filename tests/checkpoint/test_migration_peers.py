"""Other Muons: their settings as the page gives them, by their own classes or published formulas; and their state."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lwopt_backend import LayerWiseOptimizer, migration
from lwopt_backend.checkpoint import convert
from lwopt_backend.checkpoint.contents import Checkpoint, Param, held
from lwopt_backend.checkpoint.formats import Numbers
from lwopt_backend.checkpoint.translation import as_ours
from lwopt_backend.groups import registry
from lwopt_backend.groups.registry import arguments, optimizer_arguments
from lwopt_backend.migration import convert_named_momentum, from_checkpoint, load_named_state
from lwopt_backend.rules.newton_schulz import TABLES
from tests.support.migration import distance, eager, ours_for, rules_for
from tests.support.pages import PAGES
from tests.support.references import SHAPES, Table, gradients, orthogonalized, random, rule_of, trained, trained_by


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_migration_from_torch_and_pytorch_optimizer(shape: tuple[int, int]) -> None:
    """State of torch comes over bit by bit, and pytorch_optimizer's to bfloat16's rounding."""
    torchs, others = (trained(ours_for(peer, shape).rule, shape) for peer in ("torch", "pytorch_optimizer"))
    assert torch.equal(torchs, trained_by(lambda param: torch.optim.Muon([param], lr=0.02), shape))
    theirs = trained_by(lambda param: pytorch_optimizer.Muon([{"params": [param], "use_muon": True}]), shape)
    assert distance(others, theirs, random(shape, 1)) < 1e-2  # bfloat16 has 8 bits


# Published formulas
SIMPLE: Table = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC: Table = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]
QUINTIC += [(2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
POLAR = list(TABLES["polar_express_5"].triples)  # which test_newton_schulz.py checks


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
    """In fp32 to its rounding; where DeepSpeed iterates in 16 bits we are no farther from that than twice as
    it is: over four gradients, since of a matrix with three directions one alone may be rounded well by either."""
    changed = {} if method == "gram" else {"gram_aspect": None, "gram_restarts": None, "ns_dtype": "bfloat16"}
    ours, exact = ours_for("deepspeed", shape, **changed), ours_for("deepspeed", shape)
    buffer, zero = torch.zeros(shape), torch.zeros(shape)
    far_mine, far_theirs = [], []
    for grad in gradients(shape):
        expected = exact.update(grad) * ours.rule.scale(shape)
        far_mine.append(distance(ours.update(grad).float() * ours.rule.scale(shape), expected, zero))
        far_theirs.append(distance(deepspeed_muon.muon_update(grad.clone(), buffer, ns_method=method), expected, zero))
        torch.testing.assert_close(ours.state["momentum_buffer"], buffer)
    assert fmean(far_mine) < max(1e-4, 2 * fmean(far_theirs)) < 0.5


@pytest.mark.parametrize(("peer", "limit"), [("deepspeed", 1e-4), ("pytorch_optimizer", 1e-2)])
def test_whole_optimizers_and_their_state(deepspeed_muon: Any, peer: str, limit: float) -> None:
    """Both halves, by the defaults of their param groups; DeepSpeed's without ZeRO, where it clips nothing."""
    start, bias = random((24, 40), 1), random((24,), 2)
    weight, other, mine = (nn.Parameter(tensor.clone()) for tensor in (start, bias, bias))
    make = deepspeed_muon.MuonWithAuxAdam if peer == "deepspeed" else pytorch_optimizer.Muon
    theirs = make([{"params": [weight], "use_muon": True}, {"params": [other], "use_muon": False}])
    ours = ours_for(peer, (24, 40))
    adamw = torch.optim.AdamW([mine], **optimizer_arguments(arguments(rules_for(peer).elementwise)))
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


def test_a_sum_that_float16_cannot_hold_is_an_error() -> None:
    average = torch.full((2,), 1e4, dtype=torch.float16)
    with pytest.raises(
        ValueError, match="the sum is beyond the range of float16; convert the buffer to float32 before"
    ):
        migration.convert_momentum(average, 0.95, source="ema", target="sum")


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


# What each optimizer writes after the same gradients of a matrix and of a vector: the installed ones themselves, the
# others as the named version does
SHAPE, MU, BETAS, STEPS = (6, 4), 0.95, (0.9, 0.95), 3
GRADS = [(random(SHAPE, step), random((4,), 10 + step)) for step in range(STEPS)]
AVERAGE, TOTAL = torch.zeros(SHAPE), torch.zeros(SHAPE)
FIRST, SECOND = torch.zeros(4), torch.zeros(4)
for of_matrix, of_vector in GRADS:
    AVERAGE.mul_(MU).add_(of_matrix, alpha=1 - MU)
    TOTAL.mul_(MU).add_(of_matrix)
    FIRST.mul_(BETAS[0]).add_(of_vector, alpha=1 - BETAS[0])
    SECOND.mul_(BETAS[1]).addcmul_(of_vector, of_vector, value=1 - BETAS[1])
Written = dict[str, Any]


def stepped(make: Callable[..., Any], *, vector: bool = True) -> Written:
    """What an optimizer writes that ``make`` makes for the matrix, and for the vector unless it has none."""
    params = [nn.Parameter(torch.ones(SHAPE)), *([nn.Parameter(torch.ones(4))] if vector else [])]
    optimizer = make(*params)
    for grads in GRADS:
        for param, grad in zip(params, grads):
            param.grad = grad.clone()
        optimizer.step()
    return dict(optimizer.state_dict())


def merged(*written: Written) -> Written:
    """As torch's get_optimizer_state_dict merges those of two optimizers, each of one parameter."""
    groups = [{**of["param_groups"][0], "params": [number]} for number, of in enumerate(written)]
    return {"state": {n: of["state"][0] for n, of in enumerate(written)}, "param_groups": groups}


def written(momentum: Written, moments: Written, *groups: Written) -> Written:
    """Literally: the state of the matrix and of the vector, in one param group or two."""
    params = [[0], [1]] if len(groups) == 2 else [[0, 1]]
    in_groups = [{**group, "params": of} for of, group in zip(params, groups, strict=True)]
    return {"state": {0: momentum, 1: moments}, "param_groups": in_groups}


def flagged(make: Any, **of_adam: Any) -> Callable[..., Any]:
    """A Muon whose param groups say which of them it trains."""
    of_vector = {"use_muon": False, "betas": BETAS, **of_adam}
    return lambda matrix, vector: make([{"params": [matrix], "use_muon": True}, {"params": [vector], **of_vector}])


def deepspeeds() -> Written:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    with eager():
        return stepped(flagged(MuonWithAuxAdam))


def ours(form: str = "ema", **matrix: Any) -> Written:
    """This package's, whose one rank has all pieces."""

    def make(weight: nn.Parameter, bias: nn.Parameter) -> LayerWiseOptimizer:
        model = nn.Linear(4, 6)
        model.weight, model.bias = weight, bias
        adamw = {"betas": BETAS}
        options = {"name": "muon", "momentum_form": form, **matrix}
        kept: dict[str, Any] = {"include": "weight", "report": False, "keep_full_grads": True}
        return LayerWiseOptimizer(model, options, lr=0.02, adamw=adamw, **kept)

    found = stepped(make)
    whole = {
        number: {key: next(iter(pieces.boxes.values())) for key, pieces in state.items()}
        for number, state in found["state"].items()
    }
    return {**found, "state": whole}


def torchs(cls: Any, **options: Any) -> Written:
    return stepped(lambda param: cls([param], **options), vector=False)


MOMENTUM, OLDER = {"momentum_buffer": TOTAL, "use_muon": True}, {"moment1": FIRST, "moment2": SECOND, "step": STEPS}
BUFFER, ADAMS = {"momentum_buffer": AVERAGE}, {"exp_avg": FIRST, "exp_avg_sq": SECOND, "step": STEPS}
JORDANS = {"lr": 0.02, "momentum": MU, "weight_decay": 0, "use_muon": True}
HIS_ADAM = {"lr": 3e-4, "betas": BETAS, "eps": 1e-10, "weight_decay": 0, "use_muon": False}
OLD = {"lr": 0.02, "momentum": MU, "nesterov": True, "ns_steps": 5}
OLD_ADAM = {"adamw_lr_ratio": 0.015, "adamw_betas": BETAS, "adamw_eps": 1e-8, "adamw_wd": 0}
BUFFERS = {"update_buffer": torch.zeros(1, 24), "update_buffer_views": [torch.zeros(24)]}
MOONLIGHTS = {"lr": 1e-3, "wd": 0.1, "momentum": MU, "nesterov": True, "ns_steps": 5}
DION = {"lr": 0.01, "mu": MU, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "step": STEPS, "epsilon": 1e-8}
DION_ADAM = {"momentum": FIRST, "variance": SECOND}
MEGATRONS = {"lr": 3e-4, "momentum": MU, "weight_decay": 0.01, "wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 3e-4}
ITS_ADAM = {"lr": 3e-4, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.01, "bias_correction": True, "step": STEPS}
ITS_MOMENTS = {"exp_avg": FIRST, "exp_avg_sq": SECOND, "master_param": torch.ones(4)}
MUONIUMS = {"algorithm": "muon", "use_muon": True, "lr": 1e-3, "wd": 0.1, "momentum": MU, "nesterov": True}
MUONIUMS |= {"ns_steps": 5, "orthogonalization_strategy": "polar_express", "flatten": False, "foreach": False}
RATIO = {"lr_ratio": torch.tensor(1.0), "step": torch.tensor(3.0)}
IN_STATE = {**MOMENTUM, "use_muon": True}, {**OLDER, "use_muon": False}
IN_APRIL = {**OLD, "weight_decay": 0, **OLD_ADAM, **BUFFERS}
DIONS = {**DION, "algorithm": "muon"}, {**DION, "algorithm": "adamw"}
OF_MATRIX = {"exp_avg": AVERAGE, "exp_avg_sq": TOTAL, "step": STEPS}
OLD_EMERGING, ADAPTIVE = {"lr": 3e-4, "momentum_beta": MU, "weight_decay": 0.01}, {**MEGATRONS, "beta2": 0.95}
NAMES = ["weight", "bias"]
WRITERS: dict[str, tuple[str | None, Callable[[], Written]]] = {  # and the source that reads it, if any does
    "torch": ("torch.optim.Muon", lambda: merged(torchs(torch.optim.Muon, momentum=MU), written_by_adamw())),
    "DeepSpeed": ("deepspeed", deepspeeds),
    "pytorch_optimizer": ("pytorch_optimizer", lambda: stepped(flagged(pytorch_optimizer.Muon))),
    "ours": ("lwopt_backend", ours),
    "ours, a sum": ("lwopt_backend", lambda: ours("sum")),
    "Keller Jordan, July 2025": ("keller_jordan", lambda: written(BUFFER, ADAMS, JORDANS, HIS_ADAM)),
    "April 2025": ("keller_jordan_2025", lambda: written({**BUFFER, "use_muon": True}, IN_STATE[1], IN_APRIL)),
    "January 2025": ("keller_jordan_2024", lambda: written(*IN_STATE, {**OLD, **OLD_ADAM})),
    "Moonlight": ("moonlight", lambda: written(*IN_STATE, {**MOONLIGHTS, "adamw_betas": BETAS, "adamw_eps": 1e-8})),
    "dion": ("dion", lambda: written({"momentum": TOTAL}, {**DION_ADAM, "step_dev": torch.tensor(3.0)}, *DIONS)),
    "dion before its counter was on the device": ("dion", lambda: written({"momentum": TOTAL}, DION_ADAM, *DIONS)),
    "Megatron 0.19, Emerging-Optimizers 0.3": ("megatron", lambda: written(BUFFER, ITS_MOMENTS, MEGATRONS, ITS_ADAM)),
    "Emerging-Optimizers 0.1": ("megatron", lambda: written(BUFFER, ADAMS, OLD_EMERGING, ITS_ADAM)),
    # Others, of which no source reads the matrix. MuonClip has the keys of its base class Muon, and a sum under them.
    "pytorch_optimizer's MuonClip": (None, lambda: stepped(flagged(pytorch_optimizer.MuonClip))),
    "ours, muon2": (None, lambda: ours(precondition="muon2", ns_steps=3)),
    "muonium 0.2.0": (None, lambda: written({"momentum_buffer": TOTAL, **RATIO}, ADAMS, MUONIUMS, ITS_ADAM)),
    "Dion2": (None, lambda: written({"momentum": TOTAL}, DION_ADAM, {**DION, "algorithm": "dion2"}, DIONS[1])),
    "AdaptiveMuon": (None, lambda: written({**BUFFER, "moment2_buffer": torch.ones(6, 1)}, ADAMS, ADAPTIVE, ITS_ADAM)),
    "SOAP": (None, lambda: written({**OF_MATRIX, "Q_L": 0}, ADAMS, {**ITS_ADAM, "shampoo_beta": 0.95}, ITS_ADAM)),
    "LaProp": (None, lambda: written(OF_MATRIX, ADAMS, {**ITS_ADAM, "correct_bias": True}, ITS_ADAM)),
    "MuonHyperball": (None, lambda: written({**BUFFER, "hyperball_R": 4.1}, ADAMS, MEGATRONS, ITS_ADAM)),
}


def written_by_adamw() -> Written:
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([param], betas=BETAS)
    for _, grad in GRADS:
        param.grad = grad.clone()
        optimizer.step()
    return dict(optimizer.state_dict())


def assert_only(source: str | None, state: Written, names: list[str]) -> None:
    """Every other source refuses it, or reads the same from it."""
    truth = source and from_checkpoint(state, names, source=source)
    for other in migration.SOURCES:
        try:
            found = from_checkpoint(state, names, source=other)
        except ValueError as error:
            assert other != source and str(error).startswith(f"the state dict of {other!r}: parameter ")
        else:
            assert truth, f"{other!r} reads {found}"
            torch.testing.assert_close(found, truth, rtol=0, atol=0)


@pytest.mark.parametrize("writer", WRITERS)
def test_every_source_reads_its_own_and_no_other_ones_otherwise(writer: str) -> None:
    source, write = WRITERS[writer]
    state = write()
    if source is not None:
        moments = {"exp_avg": FIRST, "exp_avg_sq": SECOND, "step": torch.tensor(3.0)}
        for form, buffer in (("ema", AVERAGE), ("sum", TOTAL)):
            found = from_checkpoint(state, NAMES, source=source, momentum_form=form)
            expected = {"weight": {"momentum_buffer": buffer}, "bias": moments}
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_only(source, state, NAMES)


# Those that write what torch.optim.AdamW does, with the same meaning: GaLore and Fira while they project nothing
LIKE_ADAMW = {"Adam": "torch.optim.AdamW", "AdamW": "torch.optim.AdamW", "RAdam": "torch.optim.AdamW"}
LIKE_ADAM = {"GaLore": "megatron", "Fira": "megatron"}
READ = (torch.optim.Muon, pytorch_optimizer.Muon)  # above
CLASSES = [
    *((cls, LIKE_ADAMW.get(name)) for name, cls in vars(torch.optim).items()),
    *((cls, {**LIKE_ADAMW, **LIKE_ADAM, "RAdam": None}.get(name)) for name, cls in vars(pytorch_optimizer).items()),
]


def written_by(cls: Any) -> Written | None:
    """After three steps of a matrix, unless it cannot be made so, or needs more than a gradient."""
    momentum = {"momentum": MU} if "momentum" in inspect.signature(cls).parameters else {}
    for make in (lambda p: cls([p], lr=0.01, **momentum), lambda p: cls([{"params": [p], "use_muon": True}])):
        with contextlib.suppress(Exception):
            return stepped(make, vector=False)
    return None


def test_no_source_mistakes_another_classs_state() -> None:
    """No source mistakes what a class of torch or pytorch_optimizer writes."""
    tried = []
    for cls, source in CLASSES:
        is_optimizer = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        if is_optimizer and cls not in READ and (state := written_by(cls) or {}).get("state"):
            assert_only(source, state, ["weight"])
            tried.append(cls)
    assert len(tried) > 90 and pytorch_optimizer.AdaGO in tried


# What ``lwopt convert`` makes of them, which nobody tells who wrote a state: the rule of the matrix, and the factor of
# its momentum; or words of the refusal. What is not listed is refused by its keys.
AS_OURS: dict[str, tuple[str, float] | str] = {
    **dict.fromkeys(("torch", "DeepSpeed", "pytorch_optimizer", "Keller Jordan, July 2025"), ("muon", 1.0)),
    **dict.fromkeys(("ours", "ours, a sum"), ("muon", 1.0)),  # as they are, with the form in the param group
    "ours, muon2": ("muon", 1.0),
    "January 2025, matrices": ("muon", 1 - MU),
    "Moonlight, matrices": ("muon", 1 - MU),
    "pytorch_optimizer's MuonClip": "be that of pytorch_optimizer's MuonClip, whose momentum is a sum",
    "muonium 0.2.0": "be that of muonium, whose momentum is a sum",
    "SOAP": "be that of SOAP, whose second moments are in another basis",
    "LaProp": "be that of LaProp, whose momentum is of scaled gradients",
    "AdaptiveMuon": "be that of NorMuon or AdaMuon, whose second moments have no counterpart",
}
UNSAID = "expected the state of a known optimizer, found the state"


def as_checkpoint(state: Written, **arguments: Any) -> Checkpoint:
    groups = state["param_groups"]
    place = {index: number for number, group in enumerate(groups) for index in group["params"]}
    params = {}
    for index, of_param in ((index, state["state"][index]) for index in place if index in state["state"]):
        tensors = {key: held(t.clone(), key) for key, t in of_param.items() if isinstance(t, Tensor) and key != "step"}
        flags = {key: held(torch.ones(SHAPE), key) for key in of_param.keys() - tensors.keys() - {"step", "use_muon"}}
        shape = (SHAPE, (4,))[index]
        params[NAMES[index]] = Param(held(torch.ones(shape), "weight"), {**tensors, **flags}, 3.0, place[index])
    plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    plain = [{**group, "rule": registry.rule_of(group)} if "rule" in group else group for group in plain]  # as in files
    return Checkpoint("torch dcp", "", "model", params, tuple(plain), arguments)


def of_matrix(found: Checkpoint) -> str | None:
    """The rule of the matrix, if it has one here."""
    return found.groups[found.params["weight"].group or 0].get("rule")


def alone(state: Written) -> Written:
    """The matrix, where Adam has a class of its own: a param group with the state of two rules is refused."""
    groups = [{**group, "params": [0]} for group in state["param_groups"]]
    return {"state": {0: state["state"][0]}, "param_groups": groups}


@pytest.mark.parametrize("writer", [*WRITERS, "January 2025, matrices", "Moonlight, matrices"])
def test_convert_tells_who_wrote_a_state_by_all_its_keys(writer: str) -> None:
    state = WRITERS[writer.partition(", matrices")[0]][1]()
    source = as_checkpoint(alone(state) if "matrices" in writer else state)
    found, expected = as_ours(source), AS_OURS.get(writer, UNSAID)
    before = source.params["weight"].states
    kept = convert.prepared(source, "universal", None, None, Numbers()).notes  # as it is, until it is loaded
    assert any("does not load its state" in note for note in kept) == isinstance(expected, str)
    is_sum = "January" in writer or "Moonlight" in writer
    assert any("whose momentum is a sum: a load here" in note for note in kept) == is_sum
    if isinstance(expected, str):
        assert of_matrix(found) is None and found.params["weight"].states.keys() == before.keys()
        assert any(expected in note for note in found.notes), found.notes
        return
    rule, factor = expected
    assert of_matrix(found) == rule
    buffer = found.params["weight"].states["momentum_buffer"].read()
    assert torch.equal(buffer, before["momentum_buffer"].read() * factor)
    assert any("here it is 'ema', 0.05 times as large" in note for note in found.notes) == (factor != 1.0)


RULES = {  # of all classes of torch and of pytorch_optimizer those that are converted
    **{f"torch.optim.{name}": rule for name, rule in {"SGD": "sgd", "Muon": "muon"}.items()},
    **{f"torch.optim.{name}": "adamw" for name in ("Adam", "AdamW", "RAdam")},
    **{"pytorch_optimizer.Muon": "muon", "pytorch_optimizer.Lion": "lion"},
}


def test_every_other_class_is_converted_or_refused_by_name() -> None:
    tried = dict[str, str | None]()
    for cls, _ in CLASSES:
        is_optimizer = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
        state = (written_by(cls) or {}) if is_optimizer else {}
        if state.get("state") and isinstance(state["state"].get(0), dict):
            name = f"{'torch.optim' if cls.__module__.startswith('torch.') else 'pytorch_optimizer'}.{cls.__name__}"
            found = as_ours(as_checkpoint(state))
            tried[name] = of_matrix(found)
            has_state = any(param.states for param in found.params.values())
            assert tried[name] or not has_state or any(UNSAID in note for note in found.notes), (name, found.notes)
    assert {name: rule for name, rule in tried.items() if rule} == RULES and len(tried) > 90


def test_state_read_for_another_rule_is_not_loaded() -> None:
    """By ``from_checkpoint``; a dictionary of one's own is what one says it is."""
    named = from_checkpoint(merged(torchs(torch.optim.Muon, momentum=MU), written_by_adamw()), NAMES)
    for options, said in (
        (
            {"elementwise": {"name": "sgd", "momentum": MU}, "exclude": "0.weight"},
            "'sgd' trains: expected a sum of gradients, of torch.optim.SGD",
        ),
        (
            {"matrix": {"name": "muon", "momentum_form": "sum"}},
            "expected the form 'sum' of its param group, found 'ema'",
        ),
    ):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
        rules = {"lr": 0.02, **options}
        optimizer = LayerWiseOptimizer(model, report=False, **rules)
        with pytest.raises(ValueError, match=said):
            load_named_state(optimizer, {"0.weight": named["weight"]}, strict=False)


def test_a_matrix_of_16_bits_and_a_momentum_that_is_given() -> None:
    half = AVERAGE.bfloat16()
    state = written({"momentum_buffer": half}, ADAMS, JORDANS, HIS_ADAM)
    found = from_checkpoint(state, NAMES, source="keller_jordan", momentum=0.5, momentum_form="sum")
    torch.testing.assert_close(found["weight"], {"momentum_buffer": half.float() * 2}, rtol=0, atol=0)


def of_one(state: Any = None, **group: Any) -> Written:
    torchs = {"params": [0], "momentum": 0.9, "adjust_lr_fn": None, "weight_decay": 0.1}
    return {"state": {0: BUFFER if state is None else state}, "param_groups": [{**torchs, **group}]}


MOMENTS = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
NO_MOMENTUM = {"state": {0: BUFFER}, "param_groups": [{"params": [0], "adjust_lr_fn": None}]}
TO_SUM = {"momentum_form": "sum"}
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (of_one(), {"source": "torch.optim.Moun"}, "unknown source 'torch.optim.Moun'; did you mean 'torch.optim.Muon'?"),
    (of_one(), {"momentum_form": "som"}, "momentum_form: unknown form of momentum 'som'; did you mean 'sum'?"),
    ({"optimizer": {}}, {}, r"expected keys 'state' and 'param_groups', found \['optimizer'\]"),
    ({"state": {}, "param_groups": [{"lr": 1.0}]}, {}, "param group 0: expected a key 'params', found none"),
    (
        [of_one(), of_one(params=[1])],
        {},
        "expected the param groups of one optimizer's ranks, found others in number 1",
    ),
    (of_one(), {"names": None}, "has parameters by number; pass their names"),
    (of_one(), {"names": ["a", "b"]}, r"names: expected 1, .* \(1\); found 2"),
    (of_one(params=[0, 0]), {"names": ["a", "a"]}, "expected each name once, found 'a' twice"),
    (
        of_one(params=[0, 1], param_names=["a", "b"]),
        {"names": ["b", "a"]},
        "expected the order of the state dict, whose parameter 0 is 'a'; found 'b'; leave names out",
    ),
    ({**of_one(), "state": {}}, {}, "parameter 'a' has no state. If every rank saved its own, .* pass a list of all"),
    (of_one(), {"source": "dion"}, "has 'momentum_buffer' in its state, .* the source may be one of .'torch.optim.M"),
    (of_one(), {"source": "lwopt_backend"}, "in a param group without 'momentum_form', which 'lwopt_backend' writes"),
    (of_one(dampening=0), {}, "a param group with 'dampening', .* be that of torch.optim.SGD, whose momentum is a sum"),
    (
        of_one({**MOMENTS, "GG": []}),
        {},
        "has 'GG' in its state, .* it may be that of SOAP, whose second moments are in",
    ),
    (of_one(algorithm="lion"), {}, "is trained by 'lion', whose state is not converted"),
    (of_one({"momentum_buffer": 3.0}), {}, "'momentum_buffer': expected a tensor, found 3.0"),
    (of_one({"momentum_buffer": torch.ones(3)}), {}, r"'momentum_buffer': expected a matrix's, found shape \(3,\)"),
    (NO_MOMENTUM, TO_SUM, "in a param group without 'momentum'; pass momentum, to convert 'ema' to 'sum'"),
    (of_one({**MOMENTS, "exp_avg": torch.ones(3), "step": 1}), {}, "has moments of different shapes"),
    (of_one(MOMENTS, step=1), {}, "has no counter: expected 'step' in its state$"),
    (
        {"state": {0: MOMENTS}, "param_groups": [{"params": [0], "weight_decay": 0.1}]},
        {"source": "megatron"},
        "has no counter: expected 'step' in its state or 'step' in its param group",
    ),
    (of_one({"exp_avg_sq": torch.ones(2), "step": 1}), {}, r"has no 'exp_avg' in its state, only \['exp_avg_sq', 's"),
]


@pytest.mark.parametrize(("state_dict", "how", "message"), WRONG)
def test_what_cannot_be_read(state_dict: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_checkpoint(state_dict, **{"names": ["a"], **how})


def test_every_source_is_on_the_page() -> None:
    for source in migration.SOURCES:
        assert f"`{source}`" in PAGES["checkpoints"]
