"""References on one process, on whole parameters: the rules that tests train with, torch's optimizers and this
package's rules on whole matrices, and formulas written out here."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor, nn

from lwopt_backend import register_elementwise
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.config.options import parse
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, MATRIX_RULES, build_matrix_rule
from lwopt_backend.rules import MatrixRule, OwnerStateRule
from lwopt_backend.runtime.elementwise import Counters


def state_of(*keys: str, **counters: torch.dtype) -> Any:
    """The ``new_state`` of an optimizer that keeps tensors like its parameter, and counters."""
    return lambda flat, options: {
        **{key: torch.zeros((), dtype=dtype) for key, dtype in counters.items()},
        **{key: torch.zeros_like(flat) for key in keys},
    }


REGISTERED = "registered by a test"
register_elementwise(
    "rmsprop", torch.optim.RMSprop, new_state=state_of("square_avg", step=torch.float32), source=REGISTERED
)
register_elementwise(
    "adabelief",
    pytorch_optimizer.AdaBelief,
    new_state=state_of("exp_avg", "exp_avg_var", step=torch.int64),
    counters=lambda options: Counters(group={"step": ("step", int)}),
    source=REGISTERED,
)
MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SECTIONS: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", **MUON},
    "sum, coupled": {"name": "muon", **MUON, "momentum_form": "sum", "weight_decay_form": "coupled"},
    "cautious, spectral": {"name": "muon", "lr": 1e-3, "weight_decay_form": "cautious", "adjust_lr_fn": "spectral"},
    "polar express": {"name": "muon", **MUON, "ns_coefficients": "polar_express", "nesterov": False},
    "gram": {"name": "muon", **MUON, "gram_aspect": 1.0, "ns_dtype": "float32"},
    "rows, muon+": {"name": "muon", **MUON, "precondition": "muoneq_r", "renormalize": "col_row"},
    "aol": {"name": "muon", **MUON, "precondition": "aol", "ns_coefficients": [[2.5, -2.5, 1.0]] * 4, "ns_steps": 4},
    "muon2": {"name": "muon", **MUON, "precondition": "muon2", "ns_steps": 3},
    "normuon": {"name": "normuon", **MUON},
    "muonh": {"name": "muon", "lr": 0.02, "weight_decay": 0.0, "hyperball": True},
    "u/w floor": {"name": "muon", **MUON, "uw_floor": 0.35},
    "normuonh": {"name": "normuon", "lr": 0.02, "weight_decay": 0.0, "hyperball": True},
    "adamh": {"name": "adamh", "lr": 0.02},
    "nanochat": {"name": "normuon", **MUON, "precondition": "muoneq_r", "renormalize": "frobenius"},
    "adamuon": {"name": "adamuon", **MUON},
    "soap": {"name": "soap", "lr": 3e-3, "precondition_frequency": 2},
    "shampoo": {"name": "shampoo", "lr": 1e-2, "momentum": 0.9},
    "a class": {"name": "torch_optimizer", "class": "torch.optim.RMSprop", "lr": 1e-3, "momentum": 0.9},
}
# What one process runs instead, on all matrices in one optimizer.
CLASSES: dict[str, type[torch.optim.Optimizer]] = {"soap": pytorch_optimizer.SOAP, "shampoo": pytorch_optimizer.Shampoo}
CLASSES |= {"torch_optimizer": torch.optim.RMSprop}
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", **ADAMW},
    "lion": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
    "a class": {"name": "rmsprop", "lr": 1e-3},
    "counts in its group": {"name": "adabelief", "lr": 1e-2},
    "adamw, amsgrad": {"name": "adamw", **ADAMW, "amsgrad": True},
    "adamw, foreach": {"name": "adamw", **ADAMW, "foreach": True},
    "adamw, fused": {"name": "adamw", **ADAMW, "fused": True},
}
CAUTIOUS: dict[str, dict[str, Any]] = {
    "cautious adamw": {"name": "adamw", **ADAMW, "weight_decay_form": "cautious"},
    "cautious lion": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1, "weight_decay_form": "cautious"},
}


def layer_wise(rule: str, **options: Any) -> dict[str, Any]:
    """The entry of a ds_config with that rule and AdamW."""
    rules = {"matrix": SECTIONS[rule], "elementwise": ELEMENTWISE["adamw"]}
    return {"type": "LayerWise", "params": {**rules, "report": False, **options}}


# One matrix
SHAPES = [(48, 63), (63, 48), (32, 32), (1, 7), (7, 1), (200, 3)]
SIMPLE = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(shape: tuple[int, ...], steps: int = 4) -> Sequence[Tensor]:
    return [random(shape, 100 + step) for step in range(steps)]


Table = Sequence[tuple[float, float, float]]


def orthogonalized(matrix: Tensor, table: Table, margin: float = 1.0) -> Tensor:
    """Newton-Schulz with a row of ``table`` for each step, in the matrix's dtype; written out here, not taken from our
    rules."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / (x.norm() * margin).clamp(min=1e-7)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def rule_of(name: str, **options: Any) -> MatrixRule:
    checked = parse(MATRIX_RULES[name].model({}, name), options, name)
    return build_matrix_rule({"rule": name, **checked.model_dump()}, HostConfig())


