#!/bin/sh
# torch 2.13.0: ScheduleInterleavedZeroBubble of stages in DistributedDataParallel, 2 pipelines side by side.
#
# Guess: DDP averages gradients of the data-parallel ranks, as it does with Schedule1F1B and ScheduleInterleaved1F1B.
# PipelineStage knows DDP: it calls no_sync() for all micro-batches but the last, and prepares the reducer for that one.
#
# Seen: only stage 0 is averaged. The other stages keep each rank's own gradients, without an error or a warning.
# They compute gradients of weights by torch.autograd.grad, which does not run the hooks by which DDP reduces.
# Copies of a stage then drift apart.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat >seen.py <<'PY'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel


def run(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4")
    dist.init_process_group("gloo", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    place, data, pipeline = mesh.get_local_rank("stage"), mesh.get_local_rank("data"), mesh["stage"].get_group()
    seen = {}
    for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
        torch.manual_seed(0)
        model = [torch.nn.Linear(4, 4, bias=False) for _ in range(4)]
        stages = []
        for number in (place, place + 2):
            wrapped = DistributedDataParallel(model[number], process_group=mesh["data"].get_group())
            stages.append(PipelineStage(wrapped, number, 4, torch.device("cpu"), group=pipeline))
        schedule = kind(stages, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(data))
        if place == 0:
            schedule.step(rows)
        else:
            schedule.step(target=-rows)
        mine = {number: model[number].weight.grad for number in (place, place + 2)}
        everyone = [None] * 4
        dist.all_gather_object(everyone, mine)
        for one, other in (everyone[:2], everyone[2:]):
            seen.update({(kind.__name__, number): torch.equal(one[number], other[number]) for number in one})
    if rank == 0:
        for (kind, number), equal in sorted(seen.items()):
            print(f"{kind}, stage {number}: gradients of its two ranks are {'equal' if equal else 'unlike'}")
        assert all(equal == (kind == "ScheduleInterleaved1F1B" or number == 0) for (kind, number), equal in seen.items())


if __name__ == "__main__":
    mp.spawn(run, nprocs=4)
PY
python -W ignore seen.py
