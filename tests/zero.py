"""What tests under DeepSpeed share: configurations of both storages, a training loop, and single-process references."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import torch_autocast
from torch import Tensor, nn

from lwopt_backend.integrations import deepspeed_zero
from tests.models import MATRICES, UnevenLM, batch

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ROWS = 8  # of the global batch, at every world size
OWN_ROWS = 24  # the same where ranks have their own; divides into 1 to 4 ranks and 1 or 2 micro-batches
OWNED = {"storage": "owned", "bucket_mb": 0.004}  # several buckets of the small model

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "bf16+fp32": {**BF16, **IN_FP32},
    "fp16": FP16,
    "fp16+fp32": {**FP16, **IN_FP32},
    "autocast": AUTOCAST,
}


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


def settings_for(
    storage: str, stage: int, precision: str = "fp32", *, rows: int = ROWS, accumulation: int = 1, **params: Any
) -> dict[str, Any]:
    """A ds_config of either storage in which matrices travel; ``rows`` are those of a rank in a step."""
    if storage == "owned":
        params = {**OWNED, **params}
    else:
        params = {"policy": "balance" if stage in (1, 2) else "auto", "bucket_numel": 2000, **params}
    settings = config(stage, rows=rows // accumulation, accumulation=accumulation, **params)
    if storage == "owned":
        settings["zero_optimization"] = {"stage": stage}
    return settings | PRECISIONS[precision]


def there_is(storage: str, stage: int, **_: Any) -> bool:
    """For tables of both storages: the owned one is for stages 0 to 2."""
    return storage != "owned" or stage < 3


@contextlib.contextmanager
def engine_for(settings: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> Iterator[Any]:
    """A real engine on this rank's model, destroyed afterwards so that the rank can be borrowed again.

    In fp16 too: a CPU without units for it computes it all the same, but says that it does not.
    """
    deepspeed_zero.register()
    model = model or UnevenLM()
    kwargs.setdefault("model_parameters", list(model.parameters()))
    engine, accelerator = None, deepspeed.accelerator.get_accelerator()
    if "fp16" in settings:
        accelerator.is_fp16_supported = lambda: True
    try:
        engine, *_ = deepspeed.initialize(model=model, config=settings, **kwargs)
        yield engine
    finally:
        if "fp16" in settings:
            del accelerator.is_fp16_supported
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
        if engine is not None:
            engine.destroy()


def build(settings: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> None:
    with engine_for(settings, model, **kwargs):
        pass


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


def batch_shares(step: int, count: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    tokens, targets = batch(step, rows)
    return list(zip(tokens.chunk(count), targets.chunk(count)))


def own_rows(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's ``count`` micro-batches where every rank has its own. With ``ExactLM`` sums over ranks are exact."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return batch_shares(step, count * world_size, OWN_ROWS)[rank::world_size]


class Reference:
    """torch.optim.Muon and torch.optim.AdamW on one process."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        muon: dict[str, Any] = MUON,
        adamw: dict[str, Any] = ADAMW,
        matrices: Sequence[str] = MATRICES,
    ) -> None:
        self.model = model or UnevenLM()
        named = dict(self.model.named_parameters())
        self.muon = torch.optim.Muon([named.pop(name) for name in matrices], **muon)
        self.adamw = torch.optim.AdamW(list(named.values()), **adamw)

    def train(self, steps: int | range, *, parts: int = 1, clip: float = 0.0) -> list[float]:
        """Train on the global batches, each in ``parts`` micro-batches; the gradient norms before clipping."""
        norms = []
        for step in range(steps) if isinstance(steps, int) else steps:
            for tokens, targets in batch_shares(step, parts):
                (self.model(tokens, targets) / parts).backward()
            norms.append(self.step(clip))
        return norms

    def train_on_all(self, steps: int | range, *, parts: int = 1) -> None:
        """Train on what all ranks have by ``own_rows``."""
        world_size = torch.distributed.get_world_size()
        for step in range(steps) if isinstance(steps, int) else steps:
            for tokens, targets in batch_shares(step, parts * world_size, OWN_ROWS):
                (self.model(tokens, targets) / parts).backward()
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad.div_(world_size)
            self.step()

    def step(self, clip: float = 0.0) -> float:
        """A step on the gradients that there are; their norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip or float("inf")))
        for optimizer in (self.muon, self.adamw):
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Without its counter."""
        optimizer = self.muon if name in MATRICES else self.adamw
        state = optimizer.state[self.model.get_parameter(name)]
        return {key: value for key, value in state.items() if key != "step"}


@functools.cache
def trained(steps: int, parts: int = 1, amsgrad: bool = False) -> Reference:
    """A reference after ``steps``, computed once in a process, for tests that only look at it."""
    single = Reference(adamw={**ADAMW, "amsgrad": amsgrad})
    single.train(steps, parts=parts)
    return single


class Masters(Reference):
    """fp32 masters of a 16-bit model on one process. DeepSpeed rounds the model first and takes the masters from that.

    Gradients of micro-batches add up in fp32, or in the model's dtype.
    """

    def __init__(self, dtype: torch.dtype, in_fp32: bool = True) -> None:
        super().__init__(UnevenLM().to(dtype).float())
        self.low = UnevenLM().to(dtype)
        self.in_fp32 = in_fp32

    def advance(
        self, step: int, accumulation: int = 1, *, clip: float = 0.0, scale: float = 1.0, factor: float = 1.0
    ) -> float:
        """A step with the loss times ``factor`` and, until gradients are summed, ``scale``; the norm before a clip."""
        sums: dict[Tensor, Tensor] = {}
        for rows in batch_shares(step, accumulation):
            (self.low(*rows) / accumulation * (scale * factor)).backward()
            for param in self.low.parameters():
                grad = param.grad.float() if self.in_fp32 else param.grad
                sums[param] = sums[param] + grad if param in sums else grad
                param.grad = None
        for master, param in zip(self.model.parameters(), self.low.parameters()):
            master.grad = sums[param].float() / scale
        norm = self.step(clip)
        with torch.no_grad():
            for master, param in zip(self.model.parameters(), self.low.parameters()):
                param.copy_(master)
        return norm


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
