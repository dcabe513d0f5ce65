#!/bin/sh
# torch 2.13.0: model.set_gradient_divide_factor(1.0), for sums of gradients in place of means, as for losses per token.
#
# Guess: it is for the whole model, as model.set_requires_gradient_sync and the other setters are (recurse=True).
#
# Seen, with two blocks and a head on two ranks: it is for the root's own parameters alone.
# The head's gradient is the sum, and the blocks' gradients are still means, half as large.
# Calling it on each fully_shard module gives sums everywhere. Nothing is said.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

dist.init_process_group("gloo")
mesh, seen = init_device_mesh("cpu", (2,)), {}
for way in ("model", "each"):
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
    for layer in model:
        torch.nn.init.ones_(layer.weight)
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction with a factor of its own
    for module in [model] if way == "model" else shards:
        module.set_gradient_divide_factor(1.0)
    model(torch.ones(1, 1)).sum().backward()  # each gradient is 1 on both ranks
    seen[way] = [param.grad.full_tensor().item() for param in model.parameters()]
    if dist.get_rank() == 0:
        print(f"set on {way}: gradients of block, block and head are {seen[way]}")
assert seen == {"model": [1.0, 1.0, 2.0], "each": [2.0, 2.0, 2.0]}
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