class Trained:
    """A matrix that a rule trains as the steppers drive it."""

    def __init__(self, rule: MatrixRule, value: Tensor) -> None:
        self.rule = rule
        self.value = value.clone()
        self.state = {key: torch.zeros_like(value) for key in rule.state_keys}
        self.owner_state: dict[str, Any] = {}
        if isinstance(rule, OwnerStateRule):
            self.owner_state = rule.new_owner_state(tuple(value.shape), value.device)

    def update(self, grad: Tensor) -> Tensor:
        """What the owner sends back for ``grad``."""
        grad = self.rule.gradient(grad, self.value)
        self.rule.accumulate(grad, self.state)
        direction = self.rule.direction(grad, self.state).to(self.rule.exchange_dtype)
        if isinstance(self.rule, OwnerStateRule):
            return self.rule.transform_with(direction, self.owner_state)
        return self.rule.transform(direction)

    def step(self, grad: Tensor) -> Tensor:
        self.rule.apply(self.value, self.update(grad), tuple(self.value.shape))
        return self.value


def trained(rule: MatrixRule, shape: tuple[int, ...], steps: int = 4) -> Tensor:
    matrix = Trained(rule, random(shape, 1))
    for grad in gradients(shape, steps):
        matrix.step(grad)
    return matrix.value


def trained_by(make: Callable[[nn.Parameter], torch.optim.Optimizer], shape: tuple[int, int]) -> Tensor:
    param = nn.Parameter(random(shape, 1))
    optimizer = make(param)
    for grad in gradients(shape):
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


# All matrices, or everything else, of a model
class PlainRule:
    def __init__(self, params: list[Tensor], section: dict[str, Any]) -> None:
        self.params = params
        self.matrices = [Trained(rule_of(**section), param.detach()) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, matrix in zip(self.params, self.matrices):
            if param.grad is not None:
                param.copy_(matrix.step(param.grad))

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


def matrix_optimizer(params: list[Tensor], section: dict[str, Any]) -> Any:
    if section["name"] not in CLASSES:
        return PlainRule(params, section)
    options = {key: value for key, value in section.items() if key not in ("name", "class")}
    return CLASSES[section["name"]](params, **options)


Blocks = dict[str, list[Callable[[Tensor], Tensor]]]  # which elements of a parameter are a matrix, to read


class Separate:
    """torch.optim.Muon on every matrix as a separate parameter."""

    def __init__(self, named: dict[str, Tensor], blocks: Blocks, **options: Any) -> None:
        self.pieces = [
            (param, read, nn.Parameter(read(param.detach()).clone().contiguous()))
            for name, param in named.items()
            for read in blocks.get(name, [lambda tensor: tensor])
        ]
        self.params = list(named.values())
        self.muon = torch.optim.Muon([piece for *_, piece in self.pieces], **options)

    @torch.no_grad()
    def step(self) -> None:
        for param, read, piece in self.pieces:
            piece.copy_(read(param))
            piece.grad = read(param.grad).clone().contiguous()
        self.muon.step()
        for param, read, piece in self.pieces:
            places = read(torch.arange(param.numel()).view(param.shape)).reshape(-1)
            param.view(-1)[places] = piece.reshape(-1)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


class Cautious(torch.optim.Optimizer):
    """AdamW or Lion with cautious weight decay, as "Cautious Weight Decay" has them: no decay of what grows."""

    def __init__(self, params: Iterable[Tensor], name: str, **options: Any) -> None:
        self.name = name
        defaults = {"adamw": {"betas": (0.9, 0.999), "eps": 1e-8}, "lion": {"betas": (0.9, 0.99)}}[name]
        super().__init__(params, {**defaults, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = getattr(self, self.name)(param.grad, self.state[param], group)
                    decays = ~((param > 0) & (update < 0) | (param < 0) & (update > 0))
                    kept = torch.where(decays, 1 - group["lr"] * group["weight_decay"], 1.0)
                    param.copy_(param * kept - update)

    def adamw(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        step = state["step"] = state.get("step", 0) + 1
        mean = state.setdefault("mean", torch.zeros_like(grad)).lerp_(grad, 1 - beta1)
        square = state.setdefault("square", torch.zeros_like(grad)).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        return torch.zeros_like(grad).addcdiv_(mean, root, value=group["lr"] / (1 - beta1**step))

    def lion(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        mean = state.setdefault("mean", torch.zeros_like(grad))
        update = mean.lerp(grad, 1 - beta1).sign_()
        mean.lerp_(grad, 1 - beta2)
        return update * group["lr"]


def elementwise_optimizer(params: list[Tensor], section: dict[str, Any]) -> torch.optim.Optimizer:
    options = {key: value for key, value in section.items() if key not in ("name", "class", "weight_decay_form")}
    if "weight_decay_form" in section:
        return Cautious(params, section["name"], **options)
    return ELEMENTWISE_RULES[section["name"]].optimizer(options)(params, **options)
