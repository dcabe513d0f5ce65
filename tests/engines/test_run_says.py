"""What a run does not do, and says: parameters without a gradient, and steps that are skipped."""

import contextlib
import io
import logging
import math
import warnings
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
from lwopt_backend.engines.fsdp2.plan import local
from lwopt_backend.groups import param_groups
from tests.support.cells import cells
from tests.support.checkpoint_engines import changed, full_weights_of, snapshot
from tests.support.fsdp2 import mesh_of, shard_later
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.zero import PRECISIONS, batch_shares, build, engine_for, settings_for, train

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
    optimizer: Any = LayerWiseOptimizer(model, **{"lr": 0.02, **options})
    if engine == "modules":
        optimizer = ModuleOptimizers({"model": optimizer})

    def step(rows: Tensor) -> Any:
        optimizer.zero_grad()
        model(rows).backward()
        return optimizer.step()

    yield step


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_parameters_without_a_gradient_are_named(engine: str) -> None:
    """Parameters without a gradient are named after one step and after many. In the second step a rank of plain PyTorch
    alone uses an expert; elsewhere all ranks have to."""
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


# Steps that are skipped
LIMIT = 50.0  # above every norm of good gradients, below that of bad ones
HOW = ("", "clip", "torch's clip of inf", "clip groups", "GradScaler")


class Loop:
    """An engine without DeepSpeed, its loop, and all that a step could change."""

    def __init__(self, engine: str, how: str, **options: Any) -> None:
        self.model, self.how = Experts(), how
        self.model.used = True
        groups = {"clip_groups": {"one": {"params": "last.*", "max_norm": 1e-3}}} if how == "clip groups" else {}
        self.sharded = engine.startswith("fsdp2")
        if self.sharded:
            shape = (dist.get_world_size() // 2, 2) if engine == "fsdp2 hybrid" else ()
            for part in (*self.model.experts, self.model):
                fully_shard(part, mesh=mesh_of(*shape, names=("outer", "inner")[: len(shape) or 1]))
        ours = {} if engine == "modules" else options
        lazy = {"overlap_param_gather": True} if engine == "plain lazy" else {}
        self.one = LayerWiseOptimizer(self.model, lr=0.02, report=False, **groups, **ours, **lazy)
        self.optimizer: Any = ModuleOptimizers({"all": self.one}, **options) if engine == "modules" else self.one
        self.scaler = torch.amp.GradScaler("cpu", enabled=how == "GradScaler", init_scale=4.0)

    def step(self, number: int, factor: float = 1.0) -> Any:
        """Rank 1 multiplies its loss by ``factor``."""
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        if self.sharded or self.how == "GradScaler":  # a step in plain PyTorch, also one that is skipped, frees them
            self.optimizer.zero_grad()
        loss = self.model(rows) * (factor if dist.get_rank() == 1 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer) if self.how == "GradScaler" else None
        if self.how == "clip":
            self.optimizer.clip_grad_norm_(1e-3)
        elif self.how.startswith("torch"):
            self.optimizer.clip_grad_norm_(1e-3, norm_type=math.inf)
        return self.scaler.step(self.optimizer) if self.how == "GradScaler" else self.optimizer.step()

    def bits(self) -> dict[str, Any]:
        self.one.synchronize()
        found: dict[str, Any] = {name: local(param).clone() for name, param in self.model.named_parameters()}
        for number, state in enumerate(self.one.state.values()):
            found |= {f"{number} {key}": local(t).clone() for key, t in state.items() if not t.is_meta}
        found["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in self.one.param_groups]
        return found

    def equals(self, other: dict[str, Any]) -> bool:
        mine = self.bits()
        same = (torch.equal(v, other[k]) if isinstance(v, Tensor) else v == other[k] for k, v in mine.items())
        return mine.keys() == other.keys() and all(same)


@cells(
    lambda engine, how, **_: (engine, how) != ("modules", "GradScaler"),
    lambda engine, ranks, **_: (ranks == 4) == (engine == "fsdp2 hybrid"),
    ranks=[2, 4],
    engine=["plain", "plain lazy", "fsdp2", "fsdp2 hybrid", "modules"],
    how=HOW,
    bad=[math.nan, 1e5],
)
@on_ranks()
def test_a_skipped_step_leaves_no_trace(engine: str, how: str, bad: float) -> None:
    """The next step equals that of a run without the bad one."""
    truth, ours = Loop(engine, how), Loop(engine, how, skip_above=LIMIT)
    for number in range(3):
        before = ours.bits()
        returned = ours.step(7, bad)
        assert ours.equals(before)
        if how != "GradScaler" or not math.isnan(bad):  # of which GradScaler takes no step
            assert returned is False if engine == "modules" else ours.one.skipped
        ours.scaler.update(4.0) if how == "GradScaler" else None
        returned = ours.step(number), truth.step(number)
        assert returned == (True, True) if engine == "modules" else not ours.one.skipped
        assert ours.equals(truth.bits()) and not ours.equals(before)
        for loop in (ours, truth):
            loop.scaler.update(4.0) if how == "GradScaler" else None


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "modules"])
@on_ranks(2)
def test_on_nonfinite_raise_and_step(engine: str) -> None:
    """A nonfinite gradient raises on all ranks, or is stepped on."""
    raises = Loop(engine, "clip", on_nonfinite="raise")
    for number in range(2):
        raises.step(number)
        before = raises.bits()
        with pytest.raises(RuntimeError, match="on_nonfinite is 'raise', and the norm of the gradients is nan"):
            raises.step(7, math.nan)
        assert raises.equals(before)
        raises.optimizer.zero_grad()
        raises.step(8)
    steps = Loop(engine, "", on_nonfinite="step", skip_above=LIMIT)
    steps.step(7, math.nan)
    assert not steps.one.skipped and all(local(p).isnan().all() for p in steps.model.last.parameters())


