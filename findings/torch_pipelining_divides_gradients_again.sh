#!/bin/sh
# torch 2.13.0: torch.distributed.pipelining, and several schedule.step() calls before one optimizer.step().
#
# Guess: the gradients of the calls add up, as those of several backward() calls do.
#
# Seen: each call divides all that is in `grad` by the number of micro-batches, the sum of earlier calls included.
# Three calls, each with a gradient of 1 and 4 micro-batches, leave 1.3125 in place of 3: 1 + 1/4 + 1/16.
# So the last call counts nearly alone, and the others hardly train.
# It is so with GPipe and 1F1B, and with FSDP2 inside.
# With scale_grads=False and the division in the loss function the sum is 3.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
MICRO_BATCHES = 4


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


def share_of_mean(output: Tensor, target: Tensor) -> Tensor:
    return mean(output, target) / MICRO_BATCHES


def gradients(kind: type[ScheduleGPipe | Schedule1F1B], *, sharded: bool, **options: object) -> list[float]:
    """The gradient of a weight after each of three calls. One call alone gives 1."""
    model = nn.Linear(1, 1, bias=False)
    if sharded:
        fully_shard(model)
    schedule = kind(PipelineStage(model, 0, 1, torch.device("cpu")), MICRO_BATCHES, **options)
    found = []
    for _ in range(3):
        schedule.step(torch.ones(8, 1), target=torch.zeros(8, 1))
        gradient = model.weight.grad
        found.append(gradient.full_tensor().item() if sharded else gradient.item())
    return found


for kind in (ScheduleGPipe, Schedule1F1B):
    for sharded in (False, True):
        name = f"{kind.__name__}{' with FSDP2' if sharded else ''}"
        default = gradients(kind, sharded=sharded, loss_fn=mean)
        unscaled = gradients(kind, sharded=sharded, loss_fn=share_of_mean, scale_grads=False)
        print(f"{name}: {default} after each call; with scale_grads=False {unscaled}")
        assert default == [1.0, 1.25, 1.3125] and unscaled == [1.0, 2.0, 3.0]
PY
