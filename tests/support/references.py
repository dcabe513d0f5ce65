"""References on one process, on whole parameters: the rules that tests train with, torch's optimizers and this
package's rules on whole matrices, and formulas written out here."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import deepspeed
import pytorch_optimizer
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lwopt_backend import register_elementwise
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.groups.optimizer_classes import class_of
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, build_matrix_rule, options_of
from lwopt_backend.rules import MatrixRule, OwnerStateRule
from lwopt_backend.runtime.elementwise import Counters
from tests.support.models import MATRICES, UnevenLM, batch, largest_difference

ROWS = 8  # of the global batch, at every world size
OWN_ROWS = 24  # the same where ranks have their own; divides into 1 to 4 ranks and 1 or 2 micro-batches
Rows = tuple[Tensor, Tensor]
Apart = tuple[tuple[str, str, float], ...]  # clip groups: a name, a glob and the largest norm


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
    counters=Counters(group={"step": ("step", int)}),
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
RULES = {**ELEMENTWISE, **CAUTIOUS}


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
    """Newton-Schulz with a row of ``table`` for each step, in the matrix's dtype, by torch.optim.Muon's operations;
    written out here, not taken from our rules."""
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / (x.norm() * margin).clamp(min=1e-7)
    for a, b, c in table:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


def round_to_8_bits(matrix: Tensor, cuts: Collection[int] = (), block: int = 256) -> None:
    """Round momentum in place, as int8 with a scale: the elements of a row between multiples of ``block``, and ``cuts``
    of the flattened matrix."""
    rows, columns = matrix.shape
    begins = {row * columns + column for row in range(rows) for column in range(0, columns, block)}
    for begin, end in itertools.pairwise(sorted({*begins, *cuts, matrix.numel()})):
        some = matrix.view(-1)[begin:end]
        largest = some.abs().max()
        if largest > 0:
            some.copy_((some / largest * 127).round() / 127 * largest)


def newton_schulz_rounding(shape: tuple[int, int]) -> float:
    """How far five steps in fp32 may be from those in fp64, in parts of the result's norm, which is the root of the
    shorter side. X starts with norm one; a rounding of it in the direction of a small singular value grows with it."""
    return float(SIMPLE[0] ** 5 * torch.finfo(torch.float32).eps / min(shape) ** 0.5)


def rule_of(name: str, **options: Any) -> MatrixRule:
    """Without a rate, Muon's is that of torch's class, since ours has no default."""
    options = {"lr": 1e-3, **options} if name in ("muon", "normuon", "adamuon") else options
    return build_matrix_rule({"rule": name, **options_of(name, options)}, HostConfig())


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


def torchs(named: Mapping[str, Tensor], matrices: Collection[str]) -> list[Any]:
    """torch.optim.Muon on ``matrices``, and AdamW on the rest."""
    of_muon, of_adamw = (
        [param for name, param in named.items() if (name in matrices) == is_matrix] for is_matrix in (True, False)
    )
    return [torch.optim.Muon(of_muon, **MUON), torch.optim.AdamW(of_adamw, **ADAMW)]


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
    """An optimizer whose step without decay, from zeros, is the update; then "Cautious Weight Decay": no decay of what
    the update makes larger."""

    def __init__(self, params: list[Tensor], section: dict[str, Any]) -> None:
        super().__init__(params, {key: value for key, value in section.items() if key != "weight_decay_form"})
        self.moved = [torch.zeros_like(param) for param in params]
        inner = {**self.defaults, "weight_decay": 0.0}
        self.inner = elementwise_optimizer(self.moved, inner)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for param, moved in zip(group["params"], self.moved):
            moved.zero_().grad = param.grad
        self.inner.step()
        for param, moved in zip(group["params"], self.moved):
            decays = param * moved.sign() <= 0
            kept = torch.where(decays, 1 - group["lr"] * group["weight_decay"], 1.0)
            param.copy_(param if param.grad is None else param * kept + moved)


def elementwise_optimizer(params: list[Tensor], section: dict[str, Any]) -> torch.optim.Optimizer:
    if "weight_decay_form" in section:
        return Cautious(params, section)
    options = {key: value for key, value in section.items() if key not in ("name", "class")}
    return class_of(ELEMENTWISE_RULES[section["name"]].optimizer)(params, **options)


# The model on one process
def rows_of_all(count: int) -> int:
    """The global batch's, where each of ``count`` shares has rows of its own."""
    return OWN_ROWS if OWN_ROWS % count == 0 else count


