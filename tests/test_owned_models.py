"""What models are made of, and what is done with them beside training, on owned storage."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.owned import difference, exact_sums, optimizer_for
from tests.owned_scenarios import BUCKET_MB, Branches, differences, loss_of, rows, train_ours, truth
from tests.ranks import RankPool

MODES = ("plain", "kept gradients", "lazy return", "step in backward")


def one_pass(model, no_sync, step, rank):
    loss_of(model(rows(step, rank))).backward()


class Tied(nn.Module):
    """A token embedding that is the output head too."""

    MATRICES = ("middle.weight",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 6)
        self.middle = nn.Linear(6, 6)
        self.lm_head = nn.Linear(6, 13, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.middle(self.embedding((x.abs() * 4).long()))))


class Attention(nn.Module):
    """nn.MultiheadAttention reads its output projection's weight without calling it."""

    MATRICES = ("attention.in_proj_weight", "attention.out_proj.weight", "last.weight")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.attention(x[None], x[None], x[None])[0][0])


@dataclasses.dataclass
class Output:
    value: Tensor
    note: str


class Structured(Branches):
    """Returns a dictionary with a dataclass and a tuple."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = super().forward(x)
        return {"first": Output(y[:4], "note"), "rest": (y[4:], 3)}


class Convolutions(nn.Module):
    """Convolutions and a batch norm in front of matrices, and a parameter without elements."""

    MATRICES = ("last.weight",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(1, 3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.convolution(x[:, None])).flatten(1)) + self.nothing.sum()


class Frozen(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.first.bias.requires_grad_(False)


def structured_pass(model, no_sync, step, rank):
    output = model(rows(step, rank))
    first = output["first"]
    loss_of(torch.cat([first.value, output["rest"][0]])).backward()


MODELS = {Tied: one_pass, Attention: one_pass, Structured: structured_pass, Convolutions: one_pass, Frozen: one_pass}


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_every_model_equals_one_process(ranks: RankPool, build: type[nn.Module], layout: str) -> None:
    assert ranks.run(differences, MODELS[build], build, modes=MODES, layout=layout) == [dict.fromkeys(MODES, 0.0)] * 2


class Experts(nn.Module):
    """Matrices stacked in one parameter, or apart."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        matrices = list(torch.randn(3, 6, 8) / 3)
        self.weight = nn.Parameter(torch.stack(matrices)) if stacked else None
        self.apart = nn.ParameterList([] if stacked else [nn.Parameter(matrix) for matrix in matrices])

    def stack(self) -> Tensor:
        return self.weight if self.weight is not None else torch.stack(list(self.apart))


