"""Plain PyTorch under what users do: their loops, models, norms and precisions, bit for bit as on one process."""

import contextlib
import copy
import dataclasses
import gc
import itertools
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lwopt_backend.runtime.buffers import BucketBuffers, PartsPending
from lwopt_backend.runtime.collectives import TorchCollectives
from tests.support import plain as scenarios
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import Branches, Turn, assert_same, back, exact_sums, optimizer_in, rows, train_ours, truth
from tests.support.ranks import gathered
from tests.support.told import heard

ALL = tuple(scenarios.MODES)
BROADCAST = TorchCollectives.start_broadcast
LAYOUTS = {"auto": 0.0001, "padded": 0.0001, "compact": 0.0005}  # in megabytes, what makes six buckets of ``Branches``


# Models
class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 9)
        self.blocks = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant))
        return self.last(x)


class Transformer(nn.Module):
    """Its head is its embedding, and nn.MultiheadAttention reads its output projection's weight without calling it."""

    NO_MATRIX = "embedding.weight"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.lm_head = nn.Linear(6, 13, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding((x.abs() * 4).long().clamp(max=12))
        return self.lm_head(x + self.attention(x, x, x)[0])


class Convolutions(nn.Module):
    """Convolutions and a batch norm in front of matrices, and a parameter without elements."""

    NO_MATRIX = "nothing"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(1, 3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.convolution(x[:, None])).flatten(1)) + self.nothing.sum()