def batch_shares(step: int, count: int, rows: int = ROWS) -> list[Rows]:
    tokens, targets = batch(step, rows)
    return list(zip(tokens.chunk(count), targets.chunk(count)))


def full_weights(engine: Any) -> dict[str, Tensor]:
    """The fp32 master weights of a DeepSpeed engine, whole, by name; parameters themselves at stage 0, and those that
    are not trained."""
    get: Callable[[Tensor], Tensor | None] = deepspeed.utils.safe_get_full_fp32_param
    found = {}
    for name, param in engine.module.named_parameters():
        master = None if engine.zero_optimization_stage() == 0 else get(param)
        with deepspeed.zero.GatheredParameters(param, enabled=master is None and hasattr(param, "ds_id")):
            found[name] = (param if master is None else master).detach().clone()
    return found


def precise(matrix: str, clip: object) -> dict[str, Any]:
    """Norms are rounded otherwise than torch's; a bf16 iteration would turn that into 1e-2 of an update."""
    return {"ns_dtype": "float32"} if clip and matrix == "muon" else {}


@contextlib.contextmanager
def newton_schulz_in_float32() -> Iterator[None]:
    """Make torch.optim.Muon iterate in fp32, to the bits of this package's; it has no option for that."""

    def iterate(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        return orthogonalized(grad, [coefficients] * steps)

    with mock.patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", iterate):
        yield


def norm_of(params: Iterable[Tensor]) -> float:
    """Of their gradients, in fp64."""
    grads = [param.grad.flatten().double() for param in params if param.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat(grads))) if grads else 0.0


def clip_factor(limit: float, norm: float, zero_stage: int = 0) -> float:
    """What gradients of that norm are multiplied by, as in torch; from ZeRO's stage 1 on by a formula that rounds once
    more, and at stage 3 in fp64."""
    measured = torch.tensor(norm, dtype=torch.float64 if zero_stage == 3 else torch.float32) + 1e-6
    return float(1 / (measured / limit).clamp(min=1) if zero_stage else (limit / measured).clamp(max=1))


