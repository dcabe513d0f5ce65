#!/bin/sh
# torch 2.13.0: the largest element of a sharded gradient, norm(inf), where a rank holds none of its rows.
#
# Guess: that rank counts as 0, as it does in the norm of order 2, and as in max() of what the others hold.
# A head of one output on two ranks, or a bias of 3 on four, is such a gradient.
#
# Seen: the rank without rows raises "cannot compute the inf norm on an empty tensor because the operation does not have
# an identity". The other ranks raise nothing, so from then on the ranks' code differs.
# clip_grad_norm_(parameters, limit, norm_type=inf) begins with these norms.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
grad = distribute_tensor(torch.tensor([[3.0, -4.0]]), init_device_mesh("cpu", (2,)), [Shard(0)])
mine, seen = {}, [None, None]
for order in (2.0, torch.inf):
    try:
        grad.norm(order)
        mine[order] = "computed"
    except RuntimeError as error:
        mine[order] = str(error).partition(" because")[0]
dist.all_gather_object(seen, mine)
if dist.get_rank() == 0:
    print(f"norms on rank 0: {seen[0]}, on rank 1: {seen[1]}")
assert seen[0] == {2.0: "computed", torch.inf: "computed"}
assert seen[1][2.0] == "computed" and "on an empty tensor" in seen[1][torch.inf]
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
