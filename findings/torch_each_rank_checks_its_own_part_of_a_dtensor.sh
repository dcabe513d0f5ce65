#!/bin/sh
# torch 2.13.0: `if grad.isnan().any(): skip` with sharded gradients, and float(norm) of their norm.
#
# Guess: every rank gets the same answer, that of the whole gradient, as torch.equal gives.
#
# Seen: any(), sum(), max() and norm() are not reduced until another operation needs it. bool(), float() and item() do
# not (pytorch issue 166638), so each rank gets the answer of its own rows.
# With a NaN in the rows of rank 1, rank 1 skips the step and rank 0 makes it, or waits for rank 1 in the next exchange.
# full_tensor() before item() gives all ranks the answer.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh, seen = init_device_mesh("cpu", (2,)), [None, None]
bad = distribute_tensor(torch.tensor([[1.0, 2.0], [torch.nan, 4.0]]), mesh, [Shard(0)])
good = distribute_tensor(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), mesh, [Shard(0)])
mine = {
    "has a NaN": bool(bad.isnan().any()),
    "the same, gathered": bool(bad.isnan().any().full_tensor()),
    "norm": float(good.norm()),
    "sum": good.sum().item(),
    "max": good.max().item(),
}
dist.all_gather_object(seen, mine)
if dist.get_rank() == 0:
    print(f"rank 0: {seen[0]}\nrank 1: {seen[1]}")
assert seen[0] == {"has a NaN": False, "the same, gathered": True, "norm": 3.0, "sum": 3.0, "max": 3.0}
assert seen[1] == {"has a NaN": True, "the same, gathered": True, "norm": 4.0, "sum": 4.0, "max": 4.0}
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
