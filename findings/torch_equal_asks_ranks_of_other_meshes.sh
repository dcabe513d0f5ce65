#!/bin/sh
# torch 2.13.0: torch.equal of DTensors on two meshes side by side, such as two pipeline stages or two expert groups.
#
# Guess: it compares a with b, on the ranks of their mesh.
#
# Seen: what the ranks found is reduced over all ranks of the job, not over those of the mesh.
# Here each rank has a mesh of its own. On rank 0 the tensors are equal and on rank 1 they are not: both get False.
# So one stage that differs after a resume makes all stages look different, and a stage that compares alone waits for
# the others. On one mesh of all ranks nothing shows.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
cat > seen.py << 'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank, seen = dist.get_rank(), [None, None]
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))["data"]
a, b = torch.zeros(4), torch.full((4,), float(rank))
one, other = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(0)])
dist.all_gather_object(seen, {"tensors": torch.equal(a, b), "DTensors": torch.equal(one, other)})
if rank == 0:
    print(f"equal on rank 0: {seen[0]}, on rank 1: {seen[1]}")
assert seen == [{"tensors": True, "DTensors": False}, {"tensors": False, "DTensors": False}]
dist.destroy_process_group()
PY
python -W ignore -m torch.distributed.run --nproc_per_node 2 seen.py 2> errors || { cat errors; exit 1; }
