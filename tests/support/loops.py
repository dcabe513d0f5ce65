"""What training loops do, as events that every engine and one process of torch.optim understand.

The loss is linear in the weights, so a gradient is a rank's factor times whole numbers. Factors are multiples of 24:
their means over 1 to 4 ranks and 2 micro-batches are whole numbers as well. No sum rounds in any order, in bf16
neither, and the right difference between an engine and the process is 0.0.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.models import NORM_ROUNDING
from tests.support.references import clip_factor, torchs

SIZES = {"first.weight": 128.0, "last.weight": 64.0, "last.bias": 256.0, "spare.weight": 32.0, "spare.bias": 512.0}
NAMES = tuple(SIZES)
MATRICES = tuple(name for name in NAMES if name.endswith("weight"))
MODULES = {"vision": ("first", "spare"), "language": ("last",)}  # of ModuleOptimizers
# Of a backward pass: each rank's factor, None where a rank runs none; and the parameters that all ranks, or each, use.
Pass = tuple[list[float | None], list[Any]]
LOSS_SCALE = 1024.0


class Invalid(Exception):
    """Pages do not allow this sequence of events."""


def is_of_deepspeed(engine: str) -> bool:
    return engine.partition(" ")[2].isdigit()


def module_of(name: str) -> str:
    return next(module for module, parts in MODULES.items() if name.partition(".")[0] in parts)


def sharers(engine: str, ranks: int, module: str) -> tuple[int, ...]:
    """The ranks that share a module: all, or all but the last, or but the first."""
    if not engine.startswith("modules") or ranks == 1:
        return tuple(range(ranks))
    return tuple(range(ranks - 1) if module == "vision" else range(1, ranks))


def factors_of(one: Pass, rank: int) -> dict[str, float]:
    """By the parameters that a rank uses in a pass."""
    factors, uses = one
    factor = factors[rank]
    return {} if factor is None else dict.fromkeys(uses[rank] if isinstance(uses[0], list) else uses, factor)


class Summed(nn.Linear):
    def forward(self, factors: dict[str, float]) -> Tensor:
        """The sum of parameters, with signs and times ``factors``; of a weight by a matrix product, for autocast."""
        total = torch.zeros(())
        for name, size in factors.items():
            param = self.get_parameter(name)
            signs = (1.0 - 2 * (torch.arange(param.numel()) % 3 == 0).to(param)).view(param.shape) * size
            products = nn.functional.linear(signs, param).diagonal() if param.ndim == 2 else signs * param
            total = total + products.sum()
        return total


class Net(nn.Module):
    """Its loss is the sum of the parameters that a pass uses, times their factors."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.spare = Summed(12, 12, bias=False), Summed(9, 4), Summed(5, 7)
        for part in {"first", "last", "spare"}.difference(parts) if parts else ():
            delattr(self, part)

    def forward(self, factors: dict[str, float]) -> Tensor:
        total = torch.zeros(())
        for part, layer in self.named_children():
            mine = {name.partition(".")[2]: SIZES[name] * factors[name] for name in factors if name.startswith(part)}
            if mine:
                total = total + layer(mine)
        return total