@on_ranks(2)
def test_metrics_count_skipped_steps() -> None:
    loop = Loop("plain", "", skip_above=LIMIT)
    loop.one.record_metrics()
    for number, factor in enumerate((1.0, 1e5, math.nan, 1.0)):
        loop.step(number, factor)
    assert [loop.one.metrics()["skipped_steps"] for _ in range(2)] == [2, 0]
    plain = Loop("plain", "")
    plain.one.record_metrics()
    plain.step(0)
    assert "skipped_steps" not in plain.one.metrics()


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "modules"])
@on_ranks(2)
def test_ranks_that_would_skip_by_other_limits_are_told_apart(engine: str) -> None:
    with pytest.raises(RuntimeError, match="ranks differ in skip_above: 1 on rank 0, 2 on rank 1"):
        Loop(engine, "", skip_above=1.0 + dist.get_rank())
    with pytest.raises(ValueError, match="on_nonfinite: .*'drop'"):
        Loop(engine, "", on_nonfinite="drop")


@on_ranks(2)
def test_a_module_decides_nothing_alone() -> None:
    with pytest.raises(ValueError, match="module 'all': expected no on_nonfinite and no skip_above"):
        ModuleOptimizers({"all": LayerWiseOptimizer(Experts(), lr=0.02, report=False, skip_above=1.0)})


