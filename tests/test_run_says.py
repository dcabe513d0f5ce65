"""What a run says that it does not do: parameters without a gradient."""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from lwopt_backend.engines import report
from lwopt_backend.groups import param_groups
from tests.fsdp2 import mesh_of
from tests.on_ranks import on_ranks
from tests.zero import engine_for, settings_for

ENGINES = ("plain", "fsdp2", "modules", "zero 0", "zero 1", "zero 2", "zero 3", "owned 0", "owned 2")


class Experts(nn.Module):
    """Experts that no rank uses, one that is used later, and layers that are always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))
        self.last = nn.Linear(8, 5)
        self.used = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.experts[2](x) if self.used else x).square().mean()


@contextlib.contextmanager
def trained(engine: str, model: nn.Module, **options: Any) -> Iterator[Callable[[Tensor], Any]]:
    """A step of an engine on this rank's rows."""
    kind, _, stage = engine.partition(" ")
    if stage:
        settings = settings_for(kind, int(stage), **options)
        with engine_for(settings, model) as made:

            def step_engine(rows: Tensor) -> None:
                made.backward(made(rows))
                made.step()

            yield step_engine
        return
    if engine == "fsdp2":
        for part in (*model.experts, model):
            fully_shard(part, mesh=mesh_of())
    optimizer: Any = LayerWiseOptimizer(model, **options)
    if engine == "modules":
        optimizer = ModuleOptimizers({"model": optimizer})

    def step(rows: Tensor) -> Any:
        optimizer.zero_grad()
        model(rows).backward()
        return optimizer.step()

    yield step


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_parameters_without_a_gradient_are_named_after_one_step_and_after_many(engine: str) -> None:
    """In the second step a rank of plain PyTorch alone uses an expert; elsewhere all ranks have to."""
    model, logged = Experts(), logging.StreamHandler(io.StringIO())
    soon = mock.patch.object(report, "TOLD_AFTER", (1, 3)), mock.patch.object(param_groups, "COMPARED_EVERY", 2)
    logger = logging.getLogger("lwopt_backend")
    with contextlib.ExitStack() as stack:
        for patch in soon:
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(logger, "handlers", [logged]))
        stack.enter_context(mock.patch.object(logger, "level", logging.INFO))
        logger._cache.clear()  # type: ignore[attr-defined]  # of enabled levels
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        step = stack.enter_context(trained(engine, model, report=True))
        made = printed.getvalue(), logged.stream.getvalue()
        for number in range(5):
            alone = engine in ("plain", "modules") or engine.startswith("owned")
            model.used = number == 1 and (dist.get_rank() == 1 or not alone)
            step(torch.randn(4, 6))
    logger._cache.clear()  # type: ignore[attr-defined]
    names = [f"experts.{expert}.{kind}" for expert in range(7) for kind in ("weight", "bias")]
    later = [name for name in names if not name.startswith("experts.2")]
    had_none = "of 18 trained parameters had no gradient on any rank in"
    said = [
        f"14 {had_none} the first step: {', '.join(names[:10])} and 4 more",
        f"12 {had_none} 3 steps: {', '.join(later[:10])} and 2 more",
    ]
    for before, after in zip(made, (printed.getvalue(), logged.stream.getvalue())):
        found = [word for word in after.removeprefix(before).split() if not word.startswith("[")]
        assert found == (" ".join(said).split() if dist.get_rank() == 0 else []), engine