class HeadFirst(nn.Module):
    """Registers its layers in backward order; a forward pass uses those between in this or in the other order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(9, 5)
        self.between = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(6))
        self.first = nn.Linear(6, 9)

    def forward(self, x: Tensor, turned: bool = False) -> Tensor:
        x = self.first(x)
        for layer in self.between[:: 1 if turned else -1]:
            x = torch.tanh(layer(x))
        return self.last(x)


@dataclasses.dataclass
class Output:
    value: Tensor
    note: str


def structured() -> nn.Module:
    model = Branches()
    model.register_forward_hook(lambda _, given, y: {"first": Output(y[:4], "note"), "rest": (y[4:], 3)})
    return model


# Loops: what a rank does in a step
def gradient_penalty(turn: Turn) -> None:
    x = turn.rows().requires_grad_()
    output = turn.model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (scenarios.loss_of(output) + grad.square().mean()).backward()


def looks_in_between(turn: Turn) -> None:
    for look in (True, False, True):
        if not look:
            turn.back()
        elif turn.rank == 0:
            torch.autograd.grad(turn.loss(7), [turn.model.first.weight, turn.model.last.bias])


def nested_no_sync(turn: Turn) -> None:
    with turn.no_sync():
        with turn.no_sync():
            turn.back()
        turn.back(1, use="right")
    turn.back(2, use="left")


def evaluates_and_calls(turn: Turn) -> None:
    with torch.no_grad():
        turn.model.eval()(turn.rows(5))
    turn.model.train()(turn.rows(6))  # and one whose graph is dropped
    turn.back()


def hook_of_the_user(turn: Turn) -> None:
    handle = turn.model.left.weight.register_hook(lambda grad: grad * 2)
    turn.back()
    handle.remove()


def frozen_for_a_step(turn: Turn) -> None:
    turn.model.left.requires_grad_(turn.step != 1)
    turn.back()


def second_backward(turn: Turn) -> None:
    turn.back()
    turn.back(1, use="left")


def one_graph_twice(turn: Turn) -> None:
    output = turn.model(turn.rows())
    scenarios.loss_of(output).backward(retain_graph=True)
    output.abs().mean().backward()


def forwards_then_backwards(turn: Turn) -> None:
    first, second = turn.loss(0), turn.loss(1)
    second.backward()
    first.backward()


def without_the_model(turn: Turn) -> None:
    x = turn.rows().requires_grad_()
    for block in (turn.model.first, *turn.model.blocks):
        x = torch.tanh(checkpoint(block, x, use_reentrant=True))
    x.square().mean().backward()


def on_another_thread(turn: Turn) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(turn.back).result()


def structured_pass(turn: Turn) -> None:
    output = turn.model(turn.rows())
    scenarios.loss_of(torch.cat([output["first"].value, output["rest"][0]])).backward()


LOOPS: dict[str, tuple[scenarios.Scenario, Callable[[], nn.Module], tuple[str, ...]]] = {
    "no rank uses a branch": (lambda t: t.back(use="left" if t.step % 2 else "right"), Branches, ALL),
    "one rank uses a branch": (lambda t: t.back(use="left" if t.rank else "right"), Branches, ALL),
    "one rank has nothing for some": (lambda t: t.back(use="neither" if t.rank else "both"), Branches, ALL),
    "one rank has no pass": (lambda t: t.back() if t.rank != t.step % 2 else None, Branches, ALL),
    "no rank has a pass in one step": (lambda t: t.back() if t.step != 1 else None, Branches, ALL),
    "a module used twice": (
        lambda t: scenarios.loss_of(t.model(t.rows()) + t.model(t.rows().flip(0), use="left")).backward(),
        *(Branches, ALL),
    ),
    "a gradient penalty": (gradient_penalty, Branches, ALL),
    "autograd.grad in between on one rank": (looks_in_between, Branches, ALL),
    "nested no_sync": (nested_no_sync, Branches, ALL),
    "evaluation, and calls without gradients": (evaluates_and_calls, Branches, ALL),
    "a hook of the user": (hook_of_the_user, Branches, ALL),
    "a layer is frozen for a step": (frozen_for_a_step, Branches, ("plain",)),
    "a second backward pass adds": (second_backward, Branches, scenarios.MODES),
    "several passes through one graph": (one_graph_twice, Branches, scenarios.MODES),
    "two forwards, then two backwards": (forwards_then_backwards, Branches, scenarios.MODES),
    "the last micro-batch in no_sync": (scenarios.micro_batches(True, False), Branches, scenarios.MODES),
    "checkpoints": (lambda t: t.back(reentrant=False), Checkpointed, ALL),
    "reentrant checkpoints": (lambda t: t.back(reentrant=True), Checkpointed, ALL),
    "reentrant checkpoints under no_sync": (scenarios.micro_batches(False, True, reentrant=True), Checkpointed, ALL),
    "reentrant checkpoints without the model": (without_the_model, Checkpointed, scenarios.MODES),
    "a pass on another thread": (on_another_thread, Branches, ALL),
    "a tied embedding and attention": (Turn.back, Transformer, ALL),
    "a structured output": (structured_pass, structured, ALL),
    "convolutions": (Turn.back, Convolutions, ALL),
    "layers registered in backward order": (Turn.back, HeadFirst, scenarios.MODES),
    "ranks use layers in other orders": (lambda t: t.back(turned=(t.step + t.rank) % 2 == 1), HeadFirst, ALL),
    "another order, accumulated": (scenarios.micro_batches(False, True), HeadFirst, ALL),
}
# With several passes, a third of the sum is not the sum of thirds.
CELLS = [(3 if modes == ALL else 2, loop) for loop, (_, _, modes) in LOOPS.items()]


@on_ranks()
@pytest.mark.parametrize(("ranks", "loop"), CELLS, indirect=["ranks"])
def test_every_loop_and_model_equals_one_process_in_every_mode(loop: str) -> None:
    """Modes have a layout in turn."""
    scenario, build, modes = LOOPS[loop]
    for mode, (layout, size) in zip(modes, itertools.cycle(LAYOUTS.items())):
        scenarios.assert_trains_exactly(scenario, build, mode, layout=layout, bucket_mb=size)


# Other events around a step
@pytest.mark.parametrize("mode", ["plain", "lazy return"])
@on_ranks(2)
def test_tasks_go_on_with_the_thread_of_whoever_has_reason_to(mode: str) -> None:
    """autograd runs hooks on a thread of each GPU, here on that of the pass: it begins every reduction, and the step
    ends the last ones. The step begins the return of new values; it ends that, or the next pass does."""
    (model, optimizer), seen = scenarios.made(mode=mode), dict[str, set[bool]]()

    def noted(what: str) -> Any:
        done = getattr(BucketBuffers, what)

        def run(buffers: BucketBuffers, *args: Any) -> Any:
            seen.setdefault(what, set()).add(threading.current_thread() is threading.main_thread())
            return done(buffers, *args)

        return mock.patch.object(BucketBuffers, what, run)

    with noted("launch"), noted("settle"), noted("send_values"), noted("receive_values"):
        train_ours(model, optimizer, 3, on_another_thread)
    in_step, in_pass = {True}, {False}
    assert seen["launch"] == in_pass and seen["settle"] == seen["send_values"] == in_step
    assert seen["receive_values"] == (in_step if mode == "plain" else in_pass | in_step), "also synchronize()"
    assert_same(model, truth(3))


@on_ranks(2)
def test_two_threads_that_wait_for_the_same_values_are_an_error() -> None:
    """As a thread that writes checkpoints, and the loop. Python's words for it were "generator already executing"."""
    model, optimizer = scenarios.made(mode="lazy return")
    scenarios.back(model, 0)
    optimizer.step()
    waits, goes_on, receive = threading.Event(), threading.Event(), BucketBuffers.receive_values

    def slowly(buffers: BucketBuffers, returning: PartsPending) -> None:
        waits.set()
        goes_on.wait()
        receive(buffers, returning)

    with mock.patch.object(BucketBuffers, "receive_values", slowly), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(model.state_dict)
        waits.wait()
        try:
            with pytest.raises(RuntimeError, match="expected one thread to wait for the values, found two; call"):
                model.state_dict()
        finally:
            goes_on.set()
        reading.result()
    optimizer.zero_grad()
    assert_same(model, truth(1))


