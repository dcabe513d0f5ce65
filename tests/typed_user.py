"""A user's script in which every public name occurs, for scripts/typecheck.py: mypy's strict mode finds no error in it.
``assert_type`` says what a call returns, so that no type is lost to ``Any`` unseen. test_package.py runs the functions
that need one process only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import lwopt_backend
from lwopt_backend import LayerWiseOptimizer, QKClip, WeightRule, migration, register_elementwise, register_rule, rules
from lwopt_backend.config.options import NonNegative, parse
from lwopt_backend.integrations import deepspeed_zero, fsdp2
from lwopt_backend.integrations.deepspeed import migration as deepspeed_migration
from lwopt_backend.rules import Muon, QKFactors, gram_newton_schulz, newton_schulz, option, qk_clip_factors, row_factors


@dataclass
class Sign(lwopt_backend.MatrixRule):
    lr: float = 0.01
    momentum: float = option(0.9, "of the average of gradients", "Keller Jordan 2024", ge=0, lt=1)
    state_keys = ("average",)

    def accumulate(self, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        state["average"].lerp_(grad, 1 - self.momentum)

    def direction(self, grad: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return state["average"]

    def transform(self, matrices: Tensor) -> Tensor:
        return matrices.sign()

    def scale(self, shape: tuple[int, int]) -> float:
        return 1 / max(shape)


@dataclass
class RowNormalized(lwopt_backend.OwnerStateRule):
    lr: float = 0.01

    def new_owner_state(self, shape: tuple[int, int], device: torch.device) -> dict[str, Any]:
        return {"squares": torch.zeros(shape[0], 1, device=device)}

    def transform_with(self, matrix: Tensor, state: dict[str, Any]) -> Tensor:
        squares: Tensor = state["squares"].add_(matrix.square().sum(dim=1, keepdim=True))
        return matrix / squares.sqrt().clamp(min=1e-8)


@dataclass
class Whole(WeightRule):
    lr: float = 0.01

    def step(self, value: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        state["steps"] = state.get("steps", 0) + 1
        value.sub_(grad / grad.norm(), alpha=self.lr)


class PlainSGD(lwopt_backend.Options):
    lr: NonNegative = 0.1


def sgd_state(flat: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
    return {}


def flops(shape: tuple[int, int], options: Mapping[str, Any]) -> int:
    return 3 * shape[0] * shape[1]


def register_own_rules() -> None:
    register_rule("typed_sign", Sign, cost=flops, takes=lambda route: route.kind == "matrix")
    register_rule("typed_row_normalized", RowNormalized)
    register_rule("typed_whole", Whole)
    register_elementwise("typed_sgd", torch.optim.SGD, options=PlainSGD, new_state=sgd_state)
    assert_type(parse(PlainSGD, {"lr": 0.3}, "settings"), PlainSGD)
    assert_type(lwopt_backend.__version__, str)


def train_plain(model: nn.Module, batches: Sequence[Tensor], folder: Path) -> LayerWiseOptimizer:
    optimizer = LayerWiseOptimizer(
        model,
        matrix={"name": "typed_sign", "momentum": 0.95},
        lr=0.02,
        elementwise="typed_sgd",
        elementwise_lr=1e-3,
        overrides=[{"params": "0.*", "matrix": {"lr": 0.01}}],
        report=False,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.record_metrics()
    for batch in batches:
        with optimizer.no_sync():
            backward(model, batch)
        backward(model, batch)
        assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
        assert_type(optimizer.grad_norm("0.*"), Tensor)
        assert_type(optimizer.clip_group_norms, dict[str, Tensor])
        assert_type(optimizer.count_zeros(), int)
        optimizer.step()
        assert_type(optimizer.metrics(), dict[str, Any])
        optimizer.zero_grad()
        schedule.step()
    optimizer.save_state_dict(folder / "optimizer")
    optimizer.load_state_dict_from(str(folder / "optimizer"))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    optimizer.refresh_masters()
    assert_type(optimizer.memory_report()[0].long_lived, int)
    assert_type(optimizer.traffic(), dict[str, int])
    return optimizer


def backward(model: nn.Module, batch: Tensor) -> None:
    output = model(batch)
    assert isinstance(output, Tensor)
    torch.autograd.backward(output.square().mean())  # torch gives Tensor.backward no types, which strict mode refuses


def train_modules(vision: torch.optim.Optimizer, batch: Tensor, model: nn.Module, folder: Path) -> bool:
    optimizers = lwopt_backend.ModuleOptimizers({"vision": vision, "language": None})
    with optimizers.no_sync():
        backward(model, batch)
    assert_type(optimizers.clip_grad_norm_({"vision": 1.0, "language": 0.5}), Tensor)
    assert_type((optimizers.grad_norms(), optimizers.zero_counts()), tuple[dict[str, Tensor], dict[str, int]])
    optimizers.scale_grads(0.5)
    optimizers.zero_grad()
    assert_type(optimizers.overflowed + optimizers.names, tuple[str, ...])
    for group in optimizers.param_groups:
        group["lr"] *= 0.5
    optimizers.save_state_dict(folder / "modules")
    optimizers.load_state_dict_from(folder / "modules")
    return assert_type(optimizers.step(), bool)


def clip_attention(optimizer: LayerWiseOptimizer, logits: Mapping[str, Tensor]) -> None:
    layers = {
        name: lwopt_backend.Heads(f"{name}.q.weight", f"{name}.k.weight", heads=8, key_heads=2) for name in logits
    }
    clip = QKClip(optimizer, layers, threshold=100.0)
    clip(logits)


def mathematics(matrices: Tensor, logits: Tensor, rule: Muon | rules.NorMuon | rules.AdaMuon) -> Tensor:
    assert_type(rule.iterates_in, torch.dtype)
    plain = newton_schulz(matrices, steps=5, coefficients="polar_express", eps=1e-7, dtype=torch.float32)
    gram = gram_newton_schulz(matrices, steps=5, coefficients=(3.4445, -4.775, 2.0315), eps=1e-7, dtype=torch.float32)
    factors = assert_type(qk_clip_factors(logits, threshold=100.0), QKFactors)
    return (plain + gram) * row_factors([(128, factors.query), (64, factors.rotary_query)])


def train_fsdp2(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    optimizer = fsdp2.LayerWiseOptimizer(model, "muon", 0.02, params=model.parameters(), weight_decay=0.01)
    handle = optimizer.attach(model)
    backward(model, batch)
    assert_type(optimizer.clip_grad_norm_(1.0), Tensor)
    optimizer.step()
    handle.remove()
    return assert_type(optimizer.state_dict(), dict[str, Any])


# DeepSpeed, whose engine has no types
def optimizer_for_deepspeed(model: nn.Module, muon: bool) -> torch.optim.Optimizer:
    deepspeed_zero.register()
    if muon:
        return deepspeed_zero.LayerWiseMuon(model.parameters(), lr=0.02, adamw={"lr": 3e-4})
    return deepspeed_zero.LayerWise(model.parameters(), matrix={"name": "normuon", "lr": 0.02}, elementwise="adamw")


def resume_engine(engine: Any, state_dict: Mapping[str, Any]) -> list[str]:
    named = migration.from_checkpoint(state_dict, source="torch.optim.Muon")
    left = assert_type(deepspeed_migration.load_named_state(engine, named, strict=False), list[str])
    deepspeed_migration.change_momentum_form(engine, "sum")
    return left


def resume(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    assert "torch.optim.Muon" in migration.SOURCES
    named = migration.from_checkpoint(state_dict, names, source="torch.optim.Muon", momentum=0.95)
    assert_type(named, dict[str, dict[str, Tensor]])
    converted = migration.convert_named_momentum(named, 0.95, source="ema", target="sum")
    left = assert_type(migration.load_named_state(optimizer, converted), list[str])
    assert_type(migration.convert_momentum(torch.ones(2), 0.95, source="ema", target="sum"), Tensor)
    migration.change_momentum_form(optimizer, "sum")
    return left
