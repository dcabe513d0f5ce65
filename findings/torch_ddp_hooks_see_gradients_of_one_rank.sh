#!/bin/sh
# torch 2.13.0: Tensor.register_post_accumulate_grad_hook, with which torch's tutorial steps an optimizer in backward.
#
# Guess: "after grad is accumulated" means after it is averaged, under DistributedDataParallel as under fully_shard.
#
# Seen, with gradients of 1 and 2 on two ranks:
#   fully_shard               the hook gets the mean, 1.5, on both.
#   DistributedDataParallel   the hook gets 1 on rank 0 and 2 on rank 1. The mean arrives in `grad` afterwards.
# An optimizer that steps in the hook trains each rank on its own data. Copies drift apart, and no call says so.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, mesh, seen = dist.get_rank(), init_device_mesh("cpu", (2,)), {}
for name in ("DDP", "fully_shard"):
    model = torch.nn.Linear(1, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    model = DistributedDataParallel(model) if name == "DDP" else fully_shard(model, mesh=mesh)
    (param,) = model.parameters()
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    shard, grad = (tensor.to_local() if name != "DDP" else tensor for tensor in (param.detach(), param.grad))
    seen[name] = [None, None]
    dist.all_gather_object(seen[name], {"step": -shard[0, 0].item(), "grad": grad[0, 0].item()})
    if rank == 0:
        print(f"{name}: rank 0 has {seen[name][0]}, rank 1 has {seen[name][1]}")
assert seen["DDP"] == [{"step": 1.0, "grad": 1.5}, {"step": 2.0, "grad": 1.5}]
assert seen["fully_shard"] == [{"step": 1.5, "grad": 1.5}] * 2
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