class Mixture(nn.Module):
    def __init__(self, stacked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(stacked)
        self.gate = nn.Linear(6, 3)
        self.last = nn.Linear(8, 5)
        self.MATRICES = ["gate.weight", "last.weight"] + ([] if stacked else [f"experts.apart.{i}" for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.einsum("bi,eij,be->bj", x, self.experts.stack(), self.gate(x).softmax(-1)))


def stack_is_equal(layout: str) -> list[bool]:
    model = exact_sums(Mixture(stacked=True))
    train_ours(model, optimizer_for(model, bucket_mb=BUCKET_MB, layout=layout), one_pass, 3)
    expected = truth(lambda: Mixture(stacked=False), one_pass, 3, dist.get_world_size())
    others = [
        torch.equal(model.get_parameter(name), p) for name, p in expected.named_parameters() if "apart" not in name
    ]
    return [torch.equal(model.experts.stack(), expected.experts.stack()), *others]


@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_a_stack_of_experts_equals_matrices_of_their_own(ranks: RankPool, layout: str) -> None:
    assert ranks.run(stack_is_equal, layout) == [[True] * 5] * 2


def turned_is_equal() -> list[bool]:
    """transformers' Conv1D stores (inputs, outputs); torch.nn.Linear, (outputs, inputs), is the truth."""
    from transformers.pytorch_utils import Conv1D

    def build(turned: bool) -> nn.Module:
        torch.manual_seed(0)
        weight, last = torch.randn(9, 6), nn.Linear(9, 5)
        layer = Conv1D(9, 6) if turned else nn.Linear(6, 9)
        layer.weight.data, layer.bias.data = (weight.T.clone() if turned else weight), torch.zeros(9)
        model = nn.Sequential(layer, nn.Tanh(), last)
        model.MATRICES = ["0.weight", "2.weight"]
        return model

    model = exact_sums(build(True))
    train_ours(model, optimizer_for(model, bucket_mb=BUCKET_MB), one_pass, 3)
    expected = truth(lambda: build(False), one_pass, 3, dist.get_world_size())
    return [torch.equal(model[0].weight.T, expected[0].weight), torch.equal(model[2].weight, expected[2].weight)]


def test_a_matrix_that_is_stored_transposed_is_updated_as_torch_updates_linear(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    assert ranks.run(turned_is_equal) == [[True, True]] * 2


# Parameters that are still on their way


def lazily(model: nn.Module | None = None) -> tuple[nn.Module, Any, nn.Module]:
    """A model just after a step, its parameters on their way here; its optimizer; what they must be."""
    model = exact_sums(model or Branches())
    optimizer = optimizer_for(model, bucket_mb=BUCKET_MB, overlap_param_gather=True)
    one_pass(model, None, 0, dist.get_rank())
    optimizer.step()
    return model, optimizer, truth(type(model), one_pass, 1, dist.get_world_size())


def reads_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict()


def reads_a_submodules_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {f"last.{name}": tensor for name, tensor in model.last.state_dict().items()}


def saves_state_dict(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def copies(model: nn.Module) -> dict[str, Tensor]:
    return dict(copy.deepcopy(model).named_parameters())


def copies_a_submodule(model: nn.Module) -> dict[str, Tensor]:
    return {f"last.{name}": tensor for name, tensor in copy.deepcopy(model.last).named_parameters()}


def copies_a_copy(model: nn.Module) -> dict[str, Tensor]:
    return dict(copy.deepcopy(copy.deepcopy(model)).named_parameters())


def pickles(model: nn.Module) -> dict[str, Tensor]:
    return dict(pickle.loads(pickle.dumps(model)).named_parameters())


READS = [
    reads_state_dict,
    reads_a_submodules_state_dict,
    saves_state_dict,
    copies,
    copies_a_submodule,
    copies_a_copy,
    pickles,
]


def read_after_step(read: Callable[[nn.Module], dict[str, Tensor]]) -> bool:
    model, _, expected = lazily()
    named = dict(expected.named_parameters())
    return all(torch.equal(tensor, named[name]) for name, tensor in read(model).items())


@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_reading_a_model_right_after_step_gives_its_new_parameters(
    ranks: RankPool, read: Callable[[nn.Module], dict[str, Tensor]]
) -> None:
    assert ranks.run(read_after_step, read) == [True, True]


def evaluated_after_step(build: type[nn.Module]) -> bool:
    model, _, expected = lazily(build())
    with torch.no_grad():
        return torch.equal(model.eval()(rows(9, 0)), expected.eval()(rows(9, 0)))


@pytest.mark.parametrize("build", [Branches, Tied, Attention], ids=lambda build: build.__name__)
def test_evaluation_right_after_step_uses_the_new_parameters(ranks: RankPool, build: type[nn.Module]) -> None:
    assert ranks.run(evaluated_after_step, build) == [True, True]


def copy_is_apart() -> list[bool]:
    """A copy's gradients are its own, and it can have an optimizer of its own; ours trains on as if there were none."""
    model, optimizer, _ = lazily()
    other = copy.deepcopy(model)
    loss_of(other(rows(5, 0))).backward()
    found = [other.first.weight.grad is not None]
    other.zero_grad()
    second = optimizer_for(other, bucket_mb=BUCKET_MB)
    for net, its in ((other, second), (model, optimizer)):
        for step in range(1, 3):
            one_pass(net, None, step, dist.get_rank())
            its.step()
        its.synchronize()
    return [*found, difference(model, truth(Branches, one_pass, 3, 2)) == 0.0, difference(model, other) > 0.0]


def test_a_copy_of_the_model_is_trained_by_itself(ranks: RankPool) -> None:
    assert ranks.run(copy_is_apart) == [[True] * 3] * 2


class ByHand(Branches):
    """Uses a layer's weight without calling the layer, though it was called before."""

    by_hand = False

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.first.weight, self.first.bias) if self.by_hand else self.first(x)
        x = self.middle(torch.tanh(x))
        return self.last(self.norm(self.left(x) + self.right(x)))


def used_by_hand(synchronize: bool) -> float:
    model, optimizer, expected = lazily(ByHand())
    if synchronize:
        optimizer.synchronize()
    model.by_hand = True
    with torch.no_grad():
        return float((model(rows(1, 0)) - expected(rows(1, 0))).abs().max())


def test_weights_that_are_used_by_hand_are_there_after_synchronize(ranks: RankPool) -> None:
    assert ranks.run(used_by_hand, True) == [0.0, 0.0]


def trained_by_hand() -> None:
    model, optimizer, _ = lazily(ByHand())
    output = nn.functional.linear(rows(1, 0), model.first.weight)
    output.sum().backward()


def test_training_with_a_weight_that_has_not_come_is_an_error_that_names_it(ranks: RankPool) -> None:
    for error in ranks.errors(trained_by_hand):
        assert "'first.weight' was used before its new value had come" in error and "synchronize()" in error