@on_ranks(2)
def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    model, optimizer = scenarios.made()
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses.append(Turn(model, len(losses), dist.get_rank()).loss())
        losses[-1].backward()
        return losses[-1]

    for _ in range(3):
        assert optimizer.step(closure) is losses[-1]
    assert len(losses) == 3
    assert_same(model, truth(3))


@on_ranks(2, 3)
def test_a_pass_after_the_norm_was_asked_for_counts() -> None:
    """What comes after it, even under no_sync, also belongs to the step."""

    def asks(turn: Turn) -> None:
        turn.back()
        optimizer.grad_norm()
        if turn.step:
            with turn.no_sync():
                turn.back(1)
        else:
            turn.back(1)

    model, optimizer = scenarios.made()
    train_ours(model, optimizer, 3, asks)
    assert_same(model, truth(3, scenario=scenarios.micro_batches(True, True)))


@on_ranks(2)
def test_a_second_optimizer_may_follow_the_first() -> None:
    """Gradients are the model's own in between."""
    model, first = scenarios.made()
    train_ours(model, first, 1)
    del first
    gc.collect()
    back(model, 0)
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    expected = exact_sums(Branches())
    expected.load_state_dict({name: param.detach().clone() for name, param in model.named_parameters()})
    train_ours(model, optimizer_in(model), 1)
    scenarios.mean_gradients(expected, Turn.back, 0)
    scenarios.step_all(scenarios.optimizers_of(expected))
    assert_same(model, expected)


@on_ranks(2)
def test_gradients_that_nobody_averages_are_told_once() -> None:
    """Of torch's optimizer for the rest of a model, whose weights would drift apart; not of a second one like this."""
    for beside in ("torch's", "ours", "no"):
        model = Branches()
        rest = [*model.last.parameters()]
        first = optimizer_in(model, params=[p for p in model.parameters() if not any(p is one for one in rest)])
        if beside == "no":
            model.last.requires_grad_(False)
        other = optimizer_in(model, params=rest, allow_no_matrix=True) if beside == "ours" else torch.optim.SGD(rest)
        with heard() as said:
            for step in range(2):
                back(model, step)
                first.step()
                other.step()
        told = [text for text in said if "DDP would average" in text]
        is_due = beside == "torch's" and dist.get_rank() == 0
        assert len(told) == is_due, said
        assert (
            not is_due or "2 parameter(s) that no LayerWiseOptimizer trains have a gradient, 'last.weight'" in told[0]
        )
        first.zero_grad()
        del first, other