# Under DeepSpeed
@cells(
    lambda engine, precision, **_: engine != "zero 0" or precision == "fp32",
    engine=["zero 0", "owned 0", "owned 1", "owned 2"],
    precision=["fp32", "bf16", "fp16"],
    clip=[0.0, 1e-3],
)
@on_ranks(2)
def test_deepspeed_skips_a_step_above_the_limit(engine: str, precision: str, clip: float) -> None:
    """An engine skips a step above the limit, and the next is exact."""
    kind, _, stage = engine.partition(" ")
    weights = []
    for bad in (True, False):
        settings = settings_for(kind, int(stage), precision, clip=clip, skip_above=LIMIT)
        if precision == "fp16":  # a bad step does not overflow
            settings["fp16"] = {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 100}
        settings["scheduler"] = {"type": "CosineAnnealingLR", "params": {"T_max": 10}}
        with engine_for(settings) as made:
            for number in range(2):
                if bad:
                    before = snapshot(made)
                    factor = 1e3 if dist.get_rank() else 1.0
                    made.backward(made(*batch_shares(9, 1)[0]) * factor)
                    made.step()
                    assert changed(snapshot(made), before) == {"steps", "samples"}
                    assert LIMIT < float(made.get_global_grad_norm()) < math.inf
                train(made, range(number, number + 1), same_rows=True)
            assert made.skipped_steps == 2 * bad
            weights.append(full_weights_of(made))
    assert largest_difference(*weights) == 0.0


@cells(
    lambda engine, precision: precision != "bf16" or engine not in ("zero 0", "zero 1", "zero 2"),
    engine=["zero 0", "zero 1", "zero 2", "zero 3", "owned 0", "owned 2"],
    precision=["fp32", "bf16"],
)
@on_ranks(2)
def test_an_engine_raises_for_a_nonfinite_gradient(engine: str, precision: str) -> None:
    kind, _, stage = engine.partition(" ")
    with engine_for(settings_for(kind, int(stage), precision, on_nonfinite="raise")) as made:
        train(made, range(1), same_rows=True)
        before = snapshot(made)
        loss = made(*batch_shares(9, 1)[0])
        made.backward(loss * (math.nan if dist.get_rank() else 1.0))
        with pytest.raises(RuntimeError, match="on_nonfinite is 'raise'"):
            made.step()
        assert changed(snapshot(made), before) == set()


UNSAFE = {"bf16": {"enabled": True, "check_grad_overflow": False}}
CHECKED = {"bf16": {"enabled": True, "check_grad_overflow": True}}


