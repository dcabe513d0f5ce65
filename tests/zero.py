"""What tests under DeepSpeed's ZeRO share: configurations, a training loop, and single-process references."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from lwopt_backend.integrations import deepspeed_zero
from tests.models import MATRICES, UnevenLM, batch

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ROWS = 8  # of the global batch, at every world size


def config(stage: int = 2, *, accumulation: int = 1, clip: float = 0.0, rows: int = 4, **params: Any) -> dict[str, Any]:
    """A ds_config with our optimizer entry; ``params`` are further options of it."""
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
        "optimizer": {"type": "LayerWiseMuon", "params": {**MUON, "adamw": ADAMW, "report": False, **params}},
        "steps_per_print": 1_000_000,
    }


@contextlib.contextmanager
def engine_for(settings: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> Iterator[Any]:
    """A real engine on this rank's model, destroyed afterwards so that the rank can be borrowed again."""
    deepspeed_zero.register()
    model = model or UnevenLM()
    kwargs.setdefault("model_parameters", list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, config=settings, **kwargs)
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, steps: int | range, *, same_rows: bool = False) -> list[float]:
    """Train on the global batches of ``steps``, every rank on its share or all on all rows; this rank's losses."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        shares = batch_shares(step, accumulation * (1 if same_rows else world_size))
        for part in range(accumulation):
            loss = engine(*shares[part if same_rows else part * world_size + rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def batch_shares(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    tokens, targets = batch(step, ROWS)
    return list(zip(tokens.chunk(count), targets.chunk(count)))


class Reference:
    """torch.optim.Muon and torch.optim.AdamW on one process."""

    def __init__(self, model: nn.Module | None = None, *, muon: dict[str, Any] = MUON, adamw: dict[str, Any] = ADAMW):
        self.model = model or UnevenLM()
        named = dict(self.model.named_parameters())
        self.muon = torch.optim.Muon([named.pop(name) for name in MATRICES], **muon)
        self.adamw = torch.optim.AdamW(list(named.values()), **adamw)

    def train(self, steps: int | range, *, parts: int = 1, clip: float = 0.0) -> list[float]:
        """Train on the global batches, each in ``parts`` micro-batches; the gradient norms before clipping."""
        norms = []
        for step in range(steps) if isinstance(steps, int) else steps:
            for tokens, targets in batch_shares(step, parts):
                (self.model(tokens, targets) / parts).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip or float("inf"))))
            for optimizer in (self.muon, self.adamw):
                optimizer.step()
                optimizer.zero_grad()
        return norms


@contextlib.contextmanager
def newton_schulz_in_float32() -> Iterator[None]:
    """Make torch.optim.Muon iterate in fp32; it has no option for that. Written out here, not taken from our rule."""
    module = torch.optim._muon
    original = module._zeropower_via_newtonschulz

    def iterate(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if grad.size(0) > grad.size(1) else x

    module._zeropower_via_newtonschulz = iterate
    try:
        yield
    finally:
        module._zeropower_via_newtonschulz = original


def full_weights(engine: Any) -> dict[str, Tensor]:
    """The fp32 master weights, whole, by name; at stage 0 the parameters themselves."""
    if engine.zero_optimization_stage() == 0:
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    get: Callable[[Tensor], Tensor] = deepspeed.utils.safe_get_full_fp32_param
    return {name: get(param).clone() for name, param in engine.module.named_parameters()}


def largest_difference(ours: dict[str, Tensor], reference: nn.Module) -> float:
    return max(float((ours[name] - param.detach()).abs().max()) for name, param in reference.named_parameters())


def gather_named(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """All ranks' tensors by name; fails if ranks that have the same name do not have the same tensor."""
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, mine)
    whole: dict[str, Tensor] = {}
    for of_rank in of_ranks:
        for name, tensor in of_rank.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"{name} differs between ranks that have it"
    return whole