@on_ranks(2)
def test_weights_and_buffers_begin_as_the_first_ranks() -> None:
    """Weights, frozen ones and all kinds of buffers begin as the first rank's. A backbone that only the first rank has
    loaded. Two hundred tensors are one broadcast, as in DDP."""
    frozen, rank = nn.Sequential(*(nn.Linear(3, 5) for _ in range(100))), dist.get_rank()
    model = nn.Sequential(frozen.requires_grad_(False), nn.Linear(5, 4), nn.BatchNorm1d(4))
    frozen[0].weight = nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)  # not contiguous
    for number, dtype in enumerate([torch.bool, torch.int64, torch.float64, torch.bfloat16, torch.float8_e4m3fn]):
        model.register_buffer(f"buffer {number}", torch.full((number,), rank).to(dtype), persistent=False)
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for tensor in found.values():
            tensor.fill_(rank)
    with mock.patch.object(TorchCollectives, "start_broadcast", autospec=True, side_effect=BROADCAST) as broadcast:
        optimizer_in(model)
    assert [name for name, tensor in found.items() if tensor.float().ne(0).any()] == []
    sent = [call.args[1].dtype for call in broadcast.call_args_list]
    assert sent.count(torch.uint8) == 1 and len(found) > 200


class Normed(nn.Module):
    """With BatchNorm, whose statistics are of this rank's rows, and a buffer that counts them. ``seen`` has its buffers
    at the beginning of every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 5)
        self.seen: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append([buffer.clone() for buffer in self.buffers()])
        for name in ("wide", "flags"):
            if hasattr(self, name) and self.training:
                getattr(self, name).add_((x.sum() > 0).to(getattr(self, name).dtype))
        return self.last(self.norm(self.first(x)))


@on_ranks(2)
@pytest.mark.parametrize("mode", ["plain", "kept gradients", "lazy return"])
def test_buffers_are_those_of_ddp(mode: str) -> None:
    """Fixed: Buffers of BatchNorm differed between ranks. In passes that are reduced and under no_sync, in evaluations,
    and of buffers that are added later."""
    rank, (model, optimizer) = dist.get_rank(), scenarios.made(Normed, mode)
    inside = exact_sums(Normed())
    wrapped, theirs = DistributedDataParallel(inside), scenarios.optimizers_of(inside)
    with mock.patch.object(TorchCollectives, "start_broadcast", autospec=True, side_effect=BROADCAST) as broadcast:
        for step in range(3):
            for part, apart in enumerate([False, True, False]):
                for trained, no_sync in ((model, optimizer.no_sync), (wrapped, wrapped.no_sync)):
                    with no_sync() if apart else contextlib.nullcontext():
                        Turn(trained, step, rank).back(part)
            optimizer.step()
            optimizer.synchronize()
            optimizer.zero_grad()
            scenarios.step_all(theirs)
            for trained in (model, wrapped):
                with torch.no_grad():
                    trained.eval()(rows(step, rank, 9))
                trained.train()
            for each in (model, inside) if step == 0 else ():
                each.register_buffer("wide", torch.full((3,), rank, dtype=torch.float64))
                each.register_buffer("flags", torch.zeros(2, dtype=torch.int8))
    assert len(model.seen) == len(inside.seen) == 12
    for ours, others in zip(model.seen, inside.seen):
        assert len(ours) == len(others) and all(map(torch.equal, ours, others))
    nbytes = [sum(buffer.nbytes for buffer in model.seen[number]) for number in (0, -1)]
    sent = 2 * nbytes[0] + 4 * nbytes[1] if rank == 0 else 0
    assert broadcast.call_count == 6 and optimizer.traffic()["buffers"] == sent


@on_ranks(2)
def test_buffers_may_stay_each_ranks_own() -> None:
    model = Normed()
    model.norm.running_mean.fill_(dist.get_rank())
    optimizer = optimizer_in(model, broadcast_buffers=False)
    assert float(model.norm.running_mean[0]) == dist.get_rank()
    back(model, 0)
    optimizer.step()
    assert len({str(of_rank) for of_rank in gathered(model.norm.running_mean.tolist())}) == 2


@on_ranks(2)
@pytest.mark.parametrize("mode", ["plain", "no overlap"])
def test_buffer_changed_before_the_step_keeps_its_value(mode: str) -> None:
    """A buffer that a loop changes before the step keeps its value. As a router's bias is changed that balances its
    experts; its ranks get no value from before. At last, an evaluation on one rank finds the buffers of the first."""
    model = exact_sums(Normed())
    model.register_buffer("bias", torch.zeros(3))
    optimizer = optimizer_in(model, mode)
    for step in range(3):
        back(model, step)
        model.bias += 1
        optimizer.step()
        assert gathered(model.bias.tolist()) == [[step + 1.0] * 3] * 2
    if dist.get_rank() == 1:
        model.eval()(rows(0, 0))
    assert gathered(model.norm.running_mean.tolist())[0] == model.norm.running_mean.tolist()


@on_ranks(2)
def test_channels_last_weight_trains_with_a_warning() -> None:
    """Fixed: A channels_last weight became contiguous without a word. A channels-last weight is contiguous, and trains
    alike with a warning."""
    found, images = [], torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 3)
        model = nn.Sequential(*layers).to(memory_format=order)
        with warnings.catch_warnings(record=True) as told:
            optimizer = optimizer_in(model, atoms={})
        said = [str(each.message) for each in told if "'0.weight' and 1 more parameter(s) had" in str(each.message)]
        assert len(said) == (dist.get_rank() == 0 and order == torch.channels_last)
        model(images).square().mean().backward()
        optimizer.step()
        found.append(model)
    assert_same(*found)
    assert found[1][:2](images.to(memory_format=order)).is_contiguous(memory_format=order)


# Parameters that are still on their way
def lazily(build: type[nn.Module] = Branches, **options: Any) -> tuple[Any, Any, Any]:
    model, optimizer = scenarios.made(build, "lazy return", **options)
    back(model, 0)
    optimizer.step()
    return model, optimizer, truth(1, build)


def of_last(named: Any) -> dict[str, Tensor]:
    return {f"last.{name}": tensor for name, tensor in dict(named).items()}


@on_ranks(2)
def test_reading_after_a_step_gives_new_parameters() -> None:
    """Reading a model right after a step gives its new parameters."""
    reads: dict[str, Callable[[Any], dict[str, Tensor]]] = {
        "state_dict": lambda model: model.state_dict(),
        "a submodule's": lambda model: of_last(model.last.state_dict()),
        "copied": lambda model: dict(copy.deepcopy(model).named_parameters()),
        "a submodule copied": lambda model: of_last(copy.deepcopy(model.last).named_parameters()),
        "pickled": lambda model: dict(pickle.loads(pickle.dumps(model)).named_parameters()),
    }
    for way, read in reads.items():
        model, _optimizer, expected = lazily()
        named = dict(expected.named_parameters())
        assert all(torch.equal(tensor, named[name]) for name, tensor in read(model).items()), way


@on_ranks(2)
def test_evaluation_right_after_a_step_uses_the_new_parameters() -> None:
    for build in (Branches, Transformer):
        model, optimizer, expected = lazily(build, bucket_mb=1e-6)  # a bucket for every matrix
        with torch.no_grad():
            assert torch.equal(model.eval()(rows(9, 0)), copy.deepcopy(expected).eval()(rows(9, 0))), build
    assert not optimizer.core.manager.returning, "the Transformer uses them all"


@on_ranks(2)
@pytest.mark.parametrize("mode", ["plain", "lazy return"])
def test_what_the_next_forward_pass_needs_first_returns_first(mode: str) -> None:
    model, optimizer = scenarios.made(Branches, mode, bucket_mb=1e-6)
    manager, sent = optimizer.core.manager, []
    send, manager.send_values = manager.send_values, lambda number: sent.append(number) or send(number)
    back(model, 0)
    optimizer.step()
    assert len(sent) > 2 and sent == [*manager.order][:: -1 if mode == "lazy return" else 1]
    optimizer.synchronize()
    assert_same(model, truth(1))


@on_ranks(3)
def test_buckets_leave_in_the_first_ranks_order() -> None:
    """Buckets leave in the order in which the first rank filled them. Other ranks fill them in the other order, and the
    first has no gradient for two at first, which leave last. On the first rank, all but the last leave before the last
    gradient."""
    model, optimizer = scenarios.made(HeadFirst, bucket_mb=1e-6, layout="compact")
    manager, rank, left = optimizer.core.manager, dist.get_rank(), list[int]()
    launch, number_of = BucketBuffers.launch, {id(bucket): n for n, bucket in enumerate(manager.buckets)}
    during: list[int] = []
    model.first.weight.register_hook(lambda grad: during.append(len(left)))

    def leaves(bucket: BucketBuffers) -> PartsPending:
        left.append(number_of[id(bucket)])
        return launch(bucket)

    with mock.patch.object(BucketBuffers, "launch", leaves):
        for param in model.last.parameters():
            param.requires_grad_(rank > 0)
        Turn(model, 0, rank).back(turned=rank > 0)
        filled = manager.filled
        optimizer.step()
        registered, (first, *_) = sorted(left), gathered(filled)
        assert left == registered and [*manager.order] == [*first, *(n for n in left if n not in first)] != registered
        assert len(first) == len(left) - 2
        model.requires_grad_(True)
        left.clear()
        Turn(model, 1, rank).back(turned=rank > 0)
        optimizer.step()
    assert left == [*manager.order] and (rank > 0 or during[1] >= len(first) - 1), during


@on_ranks(2)
def test_a_copy_of_the_model_is_trained_by_itself() -> None:
    model, optimizer, _ = lazily()
    other = copy.deepcopy(model)
    back(other, 5)
    assert other.first.weight.grad is not None
    other.zero_grad()
    optimizer_of_other = optimizer_in(other)
    for net, its in ((other, optimizer_of_other), (model, optimizer)):
        train_ours(net, its, (1, 2))
    assert_same(model, truth(3))
    assert largest_difference(model, other) > 0.0


@on_ranks(2)
def test_weights_used_by_hand_need_synchronize() -> None:
    """Weights used by hand are there after synchronize, and named until then."""
    model, optimizer, expected = lazily()
    output = nn.functional.linear(rows(1, 0), model.first.weight)
    with pytest.raises(
        RuntimeError, match=r"'first.weight' was used before its new value had arrived.*synchronize\(\)"
    ):
        output.sum().backward()
    model.zero_grad()
    optimizer.synchronize()
    x = torch.ones(1, 6)
    by_hand, theirs = (nn.functional.linear(x, net.first.weight, net.first.bias) for net in (model, expected))
    assert torch.equal(by_hand, theirs)


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("mode", ["lazy return", "kept gradients"])
def test_compiled_model_equals_one_process(mode: str) -> None:
    """A compiled model that the optimizer is given equals one process."""
    torch._dynamo.reset()
    model = exact_sums(Branches())
    compiled: Any = torch.compile(model, backend="eager")
    train_ours(compiled, optimizer_in(compiled, mode), 3)
    assert_same(model, truth(3))


@pytest.mark.parametrize("mode", scenarios.MODES)
def test_one_process_without_torch_distributed_equals_torch(mode: str) -> None:
    assert not dist.is_initialized()
    model, expected = Branches(), Branches()
    ours = optimizer_in(model, mode)
    for optimizers, net in (([ours], model), (scenarios.optimizers_of(expected), expected)):
        for step in range(3):
            Turn(net, step, 0).back()
            scenarios.step_all(optimizers)
    ours.synchronize()
    assert_same(model, expected)
