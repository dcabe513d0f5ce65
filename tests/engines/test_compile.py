"""Models that torch.compile compiles: their losses are those of the model as it is, on every engine."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lwopt_backend import LayerWiseOptimizer
from tests.support.cells import with_full
from tests.support.engines import Cell, Engine, running
from tests.support.models import UnevenLM, largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import Branches, loss_of, optimizer_in, rows, shares

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "late parameters": ("plain", {"overlap_param_gather": True}),
    "owned": ("owned 2", {}),
    **{f"zero {stage}": (f"zero {stage}", {}) for stage in range(4)},
    "fsdp2": ("fsdp2", {}),
}
STEPS = 3


def compile_in_place(model: Any, part: str, backend: str) -> None:
    for module in model.layers if part == "blocks" else [model]:
        module.compile(backend=backend)


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        model.eval()
        loss = float(model(*shares(9, 1)[0]))
    model.train()
    return loss


def run_once(model: nn.Module) -> None:
    """Evaluate, and train without a step."""
    evaluate(model)
    model(*shares(9, 1)[0]).backward()
    model.zero_grad()


def losses_of(engine: Engine) -> list[float]:
    """Those of an evaluation before every step and after the last, on this rank."""
    model, losses = getattr(engine, "made", engine.model), []
    for step in range(STEPS):
        losses.append(evaluate(model))
        engine.train(range(step, step + 1))
    return [*losses, evaluate(model)]


def trained(engine: str, part: str = "", when: str = "after", backend: str = "eager") -> list[float]:
    """Losses of a model, ``part`` of which is compiled before or after its optimizer is made."""
    torch._dynamo.reset()
    name, options = ENGINES[engine]
    model = UnevenLM()
    if part and when == "before":
        compile_in_place(model, part, backend)
        if name != "fsdp2":  # which is sharded before its optimizer is made
            run_once(model)
    with running(Cell(name, ns_in_fp32=True, options=options), model) as made:
        if part and when == "after":
            compile_in_place(made.model, part, backend)
        return losses_of(made)


CELLS = [
    ("plain", "whole", "before", "aot_eager"),
    ("late parameters", "blocks", "after", "aot_eager"),
    ("zero 2", "whole", "after", "aot_eager"),
    ("fsdp2", "whole", "before", "aot_eager"),
    ("fsdp2", "blocks", "after", "aot_eager"),
]
MORE = [  # inductor takes half a minute where cores are busy
    *((engine, "whole", "after", "aot_eager") for engine in ENGINES),
    *((engine, "blocks", "after", "inductor") for engine in ENGINES),
]


@on_ranks(2)
@pytest.mark.parametrize(("engine", "part", "when", "backend"), with_full(CELLS, MORE))
def test_a_compiled_model_has_the_losses_of_one_that_is_not(engine: str, part: str, when: str, backend: str) -> None:
    """Compiled code may round otherwise."""
    with warnings.catch_warnings():  # torch's own, while it compiles DeepSpeed's hooks
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        losses = trained(engine, part, when, backend)
    assert losses == pytest.approx(trained(engine), rel=1e-5)


# Hooks that are added to a module which has run compiled
@pytest.fixture
def no_code() -> Iterator[None]:
    """The compiler's cache is that of the process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("how", ["wrapper", "in place", "function"])
def test_model_that_ran_compiled_is_refused(how: str, ran: bool) -> None:
    """A model that ran compiled is refused where its hooks would be ignored."""
    model = Branches()

    def call(x: Tensor) -> Any:
        return model(x)

    compiled: Any = torch.compile(call if how == "function" else model, backend="eager")
    if how == "in place":
        compiled = model
        model.compile(backend="eager")
    if ran:
        loss_of(compiled(rows(0, 0))).backward()
        model.zero_grad()
        message = "expected 'first.weight' before its first run in torch.compile.*torch.compiler.reset"
        with pytest.raises(ValueError, match=message):
            optimizer_in(model, "lazy return")
        with pytest.raises(ValueError, match=message.replace("'first", "'0.first")):
            optimizer_in([model], "lazy return")
        optimizer_in(model, "plain")  # which needs no such hooks
        torch.compiler.reset()
    optimizer: Any = optimizer_in(model, "lazy return")
    for step in range(3):
        loss_of(compiled(rows(step, 0))).backward()
        optimizer.step()
        assert optimizer.core.manager.returning
        with torch.no_grad():
            compiled(rows(step, 0))
        assert not optimizer.core.manager.returning


# Optimizer classes that compile their steps
GRAPHS: list[Any] = []


def counted(graph: Any, inputs: Any) -> Any:
    GRAPHS.append(graph)
    return graph


@torch.compile(backend=counted)
def subtract(param: Tensor, lr: float) -> None:
    param.sub_(param.grad, alpha=lr)


class Compiled(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            subtract(param, self.param_groups[0]["lr"])


@pytest.mark.usefixtures("no_code")
def test_class_that_compiles_is_compiled_after_a_trial() -> None:
    """What a class compiles is compiled though it was tried before."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    section = {"name": "torch_optimizer", "class": Compiled, "lr": 0.1}
    optimizer = LayerWiseOptimizer(model, section, include="*", report=False)
    assert not GRAPHS
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert GRAPHS


# Code around the optimizer's own calls


@on_ranks(2)
@pytest.mark.parametrize("engine", ["plain", "late parameters", "fsdp2"])
def test_a_compiled_step_runs_the_optimizers_calls_as_they_are(engine: str) -> None:
    """torch.compile(optimizer.step) ended in an internal error of the compiler."""
    name, options = ENGINES[engine]
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        with running(Cell(name, options=options, steps=2, clip=0.01), UnevenLM()) as made:
            if compiled:
                for call in ("step", "clip_grad_norm_", "zero_grad"):
                    setattr(made.optimizer, call, torch.compile(getattr(made.optimizer, call), backend="eager"))
            made.train(range(2))
            found.append(made.weights())
    assert largest_difference(*found) == 0.0
