#!/bin/sh
# torch 2.13.0: the sum of the norms of a sharded matrix's columns, a group lasso or the scale of a normalized update.
#
# Guess: matrix.norm(dim=0).sum() of a DTensor is that of the matrix, after full_tensor() at the latest.
#
# Seen: each rank sums the norms of its own rows' columns, and then the ranks' sums are put together as if they were one
# norm. Columns (3, 0) and (0, 4) on two ranks have norms 3 and 4: the sum is 5 in place of 7.
# With rows and columns exchanged, whose norms no rank shares, it is right.
# So is the mean of the norms, and so is the sum after .full_tensor().

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
sharded = distribute_tensor(matrix, init_device_mesh("cpu", (2,)), [Shard(0)])
seen = {
    "tensor": matrix.norm(dim=0).sum().item(),
    "DTensor": sharded.norm(dim=0).sum().full_tensor().item(),
    "DTensor, mean": 2 * sharded.norm(dim=0).mean().full_tensor().item(),
    "DTensor, gathered first": sharded.norm(dim=0).full_tensor().sum().item(),
    "DTensor, rows": sharded.norm(dim=1).sum().full_tensor().item(),
}
if dist.get_rank() == 0:
    print("sum of norms:", seen)
assert [name for name, value in seen.items() if value != 7.0] == ["DTensor"] and seen["DTensor"] == 5.0
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