class Loop:
    """What may happen to a model and its optimizer; each method is an event."""

    model: nn.Module
    optimizers: list[Any]
    schedulers: list[Any]

    def __init__(self, engine: str) -> None:
        self.engine, self.frozen = engine, set[str]()
        self.taken = dict[str, Any]()  # parameters by name, with their groups, if they are here
        self.saved: Any = None

    def params(self) -> dict[str, Any]:
        return dict(self.model.named_parameters())

    def groups(self, rule: str = "") -> list[dict[str, Any]]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [group for group in groups if rule in ("", group["rule"])]

    # Between backward and step

    def scale(self, name: str) -> None:
        param = self.params().get(name)
        if param is not None and param.grad is not None:
            param.grad.mul_(0.5)

    def drop(self, name: str) -> None:
        if name in self.params():
            self.params()[name].grad = None

    def clip_value(self, most: float) -> None:
        if any(param.grad is not None for param in self.params().values()):  # torch asks for one
            torch.nn.utils.clip_grad_value_(list(self.params().values()), most)

    # Between steps

    def freeze(self, name: str, on: bool) -> None:
        (self.frozen.add if on else self.frozen.discard)(name)
        if name in self.params():
            self.params()[name].requires_grad_(not on)

    def take_out(self, name: str) -> None:
        self.taken[name] = None
        for group in self.groups():
            for place, param in enumerate(group["params"]):
                if param is self.params().get(name):
                    self.taken[name] = group, group["params"].pop(place)
                    return

    def put_back(self, name: str) -> None:
        if name not in self.taken:
            raise Invalid
        if (found := self.taken.pop(name)) is not None:
            found[0]["params"].append(found[1])

    def reorder(self) -> None:
        for group in self.groups():
            group["params"] = group["params"][::-1]

    def write(self, rule: str, key: str, value: Any) -> None:
        for group in self.groups(rule):
            group[key] = value

    def schedule(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(dict.fromkeys(NAMES, 1.0))

    def edit(self) -> None:
        """Halve all weights, as a loop loads others."""
        self.model.load_state_dict({name: 0.5 * tensor for name, tensor in self.model.state_dict().items()})

    def swap(self) -> None:
        """Evaluate with other weights."""
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.edit()
        self.evaluate()
        self.model.load_state_dict(kept)

    def end(self) -> None:
        """Nothing is held."""


class One(Loop):
    """The truth: one process, with what the pages say of an engine."""

    def __init__(self) -> None:
        super().__init__("plain")
        self.model = Net()
        self.limit = 0.0  # DeepSpeed's gradient_clipping
        self.found: float | None = None  # the norm that an engine has clipped by
        self.make()

    def make(self) -> None:
        self.optimizers = torchs(self.params(), MATRICES)
        self.schedulers = [ExponentialLR(each, 0.5) for each in self.optimizers]

    def go_on(self, engine: str, ranks: int, limit: float) -> None:
        """As the loop on that engine. Under DeepSpeed passes end in a step, and missing gradients are zeros in its own
        storage. Plain PyTorch frees gradients in a step."""
        self.engine, self.ranks, self.limit = engine, ranks, limit
        self.steps, self.fills = is_of_deepspeed(engine), engine.startswith("zero")
        frees = engine.startswith(("plain", "modules")) and engine != "plain, kept"
        self.freed = [n for n in NAMES if frees and not (engine == "modules, mixed" and n.startswith("last"))]
        self.scaled, self.reached, self.saved = False, False, None
        for name in NAMES:
            self.freeze(name, False)
        self.model.zero_grad()

    def groups(self, rule: str = "") -> list[dict[str, Any]]:
        of = {"muon": self.optimizers[:1], "adamw": self.optimizers[1:]}.get(rule, self.optimizers)
        return [group for optimizer in of for group in optimizer.param_groups]

    def grads(self) -> list[Tensor]:
        return [p.grad for group in self.groups() for p in group["params"] if p.grad is not None]

    def weights(self) -> dict[str, Tensor]:
        return self.params()

    def passes(self, passes: list[Pass], how: str = "") -> None:
        for one in passes:
            factors = dict[str, float]()
            for name in NAMES:
                of_ranks = [factors_of(one, rank) for rank in sharers(self.engine, self.ranks, module_of(name))]
                if any(name in each for each in of_ranks):
                    factors[name] = sum(each.get(name, 0.0) for each in of_ranks) / len(of_ranks)
            if factors:
                self.model(factors).backward()
        self.scaled = how == "scaled"
        if self.steps:
            self.step()
            self.clear("both", True)

    def unscale(self) -> None:
        if not self.scaled:
            raise Invalid
        self.scaled = False

    def norm(self, order: float = 2.0) -> float:
        return float(torch.nn.utils.get_total_norm(self.grads(), order))

    def zeros(self) -> int:
        params = [p for group in self.groups() for p in group["params"]]
        return sum(p.numel() if p.grad is None else int((p.grad == 0).sum()) for p in params)

    def clip(self, order: float) -> None:
        """At half of a norm that is a whole number: gradients are multiplied by a half, whatever rounds."""
        if self.norm(order) > LOSS_SCALE:
            for grad in self.grads():
                grad.mul_(0.5)

    def step(self, how: str = "") -> None:
        if self.scaled:
            raise Invalid
        params = [p for group in self.groups() for p in group["params"]]
        for param in params if self.fills else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads, found = self.grads(), self.found
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        self.reached = finite or how != "scaled"  # a GradScaler leaves out the step
        if finite:
            if self.limit and found is not None:
                of_all = [p.grad for p in self.params().values() if p.grad is not None]  # stage 0 knows no groups
                norm = float(torch.nn.utils.get_total_norm(of_all)) if self.engine == "zero 0" else self.norm()
                assert abs(found - norm) <= NORM_ROUNDING * norm, (found, norm)
                stage = int(self.engine.partition(" ")[2]) if self.fills else 0
                torch._foreach_mul_(grads, clip_factor(self.limit, found, stage))
            for optimizer in self.optimizers:
                optimizer.step()
        elif self.engine.startswith("modules"):  # a skipped step drops them
            self.model.zero_grad()

    def again(self) -> str:
        if self.reached and any(self.params()[name].grad is not None for name in self.freed):
            for name in self.freed:  # as after every step that all ranks refuse
                self.drop(name)
            return "refused"
        self.step()
        return "stepped"

    def closure(self, passes: list[Pass]) -> None:
        self.passes(passes)
        self.step()

    def clear(self, whose: str, set_to_none: bool) -> None:
        for each in (*self.optimizers, self.model) if whose == "both" else [self.model]:
            each.zero_grad(set_to_none=set_to_none)
        self.scaled = False

    def wrong(self, edit: str) -> str:
        self.clear("both", True)
        return "refused"

    def reset(self, names: list[str]) -> None:
        for optimizer in self.optimizers:
            for name in names:
                optimizer.state.pop(self.params()[name], None)

    def anew(self) -> None:
        self.make()

    def save(self, way: str, folder: str) -> None:
        """By name: torch's state dicts count parameters in the order in which their groups are."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.groups()]
        states = {
            n: optimizer.state[p]
            for n, p in self.params().items()
            for optimizer in self.optimizers
            if p in optimizer.state
        }
        self.saved = copy.deepcopy((self.model.state_dict(), options, states))

    def load(self, anew: bool) -> None:
        if self.saved is None:
            raise Invalid
        weights, options, states = copy.deepcopy(self.saved)
        self.model.load_state_dict(weights)
        for group, of_group in zip(self.groups(), options):
            group.update(of_group)
        for optimizer in self.optimizers:
            optimizer.state.clear()
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            for name, state in states.items():
                if id(param := self.params()[name]) in held:
                    optimizer.state[param] = state
        if anew:
            self.model.zero_grad()
