#!/bin/sh
# torch 2.13.0: torch.amp.GradScaler with tensor-parallel weights, and an overflow on one rank.
#
# Guess: scaler.step() skips the step on all ranks or on none. DTensor exchanges what unscale_ found.
#
# Seen: whether it does depends on the first gradient of the optimizer, of each device and dtype.
#   first a sharded weight                                both ranks skip, and both halve the scale.
#   first a replicated one, such as a norm's with         the rank without the overflow steps and keeps its scale,
#   SequenceParallel, and the overflow in a sharded one   the other one skips and halves it.
# From then on the copies of the norm's weight differ, and so do the scales by which ranks multiply their losses.
# With FSDP2 and tensor parallelism it is the same: a norm's placements are (Shard, Replicate) there.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh, seen = init_device_mesh("cpu", (2,)), {}
placements = {"norm": [Replicate()], "linear": [Shard(0)]}
sizes = {"norm": (4,), "linear": (4, 4)}
for order in (("linear", "norm"), ("norm", "linear")):
    params = {
        name: torch.nn.Parameter(distribute_tensor(torch.ones(sizes[name]), mesh, placements[name])) for name in order
    }
    optimizer = torch.optim.SGD(params.values(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.tensor(1.0))
    for name, param in params.items():
        grad = torch.ones(sizes[name])
        if name == "linear":
            grad[3, 0] = torch.inf  # in the rows of rank 1
        param.grad = distribute_tensor(grad, mesh, placements[name])
    scaler.step(optimizer)
    scaler.update()
    mine = {"norm": params["norm"].to_local()[0].item(), "scale": scaler.get_scale()}
    seen[order[0]] = [None, None]
    dist.all_gather_object(seen[order[0]], mine)
    if dist.get_rank() == 0:
        print(f"first {order[0]}: rank 0 has {seen[order[0]][0]}, rank 1 has {seen[order[0]][1]}")
assert seen["linear"] == [{"norm": 1.0, "scale": 2.0}] * 2
assert seen["norm"] == [{"norm": 0.75, "scale": 4.0}, {"norm": 1.0, "scale": 2.0}]
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
