"""Where AdamW trains everything, param groups have the keys of torch.optim.AdamW's. So state dicts go from one
optimizer to the other: FSDP2's nested and flat, plain PyTorch's by torch.distributed.checkpoint. The sequence is that
of torch's own tests of ``torch.distributed.checkpoint.state_dict``: states are compared after some steps, loaded into a
fresh optimizer, and trained on."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.engines.buffers.partial import PartialTensor
from lwopt_backend.integrations import fsdp2
from tests.support.checkpoint_contents import same
from tests.support.fsdp2 import shard, weights_of, whole
from tests.support.models import UnevenLM, batch
from tests.support.on_ranks import on_ranks

ADAMS = "param group 0: 'decoupled_weight_decay' is False, but AdamW here has True only"
GIVEN: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
OPTIONS = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "full, on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "flat, full": {"flatten_optimizer_state_dict": True, "full_state_dict": True},
}


def torchs() -> tuple[nn.Module, torch.optim.AdamW]:
    model = UnevenLM()
    return model, torch.optim.AdamW(model.parameters(), **GIVEN)


def ours_on(engine: str, **options: Any) -> tuple[nn.Module, Any]:
    settings = {"elementwise": {"name": "adamw", **GIVEN, **options}, "exclude": ["*"], "allow_no_matrix": True}
    if engine == "fsdp2":
        model = shard("rows", "fp32").model
        return model, fsdp2.LayerWiseOptimizer(model, **settings, report=False)
    model = UnevenLM()
    return model, LayerWiseOptimizer(model, **settings, bucket_mb=0.004, report=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same rows on every rank, so that the mean gradient of two has the bits of one's."""
    for step in steps:
        model(*batch(step, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def like(state_dict: Any, theirs: Any) -> Any:
    """torch's whole tensors cut as this package's are, as a checkpoint's reader does."""
    if isinstance(theirs, DTensor):
        return torch.distributed.tensor.distribute_tensor(state_dict, theirs.device_mesh, theirs.placements)
    if isinstance(theirs, dict):
        return {key: like(value, theirs.get(key)) for key, value in state_dict.items()}
    return copy.deepcopy(state_dict)


@pytest.mark.parametrize("form", OPTIONS)
@on_ranks(2)
def test_torchs_sequence(form: str) -> None:
    """States are equal, and both go on like a run of torch's that was not broken, each from the other's state."""
    options, in_flat = StateDictOptions(**OPTIONS[form]), StateDictOptions(flatten_optimizer_state_dict="flat" in form)
    (model, adamw), (our_model, ours) = torchs(), ours_on("fsdp2")
    train(model, adamw, range(3))
    train(our_model, ours, range(3))
    saved = copy.deepcopy(get_optimizer_state_dict(model, adamw, options=options))
    assert same(whole_of(get_optimizer_state_dict(our_model, ours, options=options)), whole_of(saved))
    now = weights_of(model)
    train(model, adamw, range(3, 6))

    # torch's into this package's. What is flat and full, torch cannot cut, for its own AdamW either.
    next_model, fresh = ours_on("fsdp2")
    dcp_state.set_model_state_dict(next_model, dict(now), options=StateDictOptions(full_state_dict=True))
    how = in_flat if "flat" in form else StateDictOptions(full_state_dict=True, broadcast_from_rank0="CPU" in form)
    if "flat" in form:
        saved = like(saved, get_optimizer_state_dict(next_model, fresh, options=in_flat))
    set_optimizer_state_dict(next_model, fresh, saved, options=how)

    # This package's into torch's.
    other, other_adamw = torchs()
    other.load_state_dict(now)
    given = whole_of(get_optimizer_state_dict(our_model, ours, options=in_flat))
    set_optimizer_state_dict(other, other_adamw, given, options=in_flat)
    for one, optimizer in ((next_model, fresh), (other, other_adamw)):
        train(one, optimizer, range(3, 6))
        assert same(weights_of(one), weights_of(model))


def whole_of(value: Any) -> Any:
    """What is sharded is whole, and plain PyTorch's pieces are their boxes."""
    if isinstance(value, dict):
        return {key: whole_of(entry) for key, entry in value.items()}
    if isinstance(value, PartialTensor):
        return value.boxes
    return whole(value) if isinstance(value, Tensor) else value


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


@on_ranks(2)
def test_owned_storage_loads_torchs_whole_state(tmp_path: Path) -> None:
    """Plain PyTorch takes torch's whole state, and gives its own in a checkpoint."""
    (model, adamw), (our_model, ours), (next_model, fresh) = torchs(), ours_on("owned"), torchs()
    train(model, adamw, range(3))
    our_model.load_state_dict(model.state_dict())
    ours.load_state_dict(copy.deepcopy(adamw.state_dict()))
    train(our_model, ours, range(3, 6))
    train(model, adamw, range(3, 6))
    assert same(weights_of(our_model), weights_of(model))
    dcp.save(flat(our_model, ours), checkpoint_id=tmp_path)
    next_model.load_state_dict(our_model.state_dict())
    state = flat(next_model, fresh)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(next_model, fresh, state, options=StateDictOptions(flatten_optimizer_state_dict=True))
    for one, optimizer in ((model, adamw), (next_model, fresh)):
        train(one, optimizer, range(6, 8))
    assert same(weights_of(next_model), weights_of(model))


# On one process
def test_param_groups_have_torchs_keys() -> None:
    """Groups have torch's keys, and what torch has not where it is set."""
    (_, adamw), (_, ours) = torchs(), ours_on("owned")
    (theirs,), (group,) = adamw.param_groups, ours.param_groups
    assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    torch.optim.lr_scheduler.OneCycleLR(ours, max_lr=0.1, total_steps=10)
    torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=0.1, total_steps=10)
    assert group.keys() == theirs.keys() and group["betas"] == theirs["betas"]
    (group,) = ours_on("owned", weight_decay_form="cautious")[1].param_groups
    assert group["weight_decay_form"] == "cautious"


def test_masters_of_16_bits_and_groups_as_they_are_are_kept(tmp_path: Path) -> None:
    settings = {"elementwise": {"name": "adamw", **GIVEN}, "exclude": ["*"], "allow_no_matrix": True, "report": False}
    models = [UnevenLM().bfloat16() for _ in range(2)]
    first, second = (LayerWiseOptimizer(model, **settings) for model in models)
    train(models[0], first, range(3))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in zip(models, (first, second)):
        train(model, optimizer, range(3, 6))
    assert same(*(whole_of(optimizer.state_dict()) for optimizer in (first, second)))
    first.param_groups[0]["lr"] = 1e-4
    first.save_state_dict(tmp_path)
    second.load_state_dict_from(tmp_path)
    assert same(*(whole_of(optimizer.state_dict()) for optimizer in (first, second)))


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda saved: saved["param_groups"][0].update(maximize=True), "'maximize' is True, but AdamW here has"),
    (lambda saved: saved["param_groups"][0].update(decoupled_weight_decay=False), f"^load_state_dict: {ADAMS}"),
    (lambda saved: saved["param_groups"][0]["params"].pop(), "group 0: expected number of parameters 11, .* has 10"),
    (
        lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3)),
        r"'exp_avg' as a plain tensor of shape .37, 24., the .* .3,",
    ),
    (
        lambda saved: saved["state"].update({0: {"m": torch.zeros(37, 24)}}),
        r"'exp_avg_sq', 'step'\], the checkpoint has \['m'\]",
    ),
    (lambda saved: saved.update(state={}), r"expected state \['exp_avg', 'exp_avg_sq', 'step'\], .* has \[\]"),
    (lambda saved: saved.pop("state"), "expected a state dict with 'state' and 'param_groups'"),
]


@on_ranks(2)
def test_state_that_does_not_fit_is_refused_first() -> None:
    """State that does not fit is refused before anything changes."""
    (model, adamw), (_, ours) = torchs(), ours_on("owned")
    train(model, adamw, range(1))
    adam = copy.deepcopy(adamw.state_dict())
    adam["param_groups"][0]["decoupled_weight_decay"] = False
    with pytest.raises(ValueError, match=f"^load_state_dict: {ADAMS}"):
        ours_on("fsdp2")[1].load_state_dict(adam)
    _, untouched = ours_on("owned")
    for spoil, message in WRONG:
        saved = copy.deepcopy(adamw.state_dict())
        spoil(saved)
        with pytest.raises(ValueError, match=message):
            ours.load_state_dict(saved)
        assert same(whole_of(ours.state_dict()), whole_of(untouched.state_dict()))
