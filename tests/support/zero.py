"""What tests under DeepSpeed share: configurations of both storages, a training loop, and single-process references."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from lwopt_backend.integrations import deepspeed_zero
from tests.support.models import UnevenLM
from tests.support.ranks import gathered
from tests.support.references import (
    ADAMW,
    MUON,
    OWN_ROWS,
    ROWS,
    Reference,
    batch_shares,
    clip_factor,
    full_weights,
    newton_schulz_in_float32,
)
from tests.support.references import Masters as Masters

# DeepSpeed's default of a bucket is 5e8 elements, 2 GB, of which it allocates one or two in every backward pass, or in
# every engine of stage 3; and deterministic algorithms fill with NaN what is allocated. The default in tests holds all
# gradients of a model too.
_BUCKET = DeepSpeedZeroConfig.model_fields["reduce_bucket_size"]
DEEPSPEEDS_BUCKET, _BUCKET.default = int(_BUCKET.default), 1_000_000
DeepSpeedZeroConfig.model_rebuild(force=True)

OWNED = {"storage": "owned", "bucket_mb": 0.004}  # several buckets of the small model

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "bf16+fp32": {**BF16, **IN_FP32}, "fp16": FP16}
PRECISIONS |= {"fp16+fp32": {**FP16, **IN_FP32}, "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}}


def config(stage: int = 2, *, accumulation: int = 1, clip: float = 0.0, rows: int = 4, **params: Any) -> dict[str, Any]:
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
    if params.get("clip"):  # norms are summed in another order, which a bf16 iteration would turn into more
        params["ns_dtype"] = "float32"
    settings = config(stage, rows=rows // accumulation, accumulation=accumulation, **params)
    if storage == "owned":
        settings["zero_optimization"] = {"stage": stage}
    return settings | PRECISIONS[precision]


def own_settings(storage: str, stage: int, accumulation: int = 1) -> dict[str, Any]:
    """Where every rank has its ``own_rows``."""
    return settings_for(storage, stage, rows=OWN_ROWS // torch.distributed.get_world_size(), accumulation=accumulation)


def there_is(storage: str, stage: int, **_: Any) -> bool:
    """For tables of both storages: the owned one is for stages 0 to 2."""
    return storage != "owned" or stage < 3


@contextlib.contextmanager
def engine_for(settings: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> Iterator[Any]:
    """A real engine on this rank's model, destroyed afterwards so that the rank can be borrowed again. In fp16 too: a
    CPU without units for it computes it anyway, but says that it does not."""
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


def train(engine: Any, steps: int | range, *, same_rows: bool = False, rows: int = ROWS) -> list[float]:
    """Train on the global batches of ``steps``, every rank on its share or all on all rows; this rank's losses. Ranks
    that share a model's layers have the same rows."""
    group = engine.seq_data_parallel_group
    rank, count = (0, 1) if same_rows else (torch.distributed.get_rank(group), torch.distributed.get_world_size(group))
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        micro_batches = batch_shares(step, engine.gradient_accumulation_steps() * count, rows)[rank::count]
        if engine.pipeline_parallelism:
            losses.append(engine.train_batch(iter(micro_batches)).item())
            continue
        for micro_batch in micro_batches:
            loss = engine(*micro_batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def train_step(engine: Any, step: int) -> None:
    train(engine, range(step, step + 1))


def own_rows(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's ``count`` micro-batches where every rank has its own. With ``ExactLM`` sums over ranks are exact."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return batch_shares(step, count * world_size, OWN_ROWS)[rank::world_size]


def clips_of(engine: Any) -> list[float]:
    """What the gradients of the last step were multiplied by, for a reference that clips alike."""
    if not (limit := engine.gradient_clipping()):
        return []
    stage = engine.zero_optimization_stage() if hasattr(engine.optimizer, "unscale_and_clip_grads") else 0
    return [clip_factor(limit, float(engine.get_global_grad_norm()), stage)]


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 2**10  # of the reference, for fp16


class Beside:
    """Engines, and one process that steps on the gradients which DeepSpeed has reduced, whatever ranks share. Those
    have to be the gradients of the whole batch, which the process computes, and the weights its weights."""

    def __init__(
        self,
        single: Reference,
        settings: dict[str, Any],
        *,
        train_step: Callable[[Any, int], None] = train_step,
        whole_batch: Callable[[int], Any] = lambda step: batch_shares(step, 1)[0],
        whole_name: Callable[[str], str] = str,
        factor: float = 1.0,
    ) -> None:
        """``factor`` is of the gradients that DeepSpeed reduces, where it is known not to be 1."""
        self.single, self.train_step = single, train_step
        self.whole_batch, self.whole_name, self.factor = whole_batch, whole_name, factor
        self.clip = single.clip = settings["gradient_clipping"]
        self.autocasts = "torch_autocast" in settings
        self.dtype = next((DTYPES[key] for key in DTYPES if key in settings), None)  # of weights and gradients
        self.rounds_to = torch.bfloat16 if self.autocasts else self.dtype

    def start(self, engine: Any) -> None:
        """A tied weight's other name may not be there."""
        missing, _ = self.single.model.load_state_dict(self.whole(full_weights(engine)), strict=False)
        assert not set(missing) & dict(self.single.model.named_parameters()).keys()

    def train(self, engine: Any, steps: range) -> None:
        take_step, given = engine._take_model_step, {}

        def note_and_step(*args: Any) -> None:
            get = (lambda param: param.grad) if engine.zero_optimization_stage() == 0 else safe_get_full_grad
            scale = getattr(engine.optimizer, "cur_scale", 1.0)
            params = engine.module.named_parameters()
            given.update(self.whole({name: get(param).float() / scale for name, param in params}))
            take_step(*args)

        engine._take_model_step = note_and_step
        unit = 1e-6 if self.rounds_to is None else torch.finfo(self.rounds_to).eps / 2  # of rounding
        for step in steps:
            self._backward(step)
            self.train_step(engine, step)
            whole = {name: self.factor * param.grad for name, param in self.single.model.named_parameters()}
            for name, grad in whole.items():  # a bias of few elements cancels most of what it sums
                apart = float((given[name] - grad).norm() / grad.norm())
                assert apart <= 8 * unit, (name, apart)
            along = sum(float((given[name] * grad).sum()) for name, grad in whole.items())
            assert along == pytest.approx(sum(float(grad.square().sum()) for grad in whole.values()), rel=unit)
            for name, param in self.single.model.named_parameters():
                param.grad.copy_(given[name])
            with newton_schulz_in_float32() if self.clip else contextlib.nullcontext():
                self.single.step(clips=clips_of(engine))
            norm = self.single.norm
            assert self.clip == 0.0 or norm > self.clip, "the clip must bite to be tested"
            assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=1e-3 if self.rounds_to else 1e-5)
        engine._take_model_step = take_step

    def _backward(self, step: int) -> None:
        """The whole batch's gradients, by the engine's arithmetic: what is left is the order of its sums."""
        params = dict(self.single.model.named_parameters())
        low = {} if self.dtype is None else {name: param.to(self.dtype) for name, param in params.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocasts):
            loss = torch.func.functional_call(self.single.model, low, self.whole_batch(step))
        (loss.float() * LOSS_SCALE).backward()
        for param in params.values():
            param.grad /= LOSS_SCALE

    def check(self, engine: Any, limit: float = 0.0) -> None:
        self.single.check(self.whole(full_weights(engine)), limit)

    def train_and_resume(self, new_engine: Callable[[], Any], folder: Path) -> Any:
        """Two steps, and one of another engine that has loaded what was saved; that engine."""
        with new_engine() as engine:
            self.start(engine)
            self.train(engine, range(2))
            self.check(engine)
            engine.save_checkpoint(folder)
        with new_engine() as engine:
            self.train_step(engine, 7)  # what it had before must not matter
            path, _ = engine.load_checkpoint(folder)
            assert path is not None and engine.global_steps == 2
            self.train(engine, range(2, 3))
            self.check(engine)
        return engine

    def whole(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ranks' tensors by name: of shards, the whole, and of anything else what all have that have the name."""
        of_ranks = gathered({self.whole_name(name): tensor.float().clone() for name, tensor in mine.items()})
        whole = {}
        for name, param in self.single.model.named_parameters():
            tensors = [of_rank[name] for of_rank in of_ranks if name in of_rank]
            cut = [dim for dim, size in enumerate(param.shape) if size != tensors[0].shape[dim]]
            count = param.numel() // tensors[0].numel()
            shards = [tensors[n::count] for n in range(count)]
            for alike in shards:
                assert all(torch.equal(tensor, alike[0]) for tensor in alike), f"{name} differs between ranks"
            whole[name] = tensors[0]
            for dim in cut:
                fused = getattr(self.single.model.get_submodule(name.rpartition(".")[0]), "parts", 1)
                parts = zip(*(alike[0].chunk(fused, dim) for alike in shards))
                whole[name] = torch.cat([shard for of_part in parts for shard in of_part], dim)
        return whole