@pytest.mark.parametrize(
    ("engine", "more", "options", "message"),
    [
        ("zero 2", {}, {"skip_above": 1.0}, "skip_above is 1.0 at zero_optimization.stage 2 of DeepSpeed"),
        ("zero 3", {}, {"skip_above": 1.0}, "skip_above is 1.0 at zero_optimization.stage 3 of DeepSpeed"),
        ("zero 3", {}, {"on_nonfinite": "step"}, "on_nonfinite is 'step' at zero_optimization.stage 3 of DeepSpeed"),
        ("zero 1", CHECKED, {"on_nonfinite": "step"}, "set bf16.check_grad_overflow to false"),
        ("zero 2", UNSAFE, {"on_nonfinite": "skip"}, "set bf16.check_grad_overflow to true"),
        ("zero 2", UNSAFE, {"on_nonfinite": "step"}, ""),
        ("zero 2", CHECKED, {"on_nonfinite": "skip"}, ""),
        ("zero 2", PRECISIONS["fp16"], {"on_nonfinite": "raise"}, "on_nonfinite is 'raise' in fp16"),
        ("owned 2", PRECISIONS["fp16"], {"on_nonfinite": "step"}, "on_nonfinite is 'step' in fp16"),
        ("owned 2", UNSAFE, {"on_nonfinite": "raise"}, ""),
    ],
)
@on_ranks(2)
def test_what_deepspeed_cannot_do_is_refused_by_name(
    engine: str, more: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    kind, _, stage = engine.partition(" ")
    settings = settings_for(kind, int(stage), **options) | more
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        build(settings)


# The first training pass of a model without an example
class Conditioned(nn.Module):
    """A modulation in a module of its own, which a block far away takes apart, for a condition that no guess finds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.made = nn.Linear(6, 16), nn.Sequential(nn.SiLU(), nn.Linear(16, 48))
        self.attn, self.norm = nn.Linear(16, 16), nn.LayerNorm(16, elementwise_affine=False)

    def forward(self, x: Tensor, request: dict[str, Tensor]) -> Tensor:
        a, b, c = self.made(self.embed(request["of"])).chunk(3, -1)
        return (x + c * self.attn(self.norm(x) * (1 + a) + b)).square().mean()


@contextlib.contextmanager
def steps_of(engine: str, model: nn.Module) -> Iterator[Callable[..., Any]]:
    """A pass and a step of the model on an engine."""
    if engine.partition(" ")[0] in ("zero", "owned"):
        storage, _, stage = engine.partition(" ")
        with engine_for(settings_for(storage, int(stage), accumulation=1, report=False), model) as made:

            def step_engine(*args: Any, **kwargs: Any) -> None:
                made.backward(made(*args, **kwargs))
                made.step()

            yield step_engine
        return
    if engine == "fsdp2":
        fully_shard(model, mesh=mesh_of())
    optimizer = LayerWiseOptimizer(model, lr=0.02, report=False, sharded_later="later" in engine)
    if "later" in engine:
        shard_later(model, optimizer)

    def step(*args: Any, **kwargs: Any) -> None:
        model(*args, **kwargs).backward()
        optimizer.step()

    yield step


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "fsdp2, later", "zero 0", "zero 1", "zero 3", "owned 2"])
@on_ranks(2)
def test_first_pass_tells_of_weights_used_otherwise(engine: str) -> None:
    """On FSDP2, every first pass said that the routing was an error: the parameters that the optimizer was made with
    are not those of a model that is sharded later, or whose forward pass has gathered them. On ZeRO 3, the model was
    followed within the pass: every matrix was gathered on each rank, and again in all later passes."""
    model = Conditioned()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with steps_of(engine, model) as step:
            for _ in range(2):
                step(torch.randn(2, 5, 16), request={"of": torch.randn(2, 1, 6)})
    assert not any(getattr(module, "_external_params", None) for module in model.modules())
    found = [str(warning.message) for warning in caught if "first training pass" in str(warning.message)]
    assert len(found) == (dist.get_rank() == 0)
    for said in found:
        assert "weights are used otherwise than planned, 'made.*.weight'" in said and "a, b, c" in said


@pytest.mark.parametrize(("has", "options"), [(True, {}), (False, {}), (False, {"ns_dtype": "float32"})])
def test_a_cpu_without_products_in_bf16_is_told(has: bool, options: dict[str, Any]) -> None:
    """Its Newton-Schulz in bf16 takes 25 times as long as in fp32."""
    with mock.patch.object(report, "multiplies_bf16", lambda: has), contextlib.redirect_stdout(io.StringIO()) as said:
        LayerWiseOptimizer(nn.Linear(8, 8), lr=0.02, **options)
    assert said.getvalue().count("This CPU has no products in bfloat16") == (not has and not options)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        # Gram: 8 ssl + 28 sss flops, standard: 20 ssl + 10 sss, of which l = 4 s makes 60 and 90.
        (64, {}, "Newton-Schulz: 0.67 of the flops with 'ns_method': 'auto'; it differs"),
        (64, {"ns_method": "auto"}, "Newton-Schulz by 'auto': Gram iteration for 64 x 256 (1)."),
        (256, {"ns_method": "auto"}, "Newton-Schulz by 'auto': standard iteration for 256 x 256 (1)."),
        (64, {"ns_method": "gram"}, ""),
        (256, {}, ""),
    ],
)
def test_what_auto_does_or_would_save_is_told(rows: int, options: dict[str, Any], said: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        LayerWiseOptimizer(nn.Linear(256, rows), lr=0.02, **options)
    told = [
        line for line in printed.getvalue().splitlines() if line.startswith(("Newton-Schulz: ", "Newton-Schulz by"))
    ]
    assert [line.startswith(said) for line in told] == [True] * bool(said)