class Reference:
    """One process, with torch.optim.Muon and AdamW or other rules, on whole matrices; where a parameter has ``blocks``,
    each is one. Frozen parameters have no optimizer."""

    def __init__(
        self,
        model: nn.Module | None = None,
        matrix: str = "muon",
        elementwise: str = "adamw",
        clip: float = 0.0,
        apart: Apart = (),
        *,
        muon: dict[str, Any] = MUON,
        adamw: dict[str, Any] = ADAMW,
        matrices: Sequence[str] = MATRICES,
        blocks: Blocks | None = None,
    ) -> None:
        """``muon`` and ``adamw`` are the options of torch's, where those train."""
        self.model, self.clip, self.apart = model or UnevenLM(), clip, apart
        self.norm = 0.0  # of the last step's gradients, before they were clipped
        others = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        chosen = {name: others.pop(name) for name in matrices if self.model.get_parameter(name).requires_grad}
        self.params, of_all = [chosen, others], list(chosen.values())
        if matrix != "muon":
            first = matrix_optimizer(of_all, {**SECTIONS[matrix], **precise(matrix, clip or apart)})
        else:
            first = Separate(chosen, blocks, **muon) if blocks else torch.optim.Muon(of_all, **muon)
        section = {"name": "adamw", **adamw} if elementwise == "adamw" else RULES[elementwise]
        self.optimizers: list[Any] = [first, elementwise_optimizer(list(others.values()), section)]

    def train(self, steps: int | range) -> list[float]:
        """Train on the global batches; the gradient norms."""
        norms = []
        for step in range(steps) if isinstance(steps, int) else steps:
            self.step(batch_shares(step, 1))
            norms.append(self.norm)
        return norms

    def train_on_all(self, steps: int | range, *, parts: int = 1) -> None:
        """Train on what all ranks have where each has its own, in ``parts`` micro-batches."""
        world_size = dist.get_world_size()
        for step in range(steps) if isinstance(steps, int) else steps:
            self.step(batch_shares(step, parts * world_size, OWN_ROWS), world_size)

    def step(
        self, micro_batches: Sequence[Rows] = (), parts: int = 1, factor: float = 1.0, clips: Sequence[float] = ()
    ) -> list[float]:
        """One step on the rows of all ``parts``, or on the gradients that there are, with rates times ``factor``; the
        norms that it clips by. With ``clips``, gradients are multiplied by these, one for each norm: norms that are
        summed in another order round otherwise, and Newton-Schulz multiplies that."""
        for rows in micro_batches:
            (self.model(*rows) / (len(micro_batches) // parts)).backward()
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.div_(parts)
        rest, clipped = dict(self.model.named_parameters()), []
        for _, glob, limit in self.apart:
            clipped.append((limit, [rest.pop(name) for name in list(rest) if fnmatchcase(name, glob)]))
        self.norm = norm_of(rest.values())
        if self.clip:
            clipped.insert(0, (self.clip, list(rest.values())))
        norms = [norm_of(params) for _, params in clipped]
        for number, ((limit, params), norm) in enumerate(zip(clipped, norms)):
            if clips:
                torch._foreach_mul_([param.grad for param in params if param.grad is not None], clips[number])
            else:
                nn.utils.clip_grads_with_norm_(params, limit, torch.tensor(norm))
        for optimizer in self.optimizers:
            with _at(optimizer, factor):
                optimizer.step()
            optimizer.zero_grad()
        return norms

    def difference(self, of: Any) -> float:
        """From weights by name, or from a DeepSpeed engine's."""
        return largest_difference(of if isinstance(of, Mapping) else full_weights(of), self.model)

    def check(self, of: Any, limit: float = 0.0) -> None:
        assert (difference := self.difference(of)) <= limit, difference

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Without its counter."""
        state = self.optimizers[name not in self.params[0]].state[self.model.get_parameter(name)]
        return {key: value for key, value in state.items() if key != "step"}

    def states(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint has of each trained parameter: its master, states and counter, and what its owner keeps."""
        found: dict[str, dict[str, Any]] = {}
        for optimizer, params in zip(self.optimizers, self.params):
            for place, (name, param) in enumerate(params.items()):
                if isinstance(optimizer, PlainRule):
                    state, owner = optimizer.matrices[place].state, optimizer.matrices[place].owner_state
                elif isinstance(optimizer, torch.optim.Muon) or params is self.params[1]:
                    state, owner = optimizer.state[param], {}
                else:
                    counted = {key: value for key, value in optimizer.param_groups[0].items() if key == "step"}
                    state, owner = {}, {"group": counted, "state": dict(optimizer.state[param])}
                found[name] = copy.deepcopy({"fp32": param.detach(), **state, "owner": owner})
        return found


@contextlib.contextmanager
def _at(optimizer: Any, factor: float) -> Iterator[None]:
    if factor == 1.0:
        yield
        return
    if isinstance(optimizer, PlainRule):
        rates = [vars(matrix.rule) for matrix in optimizer.matrices]
    else:
        rates = optimizer.param_groups
    before = [one["lr"] for one in rates]
    for one in rates:
        one["lr"] *= factor
    yield
    for one, rate in zip(rates, before):
        one["lr"] = rate


class Masters(Reference):
    """fp32 masters of a 16-bit model on one process. DeepSpeed rounds the model first and takes the masters from that.
    Gradients of micro-batches add up in fp32, or in the model's dtype; ``predivided`` by their scale, or scaled."""

    def __init__(self, dtype: torch.dtype, in_fp32: bool = True, predivided: bool = False) -> None:
        super().__init__(UnevenLM().to(dtype).float())
        self.low = UnevenLM().to(dtype)
        self.in_fp32, self.predivided = in_fp32, predivided

    def advance(
        self,
        step: int,
        accumulation: int = 1,
        *,
        clips: Sequence[float] = (),
        scale: float = 1.0,
    ) -> float:
        """A step with the loss times ``scale``, until gradients are summed, and with these ``clips``; the norm
        before."""
        sums: dict[Tensor, Tensor] = {}
        before, after = (scale, 1.0) if self.predivided else (1.0, scale)
        for rows in batch_shares(step, accumulation):
            (self.low(*rows) / accumulation * scale).backward()
            for param in self.low.parameters():
                grad = (param.grad.float() if self.in_fp32 else param.grad) / before
                sums[param] = sums[param] + grad if param in sums else grad
                param.grad = None
        for master, param in zip(self.model.parameters(), self.low.parameters()):
            master.grad = sums[param].float() / after
        self.step(clips=clips)
        with torch.no_grad():
            for master, param in zip(self.model.parameters(), self.low.parameters()):
                param.copy_(master)
        return self.norm
